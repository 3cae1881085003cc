// Attention with sinks of many queries over keys and values in pages: see attention_prefill.py.
// Here is what it is for caches of any type; attention_prefill.cu and attention_prefill_fp8.cu say
// how they multiply, and what the warps beside the one that loads do.
//
// A tile is the queries of neighbouring tokens of one sequence, with the G query heads that share
// one key-value head: row = token * G + head, 64 rows a warpgroup. A persistent block has one warp
// that feeds tiles to WARPGROUPS warpgroups through the copy engine: queries into one of
// QUERY_SLOTS, keys and values, BLOCK_N at a time, into rings of STAGES slots. It runs ahead of
// them over the ends of tiles.
//
// Softmax is that of powers of two. A row's scores times `scale` are taken relative to a reference
// (`offset` is the number that takes them there), so that powers are 2^HIGHEST at most. References
// move only when a maximum has outgrown them by SLACK, and then sums are rescaled: the largest
// power is 2^(HIGHEST - SLACK) then, which is not rounded. Over bf16 they follow each maximum, so
// that of a row's weights the largest, whose error counts most, has none. The sink joins the sum at
// the end.
//
// Full layers over e4m3 are optimistic: where nothing is masked, no maximum is looked for either.
// Powers are taken relative to the reference as it is, and only if their sum comes out too large
// does the warp multiply these keys once more, by itself, and raise its references first.
//
// HAS_ONES: a row's powers are summed as they were rounded, by the tensor cores: behind the
// dimensions of values there are 8 columns of ones. Not in full layers over e4m3: a power of less
// than 2^-10 becomes 0, and beside one large power those of thousands of keys may together be as
// large; a window's 128 keys are too few for that.
//
// Keys come from the last to the first, so that the block that the diagonal crosses, and that ends
// with slots of nobody, is the first one, which is written out. OVERLAPS: scores of the next block
// are multiplied beside the values of this one, whose sums are waited for after the next powers.
//
// KEPT: of a sum of products of e4m3 the tensor cores keep what is above some 2^-13 of it, and more
// and more of what is added to a long one of one sign would be lost: 67 % of 131,072 keys. So they
// sum KEPT_EVERY blocks of keys, and these sums are added to others, in fp32: 0.3 %.
//
// Defined by whoever compiles this: CACHE_BYTES (of a value), WARPGROUPS, BLOCK_N, STAGES,
// TRANSPOSED_STAGES (of values), QUERY_SLOTS, BLOCKS (on a multiprocessor), HAS_WINDOW, COUNTERS,
// SHARED_BYTES, MATH_REGISTERS, PRODUCER_REGISTERS.

constexpr int D = 64;
constexpr int ROW_BYTES = D * 2;  // of queries, of results
constexpr int CACHE_ROW_BYTES = D * CACHE_BYTES;
constexpr bool FP8 = CACHE_BYTES == 1;  // values are transposed, on their way from slot to slot

// A window has two or three blocks. With that few, only what e4m3 needs more instructions for gains
// by an overlap, or by fewer additions.
constexpr bool OVERLAPS = FP8 || !HAS_WINDOW;
constexpr bool HAS_ONES = FP8 == HAS_WINDOW;
constexpr int COLUMNS = HAS_ONES ? D + 8 : D;  // of sums
constexpr int KEPT_EVERY = 2;
constexpr int KEPT = FP8 && !HAS_WINDOW ? D / 2 : 0;  // sums of a thread
// log2 of the largest power. bf16 has fp32's range, but e4m3 keeps the most of small powers where
// the largest are as large as it can hold.
constexpr int HIGHEST = 8;
// log2 of how far a maximum may outgrow the one that a reference was taken from. Of e4m3 that costs
// bits of small powers; but without maxima, references are to move seldom, and 16 powers of
// 2^(HIGHEST - SLACK) must not seem too many.
constexpr int SLACK = FP8 ? (HAS_WINDOW ? 2 : 4) : 0;

constexpr int ROWS = 64 * WARPGROUPS;
constexpr int MATH_THREADS = 128 * WARPGROUPS;
constexpr int THREADS = MATH_THREADS + 128;
constexpr int MATH_WARPS = MATH_THREADS / 32;
constexpr int HELPERS = FP8 ? 3 : 1;  // warps

constexpr int QUERY_BYTES = ROWS * ROW_BYTES;
constexpr int BLOCK_BYTES = BLOCK_N * CACHE_ROW_BYTES;  // of keys, or of values
// Of values as they are multiplied: where they were loaded, or in rows of a dimension each.
constexpr int TRANSPOSED_BYTES = FP8 ? COLUMNS * 128 : BLOCK_BYTES;

