// config.h - one struct and one table of flags: command line, --config files, log's copy
//   Each row of the table is a flag: its name, its field, what it accepts, a line of help.
//   The row checks a flag's value; config_check.h checks what flags only get wrong together.
#pragma once
#include <sys/stat.h>
#include <algorithm>
#include <climits>
#include <set>
#include <sstream>
#include <string>
#include <variant>
#include <vector>
#include <nlohmann/json.hpp>
#include "../action.h"
#include "../layout.h"
#include "../ops/objective.cuh"
#include "../text.h"
#include "files.h"

namespace llmc {

// clang-format off
// A run's options. The member names are not the flags' names: the table below joins the two.
// The initial values are the defaults that --help shows.
struct Config {
    // model; a size of 0 keeps that of --model
    std::string model = "tiny", position;
    bool scratch = false;
    // L, NH, NKV, C, F and V of a Shape
    int layers = 0, heads = 0, kv_heads = 0, channels = 0, ffn = 0, vocab = 0;
    // E and K, experts made by upcycling; then the weights of the router's terms
    // in the trained loss
    int experts = 0, experts_per_token = 0, upcycle = 0;
    std::string router;
    int expert_rounds = 1;
    double balance = 0.01, z_loss = 0, router_bias_rate = 0, expert_capacity = 0;

    // data
    std::string data, val, tokenizer, add_tokens;
    // T and B; one forward and backward pass of a rank takes B sequences of T tokens
    int seq = 0, micro_batch = 8;
    // tokens an optimizer step, counted over all data-parallel ranks
    int64_t batch_tokens = 0;
    bool document_mask = false;
    int document_end = -1;
    std::string loss = "lm", chat_format = "auto";
    double beta = 0, label_smoothing = 0, gamma = -1;
    // distill: the model to learn from, its weight beside the text, and how soft both are
    std::string teacher;
    double distill_share = 0.5, distill_temperature = 1;
    double desirable_weight = 1;
    double undesirable_weight = 1;
    // grpo: answers a prompt, tokens an answer (0: as many as --seq leaves)
    int group = 8, answer_tokens = 0;
    std::string reward, advantage = "mean", kl = "k3";
    // steps on the answers of a rollout; how far the ratio to the policy that sampled may go
    int updates = 1;
    double clip_low = 0.2, clip_high = 0.2;
    double reward_seconds = 60;

    // data preparation
    std::string prepare, field = "text";
    // tokens; 0: a single shard, and no validation shard
    int64_t shard_tokens = 0, val_tokens = 0;
    int threads = 0;

    // optimizer
    int64_t steps = 600;
    std::string optimizer = "adamw", schedule = "cosine";
    // min_lr -1 becomes a tenth of lr in config_check()
    double lr = 1e-3, min_lr = -1;
    int64_t warmup = 20;
    double weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, clip = 1.0;
    double ema = 0;
    bool use_ema = false;
    int64_t seed = 1337;

    // adapters; an alpha of 0 becomes twice the rank in config_check()
    int lora = 0, prefix = 0;
    double lora_alpha = 0;
    std::string lora_targets = "all", lora_layers = "all", adapter, adapters;
    bool lora_rs = false, merge = false;
    double lora_plus = 1;

    // numbers and memory
    std::string precision = "fp32";
    std::string fp8 = "none", fp8_amax = "max", fp8_weights = "step";
    int fp8_history = 1024, fp8_margin = 0;
    // fp16's loss scale; 0 and -1 take the rule's value
    std::string loss_scale = "dynamic", loss_scale_rule = "megatron";
    int64_t loss_scale_start = 0;
    int loss_scale_window = 0, loss_scale_hysteresis = 0;
    double loss_scale_min = -1;
    std::string gradients = "float", masters = "float", states = "float", weights = "float";
    std::string recompute = "none", offload = "none", offload_to = "cpu";
    int recompute_segment = 1;
    std::string offload_update = "device";
    int update_delay = 0; // steps
    double memory = 0;

    // layout
    // ranks of each axis; their product is the number of ranks. dp 0 takes what
    // the other axes leave.
    int dp = 0, tp = 1, pp = 1, cp = 1, ep = 1, etp = 0;
    int zero = 0, zero_group = 0, hpz = 0, chunks = 1, prefetch = 1, local_ranks = 1;
    bool sequence_parallel = false, fixed_order = false;
    std::string pipeline = "1f1b", grid_order = "tp-pp-dp";
    std::string cp_method = "gather", cp_order = "zigzag", ep_method = "gather";
    int64_t verify_every = 0; // steps
    double watchdog = 600;    // seconds

    // files
    // --out survives a kill and can be resumed; an export holds only weights
    std::string out, export_dir, export_dtype = "fp32", ds_config, average;
    int64_t save_every = 0;
    std::string save_minutes = "10"; // or auto: save_seconds()
    double failure_hours = 50700;
    std::string buddy;
    int64_t buddy_every = 0; // steps
    bool save_async = false;
    int keep = 2;
    bool keep_best = false, resume = false;
    // -1: the newest checkpoint
    int64_t resume_step = -1;

    // looking
    // eval_every in steps, eval_tokens in tokens, the others in steps
    int64_t eval_every = 0, eval_tokens = 16384, sample_every = 0, log_every = 0;
    bool eval = false;
    std::string evaluate, prompt, prompts, completions;
    int sample_tokens = 200, samples = 1, slots = 32;
    bool chat = false;
    std::string draft;
    int draft_tokens = 4;
    bool ignore_eos = false;
    double temperature = 1.0, top_p = 1.0;
    int top_k = 0;
    std::string device = "auto", machine, calibrate, fit, timeline, profile;
    std::string plan = "none";
    int gpus = 0;
    bool graphs = false, explain = false, help = false, version = false;
    // -1: no layer's actions are printed
    int layer = -1;

