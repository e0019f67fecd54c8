use half::bf16;

use super::*;
use crate::{CompactRows, Memory, cuda::Buffer};

fn run(name: &str, blocks: u32, values: &mut [u32], count: u64) -> Result<(), String> {
    let cuda = Cuda::emulated();
    let buffer = cuda.upload(values).unwrap();
    let parameters = [cuda.address(&buffer).unwrap(), count];
    // SAFETY: as in probe.cu; the callers give as many values as their kernel reaches.
    let result = unsafe { launch(name, blocks, &parameters) };
    cuda.read(&buffer, values).unwrap();
    result.map_err(|error| error.to_string())
}

#[test]
fn divergence_is_reported() {
    let refused = |reason: &str| Err(format!("the driver refuses launching a kernel: {reason}"));
    let mut values = [0; 256];
    let found = run("probe_divergent_barrier", 2, &mut values, 100);
    let expected =
        "divergence in block 0: thread 0 is at the barrier of line 13, thread 100 has ended";
    assert_eq!(found, refused(expected));
    let found = run("probe_two_barriers", 1, &mut values, 7);
    let expected = "divergence in block 0: thread 0 is at the barrier of line 20, thread 7 is at the barrier of line 22";
    assert_eq!(found, refused(expected));
    let found = run("probe_divergent_exchange", 1, &mut values, 40);
    let expected =
        "divergence in block 0: thread 32 is in the exchange of line 29, thread 0 has ended";
    assert_eq!(found, refused(expected));
    // What was left in the middle does not matter.
    run("probe_two_barriers", 3, &mut values, 256).unwrap();
    assert_eq!(run("probe_divergent_exchange", 1, &mut values, 256), Ok(()));
    assert!((0..256).all(|thread| values[thread as usize] == thread ^ 1));
}

#[test]
fn shared_memory_is_seen_after_a_barrier() {
    let mut values: Vec<u32> = (0..768).collect();
    run("probe_shared", 3, &mut values, 0).unwrap();
    let before = |at: u32| at / 256 * 256 + (at + 255) % 256;
    assert!((0..768).all(|at| values[at as usize] == before(at)));
}

#[test]
fn launches_are_checked() {
    let mut values = [0];
    let error = run("no_kernel", 1, &mut values, 0).unwrap_err();
    assert!(error.ends_with("there is no such kernel"), "{error}");
    // SAFETY: refused before anything is reached.
    let error = unsafe { launch("probe_place", 1, &[0; 3]) }.unwrap_err();
    let expected = "the kernel takes 16 bytes of parameters, not 24";
    assert!(error.to_string().ends_with(expected), "{error}");
}

#[test]
fn places_pass_32_bits() {
    let mut values = [0; 2];
    run("probe_place", 1, &mut values, 3 << 30).unwrap();
    let found = u64::from(values[1]) << 32 | u64::from(values[0]);
    assert_eq!(found, (3 << 30) * (3 << 30) + 3);
}

/// Rows that begin past 2^32 bytes and past 2^32 elements, in memory that is not touched elsewhere.
#[test]
fn rows_past_32_bits_are_gathered() {
    let cuda = Cuda::emulated();
    let (count, width) = ((1 << 22) + 8, 1024);
    let mut rows = cuda.upload(&[0_u32]).unwrap();
    cuda.resize(&mut rows, count * width).unwrap();
    let index = [(1 << 20) + 1, (1 << 22) + 3, 1];
    for row in index {
        let values: Vec<u32> = (0..width as u32).map(|i| row ^ i << 8).collect();
        let at = cuda.address(&rows).unwrap() + 4 * u64::from(row) * width as u64;
        // SAFETY: the row is in the buffer.
        unsafe { Emulator.write(bytemuck::cast_slice(&values), at) }.unwrap();
    }
    let places = cuda.row_index(&index, count).unwrap();
    let mut out = Default::default();
    cuda.gather(&rows, width, &places, &mut out).unwrap();
    let out = cuda.download(&out).unwrap();
    for (row, values) in index.iter().zip(out.chunks_exact(width)) {
        assert!((0..).zip(values).all(|(i, &value)| value == row ^ i << 8));
    }
}

/// In a process of its own, as the fault ends it.
#[test]
fn accesses_out_of_bounds_end_the_program() {
    const NAME: &str = "LRMOE_EMU_FAULT";
    if std::env::var_os(NAME).is_some() {
        let _ = run("probe_out_of_bounds", 1, &mut [0; 4], 4);
        return;
    }
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args([
        "--exact",
        "cuda::emu::tests::accesses_out_of_bounds_end_the_program",
        "--nocapture",
    ]);
    let output = command.env(NAME, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    let expected = "access out of bounds in kernel probe_out_of_bounds, block 0, thread 0";
    assert!(said.contains(expected), "{said}");
}

/// bf16 as the words of a buffer, with room for whole ones.
fn packed(values: &[bf16]) -> Vec<u32> {
    let pair = |pair: &[bf16]| {
        let high = pair.get(1).map_or(0, |value| value.to_bits());
        u32::from(pair[0].to_bits()) | u32::from(high) << 16
    };
    values.chunks(2).map(pair).collect()
}

fn unpacked(words: &[u32], len: usize) -> Vec<bf16> {
    let two = |word: &u32| [*word as u16, (*word >> 16) as u16].map(bf16::from_bits);
    words.iter().flat_map(two).take(len).collect()
}

fn random(len: usize, mut state: u64) -> Vec<bf16> {
    let mut number = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        bf16::from_f32((state >> 40) as f32 / (1 << 23) as f32 - 1.0)
    };
    (0..len).map(|_| number()).collect()
}

