// spikes.h - losses and norms far above their recent mean are noted; a run that has blown up
//   z = (x - mean) / standard deviation, over the last 100 steps; a spike is z > 6.
//   Spikes are common and often heal by themselves (PaLM, arXiv:2204.02311, 5.1; spikes that do
//   not heal were skipped there by going back a hundred steps): the run says so and goes on.
#pragma once
#include <algorithm>
#include <cmath>
#include <deque>
#include <string>

namespace llmc {

// The last values of a number that is looked at once a step.
struct Recent {
    static constexpr size_t WINDOW = 100, LEAST = 20; // steps
    static constexpr double MAX_Z = 6;                // standard deviations
    std::deque<double> values = {};
    bool on = false; // the last value was a spike: it has been said

    // Add a value. Returns how many standard deviations it lies above the mean where a spike begins
    // with it, else 0.
    double add(double x) {
        double mean = 0, square = 0;
        for (double v : values)
            mean += v / double(values.size());
        for (double v : values)
            square += (v - mean) * (v - mean) / double(values.size());

        // Take a hundredth of the mean at least: a curve that hardly moves has no spikes.
        double deviation = std::max({std::sqrt(square), 0.01 * std::fabs(mean), 1e-12});
        bool enough = values.size() >= LEAST;
        bool spike = enough && x > mean + MAX_Z * deviation;
        bool begins = spike && !on;
        on = spike;

        // A spike counts as the largest normal value: it hardly widens what is normal, and a level
        // that stays becomes normal in time.
        values.push_back(spike ? mean + MAX_Z * deviation : x);
        if (values.size() > WINDOW) values.pop_front();
        return begins ? (x - mean) / deviation : 0;
    }
};

// The memory of a run.
struct Spikes {
    Recent loss = {}, norm = {};

    // Look at a step: "" or the note that a spike begins.
    std::string look(int64_t step, double new_loss, double new_norm) {
        double z_loss = loss.add(new_loss), z_norm = norm.add(new_norm);
        if (z_loss == 0 && z_norm == 0) return "";
        bool of_loss = z_loss > 0;
        char text[160];
        snprintf(text, sizeof(text),
                 "step %lld: the %s of %.4g is %.0f standard deviations above the last %zu steps: "
                 "a spike",
                 (long long)step, of_loss ? "loss" : "gradient norm", of_loss ? new_loss : new_norm,
                 of_loss ? z_loss : z_norm, loss.values.size());
        return text;
    }
};

// Whether a loss says that weights are ruined: twice what guessing costs, ln V, and twice what the
// run began with, which may be more.
inline bool blown_up(double loss, size_t V, double first_loss) {
    return !(loss <= 2 * std::max(std::log(double(V)), first_loss));
}

} // namespace llmc
