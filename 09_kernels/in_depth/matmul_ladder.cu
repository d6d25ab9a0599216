// Chapter 9, the ladder in fp32: from vector addition to a matrix product near the limit of the chip.
//
//     C = A · B         A [M, K], B [K, N], C [M, N], all row-major, fp32
//
// Every rung adds one idea to the one before. All compute the same 2·M·N·K FLOPs; they differ in how often an
// element is fetched, and from where:
//
//     global memory (DRAM, GBs)  -->  shared memory (a block's, 227 KB on an H100)  -->  registers (a thread's, 255)
//
//     rung                what it adds                                         global bytes per 2 FLOPs
//     0 vector_add        a kernel, its launch, one thread per element
//     1 naive             one thread per element of C, in the wrong order      33
//     2 coalesced         neighbouring threads read neighbouring addresses     5
//     3 shared_tiles      a block fetches a tile once for all its threads      4 (1/32 + 1/32)
//     4 coarsened_1d      8 results per thread: B's element is used 8 times    4 (1/64 + 1/64)
//     5 coarsened_2d      8 x 8 results per thread: 16 loads for 64 FMAs       4 (1/128 + 1/128)
//     6 vectorised        16 bytes per load, no bank conflicts                 the same
//     7 warp_tiles        a warp owns a compact tile; loads overlap the work   the same
//
// matmul_ladder.py predicts the bytes from these formulas, and the CPU run counts them (in 32-byte sectors). Rungs 8 to 10,
// which use tensor cores, are in tensor_cores.cu, 11 and 12 in clusters.cu.
//
// In ncu look at: 1 and 2, "sectors per request"; 3, "L1 and shared bandwidth"; 5 and 6, "shared bank conflicts";
// 4, 5, 7, "warp stall reasons" and "registers per thread"; 7, "FMA pipe utilisation".
//
// Build: by matmul_ladder.py, with nvcc if there is a GPU, otherwise with g++ (see cuda_on_cpu.h).
#include "cuda_on_cpu.h"

// ------------------------------------------------------------------------------------------- rung 0: vector addition

// The grid covers n with blocks of 256 threads, so the last block may exceed the end: hence the `if`.
__global__ void vector_add(int n, global<const float> a, global<const float> b, global<float> c) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

// The host's part. In a separate program the host would also allocate GPU memory and copy both ways
// (cudaMalloc, cudaMemcpy); here PyTorch has done that, and passes pointers and the stream.
extern "C" const char* run_vector_add(int n, const float* a, const float* b, float* c, void* stream) {
    return launch(vector_add, dim3((n + 255) / 256), dim3(256), 0, stream, n, a, b, c);
}

// ------------------------------------------------------------------------------------------------------ rung 1: naive

// One thread, one element of C. threadIdx.x runs over *rows*: the 32 lanes of a warp, which load together, read 32
// addresses of A that are K floats apart. Each costs a sector of 32 bytes, of which 4 are used.
__global__ void naive(int M, int N, int K, global<const float> A, global<const float> B, global<float> C) {
    int row = blockIdx.y * 32 + threadIdx.x;
    int col = blockIdx.x * 32 + threadIdx.y;
    if (row >= M || col >= N) return;
    float sum = 0;
    for (int k = 0; k < K; k++) sum += A[row * K + k] * B[k * N + col];
    C[row * N + col] = sum;
}

// -------------------------------------------------------------------------------------------------- rung 2: coalesced

// The same with x and y exchanged. Now the lanes share a row of A (one sector, sent to all) and read 32 neighbours of
// B (4 sectors). Nothing else has changed; 33 sectors have become 5.
__global__ void coalesced(int M, int N, int K, global<const float> A, global<const float> B, global<float> C) {
    int row = blockIdx.y * 32 + threadIdx.y;
    int col = blockIdx.x * 32 + threadIdx.x;
    if (row >= M || col >= N) return;
    float sum = 0;
    for (int k = 0; k < K; k++) sum += A[row * K + k] * B[k * N + col];
    C[row * N + col] = sum;
}

// ----------------------------------------------------------------------------------------------- rung 3: shared tiles

// An element, or 0 beyond the matrix: a tile that exceeds the edge is padded with zeros, which add nothing.
__device__ inline float at(global<const float> X, int row, int col, int rows, int cols) {
    return row < rows && col < cols ? X[row * cols + col] : 0.0f;
}

