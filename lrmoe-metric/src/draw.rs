/// Names the random numbers of one layer in one step; the same on every rank.
///
/// A pair's number is word 0 of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with the seed as key
/// and (global pair id, step, layer) as counter, so it does not depend on the rank that holds the pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    /// Seed of the run.
    pub seed: u64,
    /// Training step.
    pub step: u32,
    /// Layer of the model.
    pub layer: u32,
}

impl Draw {
    /// 32 random bits each of consecutive pairs, from a global id on.
    pub(crate) fn fill(self, first: u64, bits: &mut [u32]) {
        for (bits, pair) in bits.iter_mut().zip(first..) {
            let counter = [pair as u32, (pair >> 32) as u32, self.step, self.layer];
            *bits = philox(counter, [self.seed as u32, (self.seed >> 32) as u32])[0];
        }
    }
}

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let [a, b, c, d] = counter;
        let left = u64::from(a) * 0xd251_1f53;
        let right = u64::from(c) * 0xcd9e_8d57;
        counter = [
            (right >> 32) as u32 ^ b ^ key[0],
            right as u32,
            (left >> 32) as u32 ^ d ^ key[1],
            left as u32,
        ];
        key = [
            key[0].wrapping_add(0x9e37_79b9),
            key[1].wrapping_add(0xbb67_ae85),
        ];
    }
    counter
}

/// `1/u` for `u = (bits / 2^8 + 1) / 2^24` in (0, 1], within `2^-14` of it and in `[0.9999, 2^24]`, by integer arithmetic alone.
///
/// With v = `2^24 u` shifted left until its top bit is set, and m its top 16 bits, v lies around `(2m + 1) 2^15`; `2^32 / (2m + 1)` is then
/// `1/u` up to a power of two.
pub(crate) fn reciprocal(bits: u32) -> f32 {
    let v = (bits >> 8) + 1;
    let shift = v.leading_zeros();
    let m = (v << shift) >> 16;
    let quotient = u32::MAX / (2 * m + 1);
    let power = f32::from_bits((127 - 23 + shift) << 23);
    quotient as f32 * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_words() {
        let known = [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, words) in known {
            assert_eq!(philox(counter, key), words);
        }
    }

    #[test]
    fn counter_and_key_are_those_of_the_draw() {
        let draw = Draw {
            seed: 0x299f_31d0_a409_3822,
            step: 0x1319_8a2e,
            layer: 0x0370_7344,
        };
        let mut bits = [0; 2];
        draw.fill(0x85a3_08d3_243f_6a87, &mut bits);
        assert_eq!(bits[1], 0xd16c_fe09);
    }

    #[test]
    fn reciprocal_is_near_for_every_u() {
        for v in 1..=1u32 << 24 {
            let exact = f64::from(1 << 24) / f64::from(v);
            let found = reciprocal(((v - 1) << 8) | (v & 0xff));
            let error = (f64::from(found) / exact - 1.0).abs();
            assert!(error < 1.0 / 16384.0, "v {v}: {found} for {exact}");
            assert!((0.9999..=16_777_216.0).contains(&found), "v {v}: {found}");
        }
        // The same everywhere: of `m = 2^15 + 1`, by hand.
        assert_eq!(reciprocal(((1 << 23) + 255) << 8), 65533.0 / 32768.0);
    }
}
