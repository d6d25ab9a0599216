// Chapter 9, the ladder in bf16: tensor cores, then Hopper's copy engine, then a persistent kernel.
//
//     C = A · Bᵀ        A [M, K], B [N, K], C [M, N], row-major bf16; sums in fp32
//
// B is stored as nn.Linear stores its weight, so that both operands are contiguous along K, as these
// kernels read them. K must be a multiple of 8 (16 bytes); matmul_ladder.py pads.
//
//     rung               what it adds
//     8  mma             tensor cores: a warp multiplies 16 x 16 by 16 x 8 in one instruction; cp.async copies ahead
//     9  tma_wgmma       Hopper: one thread copies full tiles (TMA); 128 threads do 64 x 256 x 16 (wgmma)
//     10 persistent      producer and consumer warps; one block per multiprocessor, for many tiles
//
// Their bound. A tile of BM x BN fetches (BM + BN) · K elements for BM · BN · K FMAs: 128 x 128 in bf16 makes
// 64 FLOPs per byte from L2, 128 x 256 makes 85. Tensor cores do 16 FMAs in the time in which the FMA units
// do one. So from here on the question is no longer how to compute, but how to load the data in time.
//
//     rungs 8, 9    load tile 0, 1, 2 | multiply 0, load 3 | multiply 1, load 4 | ...       all warps in step
//     rung 10       producer:   0 1 2 3 . 4 . 5 . 6   waits for "empty", fills, the copy engine signals "full"
//                   consumers:      0   1   2   3     wait for "full", multiply, signal "empty"
//
// In ncu look at: "tensor pipe utilisation"; 8, "stall long scoreboard" and "MIO throttle"; 9, "stall
// barrier". Rung 10 saves the start of each tile: loads continue while sums are written. (wgmma begins when
// half of the sums are written; clusters.cu continues there.) The tail remains: 8192³ has 2048 tiles, 15.5
// per multiprocessor of 132, and in the last round half of them are idle.
#include "tiles.h"

// -------------------------------------------------------------------------------------------------------- rung 8: mma

