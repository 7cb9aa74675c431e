// matmul.cu - a ladder: a linear layer's product, from one thread an output to cuBLASLt
//   out (M,N) = inp (M,K) weight (N,K)^T,  bf16, sums in float.   N, K multiples of 8, any M
//   2 M N K FLOPs over 2 (M K + N K + M N) bytes: at 4096^3 that is 1365 FLOPs a byte, where the
//   H200's memory asks for 206 (989 TFLOP/s on tensor cores, 4.8 TB/s) and for 14 without them (67
//   TFLOP/s). So memory is no limit, if each byte that is fetched is used often enough. What limits
//   a rung is what stands between memory and the multipliers.
//
//   rung                                 at most  H200, TFLOP/s, M = N = K = 4096
//     1  one thread an output                  2
//     2  tiles in shared memory                8
//     3  8 x 8 outputs a thread               67
//     4  tensor cores, by mma.sync           613
//     5  TMA and wgmma, one expert of ours   930
//     6  cuBLASLt, by llmc/ops/matmul.cuh    989
//
//   make ladders, or by hand
//     g++ -std=c++20 -O1 -DEMULATE -x c++ dev/cuda/matmul.cu -lpthread       checks
//     nvcc -std=c++20 -O3 -arch=sm_90a dev/cuda/matmul.cu -lcublasLt         checks and measures
#include "../../llmc/ops/elements.h"
#include "../../llmc/ops/grouped_sm90.cuh"
#include "../../llmc/ops/hopper.cuh"
#include "../../llmc/ops/matmul.cuh"
#include "../../llmc/ops/mma.cuh"
#include "ladder.h"

using namespace llmc;

typedef bf16 T;

struct Linear {
    T* out;                // (M,N)
    const T *inp, *weight; // (M,K) (N,K)
    size_t M, N, K;
    const int* starts; // (2) 0, M: the rows of rung 5's expert
    Blas* blas;        // of rung 6
};

// ----------------------------------------------------------------------------
// 1. One thread an output.
//   Two elements are loaded for each multiply-add. A warp shares its row of inp; its 32 rows of
//   weight lie K elements apart: 32 sectors for 64 useful bytes, which L1 has to keep for the next
//   15 steps. L1 hands out 4 sectors a cycle, so 32 multiply-adds take 8 cycles in place of 1/4:
//   1/32 of the 67 TFLOP/s at best.

__global__ void thread_an_output_kernel(Linear a) {
    size_t n = size_t(blockIdx.x) * 32 + threadIdx.x, m = size_t(blockIdx.y) * 8 + threadIdx.y;
    if (m >= a.M || n >= a.N) return;
    float sum = 0;
    for (size_t k = 0; k < a.K; k++)
        sum += to_float(a.inp[m * a.K + k]) * to_float(a.weight[n * a.K + k]);
    a.out[m * a.N + n] = from_acc<T>(sum);
}

static void thread_an_output(const Linear& a, cudaStream_t stream) {
    dim3 grid(unsigned(ceil_div(a.N, 32)), unsigned(ceil_div(a.M, 8)));
    launch(thread_an_output_kernel, grid, dim3(32, 8), stream, a);
}

// ----------------------------------------------------------------------------
// 2. Tiles in shared memory: 32 x 32 outputs a block, 32 steps of the sum at a time.
//   An element that a block loads serves 32 outputs, and lanes load neighbours, whole sectors.
//   Still two loads for each multiply-add, now from shared memory, a cycle each, since rows of SIDE
//   + 1 keep a column's numbers in different banks. 4 schedulers could start 4 multiply-adds in a
//   cycle, and get one in two: about 1/8 of the peak.

constexpr int SIDE = 32, SQUARE = SIDE * SIDE;

__global__ void shared_tiles_kernel(Linear a) {
    LLMC_SHARED(float, inp, SQUARE);
    LLMC_SHARED(float, weight, SQUARE + SIDE); // (SIDE, SIDE + 1): lanes read down a column
    size_t m = size_t(blockIdx.y) * SIDE + threadIdx.y, n0 = size_t(blockIdx.x) * SIDE;
    int x = threadIdx.x, y = threadIdx.y;

    float sum = 0;
    for (size_t k0 = 0; k0 < a.K; k0 += SIDE) {
        size_t k = k0 + x;
        bool row = m < a.M && k < a.K, column = n0 + y < a.N && k < a.K;
        inp[y * SIDE + x] = row ? to_float(a.inp[m * a.K + k]) : 0;
        weight[y * (SIDE + 1) + x] = column ? to_float(a.weight[(n0 + y) * a.K + k]) : 0;
        __syncthreads(); // all threads have written
        for (int i = 0; i < SIDE; i++) sum += inp[y * SIDE + i] * weight[x * (SIDE + 1) + i];
        __syncthreads(); // all have read: the next tiles may be written
    }
    if (m < a.M && n0 + x < a.N) a.out[m * a.N + n0 + x] = from_acc<T>(sum);
}

