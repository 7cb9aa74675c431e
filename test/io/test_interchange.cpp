// test_interchange.cpp - models and tokenizers of others: llm.c's, llama2.c's, llama.cpp's files
//   Exports take their tokenizer along, and each malformed file is answered with one line.
#include <omp.h>
#include "../../llmc/tune/adapter_files.h"
#include "../../llmc/io/generate.h"
#include "../../llmc/io/model_files.h"
#include "../../llmc/io/chat.h"
#include "../../llmc/extra/gguf.h"
#include "../harness/runs.h"
#include "../step/small_models.h"

using namespace llmc;

using nlohmann::json;
static const int one_thread = (omp_set_num_threads(1), 1); // the models are tiny

struct Interchange : Scratch {
    void put_all(const std::string& folder, const std::map<std::string, std::string>& files) {
        for (const auto& [name, bytes] : files) put(folder + "/" + name, bytes);
    }
};

// ----------------------------------------------------------------------------
// files as their projects write them

// Element i of a parameter, by the parameter's Hugging Face name. bf16 holds it exactly.
static float element(const std::string& name, size_t i) {
    return to_float(from_acc<bf16>(float(normal(3, fnv1a(name), i))));
}

// A binary file that grows word by word.
struct BinFile {
    bool narrow = false; // values are bf16
    std::string bytes = {};
    void word(int32_t x) { bytes.append(reinterpret_cast<char*>(&x), 4); }
    void real(float x) { bytes.append(reinterpret_cast<char*>(&x), 4); }
    void pad(size_t size) { bytes.resize(size); }
    void value(float x) {
        uint16_t half = from_acc<bf16>(x).bits;
        narrow ? void(bytes.append(reinterpret_cast<char*>(&half), 2)) : real(x);
    }
    void tensor(const std::string& name, size_t elements) {
        for (size_t i = 0; i < elements; i++) value(element(name, i));
    }
    // A matrix whose rows are (heads, HS/2, 2, C), from one that Hugging Face has as (heads, 2,
    // HS/2, C): RoPE's pairs are neighbours.
    void neighbours(const std::string& name, size_t heads, size_t HS, size_t C) {
        for (size_t h = 0; h < heads; h++)
            for (size_t i = 0; i < HS / 2; i++)
                for (size_t of_pair : {0, 1})
                    for (size_t c = 0; c < C; c++)
                        value(element(name, ((h * 2 + of_pair) * (HS / 2) + i) * C + c));
    }
};

// llm.c's GPT-2. Version 3 is float and version 5 is bf16. The table is padded to a multiple
// of 128 rows.
static BinFile llmc_gpt2(const Shape& s, int version) {
    BinFile f = {version == 5};
    size_t L = s.L, C = s.C, Vp = round_up(s.V, 128);
    for (size_t x : {size_t(20240326), size_t(version), s.P, s.V, L, s.NH, C, Vp}) f.word(int(x));
    f.pad(1024);

    // Each parameter of all layers is one tensor.
    auto layers = [&](const std::string& name, size_t elements) {
        for (size_t l = 0; l < L; l++) f.tensor("h." + std::to_string(l) + "." + name, elements);
    };

    f.tensor("wte.weight", s.V * C);
    for (size_t i = s.V * C; i < Vp * C; i++) f.value(0);
    f.tensor("wpe.weight", s.P * C);
    layers("ln_1.weight", C), layers("ln_1.bias", C);
    layers("attn.c_attn.weight", 3 * C * C), layers("attn.c_attn.bias", 3 * C);
    layers("attn.c_proj.weight", C * C), layers("attn.c_proj.bias", C);
    layers("ln_2.weight", C), layers("ln_2.bias", C);
    layers("mlp.c_fc.weight", 4 * C * C), layers("mlp.c_fc.bias", 4 * C);
    layers("mlp.c_proj.weight", 4 * C * C), layers("mlp.c_proj.bias", C);
    f.tensor("ln_f.weight", C), f.tensor("ln_f.bias", C);
    return f;
}

// llm.c's Llama. The ffn width is not stored: it follows from `factor` and `multiple`.
static BinFile llmc_llama(const Shape& s, int version, float factor, int multiple) {
    BinFile f = {version == 5};
    bool scaled = s.rope.scaling.factor != 1;
    for (size_t x : {size_t(20240803), size_t(version), s.P, s.V, s.L, s.NH, s.NKV, s.C})
        f.word(int(x));
    f.word(multiple), f.word(scaled), f.word(3), f.word(1);
    f.pad(1024);
    f.real(factor), f.real(s.block.norm_eps), f.real(float(s.rope.theta));
    f.pad(2048);

    // Each parameter of all layers is one tensor, with q, k and v in one.
    auto name = [](size_t l, const char* n) {
        return "model.layers." + std::to_string(l) + "." + n;
    };
    auto layers = [&](const char* n, size_t elements) {
        for (size_t l = 0; l < s.L; l++) f.tensor(name(l, n), elements);
    };

    f.tensor("model.embed_tokens.weight", s.V * s.C);
    layers("input_layernorm.weight", s.C);
    for (size_t l = 0; l < s.L; l++) { // c_attn
        f.neighbours(name(l, "self_attn.q_proj.weight"), s.NH, s.HS, s.C);
        f.neighbours(name(l, "self_attn.k_proj.weight"), s.NKV, s.HS, s.C);
        f.tensor(name(l, "self_attn.v_proj.weight"), s.NKV * s.HS * s.C);
    }
    layers("self_attn.o_proj.weight", s.C * s.C);
    layers("post_attention_layernorm.weight", s.C);
    layers("mlp.up_proj.weight", s.F * s.C),
        layers("mlp.gate_proj.weight", s.F * s.C); // llm.c calls them c_fc and c_fc2
    layers("mlp.down_proj.weight", s.C * s.F);
    f.tensor("model.norm.weight", s.C), f.tensor("lm_head.weight", s.V * s.C);
    return f;
}

// llama2.c's models. Version 0 is the older form, without a magic number.
static BinFile llama2c(const Shape& s, int version) {
    BinFile f;

    // The header, in which a negative vocabulary means an untied head.
    if (version) f.word(0x616b3432), f.word(version);
    for (size_t x : {s.C, s.F, s.L, s.NH, s.NKV}) f.word(int(x));
    f.word(s.embedding.tied || version ? int(s.V) : -int(s.V)), f.word(int(s.P));
    if (version) f.bytes += char(s.embedding.tied), f.pad(256);

    auto layers = [&](const char* n, size_t elements, size_t heads = 0) {
        for (size_t l = 0; l < s.L; l++) {
            std::string name = "model.layers." + std::to_string(l) + "." + n;
            heads ? f.neighbours(name, heads, s.HS, s.C) : f.tensor(name, elements);
        }
    };
    auto norms = [&](bool first) {
        layers(first ? "input_layernorm.weight" : "post_attention_layernorm.weight", s.C);
    };

    // The tensors. The newer form has all norms first.
    if (version) norms(true), norms(false), f.tensor("model.norm.weight", s.C);
    f.tensor("model.embed_tokens.weight", s.V * s.C);
    if (!version) norms(true);
    layers("self_attn.q_proj.weight", 0, s.NH), layers("self_attn.k_proj.weight", 0, s.NKV);
    layers("self_attn.v_proj.weight", s.NKV * s.HS * s.C),
        layers("self_attn.o_proj.weight", s.C * s.C);
    if (!version) norms(false);
    layers("mlp.gate_proj.weight", s.F * s.C), layers("mlp.down_proj.weight", s.C * s.F);
    layers("mlp.up_proj.weight", s.F * s.C);

    if (!version) {
        f.tensor("model.norm.weight", s.C);
        for (size_t i = 0; i < s.P * s.HS; i++) f.real(float(i)); // cosines and sines
    }
    if (!s.embedding.tied) f.tensor("lm_head.weight", s.V * s.C);
    return f;
}

// ----------------------------------------------------------------------------
// models

struct LayoutCase {
    int dp = 1, tp = 1, pp = 1, zero = 0;
};

// Run ranks as threads: body(trainer) on each.
template <typename F> static void with_ranks(const Shape& s, LayoutCase l, F body) {
    SCOPED_TRACE(concat("dp ", l.dp, " tp ", l.tp, " pp ", l.pp, " zero ", l.zero));
    int status = run_local_ranks(l.dp * l.tp * l.pp, {}, [&](const Comm& world) {
        omp_set_num_threads(1);
        Layout sizes = small_layout(l.dp, l.tp, l.pp);
        sizes.zero = l.zero;
        sizes.first_layer = split_layers(std::vector<double>(s.L + 2, 1.0), l.pp);
        Plan p = small_plan(1, 4, 2);
        p.layout = layout_at(sizes, world.rank);
        Small<float> m(s, {p});
        m.t.comms = make_comms(world, m.t.layout, ranks_of_kv_head(m.t.layout, m.t.model));
        body(m.t);
    });
    EXPECT_EQ(status, 0);
}

// Load a file on all ranks, gather its weights, and compare them with element(). Together the ranks
// read each byte once.
template <typename F>
static void expect_elements(const std::string& path, const Shape& s, LayoutCase l, F body) {
    SCOPED_TRACE(path);
    std::atomic<size_t> read = 0;
    with_ranks(s, l, [&](auto& t) {
        size_t bytes = 0;
        ASSERT_EQ(model_file_load(t, path, &bytes), "");
        read += bytes;
        for (const Parameter& each : t.model.parameters) {
            std::vector<float> found = get_weight(t, each);
            for (size_t i = 0; i < found.size(); i++)
                ASSERT_EQ(found[i], i < each.file_elements() ? element(each.name, i) : 0)
                    << each.name << " " << i;
        }
        body(t);
    });

    ModelFile m;
    size_t all = 0;
    ASSERT_EQ(model_file_open(&m, path), "");
    for (const SafeTensor& tensor : m.file.tensors) all += tensor.bytes;
    model_file_close(&m);
    EXPECT_EQ(read, all);
}
static void expect_elements(const std::string& path, const Shape& s, LayoutCase l) {
    expect_elements(path, s, l, [](const auto&) {});
}

