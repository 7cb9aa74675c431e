// reward_command.h - rewards by the user's program, which reads answers and prints numbers
//   --reward command:PROGRAM starts PROGRAM once for all answers of a rollout:
//   in    for each answer a JSON object in a line: the line of --data as it stands, and
//         "completion", the text that the model wrote
//   out   for each answer, in the same order, a line: a number, or an object with a number "reward"
//   PROGRAM is words with spaces between: the first is looked up in PATH, the others are its
//   arguments. No shell reads them, so quotes and pipes mean nothing: put those in a script.
//   What the model wrote goes to standard input alone, and is never a part of a command.
//   LLMC_REWARD in its environment is a number of its own, which all that it starts inherits. When
//   it ends, takes longer than --reward-seconds or prints more than it should, a guard kills what
//   is left: its process group, and all processes with that number, whatever their session. The
//   guard is a shell that waits for the end of a pipe of the run's, so it also does this when the
//   run is gone, even by SIGKILL. Only a process that has cleared its environment escapes.
//   Every function that returns a text returns "" or what is wrong.
//   Cost: some short processes a rollout, and the answers once more in memory.
#pragma once
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmath>
#include <cstring>
#include <sstream>
#include "../comm/rank_status.h"
#include "../io/files.h"
#include "../io/json.h"
#include "../comm/text.h"

namespace llmc {

// ----------------------------------------------------------------------------
// the process

// A program that runs, the pipe that it prints to, and the guard that ends it with this run.
struct RewardProcess {
    pid_t pid = -1;
    pid_t guard = -1; // leads the process group of both
    std::string mark; // LLMC_REWARD=N: in the environment of the program and of all that it starts
    int out = -1;
    int alive = -1; // the end of the guard's pipe that this run alone has open
};

// A file in memory that holds a text, read from its start; -1: there is no room for it. A file,
// unlike a pipe, waits for nobody: a program may print before it has read all.
inline int memory_file(const std::string& text) {
    int file = memfd_create("answers", MFD_CLOEXEC);
    size_t done = 0;
    while (file >= 0 && done < text.size()) {
        ssize_t n = write(file, text.data() + done, text.size() - done);
        if (n < 0) break;
        done += size_t(n);
    }

    // Rewind: the program shares this place in the file.
    bool whole = done == text.size() && lseek(file, 0, SEEK_SET) == 0;
    if (whole || file < 0) return file;
    close(file);
    return -1;
}

// Let programs that have ended leave a status, where this run's parent had it ignore SIGCHLD: the
// system would drop the status at once.
inline void keep_statuses() {
    struct sigaction now = {};
    sigaction(SIGCHLD, nullptr, &now);
    if (now.sa_handler == SIG_IGN) signal(SIGCHLD, SIG_DFL);
}

// Start a program in a process group, 0 for a new one, with two files as its input and output, and
// a word more in its environment. It gets standard error too, and no other file of this run.
// Returns 0 or the system's error.
inline int spawn(std::vector<std::string> words, std::string mark, int in, int out, pid_t group,
                 pid_t* pid) {
    std::vector<char*> arguments, environment = {mark.data()};
    for (std::string& word : words)
        arguments.push_back(word.data());
    arguments.push_back(nullptr);
    for (char** word = environ; *word; word++)
        environment.push_back(*word);
    environment.push_back(nullptr);

    // Name the files.
    posix_spawn_file_actions_t files;
    posix_spawnattr_t how;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, in, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&files, out, STDOUT_FILENO);
#if __GLIBC_PREREQ(2, 34) // before that, files without O_CLOEXEC reach it
    posix_spawn_file_actions_addclosefrom_np(&files, STDERR_FILENO + 1);
#endif

