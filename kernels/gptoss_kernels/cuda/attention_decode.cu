// Attention of few queries a sequence over the paged cache, as fast as memory gives what is read.
//
// A pair is a sequence with one key-value head; its rows are all query heads of that head times the
// sequence's queries. A tile is TILE keys with their values, of one pair. Each warp streams tiles
// through a ring of SLOTS of its own, which nobody else writes, so that no warp waits for another
// while there are tiles. It multiplies its pair's rows, the left operand, with the keys, and their
// weights, in registers, with the values.
//
// SPLIT = 1: a block has one key-value head. The tiles of all pairs of a head, one after the other,
// are cut into as many equal ranges as there are blocks for it. Neighbouring blocks have the heads
// of the same range: what they read at a time are whole pages. In a range the warps take tiles in
// turn. What belongs to one pair is added up by the warp that has the last of its tiles: the others
// leave it their sums in shared memory. A pair of one block is done then. A piece of one goes to
// memory, and the block that comes last adds up all of its pieces, always in the same order.
// SPLIT = 0: one block a pair, for windows, which have as many tiles as a block has warps.
//
// FP8 = 1: the cache is in e4m3. Keys, values and queries are multiplied as halves: the first two
// exactly, the queries scaled by a power of two for each pair, and so with all bits that matter.
//
// Where a pair has more than ROWS rows they are as many pairs, which read the same keys.
//
// Defined by whoever compiles this: FP8, ROWS (8, 16, 32 or 64), TILE (32 or 64), SPLIT, WARPS,
// SLOTS, BLOCKS (of a multiprocessor), SHARED_BYTES.

constexpr int THREADS = WARPS * 32;
constexpr int KEY_BYTES = FP8 ? 64 : 128;
constexpr int KEYS_OF_LINE = 128 / KEY_BYTES;  // of 128 bytes
// A quarter of a tile lies in one page, which a quarter of the warp looks up. The warp loads four
// lines at a time.
constexpr int UNIT = TILE / 4;
constexpr int LINES_OF_UNIT = UNIT / KEYS_OF_LINE;
constexpr int COPY_KEYS = 4 * KEYS_OF_LINE;
static_assert(LINES_OF_UNIT % 4 == 0, "four lines are of one unit");
constexpr int MATRIX_BYTES = TILE * KEY_BYTES;
constexpr int SLOT_BYTES = 2 * MATRIX_BYTES;  // keys, then values

constexpr int M_TILES = (ROWS + 15) / 16;
constexpr int HALVES = ROWS == 8 ? 1 : 2;  // of the 16 rows that the instruction has
constexpr int VECTORS = 4 * HALVES + 1;    // of four floats: what a lane knows of 16 rows
constexpr int PIECE_VECTORS = M_TILES * VECTORS;
constexpr int ROOM_BYTES = PIECE_VECTORS * 32 * 16;
constexpr bool ROWS_IN_ROOM = M_TILES > 1;     // too many for the registers
// Keys whose scores are in registers. What is loaded of them, and of e4m3 converted, is multiplied
// with all rows.
constexpr int STEP = M_TILES == 1 ? TILE : 64 / M_TILES;

constexpr int ROOMS_OFFSET = WARPS * SLOTS * SLOT_BYTES;
constexpr int LEFT_OFFSET = ROOMS_OFFSET + WARPS * ROOM_BYTES;
constexpr int TAKEN_OFFSET = LEFT_OFFSET + WARPS * WARPS * 8;
constexpr int END_OFFSET = TAKEN_OFFSET + WARPS * WARPS * 8;
static_assert(END_OFFSET <= SHARED_BYTES, "the launch gives too little memory");

// log2 of the largest weight: of halves, those below 2^-14 have fewer bits.
constexpr float LIFT = FP8 ? 14 : 0;
constexpr float LOWEST = -3.402823466e38f;  // not -inf, of which a difference may be NaN
constexpr uint32_t ALL_WARPS = (1u << WARPS) - 1;

struct Arguments {
    const unsigned short* query;
    const unsigned char* key_cache;
    const unsigned char* value_cache;
    const float* sinks;
    const int* query_start;
    const int* seq_lens;
    const int* page_tables;
    const float* key_scale;    // or none
    const float* value_scale;  // or none
    unsigned short* out;
    float* pieces;
    unsigned int* arrived;
    int num_sequences;
    int num_kv_heads;
    int group_shift;  // log2 of the query heads of a key-value head
    int page_shift;   // log2 of the slots of a page
    int table_width;
    int window;
    int passes;       // SPLIT = 0: the most pairs of a key-value head
    float scale;      // times log2 e
};

// ---- who does what ----------------------------------------------------------------------------

struct Sequence {
    int row;  // its first query
    int queries, length;
    int first;  // the first key that any query sees
    int tiles;  // 0 if there is nothing to do

