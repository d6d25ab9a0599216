// What attention needs of Hopper beyond ptx.h: tiles of one head, and products whose left factor is in registers.
//
// As there: on a GPU a line of PTX, on the CPU what that line means. Sources: PTX ISA, "cp.async.bulk.tensor",
// "Asynchronous warpgroup level matrix multiply-accumulate", with the tables of canonical layouts and strides; CUDA
// driver API, cuTensorMapEncodeTiled.
//
//     Q·Kᵀ    both factors lie in shared memory in rows along D, the direction that is summed over: as in rung 9
//     P·V     P is in registers, laid out as the accumulator of Q·Kᵀ came out; V lies in rows along D too, but here the
//             sum is over its rows, the keys. wgmma reads such a factor transposed, with another descriptor: across()
//
// A row of D = 128 does not fit into a swizzled row of 128 bytes: D is cut into panels of 64 columns.
#pragma once
#include <algorithm>

#include "clusters.h"

#ifdef __CUDACC__  // ---------------------------------------------------------------------------------------- on a GPU

using HeadMap = CUtensorMap;

// Tell the copy engine about x [B, S, N, D] and the number of tokens of the tiles that will be asked for.
inline const char* describe_heads(HeadMap* map, const bf16* x, int B, int S, int N, int D, int tokens) {
    static auto encode = (decltype(&cuTensorMapEncodeTiled))dlsym(dlopen("libcuda.so.1", RTLD_NOW),
                                                                  "cuTensorMapEncodeTiled");
    if (!encode) return "the driver has no cuTensorMapEncodeTiled: it is older than CUDA 12";
    static thread_local cudaError_t context = cudaFree(nullptr);  // the driver wants one, and a new thread has none
    if (context != cudaSuccess) return cudaGetErrorString(context);
    cuuint64_t sizes[4] = {(cuuint64_t)D, (cuuint64_t)N, (cuuint64_t)S, (cuuint64_t)B};  // the innermost comes first
    cuuint64_t bytes[3] = {2ull * D, 2ull * D * N, 2ull * D * N * S};
    cuuint32_t box[4] = {PANEL, 1, (cuuint32_t)tokens, 1}, steps[4] = {1, 1, 1, 1};
    CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void*)x, sizes, bytes, box, steps,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? nullptr : "cuTensorMapEncodeTiled refused the tensor";
}

// One panel of a tile: tokens from `token` on of one head, columns from `col` on. Beyond the last token come zeros.
__device__ inline void copy_panel(bf16* to, const HeadMap* x, int b, int token, int head, int col, uint64_t* barrier) {
    ON_HOPPER(asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                           "[%0], [%1, {%3, %4, %5, %6}], [%2];\n" ::"r"(address_of(to)),
                           "l"(x), "r"(address_of(barrier)), "r"(col), "r"(head), "r"(token), "r"(b)
                           : "memory"));
}

// One panel of a tile out, from shared memory that is written (as in ptx.h); tokens beyond the last one are left out.
__device__ inline void copy_panel_out(const HeadMap* x, int b, int token, int head, int col, const bf16* from) {
    ON_HOPPER(asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];\n" ::"l"(
                               x),
                           "r"(col), "r"(head), "r"(token), "r"(b), "r"(address_of(from))
                           : "memory"));
}

// 2^x in one instruction of the special function unit; 2^-inf is 0.
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}
// Two numbers in bf16, the first in the lower half, as wgmma and mma take neighbours of a row.
__device__ inline uint32_t pack(float first, float second) {
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(both) : "f"(second), "f"(first));  // the upper half is named first
    return both;
}

// Numbers that ordinary instructions have changed and a product will read: the compiler may not put that off.
template <int N>
__device__ inline void settle(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N>
__device__ inline void settle(uint32_t (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}
template <int LEFT, int N>  // wait until at most LEFT of my groups of products are unfinished; d has what they made
__device__ inline void wgmma_done(float (&d)[N]) {
    ON_HOPPER(asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(LEFT) : "memory"));
    settle(d);
}

#define R32                                                                                                          \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
    "%30,%31"
#define R64                                                                                                         \
    R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57," \
        "%58,%59,%60,%61,%62,%63"
#define D32(i) D8(i), D8(i + 8), D8(i + 16), D8(i + 24)

// D[64, 128] = A[64, 16] · B[128, 16]ᵀ by 128 threads, or += if ADD; both factors in shared memory.
template <bool ADD>
__device__ inline void scores_wgmma(float (&d)[64], uint64_t a, uint64_t b) {
    ON_HOPPER(asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " R64
                           "}, %64, %65, %66, 1, 1, 0, 0;\n"  // D is added to, or not; A and B as they are, along K
                           : D32(0), D32(32)
                           : "l"(a), "l"(b), "n"(int(ADD))));
}
// D[64, N] += A[64, 16] · B[16, N] by 128 threads: A in registers, B in shared memory in rows along N (the last 1).
__device__ inline void values_wgmma(float (&d)[64], const uint32_t* a, uint64_t b) {
    ON_HOPPER(asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " R64
                           "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
                           : D32(0), D32(32)
                           : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)));
}
__device__ inline void values_wgmma(float (&d)[32], const uint32_t* a, uint64_t b) {
    ON_HOPPER(asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " R32
                           "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"
                           : D32(0)
                           : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)));
}
__device__ inline void note_turn(int) {}
__device__ inline void note_tiles(int) {}

#else  // -------------------------------------------------------------------------------------------------- on the CPU

