// test_run.cpp - the program as a user runs it: prints, refusals, and what survives a kill
//   Runs $TRAIN_GPT (default build/train_gpt) as a child process in a scratch folder.
#include <sys/resource.h>
#include <algorithm>
#include <regex>
#include "../harness/runs.h"

static Ran run(const std::string& arguments, const std::string& before = "") {
    return start(arguments, before);
}

struct Run : Scratch {
    std::string text, small; // a text file, and the flags of a run of a second
    void SetUp() override {
        Scratch::SetUp();
        text = put("text.txt", numbered_lines(4000));
        small =
            "--layers 2 --heads 2 --channels 32 --seq 32 --micro-batch 4 --sample-tokens 8 "
            "--eval-tokens 256 --data " +
            text + " ";
    }

    // Expect a refusal: exit status 1, and one line that begins as all errors do and holds `part`.
    void refuses(const std::string& arguments, const std::string& part,
                 const std::string& before = "") {
        Ran r = run(arguments, before);
        EXPECT_EQ(r.status, 1) << arguments << "\n" << r.text;
        size_t at = r.text.find("_gpt: error: ");
        ASSERT_NE(at, std::string::npos) << arguments << "\n" << r.text;
        std::string line = r.text.substr(at);
        EXPECT_EQ(std::count(line.begin(), line.end(), '\n'), 1) << line;
        EXPECT_HAS(line, part) << "does not say: ";
    }
};

// ----------------------------------------------------------------------------
// what it prints

// A run of 30 steps prints its steps, a validation and a sample, logs them, and learns.
TEST_F(Run, TrainsEvaluatesAndSamples) {
    // The lines on the terminal.
    Ran r = run(small + "--steps 30 --lr 3e-3 --warmup 5 --out " + path("out"));
    EXPECT_EQ(r.status, 0) << r.text;
    std::regex step(
        "step +30/30 \\| loss [0-9.]+ \\| norm [0-9.]+ \\| lr [0-9.e+-]+ \\| [0-9.]+ ms \\| "
        "[0-9.kM]+ tok/s \\| mfu [0-9.]+% \\| eta 0s");
    EXPECT_TRUE(std::regex_search(r.text, step)) << r.text;
    EXPECT_TRUE(
        std::regex_search(r.text, std::regex("\nstep 30 \\| val loss [0-9.]+ \\| [0-9.]+ bits per "
                                             "byte \\| 256 tokens\nstep 30 \\| sample\n---\n")))
        << r.text;

    // The log: the configuration, an object a step, the validation, and the account of time.
    std::ifstream log(path("out") + "/log.jsonl");
    std::vector<nlohmann::json> lines;
    for (std::string line; std::getline(log, line);) lines.push_back(nlohmann::json::parse(line));
    ASSERT_EQ(lines.size(), 33u);
    EXPECT_EQ(lines[0]["config"]["lr"], 3e-3);
    EXPECT_EQ(lines[32]["step"], 30);
    EXPECT_EQ(lines[32].count("wall"), 1u);

    // FLOPs of a token: 6 for each parameter (tables, two layers, the last LayerNorm), and 6 L C
    // T for attention.
    double parameters = (256 + 1024) * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32;
    EXPECT_EQ(lines[0]["flops_per_token"], 6 * parameters + 6 * 2 * 32 * 32);
    for (const char* key :
         {"step", "loss", "grad_norm", "lr", "tokens", "ms", "tokens_per_second", "mfu"})
        EXPECT_TRUE(lines[30].contains(key)) << key;
    EXPECT_EQ(lines[30]["tokens"], 30 * 4 * 32);
    EXPECT_TRUE(lines[31].contains("val_loss"));
    EXPECT_LT(lines[30]["loss"].get<double>(), 0.8 * lines[1]["loss"].get<double>());
}

// --plan auto only chooses flags: a run with the flags that it prints has the same
// losses and norms, also beside adapters.
TEST_F(Run, APlannedRunIsTheRunOfTheFlagsThatItNames) {
    auto losses = [](const std::string& text) {
        std::string all;
        std::regex loss("loss [0-9.]+ \\| norm [0-9.]+");
        for (std::sregex_iterator i(text.begin(), text.end(), loss), end; i != end; i++)
            all += i->str() + "\n";
        return all;
    };

    std::vector<double> room; // MiB that the best layout takes
    std::string folder = path("adapter"), once = "--lora 2 --steps 1 --sample-tokens 0 --export ";
    ASSERT_EQ(run(small + once + folder).status, 0);
    for (std::string adapters : {std::string(), std::string("--lora 2 "), "--adapter " + folder + " "}) {
        // Run as planned.
        std::string flags = small + adapters + "--steps 4 --sample-tokens 0 --local-ranks 4 ";
        Ran planned = run(flags + "--plan auto");
        ASSERT_EQ(planned.status, 0) << planned.text;
        std::smatch named;
        ASSERT_TRUE(std::regex_search(planned.text, named, std::regex("build/t[a-z]+_gpt (.*)\n")));
        EXPECT_HAS(named[1].str(), "--local-ranks 4 ");
        EXPECT_HAS(named[1].str(), "--batch-tokens 512 --dp ");
        std::smatch best;
        ASSERT_TRUE(std::regex_search(planned.text, best, std::regex("best .* ([0-9.]+) MiB")));
        room.push_back(std::stod(best[1]));

        // Run as the printed command says.
        Ran given = run(named[1].str());
        EXPECT_EQ(given.status, 0) << given.text;
        EXPECT_NE(losses(given.text), "");
        EXPECT_EQ(losses(given.text), losses(planned.text));
    }
    for (size_t i : {1, 2})
        EXPECT_LT(room[i], 0.8 * room[0]) << "what is frozen has no gradient and no moments";
}

// --documents mask and best-fit are for training, also after a resume, and alike on two ranks. They
// change neither validation nor the plan.
TEST_F(Run, DocumentsAreForTraining) {
    for (std::string kind : {"mask", "best-fit", "best-fit,mask"}) {
        std::string mask = "--documents " + kind + " --document-end 10 ";
        auto losses = [&](const std::string& flags) { // of steps, and of validation
            Ran r = run(small + flags);
            EXPECT_EQ(r.status, 0) << r.text;
            std::vector<std::string> found;
            std::regex loss("loss [0-9.]+ \\|");
            for (std::sregex_iterator i(r.text.begin(), r.text.end(), loss), end; i != end; ++i)
                found.push_back(i->str());
            return found;
        };

        // Without a change of weights: the training loss differs, the validation loss does not.
        auto still = losses("--lr 0 --warmup 0 --steps 1"), apart = losses(mask + "--lr 0 --steps 1");
        ASSERT_EQ(still.size(), 2u);
        ASSERT_EQ(apart.size(), 2u);
        EXPECT_NE(still[0], apart[0]);
        EXPECT_EQ(still[1], apart[1]);

        // Stopped after two of four steps and resumed, the run prints the same losses.
        mask += "--schedule constant --eval-every 2 ";
        auto whole = losses(mask + "--steps 4");
        std::string out = mask + "--out " + path(kind);
        losses(out + " --steps 2");
        auto resumed = losses(out + " --steps 4 --resume");
        ASSERT_EQ(whole.size(), 6u);
        EXPECT_EQ(resumed, std::vector<std::string>(whole.begin() + 3, whole.end()));
        EXPECT_EQ(losses(mask + "--steps 4 --local-ranks 2 --dp 2 --micro-batch 2"), whole);
        Ran plan = run(small + "--explain"), same = run(small + "--explain " + mask);
        EXPECT_EQ(plan.text, same.text);
    }
}

