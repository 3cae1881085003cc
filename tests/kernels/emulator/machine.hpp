// What the emulated machine offers to the instructions in ptx.hpp. machine.cpp says how.
#pragma once

namespace emulator {

struct Index {
    unsigned x, y, z;
};

// The thread that runs: what a kernel may ask about it.
struct Thread {
    Index thread, block;
    unsigned lane, cluster_rank, cluster_size;
};
extern Thread* current;
extern Index grid_size, block_size;

// Ends the launch with this message and where it happened.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

// A number by the seed.
unsigned draw();
// Other threads may run now. `polls`: this one is likely to ask again and again.
void pause(bool polls = false);

// Each time that a warp is at work for a while counts as a microsecond.
unsigned long long nanoseconds();

// Until the kernels before this one have ended: when a number is drawn, or when no thread can run.
void wait_for_previous();
// Before a write to what is no memory of this block: that is forbidden while they run.
void check_write(const void* pointer);

// ---- shared memory -----------------------------------------------------------------------------

// Of this block, or of the cluster as mapa gives it; fails where it does not lie in one's memory.
unsigned char* shared(unsigned address, unsigned bytes, unsigned alignment);
// A generic store: the copy engine and the tensor cores see it after the thread's proxy fence.
unsigned char* shared_for_store(unsigned address, unsigned bytes, unsigned alignment);
void proxy_fence();
unsigned address_of(const void* pointer);
unsigned char* dynamic_shared();
// `place` tells one variable from another.
void* static_shared(const void* place, unsigned bytes, unsigned alignment);

// ---- threads together --------------------------------------------------------------------------

// Until all lanes of the mask are here; the last one calls `act` with what each of them brought.
using Act = void (*)(void* const (&brought)[32]);
void together(unsigned mask, const char* what, void* own, Act act);
void block_sync();
void named_barrier(unsigned id, unsigned threads, bool waits);
void cluster_arrive();
void cluster_wait();

// ---- mbarriers ---------------------------------------------------------------------------------

void barrier_init(unsigned address, unsigned arrivals);
void barrier_expect(unsigned address, unsigned bytes);
void barrier_arrive(unsigned address, unsigned count);
bool barrier_try_wait(unsigned address, unsigned parity);

// ---- copies ------------------------------------------------------------------------------------

void load_box(unsigned rank, unsigned destination, const void* map, const int* place,
              unsigned barrier, unsigned multicast);
void store_box(unsigned rank, const void* map, const int* place, unsigned source);
void load_bulk(unsigned destination, const void* source, unsigned bytes, unsigned barrier);
void prefetch_bulk(const void* source, unsigned bytes);
// 16 bytes, or zeros if there is no source; by the thread itself, in groups.
void copy_async(unsigned destination, const void* source);
void copy_commit();
void copy_wait(unsigned pending);
void bulk_commit();
void bulk_wait_read(unsigned pending);  // until the sources have been read
void store_async(unsigned address, unsigned barrier, const void* value, unsigned bytes);

// ---- tensor cores ------------------------------------------------------------------------------

enum class Type { E4M3, E5M2, BF16, F16 };

struct Product {  // of one warp: 16 rows of the warpgroup's 64
    Type type;
    unsigned columns;
    bool a_is_transposed, b_is_transposed;  // in shared memory: not along K
    int a_sign, b_sign;
};
// `a`: what 4 registers hold, and where; or null where it lies in shared memory, described as b is.
void multiply_async(const Product& product, float* const* sums, const unsigned* a,
                    const void* const* a_places, unsigned long long a_matrix,
                    unsigned long long b_matrix, bool accumulates);
void multiply_fence();
void multiply_commit();
void multiply_wait(unsigned pending);

// ---- numbers -----------------------------------------------------------------------------------

float widen(Type type, unsigned bits);
unsigned short narrow_bf16(float value);
unsigned short narrow_f16(float value);
unsigned char narrow_e4m3(float value);  // saturates

}  // namespace emulator
