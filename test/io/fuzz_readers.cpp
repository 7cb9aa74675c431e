// fuzz_readers.cpp - damaged files of every kind, given to their readers until the time is up
//   usage: fuzz_readers [--seconds N] [--seed S]      build it with -fsanitize=address,undefined
//   Kinds: safetensors, models of llm.c and llama2.c, token shards and texts; config.json, an index
//   of safetensors, tokenizer.json, a checkpoint's manifest, prepare_gpt's progress file. Inputs
//   begin as whole files made here. Each is damaged one to four times: bits, bytes, lengths, cuts,
//   splices, numbers of the JSON, brackets. A manifest mostly gets a right checksum again, since an
//   attacker can compute it. A reader must return a message, or a file that can be read
//   whole: no crash, no throw, and no tensor of another size than its shape's. Batches run in child
//   processes, so that mappings end with them and the input of a crash is kept.
#include <inttypes.h>
#include <sys/wait.h>
#include <chrono>
#include <filesystem>
#include <fstream>
#include "../../llmc/io/checkpoint_load.h"
#include "../../llmc/io/model_files.h"
#include "../../llmc/io/prepare.h"
#include "../step/small_models.h"

using namespace llmc;

// The sanitizer of undefined behaviour only prints unless it is told to halt.
extern "C" const char* __ubsan_default_options() { return "halt_on_error=1:print_stacktrace=1"; }

// Random numbers that depend on the seed and on how many were drawn.
struct Random {
    uint64_t seed, next;
    uint64_t below(uint64_t n) { return random_block(seed, fnv1a("fuzz"), next++)[0] % n; }
    bool one_in(uint64_t n) { return below(n) == 0; }
};

// ----------------------------------------------------------------------------
// whole files

// A file of up to five tensors of random types and shapes.
static std::string valid_safetensors(Random& r) {
    static const char* dtypes[] = {"F32", "BF16", "F16", "F64", "I64", "U8", "BOOL", "I32"};
    std::string header = "{", body;
    if (r.one_in(2)) header += "\"__metadata__\":{\"format\":\"pt\",\"step\":\"12\"},";
    for (uint64_t i = 0, count = r.below(6); i < count; i++) {
        std::string dtype = dtypes[r.below(8)], shape;
        size_t bytes = dtype_bytes(dtype);

        for (uint64_t d = r.below(4); d > 0; d--) {
            size_t size = r.one_in(8) ? 0 : 1 + r.below(9);
            bytes *= size;
            shape += (shape.empty() ? "" : ",") + std::to_string(size);
        }

        // Write the entry, and random data.
        std::string begin = std::to_string(body.size()), end = std::to_string(body.size() + bytes);
        header += "\"h." + std::to_string(i) + ".weight\":{\"dtype\":\"" + dtype +
                  "\",\"shape\":[" + shape + "],\"data_offsets\":[" + begin + "," + end + "]},";
        for (size_t b = 0; b < bytes; b++) body += char(r.below(256));
    }

    // Close the header, and pad it to a multiple of 8.
    if (header.back() == ',') header.pop_back();
    header += "}";
    header.resize(round_up(header.size(), 8), ' ');
    uint64_t length = header.size();
    return std::string(reinterpret_cast<char*>(&length), 8) + header + body;
}

static std::string valid_shard(Random& r) {
    bool narrow = r.one_in(2);
    int32_t words[256] = {narrow ? 20240520 : 20240801, narrow ? 1 : 7, int32_t(r.below(200))};
    std::string bytes(reinterpret_cast<char*>(words), sizeof(words));
    for (int i = 0; i < words[2]; i++) {
        uint32_t token = uint32_t(r.below(300));
        bytes.append(reinterpret_cast<char*>(&token), narrow ? 2 : 4);
    }
    return bytes;
}

