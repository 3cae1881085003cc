// A token of each row of logits. What reference.sample says, with sums in any order: see weight_of.

constexpr int DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS;
constexpr int COPIES = 8;  // of a histogram, so that few lanes meet in one place
constexpr int ORDER_BITS = 8 * LOGIT_BYTES;
constexpr int HALF_BITS = WEIGHT_BITS / 2;
constexpr double LEAST_TEMPERATURE = 1e-5;  // below it a row is greedy

struct Arguments {
    Rows rows;
    const double *temperature, *top_p, *min_p, *uniforms;
    const int *top_k, *masked_start, *masked_ids;
    long long* token_ids;
    const long long* seats;  // or none
    long long* last_token_ids;
    long long num_seats;
};

// What a row asks for. Read while its logits are fetched.
struct Asked {
    bool is_greedy;
    float rate;
    int top_k;
    double top_p, uniform;
    uint64_t least_weight;
    long long* kept;  // where its seat's token is kept, or none

    __device__ __forceinline__ void read(const Arguments& arguments, int row) {
        const double temperature = arguments.temperature[row], min_p = arguments.min_p[row];
        top_k = arguments.top_k[row];
        top_p = arguments.top_p[row];
        uniform = arguments.uniforms[row];
        is_greedy = temperature < LEAST_TEMPERATURE;
        rate = LOG2_E / temperature;
        least_weight = ceil(min_p * (uint64_t(1) << WEIGHT_BITS));
        const long long seat = arguments.seats == nullptr ? -1 : arguments.seats[row];
        const bool is_kept = 0 <= seat && seat < arguments.num_seats;
        kept = is_kept ? arguments.last_token_ids + seat : nullptr;
    }

    __device__ __forceinline__ void store(long long* token_id, int token) const {
        *token_id = token;
        if (kept != nullptr) *kept = token;
    }
};

struct Shared {
    Asked asked;
    uint64_t warps[WARPS];
    uint64_t best;               // of the block
    uint64_t total;              // of its weights
    uint64_t digits[2][DIGITS];  // of the block, in turns
    uint64_t all_digits[DIGITS];
    uint64_t found[2];  // a digit, and what is wanted of it
    uint32_t low[DIGITS][COPIES], high[DIGITS][COPIES];  // HALF_BITS of weights, and those above
};

// floor(share * total), or rounded up, of a share of 53 bits.
__device__ __forceinline__ uint64_t share_of(double share, uint64_t total, bool is_rounded_up) {
    const uint64_t bits = share * 9007199254740992.0;  // 2^53
    uint64_t low = bits * total, high = __umul64hi(bits, total);
    if (is_rounded_up) {
        const uint64_t sum = low + ((uint64_t(1) << 53) - 1);
        high += sum < low;
        low = sum;
    }
    return high << 11 | low >> 53;
}

// What is drawn from: weights of logits of at least `least`, themselves of at least `least_weight`.
struct Kept {
    float largest, rate, least;
    uint64_t least_weight;

    __device__ __forceinline__ bool is_all() const {
        return __float_as_uint(least) == NONE && least_weight == 0;
    }

    template <bool IS_CUT>
    __device__ __forceinline__ uint64_t weight(float value) const {
        if (IS_CUT && value < least) return 0;
        const uint64_t weight = weight_of(value, largest, rate);
        return IS_CUT && weight < least_weight ? 0 : weight;
    }
};

// ---- the least logit that is kept --------------------------------------------------------------

__device__ __forceinline__ uint32_t bits_of(float value) {
    return order_of(value) >> (32 - ORDER_BITS);
}

// Of the logits whose bits above `shift + DIGIT_BITS` are `above`: the weight by the next digit.
template <class Weight>
__device__ __forceinline__ void add_digits(Shared& shared, const Part& part, int shift,
                                           uint32_t above, Weight weight_of_value) {
    for (int i = threadIdx.x; i < DIGITS * COPIES; i += THREADS)
        (&shared.low[0][0])[i] = (&shared.high[0][0])[i] = 0;
    __syncthreads();
    const int copy = threadIdx.x % COPIES;
    for (int v = threadIdx.x; v < part.num_vectors; v += THREADS) {
        float values[WIDTH];
        part.load(v, values);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const uint32_t bits = bits_of(values[i]);
            if (bits >> shift >> DIGIT_BITS != above) continue;
            const uint64_t weight = weight_of_value(values[i]);
            const uint32_t digit = bits >> shift & (DIGITS - 1);
            // Of as many tokens as have this copy no sum has more than 32 bits.
            const uint32_t low = uint32_t(weight) & ((1 << HALF_BITS) - 1);
            const uint32_t high = uint32_t(weight >> HALF_BITS);
            if (low != 0) atomicAdd(&shared.low[digit][copy], low);
            if (high != 0) atomicAdd(&shared.high[digit][copy], high);
        }
    }
    __syncthreads();
}