constexpr int QUERY_OFFSET = 0;
constexpr int KEY_OFFSET = QUERY_OFFSET + QUERY_SLOTS * QUERY_BYTES;
constexpr int VALUE_OFFSET = KEY_OFFSET + STAGES * BLOCK_BYTES;
constexpr int TRANSPOSED_OFFSET = FP8 ? VALUE_OFFSET + STAGES * BLOCK_BYTES : VALUE_OFFSET;
constexpr int KEPT_OFFSET = TRANSPOSED_OFFSET + TRANSPOSED_STAGES * TRANSPOSED_BYTES;
constexpr int ONES_OFFSET = KEPT_OFFSET + MATH_THREADS * KEPT * 4;
constexpr int TILE_OFFSET = ONES_OFFSET + (HAS_ONES && !FP8 ? 16 * ROW_BYTES : 0);
constexpr int BARRIER_OFFSET = TILE_OFFSET + QUERY_SLOTS * 32;
constexpr int NUM_BARRIERS = 4 * QUERY_SLOTS + 4 * STAGES + (FP8 ? 2 * TRANSPOSED_STAGES : 0);
static_assert(BARRIER_OFFSET + NUM_BARRIERS * 8 <= SHARED_BYTES, "too little memory");
static_assert(KEY_OFFSET % 1024 == 0 && BLOCK_BYTES % 1024 == 0 && ONES_OFFSET % 1024 == 0,
              "a swizzle counts from multiples of 1024 bytes");
static_assert(BLOCK_N % 16 == 0 && BLOCK_N <= 256, "wgmma multiplies 8 to 256 columns, 16 deep");
static_assert(!FP8 || BLOCK_N % 32 == 0 && BLOCK_N <= 128,
              "wgmma multiplies 32 deep, and a dimension's values have 128 bytes");

// Barriers of slots. Those of queries have two more, without FP8: values of their tile are cleared
// behind the last key that a query sees, and before the first one.
constexpr int QUERY_FULL = BARRIER_OFFSET;
constexpr int QUERY_EMPTY = QUERY_FULL + QUERY_SLOTS * 8;
constexpr int END_CLEARED = QUERY_EMPTY + QUERY_SLOTS * 8;
constexpr int START_CLEARED = END_CLEARED + QUERY_SLOTS * 8;
constexpr int KEY_FULL = START_CLEARED + QUERY_SLOTS * 8;
constexpr int KEY_EMPTY = KEY_FULL + STAGES * 8;
constexpr int VALUE_FULL = KEY_EMPTY + STAGES * 8;
constexpr int VALUE_EMPTY = VALUE_FULL + STAGES * 8;
constexpr int TRANSPOSED_FULL = FP8 ? VALUE_EMPTY + STAGES * 8 : VALUE_FULL;
constexpr int TRANSPOSED_EMPTY = FP8 ? TRANSPOSED_FULL + TRANSPOSED_STAGES * 8 : VALUE_EMPTY;

constexpr int GROUP_BARRIER = 1;  // + warpgroup. Named barrier 0 is __syncthreads.

// Of half of a lane's powers of one row and block, where no maximum is looked for: none of them is
// larger. 448 is the largest e4m3 value.
constexpr float MAXIMUM_SUM = 448;

// Below every score, and its difference to one is no NaN.
constexpr float NO_REFERENCE = -1e37f;

__device__ unsigned int counters[COUNTERS][2];

struct Arguments {
    const int* query_start;
    const int* seq_lens;
    const int* page_tables;
    const float *key_scales, *value_scales;  // of heads, or null
    const float* sinks;
    unsigned char* out;
    int num_sequences, num_heads, num_kv_heads;
    int log_group;      // of the query heads that share a key-value head
    int log_page_size;
    int box_rows;       // of keys or values that one copy brings
    int max_pages;      // of a sequence
    int window;
    float scale;        // of scores as powers of two
    int counter;        // which of `counters` this launch has
};

