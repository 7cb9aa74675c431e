// talk.h - a talk with the model in a terminal, or through a pipe
//   1. read a line: a question, /reset (forget all), /quit; the end of the input ends too
//   2. write the conversation so far as the chat format has it (llmc/io/chat.h); where the context
//      has no room for it and an answer, forget its first questions, and say so
//   3. read what is new of it: the cache keeps the tokens that are the same as before
//   4. print the answer's characters as they come, whole ones only
//   Ctrl-C stops an answer, and ends the program where it waits for a question; a second one
//   before the answer has stopped ends it at once.
//   The first rank reads and prints; all ranks hear the line, and generate the same.
#pragma once
#include <poll.h>
#include "draft.h"
#include "prompts.h"

namespace llmc {

// ----------------------------------------------------------------------------
// characters

// Take the whole characters off the bytes that have come. What is no UTF-8, and what a terminal
// would obey, becomes U+FFFD; the beginning of a character waits for its end, unless this is all.
inline std::string take_characters(std::string* bytes, bool all) {
    std::string text;
    while (!bytes->empty()) {
        unsigned char c = (unsigned char)(*bytes)[0];
        size_t n = utf8_length(*bytes);
        size_t wants = c < 0xc2 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf5 ? 4 : 1;

        // A character that is cut would be one with the lowest bytes, or the highest, behind it.
        std::string low = *bytes, high = *bytes;
        low.resize(std::max(wants, low.size()), '\x80');
        high.resize(std::max(wants, high.size()), '\xbf');
        bool begins = utf8_length(low) || utf8_length(high);
        if (n == 0 && bytes->size() < wants && begins && !all) break;

        // Escape sequences could do anything to a terminal.
        bool obeyed = (c < 0x20 && c != '\n' && c != '\t') || c == 0x7f;
        text += n == 0 || obeyed ? "\xef\xbf\xbd" : bytes->substr(0, n);
        bytes->erase(0, std::max(n, size_t(1)));
    }
    return text;
}

// ----------------------------------------------------------------------------
// questions

// How often Ctrl-C was pressed since the last question.
inline std::atomic<int> interrupts = 0;
inline void note_interrupt(int number) {
    if (interrupts++ == 0) return;
    signal(number, SIG_DFL);
    raise(number);
}

// Read a line of standard input; false: it has ended, or Ctrl-C ends the wait.
inline bool read_question(std::string* line) {
    line->clear();
    for (char c = 0; c != '\n';) {
        // Threads as ranks get the signal too: look for it a few times a second.
        pollfd input = {STDIN_FILENO, POLLIN, 0};
        int ready = poll(&input, 1, 200);
        if (interrupts) return false;
        if (ready <= 0) continue;
        if (read(STDIN_FILENO, &c, 1) != 1)
            return !line->empty();
        // The end of a line is no part of it.
        if (c != '\n') *line += c;
    }
    if (line->ends_with('\r')) line->pop_back();
    return true;
}

// The first rank's line, for all ranks; false: the talk is over.
inline bool ask_question(const Run& run, std::string* line) {
    bool terminal = isatty(STDIN_FILENO);
    if (is_first(run) && terminal) {
        printf("> ");
        fflush(stdout);
    }
    // All ranks hear whether there is a line, and then the line.
    int64_t there = is_first(run) && read_question(line);
    broadcast(run.world, &there, 1, 0, Cpu{});
    share_text(run.world, line);
    // Begin the shell's prompt on a line of its own.
    if (!there && is_first(run) && terminal) printf("\n");
    return there && *line != "/quit";
}

// ----------------------------------------------------------------------------
// the talk

struct Talk {
    Conversation messages = {};
    std::vector<int> prompt = {}; // the conversation's tokens, with the question
    std::vector<int> known = {};  // tokens whose keys and values the cache has
    int64_t turn = 0;
};

// Write the conversation as tokens, with room for an answer behind it; "" or why there is none.
inline std::string fit_conversation(Run& run, Talk& talk) {
    // An answer may take half of the positions.
    size_t positions = run.context_length, forgotten = 0;
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

        // Forget the first question and its answer.
        talk.messages.erase(talk.messages.begin(), talk.messages.begin() + 2);
        forgotten++;
    }
    if (forgotten)
        note(run, concat("the talk is longer than the model's ", positions,
                         " positions: its first ", forgotten, " question",
                         forgotten > 1 ? "s are" : " is", " forgotten"));
    return "";
}