static const std::vector<LayoutCase> layouts = {
    {}, {2, 1, 1, 3}, {1, 2, 1, 0}, {1, 1, 2, 0}, {2, 2, 1, 2}};

static Shape published_gpt2() { return gpt2_shape(3, 4, 16, 61, 10); }
static Shape published_llama(bool tied) {
    Shape s = llama_shape(3, 4, 2, 32, 48, 61, 10, 10000);
    s.embedding.tied = tied;
    return s;
}

// An export from any layout has the bytes of the file that was read.
TEST_F(Interchange, LlmcGpt2IsWrittenAsItWasRead) {
    for (int version : {3, 5}) {
        std::string bytes = llmc_gpt2(published_gpt2(), version).bytes, out = dir + "/out.bin";
        Type dtype = version == 5 ? Type::BF16 : Type::F32;
        Shape s;
        ASSERT_EQ(model_file_shape(&s, put("in.bin", bytes)), "");
        EXPECT_EQ(model_identity(s), model_identity(published_gpt2()));

        for (LayoutCase l : layouts) {
            fs::remove(out);
            expect_elements(dir + "/in.bin", published_gpt2(), l, [&](const auto& t) {
                EXPECT_EQ(model_file_export(t, out, dtype), "");
            });
            EXPECT_TRUE(read_file(out) == bytes) << version;
            EXPECT_FALSE(fs::exists(out + ".tmp"));
        }
    }

    // Models that have no such form, and files that cannot be written.
    auto check = [&](Shape s, Type dtype = Type::F32) {
        return model_file_check(s, dir + "/out.bin", dtype);
    };
    Shape alibi = published_gpt2(), untied = alibi, narrow = alibi, eps = alibi;
    alibi.embedding.position = Position::ALIBI, untied.embedding.tied = false, narrow.F = 32, eps.block.norm_eps = 1e-6f;
    EXPECT_EQ(check(published_gpt2()), "");
    for (const Shape& s : {alibi, untied, narrow, eps, published_llama(true)})
        EXPECT_HAS(check(s), "is of a GPT-2 as it was published");
    EXPECT_HAS(check(published_gpt2(), Type::F16), "float or bf16: --export-dtype bf16");
    EXPECT_HAS(model_file_check(published_gpt2(), dir, Type::F32), "is no file");
    EXPECT_HAS(model_file_check(published_gpt2(), dir + "/no/out.bin", Type::F32), "No such file");
}

// ----------------------------------------------------------------------------
// llama.cpp's files, read by the words of their specification

struct Gguf {
    struct Tensor {
        std::vector<uint64_t> sizes; // the fastest-changing first
        uint32_t type = 0;
        const unsigned char* data = nullptr;
    };
    std::string bytes;
    size_t at = 0;
    json keys;
    std::map<std::string, Tensor> tensors;

    template <typename A> A take() {
        A x;
        EXPECT_LE(at + sizeof(A), bytes.size());
        memcpy(&x, bytes.data() + at, sizeof(A));
        at += sizeof(A);
        return x;
    }
    std::string take_text() {
        size_t n = take<uint64_t>();
        at += n;
        return bytes.substr(at - n, n);
    }
    json take_value(uint32_t type) {
        if (type == 4) return take<uint32_t>();
        if (type == 5) return take<int32_t>();
        if (type == 6) return take<float>();
        if (type == 7) return take<char>() != 0;
        if (type == 8) return take_text();
        EXPECT_EQ(type, 9u);
        uint32_t of = take<uint32_t>();
        json list = json::array();
        for (uint64_t n = take<uint64_t>(); n > 0; n--) list.push_back(take_value(of));
        return list;
    }
    Gguf(const std::string& path) : bytes(read_file(path)) {
        EXPECT_EQ(take<uint32_t>(), 0x46554747u);
        EXPECT_EQ(take<uint32_t>(), 3u);

        // The keys and their values.
        uint64_t count = take<uint64_t>(), pairs = take<uint64_t>();
        for (uint64_t i = 0; i < pairs; i++) {
            std::string key = take_text();
            EXPECT_FALSE(keys.contains(key)) << key;
            keys[key] = take_value(take<uint32_t>());
        }

        // The tensors' names, sizes and places.
        std::vector<std::pair<std::string, uint64_t>> places;
        for (uint64_t i = 0; i < count; i++) {
            std::string name = take_text();
            Tensor t;
            for (uint32_t n = take<uint32_t>(); n > 0; n--) t.sizes.push_back(take<uint64_t>());
            t.type = take<uint32_t>();
            places.push_back({name, take<uint64_t>()});
            EXPECT_EQ(places.back().second % 32, 0u) << name;
            EXPECT_TRUE(tensors.insert({name, t}).second) << name;
        }

        // The data begins at a multiple of 32.
        size_t begin = (at + 31) / 32 * 32;
        for (const auto& [name, place] : places) {
            tensors[name].data =
                reinterpret_cast<const unsigned char*>(bytes.data()) + begin + place;
            EXPECT_LE(begin + place + width(name), bytes.size()) << name;
        }
    }
    size_t elements(const std::string& name) const {
        size_t n = 1;
        for (uint64_t d : tensors.at(name).sizes) n *= d;
        return n;
    }
    size_t width(const std::string& name) const {
        uint32_t type = tensors.at(name).type;
        return type == 8 ? elements(name) / 32 * 34 : elements(name) * (type == 0 ? 4 : 2);
    }
    std::vector<float> values(const std::string& name) const {
        const Tensor& t = tensors.at(name);
        std::vector<float> x(elements(name));
        for (size_t i = 0; i < x.size(); i++) {
            uint16_t half;
            memcpy(&half, t.data + (t.type == 8 ? i / 32 * 34 : i * 2), 2);
            if (t.type == 0) memcpy(&x[i], t.data + i * 4, 4);
            if (t.type == 1) x[i] = to_float(fp16{half});
            if (t.type == 30) x[i] = to_float(bf16{half});
            if (t.type == 8) x[i] = to_float(fp16{half}) * int8_t(t.data[i / 32 * 34 + 2 + i % 32]);
        }
        return x;
    }
};

// Pairs of our names and llama.cpp's, as its own script pairs them.
typedef std::vector<std::pair<std::string, std::string>> NamePairs;
static NamePairs with_block(NamePairs all, const NamePairs& block, size_t layers,
                            const std::string& prefix) {
    for (size_t l = 0; l < layers; l++)
        for (const auto& [ours, theirs] : block)
            all.push_back({concat(prefix, l, ".", ours), concat("blk.", l, ".", theirs)});
    return all;
}
static NamePairs gpt2_names(const Shape& s) {
    NamePairs all = {{"wte.weight", "token_embd.weight"}, {"wpe.weight", "position_embd.weight"}};
    NamePairs block;
    for (std::string half : {".weight", ".bias"}) {
        all.push_back({"ln_f" + half, "output_norm" + half});
        NamePairs words = {{"ln_1", "attn_norm"}, {"attn.c_attn", "attn_qkv"},
                           {"attn.c_proj", "attn_output"}, {"ln_2", "ffn_norm"},
                           {"mlp.c_fc", "ffn_up"}, {"mlp.c_proj", "ffn_down"}};
        for (const auto& [ours, theirs] : words) block.push_back({ours + half, theirs + half});
    }
    return with_block(all, block, s.L, "h.");
}
static NamePairs llama_names(const Shape& s) {
    NamePairs all = {{"model.embed_tokens", "token_embd"}, {"model.norm", "output_norm"}};
    if (!s.embedding.tied) all.push_back({"lm_head", "output"});
    NamePairs block = {{"input_layernorm", "attn_norm"}, {"post_attention_layernorm", "ffn_norm"},
                       {"self_attn.q_proj", "attn_q"}, {"self_attn.k_proj", "attn_k"},
                       {"self_attn.v_proj", "attn_v"}, {"self_attn.o_proj", "attn_output"},
                       {"mlp.gate_proj", "ffn_gate"}, {"mlp.up_proj", "ffn_up"},
                       {"mlp.down_proj", "ffn_down"}};
    if (s.block.qk_norm) block.push_back({"self_attn.q_norm", "attn_q_norm"});
    if (s.block.qk_norm) block.push_back({"self_attn.k_norm", "attn_k_norm"});
    all = with_block(all, block, s.L, "model.layers.");
    for (auto& [ours, theirs] : all) ours += ".weight", theirs += ".weight";
    NamePairs biases;
    for (const char* of : {"q", "k", "v"})
        biases.push_back({concat("self_attn.", of, "_proj.bias"), concat("attn_", of, ".bias")});
    return s.attention.qkv_bias ? with_block(all, biases, s.L, "model.layers.") : all;
}

// The index of our parameter's element that llama.cpp's tensor has at index i: its pairs
// of RoPE are neighbours.
static size_t place_in_ours(const Shape& s, const Parameter& p, size_t i) {
    bool turns = p.name.find("q_proj") < p.name.size() || p.name.find("k_proj") < p.name.size();
    if (!turns || s.hf_type.starts_with("qwen")) return i;
    size_t cols = p.elements() / p.rows(), row = i / cols, e = row % s.HS;
    return (row - e + e / 2 + e % 2 * (s.HS / 2)) * cols + i % cols;
}

