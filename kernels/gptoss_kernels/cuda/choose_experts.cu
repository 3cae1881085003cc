// The experts of each token by logits that are in memory: a warp a token.

constexpr int EACH = (EXPERTS + 31) / 32;  // logits a lane

struct Arguments {
    const unsigned short* logits;  // [tokens][EXPERTS]
    long long* chosen;
    unsigned short* chosen_weights;
    int num_tokens;
    OwnExperts own;
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    choose_experts(const __grid_constant__ Arguments arguments) {
    const int lane = threadIdx.x % 32;
    const long long token = blockIdx.x * (long long)WARPS + threadIdx.x / 32;
    wait_for_previous_kernels();
    allow_next_kernel();
    if (token >= arguments.num_tokens) return;
    const unsigned short* const logits = arguments.logits + token * EXPERTS;
    uint32_t keys[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int expert = i * 32 + lane;
        keys[i] = expert < EXPERTS ? key_of(logits[expert], expert) : 0;
    }
    choose_by_keys(keys).store(arguments, token);
}
