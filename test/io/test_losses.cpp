// test_losses.cpp - what a run prints and logs beside each loss, against numbers computed apart
//   1. figures       loss, norm, margin, kl, entropy, mfu: their definitions, from other runs
//   2. looking       an evaluation or a sample changes no bit; validation is what --eval says
//   3. precisions    the first gradient norm of fp16, bf16 and fp8 is fp32's, to their rounding
//   4. skipped steps change nothing; router biases come back whole
//   A run with --lr 0 logs the loss of the weights as they are, so one conversation alone gives the
//   log-likelihood of its answer. Every number here is made by the program $TRAIN_GPT, but each is
//   compared with another path through it, or with a formula.
#include <cmath>
#include <cstring>
#include <regex>
#include "../harness/runs.h"

using nlohmann::json;

namespace {

// ----------------------------------------------------------------------------
// runs

const std::string SMALL = "--layers 2 --heads 4 --channels 32 --seq 192 --micro-batch 1 ";

// Run the program with these flags; a failure fails the test.
std::string train(const std::string& flags) {
    Ran ran = shell("OMP_NUM_THREADS=1 " + program() + " --device cpu --sample-tokens 0 " + flags);
    EXPECT_EQ(ran.status, 0) << flags << "\n" << ran.text;
    return ran.text;
}

// An empty folder's path.
std::string fresh(const std::string& name) {
    std::string path = scratch(name);
    fs::remove_all(path);
    return path;
}

// The numbers of an export: all of them, without names. Every export here is fp32.
std::vector<float> weights_of(const std::string& folder) {
    std::string bytes = read_file(folder + "/model.safetensors");
    uint64_t header = 0;
    if (bytes.size() < 8) return {};
    memcpy(&header, bytes.data(), 8);
    std::vector<float> numbers((bytes.size() - 8 - header) / 4);
    memcpy(numbers.data(), bytes.data() + 8 + header, numbers.size() * 4);
    return numbers;
}

// The length of the difference of two exports.
double distance(const std::string& one, const std::string& other) {
    std::vector<float> a = weights_of(one), b = weights_of(other);
    EXPECT_EQ(a.size(), b.size());
    EXPECT_GT(a.size(), 100u);
    double squares = 0;
    for (size_t i = 0; i < std::min(a.size(), b.size()); i++)
        squares += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    return std::sqrt(squares);
}

// ----------------------------------------------------------------------------
// data

std::string pair_line(const std::string& prompt, const std::string& chosen,
                      const std::string& rejected) {
    return json({{"prompt", prompt}, {"chosen", chosen}, {"rejected", rejected}}).dump() + "\n";
}
std::string label_line(const std::string& prompt, const std::string& answer, bool good) {
    return json({{"prompt", prompt}, {"completion", answer}, {"label", good}}).dump() + "\n";
}
std::string talk_line(const std::string& prompt, const std::string& answer) {
    return json({{"prompt", prompt}, {"completion", answer}}).dump() + "\n";
}

// Lines of a loss' data, `count` of them, which differ by `salt`. Answers have many lengths.
std::string lines_of(const std::string& loss, int count, const std::string& salt) {
    std::string lines;
    for (int i = 0; i < count; i++) {
        std::string prompt = "Say " + salt + std::to_string(i);
        std::string good(size_t(3 + i * 5 % 17), char('a' + i % 26));
        std::string bad = salt + std::string(size_t(2 + i * 7 % 13), char('A' + i % 26));
        if (loss == "kto")
            lines += label_line(prompt, good, i % 3 > 0);
        else if (loss == "sft" || loss == "distill")
            lines += talk_line(prompt, good);
        else if (loss == "grpo")
            lines += json({{"prompt", prompt}, {"answer", "^[a-z]"}}).dump() + "\n";
        else if (loss == "lm")
            lines += prompt + ": " + good + "\n";
        else
            lines += pair_line(prompt, good, bad);
    }
    return lines;
}

// A file of a loss' data, and the flags that name it.
std::string data_of(const std::string& loss, int count, const std::string& salt) {
    std::string name = loss + salt + std::to_string(count) + (loss == "lm" ? ".txt" : ".jsonl");
    return put_file(scratch(name), lines_of(loss, count, salt));
}

// A small teacher, made once.
std::string teacher() {
    static const std::string folder = [] {
        std::string made = fresh("teacher");
        train(SMALL + "--model tiny-llama --kv-heads 2 --ffn 48 --steps 0 --seed 5 --export " + made);
        return made;
    }();
    return folder;
}

// Flags of a loss with its data: `count` lines to train on, and others to validate with.
std::string loss_flags(const std::string& loss, int count, int validated) {
    std::string flags = "--loss " + loss + " --data " + data_of(loss, count, "x");
    if (validated) flags += " --val " + data_of(loss, validated, "y");
    if (loss == "distill") flags += " --teacher " + teacher();
    if (loss == "grpo") flags += " --reward regex --answer-tokens 4 --group 2";
    return flags + " ";
}

// The mean of -log p over one answer's tokens, and how many there are, by weights that `model` names.
struct Answer {
    double mean = 0;
    double tokens = 0;
    double sum() const { return mean * tokens; }
};
Answer answer_of(const std::string& model, const std::string& prompt, const std::string& answer) {
    std::string data = put_file(scratch("one.jsonl"), talk_line(prompt, answer));
    put_file(scratch("one_val.jsonl"), talk_line(prompt, answer));
    std::string out = fresh("one");
    std::string text = train(model + "--loss sft --data " + data + " --val " +
                             scratch("one_val.jsonl") + " --steps 1 --lr 0 --warmup 0 --out " + out);
    std::smatch count;
    EXPECT_TRUE(std::regex_search(text, count, std::regex("(\\d+) tokens of answers"))) << text;
    return {logged(out).at(0)["loss"], std::stod(count.str(1))};
}

double minus_log_sigmoid(double x) { return std::log1p(std::exp(-x)); }

} // namespace

