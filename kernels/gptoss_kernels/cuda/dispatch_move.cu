// Each token's values, in the order of the tokens, so that rows of one expert are written together.
// Its scales, too, if there is no dispatch_scales: 4 bytes in each row's columns, each as dear as the
// sector of 32 that it is a part of. Where that is more than another launch costs, they go to
// `token_scale`.

extern "C" __global__ void __launch_bounds__(THREADS)
    dispatch_move(const __grid_constant__ Arguments arguments) {
    const Place place;
    const int columns = arguments.columns;
    const long long token = blockIdx.x * (long long)ROWS + place.row;
    allow_next_kernel();
    // Before the wait: x is older than dispatch_count.
    Row x;
    x.load(arguments.x + token * arguments.x_stride, token < arguments.num_tokens ? columns : 0,
           place);
    const Quantised<128> quantised(x, place);
    wait_for_previous_kernels();
    if (token >= arguments.num_tokens) return;
    const int end = arguments.expert_start[EXPERTS];
    int rows[CHOSEN];
#pragma unroll
    for (int k = 0; k < CHOSEN; ++k) rows[k] = arguments.rows[token * CHOSEN + k];
#pragma unroll
    for (int k = 0; k < CHOSEN; ++k)
        if (rows[k] < end)
            quantised.store_values(arguments.values + rows[k] * arguments.values_stride, columns,
                                   place);
    if (arguments.token_scale != nullptr) {
        quantised.store_scales(arguments.token_scale + token * SCALES, 1, columns, place);
        return;
    }
#pragma unroll
    for (int k = 0; k < CHOSEN; ++k)
        if (rows[k] < end)
            quantised.store_scales(arguments.scale + rows[k], arguments.scale_stride, columns,
                                   place);
}
