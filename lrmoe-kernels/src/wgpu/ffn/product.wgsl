// Grouped products: tiles of 64 by 64 results, 256 threads with 4 by 4 each. A result is the sum of its terms in ascending order of k.

struct Params {
    first_group: u32,
    zero: u32,
    groups: u32,
    // Results: columns, and for weight gradients rows; terms, but for weight gradients.
    m: u32,
    n: u32,
    k: u32,
    // 1: the results are added to. For weight gradients, the table says so.
    accumulate: u32,
    // Words from the start of a binding to its first element, and from one to the next along a dimension.
    a_base: u32,
    a_m: u32,
    a_k: u32,
    b_base: u32,
    b_group: u32,
    b_k: u32,
    b_n: u32,
    c_base: u32,
    c_group: u32,
    c_m: u32,
}

struct Group {
    // Tiles of rows of the groups before; for weight gradients 1 where the results are added to.
    tile: u32,
    // Rows.
    start: u32,
    end: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> a: array<f32>;
@group(0) @binding(2) var<storage, read> b: array<f32>;
@group(0) @binding(3) var<storage, read_write> c: array<f32>;
@group(0) @binding(4) var<storage, read> table: array<Group>;

// Along which dimension neighbours are next to each other in memory: then they are read by neighbouring threads.
override A_ALONG_K: bool = true;
override B_ALONG_K: bool = true;

const TILE: u32 = 64u;
const STEP: u32 = 16u;

var<workgroup> a_tile: array<f32, 1024>;
var<workgroup> b_tile: array<f32, 1024>;

// Where a tile's operands begin, and how much of it there is.
struct Tile {
    a: u32,
    b: u32,
    c: u32,
    m: u32,
    n: u32,
    k: u32,
}

// (k, m or n) of the i-th of four elements that a thread brings.
fn place(local: u32, i: u32, along_k: bool) -> vec2<u32> {
    if along_k {
        return vec2<u32>(local % STEP, local / STEP + i * (256u / STEP));
    }
    return vec2<u32>(local / TILE + i * (256u / TILE), local % TILE);
}

fn bring(tile: Tile, k0: u32, local: u32) {
    for (var i = 0u; i < 4u; i += 1u) {
        let at = place(local, i, A_ALONG_K);
        var value = 0.0;
        if k0 + at.x < tile.k && at.y < tile.m {
            value = a[tile.a + (k0 + at.x) * params.a_k + at.y * params.a_m];
        }
        a_tile[at.x * TILE + at.y] = value;
    }
    for (var i = 0u; i < 4u; i += 1u) {
        let at = place(local, i, B_ALONG_K);
        var value = 0.0;
        if k0 + at.x < tile.k && at.y < tile.n {
            value = b[tile.b + (k0 + at.x) * params.b_k + at.y * params.b_n];
        }
        b_tile[at.x * TILE + at.y] = value;
    }
}

fn multiply(tile: Tile, accumulate: bool, local: u32) {
    let row = local / 16u * 4u;
    let column = local % 16u * 4u;
    var sums: array<vec4<f32>, 4>;
    if accumulate {
        for (var i = 0u; i < 4u; i += 1u) {
            for (var j = 0u; j < 4u; j += 1u) {
                if row + i < tile.m && column + j < tile.n {
                    sums[i][j] = c[tile.c + (row + i) * params.c_m + column + j];
                }
            }
        }
    }
    for (var k0 = 0u; k0 < tile.k; k0 += STEP) {
        bring(tile, k0, local);
        workgroupBarrier();
        for (var k = 0u; k < STEP; k += 1u) {
            let at = k * TILE + column;
            let right = vec4<f32>(b_tile[at], b_tile[at + 1u], b_tile[at + 2u], b_tile[at + 3u]);
            let left = k * TILE + row;
            sums[0] = fma(vec4<f32>(a_tile[left]), right, sums[0]);
            sums[1] = fma(vec4<f32>(a_tile[left + 1u]), right, sums[1]);
            sums[2] = fma(vec4<f32>(a_tile[left + 2u]), right, sums[2]);
            sums[3] = fma(vec4<f32>(a_tile[left + 3u]), right, sums[3]);
        }
        workgroupBarrier();
    }
    for (var i = 0u; i < 4u; i += 1u) {
        for (var j = 0u; j < 4u; j += 1u) {
            if row + i < tile.m && column + j < tile.n {
                c[tile.c + (row + i) * params.c_m + column + j] = sums[i][j];
            }
        }
    }
}

// Rows of groups times the weights of their group: c[row, n] = sum over k of a[row, k] b[group, k, n].
@compute @workgroup_size(256)
fn rows_by_weights(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let number = params.first_group + group.x;
    let across = (params.n + TILE - 1u) / TILE;
    let down = number / across;
    // The last group that begins at this tile or before; groups without rows begin with the next.
    var low = 0u;
    var high = params.groups;
    while high - low > 1u {
        let middle = (low + high) / 2u;
        if table[middle].tile <= down {
            low = middle;
        } else {
            high = middle;
        }
    }
    let row = table[low].start + (down - table[low].tile) * TILE;
    let column = number % across * TILE;
    multiply(
        Tile(
            params.a_base + row * params.a_m,
            params.b_base + low * params.b_group + column * params.b_n,
            params.c_base + row * params.c_m + column,
            min(TILE, table[low].end - row),
            min(TILE, params.n - column),
            params.k,
        ),
        params.accumulate != 0u,
        local,
    );
}

// Weight gradients: c[group, m, n] = sum over the group's rows of a[row, m] b[row, n].
@compute @workgroup_size(256)
fn weight_gradients(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let number = params.first_group + group.x;
    let across = (params.n + TILE - 1u) / TILE;
    let down = (params.m + TILE - 1u) / TILE;
    let instance = number / (across * down);
    let add = table[instance].tile != 0u;
    if add && table[instance].start == table[instance].end {
        return;
    }
    let row = number / across % down * TILE;
    let column = number % across * TILE;
    multiply(
        Tile(
            params.a_base + table[instance].start * params.a_k + row,
            params.b_base + table[instance].start * params.b_k + column,
            params.c_base + instance * params.c_group + row * params.c_m + column,
            min(TILE, params.m - row),
            min(TILE, params.n - column),
            table[instance].end - table[instance].start,
        ),
        add,
        local,
    );
}
