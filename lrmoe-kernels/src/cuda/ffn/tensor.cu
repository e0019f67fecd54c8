// Grouped products of bf16 with f32 sums on tensor cores: tiles of 128 by 128 results, 8 warps with 64 by 32 each, from mma.sync of 16 by 8
// results and 16 terms. A result is the sum of its terms in ascending steps of 16, wherever in a tile it lies.

struct TensorParameters {
    const u16* a;
    const u16* b;
    // bf16 for rows, f32 for weight gradients.
    void* c;
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

constexpr u32 TILE = 128;
constexpr u32 STEP = 32;
// Words, of two terms each, from one row of a tile to the next: with 4 more than are used, the 32 words of a fragment lie in 32 banks.
constexpr u32 PITCH = STEP / 2 + 4;
constexpr u32 WARP_ROWS = 64;
constexpr u32 WARP_COLUMNS = 32;
constexpr u32 MMA_ROWS = WARP_ROWS / 16;
constexpr u32 MMA_COLUMNS = WARP_COLUMNS / 8;

// An operand as a tile needs it: from the tile's first element on, along k and along its other dimension, one of which is contiguous.
struct Operand {
    const u16* from;
    // Elements from one to the next along the dimension that is not contiguous.
    u64 stride;
    // How many there are along the other dimension.
    u64 count;
};

// 16 elements of a tile, two rows of 8 neighbours in memory, that a thread brings.
struct Brought {
    uint4 rows[2];
};

// 8 neighbours from `from` on, of which `left` are there; zeros for the others.
__device__ __forceinline__ uint4 eight(const u16* from, u64 left, bool aligned) {
    if (left >= 8 && aligned) {
        return *reinterpret_cast<const uint4*>(from);
    }
    u32 words[4] = {0, 0, 0, 0};
    for (u32 i = 0; i < 8 && i < left; i += 1) {
        words[i / 2] |= u32(from[i]) << (i % 2 * 16);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Where a thread's 16 elements lie in a tile. Along k: 16 terms of one row. Along the other dimension: 8 rows, of two terms that follow each other.
template <bool ALONG_K>
__device__ __forceinline__ u32 first_k() {
    return ALONG_K ? threadIdx.x % 2 * 16 : threadIdx.x / 16 * 2;
}

template <bool ALONG_K>
__device__ __forceinline__ u32 first_other() {
    return ALONG_K ? threadIdx.x / 2 : threadIdx.x % 16 * 8;
}

template <bool ALONG_K>
__device__ __forceinline__ Brought bring(const Operand& operand, u64 k0, u64 k_end) {
    Brought brought;
    const bool aligned = operand.stride % 8 == 0;
    #pragma unroll
    for (u32 i = 0; i < 2; i += 1) {
        const u64 k = k0 + first_k<ALONG_K>() + (ALONG_K ? 8 * i : i);
        const u64 other = first_other<ALONG_K>();
        brought.rows[i] = make_uint4(0, 0, 0, 0);
        if (k < k_end && other < operand.count) {
            const u64 at = ALONG_K ? place(other, operand.stride, k) : place(k, operand.stride, other);
            brought.rows[i] = eight(operand.from + at, ALONG_K ? k_end - k : operand.count - other, aligned);
        }
    }
    return brought;
}

// Into a tile [TILE][PITCH] of words, each of two terms of a row.
template <bool ALONG_K>
__device__ __forceinline__ void put(u32* tile, const Brought& brought) {
    u32* to = tile + first_other<ALONG_K>() * PITCH + first_k<ALONG_K>() / 2;
    if (ALONG_K) {
        *reinterpret_cast<uint4*>(to) = brought.rows[0];
        *reinterpret_cast<uint4*>(to + 4) = brought.rows[1];
        return;
    }
    const u32 low[4] = {brought.rows[0].x, brought.rows[0].y, brought.rows[0].z, brought.rows[0].w};
    const u32 high[4] = {brought.rows[1].x, brought.rows[1].y, brought.rows[1].z, brought.rows[1].w};
    #pragma unroll
    for (u32 i = 0; i < 4; i += 1) {
        to[2 * i * PITCH] = (low[i] & 0xffff) | high[i] << 16;
        to[(2 * i + 1) * PITCH] = low[i] >> 16 | (high[i] & 0xffff0000u);
    }
}

// The products of a step, from both tiles into the sums of a warp.
__device__ __forceinline__ void add_products(const u32* a, const u32* b, float (&sums)[MMA_ROWS][MMA_COLUMNS][4]) {
    const u32 line = lane() / 4;
    const u32 word = lane() % 4;
    #pragma unroll
    for (u32 k = 0; k < STEP / 2; k += 8) {
        u32 left[MMA_ROWS][4];
        u32 right[MMA_COLUMNS][2];
        #pragma unroll
        for (u32 i = 0; i < MMA_ROWS; i += 1) {
            const u32* from = a + (16 * i + line) * PITCH + k + word;
            left[i][0] = from[0];
            left[i][1] = from[8 * PITCH];
            left[i][2] = from[4];
            left[i][3] = from[8 * PITCH + 4];
        }
        #pragma unroll
        for (u32 j = 0; j < MMA_COLUMNS; j += 1) {
            const u32* from = b + (8 * j + line) * PITCH + k + word;
            right[j][0] = from[0];
            right[j][1] = from[4];
        }
        #pragma unroll
        for (u32 i = 0; i < MMA_ROWS; i += 1) {
            #pragma unroll
            for (u32 j = 0; j < MMA_COLUMNS; j += 1) {
                mma_bf16(sums[i][j], left[i], right[j]);
            }
        }
    }
}

// What a thread of a warp holds of the results, with their places in the tile.
template <class Use>
__device__ __forceinline__ void each_result(float (&sums)[MMA_ROWS][MMA_COLUMNS][4], u32 warp_row, u32 warp_column, Use use) {
    #pragma unroll
    for (u32 i = 0; i < MMA_ROWS; i += 1) {
        #pragma unroll
        for (u32 j = 0; j < MMA_COLUMNS; j += 1) {
            #pragma unroll
            for (u32 e = 0; e < 4; e += 1) {
                const u32 row = warp_row + 16 * i + lane() / 4 + e / 2 * 8;
                const u32 column = warp_column + 8 * j + lane() % 4 * 2 + e % 2;
                use(row, column, sums[i][j][e]);
            }
        }
    }
}

// c[i, j] = sum over k of a[i, k] b[k, j] for a tile of results, in rows of `pitch` elements.
template <bool A_ALONG_K, bool B_ALONG_K, class Result>
__device__ __forceinline__ void multiply(Operand a, Operand b, u64 k_end, Result* c, u64 pitch, bool accumulate) {
    __shared__ __align__(16) u32 a_tile[TILE * PITCH];
    __shared__ __align__(16) u32 b_tile[TILE * PITCH];
    const u32 warp = threadIdx.x / LANES;
    const u32 warp_row = warp / (TILE / WARP_COLUMNS) * WARP_ROWS;
    const u32 warp_column = warp % (TILE / WARP_COLUMNS) * WARP_COLUMNS;
    float sums[MMA_ROWS][MMA_COLUMNS][4];
    each_result(sums, warp_row, warp_column, [&](u32 row, u32 column, float& sum) {
        const bool there = accumulate && row < a.count && column < b.count;
        float value[1] = {0.0f};
        if (there) {
            load(c + place(row, pitch, column), value);
        }
        sum = value[0];
    });
    Brought next_a = bring<A_ALONG_K>(a, 0, k_end);
    Brought next_b = bring<B_ALONG_K>(b, 0, k_end);
    for (u64 k0 = 0; k0 < k_end; k0 += STEP) {
        put<A_ALONG_K>(a_tile, next_a);
        put<B_ALONG_K>(b_tile, next_b);
        __syncthreads();
        // On their way while the products are formed.
        next_a = bring<A_ALONG_K>(a, k0 + STEP, k_end);
        next_b = bring<B_ALONG_K>(b, k0 + STEP, k_end);
        add_products(a_tile + warp_row * PITCH, b_tile + warp_column * PITCH, sums);
        __syncthreads();
    }
    each_result(sums, warp_row, warp_column, [&](u32 row, u32 column, float& sum) {
        if (row < a.count && column < b.count) {
            const float value[1] = {sum};
            store(c + place(row, pitch, column), value);
        }
    });
}

// Rows of groups times the matrices of their group: c[row, n] = sum over k of a[row, k] b[group, k, n], or with b[group, n, k].
template <bool B_ALONG_K>
__device__ __forceinline__ void rows_by_matrices(const TensorParameters& p) {
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
    const u16* matrix = p.b + low * p.n * p.k;
    const Operand a = {p.a + place(row, p.k, 0), p.k, min(u64(TILE), group.end - row)};
    const Operand b = {
        matrix + (B_ALONG_K ? place(column, p.k, 0) : column),
        B_ALONG_K ? p.k : p.n,
        min(u64(TILE), p.n - column),
    };
    u16* c = static_cast<u16*>(p.c) + place(row, p.n, column);
    multiply<true, B_ALONG_K>(a, b, p.k, c, p.n, p.accumulate);
}

extern "C" {

__global__ void __launch_bounds__(THREADS) project_bf16(const TensorParameters p) {
    rows_by_matrices<true>(p);
}

__global__ void __launch_bounds__(THREADS) project_back_bf16(const TensorParameters p) {
    rows_by_matrices<false>(p);
}

// c[group, m, n] = sum over the group's rows of a[row, m] b[row, n]; or that added. Zeros where it has none.
__global__ void __launch_bounds__(THREADS) weight_gradients_bf16(const TensorParameters p) {
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
    float* c = static_cast<float*>(p.c) + number * p.m * p.n + place(row, p.n, column);
    multiply<false, false>(a, b, group.end - group.start, c, p.n, group.accumulate);
}

}