    // names of the flags that the command line and its files set, and of those that a checkpoint
    // has set; all others have their defaults
    std::set<std::string> given = {}, adopted = {};
    // --reward as this call's own arguments have it: a file's program is not run
    std::string typed_reward;
    // the checkpoint that --model names: its weights are those of `model`. Empty: none
    std::string start;
};
// clang-format on

// Whether the user set a flag. A default that follows from other flags must not override it.
inline bool was_given(const Config& c, const std::string& name) { return c.given.count(name) > 0; }

// The seconds of --save-minutes: the time between checkpoints, and the wait for room at the end of
// a run. The interval that "auto" will choose (folder.h) is unknown before the run, so the
// default stands for it.
inline double save_seconds(const Config& c) {
    return 60 * (c.save_minutes == "auto" ? 10 : strtod(c.save_minutes.c_str(), nullptr));
}

// Whether the list of --offload names `what`.
inline bool offloads(const Config& c, const std::string& what) {
    return ("," + c.offload + ",").find("," + what + ",") != std::string::npos;
}

// A field's place in Config and its type. The type decides how a value is parsed.
typedef std::variant<int Config::*, int64_t Config::*, double Config::*, bool Config::*,
                     std::string Config::*>
    Field;

// A flag. A row with an empty name begins a group of flags, and its help is the group's title.
struct Flag {
    const char* name;
    Field field;
    // "a|b|c": one of them; "low..high": a number; "": any
    const char* accepts;
    const char* help;
};

// clang-format off
// Every flag, in the order --help prints. Renaming one breaks users' config files.
inline const std::vector<Flag>& config_table() {
    typedef Config C;
    static const std::vector<Flag> table = {
        {"", &C::help, "", "Model"},
        {"model", &C::model, "",
         "a preset (listed below), or whose weights are loaded: a Hugging Face folder, a .bin of "
         "llm.c or llama2.c, a run's folder"},
        {"scratch", &C::scratch, "", "with a folder or a file: take its shape, not its weights"},
        {"layers", &C::layers, "0..10000", "change the preset's number of blocks"},
        {"heads", &C::heads, "0..100000", "change the number of attention heads"},
        {"kv-heads", &C::kv_heads, "0..100000", "change the number of key/value heads"},
        {"channels", &C::channels, "0..1000000", "change the width of the residual stream"},
        {"ffn", &C::ffn, "0..10000000", "change the width of the feed-forward layer"},
        {"vocab", &C::vocab, "0..100000000", "change the vocabulary; new weights: the tokenizer's"},
        {"experts", &C::experts, "0..4096",
         "experts in the place of a Llama's ffn, each --ffn wide; or change their number"},
        {"experts-per-token", &C::experts_per_token, "0..32",
         "experts that a token goes through (0: the preset's, or 2)"},
        {"upcycle", &C::upcycle, "0..4096",
         "replace each ffn of a dense --model folder by this many copies of it, as experts; the "
         "first loss stays"},
        {"router", &C::router, "softmax|renormalised|sigmoid",
         "a gate is a share of all experts' softmax, of those chosen, or of their sigmoids"},
        {"balance", &C::balance, "0..1000",
         "experts: weight of the balance loss of each sequence, which spreads tokens over them"},
        {"z-loss", &C::z_loss, "0..1000",
         "experts: weight of the square of the router's log-sum-exp"},
        {"router-bias-rate", &C::router_bias_rate, "0..1",
         "DeepSeek-V3: what each step adds to the choice's bias of idle experts, and takes from "
         "busy ones; V3 took 0.001"},
        {"expert-capacity", &C::expert_capacity, "0..1000",
         "capacity factor: an expert takes at most this many times its even share of a sequence's "
         "choices, and drops later ones (0: drops none)"},
        {"expert-rounds", &C::expert_rounds, "1..4096",
         "experts work off the most rows that they may get in so many rounds, and have room for "
         "one: less memory, no drops, more products"},
        {"position", &C::position, "learned|rope|alibi", "change how positions enter"},

        {"", &C::help, "", "Data"},
        {"data", &C::data, "",
         "training text (.txt) or token shards (.bin), commas or a pattern between files; without "
         "it: this project's own sources"},
        {"val", &C::val, "", "validation files; without it: the last tenth of each training file"},
        {"tokenizer", &C::tokenizer, "",
         "how text becomes tokens: byte, or PATH: tokenizer.json, .model, .bin, .tiktoken, or a "
         "folder with one (GPT-2: vocab.bpe, encoder.json); without it: the --model folder's own, "
         "else byte"},
        {"add-tokens", &C::add_tokens, "",
         "with a --model folder: texts between commas that become special tokens; their rows begin "
         "as the mean of the others"},
        {"seq", &C::seq, "0..16777216", "tokens a sequence, T (0: 256, or what the model allows)"},
        {"micro-batch", &C::micro_batch, "1..1000000", "sequences a micro-batch, B"},
        {"batch-tokens", &C::batch_tokens, "0..1000000000000",
         "tokens an optimizer step, over all ranks; accumulation follows (0: one micro-batch)"},
        {"document-mask", &C::document_mask, "",
         "train on documents apart: none sees or predicts another, positions restart"},
        {"document-end", &C::document_end, "-1..100000000",
         "the token that ends a document (-1: the shards' or the tokenizer's end of text)"},

        {"loss", &C::loss, "lm|sft|dpo|ipo|simpo|orpo|kto|grpo|distill",
         "what is trained; lm: every token; sft: the answers of conversations, which --data holds "
         "as JSON lines (.jsonl); distill: text or answers, and what --teacher says of each token; "
         "kto: answers that are desirable or not, lines have prompt, "
         "completion, label; grpo: answers that the model samples, by --reward, lines have prompt, "
         "answer; the others: to prefer one answer, lines have prompt, chosen, rejected"},
        {"beta", &C::beta, "0..1000",
         "dpo, ipo, simpo, kto: how much a preference weighs; orpo: its share beside the answer's "
         "own loss (0: 0.1; simpo 2); grpo: the weight of the KL divergence from the starting "
         "weights (0: none)"},
        {"teacher", &C::teacher, "",
         "distill: a model of the same vocabulary: a Hugging Face folder, a .bin or a run's "
         "folder"},
        {"distill-share", &C::distill_share, "0..1",
         "distill: weight of the teacher's distribution; the text has the rest"},
        {"distill-temperature", &C::distill_temperature, "0.01..1000",
         "distill: divides both models' logits; above 1 unlikely tokens count more"},
        {"group", &C::group, "2..65536",
         "grpo: answers to each prompt, whose rewards are compared; a sequence each"},
        {"answer-tokens", &C::answer_tokens, "0..16777216",
         "grpo: tokens of an answer, at most (0: as many as --seq leaves)"},
        {"reward", &C::reward, "",
         "grpo: exact, number, regex: 1 for an answer that is the line's, whose last number is the "
         "line's last, in which the line's pattern is found; else 0; command:PROGRAM: it reads "
         "the lines with a \"completion\" each and prints a number each; no shell runs it"},
        {"reward-seconds", &C::reward_seconds, "0.001..1000000",
         "grpo: how long PROGRAM may take for the answers of a step"},
        {"advantage", &C::advantage, "mean|std",
         "grpo: a reward less its group's mean; std: over the group's deviation"},
        {"updates", &C::updates, "1..10000",
         "grpo: steps on the answers of a rollout, each counted by --steps (TRL: num_iterations)"},
        {"clip-low", &C::clip_low, "0..1",
         "grpo: how far below 1 an answer's ratio to the policy that sampled it may go (epsilon)"},
        {"clip-high", &C::clip_high, "0..1000", "grpo: and how far above (epsilon_high)"},
        {"kl", &C::kl, "k2|k3", "grpo: --beta's estimate of KL; k3: exp(-x) - 1 + x; k2: x^2 / 2"},
        {"label-smoothing", &C::label_smoothing, "0..1",
         "dpo: the share of pairs whose order is taken to be wrong (cDPO)"},
        {"gamma", &C::gamma, "-1..1000",
         "simpo: by how much the better answer is to win (-1: 0.5)"},
        {"desirable-weight", &C::desirable_weight, "0..1000",
         "kto: weight of desirable answers' loss; where they are few, more"},
        {"undesirable-weight", &C::undesirable_weight, "0..1000", "kto: and of the others'"},
        {"chat-format", &C::chat_format,
         "auto|chatml|chatml-bos|phi-4|llama2|llama3|llama3.1|mistral|mistral-v1|mistral-v3|"
         "mistral-v3-tekken|mistral-v7|mistral-v7-tekken|zephyr|nanochat|alpaca|plain",
         "how conversations are written; auto: as the --model folder's chat template has it; "
         "without one as the tokenizer's special tokens say, else plain"},

        {"", &C::help, "",
         "Data preparation: --prepare OUT.bin --data FILES --tokenizer PATH, then --data OUT.bin"},
        {"prepare", &C::prepare, "",
         "OUT.bin: write token shards of --data (.txt, .jsonl, each also .gz or .zst; .parquet; "
         "nanoGPT's .bin; - for JSON lines on standard input) and leave; the same call goes on "
         "after a kill"},
        {"field", &C::field, "", "the text of a JSON line, or the parquet column"},
        {"shard-tokens", &C::shard_tokens, "0..2147483647",
         "tokens a shard, written as OUT_000000.bin, ... (0: one shard, OUT.bin)"},
        {"val-tokens", &C::val_tokens, "0..2147483647",
         "the first N tokens go to OUT.val.bin, which the pattern OUT_*.bin does not match"},
        {"threads", &C::threads, "0..1024", "that tokenize (0: one a core)"},

        {"", &C::help, "", "Optimizer"},
        {"steps", &C::steps, "0..1000000000000", "optimizer steps; 0: only generate"},
        {"optimizer", &C::optimizer, "adamw|sgd", "sgd has no momentum"},
        {"lr", &C::lr, "0..1000", "peak learning rate"},
        {"min-lr", &C::min_lr, "-1..1000", "learning rate at the end (-1: a tenth of the peak)"},
        {"warmup", &C::warmup, "0..1000000000000", "steps of linear warm-up"},
        {"schedule", &C::schedule, "cosine|linear|wsd|constant", "how the learning rate falls"},
        {"weight-decay", &C::weight_decay, "0..1000", "decoupled decay of matrices and tables"},
        {"beta1", &C::beta1, "0..1", "AdamW"},
        {"beta2", &C::beta2, "0..1", "AdamW"},
        {"eps", &C::eps, "0..1", "AdamW"},
        {"clip", &C::clip, "0..1000000", "largest global gradient norm (0: no clipping)"},
        {"ema", &C::ema, "0..1",
         "keep a running mean of the weights beside them, which forgets a share of 1 - EMA each "
         "step, as 0.999; checkpoints hold both (0: none)"},
        {"seed", &C::seed, "0..9007199254740991", "of initial weights, data order and sampling"},

        {"", &C::help, "", "Adapters"},
        {"lora", &C::lora, "0..65536",
         "train low-rank adapters of this rank beside blocks' matrices, and nothing else (0: train "
         "all); without --weight-decay they do not decay"},
        {"lora-alpha", &C::lora_alpha, "0..1000000",
         "what an adapter adds is multiplied by alpha / rank (0: alpha is twice the rank)"},
        {"lora-targets", &C::lora_targets, "",
         "which matrices: all (that every token meets), attention, experts, or names with commas, "
         "as q_proj,v_proj"},
        {"lora-layers", &C::lora_layers, "",
         "which blocks, counted from 0: all, or 0,4,8-11; below the lowest none runs backward"},
        {"lora-rs", &C::lora_rs, "", "by alpha / sqrt(rank) instead: rank-stabilised"},
        {"lora-plus", &C::lora_plus, "0.001..1000",
         "B's learning rate by A's (LoRA+); 16 is its authors' choice"},
        {"prefix", &C::prefix, "0..4096",
         "train so many keys and values before each layer's sequence, and nothing else: prefix "
         "tuning (0: none)"},
        {"adapter", &C::adapter, "",
         "PEFT's folder of adapters, to go on from or to read; --export writes such a folder"},
        {"adapters", &C::adapters, "",
         "NAME=DIR,...: folders of adapters; each line of --prompts may name one, as \"adapter\""},

        {"", &C::help, "", "Numbers"},
        {"precision", &C::precision, "fp32|bf16|fp16",
         "weights and activations; sums, gradients of weights, moments and masters stay float"},
        {"fp8", &C::fp8, "none|block|tensor|delayed",
         "bf16: products of blocks read operands of 8 bits, with a scale for 128 numbers or for "
         "each operand; delayed: from the steps before"},
        {"fp8-history", &C::fp8_history, "1..65536", "delayed: steps that a scale looks back at"},
        {"fp8-amax", &C::fp8_amax, "max|most_recent",
         "delayed: scale by the largest of them, or by the last one"},
        {"fp8-margin", &C::fp8_margin, "0..6",
         "delayed: powers of two left free above that maximum"},
        {"fp8-weights", &C::fp8_weights, "step|product",
         "fp8: weights are cast once a step and kept, 2 bytes an element, or at each product"},
        {"loss-scale", &C::loss_scale, "",
         "fp16: what gradients are multiplied by; dynamic, or a power of two that stays"},
        {"loss-scale-rule", &C::loss_scale_rule, "megatron|pytorch|deepspeed",
         "when it doubles and halves"},
        {"loss-scale-start", &C::loss_scale_start, "0..4294967296",
         "the first dynamic scale (0: 65536)"},
        {"loss-scale-window", &C::loss_scale_window, "0..1000000000",
         "steps without overflow before it doubles (0: 1000, pytorch's 2000)"},
        {"loss-scale-hysteresis", &C::loss_scale_hysteresis, "0..1000000",
         "overflows before it halves (0: 2, pytorch's 1)"},
        {"loss-scale-min", &C::loss_scale_min, "-1..1000000000",
         "it falls no lower (-1: 1, pytorch's 0)"},
        {"weights", &C::weights, "float|nf4|int8|int4",
         "without training: matrices of blocks as they are, or quantised once after loading, to "
         "4.13, 8 or 4.25 bits an element"},
        {"gradients", &C::gradients, "float|bf16|fp8",
         "what data-parallel ranks send of gradients; bf16: half the bytes, each part rounded and "
         "then the sum; fp8: a quarter, each part rounded, best with --zero"},
        {"masters", &C::masters, "float|remainder|none",
         "of bf16 weights; remainder: 16 bits beside them, as exact as float; none: they are "
         "rounded at random"},
        {"states", &C::states, "float|bf16|8bit",
         "AdamW's moments; bf16: rounded at random; 8bit: blocks' matrices, by 256 elements"},

        {"", &C::help, "", "Memory"},
        {"recompute", &C::recompute, "none|selective|attention|ffn|full|auto",
         "selective: norms and activation functions; attention, ffn: that branch's products too; "
         "full: keep a block's input only; auto: a level for each block, the least arithmetic that "
         "fits; beside --offload activations the least time"},
        {"recompute-segment", &C::recompute_segment, "1..1000",
         "blocks in a row that keep one input, with --recompute full: sublinear memory for deep "
         "models"},
        {"memory", &C::memory, "0..1000000",
         "GiB that a rank may take: a plan that needs more is refused, with flags that fit (0: as "
         "much as the machine has)"},
        {"offload", &C::offload, "",
         "what lies outside the device while nobody uses it: some of optimizer, activations, "
         "weights and gradients, with commas"},
        {"offload-to", &C::offload_to, "",
         "where --offload lays them: cpu, the host's memory, or a folder, for a nameless file"},
        {"offload-update", &C::offload_update, "device|host",
         "where --offload optimizer updates; host: by the CPU, and masters and moments stay there"},
        {"update-delay", &C::update_delay, "0..1",
         "1: the host applies each gradient a step late, beside the next step's layers"},

        {"", &C::help, "", "Layout"},
        {"dp", &C::dp, "0..1000000", "data-parallel ranks; 0: what the other axes leave"},
        {"tp", &C::tp, "1..1000000",
         "tensor-parallel ranks, which share heads, ffn and vocabulary"},
        {"pp", &C::pp, "1..1000000", "pipeline-parallel ranks"},
        {"cp", &C::cp, "1..1000000",
         "context-parallel ranks, which share the tokens of each sequence"},
        {"cp-method", &C::cp_method, "",
         "how their attention meets all keys; gather: keys and values come to every rank; ulysses: "
         "each rank takes some heads of all tokens; ring: keys go from rank to rank; "
         "ulysses:U,ring:R and ulysses:U,gather:R: of U x R ranks U neighbours share heads"},
        {"cp-order", &C::cp_order, "zigzag|contiguous|striped",
         "which tokens a rank has; zigzag: an early and a late chunk"},
        {"ep", &C::ep, "1..1000000",
         "expert-parallel ranks: so many of the dp x cp ranks share out each block's experts"},
        {"etp", &C::etp, "0..1000000",
         "tensor-parallel ranks that cut each expert; 0: --tp; 1: none, experts stay whole, and "
         "--ep shares them out over dp x cp x tp ranks"},
        {"ep-method", &C::ep_method, "gather|exchange",
         "how tokens reach experts; gather: all come to every rank; exchange: each goes where it "
         "is wanted, which sends less where experts are many and tokens choose few"},
        {"sequence-parallel", &C::sequence_parallel, "",
         "they share the rows of norms and residuals too"},
        {"zero", &C::zero, "0..3",
         "what data-parallel ranks shard: 1 moments, 2 gradients, 3 weights"},
        {"grid-order", &C::grid_order, "tp-pp-dp|tp-dp-pp|pp-tp-dp|pp-dp-tp|dp-tp-pp|dp-pp-tp",
         "which axis has its ranks side by side, which comes next"},
        {"zero-group", &C::zero_group, "0..1000000",
         "data-parallel ranks that share a shard's buckets, such groups replicate; 0: all"},
        {"hpz", &C::hpz, "0..1000000",
         "ZeRO-3: neighbours that share out weights, so that gathers stay among them; gradients, "
         "masters and moments are cut over all data-parallel ranks (hpZ); 0: no"},
        {"pipeline", &C::pipeline, "",
         "gpipe, 1f1b, interleaved, zero-bubble, or a file with a line of slots (F0.1) a rank"},
        {"chunks", &C::chunks, "1..1000", "stages of each pipeline rank"},
        {"prefetch", &C::prefetch, "0..1000",
         "ZeRO-3: layers gathered ahead; --offload: fetched; 0: nothing that costs room overlaps"},
        {"local-ranks", &C::local_ranks, "1..1024", "ranks, as threads of this process"},
        {"fixed-order", &C::fixed_order, "",
         "add ranks in rank order, on GPUs by our own code and not by NCCL's; always so on CPUs"},
        {"verify-every", &C::verify_every, "0..1000000000000",
         "steps between comparisons of what several ranks keep, which each save makes too, and of "
         "what they compute from the same samples (0: never)"},
        {"watchdog", &C::watchdog, "0..1000000",
         "seconds that a rank waits for another until the run ends and names who hangs, and where; "
         "a save must not take as long (0: wait for ever)"},

        {"", &C::help, "", "Files"},
        {"out", &C::out, "", "folder of checkpoints and log.jsonl"},
        {"save-every", &C::save_every, "0..1000000000000",
         "steps between checkpoints (0: by --save-minutes, and at the end)"},
        {"save-minutes", &C::save_minutes, "",
         "minutes between checkpoints, where --out is given (0: by --save-every alone; auto: where "
         "saves and what failures undo cost the least)"},
        {"failure-hours", &C::failure_hours, "0.000001..1000000000",
         "of --save-minutes auto: hours between two failures of a rank; those of a large cluster's "
         "GPUs"},
        {"buddy", &C::buddy, "",
         "folder in the machines' memory (/dev/shm/NAME) for saves of which each part lies on two "
         "machines; %r in it is the rank's number"},
        {"buddy-every", &C::buddy_every, "0..1000000000000", "steps between saves in --buddy"},
        {"save-async", &C::save_async, "",
         "write checkpoints beside the steps, from a copy in the host's memory"},
        {"keep", &C::keep, "1..1000000", "newest checkpoints kept"},
        {"keep-best", &C::keep_best, "",
         "keep the checkpoint of the lowest validation loss too, saved when it is found"},
        {"resume", &C::resume, "",
         "go on from the newest whole checkpoint in --out, with the model, data, optimizer and "
         "adapters it was made with where flags say nothing else; a new run where there is none"},
        {"resume-step", &C::resume_step, "-1..1000000000000",
         "with --resume: from the checkpoint of this step (-1: the newest)"},
        {"use-ema", &C::use_ema, "",
         "with --resume, to evaluate, sample or export: the mean of --ema in the place of the "
         "weights"},
        {"average", &C::average, "",
         "DIR,DIR,...: evaluate, sample or export the mean of several models: Hugging Face "
         "folders, checkpoints RUN/step_N, or a run for all its checkpoints"},
        {"export", &C::export_dir, "",
         "at the end write a Hugging Face folder, with the tokenizer; FILE.bin: llm.c's GPT-2; "
         "FILE.gguf: for llama.cpp"},
        {"merge", &C::merge, "",
         "--export writes the model, with what its adapters change, and not the adapters"},
        {"export-dtype", &C::export_dtype, "fp32|bf16|fp16|q8_0",
         "its element type; q8_0, in 8 bits, for FILE.gguf"},
        {"ds-config", &C::ds_config, "",
         "FILE: DeepSpeed's JSON, or Accelerate's, as flags: a printed line a key; flags that are "
         "given win"},

        {"", &C::help, "", "Looking"},
        {"eval-every", &C::eval_every, "0..1000000000000",
         "steps between validation losses (0: at the end only)"},
        {"eval-tokens", &C::eval_tokens, "1..1000000000000", "validation tokens at most"},
        {"eval", &C::eval, "", "only evaluate, print `val loss`, and leave"},
        {"evaluate", &C::evaluate, "",
         "TASK=FILE,...: score completions at each evaluation: hellaswag, arc-easy, "
         "arc-challenge, piqa, winogrande, lambada"},
        {"sample-every", &C::sample_every, "0..1000000000000",
         "steps between samples (0: at the end only)"},
        {"prompt", &C::prompt, "",
         "text that a sample continues; -: each line of standard input"},
        {"prompts", &C::prompts, "",
         "FILE: at the end continue each line's \"prompt\" (JSON lines; of a .txt: each line) and "
         "write JSON lines, by themselves on standard output"},
        {"completions", &C::completions, "", "FILE: where --prompts writes them"},
        {"slots", &C::slots, "1..65536", "--prompts, grpo: texts that are generated at once"},
        {"chat", &C::chat, "", "at the end talk with the model: a line is a question"},
        {"draft", &C::draft, "",
         "a small model that guesses what texts go on with, for fewer runs of the model and the "
         "same distribution: what --model can be, or a run's folder"},
        {"draft-tokens", &C::draft_tokens, "1..64", "--draft: tokens that it guesses ahead"},
        {"sample-tokens", &C::sample_tokens, "0..16777216", "tokens a sample, at most"},
        {"samples", &C::samples, "1..1000000", "samples of each prompt"},
        {"ignore-eos", &C::ignore_eos, "", "go on behind the token that ends a text"},
        {"temperature", &C::temperature, "0..1000", "0 is greedy"},
        {"top-k", &C::top_k, "0..100000000", "sample from the k likeliest (0: all)"},
        {"top-p", &C::top_p, "0..1", "sample from the likeliest that hold this share"},
        {"device", &C::device, "auto|cpu|cuda", "where it runs"},
        {"graphs", &C::graphs, "",
         "on GPUs: launch a step as one CUDA graph; for steps whose launches take longer than "
         "their kernels"},
        {"explain", &C::explain, "", "print parameters, memory and actions, and run nothing"},
        {"machine", &C::machine, "",
         "with --explain: the step's time on a machine, its parts and mfu, by simulation: h100, "
         "a100-80, rtx4090, ..., or a FILE of `name = value`; a run prints it beside its own"},
        {"calibrate", &C::calibrate, "",
         "FILE: measure this machine for some seconds, and write what --machine FILE reads"},
        {"plan", &C::plan, "none|auto",
         "auto: choose the layout, the micro-batch and recomputation by simulating them on "
         "--machine; --explain prints what it chooses, and why"},
        {"gpus", &C::gpus, "0..1000000", "--plan with --explain: for so many (0: 1)"},
        {"fit", &C::fit, "",
         "GB of a card, or a machine's name: print which models train on one of it, with which "
         "flags, and about how fast; --model: that one alone, and its longest sequence"},
        {"layer", &C::layer, "-1..10000",
         "with --explain: one layer's actions, with what they read and write"},
        {"timeline", &C::timeline, "",
         "FILE.svg: draw the last step, or with --explain the schedule, with --machine in its "
         "time, with --plan auto the layouts; FILE.json: a trace for Chrome"},
        {"profile", &C::profile, "",
         "FILE: a table of what each kind of action took, over all steps but the first"},
        {"log-every", &C::log_every, "0..1000000000000",
         "steps between printed lines (0: each of 100 steps, of more every tenth; on a terminal "
         "one line in place); log.jsonl has all"},
        {"help", &C::help, "", "this text"},
        {"version", &C::version, "", "the program's version, and what it was built with"},
    };
    return table;
}
// clang-format on

// ----------------------------------------------------------------------------
// values

// A field's value as text, which set_field() can read back.
inline std::string field_text(const Config& c, const Field& f) {
    return std::visit(
        [&](auto member) {
            // A stream prints 0.001 as users write it; std::to_string would say 0.001000.
            const auto& v = c.*member;
            if constexpr (std::is_same_v<decltype(v), const std::string&>)
                return v;
            else if constexpr (std::is_same_v<decltype(v), const bool&>)
                return std::string(v ? "true" : "false");
            else {
                std::ostringstream s;
                s << v;
                return s.str();
            }
        },
        f);
}

// Read a number and check its range. Returns "" or what the flag wants instead.
inline std::string parse_number(const std::string& text, double low, double high, bool whole,
                                double* value) {
    char* end = nullptr;
    double v = strtod(text.c_str(), &end);
    *value = v;
    // Refuse trailing characters (12k), and NaN, which lies in no range.
    bool good = !text.empty() && !*end && v >= low && v <= high && (!whole || v == std::floor(v));
    if (good) return "";

    // Whole bounds are written out: a stream would say 1.67772e+07.
    auto bound = [](double x) { return x == std::floor(x) ? concat(int64_t(x)) : concat(x); };
    return concat("wants ", whole ? "a whole number" : "a number", " from ", bound(low), " to ",
                  bound(high), ", not '", text, "'");
}

// Set a flag's field from text. Returns "" or what the flag wants instead.
inline std::string set_field(Config& c, const Flag& f, const std::string& text) {
    // A switch: true or false.
    if (auto b = std::get_if<bool Config::*>(&f.field)) {
        if (text != "true" && text != "false")
            return "wants true or false, not '" + text + "'";
        c.** b = text == "true";
        return "";
    }

    // A text. The row may list the ones allowed.
    if (auto s = std::get_if<std::string Config::*>(&f.field)) {
        std::string accepts = f.accepts, choice;
        c.** s = text;
        if (accepts.empty()) return "";
        for (std::istringstream in(accepts); std::getline(in, choice, '|');)
            if (choice == text) return "";
        return "wants one of " + accepts + ", not '" + text + "'";
    }

    // A number in the row's range "low..high". A double holds every whole number below 2^53, so one
    // parser serves all three types.
    double low = -1e15, high = 1e15, v = 0;
    const char* dots = strstr(f.accepts, "..");
    if (dots) {
        low = atof(f.accepts);
        high = atof(dots + 2);
    }
    bool whole = !std::holds_alternative<double Config::*>(f.field);
    std::string wrong = parse_number(text, low, high, whole, &v);
    if (!wrong.empty()) return wrong;

    // Store the number in the field's own type.
    if (auto i = std::get_if<int Config::*>(&f.field)) {
        if (v < INT_MIN || v > INT_MAX) return "is too large: " + text;
        c.** i = int(v);
    }
    if (auto i = std::get_if<int64_t Config::*>(&f.field))
        c.** i = int64_t(v);
    if (auto d = std::get_if<double Config::*>(&f.field))
        c.** d = v;
    return "";
}

// ----------------------------------------------------------------------------
// names

// The fewest letters to insert, drop or change until a is b (Levenshtein distance). One row of the
// table is kept at a time.
inline size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); j++)
        row[j] = j;
    for (size_t i = 1; i <= a.size(); i++) {
        // row[j] is the distance from a's first i letters to b's first j. `diagonal` is the entry
        // of the row before that the new row has just overwritten.
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); j++) {
            size_t above = row[j];
            row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
            diagonal = above;
        }
    }
    return row[b.size()];
}

