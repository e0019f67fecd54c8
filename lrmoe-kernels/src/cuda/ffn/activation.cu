// What stands between an expert's first projections and its down projection, element by element, and its gradients, row by row.

struct ActivationParameters {
    // [rows, hidden] each, f32 or bf16; no gate with plain activations.
    void* gate;
    void* up;
    void* dh;
    // [rows] each.
    const float* p;
    const float* w;
    float* dp;
    u64 activation;
    u64 rows;
    u64 hidden;
};

// In the order of Activation::ALL.
constexpr u32 GEGLU_TANH = 1;
constexpr u32 GEGLU_ERF = 2;
constexpr u32 REGLU = 3;
constexpr u32 RELU2 = 4;
constexpr u32 GELU = 5;

struct Curve {
    float value;
    float slope;
};

// sigmoid(x) and sigmoid(-x), both to full relative precision.
__device__ __forceinline__ float2 sigmoids(float x) {
    const float e = expf(-fabsf(x));
    const float large = 1.0f / (1.0f + e);
    const float small = e / (1.0f + e);
    return x < 0.0f ? make_float2(small, large) : make_float2(large, small);
}

__device__ __forceinline__ Curve silu(float x) {
    const float2 s = sigmoids(x);
    return {x * s.x, s.x * (1.0f + x * s.y)};
}

// x/2 (1 + tanh z) as x sigmoid(2z).
__device__ __forceinline__ Curve gelu_tanh(float x) {
    constexpr float CUBE = 0.044715f;
    constexpr float TWICE_SCALE = 1.5957691216f;
    // Beyond 30 the sigmoid has long been 0 or 1; the bound keeps x^3 times 0 from becoming NaN.
    const float t = fabsf(x) > 30.0f ? copysignf(30.0f, x) : x;
    const float2 s = sigmoids(TWICE_SCALE * (t + CUBE * t * t * t));
    const float slope_of_z = TWICE_SCALE * (1.0f + 3.0f * CUBE * t * t);
    return {x * s.x, s.x + t * slope_of_z * s.x * s.y};
}

// x Phi(x), with Phi from erfc, which does not cancel for negative x.
__device__ __forceinline__ Curve gelu(float x) {
    constexpr float DENSITY = 0.39894228040f;
    constexpr float ROOT_HALF = 0.70710678119f;
    const float phi = 0.5f * erfcf(-x * ROOT_HALF);
    return {x * phi, phi + x * (DENSITY * expf(-0.5f * x * x))};
}

// A NaN passes through.
__device__ __forceinline__ Curve relu(float x) {
    return x <= 0.0f ? Curve{0.0f, 0.0f} : Curve{x, 1.0f};
}

__device__ __forceinline__ bool is_gated(u64 activation) {
    return activation <= REGLU;
}

__device__ __forceinline__ Curve curve(u64 activation, float x) {
    switch (activation) {
        case GEGLU_TANH: return gelu_tanh(x);
        case GEGLU_ERF:
        case GELU: return gelu(x);
        case REGLU: return relu(x);
        case RELU2: {
            const float r = relu(x).value;
            return {r * r, 2.0f * r};
        }
        default: return silu(x);
    }
}

// The down projection's input.
__device__ __forceinline__ float hidden_value(u64 activation, float gate, float up) {
    return is_gated(activation) ? curve(activation, gate).value * up : curve(activation, up).value;
}

// From gate, up and b = W_down^T dy, in place: the gradients of gate and up times p, and w p h in b; the term of <b, h>.
__device__ __forceinline__ float gradients(u64 activation, float p, float wp, float& gate, float& up, float& b) {
    const float dy = b;
    float h;
    if (is_gated(activation)) {
        const Curve a = curve(activation, gate);
        h = a.value * up;
        gate = p * dy * up * a.slope;
        up = p * dy * a.value;
    } else {
        const Curve a = curve(activation, up);
        h = a.value;
        up = p * dy * a.slope;
    }
    b = wp * h;
    return dy * h;
}

// N neighbours of a matrix, zeros without one.
template <u32 N, class T>
__device__ __forceinline__ void load_if_any(const T* matrix, u64 at, float (&values)[N]) {
    if (matrix) {
        load(matrix + at, values);
        return;
    }
    #pragma unroll
    for (u32 i = 0; i < N; i += 1) {
        values[i] = 0.0f;
    }
}

