// load.h - a step's input: sequences shared out over ranks, read ahead while a device works
//   run_load       the action LOAD: sends tokens, targets, positions, document starts to the device
//   run_count      the action COUNT: counts the valid targets of all ranks, and sets the numbers of
//                  the step
//   bind_batch     hands one micro-batch of the step's input to the blocks
//   prepare_batch  reads the next step's batch while this step runs, so that a device does not wait
//                  for text between two steps
#pragma once
#include "access.h"
#include "action.h"
#include "comm/comm.h"
#include "context.h"
#include "fp8.h"
#include "layout.h"
#include "model.h"
#include "ops/memory.h"
#include "ops/objective.cuh"
#include "ops/step_scale.h"
#include "ops/types.h"
#include "parameters.h"
#include "trainer.h"
#include <numeric>

namespace llmc {

// ----------------------------------------------------------------------------
// how evenly tokens choose their experts: loads and MaxVio - arXiv:2408.15664
//   A forward pass in training adds the slots that chose each expert of its block (moe.cuh) to
//   LOADS, (L,E) integers of a step. After it the ranks that see other tokens add theirs up. With a
//   capacity a second table counts those of the slots that were dropped (expert_capacity.cuh).
//   MaxVio of a block = the largest load / the mean load - 1: 0 is even, E/K - 1 is one choice for
//   all. The least load / the mean is 0 where nobody chooses an expert, which then learns nothing.

// LOADS of a block's experts, (E), this rank's tokens alone; null: this plan counts none.
template <typename T, typename S>
int* expert_loads(const Trainer<T, S>& t, int layer) {
    int* loads = address<int>(t, {Kind::LOADS}); // (L,E)
    size_t block = size_t(layer - 1);
    return loads ? loads + block * t.model.shape.experts.E : nullptr;
}

// The worst MaxVio of all blocks with experts, -1 where there are none, and the least load / mean.
struct ExpertBalance {
    double max_vio = -1, least = 0;
};

// loads (L,E), of all ranks.
inline ExpertBalance expert_balance(const std::vector<int64_t>& loads, size_t E) {
    ExpertBalance all;
    for (size_t first = 0; first < loads.size(); first += E) {
        auto block = loads.begin() + ptrdiff_t(first), end = block + ptrdiff_t(E);
        double mean = double(std::accumulate(block, end, int64_t(0))) / double(E);
        if (mean == 0) continue; // its ffn is dense
        double least = double(*std::min_element(block, end)) / mean;
        all.least = all.max_vio < 0 ? least : std::min(all.least, least);
        all.max_vio = std::max(all.max_vio, double(*std::max_element(block, end)) / mean - 1);
    }
    return all;
}

// One of the tables in LOADS, of all ranks. All ranks call this, and hear the same.
template <typename T, typename S>
std::vector<int64_t> sum_of_loads(const Trainer<T, S>& t, size_t table) { // (L,E)
    // The host has waited for the step already: this copy is short.
    std::vector<int> mine(t.model.shape.L * t.model.shape.experts.E);
    const int* from = expert_loads(t, 1) + table * mine.size();
    copy_out(mine.data(), from, mine.size() * sizeof(int), t.ctx.where);

    // Other tokens stand on other ranks, other blocks on other stages.
    std::vector<int64_t> loads(mine.begin(), mine.end());
    all_reduce_sum(t.comms.samples, loads.data(), loads.size(), Cpu{});
    all_reduce_sum(t.comms.pp, loads.data(), loads.size(), Cpu{});
    return loads;
}

// The loads (L,E) of the step that is over; none where a model has no experts.
template <typename T, typename S>
std::vector<int64_t> step_loads(const Trainer<T, S>& t) {
    if (!counts_loads(t.plans[t.plan], t.model)) return {};
    return sum_of_loads(t, 0);
}

// The share of the step's slots that were dropped, -1 without a capacity. `loads` are the step's.
template <typename T, typename S>
double dropped_share(const Trainer<T, S>& t, const std::vector<int64_t>& loads) {
    if (loads.empty() || t.model.shape.experts.capacity.factor == 0)
        return -1;
    std::vector<int64_t> dropped = sum_of_loads(t, 1);
    auto total = [](const auto& table) {
        return double(std::accumulate(table.begin(), table.end(), int64_t(0)));
    };
    return total(dropped) / total(loads);
}

// One whole sequence, as a rank without context parallelism sees it: parts that follow each other.
struct WholeSequence {
    int *tokens, *targets, *positions, *doc_start; // (T) each
    float* numbers; // (inputs,T) the objective's numbers of each row; null: it needs none
};

// Room for a sequence. The memory is kept from step to step.
template <typename T, typename S>
WholeSequence sequence_room(Trainer<T, S>& t, const Plan& p) {
    t.host.sequence.resize(p.row_numbers() * p.T);
    int* tokens = t.host.sequence.data();
    int* targets = tokens + p.T;
    int* positions = targets + p.T;
    int* doc_start = positions + p.T;

    // Numbers are floats among integers: a batch is copied in one piece.
    float* numbers = reinterpret_cast<float*>(doc_start + p.T);
    return {tokens, targets, positions, doc_start, p.objective.rows() ? numbers : nullptr};
}

// Read one whole sequence. A sample beyond the end has no targets. Returns "" or what is wrong.
template <typename T, typename S>
std::string read_sequence(const Trainer<T, S>& t, const Plan& p, uint64_t sample,
                          const WholeSequence& s) {
    bool beyond = sample >= t.data.samples_end;
    if (beyond) sample = t.data.samples_end - 1;
    LLMC_TRY(t.data.window(sample, s.tokens, s.targets));

    // Fill in the objective's numbers of each row: first whether it is rejected.
    size_t length = p.T;
    size_t inputs = p.objective.inputs();
    float* numbers = s.numbers;
    if (numbers) {
        split_pairs(numbers, s.tokens, length);
        std::fill_n(numbers + length, (inputs - 1) * length, 0.0f);
        float* old = inputs > 2 ? numbers + 2 * length : nullptr;
        if (t.data.references)
            t.data.references(sample, {numbers, numbers + length, old});
    }
    split_documents(s.doc_start, s.targets, s.tokens, length, t.data.document_end);

    // Set positions. Drop the targets of a sample beyond the end: it is read for its tokens alone.
    for (size_t i = 0; i < length; i++) {
        if (beyond) s.targets[i] = -1;
        s.positions[i] = int(i);
    }
    return "";
}

// Fill in the positions of all ranks' keys of sequence b, and the starts of their documents, in the
// order in which the keys arrive: (B,cp,t) when they are gathered, (cp,B,t) in a ring. One hop of a
// hybrid's ring brings the rows of all ranks that exchange heads.
inline void fill_keys(const Plan& p, size_t b, int* positions, int* documents,
                      const int* doc_start) {
    // Compute how far apart sequences and hops lie.
    Axis cp = p.layout.cp;
    size_t t = p.T / size_t(cp.size);
    bool ring = p.layout.context.method == ContextMethod::RING;
    size_t heads = size_t(heads_axis(p.layout).size);
    size_t next_sequence = ring ? heads * t : p.T;
    size_t hop = heads * t; // rows of one sequence that a hop brings
    size_t next_hop = ring ? p.B * hop : hop;

    // Walk over all ranks of cp, this one included.
    for (cp.rank = 0; cp.rank < cp.size; cp.rank++)
        for (size_t i = 0; i < t; i++) {
            size_t at = context_row(p.layout.context.order, cp, p.T, i);

            // Ranks that exchange heads have their rows side by side.
            size_t rank = size_t(cp.rank);
            size_t first = rank / heads * next_hop + rank % heads * t;
            size_t place = b * next_sequence + first + i;
            positions[place] = int(at);
            documents[place] = doc_start[at];
        }
}

// Count a sequence's pairs of a query and a key that it sees, and add them to the query's rank.
// Sliding windows are ignored.
inline void count_pairs(const Plan& p, std::vector<int64_t>& pairs, const int* doc_start) { // (cp)
    Axis cp = p.layout.cp;
    size_t rows = p.T / size_t(cp.size);
    pairs.resize(size_t(cp.size));
    for (cp.rank = 0; cp.rank < cp.size; cp.rank++)
        for (size_t i = 0; i < rows; i++) {
            // A query sees the keys from its document's first token up to its own.
            size_t at = context_row(p.layout.context.order, cp, p.T, i);
            pairs[size_t(cp.rank)] += int64_t(at) - doc_start[at] + 1;
        }
}

// The largest number of pairs on a rank, divided by the mean over ranks. In each block the other
// ranks wait for that rank.
inline double pairs_imbalance(const Layout& layout, const std::vector<int64_t>& pairs) {
    // Count ranks that exchange heads together: they have equal shares of their pairs.
    size_t heads = size_t(heads_axis(layout).size);
    int64_t most = 0;
    int64_t all = 0;
    for (size_t first = 0; first < pairs.size(); first += heads) {
        int64_t n = std::accumulate(&pairs[first], &pairs[first] + heads, int64_t(0));
        most = std::max(most, n);
        all += n;
    }
    return all ? double(most) * double(pairs.size() / heads) / double(all) : 1;
}

// Take this rank's rows of sequence b. Their positions and document starts count in the whole
// sequence. Returns how many targets they have, counted before the batch goes to a device.
inline int64_t take_own_rows(const Plan& p, size_t b, int* batch, const WholeSequence& s) {
    const Layout& layout = p.layout;
    size_t N = p.rows();
    size_t rows = N / p.B;   // of each sequence
    const int* x = s.tokens; // the first part; the others follow it
    int64_t targets = 0;
    for (size_t i = 0; i < rows; i++) {
        size_t at = context_row(layout.context.order, layout.cp, p.T, i);
        for (size_t k = 0; k < p.row_numbers(); k++)
            batch[k * N + b * rows + i] = x[k * p.T + at];
        targets += s.targets[at] >= 0;
    }
    return targets;
}

// Add what ranks that share sequence b need of all its rows.
inline void add_whole_sequence(const Plan& p, size_t b, int* batch, const WholeSequence& s) {
    // The positions and document starts of all ranks' keys.
    int* keys = batch + p.row_numbers() * p.rows();
    fill_keys(p, b, keys, keys + p.B * p.T, s.doc_start);

    // Pairs need whole sequences: add their targets, document starts, the objective's numbers.
    int* whole = keys + (2 * p.B + b) * p.T; // (4,B,T)
    const int* feedback = s.doc_start + p.T;
    const int* reference = feedback + p.T;
    const int* parts[] = {s.targets, s.doc_start, feedback, reference};
    for (size_t k = 0; k < p.objective.whole_inputs(); k++)
        std::copy_n(parts[k], p.T, whole + k * p.B * p.T);
}

// Read this rank's rows of micro-batch m into `batch`. Samples of the global batch at `cursor` are
// dealt round the data-parallel ranks: micro-batch m of rank r takes B samples from cursor +
// (m * dp + r) * B on. So the sequence of samples stays the same when dp, B or the accumulation
// change. Adds to *valid and `pairs`; returns "" or what is wrong.
template <typename T, typename S>
std::string read_micro_batch(Trainer<T, S>& t, const Plan& p, uint64_t cursor, int m, int* batch,
                             int64_t* valid, std::vector<int64_t>& pairs) {
    const Layout& layout = p.layout;
    uint64_t first = cursor + (uint64_t(m) * layout.dp.size + layout.dp.rank) * p.B;
    bool pairs_count = p.objective.pairs(); // `valid` counts pairs, not targets
    WholeSequence s = sequence_room(t, p);
    std::string wrong;
    for (size_t b = 0; b < p.B && wrong.empty(); b++) {
        wrong = read_sequence(t, p, first + b, s);

        // Pairs lie in whole sequences: the first of the ranks that share a sequence counts them.
        if (pairs_count && layout.cp.rank == 0)
            *valid += count_pairs(s.targets, s.doc_start, s.numbers, p.T, p.objective.kind);
        int64_t targets = take_own_rows(p, b, batch, s);
        if (!pairs_count) *valid += targets;

        // Without context parallelism, a rank's rows are all that its queries see.
        if (layout.cp.size == 1) continue;
        add_whole_sequence(p, b, batch, s);
        count_pairs(p, pairs, s.doc_start);
    }
    return wrong;
}

// Read the batch that a plan will need at `cursor`, while a device is at work. On a CPU no such
// time is free, so LOAD itself reads.
template <typename T, typename S>
void prepare_batch(Trainer<T, S>& t, int plan, uint64_t cursor) {
    PreparedBatch& next = t.host.next;
    const Plan& p = t.plans[plan];

    // Wait with KTO: its reference point depends on weights that this step still changes.
    if (!next.staging || p.objective.kind == LossKind::KTO) return;
    next = {plan, cursor, next.staging};
    for (int m = 0; m < p.micro_batches && next.wrong.empty(); m++) {
        int* batch = next.staging + m * p.input_numbers();
        next.wrong = read_micro_batch(t, p, cursor, m, batch, &next.valid, next.pairs);
    }
}

// LOAD: send the step's batch on its way to the device, the prepared one or one that is read now.
template <typename T, typename S>
void run_load(Trainer<T, S>& t) {
    const Plan& p = t.plans[t.plan];
    size_t numbers = p.input_numbers();

    // Take the prepared batch. The batch after it goes to the other staging memory, because copies
    // from this one may still be under way by then.
    PreparedBatch& next = t.host.next;
    bool prepared = next.plan == t.plan && next.cursor == t.data.cursor;
    if (prepared) {
        std::swap(t.host.staging, next.staging);
        next.plan = -1;
    }
    t.data.valid = prepared ? next.valid : 0;
    t.data.pairs = prepared ? next.pairs : std::vector<int64_t>();
    std::string wrong = prepared ? next.wrong : "";

    for (int m = 0; m < p.micro_batches; m++) {
        // Read the batch if none is prepared, where the host can write. Copy it home in one piece.
        int* home = address<int>(t, {Kind::TOKENS, -1, m}); // (4 to 7,N), keys' positions
        int* batch = host_side(home, t.host.staging + m * numbers, t.ctx.where);
        if (!prepared)
            wrong = read_micro_batch(t, p, t.data.cursor, m, batch, &t.data.valid, t.data.pairs);
        LLMC_USER_CHECK(wrong.empty(), "%s", wrong.c_str());
        copy_in(home, batch, numbers * sizeof(int), t.ctx.where);
    }

    // Clear the table of loads: no expert has a token of this step yet.
    if (counts_loads(p, t.model))
        device_zero(expert_loads(t, 1), loads_bytes(t.model.shape), t.ctx.where);
}

// COUNT: add up the valid targets of all ranks, and put the step's numbers where kernels read them.
template <typename T, typename S>
void run_count(Trainer<T, S>& t) {
    typedef acc_t<T> A;
    all_reduce_sum(t.comms.samples, &t.data.valid, 1, Cpu{});
    share_maxima(t);
    if (t.plans[t.plan].mode != Mode::TRAIN) return;

    // Copy from staging memory: the copy may still be under way when this returns.
    StepNumbers* home = &address<StepScale>(t, {Kind::SCALE})->given;
    StepNumbers* here = host_side(home, t.host.numbers, t.ctx.where);
    here->target_weight = double(t.data.valid ? A(1) / A(t.data.valid) : 0);
    here->lr = t.hyper.lr;
    copy_in(home, here, sizeof(*home), t.ctx.where);
}

// Hand the blocks one micro-batch. In generation generate_batch() has done so already.
template <typename T, typename S>
void bind_batch(Trainer<T, S>& t, int micro) {
    const Plan& p = t.plans[t.plan];
    if (p.mode == Mode::GENERATE) return;
    const int* tokens = address<int>(t, {Kind::TOKENS, -1, micro});
    size_t N = p.rows();
    t.ctx.sequences = p.B * size_t(p.micro_batches) * size_t(t.layout.dp.size);

    // Point at the input's parts, which follow each other as read_micro_batch() wrote them.
    const int* keys = tokens + p.row_numbers() * N;
    t.ctx.micro = micro;
    t.ctx.batch = {p.B, N / p.B, tokens, tokens + N, tokens + 2 * N, tokens + 3 * N};
    const float* numbers = reinterpret_cast<const float*>(tokens + 4 * N);
    t.ctx.batch.feedback = numbers;
    t.ctx.batch.reference = numbers + N;
    t.ctx.batch.old = numbers + 2 * N;
    if (p.layout.cp.size == 1) return;
    t.ctx.batch.key_positions = keys;
    t.ctx.batch.key_documents = keys + p.B * p.T;
}

// ----------------------------------------------------------------------------
// experts kept even without a loss: a bias of the choice - arXiv:2408.15664
//   after a step   b_e += rate sign(mean load - load of e),   sign(0) = 0,   of all its tokens
//   b takes part in the choice alone (moe.cuh), so no gradient tells it anything, and gates stay
//   what the scores say. A step that is skipped leaves it as it is.
//   Every rank knows all loads, which are whole numbers, and so all have the same biases here, on
//   the host: no message carries one. Each rank stores what it keeps of them: the float master,
//   and the weight that kernels read, which is rounded in bf16.

// Biases by block; empty where a block has none.
typedef std::vector<std::vector<float>> ChoiceBiases; // (L)(E)

inline bool is_choice_bias(const Parameter& p) {
    return p.name.ends_with(".e_score_correction_bias");
}

// Read them as they were loaded. All ranks call this.
template <typename T, typename S>
ChoiceBiases read_choice_biases(const Trainer<T, S>& t) {
    ChoiceBiases biases(t.model.shape.L);
    for (const Parameter& p : t.model.parameters)
        if (is_choice_bias(p))
            biases[size_t(p.layer) - 1] = get_weight(t, p);
    return biases;
}

// Move them by a step's loads (L,E), which step_loads() has brought together.
template <typename T, typename S>
void move_choice_biases(Trainer<T, S>& t, ChoiceBiases& biases, const std::vector<int64_t>& loads,
                        float rate) {
    int64_t E = int64_t(t.model.shape.experts.E);
    for (const Parameter& p : t.model.parameters) {
        if (!is_choice_bias(p)) continue;
        std::vector<float>& bias = biases[size_t(p.layer) - 1];
        const int64_t* load = loads.data() + (p.layer - 1) * E;
        int64_t all = std::accumulate(load, load + E, int64_t(0));

        // Compare E times a load with the sum: a mean may be no whole number.
        for (int64_t e = 0; e < E; e++) {
            bool below = load[e] * E < all, above = load[e] * E > all;
            bias[size_t(e)] += rate * float(below - above);
        }
        set_weight(t, p, bias.data());
    }
}

} // namespace llmc
