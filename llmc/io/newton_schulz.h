// newton_schulz.h - Muon's published polynomials and scales - arXiv:2505.16932, arXiv:2512.04632
#pragma once
#include "../ops/muon.cuh"

namespace llmc {

// Entries as large as AdamW's, whose rate then serves; and Scion's, arXiv:2502.07529.
inline double rms_scale(double r, double c) {
    return 0.2 * std::sqrt(std::max(r, c));
}
inline double unit_scale(double r, double c) {
    return std::sqrt(r / c);
}

inline const std::vector<NewtonSchulz>& newton_schulz_tables() {
    static const std::vector<NewtonSchulz> tables = {
        SIMPLE,
        // Megatron-LM.
        {"quintic",
         {{4.0848, -6.8946, 2.9270},
          {3.9505, -6.3029, 2.6377},
          {3.7418, -5.5913, 2.3037},
          {2.8769, -3.1427, 1.2046},
          {2.8366, -3.0525, 1.2012}}},
        // Polar Express, arXiv:2505.16932.
        {"polar",
         {{8.156554524902461, -22.48329292557795, 15.878769915207462},
          {4.042929935166739, -2.808917465908714, 0.5000178451051316},
          {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
          {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
          {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}},
         1.02},
        // NVIDIA's Emerging-Optimizers. "aol", arXiv:2512.04632, takes 4 iterations: a singular
        // value above 0.88 of the norm, which is almost of rank 1, changes its sign.
        {"polar8",
         {{8.2051, -22.9019, 16.4607},
          {4.0664, -2.8612, 0.5184},
          {3.9096, -2.8234, 0.5250},
          {3.2856, -2.4153, 0.4853},
          {2.2779, -1.6198, 0.3985},
          {1.8726, -1.2307, 0.3585},
          {1.8564, -1.2132, 0.3568},
          {1.8750, -1.2500, 0.3750}}},
        {"aol",
         {{4.0098, -7.0585, 2.4635},
          {3.4585, -5.5479, 2.5959},
          {2.7573, -3.2939, 1.4254},
          {2.7215, -3.0494, 1.3169}}},
        // modded-nanogpt's third track: exact, at twelve iterations.
        {"convergent", std::vector(12, std::array{2.0, -1.5, 0.5})},
    };
    return tables;
}

} // namespace llmc
