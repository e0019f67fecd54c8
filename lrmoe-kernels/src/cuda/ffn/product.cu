// Grouped products in f32: tiles of 64 by 64 results, 256 threads with 4 by 4 each. A result is the sum of its terms in ascending order of k,
// each added by a fused multiply-add, wherever in a tile it lies.

struct ProductParameters {
    const float* a;
    const float* b;
    float* c;
    const struct Group* groups;
    u64 group_count;
    // Rows of results of a group, for weight gradients; columns of results; terms, but for weight gradients.
    u64 m;
    u64 n;
    u64 k;
    // 1: the results are added to; for weight gradients, groups say so.
    u64 accumulate;
};

struct Group {
    // Tiles of rows of the groups before.
    u64 tile;
    // Rows.
    u64 start;
    u64 end;
    // 1: its weight gradients are added to.
    u64 accumulate;
};

constexpr u32 TILE = 64;
constexpr u32 STEP = 16;
// So that rows of a tile begin in different banks, and at multiples of 16 bytes.
constexpr u32 PITCH = TILE + 4;

// An operand as a tile needs it: from the tile's first element on, along k and along its other dimension, one of which is contiguous.
struct Operand {
    const float* from;
    // Elements from one to the next along the dimension that is not contiguous.
    u64 stride;
    // How many there are along the other dimension.
    u64 count;
};

