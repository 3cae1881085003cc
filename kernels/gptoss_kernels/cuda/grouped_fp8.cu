// For the rows of each expert e, expert_start[e] <= row < expert_start[e + 1]:
//
//     t = (x * x_scale) @ (weight[e] * weight_scale[e])^T + bias[e]
//
//     x [R, K] e4m3, x_scale [K / X_GROUP, R] fp32, weight [E, N, K] e4m3,
//     weight_scale [E, N / 128, K / 128] fp32, bias [E, N] fp32
//
// SWIGLU = 0: out[R, N] = t in bf16. SWIGLU = 1: columns 2 i and 2 i + 1 are gate and up, and
//
//     y = gate * sigmoid(alpha * gate) * (up + 1), gate at most limit, up within +-limit
//     out_scale[i / G, R] = max |y| / 448 over G columns, out[R, N / 2] = y / out_scale in e4m3
//
// with G = OUT_GROUP. Of 128, both blocks of a cluster have half and tell each other their maxima.
//
// One warp of each cluster hands out tiles (`Scheduler`): it alone knows how the rows lie. A tile is
// taken when the one before it begins, since tiles differ in height. Each block's producer and math
// warps get it through a mailbox in shared memory.
//
// The copy engine reads from multiples of 16 bytes: scales of x from up to 3 rows above the tile.
//
// What a tile loads beyond its expert's rows or columns is its neighbours'; it is multiplied, and
// not stored.
//
// Every launch lets the next one's blocks take its multiprocessors as they become free. That of
// SWIGLU = 0 hands out its first tiles and fetches their weights before it waits for the kernel
// before it.
//
// Defined by whoever compiles this, beside what gemm_fp8.cuh wants: SWIGLU, OUT_GROUP, X_BOX (rows
// of x that one load brings), MAXIMUM_EXPERTS, COUNTERS.

constexpr int JOB_OFFSET = FIXED_OFFSET;
constexpr int JOB_FULL_OFFSET = JOB_OFFSET + 16;
constexpr int JOB_EMPTY_OFFSET = JOB_FULL_OFFSET + 8;
constexpr int TABLE_OFFSET = JOB_EMPTY_OFFSET + 8;  // first tile of each expert, and their number
constexpr int CHUNKS = BLOCK_M / 64;
constexpr int AMAX_FULL_OFFSET = (TABLE_OFFSET + (MAXIMUM_EXPERTS + 1) * 4 + 7) / 8 * 8;
constexpr int AMAX_OFFSET = AMAX_FULL_OFFSET + 2 * CHUNKS * 8;
constexpr int AMAX_BYTES = 64 * 4;  // of one chunk of rows
static_assert(AMAX_OFFSET + 2 * CHUNKS * AMAX_BYTES <= FIXED_OFFSET + FIXED_BYTES,
              "the launch gives too little memory");
static_assert(OUT_GROUP == 64 || (OUT_GROUP == 128 && CLUSTER_N == 2),
              "a group lies in one block or in the two of a cluster");
static_assert(CLUSTER_M == 1, "experts have too few rows for two blocks along M");
static_assert(K_GROUPS == 1, "sums are not handed over here");
static_assert(!SWIGLU || BLOCK_N == 128, "a tile has 64 outputs: a group or half of one");
static_assert(X_BOX % 8 == 0 && 64 % X_BOX == 0, "a load fills whole swizzle atoms");

struct Experts {
    const int* start;
    int count;
    int counter;  // which of `counters` this launch has
    float exponent_scale;  // -alpha / ln 2
    float limit;
    float* out_scale;
    int out_scale_stride;  // from one group of columns to the next
};

// First of a cluster, then of one of its blocks: each takes its own BLOCK_N columns of the same
// rows or, of columns that are left alone, its own rows.
struct Job {
    int row, row_end;
    int column;
    int expert;  // negative: there are no more jobs

    static constexpr int ALONE = 1;  // in `column`

    __device__ __forceinline__ bool is_last() const { return expert < 0; }
    __device__ __forceinline__ bool is_alone() const { return column & ALONE; }
    __device__ __forceinline__ int chunks() const { return (row_end - row + 63) / 64; }

    __device__ __forceinline__ Job of_block() const {
        if constexpr (CLUSTER_N == 1) return *this;
        const int rank = cluster_rank();
        if (!is_alone()) return {row, row_end, column + rank * BLOCK_N, expert};
        const int middle = min(row + (chunks() + 1) / 2 * 64, row_end);
        return {rank ? middle : row, rank ? row_end : middle, column - ALONE, expert};
    }
};

