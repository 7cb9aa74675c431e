// published_steps.h - step times that others have measured and published, as rows of a table
//   A row is a model, a layout and seconds. Some rows were used to fit the shares of machine.h's
//   a100-80 row; all others are held out, and nothing was tuned to them.
#pragma once
#include <sstream>
#include <string>
#include <vector>

// A sweep of one model. Its rows are tp.dp.pp.B:seconds, with B the micro-batch; T 2048, V 51200,
// full recomputation, 1F1B, gradients summed in float16.
struct SweepSet {
    size_t C, NH, L;
    int batch; // sequences a step
    const char* rows;
};

// vTrain (github.com/VIA-Research/vTrain, MIT): data/ground_truth_multi.csv, Megatron-DeepSpeed on
// A100-80 SXM with four 200 Gb/s links for a node's eight cards. Every fourth row, counted over all
// four sets, was fitted: 28 of 109.
static const SweepSet vtrain_sets[] = {
    {3072, 32, 30, 512,
     "1.64.1.8:3.57 1.64.1.4:3.64 2.32.1.8:3.98 1.64.1.2:3.70 2.32.1.16:3.94 2.32.1.4:4.08 "
     "2.32.1.2:4.26 4.16.1.16:4.49 4.16.1.32:4.55 4.16.1.8:4.63 4.16.1.4:4.76 1.32.2.4:4.38 "
     "1.32.2.2:4.03 4.16.1.2:6.23 1.32.2.8:5.05 8.8.1.64:9.84 8.8.1.32:4.97 8.8.1.16:5.02 "
     "8.8.1.8:5.18 8.8.1.4:5.62 8.8.1.2:8.88 16.4.1.32:10.58 16.4.1.16:10.72 16.4.1.8:10.89 "
     "16.4.1.4:11.96 16.4.1.2:13.47"},
    {6144, 48, 40, 1024,
     "8.32.1.8:9.60 8.32.1.16:10.51 8.32.1.4:9.93 8.32.1.2:10.45 4.32.2.8:10.86 4.32.2.4:10.95 "
     "4.32.2.2:10.03 2.32.4.4:10.82 1.32.8.4:12.38 8.16.2.2:10.43 8.8.4.2:10.93 8.4.8.8:11.03 "
     "2.16.8.8:13.16 16.16.1.2:20.41 8.4.8.32:16.24"},
    {8192, 64, 48, 1536,
     "2.32.8.2:21.89 4.32.4.2:13.88 2.16.16.2:23.75 4.32.4.3:16.19 4.32.4.4:15.63 4.16.8.2:16.07 "
     "2.32.8.3:19.07 4.16.8.3:17.61 4.8.16.2:14.53 2.16.16.3:26.19 4.16.8.4:17.41 4.32.4.6:18.53 "
     "8.32.2.6:14.92 8.32.2.8:15.21 8.32.2.4:14.76 8.32.2.12:17.13 8.32.2.3:14.85 4.8.16.3:15.02 "
     "8.32.2.2:14.61 4.8.16.4:15.59 8.16.4.2:14.71 4.16.8.6:16.09 8.16.4.3:14.83 8.16.4.4:14.75 "
     "8.16.4.6:15.25 8.8.8.2:15.00 8.16.4.8:15.81 8.8.8.3:15.27 8.8.8.4:14.97 4.8.16.6:20.04 "
     "8.8.8.6:15.78 8.16.4.12:17.18 1.32.16.3:19.99 8.4.16.2:15.64 2.32.8.6:23.06 8.4.16.3:16.36 "
     "8.8.8.8:16.41 8.4.16.4:15.94 8.4.16.6:16.23 2.16.16.6:27.23 8.8.8.12:18.00 4.16.8.12:20.61 "
     "8.4.16.8:16.88 8.4.16.12:18.57 4.8.16.12:27.81 8.8.8.24:23.17 8.4.16.24:24.17"},
    {12288, 96, 96, 1536,
     "4.8.16.2:54.26 4.8.16.3:55.24 4.4.32.2:53.91 4.4.32.2:53.94 4.4.32.3:56.30 2.8.32.2:57.41 "
     "4.8.16.4:57.72 8.8.8.2:55.11 8.8.8.3:56.18 8.4.16.2:56.32 4.4.32.4:59.33 8.8.8.4:58.24 "
     "8.4.16.3:55.68 8.4.16.4:57.50 8.2.32.2:58.56 8.2.32.3:57.32 2.8.32.3:64.30 8.4.16.6:60.52 "
     "4.4.32.6:66.63 8.2.32.4:59.15 8.2.32.6:62.64"},
};

// A row of a table that has one layout for each model.
struct TableRow {
    const char* name;
    size_t NH, C, L;
    int tp, pp, gpus, batch;
    double number; // seconds, or TFLOP/s a card
};

