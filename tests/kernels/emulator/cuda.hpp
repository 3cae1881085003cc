// What CUDA C++ has without an include, for a kernel that g++ compiles.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <type_traits>
#include <utility>

#include "machine.hpp"

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(...)
#define __cluster_dims__(...)

// Both are part of the language or of hopper.cuh, where the one of 64 bits is another type.
#define uint64_t cuda_uint64_t

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::current->block)
#define gridDim (emulator::grid_size)
#define blockDim (emulator::block_size)
constexpr int warpSize = 32;

#define CUDA_VECTORS(type, name)                                                \
    struct alignas(2 * sizeof(type)) name##2 {                                  \
        type x, y;                                                              \
    };                                                                          \
    struct name##3 {                                                            \
        type x, y, z;                                                           \
    };                                                                          \
    struct alignas(sizeof(type) > 4 ? 16 : 4 * sizeof(type)) name##4 {          \
        type x, y, z, w;                                                        \
    };                                                                          \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }            \
    inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
CUDA_VECTORS(signed char, char)
CUDA_VECTORS(unsigned char, uchar)
CUDA_VECTORS(short, short)
CUDA_VECTORS(unsigned short, ushort)
CUDA_VECTORS(int, int)
CUDA_VECTORS(unsigned, uint)
CUDA_VECTORS(long long, longlong)
CUDA_VECTORS(unsigned long long, ulonglong)
CUDA_VECTORS(float, float)
CUDA_VECTORS(double, double)
#undef CUDA_VECTORS

// ---- numbers -----------------------------------------------------------------------------------

namespace emulator {

template <typename To, typename From>
inline To bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}

// Of two numbers of any types; of pointers or classes there is none.
template <typename A, typename B>
using Common = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>,
                                decltype(true ? A() : B())>;

}  // namespace emulator

template <typename A, typename B>
inline emulator::Common<A, B> min(A a, B b) {
    using Type = emulator::Common<A, B>;
    if constexpr (std::is_floating_point_v<Type>)
        return fmin(a, b);
    else
        return Type(b) < Type(a) ? b : a;
}
template <typename A, typename B>
inline emulator::Common<A, B> max(A a, B b) {
    using Type = emulator::Common<A, B>;
    if constexpr (std::is_floating_point_v<Type>)
        return fmax(a, b);
    else
        return Type(a) < Type(b) ? b : a;
}

inline float __uint_as_float(unsigned value) { return emulator::bits<float>(value); }
inline float __int_as_float(int value) { return emulator::bits<float>(value); }
inline unsigned __float_as_uint(float value) { return emulator::bits<unsigned>(value); }
inline int __float_as_int(float value) { return emulator::bits<int>(value); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fsub_rn(float a, float b) { return a - b; }

inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(unsigned value) { return __builtin_ffs(int(value)); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned choice = selector >> 4 * i;
        unsigned byte = unsigned(both >> 8 * (choice & 7)) & 0xFF;
        if (choice & 8) byte = byte & 0x80 ? 0xFF : 0;
        result |= byte << 8 * i;
    }
    return result;
}

// ---- memory ------------------------------------------------------------------------------------

inline unsigned long long __cvta_generic_to_shared(const void* pointer) {
    return emulator::address_of(pointer);
}
template <typename T>
inline T __ldg(const T* pointer) {
    return *pointer;
}
template <typename T>
inline T __ldcg(const T* pointer) {
    return *pointer;
}
inline void __threadfence() { emulator::pause(); }
inline void __nanosleep(unsigned) { emulator::pause(true); }
[[noreturn]] inline void __trap() { emulator::fail("__trap"); }

// No thread is interrupted between the two: what makes it atomic here.
template <typename T>
inline T atomicAdd(T* pointer, std::common_type_t<T> value) {
    emulator::check_write(pointer);
    emulator::pause();
    const T old = *pointer;
    *pointer = old + value;
    emulator::pause();
    return old;
}

// ---- threads together --------------------------------------------------------------------------

inline void __syncthreads() { emulator::block_sync(); }
inline void __syncwarp(unsigned mask = 0xFFFFFFFF) {
    emulator::together(mask, "__syncwarp", nullptr, nullptr);
}

