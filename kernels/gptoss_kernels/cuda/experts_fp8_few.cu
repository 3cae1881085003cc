// A product of the experts of so few tokens that reading its weights is all that takes time: what
// dispatch_fp8, grouped_swiglu_fp8 and grouped_linear_fp8 compute, in two launches of this kernel.
//
//     SWIGLU = 1: y = swiglu(quantise(x) @ w[e]^T + b[e])   of each token x for each of its experts
//     SWIGLU = 0: out = quantise(y) @ w[e]^T + b[e]
//
// An entry is an expert that any token chose, with slots for the choices: of up to 8 tokens a slot
// for each token, so that what a block holds of x is the same for all entries. Of more, slots are
// filled in the order of the choices, and an expert that more chose than an entry has slots has
// several entries, one behind the other: its weights are read by several blocks at about one time.
//
// The rows of weight of all entries, in units of 8, are cut into as many equal ranges as there are
// blocks. A block streams its range, which is contiguous in memory, through shared memory, 16 rows
// with their biases at a time. WARPS warps share K: each quantises GROUPS groups of 128 columns of
// an entry's tokens, as quantise.cu does, and multiplies them as halves, which hold e4m3 values and
// their products exactly, with sums in fp32. One more warp adds these up, stores, and sends for the
// next rows.
//
// Each block finds the entries by itself. Of the second product it does so, and sends for its first
// weights, before it waits for the first one to end. Of the first one, while tokens may still be
// routed, it has weights of AHEAD tiles come into L2 that will be its own if all experts are chosen,
// and others' if most are.
//
// Defined by whoever compiles this: K, N, SWIGLU, CHOSEN, WARPS, STAGES, SHARED_BYTES, AHEAD,
// MAXIMUM_CHOICES, EXPERTS (where choices are gathered at least their number, in a multiple of 32;
// else 0).

constexpr bool GATHERS = EXPERTS != 0;
constexpr int SLOTS = 8;  // columns of the instruction
constexpr int UNIT = 8;   // rows of weight
constexpr int TILE_UNITS = 2;  // as many rows as the instruction multiplies
constexpr int BLOCK = 128;     // rows and columns of weight that share a scale
constexpr int BLOCK_UNITS = BLOCK / UNIT;
constexpr int CHUNK = 64;  // of K: 16 bytes from each of a row's four lanes
constexpr int CHUNKS = BLOCK / CHUNK;
constexpr int THREADS = (WARPS + 1) * 32;
constexpr int K_BLOCKS = (K + BLOCK - 1) / BLOCK;
constexpr int N_BLOCKS = (N + BLOCK - 1) / BLOCK;
constexpr int UNITS = N / UNIT;
constexpr int GROUPS = (K_BLOCKS + WARPS - 1) / WARPS;
static_assert(GATHERS || MAXIMUM_CHOICES <= 32, "a slot is a token, a lane a choice");

constexpr int STAGE_BYTES = TILE_UNITS * UNIT * K;
constexpr int BIAS_BYTES = TILE_UNITS * UNIT * 4;
constexpr int SLOT_PITCH = 20;  // floats: the lanes of a store reach different banks
constexpr int PARTIAL_BYTES = SLOTS * SLOT_PITCH * 4;
constexpr int BIAS_OFFSET = STAGES * STAGE_BYTES;
constexpr int PARTIALS_OFFSET = BIAS_OFFSET + STAGES * BIAS_BYTES;
constexpr int FULL_OFFSET = PARTIALS_OFFSET + STAGES * WARPS * PARTIAL_BYTES;
constexpr int SUMMED_OFFSET = FULL_OFFSET + STAGES * 8;
constexpr int ENTRIES_OFFSET = SUMMED_OFFSET + STAGES * 8;
constexpr int ENTRY_BYTES = GATHERS ? 4 + SLOTS * 2 : 8;
// Of each expert one entry may not be full.
constexpr int MAXIMUM_ENTRIES = GATHERS ? EXPERTS + MAXIMUM_CHOICES / SLOTS : MAXIMUM_CHOICES;
constexpr int COUNT_OFFSET = (ENTRIES_OFFSET + MAXIMUM_ENTRIES * ENTRY_BYTES + 7) / 8 * 8;
constexpr int COUNTS_OFFSET = COUNT_OFFSET + 8;  // of choices, then of entries before, by expert
static_assert(COUNTS_OFFSET + EXPERTS * 4 <= SHARED_BYTES, "the launch gives too little memory");
static_assert(EXPERTS % 32 == 0, "lanes share experts");
static_assert(SWIGLU || AHEAD == 0, "the second product knows who was chosen");

