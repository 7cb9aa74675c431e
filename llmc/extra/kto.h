// kto.h - KTO: answers that are desirable or not, and the reference point - arXiv:2402.01306
//   Lines    {"prompt": "...", "completion": "...", "label": true}, texts or lists of messages.
//            A pair (conversations.h) counts as two of these, the rejected answer undesirable.
//   Marks    The completion is trained. REJECTED, on top of BEGINS, marks it as undesirable.
//   Mismatch mismatched_window() puts after each question of a window the answer to another
//            question, the nearest before it: a pair's two lines ask the same.
//   Reference point: how far the policy has drifted from the reference
//     z = max(0, mean over the batch's questions of  log p(y') - log p_reference(y')),
//     y' the answer to another question (4.1 of the paper; TRL's estimate of the KL divergence).
//     1. before the first step, the starting weights evaluate each mismatched window
//     2. before each step, its weights evaluate the mismatched windows of the whole global batch,
//        without a gradient
//     3. each rank adds up the samples in the same order, so that all have the same z
//     4. LOAD hands z out in the last row of a window's reference (objective.cuh)
//   Which answer follows which question depends on the data alone, not on layout or batch.
//   Cost: a forward pass over the batch, each step. Memory: 8 bytes a window, and while a batch is
//         evaluated 4 bytes for each of its tokens.
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include <algorithm>
#include <utility>
#include "../context.h"
#include "../io/chat.h"
#include "../io/dataloader.h"
#include "../io/files.h"
#include "../run/run.h"
#include "../trainer.h"
#include "../tune/conversations.h"
#include "../tune/reference_policy.h"

