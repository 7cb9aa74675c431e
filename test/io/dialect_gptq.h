// dialect_gptq.h - folders of GPTQ and AWQ, packed by their own libraries
//   dev/golden/quantised_golden.py makes them.
#include "../../llmc/extra/gptq.h"
#include "saved_models.h"

static const std::string PACKED_FOLDERS[] = {"gptq-tiny", "gptq-symmetric-tiny", "awq-tiny"};

static uint32_t crc_of(const std::vector<float>& x) {
    auto* bytes = reinterpret_cast<const unsigned char*>(x.data());
    return uint32_t(crc32(0, bytes, uInt(x.size() * sizeof(float))));
}

struct Packed : Scratch {
    Shape shape;
    json golden;
    Plan plan = plan_of(Mode::EVALUATE, 1, 16);

    // Copy a folder, so that a test may change it.
    void copy(const std::string& name) {
        fs::copy(ROOT + "/dev/golden/" + name, dir,
                 fs::copy_options::overwrite_existing | fs::copy_options::recursive);
        ASSERT_EQ(hf_read_config(&shape, dir), "");
        golden = read_json(dir + "/golden.json");
    }
    // Change the bytes of a tensor in the file.
    template <typename F> void change(const std::string& name, F f) {
        TensorFile open(dir + "/model.safetensors");
        const SafeTensor* t = safetensors_find(open.file, name);
        ASSERT_TRUE(t) << name;
        size_t at = size_t(t->data - static_cast<const unsigned char*>(open.file.map));
        std::string all = read_file(dir + "/model.safetensors");
        f(&all[at], t->bytes);
        put_file(dir + "/model.safetensors", all);
    }
    void set_config(const std::string& key, const json& value) {
        json config = read_json(dir + "/config.json");
        config["quantization_config"][key] = value;
        put_file(dir + "/config.json", config.dump());
    }
    std::string load(Stored stored = Stored::WIDE) {
        plan.stored = stored;
        Small<float> m(shape, {plan});
        return hf_load_weights(m.t, dir, {GPTQ_AND_AWQ});
    }

    // The sums of all packed matrices, as this run expands them.
    template <typename T> json sums(const Trainer<T, Cpu>& t) {
        json all;
        for (const Parameter& p : t.model.parameters)
            if (golden["crc32"].contains(p.name)) all[p.name] = crc_of(get_weight(t, p));
        return all;
    }
    // The loss of the golden tokens.
    template <typename T> double loss(Trainer<T, Cpu>& t) {
        std::vector<int> text = golden["tokens"];
        t.data.window = [=](uint64_t, int* tokens, int* targets) {
            std::copy_n(text.data(), 16, tokens);
            std::copy_n(text.data() + 1, 16, targets);
            return std::string();
        };
        run_plan(t, 0);
        return plan_loss(t).mean();
    }
};

// Every matrix is to the bit what the library packed, and the loss is transformers': within 1e-6,
// because transformers has norms and rotations in float.
TEST_F(Packed, FoldersGiveTheirLibrariesWeights) {
    for (const std::string& name : PACKED_FOLDERS) {
        copy(name);
        Small<float> m(shape, {plan});
        ASSERT_EQ(hf_load_weights(m.t, dir, {GPTQ_AND_AWQ}), "") << name;
        EXPECT_EQ(sums(m.t), golden["crc32"]) << name;
        Small<double> wide(shape, {plan});
        ASSERT_EQ(hf_load_weights(wide.t, dir, {GPTQ_AND_AWQ}), "") << name;
        EXPECT_NEAR(loss(wide.t), golden["loss"].get<double>(), 1e-6) << name;
    }
}

// Shared out over ranks, each has its part of the same weights.
TEST_F(Packed, EveryLayoutHasTheSameWeights) {
    for (const std::string& name : PACKED_FOLDERS)
        for (int kind : {0, 1, 2}) {
            copy(name);
            EXPECT_EQ(run_local_ranks(2, {}, [&](const Comm& world) {
                Plan train = plan_of(Mode::TRAIN, 1, 16);
                Layout layout = small_layout(kind == 2 ? 2 : 1, 1 + !kind, 1 + (kind == 1));
                layout.zero = kind == 2 ? 3 : 0;
                if (kind == 1) layout.first_layer = {0, 2, 4};
                train.layout = layout_at(layout, world.rank);
                Small<float> part(shape, {train});
                const Model& model = part.t.model;
                part.t.comms = make_comms(world, train.layout,
                                          ranks_of_kv_head(train.layout, model));
                EXPECT_EQ(hf_load_weights(part.t, dir, {GPTQ_AND_AWQ}), "");
                EXPECT_EQ(sums(part.t), golden["crc32"]) << name << kind;
            }), 0);
        }
}