// Hold each tensor of a file against the elements that the model's weights were made from.
static void expect_gguf(const std::string& path, const Shape& s, const Model& model,
                        const std::string& type) {
    Gguf f(path);
    std::map<std::string, const Parameter*> table;
    for (const Parameter& p : model.parameters) table[p.name] = &p;

    NamePairs names = s.family == Family::GPT2 ? gpt2_names(s) : llama_names(s);
    ASSERT_EQ(f.tensors.size(), names.size() + scales(s.rope.scaling));
    ASSERT_EQ(table.size(), names.size());
    uint32_t number = type == "fp32" ? 0 : type == "fp16" ? 1 : type == "bf16" ? 30 : 8;
    for (const auto& [ours, theirs] : names) {
        ASSERT_TRUE(f.tensors.count(theirs)) << theirs;
        const Parameter& p = *table.at(ours);

        // Its sizes and its type: vectors stay float; rows that are not blocks of 32 are fp16.
        const Gguf::Tensor& t = f.tensors[theirs];
        std::vector<uint64_t> sizes = {p.file_rows};
        if (p.shape.size() == 2) sizes.insert(sizes.begin(), p.cols());
        EXPECT_EQ(t.sizes, sizes) << theirs;
        bool vector = p.shape.size() == 1 || ours == "wpe.weight";
        bool blocks = p.cols() % 32 == 0;
        EXPECT_EQ(t.type, vector ? 0 : number == 8 && !blocks ? 1 : number) << theirs;

        // Its values, within the error of the type.
        std::vector<float> values = f.values(theirs);
        for (size_t i = 0; i < values.size(); i++) {
            float x = element(ours, place_in_ours(s, p, i)), most = 0;
            if (t.type != 8) {
                // fp16's smallest numbers are 2^-24 apart.
                ASSERT_NEAR(values[i], x, t.type == 1 ? 0x1p-25 : 0) << theirs << " " << i;
                continue;
            }

            // A block of 8 bits may err by half a step, and by the error of its scale in fp16,
            // 2^-11 of a step, times at most 127 steps.
            for (size_t k = i / 32 * 32; k < i / 32 * 32 + 32; k++)
                most = std::max(most, std::abs(element(ours, place_in_ours(s, p, k))));
            ASSERT_NEAR(values[i], x, most / 127 * (0.5 + 127 * 0x1p-11)) << theirs << " " << i;
        }
    }

    if (!scales(s.rope.scaling)) return;
    std::vector<float> divides = f.values("rope_freqs.weight");
    ASSERT_EQ(divides.size(), s.HS / 2);

    // A wave of 2 pi tokens lies between 4, where waves stay, and 16, where they are stretched.
    double stays = (16 / (2 * M_PI) - 1) / (4 - 1);
    EXPECT_NEAR(divides[0], 1 / ((1 - stays) / 8 + stays), 1e-6);
    for (size_t i = 1; i < divides.size(); i++) EXPECT_NEAR(divides[i], 8, 1e-5);
}

// One rank writes each type, and every layout writes floats.
TEST_F(Interchange, GgufHasEveryNumberWhereLlamaCppLooksForIt) {
    Shape llama = small_llama(), qwen2 = small_llama(true, true), qwen3 = small_qwen3();
    qwen2.hf_type = "qwen2", qwen2.attention.o_bias = qwen2.block.mlp_bias = false;
    Shape with_scaled = small_qwen3();
    for (Shape* s : {&qwen2, &qwen3}) s->rope.scaling = {};
    std::string out = dir + "/out.gguf";

    for (const Shape& s : {gpt2_shape(3, 4, 32, 61, 10), llama, qwen2, qwen3}) {
        ASSERT_EQ(gguf_check(s, out), "");
        for (LayoutCase l : layouts)
            for (std::string type : {"fp32", "fp16", "bf16", "q8_0"}) {
                if (type != "fp32" && l.tp * l.dp * l.pp > 1) continue;
                fs::remove(out);
                with_ranks(s, l, [&](auto& t) {
                    for (const Parameter& p : t.model.parameters) {
                        std::vector<float> values(p.file_elements());
                        for (size_t i = 0; i < values.size(); i++) values[i] = element(p.name, i);
                        set_file_weight(t, p, values);
                    }
                    MergeSums sums;
                    EXPECT_EQ(gguf_export(t, out, gguf_type(type), nullptr, {}, "m", &sums), "");
                });
                expect_gguf(out, s, make_model(s), type);
            }
    }

    // The keys of the last file.
    Gguf f(out);
    json wanted = {{"general.architecture", "qwen3"}, {"general.name", "m"},
                   {"general.quantization_version", 2}, {"general.file_type", 0},
                   {"qwen3.context_length", 64}, {"qwen3.embedding_length", 32},
                   {"qwen3.block_count", 3}, {"qwen3.feed_forward_length", 44},
                   {"qwen3.vocab_size", 53}, {"qwen3.attention.head_count", 4},
                   {"qwen3.attention.head_count_kv", 2}, {"qwen3.attention.key_length", 12},
                   {"qwen3.attention.value_length", 12}, {"qwen3.rope.dimension_count", 12},
                   {"qwen3.rope.freq_base", 10000.0f}, {"tokenizer.ggml.model", "no_vocab"},
                   {"qwen3.attention.layer_norm_rms_epsilon", 1e-5f}};
    EXPECT_EQ(f.keys.dump(), wanted.dump());

    EXPECT_HAS(gguf_check(small_variant(small_llama(), "gemma2"), out), "not for gemma2");
    EXPECT_HAS(gguf_check(with_scaled, out), "scales rotary positions in another way");

    // llama.cpp's architectures have no place for these.
    Shape wide = qwen2, biased = small_qwen3(), windows = llama;
    wide.HS *= 2, biased.attention.qkv_bias = biased.attention.o_bias = true, biased.rope.scaling = {};
    EXPECT_HAS(gguf_check(wide, out), "llama.cpp's qwen2 has heads of 32 channels together, this "
                                      "model's have 64: export a folder");
    EXPECT_HAS(gguf_check(biased, out), "llama.cpp's qwen3 has no biases");
    windows.hf_type = "mistral", windows.attention.window = 7;
    EXPECT_EQ(gguf_check(windows, out), "");
    EXPECT_EQ(gguf_context(windows), 7u);
    EXPECT_HAS(gguf_check(qwen3, dir), "is no file");
    EXPECT_HAS(gguf_check(qwen3, dir + "/no/out.gguf"), "No such file");
}

// The file holds the tokenizer and the chat's template.
TEST_F(Interchange, GgufHasTheTokenizer) {
    Tokenizer bytes, pieces;
    ASSERT_EQ(tokenizer_open(&bytes, "byte"), "");
    EXPECT_EQ(gguf_no_tokenizer(bytes), "");

    GgufKeys keys;
    Shape s = published_llama(true);
    s.V = 258;
    ExportTokenizer beside = {3, 4};
    beside.chat_template = "{{ x }}";
    add_gguf_tokenizer(&keys, &bytes, beside, s);
    auto read = [&] {
        std::string file = "GGUF";
        gguf_put(&file, uint32_t(3)), gguf_put(&file, uint64_t(0)), gguf_put(&file, keys.count);
        return Gguf(put("keys", file + keys.bytes)).keys;
    };

    // Bytes: a model of GPT-2's kind, whose vocabulary is filled up.
    json j = read();
    EXPECT_EQ(j["tokenizer.ggml.model"], "gpt2");
    EXPECT_EQ(j["tokenizer.ggml.pre"], "gpt-2");
    EXPECT_EQ(j["tokenizer.ggml.tokens"].size(), 258u);
    EXPECT_EQ(j["tokenizer.ggml.tokens"][65], "A");
    EXPECT_EQ(j["tokenizer.ggml.tokens"][32], "\u0120"); // GPT-2's letter for a space
    EXPECT_EQ(j["tokenizer.ggml.tokens"][257], "[PAD257]");
    EXPECT_EQ(j["tokenizer.ggml.token_type"][256], 5);
    EXPECT_EQ(j["tokenizer.ggml.merges"].size(), 0u);

    EXPECT_EQ(j["tokenizer.ggml.bos_token_id"], 3);
    EXPECT_EQ(j["tokenizer.ggml.eos_token_id"], 4);
    EXPECT_EQ(j["tokenizer.ggml.add_bos_token"], false);
    EXPECT_EQ(j["tokenizer.chat_template"], "{{ x }}");

    // SentencePiece: the lower a piece's rank, the higher its score.
    pieces.kind = TokenizerKind::BPE, pieces.sentencepiece = true, pieces.vocab_size = 6;
    pieces.unknown = 0, pieces.bos = 1, pieces.prefix = Prefix::SPACE;
    pieces.pieces = {"", "", "", "a", "b", "ab"};
    pieces.special = {{"<s>", 1}}, pieces.byte_token[10] = 2;
    pieces.merges = {{0, NO_RANK, 0}, {uint64_t(3) << 32 | 4, 7, 5}};
    keys = {}, s.V = 6, beside.eos = -1, beside.kept["eos_token_id"] = {4, 5};
    beside.chat_template = "{{ y }}";
    add_gguf_tokenizer(&keys, &pieces, beside, s);
    j = read();

    EXPECT_EQ(j["tokenizer.ggml.model"], "llama");
    EXPECT_EQ(j["tokenizer.ggml.token_type"], json({2, 3, 6, 1, 1, 1}));
    EXPECT_EQ(j["tokenizer.ggml.scores"], json({0.0, 0.0, 0.0, 0.0, 0.0, -8.0}));
    EXPECT_EQ(j["tokenizer.ggml.tokens"], json({"<unk>", "<s>", "<0x0A>", "a", "b", "ab"}));

    EXPECT_EQ(j["tokenizer.ggml.unknown_token_id"], 0);
    EXPECT_EQ(j["tokenizer.ggml.eos_token_id"], 4);
    EXPECT_EQ(j["tokenizer.ggml.add_bos_token"], true);
    EXPECT_EQ(j["tokenizer.ggml.add_space_prefix"], true);
    EXPECT_EQ(j["tokenizer.chat_template"], "{{ y }}");

    // Ways of cutting words that llama.cpp has no name for, and a tokenizer without merges.
    Tokenizer other = bytes;
    other.kind = TokenizerKind::BPE, other.pieces.resize(256), other.longest = 2;
    for (int b = 0; b < 256; b++) other.pieces[b] = std::string(1, char(b));
    other.pattern_texts = {CL100K_PATTERN};
    EXPECT_EQ(gguf_words(other), "dbrx");
    other.whole_words = true;
    EXPECT_EQ(gguf_words(other), "llama-bpe");
    other.pattern_texts = {GPT2_PATTERN};
    EXPECT_HAS(gguf_no_tokenizer(other), "no name for the way it cuts words");

    // Texts of which llama.cpp makes other tokens.
    EXPECT_EQ(gguf_other_texts(other), "");
    EXPECT_EQ(gguf_other_texts(pieces), "");
    pieces.late_spaces = true;
    EXPECT_HAS(gguf_other_texts(pieces), "several spaces together");
    fixed_add(&other.raw, "A", 65, {false, false, false, true});
    EXPECT_HAS(gguf_other_texts(other), "around \"A\"");
    other.unicode_form = UTF8PROC_COMPOSE;
    EXPECT_HAS(gguf_other_texts(other), "Unicode normal form");
    other.kind = TokenizerKind::UNIGRAM;
    EXPECT_EQ(gguf_no_tokenizer(other), "it is unigram");
}

