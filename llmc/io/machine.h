// machine.h - a table of machines: rates of a card and its links, and the shares that runs reach
//   A row holds a data sheet's numbers, and shares (efficiencies) of them that runs reach. Four of
//   a100-80 and its latency are fitted to published step times, which test_simulator names; all
//   others are priors.
//   machine_named() takes a row's name, or a FILE of `name = value` lines that changes some numbers
//   of a row, which its first line names:
//     base = h100        nic_gb = 25        memory_gb = 94        gemm = 0.6
//   A share above 1, a rate of 0, an unknown name and a repeated one are refused. --calibrate
//   writes such a file.
#pragma once
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>
#include "../comm/text.h"
#include "../ops/fp8.cuh"

namespace llmc {

// The share of `gemm` that products in 8 bits reach of their own peak: the best ones that are
// published reach 71 to 76% of it, those in bf16 78 to 80% (ml-engineering's page on accelerators).
constexpr double FP8_GEMM = 0.9;

// A machine: its cards and the links between them.
struct Machine {
    std::string name;
    std::string device;  // a part of the name by which the driver calls the card
    // The card: TFLOP/s of dense products in 16 bits and in float; in 8 bits with one scale for an
    // operand, with scales of blocks, with MX's (0: it has none, and multiplies the values in 16).
    // TB/s and GB of its memory, SMs (1: a CPU, whose products fill no waves of tiles).
    double half_tf, single_tf, fp8_tf, fp8_block_tf, fp8_mx_tf, memory_tb, memory_gb, sms;
    // One-way GB/s of each card, to its neighbours in the node and to other nodes.
    // Then the number of cards in a node.
    double link_gb, nic_gb, cards;
    // Shares of the rates above that runs reach: products, attention, memory, links, NICs. Two more
    // are below, `elementwise` and `plain`.
    double gemm, attention, memory, link, nic;
    double latency_us = 40; // of a collective
    double launch_us = 8;   // of the host, for a block's forward pass
    double host_gb = 25;    // GB/s that copies to and from the host's memory reach
    double disk_gb = 5;     // the same of a file on a few drives: a guess
    double host_ram_gb = 256; // GB of the host's memory for each card: a DGX H100's
    // GB/s of the host's memory for each card, of which updates there take all. A guess: a server's
    // two sockets have some 400 GB/s for eight cards.
    double host_memory_gb = 50;
    double hop_us = 4; // of each rank in a ring that leaves a node: fitted to SimAI's table
    // Seconds that a message of one second takes from layers beside it. 1: a CPU's cores carry it.
    double contention = 0;
    double elementwise = 0; // share of memory's rate that norms and activations reach; 0: `memory`
    // Share of `single_tf` that attention's plain kernels reach. Two reads of shared memory for
    // each multiply-add leave 32 FLOPs a clock of an SM's 256 (an A100's 128), and waits leave two
    // thirds of these, a guess. Of a CPU's loops for soft caps: measured on two cores.
    double plain = 0.08;
    double message_us = 20; // of one message to a neighbour, between stages or in a ring: a guess
    double jitter = 0;      // standard deviation of ranks' speeds, as a share of their mean

    std::string precision = ""; // in which --calibrate measured; "": a data sheet's numbers

