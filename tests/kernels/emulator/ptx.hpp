// PTX instructions as functions: what translate.py makes of inline assembly calls them.
//
// Registers come as references: 16 bits as unsigned short, 32 as unsigned or float, 64 as unsigned
// long long, predicates as bool. An address in brackets and a vector in braces are spread out.
#pragma once

#include "cuda.hpp"

namespace ptx {

using b16 = unsigned short;
using b32 = unsigned;
using b64 = unsigned long long;

// Operands as registers of the width that their constraint names.
template <typename Register, typename T>
inline Register input(T value) {
    if constexpr (std::is_pointer_v<T>)
        return reinterpret_cast<Register>(value);
    else
        return static_cast<Register>(value);
}
template <typename Register, typename T>
inline Register& output(T& value) {
    static_assert(sizeof(Register) == sizeof(T), "a register is as wide as its variable");
    return reinterpret_cast<Register&>(value);
}

// Where an operand stays, or null if its value was made for this instruction.
template <typename T>
inline const void* place(T&& value) {
    return std::is_lvalue_reference_v<T> ? &value : nullptr;
}

inline b32 sink;  // _

template <typename T, typename Register>
inline void put(Register& target, T value) {
    if constexpr (sizeof(T) == sizeof(Register))
        memcpy(&target, &value, sizeof value);
    else
        target = Register(value);
}
template <typename T, typename Register>
inline T get(Register value) {
    if constexpr (sizeof(T) == sizeof(Register))
        return emulator::bits<T>(value);
    else
        return T(value);
}

// ---- loads and stores --------------------------------------------------------------------------

template <typename T, typename... Registers>
inline void read_vector(const void* memory, Registers&... targets) {
    const T* values = static_cast<const T*>(memory);
    (put<T>(targets, *values++), ...);
}
template <typename T, typename... Registers>
inline void write_vector(void* memory, Registers... sources) {
    T* values = static_cast<T*>(memory);
    ((*values++ = get<T>(sources)), ...);
}

inline void check_global(b64 address, unsigned bytes) {
    if (address % bytes != 0)
        emulator::fail("accesses %u bytes at %#llx, which is no multiple of that", bytes, address);
}

template <typename T, typename... Registers>
inline void load_shared(b32 address, Registers&... targets) {
    constexpr unsigned BYTES = sizeof(T) * sizeof...(targets);
    read_vector<T>(emulator::shared(address, BYTES, BYTES), targets...);
}
template <typename T, typename... Registers>
inline void store_shared(b32 address, Registers... sources) {
    constexpr unsigned BYTES = sizeof(T) * sizeof...(sources);
    write_vector<T>(emulator::shared_for_store(address, BYTES, BYTES), sources...);
}
template <typename T, typename... Registers>
inline void load_global(b64 address, Registers&... targets) {
    check_global(address, sizeof(T) * sizeof...(targets));
    read_vector<T>(reinterpret_cast<const void*>(address), targets...);
}
// One that others may be writing to: whoever spins on it must let them.
template <typename T, typename... Registers>
inline void poll_global(b64 address, Registers&... targets) {
    emulator::pause(true);
    load_global<T>(address, targets...);
}
template <typename T, typename... Registers>
inline void store_global(b64 address, Registers... sources) {
    check_global(address, sizeof(T) * sizeof...(sources));
    emulator::check_write(reinterpret_cast<const void*>(address));
    emulator::pause();
    write_vector<T>(reinterpret_cast<void*>(address), sources...);
}
// One that others may be polling: whoever does may see some elements of a vector before others.
template <typename T, typename... Registers>
inline void store_global_apart(b64 address, Registers... sources) {
    check_global(address, sizeof(T) * sizeof...(sources));
    emulator::check_write(reinterpret_cast<const void*>(address));
    const T values[] = {get<T>(sources)...};
    T* const target = reinterpret_cast<T*>(address);
    const unsigned first = emulator::draw() % sizeof...(sources);
    for (unsigned i = 0; i < sizeof...(sources); ++i) {
        emulator::pause();
        const unsigned element = (first + i) % sizeof...(sources);
        target[element] = values[element];
    }
}
template <typename T, typename... Registers>
inline void store_async(b32 address, b32 barrier, Registers... sources) {
    T values[] = {get<T>(sources)...};
    emulator::store_async(address, barrier, values, sizeof values);
}

// ---- matrices in a warp ------------------------------------------------------------------------

struct Matrices {
    unsigned char* memory;
    b32* words[4];
    unsigned count;
    bool is_transposed;
};

inline void read_matrices(void* const (&brought)[32]) {
    for (unsigned lane = 0; lane < 32; ++lane) {
        const auto& own = *static_cast<const Matrices*>(brought[lane]);
        for (unsigned m = 0; m < own.count; ++m) {
            auto row = [&](unsigned i) {
                return static_cast<const Matrices*>(brought[m * 8 + i])->memory;
            };
            b16 pair[2];
            for (unsigned i = 0; i < 2; ++i) {
                const unsigned r = own.is_transposed ? lane % 4 * 2 + i : lane / 4;
                const unsigned c = own.is_transposed ? lane / 4 : lane % 4 * 2 + i;
                memcpy(&pair[i], row(r) + 2 * c, 2);
            }
            memcpy(own.words[m], pair, 4);
        }
    }
}
inline void write_matrices(void* const (&brought)[32]) {
    for (unsigned lane = 0; lane < 32; ++lane) {
        const auto& own = *static_cast<const Matrices*>(brought[lane]);
        for (unsigned m = 0; m < own.count; ++m) {
            b16 pair[2];
            memcpy(pair, own.words[m], 4);
            for (unsigned i = 0; i < 2; ++i) {
                const unsigned r = own.is_transposed ? lane % 4 * 2 + i : lane / 4;
                const unsigned c = own.is_transposed ? lane / 4 : lane % 4 * 2 + i;
                memcpy(static_cast<Matrices*>(brought[m * 8 + r])->memory + 2 * c, &pair[i], 2);
            }
        }
    }
}

// Lanes beyond the count's addresses are not looked at.
template <bool IS_TRANSPOSED, typename... Registers>
inline void load_matrices(Registers&... words_and_address) {
    constexpr unsigned COUNT = sizeof...(words_and_address) - 1;
    b32* operands[] = {const_cast<b32*>(&words_and_address)...};
    Matrices own{nullptr, {}, COUNT, IS_TRANSPOSED};
    for (unsigned i = 0; i < COUNT; ++i) own.words[i] = operands[i];
    if (emulator::current->lane < 8 * COUNT)
        own.memory = emulator::shared(*operands[COUNT], 16, 16);
    emulator::together(0xFFFFFFFF, "ldmatrix", &own, read_matrices);
}
template <bool IS_TRANSPOSED, typename... Registers>
inline void store_matrices(b32 address, Registers... words) {
    constexpr unsigned COUNT = sizeof...(words);
    b32 operands[] = {words...};
    Matrices own{nullptr, {}, COUNT, IS_TRANSPOSED};
    for (unsigned i = 0; i < COUNT; ++i) own.words[i] = &operands[i];
    if (emulator::current->lane < 8 * COUNT)
        own.memory = emulator::shared_for_store(address, 16, 16);
    emulator::together(0xFFFFFFFF, "stmatrix", &own, write_matrices);
}

struct Multiplication {
    float sums[4];
    b32 a[4], b[2];
    emulator::Type type;
    unsigned k;  // of the instruction
};

inline void multiply_all(void* const (&brought)[32]) {
    using emulator::Type;
    const auto& first = *static_cast<const Multiplication*>(brought[0]);
    const unsigned bytes = first.type == Type::E4M3 || first.type == Type::E5M2 ? 1 : 2;
    const unsigned k_elements = first.k, each = 4 / bytes;
    float a[16][32], b[8][32];
    for (unsigned lane = 0; lane < 32; ++lane) {
        const auto& own = *static_cast<const Multiplication*>(brought[lane]);
        for (unsigned half = 0; half < k_elements / (4 * each); ++half)
            for (unsigned i = 0; i < each; ++i) {
                const unsigned k = half * 4 * each + lane % 4 * each + i, shift = 8 * bytes * i;
                a[lane / 4][k] = emulator::widen(own.type, own.a[2 * half] >> shift);
                a[lane / 4 + 8][k] = emulator::widen(own.type, own.a[2 * half + 1] >> shift);
                b[lane / 4][k] = emulator::widen(own.type, own.b[half] >> shift);
            }
    }
    for (unsigned lane = 0; lane < 32; ++lane) {
        auto& own = *static_cast<Multiplication*>(brought[lane]);
        for (unsigned i = 0; i < 4; ++i) {
            const unsigned row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            float sum = 0;
            for (unsigned k = 0; k < k_elements; ++k) sum += a[row][k] * b[column][k];
            own.sums[i] += sum;
        }
    }
}

inline void multiply(emulator::Type type, unsigned k, float* const (&d)[4], const b32* a,
                     unsigned a_words, const b32* b, unsigned b_words, const float (&c)[4]) {
    Multiplication own{{c[0], c[1], c[2], c[3]}, {}, {}, type, k};
    for (unsigned i = 0; i < a_words; ++i) own.a[i] = a[i];
    for (unsigned i = 0; i < b_words; ++i) own.b[i] = b[i];
    emulator::together(0xFFFFFFFF, "mma.sync", &own, multiply_all);
    for (unsigned i = 0; i < 4; ++i) *d[i] = own.sums[i];
}

// ---- barriers and copies, where machine.hpp takes other arguments -------------------------------

inline void barrier_arrive(b32, b32 address, b32 count = 1) {
    emulator::barrier_arrive(address, count);
}
inline void barrier_arrive_expect(b32, b32 address, b32 bytes) {
    emulator::barrier_expect(address, bytes);
    emulator::barrier_arrive(address, 1);
}
inline void barrier_try_wait(bool& passed, b32 address, b32 parity, b32 = 0) {
    passed = emulator::barrier_try_wait(address, parity);
}
inline void map_shared(b32& target, b32 address, b32 rank) {
    target = (address & 0xFFFFFF) | (rank + 1) << 24;
}
inline void load_bulk(b32 destination, b64 source, b32 bytes, b32 barrier, b64 = 0) {
    emulator::load_bulk(destination, reinterpret_cast<const void*>(source), bytes, barrier);
}
inline void prefetch_bulk(b64 source, b32 bytes) {
    emulator::prefetch_bulk(reinterpret_cast<const void*>(source), bytes);
}
inline void copy_async(b32 destination, b64 source, b32, bool is_ignored, b64) {
    emulator::copy_async(destination, is_ignored ? nullptr : reinterpret_cast<const void*>(source));
}
inline void named_sync(b32 id, b32 threads) { emulator::named_barrier(id, threads, true); }
inline void named_arrive(b32 id, b32 threads) { emulator::named_barrier(id, threads, false); }

// ---- moves and arithmetic ----------------------------------------------------------------------

inline b32 special_cluster_ctarank() { return emulator::current->cluster_rank; }

inline b64 special_globaltimer() { return emulator::nanoseconds(); }

inline void mov_u32(b32& target, b32 value) { target = value; }
inline void mov_u64(b64& target, b64 value) { target = value; }
inline void mov_b32(b32& target, b32 value) { target = value; }
inline void mov_b32(b32& target, b16 low, b16 high) { target = low | b32(high) << 16; }
inline void mov_b32(b16& low, b16& high, b32 value) {
    low = b16(value);
    high = b16(value >> 16);
}
inline void setp_eq_u32(bool& target, b32 a, b32 b) { target = a == b; }
inline void setp_ne_b32(bool& target, b32 a, b32 b) { target = a != b; }
inline void selp_u32(b32& target, b32 a, b32 b, bool first) { target = first ? a : b; }

inline b32 pair(b16 low, b16 high) { return low | b32(high) << 16; }
inline b16 half_of(b32 value, int i) { return b16(value >> 16 * i); }

inline void max_u16x2(b32& target, b32 a, b32 b) {
    target = pair(max(half_of(a, 0), half_of(b, 0)), max(half_of(a, 1), half_of(b, 1)));
}
inline void min_NaN_f32(float& target, float a, float b) {
    target = a != a || b != b ? __builtin_nanf("") : fminf(a, b);
}
inline void max_NaN_f32(float& target, float a, float b) {
    target = a != a || b != b ? __builtin_nanf("") : fmaxf(a, b);
}
inline float flushed(float value) {
    return fabsf(value) < 1.17549435e-38f ? copysignf(0, value) : value;
}
inline void ex2_approx_ftz_f32(float& target, float a) { target = flushed(exp2f(flushed(a))); }
// Of what an approximation leaves open: a unit in the last place more, or less, or none, always the
// same for the same number; none of powers of two.
inline float approximate(float value) {
    b32 bits;
    memcpy(&bits, &value, 4);
    const bool is_exact = (bits & 0x7FFFFF) == 0 || (bits & 0x7F800000) == 0x7F800000;
    if (!is_exact) bits += (bits * 0x9E3779B1 >> 16) % 3 - 1;
    memcpy(&value, &bits, 4);
    return value;
}
inline void rcp_approx_ftz_f32(float& target, float a) {
    target = flushed(approximate(1 / flushed(a)));
}
inline void rsqrt_approx_f32(float& target, float a) { target = 1 / sqrtf(a); }

inline void cvt_rn_bf16x2_f32(b32& target, float high, float low) {
    target = pair(emulator::narrow_bf16(low), emulator::narrow_bf16(high));
}
inline void cvt_rn_f16x2_f32(b32& target, float high, float low) {
    target = pair(emulator::narrow_f16(low), emulator::narrow_f16(high));
}
inline void cvt_rn_satfinite_e4m3x2_f32(b16& target, float high, float low) {
    target = b16(emulator::narrow_e4m3(low) | emulator::narrow_e4m3(high) << 8);
}
inline void cvt_rn_f16x2_e4m3x2(b32& target, b16 values) {
    using emulator::Type, emulator::widen, emulator::narrow_f16;
    target = pair(narrow_f16(widen(Type::E4M3, values & 0xFF)),
                  narrow_f16(widen(Type::E4M3, values >> 8)));
}

}  // namespace ptx

namespace emulator {

const char* launch(const void* setting, unsigned cluster_size, void (*kernel)(void**),
                   void** arguments);

template <typename T>
struct Argument {
    alignas(T) unsigned char memory[sizeof(T)];

    explicit Argument(const void* packed) { memcpy(memory, packed, sizeof(T)); }
    operator const T&() const { return *reinterpret_cast<const T*>(memory); }
};

template <typename... Parameters, size_t... I>
inline void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
    kernel(Argument<Parameters>(arguments[I])...);
}
template <typename... Parameters>
inline void call(void (*kernel)(Parameters...), void** arguments) {
    call(kernel, arguments, std::index_sequence_for<Parameters...>());
}

}  // namespace emulator
