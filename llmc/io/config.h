// config.h - flags by subject and by program: command line, --config files, log's copy
//   Each row of the table is a flag: its name, its field, what it accepts, a line of help.
//   The row checks a flag's value; config_check.h has the checks that involve several flags.
//   A group of rows says which programs take it. tune_gpt takes all that train_gpt takes, and
//   plan_gpt what both take: these flags are its question.
#pragma once
#include <algorithm>
#include <climits>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <variant>
#include <vector>
#include "../action.h"
#include "../layout.h"
#include "../ops/objective.cuh"
#include "../comm/text.h"
#include "files.h"

namespace llmc {

// clang-format off
// A run's options by subject. The member names are not the flags' names: the table below joins the
// two. The initial values are the defaults that --help shows.

// The model; a size of 0 keeps that of --model.
struct ModelFlags {
    std::string model = "tiny", position;
    bool scratch = false;
    // nanochat's depth dial: D or D:RATIO (take_depth)
    std::string depth;
    // L, NH, NKV, C, F and V of a Shape
    int layers = 0, heads = 0, kv_heads = 0, channels = 0, ffn = 0, vocab = 0;
    // E and K, experts made by upcycling; then the weights of the router's terms
    // in the trained loss
    int experts = 0, experts_per_token = 0, upcycle = 0;
    std::string router;
    double balance = 0.01, z_loss = 0, router_bias_rate = 0, expert_capacity = 0;
};

// Data, and what is trained.
struct DataFlags {
    std::string data, val, tokenizer, add_tokens;
    // T and B; one forward and backward pass of a rank takes B sequences of T tokens
    int seq = 0, micro_batch = 8;
    // tokens an optimizer step, counted over all data-parallel ranks
    int64_t batch_tokens = 0;
    std::string documents = "stream";
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
    std::string reward, advantage = "mean";
    // steps on the answers of a rollout; how far the ratio to the policy that sampled may go
    int updates = 1;
    double clip_low = 0.2, clip_high = 0.2;
    double reward_seconds = 60;
};

// Shards of tokens.
struct PrepareFlags {
    std::string prepare, field = "text";
    // tokens; 0: a single shard, and no validation shard
    int64_t shard_tokens = 0, val_tokens = 0;
    int threads = 0;
    // tokens of a new tokenizer; 0: none is trained
    int train_tokenizer = 0;
    std::string pattern = "gpt4";
};

// The optimizer.
struct OptimizerFlags {
    int64_t steps = 600;
    std::string optimizer = "adamw", schedule = "cosine";
    // min_lr -1 becomes a tenth of lr in config_check()
    double lr = 1e-3, min_lr = -1;
    int64_t warmup = 20;
    double weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, clip = 1.0;
    double ema = 0;
    bool use_ema = false;
    int64_t seed = 1337;
};

// Adapters; an alpha of 0 becomes twice the rank in config_check().
struct AdapterFlags {
    int lora = 0, prefix = 0;
    double lora_alpha = 0;
    std::string lora_targets = "all", lora_layers = "all", adapter, adapters;
    bool lora_rs = false, merge = false;
    double lora_plus = 1;
};

// Numbers and memory.
struct MemoryFlags {
    std::string precision = "fp32";
    std::string fp8 = "none", loss_scale = "dynamic";
    std::string gradients = "float", masters = "float", states = "float", weights = "float";
    std::string recompute = "none", offload = "none", offload_to = "cpu";
    double memory = 0;
};

// The layout of ranks.
struct LayoutFlags {
    // ranks of each axis; their product is the number of ranks. dp 0 is what the other axes leave.
    int dp = 0, tp = 1, pp = 1, cp = 1, ep = 1, etp = 0;
    int zero = 0, zero_group = 0, hpz = 0, chunks = 1, local_ranks = 1;
    bool sequence_parallel = false, fixed_order = false;
    std::string pipeline = "1f1b", grid_order = "tp-pp-dp";
    std::string cp_method = "gather", ep_method = "gather";
    int64_t verify_every = 0; // steps
    double watchdog = 600;    // seconds
};

// Checkpoints and exports.
struct FileFlags {
    // --out survives a kill and can be resumed; an export holds only weights
    std::string out, export_dir, export_dtype = "fp32", average;
    std::string save_every = "10m"; // read_save_rule()
    std::string buddy;
    int64_t buddy_every = 0; // steps: split_buddy() takes them from --buddy
    bool save_async = false;
    std::string keep = "2"; // newest_kept()
    bool resume = false;
    // -1: the newest checkpoint
    int64_t resume_step = -1;
};

// Evaluation, samples, plans.
struct LookingFlags {
    // eval_every in steps, eval_tokens in tokens, the others in steps
    int64_t eval_every = 0, eval_tokens = 16384, sample_every = 0, log_every = 0;
    bool eval = false;
    std::string tasks, expect, prompt, prompts, completions;
    int sample_tokens = 200, samples = 1, slots = 32;
    bool chat = false;
    std::string draft;
    int draft_tokens = 4;
    bool ignore_eos = false;
    double temperature = 1.0, top_p = 1.0;
    int top_k = 0;
    std::string device = "auto", machine, calibrate, fit, timeline;
    std::string plan = "none";
    int gpus = 0;
    bool graphs = false, explain = false, help = false, version = false;
    // -1: no layer's actions are printed
    int64_t layer = -1;
};

// All of them, and where they come from.
struct Config : ModelFlags, DataFlags, PrepareFlags, OptimizerFlags,
                AdapterFlags, MemoryFlags, LayoutFlags, FileFlags, LookingFlags {
    // names of the flags that the command line and its files set, and of those that a checkpoint
    // has set; all others have their defaults
    std::set<std::string> given = {}, adopted = {};
    // --reward as this call's own arguments have it: a file's program is not run
    std::string typed_reward;
    // the checkpoint that --model names: its weights are those of `model`. Empty: none
    std::string start;
    // the program whose flags these are, and its words that are no flags; null: any flags
    const struct Program* program = nullptr;
    std::vector<std::string> paths = {};
};
// clang-format on

// Whether the user set a flag. A default that follows from other flags must not override it.
inline bool was_given(const Config& c, const std::string& name) { return c.given.count(name) > 0; }

// Whether the list of --offload names `what`.
inline bool offloads(const Config& c, const std::string& what) {
    return ("," + c.offload + ",").find("," + what + ",") != std::string::npos;
}

// A field's place in Config and its type. The type decides how a value is parsed.
typedef std::variant<int Config::*, int64_t Config::*, double Config::*, bool Config::*,
                     std::string Config::*>
    Field;

// A flag. A row with an empty name begins a group of flags: `accepts` lists the programs that take
// them, and `help` is the group's title.
struct Flag {
    const char* name;
    Field field;
    // "a|b|c": one of them, in the order of their enumeration; "low..high": a number; "": any
    const char* accepts;
    const char* help;
    int64_t Config::*number = nullptr;     // of a switch that takes a number too
    std::string Config::*settings = nullptr; // of a switch that takes NAME=VALUE too
};

// A program: what --help says of it, and whose groups of flags it takes. Its own come first.
struct Program {
    const char* name;
    const char* purpose;
    std::vector<const char*> takes;
    const char* examples;
    const char* words = ""; // what it takes besides flags, as --help shows it
    bool trains = false;
};

// clang-format off
// Every flag, in the order --help prints. Renaming one breaks users' config files.
inline const std::vector<Flag>& config_table() {
    typedef Config C;
    static const std::vector<Flag> table = {
        {"", &C::help, "train sample kept shape", "Model"},
        {"model", &C::model, "",
         "a preset (listed below), or whose weights are loaded: a Hugging Face folder, a .bin of "
         "llm.c or llama2.c, a run's folder"},

        {"", &C::help, "train kept shape", "Shape of new weights"},
        {"scratch", &C::scratch, "",
         "with a folder or a file: take its shape and draw new weights"},
        {"layers", &C::layers, "0..1024", "number of blocks, instead of the preset's"},
        {"heads", &C::heads, "0..100000", "number of attention heads, instead of the preset's"},
        {"kv-heads", &C::kv_heads, "0..100000",
         "number of key/value heads (GQA), instead of the preset's"},
        {"channels", &C::channels, "0..1000000",
         "width of the residual stream, instead of the preset's"},
        {"ffn", &C::ffn, "0..10000000", "width of the feed-forward layer, instead of the preset's"},
        {"vocab", &C::vocab, "0..100000000",
         "vocabulary size, instead of the preset's; new weights take the tokenizer's"},
        {"position", &C::position, "learned|rope|alibi",
         "position encoding, instead of the preset's"},

        {"", &C::help, "train kept shape", "Experts"},
        {"experts", &C::experts, "0..4096",
         "number of experts in place of a Llama's ffn, each --ffn wide"},
        {"experts-per-token", &C::experts_per_token, "0..32",
         "top-k of the router: experts per token (0: the preset's, or 2)"},
        {"router", &C::router, "softmax|renormalised|sigmoid",
         "gate values: softmax over all experts, renormalised over the chosen ones, or sigmoid"},
        {"balance", &C::balance, "0..1000",
         "weight of the load-balancing loss of experts, per sequence"},
        {"z-loss", &C::z_loss, "0..1000",
         "weight of the router z-loss: the squared log-sum-exp of its logits"},
        {"router-bias-rate", &C::router_bias_rate, "0..1",
         "aux-loss-free balancing (DeepSeek-V3): step size of the per-expert routing bias; V3 "
         "took 0.001"},
        {"expert-capacity", &C::expert_capacity, "0..1000",
         "capacity factor: at most this many times the even share of a sequence's choices per "
         "expert; later ones are dropped (0: no limit)"},

        {"", &C::help, "train prepare kept", "Text"},
        {"data", &C::data, "",
         "training text (.txt) or token shards (.bin), commas or a pattern between files; without "
         "it: this project's own sources; in-order:FILES: unshuffled, whole steps of each file; "
         "prepare_gpt: .txt, .jsonl, each also .gz or .zst; "
         ".parquet; nanoGPT's .bin; - for JSON lines on standard input"},

        {"", &C::help, "train sample convert prepare kept", "Tokens"},
        {"tokenizer", &C::tokenizer, "",
         "how text becomes tokens: byte, or PATH: tokenizer.json, .model, .bin, .tiktoken, or a "
         "folder with one (GPT-2: vocab.bpe, encoder.json); without it: the --model folder's own, "
         "else byte"},

        {"", &C::help, "train prepare kept", "Sequence"},
        {"seq", &C::seq, "0..16777216", "tokens a sequence, T (0: 256, or what the model allows)"},

        {"", &C::help, "train prepare kept", "Documents"},
        {"document-end", &C::document_end, "-1..100000000",
         "token id that ends a document (-1: the shards' or the tokenizer's end of text)"},

        {"", &C::help, "train kept", "Data"},
        {"val", &C::val, "", "validation files; without it: the last tenth of each training file"},
        {"micro-batch", &C::micro_batch, "1..1000000", "sequences per micro-batch, B"},
        {"batch-tokens", &C::batch_tokens, "0..1000000000000",
         "tokens per optimizer step over all ranks, reached by gradient accumulation (0: one "
         "micro-batch)"},
        {"documents", &C::documents, "stream|mask|best-fit|best-fit,mask",
         "stream: sequences begin anywhere; mask: attention and loss stop at a document's end, and "
         "positions restart; best-fit: each sequence begins with a document and takes the longest "
         "that fit, then the beginning of a short one, whose rest is dropped"},

        {"", &C::help, "train kept", "Depth dial"},
        {"depth", &C::depth, "",
         "D or D:RATIO: a nanochat of D layers, without value embeddings, smear and backout; sets "
         "width, heads, batch, steps, rates and decay as nanochat does, for RATIO tokens a weight "
         "(12), and prints them; flags that are given win"},

        {"", &C::help, "train kept", "Optimizer"},
        {"steps", &C::steps, "0..1000000000000", "optimizer steps; 0: only generate"},
        {"optimizer", &C::optimizer, "",
         "adamw, sgd without momentum, or muon for matrices of blocks and AdamW for the rest; "
         "behind commas AdamW's rates (--lr) table=, head=, vectors=, its decay=, beta1= and "
         "decay-vectors, of all but matrices of blocks; and muon's settings: ns=simple, quintic, "
         "polar, polar8, aol or convergent; scale=rms, shape or unit; momentum=X or "
         "FIRST:LAST:STEPS; heavy-ball; cautious; normuon=X (NorMuon); muoneq; muon+"},
        {"lr", &C::lr, "0..1000", "peak learning rate"},
        {"min-lr", &C::min_lr, "-1..1000", "learning rate at the end (-1: a tenth of the peak)"},
        {"warmup", &C::warmup, "0..1000000000000", "steps of linear warm-up"},
        {"schedule", &C::schedule, "",
         "decay of the learning rate after warm-up: cosine, linear, constant, or wsd, which falls "
         "in the last fifth of the run (wsd:0.7: the last 0.7 of it)"},
        {"weight-decay", &C::weight_decay, "0..1000", "decoupled decay of matrices and tables"},
        {"beta1", &C::beta1, "0..0.99999", "AdamW's decay rate of the first moment"},
        {"beta2", &C::beta2, "0..0.99999", "AdamW's decay rate of the second moment"},
        {"eps", &C::eps, "0..1", "AdamW's epsilon"},
        {"clip", &C::clip, "0..1000000", "gradient clipping: largest global norm (0: off)"},

        {"", &C::help, "train sample convert kept", "Random numbers"},
        {"seed", &C::seed, "0..9007199254740991",
         "random seed of initial weights, data order and sampling"},

        {"", &C::help, "train sample kept", "Numbers"},
        {"precision", &C::precision, "fp32|bf16|fp16",
         "type of weights and activations; sums, weight gradients, moments and master weights "
         "stay float"},

        {"", &C::help, "train kept", "Numbers of a step"},
        {"fp8", &C::fp8, "none|block|tensor|delayed|mx|nvfp4",
         "FP8 matmuls in the blocks: scales per 128-element block, per tensor, delayed (amax "
         "history), MXFP8 (per 32, Blackwell), or 4 bits, NVFP4; bf16 only"},
        {"loss-scale", &C::loss_scale, "", "fp16 loss scale: dynamic, or a constant power of two"},
        {"gradients", &C::gradients, "float|bf16|fp8",
         "type in which data-parallel ranks reduce gradients: float; bf16, half the bytes; fp8, "
         "a quarter, best with --zero"},
        {"masters", &C::masters, "float|remainder|none",
         "master weights of bf16 parameters: float; remainder, the 16 missing bits, as exact; "
         "none, stochastic rounding"},
        {"states", &C::states, "float|bf16|8bit",
         "AdamW's moments: float; bf16, stochastically rounded; 8bit, in blocks of 256 elements"},

        {"", &C::help, "train sample", "Memory"},
        {"explain", &C::explain, "0..10000",
         "print parameters, memory and actions, and run nothing; with a number that layer's "
         "actions, and what they read and write", &C::layer},
        {"memory", &C::memory, "0..1000000",
         "GiB a rank may take; a plan that needs more is refused, with flags that fit (0: what "
         "the machine has)"},

        {"", &C::help, "train", "Recomputation and offload"},
        {"recompute", &C::recompute, "none|selective|attention|ffn|full|auto",
         "activation recomputation per block: selective, norms and activation functions; "
         "attention, ffn, that branch's products too; full, all but the block's input; auto, "
         "the least arithmetic that fits"},
        {"offload", &C::offload, "",
         "states kept off the device while unused: optimizer, activations, weights, gradients, "
         "with commas; optimizer,update: the CPU updates, and masters and moments stay there"},
        {"offload-to", &C::offload_to, "",
         "target of --offload: cpu, the host's memory, or a folder for an unlinked file"},

        {"", &C::help, "train sample convert", "Ranks"},
        {"dp", &C::dp, "0..1000000", "data-parallel ranks (0: what the other axes leave)"},
        {"tp", &C::tp, "1..1000000", "tensor-parallel ranks: they shard heads, ffn and vocabulary"},
        {"pp", &C::pp, "1..1000000", "pipeline-parallel ranks"},
        {"ep", &C::ep, "1..1000000",
         "expert-parallel ranks: each block's experts are sharded over this many of the dp x cp "
         "ranks"},
        {"local-ranks", &C::local_ranks, "1..1024", "ranks as threads of this process"},
        {"watchdog", &C::watchdog, "0..1000000",
         "seconds that a rank waits for another before the run ends and names who hangs, and "
         "where (0: for ever)"},

        {"", &C::help, "train", "Layout"},
        {"cp", &C::cp, "1..1000000",
         "context-parallel ranks: they shard the tokens of each sequence"},
        {"cp-method", &C::cp_method, "",
         "context parallelism: gather, all-gather keys and values; ulysses, all-to-all over "
         "heads; ring, keys pass from rank to rank; ulysses:U,ring:R and ulysses:U,gather:R, U "
         "x R ranks of which U neighbours use Ulysses"},
        {"etp", &C::etp, "0..1000000",
         "tensor-parallel ranks per expert (0: --tp; 1: whole experts, sharded by --ep over dp x "
         "cp x tp ranks)"},
        {"ep-method", &C::ep_method, "gather|exchange",
         "expert parallelism: gather, all-gather every token; exchange, all-to-all of the "
         "tokens that an expert wants"},
        {"sequence-parallel", &C::sequence_parallel, "",
         "sequence parallelism: shard norms and the residual stream over the tp ranks"},
        {"zero", &C::zero, "0..3",
         "ZeRO stage: data-parallel ranks shard 1 optimizer state, 2 and gradients, 3 and "
         "weights"},
        {"grid-order", &C::grid_order, "tp-pp-dp|tp-dp-pp|pp-tp-dp|pp-dp-tp|dp-tp-pp|dp-pp-tp",
         "order of the axes in the numbering of ranks, nearest first"},
        {"zero-group", &C::zero_group, "0..1000000",
         "data-parallel ranks per ZeRO sharding group; groups are replicas of each other (0: "
         "all)"},
        {"hpz", &C::hpz, "0..1000000",
         "ZeRO-3: shard weights within groups of N neighbouring ranks, all other state over all "
         "ranks (hpZ) (0: off)"},
        {"pipeline", &C::pipeline, "",
         "pipeline schedule: gpipe, 1f1b, interleaved, zero-bubble, or a file with a line of "
         "slots (F0.1) per rank"},
        {"chunks", &C::chunks, "1..1000", "pipeline stages per rank (virtual stages)"},
        {"fixed-order", &C::fixed_order, "",
         "sum in rank order on GPUs, by our own code instead of NCCL: bit-equal layouts; always "
         "so on CPUs"},
        {"verify-every", &C::verify_every, "0..1000000000000",
         "steps between checks for silent data corruption: replicas are compared, and a step is "
         "repeated on all ranks (0: only replicas, at each save)"},

        {"", &C::help, "train", "Checkpoints"},
        {"out", &C::out, "", "folder of checkpoints and log.jsonl"},
        {"save-every", &C::save_every, "",
         "checkpoint interval of --out: steps, as 500; minutes, as 10m; auto or auto:HOURS: "
         "Young's interval, from the cost of a save and the mean hours between two failures of a "
         "rank, 50700 without HOURS (0: at the end only)"},
        {"buddy", &C::buddy, "",
         "in-memory replication: FOLDER:STEPS, a folder in the machines' memory and the steps "
         "between saves to it, as /dev/shm/run:10; each part lies on two machines; %r in FOLDER is "
         "the rank's number"},
        {"save-async", &C::save_async, "",
         "write checkpoints in parallel to the steps, from a copy in the host's memory"},
        {"keep", &C::keep, "",
         "newest checkpoints kept, as 3; 3,best: and that of the lowest validation loss"},
        {"resume", &C::resume, "0..1000000000000",
         "go on from the newest whole checkpoint in --out, or from that of this step, with the "
         "model, data, optimizer and adapters it was made with where flags say nothing else; a new "
         "run where there is none", &C::resume_step},

        {"", &C::help, "tune convert", "Weights of a checkpoint"},
        {"use-ema", &C::use_ema, "",
         "evaluate, sample or export the moving average of --ema instead of the weights"},

        {"", &C::help, "train", "Export"},
        {"export", &C::export_dir, "",
         "at the end write a Hugging Face folder, with the tokenizer; FILE.bin: llm.c's GPT-2 "
         "(convert_gpt also writes FILE.gguf)"},

        {"", &C::help, "convert", "Type of an export"},
        {"export-dtype", &C::export_dtype, "fp32|bf16|fp16|q8_0",
         "element type of the export; q8_0: 8 bits, for FILE.gguf"},

        {"", &C::help, "train", "Validation"},
        {"eval-every", &C::eval_every, "0..1000000000000",
         "steps between validation losses (0: at the end only)"},
        {"eval-tokens", &C::eval_tokens, "1..1000000000000", "validation tokens at most"},
        {"eval", &C::eval, "",
         "only evaluate, print `val loss`, and leave; TASK=FILE,...: score completions at each "
         "evaluation, with --steps 0 at the only one: hellaswag, arc-easy, arc-challenge, piqa, "
         "winogrande, lambada; core=FOLDER: CORE's tasks", nullptr, &C::tasks},
        {"expect", &C::expect, "",
         "FILE of lines `step mean deviation`: print at each validation of such a step whether "
         "the loss is within four deviations"},
        {"sample-every", &C::sample_every, "0..1000000000000",
         "steps between samples (0: at the end only)"},

        {"", &C::help, "train sample", "Samples"},
        {"prompt", &C::prompt, "",
         "text that a sample continues; -: each line of standard input"},
        {"sample-tokens", &C::sample_tokens, "0..16777216", "tokens per sample, at most"},
        {"temperature", &C::temperature, "0..1000", "sampling temperature (0: greedy)"},

        {"", &C::help, "train", "Plan"},
        {"machine", &C::machine, "",
         "with --explain: the step's time on a machine, its parts and mfu, by simulation: h100, "
         "a100-80, rtx4090, ..., or a FILE of `name = value`; a run prints it beside its own"},
        {"plan", &C::plan, "none|auto",
         "auto: choose layout, micro-batch and recomputation by simulation on --machine"},
        {"timeline", &C::timeline, "",
         "FILE.svg: draw the last step, or with --explain the schedule, in a machine's time where "
         "one is named; FILE.json: a trace for Chrome; FILE.txt: a table of what each kind of "
         "action took, over all steps but the first"},
        {"log-every", &C::log_every, "0..1000000000000",
         "steps between printed lines (0: each of 100 steps, of more every tenth; on a terminal "
         "one line in place); log.jsonl has all"},
        {"graphs", &C::graphs, "", "GPUs: launch a step as one CUDA graph"},

        {"", &C::help, "tune prepare kept", "Objective"},
        {"loss", &C::loss, "lm|sft|dpo|ipo|simpo|orpo|kto|grpo|distill",
         "what is trained; lm: every token; sft: the answers of conversations, which --data holds "
         "as JSON lines (.jsonl); distill: text or answers, and what --teacher says of each token; "
         "kto: answers that are desirable or not, lines have prompt, "
         "completion, label; grpo: answers that the model samples, by --reward, lines have prompt, "
         "answer; the others: to prefer one answer, lines have prompt, chosen, rejected"},

        {"", &C::help, "tune kept", "Preferences, rewards, distillation"},
        {"beta", &C::beta, "0..1000",
         "preference losses: weight of the implicit reward, or orpo's odds-ratio term (0: 0.1; "
         "simpo 2); grpo: weight of the KL divergence from the starting weights (0: none)"},
        {"label-smoothing", &C::label_smoothing, "0..0.49999",
         "dpo: share of pairs assumed to be labelled wrongly (cDPO)"},
        {"gamma", &C::gamma, "-1..1000", "simpo: target reward margin (-1: 0.5)"},
        {"desirable-weight", &C::desirable_weight, "0..1000",
         "kto: weight of the loss on desirable answers"},
        {"undesirable-weight", &C::undesirable_weight, "0..1000",
         "kto: weight of the loss on undesirable answers"},
        {"group", &C::group, "2..65536",
         "grpo: sampled answers per prompt, whose rewards are compared"},
        {"answer-tokens", &C::answer_tokens, "0..16777216",
         "grpo: tokens per sampled answer, at most (0: as many as --seq leaves)"},
        {"reward", &C::reward, "",
         "grpo: exact, number, regex: 1 for an answer that is the line's, whose last number is the "
         "line's last, in which the line's pattern is found; else 0; command:PROGRAM: it reads "
         "the lines with a \"completion\" each and prints a number each; no shell runs it"},
        {"reward-seconds", &C::reward_seconds, "0.001..1000000",
         "grpo: time limit of the reward program for a step's answers, in seconds"},
        {"advantage", &C::advantage, "mean|std",
         "grpo: reward minus the group's mean; std: divided by the group's deviation too"},
        {"updates", &C::updates, "1..10000",
         "grpo: optimizer steps per rollout, each counted by --steps (TRL: num_iterations)"},
        {"clip-low", &C::clip_low, "0..1",
         "grpo: lower clipping range of the policy ratio (epsilon)"},
        {"clip-high", &C::clip_high, "0..1000",
         "grpo: upper clipping range of the policy ratio (epsilon_high)"},
        {"teacher", &C::teacher, "",
         "distill: teacher with the same vocabulary: a Hugging Face folder, a .bin or a run's "
         "folder"},
        {"distill-share", &C::distill_share, "0..1",
         "distill: weight of the teacher's distribution; the data's tokens have the rest"},
        {"distill-temperature", &C::distill_temperature, "0.01..1000",
         "distill: temperature of both models' distributions"},

        {"", &C::help, "tune sample prepare convert kept", "Conversations"},
        {"chat-format", &C::chat_format,
         "auto|chatml|chatml-bos|phi-4|llama2|llama3|llama3.1|mistral|mistral-v1|mistral-v3|"
         "mistral-v3-tekken|mistral-v7|mistral-v7-tekken|zephyr|nanochat|alpaca|plain",
         "how conversations are written; auto: as the --model folder's chat template has it; "
         "without one as the tokenizer's special tokens say, else plain"},

        {"", &C::help, "tune kept", "New adapters"},
        {"lora", &C::lora, "0..65536",
         "LoRA: rank of new adapters; only they are trained, without weight decay by default "
         "(0: train all weights)"},
        {"lora-alpha", &C::lora_alpha, "0..1000000",
         "LoRA: adapters are scaled by alpha / rank (0: alpha is twice the rank)"},
        {"lora-targets", &C::lora_targets, "",
         "LoRA: adapted matrices: all, attention, experts, or names as q_proj,v_proj"},
        {"lora-layers", &C::lora_layers, "",
         "LoRA: adapted blocks, counted from 0: all, or 0,4,8-11"},
        {"lora-rs", &C::lora_rs, "", "rank-stabilised LoRA: scale by alpha / sqrt(rank)"},
        {"lora-plus", &C::lora_plus, "0.001..1000",
         "LoRA+: learning rate of B as a multiple of A's; its authors took 16"},
        {"prefix", &C::prefix, "0..4096",
         "prefix tuning: trained keys and values per layer; only they are trained (0: off)"},

        {"", &C::help, "tune sample convert kept", "Adapters"},
        {"adapter", &C::adapter, "", "folder of PEFT's adapters, to continue or to apply"},

        {"", &C::help, "tune convert", "Adapters in an export"},
        {"merge", &C::merge, "",
         "export the model with its adapters merged, instead of the adapters"},

        {"", &C::help, "tune sample kept", "Weights of the base"},
        {"weights", &C::weights, "float|nf4|int8|int4",
         "frozen weights of the blocks: as they are, or quantised after loading to 4.13 (nf4), "
         "8 or 4.25 (int4) bits an element"},

        {"", &C::help, "tune kept", "Averages"},
        {"ema", &C::ema, "0..0.99999",
         "decay of an exponential moving average of the weights, as 0.999; checkpoints hold "
         "both (0: off)"},

        {"", &C::help, "tune convert kept shape", "New experts"},
        {"upcycle", &C::upcycle, "0..4096",
         "replace each ffn of a dense --model folder by this many copies as experts; the first "
         "loss stays"},

        {"", &C::help, "tune convert prepare kept shape", "New tokens"},
        {"add-tokens", &C::add_tokens, "",
         "texts between commas that become special tokens of a --model folder; new rows begin "
         "as the mean of the others; prepare_gpt: the first ends a text (default: "
         "<|endoftext|>)"},

        {"", &C::help, "tune sample", "Texts"},
        {"slots", &C::slots, "1..65536", "texts generated at once (--prompts, grpo)"},

        {"", &C::help, "sample", "Sampling"},
        {"samples", &C::samples, "1..1000000", "samples per prompt"},
        {"ignore-eos", &C::ignore_eos, "", "sample past the end-of-text token"},
        {"top-k", &C::top_k, "0..100000000", "sample from the k likeliest tokens (0: all)"},
        {"top-p", &C::top_p, "0..1",
         "nucleus sampling: the likeliest tokens with this share of the probability"},

        {"", &C::help, "sample", "Many texts, conversations"},
        {"prompts", &C::prompts, "",
         "FILE: at the end continue each line's \"prompt\" (JSON lines; of a .txt: each line) and "
         "write JSON lines, by themselves on standard output"},
        {"completions", &C::completions, "",
         "FILE that --prompts writes (default: standard output)"},
        {"chat", &C::chat, "", "talk in the terminal: a line is a question"},
        {"adapters", &C::adapters, "",
         "NAME=DIR,...: adapters by name; a line of --prompts chooses one by its key \"adapter\""},
        {"draft", &C::draft, "",
         "draft model for speculative decoding: what --model can be, or a run's folder"},
        {"draft-tokens", &C::draft_tokens, "1..64", "--draft: tokens guessed per step"},

        {"", &C::help, "plan", "Questions"},
        {"gpus", &C::gpus, "0..1000000", "number of GPUs to plan for (0: 1)"},
        {"fit", &C::fit, "",
         "GB of a card, or a machine's name: print which models train on one of it, with which "
         "flags, and about how fast; --model: that one alone, and its longest sequence"},
        {"calibrate", &C::calibrate, "",
         "FILE: measure this machine for some seconds, and write what --machine FILE reads"},

        {"", &C::help, "prepare", "Shards"},
        {"field", &C::field, "", "key of the text in JSON lines, or the parquet column"},
        {"shard-tokens", &C::shard_tokens, "0..2147483647",
         "tokens per shard, OUT_000000.bin, ... (0: one shard, OUT.bin)"},
        {"val-tokens", &C::val_tokens, "0..2147483647",
         "tokens of the validation shard OUT.val.bin, taken from the beginning (0: none)"},
        {"threads", &C::threads, "0..1024", "tokenizer threads (0: one per core)"},

        {"", &C::help, "prepare", "A tokenizer of your own"},
        {"train-tokenizer", &C::train_tokenizer, "0..4194304",
         "train byte-level BPE with this many tokens on --data and write it to the folder OUT: "
         "tokenizer.json, tokenizer.tiktoken"},
        {"pattern", &C::pattern, "gpt2|gpt4|nanochat",
         "how it cuts text into words; nanochat: as gpt4, numbers have at most two digits"},

        {"", &C::help, "train sample convert plan", "Program"},
        {"device", &C::device, "auto|cpu|cuda", "device to run on"},

        {"", &C::help, "train sample convert plan prepare", "Help"},
        {"help", &C::help, "", "print this page"},
        {"version", &C::version, "", "print the version, and what it was built with"},
    };
    return table;
}

// The programs, in the order in which an error looks for the one that takes a flag.
inline const std::vector<Program>& programs() {
    static const std::vector<Program> all = {
        {"train_gpt", "trains, evaluates and samples GPT-2 and Llama", {"train"},
         "  train_gpt --data text.txt --steps 2400 --out run\n"
         "  train_gpt --model HF_FOLDER --eval --data text.txt\n"
         "  train_gpt --model llama3-8b --precision bf16 --zero 3 --dp 8 --explain\n", "", true},
        {"tune_gpt", "fine-tunes: adapters, conversations, preferences, distillation",
         {"tune", "train"},
         "  tune_gpt --model HF_FOLDER --loss sft --data chats.jsonl --lora 16 --out run\n"
         "  tune_gpt --model HF_FOLDER --loss dpo --data pairs.jsonl --export tuned\n", "", true},
        {"sample_gpt", "writes and talks", {"sample"},
         "  sample_gpt --model HF_FOLDER --prompt 'Once upon a time'\n"
         "  sample_gpt --model run --chat\n"
         "  sample_gpt --model HF_FOLDER --prompts questions.jsonl --completions answers.jsonl\n"},
        {"plan_gpt", "says what fits, what is fastest, and why", {"plan", "train", "tune"},
         "  plan_gpt --model llama3-8b --precision bf16 --gpus 64 --machine h100\n"
         "  plan_gpt --fit 24\n"
         "  plan_gpt --calibrate machine.txt\n", "", true},
        {"convert_gpt", "from model files to model files", {"convert"},
         "  convert_gpt run HF_FOLDER\n"
         "  convert_gpt --adapter ADAPTERS --merge HF_FOLDER merged\n"
         "  convert_gpt HF_FOLDER model.gguf --export-dtype q8_0\n", " IN... OUT"},
        {"prepare_gpt", "turns text into shards of tokens", {"prepare"},
         "  prepare_gpt --data text.jsonl --tokenizer HF_FOLDER shards.bin\n"
         "  prepare_gpt --data text.jsonl --train-tokenizer 32768 FOLDER\n", " OUT"},
    };
    return all;
}
inline const Program& program_named(const std::string& name) {
    for (const Program& p : programs())
        if (p.name == name) return p;
    return programs()[0];
}
// clang-format on

// Whether a program takes a group of flags, given the group's list of programs.
inline bool takes_group(const Program& p, const std::string& list) {
    for (const char* kind : p.takes)
        if ((" " + list + " ").find(concat(" ", kind, " ")) != std::string::npos) return true;
    return false;
}

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
            else
                return concat(v);
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
    // A switch: true or false. Some take a number too, which turns them on.
    double low = -1e15, high = 1e15, v = 0;
    const char* dots = strstr(f.accepts, "..");
    if (dots) {
        low = atof(f.accepts);
        high = atof(dots + 2);
    }
    if (auto b = std::get_if<bool Config::*>(&f.field)) {
        bool word = text == "true" || text == "false";
        bool settings = f.settings && !text.starts_with("-") && text.find("=") < text.size();
        if (settings)
            c.*f.settings = text;
        else
            c.** b = text != "false";
        if (word || settings) return "";
        bool number = f.number && parse_number(text, low, high, true, &v).empty();
        if (!number) return "wants true or false, not '" + text + "'";
        c.*f.number = int64_t(v);
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
    bool whole = !std::holds_alternative<double Config::*>(f.field);
    LLMC_TRY(parse_number(text, low, high, whole, &v));

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

// The row of a flag, and the list of programs that take it. Null: there is no such flag.
inline const Flag* find_flag(const std::string& name, std::string* list = nullptr) {
    std::string group;
    for (const Flag& f : config_table()) {
        if (!*f.name) group = f.accepts;
        if (!*f.name || name != f.name) continue;
        if (list) *list = group;
        return &f;
    }
    return nullptr;
}

// The row of a field.
inline const Flag& flag_of(const Field& field) {
    for (const Flag& f : config_table())
        if (*f.name && f.field == field) return f;
    return config_table().back();
}

// The value of a flag with words: they stand in its row in the order of the enumeration.
template <typename E> E choice_of(const Config& c, const Field& field) {
    std::string word = field_text(c, field);
    std::istringstream words(flag_of(field).accepts);
    std::string choice;
    for (int i = 0; std::getline(words, choice, '|'); i++)
        if (choice == word)
            return E(i);
    return E(0);
}

// Whether a program takes a flag; a configuration of no program takes all.
inline bool takes_flag(const Program* program, const std::string& name) {
    std::string list;
    return find_flag(name, &list) && (!program || takes_group(*program, list));
}

// A flag of earlier programs: the value in a checkpoint that changes nothing (null: any), and what
// is there instead.
struct GoneFlag {
    const char *name, *harmless, *instead;
};
// clang-format off
inline constexpr GoneFlag GONE_FLAGS[] = {
    {"expert-rounds",         "1",        "--recompute ffn saves most of that memory"},
    {"update-delay",          "0",        "its last gradient would be lost"},
    {"fp8-history",           "1024",     "the history has 1024 steps"},
    {"fp8-amax",              "max",      "scales follow the history's maximum"},
    {"fp8-margin",            "0",        "no power of two is left free above the amax"},
    {"fp8-weights",           nullptr,    "weights are cast once a step"},
    {"loss-scale-rule",       "megatron", "the rule is Megatron's; --loss-scale N fixes the scale"},
    {"loss-scale-start",      "0",        "the first is 65536; --loss-scale N fixes the scale"},
    {"loss-scale-window",     "0",        "it is 1000 steps; --loss-scale N fixes the scale"},
    {"loss-scale-hysteresis", "0",        "it is 2 overflows; --loss-scale N fixes the scale"},
    {"loss-scale-min",        "-1",       "it is 1; --loss-scale N fixes the scale"},
    {"kl",                    "k3",       "the estimator is k3"},
    {"recompute-segment",     nullptr,    "--recompute auto joins blocks where memory is short"},
    {"offload-update",        nullptr,    "--offload optimizer,update updates on the host"},
    {"cp-order",              nullptr,    "the order is zigzag"},
    {"prefetch",              nullptr,    "one layer is fetched ahead of its use"},
    {"save-minutes",          nullptr,    "--save-every 10m says minutes"},
    {"failure-hours",         nullptr,    "--save-every auto:HOURS says them"},
    {"buddy-every",           nullptr,    "--buddy FOLDER:STEPS says the steps"},
    {"resume-step",           nullptr,    "--resume STEP says the step"},
    {"layer",                 nullptr,    "--explain LAYER says the layer"},
    {"profile",               nullptr,    "--timeline FILE.txt writes the table"},
    {"keep-best",             nullptr,    "--keep 2,best keeps it"},
    {"document-mask",         "false",    "--documents mask is its name"},
    {"ds-config",             nullptr,    "dev/ds_config.py FILE writes a file for --config"},
    {"evaluate",              nullptr,    "--eval TASK=FILE scores tasks at each evaluation"},
    {"prepare",               nullptr,    "prepare_gpt --data FILES OUT writes shards of tokens"},
    {"average",               nullptr,    "convert_gpt IN IN OUT writes the mean of models"},
};
// clang-format on

// Refuse an unknown flag, and offer the nearest name; or a flag that is gone, or another program's.
inline std::string unknown_flag(const Config& c, const std::string& name) {
    for (const GoneFlag& f : GONE_FLAGS)
        if (name == f.name) return concat("--", name, " is gone: ", f.instead);
    for (const Program& p : programs())
        if (takes_flag(&p, name)) return concat("--", name, " is a flag of ", p.name);
    std::vector<std::string> names;
    for (const Flag& f : config_table())
        if (*f.name && takes_flag(c.program, f.name)) names.push_back(f.name);
    std::string close = nearest(name, names);
    return "unknown flag --" + name + (close.empty() ? "" : ": did you mean --" + close + "?") +
           " (--help lists them all)";
}

// ----------------------------------------------------------------------------
// reading: the command line, and files of `name = value` lines

// Set a flag by name. Returns "" or a message that begins with the flag.
inline std::string set_flag(Config& c, const std::string& name, const std::string& value) {
    const Flag* f = find_flag(name);
    if (!takes_flag(c.program, name)) return unknown_flag(c, name);
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
        if (word.rfind("--", 0) != 0 && c.program && *c.program->words) {
            c.paths.push_back(word);
            continue;
        }
        if (word.rfind("--", 0) != 0)
            return "'" + word + "' is no flag: flags look like --steps 100 (--help lists them all)";

        // Find the flag. --config is not in the table: otherwise a file could read itself.
        size_t equals = word.find('=');
        bool joined = equals != std::string::npos;
        std::string name = word.substr(2, joined ? equals - 2 : equals);
        const Flag* f = find_flag(name);
        bool known = name == "config" || takes_flag(c.program, name);
        if (!known) return unknown_flag(c, name);

        // A switch takes the next word as its value only if set_field() can read it.
        std::string value = joined ? word.substr(equals + 1) : i + 1 < argc ? argv[i + 1] : "";
        bool is_switch = f && std::holds_alternative<bool Config::*>(f->field);
        Config tried;
        bool alone = is_switch && !joined && !set_field(tried, *f, value).empty();
        if (alone) value = "true";
        if (!joined && !alone && ++i == argc)
            return "--" + name + " wants a value";

        // Read the file, or set the flag.
        LLMC_TRY(name == "config" ? read_config_file(c, value) : set_flag(c, name, value));
        if (name == "reward") c.typed_reward = value;
    }
    return "";
}

// ----------------------------------------------------------------------------
// the copy in log and checkpoint

// All fields by their flags' names, as log.jsonl and checkpoints keep them.
inline Json config_json(const Config& c) {
    Json j;
    for (const Flag& f : config_table())
        if (*f.name)
            std::visit([&](auto member) { j[f.name] = c.*member; }, f.field);
    if (c.resume_step >= 0) j["resume"] = c.resume_step;
    if (!c.tasks.empty()) j["eval"] = c.tasks;
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

// When to save: every so many steps or seconds, or at Young's interval for so many hours between
// two failures of a rank. All 0: at the end of the run.
struct SaveRule {
    int64_t steps = 0;
    double seconds = 0, failure_hours = 0;
};

// Read --save-every: "" or what is wrong with it.
inline std::string read_save_rule(const Config& c, SaveRule* rule) {
    *rule = {};
    const std::string& text = c.save_every;
    double steps = 0;
    std::string wrong;
    if (text == "auto")
        rule->failure_hours = 50700; // Llama 3's (folder.h)
    else if (text.starts_with("auto:"))
        wrong = parse_number(text.substr(5), 1e-6, 1e9, false, &rule->failure_hours);
    else if (text.ends_with("m"))
        wrong = parse_number(text.substr(0, text.size() - 1), 0, 1e6, false, &rule->seconds);
    else
        wrong = parse_number(text, 0, 1e12, true, &steps);

    rule->steps = int64_t(steps);
    rule->seconds *= 60;
    if (wrong.empty()) return "";
    return concat("--save-every ", printable(text), " is neither steps, as 500, nor minutes, as "
                  "10m, nor auto or auto:HOURS");
}
inline SaveRule save_rule(const Config& c) {
    SaveRule rule;
    read_save_rule(c, &rule);
    return rule;
}

// The two parts of --keep N,best, which check_together() has checked.
inline bool keeps_best(const Config& c) { return c.keep.ends_with(",best"); }
inline int newest_kept(const Config& c) { return atoi(c.keep.c_str()); }

// Whether the run has steps, which --explain leaves out.
inline bool has_steps(const Config& c) {
    return c.steps > 0 && !c.eval;
}

// Whether the run trains.
inline bool has_training(const Config& c) {
    return has_steps(c) && !c.explain;
}

// Whether --timeline writes the table of what each kind of action took.
inline bool writes_profile(const Config& c) { return c.timeline.ends_with(".txt"); }

// Whether weights are drawn: --model names neither files nor a checkpoint.
inline bool has_new_weights(const Config& c) {
    return c.start.empty() && (c.scratch || !file_type(c.model));
}

// Where weights that are not drawn come from.
inline const std::string& base_name(const Config& c) {
    return c.start.empty() ? c.model : c.start;
}

// Whether the run has adapters: new ones, or those of folders.
inline bool has_adapters(const Config& c) {
    return c.lora > 0 || c.prefix > 0 || !c.adapter.empty() || !c.adapters.empty();
}

// The objective of --loss and its parameters: lm and sft are both NLL.
inline Objective objective_of(const Config& c) {
    Objective o;
    o.kind = LossKind(std::max(0, choice_of<int>(c, &Config::loss) - 1));
    o.beta = c.beta;
    o.smoothing = c.label_smoothing;
    o.gamma = c.gamma;
    o.desirable = c.desirable_weight;
    o.undesirable = c.undesirable_weight;
    o.share = c.distill_share;
    o.temperature = c.distill_temperature;
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

// Whether it keeps a copy of its starting weights.
inline bool keeps_start(const Config& c) { return has_rollouts(c) && c.beta > 0; }

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

// Read --cp-method. Returns false if it is malformed.
inline bool read_context_method(const std::string& text, ContextChoice* choice) {
    // Read a single method for all ranks. Neighbours then share no heads.
    *choice = {};
    auto named = [&](const std::string& name) {
        const std::string names[] = {"gather", "ulysses", "ring"}; // in the enumeration's order
        int i = int(std::find(names, names + 3, name) - names);
        if (i < 3) choice->method = ContextMethod(i);
        return i < 3;
    };
    if (named(text)) return true;

    // Read a hybrid: both numbers, and nothing behind them.
    char across[8] = "";
    int end = 0;
    sscanf(text.c_str(), "ulysses:%5d,%7[a-z]:%5d%n", &choice->heads, across, &choice->keys, &end);
    bool whole = end > 0 && size_t(end) == text.size();
    bool counts = choice->heads > 0 && choice->keys > 0;
    return whole && counts && named(across) && choice->method != ContextMethod::ULYSSES;
}

} // namespace llmc