    Sequence() = default;
    __device__ __forceinline__ Sequence(const Arguments& arguments, int index) {
        row = load_fresh(&arguments.query_start[index]);
        const int next_row = load_fresh(&arguments.query_start[index + 1]);
        length = load_fresh(&arguments.seq_lens[index]);
        queries = next_row - row;
        first = max(length - queries - arguments.window + 1, 0);
        tiles = queries > 0 ? (length - start() + TILE - 1) / TILE : 0;
    }
    // Of the first tile.
    __device__ __forceinline__ int start() const { return first & ~(UNIT - 1); }
    // Pairs of a key-value head.
    __device__ __forceinline__ int passes(const Arguments& arguments) const {
        return ((queries << arguments.group_shift) + ROWS - 1) / ROWS;
    }
    __device__ __forceinline__ int units(const Arguments& arguments) const {
        return tiles * passes(arguments);
    }
};

// How the tiles of a head's pairs are cut into ranges, the same for each head.
struct Cut {
    int ranges, share, longer;  // the first `longer` have one more than `share`

    __device__ __forceinline__ Cut(const Arguments& arguments, int total) {
        const int blocks = gridDim.x / arguments.num_kv_heads;
        ranges = max(min(blocks, total / WARPS), 1);
        share = total / ranges;
        longer = total - share * ranges;
    }
    __device__ __forceinline__ int first_of(int range) const {
        range = min(range, ranges);
        return range * share + min(range, longer);
    }
    __device__ __forceinline__ int range_of(int unit) const {
        const int before = longer * (share + 1);
        return unit < before ? unit / (share + 1) : longer + (unit - before) / share;
    }
};

// A block's range, pair after pair.
struct Walk {
    int unit, last;  // of the head's tiles: where the pair's part of the range begins, its end
    int index;       // of the sequence
    Sequence sequence;
    int head, pass;  // of the pair
    int begin;       // its tiles [begin, end()) are the block's

    __device__ __forceinline__ bool is_done() const { return unit >= last; }
    __device__ __forceinline__ int end() const {
        return min(sequence.tiles, begin + (last - unit));
    }
    // The warp that takes the first of them.
    __device__ __forceinline__ uint32_t turn() const { return static_cast<uint32_t>(unit) % WARPS; }
    __device__ __forceinline__ int first_of(int warp) const {
        return begin + (warp + WARPS - turn()) % WARPS;
    }
    __device__ __forceinline__ bool is_whole() const {
        return begin == 0 && end() == sequence.tiles;
    }
    __device__ __forceinline__ int adding_warp() const {
        return (turn() + end() - begin - 1) % WARPS;
    }
    // All others that have tiles of the pair, a bit each.
    __device__ __forceinline__ uint32_t leaving_warps() const {
        const uint32_t those = (1u << min(end() - begin, WARPS)) - 1;
        const uint32_t turned = (those << turn() | those << turn() >> WARPS) & ALL_WARPS;
        return turned & ~(1u << adding_warp());
    }

    __device__ __forceinline__ void next(const Arguments& arguments) {
        unit += end() - begin;
        begin = 0;
        if (is_done() || ++pass < sequence.passes(arguments)) return;
        pass = 0;
        do sequence = Sequence(arguments, ++index);
        while (sequence.tiles == 0);
    }
};

// Each lane counts the tiles of neighbouring sequences; the one that has the range's first says
// where it lies.
__device__ __forceinline__ Walk find_range(const Arguments& arguments, int lane, int& total) {
    Walk walk = {};
    const int range = blockIdx.x / arguments.num_kv_heads;
    walk.head = blockIdx.x - range * arguments.num_kv_heads;
    const int each = (arguments.num_sequences + 31) / 32;
    int index = min(lane * each, arguments.num_sequences);
    const int last = min(index + each, arguments.num_sequences);
    Sequence sequence = {};
    int own = 0;
    for (int i = last - 1; i >= index; --i) {
        sequence = Sequence(arguments, i);
        own += sequence.units(arguments);
    }
    int until = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, until, distance);
        if (lane >= distance) until += other;
    }
    total = __shfl_sync(ALL_LANES, until, 31);
    const Cut cut(arguments, total);
    walk.unit = cut.first_of(range);
    walk.last = cut.first_of(range + 1);
    if (walk.is_done()) return walk;
    int start = until - own;
    const bool is_here = start <= walk.unit && walk.unit < until;
    if (is_here) {
        for (; walk.unit >= start + sequence.units(arguments);
             sequence = Sequence(arguments, ++index))
            start += sequence.units(arguments);
    }
    const int from = __ffs(__ballot_sync(ALL_LANES, is_here)) - 1;
    walk.index = __shfl_sync(ALL_LANES, index, from);
    sequence.row = __shfl_sync(ALL_LANES, sequence.row, from);
    sequence.queries = __shfl_sync(ALL_LANES, sequence.queries, from);
    sequence.length = __shfl_sync(ALL_LANES, sequence.length, from);
    sequence.first = __shfl_sync(ALL_LANES, sequence.first, from);
    sequence.tiles = __shfl_sync(ALL_LANES, sequence.tiles, from);
    walk.sequence = sequence;
    walk.begin = walk.unit - __shfl_sync(ALL_LANES, start, from);
    for (; walk.begin >= sequence.tiles; walk.begin -= sequence.tiles) ++walk.pass;
    return walk;
}

