// Matrix multiplication in CUDA: from one thread per element to 64 elements per thread.
//
// Problem. C = A B with A [M, K], B [K, N] and C [M, N] takes M N K multiply-adds (FMAs). The
// simplest kernel loads two floats for each of them. In fp32 an H100 can do 33e12 FMAs per second,
// but its memory (HBM) delivers only 0.84e12 floats per second. Without caches the FMA units would
// compute in one of 80 cycles and wait in the others.
//
// Idea. Load a value once and use it many times, from ever nearer memories:
//
//                                                               floats loaded per FMA
//                                                               shared_tiles    register_tiles
//     global memory    A, B, C      80 GB, all threads
//         |                         to As and Bs                1/32 + 1/32     1/128 + 1/128
//     shared memory    As, Bs       8 KB, one thread block
//         |                         to a and b                  1 + 1           1/8 + 1/8
//     registers        a, b, sum    one thread
//         |
//     FMA units        sum += a * b
//
// Five kernels, one idea each:
//
//     vector_add        what a kernel is: one thread per element, and a guard at the end
//     naive             one thread per element of C; the threads of a warp read down a column
//     coalesced         x and y exchanged: the threads of a warp read along a row
//     shared_tiles      a block loads a tile once for all its threads
//     register_tiles    a thread computes 8 x 8 elements of C
//
// Sources: Volkov & Demmel 2008 (register tiles); Williams et al. 2009 (roofline); Boehm 2022, "How
// to optimize a CUDA matmul kernel".
//
//     nvcc -O3 -arch=native -o matmul matmul.cu -lcublas && ./matmul
//     ./matmul --size 8192 8192 8192      (without cuBLAS: -DHAS_CUBLAS=0, not -lcublas)
//
// Without a GPU, g++ builds the same kernels, and a header runs them thread by thread on the CPU.
// C++ has no <<<grid, block>>>, so sed writes each launch as a macro of that header:
//
//     sed -E 's/(\w+)<<<(.*)>>>\(/LAUNCH(\1, \2, /' matmul.cu | g++ -x c++ -std=c++17 -O1
//         -U_FORTIFY_SOURCE -include in_depth/cuda_on_cpu.h -o matmul - && ./matmul
//
// Each kernel's result is checked, a matmul's in double (a large C in part). On a GPU they are also
// timed, matmuls beside cuBLAS. The last line is PASS, or the exit code is 1 (2: a wrong option).

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#ifdef __CUDACC__
constexpr bool ON_GPU = true;
#if !defined(HAS_CUBLAS) && __has_include(<cublas_v2.h>)
#include <cublas_v2.h>
#define HAS_CUBLAS 1
#endif
#else
constexpr bool ON_GPU = false;  // cuda_on_cpu.h gives CUDA's words their meaning
#endif
#ifndef HAS_CUBLAS
#define HAS_CUBLAS 0
#endif

// -------------------------------------------------------------------------------------------------
// vector_add: one thread per element
// -------------------------------------------------------------------------------------------------

// A kernel is a function that many threads run at the same time, each with its own threadIdx.
// Threads are grouped in blocks (here of 256), and the blocks form a grid. The grid is rounded up,
// so the last block may extend past the end of the vector: hence the guard.
__global__ void vector_add(int n, const float* __restrict__ a, const float* __restrict__ b,
                           float* __restrict__ c) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

// -------------------------------------------------------------------------------------------------
// naive and coalesced: one thread per element of C
// -------------------------------------------------------------------------------------------------

// The threads of a block are numbered with x first, and 32 consecutive ones form a warp. The 32
// lanes of a warp execute the same instruction at the same time. When they load, memory delivers
// every 32-byte sector that contains one of the 32 addresses.
//
// Here x counts rows: the lanes read A[row][k] of 32 rows, which lie in 32 sectors, and use 4 bytes
// of each. They all read the same B[k][col]: 1 sector. Together 33 sectors for 32 FMAs.
__global__ void naive(int M, int N, int K, const float* __restrict__ A,
                      const float* __restrict__ B, float* __restrict__ C) {
    int row = blockIdx.y * 32 + threadIdx.x;
    int col = blockIdx.x * 32 + threadIdx.y;
    if (row >= M || col >= N) return;
    float sum = 0;
    for (int k = 0; k < K; k++) sum += A[row * K + k] * B[k * N + col];
    C[row * N + col] = sum;
}

