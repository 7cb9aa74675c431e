// json.h - JSON files that may hold anything: an object comes back, or a line says what is wrong
//   The library throws if a type is not the expected one, and it recurses as deep as brackets nest
//   when it prints. So this file refuses a text that is no object, or that is nested too deep.
//   json_word() shows a part of one in a message. JSON lines hold an object a line: what else they
//   hold is refused with the command that makes lines of it. read_records() is their one reader:
//   it counts bad lines, and names file and line of the first.
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include "../comm/text.h"
#include "files.h"
#include <string>

namespace llmc {

// The deepest nesting that is read. Configurations, manifests and tokenizers have fewer than 10.
constexpr size_t MOST_JSON_DEPTH = 100;

// Call f(character) for each character of a JSON text that is in no string.
template <typename F> void outside_strings(std::string_view text, F f) {
    bool in_string = false;
    for (size_t at = 0; at < text.size(); at++) {
        if (in_string && text[at] == '\\')
            at++; // the character behind it ends no string
        else if (text[at] == '"')
            in_string = !in_string;
        else if (!in_string)
            f(text[at]);
    }
}

// How deep the brackets of a JSON text are nested.
inline size_t json_depth(std::string_view text) {
    size_t depth = 0, deepest = 0;
    outside_strings(text, [&](char c) {
        if (c == '{' || c == '[')
            deepest = std::max(deepest, ++depth);
        else if ((c == '}' || c == ']') && depth > 0)
            depth--;
    });
    return deepest;
}

// A JSON value for a message: a word, a number, or the beginning of a text or a list.
inline std::string json_word(const Json& j) {
    if (j.is_string())
        return in_quotes(j.get_ref<const std::string&>());
    std::string text = json_text(j);
    text.pop_back(); // the newline
    return printable(text.substr(0, 80)) + (text.size() > 80 ? "..." : "");
}

// Whether an object has a key, and not null.
inline bool json_has(const Json& j, const char* key) {
    return j.contains(key) && !j[key].is_null();
}

// Parse the text of a file that holds a JSON object.
inline std::string parse_json(const std::string& text, const std::string& path, Json* j) {
    *j = nullptr;
    if (json_depth(text) > MOST_JSON_DEPTH)
        return concat(path, ": is nested more than ", MOST_JSON_DEPTH,
                      " brackets deep, as no such file is: get it again");
    *j = Json::parse(text, nullptr, false);
    return j->is_object() ? "" : path + ": is no JSON object, or cut short: get it again";
}

// Read a file that holds a JSON object.
inline std::string read_json(const std::string& path, Json* j) {
    std::string text;
    LLMC_TRY(read_whole_file(path, &text));
    return parse_json(text, path, j);
}

// Check a whole number and its range. JSON's numbers have no width: 2^32 would become 0 in an int.
inline std::string check_integer(const Json& m, const char* key, uint64_t low, uint64_t high) {
    if (!m.contains(key))
        return concat(key, " is missing");
    const Json& value = m[key];
    bool good = value.is_number_unsigned() && value.get<uint64_t>() >= low &&
                value.get<uint64_t>() <= high;
    return good ? ""
                : concat(key, " is ", json_word(value), ", not a whole number from ", low, " to ",
                         high);
}

// Whole numbers of an object, in the order in which they are checked.
struct IntegerRow {
    const char* key;
    uint64_t low = 0, high = UINT64_MAX;
    bool optional = false; // may be missing
};
inline std::string check_integers(const Json& m, const std::vector<IntegerRow>& rows) {
    for (const IntegerRow& row : rows) {
        bool absent = row.optional && !m.contains(row.key);
        LLMC_TRY(absent ? "" : check_integer(m, row.key, row.low, row.high));
    }
    return "";
}

// Check that a field exists and has the type.
inline std::string check_type(const Json& m, const char* key, Json::value_t type) {
    bool good = m.contains(key) && m[key].type() == type;
    return good ? "" : concat(key, " is missing, or no ", Json(type).type_name());
}

// ----------------------------------------------------------------------------
// JSON lines

// Say what a line is that is no JSON object, and what makes lines of it.
inline std::string no_record(std::string_view line) {
    // Find the first byte that is not UTF-8.
    size_t at = 0;
    while (at < line.size() && utf8_length(line.substr(at)) > 0)
        at += utf8_length(line.substr(at));
    if (at < line.size())
        return "is no JSON object in UTF-8: iconv -f LATIN1 -t UTF-8 converts what is mostly meant";

    // The first character tells what the text is that this line belongs to.
    at = std::min(line.find_first_not_of(" \t\r\xef\xbb\xbf"), line.size());
    char first = at < line.size() ? line[at] : ' ';
    if (first == '[')
        return "is no JSON object but begins an array: jq -c '.[]' writes its records a line each";
    return std::string("is no JSON object") +
           (first == '{' ? ", or cut short: jq -c . writes each on one line" : "");
}

// Parse a line that is to be a JSON object.
template <typename J>
std::string parse_record(std::string_view line, J* j) {
    // The library recurses as deep as brackets are nested, so limit the depth.
    bool deep = json_depth(line) > MOST_JSON_DEPTH;
    *j = deep ? J() : J::parse(line, nullptr, false);
    return j->is_object() ? "" : no_record(line);
}

// Add to an object's lack of a key that it holds records in an array. Messages are none.
template <typename J>
std::string with_records(const std::string& wrong, const J& j) {
    for (const auto& [key, value] : j.items())
        if (wrong.starts_with("has no") && value.is_array() && !value.empty() &&
            value[0].is_object() && !value[0].contains("role") && !value[0].contains("from"))
            return wrong + "; its " + in_quotes(key) +
                   " holds records: jq -c '.[]|arrays[]' writes them a line each";
    return wrong;
}

// Counts of the lines of a text, or of several. A bad line is left out.
struct LineCounts {
    size_t lines = 0;
    size_t malformed = 0;
    std::string first_malformed = ""; // with its file and line
    size_t cut = 0;                   // records that lost their end
    size_t dropped = 0;               // records of which nothing would have been left

