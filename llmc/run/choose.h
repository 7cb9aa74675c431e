// choose.h - before the run: what the flags name becomes a shape, text and data
//   Nothing is allocated here. Mistakes on the command line are found here, as far as they can be.
#pragma once
#include "../adapters.h"
#include "../comm/comm.h"
#include "../extra/ds_config.h"
#include "../extra/gguf.h"
#include "../family.h"
#include "../io/checkpoint.h"
#include "../io/checkpoint_load.h"
#include "../io/config.h"
#include "../io/config_check.h"
#include "../io/dataloader.h"
#include "../io/evaluate.h"
#include "../io/files.h"
#include "../io/hf_config.h"
#include "../io/huggingface.h"
#include "../io/model_files.h"
#include "../io/new_tokens.h"
#include "../io/tokenizer.h"
#include "../io/tokenizer_export.h"
#include "../io/tokenizer_files.h"
#include "../model.h"
#include "../presets.h"
#include "../text.h"
#include "../tune/adapter_files.h"
#include "../tune/chat.h"
#include "../tune/chat_templates.h"
#include "../tune/merged_adapters.h"
#include "../tune/named_adapters.h"
#include "../tune/prefix_files.h"
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
    bool folder = file_type(c.model) == S_IFDIR && !c.scratch && c.start.empty();
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
    bool made = c.adapter.empty() || was_given(c, "prefix");
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
        if (is_first_rank(run))
            printf("%s: %s\n", printable(path).c_str(), printable(line).c_str());
    or_die(wrong);
}

// Without --vocab, give new weights as many tokens as the tokenizer that the user names.
inline void follow_tokenizer(Run& run) {
    Config& c = run.config;
    if (has_new_weights(c) && was_given(c, "tokenizer") && !was_given(c, "vocab"))
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
    LLMC_USER_CHECK(wrong.empty(), "%s%s", one_screen(wrong).c_str(),
                    left_out ? "; --tokenizer byte leaves the folder's out" : "");
    if (left_out && c.tokenizer != "byte" && is_first_rank(run))
        printf("tokenizer: %s\n", c.tokenizer.c_str());

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
    if (is_first_rank(run))
        printf("new tokens: %s, up to token %d; the tables grow from %zu to %zu rows\n",
               printable(c.add_tokens).c_str(), run.tokenizer.vocab_size - 1, before, run.shape.V);
}

// Whether the run computes a validation loss. --eval with --evaluate, but without data, does not:
// the loss would be that of the project's own sources, which nobody asked for.
inline bool wants_validation(const Config& c) {
    if (c.loss == "grpo") return false;
    bool tasks_alone = !c.evaluate.empty() && !was_given(c, "data") && !was_given(c, "val");
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

// The folder whose chat template counts: that of the adapters, if it has one, else the model's.
inline std::string chat_folder(const Config& c) {
    nlohmann::json text;
    if (!c.adapter.empty() && read_chat_template(c.adapter, &text).empty())
        if (text.is_string())
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
        nlohmann::json text;
        if (asks && read_chat_template(folder, &text).empty() && !text.is_null())
            note(run, concat(folder, " has a chat template, and prompts are continued as plain "
                             "text: --chat-format auto asks them as questions"));
        return;
    }
    or_die(choose_chat(&run.chat, c.chat_format, folder, run.tokenizer));
    if (!has_conversations(c))
        or_die(run.chat.refused);
    if (is_first_rank(run))
        printf("chat format: %s, %s\n", run.chat.format.name.c_str(), run.chat.why.c_str());
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
    bool text = has_text(run.train) || has_text(run.val);
    LLMC_USER_CHECK(has_new_weights(c) || vocab_matches(run) || !text,
                    "--data: %s", foreign_tokenizer(run).c_str());

    // Look at the files on one rank, for all. Checkpoints name them; the manifests of all machines
    // must be equal, so each rank notes which they are.
    if (is_first_rank(run)) look_at_data(run);
    or_die(identify_files(files, &run.data["data"]));
    if (apart)
        or_die(identify_files(c.val, &run.data["val"]));

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
        or_die(carry_files(&run.exported, c.model));

    // If this run's shape differs from the folder's it is another model, and keeps no keys.
    if (model_identity(s) == model_identity(run.shape))
        or_die(keep_of_folder(&run.exported, c.model, own_tokenizer));
}

