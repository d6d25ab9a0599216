// Chapter 9, the ground floor in CUDA: a matrix product, from one thread per number to 64 numbers per thread.
//
// The problem. C = A · B, with A [M, K], B [K, N], C [M, N], makes M·N·K multiply-adds (FMAs). The first product that
// one writes fetches two numbers for each of them. An H100 can do 33·10¹² FMAs in a second, but its memory delivers
// only 0.84·10¹² numbers of 4 bytes. Without caches its units would compute in one of 80 clocks, and wait in 79.
//
// The idea. Fetch a number once, use it often, from ever nearer places:
//
//     global memory     A, B, C: everybody's, 80 GB, far away
//         |                 a block of 256 threads fetches 128 x 8 of A and 8 x 128 of B       1/128 + 1/128 per FMA
//     shared memory     As, Bs: one block's, 8 KB, near
//         |                 a thread fetches 8 numbers of As and 8 of Bs                       1/8 + 1/8 per FMA
//     registers         a[8], b[8], sum[8][8]: one thread's, at hand                           nothing
//         |
//     FMA units         sum[i][j] += a[i] * b[j]
//
// Five kernels, one idea each, to be read from the top to the bottom:
//
//     vector_add        what a kernel is: one thread for each element, and a guard at the end
//     naive             one thread for each element of C; its neighbours ask for addresses that are far apart
//     coalesced         two words exchanged: neighbours ask for neighbours
//     shared_tiles      a block fetches a tile once for all its threads         numbers from global memory: 1/32 + 1/32
//     register_tiles    a thread computes 8 x 8 elements                        numbers from shared memory: 1/8 + 1/8
//
// Each is compared with a plain product in double on the host, element by element, and then timed beside cuBLAS,
// NVIDIA's own. (Roofline: Williams et al. 2009. Register tiles: Volkov & Demmel 2008.)
//
//     nvcc -O3 -arch=native -o matmul matmul.cu -lcublas && ./matmul    on a GPU; without cuBLAS's header leave -lcublas out
//     ./matmul --size 8192 8192 8192                          another size
//     g++ -x c++ -std=c++17 -O1 -U_FORTIFY_SOURCE -include in_depth/cuda_on_cpu.h -o matmul matmul.cu && ./matmul
//                                                             without a GPU: the same kernels, thread by thread
//
// The last line is PASS; or the program says what is off, and ends with exit code 1. (A wrong option: exit code 2.)
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#ifdef __CUDACC__  // nvcc, for a GPU. (Else cuda_on_cpu.h says what these words mean.)
template <class T>
using global = T* __restrict__;  // a pointer into global memory; __restrict__: nobody else writes what it points to
template <class T>
using shared = T*;  // a pointer into shared memory
#define LAUNCH(kernel, grid, block, ...) kernel<<<grid, block>>>(__VA_ARGS__)  // CUDA's own words for a launch
constexpr bool ON_GPU = true;
#if !defined(HAS_CUBLAS) && __has_include(<cublas_v2.h>)
#include <cublas_v2.h>
#define HAS_CUBLAS 1
#endif
#else
constexpr bool ON_GPU = false;
#endif
#ifndef HAS_CUBLAS
#define HAS_CUBLAS 0
#endif

// ------------------------------------------------------------------------------------------------------- vector_add

// A *kernel* is a function that many threads run at one time, each with other values of `blockIdx` and `threadIdx`.
// Threads come in *blocks* (here of 256), blocks in a *grid*. The grid covers n with whole blocks, so that the last one
// may hang over the end: hence the `if`.
__global__ void vector_add(int n, global<const float> a, global<const float> b, global<float> c) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

// ------------------------------------------------------------------------------------------------------------ naive

