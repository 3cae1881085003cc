// What linear_fp8.cu computes, without bias and residual, for so few rows of x and so many of the
// weight that reading the weight is all that takes time.
//
// Blocks take tiles of 16 rows of the weight in turns. A tile is one copy into the next of STAGES
// slots; for the first ones a block sends before the kernel before it has ended. WARPS warps share
// K: each has its columns of all of x in registers, as halves, which hold e4m3 values and their
// products exactly, and multiplies 8 rows of the weight with 16 of x at a time, with sums in fp32.
// What the warps leave of a tile some of their threads add up and store, while the others begin
// with the next one.
//
// Defined by whoever compiles this: K, TOKENS, WARPS, STAGES, SHARED_BYTES.

constexpr int ROWS = 16;  // of the weight
constexpr int UNIT = 8;   // rows of both matrices: of x twice as many are multiplied at a time
constexpr int UNITS = ROWS / UNIT;
constexpr int GROUP = 128;  // of K, with one scale
constexpr int K_GROUPS = (K + GROUP - 1) / GROUP;
constexpr int CHUNK = 64;  // of K: 16 bytes from each of a row's four lanes, four multiplications
constexpr int CHUNKS = (K + CHUNK - 1) / CHUNK;
constexpr int WARP_CHUNKS = (CHUNKS + WARPS - 1) / WARPS;
constexpr int THREADS = WARPS * 32;
constexpr int SETS = TOKENS / UNIT;
constexpr int PAIRS_OF_SETS = (SETS + 1) / 2;
static_assert(TOKENS % UNIT == 0 && K % 16 == 0, "rows of 16 bytes");

constexpr int TILE_BYTES = ROWS * K;
constexpr int OUTPUTS = UNITS * SETS * 32;  // of a tile, two values each
constexpr int PARTIALS_OFFSET = STAGES * TILE_BYTES;
constexpr int FULL_OFFSET = PARTIALS_OFFSET + 2 * WARPS * OUTPUTS * 8;
static_assert(FULL_OFFSET + STAGES * 8 <= SHARED_BYTES, "the launch gives too little memory");

struct Arguments {
    const unsigned char* x;
    const float* x_scale;
    const unsigned char* weight;  // whose rows follow each other
    const float* weight_scale;
    unsigned short* out;
    int M;
    int N;  // a multiple of ROWS
    long long x_stride;
    long long x_scale_stride;
    long long out_stride;
};

// The first row of a tile. index: of the block's.
__device__ __forceinline__ int row_of(int index) {
    return (int(blockIdx.x) + index * int(gridDim.x)) * ROWS;
}

// By one thread.
__device__ __forceinline__ void send_for_tile(uint32_t shared, const Arguments& arguments,
                                              int index, int slot) {
    const uint32_t full = shared + FULL_OFFSET + slot * 8;
    barrier_expect(full, TILE_BYTES);
    load_bytes_once(shared + slot * TILE_BYTES,
                    arguments.weight + static_cast<long long>(row_of(index)) * K, TILE_BYTES,
                    full);
}

// A warp's part of K.
struct Multiplier {
    const Arguments& arguments;
    const int warp;
    const int lane;
    uint32_t x[SETS][WARP_CHUNKS][8];  // 16 values of row lane / 4 of the set, as halves
    float x_scale[SETS][WARP_CHUNKS];  // of that row
    float weight_scale[WARP_CHUNKS];   // of the tile

    __device__ __forceinline__ int chunk_of(int chunk) const { return warp * WARP_CHUNKS + chunk; }

    __device__ __forceinline__ bool is_chunk(int chunk) const {
        return CHUNKS % WARPS == 0 || chunk_of(chunk) < CHUNKS;
    }

    __device__ __forceinline__ int column_of(int chunk) const {
        return chunk_of(chunk) * CHUNK + lane % 4 * 16;
    }

    __device__ __forceinline__ bool is_inside(int chunk) const {
        return CHUNKS % WARPS == 0 && K % CHUNK == 0 || column_of(chunk) < K;
    }

    __device__ __forceinline__ int group_of(int chunk) const {
        return chunk_of(chunk) * CHUNK / GROUP;
    }

