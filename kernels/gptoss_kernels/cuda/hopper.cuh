// Hopper's instructions as functions: mbarriers, bulk tensor copies, warpgroup synchronisation.
// No include: NVRTC compiles this text with no header of the toolkit at hand.

using uint32_t = unsigned int;
using uint64_t = unsigned long long;

constexpr uint32_t ALL_LANES = 0xFFFFFFFF;  // of a warp

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
// cost a fence of the whole GPU in each block of K. So by the letter nothing orders what the other
// block does next after what this one did before. It only read, though: the tensor cores have
// finished (wgmma_wait), and what a warp loads from its own shared memory was issued to the same
// queue earlier and is read before the arrival leaves the multiprocessor.
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

// ---- copies ----------------------------------------------------------------------------------

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

// Of a map of three dimensions.
__device__ __forceinline__ void load_box(uint32_t destination, const TensorMap* map,
                                         uint32_t barrier, int inner, int middle, int outer) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(destination),
        "l"(map), "r"(barrier), "r"(inner), "r"(middle), "r"(outer)
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

// For L2, as createpolicy encodes it: of what is read once, and makes room before anything else does.
constexpr uint64_t EVICT_FIRST = 0x12F0000000000000;

// Adjacent bytes that are read once, by the copy engine: a multiple of 16, as both addresses are.
__device__ __forceinline__ void load_bytes_once(uint32_t destination, const void* source, int bytes,
                                                uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1], %2, [%3], %4;" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier), "l"(EVICT_FIRST)
        : "memory");
}

// Adjacent bytes into L2, sooner or later: a multiple of 16, as their address is.
__device__ __forceinline__ void fetch_bytes(const void* source, int bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes)
                 : "memory");
}

// 16 bytes that are read once, past L1; or zeros, and nothing is read. By the thread itself, sooner
// or later.
__device__ __forceinline__ void copy_async(uint32_t destination, const void* source,
                                           bool is_needed) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.eq.u32 p, %2, 0;\n"
        "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, p, %3;\n"
        "}" ::"r"(destination),
        "l"(source), "r"(static_cast<uint32_t>(is_needed)), "l"(EVICT_FIRST)
        : "memory");
}

// All that this thread copied since the last time become a group, which may be empty.
__device__ __forceinline__ void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until no more than PENDING of this thread's groups are under way.
template <int PENDING>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// From shared memory; what lies beyond the matrix is not written.
__device__ __forceinline__ void store_box(const TensorMap* map, uint32_t source, int inner,
                                          int outer) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];\n"
        "cp.async.bulk.commit_group;" ::"l"(map),
        "r"(source), "r"(inner), "r"(outer)
        : "memory");
}

// Until the sources of all boxes that this thread stored, but the last PENDING, have been read.
template <int PENDING>
__device__ __forceinline__ void store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// What this thread wrote to shared memory becomes visible to the copy engine, and what it read there
// has been read. For an arrival, or a copy's start, does not wait for reads under way: where an
// arrival alone gave a place back, what the copy engine brought there next, from L2, came before
// some of them. So this fence stands between, or something that needs what was read (`known_with`).
__device__ __forceinline__ void shared_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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