// The block's pair.
__device__ __forceinline__ Walk own_pair(const Arguments& arguments) {
    Walk walk = {};
    const int pair = blockIdx.x / arguments.passes;
    walk.pass = blockIdx.x - pair * arguments.passes;
    walk.index = pair / arguments.num_kv_heads;
    walk.head = pair - walk.index * arguments.num_kv_heads;
    walk.sequence = Sequence(arguments, walk.index);
    walk.last = walk.pass < walk.sequence.passes(arguments) ? walk.sequence.tiles : 0;
    return walk;
}

// ---- a warp's sums -----------------------------------------------------------------------------

// Of 16 rows, of which a lane has lane / 4 and, where HALVES is 2, lane / 4 + 8.
struct Sums {
    float values[8][4];   // as multiply_bf16 leaves them, for 8 columns each
    float base[HALVES];   // weights are 2^(score - base); LIFT below the largest score so far
    float total[HALVES];  // of the lane's weights

    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) values[n][i] = 0;
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            base[half] = LOWEST;
            total[half] = 0;
        }
    }

    __device__ __forceinline__ void scale(int half, float factor) {
        total[half] *= factor;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            values[n][2 * half] *= factor;
            values[n][2 * half + 1] *= factor;
        }
    }

    __device__ __forceinline__ float4 vector(int i) const {
        if (i == VECTORS - 1)
            return make_float4(base[0], total[0], base[HALVES - 1], total[HALVES - 1]);
        if (HALVES == 2) return make_float4(values[i][0], values[i][1], values[i][2], values[i][3]);
        return make_float4(values[2 * i][0], values[2 * i][1], values[2 * i + 1][0],
                           values[2 * i + 1][1]);
    }

    // The first `count` of these, the others being anything finite. Without a branch: behind one
    // the compiler would load what is in memory, one piece after the other.
    template <int COUNT>
    __device__ __forceinline__ void add(const float4 (&pieces)[COUNT][VECTORS], int count) {
        float factors[COUNT][HALVES];
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            const auto of_half = [&](int i) {
                const float4 v = pieces[i][VECTORS - 1];
                return half ? make_float2(v.z, v.w) : make_float2(v.x, v.y);
            };
            float highest = base[half];
#pragma unroll
            for (int i = 0; i < COUNT; ++i)
                highest = fmaxf(highest, i < count ? of_half(i).x : highest);
            scale(half, exp2_approx(base[half] - highest));
            base[half] = highest;
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                factors[i][half] = i < count ? exp2_approx(of_half(i).x - highest) : 0;
                total[half] = fmaf(of_half(i).y, factors[i][half], total[half]);
            }
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float first = factors[i][0], second = factors[i][HALVES - 1];
#pragma unroll
            for (int j = 0; j < VECTORS - 1; ++j) {
                const float4 v = pieces[i][j];
                float* low = HALVES == 2 ? values[j] : values[2 * j];
                float* high = HALVES == 2 ? values[j] + 2 : values[2 * j + 1];
                low[0] = fmaf(v.x, first, low[0]);
                low[1] = fmaf(v.y, first, low[1]);
                high[0] = fmaf(v.z, second, high[0]);
                high[1] = fmaf(v.w, second, high[1]);
            }
        }
    }
};

struct Worker {
    const uint32_t shared;
    const Arguments& arguments;
    const int warp;
    const int lane;

    __device__ __forceinline__ uint32_t slot_at(int slot) const {
        return shared + (warp * SLOTS + slot) * SLOT_BYTES;
    }
    // A lane's vector `index` of the room of a warp.
    __device__ __forceinline__ uint32_t room(int of_warp, int index) const {
        return shared + ROOMS_OFFSET + of_warp * ROOM_BYTES + (index * 32 + lane) * 16;
    }
    // For each two warps: with one barrier a warp, who waits for what it leaves next could take for
    // that what it has yet to leave another.
    __device__ __forceinline__ uint32_t left(int from, int to) const {
        return shared + LEFT_OFFSET + (from * WARPS + to) * 8;
    }
    __device__ __forceinline__ uint32_t taken(int from, int to) const {
        return shared + TAKEN_OFFSET + (from * WARPS + to) * 8;
    }

    // ---- loading --------------------------------------------------------------------------------

    // The warp's tiles, ahead of those that it multiplies, and the page of the lane's unit.
    struct Ahead {
        Walk walk;
        int tile;
        int page;
    };