// ----------------------------------------------------------------------------
// 1. figures

// SimPO, ORPO and their margin and accuracy for a batch of two pairs, from the log-likelihoods of
// the four answers, each alone in a run of its own. Sums in float are right to a millionth.
TEST(Losses, FiguresOfPairsAreTheirDefinitions) {
    const char* pairs[2][3] = {{"Say one", "one", "two and three"}, {"Say two", "two two", "one"}};
    std::string lines;
    double means[2][2];
    for (int i = 0; i < 2; i++) {
        lines += pair_line(pairs[i][0], pairs[i][1], pairs[i][2]);
        for (int k = 0; k < 2; k++)
            means[i][k] = -answer_of(SMALL, pairs[i][0], pairs[i][1 + k]).mean;
    }
    std::string data = put_file(scratch("two.jsonl"), lines);
    put_file(scratch("two_val.jsonl"), lines);

    for (std::string loss : {"simpo", "orpo"}) {
        double beta = loss == "simpo" ? 2 : 0.1;
        double margin = 0, accuracy = 0, sum = 0;
        for (auto [won, lost] : means) {
            margin += beta * (won - lost) / 2;
            accuracy += (won > lost) / 2.0;
            double odds = won - std::log(1 - std::exp(won)) - lost + std::log(1 - std::exp(lost));
            sum += loss == "simpo" ? minus_log_sigmoid(beta * (won - lost) - 0.5) / 2
                                   : (-won + beta * minus_log_sigmoid(odds)) / 2;
        }

        // The step's figures, and validation's, which are of the same weights.
        std::string out = fresh("pairs");
        train(SMALL + "--loss " + loss + " --data " + data + " --val " + scratch("two_val.jsonl") +
              " --lr 0 --steps 1 --out " + out);
        json step = logged(out).at(0), val = logged(out, "val_loss").at(0);
        EXPECT_NEAR(step["loss"], sum, 2e-6) << loss;
        EXPECT_NEAR(step["margin"], margin, 2e-6) << loss;
        EXPECT_EQ(step["accuracy"], accuracy) << loss;
        EXPECT_NEAR(val["val_loss"], sum, 2e-6) << loss;
        EXPECT_NEAR(val["margin"], margin, 2e-6) << loss;
        EXPECT_EQ(val["accuracy"], accuracy) << loss;
        EXPECT_EQ(val["val_tokens"], 2) << loss;
    }
}