// One thread, one element of C. Threads of a block are numbered with x first, and 32 in a row are a *warp*: its *lanes*
// have x = 0 .. 31 and one y, and run the same instruction at the same time. When they load, memory is asked for 32
// addresses at once, and answers with all the *sectors* of 32 bytes in which they lie.
//
// Here x counts rows. The lanes load A[row, k] of 32 rows: 32 sectors, of each of which 4 bytes are used. B[k, col] is
// one number for all of them: 1 sector. 33 sectors for 32 FMAs.
__global__ void naive(int M, int N, int K, global<const float> A, global<const float> B, global<float> C) {
    int row = blockIdx.y * 32 + threadIdx.x;
    int col = blockIdx.x * 32 + threadIdx.y;
    if (row >= M || col >= N) return;
    float sum = 0;
    for (int k = 0; k < K; k++) sum += A[row * K + k] * B[k * N + col];
    C[row * N + col] = sum;
}

// -------------------------------------------------------------------------------------------------------- coalesced

// The same, but x counts columns. The lanes share a row: one number of A for all, 1 sector. In B they read 32
// neighbours: 128 bytes, 4 sectors, all of them used. 33 have become 5, and the writes of C 4 instead of 32.
__global__ void coalesced(int M, int N, int K, global<const float> A, global<const float> B, global<float> C) {
    // --- exercise 9.1: which element is mine, so that the lanes of a warp read and write neighbours? ---
    int row = blockIdx.y * 32 + threadIdx.y;
    int col = blockIdx.x * 32 + threadIdx.x;
    // --- end exercise ---
    if (row >= M || col >= N) return;
    float sum = 0;
    for (int k = 0; k < K; k++) sum += A[row * K + k] * B[k * N + col];
    C[row * N + col] = sum;
}

// ----------------------------------------------------------------------------------------------------- shared_tiles

// X[row, col], or 0 where there is none: a tile that hangs over the edge is filled up with zeros, which add nothing.
__device__ inline float at(global<const float> X, int row, int col, int rows, int cols) {
    return row < rows && col < cols ? X[row * cols + col] : 0.0f;
}

// 32 x 32 threads compute 32 x 32 elements of C. Each of these needs a row of A and a column of B, and 32 threads need
// the same row. So the block walks along K in steps of 32, and in each of them
//
//     fetches     32 x 32 of A and of B into shared memory, each thread one element of both
//     waits       for all its threads: what I am going to read, others have written
//     multiplies  each thread a row of As by a column of Bs: 32 FMAs, and nothing from global memory
//     waits       again: what I am going to overwrite, others may still be reading
//
// Lanes read As at one address (which is sent to all of them) and Bs at 32 neighbouring ones. Shared memory consists of
// 32 *banks*, 4 bytes wide: 32 neighbours lie on 32 banks and come in one turn. Two addresses on one bank take two.
__global__ void shared_tiles(int M, int N, int K, global<const float> A, global<const float> B, global<float> C) {
    constexpr int T = 32;
    __shared__ float tile_a[T * T], tile_b[T * T];
    shared<float> As = tile_a, Bs = tile_b;
    int x = threadIdx.x, y = threadIdx.y;
    int row = blockIdx.y * T + y, col = blockIdx.x * T + x;
    float sum = 0;
    // --- exercise 9.2: walk along K: fetch a tile of A and one of B, wait, multiply, wait ---
    for (int k0 = 0; k0 < K; k0 += T) {
        As[y * T + x] = at(A, row, k0 + x, M, K);
        Bs[y * T + x] = at(B, k0 + y, col, K, N);
        __syncthreads();  // nobody reads before all have written
        for (int k = 0; k < T; k++) sum += As[y * T + k] * Bs[k * T + x];
        __syncthreads();  // nobody writes the next tiles before all have read these
    }
    // --- end exercise ---
    if (row < M && col < N) C[row * N + col] = sum;
}

// --------------------------------------------------------------------------------------------------- register_tiles

// shared_tiles loads two numbers from shared memory for each FMA, and shared memory gives a multiprocessor 32 numbers
// in a clock, where its FMA units want 256. A thread that computes 8 x 8 elements of C loads 8 numbers of a column of A
// and 8 of a row of B, and multiplies each with each: 16 loads for 64 FMAs. Its 64 sums live in registers throughout.
constexpr int BM = 128, BN = 128, BK = 8, TM = 8, TN = 8, THREADS = 256;  // the block's tile, a step, a thread's tile

