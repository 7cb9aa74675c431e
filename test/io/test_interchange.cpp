// test_interchange.cpp - models and tokenizers of others: llm.c's and llama2.c's files, exports with
// their tokenizer, and every malformed file with its one line
#include <omp.h>
#include "../../llmc/io/generate.h"
#include "../../llmc/io/model_files.h"
#include "../../llmc/io/tokenizer_export.h"
#include "../harness/testing.h"
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

// An element of a parameter, by its Hugging Face name; bf16 holds it exactly.
static float element(const std::string& name, size_t i) {
    return to_float(from_acc<bf16>(float(normal(3, fnv1a(name), i))));
}

struct BinFile {
    bool narrow = false; // bf16
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
    // (heads, HS/2, 2, C) of what Hugging Face has as (heads, 2, HS/2, C)
    void neighbours(const std::string& name, size_t heads, size_t HS, size_t C) {
        for (size_t h = 0; h < heads; h++)
            for (size_t i = 0; i < HS / 2; i++)
                for (size_t of_pair : {0, 1})
                    for (size_t c = 0; c < C; c++)
                        value(element(name, ((h * 2 + of_pair) * (HS / 2) + i) * C + c));
    }
};

static BinFile llmc_gpt2(const Shape& s, int version) {
    BinFile f = {version == 5};
    size_t L = s.L, C = s.C, Vp = round_up(s.V, 128);
    for (size_t x : {size_t(20240326), size_t(version), s.P, s.V, L, s.NH, C, Vp}) f.word(int(x));
    f.pad(1024);
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

static BinFile llmc_llama(const Shape& s, int version, float factor, int multiple) {
    BinFile f = {version == 5};
    bool scaled = s.rope_scaling.factor != 1;
    for (size_t x : {size_t(20240803), size_t(version), s.P, s.V, s.L, s.NH, s.NKV, s.C})
        f.word(int(x));
    f.word(multiple), f.word(scaled), f.word(3), f.word(1);
    f.pad(1024);
    f.real(factor), f.real(s.norm_eps), f.real(float(s.rope_theta));
    f.pad(2048);
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
        layers("mlp.gate_proj.weight", s.F * s.C); // c_fc, c_fc2
    layers("mlp.down_proj.weight", s.C * s.F);
    f.tensor("model.norm.weight", s.C), f.tensor("lm_head.weight", s.V * s.C);
    return f;
}

// version 0: the older form
static BinFile llama2c(const Shape& s, int version) {
    BinFile f;
    if (version) f.word(0x616b3432), f.word(version);
    for (size_t x : {s.C, s.F, s.L, s.NH, s.NKV}) f.word(int(x));
    f.word(s.tied || version ? int(s.V) : -int(s.V)), f.word(int(s.P));
    if (version) f.bytes += char(s.tied), f.pad(256);
    auto layers = [&](const char* n, size_t elements, size_t heads = 0) {
        for (size_t l = 0; l < s.L; l++) {
            std::string name = "model.layers." + std::to_string(l) + "." + n;
            heads ? f.neighbours(name, heads, s.HS, s.C) : f.tensor(name, elements);
        }
    };
    auto norms = [&](bool first) {
        layers(first ? "input_layernorm.weight" : "post_attention_layernorm.weight", s.C);
    };
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
    if (!s.tied) f.tensor("lm_head.weight", s.V * s.C);
    return f;
}

// ----------------------------------------------------------------------------
// models

struct LayoutCase {
    int dp = 1, tp = 1, pp = 1, zero = 0;
};

// Ranks as threads, all with the file's weights, as they come together again; body(trainer).
template <typename F>
static void expect_elements(const std::string& path, const Shape& s, LayoutCase l, F body) {
    SCOPED_TRACE(path + ", dp " + std::to_string(l.dp) + " tp " + std::to_string(l.tp) + " pp " +
                 std::to_string(l.pp) + " zero " + std::to_string(l.zero));
    int status = run_local_ranks(l.dp * l.tp * l.pp, {}, [&](const Comm& world) {
        omp_set_num_threads(1);
        Layout sizes = small_layout(l.dp, l.tp, l.pp);
        sizes.zero = l.zero;
        sizes.first_layer = split_layers(std::vector<double>(s.L + 2, 1.0), l.pp);
        PlanOptions p;
        p.B = 1, p.T = 4, p.micro_batches = 2;
        Trainer<float, Cpu> t;
        trainer_place(t, s, {p}, layout_at(sizes, world.rank));
        t.comms = make_comms(world, t.layout, ranks_of_kv_head(t.layout, t.model));
        trainer_allocate(t);
        ASSERT_EQ(model_file_load(t, path), "");
        for (const Parameter& each : t.model.parameters) {
            std::vector<float> found = get_weight(t, each);
            for (size_t i = 0; i < found.size(); i++)
                ASSERT_EQ(found[i], i < each.file_elements() ? element(each.name, i) : 0)
                    << each.name << " " << i;
        }
        body(t);
        trainer_free(t);
    });
    EXPECT_EQ(status, 0);
}
static void expect_elements(const std::string& path, const Shape& s, LayoutCase l) {
    expect_elements(path, s, l, [](const auto&) {});
}

static void expect_same_shape(const Shape& a, const Shape& b) {
    auto text = [](const Shape& s) {
        return json{s.hf_type,
                    s.L,
                    s.NH,
                    s.NKV,
                    s.HS,
                    s.C,
                    s.F,
                    s.V,
                    s.P,
                    s.tied,
                    s.qkv_bias,
                    s.norm_eps,
                    s.rope_theta,
                    s.rope_scaling.factor,
                    s.rope_scaling.low_freq_factor,
                    s.rope_scaling.high_freq_factor,
                    s.rope_scaling.original_positions,
                    s.sliding_window,
                    int(s.position)}
            .dump();
    };
    EXPECT_EQ(text(a), text(b));
}

static const std::vector<LayoutCase> layouts = {
    {}, {2, 1, 1, 3}, {1, 2, 1, 0}, {1, 1, 2, 0}, {2, 2, 1, 2}};

static Shape published_gpt2() { return gpt2_shape(3, 4, 16, 61, 10); }
static Shape published_llama(bool tied) {
    Shape s = llama_shape(3, 4, 2, 32, 48, 61, 10, 10000);
    s.tied = tied;
    return s;
}

TEST_F(Interchange, LlmcGpt2) {
    for (int version : {3, 5}) {
        std::string path = put("gpt2", llmc_gpt2(published_gpt2(), version).bytes);
        Shape s;
        ASSERT_EQ(model_file_shape(&s, path), "");
        expect_same_shape(s, published_gpt2());
        for (LayoutCase l : layouts) expect_elements(path, s, l);
    }
}

// From any layout the bytes of the file that was read.
TEST_F(Interchange, LlmcGpt2IsWrittenAsItWasRead) {
    for (int version : {3, 5}) {
        std::string bytes = llmc_gpt2(published_gpt2(), version).bytes, out = dir + "/out.bin";
        Type dtype = version == 5 ? Type::BF16 : Type::F32;
        for (LayoutCase l : layouts) {
            fs::remove(out);
            expect_elements(put("in.bin", bytes), published_gpt2(), l, [&](const auto& t) {
                EXPECT_EQ(model_file_export(t, out, dtype), "");
            });
            EXPECT_TRUE(read_file(out) == bytes) << version;
            EXPECT_FALSE(fs::exists(out + ".tmp"));
        }
    }
    auto check = [&](Shape s, Type dtype = Type::F32) {
        return model_file_check(s, dir + "/out.bin", dtype);
    };
    Shape alibi = published_gpt2(), untied = alibi, narrow = alibi, eps = alibi;
    alibi.position = Position::ALIBI, untied.tied = false, narrow.F = 32, eps.norm_eps = 1e-6f;
    EXPECT_EQ(check(published_gpt2()), "");
    for (const Shape& s : {alibi, untied, narrow, eps, published_llama(true)})
        EXPECT_HAS(check(s), "is of a GPT-2 as it was published");
    EXPECT_HAS(check(published_gpt2(), Type::F16), "float or bf16: --export-dtype bf16");
    EXPECT_HAS(model_file_check(published_gpt2(), dir, Type::F32), "is no file");
    EXPECT_HAS(model_file_check(published_gpt2(), dir + "/no/out.bin", Type::F32), "No such file");
}

// The ffn width is computed, in Llama 3's way: 3.1 8B's numbers, and small ones.
TEST_F(Interchange, LlmcLlama) {
    Shape wanted = published_llama(false);
    wanted.rope_theta = 500000, wanted.rope_scaling = {8, 1, 4, 8192};
    wanted.F = 112; // 85 x 1.3 = 110.5, up to a multiple of 16
    for (int version : {3, 5}) {
        std::string path = put("llama", llmc_llama(wanted, version, 1.3f, 16).bytes);
        Shape s;
        ASSERT_EQ(model_file_shape(&s, path), "");
        expect_same_shape(s, wanted);
        for (LayoutCase l : layouts) expect_elements(path, s, l);
    }
    BinFile f;
    for (int x : {20240803, 5, 8192, 128256, 32, 32, 8, 4096, 1024, 1, 3, 1}) f.word(x);
    f.pad(1024), f.real(1.3f), f.real(1e-5f), f.real(500000), f.pad(2048);
    Shape s; // refused, but for its size alone: 8030261248 weights, two bytes each, and the header
    EXPECT_HAS(model_file_shape(&s, put("8b", f.bytes)),
               "is 2048 bytes long, its header asks for 16060524544: get it again");
}

TEST_F(Interchange, Llama2c) {
    for (int version : {0, 1})
        for (bool tied : {true, false}) {
            std::string path = put("llama2c", llama2c(published_llama(tied), version).bytes);
            Shape s;
            ASSERT_EQ(model_file_shape(&s, path), "");
            expect_same_shape(s, published_llama(tied));
            for (LayoutCase l : layouts) expect_elements(path, s, l);
        }
}

TEST_F(Interchange, Stories260kIsTheSameInBothForms) {
    NEEDS_FIXTURES();
    std::string folder = FIXTURES + "/checkpoints/stories260K", path = folder + "/stories260K.bin";
    Shape s, of_folder;
    ASSERT_EQ(model_file_shape(&s, path), "");
    ASSERT_EQ(hf_read_config(&of_folder, folder + "/hf"), "");
    expect_same_shape(s, of_folder);
    Trainer<float, Cpu> a, b;
    Plan plan;
    plan.mode = Mode::GENERATE, plan.B = 1, plan.T = 1, plan.cache = 256;
    for (Trainer<float, Cpu>* t : {&a, &b})
        trainer_place(*t, s, {plan}), trainer_allocate(*t), init_constants(*t);
    ASSERT_EQ(hf_load_weights(a, folder + "/hf"), "");
    ASSERT_EQ(model_file_load(b, path), "");
    for (const Parameter& p : a.model.parameters)
        EXPECT_EQ(get_weight(a, p), get_weight(b, p)) << p.name;
    std::vector<int> ids = {1},
                     expected = json::parse(read_file(folder + "/expected_greedy_ids.json"))["ids"]
                                    .get<std::vector<int>>();
    generate(b, 0, {1}, expected.size() - 1, {0, 1, 0, 1, 0},
             [&](int token) { ids.push_back(token); });
    EXPECT_EQ(ids, expected);
    trainer_free(a), trainer_free(b);
}

// ----------------------------------------------------------------------------
// files that are refused

static std::string with_word(std::string bytes, size_t i, int32_t word) {
    memcpy(&bytes[4 * i], &word, 4);
    return bytes;
}

TEST_F(Interchange, WrongModelFilesAreNamed) {
    auto error = [&](const std::string& bytes) {
        Shape s;
        return model_file_shape(&s, put("model.bin", bytes));
    };
    std::string gpt2 = llmc_gpt2(published_gpt2(), 3).bytes, old = llama2c(published_llama(true), 0).bytes,
                marked = llama2c(published_llama(true), 1).bytes,
                llama = llmc_llama(published_llama(false), 3, 0.5f, 16).bytes;
    ASSERT_EQ(error(gpt2) + error(old) + error(marked) + error(llama), "");
    auto bytes = [](size_t n) { return std::to_string(n) + " bytes"; };
    for (const std::string& whole : {gpt2, marked, llama}) { // both numbers
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
    // bf16 where the version says float
    EXPECT_HAS(error(with_word(gpt2, 1, 5)), "its header asks for");
    EXPECT_HAS(error(with_word(gpt2, 7, 60)), "a token table of 60 rows for a vocabulary of 61");
    // shapes that do not fit, in the names of config.json
    EXPECT_HAS(error(with_word(gpt2, 5, 3)), "n_head 3 does not divide n_embd 16");
    EXPECT_HAS(error(with_word(gpt2, 4, 0)), "n_layer is 0, which is no size");
    EXPECT_HAS(error(with_word(gpt2, 2, -1)), "n_positions is -1, which is no size");
    EXPECT_HAS(error(with_word(marked, 5, 3)),
               "num_attention_heads 3 does not divide hidden_size 32");
    EXPECT_HAS(error(with_word(marked, 6, 3)),
               "num_key_value_heads 3 does not divide num_attention_heads 4");
    EXPECT_HAS(error(with_word(llama, 8, 0)), "intermediate_size is 0, which is no size");
    EXPECT_HAS(error(with_word(llama, 257, -1)), "rms_norm_eps"); // a NaN
    EXPECT_HAS(error(with_word(llama, 258, 0)), "rope_theta is 0.0, not above zero");
    // products beyond any file
    EXPECT_HAS(error(with_word(gpt2, 6, 1 << 30)), "n_embd is 1073741824, which is no size");
    EXPECT_HAS(error(with_word(gpt2, 7, INT_MAX)), "its header asks for 13743");
    std::string huge = marked; // every number as large as is allowed
    for (size_t i : {2, 3}) huge = with_word(huge, i, 1 << 20);
    for (size_t i : {7, 8}) huge = with_word(huge, i, 1 << 24);
    EXPECT_HAS(error(with_word(huge, 4, 1000)), "its header asks for");
}

// ----------------------------------------------------------------------------
// tokenizers of exports

static std::string base64(const std::string& text) {
    static const char* DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string out;
    for (size_t i = 0; i < text.size(); i += 3) {
        uint32_t bits = 0;
        for (size_t k = 0; k < 3; k++)
            bits = bits << 8 | (i + k < text.size() ? (unsigned char)text[i + k] : 0);
        for (size_t k = 0; k < 4; k++)
            out += i + k > text.size() ? '=' : DIGITS[bits >> (18 - 6 * k) & 63];
    }
    return out;
}

// Pieces of words, letters of several scripts, runs of spaces and line ends, bytes of no character.
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

// The files of an export give the same tokens; what comes back is the exported tokenizer.
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
}

// A name says which pattern and special tokens: r50k_base is GPT-2's.
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
    // (t, h), (a, a), (th, e), (" ", the), (a, b), (a, ab), (aa, b), À's two bytes, two spaces
    EXPECT_EQ(j["model"]["merges"].size(), 9u);
    EXPECT_EQ(j["model"]["merges"][2], "th e");
    EXPECT_EQ(j["model"]["merges"][5], "a ab"); // of one rank: by their pieces
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
        e.files.erase("tokenizer.model"); // which is not to be needed
        put_all("exported", e.files);
        expect_same_tokens(folder + name, dir + "/exported");
    }
}

