// tokenizer.h - text to tokens and back: bytes, BPE, unigram - arXiv:1508.07909, arXiv:1804.10959
//   encode   1. cut out the tokens that are found verbatim in the text; special ones on request
//            2. normalise what is left (SentencePiece: a space in front)
//            3. cut at tokens of the normalised text, then by the tokenizer's patterns, into words
//            4. turn each word into tokens:
//     BPE      Symbols are bytes or characters. Repeatedly merge the two neighbours whose merge has
//              the lowest rank, the leftmost first, until no neighbours can merge.
//     unigram  Choose the pieces with the highest sum of scores (Viterbi).
//   Merges from files of all kinds become one table: (left, right) -> rank, token. If a file has
//   pieces with scores or ranks but no merges, each way to cut a piece in two becomes a merge with
//   the piece's rank.
//   Any bytes come back: decode(encode(text)) == text, invalid UTF-8 too, unless the tokenizer
//   itself normalises (NFC and similar, remove_extra_whitespaces, U+2581 for a space) or has an
//   unknown token.
//   Contract: nothing writes to a Tokenizer after it was opened; any number of threads may encode.
//   Cost: O(n log n) for the longest word, O(n) otherwise; tokens of repeated words are copied.
//   Files: tokenizer_files.h
#pragma once
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <utf8proc.h>
#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>
#include "../ops/types.h"
#include "../comm/text.h"

