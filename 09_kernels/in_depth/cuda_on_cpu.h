// One source, two compilers: with nvcc a kernel runs on a GPU, with g++ it runs here, thread by thread, on the CPU.
//
// What a kernel file may use is listed in the first part, for nvcc. The second part gives the same words a meaning on
// the CPU. It is slow, and it is strict where a GPU is silent:
//
//   threads      Each CUDA thread is a fiber: a stack of its own, run until it waits for others, then the next one.
//   barriers     __syncthreads() lets nobody pass before all threads of the block have come to the *same* line. If some
//                have ended or wait elsewhere, the launch fails and names them. A GPU would hang, or go on wrongly.
//   races        `cuda_on_cpu_set` chooses the order in which a block's threads run: forward, in reverse, or shuffled,
//                where all of them keep step; or one warp as far ahead of the others as barriers let it, or as far
//                behind; or a random mixture. A kernel with all its barriers gives the same bits in every order.
//   poison       Shared memory is filled with NaN before each block, so what was never written cannot look right.
//   alignment    An access to 16 bytes at once has to begin at a multiple of 16, or the launch fails.
//   slowness     Asynchronous copies take as long as they may (forward), no time (reverse, ahead, behind), or either.
//   clusters     Blocks of one cluster run together, each with its own dynamic shared memory, all threads in one order.
//   diary        In which sweep a warp of block 0 orders tiles, multiplies, writes or waits: an order, and no time.
//   counters     What NVIDIA's profiler would say of memory accesses: 32-byte sectors, bank conflicts, divergent paths.
//
// Not here: clocks, caches, and threads that really run at the same time. No time measured on the CPU says anything.
#pragma once

#ifdef __CUDACC__  // ------------------------------------------------------------------------------- nvcc, on a GPU

#include <cuda_bf16.h>

template <class T>
using global = T* __restrict__;  // a pointer into global memory, the GPU's DRAM
template <class T>
using shared = T*;  // a pointer into shared memory, which the threads of a block have together

