// evaluate.h - bits per byte, and completion tasks: HellaSwag, ARC, PIQA, WinoGrande, LAMBADA - arXiv:1905.07830, 1803.05457, 1911.11641, 1907.10641, 1606.06031
//   A question has candidates, each a context and a completion of it; a candidate's log-likelihood
//   is the sum over the completion's tokens. All as EleutherAI's lm-evaluation-harness does it
//   (github.com/EleutherAI/lm-evaluation-harness, lm_eval/tasks and models/huggingface.py), with no
//   examples in front; test/lm_eval_check.py compares the two:
//     hellaswag     activity_label: ctx_a Ctx_b -> " " ending        " [title]" becomes ". ", what
//                   stands in [ ] goes, then two spaces become one; Ctx_b is Python's capitalize(),
//                   here of ASCII letters
//     arc-easy, arc-challenge   Question: question\nAnswer: -> " " choice
//     piqa          Question: goal\nAnswer: -> " " solution
//     winogrande    the sentence up to _ and an option -> " " what follows: the contexts differ
//     lambada       the text but its last word -> " " that word
//   acc         of choices: the likeliest is the right one; of equals the first counts
//               of lambada: each token of the word is the likeliest; of equal logits each is, where
//               the harness takes the first alone
//   acc_norm    by log-likelihood over characters of the completion, without the space in front
//   perplexity  exp(-mean log-likelihood) of lambada's words
//   +-          standard error: sample standard deviation / sqrt(n); of perplexity by its
//               derivative, where the harness draws samples
//   Tokens: white space at the context's end moves to the completion. The completion's tokens are
//   those of both texts together, behind as many as the context alone has. A tokenizer's token for
//   the beginning of a sequence stands in front (the harness's add_bos_token); an empty context is
//   that, or the end of text. What is longer than the model's positions loses its beginning.
//   Files: JSON lines as published. HellaSwag also as six lines a question (context, label, four
//   endings, without brackets); ARC as AI2 or as Hugging Face has it; PIQA's labels in the line, or
//   in X-labels.lst beside X.jsonl; LAMBADA also as plain text, a passage a line.
//   Candidates are samples of an evaluation's plan, padded to the longest: no row sees what follows
//   it.
//   Contract: any layout gives the same sums but for the rounding of its reductions.
//   bits per byte = loss / ln 2 / bytes of the targets' texts: tokenizers can be compared by it
#pragma once
#include <fstream>
#include <nlohmann/json.hpp>
#include "config.h"
#include "step.h"
#include "tokenizer_files.h"

struct Candidate {
    std::vector<int> tokens = {}; // context and completion
    size_t scored = 0;            // the completion's: the last so many
    size_t characters = 0;        // of the completion
    double log_likelihood = 0;
    bool greedy = false; // each of its tokens is the likeliest
};
struct Question {
    size_t first, count; // candidates
    int label;           // which of them is right
};
struct Task {
    std::string name;
    std::vector<Question> questions = {};
};
struct Evaluation {
    std::vector<Task> tasks = {};
    std::vector<Candidate> candidates = {};
    size_t longest = 1; // inputs of a candidate: its tokens but the last
};

// ----------------------------------------------------------------------------
// texts as Python sees them: the harness is written in it

