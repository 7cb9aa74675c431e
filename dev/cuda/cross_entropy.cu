// cross_entropy.cu - a ladder: a language model's loss and its gradient - arXiv:1805.02867
//   loss = log(sum_v exp(l_v)) - l_target,   dl_v = (exp(l_v) / sum - [v = target]) / N
//   logits (N,Vp) bf16, columns from V on are padding; dl is written over them, 0 in the padding
//   targets (N)   losses (N) float
//   Any kernel must read 2 N V bytes and write 2 N V, so the rate counts those, and the ceiling is
//   a copy's, 4.8 TB/s on paper. A row's sum must be known before its first gradient, and a row,
//   100 KB at 50,257 tokens, is more than registers hold: it is read twice, and the shares tell
//   from where.
//
//   rung                                      at most  H200, GB/s of 4 N V bytes,
//                                                      N = 8192, V = 50257
//     1  maximum, sum, gradient                   50%
//     2  an online softmax                        67%
//     3  one launch                         67 to 100%
//     4  16-byte loads                      67 to 100%
//     5  llmc/ops/crossentropy.cuh               100%
//
//   make ladders, or by hand
//     g++ -std=c++20 -O1 -DEMULATE -x c++ dev/cuda/cross_entropy.cu -lpthread     checks
//     nvcc -std=c++20 -O3 -arch=sm_90a dev/cuda/cross_entropy.cu -lcublasLt       measures too
#include "../../llmc/ops/crossentropy.cuh"
#include "ladder.h"

using namespace llmc;

typedef bf16 T;

struct Head {
    float* losses;      // (N)
    T* logits;          // (N,Vp)
    const int* targets; // (N)
    MaxSum* sums;       // (N) of rungs 1 and 2: each row's maximum, and its sum of exp(l - maximum)
    size_t N, V, Vp;
};

constexpr unsigned THREADS = CROSSENTROPY_THREADS; // of a block, which has a row

template <typename Kernel> void launch_rows(Kernel kernel, const Head& a, cudaStream_t stream) {
    launch(kernel, unsigned(a.N), THREADS, stream, a);
}

// ----------------------------------------------------------------------------
// 1. Maximum, sum, gradient: three kernels, as the formula reads. A block has a row; its threads
//   read neighbours.
//   Without the maximum exp would overflow. Three readings and a writing are 8 N V bytes, twice the
//   least. A thread has 2 bytes on the way, an SM's 2048 threads 4 KB for each load that the
//   compiler moves ahead: to hide the latency of memory an SM needs some 20 KB.

__global__ void max_kernel(Head a) {
    const T* row = a.logits + blockIdx.x * a.Vp; // (V)
    float max = -INFINITY;
    for (size_t v = threadIdx.x; v < a.V; v += THREADS) max = fmaxf(max, to_float(row[v]));
    MaxSum all = block_join({max, 0});
    if (threadIdx.x == 0) a.sums[blockIdx.x].max = all.max;
}

__global__ void sum_kernel(Head a) {
    const T* row = a.logits + blockIdx.x * a.Vp; // (V)
    const float max = a.sums[blockIdx.x].max;
    float sum = 0;
    for (size_t v = threadIdx.x; v < a.V; v += THREADS) sum += __expf(to_float(row[v]) - max);
    MaxSum all = block_join({max, sum});
    if (threadIdx.x == 0) a.sums[blockIdx.x].sum = all.sum;
}

// Write the loss, and this thread's part of the gradient. `logit` is the target's.
__device__ void write_gradient(const Head& a, size_t n, MaxSum all, float logit) {
    T* row = a.logits + n * a.Vp; // (Vp)
    const float scale = 1 / float(a.N);
    const float factor = scale / all.sum;
    for (size_t v = threadIdx.x; v < a.Vp; v += THREADS) {
        float d = v < a.V ? __expf(to_float(row[v]) - all.max) * factor : 0;
        row[v] = from_acc<T>(v == size_t(a.targets[n]) ? d - scale : d);
    }
    if (threadIdx.x == 0) a.losses[n] = logf(all.sum) + all.max - logit;
}

__global__ void gradient_kernel(Head a) {
    const size_t n = blockIdx.x;
    const float logit = to_float(a.logits[n * a.Vp + size_t(a.targets[n])]);
    __syncthreads(); // all threads have read it: a gradient may overwrite it
    write_gradient(a, n, a.sums[n], logit);
}

static void three_passes(const Head& a, cudaStream_t stream) {
    launch_rows(max_kernel, a, stream);
    launch_rows(sum_kernel, a, stream);
    launch_rows(gradient_kernel, a, stream);
}

// ----------------------------------------------------------------------------
// 2. An online softmax: the sum so far is rescaled when a larger logit comes.
//   Maximum and sum take one reading: 6 N V bytes, two thirds of them useful. The price is an
//   exponential more for each new maximum of a thread: a handful, for its maxima soon stop growing.

__device__ MaxSum online(const Head& a, size_t n) {
    const T* row = a.logits + n * a.Vp; // (V)
    MaxSum mine;
    for (size_t v = threadIdx.x; v < a.V; v += THREADS) {
        float x = to_float(row[v]);
        if (x > mine.max) mine = {x, mine.sum * exp_below(mine.max, x)};
        mine.sum += exp_below(x, mine.max);
    }
    return block_join(mine);
}

__global__ void online_kernel(Head a) {
    MaxSum all = online(a, blockIdx.x);
    if (threadIdx.x == 0) a.sums[blockIdx.x] = all;
}

static void online_softmax(const Head& a, cudaStream_t stream) {
    launch_rows(online_kernel, a, stream);
    launch_rows(gradient_kernel, a, stream);
}