#define DYNAMIC_SHARED(type, name)                       \
    extern __shared__ __align__(1024) char raw_##name[]; \
    type* name = reinterpret_cast<type*>(raw_##name)

template <class T>
__device__ inline float4 load4(T* p, int i) { return *reinterpret_cast<const float4*>(p + i); }
__device__ inline void store4(float* p, int i, float4 v) { *reinterpret_cast<float4*>(p + i) = v; }
__device__ inline void count_path(int) {}

// Start a kernel. nullptr if that went well, else what CUDA says.
template <class... P, class... A>
const char* launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, void* stream, A... arguments) {
    if (shared_bytes > 48 * 1024)  // more has to be asked for
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    kernel<<<grid, block, shared_bytes, (cudaStream_t)stream>>>(static_cast<P>(arguments)...);
    cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
// The same where `cluster` neighbours along x run at one time, and reach each other's shared memory.
template <class... P, class... A>
const char* launch_clusters(int cluster, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, void* stream,
                            A... arguments) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    cudaLaunchAttribute shape = {};
    shape.id = cudaLaunchAttributeClusterDimension;
    shape.val.clusterDim = {(unsigned)cluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = (cudaStream_t)stream;
    config.attrs = &shape;
    config.numAttrs = 1;
    cudaError_t error = cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

#else  // ------------------------------------------------------------------------------------------- g++, on the CPU

#ifdef __APPLE__
#define _XOPEN_SOURCE    // ucontext.h asks for it
#define _DARWIN_C_SOURCE // and then for this, so that _setjmp and the rest stay
#endif
#include <csetjmp>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#define __global__ static  // so that all shared arrays below are local to this file, and fit into one section
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
// All shared arrays lie in one section of the program, whose ends the linker knows: that is how they are poisoned.
#ifdef __APPLE__  // whose linker knows them by other names
#define __shared__ static __attribute__((section("__DATA,cuda_shared"), aligned(1024)))
extern char __start_cuda_shared[] __asm("section$start$__DATA$cuda_shared");
extern char __stop_cuda_shared[] __asm("section$end$__DATA$cuda_shared");
#else
#define __shared__ static __attribute__((section("cuda_shared"), aligned(1024)))
extern char __start_cuda_shared[] __attribute__((weak)), __stop_cuda_shared[] __attribute__((weak));
#endif
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(cuda_on_cpu::the.dynamic_shared)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct __nv_bfloat16 {
    uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) {
    uint32_t wide = uint32_t(x.bits) << 16;
    float result;
    memcpy(&result, &wide, 4);
    return result;
}
inline __nv_bfloat16 __float2bfloat16(float x) {  // round to nearest, ties to even
    uint32_t wide;
    memcpy(&wide, &x, 4);
    if (std::isnan(x)) return {0x7fff};
    return {uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16)};
}

namespace cuda_on_cpu {

inline size_t shared_bytes_of_program() { return size_t(__stop_cuda_shared - __start_cuda_shared); }

enum Kind { GLOBAL_LOAD, GLOBAL_STORE, SHARED_LOAD, SHARED_STORE, PATH, KINDS };

enum Deed { ORDERS, MULTIPLIES, WRITES, WAITS };  // what the diary tells of a warp

// One instruction of a warp: what each of its 32 lanes asked for.
struct Request {
    uintptr_t address[32];
    uint32_t lanes = 0;  // a bit for each lane that took part
    int bytes = 0;       // per lane
};

enum State { READY, AT_BLOCK_BARRIER, AT_WARP_BARRIER, AT_CLUSTER_BARRIER, WAITING, ENDED };

struct Fiber {
    ucontext_t start;
    jmp_buf where;
    std::vector<char> stack;
    bool begun = false;
    State state = READY;
    int line = 0;                // of the barrier it waits at
    std::function<bool()> over;  // WAITING until this is true
    dim3 thread;
    int index = 0;         // in the block; in a cluster, those of its earlier blocks come before
    int rank = 0;          // of my block in its cluster
    size_t made[KINDS]{};  // how many requests of each kind it has made
};

struct Machine {
    int order = 0;  // 0 forward, 1 reverse, up to a million the seed of a shuffle, from there on that of a race;
                    // -1 - 2w: warp w ahead of all others, -2 - 2w: behind them
    bool counting = false;
    dim3 grid, block, block_index, cluster_index;  // cluster_index: of the first block of the cluster
    int cluster = 1;                               // blocks of a cluster
    size_t block_threads = 0, block_shared = 0;    // of each of them; shared: dynamic, with what aligns the next one's
    char* cluster_shared = nullptr;                // that of the first
    std::vector<Fiber> fibers;
    Fiber* running = nullptr;
    jmp_buf scheduler;
    std::function<void()> kernel, before_block = [] {};
    char* dynamic_shared = nullptr;
    std::vector<char> dynamic_storage;
    std::vector<std::function<void()>> in_flight;           // copies that nobody has been seen waiting for yet
    std::vector<std::vector<std::vector<char>>> exchanges;  // [warp][lane]: for shuffles and the tensor core
    std::vector<std::vector<Request>> log[KINDS];           // [warp][number of the request]
    int64_t requests[KINDS]{}, units[KINDS]{}, least[KINDS]{};
    bool keeps_diary = false;
    int sweep = 0;                          // how often all threads that can go on have done so
    std::vector<std::array<int, 3>> diary;  // sweep, warp of block 0, deed
    std::mt19937 random;
    std::string error;

    bool keeps_step() { return order >= 0 && order < 1000000; }
    bool late() { return order == 0 || (order > 1 && random() % 2); }
};
static Machine the;

inline void tell(Deed deed) {
    if (the.keeps_diary && the.block_index.x == 0 && the.running->index % 32 == 0)
        the.diary.push_back({the.sweep, the.running->index / 32, deed});
}
inline void sleep(State state, int line = 0) {
    if (state == WAITING || state == AT_BLOCK_BARRIER || state == AT_CLUSTER_BARRIER) tell(WAITS);
    the.running->state = state;
    the.running->line = line;
    if (!_setjmp(the.running->where)) _longjmp(the.scheduler, 1);
}
inline void wait_until(std::function<bool()> over) {
    if (over()) return;
    the.running->over = std::move(over);
    sleep(WAITING);
}

inline void fiber_main() {
    for (;;) {
        the.kernel();
        sleep(ENDED);
    }
}
inline void resume(Fiber& fiber) {
    the.running = &fiber;
    the.block_index = the.cluster_index;
    the.block_index.x += fiber.rank;
    the.dynamic_shared = the.cluster_shared ? the.cluster_shared + fiber.rank * the.block_shared : nullptr;
    fiber.state = READY;
    if (_setjmp(the.scheduler)) return;
    if (fiber.begun) _longjmp(fiber.where, 1);
    fiber.begun = true;
    fiber.stack.resize(96 * 1024);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.data();
    fiber.start.uc_stack.ss_size = fiber.stack.size();
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, fiber_main, 0);
    setcontext(&fiber.start);
}

// ---- what a profiler counts

inline void note(Kind kind, const void* address, int bytes) {
    if (!the.counting) return;
    Fiber& me = *the.running;
    auto& log = the.log[kind][me.index / 32];
    size_t number = me.made[kind]++;  // lanes of a warp run the same program: my n-th request belongs to their n-th
    if (log.size() <= number) log.resize(number + 1);
    log[number].address[me.index % 32] = reinterpret_cast<uintptr_t>(address);
    log[number].lanes |= 1u << (me.index % 32);
    log[number].bytes = bytes;
}

// An access to 16 bytes at once. Where its address is no multiple of 16, a GPU ends the whole program.
inline const void* aligned(const void* address) {
    if (uintptr_t(address) % 16 && the.error.empty())
        the.error = "16 bytes at once at an address that is no multiple of 16: misaligned";
    return address;
}

// How many different values f(lane) has among the lanes [first, last) that took part.
template <class F>
int different(const Request& r, int first, int last, F f) {
    std::vector<uintptr_t> seen;
    for (int lane = first; lane < last; lane++)
        if (r.lanes >> lane & 1) f(lane, seen);
    std::sort(seen.begin(), seen.end());
    return int(std::unique(seen.begin(), seen.end()) - seen.begin());
}

inline void count_block() {
    for (int kind = 0; kind < KINDS; kind++)
        for (auto& warp : the.log[kind]) {
            for (Request& r : warp) {
                the.requests[kind]++;
                if (kind == GLOBAL_LOAD || kind == GLOBAL_STORE) {  // DRAM and L2 deal in sectors of 32 bytes
                    the.units[kind] += different(r, 0, 32, [&](int lane, auto& seen) {
                        for (uintptr_t s = r.address[lane] / 32; s <= (r.address[lane] + r.bytes - 1) / 32; s++)
                            seen.push_back(s);
                    });
                } else if (kind == PATH) {  // lanes that take different paths go one path after the other
                    the.units[kind] += different(r, 0, 32, [&](int l, auto& seen) { seen.push_back(r.address[l]); });
                } else {  // 32 banks of 4 bytes. 8 bytes per lane go in 2 phases of 16 lanes, 16 bytes in 4 of 8
                    int lanes = 32 / std::max(1, r.bytes / 4);
                    for (int first = 0; first < 32; first += lanes) {
                        int turns = 0;
                        for (uintptr_t bank = 0; bank < 32; bank++)
                            turns = std::max(turns, different(r, first, first + lanes, [&](int lane, auto& seen) {
                                for (uintptr_t w = r.address[lane] / 4; w <= (r.address[lane] + r.bytes - 1) / 4; w++)
                                    if (w % 32 == bank) seen.push_back(w);
                            }));
                        the.units[kind] += turns;
                        the.least[kind] += turns > 0;
                    }
                }
            }
            warp.clear();
        }
}

// ---- one block, or cluster of blocks, after the other

inline std::string name_of(const Fiber& f) {
    auto number = [](unsigned n) { return std::to_string(n); };
    return "(" + number(f.thread.x) + "," + number(f.thread.y) + "," + number(f.thread.z) + ")";
}
inline std::string describe_deadlock() {
    std::string text = "deadlock in block (" + std::to_string(the.block_index.x) + "," +
                       std::to_string(the.block_index.y) + "):";
    auto tell = [&](const char* what, auto belongs) {
        int count = 0;
        const Fiber* first = nullptr;
        for (Fiber& f : the.fibers)
            if (belongs(f) && !count++) first = &f;
        if (count) text += " " + std::to_string(count) + " threads " + what + ", the first is " + name_of(*first) + ";";
    };
    auto stands = [](Fiber& f) {
        return f.state == AT_BLOCK_BARRIER || f.state == AT_WARP_BARRIER || f.state == AT_CLUSTER_BARRIER;
    };
    std::vector<int> lines;
    for (Fiber& f : the.fibers)
        if (stands(f)) lines.push_back(f.line);
    std::sort(lines.begin(), lines.end());
    lines.erase(std::unique(lines.begin(), lines.end()), lines.end());
    for (int line : lines) {
        std::string what = "wait at the barrier in line " + std::to_string(line);
        tell(what.c_str(), [&](Fiber& f) { return stands(f) && f.line == line; });
    }
    tell("wait for an mbarrier that nobody will complete", [](Fiber& f) { return f.state == WAITING; });
    tell("have ended", [](Fiber& f) { return f.state == ENDED; });
    return text;
}

// All of these threads stand at one barrier: let them go.
inline bool release(size_t first, size_t last, State state) {
    for (size_t i = first; i < last; i++)
        if (the.fibers[i].state != state || the.fibers[i].line != the.fibers[first].line) return false;
    for (size_t i = first; i < last; i++) the.fibers[i].state = READY;
    return true;
}

// All barriers whose threads have all come. Did one open?
inline bool release_barriers() {
    size_t threads = the.fibers.size();
    bool opened = release(0, threads, AT_CLUSTER_BARRIER);
    for (size_t first = 0; first < threads; first += the.block_threads)
        opened |= release(first, first + the.block_threads, AT_BLOCK_BARRIER);
    return opened;
}

inline bool run_cluster() {
    size_t threads = the.fibers.size(), ended = 0;
    if (shared_bytes_of_program()) memset(__start_cuda_shared, 0xff, shared_bytes_of_program());  // NaN
    std::fill(the.dynamic_storage.begin(), the.dynamic_storage.end(), char(0xff));
    the.in_flight.clear();
    the.before_block();
    the.sweep = 0;
    std::vector<size_t> order(threads);
    std::iota(order.begin(), order.end(), 0);
    if (the.order == 1) std::reverse(order.begin(), order.end());
    for (size_t i = 0; i < threads; i++) {
        the.fibers[i].state = READY;
        the.fibers[i].index = int(i);
        the.fibers[i].rank = int(i / the.block_threads);
        std::fill_n(the.fibers[i].made, int(KINDS), 0);
    }
    std::vector<size_t> warps((threads + 31) / 32);  // who goes first, where warps do not keep step
    std::iota(warps.begin(), warps.end(), 0);
    if (the.order < 0) {
        size_t one = (-the.order - 1) / 2 % warps.size();
        warps.erase(warps.begin() + one);
        warps.insert(-the.order % 2 ? warps.begin() : warps.end(), one);
    }
    int before_change = 0;
    while (ended < threads && the.error.empty()) {
        bool progress = false;
        the.sweep++;
        if (!the.keeps_step()) {
            // The first warp that can go on does, until it waits for somebody; then it is asked again before others.
            if (the.order > 0 && before_change-- == 0) {
                std::shuffle(warps.begin(), warps.end(), the.random);
                before_change = the.random() % 2 ? int(the.random() % 4) : int(the.random() % 64);  // soon, or later
            }
            for (size_t place = 0; place < warps.size() && !progress; place++) {
                size_t first = warps[place] * 32, last = std::min(first + 32, threads);
                for (size_t i = first; i < last; i++)
                    if (the.fibers[i].state == READY || (the.fibers[i].state == WAITING && the.fibers[i].over())) {
                        resume(the.fibers[i]);
                        ended += the.fibers[i].state == ENDED;
                        progress = true;
                    }
                progress |= release(first, last, AT_WARP_BARRIER);
            }
            if (progress) {
                release_barriers();  // at once: of a cluster one block may pass its own before the other has begun
                continue;
            }
        }
        if (the.order > 1) std::shuffle(order.begin(), order.end(), the.random);
        for (size_t i : the.keeps_step() ? order : std::vector<size_t>()) {
            Fiber& fiber = the.fibers[i];
            if (fiber.state == READY || (fiber.state == WAITING && fiber.over())) {
                resume(fiber);
                ended += fiber.state == ENDED;
                progress = true;
            }
        }
        for (size_t first = 0; first < threads; first += 32)
            progress |= release(first, std::min(first + 32, threads), AT_WARP_BARRIER);
        progress |= release_barriers();
        if (progress) continue;
        if (the.error.empty() && the.in_flight.empty()) the.error = describe_deadlock();
        if (!the.error.empty()) return false;
        auto copy = std::move(the.in_flight.front());  // the slowest copy there can be: all others wait for it
        the.in_flight.erase(the.in_flight.begin());
        copy();
    }
    count_block();
    return the.error.empty();
}

inline void warp_barrier(int line) { sleep(AT_WARP_BARRIER, line); }

// What each lane of my warp has in its hands. Call `warp_barrier` before the next exchange.
template <class T>
std::vector<T> exchange(const T& mine, int line) {
    auto& slots = the.exchanges[the.running->index / 32];
    slots[the.running->index % 32].assign((const char*)&mine, (const char*)(&mine + 1));
    warp_barrier(line);
    std::vector<T> all(32);
    for (int lane = 0; lane < 32; lane++)
        if (slots[lane].size() == sizeof(T)) memcpy(&all[lane], slots[lane].data(), sizeof(T));
    warp_barrier(line);
    return all;
}

// ---- pointers that take notes

template <Kind LOAD, class T>
struct Pointer {
    T* p;
    struct Place {
        T* p;
        operator T() const {
            note(LOAD, p, sizeof(T));
            return *p;
        }
        T operator=(T value) const {
            note(Kind(LOAD + 1), p, sizeof(T));
            return *p = value;
        }
        T operator=(const Place& other) const { return *this = T(other); }
    };
    Pointer(T* p = nullptr) : p(p) {}
    Place operator[](int64_t i) const { return {p + i}; }
    Pointer operator+(int64_t i) const { return p + i; }
};
template <Kind LOAD, class T>
struct Pointer<LOAD, const T> {
    const T* p;
    Pointer(const T* p = nullptr) : p(p) {}
    T operator[](int64_t i) const {
        note(LOAD, p + i, sizeof(T));
        return p[i];
    }
    Pointer operator+(int64_t i) const { return p + i; }
};

}  // namespace cuda_on_cpu

