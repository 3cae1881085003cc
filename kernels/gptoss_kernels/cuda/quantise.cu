// values = x * (448 / amax), scale = amax / 448, of each row and group of GROUP columns.

struct Arguments {
    const bf16* x;
    byte* values;
    float* scale;
    int rows, columns;
    long long x_stride, values_stride, scale_stride;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    quantise(const __grid_constant__ Arguments arguments) {
    allow_next_kernel();
    const Place place;
    const long long row = blockIdx.x * (long long)ROWS + place.row;
    wait_for_previous_kernels();
    if (row >= arguments.rows) return;
    Row x;
    x.load(arguments.x + row * arguments.x_stride, arguments.columns, place);
    const Quantised<GROUP> quantised(x, place);
    quantised.store(arguments.values + row * arguments.values_stride, arguments.scale + row,
                    arguments.scale_stride, arguments.columns, place);
}
