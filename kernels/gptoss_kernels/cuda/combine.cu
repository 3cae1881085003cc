// out[t] = sum over k of chosen_weights[t, k] * outputs[rows[t, k]] + residual[t], in fp32 in this
// order.

struct Arguments {
    Mixture mixture;
    const bf16* residual;  // or none
    bf16* out;
    int num_tokens, columns;
    long long residual_stride, out_stride;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    combine(const __grid_constant__ Arguments arguments) {
    const Place place;
    const int columns = arguments.columns;
    const long long token = blockIdx.x * (long long)ROWS + place.row;
    wait_for_previous_kernels();
    allow_next_kernel();
    if (token >= arguments.num_tokens) return;

    Row sums;
    Choices choices;
    choices.load(arguments.mixture, token);
    if (arguments.residual) {
        Row residual;
        residual.load(arguments.residual + token * arguments.residual_stride, columns, place);
        mix(sums, arguments.mixture, choices, columns, place, &residual);
    } else {
        mix(sums, arguments.mixture, choices, columns, place, nullptr);
    }
    sums.store(arguments.out + token * arguments.out_stride, columns, place);
}
