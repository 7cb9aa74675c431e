// sample.h - texts that the model continues: samples, prompts from a file, a talk in a terminal
//   starts     --prompt; with --prompt - each line of standard input; without either, the token
//              that begins a text
//   ends       the tokens that end a text: the tokenizer's, those that the model's config.json
//              and generation_config.json name, and the one that ends the data's documents.
//              --ignore-eos continues after them
//   positions  the model's. A table of learned positions that starts from new weights is trained
//              up to --seq only; beyond that the model's output is noise.
#pragma once
#include <iostream>
#include <poll.h>
#include "../adapters.h"
#include "../comm/comm.h"
#include "../comm/rank_status.h"
#include "../io/chat.h"
#include "../io/config.h"
#include "../io/dataloader.h"
#include "../io/files.h"
#include "../io/generate.h"
#include "../io/json.h"
#include "../io/logger.h"
#include "../io/one_reader.h"
#include "../io/tokenizer.h"
#include "../io/tokenizer_files.h"
#include "../layout.h"
#include "../model.h"
#include "../ops/rand.h"
#include "../ops/types.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "account.h"
#include "run.h"
#include "stop.h"

namespace llmc {

// ----------------------------------------------------------------------------
// tokens that begin and end texts

// The tokens that begin and end a text of --model: a tokenizer that knows nothing else. A folder's
// files name them; llama2.c's models all begin with 1 and end with 2.
inline Tokenizer model_text_tokens(const Run& run) {
    Tokenizer t;
    t.vocab_size = int(run.shape.V);
    mode_t type = file_type(run.config.model);
    bool gpt2 = run.shape.V == 50257; // one token both ends and begins a text
    if (type == S_IFDIR) {
        or_die(read_special_tokens(&t, run.config.model));
    } else if (gpt2 || (type && run.shape.family == Family::LLAMA)) {
        t.bos_token = gpt2 ? 50256 : 1;
        t.ends = {gpt2 ? 50256 : 2};
    }
    return t;
}

// The token that ends documents in the data; -1: unknown.
inline int data_end(const Run& run) {
    if (run.data.document_end >= 0)
        return run.data.document_end;
    const std::vector<DataFile>& files = run.data.val.files;
    bool none = files.empty() || files.front().packed; // conversations end with the chat's token
    return none ? -1 : usual_document_end(files.front(), run.tokenizer);
}

// All tokens that end a sample. A token that begins a text is one of them: it ends the text before.
inline std::set<int> choose_stop_tokens(const Run& run) {
    std::set<int> tokens;
    if (run.config.ignore_eos) return tokens;
    Tokenizer model = model_text_tokens(run);
    std::set<int> found = model.ends;
    found.insert({run.chat.end, model.bos_token, data_end(run)});
    if (vocab_matches(run)) {
        found.insert({run.tokenizer.eot, run.tokenizer.bos});
        found.insert(run.tokenizer.ends.begin(), run.tokenizer.ends.end());
    }

    // Drop tokens that the model does not have: a file may name some.
    for (int token : found)
        if (token >= 0 && size_t(token) < run.shape.V)
            tokens.insert(token);
    return tokens;
}

// ----------------------------------------------------------------------------
// prompts

// The lines of standard input that are not empty, on all ranks.
inline std::vector<std::string> read_prompts(const Run& run) {
    std::string text;
    if (is_first_rank(run))
        text.assign(std::istreambuf_iterator<char>(std::cin), {});
    text = broadcast_text(run.world, text, 0); // only the first rank can read standard input

    std::vector<std::string> prompts = lines_of(text);
    std::erase(prompts, "");
    return prompts;
}

// The tokens that a sample continues.
//   foreign tokenizer   the token that begins texts by the model's files, or the model's last token
//   a chat              the prompt as the user's message, so that the sample is its answer
//   a prompt            its tokens, after the token that begins texts, if there is one
//   no prompt           the token that begins texts, or the end of text, or a new line
inline std::vector<int> prompt_tokens(const Run& run, const std::string& prompt) {
    const Tokenizer& t = run.tokenizer;
    int V = int(run.shape.V);
    int bos = model_text_tokens(run).bos_token;
    bool named = bos >= 0 && bos < V;
    if (!vocab_matches(run))
        return {named ? bos : V - 1};
    std::vector<int> question;
    if (run.chat.tokenizer && !prompt.empty()) {
        or_die(chat_prompt(run.chat, {{"user", prompt}}, &question));
        return question;
    }
    if (!prompt.empty() || t.bos >= 0)
        return encode_from_start(t, prompt);
    if (named) return {bos};
    return t.eot >= 0 ? std::vector<int>{t.eot} : encode(t, "\n");
}

// Shorten a prompt that does not fit into the positions: keep its end, with room for the wanted
// tokens after it, but for at most half of the positions. bos: a first token to restore; -1: none.
inline void shorten_prompt(std::vector<int>* tokens, int bos, size_t positions, size_t wanted) {
    if (tokens->size() < std::max(positions, size_t(2)))
        return;
    size_t keep = std::max(size_t(1), positions - std::min(wanted, positions / 2));
    tokens->erase(tokens->begin(), tokens->end() - long(keep));
    if (bos >= 0) tokens->front() = bos;
}

// Choose the tokens that end texts, and the positions. A flag's text needs the model's tokenizer.
inline void choose_ends(Run& run, const char* flag) {
    LLMC_USER_CHECK(!flag || vocab_matches(run), "%s: %s", flag, foreign_tokenizer(run).c_str());
    run.samples.stop_tokens = choose_stop_tokens(run);
    size_t all = text_positions(run.shape), trained = size_t(run.config.seq);
    bool table = run.shape.embedding.position == Position::LEARNED;
    bool learns = has_new_weights(run.config) && table;
    run.samples.context_length = learns ? std::min(all, trained) : all;
}

// The flags of samples, as generate() takes them.
inline Sampling sampling_of(const Run& run) {
    const Config& c = run.config;
    Sampling how = {float(c.temperature), float(c.top_p), c.top_k, uint64_t(c.seed), run.step};
    how.draft = run.companions.guesses;
    how.ends = run.samples.stop_tokens;
    return how;
}

// Choose what samples start from and which tokens end them, and note what is cut.
inline void choose_prompts(Run& run) {
    const Config& c = run.config;
    choose_ends(run, c.prompt.empty() ? nullptr : "--prompt");
    std::vector<std::string> texts = {c.prompt};
    if (c.prompt == "-") texts = read_prompts(run);
    LLMC_USER_CHECK(!texts.empty(), "--prompt -: standard input has no line that holds text");

    // Encode each prompt, and cut what is longer than the positions.
    size_t positions = run.samples.context_length, wanted = size_t(c.sample_tokens), longest = 0;
    bool speaks = is_first_rank(run) && wanted > 0 && !c.eval && !c.explain;
    for (const std::string& text : texts) {
        Prompt p = {text, prompt_tokens(run, text), {}};
        size_t before = p.tokens.size();
        shorten_prompt(&p.tokens, run.tokenizer.bos, positions, wanted);
        size_t kept = p.tokens.size();
        if (kept < before && speaks)
            note(run, concat("prompt ", run.samples.prompts.size() + 1, " has ", before,
                             " tokens: samples continue its last ", kept));
        longest = std::max(longest, kept);
        run.samples.prompts.push_back(p);
    }

    // Note before the run if samples will be shorter than asked for.
    if (longest + wanted <= positions + 1 || !speaks)
        return;
    bool trained = positions < text_positions(run.shape);
    note(run, concat("samples end at ", positions + 1, " tokens with their prompt: ",
                     trained ? concat("--seq ", c.seq, " trains no more positions")
                             : "the model has no more positions"));
}

// ----------------------------------------------------------------------------
// printing

// Remove the whole characters from the front of `bytes`, and return them. Bytes that are not UTF-8,
// and control characters that a terminal would obey, become U+FFFD. The beginning of a character
// stays in `bytes` until its end has come; all: no more bytes will come.
inline std::string take_characters(std::string* bytes, bool all) {
    std::string text;
    size_t at = 0;
    while (at < bytes->size()) {
        std::string next = bytes->substr(at, 4);
        unsigned char c = (unsigned char)next[0];
        size_t n = utf8_length(next);
        size_t wants = c < 0xc2 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf5 ? 4 : 1;

        // Decide whether these bytes may begin a character: they do if the lowest or the highest
        // bytes after them would make them one.
        std::string low = next, high = next;
        low.resize(std::max(wants, low.size()), '\x80');
        high.resize(std::max(wants, high.size()), '\xbf');
        bool begins = utf8_length(low) || utf8_length(high);
        if (n == 0 && next.size() < wants && begins && !all)
            break;

        // Replace control characters, U+0080 to U+009F too: an escape sequence could do anything
        // to a terminal.
        bool high_control = c == 0xc2 && n == 2 && (unsigned char)next[1] < 0xa0;
        bool low_control = c < 0x20 && c != '\n' && c != '\t';
        bool obeyed = low_control || c == 0x7f || high_control;
        text += n == 0 || obeyed ? "\xef\xbf\xbd" : next.substr(0, n);
        at += std::max(n, size_t(1));
    }
    bytes->erase(0, at);
    return text;
}

// The line above a sample: "step 200 | sample 2 of 3". Before the first step a single sample
// has no title.
inline std::string sample_title(int64_t step, int64_t number, int64_t samples) {
    std::string title;
    if (step > 0) title = concat("step ", step);
    if (step > 0 || samples > 1)
        title += concat(title.empty() ? "" : " | ", "sample");
    if (samples > 1)
        title += concat(" ", number + 1, " of ", samples);
    return title.empty() ? "" : title + "\n";
}

// Print a prompt and the model's continuation: as text, or as numbers of tokens if the tokenizer is
// not the model's.
template <typename T, typename S>
void print_sample(Run& run, Trainer<T, S>& t, const Prompt& prompt, int64_t number) {
    const Config& c = run.config;
    // A process of an MPI job may have a terminal of mpirun's, which nobody sees.
    bool text = vocab_matches(run);
    bool terminal = isatty(STDOUT_FILENO) && !run.world.mpi;
    std::string bytes; // not printed yet: a character may take several tokens
    auto print = [&](bool all) {
        std::string shown = terminal ? take_characters(&bytes, all) : std::exchange(bytes, "");
        fputs(shown.c_str(), stdout);
        fflush(stdout);
    };
    auto emit = [&](int token) {
        if (!is_first_rank(run)) return;
        bytes += text ? decode(run.tokenizer, token) : std::to_string(token) + " ";
        print(false);
    };

    // Print the prompt, then each token as it comes.
    int64_t samples = int64_t(run.samples.prompts.size()) * c.samples;
    bytes = sample_title(run.step, number, samples) + "---\n" + prompt.text;
    if (is_first_rank(run)) print(true);
    for (size_t i = 0; !text && i < prompt.tokens.size(); i++)
        emit(prompt.tokens[i]);

    // Draw by seed, step and the sample's number, so that a resumed run prints the same samples.
    Sampling how = sampling_of(run);
    how.number = number;
    generate(t, run.plans.generate, prompt.tokens, size_t(c.sample_tokens), how, emit);
    if (!is_first_rank(run)) return;
    print(true);
    printf("\n---\n");
}

// Continue each prompt --samples times.
template <typename T, typename S>
void print_samples(Run& run, Trainer<T, S>& t) {
    if (run.plans.generate < 0) return;
    Spend spend(run.clock.account, Work::SAMPLE);
    finish_line(run.log);
    int64_t number = 0;
    for (const Prompt& prompt : run.samples.prompts)
        for (int i = 0; i < run.config.samples; i++)
            print_sample(run, t, prompt, number++);
}

// ----------------------------------------------------------------------------
// prompts from a file, and what the model continues them with, as JSON lines
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

// Find the set that a line of --prompts names: -1 for the base alone.
inline std::string find_adapter_set(const Shape& s, const OrderedJson& line, int* set) {
    *set = -1;
    if (!line.contains("adapter") || line["adapter"].is_null())
        return "";
    const OrderedJson& asked = line["adapter"];
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
inline std::string read_prompt(const Run& run, const OrderedJson& line, Prompt* p) {
    if (!line.contains("prompt") || !line["prompt"].is_string())
        return "has no \"prompt\" that is a text";
    p->fields = line;
    p->text = line["prompt"];
    LLMC_TRY(p->text.empty() ? "its prompt is empty"
                             : find_adapter_set(run.shape, line, &p->adapter));

    // Count its tokens.
    p->tokens = prompt_tokens(run, p->text);
    size_t n = p->tokens.size();
    if (n > run.samples.context_length)
        return concat("its prompt has ", n, " tokens, ", n - run.samples.context_length,
                      " more than the ", run.samples.context_length, " positions");
    return "";
}

// Read the prompts of --prompts: "" or an error that names the first line that cannot be continued.
inline std::string read_prompt_file(const Run& run, std::vector<Prompt>* prompts) {
    const std::string& path = run.config.prompts;
    std::string bytes;
    LLMC_TRY(read_whole_file(path, &bytes));
    LineCounts counts;
    auto add = [&](const OrderedJson& line) {
        return read_prompt(run, line, &prompts->emplace_back());
    };

    // A line of a .txt is a prompt as it is.
    if (path.ends_with(".txt"))
        each_line(bytes, 1, path, &counts, [&](std::string_view line) {
            return add({{"prompt", std::string(line)}});
        });
    else
        read_records<OrderedJson>(bytes, 1, path, &counts, add);
    if (counts.malformed > 0) return counts.first_malformed;
    return prompts->empty() ? path + ": holds no prompt" : "";
}

// Read --prompts instead of --prompt, and check that the completions can be written.
inline void choose_prompt_file(Run& run) {
    const Config& c = run.config;
    choose_ends(run, "--prompts");
    or_die(read_prompt_file(run, &run.samples.prompts));
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
    run.samples.completions = fdopen(dup(STDOUT_FILENO), "w");
    LLMC_USER_CHECK(run.samples.completions && dup2(STDERR_FILENO, STDOUT_FILENO) >= 0,
                    "standard output cannot be written: %s", strerror(errno));
}

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
    OrderedJson j = prompt.fields;
    j["sample"] = sample;
    // Prompt and completion are one text, so a blank between them is kept; an answer stands alone.
    std::string text;
    for (int token : made.tokens)
        text += decode(run.tokenizer, token);
    j["completion"] = run.chat.tokenizer ? decode(run.tokenizer, made.tokens) : text;
    j["tokens"] = made.tokens.size();
    j["end"] = ends[int(made.why)];

    // Replace bytes that are not UTF-8, such as half a character at the end, by U+FFFD.
    return j.dump(-1, ' ', false, OrderedJson::error_handler_t::replace) + "\n";
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
            const Prompt& prompt = run.samples.prompts[next / samples];
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
    Spend spend(run.clock.account, Work::SAMPLE);
    size_t samples = size_t(c.samples);
    size_t all = run.samples.prompts.size() * samples;
    bool shared = answers_are_shared(c);
    ShareOfTexts mine = share_of_texts(shared ? t.layout.dp : Axis{}, all);
    std::vector<Text> texts;
    for (size_t i = mine.first; i < mine.past; i++) {
        const Prompt& prompt = run.samples.prompts[i / samples];
        std::string stream = concat("completion.", i / samples, ".", i % samples);
        texts.push_back({&prompt.tokens, fnv1a(stream), 0, prompt.adapter});
    }

    // Open the file on the first rank, which writes it. choose_prompt_file() has tried this before.
    FILE* file = run.samples.completions;
    if (is_first_rank(run) && !file)
        file = fopen(c.completions.c_str(), "w");
    std::string why = strerror(errno);
    LLMC_USER_CHECK(file || !is_first_rank(run), "--completions %s: cannot be written: %s",
                    c.completions.c_str(), why.c_str());
    CompletionWriter writer = {run, file, std::vector<Completion>(all)};

    // Generate. After a signal the completions so far are written as they are.
    Sampling how = sampling_of(run);
    CatchSignals catch_signals;
    how.own_texts = shared;
    how.stops = [&] {
        if (shared) return stop_signal != 0;
        return (run.end.stopped = agree(run.world, {stop_signal, false}).stop) != 0;
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
    generate(t, run.plans.generate, texts, size_t(c.sample_tokens), how, emit, end);
    if (shared) {
        run.end.stopped = agree(run.world, {stop_signal, false}).stop;
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
    size_t slots = std::min(texts.size(), t.plans[run.plans.generate].B);
    printf("%zu completions, %zu tokens, %.1f tokens/s in %zu slots", writer.written, tokens,
           double(tokens) / seconds, slots);
    printf(shared ? " of each of %d ranks\n" : "\n", c.dp);
}

// ----------------------------------------------------------------------------
// a talk with the model in a terminal, or through a pipe
//   1. read a line: a question, or a command (/help lists them); the end of the input quits too
//   2. encode the conversation so far in the chat format (llmc/io/chat.h); if the context has no
//      room for it and an answer, forget its first questions, and say so
//   3. run the model on the new tokens only: the cache keeps those that are the same as before
//   4. print the answer as it is generated, whole characters only
//   Ctrl-C stops an answer; while the program waits for a question, it ends the program. A second
//   Ctrl-C before the answer has stopped ends the program at once.
//   The first rank reads and prints; all ranks receive the line, and generate the same answer.

// How often Ctrl-C was pressed since the last answer ended. The second time ends the program.
inline std::atomic<int> interrupts = 0;
inline void note_interrupt(int number) {
    if (interrupts++ == 0) return;
    signal(number, SIG_DFL);
    raise(number);
}

// Read a line of standard input. Returns false at its end, or after Ctrl-C.
inline bool read_question(std::string* line) {
    line->clear();
    for (char c = 0; c != '\n';) {
        // Wait in short turns: the signal may arrive in another thread, which would not
        // interrupt this wait.
        pollfd input = {STDIN_FILENO, POLLIN, 0};
        int ready = poll(&input, 1, 200);
        if (interrupts) return false;
        if (ready <= 0) continue;
        if (read(STDIN_FILENO, &c, 1) != 1)
            return !line->empty();
        // Append the character, unless it ends the line.
        if (c != '\n') *line += c;
    }
    if (line->ends_with('\r'))
        line->pop_back();
    return true;
}

// Ask for a line on the first rank, and send it to all ranks. Returns false if the talk is over.
inline bool ask_question(const Run& run, std::string* line) {
    bool terminal = isatty(STDIN_FILENO);
    if (is_first_rank(run) && terminal) {
        printf("> ");
        fflush(stdout);
    }

    // Tell all ranks whether there is a line, and then the line.
    int64_t there = is_first_rank(run) && read_question(line);
    broadcast(run.world, &there, 1, 0, Cpu{});
    *line = broadcast_text(run.world, *line, 0);

    // At the end begin a new line for the shell's prompt.
    if (!there && is_first_rank(run) && terminal)
        printf("\n");
    return there && *line != "/quit";
}

// A talk so far.
struct Talk {
    Conversation messages = {};
    std::vector<int> prompt = {}; // the conversation's tokens, with the question
    std::vector<int> known = {};  // the tokens whose keys and values are in the cache
    int64_t turn = 0;             // how many answers have begun
};

// Encode the conversation into talk.prompt, with room for an answer after it: "" or why it does
// not fit. The first questions are forgotten until it does.
inline std::string fit_conversation(Run& run, Talk& talk) {
    // Reserve room for an answer: at most half of the positions.
    size_t positions = run.samples.context_length;
    size_t forgotten = 0;
    size_t room = std::min(size_t(run.config.sample_tokens), positions / 2);
    for (;;) {
        LLMC_TRY(chat_prompt(run.chat, talk.messages, &talk.prompt));
        size_t n = talk.prompt.size();
        if (n + room <= positions) break;
        if (talk.messages.size() == 1)
            return concat("the question has ", n, " tokens, ", n + room - positions,
                          " more than the model's ", positions, " positions have room for, with ",
                          room, " for an answer: ask a shorter one");

        // Forget the first question and its answer, and try again.
        talk.messages.erase(talk.messages.begin(), talk.messages.begin() + 2);
        forgotten++;
    }
    if (forgotten)
        note(run, concat("the talk is longer than the model's ", positions,
                         " positions: its first ", forgotten, " question",
                         forgotten > 1 ? "s are" : " is", " forgotten"));
    return "";
}

// Generate the answer to the last question, and print it as it is generated.
template <typename T, typename S>
void answer_question(Run& run, Trainer<T, S>& t, Talk& talk) {
    // Sample with the flags of samples. Ctrl-C on any rank stops all ranks.
    Sampling how = sampling_of(run);
    how.stops = [&] {
        int64_t stop = interrupts > 0;
        all_reduce_sum(run.world, &stop, 1, Cpu{});
        return stop > 0;
    };

    // Count the tokens of the prompt that the cache holds. The last token is read again in any
    // case, because its logits give the answer's first token.
    const std::vector<int>&prompt = talk.prompt, &known = talk.known;
    size_t most = std::min(prompt.size() - 1, known.size());
    size_t cached = 0;
    while (cached < most && prompt[cached] == known[cached])
        cached++;
    std::vector<Text> texts = {{&prompt, fnv1a(concat("chat.", talk.turn++)), cached}};

    // Print characters, not tokens. Spaces before the answer belong to the chat format: skip them.
    std::vector<int> tokens;
    std::string bytes, answer;
    auto print = [&](bool all) {
        std::string text = take_characters(&bytes, all);
        if (answer.empty())
            text.erase(0, text.find_first_not_of(' '));
        answer += text;
        if (!is_first_rank(run)) return;
        fputs(text.c_str(), stdout);
        fflush(stdout);
    };
    auto emit = [&](int64_t, int token) {
        // Collect bytes: a character may take several tokens.
        tokens.push_back(token);
        bytes += decode(run.tokenizer, token);
        print(false);
    };

    // Generate, and remember why the answer ended: only a token means that nothing is missing.
    Ended why = Ended::BY_STOP;
    auto end = [&](int64_t, Ended ended) { why = ended; };
    generate(t, run.plans.generate, texts, size_t(run.config.sample_tokens), how, emit, end);
    print(true);
    if (is_first_rank(run)) printf("\n");

    // Note why an answer stops in the middle, and keep it in the talk as far as it came.
    const char* whys[] = {"", "at --sample-tokens", "where the model's positions end",
                          "here: what was said stays in the talk"};
    if (why != Ended::BY_TOKEN)
        note(run, concat("the answer stops ", whys[int(why)]));
    interrupts = 0;
    talk.messages.push_back({"assistant", answer});
    talk.known = prompt;
    talk.known.insert(talk.known.end(), tokens.begin(), tokens.end());
    if (!tokens.empty()) talk.known.pop_back(); // the last token was picked, but not read
}

// Commands of a talk: lines that begin with a slash.
constexpr const char* COMMANDS =
    "/reset forgets, /quit ends, Ctrl-C stops an answer; a space hides a question's first slash";

// Hold the talk, until the input ends.
template <typename T, typename S>
void hold_talk(Run& run, Trainer<T, S>& t) {
    Spend spend(run.clock.account, Work::SAMPLE);
    Talk talk;
    say(run, "chat: ", COMMANDS, "\n");

    // Turn the watchdog off: a person may think for long.
    if (run.world.info)
        run.world.info->timeout_s = 0;
    give_signal_stacks();
    handle_signal(SIGINT, note_interrupt);
    for (std::string line; ask_question(run, &line);) {
        // Obey a command. One that there is not is no question either.
        bool command = line.starts_with('/'), reset = line == "/reset";
        if (reset) talk.messages.clear();
        std::string unknown = line == "/help" ? "" : "there is no " + printable(line) + ": ";
        if (command && is_first_rank(run))
            puts(reset ? "(forgotten)" : (unknown + COMMANDS).c_str());
        if (command || line.empty()) continue;

        // Answer the question, or drop it from the talk if it does not fit.
        talk.messages.push_back({"user", line});
        std::string wrong = fit_conversation(run, talk);
        if (wrong.empty()) {
            answer_question(run, t, talk);
            continue;
        }
        talk.messages.pop_back();
        note(run, wrong);
    }
    handle_signal(SIGINT, SIG_DFL);
}

// ----------------------------------------------------------------------------
// what a run does with texts

// Choose the texts to continue: a talk, the prompts of a file, or the starts of samples.
inline void choose_texts(Run& run) {
    if (run.config.chat) return choose_ends(run, "--chat");
    run.config.prompts.empty() ? choose_prompts(run) : choose_prompt_file(run);
}

// Generate what the run is to leave at its end: a talk, samples, or completions. config_check() has
// refused two of them at once.
template <typename T, typename S>
void leave_texts(Run& run, Trainer<T, S>& t) {
    if (run.config.chat)
        hold_talk(run, t);
    else if (run.config.prompts.empty())
        print_samples(run, t);
    else
        complete_prompts(run, t);
}

} // namespace llmc
