// Chapter 9: attention in 8 bits for Hopper, forward: flash_attention_cuda.cu with factors in e4m3.
//
//     out = softmax(q kᵀ / sqrt(D)) v,  LSE       q [B, S_q, N, D], k [B, S_k, N_kv, D] e4m3, v [B, N_kv, D, S] e4m3;
//                                                 a scale for each head of each; out bf16; LSE [B, N, S_q] fp32
//
// The problem. Tensor cores multiply e4m3 at twice the rate of bf16, and a tile is half as many bytes. But wgmma takes
// 8-bit factors in one layout only, along the direction that is summed over, and both of P·V differ:
//   V   has rows along D, and the sum is over keys. bf16 could be read transposed (`across`), 8 bits cannot.
//       So V is passed transposed. The kernel that rounds it to e4m3 reads and writes all of it anyway, so
//       transposing is free there. (FlashAttention-3 transposes each tile here, in its producer, because a
//       library gets V from elsewhere.)
//   P   is in pairs of neighbours after Q·Kᵀ: of 16 keys, lane c of four has 2c, 2c + 1, 8 + 2c, 9 + 2c. A
//       left factor needs *four* neighbours, 4c to 4c + 3. No value has to move: a sum may be in any order.
//       If place 4c + 2h + e of V holds key 8h + 2c + e, each lane's weights are in place.
//
//     keys, as Q·Kᵀ leaves them:    lane 0: 0 1 8 9    lane 1: 2 3 10 11    lane 2: 4 5 12 13    lane 3: 6 7 14 15
//     places that wgmma reads:      lane 0: 0 1 2 3    lane 1: 4 5 6 7      lane 2: 8 9 10 11    lane 3: 12 13 14 15
//
// 8 bits need two more changes. A weight is between 0 and 1, where e4m3 has little range: below 2^-6 it loses
// bits, below 2^-10 it is 0. So weights are scaled by 2^8, up to 256 of 448, and so is the sum that divides
// them. The tensor core keeps about 14 bits of a sum, truncated, not rounded: over thousands of keys a biased
// error. So each tile of 128 keys has its own sum (`part`), and CUDA cores add these up in fp32 (chapter 10's
// promotion). Rescaling is also simple then: no sum is rescaled while wgmma still adds to it.
//
// Producer, consumers and their turns are drawn in flash_attention_cuda.cu. The bound: a tile of 128 x 128
// with D = 128 is 1024 cycles of matmuls and 1024 of exponentials; with D = 64, 512 and 1024.
#include "ptx_attention_fp8.h"

constexpr int ROWS = 128, KEYS = 128, STAGES = 2, TILE = KEYS * PANEL;  // in pairs: rows of 128 bytes
constexpr float LOG2_E = 1.44269504f, LIFT = 8;                         // weights are 2^LIFT times as large

constexpr int shared_bytes(int D) { return (ROWS + STAGES * (KEYS + D)) * PANEL * 2; }

// As in flash_attention_cuda.cu, but for LIFT: a tile of scores becomes weights 2^(scale · score - maximum + LIFT).
__device__ inline void softmax(float (&scores)[64], float (&m)[2], float (&total)[2], float (&shrink)[2], int key0,
                               const int (&highest)[2], bool cut, float scale) {
    if (cut) {
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
        safe -= LIFT;
#pragma unroll
        for (int i = 2 * r; i < 64; i += 4) {
            scores[i] = exp2_fast(scores[i] * scale - safe);
            scores[i + 1] = exp2_fast(scores[i + 1] * scale - safe);
            total[r] += scores[i] + scores[i + 1];
        }
    }
}

