// logger.h - the step line on the terminal and log.jsonl beside the checkpoints
//   step 10/99 | loss 3.2104 | norm 0.91 | lr 3.0e-04 | 12.3 ms | 83.2k tok/s | mfu 41.0% | eta 2s
//   log.jsonl has an object a line:
//     first         {config, flops_per_token}
//     a step        {step, loss, grad_norm, lr, tokens, ms, tokens_per_second, mfu}; in fp16 also
//                   loss_scale, that of the next step; with --cp also cp_imbalance; with experts
//                   max_vio and least_load (load.h), with a capacity also dropped_share;
//                   with pairs margin and accuracy, with KTO's also kl, the reference point;
//                   with sampled answers reward, length, cut, equal_groups, entropy
//     a validation  {step, val_loss, val_tokens, bits_per_byte}
//     --eval        {step, hellaswag, hellaswag_norm, ...}
//     the end       {step, wall, seconds {start, load, steps, ...}, repeated_steps}
//   On a terminal the step line changes in place; a pipe or a file gets about every tenth line.
//   A resumed run drops the lines of steps that it repeats. dev/plot.py draws the file.
#pragma once
#include <sys/ioctl.h>
#include <unistd.h>
#include <cstdio>
#include <fstream>
#include <string>
#include <utility>
#include <vector>
#include "../comm/text.h"
#include "files.h"

namespace llmc {

// The destination of the log, and the state of the display. The ETA starts again on resume,
// because the machine may be another one.
struct Logger {
    std::string path;          // empty: no file
    std::string first;         // its first line
    std::string pending;       // lines that a full disk has not taken yet
    int64_t repeated = 0;      // steps that an earlier run logged, and this run repeats
    double seconds_a_step = 0; // smoothed, for the ETA; 0: no step yet
    std::vector<double> times; // seconds of the first thousand steps, but the very first

    // The display; see open_display().
    int64_t every = 0;
    int columns = 0;        // of the terminal; 0: standard output is no terminal
    bool open_line = false; // the cursor stands after a step line
    bool unread = false;    // standard output cannot be written any more
};

// A named number for the log, and how the step's line shows it after the loss; "": it does not.
struct NamedNumber {
    const char* name;
    double value;
    const char* format = "";
};

// The numbers of one step.
struct StepReport {
    int64_t step = 0, steps = 0; // steps done, steps in all
    double loss = 0, norm = 0, lr = 0, seconds = 0;
    int64_t step_tokens = 0, tokens = 0; // of this step, of the run so far
    double mfu = 0;                      // 0 to 1
    std::vector<NamedNumber> more = {};  // those of the techniques that the run uses

