// interval.h - how often a run that may fail saves: --save-minutes auto - Young 1974
//   A save costs C seconds of steps, and the job fails every M seconds: each interval t loses C of
//   itself, and a failure half of one. The least is lost at t = sqrt(2 M C).
//   M = hours between two failures of a rank x 3600 / ranks. Llama 3's 16,384 GPUs had 419 failures
//   in 54 days, one in 50,700 hours of a GPU (arXiv:2407.21783): the default of --failure-hours.
//   C is measured: what saves have taken from the run, over their number. The first one comes
//   behind the first step, so that it is known.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include "../io/numbers.h"
#include "../text.h"

namespace llmc {

// Seconds from a failure of the job to the next.
inline double job_failure_seconds(double hours_of_a_rank, int ranks) {
    return hours_of_a_rank * 3600 / ranks;
}

// Seconds from save to save. Where saves take longer than a job lives the formula has left its
// ground: a run then steps as long as it saves.
inline double young_interval(double failure_seconds, double save_seconds) {
    return std::max(std::sqrt(2 * failure_seconds * save_seconds), save_seconds);
}

// The share of time that saves and failures cost at an interval, without the time to start again.
inline double lost_share(double interval, double failure_seconds, double save_seconds) {
    return save_seconds / interval + interval / (2 * failure_seconds);
}

// "a checkpoint every 5m34s: ..."
inline std::string interval_text(double hours_of_a_rank, int ranks, double save_seconds) {
    double failure = job_failure_seconds(hours_of_a_rank, ranks);
    double interval = young_interval(failure, save_seconds);
    char percent[16];
    snprintf(percent, sizeof(percent), "%.2g%%", 100 * lost_share(interval, failure, save_seconds));
    return concat("a checkpoint every ", duration_text(interval), ": a save takes ", save_seconds,
                  " s, and ", ranks, ranks == 1 ? " rank fails" : " ranks fail", " every ",
                  duration_text(failure), "; both cost ", percent, " of the time");
}

} // namespace llmc