// --explain works for every preset, and describes all of a plan.
TEST_F(Run, EveryPresetExplainsItself) {
    // Presets.
    for (const char* model :
         {"tiny", "tiny-llama", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "tinyllama-1.1b",
          "llama2-7b", "llama3-8b", "llama3-70b", "llama3-405b", "qwen2.5-0.5b", "qwen3-0.6b",
          "gemma-2-2b", "gemma-3-1b", "olmo-2-7b", "smollm3-3b", "phi-3-mini", "gpt3-175b"}) {
        Ran r = run(
            std::string("--explain --precision bf16 --micro-batch 1 --recompute full --model ") +
            model);
        EXPECT_EQ(r.status, 0) << r.text;
        for (const char* part : {"parameters ", "weights", "gradients", "optimizer moments",
                                 "workspace", "total", "LOAD COUNT", "UPDATE(head)"})
            EXPECT_HAS(r.text, part) << model;
    }

    // A single layer.
    Ran r = run("--explain 2");
    EXPECT_HAS(r.text, "B(0,2)\n  reads");

    // NorMuon: a float for each of 9216 rows or columns of a block's six matrices.
    r = run("--explain --model gpt2 --optimizer muon,normuon=0.95");
    EXPECT_TRUE(std::regex_search(r.text, std::regex("second moments of rows +442368 "))) << r.text;

    // On a CPU the head makes at most 64 MiB of logits at a time, here of 50,304 tokens in bf16, in
    // multiples of 64 rows.
    r = run("--explain --device cpu --model gpt2 --seq 1024 --micro-batch 4 --precision bf16");
    EXPECT_HAS(r.text, "the head makes logits of 640 rows at a time of 4096: 61.4 MiB");
}

// --explain says what weights and states of adapters of rank 16 take beside a base in bf16, and
// beside one in codes of four bits (QLoRA), in GiB: 2 N + 18 P bytes, or 0.51587 a parameter of a
// block's matrix in the place of 2. N and P are the published numbers of parameters.
TEST_F(Run, ExplainSaysTheMemoryOfAdapters) {
    struct Line {
        const char* model;
        double lora, qlora;
    };
    for (const Line& line : {Line{"gpt2", 0.27, 0.15}, Line{"qwen2.5-0.5b", 1.07, 0.57},
                             Line{"tinyllama-1.1b", 2.26, 0.92}, Line{"llama2-7b", 13.22, 4.27},
                             Line{"llama3-8b", 15.66, 6.01}, Line{"llama3-70b", 134.89, 40.27},
                             Line{"llama3-405b", 766.41, 211.25}})
        for (const char* weights : {"float", "nf4"}) {
            Ran r = run(std::string("--explain --precision bf16 --seq 512 --micro-batch 1 "
                                    "--lora 16 --recompute full --sample-tokens 0 --model ") +
                        line.model + " --weights " + weights);
            EXPECT_EQ(r.status, 0) << r.text;

            // Add up what lasts. The margin: the page has two digits, tensors end at multiples of
            // 256 bytes, and the vocabulary is padded.
            double bytes = 0;
            for (std::string part : {"weights", "gradients", "master weights",
                                     "optimizer moments"})
                bytes += number_behind(r.text, "\n  " + part + " ");
            double want = weights[0] == 'f' ? line.lora : line.qlora;
            EXPECT_NEAR(bytes / double(1 << 30), want, 0.006 + 0.0005 * want) << line.model;
        }
}

// --explain tells how many FLOPs a run takes, and hours at 40% of a GPU's peak: 312e12 FLOP/s on an
// A100, 989e12 on an H100. The run is GPT-2 124M on 10 billion tokens.
TEST_F(Run, ExplainSaysFlopsAndHours) {
    std::string flags =
        "--explain --model gpt2 --precision bf16 --seq 1024 --micro-batch 64 "
        "--batch-tokens 524288 --steps 18865 --sample-tokens 0 ";
    double flops = (6 * 124439808. + 6 * 12 * 768 * 1024) * 18865 * 524288;
    ASSERT_NEAR(flops, 7.945e18, 0.0005e18);

    // One GPU, and eight.
    for (int gpus : {1, 8}) {
        Ran r = run(flags + "--dp " + std::to_string(gpus));
        ASSERT_EQ(r.status, 0) << r.text;
        EXPECT_HAS(r.text,
                   "\nrun: 18865 steps x 524288 tokens = 9.9B tokens of 803.3M FLOPs = "
                   "7.945e18 FLOPs\n");
        for (auto& [device, peak] : {std::pair("A100", 312e12), std::pair("H100", 989e12)}) {
            char line[128];
            double hours = flops / (0.4 * peak) / 3600;
            int n =
                snprintf(line, sizeof(line), "\n  %s at 40%% of %.0f TFLOP/s in bf16: %.1f hours",
                         device, peak / 1e12, hours);
            if (gpus > 1)
                snprintf(line + n, sizeof(line) - size_t(n), ", on 8 GPUs %.1f\n", hours / 8);
            EXPECT_HAS(r.text, line);
        }
    }
    EXPECT_EQ(run(flags + "--eval").text.find("\nrun: "), std::string::npos);
}

// --explain draws a bar for each part of memory, as long as its share: full blocks (U+2588, eight
// eighths of a column), and at its end one of 7 to 1 eighths (U+2589 to U+258F).
TEST_F(Run, ExplainDrawsSharesOfMemory) {
    // Read each row's bytes, and the length of its bar in eighths.
    Ran r = run("--explain --model gpt2 --precision bf16 --micro-batch 4 --seq 1024");
    ASSERT_EQ(r.status, 0) << r.text;
    std::regex line(
        "\n  ( *[a-z/() ]+[a-z)]) +(\\d+) +[0-9.]+ [A-Za-z]+((  ((\xe2\x96.)+))?)[^\n]*");
    std::map<std::string, std::pair<double, int>> rows; // bytes, eighths
    for (std::sregex_iterator m(r.text.begin(), r.text.end(), line), end; m != end; ++m) {
        std::string bar = (*m)[5];
        int eighths = 0;
        for (size_t i = 2; i < bar.size(); i += 3) {
            eighths += 0x90 - static_cast<unsigned char>(bar[i]);
            EXPECT_TRUE(i + 1 == bar.size() || static_cast<unsigned char>(bar[i]) == 0x88);
        }
        rows[(*m)[1]] = {std::stod((*m)[2]), eighths};
    }

    // Bars are 40 columns for the total. The parts add up to it, up to rounding to pages.
    ASSERT_GT(rows.size(), 10u) << r.text;
    double total = rows["total"].first, sum = 0;
    EXPECT_EQ(rows["total"].second, 0);
    for (auto& [name, row] : rows) {
        EXPECT_NEAR(row.second, name == "total" ? 0 : row.first / total * 320, 0.5001) << name;
        bool part = name[0] == ' ' || name == "total" || name.rfind("activations (", 0) == 0;
        if (!part || name == "activations (train)") sum += row.first;
    }
    EXPECT_NEAR(sum, total, 0.01 * total);
}

