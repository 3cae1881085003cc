// What linear_fp8.cu computes, for so few rows of x that reading the weight is all that takes time.
//
// A block has ROWS rows of the weight, and room for all of them. It sends for them at once, before
// it waits for the kernel before it, so that both overlap. WARPS warps share K: each multiplies
// GROUPS groups of 128 columns, 16 rows of the weight with 8 of x at a time, as halves, which hold
// e4m3 values and their products exactly, with sums in fp32. At the end all of a block's threads
// add up what the warps left, and store.
//
// With QUANTISES x is bf16, and each warp quantises its columns as quantise.cu does.
//
// Defined by whoever compiles this: K, ROWS, TOKENS, WARPS, QUANTISES, HAS_RESIDUAL, SHARED_BYTES.

constexpr int GROUP = 128;
constexpr int CHUNK = 64;  // of K: 16 bytes from each of a row's four lanes
constexpr int CHUNKS = GROUP / CHUNK;
constexpr int TILE = 16;  // rows of weight that the instruction multiplies, and twice a unit's
constexpr int UNIT = 8;
constexpr int ROW_SETS = TOKENS / 8;  // of x, as many as the instruction takes
constexpr int K_GROUPS = (K + GROUP - 1) / GROUP;
constexpr int GROUPS = (K_GROUPS + WARPS - 1) / WARPS;
constexpr int THREADS = WARPS * 32;
constexpr int TILES = (ROWS + TILE - 1) / TILE;
static_assert(ROWS % UNIT == 0 && ROWS <= 128, "a block meets two blocks of weight_scale at most");

constexpr int PITCH = K + (192 - K % 128) % 128;  // two rows' chunks lie in different banks
constexpr int PARTIAL_PITCH = ROWS + 4;           // likewise what the lanes of a warp store
constexpr int PARTIAL_BYTES = TOKENS * PARTIAL_PITCH * 4;
constexpr int PARTIALS_OFFSET = ROWS * PITCH;
constexpr int FULL_OFFSET = PARTIALS_OFFSET + WARPS * PARTIAL_BYTES;
static_assert(FULL_OFFSET + TILES * 8 <= SHARED_BYTES, "the launch gives too little memory");

struct Arguments {
    const void* x;
    const float* x_scale;  // or null, with QUANTISES
    const unsigned char* weight;
    const float* weight_scale;
    const float* bias;  // or null
    const unsigned short* residual;
    unsigned short* out;
    int M;
    int N;
    long long x_stride;
    long long x_scale_stride;
    long long weight_stride;
    long long residual_stride;
    long long out_stride;
};

// ---- the weight, by the first warp ------------------------------------------------------------

__device__ __forceinline__ void send_for_weight(uint32_t shared, const Arguments& arguments,
                                                int first, int rows, int lane) {
    if (lane == 0) {
        for (int tile = 0; tile < TILES; ++tile) barrier_init(shared + FULL_OFFSET + tile * 8, 1);
        barrier_init_fence();
        for (int tile = 0; tile < TILES; ++tile)
            barrier_expect(shared + FULL_OFFSET + tile * 8,
                           min(max(rows - tile * TILE, 0), TILE) * K);
    }
    __syncwarp();
    for (int row = lane; row < rows; row += 32)
        load_bytes_once(shared + row * PITCH,
                        arguments.weight + (first + row) * arguments.weight_stride, K,
                        shared + FULL_OFFSET + row / TILE * 8);
}

// ---- a warp's part of K -----------------------------------------------------------------------

struct Multiplier {
    const uint32_t shared;
    const Arguments& arguments;
    const int first;  // row of the weight
    const int warp;
    const int lane;
    float weight_scale[GROUPS][2];        // of the block of 128 rows of `first`, and of the next
    uint4 x[ROW_SETS][GROUPS][CHUNKS];    // 16 values of row lane / 4 of the set
    float x_scale[ROW_SETS][GROUPS][2];  // of rows lane % 4 * 2 and the next

    __device__ __forceinline__ int group_of(int group) const { return warp * GROUPS + group; }
    __device__ __forceinline__ int start_of(int group, int chunk) const {
        return group_of(group) * GROUP + chunk * CHUNK;
    }
    __device__ __forceinline__ int column_of(int group, int chunk) const {
        return start_of(group, chunk) + lane % 4 * 16;
    }

