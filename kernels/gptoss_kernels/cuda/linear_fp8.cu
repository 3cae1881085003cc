// out[M, N] = (x * x_scale) @ (weight * weight_scale)^T + bias + residual, e4m3 in and bf16 out.
//
//     x [M, K] e4m3, x_scale [K / 128, M] fp32, weight [N, K] e4m3,
//     weight_scale [N / 128, K / 128] fp32, bias [N] fp32 or null, residual [M, N] bf16, which may
//     be out itself
//
// A persistent block computes tiles of BLOCK_M x BLOCK_N, one after the other; see gemm_fp8.cuh.
//
// With STORES_BOXES, output leaves through the copy engine in boxes of 16 rows and 64 columns, which
// each warp gathers in shared memory. The residual comes by the same place, empty while a tile is
// multiplied, and is added box by box between blocks of K. Otherwise lanes store what they have in
// registers, and the residual is added after a tile's first block of K.
//
// With HASTENS, of a residual in registers, that of a block's first tile is on its way beside its
// first block of K; and a block that has one tile lets the next kernel begin when the one before has
// ended, and not when it has sent for all.
//
// Defined by whoever compiles this, beside what gemm_fp8.cuh wants: HAS_RESIDUAL, STORES_BOXES,
// HASTENS.

constexpr int BOX_COLUMNS = STORES_BOXES ? 64 : BLOCK_N;
constexpr int BOX_BYTES = 16 * BOX_COLUMNS * 2;
constexpr int BOXES = BLOCK_N / BOX_COLUMNS;  // of 16 rows
constexpr int NUM_BOX_WARPS = STORES_BOXES ? M_GROUPS * 4 : 0;
constexpr int RESIDUAL_BARRIER_OFFSET = FIXED_OFFSET;  // a barrier for each warp
constexpr int BOX_OFFSET = (RESIDUAL_BARRIER_OFFSET + NUM_BOX_WARPS * 8 + 1023) / 1024 * 1024;
static_assert(BLOCK_N % BOX_COLUMNS == 0, "a tile has whole boxes");
static_assert(!STORES_BOXES || BOX_OFFSET + NUM_BOX_WARPS * BOX_BYTES <= SHARED_BYTES,
              "the launch gives too little memory");
constexpr bool HAS_RESIDUAL_BOXES = HAS_RESIDUAL && STORES_BOXES;
constexpr int RESIDUAL_BOXES = WAVES * BOXES;  // of a tile, in each warp
constexpr bool HASTENS_RESIDUAL = HASTENS && HAS_RESIDUAL;
static_assert(!HASTENS_RESIDUAL || !STORES_BOXES && WAVES == 1, "registers have a tile's residual");
constexpr int FIRST_PAIRS = HASTENS_RESIDUAL ? BLOCK_N / 8 : 1;  // in each of a lane's two rows
constexpr int RESIDUAL_STEP = HAS_RESIDUAL_BOXES ? 4 : 32;  // blocks of K from one to the next

struct LinearArguments : Arguments {
    const unsigned short* residual;
    int residual_stride;  // from one row to the next
};

// The tiles of one cluster. They lie in bands of TILE_ROWS clusters of M, along N inside a band: the
// blocks at work at one time then cover a rectangle, and its rows and columns stay in L2.
struct Tiles {
    int num_m, num_n;  // in clusters
    int band = 0, inside;

    __device__ __forceinline__ Tiles(int M, int N)
        : num_m((M + CLUSTER_M * BLOCK_M - 1) / (CLUSTER_M * BLOCK_M)),
          num_n((N + CLUSTER_N * BLOCK_N - 1) / (CLUSTER_N * BLOCK_N)),
          inside(blockIdx.x / CLUSTER) {
        settle();
    }

    __device__ __forceinline__ int count() const { return num_m * num_n; }

    __device__ __forceinline__ void advance() {
        inside += gridDim.x / CLUSTER;
        settle();
    }

    __device__ __forceinline__ void settle() {
        for (; inside >= TILE_ROWS * num_n; ++band) inside -= TILE_ROWS * num_n;
    }