// --explain of Llama 3's longest sequences on 16,384 GPUs (arXiv:2407.21783, table 4): with cp 16 a
// rank has 8,192 of the 131,072 tokens, and with tp 8 an eighth of their rows in the stream.
TEST_F(Run, LongSequencesOnAClusterExplainThemselves) {
    std::string flags =
        "--explain --model llama3-405b --precision bf16 --seq 131072 --micro-batch 1 "
        "--recompute full --device cpu --tp 8 --sequence-parallel --cp 16 --pp 16 --dp 8 --zero 2 "
        "--batch-tokens 16777216 --sample-tokens 0";
    Ran r = run(flags);
    ASSERT_EQ(r.status, 0) << r.text;
    EXPECT_HAS(r.text, "a line stands for 1024; 18 bytes a parameter, ");
    EXPECT_HAS(r.text, "on 16384 GPUs");
    EXPECT_HAS(r.text, "bubble: ranks are idle 48.4% of a step"); // 15 / 31, of 16 micro-batches
    EXPECT_HAS(r.text, "fits a GPU of 24 GB");

    // The GPU does not depend on this machine's threads; the workspace does, and says of how many.
    for (std::string threads : {"1", "4"}) {
        Ran other = run(flags, "OMP_NUM_THREADS=" + threads);
        EXPECT_HAS(other.text, "the workspace is that of " + threads + " threads");
        EXPECT_HAS(other.text, "fits a GPU of 24 GB");
    }

    // The first stage keeps the inputs of seven blocks for 16 micro-batches: 8,192 / 8 rows of
    // 16,384 channels in bf16.
    EXPECT_HAS(r.text,
               "residual stream              " + std::to_string(7 * 16 * 1024 * 16384 * 2ull));
}

// --explain of DeepSeek-V3 in its report's layout (arXiv:2412.19437, 3.2): 2,048 GPUs, pp 16, ep
// 64. The state of an expert is sharded over 2 ranks, all other state over 128.
TEST_F(Run, ExpertsOnAClusterExplainThemselves) {
    Ran r = run(
        "--explain --model deepseek-v3 --precision bf16 --seq 4096 --micro-batch 1 --recompute "
        "full "
        "--device cpu --dp 128 --pp 16 --ep 64 --zero 1 --batch-tokens 62914560 --sample-tokens 0");
    ASSERT_EQ(r.status, 0) << r.text;
    EXPECT_HAS(r.text, "parameters 671026419200");
    EXPECT_HAS(r.text, "on 2048 GPUs");
    // ZeRO 1 keeps 6 + 12 / 128 bytes a parameter; of an expert's parameters a rank has 1 / 64.
    EXPECT_HAS(r.text, "6.094 on each of 128 ranks by ZeRO 1, 0.1875 of an expert's by ep 64");
    EXPECT_HAS(r.text, "bubble: ranks are idle 11.1% of a step"); // 15 / 135, of 120 micro-batches
}

// --explain of a cluster of any size prints a line a stage, and the largest rank. The first stage's
// line agrees with the table of rank 0.
TEST_F(Run, AClusterExplainsItself) {
    // The ranks.
    Ran r =
        run("--explain --model llama3-405b --precision bf16 --seq 8192 --micro-batch 1 --recompute "
            "full --dp 64 --pp 16 --zero 1 --batch-tokens 16777216 --sample-tokens 0");
    ASSERT_EQ(r.status, 0) << r.text;
    EXPECT_HAS(r.text, "a line stands for 64; 18 bytes a parameter, 6.188 on each of 64 ranks");
    EXPECT_NE(r.text.find("bubble: ranks are idle 31.9% of a step"), std::string::npos) // 15 / 47
        << r.text;

    // The stages: numbers, live micro-batches, and layers that follow each other.
    std::regex line(
        "\n +(\\d+) +[0-9.]+ .iB +[0-9.]+ .iB +([0-9.]+) GiB +(\\d+)  (\\d+)\\.\\.(\\d+)\n");
    std::vector<double> totals;
    std::smatch m;
    int layer = 0;
    for (std::string rest = r.text; std::regex_search(rest, m, line);
         rest = "\n" + m.suffix().str()) {
        EXPECT_EQ(std::stoi(m[1]), int(totals.size()));
        EXPECT_EQ(std::stoi(m[3]), 16 - int(totals.size()));
        EXPECT_EQ(std::stoi(m[4]), layer);
        layer = std::stoi(m[5]) + 1;
        totals.push_back(std::stod(m[2]));
    }
    ASSERT_EQ(totals.size(), 16u) << r.text;
    EXPECT_EQ(layer, 128);

    // The largest rank, the first one, and GPUs.
    auto gigabytes = [&](const std::string& row) {
        EXPECT_TRUE(std::regex_search(r.text, m, std::regex("  " + row + " +\\d+ +([0-9.]+) GiB")));
        return std::stod(m[1]);
    };
    EXPECT_EQ(gigabytes("the largest"), *std::max_element(totals.begin(), totals.end()));
    EXPECT_EQ(gigabytes("total"), totals[0]);
    EXPECT_HAS(r.text, "fits no GPU: a rank of 1"); // of 100 to 199 GiB
    EXPECT_HAS(r.text, "on GPUs NCCL takes 2 sets of buffers beside it, 1.0 to 3.2 GB");
    EXPECT_HAS(run("--explain --dp 2 --tp 2").text, "2 sets of buffers beside it, 1.0 to 3.2 GB");
    EXPECT_HAS(run("--explain --pp 2").text, "NCCL takes 1 set of buffers beside it");
    EXPECT_HAS(run("--explain --dp 2 --pp 2").text, "NCCL takes 2 sets of buffers beside it");
    EXPECT_HAS(run("--explain --tp 2").text, "1 set of buffers");
}

// --explain names the smallest GPU that fits, or how many GPUs hold the model's state at least:
// here 18 bytes for each of 405 billion parameters, in 95% of a GPU's memory.
TEST_F(Run, ExplainSaysWhichGpuFits) {
    Ran r = run("--explain --model llama3-405b --precision bf16 --seq 8192 --micro-batch 1 "
                "--recompute full");
    EXPECT_HAS(r.text, "parameters 405853388800 (405.9B): ");
    EXPECT_HAS(r.text, " 6.7 TiB  one allocation");
    int gpus = int(std::ceil(18 * 405853388800. / (0.95 * 80 * 1073741824)));
    EXPECT_HAS(r.text, "fits no GPU: a rank of 6.7 TiB. The model's state, 6.6 TiB, needs " +
                           std::to_string(gpus) + " x 80 GB or ");
    for (const char* word : {"words: F forward", "R repeats", "LOAD reads", "COUNT sums", "bucket:",
                             "PUBLISH sends", "TIE adds", "NORM measures"})
        EXPECT_HAS(r.text, word);
    EXPECT_HAS(run("--explain").text, "\nfits a GPU of 8 GB (RTX 3070)\n");
    std::string xl = "--explain --model gpt2-xl --seq 1024 --micro-batch 1 --machine ";
    EXPECT_HAS(run(xl + "l40s").text, "\nfits l40s, which has 45.6 GiB for a rank\n");
    EXPECT_HAS(run(xl + "rtx4090").text, "\ndoes not fit rtx4090, which has 22.8 GiB for a rank\n");
    EXPECT_HAS(run("--explain --model gpt2-xl --seq 1024 --micro-batch 1").text,
               "\nfits a GPU of 48 GB (L40S)\n");
}

