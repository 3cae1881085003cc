// normed = hidden * rsqrt(mean(hidden^2) + eps) * norm_weight in bf16, and of its rows the CHOSEN
// experts with the largest logits normed @ weight^T + bias, with a softmax over those.
//
// A cluster's BLOCKS blocks have 16 experts each, whose weights they hold in registers, in parts of
// 32 columns, CHUNKS a warp. They are loaded while the kernel before still runs. A tile is 8 tokens:
// every block norms all of them, multiplies them with its experts, and sends the logits of a token
// to the block that chooses for it. What is not needed for that is written to memory behind the
// cluster's barriers, since those wait until all that was written before is there.

constexpr int TILE = 8;  // tokens
constexpr int OWNED = TILE / BLOCKS;  // for which a block chooses, and whose norms it writes
constexpr int EXPERTS_A_BLOCK = 16;
constexpr int THREADS = 32 * WARPS;
constexpr int PADDED_COLUMNS = WARPS * CHUNKS * 32;
constexpr int TOKEN_PITCH = EXPERTS_A_BLOCK + 4;  // so that the sums of a warp meet in no bank

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
    OwnExperts own;
    long long hidden_stride, normed_stride;
    float eps;
};

struct Shared {
    float norm_weight[PADDED_COLUMNS];
    float squares[TILE][WARPS];
    float sums[WARPS][TILE][TOKEN_PITCH];
    // By turns, since a block may send of the next tile what another still reads of this one.
    uint32_t keys[2][OWNED][BLOCKS * EXPERTS_A_BLOCK];
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
        if (place.warp < OWNED && chosen_for < num_tokens) {
            constexpr int EACH = (BLOCKS * EXPERTS_A_BLOCK + 31) / 32;
            uint32_t keys[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int expert = i * 32 + threadIdx.x % 32;
                keys[i] = expert < BLOCKS * EXPERTS_A_BLOCK
                              ? shared.keys[turn][place.warp][expert] : 0;
            }
            choose_by_keys(keys).store(arguments, chosen_for);
        }
        tokens.store(arguments, first, rank, place);
    }
}
