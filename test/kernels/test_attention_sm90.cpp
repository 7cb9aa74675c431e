// test_attention_sm90.cpp - rows of the kernel table: Hopper's attention
//   g++ -DEMULATE: the kernels' own source on the CPU; nvcc -x cu: on a GPU
#include <array>
#include <map>
#include "kernels_attention.h"

using namespace llmc;

// Tiles have 128 rows and 128 keys; backward tiles have 64 rows from 72 channels on.
inline std::vector<AttentionCase> hopper_cases() {
    if (SMALL)
        return {{1, 70, 140, 2, 1, 64, 1},
                {1, 5, 400, 1, 1, 64, 2, true},
                {1, 10, 20, 3, 1, 72, 3, true}};

    return {{1, 1, 1, 1, 1, 64, 0},
            {1, 65, 65, 1, 1, 64, 0},
            {1, 300, 300, 1, 1, 64, 0}, // more tiles than stages
            {3, 130, 130, 1, 1, 64, 0}, // more heads than run together
            {1, 129, 129, 2, 2, 128, 0, false, INT_MAX, 256},
            {2, 70, 70, 4, 2, 32, 1},  // documents, groups of two
            {1, 45, 200, 3, 1, 64, 2}, // three heads: idle rows in a tile
            {1, 50, 50, 7, 1, 96, 0, true},
            {2, 40, 150, 2, 2, 64, 3},             // rows that see nothing, keys in any order
            {1, 20, 400, 1, 1, 64, 2, true},       // ALiBi: every tile reads positions
            {1, 200, 200, 1, 1, 24, 0, false, 40}, // tiles left of the window are skipped
            {1, 256, 256, 1, 1, 8, 0, false, 255}, // the last row does not see the first key
            {1, 150, 60, 2, 1, 40, 2, true},       // queries before the first key
            {1, 3, 400, 4, 1, 128, 2, false, 150, 8},
            {1, 2, 30, 64, 1, 8, 2}, // a tile has one query
            {1, 140, 260, 2, 1, 128, 1},
            {1, 20, 30, 1, 1, 104, 2},
            {1, 22, 150, 3, 1, 64, 4}, // an idle row in a tile without a mask
            {1, 1, 100, 3, 1, 64, 4}};
}
// More tiles of keys, and of rows, than a warp examines at once.
inline std::vector<AttentionCase> long_cases() {
    if (SMALL) return {};
    return {{1, 3, 4300, 1, 1, 8, 2}, {1, 34, 20, 64, 1, 8, 2}};
}

// Six tiles of rows on fewer blocks, so that a block gets several, each with other documents. Tiles
// that see no key lie among tiles that do.
inline std::vector<AttentionCase> queue_cases() {
    if (SMALL) return {{1, 150, 60, 2, 1, 8, 2}};
    return {{3, 140, 140, 1, 1, 8, 1}, {1, 150, 60, 2, 1, 8, 2}};
}
// Sequences with gaps between them, and a scale.
inline std::vector<AttentionCase> gap_cases() {
    return {{2, 33, 140, 2, 1, 32, 2, false, INT_MAX, 8, 0, 0, 0, 0.3f, 2}};
}

// Whether the rows are skipped, because the GPU is no Hopper. A skipped row counts one check.
inline bool skip(Check& c) {
    bool other = false;
#if defined(__CUDACC__)
    other = !is_hopper(cudaStream_t{});
    if (other) printf("skipped: this GPU is no Hopper\n");
#endif
    c.checks += other;
    return other;
}
template <typename T, std::vector<AttentionCase> cases(), Path path> void row(Check& c) {
    if (skip(c)) return;
    if (cases().empty()) c.checks++;
    attention_kernels<T, cases, path>(c);
}
void nan_row(Check& c) {
    if (!skip(c)) attention_nan_kernels<bf16, Path::HOPPER>(c);
}