// A model of llm.c (GPT-2 or Llama 3) or of llama2.c (either form): a header, and as many bytes
// as the header asks for.
static std::string valid_model(Random& r) {
    uint64_t kind = r.below(4), version = kind == 2 || r.one_in(2) ? 3 : 5;
    size_t L = 1 + r.below(3), NKV = 1 + r.below(2), NH = NKV * (1 + r.below(2)),
           HS = 2 + 2 * r.below(3), C = NH * HS, V = 1 + r.below(20), P = 1 + r.below(9),
           F = 1 + r.below(20), Vp = V + r.below(9);
    bool tied = kind > 1 && r.one_in(2);

    // The header.
    std::string bytes;
    auto words = [&](std::vector<size_t> list) {
        for (size_t word : list) bytes.append(reinterpret_cast<char*>(&word), 4);
    };
    if (kind == 0) words({20240326, version, P, V, L, NH, C, Vp}), bytes.resize(1024);
    if (kind == 1) { // any ffn that is a multiple of 8 C / 3 or larger is allowed; take one
        F = 8 * C;
        words({20240803, version, P, V, L, NH, NKV, C, F, r.below(2), 3, r.below(2)});
        bytes.resize(1024);
        for (float x : {1.3f, 1e-5f, 500000.0f}) bytes.append(reinterpret_cast<char*>(&x), 4);
        bytes.resize(2048);
    }
    if (kind == 2) words({0x616b3432, 1});
    if (kind > 1) words({C, F, L, NH, NKV, tied || kind == 2 ? V : size_t(-int64_t(V)), P});
    if (kind == 2) bytes += char(tied), bytes.resize(256);

    // The weights, all with the same bytes.
    size_t elements = kind == 0 ? (Vp + P + 2) * C + L * (12 * C + 13) * C
                                : (V + 1) * C + L * (2 + 2 * C + 2 * NKV * HS + 3 * F) * C +
                                      (tied ? 0 : V * C) + (kind == 3 ? P * HS : 0);
    bytes.resize(bytes.size() + elements * (kind < 2 && version == 5 ? 2 : 4), char(r.below(256)));
    return bytes;
}

// A configuration of one of four families.
static std::string valid_config(Random& r) {
    static const char* types[] = {"gpt2", "llama", "mistral", "qwen2"};
    size_t NKV = 1 + r.below(2), NH = NKV * (1 + r.below(2)), C = NH * (2 + 2 * r.below(3));
    std::string type = types[r.below(4)];
    nlohmann::json j;

    if (type == "gpt2")
        j = {{"n_embd", C},        {"n_head", NH},        {"n_layer", 1 + r.below(3)},
             {"vocab_size", 9},    {"n_positions", 16},   {"n_inner", nullptr},
             {"n_ctx", 16},        {"layer_norm_epsilon", 1e-5}, {"activation_function", "gelu_new"}};
    else
        j = {{"hidden_size", C},
             {"num_attention_heads", NH},
             {"num_key_value_heads", NKV},
             {"num_hidden_layers", 1 + r.below(3)},
             {"intermediate_size", 20},
             {"vocab_size", 9},
             {"max_position_embeddings", 64},
             {"rms_norm_eps", 1e-5},
             {"rope_theta", 1e4},
             {"hidden_act", "silu"},
             {"tie_word_embeddings", r.one_in(2)},
             {"rope_scaling",
              {{"rope_type", "llama3"},
               {"factor", 8.0},
               {"low_freq_factor", 1.0},
               {"high_freq_factor", 4.0},
               {"original_max_position_embeddings", 16}}}};

    j["model_type"] = type;
    if (type == "qwen2" || r.one_in(2)) j.erase("rope_scaling");
    return j.dump();
}

static std::string valid_index(Random& r) {
    nlohmann::json map = nlohmann::json::object();
    for (uint64_t i = 0, count = r.below(5); i < count; i++)
        map["h." + std::to_string(i) + ".weight"] =
            "model-" + std::to_string(i % 2) + ".safetensors";
    return nlohmann::json{{"metadata", {{"total_size", 12}}}, {"weight_map", map}}.dump();
}