    // The rates that runs reach, in FLOP/s and bytes a second.
    double peak(size_t element) const { return (element == 2 ? half_tf : single_tf) * 1e12; }
    double gemm_rate(size_t element) const { return gemm * peak(element); }
    double fp8_rate(Fp8 fp8) const {
        double tf = fp8 == Fp8::BLOCK ? fp8_block_tf : fp8 == Fp8::MX ? fp8_mx_tf : fp8_tf;
        if (fp8 == Fp8::NVFP4) tf = 2 * fp8_mx_tf; // half the bits
        return FP8_GEMM * gemm * tf * 1e12;
    }
    double attention_rate(size_t element) const { return attention * peak(element); }
    double plain_rate() const { return plain * peak(4); }
    double memory_rate() const { return memory * memory_tb * 1e12; }
    double elementwise_rate() const {
        return (elementwise ? elementwise : memory) * memory_tb * 1e12;
    }
    double link_rate() const { return link * link_gb * 1e9; }
    double nic_rate() const { return nic * nic_gb * 1e9; }
    double host_rate() const { return host_gb * 1e9; }
    double host_memory_rate() const { return host_memory_gb * 1e9; }
    double disk_rate() const { return disk_gb * 1e9; }
};

// The table of machines. "H100 PCIe" stands before "H100", which would match its name too.
//   Rates: NVIDIA's data sheets, without sparsity; for RTX cards, FP16 and FP8 with sums in float.
//   FP8 with scales of blocks: sm_90 alone has it (fp8_matmul.cuh), at the same rate by a guess;
//   MX's came with Blackwell.
//   nic: that of the common node (DGX A100 and HGX H100 have a NIC for each card; g5.48xlarge has
//   12.5 GB/s for all eight cards).
//   Cards without NVLink reach their neighbours by PCIe: 32 GB/s in generation 4, 64 in 5. So do
//   H100 NVLs, whose bridge joins two cards, and no more. Copies to the host reach about 25 and 50
//   of these.
//   Host: 256 GB of memory for a card, as a DGX H100 has. RTX cards stand in desktops, which have
//   64, by a guess.
//   Contention, jitter: 0, which the fits to published steps include. A cpu's contention is 1.
//   Attention: flash attention's share of useful products at T 2048; tiles on the diagonal, which
//   layer_cost.h counts apart, make .50 of these .53.
//   Not from a data sheet: B200's shares are guesses, and its SMs come from reports; the CPU is a
//   guess at a server of some 32 cores, to be replaced by a FILE.
inline const std::vector<Machine>& machines() {
    // Replace a machine's shares here, or in a FILE, once they are measured.

    // clang-format off
    static const std::vector<Machine> rows = {
        // name, device; half, single, FP8, FP8 of blocks and MX TF, memory TB and GB, SMs;
        //   link, nic, cards; shares of products, attention, memory, link, nic;
        //   latency, launch; host, disk, the host's GB and its memory;
        //   hop, contention, elementwise, plain
        {"h200", "H200", 989, 67, 1979, 1979, 0, 4.8, 141, 132,  450, 50, 8,
         .65, .53, .80, .78, .80, 40, 8, 50},
        {"h100-pcie", "H100 PCIe", 756, 51, 1513, 1513, 0, 2, 80, 114,  64, 25, 8,
         .65, .53, .80, .70, .80, 40, 8, 50},
        {"h100-nvl", "H100 NVL", 835, 60, 1671, 1671, 0, 3.9, 94, 132,  64, 25, 8,
         .65, .53, .80, .70, .80, 40, 8, 50},
        {"h100", "H100", 989, 67, 1979, 1979, 0, 3.35, 80, 132,  450, 50, 8,
         .65, .53, .80, .78, .80, 40, 8, 50},
        {"b200", "B200", 2250, 75, 4500, 0, 4500, 8, 180, 148,  900, 50, 8,
         .60, .48, .80, .75, .80, 40, 8, 50},
        {"a100-40", "SXM4-40GB", 312, 19.5, 0, 0, 0, 1.555, 40, 108,  300, 25, 8,
         .72, .48, .80, .78, .80, 40, 8, 25, 5, 256, 50, 4, 0, 0, .16},
        {"a100-80", "A100", 312, 19.5, 0, 0, 0, 2.039, 80, 108,  300, 25, 8,
         .78, .48, .80, .97, .84, 43, 8, 25, 5, 256, 50, 4, 0, .62, .16},
        {"l40s", "L40S", 362, 91.6, 733, 0, 0, 0.864, 48, 142,  32, 25, 8,
         .60, .48, .80, .70, .80},
        {"a10g", "A10G", 70, 35, 0, 0, 0, 0.6, 24, 80,  32, 1.56, 8,
         .65, .48, .80, .70, .80},
        {"rtx3070", "RTX 3070", 40.6, 20.3, 0, 0, 0, 0.448, 8, 46,  32, 12.5, 8,
         .75, .53, .80, .60, .80, 40, 8, 25, 5, 64},
        {"rtx3060", "RTX 3060", 25.5, 12.7, 0, 0, 0, 0.36, 12, 28,  32, 12.5, 8,
         .75, .53, .80, .60, .80, 40, 8, 25, 5, 64},
        {"rtx4080", "RTX 4080", 97.5, 48.7, 195, 0, 0, 0.717, 16, 76,  32, 12.5, 8,
         .75, .53, .80, .60, .80, 40, 8, 25, 5, 64},
        {"rtx3090", "RTX 3090", 71, 35.6, 0, 0, 0, 0.936, 24, 82,  32, 12.5, 8,
         .75, .53, .80, .60, .80, 40, 8, 25, 5, 64},
        {"rtx4090", "RTX 4090", 165, 82.6, 330, 0, 0, 1.008, 24, 128,  32, 12.5, 8,
         .75, .53, .80, .60, .80, 40, 8, 25, 5, 64},
        {"rtx5090", "RTX 5090", 209, 105, 419, 0, 419, 1.792, 32, 170,  64, 12.5, 8,
         .75, .53, .80, .60, .80, 40, 8, 50, 5, 64},
        {"cpu", "", 4, 2, 0, 0, 0, 0.2, 256, 1,  50, 12.5, 1,
         .60, .32, .60, .50, .80, 40, 8, 25, 5, 256, 120, 4, 1, 0, .02},
    };
    // clang-format on
    return rows;
}

// Return the row of a device, by the driver's name for it; null if there is none.
inline const Machine* machine_of_device(const std::string& device) {
    for (const Machine& m : machines()) {
        if (m.device.empty())
            continue;
        size_t at = device.find(m.device);
        if (at == std::string::npos)
            continue;
        // A GH200 is no H200.
        if (at == 0 || !isalnum(device[at - 1])) return &m;
    }
    return nullptr;
}

// Return the names of all rows, "h200, h100, ...".
inline std::string machine_names() {
    std::string names;
    for (const Machine& m : machines())
        names += (names.empty() ? "" : ", ") + m.name;
    return names;
}

typedef double Machine::*MachineNumber;

// A number that a machine's file can set: its name, its field, and the range that makes sense.
struct MachineField {
    const char* name;
    MachineNumber field;
    double least, most;
};
inline const std::vector<MachineField>& machine_fields() {
    typedef Machine M;
    static const std::vector<MachineField> fields = {
        // The card and its links.
        {"half_tf", &M::half_tf, 1e-3, 1e5},
        {"single_tf", &M::single_tf, 1e-3, 1e5},
        {"fp8_tf", &M::fp8_tf, 0, 1e5},
        {"fp8_block_tf", &M::fp8_block_tf, 0, 1e5},
        {"fp8_mx_tf", &M::fp8_mx_tf, 0, 1e5},
        {"memory_tb", &M::memory_tb, 1e-3, 100},
        {"memory_gb", &M::memory_gb, 0.1, 1e5},
        {"sms", &M::sms, 1, 1e4},
        {"link_gb", &M::link_gb, 0.01, 1e5},
        {"nic_gb", &M::nic_gb, 0.01, 1e5},
        {"cards", &M::cards, 1, 1024},

        // Shares: one below 2% or above 1 is a mistake in the units.
        {"gemm", &M::gemm, 0.02, 1},
        {"attention", &M::attention, 0.02, 1},
        {"memory", &M::memory, 0.02, 1},
        {"elementwise", &M::elementwise, 0, 1},
        {"plain", &M::plain, 0.02, 1},
        {"link", &M::link, 0.02, 1},
        {"nic", &M::nic, 0.02, 1},

        // Times that do not depend on bytes; the tiers beyond the card.
        {"latency_us", &M::latency_us, 0, 1e5},
        {"message_us", &M::message_us, 0, 1e5},
        {"hop_us", &M::hop_us, 0, 1e4},
        {"launch_us", &M::launch_us, 0, 1e5},
        {"contention", &M::contention, 0, 1},
        {"jitter", &M::jitter, 0, 1},
        {"host_gb", &M::host_gb, 0.01, 1e5},
        {"disk_gb", &M::disk_gb, 0.01, 1e5},
        {"host_ram_gb", &M::host_ram_gb, 1, 1e5},
        {"host_memory_gb", &M::host_memory_gb, 0.01, 1e5},
    };
    return fields;
}

// Set one number from text. Returns "" or what is wrong with it.
inline std::string set_machine_field(Machine* m, const std::string& name,
                                     const std::string& value) {
    std::string names;
    for (const MachineField& f : machine_fields()) {
        names += concat(names.empty() ? "" : ", ", f.name);
        if (name != f.name) continue;

        // Refuse what is not a number, or is out of range. Cards and SMs are whole.
        char* end = nullptr;
        double v = strtod(value.c_str(), &end);
        bool share = f.least == 0.02 || f.field == &Machine::elementwise;
        bool whole = f.field == &Machine::cards || f.field == &Machine::sms;
        bool number = !value.empty() && !*end && v >= f.least && v <= f.most;
        if (!number || (whole && v != std::floor(v)))
            return concat(name, " = ", value, ": wants a ", whole ? "whole " : "", "number from ",
                          f.least, " to ", f.most,
                          share ? ", the share of the data sheet's rate" : "");
        m->*f.field = v;
        return "";
    }
    return concat("'", name, "' is no number of a machine: base, precision, ", names);
}

// The row with a name; null if there is none.
inline const Machine* machine_row(const std::string& name) {
    for (const Machine& row : machines())
        if (name == row.name) return &row;
    return nullptr;
}

// Why a file is refused that names no row to start from.
inline const char* const WANTS_BASE = "a machine's file begins with a base, as base = h100";

// Set what a line of a file says: `name = value`. names: those of the lines above it. Returns "" or
// what is wrong.
inline std::string set_machine_line(Machine* m, const std::string& line,
                                    std::set<std::string>& names) {
    size_t equals = line.find('=');
    if (equals == std::string::npos) return "wants `name = value`";

    // Names and values are one word each, and a name stands once.
    std::string name, value, more;
    std::istringstream left(line.substr(0, equals)), right(line.substr(equals + 1));
    left >> name;
    right >> value;
    if (left >> more || right >> more)
        return concat(name, " = ", value, ": '", more, "' is a word too many");
    if (!names.insert(name).second)
        return name + " stands a second time: leave one of them out";

    // The base comes first, because it sets every number. It is a row, never another file.
    if (names.size() == 1 && name != "base")
        return WANTS_BASE;
    if (name == "precision") {
        m->precision = value;
        bool measured = value == "bf16" || value == "fp32";
        return measured ? "" : concat("precision = ", value, ": wants bf16 or fp32");
    }
    if (name != "base") return set_machine_field(m, name, value);
    const Machine* row = machine_row(value);
    if (!row)
        return concat("base = ", value, ": a base is one of ", machine_names());
    *m = *row;
    return "";
}

// Find a machine by name, or read it from a file. Returns "" or what is wrong.
inline std::string machine_named(Machine* m, const std::string& name) {
    if (const Machine* row = machine_row(name)) {
        *m = *row;
        return "";
    }
    std::error_code none;
    bool file = std::filesystem::is_regular_file(name, none);
    std::ifstream in(file ? name : "");
    if (!in)
        return concat("--machine ", name, " is neither a machine nor a file; machines: ",
                      machine_names());

    // Read the lines; # begins a comment. Some editors begin with the mark of UTF-8.
    std::set<std::string> names;
    std::string line;
    for (int number = 1; std::getline(in, line); number++) {
        if (number == 1 && line.rfind("\xEF\xBB\xBF", 0) == 0) line.erase(0, 3);
        line = line.substr(0, line.find('#'));
        if (line.find_first_not_of(" \t\r") == std::string::npos)
            continue;
        std::string wrong = set_machine_line(m, line, names);
        if (!wrong.empty())
            return concat(name, ":", number, ": ", wrong);
    }
    if (names.empty())
        return concat("--machine ", name, ": ", WANTS_BASE);
    m->name = name;
    return "";
}

} // namespace llmc
