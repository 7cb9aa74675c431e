// generate.h - texts from the model, many at once: continuous batching in slots - arXiv:2309.06180
//   1. each free slot takes the next text: a run reads the prompts of adjacent slots, padded to the
//      longest, and fills the slots' parts of the key/value cache. If a prompt was just read, its
//      keys and values are copied from the slot that has them
//   2. the logits of a prompt's last row pick its text's first token
//   3. one run reads, in every slot at its own position, the last token that was picked, followed
//      by a draft's guesses (sampler.h), if there is a draft
//   4. each slot's logits pick its next token, or judge the guesses. A text ends with a token of
//      `ends`, which is not printed, with the wanted number of tokens, or when its slot is full.
//      Then the slot is free; repeat from 1
//   Token i of a text uses uniform number i of the text's stream. So a text does not depend on its
//   slot or on the rest of the batch, except through the rounding of its logits.
//   All ranks of all axes have the same texts, or each place along dp has its own (own_texts).
//   Ranks of the last stage pick tokens, and one of them tells the others.
//   Cost: a run reads all weights, whatever the number of slots. The cache takes slots * positions
//         * 2 * NKV * HS elements a layer, and less with latent attention (cached_elements()).
#pragma once
#include <functional>
#include <set>
#include "../action.h"
#include "../comm/comm.h"
#include "../comm/group.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/memory.h"
#include "../ops/rand.h"
#include "../ops/types.h"
#include "../sizes.h"
#include "../step.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "sampler.h"