#if defined(EMULATE)
// The queue holds each tile of rows of each head once, and of each sequence the longest tile first.
// A tile's length is counted by the definition, as tiles of keys that its rows see. Claims after
// the queue's end find nothing.
__global__ void claim_all_kernel(const RowOperands<bf16> x, const TileQueue queue, RowTile* taken,
                                 unsigned claims) {
    for (unsigned i = 0; i < claims; i++) {
        const RowTile next = queue.claim(x);
        if (threadIdx.x == 0) taken[i] = next;
    }
}
void queue_case(Check& c, AttentionCase s, unsigned together) {
    CASE(c, "queue of B=%zu Tq=%zu Tk=%zu NH=%zu window %d, %u heads together", s.B, s.Tq, s.Tk,
         s.NH, s.window, together);

    // Make a queue for a layer, and claim everything and two more.
    AttentionInputs in = attention_inputs(c, s.B, s.Tq, s.Tk, s.NH, s.NKV, s.HS, s.kind, false);
    AttentionOperands<bf16> operands;
    operands.d = {s.B, s.Tq, in.d.Tk, s.NH, s.NKV, s.HS};
    operands.d.window = s.window;
    operands.q_positions = in.q_positions.data();
    operands.k_positions = in.k_positions.data();
    operands.doc_start = in.doc_start.data();
    std::vector<unsigned char> scratch(attention_hopper_scratch_bytes(completed(operands.d)));
    HopperOperands<bf16> x = {};
    hopper_operands(x, operands, scratch.data(), false);
    x.queue.heads_together = together;
    make_queue<bf16>(x.queue, x, cudaStream_t{});

    const size_t all = s.B * s.NKV * x.tiles;
    std::vector<RowTile> taken(all + 2);
    launch(claim_all_kernel, 1, 32, 0, cudaStream_t{}, x, x.queue, taken.data(), unsigned(all + 2));

    // Count by pairs the tiles of keys that hold a key which some row of the tile sees.
    auto length = [&](size_t b, unsigned tile) {
        std::vector<bool> seen(x.key_tiles);
        const unsigned row0 = tile * x.tile_rows;
        for (unsigned row = row0; row < std::min(row0 + x.tile_rows, x.rows); row++)
            for (size_t key = 0; key < x.d.Tk; key++)
                if (sees(range_of(x, b, x.query_of(row)), x.position_of(b, key)))
                    seen[key / HOPPER_KEYS] = true;
        return int(std::count(seen.begin(), seen.end(), true));
    };

    // Each place of the queue names a new tile.
    std::map<std::array<unsigned, 3>, int> times;
    std::map<std::array<unsigned, 2>, int> last;
    std::vector<unsigned> turns(s.B * s.NKV);
    size_t wrong = taken[all].key_tiles != -1 || taken[all + 1].key_tiles != -1;
    for (size_t i = 0; i < all; i++) {
        const RowTile& t = taken[i];
        wrong += times[{t.b, t.kh, t.tile}]++ || t.b >= s.B || t.kh >= s.NKV || t.tile >= x.tiles;

        // Where positions have no order, spans may take a tile for visible that no row sees.
        wrong += s.kind == 3 ? t.key_tiles < length(t.b, t.tile)
                             : t.key_tiles != length(t.b, t.tile);
        auto before = last.try_emplace({t.b, t.kh}, INT_MAX).first;
        wrong += t.key_tiles > before->second;
        before->second = t.key_tiles;

        // Heads that are mixed never differ by more than one tile; earlier heads are done.
        const unsigned head = unsigned(t.b * s.NKV + t.kh), first = head / together * together;
        const unsigned end = std::min(first + together, unsigned(turns.size()));
        turns[head]++;
        for (unsigned other = first; other < end; other++)
            wrong += turns[other] > turns[head] || turns[other] + 1 < turns[head];
        for (unsigned other = 0; other < first; other++)
            wrong += turns[other] < x.tiles;
    }
    expect(c, wrong == 0, std::to_string(wrong) + " places of the queue are wrong");
}
void queue_row(Check& c) {
    typedef emulator::Order Order;
    for (auto order : {Order::FORWARD, Order::REVERSE, Order::SHUFFLED}) {
        emulator::settings.order = order;
        queue_case(c, {2, 700, 700, 2, 2, 8, 0}, 3);
        queue_case(c, {2, 700, 700, 2, 1, 8, 1}, 1);
        queue_case(c, {1, 700, 700, 2, 2, 8, 0, false, 128}, 2);
        queue_case(c, {1, 700, 700, 1, 1, 8, 0, false, 129}, 1);
        queue_case(c, {2, 300, 900, 3, 1, 8, 2}, 2);
        queue_case(c, {2, 200, 500, 2, 2, 8, 3}, 4);
    }
    emulator::settings = {};
}

// Turns of blocks that start in another order than their indices, on a GPU that gives up after
// two looks: the blocks that wait go on, and the next kernel reports the loss. Blocks that start
// in order lose no turn.
void lost_turns_row(Check& c) {
    // Two tiles of rows and three of keys.
    AttentionDims d = completed({1, 200, 300, 1, 1, 64, 64, 64});
    std::vector<bf16> q(200 * 64), dout(q), out(q), dq(q), k(300 * 64), v(k), dk(k), dv(k);
    std::vector<float> lse(200);
    std::vector<int> rows(200), keys(300), start(200);
    for (int i = 0; i < 300; i++) keys[size_t(i)] = i;
    for (int i = 0; i < 200; i++) rows[size_t(i)] = 100 + i;

    AttentionOperands<bf16> x = {q.data(),    k.data(),    v.data(),     dout.data(), rows.data(),
                                 keys.data(), start.data(), nullptr, d};
    std::vector<unsigned char> scratch(attention_hopper_scratch_bytes(d));

    // The loss must be found in reverse order, and only there.
    for (auto order : {emulator::Order::FORWARD, emulator::Order::REVERSE}) {
        emulator::settings.order = order;
        emulator::turn_polls = 2;
        attention_hopper_backward(dq.data(), dk.data(), dv.data(), out.data(), lse.data(), x,
                                  scratch.data(), cudaStream_t{});
        bool lost = false;
        for (const std::string& text : emulator::take_messages())
            lost |= text.find("turns were lost") != std::string::npos;
        c.checks++;
        if (lost == (order == emulator::Order::REVERSE)) continue;
        c.failures++;
        printf("lost turns: %s\n", lost ? "found in order" : "not found");
    }
    emulator::settings = {};
    emulator::turn_polls = 0;
}
#endif

int main(int argc, char** argv) {
#if defined(EMULATE)
    emulator::gpu = emulator::HOPPER;
#endif
    return kernel_main(
        argc, argv,
        {{"attention on Hopper, bf16", row<bf16, hopper_cases, Path::HOPPER>},
         {"attention on Hopper, fp16", row<fp16, hopper_cases, Path::HOPPER>},
         {"attention on Hopper, dQ in any order", row<bf16, hopper_cases, Path::HOPPER_ANY_ORDER>},
         {"attention on Hopper, many tiles", row<bf16, long_cases, Path::HOPPER>},
         {"attention on Hopper, more tiles than blocks", row<bf16, queue_cases, Path::HOPPER>},
         {"attention on Hopper, gaps", row<bf16, gap_cases, Path::HOPPER>},
#if defined(EMULATE)
         {"attention on Hopper, turns that are lost", lost_turns_row},
         {"attention on Hopper, queue", queue_row},
#endif
         {"attention on Hopper of NaN", nan_row}});
}