    __device__ __forceinline__ void load_x() {
#pragma unroll
        for (int set = 0; set < SETS; ++set) {
            const int token = set * UNIT + lane / 4;
            const bool is_token = token < arguments.M;
            const unsigned char* row = arguments.x + token * arguments.x_stride;
#pragma unroll
            for (int chunk = 0; chunk < WARP_CHUNKS; ++chunk) {
                uint4 v = {};
                if (is_token && is_inside(chunk))
                    v = *reinterpret_cast<const uint4*>(row + column_of(chunk));
                const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    to_halves(words[i], x[set][chunk][2 * i], x[set][chunk][2 * i + 1]);
                x_scale[set][chunk] = 0;
                if (is_token && is_chunk(chunk))
                    x_scale[set][chunk] =
                        arguments.x_scale[group_of(chunk) * arguments.x_scale_stride + token];
            }
        }
    }

    __device__ __forceinline__ void load_weight_scale(int row) {
#pragma unroll
        for (int chunk = 0; chunk < WARP_CHUNKS; ++chunk) {
            weight_scale[chunk] = 0;
            if (is_chunk(chunk))
                weight_scale[chunk] =
                    arguments.weight_scale[row / 128 * K_GROUPS + group_of(chunk)];
        }
    }

    // Zeros beyond the row, where another one lies, or nothing: a NaN there would survive a zero
    // in x.
    __device__ __forceinline__ uint4 weight_of(uint32_t row, int chunk) const {
        uint4 v = {};
        if (is_inside(chunk))
            asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                         : "r"(row + column_of(chunk))
                         : "memory");
        return v;
    }

    // Leaves the sums of a unit where all warps' are added up.
    __device__ __forceinline__ void multiply_unit(uint32_t tile, int unit,
                                                  float2* partials) const {
        const uint32_t row = tile + (unit * UNIT + lane / 4) * K;
        float sums[SETS][2] = {};
#pragma unroll
        for (int chunk = 0; chunk < WARP_CHUNKS; ++chunk) {
            const uint4 weight = weight_of(row, chunk);
            const uint32_t words[4] = {weight.x, weight.y, weight.z, weight.w};
            float products[PAIRS_OF_SETS][4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                // Which of K a lane has does not matter where both matrices have the same.
                uint32_t b[2];
                to_halves(words[i], b[0], b[1]);
#pragma unroll
                for (int pair = 0; pair < PAIRS_OF_SETS; ++pair) {
                    const uint32_t(&upper)[8] = x[pair * 2][chunk];
                    uint32_t a[4] = {upper[2 * i], 0, upper[2 * i + 1], 0};
                    if (pair * 2 + 1 < SETS) {
                        a[1] = x[(pair * 2 + 1) % SETS][chunk][2 * i];
                        a[3] = x[(pair * 2 + 1) % SETS][chunk][2 * i + 1];
                    }
                    multiply_f16(products[pair], a, b);
                }
            }
#pragma unroll
            for (int set = 0; set < SETS; ++set) {
                const float scale = x_scale[set][chunk] * weight_scale[chunk];
                sums[set][0] += products[set / 2][set % 2 * 2] * scale;
                sums[set][1] += products[set / 2][set % 2 * 2 + 1] * scale;
            }
        }
#pragma unroll
        for (int set = 0; set < SETS; ++set)
            partials[warp * OUTPUTS + (unit * SETS + set) * 32 + lane] =
                make_float2(sums[set][0], sums[set][1]);
    }
};

// Two columns of a row of out.
__device__ __forceinline__ void store_output(const Arguments& arguments, int index, int output,
                                             const float2* partials) {
    const int lane = output % 32, set = output / 32 % SETS, unit = output / 32 / SETS;
    const int token = set * UNIT + lane / 4;
    if (token >= arguments.M) return;
    float2 sum = {};
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        const float2 part = partials[warp * OUTPUTS + output];
        sum.x += part.x;
        sum.y += part.y;
    }
    const int column = row_of(index) + unit * UNIT + lane % 4 * 2;
    store_global(arguments.out + token * arguments.out_stride + column, pack_bf16(sum.x, sum.y));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    linear_fp8_rows(const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(128) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0);
    const int tiles = (arguments.N / ROWS - int(blockIdx.x) - 1) / int(gridDim.x) + 1;
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
    Multiplier multiplier{arguments, warp, static_cast<int>(threadIdx.x % 32)};
    multiplier.load_x();
    int slot = 0;
    uint32_t phase = 0;
#pragma unroll 1
    for (int index = 0; index < tiles; ++index) {
        // In turns: the sums of the tile before are still read.
        float2* partials =
            reinterpret_cast<float2*>(memory + PARTIALS_OFFSET) + index % 2 * WARPS * OUTPUTS;
        multiplier.load_weight_scale(row_of(index));
        barrier_wait(shared + FULL_OFFSET + slot * 8, phase);
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit)
            multiplier.multiply_unit(shared + slot * TILE_BYTES, unit, partials);
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