// Tiles taken, and clusters that found none left; the last of those sets both to 0 again.
__device__ unsigned int counters[COUNTERS][2];

struct Mailbox {
    uint32_t phase = 0;

    // A block without a cluster writes by itself; what comes from elsewhere is counted in bytes.
    static __device__ __forceinline__ void expect(uint32_t shared) {
        if constexpr (CLUSTER > 1) barrier_expect(shared + JOB_FULL_OFFSET, sizeof(Job));
    }

    static __device__ __forceinline__ void put(uint32_t shared, const Job& job) {
        const uint32_t address = shared + JOB_OFFSET, full = shared + JOB_FULL_OFFSET;
        if constexpr (CLUSTER == 1) {
            store_shared(address, job.row, job.row_end, job.column, job.expert);
            barrier_arrive(full);
        } else {
            for (int rank = 0; rank < CLUSTER; ++rank)
                send_shared(address, full, rank, job.row, job.row_end, job.column, job.expert);
        }
    }

    // By all lanes of a math warp, or by the one thread of the producer.
    template <bool IS_PRODUCER>
    __device__ __forceinline__ Job take(uint32_t shared) {
        Job job = {};
        barrier_wait(shared + JOB_FULL_OFFSET, phase);
        phase ^= 1;
        if (IS_PRODUCER || threadIdx.x % 32 == 0)
            load_shared(shared + JOB_OFFSET, job.row, job.row_end, job.column, job.expert);
        if constexpr (IS_PRODUCER) {
            expect(shared);  // the next one
            empty(known_with(job.row, shared));
        } else {
            job.row = same_in_warp(job.row);
            job.row_end = same_in_warp(job.row_end);
            job.column = same_in_warp(job.column);
            job.expert = same_in_warp(job.expert);
            if (threadIdx.x % 32 == 0) empty(known_with(job.row, shared));
        }
        return job;
    }

    __device__ __forceinline__ void empty(uint32_t shared) const {
        if constexpr (CLUSTER == 1)
            barrier_arrive(shared + JOB_EMPTY_OFFSET);
        else
            barrier_arrive(shared + JOB_EMPTY_OFFSET, 0);
    }
};

// ---- handing out tiles -----------------------------------------------------------------------

struct Scheduler {
    const uint32_t shared;
    const Arguments& arguments;
    const Experts& experts;
    const int lane;

    __device__ __forceinline__ uint32_t table(int expert) const {
        return shared + TABLE_OFFSET + expert * 4;
    }

    // Without SwiGLU before the wait, and so past L1.
    __device__ __forceinline__ int start_of(int expert) const {
        return SWIGLU ? experts.start[expert] : __ldcg(experts.start + expert);
    }

    __device__ __forceinline__ int num_columns() const {
        return (arguments.N + BLOCK_N - 1) / BLOCK_N;
    }

    // Jobs of one expert: of whole clusters of columns, and of columns left alone, which are twice
    // as high since the two blocks of a cluster share the rows.
    __device__ __forceinline__ int num_tiles(int expert) const {
        const int rows = start_of(expert + 1) - start_of(expert);
        return (rows + BLOCK_M - 1) / BLOCK_M * (num_columns() / CLUSTER_N) +
               (rows + CLUSTER_N * BLOCK_M - 1) / (CLUSTER_N * BLOCK_M) *
                   (num_columns() % CLUSTER_N);
    }

