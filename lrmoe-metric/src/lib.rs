//! Which routed pairs of a mixture-of-experts layer matter most to the expert updates: scores, and their selection within quotas.
//!
//! A *pair* is one (token t, slot j) assignment with expert `expert_ids[t, j]` and gate weight `p = gate_weights[t, j]`; -1 masks it. Its local id is
//! `t * top_k + j`, its global id adds the rank's `first_pair`. The steps, each over all ranks at once:
//!
//! | step | takes | gives |
//! |---|---|---|
//! | [`Pairs::new`] | ids and gate weights `[tokens, k]` | checked pairs; what follows relies on it |
//! | [`squared_norms`] | rows `[n, width]`, f32 | [`SquaredNorm`] `[n]`: of dy and x per token, of h (input of the down projection) or f(x) per pair |
//! | [`score`](score()) | norms | [`Scores`] `[tokens * k]`, squared and scaled by a power of 4 |
//! | [`select`](select()) | scores, quotas `[experts]` | [`Selection`]: ascending local pair ids, weights |
//! | [`rescale`](rescale()) | a selection by [`Method::Top`] | weights that make up, per expert, for what was left out |
//! | [`Profile::observe`] | scores | moving histogram `[experts, 256]` of the scores, for a planner |
//!
//! A forward pass that keeps rows only of pairs that can still be chosen compares them by [`EarlyKey`] before all norms are known.
//!
//! [`select_keys`] is the selection on plain `u32` keys, for scores of your own ([`keys_from_scores`]) or from another device. [`score_into`] and
//! [`Selector`] keep their lists for the next step, which then allocates nothing that grows with the pairs.
//!
//! **Score.** For `y_t = sum_e p_te f_e(x_t)`, the pair's term in the gradient of the down projection is `p dy h^T`, of Frobenius norm exactly
//! `p |dy| |h|`: that is [`Score::DownGrad`]. [`Score`] lists the others, and which norms each takes.
//!
//! **Selection.** Per expert e, over all ranks, exactly `min(quotas[e], n[e])` pairs, ties to the smaller global pair id. [`Method::Priority`] is
//! unbiased: the expected value of weight times kept is 1 for every pair. [`Method::Top`] keeps the largest.
//!
//! **The same everywhere.** Selection works on integer keys alone, and these come from f32 multiplies and adds in a fixed order, integer
//! arithmetic and integer tests: no division, no square root, nothing that a device rounds its own way. So the pairs kept do not depend on
//! the number of threads, of ranks, or on the backend. Values below `2^-125` count as zero, so that flushing subnormals changes nothing.
//! Keys are not sorted: one pass counts them by expert and bucket; a second keeps the pairs above the bucket in which an expert is cut, and
//! sets those in it aside, among which further histograms find the boundary. Across ranks the histograms are summed through [`Exchange`],
//! which the caller implements over its communicator. [`local_quotas`] does without, at some loss.
//!
//! **Limits.** A rank has at most `u32::MAX` pairs, and so have all ranks together (unmasked ones); there are at most `2^31`
//! experts. NaN scores and bad input are typed errors ([`Error`]); an error on one rank ends the call on every rank.
//!
//! **Speed.** 524,288 pairs of 128 experts, half kept, one rank, two threads of a Xeon (Sapphire Rapids, 2026-11-29, medians of `scripts/bench`):
//! [`select_keys`] takes 1.1 ms, with [`keys_from_scores`] 1.4 ms; the best of three formulations in PyTorch 2.13 takes 19 to 21 ms.
//!
//! ```
//! use lrmoe_metric::{Draw, Method, Pairs, Score, Solo, SquaredNorm, score, select};
//! use ndarray::array;
//!
//! // Three tokens, two slots, three experts; the last slot is masked.
//! let ids = array![[0, 1], [1, 0], [1, -1]];
//! let gates = array![[0.75_f32, 0.25], [0.5, 0.5], [1.0, 0.0]];
//! let pairs = Pairs::new(ids.view(), gates.view(), 3, 0)?;
//! assert_eq!(pairs.loads(), [2, 3, 0]);
//!
//! let dy = [[3.0, 4.0], [0.0, 1.0], [1.0, 0.0]].map(|row| SquaredNorm::of(&row));
//! let h = [1.0, 1.0, 1.0, 3.0, 8.0, 0.0].map(|norm| SquaredNorm::of(&[norm]));
//! let scores = score(Score::DownGrad, &pairs, Some(&dy), Some(&h), &mut Solo)?;
//!
//! let draw = Draw { seed: 1, step: 0, layer: 0 };
//! let kept = select(Method::Top, &pairs, &scores, &[1, 2, 0], draw, &mut Solo)?;
//! assert_eq!(kept.pairs, [0, 1, 4]);
//! assert_eq!(kept.weights, [1.0; 3]);
//! # Ok::<(), lrmoe_metric::Error>(())
//! ```

#![forbid(unsafe_code)]

mod boundary;
mod buckets;
mod draw;
mod early;
mod error;
mod exchange;
mod grouped;
mod keys;
mod kind;
mod norm;
mod pairs;
mod profile;
mod quotas;
mod rescale;
mod score;
mod select;

pub use draw::Draw;
pub use early::{EarlyKey, early_keys};
pub use error::Error;
pub use exchange::{Exchange, ExchangeError, Solo};
pub use keys::{KeySelection, keys_from_scores, select_keys};
pub use kind::{Row, Score};
pub use ndarray;
pub use norm::{SquaredNorm, largest_scale, squared_norms};
pub use pairs::{MASKED, Pairs};
pub use profile::Profile;
pub use quotas::local_quotas;
pub use rescale::{Rescale, rescale};
pub use score::{Scores, score, score_into};
pub use select::{Method, Selection, Selector, select};
