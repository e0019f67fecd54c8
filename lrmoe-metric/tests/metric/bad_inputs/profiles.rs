//! Profiles of scores.

use lrmoe_metric::{Error, Profile, Score, Solo, score};

use super::{expect, length, with_pairs};

#[test]
fn profiles() {
    let stored = |experts, counts: Vec<f32>| {
        Profile::from_counts(experts, counts).map(|profile| profile.experts())
    };
    let with = |at: usize, count: f32| {
        let mut counts = vec![0.0; 2 * Profile::BUCKETS];
        counts[at] = count;
        counts
    };
    let refused = |expert, bucket, count| {
        Err(Error::ProfileCount {
            expert,
            bucket,
            count,
        })
    };
    let cases = [
        ("no experts", stored(0, vec![]), Ok(0)),
        (
            "one count short",
            stored(2, vec![0.0; 511]),
            length("profile counts", 511, 512),
        ),
        // 2^56 times 256 is 0 in 64 bits.
        (
            "a product past usize",
            stored(1 << 56, vec![]),
            length("profile counts", 0, usize::MAX),
        ),
        ("largest count", stored(2, with(9, f32::MAX)), Ok(2)),
        (
            "infinite",
            stored(2, with(511, f32::INFINITY)),
            refused(1, 255, f32::INFINITY),
        ),
        ("negative", stored(2, with(3, -1.0)), refused(0, 3, -1.0)),
    ];
    for (case, found, expected) in cases {
        expect(case, found, expected);
    }

    let seen = Profile::from_counts(2, vec![f32::MAX; 2 * Profile::BUCKETS]).unwrap();
    let moved = seen.recalibrated(&[1, u32::MAX], 1.0).unwrap();
    assert!(
        moved.to_counts().iter().all(|count| count.is_finite()),
        "counts past f32"
    );
    expect(
        "loads",
        seen.recalibrated(&[1; 3], 1.0),
        length("loads", 3, 2),
    );
    expect(
        "alpha",
        seen.recalibrated(&[1; 2], f64::INFINITY),
        Err(Error::Recalibration {
            alpha: f64::INFINITY,
        }),
    );
    let nothing = Profile::new(0);
    expect(
        "no experts to recalibrate",
        nothing.recalibrated(&[], 1.0),
        Ok(nothing.clone()),
    );

    with_pairs(|pairs| {
        let scores = score(Score::Gate, pairs, None, None, &mut Solo).unwrap();
        let mut other = Profile::new(3);
        let found = other.observe(pairs, &scores, 0.5, &mut Solo);
        expect(
            "experts",
            found,
            Err(Error::ProfileExperts {
                profile: 3,
                pairs: 2,
            }),
        );
        for decay in [f32::NAN, f32::INFINITY, 1.0, -f32::MIN_POSITIVE] {
            let found = Profile::new(2).observe(pairs, &scores, decay, &mut Solo);
            expect("decay", found, Err(Error::Decay { decay }));
        }
    });
}