// 8 warps share 128 x 128 of C, 64 x 32 each, in mma of 16 x 8 x 16. There are three pairs of tiles; while
// one is multiplied, the copies of the next two are in flight. cp.async writes to shared memory without using
// registers, and is awaited by groups.
__global__ void __launch_bounds__(256, 2)  // two blocks on a multiprocessor: at most 128 registers per thread
mma_tiles(int M, int N, int K, const bf16* A, const bf16* B, global<bf16> C) {
    constexpr int BM = 128, BN = 128, STAGES = 3, A_TILE = BM * TILE_K, STAGE = (BM + BN) * TILE_K;
    DYNAMIC_SHARED(bf16, tiles);
    int t = threadIdx.x, warp = t / 32, lane = t % 32;
    int row0 = blockIdx.y * BM, col0 = blockIdx.x * BN, steps = (K + TILE_K - 1) / TILE_K;
    int my_row = warp / 4 * 64, my_col = warp % 4 * 32;
    float sum[4][4][4] = {};  // 4 x 4 results of mma, 4 elements of each per lane

    auto load = [&](int step) {
        if (step < steps) {
            bf16* to = tiles + step % STAGES * STAGE;
            for (int i = t; i < (BM + BN) * 8; i += 256) {  // 16-byte chunks, 8 in a row; first those of A
                int row = i / 8 % BM, chunk = i % 8, k = step * TILE_K + chunk * 8;
                bool is_a = i < BM * 8;
                int from = is_a ? row0 + row : col0 + row;
                bool exists = from < (is_a ? M : N) && k < K;
                const bf16* source = exists ? (is_a ? A : B) + (from * K + k) : A;
                copy_async16(to + (is_a ? 0 : A_TILE) + swizzled(row, chunk), source, exists);
            }
        }
        copy_commit();  // also without a load: the wait below counts groups
    };
    for (int step = 0; step < STAGES - 1; step++) load(step);
    for (int step = 0; step < steps; step++) {
        copy_wait<STAGES - 2>();  // my copies of this step have arrived,
        __syncthreads();          // and all threads' copies, and no thread reads the last step's tiles,
        load(step + STAGES - 1);  // which this overwrites
        const bf16 *As = tiles + step % STAGES * STAGE, *Bs = As + A_TILE;
        for (int k = 0; k < TILE_K; k += 16) {
            uint32_t a[4][4], b[2][4];
            for (int i = 0; i < 4; i++)  // 16 x 16 of A as four 8 x 8: upper left, lower left, upper right, lower right
                load_matrices(a[i], As + swizzled(my_row + i * 16 + lane % 16, k / 8 + lane / 16));
            for (int j = 0; j < 2; j++)  // 16 columns of C: for the first 8 both halves of k, then for the second 8
                load_matrices(b[j], Bs + swizzled(my_col + j * 16 + lane / 16 * 8 + lane % 8, k / 8 + lane / 8 % 2));
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) mma(sum[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }
    copy_wait<0>();
#pragma unroll  // an index unknown at compile time would put all of `sum` in local memory
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int row = row0 + my_row + i * 16 + lane / 4, col = col0 + my_col + j * 8 + lane % 4 * 2;
            put_pair(C, row, col, M, N, sum[i][j][0], sum[i][j][1]);
            put_pair(C, row + 8, col, M, N, sum[i][j][2], sum[i][j][3]);
        }
}

// ------------------------------------------------------------------------------------------ what rungs 9 and 10 share

// Two warpgroups of 128 threads share 128 x 256 of C, 64 rows each. Four pairs of tiles, 48 KB each. Sums are
// also written by the copy engine (put_tile_by_engine): in rung 9 from the memory of the tiles, which is free
// by then; in rung 10 from a buffer of their own, since the next tiles are already being loaded.
constexpr int BM = 128, BN = 256, STAGES = 4, A_TILE = BM * TILE_K, STAGE = (BM + BN) * TILE_K;
constexpr int STAGE_BYTES = STAGES * STAGE * 2, OUT_BYTES = BM * BN;  // out: half of the sums, in bf16

// The four wgmma of a step, for the rows of one warpgroup.
__device__ inline void multiply_tile(float (&sum)[128], const bf16* tiles, int warpgroup) {
    for (int k = 0; k < TILE_K; k += 16)
        wgmma(sum, descriptor(tiles + warpgroup * 64 * TILE_K, k), descriptor(tiles + A_TILE, k));
}

// ---------------------------------------------------------------------------------------------- rung 9: TMA and wgmma

// The loop of rung 8 with Hopper's instructions. Thread 0 requests the tiles; the copy engine computes
// addresses, fills zeros beyond the edge, swizzles, and counts the bytes on the mbarrier of the stage. A
// stage is used every STAGES steps; each use is a phase of its barrier, which wait() names by parity.
__global__ void __launch_bounds__(256, 1)
tma_wgmma(int M, int N, int K, const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap B,
          const __grid_constant__ CUtensorMap C_map, global<bf16> C, int by_engine) {
    DYNAMIC_SHARED(bf16, tiles);
    __shared__ uint64_t full[STAGES];
    int t = threadIdx.x, row0 = blockIdx.y * BM, col0 = blockIdx.x * BN, steps = (K + TILE_K - 1) / TILE_K;
    if (t == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(&full[s], 1);
        barrier_init_done();
    }
    __syncthreads();
    auto load = [&](int step) {
        if (t != 0 || step >= steps) return;
        bf16* to = tiles + step % STAGES * STAGE;
        arrive_and_expect(&full[step % STAGES], STAGE * 2);
        copy_tile(to, &A, row0, step * TILE_K, &full[step % STAGES]);
        copy_tile(to + A_TILE, &B, col0, step * TILE_K, &full[step % STAGES]);
    };
    float sum[128] = {};
    for (int step = 0; step < STAGES; step++) load(step);
    for (int step = 0; step < steps; step++) {
        wait(&full[step % STAGES], step / STAGES % 2);
        wgmma_fence();  // the registers of `sum` are ready for the tensor core
        multiply_tile(sum, tiles + step % STAGES * STAGE, t / 128);
        wgmma_commit();
        wgmma_wait<0>(sum);
        __syncthreads();  // both warpgroups have read this stage, so it may be refilled
        load(step + STAGES);
    }
    // All tiles have been multiplied: their shared memory is free, and serves as the output buffer.
    if (by_engine) put_tile_by_engine<4>(&C_map, tiles + t / 32 * 16 * BN, sum, row0 + t / 32 * 16, col0);
    else put_tile(C, sum, row0 + t / 128 * 64, col0, M, N);
    if (t % 32 == 0) out_wait<0>();  // shared memory is there until it has been read
}

// ------------------------------------------------------------------------------- rung 10: warp-specialised, persistent

// Warpgroup 0 is the producer: one of its threads requests tiles as stages become empty, also across the end
// of a tile of C, so the consumers find data after writing. Warpgroups 1 and 2 multiply and write. Their
// loops have no __syncthreads(); each stage has two mbarriers:
//     full[s]   completed by the copy engine with the last byte       the producer's arrival + the bytes
//     empty[s]  completed by the consumers after their last read      8 arrivals, one per warp
// In round r of a stage (from 0 on) the consumers wait for phase r of full, the producer for phase r - 1 of empty.
// The parity that precedes the first phase counts as completed, so in round 0 the producer passes at once.
__global__ void __launch_bounds__(384, 1)
persistent(int M, int N, int K, const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap B,
           const __grid_constant__ CUtensorMap C_map, global<bf16> C, int by_engine) {
    DYNAMIC_SHARED(bf16, tiles);
    __shared__ uint64_t full[STAGES], empty[STAGES];
    int t = threadIdx.x, warpgroup = t / 128, steps = (K + TILE_K - 1) / TILE_K;
    int tile_rows = (M + BM - 1) / BM, tile_cols = (N + BN - 1) / BN, row, col;
    if (t == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(&full[s], 1);
            barrier_init(&empty[s], 8);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (warpgroup == 0) {
        keep_registers<24>();
        if (t != 0) return;
        int use = 0;  // counts the steps of all tiles: the stage is use % STAGES, its round use / STAGES
        for (int index = blockIdx.x; index < tile_rows * tile_cols; index += gridDim.x) {
            tile_of<8>(index, tile_rows, tile_cols, &row, &col);
            for (int step = 0; step < steps; step++, use++) {
                int s = use % STAGES;
                wait(&empty[s], (use / STAGES + 1) % 2);
                arrive_and_expect(&full[s], STAGE * 2);
                copy_tile(tiles + s * STAGE, &A, row * BM, step * TILE_K, &full[s]);
                copy_tile(tiles + s * STAGE + A_TILE, &B, col * BN, step * TILE_K, &full[s]);
            }
        }
    } else {
        take_registers<240>();
        int use = 0, warp = t / 32 - 4;
        bf16* buffer = tiles + STAGES * STAGE + warp * 2 * 16 * TILE_K;  // for half of the warp's sums at a time
        for (int index = blockIdx.x; index < tile_rows * tile_cols; index += gridDim.x) {
            tile_of<8>(index, tile_rows, tile_cols, &row, &col);
            float sum[128] = {};
            for (int step = 0; step < steps; step++, use++) {
                wait(&full[use % STAGES], use / STAGES % 2);
                wgmma_fence();
                multiply_tile(sum, tiles + use % STAGES * STAGE, warpgroup - 1);
                wgmma_commit();
                wgmma_wait<1>(sum);  // all but the wgmma just issued: the last step's are finished,
                if (step > 0 && t % 32 == 0) arrive(&empty[(use - 1) % STAGES]);  // and its stage is free
            }
            wgmma_wait<0>(sum);
            if (t % 32 == 0) arrive(&empty[(use - 1) % STAGES]);
            if (by_engine) put_tile_by_engine<2>(&C_map, buffer, sum, row * BM + warp * 16, col * BN);
            else put_tile(C, sum, row * BM + (warpgroup - 1) * 64, col * BN, M, N);
        }
        if (t % 32 == 0) out_wait<0>();  // shared memory is there until it has been read
    }
}

// ------------------------------------------------------------------------------------------------------ the host's part

extern "C" const char* run_matmul_bf16(int rung, int M, int N, int K, const bf16* A, const bf16* B, bf16* C,
                                       void* stream) {
    if (rung == 8)
        return launch(mma_tiles, dim3((N + 127) / 128, (M + 127) / 128), dim3(256), 3 * (128 + 128) * TILE_K * 2,
                      stream, M, N, K, A, B, C);
    if (rung != 9 && rung != 10) return "tensor_cores.cu has rungs 8 to 10";
    CUtensorMap map_a, map_b, map_c = {};
    int by_engine;
    const char* error = describe_matrix(&map_a, A, M, K, BM);
    if (!error) error = describe_matrix(&map_b, B, N, K, BN);
    if (!error) error = describe_output(&map_c, C, M, N, &by_engine);
    if (error) return error;
    dim3 tiles((N + BN - 1) / BN, (M + BM - 1) / BM);
    if (rung == 9)
        return launch(tma_wgmma, tiles, dim3(256), STAGE_BYTES, stream, M, N, K, map_a, map_b, map_c, C, by_engine);
    int all = tiles.x * tiles.y, blocks = std::min(all, multiprocessors());
    return launch(persistent, dim3(blocks), dim3(384), STAGE_BYTES + OUT_BYTES, stream, M, N, K, map_a, map_b, map_c, C,
                  by_engine);
}
