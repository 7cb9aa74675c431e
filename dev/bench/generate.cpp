// generate.cpp - tokens a second of GPT-2 124M in 1, 8 and 32 slots, and where the time goes
//   Random weights, prompts of 16 tokens, 24 tokens each, no tokens that end texts; samples are
//   drawn from all tokens, and with --top-k 50. The machine may be shared: slots take turns, and
//   the better of two counts.
//   usage: bench_generate [fp32|bf16]
#include <cstdio>
#include <cstring>
#include "../../llmc/io/generate.h"
#include "../../llmc/io/mfu.h"
#include "../../llmc/parameters.h"
#include "../../llmc/family.h"
#include "../../llmc/layers.h"

using namespace llmc;

constexpr size_t PROMPT = 16, COUNT = 24, SLOTS[] = {1, 8, 32};

// Seconds of a generation by what takes them.
struct Times {
    double all = 1e30, prompts = 0, blocks = 0, head = 0;
    size_t tokens = 0;
};

template <typename T>
static Times time_texts(Trainer<T, Cpu>& t, int plan, const Sampling& how) {
    size_t B = t.plans[plan].B;
    std::vector<std::vector<int>> prompts(B);
    std::vector<Text> texts;
    for (size_t b = 0; b < B; b++) {
        for (size_t i = 0; i < PROMPT; i++)
            prompts[b].push_back(int((b * 977 + i * 31) % 50000));
        texts.push_back({&prompts[b], b});
    }

    // The trainer tells when each action has ended.
    Times x;
    double start = clock_seconds(), last = start;
    t.hooks.after = [&](const Action& a) {
        double now = clock_seconds();
        bool prompt = t.ctx.batch.T > 1, head = a.layer == t.model.head();
        // What lies before the embedding is the sampler's.
        if (a.layer > 0)
            (prompt ? x.prompts : head ? x.head : x.blocks) += now - last;
        last = now;
    };
    auto emit = [&](int64_t, int) { x.tokens++; };
    generate(t, plan, texts, COUNT, how, emit, [](int64_t, Ended) {});
    x.all = clock_seconds() - start;
    return x;
}

template <typename T> static void bench() {
    // One trainer, a plan for each number of slots.
    Trainer<T, Cpu> t;
    std::vector<PlanOptions> plans;
    for (size_t slots : SLOTS) {
        PlanOptions p;
        p.mode = Mode::GENERATE;
        p.B = slots;
        p.T = PROMPT;
        p.cache = PROMPT + COUNT;
        plans.push_back(p);
    }
    trainer_place(t, gpt2_shape(12, 12, 768), plans);
    trainer_allocate(t);
    init_constants(t);
    init_weights(t, 1);

    printf("GPT-2 124M, %s, %d threads\n", type_name(type_of<T>()), threads_here(Cpu{}));
    for (int top_k : {0, 50}) {
        Sampling how;
        how.top_k = top_k;
        Times best[3];
        for (int turn = 0; turn < 2; turn++)
            for (int i = 0; i < 3; i++) {
                Times x = time_texts(t, i, how);
                if (x.all < best[i].all) best[i] = x;
            }
        for (int i = 0; i < 3; i++) {
            const Times& x = best[i];
            double rest = x.all - x.prompts - x.blocks - x.head;
            printf("  top-k %2d, %2zu slots: %7.1f tokens/s, %4.1f times one slot's | prompts "
                   "%4.1f%%, blocks %4.1f%%, head %4.1f%%, rest %4.1f%%\n",
                   top_k, SLOTS[i], double(x.tokens) / x.all,
                   double(x.tokens) / x.all / (double(best[0].tokens) / best[0].all),
                   100 * x.prompts / x.all, 100 * x.blocks / x.all, 100 * x.head / x.all,
                   100 * rest / x.all);
        }
    }
    trainer_free(t);
}

int main(int argc, char** argv) {
    bool all = argc == 1;
    if (all || !strcmp(argv[1], "bf16")) bench<bf16>();
    if (all || !strcmp(argv[1], "fp32")) bench<float>();
    return 0;
}
