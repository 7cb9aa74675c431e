// proposal.h - a layout that might run, as flags: to a configuration and back
//   --plan auto lists proposals (plan_search.h), and set_proposal() gives one of them to a run.
#pragma once
#include <bit>
#include "../io/config.h"
#include "../io/plan_flags.h"
#include "../model.h"
#include "../pipeline.h"
#include "../text.h"
#include "planner.h"

namespace llmc {

// A layout that might run: the flags that --plan chooses.
struct Proposal {
    int dp = 1, tp = 1, pp = 1, cp = 1, ep = 1; // ranks along each axis
    // Pipeline stages of a rank, ZeRO's stage, sequences of a micro-batch.
    int chunks = 1, zero = 0, B = 1;
    int zero_group = 0, hpz = 0, etp = 0; // as the flags of these names have them
    bool sequence_parallel = false;
    std::string cp_method = "gather", order = "tp-pp-dp";
    Pipeline pipeline = Pipeline::ONE_F_ONE_B;
    Recompute recompute = Recompute::NONE;
    // To make room: --masters remainder, 2 bytes less for each master; and --offload, a bit for
    // each row of OFFLOAD_TABLE.
    bool remainder = false;
    unsigned offload = 0;
    Estimate estimate = {};

    // Whether tensor-parallel ranks cut no expert, and how many ranks route rows of their own.
    bool whole_experts() const { return etp == 1 && tp > 1; }
    int routing_ranks() const { return dp * cp * (whole_experts() ? tp : 1); }

    // How much a user has to know to run this layout. An axis counts ten, because it brings
    // messages of its own. A row that leaves the card counts four: it needs another memory, and the
    // way there. Any other technique counts one, a higher level of ZeRO or recomputation more.
    int techniques() const {
        int axes = (tp > 1) + (pp > 1) + (cp > 1) + (ep > 1);
        int orders = (order != "tp-pp-dp") + (cp_method != "gather");
        int groups = (zero_group > 0) + (hpz > 1) + whole_experts();
        return 10 * axes + zero + groups + orders + sequence_parallel + (chunks > 1) +
               (pipeline != Pipeline::ONE_F_ONE_B) + int(recompute) + remainder +
               4 * std::popcount(offload);
    }
};

// Whether a row of OFFLOAD_TABLE is among those of a proposal.
inline bool moves_row(unsigned offload, int row) {
    return offload >> row & 1;
}

// The words of --offload for the rows of a proposal.
inline std::string offload_words(unsigned offload) {
    std::string words;
    for (int row = 0; row < OFFLOAD_ROWS; row++)
        if (moves_row(offload, row))
            words += concat(words.empty() ? "" : ",", OFFLOAD_TABLE[row].name);
    return words.empty() ? "none" : words;
}

// The flags of a proposal, as a shell takes them.
inline std::string proposal_text(const Proposal& p) {
    // Leave out defaults, except --dp and --micro-batch.
    std::string text = concat("--dp ", p.dp);
    auto add = [&](const char* flag, auto value, bool set) {
        if (set) text += concat(" --", flag, " ", value);
    };
    add("tp", p.tp, p.tp > 1);
    if (p.sequence_parallel) text += " --sequence-parallel";
    add("cp", p.cp, p.cp > 1);
    add("cp-method", p.cp_method, p.cp > 1 && p.cp_method != "gather");
    add("pp", p.pp, p.pp > 1);
    add("pipeline", PIPELINE_NAMES[size_t(p.pipeline)], p.pipeline != Pipeline::ONE_F_ONE_B);
    add("chunks", p.chunks, p.chunks > 1);
    add("ep", p.ep, p.ep > 1);
    add("etp", p.etp, p.etp > 0);

    add("zero", p.zero, p.zero > 0);
    add("zero-group", p.zero_group, p.zero > 0 && p.zero_group > 0);
    add("hpz", p.hpz, p.hpz > 0);
    add("grid-order", p.order, p.order != "tp-pp-dp");
    add("recompute", recompute_name(p.recompute), p.recompute != Recompute::NONE);
    add("masters", "remainder", p.remainder);
    add("offload", offload_words(p.offload), p.offload > 0);
    return text + concat(" --micro-batch ", p.B);
}

// Set a proposal's flags in a configuration.
inline void set_proposal(Config& c, const Proposal& p) {
    // Set the axes.
    c.dp = p.dp;
    c.tp = p.tp;
    c.pp = p.pp;
    c.cp = p.cp;
    c.ep = p.ep;
    c.etp = p.etp;
    c.cp_method = p.cp_method;
    c.grid_order = p.order;

    // Set the schedule, the ZeRO stage, the micro-batch and the recomputation.
    c.chunks = p.chunks;
    c.zero = p.zero;
    c.zero_group = p.zero_group;
    c.hpz = p.hpz;
    c.micro_batch = p.B;
    c.sequence_parallel = p.sequence_parallel;
    c.pipeline = PIPELINE_NAMES[size_t(p.pipeline)];
    c.recompute = recompute_name(p.recompute);
    if (p.remainder) c.masters = "remainder";
    if (p.offload) c.offload = offload_words(p.offload);
}

// The proposal that a configuration's flags make: the reverse of set_proposal().
inline Proposal proposal_of(const Config& c) {
    // Read the axes.
    Proposal p;
    p.dp = c.dp;
    p.tp = c.tp;
    p.pp = c.pp;
    p.cp = c.cp;
    p.ep = c.ep;
    p.etp = c.etp;
    p.cp_method = c.cp_method;
    p.order = c.grid_order;

    // Read the rest. --recompute auto counts as full.
    p.chunks = c.chunks;
    p.zero = c.zero;
    p.zero_group = c.zero_group;
    p.hpz = c.hpz;
    p.B = c.micro_batch;
    p.sequence_parallel = c.sequence_parallel;
    p.pipeline = choose_pipeline(c, micro_batches_of(c), nullptr);
    p.recompute = recompute_named(c.recompute);
    p.remainder = c.masters == "remainder";
    for (int row = 0; row < OFFLOAD_ROWS; row++)
        p.offload |= unsigned(offloads(c, OFFLOAD_TABLE[row].name)) << row;
    return p;
}

} // namespace llmc
