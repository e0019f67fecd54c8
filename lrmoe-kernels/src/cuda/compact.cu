// Rows from place to place, and back to their tokens: a warp has a row, or a token.

struct GatherParameters {
    const char* rows;
    // Where an output row comes from, [count].
    const u32* index;
    char* out;
    u64 count;
    // Bytes of a row.
    u64 width;
};

struct PutParameters {
    const char* rows;
    // Where rows come from and go to, [count].
    const u32* index;
    const u32* places;
    char* out;
    u64 count;
    // Bytes of a row.
    u64 width;
};

struct ScatterParameters {
    // f32 or bf16.
    const void* rows;
    // Rows by pair id, [tokens * top_k].
    const u32* table;
    // Of the rows; none: 1.
    const float* weights;
    // f32, or of the type of the rows.
    void* out;
    u64 tokens;
    u64 top_k;
    u64 width;
};

struct NarrowParameters {
    const float* values;
    u16* out;
    u64 count;
};

// Stands for no row.
constexpr u32 NONE = 0xffffffffu;

template <bool OR_ZEROS, class Piece>
__device__ __forceinline__ void copy_pieces(const char* from, char* to, u64 bytes, Piece zero) {
    const Piece* source = reinterpret_cast<const Piece*>(from);
    Piece* target = reinterpret_cast<Piece*>(to);
    for (u64 i = lane(); i < bytes / sizeof(Piece); i += LANES) {
        target[i] = !OR_ZEROS || from ? source[i] : zero;
    }
}

// A row in the largest pieces that divide it; zeros where there is none, if so asked.
template <bool OR_ZEROS>
__device__ __forceinline__ void copy_row(const char* from, char* to, u64 bytes) {
    if (bytes % 16 == 0) {
        copy_pieces<OR_ZEROS>(from, to, bytes, make_uint4(0, 0, 0, 0));
    } else if (bytes % 4 == 0) {
        copy_pieces<OR_ZEROS>(from, to, bytes, 0u);
    } else {
        copy_pieces<OR_ZEROS>(from, to, bytes, u16(0));
    }
}

// Adds the rows of a token's slots in ascending order to what `out` holds, or to zeros, N elements at a time. Where there are no rows to add to what
// `out` holds, its bits stay as they are.
template <bool ADD, u32 N, class T, class Out>
__device__ __forceinline__ void add_rows(const ScatterParameters& p, u64 token) {
    const u32* slots = p.table + token * p.top_k;
    const T* rows = static_cast<const T*>(p.rows);
    Out* out = static_cast<Out*>(p.out) + place(token, p.width, 0);
    for (u64 i = N * lane(); i < p.width; i += N * LANES) {
        float sums[N] = {};
        if (ADD) {
            load(out + i, sums);
        }
        bool any = !ADD;
        for (u64 slot = 0; slot < p.top_k; slot += 1) {
            const u32 row = slots[slot];
            if (row == NONE) {
                continue;
            }
            float values[N];
            load(rows + place(row, p.width, i), values);
            const float weight = p.weights ? p.weights[row] : 1.0f;
            #pragma unroll
            for (u32 j = 0; j < N; j += 1) {
                sums[j] = __fadd_rn(sums[j], p.weights ? __fmul_rn(weight, values[j]) : values[j]);
            }
            any = true;
        }
        if (any) {
            store(out + i, sums);
        }
    }
}

template <bool ADD, class T, class Out>
__device__ __forceinline__ void add_rows(const ScatterParameters& p) {
    const u64 token = warp_number();
    if (token >= p.tokens) {
        return;
    }
    if (p.width % PIECE<T> == 0) {
        add_rows<ADD, PIECE<T>, T, Out>(p, token);
    } else {
        add_rows<ADD, 1, T, Out>(p, token);
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
    const char* from = row == NONE ? nullptr : p.rows + place(row, p.width, 0);
    copy_row<true>(from, p.out + place(number, p.width, 0), p.width);
}

__global__ void __launch_bounds__(THREADS) put(const PutParameters p) {
    const u64 number = warp_number();
    if (number < p.count) {
        copy_row<false>(p.rows + place(p.index[number], p.width, 0), p.out + place(p.places[number], p.width, 0), p.width);
    }
}

__global__ void __launch_bounds__(THREADS) scatter_add(const ScatterParameters p) {
    add_rows<true, float, float>(p);
}

__global__ void __launch_bounds__(THREADS) scatter_add_bf16(const ScatterParameters p) {
    add_rows<true, u16, float>(p);
}

__global__ void __launch_bounds__(THREADS) combine(const ScatterParameters p) {
    add_rows<false, float, float>(p);
}

__global__ void __launch_bounds__(THREADS) combine_bf16(const ScatterParameters p) {
    add_rows<false, u16, u16>(p);
}

// To bf16, eight at a time.
__global__ void __launch_bounds__(THREADS) narrow(const NarrowParameters p) {
    const u64 first = 8 * thread_number();
    if (first + 8 <= p.count) {
        float values[8];
        load(p.values + first, values);
        store(p.out + first, values);
        return;
    }
    for (u64 i = first; i < p.count; i += 1) {
        p.out[i] = u16(narrowed(p.values[i]));
    }
}

}