// The same with x and y exchanged. The lanes share a row of A: 1 sector. In B they read 32
// neighbours: 128 bytes, 4 sectors, all of them used. Together 5 sectors instead of 33, and storing
// C takes 4 instead of 32. Such an access is called coalesced.
__global__ void coalesced(int M, int N, int K, const float* __restrict__ A,
                          const float* __restrict__ B, float* __restrict__ C) {
    // --- exercise 9.1: the element of this thread, so that a warp reads and writes neighbours ---
    int row = blockIdx.y * 32 + threadIdx.y;
    int col = blockIdx.x * 32 + threadIdx.x;
    // --- end exercise ---
    if (row >= M || col >= N) return;
    float sum = 0;
    for (int k = 0; k < K; k++) sum += A[row * K + k] * B[k * N + col];
    C[row * N + col] = sum;
}

// -------------------------------------------------------------------------------------------------
// shared_tiles: load a tile once for all threads of a block
// -------------------------------------------------------------------------------------------------

// X[row][col], or 0 outside X. A tile that extends past the edge of a matrix is filled with zeros,
// which add nothing. Both tiles need them: with zeros in only one, 0 would be multiplied by what
// lies in memory behind the other matrix, and 0 * NaN is NaN.
__device__ inline float load_or_zero(const float* __restrict__ X, int row, int col, int rows,
                                     int cols) {
    return row < rows && col < cols ? X[row * cols + col] : 0.0f;
}

// A block of 32 x 32 threads computes a tile of 32 x 32 elements of C, for which it needs 32 rows
// of A and 32 columns of B. It walks along K in steps of 32. In each step, every thread loads one
// element of A and one of B into shared memory, and then does 32 FMAs from there.
//
// Shared memory has 32 banks, each 4 bytes wide. The lanes of a warp read the same element of As,
// which is a broadcast, and 32 neighbours in Bs, which lie in 32 different banks. Either load takes
// one wavefront. Different addresses in one bank are a bank conflict and take a wavefront each.
__global__ void shared_tiles(int M, int N, int K, const float* __restrict__ A,
                             const float* __restrict__ B, float* __restrict__ C) {
    constexpr int T = 32;
    __shared__ float As[T][T];
    __shared__ float Bs[T][T];
    int x = threadIdx.x;
    int y = threadIdx.y;
    int row = blockIdx.y * T + y;
    int col = blockIdx.x * T + x;
    float sum = 0;
    // --- exercise 9.2: walk along K: load a tile of A and one of B, wait, multiply, wait ---
    for (int k0 = 0; k0 < K; k0 += T) {
        As[y][x] = load_or_zero(A, row, k0 + x, M, K);
        Bs[y][x] = load_or_zero(B, k0 + y, col, K, N);
        __syncthreads();  // no thread reads the tiles before all have written them
        for (int k = 0; k < T; k++) sum += As[y][k] * Bs[k][x];
        __syncthreads();  // no thread overwrites the tiles before all have read them
    }
    // --- end exercise ---
    if (row < M && col < N) C[row * N + col] = sum;
}

// -------------------------------------------------------------------------------------------------
// register_tiles: 8 x 8 elements of C per thread
// -------------------------------------------------------------------------------------------------

// shared_tiles loads two floats from shared memory per FMA. Shared memory delivers 32 floats per
// cycle to a multiprocessor, whose FMA units could use 256. A thread that computes 8 x 8 elements
// loads 8 floats of A and 8 of B and multiplies each with each: 16 loads for 64 FMAs. The 64 sums
// stay in registers.
constexpr int BM = 128, BN = 128;  // tile of C of a block
constexpr int BK = 8;              // step along K
constexpr int TM = 8, TN = 8;      // elements of C of a thread
constexpr int THREADS = 256;

// Which elements belong to a thread? Each of 8 warps, 4 x 2, computes 32 x 64 elements of the tile.
// Its lanes, 4 x 8, own every 4th row and every 8th column of them. So the lanes read 4 neighbours
// of As and 8 of Bs, without bank conflicts, and write 8 neighbours of C, a full sector.
__device__ inline int thread_row(int t, int i) {
    int warp = t / 32;
    int lane = t % 32;
    return warp / 2 * 32 + i * 4 + lane / 8;
}

__device__ inline int thread_col(int t, int j) {
    int warp = t / 32;
    int lane = t % 32;
    return warp % 2 * 64 + j * 8 + lane % 8;
}