template <int SLOTS>
struct Ring {
    int slot = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance() {
        if (++slot == SLOTS) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// What the warpgroups are told. A tile without keys is the end.
struct Tile {
    int first_row;   // of query, a token's
    int num_tokens;
    int position;    // of the first token
    int head;        // of keys and values
    int first_key;
    int num_keys;    // from there to the last token's
    float key_scale, value_scale;

    __device__ __forceinline__ int num_blocks() const {
        return (num_keys + BLOCK_N - 1) / BLOCK_N;
    }

    __device__ __forceinline__ void put(uint32_t place) const {
        store_shared(place, first_row, num_tokens, position, head);
        store_shared(place + 16, first_key, num_keys, __float_as_int(key_scale),
                     __float_as_int(value_scale));
    }

    __device__ __forceinline__ void get(uint32_t place) {
        int key, value;
        load_shared(place, first_row, num_tokens, position, head);
        load_shared(place + 16, first_key, num_keys, key, value);
        first_row = same_in_warp(first_row);
        num_tokens = same_in_warp(num_tokens);
        position = same_in_warp(position);
        head = same_in_warp(head);
        first_key = same_in_warp(first_key);
        num_keys = same_in_warp(num_keys);
        if constexpr (FP8) {
            key_scale = __int_as_float(same_in_warp(key));
            value_scale = __int_as_float(same_in_warp(value));
        }
    }
};

// ---- one warp that loads ---------------------------------------------------------------------

struct Producer {
    struct Work {
        Tile tile;
        const int* pages;  // of its sequence
    };

    const uint32_t shared;
    const TensorMap *const query_map, *const key_map, *const value_map;
    const Arguments& arguments;
    const int lane = threadIdx.x % 32;
    const int tokens = ROWS >> arguments.log_group;          // of a tile
    const int block_boxes = BLOCK_N / arguments.box_rows;    // of keys, or of values
    const int chunk_blocks = 32 / block_boxes;               // whose boxes have a lane each
    Ring<QUERY_SLOTS> queries;
    Ring<STAGES> blocks;

    // 32 sequences, one in each lane: the tiles up to its last, its queries, the first one's row,
    // its length. Tiles are asked for in ascending order, so no earlier sequence comes again.
    int first_sequence = -32, tiles_before = 0, tiles_here = 0;
    int last_tile = 0, num_queries = 0, query_row = 0, length = 0;

    __device__ __forceinline__ void read_sequences() {
        tiles_before += tiles_here;
        first_sequence += 32;
        const int b = first_sequence + lane;
        num_queries = 0;
        if (b < arguments.num_sequences) {
            query_row = arguments.query_start[b];
            num_queries = arguments.query_start[b + 1] - query_row;
            length = arguments.seq_lens[b];
        }
        last_tile = (num_queries + tokens - 1) / tokens * arguments.num_kv_heads;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(ALL_LANES, last_tile, step);
            if (lane >= step) last_tile += before;
        }
        tiles_here = __shfl_sync(ALL_LANES, last_tile, 31);
    }

    // Of a sequence the last tokens first, as they see the most keys; heads of one token's tile are
    // neighbours, so that blocks at work at one time go through the same keys. No keys: the end.
    __device__ __forceinline__ Work find(int index) {
        while (index >= tiles_before + tiles_here) {
            if (first_sequence + 32 >= arguments.num_sequences) return Work{};
            read_sequences();
        }
        index -= tiles_before;
        const int found = __ffs(__ballot_sync(ALL_LANES, last_tile > index)) - 1;
        const int end = __shfl_sync(ALL_LANES, last_tile, found);
        const int queries = __shfl_sync(ALL_LANES, num_queries, found);
        const int row = __shfl_sync(ALL_LANES, query_row, found);
        const int keys = __shfl_sync(ALL_LANES, length, found);
        const int from_last = end - 1 - index;
        const int token_tile = from_last / arguments.num_kv_heads;
        const int first = token_tile * tokens;
        Work work;
        Tile& tile = work.tile;
        tile.head = from_last - token_tile * arguments.num_kv_heads;
        tile.first_row = row + first;
        tile.num_tokens = min(tokens, queries - first);
        tile.position = keys - queries + first;
        tile.first_key = HAS_WINDOW ? max(tile.position - arguments.window + 1, 0) &
                                          ~(arguments.box_rows - 1)
                                    : 0;
        tile.num_keys = tile.position + tile.num_tokens - tile.first_key;
        if constexpr (FP8) {
            tile.key_scale = arguments.key_scales ? arguments.key_scales[tile.head] : 1;
            tile.value_scale = arguments.value_scales ? arguments.value_scales[tile.head] : 1;
        }
        work.pages = arguments.page_tables +
                     static_cast<long long>(first_sequence + found) * arguments.max_pages;
        return work;
    }

    // Of the boxes of `chunk_blocks` blocks, in order, one for each lane: the row of the caches'
    // matrices where it begins; negative where there is nothing to load.
    __device__ __forceinline__ int first_rows(const Work& work, int chunk) const {
        const int box = chunk * chunk_blocks * block_boxes + lane;
        const int offset = box * arguments.box_rows;
        if (lane >= chunk_blocks * block_boxes || offset >= work.tile.num_keys) return -1;
        const int key = work.tile.first_key + offset;
        const int page = work.pages[key >> arguments.log_page_size];
        return ((page * arguments.num_kv_heads + work.tile.head) << arguments.log_page_size) +
               (key & ((1 << arguments.log_page_size) - 1));
    }

    __device__ __forceinline__ void load_boxes(const TensorMap* map, int slots, int full, int empty,
                                               int row) {
        const int box_bytes = arguments.box_rows * CACHE_ROW_BYTES;
        const int num_boxes = __popc(__ballot_sync(ALL_LANES, row >= 0));
        barrier_wait(shared + empty + blocks.slot * 8, blocks.phase ^ 1);
        if (lane == 0) barrier_expect(shared + full + blocks.slot * 8, num_boxes * box_bytes);
        __syncwarp();
        if (row >= 0)
            load_box(shared + slots + blocks.slot * BLOCK_BYTES + lane * box_bytes, map,
                     shared + full + blocks.slot * 8, 0, row);
    }

    __device__ __forceinline__ void load_queries(const Tile& tile) {
        barrier_wait(shared + QUERY_EMPTY + queries.slot * 8, queries.phase ^ 1);
        if (lane == 0) {
            const uint32_t full = shared + QUERY_FULL + queries.slot * 8;
            tile.put(shared + TILE_OFFSET + queries.slot * 32);
            if (tile.num_keys > 0) {
                barrier_expect(full, QUERY_BYTES);
                load_box(shared + QUERY_OFFSET + queries.slot * QUERY_BYTES, query_map, full, 0,
                         tile.head << arguments.log_group, tile.first_row);
            } else {
                barrier_arrive(full);
            }
        }
        queries.advance();
    }

    // `rows`: of the last chunk.
    __device__ __forceinline__ void load_blocks(const Work& work, int rows) {
        const int last = work.tile.num_blocks() - 1;
        int chunk = last / chunk_blocks, inside = last - chunk * chunk_blocks;
        int next_rows = chunk > 0 ? first_rows(work, chunk - 1) : -1;
        for (int block = last; block >= 0; --block) {
            const int row = __shfl_sync(ALL_LANES, rows, inside * block_boxes + lane);
            const int own_row = lane < block_boxes ? row : -1;
            load_boxes(key_map, KEY_OFFSET, KEY_FULL, KEY_EMPTY, own_row);
            load_boxes(value_map, VALUE_OFFSET, VALUE_FULL, VALUE_EMPTY, own_row);
            blocks.advance();
            if (--inside < 0 && block > 0) {
                inside = chunk_blocks - 1;
                rows = next_rows;
                --chunk;
                next_rows = chunk > 0 ? first_rows(work, chunk - 1) : -1;
            }
        }
    }

    // The index of this block's next tile, which is the next that no block has. Asked for a tile
    // ahead, for what a counter in memory answers is late.
    __device__ __forceinline__ int next_index() const {
        return lane == 0 ? gridDim.x + atomicAdd(&counters[arguments.counter][0], 1) : 0;
    }

    __device__ __forceinline__ void run() {
        wait_for_previous_kernels();
        Work work = find(blockIdx.x);
        int rows = -1, index = 0;
        if (work.tile.num_keys > 0) {
            rows = first_rows(work, (work.tile.num_blocks() - 1) / chunk_blocks);
            index = next_index();  // and always read: it must not follow what ends the count
        }
        while (work.tile.num_keys > 0) {
            const Work next = find(__shfl_sync(ALL_LANES, index, 0));
            int next_rows = -1;
            if (next.tile.num_keys > 0) {
                next_rows = first_rows(next, (next.tile.num_blocks() - 1) / chunk_blocks);
                index = next_index();
            }
            load_queries(work.tile);
            load_blocks(work, rows);
            work = next;
            rows = next_rows;
        }
        load_queries(work.tile);
        if (lane == 0) {
            unsigned int* counter = counters[arguments.counter];
            if (atomicAdd(counter + 1, 1) == gridDim.x - 1) counter[0] = counter[1] = 0;
        }
        allow_next_kernel();
    }
};

// ---- warpgroups that multiply ----------------------------------------------------------------

// Of the first slot of values, and of the ones behind their dimensions.
__device__ __forceinline__ uint32_t values_descriptor(uint32_t shared);

// What all threads of a block write there.
__device__ __forceinline__ void put_ones(uint32_t shared);

struct Math {
    // A lane has rows lane / 4 and that + 8 of its warp's 16, and of each 8 columns the two from
    // lane % 4 * 2 on: element 4 i + 2 r + c is row r, column 8 i + c.
    float scores[BLOCK_N / 2];
    uint32_t powers[BLOCK_N * CACHE_BYTES / 32][4];  // as the left operand of multiply_values
    float sums[COLUMNS / 2];
    float offset[2];
    float factor[2];  // of sums, where references have moved
    float total[2];  // of the lane's powers, where no ones sum them
    float added[4];  // to that next: a block's, in even and odd columns, of either row
    float kept[KEPT + 1];  // there is no array of none
    float scale[2];  // of scores, as powers of two

