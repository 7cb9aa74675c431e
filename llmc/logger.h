// logger.h - the step line on the terminal and log.jsonl beside the checkpoints
//   step   10/200 | loss 3.2104 | norm 0.91 | lr 3.0e-04 | 12.3 ms | 83.2k tok/s | mfu 41.0% | eta
//   1m20s
//   log.jsonl: first {config, flops_per_token}, then an object a step {step, loss, grad_norm, lr,
//   tokens, ms, tokens_per_second, mfu} and an object a validation {step, val_loss, bits_per_byte},
//   and one of --evaluate's scores {step, hellaswag, hellaswag_norm, ...}. A resumed run drops the
//   lines of steps it will do again. dev/plot.py draws it.
#pragma once
#include <cstdio>
#include <fstream>
#include <string>
#include <nlohmann/json.hpp>

struct Logger {
    std::string path;          // empty: no file
    double seconds_a_step = 0; // smoothed, for the ETA
};

struct StepReport {
    int64_t step, steps; // steps done, of how many
    double loss, norm, lr, seconds;
    int64_t step_tokens, tokens; // of this step, of the run so far
    double mfu;
};

inline std::string duration_text(double seconds) {
    char text[32];
    long s = long(seconds + 0.5);
    if (s >= 3600)
        snprintf(text, sizeof(text), "%ldh%02ldm", s / 3600, s / 60 % 60);
    else if (s >= 60)
        snprintf(text, sizeof(text), "%ldm%02lds", s / 60, s % 60);
    else
        snprintf(text, sizeof(text), "%lds", s);
    return text;
}

inline std::string rate_text(double per_second) {
    char text[32];
    if (per_second >= 1e6)
        snprintf(text, sizeof(text), "%.2fM", per_second / 1e6);
    else if (per_second >= 1e3)
        snprintf(text, sizeof(text), "%.1fk", per_second / 1e3);
    else
        snprintf(text, sizeof(text), "%.0f", per_second);
    return text;
}

inline std::string log_append(const Logger& log, const nlohmann::json& j) {
    if (log.path.empty()) return "";
    std::ofstream out(log.path, std::ios::app);
    out << j.dump() << "\n";
    out.flush();
    return out ? "" : log.path + ": cannot be written (is the disk full?)";
}

// Start the file, or on resume keep the lines up to the step that the run goes on from.
inline std::string log_open(Logger& log, const std::string& path, int64_t resumed_step,
                            const nlohmann::json& first) {
    log.path = path;
    std::string kept, line;
    if (resumed_step > 0)
        for (std::ifstream in(path); std::getline(in, line);) {
            nlohmann::json j = nlohmann::json::parse(line, nullptr, false);
            if (j.is_object() && j.value("step", int64_t(0)) <= resumed_step) kept += line + "\n";
        }
    std::ofstream out(path, std::ios::trunc);
    out << kept;
    if (kept.empty()) out << first.dump() << "\n";
    out.flush();
    return out ? "" : path + ": cannot be written: choose another --out";
}

inline std::string log_step(Logger& log, const StepReport& r) {
    log.seconds_a_step =
        log.seconds_a_step ? 0.9 * log.seconds_a_step + 0.1 * r.seconds : r.seconds;
    double rate = double(r.step_tokens) / r.seconds;
    int width = int(std::to_string(r.steps).size());
    printf(
        "step %*lld/%lld | loss %.4f | norm %.2f | lr %.1e | %.1f ms | %s tok/s | mfu %.1f%% | eta "
        "%s\n",
        width + 1, (long long)r.step, (long long)r.steps, r.loss, r.norm, r.lr, r.seconds * 1e3,
        rate_text(rate).c_str(), r.mfu * 100,
        duration_text(log.seconds_a_step * double(r.steps - r.step)).c_str());
    fflush(stdout);
    return log_append(log, {{"step", r.step},
                            {"loss", r.loss},
                            {"grad_norm", r.norm},
                            {"lr", r.lr},
                            {"tokens", r.tokens},
                            {"ms", r.seconds * 1e3},
                            {"tokens_per_second", rate},
                            {"mfu", r.mfu}});
}