// The name that the user probably meant, or "". A name is no misspelling if it is four letters
// away, or if more than half of its letters differ.
inline std::string nearest(const std::string& name, const std::vector<std::string>& names) {
    // Among equally near names, the first in the table wins.
    std::string best;
    size_t least = 4;
    for (const std::string& n : names) {
        size_t distance = edit_distance(name, n);
        if (distance >= least || 2 * distance > std::max(name.size(), n.size()))
            continue;
        least = distance;
        best = n;
    }
    return best;
}

// The row of a flag, or null if there is none.
inline const Flag* find_flag(const std::string& name) {
    for (const Flag& f : config_table())
        if (*f.name && name == f.name)
            return &f;
    return nullptr;
}

// Refuse an unknown flag, and offer the nearest name.
inline std::string unknown_flag(const std::string& name) {
    std::vector<std::string> names;
    for (const Flag& f : config_table())
        if (*f.name) names.push_back(f.name);
    std::string close = nearest(name, names);
    return "unknown flag --" + name + (close.empty() ? "" : ": did you mean --" + close + "?") +
           " (--help lists them all)";
}

// ----------------------------------------------------------------------------
// reading: the command line, and files of `name = value` lines

// Set a flag by name. Returns "" or a message that begins with the flag.
inline std::string set_flag(Config& c, const std::string& name, const std::string& value) {
    const Flag* f = find_flag(name);
    if (!f) return unknown_flag(name);
    // Empty is not absent: only a prompt may be empty, where a file names one and none is wanted.
    if (value.empty() && name != "prompt")
        return "--" + name + " wants a value, and this is empty: is a shell's variable not set?";
    std::string wrong = set_field(c, *f, value);
    c.given.insert(name);
    return wrong.empty() ? "" : "--" + name + " " + wrong;
}