    const uint32_t shared;
    const Arguments& arguments;
    const int group;
    const int warp_row;  // of the tile, this warp's first
    const uint32_t query_descriptor, key_descriptor, value_descriptor;  // of the first slots
    Ring<QUERY_SLOTS> queries;
    Ring<STAGES> keys;
    Ring<TRANSPOSED_STAGES> values;
    Tile tile;

    __device__ __forceinline__ Math(uint32_t shared, const Arguments& arguments, int group)
        : shared(shared),
          arguments(arguments),
          group(group),
          warp_row(same_in_warp(threadIdx.x / 32 * 16)),
          query_descriptor(same_in_warp(
              matrix_descriptor(shared + QUERY_OFFSET + group * 64 * ROW_BYTES))),
          key_descriptor(same_in_warp(matrix_descriptor(shared + KEY_OFFSET))),
          value_descriptor(same_in_warp(values_descriptor(shared))) {}

    __device__ __forceinline__ int own_lane() const {
        return (KEPT ? computed_here(threadIdx.x) : threadIdx.x) % 32;  // or a register holds it
    }

    // What each kernel does in its own way. prepare_queries: and sets `scale`.
    __device__ __forceinline__ void prepare_queries();
    __device__ __forceinline__ void multiply_keys();
    __device__ __forceinline__ void round_powers();
    __device__ __forceinline__ void multiply_values(bool accumulate);

