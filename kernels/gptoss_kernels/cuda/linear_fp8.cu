// out[M, N] = (x * x_scale) @ (weight * weight_scale)^T + bias, all of it e4m3 in and bf16 out.
//
//     x [M, K] e4m3, x_scale [K / 128, M] fp32, weight [N, K] e4m3,
//     weight_scale [N / 128, K / 128] fp32, bias [N] fp32
//
// A persistent block computes tiles of BLOCK_M x BLOCK_N. One thread feeds a ring of STAGES slots
// through the copy engine, each slot 128 of K of both matrices; warpgroups of M_GROUPS x K_GROUPS
// multiply. The tensor cores sum 128 of K into `partial`, without scales and with few bits;
// `promoted` then takes it in fp32, times both scales. It starts as the bias.
//
// The tile's last act, rounding and storing `promoted`, waits until the first multiplications of
// the next tile are under way: they need `partial` alone, so the tensor cores don't pause.
//
// Blocks of a cluster are neighbours along M and share their loads of the weight, or along N and
// share those of x.
//
// Defined by whoever compiles this: BLOCK_N, STAGES, CLUSTER_M, CLUSTER_N, M_GROUPS, K_GROUPS,
// WAVES (of 64 rows, one after the other, in each warpgroup), TILE_ROWS,
// SHARED_BYTES.

constexpr int BLOCK_K = 128;
constexpr int GROUP_M = 64 * WAVES;
constexpr int BLOCK_M = GROUP_M * M_GROUPS;
constexpr int CLUSTER = CLUSTER_M * CLUSTER_N;
constexpr int MATH_GROUPS = M_GROUPS * K_GROUPS;
constexpr int MATH_THREADS = 128 * MATH_GROUPS;
constexpr int THREADS = MATH_THREADS + 128;

// 65,536 registers a multiprocessor: what the producer gives up, the math warpgroups take.
constexpr int MATH_REGISTERS = MATH_GROUPS <= 2 ? 232 : MATH_GROUPS == 3 ? 160 : 112;
constexpr int PRODUCER_REGISTERS = MATH_GROUPS <= 2 ? 40 : MATH_GROUPS == 3 ? 32 : 24;

constexpr int X_BYTES = BLOCK_M * BLOCK_K;
constexpr int WEIGHT_BYTES = BLOCK_N * BLOCK_K;
constexpr int X_SCALE_BYTES = BLOCK_M * 4;
constexpr int SUM_BYTES = GROUP_M * BLOCK_N * 4;  // of one warpgroup, in fp32

constexpr int X_OFFSET = 0;
constexpr int WEIGHT_OFFSET = X_OFFSET + STAGES * X_BYTES;
constexpr int SUM_OFFSET = WEIGHT_OFFSET + STAGES * WEIGHT_BYTES;
constexpr int X_SCALE_OFFSET = SUM_OFFSET + (K_GROUPS - 1) * M_GROUPS * SUM_BYTES;
constexpr int FULL_OFFSET = X_SCALE_OFFSET + STAGES * X_SCALE_BYTES;
constexpr int EMPTY_OFFSET = FULL_OFFSET + STAGES * 8;

static_assert(BLOCK_N % 8 == 0 && BLOCK_N <= 256, "wgmma multiplies 8 to 256 columns");
static_assert(CLUSTER_M == 1 || CLUSTER_N == 1, "a cluster shares one of the two loads");
static_assert(K_GROUPS == 1 || WAVES == 1, "sums are handed over of one wave");
static_assert((BLOCK_N / CLUSTER_M) % 8 == 0, "each block of a cluster loads whole swizzle atoms");
static_assert(EMPTY_OFFSET + STAGES * 8 <= SHARED_BYTES, "the launch gives too little memory");

// Named barriers; 0 is __syncthreads.
constexpr int SUM_READY_BARRIER = 1;  // + warpgroup
constexpr int SUM_FREE_BARRIER = SUM_READY_BARRIER + MATH_GROUPS;
static_assert(SUM_FREE_BARRIER + MATH_GROUPS <= 16, "a block has 16 named barriers");

template <int VALUE>
struct Constant {
    __device__ constexpr operator int() const { return VALUE; }
};

