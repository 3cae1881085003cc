// The experts of so few tokens that reading their weights is all that takes time: what dispatch_fp8,
// grouped_swiglu_fp8 and grouped_linear_fp8 compute one after the other, in one launch.
//
//     t = quantise(x) @ w13[e]^T + b13[e];  y = swiglu(t)     of each token for each of its experts
//     out = quantise(y) @ w2[e]^T + b2[e]
//
// An entry is an expert that any token chose. Of each product the rows of weight of all entries, in
// units of 8, are cut into as many equal ranges as there are blocks. A block streams its range of the
// first product, then of the second, through one ring of slots in shared memory, 16 rows at a time
// with their biases: so weights of the second product are under way while the first one ends.
// WARPS warps share K: each multiplies its GROUPS groups of 128 columns with all tokens, as halves,
// which hold e4m3 values and their products exactly, with sums in fp32. One more warp adds these up,
// stores, and sends for the next rows.
//
// y goes through memory, in fp32, and all blocks meet between the products. So all must be at work
// at once: the launch is a cooperative one. Each warp quantises what it multiplies, as quantise.cu
// does. With PRODUCTS 1 or 2 a launch does one of the products: then nobody waits for anybody.
//
// Defined by whoever compiles this: HIDDEN, INNER, CHOSEN, PRODUCTS (1, 2, or 3 for both), WARPS,
// STAGES, SHARED_BYTES, MAXIMUM_CHOICES, COUNTERS.

constexpr int TOKENS = 8;  // columns of the instruction
constexpr int UNIT = 8;    // rows of weight
constexpr int TILE_UNITS = 2;  // as many rows as the instruction multiplies
constexpr int BLOCK = 128;     // rows and columns of weight that share a scale
constexpr int BLOCK_UNITS = BLOCK / UNIT;
constexpr int CHUNK = 64;  // of K: 16 bytes from each of a row's four lanes
constexpr int CHUNKS = BLOCK / CHUNK;
constexpr int THREADS = (WARPS + 1) * 32;
constexpr int FIRST = 1, SECOND = 2;  // products
constexpr bool HAS_FIRST = PRODUCTS & FIRST, HAS_SECOND = PRODUCTS & SECOND;
static_assert(MAXIMUM_CHOICES <= 32, "a lane has one");

__device__ constexpr int columns_of(int product) { return product == FIRST ? HIDDEN : INNER; }
__device__ constexpr int rows_of(int product) { return product == FIRST ? 2 * INNER : HIDDEN; }
__device__ constexpr int k_blocks_of(int product) { return (columns_of(product) + BLOCK - 1) / BLOCK; }
__device__ constexpr int n_blocks_of(int product) { return (rows_of(product) + BLOCK - 1) / BLOCK; }

constexpr int MOST_COLUMNS = HIDDEN > INNER ? HIDDEN : INNER;
constexpr int STAGE_BYTES = TILE_UNITS * UNIT * MOST_COLUMNS;
constexpr int BIAS_BYTES = TILE_UNITS * UNIT * 4;
constexpr int TOKEN_PITCH = 20;  // floats: the lanes of a store reach different banks
constexpr int PARTIAL_BYTES = TOKENS * TOKEN_PITCH * 4;
constexpr int BIAS_OFFSET = STAGES * STAGE_BYTES;
constexpr int PARTIALS_OFFSET = BIAS_OFFSET + STAGES * BIAS_BYTES;
constexpr int FULL_OFFSET = PARTIALS_OFFSET + STAGES * WARPS * PARTIAL_BYTES;
constexpr int SUMMED_OFFSET = FULL_OFFSET + STAGES * 8;
constexpr int MET_OFFSET = SUMMED_OFFSET + STAGES * 8;
constexpr int COUNT_OFFSET = MET_OFFSET + 8;
constexpr int ENTRIES_OFFSET = COUNT_OFFSET + 8;
static_assert(ENTRIES_OFFSET + MAXIMUM_CHOICES * 16 <= SHARED_BYTES,
              "the launch gives too little memory");

