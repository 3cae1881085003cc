// The heart of an FP8 product with block scales: what linear_fp8.cu and grouped_fp8.cu share.
//
//     sums[64, BLOCK_N] = bias + sum over K of (x * x_scale) @ (weight * weight_scale)^T
//
// One thread feeds a ring of STAGES slots through the copy engine, each slot 128 of K of both
// matrices; warpgroups of M_GROUPS x K_GROUPS multiply. The tensor cores sum X_GROUP of K into
// `partial`, without scales and with few bits; `promoted` then takes it in fp32, times both scales.
// It starts as the bias.
//
// A tile's last act, rounding and storing `promoted`, waits until the first multiplications of the
// next tile are under way: they need `partial` alone, so the tensor cores don't pause.
//
// Blocks of a cluster are neighbours along M and share their loads of the weight, or along N and
// share those of x.
//
// Defined by whoever compiles this: BLOCK_N, STAGES, CLUSTER_M, CLUSTER_N, M_GROUPS, K_GROUPS,
// WAVES (of 64 rows, one after the other, in each warpgroup), X_GROUP (how many of K share a scale
// of x: 128 or 64), PARTIALS (2: one is promoted while the next is multiplied), SCALE_ROWS (how
// many scales are loaded for 64 rows), TILE_ROWS, FIXED_BYTES (of shared memory, for what the
// kernel adds), SHARED_BYTES, BIAS_IS_OPTIONAL (null stands for none), UNROLL (blocks of K that are
// written out).

constexpr int BLOCK_K = 128;
constexpr int BLOCK_M = 64 * M_GROUPS * WAVES;
constexpr int SCALES = BLOCK_K / X_GROUP;  // of one row of x in one block of K
constexpr int SCALE_BYTES = (SCALES * SCALE_ROWS * 4 + 127) / 128 * 128;  // of 64 rows
constexpr int CLUSTER = CLUSTER_M * CLUSTER_N;
constexpr int MATH_GROUPS = M_GROUPS * K_GROUPS;
constexpr int MATH_THREADS = 128 * MATH_GROUPS;
constexpr int THREADS = MATH_THREADS + 128;

// 65,536 registers a multiprocessor: what the producer gives up, the math warpgroups take.
constexpr int MATH_REGISTERS = MATH_GROUPS <= 2 ? 232 : MATH_GROUPS == 3 ? 160 : 112;
constexpr int PRODUCER_REGISTERS = MATH_GROUPS <= 2 ? 40 : MATH_GROUPS == 3 ? 32 : 24;

constexpr int X_BYTES = BLOCK_M * BLOCK_K;
constexpr int WEIGHT_BYTES = BLOCK_N * BLOCK_K;
constexpr int X_SCALE_BYTES = BLOCK_M / 64 * SCALE_BYTES;
constexpr int SUM_BYTES = 64 * BLOCK_N * 4;  // of one warpgroup, in fp32

constexpr int X_OFFSET = 0;
constexpr int WEIGHT_OFFSET = X_OFFSET + STAGES * X_BYTES;
constexpr int SUM_OFFSET = WEIGHT_OFFSET + STAGES * WEIGHT_BYTES;
constexpr int X_SCALE_OFFSET = SUM_OFFSET + (K_GROUPS - 1) * M_GROUPS * SUM_BYTES;
constexpr int FULL_OFFSET = X_SCALE_OFFSET + STAGES * X_SCALE_BYTES;
constexpr int EMPTY_OFFSET = FULL_OFFSET + STAGES * 8;

