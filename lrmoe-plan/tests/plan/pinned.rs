//! Same request, same placement: on every machine, and in every version that does not mean to change it.
//!
//! Other tests say what a placement must be; of the many that are as good, this one says which is found. A change of a policy that is
//! meant changes its figures here, and then those of `docs/replay.md` are to be made anew.

use lrmoe_plan::ndarray::Array2;
use lrmoe_plan::{
    Fixed, FixedReplicas, FlexMoe, Loads, Lrmoe, PlacementPolicy, PlacementRequest, Symi, Topology,
};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Slots of each rank, ranks a node, experts.
const WORLDS: [(&[u32], usize, usize); 16] = [
    // To the last slot, or almost.
    (&[3; 3], 3, 9),
    (&[4; 3], 1, 11),
    (&[5; 3], 3, 15),
    (&[3; 4], 2, 12),
    (&[4; 6], 6, 21),
    (&[3; 8], 4, 23),
    (&[4; 20], 4, 70),
    (&[5; 24], 8, 115),
    (&[4; 12], 4, 40),
    (&[3; 7], 7, 17),
    // One slot a rank to spare, or almost.
    (&[4; 6], 3, 19),
    (&[5; 8], 4, 32),
    (&[2; 16], 4, 24),
    // Uneven slots.
    (&[1, 6, 3, 2, 5, 0, 4], 3, 16),
    (&[9, 2, 9, 2, 9, 2, 9, 2], 2, 40),
    (&[2, 8, 3, 7, 4, 6, 5, 5, 9, 1], 5, 48),
];

/// Of the placements in each world.
const DIGESTS: [(&str, [u32; 16]); 5] = [
    (
        "lrmoe",
        [
            0xe1c2_6c09,
            0xb6fb_c1f3,
            0x2d4f_45a5,
            0x369d_2aa5,
            0x9605_1187,
            0x260d_a6a9,
            0x987f_0715,
            0x71b2_516f,
            0x9f06_920b,
            0x2ac5_2906,
            0x3459_ff3c,
            0xbbcd_b4dc,
            0xe956_d33d,
            0x03d3_e546,
            0x2cde_10da,
            0x13b3_c863,
        ],
    ),
    (
        "lrmoe, 0.2",
        [
            0xd6e6_e263,
            0xdf2c_e126,
            0xabb7_24a9,
            0x7464_3989,
            0x0601_adb5,
            0x6c64_f992,
            0x07bc_eb91,
            0x09b0_daf7,
            0x6daf_9fce,
            0xd615_c881,
            0x5b34_6891,
            0xe99d_d5b6,
            0x7753_1785,
            0x1259_0efb,
            0x9ab0_ff43,
            0x28af_e217,
        ],
    ),
    (
        "symi",
        [
            0xaf49_1f6d,
            0x6c57_d56c,
            0x1ec3_875d,
            0xc953_3245,
            0xcfdd_301d,
            0x63f8_8dc3,
            0xbfeb_5e2f,
            0x68fe_edf2,
            0x32fc_43f9,
            0x5c38_90c9,
            0x4cf7_5ed5,
            0x04b5_7f0d,
            0x95ec_63ee,
            0xa873_6615,
            0xf2e4_46b9,
            0x3cae_a3cb,
        ],
    ),
    (
        "flexmoe",
        [
            0x745a_535b,
            0x8793_251c,
            0x6fa0_3c1f,
            0x0736_5a3b,
            0xab30_def6,
            0x422d_880b,
            0x865e_3835,
            0x2b2d_d83b,
            0x1cf6_ecc1,
            0x7b0a_c7e8,
            0x3612_e634,
            0x6f06_b63d,
            0xf504_6e6a,
            0x0c90_1d06,
            0x67eb_1efe,
            0xda4d_aaba,
        ],
    ),
    (
        "fixed-replicas",
        [
            0xec31_186d,
            0x01a4_11b0,
            0xcce1_2dfb,
            0xf7af_a37f,
            0x3056_051e,
            0xc042_358b,
            0x9013_e939,
            0x48ac_4248,
            0xe44c_3209,
            0x1b37_7ae6,
            0x8e6a_a0f2,
            0x9bda_7c06,
            0xe202_5138,
            0xd818_37ec,
            0x75c4_0f44,
            0x1e8c_0202,
        ],
    ),
];

/// Pairs of each expert from each rank: few hot experts and many cold ones, without pairs some of them.
fn draw(rng: &mut ChaCha8Rng, ranks: usize, experts: usize) -> Array2<u32> {
    let heat: Vec<u32> = (0..experts).map(|_| 1 << (rng.next_u32() % 11)).collect();
    Array2::from_shape_fn((ranks, experts), |(_, expert)| {
        rng.next_u32() % heat[expert]
    })
}

/// A digest of the placements of 100 steps, each on loads that have drifted and now and then are others.
fn digest((slots, per_node, experts): (&[u32], usize, usize), policy: &dyn PlacementPolicy) -> u32 {
    let ranks = slots.len();
    let topology = Topology::new(ranks, per_node).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let mut counts = draw(&mut rng, ranks, experts);
    let mut previous = Fixed::placement(experts, ranks).unwrap();
    // FNV-1a, of words.
    let mut digest = 0x811c_9dc5_u32;
    let mut add = |value: u32| digest = (digest ^ value).wrapping_mul(0x0100_0193);
    for step in 0..100 {
        let fresh = draw(&mut rng, ranks, experts);
        for (count, fresh) in counts.iter_mut().zip(fresh) {
            if step % 8 == 7 || rng.next_u32().is_multiple_of(16) {
                *count = fresh;
            }
        }
        let placement = policy
            .place(&PlacementRequest {
                loads: &Loads::new(counts.clone()).unwrap(),
                previous: &previous,
                slots,
                topology: &topology,
            })
            .unwrap();
        for rank in 0..ranks {
            placement
                .local_experts(rank)
                .iter()
                .copied()
                .for_each(&mut add);
            add(u32::MAX);
        }
        previous = placement;
    }
    digest
}

#[test]
fn placements_stay_the_same() {
    let policies: [(&str, &dyn PlacementPolicy); 5] = [
        ("lrmoe", &Lrmoe::default()),
        ("lrmoe, 0.2", &Lrmoe::new(0.2).unwrap()),
        ("symi", &Symi),
        ("flexmoe", &FlexMoe),
        ("fixed-replicas", &FixedReplicas),
    ];
    let found = policies.map(|(name, policy)| (name, WORLDS.map(|world| digest(world, policy))));
    assert_eq!(found, DIGESTS);
}