    // The first of the lane's unit.
    __device__ __forceinline__ int key_of(const Ahead& ahead) const {
        return ahead.walk.sequence.start() + ahead.tile * TILE + lane / 8 * UNIT;
    }

    // From where `ahead` stands to the warp's next tile; its pages are on their way then. Of a unit
    // beyond the sequence it is another unit's.
    __device__ __forceinline__ void settle(Ahead& ahead) const {
        while (!ahead.walk.is_done() && ahead.tile >= ahead.walk.end()) {
            ahead.walk.next(arguments);
            ahead.tile = ahead.walk.first_of(warp);
        }
        if (!ahead.walk.is_done() && key_of(ahead) < ahead.walk.sequence.length)
            ahead.page = load_fresh(&arguments.page_tables[
                static_cast<long long>(ahead.walk.index) * arguments.table_width +
                (key_of(ahead) >> arguments.page_shift)]);
    }

    __device__ __forceinline__ void advance(Ahead& ahead) const {
        ahead.tile += WARPS;
        settle(ahead);
    }

    // 512 bytes at a time, 16 a lane; zeros for keys that no query sees, of which the values may be
    // anything, and 0 * NaN is NaN. To where swizzled lines have them: the 16 bytes i of the line r
    // lie at i ^ (r % 8).
    __device__ __forceinline__ void load(const Ahead& ahead, int slot) const {
        const int key = key_of(ahead);
        const int row =
            ((ahead.page * arguments.num_kv_heads + ahead.walk.head) << arguments.page_shift) +
            (key & ((1 << arguments.page_shift) - 1));
        const uint32_t to = slot_at(slot) + lane / 8 * 128 + (lane % 8 ^ lane / 8) * 16;
        const int own = ahead.walk.sequence.start() + ahead.tile * TILE + lane / 8 * KEYS_OF_LINE +
                        lane % 8 * 16 / KEY_BYTES;
        const int first = ahead.walk.sequence.first - own;
        const int last = ahead.walk.sequence.length - own;
#pragma unroll
        for (int unit = 0; unit < 4; ++unit) {
            const int unit_row = __shfl_sync(0xFFFFFFFF, row, unit * 8);
            const long long from = static_cast<long long>(unit_row) * KEY_BYTES + lane * 16;
#pragma unroll
            for (int i = 0; i < LINES_OF_UNIT / 4; ++i) {
                const int copy = unit * (LINES_OF_UNIT / 4) + i;
                const bool is_seen = copy * COPY_KEYS >= first && copy * COPY_KEYS < last;
                const uint32_t place = (to ^ copy % 2 * 64) + copy * 512;
                copy_async(place, arguments.key_cache + from + i * 512, is_seen);
                copy_async(place + MATRIX_BYTES, arguments.value_cache + from + i * 512, is_seen);
            }
        }
    }

    // Into L2 while the kernel before still runs: what that writes of it comes there, too.
    __device__ __forceinline__ void fetch(const Ahead& ahead) const {
        const int key = key_of(ahead);
        if (lane % 8 != 0 || key >= ahead.walk.sequence.length) return;
        const int row =
            ((ahead.page * arguments.num_kv_heads + ahead.walk.head) << arguments.page_shift) +
            (key & ((1 << arguments.page_shift) - 1));
        const long long from = static_cast<long long>(row) * KEY_BYTES;
        fetch_bytes(arguments.key_cache + from, UNIT * KEY_BYTES);
        fetch_bytes(arguments.value_cache + from, UNIT * KEY_BYTES);
    }

    // ---- a pair's rows --------------------------------------------------------------------------

    struct Rows {
        float scale;  // of scores, to base 2
        // Of the only 16 rows, else all this is in the room.
        uint32_t query[4][4];
        float sink[HALVES];
        float value_scale;
    };

    __device__ __forceinline__ int row_of(const Walk& walk, int m, int half) const {
        return walk.pass * ROWS + m * 16 + half * 8 + lane / 4;
    }
    __device__ __forceinline__ bool is_row(const Walk& walk, int row) const {
        return row < walk.sequence.queries << arguments.group_shift;
    }
    __device__ __forceinline__ int head_of(const Walk& walk, int row) const {
        return (walk.head << arguments.group_shift) + (row & ((1 << arguments.group_shift) - 1));
    }
    // Where a row lies in the queries, and in the output.
    __device__ __forceinline__ long long place_of(const Walk& walk, int row) const {
        const int token = walk.sequence.row + (row >> arguments.group_shift);
        const int num_heads = arguments.num_kv_heads << arguments.group_shift;
        return (static_cast<long long>(token) * num_heads + head_of(walk, row)) * 64;
    }