namespace llmc {

// ----------------------------------------------------------------------------
// data

// Turn a line's answer into marked tokens, or a pair into two answers.
inline std::string labelled_tokens(const Chat& chat, const Json& line, LineParts& parts, size_t T,
                                   std::vector<int>* tokens, ConversationCounts* counts) {
    // Count each answer of a pair as a conversation, the worse one as undesirable.
    if (line.contains("chosen") || line.contains("preferred_output")) {
        size_t pairs = std::exchange(counts->pairs, 0);
        std::string wrong = pair_tokens(chat, line, parts, T, tokens, counts);
        counts->conversations += 2 * counts->pairs;
        counts->undesirable += counts->pairs;
        counts->pairs = pairs;
        return wrong;
    }
    if (!line.value("label", Json()).is_boolean()) return "has no \"label\" that is true or false";

    // Leave the question untrained, whoever wrote it.
    Conversation messages = parts[ASKED];
    for (ChatMessage& asked : messages)
        asked.trained = false;
    messages.insert(messages.end(), parts[ANSWER].begin(), parts[ANSWER].end());
    ChatTokens written;
    LLMC_TRY(chat_tokens(chat, messages, &written));

    // Mark the label on the first token.
    *tokens = marked_tokens(written, T, counts);
    bool undesirable = !tokens->empty() && !line["label"];
    if (undesirable) (*tokens)[0] |= REJECTED;
    counts->undesirable += undesirable;
    return "";
}

// The kind of data of --loss kto: labelled answers, and pairs.
inline DataKind labelled_answers() {
    std::vector<LineForm> forms = pair_forms();
    forms.back().sign = "chosen";
    forms.push_back({"",
                     {{"prompt", "user"}, {"completion", "assistant", ANSWER}},
                     ": a line has \"prompt\", \"completion\" and \"label\""});
    return {" kto ", forms, labelled_tokens};
}

// ----------------------------------------------------------------------------
// mismatched answers

// A question, and its answer from the first trained token on. Tokens carry TRAINED and BEGINS.
struct AnsweredQuestion {
    std::vector<int> question;
    std::vector<int> answer;
};

// Split a window of pack_windows() into its questions and answers, without padding.
inline std::vector<AnsweredQuestion> questions_of(const int* tokens, const int* targets, // (T)
                                                  size_t T) {
    std::vector<AnsweredQuestion> all;
    for (size_t i = 0; i < T; i++) {
        if (i == 0 || tokens[i] & BEGINS)
            all.emplace_back();
        AnsweredQuestion& now = all.back();
        // A row's target is the next token, so a token is trained if the row before
        // it has a target.
        bool trained = i > 0 && targets[i - 1] >= 0;
        int marked = tokens[i];
        if (trained) marked |= TRAINED;

        // Everything from the first trained token on is the answer.
        if (trained || !now.answer.empty())
            now.answer.push_back(marked);
        else
            now.question.push_back(marked);
    }

    // Drop padding, which has no answer.
    std::erase_if(all, [](const AnsweredQuestion& q) { return q.answer.empty(); });
    return all;
}

// Whether two questions have the same text, whatever their answers are worth.
inline bool asks_the_same(const AnsweredQuestion& a, const AnsweredQuestion& b) {
    auto unmarked = [](int token) { return token & ~(TRAINED | BEGINS | REJECTED); };
    return std::ranges::equal(a.question, b.question, {}, unmarked, unmarked);
}

// The nearest answer before question i that belongs to another question; null: there is none.
inline const std::vector<int>* answer_to_another(const std::vector<AnsweredQuestion>& all,
                                                 size_t i) {
    for (size_t k = i; k-- > 0;)
        if (!asks_the_same(all[k], all[i]))
            return &all[k].answer;
    return nullptr;
}

// Make a window's tokens and targets (T) mismatched. `all` holds the questions of the window
// before. A question is left out where no other question came before it, and answers that do not
// fit lose their end. Returns how many questions have an answer.
inline size_t mismatched_window(std::vector<AnsweredQuestion> all, int* tokens, int* targets,
                                size_t T, int padding) {
    // Give each question of this window the answer to another one.
    size_t own = all.size(); // the first of them
    for (AnsweredQuestion& q : questions_of(tokens, targets, T))
        all.push_back(std::move(q));
    std::vector<int> marked;
    for (size_t i = own; i < all.size(); i++) {
        const std::vector<int>* other = answer_to_another(all, i);
        if (!other) continue;
        marked.insert(marked.end(), all[i].question.begin(), all[i].question.end());
        marked.insert(marked.end(), other->begin(), other->end());
    }
    if (marked.size() < T)
        marked.push_back(padding | BEGINS);
    marked.resize(T, padding);

    // Separate marks and tokens, and count the questions whose answer has begun.
    size_t answered = 0;
    bool counted = true;
    for (size_t i = 0; i < T; i++) {
        int token = marked[i] & ~(TRAINED | BEGINS | REJECTED);
        bool trained = marked[i] & TRAINED;
        // A new question's answer has not begun yet.
        if (marked[i] & BEGINS) counted = false;
        answered += trained && !counted;
        counted |= trained;
        tokens[i] = token | (marked[i] & BEGINS);
        if (i > 0)
            targets[i - 1] = trained ? token : -1;
    }
    targets[T - 1] = -1;
    return answered;
}

// Fill tokens and targets, both (T), of a sample's mismatched window. Windows form a ring: the
// window before it in the files gives the first answer, whatever sample came before. Adds to
// *answers how many there are.
inline std::string load_mismatched(const DataLoader& d, uint64_t sample, int padding, int* tokens,
                                   int* targets, size_t* answers) {
    uint64_t own = window_of(d, sample);
    uint64_t before = (own + d.windows - 1) % d.windows;
    LLMC_TRY(read_window(d, before, tokens, targets));
    auto questions = questions_of(tokens, targets, d.T);
    std::string wrong = read_window(d, own, tokens, targets);
    if (wrong.empty())
        *answers += mismatched_window(questions, tokens, targets, d.T, padding);
    return wrong;
}

// The log p of the mismatched answers of each of the samples [first, first + count), under the
// weights as they are. All ranks call, and get the same.
template <typename T, typename S>
std::vector<double> mismatched_logp(Run& run, Trainer<T, S>& t, const DataLoader& d,
                                    uint64_t first, uint64_t count) {
    auto window = [&](uint64_t i, int* tokens, int* targets) {
        size_t answers = 0;
        return load_mismatched(d, first + i, run.chat.end, tokens, targets, &answers);
    };
    std::vector<float> rows = window_logp(run, t, count, window);

    // Sum over all rows: those without a target have 0.
    std::vector<double> sums(count);
    for (size_t row = 0; row < rows.size(); row++)
        sums[row / d.T] += double(rows[row]);
    return sums;
}

// ----------------------------------------------------------------------------
// the reference point

// Ask the starting weights about samples [0, known). Returns a function that sets the run's
// reference point to that of samples [first, first + count), by the weights as they are when it is
// called. All ranks call both.
template <typename T, typename S>
auto make_reference_point(Run& run, Trainer<T, S>& t, const DataLoader& d, uint64_t known) {
    // Order the sums by window. Windows that the run does not read keep 0.
    std::vector<double> start(d.windows);
    std::vector<double> sums = mismatched_logp(run, t, d, 0, known);
    for (uint64_t i = 0; i < known; i++)
        start[window_of(d, i)] = sums[i];

    return [&run, &t, &d, start](uint64_t first, uint64_t count) {
        // Add up in the order of samples, so that the sum does not depend on how ranks share them.
        double drift = 0;
        size_t answers = 0;
        std::vector<int> tokens(d.T), targets(d.T);
        std::vector<double> now = mismatched_logp(run, t, d, first, count);
        for (uint64_t i = 0; i < count; i++) {
            drift += now[i] - start[window_of(d, first + i)];
            or_die(load_mismatched(d, first + i, run.chat.end, tokens.data(), targets.data(),
                                   &answers));
        }

        // Clamp at 0: the estimate may be negative, but a divergence is not.
        run.reference.point = answers > 0 ? std::max(0.0, drift / double(answers)) : 0;
    };
}

// Let the trainer take the reference point of each batch before its step, and that of validation
// before a validation. All ranks call, under the starting weights, after compute_references().
template <typename T, typename S>
void start_kto(Run& run, Trainer<T, S>& t) {
    if (run.data.val.windows) {
        auto take_references = run.reference.around_validation;
        auto point = make_reference_point(run, t, run.data.val, run.data.val_samples);
        run.reference.around_validation = [&run, take_references, point](bool begins) {
            take_references(begins);
            if (begins) point(0, run.data.val_samples);
        };
    }

    // A step's point is that of the samples that it will train on.
    if (run.plans.train < 0) return;
    auto point = make_reference_point(run, t, run.data.train, samples_of_run(run));
    uint64_t samples = uint64_t(run.config.batch_tokens / run.config.seq);
    t.hooks.before = [&t, point, samples] {
        point(t.data.cursor, samples);
    };
}

} // namespace llmc
