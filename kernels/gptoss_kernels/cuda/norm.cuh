// The norm of a row in registers, below rows.cuh: rms_norm_fp8 and reduction have the same bits.

constexpr int CHUNKS = WARPS * VECTORS;  // of 256 values, as many as cover a row

// Of a vector's columns; zeros beyond the row.
struct Weight {
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

// The sum of squares of a row: in each lane over its vectors, by column, and then over the lanes.
// No part of that order depends on how warps share a row, so neither does any result. `shared` is
// for all warps of the row, which meet here; it is free again when they have met elsewhere.
__device__ __forceinline__ float sum_of_squares(const Row& row, const Place& place,
                                                float (*shared)[32]) {
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
        for (int chunk = 0; chunk < CHUNKS; ++chunk) sum += shared[chunk][place.lane];
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lanes);
    return sum;
}

// What a row's squares, added up, make of it: of mean 1 / columns.
__device__ __forceinline__ float norm_factor(float squares, int columns, float eps) {
    const float mean = squares / columns;
    float factor;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(factor) : "f"(mean + eps));
    return factor;
}

// Of one vector, in place.
__device__ __forceinline__ void scale_vector(uint32_t (&words)[4], float factor,
                                             const Weight& weight) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        words[i] = pack_bf16(low_bf16(words[i]) * factor * weight.values[2 * i],
                             high_bf16(words[i]) * factor * weight.values[2 * i + 1]);
}
