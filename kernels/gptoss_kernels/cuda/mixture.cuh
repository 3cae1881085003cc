// What a token's experts gave, below rows.cuh: combine and the norms add it up in the same way.

struct Mixture {
    const bf16* outputs;  // a row for each choice
    const int* rows;      // [tokens][CHOSEN]
    const bf16* weights;  // likewise
    int num_rows;
    long long stride;
};

// Of a token. A weight of 0 adds nothing, whatever lies in its row: another rank's expert may have
// had it. With any other weight a row that is none is NaN.
struct Choices {
    int rows[CHOSEN];  // -1: nothing to read
    float weights[CHOSEN];

    // Past L1: a norm reads them before its wait.
    __device__ __forceinline__ void load(const Mixture& mixture, long long token) {
#pragma unroll
        for (int k = 0; k < CHOSEN; ++k) {
            const int row = __ldcg(mixture.rows + token * CHOSEN + k);
            const bool is_row = 0 <= row && row < mixture.num_rows;
            const float weight = low_bf16(__ldcg(mixture.weights + token * CHOSEN + k));
            rows[k] = is_row && weight != 0 ? row : -1;
            weights[k] = is_row || weight == 0 ? weight : __int_as_float(-1);
        }
    }
};

// sum over k of weights[t, k] * outputs[rows[t, k]], and a residual if there is one, in fp32 in this
// order.
__device__ __forceinline__ void mix(Row& sums, const Mixture& mixture, const Choices& choices,
                                    int columns, const Place& place, const Row* residual) {
    Row rows[CHOSEN];
#pragma unroll
    for (int k = 0; k < CHOSEN; ++k)
        rows[k].load(mixture.outputs + choices.rows[k] * mixture.stride,
                     choices.rows[k] >= 0 ? columns : 0, place);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float low = 0, high = 0;
#pragma unroll
            for (int k = 0; k < CHOSEN; ++k) {
                // Not fused: as the reference rounds products that are too small for a normal fp32.
                low = __fadd_rn(low, __fmul_rn(low_bf16(rows[k].words[v][i]),
                                               choices.weights[k]));
                high = __fadd_rn(high, __fmul_rn(high_bf16(rows[k].words[v][i]),
                                                 choices.weights[k]));
            }
            if (residual != nullptr) {
                low = __fadd_rn(low, low_bf16(residual->words[v][i]));
                high = __fadd_rn(high, high_bf16(residual->words[v][i]));
            }
            sums.words[v][i] = pack_bf16(low, high);
        }
    }
}