    __device__ __forceinline__ void release(uint32_t empty) const {
        const int lane = own_lane();
        __syncwarp();
        if (lane == 0) barrier_arrive(empty);
    }

    __device__ __forceinline__ void release_keys() {
        release(shared + KEY_EMPTY + keys.slot * 8);
        keys.advance();
    }

    __device__ __forceinline__ void release_values() {
        release(shared + TRANSPOSED_EMPTY + values.slot * 8);
        values.advance();
    }

    __device__ __forceinline__ void wait_for_keys() const {
        barrier_wait(shared + KEY_FULL + keys.slot * 8, keys.phase);
    }

    __device__ __forceinline__ void wait_for_values() const {
        barrier_wait(shared + TRANSPOSED_FULL + values.slot * 8, values.phase);
    }

    // The last key that a row's token sees, counted from the tile's first; of rows without a token
    // the last one's.
    __device__ __forceinline__ int last_key(int row) const {
        return tile.position - tile.first_key +
               min(row >> arguments.log_group, tile.num_tokens - 1);
    }

    // Scores of keys that a row's token does not see become -inf, whatever they are.
    __device__ __forceinline__ void mask(int block) {
        const int lane = own_lane();
        const int first_key = block * BLOCK_N, column = first_key + lane % 4 * 2;
        const int row = warp_row + lane / 4;
        const int last[2] = {last_key(row) - column, last_key(row + 8) - column};
        const float hidden = __int_as_float(0xFF800000);
        if (first_key + BLOCK_N - 1 > last_key(warp_row)) {
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; ++i)
                if (i / 4 * 8 + i % 2 > last[i / 2 % 2]) scores[i] = hidden;
        }
        if (HAS_WINDOW && first_key <= last_key(warp_row + 15) - arguments.window) {
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; ++i)
                if (i / 4 * 8 + i % 2 <= last[i / 2 % 2] - arguments.window) scores[i] = hidden;
        }
    }

    // Whether sums have to be multiplied by `factor`, since a row has a new reference, as all rows
    // have that may, where a power would be above 2^limit.
    __device__ __forceinline__ bool raise_references(float limit = HIGHEST) {
        constexpr int PARTS = KEPT ? 1 : 2;  // of a row: less to wait for, or fewer registers
        float largest[2][PARTS];
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) {
            float& part = largest[i / 2 % 2][i % PARTS];
            part = i < 4 && i % 2 < PARTS ? scores[i] : fmaxf(part, scores[i]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) largest[r][0] = fmaxf(largest[r][0], largest[r][PARTS - 1]);
        const float above = fmaxf(fmaf(largest[0][0], scale[0], offset[0]),
                                  fmaf(largest[1][0], scale[1], offset[1]));
        if (!__any_sync(ALL_LANES, above > limit)) return false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest_of_row = largest[r][0];
            largest_of_row = fmaxf(largest_of_row, __shfl_xor_sync(ALL_LANES, largest_of_row, 1));
            largest_of_row = fmaxf(largest_of_row, __shfl_xor_sync(ALL_LANES, largest_of_row, 2));
            const float most = fmaf(largest_of_row, -scale[r], HIGHEST - SLACK);
            const float lowered = fminf(offset[r], most);
            factor[r] = exp2_approx(lowered - offset[r]);
            offset[r] = lowered;
            if constexpr (!HAS_ONES) total[r] *= factor[r];
        }
        return true;
    }

    // Each score becomes its power of two.
    __device__ __forceinline__ void raise_to_powers() {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) {
            scores[i] = exp2_approx(fmaf(scores[i], scale[i / 2 % 2], offset[i / 2 % 2]));
            if constexpr (!HAS_ONES) added[i % 4] = i < 4 ? scores[i] : added[i % 4] + scores[i];
        }
    }

    __device__ __forceinline__ void add_powers() {
        if constexpr (HAS_ONES) return;
        total[0] += added[0] + added[1];
        total[1] += added[2] + added[3];
    }

    __device__ __forceinline__ void rescale() {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) sums[i] *= factor[i / 2 % 2];
