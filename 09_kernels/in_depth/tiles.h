// How a tile of C leaves the registers, and which tile is next: shared by tensor_cores.cu and clusters.cu.
#pragma once
#include "ptx.h"

// Two neighbours of a row of C, in one store where rows begin at multiples of 4 bytes.
__device__ inline void put_pair(global<bf16> C, int row, int col, int M, int N, float first, float second) {
    if (row >= M || col >= N) return;
    if (N % 2 == 0) {
        store2(C, row * N + col, first, second);
        return;
    }
    C[row * N + col] = __float2bfloat16(first);
    if (col + 1 < N) C[row * N + col + 1] = __float2bfloat16(second);
}

// Of 64 x 256 sums thread t of a warpgroup holds rows t/32·16 + t%32/4 and 8 below, of every 8 columns the
// pair t%4·2.
__device__ inline void put_tile(global<bf16> C, const float (&sum)[128], int row0, int col0, int M, int N) {
    int t = threadIdx.x % 128, row = row0 + t / 32 * 16 + t % 32 / 4, col = col0 + t % 4 * 2;
#pragma unroll
    for (int j = 0; j < 32; j++) {
        put_pair(C, row, col + j * 8, M, N, sum[4 * j], sum[4 * j + 1]);
        put_pair(C, row + 8, col + j * 8, M, N, sum[4 * j + 2], sum[4 * j + 3]);
    }
}

// The same by the copy engine. A warp writes its 16 x 256 sums into shared memory as four tiles of 64 columns, in the
// swizzle that the engine undoes: the 32 lanes of a store then use 32 banks. (Straight to C, they write 16
// bytes in each of 8 rows.) One lane asks for each tile to be copied out, and goes on. `buffer` is this warp's own, with
// room for BUFFERS tiles of 16 x 64. Where these are fewer than four, the third tile waits until the first is read.
template <int BUFFERS>
__device__ inline void put_tile_by_engine(const CUtensorMap* C, bf16* buffer, const float (&sum)[128], int row,
                                          int col) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        bf16* tile = buffer + j % BUFFERS * 16 * TILE_K;
        if (lane == 0) out_wait<BUFFERS - 1>();  // what I wrote here before has been read,
        __syncwarp();                            // and all lanes know
#pragma unroll
        for (int i = 0; i < 8; i++)
            for (int lower = 0; lower < 2; lower++) {
                bf16* to = tile + swizzled(lane / 4 + 8 * lower, i) + lane % 4 * 2;
                put_shared(to, sum[32 * j + 4 * i + 2 * lower], sum[32 * j + 4 * i + 2 * lower + 1]);
            }
        shared_is_written();  // each lane says so for itself,
        __syncwarp();         // all have, and one asks
        if (lane == 0) {
            copy_tile_out(C, row, col + j * TILE_K, tile);
            out_commit();
        }
    }
}

// The engine takes matrices whose rows begin at multiples of 16 bytes. Others are written by the threads.
inline const char* describe_output(CUtensorMap* map, bf16* C, int M, int N, int* by_engine) {
    *by_engine = N % 8 == 0 && (uintptr_t)C % 16 == 0;
    return *by_engine ? describe_matrix(map, C, M, N, 16) : nullptr;
}

// Tiles are taken in stripes, STRIPE rows of tiles high, column by column: the blocks that run at one time then share
// few rows of A and few of B, which fit into L2. (Row by row, they would need few rows of A and all of B.)
template <int STRIPE>
__device__ inline void tile_of(int index, int rows, int cols, int* row, int* col) {
    int first = index / (STRIPE * cols) * STRIPE, height = rows - first < STRIPE ? rows - first : STRIPE;
    *row = first + index % (STRIPE * cols) % height;
    *col = index % (STRIPE * cols) / height;
}