namespace llmc {

// A map from text to token that is looked up by string_view, without copying the text.
struct TextHash {
    using is_transparent = void;
    size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
};
typedef std::unordered_map<std::string, int, TextHash, std::equal_to<>> TokenOf;

// The token of a text, or -1 if there is none.
inline int find_token(const TokenOf& ids, std::string_view text) {
    auto found = ids.find(text);
    return found == ids.end() ? -1 : found->second;
}

// How an added token of Hugging Face's is found. White space that it takes in is lost.
struct FixedRule {
    bool special = false;     // found only if special tokens are asked for
    bool single_word = false; // found only between characters that belong to no word
    bool lstrip = false;      // takes in the white space before it
    bool rstrip = false;      // takes in the white space after it
};

// Texts that are one token wherever they occur. If several match at a place, the longest wins.
struct Fixed {
    TokenOf ids = {};
    std::unordered_map<int, FixedRule> rules = {}; // by token
    // a trie of the texts, whose root is node 0: thousands may begin alike, so each place of a text
    // is matched in one walk
    std::unordered_map<uint64_t, uint32_t> edges = {}; // node << 8 | byte -> node
    std::vector<int> token_at = {-1}; // [node]; -1: only the beginning of a text
    bool first_byte[256] = {};        // whether a text begins with this byte
};

// Two neighbours that can become one token. The lowest rank merges first.
struct Merge {
    uint64_t pair; // left << 32 | right
    uint32_t rank, token;
};
constexpr uint32_t NO_RANK = ~0u;

// U+2581, which SentencePiece writes for a space
constexpr std::string_view META_SPACE = "\xe2\x96\x81";

enum class TokenizerKind { BYTE, BPE, UNIGRAM };
enum class Prefix { NONE, SPACE, SPACE_UNLESS_THERE }; // what is put in front of a text

// A tokenizer: everything that its files say, whatever their format.
struct Tokenizer {
    std::string name = "byte"; // the value of --tokenizer
    int vocab_size = 256;
    TokenizerKind kind = TokenizerKind::BYTE;
    int bos = -1;       // token that is put before each text; -1: none
    int bos_token = -1; // token that its files name so, which templates write; -1: bos
    int eot = -1;       // token that ends a text
    int unknown = -1;
    std::set<int> ends = {}; // all tokens that its files let end a text
    std::vector<std::string> notes = {}; // where its files disagree
    // the vocabulary
    std::vector<std::string> pieces = {}; // token -> bytes; empty for control tokens
    TokenOf ids = {};                     // piece -> token, without control tokens
    TokenOf special = {};                 // special tokens, by their texts
    Fixed raw = {};                       // tokens found verbatim in the text
    Fixed added = {};                     // tokens found in normalised text
    // from text to words
    // each cuts what the pattern before left
    std::vector<std::shared_ptr<pcre2_code>> patterns = {};
    // the patterns as their files write them
    std::vector<std::string> pattern_texts = {};
    int unicode_form = 0; // utf8proc's options for NFC, NFD, NFKC or NFKD; 0: as the text is
    Prefix prefix = Prefix::NONE; // in front of a text, and after special tokens
    bool prefix_once = false;     // only in front of a text
    bool late_spaces = false;     // spaces are written after the cut at added tokens, not before it
    bool extra_spaces = true;     // false: runs of spaces become one, and those at both ends go
    // from words to tokens
    // symbols are characters, and U+2581 is a space; otherwise symbols are bytes
    bool sentencepiece = false;
    bool whole_words = false;   // a word that is a piece becomes its token, whatever the merges say
    std::vector<int> byte_token = std::vector<int>(256, -1);
    // hash table, open addressing; a power of two, at most half full
    std::vector<Merge> merges = {};
    std::vector<float> scores = {}; // unigram: the score of each piece
    size_t longest = 0;             // length of the longest piece in bytes
    // instead of encoding a word: training counts it
    std::function<void(std::string_view)> each_word = {};
};

// ----------------------------------------------------------------------------
// building blocks

// Add a text and its token.
inline void fixed_add(Fixed* f, const std::string& text, int token, FixedRule rule = {}) {
    if (text.empty()) return;
    f->ids[text] = token;
    f->rules[token] = rule;
    f->first_byte[(unsigned char)text[0]] = true;

    // Walk down the trie, and make the nodes that it lacks.
    uint32_t node = 0;
    for (unsigned char byte : text) {
        auto fresh = uint32_t(f->token_at.size());
        uint64_t key = uint64_t(node) << 8 | byte;
        auto [edge, made] = f->edges.insert({key, fresh});
        if (made) f->token_at.push_back(-1);
        node = edge->second;
    }
    f->token_at[node] = token;
}

// Whether a character is white space, or belongs to a word: \s and \w of Unicode's UTS 18.
inline bool is_space(int32_t c) {
    int category = utf8proc_category(c);
    bool separator = category == UTF8PROC_CATEGORY_ZS || category == UTF8PROC_CATEGORY_ZL ||
                     category == UTF8PROC_CATEGORY_ZP;
    return separator || (c >= '\t' && c <= '\r') || c == 0x85;
}
inline bool is_of_word(int32_t c) {
    // Letters, marks, decimal digits, letter-like numbers, connectors, joiners, circled letters.
    int category = utf8proc_category(c);
    bool letter = category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_ME;
    bool number = category == UTF8PROC_CATEGORY_ND || category == UTF8PROC_CATEGORY_NL;
    bool joins = category == UTF8PROC_CATEGORY_PC || c == 0x200c || c == 0x200d;
    bool circled = (c >= 0x24b6 && c <= 0x24e9) || (c >= 0x1f130 && c <= 0x1f149) ||
                   (c >= 0x1f150 && c <= 0x1f169) || (c >= 0x1f170 && c <= 0x1f189);
    return letter || number || joins || circled;
}

// The first or last character of a text, with its length in bytes. An empty text, or invalid
// UTF-8, gives {-1, 0}.
struct Character {
    int32_t code;
    size_t bytes;
};
inline Character first_character(std::string_view text) {
    size_t n = text.empty() ? 0 : utf8_length(text);
    int32_t code = -1;
    if (n)
        utf8proc_iterate((const utf8proc_uint8_t*)text.data(), utf8proc_ssize_t(n), &code);
    return {code, n};
}
inline Character last_character(std::string_view text) {
    // Step back over bytes that do not begin a character.
    size_t n = std::min(text.size(), size_t(1));
    while (n < std::min(text.size(), size_t(4)) && (text[text.size() - n] & 0xc0) == 0x80)
        n++;
    Character c = first_character(text.substr(text.size() - n));
    return c.bytes == n ? c : Character{-1, 0};
}

// The number of bytes of white space at the end of a text, and at its beginning.
inline size_t space_at_end(std::string_view text) {
    size_t left = text.size();
    for (Character c; is_space((c = last_character(text.substr(0, left))).code);)
        left -= c.bytes;
    return text.size() - left;
}
inline size_t space_at_start(std::string_view text) {
    size_t at = 0;
    for (Character c; is_space((c = first_character(text.substr(at))).code);)
        at += c.bytes;
    return at;
}

// The longest fixed text that stands at a place, or {-1, 0} if none does.
struct FixedMatch {
    int token;
    size_t length;
};
inline FixedMatch match_fixed(const Fixed& f, std::string_view text, size_t at) {
    FixedMatch longest = {-1, 0};
    if (!f.first_byte[(unsigned char)text[at]])
        return longest;
    // Walk as far as the text is the beginning of a fixed one, and note the last whole one.
    uint64_t node = 0;
    for (size_t length = 1; at + length <= text.size(); length++) {
        auto edge = f.edges.find(node << 8 | (unsigned char)text[at + length - 1]);
        if (edge == f.edges.end()) break;
        node = edge->second;
        if (f.token_at[node] >= 0)
            longest = {f.token_at[node], length};
    }
    return longest;
}

// Cut a text at its fixed texts: calls plain(text between them) and token(id) in the text's order.
// A fixed text that its rule excludes is plain, and hides shorter fixed texts inside it.
template <typename Plain, typename Token>
void split_at_fixed(const Fixed& f, std::string_view text, bool special, Plain plain, Token token) {
    size_t from = 0; // everything before this is given out
    for (size_t at = 0, next; at < text.size(); at = next) {
        // Find the longest fixed text that begins here.
        FixedMatch match = match_fixed(f, text, at);
        next = at + std::max(match.length, size_t(1));
        if (match.token < 0) continue;

        // Apply its rule.
        FixedRule rule = f.rules.at(match.token);
        bool inside = rule.single_word &&
                      (is_of_word(last_character(text.substr(0, at)).code) ||
                       is_of_word(first_character(text.substr(next)).code));
        if (inside || (rule.special && !special))
            continue;

        // Take in white space, but none that has been given out already.
        size_t begin = at, end = next;
        if (rule.lstrip)
            begin = std::max(at - space_at_end(text.substr(0, at)), from);
        if (rule.rstrip)
            end += space_at_start(text.substr(next));

        // Give out the text before, then the token.
        if (begin > from)
            plain(text.substr(from, begin - from));
        token(match.token);
        from = end;
    }
    if (from < text.size())
        plain(text.substr(from));
}

// The slot of a pair in the table: its own, or the free one where it belongs.
inline size_t merge_slot(const std::vector<Merge>& table, uint64_t pair) {
    uint64_t mixed = pair * 0x9e3779b97f4a7c15u; // 2^64 over the golden ratio
    size_t mask = table.size() - 1;
    size_t i = (mixed >> 32) & mask;
    while (table[i].rank != NO_RANK && table[i].pair != pair)
        i = (i + 1) & mask;
    return i;
}

// The merge of two tokens; its rank is NO_RANK if they do not merge.
inline Merge find_merge(const Tokenizer& t, int left, int right) {
    if (t.merges.empty() || left < 0 || right < 0)
        return {0, NO_RANK, 0};
    return t.merges[merge_slot(t.merges, uint64_t(left) << 32 | uint32_t(right))];
}

// The token that begins a text for templates and configs, or -1.
inline int begin_token(const Tokenizer& t) { return t.bos_token < 0 ? t.bos : t.bos_token; }

// Whether each token of text is one byte, so that nothing merges however words are cut: --tokenizer
// byte, and what an export makes of it.
inline bool only_bytes(const Tokenizer& t) {
    return t.kind != TokenizerKind::UNIGRAM && !t.sentencepiece && t.longest <= 1;
}

// Put merges into a hash table that is at most half full.
inline void set_merges(Tokenizer* t, const std::vector<Merge>& merges) {
    size_t slots = 2;
    while (slots < 2 * merges.size()) slots *= 2;
    t->merges.assign(slots, {0, NO_RANK, 0});
    for (const Merge& m : merges)
        t->merges[merge_slot(t->merges, m.pair)] = m;
}

// Rewrite \s, \w and \b as Oniguruma defines them, which Hugging Face's tokenizers use. PCRE2's \s
// includes U+180E, which is no white space since Unicode 6.3; its \w lacks marks in some versions.
inline std::string unicode_classes(const std::string& pattern) {
    const std::string spaces = R"(\p{Z}\t-\r\x{85})";
    const std::string word = R"(\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}\x{b2}\x{b3}\x{b9}\x{bc}-\x{be})"
                             R"(\x{24b6}-\x{24e9}\x{1f130}-\x{1f149}\x{1f150}-\x{1f169})"
                             R"(\x{1f170}-\x{1f189})";

    // The members of an escape, as they stand in brackets; outside of brackets, add a pair.
    auto members = [&](const std::string& item) {
        return item == "\\s" ? spaces : item == "\\w" ? word : "";
    };
    const std::string in = "[" + word + "]";

    // Copy the pattern item by item, and replace the escapes.
    std::string out;
    bool in_class = false;
    for (size_t i = 0; i < pattern.size(); i++) {
        std::string item(1, pattern[i]);
        if (item == "\\" && i + 1 < pattern.size())
            item += pattern[++i];
        if (item == "[" || item == "]")
            in_class = item == "[";

        if (!members(item).empty())
            item = in_class ? members(item) : "[" + members(item) + "]";
        else if (item == "\\S" && !in_class)
            item = "[^" + spaces + "]";
        else if (item == "\\W" && !in_class)
            item = "[^" + word + "]";
        else if (item == "\\b" && !in_class)
            item = "(?:(?<=" + in + ")(?!" + in + ")|(?<!" + in + ")(?=" + in + "))";
        out += item;
    }
    return out;
}

// Compile a pattern. Words will be its matches and the text between them. Returns ""
// or what is wrong.
inline std::string add_pattern(Tokenizer* t, const std::string& pattern, bool literal = false) {
    int error = 0;
    size_t at = 0;
    uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP);
    std::string text = literal ? pattern : unicode_classes(pattern);
    pcre2_code* code =
        pcre2_compile(PCRE2_SPTR(text.data()), text.size(), options, &error, &at, nullptr);
    if (!code) {
        char message[256];
        pcre2_get_error_message(error, (PCRE2_UCHAR*)message, sizeof(message));
        return "pattern " + pattern + ": " + message;
    }

    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE); // without a JIT, PCRE2 interprets the pattern
    t->patterns.emplace_back(code, pcre2_code_free);
    t->pattern_texts.push_back(pattern);
    return "";
}

