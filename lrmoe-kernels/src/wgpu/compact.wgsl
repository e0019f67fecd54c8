// Rows from place to place, and back to their tokens.

struct Params {
    first_group: u32,
    zero: u32,
    // Of the output: rows, or tokens; or rows that are put to their places.
    rows: u32,
    width: u32,
    // The rows of the input in this dispatch: from, to.
    input_start: u32,
    input_end: u32,
    top_k: u32,
    // The slots in this dispatch, or the rows of the output: from, to.
    slot_start: u32,
    slot_end: u32,
    flags: u32,
    input_base: u32,
    index_base: u32,
    // Of the places too.
    weights_base: u32,
    output_base: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> input: array<u32>;
// Where an output row comes from.
@group(0) @binding(2) var<storage, read> index: array<u32>;
@group(0) @binding(3) var<storage, read_write> output: array<u32>;
// Of the input rows.
@group(0) @binding(4) var<storage, read> weights: array<f32>;

// Where an input row goes.
@group(0) @binding(5) var<storage, read> places: array<u32>;

// Stands for no row.
const NONE: u32 = 0xffffffffu;

// Flags.
const WEIGHTED: u32 = 1u;
const OVERWRITE: u32 = 2u;
const NARROW: u32 = 4u;

// An f32 rounded to bf16, to nearest even, in the upper half of a word.
fn narrowed(bits: u32) -> u32 {
    if (bits & 0x7fffffffu) > 0x7f800000u {
        return (bits & 0xffff0000u) | 0x400000u;
    }
    return (bits + 0x7fffu + ((bits >> 16u) & 1u)) & 0xffff0000u;
}

// x to the bit, but no compiler knows: a sum after it is not contracted with the product before it.
fn opaque(x: f32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) ^ params.zero);
}

@compute @workgroup_size(256)
fn gather(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let at = (params.first_group + group.x) * 256u + local;
    if at >= params.rows * params.width {
        return;
    }
    let row = index[params.index_base + at / params.width];
    if row >= params.input_start && row < params.input_end {
        let source = params.input_base + (row - params.input_start) * params.width;
        output[params.output_base + at] = input[source + at % params.width];
    } else if row == NONE {
        output[params.output_base + at] = 0u;
    }
}

// Input rows to their places in the output.
@compute @workgroup_size(256)
fn put(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let at = (params.first_group + group.x) * 256u + local;
    if at >= params.rows * params.width {
        return;
    }
    let row = index[params.index_base + at / params.width];
    let place = places[params.weights_base + at / params.width];
    if row < params.input_start || row >= params.input_end || place < params.slot_start || place >= params.slot_end {
        return;
    }
    let source = params.input_base + (row - params.input_start) * params.width;
    let to = params.output_base + (place - params.slot_start) * params.width;
    output[to + at % params.width] = input[source + at % params.width];
}

// Adds the rows of each token's slots, in ascending order.
@compute @workgroup_size(256)
fn scatter_add(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let at = (params.first_group + group.x) * 256u + local;
    if at >= params.rows * params.width {
        return;
    }
    let slots = params.index_base + at / params.width * params.top_k;
    var bits = 0u;
    if (params.flags & OVERWRITE) == 0u {
        bits = output[params.output_base + at];
    }
    for (var slot = params.slot_start; slot < params.slot_end; slot += 1u) {
        let row = index[slots + slot];
        if row < params.input_start || row >= params.input_end {
            continue;
        }
        let source = params.input_base + (row - params.input_start) * params.width;
        var value = bitcast<f32>(input[source + at % params.width]);
        if (params.flags & WEIGHTED) != 0u {
            value = opaque(weights[params.weights_base + row - params.input_start] * value);
        }
        bits = bitcast<u32>(bitcast<f32>(bits) + value);
    }
    if (params.flags & NARROW) != 0u {
        bits = narrowed(bits);
    }
    output[params.output_base + at] = bits;
}

@compute @workgroup_size(256)
fn narrow(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let at = (params.first_group + group.x) * 256u + local;
    if at >= params.rows {
        return;
    }
    var bits = input[params.input_base + at];
    if (params.flags & NARROW) != 0u {
        bits = narrowed(bits);
    }
    output[params.output_base + at] = bits;
}
