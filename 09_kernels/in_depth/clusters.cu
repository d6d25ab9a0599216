// Chapter 9, the ladder's last two rungs: two multiprocessors that share a tile, and warpgroups that take turns.
//
//     C = A · Bᵀ        as in tensor_cores.cu
//
// Rung 11 also takes a transposed factor, A as [K, M] or B as [K, N]: the backward of a linear layer sums
// over rows, those of W for dx and those of dy and x for dW. The tile of such a factor has 64 columns in a row of
// shared memory, one row per k, and wgmma reads it transposed. So dx = dy · W, dW = dyᵀ · x copy nothing.
//
//     rung            what it adds to rung 10
//     11 multicast    a cluster of two blocks: each fetches its own rows of A and half of B, and the copy engine writes
//                     that half into the shared memory of both
//     12 ping_pong    two warpgroups on tiles of their own: one multiplies while the other writes out
//
// What 11 saves. Alone, a block requests from L2 128 + 256 rows of 64 elements per step, 48 KB, for 1,024
// cycles of wgmma: 132 blocks request 6,336 bytes per cycle, and L2 of an H100 delivers 5,120. In a cluster a
// block requests 128 + 128 rows, all together 4,224 bytes per cycle.
//
//     a cluster works on 256 x 256 of C          block 0                      block 1
//                                            A   rows 0 to 127                rows 128 to 255
//                                            B   rows 0 to 127 ──> both       rows 128 to 255 ──> both
//
// What 12 hides. In rungs 10 and 11 both warpgroups write their sums out at the same time. The output buffer
// holds half of them, so no warp multiplies until the copy engine has read that half. In rung 12 a tile is as
// large as one warpgroup's registers allow, 64 x 256, the buffer holds all of it, and two are in flight:
//
//     warpgroup 1   multiply tile 0 | write 0 .......... | multiply tile 2 | write 2
//     warpgroup 2                   | multiply tile 1    | write 1 ....... | multiply tile 3
//
// The price: a tile of half the height requests 64 + 128 rows per 512 cycles, 6,336 bytes per cycle, as in
// rung 10. If L2 delivers 5,120, that is 24 % more time. Writing half of the sums of 132 blocks (4.3 MB)
// costs L2 845 cycles per tile: 5 % of its wgmma if K is 1,024. So 12 should win only for K below some 220.
//
// Here all shared memory is dynamic, including barriers: tiles first, then barriers.
#include "clusters.h"
#include "tiles.h"

constexpr int CLUSTER = 2, BN = 256, STAGES = 4, HALF_B = BN / CLUSTER * TILE_K;

// What a stage's two barriers wait for, and how they are laid out.
//     full[s]   the producer's arrival + all bytes of the stage, from either block
//     empty[s]  one arrival of each warp that reads the stage, in *both* blocks: each block's B goes to both
struct Barriers {
    uint64_t full[STAGES], empty[STAGES], turn[2];
};
__device__ inline Barriers* barriers_behind(bf16* tiles, int readers) {
    Barriers* b = reinterpret_cast<Barriers*>(tiles);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(&b->full[s], 1);
            barrier_init(&b->empty[s], CLUSTER * readers);
        }
        for (int i = 0; i < 2; i++) barrier_init(&b->turn[i], 4);
        barrier_init_done();
    }
    cluster_barrier();  // the barriers of both blocks are ready before any signal
    return b;
}

// The copies of a tile that begins at `row` of a factor and at k. A transposed factor has panels of 64 rows.
template <bool ACROSS, class Copy>
__device__ inline void in_panels(int rows, int row, int k, Copy copy) {
    if (!ACROSS) copy(0, row, k);
    for (int r = 0; ACROSS && r < rows; r += PANEL) copy(r * TILE_K, k, row + r);
}
template <bool ACROSS>
__device__ inline uint64_t factor(const bf16* tile, int k) {
    return ACROSS ? across(tile, k, PANEL * TILE_K * 2) : descriptor(tile, k);
}

// One step's tiles: this block's A, and its half of B for both blocks. The other half comes from the other
// block, perhaps before this producer has announced its bytes: a phase ends when announced and received bytes
// are equal *and* the producer has arrived.
template <int BM, bool A_ACROSS = false, bool B_ACROSS = false>
__device__ inline void load_stage(bf16* tiles, Barriers* b, int use, int rank, const CUtensorMap* A,
                                  const CUtensorMap* B, int row, int col, int k) {
    constexpr int STAGE = (BM + BN) * TILE_K;
    int s = use % STAGES;
    bf16 *to = tiles + s * STAGE, *half = to + BM * TILE_K + rank * HALF_B;
    wait(&b->empty[s], (use / STAGES + 1) % 2);  // why an acquire for the cluster is not needed: at arrive_at()
    arrive_and_expect(&b->full[s], STAGE * 2);
    in_panels<A_ACROSS>(BM, row, k, [&](int at, int i, int j) { copy_tile(to + at, A, i, j, &b->full[s]); });
    in_panels<B_ACROSS>(BN / CLUSTER, col + rank * BN / CLUSTER, k, [&](int at, int i, int j) {
        copy_tile_to_all(half + at, B, i, j, &b->full[s], (1 << CLUSTER) - 1);
    });
}

