// spikes.h - losses and norms far above their recent mean are noted; a run that has blown up
//   z = (x - mean) / standard deviation, over the last 100 steps; a spike is z > 6.
//   Spikes are common and often heal by themselves, so the run prints a note and goes on. PaLM
//   (arXiv:2204.02311, 5.1) skipped the spikes that did not heal, by going back a hundred steps.
#pragma once
#include <algorithm>
#include <cmath>
#include <deque>
#include <string>

namespace llmc {

// The recent values of a number that each step adds one value to.
struct Recent {
    static constexpr size_t WINDOW = 100, LEAST = 20; // steps
    static constexpr double MAX_Z = 6;                // standard deviations
    std::deque<double> values = {};
    bool on = false; // the last value was part of a spike, which has been noted

    // Add a value. If a spike begins with it, return how many standard deviations it lies above the
    // mean; else 0.
    double add(double x) {
        double mean = 0, square = 0;
        for (double v : values)
            mean += v / double(values.size());
        for (double v : values)
            square += (v - mean) * (v - mean) / double(values.size());

        // Compare with a deviation of at least a hundredth of the mean: on a curve that is almost
        // flat, small moves are no spikes.
        double deviation = std::max({std::sqrt(square), 0.01 * std::fabs(mean), 1e-12});
        bool enough = values.size() >= LEAST;
        bool spike = enough && x > mean + MAX_Z * deviation;
        bool begins = spike && !on;
        on = spike;

        // Record a spike as the largest value that is no spike. So a spike hardly widens the range
        // of normal values, but a new level that stays becomes normal in time.
        values.push_back(spike ? mean + MAX_Z * deviation : x);
        if (values.size() > WINDOW) values.pop_front();
        return begins ? (x - mean) / deviation : 0;
    }
};

// The recent losses and gradient norms of a run.
struct Spikes {
    Recent loss = {}, norm = {};

    // Add a step's loss and norm. Returns the note that a spike begins, or "".
    std::string look(int64_t step, double new_loss, double new_norm) {
        double z_loss = loss.add(new_loss);
        double z_norm = norm.add(new_norm);
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

// Whether a loss shows that the weights are ruined: it is above twice the loss of guessing, ln V,
// and also above twice the run's first loss, which may be larger. True for NaN.
inline bool blown_up(double loss, size_t V, double first_loss) {
    return !(loss <= 2 * std::max(std::log(double(V)), first_loss));
}

} // namespace llmc
