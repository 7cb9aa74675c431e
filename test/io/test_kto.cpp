// test_kto.cpp - KTO: labelled answers, mismatched windows, the reference point of a whole batch
//   Windows are small enough to be checked by eye. Layouts are compared with the program itself;
//   test_losses computes the first figures of a run from its definitions.
#include "../../llmc/extra/kto.h"
#include "../../llmc/io/chat_templates.h"
#include "../harness/runs.h"

using namespace llmc;

TEST(Labels, EachQuestionOfAWindowGetsTheAnswerBeforeItsOwn) {
    // Letters are questions and digits are trained answers, as pack_windows() gives them. A
    // capital begins a conversation.
    auto window = [](const std::string& text, std::vector<int>* tokens, std::vector<int>* targets) {
        tokens->clear();
        targets->assign(text.size(), -1);
        for (size_t i = 0; i < text.size(); i++) {
            bool begins = isupper(text[i]), digit = isdigit(text[i]);
            tokens->push_back(text[i] | (begins ? BEGINS | (text[i] == 'B' ? REJECTED : 0) : 0));
            if (digit) (*targets)[i - 1] = text[i];
        }
    };
    std::vector<int> tokens, targets, before, before_targets;
    window("Xx9Yy78Z..", &before, &before_targets); // Z begins padding
    window("Aa123Bb4Cc56", &tokens, &targets);

    auto answers = questions_of(before.data(), before_targets.data(), before.size());
    EXPECT_EQ(answers.size(), 2u);
    EXPECT_EQ(mismatched_window(answers, tokens.data(), targets.data(), 12, '.'), 3u);

    // Each question now has the answer before its own; the first takes the last of the window.
    std::string text, trained;
    for (size_t i = 0; i < 12; i++) {
        text += char(tokens[i] & 0x7f);
        trained += targets[i] < 0 ? '.' : char(targets[i]);
        EXPECT_EQ(bool(tokens[i] & BEGINS), bool(isupper(text[i]))) << i;
    }
    EXPECT_EQ(text, "Aa78Bb123Cc4");
    EXPECT_EQ(trained, ".78..123..4.");

    // An answer that is too long is cut at the window's end, and one that is shorter
    // leaves padding after it.
    window("Xx2345", &before, &before_targets);
    window("Aa1Bb2", &tokens, &targets);
    answers = questions_of(before.data(), before_targets.data(), before.size());
    EXPECT_EQ(mismatched_window(answers, tokens.data(), targets.data(), 6, '.'), 1u);
    window("Aa12Bb", &tokens, &targets);
    answers = questions_of(before.data(), before_targets.data(), 3);
    EXPECT_EQ(mismatched_window(answers, tokens.data(), targets.data(), 6, '.'), 1u);
    EXPECT_EQ(tokens[3], '.' | BEGINS);

    // A question that is asked twice, as pairs are, gets the answer to another; alone it gets none.
    window("Xx9", &before, &before_targets);
    window("Aa1Aa2Cc3", &tokens, &targets);
    answers = questions_of(before.data(), before_targets.data(), before.size());
    EXPECT_EQ(mismatched_window(answers, tokens.data(), targets.data(), 9, '.'), 3u);
    text.clear();
    for (int token : tokens) text += char(token & 0x7f);
    EXPECT_EQ(text, "Aa9Aa9Cc2");
    window("Aa1Aa2", &tokens, &targets);
    EXPECT_EQ(mismatched_window({}, tokens.data(), targets.data(), 6, '.'), 0u);
    EXPECT_EQ(tokens[0], '.' | BEGINS);
}

TEST(Labels, ALineHasOneAnswerAndItsLabel) {
    Tokenizer t;
    Chat chat;
    ASSERT_EQ(choose_chat(&chat, "plain", "", t), "");
    std::vector<int> tokens;
    ConversationCounts n;
    auto tokens_of = [&](const std::string& line) {
        return line_tokens(labelled_answers(), chat, nlohmann::json::parse(line), 128, &tokens, &n);
    };
    ASSERT_EQ(tokens_of(R"({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}], "completion": "de", "label": false})"), "");
    EXPECT_EQ(tokens[0] & (BEGINS | REJECTED), BEGINS | REJECTED);

    // The answer inside the prompt belongs to the question. Trained are "de", the space before it,
    // and the zero that ends it.
    EXPECT_EQ(std::count_if(tokens.begin(), tokens.end(), [](int x) { return x < 0; }), 2 + 2);

    ASSERT_EQ(tokens_of(R"({"prompt": "a", "completion": "b", "label": true})"), "");
    EXPECT_EQ(tokens[0] & (BEGINS | REJECTED), BEGINS);
    EXPECT_EQ(n.undesirable, 1u);

    EXPECT_HAS(tokens_of(R"({"prompt": "a", "completion": "b", "label": 1})"),
               "no \"label\" that is true or false");
    EXPECT_HAS(tokens_of(R"({"prompt": "a", "label": true})"), "has no \"completion\"");
}

