// After dispatch_count: the row of each choice. A block has the choices that it counted, and each of
// its warps a part of those. Where a warp's rows of an expert begin is known before it places any.

// The rows of all experts before, of this one in blocks before, and of this one in warps before:
// next[w][e] for this block's warps.
__device__ __forceinline__ void find_rows(const Arguments& arguments, int (&next)[ROWS][BUCKETS],
                                          int first, int end, const Place& place) {
    __shared__ int start[BUCKETS], before[BUCKETS];
    for (int e = threadIdx.x; e < BUCKETS; e += THREADS) {
        start[e] = before[e] = 0;
        for (int w = 0; w < ROWS; ++w) next[w][e] = 0;
    }
    __syncthreads();
    for (int i = first + place.lane; i < end; i += 32)
        atomicAdd(&next[place.row][expert_of(arguments, i)], 1);

    wait_for_previous_kernels();
    // Four experts a thread, in every n-th block.
    constexpr int QUADS = BUCKETS / 4, STEP = THREADS / QUADS;
    static_assert(STEP > 0);
    if (threadIdx.x < STEP * QUADS) {
        const int quad = threadIdx.x % QUADS;
        int4 all = make_int4(0, 0, 0, 0), earlier = make_int4(0, 0, 0, 0);
#pragma unroll 8
        for (int block = threadIdx.x / QUADS; block < gridDim.x; block += STEP) {
            const int4 counts =
                reinterpret_cast<const int4*>(arguments.counts + block * BUCKETS)[quad];
            const int mask = block < blockIdx.x ? -1 : 0;
            all.x += counts.x, all.y += counts.y, all.z += counts.z, all.w += counts.w;
            earlier.x += counts.x & mask, earlier.y += counts.y & mask;
            earlier.z += counts.z & mask, earlier.w += counts.w & mask;
        }
        atomicAdd(&start[4 * quad], all.x), atomicAdd(&before[4 * quad], earlier.x);
        atomicAdd(&start[4 * quad + 1], all.y), atomicAdd(&before[4 * quad + 1], earlier.y);
        atomicAdd(&start[4 * quad + 2], all.z), atomicAdd(&before[4 * quad + 2], earlier.z);
        atomicAdd(&start[4 * quad + 3], all.w), atomicAdd(&before[4 * quad + 3], earlier.w);
    }
    __syncthreads();
    if (threadIdx.x < 32) exclusive_sums(start);
    __syncthreads();
    for (int e = threadIdx.x; e < BUCKETS; e += THREADS) {
        if (blockIdx.x == 0 && e <= EXPERTS) arguments.expert_start[e] = start[e];
        int row = start[e] + before[e];
#pragma unroll
        for (int w = 0; w < ROWS; ++w) {
            const int count = next[w][e];
            next[w][e] = row;
            row += count;
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dispatch_place(const __grid_constant__ Arguments arguments) {
    static_assert(WARPS == 1);
    __shared__ int next[ROWS][BUCKETS];
    allow_next_kernel();
    const Place place;
    const int num_choices = arguments.num_tokens * CHOSEN;
    const int begin = first_choice(num_choices, blockIdx.x, gridDim.x);
    const int count = first_choice(num_choices, blockIdx.x + 1, gridDim.x) - begin;
    const int first = begin + first_choice(count, place.row, ROWS);
    const int end = begin + first_choice(count, place.row + 1, ROWS);
    find_rows(arguments, next, first, end, place);

    const uint32_t lanes_before = (1u << place.lane) - 1;
    for (int choice = first + place.lane; choice - place.lane < end; choice += 32) {
        const int expert = choice < end ? expert_of(arguments, choice) : -1;
        const uint32_t same = __match_any_sync(ALL_LANES, expert);
        const int rank = __popc(same & lanes_before);
        int row = 0;
        if (choice < end) {
            row = next[place.row][expert] + rank;
            arguments.rows[choice] = row;
            if (arguments.source != nullptr) arguments.source[row] = choice / CHOSEN;
        }
        __syncwarp();
        if (choice < end && rank == 0) next[place.row][expert] = row + __popc(same);
        __syncwarp();
    }
}