// ----------------------------------------------------------------------------
// from a word to tokens

// One thread's encoding of texts: the output, scratch, and the words seen so far.
struct Encoding {
    const Tokenizer& t;
    std::vector<int> out = {};

    // A word seen before: its tokens are copied from `out`.
    struct Word {
        const char* text;
        size_t length;
        size_t from; // its tokens are out[from, from + count)
        size_t count;
    };
    std::vector<Word> words = {}; // by hash, a power of two; a newer word replaces the older
    std::vector<std::shared_ptr<pcre2_match_data>> matches = {}; // one for each pattern
    std::shared_ptr<pcre2_match_context> limits = nullptr;

    // BPE: a word's symbols as a linked list, and the merges that its neighbours can do.
    struct Symbol {
        int token;
        int previous;
        int next;
        uint32_t rank; // of the merge with the next symbol
        size_t at;     // first byte in the word
        size_t length;
    };
    std::vector<Symbol> symbols = {};
    std::vector<uint64_t> heap = {}; // rank << 32 | symbol

    // a deque never moves its texts, so words can point into them
    std::deque<std::string> normalised = {};
};

// Append text that is no piece: a token for each byte if bytes have tokens, else the unknown token,
// once for a run of such text. word_from: where the word's tokens begin in `out`.
inline void push_unknown(Encoding& e, std::string_view text, size_t word_from) {
    if (e.t.byte_token[(unsigned char)text[0]] >= 0)
        for (char c : text)
            e.out.push_back(e.t.byte_token[(unsigned char)c]);
    else if (e.t.unknown >= 0 && (e.out.size() == word_from || e.out.back() != e.t.unknown))
        e.out.push_back(e.t.unknown);
}

