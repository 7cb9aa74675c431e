// gguf.h - a model and its tokenizer in one file for llama.cpp - ggml's docs/gguf.md, version 3
//   file    "GGUF", 3, the numbers of tensors and keys; keys with typed values; for each tensor its
//           name, sizes (the fastest first), type and place; then the data, each tensor at a
//           multiple of 32. All is little-endian
//   names   llama.cpp's: "model.layers.3.self_attn.q_proj.weight" is "blk.3.attn_q.weight"
//   rotary  llama.cpp's llama turns neighbours (2i, 2i+1), this model turns (i, i + HS/2): the rows
//           of q and k are reordered. Its qwen2 and qwen3 turn halves too, and keep their rows
//   scaled  scaled frequencies are written as a divisor for each pair, "rope_freqs.weight"
//   types   vectors and the table of positions are float; matrices are F32, F16, BF16 or Q8_0:
//           blocks of 32 elements with one scale, amax / 127 in fp16. Rows that do not divide into
//           blocks are F16, which gguf_wider() says
//   A tokenizer that cuts words in a way that llama.cpp has no name for is left out: then the model
//   takes only tokens.
#pragma once
#include "../adapters.h"
#include "../family.h"
#include "../io/config.h"
#include "../io/files.h"
#include "../io/hf_config.h"
#include "../io/hf_places.h"
#include "../io/huggingface.h"
#include "../io/safetensors.h"
#include "../io/tokenizer.h"
#include "../io/tokenizer_export.h"
#include "../io/tokenizer_files.h"
#include "../model.h"
#include "../ops/element_type.h"
#include "../ops/rope.cuh"
#include "../ops/types.h"
#include "../run/run.h"
#include "../sizes.h"
#include "../comm/text.h"
#include "../trainer.h"

