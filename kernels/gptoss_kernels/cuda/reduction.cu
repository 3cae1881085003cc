// hidden <- hidden + sum over ranks of update, in fp32 in the order of ranks, rounded once; and of
// that the norm (NORM), in bf16 or quantised by groups of 128 columns (FP8). The update is a row for
// each, or what CHOSEN experts gave, which is first added up and rounded.
//
// A row that travels between ranks is its own flag: every word of an inbox is NOT_YET until a peer
// has stored to it, and again as soon as it was read. So nothing is ordered with anything else, and
// who waits has what it waits for one way over the link after it was sent.
//
// One shot: each rank sends its row to all others, and adds up. TWO_SHOT: of as many rows as there
// are ranks each adds up one, for which the others send theirs, and sends them the sum: with more
// than two ranks less travels, but twice, one after the other.
//
// A block has the slots, of a row or of so many rows, that are its number more than a multiple of
// BLOCKS, whatever the number of rows. It takes turns between two inboxes, from launch to launch: by
// the time that a peer sends into the one of the turn before last, it has had what this rank sent in
// the last turn, for which this rank's launch before had to end. BLOCKS are the same on all ranks,
// which launch the same kernels in the same order for the same numbers of rows.
//
// A block works off its slots one after the other, and blocks begin in their order, so that the
// first slot that is not done yet is at work, or next, on every rank: no wait is for ever as long
// as all ranks live. Whoever waits longer than the limit says for whom, and ends its context.

constexpr int PEERS = RANKS - 1;
constexpr int SHOTS = TWO_SHOT ? 2 : 1;
constexpr int STEP = TWO_SHOT ? RANKS : 1;  // rows of a slot
constexpr uint32_t NOT_YET = 0xFFFFFFFF;    // two NaN as no conversion to bf16 makes them
constexpr uint32_t TWO_NAN = 0x7FFF7FFF;

struct Arguments {
    bf16* hidden;
#if CHOSEN
    Mixture update;
#else
    const bf16* update;
    long long update_stride;
#endif
    const float* weight;
    bf16* out;
    byte* values;
    float* scale;
    bf16* inbox;         // of this rank: [2 turns][slots][SHOTS][PEERS][columns]
    bf16* peers[PEERS];  // those of the others, by their ranks
    int* turns;          // [BLOCKS]
    int* waited;         // rank + 1 and row of what took too long; in the host's memory
    unsigned long long limit;  // nanoseconds
    int rank, slots, rows, columns;
    long long hidden_stride, out_stride, scale_stride;
    float eps;
};

// The ranks that are not this one, in their order.
__device__ __forceinline__ int rank_of(const Arguments& arguments, int peer) {
    return peer + (peer >= arguments.rank);
}

// Of the parts of a receiver's inbox that of a sender.
__device__ __forceinline__ int part_of(int sender, int receiver) {
    return sender - (sender > receiver);
}

__device__ __forceinline__ long long place_of(const Arguments& arguments, int turn, long long slot,
                                              int shot, int part) {
    const long long slots = (long long)turn * arguments.slots + slot;
    return ((slots * SHOTS + shot) * PEERS + part) * arguments.columns;
}

__device__ __forceinline__ void send_vector(bf16* pointer, const uint32_t (&words)[4]) {
    asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(pointer),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

__device__ __forceinline__ void look(uint32_t (&words)[4], const bf16* pointer) {
    asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(pointer)
                 : "memory");
}

__device__ __forceinline__ bool is_there(const uint32_t (&words)[4]) {
    return words[0] != NOT_YET && words[1] != NOT_YET && words[2] != NOT_YET &&
           words[3] != NOT_YET;
}