/// Grouped products on tensor cores: groups of rows, each with a matrix of n by k.
struct Products {
    groups: Vec<usize>,
    n: usize,
    k: usize,
}

impl Products {
    fn rows(&self) -> usize {
        self.groups.iter().sum()
    }

    fn table(&self) -> Vec<u32> {
        let (mut tiles, mut start) = (0, 0);
        let mut table = Vec::new();
        for rows in &self.groups {
            for number in [tiles, start, start + rows, 0] {
                table.extend([number as u32, 0]);
            }
            tiles += rows.div_ceil(128);
            start += rows;
        }
        table
    }

    /// Runs a kernel on operands; `c` holds what its results are put into.
    fn run(&self, name: &str, [a, b]: [&[bf16]; 2], c: &mut [u32], [blocks, m]: [usize; 2]) {
        let cuda = Cuda::emulated();
        let words = |words: &[u32]| cuda.upload(words).unwrap();
        let buffers: [Buffer<u32>; 4] = [
            words(&packed(a)),
            words(&packed(b)),
            words(c),
            words(&self.table()),
        ];
        let mut parameters: Vec<_> = buffers
            .iter()
            .map(|buffer| cuda.address(buffer).unwrap())
            .collect();
        let sizes = [self.groups.len(), m, self.n, self.k, 0];
        parameters.extend(sizes.map(|size| size as u64));
        // SAFETY: as in tensor.cu; the callers' operands are of these sizes.
        unsafe { launch(name, blocks as u32, &parameters) }.unwrap();
        cuda.read(&buffers[2], c).unwrap();
    }

    /// Blocks for rows of results of this width.
    fn blocks(&self, width: usize) -> usize {
        let tiles: usize = self.groups.iter().map(|rows| rows.div_ceil(128)).sum();
        tiles * width.div_ceil(128)
    }

    fn group_of(&self, row: usize) -> usize {
        let mut end = 0;
        let ends = self.groups.iter().map(|rows| {
            end += rows;
            end
        });
        ends.take_while(|&end| end <= row).count()
    }

    fn check(&self) {
        let (rows, n, k, count) = (self.rows(), self.n, self.k, self.groups.len());
        let (a, matrices) = (random(rows * k, 1), random(count * n * k, 2));
        let nan = bf16::NAN;
        let wide = |value: bf16| f64::from(value.to_f32());
        let close = |what: &str, found: f64, expected: f64, size: f64, rounding: f64| {
            let bound = rounding * expected.abs() + 1e-6 * size;
            assert!(
                (found - expected).abs() <= bound,
                "{what}: {found}, expected {expected}"
            );
        };
        let mut c = packed(&vec![nan; rows * n]);
        self.run("project_bf16", [&a, &matrices], &mut c, [self.blocks(n), 0]);
        let out = unpacked(&c, rows * n);
        for row in 0..rows {
            let matrix = &matrices[self.group_of(row) * n * k..][..n * k];
            for column in 0..n {
                let terms = (0..k).map(|i| wide(a[row * k + i]) * wide(matrix[column * k + i]));
                let found = wide(out[row * n + column]);
                close("project", found, terms.sum(), k as f64, 1.0 / 256.0);
            }
        }

        // The other way: rows of n times the same matrices.
        let back = Self {
            groups: self.groups.clone(),
            n: k,
            k: n,
        };
        let left = random(rows * n, 3);
        let mut c = packed(&vec![nan; rows * k]);
        let blocks = [self.blocks(k), 0];
        back.run("project_back_bf16", [&left, &matrices], &mut c, blocks);
        let out = unpacked(&c, rows * k);
        for row in 0..rows {
            let matrix = &matrices[self.group_of(row) * n * k..][..n * k];
            for column in 0..k {
                let terms = (0..n).map(|i| wide(left[row * n + i]) * wide(matrix[i * k + column]));
                let found = wide(out[row * k + column]);
                close("project back", found, terms.sum(), n as f64, 1.0 / 256.0);
            }
        }

        // Weight gradients: of matrices of n by k, from rows of n and rows of k.
        let mut sums = vec![f32::NAN.to_bits(); count * n * k];
        let blocks = [count * n.div_ceil(128) * k.div_ceil(128), n];
        back.run("weight_gradients_bf16", [&left, &a], &mut sums, blocks);
        for group in 0..count {
            let own: Vec<_> = (0..rows)
                .filter(|&row| self.group_of(row) == group)
                .collect();
            for (at, sum) in sums[group * n * k..][..n * k].iter().enumerate() {
                let (i, j) = (at / k, at % k);
                let terms = own
                    .iter()
                    .map(|row| wide(left[row * n + i]) * wide(a[row * k + j]));
                let found = f64::from(f32::from_bits(*sum));
                close(
                    "weight gradients",
                    found,
                    terms.sum(),
                    own.len() as f64,
                    0.0,
                );
            }
        }
    }
}

/// Odd sizes, which are read element by element; sizes of whole pieces of 16 bytes; empty groups; more than a tile.
#[test]
fn tensor_products() {
    for (groups, n, k) in [
        (vec![3, 0, 130], 7, 5),
        (vec![0, 1, 17, 0], 136, 40),
        (vec![129], 24, 136),
        (vec![1, 2], 1, 1),
        (vec![0, 0], 9, 8),
    ] {
        Products { groups, n, k }.check();
    }
}
