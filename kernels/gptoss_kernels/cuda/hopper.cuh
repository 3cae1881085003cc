// Hopper's instructions as functions: mbarriers, bulk tensor copies, warpgroup synchronisation.
// No include: NVRTC compiles this text with no header of the toolkit at hand.

using uint32_t = unsigned int;
using uint64_t = unsigned long long;

struct alignas(64) TensorMap {
    unsigned char opaque[128];
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarriers -------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// At the same barrier of another block of the cluster. Without a scope of `cluster`, which would
// cost a fence of the whole GPU: what arrives here has only read.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t cta) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(barrier),
        "r"(cta)
        : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n"
            "}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// ---- bulk tensor copies ----------------------------------------------------------------------

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void load_box(uint32_t destination, const TensorMap* map,
                                         uint32_t barrier, int inner, int outer) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4}], [%2];" ::"r"(destination),
        "l"(map), "r"(barrier), "r"(inner), "r"(outer)
        : "memory");
}

// To the same place, and onto the same barrier, in each block of the cluster that `mask` names.
__device__ __forceinline__ void load_box_multicast(uint32_t destination, const TensorMap* map,
                                                   uint32_t barrier, int inner, int outer,
                                                   unsigned short mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(destination),
        "l"(map), "r"(barrier), "r"(inner), "r"(outer), "h"(mask)
        : "memory");
}

// ---- shared and global memory ----------------------------------------------------------------

__device__ __forceinline__ float load_shared(uint32_t address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ void store_shared(uint32_t address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ void store_global(unsigned short* pointer, uint32_t a) {
    asm volatile("st.global.b32 [%0], %1;" ::"l"(pointer), "r"(a) : "memory");
}

__device__ __forceinline__ void store_global(unsigned short* pointer, uint32_t a, uint32_t b) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(pointer), "r"(a), "r"(b) : "memory");
}

// ---- warpgroups ------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// The compiler must not move the use of an accumulator across the asynchronous multiplication.
template <int COUNT>
__device__ __forceinline__ void fence_registers(float (&registers)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// The lower half of what tells the tensor cores about a K-major tile with rows of 128 bytes,
// swizzled by 128 bytes. Its upper half is a constant: 1024 bytes from 8 rows to the next 8.
__device__ __forceinline__ uint32_t matrix_descriptor(uint32_t address) {
    return (1 << 16) | ((address & 0x3FFFF) >> 4);
}

constexpr uint64_t MATRIX_DESCRIPTOR_HIGH = (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32);

// Says that all threads of the warp hold the same value: the compiler then keeps it, and what
// follows from it, in uniform registers, which the tensor cores' instructions read.
__device__ __forceinline__ uint32_t same_in_warp(uint32_t value) {
    return __shfl_sync(0xFFFFFFFF, value, 0);
}

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- clusters and dependent launches ---------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

// Until the kernels before this one have ended and their writes are visible.
__device__ __forceinline__ void wait_for_previous_kernels() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void allow_next_kernel() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
