// new_tokens.h - texts become tokens of a model that has its weights: rows behind its tables' own
//   1. The tokenizer finds them in text as it stands, and gives them the numbers behind its own.
//   2. The tables grow as far as these numbers reach. A model's rows in reserve serve first.
//   3. A new row is the mean of the folder's rows, so that a new token is neither likelier than the
//      others nor far from where they lie, and noise of a thousandth of their deviation, by --seed,
//      the table's name and the global element: no two tokens are the same, no layout differs.
//   An export has the tokens in its config.json and tokenizer.json, and needs no flag any more.
#pragma once
#include "huggingface.h"
#include "tokenizer_export.h"

namespace llmc {

// Texts between commas.
inline std::vector<std::string> texts_between_commas(const std::string& list) {
    std::vector<std::string> texts;
    for (size_t at = 0, end; at <= list.size(); at = end + 1) {
        end = std::min(list.find(',', at), list.size());
        texts.push_back(list.substr(at, end - at));
    }
    return texts;
}

// Give the tokenizer its new tokens. They are special: they hide what else they might be made of.
inline std::string add_tokens(Tokenizer* t, const std::string& list) {
    const std::string flag = "--add-tokens ";
    // Bytes have no list of pieces that could grow.
    if (t->kind == TokenizerKind::BYTE)
        return flag + list + ": --tokenizer byte has bytes alone: give a tokenizer's file";
    for (const std::string& text : texts_between_commas(list)) {
        // A text that is a token keeps its number: its row has learned.
        int token = std::max(find_token(t->special, text), find_token(t->raw.ids, text));
        if (text.empty())
            return flag + list + ": a text between two commas is empty";
        if (token >= 0)
            return concat(flag, text, ": is token ", token, " already: leave it out");

        // Number it behind all others.
        t->pieces.push_back(text);
        add_special(t, text, t->vocab_size++);
    }
    return "";
}

// A parameter with a row for each token.
inline bool is_token_table(const Model& model, const Parameter& p) {
    Role role = model.buckets[p.bucket].role;
    bool matrix = p.shape.size() == 2;
    return matrix && (role == Role::TOKENS || role == Role::HEAD);
}

// Draw the rows from `first` on by the mean and the deviation of those before, in whole (rows,C).
inline void draw_new_rows(std::vector<float>& whole, size_t first, size_t rows, size_t C,
                          uint64_t seed, const std::string& name) {
    std::vector<double> mean(C), square(C);
    for (size_t i = 0; i < first; i++)
        for (size_t c = 0; c < C; c++) {
            double x = whole[i * C + c];
            mean[c] += x / double(first);
            square[c] += x * x / double(first);
        }

    // One deviation for all columns: their mean variance.
    double variance = 0;
    for (size_t c = 0; c < C; c++)
        variance += (square[c] - mean[c] * mean[c]) / double(C);
    double noise = 1e-3 * std::sqrt(std::max(variance, 0.0));
    for (size_t i = first * C; i < rows * C; i++)
        whole[i] = float(mean[i % C] + noise * normal(seed, fnv1a(name), i));
}

// Load a folder whose tables have fewer rows than the model's, and draw the rest.
template <typename T, typename S>
std::string load_and_grow(Trainer<T, S>& t, const std::string& folder, uint64_t seed) {
    Shape before;
    std::string wrong = hf_read_config(&before, folder);
    if (!wrong.empty()) return wrong;

    // Load tables as the folder has them.
    std::vector<Parameter> parameters = t.model.parameters;
    for (Parameter& p : parameters)
        if (is_token_table(t.model, p)) p.file_rows = before.V;
    wrong = hf_load_parameters(t, folder, parameters);
    if (!wrong.empty()) return wrong;

    // All ranks see the whole table once, and keep their part of what is added.
    for (const Parameter& p : t.model.parameters) {
        if (!is_token_table(t.model, p)) continue;
        std::vector<float> whole = get_weight(t, p);
        draw_new_rows(whole, before.V, p.file_rows, p.cols(), seed, p.name);
        set_file_weight(t, p, whole);
    }
    return "";
}

// Write the new tokens into a tokenizer.json that is another's. A SentencePiece model cannot hold
// them, and stays out.
inline std::string add_tokens_to_files(std::map<std::string, std::string>* files,
                                       const Tokenizer& t, const std::string& list) {
    files->erase("tokenizer.model");
    auto found = files->find("tokenizer.json");
    if (found == files->end()) return "";
    auto json = nlohmann::ordered_json::parse(found->second, nullptr, false);
    if (!json.is_object())
        return t.name + ": is no JSON object";

    // Files that were made from the tokenizer have them.
    std::set<std::string> there;
    for (const auto& each : json["added_tokens"]) there.insert(each.value("content", ""));
    for (const std::string& text : texts_between_commas(list))
        if (!there.count(text))
            json["added_tokens"].push_back({{"id", find_token(t.special, text)},
                                            {"content", text},
                                            {"single_word", false},
                                            {"lstrip", false},
                                            {"rstrip", false},
                                            {"normalized", false},
                                            {"special", true}});
    found->second = json.dump(1) + "\n";
    return "";
}

} // namespace llmc
