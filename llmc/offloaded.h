// offloaded.h - the tiers of memory, and in which of them a run keeps each kind of data
//   DEVICE is where the step runs. tiers.h says where a datum lies, offload.h when it moves.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace llmc {

// A tier of memory: DEVICE is where the step runs, HOST the host's memory, DISK a file.
enum class Tier : uint8_t { DEVICE, HOST, DISK };
constexpr int TIERS = 3;

// The tier of each kind of data. Offloaded data come to the device while they are used (offload.h).
struct Offload {
    Tier optimizer = Tier::DEVICE;   // masters and state
    Tier activations = Tier::DEVICE; // blocks' inputs and kept activations, from F to backward
    Tier weights = Tier::DEVICE, gradients = Tier::DEVICE;
    size_t chunk = size_t(1) << 24;  // elements of state that move together: SHARD_ALIGN divides it
    Tier update = Tier::DEVICE;      // where UPDATE runs; on HOST, masters and moments stay there
    std::vector<bool> parked = {};   // [layer]: whose activations leave; empty: those of all blocks
    bool late = false;               // UPDATE applies the gradient of the step before, on HOST

    // Whether updates go chunk by chunk: they do when any of their data is offloaded.
    bool cuts_updates() const {
        Tier here = Tier::DEVICE;
        return optimizer != here || weights != here || gradients != here;
    }
    // Whether anything is offloaded.
    bool moves() const { return cuts_updates() || activations != Tier::DEVICE; }
    // Whether a block's activations leave the device between its two passes.
    bool parks(int layer) const {
        bool chosen = parked.empty() || parked[size_t(layer)];
        return activations != Tier::DEVICE && chosen;
    }
};

// The data that may lie in another tier, by the words of --offload.
typedef Tier Offload::*OffloadTier; // nvcc's own spelling of a member like this one gives a warning
struct OffloadRow {
    const char* name;
    OffloadTier tier;
};
constexpr OffloadRow OFFLOAD_TABLE[] = {
    {"optimizer", &Offload::optimizer},
    {"gradients", &Offload::gradients},
    {"weights", &Offload::weights},
    {"activations", &Offload::activations},
};
// Its rows by number.
enum OffloadRows {
    OPTIMIZER,
    GRADIENTS,
    WEIGHTS,
    ACTIVATIONS,
    OFFLOAD_ROWS,
};

} // namespace llmc
