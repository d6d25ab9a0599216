// Chapter 9: attention in CUDA for Hopper, forward. One warp requests tiles, two warpgroups compute in turns.
//
//     out = softmax(q kᵀ / sqrt(D)) v,  LSE       q, out [B, S_q, N, D], k, v [B, S_k, N_kv, D] bf16; LSE [B, N, S_q]
//
// The problem. Per score the tensor cores do 4 D operations and the special function units one exponential.
// Per cycle an SM does 4096 such operations (2048 multiply-adds) and 16 exponentials: a tile of 128 x 128
// with D = 128 is 2048 cycles of matmuls and 1024 of exponentials; with D = 64, 1024 of each. In sequence,
// the tensor cores would be idle for a third of the time, or for half of it.
//
// The idea (FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2). Let both be busy, in two ways:
//   between warpgroups   "ping-pong": two own 64 queries each and alternate at the tensor cores; the other
//                        one computes exponentials
//   within a warpgroup   in turn j it issues the scores of tile j *and* the values of tile j - 1. It waits
//                        only for the scores, and works on them while the values are computed
//
//     producer      Q K0 V0 | K1 V1 | K2 V2 ...           waits for "empty"; the copy engine signals "full"
//     consumer 0    QK0 . . . . . QK1 PV0 . . . . QK2 PV1
//                       softmax 0         softmax 1            = between its own turns
//     consumer 1          QK0 . . . . . QK1 PV0 . . . . QK2 PV1
//                             softmax 0         softmax 1
//
//     rows of a tile      consumer 0: row0 .. row0 + 63, consumer 1: row0 + 64 .. row0 + 127
//     shared memory       Q [128, D]; two stages of K and of V [128, D]; out [128, D]: 192 KB at D = 128; in panels of 64
//                         columns
//     registers           scores [64, 128]: 64 of a thread; out [64, D]: D/2; weights in bf16: 32
//
// A third idea also overlaps tiles: a block is *persistent*. There are as many blocks as multiprocessors, and
// each takes one tile of queries after the other. So barriers are initialised once, Q and the first K and V
// of the next tile are loaded while this one is computed, and one consumer writes its rows while the other
// has the tensor cores. The order is fixed in advance. Under a causal mask the last tile of queries has most
// work, and the first least: a block takes them in pairs, the long one first, so that all pairs cost the
// same. Neighbouring blocks have the same head, so that its K and V are in the L2 cache.
//
//     8 tiles of queries    keys 1 2 3 4 5 6 7 8        block 0: tiles 7, 0     block 2: tiles 5, 2
//                           tile 0 1 2 3 4 5 6 7        block 1: tiles 6, 1     block 3: tiles 4, 3      9 tiles of keys each
//
// Q·Kᵀ leaves its result where P·V wants its left factor: thread for thread, the accumulator's pairs are the pairs of
// the operand. So the weights never use shared memory. (The sum of the weights is in fp32, before rounding.)
//
// Fences for the order of memory are in ptx.h; the CPU emulation checks only shared_is_written(). FA3 also
// has windows, packed sequences, and a counter from which blocks take their next tile, so that the last ones
// are balanced. In 8 bits: see flash_attention_fp8.cu.
#include "ptx_attention.h"

constexpr int ROWS = 128, KEYS = 128, STAGES = 2;
constexpr float LOG2_E = 1.44269504f;

constexpr int shared_bytes(int D) { return (2 * ROWS + 2 * STAGES * KEYS) * D * 2; }

// Of each head the pairs of tiles of queries: the first and the last, the second and the last but one, ...
__host__ __device__ inline int pairs_of_tiles(int S_q) { return ((S_q + ROWS - 1) / ROWS + 1) / 2; }

// The work of one block, tile of queries after tile of queries. Producer and consumers each iterate over it,
// and all get the same tiles in the same order. Pairs of a head are counted first, then heads, then
// sequences, without divisions, whose constants would occupy registers all the time.
struct Work {
    int S_q, S_k, N, B, last, p = 0, half = -1;  // half: of the pair; -1 before the first
    int row0, tiles, n = 0, b = 0;  // of the tile that `next` has found: its first row, its tiles of keys, head, sequence

