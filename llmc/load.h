// load.h - a step's input: sequences shared out over ranks, read ahead while a device works
//   run_load       the action LOAD: tokens, targets, positions, starts of documents, on their way
//   prepare_batch  reads the next step's batch beside the step that runs, so that a device does not
//                  wait for text between two steps
#pragma once
#include "documents.h"
#include "trainer.h"

namespace llmc {

// Read one sequence as the blocks see it: tokens, targets, positions, doc_start (T) each, and add
// its targets to `valid`. A sample beyond the end has none. Returns "" or what is wrong.
template <typename T, typename S>
std::string read_sequence(const Trainer<T, S>& t, uint64_t sample, int* tokens, int* targets,
                          int* positions, int* doc_start, size_t length, int64_t* valid) {
    bool beyond = sample >= t.samples_end;
    std::string wrong = t.window(beyond ? t.samples_end - 1 : sample, tokens, targets);
    if (!wrong.empty()) return wrong;
    split_documents(doc_start, targets, tokens, length, t.document_end);

    // Count the targets here, on the host, before the batch goes to a device.
    for (size_t i = 0; i < length; i++) {
        if (beyond) targets[i] = -1;
        positions[i] = int(i);
        *valid += targets[i] >= 0;
    }
    return "";
}

// Samples of the global batch at `cursor` go round the data-parallel ranks: micro-batch m of rank r
// takes the samples from cursor + (m * dp + r) * B on. The sequence of samples stays the same when
// dp, B or the accumulation change.
template <typename T, typename S>
std::string read_micro_batch(const Trainer<T, S>& t, const Plan& p, uint64_t cursor, int m,
                             int* batch, int64_t* valid) { // (4,N)
    size_t N = p.rows();
    uint64_t first = cursor + (uint64_t(m) * t.layout.dp.size + t.layout.dp.rank) * p.B;
    std::string wrong;
    for (size_t b = 0; b < p.B && wrong.empty(); b++) {
        int* row = batch + b * p.T;
        wrong = read_sequence(t, first + b, row, row + N, row + 2 * N, row + 3 * N, p.T, valid);
    }
    return wrong;
}

// Read the batch that a plan will want at `cursor` while a device is at work. On a CPU there is
// nothing to do beside the work: LOAD reads.
template <typename T, typename S>
void prepare_batch(Trainer<T, S>& t, int plan, uint64_t cursor) {
    PreparedBatch& next = t.next;
    if (!next.staging) return;
    const Plan& p = t.plans[plan];
    next = {plan, cursor, next.staging};
    for (int m = 0; m < p.micro_batches && next.wrong.empty(); m++) {
        int* batch = next.staging + m * 4 * p.rows();
        next.wrong = read_micro_batch(t, p, cursor, m, batch, &next.valid);
    }
}

// Send the batch on its way, the one that is prepared or one that is read now.
template <typename T, typename S>
void run_load(Trainer<T, S>& t) {
    const Plan& p = t.plans[t.plan];
    size_t N = p.rows();

    // Take the batch that is prepared. The one after it goes to the other staging memory: copies
    // from this one may then be under way.
    PreparedBatch& next = t.next;
    bool prepared = next.plan == t.plan && next.cursor == t.cursor;
    if (prepared) {
        std::swap(t.staging, next.staging);
        next.plan = -1;
    }
    t.valid = prepared ? next.valid : 0;
    std::string wrong = prepared ? next.wrong : "";

    for (int m = 0; m < p.micro_batches; m++) {
        // Or read it, where the host can write. Copy it home in one piece.
        int* home = address<int>(t, {Kind::TOKENS, -1, m}); // (4,N)
        int* batch = host_side(home, t.staging + m * 4 * N, t.ctx.where);
        if (!prepared) wrong = read_micro_batch(t, p, t.cursor, m, batch, &t.valid);
        LLMC_USER_CHECK(wrong.empty(), "%s", wrong.c_str());
        copy_in(home, batch, 4 * N * sizeof(int), t.ctx.where);
    }
}

} // namespace llmc