    // Pairs of a row's columns in the order of the key's fragments: words[k][0], words[k][1].
    __device__ __forceinline__ void load_row(const Walk& walk, int row,
                                             uint32_t (&words)[4][2]) const {
        const unsigned short* from =
            arguments.query + place_of(walk, row) + lane % 4 * (FP8 ? 4 : 2);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if constexpr (FP8) {
                const uint2 both = *reinterpret_cast<const uint2*>(from + k * 16);
                words[k][0] = both.x;
                words[k][1] = both.y;
            } else {
                words[k][0] = *reinterpret_cast<const uint32_t*>(from + k * 16);
                words[k][1] = *reinterpret_cast<const uint32_t*>(from + k * 16 + 8);
            }
        }
    }

    __device__ __forceinline__ void load_rows(const Walk& walk, Rows& rows) const {
        const float* key_scale = arguments.key_scale;
        const float* value_scale = arguments.value_scale;
        rows.scale = arguments.scale * (FP8 && key_scale ? key_scale[walk.head] : 1.f);
        const float of_values = FP8 && value_scale ? value_scale[walk.head] : 1.f;
        uint32_t words[M_TILES][2][4][2] = {};
        float sink[M_TILES][2] = {};
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                const int row = row_of(walk, m, half);
                if (!is_row(walk, row)) continue;
                load_row(walk, row, words[m][half]);
                sink[m][half] = arguments.sinks[head_of(walk, row)];
            }
        }
        if constexpr (FP8) rows.scale *= scale_to_halves(words);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const uint32_t a = words[m][0][k][0], b = words[m][1][k][0];
                const uint32_t c = words[m][0][k][1], d = words[m][1][k][1];
                if constexpr (ROWS_IN_ROOM) {
                    store_shared(room(warp, m * 5 + k), a, b, c, d);
                } else {
                    rows.query[k][0] = a;
                    rows.query[k][1] = b;
                    rows.query[k][2] = c;
                    rows.query[k][3] = d;
                }
            }
            if constexpr (ROWS_IN_ROOM) {
                store_float4(room(warp, m * 5 + 4),
                             make_float4(sink[m][0], sink[m][1], of_values, 0));
            } else {
                rows.value_scale = of_values;
#pragma unroll
                for (int half = 0; half < HALVES; ++half) rows.sink[half] = sink[m][half];
            }
        }
    }

    // The pair's largest to 2^14 at least and below 2^15, where what is 2^-28 of it still has all
    // of its bits. Gives what their products are then to be multiplied with.
    __device__ __forceinline__ float scale_to_halves(uint32_t (&words)[M_TILES][2][4][2]) const {
        uint32_t(&all)[M_TILES * 16] = reinterpret_cast<uint32_t(&)[M_TILES * 16]>(words);
        float amax = 0;
#pragma unroll
        for (uint32_t word : all)
            amax = fmaxf(amax, fmaxf(fabsf(low_bf16(word)), fabsf(high_bf16(word))));
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            amax = fmaxf(amax, __shfl_xor_sync(ALL_LANES, amax, distance));
        const uint32_t exponent = max(__float_as_uint(amax) >> 23, 15u);
        const float up = __uint_as_float((127 + 14 + 127 - exponent) << 23);
#pragma unroll
        for (uint32_t& word : all) word = pack_f16(low_bf16(word) * up, high_bf16(word) * up);
        return __uint_as_float((exponent - 14) << 23);
    }

    __device__ __forceinline__ void query_of(const Rows& rows, int m, int k,
                                             uint32_t (&query)[4]) const {
        if constexpr (ROWS_IN_ROOM) {
            int a, b, c, d;
            load_shared(room(warp, m * 5 + k), a, b, c, d);
            query[0] = a;
            query[1] = b;
            query[2] = c;
            query[3] = d;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) query[i] = rows.query[k][i];
        }
    }

    // ---- a tile ---------------------------------------------------------------------------------

    // A key's line, and in it its byte.
    __device__ __forceinline__ uint32_t line_of_key(int key) const {
        return key / KEYS_OF_LINE * 128;
    }
    __device__ __forceinline__ uint32_t column_of_key(int key, int byte) const {
        return (key % KEYS_OF_LINE * KEY_BYTES + byte) ^ key / KEYS_OF_LINE % 8 * 16;
    }

    __device__ __forceinline__ void multiply_keys(float (&scores)[M_TILES][STEP / 8][4],
                                                  const Rows& rows, uint32_t keys) const {
        // What four matrices are: so many times 8 keys, by so many times 16 columns.
        constexpr int KEYS = !FP8 || STEP == 16 ? 2 : 4;
        constexpr int COLUMNS = FP8 ? 4 / KEYS : 1;
        const int key = FP8 ? lane % (KEYS * 8) : lane / 16 * 8 + lane % 8;
        const int byte = (FP8 ? lane / (KEYS * 8) : lane / 8 % 2) * 16;
        const uint32_t from = keys + line_of_key(key);
        const uint32_t column = column_of_key(key, byte);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int n = 0; n < STEP / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) scores[m][n][i] = 0;
