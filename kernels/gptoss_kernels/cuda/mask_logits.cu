// -inf for each logit of a row whose bit in the row's mask is not set.

constexpr int WIDTH = 8;  // logits of a thread: the bits of a byte
constexpr int WORDS = WIDTH * LOGIT_BYTES / 4;
constexpr uint32_t NONE = LOGIT_BYTES == 2 ? 0xFF80FF80 : 0xFF800000;  // -inf in each logit

struct Arguments {
    char* logits;
    const unsigned char* mask;
    const int* rows;
    long long row_bytes, mask_bytes;
    int num_rows, num_vectors, blocks_per_row;
};

// The bits of a word's logits that stay.
__device__ __forceinline__ uint32_t kept_bits(uint32_t allowed, int word) {
#if LOGIT_BYTES == 2
    return (allowed >> 2 * word & 1 ? 0xFFFF : 0) | (allowed >> 2 * word & 2 ? 0xFFFF0000 : 0);
#else
    return allowed >> word & 1 ? 0xFFFFFFFF : 0;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
    mask_logits(const __grid_constant__ Arguments arguments) {
    const int i = blockIdx.x / arguments.blocks_per_row;
    const int vector = blockIdx.x % arguments.blocks_per_row * THREADS + threadIdx.x;
    wait_for_previous_kernels();
    allow_next_kernel();
    if (vector >= arguments.num_vectors) return;
    const int row = arguments.rows[i];
    if (row < 0 || row >= arguments.num_rows) return;
    const uint32_t allowed = arguments.mask[i * arguments.mask_bytes + vector];
    if (allowed == 0xFF) return;
    char* const place =
        arguments.logits + row * arguments.row_bytes + (long long)vector * WIDTH * LOGIT_BYTES;
    uint4* const fours = reinterpret_cast<uint4*>(place);
    uint32_t words[WORDS];
    if (allowed != 0) {
#pragma unroll
        for (int w = 0; w < WORDS; w += 4) {
            const uint4 four = fours[w / 4];
            words[w] = four.x, words[w + 1] = four.y, words[w + 2] = four.z, words[w + 3] = four.w;
        }
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
            const uint32_t kept = kept_bits(allowed, w);
            words[w] = (words[w] & kept) | (NONE & ~kept);
        }
    } else {
#pragma unroll
        for (int w = 0; w < WORDS; ++w) words[w] = NONE;
    }
#pragma unroll
    for (int w = 0; w < WORDS; w += 4)
        fours[w / 4] = uint4{words[w], words[w + 1], words[w + 2], words[w + 3]};
}