    __device__ Work(int S_q, int S_k, int N, int B, int last) : S_q(S_q), S_k(S_k), N(N), B(B), last(last) {}
    __device__ void advance(int pairs_on) {
        for (p += pairs_on; p >= pairs_of_tiles(S_q); p -= pairs_of_tiles(S_q))
            if (++n == N) n = 0, b++;
    }
    __device__ bool next() {
        int last_tile = (S_q + ROWS - 1) / ROWS - 1;
        if (half == 0 && p != last_tile - p) half = 1;  // the middle one of an odd number is single
        else advance(half < 0 ? blockIdx.x : gridDim.x), half = 0;
        if (b >= B) return false;
        row0 = (half ? p : last_tile - p) * ROWS;  // causal: the longer one of the pair first
        int rows_end = row0 + ROWS < S_q ? row0 + ROWS : S_q;
        int end = rows_end + last < S_k ? rows_end + last : S_k;  // query i sees the keys 0 .. min(i + last, S_k - 1)
        tiles = end > 0 ? (end + KEYS - 1) / KEYS : 0;
        return true;
    }
};

// One tile of scores [64, 128] of a warpgroup becomes weights 2^(scale · score - maximum). Thread t holds
// rows t/32·16 + t%32/4 (0) and 8 below (1), and of every 8 keys the pair t%4·2: four neighbouring lanes hold
// a row. The upper one of my two rows sees the keys up to `last`, the lower one 8 more, and none beyond
// `end`; unless `cut`, all rows see all keys.
__device__ inline void softmax(float (&scores)[64], float (&m)[2], float (&total)[2], float (&shrink)[2], int key0,
                               int last, int end, bool cut, float scale) {
    if (cut) {
        int highest[2] = {last < end ? last : end, last + 8 < end ? last + 8 : end};
#pragma unroll
        for (int i = 0; i < 64; i++) {
            int key = key0 + i / 4 * 8 + int(threadIdx.x % 4) * 2 + i % 2;
            if (key > highest[i / 2 % 2]) scores[i] = -INFINITY;
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float largest = m[r];
#pragma unroll
        for (int i = 2 * r; i < 64; i += 4) largest = fmaxf(largest, fmaxf(scores[i], scores[i + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        float safe = largest == -INFINITY ? 0.0f : largest * scale;  // a row that has seen no key: 2^(-inf - 0) = 0
        shrink[r] = exp2_fast(m[r] * scale - safe);  // earlier sums were relative to the old maximum
        m[r] = largest;
        total[r] *= shrink[r];  // of this thread's keys; the four lanes of a row are summed at the end
#pragma unroll
        for (int i = 2 * r; i < 64; i += 4) {
            scores[i] = exp2_fast(scores[i] * scale - safe);
            scores[i + 1] = exp2_fast(scores[i + 1] * scale - safe);
            total[r] += scores[i] + scores[i + 1];
        }
    }
}

// Write the 16 rows of a warp. They are stored in shared memory in the swizzle that the copy engine undoes:
// the 32 lanes of a store then use 32 banks, and global memory is written in rows of 128 bytes. (Direct
// stores would write 16 bytes in each of 8 rows.) The engine skips rows beyond the last query. `share`: the
// factors of the two rows of a thread. `to`: this warp's buffer, [16, D] in panels.
template <int D>
__device__ inline void put_rows(const HeadMap* out, bf16* to, const float (&sum)[D / 2], const float (&share)[2], int b,
                                int row, int n, int S_q) {
    int lane = threadIdx.x % 32;
    if (lane == 0) out_wait<0>();  // my last output has been read,
    __syncwarp();                  // for all lanes
#pragma unroll
    for (int c = 0; c < D / 2; c += 2) {
        int column = c / 4 * 8, r = c / 2 % 2, panel = column / PANEL;
        bf16* pair = to + panel * 16 * PANEL + swizzled(lane / 4 + 8 * r, column % PANEL / 8) + lane % 4 * 2;
        put_shared(pair, sum[c] * share[r], sum[c + 1] * share[r]);
    }
    shared_is_written();  // per lane,
    __syncwarp();         // then one lane requests
    if (lane == 0 && row < S_q) {
        for (int p = 0; p < D / PANEL; p++) copy_panel_out(out, b, row, n, p * PANEL, to + p * 16 * PANEL);
        out_commit();
    }
}

template <int D>
__global__ void __launch_bounds__(384, 1)
attention_forward(int S_q, int S_k, int N, int G, int B, int last, float scale, const __grid_constant__ HeadMap q,
                  const __grid_constant__ HeadMap k, const __grid_constant__ HeadMap v,
                  const __grid_constant__ HeadMap out, global<float> lse) {
    constexpr int TILE = KEYS * D, PANEL_BYTES = KEYS * PANEL * 2;
    DYNAMIC_SHARED(bf16, Q);
    bf16 *K = Q + ROWS * D, *V = K + STAGES * TILE, *O = V + STAGES * TILE;
    __shared__ uint64_t q_full, q_empty, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES], turns[2];
    int t = threadIdx.x, lane = t % 32, warpgroup = t / 128;
    if (t == 0) {
        barrier_init(&q_full, 1);
        barrier_init(&q_empty, 8);  // one arrival for each warp of the consumers
        for (int s = 0; s < STAGES; s++) {
            barrier_init(&k_full[s], 1);
            barrier_init(&v_full[s], 1);
            barrier_init(&k_empty[s], 8);
            barrier_init(&v_empty[s], 8);
        }
        barrier_init(&turns[0], 4);  // one for each warp of the *other* consumer
        barrier_init(&turns[1], 4);
        barrier_init_done();
    }
    __syncthreads();
    Work work(S_q, S_k, N, B, last);
    int use = 0, round = 0;  // earlier tiles of keys, of queries; a use: a phase of full and of empty

    if (warpgroup == 0) {  // --------------------------------------------------------------------------- the producer
        keep_registers<40>();
        if (t != 0) return;
        auto load = [&](const HeadMap& x, bf16* to, uint64_t* full, uint64_t* empty, int i, int j) {
            int s = i % STAGES;
            wait(&empty[s], (i / STAGES + 1) % 2);  // for its last use to end; in the first round that counts as done
            arrive_and_expect(&full[s], TILE * 2);
            for (int p = 0; p < D / PANEL; p++)
                copy_panel(to + s * TILE + p * KEYS * PANEL, &x, work.b, j * KEYS, work.n / G, p * PANEL, &full[s]);
        };
        while (work.next()) {
            note_tiles(work.tiles);
            if (work.tiles == 0) continue;  // no query sees a key: consumers also skip it
            wait(&q_empty, (round + 1) % 2);
            arrive_and_expect(&q_full, ROWS * D * 2);
            for (int p = 0; p < D / PANEL; p++)
                copy_panel(Q + p * ROWS * PANEL, &q, work.b, work.row0, work.n, p * PANEL, &q_full);
#pragma unroll 1
            for (int j = 0; j < work.tiles; j++, use++) {
                load(k, K, k_full, k_empty, use, j);
                load(v, V, v_full, v_empty, use, j);
            }
            round++;
        }
        return;
    }

    take_registers<232>();  // ------------------------------------------------------------------------ the consumers
    int me = warpgroup - 1, warp = t % 128 / 32, my_row0;
    float scores[64], sum[D / 2], m[2], total[2], shrink[2];
    uint32_t weights[32];

    auto order_scores = [&](int i) {
        const bf16 *mine = Q + me * 64 * PANEL, *keys = K + i % STAGES * TILE;
        scores_wgmma<false>(scores, descriptor(mine, 0), descriptor(keys, 0));
#pragma unroll
        for (int d = 16; d < D; d += 16)
            scores_wgmma<true>(scores, descriptor(mine + d / PANEL * ROWS * PANEL, d % PANEL),
                               descriptor(keys + d / PANEL * KEYS * PANEL, d % PANEL));
        wgmma_commit();
    };
    auto order_values = [&](int i) {
#pragma unroll
        for (int key = 0; key < KEYS; key += 16)
            values_wgmma(sum, weights + key / 4, across(V + i % STAGES * TILE, key, PANEL_BYTES));
        wgmma_commit();
    };
    auto take_turn = [&](int j) {  // consumer 1 in turn j waits for consumer 0's turn j, and that for 1's turn j - 1
        wait(&turns[me], (j + 1 + me) % 2);
        settle(sum);
        settle(weights);
        settle(scores);
        wgmma_fence();
        if (t % 128 == 0) note_turn(me);
    };
    auto pass_turn = [&] {  // my wgmma are in the queue of the tensor cores: the other's are behind them
        if (lane == 0) arrive(&turns[1 - me]);
    };
    auto done_with = [&](uint64_t* empty) {
        if (lane == 0) arrive(empty);
    };
    auto weigh = [&](int j) {
        bool cut = j * KEYS + KEYS > (my_row0 + last + 1 < S_k ? my_row0 + last + 1 : S_k);
        softmax(scores, m, total, shrink, j * KEYS, my_row0 + warp * 16 + lane / 4 + last, S_k - 1, cut, scale * LOG2_E);
    };
    auto pack_weights = [&] {
#pragma unroll
        for (int i = 0; i < 32; i++) weights[i] = pack(scores[2 * i], scores[2 * i + 1]);
    };

    while (work.next()) {
        int tiles = work.tiles;
        my_row0 = work.row0 + me * 64;
        int row = my_row0 + warp * 16 + lane / 4;  // and 8 below
#pragma unroll
        for (int r = 0; r < 2; r++) {
            m[r] = -INFINITY;
            total[r] = 0;
        }
#pragma unroll
        for (int i = 0; i < D / 2; i++) sum[i] = 0;

        if (tiles > 0) {
            wait(&q_full, round % 2);
            wait(&k_full[use % STAGES], use / STAGES % 2);
            take_turn(use + round);  // each earlier tile of queries had one turn more than tiles of keys
            order_scores(use);
            pass_turn();
            wgmma_done<0>(scores);
            done_with(&k_empty[use % STAGES]);
            weigh(0);
            pack_weights();
            wait(&v_full[use % STAGES], use / STAGES % 2);
            for (int j = 1; j < tiles; j++) {
                int i = use + j;
                wait(&k_full[i % STAGES], i / STAGES % 2);
                take_turn(i + round);
                order_scores(i);
                order_values(i - 1);
                pass_turn();
                wgmma_done<1>(scores);  // all but the last group: scores are ready, values perhaps not
                done_with(&k_empty[i % STAGES]);
                weigh(j);
                // Unless a branch lies between, ptxas moves the wait below before the exponentials: the overlap is gone.
                // So wait for the values of the next turn here, in a loop: they are nearly always ready.
                settle(scores);
                wait(&v_full[i % STAGES], i / STAGES % 2);
                wgmma_done<0>(sum);
                done_with(&v_empty[(i - 1) % STAGES]);
#pragma unroll
                for (int c = 0; c < D / 2; c++) sum[c] *= shrink[c / 2 % 2];
                pack_weights();  // not earlier: the previous tile's wgmma was still reading them
            }
            done_with(&q_empty);  // all scores of these queries are done: the next queries may be loaded
            use += tiles;
            take_turn(use + round);
            round++;
            order_values(use - 1);
            pass_turn();
            wgmma_done<0>(sum);
            done_with(&v_empty[(use - 1) % STAGES]);
        }

        float share[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            total[r] += __shfl_xor_sync(~0u, total[r], 1);
            total[r] += __shfl_xor_sync(~0u, total[r], 2);
            share[r] = total[r] == 0 ? 0.0f : 1 / total[r];  // a row without keys: out = 0, LSE = -inf; NaN stays NaN
            int i = row + 8 * r;
            if (lane % 4 == 0 && i < S_q)
                lse[(int64_t(work.b) * N + work.n) * S_q + i] =
                    total[r] == 0 ? -INFINITY : m[r] * scale + log2f(total[r]) / LOG2_E;
        }
        put_rows<D>(&out, O + (me * 4 + warp) * 16 * D, sum, share, work.b, my_row0 + warp * 16, work.n, S_q);
    }
    if (lane == 0) out_wait<0>();  // keep shared memory until it has been read
}

// ---------------------------------------------------------------------------------------------------- the host's part

extern "C" const char* run_attention(int D, int B, int S_q, int S_k, int N, int N_kv, int last, float scale,
                                     const bf16* q, const bf16* k, const bf16* v, bf16* out, float* lse, void* stream) {
    HeadMap map_q, map_k, map_v, map_out;
    const char* error = describe_heads(&map_q, q, B, S_q, N, D, ROWS);
    if (!error) error = describe_heads(&map_out, out, B, S_q, N, D, 16);
    if (!error) error = describe_heads(&map_k, k, B, S_k, N_kv, D, KEYS);
    if (!error) error = describe_heads(&map_v, v, B, S_k, N_kv, D, KEYS);
    if (error) return error;
#ifndef __CUDACC__
    cuda_on_cpu::turns.clear();
    cuda_on_cpu::tiles_taken.clear();
#endif
    int blocks = std::min(pairs_of_tiles(S_q) * N * B, multiprocessors());
    auto start = [&](auto kernel, int bytes) {
        return launch(kernel, dim3(blocks), dim3(384), bytes, stream, S_q, S_k, N, N / N_kv, B, last, scale, map_q, map_k,
                      map_v, map_out, lse);
    };
    if (D == 64) return start(attention_forward<64>, shared_bytes(64));
    if (D == 128) return start(attention_forward<128>, shared_bytes(128));
    return "flash_attention_cuda.cu has head dims 64 and 128";
}

#ifndef __CUDACC__
// For the tests, of the last launch: which consumer issued wgmma, in this order; and the tiles of keys of
// each tile of queries that a block took. Both return the number of entries.
extern "C" int attention_turns(int* to, int room) { return cuda_on_cpu::copied(cuda_on_cpu::turns, to, room); }
extern "C" int attention_tiles(int* to, int room) { return cuda_on_cpu::copied(cuda_on_cpu::tiles_taken, to, room); }
#endif