    // The number of tiles; each lane counts those of some successive experts.
    __device__ __forceinline__ int fill_table() const {
        const int share = (experts.count + 31) / 32;
        const int first = min(lane * share, experts.count);
        const int end = min(first + share, experts.count);
        int own = 0;
        for (int expert = first; expert < end; ++expert) own += num_tiles(expert);
        int before = own;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(ALL_LANES, before, distance);
            if (lane >= distance) before += other;
        }
        const int total = __shfl_sync(ALL_LANES, before, 31);
        before -= own;
        for (int expert = first; expert < end; ++expert) {
            store_shared(table(expert), before);
            before += num_tiles(expert);
        }
        if (lane == 0) store_shared(table(experts.count), total);
        __syncwarp();
        return total;
    }

    // In bands of TILE_ROWS tiles along M, and along N inside a band: the blocks at work at one
    // time share rows and columns in L2, and the weight comes from memory once.
    __device__ __forceinline__ Job job(int index) const {
        int expert = 0;
        for (int end = experts.count; end - expert > 1;) {
            const int middle = (expert + end) / 2;
            if (load_shared_int(table(middle)) <= index)
                expert = middle;
            else
                end = middle;
        }
        const int start = start_of(expert);
        const int end = start_of(expert + 1);
        const int num_clusters = num_columns() / CLUSTER_N;
        const int num_m = (end - start + BLOCK_M - 1) / BLOCK_M;
        int inside = index - load_shared_int(table(expert));
        if (inside >= num_m * num_clusters) {
            const int row = start + (inside - num_m * num_clusters) * CLUSTER_N * BLOCK_M;
            return {row, min(row + CLUSTER_N * BLOCK_M, end),
                    num_clusters * CLUSTER_N * BLOCK_N + Job::ALONE, expert};
        }
        const int band = inside / (TILE_ROWS * num_clusters);
        inside -= band * TILE_ROWS * num_clusters;
        const int rows = min(TILE_ROWS, num_m - band * TILE_ROWS);
        const int column = inside / rows;
        const int row = start + (band * TILE_ROWS + inside - column * rows) * BLOCK_M;
        return {row, min(row + BLOCK_M, end), column * CLUSTER_N * BLOCK_N, expert};
    }

    __device__ __forceinline__ void run() const {
        if constexpr (SWIGLU) wait_for_previous_kernels();
        const int total = fill_table();
        if (lane != 0) return;
        const int num_clusters = gridDim.x / CLUSTER;
        unsigned int* counter = counters[experts.counter];
        int index = blockIdx.x / CLUSTER;
        for (uint32_t phase = 0;; phase ^= 1) {
            const Job next = index < total ? job(index) : Job{0, 0, 0, -1};
            Mailbox::put(shared, next);
            // Until here this launch's last replay may be using the counter.
            if constexpr (!SWIGLU) wait_for_previous_kernels();
            if (index >= total) break;
            barrier_wait(shared + JOB_EMPTY_OFFSET, phase);
            index = num_clusters + atomicAdd(counter, 1);
        }
        if (atomicAdd(counter + 1, 1) == num_clusters - 1) counter[0] = counter[1] = 0;
    }
};

// ---- loading ---------------------------------------------------------------------------------

__device__ __forceinline__ void load(bool is_shared, uint32_t destination, const TensorMap* map,
                                     uint32_t full, int inner, int outer) {
    if (is_shared)
        load<true>(destination, map, full, inner, outer);
    else
        load<false>(destination, map, full, inner, outer);
}

// What one slot of the ring gets, however many loads bring it.
__device__ __forceinline__ int slot_bytes(const Job& job) {
    return WEIGHT_BYTES + (job.row_end - job.row + X_BOX - 1) / X_BOX * X_BOX * BLOCK_K +
           job.chunks() * SCALES * SCALE_ROWS * 4;
}

__device__ __forceinline__ void load_weight(uint32_t shared, const TensorMap* weight_map,
                                            const Arguments& arguments, const Job& job, int slot,
                                            int k) {
    const uint32_t full = shared + FULL_OFFSET + slot * 8;
    barrier_expect(full, slot_bytes(job));
    load_box(shared + WEIGHT_OFFSET + slot * WEIGHT_BYTES, weight_map, full, k * BLOCK_K,
             job.expert * arguments.N + job.column);
}

__device__ __forceinline__ void produce(uint32_t shared, const TensorMap* x_map,
                                        const TensorMap* x_scale_map, const TensorMap* weight_map,
                                        const Arguments& arguments) {
    const int num_k_blocks = (arguments.K + BLOCK_K - 1) / BLOCK_K;
    const int rank = CLUSTER > 1 ? cluster_rank() : 0;
    Ring ring;
    Mailbox mailbox;
    Job all = mailbox.take<true>(shared);
    int num_early = SWIGLU || all.is_last() ? 0 : min(STAGES, num_k_blocks);
    for (int k = 0; k < num_early; ++k)
        load_weight(shared, weight_map, arguments, all.of_block(), k, k);
    wait_for_previous_kernels();
    allow_next_kernel();
    for (; !all.is_last(); all = mailbox.take<true>(shared), num_early = 0) {
        const Job job = all.of_block();
        const bool is_shared = CLUSTER_N != 1 && !all.is_alone();
        const int num_rows = job.row_end - job.row;
        for (int k = 0; k < num_k_blocks; ++k, ring.advance(1)) {
            const uint32_t full = shared + FULL_OFFSET + ring.slot * 8;
            const uint32_t x = shared + X_OFFSET + ring.slot * X_BYTES;
            const uint32_t x_scale = shared + X_SCALE_OFFSET + ring.slot * X_SCALE_BYTES;
            if (k >= num_early) {
                barrier_wait(shared + EMPTY_OFFSET + ring.slot * 8, ring.phase ^ 1);
                load_weight(shared, weight_map, arguments, job, ring.slot, k);
            }
            // Blocks of a cluster take turns at the rows that they share.
            for (int row = is_shared ? rank * 64 : 0; row < num_rows;
                 row += is_shared ? CLUSTER_N * 64 : 64) {
                const int end = min(row + 64, num_rows);
                for (int box = row; box < end; box += X_BOX)
                    load(is_shared, x + box * BLOCK_K, x_map, full, k * BLOCK_K, job.row + box);
                load(is_shared, x_scale + row / 64 * SCALE_BYTES, x_scale_map, full,
                     job.row / 4 * 4 + row, k * SCALES);
            }
        }
    }
}

