// Scores of pairs from squared norms.

struct Params {
    first_group: u32,
    zero: u32,
    pairs: u32,
    // Local id of the first pair of this dispatch.
    first_pair: u32,
    top_k: u32,
    // Pairs that share a row.
    pairs_of_row: u32,
    // Whether the gate weight, dy and rows are factors of the score.
    uses_gate: u32,
    uses_dy: u32,
    uses_rows: u32,
    dy_scale: u32,
    rows_scale: u32,
    ids_base: u32,
    gates_base: u32,
    dy_base: u32,
    rows_base: u32,
    squared_base: u32,
}

struct Found {
    // Largest complement of the local id of a pair whose score is NaN; 0 if there is none.
    not_a_number: atomic<u32>,
    dy_scale: atomic<u32>,
    rows_scale: atomic<u32>,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<i32>;
@group(0) @binding(2) var<storage, read> gates: array<u32>;
// (significand, scale) of each token.
@group(0) @binding(3) var<storage, read> dy: array<u32>;
// (significand, scale) of each row.
@group(0) @binding(4) var<storage, read> rows: array<u32>;
@group(0) @binding(5) var<storage, read_write> found: Found;
@group(0) @binding(6) var<storage, read_write> squared: array<u32>;

// 2^-62; gate weights below count as zero.
const LEAST_GATE: u32 = 0x20800000u;

// What a factor does to the kind of a product, as bits: a zero, an infinity or a NaN in it.
const HAS_ZERO: u32 = 1u;
const HAS_INFINITY: u32 = 2u;
const HAS_NAN: u32 = 4u;

struct Norm {
    significand: u32,
    scale: u32,
}

// Stands for a factor that is left out.
const PLAIN: Norm = Norm(0x40800000u, 1u);

fn norm_of_dy(pair: u32) -> Norm {
    if params.uses_dy == 0u {
        return PLAIN;
    }
    let at = params.dy_base + 2u * (pair / params.top_k);
    return Norm(dy[at], dy[at + 1u]);
}

fn norm_of_row(pair: u32) -> Norm {
    if params.uses_rows == 0u {
        return PLAIN;
    }
    let at = params.rows_base + 2u * (pair / params.pairs_of_row);
    return Norm(rows[at], rows[at + 1u]);
}

// Bits of |gate|, 0 where it counts as zero.
fn gate_of(pair: u32) -> u32 {
    if params.uses_gate == 0u {
        return ONE;
    }
    let bits = gates[params.gates_base + pair] & MAGNITUDE;
    return select(bits, 0u, bits < LEAST_GATE);
}

fn kind(bits: u32) -> u32 {
    if bits > INFINITY {
        return HAS_NAN;
    }
    if bits == INFINITY {
        return HAS_INFINITY;
    }
    return select(0u, HAS_ZERO, bits == 0u);
}

fn kind_of_norm(norm: Norm) -> u32 {
    if norm.scale == NOT_FINITE {
        return kind(norm.significand);
    }
    return select(0u, HAS_ZERO, norm.scale == 0u);
}

// Finds the first pair whose score is NaN, and the largest scales of finite norms in use.
@compute @workgroup_size(256)
fn scan_factors(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let pair = (params.first_group + group.x) * 256u + local;
    if pair >= params.pairs || ids[params.ids_base + pair] < 0 {
        return;
    }
    let of_dy = norm_of_dy(pair);
    let of_row = norm_of_row(pair);
    let kinds = kind(gate_of(pair)) | kind_of_norm(of_dy) | kind_of_norm(of_row);
    if (kinds & HAS_NAN) != 0u || (kinds & (HAS_ZERO | HAS_INFINITY)) == (HAS_ZERO | HAS_INFINITY) {
        atomicMax(&found.not_a_number, ~(params.first_pair + pair));
        return;
    }
    if of_dy.scale != NOT_FINITE {
        atomicMax(&found.dy_scale, of_dy.scale);
    }
    if of_row.scale != NOT_FINITE {
        atomicMax(&found.rows_scale, of_row.scale);
    }
}

// Bits of the squared norm times 4^(128 - layer_scale), 0 below 2^-125.
fn relative(norm: Norm, layer_scale: u32) -> u32 {
    if norm.scale == NOT_FINITE {
        return norm.significand;
    }
    let shift = 2u * (max(layer_scale, norm.scale) - norm.scale);
    if (norm.significand >> 23u) < shift + 2u {
        return 0u;
    }
    return norm.significand - (shift << 23u);
}

// ((p * p) * |dy|^2) * |row|^2 of each pair, 0 where masked.
@compute @workgroup_size(256)
fn squared_scores(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let pair = (params.first_group + group.x) * 256u + local;
    if pair >= params.pairs {
        return;
    }
    var score = 0u;
    if ids[params.ids_base + pair] >= 0 {
        let gate = gate_of(pair);
        score = product(gate, gate);
        if params.uses_dy != 0u {
            score = product(score, relative(norm_of_dy(pair), params.dy_scale));
        }
        if params.uses_rows != 0u {
            score = product(score, relative(norm_of_row(pair), params.rows_scale));
        }
    }
    squared[params.squared_base + pair] = score;
}