// A byte-level BPE with one merge.
static std::string valid_tokenizer(Random&) {
    nlohmann::json vocabulary = nlohmann::json::object();
    for (size_t c = 0, n = byte_letters().size(); c < n; c++) {
        if (byte_letters()[c] < 0) continue;
        std::string letter = c < 0x80 ? std::string(1, char(c))
                                      : std::string{char(0xc0 | c >> 6), char(0x80 | (c & 63))};
        vocabulary[letter] = vocabulary.size();
    }
    vocabulary["ab"] = vocabulary.size();
    return nlohmann::json{
        {"added_tokens", {{{"id", 257}, {"content", "<|endoftext|>"}, {"special", true}}}},
        {"pre_tokenizer",
         {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
        {"decoder", {{"type", "ByteLevel"}}},
        {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", {"a b"}}}}}
        .dump();
}

// A manifest's text with a right checksum.
static std::string sealed(nlohmann::json j) {
    j["crc32"] = manifest_crc(j);
    return manifest_text(j);
}

static std::string valid_progress(Random& r) {
    nlohmann::json j = ShardOutput().identity;
    j = {{"shards", nlohmann::json::array()}, {"batch", nullptr}, {"written", r.below(9)}};
    for (uint64_t i = 0, count = r.below(3); i < count; i++)
        j["shards"].push_back(
            {{"file", "x.bin"}, {"tokens", 3}, {"documents", 1}, {"bytes", 1030}, {"crc32", 7}});
    if (r.one_in(2))
        j["batch"] = {{"file", 0},  {"offset", r.below(99)}, {"line", 1},
                      {"lines", 1}, {"malformed", 0},        {"begins", true}};
    return sealed(j);
}

// ----------------------------------------------------------------------------
// damage

// Damage the JSON of a safetensors header: put another number in the place of one of the
// text's, insert a word, or insert brackets. The header's length is set right again, so that
// what follows it is read.
static void edit_header(std::string& s, Random& r) {
    static const char* numbers[] = {"0", "1", "7", "-1", "8", "255", "4294967296", "4294967295",
                                    "9223372036854775807", "9223372036854775808",
                                    "18446744073709551615", "18446744073709551616", "2.0", "1e3",
                                    "1e999", "-0", "4611686018427387904", "null", "[]", "{}",
                                    "\"3\"", "true", "", "3,3", "\"F32\"", "\"\\ud800\""};
    static const char* words[] = {"{",  "}",       "[",    "]",   ",",   ":",     "\"",
                                  "\\", "\\u0000", "\xff", "F64", "I64", "dtype", "__metadata__"};

    // Split the file. An earlier damage may have left no header.
    uint64_t length = 0;
    if (s.size() < 8) return;
    memcpy(&length, s.data(), 8);
    if (length > s.size() - 8) return;
    std::string header = s.substr(8, length), body = s.substr(8 + length);
    if (header.empty()) return;

    std::vector<size_t> at;
    for (size_t i = 1; i < header.size(); i++)
        if (isdigit((unsigned char)header[i]) && !isdigit((unsigned char)header[i - 1]))
            at.push_back(i);
    if (r.one_in(4)) { // insert a word, a sign, or a piece of the header from elsewhere
        size_t place = r.below(header.size() + 1);
        if (r.one_in(3))
            header.insert(place, header.substr(r.below(header.size() + 1), r.below(80)));
        else
            header.insert(place, words[r.below(std::size(words))]);
    } else if (r.one_in(300)) { // brackets deep enough to end the stack of a reader that recurses
        size_t depth = 1000 + r.below(200000), shape = header.find(":[", r.below(header.size()));
        size_t place = shape != std::string::npos ? shape + 2
                       : at.empty()               ? 0
                                                  : at[r.below(at.size())];
        header.insert(place,
                      std::string(depth, '[') + (r.one_in(4) ? "" : std::string(depth, ']') + ","));
    } else if (!at.empty()) {
        size_t from = at[r.below(at.size())], to = from;
        while (to < header.size() && isdigit((unsigned char)header[to])) to++;
        std::string number = numbers[r.below(std::size(numbers))];
        if (r.one_in(3))
            number =
                std::to_string(std::strtoull(header.c_str() + from, nullptr, 10) + r.below(9) - 4);
        header.replace(from, to - from, number);
    }

    length = header.size();
    s = std::string(reinterpret_cast<char*>(&length), 8) + header + body;
}

// Damage a text that is JSON from its first byte in the same ways.
static void edit_json(std::string& s, Random& r) {
    uint64_t length = s.size();
    s = std::string(reinterpret_cast<char*>(&length), 8) + s;
    edit_header(s, r);
    s.erase(0, 8);
}

// Compute the checksum again, if what is left is an object that has one.
static void seal(std::string& s) {
    nlohmann::json j;
    if (parse_json(s, "", &j).empty() && j.contains("crc32")) s = sealed(j);
}

// Damage a file in one way. `other`: a second file to splice with.
static void damage(std::string& s, const std::string& other, bool json, Random& r) {
    if (s.empty()) return;
    size_t place = r.one_in(2) ? r.below(std::min(s.size(), size_t(16))) : r.below(s.size());

    switch (r.below(json ? 12 : 7)) {
    case 0: s[place] = char(s[place] ^ 1 << r.below(8)); break;
    case 1: s[place] = char(r.below(256)); break;
    case 2: s.resize(place); break;
    case 3: s.append(1 + r.below(9), char(r.below(256))); break;
    case 4: {
        size_t from = r.one_in(2) ? place : r.below(other.size() + 1);
        s = s.substr(0, place) + other.substr(std::min(other.size(), from));
        break;
    }
    case 5: { // a word of eight or four bytes that means something, at the front or anywhere
        uint64_t words[] = {0,          1,          7,          8,          s.size(), s.size() - 8,
                            255,        1ull << 31, 1ull << 32, 1ull << 63, ~0ull,    ~7ull,
                            100000000,  20240520,   20240801,   20240326,   20240803, 0x616b3432,
                            1ull << 24, 10000};
        uint64_t word = words[r.below(std::size(words))] + (r.one_in(4) ? r.below(5) - 2 : 0);
        size_t width = r.one_in(2) ? 8 : 4, at = r.one_in(2) ? r.below(12) * 4 : place;
        if (at + width <= s.size()) memcpy(s.data() + at, &word, width);
        break;
    }
    case 6: s.erase(place, 1 + r.below(9)); break;
    default: edit_header(s, r);
    }
}

// ----------------------------------------------------------------------------
// readers

static volatile double sink; // uses what is read, so that the reads happen

// Each reader returns "", or what it did that it must not do. *whole counts the
// files that it opened.
static std::string read_safetensors(const std::string& path, size_t* whole) {
    SafeTensors s;
    std::string wrong = safetensors_open(&s, path);
    if (!wrong.empty()) return s.map || !s.tensors.empty() ? "a refused file is left open" : "";
    *whole += 1;

    // Each tensor lies inside the file and has its shape's size.
    uint64_t length;
    memcpy(&length, s.map, 8);
    size_t rest = s.bytes - 8 - length;
    for (const SafeTensor& t : s.tensors) {
        size_t n = t.elements();
        double exact = double(dtype_bytes(t.dtype)); // a product in double does not wrap around
        for (size_t d : t.shape) exact *= double(d);
        rest -= t.bytes;
        if (double(t.bytes) != exact || t.bytes != n * dtype_bytes(t.dtype))
            return "a tensor's size is not its shape's";

        // Check the bounds by hand: the rest of a mapping's last page can be read without a fault.
        const unsigned char* file = static_cast<const unsigned char*>(s.map);
        if (t.data < file + 8 || t.bytes > s.bytes ||
            t.data - file > std::ptrdiff_t(s.bytes - t.bytes))
            return "a tensor lies outside its file";
        if (safetensors_find(s, t.name) != &t) return "a tensor is not found by its name";

        unsigned all = 0;
        for (size_t i = 0; i < t.bytes; i++) all += t.data[i];
        sink = all;
        if (!is_float_dtype(t.dtype)) continue;
        std::vector<float> out(n);
        tensor_to_float(out.data(), t, 0, n);
        for (float f : out) sink = f;
    }

    safetensors_close(&s);
    if (rest != 0) return "the tensors overlap or leave a hole";
    return "";
}

static std::string read_model(const std::string& path, size_t* whole) {
    ModelFile m;
    std::string wrong = model_file_open(&m, path);
    if (!wrong.empty()) return m.file.map ? "a refused file is left open" : "";
    *whole += 1;

    const unsigned char* file = static_cast<const unsigned char*>(m.file.map);
    for (const SafeTensor& t : m.file.tensors) {
        if (t.data < file || t.bytes > m.file.bytes ||
            t.data - file > std::ptrdiff_t(m.file.bytes - t.bytes))
            return "a tensor lies outside its file";
        std::vector<float> values(t.elements());
        tensor_to_float(values.data(), t, 0, values.size());
        for (float f : values) sink = f;
    }
    for (const Parameter& p : make_model(m.shape).parameters) {
        const SafeTensor* t = safetensors_find(m.file, p.name);
        if (!t || t->elements() != p.file_elements()) return "the file lacks " + p.name;
    }
    return model_file_close(&m), "";
}

static std::string read_data(const std::string& path, Random& r, size_t* whole) {
    DataLoader d;
    size_t T = 1 + r.below(9), V = r.one_in(2) ? 300 : 1 + r.below(70000);
    bool own = r.one_in(2);
    Split split = r.one_in(2) ? Split::TRAIN : Split::VAL;
    if (!data_open(&d, path, split, own, {"byte", 256}, T, V, r.below(100)).empty()) return "";
    *whole += 1;

    // Windows lie inside the file, and their tokens in the vocabulary.
    for (const DataFile& f : d.files) {
        struct stat st;
        size_t header = f.width == 1 ? 0 : 1024, last = f.windows ? f.first + f.windows * T + 1 : 0;
        if (stat(path.c_str(), &st) != 0 || header + last * f.width > size_t(st.st_size))
            return "a window lies outside its file";
    }

    std::vector<int> tokens(T), targets(T);
    for (uint64_t s :
         {uint64_t(0), uint64_t(1), d.windows - 1, d.windows, r.below(1u << 31) * 7919}) {
        if (!load_window(d, s, tokens.data(), targets.data()).empty()) continue;
        for (int token : tokens)
            if (token < 0 || size_t(token) >= V) return "an input beyond the vocabulary";
        for (int token : targets)
            if (token < 0 || size_t(token) >= V) return "a target beyond the vocabulary";
    }
    return "";
}

// A whole checkpoint, whose manifest will be damaged, and a trainer to load it into.
struct SavedRun {
    std::unique_ptr<Small<float>> model;
    std::string out, manifest;
};
static SavedRun saved_run(const std::string& folder) {
    SavedRun run;
    run.model =
        std::make_unique<Small<float>>(small_llama(), std::vector<Plan>{small_plan(1, 8, 1)});
    run.out = folder + "/out";
    mkdir(run.out.c_str(), 0777);
    std::string wrong = checkpoint_save(run.model->t, {1, 2, 3, {{"lr", 1e-3}}}, run.out, 1);
    if (!wrong.empty()) fprintf(stderr, "%s\n", wrong.c_str()), _exit(1);
    read_whole_file(run.out + "/step_00000001/manifest.json", &run.manifest);
    return run;
}

static std::string load_run(SavedRun& run, const std::string& manifest, size_t* whole) {
    std::ofstream(run.out + "/step_00000001/manifest.json", std::ios::binary) << manifest;
    CheckpointInfo info;
    std::vector<std::string> notes;
    if (!checkpoint_load(run.model->t, &info, run.out, &notes).empty()) return "";
    *whole += 1;
    StepScale scale = read_value<StepScale>(run.model->t, {Kind::SCALE});
    return info.step < 0 || scale.step < 0 ? "a step below zero" : "";
}

static std::string read_config(const std::string& folder, size_t* whole) {
    Shape s;
    if (!hf_read_config(&s, folder).empty()) return "";
    *whole += 1;
    if (!s.L || s.L > 1024 || !s.NH || !s.NKV || !s.HS || !s.C || !s.F || !s.V || !s.P)
        return "a shape that cannot be built";
    return "";
}

static std::string read_index(const std::string& path, size_t* whole) {
    nlohmann::json map;
    std::set<std::string> files;
    if (!hf_read_index(path, &map, &files).empty()) return "";
    *whole += 1;
    for (const std::string& name : files)
        if (name.find('/') != std::string::npos) return "a file of another folder";
    return "";
}

static std::string open_tokenizer_file(const std::string& path, size_t* whole) {
    Tokenizer t;
    if (!tokenizer_open(&t, path).empty()) return "";
    *whole += 1;
    std::vector<int> tokens = encode(t, "abc \xff <|endoftext|> ab", true);
    for (int token : tokens)
        if (token < 0 || token >= t.vocab_size) return "a token beyond the vocabulary";
    sink = double(decode(t, tokens).size());
    return "";
}

static std::string read_progress(const std::string& path, size_t* whole) {
    ShardOutput o;
    nlohmann::json found;
    std::string text, wrong = read_whole_file(path, &text);
    bool good = parse_json(text, path, &found).empty() && check_state(found).empty();
    read_state(o, path, &found);
    *whole += good;
    if (good)
        sink =
            double(sum_of(found.is_null() ? nlohmann::json::array() : found["shards"], "tokens"));
    return "";
}

// ----------------------------------------------------------------------------
// the life of a batch

enum FileKind { SHARD, SAFETENSORS, MODEL, CONFIG, INDEX, TOKENIZER, PROGRESS, MANIFEST, KINDS };
static const char* FILE_NAMES[KINDS] = {"input.bin",
                                        "input.safetensors",
                                        "input.bin",
                                        "config.json",
                                        "index.json",
                                        "words/tokenizer.json", // read with its folder
                                        "x.progress",
                                        "out/step_00000001/manifest.json"};

// Read the inputs `first` to `first + count`, each of which depends only on its number. Returns ""
// or what is wrong; *counts grows by the files that were opened, by kind.
static std::string run_batch(uint64_t seed, uint64_t first, uint64_t count,
                             const std::string& folder, size_t* counts) {
    SavedRun run = saved_run(folder);
    std::filesystem::create_directories(folder + "/words");
    for (uint64_t i = first; i < first + count; i++) {
        Random r = {seed, i << 24};

        // Half of all inputs are safetensors, models and shards.
        size_t kind = r.one_in(2) ? r.below(3) : r.below(KINDS);
        auto valid = [&]() -> std::string {
            switch (kind) {
            case SHARD: return valid_shard(r);
            case SAFETENSORS: return valid_safetensors(r);
            case MODEL: return valid_model(r);
            case CONFIG: return valid_config(r);
            case INDEX: return valid_index(r);
            case TOKENIZER: return valid_tokenizer(r);
            case PROGRESS: return valid_progress(r);
            default: return run.manifest;
            }
        };
        std::string bytes = valid(), other = valid();

        // One in 32 stays whole, to show that whole files are accepted.
        bool damaged = !r.one_in(32), json = kind >= CONFIG;
        for (uint64_t n = damaged ? 1 + r.below(4) : 0; n > 0; n--) {
            if (json && !r.one_in(4))
                edit_json(bytes, r);
            else
                damage(bytes, other, kind == SAFETENSORS, r);
        }
        if ((kind == PROGRESS || kind == MANIFEST) && !r.one_in(4)) seal(bytes);

        // Write the file, and read it.
        const char* name = kind == SHARD && r.one_in(20) ? "input.txt" : FILE_NAMES[kind];
        std::string path = folder + "/" + name, wrong;
        size_t& opened = counts[kind];
        size_t before = opened;
        if (kind != MANIFEST)
            std::ofstream(path, std::ios::binary)
                .write(bytes.data(), std::streamsize(bytes.size()));
        try {
            switch (kind) {
            case SHARD: wrong = read_data(path, r, &opened); break;
            case SAFETENSORS: wrong = read_safetensors(path, &opened); break;
            case MODEL: wrong = read_model(path, &opened); break;
            case CONFIG: wrong = read_config(folder, &opened); break;
            case INDEX: wrong = read_index(path, &opened); break;
            case TOKENIZER: wrong = open_tokenizer_file(path, &opened); break;
            case PROGRESS: wrong = read_progress(path, &opened); break;
            default: wrong = load_run(run, bytes, &opened);
            }
        } catch (const std::exception& e) {
            wrong = std::string("throws: ") + e.what();
        }

        // A whole file must be accepted.
        if (wrong.empty() && kind != SHARD && !damaged && opened == before)
            wrong = "a whole file is refused";
        if (!wrong.empty()) return path + ": input " + std::to_string(i) + ": " + wrong;
    }
    return "";
}

int main(int argc, char** argv) {
    double seconds = 10;
    uint64_t seed = 1;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--seconds"))
            seconds = atof(argv[i + 1]);
        else if (!strcmp(argv[i], "--seed"))
            seed = strtoull(argv[i + 1], nullptr, 10);
        else
            return fprintf(stderr, "usage: fuzz_readers [--seconds N] [--seed S]\n"), 2;
    }
    omp_set_num_threads(1); // the files are tiny

    // Use a folder in memory where there is one: the disk is not under test.
    std::string folder =
        std::string(access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp") + "/fuzz_readers.XXXXXX";
    if (!mkdtemp(folder.data())) return perror(folder.c_str()), 1;

    // The children count into memory that they share with their parent.
    void* shared = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return perror("mmap"), 1;
    size_t* counts = static_cast<size_t*>(shared);

    // Run batches until the time is up.
    const uint64_t batch = 1000;
    uint64_t done = 0;
    auto start = std::chrono::steady_clock::now();
    while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() <
           seconds) {
        fflush(stdout);
        pid_t child = fork();
        if (child < 0) return perror("fork"), 1;
        if (child == 0) {
            alarm(300); // a reader that does not end counts as a crash
            std::string wrong = run_batch(seed, done, batch, folder, counts);
            if (!wrong.empty()) fprintf(stderr, "%s\n", wrong.c_str());
            _exit(wrong.empty() ? 0 : 1);
        }
        int status = 0;
        waitpid(child, &status, 0);
        if (status != 0) {
            printf("seed %" PRIu64 ", inputs %" PRIu64 " to %" PRIu64
                   ": failed, status %d; the last lies in %s\n",
                   seed, done, done + batch - 1, status, folder.c_str());
            return 1;
        }
        done += batch;
    }

    std::filesystem::remove_all(folder);
    printf("seed %" PRIu64 ", accepted:", seed);
    for (int kind = 0; kind < KINDS; kind++)
        printf(" %zu %s%s", counts[kind], FILE_NAMES[kind], kind + 1 < KINDS ? "," : "\n");
    printf("%" PRIu64 " inputs, no crash\n", done);
}
