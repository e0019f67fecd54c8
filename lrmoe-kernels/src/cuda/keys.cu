// Selection keys from scores; see lrmoe-metric.

struct KeyParameters {
    // [pairs]
    const i32* ids;
    const float* scores;
    u32* keys;
    // Largest complement of the local id of a pair with a bad score; 0 if there is none.
    u32* bad;
    u64 pairs;
    // Global id of the first pair.
    u64 first_pair;
    u64 method;
    u64 seed;
    u64 step;
    u64 layer;
};

constexpr u32 BY_SCORE = 0;
constexpr u32 BY_PRIORITY = 1;

// Word 0 of Philox4x32-10.
__device__ __forceinline__ u32 philox(uint4 counter, uint2 key) {
    for (u32 round = 0; round < 10; round += 1) {
        const u32 left = __umulhi(counter.x, 0xd2511f53u);
        const u32 right = __umulhi(counter.z, 0xcd9e8d57u);
        counter = make_uint4(
            right ^ counter.y ^ key.x,
            counter.z * 0xcd9e8d57u,
            left ^ counter.w ^ key.y,
            counter.x * 0xd2511f53u
        );
        key.x += 0x9e3779b9u;
        key.y += 0xbb67ae85u;
    }
    return counter.x;
}

__device__ __forceinline__ u32 random_bits(const KeyParameters& p, u64 pair) {
    const u64 global = p.first_pair + pair;
    const uint4 counter = make_uint4(u32(global), u32(global >> 32), u32(p.step), u32(p.layer));
    return philox(counter, make_uint2(u32(p.seed), u32(p.seed >> 32)));
}

// 1/u for u = (bits / 2^8 + 1) / 2^24, by integer arithmetic.
__device__ __forceinline__ float reciprocal(u32 bits) {
    const u32 v = (bits >> 8) + 1;
    const u32 shift = __clz(v);
    const u32 m = (v << shift) >> 16;
    // Below 2^16, so it is an f32 without rounding.
    const u32 quotient = 0xffffffffu / (2 * m + 1);
    return __fmul_rn(float(quotient), __uint_as_float((127 - 23 + shift) << 23));
}

extern "C" {

// Keys of a method from squared scores.
__global__ void __launch_bounds__(THREADS) method_keys(const KeyParameters p) {
    const u64 pair = thread_number();
    if (pair >= p.pairs) {
        return;
    }
    u32 key;
    if (p.method == BY_SCORE) {
        key = __float_as_uint(p.scores[pair]);
    } else if (p.method == BY_PRIORITY) {
        const float factor = reciprocal(random_bits(p, pair));
        key = __float_as_uint(product(p.scores[pair], __fmul_rn(factor, factor)));
    } else {
        key = random_bits(p, pair) >> 2;
    }
    p.keys[pair] = key;
}

// Keys of a caller's scores: their bits, with subnormals and -0 as +0; 0 where masked.
__global__ void __launch_bounds__(THREADS) score_keys(const KeyParameters p) {
    const u64 pair = thread_number();
    u32 bad = 0;
    if (pair < p.pairs) {
        const u32 bits = __float_as_uint(p.scores[pair]);
        const bool masked = p.ids[pair] < 0;
        const bool good = masked || bits <= INFINITE || bits == 0x80000000u;
        bad = good ? 0 : ~u32(pair);
        // Negative numbers have larger bits than infinity.
        const bool counts = !masked && bits >= 0x00800000u && bits <= INFINITE;
        p.keys[pair] = counts ? bits : 0;
    }
    bad = largest_of_warp(bad);
    if (lane() == 0 && bad > 0) {
        atomicMax(p.bad, bad);
    }
}

}