struct Arguments {
    const void* x;            // of tokens, bf16; of the second product y, a row for each choice, fp32
    const long long* chosen;  // a choice is one of its num_tokens * CHOSEN entries
    const unsigned char* weight;
    const float* weight_scale;
    const float* bias;
    void* out;  // y; of the second product a row for each choice, bf16
    int* rows;  // of each choice, with SWIGLU: its number, or -1 for what is no expert
    int num_tokens;
    int num_experts;
    long long x_stride;
    float exponent_scale;  // -alpha / ln 2
    float limit;
};

// ---- instructions that no other kernel has ---------------------------------------------------

__device__ __forceinline__ void prefetch_line(const void* source) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(source) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t address, unsigned short value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

// ---- who does what ----------------------------------------------------------------------------

// In shared memory: the expert, and a bit for each choice, of which a token's first counts. Where
// choices are gathered the expert and above it, each in 16 bits, how many there are for this entry
// and those behind it; then the numbers of this one's in 16 bits each.
struct Entry {
    uint32_t address;

    __device__ __forceinline__ Entry(uint32_t shared, int index)
        : address(shared + ENTRIES_OFFSET + index * ENTRY_BYTES) {}

    __device__ __forceinline__ int expert() const {
        const int word = load_shared_int(address);
        return GATHERS ? word & 0xFFFF : word;
    }

    // Negative where the slot has none.
    __device__ __forceinline__ int choice_of(int slot, int num_tokens) const {
        if constexpr (GATHERS) {
            if (slot >= load_shared_int(address) >> 16) return -1;
            const uint32_t two = load_shared_int(address + 4 + slot / 2 * 4);
            return two >> slot % 2 * 16 & 0xFFFF;
        } else {
            if (slot >= num_tokens) return -1;
            const uint32_t choices = load_shared_int(address + 4);
            const uint32_t own = choices >> slot * CHOSEN & ((1u << CHOSEN) - 1);
            return own == 0 ? -1 : slot * CHOSEN + __ffs(own) - 1;
        }
    }
};

// What was chosen, or -1 beyond the last choice. Past L1: the second product does not wait before.
__device__ __forceinline__ long long load_choice(const Arguments& arguments, int choice) {
    return choice < arguments.num_tokens * CHOSEN ? __ldcg(arguments.chosen + choice) : -1;
}

// The expert, or negative: none. Says so in `rows`.
__device__ __forceinline__ int take_choice(const Arguments& arguments, int choice,
                                           long long number) {
    const bool is_expert = 0 <= number && number < arguments.num_experts;
    if (SWIGLU && blockIdx.x == 0 && choice < arguments.num_tokens * CHOSEN)
        arguments.rows[choice] = is_expert ? choice : -1;
    return is_expert ? static_cast<int>(number) : -1;
}

