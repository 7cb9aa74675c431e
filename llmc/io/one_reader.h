// one_reader.h - bytes that one rank reads from a file, on all the ranks that need them
//   Each file has one reader. What it reads goes to the stages of the pipeline that need it:
//   1. where the reader is of another stage it sends the bytes to that stage's first rank
//   2. one rank of the stage, the reader or its first, broadcasts them there
//   A file system then gives each byte once, whatever the number of ranks, and each file is opened
//   by one of them. All ranks call in the same order, so that messages match.
//   Cost: a rank receives what it would have read.
#pragma once
#include "../comm/comms.h"

namespace llmc {

// The ranks of each stage of the pipeline, and this rank's own as a group.
struct OneReader {
    Layout layout;
    Comm world, stage;
    std::vector<std::vector<int>> members; // [stage]: ranks of the world
    size_t bytes = 0;                      // that this rank has read
};

// All ranks of the world call.
inline OneReader make_one_reader(const Comm& world, const Layout& layout) {
    // Ranks of a stage hold the same layers, whatever axes cut them.
    OneReader r = {layout, world, {}, {}};
    for (int s = 0; s < layout.pp.size; s++)
        r.members.push_back(ranks_where(layout, [=](const Layout& o) {
            return o.pp.rank == s;
        }));
    r.stage = comm_split(world, "stage", r.members[size_t(layout.pp.rank)]);
    return r;
}

// Bring `bytes` bytes, which only `reader` has at `to`, to all ranks of a stage. The reader calls,
// and the stage's ranks do.
inline void bring_to_stage(OneReader& r, unsigned char* to, size_t bytes, int reader, int stage) {
    const std::vector<int>& members = r.members[size_t(stage)];
    auto place = std::find(members.begin(), members.end(), reader);
    int root = int(place - members.begin());

    // From another stage they come to the first rank here.
    if (place == members.end()) {
        root = 0;
        bool sends = r.world.rank == reader;
        bool receives = r.world.rank == members[0];
        CommMessage message = {to, bytes, sends ? members[0] : reader, sends};
        if (sends || receives)
            exchange(r.world, &message, 1, Cpu{});
    }
    // The reader of another stage has done its part.
    if (r.layout.pp.rank == stage)
        broadcast(r.stage, to, bytes, root, Cpu{});
}

// Bring `bytes` bytes of a file to the stages for which needs(stage) says so. Their reader has them
// at `to`; it calls, and all ranks of those stages do.
template <typename F>
void bring(OneReader& r, unsigned char* to, size_t bytes, int reader, F needs) {
    // A tied table goes to both ends of the pipeline, and is read once.
    bool reads = r.world.rank == reader;
    if (reads) r.bytes += bytes;
    for (int s = 0; s < r.layout.pp.size; s++) {
        // Stages come in order on all ranks, so nobody waits in a circle.
        bool receives = s == r.layout.pp.rank;
        bool calls = reads || receives;
        if (calls && needs(s))
            bring_to_stage(r, to, bytes, reader, s);
    }
}

} // namespace llmc