// ----------------------------------------------------------------------------
// 3. One launch: the block that has summed a row writes its gradient at once.
//   The second reading may now find the row in L2. Four blocks of 512 threads run on each of 132
//   SMs: 528 rows, 53 MB at 50,257 tokens and 160 MB at 152,000, beside an L2 of 50 MB. So some of
//   the rows are gone when they are wanted, and with a larger vocabulary all of them.

__global__ void one_launch_kernel(Head a) {
    const size_t n = blockIdx.x;
    const float logit = to_float(a.logits[n * a.Vp + size_t(a.targets[n])]);
    MaxSum all = online(a, n); // its barrier stands behind all readings of `logit`
    write_gradient(a, n, all, logit);
}

static void one_launch(const Head& a, cudaStream_t stream) {
    launch_rows(one_launch_kernel, a, stream);
}

// ----------------------------------------------------------------------------
// 4. 16-byte loads: a thread takes 8 neighbours at once.
//   An eighth of the loads and stores, 32 KB of an SM on the way. One rescaling serves 8 logits.

constexpr int P = VECTOR<T>; // elements of 16 bytes

__global__ void packs_kernel(Head a) {
    const size_t n = blockIdx.x;
    T* row = a.logits + n * a.Vp; // (Vp)
    const float logit = to_float(row[a.targets[n]]);

    // Find the maximum and the sum. Padding counts as -inf.
    MaxSum mine;
    for (size_t v = threadIdx.x * P; v < a.V; v += THREADS * P) {
        Pack<T, P> p = load<P>(row + v);
        float x[P], max = mine.max;
        for (int i = 0; i < P; i++) {
            x[i] = v + i < a.V ? to_float(p.v[i]) : -INFINITY;
            max = fmaxf(max, x[i]);
        }
        mine = {max, mine.sum * exp_below(mine.max, max)};
        for (int i = 0; i < P; i++) mine.sum += exp_below(x[i], max);
    }
    const MaxSum all = block_join(mine);

    // Write the gradient.
    const float scale = 1 / float(a.N);
    const float factor = scale / all.sum;
    for (size_t v = threadIdx.x * P; v < a.Vp; v += THREADS * P) {
        Pack<T, P> p = load<P>(row + v);
        for (int i = 0; i < P; i++) {
            float d = v + i < a.V ? __expf(to_float(p.v[i]) - all.max) * factor : 0;
            p.v[i] = from_acc<T>(v + i == size_t(a.targets[n]) ? d - scale : d);
        }
        store(row + v, p);
    }
    if (threadIdx.x == 0) a.losses[n] = logf(all.sum) + all.max - logit;
}

static void packs(const Head& a, cudaStream_t stream) {
    LLMC_CHECK(a.Vp % P == 0, "this rung wants rows of 16-byte packs, Vp is %zu", a.Vp);
    launch_rows(packs_kernel, a, stream);
}

// ----------------------------------------------------------------------------
// 5. The project's own: where four rows an SM are more than L2 holds, fewer blocks take row after
//   row, with more loads each on the way. Shards of a vocabulary, ignored targets and soft caps
//   run by the same file.

static void library(const Head& a, cudaStream_t stream) {
    crossentropy_forward_backward(a.losses, a.logits, a.targets, 1 / double(a.N), a.N, a.V, a.Vp,
                                  stream);
}

// ----------------------------------------------------------------------------
// the ladder

typedef void (*Run)(const Head&, cudaStream_t);

static const Rung<Run> ladder[] = {{"maximum, sum, gradient", three_passes},
                                   {"an online softmax", online_softmax},
                                   {"one launch", one_launch},
                                   {"16-byte loads", packs},
                                   {"llmc/ops/crossentropy.cuh", library}};

static void check(Check& c, Run run, size_t N, size_t V) {
    // Want: the CPU in double.
    const size_t Vp = ceil_div(V, size_t(P)) * P;
    auto logits = rounded<T>(normals(c, N * Vp, 3));
    auto targets = integers(c, N, 0, int(V) - 1);
    std::vector<double> losses(N), d = logits;
    crossentropy_forward_backward(losses.data(), d.data(), targets.data(), 1 / double(N), N, V, Vp,
                                  Cpu{});

    every_order(c, [&](Outputs& o) {
        Array<T> l(logits);
        Array<int> t(targets);
        Array<float> loss(N), sums(2 * N);
        run({loss.data, l.data, t.data, reinterpret_cast<MaxSum*>(sums.data), N, V, Vp}, nullptr);
        o.add("loss", loss, losses, tolerance<float>(V), 16);
        o.add("dlogits", l, d, tolerance<T>(V), 1 / double(N));
    });
}

static double seconds(Run run, size_t N, size_t V) {
    const size_t Vp = ceil_div(V, size_t(P)) * P;
    Array<T> logits(N * Vp);
    Array<int> targets(N);
    Array<float> losses(N), sums(2 * N);
    fill_random(logits);
    MaxSum* of_rows = reinterpret_cast<MaxSum*>(sums.data);
    Head a = {losses.data, logits.data, targets.data, of_rows, N, V, Vp};
    return gpu_seconds([&] { run(a, nullptr); }, 20, nullptr);
}

int main() {
    const size_t N = 8192, V = 50257;
    auto check_shapes = [](Check& c, Run run) { // rows end within blocks, warps and packs
        for (auto [N, V] : {std::pair(2, 5), {3, 515}, {2, 12301}})
            check(c, run, size_t(N), size_t(V));
    };
    Work work = {4.0 * N * V, 1e9, "GB/s"};
    return climb(1, ladder, check_shapes, work, [&](Run run) { return seconds(run, N, V); }) > 0;
}
