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

// bf16 is the upper half of an f32, and u16 in sources.
__device__ __forceinline__ float widened(u32 bits) {
    return __uint_as_float(bits << 16);
}

// Rounded to nearest even; a NaN stays one.
__device__ __forceinline__ u32 narrowed(float value) {
    const u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return bits >> 16 | 0x40;
    }
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Elements that 16 bytes hold.
template <class T>
constexpr u32 PIECE = 16 / sizeof(T);

// N elements as f32, where they are more than one from a multiple of 16 bytes on.
template <u32 N>
__device__ __forceinline__ void load(const float* from, float (&values)[N]) {
    if constexpr (N == 1) {
        values[0] = *from;
    } else {
        #pragma unroll
        for (u32 i = 0; i + 4 <= N; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + i);
            values[i] = four.x;
            values[i + 1] = four.y;
            values[i + 2] = four.z;
            values[i + 3] = four.w;
        }
    }
}

template <u32 N>
__device__ __forceinline__ void load(const u16* from, float (&values)[N]) {
    if constexpr (N == 1) {
        values[0] = widened(*from);
    } else {
        #pragma unroll
        for (u32 i = 0; i + 8 <= N; i += 8) {
            const uint4 eight = *reinterpret_cast<const uint4*>(from + i);
            const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
            #pragma unroll
            for (u32 j = 0; j < 4; j += 1) {
                values[i + 2 * j] = widened(words[j]);
                values[i + 2 * j + 1] = __uint_as_float(words[j] & 0xffff0000u);
            }
        }
    }
}

template <u32 N>
__device__ __forceinline__ void store(float* to, const float (&values)[N]) {
    if constexpr (N == 1) {
        *to = values[0];
    } else {
        #pragma unroll
        for (u32 i = 0; i + 4 <= N; i += 4) {
            *reinterpret_cast<float4*>(to + i) = make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
        }
    }
}

template <u32 N>
__device__ __forceinline__ void store(u16* to, const float (&values)[N]) {
    if constexpr (N == 1) {
        *to = u16(narrowed(values[0]));
    } else {
        #pragma unroll
        for (u32 i = 0; i + 8 <= N; i += 8) {
            u32 words[4];
            #pragma unroll
            for (u32 j = 0; j < 4; j += 1) {
                words[j] = narrowed(values[i + 2 * j]) | narrowed(values[i + 2 * j + 1]) << 16;
            }
            *reinterpret_cast<uint4*>(to + i) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

__device__ __forceinline__ u32 largest_of_warp(u32 value) {
    for (u32 distance = LANES / 2; distance > 0; distance /= 2) {
        value = max(value, __shfl_xor_sync(ALL_LANES, value, distance));
    }
    return value;
}