    __device__ __forceinline__ void at(int& row, int& column) const {
        const int rows = min(TILE_ROWS, num_m - band * TILE_ROWS);
        // Almost always by a constant.
        const int cluster_column = rows == TILE_ROWS ? inside / TILE_ROWS : inside / rows;
        const int cluster_row = band * TILE_ROWS + inside - cluster_column * rows;
        const int rank = CLUSTER > 1 ? cluster_rank() : 0;
        row = (cluster_row * CLUSTER_M + (CLUSTER_M > 1 ? rank : 0)) * BLOCK_M;
        column = (cluster_column * CLUSTER_N + (CLUSTER_N > 1 ? rank : 0)) * BLOCK_N;
    }
};

__device__ __forceinline__ void produce(uint32_t shared, const TensorMap* x_map,
                                        const TensorMap* x_scale_map, const TensorMap* weight_map,
                                        const Arguments& arguments) {
    Tiles tiles(arguments.M, arguments.N);
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
    tiles.at(row, column);
    for (int k = 0; k < num_early; ++k) load_weight(k, column, k);
    wait_for_previous_kernels();
    const bool has_one = HASTENS && tiles.count() <= step;
    if (has_one) allow_next_kernel();

    Ring ring;
    for (int tile = first; tile < tiles.count(); tile += step, tiles.advance()) {
        tiles.at(row, column);
        for (int k = 0; k < num_k_blocks; ++k, ring.advance(1)) {
            if (tile != first || k >= num_early) {
                barrier_wait(shared + EMPTY_OFFSET + ring.slot * 8, ring.phase ^ 1);
                load_weight(ring.slot, column, k);
            }
            load_x(ring.slot, row, k);
        }
    }
    if (!has_one) allow_next_kernel();
}

struct LinearMath : Math {
    const LinearArguments& linear;
    const TensorMap* const out_map;
    const TensorMap* const residual_map;
    const uint32_t box_place;  // of this warp
    int num_added = 0;         // boxes of the residual, to this tile
    uint32_t residual_phase = 0;
    uint32_t first_residual[2][FIRST_PAIRS];

    __device__ __forceinline__ LinearMath(uint32_t shared, const LinearArguments& arguments,
                                          const TensorMap* out_map, const TensorMap* residual_map,
                                          int group)
        : Math(shared, arguments, group),
          linear(arguments),
          out_map(out_map),
          residual_map(residual_map),
          box_place(!STORES_BOXES
                        ? 0
                        : same_in_warp(shared + BOX_OFFSET + threadIdx.x / 32 * BOX_BYTES)) {}

    // Where a row's 16 bytes number `unit` are in a box: swizzled as the copy engine does it.
    __device__ __forceinline__ uint32_t in_box(int row, int unit) const {
        return box_place + row * (BOX_COLUMNS * 2) + (unit ^ row % 8) * 16;
    }

    __device__ __forceinline__ void store_boxes(int wave, int row, int column) {
#pragma unroll
        for (int box = 0; box < BOXES; ++box) {
            if (lane == 0) store_wait<0>();  // what was here has been read
            __syncwarp();
            const uint32_t first = computed_here(in_box(lane % 16, lane / 16));
            const float* sums = promoted[wave] + box * (BOX_COLUMNS / 2);
#pragma unroll
            for (int i = 0; i < BOX_COLUMNS / 2; i += 8)
                store_matrices(first ^ i * 4, pack_bf16(sums[i], sums[i + 1]),
                               pack_bf16(sums[i + 2], sums[i + 3]),
                               pack_bf16(sums[i + 4], sums[i + 5]),
                               pack_bf16(sums[i + 6], sums[i + 7]));
            shared_fence();
            __syncwarp();
            if (lane == 0)
                store_box(out_map, box_place, column + box * BOX_COLUMNS,
                          row + row_in_block + wave * M_GROUPS * 64);
        }
    }

    __device__ __forceinline__ uint32_t residual_barrier() const {
        return shared + RESIDUAL_BARRIER_OFFSET + threadIdx.x / 32 * 8;
    }

