// One streaming multiprocessor after another, in one thread of the CPU.
//
// Each thread of a block is a fiber. A scheduler lets the fibers of one warp run, lane by lane,
// until each waits for something; which warp, and in which order its lanes, is drawn from a seed.
// Everything asynchronous is as late or as early as it may be, also by that seed:
//
// - A bulk copy poisons its destination at once and fills it later: when a number is drawn, or when
//   no thread can run.
// - A product of the tensor cores poisons its sums at once, reads its operands now or when somebody
//   waits for its group, and gives the sums only then.
// - What a thread stored to shared memory is unfit for both until that thread's proxy fence.
#include "machine.hpp"

#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

// The callee's registers stay on the stack that is left; a new stack begins with zeros for them.
asm(R"(
.text
.globl emulator_switch
emulator_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
.globl emulator_resume
emulator_resume:
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
extern "C" void emulator_switch(void** left, void* entered);
extern "C" void emulator_resume();

namespace emulator {

Thread* current;
Index grid_size, block_size;

namespace {

constexpr unsigned ALL = 0xFFFFFFFF;
constexpr unsigned FIRST_ADDRESS = 1024;  // below it lies what the hardware keeps for itself
constexpr unsigned RANK_SHIFT = 24;       // in an address of the cluster, rank + 1 stands from here
constexpr unsigned GUARD_BYTES = 4096;    // behind shared memory; what is written there is seen
constexpr unsigned char POISON = 0xFF;    // NaN in every type
constexpr unsigned char GUARD = 0xA5;
constexpr unsigned STATIC_BYTES = 48 * 1024;
constexpr size_t STACK_BYTES = 256 * 1024;
const float NOT_YET = __builtin_nanf("0x2BAD");

struct Fiber;
struct Warp;
struct Block;

using Waiters = std::vector<Fiber*>;

struct Reason {
    const char* what = "run";
    const char* detail = "";
    unsigned number = 0, parity = 0;
};

struct Fiber : Thread {
    Warp* warp;
    void* stack;
    void* stack_pointer;
    Reason reason;
    std::vector<std::pair<unsigned, unsigned>> stored;  // to shared memory since the last fence
    unsigned bulk_group = 0, async_group = 0;           // the one that is open
    unsigned cluster_generation = 0;
};

struct Collective {
    unsigned mask;
    unsigned arrived = 0, generation = 0;
    const char* what = nullptr;
    void* brought[32];
    Waiters waiters;
};

struct Sums {
    std::vector<float*> registers;  // [32][columns / 2]
    std::vector<float> values;
    int users = 0;
};

struct Matrix {
    uint64_t descriptor;
    bool is_transposed;
    unsigned rows;
    std::vector<float> values;  // [rows][K], once they are read
};

struct Issued {
    Product product;
    Sums* sums;
    Matrix a, b;
    bool accumulates;
    unsigned group;
    std::vector<std::pair<const void*, unsigned>> registers;  // of a, and what they must still hold
};

struct Warp {
    Block* block;
    unsigned number;
    unsigned live = 0, runnable = 0;
    unsigned priority = 0;
    bool is_slow = false;
    std::vector<Fiber> fibers;
    std::list<Collective> collectives;
    std::deque<Issued> products;
    std::list<Sums> sums;
    unsigned group = 0;  // of products: the one that is open
    bool is_fenced = false;
};

struct Barrier {
    unsigned expected, pending;
    int64_t bytes;  // that are still to come
    unsigned phase;
    Waiters waiters;
};

struct NamedBarrier {
    unsigned threads = 0;
    std::vector<Fiber*> arrived;
    unsigned generation = 0;
    Waiters waiters;
};

struct Cluster {
    std::vector<std::unique_ptr<Block>> blocks;
    unsigned arrived = 0, generation = 0;
    Waiters waiters;
};

struct Block {
    Index index;
    unsigned rank;
    Cluster* cluster;
    std::vector<unsigned char> room;
    unsigned char* memory;  // aligned; its first byte has the address FIRST_ADDRESS
    unsigned static_end;
    std::unordered_map<const void*, unsigned> statics;
    std::vector<Fiber*> writer;  // of each byte that no fence has shown to the other proxy
    std::map<unsigned, Barrier> barriers;
    NamedBarrier named[16];
    std::vector<Warp> warps;
    unsigned live = 0;
    bool has_waited = false;  // for the kernels before this one
    std::vector<void*> stacks;

    ~Block();
};

// Something under way between shared and global memory.
struct Copy {
    Fiber* fiber;
    Block* block;  // whose shared memory it reads or writes
    unsigned group;
    enum Kind { LOAD, STORE, ASYNC } kind;
    std::vector<std::pair<unsigned, unsigned>> pieces;  // shared address, bytes: the first is filled
    std::vector<unsigned char*> global;                 // for each piece; null: outside
    std::vector<unsigned char> content;                 // if it was read before
    unsigned barrier = 0;
    unsigned bytes = 0;  // counted at the barrier
};

// What the kernels before this one write: until they have ended there is something else.
struct Late {
    unsigned char* memory;
    uint64_t bytes;
};

struct Setting {  // as runtime.py packs it
    unsigned grid[3], block[3];
    unsigned shared_bytes;
    unsigned resident;  // clusters at work at a time
    uint64_t seed;
    unsigned num_late;
    const Late* late;
};

// What the seed decides for a whole launch: each a chance in 256.
struct Temper {
    unsigned pause;     // that a thread lets others run
    unsigned complete;  // that a copy ends, at each step
    unsigned shuffle;   // that a warp gets another priority, at each step
    unsigned early;     // that a product reads its operands, or a store its source, at once
    unsigned slow;      // that a warp runs only where hardly another can
    unsigned eager;     // that who was waiting runs before who ended the wait goes on
};

Setting setting;
Temper temper;
uint64_t random_state;
std::string failure;
void* scheduler_stack;
sigjmp_buf scheduler_end;
bool in_fiber;
bool is_preempted;
std::vector<std::unique_ptr<Cluster>> residents;
std::vector<Copy> copies;
std::vector<void*> free_stacks;
bool previous_ended;
std::vector<std::vector<unsigned char>> written_late;
Waiters waiting_for_previous;
void (*kernel)(void**);
void** kernel_arguments;

Block::~Block() { free_stacks.insert(free_stacks.end(), stacks.begin(), stacks.end()); }

unsigned draw() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return unsigned(random_state >> 16);
}

bool happens(unsigned chance) { return draw() % 256 < chance; }

Fiber& self() { return *static_cast<Fiber*>(current); }
Block& own_block() { return *self().warp->block; }

void leave() {
    Fiber& fiber = self();
    emulator_switch(&fiber.stack_pointer, scheduler_stack);
}

void wait(Waiters& waiters, Reason reason) {
    Fiber& fiber = self();
    fiber.reason = reason;
    waiters.push_back(&fiber);
    fiber.warp->runnable &= ~(1u << fiber.lane);
    leave();
    fiber.reason = {};
}

void wake(Waiters& waiters) {
    for (Fiber* fiber : waiters) fiber->warp->runnable |= 1u << fiber->lane;
    waiters.clear();
}

std::string name(const Block& block) {
    std::string text = "block " + std::to_string(block.index.x);
    if (grid_size.y * grid_size.z > 1)
        text += "," + std::to_string(block.index.y) + "," + std::to_string(block.index.z);
    return text;
}

std::string place() {
    if (!current) return "";
    const Fiber& fiber = self();
    return name(*fiber.warp->block) + ", thread " +
           std::to_string(fiber.warp->number * 32 + fiber.lane) + ": ";
}

// Where in the code: addresses in this library from the inside outwards, which Python looks up.
std::string trace(const Fiber& fiber, uintptr_t code, uintptr_t frame) {
    Dl_info library;
    dladdr(reinterpret_cast<void*>(&emulator_switch), &library);
    const auto first = reinterpret_cast<uintptr_t>(fiber.stack), end = first + STACK_BYTES;
    std::string text = " @{";
    for (int depth = 0; depth < 12 && code; ++depth) {
        char number[32];
        snprintf(number, sizeof number, "%s%zx", depth ? "," : "",
                 size_t(code - 1 - reinterpret_cast<uintptr_t>(library.dli_fbase)));
        text += number;
        if (frame < first || frame + 16 > end || frame % 8 != 0) break;
        const auto* saved = reinterpret_cast<const uintptr_t*>(frame);
        code = saved[1];
        if (saved[0] <= frame) break;
        frame = saved[0];
    }
    return text + "}";
}

// As emulator_switch left it.
std::string trace(const Fiber& fiber) {
    const auto* saved = static_cast<const uintptr_t*>(fiber.stack_pointer);
    return trace(fiber, saved[6], saved[5]);
}

std::string vformat(const char* format, va_list arguments) {
    char text[1024];
    vsnprintf(text, sizeof text, format, arguments);
    return text;
}

}  // namespace

void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (failure.empty()) {
        failure = place() + vformat(format, arguments);
        if (in_fiber)
            failure += trace(self(), reinterpret_cast<uintptr_t>(__builtin_return_address(0)),
                             *static_cast<uintptr_t*>(__builtin_frame_address(0)));
    }
    va_end(arguments);
    if (!in_fiber) siglongjmp(scheduler_end, 1);
    leave();  // for good
    __builtin_unreachable();
}

