// file_kind.h - what a file is by its name and its first bytes; --data refuses what is no text
//   If it were trained on as text, a compressed file would be noise, and a JSON file mostly
//   brackets: the loss falls, and nobody sees why it stays high. So known endings and known first
//   bytes are refused, each with the command that makes token shards of the file, if there is one.
//   A JSON file without the ending counts as text: much other text begins with a bracket too.
#pragma once
#include <cstring>
#include <string>
#include <string_view>
#include "../comm/text.h"

namespace llmc {

// Quote a text, so that a shell reads it as one word.
inline std::string shell_quoted(const std::string& text) {
    // Inside single quotes, a shell interprets only the closing quote.
    std::string quoted = "'";
    for (char c : text)
        quoted += c == '\'' ? "'\\''" : std::string(1, c);
    return quoted + "'";
}

// A word of a command, quoted only if a shell would otherwise interpret it.
inline std::string shell_word(const std::string& text) {
    auto plain = [](char c) {
        return isalnum((unsigned char)c) || strchr("/._-+=:@%", c);
    };
    for (char c : text)
        if (!c || !plain(c))
            return shell_quoted(text);
    return text.empty() ? "''" : text;
}

// Refuse a file where JSON lines are read, with the command that makes some of it.
inline std::string no_json_lines(const std::string& path) {
    std::string wrong = path + ": records are JSON objects, one a line: give .jsonl";
    if (path.ends_with(".parquet"))
        return wrong + ": dev/data/parquet_text.py --rows --out LINES.jsonl " + shell_word(path);
    return path.ends_with(".json") ? wrong + ": jq -c '.[]' " + shell_word(path) +
                                         " > LINES.jsonl makes it of an array, '.data[]' of "
                                         "{\"data\": [...]}"
                                   : wrong;
}

// Whether prepare_gpt reads a file of this name.
inline bool prepare_reads(std::string name) {
    if (name.ends_with(".parquet")) return true;
    for (std::string packed : {".gz", ".zst"})
        if (name.ends_with(packed)) {
            name.resize(name.size() - packed.size());
            break;
        }
    return name.ends_with(".txt") || name.ends_with(".jsonl");
}

// The command that makes token shards of a file, beside the input.
inline std::string prepare_command(const std::string& path, const std::string& tokenizer) {
    std::string stem = path;
    for (const char* ending : {".parquet", ".gz", ".zst", ".jsonl", ".txt", ".bin"})
        if (stem.ends_with(ending))
            stem.resize(stem.size() - strlen(ending));
    // The byte tokenizer has no token that begins or ends a text: let newlines end documents.
    std::string with = tokenizer == "byte" ? "--document-end 10"
                                           : "--tokenizer " + shell_word(tokenizer);
    return "prepare_gpt " + shell_word(stem + ".shards.bin") + " --data " +
           shell_word(path) + " " + with;
}

// The kind of a file by its first bytes, in the words of a message, or "" if it is unknown.
inline std::string kind_by_bytes(std::string_view head) {
    using namespace std::string_view_literals;

    // UTF-32's mark begins with UTF-16's, so it comes first.
    static const std::pair<std::string_view, const char*> known[] = {
        {"\x1f\x8b"sv, "compressed (gzip)"},
        {"\x28\xb5\x2f\xfd"sv, "compressed (zstd)"},
        {"BZh"sv, "compressed (bzip2)"},
        {"\xfd"
         "7zXZ\0"sv,
         "compressed (xz)"},
        {"PK\3\4"sv, "a zip archive"},
        {"PAR1"sv, "a parquet file"},
        {"\x7f"
         "ELF"sv,
         "a program (ELF)"},
        {"\xff\xfe\0\0"sv, "text in UTF-32"},
        {"\0\0\xfe\xff"sv, "text in UTF-32"},
        {"\xff\xfe"sv, "text in UTF-16"},
        {"\xfe\xff"sv, "text in UTF-16"},
    };

    for (auto [bytes, kind] : known)
        if (head.starts_with(bytes)) return kind;
    return "";
}

// The kind of a file by its ending, or "" if the name may be a text's.
inline std::string kind_by_name(const std::string& path) {
    const std::pair<const char*, const char*> endings[] = {{".gz", "compressed (gzip)"},
                                                           {".zst", "compressed (zstd)"},
                                                           {".parquet", "a parquet file"},
                                                           {".jsonl", "JSON lines"},
                                                           {".json", "JSON"}};
    for (auto [ending, kind] : endings)
        if (path.ends_with(ending)) return kind;
    return "";
}

// Why a file is no text to train on, and what to do about it. Returns "" if it may be text.
inline std::string no_text(const std::string& path, std::string_view head,
                           const std::string& tokenizer) {
    // The first bytes are more reliable than the name.
    std::string kind = kind_by_bytes(head);
    if (kind.empty()) kind = kind_by_name(path);
    if (kind.empty()) return "";
    std::string wrong = path + ": is " + kind + ", and --data reads plain text and token shards: ";

    // Suggest what helps: convert other encodings, let prepare_gpt read, write JSON line by line.
    if (kind.starts_with("text in"))
        return wrong + "write it as UTF-8: iconv -f " + kind.substr(8) + " -t UTF-8 " +
               shell_word(path) + " > " + shell_word(path + ".utf8.txt");
    if (prepare_reads(path) && !kind_by_name(path).empty())
        return wrong + prepare_command(path, tokenizer) + " makes shards of it";
    if (kind == "JSON")
        return no_json_lines(path) + ", for prepare_gpt";
    if (kind.starts_with("compressed") || kind == "a parquet file")
        return wrong + "unpack it, or give it a name that ends in .txt.gz, .jsonl.gz, .txt.zst, "
                       ".jsonl.zst or .parquet, which prepare_gpt reads";
    return wrong + "give the text itself";
}

// Note a text that does not look like one: it has zeros, or more than a hundredth of its
// bytes are not UTF-8.
inline std::string binary_note(const std::string& path, std::string_view head) {
    size_t zeros = 0, foreign = 0;
    for (size_t at = 0, n; at < head.size(); at += n) {
        // Do not count a character that the end of `head` cuts in two.
        bool ascii = static_cast<unsigned char>(head[at]) < 0x80;
        n = ascii ? 1 : utf8_length(head.substr(at));
        bool cut = n == 0 && head.size() - at < 4;
        zeros += head[at] == 0;
        foreign += n == 0 && !cut;
        n = n ? n : 1;
    }
    if (zeros == 0 && foreign * 100 <= head.size())
        return "";
    return concat(path, ": ", zeros, " zero bytes and ", foreign,
                  " bytes that are not UTF-8 in the first ", head.size(), ": is it text?");
}

} // namespace llmc