namespace emulator {

struct Shuffle {
    unsigned long long value, result;
    unsigned source;
};

inline void shuffle(void* const (&brought)[32]) {
    for (void* each : brought) {
        if (!each) continue;
        auto& own = *static_cast<Shuffle*>(each);
        const auto* other = static_cast<const Shuffle*>(brought[own.source % 32]);
        // Undefined on the GPU: what is no lane of the mask.
        own.result = other ? other->value : 0xFFFFFFFFFFFFFFFF;
    }
}

template <typename T>
inline T shuffled(unsigned mask, const char* what, T value, unsigned source) {
    static_assert(sizeof(T) <= 8, "as CUDA has it");
    Shuffle own{0, 0, source};
    memcpy(&own.value, &value, sizeof value);
    together(mask, what, &own, shuffle);
    memcpy(&value, &own.result, sizeof value);
    return value;
}

// One value for all, made from the values of all.
template <unsigned (*COMBINE)(unsigned, unsigned)>
inline void combine_all(void* const (&brought)[32]) {
    bool is_first = true;
    unsigned result = 0;
    for (void* each : brought) {
        if (!each) continue;
        const unsigned value = unsigned(static_cast<Shuffle*>(each)->value);
        result = is_first ? value : COMBINE(result, value);
        is_first = false;
    }
    for (void* each : brought)
        if (each) static_cast<Shuffle*>(each)->result = result;
}
template <unsigned (*COMBINE)(unsigned, unsigned)>
inline unsigned combined(unsigned mask, const char* what, unsigned value) {
    Shuffle own{value, 0, 0};
    together(mask, what, &own, combine_all<COMBINE>);
    return unsigned(own.result);
}
inline unsigned add(unsigned a, unsigned b) { return a + b; }
inline unsigned bit_or(unsigned a, unsigned b) { return a | b; }
inline unsigned largest(unsigned a, unsigned b) { return a > b ? a : b; }

inline void match(void* const (&brought)[32]) {
    for (void* each : brought) {
        if (!each) continue;
        auto& own = *static_cast<Shuffle*>(each);
        own.result = 0;
        for (unsigned lane = 0; lane < 32; ++lane)
            if (brought[lane] && static_cast<Shuffle*>(brought[lane])->value == own.value)
                own.result |= 1u << lane;
    }
}

}  // namespace emulator

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const unsigned lane = emulator::current->lane, first = lane & ~unsigned(width - 1);
    return emulator::shuffled(mask, "__shfl_sync", value, first + unsigned(source) % width);
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    const unsigned lane = emulator::current->lane, source = lane ^ unsigned(bits);
    const bool is_inside = source < (lane & ~unsigned(width - 1)) + width;
    return emulator::shuffled(mask, "__shfl_xor_sync", value, is_inside ? source : lane);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32) {
    const unsigned lane = emulator::current->lane;
    const bool is_inside = lane % width >= distance;
    return emulator::shuffled(mask, "__shfl_up_sync", value, is_inside ? lane - distance : lane);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
    const unsigned lane = emulator::current->lane;
    const bool is_inside = lane % width + distance < unsigned(width);
    return emulator::shuffled(mask, "__shfl_down_sync", value, is_inside ? lane + distance : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const unsigned own = predicate ? 1u << emulator::current->lane : 0;
    return emulator::combined<emulator::bit_or>(mask, "__ballot_sync", own);
}
inline int __any_sync(unsigned mask, int predicate) {
    return emulator::combined<emulator::bit_or>(mask, "__any_sync", predicate != 0);
}
template <typename T>
inline T __reduce_add_sync(unsigned mask, T value) {
    return T(emulator::combined<emulator::add>(mask, "__reduce_add_sync", unsigned(value)));
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    return emulator::combined<emulator::largest>(mask, "__reduce_max_sync", value);
}
template <typename T>
inline unsigned __match_any_sync(unsigned mask, T value) {
    emulator::Shuffle own{0, 0, 0};
    memcpy(&own.value, &value, sizeof value);
    emulator::together(mask, "__match_any_sync", &own, emulator::match);
    return unsigned(own.result);
}
