// tokenizer.h - text to tokens and back: bytes, BPE, unigram - arXiv:1508.07909, arXiv:1804.10959
//   encode: the texts of special tokens are cut out where asked for; what is left is normalised
//   (SentencePiece: a space in front), cut at added tokens and by the tokenizer's patterns; each
//   word that is left becomes tokens:
//     BPE      symbols are bytes, or characters; the neighbours whose merge has the lowest rank
//              merge, the leftmost first, until no two neighbours do
//     unigram  the pieces with the highest sum of scores (Viterbi)
//   Merges of all kinds of files are one table: (left, right) -> rank, token. Where a file has
//   pieces with scores or ranks and no merges, each way to cut a piece in two is a merge of its
//   rank.
//   Any bytes come back: decode(encode(text)) == text, invalid UTF-8 too, unless the tokenizer
//   itself normalises (NFC and its kin, remove_extra_whitespaces, U+2581 for a space) or has an
//   unknown token.
//   Not built: lstrip and rstrip of added tokens.
//   A Tokenizer is not written after it was opened: any number of threads may encode.
//   Cost: O(n log n) for the longest word, O(n) else; words that come again are copied.
//   Files: tokenizer_files.h
#pragma once
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <utf8proc.h>
#include <algorithm>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>
#include "common.h"

// looked up by string_view: no copy of the text
struct TextHash {
    using is_transparent = void;
    size_t operator()(std::string_view s) const { return std::hash<std::string_view>()(s); }
};
typedef std::unordered_map<std::string, int, TextHash, std::equal_to<>> TokenOf;

inline int find_token(const TokenOf& ids, std::string_view text) { // -1: none
    auto found = ids.find(text);
    return found == ids.end() ? -1 : found->second;
}

// texts that are one token wherever they stand, the longest first
struct Fixed {
    TokenOf ids = {};
    std::vector<size_t> lengths = {}; // that occur, descending
    bool first_byte[256] = {};
};

struct Merge {
    uint64_t pair; // left << 32 | right
    uint32_t rank, token;
};
constexpr uint32_t NO_RANK = ~0u;

enum class TokenizerKind { BYTE, BPE, UNIGRAM };
enum class Prefix { NONE, SPACE, SPACE_UNLESS_THERE };

struct Tokenizer {
    std::string name = "byte"; // what --tokenizer gave
    int vocab_size = 256;
    TokenizerKind kind = TokenizerKind::BYTE;
    int bos = -1, eot = -1, unknown = -1; // begin of sequence, end of text; -1: there is none
    std::vector<std::string> pieces = {}; // token -> bytes; none for control tokens
    TokenOf ids = {};                     // piece -> token, without control tokens
    Fixed special = {}, added = {};       // found where asked for, and always
    std::vector<std::shared_ptr<pcre2_code>> patterns = {}; // each cuts what the one before left
    std::vector<std::string> pattern_texts = {};            // as files have them
    int unicode_form = 0; // utf8proc's options for NFC, NFD, NFKC or NFKD; 0: as the text is
    Prefix prefix = Prefix::NONE; // of a text, and after special tokens
    bool prefix_once = false;     // only of a text
    bool extra_spaces = true;     // false: runs of spaces become one, and those at the ends go
    // words
    bool sentencepiece = false; // symbols are characters, U+2581 a space; else symbols are bytes
    bool whole_words = false;   // a word that is a piece is its token, whatever the merges
    std::vector<int> byte_token = std::vector<int>(256, -1);
    std::vector<Merge> merges = {}; // open addressing, a power of two, at most half full
    std::vector<float> scores = {}; // unigram
    size_t longest = 0;             // piece, in bytes
};

// ----------------------------------------------------------------------------
// building blocks

// Bytes of the UTF-8 character that text (not empty) begins with; 0: it begins with none. No
// overlong forms, no surrogates, nothing above U+10FFFF (RFC 3629).
inline size_t utf8_length(std::string_view text) {
    unsigned char c = (unsigned char)text[0];
    if (c < 0x80) return 1;
    size_t n = c < 0xc2 ? 0 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf5 ? 4 : 0;
    if (n > text.size()) return 0;
    unsigned char low = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80; // of the second byte
    unsigned char high = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
    for (size_t i = 1; i < n; i++, low = 0x80, high = 0xbf)
        if ((unsigned char)text[i] < low || (unsigned char)text[i] > high) return 0;
    return n;
}

