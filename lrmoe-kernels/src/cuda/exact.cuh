// Arithmetic on the way to a key: rounded as IEEE 754 asks, without contraction, subnormals mapped to zero by integer tests.

constexpr u32 MAGNITUDE = 0x7fffffffu;
constexpr u32 INFINITE = 0x7f800000u;
constexpr u32 NOT_A_NUMBER = 0x7fc00000u;
constexpr u32 LARGEST = 0x7f7fffffu;
// Exponent field of infinities and NaNs.
constexpr u32 NOT_FINITE = 255;
// 2^-125; products below count as zero.
constexpr u32 LEAST = 0x01000000u;

__device__ __forceinline__ u32 magnitude(float x) {
    return __float_as_uint(x) & MAGNITUDE;
}

// a * b of values that are not negative: 0 below 2^-125, and infinite only if one of them is.
__device__ __forceinline__ float product(float a, float b) {
    const float product = __fmul_rn(a, b);
    if (__float_as_uint(product) < LEAST) {
        return 0.0f;
    }
    if (__float_as_uint(product) == INFINITE && magnitude(a) < INFINITE && magnitude(b) < INFINITE) {
        return __uint_as_float(LARGEST);
    }
    return product;
}
