// prompts.h - prompts from a file, and what the model continues them with, as JSON lines
//   --prompts FILE   JSON objects, one a line, each with a "prompt"; or lines of text in a .txt
//   output           an object a completion, in the order of prompts and their samples: the fields
//                    of the prompt's line, then "sample", "completion", "tokens" and "end", which
//                    is "token" if a token ended the text, "length" at --sample-tokens, "context"
//                    where the model's positions ended, "stopped" after a signal
//   Without --completions the lines go to standard output, and everything else to standard error.
//   Sample k of prompt p has uniform numbers of its own, so --slots, --samples and the layout do
//   not change it; only rounding of the logits may, where two tokens are about equally likely.
//   Data-parallel ranks share the completions out, and the first writes them all at the end; a rank
//   without such peers writes each as soon as all before it have ended.
#pragma once
#include <nlohmann/json.hpp>
#include "../comm/record.h"
#include "../io/config.h"
#include "../io/files.h"
#include "../io/generate.h"
#include "../io/json.h"
#include "../io/tokenizer.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/rand.h"
#include "../ops/types.h"
#include "../text.h"
#include "../trainer.h"
#include "account.h"
#include "run.h"
#include "sample.h"
#include "stop.h"

namespace llmc {

// ----------------------------------------------------------------------------
// reading

// Find the set that a line of --prompts names: -1 for the base alone.
inline std::string find_adapter_set(const Shape& s, const nlohmann::ordered_json& line, int* set) {
    *set = -1;
    if (!line.contains("adapter") || line["adapter"].is_null())
        return "";
    const nlohmann::ordered_json& asked = line["adapter"];
    if (!s.tuned.sets)
        return concat("its \"adapter\" is ", json_word(asked), ", and the run has no --adapters: "
                      "give --adapters NAME=DIR, or leave the key out");

    // Look for the name, and list those that are there.
    std::string known;
    for (const AdapterSet& other : *s.tuned.sets) {
        if (asked == other.name)
            *set = int(&other - s.tuned.sets->data());
        known += (known.empty() ? "" : ", ") + other.name;
    }
    if (*set >= 0) return "";
    return concat("its \"adapter\" is ", json_word(asked), "; --adapters has ", known);
}

// Make a prompt of a line's fields. One that is too long is refused instead of cut: with many
// prompts nobody would notice the cut.
inline std::string read_prompt(const Run& run, const nlohmann::ordered_json& line, Prompt* p) {
    if (!line.contains("prompt") || !line["prompt"].is_string())
        return "has no \"prompt\" that is a text";
    p->fields = line;
    p->text = line["prompt"];
    std::string wrong = p->text.empty() ? "its prompt is empty"
                                        : find_adapter_set(run.shape, line, &p->adapter);
    if (!wrong.empty()) return wrong;

    // Count its tokens.
    p->tokens = prompt_tokens(run, p->text);
    size_t n = p->tokens.size();
    if (n > run.context_length)
        return concat("its prompt has ", n, " tokens, ", n - run.context_length,
                      " more than the ", run.context_length, " positions");
    return "";
}

// Read the prompts of --prompts: "" or an error that names the first line that cannot be continued.
inline std::string read_prompt_file(const Run& run, std::vector<Prompt>* prompts) {
    const std::string& path = run.config.prompts;
    std::string bytes, wrong = read_whole_file(path, &bytes);
    if (!wrong.empty()) return wrong;
    LineCounts counts;
    auto add = [&](const nlohmann::ordered_json& line) {
        return read_prompt(run, line, &prompts->emplace_back());
    };

    // A line of a .txt is a prompt as it is.
    if (path.ends_with(".txt"))
        each_line(bytes, 1, path, &counts, [&](std::string_view line) {
            return add({{"prompt", std::string(line)}});
        });
    else
        read_records<nlohmann::ordered_json>(bytes, 1, path, &counts, add);
    if (counts.malformed > 0) return counts.first_malformed;
    return prompts->empty() ? path + ": holds no prompt" : "";
}

// Read --prompts instead of --prompt, and check that the completions can be written.
inline void choose_prompt_file(Run& run) {
    const Config& c = run.config;
    LLMC_USER_CHECK(vocab_matches(run), "--prompts: %s", foreign_tokenizer(run).c_str());
    run.stop_tokens = choose_stop_tokens(run);
    run.context_length = choose_context_length(run);
    or_die(read_prompt_file(run, &run.prompts));
    if (!is_first_rank(run) || c.explain) return;

    // Refuse to overwrite completions that may have taken hours.
    struct stat there;
    bool full = stat(c.completions.c_str(), &there) == 0 && there.st_size > 0;
    LLMC_USER_CHECK(!full, "--completions %s is there, and would be lost: remove it, or name "
                           "another file", c.completions.c_str());
    if (!c.completions.empty())
        or_die(try_file("completions", c.completions));
}

// Reserve standard output for completions, unless they go to a file: other lines go to standard
// error from here on. Call it before anything is printed.
inline void reserve_output(Run& run) {
    const Config& c = run.config;
    if (c.prompts.empty() || !c.completions.empty() || c.explain || !is_first_rank(run))
        return;
    run.completions = fdopen(dup(STDOUT_FILENO), "w");
    LLMC_USER_CHECK(run.completions && dup2(STDERR_FILENO, STDOUT_FILENO) >= 0,
                    "standard output cannot be written: %s", strerror(errno));
}

// ----------------------------------------------------------------------------
// writing

// A completion while it is generated; `over` once it has ended.
struct Completion {
    std::vector<int> tokens = {};
    Ended why = Ended::BY_STOP;
    bool over = false;
};

// The line that is written for a completion.
inline std::string completion_line(const Run& run, const Prompt& prompt, int sample,
                                   const Completion& made) {
    // Write the prompt's fields first, in their own order.
    const char* ends[] = {"token", "length", "context", "stopped"};
    nlohmann::ordered_json j = prompt.fields;
    j["sample"] = sample;
    // Prompt and completion are one text, so a blank between them is kept; an answer stands alone.
    std::string text;
    for (int token : made.tokens)
        text += decode(run.tokenizer, token);
    j["completion"] = run.chat.tokenizer ? decode(run.tokenizer, made.tokens) : text;
    j["tokens"] = made.tokens.size();
    j["end"] = ends[int(made.why)];

    // Replace bytes that are not UTF-8, such as half a character at the end, by U+FFFD.
    return j.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

// Writes completions in the order of their prompts: each as soon as all before it have ended.
struct CompletionWriter {
    Run& run;
    FILE* file;
    std::vector<Completion> all;
    size_t next = 0;    // the first completion that is not written
    size_t written = 0; // lines

    // Write all that have ended, up to the first that has not; at the end also those after it,
    // because after a signal some have not begun.
    void write_ended(bool at_end) {
        size_t samples = size_t(run.config.samples);
        for (; next < all.size() && (at_end || all[next].over); next++) {
            if (!all[next].over) continue;
            const Prompt& prompt = run.prompts[next / samples];
            fputs(completion_line(run, prompt, int(next % samples), all[next]).c_str(), file);
            written++;
        }
        fflush(file);
    }
};

// Give all ranks the completions that each place along dp has made, `mine` here. All ranks call.
template <typename T, typename S>
void share_completions(const Run& run, const Trainer<T, S>& t, ShareOfTexts mine,
                       std::vector<Completion>& all) {
    // Put whether and why it has ended in front of its tokens.
    std::vector<std::vector<int>> rows(all.size());
    for (size_t i = mine.first; i < mine.past; i++) {
        rows[i] = {all[i].over, int(all[i].why)};
        rows[i].insert(rows[i].end(), all[i].tokens.begin(), all[i].tokens.end());
    }
    share_texts(t, mine, size_t(run.config.sample_tokens) + 2, rows);
    for (size_t i = 0; i < all.size(); i++) {
        all[i].over = rows[i][0];
        all[i].why = Ended(rows[i][1]);
        all[i].tokens.assign(rows[i].begin() + 2, rows[i].end());
    }
}

// Continue every prompt --samples times.
template <typename T, typename S>
void complete_prompts(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    Spend spend(run.account, Work::SAMPLE);
    size_t samples = size_t(c.samples);
    size_t all = run.prompts.size() * samples;
    bool shared = answers_are_shared(c);
    ShareOfTexts mine = share_of_texts(shared ? t.layout.dp : Axis{}, all);
    std::vector<Text> texts;
    for (size_t i = mine.first; i < mine.past; i++) {
        const Prompt& prompt = run.prompts[i / samples];
        std::string stream = concat("completion.", i / samples, ".", i % samples);
        texts.push_back({&prompt.tokens, fnv1a(stream), 0, prompt.adapter});
    }

    // Open the file on the first rank, which writes it. choose_prompt_file() has tried this before.
    FILE* file = run.completions;
    if (is_first_rank(run) && !file)
        file = fopen(c.completions.c_str(), "w");
    std::string why = strerror(errno);
    LLMC_USER_CHECK(file || !is_first_rank(run), "--completions %s: cannot be written: %s",
                    c.completions.c_str(), why.c_str());
    CompletionWriter writer = {run, file, std::vector<Completion>(all)};

    // Generate. After a signal the completions so far are written as they are.
    Sampling how = {float(c.temperature), float(c.top_p), c.top_k, uint64_t(c.seed), run.step};
    how.ends = run.stop_tokens;
    how.draft = run.draft;
    CatchSignals catch_signals;
    how.own_texts = shared;
    how.stops = [&] {
        if (shared) return stop_signal != 0;
        return (run.stopped = agree(run.world, {stop_signal, false}).stop) != 0;
    };
    double start = clock_seconds();
    auto emit = [&](int64_t i, int token) {
        writer.all[mine.first + size_t(i)].tokens.push_back(token);
    };
    auto end = [&](int64_t i, Ended ended) {
        Completion& made = writer.all[mine.first + size_t(i)];
        made.why = ended;
        made.over = true;
        if (is_first_rank(run) && !shared)
            writer.write_ended(false);
    };
    generate(t, run.generate_plan, texts, size_t(c.sample_tokens), how, emit, end);
    if (shared) {
        run.stopped = agree(run.world, {stop_signal, false}).stop;
        share_completions(run, t, mine, writer.all);
    }
    if (!is_first_rank(run)) return;
    writer.write_ended(true);

    // Close the file, which is when a full disk may show, and report errors.
    double seconds = clock_seconds() - start;
    bool good = !ferror(file);
    if (fclose(file) != 0 || !good)
        report_failure(run, concat("completions could not all be written: ", strerror(errno)));
    size_t tokens = 0;
    for (const Completion& made : writer.all)
        tokens += made.tokens.size();
    size_t slots = std::min(texts.size(), t.plans[run.generate_plan].B);
    printf("%zu completions, %zu tokens, %.1f tokens/s in %zu slots", writer.written, tokens,
           double(tokens) / seconds, slots);
    printf(shared ? " of each of %d ranks\n" : "\n", c.dp);
}

} // namespace llmc