// Which elements of the tile are mine? 8 warps, 4 x 2, own 32 x 64 each; the 32 lanes of a warp, 4 x 8, own every 4th
// row and every 8th column of it. So the lanes read 4 neighbours of As and 8 of Bs: no two addresses on one bank; and
// write 8 neighbours of C, a whole sector.
__device__ inline int my_row(int t, int i) { return t / 64 * 32 + i * 4 + t % 32 / 8; }
__device__ inline int my_col(int t, int j) { return t / 32 % 2 * 64 + j * 8 + t % 8; }

// As is stored column by column, so that the rows of one k are neighbours. A warp fetches 4 rows x 8 numbers of A, whole
// sectors, and writes them to 8 columns of As: were a column 128 long, all 8 would begin on one bank. With LDA = 132
// each begins 4 banks further, and 4 x 8 numbers fill the 32 banks.
constexpr int LDA = BM + 4;

__global__ void __launch_bounds__(THREADS)  // tells the compiler how many threads have to share the registers
register_tiles(int M, int N, int K, global<const float> A, global<const float> B, global<float> C) {
    __shared__ float tile_a[BK * LDA], tile_b[BK * BN];
    shared<float> As = tile_a, Bs = tile_b;
    int t = threadIdx.x, row0 = blockIdx.y * BM, col0 = blockIdx.x * BN;
    float sum[TM][TN] = {};
    for (int k0 = 0; k0 < K; k0 += BK) {
        for (int i = t; i < BM * BK; i += THREADS) As[i % BK * LDA + i / BK] = at(A, row0 + i / BK, k0 + i % BK, M, K);
        for (int i = t; i < BK * BN; i += THREADS) Bs[i] = at(B, k0 + i / BN, col0 + i % BN, K, N);
        __syncthreads();
        // --- exercise 9.3: for each k of this step, 8 + 8 numbers from shared memory and 64 FMAs ---
        for (int k = 0; k < BK; k++) {
            float a[TM], b[TN];
            for (int i = 0; i < TM; i++) a[i] = As[k * LDA + my_row(t, i)];
            for (int j = 0; j < TN; j++) b[j] = Bs[k * BN + my_col(t, j)];
            for (int i = 0; i < TM; i++)
                for (int j = 0; j < TN; j++) sum[i][j] += a[i] * b[j];
        }
        // --- end exercise ---
        __syncthreads();
    }
    for (int i = 0; i < TM; i++)
        for (int j = 0; j < TN; j++) {
            int row = row0 + my_row(t, i), col = col0 + my_col(t, j);
            if (row < M && col < N) C[row * N + col] = sum[i][j];
        }
}

// -------------------------------------------------------------------------------------------------- the host's part

static int blocks(int n, int size) { return (n + size - 1) / size; }  // rounded up: the last may hang over the edge
enum { CUBLAS, NAIVE, COALESCED, SHARED_TILES, REGISTER_TILES };
static const char* const NAMES[] = {"cublas", "naive", "coalesced", "shared_tiles", "register_tiles"};

static void product(int kernel, int M, int N, int K, const float* A, const float* B, float* C) {
    dim3 tiles(blocks(N, 32), blocks(M, 32)), threads(32, 32);
    if (kernel == NAIVE) LAUNCH(naive, tiles, threads, M, N, K, A, B, C);
    if (kernel == COALESCED) LAUNCH(coalesced, tiles, threads, M, N, K, A, B, C);
    if (kernel == SHARED_TILES) LAUNCH(shared_tiles, tiles, threads, M, N, K, A, B, C);
    if (kernel == REGISTER_TILES)
        LAUNCH(register_tiles, dim3(blocks(N, BN), blocks(M, BM)), dim3(THREADS), M, N, K, A, B, C);
#if HAS_CUBLAS
    static cublasHandle_t handle = nullptr;
    if (!handle) cublasCreate(&handle);
    const float one = 1, zero = 0;
    if (kernel == CUBLAS)  // it stores matrices column by column, so it sees ours transposed: Cᵀ = Bᵀ · Aᵀ
        cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, N, M, K, &one, B, N, A, K, &zero, C, N);
