// bpe_train.h - byte-level BPE learned from text: words, pairs, merges - arXiv:1508.07909
//   1. cut the text into words by the pattern, and count equal words
//   2. count each pair of neighbours in the distinct words, times the word's count; "aaa" has two
//   3. make the most frequent pair a token; among equals the one with the smallest (left, right)
//   4. replace it in the words that have it, from left to right without overlap; only the pairs
//      beside it change their counts
//   5. go on with 3 until there are SIZE tokens, or no pair is left
//   Ids      special tokens, bytes in the order of GPT-2's letters, merges: those that Hugging
//            Face's tokenizers give, so that ties and therefore merges are the same. Between the
//            same two borders all words merge alike, so no two merges make the same bytes.
//   Heap     lazy: an entry whose count has changed goes back with today's count
//   Counts   64 bits: in 32 the commonest words of a large text would never merge
//   Outputs  DIR/tokenizer.json, tokenizer_config.json and, with the same ids, tokenizer.tiktoken
//   Cost     threads count, one thread merges (dev/LOG.md); 520 bytes a distinct word
#pragma once
#include <cmath>
#include <queue>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>
#include "../comm/text.h"
#include "../io/config.h"
#include "../io/files.h"
#include "../io/json.h"
#include "../io/prepare.h"
#include "../io/text_batch.h"
#include "../io/text_stream.h"
#include "../io/tokenizer.h"
#include "../io/tokenizer_export.h"
#include "../io/tokenizer_files.h"