__device__ __forceinline__ uint64_t nanoseconds() {
    uint64_t time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

__device__ __forceinline__ void give_up(const Arguments& arguments, int rank, long long row) {
    asm volatile(
        "st.relaxed.sys.global.v2.b32 [%0], {%1, %2};\n"
        "fence.acq_rel.sys;" ::"l"(arguments.waited),
        "r"(rank + 1), "r"(int(row))
        : "memory");
    __trap();
}

// What this block sends and gets in this launch.
struct Exchange {
    const Arguments& arguments;
    const Place& place;
    int turn;

    __device__ __forceinline__ void send(const Row& row, long long slot, int shot, int peer) const {
        const int part = part_of(arguments.rank, rank_of(arguments, peer));
        bf16* const inbox = arguments.peers[peer] + place_of(arguments, turn, slot, shot, part);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[i] = row.words[v][i] == NOT_YET ? TWO_NAN : row.words[v][i];
            const int column = place.column(v);
            if (column < arguments.columns) send_vector(inbox + column, words);
        }
    }

    // Rows of the first `count` peers, which are then no longer in the inbox. `row`: for whoever
    // waits in vain.
    __device__ __forceinline__ void receive(Row (&rows)[PEERS], int count, long long slot, int shot,
                                            long long row) const {
        const int columns = arguments.columns;
        bf16* const inbox = arguments.inbox + place_of(arguments, turn, slot, shot, 0);
#pragma unroll
        for (int peer = 0; peer < PEERS; ++peer) {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                uint32_t(&words)[4] = rows[peer].words[v];
                words[0] = words[1] = words[2] = words[3] = 0;
                if (peer < count && place.column(v) < columns)
                    look(words, inbox + peer * columns + place.column(v));
            }
        }
#pragma unroll
        for (int peer = 0; peer < PEERS; ++peer) {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                uint32_t(&words)[4] = rows[peer].words[v];
                bf16* const letter = inbox + peer * columns + place.column(v);
                if (!is_there(words)) {
                    const uint64_t start = nanoseconds();
                    do {
                        if (nanoseconds() - start > arguments.limit)
                            give_up(arguments, rank_of(arguments, peer), row);
                        look(words, letter);
                    } while (!is_there(words));
                }
                const uint32_t nothing[4] = {NOT_YET, NOT_YET, NOT_YET, NOT_YET};
                if (peer < count && place.column(v) < columns) send_vector(letter, nothing);
            }
        }
    }
};

// hidden + those of all ranks, in their order; rounded once.
__device__ __forceinline__ void add(Row& hidden, const Row& own, const Row (&others)[PEERS],
                                    int rank) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float low = 0, high = 0;
#pragma unroll
            for (int peer = 0; peer <= PEERS; ++peer) {
                if (peer == rank) {
                    low += low_bf16(own.words[v][i]);
                    high += high_bf16(own.words[v][i]);
                }
                if (peer < PEERS) {
                    low += low_bf16(others[peer].words[v][i]);
                    high += high_bf16(others[peer].words[v][i]);
                }
            }
            uint32_t& pair = hidden.words[v][i];
            pair = pack_bf16(low + low_bf16(pair), high + high_bf16(pair));
        }
    }
}

// Where there is room for it, the norm's weight stays in registers.
constexpr bool KEEPS_WEIGHT = VECTORS <= 2;

struct Norm {
#if NORM
    Weight weights[KEEPS_WEIGHT ? VECTORS : 1];

    __device__ __forceinline__ Norm(const Arguments& arguments, const Place& place) {
        if constexpr (KEEPS_WEIGHT) {
#pragma unroll
            for (int v = 0; v < VECTORS; ++v)
                weights[v].load(arguments.weight, place.column(v), arguments.columns);
        }
    }
#else
    __device__ __forceinline__ Norm(const Arguments&, const Place&) {}
#endif

    // Of the sums of a row, which is written on the way. Two rows one after the other have another
    // `shared` each.
    __device__ __forceinline__ void finish(Row& x, long long row, float (*shared)[32],
                                           const Arguments& arguments, const Place& place) const {
        const int columns = arguments.columns;
        x.store(arguments.hidden + row * arguments.hidden_stride, columns, place);
#if NORM
        const float factor = norm_factor(sum_of_squares(x, place, shared), columns, arguments.eps);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            Weight weight;
            if constexpr (KEEPS_WEIGHT)
                weight = weights[v];
            else
                weight.load(arguments.weight, place.column(v), columns);
            scale_vector(x.words[v], factor, weight);
        }
#if FP8
        const Quantised<128> quantised(x, place);
        quantised.store(arguments.values + row * arguments.out_stride, arguments.scale + row,
                        arguments.scale_stride, columns, place);
#else
        x.store(arguments.out + row * arguments.out_stride, columns, place);
#endif
#endif
    }
};

// What of an update's row is older than the kernel before this one.
struct Known {
#if CHOSEN
    Choices choices;

