// layout.h - which ranks a rank works with: the groups of the grid's axes - arXiv:2104.04473
//   world    all ranks: checkpoints and exports
//   dp       all data-parallel ranks of my stage: samples and losses
//   shard    those of them that share each bucket; replica: those that have the same shard
//   pp       my pipeline: streams and their gradients
//   tie      its first and last rank, where a tied table has its two gradients
//   tp       the ranks that share each layer; kv: those of them that share a key/value head
//   A group of one costs nothing: the same code runs on one rank.
#pragma once
#include "action.h"
#include "comm.h"

struct Comms {
    Comm world, dp, shard, replica, pp, tie, tp, kv;
};

// The ranks of the grid that f(coordinates) takes, in order.
template <typename F> std::vector<int> ranks_where(const Grid& sizes, F f) {
    std::vector<int> ranks;
    for (int r = 0; r < sizes.world(); r++)
        if (f(grid_at(sizes, r))) ranks.push_back(r);
    return ranks;
}

// `shards` divides dp, `kv_ranks` tp: neighbours share a bucket, a key/value head.
inline Comms make_comms(const Comm& world, const Grid& me, int shards, int kv_ranks = 1) {
    auto split = [&](const char* name, auto f) {
        return comm_split(world, name, ranks_where(me, f));
    };
    auto group = [&](const char* name, auto f) {
        return split(name, [&](const Grid& g) {
            return g.cp_rank == me.cp_rank && g.tp_rank == me.tp_rank && f(g);
        });
    };
    Comms c;
    c.world = world;
    auto stage = [&](const Grid& g) { return g.pp_rank == me.pp_rank; };
    auto line = [&](const Grid& g) { return g.dp_rank == me.dp_rank; };
    c.dp = group("dp", stage);
    c.shard = group("shard", [&](const Grid& g) {
        return stage(g) && g.dp_rank / shards == me.dp_rank / shards;
    });
    c.replica = group("replica", [&](const Grid& g) {
        return stage(g) && g.dp_rank % shards == me.dp_rank % shards;
    });
    c.pp = group("pp", line);
    bool end = me.pp_rank == 0 || me.pp_rank == me.pp - 1;
    if (end && me.pp > 1)
        c.tie = group("tie", [&](const Grid& g) {
            return line(g) && (g.pp_rank == 0 || g.pp_rank == g.pp - 1);
        });
    auto layer = [&](const Grid& g) { return stage(g) && line(g) && g.cp_rank == me.cp_rank; };
    c.tp = split("tp", layer);
    c.kv = split("kv", [&](const Grid& g) {
        return layer(g) && g.tp_rank / kv_ranks == me.tp_rank / kv_ranks;
    });
    return c;
}
