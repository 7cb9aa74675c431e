// new_tokens.h - texts become tokens of a model that has its weights: rows after its tables' own
//   1. The tokenizer finds these texts verbatim, and numbers them after its own tokens.
//   2. The tables grow as far as these numbers need. Rows that a model has in reserve come first.
//   3. A new row is the mean of the folder's rows, so that a new token is neither likelier than the
//      others nor far from them. Noise is added, a thousandth of the rows' deviation, drawn by
//      --seed, the table's name and the global element: no two tokens have the same row, and all
//      layouts draw the same.
//   An export has the tokens in its config.json and tokenizer.json, and needs the flag no more.
#pragma once
#include "../model.h"
#include "../ops/rand.h"
#include "../parameters.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "files.h"
#include "hf_config.h"
#include "huggingface.h"
#include "one_reader.h"
#include "tensor_source.h"
#include "tokenizer.h"
#include "tokenizer_export.h"
#include "tokenizer_files.h"

namespace llmc {

// Add new tokens to the tokenizer. They are special: their text is always found first, whatever
// other tokens it could be made of.
inline std::string add_tokens(Tokenizer* t, const std::string& list) {
    const std::string flag = "--add-tokens ";
    // Bytes have no list of pieces that could grow.
    if (t->kind == TokenizerKind::BYTE)
        return flag + list + ": --tokenizer byte has bytes alone: give a tokenizer's file";
    for (const std::string& text : texts_between_commas(list)) {
        // Refuse a text that is a token already: that token's row has been trained.
        int token = std::max(find_token(t->special, text), find_token(t->raw.ids, text));
        if (text.empty())
            return flag + list + ": a text between two commas is empty";
        if (token >= 0)
            return concat(flag, text, ": is token ", token, " already: leave it out");

        // Number the new token after all others.
        t->pieces.push_back(text);
        add_special(t, text, t->vocab_size++);
    }
    return "";
}

// Whether a parameter has a row for each token: a table, the head, or the head's bias. The
// norm beside the head is cut nowhere.
inline bool is_token_table(const Model& model, const Parameter& p) {
    Role role = model.buckets[p.bucket].role;
    if (p.is_value_table())
        return true;
    return p.shard.axis == 0 && (role == Role::TOKENS || role == Role::HEAD);
}

// Draw the rows of `whole` (rows,C) from `first` on, by the mean and the deviation of those before.
inline void draw_new_rows(std::vector<float>& whole, size_t first, size_t rows, size_t C,
                          uint64_t seed, const std::string& name) {
    std::vector<double> mean(C), square(C);
    for (size_t i = 0; i < first; i++)
        for (size_t c = 0; c < C; c++) {
            double x = whole[i * C + c];
            mean[c] += x / double(first);
            square[c] += x * x / double(first);
        }

    // Take one deviation for all columns: the root of their mean variance.
    double variance = 0;
    for (size_t c = 0; c < C; c++)
        variance += (square[c] - mean[c] * mean[c]) / double(C);
    double noise = 1e-3 * std::sqrt(std::max(variance, 0.0));
    for (size_t i = first * C; i < rows * C; i++)
        whole[i] = float(mean[i % C] + noise * normal(seed, fnv1a(name), i));
}

// Load a folder whose tables have fewer rows than the model's, and draw the remaining rows.
template <typename T, typename S>
std::string load_and_grow(Trainer<T, S>& t, const std::string& folder, uint64_t seed,
                          const Dialects& dialects = {}) {
    Shape before;
    LLMC_TRY(first_error(t.comms.world, hf_read_config(&before, folder)));

    // Load the tables with the folder's number of rows.
    std::vector<Parameter> parameters = t.model.parameters;
    for (Parameter& p : parameters)
        if (is_token_table(t.model, p))
            p.file_rows = before.V;
    LLMC_TRY(hf_load_parameters(t, folder, parameters, dialects));

    // Let all ranks see a whole table at a time; each keeps its part of the new rows.
    for (const Parameter& p : t.model.parameters) {
        if (!is_token_table(t.model, p)) continue;
        std::vector<float> whole = get_weight(t, p);
        draw_new_rows(whole, before.V, p.file_rows, p.cols(), seed, p.name);
        set_file_weight(t, p, whole);
    }
    return "";
}

// Add the new tokens to the files of an export that came with the model's folder. A SentencePiece
// model cannot hold them: without a tokenizer.json beside it, which readers prefer, it is left out.
inline std::string add_tokens_to_files(ExportTokenizer* e, const Tokenizer& t,
                                       const std::string& list) {
    if (!e->files.count("tokenizer.json")) {
        e->files.erase("tokenizer.model");
        return "";
    }

    // Describe each token as transformers does, in the order of their numbers: its library counts.
    std::vector<OrderedJson> added;
    for (const std::string& text : texts_between_commas(list))
        added.push_back(special_token_json(find_token(t.special, text), text));

    // Skip tokens that are there: a file made from our tokenizer has them already.
    std::string wrong = change_json(e, "tokenizer.json", [&](OrderedJson& j) {
        std::set<std::string> there;
        for (const auto& each : j["added_tokens"]) there.insert(each.value("content", ""));
        for (const auto& token : added)
            if (!there.count(token["content"]))
                j["added_tokens"].push_back(token);
    });

    // List them where classes of transformers, and llama.cpp's converter, look first.
    if (wrong.empty() && e->files.count("tokenizer_config.json"))
        wrong = change_json(e, "tokenizer_config.json", [&](OrderedJson& j) {
            for (auto token : added)
                if (std::string id = token["id"].dump(); j.contains("added_tokens_decoder")) {
                    token.erase("id");
                    j["added_tokens_decoder"][id] = token;
                }
        });
    return wrong;
}

} // namespace llmc
