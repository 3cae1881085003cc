// A row's RMSNorm, below rows.cuh.

constexpr int ROW_CHUNKS = WARPS * VECTORS;  // of 256 values, as many as cover a row

// Of a vector's columns; zeros beyond the row.
struct NormWeight {
    float values[8];

    __device__ __forceinline__ void load(const float* weight, int column, int columns) {
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i] = 0;
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            asm volatile(
                "{\n"
                ".reg .pred p;\n"
                "setp.ne.b32 p, %5, 0;\n"
                "@p ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];\n"
                "}"
                : "+f"(values[i]), "+f"(values[i + 1]), "+f"(values[i + 2]), "+f"(values[i + 3])
                : "l"(weight + column + i), "r"(int(column < columns)));
        }
    }
};

// What its warps tell each other of a row's squares.
using Squares = float[ROW_CHUNKS][32];

// 1 / sqrt(mean(row^2) + eps). Squares are added in each lane over its vectors, by column, and then
// over the lanes. No part of that order depends on how warps share a row, so neither does any
// result.
__device__ __forceinline__ float norm_factor(const Row& row, int columns, float eps,
                                             Squares& shared, const Place& place) {
    float sums[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        sums[v] = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float low = low_bf16(row.words[v][i]), high = high_bf16(row.words[v][i]);
            sums[v] = fmaf(low, low, sums[v]);
            sums[v] = fmaf(high, high, sums[v]);
        }
    }
    float sum = 0;
    if constexpr (WARPS == 1) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) sum += sums[v];
    } else {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) shared[place.chunk(v)][place.lane] = sums[v];
        __syncthreads();
#pragma unroll
        for (int chunk = 0; chunk < ROW_CHUNKS; ++chunk) sum += shared[chunk][place.lane];
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lanes);
    float factor;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(factor) : "f"(sum / columns + eps));
    return factor;
}

// row <- row * factor * weight, in bf16.
__device__ __forceinline__ void scale_pairs(uint32_t (&pairs)[4], float factor,
                                            const NormWeight& weight) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        pairs[i] = pack_bf16(low_bf16(pairs[i]) * factor * weight.values[2 * i],
                             high_bf16(pairs[i]) * factor * weight.values[2 * i + 1]);
}