// DPO and IPO at their second step: the margin over the starting weights, from the log-likelihoods
// by these weights and by those that the first step left.
TEST(Losses, FiguresOfPairsFollowTheirReference) {
    const char* pairs[2][3] = {{"Say one", "one", "two and three"}, {"Say two", "two two", "one"}};
    std::string lines;
    for (auto& pair : pairs) lines += pair_line(pair[0], pair[1], pair[2]);
    std::string data = put_file(scratch("two.jsonl"), lines);
    put_file(scratch("two_val.jsonl"), lines);

    for (std::string loss : {"dpo", "ipo"}) {
        std::string moved = fresh("moved"), out = fresh("dpo");
        std::string common = SMALL + "--loss " + loss + " --data " + data + " --val " +
                             scratch("two_val.jsonl") +
                             " --lr 3e-3 --warmup 0 --schedule constant --beta 0.3 ";
        train(common + "--steps 1 --export " + moved);
        train(common + "--steps 2 --out " + out);

        double margin = 0, sum = 0;
        for (auto& pair : pairs) {
            double lead[2];
            for (int k = 0; k < 2; k++) {
                Answer now = answer_of("--model " + moved + " --seq 192 --micro-batch 1 ", pair[0],
                                       pair[1 + k]);
                Answer then = answer_of(SMALL, pair[0], pair[1 + k]);
                lead[k] = (then.sum() - now.sum()) / (loss == "ipo" ? now.tokens : 1);
            }
            double d = lead[0] - lead[1], off = d - 1 / (2 * 0.3);
            margin += 0.3 * d / 2;
            sum += (loss == "ipo" ? off * off : minus_log_sigmoid(0.3 * d)) / 2;
        }
        json step = logged(out).at(1);
        EXPECT_GT(std::fabs(margin), 1e-3);
        EXPECT_NEAR(step["margin"], margin, 2e-5) << loss;
        EXPECT_NEAR(step["loss"], sum, 2e-5) << loss;
    }
}

// KTO's reference point at the second step: the mean drift of log p over two questions, each with
// the other's answer; the loss of each answer follows from it.
TEST(Losses, FiguresOfLabelsAreTheirDefinitions) {
    const char* lines[2][2] = {{"Say two", "two two"}, {"Sky?", "blue, so blue"}};
    std::string text;
    for (int i = 0; i < 2; i++) text += label_line(lines[i][0], lines[i][1], i != 1);
    std::string data = put_file(scratch("labels.jsonl"), text);
    put_file(scratch("labels_val.jsonl"), text);

    std::string moved = fresh("moved"), out = fresh("kto");
    std::string common = SMALL + "--loss kto --data " + data + " --val " +
                         scratch("labels_val.jsonl") +
                         " --lr 3e-3 --warmup 0 --schedule constant --beta 0.4 ";
    train(common + "--steps 1 --export " + moved);
    train(common + "--steps 2 --out " + out);
    auto drift = [&](const char* prompt, const char* answer) {
        std::string now = "--model " + moved + " --seq 192 --micro-batch 1 ";
        return answer_of(SMALL, prompt, answer).sum() - answer_of(now, prompt, answer).sum();
    };

    double z = 0;
    for (int i = 0; i < 2; i++) z += drift(lines[i][0], lines[1 - i][1]) / 2;
    double sum = 0, margin = 0;
    for (int i = 0; i < 2; i++) {
        double u = (i == 1 ? -1 : 1) * 0.4 * (drift(lines[i][0], lines[i][1]) - std::max(z, 0.0));
        sum += 1 / (1 + std::exp(u)) / 2;
        margin += u / 2;
    }
    std::vector<json> steps = logged(out);
    EXPECT_GT(z, 0.01);
    EXPECT_EQ(steps.at(0)["kl"], 0);
    EXPECT_NEAR(steps.at(1)["kl"], z, 2e-5);
    EXPECT_NEAR(steps.at(1)["margin"], margin, 2e-5);
    EXPECT_NEAR(steps.at(1)["loss"], sum, 2e-5);
}

// Where every answer has the same reward, a step's loss is beta times the KL divergence that it
// logs; decay alone moves the weights. New weights guess, so the entropy is that of 256 bytes.
// Answers are of one token, so that none reaches its end in time: all are cut, but for an end at once.
TEST(Losses, FiguresOfSampledAnswersAreTheirDefinitions) {
    std::string data = put_file(scratch("all.jsonl"), R"({"prompt": "a", "answer": "never"})" "\n");
    std::string out = fresh("grpo");
    train(SMALL + "--loss grpo --reward regex --data " + data +
          " --seq 32 --batch-tokens 2048 --micro-batch 8 --group 4 --answer-tokens 3 --beta 0.7 "
          "--lr 0.5 --weight-decay 1.5 --warmup 0 --schedule constant --steps 2 --out " + out);
    std::vector<json> steps = logged(out);
    ASSERT_EQ(steps.size(), 2u);
    for (const json& step : steps) {
        EXPECT_NEAR(step["loss"], 0.7 * step["kl"].get<double>(), 1e-7);
        EXPECT_EQ(step["reward"], 0);
        EXPECT_EQ(step["equal_groups"], 1);
        EXPECT_NEAR(step["entropy"], std::log(256), 0.1);
        EXPECT_LE(step["length"], 3);
        EXPECT_GT(step["length"], 2.8); // an end comes once in 256 tokens
    }
    EXPECT_EQ(steps[0]["kl"], 0);
    EXPECT_GT(steps[1]["kl"], 1e-4);
}