// Make a list of a word's symbols: characters, or bytes.
inline void split_symbols(Encoding& e, std::string_view word) {
    e.symbols.clear();
    for (size_t at = 0, n; at < word.size(); at += n) {
        n = e.t.sentencepiece ? std::max<size_t>(utf8_length(word.substr(at)), 1) : 1;
        int token = e.t.sentencepiece ? find_token(e.t.ids, word.substr(at, n))
                                      : e.t.byte_token[(unsigned char)word[at]];
        int i = int(e.symbols.size());
        e.symbols.push_back({token, i - 1, i + 1, NO_RANK, at, n});
    }
    e.symbols.back().next = -1;
}

// Queue the merge of symbol i with the next one, if they can merge.
inline void queue_merge(Encoding& e, int i) {
    Encoding::Symbol& s = e.symbols[i];
    s.rank = s.next < 0 ? NO_RANK : find_merge(e.t, s.token, e.symbols[s.next].token).rank;
    if (s.rank == NO_RANK) return;
    e.heap.push_back(uint64_t(s.rank) << 32 | uint32_t(i));
    std::push_heap(e.heap.begin(), e.heap.end(), std::greater<>());
}

// Append a word's tokens by BPE.
inline void bpe_word(Encoding& e, std::string_view word) {
    // Queue the merges of all neighbours.
    split_symbols(e, word);
    e.heap.clear();
    for (size_t i = 0; i + 1 < e.symbols.size(); i++)
        queue_merge(e, int(i));

    while (!e.heap.empty()) {
        // Take the merge with the lowest rank, the leftmost first.
        std::pop_heap(e.heap.begin(), e.heap.end(), std::greater<>());
        int i = int(uint32_t(e.heap.back()));
        uint32_t rank = uint32_t(e.heap.back() >> 32);
        e.heap.pop_back();
        Encoding::Symbol& left = e.symbols[i];
        if (left.rank != rank) continue; // a neighbour has merged meanwhile

        // Merge: the left symbol becomes the pair, the right one leaves the list.
        Encoding::Symbol& right = e.symbols[left.next];
        left.token = int(find_merge(e.t, left.token, right.token).token);
        left.next = right.next;
        right.rank = NO_RANK;
        if (left.next >= 0)
            e.symbols[left.next].previous = i;

        // Queue the new symbol's merges with both of its neighbours.
        queue_merge(e, i);
        if (left.previous >= 0)
            queue_merge(e, left.previous);
    }

    // Append the tokens that are left in the list.
    size_t from = e.out.size();
    for (int i = 0; i >= 0; i = e.symbols[i].next) {
        const Encoding::Symbol& s = e.symbols[i];
        if (s.token >= 0)
            e.out.push_back(s.token);
        else
            push_unknown(e, word.substr(s.at, s.length), from);
    }
}