// --weights int4 keeps the codes of a symmetric folder: its matrices are the same to the bit.
// Any other grid is refused.
TEST_F(Packed, Int4KeepsSymmetricCodes) {
    copy("gptq-symmetric-tiny");
    plan.stored = Stored::INT4;
    Small<float> m(shape, {plan});
    ASSERT_EQ(hf_load_weights(m.t, dir, {GPTQ_AND_AWQ}), "");
    for (const Parameter& p : m.t.model.parameters) {
        if (!golden["crc32"].contains(p.name)) continue;
        auto* base = address<unsigned char>(m.t, {Kind::WEIGHT, p.bucket});
        Narrow w = bind_narrow<float>(Stored::INT4, m.t.model, m.t.layout, p, base);
        std::vector<float> x(p.elements());
        int4_dequantize(x.data(), w.int4, w.absmax, p.rows(), p.cols(), Cpu{});
        EXPECT_EQ(json(crc_of(x)), golden["crc32"][p.name]) << p.name;
    }
    EXPECT_NEAR(loss(m.t), golden["loss"].get<double>(), 1e-5);

    for (const std::string& name : {PACKED_FOLDERS[0], PACKED_FOLDERS[2]}) {
        copy(name);
        EXPECT_HAS(load(Stored::INT4), "has zero points, or groups of its own, and --weights int4");
        EXPECT_EQ(load(Stored::INT8), ""); // rounded again, as any folder
    }

    // Inputs that int4 gives one scale must have one in the file.
    PackedMatrix two;
    two.cols = 2 * INT4_GROUP;
    for (size_t c = 0; c < two.cols; c++) two.of_col.push_back(uint32_t(c / INT4_GROUP));
    EXPECT_TRUE(fits_int4(two));
    two.of_col[INT4_GROUP + 1] = 0;
    EXPECT_FALSE(fits_int4(two));
}

// gptq_v2 stores zero points as they are, and quantize_config.json may say the format.
TEST_F(Packed, VariantsOfTheFormat) {
    copy("gptq-tiny");
    for (auto& [name, sum] : golden["crc32"].items())
        change(packed_part(name, "qzeros"), [](char* x, size_t n) {
            for (size_t i = 0; i < n; i++) x[i] = char(x[i] + 0x11);
        });
    set_config("checkpoint_format", "gptq_v2");
    Small<float> m(shape, {plan});
    ASSERT_EQ(hf_load_weights(m.t, dir, {GPTQ_AND_AWQ}), "");
    EXPECT_EQ(sums(m.t), golden["crc32"]);

    copy("gptq-symmetric-tiny");
    json config = read_json(dir + "/config.json");
    put_file(dir + "/quantize_config.json", config["quantization_config"].dump());
    config.erase("quantization_config");
    put_file(dir + "/config.json", config.dump());
    EXPECT_EQ(load(), "");
    fs::remove(dir + "/quantize_config.json");
    EXPECT_HAS(load(), "config.json has no quantization_config of theirs");
}

// Formats that are not read, and parts that do not fit, are named.
TEST_F(Packed, WrongFoldersAreNamed) {
    auto with = [&](const std::string& name, const std::string& key, const json& value) {
        copy(name);
        set_config(key, value);
        return load();
    };
    EXPECT_HAS(with(PACKED_FOLDERS[0], "bits", 8), "has bits 8: 4 is read");
    EXPECT_HAS(with(PACKED_FOLDERS[0], "bits", "x"), "4 is read");
    EXPECT_HAS(with(PACKED_FOLDERS[0], "group_size", 0), "has group_size 0: it is -1 or");
    EXPECT_HAS(with(PACKED_FOLDERS[0], "group_size", 64), "down_proj.qzeros is I32 (5, 4), and I32 (3, 4)");
    EXPECT_HAS(with(PACKED_FOLDERS[0], "group_size", -1), "down_proj.qzeros is I32 (5, 4), and I32 (1, 4)");
    EXPECT_HAS(with(PACKED_FOLDERS[0], "checkpoint_format", "marlin"), "marlin: gptq and gptq_v2 are read");
    EXPECT_HAS(with(PACKED_FOLDERS[0], "is_marlin_format", true), "gptq and gptq_v2 are read");
    EXPECT_HAS(with(PACKED_FOLDERS[0], "quant_method", "quip"), "quip: gptq and awq are read");
    EXPECT_HAS(with(PACKED_FOLDERS[0], "quant_method", "awq"), "qweight is I32 (4, 32), and I32 (32, 4)");
    EXPECT_HAS(with(PACKED_FOLDERS[2], "version", "GEMV"), "version gemv: gemm is read");
    EXPECT_EQ(with(PACKED_FOLDERS[2], "version", "GEMM"), "");
    EXPECT_HAS(with(PACKED_FOLDERS[0], "quant_method", "bitsandbytes"), "gptq and awq are read");

    // Contents: a group, a zero point and a bias that cannot be.
    auto broken = [&](const char* part, size_t at, char value) {
        copy("gptq-tiny");
        change(std::string("model.layers.1.mlp.up_proj.") + part,
               [&](char* x, size_t) { x[at] = value; });
        return load();
    };
    EXPECT_HAS(broken("g_idx", 3, 1), "up_proj.g_idx names a group beyond 0");
    EXPECT_HAS(broken("qzeros", 2, -1), "a zero point that stands for 0 or for 16");
    EXPECT_HAS(broken("bias", 1, 1), "a bias that this model has not");
}
