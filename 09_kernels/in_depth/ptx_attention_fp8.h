// What attention in 8 bits needs of Hopper beyond ptx_attention.h: products of e4m3, and four weights in a register.
//
// As there: on a GPU a line of PTX, on the CPU what that line means. Sources: PTX ISA, "Asynchronous warpgroup level
// matrix multiply-accumulate" (register fragments of .m64k32, and the canonical layouts) and "cvt"; for the sums of 14
// bits DeepSeek-V3 (arXiv 2412.19437, section 3.5.2).
//
// The copy engine moves bytes: to it two neighbours of 8 bits are one number of 16. So a row of 128 fp8 numbers is a row
// of PANEL = 64 of these, with the same swizzle, and the same descriptors find it. A shorter row is filled up with zeros.
#pragma once
#include "ptx_attention.h"

using Pair = bf16;  // two neighbours of 8 bits, to the copy engine

#ifdef __CUDACC__  // ---------------------------------------------------------------------------------------- on a GPU

// Four numbers in e4m3, the first in the lowest byte. What is beyond 448 becomes 448.
__device__ inline uint32_t pack4(float a, float b, float c, float d) {
    uint32_t all = 0;
    ON_HOPPER(asm("{\n.reg .b16 lower, upper;\n"  // the upper half of each pair is named first
                  "cvt.rn.satfinite.e4m3x2.f32 lower, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 upper, %4, %3;\n"
                  "mov.b32 %0, {lower, upper};\n}\n"
                  : "=r"(all)
                  : "f"(a), "f"(b), "f"(c), "f"(d)));
    return all;
}

// D[64, 128] = A[64, 32] · B[128, 32]ᵀ by 128 threads, or += if ADD; both factors in shared memory, along K.
template <bool ADD>
__device__ inline void scores_fp8(float (&d)[64], uint64_t a, uint64_t b) {
    ON_HOPPER(asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " R64 "}, %64, %65, %66, 1, 1;\n"
                           : D32(0), D32(32)
                           : "l"(a), "l"(b), "n"(int(ADD))));
}
// D[64, N] = A[64, 32] · B[N, 32]ᵀ, or +=: A in registers, B in shared memory, along K. It cannot be read across, as
// bf16 can: the two numbers that say so do not exist for 8 bits.
template <bool ADD>
__device__ inline void values_fp8(float (&d)[64], const uint32_t* a, uint64_t b) {
    ON_HOPPER(asm volatile("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " R64
                           "}, {%64, %65, %66, %67}, %68, %69, 1, 1;\n"
                           : D32(0), D32(32)
                           : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(ADD))));
}
template <bool ADD>
__device__ inline void values_fp8(float (&d)[32], const uint32_t* a, uint64_t b) {
    ON_HOPPER(asm volatile("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 " R32
                           "}, {%32, %33, %34, %35}, %36, %37, 1, 1;\n"
                           : D32(0)
                           : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(int(ADD))));
}

#else  // -------------------------------------------------------------------------------------------------- on the CPU

namespace cuda_on_cpu {

static int accumulator_bits = 14;  // of the tensor core's sums; 0: as many as there are. For the tests

inline float decode(uint8_t pattern) {  // e4m3: a sign, 4 bits of exponent, 3 of mantissa; no infinity, one NaN
    int e = pattern >> 3 & 15, m = pattern & 7;
    float value = e ? ldexpf(8 + m, e - 10) : ldexpf(m, -9);
    if (e == 15 && m == 7) value = NAN;
    return pattern & 128 ? -value : value;
}
inline uint8_t encode(float x) {  // to nearest, ties to even
    uint8_t sign = std::signbit(x) ? 128 : 0;
    float size = fabsf(x);
    if (std::isnan(x)) return 0x7f;
    if (size > 448) return sign | 0x7e;
    int e = std::max(size > 0 ? std::ilogb(size) : -6, -6);
    int steps = int(nearbyintf(ldexpf(size, 3 - e)));  // of 2^(e - 3): 8 to 16, or fewer below 2^-6
    return sign | uint8_t(steps + (e + 6) * 8);        // 16 steps are 8 of the next exponent, and that comes by itself
}
static const float* decoded() {  // all 256
    static const std::vector<float> table = [] {
        std::vector<float> t(256);
        for (int p = 0; p < 256; p++) t[p] = decode(uint8_t(p));
        return t;
    }();
    return table.data();
}
// 32 numbers of a row, as the tensor core finds them: two 16-byte chunks, each where the swizzle has put it.
inline void row_of(float* out, uint64_t descriptor, int row) {
    uint32_t start = (descriptor & 0x3fff) << 4, eight_rows = (descriptor >> 32 & 0x3fff) << 4;
    for (int chunk = 0; chunk < 2; chunk++) {
        uint32_t at = start + row / 8 * eight_rows + row % 8 * 128 + 16 * chunk;
        if (descriptor >> 62 == 1) at ^= at >> 3 & 0x70;
        for (int i = 0; i < 16; i++) out[16 * chunk + i] = decoded()[uint8_t(the.dynamic_shared[at + i])];
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
// `left(row, out)` are 32 numbers of a row of A, late: when the product is computed.
template <int N, bool ADD, class A>
void product8(float* sums, A left, uint64_t b) {
    int thread = the.running->index % 128, row = thread / 32 * 16 + thread % 32 / 4, pair = thread % 4 * 2;
    mine(products).add([=] {
        float x[2][32], y[32];
        for (int lower = 0; lower < 2; lower++) left(row + 8 * lower, x[lower]);
        for (int j = 0; j < N / 4; j++) {
            row_of(y, b, j / 2 * 8 + pair + j % 2);
            for (int lower = 0; lower < 2; lower++) {
                float& sum = sums[j / 2 * 4 + lower * 2 + j % 2];
                sum = add_products(ADD ? sum : 0, x[lower], y);
            }
        }
    });
}

}  // namespace cuda_on_cpu

inline uint32_t pack4(float a, float b, float c, float d) {
    using cuda_on_cpu::encode;
    return encode(a) | encode(b) << 8 | encode(c) << 16 | uint32_t(encode(d)) << 24;
}
template <bool ADD>
void scores_fp8(float (&d)[64], uint64_t a, uint64_t b) {
    cuda_on_cpu::product8<128, ADD>(d, [=](int row, float* out) { cuda_on_cpu::row_of(out, a, row); }, b);
}
// A row of A lies with four neighbouring lanes: lane l%4 has k = 4 (l%4) to 4 (l%4) + 3 of each 16 in one register.
template <bool ADD, int N>
void values_fp8(float (&d)[N], const uint32_t* a, uint64_t b) {
    using namespace cuda_on_cpu;
    auto held = exchange(a, __LINE__);
    auto left = [=](int row, float* out) {
        for (int k = 0; k < 32; k++)
            out[k] = decoded()[held[row % 8 * 4 + k % 16 / 4][row % 16 / 8 + k / 16 * 2] >> 8 * (k % 4) & 255];
    };
    product8<2 * N, ADD>(d, left, b);
}

extern "C" void set_accumulator_bits(int bits) { cuda_on_cpu::accumulator_bits = bits; }
extern "C" int round_to_e4m3(float x) { return cuda_on_cpu::encode(x); }
extern "C" float value_of_e4m3(int pattern) { return cuda_on_cpu::decode(uint8_t(pattern)); }

#endif
