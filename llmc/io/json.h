// json.h - JSON files that may hold anything: an object comes back, or a line says what is wrong
//   The library throws if a type is not the expected one, and it recurses as deep as brackets nest
//   when it prints. So this file refuses a text that is no object, or that is nested too deep.
//   json_word() shows a part of one in a message.
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include <string>
#include <nlohmann/json.hpp>
#include "../text.h"
#include "files.h"

namespace llmc {

// The deepest nesting that is read. Configurations, manifests and tokenizers have fewer than 10.
constexpr size_t MOST_JSON_DEPTH = 100;

// How deep the brackets of a JSON text are nested. Brackets in strings do not count.
inline size_t json_depth(std::string_view text) {
    size_t depth = 0, deepest = 0;
    bool in_string = false;
    for (size_t at = 0; at < text.size(); at++) {
        char c = text[at];
        if (in_string && c == '\\')
            at++; // the character behind it ends no string
        else if (c == '"')
            in_string = !in_string;
        else if (!in_string && (c == '{' || c == '['))
            deepest = std::max(deepest, ++depth);
        else if (!in_string && (c == '}' || c == ']') && depth > 0)
            depth--;
    }
    return deepest;
}

// A JSON value for a message: a word, a number or a short text; for a list only its type.
inline std::string json_word(const nlohmann::json& j) {
    if (j.is_string())
        return in_quotes(j.get_ref<const std::string&>());
    return j.is_structured() ? j.type_name() : j.dump();
}

// Parse the text of a file that holds a JSON object.
inline std::string parse_json(const std::string& text, const std::string& path,
                              nlohmann::json* j) {
    *j = nullptr;
    if (json_depth(text) > MOST_JSON_DEPTH)
        return concat(path, ": is nested more than ", MOST_JSON_DEPTH,
                      " brackets deep, as no such file is: get it again");
    *j = nlohmann::json::parse(text, nullptr, false);
    return j->is_object() ? "" : path + ": is no JSON object, or cut short: get it again";
}

// Read a file that holds a JSON object.
inline std::string read_json(const std::string& path, nlohmann::json* j) {
    std::string text;
    std::string wrong = read_whole_file(path, &text);
    return wrong.empty() ? parse_json(text, path, j) : wrong;
}

// Check a whole number and its range. JSON's numbers have no width: 2^32 would become 0 in an int.
inline std::string check_integer(const nlohmann::json& m, const char* key, uint64_t low,
                                 uint64_t high) {
    if (!m.contains(key))
        return concat(key, " is missing");
    const nlohmann::json& value = m[key];
    bool good = value.is_number_unsigned() && value.get<uint64_t>() >= low &&
                value.get<uint64_t>() <= high;
    return good ? ""
                : concat(key, " is ", json_word(value), ", not a whole number from ", low, " to ",
                         high);
}

// Check that a field exists and has the type.
inline std::string check_type(const nlohmann::json& m, const char* key,
                              nlohmann::json::value_t type) {
    bool good = m.contains(key) && m[key].type() == type;
    return good ? "" : concat(key, " is missing, or no ", nlohmann::json(type).type_name());
}

} // namespace llmc
