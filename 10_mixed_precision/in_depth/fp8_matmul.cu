// Chapter 10: a product in 8 bits on Hopper, with scales for every 128 terms, and its sums taken out before they stall.
//
//     C[m, n] = sum over steps s of  sA[s, m] sB[s, n] · (sum over the 128 terms k of step s of A[m, k] B[n, k])
//
//     A [M, K] fp8, a scale for 1 x 128       B [N, K] e4m3, a scale for 128 x 128 (a weight) or 1 x 128 (x in Wgrad)
//     C [M, N] bf16 or fp32; M and N any, K a multiple of 16: what a last step lacks of 128 terms comes as zeros
//
// The problem. A scale that changes along K cannot be taken out of the whole sum. And the tensor core adds with about
// 14 bits (2412.19437, section 3.5.2): a sum of thousands of terms loses its last ones.
//
// The idea, one for both (section 3.3.2, figure 7b): two sums for each result. The tensor core adds 128 terms, four
// instructions of 32, in `part`; then the ordinary cores add part · sA · sB to `total`, in fp32, which is called
// promotion, and the next 128 begin from nothing.
//
//     producer      A0 B0 sA0 (sB0) | A1 B1 sA1 | ...         waits for "empty", orders, the copy engine signals "full"
//     consumer 1    wgmma 0 | promote 0 | wgmma 1 | promote 1 | ...          rows 0 to 63 of a tile of 128 x 128
//     consumer 2         wgmma 0 | promote 0 | wgmma 1 | promote 1           rows 64 to 127
//
// While one warpgroup promotes, the tensor cores work for the other: two of them are needed to keep these busy, and
// nobody has to arrange it. Two sums are also why a tile is half as wide as in rung 10 of chapter 09's ladder: 64 + 64
// registers of a thread, where that has 128.
//
// What bounds it. A step multiplies 128 x 128 x 128, 512 clocks of the fp8 tensor core (4096 multiply-adds a clock and
// multiprocessor), and fetches 32 KB: 64 bytes a clock, 132 of these blocks 8,448, and L2 of an H100 gives about 5,120.
// So at most 0.6 of the peak can be had without sharing tiles in a cluster (rung 11 of the ladder), or without more
// rows: of that the promotion takes nothing, 64 multiply-adds of 256 threads being 128 clocks of the ordinary cores.
//
// The rest is rung 10: barriers full and empty for each stage, blocks that stay and work through many tiles.
#include "ptx_fp8.h"

constexpr int BM = 128, BN = 128, STAGES = 4, STRIPE = 8;
constexpr int A_BYTES = BM * TILE, B_BYTES = BN * TILE;
struct Stage {  // 33 KB; the tiles begin at multiples of 1024 bytes, as the swizzle wants them
    Pair a[A_BYTES / 2], b[B_BYTES / 2];
};
struct Scales {
    float a[BM], b[BN];
};
constexpr int SHARED_BYTES = STAGES * int(sizeof(Stage) + sizeof(Scales));

// Two neighbours of a row of C. It is bf16 or fp32: one of the two pointers is nullptr.
__device__ inline void put_pair(global<bf16> narrow, global<float> wide, bool is_narrow, int row, int col, int M, int N,
                                float first, float second) {
    if (row >= M || col >= N) return;
    int64_t at = int64_t(row) * N + col;
    if (is_narrow && N % 2 == 0) {
        store2(narrow + at, 0, first, second);
    } else if (is_narrow) {
        narrow[at] = __float2bfloat16(first);
        if (col + 1 < N) narrow[at + 1] = __float2bfloat16(second);
    } else {
        wide[at] = first;
        if (col + 1 < N) wide[at + 1] = second;
    }
}

