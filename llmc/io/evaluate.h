// evaluate.h - bits per byte, and completion tasks: HellaSwag, ARC, PIQA, WinoGrande, LAMBADA
//   arXiv:1905.07830 (HellaSwag), 1803.05457 (ARC), 1911.11641 (PIQA), 1907.10641 (WinoGrande),
//   1606.06031 (LAMBADA)
//   A question has candidates: each a context and a completion of it. A candidate's log-likelihood
//   is the sum over the completion's tokens. All follows EleutherAI's harness
//   (github.com/EleutherAI/lm-evaluation-harness, lm_eval/tasks and models/huggingface.py), without
//   examples in front; test/io/lm_eval_check.py compares the two.
//
//   Texts: context -> completion
//     hellaswag     activity_label: ctx_a Ctx_b -> " " ending        " [title]" becomes ". ", text
//                   in [ ] is removed, then two spaces become one. Ctx_b is Python's capitalize(),
//                   here of ASCII letters only
//     arc-easy, arc-challenge   Question: question\nAnswer: -> " " choice
//     piqa          Question: goal\nAnswer: -> " " solution
//     winogrande    the sentence up to _ and an option -> " " the rest: the contexts differ
//     lambada       the text without its last word -> " " that word
//
//   Scores
//     acc         choices: the likeliest completion is the right one; among equals the first counts
//                 lambada: each token of the word is the likeliest. Among equal logits each counts
//                 as the likeliest; the harness takes only the first
//     acc_norm    by log-likelihood over characters of the completion, without the space in front
//     perplexity  exp(-mean log-likelihood) of lambada's words
//     +-          standard error: sample standard deviation / sqrt(n). For perplexity it follows
//                 from the derivative; the harness draws samples
//     bits per byte = loss / ln 2 / bytes of the targets' texts: compares tokenizers
//
//   Tokens: white space at the context's end moves to the completion. Context and completion are
//   encoded together; the completion's tokens follow as many tokens as the context alone has. A
//   tokenizer's token that begins sequences stands in front (the harness's add_bos_token). An empty
//   context is that token, or the end of text. A candidate longer than the model's positions loses
//   its beginning.
//   Files: JSON lines as published. HellaSwag also as six lines a question (context, label, four
//   endings, without brackets); ARC in AI2's or Hugging Face's form; PIQA's labels in the line, or
//   in X-labels.lst beside X.jsonl; LAMBADA also as plain text, a passage a line.
//   CORE, and --eval's value: core.h. Running: likelihood.h.
#pragma once
#include "../comm/text.h"
#include "dataloader.h"
#include "files.h"
#include "json.h"
#include "tokenizer.h"
#include "tokenizer_files.h"

