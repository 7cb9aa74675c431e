// lr_schedule.h - the learning rate of a step
//   warm-up:  lr (step + 1) / warmup                                    for step < warmup
//   then, with t = (step - warmup) / (total - warmup) running from 0 to 1:
//   cosine    min_lr + (lr - min_lr) (1 + cos(pi t)) / 2                - arXiv:1608.03983
//   linear    lr + (min_lr - lr) t
//   wsd       lr until the last fifth of the run, then linear to min_lr - arXiv:2404.06395
//   constant  lr
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

inline double lr_at(int64_t step, int64_t total, int64_t warmup, double lr, double min_lr,
                    const std::string& schedule) {
    if (step < warmup) return lr * double(step + 1) / double(warmup);
    double t =
        total > warmup ? std::clamp(double(step - warmup) / double(total - warmup), 0.0, 1.0) : 0;
    if (schedule == "cosine") return min_lr + (lr - min_lr) * 0.5 * (1 + std::cos(M_PI * t));
    if (schedule == "linear") return lr + (min_lr - lr) * t;
    if (schedule == "wsd") {
        double decay_from = 0.8 * double(total), left = double(step) - decay_from;
        return left <= 0 ? lr
                         : lr + (min_lr - lr) * std::min(1.0, left / (double(total) - decay_from));
    }
    return lr;
}