// With a token for each byte, bits per byte are the loss in nats divided by ln 2. If the vocabulary
// is not the tokenizer's, they are unknown and not printed.
TEST_F(Run, BitsPerByte) {
    std::smatch m;
    std::string text = run(small + "--steps 2").text;
    ASSERT_TRUE(std::regex_search(text, m, std::regex("val loss (\\S+) \\| (\\S+) bits per byte")))
        << text;
    EXPECT_NEAR(std::stod(m[2]), std::stod(m[1]) / std::log(2.0), 2e-4); // printed with 4 digits
    text = run(small + "--steps 2 --vocab 300").text;
    EXPECT_TRUE(std::regex_search(text, std::regex("val loss [0-9.]+ \\| 256 tokens\n"))) << text;
}

// Tasks ask about the text that the model learns. They are scored at each evaluation, and every
// layout prints the same scores.
TEST_F(Run, CompletionTasks) {
    // Write the tasks.
    std::string piqa, lambada;
    for (int i = 0; i < 7; i++) {
        std::string n = std::to_string(i);
        piqa += R"({"goal":"line )" + n +
                R"(","sol1":"of a text that repeats itself","sol2":"fo )" + n +
                R"( txet a zq xj vw kq","label":0})" + "\n";
        lambada += "line " + n + " of a text\n";
    }
    std::string tasks = "--eval piqa=" + put("piqa.jsonl", piqa) +
                        ",lambada=" + put("lambada.txt", lambada) + " --eval-tokens 64 ";

    // Train and evaluate twice, then evaluate the checkpoint in several layouts.
    std::regex lines(
        "val loss .*\npiqa 7/7  acc (\\S+) .*acc_norm (\\S+) .*\n"
        "lambada ./7  acc (\\S+) .*perplexity (\\S{4}).*\n");
    auto said = [&](const std::string& flags) { // the digits of each evaluation
        Ran r = run(small + tasks + "--out " + path("out") + " " + flags, "OMP_NUM_THREADS=1");
        EXPECT_EQ(r.status, 0) << r.text;
        std::vector<std::string> all;
        std::smatch m;
        for (std::string rest = r.text; std::regex_search(rest, m, lines); rest = m.suffix())
            all.push_back(m[1].str() + " " + m[2].str() + " " + m[3].str() + " " + m[4].str());
        EXPECT_FALSE(all.empty()) << r.text;
        return all;
    };
    std::vector<std::string> want =
        said("--steps 120 --eval-every 60 --lr 1e-2 --batch-tokens 512 --sample-tokens 0");
    ASSERT_EQ(want.size(), 2u);
    EXPECT_EQ(want[1].substr(0, 20), "1.0000 1.0000 1.0000") << "the text, against none";

    for (std::string layout : {"", "--local-ranks 2", "--local-ranks 4 --tp 2 --pp 2",
                               "--local-ranks 4 --zero 3 --tp 2 --sequence-parallel"})
        EXPECT_EQ(said("--resume --eval " + layout), std::vector{want[1]}) << layout;

    // The log has the scores of training; --eval alone writes no log.
    std::vector<nlohmann::json> found = logged(path("out"), "piqa");
    ASSERT_EQ(found.size(), 2u);
    EXPECT_EQ(found[1]["step"], 120);
    EXPECT_EQ(found[1]["piqa"], 1.0);
    EXPECT_EQ(found[1]["piqa_norm"], 1.0);
    EXPECT_EQ(found[1]["lambada"], 1.0);
    EXPECT_LT(found[1]["lambada_perplexity"], found[0]["lambada_perplexity"]);
    std::string plan = run(small + tasks + "--explain").text;
    EXPECT_HAS(plan, "activations (tasks)");

    // Without data --eval prints no loss, which would be that of other texts.
    std::string alone = "--layers 1 --channels 32 --heads 2 --sample-tokens 0 --eval " + tasks;
    EXPECT_EQ(run(alone).text.find("val loss"), std::string::npos);
    EXPECT_HAS(run(alone + " --data " + text).text, "val loss");

    // Mistakes are refused.
    refuses(small + "--eval pica=x", "did you mean piqa?");
    refuses(small + "--eval piqa=" + path("none"), "No such file");
    EXPECT_HAS(run(small + tasks + "--steps 0").text, "\npiqa ") << "the only evaluation";
    refuses(small + tasks + "--vocab 300 --eval", "--eval: the model has 300 tokens");
}

// ----------------------------------------------------------------------------
// track 3 of modded-nanogpt

// MurmurHash3's last mixing, of which track3_train.py makes weights and tokens.
static uint32_t hash32(uint32_t x) {
    x = (x ^ x >> 16) * 0x85ebca6bu;
    x = (x ^ x >> 13) * 0xc2b2ae35u;
    return x ^ x >> 16;
}

// A shard of the text of which each token hangs on others before it, and on chance.
static std::string track3_shard(uint32_t first, uint32_t count) {
    std::vector<uint16_t> text = {1, 2, 3, 4};
    for (uint32_t i = first; i < first + count; i++)
        text.push_back(uint16_t((5 * text.back() + 64 * (text.end()[-4] % 2) + 3 * (hash32(i) % 4) + 7) % 256));
    std::vector<int32_t> header(256);
    header[0] = 20240520, header[1] = 1, header[2] = int32_t(count);
    return std::string((const char*)header.data(), 1024) +
           std::string((const char*)(text.data() + 4), 2 * count);
}

// The safetensors file of a model whose parameters are base + spread times a hash of their place.
static std::string track3_weights(const nlohmann::json& parameters) {
    nlohmann::json header;
    std::string bytes;
    for (size_t p = 0; p < parameters.size(); p++) {
        const nlohmann::json& of = parameters[p];
        size_t begin = bytes.size(), n = 1;
        for (size_t dim : of["shape"]) n *= dim;
        for (size_t i = 0; i < n; i++) {
            double u = hash32(uint32_t(i + 2654435761u * p)) / 4294967296.0;
            float x = float(double(of["base"]) + double(of["spread"]) * (2 * u - 1));
            bytes.append((const char*)&x, sizeof(x));
        }
        header[of["name"].get<std::string>()] = {
            {"dtype", "F32"}, {"shape", of["shape"]}, {"data_offsets", {begin, bytes.size()}}};
    }
    std::string text = header.dump();
    uint64_t length = text.size();
    return std::string((const char*)&length, 8) + text + bytes;
}

