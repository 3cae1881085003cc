// total = hidden + what CHOSEN experts gave;  out = rms_norm(total), quantised, @ weight^T + bias
//
// What rms_norm_fp8.cu and linear_fp8_few.cu compute one after the other, bit for bit. Blocks
// multiply as in the latter. What they multiply with, they make while their weights are under way:
// of CLUSTER blocks each makes every CLUSTER-th row of x, and sends it to all of them. The first
// cluster stores total, which lies elsewhere than hidden: others may read that later.

struct NormArguments {
    Mixture update;
    const bf16* hidden;
    const float* weight;
    bf16* total;
    long long hidden_stride, total_stride;
    float eps;
};

// To all blocks of the cluster, or within this one, where __syncthreads follows.
__device__ __forceinline__ void leave(uint32_t shared, uint32_t address, int a, int b, int c, int d) {
    if constexpr (CLUSTER == 1) {
        store_shared(address, a, b, c, d);
    } else {
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block)
            send_shared(address, shared + X_FULL_OFFSET, block, a, b, c, d);
    }
}

__device__ __forceinline__ void leave(uint32_t shared, uint32_t address, float value) {
    if constexpr (CLUSTER == 1) {
        store_shared(address, value);
    } else {
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block)
            send_shared(address, shared + X_FULL_OFFSET, block, value);
    }
}

__device__ __forceinline__ uint32_t slice_of(uint32_t shared, int column) {
    return shared + SLICES_OFFSET + column / X_PITCH * SLICE_BYTES;
}

// Two lanes have 16 bytes, and 16 lanes a group.
__device__ __forceinline__ void leave_row(uint32_t shared, int row, const Quantised<GROUP>& values,
                                          const Place& place) {
    const int column = place.column(0);
    const uint32_t(&words)[2] = values.words[0];
    const uint32_t c = __shfl_down_sync(ALL_LANES, words[0], 1);
    const uint32_t d = __shfl_down_sync(ALL_LANES, words[1], 1);
    if (column >= K) return;
    const uint32_t slice = slice_of(shared, column);
    if (place.lane % 2 == 0) leave(shared, slice + x_offset(row, column), words[0], words[1], c, d);
    if (place.lane % 16 == 0)
        leave(shared,
              slice + X_SCALES_OFFSET + (column % X_PITCH / GROUP * TOKENS + row) * 4,
              values.scale[0]);
}

constexpr int ROW_BYTES = K + K_GROUPS * 4;
static_assert(K % 16 == 0 && VECTORS == 1 && ROWS == 1);

// As many as share a multiprocessor's 228 KB, of which each takes 1 KB more than it asks for.
constexpr int FITTING = 228 * 1024 / (SHARED_BYTES + sizeof(Squares) + 1024);
constexpr int RESIDENT_BLOCKS = FITTING < 3 ? FITTING : 3;

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)
    __launch_bounds__(THREADS, RESIDENT_BLOCKS)
        norm_linear_fp8(const __grid_constant__ Arguments arguments,
                        const __grid_constant__ NormArguments norm) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Squares squares;
    const uint32_t shared = shared_address(memory);
    const Place place;
    const int warp = same_in_warp(place.warp);
    const int first = blockIdx.x * COLUMNS;
    const int rank = CLUSTER > 1 ? cluster_rank() : 0;
    if (warp == 0) {
        if (CLUSTER > 1 && place.lane == 0) {
            barrier_init(shared + X_FULL_OFFSET, 1);
            barrier_expect(shared + X_FULL_OFFSET, arguments.M * ROW_BYTES);
        }
        send_for_weight(shared, arguments, first, min(COLUMNS, arguments.N - first), place.lane);
    }
    if constexpr (CLUSTER > 1) cluster_begin();
    NormWeight weight;
    weight.load(norm.weight, place.column(0), K);
    // All but the outputs are older than the kernel that wrote those.
    Choices choices;
    Row x;
    const auto load_early = [&](int row) {
        choices.load(norm.update, row);
        x.load(norm.hidden + row * norm.hidden_stride, K, place);
    };
    if (rank < arguments.M) load_early(rank);
    Multiplier multiplier{shared, arguments, first, warp, place.lane};
    multiplier.load_weight_scales();
    if constexpr (CLUSTER > 1) cluster_has_begun();
    wait_for_previous_kernels();
    allow_next_kernel();

#pragma unroll 1
    for (int row = rank; row < arguments.M; row += CLUSTER) {
        if (row != rank) {
            __syncthreads();  // squares were read
            load_early(row);
        }
        mix(x, norm.update, choices, K, place, &x);
        if (blockIdx.x < CLUSTER) x.store(norm.total + row * norm.total_stride, K, place);
        scale_pairs(x.words[0], norm_factor(x, K, norm.eps, squares, place), weight);
        leave_row(shared, row, Quantised<GROUP>(x, place), place);
    }
    Output output(arguments, first, threadIdx.x);  // before the rows it would want more registers
    if constexpr (CLUSTER == 1)
        __syncthreads();
    else
        barrier_wait(shared + X_FULL_OFFSET, 0);
    multiplier.take_x_from_shared();
#pragma unroll 1
    for (int tile = 0; tile < TILES; ++tile) {
        barrier_wait(shared + FULL_OFFSET + tile * 8, 0);
        multiplier.multiply_tile(tile);
    }
    __syncthreads();
    output.store(arguments, first, shared);
}
