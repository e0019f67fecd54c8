// Selection weights of kept pairs: max(s, tau) / s from squares, rounded as IEEE 754 asks, by integer arithmetic.

struct Params {
    first_group: u32,
    zero: u32,
    kept: u32,
    // 0: every weight is 1.
    weighted: u32,
    // The pairs of this dispatch: from, to.
    first_pair: u32,
    end_pair: u32,
    kept_base: u32,
    ids_base: u32,
    squared_base: u32,
    weights_base: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> kept: array<u32>;
@group(0) @binding(2) var<storage, read> ids: array<i32>;
@group(0) @binding(3) var<storage, read> squared: array<u32>;
// [experts]
@group(0) @binding(4) var<storage, read> next: array<u32>;
@group(0) @binding(5) var<storage, read_write> weights: array<u32>;

const LEADING: u32 = 0x00800000u;

// Bits of a / b for normal a and b with a > b; infinity past f32.
fn quotient(a: u32, b: u32) -> u32 {
    let divisor = (b & FRACTION) | LEADING;
    var rest = (a & FRACTION) | LEADING;
    var field = (a >> 23u) - (b >> 23u) + 127u;
    if rest < divisor {
        rest <<= 1u;
        field -= 1u;
    }
    var digits = 0u;
    for (var i = 0u; i < 24u; i += 1u) {
        digits <<= 1u;
        if rest >= divisor {
            rest -= divisor;
            digits |= 1u;
        }
        rest <<= 1u;
    }
    // The rest is doubled, so this compares it with half of the divisor; a tie goes to even.
    if rest > divisor || (rest == divisor && (digits & 1u) == 1u) {
        digits += 1u;
    }
    // A carry out of the digits raises the exponent.
    let bits = ((field - 1u) << 23u) + digits;
    return select(bits, INFINITY, field >= NOT_FINITE || bits >= INFINITY);
}

// Bits of the square root of a normal number that is at least 1.
fn root(bits: u32) -> u32 {
    let exponent = (bits >> 23u) - 127u;
    // The digits of the radicand are those of m, then 23 zeros.
    let m = ((bits & FRACTION) | LEADING) << (exponent & 1u);
    var rest = 0u;
    var digits = 0u;
    for (var i = 0u; i < 24u; i += 1u) {
        let at = 46u - 2u * i;
        var pair = 0u;
        if at >= 23u {
            pair = (m >> (at - 23u)) & 3u;
        } else if at == 22u {
            pair = (m & 1u) << 1u;
        }
        rest = (rest << 2u) | pair;
        let trial = (digits << 2u) | 1u;
        digits <<= 1u;
        if rest >= trial {
            rest -= trial;
            digits |= 1u;
        }
    }
    if rest > digits {
        digits += 1u;
    }
    return ((exponent / 2u + 126u) << 23u) + digits;
}

@compute @workgroup_size(256)
fn selection_weights(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let at = (params.first_group + group.x) * 256u + local;
    if at >= params.kept {
        return;
    }
    if params.weighted == 0u {
        weights[params.weights_base + at] = ONE;
        return;
    }
    let pair = kept[params.kept_base + at];
    if pair < params.first_pair || pair >= params.end_pair {
        return;
    }
    let score = squared[params.squared_base + pair - params.first_pair];
    let threshold = next[ids[params.ids_base + pair - params.first_pair]];
    var weight = ONE;
    if score > 0u && score < threshold {
        weight = INFINITY;
        if threshold < INFINITY {
            let ratio = quotient(threshold, score);
            if ratio < INFINITY {
                weight = root(ratio);
            }
        }
    }
    weights[params.weights_base + at] = weight;
}
