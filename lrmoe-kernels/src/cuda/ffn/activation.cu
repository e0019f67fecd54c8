// What stands between an expert's first projections and its down projection, element by element, and its gradients, row by row.

struct ActivationParameters {
    // [rows, hidden] each; no gate with plain activations.
    float* gate;
    float* up;
    float* dh;
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

__device__ __forceinline__ float4* fours(float* values, u64 at) {
    return reinterpret_cast<float4*>(values + at);
}

extern "C" {

// The down projection's input, in place of up.
__global__ void __launch_bounds__(THREADS) activate(const ActivationParameters p) {
    const u64 count = p.rows * p.hidden;
    const u64 first = 4 * thread_number();
    if (first + 4 <= count) {
        const float4 g = p.gate ? *fours(p.gate, first) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const float4 u = *fours(p.up, first);
        *fours(p.up, first) = make_float4(
            hidden_value(p.activation, g.x, u.x),
            hidden_value(p.activation, g.y, u.y),
            hidden_value(p.activation, g.z, u.z),
            hidden_value(p.activation, g.w, u.w)
        );
        return;
    }
    for (u64 i = first; i < count; i += 1) {
        p.up[i] = hidden_value(p.activation, p.gate ? p.gate[i] : 0.0f, p.up[i]);
    }
}

// A warp has a row: the gradients of its elements, and dp = <b, h>.
__global__ void __launch_bounds__(THREADS) differentiate(const ActivationParameters p) {
    const u64 row = warp_number();
    if (row >= p.rows) {
        return;
    }
    const float weight = p.p[row];
    const float wp = p.w[row] * weight;
    const u64 first = place(row, p.hidden, 0);
    float sum = 0.0f;
    if (in_fours(p.hidden)) {
        for (u64 i = 4 * lane(); i < p.hidden; i += 4 * LANES) {
            float4 g = p.gate ? *fours(p.gate, first + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            float4 u = *fours(p.up, first + i);
            float4 b = *fours(p.dh, first + i);
            sum += gradients(p.activation, weight, wp, g.x, u.x, b.x);
            sum += gradients(p.activation, weight, wp, g.y, u.y, b.y);
            sum += gradients(p.activation, weight, wp, g.z, u.z, b.z);
            sum += gradients(p.activation, weight, wp, g.w, u.w, b.w);
            if (p.gate) {
                *fours(p.gate, first + i) = g;
            }
            *fours(p.up, first + i) = u;
            *fours(p.dh, first + i) = b;
        }
    } else {
        for (u64 i = first + lane(); i < first + p.hidden; i += LANES) {
            float g = p.gate ? p.gate[i] : 0.0f;
            sum += gradients(p.activation, weight, wp, g, p.up[i], p.dh[i]);
            if (p.gate) {
                p.gate[i] = g;
            }
        }
    }
    for (u32 distance = LANES / 2; distance > 0; distance /= 2) {
        sum += __shfl_down_sync(ALL_LANES, sum, distance);
    }
    if (lane() == 0) {
        p.dp[row] = sum;
    }
}

// Rows of gate and up times w of the row, a warp each.
__global__ void __launch_bounds__(THREADS) scale_rows(const ActivationParameters p) {
    const u64 row = warp_number();
    if (row >= p.rows) {
        return;
    }
    const float w = p.w[row];
    for (u64 i = place(row, p.hidden, lane()); i < place(row, p.hidden, p.hidden); i += LANES) {
        p.up[i] *= w;
        if (p.gate) {
            p.gate[i] *= w;
        }
    }
}

}
