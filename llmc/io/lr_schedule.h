// lr_schedule.h - the learning rate of a step
//   warm-up:  lr (step + 1) / warmup                                    for step < warmup
//   then, with t = (step - warmup) / (total - warmup) running from 0 to 1:
//   cosine    min_lr + (lr - min_lr) (1 + cos(pi t)) / 2                - arXiv:1608.03983
//   linear    lr + (min_lr - lr) t
//   wsd       lr until the last fifth of the run, then linear to min_lr - arXiv:2404.06395
//   constant  lr in every step after the warm-up
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

namespace llmc {

// The learning rate of step 0 .. total - 1. schedule: one of the names of --schedule.
inline double lr_at(int64_t step, int64_t total, int64_t warmup, double lr, double min_lr,
                    const std::string& schedule) {
    // Warm up. Step 0 already learns: it has lr / warmup, not 0.
    if (step < warmup)
        return lr * double(step + 1) / double(warmup);

    // Fall from here on. In a run that is all warm-up nothing follows, and t stays 0.
    double after = double(step - warmup), length = double(total - warmup);
    double t = total > warmup ? std::clamp(after / length, 0.0, 1.0) : 0;
    if (schedule == "cosine")
        return min_lr + (lr - min_lr) * 0.5 * (1 + std::cos(M_PI * t));
    if (schedule == "linear")
        return lr + (min_lr - lr) * t;

    // wsd falls after a fixed share of the whole run, warm-up included.
    if (schedule == "wsd") {
        double decay_from = 0.8 * double(total);
        double decayed = double(step) - decay_from;
        if (decayed <= 0) return lr;
        return lr + (min_lr - lr) * std::min(1.0, decayed / (double(total) - decay_from));
    }
    return lr; // constant
}

} // namespace llmc