#pragma unroll
        for (int i = 0; i < KEPT; ++i) kept[i] *= factor[i / 2 % 2];
    }

    // Of e4m3: this warp's scores once more, by itself.
    __device__ __forceinline__ void multiply_keys_again() {
        const int lane = own_lane();
        // Of a row the first or the second 16 bytes, swizzled as the copy engine does it.
        const uint32_t query = shared + QUERY_OFFSET + queries.slot * QUERY_BYTES +
                               (warp_row + lane % 16) * ROW_BYTES + (lane / 16 ^ lane % 8) * 16;
        const uint32_t key = shared + KEY_OFFSET + keys.slot * BLOCK_BYTES +
                             (lane / 16 * 8 + lane % 8) * CACHE_ROW_BYTES +
                             (lane / 8 % 2 ^ lane % 8 / 2) * 16;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 16; ++i) {
            float part[2][4] = {};
#pragma unroll 1  // registers do not suffice for more
            for (int k = 0; k < D / 32; ++k) {
                uint32_t a[4], b[4];
                load_matrices(computed_here(query) ^ k * 32, a);
                load_matrices((computed_here(key) ^ k * 32) + i * 16 * CACHE_ROW_BYTES, b);
                multiply_e4m3(part[0], a, {b[0], b[1]});
                multiply_e4m3(part[1], a, {b[2], b[3]});
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) scores[8 * i + j] = part[j / 4][j % 4];
        }
    }

    // Of e4m3, where no maximum was looked for. Whether references have moved.
    __device__ __forceinline__ bool lower_powers() {
        const float largest = fmaxf(fmaxf(added[0], added[1]), fmaxf(added[2], added[3]));
        if (!__any_sync(ALL_LANES, !(largest < MAXIMUM_SUM))) return false;
        put_kept_away();
        multiply_keys_again();
        const bool is_raised = raise_references(HIGHEST - SLACK);
        raise_to_powers();
        round_powers();
        take_kept_back();
        return is_raised;
    }

    // Beside the values of the block before, with the lane's powers of that one.
    template <bool MAY_BE_MASKED>
    __device__ __forceinline__ void attend_to_next(int block, bool accumulate) {
        constexpr bool IS_OPTIMISTIC = FP8 && !MAY_BE_MASKED;
        if constexpr (KEPT > 0) factor[0] = factor[1] = 1;  // no register holds those before
        wait_for_keys();
        wait_for_values();
        multiply_keys();
        multiply_values(accumulate);
        wgmma_wait<1>();
        fence_registers(scores);
        bool is_raised = false;
        if constexpr (!IS_OPTIMISTIC) {
            release_keys();
            if constexpr (MAY_BE_MASKED) mask(block);
            is_raised = raise_references();
        }
        raise_to_powers();
        fence_registers(scores);
        wgmma_wait<0>();
        fence_registers(scores);
        fence_registers(sums);
        release_values();
        round_powers();
        if constexpr (IS_OPTIMISTIC) {
            is_raised = lower_powers();
            release_keys();
        }
        add_powers();
        if (is_raised) rescale();
    }

    // Adds the sums of the blocks behind this one to what is kept, if it is time; whether it was.
    __device__ __forceinline__ bool keep(int block) {
        const bool is_time = KEPT && block % KEPT_EVERY == 0;
        if (is_time) {
#pragma unroll
            for (int i = 0; i < KEPT; ++i) kept[i] += sums[i];
        }
        return is_time;
    }

    // To shared memory and back, where registers are needed for something else.
    __device__ __forceinline__ void put_kept_away() const {
        const uint32_t place = computed_here(shared + KEPT_OFFSET + threadIdx.x * 16);
#pragma unroll
        for (int i = 0; i < KEPT; i += 4)
            store_float4(place + i * (MATH_THREADS * 4),
                         {kept[i], kept[i + 1], kept[i + 2], kept[i + 3]});
    }

    __device__ __forceinline__ void take_kept_back() {
        const uint32_t place = computed_here(shared + KEPT_OFFSET + threadIdx.x * 16);
#pragma unroll
        for (int i = 0; i < KEPT; i += 4) {
            const float4 four = load_float4(place + i * (MATH_THREADS * 4));
            kept[i] = four.x, kept[i + 1] = four.y, kept[i + 2] = four.z, kept[i + 3] = four.w;
        }
    }

    __device__ __forceinline__ void attend() {
        offset[0] = offset[1] = -NO_REFERENCE;
        total[0] = total[1] = 0;
#pragma unroll
        for (int i = 0; i < KEPT; ++i) kept[i] = 0;
        int block = tile.num_blocks() - 1;
        wait_for_keys();
        multiply_keys();
        wgmma_wait<0>();
        fence_registers(scores);
        release_keys();
        mask(block);
        raise_references();
        raise_to_powers();
        add_powers();
        round_powers();
        wait_for_values();
        if (!FP8) barrier_wait(shared + END_CLEARED + queries.slot * 8, queries.phase);
        bool accumulate = false;
        if constexpr (OVERLAPS) {
            const int first_masked = HAS_WINDOW ? 0 : (tile.position + 1) / BLOCK_N;
            while (--block >= first_masked) {
                attend_to_next<true>(block, accumulate);
                accumulate = !keep(block);
            }
            if constexpr (!HAS_WINDOW) {
                for (; block >= 0; --block) {
                    attend_to_next<false>(block, accumulate);
                    accumulate = !keep(block);
                }
            }
            wait_for_values();
        } else {
            while (--block >= 0) {
                multiply_values(accumulate);
                wgmma_wait<0>();
                fence_registers(sums);
                release_values();
                wait_for_keys();
                multiply_keys();
                wgmma_wait<0>();
                fence_registers(scores);
                release_keys();
                mask(block);
                if (raise_references()) rescale();
                raise_to_powers();
                add_powers();
                round_powers();
                wait_for_values();
                accumulate = true;
            }
        }
        if (!FP8 && HAS_WINDOW)
            barrier_wait(shared + START_CLEARED + queries.slot * 8, queries.phase);
        multiply_values(accumulate);
        wgmma_wait<0>();
        fence_registers(sums);
        release_values();
#pragma unroll
        for (int i = 0; i < KEPT; ++i) sums[i] += kept[i];
    }

    // Through the place of the tile's queries, which all four warps have multiplied.
    __device__ __forceinline__ void store() {
        const int lane = computed_here(threadIdx.x % 32);  // no register holds what follows from it
        const int num_rows = tile.num_tokens << arguments.log_group;
        const int mask = (1 << arguments.log_group) - 1;
        const int first_head = tile.head << arguments.log_group;
        float inverse[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = HAS_ONES ? sums[COLUMNS / 2 - 4 + 2 * r] : total[r];
            if constexpr (!HAS_ONES) {
                sum += __shfl_xor_sync(ALL_LANES, sum, 1);
                sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            }
            const int head = first_head + ((warp_row + lane / 4 + r * 8) & mask);
            const float sink = __ldg(arguments.sinks + head);
            sum += exp2_approx(fmaf(sink, LOG2_E, offset[r]));
            inverse[r] = reciprocal_approx(sum);
            if constexpr (FP8) inverse[r] *= tile.value_scale;
        }
        named_sync(GROUP_BARRIER + group, 128);
        const uint32_t place =
            shared + QUERY_OFFSET + queries.slot * QUERY_BYTES + warp_row * ROW_BYTES;
        const uint32_t first = place + lane % 16 * ROW_BYTES + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
        for (int i = 0; i < D / 2; i += 8)
            store_matrices(first ^ i * 4, pack_bf16(sums[i] * inverse[0], sums[i + 1] * inverse[0]),
                           pack_bf16(sums[i + 2] * inverse[1], sums[i + 3] * inverse[1]),
                           pack_bf16(sums[i + 4] * inverse[0], sums[i + 5] * inverse[0]),
                           pack_bf16(sums[i + 6] * inverse[1], sums[i + 7] * inverse[1]));
        __syncwarp();
        uint32_t pieces[4][4];
        const int unit = lane % 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = i * 4 + lane / 8;
            int words[4];
            load_shared(place + row * ROW_BYTES + (unit ^ row % 8) * 16, words[0], words[1],
                        words[2], words[3]);
#pragma unroll
            for (int j = 0; j < 4; ++j) pieces[i][j] = words[j];
        }
        // Behind the reads, for which an arrival does not wait.
        shared_fence();  // the copy engine writes here next
        release(shared + QUERY_EMPTY + queries.slot * 8);
        queries.advance();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = warp_row + i * 4 + lane / 8;
            const long long token = tile.first_row + (row >> arguments.log_group);
            const long long out_row = token * arguments.num_heads + first_head + (row & mask);
            if (row < num_rows)
                store_global(arguments.out + out_row * ROW_BYTES + unit * 16, pieces[i]);
        }
    }

    __device__ __forceinline__ void run() {
        while (true) {
            barrier_wait(shared + QUERY_FULL + queries.slot * 8, queries.phase);
            tile.get(shared + TILE_OFFSET + queries.slot * 32);
            if (tile.num_keys == 0) break;
            prepare_queries();
            attend();
            store();
            __syncwarp();  // or the compiler keeps no slot's number in uniform registers
        }
    }
};

