// Rows of logits as fp32, and in them the tokens that are biased or penalised: what
// reference.penalize_logits says, in the same roundings.

constexpr int WIDTH = 8;  // logits of a vector
constexpr int PART = THREADS * WIDTH * VECTORS;  // logits of a block

struct Arguments {
    const char* logits;
    const long long* input_ids;
    const int *rows, *newest;
    const float *repetition, *frequency, *presence;
    const int *start, *token_ids, *counts;
    const float* biases;
    float* out;
    long long row_bytes, out_pitch;
    int num_rows, num_inputs, vocab_size, blocks_per_row;
};

struct Asked {
    float repetition, frequency, presence;

    // The product of an fp32 number and a count is exact in fp64: fused or not, it is the same.
    __device__ __forceinline__ float changed(float logit, float bias, int count) const {
        float y = float(double(logit) + double(bias));
        if (count >= 0) y = y > 0 ? double(y) / repetition : double(y) * repetition;
        if (count > 0) y = double(y) - (double(frequency) * count + presence);
        return y;
    }
};

__device__ __forceinline__ void copy_vector(const char* source, float* target) {
    const uint4* const fours = reinterpret_cast<const uint4*>(source);
    float4* const out = reinterpret_cast<float4*>(target);
#if LOGIT_BYTES == 2
    const uint4 four = fours[0];
    out[0] = float4{low_bf16(four.x), high_bf16(four.x), low_bf16(four.y), high_bf16(four.y)};
    out[1] = float4{low_bf16(four.z), high_bf16(four.z), low_bf16(four.w), high_bf16(four.w)};
#else
    reinterpret_cast<uint4*>(out)[0] = fours[0];
    reinterpret_cast<uint4*>(out)[1] = fours[1];
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
    penalize_logits(const __grid_constant__ Arguments arguments) {
    __shared__ int is_counted;
    const int i = blockIdx.x / arguments.blocks_per_row;
    const int first = blockIdx.x % arguments.blocks_per_row * PART;
    const int size = min(PART, arguments.vocab_size - first);
    wait_for_previous_kernels();
    allow_next_kernel();
    const int row = arguments.rows[i];
    if (row < 0 || row >= arguments.num_rows) return;
    const char* const logits =
        arguments.logits + row * arguments.row_bytes + (long long)first * LOGIT_BYTES;
    float* const out = arguments.out + i * arguments.out_pitch + first;
    for (int v = threadIdx.x; v < size / WIDTH; v += THREADS)
        copy_vector(logits + (long long)v * WIDTH * LOGIT_BYTES, out + v * WIDTH);
    if (threadIdx.x == 0) is_counted = 0;
    __syncthreads();

    const Asked asked{arguments.repetition[i], arguments.frequency[i], arguments.presence[i]};
    const int place = arguments.newest[i];
    const bool has_newest = 0 <= place && place < arguments.num_inputs;
    // Of this block's logits, as are tokens below; or none.
    const long long newest = has_newest ? arguments.input_ids[place] - first : -1;
    const int end = arguments.start[i + 1];
    for (int entry = arguments.start[i] + threadIdx.x; entry < end; entry += THREADS) {
        const int token = arguments.token_ids[entry] - first;
        if (token < 0 || token >= size) continue;
        int count = arguments.counts[entry];
        if (token == newest) {
            count = max(count, 0) + 1;
            is_counted = 1;
        }
        out[token] = asked.changed(out[token], arguments.biases[entry], count);
    }
    __syncthreads();
    if (threadIdx.x == 0 && !is_counted && 0 <= newest && newest < size)
        out[newest] = asked.changed(out[newest], 0, 1);
}