// The flags of scripts/run_track3.sh train a small model as PyTorch does, with losses that are sums
// there and means here, from shards in order, each optimizer over other ranks.
TEST_F(Run, TrainsTrack3AsPyTorchDoes) {
    nlohmann::json golden = nlohmann::json::parse(read_file(ROOT + "/dev/golden/track3.json"));
    fs::create_directories(path("model"));
    put("model/config.json", golden["config"].dump());
    put("model/model.safetensors", track3_weights(golden["parameters"]));
    uint32_t shard = golden["shard_tokens"], val = golden["val_tokens"];
    for (uint32_t i = 0; i < 3; i++)
        put("train_" + std::to_string(i) + ".bin", track3_shard(i * shard, shard));
    put("val.bin", track3_shard(10000000, val + 1));
    std::string common = "--model " + path("model") + " --data in-order:" + path("train_*.bin") +
                         " --val " + path("val.bin") + " --seq 256 --batch-tokens 8192 --steps 60 "
                         "--min-lr 0 --schedule wsd:0.7 --beta2 0.95 --eps 1.220703125e-14 "
                         "--clip 0 --eval-every 20 --eval-tokens 16384 --sample-tokens 0 ";
    const std::string muon = "--beta1 0.8 --warmup 0 --lr 0.025 --weight-decay 0.05 --optimizer "
                             "muon,ns=convergent,scale=shape,table=0.7,head=0.004,vectors=0.015,"
                             "decay=0.1,decay-vectors ";
    const std::string adamw = "--beta1 0.9 --warmup 10 --lr 0.0015 --weight-decay 0.1 --optimizer "
                              "adamw,table=0.3,head=0.003125,vectors=0.01,decay=0,beta1=0.8 ";
    const std::string normuon = "--beta1 0.8 --warmup 0 --lr 0.035 --weight-decay 0.025 "
                                "--optimizer muon,normuon=0.95,ns=convergent,scale=shape,table=0.3,"
                                "head=0.003125,vectors=0.01,decay=0 ";
    for (auto& [name, flags] :
         {std::pair{"adamw", adamw + "--micro-batch 16"},
          {"muon", muon + "--micro-batch 8 --local-ranks 4 --tp 2 --zero 3"},
          {"normuon", normuon + "--micro-batch 8 --local-ranks 4 --dp 2 --pp 2 --zero 1"}}) {
        if (name == std::string("normuon") && !has(run("--help").text, "normuon")) continue;

        // The curve that --expect reads: PyTorch's, but for a last row that is off.
        const nlohmann::json& want = golden[name];
        std::string curve = "# step, mean, deviation\n";
        for (auto& [step, loss] : want["val"].items())
            curve += step + " " + std::to_string(double(loss) + (step == "60")) + " 0.000025\n";
        std::string out = path(name);
        Ran r = run(common + flags + " --expect " + put("curve.txt", curve) + " --out " + out);
        ASSERT_EQ(r.status, 0) << r.text;
        EXPECT_TRUE(std::regex_search(r.text, std::regex("step 40 .* deviations off: inside")));
        EXPECT_TRUE(std::regex_search(r.text, std::regex("step 60 .* deviations off: outside")));

        // Losses before each step, and of validations.
        std::vector<double> losses;
        double worst = 0;
        for (const nlohmann::json& j : logged(out, "loss")) losses.push_back(j["loss"]);
        for (const nlohmann::json& j : logged(out, "val_loss")) {
            double loss = want["val"][j["step"].dump()];
            EXPECT_NEAR(double(j["val_loss"]), loss, 1e-5) << name << j;
            EXPECT_NEAR(double(j["expected"]), loss + (j["step"] == 60), 1e-6) << j;
        }
        ASSERT_EQ(losses.size(), want["losses"].size());
        for (size_t i = 0; i < losses.size(); i++)
            worst = std::max(worst, std::abs(losses[i] - double(want["losses"][i])));
        EXPECT_LT(worst, 1e-5) << name << ": float is within 5e-8 here";
        printf("%s: losses within %.1e\n", name, worst);
    }

    // A curve that cannot be read is an error of one line.
    refuses(small + "--expect " + path("none"), "--expect " + path("none") + ": No such file");
    for (auto [text, wrong] : {std::pair{"# nothing\n\n", "has no line `step mean deviation`"},
                               {"\n5 3.2", ":2: wants `step mean deviation`"},
                               {"5 3.2 0", "a deviation above 0, not '5 3.2 0'"},
                               {"5 3.2 0.1 7", ":1: wants"},
                               {"five 3.2 0.1", ":1: wants"}})
        refuses(small + "--expect " + put("bad.txt", text), wrong);
}

// A seed gives the same sample again.
TEST_F(Run, SamplesAreRepeatable) {
    std::string generate = small + "--steps 0 --prompt line --sample-tokens 20 ";
    EXPECT_EQ(run(generate + "--seed 4").text, run(generate + "--seed 4").text);
    EXPECT_NE(run(generate + "--seed 4 --temperature 2").text,
              run(generate + "--seed 4 --temperature 0.5").text);
}

// ----------------------------------------------------------------------------
// going on

// A checkpoint knows its data: by their sizes and a sample of their content, not by their names.
TEST_F(Run, OtherDataThanTheCheckpointsAreSaid) {
    auto put_text = [&](const std::string& name, char c) { put(name, std::string(4000, c)); };
    put_text("a1.txt", 'a'), put_text("a2.txt", 'b'), put_text("v.txt", 'v');
    std::string flags = "--layers 1 --heads 2 --channels 32 --seq 32 --sample-tokens 0 --out " +
                        path("out") + " --data '" + path("a*.txt") + "' --val " + path("v.txt");
    int steps = 1;
    auto notes = [&](const std::string& more) {
        Ran r = run(flags + more + " --steps " + std::to_string(++steps));
        EXPECT_EQ(r.status, 0) << r.text;
        size_t at = r.text.find("is not the checkpoint's: ");
        return at == std::string::npos ? "" : r.text.substr(at - 8, r.text.find('\n', at) - at + 8);
    };
    EXPECT_EQ(notes(""), "");
    EXPECT_EQ(notes(" --resume"), "");

    // The same number of other bytes; a file more that the pattern matches; another --val.
    put_text("a2.txt", 'c');
    EXPECT_HAS(notes(" --resume"), "--data is not the checkpoint's: file 2 is \"" + path("a2.txt"));
    EXPECT_EQ(notes(" --resume"), "") << "the next checkpoint knows the new ones";
    put_text("a3.txt", 'd');
    EXPECT_HAS(notes(" --resume"), "a3.txt\", 4000 bytes, and was \"none\"");
    fs::remove(path("a3.txt"));
    EXPECT_HAS(notes(" --resume"), "file 3 is \"none\", 0 bytes, and was ");
    put_text("v.txt", 'w');
    EXPECT_HAS(notes(" --resume"), " --val is not the checkpoint's: file 1 ");

    // A folder that is moved holds the same data.
    fs::create_directories(path("b"));
    for (const char* name : {"a1.txt", "a2.txt"}) fs::rename(path(name), path(std::string("b/") + name));
    flags += " --data '" + path("b/*") + "'";
    EXPECT_EQ(notes(" --resume"), "");
}

// ----------------------------------------------------------------------------
// many ranks

// The lines of losses, and the last sample, without times and the layout.
static std::string curve(const std::string& text) {
    std::string kept;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) {
        std::smatch m;
        if (std::regex_search(line, m, std::regex("^step .*norm [0-9.]+")))
            kept += m[0].str() + "\n";
        else if (has(line, "val loss"))
            kept += std::regex_replace(line, std::regex(" in [0-9.]+m?s"), "") + "\n";
    }
    size_t end = text.rfind("---\n"), begin = text.rfind("---\n", end - 1);
    return kept + text.substr(begin, end - begin);
}