template <class T>
using global = cuda_on_cpu::Pointer<cuda_on_cpu::GLOBAL_LOAD, T>;
template <class T>
using shared = cuda_on_cpu::Pointer<cuda_on_cpu::SHARED_LOAD, T>;

template <cuda_on_cpu::Kind LOAD, class T>
float4 load4(cuda_on_cpu::Pointer<LOAD, T> p, int i) {
    cuda_on_cpu::note(LOAD, cuda_on_cpu::aligned(p.p + i), 16);
    float4 v;
    memcpy(&v, p.p + i, 16);
    return v;
}
template <cuda_on_cpu::Kind LOAD>
void store4(cuda_on_cpu::Pointer<LOAD, float> p, int i, float4 v) {
    cuda_on_cpu::note(cuda_on_cpu::Kind(LOAD + 1), cuda_on_cpu::aligned(p.p + i), 16);
    memcpy(p.p + i, &v, 16);
}
inline void count_path(int path) { cuda_on_cpu::note(cuda_on_cpu::PATH, (const void*)(uintptr_t)path, 1); }

#define threadIdx (cuda_on_cpu::the.running->thread)
#define blockIdx (cuda_on_cpu::the.block_index)
#define blockDim (cuda_on_cpu::the.block)
#define gridDim (cuda_on_cpu::the.grid)
#define __syncthreads() cuda_on_cpu::sleep(cuda_on_cpu::AT_BLOCK_BARRIER, __LINE__)
#define __syncwarp() cuda_on_cpu::warp_barrier(__LINE__)
#define __shfl_xor_sync(mask, value, lanes) \
    (cuda_on_cpu::exchange(value, __LINE__)[(cuda_on_cpu::the.running->index % 32) ^ (lanes)])