// What would come out as other tokens stays out.
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

// What came as a tokenizer.json stays what it was, with what stands beside it.
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
    EXPECT_EQ(tokenizer_in(dir), dir + "/tokenizer.model"); // merges alone are none
    Tokenizer t;
    EXPECT_HAS(tokenizer_open(&t, dir + "/merges.txt"),
               "merges.txt: has no encoder.json or vocab.json");
    put("vocab.json", "");
    EXPECT_EQ(tokenizer_in(dir), dir + "/merges.txt");
    put("tokenizer.json", "");
    EXPECT_EQ(tokenizer_in(dir), dir + "/tokenizer.json");
}

// config.json and generation_config.json know the tokens that begin and end.
TEST_F(Interchange, ExportsSayWhereTextsEnd) {
    Trainer<float, Cpu> t;
    Plan plan;
    plan.mode = Mode::EVALUATE, plan.B = 1, plan.T = 4;
    trainer_place(t, published_llama(true), {plan}), trainer_allocate(t);
    init_weights(t, 1);
    std::string folder = dir + "/export";
    auto file = [&](const char* name) { return json::parse(read_file(folder + "/" + name)); };
    ASSERT_EQ(hf_export(t, folder, Type::F32), "");
    EXPECT_TRUE(file("config.json")["eos_token_id"].is_null() &&
                file("config.json")["bos_token_id"].is_null());
    EXPECT_FALSE(fs::exists(folder + "/generation_config.json"));
    ExportTokenizer known = {1, 2, {{"tokenizer.json", "{}"}, {"tokenizer_config.json", "{}"}}};
    ASSERT_EQ(hf_export(t, folder, Type::F32, 5000, known), "");
    for (const char* name : {"config.json", "generation_config.json"}) {
        EXPECT_EQ(file(name)["bos_token_id"], 1);
        EXPECT_EQ(file(name)["eos_token_id"], 2);
    }
    EXPECT_EQ(read_file(folder + "/tokenizer.json"), "{}");
    EXPECT_EQ(hf_export_check(published_llama(true), folder), ""); // all of it is ours
    ASSERT_EQ(hf_export(t, folder, Type::F32), "");            // and is gone with it
    EXPECT_FALSE(fs::exists(folder + "/tokenizer.json") || fs::exists(folder + ".exporting"));
    put("export/vocab.json", "");
    EXPECT_HAS(hf_export_check(published_llama(true), folder), "holds vocab.json");
    trainer_free(t);
}

