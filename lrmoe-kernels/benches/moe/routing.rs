//! A routing law, the same as the peers', and random numbers for it.

/// splitmix64.
#[derive(Debug)]
pub(super) struct Random(pub(super) u64);

impl Random {
    /// Uniform in (0, 1).
    pub(super) fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (((z ^ (z >> 31)) >> 12) as f64 + 0.5) / (1_u64 << 52) as f64
    }

    /// About normal, of variance 1.
    pub(super) fn normal(&mut self) -> f32 {
        let sum: f64 = (0..4).map(|_| self.unit() - 0.5).sum();
        (sum * 3_f64.sqrt()) as f32
    }
}

/// Pairs grouped by expert.
#[derive(Debug)]
pub(super) struct Routing {
    /// `[experts + 1]`.
    pub(super) offsets: Vec<usize>,
    /// Token of each row.
    pub(super) tokens: Vec<usize>,
    /// Row of each pair, `[tokens, top_k]`.
    pub(super) rows: Vec<usize>,
}

/// Top-k of Zipf weights with Gumbel noise.
pub(super) fn route(
    [tokens, experts, top_k]: [usize; 3],
    zipf: f64,
    random: &mut Random,
) -> Routing {
    let mut chosen = vec![vec![]; experts];
    for token in 0..tokens {
        let mut keys: Vec<_> = (0..experts)
            .map(|e| {
                let weight = -zipf * ((e + 1) as f64).ln();
                (weight - (-random.unit().ln()).ln(), e)
            })
            .collect();
        keys.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (slot, (_, e)) in keys[..top_k].iter().enumerate() {
            chosen[*e].push((token, slot));
        }
    }
    let mut routing = Routing {
        offsets: vec![0],
        tokens: vec![],
        rows: vec![0; tokens * top_k],
    };
    for pairs in chosen {
        for (token, slot) in pairs {
            routing.rows[token * top_k + slot] = routing.tokens.len();
            routing.tokens.push(token);
        }
        routing.offsets.push(routing.tokens.len());
    }
    routing
}