// Read a file of `name = value` lines, where # begins a comment. A message begins with FILE:LINE.
inline std::string read_config_file(Config& c, const std::string& path) {
    std::string line, text, unread = read_whole_file(path, &text);
    if (!unread.empty()) return "--config " + unread;
    if (text.find_first_not_of(" \t\r\n") == std::string::npos)
        return "--config " + path + ": is empty: leave it out, or give it lines";
    // Trim carriage returns too: files from Windows end lines in CR LF.
    auto trim = [](std::string s) {
        size_t a = s.find_first_not_of(" \t\r"), b = s.find_last_not_of(" \t\r");
        return a == std::string::npos ? "" : s.substr(a, b - a + 1);
    };

    // Set one flag a line. Line numbers count from 1, as in editors.
    std::istringstream in(text);
    for (int number = 1; std::getline(in, line); number++) {
        line = trim(line.substr(0, line.find('#')));
        if (line.empty()) continue;
        std::string at = concat(path, ":", number, ": ");
        size_t equals = line.find('=');
        if (equals == std::string::npos)
            return at + "wants `name = value`, not '" + line + "'";
        std::string name = trim(line.substr(0, equals));
        std::string wrong = set_flag(c, name, trim(line.substr(equals + 1)));
        if (!wrong.empty()) return at + wrong;
    }
    return "";
}

