// test_attention_sm90.cpp - rows of the kernel table: Hopper's attention
//   g++ -DEMULATE: the kernels' own source on the CPU; nvcc -x cu: on a GPU
#include <array>
#include <map>
#include <numeric>
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
            {1, 1, 127, 1, 1, 64, 2},  // all keys are seen, and one of a tile is not there
            {1, 45, 180, 3, 1, 64, 4}, // idle rows in a tile without a mask, before another tile
            {1, 1, 100, 3, 1, 64, 4}};
}
// More tiles of keys, and of rows, than a warp examines at once. In the last case the first tile of
// keys and the last two are seen, so a block's turn comes after one that is far away.
inline std::vector<AttentionCase> long_cases() {
    if (SMALL) return {};
    return {{1, 3, 4300, 1, 1, 8, 2}, {1, 34, 20, 64, 1, 8, 2},
            {1, 20, 4608, 1, 1, 8, 5, false, 200}};
}

// Six tiles of rows on fewer blocks, so that a block gets several, each with other documents. Tiles
// that see no key lie among tiles that do.
inline std::vector<AttentionCase> queue_cases() {
    if (SMALL) return {{1, 150, 60, 2, 1, 8, 2}};
    return {{3, 140, 140, 1, 1, 8, 1}, {1, 150, 60, 2, 1, 8, 2}, {3, 140, 140, 1, 1, 136, 1}};
}
// Heads whose forward pass alone is Hopper's own. Tiles have 64 keys, and out lies where q lay.
inline std::vector<AttentionCase> wide_cases() {
    if (SMALL) return {{1, 5, 80, 3, 1, 136, 3}};
    return {{1, 140, 140, 1, 1, 256, 0},     // more tiles than stages
            {1, 45, 140, 6, 2, 192, 3},      // idle rows, rows that see nothing, keys in any order
            {2, 70, 70, 2, 1, 160, 1, false, INT_MAX, 8},
            {1, 70, 60, 4, 2, 136, 2, true}, // ALiBi, queries before the first key
            {1, 40, 300, 2, 1, 248, 2, false, 70},
            {1, 45, 180, 3, 1, 232, 4}};
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
// More tiles than blocks, each warp being the last in turn: the queue's warps hand tiles on.
void queue_warps_row(Check& c) {
    each_warp_last = true;
    row<bf16, queue_cases, Path::CHOSEN>(c);
    each_warp_last = false;
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
    launch(claim_all_kernel, 1, 32, cudaStream_t{}, x, x.queue, taken.data(), unsigned(all + 2));

    // Count by pairs the tiles of keys that hold a key which some row of the tile sees.
    auto length = [&](size_t b, unsigned tile) {
        std::vector<bool> seen(x.key_tiles);
        const unsigned row0 = tile * x.tile_rows;
        for (unsigned row = row0; row < std::min(row0 + x.tile_rows, x.rows); row++)
            for (size_t key = 0; key < x.d.Tk; key++)
                if (sees(range_of(x, b, x.query_of(row)), x.position_of(b, key)))
                    seen[key / x.tile_keys] = true;
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
        queue_case(c, {1, 641, 641, 1, 1, 8, 0, false, 129}, 1);
        queue_case(c, {2, 300, 900, 3, 1, 8, 2}, 2);
        queue_case(c, {2, 200, 500, 2, 2, 8, 3}, 4);
        queue_case(c, {1, 300, 1024, 1, 1, 8, 5, false, 200}, 1);
        queue_case(c, {1, 300, 500, 2, 1, 256, 2, false, 200}, 1); // tiles of 64 keys
    }
    emulator::settings = {};
}

// A pass encodes the maps of its operands once. Another address or another size is another map.
void maps_row(Check& c) {
    // Set up a layer; no byte of it is read.
    std::vector<bf16> memory(1 << 16);
    AttentionOperands<bf16> operands;
    operands.q = memory.data();
    operands.k = operands.q + (1 << 13);
    operands.v = operands.k + (1 << 13);
    bf16* out = memory.data() + (1 << 15);
    operands.d = completed({1, 100, 100, 1, 1, 64, 64, 64});

    // Count what the maps of a forward pass add.
    HopperMaps maps;
    auto encoded = [&] {
        HopperOperands<bf16> x = {};
        hopper_operands(x, operands, nullptr, false);
        const long before = emulator::encoded_maps;
        maps = hopper_maps(x, out);
        return emulator::encoded_maps - before;
    };
    CASE(c, "tensor maps");
    expect(c, encoded() == 4, "a layer has a map for each of q, k, v, out");
    expect(c, encoded() == 0, "the same layer encodes a map again");
    expect(c, maps.k.base != maps.v.base && maps.q.dims[2] == 100, "the wrong map is found");

    // Change an address, a size, a stride and a box.
    out += 64;
    expect(c, encoded() == 1, "out at another address");
    operands.d.Tk = 99;
    expect(c, encoded() == 2 && maps.k.dims[2] == 99, "fewer keys");
    operands.d.q_stride = 128;
    expect(c, encoded() == 1 && maps.q.strides[2] == 256, "wider rows of q");
    operands.d = completed({1, 100, 100, 4, 2, 64, 256, 128});
    expect(c, encoded() == 4 && maps.q.box[1] == 2, "groups of two heads");
    operands.d = completed({1, 100, 100, 4, 4, 64, 256, 256});
    expect(c, encoded() == 4 && maps.q.box[1] == 1, "each head alone");
}

// A layer of zeros with two tiles of rows and three of keys.
struct Zeros {
    AttentionDims d = completed({1, 200, 300, 1, 1, 64, 64, 64});
    std::vector<bf16> q, k, v, dout, out, dq, dk, dv;
    std::vector<float> lse;
    std::vector<int> rows, keys, start;
    std::vector<unsigned char> scratch;
    AttentionOperands<bf16> x;

    Zeros() : q(200 * 64), k(300 * 64), v(k), dout(q), out(q), dq(q), dk(k), dv(k), lse(200),
              rows(200), keys(300), start(200), scratch(attention_hopper_scratch_bytes(d)) {
        std::iota(keys.begin(), keys.end(), 0);
        std::iota(rows.begin(), rows.end(), 100);
        x = {q.data(),    k.data(),    v.data(),     dout.data(), rows.data(),
             keys.data(), start.data(), nullptr, d};
    }
    void forward() {
        attention_hopper_forward(out.data(), lse.data(), x, scratch.data(), cudaStream_t{});
    }
    void backward() {
        attention_hopper_backward(dq.data(), dk.data(), dv.data(), out.data(), lse.data(), x,
                                  scratch.data(), cudaStream_t{});
    }
};

// A pass is few launches, as the head of attention_sm90.cuh says.
void launches_row(Check& c) {
    Zeros layer;
    auto count = [](auto run) {
        emulator::launches.clear();
        run();
        size_t sum = 0;
        for (auto& [kernel, times] : emulator::launches) sum += times;
        return sum;
    };
    CASE(c, "launches");
    expect(c, count([&] { layer.forward(); }) == 3, "forward is not three launches");
    expect(c, count([&] { layer.backward(); }) == 3, "backward is not three launches");
}

// The largest group and the largest heads, and one step beyond, which other kernels run.
void limits_row(Check& c) {
    CASE(c, "limits");
    struct Case {
        size_t group, HS;
        bool softcap, forward, backward;
    };
    for (Case s : {Case{64, 128, false, true, true}, {65, 128, false, false, false},
                   {1, 136, false, true, false}, {64, 256, true, true, false},
                   {1, 72, true, true, true}, {1, 64, true, false, false}}) {
        AttentionDims d = completed({1, 4, 4, s.group, 1, s.HS, s.group * s.HS, s.HS});
        auto taken = [&](bool backward) {
            AttentionCall call = {sizeof(bf16), s.softcap, false, backward};
            return attention_kernels(d, call, true) == AttentionKernels::WGMMA;
        };
        expect(c, taken(false) == s.forward && taken(true) == s.backward, "the wrong kernels");
        expect(c, (attention_hopper_scratch_bytes(d) > 0) == (s.group <= 64), "its scratch");
    }
}

// Turns of blocks that start in another order than their indices, on a GPU that gives up after
// two looks: the blocks that wait go on, and the next kernel reports the loss. Blocks that start
// in order lose no turn.
void lost_turns_row(Check& c) {
    // The loss must be found in reverse order, and only there.
    CASE(c, "lost turns");
    Zeros layer;
    for (auto order : {emulator::Order::FORWARD, emulator::Order::REVERSE}) {
        emulator::settings.order = order;
        emulator::turn_polls = 2;
        layer.backward();
        bool lost = false;
        for (const std::string& text : emulator::take_messages())
            lost |= text.find("turns were lost") != std::string::npos;
        expect(c, lost == (order == emulator::Order::REVERSE), lost ? "in order" : "not found");
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
         {"attention on Hopper, bf16, soft caps", row<bf16, cap_cases, Path::CHOSEN>},
         {"attention on Hopper, fp16, soft caps", row<fp16, cap_cases, Path::CHOSEN>},
         {"attention on Hopper, bf16, wide heads", row<bf16, wide_cases, Path::CHOSEN>},
         {"attention on Hopper, many tiles", row<bf16, long_cases, Path::HOPPER>},
         {"attention on Hopper, more tiles than blocks", queue_warps_row},
         {"attention on Hopper, gaps", row<bf16, gap_cases, Path::HOPPER>},
         {"attention on Hopper, sums in float", attention_sums_kernels<bf16>},
         {"attention on Hopper, sums in bf16", attention_sums_kernels<bf16, bf16>},
#if defined(EMULATE)
         {"attention on Hopper, turns that are lost", lost_turns_row},
         {"attention on Hopper, queue", queue_row},
         {"attention on Hopper, maps", maps_row},
         {"attention on Hopper, launches", launches_row},
         {"attention on Hopper, limits", limits_row},
#endif
         {"attention on Hopper of NaN", nan_row}});
}
