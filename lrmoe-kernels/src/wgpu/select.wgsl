// Selection on keys: a radix select per expert, on the keys and then, where equal keys are cut, on pair ids; and a stable compaction.

struct Params {
    first_group: u32,
    zero: u32,
    pairs: u32,
    // Local id of the first pair of this dispatch.
    first_pair: u32,
    // The experts of this dispatch: their number, and the first of them.
    experts: u32,
    first_expert: u32,
    // The bits of this round: their lowest, their number, and whether there were none before.
    low: u32,
    bits: u32,
    is_first: u32,
    // Complements of pair ids are taken within this mask.
    pair_mask: u32,
    ids_base: u32,
    keys_base: u32,
    cuts_base: u32,
    ties_base: u32,
    counts_base: u32,
    // Number of blocks, and the first of this dispatch.
    blocks: u32,
    first_block: u32,
    // The kept pairs that this dispatch may write: from, to.
    kept_start: u32,
    kept_end: u32,
    kept_base: u32,
}

// x: bits of the boundary found so far; y: how many of what has them are to be kept, from the largest; z: how many have them;
// w: what is to be done (below).
alias Cut = vec4<u32>;

const KEEP_NONE: u32 = 0u;
const KEEP_ALL: u32 = 1u;
// Values of w from here on: the boundary is looked for.
const KEEP_EQUAL: u32 = 2u;
const KEEP_SOME_EQUAL: u32 = 3u;
const DROP_EQUAL: u32 = 4u;

const BLOCK: u32 = 1024u;
const PER_THREAD: u32 = 4u;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> ids: array<i32>;
@group(0) @binding(2) var<storage, read> keys: array<u32>;
// [experts], by key.
@group(0) @binding(3) var<storage, read> cuts: array<Cut>;
// [experts], by complement of the pair id among equal keys.
@group(0) @binding(4) var<storage, read> ties: array<Cut>;
// [experts, 2^bits].
@group(0) @binding(5) var<storage, read_write> counts: array<atomic<u32>>;
// What a round refines: cuts or ties.
@group(0) @binding(6) var<storage, read_write> refined: array<Cut>;
// Kept pairs of each block, then where they go.
@group(0) @binding(7) var<storage, read_write> blocks: array<u32>;
// Per expert the largest key that is not kept.
@group(0) @binding(8) var<storage, read_write> next: array<atomic<u32>>;
@group(0) @binding(9) var<storage, read_write> kept: array<u32>;
@group(0) @binding(10) var<storage, read> plain_counts: array<u32>;

var<workgroup> partial: array<u32, 256>;

// The expert of a pair counted from the first of this dispatch; past the last if it is masked or of another dispatch.
fn expert_of(pair: u32) -> u32 {
    return bitcast<u32>(ids[params.ids_base + pair]) - params.first_expert;
}

fn count(expert: u32, value: u32, prefix: u32) {
    if params.is_first != 0u || (value >> (params.low + params.bits)) == prefix {
        let bucket = (value >> params.low) & ((1u << params.bits) - 1u);
        atomicAdd(&counts[params.counts_base + (expert << params.bits) + bucket], 1u);
    }
}

// Counts keys by expert and bucket.
@compute @workgroup_size(256)
fn count_keys(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let pair = (params.first_group + group.x) * 256u + local;
    if pair >= params.pairs {
        return;
    }
    let expert = expert_of(pair);
    if expert >= params.experts {
        return;
    }
    let cut = cuts[params.cuts_base + expert];
    if cut.w >= KEEP_EQUAL {
        count(expert, keys[params.keys_base + pair], cut.x);
    }
}

// Counts pairs whose key is the boundary by the complement of their ids: the smallest id is the largest.
@compute @workgroup_size(256)
fn count_ties(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let pair = (params.first_group + group.x) * 256u + local;
    if pair >= params.pairs {
        return;
    }
    let expert = expert_of(pair);
    if expert >= params.experts {
        return;
    }
    let cut = cuts[params.cuts_base + expert];
    if cut.w == KEEP_SOME_EQUAL && keys[params.keys_base + pair] == cut.x {
        let value = (params.first_pair + pair) ^ params.pair_mask;
        count(expert, value, ties[params.ties_base + expert].x);
    }
}

