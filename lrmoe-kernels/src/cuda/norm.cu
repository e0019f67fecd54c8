// Squared norms of rows, in the order that lrmoe-metric defines: lane l of 32 takes elements l, l + 32, ... in turn, then lanes are added
// pairwise at distance 16, 8, 4, 2, 1. A thread holds the sums of lanes whose elements are neighbours and come in one load of 16 bytes: 4 of f32,
// of which 8 threads have a row, or 8 of bf16, of which 4 have one. A warp reads 4 rows or 8, 128 or 64 bytes of each at a time.

struct NormParameters {
    // f32 or bf16.
    const void* rows;
    // (significand, scale) of each row.
    uint2* norms;
    u64 count;
    u64 width;
};

// The square of x * power, 0 for magnitudes below `least`.
__device__ __forceinline__ float square(float x, float power, u32 least) {
    const float scaled = magnitude(x) < least ? 0.0f : __fmul_rn(x, power);
    return __fmul_rn(scaled, scaled);
}

// Neighbours from the i-th element of a row on, 0 past its end.
template <u32 N, class T>
__device__ __forceinline__ void some(const T* row, u64 i, u64 width, bool aligned, float (&values)[N]) {
    if (aligned) {
        load(row + i, values);
        return;
    }
    #pragma unroll
    for (u32 j = 0; j < N; j += 1) {
        values[j] = 0.0f;
        if (i + j < width) {
            float value[1];
            load(row + i + j, value);
            values[j] = value[0];
        }
    }
}

template <class T>
__device__ __forceinline__ void norms_of_rows(const NormParameters& p) {
    constexpr u32 N = PIECE<T>;
    constexpr u32 THREADS_OF_ROW = LANES / N;
    const u64 number = thread_number() / THREADS_OF_ROW;
    const u32 part = threadIdx.x % THREADS_OF_ROW;
    // Rows past the last have no elements.
    const u64 width = number < p.count ? p.width : 0;
    const T* row = static_cast<const T*>(p.rows) + place(number, width, 0);
    const bool aligned = width % N == 0;

    u32 top = 0;
    for (u64 i = N * part; i < width; i += LANES) {
        float x[N];
        some(row, i, width, aligned, x);
        #pragma unroll
        for (u32 j = 0; j < N; j += 1) {
            top = max(top, magnitude(x[j]));
        }
    }
    for (u32 distance = THREADS_OF_ROW / 2; distance > 0; distance /= 2) {
        top = max(top, __shfl_xor_sync(ALL_LANES, top, distance));
    }
    const u32 scale = top >> 23;

    float sums[N] = {};
    if (scale > 0 && scale < NOT_FINITE) {
        const float power = __uint_as_float((255 - scale) << 23);
        const u32 least = (max(scale, 64u) - 63) << 23;
        for (u64 i = N * part; i < width; i += LANES) {
            float x[N];
            some(row, i, width, aligned, x);
            #pragma unroll
            for (u32 j = 0; j < N; j += 1) {
                sums[j] = __fadd_rn(sums[j], square(x[j], power, least));
            }
        }
    }
    // First lanes of other threads, then those of this one.
    for (u32 distance = THREADS_OF_ROW / 2; distance > 0; distance /= 2) {
        #pragma unroll
        for (u32 j = 0; j < N; j += 1) {
            sums[j] = __fadd_rn(sums[j], __shfl_down_sync(ALL_LANES, sums[j], distance, THREADS_OF_ROW));
        }
    }
    #pragma unroll
    for (u32 distance = N / 2; distance > 0; distance /= 2) {
        #pragma unroll
        for (u32 j = 0; j < distance; j += 1) {
            sums[j] = __fadd_rn(sums[j], sums[j + distance]);
        }
    }
    if (part == 0 && number < p.count) {
        u32 significand = __float_as_uint(sums[0]);
        if (scale == NOT_FINITE) {
            significand = top > INFINITE ? NOT_A_NUMBER : INFINITE;
        }
        p.norms[number] = make_uint2(significand, scale);
    }
}

extern "C" {

__global__ void __launch_bounds__(THREADS) squared_norms(const NormParameters p) {
    norms_of_rows<float>(p);
}

__global__ void __launch_bounds__(THREADS) squared_norms_bf16(const NormParameters p) {
    norms_of_rows<u16>(p);
}

}
