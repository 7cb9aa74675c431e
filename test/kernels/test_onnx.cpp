// test_onnx.cpp - the operators against the ONNX operator tests, where the fixtures are at hand
//   Each case is a safetensors file: in.NAME, out.NAME, and its attributes in the metadata. Cases
//   that our operators cannot express (masks other than causal, softcap, other scales, past keys,
//   float16) are left out; the output says how many were used.
#include <dirent.h>
#include "../../llmc/ops/attention_tiled.cuh"
#include "../../llmc/ops/gelu.cuh"
#include "../../llmc/ops/layernorm.cuh"
#include "../../llmc/ops/rmsnorm.cuh"
#include "../../llmc/io/safetensors.h"
#include "../harness/testing.h"

using namespace llmc;

static const std::string CASES = FIXTURES + "/kernels_onnx/";

// An open case: its tensors and attributes.
struct Case {
    std::string name;
    SafeTensors file;
    nlohmann::json attributes;
    bool has(const std::string& name) const { return safetensors_find(file, name) != nullptr; }
    std::vector<size_t> shape(const std::string& name) const {
        return safetensors_find(file, name)->shape;
    }
    std::vector<float> get(const std::string& name) const {
        const SafeTensor* t = safetensors_find(file, name);
        std::vector<float> x(t ? t->elements() : 0);
        if (t) tensor_to_float(x.data(), *t, 0, x.size());
        return x;
    }
    double number(const char* key, double otherwise) const {
        return attributes.value(key, otherwise);
    }
};

// Run `use` on each case of a folder. It returns whether our operator can express the case.
// Returns how many it can.
template <typename F> int each_case(const std::string& folder, F use) {
    int used = 0, all = 0;
    DIR* d = opendir((CASES + folder).c_str());
    while (dirent* e = readdir(d)) {
        std::string name = e->d_name;
        if (name.find(".safetensors") == std::string::npos) continue;
        Case c;
        c.name = name;
        EXPECT_EQ(safetensors_open(&c.file, CASES + folder + "/" + name), "");
        c.attributes = nlohmann::json::parse(c.file.metadata["attributes"], nullptr, false);
        all++, used += use(c);
        safetensors_close(&c.file);
    }
    closedir(d);
    printf("%s: %d of %d cases can be expressed\n", folder.c_str(), used, all);
    return used;
}

// Compare with the case's output. The cases were computed in float, so 1e-5 of the
// largest number is allowed.
static void expect_close(const Case& c, const std::vector<float>& got,
                         const std::vector<float>& want) {
    ASSERT_EQ(got.size(), want.size()) << c.name;
    float most = 1;
    for (float w : want) most = std::max(most, std::fabs(w));
    for (size_t i = 0; i < got.size(); i++)
        ASSERT_NEAR(got[i], want[i], 1e-5f * most) << c.name << "[" << i << "]";
}

// Rows are the axes before `axis`. Channels are the axes from it on.
static void rows_and_channels(const Case& c, size_t* N, size_t* C) {
    std::vector<size_t> shape = c.shape("in.X");
    int axis = int(c.number("axis", -1));
    size_t first = axis < 0 ? shape.size() - size_t(-axis) : size_t(axis);
    *N = *C = 1;
    for (size_t i = 0; i < shape.size(); i++) (i < first ? *N : *C) *= shape[i];
}

TEST(Onnx, LayerNormalization) {
    NEEDS_FIXTURES();
    int used = each_case("layer_normalization", [](const Case& c) {
        size_t N, C;
        rows_and_channels(c, &N, &C);
        std::vector<float> x = c.get("in.X"), w = c.get("in.W"), b = c.get("in.B"), y(N * C),
                           mean(N), rstd(N);
        layernorm_forward(y.data(), mean.data(), rstd.data(), x.data(), w.data(), b.data(), N, C,
                          float(c.number("epsilon", 1e-5)), Cpu{});
        expect_close(c, y, c.get("out.Y"));
        if (c.has("out.Mean")) expect_close(c, mean, c.get("out.Mean"));
        if (c.has("out.InvStdDev")) expect_close(c, rstd, c.get("out.InvStdDev"));
        return true;
    });
    EXPECT_GE(used, 15);
}

TEST(Onnx, RmsNormalization) {
    NEEDS_FIXTURES();
    int used = each_case("rms_normalization", [](const Case& c) {
        size_t N, C;
        rows_and_channels(c, &N, &C);
        std::vector<float> x = c.get("in.X"), w = c.get("in.W"), y(N * C), rstd(N);
        rmsnorm_forward(y.data(), rstd.data(), x.data(), w.data(), N, C,
                        float(c.number("epsilon", 1e-5)), Cpu{});
        expect_close(c, y, c.get("out.Y"));
        return true;
    });
    EXPECT_GE(used, 15);
}

