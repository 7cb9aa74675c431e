// test_averages.cpp - means of weights: --ema over steps, convert_gpt over several models
//   The mean of --ema against its formula over the weights of each step, in every layout; it is
//   saved and read by any layout, and a run goes on to the bit. its mean against sums of files.
#include "../harness/runs.h"
#include "../io/saved_models.h"

namespace {

// ----------------------------------------------------------------------------
// the mean of --ema

// A layout and what may vary beside it.
struct MeanCase {
    int dp, tp, pp, zero;
    Tier tier = Tier::DEVICE;
    Masters masters = Masters::FLOAT;
    std::string text() const {
        return concat("dp ", dp, " tp ", tp, " pp ", pp, " zero ", zero, " tier ", int(tier),
                      " masters ", int(masters));
    }
};

// One rank's trainer with a mean.
template <typename T> std::unique_ptr<Fixture<T>> mean_rank(const MeanCase& c, const Comm& world) {
    omp_set_num_threads(1);
    Layout sizes = small_layout(c.dp, c.tp, c.pp);
    sizes.zero = c.zero;
    Shape shape = small_llama();
    Plan plan = small_plan(2, 8, 4 / c.dp);
    plan.ema = true, plan.masters = c.masters;
    plan.offload.optimizer = c.tier, plan.offload.chunk = 4096;

    // Place it in the grid.
    plan.layout = layout_at(sizes, world.rank);
    plan.layout.first_layer =
        split_layers(std::vector<double>(shape.L + 2, 1.0), plan.layout.stages());
    auto rank = std::make_unique<Fixture<T>>(shape, std::vector<Plan>{plan});
    rank->t.comms = make_comms(world, plan.layout, ranks_of_kv_head(plan.layout, rank->t.model));
    rank->t.hyper.ema = 0.3;
    start_average(rank->t);
    return rank;
}

// Run a step of eight samples, whatever the layout.
template <typename T> void step_of(Fixture<T>& rank) {
    run_plan(rank.t, 0);
    rank.t.data.cursor += 8;
}

// All numbers of a kind, whole, one parameter after the other, without padding.
template <typename T> std::vector<double> whole(const Trainer<T, Cpu>& t, Kind kind) {
    std::vector<double> all;
    for (const Parameter& p : t.model.parameters) {
        std::vector<acc_t<T>> values = fetch_numbers(t, {kind, p.bucket}, p);
        all.insert(all.end(), values.begin(), values.begin() + long(p.file_elements()));
    }
    return all;
}

// The mean after five steps, which bend from (1+s)/(10+s) to the decay. Each step compares with the
// formula over the run's own weights; three roundings a step err by at most 3 * 5 units.
template <typename T> std::vector<double> mean_after(const MeanCase& c) {
    std::vector<double> last;
    EXPECT_EQ(run_local_ranks(c.dp * c.tp * c.pp, {}, [&](const Comm& world) {
        auto rank = mean_rank<T>(c, world);
        bool masters = sizeof(T) < sizeof(acc_t<T>) && c.masters != Masters::NONE;
        Kind weights = masters ? Kind::MASTER : Kind::WEIGHT;
        std::vector<double> want = whole(rank->t, weights);
        for (int s = 0; s < 5; s++) {
            step_of(*rank);
            std::vector<double> w = whole(rank->t, weights);
            double b = std::min(0.3, (1.0 + s) / (10.0 + s));
            for (size_t i = 0; i < w.size(); i++) want[i] = b * want[i] + (1 - b) * w[i];
        }

        // Compare.
        std::vector<double> mean = whole(rank->t, Kind::EMA);
        double unit = sizeof(acc_t<T>) == 8 ? 0x1p-52 : 0x1p-23, worst = 0;
        for (size_t i = 0; i < mean.size(); i++)
            worst = std::max(worst, std::fabs(mean[i] - want[i]));
        if (world.rank == 0) {
            EXPECT_EQ(mean.size(), want.size());
            EXPECT_LT(worst, 15 * unit * 2) << c.text(); // weights are below 2
            last = mean;
        }
    }), 0);
    return last;
}

TEST(Mean, IsItsFormulaInEveryLayout) {
    std::vector<double> alone = mean_after<double>({1, 1, 1, 0});
    ASSERT_GT(alone.size(), 1000u);
    for (MeanCase c : {MeanCase{2, 1, 1, 0}, {2, 1, 1, 1}, {2, 1, 1, 2}, {2, 1, 1, 3},
                       {1, 2, 1, 0}, {1, 1, 2, 0}, {2, 2, 1, 2}, {2, 1, 2, 3}}) {
        std::vector<double> there = mean_after<double>(c);
        ASSERT_EQ(there.size(), alone.size());
        double worst = 0;
        for (size_t i = 0; i < alone.size(); i++)
            worst = std::max(worst, std::fabs(there[i] - alone[i]));
        EXPECT_LT(worst, 1e-11) << c.text(); // as the weights of test_layouts.cpp
    }
}

// Offloading, and masters of every kind, change no bit of what they do not round.
TEST(Mean, IsTheSameWhereverItLies) {
    for (Masters masters : {Masters::FLOAT, Masters::REMAINDER, Masters::NONE}) {
        MeanCase c = {2, 1, 1, 1, Tier::DEVICE, masters};
        std::vector<double> here = mean_after<bf16>(c);
        ASSERT_GT(here.size(), 1000u);
        for (Tier tier : {Tier::HOST, Tier::DISK}) {
            c.tier = tier;
            EXPECT_TRUE(mean_after<bf16>(c) == here) << c.text();
        }
    }
}

// ----------------------------------------------------------------------------
// checkpoints

struct Averages : Scratch {};

// Save under one layout, and load under another.
TEST_F(Averages, AMeanIsSavedAndReadByAnyLayout) {
    const std::vector<MeanCase> cases = {{1, 1, 1, 0}, {2, 1, 1, 1}, {2, 1, 1, 3}, {1, 2, 1, 0},
                                         {1, 1, 2, 0}, {2, 1, 2, 2, Tier::HOST}};
    for (const MeanCase& from : cases) {
        std::vector<double> saved, weights;
        fs::remove_all(path("out")), fs::create_directories(path("out"));
        EXPECT_EQ(run_local_ranks(from.dp * from.tp * from.pp, {}, [&](const Comm& world) {
            auto rank = mean_rank<bf16>(from, world);
            step_of(*rank), step_of(*rank);
            EXPECT_EQ(checkpoint_save(rank->t, {2, 8, 5, {}}, path("out"), 2), "");
            std::vector<double> mean = whole(rank->t, Kind::EMA);
            std::vector<double> masters = whole(rank->t, Kind::MASTER);
            if (world.rank == 0) saved = mean, weights = masters;
        }), 0);
        EXPECT_FALSE(saved == weights);

        // Load it elsewhere; the first layout's next may be any.
        for (const MeanCase& to : cases)
            EXPECT_EQ(run_local_ranks(to.dp * to.tp * to.pp, {}, [&](const Comm& world) {
                auto rank = mean_rank<bf16>(to, world);
                CheckpointInfo info;
                std::vector<std::string> notes;
                EXPECT_EQ(checkpoint_load(rank->t, &info, path("out"), &notes), "");
                EXPECT_TRUE(whole(rank->t, Kind::EMA) == saved) << from.text() << to.text();
                EXPECT_TRUE(whole(rank->t, Kind::MASTER) == weights) << from.text() << to.text();
            }), 0);
    }
}

// ----------------------------------------------------------------------------
// the program

// Flags of a run of a second, on a text of its own.
std::string small_run(Averages& test) {
    std::string text = numbered_lines(2000, " repeats itself");
    return "--layers 1 --heads 2 --channels 32 --seq 32 --micro-batch 4 --sample-tokens 0 "
           "--eval-tokens 256 --lr 0.01 --schedule constant --data " +
           put_file(test.path("text.txt"), text) + " ";
}

// The bytes of a checkpoint's tensors.
std::string tensors_of(const std::string& checkpoint) {
    return read_file(checkpoint + "/rank_00000.safetensors");
}

double val_loss(const Ran& r) { return number_behind(r.text, "val loss "); }

TEST_F(Averages, ARunWithAMeanGoesOnToTheBit) {
    std::string flags = small_run(*this) + "--precision bf16 --ema 0.9 ";
    std::string once = path("once"), twice = path("twice");
    Ran r = start(flags + "--steps 12 --out " + once);
    ASSERT_EQ(r.status, 0) << r.text;
    ASSERT_EQ(start(flags + "--steps 5 --out " + twice).status, 0);
    r = start("--resume --steps 12 --out " + twice); // the flags are the checkpoint's
    ASSERT_EQ(r.status, 0) << r.text;
    EXPECT_EQ(tensors_of(once + "/step_00000012"), tensors_of(twice + "/step_00000012"));

    // The mean lags behind weights that learn, so its loss is another. It is exported as it is read.
    std::string read = "--resume --data " + path("text.txt") + " --out " + once;
    Ran plain = start(read + " --eval"), mean = start(read + " --eval --use-ema");
    ASSERT_EQ(mean.status, 0) << mean.text;
    EXPECT_GT(std::fabs(val_loss(plain) - val_loss(mean)), 0.001);
    r = start(read + " --use-ema --steps 0 --precision fp32 --export " + path("export"));
    ASSERT_EQ(r.status, 0) << r.text;
    TensorFile saved(once + "/step_00000012/rank_00000.safetensors");
    TensorFile exported(path("export") + "/model.safetensors");
    EXPECT_EQ(exported.floats("transformer.ln_f.weight"), saved.floats("ema.ln_f.weight"));
    EXPECT_NE(exported.floats("transformer.ln_f.weight"), saved.floats("param.ln_f.weight"));
}

// A checkpoint without a mean begins one; reading a mean that is not there is refused.
TEST_F(Averages, AMeanBeginsAndIsRefusedByName) {
    std::string flags = small_run(*this);
    ASSERT_EQ(start(flags + "--steps 2 --out " + path("out")).status, 0);
    Ran r = start("--resume --eval --use-ema --out " + path("out"));
    EXPECT_NE(r.status, 0);
    EXPECT_HAS(r.text, "holds no mean of weights: its run had no --ema; leave --use-ema out");
    EXPECT_EQ(start("--resume --steps 3 --ema 0.5 --keep 2 --out " + path("out")).status, 0);
    r = start("--resume --eval --use-ema --out " + path("out"));
    EXPECT_EQ(r.status, 0) << r.text;

    // It begins at the weights that the run resumed from. Step 3's b is 3 / 12: smaller than 0.5.
    auto read = [&](int step, const std::string& name) {
        TensorFile file(path("out") + "/" + step_folder(step) + "/rank_00000.safetensors");
        return file.floats(name);
    };
    std::vector<float> begun = read(2, "param.ln_f.weight"), last = read(3, "param.ln_f.weight");
    std::vector<float> mean = read(3, "ema.ln_f.weight");
    EXPECT_NE(begun, last);
    for (size_t i = 0; i < mean.size(); i++)
        EXPECT_NEAR(mean[i], 0.25 * begun.at(i) + 0.75 * last.at(i), 6 * std::ldexp(1.0, -23));

    EXPECT_HAS(start(flags + "--ema 1 --steps 2").text, "--ema wants a number from 0 to 0.99999");
    EXPECT_HAS(start(flags + "--use-ema --eval").text, "--use-ema reads the mean");
    EXPECT_HAS(start("--resume --use-ema --steps 9 --out " + path("out")).text, "train on from");
}

// The mean of three models is that of their files, rounded once, and in every layout.
TEST_F(Averages, MeansOfModelsAreThoseOfTheirFiles) {
    std::string flags = small_run(*this), dirs;
    Ran r = start(flags + "--precision bf16 --steps 6 --save-every 2 --keep 3 --out " +
                  path("out"));
    ASSERT_EQ(r.status, 0) << r.text;
    for (int step : {2, 4, 6})
        dirs += concat(" ", path("out"), "/", step_folder(step));
    auto convert = [&](const std::string& words) { return shell(program("convert_gpt") + words); };
    r = convert(dirs + " " + path("mean"));
    ASSERT_EQ(r.status, 0) << r.text;
    EXPECT_HAS(r.text, "the mean of 3 models");

    // Compare with sums of files.
    TensorFile mean(path("mean") + "/model.safetensors");
    std::vector<double> sum(32);
    for (int step : {2, 4, 6}) {
        TensorFile one(path("out") + "/" + step_folder(step) + "/rank_00000.safetensors");
        std::vector<float> x = one.floats("param.ln_f.bias");
        for (size_t i = 0; i < sum.size(); i++) sum[i] += x.at(i);
    }
    std::vector<float> got = mean.floats("transformer.ln_f.bias");
    for (size_t i = 0; i < sum.size(); i++) EXPECT_EQ(got.at(i), float(sum[i] / 3));

    // Ranks change no bit, and equal models are their own mean.
    r = convert(" --local-ranks 2 --tp 2" + dirs + " " + path("ranks"));
    ASSERT_EQ(r.status, 0) << r.text;
    EXPECT_EQ(read_file(path("mean/model.safetensors")), read_file(path("ranks/model.safetensors")));
    r = convert(" " + path("mean") + " " + path("ranks") + " " + path("again"));
    ASSERT_EQ(r.status, 0) << r.text;
    EXPECT_EQ(read_file(path("mean/model.safetensors")), read_file(path("again/model.safetensors")));
}

TEST_F(Averages, ModelsThatDifferAreRefusedByName) {
    std::string flags = small_run(*this);
    std::string a = path("a"), b = path("b");
    ASSERT_EQ(start(flags + "--steps 1 --out " + path("out") + " --export " + a).status, 0);
    ASSERT_EQ(start(flags + "--heads 4 --steps 1 --export " + b).status, 0);
    auto refused = [&](const std::string& models, const std::string& why) {
        Ran r = shell(program("convert_gpt") + " " + models + " " + path("mean"));
        EXPECT_NE(r.status, 0) << r.text;
        EXPECT_HAS(r.text, why);
        EXPECT_FALSE(fs::exists(path("mean")));
    };

    // Other heads have matrices of the same sizes.
    std::string checkpoint = path("out/step_00000001");
    refused(a + " " + b, b + " is of another model: its head_size is 8");
    refused(checkpoint + " " + b, b + " is of another model");
    refused(b + " " + checkpoint, "is of another model");
    refused(a + " " + a + "/", "is named twice: name each model once");
    refused(a + " " + path("nowhere"), "is neither a folder nor a file");
}

} // namespace
