// text.h - one text from several parts, and texts of files as messages show them
//   concat("rank ", 3, " of ", name) is "rank 3 of ...". A part is anything that a stream prints:
//   text, characters, whole numbers, and fractions with six digits.
//   printable() and in_quotes() show what a file holds. A terminal obeys escape sequences, so no
//   control character reaches it: it is shown as \x1b is here.
//   To copy: this file.
#pragma once
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace llmc {

// Made for messages and names: a stream for each call is too slow for inner loops.
template <typename... Parts>
std::string concat(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    return text.str();
}

// Return what a call says is wrong; go on if it returns "".
#define LLMC_TRY(...) \
    if (std::string llmc_said = (__VA_ARGS__); !llmc_said.empty()) return llmc_said

// A text by printf's format, of any length: for columns and rounded numbers.
__attribute__((format(printf, 1, 2))) inline std::string formatted(const char* format, ...) {
    va_list values, again;
    va_start(values, format);
    va_copy(again, values);
    std::string text(size_t(vsnprintf(nullptr, 0, format, values)), ' ');
    vsnprintf(text.data(), text.size() + 1, format, again);
    va_end(again);
    va_end(values);
    return text;
}

// The length of the UTF-8 character that a text (not empty) begins with; 0: it begins with none.
// There are no overlong forms, no surrogates, nothing above U+10FFFF (RFC 3629).
inline size_t utf8_length(std::string_view text) {
    unsigned char c = (unsigned char)text[0];
    if (c < 0x80) return 1;
    size_t n = c < 0xc2 ? 0 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : c < 0xf5 ? 4 : 0;
    if (n > text.size()) return 0;

    // The second byte's range depends on the first; the others go from 0x80 to 0xbf.
    unsigned char low = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80;
    unsigned char high = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;
    for (size_t i = 1; i < n; i++) {
        if ((unsigned char)text[i] < low || (unsigned char)text[i] > high)
            return 0;
        low = 0x80;
        high = 0xbf;
    }
    return n;
}

// A text as a message shows it, on one line: control characters and bytes that are no UTF-8 become
// \n, \t or \x1b.
inline std::string printable(std::string_view text) {
    std::string shown;
    for (size_t at = 0, n; at < text.size(); at += n) {
        // U+0080 to U+009F are control characters too: "\xc2\x9b" begins a sequence as ESC [ does.
        unsigned char c = (unsigned char)text[at];
        n = utf8_length(text.substr(at));
        bool control = c < 0x20 || c == 0x7f || n == 0 ||
                       (c == 0xc2 && (unsigned char)text[at + 1] < 0xa0);
        if (!control) {
            shown += text.substr(at, n);
            continue;
        }

        // Show it byte by byte; the second byte of such a character comes next, and is none itself.
        shown += c == '\n' ? "\\n" : c == '\t' ? "\\t" : formatted("\\x%02x", c);
        n = 1;
    }
    return shown;
}

// The beginning of a text in quotes.
inline std::string in_quotes(std::string_view text) {
    // A reader shall recognise it, not read it whole.
    const size_t most = 80;
    std::string quoted = "\"";
    for (char c : text.substr(0, most))
        quoted += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    return printable(quoted) + "\"" + (text.size() > most ? "..." : "");
}

// Words in a sentence: "a, b and c".
inline std::string words_with_and(const std::vector<std::string>& words) {
    std::string list;
    for (size_t i = 0; i < words.size(); i++)
        list += (i == 0 ? "" : i + 1 < words.size() ? ", " : " and ") + words[i];
    return list;
}

// ----------------------------------------------------------------------------
// counts, bytes and times as people read them

// Write a number in the largest unit in which it is at least 1, with `digits` digits after the
// point. The first unit has none.
inline std::string in_units(double x, double step, const char* const* units, int count,
                            int digits) {
    int unit = 0;
    for (; unit + 1 < count && x >= step; unit++)
        x /= step;
    return formatted("%.*f%s", unit ? digits : 0, x, units[unit]);
}

// Split a list at its commas.
inline std::vector<std::string> texts_between_commas(const std::string& list) {
    std::vector<std::string> texts;
    for (size_t at = 0, end; at <= list.size(); at = end + 1) {
        end = std::min(list.find(',', at), list.size());
        texts.push_back(list.substr(at, end - at));
    }
    return texts;
}

// A count: 405.9B, 124.4M, 83.2k, 512
inline std::string count_text(double n) {
    static const char* const units[] = {"", "k", "M", "B", "T"};
    return in_units(n, 1000, units, 5, 1);
}

// A size: 6.7 TiB, 20.3 GiB, 512 bytes
inline std::string bytes_text(double bytes) {
    static const char* const units[] = {" bytes", " KiB", " MiB", " GiB", " TiB", " PiB"};
    return in_units(bytes, 1024, units, 6, 1);
}

// A number beyond all units: 7.945e18
inline std::string power_text(double x) {
    std::string text = formatted("%.3e", x);
    size_t plus = text.find("e+");
    return plus == std::string::npos ? text : text.erase(plus + 1, 1);
}

// A time: 2h03m, 1m20s, 7s
inline std::string duration_text(double seconds) {
    // Two units are enough: an estimate is no more precise.
    long s = long(seconds + 0.5);
    if (s >= 3600) return formatted("%ldh%02ldm", s / 3600, s / 60 % 60);
    return s >= 60 ? formatted("%ldm%02lds", s / 60, s % 60) : formatted("%lds", s);
}

// A rate: 1.20M, 83.2k, 512
inline std::string rate_text(double per_second) {
    if (per_second >= 1e6) return formatted("%.2fM", per_second / 1e6);
    return per_second >= 1e3 ? formatted("%.1fk", per_second / 1e3)
                             : formatted("%.0f", per_second);
}

} // namespace llmc
