// layernorm_forward.cu - a ladder: LayerNorm, from one thread a row to ours - arXiv:1607.06450
//   out = (x - mean(x)) * rstd * weight + bias,   rstd = 1 / sqrt(var(x) + eps)      per row of C
//   inp, out (N,C) bf16   weight, bias (C) bf16   mean, rstd (N) float
//   Any kernel must move inp once, out once, 4 N C bytes; 8 FLOPs an element are nothing beside
//   that. So the rate counts those bytes, and the ceiling is a copy's, 4.8 TB/s on paper.
//
//   rung                                 at most  H200, GB/s of 4 N C bytes, N = 65536, C = 768
//     1  one thread a row                      5%
//     2  one warp a row                       80%
//     3  16-byte loads                       100%
//     4  the row stays in registers          100%
//     5  llmc/ops/layernorm.cuh              100%
//
//   make ladders, or by hand
//     g++ -std=c++20 -O1 -DEMULATE -x c++ dev/cuda/layernorm_forward.cu -lpthread     checks
//     nvcc -std=c++20 -O3 -arch=sm_90a dev/cuda/layernorm_forward.cu -lcublasLt       measures too
#include "../../llmc/ops/layernorm.cuh"
#include "ladder.h"

using namespace llmc;

typedef bf16 T;

struct Layernorm {
    T* out;                       // (N,C)
    float *mean, *rstd;           // (N)
    const T *inp, *weight, *bias; // (N,C) (C) (C)
    size_t N, C;
    float eps;
};

// ----------------------------------------------------------------------------
// 1. One thread a row: the CPU's loop as it stands.
//   The 32 lanes of a warp read 32 rows: a load of 64 useful bytes touches 32 sectors of 32 bytes.
//   The row is read three times, and an SM's 2048 rows of 1.5 KB are more than its caches hold: 3
//   readings and a writing, 8 N C bytes from L2 or beyond it, in 4 N C sectors, one a clock and SM.
//   And only N threads, each with 2 bytes on the way: far from the 20 KB an SM needs on the way to
//   hide the memory's latency.

__global__ void thread_a_row_kernel(Layernorm a) {
    size_t n = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (n >= a.N) return;
    const T* x = a.inp + n * a.C; // (C)

    // Sums of x*x and of x would save a reading, and cancel where the mean is large.
    float sum = 0, square = 0;
    for (size_t c = 0; c < a.C; c++) sum += to_float(x[c]);
    float m = sum / float(a.C);
    for (size_t c = 0; c < a.C; c++) square += (to_float(x[c]) - m) * (to_float(x[c]) - m);
    float r = 1 / sqrtf(square / float(a.C) + a.eps);

    for (size_t c = 0; c < a.C; c++)
        a.out[n * a.C + c] =
            from_acc<T>((to_float(x[c]) - m) * r * to_float(a.weight[c]) + to_float(a.bias[c]));
    a.mean[n] = m;
    a.rstd[n] = r;
}

static void thread_a_row(const Layernorm& a, cudaStream_t stream) {
    launch(thread_a_row_kernel, unsigned(ceil_div(a.N, 128)), 128, stream, a);
}

// ----------------------------------------------------------------------------
// 2. One warp a row: lane l has the columns l, l + 32, ..; sums meet by shuffles.
//   A load is 64 contiguous bytes, two sectors for 32. An SM's 64 rows are 96 KB and stay in L1
//   between the readings: memory sees 4 N C bytes, half of rung 1. There are 32 times the threads,
//   with 4 KB an SM on the way for each load that the compiler moves ahead: 16 KB with four.

constexpr int WARPS = 4; // of a block, in this rung and the next two

__global__ void warp_a_row_kernel(Layernorm a) {
    size_t n = size_t(blockIdx.x) * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (n >= a.N) return; // whole warps: no shuffle misses a lane
    const T* x = a.inp + n * a.C; // (C)
    float sum = 0, square = 0;
    for (size_t c = lane; c < a.C; c += 32) sum += to_float(x[c]);
    float m = warp_sum(sum) / float(a.C);
    for (size_t c = lane; c < a.C; c += 32) square += (to_float(x[c]) - m) * (to_float(x[c]) - m);
    float r = 1 / sqrtf(warp_sum(square) / float(a.C) + a.eps);
    for (size_t c = lane; c < a.C; c += 32)
        a.out[n * a.C + c] =
            from_acc<T>((to_float(x[c]) - m) * r * to_float(a.weight[c]) + to_float(a.bias[c]));
    if (lane > 0) return;
    a.mean[n] = m;
    a.rstd[n] = r;
}

