// start_weights.h - a copy of the weights that a run starts from, exchanged with those it trains
//   The reference of GRPO's KL (objective.cuh) is the policy before the first step. Each step
//   samples new answers, so what the reference says of them cannot be kept ready, as DPO's is
//   (references.h): the starting weights are asked again.
//   1. before the first step, each rank copies the trained weights that it keeps: with adapters
//      their thin matrices alone, under ZeRO-3 its own shard
//   2. exchange_weights() swaps weights and copy, and the evaluation plan runs the reference
//   3. a second exchange puts every bit back; masters and moments have not moved
//   A resumed run copies the starting weights before it loads its checkpoint over them.
//   Contract: bitwise; no message. Cost: the trained weights once more, in the host's memory, and
//             four copies of them a rollout.
#pragma once
#include <vector>
#include "../trainer.h"

namespace llmc {

// The places of the trained weights that this rank keeps.
template <typename T, typename S>
std::vector<Place> trained_weights(const Trainer<T, S>& t) {
    std::vector<Place> places;
    for (const auto& [d, place] : t.arena.lasting) {
        bool weight = d.kind == Kind::WEIGHT && place.bytes > 0;
        if (weight && t.model.buckets[d.of].trainable)
            places.push_back(place);
    }
    return places;
}

// The bytes of a copy of them.
template <typename T, typename S>
size_t start_weights_bytes(const Trainer<T, S>& t) {
    size_t bytes = 0;
    for (const Place& place : trained_weights(t))
        bytes += place.bytes;
    return bytes;
}

// Copy the trained weights to the host.
template <typename T, typename S>
std::vector<unsigned char> copy_weights(const Trainer<T, S>& t) {
    std::vector<unsigned char> copy(start_weights_bytes(t));
    unsigned char* to = copy.data();
    for (const Place& place : trained_weights(t)) {
        const unsigned char* home = t.arena.device().base + place.offset;
        copy_out(to, home, place.bytes, t.ctx.where);
        to += place.bytes;
    }
    return copy;
}

// Exchange the trained weights and a copy, block by block, so that no third copy is needed.
template <typename T, typename S>
void exchange_weights(Trainer<T, S>& t, std::vector<unsigned char>& copy) {
    const size_t block = size_t(1) << 20;
    std::vector<unsigned char> room(block);
    unsigned char* other = copy.data();
    for (const Place& place : trained_weights(t))
        for (size_t at = 0; at < place.bytes; at += block) {
            // Copies on a device are asynchronous: wait before the host reads or writes.
            unsigned char* home = t.arena.device().base + place.offset + at;
            size_t bytes = std::min(block, place.bytes - at);
            copy_out(room.data(), home, bytes, t.ctx.where);
            copy_in(home, other, bytes, t.ctx.where);
            wait_for(t.ctx.where);
            std::copy_n(room.data(), bytes, other);
            other += bytes;
        }
}

} // namespace llmc