    // Spawn it, rather than fork: other threads of this run may hold locks. Signals that this run
    // ignores end it, as they end other programs.
    sigset_t ignored;
    sigemptyset(&ignored);
    sigaddset(&ignored, SIGPIPE);
    sigaddset(&ignored, SIGXFSZ);
    posix_spawnattr_init(&how);
    posix_spawnattr_setflags(&how, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setsigdefault(&how, &ignored);
    posix_spawnattr_setpgroup(&how, group);
    int error = posix_spawnp(pid, arguments[0], &files, &how, arguments.data(), environment.data());
    posix_spawnattr_destroy(&how);
    posix_spawn_file_actions_destroy(&files);
    return error;
}

// Start the guard, which leads the group that the program will join. It reads from a pipe that
// nobody writes to: the pipe ends when this run closes it, or when the system closes the files of a
// run that is gone. Then the guard kills all that has the program's mark, again while it finds any,
// since a process may start another meanwhile; at last its group, and so itself. Unlike a signal at
// the parent's death, this does not depend on the thread that started the program.
inline std::string start_guard(RewardProcess* process) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0)
        return std::string("finds no pipe: ") + strerror(errno);
    process->alive = ends[1];
    process->mark = concat("LLMC_REWARD=", getpid(), ".", int64_t(clock_seconds() * 1e9));
    const char* kills = "read line; for i in 1 2 3 4 5; do "
                        "l=$(grep -lzsxF \"$0\" /proc/[0-9]*/environ); [ \"$l\" ] || break; "
                        "for f in $l; do f=${f#/proc/}; kill -s KILL \"${f%/*}\"; done; "
                        "done 2>/dev/null; kill -s KILL 0";
    std::vector<std::string> words = {"/bin/sh", "-c", kills, process->mark};
    int error = spawn(words, "LLMC_GUARD=1", ends[0], STDERR_FILENO, 0, &process->guard);
    close(ends[0]);
    if (error == 0) return "";
    close(process->alive);
    return concat("finds no /bin/sh (", strerror(error), "), which ends it with the run");
}

// Let the guard kill what is left, and itself. The program may have killed the guard: then kill the
// group from here, before the system can give its number away.
inline void end_group(const RewardProcess& process) {
    close(process.alive);
    siginfo_t ended;
    waitid(P_PID, id_t(process.guard), &ended, WEXITED | WNOWAIT);
    kill(-process.guard, SIGKILL);
    waitpid(process.guard, nullptr, 0);
}

// Start a program by its words, with a text as standard input. Its errors go where this run's go.
inline std::string start_program(const std::string& command, const std::string& input,
                                 RewardProcess* process) {
    // Cut the words.
    std::vector<std::string> words;
    std::istringstream in(command);
    for (std::string word; in >> word;)
        words.push_back(word);

    // Open both ends.
    int file = memory_file(input);
    int ends[2];
    if (file < 0) return "finds no memory for the answers";
    if (pipe2(ends, O_CLOEXEC) != 0) {
        close(file);
        return std::string("finds no pipe: ") + strerror(errno);
    }

    // Leave it the only writer, so that the pipe ends when it does.
    int error = spawn(words, process->mark, file, ends[1], process->guard, &process->pid);
    close(file);
    close(ends[1]);
    process->out = ends[0];
    if (error == 0) return "";
    close(ends[0]);
    return concat("cannot be started (", strerror(error), "): give a program's path, or a name "
                  "that is in PATH");
}

// Read all that a program prints until it closes its output: up to `most` bytes, and up to a moment
// on this run's clock.
inline std::string read_output(int out, double until, size_t most, std::string* text) {
    char block[65536];
    while (text->size() <= most) {
        double left = until - clock_seconds();
        if (left <= 0) return "late";
        pollfd wait = {out, POLLIN, 0};
        // A signal to this run ends the wait early: look at the clock again.
        int milliseconds = int(std::min(left, 1000.0) * 1000) + 1;
        if (poll(&wait, 1, milliseconds) <= 0)
            continue;
        ssize_t n = read(out, block, sizeof(block));
        if (n == 0) return "";
        if (n > 0)
            text->append(block, size_t(n));
    }
    return "prints more than a number for each answer: print those alone";
}

