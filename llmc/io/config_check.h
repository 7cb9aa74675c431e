// config_check.h - what only several flags and a shape together can get wrong, refused before a run
//   Each function checks one subject: the shape, a way to be parallel, what an option needs. Its
//   message has both numbers and a fix. config_check() calls them in turn, once, before anything is
//   allocated. It fills in what the user left to the program as it goes, so that later checks can
//   rely on it. A function that returns a text returns "" or what is wrong.
#pragma once
#include <numeric>
#include "../context_parallel.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/latent.cuh"
#include "../ops/moe.cuh"
#include "../ops/types.h"
#include "machine.h"
#include "../presets.h"
#include "../tensor_parallel.h"
#include "../text.h"
#include "config.h"

namespace llmc {

// ----------------------------------------------------------------------------
// the shape

// The presets' names: "tiny, tiny-llama, gpt2, ..."
inline std::string preset_names() {
    std::string names;
    for (const Preset& p : model_presets())
        names += concat(names.empty() ? "" : ", ", p.name);
    return names;
}

// Change the shape of a preset or a folder as the flags say.
inline std::string override_shape(const Config& c, Shape& s) {
    // Refuse sizes that latent attention derives from others, for which there are no flags.
    if (s.kv_latent && (c.heads || c.channels || c.kv_heads))
        return "--heads, --kv-heads and --channels are not built with latent attention: leave them "
               "out, or give a folder with --scratch";

    // Without --kv-heads, a model with one key/value head per head keeps that.
    if (c.heads && !c.kv_heads && s.NKV == s.NH)
        s.NKV = c.heads;
    if (c.kv_heads) s.NKV = c.kv_heads;
    if (c.heads) s.NH = c.heads;

    // Without --ffn, the feed-forward layer keeps its ratio to the channels.
    if (c.channels && !c.ffn)
        s.F = s.F * c.channels / s.C;
    if (c.channels) s.C = c.channels;
    if (c.ffn) s.F = c.ffn;
    if (s.kv_latent && s.E == 0) s.dense_F = s.F; // blocks without experts

    // Put experts in the place of the ffn. This works for the Llamas whose blocks equal Mixtral's
    // in all but the ffn.
    const char* plain[] = {"llama", "mistral", "qwen3"};
    bool can = std::count(std::begin(plain), std::end(plain), s.hf_type) > 0;
    // --upcycle counts the experts that a dense folder's ffn is copied into, --experts new ones.
    size_t experts = size_t(c.experts + c.upcycle);
    if (c.upcycle && s.E)
        return concat("--upcycle ", c.upcycle, ": the model has experts already: leave it out");
    if (experts && can && !s.qkv_bias && !s.o_bias && !s.mlp_bias) {
        s.family = Family::MIXTRAL;
        s.hf_type = s.qk_norm ? "qwen3_moe" : "mixtral";
        s.K = 2;
    }

    // Let the flags choose experts and router.
    if (experts) s.E = experts;
    if (c.experts_per_token) s.K = c.experts_per_token;
    if (c.router == "softmax") s.router = Router::SOFTMAX;
    if (c.router == "renormalised")
        s.router = Router::RENORMALISED;
    if (c.router == "sigmoid") s.router = Router::SIGMOID;

    // Balance the router only if there is one.
    s.balance = s.E ? c.balance : 0;
    s.z_loss = s.E ? c.z_loss : 0;
    s.capacity.factor = s.E ? c.expert_capacity : 0;
    s.whole_experts = s.E && has_whole_experts(c);

    // Take the remaining flags as they are.
    if (c.layers) s.L = c.layers;
    if (c.vocab) s.V = c.vocab;
    if (c.position == "learned") s.position = Position::LEARNED;
    if (c.position == "rope") s.position = Position::ROPE;
    if (c.position == "alibi") s.position = Position::ALIBI;

    // The head size follows from heads and channels if either has changed.
    if (!c.heads && !c.channels) return "";
    if (s.C % s.NH) {
        // Offer the divisors of the channels that lie within 8 of the wanted number of heads.
        std::string fix;
        for (size_t d = 1; d <= s.C; d++)
            if (s.C % d == 0 && d + 8 > s.NH && d < s.NH + 8)
                fix += concat(" ", d);
        if (!fix.empty()) fix = ": heads that do, near it:" + fix;
        return concat("--heads ", s.NH, " does not divide --channels ", s.C, fix);
    }
    size_t before = s.HS;
    s.HS = s.C / s.NH;

    // RoPE may turn only a part of each head; keep its share. 0 means the whole head.
    if (s.rotary == 0) return "";
    s.rotary = s.rotary * s.HS / before;
    if (s.rotary > 0 && s.rotary % 2 == 0)
        return "";
    return concat("RoPE turns pairs of a part of each head, and of a head size of ", s.HS,
                  " that part is ", s.rotary, ": change --heads or --channels");
}

// Refuse a device that this program was not built for.
inline std::string check_device(const Config& c) {
    if (c.device == "cuda" && !LLMC_KERNELS)
        return "--device cuda: this program is built without kernels: make DEVICE=cuda, or use "
               "--device cpu";
    return "";
}

// Refuse new tokens in runs where their rows could not be drawn, or could not learn.
inline std::string check_new_tokens(const Config& c) {
    const std::string flag = "--add-tokens " + c.add_tokens;
    if (c.add_tokens.empty()) return "";
    if (has_adapters(c))
        return flag + ": adapters leave the tables as they are, and new rows would not learn: "
                      "--export them with --steps 0 first, or train without adapters";
    if (c.weights != "float")
        return concat(flag, ": is not built with --weights ", c.weights, ": give --weights float");
    if (c.upcycle)
        return concat(flag, ": is not built with --upcycle ", c.upcycle,
                      ": --export the tokens with --steps 0 first");
    return "";
}

// Refuse a shape that no block computes.
inline std::string check_shape(const Shape& s) {
    if (s.NH % s.NKV)
        return concat("--kv-heads ", s.NKV, " does not divide --heads ", s.NH);
    if (s.position == Position::ROPE && s.HS % 2)
        return concat("RoPE turns pairs, and a head size of ", s.HS,
                      " is odd: change --heads or --channels");
    if (s.kv_latent && s.position != Position::ROPE)
        return "latent attention has RoPE in a part of each head: use --position rope";

    // Refuse parts that only another family has: groups of heads, a table of positions.
    bool no_groups = s.family == Family::GPT2 || s.family == Family::NEOX;
    if (no_groups && s.NKV != s.NH)
        return "GPT-2 has one key/value head per head: leave --kv-heads out, or use a Llama";
    if (s.family != Family::GPT2 && s.position == Position::LEARNED)
        return "Llama has no table of positions: use --position rope or alibi";
    return "";
}

// Refuse a capacity of experts where sequences are cut, or answers are sampled without drops.
inline std::string check_expert_capacity(const Config& c) {
    std::string flag = concat("--expert-capacity ", c.expert_capacity);
    if (c.expert_capacity == 0) return "";
    if (c.cp > 1)
        return concat(flag, " counts the tokens of whole sequences, which --cp ", c.cp,
                      " cuts: leave one of them out");
    if (has_rollouts(c))
        return flag + " drops choices that generation keeps, so --loss grpo would train another "
                      "policy than the one that it samples: leave it out";
    return "";
}

// Refuse latents that a GPU cannot decode, where a run generates texts on one. Only the run knows
// what --device auto has found.
inline std::string check_latents(const Shape& s, bool gpu, bool generates) {
    if (!gpu || !generates || s.kv_latent <= MOST_LATENT)
        return "";
    return concat("latents of ", s.kv_latent, " channels: generation on a GPU takes up to ",
                  MOST_LATENT, ": give --sample-tokens 0, or --device cpu");
}

// Check what experts need, and what is not built with them.
inline std::string check_experts(const Config& c, const Shape& s) {
    // --etp 0 asks for nothing: a supervisor gives it to be rid of a 1.
    auto asks = [&](std::string name) { return name == "etp" ? c.etp > 0 : was_given(c, name); };
    for (const char* name :
         {"experts-per-token", "router", "balance", "z-loss", "router-bias-rate",
          "expert-capacity", "etp"})
        if (s.E == 0 && asks(name))
            return concat("--", name, " is for models with experts: give --experts, or a --model "
                                      "that has them");
    if (s.E == 0) return "";

    // Upcycling: the gated copies of the ffn must add up to the ffn.
    std::string flag = concat(c.upcycle ? "--upcycle " : "--experts ", s.E);
    if (c.upcycle && (c.experts || c.scratch))
        return flag + " copies a folder's ffn: leave --experts and --scratch out";
    if (c.upcycle && s.router == Router::SOFTMAX)
        return flag + ": gates of --router softmax sum to less than 1, and copies of the ffn to "
                      "less than the ffn: give --router renormalised";

    // A bias on the router's choice: it belongs to sigmoids, and its steps are lost
    // in 16 bits alone.
    if (s.choice_bias && !is_sigmoid(s.router))
        return concat("--router ", c.router, ": this model's choice has a bias, which is for "
                                             "sigmoids: leave it out");
    if (c.router_bias_rate > 0 && !s.choice_bias)
        return "--router-bias-rate is for routers whose choice has a bias, DeepSeek-V3's: leave it "
               "out";
    if (c.router_bias_rate > 0 && c.masters == "none")
        return "--router-bias-rate moves by less than --masters none can hold: give --masters "
               "float";

    // GPT-2's ffn, and an ffn with biases, have no form as experts here.
    bool built = s.family == Family::MIXTRAL || s.family == Family::GPT_OSS ||
                 s.family == Family::DEEPSEEK;
    if (!built)
        return flag + ": built for Llama, Mistral and Qwen3 without biases: leave it out, or give "
                      "--model tiny-moe";

    // A token goes to different experts, and a warp of the kernel has one lane for each choice.
    if (s.K > std::min(s.E, MOST_CHOICES))
        return concat("--experts-per-token ", s.K, " of ", flag, ": at most ",
                      std::min(s.E, MOST_CHOICES));

    // Train no router by one gate that is a share. A folder may have one: transformers computes it.
    bool loaded = ::access(c.model.c_str(), F_OK) == 0 && !c.scratch;
    bool learns = c.steps > 0 && !c.eval && !has_adapters(c) && !c.prefix;
    bool share = s.router == Router::RENORMALISED || s.router == Router::SIGMOID;
    if (s.K == 1 && share && (learns || !loaded))
        return concat("--experts-per-token 1: a gate that is a share of one is always 1, and "
                      "teaches the router nothing: ",
                      loaded ? "train adapters, as --lora 8" : "give --router softmax");

    // Refuse flags that would not do what they say.
    if (c.fp8 != "none")
        return concat("--fp8 ", c.fp8, " is not built with experts: give --fp8 none");
    if (c.weights != "float")
        return concat("--weights ", c.weights, " is not built with experts: give --weights float");
    return check_expert_capacity(c);
}

// Tensor-parallel ranks need equal shares of heads and ffn, and of rows with --sequence-parallel.
// `ranks`: how many there are; 0: as many as the layout wants.
inline std::string check_tensor_parallel(const Config& c, const Shape& s, size_t ranks) {
    // List the sizes that divide everything, also the number of ranks: messages below offer them.
    size_t tp = c.tp;
    std::string fix;
    for (size_t d = 1; d <= s.NH; d++)
        if (tp_divides(s, d) && ranks % (d * c.pp * c.cp) == 0)
            fix += concat(fix.empty() ? ": try --tp " : ", ", d);
    if (s.NH % tp)
        return concat("--tp ", tp, " does not divide ", s.NH, " heads", fix);
    if (!s.whole_experts && s.F % tp)
        return concat("--tp ", tp, " does not divide the ffn's ", s.F, " channels", fix);

    // A block may also have an ffn of another width, beside its experts or instead of them.
    for (size_t beside : {s.dense_F, s.shared_F})
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
    if (tp == 1)
        return "--sequence-parallel shares rows among tensor-parallel ranks: give --tp";
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
    if (std::string wrong = choice.keys ? check_hybrid(c, s, choice) : ""; !wrong.empty())
        return wrong;
    bool zigzag = c.cp_order == "zigzag";
    int parts = zigzag ? 2 * c.cp : c.cp;
    if (c.seq % parts) {
        // Offer the multiple below and the one above.
        int up = int(round_up(size_t(c.seq), size_t(parts)));
        return concat(zigzag ? "2 x " : "", "--cp ", c.cp, " does not divide --seq ", c.seq,
                      ": try --seq ", up > parts ? concat(up - parts, " or ") : "", up);
    }

    // Ulysses shares out the heads that tensor parallelism left; list the sizes that work.
    if (c.cp_method == "ulysses" && !cp_divides(s, c.tp, c.cp)) {
        std::string fix;
        // Walk no further than the heads: more ranks than heads never work.
        for (size_t d = 2; d <= s.NH; d++)
            if (cp_divides(s, c.tp, d))
                fix += concat(fix.empty() ? "--cp " : ", ", d);
        return concat("--cp-method ulysses: --cp ", c.cp, c.tp > 1 ? concat(" x --tp ", c.tp) : "",
                      " does not share ", s.NH, " heads and ", s.NKV, " key/value heads: try ",
                      fix.empty() ? "" : fix + " or ", "--cp-method gather");
    }
    // FP8 blocks would span rows that are not neighbours in the sequence.
    if (c.fp8 != "none")
        return concat("--fp8 ", c.fp8, " is not built with --cp: leave one of them out");
    return "";
}

// Expert-parallel ranks are a part of the dp x cp ranks, with --etp 1 of the dp x cp x tp ranks: ep
// must divide these and the experts.
inline std::string check_expert_parallel(const Config& c, const Shape& s) {
    const char* grouped = c.ep > 1 ? "--ep" : "--etp 1";
    if (c.zero_group && (c.ep > 1 || s.whole_experts))
        return concat("--zero-group ", c.zero_group, " is not built with ", grouped, ": leave one "
                                                     "of them out");
    if (c.ep == 1) return "";
    if (s.E == 0)
        return concat("--ep ", c.ep, " shares out experts, and the model has none: leave it out, "
                                     "or give --model tiny-moe");

    // List the sizes that divide both.
    size_t ep = size_t(c.ep);
    size_t ranks = size_t(routing_ranks(c));
    std::string fix;
    for (size_t d = 1; d <= s.E; d++)
        if (s.E % d == 0 && ranks % d == 0)
            fix += concat(fix.empty() ? ": try --ep " : ", ", d);

    // Name the reason.
    if (s.E % ep)
        return concat("--ep ", ep, " does not divide ", s.E, " experts", fix);
    if (ranks % ep)
        return concat("--ep ", ep, " does not divide the ", ranks, " ranks of --dp",
                      c.cp > 1 ? " x --cp" : "", has_whole_experts(c) ? " x --tp" : "", fix);
    return "";
}

// Check --hpz: shards of weights among neighbours, and of all else over all ranks.
inline std::string check_hpz(const Config& c) {
    if (!keeps_weights_near(c)) return "";
    std::string flag = concat("--hpz ", c.hpz);
    if (c.zero != 3) return flag + " says which ranks share out weights: add --zero 3";
    if (c.zero_group) return flag + " sets the group of weights: leave --zero-group out";
    if (c.ep > 1 || has_whole_experts(c))
        return flag + " is not built with --ep and --etp: leave one of them out";
    if (offloads(c, "weights"))
        return flag + " keeps weights near, --offload weights does not: leave one of them out";
    if (data_ranks(c) % c.hpz)
        return concat(flag, " does not divide --dp ", c.dp,
                      c.cp > 1 ? concat(" x --cp ", c.cp) : "");
    return "";
}

// The axes must multiply to the number of ranks, unless --explain only describes a layout.
inline std::string check_layout(Config& c, const Shape& s, int processes) {
    if (processes > 1 && c.local_ranks > 1)
        return concat("--local-ranks ", c.local_ranks, " in each of ", processes,
                      " processes: use one of the two");

    // Check the heads first: then the number of ranks that a later message asks for is possible.
    int ranks = std::max(processes, c.local_ranks);
    std::string wrong = check_context_parallel(c, s);
    if (wrong.empty())
        wrong = check_tensor_parallel(c, s, c.explain || ranks == 1 ? 0 : size_t(ranks));
    if (!wrong.empty()) return wrong;

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

    wrong = check_expert_parallel(c, s);
    if (!wrong.empty()) return wrong;

    // Embedding and head count as layers, so a small model may have more stages than blocks.
    int layers = int(s.L) + 2, stages = c.pp * c.chunks;
    if (stages > layers)
        return concat("--pp ", c.pp, " x --chunks ", c.chunks, " are ", stages,
                      " stages, and the model has ", layers,
                      " layers (blocks, embedding and head): use fewer");

    if (c.zero_group && data_ranks(c) % c.zero_group)
        return concat("--zero-group ", c.zero_group, " does not divide --dp ", c.dp,
                      c.cp > 1 ? concat(" x --cp ", c.cp) : "");
    if (std::string wrong = check_hpz(c); !wrong.empty())
        return wrong;
    if (c.chunks > 1 && c.pipeline == "1f1b")
        return concat("--chunks ", c.chunks,
                      " needs --pipeline interleaved, gpipe or zero-bubble");

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

// Check the storage of masters and moments. Small masters exist for bf16 weights, which are the
// upper halves of floats (remainder) or their own masters (none). Small moments exist for AdamW.
inline std::string check_masters(const Config& c) {
    if (c.states != "float" && c.optimizer != "adamw")
        return concat("--states ", c.states, " is for --optimizer adamw: give --states float");
    if (c.masters == "float") return "";
    std::string flag = "--masters " + c.masters;
    // An fp16 number is not the upper half of a float: what it lacks depends on the exponent.
    if (c.precision != "bf16")
        return concat(flag, " is for bf16 weights, and these are ", c.precision,
                      ": give --precision bf16, or --masters float");
    if (c.optimizer != "adamw")
        return concat(flag, " is for --optimizer adamw: give --masters float");
    return "";
}

// Check distillation: it needs a teacher, and some flags are not built beside one.
inline std::string check_distill(const Config& c) {
    bool distills = c.loss == "distill";
    for (const char* name : {"teacher", "distill-share", "distill-temperature"})
        if (was_given(c, name) && !distills)
            return concat("--", name, " is for --loss distill: give that too");
    if (!distills) return "";
    if (c.teacher.empty() && c.steps > 0 && !c.eval)
        return "--loss distill learns from a teacher: give --teacher DIR";

    // Refuse what no test has seen beside a second model.
    if (c.ep > 1)
        return concat("--loss distill: a teacher beside --ep ", c.ep, " is not built: give --ep 1");
    if (has_whole_experts(c))
        return "--loss distill: a teacher beside --etp 1 is not built: leave --etp out";
    if (c.cp > 1)
        return concat("--loss distill: a teacher beside --cp ", c.cp, " is not built: give --cp 1");
    if (c.graphs)
        return "--loss distill: a teacher beside --graphs is not built: leave --graphs out";
    return "";
}

// Check what conversations, pairs and sampled answers need, and what is not built with them. Fill
// in the numbers that the user left out.
inline std::string check_loss(Config& c) {
    const std::string flag = "--loss " + c.loss;
    bool sampled = c.loss == "grpo";

    // Refuse flags of preferences and of sampled answers beside other losses.
    if (was_given(c, "beta") && !has_pairs(c) && !sampled)
        return concat("--beta ", c.beta,
                      " is for preferences and rewards: give --loss dpo, ipo, simpo, orpo, kto "
                      "or grpo");
    for (const char* name : {"group", "answer-tokens", "reward", "advantage", "updates",
                             "clip-low", "clip-high", "kl", "reward-seconds"})
        if (was_given(c, name) && !sampled)
            return concat("--", name, " is of answers that are sampled: give --loss grpo");

    // Refuse numbers of one loss beside another.
    if (c.label_smoothing > 0 && c.loss != "dpo")
        return concat("--label-smoothing ", c.label_smoothing, " is for --loss dpo: leave it out");
    if (c.label_smoothing >= 0.5)
        return concat("--label-smoothing ", c.label_smoothing, " takes half of the pairs or more "
                      "to be wrong: give less than 0.5");
    if (was_given(c, "gamma") && c.loss != "simpo")
        return concat("--gamma ", c.gamma, " is for --loss simpo: leave it out");
    for (const char* name : {"desirable-weight", "undesirable-weight"})
        if (was_given(c, name) && c.loss != "kto")
            return concat("--", name, " is for --loss kto: leave it out");
    if (std::string wrong = check_distill(c); !wrong.empty())
        return wrong;
    if (!has_conversations(c)) return "";

    // Fill in TRL's numbers; for SimPO, those of its paper. Sampled answers need no reference.
    if (c.beta == 0 && !sampled) c.beta = c.loss == "simpo" ? 2 : 0.1;
    if (c.gamma < 0) c.gamma = 0.5;

    // Check the data, and whether a sequence stays whole.
    if (c.document_mask)
        return flag + " packs whole conversations, and none sees another: leave --document-mask "
                      "out";
    if (c.data.empty() && (c.steps > 0 || c.eval))
        return flag + (c.loss == "kto" ? " learns from answers with a label" :
                       has_pairs(c) ? " trains to prefer one answer" :
                       sampled ? " answers prompts" : " trains the answers of conversations") +
               ": give --data FILE.jsonl";
    return "";
}

// Check what compares the policy of sampled answers with the one that sampled, or the first one.
inline std::string check_policies(const Config& c) {
    for (const char* name : {"clip-low", "clip-high"})
        if (was_given(c, name) && c.updates == 1)
            return concat("--", name, ": the first update of a rollout has no ratio to clip: give "
                          "--updates 2 or more");
    if (c.beta == 0)
        return !was_given(c, "kl")
                   ? ""
                   : concat("--kl ", c.kl, " estimates what --beta weighs: give --beta");

    // Refuse weights of which the copy would not be all: casts, and chunks elsewhere.
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
    if (c.loss != "grpo") return "";
    for (const char* name : {"val", "eval", "keep-best"})
        if (was_given(c, name))
            return concat("--", name, ": the loss of sampled answers says nothing of others, and "
                          "rewards of validation are not built: leave it out");
    if (!has_rollouts(c)) return "";
    if (std::string wrong = check_reward(c); !wrong.empty())
        return wrong;
    if (std::string wrong = check_policies(c); !wrong.empty())
        return wrong;

    // Refuse another distribution: the gradient is right only if the policy itself is sampled.
    if (c.temperature != 1 || c.top_k > 0 || c.top_p < 1)
        return "--loss grpo learns from the model's own distribution: leave --temperature, --top-k "
               "and --top-p out";
    if (c.ignore_eos)
        return "--ignore-eos: answers that never end teach nothing of ends: leave it out";

    // Check that a step holds whole groups.
    int64_t answers = c.batch_tokens / c.seq, once = int64_t(c.micro_batch) * c.dp;
    if (answers % c.group == 0) return "";
    // Offer the next larger batch of whole groups.
    int64_t fits = std::lcm(int64_t(c.group), once);
    return concat("--group ", c.group, " does not divide the ", answers, " sequences of a step: "
                  "try --batch-tokens ", (answers + fits - 1) / fits * fits * c.seq);
}

// Check --adapters, from which each prompt chooses: they are read by generation alone.
inline std::string check_adapter_sets(const Config& c) {
    if (c.adapters.empty()) return "";
    std::string flag = "--adapters " + c.adapters;
    if (c.lora || !c.adapter.empty())
        return concat(flag, " and --", c.lora ? "lora" : "adapter",
                      " both say which adapters the run has: leave one of them out");
    if (c.prompts.empty())
        return flag + ": lines of --prompts FILE choose among them: give it, or one folder as "
                      "--adapter";

    // Nothing but generation knows which of them is meant.
    if (c.steps > 0)
        return concat(flag, " does not train: give --steps 0, or one folder as --adapter");
    if (!c.export_dir.empty())
        return flag + ": --export writes one model: give one folder as --adapter, and --merge";
    if (c.resume)
        return flag + ": --resume reads a checkpoint instead of the base: --export it, and give "
                      "that folder as --model";
    return c.evaluate.empty() ? "" : flag + ": --evaluate scores one model: give one folder as "
                                            "--adapter";
}

// Check a prefix of trained keys and values, of --prefix or of the folder --adapter: what is not
// built beside one.
inline std::string check_prefix(const Config& c, const Shape& s) {
    if (!c.prefix) return "";
    bool made = was_given(c, "prefix") || c.adapter.empty();
    std::string flag = made ? concat("--prefix ", c.prefix) : "--adapter " + c.adapter;
    for (const char* other : {"lora", "adapter", "adapters", "lora-plus"})
        if (was_given(c, other) && (made || strcmp(other, "adapter")))
            return concat(flag, " is prefix tuning, and --", other, " is for other adapters: leave "
                          "one of them out");

    // Refuse what would read the prefix as text, or cannot hold it.
    if (s.position == Position::ALIBI)
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
    bool refers = c.loss == "dpo" || c.loss == "ipo" || c.loss == "kto" || keeps_start(c);
    if (refers)
        return concat(flag, ": --loss ", c.loss, " compares with the base, which a prefix changes "
                      "from the start: give --lora RANK");
    return "";
}

// Check which models may have adapters, and what is not built beside them.
inline std::string check_lora(Config& c, const Shape& s) {
    // Refuse flags of adapters in runs that have none.
    for (const char* name : {"lora-alpha", "lora-targets", "lora-layers", "lora-rs"})
        if (c.lora == 0 && was_given(c, name))
            return concat("--", name, " is for adapters: give --lora RANK");
    if (c.merge && (c.export_dir.empty() || !has_adapters(c)))
        return "--merge is for adapters that are exported: give --export DIR, and --adapter DIR or "
               "--lora RANK";
    if (was_given(c, "lora-plus") && !has_adapters(c))
        return "--lora-plus is for adapters: give --lora RANK or --adapter DIR";
    if (!has_adapters(c)) return "";
    if (std::string wrong = check_adapter_sets(c); !wrong.empty())
        return wrong;
    if (std::string wrong = check_prefix(c, s); !wrong.empty())
        return wrong;
    if (c.lora && !c.adapter.empty())
        return concat("--lora ", c.lora, " makes new adapters, and --adapter ", c.adapter,
                      " has some: leave one of them out");
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
    if (c.prefix && s.kv_latent)
        return concat(flag, " gives keys and values of heads, and ", s.hf_type,
                      " has latents: give --lora RANK");
    if (c.router_bias_rate > 0)
        return concat(flag, ": --router-bias-rate ", c.router_bias_rate, " moves a number of the "
                      "base, which adapters leave as it is: give 0");

    // Refuse what is not built beside adapters.
    if (c.fp8 != "none")
        return concat(flag, " is not built with --fp8: give --fp8 none");
    if (offloads(c, "weights") && c.weights != "float")
        return concat(flag, ": --offload weights moves no codes of --weights ", c.weights,
                      ": leave one of them out");

    // Refuse exports that cannot hold adapters.
    if (c.export_dir.ends_with(".bin"))
        return flag + ": --export " + c.export_dir + " has no place for adapters: give a folder";
    if (c.export_dir.ends_with(".gguf") && !c.merge)
        return flag + ": --export " + c.export_dir + " has no place for adapters: give a folder, "
               "or --merge";

    if (c.masters == "remainder")
        return concat(flag, ": --masters remainder would round the frozen weights in another way: "
                            "give --masters float");
    return "";
}

// Check frozen weights, which are stored in narrow types and only read. There is no room for their
// gradients, and they are no longer exactly the weights that were loaded.
inline std::string check_frozen(const Config& c) {
    if (c.weights == "float") return "";
    std::string flag = "--weights " + c.weights;
    if (c.steps > 0 && !c.eval && !has_adapters(c))
        return flag + " does not train: give --steps 0 or --eval, or --lora RANK";
    if (!c.export_dir.empty() && (c.merge || !has_adapters(c)))
        return flag + " has lost what --export writes: give --weights float";
    if (c.fp8 != "none")
        return flag + " is not built with --fp8: leave one of them out";
    if (c.zero && !has_adapters(c))
        return concat(flag, " without adapters has nothing that --zero ", c.zero, " cuts: leave it "
                      "out");
    return "";
}

// Check the mean of weights, which one run keeps and another one reads.
inline std::string check_ema(const Config& c) {
    bool reads = c.eval || c.steps == 0;
    if (c.ema == 1)
        return "--ema 1 never moves from the first weights: give less, as 0.999";
    if (c.use_ema && !c.resume)
        return "--use-ema reads the mean that a run with --ema has saved: give its --out DIR, and "
               "--resume";
    if (c.use_ema && !reads)
        return "--use-ema would train on from the mean, which no optimizer has seen: give --eval, "
               "or --steps 0 and --export or samples";
    return "";
}

// Check flags that need another flag, or exclude it.
inline std::string check_together(const Config& c, const Shape& s) {
    std::string wrong = check_masters(c);
    if (wrong.empty()) wrong = check_frozen(c);
    if (wrong.empty()) wrong = check_ema(c);
    if (!wrong.empty()) return wrong;

    // Check pairs of flags.
    if (c.min_lr > c.lr)
        return concat("--min-lr ", c.min_lr, " is above --lr ", c.lr);
    if (c.fp8 != "none" && c.precision != "bf16")
        return concat("--fp8 ", c.fp8, " quantises what is bf16, and --precision is ", c.precision,
                      ": give --precision bf16");
    if (c.document_end >= 0 && !c.document_mask)
        return concat("--document-end ", c.document_end,
                      " says where --document-mask cuts: give --document-mask too");
    if (!c.evaluate.empty() && c.steps == 0 && !c.eval)
        return "--evaluate: with --steps 0 nothing is evaluated: give --eval";
    if (c.recompute == "auto" && c.explain && c.memory == 0)
        return "--recompute auto fits the memory of a machine, and --explain may speak of another: "
               "give --memory GiB";

    if (c.recompute_segment > 1 && c.recompute != "full")
        return "--recompute-segment is for blocks that keep their input alone: give --recompute "
               "full (auto chooses segments by itself)";
    if (c.recompute_segment > int(s.L))
        return concat("--recompute-segment ", c.recompute_segment, ": the model has ", s.L,
                      " blocks: give at most as many");
    if (c.recompute_segment > 1 && c.plan != "none")
        return "--plan auto looks at no segments: leave --recompute-segment out";

    // Refuse flags for files without the folder that would hold them.
    if (c.resume && c.out.empty())
        return "--resume goes on from the newest checkpoint in --out: give --out DIR";
    if (c.resume_step >= 0 && !c.resume)
        return "--resume-step chooses what --resume goes on from: give --resume too";
    if (c.save_every && c.out.empty())
        return "--save-every wants a folder: give --out DIR";

    // Check when to save: --save-minutes takes a number or "auto".
    char* end = nullptr;
    double minutes = strtod(c.save_minutes.c_str(), &end);
    bool within = minutes >= 0 && minutes <= 1e6;
    bool number = within && !*end && !c.save_minutes.empty();
    if (c.save_minutes != "auto" && !number)
        return concat("--save-minutes ", printable(c.save_minutes),
                      " is neither auto nor a number from 0 to 1000000");
    if (c.save_minutes == "auto" && c.out.empty())
        return "--save-minutes auto wants a folder: give --out DIR";
    if (was_given(c, "failure-hours") && c.save_minutes != "auto")
        return "--failure-hours says how often --save-minutes auto saves: give that too";

    // Check saves in memory: a run with them needs a folder on disk too.
    bool kept = !c.out.empty() && c.buddy_every > 0;
    if (!c.buddy.empty() && !kept)
        return "--buddy saves in memory between the saves of a folder: give --out DIR and "
               "--buddy-every N";
    if (c.buddy_every && c.buddy.empty())
        return "--buddy-every wants a folder in memory: give --buddy /dev/shm/NAME";
    if (c.save_async && c.out.empty())
        return "--save-async wants a folder: give --out DIR";

    if (c.keep_best && c.out.empty())
        return "--keep-best wants a folder: give --out DIR";
    if (c.export_dtype == "q8_0" && !c.export_dir.ends_with(".gguf"))
        return "--export-dtype q8_0 is llama.cpp's: convert_gpt IN FILE.gguf writes it, or give "
               "another type";
    return "";
}

// Refuse a flag that asks for a step's time where no limit bounds it.
inline std::string refuse_open_answers(const Config& c, const char* flag) {
    if (!has_open_answers(c)) return "";
    return concat(flag, ": the time of --loss grpo without --answer-tokens is not known: give that "
                        "too");
}

// Check --plan, which chooses the layout: in a run no flag may choose another part of it.
inline std::string check_planning(const Config& c) {
    if (c.gpus && c.plan == "none")
        return concat("--gpus ", c.gpus, " is what --plan plans for: give --plan auto");
    if (c.plan == "none") return "";
    if (c.gpus && !c.explain)
        return concat("--gpus ", c.gpus, " plans for ranks that need not be there: give --explain; "
                                         "a run has the ranks that it was started with");

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
    if (c.steps == 0 || c.eval)
        return "--plan auto is for training, and there are no steps";
    return refuse_open_answers(c, "--plan auto");
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
    bool no_file = ::access(c.machine.c_str(), F_OK) != 0;
    bool missing = !wrong.empty() && no_file && !like.empty();
    if (missing) wrong += concat("; did you mean ", like, "?");
    if (!wrong.empty()) return wrong;
    // Its rates are wanted where moves of activations are weighed against recomputation, also if
    // the step is not timed.
    if (c.recompute == "auto" && offloads(c, "activations"))
        return "";
    if (c.steps == 0 || c.eval)
        return "--machine " + c.machine + " times steps of training, and there are none";

    return refuse_open_answers(c, "--machine");
}

// Check --fit, which asks about one card: it chooses the flags of memory itself.
inline std::string check_fit(const Config& c) {
    if (c.fit.empty())
        return "--fit wants a card: GB of its memory, as 24, or a machine's name, as h100";

    std::vector<const char*> chosen = planned_flags();
    for (const char* name : {"etp", "micro-batch", "lora", "adapter", "weights", "offload",
                             "offload-to", "offload-update", "masters", "states", "plan", "gpus",
                             "local-ranks"})
        chosen.push_back(name);
    for (const char* name : chosen)
        if (was_given(c, name))
            return concat("--fit chooses flags for one card, --", name, " among them: leave --",
                          name, " out, or ask --plan auto for several cards");

    if (was_given(c, "precision") && c.precision != "bf16")
        return concat("--fit answers for bf16: leave --precision ", c.precision,
                      " out, or ask --plan auto --gpus 1 --machine NAME --explain");
    if (c.steps == 0 || c.eval) return "--fit is for training, and there are no steps";
    return refuse_open_answers(c, "--fit");
}

// Check everything, and fill in what the user left to the program. processes: of the MPI job, or 1.
inline std::string config_check(Config& c, Shape s, int processes = 1) {
    // The planner has one shape for many layouts: whether experts are whole is up to the flags.
    s.whole_experts = s.E && has_whole_experts(c);

    // First check what needs no other number: later messages then speak of a possible shape.
    std::string wrong = check_device(c);
    if (wrong.empty()) wrong = check_shape(s);
    if (wrong.empty()) wrong = check_experts(c, s);
    if (wrong.empty()) wrong = check_new_tokens(c);
    if (wrong.empty()) wrong = check_lora(c, s);
    if (wrong.empty()) wrong = check_loss(c);
    if (!wrong.empty()) return wrong;

    // Fill in the defaults that depend on the shape or on another flag.
    if (c.seq == 0)
        c.seq = int(std::min(s.P - size_t(c.prefix), size_t(256)));
    if (c.min_lr < 0) c.min_lr = c.lr / 10;
    bool drawn = c.timeline.ends_with(".svg") || c.timeline.ends_with(".json");
    if (!c.timeline.empty() && (!drawn || c.timeline.size() <= 5))
        return "--timeline " + c.timeline + ": FILE.svg or FILE.json";
    if (!c.timeline.empty() && c.explain && c.plan == "auto")
        return "--timeline draws the step of one layout: give it with the command that --plan auto "
               "prints";

    // Check the layout before the batch: the batch counts the ranks that --dp 0 becomes.
    wrong = check_layout(c, s, processes);
    if (wrong.empty()) wrong = check_batch(c, s);
    if (wrong.empty()) wrong = check_rollouts(c);
    if (wrong.empty()) wrong = check_machine(c);
    if (wrong.empty()) wrong = check_planning(c);
    return wrong.empty() ? check_together(c, s) : wrong;
}

// Whether the flags ask for steps beside a teacher.
inline bool wants_teacher(const Config& c) {
    return c.loss == "distill" && c.steps > 0 && !c.eval;
}
// Check that a teacher of shape `s` can lie in this layout and read these sequences beside a
// model: "" or why not.
inline std::string check_teacher(const Config& c, const Shape& model, const Shape& s) {
    const std::string flag = "--teacher " + printable(c.teacher);

    // Both models read the same tokens.
    if (s.V != model.V)
        return concat(flag, " has ", s.V, " tokens, and ", c.model, " ", model.V,
                      ": give a teacher with the model's vocabulary");
    if (s.E)
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
    std::string wrong = config_check(c, model);
    bool checks = wrong.empty() && wants_teacher(c);
    return checks ? check_teacher(c, model, teacher) : wrong;
}

} // namespace llmc