// A block of 32 x 32 threads computes a 32 x 32 tile of C. Step by step along K it copies one tile of A and one of B to
// shared memory, each thread one element of each; then every element is used 32 times from there.
__global__ void shared_tiles(int M, int N, int K, global<const float> A, global<const float> B, global<float> C) {
    constexpr int T = 32;
    __shared__ float tile_a[T * T], tile_b[T * T];
    shared<float> As = tile_a, Bs = tile_b;
    int tx = threadIdx.x, ty = threadIdx.y;
    int row = blockIdx.y * T + ty, col = blockIdx.x * T + tx;
    float sum = 0;
    for (int k0 = 0; k0 < K; k0 += T) {
        As[ty * T + tx] = at(A, row, k0 + tx, M, K);
        Bs[ty * T + tx] = at(B, k0 + ty, col, K, N);
        __syncthreads();  // all threads write before any reads
        for (int k = 0; k < T; k++) sum += As[ty * T + k] * Bs[k * T + tx];
        __syncthreads();  // all threads read these tiles before any writes the next
    }
    if (row < M && col < N) C[row * N + col] = sum;
}

// ----------------------------------------------------------------------------------------------- rung 4: coarsened 1D

// Shared memory is now the limit: two elements from it per FMA. So a thread computes 8 elements of C, in one
// column. It loads Bs once for all 8. 512 threads share a 64 x 64 tile of C; a step along K is 8 long.
__global__ void coarsened_1d(int M, int N, int K, global<const float> A, global<const float> B, global<float> C) {
    constexpr int BM = 64, BN = 64, BK = 8, TM = 8, THREADS = 512;
    __shared__ float tile_a[BM * BK], tile_b[BK * BN];
    shared<float> As = tile_a, Bs = tile_b;
    int t = threadIdx.x, tx = t % BN, ty = t / BN;  // my column of the tile; my rows are ty·8 .. ty·8 + 7
    int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
    float sum[TM] = {};
    for (int k0 = 0; k0 < K; k0 += BK) {
        for (int i = t; i < BM * BK; i += THREADS) As[i] = at(A, row0 + i / BK, k0 + i % BK, M, K);
        for (int i = t; i < BK * BN; i += THREADS) Bs[i] = at(B, k0 + i / BN, col0 + i % BN, K, N);
        __syncthreads();
        for (int k = 0; k < BK; k++) {
            float b = Bs[k * BN + tx];
            for (int i = 0; i < TM; i++) sum[i] += As[(ty * TM + i) * BK + k] * b;
        }
        __syncthreads();
    }
    for (int i = 0; i < TM; i++) {
        int row = row0 + ty * TM + i, col = col0 + tx;
        if (row < M && col < N) C[row * N + col] = sum[i];
    }
}

// ----------------------------------------------------------------------------------------------- rung 5: coarsened 2D