namespace llmc {

// How often each distinct word occurs.
typedef std::unordered_map<std::string, int64_t, TextHash, std::equal_to<>> WordCounts;

// ----------------------------------------------------------------------------
// merges

// Two neighbouring tokens: how often they occur, and the words in which they may.
struct TokenPair {
    int64_t count = 0;
    std::vector<uint32_t> words = {};
};

// A pair in the heap, with its count of then. The most frequent comes first, then the smallest.
struct QueuedPair {
    int64_t count;
    uint64_t tokens; // left << 32 | right
    bool operator<(const QueuedPair& o) const {
        return count != o.count ? count < o.count : tokens > o.tokens;
    }
};

// A distinct word: its place in PairCounts::tokens, and how often it occurs.
struct CountedWord {
    size_t begin;
    uint32_t length;
    int64_t count;
};

// Distinct words as tokens, and the pairs in them.
struct PairCounts {
    std::vector<uint32_t> tokens = {}; // of all words, one after the other
    std::vector<CountedWord> words = {};
    std::unordered_map<uint64_t, TokenPair> pairs = {};
    std::vector<uint64_t> fresh = {}; // pairs that appeared since the last merge
    std::priority_queue<QueuedPair> heap = {};
};

// Change the count of a pair in a word.
inline void change_pair(PairCounts& p, uint32_t left, uint32_t right, uint32_t word,
                        int64_t change) {
    uint64_t tokens = uint64_t(left) << 32 | right;
    auto [found, fresh] = p.pairs.try_emplace(tokens);
    if (fresh)
        p.fresh.push_back(tokens);
    TokenPair& pair = found->second;
    pair.count += change;
    if (change > 0 && (pair.words.empty() || pair.words.back() != word))
        pair.words.push_back(word);
}

// Put pairs into the heap: those that still occur.
inline void queue_pairs(PairCounts& p, const std::vector<uint64_t>& pairs) {
    for (uint64_t tokens : pairs)
        if (int64_t count = p.pairs[tokens].count; count > 0)
            p.heap.push({count, tokens});
}

// Split words into bytes, and count all pairs.
inline PairCounts count_pairs(const Tokenizer& t, const WordCounts& words) {
    PairCounts p;
    for (const auto& [text, count] : words) {
        auto word = uint32_t(p.words.size());
        p.words.push_back({p.tokens.size(), uint32_t(text.size()), count});
        for (unsigned char byte : text)
            p.tokens.push_back(uint32_t(t.byte_token[byte]));
        for (size_t i = p.words.back().begin; i + 1 < p.tokens.size(); i++)
            change_pair(p, p.tokens[i], p.tokens[i + 1], word, count);
    }
    queue_pairs(p, p.fresh);
    return p;
}

// Replace a pair in a word. The word's tokens move together in place: `to` is never ahead of `at`.
inline void merge_in_word(PairCounts& p, uint32_t word, uint64_t tokens, uint32_t merged) {
    auto [begin, length, count] = p.words[word];
    uint32_t* token = &p.tokens[begin];
    auto left = uint32_t(tokens >> 32), right = uint32_t(tokens);
    uint32_t to = 0;
    for (uint32_t at = 0; at < length; at++) {
        if (at + 1 == length || token[at] != left || token[at + 1] != right) {
            token[to++] = token[at];
            continue;
        }

        // Count the pairs on both sides. The token before may itself be a new one.
        if (to > 0) {
            change_pair(p, token[to - 1], left, word, -count);
            change_pair(p, token[to - 1], merged, word, count);
        }
        at++;
        if (at + 1 < length) {
            change_pair(p, right, token[at + 1], word, -count);
            change_pair(p, merged, token[at + 1], word, count);
        }
        token[to++] = merged;
    }
    p.words[word].length = to;
}

// Learn merges until the tokenizer, which has its special tokens and bytes, has `size` tokens or no
// pair is left. Returns the number of tokens that the words then have.
inline int64_t learn_merges(Tokenizer* t, WordCounts words, size_t size) {
    PairCounts p = count_pairs(*t, words);
    WordCounts().swap(words); // its memory is as much again
    std::vector<Merge> merges;
    while (t->pieces.size() < size && !p.heap.empty()) {
        // Take the most frequent pair, by today's count.
        QueuedPair top = p.heap.top();
        p.heap.pop();
        TokenPair& pair = p.pairs[top.tokens];
        if (top.count != pair.count) {
            queue_pairs(p, {top.tokens});
            continue;
        }

        // Make it a token.
        int left = int(top.tokens >> 32), right = int(uint32_t(top.tokens));
        int token = int(t->pieces.size());
        merges.push_back(merge_of(left, right, uint32_t(merges.size()), token));
        t->pieces.push_back(t->pieces[left] + t->pieces[right]);
        set_word_piece(t, token);

        // Replace it everywhere. All pairs that appear have the new token, so they are new too.
        p.fresh.clear();
        std::vector<uint32_t> in = std::move(pair.words);
        for (uint32_t word : in)
            merge_in_word(p, word, top.tokens, uint32_t(token));
        queue_pairs(p, p.fresh);
    }
    set_merges(t, merges);
    t->vocab_size = int(t->pieces.size());

    // Count what is left.
    int64_t tokens = 0;
    for (const CountedWord& word : p.words)
        tokens += word.count * word.length;
    return tokens;
}

// ----------------------------------------------------------------------------
// words

// Count the words of all inputs: threads take batches in turn. o: counts bad lines.
inline std::string count_words(WordCounts* all, ShardOutput& o, BatchReader& r, const Tokenizer& t,
                               size_t threads) {
    std::string wrong;
    #pragma omp parallel num_threads(int(threads))
    {
        // Count instead of making tokens.
        WordCounts words;
        Tokenizer mine = t;
        mine.each_word = [&](std::string_view word) {
            auto known = words.find(word);
            if (known != words.end())
                known->second++;
            else
                words.emplace(word, 1);
        };

        // Take batches until none is left, or one has failed.
        for (bool more = true; more;) {
            TextBatch b;
            #pragma omp critical
            more = wrong.empty() && read_batch(r, &b);
            if (!more) break;
            tokens_of_batch(o, b, mine, r);
            b.tokens.clear();
            #pragma omp critical
            wrong = wrong.empty() ? write_batch(o, b) : wrong;
        }

        // Add up.
        #pragma omp critical
        if (all->empty())
            all->swap(words);
        else
            for (const auto& [word, count] : words)
                (*all)[word] += count;
    }
    if (r.open) stream_close(r.stream);
    if (wrong.empty()) wrong = r.wrong;
    return wrong.empty() ? too_many_malformed(o.counts) : wrong;
}

// ----------------------------------------------------------------------------
// the tokenizer

// The pattern that --pattern names.
inline std::string named_pattern(const std::string& name) {
    std::string gpt4 = CL100K_PATTERN;
    return name == "gpt2"       ? GPT2_PATTERN
           : name == "nanochat" ? replace_all(gpt4, "{1,3}", "{1,2}")
                                : gpt4;
}

// Make a tokenizer of special tokens and bytes. The first special token ends a text.
inline std::string begin_tokenizer(Tokenizer* t, const Config& c) {
    t->kind = TokenizerKind::BPE;
    LLMC_TRY(add_pattern(t, named_pattern(c.pattern)));
    std::string list = c.add_tokens.empty() ? "<|endoftext|>" : c.add_tokens;
    for (const std::string& text : texts_between_commas(list)) {
        // Refuse a text that is one word, which merges could make too, and one that is named twice.
        int words = 0;
        Tokenizer counting = *t;
        counting.each_word = [&](std::string_view) { words++; };
        encode(counting, text);
        if (words < 2 || t->special.count(text))
            return concat("--add-tokens ", list, ": ", in_quotes(text),
                          words < 2 ? " may be a word of a text: give one like <|name|>"
                                    : " is there twice: leave one out");
        add_special(t, text, int(t->pieces.size()));
        t->pieces.push_back(text);
    }
    t->eot = 0;

    // Add the bytes, in the order of the characters that stand for them.
    for (int byte : byte_letters()) {
        if (byte < 0) continue;
        t->pieces.push_back(std::string(1, char(byte)));
        set_word_piece(t, int(t->pieces.size()) - 1);
    }
    t->vocab_size = int(t->pieces.size());
    LLMC_TRY(set_bytes(t));
    LLMC_TRY(not_json(*t));
    if (size_t(c.train_tokenizer) >= t->pieces.size())
        return "";
    return concat("--train-tokenizer ", c.train_tokenizer, ": 256 bytes and ", t->special.size(),
                  " special tokens are more: give at least ", t->pieces.size());
}

// Encode bytes in base64: three bytes are four digits, and = fills up.
inline std::string base64_encode(std::string_view bytes) {
    std::string text;
    for (size_t at = 0; at < bytes.size(); at += 3) {
        uint32_t bits = 0;
        for (size_t i = at; i < at + 3; i++)
            bits = bits << 8 | (i < bytes.size() ? (unsigned char)bytes[i] : 0);
        for (size_t i = 0; i < 4; i++)
            text += at + i > bytes.size() ? '=' : BASE64_DIGITS[bits >> (18 - 6 * i) & 63];
    }
    return text;
}

// The files of a trained tokenizer. tiktoken's has no special tokens and no pattern.
inline TextFiles trained_files(const Tokenizer& t) {
    TextFiles files;
    files["tokenizer.json"] = tokenizer_as_json(t).dump(1) + "\n";
    files["tokenizer_config.json"] = tokenizer_config(t, size_t(1) << 30); // any length
    std::string& ranks = files["tokenizer.tiktoken"];
    for (size_t i = t.special.size(); i < t.pieces.size(); i++)
        ranks += concat(base64_encode(t.pieces[i]), " ", i, "\n");
    return files;
}

// ----------------------------------------------------------------------------
// the command

// Check the flags, which this command shares with the writing of shards.
inline std::string check_training_flags(const Config& c) {
    const std::set<std::string> both = {"data", "field", "threads"};
    const std::set<std::string> own = {"train-tokenizer", "pattern", "add-tokens"};
    for (const std::string& name : c.given)
        if (!both.count(name) && own.count(name) != (c.train_tokenizer > 0))
            return concat("--", name, " is for ", own.count(name) ? "--train-tokenizer SIZE"
                          : "shards, which --train-tokenizer does not write");
    return "";
}

// Check what is read and what is written.
inline std::string open_training(BatchReader* r, const Config& c, const std::string& folder) {
    if (c.data.empty())
        return "what is it trained on? give --data FILES";
    LLMC_TRY(describe_inputs(&r->inputs, c.data));
    for (const TextInput& input : r->inputs)
        if (input.tokens)
            return input.path + ": holds tokens: give the text that they were made of";
    return file_type(folder) ? folder + ": is there already: choose another name"
                             : try_folder("train-tokenizer", folder);
}

// Train a tokenizer on the inputs, and write its folder. program_folder: where the program lies.
inline std::string train_tokenizer(const Config& c, const std::string& program_folder,
                                   const BatchLimits& limits = {}) {
    // Check everything.
    Tokenizer t;
    BatchReader r;
    std::string folder = c.prepare.substr(0, c.prepare.find_last_not_of('/') + 1);
    LLMC_TRY(begin_tokenizer(&t, c));
    LLMC_TRY(open_training(&r, c, folder));

    // Say what memory this takes: distinct words become rarer as the text goes on.
    double bytes = 0;
    for (const TextInput& input : r.inputs)
        bytes += double(input.bytes) * (input.packed.empty() ? 1 : 4);
    printf("text: about %s; memory: about %s\n", bytes_text(bytes).c_str(),
           bytes_text(4e3 * std::pow(bytes, 0.6)).c_str());

    // Count words.
    r.script = parquet_script(program_folder);
    r.field = c.field;
    r.limits = limits;
    r.end_text = t.pieces[0];
    ShardOutput o;
    WordCounts words;
    size_t threads = c.threads ? size_t(c.threads) : std::thread::hardware_concurrency();
    LLMC_TRY(count_words(&words, o, r, t, std::max(threads, size_t(1))));
    if (words.empty())
        return r.inputs[0].path + ": holds no text";
    print_left_out(o);
    size_t distinct = words.size();
    int64_t text = 0;
    for (const auto& [word, count] : words)
        text += count * int64_t(word.size());

    // Merge, and write. The folder has its name when it is whole.
    int64_t tokens = learn_merges(&t, std::move(words), size_t(c.train_tokenizer));
    mkdir((folder + ".tmp").c_str(), 0777);
    LLMC_TRY(not_json(t));
    LLMC_TRY(write_texts(folder + ".tmp", trained_files(t)));
    LLMC_TRY(replace_folder(folder + ".tmp", folder));

    // Say what there is now.
    if (t.vocab_size < c.train_tokenizer)
        fprintf(stderr, "note: no pair is left for more tokens: give more text\n");
    printf("%d tokens from %zu distinct words, %.2f bytes a token: %s\n", t.vocab_size, distinct,
           double(text) / double(tokens), folder.c_str());
    return "";
}

} // namespace llmc
