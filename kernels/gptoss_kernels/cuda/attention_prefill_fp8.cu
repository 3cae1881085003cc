// attention_prefill.cuh over caches of e4m3: queries and powers are rounded to e4m3, and multiplied
// with keys and values as they are.
//
// The warpgroup of a row of queries gives it a scale, and rounds it in place. The largest becomes
// 2^8, which is not rounded.
//
// A wgmma in 8 bits wants its right operand along K, which for values are keys. So three warps
// transpose values on their way from slot to slot: rows become dimensions. Of 8 keys x 16
// dimensions, ldmatrix gives a lane two keys of two neighbouring dimensions; of two such matrices,
// 8 keys apart, it makes the keys 2 j, 2 j + 1, 2 j + 8, 2 j + 9 of either dimension
// (j = lane % 4), which become neighbours. So do a lane's powers of 16 keys, which are of the same
// four keys, as the left operand. For values that no query of the tile sees they write zeros:
// nothing or anything was loaded there, and 0 * NaN is NaN.

static_assert(CACHE_BYTES == 1);

constexpr float SMALLEST_SCALE = 1e-37f;  // 0 * -inf is NaN
// Of a row's largest: two bf16 of 2^-100, less than which is taken for that.
constexpr uint32_t SMALLEST_QUERY = 0x0D800D80;

// ---- three warps that transpose --------------------------------------------------------------

struct Transposer {
    const uint32_t shared;
    const int window, warp;
    const int lane = threadIdx.x % 32;
    Ring<QUERY_SLOTS> queries;
    Ring<STAGES> values;
    Ring<TRANSPOSED_STAGES> transposed;

    // A warp has every third 16 keys x 32 dimensions. CLEARS: all keys but `first` to `end` - 1.
    template <bool CLEARS>
    __device__ __forceinline__ void transpose(int first, int end) const {
        constexpr int AT_A_TIME = 2;  // loads under way
        constexpr int PIECES = BLOCK_N / 8;
        const int row = lane % 8, matrix = lane / 8;
        // Matrices of the keys 0 and 8, then of the next 16 dimensions, in rows of 64 bytes.
        const uint32_t from = shared + VALUE_OFFSET + values.slot * BLOCK_BYTES +
                              lane % 16 * CACHE_ROW_BYTES + (lane / 16 ^ row / 2) * 16;
        // Even dimensions, then odd ones, but the other way round in the last four of 8 rows: or
        // two rows each would lie in the same banks.
        const int dimension = matrix / 2 * 16 + row * 2 + (matrix % 2 ^ row / 4);
        const uint32_t to = shared + TRANSPOSED_OFFSET + transposed.slot * TRANSPOSED_BYTES +
                            dimension * 128 + dimension % 8 * 16;
        const uint32_t own = lane < 16 ? 0x6420 : 0x7531, other = own ^ 0x1111;
#pragma unroll
        for (int start = 0; start < PIECES; start += AT_A_TIME * HELPERS) {
            uint32_t words[AT_A_TIME][4];
#pragma unroll
            for (int i = 0; i < AT_A_TIME; ++i) {
                const int piece = start + i * HELPERS + warp;
                if (piece < PIECES)
                    load_matrices_transposed(
                        (from ^ piece % 2 * 32) + piece / 2 * 16 * CACHE_ROW_BYTES, words[i]);
            }
#pragma unroll
            for (int i = 0; i < AT_A_TIME; ++i) {
                const int piece = start + i * HELPERS + warp;
                if (piece >= PIECES) continue;
                const uint32_t seen = CLEARS ? seen_keys(piece / 2 * 16, first, end) : ~0u;
                store_matrices((to ^ piece / 2 * 16) + piece % 2 * 32 * 128,
                               __byte_perm(words[i][0], words[i][1], own) & seen,
                               __byte_perm(words[i][0], words[i][1], other) & seen,
                               __byte_perm(words[i][2], words[i][3], own) & seen,
                               __byte_perm(words[i][2], words[i][3], other) & seen);
            }
        }
        shared_fence();
        __syncwarp();
    }

    // Of the lane's four of 16 keys, the bytes of those that are seen.
    __device__ __forceinline__ uint32_t seen_keys(int key, int first, int end) const {
        uint32_t bytes = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int own = key + lane % 4 * 2 + i / 2 * 8 + i % 2;
            if (own >= first && own < end) bytes |= 0xFF << 8 * i;
        }
        return bytes;
    }

    __device__ __forceinline__ void transpose_block(int first, int end) const {
        if (first > 0 || end < BLOCK_N)
            transpose<true>(first, end);
        else
            transpose<false>(first, end);
    }

    __device__ __forceinline__ void arrive(uint32_t barrier, int slot) const {
        if (lane == 0) barrier_arrive(shared + barrier + slot * 8);
    }

    __device__ __forceinline__ void run() {
        while (true) {
            barrier_wait(shared + QUERY_FULL + queries.slot * 8, queries.phase);
            Tile tile;
            tile.get(shared + TILE_OFFSET + queries.slot * 32);
            __syncwarp();
            arrive(known_with(tile.num_keys, QUERY_EMPTY), queries.slot);
            queries.advance();
            if (tile.num_keys == 0) break;
            const int first = HAS_WINDOW ? tile.position - window + 1 - tile.first_key : 0;
            for (int block = tile.num_blocks() - 1; block >= 0; --block) {
                barrier_wait(shared + VALUE_FULL + values.slot * 8, values.phase);
                barrier_wait(shared + TRANSPOSED_EMPTY + transposed.slot * 8, transposed.phase ^ 1);
                transpose_block(first - block * BLOCK_N, tile.num_keys - block * BLOCK_N);
                arrive(TRANSPOSED_FULL, transposed.slot);
                arrive(VALUE_EMPTY, values.slot);
                values.advance();
                transposed.advance();
            }
        }
    }
};

