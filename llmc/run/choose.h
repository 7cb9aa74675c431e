// choose.h - before the run: what the flags name becomes a shape, text, data, a layout and plans
//   Nothing is allocated here. Mistakes on the command line are found here, as far as they can be.
#pragma once
#include "../io/adapter_files.h"
#include "../io/checkpoint_load.h"
#include "../io/config_check.h"
#include "../io/ds_config.h"
#include "../io/model_files.h"
#include "../io/gguf.h"
#include "../io/merged_adapters.h"
#include "../io/named_adapters.h"
#include "../io/prefix_files.h"
#include "../io/new_tokens.h"
#include "../io/shared_files.h"
#include "run.h"

namespace llmc {

// ----------------------------------------------------------------------------
// shape, tokenizer, prompt, data

// The shape that --model names, by a Hugging Face folder, a file or a preset; then other flags
// change it. flag: the flag that named the model, for messages.
inline Shape choose_shape(const Config& c, const char* flag = "--model") {
    Shape s;
    LLMC_USER_CHECK(!c.upcycle || file_type(c.model) == S_IFDIR,
                    "--upcycle %d copies the ffn of a dense model, and --model %s is no folder of "
                    "one: give a Hugging Face folder, or --experts for new weights",
                    c.upcycle, c.model.c_str());

    // A model on disk has its own shape, and its weights fit no other.
    if (mode_t type = file_type(c.model)) {
        or_die(type == S_IFDIR ? hf_read_config(&s, c.model) : model_file_shape(&s, c.model));
        bool reshaped = c.layers || c.heads || c.kv_heads || c.channels || c.ffn || c.vocab ||
                        c.position.size() || c.experts ||
                        (!c.upcycle && (c.experts_per_token || c.router.size()));
        LLMC_USER_CHECK(c.scratch || !reshaped,
                        "%s has weights of its own shape: to change the shape, start from new "
                        "weights with --scratch",
                        c.model.c_str());
    } else {
        // Look for a preset. If none has the name, suggest the nearest one.
        std::vector<std::string> names;
        for (const Preset& p : model_presets()) {
            names.push_back(p.name);
            if (c.model == p.name)
                s = p.shape;
        }
        std::string close = nearest(c.model, names);
        LLMC_USER_CHECK(s.L > 0,
                        "%s %s is neither a folder, a file nor a preset%s%s%s; presets: %s",
                        flag, c.model.c_str(), close.empty() ? "" : ": did you mean ",
                        close.c_str(), close.empty() ? "" : "?", preset_names().c_str());
    }
    or_die(override_shape(c, s));

    // Choose how products use fp8: it is a property of the model's shape here.
    if (c.fp8 == "block")
        s.fp8 = Fp8::BLOCK;
    if (c.fp8 == "tensor")
        s.fp8 = Fp8::TENSOR;
    if (c.fp8 == "delayed")
        s.fp8 = Fp8::DELAYED;
    s.fp8_kept = c.fp8_weights == "step";
    s.fp8_rule = {c.fp8_history, c.fp8_margin, c.fp8_amax == "most_recent"};
    return s;
}

// Refuse runs that would need the adapter beside the weights, or weights of another origin.
inline std::string check_merged_run(const Config& c, Merging merging) {
    std::string flag = concat("--adapter ", c.adapter, ": is ",
                              merging == Merging::DORA ? "DoRA" : "(IA)3",
                              ", which is merged as it is read");
    bool folder = file_type(c.model) == S_IFDIR && !c.scratch;
    if (c.steps > 0 && !c.eval)
        return flag + " and not trained: give --steps 0 or --eval, or --export the merged model "
                      "and train that";

    // Only a folder's weights pass by whole; a checkpoint's are what a run has made of them.
    if (!folder)
        return flag + ": give --model the Hugging Face folder that it was trained on";
    if (c.resume)
        return flag + ", and --resume reads a checkpoint instead: leave one of them out";
    if (c.weights != "float" && !c.export_dir.empty())
        return flag + ", and --weights " + c.weights +
               " has lost what --export writes: give --weights float";
    return "";
}

// The options of new adapters, from the flags.
inline LoraOptions lora_options(const Config& c) {
    return {size_t(c.lora), c.lora_alpha, c.lora_rs, c.lora_targets, c.lora_layers};
}

// Take the number of trained keys from the folder --adapter, if it holds a prefix: from here on the
// run is one of --prefix.
inline void take_prefix(Config& c, const Shape& s) {
    bool made = c.adapter.empty() || given(c, "prefix");
    if (made || before_text(c.adapter) == BeforeText::NOTHING)
        return;
    size_t n = 0;
    or_die(read_prefix(s, c.adapter, &n));
    c.prefix = int(n);
}

// Add LoRA adapters to the shape: new ones, or those of folders. DoRA and (IA)3 add nothing: they
// are merged into the weights. Call it after config_check(), which fills in what flags leave out.
inline void add_adapters(const Config& c, Shape& s) {
    if (!has_adapters(c)) return;
    s.prefix = size_t(c.prefix);
    if (s.prefix) return;

    // Named adapters serve texts side by side.
    if (!c.adapters.empty()) {
        AdapterSets sets;
        or_die(read_adapter_sets(make_model(s), c.adapters, &sets));
        s.sets = std::make_shared<const AdapterSets>(sets);
        return;
    }

    // Merged adapters leave no trace in the shape.
    Merging merging = Merging::NONE;
    if (!c.lora)
        or_die(merging_of(c.adapter, &merging));
    if (merging != Merging::NONE) {
        or_die(check_merged_run(c, merging));
        return or_die(check_merges(make_model(s), c.adapter));
    }

    // The other adapters stay beside their matrices.
    Adapters adapters;
    if (c.lora)
        or_die(choose_adapters(make_model(s), lora_options(c), &adapters));
    else
        or_die(read_adapters(make_model(s), c.adapter, &adapters));
    for (auto& [module, adapter] : adapters)
        adapter.rate_of_b = float(c.lora_plus);
    s.adapters = std::make_shared<const Adapters>(adapters);
}

// With --ds-config, turn another trainer's file into flags, and print a line for each key.
inline void take_ds_config(Run& run) {
    const std::string& path = run.config.ds_config;
    if (path.empty()) return;
    std::vector<std::string> lines;
    std::string wrong = read_ds_config(run.config, path, run.world.size, &lines);
    for (const std::string& line : lines)
        if (is_first(run))
            printf("%s: %s\n", printable(path).c_str(), printable(line).c_str());
    or_die(wrong);
}

// Without --vocab, give new weights as many tokens as the tokenizer that the user names.
inline void follow_tokenizer(Run& run) {
    Config& c = run.config;
    bool new_weights = c.scratch || !file_type(c.model);
    if (new_weights && given(c, "tokenizer") && !given(c, "vocab"))
        c.vocab = run.tokenizer.vocab_size;
}

// Open the tokenizer that the flags name. Without --tokenizer it is the model folder's own if it
// has one, else bytes.
inline void open_tokenizer(Run& run) {
    Config& c = run.config;
    bool left_out = c.tokenizer.empty();
    if (left_out && file_type(c.model) == S_IFDIR)
        c.tokenizer = tokenizer_in(c.model);
    if (c.tokenizer.empty()) c.tokenizer = "byte";
    std::string wrong = tokenizer_open(&run.tokenizer, c.tokenizer);
    LLMC_USER_CHECK(wrong.empty(), "%s%s", wrong.c_str(),
                    left_out ? "; --tokenizer byte leaves the folder's out" : "");
    if (left_out && c.tokenizer != "byte" && is_first(run))
        printf("tokenizer: %s\n", c.tokenizer.c_str());
    if (!c.add_tokens.empty())
        or_die(add_tokens(&run.tokenizer, c.add_tokens));
}

// With --add-tokens, make the vocabulary large enough for the new tokens. The tables grow only if
// they have too few padding rows for them.
inline void grow_vocabulary(Run& run) {
    const Config& c = run.config;
    if (c.add_tokens.empty()) return;
    LLMC_USER_CHECK(file_type(c.model) == S_IFDIR && !c.scratch,
                    "--add-tokens %s: is for the weights of a Hugging Face folder: new weights "
                    "take --tokenizer's tokens",
                    c.add_tokens.c_str());
    size_t before = run.shape.V;
    run.shape.V = std::max(before, size_t(run.tokenizer.vocab_size));
    if (is_first(run))
        printf("new tokens: %s, up to token %d; the tables grow from %zu to %zu rows\n",
               printable(c.add_tokens).c_str(), run.tokenizer.vocab_size - 1, before, run.shape.V);
}

// Whether the run computes a validation loss. --eval with --evaluate, but without data, does not:
// the loss would be that of the project's own sources, which nobody asked for.
inline bool wants_validation(const Config& c) {
    if (c.loss == "grpo") return false;
    bool tasks_alone = !c.evaluate.empty() && !given(c, "data") && !given(c, "val");
    return c.eval ? !tasks_alone : c.steps > 0;
}

// Note files that do not look like text, and end the run if a shard holds tokens that the model
// does not have. Reading the first gibibyte of shards takes less than a second from memory, and
// some seconds from a disk.
inline void look_at_data(Run& run) {
    const size_t most = size_t(1) << 30;
    for (const DataLoader* d : {&run.train, &run.val}) {
        // Without --val both splits come from the same files: note each file once.
        bool again = d == &run.val && run.config.val.empty() && !run.train.files.empty();
        for (const std::string& text : data_notes(*d))
            if (!again) note(run, printable(text));
        or_die(check_tokens(*d, most));
    }
}

// Choose the format of conversations, if --loss, --chat or --chat-format needs one.
inline void open_chat(Run& run) {
    const Config& c = run.config;
    if (!has_conversations(c) && !c.chat && !given(c, "chat-format"))
        return;
    std::string folder = file_type(c.model) == S_IFDIR ? c.model : "";
    or_die(choose_chat(&run.chat, c.chat_format, folder, run.tokenizer));
    if (is_first(run))
        printf("chat format: %s\n", run.chat.format.name.c_str());
}

// Open training and validation data, and check that they have no text in common.
inline void open_data(Run& run) {
    Config& c = run.config;

    // Without --data, train on the project's own sources.
    std::string files = c.data;
    if (files.empty()) {
        for (const std::string& f : project_sources(program_folder()))
            files += (files.empty() ? "" : ",") + escape_commas(f);
        LLMC_USER_CHECK(!files.empty(),
                        "no --data, and the project's own sources are not beside the program: give "
                        "--data FILE");
    }

    // Open both splits. Validation reads --val, or without it the end of the data.
    bool train = c.steps > 0 && !c.eval, apart = !c.val.empty();
    const Chat* chat = has_conversations(c) ? &run.chat : nullptr;
    run.chat.pairs = has_pairs(c);
    run.chat.labels = c.loss == "kto";
    if (train)
        or_die(data_open(&run.train, files, Split::TRAIN, apart, run.tokenizer, c.seq, run.shape.V,
                         c.seed, chat));
    or_die(data_open(&run.val, apart ? c.val : files, Split::VAL, apart, run.tokenizer, c.seq,
                     run.shape.V, c.seed, chat));

    // Refuse a tokenizer that is not the model's: its tokens would mean nothing to the weights.
    bool trained = file_type(c.model) && !c.scratch;
    LLMC_USER_CHECK(!trained || vocab_matches(run) || !(has_text(run.train) || has_text(run.val)),
                    "--data: %s", foreign_tokenizer(run).c_str());

    // Look at the files on one rank, for all.
    if (is_first(run)) look_at_data(run);

    // Evaluate at least one sample, and at most all that there are.
    run.val_samples = size_t(std::clamp<int64_t>(c.eval_tokens / c.seq, 1, run.val.windows));
    if (vocab_matches(run) && !has_pairs(c))
        run.val_bytes = target_bytes(run.val, run.tokenizer, run.val_samples);

    // Check that no text is in both splits, and find the token that ends a document.
    if (train && apart)
        or_die(data_disjoint(run.train, run.val));
    if (train && c.document_mask)
        or_die(data_document_end(run.train, run.tokenizer, c.document_end, &run.document_end));
}

// Read the questions of --evaluate, and check that all ranks have the same.
inline void open_tasks(Run& run) {
    const Config& c = run.config;
    if (c.evaluate.empty()) return;
    LLMC_USER_CHECK(vocab_matches(run), "--evaluate: %s", foreign_tokenizer(run).c_str());
    or_die(read_tasks(&run.tasks, c.evaluate, run.tokenizer, text_positions(run.shape)));
    if (run.world.size == 1) return;

    // Each rank has read the file itself: compare the tokens.
    std::string all;
    for (const Candidate& x : run.tasks.candidates)
        for (int token : x.tokens)
            all += std::to_string(token) + " ";
    check_same(run.world, "the questions of --evaluate", all);
}

// Keep the model folder's other settings for the export: keys of config.json that the shape does
// not hold. If this run's shape differs from the folder's it is another model, and keeps nothing.
inline void keep_for_export(Run& run) {
    const Config& c = run.config;
    Shape s;
    bool readable = file_type(c.model) == S_IFDIR && hf_read_config(&s, c.model).empty();
    if (!c.add_tokens.empty())
        s.V = run.shape.V;
    if (!readable || model_identity(s) != model_identity(run.shape))
        return;

    // Keep bos and eos only if this run uses the folder's own tokenizer,
    // or bytes where the folder has none.
    std::error_code none;
    std::string own = tokenizer_in(c.model);
    bool folder = file_type(c.tokenizer) == S_IFDIR;
    std::string chosen = folder ? tokenizer_in(c.tokenizer) : c.tokenizer;
    bool own_tokenizer = own.empty() ? c.tokenizer == "byte"
                                     : std::filesystem::equivalent(own, chosen, none);
    or_die(keep_of_folder(&run.exported, c.model, own_tokenizer));
}

// Check that a file for llama.cpp can hold this model, and print why it holds no tokenizer, if so.
inline void prepare_gguf(Run& run) {
    const Config& c = run.config;
    or_die(gguf_check(run.shape, c.export_dir));
    bool known = vocab_matches(run);
    std::string why = known ? gguf_no_tokenizer(run.tokenizer)
                            : "--tokenizer " + c.tokenizer + " is not the model's";
    // Read the tokenizer's files too: one of them may hold the chat template.
    if (known)
        tokenizer_files(&run.exported.files, run.tokenizer, run.shape.P);
    if (!why.empty() && is_first(run))
        printf("--export writes no tokenizer: %s\n", why.c_str());
    keep_for_export(run);
}

// Check the export before the run, because a failure after it would lose the run's work. A
// tokenizer that is not the model's is not exported.
inline void prepare_export(Run& run) {
    const Config& c = run.config;
    const Tokenizer& t = run.tokenizer;
    std::error_code none;

    // Refuse to overwrite the weights that this run reads.
    LLMC_USER_CHECK(!std::filesystem::equivalent(c.model, c.export_dir, none),
                    "--export %s: is what --model reads: choose another name",
                    c.export_dir.c_str());

    // Choose the tokens that begin and end a text; without the tokenizer only GPT-2's are known.
    bool known = vocab_matches(run);
    run.exported.eos = known ? t.eot : run.shape.V == 50257 ? 50256 : -1;
    run.exported.bos = known && t.bos >= 0 ? t.bos : run.exported.eos;

    // Check what the format requires: a file of llm.c's, of llama.cpp's, or a folder.
    if (is_model_file(c.export_dir))
        return or_die(model_file_check(run.shape, c.export_dir, export_type(c)));
    if (is_gguf(c.export_dir))
        return prepare_gguf(run);
    or_die(hf_export_check(run.shape, c.export_dir));
    if (is_first(run))
        or_die(try_folder("export", c.export_dir));

    // Export the model even if its tokenizer cannot be exported, but print why.
    std::string why = known ? tokenizer_files(&run.exported.files, t, run.shape.P)
                            : "--tokenizer " + c.tokenizer + " is not the model's";
    if (!why.empty() && is_first(run))
        printf("--export writes no tokenizer.json: %s\n", why.c_str());
    keep_for_export(run);
    if (!c.add_tokens.empty())
        or_die(add_tokens_to_files(&run.exported.files, t, c.add_tokens));

    // Announce that an older export will be replaced.
    if (is_first(run) && !names_in(export_folder(c.export_dir)).empty())
        note(run, "--export " + c.export_dir + " holds an export, which the new one replaces");
}

// ----------------------------------------------------------------------------
// layout and plans

// The schedule that --pipeline names. A name that is no schedule's is the path of a file with one,
// which is read into `given`.
inline Pipeline choose_pipeline(const Config& c, int micro_batches, std::vector<Schedule>* given) {
    const char* names[] = {"gpipe", "1f1b", "interleaved", "zero-bubble"};
    for (int i = 0; i < 4; i++)
        if (c.pipeline == names[i])
            return Pipeline(i);

    // Read and check the user's schedule before any rank depends on it.
    std::ifstream file(c.pipeline);
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
        if (p.shape.size() == 2 && p.layer > 0)
            cost[p.layer] += double(p.elements()) * (p.stack > 1 ? double(shape.K) / p.stack : 1);
    if (shape.tied)
        cost.back() = double(shape.Vp() * shape.C);
    return split_layers(cost, stages);
}

// Micro-batches of a step on one data-parallel rank. config_check() has checked that the division
// leaves no remainder.
inline int micro_batches(const Config& c) {
    return int(c.batch_tokens / (int64_t(c.micro_batch) * c.seq * c.dp));
}

// The order of tokens over context-parallel ranks that --cp-order names. The table of flags allows
// no other name than these three.
inline ContextOrder context_order_named(const std::string& name) {
    if (name == "contiguous") return ContextOrder::CONTIGUOUS;
    return name == "striped" ? ContextOrder::STRIPED : ContextOrder::ZIGZAG;
}

// The layout that the flags describe, the same for every rank. No other place turns flags
// into a layout.
inline Layout choose_layout(const Config& c, const Shape& shape) {
    Layout layout;

    // The grid: ranks along each axis, and the order in which they are numbered.
    layout.dp.size = c.dp;
    layout.tp.size = c.tp;
    layout.pp.size = c.pp;
    layout.cp.size = c.cp;
    layout.ep = c.ep;
    layout.whole_experts = has_whole_experts(c) && shape.E;
    layout.ep_exchange = c.ep > 1 && c.ep_method == "exchange";
    layout.order = layout_order(c.grid_order);
    layout.sequence_parallel = c.sequence_parallel;

    // Context parallelism: how attention reaches the other ranks' tokens, and which
    // tokens are whose.
    ContextChoice context;
    read_context_method(c.cp_method, &context);
    layout.cp_method = context.method;
    layout.cp_heads = context.heads;
    layout.cp_order = context_order_named(c.cp_order);

    // ZeRO: its stage, the ranks of a sharding group, how many layers ahead weights are
    // gathered, and which units no shard boundary may cut: matrices for some optimizers, blocks
    // of 8-bit state.
    layout.zero = c.zero;
    layout.zero_group = keeps_weights_near(c) ? c.hpz : c.zero_group;
    layout.weights_near = keeps_weights_near(c);
    layout.prefetch = c.prefetch;
    layout.whole_matrices = optimizer_row(optimizer_named(c.optimizer)).whole_matrices;

    if (states_named(c.states) == States::EIGHT_BIT)
        layout.tensor_align = STATE_BLOCK; // so that no block spans two tensors, or two shards

    // The pipeline: its schedule, and the first layer of each stage.
    layout.chunks = c.chunks;
    layout.pipeline = choose_pipeline(c, micro_batches(c), &layout.given);
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

// The level that --recompute names; config_check() has refused every other name. "auto" counts as
// FULL until choose_recompute() (limits.h) has found out how much room there is.
inline Recompute recompute_named(const std::string& name) {
    for (int level = 0; level < RECOMPUTE_LEVELS; level++)
        if (name == recompute_name(Recompute(level)))
            return Recompute(level);
    return Recompute::FULL;
}

// The format of frozen weights that --weights names.
inline Stored stored_named(const std::string& name) {
    if (name == "nf4") return Stored::NF4;
    if (name == "int4") return Stored::INT4;
    return name == "int8" ? Stored::INT8 : Stored::WIDE;
}

// Sequences that are generated at once. Samples are printed token by token, so one at a time;
// the completions of --prompts go to a file, --slots at a time.
inline size_t generation_slots(const Config& c, size_t texts) {
    if (c.prompts.empty()) return 1;
    return std::min(size_t(c.slots), texts);
}

// The options of a run's own evaluation, of one micro-batch.
inline PlanOptions evaluation_of(const PlanOptions& train) {
    PlanOptions evaluate = train;
    evaluate.mode = Mode::EVALUATE;
    evaluate.recompute = Recompute::NONE;
    evaluate.micro_batches = 1;
    return evaluate;
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

// Choose the plans of this run: to train, evaluate, score candidates, generate, sample rollouts.
// Returns their options, and stores each plan's index in `run`.
inline std::vector<PlanOptions> choose_plans(Run& run) {
    const Config& c = run.config;
    std::vector<PlanOptions> plans;
    auto add = [&](const PlanOptions& p) {
        plans.push_back(p);
        return int(plans.size()) - 1;
    };

    // Train. The other plans copy these options, and change what differs.
    PlanOptions train;
    train.B = size_t(c.micro_batch);
    train.T = size_t(c.seq);
    train.micro_batches = micro_batches(c);
    train.optimizer = optimizer_named(c.optimizer);
    train.gradients = gradients_named(c.gradients);
    train.masters = masters_named(c.masters);
    train.states = states_named(c.states);
    train.ema = c.ema > 0;
    train.stored = stored_named(c.weights);
    train.objective = objective_of(c);
    train.recompute = recompute_named(c.recompute);
    train.recompute.segments = {c.recompute_segment};

    // Offload to the host's memory or to a folder. (A folder named cpu is written "./cpu".)
    Tier tier = c.offload_to == "cpu" ? Tier::HOST : Tier::DISK;
    for (const OffloadRow& row : OFFLOAD_TABLE)
        if (offloads(c, row.name)) train.offload.*row.tier = tier;
    if (c.offload_update == "host")
        train.offload.update = Tier::HOST;
    train.offload.late = c.update_delay > 0;
    if (c.steps > 0 && !c.eval)
        run.train_plan = add(train);

    // Evaluate.
    PlanOptions evaluate = evaluation_of(train);
    if (evaluate.objective.distills()) evaluate.objective = {}; // the text's own loss
    bool only_exports = c.steps == 0 && !c.eval && c.sample_tokens == 0;
    if (wants_validation(c) || evaluates_rollouts(c))
        run.evaluate_plan = add(evaluate);
    if (only_exports) add(evaluate); // it never runs: it gives the exported weights their place

    // Score the candidates of --evaluate: one plan for each group of about equal length. From here
    // on plans have the ordinary loss.
    evaluate.objective = {};
    size_t rows = evaluate.B * evaluate.T;
    run.score_groups = group_by_length(run.tasks.candidates, rows, text_positions(run.shape));
    for (ScoreGroup& group : run.score_groups)
        group.plan = add(score_plan(evaluate, group.T, run.layout));

    // Evaluate the rows of a prompt, which become a prefix.
    if (c.prefix && before_text(c.adapter) == BeforeText::PROMPT) {
        PlanOptions prompt = evaluate;
        prompt.whole_sequences = true;
        prompt.B = c.sequence_parallel ? size_t(c.tp) : 1;
        prompt.T = size_t(c.prefix);
        run.prompt_plan = add(prompt);
        if (c.steps > 0 && !c.eval)
            note(run, concat("--adapter ", c.adapter, ": a prompt's rows become keys and values of "
                             "each layer, and these are trained, as a prefix"));
    }

    // Generate, one text in each slot. A slot of the cache holds the longest prompt and all tokens
    // that follow it.
    PlanOptions generate = evaluate;
    generate.mode = Mode::GENERATE;
    size_t texts = run.prompts.size() * size_t(c.samples);
    if (answers_are_shared(c))
        texts = ceil_div(texts, size_t(c.dp));
    generate.B = generation_slots(c, texts);
    generate.T = 1;
    for (const Prompt& p : run.prompts)
        generate.T = std::max(generate.T, p.tokens.size());
    if (c.chat) generate.T = run.context_length;
    generate.cache = std::min(run.context_length, generate.T + size_t(c.sample_tokens));
    if (!c.draft.empty())
        generate.scored = size_t(c.draft_tokens) + 1; // logits to judge each guess, and one beyond
    if (c.sample_tokens > 0 && !c.eval)
        run.generate_plan = add(generate);

    // Sample answers to train on.
    if (has_rollouts(c))
        run.rollout_plan = add(rollout_options(c, train));
    return plans;
}

// Check that the plans of all pipeline ranks fit together: each message that one sends, another one
// receives. This comes before anything runs.
inline void check_plans_of_all_ranks(const Run& run, const std::vector<PlanOptions>& options,
                                     const Model& model) {
    if (run.layout.pp.size == 1) return;
    for (const PlanOptions& o : options) {
        std::vector<Plan> plans = make_plans(run.layout, model, o);
        or_die_on_all_ranks(run, plans_check(plans, model));
    }
}

// The axes of the layout in words, and below the whole layout, for the title of a timeline.
inline std::string axes_text(const Config& c) {
    return concat("dp ", c.dp, " x tp ", c.tp,
                  c.sequence_parallel ? " with sequence parallelism" : "", " x pp ", c.pp,
                  c.cp > 1 ? concat(" x cp ", c.cp, " by ", c.cp_method, ", ", c.cp_order) : "",
                  c.ep > 1 ? concat(", ep ", c.ep, " by ", c.ep_method) : "",
                  has_whole_experts(c) ? ", etp 1" : "");
}
inline std::string layout_text(const Config& c) {
    return concat(c.model, ", ", axes_text(c), ", zero ", c.zero, ", ", c.pipeline);
}

} // namespace llmc