struct Ring {
    int slot = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance(int count) {
        slot += count;
        if (slot >= STAGES) {
            slot -= STAGES;
            phase ^= 1;
        }
    }
};

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

struct Arguments {
    const float* weight_scale;
    const float* bias;
    unsigned short* out;
    int M, N, K;
    int out_stride;  // from one row to the next
    int x_rows;  // that one load of x brings: of few tokens no more than there are
};

template <bool IS_SHARED>
__device__ __forceinline__ void load(uint32_t destination, const TensorMap* map, uint32_t full,
                                     int inner, int outer) {
    if constexpr (IS_SHARED)
        load_box_multicast(destination, map, full, inner, outer, (1 << CLUSTER) - 1);
    else
        load_box(destination, map, full, inner, outer);
}

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

struct Math {
    static constexpr int ACCUMULATORS = BLOCK_N / 2;
    static constexpr int SCALE_STEP = BLOCK_N % 128 == 0  ? 128
                                      : BLOCK_N % 64 == 0 ? 64
                                      : BLOCK_N % 32 == 0 ? 32
                                                          : 8;

    float promoted[WAVES][ACCUMULATORS];
    float partial[ACCUMULATORS];
    // Of 32 blocks of K, one in each lane: the scales of the tile's two rows of 128 columns, and
    // those and the bias of the next tile, which have a whole tile's time to arrive.
    float lane_scale_0, lane_scale_1;
    float next_scale_0, next_scale_1, next_bias[(BLOCK_N + 31) / 32];
    int scale_row_0, scale_row_1, next_row_0, next_row_1;

    const uint32_t shared;
    const Arguments& arguments;
    const int num_k_blocks;
    const int m_group, k_group, lane, row_in_block;
    const uint32_t x_descriptor, weight_descriptor;  // of the first slot
    Ring ring;

    __device__ __forceinline__ Math(uint32_t shared, const Arguments& arguments, int group)
        : shared(shared),
          arguments(arguments),
          num_k_blocks((arguments.K + BLOCK_K - 1) / BLOCK_K),
          m_group(group % M_GROUPS),
          k_group(K_GROUPS == 1 ? 0 : group / M_GROUPS),
          lane(threadIdx.x % 32),
          row_in_block(group % M_GROUPS * GROUP_M + threadIdx.x % 128 / 32 * 16 + lane / 4),
          x_descriptor(same_in_warp(
              matrix_descriptor(shared + X_OFFSET + group % M_GROUPS * GROUP_M * BLOCK_K))),
          weight_descriptor(same_in_warp(matrix_descriptor(shared + WEIGHT_OFFSET))) {}