// Bytes of the white space that text begins with, of str.strip(); 0: none.
inline size_t space_length(std::string_view text) {
    if (text.empty()) return 0;
    unsigned char c = (unsigned char)text[0];
    if (c == ' ' || (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x1f)) return 1;
    static const char* others[] = {"\u0085", "\u00a0", "\u1680", "\u2000", "\u2001",
                                   "\u2002", "\u2003", "\u2004", "\u2005", "\u2006",
                                   "\u2007", "\u2008", "\u2009", "\u200a", "\u2028",
                                   "\u2029", "\u202f", "\u205f", "\u3000"};
    for (const char* space : others)
        if (text.starts_with(space)) return strlen(space);
    return 0;
}
inline std::string_view strip_right(std::string_view text) {
    for (size_t n = 1; n <= 3 && n <= text.size(); n++) // bytes of a character
        if (space_length(text.substr(text.size() - n)) == n) text.remove_suffix(n), n = 0;
    return text;
}
inline std::string strip(std::string_view text) {
    while (size_t n = space_length(text)) text.remove_prefix(n);
    return std::string(strip_right(text));
}
inline size_t count_characters(std::string_view text) {
    size_t n = 0;
    for (char c : text) n += ((unsigned char)c & 0xc0) != 0x80;
    return n;
}
inline std::string capitalize(std::string text) {
    for (char& c : text) c = char(std::tolower((unsigned char)c));
    if (!text.empty()) text[0] = char(std::toupper((unsigned char)text[0]));
    return text;
}
// WikiHow's titles and marks in HellaSwag. A mark ends in its line.
inline std::string without_marks(const std::string& raw) {
    std::string text = replace_all(strip(raw), " [title]", ". "), out;
    for (size_t at = 0; at < text.size();) {
        size_t close = text[at] == '[' ? text.find_first_of("]\n", at) : std::string::npos;
        bool mark = close != std::string::npos && text[close] == ']';
        if (!mark) out += text[at];
        at = mark ? close + 1 : at + 1;
    }
    return replace_all(out, "  ", " ");
}

// ----------------------------------------------------------------------------
// a line of a file to the texts of a question

struct Texts {
    struct Pair {
        std::string context, completion;
    };
    std::vector<Pair> pairs = {};
    int label = 0;
};
inline Texts choices(const std::string& context, const std::vector<std::string>& completions,
                     int label) {
    Texts q;
    for (const std::string& c : completions) q.pairs.push_back({context, " " + c});
    q.label = label;
    return q;
}

// A field of a line, or a blank and `wrong` says what is missing.
typedef nlohmann::json Json;
inline std::string text_in(const Json& j, const char* name, std::string* wrong) {
    if (j.is_object() && j.contains(name) && j[name].is_string()) return j[name];
    *wrong = concat("wants a text \"", name, "\"");
    return "";
}
inline std::vector<std::string> texts_in(const Json& j, const char* name, std::string* wrong) {
    bool good = j.is_object() && j.contains(name) && j[name].is_array() && !j[name].empty();
    for (size_t i = 0; good && i < j[name].size(); i++) good = j[name][i].is_string();
    if (good) return j[name];
    *wrong = concat("wants a list of texts \"", name, "\"");
    return {};
}
inline int number_of(const std::string& text, const char* name, std::string* wrong) {
    bool good = !text.empty() && text.size() < 8 &&
                text.find_first_not_of("0123456789") == std::string::npos;
    if (good) return std::stoi(text);
    *wrong = concat("wants a number \"", name, "\", not '", text, "'");
    return 0;
}
inline int number_in(const Json& j, const char* name, std::string* wrong) { // 2 or "2"
    bool number = j.is_object() && j.contains(name) && j[name].is_number();
    std::string text = number ? j[name].dump() : text_in(j, name, wrong);
    return wrong->empty() ? number_of(text, name, wrong) : 0;
}

