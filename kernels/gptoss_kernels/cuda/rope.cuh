// How q and k are rotated, and where k and v lie in the caches: what rope.cu and norm_linear_fp8.cu
// share.
//
// Defined by whoever compiles this: FP8, whether caches hold e4m3.

constexpr int DIM = 64, HALF = DIM / 2;  // of a head

#if FP8
using cached = unsigned char;
#else
using cached = unsigned short;
#endif

struct RopeArguments {
    const long long* positions;
    const float* rope_table;
    cached *key_cache, *value_cache;
    const long long* slots;
    const float *key_scale, *value_scale;  // or none
    unsigned short* query;
    int num_heads, num_kv_heads, page_shift;  // pages of 2^page_shift slots
    long long num_positions, num_slots;

    __device__ __forceinline__ bool has_position(long long position) const {
        return uint64_t(position) < uint64_t(num_positions);
    }

    // A negative slot is beyond the last one, as a number without a sign.
    __device__ __forceinline__ bool has_slot(long long slot) const {
        return uint64_t(slot) < uint64_t(num_slots);
    }

    // Of a cache's rows of DIM.
    __device__ __forceinline__ uint32_t row_of(long long slot, int kv_head) const {
        const uint32_t page = uint32_t(slot) >> page_shift;
        const uint32_t offset = uint32_t(slot) - (page << page_shift);
        return ((page * num_kv_heads + kv_head) << page_shift) + offset;
    }
};

// (a, b) -> (a cos - b sin, b cos + a sin), rounded once. Fused by hand: as the compiler would like
// to, but in the same way whatever is around it.
__device__ __forceinline__ float first_half(float a, float b, float cos, float sin) {
    return fmaf(-b, sin, a * cos);
}

__device__ __forceinline__ float second_half(float a, float b, float cos, float sin) {
    return fmaf(a, sin, b * cos);
}

// (a, b) of two neighbouring columns.
__device__ __forceinline__ uint32_t first_halves(uint32_t a, uint32_t b, const float* cos,
                                                 const float* sin) {
    return pack_bf16(first_half(low_bf16(a), low_bf16(b), cos[0], sin[0]),
                     first_half(high_bf16(a), high_bf16(b), cos[1], sin[1]));
}

__device__ __forceinline__ uint32_t second_halves(uint32_t a, uint32_t b, const float* cos,
                                                  const float* sin) {
    return pack_bf16(second_half(low_bf16(a), low_bf16(b), cos[0], sin[0]),
                     second_half(high_bf16(a), high_bf16(b), cos[1], sin[1]));
}

// What a key-value head is divided by.
struct Scale {
    float value, inverse;

    __device__ __forceinline__ explicit Scale(float value) : value(value), inverse(1 / value) {}

    // Rounded as a division is, where that decides what e4m3 becomes of it. Elsewhere that is 448 or
    // 0, and the remainder of inf is no number, and that of -0 would take its sign.
    __device__ __forceinline__ float divide(float x) const {
        const float quotient = x * inverse, size = fabsf(quotient);
        const float better = fmaf(fmaf(-value, quotient, x), inverse, quotient);
        return 1e-5f < size && size < 1e3f ? better : quotient;
    }

    // Four values in two pairs. What was rotated has been rounded to bf16, as if it had been stored.
    __device__ __forceinline__ uint32_t quantise(uint32_t low, uint32_t high) const {
        return pack_e4m3(divide(low_bf16(low)), divide(high_bf16(low)), divide(low_bf16(high)),
                         divide(high_bf16(high)));
    }
};