// Read --name value or --name=value; a switch may stand alone. --config FILE is read where it
// stands, so later arguments override it.
inline std::string parse_arguments(Config& c, int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        std::string word = argv[i];
        if (word == "-h") word = "--help";
        if (word.rfind("--", 0) != 0)
            return "'" + word + "' is no flag: flags look like --steps 100 (--help lists them all)";

        // Find the flag. --config is not in the table: otherwise a file could read itself.
        size_t equals = word.find('=');
        bool joined = equals != std::string::npos;
        std::string name = word.substr(2, joined ? equals - 2 : equals);
        const Flag* f = find_flag(name);
        if (!f && name != "config") return unknown_flag(name);

        // A switch takes the next word as its value only if that is true or false.
        std::string value = joined ? word.substr(equals + 1) : i + 1 < argc ? argv[i + 1] : "";
        bool is_switch = f && std::holds_alternative<bool Config::*>(f->field);
        bool alone = is_switch && !joined && value != "true" && value != "false";
        if (alone) value = "true";
        if (!joined && !alone && ++i == argc)
            return "--" + name + " wants a value";

        // Read the file, or set the flag.
        std::string wrong =
            name == "config" ? read_config_file(c, value) : set_flag(c, name, value);
        if (!wrong.empty()) return wrong;
        if (name == "reward") c.typed_reward = value;
    }
    return "";
}

