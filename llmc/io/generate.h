// generate.h - text from the model: the generate plan, on the prompt and then on a token at a time
//   1. the first run reads the whole prompt and fills the key/value cache
//   2. the last row's logits pick a token
//   3. each later run reads the token just picked, at the next position
//   4. a token of `ends` ends the sample, unprinted; so do --sample-tokens, and a full cache
//   Token i of a sample uses the uniform number i of the stream "sample.<step>", so a resumed run
//   samples the same; a step's further samples have streams "sample.<step>.1" and so on.
#pragma once
#include <set>
#include "sampler.h"
#include "../step.h"
#include "../text.h"

namespace llmc {

// How a token is picked; see sampler.h.
struct Sampling {
    float temperature = 1, top_p = 1;
    int top_k = 0;
    uint64_t seed = 0;
    int64_t step = 0;
    int64_t number = 0;       // of the samples at this step
    std::set<int> ends = {}; // tokens that end a sample
};

// The stream of a sample's uniform numbers.
inline uint64_t sample_stream(const Sampling& how) {
    std::string name = concat("sample.", how.step);
    if (how.number) name += concat(".", how.number);
    return fnv1a(name);
}

// Put tokens (n) at positions [past, past + n) before the plan. The batch is laid out as LOAD's:
// tokens, targets, positions, documents' starts (B*T each), then the keys' positions.
template <typename T, typename S>
void generate_batch(Trainer<T, S>& t, int plan, const int* tokens, size_t n, size_t past) {
    const Plan& p = t.plans[plan];
    t.plan = plan;
    t.at = 0;
    int* home = address<int>(t, {Kind::TOKENS, -1, 0});
    // Fill the host's copy; targets stay as they are, since no loss is computed.
    int* host = host_side(home, t.staging, t.ctx.where);

    for (size_t i = 0; i < n; i++) {
        host[i] = tokens[i];
        host[2 * p.T + i] = int(past + i);
        host[3 * p.T + i] = 0;
    }
    for (size_t i = 0; i < past + n; i++)
        host[4 * p.T + i] = int(i);

    // Copy no more than is filled: the cache's positions come last.
    copy_in(home, host, (4 * p.T + past + n) * sizeof(int), t.ctx.where);
    t.ctx.batch = {1, n, home, nullptr, home + 2 * p.T, home + 3 * p.T, past, home + 4 * p.T};
}

// Continue `prompt` (at most as long as the plan's T) by up to `count` tokens; each is given to
// `emit` as it is picked, but for the one that ends the text. All ranks call it, and pick the same.
template <typename T, typename S, typename Emit>
void generate(Trainer<T, S>& t, int plan, const std::vector<int>& prompt, size_t count,
              const Sampling& how, Emit emit) {
    const Plan& p = t.plans[plan];
    // Make room once: a rank's share of the padded vocabulary, and the whole.
    size_t V = t.model.shape.V, Vp = t.model.shape.Vp();
    size_t mine = Vp / t.layout.tp.size;
    std::vector<T> stored(mine), all(Vp);
    std::vector<float> logits(V);
    std::vector<std::pair<float, int>> order;
    uint64_t stream = sample_stream(how);

    // Stop where the cache is full, even if fewer than `count` tokens are out.
    size_t past = 0, n = prompt.size(); // tokens in the cache, tokens to read
    std::vector<int> next = prompt;
    for (size_t i = 0; i < count && past + n <= p.cache; i++) {
        generate_batch(t, plan, next.data(), n, past);
        run_plan(t, plan);
        past += n;
        n = 1;

        // Bring the logits to all ranks: the last stage has them, each tp rank its share.
        const T* here = address<const T>(t, {Kind::LOGITS, -1, 0});
        if (here)
            copy_out(stored.data(), here, stored.size() * sizeof(T), t.ctx.where);
        broadcast(t.comms.pp, stored.data(), stored.size(),
                  (t.layout.stages() - 1) % t.layout.pp.size, Cpu{});
        all_gather(t.comms.tp, all.data(), stored.data(), mine, Cpu{});

        // Pick a token.
        for (size_t v = 0; v < V; v++)
            logits[v] = float(to_acc(all[v]));
        double draw = uniform(how.seed, stream, i);
        next = {sample_token(logits.data(), V, how.temperature, how.top_k, how.top_p, draw, order)};
        if (how.ends.count(next[0])) return;
        emit(next[0]);
    }
}

} // namespace llmc
