// core.h - CORE: tasks with solved examples in front; guessing scores 0 - arXiv:2406.11794
//   CORE is the mean over the tasks of (accuracy - guess) / (1 - guess). All follows nanochat
//   (github.com/karpathy/nanochat, nanochat/core_eval.py and scripts/base_eval.py).
//   Files, as its eval_bundle has them
//     core.yaml            icl_tasks: a list of tasks with label, dataset_uri, num_fewshot: [n],
//                          icl_task_type, and continuation_delimiter, else a space.
//                          has_categories has no effect; other keys are refused
//     eval_data/URI        the items of a task, JSON lines
//     eval_meta_data.csv   columns "Eval Task", a label, and "Random baseline", in percent
//   Texts: context, delimiter, continuation. A prompt is each shot and a blank line, then the item.
//   It is encoded whole, after the token that begins a text, or else ends one, and keeps as many
//   of its last tokens as the model has positions. Scored are
//     multiple_choice     query -> each of choices: from where the prompts' tokens differ
//     schema              each of context_options -> continuation: what all prompts end in
//     language_modeling   context, trimmed -> continuation: from where the trimmed prompt without
//                         it ends. Right if each token is the likeliest; among equal logits each
//                         counts, in nanochat the first
//   Among choices the lowest mean loss wins, the first of equals.
//   Draws are Python's: Random(1337) shuffles a task's items, and Random(1234 + i) samples the
//   shots of item i from the others.
#pragma once
#include <bit>
#include <numeric>
#include <random>
#include "../comm/text.h"
#include "config.h"
#include "evaluate.h"
#include "generate.h"
#include "json.h"
#include "tokenizer.h"

namespace llmc {

// ----------------------------------------------------------------------------
// Python's random

// The state with which Python seeds its Mersenne Twister: init_by_array() of one word
// (Matsumoto and Nishimura, doi:10.1145/272991.272995). std::mt19937 takes it as a seed sequence.
struct PythonSeed {
    typedef uint32_t result_type;
    uint32_t seed;