// By one warp: fills the table of entries and gives their number.
#if EXPERTS == 0
// In the order of their first choices. An expert that a token chose again has an entry for that
// alone.
__device__ __forceinline__ int fill_entries(uint32_t shared, const Arguments& arguments, int lane) {
    const uint32_t before = (1u << lane) - 1;
    const int expert = take_choice(arguments, lane, load_choice(arguments, lane));
    const uint32_t same = __match_any_sync(ALL_LANES, expert);
    const uint32_t earlier = same & before;
    const bool is_again = earlier >> lane / CHOSEN * CHOSEN != 0;
    const bool is_first = expert >= 0 && (is_again || earlier == 0);
    const uint32_t firsts = __ballot_sync(ALL_LANES, is_first);
    if (is_first) {
        const Entry entry(shared, __popc(firsts & before));
        store_shared(entry.address, expert);
        store_shared(entry.address + 4, static_cast<int>(is_again ? 1u << lane : same));
    }
    return __popc(firsts);
}
#else
// In the order of the experts.
__device__ __forceinline__ int fill_entries(uint32_t shared, const Arguments& arguments, int lane) {
    constexpr int ROUNDS = MAXIMUM_CHOICES / 32, EACH = EXPERTS / 32;
    const int num_choices = arguments.num_tokens * CHOSEN;
    const uint32_t counts = shared + COUNTS_OFFSET;
    int expert[ROUNDS], rank[ROUNDS];  // among the choices of one expert
    uint32_t same[ROUNDS];
    long long number[ROUNDS];  // all under way at once
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) number[i] = load_choice(arguments, i * 32 + lane);
#pragma unroll
    for (int i = 0; i < EACH; ++i) store_shared(counts + (i * 32 + lane) * 4, 0);
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        if (i * 32 >= num_choices) break;
        expert[i] = take_choice(arguments, i * 32 + lane, number[i]);
        same[i] = __match_any_sync(ALL_LANES, expert[i]);
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        if (i * 32 >= num_choices) break;
        __syncwarp();
        const uint32_t count = counts + max(expert[i], 0) * 4;
        const int earlier = load_shared_int(count);
        rank[i] = earlier + __popc(same[i] & ((1u << lane) - 1));
        __syncwarp();
        if (expert[i] >= 0 && lane == __ffs(same[i]) - 1)
            store_shared(count, earlier + __popc(same[i]));
    }
    __syncwarp();
    // A lane has EACH successive experts: counts become the first entries.
    int left[EACH], own = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        left[i] = load_shared_int(counts + (lane * EACH + i) * 4);
        own += (left[i] + SLOTS - 1) / SLOTS;
    }
    int before = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, before, distance);
        if (lane >= distance) before += other;
    }
    const int total = __shfl_sync(ALL_LANES, before, 31);
    before -= own;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        store_shared(counts + (lane * EACH + i) * 4, before);
        for (; left[i] > 0; left[i] -= SLOTS, ++before)
            store_shared(Entry(shared, before).address, left[i] << 16 | (lane * EACH + i));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
        if (i * 32 >= num_choices) break;
        if (expert[i] < 0) continue;
        const Entry entry(shared, load_shared_int(counts + expert[i] * 4) + rank[i] / SLOTS);
        store_shared(entry.address + 4 + rank[i] % SLOTS * 2,
                     static_cast<unsigned short>(i * 32 + lane));
    }
    return total;
}
#endif

__device__ __forceinline__ int find_entries(uint32_t shared, const Arguments& arguments, int lane) {
    const int count = fill_entries(shared, arguments, lane);
    if (lane == 0) store_shared(shared + COUNT_OFFSET, count);
    __syncwarp();
    return count;
}

// A block's range, tile after tile. A tile lies in one entry and in one block of 128 rows.
struct Walk {
    int left;
    int entry, inside;  // units of the entry before this tile

    __device__ __forceinline__ Walk(uint32_t num_entries) {
        const uint32_t total = num_entries * UNITS;
        const uint32_t first = blockIdx.x * total / gridDim.x;
        left = (blockIdx.x + 1) * total / gridDim.x - first;
        entry = first / UNITS;
        inside = first % UNITS;
    }