template <int D>
__global__ void __launch_bounds__(384, 1)
attention_fp8(int S_q, int S_k, int N, int G, int last, float scale, const __grid_constant__ HeadMap q,
              const __grid_constant__ HeadMap k, const __grid_constant__ HeadMap v, const float* scale_q,
              const float* scale_k, const float* scale_v, global<bf16> out, global<float> lse) {
    DYNAMIC_SHARED(Pair, Q);
    Pair *K = Q + ROWS * PANEL, *V = K + STAGES * TILE;
    __shared__ uint64_t q_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES], turns[2];
    int t = threadIdx.x, lane = t % 32, warpgroup = t / 128;
    int row0 = (gridDim.x - 1 - blockIdx.x) * ROWS, n = blockIdx.y, b = blockIdx.z;  // causal: the longest rows first
    int rows_end = row0 + ROWS < S_q ? row0 + ROWS : S_q;
    int end = rows_end + last < S_k ? rows_end + last : S_k;  // query i sees the keys 0 .. min(i + last, S_k - 1)
    int tiles = end > 0 ? (end + KEYS - 1) / KEYS : 0;
    if (t == 0) {
        barrier_init(&q_full, 1);
        for (int s = 0; s < STAGES; s++) {
            barrier_init(&k_full[s], 1);
            barrier_init(&v_full[s], 1);
            barrier_init(&k_empty[s], 8);  // one arrival for each warp of the consumers
            barrier_init(&v_empty[s], 8);
        }
        barrier_init(&turns[0], 4);  // one for each warp of the *other* consumer
        barrier_init(&turns[1], 4);
        barrier_init_done();
    }
    __syncthreads();

    if (warpgroup == 0) {  // --------------------------------------------------------------------------- the producer
        keep_registers<24>();
        if (t != 0 || tiles == 0) return;
        arrive_and_expect(&q_full, ROWS * PANEL * 2);
        copy_panel(Q, &q, b, row0, n, 0, &q_full);
        for (int j = 0; j < tiles; j++) {
            int s = j % STAGES, before = (j / STAGES + 1) % 2;  // in the first round the phase before counts as done
            wait(&k_empty[s], before);
            arrive_and_expect(&k_full[s], TILE * 2);
            copy_panel(K + s * TILE, &k, b, j * KEYS, n / G, 0, &k_full[s]);
            wait(&v_empty[s], before);
            arrive_and_expect(&v_full[s], D * PANEL * 2);  // D rows of 128 keys
            copy_panel(V + s * D * PANEL, &v, b, n / G * D, 0, j * PANEL, &v_full[s]);
        }
        return;
    }

    take_registers<240>();  // ------------------------------------------------------------------------ the consumers
    int me = warpgroup - 1, my_row0 = row0 + me * 64, row = my_row0 + t % 128 / 32 * 16 + lane / 4;
    int highest[2] = {row + last < S_k - 1 ? row + last : S_k - 1, row + 8 + last < S_k - 1 ? row + 8 + last : S_k - 1};
    float scores[64], part[D / 2], sum[D / 2] = {}, m[2] = {-INFINITY, -INFINITY}, total[2] = {}, shrink[2];
    uint32_t weights[16];
    scale *= scale_q[b * N + n] * scale_k[(b * N + n) / G];  // (b N + n) / G = b N_kv + n / G: G divides N

    auto order_scores = [&](int j) {
        const Pair *mine = Q + me * 64 * PANEL, *keys = K + j % STAGES * TILE;
        scores_fp8<false>(scores, descriptor(mine, 0), descriptor(keys, 0));
#pragma unroll
        for (int d = 32; d < D; d += 32) scores_fp8<true>(scores, descriptor(mine, d / 2), descriptor(keys, d / 2));
        wgmma_commit();
    };
    auto order_values = [&](int j) {
        const Pair* values = V + j % STAGES * D * PANEL;
        values_fp8<false>(part, weights, descriptor(values, 0));  // starts a new sum
#pragma unroll
        for (int i = 32; i < KEYS; i += 32) values_fp8<true>(part, weights + i / 8, descriptor(values, i / 2));
        wgmma_commit();
    };
    auto take_turn = [&](int j) {  // consumer 1 in turn j waits for consumer 0's turn j, and that for 1's turn j - 1
        wait(&turns[me], (j + 1 + me) % 2);
        settle(weights);
        settle(scores);
        wgmma_fence();
        if (t % 128 == 0) note_turn(me);
    };
    auto pass_turn = [&] {  // my wgmma are in the queue of the tensor cores: the other's are behind them
        if (lane == 0) arrive(&turns[1 - me]);
    };
    auto free_stage = [&](uint64_t* empty, int j) {
        if (lane == 0) arrive(&empty[j % STAGES]);
    };
    auto weigh = [&](int j) {
        bool cut = j * KEYS + KEYS > (my_row0 + last + 1 < S_k ? my_row0 + last + 1 : S_k);
        softmax(scores, m, total, shrink, j * KEYS, highest, cut, scale * LOG2_E);
    };
    // Of every 16 keys a row of mine has scores i, i + 1 of the lower eight and i + 4, i + 5 of the upper: one register.
    auto pack_weights = [&] {
#pragma unroll
        for (int w = 0; w < 16; w++) {
            int i = w / 2 * 8 + w % 2 * 2;  // registers 4s, 4s + 1: 16 keys of the upper and of the lower row; + 2: the next
            weights[w] = pack4(scores[i], scores[i + 1], scores[i + 4], scores[i + 5]);
        }
    };

    if (tiles > 0) {
        wait(&q_full, 0);
        wait(&k_full[0], 0);
        take_turn(0);
        order_scores(0);
        pass_turn();
        wgmma_done<0>(scores);
        free_stage(k_empty, 0);
        weigh(0);
        pack_weights();
        wait(&v_full[0], 0);
        for (int j = 1; j < tiles; j++) {
            wait(&k_full[j % STAGES], j / STAGES % 2);
            take_turn(j);
            order_scores(j);
            order_values(j - 1);
            pass_turn();
            wgmma_done<1>(scores);  // all but the last group: the scores are ready, the values perhaps not
            free_stage(k_empty, j);
            weigh(j);
            settle(scores);  // and a wait, or ptxas moves wgmma_done before the exponentials
            wait(&v_full[j % STAGES], j / STAGES % 2);
            wgmma_done<0>(part);
            free_stage(v_empty, j - 1);
#pragma unroll
            for (int i = 0; i < D / 2; i++) sum[i] = (sum[i] + part[i]) * shrink[i / 2 % 2];
            pack_weights();  // not earlier: the previous tile's wgmma was still reading them
        }
        take_turn(tiles);
        order_values(tiles - 1);
        pass_turn();
        wgmma_done<0>(part);
#pragma unroll
        for (int i = 0; i < D / 2; i++) sum[i] += part[i];
    }

    float scale_of_v = scale_v[(b * N + n) / G];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        total[r] += __shfl_xor_sync(~0u, total[r], 1);
        total[r] += __shfl_xor_sync(~0u, total[r], 2);
        int i = row + 8 * r;
        if (i >= S_q) continue;
        float share = total[r] == 0 ? 0.0f : scale_of_v / total[r];  // a row without keys: out = 0, LSE = -inf
        if (lane % 4 == 0)
            lse[(int64_t(b) * N + n) * S_q + i] =
                total[r] == 0 ? -INFINITY : m[r] * scale + (log2f(total[r]) - LIFT) / LOG2_E;
        global<bf16> to = out + ((int64_t(b) * S_q + i) * N + n) * D;