// The norm is the length of the gradient: plain gradient descent moves the weights by the rate times
// it, or times the bound of --clip where that is less, whatever ranks share.
TEST(Losses, NormAndClipAreThoseOfTheMove) {
    std::string common = SMALL + loss_flags("lm", 60, 60) +
                         "--seq 64 --batch-tokens 256 --optimizer sgd --lr 0.5 --weight-decay 0 "
                         "--warmup 0 --schedule constant ";
    std::string start = fresh("start");
    train(common + "--steps 0 --export " + start);
    for (std::string layout :
         {"", "--micro-batch 2", "--local-ranks 2 --zero 3", "--local-ranks 2 --tp 2",
          "--local-ranks 2 --pp 2", "--local-ranks 2 --cp 2"})
        for (std::string clip : {"0", "0.25"}) {
            std::string out = fresh("norm"), moved = fresh("moved");
            train(common + layout + " --clip " + clip + " --steps 1 --out " + out + " --export " +
                  moved);
            double norm = logged(out).at(0)["grad_norm"];
            double wanted = 0.5 * (clip == "0" ? norm : 0.25);
            ASSERT_GT(norm, 0.3);
            EXPECT_NEAR(distance(start, moved), wanted, 1e-4 * wanted) << layout << clip;
        }
}

// mfu is the model's arithmetic of the step's tokens over its time and the peak that the run prints,
// whatever ranks share. FLOPs a token are 6 a parameter and 6 L C T.
TEST(Losses, UtilisationIsThatOfAllTokens) {
    // By hand: both tables, the last norm, and blocks of 12 C^2 + 13 C.
    double parameters = 256 * 32 + 1024 * 32 + 2 * 32 + 2 * (12 * 32 * 32 + 13 * 32);
    double flops = 6 * parameters + 6 * 2 * 32 * 64;
    for (std::string layout :
         {"", "--micro-batch 2", "--local-ranks 2", "--local-ranks 2 --cp 2",
          "--local-ranks 4 --cp 4 --cp-method ring", "--local-ranks 2 --tp 2",
          "--local-ranks 2 --pp 2"}) {
        std::string out = fresh("mfu");
        std::string text = train(SMALL + loss_flags("lm", 60, 60) +
                                 "--seq 64 --batch-tokens 256 --steps 2 --out " + out + " " + layout);
        std::smatch peak;
        ASSERT_TRUE(std::regex_search(text, peak, std::regex("against (\\d+) GFLOP/s"))) << text;

        EXPECT_EQ(logged(out, "flops_per_token").at(0)["flops_per_token"], flops);
        for (const json& step : logged(out)) {
            double rate = 256 / step["ms"].get<double>() * 1e3;
            EXPECT_NEAR(step["tokens_per_second"], rate, 1e-9 * rate);
            double implied = flops * rate / step["mfu"].get<double>() / 1e9;
            EXPECT_NEAR(implied, std::stod(peak.str(1)), 0.51) << layout;
            EXPECT_EQ(step["tokens"], 256 * step["step"].get<int>());
        }
    }
}

// ----------------------------------------------------------------------------
// 2. looking

// The lines of validation, each from "val loss" on.
std::vector<std::string> validations(const std::string& text) {
    std::vector<std::string> found;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);)
        if (size_t at = line.find("val loss "); at != std::string::npos && !has(line, "best val"))
            found.push_back(line.substr(at));
    return found;
}

