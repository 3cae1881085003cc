// hidden <- hidden + update;  out = hidden * rsqrt(mean(hidden^2) + eps) * weight, in bf16, or
// quantised from there by groups of 128 columns (FP8). The update is a row for each, or what CHOSEN
// experts gave.

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

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm_fp8(const __grid_constant__ Arguments arguments) {
    allow_next_kernel();
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
    if (inside) {
        mix(x, arguments.update, choices, columns, place, &x);
        x.store(hidden, columns, place);
    }
#else
    wait_for_previous_kernels();
    x.load(hidden, inside, place);
    if (arguments.update) {
        Row update;
        update.load(arguments.update + row * arguments.update_stride, inside, place);
        add(x, update);
        x.store(hidden, inside, place);
    }
#endif
    __shared__ float shared[ROWS][CHUNKS][32];
    const float factor =
        norm_factor(sum_of_squares(x, place, shared[place.row]), columns, arguments.eps);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        Weight weight;
        if constexpr (WEIGHT_FIRST)
            weight = weights[v];
        else
            weight.load(arguments.weight, place.column(v), columns);
        scale_vector(x.words[v], factor, weight);
    }
#if FP8
    const Quantised<128> quantised(x, place);
    quantised.store(arguments.values + row * arguments.out_stride, arguments.scale + row,
                    arguments.scale_stride, inside, place);
#else
    x.store(arguments.out + row * arguments.out_stride, inside, place);
#endif
}
