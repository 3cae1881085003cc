// How many choices of each expert the tokens of each block of dispatch_many have.

extern "C" __global__ void __launch_bounds__(THREADS)
    dispatch_count(const __grid_constant__ Arguments arguments) {
    __shared__ int counts[BUCKETS];
    for (int e = threadIdx.x; e < BUCKETS; e += THREADS) counts[e] = 0;
    __syncthreads();
    wait_for_previous_kernels();
    // Not before: dispatch_many reads `chosen` without waiting for this kernel, and so may not begin
    // until the kernel that wrote it has ended.
    allow_next_kernel();
    const int first = first_token(arguments.num_tokens, blockIdx.x, gridDim.x) * CHOSEN;
    const int end = first_token(arguments.num_tokens, blockIdx.x + 1, gridDim.x) * CHOSEN;
    for (int i = first + threadIdx.x; i < end; i += THREADS)
        atomicAdd(&counts[expert_of(arguments, i)], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < BUCKETS; e += THREADS)
        arguments.counts[blockIdx.x * BUCKETS + e] = counts[e];
}
