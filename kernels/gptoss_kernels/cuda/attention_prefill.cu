// attention_prefill.cuh over caches of bf16. One warp clears values that no query of a tile sees.

static_assert(CACHE_BYTES == 2);

// ---- one warp that clears --------------------------------------------------------------------

// Values that no query of a tile sees: of keys behind the last one, and before the window. Nothing
// or anything was loaded there, and 0 * NaN is NaN.
struct Cleaner {
    const uint32_t shared;
    const int window, warp;
    const int lane = threadIdx.x % 32;
    Ring<QUERY_SLOTS> queries;
    Ring<STAGES> values;

    __device__ __forceinline__ void clear(int first, int end) const {
        const uint32_t slot = shared + VALUE_OFFSET + values.slot * BLOCK_BYTES;
        for (int i = first * (ROW_BYTES / 16) + lane; i < end * (ROW_BYTES / 16); i += 32)
            store_shared(slot + i * 16, 0, 0, 0, 0);
        if (first < end) shared_fence();
    }

    __device__ __forceinline__ void arrive(uint32_t barrier, int slot) const {
        __syncwarp();  // all lanes have cleared, and none still waits for what may come next
        if (lane == 0) barrier_arrive(shared + barrier + slot * 8);
    }

    __device__ __forceinline__ void run() {
        while (true) {
            barrier_wait(shared + QUERY_FULL + queries.slot * 8, queries.phase);
            Tile tile;
            tile.get(shared + TILE_OFFSET + queries.slot * 32);
            if (tile.num_keys == 0) break;
            const int last_block = tile.num_blocks() - 1;
            for (int block = last_block; block >= 0; --block) {
                // Each of them, or a later one's phase would be taken for this one's.
                barrier_wait(shared + VALUE_FULL + values.slot * 8, values.phase);
                if (block == last_block) {
                    clear(tile.num_keys - block * BLOCK_N, BLOCK_N);
                    arrive(END_CLEARED, queries.slot);
                }
                if (HAS_WINDOW && block == 0) {
                    clear(0, tile.position - window + 1 - tile.first_key);
                    arrive(START_CLEARED, queries.slot);
                }
                arrive(VALUE_EMPTY, values.slot);
                values.advance();
            }
            arrive(QUERY_EMPTY, queries.slot);
            queries.advance();
        }
    }
};

// ---- warpgroups that multiply ----------------------------------------------------------------

// Columns beyond 64 begin at another place, whose distance from the first ones' a descriptor has
// too. The ones are 16 rows, as deep as a product is, for all slots and all their rows: where the
// first ones' place moves up, the distance shrinks.
constexpr uint32_t UP = HAS_ONES ? 1u - (1u << 16) : 1u;  // by 16 bytes

__device__ __forceinline__ uint32_t values_descriptor(uint32_t shared) {
    constexpr uint32_t DISTANCE = HAS_ONES ? (ONES_OFFSET - VALUE_OFFSET) / 16 : 1;
    return matrix_descriptor(shared + VALUE_OFFSET) + (DISTANCE - 1 << 16);
}

__device__ __forceinline__ void put_ones(uint32_t shared) {
    constexpr int ONES = 0x3F803F80;
    for (int i = threadIdx.x; i < ROW_BYTES; i += THREADS)  // of 16 bytes in 16 rows
        store_shared(shared + ONES_OFFSET + i * 16, ONES, ONES, ONES, ONES);
    shared_fence();  // the tensor cores read there
}

__device__ __forceinline__ void Math::prepare_queries() {
    scale[0] = scale[1] = arguments.scale;
}

__device__ __forceinline__ void Math::multiply_keys() {
    const uint32_t query = query_descriptor + queries.slot * (QUERY_BYTES / 16);
    const uint32_t key = key_descriptor + keys.slot * (BLOCK_BYTES / 16);
    fence_registers(scores);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < D / 16; ++k)  // 32 bytes along a swizzled row
        wgmma_bf16<BLOCK_N>(scores, query + 2 * k, key + 2 * k, k != 0);
    wgmma_commit();
}

__device__ __forceinline__ void Math::multiply_values(bool accumulate) {
    const uint32_t value = value_descriptor + values.slot * (BLOCK_BYTES / 16 * UP);
    fence_registers(sums);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < BLOCK_N / 16; ++k)  // 16 rows
        wgmma_bf16_registers_transposed<COLUMNS>(
            sums, powers[k], value + k * (16 * ROW_BYTES / 16 * UP), accumulate || k != 0);
    wgmma_commit();
}

__device__ __forceinline__ void Math::round_powers() {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; ++i)
        powers[i / 4][i % 4] = pack_bf16(scores[2 * i], scores[2 * i + 1]);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_prefill(const __grid_constant__ TensorMap query_map,
                      const __grid_constant__ TensorMap key_map,
                      const __grid_constant__ TensorMap value_map,
                      const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(1024) unsigned char memory[];
    attend<Cleaner>(shared_address(memory), query_map, key_map, value_map, arguments);
}