// A run that evaluates and samples after every step has the losses and the weights of one that
// never looks: for each loss, and in each precision. Scales of eight bits that look back need some
// steps until a number that an evaluation has left among them counts.
TEST(Losses, LookingChangesNoBit) {
    auto compare = [](const std::string& flags) {
        // Run twice.
        std::string blind = fresh("blind"), looks = fresh("looks");
        std::string common = SMALL + flags + " --lr 3e-3 --warmup 0 --steps 6 --out ";
        train(common + blind + " --export " + blind + "_x");
        train(common + looks + " --export " + looks + "_x --eval-every 1 --sample-every 1 "
              "--sample-tokens 3");

        // Compare the logs, and the exports.
        EXPECT_EQ(logged(looks, "val_loss").size(), 6u) << flags;
        std::vector<json> one = logged(blind), other = logged(looks);
        for (size_t i = 0; i < one.size(); i++) {
            EXPECT_EQ(one[i]["loss"], other.at(i)["loss"]) << flags;
            EXPECT_EQ(one[i]["grad_norm"], other[i]["grad_norm"]) << flags;
        }
        EXPECT_TRUE(read_file(blind + "_x/model.safetensors") ==
                    read_file(looks + "_x/model.safetensors")) << flags;
        for (std::string path : {blind, looks}) fs::remove_all(path + "_x");
    };

    // Each loss, then each precision, then some of both.
    for (std::string loss : {"sft", "dpo", "ipo", "simpo", "orpo", "kto", "distill"})
        compare((loss == "distill" ? "--model tiny-llama --kv-heads 2 --ffn 48 " : "") +
                loss_flags(loss, 12, 9));
    const std::string text = loss_flags("lm", 200, 100) + "--precision ";
    std::string experts = "--model tiny-moe --kv-heads 2 --ffn 16 --experts 4 ";
    for (std::string how : {"fp32", "bf16", "fp16 --loss-scale 1024"})
        for (std::string model : {"", "--lora 4 ", experts.c_str()}) compare(model + text + how);
    for (const char* how : {"block", "tensor", "delayed", "mx", "nvfp4"})
        compare(text + "bf16 --fp8 " + how);
    compare(loss_flags("dpo", 12, 9) + "--precision bf16 --lora 4 --local-ranks 2 --micro-batch 1");
    compare(loss_flags("kto", 12, 9) + "--precision fp16 --ema 0.5 --loss-scale 1024");
}

// The validation at a run's end is what --eval says of the checkpoint, to the last printed digit,
// for each loss: so it compares with references of its own windows, not of training's.
TEST(Losses, ValidationIsThatOfEval) {
    for (std::string loss : {"lm", "sft", "dpo", "ipo", "simpo", "orpo", "kto", "distill"}) {
        std::string model = loss == "distill" ? "--model tiny-llama --kv-heads 2 --ffn 48 " : "";
        for (std::string how : {"", "--lora 4 ", "--local-ranks 2 "}) {
            std::string out = fresh("val"), flags = SMALL + model + loss_flags(loss, 40, 14) + how;
            std::string text = train(flags + "--lr 1e-2 --warmup 0 --steps 4 --out " + out);
            std::vector<std::string> end = validations(text);
            ASSERT_EQ(end.size(), 1u) << text;
            EXPECT_EQ(validations(train(flags + "--resume --eval --out " + out)), end) << loss << how;

            // Weights that stay are worth what the formula says of no difference.
            std::string still = train(flags + "--lr 0 --steps 1 --eval-every 1");
            std::string exact = loss == "dpo" ? "0.6931 | margin 0.0000"
                                : loss == "ipo" ? "25.0000 | margin 0.0000"
                                : loss == "kto" ? "0.5000 | margin 0.0000" : "";
            EXPECT_HAS(validations(still).at(0), "val loss " + exact);
        }
    }
}

// Windows that do not fill a last batch count once and no others do: the validation of three windows
// is the same along every axis.
TEST(Losses, UnevenLastBatchesCountEachWindowOnce) {
    for (std::string loss : {"lm", "sft", "dpo", "kto"}) {
        std::string first;
        double wanted = 0;

        // The first layout, of one rank, says what all others must.
        for (std::string layout :
             {"", "--micro-batch 2 ", "--local-ranks 2 --micro-batch 2 ",
              "--local-ranks 4 --cp 2 --micro-batch 2 ", "--local-ranks 4 --cp 4 --cp-method ring ",
              "--local-ranks 4 --cp 2 --cp-method ulysses ", "--local-ranks 4 --tp 2 ",
              "--local-ranks 4 --pp 2 --micro-batch 2 "}) {
            // --eval-tokens takes three windows; pairs and answers fill them as they come.
            std::string text = train(SMALL + loss_flags(loss, 40, loss == "lm" ? 100 : 9) +
                                     "--seq 64 --eval --eval-tokens 192 " + layout);
            std::vector<std::string> found = validations(text);
            ASSERT_EQ(found.size(), 1u) << text;

            std::string count = found[0].substr(found[0].rfind('|'));
            double value = std::stod(found[0].substr(9));
            if (first.empty()) first = count, wanted = value;
            EXPECT_EQ(count, first) << loss << " " << layout;
            EXPECT_NEAR(value, wanted, 2e-4) << loss << " " << layout;
        }
    }
}

