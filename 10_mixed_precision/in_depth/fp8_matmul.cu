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
//     consumer 1    wgmma 0 left | promote | wgmma 0 right | promote | wgmma 1 left ...      rows 0 to 63 of 128 x 256
//     consumer 2         wgmma 0 left | promote | wgmma 0 right | promote | ...              rows 64 to 127
//
// While one warpgroup promotes, the tensor cores work for the other: two of them are needed to keep these busy, and
// nobody has to arrange it. A thread has 128 totals, as in rung 10 of chapter 09's ladder, and 64 sums in `part`: the
// left and the right half of its columns take turns there: 256 registers are more than a thread has.
//
// What bounds it. A step multiplies 128 x 256 x 128, 1,024 clocks of the fp8 tensor core (4096 multiply-adds a clock and
// multiprocessor), and fills 48 KB of shared memory. Were each block to fetch all of it, 132 of them would ask L2 for
// 6,336 bytes a clock, and L2 of an H100 gives about 5,120. So two blocks are a cluster, one above the other, as in rung
// 11: each fetches its own rows of A and half of B, and the copy engine writes that half into both. That is 32 KB a step,
// 4,224 bytes a clock. Promotion should hide behind the other's wgmma: 128 multiply-adds of 256 threads are 256
// clocks of the ordinary cores. (Measured, not all of it does.)
//
// The rest is rung 11: barriers full and empty for each stage, blocks that stay and work through many tiles.
#include "ptx_fp8.h"

constexpr int CLUSTER = 2, BM = 128, BN = 256, HALF = BN / 2, STAGES = 4, STRIPE = 8;
constexpr int A_BYTES = BM * TILE, B_BYTES = BN * TILE;
struct Stage {  // 48 KB; the tiles begin at multiples of 1024 bytes, as the swizzle wants them
    Pair a[A_BYTES / 2], b[B_BYTES / 2];
};
struct Scales {
    float a[BM], b[BN];
};
// What a block has in shared memory. A cluster's blocks signal each other's barriers:
//     full[s]   my producer's arrival + all bytes of the stage, whoever asked for them
//     empty[s]  one arrival of each of the 8 warps that read the stage, in *both* blocks: my half of B goes to both
struct Shared {
    Stage stage[STAGES];
    Scales scales[STAGES];
    uint64_t full[STAGES], empty[STAGES];
};

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