// As is stored transposed, so that the rows of one k are neighbours. A warp loads 4 rows x 8
// columns of A, full sectors, and writes them to 8 rows of As. If these were 128 long, all 8 would
// begin in the same bank. With 132, each begins 4 banks further, and 4 x 8 floats fill 32 banks.
constexpr int AS_STRIDE = BM + 4;

// __launch_bounds__ tells the compiler how many threads of a block share the registers.
__global__ void __launch_bounds__(THREADS)
register_tiles(int M, int N, int K, const float* __restrict__ A, const float* __restrict__ B,
               float* __restrict__ C) {
    __shared__ float As[BK][AS_STRIDE];
    __shared__ float Bs[BK][BN];
    int t = threadIdx.x;
    int row0 = blockIdx.y * BM;
    int col0 = blockIdx.x * BN;
    float sum[TM][TN] = {};
    for (int k0 = 0; k0 < K; k0 += BK) {
        for (int i = t; i < BM * BK; i += THREADS) {
            As[i % BK][i / BK] = load_or_zero(A, row0 + i / BK, k0 + i % BK, M, K);
        }
        for (int i = t; i < BK * BN; i += THREADS) {
            Bs[i / BN][i % BN] = load_or_zero(B, k0 + i / BN, col0 + i % BN, K, N);
        }
        __syncthreads();
        // --- exercise 9.3: for each k of the step, 8 + 8 floats from shared memory and 64 FMAs ---
        for (int k = 0; k < BK; k++) {
            float a[TM];
            float b[TN];
            for (int i = 0; i < TM; i++) a[i] = As[k][thread_row(t, i)];
            for (int j = 0; j < TN; j++) b[j] = Bs[k][thread_col(t, j)];
            for (int i = 0; i < TM; i++) {
                for (int j = 0; j < TN; j++) sum[i][j] += a[i] * b[j];
            }
        }
        // --- end exercise ---
        __syncthreads();
    }
    for (int i = 0; i < TM; i++) {
        for (int j = 0; j < TN; j++) {
            int row = row0 + thread_row(t, i);
            int col = col0 + thread_col(t, j);
            if (row < M && col < N) C[row * N + col] = sum[i][j];
        }
    }
}

// -------------------------------------------------------------------------------------------------
// Launches
// -------------------------------------------------------------------------------------------------

enum Kernel { CUBLAS, NAIVE, COALESCED, SHARED_TILES, REGISTER_TILES };
const char* const NAMES[] = {"cublas", "naive", "coalesced", "shared_tiles", "register_tiles"};

int ceil_div(int n, int size) { return (n + size - 1) / size; }

void launch_vector_add(int n, const float* a, const float* b, float* c) {
    vector_add<<<ceil_div(n, 256), 256>>>(n, a, b, c);
}

void cublas_matmul(int M, int N, int K, const float* A, const float* B, float* C) {
#if HAS_CUBLAS
    static cublasHandle_t handle = nullptr;
    if (!handle) cublasCreate(&handle);
    const float one = 1;
    const float zero = 0;
    // cuBLAS stores matrices by columns, so it sees ours transposed, and Cᵀ = Bᵀ Aᵀ.
    cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, N, M, K, &one, B, N, A, K, &zero, C, N);
#endif
}

void matmul(int kernel, int M, int N, int K, const float* A, const float* B, float* C) {
    dim3 grid(ceil_div(N, 32), ceil_div(M, 32));
    dim3 block(32, 32);
    dim3 grid_of_large_tiles(ceil_div(N, BN), ceil_div(M, BM));
    switch (kernel) {
        case CUBLAS:
            cublas_matmul(M, N, K, A, B, C);
            break;
        case NAIVE:
            naive<<<grid, block>>>(M, N, K, A, B, C);
            break;
        case COALESCED:
            coalesced<<<grid, block>>>(M, N, K, A, B, C);
            break;
        case SHARED_TILES:
            shared_tiles<<<grid, block>>>(M, N, K, A, B, C);
            break;
        case REGISTER_TILES:
            register_tiles<<<grid_of_large_tiles, THREADS>>>(M, N, K, A, B, C);
            break;
    }
}

// -------------------------------------------------------------------------------------------------
// The check
// -------------------------------------------------------------------------------------------------