inline Texts hellaswag_texts(const Json& j, std::string* wrong) {
    std::string ctx = text_in(j, "ctx_a", wrong) + " " + capitalize(text_in(j, "ctx_b", wrong));
    std::vector<std::string> endings = texts_in(j, "endings", wrong);
    for (std::string& e : endings) e = without_marks(e);
    return choices(without_marks(text_in(j, "activity_label", wrong) + ": " + ctx), endings,
                   number_in(j, "label", wrong));
}
inline Texts arc_texts(const Json& j, std::string* wrong) {
    std::vector<std::string> texts, labels;
    bool ai2 = j.contains("question") && j["question"].is_object();
    const Json& holder = ai2 ? j["question"] : j;
    if (holder.contains("choices") && holder["choices"].is_array())
        for (const Json& c : holder["choices"])
            texts.push_back(text_in(c, "text", wrong)),
                labels.push_back(text_in(c, "label", wrong));
    else
        texts = texts_in(holder.value("choices", Json()), "text", wrong),
        labels = texts_in(holder.value("choices", Json()), "label", wrong);
    std::string question = text_in(holder, ai2 ? "stem" : "question", wrong),
                key = text_in(j, "answerKey", wrong);
    auto right = std::find(labels.begin(), labels.end(), key);
    if (wrong->empty() && (texts.size() != labels.size() || right == labels.end()))
        *wrong =
            concat("answerKey '", key, "' is none of the labels of the ", texts.size(), " choices");
    return choices("Question: " + question + "\nAnswer:", texts, int(right - labels.begin()));
}
inline Texts piqa_texts(const Json& j, std::string* wrong) {
    return choices("Question: " + text_in(j, "goal", wrong) + "\nAnswer:",
                   {text_in(j, "sol1", wrong), text_in(j, "sol2", wrong)},
                   number_in(j, "label", wrong));
}
inline Texts winogrande_texts(const Json& j, std::string* wrong) {
    std::string sentence = text_in(j, "sentence", wrong);
    size_t gap = std::min(sentence.find('_'), sentence.size());
    if (wrong->empty() && gap == sentence.size()) *wrong = "wants a _ in \"sentence\"";
    std::string rest = " " + strip(sentence.substr(std::min(gap + 1, sentence.size())));
    Texts q;
    for (const char* option : {"option1", "option2"})
        q.pairs.push_back({sentence.substr(0, gap) + text_in(j, option, wrong), rest});
    q.label = number_in(j, "answer", wrong) - 1;
    return q;
}
inline Texts lambada_texts(const Json& j, std::string* wrong) {
    std::string text = text_in(j, "text", wrong);
    size_t space = text.rfind(' '), word = space == std::string::npos ? 0 : space + 1;
    return choices(text.substr(0, word ? space : 0), {text.substr(word)}, 0);
}

struct TaskKind {
    const char* name;
    Texts (*texts)(const Json&, std::string*);
    bool acc_norm;
    bool perplexity; // one candidate a question: greedy or not
};
inline const std::vector<TaskKind>& task_kinds() {
    static const std::vector<TaskKind> kinds = {
        {"hellaswag", hellaswag_texts, true, false},    {"arc-easy", arc_texts, true, false},
        {"arc-challenge", arc_texts, true, false},      {"piqa", piqa_texts, true, false},
        {"winogrande", winogrande_texts, false, false}, {"lambada", lambada_texts, false, true},
    };
    return kinds;
}
inline const TaskKind* find_task_kind(const std::string& name) {
    for (const TaskKind& k : task_kinds())
        if (name == k.name) return &k;
    return nullptr;
}

// ----------------------------------------------------------------------------
// texts to tokens

// P: the model's positions. "" or what is wrong.
inline std::string make_candidate(Candidate* c, const Tokenizer& t, const Texts::Pair& pair,
                                  size_t P) {
    std::string context(strip_right(pair.context)), whole = pair.context + pair.completion;
    c->characters = count_characters(pair.completion) - 1; // without the space
    if (c->characters == 0) return "a completion is empty";
    size_t before = encode_from_start(t, context).size();
    c->tokens = encode_from_start(t, whole);
    if (context.empty() && t.bos < 0) {
        if (t.eot < 0) return "a context is empty, and the tokenizer has no token for that";
        c->tokens.insert(c->tokens.begin(), t.eot), before = 1;
    }
    if (c->tokens.size() <= before)
        return "a completion has no token of its own: '" + pair.completion + "'";
    c->scored = c->tokens.size() - before;
    if (c->scored > P)
        return "a completion has " + std::to_string(c->scored) + " tokens, the model " +
               std::to_string(P) + " positions";
    if (c->tokens.size() > P + 1) c->tokens.erase(c->tokens.begin(), c->tokens.end() - long(P + 1));
    return "";
}