// Per expert, one a workgroup, the bucket of the item that is last kept.
@compute @workgroup_size(256)
fn descend(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let expert = params.first_group + group.x;
    let per_thread = (1u << params.bits) / 256u;
    let first = params.counts_base + (expert << params.bits);
    var sum = 0u;
    for (var i = 0u; i < per_thread; i += 1u) {
        sum += plain_counts[first + local * per_thread + i];
    }
    partial[local] = sum;
    workgroupBarrier();
    if local > 0u {
        return;
    }
    var cut = refined[params.cuts_base + expert];
    if cut.w < KEEP_EQUAL {
        return;
    }
    var thread = 255u;
    while thread > 0u && partial[thread] < cut.y {
        cut.y -= partial[thread];
        thread -= 1u;
    }
    var bucket = (thread + 1u) * per_thread - 1u;
    while bucket > 0u && plain_counts[first + bucket] < cut.y {
        cut.y -= plain_counts[first + bucket];
        bucket -= 1u;
    }
    cut.x = (cut.x << params.bits) | bucket;
    cut.z = plain_counts[first + bucket];
    refined[params.cuts_base + expert] = cut;
}

@group(0) @binding(11) var<storage, read_write> started: array<Cut>;

// On one rank: where equal keys are cut, the first pairs are kept.
@compute @workgroup_size(256)
fn start_ties(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let expert = (params.first_group + group.x) * 256u + local;
    if expert >= params.experts {
        return;
    }
    let cut = refined[params.cuts_base + expert];
    let tied = cut.w >= KEEP_EQUAL && cut.z > cut.y;
    if tied {
        refined[params.cuts_base + expert].w = KEEP_SOME_EQUAL;
    }
    started[params.ties_base + expert] = Cut(0u, cut.y, 0u, select(KEEP_NONE, KEEP_SOME_EQUAL, tied));
}

fn is_kept(expert: u32, pair: u32) -> bool {
    let cut = cuts[expert];
    if cut.w <= KEEP_ALL {
        return cut.w == KEEP_ALL;
    }
    let key = keys[params.keys_base + pair];
    if key != cut.x || cut.w == DROP_EQUAL {
        return key > cut.x;
    }
    return cut.w == KEEP_EQUAL || (params.first_pair + pair) <= (ties[expert].x ^ params.pair_mask);
}

// Counts the kept pairs of each block, and finds the largest keys that are not kept.
@compute @workgroup_size(256)
fn count_kept(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let block = params.first_group + group.x;
    var sum = 0u;
    for (var i = 0u; i < PER_THREAD; i += 1u) {
        let pair = block * BLOCK + local * PER_THREAD + i;
        if pair >= params.pairs {
            break;
        }
        let expert = expert_of(pair);
        if expert >= params.experts {
            continue;
        }
        if is_kept(expert, pair) {
            sum += 1u;
        } else {
            let key = keys[params.keys_base + pair];
            if key > atomicLoad(&next[expert]) {
                atomicMax(&next[expert], key);
            }
        }
    }
    let before = sum_before(local, sum);
    if local == 255u {
        blocks[params.first_block + block] = before + sum;
    }
}

// The sum of the values of the threads before this one.
fn sum_before(local: u32, value: u32) -> u32 {
    partial[local] = value;
    for (var distance = 1u; distance < 256u; distance *= 2u) {
        workgroupBarrier();
        var other = 0u;
        if local >= distance {
            other = partial[local - distance];
        }
        workgroupBarrier();
        partial[local] += other;
    }
    workgroupBarrier();
    let before = partial[local] - value;
    workgroupBarrier();
    return before;
}

// One workgroup: counts of blocks to where each block begins; the sum of all after the last.
@compute @workgroup_size(256)
fn place_blocks(@builtin(local_invocation_index) local: u32) {
    var start = 0u;
    for (var first = 0u; first < params.blocks; first += 256u) {
        let block = first + local;
        var value = 0u;
        if block < params.blocks {
            value = blocks[block];
        }
        let before = sum_before(local, value);
        if block < params.blocks {
            blocks[block] = start + before;
        }
        if local == 255u {
            partial[0] = before + value;
        }
        start += workgroupUniformLoad(&partial[0]);
    }
    if local == 0u {
        blocks[params.blocks] = start;
    }
}

// Writes the ids of the kept pairs, ascending.
@compute @workgroup_size(256)
fn write_kept(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let block = params.first_group + group.x;
    var sum = 0u;
    var flags = 0u;
    for (var i = 0u; i < PER_THREAD; i += 1u) {
        let pair = block * BLOCK + local * PER_THREAD + i;
        if pair >= params.pairs {
            break;
        }
        let expert = expert_of(pair);
        if expert < params.experts && is_kept(expert, pair) {
            sum += 1u;
            flags |= 1u << i;
        }
    }
    var to = blocks[params.first_block + block] + sum_before(local, sum);
    for (var i = 0u; i < PER_THREAD; i += 1u) {
        if (flags & (1u << i)) != 0u {
            if to >= params.kept_start && to < params.kept_end {
                kept[params.kept_base + to - params.kept_start] = params.first_pair + block * BLOCK + local * PER_THREAD + i;
            }
            to += 1u;
        }
    }
}