static void shared_tiles(const Linear& a, cudaStream_t stream) {
    dim3 grid(unsigned(ceil_div(a.N, SIDE)), unsigned(ceil_div(a.M, SIDE)));
    launch(shared_tiles_kernel, grid, dim3(SIDE, SIDE), stream, a);
}

// ----------------------------------------------------------------------------
// 3. 8 x 8 outputs a thread, 128 x 128 a block.
//   16 numbers from shared memory now serve 64 multiply-adds. They come by four loads of 16 bytes;
//   a warp's lanes share the rows, so these take 6 cycles. Four warps, one on each scheduler, then
//   keep shared memory busy for 24 cycles and the multipliers for 64: arithmetic is the limit at
//   last, less what loading and waiting at barriers take. Tiles lie with the step first, so that a
//   thread's numbers of one step are neighbours.

constexpr int BLOCK = 128;            // outputs along both sides
constexpr int STEPS = 16;             // of the sum in a tile
constexpr int FLOATS = STEPS * BLOCK; // of a tile

// rows [row0, row0 + BLOCK) of x (rows, K), steps [k0, k0 + STEPS), as tile (STEPS, BLOCK)
__device__ inline void load_turned(float* tile, const T* x, size_t row0, size_t rows, size_t k0,
                                   size_t K) {
    int r = threadIdx.x % BLOCK, first = threadIdx.x / BLOCK * 8; // 256 threads, 8 elements each
    size_t k = k0 + first, count = row0 + r < rows && k < K ? 8 : 0;
    Pack<T, 8> p = load_some<8>(x + (row0 + r) * K + k, count);
    for (int i = 0; i < 8; i++) tile[(first + i) * BLOCK + r] = to_float(p.v[i]);
}

// A thread's eight rows or columns: 4 at 4 i and 4 at 64 + 4 i, so that a warp reads neighbours.
__device__ inline int mine(int i, int j) { return j / 4 * 64 + i * 4 + j % 4; }

__global__ void __launch_bounds__(256) register_tiles_kernel(Linear a) {
    LLMC_SHARED(float, inp, FLOATS);
    LLMC_SHARED(float, weight, FLOATS);
    size_t m0 = size_t(blockIdx.y) * BLOCK, n0 = size_t(blockIdx.x) * BLOCK;
    int x = threadIdx.x % 16, y = threadIdx.x / 16;

    float sum[8][8] = {};
    for (size_t k0 = 0; k0 < a.K; k0 += STEPS) {
        load_turned(inp, a.inp, m0, a.M, k0, a.K);
        load_turned(weight, a.weight, n0, a.N, k0, a.K);
        __syncthreads(); // all threads have written

        // Each step: 16 numbers, 64 multiply-adds.
        #pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const float *rows = inp + k * BLOCK + y * 4, *columns = weight + k * BLOCK + x * 4;
            Pack<float, 4> r[2] = {load<4>(rows), load<4>(rows + 64)},
                           c[2] = {load<4>(columns), load<4>(columns + 64)};
            #pragma unroll
            for (int i = 0; i < 8; i++)
                #pragma unroll
                for (int j = 0; j < 8; j++) sum[i][j] += r[i / 4].v[i % 4] * c[j / 4].v[j % 4];
        }
        __syncthreads(); // all have read: the next tiles may be written
    }

    // Write the outputs.
    #pragma unroll
    for (int i = 0; i < 8; i++)
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            size_t m = m0 + mine(y, i), n = n0 + mine(x, j);
            if (m < a.M && n < a.N) a.out[m * a.N + n] = from_acc<T>(sum[i][j]);
        }
}

static void register_tiles(const Linear& a, cudaStream_t stream) {
    LLMC_CHECK(a.K % 8 == 0, "this rung wants rows of 16-byte packs, K is %zu", a.K);
    dim3 grid(unsigned(ceil_div(a.N, BLOCK)), unsigned(ceil_div(a.M, BLOCK)));
    launch(register_tiles_kernel, grid, 256, stream, a);
}

