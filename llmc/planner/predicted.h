// predicted.h - a step's time by the simulator beside the time that the run's own steps took
//   With --machine the end of a run prints both and the error: a check of the machine's numbers,
//   and of the simulator. Measured is the median, so that a few slow steps do not count. The first
//   step is left out, because it does some work once for all; sampled
//   answers are the mean over all steps.
#pragma once
#include "../action.h"
#include "../io/config.h"
#include "../trainer.h"
#include "before_step.h"
#include "cost.h"
#include "layer_cost.h"
#include "../io/machine.h"
#include "machine_here.h"
#include "predict.h"
#include "simulator.h"

namespace llmc {

// The middle one of some numbers, of which there is at least one.
inline double median_of(std::vector<double> numbers) {
    auto middle = numbers.begin() + numbers.size() / 2;
    std::nth_element(numbers.begin(), middle, numbers.end());
    return *middle;
}

// "predicted on FILE: 79.0 ms a step | measured 81.2 ms, the median of 9 steps | error -2.7%".
inline std::string predicted_text(const std::string& machine, double seconds,
                                  const std::vector<double>& steps) {
    double measured = median_of(steps);
    double error = 100 * (seconds / measured - 1); // percent of the measured time
    const char* words = steps.size() > 1 ? "steps" : "step";

    char line[160];
    snprintf(line, sizeof(line),
             ": %.2f ms a step | measured %.2f ms, the median of %zu %s | error %+.1f%%\n",
             1e3 * seconds, 1e3 * measured, steps.size(), words, error);
    return "predicted on " + machine + line;
}

// The time before each step of a run, by parts, given the options of its training plan.
template <typename T>
Times times_before_step(const Run& run, const PlanOptions& train, const Machine& machine) {
    KnownSteps steps;
    auto all = before_steps(run.config, train, run.shape, run.teacher_shape);
    return before_times<T>(machine, before_runs(all, run.layout, steps));
}

// The line of a run; "" without --machine, without a second step, or where sampling has no bound.
template <typename T, typename S>
std::string compare_prediction(const Run& run, const Trainer<T, S>& t) {
    const Config& c = run.config;
    bool asked = !c.machine.empty() && !has_open_answers(c);
    if (!asked || run.log.times.empty())
        return "";

    // Simulate the plan that the steps ran.
    Machine machine = machine_asked(c, "--machine", t.ctx.where);
    CostModel cost = run_costs<T>(machine, t.model, t.ctx.where);
    cost.teacher_C = double(run.teacher_shape.C);
    const PlanOptions& options = t.plans[size_t(run.train_plan)];
    StepTime step = simulate_layout(run.layout, t.model, options, action_cost(cost, t.model));
    check_ends(step);
    add_before(step, times_before_step<T>(run, options, machine));

    // Each step has its share of the rollouts, which the log leaves out.
    double rollout = run.rollout_seconds / double(run.step - run.first_step);
    std::vector<double> times = run.log.times;
    for (double& seconds : times)
        seconds += rollout;
    return predicted_text(c.machine, step.seconds, times);
}

} // namespace llmc