template <class... P, class... A>
const char* launch_clusters(int cluster, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, void*,
                            A... arguments) {
    using namespace cuda_on_cpu;
    if (cluster > 1 && shared_bytes_of_program()) return "here only dynamic shared memory is each block's own in a cluster";
    if (grid.x % cluster) return "the grid is no whole number of clusters";
    the.cluster = cluster;
    the.kernel = [=] { kernel(static_cast<P>(arguments)...); };
    the.grid = grid;
    the.block = block;
    the.random.seed(the.order);
    the.diary.clear();
    the.error.clear();
    the.block_shared = (shared_bytes + 1023) / 1024 * 1024;
    the.dynamic_storage.resize(cluster * the.block_shared + 1024);
    uintptr_t base = (uintptr_t)the.dynamic_storage.data();
    the.cluster_shared = shared_bytes ? (char*)((base + 1023) / 1024 * 1024) : nullptr;
    the.block_threads = size_t(block.x) * block.y * block.z;
    size_t threads = cluster * the.block_threads, warps = (threads + 31) / 32;
    if (the.fibers.size() != threads) the.fibers = std::vector<Fiber>(threads);
    the.exchanges.assign(warps, std::vector<std::vector<char>>(32));
    for (int kind = 0; kind < KINDS; kind++) {
        the.log[kind].assign(warps, {});
        the.requests[kind] = the.units[kind] = the.least[kind] = 0;
    }
    for (size_t i = 0; i < threads; i++)
        the.fibers[i].thread = dim3(i % block.x, i / block.x % block.y, i / block.x / block.y % block.z);
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x += cluster) {
                the.block_index = the.cluster_index = dim3(x, y, z);
                if (!run_cluster()) {
                    the.fibers.clear();  // they stand in the middle of the kernel and will never go on
                    return the.error.c_str();
                }
            }
    return nullptr;
}
template <class... P, class... A>
const char* launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, void* stream, A... arguments) {
    return launch_clusters(1, kernel, grid, block, shared_bytes, stream, arguments...);
}

