// Log-probabilities of rows of logits: the given token's, and the likeliest tokens with theirs.

struct Arguments {
    Rows rows;
    const long long* token_ids;
    const int* num_top;
    float* chosen;
    int* top_ids;
    float* top;
};

struct Shared {
    uint64_t warps[WARPS];
    uint64_t best;       // of the block
    uint64_t total;      // of its weights
    uint64_t top[MOST];  // its tokens, the likeliest first; 0 for none
    uint64_t all_top[CLUSTER * MOST];
};

// The first of this thread's tokens behind `bound`; 0 if there is none.
__device__ __forceinline__ uint64_t best_behind(const Part& part, uint64_t bound) {
    uint64_t found = 0;
    for (int v = threadIdx.x; v < part.num_vectors; v += THREADS) {
        float values[WIDTH];
        part.load(v, values);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) {
            const uint64_t rank = rank_of(values[i], part.token(v, i));
            if (rank < bound) found = max(found, rank);
        }
    }
    return found;
}

__device__ __forceinline__ void list_top(Shared& shared, const Part& part, uint64_t own,
                                         int count) {
    for (int i = 0; i < count; ++i) {
        const uint64_t best = largest_in_block(own, shared.warps);
        if (threadIdx.x == 0) shared.top[i] = best;
        if (own == best) own = best_behind(part, best);
    }
}

__device__ __forceinline__ uint64_t total_weight(Shared& shared, const Part& part, float largest) {
    uint64_t sum = 0;
    for (int v = threadIdx.x; v < part.num_vectors; v += THREADS) {
        float values[WIDTH];
        part.load(v, values);
#pragma unroll
        for (int i = 0; i < WIDTH; ++i) sum += weight_of(values[i], largest, float(LOG2_E));
    }
    sum = __shfl_sync(ALL_LANES, sum_up_to_lane(sum), 31);
    if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sum += shared.warps[warp];
    return sum;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 3)
    logprobs(const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(16) unsigned char memory[];
    __shared__ Shared shared;
    const int row = blockIdx.x / CLUSTER;
    const uint32_t rank = cluster_rank();
    const Part part(memory, arguments.rows, rank);
    wait_for_previous_kernels();
    allow_next_kernel();
    const int count = min(arguments.num_top[row], MOST);
    if (count < 0) return;

    const char* const logits = arguments.rows.at(row);
    part.fetch(logits);
    copy_wait<0>();
    const uint64_t own = part.best();
    const uint64_t best = largest_in_block(own, shared.warps);
    if (threadIdx.x == 0) shared.best = best;
    list_top(shared, part, own, count);
    cluster_sync();
    const float largest = value_of(order_in(largest_in_cluster(&shared.best)));
    const uint64_t weight = total_weight(shared, part, largest);
    if (threadIdx.x == 0) shared.total = weight;
    cluster_sync();
    if (rank == 0) {
        uint64_t total = 0;
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block)
            total += load_from_cluster(&shared.total, block);
        const float log_total = logf(float(total) * (1.f / (uint64_t(1) << WEIGHT_BITS)));
        const int index = threadIdx.x;
        if (index == 0) {
            const int token = int(arguments.token_ids[row]);
            const bool is_token = 0 <= token && token < arguments.rows.vocab_size;
            const float value = is_token ? logit(logits, token) : __int_as_float(-1);
            arguments.chosen[row] = value - largest - log_total;
        }
        const bool has_one = index < CLUSTER * count;
        const uint64_t one =
            has_one ? load_from_cluster(&shared.top[index % count], index / count) : 0;
        if (has_one) shared.all_top[index] = one;
        __syncthreads();
        int place = 0;
        for (int i = 0; i < CLUSTER * count; ++i) place += shared.all_top[i] > one;
        if (one != 0 && place < count) {
            arguments.top_ids[row * MOST + place] = token_in(one);
            arguments.top[row * MOST + place] = value_of(order_in(one)) - largest - log_total;
        }
    }
    cluster_sync();
}
