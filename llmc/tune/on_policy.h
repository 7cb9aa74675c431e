// on_policy.h - answers that a step samples from the weights it trains - arXiv:2402.03300
//   1. SAMPLE  --group answers to each prompt of the step, by the generation that prints samples
//              (generate.h)
//   2. JUDGE   a reward for each answer, and its advantage over the group's mean (rewards.h). A
//              program of the user's is run by the first rank, which sends the rewards to all
//              (reward_command.h): the program may answer differently each time.
//   3. TRAIN   LOAD hands out the answers as windows, with their advantages; the objective has
//        dL/dlogits = (softmax - onehot) * advantage / tokens of all answers of the global batch
//   4. AGAIN   --updates N: N steps train on the same answers. From the second on the policy is no
//              longer the one that sampled, so objective.cuh clips their ratio; log p of the policy
//              that sampled was evaluated before the first update.
//   --beta adds the KL divergence from the starting weights, which evaluate the answers too
//   (reference_policy.h). Both evaluations run the micro-batches of training, so that a policy
//   equal to the other has the ratio 1 to the bit, in every layout. Each costs a forward pass over
//   the answers, and 4 bytes a token of the batch in the host's memory.
//   Answer k to prompt p of step s draws by (seed, s, p, k, position), and by neither slots nor
//   layout: a resumed run samples the step again, to the same bits. Between two updates it has the
//   answers from its checkpoint (io/rollout_state.h).
//   Each place along dp samples the answers to its share of the prompts, and all ranks then hear
//   all answers. Experts that dp ranks share out meet in each run, with equally many rows: with
//   --ep all ranks sample all answers.
//   Cost: one reading of the weights for each token of the longest answers, --slots texts at once
//         on each place along dp.
#pragma once
#include "../comm/comm.h"
#include "../context.h"
#include "../io/config.h"
#include "../io/config_check.h"
#include "../io/dataloader.h"
#include "../io/files.h"
#include "../io/generate.h"
#include "../io/logger.h"
#include "../io/one_reader.h"
#include "../io/rollout_state.h"
#include "../io/tokenizer.h"
#include "../layout.h"
#include "../ops/rand.h"
#include "../ops/types.h"
#include "../run/account.h"
#include "../run/run.h"
#include "../step.h"
#include "../comm/text.h"
#include "../trainer.h"
#include "reference_policy.h"
#include "reward_command.h"
#include "rewards.h"
#include "rollouts.h"