// Generate the answer to the last question, and print it as it comes.
template <typename T, typename S>
void answer_question(Run& run, Trainer<T, S>& t, Talk& talk) {
    // Draw as samples do; Ctrl-C on any rank stops all.
    const Config& c = run.config;
    Sampling how = {float(c.temperature), float(c.top_p), c.top_k, uint64_t(c.seed), run.step};
    how.ends = run.stop_tokens;
    how.draft = run.draft;
    how.stops = [&] {
        int64_t stop = interrupts > 0;
        all_reduce_sum(run.world, &stop, 1, Cpu{});
        return stop > 0;
    };

    // Find what the cache has of the prompt. Its last token is read again: its logits are needed.
    const std::vector<int>&prompt = talk.prompt, &known = talk.known;
    size_t most = std::min(prompt.size() - 1, known.size()), cached = 0;
    while (cached < most && prompt[cached] == known[cached])
        cached++;
    std::vector<Text> texts = {{&prompt, fnv1a(concat("chat.", talk.turn++)), cached}};

    // Print characters, not tokens; the space between the format and an answer is the format's.
    std::vector<int> tokens;
    std::string bytes, answer;
    auto print = [&](bool all) {
        std::string text = take_characters(&bytes, all);
        if (answer.empty()) text.erase(0, text.find_first_not_of(' '));
        answer += text;
        if (!is_first(run)) return;
        fputs(text.c_str(), stdout);
        fflush(stdout);
    };
    auto emit = [&](int64_t, int token) {
        // Several tokens may make one character.
        tokens.push_back(token);
        bytes += decode(run.tokenizer, token);
        print(false);
    };
    // Remember why it ends: only a token means that nothing is missing.
    Ended why = Ended::BY_STOP;
    auto end = [&](int64_t, Ended ended) { why = ended; };
    generate(t, run.generate_plan, texts, size_t(c.sample_tokens), how, emit, end);
    print(true);
    if (is_first(run)) printf("\n");

    // Say why an answer stops in the middle, and remember it as far as it came.
    const char* whys[] = {"", "at --sample-tokens", "where the model's positions end",
                          "here: what was said stays in the talk"};
    if (why != Ended::BY_TOKEN)
        note(run, concat("the answer stops ", whys[int(why)]));
    interrupts = 0;
    talk.messages.push_back({"assistant", answer});
    talk.known = prompt;
    talk.known.insert(talk.known.end(), tokens.begin(), tokens.end());
    if (!tokens.empty()) talk.known.pop_back(); // picked last, and not read
}

// Talk until the input ends.
template <typename T, typename S>
void hold_talk(Run& run, Trainer<T, S>& t) {
    Spend spend(run.account, Work::SAMPLE);
    Talk talk;
    if (is_first(run))
        printf("chat: /reset forgets, /quit ends, Ctrl-C stops an answer\n");

    // Wait as long as a person thinks.
    if (run.world.info) run.world.info->timeout_s = 0;
    handle_signal(SIGINT, note_interrupt);
    for (std::string line; ask_question(run, &line);) {
        if (line == "/reset") {
            talk.messages.clear();
            if (is_first(run)) printf("(forgotten)\n");
            continue;
        }
        // An empty line asks nothing.
        if (line.empty()) continue;

        // A question that does not fit is none.
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

// Choose what a talk needs of the plan.
inline void choose_talk(Run& run) {
    LLMC_USER_CHECK(vocab_matches(run), "--chat: %s", foreign_tokenizer(run).c_str());
    run.stop_tokens = choose_stop_tokens(run);
    run.context_length = choose_context_length(run);
}

// ----------------------------------------------------------------------------
// what a run does with texts

// Choose what is continued: a talk, a file's prompts, or samples' beginnings.
inline void choose_texts(Run& run) {
    choose_draft(run);
    if (run.config.chat) return choose_talk(run);
    run.config.prompts.empty() ? choose_prompts(run) : choose_prompt_file(run);
}

// Write the texts that a run leaves at its end.
template <typename T, typename S>
void leave_texts(Run& run, Trainer<T, S>& t) {
    // The configuration has refused two of them at once.
    if (run.config.chat)
        hold_talk(run, t);
    else if (run.config.prompts.empty())
        print_samples(run, t);
    else
        complete_prompts(run, t);
    report_draft(run);
}

} // namespace llmc
