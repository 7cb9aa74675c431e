// one_reader.h - bytes that one rank reads from a file, on all the ranks that need them
//   Each file has one reader. The stages of the pipeline that need its bytes receive them:
//   1. if the reader belongs to another stage, it sends the bytes to this stage's first rank
//   2. one rank of the stage (the reader, or the first rank) broadcasts them to the others
//   So a file system delivers each byte once, whatever the number of ranks, and only one rank opens
//   a file. All ranks call in the same order, so that messages match.
//   Cost: a rank receives as many bytes as it would have read.
#pragma once
#include "../action.h"
#include "../comm/comm.h"
#include "../comm/group.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/types.h"

namespace llmc {

// The ranks of each pipeline stage, and this rank's own stage as a group.
struct OneReader {
    Layout layout;
    Comm world, stage;
    std::vector<std::vector<int>> members; // [stage]: ranks of the world
    size_t bytes = 0;                      // bytes that this rank has read
};

// Make the groups. All ranks of the world call.
inline OneReader make_one_reader(const Comm& world, const Layout& layout) {
    // Ranks of a stage hold the same layers, whatever other axes cut those layers.
    OneReader r = {layout, world, {}, {}};
    for (int s = 0; s < layout.pp.size; s++)
        r.members.push_back(ranks_where(layout, [=](const Layout& o) {
            return o.pp.rank == s;
        }));
    r.stage = comm_split(world, "stage", r.members[size_t(layout.pp.rank)]);
    return r;
}

// Returns needs(stage): whether a stage has a bucket, and so needs its parameters.
inline auto stages_with(const Layout& layout, const Model& model, int bucket) {
    return [&layout, &model, bucket](int stage) {
        Layout there = layout;
        there.pp.rank = stage;
        return bucket_is_mine(there, model, bucket);
    };
}

// Bring `bytes` bytes, which only `reader` has at `to`, to all ranks of a stage. The reader and the
// ranks of the stage call.
inline void bring_to_stage(OneReader& r, unsigned char* to, size_t bytes, int reader, int stage) {
    const std::vector<int>& members = r.members[size_t(stage)];
    auto place = std::find(members.begin(), members.end(), reader);
    int root = int(place - members.begin());

    // A reader in another stage sends the bytes to the first rank of this stage.
    if (place == members.end()) {
        root = 0;
        bool sends = r.world.rank == reader;
        bool receives = r.world.rank == members[0];
        CommMessage message = {to, bytes, sends ? members[0] : reader, sends};
        if (sends || receives)
            exchange(r.world, &message, 1, Cpu{});
    }
    // Broadcast within the stage. A reader of another stage is done already.
    if (r.layout.pp.rank == stage)
        broadcast(r.stage, to, bytes, root, Cpu{});
}

// Bring `bytes` bytes of a file to every stage s for which needs(s) is true. The reader has them at
// `to`. The reader and all ranks of those stages call.
template <typename F>
void bring(OneReader& r, unsigned char* to, size_t bytes, int reader, F needs) {
    // A tied table goes to both ends of the pipeline, but is read once.
    bool reads = r.world.rank == reader;
    if (reads) r.bytes += bytes;
    for (int s = 0; s < r.layout.pp.size; s++) {
        // All ranks serve the stages in the same order, so no circle of ranks waits for each other.
        bool receives = s == r.layout.pp.rank;
        bool calls = reads || receives;
        if (calls && needs(s))
            bring_to_stage(r, to, bytes, reader, s);
    }
}

// ----------------------------------------------------------------------------
// texts of ranks: what one says, all hear

// Gather every rank's text onto every rank. Returns [rank].
inline std::vector<std::string> gather_texts(const Comm& c, std::string text) {
    // Exchange the lengths first.
    std::vector<int64_t> sizes(c.size);
    int64_t size = int64_t(text.size());
    all_gather(c, sizes.data(), &size, 1, Cpu{});

    // Pad each text to the longest: an all-gather takes equal counts.
    size_t most = *std::max_element(sizes.begin(), sizes.end());
    text.resize(most);
    std::string all(most * sizes.size(), 0);
    all_gather(c, reinterpret_cast<unsigned char*>(all.data()),
               reinterpret_cast<const unsigned char*>(text.data()), most, Cpu{});

    // Cut the padding off again.
    std::vector<std::string> texts;
    for (size_t r = 0; r < sizes.size(); r++)
        texts.push_back(all.substr(r * most, sizes[r]));
    return texts;
}

// Broadcast the sender's text to all ranks. Unlike gather_texts(), a rank receives only one text.
inline std::string broadcast_text(const Comm& c, std::string text, int sender) {
    int64_t size = int64_t(text.size());
    broadcast(c, &size, 1, sender, Cpu{});
    // Receivers make room for the text.
    text.resize(size_t(size));
    broadcast(c, reinterpret_cast<unsigned char*>(text.data()), text.size(), sender, Cpu{});
    return text;
}

// The error of the first rank that has one, on all ranks: where one rank fails, all fail.
inline std::string first_error(const Comm& c, const std::string& wrong) {
    for (const std::string& text : gather_texts(c, wrong))
        if (!text.empty()) return text;
    return "";
}

} // namespace llmc