inline void fixed_add(Fixed* f, const std::string& text, int token) {
    if (text.empty()) return;
    f->ids[text] = token;
    f->first_byte[(unsigned char)text[0]] = true;
    auto at = std::lower_bound(f->lengths.begin(), f->lengths.end(), text.size(), std::greater<>());
    if (at == f->lengths.end() || *at != text.size()) f->lengths.insert(at, text.size());
}

// plain(part) and token(id), in the text's order
template <typename Plain, typename Token>
void split_at_fixed(const Fixed& f, std::string_view text, Plain plain, Token token) {
    size_t from = 0;
    for (size_t at = 0; at < text.size(); at++) {
        if (!f.first_byte[(unsigned char)text[at]]) continue;
        for (size_t length : f.lengths) {
            int id = at + length > text.size() ? -1 : find_token(f.ids, text.substr(at, length));
            if (id < 0) continue;
            if (at > from) plain(text.substr(from, at - from));
            token(id);
            from = at + length, at = from - 1;
            break;
        }
    }
    if (from < text.size()) plain(text.substr(from));
}

inline size_t merge_slot(const std::vector<Merge>& table, uint64_t pair) {
    uint64_t mixed = pair * 0x9e3779b97f4a7c15u;
    size_t mask = table.size() - 1, i = size_t(mixed >> 32) & mask;
    while (table[i].rank != NO_RANK && table[i].pair != pair) i = (i + 1) & mask;
    return i;
}

inline Merge find_merge(const Tokenizer& t, int left, int right) {
    if (t.merges.empty() || left < 0 || right < 0) return {0, NO_RANK, 0};
    return t.merges[merge_slot(t.merges, uint64_t(left) << 32 | uint32_t(right))];
}

inline void set_merges(Tokenizer* t, const std::vector<Merge>& merges) {
    size_t slots = 2;
    while (slots < 2 * merges.size()) slots *= 2;
    t->merges.assign(slots, {0, NO_RANK, 0});
    for (const Merge& m : merges) t->merges[merge_slot(t->merges, m.pair)] = m;
}

// \s as Unicode has it: PCRE2's has U+180E too, which is no white space since Unicode 6.3.
inline std::string unicode_spaces(const std::string& pattern) {
    const std::string spaces = R"(\p{Z}\t-\r\x{85})";
    std::string out;
    bool in_class = false;
    for (size_t i = 0; i < pattern.size(); i++) {
        std::string item(1, pattern[i]);
        if (item == "\\" && i + 1 < pattern.size()) item += pattern[++i];
        if (item == "[" || item == "]") in_class = item == "[";
        if (item == "\\s") item = in_class ? spaces : "[" + spaces + "]";
        if (item == "\\S" && !in_class) item = "[^" + spaces + "]";
        out += item;
    }
    return out;
}

// "" or what is wrong. Words are the matches of the pattern and what lies between them.
inline std::string add_pattern(Tokenizer* t, const std::string& pattern, bool literal = false) {
    int error = 0;
    size_t at = 0;
    uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP);
    std::string text = literal ? pattern : unicode_spaces(pattern);
    pcre2_code* code =
        pcre2_compile(PCRE2_SPTR(text.data()), text.size(), options, &error, &at, nullptr);
    if (!code) {
        char message[256];
        pcre2_get_error_message(error, (PCRE2_UCHAR*)message, sizeof(message));
        return "pattern " + pattern + ": " + message;
    }
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE); // where there is no JIT it is interpreted
    t->patterns.emplace_back(code, pcre2_code_free);
    t->pattern_texts.push_back(pattern);
    return "";
}

// ----------------------------------------------------------------------------
// a word to tokens