// The ffn width is computed as Llama 3 does, for small numbers and for those of 3.1 8B.
TEST_F(Interchange, LlmcLlama) {
    Shape wanted = published_llama(false);
    wanted.rope.theta = 500000, wanted.rope.scaling = {8, 1, 4, 8192};
    wanted.F = 112; // 85 x 1.3 = 110.5, up to a multiple of 16
    for (int version : {3, 5}) {
        std::string path = put("llama", llmc_llama(wanted, version, 1.3f, 16).bytes);
        Shape s;
        ASSERT_EQ(model_file_shape(&s, path), "");
        EXPECT_EQ(model_identity(s), model_identity(wanted));
        for (LayoutCase l : layouts) expect_elements(path, s, l);
    }

    // 3.1 8B: 8030261248 weights of two bytes, and the header.
    BinFile f;
    for (int x : {20240803, 5, 8192, 128256, 32, 32, 8, 4096, 1024, 1, 3, 1}) f.word(x);
    f.pad(1024), f.real(1.3f), f.real(1e-5f), f.real(500000), f.pad(2048);
    Shape s; // the file is refused only because of its size
    EXPECT_HAS(model_file_shape(&s, put("8b", f.bytes)),
               "is 2048 bytes long, its header asks for 16060524544: get it again");
}

TEST_F(Interchange, Llama2c) {
    for (int version : {0, 1})
        for (bool tied : {true, false}) {
            std::string path = put("llama2c", llama2c(published_llama(tied), version).bytes);
            Shape s;
            ASSERT_EQ(model_file_shape(&s, path), "");
            EXPECT_EQ(model_identity(s), model_identity(published_llama(tied)));
            for (LayoutCase l : layouts) expect_elements(path, s, l);
        }
}

TEST_F(Interchange, Stories260kIsTheSameInBothForms) {
    NEEDS_FIXTURES();
    std::string folder = FIXTURES + "/checkpoints/stories260K", path = folder + "/stories260K.bin";
    Shape s, of_folder;
    ASSERT_EQ(model_file_shape(&s, path), "");
    ASSERT_EQ(hf_read_config(&of_folder, folder + "/hf"), "");
    EXPECT_EQ(model_identity(s), model_identity(of_folder));

    // The weights of the file and of the folder are the same.
    Plan plan = small_plan(1, 1, 1);
    plan.mode = Mode::GENERATE, plan.cache = 256;
    Small<float> a(s, {plan}), b(s, {plan});
    ASSERT_EQ(hf_load_weights(a.t, folder + "/hf"), "");
    ASSERT_EQ(model_file_load(b.t, path), "");
    for (const Parameter& p : a.t.model.parameters)
        EXPECT_EQ(get_weight(a.t, p), get_weight(b.t, p)) << p.name;

    // They generate the expected text.
    std::vector<int> ids = {1},
                     expected = json::parse(read_file(folder + "/expected_greedy_ids.json"))["ids"]
                                    .get<std::vector<int>>();
    EXPECT_GE(expected.size(), 200u);
    generate(b.t, 0, {1}, expected.size() - 1, {0, 1, 0, 1, 0},
             [&](int token) { ids.push_back(token); });
    EXPECT_EQ(ids, expected);
}

// ----------------------------------------------------------------------------
// files that are refused

static std::string with_word(std::string bytes, size_t i, int32_t word) {
    memcpy(&bytes[4 * i], &word, 4);
    return bytes;
}

// Lengths, versions and shapes that do not fit, each named.
TEST_F(Interchange, WrongModelFilesAreNamed) {
    auto error = [&](const std::string& bytes) {
        Shape s;
        return model_file_shape(&s, put("model.bin", bytes));
    };
    std::string gpt2 = llmc_gpt2(published_gpt2(), 3).bytes,
                old = llama2c(published_llama(true), 0).bytes,
                marked = llama2c(published_llama(true), 1).bytes,
                llama = llmc_llama(published_llama(false), 3, 0.5f, 16).bytes;

    ASSERT_EQ(error(gpt2) + error(old) + error(marked) + error(llama), "");
    auto bytes = [](size_t n) { return std::to_string(n) + " bytes"; };
    for (const std::string& whole : {gpt2, marked, llama}) { // the message has both lengths
        for (size_t size : {whole.size() - 1, whole.size() + 4, size_t(2048)}) {
            std::string other = whole;
            other.resize(size);
            EXPECT_HAS(error(other), "is " + bytes(size) + " long, its header asks for " +
                                         std::to_string(whole.size()));
        }
    }

    EXPECT_HAS(error(old + "1"), "its numbers ask for " + bytes(old.size()) + ", it has " +
                                     std::to_string(old.size() + 1));
    EXPECT_HAS(error(old.substr(0, 100)), "it has 100; of a Hugging Face model give the folder");
    EXPECT_HAS(error("{}"), "is no model file: it begins with 0");
    EXPECT_HAS(error(""), "is empty");
    EXPECT_HAS(error(with_word(gpt2, 0, 20240327)), "it begins with 20240327, not with 20240326");

    for (int version : {1, 2, 4, -3}) {
        std::string text = "is of version " + std::to_string(version) + " of llm.c's model files";
        EXPECT_HAS(error(with_word(gpt2, 1, version)), text);
        EXPECT_HAS(error(with_word(llama, 1, version)), text);
    }
    EXPECT_HAS(error(with_word(marked, 1, 2)), "is of version 2 of llama2.c's model files (int8)");
    EXPECT_HAS(error(with_word(marked, 1, 3)), "is of version 3 of llama2.c's model files;");

    // bf16 where the version says float, and a table shorter than the vocabulary.
    EXPECT_HAS(error(with_word(gpt2, 1, 5)), "its header asks for");
    EXPECT_HAS(error(with_word(gpt2, 7, 60)), "a token table of 60 rows for a vocabulary of 61");

    // Shapes that do not fit, in the words of config.json.
    EXPECT_HAS(error(with_word(gpt2, 5, 3)), "n_head 3 does not divide n_embd 16");
    EXPECT_HAS(error(with_word(gpt2, 4, 0)), "n_layer is 0, which is no size");
    EXPECT_HAS(error(with_word(gpt2, 2, -1)), "n_positions is -1, which is no size");
    EXPECT_HAS(error(with_word(marked, 5, 3)),
               "num_attention_heads 3 does not divide hidden_size 32");
    EXPECT_HAS(error(with_word(marked, 6, 3)),
               "num_key_value_heads 3 does not divide num_attention_heads 4");
    EXPECT_HAS(error(with_word(llama, 8, 0)), "intermediate_size is 0, which is no size");
    EXPECT_HAS(error(with_word(llama, 257, -1)), "rms_norm_eps"); // these bits are a NaN
    EXPECT_HAS(error(with_word(llama, 258, 0)), "rope_theta is 0.0, not above zero");

    // Products larger than any file.
    EXPECT_HAS(error(with_word(gpt2, 6, 1 << 30)), "n_embd is 1073741824, which is no size");
    EXPECT_HAS(error(with_word(gpt2, 7, INT_MAX)), "its header asks for 13743");

    std::string huge = marked; // each number as large as is allowed
    for (size_t i : {2, 3}) huge = with_word(huge, i, 1 << 20);
    for (size_t i : {7, 8}) huge = with_word(huge, i, 1 << 24);
    EXPECT_HAS(error(with_word(huge, 4, 1000)), "its header asks for");
}

// ----------------------------------------------------------------------------
// tokenizers of exports

