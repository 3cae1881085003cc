// The experts of a token by its logits, in one warp: the largest in bf16, of equal ones the lowest
// number, and their softmax.

// Logits as numbers in the order in which they are chosen, a NaN before all others. Each has a
// number of its own above zero, which stands for no expert.
constexpr uint32_t KEY_OF_NAN = 0xFFFFFFFF;

__device__ __forceinline__ uint32_t key_of(uint32_t bf16_bits, int expert) {
    if ((bf16_bits & 0x7FFF) > 0x7F80) return KEY_OF_NAN;
    if (bf16_bits == 0x8000) bf16_bits = 0;  // which equals the other zero
    const uint32_t order = bf16_bits & 0x8000 ? bf16_bits ^ 0xFFFF : bf16_bits | 0x8000;
    return order << 16 | (0xFFFF - expert);
}

__device__ __forceinline__ float logit_of(uint32_t key) {
    const uint32_t order = key >> 16;
    return __uint_as_float((order & 0x8000 ? order ^ 0x8000 : order ^ 0xFFFF) << 16);
}

// Experts that this rank has, of all.
struct OwnExperts {
    int first, count;
};

// Of a token, the k-th in lane k: an expert and its weight in bf16; -1 and NaN with a NaN among the
// logits.
struct Choice {
    int expert;
    unsigned short weight;

    // Counted from the first of this rank's; another rank's as -1 and 0.
    template <typename Arguments>
    __device__ __forceinline__ void store(const Arguments& arguments, int token) const {
        const int lane = threadIdx.x % 32;
        if (lane >= CHOSEN) return;
        const long long place = token * (long long)CHOSEN + lane;
        int number = expert - arguments.own.first;
        unsigned short share = weight;
        if (uint32_t(number) >= uint32_t(arguments.own.count)) {
            number = -1;
            if (expert >= 0) share = 0;
        }
        arguments.chosen[place] = number;
        arguments.chosen_weights[place] = share;
    }
};

// keys: EACH of a lane, of different experts.
template <int EACH>
__device__ __forceinline__ Choice choose_by_keys(uint32_t (&keys)[EACH]) {
    static_assert(CHOSEN <= 32);
    const int lane = threadIdx.x % 32;
    uint32_t own = 0, largest = 0;  // of this lane's choice, and the first
#pragma unroll
    for (int k = 0; k < CHOSEN; ++k) {
        uint32_t best = keys[0];
#pragma unroll
        for (int i = 1; i < EACH; ++i) best = max(best, keys[i]);
        best = __reduce_max_sync(ALL_LANES, best);
        if (k == 0) largest = best;
        if (lane == k) own = best;
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (keys[i] == best) keys[i] = 0;
    }
    float power = 0;
    if (lane < CHOSEN) power = exp2_approx((logit_of(own) - logit_of(largest)) * LOG2_E);
    float sum = power;
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lanes);
    const bool has_nan = largest == KEY_OF_NAN;
    const uint32_t weight = pack_bf16(power / sum, 0);
    return {has_nan ? -1 : static_cast<int>(0xFFFF - (own & 0xFFFF)),
            has_nan ? static_cast<unsigned short>(0x7FC0) : static_cast<unsigned short>(weight)};
}
