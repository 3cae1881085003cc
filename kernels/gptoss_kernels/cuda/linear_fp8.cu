// out[M, N] = (x * x_scale) @ (weight * weight_scale)^T + bias, all of it e4m3 in and bf16 out.
//
//     x [M, K] e4m3, x_scale [K / 128, M] fp32, weight [N, K] e4m3,
//     weight_scale [N / 128, K / 128] fp32, bias [N] fp32
//
// A persistent block computes tiles of BLOCK_M x BLOCK_N, one after the other; see gemm_fp8.cuh.

// Tiles in bands of TILE_ROWS clusters of M, along N inside a band: the blocks at work at one time
// then cover a rectangle, and its rows and columns stay in L2.
struct Tiles {
    int num_m, num_n;  // in clusters

    __device__ Tiles(int M, int N)
        : num_m((M + CLUSTER_M * BLOCK_M - 1) / (CLUSTER_M * BLOCK_M)),
          num_n((N + CLUSTER_N * BLOCK_N - 1) / (CLUSTER_N * BLOCK_N)) {}

    __device__ __forceinline__ int count() const { return num_m * num_n; }

    __device__ __forceinline__ void at(int index, int& row, int& column) const {
        const int band = index / (TILE_ROWS * num_n);
        const int inside = index - band * TILE_ROWS * num_n;
        const int rows = min(TILE_ROWS, num_m - band * TILE_ROWS);
        const int cluster_column = inside / rows;
        const int cluster_row = band * TILE_ROWS + inside - cluster_column * rows;
        const int rank = CLUSTER > 1 ? cluster_rank() : 0;
        row = (cluster_row * CLUSTER_M + (CLUSTER_M > 1 ? rank : 0)) * BLOCK_M;
        column = (cluster_column * CLUSTER_N + (CLUSTER_N > 1 ? rank : 0)) * BLOCK_N;
    }
};

__device__ __forceinline__ void produce(uint32_t shared, const TensorMap* x_map,
                                        const TensorMap* x_scale_map, const TensorMap* weight_map,
                                        const Arguments& arguments) {
    const Tiles tiles(arguments.M, arguments.N);
    const int num_k_blocks = (arguments.K + BLOCK_K - 1) / BLOCK_K;
    const int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;

    const int rank = CLUSTER > 1 ? cluster_rank() : 0;
    const int x_rows = arguments.x_rows;
    const int slot_bytes = WEIGHT_BYTES + CLUSTER_N * x_rows * (BLOCK_K + 4);

    auto load_weight = [&](int slot, int column, int k) {
        const uint32_t full = shared + FULL_OFFSET + slot * 8;
        const int part = CLUSTER_M > 1 ? rank : 0;
        barrier_expect(full, slot_bytes);
        load<CLUSTER_M != 1>(
            shared + WEIGHT_OFFSET + slot * WEIGHT_BYTES + part * (WEIGHT_BYTES / CLUSTER_M),
            weight_map, full, k * BLOCK_K, column + part * (BLOCK_N / CLUSTER_M));
    };
    auto load_x = [&](int slot, int row, int k) {
        const uint32_t full = shared + FULL_OFFSET + slot * 8;
        const int part = CLUSTER_N > 1 ? rank : 0;
        row += part * (BLOCK_M / CLUSTER_N);
        load<CLUSTER_N != 1>(
            shared + X_OFFSET + slot * X_BYTES + part * (X_BYTES / CLUSTER_N), x_map, full,
            k * BLOCK_K, row);
        load<CLUSTER_N != 1>(
            shared + X_SCALE_OFFSET + slot * X_SCALE_BYTES + part * (X_SCALE_BYTES / CLUSTER_N),
            x_scale_map, full, row, k);
    };

    // Weights were there before the previous kernel: fill the ring with them while it still runs.
    const int num_early = min(STAGES, num_k_blocks);
    int row, column;
    tiles.at(first, row, column);
    for (int k = 0; k < num_early; ++k) load_weight(k, column, k);
    wait_for_previous_kernels();

    Ring ring;
    for (int tile = first; tile < tiles.count(); tile += step) {
        tiles.at(tile, row, column);
        for (int k = 0; k < num_k_blocks; ++k, ring.advance(1)) {
            if (tile != first || k >= num_early) {
                barrier_wait(shared + EMPTY_OFFSET + ring.slot * 8, ring.phase ^ 1);
                load_weight(ring.slot, column, k);
            }
            load_x(ring.slot, row, k);
        }
    }
    allow_next_kernel();
}

struct LinearMath : Math {
    using Math::Math;

    __device__ __forceinline__ void finish(int wave, int row, int column, bool is_first,
                                           bool is_last) {
        if (k_group == 0) {
            take_over(is_last);
            store(wave, row, arguments.M, column);
        } else {
            hand_over(is_first);
        }
    }

    __device__ __forceinline__ void run() {
        const Tiles tiles(arguments.M, arguments.N);
        const int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
        const int last = first + (tiles.count() - 1 - first) / step * step;
        int row, column, next_row, next_column;
        tiles.at(first, next_row, next_column);
        prefetch(next_column);
#pragma unroll
        for (int wave = 0; wave < WAVES; ++wave) start(wave);  // beside the first loads
        ring.advance(k_group);
        for (int tile = first; tile <= last; tile += step) {
            const auto boundary = boundary_of(next_column);
            block(k_group, boundary, Constant<WAVES>(), [&](int wave) {
                if (tile != first) {
                    finish(wave, row, column, tile == first + step, false);
                    start(wave);
                }
                if (wave == WAVES - 1) {
                    row = next_row;
                    column = next_column;
                    tiles.at(min(tile + step, last), next_row, next_column);
                    prefetch(next_column);
                }
            });
            dispatch(k_group + K_GROUPS, boundary, Constant<WAVES>());
        }
#pragma unroll
        for (int wave = 0; wave < WAVES; ++wave)
            finish(wave, row, column, first == last, true);
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    linear_fp8(const __grid_constant__ TensorMap x_map,
               const __grid_constant__ TensorMap x_scale_map,
               const __grid_constant__ TensorMap weight_map,
               const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);

    if (threadIdx.x == MATH_THREADS) {
        prefetch_map(&x_map);
        prefetch_map(&x_scale_map);
        prefetch_map(&weight_map);
        init_ring(shared);
        barrier_init_fence();
    }
    CLUSTER > 1 ? cluster_sync() : __syncthreads();

    if (group == MATH_GROUPS) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == MATH_THREADS)
            produce(shared, &x_map, &x_scale_map, &weight_map, arguments);
    } else {
        take_registers<MATH_REGISTERS>();
        LinearMath(shared, arguments, group).run();
    }
    // A block must not end while another one still writes to it or arrives at its barriers.
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_sync();
    }
}
