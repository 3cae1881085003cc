// A step as the host sent it, laid out as the forward pass reads it; new pages kept by seat.
//
// The blocks of a sequence share its rows, its new pages and the columns of its page tables. None
// waits for another: a page that came with this step is looked up there, not in the seat's table.

struct Item {
    int seat, position, row, num_rows, words;
    int full_column, num_full_pages, window_column, num_window_pages;
};

// Of one page group.
struct Group {
    int* by_seat;
    int* tables;
    long long* slots;
};

struct Arguments {
    const Item* items;
    const int* words;
    const long long* last_token_ids;
    Group full, window;
    long long *input_ids, *positions;
    int *query_start, *seq_lens;
    int num_sequences, num_seats, seat_width, table_width, page_shift, sliding_window;
};

// Which of a sequence's rows, pages or columns a thread has.
struct Share {
    int first, step;
};

// A sequence's pages of one group: `count` from `column` on are new, the others are its seat's.
struct Pages {
    int* of_seat;  // none of a sequence without a seat, all of whose pages are page 0
    const int* brought;
    int column, count;

    __device__ __forceinline__ Pages(const Group& group, const Arguments& arguments, int seat,
                                     const int* brought, int column, int count)
        : of_seat(seat < 0 ? nullptr : group.by_seat + (long long)seat * arguments.seat_width),
          brought(brought),
          column(column),
          count(count) {}

    __device__ __forceinline__ int operator[](int index) const {
        if (of_seat == nullptr) return 0;
        const uint32_t beyond = index - column;
        return beyond < uint32_t(count) ? brought[beyond] : of_seat[index];
    }

    __device__ __forceinline__ void keep(const Share& share) const {
        if (of_seat == nullptr) return;
        for (int i = share.first; i < count; i += share.step) of_seat[column + i] = brought[i];
    }

    __device__ __forceinline__ void copy(int* table, int begin, int end, const Share& share) const {
        for (int i = begin + share.first; i < end; i += share.step) table[i] = (*this)[i];
    }

    // Where the token at `position` is stored: nowhere without a seat.
    __device__ __forceinline__ long long slot(int position, int page_shift) const {
        if (of_seat == nullptr) return -1;
        const int offset = position & ((1 << page_shift) - 1);
        return ((long long)(*this)[position >> page_shift] << page_shift) + offset;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    unpack_step(const __grid_constant__ Arguments arguments) {
    const int parts = gridDim.x / arguments.num_sequences;
    const int sequence = blockIdx.x / parts;
    const Share share{int(blockIdx.x % parts * THREADS + threadIdx.x), parts * THREADS};
    wait_for_previous_kernels();
    allow_next_kernel();

    const Item item = arguments.items[sequence];
    const int seat = uint32_t(item.seat) < uint32_t(arguments.num_seats) ? item.seat : -1;
    const int* const token_ids = arguments.words + item.words;
    const int* const full_pages = token_ids + item.num_rows;
    const int* const window_pages = full_pages + item.num_full_pages;
    const Pages full(arguments.full, arguments, seat, full_pages, item.full_column,
                     item.num_full_pages);
    const Pages window(arguments.window, arguments, seat, window_pages, item.window_column,
                       item.num_window_pages);

    const int shift = arguments.page_shift, length = item.position + item.num_rows;
    if (share.first == 0) {
        arguments.query_start[sequence] = item.row;
        if (sequence == arguments.num_sequences - 1)
            arguments.query_start[sequence + 1] = item.row + item.num_rows;
        arguments.seq_lens[sequence] = length;
    }
    for (int i = share.first; i < item.num_rows; i += share.step) {
        const int row = item.row + i, position = item.position + i;
        const int token_id = seat < 0 ? -1 : token_ids[i];
        const bool is_pending = token_id < 0 && seat >= 0;
        arguments.input_ids[row] = is_pending ? arguments.last_token_ids[seat] : token_id;
        arguments.positions[row] = position;
        arguments.full.slots[row] = full.slot(position, shift);
        arguments.window.slots[row] = window.slot(position, shift);
    }

    const long long table = (long long)sequence * arguments.table_width;
    const int first_seen = max(item.position - arguments.sliding_window + 1, 0) >> shift;
    const int end = ((length - 1) >> shift) + 1;
    full.copy(arguments.full.tables + table, 0, end, share);
    window.copy(arguments.window.tables + table, first_seen, end, share);
    full.keep(share);
    window.keep(share);
}
