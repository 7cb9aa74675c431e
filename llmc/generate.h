// generate.h - text from the model: the generate plan, run on the prompt and then on one token at a time
//   The first run reads the whole prompt and fills the key/value cache; each later run reads the
//   token just picked.
//   Token i of a sample uses the uniform number i of the stream "sample.<step>", so a resumed run
//   samples the same.
#pragma once
#include "sampler.h"
#include "step.h"

struct Sampling {
    float temperature = 1, top_p = 1;
    int top_k = 0;
    uint64_t seed = 0;
    int64_t step = 0;
};

// Put tokens at positions [past, past + n) before the plan.
template <typename T, typename S>
void generate_batch(Trainer<T, S>& t, int plan, const int* tokens, size_t n, size_t past) {
    const Plan& p = t.plans[plan];
    t.plan = plan, t.at = 0;
    int* home = address<int>(t, {Kind::TOKENS, -1, 0});
    int* host = host_side(home, t.staging, t.ctx.where);
    for (size_t i = 0; i < n; i++)
        host[i] = tokens[i], host[2 * p.T + i] = int(past + i), host[3 * p.T + i] = 0;
    for (size_t i = 0; i < past + n; i++) host[4 * p.T + i] = int(i);
    copy_in(home, host, (4 * p.T + past + n) * sizeof(int), t.ctx.where);
    t.ctx.batch = {1, n, home, nullptr, home + 2 * p.T, home + 3 * p.T, past, home + 4 * p.T};
}

// Continue `prompt` (at most as long as the plan's T) by up to `count` tokens; each is given to
// `emit` as it is picked.
template <typename T, typename S, typename Emit>
void generate(Trainer<T, S>& t, int plan, const std::vector<int>& prompt, size_t count,
              const Sampling& how, Emit emit) {
    const Plan& p = t.plans[plan];
    size_t past = 0, n = prompt.size();
    std::vector<int> next = prompt;
    std::vector<std::pair<float, int>> order;
    size_t Vp = t.model.shape.Vp(), mine = Vp / size_t(p.tp);
    std::vector<T> stored(mine), all(Vp);
    std::vector<float> logits(t.model.shape.V);
    uint64_t stream = fnv1a("sample." + std::to_string(how.step));
    for (size_t i = 0; i < count && past + n <= p.cache; i++) {
        generate_batch(t, plan, next.data(), n, past);
        run_plan(t, plan);
        const T* here = address<const T>(t, {Kind::LOGITS, -1, 0}); // on the last stage
        if (here) copy_out(stored.data(), here, stored.size() * sizeof(T), t.ctx.where);
        broadcast(t.comms.pp, stored.data(), stored.size(), (p.stages() - 1) % p.pp, Cpu{});
        all_gather(t.comms.tp, all.data(), stored.data(), mine, Cpu{}); // each its own tokens'
        for (size_t v = 0; v < logits.size(); v++) logits[v] = float(to_acc(all[v]));
        past += n, n = 1;
        next = {sample_token(logits.data(), t.model.shape.V, how.temperature, how.top_k, how.top_p,
                             uniform(how.seed, stream, i), order)};
        emit(next[0]);
    }
}