// Fourteen answers in lines of both shapes, five of them undesirable. They fill four windows.
static std::string fourteen_answers() {
    std::string lines;
    const char* names[] = {"one", "two", "three", "four", "five", "six",
                           "seven", "eight", "nine", "ten", "eleven", "twelve"};
    for (int i = 0; i < 12; i++)
        lines += std::string(R"({"prompt": "Say )") + names[i] + R"(", "completion": ")" +
                 (i % 3 ? names[i] : "No, I will not") + R"(", "label": )" +
                 (i % 3 ? "true}\n" : "false}\n");
    return lines + R"({"prompt": "Sky?", "chosen": "blue", "rejected": "green"})" "\n";
}

TEST(Labels, ReferencePointAndLossAreTheSameInEveryLayout) {
    // The reference point is a mean over the whole batch; over a micro-batch or a rank it would
    // differ by tens of percents. Sums that are added in another order differ by less than a
    // millionth. The learning rate is high, so that the policy leaves its reference.
    std::string path = put_file(scratch("labels.jsonl"), fourteen_answers());
    put_file(path + "2.jsonl", fourteen_answers());
    std::string common = "OMP_NUM_THREADS=1 " + program() + " --data " + path + " --val " + path +
                         "2.jsonl --seq 128 --lr 1e-3 --schedule constant --sample-tokens 0 "
                         "--device cpu --layers 2 --heads 4 --channels 32 --batch-tokens 512 --steps 3 "
                         "--loss kto --beta 0.5 --undesirable-weight 0.5 ";
    auto numbers = [&](const std::string& layout) {
        std::string out = scratch("labels" + layout);
        Ran ran = shell(common + "--out '" + out + "' " + layout);
        EXPECT_EQ(ran.status, 0) << ran.text;
        EXPECT_HAS(ran.text, "14 conversations, 5 of them undesirable");

        // The figures of each step, then its reference points.
        std::vector<double> got, points;
        for (const nlohmann::json& j : logged(out, "loss"))
            for (const char* key : {"loss", "margin", "accuracy", "grad_norm"})
                got.push_back(j[key]);
        for (const nlohmann::json& j : logged(out, "kl")) points.push_back(j["kl"]);
        got.insert(got.end(), points.begin(), points.end());
        return got;
    };

    std::vector<double> expected = numbers("--micro-batch 4");
    ASSERT_EQ(expected.size(), 15u);
    EXPECT_EQ(expected[12], 0); // the policy still equals its reference
    EXPECT_GT(expected[13], 0.01);
    for (std::string layout :
         {"--micro-batch 1 --local-ranks 4 --pp 2 --zero 1 --verify-every 1",
          "--micro-batch 2 --local-ranks 2 --zero 3", "--micro-batch 2 --local-ranks 2 --tp 2",
          "--micro-batch 2 --local-ranks 2 --cp 2 --cp-method ring"}) {
        std::vector<double> got = numbers(layout);
        ASSERT_EQ(got.size(), 15u);
        for (size_t i = 0; i < got.size(); i++)
            EXPECT_NEAR(got[i], expected[i], 5e-5 * std::max(1.0, std::abs(expected[i])))
                << layout << i;
    }

    // The mean is one over answers, not over windows: the same in one window of all 14, but for
    // answers that the end of a shorter window cuts.
    std::vector<double> whole = numbers("--micro-batch 1 --seq 512");
    ASSERT_EQ(whole.size(), 15u);
    for (size_t i : {13, 14}) EXPECT_NEAR(whole[i] / expected[i], 1, 5e-3);

    // At first each answer has half of its weight.
    EXPECT_NEAR(expected[0], 0.5 * (9 * 1 + 5 * 0.5) / 14, 1e-6);
}