#pragma unroll
        for (int k = 0; k < 4; k += COLUMNS) {
            uint32_t query[COLUMNS][M_TILES][4];
            const uint32_t at = from + (column ^ k * KEY_BYTES / 4);
#pragma unroll
            for (int n = 0; n < STEP / 8; n += KEYS) {
                uint32_t words[4];
                load_matrices(at + n * 8 * KEY_BYTES, words);
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c) {
                    uint32_t b[KEYS][2];
#pragma unroll
                    for (int j = 0; j < KEYS; ++j) {
                        if constexpr (FP8) {
                            to_halves(words[c * KEYS + j], b[j][0], b[j][1]);
                        } else {
                            b[j][0] = words[2 * j];
                            b[j][1] = words[2 * j + 1];
                        }
                    }
#pragma unroll
                    for (int m = 0; m < M_TILES; ++m) {
                        if (n == 0) query_of(rows, m, k + c, query[c][m]);
#pragma unroll
                        for (int j = 0; j < KEYS; ++j)
                            multiply(scores[m][n + j], query[c][m], b[j]);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void multiply_values(
        Sums (&sums)[M_TILES], const uint32_t (&weights)[M_TILES][STEP / 16][4],
        uint32_t values) const {
        const uint32_t from = values + line_of_key(lane % 16);
        const uint32_t column = column_of_key(lane % 16, lane / 16 * 16);
#pragma unroll
        for (int k = 0; k < STEP / 16; ++k) {
#pragma unroll
            for (int pair = 0; pair < KEY_BYTES / 32; ++pair) {
                uint32_t words[4];
                load_matrices_transposed(from + k * 16 * KEY_BYTES + (column ^ pair * 32), words);
                // In e4m3 a word has columns c and c + 1 of two keys. Both keys of the even column
                // make one operand, those of the odd one another: see store.
                constexpr int N_TILES = FP8 ? 4 : 2;  // of 8 columns
                uint32_t b[N_TILES][2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const uint32_t word = words[2 * i + half];
                        if constexpr (FP8)
                            to_halves(__byte_perm(word, 0, 0x3120), b[2 * i][half],
                                      b[2 * i + 1][half]);
                        else
                            b[i][half] = word;
                    }
                }
#pragma unroll
                for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                    for (int n = 0; n < N_TILES; ++n)
                        multiply(sums[m].values[pair * N_TILES + n], weights[m][k], b[n]);
            }
        }
    }

    __device__ __forceinline__ static void multiply(float (&sums)[4], const uint32_t (&a)[4],
                                                    const uint32_t (&b)[2]) {
        if constexpr (FP8) multiply_f16(sums, a, b);
        else multiply_bf16(sums, a, b);
    }

    // What a row does not see has a score of -inf. `key`: the first.
    __device__ __forceinline__ void hide(float (&scores)[STEP / 8][4], const Walk& walk, int m,
                                         int key) const {
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            const int queries = walk.sequence.queries;
            const int token = min(row_of(walk, m, half) >> arguments.group_shift, queries - 1);
            const int last = walk.sequence.length - queries + token - key;
            const int first = last - arguments.window + 1;
#pragma unroll
            for (int n = 0; n < STEP / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int column = n * 8 + lane % 4 * 2 + i;
                    if (column > last || column < first)
                        scores[n][2 * half + i] = __uint_as_float(0xFF800000);
                }
            }
        }
    }

    // The scores become weights, and the sums are scaled to the new maximum.
    __device__ __forceinline__ void weigh(float (&scores)[STEP / 8][4], Sums& sums,
                                          float scale) const {
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            float most[2] = {scores[0][2 * half], scores[0][2 * half + 1]};
#pragma unroll
            for (int n = 1; n < STEP / 8; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) most[i] = fmaxf(most[i], scores[n][2 * half + i]);
            float largest = fmaxf(most[0], most[1]);
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
            const float base = fmaxf(sums.base[half], fmaf(largest, scale, -LIFT));
            sums.scale(half, exp2_approx(sums.base[half] - base));
            sums.base[half] = base;
            float total[2] = {};
#pragma unroll
            for (int n = 0; n < STEP / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& score = scores[n][2 * half + i];
                    score = exp2_approx(fmaf(score, scale, -base));
                    total[i] += score;
                }
            }
            sums.total[half] += total[0] + total[1];
        }
    }

    // As a left operand: of two neighbouring blocks of 8 keys, each half's.
    __device__ __forceinline__ void pack(const float (&scores)[STEP / 8][4],
                                         uint32_t (&weights)[STEP / 16][4]) const {
#pragma unroll
        for (int k = 0; k < STEP / 16; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* two = &scores[2 * k + i / 2][i % 2 * 2];
                weights[k][i] = FP8 ? pack_f16(two[0], two[1]) : pack_bf16(two[0], two[1]);
                if (i % 2 >= HALVES) weights[k][i] = 0;
            }
        }
    }

    __device__ __forceinline__ void attend(Sums (&sums)[M_TILES], const Rows& rows,
                                           const Walk& walk, int tile, int slot) const {
        const Sequence& sequence = walk.sequence;
        const int key = sequence.start() + tile * TILE;
        const bool is_edge = key + TILE > sequence.length - sequence.queries + 1 ||
                             key < sequence.length - arguments.window;
        const uint32_t of_keys = slot_at(slot), of_values = of_keys + MATRIX_BYTES;
#pragma unroll 1  // or the compiler mixes steps, and spills
        for (int step = 0; step < TILE / STEP; ++step) {
            const int first = step * STEP * KEY_BYTES;
            float scores[M_TILES][STEP / 8][4];
            uint32_t weights[M_TILES][STEP / 16][4];
            multiply_keys(scores, rows, of_keys + first);
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                if (is_edge) hide(scores[m], walk, m, key + step * STEP);
                weigh(scores[m], sums[m], rows.scale);
                pack(scores[m], weights[m]);
            }
            multiply_values(sums, weights, of_values + first);
        }
    }

    // ---- a pair's end ---------------------------------------------------------------------------

    // Adds the sink, and stores 16 rows.
    __device__ __forceinline__ void store(const Walk& walk, const Rows& rows, int m,
                                          const Sums& sums) const {
        float4 sink = {};
        if constexpr (ROWS_IN_ROOM) sink = load_float4(room(warp, m * 5 + 4));
        else sink = make_float4(rows.sink[0], rows.sink[HALVES - 1], rows.value_scale, 0);
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            float total = sums.total[half];
            total += __shfl_xor_sync(ALL_LANES, total, 1);
            total += __shfl_xor_sync(ALL_LANES, total, 2);
            total += exp2_approx(fmaf(half ? sink.y : sink.x, LOG2_E, -sums.base[half]));
            const float factor = sink.z * reciprocal_approx(total);
            const int row = row_of(walk, m, half);
            if (!is_row(walk, row)) continue;
            unsigned short* to = arguments.out + place_of(walk, row) + lane % 4 * (FP8 ? 4 : 2);
            const auto value = [&](int n, int i) { return sums.values[n][2 * half + i] * factor; };
            if constexpr (FP8) {
#pragma unroll
                for (int n = 0; n < 8; n += 2)
                    store_global(to + n * 8, pack_bf16(value(n, 0), value(n + 1, 0)),
                                 pack_bf16(value(n, 1), value(n + 1, 1)));
            } else {
#pragma unroll
                for (int n = 0; n < 8; ++n)
                    store_global(to + n * 8, pack_bf16(value(n, 0), value(n, 1)));
            }
        }
    }

    __device__ __forceinline__ float* piece(int slot, int index) const {
        const long long vector = static_cast<long long>(slot) * PIECE_VECTORS + index;
        return arguments.pieces + (vector * 32 + lane) * 4;
    }
    // A block has at most two pieces: of a pair that began in an earlier range, and of one that
    // begins in its own.
    __device__ __forceinline__ int slot_of(const Walk& walk, int range, bool is_begun) const {
        return (range * arguments.num_kv_heads + walk.head) * 2 + is_begun;
    }

    // Leaves the pair's sums in memory; whoever comes last adds up and stores.
    __device__ __forceinline__ void store_piece(const Walk& walk, const Rows& rows,
                                                const Sums (&sums)[M_TILES], const Cut& cut) const {
        const int slot = blockIdx.x * 2 + (walk.begin == 0);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
                *reinterpret_cast<float4*>(piece(slot, m * VECTORS + i)) = sums[m].vector(i);
        const int start = walk.unit - walk.begin;
        const int first = cut.range_of(start);
        const int last = cut.range_of(start + walk.sequence.tiles - 1);
        __syncwarp();
        global_fence();  // behind the warp's barrier: for what all of its lanes wrote
        int is_last = 0;
        if (lane == 0) {
            unsigned int* counter = &arguments.arrived[first * arguments.num_kv_heads + walk.head];
            is_last = atomicAdd(counter, 1) == last - first;
            if (is_last) *counter = 0;
        }
        if (!__shfl_sync(ALL_LANES, is_last, 0)) return;
        global_fence();
        __syncwarp();
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
            constexpr int AT_ONCE = HALVES == 1 ? 9 : M_TILES == 1 ? 4 : 3;
            Sums all;
            all.reset();
            for (int base = first; base <= last; base += AT_ONCE) {
                float4 pieces[AT_ONCE][VECTORS];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    const int range = min(base + i, last);
                    const int slot = slot_of(walk, range, range == first);
#pragma unroll
                    for (int j = 0; j < VECTORS; ++j)
                        pieces[i][j] = load_fresh(piece(slot, m * VECTORS + j));
                }
                all.add(pieces, last + 1 - base);
            }
            store(walk, rows, m, all);
        }
    }

    // How often this warp left its sums to another, and took another's: the lowest bit, which is
    // all that barriers tell.
    struct Exchange {
        uint32_t left = 0, taken = 0;  // a bit each
        int last;                      // to whom it left its sums last; at first, itself
    };

    __device__ __forceinline__ void wait_for_room(const Exchange& exchange) const {
        barrier_wait(taken(warp, exchange.last), (exchange.left >> exchange.last & 1) ^ 1);
    }

    __device__ __forceinline__ void leave(const Sums (&sums)[M_TILES], Exchange& exchange,
                                          int to) const {
        wait_for_room(exchange);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < VECTORS; ++i)
                store_float4(room(warp, m * VECTORS + i), sums[m].vector(i));
        __syncwarp();
        if (lane == 0) barrier_arrive(left(warp, to));
        exchange.left ^= 1u << to;
        exchange.last = to;
    }

    __device__ __forceinline__ void add_up(Sums (&sums)[M_TILES], Exchange& exchange,
                                           uint32_t leaving) const {
        constexpr int MOST = WARPS > 4 ? 4 : WARPS > 1 ? WARPS - 1 : 1;
        constexpr int AT_ONCE = M_TILES > 1 ? 1 : HALVES == 2 ? (MOST + 1) / 2 : MOST;
#pragma unroll 1
        for (uint32_t rest = leaving; rest != 0;) {
            int others[AT_ONCE], count = 0;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i) {
                others[i] = rest != 0 ? __ffs(rest) - 1 : others[0];
                if (rest == 0) continue;
                barrier_wait(left(others[i], warp), exchange.taken >> others[i] & 1);
                rest &= rest - 1;
                ++count;
            }
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                float4 pieces[AT_ONCE][VECTORS];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
                    for (int j = 0; j < VECTORS; ++j)
                        pieces[i][j] = load_float4(room(others[i], m * VECTORS + j));
                sums[m].add(pieces, count);
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                if (lane == 0 && i < count) barrier_arrive(taken(others[i], warp));
        }
        exchange.taken ^= leaving;
    }

    __device__ __forceinline__ void make_barriers() const {
        if (lane == 0) {
#pragma unroll
            for (int other = 0; other < WARPS; ++other) {
                barrier_init(left(warp, other), 1);
                barrier_init(taken(warp, other), 1);
            }
            barrier_init_fence();
        }
        __syncwarp();
    }

    __device__ __forceinline__ void run(Walk walk, int total) const {
        Ahead ahead = {walk, walk.first_of(warp), 0};
        settle(ahead);
        Ahead first[SLOTS];
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot) {
            first[slot] = ahead;
            if (!ahead.walk.is_done()) advance(ahead);
        }
        // While pages are on their way.
        make_barriers();
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot)
            if (!first[slot].walk.is_done()) fetch(first[slot]);
        wait_for_previous_kernels();
