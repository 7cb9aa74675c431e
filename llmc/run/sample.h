// sample.h - samples: the texts they start from, the tokens that end them, how they are printed
//   starts     --prompt; with --prompt - each line of standard input; without either, the token
//              that begins a text
//   ends       the tokens that end a text: the tokenizer's, those that the model's config.json
//              and generation_config.json name, and the one that ends the data's documents.
//              --ignore-eos continues after them
//   positions  the model's. A table of learned positions that starts from new weights is trained
//              up to --seq only; beyond that the model's output is noise.
#pragma once
#include <iostream>
#include "../adapters.h"
#include "../comm/comm.h"
#include "../comm/group.h"
#include "../io/config.h"
#include "../io/dataloader.h"
#include "../io/files.h"
#include "../io/generate.h"
#include "../io/logger.h"
#include "../io/tokenizer.h"
#include "../io/tokenizer_files.h"
#include "../model.h"
#include "../ops/types.h"
#include "../text.h"
#include "../trainer.h"
#include "../io/chat.h"
#include "account.h"
#include "run.h"

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
    if (run.document_end >= 0)
        return run.document_end;
    const std::vector<DataFile>& files = run.val.files;
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

// Send the first rank's text to the others, because only the first can read standard input.
inline void share_text(const Comm& world, std::string* text) {
    int64_t bytes = int64_t(text->size());
    broadcast(world, &bytes, 1, 0, Cpu{});
    text->resize(size_t(bytes));
    broadcast(world, reinterpret_cast<unsigned char*>(text->data()), text->size(), 0, Cpu{});
}

// The lines of standard input that are not empty, on all ranks.
inline std::vector<std::string> read_prompts(const Run& run) {
    std::string text;
    if (is_first_rank(run))
        text.assign(std::istreambuf_iterator<char>(std::cin), {});
    share_text(run.world, &text);

    std::vector<std::string> prompts;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        if (line.ends_with('\r'))
            line.pop_back();
        if (!line.empty()) prompts.push_back(line);
    }
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

// The number of positions that a sample may use.
inline size_t choose_context_length(const Run& run) {
    const Config& c = run.config;
    bool new_weights = has_new_weights(c);
    bool table = run.shape.embedding.position == Position::LEARNED;
    size_t all = text_positions(run.shape);
    return new_weights && table ? std::min(all, size_t(c.seq)) : all;
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

// Choose what samples start from and which tokens end them, and note what is cut.
inline void choose_prompts(Run& run) {
    const Config& c = run.config;
    LLMC_USER_CHECK(c.prompt.empty() || vocab_matches(run), "--prompt: %s",
                    foreign_tokenizer(run).c_str());
    std::vector<std::string> texts = {c.prompt};
    if (c.prompt == "-") texts = read_prompts(run);
    LLMC_USER_CHECK(!texts.empty(), "--prompt -: standard input has no line that holds text");
    run.stop_tokens = choose_stop_tokens(run);

    // Encode each prompt, and cut what is longer than the positions.
    size_t positions = choose_context_length(run), wanted = size_t(c.sample_tokens), longest = 0;
    run.context_length = positions;
    bool speaks = is_first_rank(run) && wanted > 0 && !c.eval && !c.explain;
    for (const std::string& text : texts) {
        Prompt p = {text, prompt_tokens(run, text), {}};
        size_t before = p.tokens.size();
        shorten_prompt(&p.tokens, run.tokenizer.bos, positions, wanted);
        size_t kept = p.tokens.size();
        if (kept < before && speaks)
            note(run, concat("prompt ", run.prompts.size() + 1, " has ", before,
                             " tokens: samples continue its last ", kept));
        longest = std::max(longest, kept);
        run.prompts.push_back(p);
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
    int64_t samples = int64_t(run.prompts.size()) * c.samples;
    bytes = sample_title(run.step, number, samples) + "---\n" + prompt.text;
    if (is_first_rank(run)) print(true);
    for (size_t i = 0; !text && i < prompt.tokens.size(); i++)
        emit(prompt.tokens[i]);

    // Draw by seed, step and the sample's number, so that a resumed run prints the same samples.
    Sampling how = {float(c.temperature), float(c.top_p), c.top_k, uint64_t(c.seed), run.step};
    how.number = number;
    how.draft = run.draft;
    how.ends = run.stop_tokens;
    generate(t, run.generate_plan, prompt.tokens, size_t(c.sample_tokens), how, emit);
    if (!is_first_rank(run)) return;
    print(true);
    printf("\n---\n");
}

// Continue each prompt --samples times.
template <typename T, typename S>
void print_samples(Run& run, Trainer<T, S>& t) {
    if (run.generate_plan < 0) return;
    Spend spend(run.account, Work::SAMPLE);
    finish_line(run.log);
    int64_t number = 0;
    for (const Prompt& prompt : run.prompts)
        for (int i = 0; i < run.config.samples; i++)
            print_sample(run, t, prompt, number++);
}

} // namespace llmc
