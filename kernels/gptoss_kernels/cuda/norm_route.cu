// normed = hidden * rsqrt(mean(hidden^2) + eps) * norm_weight in bf16, and of its rows the CHOSEN
// experts with the largest logits normed @ weight^T + bias, with a softmax over those.
//
// A cluster's BLOCKS blocks have 16 experts each, whose weights they hold in registers, in parts of
// 32 columns, CHUNKS a warp. They are loaded while the kernel before still runs. A tile is 8 tokens:
// every block norms all of them, multiplies them with its experts, and sends the logits of a token
// to the block that chooses for it. What is not needed for that is written to memory behind the
// cluster's barriers, since those wait until all that was written before is there.
//
// Where there is one tile (DISPATCHES), blocks tell each other what they chose, and what dispatch_few
// does follows at once: normed is quantised, in the order of the experts.

constexpr int TILE = 8;  // tokens
constexpr int OWNED = TILE / BLOCKS;  // for which a block chooses, and whose norms it writes
constexpr int EXPERTS_A_BLOCK = 16;
constexpr int THREADS = 32 * WARPS;
constexpr int PADDED_COLUMNS = WARPS * CHUNKS * 32;
constexpr int TOKEN_PITCH = EXPERTS_A_BLOCK + 4;  // so that the sums of a warp meet in no bank

constexpr int PARTS = WARPS * CHUNKS;  // of 32 columns

using bf16 = unsigned short;

struct Arguments {
    const bf16* hidden;
    const float* norm_weight;
    const bf16* weight;
    const bf16* bias;
    bf16* normed;
    long long* chosen;
    bf16* chosen_weights;
    int num_tokens;
    long long hidden_stride, normed_stride;
    float eps;
#if DISPATCHES
    unsigned char* values;
    float* scale;
    int* expert_start;
    int* rows;
    long long values_stride, scale_stride;
#endif
};

struct Shared {
    float norm_weight[PADDED_COLUMNS];
    float squares[TILE][WARPS];
    float sums[WARPS][TILE][TOKEN_PITCH];
    // By turns, since a block may send of the next tile what another still reads of this one.
    uint32_t keys[2][OWNED][BLOCKS * EXPERTS_A_BLOCK];
#if DISPATCHES
    // Of each part the largest value without its sign; zeros beyond, as four parts share a scale.
    uint32_t largest[TILE][PARTS + 3];
    uint32_t choices[TILE * CHOSEN];  // expert and number, as numbers in the order of their rows
#endif
};

__device__ __forceinline__ void tile_sync() {
    if constexpr (BLOCKS > 1)
        cluster_sync();
    else
        __syncthreads();
}

// 8 values of a row, whose 16 bytes no other part of a fragment shares; zeros where it is not inside.
using Octet = uint32_t[4];

__device__ __forceinline__ void load_octet(Octet& words, const bf16* pointer, bool is_inside) {
    words[0] = words[1] = words[2] = words[3] = 0;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %5, 0;\n"
        "@p ld.relaxed.gpu.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
        : "l"(pointer), "r"(int(is_inside))
        : "memory");
}

__device__ __forceinline__ void store_octet(bf16* pointer, const Octet& words) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

// A lane of a fragment stands at row `row` of the experts, and 8 further, and of the tokens; and of
// each 32 columns it holds 8, the order of which is free as long as both operands have the same.
struct Place {
    int warp, row, part;

    __device__ Place()
        : warp(threadIdx.x / 32), row(threadIdx.x % 32 / 4), part(threadIdx.x % 4) {}

    __device__ __forceinline__ int column(int chunk) const {
        return (warp * CHUNKS + chunk) * 32 + part * 8;
    }

    __device__ __forceinline__ bool is_column(int chunk) const {
        return COLUMNS == PADDED_COLUMNS || column(chunk) < COLUMNS;
    }
};

struct Experts {
    Octet rows[CHUNKS][2];

    __device__ __forceinline__ void load(const Arguments& arguments, int first,
                                         const Place& place) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int expert = first + half * 8 + place.row;
                load_octet(rows[c][half], arguments.weight + expert * COLUMNS + place.column(c),
                           expert < EXPERTS && place.is_column(c));
            }
        }
    }
};

struct Tokens {
    Octet parts[CHUNKS];

    __device__ __forceinline__ void load(const Arguments& arguments, int first,
                                         const Place& place) {
        const int token = first + place.row;
        const bf16* const hidden = arguments.hidden + token * arguments.hidden_stride;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            load_octet(parts[c], hidden + place.column(c),
                       token < arguments.num_tokens && place.is_column(c));
    }