// A folder's own keys and files go through; keys of ours win.
TEST_F(Interchange, ExportsKeepWhatTheirFolderSays) {
    Trainer<float, Cpu> t;
    Plan plan;
    plan.mode = Mode::EVALUATE, plan.B = 1, plan.T = 4;
    trainer_place(t, published_llama(true), {plan}), trainer_allocate(t);
    init_weights(t, 1);
    std::map<std::string, std::string> files = {
        {"generation_config.json", R"({"eos_token_id": [1, 4], "temperature": 0.6})"},
        {"special_tokens_map.json", R"({"pad_token": "<p>"})"},
        {"chat_template.jinja", "{{ messages }}"},
        {"added_tokens.json", "{}"}};
    json config = {{"eos_token_id", {1, 4}}, {"pad_token_id", 2},    {"bos_token_id", nullptr},
                   {"use_cache", true},      {"hidden_size", 99999}, {"dtype", "float64"}};
    put_all("from", files);
    put("from/config.json", config.dump());
    put("from/README.md", "of another model");

    ExportTokenizer e = {0, 1};
    ASSERT_EQ(keep_of_folder(&e, dir + "/from", true), "");
    std::string folder = dir + "/export";
    auto file = [&](const char* name) { return json::parse(read_file(folder + "/" + name)); };
    ASSERT_EQ(hf_export(t, folder, Type::BF16, 1 << 30, e), "");
    json got = file("config.json");
    EXPECT_EQ(got["eos_token_id"], (json{1, 4}));
    EXPECT_EQ(got["pad_token_id"], 2);
    EXPECT_EQ(got["bos_token_id"], 0); // theirs says nothing
    EXPECT_EQ(got["use_cache"], true);
    EXPECT_EQ(got["hidden_size"], t.model.shape.C);
    EXPECT_EQ(got["torch_dtype"], "bfloat16");
    EXPECT_FALSE(got.contains("dtype"));
    for (const auto& [name, text] : files) EXPECT_EQ(read_file(folder + "/" + name), text) << name;
    EXPECT_FALSE(fs::exists(folder + "/README.md"));

    // Another tokenizer has other ids.
    e = {0, 1};
    ASSERT_EQ(keep_of_folder(&e, dir + "/from", false), "");
    ASSERT_EQ(hf_export(t, folder, Type::F32, 1 << 30, e), ""); // over the first
    EXPECT_EQ(file("config.json")["eos_token_id"], 1);
    EXPECT_FALSE(file("config.json").contains("pad_token_id"));
    EXPECT_EQ(file("generation_config.json")["eos_token_id"], 1);
    EXPECT_FALSE(fs::exists(folder + "/chat_template.jinja"));
    trainer_free(t);
}