void pause(bool polls) {
    if (!polls && !is_preempted && !happens(temper.pause)) return;
    if (polls) self().warp->priority = draw() | 1;
    leave();
}

// ---- kernels before this one -------------------------------------------------------------------

namespace {

void begin_previous() {
    previous_ended = false;
    waiting_for_previous.clear();
    written_late.clear();
    for (unsigned i = 0; i < setting.num_late; ++i) {
        const Late& late = setting.late[i];
        written_late.emplace_back(late.memory, late.memory + late.bytes);
        memset(late.memory, POISON, late.bytes);
    }
}

void end_previous() {
    if (previous_ended) return;
    previous_ended = true;
    for (unsigned i = 0; i < setting.num_late; ++i)
        memcpy(setting.late[i].memory, written_late[i].data(), setting.late[i].bytes);
    wake(waiting_for_previous);
}

}  // namespace

void wait_for_previous() {
    own_block().has_waited = true;
    while (!previous_ended) wait(waiting_for_previous, {"wait for the kernels before this one"});
    pause();
}

void check_write(const void* pointer) {
    const Block& block = own_block();
    const auto* place = static_cast<const unsigned char*>(pointer);
    const bool is_own = place >= block.room.data() && place < block.room.data() + block.room.size();
    if (!previous_ended && !is_own) fail("writes to memory before the kernels before this one ended");
}

// ---- shared memory -----------------------------------------------------------------------------

