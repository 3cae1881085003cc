// One streaming multiprocessor after another, in one thread of the CPU.
//
// Each thread of a block is a fiber. A scheduler lets the fibers of one warp run, lane by lane,
// until each waits for something; which warp, and in which order its lanes, is drawn from a seed.
// Everything asynchronous is as late or as early as it may be, also by that seed:
//
// - A bulk copy poisons its destination at once and fills it later: when a number is drawn, or when
//   no thread can run.
// - A thread's own copy poisons its destination as well, and fills it at once or only when the
//   thread waits for its group.
// - A product of the tensor cores poisons its sums at once, reads its operands now or when somebody
//   waits for its group, and gives the sums only then.
// - What a thread stored to shared memory is unfit for both until that thread's proxy fence.
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>

#include <algorithm>

#include "state.hpp"

// The callee's registers stay on the stack that is left; a new stack begins with zeros for them.
// A jump at the end: a CPU takes a `ret` to return to the last call, which was of another stack.
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
    pop %rcx
    jmp *%rcx
)");
extern "C" void emulator_switch(void** left, void* entered);
extern "C" void emulator_resume();

namespace emulator {

Thread* current;
Index grid_size, block_size;

Setting setting;
Temper temper;
std::vector<Copy> copies;
bool is_preempted;

namespace {

uint64_t random_state;
std::string failure;
void* scheduler_stack;
sigjmp_buf scheduler_end;
bool in_fiber;
volatile sig_atomic_t is_over;  // the time that a launch may take
std::vector<std::unique_ptr<Cluster>> residents;
std::vector<void*> free_stacks;
uint64_t warp_steps;
bool previous_ended;
std::vector<std::vector<unsigned char>> written_late;
Waiters waiting_for_previous;
void (*kernel)(void**);
void** kernel_arguments;

}  // namespace

Block::~Block() { free_stacks.insert(free_stacks.end(), stacks.begin(), stacks.end()); }

unsigned draw() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return unsigned(random_state >> 16);
}

bool happens(unsigned chance) { return draw() % 256 < chance; }

