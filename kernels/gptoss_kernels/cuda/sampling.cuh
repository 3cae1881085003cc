// A row of logits in the shared memory of a cluster's CLUSTER blocks, each a part of it in the
// order of ids: what drawing a token and telling log-probabilities share.
//
// Each block stores what the others are to know in its own shared memory, cluster_sync lets all
// pass when all have, and each reads all. What was read behind one is stored anew behind the next
// one, and no block ends before a last one.

constexpr int WARPS = THREADS / 32;
constexpr int WIDTH = 8;  // logits of a vector
constexpr int VECTOR_BYTES = WIDTH * LOGIT_BYTES;

// ---- logits in the order of their bits -------------------------------------------------------

// As 0 and -0 are equal, so are their orders; NaN is above all.
__device__ __forceinline__ uint32_t order_of(float value) {
    const uint32_t bits = __float_as_uint(value + 0.f);
    return value != value ? 0xFFFFFFFF : bits ^ (int(bits) < 0 ? 0xFFFFFFFF : 0x80000000);
}

__device__ __forceinline__ float value_of(uint32_t order) {
    return __uint_as_float(order ^ (int(order) < 0 ? 0x80000000 : 0xFFFFFFFF));
}

constexpr uint32_t NONE = 0xFF800000;  // -inf: of a token that must not come

__device__ __forceinline__ bool is_finite(uint32_t order) {
    return ~NONE < order && order < NONE;  // above -inf and below inf
}

// A token by its logit, of equal ones the lower id first: larger than those of all after it, and 0
// is no token's.
__device__ __forceinline__ uint64_t rank_of(float value, uint32_t token) {
    return uint64_t(order_of(value)) << 32 | ~token;
}

__device__ __forceinline__ uint32_t order_in(uint64_t rank) { return uint32_t(rank >> 32); }
__device__ __forceinline__ uint32_t token_in(uint64_t rank) { return ~uint32_t(rank); }

// ---- weights ---------------------------------------------------------------------------------

constexpr double LOG2_E = 1.4426950408889634;
constexpr int WEIGHT_BITS = 40;  // of the largest logit's weight, which is a power of two

// 2^40 2^(rate (value - largest)), rounded down, rate being log2(e) / temperature. As the reference
// does it, in the same roundings: so no sum of weights depends on anything.
__device__ __forceinline__ uint64_t weight_of(float value, float largest, float rate) {
    const float exponent = fmaxf(__fmul_rn(__fsub_rn(value, largest), rate), -48.f);
    // From 144 to 192 a number has 16 bits behind the point.
    const float shifted = __fadd_rn(exponent, 192.f);
    const uint32_t bits = __float_as_uint(shifted);
    const float x = __fsub_rn(shifted, __uint_as_float(bits & 0xFFFF0000));
    constexpr float UNIT = 1.f / (1 << 24);
    float power = fmaf(225262 * UNIT, x, 876483 * UNIT);
    power = fmaf(power, x, 4048010 * UNIT);
    power = fmaf(power, x, 11627363 * UNIT);
    power = fmaf(power, x, 1.f);
    const uint64_t mantissa = __float_as_uint(power) - 0x3F000000;  // 2^(23 + x)
    const uint32_t down = (__float_as_uint(192.f) >> 16) - (bits >> 16);
    return mantissa << (WEIGHT_BITS - 23) >> down;
}

// ---- a block's part of a row -----------------------------------------------------------------

__device__ __forceinline__ float logit(const char* row, int token) {
#if LOGIT_BYTES == 2
    return low_bf16(reinterpret_cast<const unsigned short*>(row)[token]);
#else
    return reinterpret_cast<const float*>(row)[token];
#endif
}

struct Rows {
    const char* logits;
    long long row_bytes;
    int vocab_size, block_vectors;

    __device__ __forceinline__ const char* at(int row) const { return logits + row * row_bytes; }
};

struct Part {
    uint32_t memory;  // address of its logits in shared memory
    int first_token;  // of the row
    int num_vectors;

