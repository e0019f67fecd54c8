// Runs the kernels on the CPU: see device.h.

#include "device.h"

#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif
#include <ucontext.h>
#include <unistd.h>

#include "kernels.h"
#include "memory.h"

namespace emu {

enum class State { READY, AT_BARRIER, IN_EXCHANGE, ENDED };

constexpr size_t STACK = 64 << 10;

// A stack, and what AddressSanitizer keeps of it while another is in use.
struct Stack {
    const void* bottom = nullptr;
    size_t bytes = 0;
    void* kept = nullptr;
};

// AddressSanitizer has to know which stack is in use: `leave` right before another is, `arrive` right after.
#ifdef __SANITIZE_ADDRESS__
void leave(Stack& from, const Stack& to) {
    __sanitizer_start_switch_fiber(&from.kept, to.bottom, to.bytes);
}

void arrive(Stack& at, Stack* before) {
    const void* bottom;
    size_t bytes;
    __sanitizer_finish_switch_fiber(at.kept, &bottom, &bytes);
    if (before) {
        before->bottom = bottom;
        before->bytes = bytes;
    }
}
#else
void leave(Stack&, const Stack&) {}
void arrive(Stack&, Stack*) {}
#endif

struct Fiber {
    Self self;
    State state;
    int place;
    unsigned mask;
    uint64_t value;
    sigjmp_buf context;
    std::unique_ptr<char[]> memory;
    Stack stack;
};

// The fibers of a thread of the host, one for each thread of a block; they are used again for every block.
struct Block {
    std::vector<Fiber> fibers;
    Fiber* running = nullptr;
    sigjmp_buf scheduler;
    // Of the thread of the host.
    Stack stack;
    const Kernel* kernel = nullptr;
    const void* parameters = nullptr;

    bool run(unsigned number, bool reversed, std::string& reason);
    void step(Fiber& fiber);
    bool release_exchanges();
    bool release_barrier();
    std::string stuck() const;
};

thread_local Self* self;
thread_local Block block;

// Contexts are made by ucontext and switched by setjmp, which calls no kernel of the operating system.
void wait() {
    if (_setjmp(block.running->context) == 0) {
        leave(block.running->stack, block.stack);
        _longjmp(block.scheduler, 1);
    }
    arrive(block.running->stack, nullptr);
}

void fiber_main() {
    arrive(block.running->stack, &block.stack);
    for (;;) {
        wait();
        block.kernel->run(block.parameters);
        block.running->state = State::ENDED;
    }
}

void Block::step(Fiber& fiber) {
    running = &fiber;
    self = &fiber.self;
    if (_setjmp(scheduler) == 0) {
        leave(stack, fiber.stack);
        _longjmp(fiber.context, 1);
    }
    arrive(stack, nullptr);
}

// Makes fibers, and lets each go to where it waits for a kernel.
void make_fibers() {
    block.fibers = std::vector<Fiber>(THREADS);
    for (Fiber& fiber : block.fibers) {
        fiber.memory.reset(new char[STACK]);
        fiber.stack = {fiber.memory.get(), STACK, nullptr};
        ucontext_t context;
        getcontext(&context);
        context.uc_stack.ss_sp = fiber.memory.get();
        context.uc_stack.ss_size = STACK;
        context.uc_link = nullptr;
        makecontext(&context, fiber_main, 0);
        block.running = &fiber;
        if (_setjmp(block.scheduler) == 0) {
            leave(block.stack, fiber.stack);
            setcontext(&context);
        }
        arrive(block.stack, nullptr);
    }
}

void barrier(int place) {
    Fiber& fiber = *block.running;
    fiber.state = State::AT_BARRIER;
    fiber.place = place;
    wait();
}

void exchange(int place, unsigned mask, uint64_t value) {
    Fiber& fiber = *block.running;
    fiber.state = State::IN_EXCHANGE;
    fiber.place = place;
    fiber.mask = mask;
    fiber.value = value;
    wait();
}

// Whether any exchange had all of its lanes.
bool Block::release_exchanges() {
    bool any = false;
    for (size_t warp = 0; warp < fibers.size(); warp += LANES) {
        for (unsigned lane = 0; lane < LANES; lane += 1) {
            const Fiber& first = fibers[warp + lane];
            if (first.state != State::IN_EXCHANGE || !(first.mask >> lane & 1)) {
                continue;
            }
            const unsigned mask = first.mask;
            const int place = first.place;
            bool complete = true;
            for (unsigned other = 0; other < LANES; other += 1) {
                const Fiber& fiber = fibers[warp + other];
                const bool there = fiber.state == State::IN_EXCHANGE && fiber.mask == mask && fiber.place == place;
                complete &= there || !(mask >> other & 1);
            }
            if (!complete) {
                continue;
            }
            for (unsigned to = 0; to < LANES; to += 1) {
                if (mask >> to & 1) {
                    for (unsigned from = 0; from < LANES; from += 1) {
                        // What is not of the mask is not to be relied on.
                        fibers[warp + to].self.given[from] = mask >> from & 1 ? fibers[warp + from].value : 0xdeadbeefdeadbeef;
                    }
                    fibers[warp + to].state = State::READY;
                }
            }
            any = true;
        }
    }
    return any;
}

bool Block::release_barrier() {
    for (const Fiber& fiber : fibers) {
        if (fiber.state != State::AT_BARRIER || fiber.place != fibers[0].place) {
            return false;
        }
    }
    for (Fiber& fiber : fibers) {
        fiber.state = State::READY;
    }
    return true;
}

// Who waits for what, by the first two threads that do not agree.
std::string Block::stuck() const {
    const auto say = [](const Fiber& fiber) {
        const std::string thread = "thread " + std::to_string(fiber.self.thread.x);
        const std::string line = " of line " + std::to_string(fiber.place);
        switch (fiber.state) {
            case State::AT_BARRIER: return thread + " is at the barrier" + line;
            case State::IN_EXCHANGE: return thread + " is in the exchange" + line;
            default: return thread + " has ended";
        }
    };
    const Fiber* waiting = nullptr;
    for (const Fiber& fiber : fibers) {
        if (!waiting && fiber.state != State::ENDED) {
            waiting = &fiber;
        }
    }
    for (const Fiber& fiber : fibers) {
        if (fiber.state != waiting->state || fiber.place != waiting->place) {
            return say(*waiting) + ", " + say(fiber);
        }
    }
    return say(*waiting) + " with a mask of lanes that others do not have";
}

// Runs a block of the kernel; whether it ended.
bool Block::run(unsigned number, bool reversed, std::string& reason) {
    for (unsigned thread = 0; thread < fibers.size(); thread += 1) {
        fibers[thread].self.thread.x = thread;
        fibers[thread].self.block.x = number;
        fibers[thread].state = State::READY;
    }
    for (;;) {
        bool ended = true;
        for (size_t i = 0; i < fibers.size(); i += 1) {
            Fiber& fiber = fibers[reversed ? fibers.size() - 1 - i : i];
            if (fiber.state == State::READY) {
                step(fiber);
            }
            ended &= fiber.state == State::ENDED;
        }
        if (ended) {
            return true;
        }
        // The order of threads is nothing to rely on.
        reversed = !reversed;
        if (!release_exchanges() && !release_barrier()) {
            reason = "divergence in block " + std::to_string(number) + ": " + stuck();
            return false;
        }
    }
}

#ifdef __SANITIZE_ADDRESS__
// AddressSanitizer has handlers of its own.
struct FaultHandlers {};
#else
// Ends the program with a message that names the thread, as a card would end the context.
void on_fault(int signal) {
    char message[256];
    int length = 0;
    if (self) {
        length = snprintf(
            message,
            sizeof message,
            "cuda-emu: %s in kernel %s, block %u, thread %u\n",
            signal == SIGSEGV || signal == SIGBUS ? "access out of bounds" : "access that is not aligned",
            block.kernel->name,
            self->block.x,
            self->thread.x
        );
    }
    if (length > 0 && write(STDERR_FILENO, message, size_t(length)) < 0) {
        _exit(134);
    }
    std::signal(signal, SIG_DFL);
}

// Where there is no block, faults are those of the program, which keeps its handlers.
struct FaultHandlers {
    FaultHandlers() {
        struct sigaction action = {};
        action.sa_handler = on_fault;
        action.sa_flags = SA_ONSTACK | SA_NODEFER;
        for (const int signal : {SIGSEGV, SIGBUS, SIGILL}) {
            sigaction(signal, &action, nullptr);
        }
    }
};
#endif

}

