//! Moves rows of tokens between the dense buffers of a Mixture-of-Experts layer: gather before the
//! exchange, regroup after it, and add back at the end.
//!
//! | step | function | from | to |
//! |---|---|---|---|
//! | pick the rows to send | [`gather`] | `[tokens, width]` | `[pairs, width]`, any order |
//! | order what came by instance | [`Grouping::group`] | `[received, width]` by (source, instance, pair id) | `[grouped, width]` by (instance, source, pair id) |
//! | back to the order it came in | [`Grouping::ungroup`] | `[grouped, width]` | `[received, width]` |
//! | add a token's rows up | [`ScatterAdd::add`] | `[pairs, width]`, any order | `[tokens, width]` |
//!
//! A pair is one (token t, slot j) assignment with the local id `t * top_k + j`. Group i of a
//! grouped buffer is rows `offsets[i]..offsets[i + 1]` of [`Grouping::offsets`] (`[instances +
//! 1]`), padded with zeros to a multiple of rows if asked for.
//!
//! All buffers belong to the caller and are views in standard layout (row-major without gaps); a
//! vector with one number for each row is a `[rows, 1]` view. Nothing here allocates memory
//! proportional to rows, but for the scratch that [`ScatterAdd`] keeps. Work is split over the
//! ambient rayon pool, and the results are the same bit for bit with any number of threads: every
//! output row is written by one task, and a token's rows are added in ascending slot order.
//! Arguments are checked before anything is written.
//!
//! ```
//! use lrmoe_compact::{Grouping, ScatterAdd, gather};
//! use ndarray::{Array2, array};
//!
//! // Two tokens, top_k = 2; pairs 3, 0 and 2 in sending order, of tokens 1, 0 and 1.
//! let x = array![[1.0, 2.0], [3.0, 4.0]];
//! let (pairs, tokens) = ([3, 0, 2], [1, 0, 1]);
//! let mut sent = Array2::zeros((3, 2));
//! gather(x.view(), &tokens, sent.view_mut())?;
//! assert_eq!(sent, array![[3.0, 4.0], [1.0, 2.0], [3.0, 4.0]]);
//!
//! // A rank with two instances received a row for each from source 0, two for the first from 1.
//! let received = array![[1.0], [2.0], [3.0], [4.0]];
//! let grouping = Grouping::new(array![[1, 1], [2, 0]].view(), 1)?;
//! let mut grouped = Array2::zeros((grouping.grouped_rows(), 1));
//! grouping.group(received.view(), grouped.view_mut())?;
//! assert_eq!(grouping.offsets(), [0, 3, 4]);
//! assert_eq!(grouped, array![[1.0], [3.0], [4.0], [2.0]]);
//!
//! // Rows come back in sending order and are added to their tokens with their gate weights.
//! let mut y = Array2::zeros((2, 2));
//! ScatterAdd::new().add(sent.view(), &pairs, Some(&[0.5, 1.0, 0.25]), 2, y.view_mut())?;
//! assert_eq!(y, array![[1.0, 2.0], [2.25, 3.0]]);
//! # Ok::<_, lrmoe_compact::Error>(())
//! ```
#![forbid(unsafe_code)]

mod error;
mod gather;
mod grouping;
mod scatter;
mod view;

pub use error::{Argument, Error};
pub use gather::gather;
pub use grouping::Grouping;
pub use ndarray::{ArrayView2, ArrayViewMut2};
pub use scatter::ScatterAdd;
