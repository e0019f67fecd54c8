// What stands between an expert's first projections and its down projection, element by element, and its gradients, row by row.

struct Params {
    first_group: u32,
    zero: u32,
    activation: u32,
    rows: u32,
    hidden: u32,
    gate_base: u32,
    up_base: u32,
    dh_base: u32,
    p_base: u32,
    w_base: u32,
    dp_base: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
// [rows, hidden] each; gate is not used by plain activations.
@group(0) @binding(1) var<storage, read_write> gate: array<f32>;
@group(0) @binding(2) var<storage, read_write> up: array<f32>;
@group(0) @binding(3) var<storage, read_write> dh: array<f32>;
// [rows] each.
@group(0) @binding(4) var<storage, read> p: array<f32>;
@group(0) @binding(5) var<storage, read> w: array<f32>;
@group(0) @binding(6) var<storage, read_write> dp: array<f32>;

// In the order of Activation::ALL.
const SWIGLU: u32 = 0u;
const GEGLU_TANH: u32 = 1u;
const GEGLU_ERF: u32 = 2u;
const REGLU: u32 = 3u;
const RELU2: u32 = 4u;
const GELU: u32 = 5u;

const LANES: u32 = 32u;
const ROWS: u32 = 8u;

struct Curve {
    value: f32,
    slope: f32,
}

// sigmoid(x) and sigmoid(-x), both to full relative precision.
fn sigmoids(x: f32) -> vec2<f32> {
    // Beyond 88, exp(-|x|) is subnormal.
    let e = select(exp(-min(abs(x), 88.0)), 0.0, abs(x) > 88.0);
    let large = 1.0 / (1.0 + e);
    let small = e / (1.0 + e);
    return select(vec2<f32>(large, small), vec2<f32>(small, large), x < 0.0);
}

fn silu(x: f32) -> Curve {
    let s = sigmoids(x);
    return Curve(x * s.x, s.x * (1.0 + x * s.y));
}

// x/2 (1 + tanh z) as x sigmoid(2z).
fn gelu_tanh(x: f32) -> Curve {
    const CUBE = 0.044715;
    const TWICE_SCALE = 1.5957691216;
    // Beyond 30 the sigmoid has long been 0 or 1; the bound keeps x^3 in range.
    let t = clamp(x, -30.0, 30.0);
    let s = sigmoids(TWICE_SCALE * (t + CUBE * t * t * t));
    let slope_of_z = TWICE_SCALE * (1.0 + 3.0 * CUBE * t * t);
    return Curve(x * s.x, s.x + t * slope_of_z * s.x * s.y);
}

// exp(-x^2) with x^2 as a sum, so that its rounding is not magnified.
fn bell(x: f32) -> f32 {
    let coarse = bitcast<f32>(bitcast<u32>(x) & 0xfffff000u);
    return exp(-coarse * coarse) * exp((coarse - x) * (coarse + x));
}

// erfc(x) / exp(-x^2) for x in [0, 10.4], within 1e-8: t = 1/(1 + x/2) times a polynomial, interpolated at the Chebyshev nodes of [5/31, 1] in t.
fn scaled_erfc(x: f32) -> f32 {
    let t = 1.0 / (1.0 + 0.5 * x);
    let u = (31.0 * t - 18.0) / 13.0;
    var sum = 5.597093150e-6;
    sum = sum * u + 6.542439678e-6;
    sum = sum * u - 6.994992145e-5;
    sum = sum * u + 8.853067811e-6;
    sum = sum * u + 6.193560548e-4;
    sum = sum * u - 6.640023785e-4;
    sum = sum * u - 6.293639075e-3;
    sum = sum * u + 6.240689196e-3;
    sum = sum * u + 1.032320932e-1;
    sum = sum * u + 3.270029128e-1;
    sum = sum * u + 5.699115396e-1;
    return t * sum;
}

// x Phi(x), with Phi from erfc, which does not cancel for negative x.
fn gelu(x: f32) -> Curve {
    const DENSITY = 0.39894228040;
    const ROOT_HALF = 0.70710678119;
    let z = min(abs(x) * ROOT_HALF, 10.4);
    // Beyond 9.3 the tail is below every normal number.
    let e = select(bell(z), 0.0, z > 9.3);
    let tail = 0.5 * e * scaled_erfc(z);
    let phi = select(1.0 - tail, tail, x < 0.0);
    return Curve(x * phi, phi + clamp(x, -20.0, 20.0) * (DENSITY * e));
}

fn relu(x: f32) -> Curve {
    if x <= 0.0 {
        return Curve(0.0, 0.0);
    }
    return Curve(x, 1.0);
}

fn is_gated() -> bool {
    return params.activation <= REGLU;
}

fn curve(x: f32) -> Curve {
    switch params.activation {
        case GEGLU_TANH: { return gelu_tanh(x); }
        case GEGLU_ERF, GELU: { return gelu(x); }
        case REGLU: { return relu(x); }
        case RELU2: {
            let r = relu(x).value;
            return Curve(r * r, 2.0 * r);
        }
        default: { return silu(x); }
    }
}

// The down projection's input, in place of up.
@compute @workgroup_size(256)
fn activate(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let at = (params.first_group + group.x) * 256u + local;
    if at >= params.rows * params.hidden {
        return;
    }
    let u = up[params.up_base + at];
    if is_gated() {
        up[params.up_base + at] = curve(gate[params.gate_base + at]).value * u;
    } else {
        up[params.up_base + at] = curve(u).value;
    }
}

var<workgroup> sums: array<f32, 256>;

// From gate, up and dh = W_down^T dy, in place: the gradients of gate and up times p, and w p h in dh; dp = <dh, h>.
@compute @workgroup_size(32, 8)
fn differentiate(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let row = (params.first_group + group.x) * ROWS + local.y;
    let own = local.y * LANES + local.x;
    var sum = 0.0;
    if row < params.rows {
        let gate_weight = p[params.p_base + row];
        let factor = w[params.w_base + row] * gate_weight;
        let first = row * params.hidden;
        for (var i = first + local.x; i < first + params.hidden; i += LANES) {
            let b = dh[params.dh_base + i];
            let u = up[params.up_base + i];
            var h = 0.0;
            if is_gated() {
                let a = curve(gate[params.gate_base + i]);
                h = a.value * u;
                gate[params.gate_base + i] = gate_weight * b * u * a.slope;
                up[params.up_base + i] = gate_weight * b * a.value;
            } else {
                let a = curve(u);
                h = a.value;
                up[params.up_base + i] = gate_weight * b * a.slope;
            }
            dh[params.dh_base + i] = factor * h;
            sum += b * h;
        }
    }
    sums[own] = sum;
    for (var distance = LANES / 2u; distance > 0u; distance /= 2u) {
        workgroupBarrier();
        if local.x < distance {
            sums[own] += sums[own + distance];
        }
    }
    if local.x == 0u && row < params.rows {
        dp[params.dp_base + row] = sums[own];
    }
}

// Times w of the row, in place of up.
@compute @workgroup_size(256)
fn scale_rows(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let at = (params.first_group + group.x) * 256u + local;
    if at < params.rows * params.hidden {
        up[params.up_base + at] *= w[params.w_base + at / params.hidden];
    }
}
