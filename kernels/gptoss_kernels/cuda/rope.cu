// q and k rotated by their positions; q to a tensor of its own, k and v to their slots of the caches.
//
// Four lanes share a head: each has 8 elements of its first half, and the 8 of the second half that
// they are rotated with.

constexpr int WIDTH = 8;  // elements of an access
constexpr int LANES = HALF / WIDTH;

using bf16 = unsigned short;

struct Arguments {
    RopeArguments rope;
    const bf16* qkv;
    int num_tokens;
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
            const uint32_t first = a.words[i], second = b.words[i];
            a.words[i] = first_halves(first, second, angles.cos + 2 * i, angles.sin + 2 * i);
            b.words[i] = second_halves(first, second, angles.cos + 2 * i, angles.sin + 2 * i);
        }
    }

    __device__ __forceinline__ void store(bf16* pointer, float = 1) const {
        *reinterpret_cast<Vector*>(pointer) = a;
        *reinterpret_cast<Vector*>(pointer + HALF) = b;
    }

    __device__ __forceinline__ void store(unsigned char* pointer, float scale) const {
        const Scale divisor(scale);
        *reinterpret_cast<Bytes*>(pointer) = quantised(a, divisor);
        *reinterpret_cast<Bytes*>(pointer + HALF) = quantised(b, divisor);
    }

    static __device__ __forceinline__ Bytes quantised(const Vector& x, const Scale& scale) {
        Bytes bytes;
#pragma unroll
        for (int i = 0; i < WIDTH / 4; ++i)
            bytes.words[i] = scale.quantise(x.words[2 * i], x.words[2 * i + 1]);
        return bytes;
    }
};

constexpr int RESIDENT_BLOCKS = 12;  // of a multiprocessor: more than 40 registers would cost one

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    rope_and_cache_write(const __grid_constant__ Arguments arguments) {
    const RopeArguments& rope = arguments.rope;
    const int num_heads = rope.num_heads, num_kv_heads = rope.num_kv_heads;
    const int num_rotated = num_heads + num_kv_heads, num_all = num_rotated + num_kv_heads;
    const uint32_t head_of_all = (blockIdx.x * THREADS + threadIdx.x) / LANES;
    const long long token = head_of_all / uint32_t(num_all);
    const int head = head_of_all % uint32_t(num_all), column = threadIdx.x % LANES * WIDTH;
    const bool is_token = token < arguments.num_tokens;
    // All but qkv is older than the kernel that wrote that.
    const long long position = is_token ? __ldcg(rope.positions + token) : -1;
    const long long slot = is_token ? __ldcg(rope.slots + token) : -1;
    const bool is_key = head < num_rotated;
    const float* const scales = is_key ? rope.key_scale : rope.value_scale;
    const int kv_head = head - (is_key ? num_heads : num_rotated);  // of a query's head: negative
    const float scale = FP8 && kv_head >= 0 && scales ? scales[kv_head] : 1;
    Angles angles;
    angles.load(rope.rope_table + position * DIM + column, rope.has_position(position));
    wait_for_previous_kernels();
    allow_next_kernel();
    if (!is_token) return;

    Head values;
    values.load(arguments.qkv + (token * num_all + head) * DIM + column);
    if (head < num_rotated) values.rotate(angles);
    if (head < num_heads) {
        values.store(rope.query + (token * num_heads + head) * DIM + column);
        return;
    }
    if (!rope.has_slot(slot)) return;
    cached* const cache = is_key ? rope.key_cache : rope.value_cache;
    values.store(cache + uint64_t(rope.row_of(slot, kv_head)) * DIM + column, scale);
}