inline std::string add_question(Evaluation* e, Task* task, const Texts& q, const Tokenizer& t,
                                size_t P) {
    size_t count = q.pairs.size();
    if (q.label < 0 || size_t(q.label) >= count)
        return "label " + std::to_string(q.label) + " is none of the " + std::to_string(count) +
               " choices, counted from 0";
    task->questions.push_back({e->candidates.size(), count, q.label});
    for (const Texts::Pair& pair : q.pairs) {
        Candidate c;
        std::string wrong = make_candidate(&c, t, pair, P);
        if (!wrong.empty()) return wrong;
        e->longest = std::max(e->longest, c.tokens.size() - 1);
        e->candidates.push_back(std::move(c));
    }
    return "";
}

// ----------------------------------------------------------------------------
// files

inline std::string read_lines(const std::string& path, std::vector<std::string>* lines) {
    std::ifstream in(path);
    if (!in) return path + ": " + strerror(errno);
    for (std::string line; std::getline(in, line);) {
        if (line.ends_with('\r')) line.pop_back();
        lines->push_back(line);
    }
    if (in.bad()) return path + ": cannot be read"; // a folder
    return lines->empty() ? path + ": is empty" : "";
}

// PIQA's labels are a file of their own: a line each.
inline std::string read_labels(const std::string& path, size_t count,
                               std::vector<std::string>* labels) {
    std::string beside = path.substr(0, path.rfind('.')) + "-labels.lst";
    std::string wrong = read_lines(beside, labels);
    if (!wrong.empty()) return path + ":1: has no \"label\", and " + wrong;
    if (labels->size() == count) return "";
    return beside + ": has " + std::to_string(labels->size()) + " labels for the " +
           std::to_string(count) + " questions of " + path;
}

// The texts of the question in lines [at, at + each).
inline Texts texts_of(const TaskKind& kind, const std::vector<std::string>& lines, size_t at,
                      size_t each, const std::vector<std::string>& labels, std::string* wrong) {
    if (each == 6 && at + 6 > lines.size()) {
        *wrong = "wants six lines: a context, a label and four endings";
        return {};
    }
    if (each == 6)
        return choices(lines[at], {&lines[at + 2], &lines[at + 6]},
                       number_of(lines[at + 1], "label", wrong));
    bool json = lines[0].starts_with('{');
    Json j = json ? Json::parse(lines[at], nullptr, false) : Json{{"text", lines[at]}};
    if (!j.is_object() || lines[at].empty()) {
        *wrong = json ? "is no JSON object" : "is empty";
        return {};
    }
    if (!labels.empty()) j["label"] = labels[at];
    return kind.texts(j, wrong);
}

// Adds a task's questions. Each must be right: a score of a part is another score.
inline std::string read_task(Evaluation* e, const TaskKind& kind, const std::string& path,
                             const Tokenizer& tokenizer, size_t P) {
    std::vector<std::string> lines, labels;
    std::string wrong = read_lines(path, &lines), name = kind.name;
    if (!wrong.empty()) return wrong;
    bool json = lines[0].starts_with('{');
    size_t each = name == "hellaswag" && !json ? 6 : 1;
    if (!json && each == 1 && name != "lambada") return path + ":1: is no JSON object";
    if (name == "piqa" && lines[0].find("\"label\"") == std::string::npos)
        wrong = read_labels(path, lines.size(), &labels);
    if (!wrong.empty()) return wrong;
    Task task = {name};
    for (size_t at = 0; at < lines.size(); at += each) {
        Texts q = texts_of(kind, lines, at, each, labels, &wrong);
        if (wrong.empty()) wrong = add_question(e, &task, q, tokenizer, P);
        if (!wrong.empty()) return path + ":" + std::to_string(at + 1) + ": " + wrong;
    }
    e->tasks.push_back(std::move(task));
    return "";
}

