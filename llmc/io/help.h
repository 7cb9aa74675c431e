// help.h - what --help and --version print: the table of flags, and how the program was built
#pragma once
#include <sys/ioctl.h>
#include <unistd.h>
#include "../family.h"
#include "../comm/text.h"
#include "config.h"

namespace llmc {

// The column where help texts begin; the most and the fewest columns of a page.
constexpr size_t HELP_COLUMN = 34, HELP_WIDTH = 100, HELP_NARROW = 60;

// The columns of this terminal, clamped to HELP_NARROW..HELP_WIDTH. A pipe gets the most.
inline size_t terminal_columns() {
    struct winsize size = {};
    bool sized = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return sized ? std::clamp(size_t(size.ws_col), HELP_NARROW, HELP_WIDTH) : HELP_WIDTH;
}

// Break a text at spaces so that lines end by `width`. All lines but the first begin at `from`.
inline std::string wrapped(const std::string& help, size_t from, size_t width) {
    std::string text, word;
    size_t column = from;
    for (std::istringstream words(help); words >> word;) {
        bool fits = column + 1 + word.size() <= width;
        if (column > from)
            text += fits ? " " : "\n" + std::string(from, ' ');
        column = (column > from && fits ? column + 1 : from) + word.size();
        text += word;
    }
    return text;
}

// A row of --help. A name that is too long for its column gets its own line.
inline std::string help_row(std::string left, const std::string& help, size_t width) {
    if (left.size() >= HELP_COLUMN)
        left += "\n" + std::string(HELP_COLUMN, ' ');
    else
        left.resize(HELP_COLUMN, ' ');
    return left + wrapped(help, HELP_COLUMN, width) + "\n";
}

// The text of a program's --help: examples, then one paragraph a group of its own flags, with
// defaults in parentheses.
inline std::string help_text(const Program& program, size_t width = HELP_WIDTH) {
    std::string text = concat(program.name, " [--flag value ...]", program.words, "     ",
                              program.purpose, "\n\n", program.examples, "\n");
    text += wrapped("--config FILE holds the same names as `name = value` lines; --flag=value is "
                    "--flag value.", 0, width) + "\n";
    for (size_t i = 1; i < program.takes.size(); i++)
        text += wrapped(concat("It takes the flags of ", program.takes[i], "_gpt too: ",
                               program.takes[i], "_gpt --help."), 0, width) + "\n";
    const Program own = {program.name, "", {program.takes[0]}, ""};
    bool shown = false; // whether the program has the current group
    Config defaults;
    for (const Flag& f : config_table()) {
        // Begin a group: its row has no name.
        if (!*f.name) {
            shown = takes_group(own, f.accepts);
            if (shown) text += "\n" + wrapped(f.help, 0, width) + "\n";
            continue;
        }
        if (!shown) continue;

        // Show the choices after the name and the default after the help; ranges are not shown.
        std::string accepts = f.accepts, help = f.help, value = field_text(defaults, f.field);
        bool choice = accepts.find('|') != std::string::npos;
        bool is_switch = std::holds_alternative<bool Config::*>(f.field);
        if (!value.empty() && !is_switch)
            help += " (" + value + ")";

        // If the choices do not fit on a line, put them among the words, which can be broken.
        std::string name = concat("  --", f.name), choices = choice ? " " + accepts : "";
        bool fits = name.size() + choices.size() <= HELP_WIDTH;
        for (size_t at = 0; !fits && (at = accepts.find('|')) != std::string::npos;)
            accepts.replace(at, 1, ", ");
        if (!fits) help = accepts + ": " + help;
        text += help_row(name + (fits ? choices : ""), help, width);
    }

    if (!takes_flag(&own, "scratch")) return text;
    text += "\nPresets\n";
    for (const Preset& p : model_presets())
        text += help_row(concat("  ", p.name), p.help, width);
    return text;
}

// ----------------------------------------------------------------------------
// version

constexpr const char* VERSION = "1.0";

// Whether a macro is defined: an undefined one expands to its own name.
#define LLMC_EXPANDED(...) #__VA_ARGS__
#define LLMC_DEFINED(name) (std::string(LLMC_EXPANDED(name)) != #name)

// One line with the version, the compiler, and the libraries of this build.
inline std::string version_text(const Program& program) {
    const std::pair<const char*, bool> parts[] = {
        {"OpenMP", LLMC_DEFINED(_OPENMP)},  {"oneDNN", LLMC_DEFINED(WITH_ONEDNN)},
        {"zstd", LLMC_DEFINED(WITH_ZSTD)},  {"MPI", LLMC_DEFINED(WITH_MPI)},
        {"NCCL", LLMC_DEFINED(WITH_NCCL)},  {"CUDA kernels", bool(LLMC_KERNELS)},
    };
    std::string text = concat(program.name, " ", VERSION, ", built by ",
                              LLMC_DEFINED(__clang__) ? "" : "g++ ", __VERSION__, ";");
    for (auto& [name, there] : parts)
        text += concat(there ? " " : " no ", name, ",");
    text.back() = '\n';
    return text;
}

// The page that --help or --version asks for; "": neither is given.
inline std::string page_asked(const Config& c) {
    if (c.help) return help_text(*c.program, terminal_columns());
    return c.version ? version_text(*c.program) : "";
}

} // namespace llmc
