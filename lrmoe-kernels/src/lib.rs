//! The expert FFN of a Mixture-of-Experts layer over groups of rows, forward and backward.
//!
//! A rank holds several expert *instances* and, for each, a group of *rows*: one row is one routed (token, expert)
//! pair. For the row x of an instance with matrices `[out, in]`:
//!
//! ```text
//! gated   h = act(W_gate x) * (W_up x)      y = W_down h        swiglu, geglu_tanh, geglu_erf, reglu
//! plain   h = act(W_up x)                   y = W_down h        relu2, gelu, silu
//! ```
//!
//! | array | shape |
//! |---|---|
//! | gate and up weights | `[instances, F, D]` |
//! | down weights | `[instances, D, F]` |
//! | row offsets | `[instances + 1]`, from 0 to rows; a group may be empty |
//! | x, y, dy, dx | `[rows, D]` |
//! | gate weight p, selection weight w, dp, squared norm of h | `[rows]` |
//!
//! [`ExpertFfn::forward`] keeps nothing: [`ExpertFfn::backward`] recomputes what it needs from x. With
//! `b = W_down^T dy` and the dy of the layer's output (p not in it):
//!
//! ```text
//! dp = <b, h>     dh = p b     dx = W_gate^T dgate + W_up^T dup
//! dW_down = sum w p dy h^T     dW_gate = sum w dgate x^T     dW_up = sum w dup x^T
//! ```
//!
//! [`StashFfn`] keeps the projections of x from forward instead, and saves their recomputation; [`ComputeExperts`] does where it is given room.
//!
//! Arrays are in standard layout; anything else is an [`Error`]. Weights, x, y, dy, dx and the stash are [`f32`] or [`bf16`](half::bf16), all
//! alike: what mixed precision training stores. Sums are f32 in both, and so are weight gradients, which an optimizer adds
//! to f32 master weights, p, w, dp and norms. With bf16, h and its gradients are rounded where they enter a product, and the
//! norm is that of the rounded h.
//!
//! What is computed for a row (y, the norm of h, dx, dp)
//! does not depend, to the bit, on the group's other rows, on its place, or on the number of threads; weight
//! gradients are sums in row order and do not depend on the number of threads. So equal rows tie exactly in a later
//! selection, and a pass in chunks, which accumulate weight gradients, equals one in a piece. Bits may differ between machines of different instruction sets.
//!
//! The backend of these traits is [`Cpu`]: tiles of up to 256 rows over the ambient rayon pool, on kernels for AVX-512 (for bf16 with AVX-512-BF16 or AMX,
//! where the machine has them), AVX2 with FMA, or plain loops, chosen at run time.
//!
//! **In a backend's own memory.** A layer whose rows stay on a device between stages uses the traits over [`Memory`], whose buffers every
//! backend defines for itself ([`HostBuffer`] for [`Cpu`]); the host sees rows only where it [reads](Memory::read) them:
//!
//! | trait | stages | results |
//! |---|---|---|
//! | [`SelectPairs`] | norms, scores, keys, selection and weights of [`lrmoe_metric`] | the same bits on every backend |
//! | [`CompactRows`] | gather, regroup and scatter-add of [`lrmoe_compact`], rows to places | the same bits on every backend |
//! | [`ComputeExperts`] | the expert FFN as above | the same within rounding |
//!
//! [`Cpu`] has them all, with the feature `cuda`, `Cuda` on NVIDIA cards, and with the feature `wgpu`, `Wgpu` on Vulkan, Metal and DX12
//! devices, the experts in f32 only.
//!
//! ```
//! use lrmoe_kernels::{
//!     Activation, Cpu, ExpertFfn, FfnShape, Weights, Workspace,
//!     ndarray::{array, Array2},
//! };
//!
//! // Two instances, D = 2, F = 1; rows 0 and 1 belong to the first, row 2 to the second.
//! let shape = FfnShape { width: 2, hidden: 1, activation: Activation::Relu2 };
//! let up = array![[[1.0, 1.0]], [[1.0, -1.0]]];
//! let down = array![[[1.0], [0.0]], [[0.0], [1.0]]];
//! let weights = Weights { gate: None, up: up.view(), down: down.view() };
//! let x = array![[1.0, 2.0], [-3.0, 1.0], [5.0, 1.0]];
//! let mut y = Array2::zeros((3, 2));
//! Cpu.forward(&shape, &weights, &[0, 2, 3], x.view(), &mut Workspace::new(), y.view_mut(), None)?;
//! assert_eq!(y, array![[9.0, 0.0], [0.0, 0.0], [0.0, 16.0]]);
//! # Ok::<(), lrmoe_kernels::Error>(())
//! ```

mod activation;
mod compact;
mod cpu;
#[cfg(any(feature = "cuda", feature = "cuda-emu"))]
pub mod cuda;
#[cfg(any(feature = "wgpu", feature = "cuda", feature = "cuda-emu"))]
mod cuts;
mod error;
mod experts;
mod ffn;
mod memory;
mod metric;
#[cfg(feature = "wgpu")]
pub mod wgpu;

pub use activation::Activation;
pub use compact::{CompactRows, PairRows, RowIndex};
pub use cpu::{Cpu, FfnElement, HiddenSums, HostBuffer, InstructionSets, Workspace};
#[cfg(any(feature = "cuda", feature = "cuda-emu"))]
pub use cuda::Cuda;
pub use error::Error;
pub use experts::{ComputeExperts, ExpertBuffers, PreActivationBuffers, RowBuffers};
pub use ffn::{
    BackwardRows, ExpertFfn, FfnShape, PreActivations, PreActivationsMut, StashFfn,
    WeightGradients, Weights,
};
pub use half;
pub use lrmoe_compact;
pub use lrmoe_metric::{self, SquaredNorm};
pub use memory::{Element, Memory};
pub use metric::{Kept, KeptKeys, SelectPairs};
pub use ndarray;
#[cfg(feature = "wgpu")]
pub use wgpu::Wgpu;
