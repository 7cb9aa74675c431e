// presets.h - the models that --model names: shapes as their papers and config.json state them
#pragma once
#include "model.h"

namespace llmc {

// Llama 3.1 stretches RoPE from 8192 positions to 131072.
inline Shape llama31_shape(size_t L, size_t NH, size_t C, size_t F) {
    Shape s = llama_shape(L, NH, 8, C, F, 128256, 131072, 500000);
    s.rope_scaling = {8, 1, 4, 8192};
    return s;
}

inline Shape qwen2_shape(size_t L, size_t NH, size_t NKV, size_t C, size_t F) {
    Shape s = llama_shape(L, NH, NKV, C, F, 151936, 32768, 1000000);
    s.hf_type = "qwen2", s.qkv_bias = true, s.tied = true, s.norm_eps = 1e-6f;
    return s;
}

// Qwen3's heads are wider than C / NH.
inline Shape qwen3_shape(size_t L, size_t NH, size_t NKV, size_t C, size_t F) {
    Shape s = llama_shape(L, NH, NKV, C, F, 151936, 40960, 1000000);
    s.hf_type = "qwen3", s.qk_norm = true, s.tied = true, s.HS = 128, s.norm_eps = 1e-6f;
    return s;
}

// A name that --model takes, and what --help says of it.
struct Preset {
    const char* name;
    Shape shape;
    const char* help;
};

inline std::vector<Preset> model_presets() {
    return {
        {"tiny", gpt2_shape(4, 4, 128, 256, 1024), "GPT-2 of 0.9M parameters over bytes"},
        {"tiny-llama", llama_shape(4, 4, 2, 128, 352, 256, 1024, 10000),
         "Llama of 0.8M parameters over bytes"},
        {"gpt2", gpt2_shape(12, 12, 768), "124M"},
        {"gpt2-medium", gpt2_shape(24, 16, 1024), "350M"},
        {"gpt2-large", gpt2_shape(36, 20, 1280), "774M"},
        {"gpt2-xl", gpt2_shape(48, 25, 1600), "1558M"},
        {"tinyllama-1.1b", llama_shape(22, 32, 4, 2048, 5632, 32000, 2048, 10000),
         "TinyLlama 1.1B"},
        {"llama2-7b", llama_shape(32, 32, 32, 4096, 11008, 32000, 4096, 10000), "Llama 2 7B"},
        {"llama3-8b", llama_shape(32, 32, 8, 4096, 14336, 128256, 8192, 500000), "Llama 3 8B"},
        {"llama3-70b", llama_shape(80, 64, 8, 8192, 28672, 128256, 8192, 500000), "Llama 3 70B"},
        {"llama3-405b", llama31_shape(126, 128, 16384, 53248), "Llama 3.1 405B"},
        {"qwen2.5-0.5b", qwen2_shape(24, 14, 2, 896, 4864), "Qwen2.5 0.5B"},
        {"qwen3-0.6b", qwen3_shape(28, 16, 8, 1024, 3072), "Qwen3 0.6B"},
    };
}

} // namespace llmc
