// Squared norms of rows, in the order that lrmoe-metric defines: lane l of 32 takes elements l, l + 32, ... in turn, then lanes are added
// pairwise at distance 16, 8, 4, 2, 1. Eight threads have a row: thread a holds the sums of lanes 4a to 4a + 3, whose elements are neighbours
// and come in one load of 16 bytes; a warp reads whole lines of four rows.

struct NormParameters {
    const float* rows;
    // (significand, scale) of each row.
    uint2* norms;
    u64 count;
    u64 width;
};

constexpr u32 THREADS_OF_ROW = 8;

// Elements i to i + 3 of a row, 0 past its end.
__device__ __forceinline__ float4 four_of(const float* row, u64 i, u64 width, bool fours) {
    if (fours) {
        return *reinterpret_cast<const float4*>(row + i);
    }
    return make_float4(
        row[i],
        i + 1 < width ? row[i + 1] : 0.0f,
        i + 2 < width ? row[i + 2] : 0.0f,
        i + 3 < width ? row[i + 3] : 0.0f
    );
}

// The square of x * power, 0 for magnitudes below `least`.
__device__ __forceinline__ float square(float x, float power, u32 least) {
    const float scaled = magnitude(x) < least ? 0.0f : __fmul_rn(x, power);
    return __fmul_rn(scaled, scaled);
}

extern "C" {

__global__ void __launch_bounds__(THREADS) squared_norms(const NormParameters p) {
    const u64 number = thread_number() / THREADS_OF_ROW;
    const u32 part = threadIdx.x % THREADS_OF_ROW;
    // Rows past the last have no elements.
    const u64 width = number < p.count ? p.width : 0;
    const float* row = p.rows + place(number, width, 0);
    const bool fours = in_fours(width);

    u32 top = 0;
    for (u64 i = 4 * part; i < width; i += LANES) {
        const float4 x = four_of(row, i, width, fours);
        top = max(max(top, magnitude(x.x)), max(magnitude(x.y), max(magnitude(x.z), magnitude(x.w))));
    }
    for (u32 distance = THREADS_OF_ROW / 2; distance > 0; distance /= 2) {
        top = max(top, __shfl_xor_sync(ALL_LANES, top, distance));
    }
    const u32 scale = top >> 23;

    float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (scale > 0 && scale < NOT_FINITE) {
        const float power = __uint_as_float((255 - scale) << 23);
        const u32 least = (max(scale, 64u) - 63) << 23;
        for (u64 i = 4 * part; i < width; i += LANES) {
            const float4 x = four_of(row, i, width, fours);
            sums.x = __fadd_rn(sums.x, square(x.x, power, least));
            sums.y = __fadd_rn(sums.y, square(x.y, power, least));
            sums.z = __fadd_rn(sums.z, square(x.z, power, least));
            sums.w = __fadd_rn(sums.w, square(x.w, power, least));
        }
    }
    // Lanes at distance 16, 8 and 4 are those of the threads at 4, 2 and 1.
    for (u32 distance = THREADS_OF_ROW / 2; distance > 0; distance /= 2) {
        sums.x = __fadd_rn(sums.x, __shfl_down_sync(ALL_LANES, sums.x, distance, THREADS_OF_ROW));
        sums.y = __fadd_rn(sums.y, __shfl_down_sync(ALL_LANES, sums.y, distance, THREADS_OF_ROW));
        sums.z = __fadd_rn(sums.z, __shfl_down_sync(ALL_LANES, sums.z, distance, THREADS_OF_ROW));
        sums.w = __fadd_rn(sums.w, __shfl_down_sync(ALL_LANES, sums.w, distance, THREADS_OF_ROW));
    }
    const float sum = __fadd_rn(__fadd_rn(sums.x, sums.z), __fadd_rn(sums.y, sums.w));
    if (part == 0 && number < p.count) {
        u32 significand = __float_as_uint(sum);
        if (scale == NOT_FINITE) {
            significand = top > INFINITE ? NOT_A_NUMBER : INFINITE;
        }
        p.norms[number] = make_uint2(significand, scale);
    }
}

}
