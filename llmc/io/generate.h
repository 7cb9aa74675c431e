// generate.h - texts from the model, many at once: continuous batching in slots - arXiv:2309.06180
//   1. each free slot takes the next text: a run reads its prompt and fills the slot's part of the
//      key/value cache; a prompt that has just been read is copied from the slot that has it
//   2. its last row's logits pick the text's first token
//   3. one run reads the token last picked in every slot, each at its own position
//   4. each slot's logits pick its next token; a token of `ends`, unprinted, the wanted number of
//      tokens, or a full slot end its text and free the slot; then from 1 on
//   Token i of a text uses uniform number i of the text's stream: which slot it has, and what
//   else is in the batch, changes no more than the rounding of its logits.
//   All ranks of all axes have the same texts. The last stage's ranks pick, the others hear of it.
//   Cost: a run reads all weights, whatever the number of slots. The cache takes
//         slots * positions * 2 * NKV * HS elements a layer.
#pragma once
#include <functional>
#include <set>
#include "sampler.h"
#include "../step.h"
#include "../text.h"

namespace llmc {

// ----------------------------------------------------------------------------
// what is wanted

// How tokens are picked; see sampler.h.
struct Sampling {
    float temperature = 1, top_p = 1;
    int top_k = 0;
    uint64_t seed = 0;
    int64_t step = 0;
    int64_t number = 0;      // of the samples at this step
    std::set<int> ends = {}; // tokens that end a text
    std::function<bool()> stops = nullptr; // asked by all ranks before each run: end all texts
};

// The stream of a sample's uniform numbers: a step's further samples have others, and a resumed run
// has the same.
inline uint64_t sample_stream(const Sampling& how) {
    std::string name = concat("sample.", how.step);
    if (how.number) name += concat(".", how.number);
    return fnv1a(name);
}

// A text to be: what it begins with, and the stream of its uniform numbers.
struct Text {
    const std::vector<int>* prompt; // texts that follow each other and share it read it once
    uint64_t stream;
    size_t cached = 0; // tokens of the prompt that its slot has read before: of one text alone
};

enum class Ended : uint8_t { BY_TOKEN, BY_COUNT, BY_CACHE, BY_STOP };

// ----------------------------------------------------------------------------
// a run of the plan

// Put tokens (B,n) before the plan: one of each sequence, or B = 1. Sequence b, in slot
// first_slot + b, has read past[b] before. The batch is laid out as LOAD's: tokens, targets,
// positions, documents' starts (N each), then the keys' positions.
template <typename T, typename S>
void generate_batch(Trainer<T, S>& t, int plan, const int* tokens, size_t B, size_t n,
                    const size_t* past, size_t first_slot = 0) {
    const Plan& p = t.plans[plan];
    t.plan = plan;
    t.at = 0;
    size_t N = p.rows(), seen = 0;
    int* home = address<int>(t, {Kind::TOKENS, -1, 0});
    // Fill the host's copy; targets stay as they are, since no loss is computed.
    int* host = host_side(home, t.staging, t.ctx.where);
    int *positions = host + 2 * N, *doc_start = host + 3 * N, *keys = host + 4 * N;

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

    // Copy no more than is filled: the cache's positions come last.
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

// The logits of several sequences, on the last stage's ranks: each brings its share of the padded
// vocabulary. Room is made once.
template <typename T> struct LogitRows {
    size_t V, share;            // share: Vp / tp
    bool here = false;               // whether this rank has them
    std::vector<T> stored = {};      // (B,share)
    std::vector<T> all = {};         // (tp,B,share)
    std::vector<float> logits = {};  // (B,V)

    float* row(size_t b) { return logits.data() + b * V; }
};

template <typename T, typename S>
LogitRows<T> make_logit_rows(const Trainer<T, S>& t, size_t B) {
    size_t V = t.model.shape.V, Vp = t.model.shape.Vp();
    LogitRows<T> rows = {V, Vp / size_t(t.layout.tp.size)};
    // Other stages pick nothing, and have no room.
    rows.here = is_mine(t.layout, t.model, t.model.head());
    if (!rows.here) return rows;
    rows.stored.resize(B * rows.share);
    rows.all.resize(B * Vp);
    rows.logits.resize(B * V);
    return rows;
}

// Bring the logits of the plan that has just run.
template <typename T, typename S>
void bring_logits(const Trainer<T, S>& t, LogitRows<T>& rows, size_t B) {
    if (!rows.here) return;
    size_t share = rows.share, V = rows.V;
    const T* home = address<const T>(t, {Kind::LOGITS, -1, 0});
    copy_out(rows.stored.data(), home, B * share * sizeof(T), t.ctx.where);
    all_gather(t.comms.tp, rows.all.data(), rows.stored.data(), B * share, Cpu{});

    // Ranks' shares lie one behind the other: join each sequence's.
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

// A sequence on its way.
struct TextSlot {
    int64_t text = -1; // its number; -1: the slot is free
    size_t past = 0;   // tokens whose keys and values are in the cache
    size_t picked = 0; // tokens of the text
    int next = 0;      // the token to be read
};

// Copy the keys and values of a slot's first n positions to another slot.
template <typename T, typename S>
void copy_slot(Trainer<T, S>& t, int plan, size_t from, size_t to, size_t n) {
    if (from == to) return;
    const Shape& s = t.ctx.shape;
    size_t row = 2 * s.NKV * s.HS, slot = t.plans[plan].cache * row, bytes = n * row * sizeof(T);
    for (int l = 0; l < t.model.layers(); l++)
        if (T* cache = address<T>(t, {Kind::CACHE, l}))
            copy_rows(cache + to * slot, bytes, cache + from * slot, bytes, bytes, 1, t.ctx.where);
}

// All slots of a plan, and the texts that wait for one.
template <typename T, typename S> struct Generation {
    Trainer<T, S>& t;
    int plan;
    const std::vector<Text>& texts;
    size_t count; // tokens a text, at most
    const Sampling& how;

    // How far it is.
    std::vector<TextSlot> slots = {};
    size_t next_text = 0;
    LogitRows<T> rows = {};
    std::vector<std::vector<std::pair<float, int>>> orders = {}; // the sampler's room, a slot each
    // The prompt that was read last, the slot that has it, and its last row's logits.
    const std::vector<int>* held = nullptr;
    size_t held_slot = 0;
    std::vector<float> held_logits = {};
};

// Pick the next token of a slot from a row of logits.
template <typename T, typename S>
int pick_token(Generation<T, S>& g, size_t slot, const float* logits) {
    const TextSlot& s = g.slots[slot];
    double draw = uniform(g.how.seed, g.texts[s.text].stream, s.picked);
    return sample_token(logits, g.rows.V, g.how.temperature, g.how.top_k, g.how.top_p, draw,
                        g.orders[slot]);
}

// All ranks hear what the last stage's have picked.
template <typename T, typename S>
void share_tokens(Generation<T, S>& g, int* tokens, size_t n) {
    int root = (g.t.layout.stages() - 1) % g.t.layout.pp.size;
    broadcast(g.t.comms.pp, tokens, n, root, Cpu{});
}

// A slot has a new token: give it out, and free the slot where its text ends.
template <typename T, typename S, typename Emit, typename End>
void take_token(Generation<T, S>& g, TextSlot& s, int token, Emit& emit, End& end) {
    int64_t text = s.text;
    bool last = g.how.ends.count(token) > 0;
    s.next = token;
    s.picked++;
    if (!last) emit(text, token);

    // The token would be read at position `past`.
    bool enough = s.picked == g.count, full = s.past == g.t.plans[g.plan].cache;
    if (!last && !enough && !full) return;
    s = {};
    end(text, last ? Ended::BY_TOKEN : enough ? Ended::BY_COUNT : Ended::BY_CACHE);
}

// Give the next text to a slot: read its prompt, or copy it, and pick the first token.
template <typename T, typename S, typename Emit, typename End>
void start_text(Generation<T, S>& g, size_t slot, Emit& emit, End& end) {
    const std::vector<int>& prompt = *g.texts[g.next_text].prompt;
    size_t n = prompt.size(), past = g.texts[g.next_text].cached;
    if (g.held == &prompt) {
        copy_slot(g.t, g.plan, g.held_slot, slot, n);
    } else {
        generate_batch(g.t, g.plan, prompt.data() + past, 1, n - past, &past, slot);
        run_plan(g.t, g.plan);
        bring_logits(g.t, g.rows, 1);
        if (g.rows.here) g.held_logits.assign(g.rows.row(0), g.rows.row(1));
        // Hold on to it: the next texts may begin with the same.
        g.held = &prompt;
        g.held_slot = slot;
    }

    // The prompt's last row has the logits of every sample's first token.
    TextSlot& s = g.slots[slot];
    s = {int64_t(g.next_text++), n};
    int token = g.rows.here ? pick_token(g, slot, g.held_logits.data()) : 0;
    share_tokens(g, &token, 1);
    take_token(g, s, token, emit, end);
}

// Read a token in each slot up to the last one in use, and pick the next ones. A free slot among
// them reads a token too, and nobody looks: no text is left that would copy from it.
template <typename T, typename S, typename Emit, typename End>
void decode_slots(Generation<T, S>& g, size_t B, Emit& emit, End& end) {
    // Each slot reads one token, at its own position.
    std::vector<int> tokens(B);
    std::vector<size_t> past(B);
    for (size_t b = 0; b < B; b++) {
        tokens[b] = g.slots[b].next;
        past[b] = g.slots[b].past;
    }
    generate_batch(g.t, g.plan, tokens.data(), B, 1, past.data());
    run_plan(g.t, g.plan);
    bring_logits(g.t, g.rows, B);

    // Slots pick side by side, for each has its own numbers.
    #pragma omp parallel for schedule(dynamic)
    for (size_t b = 0; b < B; b++)
        if (g.rows.here && g.slots[b].text >= 0)
            tokens[b] = pick_token(g, b, g.rows.row(b));
    share_tokens(g, tokens.data(), B);
    for (size_t b = 0; b < B; b++) {
        if (g.slots[b].text < 0) continue;
        g.slots[b].past++;
        take_token(g, g.slots[b], tokens[b], emit, end);
    }
}

// Continue each text, of a prompt as long as the plan allows, by up to `count` tokens: emit(text,
// token) as they are picked, then end(text, why). All ranks call it, and pick the same.
template <typename T, typename S, typename Emit, typename End>
void generate(Trainer<T, S>& t, int plan, const std::vector<Text>& texts, size_t count,
              const Sampling& how, Emit emit, End end) {
    Generation<T, S> g = {t, plan, texts, count, how};
    size_t B = std::min(t.plans[plan].B, texts.size());
    g.slots.resize(B);
    g.orders.resize(B);
    g.rows = make_logit_rows(t, B);

    // Clear the cache: keys that a slot has not written are hidden, and their values count 0 times
    // what they are. No NaN may lie there.
    t.plan = plan;
    t.at = 0;
    for (int l = 0; B > 1 && l < t.model.layers(); l++)
        if (T* cache = address<T>(t, {Kind::CACHE, l}))
            device_zero(cache, data_bytes<T>(t.plans[plan], t.model, {Kind::CACHE, l}, t.ctx.where),
                        t.ctx.where);

    bool stopped = count == 0;
    while (!stopped) {
        // Fill free slots. A text may end with its first token.
        for (size_t b = 0; b < B; b++)
            while (g.slots[b].text < 0 && g.next_text < texts.size())
                start_text(g, b, emit, end);

        // Read and pick a token in all others.
        size_t used = B;
        while (used > 0 && g.slots[used - 1].text < 0)
            used--;
        if (used == 0) return;
        stopped = how.stops && how.stops();
        if (!stopped) decode_slots(g, used, emit, end);
    }

    // Texts that were stopped end where they are.
    for (const TextSlot& s : g.slots)
        if (s.text >= 0) end(s.text, Ended::BY_STOP);
}

// Continue one prompt; each token goes to `emit`.
template <typename T, typename S, typename Emit>
void generate(Trainer<T, S>& t, int plan, const std::vector<int>& prompt, size_t count,
              const Sampling& how, Emit emit) {
    auto one = [&](int64_t, int token) { emit(token); };
    generate(t, plan, {{&prompt, sample_stream(how)}}, count, how, one, [](int64_t, Ended) {});
}

} // namespace llmc