// ----------------------------------------------------------------------------
// the copy in log and checkpoint

// All fields by their flags' names, as log.jsonl and checkpoints keep them.
inline nlohmann::json config_json(const Config& c) {
    nlohmann::json j;
    for (const Flag& f : config_table())
        if (*f.name)
            std::visit([&](auto member) { j[f.name] = c.*member; }, f.field);
    if (!c.start.empty()) j["start"] = c.start;
    return j;
}

// ----------------------------------------------------------------------------
// what several fields mean together, or one whose value is a word

// The ranks of one stage that see different tokens, and the ranks of all axes together.
inline int data_ranks(const Config& c) { return c.dp * c.cp; }
// Whether weights alone are shared out among neighbours: --hpz 1 would cut none.
inline bool keeps_weights_near(const Config& c) { return c.hpz > 1; }
inline int rank_count(const Config& c) { return data_ranks(c) * c.tp * c.pp; }

// Whether tensor-parallel ranks leave experts whole, and how many ranks --ep may choose from.
inline bool has_whole_experts(const Config& c) {
    return c.etp == 1 && c.tp > 1;
}
inline int routing_ranks(const Config& c) {
    return data_ranks(c) * (has_whole_experts(c) ? c.tp : 1);
}

// Whether the run trains.
inline bool has_training(const Config& c) {
    return c.steps > 0 && !c.eval && !c.explain;
}

