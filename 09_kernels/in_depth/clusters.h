// Hopper's instructions for a cluster of blocks, and for copies from shared memory to global memory: as in ptx.h, a
// line of PTX on a GPU, and on the CPU what that line means.
//
// The blocks of a cluster run at one time, on multiprocessors that reach each other's shared memory. An address in it
// is the same in all of them, so that "this barrier, in block r" is a sentence of the hardware (mapa). The emulation
// runs the threads of the whole cluster in one order, in which a block may be ahead of the other or behind it. It fails
// when a block is signalled or written to that has ended, since nobody knows whose that memory is by then.
#pragma once
#include "ptx.h"

#ifdef __CUDACC__  // ---------------------------------------------------------------------------------------- on a GPU

__device__ inline int rank_in_cluster() {
    uint32_t rank = 0;
    ON_HOPPER(asm volatile("mov.u32 %0, %%cluster_ctarank;\n" : "=r"(rank)));
    return (int)rank;
}
// __syncthreads() for all threads of the cluster; what they wrote before it, to barriers too, all of them see after it
__device__ inline void cluster_barrier() {
    ON_HOPPER(asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory"));
}
// Arrive at this barrier as it is in block `rank` of the cluster, mine or another one. It tells that wgmma is done with
// a stage, and no thread has written anything that the other block would have to see. With `.release.cluster`, as one
// would write it first, ptxas adds a fence for the whole GPU: an answer of L2 to wait for, in every step.
__device__ inline void arrive_at(uint64_t* barrier, int rank) {
    ON_HOPPER(asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                           "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(
                               address_of(barrier)),
                           "r"(rank)
                           : "memory"));
}
// As wait(), for a barrier of mine at which other blocks arrive
__device__ inline void wait_for_cluster(uint64_t* barrier, int parity) {
    ON_HOPPER(asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\nbra again;\nover:\n}\n" ::"r"(address_of(barrier)),
        "r"(parity)
        : "memory"));
}
// One tile to the same place in each block whose bit is set in `mask`; in each, the bytes count on the same barrier
__device__ inline void copy_tile_to_all(bf16* to, const CUtensorMap* matrix, int row, int col, uint64_t* barrier,
                                        int mask) {
    ON_HOPPER(asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;\n" ::"r"(address_of(to)),
        "l"(matrix), "r"(address_of(barrier)), "r"(col), "r"(row), "h"((uint16_t)mask)
        : "memory"));
}

// ---- from shared memory to global memory. The copy engine reads shared memory by another way than threads write it:
// each thread that has written must say so (a fence between the two ways), before one of them asks for the copy.
__device__ inline void put_shared(bf16* to, float first, float second) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(first, second);
}
__device__ inline void shared_is_written() {
    ON_HOPPER(asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"));
}
// One tile out; rows and columns beyond the matrix are left out
__device__ inline void copy_tile_out(const CUtensorMap* matrix, int row, int col, const bf16* from) {
    ON_HOPPER(asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];\n" ::"l"(
                               matrix),
                           "r"(col), "r"(row), "r"(address_of(from))
                           : "memory"));
}
__device__ inline void out_commit() { ON_HOPPER(asm volatile("cp.async.bulk.commit_group;\n" ::: "memory")); }
template <int LEFT>  // wait until all but LEFT of my groups have *read* shared memory, so that it may be written again
__device__ inline void out_wait() {
    ON_HOPPER(asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(LEFT) : "memory"));
}

#else  // -------------------------------------------------------------------------------------------------- on the CPU

#include <unordered_set>

namespace cuda_on_cpu {

static std::map<int, Pending> going_out;                   // copies to global memory, by thread of the cluster
static std::unordered_set<const bf16*> unseen;             // pairs in shared memory that the engine cannot see yet,
static std::map<int, std::vector<const bf16*>> unsaid;     // by the thread that wrote them
static bool clusters_prepared = [] {
    the.before_block = [before = the.before_block] {
        before();
        going_out.clear();
        unseen.clear();
        unsaid.clear();
    };
    return true;
}();

template <class T>
T* in_block(T* mine, int rank) {  // the same place in the shared memory of another block of the cluster
    return (T*)((char*)mine + (rank - the.running->rank) * int64_t(the.block_shared));
}
inline bool is_there(int rank, const char* what) {
    bool there = false;
    for (Fiber& f : the.fibers) there |= f.rank == rank && f.state != ENDED;
    if (!there && the.error.empty())
        the.error = std::string(what) + " block " + std::to_string(rank) + " of the cluster, which " +
                    (rank < the.cluster ? "has ended" : "does not exist");
    return there;
}

}  // namespace cuda_on_cpu

inline int rank_in_cluster() { return cuda_on_cpu::the.running->rank; }
inline void cluster_barrier(int line = __builtin_LINE()) {
    cuda_on_cpu::sleep(cuda_on_cpu::AT_CLUSTER_BARRIER, line);
}
inline void arrive_at(uint64_t* barrier, int rank) {
    if (cuda_on_cpu::is_there(rank, "an arrival at a barrier of")) arrive(cuda_on_cpu::in_block(barrier, rank));
}
inline void wait_for_cluster(uint64_t* barrier, int parity) { wait(barrier, parity); }
inline void copy_tile_to_all(bf16* to, const CUtensorMap* map, int row, int col, uint64_t* barrier, int mask) {
    using namespace cuda_on_cpu;
    bool counting = the.counting;
    for (int rank = 0; mask >> rank; rank++)
        if (mask >> rank & 1 && is_there(rank, "a copy to")) {
            copy_tile(in_block(to, rank), map, row, col, in_block(barrier, rank));
            the.counting = false;  // global memory is read once, however many blocks get it
        }
    the.counting = counting;
}

inline void put_shared(bf16* to, float first, float second) {
    using namespace cuda_on_cpu;
    tell(WRITES);
    note(SHARED_STORE, to, 4);
    to[0] = __float2bfloat16(first);
    to[1] = __float2bfloat16(second);
    unseen.insert(to);
    unsaid[the.running->index].push_back(to);
}
inline void shared_is_written() {
    using namespace cuda_on_cpu;
    for (const bf16* pair : unsaid[the.running->index]) unseen.erase(pair);
    unsaid.erase(the.running->index);
}
inline void copy_tile_out(const CUtensorMap* map, int row, int col, const bf16* from) {
    using namespace cuda_on_cpu;
    std::vector<bool> blind(map->tile_rows * TILE_K);  // what the engine does not see, it takes from anywhere: NaN here
    for (int i = 0; i < map->tile_rows * TILE_K; i++) blind[i] = unseen.count(from + i / 2 * 2);
    if (the.counting) {
        int rows = std::max(0, std::min(map->tile_rows, map->rows - row));
        the.requests[GLOBAL_STORE]++;
        the.units[GLOBAL_STORE] += rows * std::max(0, std::min(TILE_K, map->cols - col)) * 2 / 32;
    }
    mine(going_out).add([=, m = *map] {
        for (int r = 0; r < m.tile_rows && row + r < m.rows; r++)
            for (int c = 0; c < TILE_K && col + c < m.cols; c++) {
                int at = swizzled(r, c / 8) + c % 8;
                const_cast<bf16*>(m.matrix)[int64_t(row + r) * m.cols + col + c] = blind[at] ? bf16{0x7fff} : from[at];
            }
    });
}
inline void out_commit() { cuda_on_cpu::mine(cuda_on_cpu::going_out).commit(); }
template <int LEFT>
void out_wait() { cuda_on_cpu::mine(cuda_on_cpu::going_out).wait(LEFT); }

#endif
