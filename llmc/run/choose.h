// choose.h - before the run: what the flags name becomes a shape, text and data
//   Nothing is allocated here. Mistakes on the command line are found here, as far as they can be.
#pragma once
#include "../adapters.h"
#include "../comm/comm.h"
#include "../io/chat.h"
#include "../io/chat_templates.h"
#include "../io/checkpoint.h"
#include "../io/config.h"
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
#include "../text.h"
#include "run.h"

namespace llmc {

// ----------------------------------------------------------------------------
// shape, tokenizer, prompt, data

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
    bool train = c.steps > 0 && !c.eval, apart = !c.val.empty();
    const LineSource* source = has_conversations(c) ? &lines : nullptr;
    if (train)
        or_die(data_open(&run.train, files, Split::TRAIN, apart, run.tokenizer, c.seq, run.shape.V,
                         c.seed, source));
    or_die(data_open(&run.val, apart ? c.val : files, Split::VAL, apart, run.tokenizer, c.seq,
                     run.shape.V, c.seed, source));

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
    LLMC_USER_CHECK(!is_gguf(c.export_dir) || run.export_file,
                    "--export %s: convert_gpt writes files of llama.cpp's: --export a folder, then "
                    "convert_gpt FOLDER %s",
                    c.export_dir.c_str(), c.export_dir.c_str());
    if (is_gguf(c.export_dir)) {
        keep_for_export(run);
        return keep_chat(run);
    }

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

    // Announce that an older export will be replaced.
    if (is_first_rank(run) && !names_in(export_folder(c.export_dir)).empty())
        note(run, "--export " + c.export_dir + " holds an export, which the new one replaces");
}

} // namespace llmc