namespace llmc {

// ----------------------------------------------------------------------------
// the request

// How tokens are picked: see sampler.h.
struct Sampling {
    float temperature = 1, top_p = 1;
    int top_k = 0;
    uint64_t seed = 0;
    int64_t step = 0;
    int64_t number = 0;      // which of several samples at this step
    std::set<int> ends = {}; // tokens that end a text
    bool emits_end = false;  // emit these tokens too
    // Called before each run; true ends all texts. It returns the same on all ranks; with own_texts
    // it answers for its rank alone, and any_runs() combines the answers.
    std::function<bool()> stops = nullptr;
    Draft* draft = nullptr; // guesses tokens ahead; null: no speculation
    bool own_texts = false; // each place along dp has its own texts, the same on its ranks
};

// The random stream of a sample. Each sample of a step has its own stream, and a resumed run has
// the same streams.
inline uint64_t sample_stream(const Sampling& how) {
    std::string name = concat("sample.", how.step);
    if (how.number)
        name += concat(".", how.number);
    return fnv1a(name);
}

// A text to be generated: its prompt, and the stream of its uniform numbers.
struct Text {
    const std::vector<int>* prompt; // consecutive texts that share this pointer read it once
    uint64_t stream;
    size_t cached = 0; // prompt tokens that its slot has read before; only for a single text
    int adapter = -1;  // its set of adapters; -1: the base alone
};

// The reason why a text ended: a token of `ends`, the wanted count, a full cache, or a stop.
enum class Ended : uint8_t { BY_TOKEN, BY_COUNT, BY_CACHE, BY_STOP };

// ----------------------------------------------------------------------------
// a run of the plan

// Make tokens (B,n) the batch of a plan. Sequence b, in slot first_slot + b, has read past[b]
// tokens before. The memory is laid out as LOAD's: tokens, targets, positions, documents' starts (N
// each), then the keys' positions. Shorter prompts are padded: the caller then sets batch.lengths.
template <typename T, typename S>
void generate_batch(Trainer<T, S>& t, int plan, const int* tokens, size_t B, size_t n,
                    const size_t* past, size_t first_slot = 0) {
    const Plan& p = t.plans[plan];
    t.plan = plan;
    t.at = 0;
    size_t N = p.rows();
    size_t seen = 0;
    int* home = address<int>(t, {Kind::TOKENS, -1, 0});
    // Fill the host's copy. Targets stay as they are: no loss is computed.
    int* host = host_side(home, t.host.staging, t.ctx.where);
    int* positions = host + 2 * N;
    int* doc_start = host + 3 * N;
    int* keys = host + 4 * N;

    // Each token knows its position, and sees all keys of its sequence.
    for (size_t b = 0; b < B; b++) {
        for (size_t i = 0; i < n; i++) {
            host[b * n + i] = tokens[b * n + i];
            positions[b * n + i] = int(past[b] + i);
            doc_start[b * n + i] = 0;
        }
        seen = std::max(seen, past[b] + n);
    }
    for (size_t k = 0; k < B * seen; k++)
        keys[k] = int(k % seen);

    // Copy only what is filled: the keys' positions come last.
    copy_in(home, host, (4 * N + B * seen) * sizeof(int), t.ctx.where);
    t.ctx.batch = {B, n, home, nullptr, home + 2 * N, home + 3 * N};
    t.ctx.batch.first_slot = first_slot;
    t.ctx.batch.capacity = p.cache;
    t.ctx.batch.seen = seen;
    t.ctx.batch.places = positions;
    t.ctx.batch.key_positions = home + 4 * N;
}

// The same for one sequence: tokens (n) at positions [past, past + n).
template <typename T, typename S>
void generate_batch(Trainer<T, S>& t, int plan, const int* tokens, size_t n, size_t past) {
    generate_batch(t, plan, tokens, 1, n, &past);
}

// ----------------------------------------------------------------------------
// logits and tokens

// The logits of several rows, on the ranks of the last stage. Each contributes its share of the
// padded vocabulary. The memory is allocated once.
template <typename T> struct LogitRows {
    size_t V, share;            // share: Vp / tp
    bool here = false;               // whether this rank belongs to the last stage
    std::vector<T> stored = {};      // (B,share)
    std::vector<T> all = {};         // (tp,B,share)
    std::vector<float> logits = {};  // (B,V)

    float* row(size_t b) { return logits.data() + b * V; }
};

// Allocate room for B rows.
template <typename T, typename S>
LogitRows<T> make_logit_rows(const Trainer<T, S>& t, size_t B) {
    size_t V = t.model.shape.V;
    size_t Vp = t.model.shape.Vp();
    LogitRows<T> rows = {V, Vp / size_t(t.layout.tp.size)};
    // Other stages pick no token, and need no room.
    rows.here = is_mine(t.layout, t.model, t.model.head());
    if (!rows.here) return rows;
    rows.stored.resize(B * rows.share);
    rows.all.resize(B * Vp);
    rows.logits.resize(B * V);
    return rows;
}

// Gather the logits of the plan that has just run.
template <typename T, typename S>
void bring_logits(const Trainer<T, S>& t, LogitRows<T>& rows, size_t B) {
    if (!rows.here) return;
    size_t share = rows.share;
    size_t V = rows.V;
    const T* home = address<const T>(t, {Kind::LOGITS, -1, 0});
    copy_out(rows.stored.data(), home, B * share * sizeof(T), t.ctx.where);
    all_gather(t.comms.tp, rows.all.data(), rows.stored.data(), B * share, Cpu{});

    // The ranks' shares follow each other: join them for each sequence.
    #pragma omp parallel for
    for (size_t b = 0; b < B; b++)
        for (size_t first = 0, rank = 0; first < V; first += share, rank++) {
            const T* from = rows.all.data() + (rank * B + b) * share;
            for (size_t v = 0; v < share && first + v < V; v++)
                rows.logits[b * V + first + v] = float(to_acc(from[v]));
        }
}

// ----------------------------------------------------------------------------
// slots

// A text that is being generated.
struct TextSlot {
    int64_t text = -1; // the text's number; -1: the slot is free
    size_t past = 0;   // tokens whose keys and values are in the cache
    size_t picked = 0; // tokens picked so far
    std::vector<int> tokens = {}; // the prompt, then picked tokens, then guesses
    // (V) each: the distribution from which a guess was drawn
    std::vector<std::vector<double>> guesses = {};
};

// Copy the keys and values of a slot's first n positions to another slot.
template <typename T, typename S>
void copy_slot(Trainer<T, S>& t, int plan, size_t from, size_t to, size_t n) {
    if (from == to) return;
    size_t row = cached_elements(t.ctx.shape);
    size_t slot = t.plans[plan].cache * row;
    size_t bytes = n * row * sizeof(T);
    for (int l = 0; l < t.model.layers(); l++)
        if (T* cache = address<T>(t, {Kind::CACHE, l}))
            copy_rows(cache + to * slot, bytes, cache + from * slot, bytes, bytes, 1, t.ctx.where);
}

// All slots of a plan, and the texts that wait for a slot.
template <typename T, typename S> struct Generation {
    Trainer<T, S>& t;
    int plan;
    const std::vector<Text>& texts;
    size_t count; // most tokens of a text
    const Sampling& how;
    const Comm& group; // the ranks that have these texts
    // The rank among them that sends its tokens to all. Another one may have rounded a logit to
    // other bits: it would continue with another text, or wait in a run that no other rank starts.
    int root;

    // Progress.
    std::vector<TextSlot> slots = {};
    size_t next_text = 0;
    LogitRows<T> rows = {};
    // Room for the sampler, by slot.
    std::vector<std::vector<std::pair<float, int>>> orders = {};
    // The prompt that was read last, the slot that has it, and the logits of its last row.
    const std::vector<int>* held = nullptr;
    size_t held_slot = 0;
    std::vector<float> held_logits = {};
    bool stopped = false; // a rank wished to stop, with own_texts
};

// Pick a token for a slot from a row of logits (V): the next one, or the one `ahead` places later.
template <typename T, typename S>
int pick_token(Generation<T, S>& g, size_t slot, const float* logits, size_t ahead = 0) {
    const TextSlot& s = g.slots[slot];
    const Sampling& how = g.how;
    double draw = uniform(how.seed, g.texts[s.text].stream, s.picked + ahead);
    return sample_token(logits, g.rows.V, how.temperature, how.top_k, how.top_p, draw,
                        g.orders[slot]);
}

// The distribution from which pick_token() would draw.
template <typename T, typename S>
std::vector<double> shares_of(Generation<T, S>& g, size_t slot, const float* logits) { // (V)
    const Sampling& how = g.how;
    return token_shares(logits, g.rows.V, how.temperature, how.top_k, how.top_p, g.orders[slot]);
}

// Copy a slot's last n tokens, and return the position of the first one. A slot that needs fewer
// reads some tokens again. A shorter text, or a free slot, is padded with zeros, which no query
// of the text sees.
inline size_t fill_window(const TextSlot& s, int* tokens, size_t n) { // (n)
    size_t length = s.tokens.size();
    size_t first = length - std::min(length, n);
    std::fill_n(tokens, n, 0);
    std::copy(s.tokens.begin() + long(first), s.tokens.end(), tokens);
    return first;
}

// The rank whose choices count: the first one that has the last stage. Its number counts all ranks,
// or with own_texts the ranks of one place along dp.
inline int choosing_rank(const Layout& layout, bool own_texts) {
    int stage = (layout.stages() - 1) % layout.pp.size;
    auto ranks = ranks_where(layout, [&](const Layout& o) {
        return !own_texts || o.dp.rank == layout.dp.rank;
    });
    size_t i = 0;
    while (layout_at(layout, ranks[i]).pp.rank != stage)
        i++;
    return int(i);
}

// Exchange with ranks that have other texts. Returns whether any rank has something to run; sets
// g.stopped if any rank wishes to stop.
template <typename T, typename S> bool any_runs(Generation<T, S>& g, bool runs) {
    int64_t any[] = {runs, g.how.stops && g.how.stops()};
    all_reduce_max(g.t.comms.world, any, 2, Cpu{});
    g.stopped |= any[1] > 0;
    return any[0] > 0;
}

// Run the plan on the batch that has been made. Ranks with other texts gather shards of the weights
// in the same run, so all run together, as often as the rank with the most to do.
template <typename T, typename S> void run_texts(Generation<T, S>& g) {
    if (g.how.own_texts) any_runs(g, true);
    run_plan(g.t, g.plan);
}

// Run along with other ranks, on a token of no text, until all have generated their texts or one
// wishes to stop. The run in which it says so is the last.
template <typename T, typename S> void run_for_others(Generation<T, S>& g) {
    int token = 0;
    while (g.how.own_texts && !g.stopped && any_runs(g, false)) {
        generate_batch(g.t, g.plan, &token, 1, 0);
        run_plan(g.t, g.plan);
    }
}

// Add a new token to a slot: emit it, and free the slot if its text ends.
template <typename T, typename S, typename Emit, typename End>
void take_token(Generation<T, S>& g, TextSlot& s, int token, Emit& emit, End& end) {
    int64_t text = s.text;
    bool last = g.how.ends.count(token) > 0;
    s.tokens.push_back(token);
    s.picked++;
    if (!last || g.how.emits_end)
        emit(text, token);

    // The token itself would be read at position `past`, so the cache must have room there.
    bool enough = s.picked == g.count;
    bool full = s.past == g.t.plans[g.plan].cache;
    if (!last && !enough && !full) return;
    s = {};
    end(text, last ? Ended::BY_TOKEN : enough ? Ended::BY_COUNT : Ended::BY_CACHE);
}

// Count the texts that start together, in this slot and in the free ones after it: consecutive
// texts with different prompts, as many as the plan has rows for. With a draft each text starts
// alone, and so does a text whose slot has read a part of its prompt.
template <typename T, typename S>
size_t texts_together(const Generation<T, S>& g, size_t slot) {
    const Plan& p = g.t.plans[g.plan];
    const Text* next = g.texts.data() + g.next_text;
    if (p.scored > 1 || next->cached)
        return 1;

    // Stop at a text that repeats the prompt before it: it will copy that slot instead.
    size_t slots = g.slots.size() - slot;
    size_t most = std::min(slots, g.texts.size() - g.next_text);
    size_t longest = next->prompt->size();
    size_t count = 1;
    for (; count < most && g.slots[slot + count].text < 0; count++) {
        longest = std::max(longest, next[count].prompt->size());
        bool repeats = next[count].prompt == next[count - 1].prompt;
        if (repeats || (count + 1) * longest > p.rows())
            break;
    }
    return count;
}

// Read the prompts of the next `count` texts into adjacent slots. Returns the row of g.rows that
// has the first prompt's last logits; those of further prompts follow it.
template <typename T, typename S>
size_t read_prompts(Generation<T, S>& g, size_t slot, size_t count) {
    // Pad all to the longest: tokens after a prompt are masked, and later overwritten.
    const Text* next = g.texts.data() + g.next_text;
    std::vector<size_t> past(count);
    std::vector<size_t> lengths(count);
    std::vector<int> adapters(count);
    for (size_t i = 0; i < count; i++) {
        past[i] = next[i].cached;
        lengths[i] = next[i].prompt->size() - past[i];
        adapters[i] = next[i].adapter;
    }
    size_t n = std::ranges::max(lengths);
    std::vector<int> tokens(count * n);
    for (size_t i = 0; i < count; i++)
        std::copy_n(next[i].prompt->data() + past[i], lengths[i], tokens.data() + i * n);

    // Run, and remember the last prompt below: the next texts may have the same.
    generate_batch(g.t, g.plan, tokens.data(), count, n, past.data(), slot);
    g.t.ctx.batch.lengths = lengths.data();
    g.t.ctx.batch.adapters = adapters.data();
    run_texts(g);

    // Keep the logits of the last prompt's last row.
    size_t rows = std::min(n, g.t.plans[g.plan].scored);
    bring_logits(g.t, g.rows, count * rows);
    float* last = g.rows.row(count * rows - 1);
    if (g.rows.here)
        g.held_logits.assign(last, last + g.rows.V);
    g.held = next[count - 1].prompt;
    g.held_slot = slot + count - 1;
    if (!g.how.draft) return rows - 1;

    // Let the draft read the prompt too, and the token before `past` once more: that may be its own
    // last guess, which stayed but which it has not read.
    size_t from = past[0] - std::min(past[0], size_t(1));
    g.how.draft->read(g.held->data() + from, 1, g.held->size() - from, &from, slot);
    return rows - 1;
}

// Give the next texts to a slot and to free slots after it: copy a prompt from the slot that has
// read it, or read prompts now; then pick each text's first token.
template <typename T, typename S, typename Emit, typename End>
void start_texts(Generation<T, S>& g, size_t slot, Emit& emit, End& end) {
    const Text* next = g.texts.data() + g.next_text;
    const float* logits = nullptr;
    Draft* draft = g.how.draft;
    size_t n = next->prompt->size();
    size_t count = 1;

    // Fill the cache, and find the logits of each prompt's last row.
    if (g.held == next->prompt) {
        copy_slot(g.t, g.plan, g.held_slot, slot, n);
        if (draft)
            draft->copy_slot(g.held_slot, slot, n);
        logits = g.held_logits.data();
    } else {
        count = texts_together(g, slot);
        logits = g.rows.row(read_prompts(g, slot, count));
    }

    // Put the texts into their slots.
    std::vector<int> tokens(count);
    for (size_t i = 0; i < count; i++) {
        const std::vector<int>& prompt = *next[i].prompt;
        g.slots[slot + i] = {int64_t(g.next_text), prompt.size(), 0, prompt};
        g.next_text++;
    }

    // Pick in all slots in parallel: each has its own random numbers.
    #pragma omp parallel for schedule(dynamic)
    for (size_t i = 0; i < count; i++)
        if (g.rows.here)
            tokens[i] = pick_token(g, slot + i, logits + i * g.rows.V);
    broadcast(g.group, tokens.data(), count, g.root, Cpu{});
    for (size_t i = 0; i < count; i++)
        take_token(g, g.slots[slot + i], tokens[i], emit, end);
}

// Guess a slot's next token from the draft's logits. Returns false if the slot has all the guesses
// that it can use: a text ends at `count` tokens or with its cache, and a run adds one token to the
// guesses that stay. Without logits, only tell whether a guess is wanted.
template <typename T, typename S>
bool guess_token(Generation<T, S>& g, size_t slot, const float* logits) {
    // Stop at the limits of the draft, of the text and of the cache.
    TextSlot& s = g.slots[slot];
    size_t n = s.guesses.size();
    size_t room = g.t.plans[g.plan].cache - s.past;
    size_t wanted = g.count - s.picked;
    bool enough = n == g.how.draft->tokens || n + 1 >= std::min(room, wanted);
    if (s.text < 0 || enough) return false;
    if (!logits) return true;

    // Draw with the text's own stream for guesses.
    uint64_t stream = g.texts[s.text].stream ^ GUESS_STREAM;
    double draw = uniform(g.how.seed, stream, s.picked + n);
    s.guesses.push_back(shares_of(g, slot, logits));
    s.tokens.push_back(draw_share(s.guesses.back(), draw));
    return true;
}

// Let the draft guess in all slots. Returns the most guesses of any slot. The first read has two
// tokens, because the draft has not read its last guess of the step before.
template <typename T, typename S> size_t guess_tokens(Generation<T, S>& g, size_t B) {
    std::vector<int> tokens(2 * B);
    std::vector<size_t> past(B);
    for (size_t i = 0;; i++) {
        // Stop when no slot wants another guess.
        bool any = false;
        for (size_t b = 0; b < B; b++)
            any |= guess_token(g, b, nullptr);
        if (!any) return i;

        // Read, and guess from the logits of each slot's last row.
        size_t n = i ? 1 : 2;
        for (size_t b = 0; b < B; b++)
            past[b] = fill_window(g.slots[b], tokens.data() + b * n, n);
        const float* logits = g.how.draft->read(tokens.data(), B, n, past.data(), 0);
        #pragma omp parallel for schedule(dynamic)
        for (size_t b = 0; b < B; b++)
            guess_token(g, b, logits + b * g.rows.V);
    }
}

// Judge a slot's guesses by the model's logits: a row (V) for each guess, and one more. Write the
// tokens with which the text continues. A token that is drawn again uses the uniform number of its
// position, like every token that the model itself draws.
template <typename T, typename S>
void judge_guesses(Generation<T, S>& g, size_t slot, const float* logits, int* tokens) {
    const TextSlot& s = g.slots[slot];
    uint64_t stream = g.texts[s.text].stream;
    uint64_t seed = g.how.seed;
    size_t n = s.guesses.size();
    for (size_t i = 0; i < n; i++) {
        const std::vector<double>& q = s.guesses[i];
        std::vector<double> p = shares_of(g, slot, logits);
        logits += g.rows.V;

        // Keep a guess with its probability to stay, and look at the next.
        tokens[i] = s.tokens[s.past + 1 + i];
        double judge = uniform(seed, stream ^ JUDGE_STREAM, s.picked + i);
        if (judge < stay_share(p, q, tokens[i]))
            continue;

        // Draw again from the rest of the distribution; all later guesses are dropped.
        double draw = uniform(seed, stream, s.picked + i);
        tokens[i] = draw_share(rest_shares(p, q), draw);
        return;
    }

    // All guesses stayed: draw one more from the last row.
    tokens[n] = pick_token(g, slot, logits, n);
}

// Add a step's tokens to a slot. -1 follows the last one.
template <typename T, typename S, typename Emit, typename End>
void take_tokens(Generation<T, S>& g, TextSlot& s, const int* tokens, size_t n, Emit& emit,
                 End& end) {
    // Count the guesses, then drop them: those that stayed are among the tokens.
    size_t taken = size_t(std::find(tokens, tokens + n, -1) - tokens);
    if (Draft* d = g.how.draft) {
        d->steps++;
        d->guesses += s.guesses.size();
        d->stayed += taken - 1;
    }
    s.guesses.clear();
    s.tokens.resize(s.past + 1);

    // Take the tokens. The text may end before the last of them.
    for (size_t i = 0; i < taken && s.text >= 0; i++) {
        s.past++;
        take_token(g, s, tokens[i], emit, end);
    }
}

// Read the last token and the guesses that follow it, in each slot up to the last one in use; then
// pick the next tokens. A free slot among them is read too, without effect: no text is left that
// would copy from it.
template <typename T, typename S, typename Emit, typename End>
void decode_slots(Generation<T, S>& g, size_t B, Emit& emit, End& end) {
    // Let each slot read at its own position.
    size_t n = 1;
    if (g.how.draft)
        n += guess_tokens(g, B);
    std::vector<int> tokens(B * n);
    std::vector<size_t> first(B);
    std::vector<int> adapters(B, -1);
    for (size_t b = 0; b < B; b++) {
        first[b] = fill_window(g.slots[b], tokens.data() + b * n, n);
        if (g.slots[b].text >= 0)
            adapters[b] = g.texts[g.slots[b].text].adapter;
    }
    generate_batch(g.t, g.plan, tokens.data(), B, n, first.data());
    g.t.ctx.batch.adapters = adapters.data();
    run_texts(g);
    bring_logits(g.t, g.rows, B * n);

    // Pick in all slots in parallel: each has its own random numbers.
    std::ranges::fill(tokens, -1);
    #pragma omp parallel for schedule(dynamic)
    for (size_t b = 0; b < B; b++) {
        if (!g.rows.here || g.slots[b].text < 0)
            continue;
        size_t again = g.slots[b].past - first[b]; // tokens that it reads again
        judge_guesses(g, b, g.rows.row(b * n + again), tokens.data() + b * n);
    }
    broadcast(g.group, tokens.data(), B * n, g.root, Cpu{});

    // Emit in the order of the slots.
    for (size_t b = 0; b < B; b++)
        if (g.slots[b].text >= 0)
            take_tokens(g, g.slots[b], tokens.data() + b * n, n, emit, end);
}

// Continue each text by up to `count` tokens: emit(text, token) for each picked token,
// then end(text, why). A prompt may be as long as the plan allows. All ranks call it, and those
// with the same texts pick the same tokens.
template <typename T, typename S, typename Emit, typename End>
void generate(Trainer<T, S>& t, int plan, const std::vector<Text>& texts, size_t count,
              const Sampling& how, Emit emit, End end) {
    // Make the slots.
    const Comm& group = how.own_texts ? t.comms.model : t.comms.world;
    int root = choosing_rank(t.layout, how.own_texts);
    Generation<T, S> g = {t, plan, texts, count, how, group, root};
    size_t B = std::min(t.plans[plan].B, texts.size());
    g.slots.resize(B);
    g.orders.resize(B);
    g.rows = make_logit_rows(t, head_rows(t.plans[plan]));

    // Clear the cache. Keys that a slot has not written are masked, so their values are multiplied
    // by 0; a NaN among them would still spoil the sum.
    t.plan = plan;
    t.at = 0;
    for (int l = 0; B > 1 && l < t.model.layers(); l++)
        if (T* cache = address<T>(t, {Kind::CACHE, l}))
            device_zero(cache, data_bytes<T>(t.plans[plan], t.model, {Kind::CACHE, l}, t.ctx.where),
                        t.ctx.where);

    bool stopped = count == 0;
    while (!stopped && !g.stopped) {
        // Fill free slots. A text may end with its first token.
        for (size_t b = 0; b < B; b++)
            while (g.slots[b].text < 0 && g.next_text < texts.size() && !g.stopped)
                start_texts(g, b, emit, end);

        // Read and pick one token in all used slots.
        size_t used = B;
        while (used > 0 && g.slots[used - 1].text < 0)
            used--;
        if (used == 0) return run_for_others(g);
        stopped = g.stopped || (!how.own_texts && how.stops && how.stops());
        if (!stopped) decode_slots(g, used, emit, end);
    }

    // End the texts that were stopped.
    for (const TextSlot& s : g.slots)
        if (s.text >= 0)
            end(s.text, Ended::BY_STOP);
}

// The texts [first, past) of a place along dp, where each place generates its own.
struct ShareOfTexts {
    size_t first, past;
};
inline ShareOfTexts share_of_texts(Axis dp, size_t all) {
    size_t size = size_t(dp.size);
    size_t rank = size_t(dp.rank);
    return {all * rank / size, all * (rank + 1) / size};
}

// Give all ranks the texts of every place, at most `longest` numbers each. All ranks call.
template <typename T, typename S>
void share_texts(const Trainer<T, S>& t, ShareOfTexts mine, size_t longest,
                 std::vector<std::vector<int>>& texts) {
    // Put a text's length and numbers in a row. One rank of each place contributes, and all others
    // add 0 to it.
    size_t row = longest + 1;
    size_t past = t.comms.model.rank == 0 ? mine.past : mine.first;
    std::vector<int64_t> rows(texts.size() * row);
    for (size_t i = mine.first; i < past; i++) {
        rows[i * row] = int64_t(texts[i].size());
        std::ranges::copy(texts[i], &rows[i * row + 1]);
    }
    all_reduce_sum(t.comms.world, rows.data(), rows.size(), Cpu{});

    const int64_t* from = rows.data();
    for (std::vector<int>& text : texts) {
        text.assign(from + 1, from + 1 + *from);
        from += row;
    }
}

// Continue one prompt; each token goes to `emit`.
template <typename T, typename S, typename Emit>
void generate(Trainer<T, S>& t, int plan, const std::vector<int>& prompt, size_t count,
              const Sampling& how, Emit emit) {
    auto one = [&](int64_t, int token) { emit(token); };
    generate(t, plan, {{&prompt, sample_stream(how)}}, count, how, one, [](int64_t, Ended) {});
}

// Make a draft of a model, which runs the model's first plan. V is the main model's vocabulary:
// tokens that the draft lacks have probability 0, and tokens that it has beyond V are never
// guessed. The trainer's memory must be zeroed.
template <typename T, typename S>
std::shared_ptr<Draft> make_draft(std::shared_ptr<Trainer<T, S>> t, size_t tokens, size_t V) {
    auto draft = std::make_shared<Draft>();
    const Plan& p = t->plans[0];
    auto rows = std::make_shared<LogitRows<T>>();
    *rows = make_logit_rows(*t, head_rows(p));
    auto logits = std::make_shared<std::vector<float>>();
    logits->resize(p.B * V, -INFINITY);

    // Give the draft its functions.
    draft->tokens = tokens;
    draft->copy_slot = [t](size_t from, size_t to, size_t n) {
        copy_slot(*t, 0, from, to, n);
    };
    draft->read = [=](const int* read, size_t B, size_t n, const size_t* past, size_t slot) {
        generate_batch(*t, 0, read, B, n, past, slot);
        run_plan(*t, 0);
        size_t each = std::min(n, t->plans[0].scored);
        bring_logits(*t, *rows, B * each);
        // Take the last row of each sequence.
        size_t known = std::min(V, rows->V);
        for (size_t b = 0; b < B; b++) {
            const float* last = rows->row(b * each + each - 1);
            std::copy_n(last, known, logits->data() + b * V);
        }
        const float* first = logits->data();
        return first;
    };
    return draft;
}

} // namespace llmc