__device__ __forceinline__ void store_shared(uint32_t address, int value) {
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, int a, int b, int c, int d) {
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

__device__ __forceinline__ int load_shared_int(uint32_t address) {
    int value;
    asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ void load_shared(uint32_t address, int& a, int& b, int& c, int& d) {
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(address)
                 : "memory");
}

// Four matrices of 8 x 16 bytes: lane l gives the address of row l % 8 of matrix l / 8, and gets
// 4 bytes of row l / 4 of each.
__device__ __forceinline__ void load_matrices(uint32_t address, uint32_t (&words)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// Into the shared memory of a block of the cluster; counts its bytes at the barrier there.
__device__ __forceinline__ void send_shared(uint32_t address, uint32_t barrier, uint32_t cta,
                                            float value) {
    asm volatile(
        "{\n"
        ".reg .b32 remote, remote_barrier;\n"
        "mapa.shared::cluster.u32 remote, %0, %2;\n"
        "mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [remote], %3,"
        " [remote_barrier];\n"
        "}" ::"r"(address),
        "r"(barrier), "r"(cta), "f"(value)
        : "memory");
}

__device__ __forceinline__ void send_shared(uint32_t address, uint32_t barrier, uint32_t cta,
                                            int a, int b, int c, int d) {
    asm volatile(
        "{\n"
        ".reg .b32 remote, remote_barrier;\n"
        "mapa.shared::cluster.u32 remote, %0, %2;\n"
        "mapa.shared::cluster.u32 remote_barrier, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.s32 [remote], {%3, %4, %5, %6},"
        " [remote_barrier];\n"
        "}" ::"r"(address),
        "r"(barrier), "r"(cta), "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
}

// From the shared memory of a block of the cluster.
__device__ __forceinline__ uint64_t load_from_cluster(const uint64_t* own, uint32_t cta) {
    uint64_t value;
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %1, %2;\n"
        "ld.shared::cluster.u64 %0, [remote];\n"
        "}"
        : "=l"(value)
        : "r"(shared_address(own)), "r"(cta)
        : "memory");
    return value;
}

// To the same place in the shared memory of a block of the cluster.
__device__ __forceinline__ void store_in_cluster(uint32_t* own, uint32_t cta, uint32_t value) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "st.shared::cluster.u32 [remote], %2;\n"
        "}" ::"r"(shared_address(own)),
        "r"(cta), "r"(value)
        : "memory");
}

// The address, which is not known before `value` is, which is never negative.
__device__ __forceinline__ uint32_t known_with(int value, uint32_t address) {
    return address + (static_cast<uint32_t>(value) >> 31);
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }

__device__ __forceinline__ float high_bf16(uint32_t pair) {
    return __uint_as_float(pair & 0xFFFF0000);
}

// Zero where it is not needed. Not through the read-only cache: this kernel may write it later.
__device__ __forceinline__ uint32_t load_global(const unsigned short* pointer, bool is_needed) {
    uint32_t pair = 0;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %2, 0;\n"
        "@p ld.global.b32 %0, [%1];\n"
        "}"
        : "+r"(pair)
        : "l"(pointer), "r"(int(is_needed))
        : "memory");
    return pair;
}

__device__ __forceinline__ void store_global(unsigned short* pointer, uint32_t a) {
    asm volatile("st.global.b32 [%0], %1;" ::"l"(pointer), "r"(a) : "memory");
}

__device__ __forceinline__ void store_global(unsigned short* pointer, uint32_t a, uint32_t b) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(pointer), "r"(a), "r"(b) : "memory");
}

__device__ __forceinline__ void store_global(unsigned char* pointer, const uint32_t (&a)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(a[0]), "r"(a[1]),
                 "r"(a[2]), "r"(a[3])
                 : "memory");
}

__device__ __forceinline__ float4 load_float4(uint32_t address) {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_float4(uint32_t address, float4 v) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w)
                 : "memory");
}

// Past the first cache, which does not see what other blocks wrote.
__device__ __forceinline__ float4 load_fresh(const float* pointer) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(pointer)
                 : "memory");
    return v;
}

__device__ __forceinline__ int load_fresh(const int* pointer) {
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(pointer) : "memory");
    return v;
}

// Between what this thread wrote, or knows to be written, and what it writes next; and between what
// it has read and reads next. Of __threadfence this is what two threads need who write and read one
// flag: it does not wait for an order of all threads.
__device__ __forceinline__ void global_fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// ---- arithmetic ------------------------------------------------------------------------------

// C's fminf and fmaxf give the other operand where one is NaN.
__device__ __forceinline__ float min_nan(float a, float b) {
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

__device__ __forceinline__ float max_nan(float a, float b) {
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

// 1 / (1 + 2^x) to 2^-21 of its value, with two instructions of the special functions' unit.
__device__ __forceinline__ float logistic2(float x) {
    float power, result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1 + power));
    return result;
}

// Of two numbers of 16 bits without sign.
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("max.u16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
}

// Four values, the first in the lowest byte; ties to even.
__device__ __forceinline__ uint32_t pack_e4m3(float a, float b, float c, float d) {
    uint32_t packed;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n"
        "}"
        : "=r"(packed)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return packed;
}