    template <typename Iterator> void generate(Iterator state, Iterator end) {
        // Fill the state from the authors' own seed.
        size_t n = size_t(end - state);
        auto before = [&](size_t i) { return state[i - 1] ^ (state[i - 1] >> 30); };
        state[0] = 19650218;
        for (size_t i = 1; i < n; i++)
            state[i] = 1812433253u * before(i) + uint32_t(i);

        // Mix the seed in, then each word's index. Place 0 takes over the last word at each turn.
        for (size_t k = 0; k < 2 * n - 1; k++) {
            size_t i = 1 + k % (n - 1);
            if (i == 1 && k > 0)
                state[0] = state[n - 1];
            if (k < n)
                state[i] = (state[i] ^ (before(i) * 1664525u)) + seed;
            else
                state[i] = (state[i] ^ (before(i) * 1566083941u)) - uint32_t(i);
        }
        state[0] = 1u << 31;
    }
};

// A whole number below n: as many bits as n has, drawn until they are less.
inline size_t python_below(std::mt19937& random, size_t n) {
    while (true) {
        size_t drawn = random() >> (32 - std::bit_width(n));
        if (drawn < n) return drawn;
    }
}

// random.Random(seed).shuffle(x)
inline void python_shuffle(std::vector<size_t>* x, uint32_t seed) {
    PythonSeed sequence = {seed};
    std::mt19937 random(sequence);
    for (size_t i = x->size(); i-- > 1;)
        std::swap((*x)[i], (*x)[python_below(random, i + 1)]);
}

// random.Random(seed).sample(range(n), k), k <= n
inline std::vector<size_t> python_sample(size_t n, size_t k, uint32_t seed) {
    PythonSeed sequence = {seed};
    std::mt19937 random(sequence);

    // Python takes a list of all n where that is smaller than a set of k.
    size_t power = 1; // of 4
    while (power < 3 * k)
        power *= 4;
    bool listed = n <= 21 + (k > 5 ? power : 0);

    // From a list: the last of those left takes the place of the one drawn.
    std::vector<size_t> drawn, left(listed ? n : 0);
    std::iota(left.begin(), left.end(), size_t(0));
    while (listed && drawn.size() < k) {
        size_t at = python_below(random, left.size());
        drawn.push_back(left[at]);
        left[at] = left.back();
        left.pop_back();
    }

    // Into a set: one that is there is drawn again.
    while (drawn.size() < k) {
        size_t x = python_below(random, n);
        if (std::ranges::find(drawn, x) == drawn.end())
            drawn.push_back(x);
    }
    return drawn;
}

// ----------------------------------------------------------------------------
// core.yaml and eval_meta_data.csv

// Read a line of core.yaml into its tasks: "- " begins a task, two spaces go on with it.
inline std::string core_line(const std::string& line, size_t number, std::vector<Json>* tasks) {
    // A task keeps its line's number, for messages.
    bool begins = line == "-" || line.starts_with("- ");
    if (begins) tasks->push_back({{"line", number}});
    if (line == "-") return "";
    if (tasks->empty() || !(begins || line.starts_with("  ")))
        return "wants \"- \" before a task or two spaces before its key, not " + in_quotes(line);

    // A key that is not known might change the prompts.
    static const std::vector<std::string> keys = {
        "label",         "dataset_uri",            "num_fewshot",
        "icl_task_type", "continuation_delimiter", "has_categories"};
    std::string key = line.substr(2, line.find(": ") - 2);
    if (std::ranges::find(keys, key) == keys.end())
        return "is no key of a task: " + in_quotes(key);
    if (tasks->back().contains(key))
        return key + " is there twice";

    // A value is a word, or what JSON writes likewise: a text in quotes, a list in brackets.
    std::string text = trimmed(line.substr(std::min(key.size() + 3, line.size())));
    bool json = text.starts_with('"') || text.starts_with('[');
    Json value = json ? Json::parse(text, nullptr, false) : Json(text);
    bool word = !text.empty() && text.find_first_of(" \t'\"`&*!|>%@{}[],:#") == text.npos;
    if (json ? value.is_discarded() : !word)
        return "wants a word, \"text\" or [number] as a value, not " + in_quotes(text);
    tasks->back()[key] = value;
    return "";
}

// Look up the accuracy of guessing in eval_meta_data.csv.
inline std::string read_guess(const std::string& path, const std::string& label, double* guess) {
    std::vector<std::string> lines;
    LLMC_TRY(read_lines(path, &lines));

    // Cut rows at commas. Cells with commas of their own are descriptions, which come last.
    size_t task = 0;
    size_t baseline = 0;
    for (const std::string& line : lines) {
        std::vector<std::string> cells = texts_between_commas(line);
        for (size_t i = 0; i < cells.size(); i++) {
            if (cells[i] == "Eval Task") task = i;
            if (cells[i] == "Random baseline") baseline = i;
        }

        // A guess that is always right would leave nothing to centre.
        if (std::max(task, baseline) >= cells.size() || cells[task] != label)
            continue;
        char* end = nullptr;
        *guess = strtod(cells[baseline].c_str(), &end) / 100;
        bool number = end > cells[baseline].c_str() && *end == 0;
        if (number && *guess >= 0 && *guess < 1)
            return "";
    }
    return concat(path, ": wants a row with the \"Eval Task\" ", label,
                  " and a \"Random baseline\" from 0 to below 100");
}

// ----------------------------------------------------------------------------
// from items to candidates

// An item in words: a text for each choice, or the text without and with its continuation.
struct CoreItem {
    std::vector<std::string> texts = {};
    size_t right = 1; // index of the text that stands in front of other items
};

// Read an item; kind: its icl_task_type.
inline CoreItem core_item(const std::string& kind, const std::string& delimiter, const Json& j,
                          std::string* wrong) {
    if (kind == "language_modeling") {
        std::string context = trimmed(text_in(j, "context", wrong)) + delimiter;
        return {{context, context + text_in(j, "continuation", wrong)}};
    }

    // All choices share what comes before the delimiter, or what follows it.
    CoreItem item;
    bool choices = kind == "multiple_choice";
    std::string shared = text_in(j, choices ? "query" : "continuation", wrong);
    for (const std::string& own : texts_in(j, choices ? "choices" : "context_options", wrong))
        item.texts.push_back(choices ? shared + delimiter + own : own + delimiter + shared);
    item.right = size_t(number_in(j, "gold", wrong));
    if (wrong->empty() && item.right >= item.texts.size())
        *wrong = concat("gold ", item.right, " is none of the ", item.texts.size(),
                        " choices, counted from 0");
    return item;
}

// How many tokens all sequences have alike at their beginnings, or at their ends.
inline size_t common_tokens(const std::vector<std::vector<int>>& all, bool at_end) {
    auto token = [&](const std::vector<int>& x, size_t n) {
        return n >= x.size() ? -1 : at_end ? x[x.size() - 1 - n] : x[n];
    };
    for (size_t n = 0; n < all[0].size(); n++)
        for (const std::vector<int>& x : all)
            if (token(x, n) != token(all[0], n))
                return n;
    return all[0].size();
}

// Add an item's prompts as candidates, and the item as a question; index: its place among the
// items of the task. P: the model's positions.
inline std::string add_core_item(Evaluation* e, Task* task, const std::string& kind,
                                 const std::vector<CoreItem>& items, size_t index,
                                 const Tokenizer& t, size_t P) {
    // Write the shots, which are drawn from all items but this one.
    std::string shots;
    size_t k = size_t(task->shots);
    for (size_t drawn : python_sample(items.size() - 1, k, uint32_t(1234 + index))) {
        const CoreItem& shot = items[drawn + (drawn >= index)];
        shots += shot.texts[shot.right] + "\n\n";
    }

    // Encode the prompts.
    bool single = kind == "language_modeling";
    int first = begin_token(t) < 0 ? t.eot : begin_token(t);
    if (first < 0)
        return "core wants a token before each text, and the tokenizer has none";
    std::vector<std::vector<int>> prompts;
    for (const std::string& text : items[index].texts) {
        bool open = single && prompts.empty(); // without its continuation
        prompts.push_back(encode(t, open ? trimmed(shots + text) : shots + text));
        prompts.back().insert(prompts.back().begin(), first);
    }

    // Find where the scored tokens begin, or how many they are.
    size_t alike = common_tokens(prompts, kind == "schema");
    if (single && (alike < prompts[0].size() || alike == prompts[1].size()))
        return "the prompt's tokens do not go on from those before its continuation";
    if (single) prompts.erase(prompts.begin());

    // Add the candidates. A first token has no loss.
    int label = single ? 0 : int(items[index].right);
    task->questions.push_back({e->candidates.size(), prompts.size(), label});
    for (const std::vector<int>& tokens : prompts) {
        size_t n = tokens.size();
        size_t scored = std::min(kind == "schema" ? alike : n - alike, n - 1);
        if (scored >= P)
            return concat("a continuation has ", scored, " tokens, the model ", P, " positions");
        e->candidates.push_back({{tokens.end() - long(std::min(n, P)), tokens.end()}, scored,
                                 scored});
    }
    return "";
}

// Add a task of core.yaml; j: its keys.
inline std::string read_core_task(Evaluation* e, const std::string& folder, const Json& j,
                                  const Tokenizer& tokenizer, size_t P) {
    // Take the keys. A message names the line at which the task begins.
    std::string wrong;
    Task task = {text_in(j, "label", &wrong)};
    std::string kind = text_in(j, "icl_task_type", &wrong);
    std::string path = folder + "/eval_data/" + text_in(j, "dataset_uri", &wrong);
    bool spaced = !j.contains("continuation_delimiter");
    std::string delimiter = spaced ? " " : text_in(j, "continuation_delimiter", &wrong);
    Json shots = j.value("num_fewshot", Json());
    if (shots.is_array() && shots.size() == 1 && shots[0].is_number_unsigned() && shots[0] < 1000)
        task.shots = shots[0];
    else
        wrong = "wants \"num_fewshot: [N]\", N below 1000";

    // Check them.
    if (kind != "multiple_choice" && kind != "schema" && kind != "language_modeling")
        wrong = "icl_task_type " + in_quotes(kind) +
                " is none of multiple_choice, schema, language_modeling";
    for (const Task& other : e->tasks)
        if (other.shots >= 0 && other.name == task.name)
            wrong = "label " + in_quotes(task.name) + " is there twice";
    if (!wrong.empty())
        return concat(folder, "/core.yaml:", j["line"].get<size_t>(), ": ", wrong);

    // Read the items, in the order of the shuffled lines.
    std::vector<std::string> lines;
    LLMC_TRY(read_guess(folder + "/eval_meta_data.csv", task.name, &task.guess));
    LLMC_TRY(read_lines(path, &lines));
    if (lines.size() <= size_t(task.shots))
        return concat(path, ": has ", lines.size(), " items, too few for ", task.shots, " shots");
    std::vector<size_t> order(lines.size());
    std::iota(order.begin(), order.end(), size_t(0));
    python_shuffle(&order, 1337);
    std::vector<CoreItem> items(lines.size());
    auto each_item = [&](auto read) {
        for (size_t i = 0; i < items.size() && wrong.empty(); i++) {
            read(i);
            if (!wrong.empty())
                wrong = concat(path, ":", order[i] + 1, ": ", wrong);
        }
    };
    each_item([&](size_t i) {
        Json item;
        wrong = parse_record(lines[order[i]], &item);
        if (wrong.empty())
            items[i] = core_item(kind, delimiter, item, &wrong);
    });

    // Make candidates of them.
    each_item([&](size_t i) {
        wrong = add_core_item(e, &task, kind, items, i, tokenizer, P);
    });
    e->tasks.push_back(std::move(task));
    return wrong;
}

// Add the tasks of a folder in the published form. P: the model's positions.
inline std::string read_core(Evaluation* e, const std::string& folder, const Tokenizer& tokenizer,
                             size_t P) {
    // Read core.yaml: as much of YAML as that file has, and nothing else.
    std::vector<Json> tasks;
    std::vector<std::string> lines;
    std::string path = folder + "/core.yaml";
    LLMC_TRY(read_lines(path, &lines));
    bool begun = false;
    for (size_t i = 0; i < lines.size(); i++) {
        // Take off the comment, which follows a space.
        size_t comment = lines[i].find(" #", lines[i].rfind('"') + 1);
        std::string line(strip_right(lines[i].substr(0, comment)));
        if (line.empty() || trimmed(line).starts_with('#'))
            continue;
        std::string wrong;
        if (begun)
            wrong = core_line(line, i + 1, &tasks);
        else if (line != "icl_tasks:")
            wrong = "wants icl_tasks:, not " + in_quotes(line);
        begun = true;
        if (!wrong.empty())
            return concat(path, ":", i + 1, ": ", wrong);
    }

    // Read the tasks.
    for (const Json& task : tasks)
        LLMC_TRY(read_core_task(e, folder, task, tokenizer, P));
    return tasks.empty() ? path + ": has no tasks" : "";
}

// ----------------------------------------------------------------------------
// --eval's value, and CORE's table

// Read --eval's value, "hellaswag=FILE,core=FOLDER". Returns "" or what is wrong.
inline std::string read_tasks(Evaluation* e, const std::string& value, const Tokenizer& tokenizer,
                              size_t P) {
    // List the names, for the messages.
    std::vector<std::string> names = {"core"};
    std::string all = "core";
    for (const TaskKind& k : task_kinds()) {
        names.push_back(k.name);
        all += concat(", ", k.name);
    }

    // Read task by task. Each may occur once: its name is its key in log.jsonl.
    std::string item;
    for (std::istringstream in(value); std::getline(in, item, ',');) {
        size_t equals = item.find('=');
        if (equals == std::string::npos)
            return "--eval wants name=FILE, not '" + item + "'; names: " + all;
        std::string name = item.substr(0, equals);
        std::string close = nearest(name, names);
        const TaskKind* kind = find_task_kind(name);
        if (!kind && name != "core")
            return "--eval: there is no task '" + name + "'" +
                   (close.empty() ? "" : ": did you mean " + close + "?") + "; tasks: " + all;
        for (const Task& t : e->tasks)
            if (t.name == name && t.shots < 0)
                return "--eval: " + name + " is there twice";

        std::string path = item.substr(equals + 1);
        std::string wrong = kind ? read_task(e, *kind, path, tokenizer, P)
                                 : read_core(e, path, tokenizer, P);
        if (!wrong.empty())
            return "--eval: " + wrong;
    }
    return "";
}

// CORE's table as nanochat writes it, with the shots beside; "" if no task is CORE's. Adds the
// accuracies, and CORE, to an object of log.jsonl.
inline std::string core_table(const Evaluation& e, Json* log) {
    // Accuracies are by the mean over tokens; a single prompt is right if it is greedy.
    std::string table =
        formatted("%-35s, %-5s, %-10s, %-10s\n", "Task", "Shots", "Accuracy", "Centered");
    std::vector<double> centred;
    for (const Task& task : e.tasks) {
        if (task.shots < 0) continue;
        double accuracy = score_task(task, e.candidates).acc_norm.mean;
        centred.push_back((accuracy - task.guess) / (1 - task.guess));
        table += formatted("%-35.99s, %-5d, %-10.6f, %-10.6f\n", task.name.c_str(), task.shots,
                           accuracy, centred.back());
        (*log)["core_" + task.name] = accuracy;
    }

    // The last line is the mean of what is centred.
    if (centred.empty()) return "";
    (*log)["core"] = mean_of(centred).mean;
    return table +
           formatted("%-35s, %-5s, %-10s, %-10.6f\n", "CORE", "", "", mean_of(centred).mean);
}

} // namespace llmc