// scale_a [steps, rows_a] and scale_b [steps, rows_b]: one line for each step, as 256 rows need them. Where B has blocks
// of 128 x 128, scale_b is [steps, ceil(N / 128)], one number for each half of a tile.
template <Format8 A_FORMAT, bool SQUARE>
__global__ void __launch_bounds__(384, 1)
fp8_product(int M, int N, int K, const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap B,
            const float* scale_a, const float* scale_b, int rows_a, int rows_b, global<bf16> narrow,
            global<float> wide, bool is_narrow) {
    DYNAMIC_SHARED(Shared, my);
    int t = threadIdx.x, lane = t % 32, warpgroup = t / 128, use = 0;
    int steps = (K + TILE - 1) / TILE, pairs = (M + CLUSTER * BM - 1) / (CLUSTER * BM), cols = (N + BN - 1) / BN;
    int row, col;
    auto tile_of = [&](int index) {  // stripes of 8 rows of tiles, column by column: their rows of A and of B fit in L2
        int first = index / (STRIPE * cols) * STRIPE, left = pairs - first;
        int height = left < STRIPE ? left : STRIPE;
        row = ((first + index % (STRIPE * cols) % height) * CLUSTER + rank_in_cluster()) * BM;
        col = index % (STRIPE * cols) / height * BN;
    };
    if (t == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(&my->full[s], 1);
            barrier_init(&my->empty[s], CLUSTER * 8);  // one arrival for each warp of both blocks' consumers
        }
        barrier_init_done();
    }
    cluster_barrier();  // the barriers of both blocks are ready before anybody signals there

    if (warpgroup == 0) {  // ---------------------------------------------------------------------------- the producer
        keep_registers<40>();
        int half = rank_in_cluster() * HALF;  // of B, which I fetch for both blocks
        for (int index = blockIdx.x / CLUSTER; t == 0 && index < pairs * cols; index += gridDim.x / CLUSTER) {
            tile_of(index);
            for (int step = 0; step < steps; step++, use++) {
                int s = use % STAGES;
                wait(&my->empty[s], (use / STAGES + 1) % 2);  // for its last use to end; in round 0 that counts as done
                arrive_and_expect(&my->full[s], A_BYTES + B_BYTES + BM * 4 + (SQUARE ? 0 : BN * 4));
                copy_tile(my->stage[s].a, &A, row, step * TILE_K, &my->full[s]);  // columns in pairs: 64 to a step
                copy_tile_to_all(my->stage[s].b + half * TILE_K, &B, col + half, step * TILE_K, &my->full[s],
                                 (1 << CLUSTER) - 1);
                copy_line(my->scales[s].a, scale_a + int64_t(step) * rows_a + row, BM, &my->full[s]);
                if (!SQUARE) copy_line(my->scales[s].b, scale_b + int64_t(step) * rows_b + col, BN, &my->full[s]);
            }
        }
    } else {  // --------------------------------------------------------------------------------------- the consumers
        take_registers<232>();
        // Thread t holds, of the 64 x 128 of a half, rows t/32·16 + t%32/4 and 8 below, of every 8 columns a pair.
        int my_row = (warpgroup - 1) * 64 + t % 128 / 32 * 16 + lane / 4, my_col = lane % 4 * 2;
        for (int index = blockIdx.x / CLUSTER; index < pairs * cols; index += gridDim.x / CLUSTER) {
            tile_of(index);
            float total[2][64] = {}, part[64];
            for (int step = 0; step < steps; step++, use++) {
                int s = use % STAGES;
                wait(&my->full[s], use / STAGES % 2);
                float upper = 0, lower = 0, square = 1;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const Pair *a = my->stage[s].a + (warpgroup - 1) * 64 * TILE_K;
                    const Pair *b = my->stage[s].b + half * HALF * TILE_K;
                    wgmma_fence();
                    wgmma_fp8<A_FORMAT, false>(part, descriptor(a, 0), descriptor(b, 0));  // begins a sum anew
#pragma unroll
                    for (int k = 16; k < TILE_K; k += 16)  // 32 numbers of 8 bits are 16 pairs
                        wgmma_fp8<A_FORMAT, true>(part, descriptor(a, k), descriptor(b, k));
                    wgmma_commit();
                    if (half == 0) upper = my->scales[s].a[my_row], lower = my->scales[s].a[my_row + 8];  // meanwhile
                    int block = col / HALF + half;  // of the weight; the right half may lie beyond its last column
                    if (SQUARE) square = scale_b[int64_t(step) * rows_b + (block < rows_b ? block : rows_b - 1)];
                    wgmma_wait<0>(part);
                    const float* columns = my->scales[s].b + half * HALF + my_col;  // where each column has its own
#pragma unroll
                    for (int i = 0; i < 64; i++) {  // of every 4 numbers two are of the upper row, two of the lower
                        // --- exercise 10.47: promotion: sum i of this half, with its two scales, joins the total ---
                        float scale = (i / 2 % 2 ? lower : upper) * (SQUARE ? square : columns[i / 4 * 8 + i % 2]);
                        total[half][i] += part[i] * scale;
                        // --- end exercise ---
                    }
                }
                __syncwarp();  // all lanes have read their scales, and nobody of this warp needs the stage any more:
                if (lane < CLUSTER) arrive_at(&my->empty[s], lane);  // both blocks have to know, since both write to it
            }
#pragma unroll
            for (int i = 0; i < 128; i += 2)
                put_pair(narrow, wide, is_narrow, row + my_row + i / 2 % 2 * 8,
                         col + i / 64 * HALF + my_col + i % 64 / 4 * 8, M, N, total[i / 64][i % 64],
                         total[i / 64][i % 64 + 1]);
        }
    }
    cluster_barrier();  // nobody ends while the other block may still signal or write here
}

// ---------------------------------------------------------------------------------------------------- the host's part

extern "C" const char* run_fp8_matmul(int a_is_e5m2, int b_is_square, int out_is_bf16, int M, int N, int K, int rows_a,
                                      int rows_b, const void* a, const void* b, const float* scale_a,
                                      const float* scale_b, void* out, void* stream) {
    if (rows_a % (CLUSTER * BM) || (!b_is_square && rows_b % BN)) return "a line of scales has to be whole tiles of 256";
    CUtensorMap map_a, map_b;
    const char* error = describe_matrix(&map_a, (const Pair*)a, M, K / 2, BM);
    if (!error) error = describe_matrix(&map_b, (const Pair*)b, N, K / 2, HALF);
    if (error) return error;
    int all = (M + CLUSTER * BM - 1) / (CLUSTER * BM) * ((N + BN - 1) / BN);
    dim3 blocks(CLUSTER * std::min(all, multiprocessors() / CLUSTER)), threads(384);
    auto start = [&](auto kernel) {
        return launch_clusters(CLUSTER, kernel, blocks, threads, sizeof(Shared), stream, M, N, K, map_a, map_b, scale_a,
                               scale_b, rows_a, rows_b, (bf16*)(out_is_bf16 ? out : nullptr),
                               (float*)(out_is_bf16 ? nullptr : out), out_is_bf16 != 0);
    };
    if (a_is_e5m2) return b_is_square ? start(fp8_product<E5M2, true>) : start(fp8_product<E5M2, false>);
    return b_is_square ? start(fp8_product<E4M3, true>) : start(fp8_product<E4M3, false>);
}
