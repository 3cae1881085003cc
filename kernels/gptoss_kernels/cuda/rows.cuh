// Rows of bf16 in registers, and their quantisation to e4m3: what the kernels bound by memory share.
//
// WARPS warps share a row, and ROWS rows a block. Of a row's vectors of 8 values lane l of warp w
// holds those at 32 (v WARPS + w) + l, v < VECTORS: accesses of 16 bytes, adjacent in a warp. The
// last ones may lie beyond the row: they read as zero and are not written.

constexpr int THREADS = 32 * WARPS * ROWS;

using bf16 = unsigned short;
using byte = unsigned char;

struct Place {
    int row;   // in the block
    int warp;  // of those that share the row
    int lane;

    __device__ Place()
        : row(threadIdx.x / (32 * WARPS)), warp(threadIdx.x / 32 % WARPS), lane(threadIdx.x % 32) {}

    __device__ __forceinline__ int chunk(int v) const { return v * WARPS + warp; }
    __device__ __forceinline__ int column(int v) const { return 8 * (32 * chunk(v) + lane); }
};

// Zeros where it is not inside. Past L1: all here is read once, by dispatch_move before its wait.
__device__ __forceinline__ void load_vector(uint32_t (&words)[4], const bf16* pointer,
                                            bool is_inside) {
    words[0] = words[1] = words[2] = words[3] = 0;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %5, 0;\n"
        "@p ld.relaxed.gpu.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
        : "l"(pointer), "r"(int(is_inside))
        : "memory");
}

__device__ __forceinline__ void store_vector(bf16* pointer, const uint32_t (&words)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

__device__ __forceinline__ void store_bytes(byte* pointer, uint32_t a, uint32_t b) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(pointer), "r"(a), "r"(b) : "memory");
}

struct Row {
    uint32_t words[VECTORS][4];

    __device__ __forceinline__ void load(const bf16* pointer, int columns, const Place& place) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int column = place.column(v);
            load_vector(words[v], pointer + column, column < columns);
        }
    }

    __device__ __forceinline__ void store(bf16* pointer, int columns, const Place& place) const {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int column = place.column(v);
            if (column < columns) store_vector(pointer + column, words[v]);
        }
    }
};

// A row quantised by groups of WIDTH columns: WIDTH / 8 adjacent lanes hold one.
template <int WIDTH>
struct Quantised {
    static constexpr int LANES = WIDTH / 8;
    static constexpr int HELD = (VECTORS + LANES - 1) / LANES;

    uint32_t words[VECTORS][2];
    float scale[HELD];  // of the groups that this lane stores: one of its vectors in LANES

    __device__ __forceinline__ Quantised(const Row& row, const Place& place) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const uint32_t(&pairs)[4] = row.words[v];
            // Without their signs, bf16 are in the order of their bits, and NaN above all.
            uint32_t largest = max_pair(max_pair(pairs[0] & 0x7FFF7FFF, pairs[1] & 0x7FFF7FFF),
                                        max_pair(pairs[2] & 0x7FFF7FFF, pairs[3] & 0x7FFF7FFF));
#pragma unroll
            for (int lanes = LANES / 2; lanes > 0; lanes /= 2)
                largest = max_pair(largest, __shfl_xor_sync(ALL_LANES, largest, lanes));
            const uint32_t bits = max(largest & 0xFFFF, largest >> 16) << 16;
            const float amax = max_nan(__uint_as_float(bits), 1e-10f);
            const float factor = 448.0f / amax;
            if (place.lane % LANES == v % LANES) scale[v / LANES] = amax * (1.0f / 448.0f);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint32_t a = pairs[2 * i], b = pairs[2 * i + 1];
                words[v][i] = pack_e4m3(low_bf16(a) * factor, high_bf16(a) * factor,
                                        low_bf16(b) * factor, high_bf16(b) * factor);
            }
        }
    }

    __device__ __forceinline__ void store_values(byte* values, int columns,
                                                 const Place& place) const {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int column = place.column(v);
            if (column < columns) store_bytes(values + column, words[v][0], words[v][1]);
        }
    }

    // Each group's is `stride` from the one before.
    __device__ __forceinline__ void store_scales(float* scales, long long stride, int columns,
                                                 const Place& place) const {
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const int v = i * LANES + place.lane % LANES;
            const int group = place.chunk(v) * (32 / LANES) + place.lane / LANES;
            if (v < VECTORS && group * WIDTH < columns) scales[group * stride] = scale[i];
        }
    }

    // To the row `values`, and to a column of scales for each group.
    __device__ __forceinline__ void store(byte* values, float* scales, long long stride,
                                          int columns, const Place& place) const {
        store_values(values, columns, place);
        store_scales(scales, stride, columns, place);
    }
};
