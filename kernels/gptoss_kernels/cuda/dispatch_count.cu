// More than few tokens, the first launch: how many choices of each expert each block has.

extern "C" __global__ void __launch_bounds__(THREADS)
    dispatch_count(const __grid_constant__ Arguments arguments) {
    __shared__ int counts[BUCKETS];
    for (int e = threadIdx.x; e < BUCKETS; e += THREADS) counts[e] = 0;
    __syncthreads();
    wait_for_previous_kernels();
    // Not before the wait: dispatch_place reads `chosen`, and dispatch_move `x`, before theirs.
    allow_next_kernel();
    const int num_choices = arguments.num_tokens * CHOSEN;
    const int end = first_choice(num_choices, blockIdx.x + 1, gridDim.x);
    for (int i = first_choice(num_choices, blockIdx.x, gridDim.x) + threadIdx.x; i < end;
         i += THREADS)
        atomicAdd(&counts[expert_of(arguments, i)], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < BUCKETS; e += THREADS)
        arguments.counts[blockIdx.x * BUCKETS + e] = counts[e];
}
