//! Quotas against brute force, exactly.

use crate::oracle::{Confined, routable};
use lrmoe_plan::ndarray::Array2;
use lrmoe_plan::{Loads, Placement, Profile, QuotaPolicy, QuotaRequest, quotas};
use proptest::prelude::*;

/// The lowest bucket in use above 0; even.
const LOWEST: usize = 120;

/// `whole + root * sqrt(2)`, exactly: neighbouring buckets are a factor of sqrt(2) apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Value {
    whole: i64,
    root: i64,
}

impl Value {
    fn is_more_than(self, other: Self) -> bool {
        let (a, b) = (self.whole - other.whole, self.root - other.root);
        let squares = a * a - 2 * b * b;
        match a.signum() + b.signum() {
            // Of unlike signs, or both zero.
            0 => squares != 0 && (squares > 0) == (a > 0),
            sign => sign > 0,
        }
    }

    fn largest(values: impl Iterator<Item = Self>) -> Option<Self> {
        values.reduce(|best, value| {
            if value.is_more_than(best) {
                value
            } else {
                best
            }
        })
    }
}

/// A small case; the profile has seen exactly the pairs of the step, each in a bucket.
#[derive(Clone, Debug)]
struct Case {
    /// Buckets of each expert's pairs, descending.
    buckets: Vec<Vec<usize>>,
    placement: Placement,
    capacities: Vec<u64>,
    retention: f64,
    floor: u32,
}

impl Case {
    fn loads(&self) -> Loads {
        let counts = self.buckets.iter().map(|b| b.len() as u32).collect();
        Loads::new(Array2::from_shape_vec((1, self.buckets.len()), counts).unwrap()).unwrap()
    }

    fn profile(&self) -> Profile {
        let experts = self.buckets.len();
        let mut counts = vec![0.0; experts * Profile::BUCKETS];
        for (expert, buckets) in self.buckets.iter().enumerate() {
            for bucket in buckets {
                counts[expert * Profile::BUCKETS + bucket] += 2.5;
            }
        }
        Profile::from_counts(experts, counts).unwrap()
    }

    fn value(&self, q: &[u32]) -> Value {
        let mut value = Value { whole: 0, root: 0 };
        for (buckets, &q) in self.buckets.iter().zip(q) {
            for &bucket in buckets[..q as usize].iter().filter(|&&b| b > 0) {
                let half = (bucket - LOWEST) / 2;
                match bucket % 2 {
                    0 => value.whole += 1 << half,
                    _ => value.root += 1 << half,
                }
            }
        }
        value
    }

    /// All vectors within the loads that can be routed.
    fn routable_vectors(&self) -> Vec<Vec<u32>> {
        let n: Vec<u32> = self.buckets.iter().map(|b| b.len() as u32).collect();
        let confined = Confined::new(&self.placement);
        let mut all = Vec::new();
        let mut q = vec![0; n.len()];
        loop {
            if confined.routable(&q, &self.capacities) {
                all.push(q.clone());
            }
            let Some(next) = (0..n.len()).find(|&e| q[e] < n[e]) else {
                return all;
            };
            q[..next].fill(0);
            q[next] += 1;
        }
    }

    /// The floors that belong to `total` retained pairs; none if they sum to more and are therefore scaled, or hang on
    /// rounding errors.
    fn floors(&self, policy: QuotaPolicy, total: u32) -> Option<Vec<u32>> {
        let n: Vec<u32> = self.buckets.iter().map(|b| b.len() as u32).collect();
        let by_load = |halves: u32| {
            let all = 2 * sum(&n).max(1);
            n.iter()
                .map(|&n| (halves * total * n).div_ceil(all))
                .collect()
        };
        let shares: Vec<u32> = match policy {
            QuotaPolicy::Proportional => by_load(2),
            QuotaPolicy::Blend => by_load(1),
            QuotaPolicy::Neyman => self.neyman(total)?,
            _ => by_load(0),
        };
        let floor = |(&n, share): (&u32, u32)| n.min(self.floor.max(share));
        let floors: Vec<u32> = n.iter().zip(shares).map(floor).collect();
        (sum(&floors) <= total).then_some(floors)
    }

    /// Pairs times root mean square score, as shares of `total`; none if that hangs on rounding errors.
    fn neyman(&self, total: u32) -> Option<Vec<u32>> {
        let pooled: Vec<usize> = self.buckets.concat();
        let square = |&bucket: &usize| Profile::bucket_score(bucket).powi(2);
        let weight = |own: &Vec<usize>| {
            let seen = if own.is_empty() { &pooled } else { own };
            let mean = seen.iter().map(square).sum::<f64>() / seen.len().max(1) as f64;
            own.len() as f64 * mean.sqrt()
        };
        let weights: Vec<f64> = self.buckets.iter().map(weight).collect();
        let n: Vec<u32> = self.buckets.iter().map(|b| b.len() as u32).collect();
        let mut shares: Vec<Option<u32>> = vec![None; n.len()];
        loop {
            let open: Vec<usize> = (0..n.len()).filter(|&e| shares[e].is_none()).collect();
            let left = total - shares.iter().flatten().sum::<u32>();
            let of = |values: &[f64]| open.iter().map(|&e| values[e]).collect::<Vec<_>>();
            let mut open_weights = of(&weights);
            if open_weights.iter().all(|&w| w == 0.0) {
                open_weights = of(&n.iter().map(|&n| f64::from(n)).collect::<Vec<_>>());
            }
            let given = nearest(left, &open_weights)?;
            let over = |(&e, &share): (&usize, &u32)| share > n[e];
            let settled = !open.iter().zip(&given).any(over);
            for (&e, &share) in open.iter().zip(&given) {
                if settled || share > n[e] {
                    shares[e] = Some(share.min(n[e]));
                }
            }
            if settled {
                return Some(shares.into_iter().flatten().collect());
            }
        }
    }