// Whether weights are drawn: --model names neither files nor a checkpoint.
inline bool has_new_weights(const Config& c) {
    struct stat s;
    bool file = stat(c.model.c_str(), &s) == 0;
    return c.start.empty() && (c.scratch || !file);
}

// Where weights that are not drawn come from.
inline const std::string& base_name(const Config& c) {
    return c.start.empty() ? c.model : c.start;
}

// Whether the run has adapters: new ones, or those of folders.
inline bool has_adapters(const Config& c) {
    return c.lora > 0 || c.prefix > 0 || !c.adapter.empty() || !c.adapters.empty();
}

// The objective of --loss and its parameters.
inline LossKind loss_kind(const std::string& loss) {
    if (loss == "dpo") return LossKind::DPO;
    if (loss == "ipo") return LossKind::IPO;
    if (loss == "simpo") return LossKind::SIMPO;
    if (loss == "kto") return LossKind::KTO;
    if (loss == "grpo") return LossKind::GRPO;
    if (loss == "distill") return LossKind::DISTILL;
    return loss == "orpo" ? LossKind::ORPO : LossKind::NLL;
}
inline Objective objective_of(const Config& c) {
    Objective o;
    o.kind = loss_kind(c.loss);
    o.beta = c.beta;
    o.smoothing = c.label_smoothing;
    o.gamma = c.gamma;
    o.desirable = c.desirable_weight;
    o.undesirable = c.undesirable_weight;
    o.share = c.distill_share;
    o.temperature = c.distill_temperature;
    o.kl = c.kl == "k2" ? KlEstimate::K2 : KlEstimate::K3;
    o.old_policy = c.loss == "grpo" && c.updates > 1;
    o.clip_low = c.clip_low;
    o.clip_high = c.clip_high;
    return o;
}
// Whether the data are conversations or pairs; a teacher reads either these or text.
inline bool has_conversations(const Config& c) {
    return c.loss == "distill" ? c.data.ends_with(".jsonl") : c.loss != "lm";
}
// Whether the run trains on pairs of answers.
inline bool has_pairs(const Config& c) { return objective_of(c).pairs(); }