    // Add the counts of the lines that follow.
    void add(const LineCounts& more) {
        if (first_malformed.empty())
            first_malformed = more.first_malformed;
        lines += more.lines;
        malformed += more.malformed;
        cut += more.cut;
        dropped += more.dropped;
    }
};

// Call read(line) for each line of a text; it returns "" or what is wrong with the line. Blank
// lines do not count. number: that of the first line.
template <typename F>
void each_line(std::string_view text, size_t number, const std::string& path, LineCounts* counts,
               F read) {
    for (size_t at = 0, end; at < text.size(); at = end + 1, number++) {
        end = std::min(text.find('\n', at), text.size());
        std::string_view line = text.substr(at, end - at);
        if (line.ends_with('\r'))
            line.remove_suffix(1);
        if (line.find_first_not_of(" \t\r") == std::string::npos)
            continue;

        // Count a bad line, and keep the message of the first one.
        counts->lines++;
        std::string wrong = read(line);
        if (wrong.empty()) continue;
        if (counts->malformed++ == 0)
            counts->first_malformed = concat(path, ":", number, ": ", wrong);
    }
}

// Call read(object) for each JSON object of a text that holds one a line.
template <typename J = Json, typename F>
void read_records(std::string_view text, size_t number, const std::string& path, LineCounts* counts,
                  F read) {
    each_line(text, number, path, counts, [&](std::string_view line) {
        J j;
        LLMC_TRY(parse_record(line, &j));
        return with_records(read(j), j);
    });
}

// Refuse a file of which more than a hundredth of the lines are bad. spare: so many more are
// tolerated, where lines are to follow.
inline std::string too_many_malformed(const LineCounts& counts, size_t spare = 0) {
    if (counts.malformed <= spare + counts.lines / 100)
        return "";
    return concat(counts.malformed, " of ", spare ? "the first " : "", counts.lines,
                  " lines are bad, and a hundredth of them may be: ", counts.first_malformed);
}

} // namespace llmc