// What texts are encoded with: the output, scratch, and where words stood that come again.
struct Encoding {
    const Tokenizer& t;
    std::vector<int> out = {};
    struct Word {
        const char* text;
        size_t length, from, count; // its tokens: out[from, from + count)
    };
    std::vector<Word> words = {}; // by hash, a power of two; the latest stays
    std::vector<std::shared_ptr<pcre2_match_data>> matches = {}; // one a pattern
    std::shared_ptr<pcre2_match_context> limits = nullptr;
    // of the symbols of a word: linked in order; rank of the merge with the next one
    struct Symbol {
        int token, previous, next;
        uint32_t rank;
        size_t at, length; // in the word, before merges
    };
    std::vector<Symbol> symbols = {};
    std::vector<uint64_t> heap = {};         // rank << 32 | symbol
    std::deque<std::string> normalised = {}; // words point into them, so they stay where they are
};

inline void push_unknown(Encoding& e, std::string_view text, size_t word_from) {
    if (e.t.byte_token[(unsigned char)text[0]] >= 0)
        for (char c : text) e.out.push_back(e.t.byte_token[(unsigned char)c]);
    else if (e.t.unknown >= 0 && (e.out.size() == word_from || e.out.back() != e.t.unknown))
        e.out.push_back(e.t.unknown); // neighbours share one
}

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

// Ask what symbol i and its next one merge to, and queue it.
inline void queue_merge(Encoding& e, int i) {
    Encoding::Symbol& s = e.symbols[size_t(i)];
    s.rank = s.next < 0 ? NO_RANK : find_merge(e.t, s.token, e.symbols[size_t(s.next)].token).rank;
    if (s.rank == NO_RANK) return;
    e.heap.push_back(uint64_t(s.rank) << 32 | uint32_t(i));
    std::push_heap(e.heap.begin(), e.heap.end(), std::greater<>());
}

inline void bpe_word(Encoding& e, std::string_view word) {
    split_symbols(e, word);
    e.heap.clear();
    for (size_t i = 0; i + 1 < e.symbols.size(); i++) queue_merge(e, int(i));
    while (!e.heap.empty()) {
        std::pop_heap(e.heap.begin(), e.heap.end(), std::greater<>());
        int i = int(uint32_t(e.heap.back()));
        uint32_t rank = uint32_t(e.heap.back() >> 32);
        e.heap.pop_back();
        Encoding::Symbol& left = e.symbols[size_t(i)];
        if (left.rank != rank) continue; // a neighbour has merged since
        Encoding::Symbol& right = e.symbols[size_t(left.next)];
        left.token = int(find_merge(e.t, left.token, right.token).token);
        left.next = right.next, right.rank = NO_RANK;
        if (left.next >= 0) e.symbols[size_t(left.next)].previous = i;
        queue_merge(e, i);
        if (left.previous >= 0) queue_merge(e, left.previous);
    }
    size_t from = e.out.size();
    for (int i = 0; i >= 0; i = e.symbols[size_t(i)].next) {
        const Encoding::Symbol& s = e.symbols[size_t(i)];
        if (s.token >= 0)
            e.out.push_back(s.token);
        else
            push_unknown(e, word.substr(s.at, s.length), from);
    }
}

// The best sum of scores up to each place of the word, and the last piece on the way there. A
// character that is no piece costs 10 more than the worst piece, as SentencePiece has it.
inline void unigram_word(Encoding& e, std::string_view word) {
    struct Place {
        float score = -INFINITY;
        int token = -1;
        size_t from = 0;
    };
    std::vector<Place> best(word.size() + 1);
    best[0].score = 0;
    float unknown = *std::min_element(e.t.scores.begin(), e.t.scores.end()) - 10;
    auto reach = [&](size_t from, size_t to, int token, float score) {
        if (best[from].score + score > best[to].score)
            best[to] = {best[from].score + score, token, from};
    };
    for (size_t at = 0, n; at < word.size(); at += n) {
        n = std::max<size_t>(utf8_length(word.substr(at)), 1);
        for (size_t length = 1; length <= std::min(e.t.longest, word.size() - at); length++) {
            int token = find_token(e.t.ids, word.substr(at, length));
            if (token >= 0) reach(at, at + length, token, e.t.scores[size_t(token)]);
        }
        reach(at, at + n, -1, unknown); // never better than a piece
    }
    std::vector<size_t> ends;
    for (size_t at = word.size(); at > 0; at = best[at].from) ends.push_back(at);
    size_t from = e.out.size();
    for (size_t i = ends.size(); i-- > 0;) {
        const Place& p = best[ends[i]];
        if (p.token >= 0)
            e.out.push_back(p.token);
        else
            push_unknown(e, word.substr(p.from, ends[i] - p.from), from);
    }
}