static void leave() {
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

// ---- errors ------------------------------------------------------------------------------------

namespace {

std::string place() {
    if (!current) return "";
    const Fiber& fiber = self();
    return name(*fiber.warp->block) + ", thread " +
           std::to_string(fiber.warp->number * 32 + fiber.lane) + ": ";
}

// Where in the kernel: addresses in its library from the inside outwards, which Python looks up.
std::string trace(const Fiber& fiber, uintptr_t code, uintptr_t frame) {
    Dl_info own, found;
    dladdr(reinterpret_cast<void*>(kernel), &own);
    const auto first = reinterpret_cast<uintptr_t>(fiber.stack), end = first + STACK_BYTES;
    std::string text = " @{";
    for (int depth = 0; depth < 16 && code; ++depth) {
        char number[32];
        if (dladdr(reinterpret_cast<void*>(code - 1), &found) && found.dli_fbase == own.dli_fbase) {
            const uintptr_t offset = code - 1 - reinterpret_cast<uintptr_t>(own.dli_fbase);
            snprintf(number, sizeof number, "%zx,", size_t(offset));
            text += number;
        }
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

}  // namespace

void fail(const char* format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (failure.empty()) {
        failure = place() + text;
        if (in_fiber)
            failure += trace(self(), reinterpret_cast<uintptr_t>(__builtin_return_address(0)),
                             *static_cast<uintptr_t*>(__builtin_frame_address(0)));
    }
    if (!in_fiber) siglongjmp(scheduler_end, 1);
    leave();  // for good
    __builtin_unreachable();
}

void pause(bool polls) {
    if (!polls && !is_preempted && !happens(temper.pause)) return;
    if (polls) self().warp->priority = draw() | 1;
    leave();
}

unsigned long long nanoseconds() { return 1000 * warp_steps; }

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
    if (!previous_ended && !is_own) fail("writes before the kernels before this one have ended");
}

// ---- blocks ------------------------------------------------------------------------------------

namespace {

void thread_main() {
    kernel(own_block().cluster->arguments);
    Fiber& fiber = self();
    Warp& warp = *fiber.warp;
    Block& block = *warp.block;
    warp.live &= ~(1u << fiber.lane);
    warp.runnable &= ~(1u << fiber.lane);
    --block.live;
    fiber.reason = {"have ended"};
    if (block.live && block.named[0].arrived) settle(block.named[0], block.live);
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

void prepare(Fiber& fiber, void* stack, unsigned thread) {
    // Stacks that began at one offset of their pages would share few lines of the CPU's caches.
    const size_t begin = STACK_BYTES - thread % 256 * 192;
    auto* top = reinterpret_cast<uint64_t*>(static_cast<char*>(stack) + begin);
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
    const unsigned bytes = shared_end() - FIRST_ADDRESS;
    block->room.resize(bytes + GUARD_BYTES + 1024);
    const auto first = reinterpret_cast<uintptr_t>(block->room.data());
    block->memory = block->room.data() + ((first + 1023) / 1024 * 1024 - first);
    memset(block->memory, GUARD, bytes + GUARD_BYTES);
    memset(block->memory, POISON, setting.shared_bytes);
    memset(block->memory + bytes - STATIC_BYTES, POISON, STATIC_BYTES);
    block->static_end = shared_end() - STATIC_BYTES;
    block->writer.resize(bytes);
    block->loads.resize(bytes);
    block->readers.resize(bytes / 16 + 1);
    const unsigned threads = block_size.x * block_size.y * block_size.z;
    block->live = threads;
    const bool is_slow = happens(temper.slow);
    block->warps.resize((threads + 31) / 32);
    for (unsigned w = 0; w < block->warps.size(); ++w) {
        Warp& warp = block->warps[w];
        warp.block = block.get();
        warp.number = w;
        warp.priority = draw() | 1;
        warp.is_slow = is_slow || happens(temper.slow);
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
            prepare(fiber, stack, thread);
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
    if (has_unawaited_stores(block)) complain("ends before its bulk stores were waited for");
    for (size_t i = copies.size(); i-- > 0;) {
        if (copies[i].block != &block) continue;
        if (copies[i].kind == Copy::LOAD)
            complain("ends while a copy into its memory is under way");
        if (failure.empty()) finish_copy(i);
    }
    for (const Warp& warp : block.warps)
        for (const Fiber& fiber : warp.fibers)
            if (!fiber.thread_copies.empty())
                complain("ends while a thread's copy into its memory is under way");
    if (!block.has_waited) complain("never waits for the kernels before this one");
    for (const Warp& warp : block.warps)
        if (!warp.products.empty()) complain("ends while a wgmma is under way");
    const unsigned bytes = shared_end() - FIRST_ADDRESS;
    for (unsigned i = bytes; i < bytes + GUARD_BYTES; ++i)
        if (block.memory[i] != GUARD) return complain("wrote beyond its shared memory");
    for (unsigned i = setting.shared_bytes; i < bytes - STATIC_BYTES; ++i)
        if (block.memory[i] != GUARD) return complain("wrote beyond its dynamic shared memory");
}

std::string words(const Reason& reason) {
    char text[256];
    if (const Barrier* barrier = reason.barrier)
        snprintf(text, sizeof text,
                 "wait at the mbarrier at %#x for parity %u (phase %u: %u of %u arrivals and %lld "
                 "bytes to come)",
                 reason.number, reason.parity, barrier->phase, barrier->pending, barrier->expected,
                 (long long)barrier->bytes);
    else if (const NamedBarrier* barrier = reason.named)
        snprintf(text, sizeof text, "wait at named barrier %u (%u of %u threads are there)",
                 reason.number, barrier->arrived, barrier->threads);
    else if (reason.lanes_in)
        snprintf(text, sizeof text, "%s %s, mask %#x", reason.what, reason.lanes_in, reason.number);
    else
        return reason.what;
    return text;
}

// Which threads wait where, those together that wait at one place for one thing.
void describe(std::string& text, const Block& block) {
    std::map<std::string, std::vector<unsigned>> threads;
    for (const Warp& warp : block.warps)
        for (const Fiber& fiber : warp.fibers) {
            const bool is_live = warp.live >> fiber.lane & 1;
            const std::string line = words(fiber.reason) + (is_live ? trace(fiber) : "");
            threads[line].push_back(warp.number * 32 + fiber.lane);
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

void give_up(std::string text) {
    for (auto& cluster : residents)
        for (auto& block : cluster->blocks) describe(text, *block);
    if (failure.empty()) failure = text;
}

// Whose turn it will be: a thousand stacks are more than the CPU's nearest cache holds.
void fetch_stack(const Warp& warp, unsigned lane) {
    const Fiber& fiber = warp.fibers[lane % 32 < warp.fibers.size() ? lane % 32 : 0];
    for (int line = 0; line < 4; ++line)
        __builtin_prefetch(static_cast<const char*>(fiber.stack_pointer) + 64 * line);
}

void run_warp(Warp& warp) {
    ++warp_steps;
    const bool is_backward = draw() & 1;
    // The lanes at the ends have the most to do alone.
    const unsigned first = draw() & 1 ? draw() % 32 : is_backward ? 31 : 0;
    const unsigned lanes = warp.runnable;
    is_preempted = false;
    for (unsigned i = 0; i < 32 && failure.empty() && !is_preempted; ++i) {
        const unsigned lane = (first + (is_backward ? 32 - i : i)) % 32;
        if (!(lanes >> lane & warp.runnable >> lane & 1)) continue;
        fetch_stack(warp, is_backward ? lane - 1 : lane + 1);
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
        --residents[i]->of->live;
        residents.erase(residents.begin() + i);
    }
}

// All clusters of a launch, the last one first.
void begin_launch(Rank& rank, unsigned num_clusters) {
    for (unsigned i = 0; i < num_clusters; ++i) rank.waiting.push_back(i);
    for (size_t i = num_clusters; i > 1; --i)
        std::swap(rank.waiting[i - 1], rank.waiting[draw() % i]);
    std::reverse(rank.waiting.begin(), rank.waiting.end());
    rank.live = num_clusters;
}

// Of any rank that has one.
void begin_cluster(std::vector<Rank>& ranks, unsigned cluster_size) {
    size_t number = ranks.size() > 1 ? draw() % ranks.size() : 0;
    while (ranks[number].waiting.empty()) number = (number + 1) % ranks.size();
    Rank& rank = ranks[number];
    const unsigned first = rank.waiting.back() * cluster_size;
    rank.waiting.pop_back();
    auto cluster = std::make_unique<Cluster>();
    cluster->of = &rank;
    const size_t launch = rank.launch * ranks.size() + number;
    cluster->arguments = kernel_arguments + launch * setting.arguments_each;
    for (unsigned i = 0; i < cluster_size; ++i) {
        const unsigned block = first + i;
        const Index index = {block % grid_size.x, block / grid_size.x % grid_size.y,
                             block / grid_size.x / grid_size.y};
        cluster->blocks.push_back(make_block(index, i, cluster_size, cluster.get()));
    }
    residents.push_back(std::move(cluster));
}

void run(unsigned cluster_size) {
    const unsigned num_clusters = grid_size.x * grid_size.y * grid_size.z / cluster_size;
    std::vector<Rank> ranks(setting.ranks);
    for (Rank& rank : ranks) begin_launch(rank, num_clusters);
    if (sigsetjmp(scheduler_end, 1)) return;
    while (failure.empty()) {
        size_t num_waiting = 0;
        for (Rank& rank : ranks) {
            if (rank.live == 0 && ++rank.launch < setting.launches)
                begin_launch(rank, num_clusters);
            num_waiting += rank.waiting.size();
        }
        while (residents.size() < setting.resident && num_waiting) {
            begin_cluster(ranks, cluster_size);
            --num_waiting;
        }
        if (residents.empty()) return;
        if (!copies.empty() && happens(temper.complete)) finish_copy(draw() % copies.size());
        if (!previous_ended && happens(temper.complete / 8)) end_previous();
        if (Warp* warp = choose()) {
            run_warp(*warp);
            if (warp->live == 0) retire();
        } else if (!copies.empty()) {
            finish_copy(draw() % copies.size());
        } else if (!previous_ended) {
            end_previous();
        } else {
            give_up("deadlock");
        }
        if (is_over) give_up("no end in sight");
    }
}

// ---- what Python calls --------------------------------------------------------------------------

// A thread that does what it must not is left where it is, and so is one that nothing else ends.
void on_signal(int signal, siginfo_t* info, void* context) {
    const bool is_first = !is_over;
    if (signal == SIGVTALRM) is_over = true;
    if (signal == SIGVTALRM && (is_first || !in_fiber)) return;  // the scheduler sees it
    if (!current) {
        ::signal(signal, SIG_DFL);
        return;
    }
    char text[128] = "divides by zero";
    if (signal == SIGVTALRM) snprintf(text, sizeof text, "no end in sight");
    if (signal == SIGSEGV || signal == SIGBUS)
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
    forget_copies();
    static unsigned char signal_stack[64 * 1024];
    stack_t own_stack{signal_stack, 0, sizeof signal_stack}, other_stack;
    sigaltstack(&own_stack, &other_stack);
    constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGVTALRM};
    struct sigaction action = {}, others[4];
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &action, &others[i]);
    is_over = false;
    const itimerval patience = {{1, 0}, {setting.seconds, 0}}, none = {};
    setitimer(ITIMER_VIRTUAL, &patience, nullptr);
    begin_previous();
    run(cluster_size);
    end_previous();
    setitimer(ITIMER_VIRTUAL, &none, nullptr);
    for (int i = 0; i < 4; ++i) sigaction(SIGNALS[i], &others[i], nullptr);
    sigaltstack(&other_stack, nullptr);
    current = nullptr;
    residents.clear();
    forget_copies();
    return failure.empty() ? nullptr : failure.c_str();
}

}  // namespace emulator