#pragma unroll
        for (int c = 2 * r; c < D / 2; c += 4)
            store2(to, c / 4 * 8 + lane % 4 * 2, sum[c] * share, sum[c + 1] * share);
    }
}

// ---------------------------------------------------------------------------------------------------- the host's part

// v [B, N_kv, D, S]: keys in the order of the kernel, S a multiple of KEYS, with zeros behind the last key.
extern "C" const char* run_attention(int D, int B, int S_q, int S_k, int N, int N_kv, int S, int last, float scale,
                                     const void* q, const void* k, const void* v, const float* scale_q,
                                     const float* scale_k, const float* scale_v, bf16* out, float* lse, void* stream) {
    HeadMap map_q, map_k, map_v;
    const char* error = describe_heads(&map_q, (const Pair*)q, B, S_q, N, D / 2, ROWS);
    if (!error) error = describe_heads(&map_k, (const Pair*)k, B, S_k, N_kv, D / 2, KEYS);
    if (!error) error = describe_heads(&map_v, (const Pair*)v, B, N_kv * D, 1, S / 2, D);
    if (error) return error;
#ifndef __CUDACC__
    cuda_on_cpu::turns.clear();
#endif
    dim3 grid((S_q + ROWS - 1) / ROWS, N, B);
    auto start = [&](auto kernel, int bytes) {
        return launch(kernel, grid, dim3(384), bytes, stream, S_q, S_k, N, N / N_kv, last, scale, map_q, map_k, map_v,
                      scale_q, scale_k, scale_v, out, lse);
    };
    if (D == 64) return start(attention_fp8<64>, shared_bytes(64));
    if (D == 128) return start(attention_fp8<128>, shared_bytes(128));
    return "flash_attention_fp8.cu has head dims 64 and 128";
}

#ifndef __CUDACC__
// For the tests: which consumer issued wgmma, in this order, in the last launch; returns the count.
extern "C" int attention_turns(int* to, int room) { return cuda_on_cpu::copied(cuda_on_cpu::turns, to, room); }
#endif