inline void encode_word(Encoding& e, std::string_view word) {
    Encoding::Word& known = e.words[TextHash()(word) & (e.words.size() - 1)];
    size_t from = e.out.size();
    if (std::string_view(known.text, known.length) == word) {
        e.out.resize(from + known.count);
        std::copy_n(e.out.begin() + long(known.from), known.count, e.out.begin() + long(from));
        return;
    }
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
// a text to words

// part is valid UTF-8: PCRE2 need not look again at each match
inline void split_by_patterns(Encoding& e, std::string_view part, size_t pattern) {
    if (part.empty()) return;
    if (pattern == e.t.patterns.size()) return encode_word(e, part);
    pcre2_match_data* match = e.matches[pattern].get();
    const size_t* place = pcre2_get_ovector_pointer(match);
    for (size_t at = 0; at < part.size(); at = place[1]) {
        int found = pcre2_match(e.t.patterns[pattern].get(), PCRE2_SPTR(part.data()), part.size(),
                                at, PCRE2_NO_UTF_CHECK | PCRE2_NOTEMPTY, match, e.limits.get());
        if (found == PCRE2_ERROR_NOMATCH) return split_by_patterns(e, part.substr(at), pattern + 1);
        CHECK(found >= 0,
              "--tokenizer %s: its pattern fails on this text (PCRE2 error %d at byte %zu)",
              e.t.name.c_str(), found, at);
        split_by_patterns(e, part.substr(at, place[0] - at), pattern + 1);
        split_by_patterns(e, part.substr(place[0], place[1] - place[0]), pattern + 1);
    }
}

// Invalid UTF-8 is words of its own: patterns speak of characters.
inline void encode_words(Encoding& e, std::string_view text) {
    for (size_t from = 0, to; from < text.size(); from = to) {
        size_t n = 0;
        bool valid = utf8_length(text.substr(from)) > 0;
        for (to = from; to < text.size(); to += valid ? n : 1)
            if (((n = utf8_length(text.substr(to))) > 0) != valid) break;
        valid ? split_by_patterns(e, text.substr(from, to - from), 0)
              : encode_word(e, text.substr(from, to - from));
    }
}

// The text in a Unicode normal form. ASCII has it already: only runs of other characters are looked
// at, each with the ASCII character before it, which an accent may join. Invalid UTF-8 stays.
inline std::string unicode_normalise(std::string_view text, int form) {
    std::string out;
    for (size_t from = 0, to; from < text.size(); from = to) {
        size_t run = from, n = 0;
        while (run < text.size() && (unsigned char)text[run] < 0x80) run++;
        for (to = run; to < text.size(); to += n)
            if ((n = utf8_length(text.substr(to))) < 2) break;
        if (to == run) { // the text's end, or a byte that begins no character
            to = std::min(run + 1, text.size());
            out += text.substr(from, to - from);
            continue;
        }
        if (run > from) run--;
        utf8proc_uint8_t* normal = nullptr;
        utf8proc_ssize_t length =
            utf8proc_map((const utf8proc_uint8_t*)text.data() + run, utf8proc_ssize_t(to - run),
                         &normal, utf8proc_option_t(form));
        CHECK(length >= 0, "%s", utf8proc_errmsg(length));
        out.append(text, from, run - from).append((const char*)normal, size_t(length));
        free(normal);
    }
    return out;
}

// SentencePiece's spaces
inline std::string normalise_spaces(const Tokenizer& t, std::string_view text, bool may_prefix,
                                    bool after_space) { // where another one goes, if extra ones do
    constexpr std::string_view META_SPACE = "\xe2\x96\x81";
    bool there = text[0] == ' ' || text.starts_with(META_SPACE);
    bool prefix = t.prefix == Prefix::SPACE || (t.prefix == Prefix::SPACE_UNLESS_THERE && !there);
    std::string out = prefix && may_prefix ? " " : "";
    for (size_t i = 0; i < text.size(); i++) {
        bool meta = text.compare(i, META_SPACE.size(), META_SPACE) == 0;
        if (meta || text[i] != ' ' || !after_space || t.extra_spaces) out += meta ? ' ' : text[i];
        after_space = text[i] == ' ';
        if (meta) i += META_SPACE.size() - 1;
    }
    while (!t.extra_spaces && out.ends_with(' ')) out.pop_back();
    return out;
}

// ----------------------------------------------------------------------------
// what others call

// For texts of so many bytes together. Their tokens are all in `out`; the texts stay where they
// are, for words that come again are found there.
inline Encoding encoding_open(const Tokenizer& t, size_t bytes) {
    Encoding e = {t};
    if (t.kind == TokenizerKind::BYTE) return e;
    size_t slots = 16;
    while (slots < bytes / 8 && slots < (1 << 16)) slots *= 2;
    e.words.resize(slots);
    e.limits = {pcre2_match_context_create(nullptr), pcre2_match_context_free};
    for (const auto& pattern : t.patterns)
        e.matches.emplace_back(pcre2_match_data_create_from_pattern(pattern.get(), nullptr),
                               pcre2_match_data_free);
    return e;
}

// special: the texts of special tokens, such as <|endoftext|>, are these tokens and not text;
// goes_on: no text begins here, there is one before: no space goes in front
inline void encode_more(Encoding& e, std::string_view text, bool special = false,
                        bool goes_on = false) {
    const Tokenizer& t = e.t;
    if (t.kind == TokenizerKind::BYTE) {
        for (unsigned char c : text) e.out.push_back(c);
        return;
    }
    if (text.empty()) return;
    // steps of one match: looking back over a run of spaces takes some for each of them
    size_t steps = 10'000'000 + 16 * text.size();
    pcre2_set_match_limit(e.limits.get(), uint32_t(std::min<size_t>(steps, ~0u)));
    auto token = [&](int id) { e.out.push_back(id); };
    auto plain = [&](std::string_view part) {
        bool first = part.data() == text.data(), inside = first && goes_on;
        if (t.unicode_form)
            part = e.normalised.emplace_back(unicode_normalise(part, t.unicode_form));
        if (t.sentencepiece)
            part = e.normalised.emplace_back(
                normalise_spaces(t, part, !inside && (first || !t.prefix_once), !inside));
        split_at_fixed(
            t.added, part, [&](std::string_view p) { encode_words(e, p); }, token);
    };
    special ? split_at_fixed(t.special, text, plain, token) : plain(text);
}

inline std::vector<int> encode(const Tokenizer& t, std::string_view text, bool special = false,
                               bool goes_on = false) {
    Encoding e = encoding_open(t, text.size());
    encode_more(e, text, special, goes_on);
    return std::move(e.out);
}

// A text from its start: behind the token that begins sequences, where there is one.
inline std::vector<int> encode_from_start(const Tokenizer& t, std::string_view text) {
    std::vector<int> tokens = encode(t, text, true);
    if (t.bos >= 0 && (tokens.empty() || tokens[0] != t.bos)) tokens.insert(tokens.begin(), t.bos);
    return tokens;
}

// A token's bytes; nothing for tokens that have none.
inline std::string decode(const Tokenizer& t, int token) {
    if (t.kind == TokenizerKind::BYTE) return std::string(1, char(token));
    return token >= 0 && size_t(token) < t.pieces.size() ? t.pieces[size_t(token)] : "";
}

// A whole text's tokens: without the space that encode put in front.
inline std::string decode(const Tokenizer& t, const std::vector<int>& tokens) {
    std::string text;
    for (int token : tokens) text += decode(t, token);
    return t.prefix == Prefix::SPACE && text.starts_with(' ') ? text.substr(1) : text;
}
