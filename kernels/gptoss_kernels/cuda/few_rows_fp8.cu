// What grouped_fp8.cu computes, for so few rows that reading the weights is all that takes time.
//
//     t = (x * x_scale) @ (weight[e] * weight_scale[e])^T + bias[e]     SWIGLU = 0: out = t in bf16
//     SWIGLU = 1: out, out_scale = quantise(swiglu(t)) over OUT_GROUP columns
//
// An entry is an expert with up to 8 of its rows. The rows of weight of all entries, in units of 8,
// are cut into as many equal ranges as there are blocks. A block streams its range, which is
// contiguous in memory, through shared memory, 16 rows at a time. WARPS warps share K: each
// multiplies its CHUNKS * 64 columns, as halves, which hold e4m3 values and their products exactly,
// with sums in fp32. One more warp adds these up, stores, and sends for the next rows.
//
// A group of SwiGLU's outputs lies in several blocks: they leave y in `scratch`, and the last of
// them to come quantises it.
//
// As in grouped_fp8.cu the product without SwiGLU finds its entries and sends for its first weights
// before it waits for the kernel before it.
//
// Defined by whoever compiles this: SWIGLU, OUT_GROUP, X_GROUP, K, WARPS, STAGES, SHARED_BYTES,
// MAXIMUM_ROWS, MAXIMUM_VALUES, MAXIMUM_GROUPS.

constexpr int TOKENS = 8;
constexpr int UNIT = 8;       // rows of weight
constexpr int TILE_UNITS = 2;  // as many rows as the instruction multiplies
constexpr int BLOCK_UNITS = 128 / UNIT;
constexpr int CHUNK = 64;  // of K: 16 bytes from each of a row's four lanes
constexpr int NUM_CHUNKS = (K + CHUNK - 1) / CHUNK;
constexpr int CHUNKS = (NUM_CHUNKS + WARPS - 1) / WARPS;
constexpr int K_BLOCKS = (K + 127) / 128;
constexpr int THREADS = (WARPS + 1) * 32;

constexpr int STAGE_BYTES = TILE_UNITS * UNIT * K;
constexpr int TOKEN_PITCH = 20;  // floats: the lanes of a store reach different banks
constexpr int PARTIAL_BYTES = TOKENS * TOKEN_PITCH * 4;
constexpr int PARTIALS_OFFSET = STAGES * STAGE_BYTES;
constexpr int FULL_OFFSET = PARTIALS_OFFSET + STAGES * WARPS * PARTIAL_BYTES;
constexpr int SUMMED_OFFSET = FULL_OFFSET + STAGES * 8;
constexpr int ENTRIES_OFFSET = SUMMED_OFFSET + STAGES * 8;
constexpr int COUNT_OFFSET = ENTRIES_OFFSET + MAXIMUM_ROWS * 16;
static_assert(COUNT_OFFSET + 16 <= SHARED_BYTES, "the launch gives too little memory");
static_assert(OUT_GROUP == 64 || OUT_GROUP == 128, "a lane quantises 4 of up to 128 values");

struct Arguments {
    const unsigned char* x;
    const float* x_scale;
    const int* expert_start;
    const unsigned char* weight;
    const float* weight_scale;
    const float* bias;
    void* out;
    float* out_scale;
    int num_experts;
    int N;
    int x_stride;
    int x_scale_stride;
    int out_stride;
    int out_scale_stride;
    float exponent_scale;  // -alpha / ln 2
    float limit;
};

// y of groups that lie in several blocks, and how many of these have come; the last sets it to 0.
// One for all launches on a GPU: on a stream each waits for those before it before it writes here.
// Not so on two streams at once, which few_rows_fp8.py therefore forbids.
__device__ __align__(16) float scratch[SWIGLU ? MAXIMUM_VALUES : 1];  // read by fours
__device__ unsigned int arrived[SWIGLU ? MAXIMUM_GROUPS : 1];

// ---- an instruction that no other kernel has -------------------------------------------------

__device__ __forceinline__ void prefetch_line(const void* source) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(source) : "memory");
}