// ----------------------------------------------------------------------------
// 3. precisions

// The first norm is fp32's, beside each loss and technique: within a hundredth in fp16, whose loss
// scale leaves no trace, a thirtieth in bf16, and an eighth where products read eight bits.
TEST(Losses, FirstNormsAreThoseOfFp32) {
    std::string llama = "--model tiny-llama --kv-heads 2 --ffn 48 ";
    std::vector<std::string> cases = {
        loss_flags("lm", 200, 100),
        "--model tiny-moe --kv-heads 2 --ffn 16 --experts 4 --balance 3 --z-loss 1 " +
            loss_flags("lm", 200, 100),
        "--model " + ROOT + "/dev/golden/deepseek-v3-tiny --scratch --vocab 256 --layers 0 --heads 0 "
            "--channels 0 --seq 24 --balance 3 --z-loss 1 --router-bias-rate 0.1 " +
            loss_flags("lm", 200, 100),
        llama + "--lora 4 " + loss_flags("lm", 200, 100),
        llama + "--prefix 3 " + loss_flags("lm", 200, 100),
    };
    size_t wide = cases.size() - 1; // those after the first have no products of eight bits
    cases.push_back(llama + loss_flags("distill", 12, 9));
    for (const char* loss : {"sft", "dpo", "ipo", "simpo", "orpo", "kto"})
        cases.push_back(loss_flags(loss, 12, 9));

    for (size_t i = 0; i < cases.size(); i++) {
        const std::string& flags = cases[i];
        auto first_norm = [&](const std::string& how) {
            std::string out = fresh("first");
            train(SMALL + flags + " --micro-batch 2 --steps 1 --out " + out + " --precision " + how);
            return logged(out).at(0).value("grad_norm", NAN);
        };
        double norm = first_norm("fp32");
        ASSERT_GT(norm, 0) << flags;
        EXPECT_NEAR(first_norm("fp16 --loss-scale 1024"), norm, 0.01 * norm) << flags;
        EXPECT_NEAR(first_norm("bf16"), norm, 0.033 * norm) << flags;

        // Scales of eight bits.
        for (const char* how : {"block", "tensor", "delayed", "mx", "nvfp4"})
            if (i == 0 || i > wide)
                EXPECT_NEAR(first_norm(std::string("bf16 --fp8 ") + how), norm, 0.125 * norm)
                    << how << " " << flags;
    }
}

// ----------------------------------------------------------------------------
// 4. skipped steps, and router biases

// An fp16 step that overflows changes nothing: the masters, and with them a router's biases, are
// those of a run without steps, to the bit.
TEST(Losses, ASkippedStepChangesNothing) {
    std::string v3 = "--model " + ROOT + "/dev/golden/deepseek-v3-tiny --scratch --vocab 256 "
                     "--seq 24 --micro-batch 1 " + loss_flags("lm", 200, 100);
    std::string start = fresh("start"), moved = fresh("moved");
    train(v3 + "--steps 0 --export " + start);
    std::string text = train(v3 + "--steps 2 --warmup 0 --precision fp16 --router-bias-rate 0.1 "
                             "--loss-scale 1073741824 --export " + moved);
    EXPECT_HAS(text, "step 2: gradients overflow fp16");
    EXPECT_GT(weights_of(start).size(), 1000u);
    EXPECT_TRUE(weights_of(start) == weights_of(moved));
}

// A run of DeepSeek-V3's kind, whose router biases move by a thousandth a step, goes on to the same
// bits in bf16: the biases come back as floats, not as the rounded weights that kernels read.
TEST(Losses, RouterBiasesComeBackWhole) {
    std::string v3 = "--model " + ROOT + "/dev/golden/deepseek-v3-tiny --scratch --vocab 256 "
                     "--seq 24 --micro-batch 2 --warmup 0 --schedule constant --precision bf16 "
                     "--router-bias-rate 0.001 " + loss_flags("lm", 200, 100);
    std::string whole = fresh("whole"), parts = fresh("parts");
    train(v3 + "--steps 6 --out " + whole + " --export " + whole + "_x");
    train(v3 + "--steps 3 --out " + parts);
    train("--resume --steps 6 --out " + parts + " --export " + parts + "_x");
    std::vector<float> one = weights_of(whole + "_x");
    EXPECT_GT(one.size(), 1000u);
    EXPECT_TRUE(one == weights_of(parts + "_x"));
}