static_assert(X_GROUP == 128 || X_GROUP == 64, "a scale of x covers a block of K or half of it");
static_assert(BLOCK_N % 8 == 0 && BLOCK_N <= 256, "wgmma multiplies 8 to 256 columns");
static_assert(CLUSTER_M == 1 || CLUSTER_N == 1, "a cluster shares one of the two loads");
static_assert(K_GROUPS == 1 || WAVES == 1, "sums are handed over of one wave");
static_assert(STAGES >= 2 * K_GROUPS - 1, "between a warpgroup's blocks of K, across tiles, too");
static_assert((BLOCK_N / CLUSTER_M) % 8 == 0, "each block of a cluster loads whole swizzle atoms");
constexpr int FIXED_OFFSET = (EMPTY_OFFSET + STAGES * 8 + 15) / 16 * 16;
static_assert(FIXED_OFFSET + FIXED_BYTES <= SHARED_BYTES, "the launch gives too little memory");

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

struct Arguments {
    const float* weight_scale;
    const float* bias;
    unsigned short* out;
    int M, N, K;
    int out_stride;  // from one row to the next
    int x_rows;  // that one load of x brings: of few tokens no more than there are
};

__device__ __forceinline__ void init_ring(uint32_t shared) {
    for (int slot = 0; slot < STAGES; ++slot) {
        barrier_init(shared + FULL_OFFSET + slot * 8, 1);
        barrier_init(shared + EMPTY_OFFSET + slot * 8, CLUSTER * M_GROUPS * 4);
    }
}

template <bool IS_SHARED>
__device__ __forceinline__ void load(uint32_t destination, const TensorMap* map, uint32_t full,
                                     int inner, int outer) {
    if constexpr (IS_SHARED)
        load_box_multicast(destination, map, full, inner, outer, (1 << CLUSTER) - 1);
    else
        load_box(destination, map, full, inner, outer);
}

struct Math {
    static constexpr int ACCUMULATORS = BLOCK_N / 2;
    static constexpr int SCALE_STEP = BLOCK_N % 128 == 0  ? 128
                                      : BLOCK_N % 64 == 0 ? 64
                                      : BLOCK_N % 32 == 0 ? 32
                                                          : 8;

    float promoted[WAVES][ACCUMULATORS];
    float partial[PARTIALS][ACCUMULATORS];
    // Of 32 blocks of K, one in each lane: the scales of the tile's two rows of 128 columns, and
    // those and the bias of the next tile, which have a whole tile's time to arrive.
    float lane_scale_0, lane_scale_1;
    float next_scale_0, next_scale_1, next_bias[(BLOCK_N + 31) / 32];
    int scale_row_0, scale_row_1, next_row_0, next_row_1;
    int first_scale = 0;  // of those loaded for 64 rows, the first row's

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
          row_in_block(group % M_GROUPS * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4),
          x_descriptor(same_in_warp(
              matrix_descriptor(shared + X_OFFSET + group % M_GROUPS * 64 * BLOCK_K))),
          weight_descriptor(same_in_warp(matrix_descriptor(shared + WEIGHT_OFFSET))) {}

    // Into partial[target]: the part'th X_GROUP of a wave's block of K.
    __device__ __forceinline__ void multiply(int wave, int part, int target) {
        const uint32_t x = x_descriptor + ring.slot * (X_BYTES / 16) +
                           wave * (M_GROUPS * 64 * BLOCK_K / 16) + part * (X_GROUP / 16);
        const uint32_t weight =
            weight_descriptor + ring.slot * (WEIGHT_BYTES / 16) + part * (X_GROUP / 16);
        fence_registers(partial[target]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < X_GROUP / 32; ++k)  // 32 bytes along a swizzled row: 2 units of 16
            wgmma_e4m3<BLOCK_N>(partial[target], x + 2 * k, weight + 2 * k, k != 0);
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

    // Of the weights of all experts, each of N rows; `column` counts in its own.
    __device__ __forceinline__ void prefetch(int column, int expert = 0) {
        const int last = min(column + BLOCK_N, arguments.N) - 1;
        const int first_row = expert * ((arguments.N + 127) / 128);
        next_row_0 = first_row + min(column, last) / 128;
        next_row_1 = first_row + last / 128;
        next_scale_0 = lane_scale(next_row_0, 0);
        next_scale_1 = lane_scale(next_row_1, 0);
        if (BIAS_IS_OPTIONAL && arguments.bias == nullptr) {
#pragma unroll
            for (int i = 0; i < (BLOCK_N + 31) / 32; ++i) next_bias[i] = 0;
            return;
        }
#pragma unroll
        for (int i = 0; i < (BLOCK_N + 31) / 32; ++i)
            next_bias[i] = __ldg(arguments.bias + expert * arguments.N +
                                 min(column + i * 32 + lane, arguments.N - 1));
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
                __shfl_sync(ALL_LANES, next_bias[in_row / 32], in_row % 32 + lane % 4 * 2);
            promoted[wave][i] = promoted[wave][i + 2] = k_group == 0 ? bias : 0.f;
        }
    }

