// Where tokens go: what dispatch_few.cu and, for more tokens, dispatch_count.cu, dispatch_place.cu,
// dispatch_move.cu and dispatch_scales.cu share.
//
// A choice is one of the T CHOSEN entries of `chosen`, numbered as they are stored. Rows are in the
// order of their choices' experts, and for one expert in the order of the choices. What is no
// expert's number counts as the one behind the last: its rows lie behind all others, and are not
// written.

// As int64 or int32; as unsigned numbers, in which no negative one is an expert.
#if CHOSEN_BYTES == 8
using Choice = uint64_t;
#else
using Choice = uint32_t;
#endif

constexpr int BUCKETS = (EXPERTS + 1 + 3) / 4 * 4;

struct Arguments {
    const bf16* x;
    const Choice* chosen;
    int* counts;  // [blocks][BUCKETS], but for few tokens
    // For dispatch_scales, null without it: scales by token [tokens][SCALES], and each row's token.
    float* token_scale;
    int* source;
    byte* values;
    float* scale;
    int* expert_start;
    int* rows;
    int num_tokens, columns;
    long long x_stride, values_stride, scale_stride;
};

__device__ __forceinline__ int expert_of(const Arguments& arguments, int choice) {
    // Past L1: dispatch_place reads them before its wait.
    const Choice expert = __ldcg(arguments.chosen + choice);
    return expert < EXPERTS ? int(expert) : EXPERTS;
}

// counts[e] <- the sum of counts[0 .. e - 1], by one warp.
__device__ __forceinline__ void exclusive_sums(int (&counts)[BUCKETS]) {
    constexpr int EACH = (BUCKETS + 31) / 32;
    const int lane = threadIdx.x % 32;
    int sum = 0;
    for (int i = 0; i < EACH; ++i) {
        const int e = lane * EACH + i;
        if (e < BUCKETS) sum += counts[e];
    }
    int before = sum;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, before, lanes);
        if (lane >= lanes) before += other;
    }
    before -= sum;
    for (int i = 0; i < EACH; ++i) {
        const int e = lane * EACH + i;
        if (e < BUCKETS) {
            const int count = counts[e];
            counts[e] = before;
            before += count;
        }
    }
}

// Of `count` choices part `part` of `parts` has those from here to where the next part begins.
__device__ __forceinline__ int first_choice(int count, int part, int parts) {
    return int((long long)count * part / parts);
}
