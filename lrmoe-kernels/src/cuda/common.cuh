// What every kernel uses. Blocks are one-dimensional, of THREADS threads; parameters are one struct of 64-bit fields, given by value.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef unsigned short u16;

constexpr u32 THREADS = 256;
constexpr u32 LANES = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

// Number of this thread, and of its warp, among all of the launch.
__device__ __forceinline__ u64 thread_number() {
    return u64(blockIdx.x) * THREADS + threadIdx.x;
}

__device__ __forceinline__ u64 warp_number() {
    return thread_number() / LANES;
}

__device__ __forceinline__ u32 lane() {
    return threadIdx.x % LANES;
}

// Where an element of a matrix of this width lies: past 2^32 elements, too.
__device__ __forceinline__ u64 place(u64 row, u64 width, u64 column) {
    return row * width + column;
}

// Whether rows of so many 4-byte elements all begin at multiples of 16 bytes, as buffers do.
__device__ __forceinline__ bool in_fours(u64 width) {
    return width % 4 == 0;
}

__device__ __forceinline__ u32 largest_of_warp(u32 value) {
    for (u32 distance = LANES / 2; distance > 0; distance /= 2) {
        value = max(value, __shfl_xor_sync(ALL_LANES, value, distance));
    }
    return value;
}
