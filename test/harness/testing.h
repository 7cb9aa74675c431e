// testing.h - what the tests share: files of their own, the program, the fixtures, EXPECT_HAS
//   scratch(name)   a path in this process's own folder, which is removed when the tests are over
//   Scratch         a test with a folder of its own: dir, path(name), put(name, bytes)
//   program()       train_gpt: $TRAIN_GPT, or build/train_gpt; shell() runs it, or the program that
//                   takes the flags of the command
//   FIXTURES        reference files of other projects: texts, tokenizers, trained models, and what
//                   those projects' programs made of them. $FIXTURES names their folder. Without it
//                   the folder is fixtures/ in this repository or, if there is none,
//                   shared/fixtures beside the repository. Tests that need missing files say so
//                   and are skipped.
#pragma once
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>

namespace fs = std::filesystem;

// ----------------------------------------------------------------------------
// texts

inline bool has(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

// The check behind EXPECT_HAS: a failure prints both texts.
inline testing::AssertionResult holds(const char*, const char*, const std::string& text,
                                      const std::string& part) {
    if (has(text, part)) return testing::AssertionSuccess();
    return testing::AssertionFailure() << "'" << part << "' is not in '" << text << "'";
}

#define EXPECT_HAS(text, part) EXPECT_PRED_FORMAT2(holds, text, part)

// ----------------------------------------------------------------------------
// files

inline std::string read_file(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

// Write a file, and the folders above it. Returns its path.
inline std::string put_file(const std::string& path, const std::string& bytes) {
    fs::create_directories(fs::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
}

// The bytes of each file in a folder, by the file's name.
inline std::map<std::string, std::string> folder_bytes(const std::string& folder) {
    std::map<std::string, std::string> files;
    for (const fs::directory_entry& e : fs::directory_iterator(folder))
        files[e.path().filename().string()] = read_file(e.path().string());
    return files;
}

// The same of a checkpoint, but its manifest, which names this machine.
inline std::map<std::string, std::string> state_in(const std::string& folder) {
    auto files = folder_bytes(folder);
    files.erase("manifest.json");
    return files;
}

// Bytes in base64, as tokenizers' files have them.
inline std::string base64(const std::string& bytes) {
    const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string out;
    for (size_t i = 0; i < bytes.size(); i += 3) {
        uint32_t bits = 0;
        for (size_t k = 0; k < 3; k++)
            bits = bits << 8 | (i + k < bytes.size() ? (unsigned char)bytes[i + k] : 0);
        for (size_t k = 0; k < 4; k++)
            out += i + k > bytes.size() ? '=' : digits[bits >> (18 - 6 * k) & 63];
    }
    return out;
}

// A path in the folder of this process. The folder exists from the first call on.
inline std::string scratch(const std::string& name) {
    static const std::string folder =
        testing::TempDir() + "train_gpt_test_" + std::to_string(getpid());
    fs::create_directories(folder);
    return folder + "/" + name;
}

struct RemoveScratch : testing::Environment {
    void TearDown() override { fs::remove_all(fs::path(scratch("x")).parent_path()); }
};
inline testing::Environment* const remove_scratch =
    testing::AddGlobalTestEnvironment(new RemoveScratch);

// A test with an empty folder of its own, which is removed after the test.
struct Scratch : testing::Test {
    std::string dir;
    void SetUp() override {
        dir = scratch(testing::UnitTest::GetInstance()->current_test_info()->name());
        fs::remove_all(dir);
        fs::create_directories(dir);
    }
    void TearDown() override { fs::remove_all(dir); }

    std::string path(const std::string& name) const { return dir + "/" + name; }
    std::string put(const std::string& name, const std::string& bytes) const {
        return put_file(path(name), bytes);
    }
};

// ----------------------------------------------------------------------------
// fixtures and golden files

inline const std::string ROOT = REPO_ROOT;

inline const std::string FIXTURES = [] {
    if (const char* given = getenv("FIXTURES")) return std::string(given);
    return fs::exists(ROOT + "/fixtures") ? ROOT + "/fixtures" : ROOT + "/../shared/fixtures";
}();

#define NEEDS_FIXTURES()                      \
    if (!fs::exists(FIXTURES + "/README.md")) \
    GTEST_SKIP() << "skipped: no fixtures; FIXTURES=FOLDER says where they are"

// ----------------------------------------------------------------------------
// the program

// The path of a program: beside $TRAIN_GPT, or in build/.
inline std::string program(const std::string& name = "train_gpt") {
    const char* given = getenv("TRAIN_GPT");
    fs::path trainer = fs::absolute(given ? given : ROOT + "/build/train_gpt");
    return (trainer.parent_path() / name).string();
}

// The flags that a program's --help lists as its own.
inline const std::set<std::string>& flags_of(const std::string& name) {
    static std::map<std::string, std::set<std::string>> known;
    if (known.count(name)) return known[name];
    std::set<std::string>& flags = known[name];
    flags = {"--config", "--help"};
    FILE* pipe = popen((program(name) + " --help").c_str(), "r");
    for (char line[1024], flag[64]; pipe && fgets(line, sizeof(line), pipe);)
        if (sscanf(line, "  %63[a-z0-9-]", flag) == 1) flags.insert(flag);
    if (pipe) pclose(pipe);
    return flags;
}

// The program that takes all flags of a command. Commands of tests name train_gpt, which most are
// for; those with flags of another program run that one. "train_gpt": no program takes them all.
inline std::string program_taking(const std::string& command) {
    std::set<std::string> given;
    for (size_t at = 0; (at = command.find(" --", at)) != std::string::npos;) {
        size_t end = command.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-", ++at);
        given.insert(command.substr(at, end - at));
    }
    auto takes = [&](std::initializer_list<const char*> parts) {
        return std::ranges::all_of(given, [&](const std::string& flag) {
            return std::ranges::any_of(parts, [&](const char* part) {
                return flags_of(part).count(flag) > 0;
            });
        });
    };
    if (takes({"train_gpt"})) return "train_gpt";
    if (takes({"tune_gpt", "train_gpt"})) return "tune_gpt";
    if (takes({"sample_gpt"})) return "sample_gpt";
    if (takes({"plan_gpt", "tune_gpt", "train_gpt"})) return "plan_gpt";
    return takes({"convert_gpt"}) ? "convert_gpt" : "train_gpt";
}

// A command with the program that takes its flags in train_gpt's place.
inline std::string with_its_program(std::string command) {
    std::string trainer = program() + " ";
    size_t at = command.find(trainer);
    if (at == std::string::npos) return command;
    std::string flags = command.substr(at + trainer.size() - 1), name = program_taking(flags);

    // Programs that write or convert never train, and have no flag to say so.
    const std::string none = " --steps 0";
    std::string rest = flags;
    if (size_t steps = rest.find(none); name == "train_gpt" && steps != std::string::npos)
        name = program_taking(rest.erase(steps, none.size()));
    else
        rest = flags;
    if (name == "train_gpt") rest = flags;

    // A run goes on with the program that made its folder.
    static std::map<std::string, std::string> made; // by folder
    std::string folder, word;
    std::istringstream words(flags);
    while (words >> word && word != "--out") {}
    if (word == "--out") words >> folder;
    bool goes_on = has(flags, " --resume") && made.count(folder);
    if (goes_on && name == "train_gpt") name = made[folder];
    if (!folder.empty() && !goes_on) made[folder] = name;
    return command.substr(0, at) + program(name) + rest;
}

// A command's result: its exit status, and its stdout and stderr together.
struct Ran {
    int status;
    std::string text;
};

// Run a command in a shell, with no input.
inline Ran shell(const std::string& command) {
    FILE* pipe = popen(("(" + with_its_program(command) + ") 2>&1 </dev/null").c_str(), "r");
    Ran r = {-1, ""};
    char buffer[4096];
    for (size_t n; (n = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) r.text.append(buffer, n);
    r.status = WEXITSTATUS(pclose(pipe));
    return r;
}

// Runs what follows as so many processes.
inline std::string mpirun(int ranks) {
    return "timeout 120 mpirun --allow-run-as-root --oversubscribe -np " + std::to_string(ranks) +
           " ";
}

// Why there are no ranks as processes here; "": there are.
inline const std::string& no_processes() {
    static const std::string why = [] {
        if (shell("command -v mpirun").status != 0) return "no mpirun";
        bool without = has(shell(mpirun(2) + program() + " --dp 9").text, "built without MPI");
        return without ? "built without MPI" : "";
    }();
    return why;
}
#define NEEDS_PROCESSES() \
    if (!no_processes().empty()) GTEST_SKIP() << "skipped: " << no_processes()