// The same idea in both directions: 8 elements of A and 8 of B in registers make an outer product of 64 FMAs.
// 256 threads, 16 x 16, share a 128 x 128 tile. What remains: lanes of a warp now read Bs 8 floats apart, 16 of
// them in 4 of the 32 banks: 4 cycles per load; and As at two addresses in one bank (64 floats apart): 2 cycles.
__global__ void __launch_bounds__(256)
coarsened_2d(int M, int N, int K, global<const float> A, global<const float> B, global<float> C) {
    constexpr int BM = 128, BN = 128, BK = 8, TM = 8, TN = 8, THREADS = 256;
    __shared__ float tile_a[BM * BK], tile_b[BK * BN];
    shared<float> As = tile_a, Bs = tile_b;
    int t = threadIdx.x, tx = t % (BN / TN), ty = t / (BN / TN);
    int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
    float sum[TM][TN] = {};
    for (int k0 = 0; k0 < K; k0 += BK) {
        for (int i = t; i < BM * BK; i += THREADS) As[i] = at(A, row0 + i / BK, k0 + i % BK, M, K);
        for (int i = t; i < BK * BN; i += THREADS) Bs[i] = at(B, k0 + i / BN, col0 + i % BN, K, N);
        __syncthreads();
        for (int k = 0; k < BK; k++) {
            float a[TM], b[TN];
            for (int i = 0; i < TM; i++) a[i] = As[(ty * TM + i) * BK + k];
            for (int j = 0; j < TN; j++) b[j] = Bs[k * BN + tx * TN + j];
            for (int i = 0; i < TM; i++)
                for (int j = 0; j < TN; j++) sum[i][j] += a[i] * b[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < TM; i++)
        for (int j = 0; j < TN; j++) {
            int row = row0 + ty * TM + i, col = col0 + tx * TN + j;
            if (row < M && col < N) C[row * N + col] = sum[i][j];
        }
}

// ------------------------------------------------------------------------------------------------- rung 6: vectorised

// Four neighbours in a row by one 16-byte load. That needs an address which is a multiple of 16 bytes, hence rows whose
// length is a multiple of 4. WHOLE says that all sizes are multiples of the tile, so no check is needed.
template <bool WHOLE>
__device__ inline float4 four_at(global<const float> X, int row, int col, int rows, int cols) {
    if (WHOLE || (cols % 4 == 0 && row < rows && col < cols)) return load4(X, row * cols + col);
    return make_float4(at(X, row, col, rows, cols), at(X, row, col + 1, rows, cols), at(X, row, col + 2, rows, cols),
                       at(X, row, col + 3, rows, cols));
}
template <bool WHOLE>
__device__ inline void put_four(global<float> X, int row, int col, int rows, int cols, const float* v) {
    if (WHOLE || (cols % 4 == 0 && row < rows && col < cols)) {
        store4(X, row * cols + col, make_float4(v[0], v[1], v[2], v[3]));
    } else {
        for (int i = 0; i < 4; i++)
            if (row < rows && col + i < cols) X[row * cols + col + i] = v[i];
    }
}

// Three changes. A thread's 8 columns are two groups of 4, 64 apart: then 8 lanes read 8 neighbouring float4, which
// covers every bank once. As is stored transposed, [k][row], so that a thread's rows are neighbours too. And its rows
// are PAD = 4 floats longer: lanes that write As[k][r] and As[k + 4][r] then hit banks 16 apart instead of the same.
template <bool WHOLE>
__global__ void __launch_bounds__(256)
vectorised(int M, int N, int K, global<const float> A, global<const float> B, global<float> C) {
    constexpr int BM = 128, BN = 128, BK = 8, PAD = 4, LDA = BM + PAD;
    __align__(16) __shared__ float tile_a[BK * LDA], tile_b[BK * BN];
    shared<float> As = tile_a, Bs = tile_b;
    int t = threadIdx.x, tx = t % 16, ty = t / 16;
    int a_row = t / 2, a_k = t % 2 * 4;    // 128 rows x 2 groups of 4 along K: one float4 of A for each thread
    int b_k = t / 32, b_col = t % 32 * 4;  // 8 rows x 32 groups of 4 along N
    int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
    float sum[8][8] = {};
    for (int k0 = 0; k0 < K; k0 += BK) {
        float4 a4 = four_at<WHOLE>(A, row0 + a_row, k0 + a_k, M, K);
        As[(a_k + 0) * LDA + a_row] = a4.x;
        As[(a_k + 1) * LDA + a_row] = a4.y;
        As[(a_k + 2) * LDA + a_row] = a4.z;
        As[(a_k + 3) * LDA + a_row] = a4.w;
        store4(Bs, b_k * BN + b_col, four_at<WHOLE>(B, k0 + b_k, col0 + b_col, K, N));
        __syncthreads();
        for (int k = 0; k < BK; k++) {
            alignas(16) float a[8], b[8];
            for (int half = 0; half < 2; half++) {
                *(float4*)(a + 4 * half) = load4(As, k * LDA + half * 64 + ty * 4);
                *(float4*)(b + 4 * half) = load4(Bs, k * BN + half * 64 + tx * 4);
            }
            for (int i = 0; i < 8; i++)
                for (int j = 0; j < 8; j++) sum[i][j] += a[i] * b[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < 8; i++)
        for (int half = 0; half < 2; half++)
            put_four<WHOLE>(C, row0 + i / 4 * 64 + ty * 4 + i % 4, col0 + half * 64 + tx * 4, M, N, sum[i] + 4 * half);
}

// ------------------------------------------------------------------------------------------------- rung 7: warp tiles

// Two ideas. First, warp tiles: a warp owns 64 x 32 of C instead of two stripes of 8 x 128, so its lanes need
// 64 + 32 elements for each k instead of 16 + 128. Second, double buffering: there are two tiles of A and B.
// While the warps work on one, the elements of the next are in flight from global memory into registers; they
// are stored in the other tile after the work, and one barrier per step is enough.
//
//     step k       global -> registers (k+1)    FMAs on buffer k%2    registers -> buffer (k+1)%2    barrier
template <bool WHOLE>
__global__ void __launch_bounds__(256, 2)  // two blocks on a multiprocessor: at most 128 registers per thread
warp_tiles(int M, int N, int K, global<const float> A, global<const float> B, global<float> C) {
    constexpr int BM = 128, BN = 128, BK = 8, PAD = 4, LDA = BM + PAD;
    __align__(16) __shared__ float tile_a[2 * BK * LDA], tile_b[2 * BK * BN];
    int t = threadIdx.x, warp = t / 32, lane = t % 32;
    int a_row = t / 2, a_k = t % 2 * 4, b_k = t / 32, b_col = t % 32 * 4;
    int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
    int my_row = warp / 4 * 64 + lane / 4 * 4;  // 2 x 4 warps of 64 x 32, in which 8 x 4 lanes of (4 + 4) x (4 + 4)
    int my_col = warp % 4 * 32 + lane % 4 * 4;
    float sum[8][8] = {};
    float4 next_a, next_b;
    auto fetch = [&](int k0) {
        next_a = four_at<WHOLE>(A, row0 + a_row, k0 + a_k, M, K);
        next_b = four_at<WHOLE>(B, k0 + b_k, col0 + b_col, K, N);
    };
    auto put = [&](int buffer) {
        shared<float> As = tile_a + buffer * BK * LDA, Bs = tile_b + buffer * BK * BN;
        As[(a_k + 0) * LDA + a_row] = next_a.x;
        As[(a_k + 1) * LDA + a_row] = next_a.y;
        As[(a_k + 2) * LDA + a_row] = next_a.z;
        As[(a_k + 3) * LDA + a_row] = next_a.w;
        store4(Bs, b_k * BN + b_col, next_b);
    };
    fetch(0);
    put(0);
    __syncthreads();
    for (int k0 = 0, now = 0; k0 < K; k0 += BK, now ^= 1) {
        bool more = k0 + BK < K;
        if (more) fetch(k0 + BK);
        shared<float> As = tile_a + now * BK * LDA, Bs = tile_b + now * BK * BN;
#pragma unroll
        for (int k = 0; k < BK; k++) {
            alignas(16) float a[8], b[8];
            *(float4*)a = load4(As, k * LDA + my_row);
            *(float4*)(a + 4) = load4(As, k * LDA + my_row + 32);
            *(float4*)b = load4(Bs, k * BN + my_col);
            *(float4*)(b + 4) = load4(Bs, k * BN + my_col + 16);
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) sum[i][j] += a[i] * b[j];
        }
        if (more) put(now ^ 1);  // no thread reads that buffer: all have passed the last step's barrier
        __syncthreads();
    }
    for (int i = 0; i < 8; i++)
        for (int half = 0; half < 2; half++)
            put_four<WHOLE>(C, row0 + my_row + i / 4 * 32 + i % 4, col0 + my_col + half * 16, M, N, sum[i] + 4 * half);
}

// ------------------------------------------------------------------------------------------------------ the host's part

// A tile of C is one block: rows of tiles in y, columns in x.
static dim3 tiles(int M, int N, int BM, int BN) { return dim3((N + BN - 1) / BN, (M + BM - 1) / BM); }

extern "C" const char* run_matmul(int rung, int M, int N, int K, const float* A, const float* B, float* C,
                                  void* stream) {
    bool whole = M % 128 == 0 && N % 128 == 0 && K % 8 == 0;
    switch (rung) {
        case 1: return launch(naive, tiles(M, N, 32, 32), dim3(32, 32), 0, stream, M, N, K, A, B, C);
        case 2: return launch(coalesced, tiles(M, N, 32, 32), dim3(32, 32), 0, stream, M, N, K, A, B, C);
        case 3: return launch(shared_tiles, tiles(M, N, 32, 32), dim3(32, 32), 0, stream, M, N, K, A, B, C);
        case 4: return launch(coarsened_1d, tiles(M, N, 64, 64), dim3(512), 0, stream, M, N, K, A, B, C);
        case 5: return launch(coarsened_2d, tiles(M, N, 128, 128), dim3(256), 0, stream, M, N, K, A, B, C);
        case 6:
            return launch(whole ? vectorised<true> : vectorised<false>, tiles(M, N, 128, 128), dim3(256), 0, stream, M,
                          N, K, A, B, C);
        case 7:
            return launch(whole ? warp_tiles<true> : warp_tiles<false>, tiles(M, N, 128, 128), dim3(256), 0, stream, M,
                          N, K, A, B, C);
    }
    return "matmul_ladder.cu has rungs 1 to 7";
}