// ---- multiplying -----------------------------------------------------------------------------

struct GroupedMath : Math {
    const Experts& experts;
    Mailbox mailbox;
    int num_exchanges[WAVES] = {};

    __device__ __forceinline__ GroupedMath(uint32_t shared, const Arguments& arguments,
                                           const Experts& experts, int group)
        : Math(shared, arguments, group), experts(experts) {}

    __device__ __forceinline__ Job take() { return mailbox.take<false>(shared).of_block(); }

    // How many of this warpgroup's waves have something to store.
    __device__ __forceinline__ int waves_of(const Job& job) const {
        return (job.chunks() - m_group + M_GROUPS - 1) / M_GROUPS;
    }

    // Whether this block has whole groups: of 64, or of columns that are left alone.
    __device__ __forceinline__ bool has_whole_groups(const Job& job) const {
        if constexpr (OUT_GROUP == 64) return true;
        const int num_columns = (arguments.N + BLOCK_N - 1) / BLOCK_N;
        return num_columns % CLUSTER_N != 0 && job.column / BLOCK_N == num_columns - 1;
    }

    // Of two rows, 8 apart: with what the other block found in its columns. Two buffers in turn:
    // the other block can be one tile ahead of a warp here, and not two.
    __device__ __forceinline__ void exchange(int wave, float (&amax)[2]) {
        const int turn = num_exchanges[wave]++;
        const int buffer = turn % 2 * CHUNKS + m_group + wave * M_GROUPS;
        const uint32_t full = shared + AMAX_FULL_OFFSET + buffer * 8;
        const uint32_t address =
            shared + AMAX_OFFSET + buffer * AMAX_BYTES + row_in_block % 64 * 4;
        if (lane % 4 == 0) {
            send_shared(address, full, cluster_rank() ^ 1, amax[0]);
            send_shared(address + 8 * 4, full, cluster_rank() ^ 1, amax[1]);
        }
        barrier_wait(full, turn / 2 % 2);
        amax[0] = max_nan(amax[0], load_shared(address));
        amax[1] = max_nan(amax[1], load_shared(address + 8 * 4));
        if (threadIdx.x % 128 == 0) barrier_expect(full, AMAX_BYTES);  // the one after the next
    }

    // The lanes of a quad hold a row's gate and up of output 4 i + lane % 4 in promoted 4 i and
    // 4 i + 1, of the row 8 below in the next two.
    __device__ __forceinline__ void store_swiglu(int wave, const Job& job) {
        const int quad_lane = lane % 4;
        const int num_outputs = (arguments.N - job.column) / 2;  // fewer than 64 in the last tile
        float y[2][16];
        float amax[2] = {};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float gate = min_nan(promoted[wave][4 * i + 2 * half], experts.limit);
                const float up =
                    max_nan(min_nan(promoted[wave][4 * i + 2 * half + 1], experts.limit),
                            -experts.limit);
                const float swish = gate * logistic2(experts.exponent_scale * gate);
                y[half][i] = swish * up + swish;
                if (i / 4 * 16 < num_outputs)  // a multiple of 16
                    amax[half] = max_nan(amax[half], fabsf(y[half][i]));
            }
            amax[half] = max_nan(amax[half], __shfl_xor_sync(ALL_LANES, amax[half], 1));
            amax[half] = max_nan(amax[half], __shfl_xor_sync(ALL_LANES, amax[half], 2));
        }
        const bool is_whole = has_whole_groups(job);
        if (!is_whole) exchange(wave, amax);
        const bool has_scale = is_whole || cluster_rank() == 0;