// Pieces of words, letters of several scripts, runs of spaces and line ends, single bytes.
static std::string random_text(uint64_t n, bool any_bytes) {
    static const std::vector<std::string> parts = {
        "the", " the", "Once",   "upon",         " a", "'s",   "'LL", "123456789",
        "7",   " ",    "  ",     "        ",     "\n", "\r\n", "\t",  "À",
        "é",   "你好", "Привет", "🙂",         ".",  ",",    "!?",  "<|endoftext|>",
        "<s>", "ab",   "aab",    "\xe2\x96\x81", "_",  "=",    "\x01"};
    std::string text;
    for (uint64_t i = 0, count = 1 + random_block(n, 1, 0)[0] % 40; i < count; i++) {
        uint32_t r = random_block(n, 2, i)[0];
        any_bytes&& r % 9 == 0 ? text += char(r >> 8) : text += parts[(r >> 8) % parts.size()];
    }
    return text;
}

// The exported files make the same tokens as the tokenizer that was exported.
static void expect_same_tokens(const std::string& name, const std::string& folder) {
    SCOPED_TRACE(name);
    Tokenizer a, b;
    ASSERT_EQ(tokenizer_open(&a, name), "");
    ASSERT_EQ(tokenizer_open(&b, folder), "");
    EXPECT_EQ(a.vocab_size, b.vocab_size);
    EXPECT_EQ(a.bos, b.bos);
    EXPECT_EQ(a.eot, b.eot);

    for (uint64_t n = 0; n < 400; n++) {
        std::string text = random_text(n, true);
        for (bool special : {true, false}) {
            ASSERT_EQ(encode(a, text, special), encode(b, text, special)) << text;
        }
        std::vector<int> tokens = encode(a, text);
        ASSERT_EQ(decode(a, tokens), decode(b, tokens)) << text;
    }

    for (size_t spaces = 1; spaces < 70; spaces++) {
        std::string text = "a" + std::string(spaces, ' ') + "b";
        ASSERT_EQ(encode(a, text), encode(b, text)) << spaces << " spaces";
    }
}

struct Exported {
    std::map<std::string, std::string> files;
    json of(const std::string& name) { return json::parse(files.at(name)); }
};
static Exported export_tokenizer(const std::string& name) {
    Tokenizer t;
    Exported e;
    EXPECT_EQ(tokenizer_open(&t, name), "");
    EXPECT_EQ(tokenizer_files(&e.files, t, 77), "");
    EXPECT_EQ(e.of("tokenizer_config.json")["model_max_length"], 77);
    return e;
}

TEST_F(Interchange, BytesAsATokenizerJson) {
    Exported e = export_tokenizer("byte");
    EXPECT_EQ(e.files.size(), 2u);
    json j = e.of("tokenizer.json");
    EXPECT_EQ(j["model"]["vocab"].size(), 256u);
    EXPECT_EQ(j["model"]["vocab"]["Ġ"], 32);
    EXPECT_EQ(j["model"]["merges"].size(), 0u);
    EXPECT_FALSE(e.of("tokenizer_config.json").contains("eos_token"));
    put_all("byte", e.files);
    expect_same_tokens("byte", dir + "/byte");

    // They go on into llama.cpp's file: whatever its way to cut words, nothing merges.
    Tokenizer again;
    ASSERT_EQ(tokenizer_open(&again, dir + "/byte"), "");
    EXPECT_EQ(gguf_no_tokenizer(again), "");
    EXPECT_EQ(gguf_words(again), "gpt-2");
}

