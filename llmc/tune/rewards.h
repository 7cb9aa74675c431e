// rewards.h - what a sampled answer is worth, and by how much it beats its group - arXiv:2402.03300
//   exact     1 if the answer equals the line's, apart from white space around both; else 0
//   number    1 if the last numbers of both are equal: "so 1,234." and "#### 1234"
//   regex     1 if the line's answer, a pattern of PCRE2, is found in the answer
//   advantage of answer i in a group with rewards r:
//     mean    r[i] - mean(r)                                (2503.20783)
//     std     (r[i] - mean(r)) / (deviation(r) + 1e-4)      over n - 1, as in TRL
//   A group of equal rewards teaches nothing: its advantages are 0.
//   Rewards by a program of the user's: reward_command.h.
//   To copy: this file and PCRE2.
#pragma once
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace llmc {

// ----------------------------------------------------------------------------
// one answer

// A text without the white space around it.
inline std::string_view stripped(std::string_view text) {
    const char* white = " \t\r\n\v\f";
    size_t begin = text.find_first_not_of(white);
    if (begin == text.npos) return "";
    return text.substr(begin, text.find_last_not_of(white) + 1 - begin);
}

// The last number of a text, or NaN if it has none. Thousands may be separated by commas.
inline double last_number(std::string_view text) {
    auto digit = [](char c) {
        return c >= '0' && c <= '9';
    };
    auto inside = [&](char c) {
        return digit(c) || c == ',' || c == '.';
    };

    // Walk back from the end: to the last digit, then over the number that it ends.
    size_t end = text.size();
    while (end > 0 && !digit(text[end - 1]))
        end--;
    size_t begin = end;
    while (begin > 0 && inside(text[begin - 1]))
        begin--;

    // Dots and commas in front belong to the sentence, but one dot begins a fraction: .5
    size_t first = begin;
    while (first < end && !digit(text[first]))
        first++;
    bool fraction = first == begin + 1 && text[begin] == '.';
    if (!fraction) begin = first;

    // Read a minus as a sign, unless it stands after a digit and subtracts.
    bool minus = begin > 0 && begin < end && text[begin - 1] == '-' &&
                 (begin < 2 || !digit(text[begin - 2]));
    // Drop the commas, and parse all of the rest or nothing.
    std::string number;
    for (char c : text.substr(begin, end - begin))
        if (c != ',') number += c;
    char* rest = nullptr;
    double value = strtod(number.c_str(), &rest);
    bool whole = !number.empty() && *rest == 0;
    if (!whole) return NAN;
    return minus ? -value : value;
}

// A compiled pattern; null: it is none, and *wrong says why.
inline std::shared_ptr<pcre2_code> compile_pattern(const std::string& text, std::string* wrong) {
    // A sampled answer may be any bytes, and a newline at its end is a part of it.
    uint32_t options = PCRE2_UTF | PCRE2_MATCH_INVALID_UTF | PCRE2_DOLLAR_ENDONLY;
    int error = 0;
    size_t at = 0;
    std::shared_ptr<pcre2_code> code(
        pcre2_compile(PCRE2_SPTR(text.data()), text.size(), options, &error, &at, nullptr),
        pcre2_code_free);
    if (code) return code;
    char message[256];
    pcre2_get_error_message(error, (PCRE2_UCHAR*)message, sizeof(message));
    *wrong = message;
    return nullptr;
}

// Whether a text has the pattern. One that takes a million steps back to find out has not.
inline bool has_pattern(const std::string& text, const std::string& pattern) {
    std::string wrong;
    std::shared_ptr<pcre2_code> code = compile_pattern(pattern, &wrong);
    std::shared_ptr<pcre2_match_data> match(
        pcre2_match_data_create_from_pattern(code.get(), nullptr), pcre2_match_data_free);
    std::shared_ptr<pcre2_match_context> limits(pcre2_match_context_create(nullptr),
                                                pcre2_match_context_free);
    pcre2_set_match_limit(limits.get(), 1000000);
    return pcre2_match(code.get(), PCRE2_SPTR(text.data()), text.size(), 0, 0, match.get(),
                       limits.get()) >= 0;
}

// The reward of an answer by the verifier's name.
inline double reward_of(const std::string& verifier, const std::string& answer,
                        const std::string& wanted) {
    // NaN equals no number: an answer without a number is wrong.
    if (verifier == "number")
        return last_number(answer) == last_number(wanted);
    if (verifier == "regex")
        return has_pattern(answer, wanted);
    return stripped(answer) == stripped(wanted);
}

// Check that a verifier can use a line's answer. Returns "" or what is wrong with it.
inline std::string check_wanted(const std::string& verifier, const std::string& wanted) {
    if (verifier == "number" && std::isnan(last_number(wanted)))
        return "has an \"answer\" without a number";
    std::string wrong;
    bool good = verifier != "regex" || compile_pattern(wanted, &wrong);
    return good ? "" : "has an \"answer\" that is no pattern: " + wrong;
}

// ----------------------------------------------------------------------------
// one group

// Count the groups in which all rewards are equal.
inline size_t equal_groups(const std::vector<double>& rewards, size_t group) {
    size_t equal = 0;
    for (size_t first = 0; first < rewards.size(); first += group) {
        const double* r = rewards.data() + first;
        equal += size_t(std::count(r, r + group, *r)) == group;
    }
    return equal;
}

// The advantages of all groups, one group after the other.
inline std::vector<float> group_advantages(const std::vector<double>& rewards, size_t group,
                                     bool over_deviation) {
    std::vector<float> out;
    for (size_t first = 0; first < rewards.size(); first += group) {
        const double* r = rewards.data() + first;
        double sum = 0;
        double squares = 0;
        // Sum in the order of the samples, which no layout changes.
        for (size_t i = 0; i < group; i++)
            sum += r[i];
        double mean = sum / double(group);
        for (size_t i = 0; i < group; i++)
            squares += (r[i] - mean) * (r[i] - mean);

        // Equal rewards get 0 exactly: their mean may be rounded, and none is
        // better than the others.
        double scale = over_deviation ? std::sqrt(squares / double(group - 1)) + 1e-4 : 1;
        bool equal = std::all_of(r, r + group, [&](double x) { return x == r[0]; });
        for (size_t i = 0; i < group; i++)
            out.push_back(equal ? 0 : float((r[i] - mean) / scale));
    }
    return out;
}

} // namespace llmc
