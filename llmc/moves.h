// moves.h - what FETCH and PARK do; and lasting data read and written wherever they lie
//   With the host's memory a move is copies in a stream of its own: on a CPU they are over at the
//   start. With a file its threads move blocks, and the finish waits for them.
//   Checkpoints and initial weights see no chunks: read_kept() and fill_kept() walk them.
#pragma once
#include "trainer.h"

namespace llmc {

// ----------------------------------------------------------------------------
// FETCH and PARK

// Where a chunk's part of a datum lies; no bytes: there is none.
template <typename T, typename S>
Place part_place(const Trainer<T, S>& t, Data d) {
    const Plan& p = t.plans[t.plan];
    Data home = home_of(p, d);
    const Place* found = arena_find(t.arena, t.plan, t.at, home);
    Place part = found ? *found : Place{};
    if (!found || home == d) return part;

    // Count to the chunk within what this rank updates, and to that within all of it.
    Range range = updated_range(t.layout, t.model, d.of);
    Range chunk = chunk_of(range, p.offload, d.chunk);
    size_t size = d.kind == Kind::WEIGHT ? sizeof(T) : sizeof(acc_t<T>);
    bool within = range.sharded && !is_sharded(t.layout, t.model, home);
    part.offset += (chunk.first - (within ? 0 : range.first)) * size;
    part.bytes = chunk.count * size;
    return part;
}

// f(data, place, staged) for each part of a chunk that has bytes: where it lies and where it goes.
template <typename T, typename S, typename F>
void for_each_staged(const Trainer<T, S>& t, const Action& a, F f) {
    // Walk the parts as sizes.h has counted them.
    Data staged = {Kind::STAGED, a.bucket, -1, a.chunk};
    unsigned char* at = address<unsigned char>(t, staged);
    for (Data d : staged_data(t.plans[t.plan], a.bucket, a.chunk)) {
        Place place = part_place(t, d);
        if (!place.bytes) continue; // no master beside wide weights
        f(d, place, at);
        at += round_up(place.bytes, ARENA_ALIGN);
    }
}

// A datum for an update: of this rank's range all, a chunk, or the staged chunk; null: none.
template <typename P, typename T, typename S>
P* update_part(const Trainer<T, S>& t, const Action& a, Data wanted) {
    // Without chunks all of it is here.
    const Plan& p = t.plans[t.plan];
    if (a.chunk < 0)
        return updated_part<P>(t, wanted, updated_range(t.layout, t.model, a.bucket));

    // A chunk lies where the update runs, or where FETCH has brought it.
    wanted.chunk = a.chunk;
    if (tier_of(p, wanted) == p.offload.update) {
        Place part = part_place(t, wanted);
        unsigned char* base = t.arena.memory[int(part.tier)].base;
        return part.bytes ? reinterpret_cast<P*>(base + part.offset) : nullptr;
    }
    unsigned char* found = nullptr;
    for_each_staged(t, a, [&](Data d, const Place&, unsigned char* staged) {
        if (d == wanted) found = staged;
    });
    return reinterpret_cast<P*>(found);
}

// f(place, here) for each datum of a move: where it lies, and where the step uses it.
template <typename T, typename S, typename F>
void for_each_moved(const Trainer<T, S>& t, const Action& a, F f) {
    if (a.chunk >= 0)
        return for_each_staged(t, a, [&](Data d, const Place& place, unsigned char* staged) {
            bool used_up = a.op == Op::PARK && d.kind == Kind::GRAD;
            if (!used_up) f(place, staged);
        });

    // Weights and gradients lie in chunks: of a gradient, of what this rank updates.
    const Plan& p = t.plans[t.plan];
    if (a.bucket >= 0 && lies_in_chunks(a.kind)) {
        Data whole = moved_data(p, t.model, a)[0];
        unsigned char* here = address<unsigned char>(t, whole);
        Range range = updated_range(t.layout, t.model, a.bucket);
        if (a.kind == Kind::GRAD)
            here = reinterpret_cast<unsigned char*>(updated_part<acc_t<T>>(t, whole, range));
        for (Data d : tiered_data(p, t.model, a)) {
            const Place* place = arena_find(t.arena, t.plan, t.at, d);
            // Chunks are padded in their tier alone.
            f(*place, here);
            here += place->bytes;
        }
        return;
    }

    // A level of recomputation keeps no rows of some kinds.
    for (Data d : moved_data(p, t.model, a))
        if (const Place* place = arena_find(t.arena, t.plan, t.at, parked(d)))
            f(*place, address<unsigned char>(t, d));
}

// Start a move; what it touches is free when its flight is over.
template <typename T, typename S>
InFlight<S> start_move(Trainer<T, S>& t, const Action& a) {
    // All blocks of a chunk are one move.
    bool fetches = a.op == Op::FETCH;
    Memory* memory = t.arena.memory;
    auto move = std::make_shared<DiskMove>();

    // Stand behind what compute has been given: it may still use these bytes.
    S stream = t.move_stream, compute = t.ctx.where;
    wait_point(record_point(compute), stream);
    Placements* checked = t.comms.placements();
    for_each_moved(t, a, [&](const Place& place, unsigned char* here) {
        // These bytes will be other data's.
        if (checked) placement_forget(*checked, here, place.bytes);

        // A file has no address: its threads take a place in it.
        Memory& m = memory[int(place.tier)];
        unsigned char* home = m.base + place.offset;
        if (place.tier == Tier::DISK) {
            Way way = fetches ? Way::FROM_DISK : Way::TO_DISK;
            disk_start(*m.disk, move, way, here, place.offset, place.bytes, stream);
            return;
        }

        // An update that runs on the host fetches from the device.
        unsigned char* to = fetches ? here : home;
        unsigned char* from = fetches ? home : here;
        bool leaves = fetches == (place.tier == Tier::DEVICE);
        leaves ? copy_out_later(to, from, place.bytes, stream)
               : copy_in(to, from, place.bytes, stream);
    });

    // A file's blocks are waited for by the host, copies by the stream of compute.
    InFlight<S> f;
    f.moves = true;
    f.action = t.at;
    if (Disk* disk = memory[int(Tier::DISK)].disk.get()) {
        f.rest = [=] {
            std::string wrong = disk_finish(*disk, *move);
            LLMC_USER_CHECK(wrong.empty(), "--offload-to %s", wrong.c_str());
        };
    } else {
        f.rest = [=, point = record_point(stream)] { wait_point(point, compute); };
    }
    return f;
}

// ----------------------------------------------------------------------------
// lasting data, wherever they lie

// Where a datum lies, or its first chunk; null: this rank has none.
template <typename T, typename S>
const Place* kept_place(const Trainer<T, S>& t, Data d) {
    const Place* place = arena_find(t.arena, t.plan, t.at, d);
    if (place) return place;

    // An offloaded bucket has a first chunk, if it has any.
    d.chunk = 0;
    return arena_find(t.arena, t.plan, t.at, d);
}

// f(place, byte, from, count) for each piece of elements [at, at+count) of V: `byte` in its tier,
// `from` counts elements from `at`.
template <typename V, typename T, typename S, typename F>
void for_each_piece(const Trainer<T, S>& t, Data d, size_t at, size_t count, F f) {
    // On the device a datum is one piece.
    const Place* whole = arena_find(t.arena, t.plan, t.at, d);
    if (whole)
        return f(*whole, whole->offset + at * sizeof(V), size_t(0), count);

    // Take from each chunk what the range has of it.
    size_t chunk = t.plans[t.plan].offload.chunk;
    for (size_t from = 0; from < count;) {
        d.chunk = int((at + from) / chunk);
        size_t within = (at + from) % chunk, n = std::min(count - from, chunk - within);
        // Chunks of a bucket lie apart.
        const Place* place = arena_find(t.arena, t.plan, t.at, d);
        f(*place, place->offset + within * sizeof(V), from, n);
        from += n;
    }
}

// Copy elements to the host.
template <typename V, typename T, typename S>
void read_kept(const Trainer<T, S>& t, V* to, Data d, size_t at, size_t count) {
    // A datum may lie in several chunks, all in one tier.
    for_each_piece<V>(t, d, at, count, [&](const Place& p, size_t byte, size_t from, size_t n) {
        const Memory& m = t.arena.memory[int(p.tier)];
        size_t bytes = n * sizeof(V);
        switch (p.tier) {
        case Tier::DEVICE: return copy_out(to + from, m.base + byte, bytes, t.ctx.where);
        case Tier::HOST: memcpy(to + from, m.base + byte, bytes); return;
        case Tier::DISK: {
            std::string wrong = disk_read(*m.disk, to + from, byte, bytes);
            LLMC_USER_CHECK(wrong.empty(), "--offload-to %s", wrong.c_str());
        }
        }
    });
}

// Elements [at, at+count) become value(i), i from 0; over on return.
template <typename V, typename T, typename S, typename F>
void fill_kept(Trainer<T, S>& t, Data d, size_t at, size_t count, F value) {
    for_each_piece<V>(t, d, at, count, [&](const Place& p, size_t byte, size_t from, size_t n) {
        const Memory& m = t.arena.memory[int(p.tier)];
        // Where there is an address, fill in place.
        V* home = reinterpret_cast<V*>(m.base + byte);
        auto here = [&](size_t i) { return value(from + i); };
        switch (p.tier) {
        case Tier::DEVICE: return fill_memory(home, n, here, t.ctx.where);
        case Tier::HOST: return fill_memory(home, n, here, Cpu{});
        case Tier::DISK: {
            std::vector<V> values(n); // a chunk at most
            fill_memory(values.data(), n, here, Cpu{});
            std::string wrong = disk_write(*m.disk, values.data(), byte, n * sizeof(V));
            LLMC_USER_CHECK(wrong.empty(), "--offload-to %s", wrong.c_str());
        }
        }
    });
}

} // namespace llmc
