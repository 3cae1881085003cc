// The copy engine: between shared and global memory, sooner or later.
#include <string.h>

#include <algorithm>

#include "state.hpp"

namespace emulator {

// ---- copies -------------------------------------------------------------------------------------

namespace {

struct Map {  // as __init__.py packs it
    uint64_t mark;
    uint64_t address;
    uint32_t rank, element_bytes, swizzle_bytes;
    uint32_t size[5];
    uint64_t pitch[5];  // in bytes; that of the first dimension is an element
    uint16_t box[5];
    uint16_t unused[3];
};
static_assert(sizeof(Map) == 8 + 8 + 12 + 20 + 40 + 10 + 6, "as __init__.py packs it");
std::vector<Copy> unawaited;  // stores that are done, which their threads don't know

constexpr uint64_t MAP_MARK = 0x50414D524F534E45;

// Which bytes go where: in units that neither the swizzle nor the matrix's edge cuts.
void divide(Copy& copy, const Map& map, const int* place, unsigned address) {
    const unsigned row_bytes = map.box[0] * map.element_bytes;
    unsigned rows = 1;
    for (unsigned i = 1; i < map.rank; ++i) rows *= map.box[i];
    for (unsigned row = 0; row < rows; ++row) {
        unsigned char* global = reinterpret_cast<unsigned char*>(map.address);
        bool is_inside = true;
        for (unsigned i = 1, rest = row; i < map.rank; rest /= map.box[i++]) {
            const int64_t at = place[i] + int64_t(rest % map.box[i]);
            is_inside = is_inside && at >= 0 && at < map.size[i];
            global += at * int64_t(map.pitch[i]);
        }
        for (unsigned byte = 0; byte < row_bytes; byte += 16) {
            const unsigned straight = address + row * row_bytes + byte;
            const unsigned target = swizzled(straight, std::max(map.swizzle_bytes, 16u));
            for (unsigned i = 0; i < 16;) {
                const int64_t column = place[0] + int64_t((byte + i) / map.element_bytes);
                const int64_t left = 16 - i;
                int64_t bytes = map.element_bytes;
                bool is_here = is_inside && column >= 0 && column < map.size[0];
                if (is_here)
                    bytes = std::min(left, (map.size[0] - column) * int64_t(map.element_bytes));
                else if (!is_inside || column >= map.size[0])
                    bytes = left;
                copy.pieces.emplace_back(target + i, unsigned(bytes));
                copy.global.push_back(is_here ? global + column * map.element_bytes : nullptr);
                i += unsigned(bytes);
            }
        }
    }
}

Map map_at(unsigned rank, const void* pointer, const int* place, unsigned address,
           const char* what) {
    Map map;
    memcpy(&map, pointer, sizeof map);
    if (map.mark != MAP_MARK) fail("%s: there is no tensor map at %p", what, pointer);
    if (map.rank != rank) fail("%s in %u dimensions of a map of %u", what, rank, map.rank);
    const unsigned alignment = map.swizzle_bytes ? 8 * map.swizzle_bytes : 128;
    if (address % alignment != 0)
        fail("%s at shared address %#x, which is no multiple of %u", what, address, alignment);
    // Which the GPU calls an illegal instruction, wherever the box lies.
    const int64_t first = place[0] * int64_t(map.element_bytes);
    if (first % 16 != 0)
        fail("%s of rows from byte %lld on, which is no multiple of 16", what, (long long)first);
    return map;
}

void read_content(Copy& copy) {
    for (auto [address, bytes] : copy.pieces) {
        const unsigned char* source = checked_async(*copy.block, address, bytes, 1, "a bulk store");
        copy.content.insert(copy.content.end(), source, source + bytes);
    }
}

void finish(Copy copy) {
    if (copy.kind == Copy::STORE && copy.content.empty()) read_content(copy);
    size_t done = 0;
    for (size_t i = 0; i < copy.pieces.size(); ++i) {
        const auto [address, bytes] = copy.pieces[i];
        unsigned char* const memory = copy.block->memory + (address - FIRST_ADDRESS);
        if (copy.kind == Copy::STORE) {
            if (copy.global[i]) memcpy(copy.global[i], &copy.content[done], bytes);
            done += bytes;
        } else if (!copy.content.empty()) {
            memcpy(memory, copy.content.data(), bytes);
        } else if (copy.global[i]) {
            memcpy(memory, copy.global[i], bytes);
        } else {
            memset(memory, 0, bytes);
        }
    }
    if (copy.kind == Copy::STORE) {
        if (!copy.is_awaited) unawaited.push_back(std::move(copy));
    } else {
        for (auto [address, bytes] : copy.pieces)
            std::fill_n(copy.block->loads.begin() + (address - FIRST_ADDRESS), bytes, false);
        Barrier& barrier = barrier_at(*copy.block, copy.barrier);
        add_bytes(barrier, copy.barrier, -int64_t(copy.bytes));
        settle(barrier);
    }
}

}  // namespace

void finish_copy(size_t index) {
    std::swap(copies[index], copies.back());
    Copy copy = std::move(copies.back());
    copies.pop_back();
    // What it complains about is the fault of the thread that sent for it.
    Thread* const running = current;
    if (!running) current = copy.fiber;
    finish(std::move(copy));
    current = running;
}

namespace {

// What a load will fill is nobody's from now on.
void start_load(Copy copy) {
    for (auto [address, bytes] : copy.pieces) {
        checked_stored(*copy.block, address, bytes, 1, "a bulk load");
        unsigned char* memory = checked_async(*copy.block, address, bytes, 1, "a bulk load");
        memset(memory, POISON, bytes);
        std::fill_n(copy.block->loads.begin() + (address - FIRST_ADDRESS), bytes, true);
        copy.bytes += bytes;
    }
    barrier_at(*copy.block, copy.barrier);
    copies.push_back(std::move(copy));
    pause();
}

}  // namespace

void load_box(unsigned rank, unsigned destination, const void* map_pointer, const int* place,
              unsigned barrier, unsigned multicast) {
    Block& block = owner(destination);
    owner(barrier);
    const Map map = map_at(rank, map_pointer, place, destination, "a bulk load");
    for (unsigned i = 0; i < block.cluster->blocks.size(); ++i) {
        if (multicast ? !(multicast >> i & 1) : i != block.rank) continue;
        Copy copy{&self(), block.cluster->blocks[i].get(), Copy::LOAD, 0, barrier};
        if (copy.block->live == 0) fail("loads into a block of the cluster that has ended");
        divide(copy, map, place, destination);
        start_load(std::move(copy));
    }
}

// Nothing comes of it, but it must be of memory.
void prefetch_bulk(const void* source, unsigned bytes) {
    if (bytes == 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0)
        fail("a bulk prefetch of %u bytes from %p: both must be multiples of 16", bytes, source);
    const auto* all = static_cast<const volatile unsigned char*>(source);
    (void)all[0];
    (void)all[bytes - 1];
}

void load_bulk(unsigned destination, const void* source, unsigned bytes, unsigned barrier) {
    Block& block = owner(destination);
    owner(barrier);
    if (bytes == 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0)
        fail("a bulk load of %u bytes from %p: both must be multiples of 16", bytes, source);
    checked(block, destination, bytes, 16, "a bulk load");
    Copy copy{&self(), &block, Copy::LOAD, 0, barrier};
    copy.pieces.emplace_back(destination, bytes);
    copy.global.push_back(static_cast<unsigned char*>(const_cast<void*>(source)));
    start_load(std::move(copy));
}

namespace {

void start_store(Copy copy) {
    for (const unsigned char* place : copy.global)
        if (place) check_write(place);
    for (auto [address, bytes] : copy.pieces) {
        checked_async(*copy.block, address, bytes, 1, "a bulk store");
        mark_read(*copy.block, address, bytes, true);
    }
    if (happens(temper.early)) read_content(copy);
    copies.push_back(std::move(copy));
    pause();
}

}  // namespace

void store_box(unsigned rank, const void* map_pointer, const int* place, unsigned source) {
    const Map map = map_at(rank, map_pointer, place, source, "a bulk store");
    Fiber& fiber = self();
    Copy copy{&fiber, &own_block(), Copy::STORE, fiber.bulk_group};
    divide(copy, map, place, source);
    start_store(std::move(copy));
}

void bulk_commit() { ++self().bulk_group; }

void bulk_wait_read(unsigned pending) {
    pause();
    const Fiber& fiber = self();
    auto is_meant = [&](const Copy& copy) {
        return copy.kind == Copy::STORE && copy.fiber == &fiber && !copy.is_awaited &&
               copy.group + pending < fiber.bulk_group;
    };
    auto release = [](const Copy& copy) {
        for (auto [address, bytes] : copy.pieces) mark_read(*copy.block, address, bytes, false);
    };
    for (Copy& copy : copies) {
        if (!is_meant(copy)) continue;
        if (copy.content.empty()) read_content(copy);
        copy.is_awaited = true;
        release(copy);
    }
    for (size_t i = unawaited.size(); i-- > 0;) {
        if (!is_meant(unawaited[i])) continue;
        release(unawaited[i]);
        unawaited.erase(unawaited.begin() + i);
    }
}

bool has_unawaited_stores(const Block& block) {
    for (const auto* each : {&copies, &unawaited})
        for (const Copy& copy : *each)
            if (copy.block == &block && copy.kind == Copy::STORE && !copy.is_awaited) return true;
    return false;
}

void forget_copies() {
    copies.clear();
    unawaited.clear();
}

namespace {

void finish(const ThreadCopy& copy) {
    Block& block = own_block();
    unsigned char* const memory = block.memory + (copy.address - FIRST_ADDRESS);
    if (copy.source)
        memcpy(memory, copy.source, 16);
    else
        memset(memory, 0, 16);
    std::fill_n(block.loads.begin() + (copy.address - FIRST_ADDRESS), 16, false);
}

}  // namespace

// At once, or when the thread waits for it. To the copy engine it is a store as any other.
void copy_async(unsigned destination, const void* source) {
    if (reinterpret_cast<uintptr_t>(source) % 16 != 0)
        fail("cp.async of 16 bytes from %p, which is no multiple of that", source);
    memset(shared_for_store(destination, 16, 16), POISON, 16);
    std::fill_n(own_block().loads.begin() + (destination - FIRST_ADDRESS), 16, true);
    const ThreadCopy copy{destination, source, self().copy_group};
    if (happens(temper.early))
        finish(copy);
    else
        self().thread_copies.push_back(copy);
}

void copy_commit() { ++self().copy_group; }

void copy_wait(unsigned pending) {
    pause();
    Fiber& fiber = self();
    auto& copies = fiber.thread_copies;
    const auto done = std::find_if(copies.begin(), copies.end(), [&](const ThreadCopy& copy) {
        return copy.group + pending >= fiber.copy_group;
    });
    std::for_each(copies.begin(), done, [](const ThreadCopy& copy) { finish(copy); });
    copies.erase(copies.begin(), done);
}

void store_async(unsigned address, unsigned barrier, const void* value, unsigned bytes) {
    Block& block = owner(address);
    owner(barrier);
    unsigned char* memory = checked(block, address, bytes, bytes, "st.async");
    const auto* first = static_cast<const unsigned char*>(value);
    Copy copy{&self(), &block, Copy::LOAD, 0, barrier, bytes, {{address, bytes}}, {nullptr}};
    copy.content.assign(first, first + bytes);
    memset(memory, POISON, bytes);
    barrier_at(block, barrier);
    copies.push_back(std::move(copy));
    pause();
}

}  // namespace emulator
