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

// What wgmma leaves to thread t of a warpgroup, of 64 x 256: rows t/32·16 + t%32/4 and 8 below, of every 8 columns the
// pair t%4·2.
__device__ inline void put_tile(global<bf16> C, const float (&sum)[128], int row0, int col0, int M, int N) {
    int t = threadIdx.x % 128, row = row0 + t / 32 * 16 + t % 32 / 4, col = col0 + t % 4 * 2;
#pragma unroll
    for (int j = 0; j < 32; j++) {
        put_pair(C, row, col + j * 8, M, N, sum[4 * j], sum[4 * j + 1]);
        put_pair(C, row + 8, col + j * 8, M, N, sum[4 * j + 2], sum[4 * j + 3]);
    }
}

// Tiles are taken in stripes, STRIPE rows of tiles high, column by column: the blocks that run at one time then share
// few rows of A and few of B, which fit into L2. (Row by row, they would need few rows of A and all of B.)
template <int STRIPE>
__device__ inline void tile_of(int index, int rows, int cols, int* row, int* col) {
    int first = index / (STRIPE * cols) * STRIPE, height = rows - first < STRIPE ? rows - first : STRIPE;
    *row = first + index % (STRIPE * cols) % height;
    *col = index % (STRIPE * cols) / height;
}