// The best path from the word's beginning to one place.
struct BestPath {
    float score = -INFINITY;
    int token = -1;  // the last piece of the path; -1: a character that is no piece
    size_t from = 0; // where that piece begins
};

// Find the best path to each place of the word. A character that is no piece costs 10 more than the
// worst piece, as in SentencePiece.
inline std::vector<BestPath> best_paths(const Tokenizer& t, std::string_view word) {
    std::vector<BestPath> best(word.size() + 1);
    best[0].score = 0;
    float unknown = std::ranges::min(t.scores) - 10;

    // Keep the better of two paths to a place.
    auto reach = [&](size_t from, size_t to, int token, float score) {
        if (best[from].score + score > best[to].score)
            best[to] = {best[from].score + score, token, from};
    };

    // Extend the best path of each place by every piece that begins there.
    for (size_t at = 0, n; at < word.size(); at += n) {
        n = std::max<size_t>(utf8_length(word.substr(at)), 1);
        for (size_t length = 1; length <= std::min(t.longest, word.size() - at); length++) {
            int token = find_token(t.ids, word.substr(at, length));
            if (token >= 0)
                reach(at, at + length, token, t.scores[token]);
        }
        reach(at, at + n, -1, unknown); // never better than a piece
    }
    return best;
}

// Append a word's tokens: the pieces with the best sum of scores.
inline void unigram_word(Encoding& e, std::string_view word) {
    // Walk back along the best path from the word's end.
    std::vector<BestPath> best = best_paths(e.t, word);
    std::vector<size_t> ends;
    for (size_t at = word.size(); at > 0; at = best[at].from)
        ends.push_back(at);

    // Append its tokens forward.
    size_t from = e.out.size();
    for (size_t i = ends.size(); i-- > 0;) {
        const BestPath& p = best[ends[i]];
        if (p.token >= 0)
            e.out.push_back(p.token);
        else
            push_unknown(e, word.substr(p.from, ends[i] - p.from), from);
    }
}

// Append a word's tokens.
inline void encode_word(Encoding& e, std::string_view word) {
    if (e.t.each_word) return e.t.each_word(word);

    // Copy the tokens of a word seen before.
    Encoding::Word& known = e.words[TextHash()(word) & (e.words.size() - 1)];
    size_t from = e.out.size();
    if (std::string_view(known.text, known.length) == word) {
        e.out.resize(from + known.count);
        std::copy_n(e.out.begin() + long(known.from), known.count, e.out.begin() + long(from));
        return;
    }

    // Tokenize a new word, and remember where its tokens are.
    int whole = e.t.whole_words ? find_token(e.t.ids, word) : -1;
    if (whole >= 0)
        e.out.push_back(whole);
    else if (e.t.kind == TokenizerKind::BPE)
        bpe_word(e, word);
    else
        unigram_word(e, word);
    known = {word.data(), word.size(), from, e.out.size() - from};
}

