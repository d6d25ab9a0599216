// Hopper's instructions for a cluster of blocks: as in ptx.h, a line of PTX on a GPU, on the CPU what that line means.
//
// The blocks of a cluster run at one time, on multiprocessors that reach each other's shared memory. A variable has
// the same offset in each, so mapa can find "this barrier, in block r". The emulation
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
// Arrive at this barrier as it is in block `rank` of the cluster, mine or another one. It says that a stage has been
// read and may be overwritten. Its producer uses the plain wait() of ptx.h, although the arrival may come from the
// other block. A release and an acquire for the whole cluster would order what threads of one block *wrote* before what
// threads of the other read, and here no thread has written anything that another block reads:
//   - the wgmma that read the stage have ended: their warp has waited for them (wgmma_wait) before it arrives;
//   - what overwrites the stage is a copy that does not exist before the waiting thread asks for it, after its wait;
//   - what threads have read from the stage themselves (chapter 10's scales), only their own block overwrites;
//   - the barrier itself is changed by atomic operations where it lies, whatever the scope.
// The wider forms cost much: ptxas adds to `.release.cluster` a fence for the whole GPU (an answer of L2 to wait for, in
// every step), and to `.acquire.cluster` an instruction that empties the L1 cache. (CUTLASS has neither.)
__device__ inline void arrive_at(uint64_t* barrier, int rank) {
    ON_HOPPER(asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                           "mbarrier.arrive.shared::cluster.b64 _, [there];\n}\n" ::"r"(
                               address_of(barrier)),
                           "r"(rank)
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

#else  // -------------------------------------------------------------------------------------------------- on the CPU

namespace cuda_on_cpu {

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

#endif
