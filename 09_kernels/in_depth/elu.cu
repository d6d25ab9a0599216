// Chapter 9, elementwise kernels: ELU in CUDA, what divergence costs, what fusion saves.
//
//     elu(x)  = x           for x > 0          gradient from the output:   1        for y > 0
//             = α (eˣ - 1)  otherwise                                      y + α    otherwise      (αeˣ = y + α)
//
// ELU is bound by memory: a few operations on 4 bytes that have to come from DRAM. Its time is the bytes
// moved; the arithmetic is free as long as it overlaps them. elu.py builds, runs and checks this file.
//
// In ncu look at: "DRAM throughput"; for diverge, "average active threads per warp".
#include "cuda_on_cpu.h"

__device__ inline float elu(float x, float alpha) { return x > 0 ? x : alpha * expm1f(x); }  // expm1f: exact near 0

// Four neighbours per thread by one 16-byte load and one store; the last thread takes the rest one by one.
// NaN fails `x > 0`, goes through expm1f and stays NaN.
__global__ void elu_forward(int n, float alpha, global<const float> x, global<float> y) {
    int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 3 < n) {
        float4 v = load4(x, i);
        store4(y, i, make_float4(elu(v.x, alpha), elu(v.y, alpha), elu(v.z, alpha), elu(v.w, alpha)));
    } else {
        for (; i < n; i++) y[i] = elu(x[i], alpha);
    }
}

__device__ inline float elu_gradient(float y, float dy, float alpha) { return y > 0 ? dy : dy * (y + alpha); }

// From y instead of x: x need not be saved, and no exponential is computed.
__global__ void elu_backward(int n, float alpha, global<const float> y, global<const float> dy, global<float> dx) {
    int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 3 < n) {
        float4 v = load4(y, i), d = load4(dy, i);
        store4(dx, i, make_float4(elu_gradient(v.x, d.x, alpha), elu_gradient(v.y, d.y, alpha),
                                  elu_gradient(v.z, d.z, alpha), elu_gradient(v.w, d.w, alpha)));
    } else {
        for (; i < n; i++) dx[i] = elu_gradient(y[i], dy[i], alpha);
    }
}

// -------------------------------------------------------------------------------------------------------- divergence

// Half of the elements take one path, half the other. The 32 lanes of a warp share one instruction: when they
// disagree, the warp takes both paths, one after the other, each time with half of its lanes masked. With
// by_warp = 1 all lanes of a warp agree and take one path: half of these instructions.
__global__ void diverge(int n, int by_warp, global<const float> x, global<float> y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int path = (by_warp ? i / 32 : i) % 2;
    float v = x[i];
    count_path(path);
    if (path == 0) {
        for (int step = 0; step < 64; step++) v = v * 0.5f + 1.0f;
    } else {
        for (int step = 0; step < 64; step++) v = v * 0.25f - 1.0f;
    }
    y[i] = v;
}

// ------------------------------------------------------------------------------------------------------------ fusion

// gelu(x + bias) = t · Φ(t) with t = x + bias. In three kernels t and Φ(t) are written and read again:
//     x -> t, t -> Φ, (t, Φ) -> y: 2n + 2n + 3n elements moved. In one kernel: 2n. (And a short bias.)
__device__ inline float normal_cdf(float t) { return 0.5f * (1.0f + erff(t * 0.70710678f)); }

__global__ void add_bias(int n, int columns, global<const float> x, global<const float> bias, global<float> t) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) t[i] = x[i] + bias[i % columns];
}
__global__ void cdf(int n, global<const float> t, global<float> u) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) u[i] = normal_cdf(t[i]);
}
__global__ void multiply(int n, global<const float> t, global<const float> u, global<float> y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = t[i] * u[i];
}
__global__ void bias_gelu(int n, int columns, global<const float> x, global<const float> bias, global<float> y) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float t = x[i] + bias[i % columns];
    y[i] = t * normal_cdf(t);
}

// -------------------------------------------------------------------------------------------------- the host's part

static dim3 blocks(int n) { return dim3((n + 255) / 256); }

extern "C" const char* run_elu_forward(int n, float alpha, const float* x, float* y, void* stream) {
    return launch(elu_forward, blocks((n + 3) / 4), dim3(256), 0, stream, n, alpha, x, y);
}
extern "C" const char* run_elu_backward(int n, float alpha, const float* y, const float* dy, float* dx, void* stream) {
    return launch(elu_backward, blocks((n + 3) / 4), dim3(256), 0, stream, n, alpha, y, dy, dx);
}
extern "C" const char* run_diverge(int n, int by_warp, const float* x, float* y, void* stream) {
    return launch(diverge, blocks(n), dim3(256), 0, stream, n, by_warp, x, y);
}
extern "C" const char* run_add_bias(int n, int columns, const float* x, const float* bias, float* t, void* stream) {
    return launch(add_bias, blocks(n), dim3(256), 0, stream, n, columns, x, bias, t);
}
extern "C" const char* run_cdf(int n, const float* t, float* u, void* stream) {
    return launch(cdf, blocks(n), dim3(256), 0, stream, n, t, u);
}
extern "C" const char* run_multiply(int n, const float* t, const float* u, float* y, void* stream) {
    return launch(multiply, blocks(n), dim3(256), 0, stream, n, t, u, y);
}
extern "C" const char* run_bias_gelu(int n, int columns, const float* x, const float* bias, float* y, void* stream) {
    return launch(bias_gelu, blocks(n), dim3(256), 0, stream, n, columns, x, bias, y);
}