// ----------------------------------------------------------------------------
// from a text to words

// Cut text into words by the patterns from number `pattern` on. The text must be valid UTF-8, so
// that PCRE2 need not check it at each match.
inline void split_by_patterns(Encoding& e, std::string_view text, size_t pattern) {
    if (text.empty()) return;
    if (pattern == e.t.patterns.size())
        return encode_word(e, text);
    pcre2_match_data* match = e.matches[pattern].get();
    const size_t* place = pcre2_get_ovector_pointer(match); // {begin, end} of the match

    // Find the pattern's matches one after the other.
    for (size_t at = 0; at < text.size(); at = place[1]) {
        int found = pcre2_match(e.t.patterns[pattern].get(), PCRE2_SPTR(text.data()), text.size(),
                                at, PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, match, e.limits.get());
        if (found == PCRE2_ERROR_NOMATCH)
            return split_by_patterns(e, text.substr(at), pattern + 1);
        LLMC_USER_CHECK(found >= 0,
                        "--tokenizer %s: its pattern %s takes too many steps in this text (PCRE2 "
                        "error %d): make token shards (.bin) with the tokenizer's own library",
                        e.t.name.c_str(), in_quotes(e.t.pattern_texts[pattern]).c_str(), found);

        // The next pattern may cut both the text before the match and the match itself.
        size_t begin = place[0];
        split_by_patterns(e, text.substr(at, begin - at), pattern + 1);
        split_by_patterns(e, text.substr(begin, place[1] - begin), pattern + 1);
    }
}

// Cut text into runs of valid and of invalid UTF-8. Patterns work on characters, so each invalid
// run becomes a word of its own.
inline void encode_words(Encoding& e, std::string_view text) {
    for (size_t from = 0, to; from < text.size(); from = to) {
        bool valid = utf8_length(text.substr(from)) > 0;
        for (to = from; to < text.size();) {
            size_t n = utf8_length(text.substr(to));
            if ((n > 0) != valid) break;
            to += valid ? n : 1;
        }
        std::string_view run = text.substr(from, to - from);
        valid ? split_by_patterns(e, run, 0) : encode_word(e, run);
    }
}

// Bring text into a Unicode normal form. ASCII is already in it: only runs of other characters are
// normalised, each with the ASCII character before it, which an accent may join. Invalid UTF-8 is
// left as it is.
inline std::string unicode_normalise(std::string_view text, int form) {
    std::string out;
    for (size_t from = 0, to; from < text.size(); from = to) {
        // Find the next run: ASCII up to `run`, other characters up to `to`.
        size_t run = from;
        while (run < text.size() && (unsigned char)text[run] < 0x80)
            run++;
        for (to = run; to < text.size();) {
            size_t n = utf8_length(text.substr(to));
            if (n < 2) break;
            to += n;
        }

        // Without such a run, the text ends here, or this byte begins no character.
        if (to == run) {
            to = std::min(run + 1, text.size());
            out += text.substr(from, to - from);
            continue;
        }

        // Normalise the run, with the ASCII character before it.
        if (run > from) run--;
        utf8proc_uint8_t* normal = nullptr;
        utf8proc_ssize_t length = utf8proc_map((const utf8proc_uint8_t*)text.data() + run, to - run,
                                               &normal, utf8proc_option_t(form));
        LLMC_CHECK(length >= 0, "%s", utf8proc_errmsg(length));
        out.append(text, from, run - from).append((const char*)normal, length);
        free(normal);
    }
    return out;
}

// Put a space in front and drop extra ones, as SentencePiece does. after_space: a space stands
// before this text, so a space at its beginning is extra.
inline std::string normalise_spaces(const Tokenizer& t, std::string_view text, bool may_prefix,
                                    bool after_space) {
    bool there = text[0] == ' ' || text.starts_with(META_SPACE);
    bool prefix = t.prefix == Prefix::SPACE || (t.prefix == Prefix::SPACE_UNLESS_THERE && !there);
    std::string out = prefix && may_prefix ? " " : "";
    for (size_t i = 0; i < text.size(); i++) {
        bool meta = text.compare(i, META_SPACE.size(), META_SPACE) == 0;
        if (meta || text[i] != ' ' || !after_space || t.extra_spaces)
            out += meta ? ' ' : text[i];
        after_space = text[i] == ' ';
        if (meta) i += META_SPACE.size() - 1;
    }
    while (!t.extra_spaces && out.ends_with(' '))
        out.pop_back();
    return out;
}