// 448 / x, rounded as a division is, for x of at least 1e-30; NaN for inf and NaN.
__device__ __forceinline__ float quotient_of_448(float x) {
    const float divisor = x * (1.f / 256.f);  // so that its inverse is no denormal number
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
    inverse = fmaf(fmaf(-divisor, inverse, 1.f), inverse, inverse);
    const float quotient = 1.75f * inverse;
    return fmaf(fmaf(-divisor, quotient, 1.75f), inverse, quotient);
}

// Lane q of a quad has byte 4 i + q of 64 as byte i % 4 of word i / 4; afterwards it has the bytes
// 16 q to 16 q + 15.
__device__ __forceinline__ void transpose_bytes_in_quad(uint32_t (&words)[4], int q) {
    const bool is_upper = q & 2, is_odd = q & 1;
    // Word q of the lanes q, q ^ 1, q ^ 2 and q ^ 3.
    uint32_t own[2], other[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        own[i] = is_upper ? words[i + 2] : words[i];
        other[i] = __shfl_xor_sync(ALL_LANES, is_upper ? words[i] : words[i + 2], 2);
    }
    const uint32_t a = is_odd ? own[1] : own[0];
    const uint32_t b = __shfl_xor_sync(ALL_LANES, is_odd ? own[0] : own[1], 1);
    const uint32_t c = is_odd ? other[1] : other[0];
    const uint32_t d = __shfl_xor_sync(ALL_LANES, is_odd ? other[0] : other[1], 1);
    // Which of two lanes is the lower one is settled by the order in which bytes are taken.
    const uint32_t low = is_odd ? 0x1504 : 0x5140, high = is_odd ? 0x3726 : 0x7362;
    const uint32_t even = is_upper ? 0x1054 : 0x5410, odd = is_upper ? 0x3276 : 0x7632;
    const uint32_t ab_low = __byte_perm(a, b, low), cd_low = __byte_perm(c, d, low);
    const uint32_t ab_high = __byte_perm(a, b, high), cd_high = __byte_perm(c, d, high);
    words[0] = __byte_perm(ab_low, cd_low, even);
    words[1] = __byte_perm(ab_low, cd_low, odd);
    words[2] = __byte_perm(ab_high, cd_high, even);
    words[3] = __byte_perm(ab_high, cd_high, odd);
}

// ---- warpgroups ------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Until no more than PENDING of the committed groups are under way.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
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
// Of rows of 64 bytes, swizzled by as many.
constexpr uint64_t NARROW_MATRIX_DESCRIPTOR_HIGH =
    (uint64_t(2) << 62) | (uint64_t(512 >> 4) << 32);

// The compiler must compute what follows from it here, and not keep it in registers from before.
__device__ __forceinline__ uint32_t computed_here(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Says that all threads of the warp hold the same value: the compiler then keeps it, and what
// follows from it, in uniform registers, which the tensor cores' instructions read.
__device__ __forceinline__ uint32_t same_in_warp(uint32_t value) {
    return __shfl_sync(ALL_LANES, value, 0);
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

// In two parts, which order no accesses: behind the second all blocks of the cluster have begun, and
// their shared memory is theirs.
__device__ __forceinline__ void cluster_begin() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_has_begun() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Until the kernels before this one have ended and their writes are visible. The rules of early
// launch, for all kernels here:
//
// - A kernel's blocks may begin when each block of the one before has allowed it, or ended.
// - Every block waits before it ends, whether or not it has work. So a kernel's end is the end of
//   all before it, too, and to wait for the one before is to wait for all.
// - Every block waits before it allows, but for the kernels named below. So when the next kernel
//   begins, all before this one have ended: before its own wait it may read what those wrote,
//   and nothing that this one writes.
// - rms_norm_fp8, quantise, rope_and_cache_write, dispatch_place and dispatch_move allow first:
//   what follows them has weights to fetch, or tables to read, while they wait. Beside them the
//   kernel before may still run, and none before that but dispatch_count, behind dispatch_move. So
//   what follows them reads, before its wait, only what is older than all of these.
// - Nothing is written to global memory before the wait.
// - What is read before the wait is read past L1, which until then may be older than what a kernel
//   before the previous one wrote. Weights, their scales and biases, which no kernel writes while a
//   model runs, may come through it.
__device__ __forceinline__ void wait_for_previous_kernels() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void allow_next_kernel() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