namespace {

unsigned shared_end(const Block&) {
    return FIRST_ADDRESS + (setting.shared_bytes + 255) / 128 * 128 + STATIC_BYTES;
}

// Which block an address belongs to; it then counts in that block.
Block& owner(unsigned& address) {
    Block& own = own_block();
    if (address >> RANK_SHIFT == 0) return own;
    const unsigned rank = (address >> RANK_SHIFT) - 1;
    address &= (1u << RANK_SHIFT) - 1;
    if (rank >= own.cluster->blocks.size()) fail("there is no block of rank %u in the cluster", rank);
    Block& found = *own.cluster->blocks[rank];
    if (found.live == 0) fail("the block of rank %u of the cluster has ended", rank);
    return found;
}

unsigned char* checked(Block& block, unsigned address, unsigned bytes, unsigned alignment,
                       const char* what) {
    if (address % alignment != 0)
        fail("%s at shared address %#x, which is no multiple of %u", what, address, alignment);
    const unsigned dynamic_end = FIRST_ADDRESS + setting.shared_bytes;
    const unsigned static_first = shared_end(block) - STATIC_BYTES;
    const bool is_dynamic = address >= FIRST_ADDRESS && address + bytes <= dynamic_end;
    const bool is_static = address >= static_first && address + bytes <= block.static_end;
    if (!is_dynamic && !is_static)
        fail("%s of %u bytes at shared address %#x; the block has %u bytes from %#x", what, bytes,
             address, setting.shared_bytes, FIRST_ADDRESS);
    return block.memory + (address - FIRST_ADDRESS);
}

// For the copy engine and the tensor cores.
unsigned char* checked_async(Block& block, unsigned address, unsigned bytes, unsigned alignment,
                             const char* what) {
    unsigned char* memory = checked(block, address, bytes, alignment, what);
    for (unsigned i = 0; i < bytes; ++i)
        if (const Fiber* writer = block.writer[address - FIRST_ADDRESS + i])
            fail("%s at shared address %#x, where thread %u of %s stored without a "
                 "fence.proxy.async since",
                 what, address + i, writer->warp->number * 32 + writer->lane,
                 name(*writer->warp->block).c_str());
    return memory;
}

}  // namespace

unsigned char* shared(unsigned address, unsigned bytes, unsigned alignment) {
    pause();
    Block& block = owner(address);
    return checked(block, address, bytes, alignment, "an access");
}

unsigned char* shared_for_store(unsigned address, unsigned bytes, unsigned alignment) {
    pause();
    Block& block = owner(address);
    unsigned char* memory = checked(block, address, bytes, alignment, "a store");
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
    Block& block = own_block();
    const auto offset = static_cast<const unsigned char*>(pointer) - block.memory;
    if (offset < 0 || offset >= shared_end(block)) fail("%p is not in shared memory", pointer);
    return FIRST_ADDRESS + unsigned(offset);
}

unsigned char* dynamic_shared() { return own_block().memory; }

void* static_shared(const void* place, unsigned bytes, unsigned alignment) {
    Block& block = own_block();
    auto [found, is_new] = block.statics.emplace(place, 0);
    if (is_new) {
        found->second = (block.static_end + alignment - 1) / alignment * alignment;
        block.static_end = found->second + bytes;
        if (block.static_end > shared_end(block)) fail("too much static shared memory");
    }
    return block.memory + (found->second - FIRST_ADDRESS);
}

// ---- threads together --------------------------------------------------------------------------