// Pipelines against one rank, and ZeRO 1 against 0, change no bit of losses, samples and exports.
TEST_F(Run, PipelinesAndShardsPrintWhatOneRankPrints) {
    std::string flags = small + "--steps 6 --eval-every 3 --temperature 0 --batch-tokens 512 ";

    // Pipelines, against one rank.
    std::string one = "OMP_NUM_THREADS=1";
    Ran want = run(flags + "--export " + path("one"), one);
    ASSERT_EQ(want.status, 0) << want.text;
    for (std::string layout :
         {"--local-ranks 2 --pp 2", "--local-ranks 3 --pp 3 --pipeline zero-bubble",
          "--local-ranks 2 --pp 2 --chunks 2 --pipeline interleaved --recompute full"}) {
        Ran got = run(flags + layout + " --export " + path("many"), one);
        ASSERT_EQ(got.status, 0) << layout << "\n" << got.text;
        EXPECT_EQ(curve(got.text), curve(want.text)) << layout;
        EXPECT_EQ(read_file(path("many/model.safetensors")),
                  read_file(path("one/model.safetensors")))
            << layout;
    }

    // ZeRO 1, against two data-parallel ranks.
    Ran two = run(flags + "--local-ranks 2 --export " + path("two"), one);
    for (std::string layout : {"--local-ranks 2 --zero 1", "--local-ranks 4 --pp 2 --zero 1"}) {
        Ran got = run(flags + layout + " --export " + path("many"), one);
        ASSERT_EQ(got.status, 0) << layout << "\n" << got.text;
        EXPECT_EQ(curve(got.text), curve(two.text)) << layout;
        EXPECT_EQ(read_file(path("many/model.safetensors")),
                  read_file(path("two/model.safetensors")))
            << layout;
    }
}

// ----------------------------------------------------------------------------
// ranks as processes

struct Processes : Run {
    std::string flags; // a run on two stages
    void SetUp() override {
        Run::SetUp();
        flags = small + "--steps 4 --temperature 0 --batch-tokens 512 --pp 2 ";
        NEEDS_PROCESSES();
    }

    // How so many processes are started.
    static std::string as(int ranks) { return "OMP_NUM_THREADS=1 " + mpirun(ranks); }

    // Run a shell script on each of two ranks.
    Ran on_two(const std::string& script) { return shell(as(2) + "sh -c '" + script + "'"); }

    // Expect an error that only one of the ranks prints.
    void says_once(const Ran& r, const std::string& part) {
        EXPECT_NE(r.status, 0);
        EXPECT_HAS(r.text, part);
        size_t first = r.text.find("error: ");
        EXPECT_EQ(r.text.find("error: ", first + 1), std::string::npos) << r.text;
    }
};

// Numbers of processes, and the flags of their layouts; all have two stages.
static const std::pair<int, const char*> process_layouts[] = {
    {2, ""}, {4, "--zero 2"}, {4, "--zero 3"}, {4, "--tp 2 --sequence-parallel"}};

// Processes print, save and export the same as threads in the same layout.
TEST_F(Processes, PrintAndSaveWhatThreadsDo) {
    for (auto [ranks, layout] : process_layouts) {
        SCOPED_TRACE(layout);
        fs::remove_all(path("to"));
        fs::remove_all(path("po"));
        std::string same = flags + layout;
        Ran want = run(
            same + " --local-ranks " + std::to_string(ranks) + " --export " + path("t") + " --out " + path("to"),
            "OMP_NUM_THREADS=1");
        Ran got = run(same + " --export " + path("p") + " --out " + path("po"), as(ranks));
        ASSERT_EQ(got.status, 0) << got.text;
        ASSERT_EQ(want.status, 0) << want.text;

        // Compare losses, samples, exports and checkpoints.
        EXPECT_EQ(curve(got.text), curve(want.text));
        EXPECT_EQ(read_file(path("t/model.safetensors")), read_file(path("p/model.safetensors")));
        auto saved = state_in(path("po/step_00000004"));
        EXPECT_EQ(saved.size(), size_t(ranks));
        EXPECT_TRUE(saved == state_in(path("to/step_00000004")));
    }
}

// A checkpoint of processes loads in one process and in two, with the weights of its export.
TEST_F(Processes, TheirCheckpointsAreReadByOneAndByTwo) {
    for (auto [ranks, layout] : process_layouts) {
        SCOPED_TRACE(layout);
        fs::remove_all(path("out"));
        Ran saved = run(flags + layout + " --export " + path("p") + " --out " + path("out"),
                        as(ranks));
        ASSERT_EQ(saved.status, 0) << saved.text;
        std::string read = small + "--steps 0 --sample-tokens 0 --resume --out " + path("out") +
                           " --export " + path("r");
        for (Ran r : {run(read), run(read + " --zero 3", as(2))}) {
            EXPECT_EQ(r.status, 0) << r.text;
            EXPECT_EQ(read_file(path("p/model.safetensors")),
                      read_file(path("r/model.safetensors")));
        }
    }
}

// The error of a rank that cannot write its file names the file; no part of the step is left.
TEST_F(Processes, OneWithAFullDiskIsNamed) {
    Ran full = on_two("[ $OMPI_COMM_WORLD_RANK = 1 ] && trap \"\" XFSZ && ulimit -f 60; exec " +
                      program() + " " + flags + " --save-every 0 --out " + path("full"));
    says_once(full,
              "rank_00001.safetensors: cannot be written: File too large; the checkpoints "
              "before it are as they were");
    for (const fs::directory_entry& e : fs::directory_iterator(path("full")))
        EXPECT_TRUE(e.path().filename() == "log.jsonl" || e.path().filename() == "lock");
}

// A wrong number of processes is refused, in one message.
TEST_F(Processes, OtherRanksThanTheLayoutHasAreRefusedOnce) {
    says_once(run("--dp 9", as(2)), "--dp 9 x --tp 1 x --pp 1 are 9 ranks, and there are 2");
}

// Ranks with different flags are refused.
TEST_F(Processes, OtherCommandLinesAreRefused) {
    Ran other = on_two("exec " + program() + " " + flags + " --seed $OMPI_COMM_WORLD_RANK");
    EXPECT_NE(other.status, 0);
    EXPECT_HAS(other.text, "the command line of rank 1 is not that of rank 0");
}

// A rank that runs other program bytes is refused, even if they run alike.
TEST_F(Processes, OtherProgramsAreRefused) {
    fs::copy_file(program(), path("other"));
    std::ofstream(path("other"), std::ios::app) << "x"; // runs as before
    Ran other = run(flags + " : -np 1 " + path("other") + " " + flags, as(1));
    EXPECT_HAS(other.text, "the program of rank 1 is not that of rank 0");
}

// If one process is killed no other is left waiting, and the last checkpoint is whole.
TEST_F(Processes, OneThatIsKilledEndsAll) {
    Ran killed =
        on_two("[ $OMPI_COMM_WORLD_RANK = 1 ] && (sleep 2; kill -9 $$) & exec " + program() + " " +
               flags + " --steps 1000000 --out " + path("k") + " --save-every 5");
    EXPECT_NE(killed.status, 0);
    EXPECT_NE(shell("pgrep -f '[s]teps 1000000 --out " + path("k") + "'").status, 0);
    EXPECT_EQ(run(flags + "--local-ranks 2 --steps 0 --resume --out " + path("k")).status, 0);
}

// Processes that are not bound to cores divide them, as threads do. Otherwise two teams of OpenMP
// threads on the same cores would wait for each other.
TEST_F(Run, ProcessesShareTheCores) {
    NEEDS_PROCESSES();
    Ran r = run("--explain --dp 2",
                "env -u OMP_NUM_THREADS timeout 60 mpirun --allow-run-as-root "
                "--oversubscribe --bind-to none -np 2");
    int share = std::max(1, int(sysconf(_SC_NPROCESSORS_ONLN)) / 2);
    EXPECT_HAS(r.text, "on the CPU with " + std::to_string(share) + " threads");
}

