// out = x @ weight^T in bf16, of so few rows of x that reading the weight is all that takes time.
//
// A block goes through its range of the weight's rows in tiles of ROWS, each of which comes into
// the next of STAGES slots; for the first ones it sends before the kernel before it has ended.
// WARPS warps share K: each has its columns of all of x in registers, and multiplies 8 rows of the
// weight with 16 of x at a time, with sums in fp32. What the warps leave of a tile some of their
// threads add up and store, while the others begin with the next one.
//
// Defined by whoever compiles this: K, TOKENS, WARPS, ROWS, STAGES, SHARED_BYTES.

constexpr int UNIT = 8;    // rows of both matrices: of x twice as many are multiplied at a time
constexpr int CHUNK = 32;  // of K: 16 bytes from each of a row's four lanes, two multiplications
constexpr int CHUNKS = (K + CHUNK - 1) / CHUNK;
constexpr int WARP_CHUNKS = (CHUNKS + WARPS - 1) / WARPS;
constexpr int THREADS = WARPS * 32;
constexpr int UNITS = ROWS / UNIT;
constexpr int SETS = TOKENS / UNIT;
constexpr int PAIRS_OF_SETS = (SETS + 1) / 2;
static_assert(ROWS % UNIT == 0 && ROWS <= 32, "a lane of one warp sends for each row");
static_assert(TOKENS % UNIT == 0 && K % 8 == 0, "rows of 16 bytes");

constexpr int ROW_BYTES = K * 2;
constexpr int PITCH = ROW_BYTES + (192 - ROW_BYTES % 128) % 128;  // two rows lie in different banks
constexpr int SLOT_BYTES = ROWS * PITCH;
constexpr int OUTPUTS = UNITS * SETS * 32;  // of a tile, two values each
constexpr int PARTIALS_OFFSET = STAGES * SLOT_BYTES;
constexpr int FULL_OFFSET = PARTIALS_OFFSET + 2 * WARPS * OUTPUTS * 8;
static_assert(FULL_OFFSET + STAGES * 8 <= SHARED_BYTES, "the launch gives too little memory");

struct Arguments {
    const unsigned short* x;
    const unsigned short* weight;
    unsigned short* out;
    int M;
    int N;  // a multiple of UNIT
    long long x_stride;
    long long weight_stride;
    long long out_stride;
};

// Of the weight's rows: whole units, as even as they can be.
struct Range {
    int first, rows;

    __device__ __forceinline__ explicit Range(int N) {
        const int units = N / UNIT, blocks = gridDim.x, block = blockIdx.x;
        const int each = units / blocks, more = units % blocks;
        first = (block * each + min(block, more)) * UNIT;
        rows = (each + (block < more)) * UNIT;
    }

    __device__ __forceinline__ int tiles() const { return (rows + ROWS - 1) / ROWS; }
    __device__ __forceinline__ int rows_of(int tile) const { return min(ROWS, rows - tile * ROWS); }
};

// By one warp.
__device__ __forceinline__ void send_for_tile(uint32_t shared, const Arguments& arguments,
                                              const Range& range, int tile, int slot, int lane) {
    const uint32_t full = shared + FULL_OFFSET + slot * 8;
    const int rows = range.rows_of(tile);
    if (lane == 0) barrier_expect(full, rows * ROW_BYTES);
    __syncwarp();
    if (lane < rows)
        load_bytes_once(
            shared + slot * SLOT_BYTES + lane * PITCH,
            arguments.weight + (range.first + tile * ROWS + lane) * arguments.weight_stride,
            ROW_BYTES, full);
}

// A warp's part of K.
struct Multiplier {
    const uint32_t shared;
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

    // Leaves the sums of a unit's rows where all warps' are added up.
    __device__ __forceinline__ void multiply_unit(int slot, int unit, float2* partials) const {
        const uint32_t row = shared + slot * SLOT_BYTES + (unit * UNIT + lane / 4) * PITCH;
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
            partials[warp * OUTPUTS + (unit * SETS + set) * 32 + lane] =
                make_float2(both[0][i] + both[1][i], both[0][i + 1] + both[1][i + 1]);
        }
    }
};

// Two columns of a row of out.
__device__ __forceinline__ void store_output(const Arguments& arguments, const Range& range,
                                             int tile, int output, const float2* partials) {
    const int lane = output % 32, set = output / 32 % SETS, unit = output / 32 / SETS;
    const int token = set * UNIT + lane / 4;
    if (token >= arguments.M || unit * UNIT >= range.rows_of(tile)) return;
    float2 sum = {};
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        const float2 part = partials[warp * OUTPUTS + output];
        sum.x += part.x;
        sum.y += part.y;
    }
    const int column = range.first + tile * ROWS + unit * UNIT + lane % 4 * 2;
    store_global(arguments.out + token * arguments.out_stride + column, pack_bf16(sum.x, sum.y));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    linear(const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(128) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0);
    const int lane = threadIdx.x % 32;
    const Range range(arguments.N);
    const int tiles = range.tiles();
    if (warp == 0) {
        if (lane == 0) {
            for (int slot = 0; slot < STAGES; ++slot)
                barrier_init(shared + FULL_OFFSET + slot * 8, 1);
            barrier_init_fence();
        }
        __syncwarp();
        for (int tile = 0; tile < min(STAGES, tiles); ++tile)
            send_for_tile(shared, arguments, range, tile, tile, lane);
    }
    __syncthreads();  // the barriers are initialised
    wait_for_previous_kernels();
    allow_next_kernel();
    Multiplier multiplier{shared, warp, lane};
    multiplier.load_x(arguments);
    int slot = 0;
    uint32_t phase = 0;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        // In turns: the sums of the tile before are still read.
        float2* partials =
            reinterpret_cast<float2*>(memory + PARTIALS_OFFSET) + tile % 2 * WARPS * OUTPUTS;
        barrier_wait(shared + FULL_OFFSET + slot * 8, phase);
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit)
            if (unit == 0 || unit * UNIT < range.rows_of(tile))
                multiplier.multiply_unit(slot, unit, partials);
        __syncthreads();
        if (warp == WARPS - 1 && tile + STAGES < tiles)
            send_for_tile(shared, arguments, range, tile + STAGES, slot, lane);
        for (int output = threadIdx.x; output < OUTPUTS; output += THREADS)
            store_output(arguments, range, tile, output, partials);
        if (++slot == STAGES) {
            slot = 0;
            phase ^= 1;
        }
    }
}