// A link stays a link; the folder that it points to is written, also where there is none yet.
TEST_F(Interchange, ExportsFollowLinks) {
    Trainer<float, Cpu> t;
    Plan plan;
    plan.mode = Mode::EVALUATE, plan.B = 1, plan.T = 4;
    trainer_place(t, published_llama(true), {plan}), trainer_allocate(t);
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
    trainer_free(t);
}

TEST_F(Interchange, FoldersThatAreNoExportAreRefused) {
    Shape s = published_llama(true);
    EXPECT_HAS(hf_export_check(s, "."), "is the current folder");
    EXPECT_HAS(hf_export_check(s, fs::current_path()), "is the current folder");
    put("tokenizer/tokenizer.json", "{}"), put("tokenizer/tokenizer_config.json", "{}");
    EXPECT_HAS(hf_export_check(s, dir + "/tokenizer"), "and no whole model: choose a new folder");
    fs::create_directories(dir + "/empty");
    EXPECT_EQ(hf_export_check(s, dir + "/empty"), "");
}

// ----------------------------------------------------------------------------
// the program

struct Program : Interchange {
    std::string text, flags;
    void SetUp() override {
        Interchange::SetUp();
        std::string lines;
        for (int i = 0; i < 400; i++)
            lines += "line " + std::to_string(i * 7919 % 1000) + " of the text\n";
        text = put("text.txt", lines);
        flags =
            " --device cpu --seq 16 --micro-batch 2 --temperature 0 --sample-tokens 12 --data " +
            text + " ";
    }
    std::string run(const std::string& arguments, int status = 0) {
        Ran r = shell(program() + flags + arguments);
        EXPECT_EQ(r.status, status) << arguments << "\n" << r.text;
        return r.text;
    }
    static std::string sample(const std::string& out) { // between its lines
        size_t at = out.find("\n---\n"), end = out.find("\n---\n", at + 1);
        return at == std::string::npos ? "none: " + out : out.substr(at, end - at);
    }
};

