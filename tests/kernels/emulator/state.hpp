// What the parts of the emulated machine share: see machine.cpp.
#pragma once

#include <stdint.h>

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "machine.hpp"

namespace emulator {

constexpr unsigned ALL = 0xFFFFFFFF;
constexpr unsigned FIRST_ADDRESS = 1024;  // below it lies what the hardware keeps for itself
constexpr unsigned RANK_SHIFT = 24;       // in an address of the cluster, rank + 1 stands from here
constexpr unsigned GUARD_BYTES = 4096;    // behind shared memory; what is written there is seen
constexpr unsigned char POISON = 0xFF;    // NaN in every type
constexpr unsigned char GUARD = 0xA5;
constexpr unsigned STATIC_BYTES = 48 * 1024;
constexpr size_t STACK_BYTES = 256 * 1024;
inline const float NOT_YET = __builtin_nanf("0x2BAD");

struct Fiber;
struct Warp;
struct Block;

using Waiters = std::vector<Fiber*>;

struct Barrier;
struct NamedBarrier;

// Why a fiber does not run.
struct Reason {
    const char* what = "run";
    const char* lanes_in = nullptr;  // an instruction of a whole warp
    unsigned number = 0, parity = 0;
    const Barrier* barrier = nullptr;
    const NamedBarrier* named = nullptr;
};

// A thread's own copy of 16 bytes, or of zeros.
struct ThreadCopy {
    unsigned address;
    const void* source;
    unsigned group;
};

struct Fiber : Thread {
    Warp* warp;
    void* stack;
    void* stack_pointer;
    Reason reason;
    std::vector<std::pair<unsigned, unsigned>> stored;  // to shared memory since the last fence
    unsigned bulk_group = 0;                            // of stores: the one that is open
    std::vector<ThreadCopy> thread_copies;  // under way
    unsigned copy_group = 0;                // of them: the one that is open
    unsigned cluster_generation = 0;
    unsigned may_arrive[16] = {};  // at each named barrier: from which generation on
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

struct Unit {  // 16 bytes of a matrix, and what its first element is
    unsigned address, row, k;
};

// Of A all 64 rows, though a warp multiplies 16.
struct Matrix {
    uint64_t descriptor;
    bool is_transposed;
    unsigned rows;
    std::vector<Unit> units;    // none of what is in registers
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
    unsigned threads = 0, arrived = 0, generation = 0;
    Waiters waiters;
};

// What is left of a rank's launches.
struct Rank {
    unsigned launch = 0, live = 0;  // clusters of that launch
    std::vector<unsigned> waiting;  // likewise, that have not begun
};

struct Cluster {
    Rank* of;
    void** arguments;  // of its launch
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
    std::vector<char> loads;     // into each byte: one is under way
    std::vector<short> readers;  // of each 16 bytes: products and bulk stores under way
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
    enum Kind { LOAD, STORE } kind;
    unsigned group = 0;  // of its thread's stores
    unsigned barrier = 0;
    unsigned bytes = 0;  // counted at the barrier
    std::vector<std::pair<unsigned, unsigned>> pieces = {};  // shared address, bytes
    std::vector<unsigned char*> global = {};                 // for each piece; null: outside
    std::vector<unsigned char> content = {};                 // if it was read before
    bool is_awaited = false;                                 // until its source was read
};

// What the kernels before this one write: until they have ended there is something else.
struct Late {
    unsigned char* memory;
    uint64_t bytes;
};

struct Setting {  // as __init__.py packs it
    unsigned grid[3], block[3];
    unsigned shared_bytes;
    unsigned resident;  // clusters at work at a time, of all launches
    unsigned ranks, launches;  // each rank has so many launches of one grid, one after the other
    unsigned arguments_each;
    uint64_t seed;
    unsigned seconds;  // of the CPU, after which a launch is given up
    unsigned num_late;
    const Late* late;
};

// What the seed decides for a whole launch: each a chance in 256.
struct Temper {
    unsigned pause;     // that a thread lets others run
    unsigned complete;  // that a copy ends, at each step
    unsigned shuffle;   // that a warp gets another priority, at each step
    unsigned early;     // that a product reads its operands, or a store its source, at once
    unsigned slow;      // that a warp, or a whole block, runs only where hardly another can
    unsigned eager;     // that who was waiting runs before who ended the wait goes on
};

extern Setting setting;
extern Temper temper;
extern std::vector<Copy> copies;
extern bool is_preempted;  // the warp at work is to make way

bool happens(unsigned chance);  // of 256

inline Fiber& self() { return *static_cast<Fiber*>(current); }
inline Block& own_block() { return *self().warp->block; }
std::string name(const Block& block);

void wait(Waiters& waiters, Reason reason);
void wake(Waiters& waiters);
void settle(NamedBarrier& barrier, unsigned threads);
void settle(Barrier& barrier);
Barrier& barrier_at(Block& block, unsigned address);
void add_bytes(Barrier& barrier, unsigned address, int64_t bytes);
// One of `copies`, which is then gone.
void finish_copy(size_t index);
bool has_unawaited_stores(const Block& block);
void forget_copies();

// ---- addresses of shared memory ----------------------------------------------------------------

unsigned shared_end();
// Which block an address belongs to; it then counts in that block.
Block& owner(unsigned& address);
unsigned char* checked(Block& block, unsigned address, unsigned bytes, unsigned alignment,
                       const char* what);
// A product or a bulk store under way reads there, or does no longer.
void mark_read(Block& block, unsigned address, unsigned bytes, bool is_read);
// Where nothing asynchronous may be under way.
unsigned char* checked_stored(Block& block, unsigned address, unsigned bytes, unsigned alignment,
                              const char* what);
// For the copy engine and the tensor cores, to which a thread's stores are unknown until its fence.
unsigned char* checked_async(Block& block, unsigned address, unsigned bytes, unsigned alignment,
                             const char* what);

// By `bytes` (16: not at all), as the copy engine and the tensor cores do it.
inline unsigned swizzled(unsigned address, unsigned bytes) {
    return address ^ (address >> 7 & (bytes / 16 - 1)) << 4;
}

}  // namespace emulator