// "hellaswag=FILE,piqa=FILE"; "" or what is wrong.
inline std::string read_tasks(Evaluation* e, const std::string& value, const Tokenizer& tokenizer,
                              size_t P) {
    std::vector<std::string> names;
    for (const TaskKind& k : task_kinds()) names.push_back(k.name);
    std::string item, all;
    for (const std::string& n : names) all += (all.empty() ? "" : ", ") + n;
    for (std::istringstream in(value); std::getline(in, item, ',');) {
        size_t equals = item.find('=');
        if (equals == std::string::npos)
            return "--evaluate wants name=FILE, not '" + item + "'; names: " + all;
        std::string name = item.substr(0, equals), close = nearest(name, names);
        const TaskKind* kind = find_task_kind(name);
        if (!kind)
            return "--evaluate: there is no task '" + name + "'" +
                   (close.empty() ? "" : ": did you mean " + close + "?") + "; tasks: " + all;
        for (const Task& t : e->tasks)
            if (t.name == name) return "--evaluate: " + name + " is there twice";
        std::string wrong = read_task(e, *kind, item.substr(equals + 1), tokenizer, P);
        if (!wrong.empty()) return "--evaluate: " + wrong;
    }
    return "";
}

// ----------------------------------------------------------------------------
// running

// Samples 0 .. count - 1 of a window through an evaluation's plan; each() after every batch. The
// trainer is as before then. All ranks call it.
template <typename T, typename S, typename F>
void run_samples(Trainer<T, S>& t, int plan, uint64_t count, const Window& window, F each) {
    uint64_t cursor = t.cursor, samples_end = t.samples_end;
    Window before = t.window;
    int document_end = t.document_end;
    const Plan& p = t.plans[size_t(plan)];
    t.window = window, t.samples_end = count;
    t.document_end = -1; // losses with and without --document-mask are to be compared
    for (t.cursor = 0; t.cursor < count; t.cursor += p.B * size_t(t.grid.dp)) {
        run_plan(t, plan);
        each();
    }
    t.cursor = cursor, t.samples_end = samples_end, t.window = before;
    t.document_end = document_end;
}

// The plan that candidates run in: as long as the longest, as many as fit the rows of `like`.
inline Plan score_plan(const Plan& like, const Evaluation& e, size_t P) {
    Plan p = like;
    p.T = std::min(P, round_up(e.longest, size_t(8)));
    p.B = std::max(size_t(1), like.B * like.T / p.T);
    if (p.sequence_parallel) p.B = round_up(p.B, size_t(p.tp)); // ranks share the rows equally
    return p;
}

// Tokens and targets (T) of a candidate: only its completion is predicted.
inline void candidate_window(const Candidate& c, size_t T, int* tokens, int* targets) {
    size_t n = c.tokens.size() - 1;
    for (size_t i = 0; i < T; i++) {
        tokens[i] = i < n ? c.tokens[i] : 0;
        targets[i] = i < n && i + c.scored >= n ? c.tokens[i + 1] : -1;
    }
}

// Each candidate's log-likelihood, and whether it is greedy, on all ranks; all ranks call it.
template <typename T, typename S>
void score_candidates(Trainer<T, S>& t, int plan, std::vector<Candidate>& candidates) {
    const Plan& p = t.plans[size_t(plan)];
    size_t N = p.B * p.T, n = candidates.size();
    std::vector<double> sums(n, 0), likeliest(n, 0); // of one rank each; the others' are 0
    std::vector<acc_t<T>> rows(3 * N);
    auto window = [&](uint64_t sample, int* tokens, int* targets) {
        candidate_window(candidates[sample], p.T, tokens, targets);
        return std::string();
    };
    run_samples(t, plan, n, window, [&] {
        RowLosses<T> kept = row_losses(t, 0);
        if (!kept.losses || p.tp_rank > 0) return; // others have the same
        copy_out(rows.data(), kept.losses, rows.size() * sizeof(rows[0]), t.ctx.where);
        for (size_t b = 0; b < p.B; b++) {
            size_t sample = t.cursor + size_t(t.grid.dp_rank) * p.B + b;
            if (sample >= n) break;
            const Candidate& c = candidates[sample];
            size_t end = b * p.T + c.tokens.size() - 1;
            likeliest[sample] = 1;
            for (size_t i = end - c.scored; i < end; i++) {
                sums[sample] -= double(rows[i]);
                if (rows[2 * N + i] < rows[N + i]) likeliest[sample] = 0;
            }
        }
    });
    all_reduce_sum(t.comms.world, sums.data(), n, Cpu{});
    all_reduce_sum(t.comms.world, likeliest.data(), n, Cpu{});
    for (size_t i = 0; i < n; i++)
        candidates[i].log_likelihood = sums[i], candidates[i].greedy = likeliest[i] > 0;
}

