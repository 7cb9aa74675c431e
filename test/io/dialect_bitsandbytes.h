// dialect_bitsandbytes.h - folders that bitsandbytes has quantised
#include "../../llmc/extra/bitsandbytes.h"
#include "../../llmc/run/health.h"
#include "saved_models.h"

// Tensors of any type, as a file holds them.
struct RawTensor {
    std::string dtype, bytes;
    std::vector<size_t> shape;
};
typedef std::map<std::string, RawTensor> RawTensors;

template <typename V>
static RawTensor raw(const char* dtype, const std::vector<V>& x, std::vector<size_t> shape = {}) {
    if (shape.empty()) shape = {x.size()};
    return {dtype, std::string(reinterpret_cast<const char*>(x.data()), x.size() * sizeof(V)),
            shape};
}
static void write_raw(const std::string& path, const RawTensors& tensors) {
    json header = json::object();
    std::string data;
    for (auto& [name, t] : tensors) {
        size_t end = data.size() + t.bytes.size();
        header[name] = {
            {"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {data.size(), end}}};
        data += t.bytes;
    }
    std::string text = header.dump();
    uint64_t length = text.size();
    put_file(path, std::string(reinterpret_cast<const char*>(&length), 8) + text + data);
}

// Add a matrix in NF4, with the state that bitsandbytes 0.43 and later write. nested:
// absmaxes are quantised too.
static void add_nf4(RawTensors& all, const std::string& name, const StoredMatrix& m,
                    const std::vector<size_t>& shape, bool nested) {
    std::vector<float> values(16), absmax(m.scales.size());
    for (unsigned c = 0; c < 16; c++) values[c] = nf4_value(c);
    json state = {
        {"quant_type", "nf4"}, {"blocksize", 64}, {"dtype", "bfloat16"}, {"shape", shape}};

    all[name] = raw("U8", m.codes, {m.codes.size(), 1});
    all[name + ".quant_map"] = raw("F32", values);

    if (nested) {
        state["nested_blocksize"] = 256, state["nested_dtype"] = "float32";
        state["nested_offset"] = m.table[0];
        auto head = m.table.begin() + 1, tail = head + NF4_MAP;
        all[name + ".absmax"] = raw("U8", m.scales);
        all[name + ".nested_quant_map"] = raw("F32", std::vector<float>(head, tail));
        all[name + ".nested_absmax"] = raw("F32", std::vector<float>(tail, m.table.end()));
    } else {
        Nf4 w = {m.codes.data(), m.scales.data(), m.table.data()};
        for (size_t b = 0; b < absmax.size(); b++) absmax[b] = nf4_absmax(w, b);
        all[name + ".absmax"] = raw("F32", absmax);
    }

    std::string text = state.dump();
    all[name + ".quant_state.bitsandbytes__nf4"] =
        raw("U8", std::vector<char>(text.begin(), text.end()));
}

struct Prequantised : Scratch {
    Shape shape = gpt2_shape(2, 2, 128, 61, 32);
    std::vector<std::vector<float>> values; // each parameter's, before it was quantised

    Small<float> model(Stored stored) {
        Plan evaluate = small_plan(2, 9, 1);
        evaluate.mode = Mode::EVALUATE, evaluate.stored = stored;
        return Small<float>(shape, {evaluate});
    }
    // The folder's tensors: the matrices of blocks as NF4, as int8 or as floats,
    // and the rest as floats.
    RawTensors folder(Stored stored, bool nested) {
        Small<float> m = model(Stored::WIDE);
        RawTensors all;
        values.clear();
        for (const Parameter& p : m.t.model.parameters) {
            std::vector<float> x(p.file_elements());
            for (size_t i = 0; i < x.size(); i++)
                x[i] = float(int(fnv1a(p.name + std::to_string(i)) % 4001) - 2000) / 3000;
            bool narrow = is_narrow(stored, m.t.model, p);
            std::vector<size_t> rows_cols = {p.file_rows, p.cols()};

            if (!narrow) all[p.name] = raw("F32", x, file_shape(p, p.file_rows));
            if (narrow && stored == Stored::NF4)
                add_nf4(all, p.name, make_nf4(x), rows_cols, nested);
            if (narrow && stored == Stored::INT8) {
                StoredMatrix q = make_matrix(Stored::INT8, x, p.rows());
                std::string stem = p.name.substr(0, p.name.rfind('.') + 1);
                all[p.name] = raw("I8", q.codes, rows_cols);
                all[stem + "SCB"] = raw("F32", q.table);
                all[stem + "weight_format"] = raw("U8", std::vector<char>{0}, {1});
            }
            values.push_back(x);
        }
        return all;
    }

    std::string load(Small<float>& m, const RawTensors& tensors) {
        write_raw(dir + "/model.safetensors", tensors);
        return hf_load_weights(m.t, dir, {BITSANDBYTES});
    }
    // All bytes that a model stores.
    std::string bytes_of(const Small<float>& m) {
        std::string all;
        for (int b = 0; b < int(m.t.model.buckets.size()); b++) {
            const Place* place = arena_find(m.t.arena, 0, 0, {Kind::WEIGHT, b});
            all.append(reinterpret_cast<const char*>(m.t.arena.device().base) + place->offset,
                       place->bytes);
        }
        return all;
    }
};

// Codes and absmaxes are the file's, to the byte. Read as floats, they are the values
// that the codes stand for.
TEST_F(Prequantised, FoldersLoadAsTheyAre) {
    Shape qwen = llama_shape(2, 4, 2, 128, 256, 53, 64, 10000);
    qwen.attention.qkv_bias = true;
    for (const Shape& s : {shape, qwen})
        for (Stored stored : {Stored::NF4, Stored::INT8})
            for (bool nested : {true, false}) {
                shape = s;

                RawTensors tensors = folder(stored, nested);
                Small<float> made = model(stored), loaded = model(stored),
                             wide = model(Stored::WIDE);
                for (size_t i = 0; i < values.size(); i++) {
                    std::vector<float> x = values[i];
                    const Parameter& p = made.t.model.parameters[i];
                    x.resize(p.elements(), 0.0f);
                    set_weight(made.t, p, x.data());
                }

                // As values: the folder is read into a model of floats.
                ASSERT_EQ(load(wide, tensors), "");
                for (size_t i = 0; i < values.size(); i++) {
                    const Parameter& p = wide.t.model.parameters[i];
                    std::vector<float> x = values[i], got = get_weight(wide.t, p);
                    if (is_narrow(stored, wide.t.model, p)) {
                        bool four = stored == Stored::NF4;
                        StoredMatrix m = make_matrix(stored, x, p.rows());
                        auto* codes = reinterpret_cast<const int8_t*>(m.codes.data());
                        Nf4 w = {m.codes.data(), m.scales.data(), m.table.data()};
                        four ? nf4_dequantize(x.data(), w, x.size(), Cpu{})
                             : int8_dequantize(x.data(), codes, m.table.data(), p.rows(), p.cols(),
                                               Cpu{});
                    }
                    got.resize(x.size());
                    EXPECT_EQ(got, x) << p.name;
                }

                // As codes: into a model that stores them. Its absmaxes are in 8 bits, so absmaxes
                // in float are refused.
                if (stored == Stored::NF4 && !nested) {
                    EXPECT_HAS(load(loaded, tensors),
                               "has absmaxes in float, and --weights nf4 has");
                    continue;
                }
                ASSERT_EQ(load(loaded, tensors), "");
                EXPECT_TRUE(bytes_of(loaded) == bytes_of(made));

                // Codes that no values lead to: a block of zeros with the codes of
                // -1, which CUDA writes.
                auto& codes = std::find_if(tensors.begin(), tensors.end(), [&](auto& t) {
                                  return t.second.dtype == (stored == Stored::NF4 ? "U8" : "I8") &&
                                         t.second.shape.size() == 2;
                              })->second.bytes;
                std::fill_n(codes.begin(), 32, 0);
                ASSERT_EQ(load(loaded, tensors), "");
                EXPECT_FALSE(bytes_of(loaded) == bytes_of(made));
            }
}

// Parts that are missing, of another size or type, or in a form that is not NF4's.
TEST_F(Prequantised, WrongPartsAreNamed) {
    RawTensors good = folder(Stored::NF4, true);
    std::string name = "h.0.attn.c_attn.weight", state = name + ".quant_state.bitsandbytes__nf4";
    Small<float> m = model(Stored::NF4);
    auto with = [&](auto change) {
        RawTensors tensors = good;
        change(tensors);
        return load(m, tensors);
    };

    auto with_state = [&](const char* key, const json& value) {
        json j = json::parse(good[state].bytes);
        value.is_null() ? void(j.erase(key)) : void(j[key] = value);
        std::string text = j.dump();
        return with([&](RawTensors& t) {
            t[state] = raw("U8", std::vector<char>(text.begin(), text.end()));
        });
    };

    EXPECT_EQ(with([](RawTensors&) {}), "");
    for (std::string part : {".absmax", ".quant_map", ".nested_quant_map"})
        EXPECT_HAS(with([&](RawTensors& t) { t.erase(name + part); }), name + part + " is missing");
    EXPECT_HAS(with([&](RawTensors& t) { t.erase(name + ".nested_absmax"); }), ".absmax is U8");
    EXPECT_HAS(with([&](RawTensors& t) { t.erase(state); }), "is no NF4: quantise with");

    EXPECT_HAS(with([&](RawTensors& t) {
                   t[name + ".absmax"].bytes.pop_back(), t[name + ".absmax"].shape[0]--;
               }),
               ".absmax is U8");
    EXPECT_HAS(with([&](RawTensors& t) { t[name].bytes.pop_back(), t[name].shape[0]--; }),
               " bytes for ");
    EXPECT_HAS(with([&](RawTensors& t) { t[name + ".quant_map"].bytes[4]++; }),
               "quant_map is not NF4's");
    EXPECT_HAS(with([&](RawTensors& t) { t[state].bytes[0] = '['; }), "blocks of other than 64");
    EXPECT_HAS(with([&](RawTensors& t) { t["h.7.more"] = t[state]; }), "belongs to nothing");

    // The state's fields.
    EXPECT_HAS(with_state("blocksize", 128), "blocks of other than 64");
    EXPECT_HAS(with_state("blocksize", "x"), "blocks of other than 64");
    EXPECT_HAS(with_state("nested_blocksize", "x"), "other than 256, or no offset");
    EXPECT_HAS(with_state("nested_offset", json()), "other than 256, or no offset");
    EXPECT_HAS(with_state("shape", json::array({128, 384})),
               "has the shape [128,384], config.json asks");

    EXPECT_HAS(with([&](RawTensors& t) {
                   t["h.0.ln_1.weight"].dtype = "U8", t["h.0.ln_1.weight"].shape[0] *= 4;
               }),
               "only whole matrices");

    // Absmaxes that are not finite are found as any bad weight is.
    float nan = NAN;
    EXPECT_EQ(with([&](RawTensors& t) {
                  t[name + ".nested_absmax"].bytes.replace(0, 4, reinterpret_cast<char*>(&nan), 4);
              }),
              "");
    EXPECT_HAS(first_bad_weight(m.t), name);

    // int8's parts.
    good = folder(Stored::INT8, false);
    Small<float> rows = model(Stored::INT8);
    RawTensors wrong = good;
    wrong["h.0.attn.c_attn.weight_format"].bytes[0] = 1;
    EXPECT_HAS(load(rows, wrong), "does not lie in rows");
    wrong = good, wrong.erase("h.1.mlp.c_fc.SCB");
    EXPECT_HAS(load(rows, wrong), "tensor h.1.mlp.c_fc.SCB is missing");
}