static void warp_a_row(const Layernorm& a, cudaStream_t stream) {
    launch(warp_a_row_kernel, unsigned(ceil_div(a.N, WARPS)), WARPS * 32, stream, a);
}

// ----------------------------------------------------------------------------
// 3. 16-byte loads: a lane reads 8 neighbours at once.
//   The bytes are the same, the loads and stores an eighth, and each puts 512 bytes a warp on the
//   way: 32 KB an SM, where rung 2 had 4 KB times what the compiler unrolls. Rows must be 16-byte
//   aligned: C is a multiple of 8.

constexpr int P = VECTOR<T>; // elements of 16 bytes

__global__ void vector_loads_kernel(Layernorm a) {
    size_t n = size_t(blockIdx.x) * WARPS + threadIdx.x / 32, first = threadIdx.x % 32 * P;
    if (n >= a.N) return;
    const T* x = a.inp + n * a.C; // (C)

    // Mean, then the variance around it.
    float sum = 0, square = 0;
    for (size_t c = first; c < a.C; c += 32 * P) {
        Pack<T, P> p = load<P>(x + c);
        for (int i = 0; i < P; i++) sum += to_float(p.v[i]);
    }
    float m = warp_sum(sum) / float(a.C);
    for (size_t c = first; c < a.C; c += 32 * P) {
        Pack<T, P> p = load<P>(x + c);
        for (int i = 0; i < P; i++) square += (to_float(p.v[i]) - m) * (to_float(p.v[i]) - m);
    }
    float r = 1 / sqrtf(warp_sum(square) / float(a.C) + a.eps);

    // Normalise, scale, shift.
    for (size_t c = first; c < a.C; c += 32 * P) {
        Pack<T, P> p = load<P>(x + c), w = load<P>(a.weight + c), b = load<P>(a.bias + c), o;
        for (int i = 0; i < P; i++)
            o.v[i] = from_acc<T>((to_float(p.v[i]) - m) * r * to_float(w.v[i]) + to_float(b.v[i]));
        store(a.out + n * a.C + c, o);
    }
    if (first > 0) return;
    a.mean[n] = m;
    a.rstd[n] = r;
}

static void vector_loads(const Layernorm& a, cudaStream_t stream) {
    LLMC_CHECK(a.C % P == 0, "this rung wants rows of 16-byte packs, C is %zu", a.C);
    launch(vector_loads_kernel, unsigned(ceil_div(a.N, WARPS)), WARPS * 32, stream, a);
}

// ----------------------------------------------------------------------------
// 4. The row stays in registers: one reading, all of its loads under way before the first sum.
//   Memory sees the same bytes as before; L1 sees a third, and a row's latency is waited for once,
//   not once a pass. The price is a bound known to the compiler, C <= 1024: 16 registers a lane.

constexpr int PACKS = 4; // that a lane holds

__global__ void row_in_registers_kernel(Layernorm a) {
    size_t n = size_t(blockIdx.x) * WARPS + threadIdx.x / 32, first = threadIdx.x % 32 * P;
    if (n >= a.N) return;

    // Load the row; beyond C zeros, which add nothing to the first sum.
    Pack<T, P> row[PACKS] = {};
    #pragma unroll
    for (int k = 0; k < PACKS; k++)
        if (first + k * 32 * P < a.C) row[k] = load<P>(a.inp + n * a.C + first + k * 32 * P);

    // Mean, then the variance around it.
    float sum = 0, square = 0;
    #pragma unroll
    for (int k = 0; k < PACKS; k++)
        for (int i = 0; i < P; i++) sum += to_float(row[k].v[i]);
    float m = warp_sum(sum) / float(a.C);
    #pragma unroll
    for (int k = 0; k < PACKS; k++)
        for (int i = 0; i < P; i++) {
            float x = first + k * 32 * P < a.C ? to_float(row[k].v[i]) - m : 0;
            square += x * x;
        }
    float r = 1 / sqrtf(warp_sum(square) / float(a.C) + a.eps);

    // Normalise, scale, shift.
    #pragma unroll
    for (int k = 0; k < PACKS; k++) {
        size_t c = first + k * 32 * P;
        if (c >= a.C) break;
        Pack<T, P> w = load<P>(a.weight + c), b = load<P>(a.bias + c), o;
        for (int i = 0; i < P; i++)
            o.v[i] =
                from_acc<T>((to_float(row[k].v[i]) - m) * r * to_float(w.v[i]) + to_float(b.v[i]));
        store(a.out + n * a.C + c, o);
    }
    if (first > 0) return;
    a.mean[n] = m;
    a.rstd[n] = r;
}

