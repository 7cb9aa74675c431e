// prompt_tuning.h - a trained prompt becomes a prefix: its rows' keys and values - arXiv:2104.08691
//   Prompt tuning trains n rows (n,C) that stand before the embeddings of a text. Attention is
//   causal, so no text changes what the rows become: later tokens see them by their keys and values
//   alone, in each layer the same ones. attention_join.cuh has a place for those.
//   1. evaluate n tokens, and put the rows in the place of their embeddings
//   2. take each block's rotated keys and its values
//   3. they are the prefix from here on; what is trained further is that prefix
//   A text begins after both at position n. Sliding windows differ: a row leaves a window, a
//   prefix does not.
//   Cost: one forward pass of n rows at the start of a run.
#pragma once
#include <utility>
#include "../action.h"
#include "../adapters.h"
#include "../comm/comm.h"
#include "../context.h"
#include "../context_parallel.h"
#include "../gpt2.h"
#include "../head.h"
#include "../layers.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/memory.h"
#include "../ops/types.h"
#include "../parameters.h"
#include "../sharding.h"
#include "../step.h"
#include "../tensor_parallel.h"
#include "../trainer.h"

namespace llmc {

// Keys and values of the rows on this rank, (n, NKV HS) each.
struct PromptKeys {
    std::vector<float> k, v;
};

// Put a prompt's rows in the place of the embeddings. Learned positions add to them as to tokens.
template <typename T, typename S>
void put_prompt(Trainer<T, S>& t, const Action& a, const std::vector<float>& rows, // (n,C)
                const std::vector<float>& positions) {                            // (P,C) or empty
    // Sequence-parallel ranks have a share of the rows.
    const Shape& s = t.ctx.shape;
    size_t R = stream_rows(t.ctx);
    size_t n = t.ctx.batch.T;
    size_t first = s.rank.rows > 1 ? size_t(t.ctx.tp.rank) * R : 0;

    // Sequences are all alike: each has the prompt's n rows.
    acc_t<T> scale = embedding_scale<T>(s);
    std::vector<T> stream(R * s.C);
    for (size_t r = 0; r < R; r++)
        for (size_t c = 0; c < s.C; c++) {
            size_t at = (first + r) % n * s.C + c;
            acc_t<T> x = scale * acc_t<T>(rows[at]);
            if (!positions.empty())
                x += acc_t<T>(positions[at]);
            stream[r * s.C + c] = from_acc<T>(x);
        }

    // Wait for the copy: it reads memory that ends here.
    copy_in(output_of(t, a), stream.data(), stream.size() * sizeof(T), t.ctx.where);
    wait_for(t.ctx.where);
}

// Take the keys and values that a block's forward pass has left.
template <typename T, typename S>
PromptKeys take_keys(Trainer<T, S>& t, const Action& a) {
    PromptKeys found;
    size_t n = t.ctx.batch.T;
    size_t KV = t.ctx.shape.NKV * t.ctx.shape.HS;

    // Copy n rows that lie `stride` elements apart.
    auto take = [&](const T* rows, size_t stride) {
        std::vector<T> some(n * KV);
        for (size_t i = 0; i < n; i++)
            copy_out(&some[i * KV], rows + i * stride, KV * sizeof(T), t.ctx.where);
        std::vector<float> values;
        for (T x : some)
            values.push_back(float(to_acc(x)));
        return values;
    };

    // Find them: side by side in a row, or apart. Latent attention has neither.
    with_block(t, a, [&](const auto&, const auto& acts) {
        if constexpr (requires { acts.qkv; }) {
            Qkv<T> x = split_qkv(t.ctx.shape, acts.qkv);
            found.k = take(x.k, x.kv_stride);
            found.v = take(x.v, x.kv_stride);
        } else if constexpr (requires { acts.k; acts.v; }) {
            found.k = take(acts.k, KV);
            found.v = take(acts.v, KV);
        }
    });
    return found;
}

// Make the model's prefix from a prompt's rows. The plan evaluates n tokens of each of its
// sequences, all alike. All ranks call.
template <typename T, typename S>
void make_prefix(Trainer<T, S>& t, int plan, const std::vector<float>& rows) { // (n,C)
    // Learned positions lie on one stage, and may lie in shards.
    std::vector<float> positions;
    for (const Parameter& p : t.model.parameters)
        if (t.model.buckets[p.bucket].role == Role::POSITIONS)
            positions = get_weight(t, p);

    // Run the base alone: the rows stand at its first positions.
    Shape& shape = t.model.shape;
    size_t n = std::exchange(shape.tuned.prefix, size_t(0));
    init_constants(t);
    std::map<int, PromptKeys> found;

    // Look at each action of the pass: put the rows before the blocks, and take what each leaves.
    auto after = std::exchange(t.hooks.after, [&](const Action& a) {
        if (a.op != Op::F) return;
        if (a.layer == 0)
            put_prompt(t, a, rows, positions);
        if (t.model.is_block(a.layer))
            found[a.layer] = take_keys(t, a);
    });

    // Give it n tokens without targets: any tokens do, since the rows replace them.
    Window window = std::exchange(t.data.window, [n](uint64_t, int* tokens, int* targets) {
        std::fill_n(tokens, n, 0);
        std::fill_n(targets, n, -1);
        return std::string();
    });
    int document_end = std::exchange(t.data.document_end, -1);
    uint64_t end = std::exchange(t.data.samples_end, UINT64_MAX);

    run_plan(t, plan);
    plan_loss(t); // waits for all ranks

    // Restore the trainer.
    shape.tuned.prefix = n;
    init_constants(t);
    t.hooks.after = after;
    t.data.window = window;
    t.data.document_end = document_end;
    t.data.samples_end = end;

    // Give all ranks the same numbers: one rank contributes each head's, and all others add 0.
    const Layout& layout = t.layout;
    bool first = layout.dp.rank == 0 && layout.cp.rank == 0;
    bool owner = first && layout.tp.rank % ranks_of_kv_head(layout, t.model) == 0;
    size_t all = shape.NKV * shape.HS;
    for (const Parameter& p : t.model.parameters) {
        if (!is_adapter(t.model, p)) continue;
        const PromptKeys& both = found[p.layer];
        const std::vector<float>& mine = p.name.ends_with(".k") ? both.k : both.v;
        size_t KV = mine.size() / n;

        // Put this rank's heads at their place among all heads.
        size_t head = size_t(layout.tp.rank) * shape.NKV / size_t(layout.tp.size);
        std::vector<float> values(n * all);
        for (size_t i = 0; owner && KV > 0 && i < n; i++)
            std::copy_n(&mine[i * KV], KV, &values[i * all + head * shape.HS]);
        all_reduce_sum(t.comms.world, values.data(), values.size(), Cpu{});
        set_weight(t, p, values.data());
    }
}

} // namespace llmc
