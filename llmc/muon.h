// muon.h - Muon over many ranks: parts of a matrix meet at its owner - arXiv:2502.16982
//   AdamW updates elements, Muon whole matrices (ops/muon.cuh). ZeRO and tensor parallelism cut
//   them anywhere, so MUON brings the parts together, between NORM and the updates:
//     1. each rank updates the momentum of its own range, and puts u in the gradient's place
//     2. parts of u go to the matrix's owner, which orthogonalises it
//     3. parts of the result go back, in the gradient's place; UPDATE then needs no other element
//   The owner also updates NorMuon's second moments and sends them to all that have the matrix.
//   With offloaded state step 1 goes chunk by chunk ahead of MUON (offload.h).
//   A rank sends and receives no more than it updates. Without ZeRO all ranks have u, and step 2
//   sends nothing among data-parallel ranks. The result has the bits of one process, as long as
//   gradients have them, for a product does not depend on who makes it.
//   Owners are fixed: matrices in the order of their cost, each to the rank with the least so far.
//   They run in rounds, in which each owner has one matrix.
//   Memory: room for one matrix, about (8 + 4) r c bytes in bf16; no second moment.
#pragma once
#include "action.h"
#include "arena.h"
#include "comm/comm.h"
#include "comm/group.h"
#include "layout.h"
#include "model.h"
#include "ops/adamw.cuh"
#include "ops/memory.h"
#include "ops/muon.cuh"
#include "ops/step_scale.h"
#include "ops/tensor_table.cuh"
#include "ops/types.h"
#include "sharding.h"
#include "trainer.h"
#include <algorithm>
#include <map>
#include <vector>

namespace llmc {

// A matrix of a parameter, and the rank of the world that orthogonalises it.
struct MuonMatrix {
    int parameter;
    size_t rows, cols;
    size_t first; // its first element in the whole parameter
    int owner = 0;
    int round = 0;