namespace llmc {

// A context and a completion as tokens, and how likely the model finds the completion.
struct Candidate {
    std::vector<int> tokens = {}; // context, then completion
    size_t scored = 0;            // number of the completion's tokens, at the end of `tokens`
    size_t characters = 0;        // of the completion, without the space in front; CORE: `scored`
    double log_likelihood = 0;
    bool greedy = false; // each of the completion's tokens is the likeliest
};

// A question. Its candidates lie side by side in Evaluation::candidates.
struct TaskQuestion {
    size_t first, count; // range of its candidates
    int label;           // index of the right one
};

// A task of --eval, with its questions in the order of the file.
struct Task {
    std::string name;
    std::vector<TaskQuestion> questions = {};
    int shots = -1;   // of CORE: solved examples before each question; -1: another suite's task
    double guess = 0; // of CORE: the accuracy of guessing
};

// All questions of --eval. The candidates of all tasks run together.
struct Evaluation {
    std::vector<Task> tasks = {};
    std::vector<Candidate> candidates = {};
};

// ----------------------------------------------------------------------------
// texts as Python sees them, since the harness is written in Python

// Bytes of the white-space character with which the text begins, as str.strip() defines it, or 0.
inline size_t space_length(std::string_view text) {
    if (text.empty()) return 0;
    // ASCII: tab to carriage return, the four separators 0x1c to 0x1f, the blank.
    unsigned char c = (unsigned char)text[0];
    if (c == ' ' || (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x1f))
        return 1;

    // The rest of Unicode's white space, in UTF-8. Python includes U+0085, C's isspace() does not.
    static const char* others[] = {"\u0085", "\u00a0", "\u1680", "\u2000", "\u2001",
                                   "\u2002", "\u2003", "\u2004", "\u2005", "\u2006",
                                   "\u2007", "\u2008", "\u2009", "\u200a", "\u2028",
                                   "\u2029", "\u202f", "\u205f", "\u3000"};
    for (const char* space : others)
        if (text.starts_with(space))
            return strlen(space);
    return 0;
}

// Remove white space at the end. A character of white space has 1 to 3 bytes.
inline std::string_view strip_right(std::string_view text) {
    for (size_t n = 1; n <= 3 && n <= text.size(); n++) {
        if (space_length(text.substr(text.size() - n)) != n)
            continue;
        text.remove_suffix(n);
        n = 0; // start again with one byte
    }
    return text;
}

// Python's trimmed(): remove white space at both ends.
inline std::string trimmed(std::string_view text) {
    while (size_t n = space_length(text))
        text.remove_prefix(n);
    return std::string(strip_right(text));
}

// Count code points, as Python's len() does; acc_norm divides by them.
inline size_t count_characters(std::string_view text) {
    size_t n = 0;
    for (char c : text) n += ((unsigned char)c & 0xc0) != 0x80; // UTF-8: skip continuation bytes
    return n;
}

// Python's capitalize(), for ASCII letters only.
inline std::string capitalize(std::string text) {
    // All other letters become lower case, so "NASA flies" becomes "Nasa flies", as in the harness.
    for (char& c : text)
        c = char(std::tolower((unsigned char)c));
    if (!text.empty())
        text[0] = char(std::toupper((unsigned char)text[0]));
    return text;
}

// Remove WikiHow's titles and marks from HellaSwag's texts. A mark ends in its line.
inline std::string without_marks(const std::string& raw) {
    // An opening bracket without a closing one in its line is text, and stays.
    std::string text = replace_all(trimmed(raw), " [title]", ". ");
    std::string out;
    for (size_t at = 0; at < text.size();) {
        size_t close = text[at] == '[' ? text.find_first_of("]\n", at) : std::string::npos;
        bool mark = close != std::string::npos && text[close] == ']';
        if (!mark) out += text[at];
        at = mark ? close + 1 : at + 1;
    }
    return replace_all(out, "  ", " ");
}

// ----------------------------------------------------------------------------
// from a line of a file to the texts of a question

// A question in words. Usually the completions differ, in WinoGrande the contexts do.
struct Texts {
    struct Pair {
        std::string context, completion;
    };
    std::vector<Pair> pairs = {};
    int label = 0;
};

// Join one context with completions, each after a space.
inline Texts as_choices(const std::string& context, const std::vector<std::string>& completions,
                     int label) {
    Texts q;
    for (const std::string& c : completions)
        q.pairs.push_back({context, " " + c});
    q.label = label;
    return q;
}

// Readers continue after an error with a blank field; read_task() checks `wrong` once a question.

// The text of a field. If it is missing, `wrong` names it, and the text is blank.
inline std::string text_in(const Json& j, const char* name, std::string* wrong) {
    if (j.is_object() && j.contains(name) && j[name].is_string())
        return j[name];
    *wrong = concat("wants a text \"", name, "\"");
    return "";
}

// The texts of a list. An empty list is an error, because a question needs a candidate.
inline std::vector<std::string> texts_in(const Json& j, const char* name, std::string* wrong) {
    bool good = j.is_object() && j.contains(name);
    good = good && j[name].is_array() && !j[name].empty();
    for (size_t i = 0; good && i < j[name].size(); i++)
        good = j[name][i].is_string();
    if (good) return j[name];
    *wrong = concat("wants a list of texts \"", name, "\"");
    return {};
}

// Read a small number in digits.
inline int number_of(const std::string& text, const char* name, std::string* wrong) {
    // Accept seven digits at most: std::stoi() throws beyond an int, and no label is that long.
    bool good = !text.empty() && text.size() < 8 &&
                text.find_first_not_of("0123456789") == std::string::npos;
    if (good) return std::stoi(text);
    *wrong = concat("wants a number \"", name, "\", not '", text, "'");
    return 0;
}

// Read a number that may be a text: 2 or "2".
inline int number_in(const Json& j, const char* name, std::string* wrong) {
    bool number = j.is_object() && j.contains(name) && j[name].is_number();
    std::string text = number ? j[name].dump() : text_in(j, name, wrong);
    return wrong->empty() ? number_of(text, name, wrong) : 0;
}

// HellaSwag: {"activity_label", "ctx_a", "ctx_b", "endings": [4 texts], "label"}
inline Texts hellaswag_texts(const Json& j, std::string* wrong) {
    // In the file the second half of the context begins in lower case.
    std::string ctx = text_in(j, "ctx_a", wrong) + " " + capitalize(text_in(j, "ctx_b", wrong));
    std::vector<std::string> endings = texts_in(j, "endings", wrong);
    for (std::string& e : endings)
        e = without_marks(e);
    return as_choices(without_marks(text_in(j, "activity_label", wrong) + ": " + ctx), endings,
                   number_in(j, "label", wrong));
}

// ARC. AI2's files have {"question": {"stem", "choices": [{"text", "label"}, ...]}}, Hugging Face's
// {"question", "choices": {"text": [...], "label": [...]}}.
inline Texts arc_texts(const Json& j, std::string* wrong) {
    // Read the choices from either form.
    bool ai2 = j.contains("question") && j["question"].is_object();
    const Json& holder = ai2 ? j["question"] : j;
    Json list = holder.value("choices", Json());
    std::vector<std::string> texts, labels;
    if (list.is_array()) {
        for (const Json& c : list) {
            texts.push_back(text_in(c, "text", wrong));
            labels.push_back(text_in(c, "label", wrong));
        }
    } else {
        texts = texts_in(list, "text", wrong);
        labels = texts_in(list, "label", wrong);
    }

    // Find the right one by its label: some files label the choices A to D, others 1 to 4.
    std::string question = text_in(holder, ai2 ? "stem" : "question", wrong);
    std::string key = text_in(j, "answerKey", wrong);
    auto right = std::ranges::find(labels, key);
    if (wrong->empty() && (texts.size() != labels.size() || right == labels.end()))
        *wrong = concat("answerKey '", key, "' is none of the labels of the ", texts.size(),
                        " choices");
    return as_choices("Question: " + question + "\nAnswer:", texts, int(right - labels.begin()));
}

// PIQA: {"goal", "sol1", "sol2"}, with "label" or a file of labels
inline Texts piqa_texts(const Json& j, std::string* wrong) {
    return as_choices("Question: " + text_in(j, "goal", wrong) + "\nAnswer:",
                   {text_in(j, "sol1", wrong), text_in(j, "sol2", wrong)},
                   number_in(j, "label", wrong));
}

// WinoGrande: {"sentence" with a _, "option1", "option2", "answer": "1" or "2"}
inline Texts winogrande_texts(const Json& j, std::string* wrong) {
    // Put each option into the gap. Both are scored by the rest of the sentence, which they share.
    std::string sentence = text_in(j, "sentence", wrong);
    size_t gap = std::min(sentence.find('_'), sentence.size());
    if (wrong->empty() && gap == sentence.size())
        *wrong = "wants a _ in \"sentence\"";
    std::string before = sentence.substr(0, gap);
    std::string rest = " " + trimmed(sentence.substr(std::min(gap + 1, sentence.size())));
    Texts q;
    for (const char* option : {"option1", "option2"})
        q.pairs.push_back({before + text_in(j, option, wrong), rest});
    q.label = number_in(j, "answer", wrong) - 1;
    return q;
}

// LAMBADA: {"text"}. A passage without a space is a completion alone.
inline Texts lambada_texts(const Json& j, std::string* wrong) {
    std::string text = text_in(j, "text", wrong);
    size_t space = text.rfind(' ');
    if (space == std::string::npos)
        return as_choices("", {text}, 0);
    return as_choices(text.substr(0, space), {text.substr(space + 1)}, 0);
}

// A kind of task: the function that reads its lines, and its scores beside acc.
struct TaskKind {
    const char* name;
    Texts (*texts)(const Json&, std::string*);
    bool acc_norm;
    bool perplexity; // one candidate a question: is it greedy?
};

// The tasks that --eval knows. A new one is a row, and a function that reads its lines.
inline const std::vector<TaskKind>& task_kinds() {
    // clang-format off
    static const std::vector<TaskKind> kinds = {
        {"hellaswag",     hellaswag_texts,  true,  false},
        {"arc-easy",      arc_texts,        true,  false},
        {"arc-challenge", arc_texts,        true,  false},
        {"piqa",          piqa_texts,       true,  false},
        {"winogrande",    winogrande_texts, false, false},
        {"lambada",       lambada_texts,    false, true},
    };
    // clang-format on
    return kinds;
}

// The row of a task, or null.
inline const TaskKind* find_task_kind(const std::string& name) {
    for (const TaskKind& k : task_kinds())
        if (name == k.name) return &k;
    return nullptr;
}

// ----------------------------------------------------------------------------
// from texts to tokens

// Turn a context and a completion into tokens. P: the model's positions. "" or what is wrong.
inline std::string make_candidate(Candidate* c, const Tokenizer& t, const Texts::Pair& pair,
                                  size_t P) {
    c->characters = count_characters(pair.completion) - 1; // without the space
    if (c->characters == 0)
        return "a completion is empty";

    // Encode both texts together. The boundary is where the tokens of the context alone end.
    std::string context(strip_right(pair.context));
    size_t before = encode_from_start(t, context).size();
    c->tokens = encode_from_start(t, pair.context + pair.completion);
    if (context.empty() && t.bos < 0) {
        if (t.eot < 0)
            return "a context is empty, and the tokenizer has no token for that";
        c->tokens.insert(c->tokens.begin(), t.eot);
        before = 1;
    }
    if (c->tokens.size() <= before)
        return "a completion has no token of its own: '" + pair.completion + "'";
    c->scored = c->tokens.size() - before;

    // Cut the beginning off: P inputs predict P tokens, and the first token is not predicted.
    if (c->scored > P)
        return concat("a completion has ", c->scored, " tokens, the model ", P, " positions");
    if (c->tokens.size() > P + 1)
        c->tokens.erase(c->tokens.begin(), c->tokens.end() - long(P + 1));
    return "";
}

// Add a question and its candidates to a task.
inline std::string add_question(Evaluation* e, Task* task, const Texts& q, const Tokenizer& t,
                                size_t P) {
    // Check the label, which files count from 0, from 1 or in letters.
    size_t count = q.pairs.size();
    if (q.label < 0 || size_t(q.label) >= count)
        return concat("label ", q.label, " is none of the ", count, " choices, counted from 0");
    task->questions.push_back({e->candidates.size(), count, q.label});
    for (const Texts::Pair& pair : q.pairs) {
        Candidate c;
        LLMC_TRY(make_candidate(&c, t, pair, P));
        e->candidates.push_back(std::move(c));
    }
    return "";
}

// ----------------------------------------------------------------------------
// files

// Read a file's lines.
inline std::string read_lines(const std::string& path, std::vector<std::string>* lines) {
    std::string text;
    LLMC_TRY(read_whole_file(path, &text));
    *lines = lines_of(text);
    return lines->empty() ? path + ": is empty" : "";
}

// Read PIQA's labels from their own file, one a line.
inline std::string read_labels(const std::string& path, size_t count,
                               std::vector<std::string>* labels) {
    std::string beside = path.substr(0, path.rfind('.')) + "-labels.lst";
    std::string wrong = read_lines(beside, labels);
    if (!wrong.empty())
        return path + ":1: has no \"label\", and " + wrong;
    if (labels->size() == count) return "";
    return concat(beside, ": has ", labels->size(), " labels for the ", count, " questions of ",
                  path);
}

// The texts of the question in lines [at, at + each): one line, or HellaSwag's six.
inline Texts texts_of(const TaskKind& kind, const std::vector<std::string>& lines, size_t at,
                      size_t each, const std::vector<std::string>& labels, std::string* wrong) {
    // HellaSwag's lines are a context, a label and four endings.
    if (each == 6 && at + 6 > lines.size()) {
        *wrong = "wants six lines: a context, a label and four endings";
        return {};
    }
    if (each == 6)
        return as_choices(lines[at], {&lines[at + 2], &lines[at + 6]},
                       number_of(lines[at + 1], "label", wrong));

    // Parse a line of JSON, or take a line of LAMBADA's plain text.
    bool json = lines[0].starts_with('{');
    Json j = {{"text", lines[at]}};
    *wrong = lines[at].empty() ? "is empty" : "";
    if (wrong->empty() && json) *wrong = parse_record(lines[at], &j);
    if (!wrong->empty()) return {};
    if (!labels.empty())
        j["label"] = labels[at];
    return kind.texts(j, wrong);
}

// Add a task's questions. Every line must be right: a score over a part is another score.
inline std::string read_task(Evaluation* e, const TaskKind& kind, const std::string& path,
                             const Tokenizer& tokenizer, size_t P) {
    // Find which of its forms the file has.
    std::vector<std::string> lines, labels;
    LLMC_TRY(read_lines(path, &lines));
    std::string name = kind.name;
    bool json = lines[0].starts_with('{');
    size_t each = name == "hellaswag" && !json ? 6 : 1; // lines a question
    if (!json && each == 1 && name != "lambada")
        return path + ":1: " + no_record(lines[0]);
    if (name == "piqa" && lines[0].find("\"label\"") == std::string::npos)
        LLMC_TRY(read_labels(path, lines.size(), &labels));

    // Read question by question. A message names the file and the question's first line.
    Task task = {name};
    std::string wrong;
    for (size_t at = 0; at < lines.size(); at += each) {
        Texts q = texts_of(kind, lines, at, each, labels, &wrong);
        if (wrong.empty())
            wrong = add_question(e, &task, q, tokenizer, P);
        if (!wrong.empty())
            return concat(path, ":", at + 1, ": ", wrong);
    }
    e->tasks.push_back(std::move(task));
    return "";
}

// ----------------------------------------------------------------------------
// scores

// A score and its uncertainty over the questions.
struct Mean {
    double mean = 0, error = 0; // standard error; NaN for a single value
};
inline Mean mean_of(const std::vector<double>& x) {
    // Take two passes: a sum of squared differences does not cancel, a difference of squares would.
    double n = double(x.size());
    double sum = 0;
    double squares = 0;
    for (double v : x) sum += v;
    double mean = sum / n;
    for (double v : x)
        squares += (v - mean) * (v - mean);
    return {mean, std::sqrt(squares / (n - 1) / n)};
}

// A task's means over its questions. score_text() shows those that its kind asks for.
struct Score {
    Mean acc, acc_norm;
    Mean log_likelihood; // of the right completions
    double perplexity() const { return std::exp(-log_likelihood.mean); }
};

// Compare the candidates of each question.
inline Score score_task(const Task& task, const std::vector<Candidate>& candidates) {
    std::vector<double> acc, acc_norm, log_likelihood; // [question]
    for (const TaskQuestion& q : task.questions) {
        const Candidate* c = &candidates[q.first];
        auto best = [&](auto value) { // the first of the largest
            size_t at = 0;
            for (size_t i = 1; i < q.count; i++)
                if (value(c[i]) > value(c[at]))
                    at = i;
            return int(at);
        };

        // A single candidate has nothing to be compared with: it is right if it is greedy.
        auto sum = [](const Candidate& x) { return x.log_likelihood; };
        auto norm = [](const Candidate& x) { return x.log_likelihood / double(x.characters); };
        acc.push_back(q.count == 1 ? c[0].greedy : best(sum) == q.label);
        acc_norm.push_back(q.count == 1 ? c[0].greedy : best(norm) == q.label);
        log_likelihood.push_back(c[q.label].log_likelihood);
    }
    return {mean_of(acc), mean_of(acc_norm), mean_of(log_likelihood)};
}

// A task's scores as a line:
// hellaswag 2931/10042  acc 0.2540 +- 0.0043  acc_norm 0.2919 +- 0.0045
inline std::string score_text(const Task& task, const Score& s) {
    const TaskKind& kind = *find_task_kind(task.name);
    size_t n = task.questions.size();
    // Count by the score that is usually published: acc_norm if the task has it.
    double right = (kind.acc_norm ? s.acc_norm.mean : s.acc.mean) * double(n);
    std::string text = task.name;
    text += formatted(" %.0f/%zu  acc %.4f +- %.4f", right, n, s.acc.mean, s.acc.error);
    if (kind.acc_norm)
        text += formatted("  acc_norm %.4f +- %.4f", s.acc_norm.mean, s.acc_norm.error);

    // The derivative of exp(-x) carries the standard error over.
    double error = s.perplexity() * s.log_likelihood.error;
    if (kind.perplexity) text += formatted("  perplexity %.4g +- %.2g", s.perplexity(), error);
    // A single question has no error.
    text = replace_all(replace_all(text, " +- -nan", ""), " +- nan", "");
    return text + "\n";
}

// Add a task's scores to an object of log.jsonl.
inline void score_log(Json& j, const Task& task, const Score& s) {
    const TaskKind& kind = *find_task_kind(task.name);
    j[task.name] = s.acc.mean;
    if (kind.acc_norm)
        j[task.name + "_norm"] = s.acc_norm.mean;
    if (kind.perplexity)
        j[task.name + "_perplexity"] = s.perplexity();
}

// ----------------------------------------------------------------------------
// bits per byte

// Bytes of the targets' texts, over a loader's first samples. Special tokens have none.
inline size_t target_bytes(const DataLoader& d, const Tokenizer& t, uint64_t samples) {
    // Decode each token of the vocabulary once, not each target.
    std::vector<size_t> length(d.V, 0); // [token]
    for (size_t token = 0; token < d.V; token++)
        length[token] = decode(t, int(token)).size();
    for (const auto& [text, token] : t.special)
        length[size_t(token)] = 0;

    // Sum over the targets of the windows that the validation loss has seen.
    std::vector<int> tokens(d.T), targets(d.T);
    size_t bytes = 0;
    for (uint64_t i = 0; i < samples; i++) {
        if (!load_window(d, i, tokens.data(), targets.data()).empty())
            break;
        for (int target : targets)
            bytes += target < 0 ? 0 : length[size_t(target)];
    }
    return bytes;
}

// Bits per byte. loss: the sum in nats over these targets.
inline double bits_per_byte(double loss, size_t bytes) {
    return loss / std::log(2.0) / double(bytes);
}

} // namespace llmc