void together(unsigned mask, const char* what, void* own, Act act) {
    Fiber& fiber = self();
    Warp& warp = *fiber.warp;
    if (!(mask >> fiber.lane & 1)) fail("%s with a mask %#x without this lane", what, mask);
    Collective* found = nullptr;
    for (Collective& each : warp.collectives)
        if (each.mask == mask) found = &each;
    if (!found) found = &warp.collectives.emplace_back(Collective{mask});
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

namespace {

void settle(NamedBarrier& barrier, unsigned threads) {
    if (barrier.arrived.size() < threads) return;
    barrier.arrived.clear();
    ++barrier.generation;
    wake(barrier.waiters);
}

void arrive(NamedBarrier& barrier, unsigned id, unsigned threads, bool waits, const char* what) {
    Fiber& fiber = self();
    if (std::find(barrier.arrived.begin(), barrier.arrived.end(), &fiber) != barrier.arrived.end())
        fail("arrives twice at named barrier %u before all have", id);
    const unsigned generation = barrier.generation;
    barrier.arrived.push_back(&fiber);
    settle(barrier, threads);
    if (waits)
        while (barrier.generation == generation) wait(barrier.waiters, {what, "", id});
    pause();
}

}  // namespace

void block_sync() {
    Block& block = own_block();
    arrive(block.named[0], 0, block.live, true, "wait in __syncthreads");
}

void named_barrier(unsigned id, unsigned threads, bool waits) {
    Block& block = own_block();
    if (id >= 16) fail("there are named barriers 0 to 15, not %u", id);
    if (threads == 0 || threads % 32 != 0 || threads > block_size.x * block_size.y * block_size.z)
        fail("named barrier %u for %u threads", id, threads);
    NamedBarrier& barrier = block.named[id];
    if (barrier.arrived.empty()) barrier.threads = threads;
    if (barrier.threads != threads)
        fail("named barrier %u for %u threads, where others wait for %u", id, threads,
             barrier.threads);
    together(ALL, waits ? "bar.sync" : "bar.arrive", nullptr, nullptr);
    arrive(barrier, id, threads, waits, "waits at named barrier");
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

// ---- mbarriers ---------------------------------------------------------------------------------

namespace {

constexpr uint64_t BARRIER_MARK = 0xBA221E2BA221E2ull;

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

bool has_passed(const Barrier& barrier, unsigned parity) { return (barrier.phase & 1) != parity; }

}  // namespace

void barrier_init(unsigned address, unsigned arrivals) {
    Block& block = own_block();
    unsigned char* memory = checked(block, address, 8, 8, "an mbarrier");
    if (arrivals == 0 || arrivals >= 1 << 20) fail("an mbarrier for %u arrivals", arrivals);
    if (block.barriers.count(address))
        fail("the mbarrier at shared address %#x is initialised twice", address);
    memcpy(memory, &BARRIER_MARK, 8);
    block.barriers[address] = Barrier{arrivals, arrivals, 0, 0, {}};
}

void barrier_invalidate(unsigned address) {
    barrier_at(own_block(), address);
    own_block().barriers.erase(address);
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

bool barrier_test_wait(unsigned address, unsigned parity) {
    const bool passed = has_passed(barrier_at(own_block(), address), parity);
    pause(!passed);
    return passed;
}

bool barrier_try_wait(unsigned address, unsigned parity) {
    if (parity > 1) fail("waits at the mbarrier at %#x for parity %u", address, parity);
    Barrier& barrier = barrier_at(own_block(), address);
    if (has_passed(barrier, parity)) {
        pause();
        return true;
    }
    if (happens(64)) return pause(true), false;  // as after its time limit
    wait(barrier.waiters, {"waits at mbarrier", "", address, parity});
    return has_passed(barrier, parity);
}

// ---- copies ------------------------------------------------------------------------------------

namespace {

struct Map {  // as runtime.py packs it
    uint64_t mark;
    uint64_t address;
    uint32_t rank, element_bytes, swizzle_bytes;
    uint32_t size[5];
    uint64_t pitch[5];  // in bytes; that of the first dimension is an element
    uint16_t box[5];
    uint16_t unused[3];
};
static_assert(sizeof(Map) == 8 + 8 + 12 + 20 + 40 + 10 + 6, "as runtime.py packs it");
constexpr uint64_t MAP_MARK = 0x50414D524F534E45;

unsigned swizzled(unsigned address, unsigned bytes) {
    return address ^ (address >> 7 & (bytes / 16 - 1)) << 4;
}

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
            unsigned target = address + row * row_bytes + byte;
            if (map.swizzle_bytes) target = swizzled(target, map.swizzle_bytes);
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

Map map_at(unsigned rank, const void* pointer, unsigned address, const char* what) {
    Map map;
    memcpy(&map, pointer, sizeof map);
    if (map.mark != MAP_MARK) fail("%s: there is no tensor map at %p", what, pointer);
    if (map.rank != rank) fail("%s in %u dimensions of a map of %u", what, rank, map.rank);
    const unsigned alignment = map.swizzle_bytes ? 8 * map.swizzle_bytes : 128;
    if (address % alignment != 0)
        fail("%s at shared address %#x, which is no multiple of %u", what, address, alignment);
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
    if (copy.kind == Copy::LOAD) {
        Barrier& barrier = barrier_at(*copy.block, copy.barrier);
        add_bytes(barrier, copy.barrier, -int64_t(copy.bytes));
        settle(barrier);
    }
}

void finish(size_t index) {
    std::swap(copies[index], copies.back());
    Copy copy = std::move(copies.back());
    copies.pop_back();
    // What it complains about is the fault of the thread that sent for it.
    Thread* const running = current;
    if (!running) current = copy.fiber;
    finish(std::move(copy));
    current = running;
}

// What a load will fill is nobody's from now on.
void start_load(Copy copy) {
    for (auto [address, bytes] : copy.pieces) {
        unsigned char* memory = checked_async(*copy.block, address, bytes, 1, "a bulk load");
        memset(memory, POISON, bytes);
        copy.bytes += bytes;
    }
    barrier_at(*copy.block, copy.barrier);
    copies.push_back(std::move(copy));
    pause();
}

template <typename Condition>
void finish_all(Condition condition) {
    for (size_t i = copies.size(); i-- > 0;)
        if (condition(copies[i])) finish(i);
}

}  // namespace

void load_box(unsigned rank, unsigned destination, const void* map_pointer, const int* place,
              unsigned barrier, unsigned multicast) {
    Block& block = owner(destination);
    owner(barrier);
    const Map map = map_at(rank, map_pointer, destination, "a bulk load");
    for (unsigned i = 0; i < block.cluster->blocks.size(); ++i) {
        if (multicast ? !(multicast >> i & 1) : i != block.rank) continue;
        Copy copy{&self(), block.cluster->blocks[i].get(), 0, Copy::LOAD, {}, {}, {}, barrier, 0};
        if (copy.block->live == 0) fail("loads into a block of the cluster that has ended");
        divide(copy, map, place, destination);
        start_load(std::move(copy));
    }
}

void load_bulk(unsigned destination, const void* source, unsigned bytes, unsigned barrier) {
    Block& block = owner(destination);
    owner(barrier);
    if (bytes == 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0)
        fail("a bulk load of %u bytes from %p: both must be multiples of 16", bytes, source);
    checked(block, destination, bytes, 16, "a bulk load");
    Copy copy{&self(), &block, 0, Copy::LOAD, {}, {}, {}, barrier, 0};
    copy.pieces.emplace_back(destination, bytes);
    copy.global.push_back(static_cast<unsigned char*>(const_cast<void*>(source)));
    start_load(std::move(copy));
}

namespace {

void start_store(Copy copy) {
    for (const unsigned char* place : copy.global)
        if (place) check_write(place);
    if (happens(temper.early)) read_content(copy);
    copies.push_back(std::move(copy));
    pause();
}

}  // namespace

void store_box(unsigned rank, const void* map_pointer, const int* place, unsigned source) {
    const Map map = map_at(rank, map_pointer, source, "a bulk store");
    Fiber& fiber = self();
    Copy copy{&fiber, &own_block(), fiber.bulk_group, Copy::STORE, {}, {}, {}, 0, 0};
    divide(copy, map, place, source);
    start_store(std::move(copy));
}

void store_bulk(void* destination, unsigned source, unsigned bytes) {
    Fiber& fiber = self();
    if (bytes == 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(destination) % 16 != 0)
        fail("a bulk store of %u bytes to %p: both must be multiples of 16", bytes, destination);
    checked(own_block(), source, bytes, 16, "a bulk store");
    Copy copy{&fiber, &own_block(), fiber.bulk_group, Copy::STORE, {}, {}, {}, 0, 0};
    copy.pieces.emplace_back(source, bytes);
    copy.global.push_back(static_cast<unsigned char*>(destination));
    start_store(std::move(copy));
}

void bulk_commit() { ++self().bulk_group; }

void bulk_wait(unsigned pending) {
    pause();
    Fiber& fiber = self();
    finish_all([&](const Copy& copy) {
        return copy.fiber == &fiber && copy.kind == Copy::STORE &&
               copy.group + pending < fiber.bulk_group;
    });
}

void store_async(unsigned address, unsigned barrier, const void* value, unsigned bytes) {
    Block& block = owner(address);
    owner(barrier);
    unsigned char* memory = checked(block, address, bytes, bytes, "st.async");
    const auto* first = static_cast<const unsigned char*>(value);
    Copy copy{&self(),  &block, 0, Copy::LOAD, {{address, bytes}}, {nullptr}, {first, first + bytes},
              barrier, bytes};
    memset(memory, POISON, bytes);
    barrier_at(block, barrier);
    copies.push_back(std::move(copy));
    pause();
}

void copy_async(unsigned destination, const void* source, unsigned bytes, unsigned read) {
    Fiber& fiber = self();
    if (reinterpret_cast<uintptr_t>(source) % bytes != 0 && read)
        fail("cp.async of %u bytes from %p", bytes, source);
    unsigned char* memory = shared_for_store(destination, bytes, bytes);
    memset(memory, POISON, bytes);
    Copy copy{&fiber, &own_block(), fiber.async_group, Copy::ASYNC, {}, {}, {}, 0, 0};
    if (read) {
        copy.pieces.emplace_back(destination, read);
        copy.global.push_back(static_cast<unsigned char*>(const_cast<void*>(source)));
    }
    if (read < bytes) {
        copy.pieces.emplace_back(destination + read, bytes - read);
        copy.global.push_back(nullptr);
    }
    copies.push_back(std::move(copy));
}

void copy_async_commit() { ++self().async_group; }

void copy_async_wait(unsigned pending) {
    Fiber& fiber = self();
    finish_all([&](const Copy& copy) {
        return copy.fiber == &fiber && copy.kind == Copy::ASYNC &&
               copy.group + pending < fiber.async_group;
    });
    pause();
}

// ---- numbers -----------------------------------------------------------------------------------

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
        value = std::ldexp(float(mantissa | 1u << mantissa_bits), int(exponent) - bias - mantissa_bits);
    return sign ? -value : value;
}

}  // namespace

float widen(Type type, unsigned bits) {
    static const std::vector<float> e4m3 = [] {
        std::vector<float> values;
        for (unsigned i = 0; i < 256; ++i) values.push_back(small_float(i, 4, 3, false));
        return values;
    }();
    static const std::vector<float> f16 = [] {
        std::vector<float> values;
        for (unsigned i = 0; i < 65536; ++i) values.push_back(small_float(i, 5, 10, true));
        return values;
    }();
    switch (type) {
        case Type::E4M3:
            return e4m3[bits & 0xFF];
        case Type::E5M2:
            return small_float(bits & 0xFF, 5, 2, true);
        case Type::F16:
            return f16[bits & 0xFFFF];
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

// ---- tensor cores ------------------------------------------------------------------------------

namespace {

constexpr unsigned K_BYTES = 32;  // of both operands in one instruction

unsigned element_bytes(Type type) { return type == Type::E4M3 || type == Type::E5M2 ? 1 : 2; }

// As the tensor cores find it: 8 x 16 bytes lie together, `lead` and `stride` lead to the next ones,
// and the swizzle acts on the bits of the address.
void read_matrix(Matrix& matrix, Type type, Block& block, unsigned first_row) {
    static const unsigned SWIZZLES[] = {16, 128, 64, 32};
    const uint64_t descriptor = matrix.descriptor;
    const unsigned start = (descriptor & 0x3FFF) << 4;
    const unsigned lead = (descriptor >> 16 & 0x3FFF) << 4;
    const unsigned stride = (descriptor >> 32 & 0x3FFF) << 4;
    const unsigned base = descriptor >> 49 & 7;
    const unsigned swizzle = SWIZZLES[descriptor >> 62];
    if (base) fail("wgmma: the emulator knows no base offset in a matrix descriptor");
    if (swizzle > 16 && start % (8 * swizzle) >= swizzle)
        fail("wgmma: a matrix at %#x begins between the 8 rows that its swizzle repeats in", start);
    const unsigned bytes = element_bytes(type), k_elements = K_BYTES / bytes, unit = 16 / bytes;
    matrix.values.resize(matrix.rows * k_elements);
    auto read = [&](unsigned offset) {
        const unsigned address = swizzled(start + offset, swizzle);
        return checked_async(block, address, 16, 16, "wgmma reads");
    };
    auto value = [&](const unsigned char* memory, unsigned i) {
        return widen(type, bytes == 1 ? memory[i] : memory[2 * i] | memory[2 * i + 1] << 8);
    };
    if (!matrix.is_transposed) {
        for (unsigned r = 0; r < matrix.rows; ++r) {
            const unsigned row = first_row + r;
            for (unsigned chunk = 0; chunk < 2; ++chunk) {
                const unsigned char* memory =
                    read(row / 8 * stride + row % 8 * swizzle + chunk * (swizzle == 16 ? lead : 16));
                for (unsigned i = 0; i < unit; ++i)
                    matrix.values[r * k_elements + chunk * unit + i] = value(memory, i);
            }
        }
        return;
    }
    if (bytes == 1) fail("wgmma: matrices of 8 bits must lie along K");
    const unsigned units = swizzle / 16;  // of 8 rows, side by side
    for (unsigned r = 0; r < matrix.rows; r += 8) {
        const unsigned chunk = (first_row + r) / 8;
        for (unsigned k = 0; k < k_elements; ++k) {
            const unsigned in_atom = k % 8 * swizzle + chunk % units * 16;
            const unsigned atom = swizzle == 16 ? chunk * stride + k / 8 * lead
                                                : chunk / units * lead + k / 8 * stride;
            const unsigned char* memory = read(atom + in_atom);
            for (unsigned i = 0; i < 8; ++i)
                matrix.values[(r + i) * k_elements + k] = value(memory, i);
        }
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
    if (issued.a.values.empty()) read_matrix(issued.a, type, *warp.block, warp.number % 4 * 16);
    if (issued.b.values.empty()) read_matrix(issued.b, type, *warp.block, 0);
}

// Of A in registers: lane 4 g + t has rows g and g + 8, and of K what starts at 4 t bytes of 16.
void read_registers(Issued& issued, void* const (&brought)[32]) {
    const Type type = issued.product.type;
    const unsigned bytes = element_bytes(type), k_elements = K_BYTES / bytes, each = 4 / bytes;
    issued.a.values.resize(16 * k_elements);
    for (unsigned lane = 0; lane < 32; ++lane) {
        const auto& own = *static_cast<const Multiplication*>(brought[lane]);
        for (unsigned word = 0; word < 4; ++word) {
            if (own.a_places[word]) issued.registers.emplace_back(own.a_places[word], own.a[word]);
            for (unsigned i = 0; i < each; ++i) {
                const unsigned row = lane / 4 + word % 2 * 8;
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
                  {first.a_matrix, first.product->a_is_transposed, 16, {}},
                  {first.b_matrix, first.product->b_is_transposed, first.product->columns, {}},
                  first.accumulates,
                  warp.group,
                  {}};
    if (first.a) read_registers(issued, brought);
    if (happens(temper.early)) read_operands(issued, warp);
    warp.products.push_back(std::move(issued));
}

void complete(Issued& issued, Warp& warp) {
    read_operands(issued, warp);
    for (auto [place, value] : issued.registers)
        if (memcmp(place, &value, 4) != 0)
            fail("wrote to the registers of a matrix while a wgmma that reads them is under way");
    const unsigned columns = issued.product.columns;
    const unsigned k_elements = K_BYTES / element_bytes(issued.product.type);
    const float sign = float(issued.product.a_sign * issued.product.b_sign);
    Sums& sums = *issued.sums;
    for (unsigned row = 0; row < 16; ++row) {
        const float* a = &issued.a.values[row * k_elements];
        for (unsigned column = 0; column < columns; ++column) {
            const float* b = &issued.b.values[column * k_elements];
            float sum = 0;
            for (unsigned k = 0; k < k_elements; ++k) sum += a[k] * b[k];
            const unsigned lane = row % 8 * 4 + column % 8 / 2;
            const unsigned i = column / 8 * 4 + row / 8 * 2 + column % 2;
            float& value = sums.values[lane * (columns / 2) + i];
            value = (issued.accumulates ? value : 0) + sign * sum;
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

// ---- blocks ------------------------------------------------------------------------------------

namespace {

void thread_main() {
    kernel(kernel_arguments);
    Fiber& fiber = self();
    Warp& warp = *fiber.warp;
    Block& block = *warp.block;
    warp.live &= ~(1u << fiber.lane);
    warp.runnable &= ~(1u << fiber.lane);
    --block.live;
    fiber.reason = {"have ended"};
    if (block.live && !block.named[0].arrived.empty()) settle(block.named[0], block.live);
    leave();
    __builtin_unreachable();
}

void* take_stack() {
    if (free_stacks.empty()) {
        void* memory = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return nullptr;
        mprotect(memory, 4096, PROT_NONE);  // a stack that is too small ends the launch
        return memory;
    }
    void* memory = free_stacks.back();
    free_stacks.pop_back();
    return memory;
}

void prepare(Fiber& fiber, void* stack) {
    auto* top = reinterpret_cast<uint64_t*>(static_cast<char*>(stack) + STACK_BYTES);
    // As after a call: the stack is 8 from a multiple of 16 where a function begins.
    *--top = 0;
    *--top = reinterpret_cast<uint64_t>(&thread_main);
    for (int i = 0; i < 6; ++i) *--top = 0;
    fiber.stack_pointer = top;
}

std::unique_ptr<Block> make_block(Index index, unsigned rank, unsigned cluster_size,
                                  Cluster* cluster) {
    auto block = std::make_unique<Block>();
    block->index = index;
    block->rank = rank;
    block->cluster = cluster;
    const unsigned bytes = shared_end(*block) - FIRST_ADDRESS;
    block->room.resize(bytes + GUARD_BYTES + 1024);
    const auto first = reinterpret_cast<uintptr_t>(block->room.data());
    block->memory = block->room.data() + ((first + 1023) / 1024 * 1024 - first);
    memset(block->memory, POISON, bytes);
    memset(block->memory + setting.shared_bytes, GUARD, bytes - STATIC_BYTES - setting.shared_bytes);
    memset(block->memory + bytes, GUARD, GUARD_BYTES);
    block->static_end = shared_end(*block) - STATIC_BYTES;
    block->writer.resize(bytes);
    const unsigned threads = block_size.x * block_size.y * block_size.z;
    block->live = threads;
    block->warps.resize((threads + 31) / 32);
    for (unsigned w = 0; w < block->warps.size(); ++w) {
        Warp& warp = block->warps[w];
        warp.block = block.get();
        warp.number = w;
        warp.priority = draw() | 1;
        warp.is_slow = happens(temper.slow);
        warp.fibers.resize(std::min(32u, threads - w * 32));
        for (unsigned lane = 0; lane < warp.fibers.size(); ++lane) {
            Fiber& fiber = warp.fibers[lane];
            const unsigned thread = w * 32 + lane;
            fiber.thread = {thread % block_size.x, thread / block_size.x % block_size.y,
                            thread / block_size.x / block_size.y};
            fiber.block = index;
            fiber.lane = lane;
            fiber.cluster_rank = rank;
            fiber.cluster_size = cluster_size;
            fiber.warp = &warp;
            void* stack = take_stack();
            block->stacks.push_back(stack);
            fiber.stack = stack;
            prepare(fiber, stack);
            warp.live |= 1u << lane;
        }
        warp.runnable = warp.live;
    }
    return block;
}

// What a block must not leave behind.
void check_ended(Block& block) {
    auto complain = [&](const std::string& what) {
        if (failure.empty()) failure = name(block) + " " + what;
    };
    for (const Copy& copy : copies)
        if (copy.block == &block)
            complain(copy.kind == Copy::STORE ? "ends before its bulk stores were waited for"
                                              : "ends while a copy into its memory is under way");
    if (!block.has_waited) complain("never waits for the kernels before this one");
    for (const Warp& warp : block.warps)
        if (!warp.products.empty()) complain("ends while a wgmma is under way");
    const unsigned bytes = shared_end(block) - FIRST_ADDRESS;
    for (unsigned i = bytes; i < bytes + GUARD_BYTES; ++i)
        if (block.memory[i] != GUARD) return complain("wrote beyond its shared memory");
    for (unsigned i = setting.shared_bytes; i < bytes - STATIC_BYTES; ++i)
        if (block.memory[i] != GUARD) return complain("wrote beyond its dynamic shared memory");
}

void describe(std::string& text, const Block& block) {
    std::map<std::string, std::vector<unsigned>> threads;
    for (const Warp& warp : block.warps)
        for (const Fiber& fiber : warp.fibers) {
            const Reason& reason = fiber.reason;
            char text[256];
            if (!strcmp(reason.what, "waits at mbarrier")) {
                const Barrier& barrier = block.barriers.at(reason.number);
                snprintf(text, sizeof text,
                         "wait at the mbarrier at %#x for parity %u (phase %u: %u of %u arrivals "
                         "and %lld bytes to come)",
                         reason.number, reason.parity, barrier.phase, barrier.pending,
                         barrier.expected, (long long)barrier.bytes);
            } else if (!strcmp(reason.what, "waits at named barrier")) {
                const NamedBarrier& barrier = block.named[reason.number];
                snprintf(text, sizeof text, "wait at named barrier %u (%zu of %u threads are there)",
                         reason.number, barrier.arrived.size(), barrier.threads);
            } else if (*reason.detail) {
                snprintf(text, sizeof text, "%s %s, mask %#x", reason.what, reason.detail,
                         reason.number);
            } else {
                snprintf(text, sizeof text, "%s", reason.what);
            }
            const std::string line = text;
            const bool has_ended = !(warp.live >> fiber.lane & 1);
            threads[line + (has_ended ? "" : trace(fiber))].push_back(warp.number * 32 + fiber.lane);
        }
    for (const auto& [line, numbers] : threads) {
        text += "\n  " + name(block) + ", threads ";
        for (size_t i = 0; i < numbers.size(); ++i) {
            size_t end = i;
            while (end + 1 < numbers.size() && numbers[end + 1] == numbers[end] + 1) ++end;
            text += (i ? ", " : "") + std::to_string(numbers[i]);
            if (end > i) text += "-" + std::to_string(numbers[end]);
            i = end;
        }
        text += " " + line;
    }
}

void run_warp(Warp& warp) {
    const bool is_backward = draw() & 1;
    // The lanes at the ends have the most to do alone.
    const unsigned first = draw() & 1 ? draw() % 32 : is_backward ? 31 : 0;
    const unsigned lanes = warp.runnable;
    is_preempted = false;
    for (unsigned i = 0; i < 32 && failure.empty() && !is_preempted; ++i) {
        const unsigned lane = (first + (is_backward ? 32 - i : i)) % 32;
        if (!(lanes >> lane & warp.runnable >> lane & 1)) continue;
        current = &warp.fibers[lane];
        in_fiber = true;
        emulator_switch(&scheduler_stack, warp.fibers[lane].stack_pointer);
        in_fiber = false;
        current = nullptr;
    }
}

Warp* choose() {
    Warp* chosen = nullptr;
    for (auto& cluster : residents)
        for (auto& block : cluster->blocks)
            for (Warp& warp : block->warps) {
                if (!warp.runnable) continue;
                if (happens(temper.shuffle)) warp.priority = draw() | 1;
                if (warp.is_slow) warp.priority = happens(2) ? ALL : 0;
                if (!chosen || warp.priority > chosen->priority) chosen = &warp;
            }
    return chosen;
}

void retire() {
    for (size_t i = 0; i < residents.size();) {
        unsigned live = 0;
        for (auto& block : residents[i]->blocks) live += block->live;
        if (live) {
            ++i;
            continue;
        }
        for (auto& block : residents[i]->blocks) check_ended(*block);
        residents.erase(residents.begin() + i);
    }
}

void run(unsigned cluster_size) {
    const unsigned num_blocks = grid_size.x * grid_size.y * grid_size.z;
    std::vector<unsigned> order;
    for (unsigned i = 0; i < num_blocks / cluster_size; ++i) order.push_back(i);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[draw() % i]);
    size_t started = 0;
    if (sigsetjmp(scheduler_end, 1)) return;
    while (failure.empty()) {
        while (residents.size() < setting.resident && started < order.size()) {
            auto cluster = std::make_unique<Cluster>();
            for (unsigned rank = 0; rank < cluster_size; ++rank) {
                const unsigned number = order[started] * cluster_size + rank;
                const Index index = {number % grid_size.x, number / grid_size.x % grid_size.y,
                                     number / grid_size.x / grid_size.y};
                cluster->blocks.push_back(make_block(index, rank, cluster_size, cluster.get()));
            }
            residents.push_back(std::move(cluster));
            ++started;
        }
        if (residents.empty()) return;
        if (!copies.empty() && happens(temper.complete)) finish(draw() % copies.size());
        if (!previous_ended && happens(temper.complete / 8)) end_previous();
        if (Warp* warp = choose()) {
            run_warp(*warp);
            if (warp->live == 0) retire();
        } else if (!copies.empty()) {
            finish(draw() % copies.size());
        } else if (!previous_ended) {
            end_previous();
        } else {
            std::string text = "deadlock";
            for (auto& cluster : residents)
                for (auto& block : cluster->blocks) describe(text, *block);
            failure = text;
        }
    }
}

// ---- what Python calls -------------------------------------------------------------------------

void on_fault(int signal, siginfo_t* info, void* context) {
    if (!current) {
        ::signal(signal, SIG_DFL);
        return;
    }
    char text[128];
    snprintf(text, sizeof text, "reads or writes %p, which is no memory", info->si_addr);
    failure = place() + text;
    if (!in_fiber) siglongjmp(scheduler_end, 1);
    auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    failure += trace(self(), uintptr_t(registers[REG_RIP]) + 1, uintptr_t(registers[REG_RBP]));
    registers[REG_RSI] = reinterpret_cast<greg_t>(scheduler_stack);
    registers[REG_RIP] = reinterpret_cast<greg_t>(&emulator_resume);
}

}  // namespace

const char* launch(const void* settings, unsigned cluster_size, void (*function)(void**),
                   void** arguments) {
    setting = *static_cast<const Setting*>(settings);
    kernel = function;
    kernel_arguments = arguments;
    grid_size = {setting.grid[0], setting.grid[1], setting.grid[2]};
    block_size = {setting.block[0], setting.block[1], setting.block[2]};
    random_state = setting.seed * 0x9E3779B97F4A7C15 + 0x123456789;
    for (int i = 0; i < 8; ++i) draw();
    static const unsigned CHANCES[] = {0, 2, 16, 128};
    temper.pause = CHANCES[draw() % 4] / 2;
    temper.complete = CHANCES[draw() % 4];
    temper.shuffle = CHANCES[draw() % 4] / 2;
    temper.early = draw() % 3 * 128;
    temper.slow = draw() % 2 * 64;
    temper.eager = draw() % 3 * 128;
    failure.clear();
    residents.clear();
    copies.clear();
    static unsigned char signal_stack[64 * 1024];
    stack_t own_stack{signal_stack, 0, sizeof signal_stack}, other_stack;
    sigaltstack(&own_stack, &other_stack);
    struct sigaction action = {}, others[2];
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &others[0]);
    sigaction(SIGBUS, &action, &others[1]);
    begin_previous();
    run(cluster_size);
    end_previous();
    sigaction(SIGSEGV, &others[0], nullptr);
    sigaction(SIGBUS, &others[1], nullptr);
    sigaltstack(&other_stack, nullptr);
    current = nullptr;
    residents.clear();
    copies.clear();
    return failure.empty() ? nullptr : failure.c_str();
}

}  // namespace emulator