// From the pre-activations of N neighbours, in place of up.
template <u32 N, class T>
__device__ __forceinline__ void activate_some(const ActivationParameters& p, u64 at) {
    float gate[N];
    float up[N];
    load_if_any(static_cast<const T*>(p.gate), at, gate);
    load(static_cast<const T*>(p.up) + at, up);
    #pragma unroll
    for (u32 i = 0; i < N; i += 1) {
        up[i] = hidden_value(p.activation, gate[i], up[i]);
    }
    store(static_cast<T*>(p.up) + at, up);
}

template <class T>
__device__ __forceinline__ void activate_all(const ActivationParameters& p) {
    const u64 count = p.rows * p.hidden;
    const u64 first = PIECE<T> * thread_number();
    if (first + PIECE<T> <= count) {
        activate_some<PIECE<T>, T>(p, first);
        return;
    }
    for (u64 i = first; i < count; i += 1) {
        activate_some<1, T>(p, i);
    }
}

// The gradients of what a lane has of a row, N neighbours at a time; its part of <b, h>.
template <u32 N, class T>
__device__ __forceinline__ float differentiate_row(const ActivationParameters& p, u64 row) {
    const float weight = p.p[row];
    const float wp = p.w[row] * weight;
    T* gates = static_cast<T*>(p.gate);
    T* ups = static_cast<T*>(p.up);
    T* dhs = static_cast<T*>(p.dh);
    float sum = 0.0f;
    for (u64 i = N * lane(); i < p.hidden; i += N * LANES) {
        const u64 at = place(row, p.hidden, i);
        float gate[N];
        float up[N];
        float b[N];
        load_if_any(gates, at, gate);
        load(ups + at, up);
        load(dhs + at, b);
        #pragma unroll
        for (u32 j = 0; j < N; j += 1) {
            sum += gradients(p.activation, weight, wp, gate[j], up[j], b[j]);
        }
        if (gates) {
            store(gates + at, gate);
        }
        store(ups + at, up);
        store(dhs + at, b);
    }
    return sum;
}

template <class T>
__device__ __forceinline__ void differentiate_rows(const ActivationParameters& p) {
    const u64 row = warp_number();
    if (row >= p.rows) {
        return;
    }
    float sum = p.hidden % PIECE<T> == 0 ? differentiate_row<PIECE<T>, T>(p, row) : differentiate_row<1, T>(p, row);
    for (u32 distance = LANES / 2; distance > 0; distance /= 2) {
        sum += __shfl_down_sync(ALL_LANES, sum, distance);
    }
    if (lane() == 0) {
        p.dp[row] = sum;
    }
}

template <class T>
__device__ __forceinline__ void scale(T* value, float w) {
    float scaled[1];
    load(value, scaled);
    scaled[0] *= w;
    store(value, scaled);
}

template <class T>
__device__ __forceinline__ void scale_all_rows(const ActivationParameters& p) {
    const u64 row = warp_number();
    if (row >= p.rows) {
        return;
    }
    T* gates = static_cast<T*>(p.gate);
    T* ups = static_cast<T*>(p.up);
    const float w = p.w[row];
    for (u64 i = place(row, p.hidden, lane()); i < place(row, p.hidden, p.hidden); i += LANES) {
        scale(ups + i, w);
        if (gates) {
            scale(gates + i, w);
        }
    }
}

extern "C" {

// The down projection's input, in place of up.
__global__ void __launch_bounds__(THREADS) activate(const ActivationParameters p) {
    activate_all<float>(p);
}

__global__ void __launch_bounds__(THREADS) activate_bf16(const ActivationParameters p) {
    activate_all<u16>(p);
}

// A warp has a row: the gradients of its elements, and dp = <b, h>.
__global__ void __launch_bounds__(THREADS) differentiate(const ActivationParameters p) {
    differentiate_rows<float>(p);
}

__global__ void __launch_bounds__(THREADS) differentiate_bf16(const ActivationParameters p) {
    differentiate_rows<u16>(p);
}

// Rows of gate and up times w of the row, a warp each.
__global__ void __launch_bounds__(THREADS) scale_rows(const ActivationParameters p) {
    scale_all_rows<float>(p);
}

__global__ void __launch_bounds__(THREADS) scale_rows_bf16(const ActivationParameters p) {
    scale_all_rows<u16>(p);
}

}
