// choose.h - before the run: what the flags name becomes a shape, text, data, plans, a loss scale
//   Nothing is allocated here. Mistakes on the command line are found here, as far as they can be.
#pragma once
#include "../action.h"
#include "../adapters.h"
#include "../comm/comm.h"
#include "../io/chat.h"
#include "../io/chat_templates.h"
#include "../io/checkpoint.h"
#include "../io/config.h"
#include "../io/core.h"
#include "../io/dataloader.h"
#include "../io/evaluate.h"
#include "../io/files.h"
#include "../io/hf_config.h"
#include "../io/huggingface.h"
#include "../io/likelihood.h"
#include "../io/model_files.h"
#include "../io/new_tokens.h"
#include "../io/plan_flags.h"
#include "../io/tokenizer.h"
#include "../io/tokenizer_export.h"
#include "../io/tokenizer_files.h"
#include "../model.h"
#include "../ops/loss_scale.cuh"
#include "../ops/rand.h"
#include "../ops/types.h"
#include "../plan.h"
#include "../plan_check.h"
#include "../comm/text.h"
#include "run.h"

namespace llmc {

// ----------------------------------------------------------------------------
// shape, tokenizer, prompt, data

// Open the tokenizer that the flags name. Without --tokenizer it is the model folder's own if it
// has one, else bytes.
inline void open_tokenizer(Run& run) {
    Config& c = run.config;
    bool left_out = c.tokenizer.empty();
    if (left_out && file_type(c.model) == S_IFDIR)
        c.tokenizer = tokenizer_in(c.model);
    if (c.tokenizer.empty()) c.tokenizer = "byte";
    std::string wrong = tokenizer_open(&run.tokenizer, c.tokenizer);
    LLMC_USER_CHECK(wrong.empty(), "%s%s", one_screen(wrong).c_str(),
                    left_out ? "; --tokenizer byte leaves the folder's out" : "");
    if (left_out && c.tokenizer != "byte")
        say(run, "tokenizer: ", c.tokenizer, "\n");

    // Adapters may have learned to end texts otherwise than their base, and say so beside them.
    if (!c.adapter.empty() && run.tokenizer.kind != TokenizerKind::BYTE)
        or_die(read_special_tokens(&run.tokenizer, c.adapter));
    for (const std::string& text : run.tokenizer.notes)
        note(run, text);
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
    say(run, "new tokens: ", printable(c.add_tokens), ", up to token ",
        run.tokenizer.vocab_size - 1, "; the tables grow from ", before, " to ", run.shape.V,
        " rows\n");
}

// Whether the run computes a validation loss. One that evaluates tasks alone, without data, does
// not: the loss would be that of the project's own sources, which nobody asked for.
inline bool wants_validation(const Config& c) {
    if (c.loss == "grpo") return false;
    bool tasks_alone = !c.tasks.empty() && !was_given(c, "data") && !was_given(c, "val");
    return c.eval ? !tasks_alone : c.steps > 0;
}

// Note files that do not look like text, and end the run if a shard holds tokens that the model
// does not have. Reading the first gibibyte of shards takes less than a second from memory, and
// some seconds from a disk.
inline void look_at_data(Run& run) {
    const size_t most = size_t(1) << 30;
    for (const DataLoader* d : {&run.data.train, &run.data.val}) {
        // Without --val both splits come from the same files: note each file once.
        bool again = d == &run.data.val && run.config.val.empty() && !run.data.train.files.empty();
        for (const std::string& text : data_notes(*d))
            if (!again) note(run, printable(text));
        or_die(check_tokens(*d, most));
    }
}

// The folder whose chat template counts: that of the adapters, if it has one, else the model's.
inline std::string chat_folder(const Config& c) {
    Json text;
    if (!c.adapter.empty() && read_chat_template(c.adapter, &text).empty() &&
        text.is_string())
        return c.adapter;
    return file_type(c.model) == S_IFDIR ? c.model : "";
}

// Choose the format of conversations, if --loss, --chat or --chat-format needs one.
inline void open_chat(Run& run) {
    const Config& c = run.config;
    std::string folder = chat_folder(c);
    if (!has_conversations(c) && !c.chat && !was_given(c, "chat-format")) {
        // Say how a model that knows conversations is asked: a plain prompt gets no answer from it.
        bool asks = !folder.empty() && !(c.prompt + c.prompts).empty();
        Json text;
        if (asks && read_chat_template(folder, &text).empty() && !text.is_null())
            note(run, concat(folder, " has a chat template, and prompts are continued as plain "
                             "text: --chat-format auto asks them as questions"));
        return;
    }
    or_die(choose_chat(&run.chat, c.chat_format, folder, run.tokenizer));
    if (!has_conversations(c))
        or_die(run.chat.refused);
    say(run, "chat format: ", run.chat.format.name, ", ", run.chat.why, "\n");
}

// Open training and validation data, and check that they have no text in common. lines: what packs
// JSON lines, for a loss that reads conversations.
inline void open_data(Run& run, const LineSource& lines) {
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
    bool train = has_steps(c), apart = !c.val.empty();
    const LineSource* source = has_conversations(c) ? &lines : nullptr;
    if (train)
        or_die(data_open(&run.data.train, files, Split::TRAIN, apart, run.tokenizer, c.seq,
                         run.shape.V, c.seed, source, size_t(c.batch_tokens / c.seq)));
    or_die(data_open(&run.data.val, apart ? c.val : files, Split::VAL, apart, run.tokenizer, c.seq,
                     run.shape.V, c.seed, source));

    // Refuse a tokenizer that is not the model's: its tokens would mean nothing to the weights.
    bool text = has_text(run.data.train) || has_text(run.data.val);
    LLMC_USER_CHECK(has_new_weights(c) || vocab_matches(run) || !text,
                    "--data: %s", foreign_tokenizer(run).c_str());

    // Look at the files on one rank, for all. Checkpoints name them; the manifests of all machines
    // must be equal, so each rank notes which they are.
    if (is_first_rank(run)) look_at_data(run);
    or_die(identify_files(files, &run.data.files["data"]));
    if (apart)
        or_die(identify_files(c.val, &run.data.files["val"]));

    // Read what the validation loss is compared with.
    if (!c.expect.empty())
        or_die(read_curve(c.expect, &run.data.expected));

    // Evaluate at least one sample, and at most all that there are.
    int64_t wanted = c.eval_tokens / c.seq;
    run.data.val_samples = size_t(std::clamp<int64_t>(wanted, 1, run.data.val.windows));
    if (vocab_matches(run) && !has_pairs(c))
        run.data.val_bytes = target_bytes(run.data.val, run.tokenizer, run.data.val_samples);

    // Check that no text is in both splits, and find the token that ends a document.
    if (train && apart)
        or_die(data_disjoint(run.data.train, run.data.val));
    int end = -1;
    if (train && c.documents != "stream")
        or_die(data_document_end(run.data.train, run.tokenizer, c.document_end, &end));
    if (train && c.documents.starts_with("best-fit"))
        pack_documents(&run.data.train, end);
    if (c.documents.ends_with("mask"))
        run.data.document_end = end;
}

// Read the questions of --eval, and check that all ranks have the same.
inline void open_tasks(Run& run) {
    const Config& c = run.config;
    if (c.tasks.empty()) return;
    LLMC_USER_CHECK(vocab_matches(run), "--eval: %s", foreign_tokenizer(run).c_str());
    or_die(read_tasks(&run.questions.asked, c.tasks, run.tokenizer, text_positions(run.shape)));
    if (run.world.size == 1) return;

    // Each rank has read the files itself: compare hashes of the tokens, which may be many.
    std::string all;
    for (const Candidate& x : run.questions.asked.candidates)
        all += concat(fnv1a({(const char*)x.tokens.data(), x.tokens.size() * sizeof(int)}), " ");
    check_same(run.world, "the questions of --eval", all);
}

// Whether --export writes adapters alone, beside nothing.
inline bool exports_adapters(const Run& run) {
    return trains_adapters(run.shape) && !run.config.merge;
}

// Keep what the model's folder says beside its shape, and its other files.
inline void keep_for_export(Run& run) {
    const Config& c = run.config;
    Shape s;
    bool readable = file_type(c.model) == S_IFDIR && hf_read_config(&s, c.model).empty();
    if (!c.add_tokens.empty())
        s.V = run.shape.V;
    if (!readable)
        return;

    // Keep ids, and files about tokens, only if this run uses the folder's own tokenizer,
    // or bytes where the folder has none.
    std::error_code none;
    std::string own = tokenizer_in(c.model);
    bool folder = file_type(c.tokenizer) == S_IFDIR;
    std::string chosen = folder ? tokenizer_in(c.tokenizer) : c.tokenizer;
    bool own_tokenizer = own.empty() ? c.tokenizer == "byte"
                                     : std::filesystem::equivalent(own, chosen, none);
    if (own_tokenizer && is_first_rank(run) && !exports_adapters(run))
        or_die(carry_files(&run.exports.tokenizer, c.model));

    // If this run's shape differs from the folder's it is another model, and keeps no keys.
    if (model_identity(s) == model_identity(run.shape))
        or_die(keep_of_folder(&run.exports.tokenizer, c.model, own_tokenizer));
}

// If the model was taught a chat format, by this run or by adapters that it merges, export the
// format and the end of an answer.
inline void keep_chat(Run& run) {
    const Config& c = run.config;
    ExportTokenizer& e = run.exports.tokenizer;
    auto template_in = [](const std::string& folder) {
        Json text;
        or_die(read_chat_template(folder, &text));
        return text.is_string() ? text.get<std::string>() : "";
    };
    std::string from = chat_folder(c), text = from.empty() ? "" : template_in(from);
    if (file_type(c.model) == S_IFDIR)
        e.chat_template = template_in(c.model);

    // Adapters say beside them how an answer ends.
    bool taught = has_conversations(c) || was_given(c, "chat-format");
    bool merges = !c.adapter.empty() && from == c.adapter;
    int end = taught ? run.chat.end : run.tokenizer.eot;
    if (!vocab_matches(run) || !(taught || merges) || end < 0)
        return;
    or_die(export_end(&e, run.tokenizer, end));

    // Keep the text of the folder that the format came from; leave files that have it as they are.
    ChatFormat format;
    bool named = recognise_template(text, &format) && format.name == c.chat_format;
    bool same = !text.empty() && (c.chat_format == "auto" || named);
    if (taught && !same)
        text = chat_template_of(run.chat.format);
    std::vector<std::string> texts = token_texts(run.tokenizer);
    int begin = begin_token(run.tokenizer);
    OrderedJson bos;
    if (begin >= 0)
        bos = texts[begin];
    if (text != e.chat_template)
        or_die(export_template(&e, text, bos, texts[end]));
    else if (exports_adapters(run))
        e.files["chat_template.jinja"] = text;
}

// Check the export before the run, because a failure after it would lose the run's work. A
// tokenizer that is not the model's is not exported.
inline void prepare_export(Run& run) {
    const Config& c = run.config;
    const Tokenizer& t = run.tokenizer;
    ExportTokenizer& e = run.exports.tokenizer;
    std::error_code none;

    // Refuse to overwrite the weights that this run reads.
    LLMC_USER_CHECK(!std::filesystem::equivalent(c.model, c.export_dir, none),
                    "--export %s: is what --model reads: choose another name",
                    c.export_dir.c_str());

    // Choose the tokens that begin and end a text; without the tokenizer only GPT-2's are known.
    bool known = vocab_matches(run);
    e.eos = known ? t.eot : run.shape.V == 50257 ? 50256 : -1;
    int begin = begin_token(t);
    e.bos = known && begin >= 0 ? begin : e.eos;
    if (known && begin < 0 && !t.ends.empty())
        e.bos = -1; // the tokenizer's folder names an end, and no beginning

    // Check what the format requires: a file of llm.c's, of llama.cpp's, or a folder.
    if (is_model_file(c.export_dir))
        return or_die(model_file_check(run.shape, c.export_dir, export_type(c)));
    LLMC_USER_CHECK(!is_gguf(c.export_dir) || run.exports.file,
                    "--export %s: convert_gpt writes files of llama.cpp's: --export a folder, then "
                    "convert_gpt FOLDER %s",
                    c.export_dir.c_str(), c.export_dir.c_str());
    if (is_gguf(c.export_dir)) {
        keep_for_export(run);
        return keep_chat(run);
    }

    // Export the model even if its tokenizer cannot be exported, but print why.
    std::string why = known ? tokenizer_files(&e.files, t, run.shape.P)
                            : "--tokenizer " + c.tokenizer + " is not the model's";
    if (!why.empty())
        say(run, "--export writes no tokenizer.json: ", why, "\n");
    keep_for_export(run);
    if (!c.add_tokens.empty())
        or_die(add_tokens_to_files(&e, t, c.add_tokens));
    keep_chat(run);

    // Adapters take the tokenizer with them only where they change how it is used.
    if (exports_adapters(run) && !e.files.count("chat_template.jinja"))
        e.files.clear();
    if (exports_adapters(run))
        e.files.erase("generation_config.json"); // nobody looks for it there
    or_die(hf_export_check(run.shape, c.export_dir, e.files));
    if (is_first_rank(run))
        or_die(try_folder("export", c.export_dir));

    // Announce that an older export will be replaced.
    if (is_first_rank(run) && !names_in(export_folder(c.export_dir)).empty())
        note(run, "--export " + c.export_dir + " holds an export, which the new one replaces");
}

// ----------------------------------------------------------------------------
// plans: to train, evaluate, score candidates, generate

// The options of the plan that generates, one text in each slot. A slot of the cache holds the
// longest prompt and all tokens that follow it.
inline PlanOptions generate_options(const Run& run, PlanOptions generate) {
    const Config& c = run.config;
    generate.mode = Mode::GENERATE;
    size_t texts = run.samples.prompts.size() * size_t(c.samples);
    if (answers_are_shared(c))
        texts = ceil_div(texts, size_t(c.dp));
    // Samples are printed token by token, so one at a time; completions go to a file, so --slots.
    generate.B = c.prompts.empty() ? 1 : std::min(size_t(c.slots), texts);

    // Hold the longest text.
    generate.T = 1;
    for (const Prompt& p : run.samples.prompts)
        generate.T = std::max(generate.T, p.tokens.size());
    if (c.chat) generate.T = run.samples.context_length;
    generate.cache = std::min(run.samples.context_length, generate.T + size_t(c.sample_tokens));
    if (!c.draft.empty())
        generate.scored = size_t(c.draft_tokens) + 1; // logits to judge each guess, and one beyond
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

    // Train.
    PlanOptions train = train_options(c);
    bool trains = has_steps(c);
    if (trains) run.plans.train = add(train);

    // Evaluate.
    PlanOptions evaluate = evaluation_of(train);
    if (evaluate.objective.distills()) evaluate.objective = {}; // the text's own loss
    bool only_exports = c.steps == 0 && !c.eval && c.sample_tokens == 0;
    bool other_policies = keeps_start(c) || (has_rollouts(c) && c.updates > 1);
    if (wants_validation(c) || other_policies)
        run.plans.evaluate = add(evaluate);
    if (only_exports) add(evaluate); // it never runs: it gives the exported weights their place

    // Score the candidates of --eval: one plan for each group of about equal length. From here
    // on plans have the ordinary loss.
    evaluate.objective = {};
    size_t rows = evaluate.B * evaluate.T;
    const std::vector<Candidate>& candidates = run.questions.asked.candidates;
    run.questions.groups = group_by_length(candidates, rows, text_positions(run.shape));
    for (ScoreGroup& group : run.questions.groups)
        group.plan = add(score_plan(evaluate, group.T, run.layout));

    // Evaluate the rows of a prompt, which become a prefix.
    if (run.plans.prompt_rows) {
        PlanOptions prompt = evaluate;
        prompt.whole_sequences = true;
        prompt.B = c.sequence_parallel ? size_t(c.tp) : 1;
        prompt.T = size_t(c.prefix);
        run.plans.prompt = add(prompt);
        if (trains)
            note(run, concat("--adapter ", c.adapter, ": a prompt's rows become keys and values of "
                             "each layer, and these are trained, as a prefix"));
    }

    // Generate texts, and sample answers to train on.
    if (c.sample_tokens > 0 && !c.eval)
        run.plans.generate = add(generate_options(run, evaluate));
    if (has_rollouts(c))
        run.plans.rollout = add(rollout_options(c, train));
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

// ----------------------------------------------------------------------------
// fp16's loss scale

// Set a fixed scale from the text of --loss-scale: "" or what is wrong with it.
inline std::string fix_loss_scale(const std::string& text, LossScaling* scaling) {
    double value = 0;
    std::string wrong = parse_number(text, 1, 1 << 30, true, &value);
    if (!wrong.empty())
        return "--loss-scale " + wrong + ", or dynamic";
    scaling->dynamic = false;
    scaling->start = float(value);

    // Multiplying by a power of two changes exponents only, so it rounds nothing.
    int exponent = std::ilogb(value);
    if (value == std::ldexp(1, exponent)) return "";
    return concat("--loss-scale ", value, " is no power of two: try ", std::ldexp(1, exponent),
                  " or ", std::ldexp(2, exponent));
}

// Choose a run's loss scaling, Megatron-LM's where --loss-scale does not fix it: "" or what is
// wrong. Only fp16 has one.
inline std::string choose_loss_scaling(const Config& c, LossScaling* scaling) {
    scaling->on = c.precision == "fp16";
    if (!scaling->on && was_given(c, "loss-scale"))
        return "--loss-scale is for fp16 alone: give --precision fp16";
    bool fixed = scaling->on && c.loss_scale != "dynamic";
    return fixed ? fix_loss_scale(c.loss_scale, scaling) : "";
}

} // namespace llmc