    __device__ __forceinline__ void load_weight_scales() {
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int block = first / 128 + i;
                weight_scale[group][i] = 0;
                if (group_of(group) < K_GROUPS && block * 128 < arguments.N)
                    weight_scale[group][i] =
                        arguments.weight_scale[block * K_GROUPS + group_of(group)];
            }
        }
    }

    __device__ __forceinline__ void load_x() {
#pragma unroll
        for (int set = 0; set < ROW_SETS; ++set) {
            const unsigned char* row = static_cast<const unsigned char*>(arguments.x) +
                                       (set * 8 + lane / 4) * arguments.x_stride;
            const bool is_row = set * 8 + lane / 4 < arguments.M;
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                    const int column = column_of(group, chunk);
                    x[set][group][chunk] = {};
                    if (is_row && column < K)
                        x[set][group][chunk] = *reinterpret_cast<const uint4*>(row + column);
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int token = set * 8 + lane % 4 * 2 + i;
                    x_scale[set][group][i] = 0;
                    if (token < arguments.M && group_of(group) < K_GROUPS)
                        x_scale[set][group][i] =
                            arguments.x_scale[group_of(group) * arguments.x_scale_stride + token];
                }
            }
        }
    }

    // Four lanes have a row's group, each two times 16 values, in 16 pairs.
    __device__ __forceinline__ void quantise_group(int set, int group,
                                                   const uint4 (&pairs)[CHUNKS][2]) {
        uint32_t largest = 0;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                // Without their signs, bf16 are in the order of their bits, and NaN above all.
                const uint4 four = pairs[chunk][half];
                largest = max_pair(
                    largest, max_pair(max_pair(four.x & 0x7FFF7FFF, four.y & 0x7FFF7FFF),
                                      max_pair(four.z & 0x7FFF7FFF, four.w & 0x7FFF7FFF)));
            }
        }
        largest = max_pair(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
        largest = max_pair(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
        const uint32_t bits = max(largest & 0xFFFF, largest >> 16) << 16;
        const float amax = max_nan(__uint_as_float(bits), 1e-10f);
        const float factor = quotient_of_448(amax);
        const float scale = amax * (1.f / 448.f);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            x_scale[set][group][i] = __shfl_sync(ALL_LANES, scale, (lane % 4 * 2 + i) * 4);
        const auto packed = [factor](uint32_t a, uint32_t b) {
            return pack_e4m3(low_bf16(a) * factor, high_bf16(a) * factor, low_bf16(b) * factor,
                             high_bf16(b) * factor);
        };
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const uint4 left = pairs[chunk][0], right = pairs[chunk][1];
            x[set][group][chunk] =
                make_uint4(packed(left.x, left.y), packed(left.z, left.w),
                           packed(right.x, right.y), packed(right.z, right.w));
        }
    }

    __device__ __forceinline__ void load_and_quantise_x() {
#pragma unroll
        for (int set = 0; set < ROW_SETS; ++set) {
            const unsigned short* row = static_cast<const unsigned short*>(arguments.x) +
                                        (set * 8 + lane / 4) * arguments.x_stride;
            const bool is_row = set * 8 + lane / 4 < arguments.M;
            uint4 pairs[GROUPS][CHUNKS][2];
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                    const int column = column_of(group, chunk);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        pairs[group][chunk][half] = {};
                        if (is_row && column < K)
                            pairs[group][chunk][half] =
                                *reinterpret_cast<const uint4*>(row + column + half * 8);
                    }
                }
            }
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) quantise_group(set, group, pairs[group]);
        }
    }

    __device__ __forceinline__ uint4 weight_of(int row, int column) const {
        uint4 v;
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(shared + row * PITCH + column)
                     : "memory");
        // Beyond the row lies another one, or nothing: a NaN there would survive a zero in x.
        if (K % CHUNK != 0 && column >= K) v = {};
        return v;
    }

    __device__ __forceinline__ void multiply_chunk(float (&products)[ROW_SETS][4], int row,
                                                   bool has_lower, int group, int chunk) const {
        const uint4 upper = weight_of(row, column_of(group, chunk));
        uint4 lower = {};
        if (has_lower) lower = weight_of(row + UNIT, column_of(group, chunk));
        const uint32_t rows[2][4] = {{upper.x, upper.y, upper.z, upper.w},
                                     {lower.x, lower.y, lower.z, lower.w}};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Which of K a lane has does not matter where both matrices have the same.
            uint32_t a[4];
            to_halves(rows[0][i], a[0], a[2]);
            to_halves(rows[1][i], a[1], a[3]);
#pragma unroll
            for (int set = 0; set < ROW_SETS; ++set) {
                const uint4 of_x = x[set][group][chunk];
                const uint32_t words[4] = {of_x.x, of_x.y, of_x.z, of_x.w};
                uint32_t b[2];
                to_halves(words[i], b[0], b[1]);
                multiply_f16(products[set], a, b);
            }
        }
    }

    // The columns of this warp in a tile's sums, left where all warps' are added up.
    __device__ __forceinline__ void multiply_tile(int tile) const {
        const int row = tile * TILE + lane / 4;
        const bool has_lower = tile * TILE + UNIT < ROWS;
        const int block = first / 128;
        const bool is_next[2] = {(first + tile * TILE) / 128 != block,
                                 (first + tile * TILE + UNIT) / 128 != block};
        float sums[ROW_SETS][4] = {};
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            float products[ROW_SETS][4] = {};
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk)
                if (start_of(group, chunk) < K)
                    multiply_chunk(products, row, has_lower, group, chunk);