#pragma unroll
        for (int slot = 0; slot < SLOTS; ++slot) {
            if (!first[slot].walk.is_done()) load(first[slot], slot);
            copy_commit();
        }
        allow_next_kernel();
        __syncthreads();
        int slot = 0;
        Exchange exchange;
        exchange.last = warp;
        for (; !walk.is_done(); walk.next(arguments)) {
            int tile = walk.first_of(warp);
            if (tile >= walk.end()) continue;
            if constexpr (ROWS_IN_ROOM) wait_for_room(exchange);
            Rows rows;
            load_rows(walk, rows);
            Sums sums[M_TILES];
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) sums[m].reset();
            for (; tile < walk.end(); tile += WARPS) {
                // With 64 rows no register is left to keep what follows from the lane.
                const Worker here{shared, arguments, warp,
                                  M_TILES == 4 ? static_cast<int>(computed_here(lane)) : lane};
                copy_wait<SLOTS - 1>();
                __syncwarp();  // all lanes' copies
                here.attend(sums, rows, walk, tile, slot);
                __syncwarp();  // all have read
                if (!ahead.walk.is_done()) {
                    here.load(ahead, slot);
                    advance(ahead);
                }
                copy_commit();
                if (++slot == SLOTS) slot = 0;
            }
            const int adding = walk.adding_warp();
            if (warp != adding) {
                leave(sums, exchange, adding);
                continue;
            }
            add_up(sums, exchange, walk.leaving_warps());
            if (!SPLIT || walk.is_whole()) {
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) store(walk, rows, m, sums[m]);
            } else {
                // At once, else what follows from the total is in registers all the time.
                store_piece(walk, rows, sums, Cut(arguments, computed_here(total)));
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_decode(const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(128) unsigned char memory[];
    const int warp = __shfl_sync(ALL_LANES, threadIdx.x / 32, 0);
    const int lane = threadIdx.x % 32;
    int total = 0;
    const Walk walk = SPLIT ? find_range(arguments, lane, total) : own_pair(arguments);
    Worker{shared_address(memory), arguments, warp, lane}.run(walk, total);
}