struct Weight {
    const unsigned char* values;
    const float* scale;
    const float* bias;
};

struct Arguments {
    const unsigned short* x;
    const long long* chosen;  // a choice is one of its num_tokens * CHOSEN entries
    Weight weights[2];        // of the products
    float* y;                 // a row for each choice, filled for a token's first one of an expert
    unsigned short* out;      // a row for each choice
    int num_tokens;
    int num_experts;
    long long x_stride;
    float exponent_scale;  // -alpha / ln 2
    float limit;
    int counter;
};

// How many blocks have met: one for each launch, as the next of the same kind may already begin.
__device__ unsigned int counters[HAS_FIRST && HAS_SECOND ? COUNTERS : 1];

// ---- instructions that no other kernel has ----------------------------------------------------

__device__ __forceinline__ void prefetch_line(const void* source) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(source) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const unsigned int* pointer) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}

// Until all blocks are here, if this one `waits`. What this thread knows to be written before, all
// threads that come behind it see. The counter's upper bit changes when the last block has come,
// and only then; the lower ones are zeros again.
__device__ __forceinline__ void meet_all_blocks(unsigned int* counter, bool waits) {
    constexpr uint32_t TURN = 0x80000000;
    global_fence();
    const uint32_t before = atomicAdd(counter, blockIdx.x == 0 ? TURN - (gridDim.x - 1) : 1u);
    while (waits && ((load_acquire(counter) ^ before) & TURN) == 0) continue;
}

// ---- who does what ----------------------------------------------------------------------------

struct Entry {
    int expert;
    uint32_t choices;  // a bit for each

    // Of a token, numbered from 0.
    __device__ __forceinline__ uint32_t choices_of(int token, int num_tokens) const {
        if (token >= num_tokens) return 0;
        return choices >> token * CHOSEN & ((1u << CHOSEN) - 1);
    }
};

__device__ __forceinline__ Entry entry_of(uint32_t shared, int index) {
    int expert, choices, unused[2];
    load_shared(shared + ENTRIES_OFFSET + index * 16, expert, choices, unused[0], unused[1]);
    return {expert, static_cast<uint32_t>(choices)};
}

struct Found {
    int num_entries;
    uint32_t no_experts;  // of choices, a bit for each
};

// By one warp: fills the table of entries, in the order of their first choices.
__device__ __forceinline__ Found find_entries(uint32_t shared, const Arguments& arguments, int lane) {
    const bool is_choice = lane < arguments.num_tokens * CHOSEN;
    // Past L1: a launch of the second product does not wait before.
    const long long number = is_choice ? __ldcg(arguments.chosen + lane) : -1;
    const bool is_expert = 0 <= number && number < arguments.num_experts;
    const int expert = is_expert ? static_cast<int>(number) : -1;
    const uint32_t same = __match_any_sync(ALL_LANES, expert);
    const bool is_first = is_expert && lane == __ffs(same) - 1;
    const uint32_t firsts = __ballot_sync(ALL_LANES, is_first);
    const int count = __popc(firsts);
    if (is_first)
        store_shared(shared + ENTRIES_OFFSET + __popc(firsts & ((1u << lane) - 1)) * 16, expert,
                     static_cast<int>(same), 0, 0);
    if (lane == 0) store_shared(shared + COUNT_OFFSET, count);
    __syncwarp();
    const uint32_t no_experts = __ballot_sync(ALL_LANES, is_choice && !is_expert);
    return {count, no_experts};
}

// A block's range of a product, tile after tile, and of the next one. A tile lies in one entry and
// in one block of 128 rows.
struct Walk {
    int num_entries;
    int product;
    int left;
    int entry, inside;  // units of the entry before this tile

    __device__ __forceinline__ Walk(int num_entries, int product) : num_entries(num_entries) {
        begin(product);
    }

