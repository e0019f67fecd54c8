// Selection keys from scores.

struct Params {
    first_group: u32,
    zero: u32,
    pairs: u32,
    // Local id of the first pair of this dispatch.
    first_pair: u32,
    // Global id of that pair, low and high word.
    global_low: u32,
    global_high: u32,
    method: u32,
    seed_low: u32,
    seed_high: u32,
    step: u32,
    layer: u32,
    ids_base: u32,
    scores_base: u32,
    keys_base: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<i32>;
@group(0) @binding(2) var<storage, read> scores: array<u32>;
@group(0) @binding(3) var<storage, read_write> keys: array<u32>;
// Largest complement of the local id of a pair with a bad score; 0 if there is none.
@group(0) @binding(4) var<storage, read_write> bad: atomic<u32>;

const BY_SCORE: u32 = 0u;
const BY_PRIORITY: u32 = 1u;

// High word of a * b, from products of 16-bit halves.
fn multiply_high(a: u32, b: u32) -> u32 {
    let low = (a & 0xffffu) * (b & 0xffffu);
    let left = (a >> 16u) * (b & 0xffffu) + (low >> 16u);
    let right = (a & 0xffffu) * (b >> 16u) + (left & 0xffffu);
    return (a >> 16u) * (b >> 16u) + (left >> 16u) + (right >> 16u);
}

// Word 0 of Philox4x32-10.
fn philox(first: vec4<u32>, seed: vec2<u32>) -> u32 {
    var counter = first;
    var key = seed;
    for (var round = 0u; round < 10u; round += 1u) {
        let left = multiply_high(counter.x, 0xd2511f53u);
        let right = multiply_high(counter.z, 0xcd9e8d57u);
        counter = vec4<u32>(
            right ^ counter.y ^ key.x,
            counter.z * 0xcd9e8d57u,
            left ^ counter.w ^ key.y,
            counter.x * 0xd2511f53u,
        );
        key += vec2<u32>(0x9e3779b9u, 0xbb67ae85u);
    }
    return counter.x;
}

// Bits of 1/u for u = (bits / 2^8 + 1) / 2^24, as lrmoe-metric defines it.
fn reciprocal(bits: u32) -> u32 {
    let v = (bits >> 8u) + 1u;
    let shift = countLeadingZeros(v);
    let m = (v << shift) >> 16u;
    // Below 2^16, so it is an f32 without rounding; the power of two is added to its exponent.
    let quotient = 0xffffffffu / (2u * m + 1u);
    return bitcast<u32>(f32(quotient)) + ((shift - 23u) << 23u);
}

fn random_bits(pair: u32) -> u32 {
    let low = params.global_low + pair;
    let high = params.global_high + select(0u, 1u, low < pair);
    return philox(vec4<u32>(low, high, params.step, params.layer), vec2<u32>(params.seed_low, params.seed_high));
}

// Keys of a method from squared scores.
@compute @workgroup_size(256)
fn method_keys(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let pair = (params.first_group + group.x) * 256u + local;
    if pair >= params.pairs {
        return;
    }
    var key = scores[params.scores_base + pair];
    if params.method == BY_PRIORITY {
        let factor = reciprocal(random_bits(pair));
        key = product(key, product(factor, factor));
    } else if params.method != BY_SCORE {
        key = random_bits(pair) >> 2u;
    }
    keys[params.keys_base + pair] = key;
}

// Keys of a caller's scores: their bits, with subnormals and -0 as +0; 0 where masked.
@compute @workgroup_size(256)
fn score_keys(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let pair = (params.first_group + group.x) * 256u + local;
    if pair >= params.pairs {
        return;
    }
    let bits = scores[params.scores_base + pair];
    let masked = ids[params.ids_base + pair] < 0;
    // NaN, or below -0.
    if !masked && ((bits & MAGNITUDE) > INFINITY || bits > 0x80000000u) {
        atomicMax(&bad, ~(params.first_pair + pair));
    }
    keys[params.keys_base + pair] = select(bits, 0u, masked || bits < 0x00800000u || bits >= 0x80000000u);
}
