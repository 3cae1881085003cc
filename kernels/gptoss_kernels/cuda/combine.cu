// out[t] = sum over k of chosen_weights[t, k] * outputs[rows[t, k]] + residual[t], in fp32 in this
// order.

struct Arguments {
    const bf16* outputs;
    const int* rows;
    const bf16* chosen_weights;
    const bf16* residual;  // or none
    bf16* out;
    int num_tokens, num_rows, columns;
    long long outputs_stride, residual_stride, out_stride;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    combine(const __grid_constant__ Arguments arguments) {
    const Place place;
    const int columns = arguments.columns;
    const long long token = blockIdx.x * (long long)ROWS + place.row;
    wait_for_previous_kernels();
    allow_next_kernel();
    if (token >= arguments.num_tokens) return;

    Row rows[CHOSEN], residual;
    if (arguments.residual)
        residual.load(arguments.residual + token * arguments.residual_stride, columns, place);
    float weights[CHOSEN];
#pragma unroll
    for (int k = 0; k < CHOSEN; ++k) {
        const int row = arguments.rows[token * CHOSEN + k];
        const bool is_row = 0 <= row && row < arguments.num_rows;
        weights[k] =
            is_row ? low_bf16(arguments.chosen_weights[token * CHOSEN + k]) : __int_as_float(-1);
        rows[k].load(arguments.outputs + (is_row ? row : 0) * arguments.outputs_stride,
                     columns, place);
    }
    Row sums;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float low = 0, high = 0;
#pragma unroll
            for (int k = 0; k < CHOSEN; ++k) {
                // Not fused: as the reference rounds products that are too small for a normal fp32.
                low = __fadd_rn(low, __fmul_rn(low_bf16(rows[k].words[v][i]), weights[k]));
                high = __fadd_rn(high, __fmul_rn(high_bf16(rows[k].words[v][i]), weights[k]));
            }
            if (arguments.residual) {
                low = __fadd_rn(low, low_bf16(residual.words[v][i]));
                high = __fadd_rn(high, high_bf16(residual.words[v][i]));
            }
            sums.words[v][i] = pack_bf16(low, high);
        }
    }
    sums.store(arguments.out + token * arguments.out_stride, columns, place);
}
