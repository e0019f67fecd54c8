// Memory before and after which accesses are found out.

#pragma once

#include <cstddef>
#include <cstdlib>

#include <sys/mman.h>
#include <unistd.h>

namespace emu {

#ifdef __SANITIZE_ADDRESS__
// AddressSanitizer guards what it allocates.
inline void* allocate(size_t bytes) {
    return std::malloc(bytes);
}

inline void release(void* memory, size_t) {
    std::free(memory);
}
#else
inline size_t page() {
    return size_t(sysconf(_SC_PAGESIZE));
}

// A page that may not be touched, whole pages, and another such page.
inline size_t mapped(size_t bytes) {
    return (bytes + page() - 1) / page() * page() + 2 * page();
}

// Memory that ends where a page begins that may not be touched, but for rounding up to 16 bytes; null if there is none.
inline void* allocate(size_t bytes) {
    const size_t all = mapped(bytes);
    void* at = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) {
        return nullptr;
    }
    char* inner = static_cast<char*>(at) + page();
    if (mprotect(inner, all - 2 * page(), PROT_READ | PROT_WRITE) != 0) {
        munmap(at, all);
        return nullptr;
    }
    return inner + (all - 2 * page() - (bytes + 15) / 16 * 16);
}

inline void release(void* memory, size_t bytes) {
    const size_t all = mapped(bytes);
    char* inner = static_cast<char*>(memory) + (bytes + 15) / 16 * 16 - (all - 2 * page());
    munmap(inner - page(), all);
}
#endif

}