// A file's name tells its pattern and its special tokens: r50k_base is GPT-2's.
TEST_F(Interchange, TiktokenAsATokenizerJson) {
    std::string lines;
    int rank = 0;
    for (int b = 0; b < 256; b++)
        lines += base64(std::string(1, char(b))) + " " + std::to_string(rank++) + "\n";
    for (const char* piece : {"th", "aa", "the", " the", "ab", "aab", "\xc3\x80", "  "})
        lines += base64(piece) + " " + std::to_string(rank++) + "\n";
    std::string path = put("r50k_base.tiktoken", lines);

    Exported e = export_tokenizer(path);
    json j = e.of("tokenizer.json"), config = e.of("tokenizer_config.json");
    EXPECT_EQ(j["model"]["ignore_merges"], true);
    EXPECT_EQ(j["model"]["vocab"]["<|endoftext|>"], rank);
    EXPECT_EQ(j["added_tokens"][0]["id"], rank);
    EXPECT_EQ(j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"], GPT2_PATTERN);

    // The merges are (t, h), (a, a), (th, e), (" ", the), (a, b), (a, ab), (aa, b), the two bytes
    // of À, and two spaces.
    EXPECT_EQ(j["model"]["merges"].size(), 9u);
    EXPECT_EQ(j["model"]["merges"][2], "th e");
    EXPECT_EQ(j["model"]["merges"][5], "a ab"); // equal ranks: ordered by their pieces
    EXPECT_EQ(j["model"]["merges"][6], "aa b");
    EXPECT_EQ(config["eos_token"], "<|endoftext|>");
    EXPECT_EQ(config["bos_token"], "<|endoftext|>");

    put_all("tiktoken", e.files);
    expect_same_tokens(path, dir + "/tiktoken");
}

TEST_F(Interchange, TokenizersOfFixtures) {
    NEEDS_FIXTURES();
    std::string folder = FIXTURES + "/tokenizers/";
    for (std::string name :
         {"gpt2", "gpt2/vocab.bpe", "llama2/tokenizer.bin", "llama2/tokenizer.model",
          "llama3/tokenizer.model", "tinystories512/tok512.bin"}) {
        Exported e = export_tokenizer(folder + name);
        bool sentencepiece = name == "llama2/tokenizer.model";
        EXPECT_EQ(e.files.size(), sentencepiece ? 3u : 2u) << name;
        EXPECT_EQ(e.files["tokenizer.model"], sentencepiece ? read_file(folder + name) : "")
            << name;
        e.files.erase("tokenizer.model"); // tokenizer.json must suffice
        put_all("exported", e.files);
        expect_same_tokens(folder + name, dir + "/exported");
    }
}

// A tokenizer is not exported if its tokenizer.json would make other tokens.
TEST_F(Interchange, NoTokenizerJsonThatIsNotExact) {
    auto note = [&](const Tokenizer& t, size_t files) {
        std::map<std::string, std::string> found;
        std::string text = tokenizer_files(&found, t, 77);
        EXPECT_EQ(found.size(), files) << text;
        return text;
    };

    Tokenizer t;
    t.kind = TokenizerKind::BPE, t.sentencepiece = true, t.prefix = Prefix::SPACE;
    t.pieces = {"a", "b", "ab"}, t.vocab_size = 3, t.name = put("tokenizer.model", "\nbytes");
    EXPECT_EQ(note(t, 3), "");
    Tokenizer unigram = t, spaces = t, added = t, twice = t, bytes = t;
    unigram.kind = TokenizerKind::UNIGRAM, spaces.extra_spaces = false;
    fixed_add(&added.added, "ab", 2), twice.pieces[2] = "b", bytes.pieces[2] = "\xff";

    EXPECT_HAS(note(unigram, 1), "tokenizer.model: transformers has no form for it: it is unigram");
    EXPECT_HAS(note(spaces, 1), "it drops extra spaces");
    EXPECT_HAS(note(added, 1), "or adds pieces");
    EXPECT_HAS(note(twice, 1), "two tokens are \"b\"");
    EXPECT_HAS(note(bytes, 1), "is no UTF-8");
}

// A tokenizer.json is exported as it is, with the files beside it.
TEST_F(Interchange, ATokenizerJsonIsCopied) {
    Exported e = export_tokenizer("byte");
    std::string bytes = e.files["tokenizer.json"] + "  \n";
    put("own/tokenizer.json", bytes);
    for (const std::string& name : {dir + "/own", dir + "/own/tokenizer.json"})
        EXPECT_EQ(export_tokenizer(name).files["tokenizer.json"], bytes);
    put("own/tokenizer_config.json", "{\"model_max_length\":77}");
    EXPECT_EQ(export_tokenizer(dir + "/own").files["tokenizer_config.json"],
              "{\"model_max_length\":77}");
}

TEST_F(Interchange, AFoldersTokenizer) {
    EXPECT_EQ(tokenizer_in(dir), "");
    put("tokenizer.model", ""), put("merges.txt", "");
    EXPECT_EQ(tokenizer_in(dir), dir + "/tokenizer.model"); // merges alone are no tokenizer
    Tokenizer t;
    EXPECT_HAS(tokenizer_open(&t, dir + "/merges.txt"),
               "merges.txt: has no encoder.json or vocab.json");
    put("vocab.json", "");
    EXPECT_EQ(tokenizer_in(dir), dir + "/merges.txt");
    put("tokenizer.json", "");
    EXPECT_EQ(tokenizer_in(dir), dir + "/tokenizer.json");
}

// config.json and generation_config.json name the tokens that begin and end a text.
TEST_F(Interchange, ExportsSayWhereTextsEnd) {
    Small<float> drawn(published_llama(true), {small_plan(1, 4, 1)});
    Trainer<float, Cpu>& t = drawn.t;
    init_weights(t, 1);

    std::string folder = dir + "/export";
    auto file = [&](const char* name) { return json::parse(read_file(folder + "/" + name)); };
    ASSERT_EQ(hf_export(t, folder, Type::F32), "");
    EXPECT_TRUE(file("config.json")["eos_token_id"].is_null() &&
                file("config.json")["bos_token_id"].is_null());
    EXPECT_FALSE(fs::exists(folder + "/generation_config.json"));

    // With a tokenizer the files name its tokens.
    ExportTokenizer known = {1, 2, {{"tokenizer.json", "{}"}, {"tokenizer_config.json", "{}"}}};
    ASSERT_EQ(hf_export(t, folder, Type::F32, 5000, known), "");
    for (const char* name : {"config.json", "generation_config.json"}) {
        EXPECT_EQ(file(name)["bos_token_id"], 1);
        EXPECT_EQ(file(name)["eos_token_id"], 2);
    }
    EXPECT_EQ(read_file(folder + "/tokenizer.json"), "{}");

    // The next export replaces all of it, and a file of somebody else's stops it.
    EXPECT_EQ(hf_export_check(published_llama(true), folder), ""); // every file in it is ours
    ASSERT_EQ(hf_export(t, folder, Type::F32), "");            // and goes with the older export
    EXPECT_FALSE(fs::exists(folder + "/tokenizer.json") || fs::exists(folder + ".exporting"));
    put("export/vocab.json", "");
    EXPECT_HAS(hf_export_check(published_llama(true), folder), "holds vocab.json");
}

// Keys and files of the folder that a model came from are passed on. Keys of ours win.
TEST_F(Interchange, ExportsKeepWhatTheirFolderSays) {
    Small<float> drawn(published_llama(true), {small_plan(1, 4, 1)});
    Trainer<float, Cpu>& t = drawn.t;
    init_weights(t, 1);

    // The folder that the model came from.
    std::map<std::string, std::string> files = {
        {"generation_config.json", R"({"eos_token_id": [1, 4], "temperature": 0.6})"},
        {"special_tokens_map.json", R"({"pad_token": "<p>"})"},
        {"chat_template.jinja", "{{ messages }}"},
        {"additional_chat_templates/tools.jinja", "{{ tools }}"},
        {"tokenizer.model", "\nbytes"},
        {"LICENSE", "free"},
        {"added_tokens.json", "{}"}};
    json config = {{"eos_token_id", {1, 4}}, {"pad_token_id", 2},    {"bos_token_id", nullptr},
                   {"use_cache", true},      {"hidden_size", 99999}, {"dtype", "float64"}};
    put_all("from", files);
    put("from/config.json", config.dump());
    for (const char* left : {"README.md", "pytorch_model.bin", "model.safetensors.index.json",
                             "adapter_config.json", ".gitattributes", "data.jsonl", "old/notes.txt"})
        put(std::string("from/") + left, "of another model");

    ExportTokenizer e = {0, 1};
    e.files["LICENSE"] = "free"; // what is there stays
    ASSERT_EQ(keep_of_folder(&e, dir + "/from", true), "");
    ASSERT_EQ(carry_files(&e, dir + "/from"), "");
    EXPECT_EQ(e.files.size(), files.size());
    std::string folder = dir + "/export";
    auto file = [&](const char* name) { return json::parse(read_file(folder + "/" + name)); };
    ASSERT_EQ(hf_export(t, folder, Type::BF16, 1 << 30, e), "");

    json got = file("config.json");
    EXPECT_EQ(got["eos_token_id"], (json{1, 4}));
    EXPECT_EQ(got["pad_token_id"], 2);
    EXPECT_EQ(got["bos_token_id"], 0); // the folder says nothing about it
    EXPECT_EQ(got["use_cache"], true);
    EXPECT_EQ(got["hidden_size"], t.model.shape.C);
    EXPECT_EQ(got["torch_dtype"], "bfloat16");
    EXPECT_FALSE(got.contains("dtype"));
    for (const auto& [name, text] : files) EXPECT_EQ(read_file(folder + "/" + name), text) << name;
    EXPECT_FALSE(fs::exists(folder + "/README.md"));

    // The next export of the same model replaces them; one without such files is refused.
    EXPECT_HAS(hf_export_check(t.model.shape, folder), "which is no export of ours");
    EXPECT_EQ(hf_export_check(t.model.shape, folder, e.files), "");
    e.files["LICENSE"] = "new";
    ASSERT_EQ(hf_export(t, folder, Type::BF16, 1 << 30, e), "");
    EXPECT_EQ(read_file(folder + "/LICENSE"), "new");
    EXPECT_FALSE(fs::exists(folder + ".exporting"));
    fs::remove_all(folder);

    // Without a generation_config.json, generate() goes on to stop where config.json says.
    e.files.erase("generation_config.json");
    ASSERT_EQ(hf_export(t, folder, Type::F32, 1 << 30, e), "");
    EXPECT_EQ(file("generation_config.json")["eos_token_id"], (json{1, 4}));
    fs::remove_all(folder);

    // A run with another tokenizer has other ids, so nothing about tokens is passed on.
    e = {0, 1};
    ASSERT_EQ(keep_of_folder(&e, dir + "/from", false), "");
    ASSERT_EQ(hf_export(t, folder, Type::F32, 1 << 30, e), ""); // replaces the first export
    EXPECT_EQ(file("config.json")["eos_token_id"], 1);
    EXPECT_FALSE(file("config.json").contains("pad_token_id"));
    EXPECT_EQ(file("generation_config.json")["eos_token_id"], 1);
    EXPECT_FALSE(fs::exists(folder + "/chat_template.jinja"));
}

// The end of an answer comes first where generate() looks, and what ended a text before still does.
TEST_F(Interchange, AnExportSaysHowAnAnswerEnds) {
    Tokenizer t;
    t.vocab_size = 300;
    auto ends = [&](const json& config, const json& generation) {
        ExportTokenizer e = {-1, 5};
        e.kept = nlohmann::ordered_json::parse(config.dump());
        if (!generation.is_null()) e.files["generation_config.json"] = generation.dump();
        EXPECT_EQ(export_end(&e, t, 7), "");
        EXPECT_EQ(e.eos, 7);
        json j = json::parse(e.files["generation_config.json"]);
        EXPECT_EQ(j.value("temperature", json()), generation.is_null() ? json() : json(0.6));
        return json{json::parse(e.kept.dump())["eos_token_id"], j["eos_token_id"]};
    };
    EXPECT_EQ(ends({{"eos_token_id", 3}}, {{"temperature", 0.6}}), (json{{7, 3}, {7, 3}}));
    EXPECT_EQ(ends({{"eos_token_id", {3, 7}}}, {{"temperature", 0.6}, {"eos_token_id", 4}}),
              (json{{3, 7}, {7, 4}}));
    EXPECT_EQ(ends({{"eos_token_id", 7}}, nullptr), (json{7, 7}));
    EXPECT_EQ(ends(json::object(), nullptr), (json{{7, 5}, {7, 5}})); // 5: the tokenizer's
    ExportTokenizer e;
    e.files["generation_config.json"] = "[]";
    EXPECT_HAS(export_end(&e, t, 7), "generation_config.json: is no JSON object");

    // A template is one for all: others go, and its tokens are those that were trained.
    e.files = {{"tokenizer_config.json", R"({"chat_template": "a", "eos_token": "b", "c": 1})"},
               {"special_tokens_map.json", R"({"eos_token": "b"})"},
               {"chat_template.json", "{}"},
               {"additional_chat_templates/tools.jinja", "t"}};
    EXPECT_EQ(export_template(&e, "{{ x }}", nullptr, "</s>"), "");
    EXPECT_EQ(json::parse(e.files["tokenizer_config.json"]),
              json::parse(R"({"bos_token": null, "eos_token": "</s>", "c": 1})"));
    EXPECT_EQ(json::parse(e.files["special_tokens_map.json"])["eos_token"], "</s>");
    EXPECT_EQ(e.files["chat_template.jinja"], "{{ x }}");
    EXPECT_EQ(e.chat_template, "{{ x }}");
    EXPECT_EQ(e.files.size(), 3u);
}

// A link stays a link. The folder that it points to is written, and made if there is none yet.
TEST_F(Interchange, ExportsFollowLinks) {
    Small<float> drawn(published_llama(true), {small_plan(1, 4, 1)});
    Trainer<float, Cpu>& t = drawn.t;
    init_weights(t, 1);

    fs::create_directories(dir + "/disk");
    fs::create_symlink("disk/real", dir + "/link");
    fs::create_symlink(dir + "/link", dir + "/twice");
    for (const char* name : {"/link", "/twice/", "/link/."}) {
        ASSERT_EQ(hf_export_check(t.model.shape, dir + name), "") << name;
        ASSERT_EQ(hf_export(t, dir + name, Type::F32), "") << name;
        EXPECT_TRUE(fs::is_symlink(dir + "/link") && fs::is_symlink(dir + "/twice")) << name;
        EXPECT_TRUE(fs::exists(dir + "/disk/real/model.safetensors")) << name;
        fs::remove_all(dir + "/disk/real");
    }
}

TEST_F(Interchange, FoldersThatAreNoExportAreRefused) {
    Shape s = published_llama(true);
    EXPECT_HAS(hf_export_check(s, "."), "is the current folder");
    EXPECT_HAS(hf_export_check(s, fs::current_path()), "is the current folder");
    put("tokenizer/tokenizer.json", "{}"), put("tokenizer/tokenizer_config.json", "{}");
    EXPECT_HAS(hf_export_check(s, dir + "/tokenizer"), "and no whole model: choose a new folder");
    put("thesis/thesis.txt", ""), put("thesis/config.json", "{}");
    EXPECT_HAS(hf_export_check(s, dir + "/thesis"), "holds thesis.txt, which is no export of ours");
    fs::create_directories(dir + "/empty");
    EXPECT_EQ(hf_export_check(s, dir + "/empty"), "");
}

// ----------------------------------------------------------------------------
// the program

struct Programs : Interchange {
    std::string text, flags;
    void SetUp() override {
        Interchange::SetUp();
        text = put("text.txt", numbered_lines(400, " of the text"));
        flags =
            " --device cpu --seq 16 --micro-batch 2 --temperature 0 --sample-tokens 12 --data " +
            text + " ";
    }
    std::string run(const std::string& arguments, int status = 0) {
        Ran r = shell(program() + flags + arguments);
        EXPECT_EQ(r.status, status) << arguments << "\n" << r.text;
        return r.text;
    }
    // The sample in the program's output, between two lines.
    static std::string sample(const std::string& out) {
        size_t at = out.find("\n---\n"), end = out.find("\n---\n", at + 1);
        return at == std::string::npos ? "none: " + out : out.substr(at, end - at);
    }
};

// A model that was taught a chat format says so wherever it goes: as a folder, as one file, as
// adapters beside their base, merged, and from a checkpoint. Bytes end an answer with 0.
TEST_F(Programs, AModelThatWasTaughtAChatFormatTakesItAlong) {
    std::string talks, base = dir + "/base", small = "--layers 1 --heads 2 --channels 16 ";
    for (int i = 0; i < 40; i++)
        talks += concat(R"({"prompt": "q)", i, R"(", "completion": "a"})", "\n");
    std::string none = " --steps 0 --sample-tokens 0 --export ";
    std::string sft = " --loss sft --seq 64 --steps 1 --sample-tokens 0 --data " +
                      put("t.jsonl", talks);
    auto says = [&](const std::string& folder, const std::string& file) {
        return json::parse(read_file(dir + folder + "/" + file));
    };
    run(small + none + base);
    EXPECT_TRUE(says("/base", "config.json")["eos_token_id"].is_null());
    std::string out = run("--model " + base + sft + " --out " + dir + "/run --export " + dir +
                          "/e");
    EXPECT_HAS(out, ", and the byte 0 ends an answer\n");

    // The folder, and what is made of it, of the checkpoint and of adapters.
    run("--model " + dir + "/e" + none + dir + "/again");
    run("--resume --out " + dir + "/run" + none + dir + "/resumed");
    run("--model " + base + sft + " --lora 2 --export " + dir + "/adapter");
    run("--model " + base + " --adapter " + dir + "/adapter --merge" + none + dir + "/merged");
    std::string plain = chat_template_of(chat_formats().back());
    for (const char* folder : {"/e", "/again", "/resumed", "/merged"}) {
        SCOPED_TRACE(folder);
        EXPECT_EQ(read_file(dir + folder + "/chat_template.jinja"), plain);
        EXPECT_EQ(says(folder, "config.json")["eos_token_id"], 0);
        EXPECT_EQ(says(folder, "generation_config.json")["eos_token_id"], 0);
        EXPECT_EQ(says(folder, "tokenizer_config.json")["eos_token"], "Ā"); // GPT-2's letter of 0
    }
    EXPECT_EQ(read_file(dir + "/adapter/chat_template.jinja"), plain);
    EXPECT_TRUE(fs::exists(dir + "/adapter/tokenizer.json"));
    EXPECT_FALSE(fs::exists(dir + "/adapter/generation_config.json"));
    run("--model " + base + " --lora 2 --steps 1 --sample-tokens 0 --export " + dir + "/text");
    EXPECT_FALSE(fs::exists(dir + "/text/tokenizer.json")); // it changes nothing of how texts end

    // llama.cpp's file has them too. Rows of 16 are no blocks of 32; one matrix has rows of 64.
    out = shell(program("convert_gpt") + " --export-dtype q8_0 " + dir + "/e " + dir + "/e.gguf").text;
    EXPECT_HAS(out, "--export-dtype q8_0: 4 matrices are written as fp16: rows of 16 are no");
    EXPECT_FALSE(has(out, "writes no tokenizer"));
    json keys = Gguf(dir + "/e.gguf").keys;
    EXPECT_EQ(keys["tokenizer.ggml.eos_token_id"], 0);
    EXPECT_EQ(keys["tokenizer.chat_template"], plain);
    EXPECT_EQ(keys["tokenizer.ggml.model"], "gpt2");
}

// An export brings its tokenizer, and only a tokenizer that fits the model is written.
TEST_F(Programs, AnExportNeedsNoTokenizer) {
    std::string out = dir + "/out", small = "--layers 1 --heads 2 --channels 16 ";
    std::string first = run(small + "--steps 3 --prompt ab --export " + out);
    std::string again = run("--model " + out + " --steps 0 --prompt ab");
    EXPECT_EQ(sample(first), sample(again));
    EXPECT_HAS(again, "tokenizer: " + out + "/tokenizer.json\n");
    EXPECT_FALSE(has(run("--model " + out + " --tokenizer byte --steps 0"), "tokenizer: "));
    EXPECT_TRUE(json::parse(read_file(out + "/config.json"))["eos_token_id"].is_null());
    EXPECT_HAS(run("--model " + out + " --steps 0 --export " + out + "/", 1),
               "is what --model reads: choose another name");

    // A copy of the copy has everything else that the folder says.
    std::string bytes = read_file(out + "/tokenizer.json"), copy = "--export " + dir + "/copy ";
    json config = json::parse(read_file(out + "/config.json"));
    config["eos_token_id"] = {7, 8}, config["summary_type"] = "cls_index";
    put("out/config.json", config.dump()), put("out/chat_template.jinja", "{{ x }}");
    std::string said = run("--model " + out + " --steps 0 --sample-tokens 0 " + copy);
    EXPECT_FALSE(has(said, "replaces"));
    EXPECT_EQ(read_file(dir + "/copy/tokenizer.json"), bytes);
    EXPECT_EQ(read_file(dir + "/copy/chat_template.jinja"), "{{ x }}");
    EXPECT_TRUE(json::parse(read_file(dir + "/copy/config.json")) == config);
    EXPECT_HAS(run("--model " + out + " --scratch --ffn 24 --steps 0 --sample-tokens 0 " + copy),
               "copy holds an export, which the new one replaces\n");
    EXPECT_FALSE(json::parse(read_file(dir + "/copy/config.json")).contains("summary_type"));

    put("out/tokenizer.json", "{}");
    EXPECT_HAS(run("--model " + out + " --steps 0", 1),
               "; --tokenizer byte leaves the folder's out\n");
    run("--model " + out + " --steps 0 --tokenizer byte");

    // A tokenizer with more tokens than the model is refused for text, and is not written.
    std::string lines;
    for (int b = 0; b < 300; b++)
        lines += base64(b < 256 ? std::string(1, char(b)) : "a" + std::to_string(b)) + " " +
                 std::to_string(b) + "\n";
    std::string path = put("r50k_base.tiktoken", lines), more = " --tokenizer " + path;
    EXPECT_HAS(run("--model " + out + more + " --steps 1", 1),
               "writes 301 tokens, the model has 256");
    EXPECT_HAS(run("--model " + out + more + " --steps 0 --sample-tokens 0 --export " + dir + "/m"),
               "writes no tokenizer.json: --tokenizer " + path + " is not the model's");

    // Neither is the byte tokenizer of a model with a larger vocabulary.
    std::string larger =
        run(small + "--vocab 300 --steps 0 --sample-tokens 0 --export " + dir + "/larger");
    EXPECT_HAS(larger, "--export writes no tokenizer.json: --tokenizer byte is not the model's\n");
    EXPECT_FALSE(fs::exists(dir + "/larger/tokenizer.json"));

    // GPT-2's size of vocabulary names GPT-2's end of a text.
    run(small + "--vocab 50257 --steps 0 --sample-tokens 0 --export " + dir + "/gpt2");
    EXPECT_EQ(json::parse(read_file(dir + "/gpt2/generation_config.json"))["eos_token_id"], 50256);
}

// The gguf package, where it is installed, reads what our reader reads.
TEST_F(Programs, GgufIsReadByItsOwnPackage) {
    std::string out = dir + "/out.gguf", small = "--layers 1 --heads 2 --channels 32 --steps 0 ";
    std::string convert = program("convert_gpt") + " ", wide = dir + "/wide", own = dir + "/own";
    run(small + "--sample-tokens 0 --vocab 300 --export " + wide);
    EXPECT_HAS(shell(convert + wide + " " + out).text,
               "--export writes no tokenizer: --tokenizer byte is not the model's\n");
    run(small + "--sample-tokens 0 --export " + own);
    ASSERT_EQ(shell(convert + "--export-dtype q8_0 " + own + " " + out).status, 0);
    Gguf f(out);
    EXPECT_EQ(f.keys["tokenizer.ggml.tokens"].size(), 256u);
    if (shell("python3 -c 'import gguf'").status) GTEST_SKIP() << "skipped: no gguf package";

    // Sum up each tensor with our reader, and with the package.
    std::string lines;
    for (const auto& [name, t] : f.tensors) {
        double sum = 0;
        for (float x : f.values(name)) sum += std::abs(x);
        lines += concat(name, " ", t.type, " ", std::llround(sum * 1000), "\n");
    }

    put("sums.py", "import sys\nfrom gguf import GGUFReader\nfrom gguf.quants import dequantize\n"
                   "for t in sorted(GGUFReader(sys.argv[1]).tensors, key=lambda t: t.name):\n"
                   "    x = dequantize(t.data, t.tensor_type).astype('float64')\n"
                   "    print(t.name, int(t.tensor_type), int(abs(x).sum() * 1000 + 0.5))\n");
    EXPECT_EQ(shell("python3 " + dir + "/sums.py " + out).text, lines);
}

// A folder of dev/golden with other keys in its config.json, and tokens that its vocabulary has.
struct Folders : Programs {
    std::string data;
    void SetUp() override {
        Programs::SetUp();
        std::string shard(1024, '\0');
        uint32_t words[3] = {20240520, 1, 2000};
        memcpy(shard.data(), words, sizeof(words));
        for (int i = 0; i < 2000; i++)
            shard += {char(i * 7919 % 53), 0};
        data = " --tokenizer byte --data " + put("tokens.bin", shard) + " ";
    }
    std::string golden(const std::string& name, const json& keys = json::object(),
                       const std::vector<std::string>& gone = {}) {
        std::string folder = dir + "/" + name;
        fs::remove_all(folder);
        fs::copy(std::string(REPO_ROOT) + "/dev/golden/" + name, folder);
        json config = json::parse(read_file(folder + "/config.json"));
        config.update(keys);
        for (const std::string& key : gone) config.erase(key);
        put_file(folder + "/config.json", config.dump());
        return "--model " + folder + data;
    }
    double loss(const std::string& arguments) {
        return number_behind(run(arguments + " --eval"), "val loss ");
    }
};

// Folders of experts load and compute whichever of its two names the number of experts has, with
// one expert a token, and without renormalised gates. Another number of experts is not guessed.
TEST_F(Folders, ExpertsByAnyKey) {
    double qwen3 = loss(golden("qwen3-moe-tiny"));
    json config = json::parse(read_file(dir + "/qwen3-moe-tiny/config.json"));
    json renamed = {{"num_local_experts", config["num_experts"]}};
    EXPECT_EQ(loss(golden("qwen3-moe-tiny", renamed, {"num_experts"})), qwen3);
    EXPECT_HAS(run(golden("qwen3-moe-tiny", json::object(), {"num_experts"}) + "--eval", 1),
               "config.json asks for (128, ");

    // Without norm_topk_prob the sigmoids of DeepSeek-V3 are gates as they are.
    double v3 = loss(golden("deepseek-v3-tiny"));
    std::string alone = golden("deepseek-v3-tiny", {{"norm_topk_prob", false}});
    EXPECT_GT(std::abs(loss(alone) - v3), 1e-3);
    run(alone + "--steps 1 --sample-tokens 0");

    // One expert a token: its gate is 1, and teaches the router nothing.
    std::string one = golden("mixtral-tiny", {{"num_experts_per_tok", 1}});
    EXPECT_GT(std::abs(loss(one) - loss(golden("mixtral-tiny"))), 1e-3);
    one = golden("mixtral-tiny", {{"num_experts_per_tok", 1}});
    EXPECT_HAS(run(one + "--steps 1", 1), "teaches the router nothing: train adapters, as --lora");
    run(one + "--steps 1 --lora 2 --sample-tokens 0");
    EXPECT_HAS(run(one + "--scratch --steps 1", 1), "nothing: give --router softmax");
}

// Adapters that find no place end the run by a line; what PEFT would refuse or drop is said.
TEST_F(Folders, AdaptersThatNothingUses) {
    EXPECT_HAS(run(golden("deepseek-v2-tiny") + "--lora 2 --lora-targets experts --lora-layers 0", 1),
               "of --lora-layers has this");

    // PEFT 0.21 with transformers 5.24 gives the base's loss, or another one, for those with a line.
    auto said = [&](const std::string& name, const std::string& targets) {
        return has(run(golden(name) + "--steps 1 --sample-tokens 0 --lora 2 --export " + dir +
                       "/adapter --lora-targets " + targets),
                   "PEFT with transformers 5 loads no adapter of ");
    };
    for (const char* targets : {"w1", "w1,w3", "q_proj,w3"})
        EXPECT_TRUE(said("mixtral-tiny", targets)) << targets;
    for (const char* targets : {"w2", "all,experts", "all", "experts"})
        EXPECT_FALSE(said("mixtral-tiny", targets)) << targets;
    EXPECT_TRUE(said("qwen2-moe-tiny", "experts"));
    EXPECT_FALSE(said("qwen2-moe-tiny", "all"));
    EXPECT_TRUE(said("deepseek-v2-tiny", "all"));
    EXPECT_FALSE(said("deepseek-v2-tiny", "attention,experts"));
    EXPECT_FALSE(said("llama-tiny", "all"));
}

// A value that is no number is blamed on its file and tensor, an adapter's on the adapter's file,
// whatever the run is to do.
TEST_F(Folders, AValueThatIsNoNumberNamesItsFile) {
    std::string base = golden("llama-tiny"), sample = "--steps 0 --sample-tokens 4 ";
    auto spoil = [&](const std::string& path, const std::string& name) {
        SafeTensors f;
        ASSERT_EQ(safetensors_open(&f, path), "");
        const SafeTensor* t = safetensors_find(f, name);
        ASSERT_TRUE(t);
        size_t at = size_t(t->data - static_cast<unsigned char*>(f.map)), n = dtype_bytes(t->dtype);
        safetensors_close(&f);
        std::string bytes = read_file(path);
        put_file(path, bytes.replace(at, n, std::string(n, '\xff')));
    };
    std::string lora = dir + "/lora";
    fs::copy(std::string(REPO_ROOT) + "/dev/golden/lora-llama-tiny", lora);
    std::string module = "model.layers.1.mlp.up_proj";
    spoil(lora + "/adapter_model.safetensors", PEFT_PREFIX + module + ".lora_B.weight");
    EXPECT_HAS(run(base + sample + "--adapter " + lora, 1),
               lora + "/adapter_model.safetensors: tensor " + PEFT_PREFIX + module +
                   ".lora_B.weight: 1 of ");

    std::string shard;
    for (const auto& file : fs::directory_iterator(dir + "/llama-tiny")) {
        SafeTensors f;
        if (file.path().extension() != ".safetensors" ||
            !safetensors_open(&f, file.path()).empty())
            continue;
        if (safetensors_find(f, module + ".weight")) shard = file.path();
        safetensors_close(&f);
    }
    spoil(shard, module + ".weight");
    for (std::string what : {std::string("--eval"), std::string("--steps 2"), sample,
                             sample + "--local-ranks 2 --dp 2"})
        EXPECT_HAS(run(base + what, 1), shard + ": tensor " + module + ".weight: 1 of ");
    EXPECT_HAS(run(base + sample, 1), " values are not finite: take another file");
}

// A run's own export and an export of its checkpoint are the same bytes, in every precision, of
// every kind of masters, and of the mean.
TEST_F(Programs, ACheckpointsExportIsTheRuns) {
    std::string small = "--model tiny-llama --layers 1 --channels 16 --heads 2 --kv-heads 2 "
                        "--ffn 16 --sample-tokens 0 ";
    for (std::string more : {"--precision bf16", "--precision bf16 --masters remainder",
                             "--precision bf16 --masters none", "--precision fp16",
                             "--precision bf16 --lora 2", "--precision bf16 --fp8 block"}) {
        std::string out = dir + "/run", own = dir + "/own", later = dir + "/later";
        for (const std::string& folder : {out, own, later}) fs::remove_all(folder);
        std::string where = more + " --out " + out + " ", file = more.find("lora") < more.size()
                                                                     ? "/adapter_model.safetensors"
                                                                     : "/model.safetensors";
        run(small + where + "--steps 3 --export " + own);
        run(small + where + "--resume --steps 0 --export " + later);
        EXPECT_TRUE(read_file(own + file) == read_file(later + file)) << more;
        fs::remove_all(later);
        run("--out " + out + " --resume --steps 0 --sample-tokens 0 --export " + later);
        EXPECT_TRUE(read_file(own + file) == read_file(later + file)) << more;
    }

    // The mean is kept in float, and an export of it holds more than bf16 can.
    std::string out = dir + "/mean", ema = dir + "/ema";
    run(small + "--precision bf16 --ema 0.5 --steps 3 --out " + out);
    ASSERT_EQ(shell(program("convert_gpt") + " --use-ema " + out + " " + ema).status, 0);
    SafeTensors f;
    ASSERT_EQ(safetensors_open(&f, ema + "/model.safetensors"), "");
    std::vector<float> x(16);
    tensor_to_float(x.data(), *safetensors_find(f, "model.embed_tokens.weight"), 0, x.size());
    EXPECT_TRUE(std::any_of(x.begin(), x.end(), [](float v) { return as_written(v, Type::BF16) != v; }));
    safetensors_close(&f);
}

TEST_F(Programs, ModelFiles) {
    std::string gpt2 = put("gpt2.bin", llmc_gpt2(gpt2_shape(2, 2, 16, 256, 32), 3).bytes);
    std::string one = run("--model " + gpt2 + " --steps 0 --prompt ab"), exported = dir + "/folder";
    EXPECT_HAS(one, "matrices and tables 10752,"); // 256 x 16, 32 x 16 and 2 x 12 x 16 x 16

    // To a folder and back: the same sample and the same bytes.
    run("--model " + gpt2 + " --steps 0 --sample-tokens 0 --export " + exported);
    EXPECT_EQ(sample(run("--model " + exported + " --steps 0 --prompt ab")), sample(one));
    run("--model " + exported + " --steps 0 --sample-tokens 0 --export " + dir + "/again.bin");
    EXPECT_TRUE(read_file(dir + "/again.bin") == read_file(gpt2));

    // The loss is the same in every layout.
    auto loss = [&](const std::string& layout) {
        std::string out = run("--model " + gpt2 + " --eval " + layout);
        return out.substr(std::min(out.find("val loss"), out.size()), 15);
    };
    EXPECT_EQ(loss("").substr(0, 9), "val loss ");
    EXPECT_EQ(loss("--local-ranks 2 --tp 2"), loss(""));
    EXPECT_EQ(loss("--local-ranks 2 --pp 2"), loss(""));

    EXPECT_HAS(run("--model " + gpt2 + " --layers 1 --steps 0", 1), "has weights of its own shape");
    run("--model " + gpt2 + " --layers 1 --scratch --steps 0");
    EXPECT_HAS(run("--model " + text + " --steps 0", 1), "is no model file: it begins with");
    std::string half = program("convert_gpt") + " --export-dtype fp16 " + gpt2 + " " + dir;
    EXPECT_HAS(shell(half + "/x.bin").text, "float or bf16");
    EXPECT_HAS(run("--model " + dir + "/nowhere.bin --steps 0", 1),
               "neither a folder, a file nor a preset");
}