// ----------------------------------------------------------------------------
// scores

struct Mean {
    double mean = 0, error = 0; // standard error
};
inline Mean mean_of(const std::vector<double>& x) {
    double n = double(x.size()), sum = 0, squares = 0;
    for (double v : x) sum += v;
    double mean = sum / n;
    for (double v : x) squares += (v - mean) * (v - mean);
    return {mean, std::sqrt(squares / (n - 1) / n)}; // NaN of one alone
}

struct Score {
    Mean acc, acc_norm, log_likelihood; // the last one of the right completions
    double perplexity() const { return std::exp(-log_likelihood.mean); }
};
inline Score score_task(const Task& task, const std::vector<Candidate>& candidates) {
    std::vector<double> acc, acc_norm, log_likelihood;
    for (const Question& q : task.questions) {
        const Candidate* c = &candidates[q.first];
        auto best = [&](auto value) { // the first of the largest
            size_t at = 0;
            for (size_t i = 1; i < q.count; i++)
                if (value(c[i]) > value(c[at])) at = i;
            return int(at);
        };
        auto sum = [](const Candidate& x) { return x.log_likelihood; };
        auto norm = [](const Candidate& x) { return x.log_likelihood / double(x.characters); };
        acc.push_back(q.count == 1 ? c[0].greedy : best(sum) == q.label);
        acc_norm.push_back(best(norm) == q.label);
        log_likelihood.push_back(c[q.label].log_likelihood);
    }
    return {mean_of(acc), mean_of(acc_norm), mean_of(log_likelihood)};
}

// hellaswag 2931/10042  acc 0.2540 +- 0.0043  acc_norm 0.2919 +- 0.0045
inline std::string score_text(const Task& task, const Score& s) {
    const TaskKind& kind = *find_task_kind(task.name);
    char line[256];
    size_t n = task.questions.size();
    double counted = kind.acc_norm ? s.acc_norm.mean : s.acc.mean;
    std::string text = task.name;
    snprintf(line, sizeof(line), " %.0f/%zu  acc %.4f +- %.4f", counted * double(n), n, s.acc.mean,
             s.acc.error);
    text += line;
    snprintf(line, sizeof(line), "  acc_norm %.4f +- %.4f", s.acc_norm.mean, s.acc_norm.error);
    if (kind.acc_norm) text += line;
    snprintf(line, sizeof(line), "  perplexity %.4g +- %.2g", s.perplexity(),
             s.perplexity() * s.log_likelihood.error);
    if (kind.perplexity) text += line;
    return text + "\n";
}
// Into an object of log.jsonl.
inline void score_log(Json& j, const Task& task, const Score& s) {
    const TaskKind& kind = *find_task_kind(task.name);
    j[task.name] = s.acc.mean;
    if (kind.acc_norm) j[task.name + "_norm"] = s.acc_norm.mean;
    if (kind.perplexity) j[task.name + "_perplexity"] = s.perplexity();
}

// ----------------------------------------------------------------------------
// bits per byte

// Bytes of the texts of the targets of a loader's first samples; special tokens have none.
inline size_t target_bytes(const DataLoader& d, const Tokenizer& t, uint64_t samples) {
    std::vector<size_t> length(d.V, 0);
    for (size_t token = 0; token < d.V; token++) length[token] = decode(t, int(token)).size();
    for (const auto& [text, token] : t.special.ids) length[size_t(token)] = 0;
    std::vector<int> tokens(d.T), targets(d.T);
    size_t bytes = 0;
    for (uint64_t s = 0; s < samples && load_window(d, s, tokens.data(), targets.data()).empty();
         s++)
        for (int target : targets) bytes += length[size_t(target)];
    return bytes;
}
// loss: the sum in nats over these targets
inline double bits_per_byte(double loss, size_t bytes) {
    return loss / std::log(2.0) / double(bytes);
}
