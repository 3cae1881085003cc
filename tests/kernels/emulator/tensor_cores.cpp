// Products of a warpgroup, and the formats of what it multiplies.
#include <string.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "state.hpp"

namespace emulator {

// ---- numbers ------------------------------------------------------------------------------------

namespace {

float small_float(unsigned bits, int exponent_bits, int mantissa_bits, bool has_inf) {
    const unsigned sign = bits >> (exponent_bits + mantissa_bits) & 1;
    const unsigned exponent = bits >> mantissa_bits & ((1u << exponent_bits) - 1);
    const unsigned mantissa = bits & ((1u << mantissa_bits) - 1);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const unsigned last = (1u << exponent_bits) - 1;
    float value;
    if (exponent == last && has_inf)
        value = mantissa ? NOT_YET : INFINITY;
    else if (exponent == last && mantissa == (1u << mantissa_bits) - 1)
        value = NOT_YET;
    else if (exponent == 0)
        value = std::ldexp(float(mantissa), 1 - bias - mantissa_bits);
    else
        value = std::ldexp(float(mantissa | 1u << mantissa_bits),
                           int(exponent) - bias - mantissa_bits);
    return sign ? -value : value;
}

struct Table {
    float values[65536];

    Table(unsigned size, int exponent_bits, int mantissa_bits, bool has_inf) {
        for (unsigned i = 0; i < size; ++i)
            values[i] = small_float(i, exponent_bits, mantissa_bits, has_inf);
    }
};
const Table e4m3(256, 4, 3, false), f16(65536, 5, 10, true);

}  // namespace

float widen(Type type, unsigned bits) {
    switch (type) {
        case Type::E4M3:
            return e4m3.values[bits & 0xFF];
        case Type::E5M2:
            return small_float(bits & 0xFF, 5, 2, true);
        case Type::F16:
            return f16.values[bits & 0xFFFF];
        default: {
            const unsigned wide = bits << 16;
            float value;
            memcpy(&value, &wide, 4);
            return value;
        }
    }
}

unsigned short narrow_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7FFF;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

namespace {

// To the nearest multiple of the last place, ties to even.
unsigned narrow(float value, int exponent_bits, int mantissa_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const unsigned sign = std::signbit(value) ? 1u << (exponent_bits + mantissa_bits) : 0;
    const float size = std::fabs(value);
    if (size == 0) return sign;
    int exponent = 0;
    std::frexp(size, &exponent);
    const int place = std::max(exponent - 1, 1 - bias) - mantissa_bits;
    const double steps = std::nearbyint(std::ldexp(double(size), -place));
    // Steps of the lowest exponent are the bits of a denormal number; each more adds 2^mantissa.
    const unsigned base = unsigned(place - (1 - bias - mantissa_bits)) << mantissa_bits;
    return sign | (base + unsigned(steps));
}

}  // namespace

unsigned short narrow_f16(float value) {
    if (value != value) return 0x7FFF;
    if (std::fabs(value) >= 65520.0f) return value < 0 ? 0xFC00 : 0x7C00;
    return narrow(value, 5, 10);
}

unsigned char narrow_e4m3(float value) {
    if (value != value) return 0x7F;
    if (std::fabs(value) > 448.0f) return value < 0 ? 0xFE : 0x7E;
    return narrow(value, 4, 3);
}

// ---- tensor cores -------------------------------------------------------------------------------

namespace {

constexpr unsigned K_BYTES = 32;  // of both operands in one instruction

unsigned element_bytes(Type type) { return type == Type::E4M3 || type == Type::E5M2 ? 1 : 2; }

// Where a matrix lies as the tensor cores find it, in units of 16 bytes: of one row, or where it is
// transposed of 8 rows at one k. 8 units lie together, or what the swizzle has in 8 rows; `lead`
// and `stride` lead to the next ones, and the swizzle acts on the bits of the address.
void find_units(Matrix& matrix, Type type) {
    static const unsigned SWIZZLES[] = {16, 128, 64, 32};
    const uint64_t descriptor = matrix.descriptor;
    const unsigned start = (descriptor & 0x3FFF) << 4;
    const unsigned lead = (descriptor >> 16 & 0x3FFF) << 4;
    const unsigned stride = (descriptor >> 32 & 0x3FFF) << 4;
    const unsigned swizzle = SWIZZLES[descriptor >> 62];
    if (descriptor >> 49 & 7) fail("wgmma: the emulator knows no base offset in a descriptor");
    if (swizzle > 16 && start % (8 * swizzle) >= swizzle)
        fail("wgmma: a matrix at %#x begins between the 8 rows that its swizzle repeats in", start);
    const unsigned k_elements = K_BYTES / element_bytes(type);
    auto add = [&](unsigned offset, unsigned row, unsigned k) {
        matrix.units.push_back({swizzled(start + offset, swizzle), row, k});
    };
    if (!matrix.is_transposed) {
        const unsigned step = swizzle == 16 ? lead : 16;
        for (unsigned row = 0; row < matrix.rows; ++row)
            for (unsigned half = 0; half < 2; ++half)
                add(row / 8 * stride + row % 8 * swizzle + half * step, row, half * k_elements / 2);
        return;
    }
    if (element_bytes(type) == 1) fail("wgmma: matrices of 8 bits must lie along K");
    const unsigned side = swizzle / 16;  // units side by side
    for (unsigned chunk = 0; chunk < matrix.rows / 8; ++chunk)
        for (unsigned k = 0; k < k_elements; ++k) {
            const unsigned inside = k % 8 * swizzle + chunk % side * 16;
            const unsigned outside = swizzle == 16 ? chunk * stride + k / 8 * lead
                                                   : chunk / side * lead + k / 8 * stride;
            add(inside + outside, chunk * 8, k);
        }
}

void read_matrix(Matrix& matrix, Type type, Block& block) {
    const unsigned bytes = element_bytes(type), k_elements = K_BYTES / bytes;
    matrix.values.resize(matrix.rows * k_elements);
    for (const Unit& unit : matrix.units) {
        const unsigned char* memory = checked_async(block, unit.address, 16, 16, "wgmma reads");
        for (unsigned i = 0; i < 16 / bytes; ++i) {
            const unsigned row = unit.row + (matrix.is_transposed ? i : 0);
            const unsigned k = unit.k + (matrix.is_transposed ? 0 : i);
            const unsigned bits = bytes == 1 ? memory[i] : memory[2 * i] | memory[2 * i + 1] << 8;
            matrix.values[row * k_elements + k] = widen(type, bits);
        }
    }
}

// Nobody may write where it lies from now on, or may again.
void announce(const Matrix& matrix, Block& block, bool is_read) {
    for (const Unit& unit : matrix.units) {
        checked_async(block, unit.address, 16, 16, "wgmma reads");
        mark_read(block, unit.address, 16, is_read);
    }
}

struct Multiplication {
    const Product* product;
    float* const* sums;
    const unsigned* a;
    const void* const* a_places;
    uint64_t a_matrix, b_matrix;
    bool accumulates;
};

void read_operands(Issued& issued, Warp& warp) {
    const Type type = issued.product.type;
    if (issued.a.values.empty()) read_matrix(issued.a, type, *warp.block);
    if (issued.b.values.empty()) read_matrix(issued.b, type, *warp.block);
}

// Of A in registers: lane 4 g + t has rows g and g + 8, and of K what starts at 4 t bytes of 16.
void read_registers(Issued& issued, void* const (&brought)[32]) {
    const Type type = issued.product.type;
    const unsigned bytes = element_bytes(type), k_elements = K_BYTES / bytes, each = 4 / bytes;
    issued.a.values.resize(64 * k_elements);
    for (unsigned lane = 0; lane < 32; ++lane) {
        const auto& own = *static_cast<const Multiplication*>(brought[lane]);
        for (unsigned word = 0; word < 4; ++word) {
            if (own.a_places[word]) issued.registers.emplace_back(own.a_places[word], own.a[word]);
            for (unsigned i = 0; i < each; ++i) {
                const unsigned row = self().warp->number % 4 * 16 + lane / 4 + word % 2 * 8;
                const unsigned k = word / 2 * (k_elements / 2) + lane % 4 * each + i;
                issued.a.values[row * k_elements + k] = widen(type, own.a[word] >> 8 * bytes * i);
            }
        }
    }
}

void issue(void* const (&brought)[32]) {
    const auto& first = *static_cast<const Multiplication*>(brought[0]);
    Warp& warp = *self().warp;
    const unsigned count = first.product->columns / 2;
    for (void* each : brought) {
        const auto& other = *static_cast<const Multiplication*>(each);
        if (other.a_matrix != first.a_matrix || other.b_matrix != first.b_matrix ||
            other.accumulates != first.accumulates)
            fail("wgmma: the lanes of a warp have different descriptors");
    }
    Sums* sums = nullptr;
    for (Sums& each : warp.sums)
        if (each.registers[0] == first.sums[0] && each.registers.size() == 32 * count) sums = &each;
    if (!sums) {
        if (!warp.is_fenced) fail("wgmma without a wgmma.fence since the last wait for one");
        sums = &warp.sums.emplace_back();
        for (void* each : brought)
            for (unsigned i = 0; i < count; ++i) {
                float* const place = static_cast<const Multiplication*>(each)->sums[i];
                sums->registers.push_back(place);
                sums->values.push_back(*place);
                *place = NOT_YET;
            }
    }
    ++sums->users;
    Issued issued{*first.product,
                  sums,
                  {first.a_matrix, first.product->a_is_transposed, 64, {}, {}},
                  {first.b_matrix, first.product->b_is_transposed, first.product->columns, {}, {}},
                  first.accumulates,
                  warp.group,
                  {}};
    if (first.a)
        read_registers(issued, brought);
    else
        find_units(issued.a, issued.product.type);
    find_units(issued.b, issued.product.type);
    announce(issued.a, *warp.block, true);
    announce(issued.b, *warp.block, true);
    if (happens(temper.early)) read_operands(issued, warp);
    warp.products.push_back(std::move(issued));
}

// What is multiplied in 8 bits is added with few: all is cut off at 2^-12 of the largest. So chosen
// that sums of 128 products are 3e-4 of their norm off, as they are on an H200: test_deepgemm.py.
float narrow_sum(const float (&terms)[K_BYTES + 1]) {
    int bits[K_BYTES + 1], largest = 0;  // without their signs: as integers in the same order
    memcpy(bits, terms, sizeof bits);
    for (int each : bits) largest = std::max(largest, each & 0x7FFFFFFF);
    const int exponent = std::max((largest >> 23) - 127, -100);
    if (exponent > 100) return std::accumulate(terms, std::end(terms), 0.f);  // or no number
    const float inverse = std::ldexp(1.f, 12 - exponent);
    int sum = 0;
    for (float term : terms) sum += int(term * inverse);
    return float(sum) * std::ldexp(1.f, exponent - 12);
}

void complete(Issued& issued, Warp& warp) {
    read_operands(issued, warp);
    announce(issued.a, *warp.block, false);
    announce(issued.b, *warp.block, false);
    for (auto [place, value] : issued.registers)
        if (memcmp(place, &value, 4) != 0)
            fail("wrote to the registers of a matrix while a wgmma that reads them is under way");
    const unsigned columns = issued.product.columns;
    const unsigned k_elements = K_BYTES / element_bytes(issued.product.type);
    const bool is_narrow = element_bytes(issued.product.type) == 1;
    const float sign = float(issued.product.a_sign * issued.product.b_sign);
    Sums& sums = *issued.sums;
    for (unsigned row = 0; row < 16; ++row) {
        const float* a = &issued.a.values[(warp.number % 4 * 16 + row) * k_elements];
        for (unsigned column = 0; column < columns; column += 8) {
            const float* b = &issued.b.values[column * k_elements];
            float* places[8];
            float added[8];
            for (unsigned j = 0; j < 8; ++j) {
                const unsigned lane = row % 8 * 4 + j / 2;
                const unsigned i = column / 8 * 4 + row / 8 * 2 + j % 2;
                places[j] = &sums.values[lane * (columns / 2) + i];
                added[j] = issued.accumulates ? *places[j] : 0;
            }
            if (is_narrow) {
                for (unsigned j = 0; j < 8; ++j) {
                    float terms[K_BYTES + 1] = {added[j]};
                    for (unsigned k = 0; k < K_BYTES; ++k)
                        terms[k + 1] = sign * a[k] * b[j * K_BYTES + k];
                    *places[j] = narrow_sum(terms);
                }
            } else {
                // One after the other along K, of eight columns that do not wait for each other.
                for (unsigned k = 0; k < k_elements; ++k)
                    for (unsigned j = 0; j < 8; ++j)
                        added[j] += sign * a[k] * b[j * k_elements + k];
                for (unsigned j = 0; j < 8; ++j) *places[j] = added[j];
            }
        }
    }
    if (--sums.users > 0) return;
    for (const float* place : sums.registers)
        if (memcmp(place, &NOT_YET, 4) != 0) fail("wrote to the sums of a wgmma that is under way");
    for (size_t i = 0; i < sums.values.size(); ++i) *sums.registers[i] = sums.values[i];
    warp.sums.remove_if([&](const Sums& each) { return &each == &sums; });
}

void commit(void* const (&)[32]) { ++self().warp->group; }
void fence(void* const (&)[32]) { self().warp->is_fenced = true; }

void wait_for_group(void* const (&brought)[32]) {
    Warp& warp = *self().warp;
    const unsigned pending = *static_cast<unsigned*>(brought[0]);
    while (!warp.products.empty() && warp.products.front().group + pending < warp.group) {
        complete(warp.products.front(), warp);
        warp.products.pop_front();
        warp.is_fenced = false;
    }
}

}  // namespace

void multiply_async(const Product& product, float* const* sums, const unsigned* a,
                    const void* const* a_places, unsigned long long a_matrix,
                    unsigned long long b_matrix, bool accumulates) {
    Multiplication own{&product, sums, a, a_places, a_matrix, b_matrix, accumulates};
    together(ALL, "wgmma.mma_async", &own, issue);
}

void multiply_fence() { together(ALL, "wgmma.fence", nullptr, fence); }
void multiply_commit() { together(ALL, "wgmma.commit_group", nullptr, commit); }
void multiply_wait(unsigned pending) {
    together(ALL, "wgmma.wait_group", &pending, wait_for_group);
}

}  // namespace emulator
