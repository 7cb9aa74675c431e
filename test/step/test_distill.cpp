// test_distill.cpp - distillation: a teacher beside the model that is trained
//   A teacher that is the student teaches nothing, exactly, in every layout; another teacher gives
//   every layout the same weights. The program loads one, goes on to the bit and refuses by name.
#include "../../llmc/tune/teacher.h"
#include "../harness/runs.h"
#include "../io/saved_models.h"

namespace {

// A layout, a teacher, and how much it counts.
struct TaughtCase {
    int dp = 1, tp = 1, pp = 1, zero = 0;
    bool sequence_parallel = false;
    bool itself = false; // the teacher has the student's shape and weights
    Objective objective = {LossKind::DISTILL};
    int micro_batches = 4; // of all data-parallel ranks
    std::string text() const {
        return concat("dp ", dp, " tp ", tp, " pp ", pp, " zero ", zero, " sp ",
                      sequence_parallel, " micro-batches ", micro_batches);
    }
};

Objective taught_by(double share, double temperature) {
    Objective o;
    o.kind = LossKind::DISTILL;
    o.share = share;
    o.temperature = temperature;
    return o;
}

// A teacher with the student's words, but other blocks: fewer, narrower, of other heads.
Shape small_teacher() { return llama_shape(2, 2, 2, 24, 36, 53, 64, 10000); }

struct Taught {
    std::vector<double> losses, norms, weights;
};

// Three steps beside a teacher.
template <typename T> Taught taught(const TaughtCase& c) {
    Taught result;
    EXPECT_EQ(run_local_ranks(c.dp * c.tp * c.pp, {}, [&](const Comm& world) {
        omp_set_num_threads(1);
        Layout sizes = small_layout(c.dp, c.tp, c.pp);
        sizes.zero = c.zero;
        sizes.sequence_parallel = c.sequence_parallel;
        auto layout_for = [&](const Shape& s) {
            Layout layout = layout_at(sizes, world.rank);
            layout.first_layer =
                split_layers(std::vector<double>(s.L + 2, 1.0), layout.stages());
            return layout;
        };

        // The student. The logits' chunks hold fewer rows than a micro-batch.
        Shape shape = c.itself ? small_variant(small_llama(), "track3") : small_llama();
        Shape other = c.itself ? shape : small_teacher();
        shape.V = other.V = 201; // words on both ranks that share out 256
        shape.loss.logits_bytes = other.loss.logits_bytes = 5 * 256 * sizeof(T);
        shape.loss.logits_rows = other.loss.logits_rows = 5;
        Plan plan = small_plan(16 / size_t(c.micro_batches), 8, c.micro_batches / c.dp);
        plan.objective = c.objective;
        plan.layout = layout_for(shape);
        Fixture<T> student(shape, {plan});
        auto& t = student.t;
        t.comms = make_comms(world, plan.layout, ranks_of_kv_head(plan.layout, t.model));
        t.hyper.weight_decay = 0;

        // The teacher.
        Teacher<T, Cpu> teacher;
        teacher_place(teacher, other, plan, layout_for(other));
        auto& u = teacher.t;
        u.comms = make_comms(world, u.layout, ranks_of_kv_head(u.layout, u.model));
        teacher_allocate(teacher);
        for (const Parameter& p : u.model.parameters) {
            std::vector<double> v(p.elements());
            for (size_t i = 0; i < p.file_elements(); i++)
                v[i] = p.init.value + float(p.shape.size() == 2 ? 0.2 : 0.1) * normals(5, p)[i];
            set_weight(u, p, v.data());
        }
        if (c.itself) // the very numbers
            for (const Parameter& p : t.model.parameters)
                set_weight(u, u.model.parameters[size_t(&p - t.model.parameters.data())],
                           get_weight(t, p).data());

        // Train.
        Taught mine;
        for (int i = 0; i < 3; i++) {
            if (c.objective.distills()) teacher_forward(teacher, t);
            run_plan(t, 0);
            t.data.cursor += 16;
            PlanResult r = plan_result(t);
            mine.losses.push_back(r.loss.mean());
            mine.norms.push_back(r.scale.norm);
        }
        for (const Parameter& p : t.model.parameters) {
            auto w = fetch_numbers(t, {Kind::WEIGHT, p.bucket}, p);
            mine.weights.insert(mine.weights.end(), w.begin(), w.begin() + long(p.file_elements()));
        }
        if (world.rank == 0) result = mine;
        teacher_free(teacher);
    }), 0);
    return result;
}

double difference(const std::vector<double>& a, const std::vector<double>& b) {
    EXPECT_EQ(a.size(), b.size());
    double worst = 0;
    for (size_t i = 0; i < std::min(a.size(), b.size()); i++)
        worst = std::max(worst, std::fabs(a[i] - b[i]));
    return worst;
}

const std::vector<TaughtCase> LAYOUTS = {
    {1, 1, 1, 0}, {2, 1, 1, 0}, {2, 1, 1, 1}, {2, 1, 1, 2}, {2, 1, 1, 3},
    {1, 2, 1, 0}, {1, 2, 1, 0, true}, {1, 1, 2, 0}, {2, 2, 1, 2}, {2, 1, 2, 3}};

// The student's own distribution has no divergence from itself; another row's would have one.
TEST(Distill, ATeacherThatIsTheStudentTeachesNothing) {
    for (TaughtCase c : LAYOUTS) {
        c.itself = true, c.objective = taught_by(1, 2);
        Taught r = taught<float>(c);
        EXPECT_EQ(r.losses, (std::vector<double>{0, 0, 0})) << c.text();
        EXPECT_EQ(r.norms, (std::vector<double>{0, 0, 0})) << c.text();
    }
}

// Layouts and micro-batches add in another order, and nothing else.
TEST(Distill, IsOneComputationInEveryLayout) {
    TaughtCase one;
    one.objective = taught_by(0.7, 2);
    Taught alone = taught<double>(one);
    EXPECT_GT(alone.losses[0], alone.losses[2]);
    for (TaughtCase c : LAYOUTS)
        for (int micro_batches : {2, 4}) {
            c.objective = one.objective, c.micro_batches = micro_batches;
            Taught r = taught<double>(c);
            EXPECT_LT(difference(r.losses, alone.losses), 1e-12) << c.text();
            EXPECT_LT(difference(r.norms, alone.norms), 1e-11) << c.text();
            EXPECT_LT(difference(r.weights, alone.weights), 1e-11) << c.text();
        }
}

// A teacher without weight leaves cross-entropy.
TEST(Distill, ATeacherWithoutAShareIsNotHeard) {
    TaughtCase none, plain;
    none.objective = taught_by(0, 3), plain.objective = {};
    Taught a = taught<double>(none), b = taught<double>(plain);
    EXPECT_LT(difference(a.losses, b.losses), 1e-13);
    EXPECT_LT(difference(a.weights, b.weights), 1e-11);
}

// ----------------------------------------------------------------------------
// the program

struct DistillRun : Scratch {
    std::string small, teacher;
    void SetUp() override {
        Scratch::SetUp();
        small = "--layers 1 --heads 2 --seq 32 --micro-batch 2 --batch-tokens 256 "
                "--sample-tokens 0 --eval-tokens 256 --lr 0.01 --schedule constant --data " +
                put("text.txt", numbered_lines(2000)) + " ";
        teacher = path("teacher");
    }
};

TEST_F(DistillRun, LearnsFromAFolderAndGoesOnToTheBit) {
    Ran r = start(small + "--channels 48 --heads 3 --steps 30 --export " + teacher);
    ASSERT_EQ(r.status, 0) << r.text;
    std::string flags = small + "--channels 32 --loss distill --distill-temperature 2 --teacher " +
                        teacher + " ";
    std::string once = path("once"), twice = path("twice");
    r = start(flags + "--steps 6 --out " + once);
    ASSERT_EQ(r.status, 0) << r.text;
    EXPECT_HAS(r.text, "teacher: " + teacher);
    ASSERT_EQ(start(flags + "--steps 3 --out " + twice).status, 0);
    r = start("--resume --steps 6 --out " + twice);
    ASSERT_EQ(r.status, 0) << r.text;
    std::string file = "/step_00000006/rank_00000.safetensors";
    EXPECT_EQ(read_file(once + file), read_file(twice + file));

    // Ranks say what one process says.
    Ran ranks = start(flags + "--local-ranks 2 --zero 2 --steps 6");
    ASSERT_EQ(ranks.status, 0) << ranks.text;
    Ran alone = start(flags + "--steps 6");
    EXPECT_NEAR(number_behind(ranks.text, "val loss "), number_behind(alone.text, "val loss "),
                2e-4); // two printed units: the sums of gradients round apart

    // A step that is repeated to compare ranks has the teacher's answers to the same samples.
    r = start(flags + "--local-ranks 2 --steps 2 --verify-every 1");
    EXPECT_EQ(r.status, 0) << r.text;

    // The plan counts the teacher: its weights (table, positions, 12 C^2 of a block) are a part.
    std::string deep = flags + "--layers 6 --steps 1 ";
    r = start(deep + "--explain");
    double beside = number_behind(r.text, "\n  teacher ");
    double arena = number_behind(r.text, "\n  total ");
    EXPECT_GT(beside, 4 * (256 * 48 + 32 * 48 + 12 * 48 * 48));

    // A machine predicts the step with the teacher's part, before the run and at its end; a plan
    // keeps its flags.
    EXPECT_HAS(start(deep + "--explain --machine cpu").text, "\n  evaluations before it ");
    r = start(flags + "--steps 3 --machine cpu");
    EXPECT_EQ(r.status, 0) << r.text;
    EXPECT_HAS(r.text, "predicted on cpu: ");
    r = start(flags + "--steps 3 --plan auto --gpus 2 --explain --memory 1");
    EXPECT_EQ(r.status, 0) << r.text;
    EXPECT_HAS(r.text, "\n  evaluations before it ");
    EXPECT_HAS(r.text, " --loss distill --teacher " + teacher);
    std::string taught_by = " --layers 2 --seq 32 --loss distill --teacher " + teacher;
    r = start("--heads 2 --channels 32 --batch-tokens 256 --sample-tokens 0 --eval-tokens 256 "
              "--steps 3 --plan auto --local-ranks 2 --data " + path("text.txt") + taught_by);
    EXPECT_EQ(r.status, 0) << r.text;
    EXPECT_HAS(r.text, "teacher: " + teacher);
    r = start("--fit 1 --model gpt2 --vocab 256" + taught_by);
    EXPECT_EQ(r.status, 0) << r.text;
    EXPECT_HAS(r.text, "  full ");
    EXPECT_HAS(start("--fit 1 --model gpt2" + taught_by).text, "has 256 tokens, and gpt2 50257");

    // Levels are chosen for the room that it leaves: less than a run without recomputation takes.
    double bound = (arena + beside - 4096) / (1 << 30);
    r = start(deep + concat("--recompute auto --memory ", bound));
    EXPECT_EQ(r.status, 0) << r.text;

    // A run's folder is a teacher too, and a student that begins as its teacher agrees with it.
    r = start(small + "--model " + teacher + " --heads 0 --layers 0 --loss distill "
              "--distill-share 1 --steps 1 --teacher " + teacher);
    ASSERT_EQ(r.status, 0) << r.text;
    EXPECT_HAS(r.text, "loss 0.0000");
    r = start(small + "--channels 32 --loss distill --steps 1 --teacher " + once);
    EXPECT_EQ(r.status, 0) << r.text;
}

TEST_F(DistillRun, RefusesWhatCannotTeach) {
    ASSERT_EQ(start(small + "--channels 32 --vocab 300 --steps 1 --export " + teacher).status, 0);
    std::string flags = small + "--channels 32 --steps 2 ";
    auto refused = [&](const std::string& arguments, const std::string& why) {
        Ran r = start(flags + arguments);
        EXPECT_NE(r.status, 0) << r.text;
        EXPECT_HAS(r.text, why);
    };
    refused("--loss distill", "learns from a teacher: give --teacher");
    refused("--teacher " + teacher, "is for --loss distill");
    refused("--distill-share 1", "is for --loss distill");
    refused("--loss distill --teacher nowhere", "is neither a Hugging Face folder");
    refused("--loss distill --teacher " + teacher, "has 300 tokens");
    refused("--loss distill --teacher a --local-ranks 2 --cp 2", "next to --cp 2 is not built");
}

} // namespace
