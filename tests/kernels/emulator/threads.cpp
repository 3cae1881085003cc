// Shared memory, and how threads wait for each other.
#include <string.h>

#include <algorithm>
#include <cstdlib>

#include "state.hpp"

namespace emulator {

// ---- shared memory ------------------------------------------------------------------------------

// Dynamic, some bytes that are nobody's, static.
unsigned shared_end() {
    return FIRST_ADDRESS + (setting.shared_bytes + 255) / 128 * 128 + STATIC_BYTES;
}

Block& owner(unsigned& address) {
    Block& own = own_block();
    if (address >> RANK_SHIFT == 0) return own;
    const unsigned rank = (address >> RANK_SHIFT) - 1;
    address &= (1u << RANK_SHIFT) - 1;
    if (rank >= own.cluster->blocks.size()) fail("the cluster has no block of rank %u", rank);
    Block& found = *own.cluster->blocks[rank];
    if (found.live == 0) fail("the block of rank %u of the cluster has ended", rank);
    return found;
}

unsigned char* checked(Block& block, unsigned address, unsigned bytes, unsigned alignment,
                       const char* what) {
    if (address % alignment != 0)
        fail("%s at shared address %#x, which is no multiple of %u", what, address, alignment);
    const unsigned dynamic_end = FIRST_ADDRESS + setting.shared_bytes;
    const unsigned static_first = shared_end() - STATIC_BYTES;
    const bool is_dynamic = address >= FIRST_ADDRESS && address + bytes <= dynamic_end;
    const bool is_static = address >= static_first && address + bytes <= block.static_end;
    if (!is_dynamic && !is_static)
        fail("%s of %u bytes at shared address %#x; the block has %u bytes from %#x", what, bytes,
             address, setting.shared_bytes, FIRST_ADDRESS);
    return block.memory + (address - FIRST_ADDRESS);
}

unsigned char* checked_stored(Block& block, unsigned address, unsigned bytes, unsigned alignment,
                              const char* what) {
    unsigned char* memory = checked(block, address, bytes, alignment, what);
    const unsigned first = address - FIRST_ADDRESS;
    for (unsigned i = first; i < first + bytes; ++i) {
        if (block.loads[i])
            fail("%s at shared address %#x, while a copy into it is under way", what, address);
        if (block.readers[i / 16])
            fail("%s at shared address %#x, while a wgmma or a bulk store reads it", what, address);
    }
    return memory;
}

void mark_read(Block& block, unsigned address, unsigned bytes, bool is_read) {
    const unsigned first = (address - FIRST_ADDRESS) / 16;
    const unsigned last = (address - FIRST_ADDRESS + bytes - 1) / 16;
    for (unsigned i = first; i <= last; ++i) block.readers[i] += is_read ? 1 : -1;
}

template <typename T>
static bool are_zero(const T* values, unsigned count) {
    return std::all_of(values, values + count, [](T each) { return !each; });
}
// In few instructions: what the tensor cores read comes in units of 16 bytes.
template <unsigned COUNT, typename T>
static bool are_zero(const T* values) {
    uintptr_t bits = 0;
    for (unsigned i = 0; i < COUNT; ++i) bits |= uintptr_t(values[i]);
    return bits == 0;
}

unsigned char* checked_async(Block& block, unsigned address, unsigned bytes, unsigned alignment,
                             const char* what) {
    unsigned char* memory = checked(block, address, bytes, alignment, what);
    const unsigned first = address - FIRST_ADDRESS;
    const bool is_free =
        bytes == 16 ? are_zero<16>(&block.loads[first]) && are_zero<16>(&block.writer[first])
                    : are_zero(&block.loads[first], bytes) && are_zero(&block.writer[first], bytes);
    for (unsigned i = 0; !is_free && i < bytes; ++i) {
        if (block.loads[first + i])
            fail("%s at shared address %#x, while a copy into it is under way", what, address);
        if (const Fiber* writer = block.writer[first + i])
            fail("%s at shared address %#x, where thread %u of %s stored without a "
                 "fence.proxy.async since",
                 what, address + i, writer->warp->number * 32 + writer->lane,
                 name(*writer->warp->block).c_str());
    }
    return memory;
}

unsigned char* shared(unsigned address, unsigned bytes, unsigned alignment) {
    pause();
    Block& block = owner(address);
    return checked(block, address, bytes, alignment, "an access");
}

unsigned char* shared_for_store(unsigned address, unsigned bytes, unsigned alignment) {
    pause();
    Block& block = owner(address);
    unsigned char* memory = checked_stored(block, address, bytes, alignment, "a store");
    std::fill_n(block.writer.begin() + (address - FIRST_ADDRESS), bytes, &self());
    self().stored.emplace_back(address + ((block.rank + 1) << RANK_SHIFT), bytes);
    return memory;
}

void proxy_fence() {
    Fiber& fiber = self();
    for (auto [address, bytes] : fiber.stored) {
        Block& block = owner(address);
        for (unsigned i = address - FIRST_ADDRESS; i < address - FIRST_ADDRESS + bytes; ++i)
            if (block.writer[i] == &fiber) block.writer[i] = nullptr;
    }
    fiber.stored.clear();
}

unsigned address_of(const void* pointer) {
    const Block& block = own_block();
    const auto offset = static_cast<const unsigned char*>(pointer) - block.memory;
    if (offset < 0 || offset >= shared_end() - FIRST_ADDRESS)
        fail("%p is not in shared memory", pointer);
    return FIRST_ADDRESS + unsigned(offset);
}

unsigned char* dynamic_shared() { return own_block().memory; }

void* static_shared(const void* place, unsigned bytes, unsigned alignment) {
    Block& block = own_block();
    auto [found, is_new] = block.statics.emplace(place, 0);
    if (is_new) {
        found->second = (block.static_end + alignment - 1) / alignment * alignment;
        block.static_end = found->second + bytes;
        if (block.static_end > shared_end()) fail("too much static shared memory");
    }
    return block.memory + (found->second - FIRST_ADDRESS);
}

// ---- threads together ---------------------------------------------------------------------------

void together(unsigned mask, const char* what, void* own, Act act) {
    Fiber& fiber = self();
    Warp& warp = *fiber.warp;
    if (!(mask >> fiber.lane & 1)) fail("%s with a mask %#x without this lane", what, mask);
    Collective* found = nullptr;
    for (Collective& each : warp.collectives)
        if (each.mask == mask) found = &each;
    if (!found) {
        found = &warp.collectives.emplace_back();
        found->mask = mask;
    }
    if (found->arrived == 0) found->what = what;
    if (strcmp(found->what, what) != 0)
        fail("%s, where other lanes of the warp wait in %s", what, found->what);
    found->brought[fiber.lane] = own;
    found->arrived |= 1u << fiber.lane;
    if (found->arrived != mask) {
        const unsigned generation = found->generation;
        while (found->generation == generation)
            wait(found->waiters, {"wait for lanes of their warp in", what, mask});
        return;
    }
    void* brought[32] = {};
    for (unsigned lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) brought[lane] = found->brought[lane];
    if (act) act(brought);
    found->arrived = 0;
    ++found->generation;
    wake(found->waiters);
    pause();
}

void settle(NamedBarrier& barrier, unsigned threads) {
    if (barrier.arrived < threads) return;
    barrier.arrived = 0;
    ++barrier.generation;
    wake(barrier.waiters);
}

namespace {

void arrive(NamedBarrier& barrier, unsigned id, unsigned threads, bool waits) {
    Fiber& fiber = self();
    const unsigned generation = barrier.generation;
    if (generation < fiber.may_arrive[id])
        fail("arrives twice at named barrier %u before all have", id);
    fiber.may_arrive[id] = generation + 1;
    ++barrier.arrived;
    settle(barrier, threads);
    if (waits)
        while (barrier.generation == generation)
            wait(barrier.waiters, {"wait", nullptr, id, 0, nullptr, &barrier});
    pause();
}

}  // namespace

void block_sync() {
    Block& block = own_block();
    block.named[0].threads = block.live;
    arrive(block.named[0], 0, block.live, true);
}

void named_barrier(unsigned id, unsigned threads, bool waits) {
    Block& block = own_block();
    if (id >= 16) fail("there are named barriers 0 to 15, not %u", id);
    if (threads == 0 || threads % 32 != 0 || threads > block_size.x * block_size.y * block_size.z)
        fail("named barrier %u for %u threads", id, threads);
    NamedBarrier& barrier = block.named[id];
    if (barrier.arrived == 0) barrier.threads = threads;
    if (barrier.threads != threads)
        fail("named barrier %u for %u threads, where others wait for %u", id, threads,
             barrier.threads);
    together(ALL, waits ? "bar.sync" : "bar.arrive", nullptr, nullptr);
    arrive(barrier, id, threads, waits);
}

void cluster_arrive() {
    Cluster& cluster = *own_block().cluster;
    self().cluster_generation = cluster.generation;
    unsigned live = 0;
    for (auto& block : cluster.blocks) live += block->live;
    if (++cluster.arrived < live) return;
    cluster.arrived = 0;
    ++cluster.generation;
    wake(cluster.waiters);
}

void cluster_wait() {
    Cluster& cluster = *own_block().cluster;
    const unsigned generation = self().cluster_generation;
    while (cluster.generation == generation) wait(cluster.waiters, {"wait for their cluster"});
    pause();
}

// ---- mbarriers ----------------------------------------------------------------------------------

static constexpr uint64_t BARRIER_MARK = 0xBA221E2BA221E2ull;

Barrier& barrier_at(Block& block, unsigned address) {
    const unsigned char* memory = checked(block, address, 8, 8, "an mbarrier");
    const auto found = block.barriers.find(address);
    if (found == block.barriers.end()) fail("there is no mbarrier at shared address %#x", address);
    if (memcmp(memory, &BARRIER_MARK, 8) != 0)
        fail("the mbarrier at shared address %#x was overwritten", address);
    return found->second;
}

void settle(Barrier& barrier) {
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    ++barrier.phase;
    barrier.pending = barrier.expected;
    if (!barrier.waiters.empty() && happens(temper.eager)) {
        for (Fiber* fiber : barrier.waiters) fiber->warp->priority = ALL;
        is_preempted = true;
    }
    wake(barrier.waiters);
}

void add_bytes(Barrier& barrier, unsigned address, int64_t bytes) {
    barrier.bytes += bytes;
    if (std::abs(barrier.bytes) >= 1 << 20)
        fail("the mbarrier at %#x counts %lld bytes", address, (long long)barrier.bytes);
}

static bool has_passed(const Barrier& barrier, unsigned parity) {
    return (barrier.phase & 1) != parity;
}

void barrier_init(unsigned address, unsigned arrivals) {
    Block& block = own_block();
    unsigned char* memory = checked(block, address, 8, 8, "an mbarrier");
    if (arrivals == 0 || arrivals >= 1 << 20) fail("an mbarrier for %u arrivals", arrivals);
    if (block.barriers.count(address))
        fail("the mbarrier at shared address %#x is initialised twice", address);
    memcpy(memory, &BARRIER_MARK, 8);
    block.barriers[address] = Barrier{arrivals, arrivals, 0, 0, {}};
}

void barrier_expect(unsigned address, unsigned bytes) {
    Block& block = owner(address);
    add_bytes(barrier_at(block, address), address, bytes);
}

void barrier_arrive(unsigned address, unsigned count) {
    pause();
    Block& block = owner(address);
    Barrier& barrier = barrier_at(block, address);
    if (barrier.pending < count)
        fail("arrives at the mbarrier at %#x of %s, which has had its %u arrivals and waits for "
             "%lld bytes",
             address, name(block).c_str(), barrier.expected, (long long)barrier.bytes);
    barrier.pending -= count;
    settle(barrier);
    pause();
}

bool barrier_try_wait(unsigned address, unsigned parity) {
    if (parity > 1) fail("waits at the mbarrier at %#x for parity %u", address, parity);
    Barrier& barrier = barrier_at(own_block(), address);
    if (has_passed(barrier, parity)) {
        pause();
        return true;
    }
    if (happens(64)) return pause(true), false;  // as after its time limit
    wait(barrier.waiters, {"wait", nullptr, address, parity, &barrier});
    return has_passed(barrier, parity);
}

}  // namespace emulator