// scale_a [steps, rows_a] and scale_b [steps, rows_b]: one line for each step, as a tile of 128 rows needs them. Where
// B has blocks of 128 x 128, scale_b is [steps, ceil(N / 128)], one number for each tile.
template <Format8 A_FORMAT, bool SQUARE>
__global__ void __launch_bounds__(384, 1)
fp8_product(int M, int N, int K, const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap B,
            const float* scale_a, const float* scale_b, int rows_a, int rows_b, global<bf16> narrow,
            global<float> wide, bool is_narrow) {
    DYNAMIC_SHARED(Stage, stage);
    Scales* scales = reinterpret_cast<Scales*>(stage + STAGES);
    __shared__ uint64_t full[STAGES], empty[STAGES];
    int t = threadIdx.x, lane = t % 32, warpgroup = t / 128, steps = (K + TILE - 1) / TILE, use = 0;
    int tile_rows = (M + BM - 1) / BM, tile_cols = (N + BN - 1) / BN, row, col;
    auto tile_of = [&](int index) {  // stripes of 8 rows of tiles, column by column: their rows of A and of B fit in L2
        int first = index / (STRIPE * tile_cols) * STRIPE, left = tile_rows - first;
        int height = left < STRIPE ? left : STRIPE;
        row = (first + index % (STRIPE * tile_cols) % height) * BM;
        col = index % (STRIPE * tile_cols) / height * BN;
    };
    if (t == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(&full[s], 1);
            barrier_init(&empty[s], 8);  // one arrival for each warp of the consumers
        }
        barrier_init_done();
    }
    __syncthreads();

    if (warpgroup == 0) {  // ---------------------------------------------------------------------------- the producer
        keep_registers<40>();
        if (t != 0) return;
        for (int index = blockIdx.x; index < tile_rows * tile_cols; index += gridDim.x) {
            tile_of(index);
            for (int step = 0; step < steps; step++, use++) {
                int s = use % STAGES;
                wait(&empty[s], (use / STAGES + 1) % 2);  // for its last use to end; in round 0 that counts as done
                arrive_and_expect(&full[s], A_BYTES + B_BYTES + BM * 4 + (SQUARE ? 0 : BN * 4));
                copy_tile(stage[s].a, &A, row, step * TILE_K, &full[s]);  // columns in pairs: 64 to a step
                copy_tile(stage[s].b, &B, col, step * TILE_K, &full[s]);
                copy_line(scales[s].a, scale_a + int64_t(step) * rows_a + row, BM, &full[s]);
                if (!SQUARE) copy_line(scales[s].b, scale_b + int64_t(step) * rows_b + col, BN, &full[s]);
            }
        }
        return;
    }

    take_registers<232>();  // ------------------------------------------------------------------------ the consumers
    // Thread t holds, of the 64 x 128 of its warpgroup, rows t/32·16 + t%32/4 and 8 below, of every 8 columns a pair.
    int my_row = (warpgroup - 1) * 64 + t % 128 / 32 * 16 + lane / 4, my_col = lane % 4 * 2;
    for (int index = blockIdx.x; index < tile_rows * tile_cols; index += gridDim.x) {
        tile_of(index);
        float total[64] = {}, part[64];
        for (int step = 0; step < steps; step++, use++) {
            int s = use % STAGES;
            wait(&full[s], use / STAGES % 2);
            const Pair *a = stage[s].a + (warpgroup - 1) * 64 * TILE_K, *b = stage[s].b;
            wgmma_fence();
            wgmma_fp8<A_FORMAT, false>(part, descriptor(a, 0), descriptor(b, 0));  // begins a sum anew
#pragma unroll
            for (int k = 16; k < TILE_K; k += 16)  // 32 numbers of 8 bits are 16 pairs
                wgmma_fp8<A_FORMAT, true>(part, descriptor(a, k), descriptor(b, k));
            wgmma_commit();
            float upper = scales[s].a[my_row], lower = scales[s].a[my_row + 8];  // meanwhile
            float square = SQUARE ? scale_b[int64_t(step) * rows_b + col / BN] : 1.0f;
            float columns[32];  // of B's scales, where each of my 32 columns has its own
#pragma unroll
            for (int j = 0; j < 32; j++) columns[j] = SQUARE ? 1.0f : scales[s].b[my_col + j / 2 * 8 + j % 2];
            wgmma_wait<0>(part);
            __syncwarp();                      // all lanes have read their scales,
            if (lane == 0) arrive(&empty[s]);  // and nobody of this warp needs the stage any more
#pragma unroll
            for (int i = 0; i < 64; i++) {  // of every 4 numbers two are of the upper row, and two of the lower
                // --- exercise 10.47: promotion: number i of this step's sums, with its two scales, joins the total ---
                float scale = (i / 2 % 2 ? lower : upper) * (SQUARE ? square : columns[i / 4 * 2 + i % 2]);
                total[i] += part[i] * scale;
                // --- end exercise ---
            }
        }
#pragma unroll
        for (int i = 0; i < 64; i += 2)
            put_pair(narrow, wide, is_narrow, row + my_row + i / 2 % 2 * 8, col + my_col + i / 4 * 8, M, N, total[i],
                     total[i + 1]);
    }
}

// ---------------------------------------------------------------------------------------------------- the host's part

extern "C" const char* run_fp8_matmul(int a_is_e5m2, int b_is_square, int out_is_bf16, int M, int N, int K, int rows_a,
                                      int rows_b, const void* a, const void* b, const float* scale_a,
                                      const float* scale_b, void* out, void* stream) {
    CUtensorMap map_a, map_b;
    const char* error = describe_matrix(&map_a, (const Pair*)a, M, K / 2, BM);
    if (!error) error = describe_matrix(&map_b, (const Pair*)b, N, K / 2, BN);
    if (error) return error;
    int tiles = (M + BM - 1) / BM * ((N + BN - 1) / BN);
    dim3 blocks(std::min(tiles, multiprocessors())), threads(384);
    auto start = [&](auto kernel) {
        return launch(kernel, blocks, threads, SHARED_BYTES, stream, M, N, K, map_a, map_b, scale_a, scale_b, rows_a,
                      rows_b, (bf16*)(out_is_bf16 ? out : nullptr), (float*)(out_is_bf16 ? nullptr : out),
                      out_is_bf16 != 0);
    };
    if (a_is_e5m2) return b_is_square ? start(fp8_product<E5M2, true>) : start(fp8_product<E5M2, false>);
    return b_is_square ? start(fp8_product<E4M3, true>) : start(fp8_product<E4M3, false>);
}