#endif
}

// Stop with what CUDA says, if it says anything. A kernel's errors come late: when somebody waits for it.
static void check(const char* what) {
    cudaError_t error = cudaDeviceSynchronize();
    if (error == cudaSuccess) error = cudaGetLastError();
    if (error == cudaSuccess) return;
    printf("%s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}
// A matrix on the GPU in the middle of a field of NaN: who reads beside it computes NaN, who writes beside it is seen.
struct Matrix {
    static constexpr size_t MARGIN = 1024;
    size_t count;
    float* field = nullptr;
    explicit Matrix(size_t count) : count(count) {
        cudaMalloc((void**)&field, (count + 2 * MARGIN) * sizeof(float));
        check("no memory of a GPU to work in");
        cudaMemset(field, 0xff, (count + 2 * MARGIN) * sizeof(float));  // four bytes of ones are a NaN
    }
    explicit Matrix(const std::vector<float>& numbers) : Matrix(numbers.size()) {
        cudaMemcpy(data(), numbers.data(), count * sizeof(float), cudaMemcpyHostToDevice);
    }
    ~Matrix() { cudaFree(field); }
    float* data() { return field + MARGIN; }
    std::vector<float> numbers() {  // with the margins. The copy waits until the kernels before it have ended
        std::vector<float> all(count + 2 * MARGIN);
        cudaMemcpy(all.data(), field, all.size() * sizeof(float), cudaMemcpyDeviceToHost);
        return all;
    }
};

static std::vector<float> random_numbers(size_t count, unsigned seed) {
    std::vector<float> numbers(count);
    for (float& x : numbers) {
        seed = seed * 1664525u + 1013904223u;  // a linear congruential generator, as in Numerical Recipes
        x = (seed >> 8) / float(1 << 23) - 1;  // in [-1, 1)
    }
    return numbers;
}

// Seconds of one call of each of two: the medians of 20 turns, after one that does not count. As they take turns,
// whatever slows the chip for a while slows both.
template <class Run, class Other>
static void seconds(Run run, Other other, double* of_run, double* of_other) {
    std::vector<float> milliseconds[2] = {std::vector<float>(20), std::vector<float>(20)};
#ifdef __CUDACC__  // threads that a CPU runs one after the other say nothing about time
    cudaEvent_t event[3];
    for (cudaEvent_t& e : event) cudaEventCreate(&e);
    for (int i = -1; i < 20; i++) {
        cudaEventRecord(event[0]);  // a launch returns at once; the GPU notes the time when it comes to the event
        run();
        cudaEventRecord(event[1]);
        other();
        cudaEventRecord(event[2]);
        check("timing");
        for (int j = 0; j < 2 && i >= 0; j++) cudaEventElapsedTime(&milliseconds[j][i], event[j], event[j + 1]);
    }
    for (cudaEvent_t& e : event) cudaEventDestroy(e);
#endif
    for (std::vector<float>& each : milliseconds) std::sort(each.begin(), each.end());
    *of_run = milliseconds[0][10] / 1e3, *of_other = milliseconds[1][10] / 1e3;
}

// The largest error in C, as a part of Σ |a·b| of its row and column: of all elements, or of 5,000 of a large matrix.
static double error_of(const std::vector<float>& C, const std::vector<float>& A, const std::vector<float>& B, int M,
                       int N, int K) {
    size_t count = size_t(M) * N, step = count <= 65536 ? 1 : count / 5003;
    double worst = 0;
    for (size_t i = 0; i < count; i += step) {
        double sum = 0, size = 1e-30;
        for (int k = 0; k < K; k++) {
            double term = double(A[i / N * K + k]) * B[size_t(k) * N + i % N];
            sum += term;
            size += std::fabs(term);
        }
        double error = std::fabs(C[Matrix::MARGIN + i] - sum) / size;
        if (!(error <= worst)) worst = error;  // the other way round, `error > worst`, a NaN would pass
        if (std::isnan(worst)) return worst;
    }
    for (size_t i = 0; i < Matrix::MARGIN; i++)
        if (!std::isnan(C[i]) || !std::isnan(C[Matrix::MARGIN + count + i])) return INFINITY;  // written beside C
    return worst;
}

static int wrong = 0;
static bool is_right(double error) {  // fp32 rounds by 6e-8; one number left out is far above 1e-6
    if (error <= 1e-6) return true;
    printf("   WRONG: 1e-6 is allowed");
    return !++wrong;
}

static void add_vectors(int n, bool timed) {
    std::vector<float> a = random_numbers(n + 256, 1), b = random_numbers(n + 256, 2);  // longer: who adds more is seen
    Matrix on_a(a), on_b(b), on_c(a.size());
    auto run = [&] { LAUNCH(vector_add, dim3(blocks(n, 256)), dim3(256), n, on_a.data(), on_b.data(), on_c.data()); };
    run();
    check("vector_add");
    std::vector<float> c = on_c.numbers();
    int off = !std::isnan(c[Matrix::MARGIN + n]);  // not ours
    for (int i = 0; i < n; i++) off += !(c[Matrix::MARGIN + i] == a[i] + b[i]);
    printf("%-16s%22d%12.2g", "vector_add", n, double(off));
    if (is_right(off) && timed) {
        double took, again;
        seconds(run, run, &took, &again);
        printf("%12.2f TB/s", 12e-12 * n / took);
    }
    printf("\n");
}

static void multiply(int M, int N, int K, bool timed) {
    std::vector<float> A = random_numbers(size_t(M) * K, 3), B = random_numbers(size_t(K) * N, 4);
    Matrix on_a(A), on_b(B), beside(timed ? size_t(M) * N : 0);
    for (int kernel = HAS_CUBLAS ? CUBLAS : NAIVE; kernel <= REGISTER_TILES; kernel++) {
        Matrix on_c(size_t(M) * N);  // NaN everywhere: what is not written cannot look right
        auto run = [&] { product(kernel, M, N, K, on_a.data(), on_b.data(), on_c.data()); };
        auto cublas = [&] { product(CUBLAS, M, N, K, on_a.data(), on_b.data(), beside.data()); };
        run();
        check(NAMES[kernel]);
        double error = error_of(on_c.numbers(), A, B, M, N, K);
        printf("%-16s%8d %6d %6d%12.2g", NAMES[kernel], M, N, K, error);
        if (is_right(error) && timed) {  // verified first, then timed, and cuBLAS in turn with each of them
            double took, theirs;
            seconds(run, cublas, &took, &theirs);
            printf("%12.2f TFLOP/s", 2e-12 * M * N * K / took);
            if (HAS_CUBLAS) printf("%8.1f%% of cuBLAS", 100 * theirs / took);
        }
        printf("\n");
    }
}

int main(int count, char** words) {
    setvbuf(stdout, nullptr, _IOLBF, 0);  // a line is out when it is printed, also into a pipe
    int size[3] = {4096, 4096, 4096};
    for (int i = 1; i < count; i++) {
        bool right = !strcmp(words[i], "--size");
        for (int& n : size) {
            char* end = nullptr;
            double value = right && ++i < count ? strtod(words[i], &end) : 0;
            n = value >= 1 && value <= 32768 ? int(value) : 0;  // offsets are 32 bits
            right = n && n == value && !*end;
        }
        if (right) continue;
        fprintf(stderr, "matmul: %s: there is one option, --size M N K: three whole numbers from 1 to 32768\n",
                i < count ? words[i] : "--size");
        return 2;
    }
    printf("%-16s%22s%12s\n", "kernel", "M      N      K", "error");
    if (count == 1) {
        add_vectors(1000, false);
        multiply(139, 263, 77, false);  // no multiple of any tile, and more than one of each
        multiply(1, 1, 1, false);
        if (ON_GPU) add_vectors(1 << 28, true);
    }
    if (count > 1 || ON_GPU) multiply(size[0], size[1], size[2], ON_GPU);
    printf(wrong ? "%d of these are WRONG\n" : "PASS\n", wrong);
    return wrong ? 1 : 0;
}