    // In place; all threads of the block meet here.
    __device__ __forceinline__ void norm(Shared& shared, float eps, const Place& place) {
        float square = 0;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float low = low_bf16(parts[c][i]), high = high_bf16(parts[c][i]);
                square = fmaf(low, low, square);
                square = fmaf(high, high, square);
            }
        }
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2)
            square += __shfl_xor_sync(ALL_LANES, square, lanes);
        if (place.part == 0) shared.squares[place.row][place.warp] = square;
        __syncthreads();
        float sum = 0;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += shared.squares[place.row][warp];
        float factor;
        asm("rsqrt.approx.f32 %0, %1;" : "=f"(factor) : "f"(sum / COLUMNS + eps));
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const float* const weight = shared.norm_weight + place.column(c);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t pair = computed_here(parts[c][i]);  // not kept wide since above
                parts[c][i] = pack_bf16(low_bf16(pair) * factor * weight[2 * i],
                                        high_bf16(pair) * factor * weight[2 * i + 1]);
            }
        }
    }

    __device__ __forceinline__ void store(const Arguments& arguments, int first, uint32_t rank,
                                          const Place& place) const {
        const int token = first + place.row;
        if (place.row % BLOCKS != rank || token >= arguments.num_tokens) return;
        bf16* const normed = arguments.normed + token * arguments.normed_stride;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            if (place.is_column(c)) store_octet(normed + place.column(c), parts[c]);
    }
};

// This warp's columns of all logits of the block.
__device__ __forceinline__ void multiply(Shared& shared, const Experts& experts,
                                         const Tokens& tokens, const Place& place) {
    float sums[2][4] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Octet& upper = experts.rows[c][0];
            const Octet& lower = experts.rows[c][1];
            const Octet& part = tokens.parts[c];
            const uint32_t a[4] = {upper[2 * half], lower[2 * half], upper[2 * half + 1],
                                   lower[2 * half + 1]};
            const uint32_t b[2] = {part[2 * half], part[2 * half + 1]};
            multiply_bf16(sums[half], a, b);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        shared.sums[place.warp][place.part * 2 + i % 2][place.row + i / 2 * 8] =
            sums[0][i] + sums[1][i];
}

#if DISPATCHES

constexpr int NUMBER_BITS = 8;
static_assert(TILE * CHOSEN <= 1 << NUMBER_BITS);

__device__ __forceinline__ void find_largest(Shared& shared, const Tokens& tokens,
                                             const Place& place) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const Octet& pairs = tokens.parts[c];
        uint32_t largest = max_pair(max_pair(pairs[0] & 0x7FFF7FFF, pairs[1] & 0x7FFF7FFF),
                                    max_pair(pairs[2] & 0x7FFF7FFF, pairs[3] & 0x7FFF7FFF));
#pragma unroll
        for (int lanes = 1; lanes < 4; lanes *= 2)
            largest = max_pair(largest, __shfl_xor_sync(ALL_LANES, largest, lanes));
        if (place.part == 0)
            shared.largest[place.row][place.warp * CHUNKS + c] =
                max(largest & 0xFFFF, largest >> 16);
    }
}

// To all blocks, by one warp, whose lane k has the k-th choice of the token.
__device__ __forceinline__ void tell_choice(Shared& shared, int token, int expert) {
    const int lane = threadIdx.x % 32, number = token * CHOSEN + lane;
    if (lane >= CHOSEN) return;
    const uint32_t order = (expert < 0 ? EXPERTS : expert) << NUMBER_BITS | number;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
        store_in_cluster(&shared.choices[number], block, order);
}

__device__ __forceinline__ void write_starts(const Shared& shared, const Arguments& arguments) {
    const int num_choices = arguments.num_tokens * CHOSEN;
    for (int expert = threadIdx.x; expert <= EXPERTS; expert += THREADS) {
        int before = 0;
        for (int i = 0; i < num_choices; ++i)
            before += shared.choices[i] < static_cast<uint32_t>(expert) << NUMBER_BITS;
        arguments.expert_start[expert] = before;
    }
}

// Of this lane's token, if it is the block's: a choice's row is the number of choices before it.
__device__ __forceinline__ void find_rows(int (&rows)[CHOSEN], const Shared& shared,
                                          int num_tokens, uint32_t rank, const Place& place) {
    constexpr int EACH = (TILE * CHOSEN + 31) / 32;
    uint32_t choices[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int number = i * 32 + threadIdx.x % 32;
        choices[i] = number < num_tokens * CHOSEN ? shared.choices[number] : 0xFFFFFFFF;
    }
#pragma unroll
    for (int owned = 0; owned < OWNED; ++owned) {
        const int token = owned * BLOCKS + rank;
        if (token >= num_tokens) break;
#pragma unroll
        for (int k = 0; k < CHOSEN; ++k) {
            const uint32_t own = shared.choices[token * CHOSEN + k];
            int row = 0;
#pragma unroll
            for (int i = 0; i < EACH; ++i) row += __popc(__ballot_sync(ALL_LANES, choices[i] < own));
            if (place.row == token) rows[k] = row;
        }
    }
}

