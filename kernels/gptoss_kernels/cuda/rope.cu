// q and k rotated by their positions; q to a tensor of its own, k and v to their slots of the caches.
//
// Four lanes share a head: each has 8 elements of its first half, and the 8 of the second half that
// they are rotated with.

constexpr int DIM = 64, HALF = DIM / 2;
constexpr int WIDTH = 8;  // elements of an access
constexpr int LANES = HALF / WIDTH;

using bf16 = unsigned short;
#if FP8
using cached = unsigned char;
#else
using cached = bf16;
#endif

struct Arguments {
    const bf16* qkv;
    const long long* positions;
    const float* rope_table;
    cached *key_cache, *value_cache;
    const long long* slots;
    const float *key_scale, *value_scale;  // or none
    bf16* query;
    int num_tokens, num_heads, num_kv_heads, page_shift;  // pages of 2^page_shift slots
    long long num_positions, num_slots;
};

struct alignas(16) Vector {
    uint32_t words[WIDTH / 2];  // pairs of bf16
};

struct alignas(16) Floats {
    float values[4];
};

struct alignas(8) Bytes {
    uint32_t words[WIDTH / 4];  // e4m3
};

struct Angles {
    float cos[WIDTH], sin[WIDTH];

    // Of a position that the table does not have: NaN, and nothing is read.
    __device__ __forceinline__ void load(const float* row, bool is_there) {
#pragma unroll
        for (int i = 0; i < WIDTH; i += 4) {
            Floats c, s;
            c.values[0] = c.values[1] = c.values[2] = c.values[3] = __int_as_float(-1);
            s = c;
            if (is_there) {
                c = *reinterpret_cast<const Floats*>(row + i);
                s = *reinterpret_cast<const Floats*>(row + HALF + i);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                cos[i + j] = c.values[j];
                sin[i + j] = s.values[j];
            }
        }
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

    __device__ __forceinline__ Bytes quantise(const Vector& x) const {
        Bytes bytes;
#pragma unroll
        for (int i = 0; i < WIDTH / 4; ++i) {
            const uint32_t low = x.words[2 * i], high = x.words[2 * i + 1];
            bytes.words[i] = pack_e4m3(divide(low_bf16(low)), divide(high_bf16(low)),
                                       divide(low_bf16(high)), divide(high_bf16(high)));
        }
        return bytes;
    }
};

// What a lane has of a head.
struct Head {
    Vector a, b;

    __device__ __forceinline__ void load(const bf16* pointer) {
        a = *reinterpret_cast<const Vector*>(pointer);
        b = *reinterpret_cast<const Vector*>(pointer + HALF);
    }

    __device__ __forceinline__ void rotate(const Angles& angles) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) {
            const float a_low = low_bf16(a.words[i]), a_high = high_bf16(a.words[i]);
            const float b_low = low_bf16(b.words[i]), b_high = high_bf16(b.words[i]);
            const float cos_low = angles.cos[2 * i], cos_high = angles.cos[2 * i + 1];
            const float sin_low = angles.sin[2 * i], sin_high = angles.sin[2 * i + 1];
            a.words[i] = pack_bf16(first_half(a_low, b_low, cos_low, sin_low),
                                   first_half(a_high, b_high, cos_high, sin_high));
            b.words[i] = pack_bf16(second_half(a_low, b_low, cos_low, sin_low),
                                   second_half(a_high, b_high, cos_high, sin_high));
        }
    }

    __device__ __forceinline__ void store(bf16* pointer, float = 1) const {
        *reinterpret_cast<Vector*>(pointer) = a;
        *reinterpret_cast<Vector*>(pointer + HALF) = b;
    }

    // What was rotated has been rounded to bf16, as if it had been stored.
    __device__ __forceinline__ void store(unsigned char* pointer, float scale) const {
        const Scale divisor(scale);
        *reinterpret_cast<Bytes*>(pointer) = divisor.quantise(a);
        *reinterpret_cast<Bytes*>(pointer + HALF) = divisor.quantise(b);
    }
};

constexpr int RESIDENT_BLOCKS = 12;  // of a multiprocessor: more than 40 registers would cost one

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    rope_and_cache_write(const __grid_constant__ Arguments arguments) {
    allow_next_kernel();
    const int num_heads = arguments.num_heads, num_kv_heads = arguments.num_kv_heads;
    const int num_rotated = num_heads + num_kv_heads, num_all = num_rotated + num_kv_heads;
    const uint32_t head_of_all = (blockIdx.x * THREADS + threadIdx.x) / LANES;
    const long long token = head_of_all / uint32_t(num_all);
    const int head = head_of_all % uint32_t(num_all), column = threadIdx.x % LANES * WIDTH;
    const bool is_token = token < arguments.num_tokens;
    // All but qkv is older than the kernel that wrote that.
    const long long position = is_token ? __ldcg(arguments.positions + token) : -1;
    const long long slot = is_token ? __ldcg(arguments.slots + token) : -1;
    const bool is_key = head < num_rotated;
    const float* const scales = is_key ? arguments.key_scale : arguments.value_scale;
    const int kv_head = head - (is_key ? num_heads : num_rotated);  // of a query's head: negative
    const float scale = FP8 && kv_head >= 0 && scales ? scales[kv_head] : 1;
    Angles angles;
    angles.load(arguments.rope_table + position * DIM + column,
                uint64_t(position) < uint64_t(arguments.num_positions));
    wait_for_previous_kernels();
    if (!is_token) return;

    Head values;
    values.load(arguments.qkv + (token * num_all + head) * DIM + column);
    if (head < num_rotated) values.rotate(angles);
    if (head < num_heads) {
        values.store(arguments.query + (token * num_heads + head) * DIM + column);
        return;
    }
    // A negative slot is beyond the last one, as a number without a sign.
    if (uint64_t(slot) >= uint64_t(arguments.num_slots)) return;
    const uint32_t page = uint32_t(slot) >> arguments.page_shift;
    const uint32_t offset = uint32_t(slot) - (page << arguments.page_shift);
    const uint32_t row = ((page * num_kv_heads + kv_head) << arguments.page_shift) + offset;
    cached* const cache = is_key ? arguments.key_cache : arguments.value_cache;
    values.store(cache + uint64_t(row) * DIM + column, scale);
}