// ---- who does what ----------------------------------------------------------------------------

struct Entry {
    int expert;
    int row, count;  // of x
};

__device__ __forceinline__ Entry entry_of(uint32_t shared, int index) {
    Entry entry;
    int unused;
    load_shared(shared + ENTRIES_OFFSET + index * 16, entry.expert, entry.row, entry.count, unused);
    return entry;
}

// Of the block of 128 rows of weight that has `row`: one for each 128 of K.
__device__ __forceinline__ const float* scales_of(const Arguments& arguments, int expert, int row) {
    const long long block =
        static_cast<long long>(expert) * ((arguments.N + 127) / 128) + row / 128;
    return arguments.weight_scale + block * K_BLOCKS;
}

// By one warp: fills the table of entries and gives their number.
__device__ __forceinline__ int find_entries(uint32_t shared, const Arguments& arguments, int lane) {
    constexpr int WIDTH = 4;  // loads under way at once
    int found = 0;
    for (int base = 0; base < arguments.num_experts; base += WIDTH * 32) {
        int first[WIDTH], rows[WIDTH];
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const int expert = base + i * 32 + lane;
            const bool exists = expert < arguments.num_experts;
            first[i] = exists ? load_fresh(arguments.expert_start + expert) : 0;
            rows[i] = exists ? load_fresh(arguments.expert_start + expert + 1) - first[i] : 0;
        }
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            for (int row = 0;; row += TOKENS) {
                const uint32_t those = __ballot_sync(ALL_LANES, rows[i] > row);
                if (those == 0) break;
                const int place = found + __popc(those & ((1u << lane) - 1));
                if (rows[i] > row)
                    store_shared(shared + ENTRIES_OFFSET + place * 16, base + i * 32 + lane,
                                 first[i] + row, min(rows[i] - row, TOKENS), 0);
                found += __popc(those);
            }
        }
    }
    if (lane == 0) store_shared(shared + COUNT_OFFSET, found);
    __syncwarp();
    return found;
}

// How all units are cut into ranges, one for each block.
struct Cut {
    int units;  // of one entry
    int blocks, share, longer;  // the first `longer` blocks have one more than `share`

    __device__ __forceinline__ Cut(int num_entries, int N) : units(N / UNIT) {
        const int total = num_entries * units;
        blocks = min(static_cast<int>(gridDim.x), total);
        share = total / max(blocks, 1);
        longer = total - share * blocks;
    }

    __device__ __forceinline__ int first_of(int block) const {
        block = min(block, blocks);
        return block * share + min(block, longer);
    }
    __device__ __forceinline__ int block_of(int unit) const {
        const int before = longer * (share + 1);
        return unit < before ? unit / (share + 1) : longer + (unit - before) / share;
    }
};

// A block's range, tile after tile. A tile lies in one entry and in one block of 128 rows.
struct Walk {
    int units;
    int left;
    int entry, inside;  // units of the entry before this tile

    __device__ __forceinline__ Walk(const Cut& cut) : units(cut.units) {
        inside = cut.first_of(blockIdx.x);
        left = cut.first_of(blockIdx.x + 1) - inside;
        for (entry = 0; inside >= units; ++entry) inside -= units;
    }

    __device__ __forceinline__ bool is_done() const { return left <= 0; }
    __device__ __forceinline__ int row() const { return inside * UNIT; }
    __device__ __forceinline__ int num_units() const {
        return min(min(TILE_UNITS, left), min(units - inside, BLOCK_UNITS - inside % BLOCK_UNITS));
    }
    __device__ __forceinline__ int rows() const { return num_units() * UNIT; }
    __device__ __forceinline__ void next() {
        const int done = num_units();
        left -= done;
        inside += done;
        if (inside == units) {
            inside = 0;
            ++entry;
        }
    }
};

struct Ring {
    int slot = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == STAGES) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// ---- the warp that loads and stores -----------------------------------------------------------

struct Keeper {
    const uint32_t shared;
    const Arguments& arguments;
    const int lane;