// Wait for a program's end up to a moment. Returns "late", or how it ended if not well.
inline std::string end_of_program(pid_t pid, double until) {
    int status = 0;
    pid_t ended;
    while ((ended = waitpid(pid, &status, WNOHANG)) == 0) {
        if (clock_seconds() > until) return "late";
        usleep(1000);
    }

    // A library of this process may have taken the status.
    if (ended < 0)
        return concat("ended, and nobody knows how (", strerror(errno), "): start it again");
    if (WIFSIGNALED(status))
        return concat("was ended by signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)),
                      "): what it said is above");
    int code = WEXITSTATUS(status);
    return code == 0 ? "" : concat("ended with status ", code, ": what it said is above");
}

// Run a program within a time, and take what it printed. However it or this run ends, nothing of
// its process group stays behind.
inline std::string run_program(const std::string& command, const std::string& input,
                               double seconds, size_t most, std::string* output) {
    // Start the guard and the program.
    keep_statuses();
    RewardProcess process;
    LLMC_TRY(start_guard(&process));
    std::string wrong = start_program(command, input, &process);
    if (!wrong.empty()) {
        end_group(process);
        return wrong;
    }

    // Wait for its output, then for its end.
    double until = clock_seconds() + seconds;
    wrong = read_output(process.out, until, most, output);
    bool reaped = wrong.empty();
    if (wrong.empty())
        wrong = end_of_program(process.pid, until);

    // End the group. A program that was not reaped yet is reaped now.
    end_group(process);
    close(process.out);
    if (!reaped || wrong == "late")
        waitpid(process.pid, nullptr, 0);
    if (wrong != "late") return wrong;
    return concat("took longer than ", seconds, " seconds and was killed: make it faster, or give "
                  "a larger --reward-seconds");
}

// ----------------------------------------------------------------------------
// its answers

// The largest reward: sums of squares of a group's rewards stay finite in float.
constexpr double MOST_REWARD = 1e15;

// The number of a line that a program printed, or NaN.
inline double reward_of_line(const std::string& line) {
    if (line.size() > 100000 || json_depth(line) > 10)
        return NAN;
    Json j = Json::parse(line, nullptr, false);
    if (j.is_object()) j = j.value("reward", Json());
    if (!j.is_number()) return NAN;
    double reward = j.get<double>();
    return std::fabs(reward) <= MOST_REWARD ? reward : NAN;
}

// The rewards that a program printed, as many as there are answers.
inline std::string read_rewards(const std::string& output, size_t answers,
                                std::vector<double>* rewards) {
    std::istringstream lines(output);
    for (std::string line; std::getline(lines, line);) {
        double reward = reward_of_line(line);
        if (std::isnan(reward))
            return concat("printed ", in_quotes(line.substr(0, 60)), " in line ",
                          rewards->size() + 1, ": print a number of at most 1e15, or "
                          "{\"reward\": number}");
        rewards->push_back(reward);
    }
    if (rewards->size() == answers) return "";
    return concat("printed ", rewards->size(), " lines for ", answers,
                  " answers: print a number for each, in their order");
}

// The rewards of answers, each given as the JSON object that the program reads.
inline std::string command_rewards(const std::string& command, double seconds,
                                   const std::vector<Json>& answers, std::vector<double>* rewards) {
    // Tokens may break characters apart: bytes that are no UTF-8 become U+FFFD.
    std::string input, output;
    for (const Json& answer : answers)
        input += json_text(answer);
    size_t most = (size_t(1) << 20) + 4096 * answers.size();
    std::string wrong = run_program(command, input, seconds, most, &output);
    if (wrong.empty())
        wrong = read_rewards(output, answers.size(), rewards);
    return wrong.empty() ? "" : "--reward command:" + command + ": it " + wrong;
}

} // namespace llmc