// This warp has finished the stage of that step. Both blocks write to it, so signal both.
__device__ inline void give_back(Barriers* b, int use) {
    int lane = threadIdx.x % 32;
    if (lane < CLUSTER) arrive_at(&b->empty[use % STAGES], lane);
}

// ---------------------------------------------------------------------------------------------- rung 11: two blocks

template <bool A_ACROSS, bool B_ACROSS>
__global__ void __launch_bounds__(384, 1)
multicast(int M, int N, int K, const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap B,
          const __grid_constant__ CUtensorMap C_map, global<bf16> C, int by_engine) {
    constexpr int BM = 128, STAGE = (BM + BN) * TILE_K;
    DYNAMIC_SHARED(bf16, tiles);
    Barriers* b = barriers_behind(tiles + STAGES * STAGE + BM * BN / 2, 8);
    int t = threadIdx.x, warpgroup = t / 128, rank = rank_in_cluster(), steps = (K + TILE_K - 1) / TILE_K;
    int pairs = (M + CLUSTER * BM - 1) / (CLUSTER * BM), cols = (N + BN - 1) / BN, pair, col, use = 0;
    if (warpgroup == 0) {
        keep_registers<40>();
        for (int index = blockIdx.x / CLUSTER; t == 0 && index < pairs * cols; index += gridDim.x / CLUSTER) {
            tile_of<8>(index, pairs, cols, &pair, &col);
            for (int step = 0; step < steps; step++, use++)
                load_stage<BM, A_ACROSS, B_ACROSS>(tiles, b, use, rank, &A, &B, (pair * CLUSTER + rank) * BM, col * BN,
                                                   step * TILE_K);
        }
    } else {
        take_registers<232>();
        int warp = t / 32 - 4;
        bf16* buffer = tiles + STAGES * STAGE + warp * 2 * 16 * TILE_K;  // for half of the warp's sums at a time
        for (int index = blockIdx.x / CLUSTER; index < pairs * cols; index += gridDim.x / CLUSTER) {
            tile_of<8>(index, pairs, cols, &pair, &col);
            float sum[128] = {};
            for (int step = 0; step < steps; step++, use++) {
                const bf16 *a = tiles + use % STAGES * STAGE, *mine = a + (warpgroup - 1) * 64 * TILE_K;
                wait(&b->full[use % STAGES], use / STAGES % 2);
                wgmma_fence();
                for (int k = 0; k < TILE_K; k += 16)
                    wgmma<A_ACROSS, B_ACROSS>(sum, factor<A_ACROSS>(mine, k), factor<B_ACROSS>(a + BM * TILE_K, k));
                wgmma_commit();
                wgmma_wait<1>(sum);
                if (step > 0) give_back(b, use - 1);
            }
            wgmma_wait<0>(sum);
            give_back(b, use - 1);
            int row = (pair * CLUSTER + rank) * BM;
            if (by_engine) put_tile_by_engine<2>(&C_map, buffer, sum, row + warp * 16, col * BN);
            else put_tile(C, sum, row + (warpgroup - 1) * 64, col * BN, M, N);
        }
        if (t % 32 == 0) out_wait<0>();  // shared memory is there until it has been read
    }
    cluster_barrier();  // no block ends while the other may still signal or write here
}

// ---------------------------------------------------------------------------------------------- rung 12: ping-pong