    __device__ __forceinline__ int expert_of(const Walk& walk) const {
        return entry_of(shared, walk.entry).expert;
    }

    __device__ __forceinline__ const unsigned char* weight_of(const Walk& walk) const {
        const long long row = static_cast<long long>(expert_of(walk)) * arguments.N + walk.row();
        return arguments.weight + row * K;
    }

    __device__ __forceinline__ void send_for(const Walk& walk, int slot) const {
        if (lane == 0) {
            const int bytes = walk.rows() * K;
            const uint32_t full = shared + FULL_OFFSET + slot * 8;
            barrier_expect(full, bytes);
            load_bytes_once(shared + slot * STAGE_BYTES, weight_of(walk), bytes, full);
        } else if (lane < 3) {
            // Both ends of the scales, so that no warp waits for memory when it gets there.
            prefetch_line(scales_of(arguments, expert_of(walk), walk.row()) +
                          (lane - 1) * (K_BLOCKS - 1));
        }
    }

    // Lane 4 t + i: of row t of x, columns 4 i to 4 i + 3 of the tile.
    __device__ __forceinline__ float4 add_up(int slot, float4 sum) const {
        const uint32_t address = shared + PARTIALS_OFFSET + slot * WARPS * PARTIAL_BYTES +
                                 lane / 4 * TOKEN_PITCH * 4 + lane % 4 * 16;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            const float4 part = load_float4(address + warp * PARTIAL_BYTES);
            sum.x += part.x;
            sum.y += part.y;
            sum.z += part.z;
            sum.w += part.w;
        }
        return sum;
    }

    __device__ __forceinline__ float swiglu(float gate, float up) const {
        gate = min_nan(gate, arguments.limit);
        up = max_nan(min_nan(up, arguments.limit), -arguments.limit);
        const float swish = gate * logistic2(arguments.exponent_scale * gate);
        return swish * up + swish;
    }

    __device__ __forceinline__ float* y_of(int row) const {
        return scratch + row * (arguments.N / 2);
    }

    __device__ __forceinline__ void quantise(const Entry& entry, int group) const {
        const int column = group * OUT_GROUP + lane * 4;
        const bool has_values = lane < OUT_GROUP / 4 && column < arguments.N / 2;
        for (int row = entry.row; row < entry.row + entry.count; ++row) {
            float4 y = {};
            if (has_values) y = load_fresh(y_of(row) + column);
            float amax = max_nan(max_nan(fabsf(y.x), fabsf(y.y)), max_nan(fabsf(y.z), fabsf(y.w)));
#pragma unroll
            for (int distance = 16; distance > 0; distance /= 2)
                amax = max_nan(amax, __shfl_xor_sync(ALL_LANES, amax, distance));
            const float at_least = max_nan(amax, 1e-10f);
            const float inverse = 448.f / at_least;
            unsigned char* out = static_cast<unsigned char*>(arguments.out) +
                                 static_cast<long long>(row) * arguments.out_stride + column;
            if (has_values)
                *reinterpret_cast<uint32_t*>(out) =
                    pack_e4m3(y.x * inverse, y.y * inverse, y.z * inverse, y.w * inverse);
            if (lane == 0)
                arguments.out_scale[static_cast<long long>(group) * arguments.out_scale_stride +
                                    row] = at_least * (1.f / 448.f);
        }
    }

    // After this block's last tile of a group: whoever comes last finds all of y.
    __device__ __forceinline__ void finish_group(const Cut& cut, int index, const Entry& entry,
                                                 int group) const {
        constexpr int GROUP_UNITS = 2 * OUT_GROUP / UNIT;
        const int first = index * cut.units + group * GROUP_UNITS;
        const int last = min(first + GROUP_UNITS, (index + 1) * cut.units) - 1;
        const int num_blocks = cut.block_of(last) - cut.block_of(first) + 1;
        const int num_groups = (arguments.N / 2 + OUT_GROUP - 1) / OUT_GROUP;
        unsigned int* counter = &arrived[index * num_groups + group];
        __syncwarp();
        __threadfence();  // behind the warp's barrier: for what all of its lanes wrote
        int is_last = 0;
        if (lane == 0) {
            is_last = atomicAdd(counter, 1) == num_blocks - 1;
            if (is_last) *counter = 0;
        }
        if (!__shfl_sync(ALL_LANES, is_last, 0)) return;
        __threadfence();
        __syncwarp();
        quantise(entry, group);
    }

    __device__ __forceinline__ void finish(const Cut& cut, const Walk& walk, const Walk& after,
                                           float4 t) const {
        const int index = walk.entry;
        const Entry entry = entry_of(shared, index);
        const int token = lane / 4, column = walk.row() + lane % 4 * 4;
        const bool is_mine = token < entry.count && lane % 4 * 4 < walk.rows();
        if constexpr (SWIGLU) {
            const int group = walk.row() / (2 * OUT_GROUP);
            if (is_mine)
                *reinterpret_cast<float2*>(y_of(entry.row + token) + column / 2) =
                    make_float2(swiglu(t.x, t.y), swiglu(t.z, t.w));
            if (after.is_done() || after.entry != index || after.row() / (2 * OUT_GROUP) != group)
                finish_group(cut, index, entry, group);
        } else if (is_mine) {
            store_global(static_cast<unsigned short*>(arguments.out) +
                             static_cast<long long>(entry.row + token) * arguments.out_stride +
                             column,
                         pack_bf16(t.x, t.y), pack_bf16(t.z, t.w));
        }
    }

    __device__ __forceinline__ float4 bias_of(const Walk& walk) const {
        if (lane % 4 * 4 >= walk.rows()) return {};
        const long long row = static_cast<long long>(expert_of(walk)) * arguments.N + walk.row();
        const float* bias = arguments.bias + row + lane % 4 * 4;  // wherever it starts
        return make_float4(bias[0], bias[1], bias[2], bias[3]);
    }

    __device__ __forceinline__ void run() const {
        if constexpr (SWIGLU) wait_for_previous_kernels();
        const Cut cut(find_entries(shared, arguments, lane), arguments.N);
        Walk walk(cut), ahead = walk;
        for (int slot = 0; slot < STAGES && !ahead.is_done(); ++slot, ahead.next())
            send_for(ahead, slot);
        __syncthreads();
        if constexpr (!SWIGLU) wait_for_previous_kernels();
        allow_next_kernel();
        for (Ring ring; !walk.is_done(); ring.advance()) {
            const float4 bias = bias_of(walk);
            barrier_wait(shared + SUMMED_OFFSET + ring.slot * 8, ring.phase);
            const float4 t = add_up(ring.slot, bias);
            __syncwarp();  // all have read the sums
            if (!ahead.is_done()) {
                send_for(ahead, ring.slot);
                ahead.next();
            }
            Walk after = walk;
            after.next();
            finish(cut, walk, after, t);
            walk = after;
        }
    }
};