#pragma unroll
            for (int set = 0; set < ROW_SETS; ++set) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float(&scales)[2] = weight_scale[group];
                    const float scale = is_next[i / 2] ? scales[1] : scales[0];
                    sums[set][i] += products[set][i] * (x_scale[set][group][i % 2] * scale);
                }
            }
        }
        const uint32_t partial = shared + PARTIALS_OFFSET + warp * PARTIAL_BYTES + row * 4;
#pragma unroll
        for (int set = 0; set < ROW_SETS; ++set) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = set * 8 + lane % 4 * 2 + i % 2;
                if (i < 2 || has_lower)
                    store_shared(partial + token * PARTIAL_PITCH * 4 + i / 2 * UNIT * 4,
                                 sums[set][i]);
            }
        }
    }
};

// ---- four columns of a row of out, by a thread ------------------------------------------------

struct Output {
    int token, column;  // of out, and of the block
    bool exists;
    float4 sum;
    uint2 residual;

    __device__ __forceinline__ Output(const Arguments& arguments, int first, int index)
        : token(index / (ROWS / 4)), column(index % (ROWS / 4) * 4) {
        exists = token < arguments.M && token < TOKENS && first + column < arguments.N;
        sum = {};
        if (exists && arguments.bias) {
            const float* bias = arguments.bias + first + column;  // wherever it starts
            sum = make_float4(bias[0], bias[1], bias[2], bias[3]);
        }
    }

    __device__ __forceinline__ void load_residual(const Arguments& arguments, int first) {
        if (!exists) return;
        const unsigned short* row = arguments.residual + token * arguments.residual_stride;
        residual = *reinterpret_cast<const uint2*>(row + first + column);
    }

    __device__ __forceinline__ void store(const Arguments& arguments, int first,
                                          uint32_t shared) {
        if (!exists) return;
        const uint32_t address =
            shared + PARTIALS_OFFSET + (token * PARTIAL_PITCH + column) * 4;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            const float4 part = load_float4(address + warp * PARTIAL_BYTES);
            sum.x += part.x;
            sum.y += part.y;
            sum.z += part.z;
            sum.w += part.w;
        }
        if constexpr (HAS_RESIDUAL) {
            sum.x += low_bf16(residual.x);
            sum.y += high_bf16(residual.x);
            sum.z += low_bf16(residual.y);
            sum.w += high_bf16(residual.y);
        }
        store_global(arguments.out + token * arguments.out_stride + first + column,
                     pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
    }
};

constexpr int OUTPUTS = ROWS / 4 * TOKENS;
static_assert(OUTPUTS <= THREADS, "a thread stores once");

// Of 228 KB and 65,536 registers a multiprocessor; of shared memory each block takes 1 KB more than
// it asks for, and more rows of x need more registers.
constexpr int RESIDENT_BLOCKS = TOKENS == 8 && 2 * (SHARED_BYTES + 1024) <= 228 * 1024 ? 2 : 1;

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)
    linear_fp8_few(const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(128) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0);
    const int lane = threadIdx.x % 32;
    const int first = blockIdx.x * ROWS;
    if (warp == 0)
        send_for_weight(shared, arguments, first, min(ROWS, arguments.N - first), lane);
    Multiplier multiplier{shared, arguments, first, warp, lane};
    multiplier.load_weight_scales();
    Output output(arguments, first, threadIdx.x);
    __syncthreads();  // the barriers are initialised
    wait_for_previous_kernels();
    allow_next_kernel();
    if constexpr (HAS_RESIDUAL) output.load_residual(arguments, first);
    if constexpr (QUANTISES)
        multiplier.load_and_quantise_x();
    else
        multiplier.load_x();
#pragma unroll 1
    for (int tile = 0; tile < TILES; ++tile) {
        barrier_wait(shared + FULL_OFFSET + tile * 8, 0);
        multiplier.multiply_tile(tile);
    }
    __syncthreads();
    output.store(arguments, first, shared);
}
