// out = x @ weight^T in bf16, of so few rows of x that reading the weight is all that takes time.
//
// Blocks take tiles of 8 rows of the weight in turns. A tile is one copy into the next of STAGES
// slots; for the first ones a block sends before the kernel before it has ended. WARPS warps share
// K: each has its columns of all of x in registers, and multiplies the 8 rows with 16 of x at a
// time, with sums in fp32. What the warps leave of a tile some of their threads add up and store,
// while the others begin with the next one.
//
// Defined by whoever compiles this: K, TOKENS, WARPS, STAGES, SHARED_BYTES.

constexpr int UNIT = 8;    // rows of both matrices: of x twice as many are multiplied at a time
constexpr int CHUNK = 32;  // of K: 16 bytes from each of a row's four lanes, two multiplications
constexpr int CHUNKS = (K + CHUNK - 1) / CHUNK;
constexpr int WARP_CHUNKS = (CHUNKS + WARPS - 1) / WARPS;
constexpr int THREADS = WARPS * 32;
constexpr int SETS = TOKENS / UNIT;
constexpr int PAIRS_OF_SETS = (SETS + 1) / 2;
static_assert(TOKENS % UNIT == 0 && K % 8 == 0, "rows of 16 bytes");

constexpr int ROW_BYTES = K * 2;
constexpr int TILE_BYTES = UNIT * ROW_BYTES;
constexpr int OUTPUTS = SETS * 32;  // of a tile, two values each
constexpr int PARTIALS_OFFSET = STAGES * TILE_BYTES;
constexpr int FULL_OFFSET = PARTIALS_OFFSET + 2 * WARPS * OUTPUTS * 8;
static_assert(FULL_OFFSET + STAGES * 8 <= SHARED_BYTES, "the launch gives too little memory");

struct Arguments {
    const unsigned short* x;
    const unsigned short* weight;  // whose rows follow each other
    unsigned short* out;
    int M;
    int N;  // a multiple of UNIT
    long long x_stride;
    long long out_stride;
};

// By one thread. index: of the block's tiles.
__device__ __forceinline__ void send_for_tile(uint32_t shared, const Arguments& arguments,
                                              int index, int slot) {
    const uint32_t full = shared + FULL_OFFSET + slot * 8;
    const long long tile = blockIdx.x + index * gridDim.x;
    barrier_expect(full, TILE_BYTES);
    load_bytes_once(shared + slot * TILE_BYTES, arguments.weight + tile * (UNIT * K), TILE_BYTES,
                    full);
}

// A warp's part of K.
struct Multiplier {
    const int warp;
    const int lane;
    uint4 x[SETS][WARP_CHUNKS];  // 8 values of row lane / 4 of the set

    __device__ __forceinline__ int column_of(int chunk) const {
        return (warp * WARP_CHUNKS + chunk) * CHUNK + lane % 4 * 8;
    }

    __device__ __forceinline__ bool is_inside(int chunk) const {
        return CHUNKS % WARPS == 0 && K % CHUNK == 0 || column_of(chunk) < K;
    }

    __device__ __forceinline__ void load_x(const Arguments& arguments) {
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            const int token = set * UNIT + lane / 4;
            const unsigned short* row = arguments.x + token * arguments.x_stride;
#pragma unroll
            for (int chunk = 0; chunk < WARP_CHUNKS; ++chunk) {
                x[set][chunk] = {};
                if (token < arguments.M && is_inside(chunk))
                    x[set][chunk] = *reinterpret_cast<const uint4*>(row + column_of(chunk));
            }
        }
    }

    // Zeros beyond the row, where another one lies, or nothing: a NaN there would survive a zero
    // in x.
    __device__ __forceinline__ uint4 weight_of(uint32_t row, int chunk) const {
        uint4 v = {};
        if (is_inside(chunk))
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                         : "r"(row + column_of(chunk) * 2)
                         : "memory");
        return v;
    }

    // Leaves the sums of a tile where all warps' are added up.
    __device__ __forceinline__ void multiply_tile(uint32_t tile, float2* partials) const {
        const uint32_t row = tile + lane / 4 * ROW_BYTES;
        // Two chains, as one multiplication waits for the one before.
        float sums[PAIRS_OF_SETS][2][4] = {};
#pragma unroll
        for (int chunk = 0; chunk < WARP_CHUNKS; ++chunk) {
            const uint4 weight = weight_of(row, chunk);
            // Which of K a lane has does not matter where both matrices have the same.
            const uint32_t b[2][2] = {{weight.x, weight.y}, {weight.z, weight.w}};
#pragma unroll
            for (int pair = 0; pair < PAIRS_OF_SETS; ++pair) {
                const uint4 upper = x[pair * 2][chunk];
                uint4 lower = {};
                if (pair * 2 + 1 < SETS) lower = x[pair * 2 + 1][chunk];
                const uint32_t a[2][4] = {{upper.x, lower.x, upper.y, lower.y},
                                          {upper.z, lower.z, upper.w, lower.w}};
                multiply_bf16(sums[pair][0], a[0], b[0]);
                multiply_bf16(sums[pair][1], a[1], b[1]);
            }
        }
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            const float(&both)[2][4] = sums[set / 2];
            const int i = set % 2 * 2;
            partials[warp * OUTPUTS + set * 32 + lane] =
                make_float2(both[0][i] + both[1][i], both[0][i + 1] + both[1][i + 1]);
        }
    }
};

// Two columns of a row of out.
__device__ __forceinline__ void store_output(const Arguments& arguments, int index, int output,
                                             const float2* partials) {
    const int lane = output % 32, token = output / 32 * UNIT + lane / 4;
    if (token >= arguments.M) return;
    float2 sum = {};
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        const float2 part = partials[warp * OUTPUTS + output];
        sum.x += part.x;
        sum.y += part.y;
    }
    const int column = (blockIdx.x + index * gridDim.x) * UNIT + lane % 4 * 2;
    store_global(arguments.out + token * arguments.out_stride + column, pack_bf16(sum.x, sum.y));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    linear(const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(128) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0);
    const int tiles = (arguments.N / UNIT - int(blockIdx.x) - 1) / int(gridDim.x) + 1;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < STAGES; ++slot)
            barrier_init(shared + FULL_OFFSET + slot * 8, 1);
        barrier_init_fence();
        for (int index = 0; index < min(STAGES, tiles); ++index)
            send_for_tile(shared, arguments, index, index);
    }
    __syncthreads();  // the barriers are initialised
    wait_for_previous_kernels();
    allow_next_kernel();
    Multiplier multiplier{warp, static_cast<int>(threadIdx.x % 32)};
    multiplier.load_x(arguments);
    int slot = 0;
    uint32_t phase = 0;
#pragma unroll 1
    for (int index = 0; index < tiles; ++index) {
        // In turns: the sums of the tile before are still read.
        float2* partials =
            reinterpret_cast<float2*>(memory + PARTIALS_OFFSET) + index % 2 * WARPS * OUTPUTS;
        barrier_wait(shared + FULL_OFFSET + slot * 8, phase);
        multiplier.multiply_tile(shared + slot * TILE_BYTES, partials);
        __syncthreads();
        if (threadIdx.x == THREADS - 1 && index + STAGES < tiles)
            send_for_tile(shared, arguments, index + STAGES, slot);
        for (int output = threadIdx.x; output < OUTPUTS; output += THREADS)
            store_output(arguments, index, output, partials);
        if (++slot == STAGES) {
            slot = 0;
            phase ^= 1;
        }
    }
}
