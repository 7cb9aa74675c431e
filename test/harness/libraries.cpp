// libraries.cpp - calls each library that the trainer links, and asks for a GPU: do they load?
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <cstdio>
#include <utf8proc.h>
#include <zlib.h>
#ifdef WITH_ZSTD
#include <zstd.h>
#endif
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

int main() {
    // Ask each library for its version, and OpenMP for threads.
    char pcre[64];
    pcre2_config(PCRE2_CONFIG_VERSION, pcre);
    printf("zlib %s, pcre2 %s, utf8proc %s, cublasLt %zu\n", zlibVersion(), pcre,
           utf8proc_version(), cublasLtGetVersion());
#ifdef WITH_ZSTD
    printf("zstd %s\n", ZSTD_versionString());
#endif
    int threads = 0;
#pragma omp parallel reduction(+ : threads)
    threads++;
    printf("%d threads\n", threads);

    // Ask the driver for a GPU.
    int gpus = 0;
    printf("GPU: %s\n", cudaGetErrorString(cudaGetDeviceCount(&gpus)));
}