__device__ __forceinline__ void write_rows(const int (&rows)[CHOSEN], const Shared& shared,
                                           const Arguments& arguments, const Tokens& tokens,
                                           const Place& place) {
    if (place.warp == 0 && place.part == 0) {
#pragma unroll
        for (int k = 0; k < CHOSEN; ++k) arguments.rows[place.row * CHOSEN + k] = rows[k];
    }
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (!place.is_column(c)) continue;
        const int part = place.warp * CHUNKS + c, group = part / 4;
        const uint32_t* const largest = &shared.largest[place.row][group * 4];
        const uint32_t bits = max(max(largest[0], largest[1]), max(largest[2], largest[3])) << 16;
        const float amax = max_nan(__uint_as_float(bits), 1e-10f);
        const float factor = quotient_of_448(amax);
        const Octet& pairs = tokens.parts[c];
        uint32_t words[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
            words[i] = pack_e4m3(
                low_bf16(pairs[2 * i]) * factor, high_bf16(pairs[2 * i]) * factor,
                low_bf16(pairs[2 * i + 1]) * factor, high_bf16(pairs[2 * i + 1]) * factor);
#pragma unroll
        for (int k = 0; k < CHOSEN; ++k) {
            unsigned char* const values =
                arguments.values + rows[k] * arguments.values_stride + place.column(c);
            asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(values), "r"(words[0]),
                         "r"(words[1])
                         : "memory");
            if (place.part == 0 && part % 4 == 0)
                arguments.scale[group * arguments.scale_stride + rows[k]] =
                    amax * (1.0f / 448.0f);
        }
    }
}

#endif

extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
    norm_route(const __grid_constant__ Arguments arguments) {
    __shared__ Shared shared;
    if constexpr (BLOCKS > 1) cluster_begin();
    static_assert(THREADS >= TILE * EXPERTS_A_BLOCK && WARPS >= OWNED);
    const Place place;
    const uint32_t rank = BLOCKS > 1 ? cluster_rank() : 0;
    const int num_tokens = arguments.num_tokens;
    // Of the logits, the one that this thread adds up.
    const int own_token = threadIdx.x / EXPERTS_A_BLOCK;
    const int own_expert = rank * EXPERTS_A_BLOCK + threadIdx.x % EXPERTS_A_BLOCK;
    const bool adds = own_token < TILE;

    // No kernel writes weights, so they are here before the tokens are.
    Experts experts;
    experts.load(arguments, rank * EXPERTS_A_BLOCK, place);
    for (int i = threadIdx.x; i < PADDED_COLUMNS; i += THREADS)
        shared.norm_weight[i] = i < COLUMNS ? arguments.norm_weight[i] : 0;
#if DISPATCHES
    if (threadIdx.x < TILE * 3) shared.largest[threadIdx.x / 3][PARTS + threadIdx.x % 3] = 0;
#endif
    float bias = 0;
    if (adds && own_expert < EXPERTS) bias = low_bf16(arguments.bias[own_expert]);
    wait_for_previous_kernels();
    allow_next_kernel();
    if constexpr (BLOCKS > 1) cluster_has_begun();

    const int step = gridDim.x / BLOCKS * TILE;
    int turn = 0;
    for (int first = blockIdx.x / BLOCKS * TILE; first < num_tokens; first += step, turn ^= 1) {
        Tokens tokens;
        tokens.load(arguments, first, place);
        tokens.norm(shared, arguments.eps, place);
        multiply(shared, experts, tokens, place);
#if DISPATCHES
        find_largest(shared, tokens, place);
#endif
        __syncthreads();
        if (adds) {
            float logit = bias;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp)
                logit += shared.sums[warp][own_token][threadIdx.x % EXPERTS_A_BLOCK];
            uint32_t* const key = &shared.keys[turn][own_token / BLOCKS][own_expert];
            store_in_cluster(key, own_token % BLOCKS,
                             own_expert < EXPERTS ? key_of(pack_bf16(logit, 0), own_expert) : 0);
        }
        tile_sync();
        const int chosen_for = first + place.warp * BLOCKS + rank;
        const bool chooses = place.warp < OWNED && chosen_for < num_tokens;
        Choice choice = {};
        if (chooses) {
            constexpr int EACH = (BLOCKS * EXPERTS_A_BLOCK + 31) / 32;
            uint32_t keys[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int expert = i * 32 + threadIdx.x % 32;
                keys[i] = expert < BLOCKS * EXPERTS_A_BLOCK
                              ? shared.keys[turn][place.warp][expert] : 0;
            }
            choice = choose_by_keys(keys);
#if DISPATCHES
            tell_choice(shared, chosen_for, choice.expert);
#endif
        }
#if DISPATCHES
        tile_sync();
        int rows[CHOSEN] = {};
        find_rows(rows, shared, num_tokens, rank, place);
        if (place.row % BLOCKS == rank && place.row < num_tokens)
            write_rows(rows, shared, arguments, tokens, place);
        if (rank == BLOCKS - 1) write_starts(shared, arguments);
#endif
        if (chooses)
            choice.store(arguments.chosen + chosen_for * (long long)CHOSEN,
                         arguments.chosen_weights + chosen_for * (long long)CHOSEN);
        tokens.store(arguments, first, rank, place);
        if (DISPATCHES) break;  // There is one tile: the router's registers are free after it.
    }
}
