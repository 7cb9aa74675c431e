// plan_flags.h - the optimizer, the layout and the options of plans that flags describe
//   Nothing is allocated.
#pragma once
#include "../action.h"
#include "../ops/tensor_table.cuh"
#include "../optimizer.h"
#include "../adapters.h"
#include "../family.h"
#include "../layout.h"
#include "../model.h"
#include "../offload.h"
#include "../ops/muon.cuh"
#include "../ops/nf4.cuh"
#include "../ops/small_states.cuh"
#include "../ops/types.h"
#include "../pipeline.h"
#include "../quantised.h"
#include "../comm/text.h"
#include "config.h"
#include "files.h"
#include <optional>
#include <string_view>

namespace llmc {

// ----------------------------------------------------------------------------
// the learning rate of a step
//   warm-up:  lr (step + 1) / warmup                                    for step < warmup
//   then, with t = (step - warmup) / (total - warmup) running from 0 to 1:
//   cosine    min_lr + (lr - min_lr) (1 + cos(pi t)) / 2                - arXiv:1608.03983
//   linear    lr + (min_lr - lr) t
//   wsd       lr until the last fifth of the run, then linear to min_lr - arXiv:2404.06395;
//             wsd:0.7 falls in the last 0.7 of it
//   constant  lr in every step after the warm-up

// The share of the run in which a wsd schedule falls; 0: it is another schedule, -1: it is none.
inline double wsd_share(const std::string& schedule) {
    if (schedule == "wsd") return 0.2;
    double share = 0;
    if (schedule.starts_with("wsd:"))
        return parse_number(schedule.substr(4), 0.001, 1, false, &share).empty() ? share : -1;
    bool other = schedule == "cosine" || schedule == "linear" || schedule == "constant";
    return other ? 0 : -1;
}

// The learning rate of step 0 .. total - 1. schedule: one of the names of --schedule.
inline double lr_at(int64_t step, int64_t total, int64_t warmup, double lr, double min_lr,
                    const std::string& schedule) {
    // Warm up. Step 0 already learns: it has lr / warmup, not 0.
    if (step < warmup)
        return lr * double(step + 1) / double(warmup);

    // Fall from here on. In a run that is all warm-up nothing follows, and t stays 0.
    double after = double(step - warmup), length = double(total - warmup);
    double t = total > warmup ? std::clamp(after / length, 0.0, 1.0) : 0;
    if (schedule == "cosine")
        return min_lr + (lr - min_lr) * 0.5 * (1 + std::cos(M_PI * t));
    if (schedule == "linear")
        return lr + (min_lr - lr) * t;

    // wsd falls after a fixed share of the whole run, warm-up included.
    double falls = wsd_share(schedule);
    if (falls > 0) {
        double decay_from = (1 - falls) * double(total);
        double decayed = double(step) - decay_from;
        if (decayed <= 0) return lr;
        return lr + (min_lr - lr) * std::min(1.0, decayed / (double(total) - decay_from));
    }
    return lr; // constant
}

// ----------------------------------------------------------------------------
// the optimizer

// Entries as large as AdamW's, whose rate then serves; and Scion's, arXiv:2502.07529.
inline double rms_scale(double r, double c) {
    return 0.2 * std::sqrt(std::max(r, c));
}
inline double unit_scale(double r, double c) {
    return std::sqrt(r / c);
}

// Muon's published polynomials.
inline const std::vector<NewtonSchulz>& newton_schulz_tables() {
    static const std::vector<NewtonSchulz> tables = {
        SIMPLE,
        // Megatron-LM.
        {"quintic",
         {{4.0848, -6.8946, 2.9270},
          {3.9505, -6.3029, 2.6377},
          {3.7418, -5.5913, 2.3037},
          {2.8769, -3.1427, 1.2046},
          {2.8366, -3.0525, 1.2012}}},
        // Polar Express, arXiv:2505.16932.
        {"polar",
         {{8.156554524902461, -22.48329292557795, 15.878769915207462},
          {4.042929935166739, -2.808917465908714, 0.5000178451051316},
          {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
          {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
          {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}},
         1.02},
        // NVIDIA's Emerging-Optimizers. "aol", arXiv:2512.04632, takes 4 iterations: a singular
        // value above 0.88 of the norm, which is almost of rank 1, changes its sign.
        {"polar8",
         {{8.2051, -22.9019, 16.4607},
          {4.0664, -2.8612, 0.5184},
          {3.9096, -2.8234, 0.5250},
          {3.2856, -2.4153, 0.4853},
          {2.2779, -1.6198, 0.3985},
          {1.8726, -1.2307, 0.3585},
          {1.8564, -1.2132, 0.3568},
          {1.8750, -1.2500, 0.3750}}},
        {"aol",
         {{4.0098, -7.0585, 2.4635},
          {3.4585, -5.5479, 2.5959},
          {2.7573, -3.2939, 1.4254},
          {2.7215, -3.0494, 1.3169}}},
        // modded-nanogpt's third track: exact, at twelve iterations.
        {"convergent", std::vector(12, std::array{2.0, -1.5, 0.5})},
    };
    return tables;
}

// A setting behind "muon" or "adamw" in --optimizer. Returns "" or what is wrong with it.
inline std::string read_setting(Optimizer optimizer, const std::string& name,
                                const std::string& value, double lr, Muon* h) {
    if (optimizer == Optimizer::SGD)
        return "sgd has no settings";
    const std::string own = optimizer == Optimizer::ADAMW ? "" : name; // a setting of Muon alone
    double x = 0;
    auto number = [&](const std::string& text, double low, double high) {
        std::string wrong = parse_number(text, low, high, false, &x);
        return wrong.empty() ? "" : name + " " + wrong;
    };

    // Words.
    if (own == "ns") {
        for (const NewtonSchulz& table : newton_schulz_tables())
            if (value == table.name)
                return h->table = &table, "";
        return "ns is simple, quintic, polar, polar8, aol or convergent";
    }
    if (own == "scale") {
        if (value == "shape")
            return h->scale = shape_scale, "";
        if (value == "rms")
            return h->scale = rms_scale, "";
        if (value == "unit")
            return h->scale = unit_scale, "";
        return "scale is shape, rms or unit";
    }
    if (own == "cautious" && value.empty())
        return h->cautious = true, "";
    if (own == "heavy-ball" && value.empty())
        return h->nesterov = false, "";
    if (own == "muoneq" && value.empty())
        return h->muoneq = true, "";
    if (own == "muon+" && value.empty())
        return h->plus = true, "";
    if (name == "decay-vectors" && value.empty())
        return h->decays_vectors = true, "";

    // Numbers. Rates are kept as factors of --lr.
    if (own == "normuon") {
        std::string wrong = number(value.empty() ? "0.95" : value, 0, 0.99999);
        return h->beta2 = float(x), wrong;
    }
    if (own == "momentum") {
        // One number, or FIRST:LAST:STEPS.
        std::istringstream words(value);
        std::string first, last, steps;
        std::getline(words, first, ':');
        std::getline(words, last, ':');
        std::getline(words, steps);
        if (first == value) last = first, steps = "1";
        std::string wrong = number(first, 0, 0.99999);
        h->first_momentum = float(x);
        if (wrong.empty()) wrong = number(last, 0, 0.99999);
        h->momentum = float(x);
        if (wrong.empty()) wrong = number(steps, 1, 1e9);
        h->momentum_steps = int(x);
        return wrong;
    }
    const std::pair<const char*, float*> numbers[] = {
        {"beta1", &h->others_beta1},
        {"decay", &h->others_decay},
        {"table", &h->rates[size_t(MuonGroup::TABLE)]},
        {"head", &h->rates[size_t(MuonGroup::HEAD)]},
        {"vectors", &h->rates[size_t(MuonGroup::VECTOR)]},
        {"values", &h->rates[size_t(MuonGroup::VALUES)]},
        {"resid", &h->rates[size_t(MuonGroup::RESID)]},
        {"x0", &h->rates[size_t(MuonGroup::X0)]}};
    for (auto [word, at] : numbers) {
        if (name != word) continue;
        bool rate = name != "beta1" && name != "decay";
        std::string wrong = number(value, 0, name == "beta1" ? 0.99999 : 1000);
        return *at = float(!rate ? x : lr > 0 ? x / lr : 0), wrong;
    }
    return "it has no setting '" + printable(name) +
           "': give some of table=, head=, vectors=, values=, resid=, x0=, decay=, decay-vectors, "
           "beta1=; with muon also ns=, scale=, momentum=, heavy-ball, cautious, normuon=, "
           "muoneq, muon+";
}

// The optimizer that --optimizer names ahead of its settings, if there is one of that name.
inline std::optional<Optimizer> named_optimizer(const Config& c) {
    std::string_view word = std::string_view(c.optimizer).substr(0, c.optimizer.find(','));
    bool rows = c.optimizer.find(",normuon") != std::string::npos;
    if (word == "muon")
        return rows ? Optimizer::NORMUON : Optimizer::MUON;
    for (Optimizer o : {Optimizer::ADAMW, Optimizer::SGD})
        if (word == optimizer_row(o).name)
            return o;
    return {};
}

// Read --optimizer: adamw, sgd or muon, perhaps with ,name=value,... Returns "" or what is wrong.
inline std::string read_optimizer(const Config& c, Optimizer* optimizer, Muon* muon) {
    *muon = {};
    muon->decay = muon->others_decay = float(c.weight_decay);
    muon->scale = rms_scale;
    std::optional<Optimizer> named = named_optimizer(c);
    if (!named)
        return "--optimizer " + printable(c.optimizer) + ": give adamw, sgd or muon";
    *optimizer = *named;

    // Read the settings. The planner asks for hundreds of thousands of layouts: most have none.
    size_t comma = c.optimizer.find(',');
    if (comma == std::string::npos)
        return "";
    std::istringstream words(c.optimizer.substr(comma + 1));
    std::string word, wrong;
    while (std::getline(words, word, ',') && wrong.empty()) {
        size_t equals = std::min(word.find('='), word.size());
        std::string value = word.substr(std::min(equals + 1, word.size()));
        wrong = read_setting(*optimizer, word.substr(0, equals), value, c.lr, muon);
        muon->apart = true;
    }
    return wrong.empty() ? "" : "--optimizer " + printable(c.optimizer) + ": " + wrong;
}
inline Optimizer choose_optimizer(const Config& c) {
    return named_optimizer(c).value_or(Optimizer::ADAMW);
}

// Check the optimizer, its schedule, and what it needs of other flags.
inline std::string check_optimizer(const Config& c) {
    Optimizer optimizer = Optimizer::ADAMW;
    Muon muon;
    LLMC_TRY(read_optimizer(c, &optimizer, &muon));
    if (wsd_share(c.schedule) < 0)
        return "--schedule " + printable(c.schedule) +
               ": give cosine, linear, constant, wsd or wsd:SHARE, as wsd:0.7";
    bool is_muon = c.optimizer.starts_with("muon");
    if ((is_muon || muon.apart) && has_adapters(c))
        return "--optimizer " + printable(c.optimizer) + " is for matrices of blocks, and adapters "
               "have none that learn: give --optimizer adamw";
    if (is_muon && c.states == "8bit")
        return "--optimizer muon keeps moments as float or bf16: give --states bf16";
    return "";
}

// ----------------------------------------------------------------------------
// the depth dial: a model and its training from one number, by nanochat's formulas

// The weights that the dial counts: blocks' matrices with the gates of value embeddings, and head.
inline double dial_weights(size_t depth, size_t C, size_t V) {
    size_t gates = 12 * (C / 128) * ceil_div(depth, 2);
    return double(12 * depth * C * C + gates + V * C);
}

// Read --depth, and set the flags that the user has not: "" or what is wrong. says: a line for each
// subject that was set.
inline std::string take_depth(Config& c, std::string* says) {
    if (c.depth.empty()) return "";
    int depth = 0, read = 0;
    double ratio = 12; // tokens a weight
    sscanf(c.depth.c_str(), "%5d%n:%lf%n", &depth, &read, &ratio, &read);
    bool whole = size_t(read) == c.depth.size();
    if (!whole || depth < 1 || depth > 1024 || !(ratio > 0 && ratio < 1e6))
        return "--depth " + printable(c.depth) + ": give D or D:RATIO, as 12:8";
    bool values = c.model == "nanochat-values";
    if (was_given(c, "model") && c.model != "nanochat" && !values)
        return "--depth " + c.depth + " is a nanochat's: leave --model out";
    if (was_given(c, "optimizer") && !was_given(c, "lr"))
        return "--depth " + c.depth + " has a rate for its own optimizer: give --lr too";

    // Set a flag, and say its value; end the line of a subject.
    auto set = [&](const char* name, const auto&... value) {
        const Flag& flag = *find_flag(name);
        if (!was_given(c, name))
            set_field(c, flag, concat(value...));
        *says += concat(" --", name, " ", field_text(c, flag.field));
    };
    auto end = [&](const auto&... words) { *says += concat(words..., "\ndepth ", c.depth, ":"); };

    // The model: 64 channels a layer, in heads of 128.
    size_t D = size_t(depth);
    size_t C = 128 * ceil_div(D, 2);
    *says = "depth " + c.depth + ":";
    set("model", "nanochat");
    set("layers", D);
    set("channels", C);
    set("heads", C / 128);
    end(values ? ", without smear and backout"
               : ", without value embeddings, smear and backout");

    // The batch grows with the weights, counted against those of a depth of 12.
    size_t V = c.vocab ? size_t(c.vocab) : 32768;
    double weights = dial_weights(D, C, V);
    double growth = weights / dial_weights(12, 768, V);
    set("seq", 2048);
    set("batch-tokens", int64_t(std::exp2(std::round(19 + 0.383 * std::log2(growth)))));
    end();
    set("steps", int64_t(ratio * weights) / std::max(c.batch_tokens, int64_t(1)));
    end(", for ", ratio, " tokens a weight of blocks and head: ", int64_t(weights));

    // Rates grow with the root of the batch; AdamW's fall with the root of the width.
    double batch = std::sqrt(double(c.batch_tokens) / 524288);
    double width = batch / std::sqrt(double(C) / 768);
    set("lr", 0.02 * batch);
    std::string more = concat(",values=", 0.15 * width, ",resid=", 0.005 * batch, ",x0=",
                              0.5 * batch);
    set("optimizer", "muon,ns=polar,scale=shape,momentum=0.85:0.97:400,cautious,normuon=0.9,"
        "muoneq,muon+,table=", 0.3 * width, ",head=", 0.008 * width, ",decay=0.01",
        values ? more : "");
    set("beta1", 0.8);
    set("beta2", 0.96);
    set("eps", 1e-10);
    set("clip", 0);
    end(", whose momentum does not fall at the end");
    set("schedule", "wsd:0.65");
    set("min-lr", 0.05 * c.lr);
    set("warmup", std::min(c.steps, int64_t(40)));
    end();
    set("weight-decay", 0.28 * batch / growth);
    *says += "\n";
    return "";
}

// ----------------------------------------------------------------------------
// layout

// The schedule that --pipeline names. A name that is no schedule's is the path of a file with one,
// which is read into `given`.
inline Pipeline choose_pipeline(const Config& c, int micro_batches, std::vector<Schedule>* given) {
    for (size_t i = 0; i < PIPELINE_NAMES.size(); i++)
        if (c.pipeline == PIPELINE_NAMES[i])
            return Pipeline(i);

    // Read and check the user's schedule before any rank depends on it.
    std::ifstream file(file_type(c.pipeline) == S_IFREG ? c.pipeline : "");
    LLMC_USER_CHECK(file,
                    "--pipeline %s is neither gpipe, 1f1b, interleaved, zero-bubble nor a file",
                    c.pipeline.c_str());
    std::string wrong = read_schedule(file, *given);
    if (wrong.empty())
        wrong = check_schedule(*given, c.pp, c.chunks, micro_batches);
    LLMC_USER_CHECK(wrong.empty(), "--pipeline %s: %s", c.pipeline.c_str(), wrong.c_str());
    return Pipeline::GIVEN;
}

// Divide the layers into stages of about equal cost. Returns the first layer of each stage, then
// the number of layers. A layer's cost is the number of weights that a token meets in its matrices:
// of experts those of K, so that stages take as long and not as many bytes. The head's product
// counts also if its table is tied.
inline std::vector<int> choose_stages(const Shape& shape, int stages) {
    Model model = make_model(shape);
    std::vector<double> cost(model.layers(), 0);
    for (const Parameter& p : model.parameters)
        if (p.shape.size() == 2 && p.layer > 0) {
            // A token meets K experts of a stack.
            double met = p.stack > 1 ? double(shape.experts.K) / p.stack : 1;
            cost[p.layer] += met * double(p.elements());
        }
    if (shape.embedding.tied)
        cost.back() = double(shape.Vp() * shape.C);
    return split_layers(cost, stages);
}

// Micro-batches of a step on one data-parallel rank. config_check() has checked that the division
// leaves no remainder.
inline int micro_batches_of(const Config& c) {
    return int(c.batch_tokens / (int64_t(c.micro_batch) * c.seq * c.dp));
}

// The layout that the flags describe, but for its stages.
inline Layout choose_grid(const Config& c, const Shape& shape) {
    Layout layout;

    // The grid: ranks along each axis, and the order in which they are numbered.
    layout.dp.size = c.dp;
    layout.tp.size = c.tp;
    layout.pp.size = c.pp;
    layout.cp.size = c.cp;
    layout.ep = c.ep;
    layout.experts.whole = has_whole_experts(c) && shape.experts.E;
    layout.experts.exchange = c.ep > 1 && c.ep_method == "exchange";
    layout.order = layout_order(c.grid_order);
    layout.sequence_parallel = c.sequence_parallel;

    // Context parallelism: how attention reaches the other ranks' tokens.
    ContextChoice context;
    read_context_method(c.cp_method, &context);
    layout.context.method = context.method;
    layout.context.heads = context.heads;

    // ZeRO: its stage, the ranks of a sharding group, and blocks of 8-bit state, which no shard
    // boundary may cut.
    layout.zero = c.zero;
    layout.zero_group = keeps_weights_near(c) ? c.hpz : c.zero_group;
    layout.weights_near = keeps_weights_near(c);
    if (choice_of<States>(c, &Config::states) == States::EIGHT_BIT)
        layout.tensor_align = STATE_BLOCK; // so that no block spans two tensors, or two shards

    // Muon: its iterations.
    Optimizer optimizer;
    Muon muon;
    read_optimizer(c, &optimizer, &muon);
    if (c.optimizer.starts_with("muon"))
        layout.muon = int(muon.table->steps.size());

    // The pipeline's schedule.
    layout.chunks = c.chunks;
    layout.pipeline = choose_pipeline(c, micro_batches_of(c), &layout.given);
    return layout;
}

// The layout that the flags describe, the same for every rank. No other place makes one of flags.
inline Layout choose_layout(const Config& c, const Shape& shape) {
    Layout layout = choose_grid(c, shape);
    if (layout.stages() > 1)
        layout.first_layer = choose_stages(shape, layout.stages());
    return layout;
}

// The first rank of a pipeline stage. It stands for the others, which take the same bytes.
inline int first_rank_of(const Layout& layout, int pp_rank) {
    int rank = 0;
    while (layout_at(layout, rank).pp.rank != pp_rank)
        rank++;
    return rank;
}

// The level of --recompute. "auto", the last of its words, counts as FULL until choose_recompute()
// (limits.h) has found out how much room there is.
inline Recompute recompute_of(const Config& c) {
    return std::min(choice_of<Recompute>(c, &Config::recompute), Recompute::FULL);
}

// The options of new adapters.
inline LoraOptions lora_options(const Config& c) {
    return {size_t(c.lora), c.lora_alpha, c.lora_rs, c.lora_targets, c.lora_layers};
}

// Return the last words of a model's modules, for messages: "c_attn, c_proj, c_fc".
inline std::string module_words(const Model& m) {
    std::string words;
    for (const Parameter& p : m.parameters) {
        std::string module = module_of(p);
        std::string word = module.substr(module.rfind('.') + 1);
        bool known = (", " + words + ",").find(", " + word + ",") != std::string::npos;
        if (adaptable(m, p) && !known)
            words += (words.empty() ? "" : ", ") + word;
    }
    return words;
}

// Read which of L blocks a list names: "all", or numbers and ranges as in "0,4,8-11".
// Returns "" or what is wrong with it.
inline std::string blocks_named(const std::string& list, size_t L, std::vector<bool>* blocks) {
    blocks->assign(L, list == "all");
    if (list == "all") return "";
    std::string flag = "--lora-layers " + list;
    auto number = [](const std::string& s) {
        bool digits = s.find_first_not_of("0123456789") == std::string::npos;
        return digits && !s.empty() && s.size() < 7;
    };

    for (const std::string& range : texts_between_commas(list)) {
        size_t dash = range.find('-');
        std::string low = range.substr(0, dash);
        std::string high = dash == std::string::npos ? low : range.substr(dash + 1);
        if (!number(low) || !number(high))
            return concat(flag, ": \"", range, "\" is no block and no range: write 3 or 8-11");

        // Refuse ranges that run down, and blocks that the model does not have.
        size_t from = std::stoul(low), to = std::stoul(high);
        if (from > to)
            return concat(flag, ": ", range, " runs down: write ", to, "-", from);
        if (to >= L)
            return concat(flag, ": the last block is ", L - 1, ": use that or less");
        std::fill(blocks->begin() + long(from), blocks->begin() + long(to) + 1, true);
    }
    return "";
}

// Whether --lora-targets means a matrix. "all" are those that every token meets: adapters of all
// experts would be most of what is trained, so they are asked for by name.
inline bool flag_targets(const std::string& target, const Parameter& p) {
    if (target == "experts") return p.stack > 1;
    bool word = target == "all" || target == "attention";
    return !(word && p.stack > 1) && targets_module(target, module_of(p));
}

// Choose the adapters of a model without any. Returns "" or what is wrong with the flags.
inline std::string choose_adapters(const Model& base, const LoraOptions& o, Adapters* adapters) {
    std::vector<bool> blocks;
    bool stacks = base.shape.experts.E && !base.shape.experts.bias;
    LLMC_TRY(blocks_named(o.layers, base.shape.L, &blocks));

    // Insist that each target finds something: a misspelt one would silently train less.
    for (const std::string& target : texts_between_commas(o.targets)) {
        bool any = false;
        if (target == "experts" && base.shape.experts.bias)
            return "--lora-targets experts: not built for " + base.shape.hf_type +
                   ", whose files join all experts: give all or attention";
        for (const Parameter& p : base.parameters) {
            if (!adaptable(base, p) || !flag_targets(target, p))
                continue;
            if (!blocks[size_t(p.layer - 1)]) continue; // layer 1 is block 0
            any = true;

            // Refuse a rank beyond the matrix's own: it adds nothing.
            size_t rows = p.rows() / p.stack; // of one expert's
            size_t most = std::min(rows, p.cols());
            if (o.rank > most)
                return concat("--lora ", o.rank, " is beyond ", p.name, ", which is ", rows, " x ",
                              p.cols(), ": use --lora ", most, " or less");
            (*adapters)[module_of(p)] = {o.rank, lora_scale(o)};
        }
        if (!any)
            return concat("--lora-targets ", target, ": no matrix of a block ",
                          o.layers == "all" ? "" : "of --lora-layers ", "has this name: try all, "
                          "attention, ", stacks ? "experts, " : "", "or some of ",
                          module_words(base));
    }
    return "";
}

// Refuse tensor parallelism that cuts a block of NF4 or a group of int4. Rows of int8 may be cut
// anywhere. A block shared by two ranks would need a place on both, and codes in halves.
inline std::string check_pieces(Stored stored, const Model& m, const Layout& layout) {
    bool four = stored == Stored::INT4;
    if (stored != Stored::NF4 && !four)
        return "";
    for (const Parameter& p : m.parameters) {
        // Blocks of NF4 run on across the ends of rows, so a run must be whole blocks. Groups of
        // int4 end with their row: a cut between rows must only leave whole bytes, and a cut that
        // divides a group equally gives each part a copy of the group's scale.
        size_t run = piece_runs(p, layout.tp.rank, layout.tp.size).run;
        bool rows = p.local_cols() == p.cols();
        size_t block = !four ? NF4_BLOCK : rows ? 2 : INT4_GROUP;
        bool even = run % 2 == 0;
        bool parts = four && even && INT4_GROUP % run == 0;

        // Any other cut would split a block over two ranks.
        bool cut = p.pieces > 1 && run % block && !parts;
        if (cut && is_narrow(stored, m, p))
            return concat("--weights ", four ? "int4" : "nf4", ": --tp ", layout.tp.size, " cuts ",
                          p.name, " every ", run, " elements, and its blocks have ", block,
                          ": use a smaller --tp, or --weights int8");
    }
    return "";
}

// ----------------------------------------------------------------------------
// plans

// The options of the plan that trains. The other plans copy them, and change what differs.
inline PlanOptions train_options(const Config& c) {
    PlanOptions train;
    train.B = size_t(c.micro_batch);
    train.T = size_t(c.seq);
    train.micro_batches = micro_batches_of(c);
    train.optimizer = choose_optimizer(c);
    train.gradients = choice_of<Gradients>(c, &Config::gradients);
    train.masters = choice_of<Masters>(c, &Config::masters);
    train.states = choice_of<States>(c, &Config::states);
    train.ema = c.ema > 0;
    train.stored = choice_of<Stored>(c, &Config::weights);
    train.objective = objective_of(c);
    train.recompute = recompute_of(c);

    // Offload to the host's memory or to a folder. (A folder named cpu is written "./cpu".)
    Tier tier = c.offload_to == "cpu" ? Tier::HOST : Tier::DISK;
    for (const OffloadRow& row : OFFLOAD_TABLE)
        if (offloads(c, row.name))
            train.offload.*row.tier = tier;
    if (offloads(c, "update"))
        train.offload.update = Tier::HOST;
    return train;
}

// The options of a run's own evaluation, of one micro-batch.
inline PlanOptions evaluation_of(const PlanOptions& train) {
    PlanOptions evaluate = train;
    evaluate.mode = Mode::EVALUATE;
    evaluate.recompute = Recompute::NONE;
    evaluate.micro_batches = 1;
    return evaluate;
}

// The teacher's plan: to evaluate the micro-batches of a training plan.
inline PlanOptions teacher_options(const PlanOptions& train) {
    PlanOptions o;
    o.mode = Mode::EVALUATE;
    o.B = train.B;
    o.T = train.T;
    o.micro_batches = train.micro_batches;
    return o;
}

// The layout of a teacher. Nothing of it is sharded, because the student's head reads its table
// when no plan gathers that.
inline Layout teacher_layout(Layout layout) {
    layout.zero = 0;
    layout.zero_group = 0;
    layout.weights_near = false;
    return layout;
}

// The options of the plan that samples answers to train on. A slot holds a whole training window:
// the prompt and its answer.
inline PlanOptions rollout_options(const Config& c, const PlanOptions& train) {
    PlanOptions generate = evaluation_of(train);
    generate.mode = Mode::GENERATE;
    generate.objective = {};
    size_t group = size_t(c.group);
    size_t groups = std::max(size_t(1), size_t(c.batch_tokens / c.seq) / group);
    if (answers_are_shared(c))
        groups = ceil_div(groups, size_t(c.dp));
    generate.B = std::min(size_t(c.slots), groups * group);
    generate.T = generate.cache = size_t(c.seq);
    return generate;
}

// The axes of the layout in words, and below the whole layout, for the title of a timeline.
inline std::string axes_text(const Config& c) {
    return concat("dp ", c.dp, " x tp ", c.tp,
                  c.sequence_parallel ? " with sequence parallelism" : "", " x pp ", c.pp,
                  c.cp > 1 ? concat(" x cp ", c.cp, " by ", c.cp_method) : "",
                  c.ep > 1 ? concat(", ep ", c.ep, " by ", c.ep_method) : "",
                  has_whole_experts(c) ? ", etp 1" : "");
}
inline std::string layout_text(const Config& c) {
    return concat(c.model, ", ", axes_text(c), ", zero ", c.zero, ", ", c.pipeline);
}

} // namespace llmc
