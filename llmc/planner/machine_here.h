// machine_here.h - the row of the table of machines by whose rates this run counts seconds
#pragma once
#include "../io/config.h"
#include "../io/files.h"
#include "../io/machine.h"
#include "../ops/gpu.h"
#include "../ops/types.h"
#include "../comm/text.h"

namespace llmc {

// How many ranks share a card: all, where they are threads. A question about other cards has none.
inline int sharers_of_card(const Config& c) {
    return c.explain && c.gpus ? 1 : c.local_ranks;
}

// The unit of --memory and of the output of --explain, in bytes.
constexpr double GIB = 1073741824;

// Bytes of a card, and of the host's memory for each, that runs may take. CUDA's context and
// libraries take a twentieth of the card, and all else that runs on the host a twentieth there.
inline double room_of_card(const Machine& machine) { return 0.95 * machine.memory_gb * GIB; }
inline double room_of_host(const Machine& machine) { return 0.95 * machine.host_ram_gb * GIB; }

// Whether --explain speaks of a GPU's memory, which is not the host's: --machine names one.
inline bool explains_gpu(const Config& c) {
    Machine machine;
    bool named = c.explain && !c.machine.empty() && machine_named(&machine, c.machine).empty();
    return named && !machine.device.empty();
}

// The machine to plan for: --machine, or the GPU that is here, or the CPU. flag: who asks.
template <typename S> Machine machine_asked(const Config& c, const char* flag, S where) {
    // Find its name. A GPU that the table does not know must be described by --machine FILE.
    Machine machine;
    std::string name = c.machine;
    if (name.empty()) {
        const Machine* here = nullptr;
        if constexpr (!std::is_same_v<S, Cpu>) {
            std::string device = device_name(where);
            here = machine_of_device(device);
            if (!here)
                or_die(concat(flag, ": ", device, " is no row of --machine: give one that is like "
                              "it, or a FILE"));
        }
        name = here ? here->name : "cpu";
    }
    or_die(machine_named(&machine, name));

    // Divide the card's speed among threads as ranks, which share one card and lie in one node.
    int sharers = sharers_of_card(c);
    machine.cards = std::max(machine.cards, double(sharers));
    for (MachineNumber rate : {&Machine::half_tf, &Machine::single_tf, &Machine::fp8_tf,
                               &Machine::fp8_block_tf, &Machine::fp8_mx_tf, &Machine::memory_tb,
                               &Machine::host_gb, &Machine::host_memory_gb, &Machine::disk_gb})
        machine.*rate /= sharers;
    return machine;
}

} // namespace llmc
