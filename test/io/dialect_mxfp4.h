// dialect_mxfp4.h - gpt-oss' folders in MXFP4
#include "../../llmc/extra/mxfp4.h"
#include "saved_models.h"

struct Mxfp4 : Scratch {};

// gpt-oss' experts in MXFP4 have the loss of transformers, whose class's defaults fill in the rest;
// so has the export, whose experts are plain numbers in bf16, which hold the codes exactly. Shape
// keeps the factor of cosines as a float, 6e-8 of itself: scores of size 1 move by 1e-7.
TEST_F(Mxfp4, FoldersGiveTransformersLoss) {
    std::string folder = ROOT + "/dev/golden/gpt-oss-mxfp4-tiny";
    json golden = read_json(folder + "/golden.json");
    Shape s;
    ASSERT_EQ(hf_read_config(&s, folder), "");

    // A step on the golden rows.
    auto loss_of = [&](Small<double>& m) {
        m.t.data.window = [&](uint64_t sample, int* tokens, int* targets) {
            for (size_t i = 0; i < 24; i++) {
                tokens[i] = golden["tokens"][sample][i].get<int>();
                targets[i] = golden["tokens"][sample][i + 1].get<int>();
            }
            return std::string();
        };
        run_plan(m.t, 0);
        return plan_loss(m.t).mean();
    };
    double want = golden["loss"].get<double>();
    Small<double> m(s, {plan_of(Mode::TRAIN, 3, 24)}), again(s, {plan_of(Mode::TRAIN, 3, 24)});
    m.t.hyper.lr = 0;
    ASSERT_EQ(hf_load_weights(m.t, folder, {MXFP4}), "");
    EXPECT_NEAR(loss_of(m), want, 1e-7);
    ASSERT_EQ(hf_export(m.t, dir + "/plain", Type::BF16), "");
    ASSERT_EQ(hf_load_weights(again.t, dir + "/plain"), "");
    EXPECT_NEAR(loss_of(again), want, 1e-7);
}

// Codes of another size, and of a width that blocks do not divide, are refused.
TEST_F(Mxfp4, WrongCodesAreNamed) {
    std::string golden = ROOT + "/dev/golden/gpt-oss-mxfp4-tiny";
    Shape s;
    ASSERT_EQ(hf_read_config(&s, golden), "");
    auto load = [&](auto change) {
        Shape other = s;
        change(other);
        return hf_load_weights(random_model<float>(other)->t, golden, {MXFP4});
    };
    EXPECT_EQ(load([](Shape&) {}), "");
    EXPECT_HAS(load([](Shape& x) { x.F = 64; }), "_blocks is U8 (3, 64, 2, 16), and U8 of");
    s.C = 40;
    UsedTensors used;
    Model narrow = make_model(s);
    const Parameter* gate = nullptr;
    for (const Parameter& p : narrow.parameters)
        if (has(p.name, "gate_proj.weight")) gate = &p;
    EXPECT_HAS(check_mxfp4({}, *gate, &used), "blocks of 32 do not divide 40 inputs");
}