    __device__ __forceinline__ void multiply(int wave) {
        const uint32_t x = x_descriptor + ring.slot * (X_BYTES / 16) + wave * (64 * BLOCK_K / 16);
        const uint32_t weight = weight_descriptor + ring.slot * (WEIGHT_BYTES / 16);
        fence_registers(partial);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BLOCK_K / 32; ++k)  // 32 bytes along a swizzled row: 2 units of 16
            wgmma_e4m3<BLOCK_N>(partial, x + 2 * k, weight + 2 * k, k != 0);
        wgmma_commit();
    }

    __device__ __forceinline__ void release() {
        const uint32_t empty = shared + EMPTY_OFFSET + ring.slot * 8;
        if constexpr (CLUSTER == 1) {
            if (lane == 0) barrier_arrive(empty);
        } else {
            if (lane < CLUSTER) barrier_arrive(empty, lane);
        }
    }

    __device__ __forceinline__ float lane_scale(int row, int k) const {
        return __ldg(arguments.weight_scale + row * num_k_blocks + min(k + lane, num_k_blocks - 1));
    }

    __device__ __forceinline__ void prefetch(int column) {
        const int last = min(column + BLOCK_N, arguments.N) - 1;
        next_row_0 = min(column, last) / 128;
        next_row_1 = last / 128;
        next_scale_0 = lane_scale(next_row_0, 0);
        next_scale_1 = lane_scale(next_row_1, 0);
#pragma unroll
        for (int i = 0; i < (BLOCK_N + 31) / 32; ++i)
            next_bias[i] = __ldg(arguments.bias + min(column + i * 32 + lane, arguments.N - 1));
    }

    // A wave of the tile whose scales and bias were prefetched.
    __device__ __forceinline__ void start(int wave) {
        lane_scale_0 = next_scale_0;
        lane_scale_1 = next_scale_1;
        scale_row_0 = next_row_0;
        scale_row_1 = next_row_1;
#pragma unroll
        for (int i = 0; i < ACCUMULATORS; i += i % 2 ? 3 : 1) {  // 0, 1, 4, 5, 8, 9, ...
            const int in_row = i / 4 * 8 + i % 2;                // and twice lane % 4 from there
            const float bias =
                __shfl_sync(0xFFFFFFFF, next_bias[in_row / 32], in_row % 32 + lane % 4 * 2);
            promoted[wave][i] = promoted[wave][i + 2] = k_group == 0 ? bias : 0.f;
        }
    }

    // One block of K: `meanwhile` runs beside the multiplication of each wave. Columns below
    // `boundary` have the first of the tile's two weight scales.
    template <typename Boundary, typename Meanwhile>
    __device__ __forceinline__ void block(int k, Boundary boundary, Meanwhile meanwhile) {
        barrier_wait(shared + FULL_OFFSET + ring.slot * 8, ring.phase);
#pragma unroll
        for (int wave = 0; wave < WAVES; ++wave) {
            const uint32_t x_scale = shared + X_SCALE_OFFSET + ring.slot * X_SCALE_BYTES +
                                     (row_in_block + wave * 64) * 4;
            const float x_scale_0 = load_shared(x_scale), x_scale_1 = load_shared(x_scale + 8 * 4);
            multiply(wave);
            meanwhile(wave);
            // Only now: `meanwhile` may have brought another tile's.
            const float weight_scale_0 = __shfl_sync(0xFFFFFFFF, lane_scale_0, k % 32);
            const float weight_scale_1 = __shfl_sync(0xFFFFFFFF, lane_scale_1, k % 32);
            wgmma_wait();
            fence_registers(partial);
            if (wave == WAVES - 1) release();

            const float scale_00 = x_scale_0 * weight_scale_0;
            const float scale_01 = x_scale_0 * weight_scale_1;
            const float scale_10 = x_scale_1 * weight_scale_0;
            const float scale_11 = x_scale_1 * weight_scale_1;
#pragma unroll
            for (int i = 0; i < ACCUMULATORS; i += 4) {
                const bool is_first = i * 2 < boundary;
                const float scale_0 = is_first ? scale_00 : scale_01;
                const float scale_1 = is_first ? scale_10 : scale_11;
                promoted[wave][i + 0] += scale_0 * partial[i + 0];
                promoted[wave][i + 1] += scale_0 * partial[i + 1];
                promoted[wave][i + 2] += scale_1 * partial[i + 2];
                promoted[wave][i + 3] += scale_1 * partial[i + 3];
            }
        }
        // The last block of a tile leads to this warpgroup's first block of the next tile.
        if constexpr (K_GROUPS == 1)
            ring.advance(1);
        else
            ring.advance(k + K_GROUPS < num_k_blocks ? K_GROUPS : num_k_blocks - k + k_group);
    }

    template <typename Boundary>
    __device__ __forceinline__ void blocks(int k, Boundary boundary) {
        while (k < num_k_blocks) {
            if (k >= 32) {
                lane_scale_0 = lane_scale(scale_row_0, k - k % 32);
                lane_scale_1 = lane_scale(scale_row_1, k - k % 32);
            }
            const int end = min(num_k_blocks, k - k % 32 + 32);
            for (; k < end; k += K_GROUPS) block(k, boundary, [](int) {});
        }
    }

    // The boundary as a constant, where it has few values: a choice of scales in each column
    // would cost half as many instructions as the promotion itself.
    template <int BOUNDARY = SCALE_STEP>
    __device__ __forceinline__ void dispatch(int k, int boundary) {
        if constexpr (SCALE_STEP == 8) {
            blocks(k, boundary);
        } else if constexpr (BOUNDARY >= 128 || BOUNDARY >= BLOCK_N) {
            blocks(k, Constant<BOUNDARY>());
        } else {
            if (boundary == BOUNDARY)
                blocks(k, Constant<BOUNDARY>());
            else
                dispatch<BOUNDARY + SCALE_STEP>(k, boundary);
        }
    }

    __device__ __forceinline__ void hand_over(bool is_first) {
        const int group = k_group * M_GROUPS + m_group;
        const uint32_t sums = shared + SUM_OFFSET + (group - M_GROUPS) * SUM_BYTES;
        if (!is_first) named_sync(SUM_FREE_BARRIER + group, 256);
#pragma unroll
        for (int i = 0; i < ACCUMULATORS; ++i)
            store_shared(sums + (i * 128 + threadIdx.x % 128) * 4, promoted[0][i]);
        named_arrive(SUM_READY_BARRIER + group, 256);
    }

    __device__ __forceinline__ void take_over(bool is_last) {
#pragma unroll
        for (int other = 1; other < K_GROUPS; ++other) {
            const int group = other * M_GROUPS + m_group;
            const uint32_t sums = shared + SUM_OFFSET + (group - M_GROUPS) * SUM_BYTES;
            named_sync(SUM_READY_BARRIER + group, 256);
#pragma unroll
            for (int i = 0; i < ACCUMULATORS; ++i)
                promoted[0][i] += load_shared(sums + (i * 128 + threadIdx.x % 128) * 4);
            if (!is_last) named_arrive(SUM_FREE_BARRIER + group, 256);
        }
    }

    // A lane has 2 columns of each 8. Neighbours swap what they have of 16, so that each stores 4
    // columns at once and the four lanes of a row fill a sector of 32 bytes.
    __device__ __forceinline__ void store(int wave, int row, int column) {
        const bool is_odd = lane % 2;
        const int first_column = column + lane % 4 / 2 * 4 + (is_odd ? 8 : 0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* sums = promoted[wave] + half * 2;
            const int out_row = row + row_in_block + wave * 64 + half * 8;
            const bool is_inside = out_row < arguments.M;
            unsigned short* out =
                arguments.out + static_cast<long long>(out_row) * arguments.out_stride;
#pragma unroll
            for (int i = 0; i + 1 < BLOCK_N / 8; i += 2) {
                const uint32_t left = pack_bf16(sums[4 * i], sums[4 * i + 1]);
                const uint32_t right = pack_bf16(sums[4 * i + 4], sums[4 * i + 5]);
                const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, is_odd ? left : right, 1);
                if (is_inside && first_column + i * 8 < arguments.N)
                    store_global(out + first_column + i * 8, is_odd ? other : left,
                                 is_odd ? right : other);
            }
            if constexpr (BLOCK_N / 8 % 2 == 1) {
                const int last_column = column + BLOCK_N - 8 + lane % 4 * 2;
                if (is_inside && last_column < arguments.N)
                    store_global(out + last_column, pack_bf16(sums[ACCUMULATORS - 4],
                                                              sums[ACCUMULATORS - 3]));
            }
        }
    }

    __device__ __forceinline__ void finish(int wave, int row, int column, bool is_first,
                                           bool is_last) {
        if (k_group == 0) {
            take_over(is_last);
            store(wave, row, column);
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
            const int boundary = 128 - next_column % 128;
            block(k_group, boundary, [&](int wave) {
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
            dispatch(k_group + K_GROUPS, boundary);
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
        for (int slot = 0; slot < STAGES; ++slot) {
            barrier_init(shared + FULL_OFFSET + slot * 8, 1);
            barrier_init(shared + EMPTY_OFFSET + slot * 8, CLUSTER * M_GROUPS * 4);
        }
        barrier_init_fence();
    }
    CLUSTER > 1 ? cluster_sync() : __syncthreads();

    if (group == MATH_GROUPS) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x == MATH_THREADS)
            produce(shared, &x_map, &x_scale_map, &weight_map, arguments);
    } else {
        take_registers<MATH_REGISTERS>();
        Math(shared, arguments, group).run();
    }
    // A block must not end while another one still writes to it or arrives at its barriers.
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_sync();
    }
}