// All blocks' weight of each digit into all_digits.
__device__ __forceinline__ void gather_digits(Shared& shared, int turn) {
    const int digit = threadIdx.x;
    if (digit < DIGITS) {
        uint64_t sum = 0;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int copy = (i + digit / (32 / COPIES)) % COPIES;  // so that lanes use all banks
            sum += shared.low[digit][copy] + (uint64_t(shared.high[digit][copy]) << HALF_BITS);
        }
        shared.digits[turn][digit] = sum;
    }
    cluster_sync();
    if (digit < DIGITS) {
        uint64_t sum = 0;
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block)
            sum += load_from_cluster(&shared.digits[turn][digit], block);
        shared.all_digits[digit] = sum;
    }
    __syncthreads();
}

// The largest logit such that those of at least it weigh as much as is wanted together: `wanted`,
// or if that is 0 the share `mass` of all. One digit of its bits after the other.
template <class Weight>
__device__ __forceinline__ float least_kept(Shared& shared, const Part& part, uint64_t wanted,
                                            double mass, Weight weight_of_value) {
    uint32_t above = 0;
    for (int shift = ORDER_BITS - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        add_digits(shared, part, shift, above, weight_of_value);
        gather_digits(shared, shift / DIGIT_BITS % 2);
        if (threadIdx.x < 32) {
            constexpr int EACH = DIGITS / 32;  // a lane's digits, the largest first
            const int first = DIGITS - 1 - int(threadIdx.x) * EACH;
            uint64_t sum = 0;
#pragma unroll
            for (int i = 0; i < EACH; ++i) sum += shared.all_digits[first - i];
            const uint64_t sums = sum_up_to_lane(sum);
            if (wanted == 0) {
                const uint64_t total = __shfl_sync(ALL_LANES, sums, 31);
                wanted = max(share_of(mass, total, true), uint64_t(1));
            }
            uint64_t before = sums - sum;
            if (before < wanted && wanted <= sums) {
                int digit = first;
                while (before + shared.all_digits[digit] < wanted)
                    before += shared.all_digits[digit--];
                shared.found[0] = digit;
                shared.found[1] = wanted - before;
            }
        }
        __syncthreads();
        above = above << DIGIT_BITS | uint32_t(shared.found[0]);
        wanted = shared.found[1];
    }
    return value_of(above << (32 - ORDER_BITS) | (LOGIT_BYTES == 2 && !(above >> 15) ? 0xFFFF : 0));
}

// ---- the token ---------------------------------------------------------------------------------

// Cells are what a warp reads at a time, 32 vectors, in the order of ids.
__device__ __forceinline__ int num_cells(const Part& part) { return (part.num_vectors + 31) / 32; }

template <bool IS_CUT>
__device__ __forceinline__ void weigh_cells(uint64_t* cells, const Part& part, const Kept& kept) {
    const int lane = threadIdx.x % 32;
    for (int cell = threadIdx.x / 32; cell < num_cells(part); cell += WARPS) {
        const int vector = 32 * cell + lane;
        uint64_t sum = 0;
        if (vector < part.num_vectors) {
            float values[WIDTH];
            part.load(vector, values);
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) sum += kept.weight<IS_CUT>(values[i]);
        }
        // Below 2^44, so that two sums of 32 bits hold those of all lanes.
        const uint64_t low = __reduce_add_sync(ALL_LANES, uint32_t(sum) & 0xFFFFFF);
        const uint64_t high = __reduce_add_sync(ALL_LANES, uint32_t(sum >> 24));
        if (lane == 0) cells[cell] = low + (high << 24);
    }
    __syncthreads();
}

// By one warp, in the cell in which the sum exceeds `target`: the token at which it does.
template <bool IS_CUT>
__device__ __forceinline__ void find_token(const Part& part, const Kept& kept, int cell,
                                           uint64_t target, const Asked& asked,
                                           long long* token_id) {
    const int vector = 32 * cell + threadIdx.x % 32;
    uint64_t weights[WIDTH] = {}, sum = 0;
    if (vector < part.num_vectors) {
        float values[WIDTH];
        part.load(vector, values);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) sum += weights[i] = kept.weight<IS_CUT>(values[i]);
    }
    uint64_t end = sum_up_to_lane(sum);
    if (target >= end || target < end - sum) return;
    int place = WIDTH - 1;
