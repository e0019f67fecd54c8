// Scores of pairs from squared norms; see lrmoe-metric.

struct ScoreParameters {
    // [pairs]
    const i32* ids;
    const float* gates;
    // (significand, scale) of each token, and of each row; none where the score has no such factor.
    const uint2* dy;
    const uint2* rows;
    // Largest complement of the local id of a pair whose score is NaN, 0 if there is none; largest scales of finite norms of dy and of rows.
    u32* found;
    float* squared;
    u64 pairs;
    u64 top_k;
    // Pairs that share a row.
    u64 pairs_of_row;
    // Whether the gate weight is a factor.
    u64 uses_gate;
    u64 dy_scale;
    u64 rows_scale;
};

// 2^-62; gate weights below count as zero.
constexpr u32 LEAST_GATE = 0x20800000u;

// Stands for a factor that is left out: 4, scaled by 1.
__device__ __forceinline__ uint2 norm_of(const uint2* norms, u64 at) {
    return norms ? norms[at] : make_uint2(0x40800000u, 1);
}

__device__ __forceinline__ float gate_of(const ScoreParameters& p, u64 pair) {
    if (!p.uses_gate) {
        return 1.0f;
    }
    const float gate = p.gates[pair];
    return magnitude(gate) < LEAST_GATE ? 0.0f : gate;
}

// 0, 1, infinity or NaN: what a factor does to the kind of a product.
__device__ __forceinline__ float kind_of_gate(float gate) {
    if (gate == 0.0f) {
        return 0.0f;
    }
    return magnitude(gate) < INFINITE ? 1.0f : __fmul_rn(gate, gate);
}

__device__ __forceinline__ float kind_of_norm(uint2 norm) {
    if (norm.y == NOT_FINITE) {
        return __uint_as_float(norm.x);
    }
    return norm.y == 0 ? 0.0f : 1.0f;
}

// The squared norm times 4^(128 - layer_scale), 0 below 2^-125.
__device__ __forceinline__ float relative(uint2 norm, u32 layer_scale) {
    if (norm.y == NOT_FINITE) {
        return __uint_as_float(norm.x);
    }
    const u32 shift = 2 * (max(layer_scale, norm.y) - norm.y);
    if (norm.x >> 23 < shift + 2) {
        return 0.0f;
    }
    return __uint_as_float(norm.x - (shift << 23));
}

extern "C" {

// Finds the first pair whose score is NaN, and the largest scales of finite norms in use.
__global__ void __launch_bounds__(THREADS) scan_factors(const ScoreParameters p) {
    const u64 pair = thread_number();
    u32 bad = 0;
    u32 dy_scale = 0;
    u32 rows_scale = 0;
    if (pair < p.pairs && p.ids[pair] >= 0) {
        const uint2 dy = norm_of(p.dy, pair / p.top_k);
        const uint2 row = norm_of(p.rows, pair / p.pairs_of_row);
        const float kind = __fmul_rn(__fmul_rn(kind_of_gate(gate_of(p, pair)), kind_of_norm(dy)), kind_of_norm(row));
        bad = magnitude(kind) > INFINITE ? ~u32(pair) : 0;
        dy_scale = dy.y == NOT_FINITE ? 0 : dy.y;
        rows_scale = row.y == NOT_FINITE ? 0 : row.y;
    }
    bad = largest_of_warp(bad);
    dy_scale = largest_of_warp(dy_scale);
    rows_scale = largest_of_warp(rows_scale);
    if (lane() == 0) {
        atomicMax(&p.found[0], bad);
        atomicMax(&p.found[1], dy_scale);
        atomicMax(&p.found[2], rows_scale);
    }
}

// ((p * p) * |dy|^2) * |row|^2 of each pair, 0 where masked.
__global__ void __launch_bounds__(THREADS) squared_scores(const ScoreParameters p) {
    const u64 pair = thread_number();
    if (pair >= p.pairs) {
        return;
    }
    float score = 0.0f;
    if (p.ids[pair] >= 0) {
        const float gate = gate_of(p, pair);
        score = product(gate, gate);
        if (p.dy) {
            score = product(score, relative(p.dy[pair / p.top_k], u32(p.dy_scale)));
        }
        if (p.rows) {
            score = product(score, relative(p.rows[pair / p.pairs_of_row], u32(p.rows_scale)));
        }
        // Finite factors have finite products, and an infinite one meets a zero here only after a product was flushed.
        if (magnitude(score) >= INFINITE) {
            score = __uint_as_float(INFINITE);
        }
    }
    p.squared[pair] = score;
}

}
