// hidden <- hidden + update;  out = hidden * rsqrt(mean(hidden^2) + eps) * weight, in bf16, or
// quantised from there by groups of 128 columns (FP8). The update is a row for each, or what CHOSEN
// experts gave.

constexpr int CHUNKS = WARPS * VECTORS;  // of 256 values, as many as cover a row

struct Arguments {
    bf16* hidden;
#if CHOSEN
    Mixture update;
#else
    const bf16* update;  // or none
    long long update_stride;
#endif
    const float* weight;
    bf16* out;
    byte* values;
    float* scale;
    int rows, columns;
    long long hidden_stride, out_stride, scale_stride;
    float eps;
};

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

// Rounded as if each sum had been stored, which it is.
__device__ __forceinline__ void add(Row& hidden, const Row& update) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t a = hidden.words[v][i], b = update.words[v][i];
            hidden.words[v][i] =
                pack_bf16(low_bf16(a) + low_bf16(b), high_bf16(a) + high_bf16(b));
        }
    }
}

// The sum of squares of a row: in each lane over its vectors, by column, and then over the lanes.
// No part of that order depends on how warps share a row, so neither does any result.
__device__ __forceinline__ float sum_of_squares(const Row& row, const Place& place) {
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
        __shared__ float shared[ROWS][CHUNKS][32];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) shared[place.row][place.chunk(v)][place.lane] = sums[v];
        __syncthreads();
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) sum += shared[place.row][chunk][place.lane];
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lanes);
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm_fp8(const __grid_constant__ Arguments arguments) {
    // Where there is room for it the weight, which no kernel writes, is there before the row is.
    constexpr bool WEIGHT_FIRST = VECTORS <= 2;
    const Place place;
    const int columns = arguments.columns;
    const long long row = blockIdx.x * (long long)ROWS + place.row;
    Weight weights[WEIGHT_FIRST ? VECTORS : 1];
    if constexpr (WEIGHT_FIRST) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            weights[v].load(arguments.weight, place.column(v), columns);
    }
    // Nothing is read or written for a row beyond the last, but its warps take part in the sums.
    const int inside = row < arguments.rows ? columns : 0;
    Row x;
    bf16* const hidden = arguments.hidden + row * arguments.hidden_stride;
#if CHOSEN
    // Before the wait: all but the outputs are older than the kernel that wrote those.
    Choices choices;
    if (inside) choices.load(arguments.update, row);
    x.load(hidden, inside, place);
    wait_for_previous_kernels();
    allow_next_kernel();
    if (inside) {
        mix(x, arguments.update, choices, columns, place, &x);
        x.store(hidden, columns, place);
    }
#else
    wait_for_previous_kernels();
    allow_next_kernel();
    x.load(hidden, inside, place);
    if (arguments.update) {
        Row update;
        update.load(arguments.update + row * arguments.update_stride, inside, place);
        add(x, update);
        x.store(hidden, inside, place);
    }
#endif
    const float mean = sum_of_squares(x, place) / columns;
    float factor;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(factor) : "f"(mean + arguments.eps));
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        Weight weight;
        if constexpr (WEIGHT_FIRST)
            weight = weights[v];
        else
            weight.load(arguments.weight, place.column(v), columns);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t pair = x.words[v][i];
            x.words[v][i] = pack_bf16(low_bf16(pair) * factor * weight.values[2 * i],
                                      high_bf16(pair) * factor * weight.values[2 * i + 1]);
        }
    }
#if FP8
    const Quantised<128> quantised(x, place);
    quantised.store(arguments.values + row * arguments.out_stride, arguments.scale + row,
                    arguments.scale_stride, inside, place);
#else
    x.store(arguments.out + row * arguments.out_stride, inside, place);
#endif
}