static void row_in_registers(const Layernorm& a, cudaStream_t stream) {
    LLMC_CHECK(a.C % P == 0 && a.C <= PACKS * 32 * P, "this rung has no registers for C = %zu",
               a.C);
    launch(row_in_registers_kernel, unsigned(ceil_div(a.N, WARPS)), WARPS * 32, stream, a);
}

// ----------------------------------------------------------------------------
// 5. The project's own: rung 3 with as many warps a row as keep 64 bytes a lane, 1, 4 or 16.
//   Any C and alignment, and no bound: L1 holds what rung 4 held in registers. Where memory is the
//   limit both should reach it; rung 4 shows what the second and third readings from L1 cost.

static void library(const Layernorm& a, cudaStream_t stream) {
    layernorm_forward(a.out, a.mean, a.rstd, a.inp, a.weight, a.bias, a.N, a.C, a.eps, stream);
}

// ----------------------------------------------------------------------------
// the ladder

typedef void (*Run)(const Layernorm&, cudaStream_t);

static const Rung<Run> ladder[] = {{"one thread a row", thread_a_row},
                                   {"one warp a row", warp_a_row},
                                   {"16-byte loads", vector_loads},
                                   {"the row stays in registers", row_in_registers},
                                   {"llmc/ops/layernorm.cuh", library}};

static void check(Check& c, Run run, size_t N, size_t C) {
    const float eps = 1e-5f;
    auto x = rounded<T>(normals(c, N * C));
    auto w = rounded<T>(normals(c, C)), b = rounded<T>(normals(c, C));

    // Want: the CPU in double.
    std::vector<double> want(N * C), want_mean(N), want_rstd(N);
    layernorm_forward(want.data(), want_mean.data(), want_rstd.data(), x.data(), w.data(), b.data(),
                      N, C, eps, Cpu{});

    every_order(c, [&](Outputs& o) {
        Array<T> out(N * C), inp(x), weight(w), bias(b);
        Array<float> mean(N), rstd(N);
        run({out.data, mean.data, rstd.data, inp.data, weight.data, bias.data, N, C, eps}, nullptr);
        o.add("out", out, want, tolerance<T>(C));
        o.add("mean", mean, want_mean, tolerance<float>(C), 1);
        o.add("rstd", rstd, want_rstd, tolerance<float>(C));
    });
}

static double seconds(Run run, size_t N, size_t C) {
    Array<T> out(N * C), inp(N * C), weight(C), bias(C);
    Array<float> mean(N), rstd(N);
    for (Array<T>* x : {&inp, &weight, &bias}) fill_random(*x);
    Layernorm a = {out.data, mean.data, rstd.data, inp.data, weight.data, bias.data, N, C, 1e-5f};
    return gpu_seconds([&] { run(a, nullptr); }, 20, nullptr);
}

int main() {
    const size_t N = 65536, C = 768;
    auto check_shapes = [](Check& c, Run run) { // rows end within blocks, and within warps
        for (auto [N, C] : {std::pair(3, 8), {37, 96}, {131, 264}, {5, 768}})
            check(c, run, size_t(N), size_t(C));
    };
    Work work = {4.0 * N * C, 1e9, "GB/s"};
    return climb(1, ladder, check_shapes, work, [&](Run run) { return seconds(run, N, C); }) > 0;
}