    // One of these; 0 if the run has none of the name.
    double number(const std::string& name) const {
        for (const NamedNumber& n : more)
            if (name == n.name) return n.value;
        return 0;
    }
};

// Format a step line. A rate above the peak means that the peak was measured while the machine was
// busy: then the line says only that about all of it is used.
inline std::string step_text(const StepReport& r, double seconds_left) {
    int width = int(std::to_string(r.steps).size()) + 1;
    std::string mfu = r.mfu > 1 ? "~100%" : formatted("%.1f%%", r.mfu * 100);
    std::string line = formatted(
        "step %*lld/%lld | loss %.4f | norm %.2f | lr %.1e | %.1f ms | %s tok/s | mfu %s | eta %s",
        width, (long long)r.step, (long long)r.steps, r.loss, r.norm, r.lr, r.seconds * 1e3,
        rate_text(double(r.step_tokens) / r.seconds).c_str(), mfu.c_str(),
        duration_text(seconds_left).c_str());

    // Insert numbers after the loss.
    std::string numbers;
    for (const NamedNumber& n : r.more)
        if (*n.format) numbers += concat(" | ", n.name, " ", formatted(n.format, n.value));
    return line.insert(line.find(" | norm"), numbers);
}

// ----------------------------------------------------------------------------
// the terminal

// Decide where step lines go. every: the value of --log-every, 0 for the program's choice. A
// process of an MPI job may have a terminal of mpirun's, which nobody sees: its lines end in a
// file or a pipe.
inline void open_display(Logger& log, int64_t every, bool of_job) {
    log.every = every;
    struct winsize size = {};
    bool sized = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    bool terminal = isatty(STDOUT_FILENO) && !of_job;
    log.columns = !terminal ? 0 : sized ? size.ws_col : 80;
}

// Whether a step's line is printed to a pipe or a file. The first and the last step's always are;
// between them every step's of a short run, else every tenth.
inline bool is_shown(int64_t every, bool first, int64_t step, int64_t steps) {
    if (every == 0)
        every = steps <= 100 ? 1 : 10;
    return first || step == steps || step % every == 0;
}

// End the step line on a terminal before something else is printed. It was left open so that the
// next step's line could cover it.
inline void finish_line(Logger& log) {
    if (!log.open_line) return;
    printf("\n");
    fflush(stdout);
    log.open_line = false;
}

// Show a step. On a terminal one line changes in place; it stays at the last step, and every
// --log-every steps. The line is cut to the width, because a wrapped line could not be covered.
inline void show_step(Logger& log, const std::string& text, bool first, int64_t step,
                      int64_t steps) {
    if (log.columns) {
        printf("\r%s\x1b[K", text.substr(0, size_t(log.columns) - 1).c_str());
        log.open_line = true;
        if (step == steps || (log.every && step % log.every == 0)) finish_line(log);
    } else if (is_shown(log.every, first, step, steps)) {
        printf("%s\n", text.c_str());
    }
    fflush(stdout);
}

// ----------------------------------------------------------------------------
// log.jsonl

// Append text to a file, all of it or nothing.
inline bool append_whole(const std::string& path, const std::string& text) {
    // Open the file again each time: it may be moved or truncated during the run.
    int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (fd < 0) return false;
    off_t end = lseek(fd, 0, SEEK_END);
    ssize_t written = write(fd, text.data(), text.size());

    // Remove a part that was written: half a line is no JSON, and all of it is written again later.
    bool whole = written == ssize_t(text.size());
    bool cut = whole || ftruncate(fd, end) == 0;
    close(fd);
    return whole && cut;
}

// Append a line at once, so that the log of a killed run is complete. Lines for which the
// disk has no room wait for the next call: a log never ends a run. Returns a note, once, when
// lines begin to wait.
inline std::string log_append(Logger& log, const Json& j) {
    if (log.path.empty()) return "";
    bool waited = !log.pending.empty();
    log.pending += json_text(j);
    if (append_whole(log.path, log.pending))
        log.pending.clear();
    if (waited || log.pending.empty()) return "";
    return log.path + ": cannot be written (is the disk full?): its lines wait in memory";
}

// Write the waiting lines at the end of a run. Returns "" or what is lost.
inline std::string log_close(Logger& log) {
    if (log.pending.empty() || append_whole(log.path, log.pending))
        return "";
    return log.path + ": cannot be written: its last lines are lost";
}

// Start the file. A resumed run keeps the lines up to the step from which it continues.
inline std::string log_open(Logger& log, const std::string& path, int64_t resumed_step,
                            const Json& first) {
    // Read the lines to keep. A line that a crash cut in half is no JSON, and is dropped.
    log.path = path;
    log.first = json_text(first);
    std::string kept, line;
    std::ifstream in(path);
    while (resumed_step > 0 && std::getline(in, line)) {
        Json j = Json::parse(line, nullptr, false);
        Json step;
        if (j.is_object()) step = j.value("step", Json(0));
        if (step.is_number() && step <= resumed_step)
            kept += line + "\n";
        else if (step.is_number() && j.contains("lr"))
            log.repeated++;
    }

    // Rewrite the file; it begins with `first` if nothing is kept.
    if (kept.empty()) kept = log.first;
    std::string wrong = write_text_file(path, kept);
    return wrong.empty() ? "" : wrong + ": choose another --out";
}

// Show a step, and append it to the log.
inline std::string log_step(Logger& log, const StepReport& r) {
    // Smooth over about ten steps, so that the ETA does not jump with each slow step.
    bool first = log.seconds_a_step == 0;
    double& smooth = log.seconds_a_step;
    smooth = first ? r.seconds : 0.9 * smooth + 0.1 * r.seconds;
    double left = smooth * double(r.steps - r.step); // seconds
    if (!first && log.times.size() < 1000)
        log.times.push_back(r.seconds);

    // Print for people; the log gets every step's numbers unrounded.
    show_step(log, step_text(r, left), first, r.step, r.steps);
    Json j = {{"step", r.step},
              {"loss", r.loss},
              {"grad_norm", r.norm},
              {"lr", r.lr},
              {"tokens", r.tokens},
              {"ms", r.seconds * 1e3},
              {"tokens_per_second", double(r.step_tokens) / r.seconds},
              {"mfu", r.mfu}};

    // Leave out what is not finite, since JSON has no infinity: a step that fp16 skips has no norm,
    // and perhaps no loss.
    if (!std::isfinite(r.loss)) j.erase("loss");
    if (!std::isfinite(r.norm)) j.erase("grad_norm");
    for (const NamedNumber& n : r.more)
        j[n.name] = n.value;
    std::string said = log_append(log, j);
    if (!ferror(stdout) || std::exchange(log.unread, true))
        return said;
    return "standard output cannot be written: the run goes on without it";
}

} // namespace llmc
