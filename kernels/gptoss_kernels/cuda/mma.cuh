// A warp's tensor cores: fragments from shared memory, products of 16 x 8 x 16, and the formats of
// both. Lane l of a fragment stands at row l / 4 and at columns l % 4 * 2 and the next.

// Four matrices of 8 x 16 bytes, as load_matrices gives them, but transposed: lane l gets the
// elements, of 2 bytes, of column l / 4 in rows l % 4 * 2 and the next.
__device__ __forceinline__ void load_matrices_transposed(uint32_t address, uint32_t (&words)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

// sums += a b. a: rows l / 4 and l / 4 + 8 at the lower 8 columns of K, then at the upper 8. b: the
// lower 8 rows of K, then the upper 8, of column l / 4. sums: row l / 4, then row l / 4 + 8.
__device__ __forceinline__ void multiply_f16(float (&sums)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3},"
        " {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void multiply_bf16(float (&sums)[4], const uint32_t (&a)[4],
                                              const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3},"
        " {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same of 16 x 8 x 32: lane l stands at columns l % 4 * 4 and the next three.
__device__ __forceinline__ void multiply_e4m3(float (&sums)[4], const uint32_t (&a)[4],
                                              const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3},"
        " {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Two halves from the lower, two from the upper two of four e4m3 values.
__device__ __forceinline__ void to_halves(uint32_t values, uint32_t& low, uint32_t& high) {
    asm("{\n"
        ".reg .b16 a, b;\n"
        "mov.b32 {a, b}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, a;\n"
        "cvt.rn.f16x2.e4m3x2 %1, b;\n"
        "}"
        : "=r"(low), "=r"(high)
        : "r"(values));
}

__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

constexpr float LOG2_E = 1.44269504f;  // what turns powers of e into powers of two

// 2^x to 2^-22 of its value; 0 where that would be a denormal number.
__device__ __forceinline__ float exp2_approx(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// 1 / x to 2^-23 of its value; 0 where that would be a denormal number.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
}