// ---- warpgroups that multiply ----------------------------------------------------------------

__device__ __forceinline__ uint32_t values_descriptor(uint32_t shared) {
    return matrix_descriptor(shared + TRANSPOSED_OFFSET);
}

// As 8 more dimensions of each slot.
__device__ __forceinline__ void put_ones(uint32_t shared) {
    constexpr int ONES = 0x38383838;
    for (int i = threadIdx.x; i < TRANSPOSED_STAGES * 64; i += THREADS)
        store_shared(shared + TRANSPOSED_OFFSET + i / 64 * TRANSPOSED_BYTES + D * 128 + i % 64 * 16,
                     ONES, ONES, ONES, ONES);
    shared_fence();  // the tensor cores read there
}

// The warp's rows of bf16 become e4m3, in the first half of each. Two lanes have a row.
__device__ __forceinline__ void Math::prepare_queries() {
    const int lane = own_lane(), row = lane / 2, half = lane % 2;
    const uint32_t place =
        shared + QUERY_OFFSET + queries.slot * QUERY_BYTES + (warp_row + row) * ROW_BYTES;
    uint32_t pairs[16];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int words[4];
        load_shared(place + ((half * 4 + i) ^ row % 8) * 16, words[0], words[1], words[2],
                    words[3]);
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs[4 * i + j] = words[j];
    }
    // Without their signs, bf16 are in the order of their bits, inf and NaN above all others.
    uint32_t largest = SMALLEST_QUERY;
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = max_pair(largest, pairs[i] & 0x7FFF7FFF);
    largest = max_pair(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
    largest = max(largest & 0xFFFF, largest >> 16);
    const uint32_t scale_bits = largest - (8 << 7);  // of a bf16
    const bool is_finite = largest < 0x7F80;
    const float of_row = __uint_as_float(scale_bits << 16), near = reciprocal_approx(of_row);
    // Rounded as a division is, whatever the last bit of `near`: it tells where a query between two
    // e4m3 values goes.
    const float inverse = fmaf(fmaf(-of_row, near, 1.f), near, near);
    int words[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint32_t a = pairs[2 * i], b = pairs[2 * i + 1];
        words[i] = pack_e4m3(low_bf16(a) * inverse, high_bf16(a) * inverse, low_bf16(b) * inverse,
                             high_bf16(b) * inverse);
    }
    __syncwarp();  // a lane writes where the other one of its row has read
#pragma unroll
    for (int i = 0; i < 2; ++i)
        store_shared(place + ((half * 2 + i) ^ row % 8) * 16, words[4 * i], words[4 * i + 1],
                     words[4 * i + 2], words[4 * i + 3]);
    shared_fence();
    const float of_keys = arguments.scale * tile.key_scale;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const uint32_t bits = __shfl_sync(ALL_LANES, is_finite ? scale_bits : 0x7FFF,
                                          (lane / 4 + r * 8) * 2);
        scale[r] = max_nan(__uint_as_float(bits << 16) * of_keys, SMALLEST_SCALE);
    }
    named_sync(GROUP_BARRIER + group, 128);
}

__device__ __forceinline__ void Math::multiply_keys() {
    const uint32_t query = query_descriptor + queries.slot * (QUERY_BYTES / 16);
    const uint32_t key = key_descriptor + keys.slot * (BLOCK_BYTES / 16);
    fence_registers(scores);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 32; ++k)  // 32 bytes along a swizzled row
        wgmma_e4m3_narrow<BLOCK_N>(scores, query + 2 * k, key + 2 * k, k != 0);
    wgmma_commit();
}

__device__ __forceinline__ void Math::multiply_values(bool accumulate) {
    const uint32_t value = value_descriptor + values.slot * (TRANSPOSED_BYTES / 16);
    fence_registers(sums);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_N / 32; ++k)  // 32 bytes along a swizzled row
        wgmma_e4m3_registers<COLUMNS>(sums, powers[k], value + 2 * k, accumulate || k != 0);
    wgmma_commit();
}

__device__ __forceinline__ void Math::round_powers() {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 8; ++i) {  // a row of 16 keys
        const float* of_row = scores + i / 2 * 8 + i % 2 * 2;
        powers[i / 4][i % 4] = pack_e4m3(of_row[0], of_row[1], of_row[4], of_row[5]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_prefill_fp8(const __grid_constant__ TensorMap query_map,
                          const __grid_constant__ TensorMap key_map,
                          const __grid_constant__ TensorMap value_map,
                          const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(1024) unsigned char memory[];
    attend<Transposer>(shared_address(memory), query_map, key_map, value_map, arguments);
}
