// What a product in 8 bits needs of Hopper beyond chapter 09's ptx.h: fp8 wgmma, and a line of scales.
//
// As there: on a GPU a line of PTX, on the CPU what that line means. Sources: PTX ISA, "Asynchronous warpgroup level
// matrix multiply-accumulate" and "cp.async.bulk"; for the sums of 14 bits DeepSeek-V3 (2412.19437, section 3.5.2).
//
// Nothing else is new. The copy engine moves bytes: to it two neighbours of 8 bits are one number of 16. So a row of
// 128 fp8 numbers is a row of TILE_K = 64 of ptx.h, with the same swizzle, and the same descriptors find it.
#pragma once
#include "clusters.h"  // chapter 09's

constexpr int TILE = 128;  // numbers of 8 bits in a row of a tile, and terms that share their scales
using Pair = bf16;         // two neighbours of 8 bits, to the copy engine
enum Format8 { E4M3, E5M2 };

#ifdef __CUDACC__  // ---------------------------------------------------------------------------------------- on a GPU

// One thread asks for `count` floats that follow one another, from an address that 16 divides.
__device__ inline void copy_line(float* to, const float* from, int count, uint64_t* barrier) {
    ON_HOPPER(asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                           "[%0], [%1], %2, [%3];\n" ::"r"(address_of(to)),
                           "l"(from), "r"(count * 4), "r"(address_of(barrier))
                           : "memory"));
}

#define SUMS                                                                                                          \
    "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
    "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"    \
    "%57,%58,%59,%60,%61,%62,%63}, %64, %65, %66, 1, 1;\n"  // D is added to, or not; A and B as they are, along K

// D[64, 128] = A[64, 32] · B[128, 32]ᵀ by 128 threads, or += if ADD; A in either format, B in e4m3, both along K.
template <Format8 A, bool ADD>
__device__ inline void wgmma_fp8(float (&d)[64], uint64_t a, uint64_t b) {
    if constexpr (A == E4M3)
        ON_HOPPER(asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " SUMS
                               : D64(0)
                               : "l"(a), "l"(b), "n"(int(ADD))));
    else
        ON_HOPPER(asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e5m2.e4m3 " SUMS
                               : D64(0)
                               : "l"(a), "l"(b), "n"(int(ADD))));
}
template <int LEFT>  // as in ptx.h, for 64 sums: until at most LEFT of my groups of products are unfinished
__device__ inline void wgmma_wait(float (&d)[64]) {
    ON_HOPPER(asm volatile("wgmma.wait_group.sync.aligned %64;\n" : D64(0) : "n"(LEFT) : "memory"));
}

#else  // -------------------------------------------------------------------------------------------------- on the CPU

inline void copy_line(float* to, const float* from, int count, uint64_t* barrier) {
    using namespace cuda_on_cpu;
    auto copy = [=] {
        memcpy(to, from, count * 4);
        auto& b = mbarriers[barrier];
        b.bytes -= count * 4;
        b.check();
    };
    if (the.counting) {
        the.requests[GLOBAL_LOAD]++;
        the.units[GLOBAL_LOAD] += count * 4 / 32;
    }
    if (the.late()) the.in_flight.push_back(copy);
    else copy();
}

namespace cuda_on_cpu {

static int accumulator_bits = 14;  // 0: as many as there are. For the tests

inline float decode(uint8_t pattern, Format8 format) {  // sign, exponent, mantissa; see formats.py
    int M = format == E4M3 ? 3 : 2, bias = format == E4M3 ? 7 : 15, m = pattern & ((1 << M) - 1);
    int e = pattern >> M & (format == E4M3 ? 15 : 31);
    float value = e ? ldexpf(1 + ldexpf(m, -M), e - bias) : ldexpf(m, 1 - bias - M);
    if (format == E4M3 && e == 15 && m == 7) value = NAN;
    if (format == E5M2 && e == 31) value = m ? NAN : INFINITY;
    return pattern & 128 ? -value : value;
}
static const float* decoded(Format8 format) {  // all 256; static: a table of this library, if others are loaded
    static std::vector<float> table[2] = {std::vector<float>(256), std::vector<float>(256)};
    static bool ready = [] {
        for (int f = 0; f < 2; f++)
            for (int p = 0; p < 256; p++) table[f][p] = decode(p, Format8(f));
        return true;
    }();
    (void)ready;
    return table[format].data();
}
// 32 numbers of a row, as the tensor core finds them: two 16-byte chunks, each where the swizzle has put it.
inline void row_of(float* out, uint64_t descriptor, int row, const float* table) {
    uint32_t start = (descriptor & 0x3fff) << 4, eight_rows = (descriptor >> 32 & 0x3fff) << 4;
    for (int chunk = 0; chunk < 2; chunk++) {
        uint32_t at = start + row / 8 * eight_rows + row % 8 * 128 + 16 * chunk;
        if (descriptor >> 62 == 1) at ^= at >> 3 & 0x70;
        for (int i = 0; i < 16; i++) out[16 * chunk + i] = table[uint8_t(the.dynamic_shared[at + i])];
    }
}
// One result of the tensor core: 32 products and the sum so far are shifted to the largest exponent among them, and of
// each so many bits are kept. What was cut off is gone.
inline float add_products(float sum, const float* x, const float* y) {
    float products[32], largest = fabsf(sum), plain = sum;
    for (int k = 0; k < 32; k++) {
        products[k] = x[k] * y[k];  // exact: at most 8 bits of mantissa
        largest = std::max(largest, fabsf(products[k]));
        plain += products[k];
    }
    if (!accumulator_bits || !std::isfinite(plain) || largest == 0) return plain;
    int exponent;
    frexpf(largest, &exponent);
    float steps = ldexpf(1, accumulator_bits - exponent), kept = float(int(sum * steps));  // int(): towards zero
    for (int k = 0; k < 32; k++) kept += float(int(products[k] * steps));
    return kept / steps;
}

}  // namespace cuda_on_cpu

template <Format8 A, bool ADD>
void wgmma_fp8(float (&d)[64], uint64_t a, uint64_t b) {
    using namespace cuda_on_cpu;
    int thread = the.running->index % 128, row = thread / 32 * 16 + thread % 32 / 4, pair = thread % 4 * 2;
    mine(products).add([=, sums = &d[0]] {
        float x[2][32], y[32];
        for (int lower = 0; lower < 2; lower++) row_of(x[lower], a, row + 8 * lower, decoded(A));
        for (int j = 0; j < 32; j++) {
            row_of(y, b, j / 2 * 8 + pair + j % 2, decoded(E4M3));
            for (int lower = 0; lower < 2; lower++) {
                float& sum = sums[j / 2 * 4 + lower * 2 + j % 2];
                sum = add_products(ADD ? sum : 0, x[lower], y);
            }
        }
    });
}
template <int LEFT>
void wgmma_wait(float (&)[64]) {
    cuda_on_cpu::mine(cuda_on_cpu::products).wait(LEFT);
    __syncwarp();
}

extern "C" void set_accumulator_bits(int bits) { cuda_on_cpu::accumulator_bits = bits; }

#endif