// --timeline writes a JSON trace with a box for every action of every rank, and for every wait for
// a collective; a rank's boxes follow each other. As SVG it has a lane for each rank.
TEST_F(Run, TimelinesShowEveryRank) {
    // Run two ranks, and read their boxes.
    std::string flags = small + "--steps 2 --batch-tokens 512 --sample-tokens 0 --pp 2 ";
    Ran r = run(flags + "--local-ranks 2 --timeline " + path("t.json"));
    ASSERT_EQ(r.status, 0) << r.text;
    nlohmann::json trace = nlohmann::json::parse(read_file(path("t.json")));
    std::map<int, int> forward;
    std::map<int, double> over;           // when a rank's last box ends
    std::map<std::string, int> under_way; // messages in flight
    for (auto& e : trace["traceEvents"]) {
        int rank = e["tid"].get<int>();
        std::string name = e["name"].get<std::string>();
        double start = e["ts"].get<double>(), lasts = e["dur"].get<double>();
        EXPECT_GE(lasts, 0);
        EXPECT_GE(start, over[rank]) << name;
        over[rank] = start + lasts;
        forward[rank] += name.rfind("F(", 0) == 0;

        // Each message that starts is waited for once. A wait for sends belongs to a message whose
        // receive has been waited for.
        bool waits = name.rfind("WAIT ", 0) == 0;
        bool sends = name.rfind("WAIT sends of ", 0) == 0;
        if (waits && !sends) under_way[name.substr(5)]--;
        if (name.rfind("SENDRECV(", 0) == 0) under_way[name]++;
        for (auto& [each, count] : under_way) EXPECT_EQ(count, count != 0) << each;
    }
    EXPECT_GE(under_way.size(), 8u); // 4 streams and 4 gradients, at both ends; some share a group
    for (auto& [name, left] : under_way) EXPECT_EQ(left, 0) << name;
    EXPECT_EQ(forward, (std::map<int, int>{{0, 4 * 2}, {1, 4 * 2}})); // micro-batches x layers

    // With --explain the picture is the schedule's simulation: a line for the title, the legend,
    // the axis and the end, and F and B in units.
    r = run(flags + "--explain --timeline " + path("t.svg"));
    ASSERT_EQ(r.status, 0) << r.text;
    std::string svg = read_file(path("t.svg"));
    EXPECT_HAS(svg, "ranks are idle 20.0% of a step"); // (p-1)/(m+p-1)
    EXPECT_HAS(svg, "stage 1");
    EXPECT_HAS(svg, "forward passes</text>");
    EXPECT_HAS(svg, "F0.0: 0 to 1 forward passes</title>");
    EXPECT_EQ(std::count(svg.begin(), svg.end(), '\n'), 3 + 2 * (1 + 8) + 2);

    // Without it, a step that ran.
    r = run(flags + "--local-ranks 2 --timeline " + path("ran.svg"));
    svg = read_file(path("ran.svg"));
    for (const char* part : {"rank 1", "0 ms</text>", " ms</title>", "message, reduction</text>"})
        EXPECT_HAS(svg, part);
    refuses(small + "--steps 1 --timeline " + path("none/t.svg"), "cannot be written");
}

// --timeline FILE.txt writes a row for each kind of action, the longest first, whose shares add up
// to 100%. The first of three steps is left out, so it counts two.
TEST_F(Run, ProfilesAddUp) {
    // The heading.
    std::string flags = small + "--batch-tokens 512 --sample-tokens 0 --timeline " + path("p.txt");
    Ran r = run(flags + " --steps 3");
    ASSERT_EQ(r.status, 0) << r.text;
    std::istringstream table(read_file(path("p.txt")));
    std::string line;
    std::getline(table, line);
    EXPECT_HAS(line, "rank 0 of 1");
    std::getline(table, line);
    EXPECT_EQ(line.rfind("2 steps of ", 0), 0u) << line;
    std::getline(table, line);

    // The rows.
    std::map<std::string, long> counts;
    double total = 0, last = INFINITY;
    while (std::getline(table, line)) {
        std::istringstream rest(line.substr(24));
        std::string kind = line.substr(0, line.find("  "));
        double ms = 0, each = 0, share = 0;
        rest >> counts[kind] >> ms >> each >> share;
        EXPECT_NEAR(each * double(counts[kind]), ms, 1e-3 * double(counts[kind])) << line;
        EXPECT_TRUE(kind == "between" || ms <= last) << line;
        last = ms;
        total += share;
    }

    // The sum: each row is rounded to a tenth.
    EXPECT_NEAR(total, 100, 0.05 * double(counts.size()));
    EXPECT_EQ(counts["NORM"], 2);
    EXPECT_EQ(counts["between"], 2);
    EXPECT_EQ(counts["F block"], counts["B block"]);
    for (const char* idle : {"--explain", "--eval", "--steps 0"})
        refuses(flags + " " + idle, "this run has none");
    refuses(small + "--steps 1 --timeline " + path("none/p.txt"), "cannot be written");
}

// Layouts that do not fit are refused in one line, whatever the number of ranks. The first case
// runs five times: its ranks could race to print.
TEST_F(Run, LayoutsThatDoNotFitAreRefused) {
    for (int i = 0; i < 5; i++)
        refuses("--local-ranks 8 --data " + path("nothing.txt"), "No such file");
    refuses("--dp 2", "are 2 ranks, and there are 1: use --local-ranks 2");
    refuses("--local-ranks 8 --pp 8 --layers 2", "the model has 4 layers");
    refuses("--local-ranks 2 --pp 2 --pipeline nothing", "neither gpipe, 1f1b");
    put("late.txt", "F0.0 B0.0\nB0.1 F0.1\n");
    refuses("--local-ranks 2 --pp 2 --pipeline " + path("late.txt"), "F must come first");
    refuses(small + "--local-ranks 2 --lr 1000 --clip 0 --warmup 1 --steps 50",
            "the first value that is not finite: micro-batch 0, layer ");
}

// ----------------------------------------------------------------------------
// other tokens than bytes

// A tokenizer file in llama2.c's format with 259 tokens: unknown, begin, end, and the bytes.
static std::string byte_fallback_tokenizer() {
    std::string file("\x06\0\0\0", 4);
    for (int i = 0; i < 259; i++) {
        char piece[8];
        int length = snprintf(piece, sizeof(piece), i < 3 ? "<%d>" : "<0x%02X>", i < 3 ? i : i - 3);
        file += std::string(4, '\0') + char(length) + std::string(3, '\0') + piece;
    }
    return file;
}

// With a tokenizer, text becomes its tokens, and samples are printed as text. The model may have
// more tokens than the tokenizer, but not fewer.
TEST_F(Run, TextIsTrainedOnAndPrintedInTheTokenizersTokens) {
    std::string tokenizer = "--tokenizer " + put("tokenizer.bin", byte_fallback_tokenizer());
    refuses(small + tokenizer + " --vocab 256", "writes 259 tokens, the model has 256");
    for (std::string vocab : {"", " --vocab 259", " --vocab 300"}) {
        Ran r = run(small + tokenizer + vocab + " --steps 2 --prompt 'line 7'");
        EXPECT_EQ(r.status, 0) << r.text;
        EXPECT_HAS(r.text, "---\nline 7");
        size_t tokens = read_file(text).size() + 1; // the tokenizer puts a space in front
        EXPECT_HAS(r.text, std::to_string(tokens - tokens / 10) + " tokens");
    }
}