// ----------------------------------------------------------------------------
// 4. Tensor cores, by mma.sync: a warp multiplies (16,16) by (16,8) in one instruction.
//   15 times the peak of float, and the tiles stay in bf16: half the bytes. Four warps with 64 x 64
//   outputs each: for 16 steps of the sum 8 loads by ldmatrix, of 512 bytes and 4 cycles each,
//   serve 32 products, a cycle each at the full rate. With 64 x 32 it would be 6 for 16, and shared
//   memory the limit. Tiles come by cp.async, past the registers, and one ahead: memory works while
//   the tensor cores do.

constexpr int DEPTH = 32; // steps of the sum in a tile
// 80 bytes a row: the 8 rows that ldmatrix reads at a time lie in 32 different banks
constexpr int ROW = DEPTH + 8, TILE = BLOCK * ROW, THREADS = 128;

// rows [row0, row0 + BLOCK) of x (rows, K), steps [k0, k0 + DEPTH); zeros beyond both
__device__ inline void load_async(T* tile, const T* x, size_t row0, size_t rows, size_t k0,
                                  size_t K) {
    for (int i = threadIdx.x; i < BLOCK * (DEPTH / 8); i += THREADS) {
        int r = i / (DEPTH / 8), chunk = i % (DEPTH / 8) * 8;
        bool real = row0 + r < rows && k0 + chunk < K;
        cp_async16(tile + r * ROW + chunk, real ? x + (row0 + r) * K + k0 + chunk : x,
                   real ? 16 : 0);
    }
}

__global__ void __launch_bounds__(THREADS) tensor_cores_kernel(Linear a) {
    LLMC_SHARED(T, inp, 2 * TILE);
    LLMC_SHARED(T, weight, 2 * TILE);
    size_t m0 = size_t(blockIdx.y) * BLOCK, n0 = size_t(blockIdx.x) * BLOCK;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int row = warp / 2 * 64, column = warp % 2 * 64; // the warp's outputs in the block's
    float sum[4][8][4] = {};                         // 4 x 8 products of (16,8), 4 numbers a lane

    // Tiles come two stages in turn; beyond K an empty one, so that waits count on.
    auto load_stage = [&](size_t stage, size_t k0) {
        if (k0 >= a.K) return cp_async_commit();
        load_async(inp + stage * TILE, a.inp, m0, a.M, k0, a.K);
        load_async(weight + stage * TILE, a.weight, n0, a.N, k0, a.K);
        cp_async_commit();
    };
    load_stage(0, 0);
    for (size_t k0 = 0, stage = 0; k0 < a.K; k0 += DEPTH, stage ^= 1) {
        load_stage(stage ^ 1, k0 + DEPTH);
        cp_async_wait<1>(); // this thread's part of all but the next
        __syncthreads();    // and everyone's
        const T *x = inp + stage * TILE, *w = weight + stage * TILE; // (BLOCK, ROW) each

        #pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            // Load the fragments.
            uint32_t fx[4][4], fw[4][4]; // fragments: 16 rows each, 16 steps
            #pragma unroll
            for (int i = 0; i < 4; i++)
                ldmatrix_x4(fx[i], x + (row + 16 * i + lane % 16) * ROW + k + lane / 16 * 8);
            #pragma unroll
            for (int j = 0; j < 4; j++)
                ldmatrix_x4(fw[j], w + (column + 16 * j + lane / 16 * 8 + lane % 8) * ROW + k +
                                       lane / 8 % 2 * 8);

            // Multiply.
            #pragma unroll
            for (int i = 0; i < 4; i++)
                #pragma unroll
                for (int j = 0; j < 8; j++) {
                    uint32_t b[2] = {fw[j / 2][j % 2 * 2], fw[j / 2][j % 2 * 2 + 1]};
                    mma_m16n8k16<T>(sum[i][j], fx[i], b);
                }
        }
        __syncthreads(); // this stage is read: the next load may overwrite it
    }

    // Write the outputs: a lane has two neighbours in rows lane / 4 and lane / 4 + 8.
    #pragma unroll
    for (int i = 0; i < 8; i++)
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            size_t m = m0 + row + 8 * i + lane / 4, n = n0 + column + 8 * j + lane % 4 * 2;
            const float* pair = sum[i / 2][j] + i % 2 * 2;
            if (m < a.M && n < a.N)
                store(a.out + m * a.N + n, Pack<T, 2>{from_acc<T>(pair[0]), from_acc<T>(pair[1])});
        }
}