    __device__ __forceinline__ int units() const {
        return product == FIRST ? rows_of(FIRST) / UNIT : rows_of(SECOND) / UNIT;
    }

    __device__ __forceinline__ void begin(int which) {
        product = which;
        const uint32_t total = num_entries * units();
        inside = blockIdx.x * total / gridDim.x;
        left = (blockIdx.x + 1) * total / gridDim.x - inside;
        for (entry = 0; inside >= units() && entry < num_entries; ++entry) inside -= units();
    }

    __device__ __forceinline__ bool is_done() const { return left <= 0; }
    __device__ __forceinline__ int row() const { return inside * UNIT; }
    __device__ __forceinline__ int num_units() const {
        return min(min(TILE_UNITS, left), min(units() - inside, BLOCK_UNITS - inside % BLOCK_UNITS));
    }
    __device__ __forceinline__ int rows() const { return num_units() * UNIT; }
    __device__ __forceinline__ void next() {
        const int done = num_units();
        left -= done;
        inside += done;
        if (inside == units()) {
            inside = 0;
            ++entry;
        }
    }
    __device__ __forceinline__ bool begins_block() const { return inside % BLOCK_UNITS == 0; }
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

// Of the weight in the block of 128 rows that has `row`: one for each 128 columns.
__device__ __forceinline__ const float* scales_of(const Arguments& arguments, int product,
                                                  int expert, int row) {
    const int blocks = product == FIRST ? n_blocks_of(FIRST) : n_blocks_of(SECOND);
    const int columns = product == FIRST ? k_blocks_of(FIRST) : k_blocks_of(SECOND);
    return arguments.weights[product - 1].scale +
           (static_cast<long long>(expert) * blocks + row / BLOCK) * columns;
}

// ---- the warp that loads and stores -----------------------------------------------------------

struct Keeper {
    const uint32_t shared;
    const Arguments& arguments;
    const int lane;

    __device__ __forceinline__ void send_for(const Walk& walk, int slot) const {
        const int expert = entry_of(shared, walk.entry).expert;
        const int columns = walk.product == FIRST ? HIDDEN : INNER;
        const int rows = walk.product == FIRST ? rows_of(FIRST) : rows_of(SECOND);
        if (lane == 0) {
            const Weight& weight = arguments.weights[walk.product - 1];
            const long long row = static_cast<long long>(expert) * rows + walk.row();
            const uint32_t full = shared + FULL_OFFSET + slot * 8;
            barrier_expect(full, walk.rows() * (columns + 4));
            load_bytes_once(shared + slot * STAGE_BYTES, weight.values + row * columns,
                            walk.rows() * columns, full);
            load_bytes_once(shared + BIAS_OFFSET + slot * BIAS_BYTES, weight.bias + row,
                            walk.rows() * 4, full);
        } else if (lane < 3) {
            // Both ends of the scales, so that no warp waits for memory when it gets there.
            const int last = (walk.product == FIRST ? k_blocks_of(FIRST) : k_blocks_of(SECOND)) - 1;
            prefetch_line(scales_of(arguments, walk.product, expert, walk.row()) +
                          (lane - 1) * last);
        }
    }

    // Both products' tiles, as far as this launch has them, in one row.
    __device__ __forceinline__ void send_for_next(Walk& ahead, int slot) const {
        if (HAS_FIRST && HAS_SECOND && ahead.is_done() && ahead.product == FIRST)
            ahead.begin(SECOND);
        if (ahead.is_done()) return;
        send_for(ahead, slot);
        ahead.next();
    }

    // Lane 4 t + i: of token t, columns 4 i to 4 i + 3 of the tile.
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

