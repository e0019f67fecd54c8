// Squared norms of rows: 32 lanes for each row, lane l taking elements l, l + 32, ...; lanes are added pairwise at distance 16, 8, 4, 2, 1.

struct Params {
    first_group: u32,
    zero: u32,
    rows: u32,
    width: u32,
    rows_base: u32,
    norms_base: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> elements: array<u32>;
// (significand, scale) of each row.
@group(0) @binding(2) var<storage, read_write> norms: array<u32>;

const NAN: u32 = 0x7fc00000u;
const LANES: u32 = 32u;
const ROWS: u32 = 8u;

var<workgroup> largest: array<u32, 256>;
var<workgroup> sums: array<f32, 256>;

// x to the bit, but no compiler knows: a sum after it is not contracted with the product before it.
fn opaque(x: f32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) ^ params.zero);
}

@compute @workgroup_size(32, 8)
fn squared_norms(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let row = (params.first_group + group.x) * ROWS + local.y;
    let own = local.y * LANES + local.x;
    let first = params.rows_base + row * params.width;
    // Rows past the last have no elements.
    let width = select(0u, params.width, row < params.rows);

    var magnitude = 0u;
    for (var i = local.x; i < width; i += LANES) {
        magnitude = max(magnitude, elements[first + i] & MAGNITUDE);
    }
    largest[own] = magnitude;
    for (var distance = LANES / 2u; distance > 0u; distance /= 2u) {
        workgroupBarrier();
        if local.x < distance {
            largest[own] = max(largest[own], largest[own + distance]);
        }
    }
    workgroupBarrier();
    let top = largest[local.y * LANES];
    let scale = top >> 23u;

    var sum = 0.0;
    if scale > 0u && scale < NOT_FINITE {
        // Elements below 2^-62 after scaling count as zero.
        let least = (max(scale, 64u) - 63u) << 23u;
        for (var i = local.x; i < width; i += LANES) {
            let bits = elements[first + i] & MAGNITUDE;
            if bits >= least {
                // Times 2^(128 - scale), as an addition to the exponent.
                let scaled = bitcast<f32>(bits + ((128u - scale) << 23u));
                sum += opaque(scaled * scaled);
            }
        }
    }
    sums[own] = sum;
    for (var distance = LANES / 2u; distance > 0u; distance /= 2u) {
        workgroupBarrier();
        if local.x < distance {
            sums[own] += sums[own + distance];
        }
    }
    if local.x > 0u || row >= params.rows {
        return;
    }
    var significand_bits = bitcast<u32>(sums[own]);
    if scale == NOT_FINITE {
        significand_bits = select(INFINITY, NAN, top > INFINITY);
    }
    let out = params.norms_base + 2u * row;
    norms[out] = significand_bits;
    norms[out + 1u] = scale;
}
