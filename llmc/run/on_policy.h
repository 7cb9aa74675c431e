// on_policy.h - answers that a step samples from the weights it trains - arXiv:2402.03300
//   1. SAMPLE  --group answers to each prompt of the step, by the generation that prints samples
//              (generate.h)
//   2. JUDGE   a reward for each answer, and its advantage over the group's mean (rewards.h)
//   3. TRAIN   LOAD hands out the answers as windows, with their advantages; the objective has
//        dL/dlogits = (softmax - onehot) * advantage / tokens of all answers of the global batch
//   One step a rollout: the policy that is trained is the one that was sampled, so there is no
//   ratio to clip. Answer k to prompt p of step s draws by (seed, s, p, k, position), and by
//   neither slots nor layout: a resumed run samples the step again, to the same bits.
//   All ranks of all axes sample all answers, as generation does.
//   Cost: one reading of the weights for each token of the longest answers, --slots texts at once.
#pragma once
#include "../io/rollouts.h"
#include "choose.h"
#include "prompts.h"

namespace llmc {

// Read the prompts of --data, each with its answer, instead of text. Rewards compare texts, so the
// tokenizer must be the model's.
inline void open_exercises(Run& run) {
    const Config& c = run.config;
    LLMC_USER_CHECK(vocab_matches(run), "--data: %s", foreign_tokenizer(run).c_str());
    or_die(read_exercises(c.data, run.chat, size_t(c.seq), c.reward, &run.exercises));

    // Each rank has read the file itself: compare what they read.
    std::string all;
    for (const Exercise& q : run.exercises)
        all += concat(q.prompt.size(), " ", q.answer, "\n");
    check_same(run.world, "the prompts of --data", all);
}

// The number of answers that a step trains on: the sequences of the global batch, each of which
// holds one prompt and answer.
inline size_t answers_of_step(const Run& run) {
    const Config& c = run.config;
    return size_t(c.batch_tokens / c.seq);
}

// Let the trainer read the answers that were sampled last, and their advantages.
template <typename T, typename S>
void set_rollouts(Run& run, Trainer<T, S>& t) {
    size_t length = size_t(run.config.seq);
    const Rollouts& r = run.rollouts;
    t.window = [&r, length](uint64_t sample, int* tokens, int* targets) {
        rollout_window(r, sample, length, tokens, targets);
        return std::string();
    };

    // Autotuning runs the plan before any answer is sampled: leave its advantages as they are.
    t.references = [&r, length](uint64_t sample, float* advantages, float*) {
        if (r.advantages.empty()) return;
        float advantage = r.advantages.at(sample - r.first);
        std::fill_n(advantages, length, advantage);
    };
    if (is_first(run))
        printf("data: %zu prompts, %zu answers a step, %d to each prompt\n",
               run.exercises.size(), answers_of_step(run), run.config.group);
}

// The exercises of the step whose first answer is number `first` of the run.
inline std::vector<size_t> exercises_of_step(const Run& run, uint64_t first) {
    size_t group = size_t(run.config.group);
    size_t exercises = run.exercises.size();
    uint64_t seed = uint64_t(run.config.seed);
    // Turn numbers of answers into numbers of groups: each group asks one exercise.
    uint64_t begin = first / group;
    uint64_t end = begin + answers_of_step(run) / group;
    std::vector<size_t> asked;
    for (uint64_t i = begin; i < end; i++)
        asked.push_back(exercise_of(i, seed, exercises));
    return asked;
}

// Sample --group answers to each of a step's exercises. r->tokens receives each prompt with its
// answer, r->cut how many answers reached the limit of length.
template <typename T, typename S>
void sample_answers(Run& run, Trainer<T, S>& t, const std::vector<size_t>& asked, Rollouts* r) {
    // List the texts to generate, each with a random stream of its own.
    const Config& c = run.config;
    std::vector<Text> texts;
    for (size_t p = 0; p < asked.size(); p++) {
        // Keep a group's answers together, so that the model reads their prompt once.
        const std::vector<int>& prompt = run.exercises[asked[p]].prompt;
        for (int k = 0; k < c.group; k++) {
            std::string stream = concat("rollout.", run.step, ".", p, ".", k);
            texts.push_back({&prompt, fnv1a(stream)});
            r->tokens.push_back(prompt);
            r->prompts.push_back(prompt.size());
        }
    }

    // Sample from the whole distribution, at temperature 1: the policy gradient is of the model's
    // own probabilities. Keep the token that ends an answer: to end is a choice, and is trained.
    Sampling how;
    how.seed = uint64_t(c.seed);
    how.ends = run.stop_tokens;
    how.emits_end = true;
    auto emit = [&](int64_t i, int token) {
        r->tokens[size_t(i)].push_back(token);
    };
    auto end = [&](int64_t, Ended why) {
        r->cut += why != Ended::BY_TOKEN;
    };

    // Generate. An answer ends where its window does, if not before.
    int most = c.answer_tokens ? c.answer_tokens : c.seq;
    generate(t, run.rollout_plan, texts, size_t(most), how, emit, end);
}

// An answer as text, without the token that ends it.
inline std::string answer_text(const Run& run, const Rollouts& r, size_t i) {
    const std::vector<int>& all = r.tokens[i];
    std::vector<int> tokens(all.begin() + long(r.prompts[i]), all.end());
    // Drop the last token only if it ends the answer: an answer that was cut has no such token.
    bool ended = !tokens.empty() && run.stop_tokens.count(tokens.back());
    if (ended) tokens.pop_back();
    return decode(run.tokenizer, tokens);
}

// Fill in the numbers for the log: mean reward and length, shares of cut answers and equal groups.
inline void take_means(Rollouts* r, const std::vector<double>& rewards, size_t group) {
    // Average over answers. A length includes the token that ends the answer.
    size_t answers = rewards.size();
    for (size_t i = 0; i < answers; i++) {
        r->reward += rewards[i];
        r->length += double(r->tokens[i].size() - r->prompts[i]);
    }
    for (double* sum : {&r->reward, &r->length, &r->cut})
        *sum /= double(answers);

    // Count the groups whose rewards are all equal: their advantages are 0, so they teach nothing.
    size_t groups = answers / group;
    r->equal = double(equal_groups(rewards, group)) / double(groups);
}

// Sample the answers that the next step trains on. All ranks call, and get the same answers.
template <typename T, typename S>
void sample_rollouts(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    Spend spend(run.account, Work::SAMPLE);
    size_t group = size_t(c.group);
    Rollouts r;
    r.first = t.cursor;
    std::vector<size_t> asked = exercises_of_step(run, t.cursor);
    sample_answers(run, t, asked, &r);

    // Reward each answer. Every rank computes the same rewards.
    std::vector<double> rewards;
    for (size_t i = 0; i < r.tokens.size(); i++) {
        const Exercise& asked_for = run.exercises[asked[i / group]];
        std::string answer = answer_text(run, r, i);
        rewards.push_back(reward_of(c.reward, answer, asked_for.answer));
    }

    // Compare each reward with its group's. LOAD hands out the advantages with the windows.
    r.advantages = advantages(rewards, group, c.advantage == "std");
    take_means(&r, rewards, group);
    run.rollouts = std::move(r);
}

// The numbers that a step's line prints. The mean of -log p over sampled tokens estimates
// the policy's entropy.
inline std::vector<NamedNumber> rollout_numbers(const Run& run, const Loss& loss) {
    if (!has_rollouts(run.config)) return {};
    const Rollouts& r = run.rollouts;
    // Loss::correct holds the sum of -log p here (objective.cuh).
    double tokens = double(std::max<int64_t>(loss.valid, 1));
    return {
        {"reward", r.reward},
        {"length", r.length},
        {"cut", r.cut},
        {"equal_groups", r.equal},
        {"entropy", loss.correct / tokens},
    };
}

} // namespace llmc
