// As much of CUDA C++ as the kernels use, for a C++ compiler. A block runs alone, its threads as fibers of one thread of the host: each goes on
// until it waits for others, at a barrier of the block or in an exchange between lanes of a warp.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
// Kernels are in extern "C" for their names, which are no symbols here.
#define __global__ static
#ifdef __SANITIZE_ADDRESS__
// AddressSanitizer guards no variables of threads; then one thread of the host runs kernels.
#define __shared__ static
#else
#define __shared__ static thread_local
#endif
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emu {

constexpr unsigned LANES = 32;

struct Index { unsigned x; };

// What a thread of a kernel sees of itself.
struct Self {
    Index thread;
    Index block;
    // What the lanes of its warp gave in the exchange that ended last.
    uint64_t given[LANES];
};

extern thread_local Self* self;

// Wait for all threads of the block, or for the lanes of a mask; `place` names the statement, which must be the same for all.
void barrier(int place);
void exchange(int place, unsigned mask, uint64_t value);

template <class T>
uint64_t word(T value) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof(T));
    return word;
}

// The value of a lane in the exchange that ended last; lanes must be of its mask, as those of others hold nothing.
template <class T>
T given(unsigned lane) {
    T value;
    std::memcpy(&value, &self->given[lane], sizeof(T));
    return value;
}

inline unsigned lane() {
    return self->thread.x % LANES;
}

template <class T>
T shuffle_up(int place, unsigned mask, T value, unsigned distance) {
    exchange(place, mask, word(value));
    return given<T>(lane() >= distance ? lane() - distance : lane());
}

template <class T>
T shuffle_down(int place, unsigned mask, T value, unsigned distance, unsigned width = LANES) {
    exchange(place, mask, word(value));
    return given<T>(lane() % width + distance < width ? lane() + distance : lane());
}

template <class T>
T shuffle_xor(int place, unsigned mask, T value, unsigned distance) {
    exchange(place, mask, word(value));
    return given<T>(lane() ^ distance);
}

template <class T>
unsigned match_any(int place, unsigned mask, T value) {
    exchange(place, mask, word(value));
    unsigned peers = 0;
    for (unsigned other = 0; other < LANES; other += 1) {
        const bool equal = mask >> other & 1 && self->given[other] == word(value);
        peers |= unsigned(equal) << other;
    }
    return peers;
}

}

#define threadIdx (emu::self->thread)
#define blockIdx (emu::self->block)
#define __syncthreads() emu::barrier(__LINE__)
#define __shfl_up_sync(...) emu::shuffle_up(__LINE__, __VA_ARGS__)
#define __shfl_down_sync(...) emu::shuffle_down(__LINE__, __VA_ARGS__)
#define __shfl_xor_sync(...) emu::shuffle_xor(__LINE__, __VA_ARGS__)
#define __match_any_sync(...) emu::match_any(__LINE__, __VA_ARGS__)

inline unsigned __float_as_uint(float x) { return unsigned(emu::word(x)); }
inline float __uint_as_float(unsigned x) { float f; std::memcpy(&f, &x, sizeof f); return f; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

using std::max;
using std::min;

inline float bf16(unsigned bits) { return __uint_as_float(bits << 16); }

// d += a b by the fragments of mma.cuh: exact products, and sums of 16 and d rounded once. A card rounds in ways of its own.
inline void mma_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    // Words of all lanes: a0 and a1, a2 and a3, b0 and b1.
    unsigned words[3][emu::LANES][2];
    const unsigned own[3][2] = {{a[0], a[1]}, {a[2], a[3]}, {b[0], b[1]}};
    for (unsigned part = 0; part < 3; part += 1) {
        emu::exchange(__LINE__, ~0u, uint64_t(own[part][1]) << 32 | own[part][0]);
        std::memcpy(words[part], emu::self->given, sizeof words[part]);
    }
    for (unsigned e = 0; e < 4; e += 1) {
        const unsigned row = emu::lane() / 4 + e / 2 * 8;
        const unsigned column = emu::lane() % 4 * 2 + e % 2;
        double sum = d[e];
        for (unsigned k = 0; k < 16; k += 1) {
            const unsigned shift = k % 2 * 16;
            const unsigned left = words[k / 8][row % 8 * 4 + k % 8 / 2][row / 8];
            const unsigned right = words[2][column * 4 + k % 8 / 2][k / 8];
            sum += double(bf16(left >> shift & 0xffff)) * bf16(right >> shift & 0xffff);
        }
        d[e] = float(sum);
    }
}

// Fibers of a block take turns, and blocks run one after the other.
inline unsigned atomicAdd(unsigned* at, unsigned value) { const unsigned old = *at; *at += value; return old; }
inline unsigned atomicMax(unsigned* at, unsigned value) { const unsigned old = *at; *at = max(old, value); return old; }
