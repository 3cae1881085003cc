// Words from the host's memory to the device's, or back.

constexpr int WORDS = 4;  // of a thread

struct Arguments {
    const uint32_t* source;
    uint32_t* target;
    int num_words;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    transfer(const __grid_constant__ Arguments arguments) {
    const int first = blockIdx.x * THREADS * WORDS + threadIdx.x;
    uint32_t words[WORDS];
    // What the host wrote it wrote before the launch.
    if (!FROM_HOST) wait_for_previous_kernels();
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const int word = first + i * THREADS;
        // Past all caches, which may know the host's memory from an earlier step.
        const volatile uint32_t* const source = arguments.source + word;
        if (word < arguments.num_words) words[i] = *source;
    }
    if (FROM_HOST) wait_for_previous_kernels();
    allow_next_kernel();
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const int word = first + i * THREADS;
        if (word < arguments.num_words) arguments.target[word] = words[i];
    }
}
