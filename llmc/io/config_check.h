// config_check.h - flags that cannot go together, or with a shape: refused before a run
//   Two tables name the pairs of flags that need or exclude each other; functions check the rest, a
//   subject each. A message has both numbers and a fix. config_check() calls all in turn, once,
//   before anything is allocated. It fills in what the user left to the program as it goes, so that
//   later checks can rely on it. A function that returns a text returns "" or what is wrong.
#pragma once
#include <numeric>
#include "../context_parallel.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/latent.cuh"
#include "../ops/moe.cuh"
#include "../ops/types.h"
#include "../sharding.h"
#include "../comm/text.h"
#include "config.h"
#include "files.h"
#include "machine.h"
#include "plan_flags.h"

namespace llmc {

// ----------------------------------------------------------------------------
// pairs of flags

// Flags, those of which each needs one or that it excludes, and what a message says behind the flag
// and its value; % stands for the other flag. NAME is on where its value is not the default,
// NAME=A|B where it has or lists one of these.
struct Pair {
    const char *flags, *others, *says;
};

// clang-format off
// Flags that do nothing without one of the others. They are refused where the user gave them.
constexpr Pair NEEDED_FLAGS[] = {
    {"beta", "loss=dpo|ipo|simpo|orpo|kto|grpo",
     " is for preferences and rewards: give --loss dpo, ipo, simpo, orpo, kto or grpo"},
    {"label-smoothing", "loss=dpo", " is for --loss dpo: leave it out"},
    {"gamma", "loss=simpo", " is for --loss simpo: leave it out"},
    {"desirable-weight undesirable-weight", "loss=kto", " is for --loss kto: leave it out"},
    {"teacher distill-share distill-temperature", "loss=distill",
     " is for --loss distill: give that too"},
    {"loss=distill", "teacher steps=0 eval", " learns from a teacher: give --teacher DIR"},
    {"group answer-tokens reward advantage updates clip-low clip-high reward-seconds",
     "loss=grpo", " is of answers that are sampled: give --loss grpo"},
    {"clip-low clip-high", "updates",
     ": the first update of a rollout has no ratio to clip: give --updates 2 or more"},

    {"lora-alpha lora-targets lora-layers lora-rs", "lora", " is for adapters: give --lora RANK"},
    {"lora-plus", "lora prefix adapter adapters",
     " is for adapters: give --lora RANK or --adapter DIR"},
    {"merge", "export", " is for adapters that are exported: give --export DIR"},
    {"merge", "lora prefix adapter adapters",
     " is for adapters: give --adapter DIR or --lora RANK"},
    {"adapters", "prompts",
     ": lines of --prompts FILE choose among them: give it, or one folder as --adapter"},
    {"weights", "steps=0 eval lora prefix adapter adapters",
     " does not train: give --steps 0 or --eval, or --lora RANK"},

    {"resume", "out", " goes on from a checkpoint in --out: give --out DIR"},
    {"save-every save-async keep=best", "out", " wants a folder: give --out DIR"},
    {"buddy", "out", " saves between the saves of a folder: give --out DIR"},
    {"use-ema", "eval steps=0",
     " would train on from the mean, which no optimizer has seen: give --eval, or --steps 0 and "
     "--export or samples"},
};

// Flags that cannot work together with one of the others.
constexpr Pair EXCLUDED_FLAGS[] = {
    {"add-tokens", "lora prefix adapter adapters",
     ": adapters leave the tables as they are, and new rows would not learn: --export them with "
     "--steps 0 first, or train without adapters"},
    {"add-tokens", "weights", " is not built with %: give --weights float"},
    {"add-tokens", "upcycle", " is not built with %: --export the tokens with --steps 0 first"},
    {"upcycle", "experts scratch", " copies a folder's ffn: leave % out"},
    {"upcycle", "router=softmax",
     ": gates of % sum to less than 1, and copies of the ffn to less than the ffn: give --router "
     "renormalised"},
    {"router-bias-rate", "masters=none", " moves by less than % can hold: give --masters float"},
    {"router-bias-rate", "lora prefix adapter adapters",
     " moves a number of the base, which % leaves as it is: give 0"},
    {"expert-capacity", "cp",
     " counts the tokens of whole sequences, which % cuts: leave one of them out"},
    {"expert-capacity", "loss=grpo",
     " drops choices that generation keeps, so % would train another policy than the one that it "
     "samples: leave it out"},

    {"fp8", "precision=fp32|fp16",
     " quantises what is bf16, and not what is of %: give --precision bf16"},
    {"fp8", "cp weights", " is not built with %: leave one of them out"},
    {"fp8", "lora prefix adapter adapters", " is not built with %: give --fp8 none"},
    {"masters", "precision=fp32|fp16",
     " is for bf16 weights, and not for those of %: give --precision bf16, or --masters float"},
    {"masters", "optimizer=sgd", " is not for %: give --masters float"},
    {"states", "optimizer=sgd", " is not for %: give --states float"},
    {"masters=remainder", "lora prefix adapter adapters",
     " would round the weights that % freezes in another way: give --masters float"},
    {"weights", "offload=weights",
     " stay on the device, and --offload weights moves no codes: leave one of them out"},
    {"offload=update", "offload-to",
     ": the CPU updates in memory, and % is a folder: leave it out"},

    {"prefix", "lora adapters lora-plus",
     " is prefix tuning, and % is for other adapters: leave one of them out"},
    {"prefix", "loss=dpo|ipo|kto",
     ": % compares with the base, which a prefix changes from the start: give --lora RANK"},
    {"lora", "adapter", " makes new adapters, and % has some: leave one of them out"},
    {"adapters", "lora adapter",
     " and % both say which adapters the run has: leave one of them out"},
    {"loss=distill", "ep etp=1 cp graphs", ": a teacher next to % is not built: leave it out"},
    {"loss=grpo", "val eval keep=best",
     ": the loss of sampled answers says nothing of others, and rewards of validation are not "
     "built: leave % out"},

    {"sequence-parallel", "tp=1", " shares rows among tensor-parallel ranks: give --tp"},
    {"chunks", "pipeline=1f1b", " needs --pipeline interleaved, gpipe or zero-bubble"},
    {"hpz", "zero=0|1|2", " says which ranks share out weights: add --zero 3"},
    {"hpz", "zero-group", " sets the group of weights: leave % out"},
    {"hpz", "offload=weights",
     " keeps weights near, --offload weights does not: leave one of them out"},
    {"hpz zero-group", "ep etp=1", " is not built with %: leave one of them out"},

    {"graphs", "ep-method=exchange",
     ": with % the host reads what routers chose, and a graph does not wait: give --ep-method "
     "gather"},
    {"graphs", "offload", ": the host moves what % names: leave one of the two out"},
    {"graphs", "device=cpu", " is for GPUs, and % launches nothing: leave one of the two out"},
    {"graphs", "local-ranks",
     ": the threads of % wait for each other on the host: start processes with mpirun, a GPU each"},
    {"graphs", "timeline", ": % times actions one by one: leave one of the two out"},

    {"prompts chat", "prompt", " and % both say what the model continues: give one of them"},
    {"chat", "prompts", " and % both say what the model continues: give one of them"},
    {"prompts chat draft", "sample-tokens=0", ": % continues nothing: leave it out"},
};
// clang-format on

// A flag of a pair, and the value with which it is on; "": any but its default.
struct On {
    const Flag* flag;
    std::string value;
};

// Read the flags of a pair's column.
inline std::vector<On> flags_in(const std::string& column) {
    std::vector<On> flags;
    std::istringstream words(column);
    for (std::string word, value; words >> word;) {
        size_t equals = std::min(word.find('='), word.size());
        const Flag* flag = find_flag(word.substr(0, equals));
        std::istringstream values(word.substr(std::min(equals + 1, word.size())));
        if (equals == word.size()) flags.push_back({flag, ""});
        while (std::getline(values, value, '|'))
            flags.push_back({flag, value});
    }
    return flags;
}

// The first flag that is on, or null.
inline const On* first_on(const Config& c, const std::vector<On>& flags) {
    static const Config defaults;
    for (const On& on : flags) {
        auto differs = [&](auto member) { return c.*member != defaults.*member; };
        if (on.value.empty() && std::visit(differs, on.flag->field)) return &on;
        std::string list = on.value.empty() ? "" : "," + field_text(c, on.flag->field) + ",";
        if (list.find("," + on.value + ",") != list.npos) return &on;
    }
    return nullptr;
}

// A flag as it is given: its name, and a value unless it is a switch. A prefix may be --adapter's.
inline std::string flag_text(const Config& c, const Flag& flag) {
    bool brought = !strcmp(flag.name, "prefix") && !was_given(c, "prefix") && !c.adapter.empty();
    if (brought) return "--adapter " + printable(c.adapter);
    bool is_switch = std::holds_alternative<bool Config::*>(flag.field);
    std::string value = is_switch ? "" : " " + printable(field_text(c, flag.field));
    return concat("--", flag.name, value);
}

// Both columns of a table, read once.
struct PairOfFlags {
    std::vector<On> flags, others;
    std::string says;
};
template <size_t N> std::vector<PairOfFlags> read_pairs(const Pair (&table)[N]) {
    std::vector<PairOfFlags> pairs;
    for (const Pair& p : table)
        pairs.push_back({flags_in(p.flags), flags_in(p.others), p.says});
    return pairs;
}

// Check both tables: "" or the message of the first pair that is broken.
inline std::string check_pairs(const Config& c) {
    static const std::vector<PairOfFlags> needed = read_pairs(NEEDED_FLAGS);
    static const std::vector<PairOfFlags> excluded = read_pairs(EXCLUDED_FLAGS);
    for (const PairOfFlags& pair : needed) {
        if (first_on(c, pair.others)) continue;
        for (const On& on : pair.flags)
            if (was_given(c, on.flag->name) && first_on(c, {on}))
                return flag_text(c, *on.flag) + pair.says;
    }
    for (const PairOfFlags& pair : excluded) {
        const On *on = first_on(c, pair.flags), *other = on ? first_on(c, pair.others) : nullptr;
        if (!other) continue;
        std::string says = pair.says;
        size_t at = says.find('%');
        if (at != says.npos) says.replace(at, 1, flag_text(c, *other->flag));
        return flag_text(c, *on->flag) + says;
    }
    return "";
}

// The numbers up to `most` that work, behind `words`; "" if none does.
template <typename F> std::string numbers_that(F works, size_t most, const char* words) {
    std::string list;
    for (size_t d = 1; d <= most; d++)
        if (works(d)) list += concat(list.empty() ? words : ", ", d);
    return list;
}

// ----------------------------------------------------------------------------
// the shape

// Refuse a shape that no block computes.
inline std::string check_shape(const Shape& s) {
    if (s.NH % s.NKV)
        return concat("--kv-heads ", s.NKV, " does not divide --heads ", s.NH);
    if (s.embedding.position == Position::ROPE && s.HS % 2)
        return concat("RoPE turns pairs, and a head size of ", s.HS,
                      " is odd: change --heads or --channels");
    if (s.latent.kv && s.embedding.position != Position::ROPE)
        return "latent attention has RoPE in a part of each head: use --position rope";

    // Refuse parts that only another family has: groups of heads, a table of positions.
    bool no_groups = s.family == Family::GPT2 || s.family == Family::NEOX;
    if (no_groups && s.NKV != s.NH)
        return "GPT-2 has one key/value head per head: leave --kv-heads out, or use a Llama";
    if (s.family != Family::GPT2 && s.embedding.position == Position::LEARNED)
        return "Llama has no table of positions: use --position rope or alibi";
    return "";
}

// Refuse latents that a GPU cannot decode, where a run generates texts on one. Only the run knows
// what --device auto has found.
inline std::string check_latents(const Shape& s, bool gpu, bool generates) {
    if (!gpu || !generates || s.latent.kv <= MOST_LATENT)
        return "";
    return concat("latents of ", s.latent.kv, " channels: generation on a GPU takes up to ",
                  MOST_LATENT, ": give --sample-tokens 0, or --device cpu");
}

// Check what experts need, and what is not built with them.
inline std::string check_experts(const Config& c, const Shape& s) {
    const ExpertShape& e = s.experts;
    static const std::vector<On> theirs = flags_in("experts-per-token router balance z-loss "
                                                   "router-bias-rate expert-capacity etp");
    const On* on = e.E == 0 ? first_on(c, theirs) : nullptr;
    if (on)
        return flag_text(c, *on->flag) + " is for models with experts: give --experts, or a "
                                         "--model that has them";
    if (e.E == 0) return "";
    std::string flag = concat(c.upcycle ? "--upcycle " : "--experts ", e.E);

    // A bias on the router's choice belongs to sigmoids.
    if (e.choice_bias && !is_sigmoid(e.router))
        return concat("--router ", c.router, ": this model's choice has a bias, which is for "
                                             "sigmoids: leave it out");
    if (c.router_bias_rate > 0 && !e.choice_bias)
        return "--router-bias-rate is for routers whose choice has a bias, DeepSeek-V3's: leave it "
               "out";

    // GPT-2's ffn, and an ffn with biases, have no form as experts here.
    bool built = s.family == Family::MIXTRAL || s.family == Family::GPT_OSS ||
                 s.family == Family::DEEPSEEK;
    if (!built)
        return flag + ": built for Llama, Mistral and Qwen3 without biases: leave it out, or give "
                      "--model tiny-moe";

    // A token goes to different experts, and a warp of the kernel has one lane for each choice.
    if (e.K > std::min(e.E, MOST_CHOICES))
        return concat("--experts-per-token ", e.K, " of ", flag, ": at most ",
                      std::min(e.E, MOST_CHOICES));

    // Train no router by one gate that is a share. A folder may have one: transformers computes it.
    bool loaded = file_type(c.model) && !c.scratch;
    bool learns = has_steps(c) && !has_adapters(c) && !c.prefix;
    bool share = e.router == Router::RENORMALISED || e.router == Router::SIGMOID;
    if (e.K == 1 && share && (learns || !loaded))
        return concat("--experts-per-token 1: a gate that is a share of one is always 1, and "
                      "teaches the router nothing: ",
                      loaded ? "train adapters, as --lora 8" : "give --router softmax");

    // Refuse flags that would not do what they say.
    if (c.fp8 != "none")
        return concat("--fp8 ", c.fp8, " is not built with experts: give --fp8 none");
    if (c.weights != "float")
        return concat("--weights ", c.weights, " is not built with experts: give --weights float");
    return "";
}

// Tensor-parallel ranks need equal shares of heads and ffn, and of rows with --sequence-parallel.
// `ranks`: how many there are; 0: as many as the layout wants.
inline std::string check_tensor_parallel(const Config& c, const Shape& s, size_t ranks) {
    const ExpertShape& e = s.experts;
    // List the sizes that divide everything, also the number of ranks: messages below offer them.
    size_t tp = c.tp;
    auto fits = [&](size_t d) { return tp_divides(s, d) && ranks % (d * c.pp * c.cp) == 0; };
    std::string fix = numbers_that(fits, s.NH, ": try --tp ");
    if (s.NH % tp)
        return concat("--tp ", tp, " does not divide ", s.NH, " heads", fix);
    if (!e.whole && s.F % tp)
        return concat("--tp ", tp, " does not divide the ffn's ", s.F, " channels", fix);

    // A block may also have an ffn of another width, beside its experts or instead of them.
    for (size_t beside : {e.dense_F, e.shared_F})
        if (beside % tp)
            return concat("--tp ", tp, " does not divide the ", beside,
                          " channels of the ffn beside experts", fix);
    if (!tp_divides(s, tp))
        return concat("--tp ", tp, " and ", s.NKV, " key/value heads do not divide each other",
                      fix);

    // Experts are cut by all of these ranks or by none, which then route rows of their own.
    if (c.etp > 1 && c.etp != c.tp)
        return concat("--etp ", c.etp, ": experts are cut by all ranks of --tp ", tp,
                      " or by none: leave it out, or give --etp 1");
    if (has_whole_experts(c) && !c.sequence_parallel)
        return "--etp 1: ranks that hold whole experts route rows of their own: give "
               "--sequence-parallel";

    // Check the rows. The micro-batch's B and T form one dimension of rows, B*T, or B*T/cp.
    if (!c.sequence_parallel) return "";
    size_t rows = size_t(c.micro_batch) * c.seq / c.cp;
    if (rows % tp)
        return concat("--sequence-parallel: --tp ", tp, " does not divide micro-batch x seq",
                      c.cp > 1 ? " / cp" : "", " = ", rows, " rows: try --seq ",
                      round_up(c.seq, tp * (c.cp > 1 ? 2 * c.cp : 1)));
    return "";
}

// Check a hybrid's numbers: their product must be --cp, and the first must divide the heads. If
// not, offer the hybrids that work.
inline std::string check_hybrid(const Config& c, const Shape& s, const ContextChoice& choice) {
    size_t heads = size_t(choice.heads);
    bool fits = choice.heads * choice.keys == c.cp;
    if (fits && cp_divides(s, c.tp, heads))
        return "";

    // Collect the divisors of cp that work.
    const char* across = choice.method == ContextMethod::RING ? "ring" : "gather";
    std::string fix;
    for (int d = 2; d < c.cp; d++)
        if (c.cp % d == 0 && cp_divides(s, c.tp, d))
            fix += concat(fix.empty() ? "" : ", ", "ulysses:", d, ",", across, ":", c.cp / d);
    if (fix.empty()) fix = concat("--cp-method ", across);

    // Name the reason: the product, or the heads.
    if (!fits)
        return concat("--cp-method ", c.cp_method, " is of ", choice.heads * choice.keys,
                      " ranks, and --cp is ", c.cp, ": try ", fix);
    return concat("--cp-method ", c.cp_method, ": ", heads, " ranks",
                  c.tp > 1 ? concat(" x --tp ", c.tp) : "", " do not share ", s.NH, " heads and ",
                  s.NKV, " key/value heads: try ", fix);
}

// Context-parallel ranks need equal shares of each sequence. Zigzag order cuts it into
// two chunks a rank.
inline std::string check_context_parallel(const Config& c, const Shape& s) {
    ContextChoice choice;
    if (!read_context_method(c.cp_method, &choice))
        return "--cp-method wants one of gather|ulysses|ring, ulysses:U,ring:R or "
               "ulysses:U,gather:R, not '" + c.cp_method + "'";
    if (c.cp == 1 && choice.keys == 0)
        return "";
    LLMC_TRY(choice.keys ? check_hybrid(c, s, choice) : "");
    int parts = 2 * c.cp;
    if (c.seq % parts) {
        // Offer the multiple below and the one above.
        int up = int(round_up(size_t(c.seq), size_t(parts)));
        return concat("2 x --cp ", c.cp, " does not divide --seq ", c.seq, ": try --seq ",
                      up > parts ? concat(up - parts, " or ") : "", up);
    }

    // Ulysses shares out the heads that tensor parallelism left; list the sizes that work.
    if (c.cp_method == "ulysses" && !cp_divides(s, c.tp, c.cp)) {
        // Walk no further than the heads: more ranks than heads never work.
        auto fits = [&](size_t d) { return d > 1 && cp_divides(s, c.tp, d); };
        std::string fix = numbers_that(fits, s.NH, "--cp ");
        return concat("--cp-method ulysses: --cp ", c.cp, c.tp > 1 ? concat(" x --tp ", c.tp) : "",
                      " does not share ", s.NH, " heads and ", s.NKV, " key/value heads: try ",
                      fix.empty() ? "" : fix + " or ", "--cp-method gather");
    }
    return "";
}

// Expert-parallel ranks are a part of the dp x cp ranks, with --etp 1 of the dp x cp x tp ranks: ep
// must divide these and the experts.
inline std::string check_expert_parallel(const Config& c, const Shape& s) {
    const ExpertShape& e = s.experts;
    if (c.ep == 1) return "";
    if (e.E == 0)
        return concat("--ep ", c.ep, " shares out experts, and the model has none: leave it out, "
                                     "or give --model tiny-moe");

    // List the sizes that divide both.
    size_t ep = size_t(c.ep);
    size_t ranks = size_t(routing_ranks(c));
    auto fits = [&](size_t d) { return e.E % d == 0 && ranks % d == 0; };
    std::string fix = numbers_that(fits, e.E, ": try --ep ");

    // Name the reason.
    if (e.E % ep)
        return concat("--ep ", ep, " does not divide ", e.E, " experts", fix);
    if (ranks % ep)
        return concat("--ep ", ep, " does not divide the ", ranks, " ranks of --dp",
                      c.cp > 1 ? " x --cp" : "", has_whole_experts(c) ? " x --tp" : "", fix);
    return "";
}

// The axes must multiply to the number of ranks, unless --explain only describes a layout.
inline std::string check_layout(Config& c, const Shape& s, int processes) {
    if (processes > 1 && c.local_ranks > 1)
        return concat("--local-ranks ", c.local_ranks, " in each of ", processes,
                      " processes: use one of the two");

    // Check the heads first: then the number of ranks that a later message asks for is possible.
    int ranks = std::max(processes, c.local_ranks);
    LLMC_TRY(check_context_parallel(c, s));
    LLMC_TRY(check_tensor_parallel(c, s, c.explain || ranks == 1 ? 0 : size_t(ranks)));

    // --dp 0 takes what the other axes leave.
    if (c.dp == 0)
        c.dp = std::max(1, ranks / (c.tp * c.pp * c.cp));
    int wanted = rank_count(c);
    // --explain alone describes any cluster.
    bool counted = !c.explain || was_given(c, "local-ranks");
    if (wanted != ranks && counted)
        return concat("--dp ", c.dp, " x --tp ", c.tp, " x --pp ", c.pp,
                      c.cp > 1 ? concat(" x --cp ", c.cp) : "", " are ", wanted,
                      " ranks, and there are ", ranks, ": use --local-ranks ", wanted,
                      " or mpirun -np ", wanted);

    LLMC_TRY(check_expert_parallel(c, s));

    // Embedding and head count as layers, so a small model may have more stages than blocks.
    int layers = int(s.L) + 2, stages = c.pp * c.chunks;
    if (stages > layers)
        return concat("--pp ", c.pp, " x --chunks ", c.chunks, " are ", stages,
                      " stages, and the model has ", layers,
                      " layers (blocks, embedding and head): use fewer");

    for (auto [name, group] : {std::pair("--zero-group ", c.zero_group), {"--hpz ", c.hpz}})
        if (group && data_ranks(c) % group)
            return concat(name, group, " does not divide --dp ", c.dp,
                          c.cp > 1 ? concat(" x --cp ", c.cp) : "");

#if LLMC_KERNELS && !defined(WITH_NCCL)
    if (processes > 1 && c.device == "cuda")
        return concat(processes,
                      " processes with --device cuda: this program is built without NCCL: install "
                      "libnccl-dev and make again, or use --device cpu");
#endif
    return "";
}

// Check that a batch is whole micro-batches on every rank. --batch-tokens 0 becomes one of each.
inline std::string check_batch(Config& c, const Shape& s) {
    // Accumulate whole micro-batches only: a part of one would need a plan of its own.
    int64_t step_tokens = int64_t(c.micro_batch) * c.seq * c.dp;
    if (c.batch_tokens == 0) c.batch_tokens = step_tokens;
    size_t positions = s.P - size_t(c.prefix); // the text begins behind the prefix
    if (size_t(c.seq) > positions)
        return concat("--seq ", c.seq, " is beyond the model's ", positions, " positions",
                      c.prefix ? " behind the prefix" : "", ": use --seq ", positions, " or less");
    if (c.batch_tokens % step_tokens == 0) return "";

    // Offer the multiple below and the one above; below the first there is none.
    int64_t down = c.batch_tokens / step_tokens * step_tokens;
    int64_t up = down + step_tokens;
    std::string wrong = concat(
        "--batch-tokens ", c.batch_tokens, " is no multiple of micro-batch x seq x dp = ",
        c.micro_batch, " x ", c.seq, " x ", c.dp, " = ", step_tokens, ": try ",
        down ? concat(down, " or ") : "", up);

    // A smaller micro-batch may leave the batch as it is.
    int64_t sequences = c.batch_tokens / c.seq / c.dp;
    int64_t micro = std::gcd(sequences, int64_t(c.micro_batch));
    bool fits = c.batch_tokens == sequences * c.seq * c.dp && sequences > 0;
    return fits ? concat(wrong, ", or --micro-batch ", micro) : wrong;
}

// Check what conversations, pairs and sampled answers need, and fill in the numbers that are left
// to the program.
inline std::string check_loss(Config& c) {
    const std::string flag = "--loss " + c.loss;
    bool sampled = c.loss == "grpo";
    if (!has_conversations(c)) return "";

    // Fill in TRL's numbers; for SimPO, those of its paper. Sampled answers need no reference.
    if (c.beta == 0 && !sampled) c.beta = c.loss == "simpo" ? 2 : 0.1;
    if (c.gamma < 0) c.gamma = 0.5;

    // Check the data, and whether a sequence stays whole.
    if (c.documents != "stream")
        return flag + " packs whole conversations, and none sees another: leave --documents out";
    if (c.data.empty() && (c.steps > 0 || c.eval))
        return flag + (c.loss == "kto" ? " learns from answers with a label" :
                       has_pairs(c) ? " trains to prefer one answer" :
                       sampled ? " answers prompts" : " trains the answers of conversations") +
               ": give --data FILE.jsonl";
    return "";
}

// Check what compares the policy of sampled answers with the first one: there must be a whole copy
// of its weights, without casts and chunks elsewhere.
inline std::string check_policies(const Config& c) {
    if (!keeps_start(c)) return "";
    if (c.fp8 != "none")
        return concat("--beta ", c.beta, " is not built with --fp8: give --fp8 none");
    if (offloads(c, "weights"))
        return concat("--beta ", c.beta, " is not built with --offload weights: leave one out");
    return "";
}

// Whether a name is that of a verifier (tune/rewards.h).
inline bool is_verifier(const std::string& name) {
    return name == "exact" || name == "number" || name == "regex";
}

// The program of --reward command:PROGRAM, or "" for a verifier (tune/reward_command.h).
inline std::string reward_program(const std::string& reward) {
    const std::string prefix = "command:";
    return reward.starts_with(prefix) ? reward.substr(prefix.size()) : "";
}

// Check where rewards come from: a verifier, or a program that other ranks wait for.
inline std::string check_reward(const Config& c) {
    const std::string names = "exact, number, regex or command:PROGRAM";
    if (c.reward.empty())
        return "--loss grpo learns from rewards: give --reward " + names;
    std::string program = reward_program(c.reward);
    bool words = program.find_first_not_of(" \t\n") != program.npos;
    if (!is_verifier(c.reward) && !words)
        return "--reward " + c.reward + " names no verifier: give " + names;

    // Run no program that a checkpoint or a file of flags names: somebody else may have made it.
    if (words && c.reward != c.typed_reward)
        return "--reward '" + printable(c.reward) + "' comes from a file, and no program is run "
               "unasked: to run it, give this flag on the command line";

    // Refuse a time that has no use, or that the watchdog would not wait.
    if (was_given(c, "reward-seconds") && !words)
        return concat("--reward-seconds ", c.reward_seconds, " is of a program: give --reward "
                      "command:PROGRAM");
    bool waits = words && rank_count(c) > 1 && c.watchdog > 0;
    if (waits && c.reward_seconds >= c.watchdog)
        return concat("--reward-seconds ", c.reward_seconds, " is not below --watchdog ",
                      c.watchdog, ", which ends a run whose ranks wait so long: raise --watchdog");
    return "";
}

// Check sampled answers: they need rewards, and a batch of whole groups.
inline std::string check_rollouts(const Config& c) {
    if (!has_rollouts(c)) return "";
    LLMC_TRY(check_reward(c));
    LLMC_TRY(check_policies(c));

    // Check that a step holds whole groups.
    int64_t answers = c.batch_tokens / c.seq, once = int64_t(c.micro_batch) * c.dp;
    if (answers % c.group == 0) return "";
    // Offer the next larger batch of whole groups.
    int64_t fits = std::lcm(int64_t(c.group), once);
    return concat("--group ", c.group, " does not divide the ", answers, " sequences of a step: "
                  "try --batch-tokens ", (answers + fits - 1) / fits * fits * c.seq);
}

// Check a prefix of trained keys and values, of --prefix or of the folder --adapter: what is not
// built beside one.
inline std::string check_prefix(const Config& c, const Shape& s) {
    if (!c.prefix) return "";
    bool made = was_given(c, "prefix") || c.adapter.empty();
    std::string flag = made ? concat("--prefix ", c.prefix) : "--adapter " + c.adapter;
    if (made && !c.adapter.empty())
        return concat(flag, " is prefix tuning, and --adapter ", c.adapter, " is for other "
                      "adapters: leave one of them out");

    // Refuse what would read the prefix as text, or cannot hold it.
    if (s.embedding.position == Position::ALIBI)
        return flag + ": trained keys have no position, which --position alibi needs: leave one "
                      "of them out";
    if (size_t(c.prefix) >= s.P)
        return concat(flag, " leaves none of the model's ", s.P, " positions for text: use fewer");
    if (c.merge || c.export_dir.ends_with(".gguf"))
        return flag + ": a prefix is part of no matrix: give --export a folder, without --merge";

    // Refuse what is not built: a backward pass in halves.
    bool whole = c.pipeline == "gpipe" || c.pipeline == "1f1b" || c.pipeline == "interleaved";
    if (!whole)
        return concat(flag, " is not built with --pipeline ", c.pipeline,
                      ": give gpipe, 1f1b or interleaved");

    // A new prefix changes the outputs, so the first weights are no reference of the base.
    if (!keeps_start(c)) return "";
    return flag + ": --beta compares with the base, which a prefix changes from the start: give "
                  "--lora RANK";
}

// Check which models may have adapters, and what is not built beside them.
inline std::string check_lora(Config& c, const Shape& s) {
    if (!has_adapters(c)) return "";
    LLMC_TRY(check_prefix(c, s));
    std::string folders = c.adapter.empty() ? "--adapters " + c.adapters : "--adapter " + c.adapter;
    std::string flag = c.lora ? concat("--lora ", c.lora) : folders;
    if (c.prefix && c.adapter.empty()) flag = concat("--prefix ", c.prefix);
    // Fill in what follows from the rank. No decay by default: it would draw adapters to the base.
    if (c.lora_alpha == 0) c.lora_alpha = 2 * c.lora;
    if (!was_given(c, "weight-decay")) c.weight_decay = 0;

    // Refuse families whose files join matrices or mix their rows, and a prefix before latents.
    if (s.family == Family::NEOX || s.hf_type == "phi3")
        return concat(flag, " is built for GPT-2, Llama and their kin with experts, not for ",
                      s.hf_type, ": leave it out");
    if (c.prefix && s.latent.kv)
        return concat(flag, " gives keys and values of heads, and ", s.hf_type,
                      " has latents: give --lora RANK");

    // Refuse exports that cannot hold adapters.
    if (c.export_dir.ends_with(".bin"))
        return flag + ": --export " + c.export_dir + " has no place for adapters: give a folder";
    if (c.export_dir.ends_with(".gguf") && !c.merge)
        return flag + ": --export " + c.export_dir + " has no place for adapters: give a folder, "
               "or --merge";
    return "";
}

// Check frozen weights, which are stored in narrow types and only read: they are no longer exactly
// the weights that were loaded.
inline std::string check_frozen(const Config& c) {
    if (c.weights == "float") return "";
    std::string flag = "--weights " + c.weights;
    if (!c.export_dir.empty() && (c.merge || !has_adapters(c)))
        return flag + " has lost what --export writes: give --weights float";
    if (c.zero && !has_adapters(c))
        return concat(flag, " without adapters has nothing that --zero ", c.zero, " cuts: leave it "
                      "out");
    return "";
}

// Split --buddy FOLDER:STEPS: "" or what is wrong.
inline std::string split_buddy(Config& c) {
    if (c.buddy.empty() || c.buddy_every) return "";
    double steps = 0;
    size_t colon = c.buddy.rfind(':');
    std::string number = colon == c.buddy.npos ? "" : c.buddy.substr(colon + 1);
    if (!parse_number(number, 1, 1e12, true, &steps).empty())
        return concat("--buddy ", c.buddy, " wants the steps between saves in memory: give "
                      "FOLDER:STEPS, as /dev/shm/NAME:10");
    c.buddy_every = int64_t(steps);
    c.buddy.resize(colon);
    return "";
}

// Check --timeline: the kind of file, and whether there is what it draws.
inline std::string check_timeline(const Config& c) {
    if (c.timeline.empty()) return "";
    std::string flag = "--timeline " + c.timeline;
    bool drawn = c.timeline.ends_with(".svg") || c.timeline.ends_with(".json");
    bool named = c.timeline.size() > (c.timeline.ends_with(".json") ? 5 : 4);
    if (!named || (!drawn && !writes_profile(c)))
        return flag + ": FILE.svg, FILE.json or FILE.txt";
    if (writes_profile(c) && !has_training(c))
        return flag + " times the actions of steps, and this run has none";
    if (c.explain && c.plan == "auto")
        return "--timeline draws the step of one layout: give it with the command that --plan auto "
               "prints";
    return "";
}

// Check what is left: numbers that do not fit each other, and files.
inline std::string check_together(Config& c) {
    SaveRule rule;
    LLMC_TRY(check_frozen(c));
    LLMC_TRY(check_optimizer(c));
    LLMC_TRY(read_save_rule(c, &rule));
    LLMC_TRY(split_buddy(c));
    LLMC_TRY(check_timeline(c));

    int read = 0, newest = 0;
    sscanf(c.keep.c_str(), "%7d%n,best%n", &newest, &read, &read);
    if (newest < 1 || size_t(read) != c.keep.size())
        return "--keep " + printable(c.keep) + " is neither a number, as 3, nor with best, as "
               "3,best";
    if (c.use_ema && !c.resume && c.start.empty())
        return "--use-ema reads the mean that a run with --ema has saved: give its --out DIR, and "
               "--resume, or that folder to convert_gpt";
    if (c.min_lr > c.lr)
        return concat("--min-lr ", c.min_lr, " is above --lr ", c.lr);
    if (c.recompute == "auto" && c.explain && c.memory == 0)
        return "--recompute auto fits the memory of a machine, and --explain may speak of another: "
               "give --memory GiB";
    if (c.export_dtype == "q8_0" && !c.export_dir.ends_with(".gguf"))
        return "--export-dtype q8_0 is llama.cpp's: convert_gpt IN FILE.gguf writes it, or give "
               "another type";
    return "";
}

// Refuse a flag that asks for a step's time where there is no step, or no limit bounds it.
inline std::string refuse_timing(const Config& c, const std::string& flag) {
    if (!has_steps(c)) return flag + " is for training, and there are no steps";
    if (!has_open_answers(c)) return "";
    return flag + ": the time of --loss grpo without --answer-tokens is not known: give that too";
}

// Check --plan, which chooses the layout: in a run no flag may choose another part of it.
inline std::string check_planning(const Config& c) {
    if (c.plan == "none") return "";

    // Refuse a flag that the plan chooses: one of the two would have no effect.
    for (const char* name : planned_flags())
        if (was_given(c, name) && !c.explain)
            return concat("--plan auto chooses --", name,
                          ": leave one of them out, or look at both with --explain");
    if (was_given(c, "micro-batch") && was_given(c, "batch-tokens") && !c.explain)
        return "--plan auto chooses --micro-batch where --batch-tokens says the batch: leave one "
               "of them out";

    const auto& known = PIPELINE_NAMES;
    if (std::find(known.begin(), known.end(), c.pipeline) == known.end())
        return concat("--plan auto looks at no schedule from a file: leave --pipeline ",
                      c.pipeline, " out");
    return refuse_timing(c, "--plan auto");
}

// The rows that a name may mean: its own in small letters, those that begin with it, or the nearest
// one; "" if none is near.
inline std::string machines_like(std::string name) {
    for (char& letter : name)
        letter = char(tolower(letter));
    if (machine_row(name)) return name;
    std::vector<std::string> all;
    std::string begun;
    for (const Machine& m : machines()) {
        all.push_back(m.name);
        if (m.name.starts_with(name)) begun += (begun.empty() ? "" : " or ") + m.name;
    }
    return begun.empty() ? nearest(name, all) : begun;
}

// Check --machine. It is simulated, and the time of some flags is not.
inline std::string check_machine(const Config& c) {
    if (c.machine.empty()) return "";
    Machine machine;
    std::string wrong = machine_named(&machine, c.machine), like = machines_like(c.machine);
    bool missing = !wrong.empty() && !file_type(c.machine) && !like.empty();
    if (missing) wrong += concat("; did you mean ", like, "?");
    if (!wrong.empty()) return wrong;

    // Its rates are wanted where moves of activations are weighed against recomputation, also if
    // the step is not timed.
    bool weighed = c.recompute == "auto" && offloads(c, "activations");
    return weighed ? "" : refuse_timing(c, "--machine " + c.machine);
}

// Check --fit, which asks about one card: it chooses the flags of memory itself.
inline std::string check_fit(const Config& c) {
    if (c.fit.empty())
        return "--fit wants a card: GB of its memory, as 24, or a machine's name, as h100";

    std::vector<const char*> chosen = planned_flags();
    for (const char* name : {"etp", "micro-batch", "lora", "adapter", "weights", "offload",
                             "offload-to", "masters", "states", "plan", "gpus", "local-ranks"})
        chosen.push_back(name);
    for (const char* name : chosen)
        if (was_given(c, name))
            return concat("--fit chooses flags for one card, --", name, " among them: leave --",
                          name, " out, or ask --plan auto for several cards");

    if (was_given(c, "precision") && c.precision != "bf16")
        return concat("--fit answers for bf16: leave --precision ", c.precision,
                      " out, or ask --plan auto --gpus 1 --machine NAME --explain");
    return refuse_timing(c, "--fit");
}

// Check what is not built with residual scalars: the stream behind the embedding stays in place.
inline std::string check_scalars(const Config& c, const Shape& s) {
    if (!s.block.scalars) return "";
    std::string every = ": every block of " + s.hf_type + " reads the embedding: ";
    if (c.pp > 1)
        return concat("--pp ", c.pp, every, "give --pp 1, and --tp or --zero 3 instead");
    bool moves = offloads(c, "activations");
    return moves ? "--offload activations" + every + "give --recompute full instead" : "";
}

// Check everything, and fill in what the user left to the program. processes: of the MPI job, or 1.
inline std::string config_check(Config& c, Shape s, int processes = 1) {
    // The planner has one shape for many layouts: whether experts are whole is up to the flags. One
    // rank shares weights with nobody.
    if (c.hpz == 1) c.hpz = 0;
    if (!c.tasks.empty() && c.steps == 0)
        c.eval = true;
    s.experts.whole = s.experts.E && has_whole_experts(c);

    // First check what needs no other number: later messages then speak of a possible shape.
    if (c.device == "cuda" && !LLMC_KERNELS)
        return "--device cuda: this program is built without kernels: make DEVICE=cuda, or use "
               "--device cpu";
    LLMC_TRY(check_pairs(c));
    LLMC_TRY(check_shape(s));
    LLMC_TRY(check_experts(c, s));
    LLMC_TRY(check_lora(c, s));
    LLMC_TRY(check_loss(c));

    // Fill in the defaults that depend on the shape or on another flag.
    if (c.seq == 0)
        c.seq = int(std::min(s.P - size_t(c.prefix), size_t(256)));
    if (c.min_lr < 0) c.min_lr = c.lr / 10;

    // Check the layout before the batch: the batch counts the ranks that --dp 0 becomes.
    LLMC_TRY(check_layout(c, s, processes));
    LLMC_TRY(check_scalars(c, s));
    LLMC_TRY(check_batch(c, s));
    LLMC_TRY(check_rollouts(c));
    LLMC_TRY(check_machine(c));
    LLMC_TRY(check_planning(c));
    return check_together(c);
}

// Whether the flags ask for steps beside a teacher.
inline bool wants_teacher(const Config& c) {
    return c.loss == "distill" && has_steps(c);
}
// Check that a teacher of shape `s` can lie in this layout and read these sequences beside a
// model: "" or why not.
inline std::string check_teacher(const Config& c, const Shape& model, const Shape& s) {
    const std::string flag = "--teacher " + printable(c.teacher);

    // Both models read the same tokens.
    if (s.V != model.V)
        return concat(flag, " has ", s.V, " tokens, and ", c.model, " ", model.V,
                      ": give a teacher with the model's vocabulary");
    if (s.experts.E)
        return flag + " has experts, and a teacher with experts is not built: give a dense one";
    if (size_t(c.seq) > s.P)
        return concat(flag, " has ", s.P, " positions: give --seq ", s.P, " or less");

    // Both models' heads and layers are shared out over the same ranks.
    if (!tp_divides(s, size_t(c.tp)))
        return concat(flag, " cannot share its heads over --tp ", c.tp, ": give a smaller one");
    if (size_t(c.pp * c.chunks) > s.L)
        return concat(flag, " has ", s.L, " layers for ", c.pp * c.chunks, " stages: give fewer");
    return "";
}

// Check flags, and the teacher that they name: "" or what is wrong. Fills in what flags leave out.
inline std::string check_with_teacher(Config& c, const Shape& model, const Shape& teacher) {
    LLMC_TRY(config_check(c, model));
    return wants_teacher(c) ? check_teacher(c, model, teacher) : "";
}

// ----------------------------------------------------------------------------
// flags that do nothing are refused or noted, once config_check() has filled in defaults
//   Only flags that the user gave are noted. A refusal is a text; "" refuses nothing.

// Take TRL's defaults for flags that were not given: fine-tuning wants smaller steps than training
// from scratch. Returns a line that names them, or "" if none is taken.
inline std::string take_loss_defaults(Config& c) {
    std::string taken;
    if (c.loss == "lm" || c.loss == "distill")
        return taken;
    // Adapters take ten times the learning rate of full fine-tuning, as TRL's pages on LoRA advise.
    if (!was_given(c, "lr")) {
        bool gentle = objective_of(c).rows();
        c.lr = (gentle ? 1e-6 : 2e-5) * (has_adapters(c) ? 10 : 1);
        taken += concat(" --lr ", gentle ? "1e-0" : "2e-0", (gentle ? 6 : 5) - has_adapters(c));
    }
    if (!was_given(c, "weight-decay")) {
        c.weight_decay = 0;
        taken += " --weight-decay 0";
    }
    return taken.empty() ? "" : "--loss " + c.loss + " takes TRL's defaults:" + taken;
}

// Refuse an offload that is not built, or has nothing to move.
inline std::string refuse_idle_offload(const Config& c) {
    // Name the unknown word, not the whole list.
    const std::string known = ",none,optimizer,update,activations,weights,gradients,";
    std::istringstream words(c.offload);
    for (std::string word; std::getline(words, word, ',');)
        if (known.find("," + word + ",") == known.npos)
            return concat("--offload ", printable(word),
                          ": give some of optimizer,activations,weights,gradients");
    if (offloads(c, "gradients") && c.optimizer.starts_with("muon"))
        return "--optimizer muon needs whole gradients on the device: leave gradients out of "
               "--offload, and give --zero 3 where they do not fit";
    if (offloads(c, "update") && !offloads(c, "optimizer"))
        return "--offload update: masters and moments lie on the device: give --offload "
               "optimizer,update";
    if (offloads(c, "optimizer") && c.optimizer == "sgd" && c.precision == "fp32")
        return "--offload optimizer: --optimizer sgd in fp32 has neither masters nor moments: "
               "leave it out";
    return "";
}

// Refuse flags that do nothing at all: a draft model on several ranks, a run without any work.
inline std::string refuse_idle_flags(const Config& c) {
    if (!c.draft.empty() && rank_count(c) > 1)
        return concat("--draft ", c.draft, " guesses in one process, and this run has ",
                      rank_count(c), " ranks: leave it out, or generate with one");
    bool idle = c.steps == 0 && !c.eval && c.sample_tokens == 0 && c.export_dir.empty();
    if (idle && !c.explain)
        return "--steps 0 and --sample-tokens 0 leave nothing to do: give --steps, --eval or "
               "--export";
    return refuse_idle_offload(c);
}

// Note the flags that were given and change nothing, one line each.
inline std::vector<std::string> config_notes(const Config& c) {
    // A flag, whether it can work in this run, and the flag or condition it needs.
    struct Pair {
        const char* name;
        bool works;
        const char* wants;
    };
    bool elsewhere = c.offload != "none", away = offloads(c, "weights");
    bool trains = has_steps(c);
    bool texts = !c.prompts.empty() || has_rollouts(c);
    bool shards = c.zero > 0, draws = c.temperature > 0, samples = c.sample_tokens > 0;
    // Ranks share parameters: data-parallel ones do, and tensor-parallel ones whole experts.
    bool shares = data_ranks(c) > 1 || routing_ranks(c) > c.ep;
    // clang-format off
    const Pair pairs[] = {
        {"offload",       trains || away,            "steps of training"},
        {"ema",           !c.out.empty(),            "--out, where checkpoints hold the mean"},
        {"keep",          !c.out.empty(),            "--out"},
        {"export-dtype",  !c.export_dir.empty(),     "--export"},
        {"export",        !c.eval,                   "a run that goes on where --eval leaves"},
        {"expect",        !has_rollouts(c),          "a validation loss"},
        {"zero-group",    shards,                    "--zero"},
        {"hpz",           shards,                    "--zero 3"},
        {"cp-method",     c.cp > 1,                  "--cp"},
        {"ep-method",     c.ep > 1,                  "--ep"},
        {"gradients",     shares,                    "data-parallel ranks"},
        {"offload-to",    elsewhere,                 "--offload"},
        {"min-lr",        c.schedule != "constant",  "a schedule that falls"},
        {"top-k",         draws,                     "a --temperature above 0"},
        {"top-p",         draws,                     "a --temperature above 0"},
        {"completions",   !c.prompts.empty(),        "--prompts"},
        {"draft-tokens",  !c.draft.empty(),          "--draft"},
        {"slots",         texts,                     "--prompts or --loss grpo"},
        {"prompt",        samples,                   "--sample-tokens"},
        {"sample-every",  samples,                   "--sample-tokens"},
        {"loss",          trains || c.eval,          "steps of training"},
        {"graphs",        trains || c.eval,          "steps of training"},
    };
    // clang-format on
    std::vector<std::string> notes;
    for (const Pair& p : pairs)
        if (was_given(c, p.name) && !p.works)
            notes.push_back(concat("--", p.name, " does nothing without ", p.wants));

    // Note what a signal would lose.
    if (trains && c.out.empty() && !c.explain)
        notes.push_back(concat("no --out: nothing is saved",
                               c.export_dir.empty() ? "" : " before --export at the end",
                               ", and a signal or a crash loses every step"));

    // Note numbers that fit their own ranges but not each other.
    size_t block = c.fp8 == "block" ? FP8_BLOCK : c.fp8 == "mx" ? MX_BLOCK : 1;
    if (c.fp8 == "nvfp4") block = NVFP4_BLOCK;
    if (c.seq % block)
        notes.push_back(concat("--fp8 ", c.fp8, ": blocks of ", block, " tokens hold several ",
                               "sequences: --seq ", c.seq, " lets --micro-batch change results"));
    if (shards && !shares)
        notes.push_back(
            concat("--zero ", c.zero, " shards nothing: there is one data-parallel rank"));
    if (was_given(c, "warmup") && c.steps > 0 && c.warmup >= c.steps)
        notes.push_back(concat("--warmup ", c.warmup, " is all of --steps ", c.steps,
                               ": the learning rate never reaches --lr"));

    // Rates are those of the precision in which they were measured; bf16 stands for fp16.
    Machine machine;
    bool named = !c.machine.empty() && machine_named(&machine, c.machine).empty();
    std::string measured = named ? machine.precision : "";
    std::string wanted = c.precision == "fp16" ? "bf16" : c.precision;
    if (!measured.empty() && measured != wanted)
        notes.push_back(concat("--machine ", c.machine, " was measured in ", measured,
                               ", and this run computes in ", c.precision,
                               ": measure with --calibrate FILE --precision ", wanted));
    return notes;
}

} // namespace llmc
