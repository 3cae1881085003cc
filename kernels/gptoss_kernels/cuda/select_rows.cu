// out[i] = table[rows[i]]; NaN where that is no row.

#if ROW_BYTES == 8
using Number = long long;
#else
using Number = int;
#endif

struct Arguments {
    const bf16* table;
    const Number* rows;
    bf16* out;
    long long table_rows;
    int num_rows, columns;
    long long table_stride, out_stride;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    select_rows(const __grid_constant__ Arguments arguments) {
    const Place place;
    const int columns = arguments.columns;
    const long long i = blockIdx.x * (long long)ROWS + place.row;
    wait_for_previous_kernels();
    allow_next_kernel();
    if (i >= arguments.num_rows) return;
    const long long row = arguments.rows[i];
    Row x;
    if (0 <= row && row < arguments.table_rows) {
        x.load(arguments.table + row * arguments.table_stride, columns, place);
    } else {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            x.words[v][0] = x.words[v][1] = x.words[v][2] = x.words[v][3] = 0x7FC07FC0;
    }
    x.store(arguments.out + i * arguments.out_stride, columns, place);
}
