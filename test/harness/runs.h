// runs.h - what tests of the program share: a run, a text to learn, and what a run says
#pragma once
#include <cmath>
#include <nlohmann/json.hpp>
#include "testing.h"

// Run the program with these flags. before: words in front of it, such as an environment.
inline Ran start(const std::string& flags, const std::string& before = "") {
    return shell(before + " " + program() + " " + flags);
}

// A text of so many lines that a small model learns.
inline std::string numbered_lines(int count,
                                  const std::string& end = " of a text that repeats itself") {
    std::string text;
    for (int i = 0; i < count; i++)
        text += "line " + std::to_string(i * 7919 % 1000) + end + "\n";
    return text;
}

// The number behind some words; NaN if they are not there.
inline double number_behind(const std::string& text, const std::string& words) {
    size_t at = text.find(words);
    EXPECT_NE(at, std::string::npos) << "no '" << words << "' in " << text;
    return at == std::string::npos ? NAN : atof(text.c_str() + at + words.size());
}

// The lines of a run's log that have a key; steps have "lr".
inline std::vector<nlohmann::json> logged(const std::string& out, const char* key = "lr") {
    std::vector<nlohmann::json> found;
    std::istringstream lines(read_file(out + "/log.jsonl"));
    for (std::string line; std::getline(lines, line);) {
        nlohmann::json j = nlohmann::json::parse(line);
        if (j.contains(key)) found.push_back(j);
    }
    return found;
}