TEST(Onnx, Gelu) {
    NEEDS_FIXTURES();
    int used = each_case("gelu", [](const Case& c) {
        if (c.attributes.value("approximate", "none") != "tanh") return false;
        std::vector<float> x = c.get("in.x"), y(x.size());
        gelu_forward(y.data(), x.data(), x.size(), Cpu{});
        expect_close(c, y, c.get("out.y"));
        return true;
    });
    EXPECT_EQ(used, 2);
}

// Reorder (B,heads,T,HS), the order of cases of rank 4, to our rows (B,T,heads,HS), or back.
static std::vector<float> rows_of(const std::vector<float>& x, size_t B, size_t heads, size_t T,
                                  size_t HS, bool back) {
    std::vector<float> y(x.size());
    for (size_t b = 0; b < B; b++)
        for (size_t h = 0; h < heads; h++)
            for (size_t t = 0; t < T; t++)
                for (size_t e = 0; e < HS; e++) {
                    size_t ours = ((b * T + t) * heads + h) * HS + e,
                           theirs = ((b * heads + h) * T + t) * HS + e;
                    y[back ? theirs : ours] = x[back ? ours : theirs];
                }
    return y;
}

TEST(Onnx, Attention) {
    NEEDS_FIXTURES();
    int used = each_case("attention", [](const Case& c) {
        // Leave out what our operator cannot express.
        for (const char* other : {"in.attn_mask", "in.past_key", "in.nonpad_kv_seqlen"})
            if (c.has(other)) return false;
        for (const char* other : {"softcap", "scale"})
            if (c.attributes.contains(other)) return false;

        // Read the shape. Cases of rank 3 name their numbers of heads in attributes.
        std::vector<size_t> q = c.shape("in.Q"), k = c.shape("in.K");
        bool rank4 = q.size() == 4;
        size_t NH = rank4 ? q[1] : size_t(c.number("q_num_heads", 1)),
               NKV = rank4 ? k[1] : size_t(c.number("kv_num_heads", 1));
        size_t B = q[0], Tq = rank4 ? q[2] : q[1], Tk = rank4 ? k[2] : k[1],
               HS = rank4 ? q[3] : q[2] / NH;

        // Ours takes floats, values as wide as keys, and whole groups of heads.
        bool good = safetensors_find(c.file, "in.Q")->dtype == "F32" && c.shape("in.V") == k &&
                    NH % NKV == 0 && c.attributes.value("softmax_precision", 1) == 1;
        if (!good) return false;

        // Bring the operands into our order.
        std::vector<float> Q = c.get("in.Q"), K = c.get("in.K"), V = c.get("in.V"), out(Q.size()),
                           lse(B * NH * Tq);
        if (rank4)
            Q = rows_of(Q, B, NH, Tq, HS, false), K = rows_of(K, B, NKV, Tk, HS, false),
            V = rows_of(V, B, NKV, Tk, HS, false);

        // Place queries and keys. Without a causal mask every query stands after all keys.
        std::vector<int> q_positions(B * Tq), k_positions(B * Tk), starts(B * Tq, 0);
        for (size_t i = 0; i < B * Tq; i++)
            q_positions[i] =
                c.number("is_causal", 0) ? int(i % Tq) : int(Tk);
        for (size_t j = 0; j < B * Tk; j++) k_positions[j] = int(j % Tk);

        // Run, and compare in the case's order.
        AttentionDims d = {B, Tq, Tk, NH, NKV, HS, NH * HS, NKV * HS};
        std::vector<unsigned char> scratch(
            attention_scratch_bytes<float>(d, threads_here(Cpu{}), Cpu{}) + 256);
        Blas blas;
        blas_scratch(blas, scratch.data() + (256 - uintptr_t(scratch.data()) % 256) % 256,
                     scratch.size() - 256);
        AttentionOperands<float> x = {Q.data(),           K.data(),           V.data(),
                                      nullptr,            q_positions.data(), k_positions.data(),
                                      starts.data(),      nullptr,            d};
        attention_forward(out.data(), lse.data(), x, blas, Cpu{});
        expect_close(c, rank4 ? rows_of(out, B, NH, Tq, HS, true) : out, c.get("out.Y"));
        return true;
    });
    EXPECT_GE(used, 10);
}