// ----------------------------------------------------------------------------
// what other files call

// Begin to encode texts of `bytes` bytes in total. All their tokens go to `out`. The texts must not
// move: repeated words are looked up in them.
inline Encoding encoding_open(const Tokenizer& t, size_t bytes) {
    Encoding e = {t};
    if (t.kind == TokenizerKind::BYTE) return e;
    size_t slots = 16;
    while (slots < bytes / 8 && slots < (1 << 16))
        slots *= 2;
    e.words.resize(slots);
    e.limits = {pcre2_match_context_create(nullptr), pcre2_match_context_free};
    for (const auto& pattern : t.patterns)
        e.matches.emplace_back(pcre2_match_data_create_from_pattern(pattern.get(), nullptr),
                               pcre2_match_data_free);
    return e;
}

// Append the tokens of a text.
//   special   the texts of special tokens, such as <|endoftext|>, become these tokens
//   goes_on   the text continues another one: no space goes in front
inline void encode_more(Encoding& e, std::string_view text, bool special = false,
                        bool goes_on = false) {
    const Tokenizer& t = e.t;
    if (t.kind == TokenizerKind::BYTE) {
        for (unsigned char c : text)
            e.out.push_back(c);
        return;
    }
    if (text.empty()) return;

    // Bound the steps of one match: looking back over a run of spaces takes a few for each space.
    size_t steps = 10'000'000 + 16 * text.size();
    pcre2_set_match_limit(e.limits.get(), uint32_t(std::min<size_t>(steps, ~0u)));

    // Cut at the tokens that stand verbatim in the text, and normalise what lies between them. Then
    // cut at the tokens of normalised text. Spaces are written after that cut if a pre-tokenizer
    // writes them, and before it if a normalizer does.
    auto token = [&](int id) { e.out.push_back(id); };
    auto plain = [&](std::string_view between) {
        bool first = between.data() == text.data();
        auto spaces = [&](std::string_view part, bool first) {
            bool inside = first && goes_on;
            bool may_prefix = !inside && (first || !t.prefix_once);
            return std::string_view(
                e.normalised.emplace_back(normalise_spaces(t, part, may_prefix, !inside)));
        };
        if (t.unicode_form)
            between = e.normalised.emplace_back(unicode_normalise(between, t.unicode_form));
        if (t.sentencepiece && !t.late_spaces)
            between = spaces(between, first);
        auto words = [&](std::string_view part) {
            bool begins = first && part.data() == between.data();
            encode_words(e, t.sentencepiece && t.late_spaces ? spaces(part, begins) : part);
        };
        split_at_fixed(t.added, between, special, words, token);
    };
    split_at_fixed(t.raw, text, special, plain, token);
}

// Encode one text.
inline std::vector<int> encode(const Tokenizer& t, std::string_view text, bool special = false,
                               bool goes_on = false) {
    Encoding e = encoding_open(t, text.size());
    encode_more(e, text, special, goes_on);
    return std::move(e.out);
}

// Encode a text from its beginning, after the token that begins sequences, if there is one.
inline std::vector<int> encode_from_start(const Tokenizer& t, std::string_view text) {
    std::vector<int> tokens = encode(t, text, true);
    if (t.bos >= 0 && (tokens.empty() || tokens[0] != t.bos))
        tokens.insert(tokens.begin(), t.bos);
    return tokens;
}

// The bytes of a token. Control tokens have none.
inline std::string decode(const Tokenizer& t, int token) {
    if (t.kind == TokenizerKind::BYTE)
        return std::string(1, char(token));
    return token >= 0 && size_t(token) < t.pieces.size() ? t.pieces[token] : "";
}

// The text of all tokens, without the space that encode() put in front.
inline std::string decode(const Tokenizer& t, const std::vector<int>& tokens) {
    std::string text;
    for (int token : tokens)
        text += decode(t, token);
    return t.prefix == Prefix::SPACE && text.starts_with(' ') ? text.substr(1) : text;
}

} // namespace llmc