// If the model was taught a chat format, by this run or by adapters that it merges, export the
// format and the end of an answer.
inline void keep_chat(Run& run) {
    const Config& c = run.config;
    ExportTokenizer& e = run.exported;
    auto template_in = [](const std::string& folder) {
        nlohmann::json text;
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
    nlohmann::ordered_json bos;
    if (begin >= 0)
        bos = texts[begin];
    if (text != e.chat_template)
        or_die(export_template(&e, text, bos, texts[end]));
    else if (exports_adapters(run))
        e.files["chat_template.jinja"] = text;
}

// Check that a file for llama.cpp can hold this model, and print where it differs from the flags.
inline void prepare_gguf(Run& run) {
    const Config& c = run.config;
    or_die(gguf_check(run.shape, c.export_dir));
    bool known = vocab_matches(run);
    std::string why = known ? gguf_no_tokenizer(run.tokenizer)
                            : "--tokenizer " + c.tokenizer + " is not the model's";
    // Read the tokenizer's files too: one of them may hold the chat template.
    if (known)
        tokenizer_files(&run.exported.files, run.tokenizer, run.shape.P);
    if (!why.empty() && is_first_rank(run))
        printf("--export writes no tokenizer: %s\n", why.c_str());
    if (gguf_context(run.shape) < run.shape.P && is_first_rank(run))
        printf("--export: llama.cpp has no windows for this model: the file's context is the "
               "window's %zu positions, not %zu\n", gguf_context(run.shape), run.shape.P);
    note(run, gguf_wider(make_model(run.shape), gguf_type(c.export_dtype)));
    keep_for_export(run);
    keep_chat(run);
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
    int begin = begin_token(t);
    run.exported.bos = known && begin >= 0 ? begin : run.exported.eos;
    if (known && begin < 0 && !t.ends.empty())
        run.exported.bos = -1; // the tokenizer's folder names an end, and no beginning

    // Check what the format requires: a file of llm.c's, of llama.cpp's, or a folder.
    if (is_model_file(c.export_dir))
        return or_die(model_file_check(run.shape, c.export_dir, export_type(c)));
    if (is_gguf(c.export_dir))
        return prepare_gguf(run);

    // Export the model even if its tokenizer cannot be exported, but print why.
    std::string why = known ? tokenizer_files(&run.exported.files, t, run.shape.P)
                            : "--tokenizer " + c.tokenizer + " is not the model's";
    if (!why.empty() && is_first_rank(run))
        printf("--export writes no tokenizer.json: %s\n", why.c_str());
    keep_for_export(run);
    if (!c.add_tokens.empty())
        or_die(add_tokens_to_files(&run.exported, t, c.add_tokens));
    keep_chat(run);

    // Adapters take the tokenizer with them only where they change how it is used.
    if (exports_adapters(run) && !run.exported.files.count("chat_template.jinja"))
        run.exported.files.clear();
    if (exports_adapters(run))
        run.exported.files.erase("generation_config.json"); // nobody looks for it there
    or_die(hf_export_check(run.shape, c.export_dir, run.exported.files));
    if (is_first_rank(run))
        or_die(try_folder("export", c.export_dir));

    // Say at the start what PEFT will not load.
    std::string lost = run.shape.adapters && !c.merge ? peft_loses(run.shape) : "";
    if (!lost.empty() && is_first_rank(run))
        note(run, "--export " + c.export_dir + ": " + lost);

    // Announce that an older export will be replaced.
    if (is_first_rank(run) && !names_in(export_folder(c.export_dir)).empty())
        note(run, "--export " + c.export_dir + " holds an export, which the new one replaces");
}

} // namespace llmc