// ---- the warps that multiply ------------------------------------------------------------------

struct Multiplier {
    const uint32_t shared;
    const Arguments& arguments;
    const int lane;
    const int first_chunk;
    uint4 x[CHUNKS];         // 16 values of row lane / 4 of the entry
    float scale[CHUNKS][2];  // of rows lane % 4 * 2 and the next: x_scale * weight_scale

    // Also where all do, a branch: without it the compiler loads all chunks first, and spills.
    __device__ __forceinline__ bool exists(int chunk) const {
        return first_chunk + chunk < NUM_CHUNKS;
    }
    __device__ __forceinline__ int column_of(int chunk) const {
        return (first_chunk + chunk) * CHUNK + lane % 4 * 16;
    }

    __device__ __forceinline__ void load_x(const Entry& entry) {
        const bool is_row = lane / 4 < entry.count;
        const unsigned char* row =
            arguments.x + static_cast<long long>(entry.row + lane / 4) * arguments.x_stride;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            x[chunk] = {};
            if (is_row && column_of(chunk) < K)
                x[chunk] = *reinterpret_cast<const uint4*>(row + column_of(chunk));
        }
    }

    __device__ __forceinline__ void load_scales(const Entry& entry, int row) {
        const float* of_weight = scales_of(arguments, entry.expert, row);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const int column = (first_chunk + chunk) * CHUNK;
            const float weight = exists(chunk) ? of_weight[column / 128] : 0;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int token = lane % 4 * 2 + i;
                scale[chunk][i] = 0;
                if (exists(chunk) && token < entry.count)
                    scale[chunk][i] =
                        weight * arguments.x_scale[static_cast<long long>(column / X_GROUP) *
                                                       arguments.x_scale_stride +
                                                   entry.row + token];
            }
        }
    }

    __device__ __forceinline__ uint4 weight_of(uint32_t stage, int row, int chunk) const {
        uint4 v;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(stage + row * K + column_of(chunk))
                     : "memory");
        // Beyond the row lies another one, or nothing yet: a NaN there would survive a zero in x.
        if (K % CHUNK != 0 && column_of(chunk) >= K) v = {};
        return v;
    }

    __device__ __forceinline__ void multiply_chunk(float (&sums)[4], uint32_t stage,
                                                   int chunk) const {
        const uint4 upper = weight_of(stage, lane / 4, chunk);
        const uint4 lower = weight_of(stage, lane / 4 + 8, chunk);
        const uint32_t rows[3][4] = {{upper.x, upper.y, upper.z, upper.w},
                                     {lower.x, lower.y, lower.z, lower.w},
                                     {x[chunk].x, x[chunk].y, x[chunk].z, x[chunk].w}};
        float products[4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Which of K a lane has does not matter where both matrices have the same.
            uint32_t a[4], b[2];
            to_halves(rows[0][i], a[0], a[2]);
            to_halves(rows[1][i], a[1], a[3]);
            to_halves(rows[2][i], b[0], b[1]);
            multiply_f16(products, a, b);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] += products[i] * scale[chunk][i % 2];
    }

    __device__ __forceinline__ void run() {
        __syncthreads();  // the entries are known
        wait_for_previous_kernels();
        Walk walk(Cut(load_shared_int(shared + COUNT_OFFSET), arguments.N));
        int index = -1, block = -1;
        Entry entry = {};
        for (Ring ring; !walk.is_done(); ring.advance(), walk.next()) {
            if (walk.entry != index) {
                index = walk.entry;
                block = -1;
                entry = entry_of(shared, index);
                load_x(entry);
            }
            if (walk.row() / 128 != block) {
                block = walk.row() / 128;
                load_scales(entry, walk.row());
            }
            barrier_wait(shared + FULL_OFFSET + ring.slot * 8, ring.phase);
            float sums[4] = {};
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk)
                if (exists(chunk)) multiply_chunk(sums, shared + ring.slot * STAGE_BYTES, chunk);
            const uint32_t partial = shared + PARTIALS_OFFSET +
                                     (ring.slot * WARPS + first_chunk / CHUNKS) * PARTIAL_BYTES +
                                     (lane % 4 * 2 * TOKEN_PITCH + lane / 4) * 4;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                store_shared(partial + i * TOKEN_PITCH * 4, sums[i]);
                store_shared(partial + i * TOKEN_PITCH * 4 + 32, sums[i + 2]);
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(shared + SUMMED_OFFSET + ring.slot * 8);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    few_rows_fp8(const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(128) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0);
    const int lane = threadIdx.x % 32;
    if (warp == WARPS) {
        if (lane == 0) {
            for (int slot = 0; slot < STAGES; ++slot) {
                barrier_init(shared + FULL_OFFSET + slot * 8, 1);
                barrier_init(shared + SUMMED_OFFSET + slot * 8, WARPS);
            }
            barrier_init_fence();
        }
        __syncwarp();
        Keeper{shared, arguments, lane}.run();
    } else {
        Multiplier multiplier{shared, arguments, lane, warp * CHUNKS};
        multiplier.run();
    }
}