// Tile i of a cluster belongs to warpgroup i % 2 + 1. The producer fills stages for tile 0, 1, 2, ..., so tile i
// begins with `use` = i · steps, for either owner. turn[w] says that warpgroup w + 1 may multiply. Without it
// both are slower, and one waits for phase n of `full` while the barrier is still in phase n - 1.
// A wait knows only the parity of a phase, takes n - 2, the last that ended, for n, and passes.
__global__ void __launch_bounds__(384, 1)
ping_pong(int M, int N, int K, const __grid_constant__ CUtensorMap A, const __grid_constant__ CUtensorMap B,
          const __grid_constant__ CUtensorMap C_map, global<bf16> C, int by_engine) {
    constexpr int BM = 64, STAGE = (BM + BN) * TILE_K;
    DYNAMIC_SHARED(bf16, tiles);
    Barriers* b = barriers_behind(tiles + STAGES * STAGE + 2 * BM * BN, 4);
    int t = threadIdx.x, warpgroup = t / 128, rank = rank_in_cluster(), steps = (K + TILE_K - 1) / TILE_K;
    int pairs = (M + CLUSTER * BM - 1) / (CLUSTER * BM), cols = (N + BN - 1) / BN, pair, col;
    int clusters = gridDim.x / CLUSTER, first = blockIdx.x / CLUSTER;
    if (warpgroup == 0) {
        keep_registers<40>();
        int use = 0;
        for (int index = first; t == 0 && index < pairs * cols; index += clusters) {
            tile_of<16>(index, pairs, cols, &pair, &col);
            for (int step = 0; step < steps; step++, use++)
                load_stage<BM>(tiles, b, use, rank, &A, &B, (pair * CLUSTER + rank) * BM, col * BN, step * TILE_K);
        }
    } else {
        take_registers<232>();
        int me = warpgroup - 1, lane = t % 32, warp = t % 128 / 32;
        bf16* buffer = tiles + STAGES * STAGE + me * BM * BN + warp * 16 * BN;
        for (int i = me; first + i * clusters < pairs * cols; i += 2) {
            tile_of<16>(first + i * clusters, pairs, cols, &pair, &col);
            float sum[128] = {};
            wait(&b->turn[me], (i / 2 + 1 - me) % 2);  // the first turn is warpgroup 1's, without a wait
            int use = i * steps;
            for (int step = 0; step < steps; step++, use++) {
                const bf16* a = tiles + use % STAGES * STAGE;
                wait(&b->full[use % STAGES], use / STAGES % 2);
                wgmma_fence();
                for (int k = 0; k < TILE_K; k += 16) wgmma(sum, descriptor(a, k), descriptor(a + BM * TILE_K, k));
                wgmma_commit();
                wgmma_wait<1>(sum);
                if (step > 0) give_back(b, use - 1);
            }
            if (lane == 0) arrive(&b->turn[1 - me]);  // all my wgmma are queued: the other's may follow
            wgmma_wait<0>(sum);
            give_back(b, use - 1);
            int row = (pair * CLUSTER + rank) * BM;
            if (by_engine) put_tile_by_engine<4>(&C_map, buffer, sum, row + warp * 16, col * BN);
            else put_tile(C, sum, row, col * BN, M, N);
        }
        if (lane == 0) out_wait<0>();  // shared memory is there until it has been read
    }
    cluster_barrier();
}

// ----------------------------------------------------------------------------------------------------- the host's part

// A [M, K] or, transposed, [K, M]; B [N, K] or [K, N]. Only rung 11 takes transposed factors.
static const char* run(int rung, bool a_across, bool b_across, int M, int N, int K, const bf16* A, const bf16* B, bf16* C,
                       void* stream) {
    auto kernel = rung == 12 ? ping_pong
                  : a_across ? (b_across ? multicast<true, true> : multicast<true, false>)
                             : (b_across ? multicast<false, true> : multicast<false, false>);
    int BM = rung == 11 ? 128 : 64, out = rung == 11 ? BM * BN / 2 : 2 * BM * BN, by_engine;
    int shared = (STAGES * (BM + BN) * TILE_K + out) * 2 + sizeof(Barriers);
    CUtensorMap map_a, map_b, map_c = {};
    const char* error = a_across ? describe_matrix(&map_a, A, K, M, TILE_K) : describe_matrix(&map_a, A, M, K, BM);
    if (!error && b_across) error = describe_matrix(&map_b, B, K, N, TILE_K);
    if (!error && !b_across) error = describe_matrix(&map_b, B, N, K, BN / CLUSTER);
    if (!error) error = describe_output(&map_c, C, M, N, &by_engine);
    if (error) return error;
    int all = (M + CLUSTER * BM - 1) / (CLUSTER * BM) * ((N + BN - 1) / BN);
    dim3 blocks(CLUSTER * std::min(all, multiprocessors() / CLUSTER)), threads(384);
    return launch_clusters(CLUSTER, kernel, blocks, threads, shared, stream, M, N, K, map_a, map_b, map_c, C, by_engine);
}

extern "C" const char* run_matmul_clusters(int rung, int M, int N, int K, const bf16* A, const bf16* B, bf16* C,
                                           void* stream) {
    if (rung != 11 && rung != 12) return "clusters.cu has rungs 11 and 12";
    return run(rung, false, false, M, N, K, A, B, C, stream);
}
extern "C" const char* run_matmul_across(int a_across, int b_across, int M, int N, int K, const bf16* A, const bf16* B,
                                         bf16* C, void* stream) {
    return run(11, a_across, b_across, M, N, K, A, B, C, stream);
}