namespace llmc {

// ggml's numbers of types.
enum class GgufType : uint32_t { F32 = 0, F16 = 1, Q8_0 = 8, BF16 = 30 };
constexpr size_t GGUF_ALIGNMENT = 32;
constexpr size_t Q8_BLOCK = 32; // elements that share a scale

// The type that --export-dtype names, and the number of it in general.file_type.
inline GgufType gguf_type(const std::string& name) {
    if (name == "q8_0") return GgufType::Q8_0;
    if (name == "bf16") return GgufType::BF16;
    return name == "fp16" ? GgufType::F16 : GgufType::F32;
}
inline uint32_t gguf_file_type(GgufType type) {
    if (type == GgufType::Q8_0) return 7;
    if (type == GgufType::BF16) return 32;
    return type == GgufType::F16 ? 1 : 0;
}

// This project's name of a type without blocks.
inline Type plain_type(GgufType type) {
    if (type == GgufType::F32) return Type::F32;
    return type == GgufType::F16 ? Type::F16 : Type::BF16;
}

// The bytes of n elements. A block is its scale, followed by its codes.
inline size_t gguf_bytes(GgufType type, size_t n) {
    if (type == GgufType::Q8_0)
        return n / Q8_BLOCK * (2 + Q8_BLOCK);
    return n * (type == GgufType::F32 ? 4 : 2);
}

// ----------------------------------------------------------------------------
// bytes

// Append a value. A number is as in memory: this project runs only on little-endian machines. A
// bool is one byte, and a text its length and its bytes, as the specification says.
template <typename A> void gguf_put(std::string* to, const A& x) {
    if constexpr (std::is_same_v<A, std::string>) {
        gguf_put(to, uint64_t(x.size()));
        *to += x;
    } else {
        to->append(reinterpret_cast<const char*>(&x), sizeof(x));
    }
}

// The number of a value's type.
template <typename A> uint32_t gguf_type_number() {
    if (std::is_same_v<A, uint32_t>) return 4;
    if (std::is_same_v<A, int32_t>) return 5;
    if (std::is_same_v<A, float>) return 6;
    return std::is_same_v<A, bool> ? 7 : 8;
}

// The keys with their values, in the order in which they are added. Nothing depends on the order: a
// reader looks up each key by name.
struct GgufKeys {
    std::string bytes = {};
    uint64_t count = 0;
};

// Add a key: its name, the number of its value's type, and the value.
template <typename A> void gguf_add(GgufKeys* k, const std::string& name, const A& x) {
    gguf_put(&k->bytes, name);
    gguf_put(&k->bytes, gguf_type_number<A>());
    gguf_put(&k->bytes, x);
    k->count++;
}
// An array is a value of type 9: the type of its elements and their number, then the elements.
template <typename A>
void gguf_add(GgufKeys* k, const std::string& name, const std::vector<A>& x) {
    gguf_put(&k->bytes, name);
    gguf_put(&k->bytes, uint32_t(9));
    gguf_put(&k->bytes, gguf_type_number<A>());
    gguf_put(&k->bytes, uint64_t(x.size()));
    for (const A& each : x)
        gguf_put(&k->bytes, each);
    k->count++;
}

// A tensor's values as the file stores them.
inline std::string gguf_values(const std::vector<float>& x, GgufType type) {
    std::string bytes;
    if (type != GgufType::Q8_0) {
        Type t = plain_type(type);
        bytes.resize(x.size() * type_bytes(t));
        float_to_type(bytes.data(), x.data(), x.size(), t);
        return bytes;
    }

    // Q8_0: round to multiples of the block's scale, so that its largest element becomes +-127.
    for (size_t first = 0; first < x.size(); first += Q8_BLOCK) {
        // Write the scale in fp16, but compute the codes with the scale before that rounding.
        float most = 0;
        for (size_t i = 0; i < Q8_BLOCK; i++)
            most = std::max(most, std::abs(x[first + i]));
        float scale = most / 127;
        gguf_put(&bytes, from_acc<fp16>(scale).bits);
        for (size_t i = 0; i < Q8_BLOCK; i++)
            bytes += char(scale > 0 ? int8_t(std::round(x[first + i] / scale)) : 0);
    }
    return bytes;
}

// The values that a reader of the file gets for these floats.
inline std::vector<float> gguf_rounded(std::vector<float> x, GgufType type) {
    // Types without blocks round each element separately.
    if (type != GgufType::Q8_0) {
        for (float& each : x)
            each = as_written(each, plain_type(type));
        return x;
    }

    // Read back what would be written.
    std::string bytes = gguf_values(x, type);
    for (size_t i = 0; i < x.size(); i++) {
        // A block's scale stands before its codes.
        const char* block = &bytes[i / Q8_BLOCK * (2 + Q8_BLOCK)];
        fp16 scale;
        memcpy(&scale.bits, block, 2);
        x[i] = to_float(scale) * float(int8_t(block[2 + i % Q8_BLOCK]));
    }
    return x;
}

// ----------------------------------------------------------------------------
// the model: names, order, description

// llama.cpp's name of this architecture, or "" if it is not built here.
inline std::string gguf_architecture(const Shape& s) {
    if (s.family == Family::GPT2) return "gpt2";
    if (s.hf_type == "llama" || s.hf_type == "mistral")
        return "llama";
    return s.hf_type == "qwen2" || s.hf_type == "qwen3" ? s.hf_type : "";
}

// Check at the start of a run that a shape can be written. Returns "" or the reason why not.
inline std::string gguf_check(const Shape& s, const std::string& path) {
    std::string flag = "--export " + path;
    LLMC_TRY(check_export_file(path));

    // Refuse architectures that are not built, and shapes that Hugging Face's class of the model
    // cannot describe either.
    if (gguf_architecture(s).empty())
        return flag + ": GGUF is built for GPT-2, Llama, Mistral, Qwen2 and Qwen3, not for " +
               s.hf_type + ": export a folder, and convert it with llama.cpp's own script";
    LLMC_TRY(hf_refusal(s));

    // llama.cpp's qwen2 has heads as wide as the channels together, and its qwen3 has no biases.
    std::string a = gguf_architecture(s);
    if (a == "qwen2" && s.NH * s.HS != s.C)
        return concat(flag, ": llama.cpp's qwen2 has heads of ", s.C, " channels together, this "
                      "model's have ", s.NH * s.HS, ": export a folder");
    if (a == "qwen3" && s.attention.o_bias)
        return flag + ": llama.cpp's qwen3 has no biases: export a folder";

    // llama.cpp reads rope_freqs.weight only for llama, and has no place for a
    // factor of the cosines.
    bool divides = a == "llama";
    if (scales(s.rope.scaling) && (!divides || s.rope.scaling.attention_factor != 1))
        return flag + ": llama.cpp's " + a +
               " scales rotary positions in another way: export a folder";
    return "";
}

// A parameter's name in llama.cpp, or "" if it has none.
inline std::string gguf_name(const std::string& name) {
    static const std::pair<const char*, const char*> words[] = {
        // GPT-2
        {"wte", "token_embd"},
        {"wpe", "position_embd"},
        {"ln_f", "output_norm"},
        {"ln_1", "attn_norm"},
        {"attn.c_attn", "attn_qkv"},
        {"attn.c_proj", "attn_output"},
        {"ln_2", "ffn_norm"},
        {"mlp.c_fc", "ffn_up"},
        {"mlp.c_proj", "ffn_down"},
        // Llama and its relatives
        {"model.embed_tokens", "token_embd"},
        {"model.norm", "output_norm"},
        {"lm_head", "output"},
        {"input_layernorm", "attn_norm"},
        {"self_attn.q_proj", "attn_q"},
        {"self_attn.k_proj", "attn_k"},
        {"self_attn.v_proj", "attn_v"},
        {"self_attn.o_proj", "attn_output"},
        {"self_attn.q_norm", "attn_q_norm"},
        {"self_attn.k_norm", "attn_k_norm"},
        {"post_attention_layernorm", "ffn_norm"},
        {"mlp.gate_proj", "ffn_gate"},
        {"mlp.up_proj", "ffn_up"},
        {"mlp.down_proj", "ffn_down"},
    };

    // Separate the block's number at the front, "h.3." or "model.layers.3.", and the ending.
    size_t digit = name.find_first_of("0123456789");
    bool block = name.starts_with("h.") || name.starts_with("model.layers.");
    size_t from = block ? name.find('.', digit) + 1 : 0;
    size_t to = name.rfind('.');
    std::string front = block ? "blk." + name.substr(digit, from - digit) : "";
    // Keep the ending as it is: .weight or .bias.
    for (auto [ours, theirs] : words)
        if (name.substr(from, to - from) == ours)
            return front + theirs + name.substr(to);
    return "";
}

// The context of the file. A window is a shorter context, in which it hides nothing: none of these
// architectures has windows in llama.cpp.
inline size_t gguf_context(const Shape& s) {
    return s.attention.window ? std::min(s.P, s.attention.window) : s.P;
}

// Describe the shape: sizes and constants under llama.cpp's keys.
inline void add_gguf_shape(GgufKeys* k, const Shape& s, GgufType type, const std::string& name) {
    std::string a = gguf_architecture(s);
    gguf_add(k, "general.architecture", a);
    gguf_add(k, "general.name", name);
    gguf_add(k, "general.file_type", gguf_file_type(type));
    gguf_add(k, "general.quantization_version", uint32_t(2));

    gguf_add(k, a + ".context_length", uint32_t(gguf_context(s)));
    gguf_add(k, a + ".embedding_length", uint32_t(s.C));
    gguf_add(k, a + ".block_count", uint32_t(s.L));
    gguf_add(k, a + ".feed_forward_length", uint32_t(s.F));
    gguf_add(k, a + ".vocab_size", uint32_t(s.V));
    gguf_add(k, a + ".attention.head_count", uint32_t(s.NH));
    gguf_add(k, a + ".attention.head_count_kv", uint32_t(s.NKV));
    if (s.family == Family::GPT2)
        return gguf_add(k, a + ".attention.layer_norm_epsilon", s.block.norm_eps);

    // Llama and its relatives have more keys.
    gguf_add(k, a + ".attention.layer_norm_rms_epsilon", s.block.norm_eps);
    gguf_add(k, a + ".attention.key_length", uint32_t(s.HS));
    gguf_add(k, a + ".attention.value_length", uint32_t(s.HS));
    gguf_add(k, a + ".rope.dimension_count", uint32_t(s.HS));
    gguf_add(k, a + ".rope.freq_base", float(s.rope.theta));
}

// ----------------------------------------------------------------------------
// the tokenizer

// llama.cpp's name for the way in which a byte-level tokenizer cuts words, or "" if it has none.
inline std::string gguf_words(const Tokenizer& t) {
    // If nothing merges, any way to cut gives the same tokens.
    if (only_bytes(t)) return "gpt-2";
    std::string one_digit = replace_all(CL100K_PATTERN, "{1,3}", ""); // Qwen2's
    if (t.pattern_texts.size() != 1) return "";
    const std::string& pattern = t.pattern_texts[0];
    if (pattern == CL100K_PATTERN) return t.whole_words ? "llama-bpe" : "dbrx";
    if (t.whole_words) return "";
    return pattern == GPT2_PATTERN ? "gpt-2" : pattern == one_digit ? "qwen2" : "";
}

// Why a tokenizer is left out, or "" if llama.cpp makes the same tokens.
inline std::string gguf_no_tokenizer(const Tokenizer& t) {
    LLMC_TRY(not_json(t));
    // SentencePiece needs no pattern: its symbols merge across the whole text.
    bool known = t.sentencepiece || !gguf_words(t).empty();
    return known ? "" : "llama.cpp has no name for the way it cuts words";
}

// The texts of which llama.cpp makes other tokens than this tokenizer, or "" if there are none.
inline std::string gguf_other_texts(const Tokenizer& t) {
    if (t.unicode_form)
        return "that are not in the Unicode normal form which tokenizer.json asks for";
    for (const auto& [token, rule] : t.raw.rules)
        if (rule.single_word || rule.lstrip || rule.rstrip)
            return "around " + in_quotes(token_texts(t)[size_t(token)]) +
                   ", which has a rule for what stands beside it";
    return t.late_spaces ? "with several spaces together, or a space in front" : "";
}

// Scores for SentencePiece, where neighbours merge first if their piece has a higher score. A
// merge's rank is the same order with the sign reversed. Pieces that no merge makes need no score.
inline std::vector<float> gguf_scores(const Tokenizer& t, size_t V) {
    std::vector<float> scores(V, 0.0f);
    for (const Merge& m : t.merges) {
        if (m.rank == NO_RANK) continue;
        float score = -1 - float(m.rank);
        float& best = scores[m.token];
        if (best == 0 || score > best)
            best = score;
    }
    return scores;
}

// The types of tokens: 1 text, 2 unknown, 3 control, 4 found in any text, 5 unused, 6 a byte.
inline std::vector<int32_t> gguf_token_types(const Tokenizer& t,
                                             const std::vector<std::string>& texts) {
    std::vector<int32_t> types(texts.size(), 1);
    for (size_t i = 0; i < texts.size(); i++)
        if (texts[i].empty())
            types[i] = 5;
    for (const auto& [text, token] : t.raw.ids)
        types[token] = 4;

    // Special tokens are among those, but are never shown: override the type.
    for (const auto& [text, token] : t.special)
        types[token] = 3;

    // Bytes and the unknown token have types of their own.
    for (int b = 0; t.sentencepiece && b < 256; b++)
        if (t.byte_token[b] >= 0)
            types[t.byte_token[b]] = 6;
    if (t.unknown >= 0)
        types[t.unknown] = 2;
    return types;
}

// Add a token that config.json names; of a list, the first.
inline void add_gguf_id(GgufKeys* k, const std::string& key, OrderedJson id) {
    if (id.is_array() && !id.empty())
        id = OrderedJson(id[0]);
    if (id.is_number_unsigned() || (id.is_number_integer() && id.get<int64_t>() >= 0))
        gguf_add(k, "tokenizer.ggml." + key, id.get<uint32_t>());
}

// Add the vocabulary of V tokens. t is null if the tokenizer is left out.
inline void add_gguf_tokenizer(GgufKeys* k, const Tokenizer* t, const ExportTokenizer& e,
                               const Shape& s) {
    if (!t)
        return gguf_add(k, "tokenizer.ggml.model", std::string("no_vocab"));
    gguf_add(k, "tokenizer.ggml.model", std::string(t->sentencepiece ? "llama" : "gpt2"));
    if (!t->sentencepiece)
        gguf_add(k, "tokenizer.ggml.pre", gguf_words(*t));

    // Give every row of the table a text of its own; rows without a token get "[PAD<row>]".
    std::vector<std::string> texts = token_texts(*t);
    texts.resize(s.V);
    gguf_add(k, "tokenizer.ggml.token_type", gguf_token_types(*t, texts));
    if (t->sentencepiece)
        gguf_add(k, "tokenizer.ggml.scores", gguf_scores(*t, s.V));
    else
        gguf_add(k, "tokenizer.ggml.merges", merge_texts(*t, texts));
    for (size_t i = 0; i < texts.size(); i++)
        if (texts[i].empty())
            texts[i] = concat("[PAD", i, "]");
    gguf_add(k, "tokenizer.ggml.tokens", texts);

    // Add the tokens with a meaning, and what stands before a text.
    OrderedJson j = hf_config_json(s, Type::F32, e);
    add_gguf_id(k, "bos_token_id", j["bos_token_id"]);
    add_gguf_id(k, "eos_token_id", e.eos < 0 ? j["eos_token_id"] : OrderedJson(e.eos));
    if (t->unknown >= 0)
        gguf_add(k, "tokenizer.ggml.unknown_token_id", uint32_t(t->unknown));
    gguf_add(k, "tokenizer.ggml.add_bos_token", t->bos >= 0);
    if (t->sentencepiece)
        gguf_add(k, "tokenizer.ggml.add_space_prefix", t->prefix != Prefix::NONE);
    if (!e.chat_template.empty())
        gguf_add(k, "tokenizer.chat_template", e.chat_template);
}

// ----------------------------------------------------------------------------
// writing

// A tensor of the file. p is null for the divisors of rotary frequencies.
struct GgufTensor {
    const Parameter* p;
    std::string name;
    GgufType type;
    std::vector<size_t> shape; // the slowest first
};

// The file's tensors, in the model's order.
inline std::vector<GgufTensor> gguf_tensors(const Model& m, GgufType type) {
    const Shape& s = m.shape;
    std::vector<GgufTensor> tensors;
    if (scales(s.rope.scaling))
        tensors.push_back({nullptr, "rope_freqs.weight", GgufType::F32, {s.HS / 2}});
    for (const Parameter& p : m.parameters) {
        if (is_adapter(m, p)) continue; // merged into its base
        std::vector<size_t> shape = p.shape;
        shape[0] = p.file_rows;

        // Blocks of 8 bits must divide a row.
        // Keep vectors in float: rounding hurts them most, and they cost least.
        GgufType own = type;
        if (type == GgufType::Q8_0 && p.cols() % Q8_BLOCK != 0)
            own = GgufType::F16;
        if (shape.size() == 1 || p.name == "wpe.weight")
            own = GgufType::F32;
        tensors.push_back({&p, gguf_name(p.name), own, shape});
    }
    return tensors;
}

// A line if matrices get a wider type than the one that was asked for, else "".
inline std::string gguf_wider(const Model& m, GgufType type) {
    std::set<std::string> rows;
    size_t matrices = 0;
    for (const GgufTensor& t : gguf_tensors(m, type))
        if (t.type != type && t.type == GgufType::F16) {
            matrices++;
            rows.insert(std::to_string(t.shape.back()));
        }
    std::string all;
    for (const std::string& row : rows)
        all += (all.empty() ? "" : ", ") + row;
    return rows.empty() ? "" : concat("--export-dtype q8_0: ", matrices, " matrices are written as "
                                      "fp16: rows of ", all, " are no blocks of ", Q8_BLOCK);
}

// Everything before the data. *data_bytes receives the length of the data.
inline std::string gguf_header(const std::vector<GgufTensor>& tensors, const GgufKeys& keys,
                               size_t* data_bytes) {
    std::string h = "GGUF";
    gguf_put(&h, uint32_t(3));
    gguf_put(&h, uint64_t(tensors.size()));
    gguf_put(&h, keys.count);
    h += keys.bytes;

    // List the tensors. Places count from the beginning of the data; sizes begin with the fastest.
    size_t at = 0;
    for (const GgufTensor& t : tensors) {
        gguf_put(&h, t.name);
        gguf_put(&h, uint32_t(t.shape.size()));
        size_t elements = 1;
        for (size_t i = t.shape.size(); i-- > 0;) {
            gguf_put(&h, uint64_t(t.shape[i]));
            elements *= t.shape[i];
        }
        gguf_put(&h, uint32_t(t.type));
        gguf_put(&h, uint64_t(at));
        at = round_up(at + gguf_bytes(t.type, elements), GGUF_ALIGNMENT);
    }

    // The data begin at a multiple of the alignment.
    *data_bytes = at;
    h.resize(round_up(h.size(), GGUF_ALIGNMENT));
    return h;
}

// A parameter's values as the file orders them, with its adapter merged. All ranks call.
template <typename T, typename S>
std::vector<float> gguf_weight(const Trainer<T, S>& t, const GgufTensor& tensor,
                               MergeSums* merged) {
    const Shape& s = t.model.shape;
    std::vector<float> values;
    if (!tensor.p) {
        // Divide the unscaled frequency by the scaled one: llama.cpp divides its angles by this.
        for (size_t i = 0; i < s.HS / 2; i++) {
            double f = std::pow(s.rope.theta, -2.0 * double(i) / double(s.HS));
            values.push_back(float(f / rope_frequency(i, s.HS, s.rope.theta, s.rope.scaling)));
        }
        return values;
    }

    // Round rows as the file will, to measure how much of the adapters survives.
    auto round_row = [&](std::vector<float>& row) { row = gguf_rounded(row, tensor.type); };
    values = merged_weight(t, *tensor.p, round_row, merged);

    // Put the rows of q and k, and their biases, in llama.cpp's order.
    values.resize(tensor.p->file_elements()); // padding is at the end
    const std::string& name = tensor.name;
    bool q = name.find(".attn_q.") < name.size();
    bool k = name.find(".attn_k.") < name.size();
    bool turns = q || k;
    if (turns && gguf_architecture(s) == "llama")
        values = reorder_rotary(values, s.HS, values.size() / tensor.p->rows(), false);
    return values;
}

// Export a file, completely or not at all. tokenizer: null to leave it out. All ranks call: the
// first one writes, the others help to gather each parameter.
template <typename T, typename S>
std::string gguf_export(const Trainer<T, S>& t, const std::string& path, GgufType type,
                        const Tokenizer* tokenizer, const ExportTokenizer& beside,
                        const std::string& name, MergeSums* merged) {
    // Describe the model, and place the tensors. Every rank does so: the list determines what is
    // gathered, and in which order.
    bool writes = t.comms.world.rank <= 0;
    std::vector<GgufTensor> tensors = gguf_tensors(t.model, type);
    GgufKeys keys;
    add_gguf_shape(&keys, t.model.shape, type, name);
    add_gguf_tokenizer(&keys, tokenizer, beside, t.model.shape);
    size_t data_bytes = 0;
    std::string header = gguf_header(tensors, keys, &data_bytes);

    // Write one parameter at a time: the host holds one, as floats.
    FileWriter w;
    if (writes) {
        writer_create(&w, path);
        w.expected = header.size() + data_bytes;
        writer_put(w, header.data(), header.size());
    }

    // Gather each parameter, and pad it to the alignment.
    for (const GgufTensor& tensor : tensors) {
        std::vector<float> values = gguf_weight(t, tensor, merged);
        if (!writes) continue;
        std::vector<float> rounded = gguf_rounded(values, tensor.type);
        bool blocks = tensor.type == GgufType::Q8_0; // where small values beside large ones are 0
        for (size_t i = 0; i < values.size(); i++)
            count_lost(w, blocks ? 0 : values[i], rounded[i]);
        std::string bytes = gguf_values(values, tensor.type);
        bytes.resize(round_up(bytes.size(), GGUF_ALIGNMENT));
        writer_put(w, bytes.data(), bytes.size());
    }
    return writes ? writer_close(&w) : "";
}

// Write one file for llama.cpp: "" or what is wrong. The model's name in it is the last
// part of --model.
template <typename T, typename S>
std::string export_gguf(Run& run, Trainer<T, S>& t, MergeSums* merged) {
    const Config& c = run.config;
    bool known = vocab_matches(run) && gguf_no_tokenizer(run.tokenizer).empty();
    std::string name = std::filesystem::path(export_folder(c.model)).filename();
    return gguf_export(t, c.export_dir, gguf_type(c.export_dtype),
                       known ? &run.tokenizer : nullptr, run.exports.tokenizer, name, merged);
}

// Check that a file for llama.cpp can hold this model, and print where it differs from the flags.
inline void prepare_gguf(Run& run) {
    const Config& c = run.config;
    or_die(gguf_check(run.shape, c.export_dir));
    bool known = vocab_matches(run);
    std::string why = known ? gguf_no_tokenizer(run.tokenizer)
                            : "--tokenizer " + c.tokenizer + " is not the model's";
    // Read the tokenizer's files too: one of them may hold the chat template.
    if (known)
        tokenizer_files(&run.exports.tokenizer.files, run.tokenizer, run.shape.P);
    if (!why.empty() && is_first_rank(run))
        printf("--export writes no tokenizer: %s\n", why.c_str());
    std::string other = known && why.empty() ? gguf_other_texts(run.tokenizer) : "";
    if (!other.empty())
        note(run, "--export: llama.cpp makes other tokens of texts " + other);
    if (gguf_context(run.shape) < run.shape.P && is_first_rank(run))
        printf("--export: llama.cpp has no windows for this model: the file's context is the "
               "window's %zu positions, not %zu\n", gguf_context(run.shape), run.shape.P);
    note(run, gguf_wider(make_model(run.shape), gguf_type(c.export_dtype)));
}

} // namespace llmc