    fn solve(&self, policy: QuotaPolicy, profile: Option<&Profile>) -> Vec<u32> {
        quotas(&QuotaRequest {
            loads: &self.loads(),
            placement: &self.placement,
            capacities: &self.capacities,
            retention: self.retention,
            policy,
            profile,
            floor: self.floor,
        })
        .unwrap()
        .as_slice()
        .to_vec()
    }
}

fn cases() -> impl Strategy<Value = Case> {
    (1usize..=4, 1usize..=3).prop_flat_map(|(experts, ranks)| {
        let bucket = prop_oneof![1 => Just(0usize), 4 => LOWEST..LOWEST + 6];
        (
            prop::collection::vec(prop::collection::vec(bucket, 0..=5), experts),
            prop::collection::vec(1usize..1 << ranks, experts),
            prop::collection::vec(0u64..9, ranks),
            prop_oneof![Just(0.0), Just(1.0), 0.0..=1.0],
            0u32..3,
        )
            .prop_map(move |(mut buckets, hosts, capacities, retention, floor)| {
                for buckets in &mut buckets {
                    buckets.sort_by_key(|&b| std::cmp::Reverse(b));
                }
                let on = |rank: usize| {
                    let here = (0..experts).filter(|&e| hosts[e] >> rank & 1 == 1);
                    here.map(|e| e as u32).collect()
                };
                Case {
                    buckets,
                    placement: Placement::new(experts, (0..ranks).map(on).collect()).unwrap(),
                    capacities,
                    retention,
                    floor,
                }
            })
    })
}

pub(crate) fn sum(q: &[u32]) -> u32 {
    q.iter().sum()
}

/// Largest remainder apportionment by weights that are not whole; none if unlike weights leave remainders that are closer than
/// rounding errors.
fn nearest(seats: u32, weights: &[f64]) -> Option<Vec<u32>> {
    let total: f64 = weights.iter().sum();
    if total == 0.0 {
        return Some(vec![0; weights.len()]);
    }
    let exact = |w: &f64| f64::from(seats) * w / total;
    let exact: Vec<f64> = weights.iter().map(exact).collect();
    let mut shares: Vec<u32> = exact.iter().map(|x| (x + 1e-6) as u32).collect();
    let remainder: Vec<f64> = exact
        .iter()
        .zip(&shares)
        .map(|(x, s)| x - f64::from(*s))
        .collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|&a, &b| remainder[b].total_cmp(&remainder[a]));
    let left = (seats - sum(&shares)) as usize;
    let (given, others) = order.split_at(left);
    let alike =
        |a: usize, b: usize| (remainder[a] - remainder[b]).abs() < 1e-6 && weights[a] != weights[b];
    if given.iter().any(|&a| others.iter().any(|&b| alike(a, b))) {
        return None;
    }
    for &e in given {
        shares[e] += 1;
    }
    Some(shares)
}

pub(crate) const POLICIES: [QuotaPolicy; 4] = [
    QuotaPolicy::Proportional,
    QuotaPolicy::Blend,
    QuotaPolicy::Value,
    QuotaPolicy::Neyman,
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn equal_brute_force(case in cases()) {
        let loads = case.loads();
        let n = loads.per_expert();
        let profile = case.profile();
        let vectors = case.routable_vectors();
        let most = vectors.iter().map(|q| sum(q)).max().unwrap();
        let wanted = (case.retention * f64::from(loads.total())).round() as u32;
        let total = wanted.min(most);

        for policy in POLICIES {
            let q = case.solve(policy, Some(&profile));
            prop_assert!(q.iter().zip(n).all(|(q, n)| q <= n));
            prop_assert!(routable(&case.placement, &q, &case.capacities));
            prop_assert_eq!(sum(&q), total);

            let Some(floors) = case.floors(policy, total) else {
                continue;
            };
            let below = |q: &[u32]| -> Vec<u32> {
                q.iter().zip(&floors).map(|(q, f)| *q.min(f)).collect()
            };
            let met = |q: &[u32]| q.iter().zip(&floors).map(|(q, f)| q.min(f)).sum::<u32>();
            let most_met = vectors.iter().map(|q| met(q)).max().unwrap();
            prop_assert_eq!(met(&q), most_met);
            let best = vectors.iter().filter(|v| met(v) == most_met);
            let best = Value::largest(best.map(|v| case.value(&below(v))));
            prop_assert_eq!(Some(case.value(&below(&q))), best);
            if met(&q) == sum(&floors) {
                let best = vectors.iter().filter(|v| sum(v) == total && met(v) == met(&q));
                let best = Value::largest(best.map(|v| case.value(v)));
                prop_assert_eq!(Some(case.value(&q)), best);
            }
        }
    }
}