TEST_F(Program, AnExportNeedsNoTokenizer) {
    std::string out = dir + "/out", small = "--layers 1 --heads 2 --channels 16 ";
    std::string first = run(small + "--steps 3 --prompt ab --export " + out);
    std::string again = run("--model " + out + " --steps 0 --prompt ab");
    EXPECT_EQ(sample(first), sample(again));
    EXPECT_HAS(again, "tokenizer: " + out + "/tokenizer.json\n");
    EXPECT_FALSE(has(run("--model " + out + " --tokenizer byte --steps 0"), "tokenizer: "));
    EXPECT_TRUE(json::parse(read_file(out + "/config.json"))["eos_token_id"].is_null());
    EXPECT_HAS(run("--model " + out + " --steps 0 --export " + out + "/", 1),
               "is what --model reads: choose another name");
    // a copy of the copy, with what else its folder says
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
    // a tokenizer with more tokens than the model is refused for text, and not written
    std::string lines;
    for (int b = 0; b < 300; b++)
        lines += base64(b < 256 ? std::string(1, char(b)) : "a" + std::to_string(b)) + " " +
                 std::to_string(b) + "\n";
    std::string path = put("r50k_base.tiktoken", lines), more = " --tokenizer " + path;
    EXPECT_HAS(run("--model " + out + more + " --steps 1", 1),
               "writes 301 tokens, the model has 256");
    EXPECT_HAS(run("--model " + out + more + " --steps 0 --sample-tokens 0 --export " + dir + "/m"),
               "writes no tokenizer.json: --tokenizer " + path + " is not the model's");
    // nor are bytes beside a larger vocabulary
    std::string larger =
        run(small + "--vocab 300 --steps 0 --sample-tokens 0 --export " + dir + "/larger");
    EXPECT_HAS(larger, "--export writes no tokenizer.json: --tokenizer byte is not the model's\n");
    EXPECT_FALSE(fs::exists(dir + "/larger/tokenizer.json"));
    run(small + "--vocab 50257 --steps 0 --sample-tokens 0 --export " + dir + "/gpt2"); // GPT-2's
    EXPECT_EQ(json::parse(read_file(dir + "/gpt2/generation_config.json"))["eos_token_id"], 50256);
}

TEST_F(Program, ModelFiles) {
    std::string gpt2 = put("gpt2.bin", llmc_gpt2(gpt2_shape(2, 2, 16, 256, 32), 3).bytes);
    std::string one = run("--model " + gpt2 + " --steps 0 --prompt ab"), exported = dir + "/folder";
    EXPECT_HAS(one, "matrices and tables 10752,"); // 256 x 16, 32 x 16 and 2 x 12 x 16 x 16
    run("--model " + gpt2 + " --steps 0 --sample-tokens 0 --export " + exported);
    EXPECT_EQ(sample(run("--model " + exported + " --steps 0 --prompt ab")), sample(one));
    run("--model " + exported + " --steps 0 --sample-tokens 0 --export " + dir + "/again.bin");
    EXPECT_TRUE(read_file(dir + "/again.bin") == read_file(gpt2));
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
    EXPECT_HAS(
        run("--model " + gpt2 + " --steps 0 --export-dtype fp16 --export " + dir + "/x.bin", 1),
        "float or bf16");
    EXPECT_HAS(run("--model " + dir + "/nowhere.bin --steps 0", 1),
               "neither a folder, a file nor a preset");
}