// arXiv:2104.04473, table 1 of the weak scaling on Selene (A100-80, a 200 Gb/s link a card):
// TFLOP/s a card by that paper's count of FLOPs. Heads and the split of tp and pp are from memory
// of the paper; tables in Megatron-LM's repository have their product.
static const TableRow megatron_a100[] = {
    {"1.7B", 24, 2304, 24, 1, 1, 32, 512, 137},
    {"3.6B", 32, 3072, 30, 2, 1, 64, 512, 138},
    {"7.5B", 32, 4096, 36, 4, 1, 128, 512, 142},
    {"18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135},
    {"39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138},
    {"76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140},
    {"145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148},
    {"310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155},
    {"529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163},
    {"1008.0B", 160, 25600, 128, 8, 64, 3072, 3072, 163},
};

// arXiv:2205.05198, table 5: seconds with full recomputation, and with sequence parallelism and
// selective recomputation. Times are from memory of the paper; they agree with its MFU column.
struct SelectiveRow {
    TableRow model; // number: seconds of full recomputation
    int micro_batch, chunks;
    double selective; // seconds
};
static const SelectiveRow selective_rows[] = {
    {{"22B", 64, 6144, 48, 8, 1, 8, 4, 1.42}, 4, 1, 1.10},
    {{"175B", 96, 12288, 96, 8, 8, 64, 64, 18.13}, 1, 3, 13.75},
    {{"530B", 128, 20480, 105, 8, 35, 280, 280, 49.05}, 1, 3, 37.83},
    {{"1T", 160, 25600, 128, 8, 64, 512, 512, 94.42}, 1, 1, 71.49},
};

// Megatron-LM's README (images/model_table.png): H100, T 4096, V 131072, 48 data-parallel ranks,
// TFLOP/s a card. Micro-batches and interleaving are not in the table.
static const TableRow megatron_h100[] = {
    {"1.7B", 16, 2048, 24, 1, 1, 48, 192, 408.8},
    {"7.1B", 32, 4096, 30, 2, 1, 96, 192, 465.9},
    {"16B", 48, 6144, 32, 4, 1, 192, 192, 489.1},
    {"32B", 56, 7168, 48, 8, 1, 384, 192, 459.6},
    {"70B", 64, 8192, 84, 8, 2, 768, 384, 419.7},
    {"119B", 80, 10240, 92, 8, 4, 1536, 768, 420.5},
    {"177B", 96, 12288, 96, 8, 6, 2304, 1152, 432.8},
    {"314B", 128, 16384, 96, 8, 8, 3072, 1536, 474.4},
    {"462B", 144, 18432, 112, 8, 16, 6144, 3072, 459.9},
};

// SimAI (github.com/aliyun/SimAI, its table of ratios): reduce-scatter and all-gather over 2, 4, ..
// 128 nodes of eight cards with a NIC of 50 GB/s each, as shares of the NICs' rate.
struct RingRow {
    double megabytes;
    double shares[7];
};
static const RingRow simai_rings[] = {
    {16, {.32, .24, .13, .05, .044, .021, .0087}},
    {64, {.50, .53, .39, .21, .106, .051, .044}},
    {256, {.85, .77, .69, .57, .387, .209, .103}},
    {1000, {.92, .93, .90, .76, .74, .563, .315}},
    {4000, {.95, .95, .95, .95, .923, .755, .740}},
    {16000, {.96, .96, .96, .96, .957, .958, .919}},
};

// llm.c (github.com/karpathy/llm.c, scripts/run_gpt2_*.sh): GPT-2 shapes on one node of 8 A100-80 or
// H100, T 1024, bf16, ZeRO-1. batch: tokens a step; number: seconds.
struct LlmcRow {
    const char* name;
    size_t NH, C, L;
    const char* machine;
    int micro_batch, batch;
    double seconds;
};
static const LlmcRow llmc_rows[] = {
    {"124M", 12, 768, 12, "a100-80", 64, 524288, 0.3},
    {"350M", 16, 1024, 24, "a100-80", 64, 524288, 0.82},
    {"774M", 20, 1280, 36, "a100-80", 32, 524288, 1.7},
    {"1558M", 25, 1600, 48, "h100", 16, 1048576, 2.8},
};

// torchtitan (github.com/pytorch/torchtitan, benchmarks/*.md): Llama 3.1 in bf16, compiled, T 8192,
// FSDP over dp ranks and sequence parallelism over tp; H100 of 96 GB and 500 W, whose memory has
// 2.4 TB/s. rate: tokens a second of a card.
struct TitanRow {
    const char* name;
    bool large; // 70B, fully recomputed; else 8B
    int dp, tp, micro_batch;
    double rate;
};
static const TitanRow titan_rows[] = {
    {"8B, 8 cards", false, 8, 1, 2, 6667},
    {"8B, 128 cards", false, 128, 1, 2, 6514},
    {"8B, 64 cards, tp 8", false, 8, 8, 12, 4378},
    {"70B, 256 cards, tp 8", true, 32, 8, 16, 597.3},
};

// arXiv:2407.21783, table 4: Llama 3 405B on H100, 2^24 tokens a step, tp 8 in a machine, pp 16
// interleaved, FSDP outermost; TFLOP/s a card, which count half of attention's square.
struct LlamaRow {
    size_t seq;
    int cp, dp;
    double tflops;
};
static const LlamaRow llama3_405b[] = {{8192, 1, 64, 430}, {8192, 1, 128, 400},
                                       {131072, 16, 8, 380}};