    template <int PRODUCT>
    __device__ __forceinline__ void store(const Walk& walk, float4 t) const {
        const Entry entry = entry_of(shared, walk.entry);
        const int token = lane / 4, column = walk.row() + lane % 4 * 4;
        if (lane % 4 * 4 >= walk.rows()) return;
        uint32_t choices = entry.choices_of(token, arguments.num_tokens);
        if (choices == 0) return;
        if constexpr (PRODUCT == FIRST) {
            const long long choice = token * CHOSEN + __ffs(choices) - 1;
            *reinterpret_cast<float2*>(arguments.y + choice * INNER + column / 2) =
                make_float2(swiglu(t.x, t.y), swiglu(t.z, t.w));
        } else {
            for (; choices != 0; choices &= choices - 1) {
                const long long choice = token * CHOSEN + __ffs(choices) - 1;
                store_global(arguments.out + choice * HIDDEN + column, pack_bf16(t.x, t.y),
                             pack_bf16(t.z, t.w));
            }
        }
    }

    template <int PRODUCT>
    __device__ __forceinline__ void serve(Walk walk, Walk& ahead, Ring& ring) const {
        for (; !walk.is_done(); ring.advance(), walk.next()) {
            barrier_wait(shared + FULL_OFFSET + ring.slot * 8, ring.phase);
            const float4 bias =
                load_float4(shared + BIAS_OFFSET + ring.slot * BIAS_BYTES + lane % 4 * 16);
            barrier_wait(shared + SUMMED_OFFSET + ring.slot * 8, ring.phase);
            const float4 t = add_up(ring.slot, bias);
            __syncwarp();  // all have read the bias and the sums
            send_for_next(ahead, ring.slot);
            store<PRODUCT>(walk, t);
        }
    }

    // NaN, as a token becomes that chose what is no expert.
    __device__ __forceinline__ void fill_rows(uint32_t choices) const {
        for (; choices != 0; choices &= choices - 1) {
            unsigned short* row = arguments.out + (__ffs(choices) - 1) * HIDDEN;
            for (int column = lane * 2; column < HIDDEN; column += 64)
                store_global(row + column, 0x7FC07FC0);
        }
    }

    __device__ __forceinline__ void run() const {
        if constexpr (HAS_FIRST) wait_for_previous_kernels();
        const auto [num_entries, no_experts] = find_entries(shared, arguments, lane);
        Walk ahead(num_entries, HAS_FIRST ? FIRST : SECOND);
        for (int slot = 0; slot < STAGES; ++slot) send_for_next(ahead, slot);
        __syncthreads();
        if constexpr (!HAS_FIRST) wait_for_previous_kernels();
        allow_next_kernel();
        if (HAS_SECOND && blockIdx.x == 0) fill_rows(no_experts);
        Ring ring;
        const Walk second(num_entries, SECOND);
        if constexpr (HAS_FIRST) serve<FIRST>(Walk(num_entries, FIRST), ahead, ring);
        if constexpr (HAS_FIRST && HAS_SECOND) {
            __syncwarp();
            if (lane == 0) {
                meet_all_blocks(&counters[arguments.counter], !second.is_done());
                barrier_arrive(shared + MET_OFFSET);
            }
            __syncwarp();
        }
        if constexpr (HAS_SECOND) serve<SECOND>(second, ahead, ring);
    }
};

// ---- the warps that multiply ------------------------------------------------------------------

// A warp's part of K in one of the products.
template <int PRODUCT>
struct Multiplier {
    static constexpr int K = columns_of(PRODUCT);
    static constexpr int K_BLOCKS = k_blocks_of(PRODUCT);
    static constexpr int GROUPS = (K_BLOCKS + WARPS - 1) / WARPS;

    const uint32_t shared;
    const Arguments& arguments;
    const int warp;
    const int lane;
    uint32_t x[GROUPS][CHUNKS][8];  // 16 values of token lane / 4, as halves
    float x_scale[GROUPS][2];       // of tokens lane % 4 * 2 and the next
    float weight_scale[GROUPS];

    __device__ __forceinline__ int group_of(int group) const { return warp * GROUPS + group; }
    __device__ __forceinline__ int column_of(int group, int chunk) const {
        return group_of(group) * BLOCK + chunk * CHUNK + lane % 4 * 16;
    }

