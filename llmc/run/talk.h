// talk.h - a talk with the model in a terminal, or through a pipe
//   1. read a line: a question, or a command (/help lists them); the end of the input quits too
//   2. encode the conversation so far in the chat format (llmc/tune/chat.h); if the context has no
//      room for it and an answer, forget its first questions, and say so
//   3. run the model on the new tokens only: the cache keeps those that are the same as before
//   4. print the answer as it is generated, whole characters only
//   Ctrl-C stops an answer; while the program waits for a question, it ends the program. A second
//   Ctrl-C before the answer has stopped ends the program at once.
//   The first rank reads and prints; all ranks receive the line, and generate the same answer.
#pragma once
#include <poll.h>
#include "../comm/comm.h"
#include "../io/config.h"
#include "../io/generate.h"
#include "../io/tokenizer.h"
#include "../ops/rand.h"
#include "../ops/types.h"
#include "../text.h"
#include "../trainer.h"
#include "../io/chat.h"
#include "account.h"
#include "prompts.h"
#include "run.h"
#include "sample.h"
#include "stop.h"

namespace llmc {

// ----------------------------------------------------------------------------
// questions

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
    share_text(run.world, line);

    // At the end begin a new line for the shell's prompt.
    if (!there && is_first_rank(run) && terminal)
        printf("\n");
    return there && *line != "/quit";
}

// ----------------------------------------------------------------------------
// the talk

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
    size_t positions = run.context_length;
    size_t forgotten = 0;
    size_t room = std::min(size_t(run.config.sample_tokens), positions / 2);
    for (;;) {
        std::string wrong = chat_prompt(run.chat, talk.messages, &talk.prompt);
        size_t n = talk.prompt.size();
        if (!wrong.empty()) return wrong;
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
    const Config& c = run.config;
    Sampling how = {float(c.temperature), float(c.top_p), c.top_k, uint64_t(c.seed), run.step};
    how.ends = run.stop_tokens;
    how.draft = run.draft;
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
    generate(t, run.generate_plan, texts, size_t(c.sample_tokens), how, emit, end);
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
    Spend spend(run.account, Work::SAMPLE);
    Talk talk;
    if (is_first_rank(run))
        printf("chat: %s\n", COMMANDS);

    // Turn the watchdog off: a person may think for long.
    if (run.world.info)
        run.world.info->timeout_s = 0;
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

// Choose what a talk needs before plans are made: the tokens that end answers, and the positions.
inline void choose_talk(Run& run) {
    LLMC_USER_CHECK(vocab_matches(run), "--chat: %s", foreign_tokenizer(run).c_str());
    run.stop_tokens = choose_stop_tokens(run);
    run.context_length = choose_context_length(run);
}

// ----------------------------------------------------------------------------
// what a run does with texts

// Choose the texts to continue: a talk, the prompts of a file, or the starts of samples.
inline void choose_texts(Run& run) {
    if (run.config.chat) return choose_talk(run);
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