#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float at_least = max_nan(amax[half], 1e-10f);
            const float inverse = quotient_of_448(at_least);
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[i] = pack_e4m3(y[half][4 * i] * inverse, y[half][4 * i + 1] * inverse,
                                     y[half][4 * i + 2] * inverse, y[half][4 * i + 3] * inverse);
            transpose_bytes_in_quad(words, quad_lane);

            const int row = job.row + row_in_block + wave * M_GROUPS * 64 + half * 8;
            if (row < job.row_end) {
                unsigned char* out = reinterpret_cast<unsigned char*>(arguments.out) +
                                     static_cast<long long>(row) * arguments.out_stride;
                if (16 * quad_lane < num_outputs)
                    store_global(out + job.column / 2 + quad_lane * 16, words);
                if (quad_lane == 0 && has_scale) {
                    const long long group = job.column / 2 / OUT_GROUP;
                    experts.out_scale[group * experts.out_scale_stride + row] =
                        at_least * (1.f / 448.f);
                }
            }
        }
    }

    __device__ __forceinline__ void finish(int wave, const Job& job) {
        if (wave >= waves_of(job)) return;
        if constexpr (SWIGLU)
            store_swiglu(wave, job);
        else
            store(wave, job.row, job.row_end, job.column);
    }

    __device__ __forceinline__ void run() {
        Job next = take();
        if (next.is_last()) return;
        Job job = next;
        prefetch(next.column, next.expert);
        for (int tile = 0; !next.is_last(); ++tile) {
            const auto boundary = boundary_of(next.column);
            const int waves = waves_of(next);
            first_scale = next.row % 4;
            // All waves, also those without rows: what they have left is stored meanwhile.
            block(0, boundary, Constant<WAVES>(), [&](int wave) {
                if (tile != 0) finish(wave, job);
                start(wave);
                if (wave == WAVES - 1) {
                    job = next;
                    next = take();
                    if (!next.is_last()) prefetch(next.column, next.expert);
                }
            });
            // As a constant where it can be: a choice in each block of K costs 5 % of the cycles.
            if (waves == WAVES)
                dispatch(1, boundary, Constant<WAVES>());
            else
                dispatch(1, boundary, waves);
            if (next.is_last()) {
#pragma unroll
                for (int wave = 0; wave < WAVES; ++wave) finish(wave, job);
            }
        }
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    grouped_fp8(const __grid_constant__ TensorMap x_map,
                const __grid_constant__ TensorMap x_scale_map,
                const __grid_constant__ TensorMap weight_map,
                const __grid_constant__ Arguments arguments,
                const __grid_constant__ Experts experts) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const int group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0);

    if (threadIdx.x == MATH_THREADS) {
        prefetch_map(&x_map);
        prefetch_map(&x_scale_map);
        prefetch_map(&weight_map);
        init_ring(shared);
        barrier_init(shared + JOB_FULL_OFFSET, 1);
        barrier_init(shared + JOB_EMPTY_OFFSET, CLUSTER * (MATH_GROUPS * 4 + 1));
        if constexpr (OUT_GROUP == 128)
            for (int i = 0; i < 2 * CHUNKS; ++i)
                barrier_init(shared + AMAX_FULL_OFFSET + i * 8, 1);
        barrier_init_fence();
        Mailbox::expect(shared);
        if constexpr (OUT_GROUP == 128)
            for (int i = 0; i < 2 * CHUNKS; ++i)
                barrier_expect(shared + AMAX_FULL_OFFSET + i * 8, AMAX_BYTES);
    }
    CLUSTER > 1 ? cluster_sync() : __syncthreads();

    if (group == MATH_GROUPS) {
        give_registers<PRODUCER_REGISTERS>();
        const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0) - MATH_THREADS / 32;
        if (threadIdx.x == MATH_THREADS)
            produce(shared, &x_map, &x_scale_map, &weight_map, arguments);
        else if (warp == 1 && (CLUSTER == 1 || cluster_rank() == 0))
            Scheduler{shared, arguments, experts, static_cast<int>(threadIdx.x % 32)}.run();
    } else {
        take_registers<MATH_REGISTERS>();
        GroupedMath(shared, arguments, experts, group).run();
    }
    // A block must not end while another one still writes to it or arrives at its barriers.
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_sync();
    }
}
