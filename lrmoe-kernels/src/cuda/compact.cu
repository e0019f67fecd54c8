// Rows from place to place, and back to their tokens: a warp has a row, or a token.

struct GatherParameters {
    const u32* rows;
    // Where an output row comes from, [count].
    const u32* index;
    u32* out;
    u64 count;
    // Words of a row.
    u64 width;
};

struct ScatterParameters {
    const float* rows;
    // Rows by pair id, [tokens * top_k].
    const u32* table;
    // Of the rows; none: 1.
    const float* weights;
    float* into;
    u64 tokens;
    u64 top_k;
    u64 width;
};

// Stands for no row.
constexpr u32 NONE = 0xffffffffu;

template <class Piece>
__device__ __forceinline__ void copy_row(const u32* from, u32* to, u64 pieces, Piece zero) {
    const Piece* source = reinterpret_cast<const Piece*>(from);
    Piece* target = reinterpret_cast<Piece*>(to);
    for (u64 i = lane(); i < pieces; i += LANES) {
        target[i] = from ? source[i] : zero;
    }
}

__device__ __forceinline__ void add(float& sum, float value, float weight, bool weighted) {
    sum = __fadd_rn(sum, weighted ? __fmul_rn(weight, value) : value);
}

__device__ __forceinline__ void add(float4& sum, float4 value, float weight, bool weighted) {
    add(sum.x, value.x, weight, weighted);
    add(sum.y, value.y, weight, weighted);
    add(sum.z, value.z, weight, weighted);
    add(sum.w, value.w, weight, weighted);
}

// Adds the rows of a token's slots in ascending order; without any, its bits stay as they are.
template <class Piece>
__device__ __forceinline__ void add_rows(const ScatterParameters& p, u64 token, u64 pieces) {
    const u32* slots = p.table + token * p.top_k;
    Piece* into = reinterpret_cast<Piece*>(p.into + place(token, p.width, 0));
    for (u64 i = lane(); i < pieces; i += LANES) {
        Piece sum = into[i];
        bool any = false;
        for (u64 slot = 0; slot < p.top_k; slot += 1) {
            const u32 row = slots[slot];
            if (row != NONE) {
                const Piece* from = reinterpret_cast<const Piece*>(p.rows + place(row, p.width, 0));
                add(sum, from[i], p.weights ? p.weights[row] : 1.0f, p.weights != nullptr);
                any = true;
            }
        }
        if (any) {
            into[i] = sum;
        }
    }
}

extern "C" {

// Zeros where an output row comes from none.
__global__ void __launch_bounds__(THREADS) gather(const GatherParameters p) {
    const u64 number = warp_number();
    if (number >= p.count) {
        return;
    }
    const u32 row = p.index[number];
    const u32* from = row == NONE ? nullptr : p.rows + place(row, p.width, 0);
    u32* to = p.out + place(number, p.width, 0);
    if (in_fours(p.width)) {
        copy_row(from, to, p.width / 4, make_uint4(0, 0, 0, 0));
    } else {
        copy_row(from, to, p.width, 0u);
    }
}

__global__ void __launch_bounds__(THREADS) scatter_add(const ScatterParameters p) {
    const u64 token = warp_number();
    if (token >= p.tokens) {
        return;
    }
    if (in_fours(p.width)) {
        add_rows<float4>(p, token, p.width / 4);
    } else {
        add_rows<float>(p, token, p.width);
    }
}

}