    // One block of K, of the first `waves` waves: `meanwhile` runs beside the first multiplication
    // of each. Columns below `boundary` have the first of the tile's two weight scales.
    template <typename Boundary, typename Waves, typename Meanwhile>
    __device__ __forceinline__ void block(int k, Boundary boundary, Waves waves,
                                          Meanwhile meanwhile) {
        // The slot's last turn may have been another warpgroup's. If its load were still under way,
        // the turn before that would be taken for this one: they are of the same parity.
        if constexpr (K_GROUPS > 1)
            barrier_wait(shared + EMPTY_OFFSET + ring.slot * 8, ring.phase ^ 1);
        barrier_wait(shared + FULL_OFFSET + ring.slot * 8, ring.phase);
        multiply_and_promote<1>(k, boundary, waves, meanwhile);
        // The last block of a tile leads to this warpgroup's first block of the next tile.
        if constexpr (K_GROUPS == 1)
            ring.advance(1);
        else
            ring.advance(k + K_GROUPS < num_k_blocks ? K_GROUPS : num_k_blocks - k + k_group);
    }

    // The number of waves as a constant: what is under way must be known to the compiler.
    template <int NUM_WAVES, typename Boundary, typename Waves, typename Meanwhile>
    __device__ __forceinline__ void multiply_and_promote(int k, Boundary boundary, Waves waves,
                                                         Meanwhile meanwhile) {
        if constexpr (NUM_WAVES < WAVES) {
            if (waves > NUM_WAVES) {
                multiply_and_promote<NUM_WAVES + 1>(k, boundary, waves, meanwhile);
                return;
            }
        }
        if (waves == 0) {
            __syncwarp();  // no lane may still wait for what is released
            release();
            return;
        }
        constexpr int STEPS = NUM_WAVES * SCALES;
        float x_scale_0[PARTIALS], x_scale_1[PARTIALS];
#pragma unroll
        for (int step = 0; step < STEPS + PARTIALS - 1; ++step) {
            if (step < STEPS) {
                const int wave = step / SCALES, part = step % SCALES, target = step % PARTIALS;
                const uint32_t x_scale = shared + X_SCALE_OFFSET + ring.slot * X_SCALE_BYTES +
                                         (m_group + wave * M_GROUPS) * SCALE_BYTES +
                                         (part * SCALE_ROWS + first_scale + row_in_block % 64) * 4;
                x_scale_0[target] = load_shared(x_scale);
                x_scale_1[target] = load_shared(x_scale + 8 * 4);
                multiply(wave, part, target);
                if (part == 0) meanwhile(wave);
            }
            const int done = step - (PARTIALS - 1);
            if (done < 0) continue;
            // Only now: `meanwhile` may have brought another tile's.
            const float weight_scale_0 = __shfl_sync(ALL_LANES, lane_scale_0, k % 32);
            const float weight_scale_1 = __shfl_sync(ALL_LANES, lane_scale_1, k % 32);
            const int target = done % PARTIALS;
            if (PARTIALS > 1 && done < STEPS - 1)
                wgmma_wait<1>();
            else
                wgmma_wait<0>();
            fence_registers(partial[target]);
            if (done == STEPS - 1) release();
            promote(done / SCALES, target, boundary, x_scale_0[target] * weight_scale_0,
                    x_scale_0[target] * weight_scale_1, x_scale_1[target] * weight_scale_0,
                    x_scale_1[target] * weight_scale_1);
        }
    }