    __device__ __forceinline__ void load(const Arguments& arguments, long long row) {
        if (row < arguments.rows) choices.load(arguments.update, row);
    }
#else
    __device__ __forceinline__ void load(const Arguments&, long long) {}
#endif
};

// This rank's part of a row's sum.
__device__ __forceinline__ void load_update(Row& update, const Known& known,
                                            const Arguments& arguments, long long row,
                                            const Place& place) {
#if CHOSEN
    mix(update, arguments.update, known.choices, arguments.columns, place, nullptr);
#else
    update.load(arguments.update + row * arguments.update_stride, arguments.columns, place);
#endif
}

// Of the rows of a slot the one that this rank adds up.
__device__ __forceinline__ long long own_row(const Arguments& arguments, long long slot) {
    return slot * STEP + (TWO_SHOT ? arguments.rank : 0);
}

// The first shot: what peers need of this rank for a slot leaves, what it adds up itself stays.
__device__ __forceinline__ void begin_slot(Row& own, const Known& known, long long slot,
                                           const Exchange& exchange) {
    const Arguments& arguments = exchange.arguments;
#if TWO_SHOT
#pragma unroll
    for (int peer = 0; peer < PEERS; ++peer) {
        const long long row = slot * STEP + rank_of(arguments, peer);
        if (row >= arguments.rows) break;
        Known others;
        others.load(arguments, row);
        Row update;
        load_update(update, others, arguments, row, exchange.place);
        exchange.send(update, slot, 0, peer);
    }
#endif
    const long long row = own_row(arguments, slot);
    if (row < arguments.rows) load_update(own, known, arguments, row, exchange.place);
#if !TWO_SHOT
#pragma unroll
    for (int peer = 0; peer < PEERS; ++peer) exchange.send(own, slot, 0, peer);
#endif
}

// Where a row of each of several peers is in registers, the compiler would rather spill some than
// have one block in a multiprocessor.
#if RANKS > 2 || TWO_SHOT
#define BOUNDS THREADS, 1
#else
#define BOUNDS THREADS
#endif

extern "C" __global__ void __launch_bounds__(BOUNDS)
    reduction(const __grid_constant__ Arguments arguments) {
    static_assert(ROWS == 1);
    __shared__ float shared[2][CHUNKS][32];
    const Place place;
    const Norm norm(arguments, place);
    const int columns = arguments.columns, rank = arguments.rank;
    const long long rows = arguments.rows, step = gridDim.x;
    Known known;
    known.load(arguments, own_row(arguments, blockIdx.x));
    wait_for_previous_kernels();
    allow_next_kernel();

    const int turn = __ldcg(arguments.turns + blockIdx.x);
    const Exchange exchange{arguments, place, turn};
    int count = 0;  // of rows that this block has finished
    Row own, next;
    begin_slot(own, known, blockIdx.x, exchange);
    for (long long slot = blockIdx.x; slot * STEP < rows; slot += step) {
        // What the next slot needs is on its way while this one waits.
        if ((slot + step) * STEP < rows) {
            known.load(arguments, own_row(arguments, slot + step));
            begin_slot(next, known, slot + step, exchange);
        }
        Row others[PEERS];
        const long long first = slot * STEP, mine = own_row(arguments, slot);
        if (mine < rows) {
            Row x;
            x.load(arguments.hidden + mine * arguments.hidden_stride, columns, place);
            exchange.receive(others, PEERS, slot, 0, mine);
            add(x, own, others, rank);
#if TWO_SHOT
#pragma unroll
            for (int peer = 0; peer < PEERS; ++peer) exchange.send(x, slot, 1, peer);
#endif
            norm.finish(x, mine, shared[count++ % 2], arguments, place);
        }
#if TWO_SHOT
        const int others_rows = int(min(rows - first, (long long)RANKS)) - (mine < rows);
        exchange.receive(others, others_rows, slot, 1, first);
#pragma unroll
        for (int peer = 0; peer < PEERS; ++peer) {
            if (peer >= others_rows) break;
            const long long row = first + rank_of(arguments, peer);
            norm.finish(others[peer], row, shared[count++ % 2], arguments, place);
        }
#endif
        own = next;
    }
    __syncthreads();
    if (threadIdx.x == 0) arguments.turns[blockIdx.x] = turn ^ 1;
}