namespace llmc {

// Read the prompts of --data, each with its answer, instead of text. Rewards compare texts, so the
// tokenizer must be the model's.
inline void open_exercises(Run& run) {
    const Config& c = run.config;
    LLMC_USER_CHECK(vocab_matches(run), "--data: %s", foreign_tokenizer(run).c_str());
    or_die(read_exercises(c.data, run.chat, size_t(c.seq), c.reward, &run.rollouts.exercises));
    or_die(identify_files(c.data, &run.data.files["data"]));

    // Each rank has read the file itself: compare what they read.
    std::string all;
    for (const Exercise& q : run.rollouts.exercises)
        all += concat(q.prompt.size(), " ", q.answer, " ", json_text(q.line));
    check_same(run.world, "the prompts of --data", all);
}

// The number of answers that a step trains on: the sequences of the global batch, each of which
// holds one prompt and answer.
inline size_t answers_of_step(const Run& run) {
    const Config& c = run.config;
    return size_t(c.batch_tokens / c.seq);
}

// Fill in the objective's numbers of a sampled answer's rows (T) each. Autotuning runs the plan
// before any answer is sampled, and keeps the numbers as they are.
inline void rollout_numbers_of_rows(const Rollouts& r, uint64_t sample, size_t T, RowNumbers to) {
    if (r.advantages.empty()) return;
    size_t answer = sample - r.first;
    std::fill_n(to.feedback, T, r.advantages.at(answer));

    // Log p, where another policy has evaluated the answers.
    size_t first = answer * T;
    if (!r.reference.empty())
        std::copy_n(&r.reference[first], T, to.reference);
    if (!r.old.empty())
        std::copy_n(&r.old[first], T, to.old);
}

// Add the numbers of sampled answers to a step's report.
inline void report_rollouts(StepReport& report, const Run& run, const Loss& loss) {
    const Rollouts& r = run.rollouts.now;
    auto add = [&](const char* name, double value) {
        report.more.push_back({name, value, "%.4g"});
    };
    add("reward", r.reward);
    add("length", r.length);
    add("cut", r.cut);
    add("equal_groups", r.equal);

    // Loss::correct holds the sum of -log p here (objective.cuh). Its mean estimates the policy's
    // entropy at a rollout's first update; at later ones, of older tokens, it is a cross-entropy.
    double tokens = double(std::max<int64_t>(loss.valid, 1));
    add("entropy", loss.correct / tokens);

    // Add the estimate of KL and the share of clipped tokens, where other policies are known.
    if (run.config.beta > 0)
        add("kl", loss.margin / tokens);
    if (run.config.updates > 1)
        add("clipped", loss.clipped / tokens);
}

// Let the trainer read the answers that were sampled last, and their advantages.
template <typename T, typename S>
void set_rollouts(Run& run, Trainer<T, S>& t) {
    size_t length = size_t(run.config.seq);
    const Rollouts& r = run.rollouts.now;
    t.data.window = [&r, length](uint64_t sample, int* tokens, int* targets) {
        rollout_window(r, sample, length, tokens, targets);
        return std::string();
    };
    t.data.references = [&r, length](uint64_t sample, RowNumbers to) {
        rollout_numbers_of_rows(r, sample, length, to);
    };
    run.rollouts.report = [&run](StepReport& report, const Loss& loss) {
        report_rollouts(report, run, loss);
    };
    say(run, "data: ", run.rollouts.exercises.size(), " prompts, ", answers_of_step(run),
        " answers a step, ", run.config.group, " to each prompt\n");
}

// The exercises of the step whose first answer is number `first` of the run.
inline std::vector<size_t> exercises_of_step(const Run& run, uint64_t first) {
    size_t group = size_t(run.config.group);
    size_t exercises = run.rollouts.exercises.size();
    uint64_t seed = uint64_t(run.config.seed);
    // Turn numbers of answers into numbers of groups: each group asks one exercise, and is counted
    // again in each of its updates.
    uint64_t begin = first / group / uint64_t(run.config.updates);
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
    // Take this rank's share of the exercises: those of its place along dp.
    const Config& c = run.config;
    Axis dp = answers_are_shared(c) ? t.layout.dp : Axis{};
    ShareOfTexts mine = share_of_texts(dp, asked.size());
    std::vector<Text> texts;
    for (size_t p = 0; p < asked.size(); p++) {
        // List the texts to generate, each with a random stream of its own. Keep a group's answers
        // together, so that the model reads their prompt once.
        const std::vector<int>& prompt = run.rollouts.exercises[asked[p]].prompt;
        for (int k = 0; k < c.group; k++) {
            std::string stream = concat("rollout.", run.step, ".", p, ".", k);
            if (p >= mine.first && p < mine.past)
                texts.push_back({&prompt, fnv1a(stream)});
            r->tokens.push_back(prompt);
            r->prompts.push_back(prompt.size());
        }
    }

    // Sample from the whole distribution, at temperature 1: the policy gradient is of the model's
    // own probabilities. Keep the token that ends an answer: to end is a choice, and is trained.
    Sampling how;
    how.seed = uint64_t(c.seed);
    how.ends = run.samples.stop_tokens;
    how.emits_end = true;
    how.own_texts = dp.size > 1;
    size_t first = mine.first * size_t(c.group);
    auto emit = [&](int64_t i, int token) {
        r->tokens[first + size_t(i)].push_back(token);
    };
    auto end = [&](int64_t, Ended why) {
        r->cut += why != Ended::BY_TOKEN;
    };

    // Generate. An answer ends where its window does, if not before.
    int most = c.answer_tokens ? c.answer_tokens : c.seq;
    generate(t, run.plans.rollout, texts, size_t(most), how, emit, end);
    if (dp.size == 1) return;

    // Share them, and count the cut ones of all places.
    share_texts(t, {first, first + texts.size()}, size_t(c.seq) + 1, r->tokens);
    if (t.comms.model.rank > 0) r->cut = 0;
    all_reduce_sum(run.world, &r->cut, 1, Cpu{});
}

// An answer as text, without the token that ends it.
inline std::string answer_text(const Run& run, const Rollouts& r, size_t i) {
    const std::vector<int>& all = r.tokens[i];
    std::vector<int> tokens(all.begin() + long(r.prompts[i]), all.end());
    // Drop the last token only if it ends the answer: an answer that was cut has no such token.
    bool ended = !tokens.empty() && run.samples.stop_tokens.count(tokens.back());
    if (ended) tokens.pop_back();
    return decode(run.tokenizer, tokens);
}

// Let the user's program reward the answers: "" or what it did wrong. One rank runs it, for all.
inline std::string rewards_by_program(const Run& run, const Rollouts& r,
                                      const std::vector<size_t>& asked,
                                      std::vector<double>* rewards) {
    const Config& c = run.config;
    size_t group = size_t(c.group);
    std::string wrong;

    // Each answer goes to the program with the whole line of its exercise.
    if (is_first_rank(run)) {
        std::vector<Json> answers;
        for (size_t i = 0; i < r.tokens.size(); i++) {
            size_t exercise = asked[i / group];
            answers.push_back(run.rollouts.exercises[exercise].line);
            answers.back()["completion"] = answer_text(run, r, i);
        }
        wrong = command_rewards(reward_program(c.reward), c.reward_seconds, answers, rewards);
    }
    LLMC_TRY(broadcast_text(run.world, wrong, 0));
    rewards->resize(r.tokens.size());
    broadcast(run.world, rewards->data(), rewards->size(), 0, Cpu{});
    return "";
}

// Reward each answer: "" or what is wrong. `asked` lists the exercises of the groups. All ranks
// call, and get the same.
inline std::string reward_answers(const Run& run, const Rollouts& r,
                                  const std::vector<size_t>& asked, std::vector<double>* rewards) {
    const Config& c = run.config;
    if (!is_verifier(c.reward))
        return rewards_by_program(run, r, asked, rewards);
    size_t group = size_t(c.group);
    for (size_t i = 0; i < r.tokens.size(); i++) {
        size_t exercise = asked[i / group];
        std::string answer = answer_text(run, r, i);
        rewards->push_back(reward_of(c.reward, answer, run.rollouts.exercises[exercise].answer));
    }
    return "";
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
    r->equal = double(equal_groups(rewards, group)) / double(answers / group);
}

// Log p of the answers' tokens under the weights as they are. All ranks call, and get the same.
template <typename T, typename S>
std::vector<float> rollout_logp(Run& run, Trainer<T, S>& t, const Rollouts& r) { // (answers,T)
    auto window = [&](uint64_t sample, int* tokens, int* targets) {
        rollout_window(r, r.first + sample, size_t(run.config.seq), tokens, targets);
        return std::string();
    };
    return window_logp(run, t, r.tokens.size(), window);
}

// Let the old policy and the reference evaluate the answers, where the objective asks for them.
template <typename T, typename S>
void ask_other_policies(Run& run, Trainer<T, S>& t, Rollouts* r) {
    if (run.config.updates > 1)
        r->old = rollout_logp(run, t, *r);
    if (!keeps_start(run.config)) return;
    exchange_weights(t, run.reference.start_weights);
    r->reference = rollout_logp(run, t, *r);
    exchange_weights(t, run.reference.start_weights);
}

// Whether the answers of the step before have an update left. Those of a checkpoint must fit the
// flags that this run has; else they are sampled again.
inline bool has_update_left(const Run& run, const Rollouts& r) {
    const Config& c = run.config;
    if (r.updates == 0 || r.updates >= c.updates)
        return false;
    size_t answers = answers_of_step(run);
    size_t rows = answers * size_t(c.seq);
    size_t of_reference = keeps_start(c) ? rows : 0;
    bool fits = r.tokens.size() == answers;
    fits = fits && r.old.size() == rows;
    fits = fits && r.reference.size() == of_reference;

    // The vocabulary may be a smaller one now.
    for (const std::vector<int>& answer : r.tokens)
        for (int token : answer)
            fits = fits && size_t(token) < run.shape.V;
    return fits;
}

// Get the answers that the next step trains on: those of the step before while they have updates
// left, else new ones. Returns "" or what is wrong with their rewards; then nothing has changed.
// All ranks call, and get the same.
template <typename T, typename S>
std::string sample_rollouts(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    Spend spend(run.clock.account, Work::SAMPLE);

    // Answers may serve several updates.
    if (has_update_left(run, run.rollouts.now)) {
        run.rollouts.now.first = t.data.cursor;
        run.rollouts.now.updates++;
        return "";
    }

    // Sample answers to the exercises of this step.
    size_t group = size_t(c.group);
    Rollouts r;
    r.first = t.data.cursor;
    std::vector<size_t> asked = exercises_of_step(run, t.data.cursor);
    sample_answers(run, t, asked, &r);

    // Reward each answer, and compare it with its group's. LOAD hands out the advantages.
    std::vector<double> rewards;
    LLMC_TRY(reward_answers(run, r, asked, &rewards));
    r.advantages = group_advantages(rewards, group, c.advantage == "std");
    take_means(&r, rewards, group);
    ask_other_policies(run, t, &r);
    r.updates = 1;
    run.rollouts.now = std::move(r);
    return "";
}

} // namespace llmc
