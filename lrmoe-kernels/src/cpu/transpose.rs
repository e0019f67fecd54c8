//! Squares of a vector's width, transposed in registers.

use super::{isa::Isa, kernel::VECTOR};

/// Words of [`VECTOR`] rows and columns.
pub(super) type Square = [[u32; VECTOR]; VECTOR];

/// Makes rows columns.
#[inline(always)]
pub(super) fn transpose_square(square: &mut Square) {
    #[cfg(target_arch = "x86_64")]
    if Isa::detect() >= Isa::Avx512 {
        // SAFETY: the machine has AVX-512 F.
        unsafe { with_avx512(square) };
        return;
    } else if Isa::detect() >= Isa::Avx2 {
        // SAFETY: the machine has AVX2.
        unsafe { with_avx2(square) };
        return;
    }
    with_halves(square);
}

/// By interleaving rows that are half the height apart, as often as a row has halves.
#[inline(always)]
fn with_halves(square: &mut Square) {
    let mut other = [[0; VECTOR]; VECTOR];
    interleave(square, &mut other);
    interleave(&other, square);
    interleave(square, &mut other);
    interleave(&other, square);
}

#[inline(always)]
fn interleave(from: &Square, to: &mut Square) {
    const HALF: usize = VECTOR / 2;
    for i in 0..HALF {
        let (a, b) = (&from[i], &from[HALF + i]);
        for j in 0..HALF {
            to[2 * i][2 * j] = a[j];
            to[2 * i][2 * j + 1] = b[j];
            to[2 * i + 1][2 * j] = a[HALF + j];
            to[2 * i + 1][2 * j + 1] = b[HALF + j];
        }
    }
}

/// By quarters of the square: two stay where they are, two change places. Within one by pairs of rows, pairs of pairs, and halves of vectors.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2")]
fn with_avx2(square: &mut Square) {
    use std::arch::x86_64::{
        __m256i, _mm256_loadu_si256, _mm256_permute2x128_si256, _mm256_storeu_si256,
        _mm256_unpackhi_epi32, _mm256_unpackhi_epi64, _mm256_unpacklo_epi32, _mm256_unpacklo_epi64,
    };

    const HALF: usize = VECTOR / 2;
    /// Of two vectors the low halves, and the high halves.
    const LOW: i32 = 0x20;
    const HIGH: i32 = 0x31;

    type Quarter = [__m256i; HALF];
    let load = |square: &Square, row: usize, column: usize| -> Quarter {
        // SAFETY: half a row of the square is a vector of 8 words.
        let half =
            |i: usize| unsafe { _mm256_loadu_si256(square[row + i][column..].as_ptr().cast()) };
        std::array::from_fn(half)
    };
    let turn = |rows: Quarter| -> Quarter {
        // Columns c and 4 + c of rows 4 i and on.
        let quads: [[__m256i; 4]; 2] = std::array::from_fn(|quad| {
            let [a, b, c, d] = std::array::from_fn(|i| rows[4 * quad + i]);
            let low = [_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d)];
            let high = [_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d)];
            [
                _mm256_unpacklo_epi64(low[0], low[1]),
                _mm256_unpackhi_epi64(low[0], low[1]),
                _mm256_unpacklo_epi64(high[0], high[1]),
                _mm256_unpackhi_epi64(high[0], high[1]),
            ]
        });
        std::array::from_fn(|column| {
            let [a, b] = quads.map(|quad| quad[column % 4]);
            if column < 4 {
                _mm256_permute2x128_si256::<LOW>(a, b)
            } else {
                _mm256_permute2x128_si256::<HIGH>(a, b)
            }
        })
    };
    let store = |square: &mut Square, row: usize, column: usize, quarter: Quarter| {
        for (i, half) in quarter.into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { _mm256_storeu_si256(square[row + i][column..].as_mut_ptr().cast(), half) };
        }
    };
    for place in [0, HALF] {
        let quarter = turn(load(square, place, place));
        store(square, place, place, quarter);
    }
    let above = turn(load(square, 0, HALF));
    let below = turn(load(square, HALF, 0));
    store(square, HALF, 0, above);
    store(square, 0, HALF, below);
}

/// By 4 rows at a time within the quarters of a vector, then by the quarters of 4 vectors: left to itself the compiler takes the way through memory.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f")]
fn with_avx512(square: &mut Square) {
    use std::arch::x86_64::{
        __m512i, _mm512_loadu_si512, _mm512_shuffle_i32x4, _mm512_storeu_si512,
        _mm512_unpackhi_epi32, _mm512_unpackhi_epi64, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
    };

    /// Of two vectors the quarters 0 and 2, and the quarters 1 and 3.
    const EVEN: i32 = 0b10_00_10_00;
    const ODD: i32 = 0b11_01_11_01;

    // SAFETY: a row is a vector of words.
    let row = |i: usize| unsafe { _mm512_loadu_si512(square[i].as_ptr().cast()) };
    let quads: [[__m512i; 4]; 4] = std::array::from_fn(|quad| {
        let [a, b, c, d] = std::array::from_fn(|i| row(4 * quad + i));
        let low = [_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d)];
        let high = [_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d)];
        [
            _mm512_unpacklo_epi64(low[0], low[1]),
            _mm512_unpackhi_epi64(low[0], low[1]),
            _mm512_unpacklo_epi64(high[0], high[1]),
            _mm512_unpackhi_epi64(high[0], high[1]),
        ]
    });
    for column in 0..4 {
        let [a, b, c, d] = quads.map(|quad| quad[column]);
        let even = [
            _mm512_shuffle_i32x4::<EVEN>(a, b),
            _mm512_shuffle_i32x4::<EVEN>(c, d),
        ];
        let odd = [
            _mm512_shuffle_i32x4::<ODD>(a, b),
            _mm512_shuffle_i32x4::<ODD>(c, d),
        ];
        let columns = [
            _mm512_shuffle_i32x4::<EVEN>(even[0], even[1]),
            _mm512_shuffle_i32x4::<EVEN>(odd[0], odd[1]),
            _mm512_shuffle_i32x4::<ODD>(even[0], even[1]),
            _mm512_shuffle_i32x4::<ODD>(odd[0], odd[1]),
        ];
        for (quarter, values) in columns.into_iter().enumerate() {
            let to = &mut square[4 * quarter + column];
            // SAFETY: as above.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), values) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::array;

    use super::*;
    use crate::cpu::tests::on_every_path;

    #[test]
    fn rows_become_columns() {
        let rows: Square = array::from_fn(|i| array::from_fn(|j| (VECTOR * i + j) as u32));
        let columns: Square = array::from_fn(|i| array::from_fn(|j| rows[j][i]));
        on_every_path(|isa| {
            let mut square = rows;
            transpose_square(&mut square);
            assert_eq!(square, columns, "{isa}");
        });
    }
}