// Whether the run samples the answers that it trains on.
inline bool has_rollouts(const Config& c) { return c.loss == "grpo" && c.steps > 0; }

// Whether no flag bounds their length, and so the time of sampling.
inline bool has_open_answers(const Config& c) { return has_rollouts(c) && c.answer_tokens == 0; }

// Whether data-parallel ranks share out what they sample. Those that share out experts must run
// equal batches, so they sample the same.
inline bool answers_are_shared(const Config& c) { return c.dp > 1 && c.ep == 1; }

// Whether it keeps a copy of its starting weights, and whether it evaluates what it has sampled.
inline bool keeps_start(const Config& c) { return has_rollouts(c) && c.beta > 0; }
inline bool evaluates_rollouts(const Config& c) {
    return keeps_start(c) || (has_rollouts(c) && c.updates > 1);
}

// The flags that --plan auto chooses. It chooses --micro-batch too, which is not listed: without
// --batch-tokens that flag determines the batch.
inline const std::vector<const char*>& planned_flags() {
    static const std::vector<const char*> names = {
        "dp", "tp", "pp", "cp", "ep", "zero", "pipeline", "chunks", "sequence-parallel",
        "recompute"};
    return names;
}

// The choice of --cp-method: one method for all ranks, or a hybrid: Ulysses among neighbours, and
// another method across the groups.
struct ContextChoice {
    ContextMethod method = ContextMethod::GATHER;
    int heads = 1; // neighbours that share heads, in a hybrid
    int keys = 0;  // groups of neighbours; 0: no hybrid
};

// Read one method by its name. Returns false if there is none of that name.
inline bool read_one_method(const std::string& name, ContextMethod* method) {
    // Names in the order of the enumeration.
    const char* names[] = {"gather", "ulysses", "ring"};
    for (int i = 0; i < 3; i++)
        if (name == names[i]) {
            *method = ContextMethod(i);
            return true;
        }
    return false;
}
// Read --cp-method. Returns false if it is malformed.
inline bool read_context_method(const std::string& text, ContextChoice* choice) {
    // Read a single method for all ranks. Neighbours then share no heads.
    *choice = {};
    if (read_one_method(text, &choice->method)) return true;

    // Read a hybrid: both numbers, and nothing behind them.
    char across[8] = "";
    int end = 0;
    sscanf(text.c_str(), "ulysses:%5d,%7[a-z]:%5d%n", &choice->heads, across, &choice->keys, &end);
    bool whole = end > 0 && size_t(end) == text.size();
    bool counts = choice->heads > 0 && choice->keys > 0;
    bool named = read_one_method(across, &choice->method);
    return whole && counts && named && choice->method != ContextMethod::ULYSSES;
}

} // namespace llmc