// Exit with CUDA's message if there is one. A launch returns at once, so the errors of a kernel
// appear later, when the host waits for it.
void check_cuda(const char* what) {
    cudaError_t error = cudaDeviceSynchronize();
    if (error == cudaSuccess) error = cudaGetLastError();
    if (error == cudaSuccess) return;
    printf("%s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}

// An array on the GPU between two margins of NaN: a kernel that reads outside it computes NaN, and
// one that writes outside it is noticed.
struct DeviceArray {
    static constexpr size_t MARGIN = 1024;
    size_t count;
    float* memory = nullptr;

    explicit DeviceArray(size_t count) : count(count) {
        size_t bytes = (count + 2 * MARGIN) * sizeof(float);
        cudaMalloc((void**)&memory, bytes);
        check_cuda("cannot allocate memory on a GPU");
        cudaMemset(memory, 0xff, bytes);  // four bytes of ones are a NaN
    }
    explicit DeviceArray(const std::vector<float>& values) : DeviceArray(values.size()) {
        cudaMemcpy(data(), values.data(), count * sizeof(float), cudaMemcpyHostToDevice);
    }
    ~DeviceArray() { cudaFree(memory); }

    float* data() { return memory + MARGIN; }

    std::vector<float> with_margins() {  // the copy waits until the kernels before it are done
        std::vector<float> all(count + 2 * MARGIN);
        cudaMemcpy(all.data(), memory, all.size() * sizeof(float), cudaMemcpyDeviceToHost);
        return all;
    }
};

std::vector<float> random_values(size_t count, unsigned seed) {
    std::vector<float> values(count);
    for (float& x : values) {
        seed = seed * 1664525u + 1013904223u;  // a linear congruential generator
        x = (seed >> 8) / float(1 << 23) - 1;  // in [-1, 1)
    }
    return values;
}

// The largest error in C (with margins), relative to the sum of |a b| of its row and column. Of a
// large C some 5,000 elements are checked, spread over columns: their distance and N are coprime.
double max_error(const std::vector<float>& C, const std::vector<float>& A,
                 const std::vector<float>& B, int M, int N, int K) {
    size_t count = size_t(M) * N;
    size_t step = count <= 65536 ? 1 : count / 5003;
    while (std::gcd(step, size_t(N)) > 1) step++;
    double worst = 0;
    for (size_t i = 0; i < count; i += step) {
        double sum = 0;
        double size = 1e-30;
        for (int k = 0; k < K; k++) {
            double term = double(A[i / N * K + k]) * B[size_t(k) * N + i % N];
            sum += term;
            size += std::fabs(term);
        }
        double error = std::fabs(C[DeviceArray::MARGIN + i] - sum) / size;
        if (!(error <= worst)) worst = error;  // with `error > worst`, a NaN would pass
        if (std::isnan(worst)) return worst;
    }
    for (size_t i = 0; i < DeviceArray::MARGIN; i++) {
        if (!std::isnan(C[i])) return INFINITY;  // written in front of C
        if (!std::isnan(C[DeviceArray::MARGIN + count + i])) return INFINITY;  // or behind it
    }
    return worst;
}

int failures = 0;

bool is_right(double error) {  // fp32 rounds by 6e-8; a missing term is far above 1e-6
    if (error <= 1e-6) return true;
    printf("   WRONG: 1e-6 is allowed");
    failures++;
    return false;
}

struct Seconds {
    double ours;
    double theirs;
};

// Median seconds of one call of each of two functions. They alternate, so that whatever slows the
// GPU for a while slows both.
template <class Ours, class Theirs>
Seconds time_pair(Ours ours, Theirs theirs) {
    Seconds median = {NAN, NAN};
#ifdef __CUDACC__
    constexpr int CALLS = 20;
    std::vector<float> ms_ours(CALLS);
    std::vector<float> ms_theirs(CALLS);
    cudaEvent_t event[3];
    for (cudaEvent_t& e : event) cudaEventCreate(&e);
    for (int i = -1; i < CALLS; i++) {  // the first pair warms up and is not counted
        cudaEventRecord(event[0]);      // the GPU notes the time when it reaches the event
        ours();
        cudaEventRecord(event[1]);
        theirs();
        cudaEventRecord(event[2]);
        check_cuda("timing");
        if (i < 0) continue;
        cudaEventElapsedTime(&ms_ours[i], event[0], event[1]);
        cudaEventElapsedTime(&ms_theirs[i], event[1], event[2]);
    }
    for (cudaEvent_t& e : event) cudaEventDestroy(e);
    std::sort(ms_ours.begin(), ms_ours.end());
    std::sort(ms_theirs.begin(), ms_theirs.end());
    median = {ms_ours[CALLS / 2] / 1e3, ms_theirs[CALLS / 2] / 1e3};
#endif
    return median;
}

void check_vector_add(int n, bool timed) {
    std::vector<float> a = random_values(n + 256, 1);  // longer than n, so that
    std::vector<float> b = random_values(n + 256, 2);  // a missing guard is noticed
    DeviceArray device_a(a);
    DeviceArray device_b(b);
    DeviceArray device_c(a.size());
    auto run = [&] { launch_vector_add(n, device_a.data(), device_b.data(), device_c.data()); };
    run();
    check_cuda("vector_add");
    std::vector<float> c = device_c.with_margins();
    int errors = !std::isnan(c[DeviceArray::MARGIN + n]);
    for (int i = 0; i < n; i++) errors += !(c[DeviceArray::MARGIN + i] == a[i] + b[i]);
    printf("%-16s%22d%12.2g", "vector_add", n, double(errors));
    if (is_right(errors) && timed) {
        printf("%12.2f TB/s", 12e-12 * n / time_pair(run, run).ours);
    }
    printf("\n");
}

void check_matmul(int M, int N, int K, bool timed) {
    std::vector<float> A = random_values(size_t(M) * K, 3);
    std::vector<float> B = random_values(size_t(K) * N, 4);
    DeviceArray device_a(A);
    DeviceArray device_b(B);
    DeviceArray cublas_c(timed ? size_t(M) * N : 0);
    for (int kernel = HAS_CUBLAS ? CUBLAS : NAIVE; kernel <= REGISTER_TILES; kernel++) {
        DeviceArray device_c(size_t(M) * N);  // NaN: an element that is not written is noticed
        auto run = [&] {
            matmul(kernel, M, N, K, device_a.data(), device_b.data(), device_c.data());
        };
        auto cublas = [&] {
            matmul(CUBLAS, M, N, K, device_a.data(), device_b.data(), cublas_c.data());
        };
        run();
        check_cuda(NAMES[kernel]);
        double error = max_error(device_c.with_margins(), A, B, M, N, K);
        printf("%-16s%8d %6d %6d%12.2g", NAMES[kernel], M, N, K, error);
        if (is_right(error) && timed) {  // verified first, then timed
            Seconds seconds = time_pair(run, cublas);
            printf("%12.2f TFLOP/s", 2e-12 * M * N * K / seconds.ours);
            if (HAS_CUBLAS) printf("%8.1f%% of cuBLAS", 100 * seconds.theirs / seconds.ours);
        }
        printf("\n");
    }
}

// -------------------------------------------------------------------------------------------------
// main
// -------------------------------------------------------------------------------------------------

// An integer from 1 to 32768, so that offsets fit into 32 bits; 0 for anything else.
int parse_size(const char* text) {
    char* end = nullptr;
    double value = strtod(text, &end);
    bool right = value >= 1 && value <= 32768 && value == int(value) && *end == 0;
    return right ? int(value) : 0;
}

int main(int argc, char** argv) {
    setvbuf(stdout, nullptr, _IOLBF, 0);  // a line appears when it is printed, also in a pipe
    int size[3] = {4096, 4096, 4096};
    const char* wrong = nullptr;
    if (argc > 1 && (argc != 5 || strcmp(argv[1], "--size"))) wrong = argv[1];
    for (int i = 0; i < 3 && argc > 1 && !wrong; i++) {
        size[i] = parse_size(argv[2 + i]);
        if (!size[i]) wrong = argv[2 + i];
    }
    if (wrong) {
        const char* usage = "the only option is --size M N K: three whole numbers from 1 to 32768";
        fprintf(stderr, "matmul: %s: %s\n", wrong, usage);
        return 2;
    }
    printf("%-16s%22s%12s\n", "kernel", "M      N      K", "error");
    if (argc == 1) {
        check_vector_add(1000, false);
        check_matmul(139, 263, 77, false);  // more than one tile, and no multiple of any
        check_matmul(1, 1, 1, false);
        if (ON_GPU) check_vector_add(1 << 28, true);
    }
    if (argc > 1 || ON_GPU) check_matmul(size[0], size[1], size[2], ON_GPU);
    if (failures) {
        printf("FAIL: %d of these are WRONG\n", failures);
        return 1;
    }
    printf("PASS\n");
    return 0;
}