    // Four lanes have a token's group, each two times 16 values.
    __device__ __forceinline__ void quantise(int group, const float (&values)[CHUNKS][16]) {
        float amax = 0;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
#pragma unroll
            for (int i = 0; i < 16; ++i) amax = max_nan(amax, fabsf(values[chunk][i]));
        }
        amax = max_nan(amax, __shfl_xor_sync(ALL_LANES, amax, 1));
        amax = max_nan(amax, __shfl_xor_sync(ALL_LANES, amax, 2));
        amax = max_nan(amax, 1e-10f);
        const float factor = quotient_of_448(amax);
        const float scale = amax * (1.f / 448.f);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            x_scale[group][i] = __shfl_sync(ALL_LANES, scale, (lane % 4 * 2 + i) * 4);
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* four = &values[chunk][4 * i];
                to_halves(pack_e4m3(four[0] * factor, four[1] * factor, four[2] * factor,
                                    four[3] * factor),
                          x[group][chunk][2 * i], x[group][chunk][2 * i + 1]);
            }
        }
    }

    __device__ __forceinline__ void load_and_quantise_x() {
        const unsigned short* row = arguments.x + lane / 4 * arguments.x_stride;
        const bool is_token = lane / 4 < arguments.num_tokens;
        uint4 pairs[GROUPS][CHUNKS][2];
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                const int column = column_of(group, chunk);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    pairs[group][chunk][half] = {};
                    if (is_token && column < K)
                        pairs[group][chunk][half] =
                            *reinterpret_cast<const uint4*>(row + column + half * 8);
                }
            }
        }
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            float values[CHUNKS][16];
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint4 four = pairs[group][chunk][half];
                    const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        values[chunk][half * 8 + 2 * i] = low_bf16(words[i]);
                        values[chunk][half * 8 + 2 * i + 1] = high_bf16(words[i]);
                    }
                }
            }
            quantise(group, values);
        }
    }

    __device__ __forceinline__ void load_and_quantise_y(const Entry& entry) {
        const uint32_t choices = entry.choices_of(lane / 4, arguments.num_tokens);
        const long long choice = lane / 4 * CHOSEN + __ffs(choices) - 1;
        float values[GROUPS][CHUNKS][16];
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                const int column = column_of(group, chunk);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float4 four = {};
                    if (choices != 0 && column < K)
                        four = load_fresh(arguments.y + choice * K + column + i * 4);
                    values[group][chunk][4 * i] = four.x;
                    values[group][chunk][4 * i + 1] = four.y;
                    values[group][chunk][4 * i + 2] = four.z;
                    values[group][chunk][4 * i + 3] = four.w;
                }
            }
        }
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) quantise(group, values[group]);
    }

    __device__ __forceinline__ void load_scales(float (&scales)[GROUPS], const Walk& walk) const {
        const float* of_block =
            scales_of(arguments, PRODUCT, entry_of(shared, walk.entry).expert, walk.row());
#pragma unroll
        for (int group = 0; group < GROUPS; ++group)
            scales[group] = group_of(group) < K_BLOCKS ? of_block[group_of(group)] : 0;
    }

    __device__ __forceinline__ uint4 weight_of(uint32_t stage, int row, int column) const {
        uint4 v;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(stage + row * K + column)
                     : "memory");
        return v;
    }

    // The columns of this warp in a tile's sums, left where all warps' are added up. Without a branch
    // where the warp has ALL of its columns: then the chunks' chains of products overlap.
    template <bool ALL>
    __device__ __forceinline__ void multiply_tile(int slot) const {
        uint4 weight[GROUPS][CHUNKS][2];
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                const int column = column_of(group, chunk);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    // Beyond the row lies another one, or nothing yet: a NaN there would survive a
                    // zero in x.
                    if (!ALL) weight[group][chunk][half] = {};
                    if (ALL || column < K)
                        weight[group][chunk][half] = weight_of(
                            shared + slot * STAGE_BYTES, lane / 4 + half * UNIT, column);
                }
            }
        }
        float products[GROUPS][CHUNKS][4] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                    const uint4 upper = weight[group][chunk][0], lower = weight[group][chunk][1];
                    const uint32_t rows[2][4] = {{upper.x, upper.y, upper.z, upper.w},
                                                 {lower.x, lower.y, lower.z, lower.w}};
                    // Which of K a lane has does not matter where both matrices have the same.
                    uint32_t a[4];
                    to_halves(rows[0][i], a[0], a[2]);
                    to_halves(rows[1][i], a[1], a[3]);
                    const uint32_t b[2] = {x[group][chunk][2 * i], x[group][chunk][2 * i + 1]};
                    multiply_f16(products[group][chunk], a, b);
                }
            }
        }
        float sums[4] = {};
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sums[i] += (products[group][0][i] + products[group][1][i]) *
                           (x_scale[group][i % 2] * weight_scale[group]);
        }
        const uint32_t partial = shared + PARTIALS_OFFSET + (slot * WARPS + warp) * PARTIAL_BYTES +
                                 (lane % 4 * 2 * TOKEN_PITCH + lane / 4) * 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            store_shared(partial + i * TOKEN_PITCH * 4, sums[i]);
            store_shared(partial + i * TOKEN_PITCH * 4 + UNIT * 4, sums[i + 2]);
        }
    }

    // After x is there, of the first product; the second one's is loaded with each entry.
    __device__ __forceinline__ void run(Walk walk, Ring& ring) {
        if (walk.is_done()) return;
        load_scales(weight_scale, walk);
        if constexpr (PRODUCT == SECOND && HAS_FIRST) barrier_wait(shared + MET_OFFSET, 0);
        const bool has_all = (warp + 1) * GROUPS * BLOCK <= K;
        int entry = -1;
        while (!walk.is_done()) {
            if (PRODUCT == SECOND && walk.entry != entry) {
                entry = walk.entry;
                load_and_quantise_y(entry_of(shared, entry));
            }
            // Those of the next tile are under way during this one.
            Walk after = walk;
            after.next();
            const bool has_others = !after.is_done() && after.begins_block();
            float scales[GROUPS] = {};
            if (has_others) load_scales(scales, after);
            barrier_wait(shared + FULL_OFFSET + ring.slot * 8, ring.phase);
            if (has_all)
                multiply_tile<true>(ring.slot);
            else
                multiply_tile<false>(ring.slot);
            __syncwarp();
            if (lane == 0) barrier_arrive(shared + SUMMED_OFFSET + ring.slot * 8);
            ring.advance();
            if (has_others) {
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) weight_scale[group] = scales[group];
            }
            walk = after;
        }
    }
};

__device__ __forceinline__ void multiply(uint32_t shared, const Arguments& arguments, int warp,
                                         int lane) {
    Ring ring;
    if constexpr (HAS_FIRST) {
        Multiplier<FIRST> first{shared, arguments, warp, lane};
        wait_for_previous_kernels();
        first.load_and_quantise_x();
        __syncthreads();  // the entries are known
        first.run(Walk(load_shared_int(shared + COUNT_OFFSET), FIRST), ring);
    } else {
        __syncthreads();
        wait_for_previous_kernels();
    }
    if constexpr (HAS_SECOND) {
        Multiplier<SECOND> second{shared, arguments, warp, lane};
        second.run(Walk(load_shared_int(shared + COUNT_OFFSET), SECOND), ring);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    experts_fp8_few(const __grid_constant__ Arguments arguments) {
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
            barrier_init(shared + MET_OFFSET, 1);
            barrier_init_fence();
        }
        __syncwarp();
        Keeper{shared, arguments, lane}.run();
    } else {
        multiply(shared, arguments, warp, lane);
    }
}