extern "C" {

// Memory that begins at a multiple of 16 bytes, before and after which accesses are found out; null if there is none.
void* lrmoe_emu_allocate(size_t bytes) {
    void* memory = emu::allocate(bytes);
    // Nothing may rely on new memory being zero. What is huge stays unmapped until it is used.
    if (memory && bytes < size_t(1) << 28) {
        std::memset(memory, 0xcb, bytes);
    }
    return memory;
}

void lrmoe_emu_free(void* memory, size_t bytes) {
    emu::release(memory, bytes);
}

// Runs all blocks of a kernel. Not 0 if that fails, with the reason as a string.
int lrmoe_emu_launch(const char* name, unsigned blocks, const void* parameters, size_t bytes, char* reason, size_t reason_bytes) {
    [[maybe_unused]] static const emu::FaultHandlers handlers;
    const auto fail = [&](const std::string& why) {
        snprintf(reason, reason_bytes, "%s", why.c_str());
        return 1;
    };
    emu::block.kernel = nullptr;
    for (const emu::Kernel& kernel : emu::KERNELS) {
        if (std::strcmp(kernel.name, name) == 0) {
            emu::block.kernel = &kernel;
        }
    }
    if (!emu::block.kernel) {
        return fail("there is no such kernel");
    }
    if (emu::block.kernel->parameter_bytes != bytes) {
        return fail("the kernel takes " + std::to_string(emu::block.kernel->parameter_bytes) + " bytes of parameters, not " + std::to_string(bytes));
    }
    emu::block.parameters = parameters;
    if (emu::block.fibers.empty()) {
        emu::make_fibers();
    }
    std::string why;
    for (unsigned number = 0; number < blocks; number += 1) {
        if (!emu::block.run(number, number % 2 == 1, why)) {
            // The fibers are in the middle of the kernel.
            emu::block.fibers.clear();
            emu::self = nullptr;
            return fail(why);
        }
    }
    emu::self = nullptr;
    return 0;
}

}