static void tensor_cores(const Linear& a, cudaStream_t stream) {
    LLMC_CHECK(a.K % 8 == 0 && a.N % 2 == 0, "this rung wants K in eights and N even");
    dim3 grid(unsigned(ceil_div(a.N, BLOCK)), unsigned(ceil_div(a.M, BLOCK)));
    launch(tensor_cores_kernel, grid, THREADS, stream, a);
}

// ----------------------------------------------------------------------------
// 5. TMA and wgmma: the experts' kernel of llmc/ops/grouped_sm90.cuh, with one expert. On other
//   GPUs the call runs grouped_mma.cuh.
//   mma.sync reaches 62% of Hopper's rate; wgmma, 64 rows and more straight from shared memory, all
//   of it. One thread loads 128 x 64 and 256 x 64 of the operands by TMA, 48 KB for 1024 clocks of
//   tensor cores, up to four such stages ahead of two warpgroups that only multiply. The 512 tiles
//   take four turns of 132 SMs, 97% full. Each ends with 64 KB of outputs, 3% of its time, beside
//   which nothing is multiplied.

static void wgmma_tiles(const Linear& a, cudaStream_t stream) {
    grouped_tensor_cores<true, true>(a.out, a.inp, a.weight, {a.starts, 1, a.N, a.K, a.M}, false,
                                     stream);
}

// ----------------------------------------------------------------------------
// 6. The project's own way: cuBLASLt, its algorithm chosen by measuring.
//   Its kernels also have clusters, whose blocks share tiles, and tiles by the shape.

static void cublaslt(const Linear& a, cudaStream_t stream) {
    Product p = {a.M, a.N, a.K, {a.K, 1}, {1, a.K}, a.N};
    const T* none = nullptr;
    matmul(a.out, a.inp, a.weight, none, none, p, *a.blas, stream);
}

// ----------------------------------------------------------------------------
// the ladder

typedef void (*Run)(const Linear&, cudaStream_t);

static const Rung<Run> ladder[] = {{"one thread an output", thread_an_output},
                                   {"tiles in shared memory", shared_tiles},
                                   {"8 x 8 outputs a thread", register_tiles},
                                   {"tensor cores, by mma.sync", tensor_cores},
                                   {"TMA and wgmma, one expert of ours", wgmma_tiles},
                                   {"cuBLASLt, by llmc/ops/matmul.cuh", cublaslt}};

static void check(Check& c, Run run, size_t M, size_t N, size_t K) {
    auto x = rounded<T>(normals(c, M * K)), w = rounded<T>(normals(c, N * K));
    std::vector<double> want(M * N);
    Product p = {M, N, K, {K, 1}, {1, K}, N};
    std::vector<unsigned char> blocks(matmul_plain_scratch_bytes(M, 8, threads_here(Cpu{})));
    const double* none = nullptr;
    matmul_plain(want.data(), x.data(), w.data(), none, none, p, blocks.data());

    every_order(c, [&](Outputs& o) {
        Array<T> out(M * N), inp(x), weight(w);
        Array<int> starts(std::vector<double>{0, double(M)});
        Array<unsigned char> scratch(PRODUCT_WORKSPACE);
        Blas blas;
        blas_scratch(blas, scratch.data, scratch.n);
        run({out.data, inp.data, weight.data, M, N, K, starts.data, &blas}, nullptr);
        o.add("out", out, want, tolerance<T>(K));
    });
}

static double seconds(Run run, size_t M, size_t N, size_t K) {
    Array<T> out(M * N), inp(M * K), weight(N * K);
    Array<int> starts(std::vector<double>{0, double(M)});
    Array<unsigned char> scratch(PRODUCT_WORKSPACE);
    Blas blas;
    blas_scratch(blas, scratch.data, scratch.n);
    fill_random(inp);
    fill_random(weight);

    // Let cuBLASLt choose its algorithm before the clock runs.
    Linear a = {out.data, inp.data, weight.data, M, N, K, starts.data, &blas};
    auto once = [&] { run(a, nullptr); };
    blas_rehearse(blas, true, cudaStream_t{});
    once();
    blas_rehearse(blas, false, cudaStream_t{});
    return gpu_seconds(once, 10, nullptr);
}

int main() {
    const size_t M = 4096, N = 4096, K = 4096;
    auto check_shapes = [](Check& c, Run run) { // blocks and tiles that end early
        check(c, run, 1, 8, 8);
        check(c, run, 70, 136, 72);
        check(c, run, 130, 40, 64);
    };
    Work work = {2.0 * M * N * K, 1e12, "TFLOP/s"};
    return climb(1, ladder, check_shapes, work, [&](Run run) { return seconds(run, M, N, K); }) > 0;
}