    template <typename Boundary>
    __device__ __forceinline__ void promote(int wave, int target, Boundary boundary,
                                            float scale_00, float scale_01, float scale_10,
                                            float scale_11) {
#pragma unroll
        for (int i = 0; i < ACCUMULATORS; i += 4) {
            const bool is_first = i * 2 < boundary;
            const float scale_0 = is_first ? scale_00 : scale_01;
            const float scale_1 = is_first ? scale_10 : scale_11;
            promoted[wave][i + 0] += scale_0 * partial[target][i + 0];
            promoted[wave][i + 1] += scale_0 * partial[target][i + 1];
            promoted[wave][i + 2] += scale_1 * partial[target][i + 2];
            promoted[wave][i + 3] += scale_1 * partial[target][i + 3];
        }
    }

    // `between` runs after each `STEP` blocks.
    template <int STEP, typename Boundary, typename Waves, typename Between>
    __device__ __forceinline__ void blocks(int k, Boundary boundary, Waves waves,
                                           Between between) {
        static_assert(32 % STEP == 0, "32 blocks' scales are loaded at once");
        while (k < num_k_blocks) {
            if (k >= 32 && (STEP == 32 || k % 32 < K_GROUPS)) {
                lane_scale_0 = lane_scale(scale_row_0, k - k % 32);
                lane_scale_1 = lane_scale(scale_row_1, k - k % 32);
            }
            const int end = min(num_k_blocks, k - k % STEP + STEP);
#pragma unroll UNROLL
            for (; k < end; k += K_GROUPS) block(k, boundary, waves, [](int) {});
            between();
        }
    }

    // The first column of a tile with the second of its weight scales; it may lie beyond the tile.
    static __device__ __forceinline__ auto boundary_of(int column) {
        if constexpr (SCALE_STEP == 128)
            return Constant<128>();
        else
            return 128 - column % 128;
    }

    // The boundary as a constant, where it has few values: a choice of scales in each column
    // would cost half as many instructions as the promotion itself.
    template <int STEP, int BOUNDARY = SCALE_STEP, typename Waves, typename Between>
    __device__ __forceinline__ void dispatch(int k, int boundary, Waves waves, Between between) {
        if constexpr (SCALE_STEP == 8) {
            blocks<STEP>(k, boundary, waves, between);
        } else if constexpr (BOUNDARY >= 128 || BOUNDARY >= BLOCK_N) {
            blocks<STEP>(k, Constant<BOUNDARY>(), waves, between);
        } else {
            if (boundary == BOUNDARY)
                blocks<STEP>(k, Constant<BOUNDARY>(), waves, between);
            else
                dispatch<STEP, BOUNDARY + SCALE_STEP>(k, boundary, waves, between);
        }
    }

    template <typename Waves>
    __device__ __forceinline__ void dispatch(int k, int boundary, Waves waves) {
        dispatch<32>(k, boundary, waves, [] {});
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
    __device__ __forceinline__ void store(int wave, int row, int row_end, int column) {
        const bool is_odd = lane % 2;
        const int first_column = column + lane % 4 / 2 * 4 + (is_odd ? 8 : 0);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float* sums = promoted[wave] + half * 2;
            const int out_row = row + row_in_block + wave * M_GROUPS * 64 + half * 8;
            const bool is_inside = out_row < row_end;
            unsigned short* out =
                arguments.out + static_cast<long long>(out_row) * arguments.out_stride;
#pragma unroll
            for (int i = 0; i + 1 < BLOCK_N / 8; i += 2) {
                const uint32_t left = pack_bf16(sums[4 * i], sums[4 * i + 1]);
                const uint32_t right = pack_bf16(sums[4 * i + 4], sums[4 * i + 5]);
                const uint32_t other = __shfl_xor_sync(ALL_LANES, is_odd ? left : right, 1);
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
};
