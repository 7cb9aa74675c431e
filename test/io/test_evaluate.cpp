// test_evaluate.cpp - files to texts to candidates to scores: each against values written here, and
// log-likelihoods against the logits that generation computes, in any layout
#include <mutex>
#ifdef _OPENMP
#include <omp.h>
#endif
#include "../../llmc/io/core.h"
#include "../../llmc/io/likelihood.h"
#include "../../llmc/io/generate.h"
#include "../../llmc/io/huggingface.h"
#include "../harness/testing.h"
#include "../step/small_models.h"

using namespace llmc;

namespace {

std::string write(const std::string& name, const std::string& bytes) {
    return put_file(scratch(name), bytes);
}

// A question's candidates as context|completion in bytes, one a line. A * marks the right one.
std::string text_of(const Evaluation& e, const TaskQuestion& q) {
    std::string text;
    for (size_t i = q.first; i < q.first + q.count; i++) {
        const Candidate& c = e.candidates[i];
        std::string all;
        for (int token : c.tokens) all += char(token);
        text += all.substr(0, all.size() - c.scored) + "|" + all.substr(all.size() - c.scored) +
                (int(i - q.first) == q.label ? "*\n" : "\n");
    }
    return text;
}

// All questions of a file, with one token a byte.
std::string texts_of_file(const std::string& task, const std::string& name,
                          const std::string& bytes) {
    Evaluation e;
    std::string wrong = read_tasks(&e, task + "=" + write(name, bytes), Tokenizer(), 1 << 20), all;
    if (!wrong.empty()) return wrong;
    for (const TaskQuestion& q : e.tasks.at(0).questions) all += text_of(e, q);
    return all;
}

// ----------------------------------------------------------------------------
// files

TEST(Files, HellaSwagAsPublished) {
    const char* line =
        R"({"ind": 4, "activity_label": "Removing ice", "ctx_a": "A [header] man  is [step] out. [title] Cold", )"
        R"("ctx_b": "then HE is", "ctx": "unused", "endings": [" wipes [substeps] it.", "a", "b", "[title] c [d"], )"
        R"("label": LABEL, "split": "val"})";
    for (const char* label : {"2", "\"2\""})
        EXPECT_EQ(texts_of_file("hellaswag", "h.jsonl", replace_all(line, "LABEL", label) + "\n"),
                  "Removing ice: A man is out.. Cold Then he is| wipes it.\n"
                  "Removing ice: A man is out.. Cold Then he is| a\n"
                  "Removing ice: A man is out.. Cold Then he is| b*\n"
                  "Removing ice: A man is out.. Cold Then he is|  c [d\n")
            << label;
}

TEST(Files, HellaSwagInSixLines) {
    EXPECT_EQ(texts_of_file("hellaswag", "h.txt",
                            "Roof: A man. he\n3\nis.\nwas [x]\n  be\nd\r\nNext\n0\na\nb\nc\nd"),
              "Roof: A man. he| is.\nRoof: A man. he| was [x]\nRoof: A man. he|   be\n"
              "Roof: A man. he| d*\nNext| a*\nNext| b\nNext| c\nNext| d\n");
}

TEST(Files, ArcInBothForms) {
    std::string want = "Question: Why?\nAnswer:| sun\nQuestion: Why?\nAnswer:| moon*\n";
    EXPECT_EQ(texts_of_file("arc-easy", "a.jsonl",
                            R"({"id":"x","question":{"stem":"Why?","choices":[)"
                            R"({"text":"sun","label":"A"},{"text":"moon","label":"B"}]},)"
                            R"("answerKey":"B"})"),
              want);
    EXPECT_EQ(texts_of_file("arc-challenge", "a.jsonl",
                            R"({"id":"x","question":"Why?","choices":{"text":["sun","moon"],)"
                            R"("label":["1","2"]},"answerKey":"2"})"),
              want);
}

TEST(Files, PiqaWithLabelsInTheLineAndBeside) {
    std::string want = "Question: g\nAnswer:| one\nQuestion: g\nAnswer:| two*\n";
    EXPECT_EQ(texts_of_file("piqa", "in_line.jsonl",
                            R"({"goal":"g","sol1":"one","sol2":"two","label":1})"),
              want);
    write("beside-labels.lst", "1\n0\n");
    std::string line = R"({"goal":"g","sol1":"one","sol2":"two"})";
    EXPECT_EQ(texts_of_file("piqa", "beside.jsonl", line + "\n" + line + "\n"),
              want + "Question: g\nAnswer:| one*\nQuestion: g\nAnswer:| two\n");
}

// The contexts differ, and the part that is scored is the same.
TEST(Files, Winogrande) {
    EXPECT_EQ(texts_of_file("winogrande", "w.jsonl",
                            R"({"sentence":"Ann met Bo and _ was  late. ","option1":"Ann",)"
                            R"("option2":"Bo","answer":"2"})"),
              "Ann met Bo and Ann| was  late.\nAnn met Bo and Bo| was  late.*\n");
}

TEST(Files, LambadaInBothForms) {
    std::string want = "he said to| Mary*\na \"b\"| c.*\n";
    EXPECT_EQ(texts_of_file("lambada", "l.jsonl",
                            "{\"text\": \"he said to Mary\"}\n{\"text\": \"a \\\"b\\\" c.\"}\n"),
              want);
    EXPECT_EQ(texts_of_file("lambada", "l.txt", "he said to Mary\na \"b\" c.\n"), want);
}

TEST(Files, SeveralTasksShareTheCandidates) {
    Evaluation e;
    ASSERT_EQ(read_tasks(&e,
                         "lambada=" + write("l.txt", "a b\nc d\n") + ",piqa=" +
                             write("p.jsonl", R"({"goal":"g","sol1":"a","sol2":"bcd","label":0})"),
                         Tokenizer(), 100),
              "");
    ASSERT_EQ(e.tasks.size(), 2u);
    EXPECT_EQ(e.tasks[1].name, "piqa");

    EXPECT_EQ(text_of(e, e.tasks[0].questions[1]), "c| d*\n");
    EXPECT_EQ(text_of(e, e.tasks[1].questions[0]),
              "Question: g\nAnswer:| a*\nQuestion: g\nAnswer:| bcd\n");

    EXPECT_EQ(e.candidates[3].tokens.size(), strlen("Question: g\nAnswer: bcd"));
}

// Each refusal begins with the flag and names the file and the line.
TEST(Files, WhatIsWrongIsSaidWithFileAndLine) {
    auto refuses = [](const std::string& value, const std::string& says, size_t P = 100) {
        Evaluation e;
        std::string wrong = read_tasks(&e, value, Tokenizer(), P);
        EXPECT_NE(wrong.find(says), std::string::npos) << value << ": " << wrong;
        EXPECT_EQ(wrong.rfind("--eval", 0), 0u) << wrong;
    };
    auto bad = [&](const std::string& task, const std::string& bytes, const std::string& says) {
        std::string path = write(task + ".bad", bytes);
        refuses(task + "=" + path, path + says);
    };

    // Values of the flag.
    refuses("hellaswag", "wants name=FILE, not 'hellaswag'");
    refuses("helaswag=x", "no task 'helaswag': did you mean hellaswag?");
    refuses("x=y", "tasks: core, hellaswag, arc-easy, arc-challenge, piqa, winogrande, lambada");
    refuses("piqa=/no/such", "/no/such: No such file");
    refuses("piqa=" + testing::TempDir(), "is no file but a folder");

    std::string passage = write("l.txt", "a bcd\n");
    refuses("lambada=" + passage + ",lambada=" + passage, "lambada is there twice");
    refuses("lambada=" + passage, passage + ":1: a completion has 4 tokens, the model 3", 3);

    // Passages, and HellaSwag in six lines.
    bad("lambada", "", ": is empty");
    bad("lambada", "a b\n\nc d\n", ":2: is empty");
    bad("lambada", "a b \n", ":1: a completion is empty");
    bad("lambada", "one\n", ":1: a context is empty");
    bad("lambada", "{\"text\": 3}\n", ":1: wants a text \"text\"");
    bad("hellaswag", "a\n0\n1\n2\n3\n4\na\n0\n1\n2\n3\n", ":7: wants six lines");
    bad("hellaswag", "a\n4\n1\n2\n3\n4\n", ":1: label 4 is none of the 4 choices");
    bad("hellaswag", "a\nx\n1\n2\n3\n4\n", ":1: wants a number \"label\", not 'x'");

    // HellaSwag in JSON.
    std::string h =
        R"({"activity_label":"a","ctx_a":"b","ctx_b":"c","endings":["d","e"],"label":0})";
    bad("hellaswag", h + "\n{\n", ":2: is no JSON object");
    bad("hellaswag", h + "\n" + replace_all(h, "ctx_b", "ctx_c"), ":2: wants a text \"ctx_b\"");
    bad("hellaswag", replace_all(h, "[\"d\",\"e\"]", "[1]"),
        ":1: wants a list of texts \"endings\"");
    bad("hellaswag", replace_all(h, ":0", ":2"), ":1: label 2 is none of the 2 choices");
    bad("hellaswag", replace_all(h, ":0", ":-1"), ":1: wants a number \"label\", not '-1'");
    bad("hellaswag", replace_all(h, ",\"label\":0", ""), ":1: wants a text \"label\"");
    bad("hellaswag", replace_all(h, "\"e\"", "\"[e]\""), ":1: a completion is empty");

    // PIQA's labels are in the line or in a file beside it.
    bad("piqa", "a b\n", ":1: is no JSON object");
    bad("piqa", R"({"goal":"g","sol1":"a","sol2":"b"})", ":1: has no \"label\", and");
    write("short-labels.lst", "0\n");
    std::string two = write("short.jsonl", "{\"goal\":\"g\"}\n{}\n");
    refuses("piqa=" + two, "short-labels.lst: has 1 labels for the 2 questions");

    // Winogrande, then ARC.
    bad("winogrande", R"({"sentence":"a b","option1":"a","option2":"b","answer":"1"})",
        ":1: wants a _ in \"sentence\"");
    bad("winogrande", R"({"sentence":"a _ b","option1":"a","option2":"b","answer":"3"})",
        ":1: label 2 is none of the 2");
    bad("winogrande", R"({"sentence":"a _","option1":"a","option2":"b","answer":"1"})",
        ":1: a completion is empty");

    std::string a =
        R"({"question":"q","choices":{"text":["s","m"],"label":["A","B"]},"answerKey":"C"})";
    bad("arc-easy", a, ":1: answerKey 'C' is none of the labels of the 2 choices");
    bad("arc-easy", replace_all(a, "[\"A\",\"B\"]", "[\"A\",\"B\",\"C\"]"), ":1: answerKey 'C'");
    bad("arc-easy", replace_all(a, "choices", "chances"), ":1: wants a list of texts");
    bad("arc-easy", R"({"question":{"stem":"q","choices":["A"]},"answerKey":"A"})",
        ":1: wants a text");
}

// Cut a line at any length, and change any byte of it: a reader refuses it or reads it,
// and does nothing worse.
TEST(Files, AnyBytesAreReadOrRefused) {
    std::string line =
        R"({"activity_label":"a","ctx_a":"[b]","ctx_b":"c","endings":["d [x","e"],"label":0,)"
        R"("question":{"stem":"s","choices":[{"text":"t","label":"A"}]},"answerKey":"A",)"
        R"("goal":"g","sol1":"h","sol2":"i","sentence":"a _ b","option1":"o","option2":"p",)"
        R"("answer":"1","text":"a b"})";
    for (const TaskKind& kind : task_kinds()) {
        int read = 0;
        for (size_t i = 0; i <= 2 * line.size(); i += 3) {
            std::string bytes = line.substr(0, std::min(i, line.size()));
            if (i > line.size())
                bytes[i - line.size() - 1] = "\"[{:,}]\n\x80"[random_block(3, 1, i)[0] % 9];
            Evaluation e;
            read += read_tasks(&e, std::string(kind.name) + "=" + write("any", bytes), Tokenizer(),
                               100) == "";
        }
        EXPECT_GT(read, 20) << kind.name; // bytes that a reader does not look at may be anything
    }
}

// ----------------------------------------------------------------------------
// texts and tokens

TEST(Texts, WhiteSpaceAndLettersAsPythonHasThem) {
    EXPECT_EQ(trimmed(" \t\n\v\f\r\x1c a b\u00a0\u2003\u3000 "), "a b");
    EXPECT_EQ(trimmed("\u200b"), "\u200b"); // a zero-width space is not white space
    EXPECT_EQ(trimmed(" \u0085\u2028 "), "");

    EXPECT_EQ(capitalize("hE SAID"), "He said");
    EXPECT_EQ(capitalize(""), "");
    EXPECT_EQ(capitalize("1A"), "1a");

    EXPECT_EQ(count_characters("a\u00e9\u20ac\U0001f600"), 4u);
    EXPECT_EQ(without_marks(" a [b][c] d [title] e   f "), "a d. e  f");
    EXPECT_EQ(without_marks("[a\nb] [c [d] e]"), "[a\nb] e]"); // a mark does not span lines
}

TEST(Texts, TokensOfContextAndCompletion) {
    Tokenizer t;
    auto made = [&](const char* context, const char* completion, size_t P = 100) {
        Candidate c;
        EXPECT_EQ(make_candidate(&c, t, {context, completion}, P), "");
        return c;
    };
    typedef std::vector<int> Tokens;

    Candidate c = made("ab", " cd");
    EXPECT_EQ(c.tokens, (Tokens{'a', 'b', ' ', 'c', 'd'}));
    EXPECT_EQ(c.scored, 3u);
    EXPECT_EQ(c.characters, 2u);

    c = made("ab \n", " \u00e9"); // white space moves to the completion, and does not count there
    EXPECT_EQ(c.scored, 5u);
    EXPECT_EQ(c.characters, 1u);
    c = made("abc", " de", 4); // the last 5 of 6 tokens: 4 inputs, and the target of the last
    EXPECT_EQ(c.tokens, (Tokens{'b', 'c', ' ', 'd', 'e'}));
    EXPECT_EQ(c.scored, 3u);
    EXPECT_EQ(made("abc", " de", 3).tokens, (Tokens{'c', ' ', 'd', 'e'}));

    // An empty context is the token that begins or ends a text.
    t.eot = 256;
    EXPECT_EQ(made("", " a").tokens, (Tokens{256, ' ', 'a'}));
    EXPECT_EQ(made(" ", " a").scored, 3u);
    EXPECT_EQ(made("b", " a").tokens, (Tokens{'b', ' ', 'a'}));
    t.bos = 257;
    EXPECT_EQ(made("", " a").tokens, (Tokens{257, ' ', 'a'}));
    EXPECT_EQ(made("b", " a").tokens, (Tokens{257, 'b', ' ', 'a'}));
    EXPECT_EQ(made("b", " a").scored, 2u);
}

// Where the completion continues the context's last word, both are encoded together. The cut is
// where the context's own number of tokens says.
TEST(Texts, TokensAreThoseOfBothTogether) {
    NEEDS_FIXTURES();
    Tokenizer t;
    ASSERT_EQ(tokenizer_open(&t, FIXTURES + "/tokenizers/gpt2"), "");
    Candidate c;
    ASSERT_EQ(make_candidate(&c, t, {"Hello wor", "ld again"}, 100), "");
    std::vector<int> whole = encode(t, "Hello world again"), context = encode(t, "Hello wor");
    EXPECT_EQ(c.tokens, whole);
    EXPECT_EQ(c.scored, whole.size() - context.size());
    EXPECT_NE(make_candidate(&c, t, {"Hello wor", "ld"}, 100), ""); // 2 tokens and 2: none scored
}

// ----------------------------------------------------------------------------
// scores

TEST(Scores, OfKnownLogLikelihoods) {
    // Four questions with two candidates each: their log-likelihoods and numbers of characters.
    std::vector<Candidate> c(8);
    double sums[] = {-4, -3, -6, -6, -2, -9, -1, -5};
    size_t characters[] = {4, 2, 3, 3, 1, 9, 1, 1};
    for (size_t i = 0; i < 8; i++) c[i].log_likelihood = sums[i], c[i].characters = characters[i];
    Task task = {"piqa", {{0, 2, 0}, {2, 2, 0}, {4, 2, 1}, {6, 2, 0}}};
    Score s = score_task(task, c);

    // The likeliest are 1 0 0 0, the first of equals. By character they compare as -1 and -1.5,
    // equal, -2 and -1, -1 and -5.
    EXPECT_DOUBLE_EQ(s.acc.mean, 2 / 4.0);
    EXPECT_DOUBLE_EQ(s.acc_norm.mean, 4 / 4.0);
    EXPECT_DOUBLE_EQ(s.acc.error, std::sqrt(1.0 / 3) / 2); // each answer deviates by a half
    EXPECT_EQ(s.acc_norm.error, 0);
    EXPECT_EQ(score_text(task, s), "piqa 4/4  acc 0.5000 +- 0.2887  acc_norm 1.0000 +- 0.0000\n");

    Json j;
    score_log(j, task, s);
    EXPECT_EQ(j, (Json{{"piqa", 0.5}, {"piqa_norm", 1.0}}));
}

TEST(Scores, OfOneCompletionEach) {
    std::vector<Candidate> c(2);
    c[0].log_likelihood = -1, c[1].log_likelihood = -3, c[1].greedy = true;
    c[0].characters = c[1].characters = 1;
    Task task = {"lambada", {{0, 1, 0}, {1, 1, 0}}};
    Score s = score_task(task, c);
    EXPECT_DOUBLE_EQ(s.acc.mean, 0.5);
    EXPECT_DOUBLE_EQ(s.perplexity(), std::exp(2.0));

    // The two deviate by 1. Their sample standard deviation is sqrt(2), and the error
    // is that over sqrt(2).
    EXPECT_EQ(score_text(task, s), "lambada 1/2  acc 0.5000 +- 0.5000  perplexity 7.389 +- 7.4\n");
    Json j;
    score_log(j, task, s);
    EXPECT_EQ(j, (Json{{"lambada", 0.5}, {"lambada_perplexity", s.perplexity()}}));

    // A single question has no error.
    task.questions.resize(1);
    EXPECT_EQ(score_text(task, score_task(task, c)), "lambada 0/1  acc 0.0000  perplexity 2.718\n");
    task.name = "piqa";
    EXPECT_EQ(score_text(task, score_task(task, c)), "piqa 0/1  acc 0.0000  acc_norm 0.0000\n");
}

// ----------------------------------------------------------------------------
// bits per byte

TEST(BitsPerByte, BytesOfTheTargets) {
    EXPECT_DOUBLE_EQ(bits_per_byte(6 * std::log(2.0), 3), 2);
    DataLoader d;
    ASSERT_EQ(
        data_open(&d, write("t.txt", "0123456789a"), Split::VAL, true, Tokenizer(), 5, 256, 1), "");
    d.shuffle = false;

    EXPECT_EQ(target_bytes(d, Tokenizer(), 1), 5u);
    EXPECT_EQ(target_bytes(d, Tokenizer(), 2), 10u);

    // A special token has no bytes.
    Tokenizer special;
    add_special(&special, "<|seven|>", '7');
    EXPECT_EQ(target_bytes(d, special, 1), 5u);
    EXPECT_EQ(target_bytes(d, special, 2), 9u);
}

TEST(BitsPerByte, SpecialTokensHaveNone) {
    NEEDS_FIXTURES();
    Tokenizer t;
    ASSERT_EQ(tokenizer_open(&t, FIXTURES + "/tokenizers/gpt2"), "");
    std::string first = "The",
                rest = " quick brown fox<|endoftext|>\u00e9t\u00e9 <|endoftext|>jumps";
    size_t T = encode(t, first + rest, true).size() - 1;
    DataLoader d;
    ASSERT_EQ(data_open(&d, write("t.txt", first + rest), Split::VAL, true, t, T, 50257, 1), "");
    ASSERT_EQ(encode(t, first).size(), 1u); // the first token is no target
    EXPECT_EQ(target_bytes(d, t, 1), rest.size() - 2 * strlen("<|endoftext|>"));
}

// ----------------------------------------------------------------------------
// log-likelihoods

// Candidates of random tokens, with contexts and completions of many lengths.
std::vector<Candidate> random_candidates(const Shape& s, size_t count, size_t longest) {
    std::vector<Candidate> all(count);
    for (size_t i = 0; i < count; i++) {
        auto random = [&](size_t k) { return size_t(random_block(17, i, k)[0]); };
        size_t n = i == 0 ? longest + 1 : 2 + random(0) % longest;
        for (size_t k = 0; k < n; k++) all[i].tokens.push_back(int(random(k + 2) % s.V));
        all[i].scored = i == 1 ? n - 1 : 1 + random(1) % (n - 1);
        all[i].characters = 1;
    }
    return all;
}

// Score one prefix at a time from the logits that generation computes: an independent way.
void score_by_generating(Trainer<double, Cpu>& t, int plan, Candidate& c) {
    c.log_likelihood = 0, c.greedy = true;
    for (size_t n = c.tokens.size() - c.scored; n < c.tokens.size(); n++) {
        generate_batch(t, plan, c.tokens.data(), n, 0);
        run_plan(t, plan);
        const double* logits = address<const double>(t, {Kind::LOGITS, -1, 0});
        double sum = 0, target = logits[c.tokens[n]];
        for (size_t v = 0; v < t.model.shape.V; v++) {
            sum += std::exp(logits[v] - target);
            if (logits[v] > target) c.greedy = false;
        }
        c.log_likelihood -= std::log(sum);
    }
}

// Score all candidates in one plan.
template <typename T>
void score_candidates(Trainer<T, Cpu>& t, int plan, std::vector<Candidate>& candidates) {
    ScoreGroup group;
    group.plan = plan;
    for (size_t i = 0; i < candidates.size(); i++) group.members.push_back(i);
    score_group(t, group, candidates);
}

// Models this small gain nothing from more threads.
void one_thread() {
#ifdef _OPENMP
    omp_set_num_threads(1);
#endif
}

Plan forward_plan(Mode mode, size_t B, size_t T, size_t cache = 0) {
    Plan p = small_plan(B, T, 1);
    p.mode = mode, p.cache = cache;
    return p;
}

// Make a completion greedy. Half of them are, so that both answers occur.
void make_greedy(Trainer<double, Cpu>& t, int plan, Candidate& c) {
    for (size_t n = c.tokens.size() - c.scored; n < c.tokens.size(); n++) {
        std::vector<int> prompt(c.tokens.begin(), c.tokens.begin() + long(n));
        generate(t, plan, prompt, 1, {0}, [&](int token) { c.tokens[n] = token; });
    }
}

// 16 terms of a size below 8, each with 16 roundings. The largest error found is 3e-15.
constexpr double ROUNDING = 16 * 8 * 16 * 2.3e-16;

TEST(LogLikelihoods, AreThoseOfGenerationsLogits) {
    one_thread();
    for (const Shape& s : all_shapes()) {
        // A plan to generate, and plans to evaluate with padding after the rows and without.
        constexpr size_t LONGEST = 14, COUNT = 7;
        std::vector<Plan> plans = {forward_plan(Mode::GENERATE, 1, LONGEST, LONGEST + 1)};
        for (size_t B : {1, 3, 8})
            plans.push_back(forward_plan(Mode::EVALUATE, B, LONGEST + B / 2));
        Fixture<double> f(s, plans);

        std::vector<Candidate> want = random_candidates(s, COUNT, LONGEST);
        for (size_t i = 0; i < COUNT; i++) {
            if (i % 2) make_greedy(f.t, 0, want[i]);
            score_by_generating(f.t, 0, want[i]);
            EXPECT_TRUE(want[i].greedy || i % 2 == 0);
        }

        // Each plan gives the same, and leaves the trainer's settings as they were.
        for (int plan : {1, 2, 3}) {
            std::vector<Candidate> all = want;
            f.t.data.cursor = 77, f.t.data.document_end = 3;
            score_candidates(f.t, plan, all);
            EXPECT_EQ(f.t.data.cursor, 77u);
            EXPECT_EQ(f.t.data.document_end, 3);
            EXPECT_EQ(f.t.data.samples_end, ~uint64_t(0));
            for (size_t i = 0; i < COUNT; i++) {
                EXPECT_NEAR(all[i].log_likelihood, want[i].log_likelihood, ROUNDING) << i;
                EXPECT_EQ(all[i].greedy, want[i].greedy) << i;
            }
        }
        EXPECT_FALSE(want[0].greedy) << "of random tokens";
    }
}

// A head that processes its rows in many chunks keeps them apart.
TEST(LogLikelihoods, RowsOfManyChunks) {
    one_thread();
    Shape s = small_gpt2();
    std::vector<Candidate> whole = random_candidates(s, 40, 16), chunks = whole;
    for (auto* all : {&whole, &chunks}) {
        if (all == &chunks) s.loss.logits_bytes = 1; // 64 of the 640 rows a chunk
        Fixture<double> f(s, {forward_plan(Mode::EVALUATE, 40, 16)});
        EXPECT_EQ(head_chunk_rows(f.t.model.shape, 640, 8), all == &chunks ? 64u : 640u);
        score_candidates(f.t, 0, *all);
    }
    for (size_t i = 0; i < whole.size(); i++) {
        EXPECT_NEAR(whole[i].log_likelihood, chunks[i].log_likelihood, ROUNDING);
        EXPECT_EQ(whole[i].greedy, chunks[i].greedy);
    }
}

// A plan that trains, and one for each group, which hears of its number.
std::vector<Plan> plans_of_groups(std::vector<ScoreGroup>* groups, const Layout& layout) {
    Plan train = small_plan(2, 8, 1);
    train.layout = layout;
    PlanOptions evaluate = train;
    evaluate.mode = Mode::EVALUATE;
    std::vector<Plan> plans = {train};
    for (ScoreGroup& group : *groups) {
        group.plan = int(plans.size());
        plans.push_back({score_plan(evaluate, group.T, layout), layout, {}});
    }
    return plans;
}

struct Ranks {
    int dp = 1, tp = 1, pp = 1, chunks = 1, zero = 0;
    bool sequence_parallel = false;
};

TEST(LogLikelihoods, AreTheSameInEveryLayout) {
    one_thread();
    for (const Shape& s : {small_gpt2(), small_llama()}) {
        constexpr size_t COUNT = 11; // no number of ranks divides it
        std::vector<Candidate> want = random_candidates(s, COUNT, 16);

        // Want: one rank's scores, with every other completion greedy.
        {
            Fixture<double> f(
                s, {forward_plan(Mode::EVALUATE, 1, 16), forward_plan(Mode::GENERATE, 1, 16, 17)});
            for (size_t i = 0; i < want.size(); i += 2) make_greedy(f.t, 1, want[i]);
            score_candidates(f.t, 0, want);
        }

        // The layouts: data, tensor and pipeline parallelism, ZeRO, and several of them.
        int tp = s.NH % 4 ? 3 : 4;
        for (const Ranks& l : std::vector<Ranks>{{2},
                                                 {3, 1, 1, 1, 3},
                                                 {1, tp},
                                                 {1, tp, 1, 1, 0, true},
                                                 {1, 1, 2},
                                                 {1, 1, 2, 2},
                                                 {2, 1, 2, 1, 2},
                                                 {2, tp, 2, 1, 3, true}}) {
            std::mutex mutex;
            std::string text = concat("dp ", l.dp, " tp ", l.tp, " pp ", l.pp, " zero ", l.zero);
            int status = run_local_ranks(l.dp * l.tp * l.pp, {}, [&](const Comm& world) {
                one_thread();

                Layout sizes = small_layout(l.dp, l.tp, l.pp);
                sizes.chunks = l.chunks;
                sizes.pipeline = l.chunks > 1 ? Pipeline::INTERLEAVED : Pipeline::ONE_F_ONE_B;
                sizes.zero = l.zero;
                sizes.sequence_parallel = l.sequence_parallel;
                sizes.first_layer =
                    split_layers(std::vector<double>(s.L + 2, 1.0), sizes.stages());
                Layout me = layout_at(sizes, world.rank);

                // The groups' plans have the lengths of their candidates.
                std::vector<Candidate> got = want;
                std::vector<ScoreGroup> groups = group_by_length(got, 32, s.P);
                Fixture<double> f(s, plans_of_groups(&groups, me));
                f.t.comms = make_comms(world, me, ranks_of_kv_head(me, f.t.model));
                for (const ScoreGroup& group : groups) score_group(f.t, group, got);

                // Each rank has all scores.
                std::lock_guard<std::mutex> lock(mutex);
                EXPECT_EQ(groups.size(), 2u);
                for (size_t i = 0; i < COUNT; i++) {
                    const Candidate &a = got[i], &b = want[i];
                    EXPECT_NEAR(a.log_likelihood, b.log_likelihood, ROUNDING)
                        << text << " rank " << world.rank << " candidate " << i;
                    EXPECT_EQ(a.greedy, b.greedy) << text << " candidate " << i;
                }
            });
            EXPECT_EQ(status, 0) << text;
        }
    }
}

TEST(LogLikelihoods, ThePlanFitsTheCandidates) {
    PlanOptions like = forward_plan(Mode::EVALUATE, 8, 256), p;
    p = score_plan(like, 104);
    EXPECT_EQ(p.T, 104u);
    EXPECT_EQ(p.B, 19u); // 19 * 104 is the most within 2048 rows
    EXPECT_EQ(score_plan(like, 1022).B, 2u);
    EXPECT_EQ(score_plan(like, 4000).B, 1u);

    // Sequence parallelism needs a number of rows that the ranks divide.
    Layout cut = small_layout(1, 2);
    cut.sequence_parallel = true;
    EXPECT_EQ(score_plan(like, 4000, cut).B, 2u);
}

// Candidates with these numbers of inputs.
std::vector<Candidate> of_lengths(const std::vector<size_t>& lengths) {
    std::vector<Candidate> all(lengths.size());
    for (size_t i = 0; i < all.size(); i++) all[i].tokens.resize(lengths[i] + 1);
    return all;
}

TEST(Groups, CandidatesOfOneLengthRunTogether) {
    // Padded they have 8, 8, 16, 96, 96 and 96 tokens. One row of 96 at a time
    // leaves no turn to fill up.
    std::vector<ScoreGroup> groups = group_by_length(of_lengths({90, 3, 96, 8, 89, 9}), 1, 96, 3);
    ASSERT_EQ(groups.size(), 3u);
    EXPECT_EQ(groups[0].T, 8u);
    EXPECT_EQ(groups[0].members, (std::vector<size_t>{1, 3}));
    EXPECT_EQ(groups[1].members, (std::vector<size_t>{5}));
    EXPECT_EQ(groups[2].T, 96u);
    EXPECT_EQ(groups[2].members, (std::vector<size_t>{0, 2, 4}));
    EXPECT_EQ(group_by_length(of_lengths({90, 3, 96, 8, 89, 9}), 1, 96, 2).size(), 2u);

    // A few candidates fill one turn of the longest length; more plans would compute more padding.
    groups = group_by_length(of_lengths({90, 3, 96, 8, 89, 9}), 1024, 96);
    ASSERT_EQ(groups.size(), 1u);
    EXPECT_EQ(groups[0].members.size(), 6u);

    // Two of 16 inputs, or one of 8 with the rest of its turn and one of 16: the cost is equal,
    // and fewer groups win.
    EXPECT_EQ(group_by_length(of_lengths({8, 16}), 16, 96).size(), 1u);

    EXPECT_TRUE(group_by_length({}, 64, 96).empty());
    EXPECT_EQ(group_by_length(of_lengths({100}), 64, 97)[0].T, 97u) << "no more than positions";
    EXPECT_EQ(group_by_length(of_lengths({0}), 64, 97)[0].T, 8u);
}

// The groups need the fewest tokens of all ways to cut, and hold each candidate once.
TEST(Groups, CutsAreTheBest) {
    for (uint64_t seed = 0; seed < 50; seed++) {
        std::vector<size_t> lengths(40);
        for (size_t i = 0; i < lengths.size(); i++)
            lengths[i] = 1 + random_block(seed, 1, i)[0] % 64;
        std::vector<Candidate> all = of_lengths(lengths);

        auto tokens = [&](const std::vector<ScoreGroup>& groups) {
            size_t sum = 0;
            for (const ScoreGroup& g : groups)
                sum += round_up(g.members.size(), candidates_at_once(128, g.T)) * g.T;
            return sum;
        };
        std::vector<ScoreGroup> groups = group_by_length(all, 128, 64, 3);
        std::vector<int> seen(all.size());
        for (const ScoreGroup& g : groups)
            for (size_t i : g.members) seen[i] += padded_inputs(all[i], 64) <= g.T;
        EXPECT_EQ(seen, std::vector<int>(all.size(), 1));

        // Want: the least over all pairs of cuts at multiples of 8.
        size_t best = ~size_t(0);
        for (size_t a = 0; a <= 64; a += 8)
            for (size_t b = a; b <= 64; b += 8) {
                std::vector<ScoreGroup> cut(3);
                cut[0].T = a, cut[1].T = b, cut[2].T = 64;
                for (size_t i = 0; i < all.size(); i++) {
                    size_t T = padded_inputs(all[i], 64);
                    cut[T <= a ? 0 : T <= b ? 1 : 2].members.push_back(i);
                }
                for (ScoreGroup& g : cut) // a group is as long as its longest member
                    for (size_t& T = g.T = 8; size_t i : g.members)
                        T = std::max(T, padded_inputs(all[i], 64));
                best = std::min(best, tokens(cut));
            }
        EXPECT_EQ(tokens(groups), best) << seed;
    }
}

// ----------------------------------------------------------------------------
// CORE

// The constants are CPython 3.11's.
TEST(Core, DrawsArePythons) {
    typedef std::vector<size_t> Drawn;
    PythonSeed seed = {0};
    std::mt19937 random(seed);
    EXPECT_EQ(random(), 3626764237u);
    EXPECT_EQ(random(), 1654615998u);

    // Python makes a list of 85 and of 21, and a set of what it draws from 86 and from 22.
    EXPECT_EQ(python_sample(999, 10, 1234),
              (Drawn{989, 796, 451, 119, 7, 92, 932, 965, 961, 826})); // of range(1, 1000), less 1
    EXPECT_EQ(python_sample(85, 10, 5000), (Drawn{29, 46, 50, 58, 14, 64, 51, 5, 79, 43}));
    EXPECT_EQ(python_sample(86, 10, 5000), (Drawn{29, 46, 50, 58, 14, 64, 51, 5, 43, 66}));
    EXPECT_EQ(python_sample(21, 5, 1234), (Drawn{14, 3, 0, 2, 1}));
    EXPECT_EQ(python_sample(22, 5, 1234), (Drawn{14, 3, 0, 2, 18}));
    EXPECT_EQ(python_sample(50, 6, 1), (Drawn{8, 36, 4, 16, 7, 31}));
    EXPECT_EQ(python_sample(4, 4, 7), (Drawn{2, 0, 1, 3}));
    EXPECT_EQ(python_sample(20321, 10, 100000),
              (Drawn{3060, 15921, 572, 13170, 17951, 11477, 12741, 8317, 7369, 14350}));
    EXPECT_EQ(python_sample(3, 0, 1), Drawn{});

    Drawn all(1000);
    std::iota(all.begin(), all.end(), size_t(0));
    python_shuffle(&all, 1337);
    EXPECT_EQ(Drawn(all.begin(), all.begin() + 8), (Drawn{239, 310, 101, 624, 1, 628, 612, 482}));
    EXPECT_EQ(Drawn(all.end() - 2, all.end()), (Drawn{947, 632}));
}

// A folder with one task.
std::string core_folder(const std::string& keys, const std::string& items,
                        const std::string& guess = "x,25") {
    std::string folder = scratch("core");
    put_file(folder + "/core.yaml", "icl_tasks:\n- label: x\n  dataset_uri: x.jsonl\n" + keys);
    put_file(folder + "/eval_data/x.jsonl", items);
    put_file(folder + "/eval_meta_data.csv", "Eval Task,Random baseline\n" + guess + "\n");
    return folder;
}

// The last question of such a folder, as text_of() shows it, with ^ for the token that begins a text.
std::string core_text(const std::string& keys, const std::string& items) {
    Tokenizer t;
    t.eot = '^';
    Evaluation e;
    std::string wrong = read_tasks(&e, "core=" + core_folder(keys, items), t, 1 << 20);
    return wrong.empty() ? text_of(e, e.tasks.at(0).questions.back()) : wrong;
}

// The second of two items, with the first as its shot. Random(1337) leaves two in their order.
TEST(Core, ItemsByHand) {
    std::string shot = "  num_fewshot: [1]\n  icl_task_type: ";
    std::string answer = "  continuation_delimiter: \"\\nAnswer: \" # after the question\n";

    // HellaSwag: the space belongs to the prompt, and what the endings begin alike too.
    EXPECT_EQ(core_text(shot + "multiple_choice\n",
                        R"({"query": "Roof: He", "choices": ["sits.", "is off."], "gold": 1})"
                        "\n"
                        R"({"query": "Ice: A man ", "choices": ["wit.", "was.", "w"], "gold": 0})"),
              "^Roof: He is off.\n\nIce: A man  w|it.*\n^Roof: He is off.\n\nIce: A man  w|as.\n"
              "^Roof: He is off.\n\nIce: A man  w|\n");

    // ARC and PIQA.
    EXPECT_EQ(core_text(shot + "multiple_choice\n" + answer,
                        R"({"query": "Question: Why?", "choices": ["sun", "moon"], "gold": 0})"
                        "\n"
                        R"({"query": "Question: Who?", "choices": ["me", "you"], "gold": 1})"),
              "^Question: Why?\nAnswer: sun\n\nQuestion: Who?\nAnswer: |me\n"
              "^Question: Why?\nAnswer: sun\n\nQuestion: Who?\nAnswer: |you*\n");

    // WinoGrande: the contexts may end alike too.
    EXPECT_EQ(core_text(shot + "schema\n",
                        R"({"context_options": ["Ann", "Bo"], "continuation": "ran.", "gold": 1})"
                        "\n"
                        R"({"context_options": ["It is", "He is"], "gold": 0,)"
                        R"( "continuation": "ill."})"),
              "^Bo ran.\n\nIt| is ill.*\n^Bo ran.\n\nHe| is ill.\n");

    // LAMBADA: white space around a context goes. The space before the word belongs to the word.
    EXPECT_EQ(core_text(shot + "language_modeling\n",
                        R"({"context": "\u00a0he said to \n", "continuation": "Mary"})"
                        "\n"
                        R"({"context": " she said to", "continuation": "Bo"})"),
              "^he said to Mary\n\nshe said to| Bo*\n");
    EXPECT_EQ(core_text("  num_fewshot: [0]\n  icl_task_type: language_modeling\n" + answer,
                        R"({"context": "a", "continuation": "Bo"})"),
              "^a\nAnswer:| Bo*\n");
}

// A prompt is encoded whole, so that a space joins the choice.
TEST(Core, ChoicesInTokensOfGpt2) {
    NEEDS_FIXTURES();
    Tokenizer t;
    ASSERT_EQ(tokenizer_open(&t, FIXTURES + "/tokenizers/gpt2"), "");
    Evaluation e;
    std::string keys = "  num_fewshot: [0]\n  icl_task_type: multiple_choice\n"
                       "  continuation_delimiter: \"\\nAnswer: \"\n";
    std::string folder = core_folder(
        keys, R"({"query": "Question: Why?", "choices": ["sun", "the moon"], "gold": 0})");
    ASSERT_EQ(read_tasks(&e, "core=" + folder, t, 1024), "");
    std::vector<int> want = encode(t, "<|endoftext|>Question: Why?\nAnswer: the moon", true);
    EXPECT_EQ(e.candidates[1].tokens, want);
    EXPECT_EQ(e.candidates[0].scored, 1u);
    EXPECT_EQ(e.candidates[1].scored, 2u);
}

// Tables of one, two and four ranks.
TEST(Core, PromptsAndScoresAreThoseOfTheGoldenFile) {
    // Compare whole prompts. A token is a byte, and 96 begins a text.
    one_thread();
    std::string golden = std::string(REPO_ROOT) + "/dev/golden/";
    Json want;
    ASSERT_EQ(read_json(golden + "core-tiny/golden.json", &want), "");
    Tokenizer t;
    t.eot = 96;
    Evaluation whole, cut;
    ASSERT_EQ(read_tasks(&whole, "core=" + golden + "core-tiny", t, 1 << 20), "");
    std::vector<Json> rows; // of all candidates
    for (size_t k = 0; k < 7; k++)
        for (const Json& item : want["tasks"][k]["items"])
            rows.insert(rows.end(), item.begin(), item.end());
    ASSERT_EQ(whole.candidates.size(), rows.size());
    for (size_t i = 0; i < rows.size(); i++) {
        const Candidate& c = whole.candidates[i];
        EXPECT_EQ(c.tokens[0], 96);
        EXPECT_EQ(std::string(c.tokens.begin() + 1, c.tokens.end()), rows[i]["prompt"]);
        EXPECT_EQ(c.scored, rows[i]["scored"]) << rows[i];
    }

    // Score them. The model has 40 positions, so that most prompts lose their beginning.
    Shape s;
    ASSERT_EQ(hf_read_config(&s, golden + "gpt2-tiny"), "");
    ASSERT_EQ(read_tasks(&cut, "core=" + golden + "core-tiny", t, s.P), "");
    for (int dp : {1, 2, 4}) {
        std::mutex mutex;
        int status = run_local_ranks(dp, {}, [&](const Comm& world) {
            one_thread();
            Layout me = layout_at(small_layout(dp, 1, 1), world.rank);
            Evaluation got = cut;
            std::vector<ScoreGroup> groups = group_by_length(got.candidates, 128, s.P);
            Fixture<double> f(s, plans_of_groups(&groups, me));
            f.t.comms = make_comms(world, me, ranks_of_kv_head(me, f.t.model));
            std::string wrong = hf_load_weights(f.t, golden + "gpt2-tiny");
            for (const ScoreGroup& group : groups) score_group(f.t, group, got.candidates);

            std::lock_guard<std::mutex> lock(mutex);
            EXPECT_EQ(wrong, "");
            Json log;
            EXPECT_EQ(core_table(got, &log), want["table"]) << dp << " ranks";
            EXPECT_EQ(log["core_lambada_openai"], 0.5);
            EXPECT_NEAR(log["core"], 0.095908, 5e-7);
            for (size_t i = 0; i < rows.size(); i++) {
                EXPECT_LE(got.candidates[i].tokens.size(), s.P);
                EXPECT_NEAR(got.candidates[i].log_likelihood, rows[i]["log_likelihood"], ROUNDING);
                EXPECT_EQ(got.candidates[i].greedy, rows[i]["greedy"]) << rows[i];
            }
        });
        EXPECT_EQ(status, 0) << dp << " ranks";
    }
}

// Each refusal begins with the flag, and names the file and where it can the line.
TEST(Core, WhatIsWrongIsSaidWithFileAndLine) {
    std::string item = R"({"query": "q", "choices": ["a", "b"], "gold": 1})";
    std::string keys = "  num_fewshot: [0]\n  icl_task_type: multiple_choice\n";
    Tokenizer t;
    t.eot = 0;
    auto refuses = [&](const std::string& folder, const std::string& says, size_t P = 1 << 20) {
        Evaluation e;
        std::string wrong = read_tasks(&e, "core=" + folder, t, P);
        EXPECT_EQ(wrong.rfind("--eval: " + folder + says, 0), 0u) << wrong;
    };
    auto yaml = [&](const std::string& more, const std::string& says) {
        refuses(core_folder(keys + more, item), "/core.yaml" + says);
    };
    auto bad_item = [&](const std::string& line, const std::string& says) {
        refuses(core_folder(keys, item + "\n" + line), "/eval_data/x.jsonl:2: " + says);
    };
    EXPECT_EQ(core_text(keys, item), "^q |a\n^q |b*\n");

    // core.yaml: what is not of its kind, line by line.
    refuses(scratch("nothing"), "/core.yaml: No such file");
    yaml("  metric: [a]\n", ":6: is no key of a task: \"metric\"");
    yaml("  label: y\n", ":6: label is there twice");
    yaml("-\n" + keys, ":6: wants a text \"dataset_uri\"");
    yaml("label: y\n", ":6: wants \"- \" before a task or two spaces before its key");
    yaml("    has_categories: true\n", ":6: is no key of a task: \"  has_categories\"");
    yaml("  has_categories:true\n", ":6: is no key of a task: \"has_categories:true\"");
    for (const char* value : {"&a b", "'a'", "{a: b}", "[a", "\"a", "\"a\" b", "|", ""})
        yaml(std::string("  has_categories:  ") + value + "\n",
             *value ? ":6: wants a word, \"text\" or [number]" : ":6: is no key");
    yaml("- label: x\n  dataset_uri: x.jsonl\n" + keys, ":6: label \"x\" is there twice");
    put_file(core_folder("", item) + "/core.yaml", "tasks:\n");
    refuses(scratch("core"), "/core.yaml:1: wants icl_tasks:, not \"tasks:\"");
    put_file(scratch("core") + "/core.yaml", "# none\nicl_tasks:\n");
    refuses(scratch("core"), "/core.yaml: has no tasks");
    for (const char* shots : {"10", "[]", "[1.5]", "[0, 1]", "[-1]", "[1000]"})
        refuses(core_folder(replace_all(keys, "[0]", shots), item), "/core.yaml:2: wants");
    refuses(core_folder(replace_all(keys, "multiple_choice", "multiple_choice_mc2"), item),
            "/core.yaml:2: icl_task_type \"multiple_choice_mc2\" is none of multiple_choice,");

    // eval_meta_data.csv and items.
    for (const char* guess : {"y,25", "x,", "x,a", "x,100", "x,-1", "x,nan", "x"})
        refuses(core_folder(keys, item, guess),
                "/eval_meta_data.csv: wants a row with the \"Eval Task\" x");
    refuses(core_folder(replace_all(keys, "[0]", "[1]"), item),
            "/eval_data/x.jsonl: has 1 items, too few for 1 shots");
    bad_item("[]", "is no JSON object");
    bad_item(R"({"query": "q", "gold": 1})", "wants a list of texts \"choices\"");
    bad_item(R"({"query": "q", "choices": [], "gold": 0})", "wants a list of texts \"choices\"");
    bad_item(R"({"choices": ["a", "b"], "gold": 0})", "wants a text \"query\"");
    bad_item(replace_all(item, "1}", "2}"), "gold 2 is none of the 2 choices, counted from 0");
    refuses(core_folder(keys, replace_all(item, "\"b\"", "\"bcd\"")),
            "/eval_data/x.jsonl:1: a continuation has 3 tokens, the model 3 positions", 3);
    refuses(core_folder("  num_fewshot: [0]\n  icl_task_type: language_modeling\n"
                        "  continuation_delimiter: \"\"\n",
                        R"({"context": "a", "continuation": ""})"),
            "/eval_data/x.jsonl:1: the prompt's tokens");
    t.eot = -1;
    refuses(core_folder(keys, item), "/eval_data/x.jsonl:1: core wants a token before each text");
}

// ----------------------------------------------------------------------------
// a trained model on real questions

TEST(Fixtures, Stories260kOnHellaSwag) {
    NEEDS_FIXTURES();
    std::string model = FIXTURES + "/checkpoints/stories260K/hf";
    Tokenizer tokenizer;
    ASSERT_EQ(tokenizer_open(&tokenizer, FIXTURES + "/tokenizers/tinystories512/tok512.bin"), "");
    Shape s;
    ASSERT_EQ(hf_read_config(&s, model), "");

    Evaluation e;
    ASSERT_EQ(read_tasks(&e, "hellaswag=" + FIXTURES + "/eval/hellaswag_val_first400.txt",
                         tokenizer, s.P),
              "");
    EXPECT_EQ(e.candidates.size(), 1600u);

    std::vector<ScoreGroup> groups = group_by_length(e.candidates, 2048, s.P);
    std::vector<Plan> plans;
    size_t computed = 0, needed = 0; // in tokens
    for (ScoreGroup& group : groups) {
        PlanOptions p = score_plan(forward_plan(Mode::EVALUATE, 4, 512), group.T);
        group.plan = int(plans.size());
        plans.push_back({p, {}, {}});
        computed += round_up(group.members.size(), p.B) * p.T;
    }
    for (const Candidate& c : e.candidates) needed += c.tokens.size() - 1;
    EXPECT_LT(double(computed), 1.2 * double(needed)) << "padded to the longest: twice as many";

    Fixture<float> f(s, plans);
    ASSERT_EQ(hf_load_weights(f.t, model), "");
    for (const ScoreGroup& group : groups) score_group(f.t, group, e.candidates);
    Score score = score_task(e.tasks[0], e.candidates);
    EXPECT_EQ(score_text(e.tasks[0], score),
              "hellaswag 105/400  acc 0.2850 +- 0.0226  acc_norm 0.2625 +- 0.0220\n");
}

} // namespace