    __device__ __forceinline__ Part(const void* memory, const Rows& rows, uint32_t rank)
        : memory(shared_address(memory)), first_token(int(rank) * rows.block_vectors * WIDTH) {
        const int left = (rows.vocab_size - first_token) / WIDTH;
        num_vectors = max(0, min(rows.block_vectors, left));
    }

    __device__ __forceinline__ int num_cells() const { return (num_vectors + 31) / 32; }

    // By the threads that read them, until a block's barrier, and behind copy_wait<0>.
    __device__ __forceinline__ void fetch(const char* row) const {
        const char* source = row + (long long)first_token * LOGIT_BYTES;
        for (int v = threadIdx.x; v < num_vectors; v += THREADS)
#pragma unroll
            for (int i = 0; i < VECTOR_BYTES; i += 16)
                copy_async(memory + v * VECTOR_BYTES + i, source + v * VECTOR_BYTES + i, true);
        copy_commit();
    }

    __device__ __forceinline__ void load(int vector, float (&values)[WIDTH]) const {
        const uint32_t address = memory + vector * VECTOR_BYTES;
#if LOGIT_BYTES == 2
        int words[4];
        load_shared(address, words[0], words[1], words[2], words[3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            values[2 * i] = low_bf16(words[i]);
            values[2 * i + 1] = high_bf16(words[i]);
        }
#else
#pragma unroll
        for (int i = 0; i < WIDTH; i += 4) {
            const float4 four = load_float4(address + i * LOGIT_BYTES);
            values[i] = four.x, values[i + 1] = four.y;
            values[i + 2] = four.z, values[i + 3] = four.w;
        }
#endif
    }

    __device__ __forceinline__ void forbid(unsigned char* memory, int token) const {
        const uint32_t place = token - first_token;
        if (place >= num_vectors * WIDTH) return;
#if LOGIT_BYTES == 2
        reinterpret_cast<unsigned short*>(memory)[place] = NONE >> 16;
#else
        reinterpret_cast<uint32_t*>(memory)[place] = NONE;
#endif
    }

    __device__ __forceinline__ int token(int vector, int i) const {
        return first_token + vector * WIDTH + i;
    }

    // The first of this thread's tokens with its largest logit, or a NaN's; 0 if it has no token.
    __device__ __forceinline__ uint64_t best() const {
        const int first = threadIdx.x;
        if (first >= num_vectors) return 0;
        float largest = __uint_as_float(NONE), values[WIDTH];
        int found = first;
        for (int v = first; v < num_vectors; v += THREADS) {
            load(v, values);
            float here = values[0];
#pragma unroll
            for (int i = 1; i < WIDTH; ++i) here = max_nan(here, values[i]);
            if (here > largest || here != here) {
                largest = here;
                found = v;
            }
        }
        load(found, values);
        int place = 0;
#pragma unroll
        for (int i = WIDTH - 1; i >= 0; --i)
            if (values[i] == largest) place = i;
        return rank_of(largest, token(found, place));
    }
};

// ---- all threads together --------------------------------------------------------------------

__device__ __forceinline__ uint64_t largest_in_warp(uint64_t value) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
        value = max(value, __shfl_xor_sync(ALL_LANES, value, lanes));
    return value;
}

// `room` has a place for each warp, and is the block's again when all have the result.
__device__ __forceinline__ uint64_t largest_in_block(uint64_t value, uint64_t* room) {
    value = largest_in_warp(value);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = value;
    __syncthreads();
    value = largest_in_warp(room[threadIdx.x % WARPS]);
    __syncthreads();
    return value;
}

// The sum of the lanes up to this one.
__device__ __forceinline__ uint64_t sum_up_to_lane(uint64_t value) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const uint64_t before = __shfl_up_sync(ALL_LANES, value, lanes);
        if (threadIdx.x % 32 >= lanes) value += before;
    }
    return value;
}

// Of all blocks, behind cluster_sync.
__device__ __forceinline__ uint64_t largest_in_cluster(const uint64_t* own) {
    return largest_in_warp(load_from_cluster(own, threadIdx.x % CLUSTER));
}