    size_t elements() const { return rows * cols; }
    double flops() const { // of an iteration
        double m = double(std::min(rows, cols));
        double n = double(std::max(rows, cols));
        return 4 * m * m * n + 2 * m * m * m;
    }
};

// The ranks that hold parts of a bucket's matrices which this rank holds parts of: those of its
// stage, its experts, and its replica of shards.
inline std::vector<int> muon_ranks(const Layout& me, Group group) {
    return ranks_where(me, [&](const Layout& other) {
        bool same_stage = other.pp.rank == me.pp.rank;
        bool same_experts =
            group == Group::DATA || expert_axis(other).rank == expert_axis(me).rank;
        bool same_replica =
            me.weights_near || replica_axis(other, group).rank == replica_axis(me, group).rank;
        return same_stage && same_experts && same_replica;
    });
}

// All matrices of which this rank holds parts, with owners and rounds. All ranks that hold parts of
// a matrix find the same.
inline std::vector<MuonMatrix> muon_matrices(const Layout& layout, const Model& model) {
    std::vector<MuonMatrix> all;
    if (!model.muon) return all;
    std::map<int, double> load; // [rank]: FLOPs so far
    std::map<int, int> rounds;  // [rank]: matrices so far
    for (Group group : {Group::DATA, Group::EXPERTS}) {
        // List the group's matrices. Of a stack a rank knows the experts that it has.
        std::vector<MuonMatrix> list;
        for (int i = 0; i < int(model.parameters.size()); i++) {
            const Parameter& p = model.parameters[size_t(i)];
            bool mine = p.muon && model.buckets[p.bucket].group == group;
            if (!mine || !bucket_is_mine(layout, model, p.bucket)) continue;
            size_t count = p.matrices() / size_t(p.experts.size);
            size_t rows = p.rows() / p.matrices();
            size_t first = count * size_t(p.experts.rank);
            for (size_t k = first; k < first + count; k++)
                list.push_back({i, rows, p.cols(), k * rows * p.cols()});
        }

        // Give the costliest ones away first.
        std::vector<int> ranks = muon_ranks(layout, group);
        std::stable_sort(list.begin(), list.end(), [](const MuonMatrix& a, const MuonMatrix& b) {
            return a.flops() > b.flops();
        });
        for (MuonMatrix& m : list) {
            m.owner = *std::min_element(ranks.begin(), ranks.end(),
                                        [&](int a, int b) { return load[a] < load[b]; });
            m.round = rounds[m.owner]++;
            load[m.owner] += m.flops();
            all.push_back(m);
        }
    }
    std::stable_sort(all.begin(), all.end(), [](const MuonMatrix& a, const MuonMatrix& b) {
        return a.round < b.round;
    });
    return all;
}

// A rank's part of a matrix: `count` elements, which lie together from `at` on in the range of the
// bucket that the rank updates. `piece`: the first of them, counted in its piece of the parameter.
struct MuonPart {
    size_t at, piece, count;
    PieceRuns runs;
};
inline MuonPart muon_part(const Layout& layout, const Model& model, const MuonMatrix& m) {
    const Parameter& p = model.parameters[size_t(m.parameter)];
    Range range = updated_range(layout, model, p.bucket);
    PieceRuns runs = piece_runs(p, layout.tp.rank, layout.tp.size);

    // The number of the piece's elements that lie before an element of the parameter.
    auto before = [&](size_t element) {
        size_t beyond = element - std::min(element, runs.start);
        size_t period = runs.run + runs.gap;
        return beyond / period * runs.run + std::min(beyond % period, runs.run);
    };
    size_t from = std::max(p.offset + before(m.first), range.first);
    size_t to = std::min({p.offset + before(m.first + m.elements()),
                          p.offset + p.local_elements(), range.first + range.count});
    if (from >= to) return {0, 0, 0, runs};
    return {from - range.first, from - p.offset, to - from, runs};
}

// Call f(local, global, width, count) for the parts of a part that lie evenly: `count` runs of
// `width` elements, that begin at `local` in the part and at `global` in the matrix; the next run
// of the matrix comes run + gap elements later. There are up to three of them.
template <typename F>
void for_each_muon_run(const MuonMatrix& m, const MuonPart& part, F f) {
    size_t run = part.runs.run, local = 0;
    while (local < part.count) {
        size_t at = part.piece + local, within = at % run;
        size_t global = part.runs.start + at / run * (run + part.runs.gap) + within - m.first;
        size_t left = part.count - local;
        size_t width = std::min(run - within, left);
        size_t count = within == 0 && left >= run ? left / run : 1;
        f(local, global, width, count);
        local += width * count;
    }
}

// Whether a part lies in one piece in the matrix too.
inline bool is_dense(const MuonPart& part) {
    size_t run = part.runs.run;
    return part.runs.gap == 0 || part.piece % run + part.count <= run;
}

// Whether a rank gives its part of u to the owner. Of ranks that hold the same elements one does:
// the owner itself if it can.
inline bool gives_part(const Layout& from, const Layout& owner, const Model& model,
                       const MuonMatrix& m) {
    const Parameter& p = model.parameters[size_t(m.parameter)];
    Group group = model.buckets[p.bucket].group;
    bool whole = !updated_range(from, model, p.bucket).sharded;
    int same = replication(p.shard, from.tp.size);
    int piece = from.tp.rank / same, of_owner = owner.tp.rank / same;
    if (whole && update_axis(from, group).rank != update_axis(owner, group).rank)
        return false;
    return piece == of_owner ? from.tp.rank == owner.tp.rank : from.tp.rank % same == 0;
}

// The bytes of room for the matrices of which this rank is the owner, and for parts on their way.
template <typename T> size_t muon_room_bytes(const MuonMatrix& m) {
    MuonRoom<orthogonal_t<T>> room;
    size_t parts = round_up(m.elements() * sizeof(acc_t<T>), size_t(256));
    return room.bind(nullptr, m.rows, m.cols) + 2 * parts;
}

// ----------------------------------------------------------------------------
// a step

// The rows of a bucket's range that Muon updates, or the others.
inline std::vector<TensorRow> rows_of_rule(const Model& model, int bucket, Range range, bool muon) {
    auto rows = tensor_rows(model, bucket, range.first, range.first + range.count);
    std::erase_if(rows, [&](const TensorRow& row) {
        return (row.group == MuonGroup::MATRIX) != muon;
    });
    return rows;
}

// AdamW's numbers for what is no matrix of a block; the rows get their own rates.
inline AdamW numbers_of_others(const Hyper& h, AdamW numbers, std::vector<TensorRow>* rows) {
    for (TensorRow& row : *rows) {
        row.rate *= h.muon.rates[int(row.group)];
        row.decay |= h.muon.decays_vectors;
    }
    numbers.decay = h.muon.others_decay;
    if (h.muon.others_beta1 >= 0) numbers.beta1 = h.muon.others_beta1;
    return numbers;
}

// NorMuon's second moments of a matrix, which this rank has parts of; null: the run has none.
template <typename T, typename S>
acc_t<T>* neurons_of(const Trainer<T, S>& t, const MuonMatrix& m) {
    typedef acc_t<T> A;
    const Parameter& p = t.model.parameters[m.parameter];
    A* all = address<A>(t, {Kind::NEURONS, p.bucket, m.parameter});
    size_t before = m.first / std::min(m.rows, m.cols); // those of matrices before, of all ranks
    return all ? all + before % neurons_of(p) : nullptr;
}

// Send parts of a round's matrices to their owners, or back: muon.h. u is the matrix of which this
// rank is the owner, and parts (r,c) room for those of it that do not lie together.
template <typename T, typename S>
void exchange_parts(Trainer<T, S>& t, const std::vector<MuonMatrix>& round, acc_t<T>* u,
                    acc_t<T>* parts, bool back) {
    typedef acc_t<T> A;
    S where = t.ctx.where;
    int me = t.comms.world.rank;
    std::vector<CommMessage> messages;
    auto add = [&](A* data, size_t count, int peer, bool send) {
        if (data && count) messages.push_back({data, count * sizeof(A), peer, send});
    };

    // Copy between the matrix and a part that lies together.
    auto copy = [&](const MuonMatrix& m, const MuonPart& part, A* together) {
        for_each_muon_run(m, part, [&](size_t local, size_t global, size_t width, size_t count) {
            size_t bytes = width * sizeof(A);
            size_t stride = bytes + part.runs.gap * sizeof(A);
            A* here = together + local;
            A* there = u + global;
            back ? copy_rows(here, bytes, there, stride, bytes, count, where)
                 : copy_rows(there, stride, here, bytes, bytes, count, where);
        });
    };

    // List the messages. The owner packs what it sends back.
    std::vector<std::pair<MuonPart, A*>> packed;
    for (const MuonMatrix& m : round) {
        int bucket = t.model.parameters[size_t(m.parameter)].bucket;
        Layout owner = layout_at(t.layout, m.owner);
        MuonPart mine = muon_part(t.layout, t.model, m);
        Range range = updated_range(t.layout, t.model, bucket);
        A* home = updated_part<A>(t, {Kind::GRAD, bucket}, range) + mine.at;
        bool given = back || gives_part(t.layout, owner, t.model, m);
        A* v = back ? neurons_of(t, m) : nullptr;
        size_t lines = std::max(m.rows, m.cols);
        if (m.owner != me) {
            add(v, lines, m.owner, false);
            if (given) add(home, mine.count, m.owner, !back);
            continue;
        }

        // The owner's own part needs no message.
        if (given) copy(m, mine, home);
        for (int rank : muon_ranks(t.layout, t.model.buckets[bucket].group)) {
            Layout other = layout_at(t.layout, rank);
            MuonPart part = muon_part(other, t.model, m);
            bool sends = back || gives_part(other, owner, t.model, m);
            if (rank == me) continue;
            add(v, lines, rank, true);
            if (!sends || !part.count) continue;

            // A part that lies together in the matrix too goes there at once.
            A* place = parts;
            if (is_dense(part)) {
                for_each_muon_run(m, part, [&](size_t, size_t global, size_t, size_t) {
                    place = u + global;
                });
            } else {
                // Ranks that hold the same elements get them from one place.
                auto same = [&](const auto& p) {
                    return p.first.piece == part.piece && p.first.count == part.count &&
                           p.first.runs.start == part.runs.start;
                };
                auto found = std::find_if(packed.begin(), packed.end(), same);
                if (found != packed.end()) {
                    place = found->second;
                } else {
                    packed.push_back({part, place});
                    parts += part.count;
                    if (back) copy(m, part, place);
                }
            }
            add(place, part.count, rank, back);
        }
    }
    exchange(t.comms.world, messages.data(), int(messages.size()), where);

    // Unpack what has come.
    for (const MuonMatrix& m : round)
        for (auto& [part, place] : packed)
            if (m.owner == me && !back) copy(m, part, place);
}

// MUON: orthogonalise u, which lies in place of the gradients of matrices.
template <typename T, typename S>
void orthogonalise_all(Trainer<T, S>& t) {
    typedef acc_t<T> A;
    S where = t.ctx.where;
    Muon h = muon_of(t.hyper);
    const StepScale* scale = address<const StepScale>(t, {Kind::SCALE});

    // Take a round of matrices at a time.
    std::vector<MuonMatrix> all = muon_matrices(t.layout, t.model), round;
    unsigned char* base = scratch_address(t, -1, ScratchKind::MUON);
    for (size_t i = 0; i < all.size(); i++) {
        round.push_back(all[i]);
        if (i + 1 < all.size() && all[i + 1].round == all[i].round) continue;

        // Find room for this rank's matrix.
        const MuonMatrix* mine = nullptr;
        for (const MuonMatrix& m : round)
            if (m.owner == t.comms.world.rank) mine = &m;
        A* u = reinterpret_cast<A*>(base);
        A* parts = u;
        if (mine) parts += round_up(mine->elements(), size_t(256));

        // Bring its parts together, orthogonalise, and send them back.
        exchange_parts(t, round, u, parts, false);
        if (mine) {
            MuonRoom<orthogonal_t<T>> room;
            unsigned char* rest = reinterpret_cast<unsigned char*>(parts);
            room.bind(rest + round_up(mine->elements() * sizeof(A), size_t(256)), mine->rows,
                      mine->cols);
            muon_orthogonalise(u, mine->rows, mine->cols, h, room, t.ctx.blas, where,
                               neurons_of(t, *mine), scale);
        }
        exchange_parts(t, round, u, parts, true);
        round.clear();
    }
}

} // namespace llmc