    // By one lane, where all have read what was in the box's place.
    __device__ __forceinline__ void request_residual(int box, int row, int column) {
        barrier_expect(residual_barrier(), BOX_BYTES);
        load_box(box_place, residual_map, residual_barrier(), column + box % BOXES * BOX_COLUMNS,
                 row + row_in_block + box / BOXES * M_GROUPS * 64);
    }

    // Of the tile whose first block of K has been multiplied.
    __device__ __forceinline__ void start_residual(int row, int column, bool is_first) {
        if (!HAS_RESIDUAL || k_group != 0) return;
        if (HASTENS_RESIDUAL && is_first) {
            add_first_residual();
        } else if constexpr (HAS_RESIDUAL_BOXES) {
            num_added = 0;
            shared_fence();
            __syncwarp();
            if (lane == 0) {
                store_wait<0>();
                request_residual(0, row, column);
            }
        } else {
            add_from_registers(row, column);
        }
    }

    template <int BOX>
    __device__ __forceinline__ void add_box(int row, int column) {
        const uint32_t first = in_box(lane % 16, lane / 16);
        float* sums = promoted[BOX / BOXES] + BOX % BOXES * (BOX_COLUMNS / 2);
        barrier_wait(residual_barrier(), residual_phase);
        residual_phase ^= 1;
#pragma unroll
        for (int i = 0; i < BOX_COLUMNS / 2; i += 8) {
            uint32_t words[4];
            load_matrices(first ^ i * 4, words);
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                sums[i + 2 * word] += low_bf16(words[word]);
                sums[i + 2 * word + 1] += high_bf16(words[word]);
            }
        }
        __syncwarp();
        if constexpr (BOX + 1 < RESIDUAL_BOXES)
            if (lane == 0) request_residual(BOX + 1, row, column);
    }

    __device__ __forceinline__ void load_first_residual(int row, int column) {
        if (!HASTENS_RESIDUAL || k_group != 0) return;
        wait_for_previous_kernels();
        const int first_column = column + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int out_row = row + row_in_block + half * 8;
            const int num_columns = out_row < arguments.M ? arguments.N - first_column : 0;
            const unsigned short* residual =
                linear.residual + first_column +
                static_cast<long long>(out_row) * linear.residual_stride;
#pragma unroll
            for (int i = 0; i < FIRST_PAIRS; ++i)
                first_residual[half][i] = load_global(residual + i * 8, i * 8 < num_columns);
        }
    }

    __device__ __forceinline__ void add_first_residual() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < FIRST_PAIRS; ++i) {
                promoted[0][4 * i + half * 2] += low_bf16(first_residual[half][i]);
                promoted[0][4 * i + half * 2 + 1] += high_bf16(first_residual[half][i]);
            }
        }
    }

    // As many as registers allow are under way at once. Each element is read before its thread passes
    // it on: the neighbour that stores it may do so to the place that it was read from.
    __device__ __forceinline__ void add_from_registers(int row, int column) {
#pragma unroll
        for (int wave = 0; wave < WAVES; ++wave) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int out_row = row + row_in_block + wave * M_GROUPS * 64 + half * 8;
                const int first_column = column + lane % 4 * 2;
                const int num_columns = out_row < arguments.M ? arguments.N - first_column : 0;
                const unsigned short* residual =
                    linear.residual + first_column +
                    static_cast<long long>(out_row) * linear.residual_stride;
                constexpr int PAIRS = BLOCK_N / 8;
                constexpr int AT_ONCE = PAIRS <= 10 ? PAIRS : PAIRS % 4 == 0 ? 4 : 3;
                static_assert(PAIRS % AT_ONCE == 0);
#pragma unroll
                for (int base = 0; base < PAIRS; base += AT_ONCE) {
                    uint32_t pairs[AT_ONCE];
#pragma unroll
                    for (int i = 0; i < AT_ONCE; ++i)
                        pairs[i] = load_global(residual + (base + i) * 8,
                                               (base + i) * 8 < num_columns);
#pragma unroll
                    for (int i = 0; i < AT_ONCE; ++i) {
                        promoted[wave][4 * (base + i) + half * 2] += low_bf16(pairs[i]);
                        promoted[wave][4 * (base + i) + half * 2 + 1] += high_bf16(pairs[i]);
                    }
                }
            }
        }
    }

    // The next box, chosen here: sums lie in registers, which have no number at run time.
    template <int BOX = 0>
    __device__ __forceinline__ void add_next(int row, int column) {
        if constexpr (BOX < RESIDUAL_BOXES) {
            if (num_added != BOX) {
                add_next<BOX + 1>(row, column);
            } else {
                add_box<BOX>(row, column);
                num_added = BOX + 1;
            }
        }
    }

    __device__ __forceinline__ void finish(int wave, int row, int column, bool is_first,
                                           bool is_last) {
        if (k_group == 0) {
            take_over(is_last);
            if constexpr (STORES_BOXES)
                store_boxes(wave, row, column);
            else
                store(wave, row, arguments.M, column);
        } else {
            hand_over(is_first);
        }
    }

    __device__ __forceinline__ void run() {
        Tiles tiles(arguments.M, arguments.N);
        const int first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
        const int last = first + (tiles.count() - 1 - first) / step * step;
        int row, column, next_row, next_column;
        tiles.at(next_row, next_column);
        prefetch(next_column);
#pragma unroll
        for (int wave = 0; wave < WAVES; ++wave) start(wave);  // beside the first loads
        load_first_residual(next_row, next_column);
        ring.advance(k_group);
        for (int tile = first; tile <= last; tile += step) {
            const auto boundary = boundary_of(next_column);
            block(k_group, boundary, Constant<WAVES>(), [&](int wave) {
                if (tile != first) {
                    finish(wave, row, column, tile == first + step, false);
                    start(wave);
                }
                if (wave == WAVES - 1) {
                    // Through a shuffle, as the compiler takes `column + 32` of the tile that is
                    // stored for that of the next one where both are uniform (NVRTC 13.0.88).
                    row = same_in_warp(next_row);
                    column = same_in_warp(next_column);
                    if (tile < last) tiles.advance();
                    tiles.at(next_row, next_column);
                    prefetch(next_column);
                }
            });
            start_residual(row, column, tile == first);
            dispatch<RESIDUAL_STEP>(k_group + K_GROUPS, boundary, Constant<WAVES>(), [&] {
                if constexpr (HAS_RESIDUAL_BOXES)
                    if (k_group == 0) add_next(row, column);
            });
            if constexpr (HAS_RESIDUAL_BOXES)
                while (k_group == 0 && num_added < RESIDUAL_BOXES) add_next(row, column);
        }
#pragma unroll
        for (int wave = 0; wave < WAVES; ++wave)
            finish(wave, row, column, first == last, true);
        if (STORES_BOXES && lane == 0) store_wait<0>();  // before this memory is another block's
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    linear_fp8(const __grid_constant__ TensorMap x_map,
               const __grid_constant__ TensorMap x_scale_map,
               const __grid_constant__ TensorMap weight_map,
               const __grid_constant__ TensorMap out_map,
               const __grid_constant__ TensorMap residual_map,
               const __grid_constant__ LinearArguments arguments) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const int group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0);

    if (threadIdx.x == MATH_THREADS) {
        prefetch_map(&x_map);
        prefetch_map(&x_scale_map);
        prefetch_map(&weight_map);
        if constexpr (STORES_BOXES) prefetch_map(&out_map);
        if constexpr (HAS_RESIDUAL_BOXES) {
            prefetch_map(&residual_map);
            for (int i = 0; i < NUM_BOX_WARPS; ++i)
                barrier_init(shared + RESIDUAL_BARRIER_OFFSET + i * 8, 1);
        }
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
        LinearMath(shared, arguments, &out_map, &residual_map, group).run();
    }
    // A block must not end while another one still writes to it or arrives at its barriers.
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_sync();
    }
}