struct HeadMap {
    const bf16* x;
    int B, S, N, D, tokens;
};
inline const char* describe_heads(HeadMap* map, const bf16* x, int B, int S, int N, int D, int tokens) {
    *map = {x, B, S, N, D, tokens};
    return nullptr;
}
inline void copy_panel(bf16* to, const HeadMap* map, int b, int token, int head, int col, uint64_t* barrier) {
    using namespace cuda_on_cpu;
    auto copy = [=, m = *map] {
        for (int t = 0; t < m.tokens; t++)
            for (int c = 0; c < PANEL; c++) {
                bool inside = token + t < m.S && col + c < m.D && head < m.N && b < m.B;
                int64_t at = ((int64_t(b) * m.S + token + t) * m.N + head) * m.D + col + c;
                to[swizzled(t, c / 8) + c % 8] = inside ? m.x[at] : bf16{0};
            }
        auto& done = mbarriers[barrier];
        done.bytes -= m.tokens * PANEL * 2;
        done.check();
    };
    if (the.counting) {
        the.requests[GLOBAL_LOAD]++;
        int tokens = std::max(0, std::min(map->tokens, map->S - token)), columns = std::min(PANEL, map->D - col);
        the.units[GLOBAL_LOAD] += tokens * columns * 2 / 32;
    }
    if (the.late()) the.in_flight.push_back(copy);
    else copy();
}

inline void copy_panel_out(const HeadMap* map, int b, int token, int head, int col, const bf16* from) {
    using namespace cuda_on_cpu;
    std::vector<bool> blind(map->tokens * PANEL);  // what the engine does not see, it takes from anywhere: NaN here
    for (int i = 0; i < map->tokens * PANEL; i++) blind[i] = unseen.count(from + i / 2 * 2);
    if (the.counting) {
        the.requests[GLOBAL_STORE]++;
        int tokens = std::max(0, std::min(map->tokens, map->S - token)), columns = std::min(PANEL, map->D - col);
        the.units[GLOBAL_STORE] += tokens * columns * 2 / 32;
    }
    mine(going_out).add([=, m = *map] {
        for (int t = 0; t < m.tokens && token + t < m.S; t++)
            for (int c = 0; c < PANEL && col + c < m.D; c++) {
                int at = swizzled(t, c / 8) + c % 8;
                int64_t place = ((int64_t(b) * m.S + token + t) * m.N + head) * m.D + col + c;
                const_cast<bf16*>(m.x)[place] = blind[at] ? bf16{0x7fff} : from[at];
            }
    });
}

inline float exp2_fast(float x) { return exp2f(x); }
inline uint32_t pack(float first, float second) {
    return __float2bfloat16(first).bits | uint32_t(__float2bfloat16(second).bits) << 16;
}
template <class T, int N>
void settle(T (&)[N]) {}
template <int LEFT, int N>
void wgmma_done(float (&)[N]) {
    cuda_on_cpu::mine(cuda_on_cpu::products).wait(LEFT);
    __syncwarp();  // the instruction ends for all lanes of a warp together
}

namespace cuda_on_cpu {

// Thread t of a warpgroup holds rows t/32·16 + t%32/4 (and 8 below), and of every 8 columns the pair t%4·2.
template <int N, class A, class B>
void product(float* sums, bool add, A a, B b) {
    int thread = the.running->index % 128, row = thread / 32 * 16 + thread % 32 / 4, pair = thread % 4 * 2;
    mine(products).add([=] {
        float x[2][16];
        for (int k = 0; k < 16; k++)
            for (int lower = 0; lower < 2; lower++) x[lower][k] = a(row + 8 * lower, k);
        for (int j = 0; j < N / 4; j++) {
            float y[16];
            for (int k = 0; k < 16; k++) y[k] = b(k, j / 2 * 8 + pair + j % 2);
            for (int lower = 0; lower < 2; lower++) {
                float& sum = sums[j / 2 * 4 + lower * 2 + j % 2];
                if (!add) sum = 0;
                for (int k = 0; k < 16; k++) sum += x[lower][k] * y[k];
            }
        }
    });
}
// For the tests: who issued products, in this order; and the tiles of keys of each tile of queries that a block took.
static std::vector<int> turns, tiles_taken;
inline int copied(const std::vector<int>& from, int* to, int room) {
    std::copy_n(from.begin(), std::min(room, (int)from.size()), to);
    return (int)from.size();
}

}  // namespace cuda_on_cpu

template <bool ADD>
void scores_wgmma(float (&d)[64], uint64_t a, uint64_t b) {
    using namespace cuda_on_cpu;
    product<128>(d, ADD, [=](int row, int k) { return element(a, row, k); },
                 [=](int k, int col) { return element(b, col, k); });
}
// A row of A lies with four neighbouring lanes. Whose registers they are is settled now; they are read when the product
// is computed, which is late: a program that uses them for something else before its wait is found out.
template <int N>
void values_wgmma(float (&d)[N], const uint32_t* a, uint64_t b) {
    using namespace cuda_on_cpu;
    auto held = exchange(a, __LINE__);
    auto left = [=](int row, int k) {
        uint32_t two = held[row % 8 * 4 + k % 8 / 2][row % 16 / 8 + k / 8 * 2];
        return __bfloat162float({uint16_t(two >> 16 * (k % 2))});
    };
    product<2 * N>(d, true, left, [=](int k, int col) { return element_across(b, k, col); });
}
inline void note_turn(int consumer) { cuda_on_cpu::turns.push_back(consumer); }
inline void note_tiles(int tiles) { cuda_on_cpu::tiles_taken.push_back(tiles); }

#endif