    __device__ __forceinline__ bool is_done() const { return left <= 0; }
    __device__ __forceinline__ int row() const { return inside * UNIT; }
    __device__ __forceinline__ int num_units() const {
        return min(min(TILE_UNITS, left), min(UNITS - inside, BLOCK_UNITS - inside % BLOCK_UNITS));
    }
    __device__ __forceinline__ int rows() const { return num_units() * UNIT; }
    __device__ __forceinline__ void next() {
        const int done = num_units();
        left -= done;
        inside += done;
        if (inside == UNITS) {
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

// Of the block of 128 rows of weight that has `row`: one for each 128 columns.
__device__ __forceinline__ const float* scales_of(const Arguments& arguments, int expert, int row) {
    return arguments.weight_scale +
           (static_cast<long long>(expert) * N_BLOCKS + row / BLOCK) * K_BLOCKS;
}

// ---- the warp that loads and stores -----------------------------------------------------------

struct Keeper {
    const uint32_t shared;
    const Arguments& arguments;
    const int lane;

    __device__ __forceinline__ void send_for(const Walk& walk, int slot) const {
        const int expert = Entry(shared, walk.entry).expert();
        if (lane == 0) {
            const long long row = static_cast<long long>(expert) * N + walk.row();
            const uint32_t full = shared + FULL_OFFSET + slot * 8;
            barrier_expect(full, walk.rows() * (K + 4));
            load_bytes_once(shared + slot * STAGE_BYTES, arguments.weight + row * K,
                            walk.rows() * K, full);
            load_bytes_once(shared + BIAS_OFFSET + slot * BIAS_BYTES, arguments.bias + row,
                            walk.rows() * 4, full);
        } else if (lane < 3) {
            // Both ends of the scales, so that no warp waits for memory when it gets there.
            prefetch_line(scales_of(arguments, expert, walk.row()) + (lane - 1) * (K_BLOCKS - 1));
        }
    }

    __device__ __forceinline__ void fetch_likely() const {
        const uint32_t units = arguments.num_experts * UNITS;
        const long long first = blockIdx.x * units / gridDim.x * UNIT;
        const long long end = min(first + AHEAD * TILE_UNITS * UNIT, units * 1ll * UNIT);
        for (long long row = first + lane; row < end; row += 32)
            fetch_bytes(arguments.weight + row * K, K);
    }

    // Lane 4 s + i: of slot s, columns 4 i to 4 i + 3 of the tile.
    __device__ __forceinline__ float4 add_up(int slot, float4 sum) const {
        const uint32_t address = shared + PARTIALS_OFFSET + slot * WARPS * PARTIAL_BYTES +
                                 lane / 4 * SLOT_PITCH * 4 + lane % 4 * 16;
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

    __device__ __forceinline__ void store(const Walk& walk, float4 t) const {
        const int column = walk.row() + lane % 4 * 4;
        if (lane % 4 * 4 >= walk.rows()) return;
        const long long choice =
            Entry(shared, walk.entry).choice_of(lane / 4, arguments.num_tokens);
        if (choice < 0) return;
        if constexpr (SWIGLU) {
            float* const y = static_cast<float*>(arguments.out) + choice * (N / 2);
            *reinterpret_cast<float2*>(y + column / 2) =
                make_float2(swiglu(t.x, t.y), swiglu(t.z, t.w));
        } else {
            store_global(static_cast<unsigned short*>(arguments.out) + choice * N + column,
                         pack_bf16(t.x, t.y), pack_bf16(t.z, t.w));
        }
    }

    __device__ __forceinline__ void run() const {
        if constexpr (SWIGLU) {
            if constexpr (AHEAD > 0) fetch_likely();
            wait_for_previous_kernels();
        }
        Walk walk(find_entries(shared, arguments, lane)), ahead = walk;
        for (int slot = 0; slot < STAGES && !ahead.is_done(); ++slot, ahead.next())
            send_for(ahead, slot);
        __syncthreads();
        if constexpr (!SWIGLU) wait_for_previous_kernels();
        allow_next_kernel();
        for (Ring ring; !walk.is_done(); ring.advance(), walk.next()) {
            barrier_wait(shared + FULL_OFFSET + ring.slot * 8, ring.phase);
            const float4 bias =
                load_float4(shared + BIAS_OFFSET + ring.slot * BIAS_BYTES + lane % 4 * 16);
            barrier_wait(shared + SUMMED_OFFSET + ring.slot * 8, ring.phase);
            const float4 t = add_up(ring.slot, bias);
            __syncwarp();  // all have read the bias and the sums
            if (!ahead.is_done()) {
                send_for(ahead, ring.slot);
                ahead.next();
            }
            store(walk, t);
        }
    }
};

// ---- the warps that multiply ------------------------------------------------------------------

struct Multiplier {
    const uint32_t shared;
    const Arguments& arguments;
    const int warp;
    const int lane;
    uint32_t x[GROUPS][CHUNKS][8];  // 16 values of slot lane / 4, as halves
    float x_scale[GROUPS][2];       // of slots lane % 4 * 2 and the next
    float weight_scale[GROUPS];

    __device__ __forceinline__ int group_of(int group) const { return warp * GROUPS + group; }
    __device__ __forceinline__ int column_of(int group, int chunk) const {
        return group_of(group) * BLOCK + chunk * CHUNK + lane % 4 * 16;
    }

    // Four lanes have a slot's group, each two times 16 values.
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

    // Of this lane's slot.
    __device__ __forceinline__ void load_and_quantise_x(int token, bool is_token) {
        const unsigned short* row =
            static_cast<const unsigned short*>(arguments.x) + token * arguments.x_stride;
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

    __device__ __forceinline__ void load_and_quantise_y(int choice) {
        const float* row = static_cast<const float*>(arguments.x) + choice * arguments.x_stride;
        float values[GROUPS][CHUNKS][16];
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                const int column = column_of(group, chunk);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float4 four = {};
                    if (choice >= 0 && column < K)
                        four = load_fresh(row + column + i * 4);
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

    __device__ __forceinline__ void load_and_quantise(const Entry& entry) {
        const int choice = entry.choice_of(lane / 4, arguments.num_tokens);
        if constexpr (SWIGLU)
            load_and_quantise_x(choice / CHOSEN, choice >= 0);
        else
            load_and_quantise_y(choice);
    }

    __device__ __forceinline__ void load_scales(float (&scales)[GROUPS], const Walk& walk) const {
        const float* of_block =
            scales_of(arguments, Entry(shared, walk.entry).expert(), walk.row());
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
                                 (lane % 4 * 2 * SLOT_PITCH + lane / 4) * 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            store_shared(partial + i * SLOT_PITCH * 4, sums[i]);
            store_shared(partial + i * SLOT_PITCH * 4 + UNIT * 4, sums[i + 2]);
        }
    }

    __device__ __forceinline__ void run() {
        if constexpr (SWIGLU) {
            wait_for_previous_kernels();
            if constexpr (!GATHERS)
                load_and_quantise_x(lane / 4, lane / 4 < arguments.num_tokens);
        }
        __syncthreads();  // the entries are known
        Walk walk(load_shared_int(shared + COUNT_OFFSET));
        if (!walk.is_done()) load_scales(weight_scale, walk);
        if constexpr (!SWIGLU) wait_for_previous_kernels();
        const bool has_all = (warp + 1) * GROUPS * BLOCK <= K;
        int entry = -1;
        for (Ring ring; !walk.is_done(); ring.advance()) {
            if ((GATHERS || !SWIGLU) && walk.entry != entry) {
                entry = walk.entry;
                load_and_quantise(Entry(shared, entry));
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
            if (has_others) {
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) weight_scale[group] = scales[group];
            }
            walk = after;
        }
    }
};

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
            barrier_init_fence();
        }
        __syncwarp();
        Keeper{shared, arguments, lane}.run();
    } else {
        Multiplier multiplier{shared, arguments, warp, lane};
        multiplier.run();
    }
}
