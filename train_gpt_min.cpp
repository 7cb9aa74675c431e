// train_gpt_min.cpp - GPT-2 trained on one CPU core, whole, in one file: read this first
//   The model of Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
//   No options, no libraries, plain loops. It learns the bytes of its own source, then writes some.
//
//       g++ -std=c++20 -O3 -march=native train_gpt_min.cpp -o train_gpt_min && ./train_gpt_min
//
//   From top to bottom: random numbers, the model, each operator with its gradient, the block, the
//   whole model, the optimizer, the data, and main: the life of a run. Nothing here is shared with
//   the real trainer, whose tests compare it with this file.
//
//   B batch   T tokens of a sequence   C channels     NH heads   HS = C/NH channels of a head
//   L blocks  V vocabulary             N = B*T rows   IC, OC inputs and outputs of a product
//   dx is the gradient of the loss with respect to x, and has the shape of x. An operator resizes
//   and overwrites (=) its first arguments, the results. Two kinds of gradients add up (+=): those
//   of weights, and in layernorm_backward the gradient of the residual stream.

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numbers>
#include <string>
#include <vector>

namespace min_gpt {

// ---- Random numbers: functions of (seed, stream, index), so the order of calls does not matter

// Name a stream of random numbers: FNV-1a, 64 bits.
uint64_t fnv1a(const std::string& name) {
    uint64_t hash = 0xcbf29ce484222325;
    for (unsigned char byte : name) hash = (hash ^ byte) * 0x100000001b3;
    return hash;
}

// Turn a counter into four random words: Philox4x32-10, Salmon et al. SC'11.
std::array<uint32_t, 4> philox(uint64_t seed, uint64_t stream, uint64_t index) {
    uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
    std::array<uint32_t, 4> x = {uint32_t(index), uint32_t(index >> 32), uint32_t(stream),
                                 uint32_t(stream >> 32)};
    for (int round = 0; round < 10; round++) {
        const uint64_t a = uint64_t(0xD2511F53) * x[0], b = uint64_t(0xCD9E8D57) * x[2];
        x = {uint32_t(b >> 32) ^ x[1] ^ key0, uint32_t(b),
             uint32_t(a >> 32) ^ x[3] ^ key1, uint32_t(a)};
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
    return x;
}

// Draw one normal number. The Box-Muller transform turns two random words into two such numbers.
double normal(uint64_t seed, uint64_t stream, uint64_t index) {
    const std::array<uint32_t, 4> x = philox(seed, stream, index / 4);
    const size_t pair = index % 4 / 2 * 2;
    const double u = (x[pair] + 1.0) * 0x1p-32;  // in (0, 1], so that its logarithm is finite
    const double angle = 2 * std::numbers::pi * (x[pair + 1] * 0x1p-32);
    return std::sqrt(-2 * std::log(u)) * (index % 2 == 0 ? std::cos(angle) : std::sin(angle));
}

// ---- The model: a table of parameters, and what forward keeps for backward

using Tensor = std::vector<float>;  // row-major; a comment gives the shape

struct Parameter {
    std::string name;           // Hugging Face's
    std::vector<size_t> shape;  // (OC, IC) for the weight of a product
    bool decay;                 // matrices and tables decay towards 0, vectors do not
    Tensor data, grad, m, v;    // (shape) each; m and v are AdamW's moments
};

// The order of the model's parameters: two tables, L times a block's twelve, then ln_f's two.
enum { WTE, WPE, BLOCKS };
enum { LN_1_WEIGHT, LN_1_BIAS, ATTN_WEIGHT, ATTN_BIAS, ATTN_PROJ_WEIGHT, ATTN_PROJ_BIAS,
       LN_2_WEIGHT, LN_2_BIAS, FC_WEIGHT, FC_BIAS, FC_PROJ_WEIGHT, FC_PROJ_BIAS, PER_BLOCK };

struct BlockActivations {
    Tensor ln_1, ln_1_mean, ln_1_rstd;  // (B,T,C), (B,T), (B,T)
    Tensor qkv;                         // (B,T,3,NH,HS)  queries, keys, values
    Tensor probs;                       // (B,NH,T,T)     [t][s]: how much t takes from s <= t
    Tensor attention;                   // (B,T,NH,HS)
    Tensor middle;                      // (B,T,C)        the residual stream after attention
    Tensor ln_2, ln_2_mean, ln_2_rstd;  // (B,T,C), (B,T), (B,T)
    Tensor fc, gelu;                    // (B,T,4C)
    Tensor out;                         // (B,T,C)        the residual stream after the block
};

struct Activations {
    size_t T = 0;                       // tokens of a sequence in this batch
    std::vector<int> tokens, targets;   // (B,T)
    Tensor embedded;                    // (B,T,C)
    std::vector<BlockActivations> h;    // (L)
    Tensor ln_f, ln_f_mean, ln_f_rstd;  // (B,T,C), (B,T), (B,T)
    Tensor probs;                       // (B,T,V)        softmax of the logits
};

struct Model {
    int V, T, L, NH, C;  // T counts the learned positions; a batch may be shorter
    std::vector<Parameter> parameters = {};
    Activations acts = {};
};

// Make every parameter. 2L products add to the residual stream: they start smaller by sqrt(2L).
void model_init(Model& model, uint64_t seed) {
    const size_t V = model.V, T = model.T, C = model.C;
    const double std = 0.02, std_proj = 0.02 / std::sqrt(2.0 * model.L);
    model.parameters.clear();

    // Fill a matrix with normal numbers times `value`, a vector with `value`.
    auto add = [&](const std::string& name, const std::vector<size_t>& shape, double value) {
        const bool matrix = shape.size() == 2;
        const size_t n = matrix ? shape[0] * shape[1] : shape[0];
        Parameter p = {name, shape, matrix, Tensor(n), Tensor(n), Tensor(n), Tensor(n)};
        for (size_t i = 0; i < n; i++)
            p.data[i] = float(matrix ? value * normal(seed, fnv1a(name), i) : value);
        model.parameters.push_back(p);
    };

    add("wte.weight", {V, C}, std);
    add("wpe.weight", {T, C}, std);
    for (int l = 0; l < model.L; l++) {
        const std::string h = "h." + std::to_string(l) + ".";
        add(h + "ln_1.weight", {C}, 1);
        add(h + "ln_1.bias", {C}, 0);
        add(h + "attn.c_attn.weight", {3 * C, C}, std);
        add(h + "attn.c_attn.bias", {3 * C}, 0);
        add(h + "attn.c_proj.weight", {C, C}, std_proj);
        add(h + "attn.c_proj.bias", {C}, 0);
        add(h + "ln_2.weight", {C}, 1);
        add(h + "ln_2.bias", {C}, 0);
        add(h + "mlp.c_fc.weight", {4 * C, C}, std);
        add(h + "mlp.c_fc.bias", {4 * C}, 0);
        add(h + "mlp.c_proj.weight", {C, 4 * C}, std_proj);
        add(h + "mlp.c_proj.bias", {C}, 0);
    }
    add("ln_f.weight", {C}, 1);
    add("ln_f.bias", {C}, 0);
}

// ---- Two loops do nearly all the work

float dot(const float* a /*(n)*/, const float* b /*(n)*/, size_t n) {
    float sum = 0;
    for (size_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// Prefer this loop to dot(): no sum waits for another, so the compiler can use vector instructions.
void add_scaled(float* out /*(n) +=*/, float scale, const float* x /*(n)*/, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] += scale * x[i];
}

// ---- Embedding: out = wte[token] + wpe[position]
//      out (B,T,C)   tokens (B,T)   wte (V,C)   wpe (T,C)

void embedding_forward(Tensor& out, const std::vector<int>& tokens, const Parameter& wte,
                       const Parameter& wpe, size_t T) {
    const size_t C = wte.shape[1];
    out.assign(tokens.size() * C, 0);
    for (size_t n = 0; n < tokens.size(); n++) {
        add_scaled(&out[n * C], 1, &wte.data[tokens[n] * C], C);
        add_scaled(&out[n * C], 1, &wpe.data[n % T * C], C);
    }
}

void embedding_backward(Parameter& wte, Parameter& wpe, const Tensor& dout,
                        const std::vector<int>& tokens, size_t T) {
    const size_t C = wte.shape[1];
    for (size_t n = 0; n < tokens.size(); n++) {
        add_scaled(&wte.grad[tokens[n] * C], 1, &dout[n * C], C);
        add_scaled(&wpe.grad[n % T * C], 1, &dout[n * C], C);
    }
}

// ---- LayerNorm, arXiv:1607.06450: out = (x - mean) * rstd * weight + bias, for each row x of inp
//      inp, out (N,C)   mean, rstd (N)   weight, bias (C)

void layernorm_forward(Tensor& out, Tensor& mean, Tensor& rstd, const Tensor& inp,
                       const Parameter& weight, const Parameter& bias) {
    const size_t C = weight.shape[0], N = inp.size() / C;
    out.resize(N * C), mean.resize(N), rstd.resize(N);
    for (size_t n = 0; n < N; n++) {
        // Measure the row's mean, then its variance about the mean.
        const float* x = &inp[n * C];  // (C)
        double sum = 0, squares = 0;
        for (size_t c = 0; c < C; c++) sum += x[c];
        for (size_t c = 0; c < C; c++) squares += (x[c] - sum / C) * (x[c] - sum / C);
        mean[n] = float(sum / C);
        rstd[n] = float(1 / std::sqrt(squares / C + 1e-5));

        // Normalise it, then give each channel its own scale and shift.
        for (size_t c = 0; c < C; c++)
            out[n * C + c] = (x[c] - mean[n]) * rstd[n] * weight.data[c] + bias.data[c];
    }
}

void layernorm_backward(Tensor& dinp /* += */, Parameter& weight, Parameter& bias,
                        const Tensor& dout, const Tensor& inp, const Tensor& mean,
                        const Tensor& rstd) {
    const size_t C = weight.shape[0], N = inp.size() / C;
    Tensor norm(C), dnorm(C);  // (C)
    for (size_t n = 0; n < N; n++) {
        // Add to the gradients of weight and bias, and take the two means that dinp needs.
        double mean_dnorm = 0, mean_dnorm_norm = 0;
        for (size_t c = 0; c < C; c++) {
            norm[c] = (inp[n * C + c] - mean[n]) * rstd[n];
            dnorm[c] = dout[n * C + c] * weight.data[c];
            weight.grad[c] += dout[n * C + c] * norm[c];
            bias.grad[c] += dout[n * C + c];
            mean_dnorm += dnorm[c] / C;
            mean_dnorm_norm += dnorm[c] * norm[c] / C;
        }

        // Remove the parts that would shift or scale the whole row: they do not change norm.
        for (size_t c = 0; c < C; c++)
            dinp[n * C + c] += float((dnorm[c] - mean_dnorm - norm[c] * mean_dnorm_norm) * rstd[n]);
    }
}

// ---- Linear: out = inp * weight^T + bias + residual, where the last two may be null
//      inp (N,IC)   weight (OC,IC)   bias (OC)   residual, out (N,OC)

void linear_forward(Tensor& out, const Tensor& inp, const Parameter& weight, const Parameter* bias,
                    const Tensor* residual) {
    const size_t OC = weight.shape[0], IC = weight.shape[1], N = inp.size() / IC;

    // Transpose the weight, so that the weights from one input to all outputs lie in a row.
    Tensor transposed(IC * OC);  // (IC,OC)
    for (size_t o = 0; o < OC; o++)
        for (size_t i = 0; i < IC; i++) transposed[i * OC + o] = weight.data[o * IC + i];

    // Start from residual and bias, then add input after input.
    out.assign(N * OC, 0);
    for (size_t n = 0; n < N; n++) {
        float* y = &out[n * OC];  // (OC)
        if (residual) add_scaled(y, 1, &(*residual)[n * OC], OC);
        if (bias) add_scaled(y, 1, bias->data.data(), OC);
        for (size_t i = 0; i < IC; i++) add_scaled(y, inp[n * IC + i], &transposed[i * OC], OC);
    }
}

// Pass each output's gradient on to its inputs, its weights and its bias.
void linear_backward(Tensor& dinp, Parameter& weight, Parameter* bias, const Tensor& dout,
                     const Tensor& inp) {
    const size_t OC = weight.shape[0], IC = weight.shape[1], N = inp.size() / IC;
    dinp.assign(N * IC, 0);
    for (size_t n = 0; n < N; n++)
        for (size_t o = 0; o < OC; o++) {
            const float dy = dout[n * OC + o];
            add_scaled(&dinp[n * IC], dy, &weight.data[o * IC], IC);
            add_scaled(&weight.grad[o * IC], dy, &inp[n * IC], IC);
            if (bias) bias->grad[o] += dy;
        }
}

// ---- Attention, arXiv:1706.03762: out[t] = sum over s <= t of softmax(q[t].k[s] / sqrt(HS)) v[s]
//      qkv (B,T,3,NH,HS)   probs (B,NH,T,T), 0 where s > t   out (B,T,NH,HS)

void attention_forward(Tensor& out, Tensor& probs, const Tensor& qkv, size_t T, size_t NH,
                       size_t C) {
    const size_t B = qkv.size() / (T * 3 * C), HS = C / NH, next = 3 * C;  // next token in qkv
    out.assign(B * T * C, 0), probs.assign(B * NH * T * T, 0);
    for (size_t row = 0; row < B * NH * T; row++) {
        const size_t b = row / T / NH, h = row / T % NH, t = row % T;
        const float* q = &qkv[(b * T + t) * next + h * HS];  // (HS)
        const float* k = &qkv[b * T * next + C + h * HS];    // (T,HS), rows `next` apart
        const float* v = k + C;                              // (T,HS), rows `next` apart
        float* p = &probs[row * T];                          // (T)

        // Score the keys up to this token.
        for (size_t s = 0; s <= t; s++) p[s] = dot(q, k + s * next, HS) / std::sqrt(float(HS));

        // Turn scores into probabilities; with the highest subtracted, no exponential overflows.
        const float highest = *std::max_element(p, p + t + 1);
        float sum = 0;
        for (size_t s = 0; s <= t; s++) sum += p[s] = std::exp(p[s] - highest);
        for (size_t s = 0; s <= t; s++) p[s] /= sum;

        // Mix the values.
        float* y = &out[(b * T + t) * C + h * HS];  // (HS)
        for (size_t s = 0; s <= t; s++) add_scaled(y, p[s], v + s * next, HS);
    }
}

void attention_backward(Tensor& dqkv, const Tensor& dout, const Tensor& qkv, const Tensor& probs,
                        size_t T, size_t NH, size_t C) {
    const size_t B = qkv.size() / (T * 3 * C), HS = C / NH, next = 3 * C;
    Tensor dp(T);  // (T)
    dqkv.assign(qkv.size(), 0);
    for (size_t row = 0; row < B * NH * T; row++) {
        const size_t b = row / T / NH, h = row / T % NH, t = row % T;
        const size_t q = (b * T + t) * next + h * HS;           // where q, k and v stand in qkv,
        const size_t k = b * T * next + C + h * HS, v = k + C;  // and their gradients in dqkv
        const float* dy = &dout[(b * T + t) * C + h * HS];      // (HS)
        const float* p = &probs[row * T];                       // (T)

        // Send the gradient to the values and to the probabilities.
        for (size_t s = 0; s <= t; s++) add_scaled(&dqkv[v + s * next], p[s], dy, HS);
        for (size_t s = 0; s <= t; s++) dp[s] = dot(dy, &qkv[v + s * next], HS);

        // Go back through the softmax to the scores, and on to the query and its keys.
        const float mean = dot(p, dp.data(), t + 1);
        for (size_t s = 0; s <= t; s++) {
            const float dscore = p[s] * (dp[s] - mean) / std::sqrt(float(HS));
            add_scaled(&dqkv[q], dscore, &qkv[k + s * next], HS);
            add_scaled(&dqkv[k + s * next], dscore, &qkv[q], HS);
        }
    }
}

// ---- GELU, arXiv:1606.08415, tanh form: out = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))
//      inp, out (B,T,4C)

constexpr float GELU_SCALE = 0.7978845608028654f, GELU_CUBIC = 0.044715f;

void gelu_forward(Tensor& out, const Tensor& inp) {
    out.resize(inp.size());
    for (size_t i = 0; i < inp.size(); i++) {
        const float x = inp[i], tanh = std::tanh(GELU_SCALE * (x + GELU_CUBIC * x * x * x));
        out[i] = 0.5f * x * (1 + tanh);
    }
}

void gelu_backward(Tensor& dinp, const Tensor& dout, const Tensor& inp) {
    dinp.resize(inp.size());
    for (size_t i = 0; i < inp.size(); i++) {
        const float x = inp[i], tanh = std::tanh(GELU_SCALE * (x + GELU_CUBIC * x * x * x));
        const float dtanh = (1 - tanh * tanh) * GELU_SCALE * (1 + 3 * GELU_CUBIC * x * x);
        dinp[i] = dout[i] * 0.5f * (1 + tanh + x * dtanh);
    }
}

// ---- Softmax and cross-entropy: loss = mean over rows of -log softmax(logits)[target]
//      probs, which holds the logits at first, dlogits (N,V)   targets (N), or empty: the loss is 0

double crossentropy_forward(Tensor& probs, const std::vector<int>& targets, size_t V) {
    const size_t N = probs.size() / V;
    double loss = 0;
    for (size_t n = 0; n < N; n++) {
        float* p = &probs[n * V];  // (V)
        const float highest = *std::max_element(p, p + V);
        const float target_logit = targets.empty() ? 0 : p[targets[n]];
        float sum = 0;
        for (size_t i = 0; i < V; i++) sum += p[i] = std::exp(p[i] - highest);
        for (size_t i = 0; i < V; i++) p[i] /= sum;
        if (!targets.empty()) loss += (std::log(sum) + highest - target_logit) / N;
    }
    return loss;
}

void crossentropy_backward(Tensor& dlogits, const Tensor& probs, const std::vector<int>& targets,
                           size_t V) {
    const size_t N = targets.size();
    dlogits.resize(N * V);
    for (size_t i = 0; i < N * V; i++) dlogits[i] = probs[i] / N;
    for (size_t n = 0; n < N; n++) dlogits[n * V + targets[n]] -= 1.0f / N;
}

// ---- The block: two branches that read the residual stream and add to it

// Find the input of block l, and its parameters. l = L means ln_f, which follows the last block.
const Tensor& block_input(const Model& model, int l) {  // (B,T,C)
    return l == 0 ? model.acts.embedded : model.acts.h[l - 1].out;
}
Parameter* block_parameters(Model& model, int l) {  // (PER_BLOCK)
    return &model.parameters[BLOCKS + l * PER_BLOCK];
}

void block_forward(Model& model, int l) {
    const Tensor& inp = block_input(model, l);        // (B,T,C)
    const Parameter* p = block_parameters(model, l);  // (PER_BLOCK)
    BlockActivations& a = model.acts.h[l];

    // Let each token look at itself and the tokens before it.
    layernorm_forward(a.ln_1, a.ln_1_mean, a.ln_1_rstd, inp, p[LN_1_WEIGHT], p[LN_1_BIAS]);
    linear_forward(a.qkv, a.ln_1, p[ATTN_WEIGHT], &p[ATTN_BIAS], nullptr);
    attention_forward(a.attention, a.probs, a.qkv, model.acts.T, model.NH, model.C);
    linear_forward(a.middle, a.attention, p[ATTN_PROJ_WEIGHT], &p[ATTN_PROJ_BIAS], &inp);

    // Let each token work on what it saw.
    layernorm_forward(a.ln_2, a.ln_2_mean, a.ln_2_rstd, a.middle, p[LN_2_WEIGHT], p[LN_2_BIAS]);
    linear_forward(a.fc, a.ln_2, p[FC_WEIGHT], &p[FC_BIAS], nullptr);
    gelu_forward(a.gelu, a.fc);
    linear_forward(a.out, a.gelu, p[FC_PROJ_WEIGHT], &p[FC_PROJ_BIAS], &a.middle);
}

// Carry d, the residual stream's gradient, from the block's output back to its input.
void block_backward(Tensor& d /*(B,T,C)*/, Model& model, int l) {
    const Tensor& inp = block_input(model, l);  // (B,T,C)
    Parameter* p = block_parameters(model, l);  // (PER_BLOCK)
    const BlockActivations& a = model.acts.h[l];
    Tensor dgelu, dfc, dln_2, dattention, dqkv, dln_1;  // shaped like what they are gradients of

    // Walk back through the second branch.
    linear_backward(dgelu, p[FC_PROJ_WEIGHT], &p[FC_PROJ_BIAS], d, a.gelu);
    gelu_backward(dfc, dgelu, a.fc);
    linear_backward(dln_2, p[FC_WEIGHT], &p[FC_BIAS], dfc, a.ln_2);
    layernorm_backward(d, p[LN_2_WEIGHT], p[LN_2_BIAS], dln_2, a.middle, a.ln_2_mean, a.ln_2_rstd);

    // Walk back through the first.
    linear_backward(dattention, p[ATTN_PROJ_WEIGHT], &p[ATTN_PROJ_BIAS], d, a.attention);
    attention_backward(dqkv, dattention, a.qkv, a.probs, model.acts.T, model.NH, model.C);
    linear_backward(dln_1, p[ATTN_WEIGHT], &p[ATTN_BIAS], dqkv, a.ln_1);
    layernorm_backward(d, p[LN_1_WEIGHT], p[LN_1_BIAS], dln_1, inp, a.ln_1_mean, a.ln_1_rstd);
}

// ---- The whole model

// Predict the token after each; return the mean loss, or 0 where targets is null.
float model_forward(Model& model, const int* tokens /*(B,T)*/, const int* targets /*(B,T) or null*/,
                    size_t B, size_t T) {
    Activations& a = model.acts;
    a.T = T;
    a.tokens.assign(tokens, tokens + B * T);
    a.targets.assign(targets, targets ? targets + B * T : targets);
    a.h.resize(model.L);

    // Embed the tokens, run the blocks, and compare the result with each token of the vocabulary.
    const Parameter &wte = model.parameters[WTE], &wpe = model.parameters[WPE];
    const Parameter* ln_f = block_parameters(model, model.L);  // weight, bias
    const Tensor& last = block_input(model, model.L);          // (B,T,C)
    embedding_forward(a.embedded, a.tokens, wte, wpe, T);
    for (int l = 0; l < model.L; l++) block_forward(model, l);
    layernorm_forward(a.ln_f, a.ln_f_mean, a.ln_f_rstd, last, ln_f[0], ln_f[1]);
    linear_forward(a.probs, a.ln_f, wte, nullptr, nullptr);
    return float(crossentropy_forward(a.probs, a.targets, model.V));
}

// Compute every gradient from 0, for the batch that model_forward saw last.
void model_backward(Model& model) {
    for (Parameter& p : model.parameters) p.grad.assign(p.grad.size(), 0);

    // Go back through model_forward. The token table gets gradients as head and as embedding.
    const Activations& a = model.acts;
    Parameter &wte = model.parameters[WTE], &wpe = model.parameters[WPE];
    Parameter* ln_f = block_parameters(model, model.L);  // weight, bias
    const Tensor& last = block_input(model, model.L);    // (B,T,C)
    Tensor dlogits, dln_f, dresidual(a.ln_f.size());     // (B,T,V), (B,T,C), (B,T,C)
    crossentropy_backward(dlogits, a.probs, a.targets, model.V);
    linear_backward(dln_f, wte, nullptr, dlogits, a.ln_f);
    layernorm_backward(dresidual, ln_f[0], ln_f[1], dln_f, last, a.ln_f_mean, a.ln_f_rstd);
    for (int l = model.L - 1; l >= 0; l--) block_backward(dresidual, model, l);
    embedding_backward(wte, wpe, dresidual, a.tokens, a.T);
}

// ---- The optimizer

// Shorten the gradient of all parameters together to length `clip`; return its length before.
double clip_gradients(Model& model, double clip) {
    double squares = 0;
    for (const Parameter& p : model.parameters)
        for (float g : p.grad) squares += double(g) * g;
    const float scale = float(std::min(1.0, clip / std::sqrt(squares)));
    for (Parameter& p : model.parameters)
        for (float& g : p.grad) g *= scale;
    return std::sqrt(squares);
}

// Warm up over the first 10 steps: AdamW's moments are rough estimates at first.
float learning_rate(int step) { return 1e-3f * std::min(step + 1, 10) / 10; }

// Update every parameter: AdamW, arXiv:1711.05101. Steps count from 0.
void adamw_step(Model& model, int step, float lr) {
    const float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f;
    const float correction1 = float(1 - std::pow(0.9, step + 1));   // the moments start at 0, so
    const float correction2 = float(1 - std::pow(0.95, step + 1));  // they are too small at first
    for (Parameter& p : model.parameters) {
        const float decay = p.decay ? 0.1f : 0.0f;
        for (size_t i = 0; i < p.data.size(); i++) {
            p.m[i] = beta1 * p.m[i] + (1 - beta1) * p.grad[i];
            p.v[i] = beta2 * p.v[i] + (1 - beta2) * p.grad[i] * p.grad[i];
            const float mhat = p.m[i] / correction1, vhat = p.v[i] / correction2;
            p.data[i] -= lr * (mhat / (std::sqrt(vhat) + eps) + decay * p.data[i]);
        }
    }
}

// ---- The data: a text's bytes are its tokens, cut in windows; window i is bytes [i*T, i*T + T]

// Shuffle without a list: permute [0, 4^h) by four rounds of a Feistel network, keyed by the epoch,
// and follow the permutation until it falls on one of the `count` windows.
size_t shuffled_window(uint64_t sample, uint64_t count, uint64_t seed) {
    const uint64_t stream = fnv1a("windows." + std::to_string(sample / count));
    int h = 0;
    while (uint64_t(1) << 2 * h < count) h++;
    const uint64_t mask = (uint64_t(1) << h) - 1;
    uint64_t x = sample % count;
    do {
        uint64_t left = x >> h, right = x & mask;
        for (uint64_t round = 0; round < 4; round++) {
            left ^= philox(seed, stream, right + (round << 32))[0] & mask;
            std::swap(left, right);
        }
        x = left << h | right;
    } while (x >= count);
    return x;
}

// Fill the batch of a step: samples step*B ... step*B + B-1. The text has at least T+1 bytes.
void load_batch(int* tokens /*(B,T)*/, int* targets /*(B,T)*/, const std::string& text, size_t step,
                size_t B, size_t T, uint64_t seed) {
    const size_t count = (text.size() - 1) / T;
    for (size_t b = 0; b < B; b++) {
        const size_t start = shuffled_window(step * B + b, count, seed) * T;
        for (size_t t = 0; t < T; t++) {
            tokens[b * T + t] = (unsigned char)text[start + t];
            targets[b * T + t] = (unsigned char)text[start + t + 1];
        }
    }
}

// Find this very file: where the compiler saw it, or beside the program.
std::string read_own_source(const std::filesystem::path& program) {
    const std::filesystem::path source = __FILE__;
    for (const auto& path : {source, program.parent_path() / source.filename()}) {
        std::ifstream file(path, std::ios::binary);
        if (file) return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    }
    std::fprintf(stderr, "train_gpt_min: cannot read %s, the text to train on; "
                 "copy it beside the program or run where it was compiled\n", __FILE__);
    std::exit(1);
}

// Write text: predict the next byte from the last T, draw it, append it, and repeat.
void print_sample(Model& model, int count, uint64_t seed) {
    std::vector<int> text = {'\n'};
    for (int i = 0; i < count; i++) {
        const size_t T = std::min(text.size(), size_t(model.T));
        model_forward(model, text.data() + text.size() - T, nullptr, 1, T);
        const float* p = &model.acts.probs[(T - 1) * model.V];  // (V)

        // Walk along the probabilities until a random share of them is spent.
        double share = philox(seed, fnv1a("sample"), i)[0] * 0x1p-32;
        int next = 0;
        while (next + 1 < model.V && (share -= p[next]) >= 0) next++;
        text.push_back(next);
        std::putchar(std::isprint(next) || next == '\n' ? next : '?');
    }
    std::putchar('\n');
}

}  // namespace min_gpt

int main(int, char** argv) {
    using namespace min_gpt;
    const int B = 8, T = 64, steps = 300;
    const uint64_t seed = 1337;

    // Read the text, and keep its last tenth to test on.
    const std::string text = read_own_source(argv[0]);
    const std::string train = text.substr(0, text.size() * 9 / 10);
    const std::string val = text.substr(train.size());

    // Make the model.
    Model model = {.V = 256, .T = T, .L = 2, .NH = 4, .C = 64};
    model_init(model, seed);

    // Train it.
    std::vector<int> tokens(B * T), targets(B * T);  // (B,T)
    for (int step = 0; step < steps; step++) {
        const auto start = std::chrono::steady_clock::now();
        load_batch(tokens.data(), targets.data(), train, step, B, T, seed);
        const float loss = model_forward(model, tokens.data(), targets.data(), B, T);
        model_backward(model);
        const double norm = clip_gradients(model, 1.0);
        adamw_step(model, step, learning_rate(step));

        const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
        if (step == 0 || (step + 1) % 10 == 0)
            std::printf("step %4d/%d | loss %.4f | norm %.2f | lr %.1e | %.1f ms\n", step + 1,
                        steps, loss, norm, learning_rate(step), 1000 * time.count());
        std::fflush(stdout);
    }

    // Test it on text it has not seen, and let it write.
    load_batch(tokens.data(), targets.data(), val, 0, B, T, seed);
    std::printf("val loss %.4f\n\n", model_forward(model, tokens.data(), targets.data(), B, T));
    print_sample(model, 200, seed);
    return 0;
}