#pragma unroll
    for (int i = WIDTH - 1; i > 0; --i) {
        end -= weights[i];  // the sum before token i
        if (target < end) place = i - 1;
    }
    asked.store(token_id, part.token(vector, place));
}

template <bool IS_CUT>
__device__ __forceinline__ void draw(Shared& shared, uint64_t* cells, const Part& part,
                                     const Kept& kept, uint32_t rank, long long* token_id) {
    weigh_cells<IS_CUT>(cells, part, kept);
    const int lane = threadIdx.x % 32, count = num_cells(part), each = (count + 31) / 32;
    const int first = min(lane * each, count), end = min(first + each, count);
    const bool is_first_warp = threadIdx.x < 32;
    uint64_t sum = 0, sums = 0;
    if (is_first_warp) {
        for (int cell = first; cell < end; ++cell) sum += cells[cell];
        sums = sum_up_to_lane(sum);
        if (lane == 31) shared.total = sums;
    }
    cluster_sync();
    if (!is_first_warp) return;
    const uint64_t total = lane < CLUSTER ? load_from_cluster(&shared.total, lane) : 0;
    const uint64_t totals = sum_up_to_lane(total);
    uint64_t target = share_of(shared.asked.uniform, __shfl_sync(ALL_LANES, totals, 31), false);
    target -= __shfl_sync(ALL_LANES, totals - total, int(rank));  // those of the blocks before
    uint64_t before = sums - sum;
    const bool is_here = before <= target && target < sums;  // a target of blocks before is huge
    int cell = first;
    if (is_here)
        while (before + cells[cell] <= target) before += cells[cell++];
    const int owner = __ffs(__ballot_sync(ALL_LANES, is_here)) - 1;
    if (owner < 0) return;  // another block's
    cell = __shfl_sync(ALL_LANES, cell, owner);
    find_token<IS_CUT>(part, kept, cell, __shfl_sync(ALL_LANES, target - before, owner),
                       shared.asked, token_id);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 3)
    sample(const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ Shared shared;
    uint64_t* const cells =
        reinterpret_cast<uint64_t*>(memory + arguments.rows.block_vectors * VECTOR_BYTES);
    const int row = blockIdx.x / CLUSTER;
    const uint32_t rank = cluster_rank();
    const Part part(memory, arguments.rows, rank);
    wait_for_previous_kernels();
    allow_next_kernel();

    part.fetch(arguments.rows.at(row));
    const int first_masked = arguments.masked_start[row], end = arguments.masked_start[row + 1];
    if (threadIdx.x == 0) shared.asked.read(arguments, row);
    copy_wait<0>();
    if (first_masked < end) {
        __syncthreads();
        for (int i = first_masked + int(threadIdx.x); i < end; i += THREADS)
            part.forbid(memory, arguments.masked_ids[i]);
        __syncthreads();
    }
    const uint64_t own = largest_in_block(part.best(), shared.warps);
    if (threadIdx.x == 0) shared.best = own;
    cluster_sync();
    const uint64_t best = largest_in_cluster(&shared.best);
    const bool is_number = is_finite(order_in(best));
    const Asked& asked = shared.asked;
    long long* const token_id = arguments.token_ids + row;
    if (!is_number || asked.is_greedy) {
        if (rank == 0 && threadIdx.x == 0)
            asked.store(token_id, is_number ? int(token_in(best)) : -1);
    } else {
        Kept kept{value_of(order_in(best)), asked.rate, __uint_as_float(NONE), 0};
        if (0 < asked.top_k && asked.top_k < arguments.rows.vocab_size)
            kept.least =
                least_kept(shared, part, asked.top_k, 0, [](float) { return uint64_t(1); });
        if (asked.top_p < 1)
            kept.least = least_kept(shared, part, 0, asked.top_p,
                                    [&](float value) { return kept.weight<true>(value); });
        kept.least_weight = asked.least_weight;
        if (kept.is_all())
            draw<false>(shared, cells, part, kept, rank, token_id);
        else
            draw<true>(shared, cells, part, kept, rank, token_id);
    }
    cluster_sync();
}