// The four elements of an operand that a thread brings: neighbours in memory.
template <bool ALONG_K>
__device__ __forceinline__ float4 bring(const Operand& operand, u64 k0, u64 k_end) {
    const u32 thread = threadIdx.x;
    // (k, other) of the first of the four; they go on along k, or along the other dimension.
    const u64 k = k0 + (ALONG_K ? thread % 4 * 4 : thread / 16);
    const u64 other = ALONG_K ? thread / 4 : thread % 16 * 4;
    if (k >= k_end || other >= operand.count) {
        return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    const float* from = operand.from + (ALONG_K ? place(other, operand.stride, k) : place(k, operand.stride, other));
    if (in_fours(operand.stride)) {
        return *reinterpret_cast<const float4*>(from);
    }
    const u64 left = ALONG_K ? k_end - k : operand.count - other;
    return make_float4(
        from[0],
        left > 1 ? from[1] : 0.0f,
        left > 2 ? from[2] : 0.0f,
        left > 3 ? from[3] : 0.0f
    );
}

template <bool ALONG_K>
__device__ __forceinline__ void put(float* tile, float4 four) {
    const u32 thread = threadIdx.x;
    if (ALONG_K) {
        float* to = tile + thread % 4 * 4 * PITCH + thread / 4;
        to[0] = four.x;
        to[PITCH] = four.y;
        to[2 * PITCH] = four.z;
        to[3 * PITCH] = four.w;
    } else {
        *reinterpret_cast<float4*>(tile + thread / 16 * PITCH + thread % 16 * 4) = four;
    }
}

__device__ __forceinline__ void add_products(float4& sums, float left, float4 right) {
    sums.x = __fmaf_rn(left, right.x, sums.x);
    sums.y = __fmaf_rn(left, right.y, sums.y);
    sums.z = __fmaf_rn(left, right.z, sums.z);
    sums.w = __fmaf_rn(left, right.w, sums.w);
}

// c[i, j] = sum over k of a[i, k] b[k, j] for a tile of results, in rows of `pitch` elements.
template <bool A_ALONG_K, bool B_ALONG_K>
__device__ __forceinline__ void multiply(Operand a, Operand b, u64 k_end, float* c, u64 pitch, bool accumulate) {
    __shared__ __align__(16) float a_tile[STEP * PITCH];
    __shared__ __align__(16) float b_tile[STEP * PITCH];
    const u32 row = threadIdx.x / 16 * 4;
    const u32 column = threadIdx.x % 16 * 4;
    float4 sums[4];
    for (u32 i = 0; i < 4; i += 1) {
        const bool there = accumulate && row + i < a.count;
        const float* from = c + place(row + i, pitch, column);
        sums[i] = make_float4(
            there && column < b.count ? from[0] : 0.0f,
            there && column + 1 < b.count ? from[1] : 0.0f,
            there && column + 2 < b.count ? from[2] : 0.0f,
            there && column + 3 < b.count ? from[3] : 0.0f
        );
    }
    float4 next_a = bring<A_ALONG_K>(a, 0, k_end);
    float4 next_b = bring<B_ALONG_K>(b, 0, k_end);
    for (u64 k0 = 0; k0 < k_end; k0 += STEP) {
        put<A_ALONG_K>(a_tile, next_a);
        put<B_ALONG_K>(b_tile, next_b);
        __syncthreads();
        // On their way while the products are formed.
        next_a = bring<A_ALONG_K>(a, k0 + STEP, k_end);
        next_b = bring<B_ALONG_K>(b, k0 + STEP, k_end);
        for (u32 k = 0; k < STEP; k += 1) {
            const float4 left = *reinterpret_cast<const float4*>(a_tile + k * PITCH + row);
            const float4 right = *reinterpret_cast<const float4*>(b_tile + k * PITCH + column);
            add_products(sums[0], left.x, right);
            add_products(sums[1], left.y, right);
            add_products(sums[2], left.z, right);
            add_products(sums[3], left.w, right);
        }
        __syncthreads();
    }
    for (u32 i = 0; i < 4 && row + i < a.count; i += 1) {
        float* to = c + place(row + i, pitch, column);
        if (in_fours(pitch) && column < b.count) {
            *reinterpret_cast<float4*>(to) = sums[i];
            continue;
        }
        const float values[4] = {sums[i].x, sums[i].y, sums[i].z, sums[i].w};
        for (u32 j = 0; j < 4 && column + j < b.count; j += 1) {
            to[j] = values[j];
        }
    }
}

// Rows of groups times the matrices of their group: c[row, n] = sum over k of a[row, k] b[group, k, n], or with b[group, n, k].
template <bool B_ALONG_K>
__device__ __forceinline__ void rows_by_matrices(const ProductParameters& p) {
    const u64 across = (p.n + TILE - 1) / TILE;
    const u64 down = blockIdx.x / across;
    // The last group that begins at this tile or before; groups without rows begin with the next.
    u64 low = 0;
    u64 high = p.group_count;
    while (high - low > 1) {
        const u64 middle = (low + high) / 2;
        if (p.groups[middle].tile <= down) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const Group group = p.groups[low];
    const u64 row = group.start + (down - group.tile) * TILE;
    const u64 column = blockIdx.x % across * TILE;
    const float* matrix = p.b + low * p.n * p.k;
    const Operand a = {p.a + place(row, p.k, 0), p.k, min(u64(TILE), group.end - row)};
    const Operand b = {
        matrix + (B_ALONG_K ? place(column, p.k, 0) : column),
        B_ALONG_K ? p.k : p.n,
        min(u64(TILE), p.n - column),
    };
    multiply<true, B_ALONG_K>(a, b, p.k, p.c + place(row, p.n, column), p.n, p.accumulate);
}

extern "C" {

__global__ void __launch_bounds__(THREADS) project(const ProductParameters p) {
    rows_by_matrices<true>(p);
}

__global__ void __launch_bounds__(THREADS) project_back(const ProductParameters p) {
    rows_by_matrices<false>(p);
}

// c[group, m, n] = sum over the group's rows of a[row, m] b[row, n]; or that added. Zeros where it has none.
__global__ void __launch_bounds__(THREADS) weight_gradients(const ProductParameters p) {
    const u64 across = (p.n + TILE - 1) / TILE;
    const u64 down = (p.m + TILE - 1) / TILE;
    const u64 number = blockIdx.x / (across * down);
    const u64 row = blockIdx.x / across % down * TILE;
    const u64 column = blockIdx.x % across * TILE;
    const Group group = p.groups[number];
    // Nothing to add.
    if (group.accumulate && group.start == group.end) {
        return;
    }
    const Operand a = {p.a + place(group.start, p.m, row), p.m, min(u64(TILE), p.m - row)};
    const Operand b = {p.b + place(group.start, p.n, column), p.n, min(u64(TILE), p.n - column)};
    float* c = p.c + number * p.m * p.n + place(row, p.n, column);
    multiply<false, false>(a, b, group.end - group.start, c, p.n, group.accumulate);
}

}