// ---- a program of its own: what matmul.cu uses of CUDA's runtime beside kernels

using cudaError_t = int;
enum { cudaSuccess = 0, cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
namespace cuda_on_cpu {
static std::string launch_error;
}
#define LAUNCH(kernel, grid, block, ...)                                                \
    do {                                                                                \
        if (const char* error = launch(kernel, grid, block, 0, nullptr, __VA_ARGS__))   \
            cuda_on_cpu::launch_error = error;                                          \
    } while (0)
inline cudaError_t cudaMalloc(void** p, size_t bytes) {
    *p = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *p ? cudaSuccess : 1;
}
inline cudaError_t cudaFree(void* p) { return free(p), cudaSuccess; }
inline cudaError_t cudaMemset(void* p, int byte, size_t bytes) { return memset(p, byte, bytes), cudaSuccess; }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, int) {
    return memcpy(to, from, bytes), cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() { return !cuda_on_cpu::launch_error.empty(); }
inline cudaError_t cudaGetLastError() { return cudaDeviceSynchronize(); }
inline const char* cudaGetErrorString(cudaError_t) { return cuda_on_cpu::launch_error.c_str(); }

// For Python: in which order threads run, and whether to count (which is slow).
extern "C" void cuda_on_cpu_set(int order, int counting) {
    cuda_on_cpu::the.order = order;
    cuda_on_cpu::the.counting = counting;
}
// Whether to keep a diary, and what is in that of the last launch: three numbers for each entry.
extern "C" int cuda_on_cpu_diary(int keep, int* out, int room) {
    using namespace cuda_on_cpu;
    the.keeps_diary = keep;
    for (int i = 0; i < std::min(room, int(the.diary.size())); i++) std::copy_n(the.diary[i].begin(), 3, out + 3 * i);
    return int(the.diary.size());
}
// Of the last launch: requests, then sectors (or turns of the banks, or paths), then the least turns there can be.
extern "C" void cuda_on_cpu_counters(int64_t* out) {
    using namespace cuda_on_cpu;
    for (int kind = 0; kind < KINDS; kind++) {
        out[kind] = the.requests[kind];
        out[KINDS + kind] = the.units[kind];
        out[2 * KINDS + kind] = the.least[kind];
    }
}

#endif
