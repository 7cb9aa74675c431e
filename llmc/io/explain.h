// explain.h - what --explain prints: parameters, the run's FLOPs and hours, memory, the actions
//   A bar beside a line of the memory table is the line's share of the total, 40 columns wide.
//   Plans share the bytes of activations, so the total counts only the largest plan's. The lines
//   under a plan show what lives at its peak.
//   The end says which GPU holds a rank, and explains the words of the actions.
//   Nothing is run or allocated. Data-parallel ranks of a stage are alike, so a cluster of any size
//   needs one line, and one placing of its plans, for each rank of the pipeline.
#pragma once
#include <cmath>
#include "../access.h"
#include "../action.h"
#include "../optimizer.h"
#include "../adapters.h"
#include "../arena.h"
#include "../context_parallel.h"
#include "../head.h"
#include "../layout.h"
#include "../model.h"
#include "../offload.h"
#include "../ops/small_states.cuh"
#include "../ops/types.h"
#include "../pipeline.h"
#include "../plan.h"
#include "../plan_check.h"
#include "../recompute.h"
#include "../sharding.h"
#include "../sizes.h"
#include "../streams.h"
#include "../comm/text.h"
#include "../zero.h"
#include "machine.h"
#include "mfu.h"

namespace llmc {

// A bar in eighths of a column: U+2588 is a full column, U+258F an eighth.
inline std::string bar_text(double share) {
    // Each character has three bytes, and only the last one differs.
    int eighths = int(share * 40 * 8 + 0.5);
    std::string text;
    for (; eighths > 0; eighths -= 8)
        text += std::string("\xe2\x96") + char(0x90 - std::min(eighths, 8));
    return text;
}

// A line of the memory table, or "" for no bytes. total: the bar shows the share of it; 0: no bar.
inline std::string memory_line(const char* what, size_t bytes, size_t total,
                               const std::string& why = "") {
    if (!bytes) return "";
    // Print exact bytes to compare with other tools, and a unit to read.
    std::string text =
        formatted("  %-26s %14zu %12s", what, bytes, bytes_text(double(bytes)).c_str());
    std::string bar = total ? bar_text(double(bytes) / double(total)) : "";
    return text + (bar.empty() ? "" : "  " + bar) + (why.empty() ? "" : "  " + why) + "\n";
}

// The parameters by kind, in elements as files have them, which is what a model's name and papers
// count. Padding is allocated, and never written to a file.
inline std::string parameters_text(const Model& model) {
    size_t total = parameter_count(model);
    size_t matrices = 0, vectors = 0, padding = 0, adapters = 0; // elements
    for (const Parameter& p : model.parameters) {
        adapters += is_adapter(model, p) ? p.elements() : 0;
        (p.shape.size() == 2 ? matrices : vectors) += p.file_elements();
        padding += p.elements() - p.file_elements();
    }

    std::string line =
        concat("parameters ", total, " (", count_text(double(total)), "): matrices and tables ",
               matrices, ", vectors ", vectors, "; in ", model.buckets.size(),
               " buckets; padding ", padding, "\n");
    if (!adapters) return line;

    // Say how many of them are in adapters, how many are frozen, and where backward passes end.
    int lowest = lowest_trained(model) - 1; // layer 1 is block 0
    std::string ends = lowest > 0 ? concat("; backward passes end at block ", lowest) : "";
    return line + concat(adapters, " (", count_text(double(adapters)), ") of them in adapters; ",
                         total - adapters, " are frozen", ends, "\n");
}

// The FLOPs of a training run, and its hours on GPUs at a utilisation that good trainers reach. The
// utilisation is an assumption, not a measurement.
inline std::string run_text(const Model& model, size_t T, int64_t steps, int64_t batch_tokens,
                            int ranks) {
    // Count the work, which does not depend on the layout.
    constexpr double UTILISATION = 0.4;
    double tokens = double(steps) * double(batch_tokens);
    double each = flops_per_token(model, T);
    double flops = tokens * each;
    std::string text =
        concat("run: ", steps, " steps x ", batch_tokens, " tokens = ", count_text(tokens),
               " tokens of ", count_text(each), " FLOPs = ", power_text(flops), " FLOPs\n");

    // Divide by the peak of two common GPUs, for one GPU and for all ranks.
    for (const char* device : {"A100", "H100"}) {
        double peak = machine_of_device(device)->peak(2);
        text += formatted("  %s at %.0f%% of %.0f TFLOP/s in bf16: %.1f hours", device,
                          100 * UTILISATION, peak / 1e12, run_hours(flops, peak, UTILISATION, 1));
        double hours = run_hours(flops, peak, UTILISATION, ranks);
        text += ranks > 1 ? formatted(", on %d GPUs %.1f\n", ranks, hours) : "\n";
    }
    return text;
}

// ----------------------------------------------------------------------------
// memory of one rank

// The line of the memory table to which a datum of a plan counts.
inline const char* meaning_of(Kind kind) {
    using enum Kind;
    switch (kind) {
    // Activations, and the streams between layers.
    case KEPT_B:
    case KEPT_W: return "  kept activations";
    case REDO_B:
    case REDO_W: return "  recomputed activations";
    case GRADIENT_B:
    case GRADIENT_W:
    case DSTREAM: return "  gradients of activations";
    case STREAM: return "  residual stream";

    // Data that pass through the device: scratch, moves, and weights of a layer in use.
    case SCRATCH: return "  workspace";
    case MOMENTUM:
    case STAGED: return "  offloaded data in passing";
    case GATHERED: return "  weights of layers in use";
    case CODES: return "  codes of weights on their way";

    // Gradients that layers still add to, or that are on their way.
    case GRAD_HERE:
    case TIED_HERE:
    case SENT:
    case PARTIAL: return "  gradients of layers in use";
    default: return "  batch and losses";
    }
}

// Find the action at which a plan's passing data take the most bytes. Returns its index.
inline int find_peak(const Arena& arena, const Plan& p, int plan, size_t* bytes) {
    // [action]: bytes that begin less bytes that ended
    std::vector<int64_t> change(p.actions.size() + 1);
    for (auto& [d, lives] : arena.passing[plan])
        for (const Place& l : lives) {
            if (l.tier != Tier::DEVICE) continue;
            change[l.first] += int64_t(l.bytes);
            change[l.last + 1] -= int64_t(l.bytes);
        }

    // Sum up the changes; of equal peaks the first is shown.
    int64_t now = 0, most = -1;
    int at = 0;
    for (size_t i = 0; i < p.actions.size(); i++) {
        now += change[i];
        if (now <= most) continue;
        most = now;
        at = int(i);
    }
    *bytes = size_t(most);
    return at;
}

// A plan's peak, and the bytes that live at it, by meaning.
inline std::string peak_text(const Arena& arena, const Plan& p, const Model& model, int plan,
                             const char* what) {
    // Find the peak, and sum by meaning what lives there.
    size_t most = 0;
    int at = find_peak(arena, p, plan, &most);
    std::map<std::string, size_t> sums; // [meaning]
    for (auto& [d, lives] : arena.passing[plan])
        for (const Place& l : lives)
            if (l.first <= at && at <= l.last && l.tier == Tier::DEVICE)
                sums[meaning_of(d.kind)] += l.bytes;

    // Write the plan's line, then its parts.
    std::string text = memory_line(what, most, arena.device().bytes);
    text += "    peak at " + action_text(p.actions[at], model) + "\n";
    for (auto& [part, bytes] : sums)
        text += memory_line(part.c_str(), bytes, arena.device().bytes);
    return text;
}

// Bytes that a plan moves from a tier and back to it in a step. An update on the host moves device
// memory there too; when it works in chunks, each action moves its chunk's share.
inline double moved_bytes(const Arena& arena, const Plan& p, const Model& model, int plan,
                          Tier tier) {
    double bytes = 0;
    for (int at = 0; at < int(p.actions.size()); at++) {
        const Action& a = p.actions[at];
        if (queue_of(a.op) != Queue::MOVE)
            continue;

        // A move may have several data, each in its own tier.
        for (Data d : tiered_data(p, model, a)) {
            const Place* place = arena_find(arena, plan, at, d);
            if (!place) continue;
            Tier there = place->tier;
            double share = 1;

            // Device memory moves to where the update is, and only this action's chunk of it.
            if (there == Tier::DEVICE) {
                size_t updated = kept_elements(p.layout, model, {Kind::MASTER, d.of});
                share = double(chunk_elements(p.offload, updated, a.chunk)) /
                        double(kept_elements(p.layout, model, d));
                there = p.offload.update;
            }
            bytes += there == tier ? share * double(place->bytes) : 0;
        }
    }
    return bytes;
}

// A tier's bytes, and how long a step's moves take at a rate in GB/s each way.
inline std::string tier_line(const char* what, const Arena& arena, const std::vector<Plan>& plans,
                             const Model& model, Tier tier, double rate) {
    double seconds = moved_bytes(arena, plans[0], model, 0, tier) / (rate * 1e9);
    std::string time = seconds < 100 ? formatted("%.2g", seconds) : formatted("%.0f", seconds);
    std::string why = concat("offloaded; ", time, " s of each step both ways at ", rate, " GB/s");
    return memory_line(what, arena.memory[int(tier)].bytes, 0, why);
}

// The memory table of a rank. machine: whose links to the host and to a disk moves take.
inline std::string memory_text(const Arena& arena, const std::vector<Plan>& plans,
                               const Model& model, const Machine& machine) {
    using enum Kind;
    // List what lasts the whole run.
    std::map<Kind, size_t> sums;
    for (auto& [d, place] : arena.lasting)
        if (place.tier == Tier::DEVICE)
            sums[d.kind] += place.bytes;
    std::string text = "memory, in bytes\n";
    auto add = [&](const char* what, Kind kind, const char* why = "") {
        text += memory_line(what, sums[kind], arena.device().bytes, why);
    };
    add("weights", WEIGHT);
    add("gradients", GRAD);
    add("gradient of the tied head", GRAD_TIED, "added to the table's once a step");
    const char* formats[] = {"float", "16-bit remainders", ""};
    add("master weights", MASTER, formats[int(plans[0].masters)]);
    add("optimizer moments", STATE, states_name(plans[0].states));
    add("second moments of rows", NEURONS, "or of columns, NorMuon's");
    add("mean of weights", EMA, "float, --ema");
    add("maxima of fp8 products", AMAX, "delayed scaling's, and scales");
    add("codes of fp8 weights", CAST, "cast once a step");
    add("maxima of fp8 weights", MAXIMA, "gathered as codes");
    add("constants", CONSTANTS, "rotary tables, slopes");
    add("key/value cache", CACHE);

    // List each plan's passing data. A second plan that evaluates belongs to the tasks. Further
    // ones differ from it only in length, and are left out.
    const char* modes[] = {"activations (train)", "activations (evaluate)",
                           "activations (generate)"};
    for (size_t i = 0; i < plans.size(); i++) {
        bool second = i > 0 && plans[i].mode == plans[i - 1].mode;
        bool third = second && i > 1 && plans[i].mode == plans[i - 2].mode;
        if (third) continue;
        const char* what = second ? "activations (tasks)" : modes[int(plans[i].mode)];
        text += peak_text(arena, plans[i], model, int(i), what);
    }
    const char* why = "one allocation; plans share the passing bytes";
    text += memory_line("total", arena.device().bytes, 0, why);

    // Name the other tiers, which hold offloaded data.
    text += tier_line("in the host's memory", arena, plans, model, Tier::HOST, machine.host_gb);
    text += tier_line("in a file", arena, plans, model, Tier::DISK, machine.disk_gb);
    return text;
}

// The rows of logits that the head makes at a time (head.h), which lie in its scratch.
template <typename T> std::string logits_text(const Plan& p, const Model& model) {
    Shape s = rank_shape(p, model);
    size_t N = head_rows(p);
    size_t rows = head_chunk_rows(s, N, sizeof(T));
    return concat("the head makes logits of ", rows, " rows at a time of ", N, ": ",
                  bytes_text(double(rows * s.Vp() * sizeof(T))), " of its scratch\n");
}

// ----------------------------------------------------------------------------
// a cluster: a line for each rank of the pipeline

// The layers of a rank's stages: "0..3, 8..11".
inline std::string layers_text(const Plan& p, const Model& model) {
    std::string text;
    for (int s = p.layout.pp.rank; s < p.layout.stages(); s += p.layout.pp.size) {
        // A rank's interleaved stages are a whole pipeline apart.
        int first = first_layer_of(p.layout, model, s);
        int last = first_layer_of(p.layout, model, s + 1) - 1;
        text += concat(text.empty() ? "" : ", ", first, last > first ? concat("..", last) : "");
    }
    return text;
}

// Bytes of a moment of one parameter: the mean over those in 8 bits and those that stay float.
inline double small_moment_bytes(const Model& model) {
    double bytes = 0;
    for (const Parameter& p : model.parameters) {
        // Count the float that stands beside each block of codes.
        double each = has_small_states(model, p) ? 1 + 4.0 / STATE_BLOCK : 4;
        bytes += double(p.file_elements()) * each;
    }
    return bytes / double(parameter_count(model));
}

// The share of parameters that Muon updates.
inline double muon_share(const Model& model) {
    double updated = 0;
    for (const Parameter& p : model.parameters)
        updated += p.muon ? double(p.file_elements()) : 0;
    return updated / double(parameter_count(model));
}

// Bytes of a parameter's weight, gradient and optimizer state, without padding or buckets in use.
template <typename T>
ParameterBytes parameter_bytes(const PlanOptions& options, const Model& model) {
    if (options.mode != Mode::TRAIN)
        return {sizeof(T), 0, 0};
    // There are masters only if weights are stored in fewer bits than they are summed in.
    double state = sizeof(acc_t<T>);
    double master = sizeof(T) < sizeof(acc_t<T>) ? double(master_bytes(options.masters)) : 0;
    double states = double(optimizer_row(options.optimizer).states.size());
    if (model.muon) states -= muon_share(model);
    double moment = options.states == States::BF16 ? sizeof(bf16) : state;
    if (options.states == States::EIGHT_BIT)
        moment = small_moment_bytes(model);
    double mean = options.ema ? state : 0;
    return {sizeof(T), state, master + states * moment + mean};
}

// Describe these bytes, and what ZeRO leaves of them on a rank. If ranks share out experts, a third
// figure is what a rank keeps for each parameter of all experts.
template <typename T>
std::string parameter_text(const Layout& layout, const PlanOptions& options, const Model& model) {
    int shards = update_axis(layout, Group::DATA).size;
    int near = layout.weights_near ? layout.zero_group : 0;
    ParameterBytes whole = parameter_bytes<T>(options, model);
    std::string line =
        formatted("%.4g bytes a parameter, %.4g on each of %d ranks by ZeRO %d",
                  zero_bytes(whole, 0, 1), zero_bytes(whole, layout.zero, shards, near), shards,
                  layout.zero);
    std::string where = options.offload.cuts_updates() ? ", in all tiers of memory" : "";
    if (model.muon)
        where += concat("; Muon updates ", std::lround(100 * muon_share(model)),
                        "% of them, AdamW the others");
    if (layout.ep == 1 && !layout.experts.whole)
        return concat(line, where);

    // Expert parallelism: a rank has only some experts, and other ranks shard each of them.
    shards = shard_axis(layout, Group::EXPERTS).size;
    double expert = zero_bytes(whole, layout.zero, shards) / layout.ep;
    std::string more = formatted(", %.4g of an expert's by ep %d", expert, layout.ep);
    return concat(line, more, layout.experts.whole ? " and etp 1" : "", where);
}

// NCCL takes bytes of a GPU beside the plan's, and only NCCL knows how many. Its users report 0.5
// to 1.6 GB a communicator (NCCL's issues 964 and 864). Communicators that share buffers count
// once: the plan's, and beside them those of other axes (transfers.h).
inline std::string nccl_text(const Layout& layout) {
    auto beside = [&](Axis axis) {
        return int(axis.size > 1 && axis.size < layout.world());
    };
    bool hybrid = heads_axis(layout).size > 1 && keys_axis(layout).size > 1;
    int sets = 1 + beside(layout.tp) + beside(layout.pp) +
               (layout.cp.size > 1) * (hybrid ? 3 : 1) + (layout.ep > 1);
    return formatted(
        "  on GPUs NCCL takes %d %s of buffers beside it, %.1f to %.1f GB by an estimate\n", sets,
        sets > 1 ? "sets" : "set", 0.5 * sets, 1.6 * sets);
}

// Bytes of scratch for sums in rank order on GPUs (nccl.h), which is as large as what is summed. A
// bucket's gradient may be summed while a layer sums rows over tensor-parallel ranks.
template <typename T>
size_t fixed_order_scratch(const Layout& layout, const PlanOptions& options, const Model& model) {
    // Take the largest bucket that data-parallel ranks sum, and the rows that tp ranks sum.
    size_t bucket = 0;
    size_t rows = layout.tp.size > 1 ? options.B * options.T / size_t(layout.cp.size) : 0;
    for (const Bucket& b : model.buckets)
        if (b.trainable && group_axis(layout, b.group).size > 1)
            bucket = std::max(bucket, whole_elements(layout, b));
    return bucket * sizeof(acc_t<T>) + rows * model.shape.C * sizeof(T);
}

// Make the plans of all ranks of the pipeline, check them together, and place each. Returns "" or
// what is wrong with them. *text receives the table, *most the bytes of the largest rank. beside:
// bytes of a teacher, by rank; empty: there is none.
template <typename T, typename S>
std::string cluster_text(const Layout& layout, const std::vector<PlanOptions>& options,
                         const Model& model, S where, std::string* text, size_t* most,
                         const std::vector<size_t>& beside = {}) {
    // Make and check every plan, for each rank of the pipeline.
    const PlanOptions& o = options[0];
    int pp = layout.pp.size;
    std::vector<std::vector<Plan>> plans(static_cast<size_t>(pp)); // [rank][plan]
    for (const PlanOptions& option : options) {
        std::vector<Plan> ranks = make_plans(layout, model, option);
        LLMC_TRY(plans_check(ranks, model));
        for (int r = 0; r < pp; r++)
            plans[r].push_back(ranks[r]);
    }

    // Say how many ranks a line stands for, and how long ranks wait for each other.
    *text = concat("memory of a rank, by its place in the pipeline; a line stands for ",
                   layout.world() / layout.pp.size, "; ",
                   parameter_text<T>(layout, o, model), "\n");
    std::vector<int> kept(plans.size(), 1); // [rank]: stages whose activations live at once
    if (o.mode == Mode::TRAIN) {
        std::vector<Schedule> all = schedules_of(layout, o.micro_batches);
        Simulation s = simulate(slots_that_run(all, layout, model), pp);
        *text += formatted("bubble: ranks are idle %.1f%% of a step\n", 100 * s.bubble);
        all = slots_that_run(all, layout, model, true);
        for (int r = 0; r < pp; r++)
            kept[r] = peak_live(all[r]);
    }

    // Place each rank's plans: the largest rank decides which GPU is needed.
    *text += "  rank   persistent  activations        total  kept at once  layers\n";
    *most = 0;
    int largest = 0;
    for (int r = 0; r < pp; r++) {
        Arena arena = place_plans<T>(plans[r], model, where);
        const Memory& memory = arena.device();
        std::string lasting = bytes_text(double(memory.persistent_bytes));
        std::string passing = bytes_text(double(memory.bytes - memory.persistent_bytes));
        *text += formatted("  %4d %12s %12s %12s  %12d  ", r, lasting.c_str(), passing.c_str(),
                           bytes_text(double(memory.bytes)).c_str(), kept[r]);
        *text += layers_text(plans[r][0], model) + "\n";
        // Among equally large ranks, name the first.
        size_t bytes = memory.bytes + (beside.empty() ? 0 : beside[size_t(r)]);
        if (bytes <= *most) continue;
        *most = bytes;
        largest = r;
    }
    const char* with = beside.empty() ? "" : ", with its teacher";
    *text += memory_line("the largest", *most, 0, concat("rank ", largest, with));
    *text += nccl_text(layout);
    return "";
}

// Say how much of a block's scratch context parallelism takes, and how many bytes a rank sends for
// it. Returns "" if sequences are not cut.
template <typename T> std::string context_text(const Plan& p, const Model& model) {
    if (p.layout.cp.size == 1) return "";
    const char* names[] = {"gather", "ulysses", "ring"};
    // Write a hybrid like the flag.
    std::string name = names[int(p.layout.context.method)];
    int heads = p.layout.context.heads;
    if (heads > 1)
        name = concat("ulysses:", heads, ",", name, ":", keys_axis(p.layout).size);
    Shape s = rank_shape(p, model);
    ContextMessages each = context_messages<T>(s, p.layout, p.rows());

    // An evaluation has no backward pass.
    std::string back;
    if (p.mode == Mode::TRAIN)
        back = concat(", ", bytes_text(double(each.backward)), " backward");
    return concat("cp by ", name, ": ",
                  bytes_text(double(context_bytes<T>(p, s))), " of a block's scratch, which ",
                  "sends ", bytes_text(double(each.forward)), " forward", back, ", a step ",
                  bytes_text(double(context_plan_bytes<T>(p, model))), " a rank\n");
}

// ----------------------------------------------------------------------------
// which GPU

// The memory of common GPUs, in the GB of their names, and which GPUs have it.
struct GpuMemory {
    int gigabytes;
    const char* gpus;
};
constexpr GpuMemory GPU_MEMORIES[] = {
    {8, "RTX 3070"},  {12, "RTX 3060"},   {16, "RTX 4080"}, {24, "RTX 3090, RTX 4090"},
    {48, "L40S"},     {80, "A100, H100"}, {141, "H200"}};

// The bytes that a run can use: CUDA's context and its libraries take the rest.
inline double usable_bytes(const GpuMemory& m) { return 0.95 * m.gigabytes * 1073741824; }

// Say which GPUs hold a rank of so many bytes. If none does, say how many of the two largest could
// hold the model's state in equal shares, which is the least that any layout needs.
inline std::string fits_text(double rank_bytes, double state_bytes) {
    for (const GpuMemory& m : GPU_MEMORIES)
        if (rank_bytes <= usable_bytes(m))
            return concat("fits a GPU of ", m.gigabytes, " GB (", m.gpus, ")\n");

    std::string needs;
    for (const GpuMemory* m = std::end(GPU_MEMORIES) - 2; m < std::end(GPU_MEMORIES); m++) {
        double gpus = std::max(2.0, std::ceil(state_bytes / usable_bytes(*m)));
        needs += concat(needs.empty() ? "" : " or ", gpus, " x ", m->gigabytes, " GB");
    }
    return concat("fits no GPU: a rank of ", bytes_text(rank_bytes), ". The model's state, ",
                  bytes_text(state_bytes), ", needs ", needs, " and more for activations:\n",
                  "  share it with --tp, --pp and --zero 3; take less with --recompute full and ",
                  "--micro-batch 1\n");
}

// The words of a plan; docs/plan.md explains them at length.
inline const char* legend_text() {
    return "words: F forward, B backward of (micro-batch,layer), where split I then W; layer 0 "
           "embeds,\n"
           "  the last is the head; R repeats what a forward pass did not keep\n"
           "  LOAD reads tokens; COUNT sums over ranks the targets that the loss is a mean over\n"
           "  bucket: the parameters that move together. GATHER brings a sharded one, RELEASE "
           "drops it,\n"
           "  REDUCE sums its gradient over ranks, PUBLISH sends its updated weights around\n"
           "  TIE adds both gradients of a shared table; NORM measures the gradient; MUON "
           "orthogonalises\n"
           "  the momentum of matrices; UPDATE is the optimizer\n"
           "  PARK takes activations, a gradient or a chunk of state to another tier, FETCH brings "
           "them,\n"
           "  or a bucket's weights; SQUARE sums a gradient's squares for NORM before it leaves\n";
}

// ----------------------------------------------------------------------------
// a plan's actions

// The last of the actions from `at` on that differ by one layer each, all up or all down.
inline size_t end_of_run(const std::vector<Action>& actions, size_t at) {
    int way = 0;
    for (; at + 1 < actions.size(); at++) {
        const Action& a = actions[at];
        const Action& next = actions[at + 1];
        int step = next.layer - a.layer;
        bool goes_on = way ? step == way : step == 1 || step == -1;
        if (next.op != a.op || next.micro != a.micro || next.layer < 0 || !goes_on)
            break;
        way = step;
    }
    return at;
}

// Print a plan: a line for each micro-batch's forward and backward pass, and one for the end of the
// step. A long line continues below, indented. Runs of layers fold into one word, F(0,0..13). On
// one stage with more than four micro-batches, the middle ones are only counted.
inline std::string plan_text(const Plan& p, const Model& model) {
    constexpr size_t WIDTH = 88; // columns
    std::string text, line;
    auto end_line = [&] {
        if (!line.empty()) text += line + "\n";
        line.clear();
    };

    // Add a word to the line. A full line continues on the next one, indented.
    auto add_word = [&](const std::string& word) {
        bool full = !line.empty() && line.size() + 1 + word.size() > WIDTH;
        if (full) end_line();
        line += full ? "  " : line.empty() ? "" : " ";
        line += word;
    };

    // Print all micro-batches of a pipeline: they differ in what they exchange.
    bool folds = p.layout.pp.size == 1 && p.micro_batches > 4;

    Action previous = {Op::LOAD};
    for (size_t i = 0; i < p.actions.size(); i++) {
        const Action& a = p.actions[i];
        if (folds && a.micro > 1 && a.micro < p.micro_batches - 1) {
            if (previous.micro < 2) {
                end_line();
                text += "... micro-batches 2 to " + std::to_string(p.micro_batches - 2) +
                        " like the first\n";
            }
            previous = a;
            continue;
        }

        // Keep collectives and moves of buckets on the line where they stand.
        bool moves = queue_of(a.op) == Queue::MOVE;
        bool stays = a.op == Op::GATHER || a.op == Op::RELEASE || a.op == Op::REDUCE || moves ||
                     a.op == Op::SQUARE;
        bool turns = (a.op == Op::F) != (previous.op == Op::F);
        bool ends = a.op == Op::TIE || (a.op == Op::NORM && previous.op != Op::TIE);
        if (!stays && (a.micro != previous.micro || turns || ends))
            end_line();

        // Write a run of layers as one word, and continue after it.
        size_t end = end_of_run(p.actions, i);
        std::string word = action_text(a, model);
        if (end > i)
            word.insert(word.size() - 1, ".." + std::to_string(p.actions[end].layer));
        add_word(word);
        if (!stays) previous = p.actions[end];
        i = end;
    }
    end_line();
    return text;
}

// ----------------------------------------------------------------------------
// one layer

// The actions of a layer for the first micro-batch: what each reads and writes,
// and where that lies.
inline std::string layer_text(const Arena& arena, const Plan& p, const Model& model, int plan,
                              int layer) {
    std::string text;
    for (size_t i = 0; i < p.actions.size(); i++) {
        // One micro-batch stands for all: the others do the same at other addresses.
        Action a = p.actions[i];
        if (a.layer != layer || a.micro > 0)
            continue;
        text += action_text(a, model) + "\n";

        // Leave out a datum without a place: it is not on this rank, or is not stored at all.
        auto list = [&](const char* what, const std::vector<Data>& data) {
            for (Data d : data) {
                const Place* place = arena_find(arena, plan, int(i), d);
                if (!place) continue;
                text += formatted("  %-7s %-24s %14zu bytes at %zu\n", what,
                                  data_text(d, model).c_str(), place->bytes, place->offset);
            }
        };
        Access x = access(p, model, a);
        list("reads", x.reads);
        list("writes", x.writes);
    }
    return text;
}

} // namespace llmc
