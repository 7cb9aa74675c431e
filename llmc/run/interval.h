// interval.h - how often a run that may fail saves: --save-minutes auto - Young 1974
//   A save costs C seconds of steps, and the job fails once in M seconds on average. With a save
//   every t seconds, each interval loses C to its save, and each failure loses half an interval of
//   work: the lost share is C/t + t/(2M), and t = sqrt(2 M C) makes it least.
//   M = hours between two failures of a rank x 3600 / ranks. Llama 3's 16,384 GPUs had 419 failures
//   in 54 days, one in 50,700 hours of a GPU (arXiv:2407.21783): the default of --failure-hours.
//   C is measured: the time that saves have taken from the run, divided by their number. The first
//   save comes right after the first step, so that C is known from then on.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>
#include "../io/numbers.h"
#include "../text.h"

namespace llmc {

// The mean time from one failure of the job to the next, in seconds: any rank's failure ends it.
inline double job_failure_seconds(double hours_of_a_rank, int ranks) {
    return hours_of_a_rank * 3600 / ranks;
}

// The seconds from save to save that lose least time. The formula holds only while saves are short
// against M; where C > 2M it would give less than a save takes, so half of the time goes to steps.
inline double young_interval(double failure_seconds, double save_seconds) {
    return std::max(std::sqrt(2 * failure_seconds * save_seconds), save_seconds);
}

// The share of time that saves and lost work cost at an interval. Restarting is not included.
inline double lost_share(double interval, double failure_seconds, double save_seconds) {
    return save_seconds / interval + interval / (2 * failure_seconds);
}

// The note for the user: "a checkpoint every 5m34s: ..."
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
