// After dispatch_move: each row's scales, which are its token's. A warp has 32 rows; it reads a
// token's scales as they lie, and writes a column's for all of them at once.

extern "C" __global__ void __launch_bounds__(THREADS)
    dispatch_scales(const __grid_constant__ Arguments arguments) {
    static_assert(WARPS == 1);
    constexpr int QUADS = SCALES / 4;
    __shared__ float staged[ROWS][32][SCALES + 1];
    const Place place;
    const long long row = (blockIdx.x * (long long)ROWS + place.row) * 32 + place.lane;
    wait_for_previous_kernels();
    allow_next_kernel();
    const bool is_row = row < arguments.expert_start[EXPERTS];
    const int token = is_row ? arguments.source[row] : 0;
    float4 quads[QUADS];
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        const int n = 32 * i + place.lane;
        const long long from = __shfl_sync(ALL_LANES, token, n / QUADS);
        quads[i] = reinterpret_cast<const float4*>(arguments.token_scale)[from * QUADS + n % QUADS];
    }
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        const int n = 32 * i + place.lane;
        float* const to = &staged[place.row][n / QUADS][4 * (n % QUADS)];
        to[0] = quads[i].x, to[1] = quads[i].y, to[2] = quads[i].z, to[3] = quads[i].w;
    }
    __syncwarp();
    if (!is_row) return;
    for (int group = 0; group * 128 < arguments.columns; ++group)
        arguments.scale[row + group * arguments.scale_stride] =
            staged[place.row][place.lane][group];
}
