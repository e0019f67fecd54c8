// Selection weights of kept pairs: max(s, tau) / s, from squares.

struct WeightParameters {
    // Local ids, [kept].
    const u32* kept;
    // [pairs]
    const i32* ids;
    const float* squared;
    // Per expert the key that follows the kept ones.
    const u32* next;
    float* weights;
    u64 count;
    // 0: every weight is 1.
    u64 weighted;
};

extern "C" {

__global__ void __launch_bounds__(THREADS) selection_weights(const WeightParameters p) {
    const u64 at = thread_number();
    if (at >= p.count) {
        return;
    }
    float weight = 1.0f;
    if (p.weighted) {
        const u32 pair = p.kept[at];
        const float score = p.squared[pair];
        const float ratio = __fdiv_rn(__uint_as_float(p.next[p.ids[pair]]), score);
        if (ratio > 1.0f && score > 0.0f) {
            weight = __fsqrt_rn(ratio);
        }
    }
    p.weights[at] = weight;
}

}