// prepare_gpt turns JSON lines into shards of tokens, prints the command that trains on them, and
// that command runs. Text from a pipe makes the same shards.
TEST_F(Run, PreparesDataAndTrainsOnIt) {
    // Prepare.
    std::string lines;
    for (int i = 0; i < 400; i++) lines += "{\"text\": \"line " + std::to_string(i) + "\"}\n";
    std::string data = put("a.jsonl", lines), y = path("y");
    std::string prepare = program("prepare_gpt") + " --data ";
    Ran r = shell(prepare + data + " --document-end 10 --val-tokens 500 --shard-tokens 2000 " + y +
                  ".bin");
    EXPECT_EQ(r.text, "400 documents, 3490 tokens in 3 shards: " + y + ".json\n" +
                          "train:  train_gpt --data '" + y + "_*.bin' --val " + y +
                          ".val.bin; with --documents mask also --document-end 10\n");
    EXPECT_EQ(r.status, 0);

    // Train.
    r =
        run("--layers 1 --heads 1 --channels 8 --seq 16 --micro-batch 2 --steps 2 --documents mask "
            "--document-end 10 --data '" +
            y + "_*.bin' --val " + y + ".val.bin");
    EXPECT_HAS(r.text, "data: 2 files, 2990 tokens");
    EXPECT_EQ(r.status, 0);

    // Read from a pipe.
    std::string piped = prepare + "- --document-end 10 " + path("p.bin");
    EXPECT_EQ(shell("cat " + data + " | " + piped).status, 0);
    EXPECT_EQ(shell(prepare + data + " --document-end 10 " + path("z.bin")).status, 0);
    EXPECT_TRUE(read_file(path("p.bin")) == read_file(path("z.bin")));

    // Without a token that ends documents nothing is prepared.
    prepare += data + " " + path("w.bin");
    EXPECT_HAS(shell(prepare).text, "--tokenizer byte has no token that begins or ends a text");
    EXPECT_HAS(shell(prepare + " --tokenizer absent").text, "--tokenizer absent: No such file");
}

// ----------------------------------------------------------------------------
// what it refuses

// Mistakes in flags are refused, with a hint.
TEST_F(Run, RefusesFlagsAndShapes) {
    refuses("--stpes 3", "did you mean --steps?");
    refuses("--model gpt3", "presets: tiny");
    refuses("--model gtp2", "did you mean gpt2?");
    refuses("--device cuda", "built without kernels: make DEVICE=cuda");
    refuses("--tokenizer gpt2", "--tokenizer byte");
    refuses("--model gpt2 --steps 0 --prompt hello", "give the model's tokenizer");
}

// Data that cannot be trained on are refused: short, or in both splits.
TEST_F(Run, RefusesBadData) {
    std::string tiny =
        "--layers 1 --heads 1 --channels 8 --steps 1 --sample-tokens 0 --seq 32 --data ";
    refuses(tiny + put("short.txt", "few words"), "a sequence takes 33");

    // Data in both splits, and documents without a known end.
    refuses(tiny + text + " --val " + text, "is in --data and in --val");
    refuses(tiny + text + " --documents mask", "--document-end 10 for lines");
}

// Folders that hold no model, or another run, are refused.
TEST_F(Run, RefusesBadFolders) {
    refuses("--model " + dir, "has no config.json");
    refuses(small + "--steps 1 --out /proc/none", "--out /proc/none");
    ASSERT_EQ(run(small + "--steps 1 --out " + path("out")).status, 0);
    refuses(small + "--layers 3 --steps 2 --resume --out " + path("out"),
            "its layers is 2, this run's 3");
    refuses(small + "--seed 5 --steps 2 --resume --out " + path("out"), "--seed 1337, not 5");
    refuses(small + "--steps 1 --export " + dir, "which is no export of ours");
}

// An export that is loaded and exported again has the same bytes, and the same validation loss as
// the run that wrote it.
TEST_F(Run, ExportsLoadAgainToTheSameBits) {
    for (const char* model : {"tiny", "tiny-llama"}) {
        std::string a = path(std::string(model) + "_a"), b = path(std::string(model) + "_b");
        Ran r = run("--model " + std::string(model) +
                    " --layers 2 --seq 32 --sample-tokens 0 --eval-tokens 512 --steps 3 --data " +
                    text + " --export " + a);
        ASSERT_EQ(r.status, 0) << r.text;
        ASSERT_EQ(run("--model " + a + " --steps 0 --sample-tokens 0 --export " + b).status, 0);
        EXPECT_EQ(read_file(a + "/model.safetensors"), read_file(b + "/model.safetensors"));
        EXPECT_EQ(read_file(a + "/config.json"), read_file(b + "/config.json"));
        Ran e = run("--model " + a + " --eval --seq 32 --eval-tokens 512 --data " + text);
        EXPECT_EQ(number_behind(r.text, "val loss "), number_behind(e.text, "val loss "));
    }
}

// An upcycled model evaluates like its dense folder, trains with expert parallelism, and resumes to
// the same losses.
TEST_F(Run, UpcycledModelsBeginAsTheDenseOneAndGoOn) {
    // Train a dense model, and evaluate it upcycled.
    std::string dense = path("dense"), size = " --seq 32 --micro-batch 4 --sample-tokens 0 "
                                             "--eval-tokens 512 --data " + text + " ";
    Ran r =
        run("--model tiny-llama --layers 1 --heads 4 --kv-heads 2 --channels 32 --ffn 48 --steps 3 "
            "--export " +
            dense + size);
    ASSERT_EQ(r.status, 0) << r.text;
    auto loss = [](const std::string& words, const char* pattern) {
        std::smatch found;
        bool there = std::regex_search(words, found, std::regex(pattern));
        EXPECT_TRUE(there) << words;
        return there ? found[1].str() : "";
    };
    std::string model = "--model " + dense + " --upcycle 4" + size;
    EXPECT_EQ(loss(run(model + "--eval").text, "val loss ([0-9.]+)"),
              loss(r.text, "step 3 \\| val loss ([0-9.]+)"));

    // Train four steps at once, then two and two.
    std::string whole = model + "--batch-tokens 512 --warmup 0 --schedule constant --steps ";
    r = run(whole + "4 --local-ranks 2 --ep 2 --out " + path("all"));
    ASSERT_EQ(r.status, 0) << r.text;
    ASSERT_EQ(run(whole + "2 --local-ranks 2 --ep 2 --out " + path("half")).status, 0);
    Ran again = run("--out " + path("half") + " --resume --steps 4 --local-ranks 2 --ep 2");
    ASSERT_EQ(again.status, 0) << again.text;
    EXPECT_EQ(loss(again.text, "step +4/4 \\| loss ([0-9.]+ \\| norm [0-9.]+)"),
              loss(r.text, "step +4/4 \\| loss ([0-9.]+ \\| norm [0-9.]+)"));

    // Mistakes are refused.
    refuses("--model tiny-llama --upcycle 4", "is no folder of one: give a Hugging Face folder");
    refuses(model + "--experts 4", "has weights of its own shape");
}
