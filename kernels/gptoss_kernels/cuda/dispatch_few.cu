// Few tokens in one launch: a block a token, and one more for the starts. Each looks at all choices
// by itself; no block waits for another.

constexpr int KEY_BITS = 20;  // of a choice's number; the expert's is above

// Choices in the order of their rows.
__device__ __forceinline__ uint32_t key_of(const Arguments& arguments, int choice) {
    return uint32_t(expert_of(arguments, choice)) << KEY_BITS | choice;
}

__device__ __forceinline__ void write_starts(const Arguments& arguments) {
    __shared__ int counts[BUCKETS];
    for (int e = threadIdx.x; e < BUCKETS; e += THREADS) counts[e] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < arguments.num_tokens * CHOSEN; i += THREADS)
        atomicAdd(&counts[expert_of(arguments, i)], 1);
    __syncthreads();
    if (threadIdx.x < 32) exclusive_sums(counts);
    __syncthreads();
    for (int e = threadIdx.x; e <= EXPERTS; e += THREADS) arguments.expert_start[e] = counts[e];
}

__device__ __forceinline__ void move_token(const Arguments& arguments, int token) {
    __shared__ int below[CHOSEN][WARPS];
    const Place place;
    Row x;
    x.load(arguments.x + token * arguments.x_stride, arguments.columns, place);

    // A choice's row is the number of choices before it.
    uint32_t keys[CHOSEN];
    int rows[CHOSEN];
#pragma unroll
    for (int k = 0; k < CHOSEN; ++k) {
        keys[k] = key_of(arguments, token * CHOSEN + k);
        rows[k] = 0;
    }
    for (int i = threadIdx.x; i < arguments.num_tokens * CHOSEN; i += THREADS) {
        const uint32_t key = key_of(arguments, i);
#pragma unroll
        for (int k = 0; k < CHOSEN; ++k) rows[k] += key < keys[k];
    }
#pragma unroll
    for (int k = 0; k < CHOSEN; ++k) {
        rows[k] = __reduce_add_sync(ALL_LANES, rows[k]);
        if (place.lane == 0) below[k][place.warp] = rows[k];
    }
    __syncthreads();
    const Quantised<128> quantised(x, place);
#pragma unroll
    for (int k = 0; k < CHOSEN; ++k) {
        rows[k] = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) rows[k] += below[k][warp];
        if (keys[k] >> KEY_BITS < EXPERTS)
            quantised.store(arguments.values + rows[k] * arguments.values_stride,
                            arguments.scale + rows[k], arguments.scale_stride, arguments.columns,
                            place);
        if (threadIdx.x == 0) arguments.rows[token * CHOSEN + k] = rows[k];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dispatch_few(const __grid_constant__ Arguments arguments) {
    static_assert(ROWS == 1);
    wait_for_previous_kernels();
    allow_next_kernel();
    if (blockIdx.x == 0)
        write_starts(arguments);
    else
        move_token(arguments, blockIdx.x - 1);
}