// All that a block does; of a type of cache, what it does beside loading and multiplying.
template <typename Helper>
__device__ __forceinline__ void attend(uint32_t shared, const TensorMap& query_map,
                                       const TensorMap& key_map, const TensorMap& value_map,
                                       const Arguments& arguments) {
    const int group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0);

    if (threadIdx.x == MATH_THREADS) {
        prefetch_map(&query_map);
        prefetch_map(&key_map);
        prefetch_map(&value_map);
        for (int i = 0; i < QUERY_SLOTS; ++i) {
            barrier_init(shared + QUERY_FULL + i * 8, 1);
            barrier_init(shared + QUERY_EMPTY + i * 8, MATH_WARPS + HELPERS);
            barrier_init(shared + END_CLEARED + i * 8, 1);
            barrier_init(shared + START_CLEARED + i * 8, 1);
        }
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared + KEY_FULL + i * 8, 1);
            barrier_init(shared + VALUE_FULL + i * 8, 1);
            barrier_init(shared + KEY_EMPTY + i * 8, MATH_WARPS);
            barrier_init(shared + VALUE_EMPTY + i * 8, FP8 ? HELPERS : MATH_WARPS + HELPERS);
        }
        for (int i = 0; FP8 && i < TRANSPOSED_STAGES; ++i) {
            barrier_init(shared + TRANSPOSED_FULL + i * 8, HELPERS);
            barrier_init(shared + TRANSPOSED_EMPTY + i * 8, MATH_WARPS);
        }
        barrier_init_fence();
    }
    if constexpr (HAS_ONES) put_ones(shared);
    __syncthreads();

    if (group == WARPGROUPS) {
        give_registers<PRODUCER_REGISTERS>();
        const int warp = same_in_warp(threadIdx.x / 32) - MATH_WARPS;
        if (warp == 0)
            Producer{shared, &query_map, &key_map, &value_map, arguments}.run();
        else if (warp <= HELPERS)
            Helper{shared, arguments.window, warp - 1}.run();
    } else {
        take_registers<MATH_REGISTERS>();
        Math(shared, arguments, group).run();
    }
}
