// What linear_fp8.cu computes, for so few rows of x that reading the weight is all that takes time.
// With QUANTISES x is bf16, and each warp quantises its columns as quantise.cu does.

// Of 228 KB and 65,536 registers a multiprocessor; of shared memory each block takes 1 KB more than
// it asks for, and more rows of x need more registers.
constexpr int RESIDENT_BLOCKS = TOKENS == 8 && 2 * (SHARED_BYTES + 1024) <= 228 * 1024 ? 2 : 1;

extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT_BLOCKS)
    linear_fp8_few(const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(128) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0);
    const int lane = threadIdx.x % 32;
    const int first = blockIdx.x * COLUMNS;
    if (warp == 0)
        send_for_weight(shared, arguments, first, min(COLUMNS, arguments.N - first), lane);
    Multiplier multiplier{shared, arguments, first, warp, lane};
    multiplier.load_weight_scales();
    Output output(arguments, first, threadIdx.x);
    __syncthreads();  // the barriers are initialised
    wait_for_previous_kernels();
    allow_next_kernel();
    if constexpr (HAS_RESIDUAL) output.load_residual(arguments, first);
    if constexpr (QUANTISES)
        multiplier.load_and_quantise_x();
    else
        multiplier.load_x();
#pragma unroll 1
    for (int tile = 0; tile < TILES; ++tile) {
        barrier_wait(shared + FULL_OFFSET + tile * 8, 0);
        multiplier.multiply_tile(tile);
    }
    __syncthreads();
    output.store(arguments, first, shared);
}
