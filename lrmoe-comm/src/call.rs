use std::fmt;

/// How [`all_reduce`](crate::Collective::all_reduce) and
/// [`reduce_scatter`](crate::Collective::reduce_scatter) combine the ranks' values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// The sum, in ascending rank order.
    Sum,
    /// The largest value; a NaN if there is one, and the lowest rank's of equal values.
    Max,
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Max => "max",
        })
    }
}

/// A collective with the arguments in which all ranks must agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Call {
    /// [`all_to_all`](crate::Collective::all_to_all); its counts are compared one by one.
    AllToAll {
        /// Element type.
        element: &'static str,
    },
    /// [`all_reduce`](crate::Collective::all_reduce).
    AllReduce {
        /// Element type.
        element: &'static str,
        /// Elements on every rank.
        len: usize,
        /// How they are combined.
        reduction: Reduction,
    },
    /// [`all_gather`](crate::Collective::all_gather).
    AllGather {
        /// Element type.
        element: &'static str,
        /// Elements each rank gives.
        len: usize,
    },
    /// [`reduce_scatter`](crate::Collective::reduce_scatter).
    ReduceScatter {
        /// Element type.
        element: &'static str,
        /// Elements each rank gets.
        len: usize,
        /// How they are combined.
        reduction: Reduction,
    },
    /// [`broadcast`](crate::Collective::broadcast).
    Broadcast {
        /// Element type.
        element: &'static str,
        /// Elements on every rank.
        len: usize,
        /// The rank whose elements are sent.
        root: usize,
    },
    /// [`barrier`](crate::Collective::barrier).
    Barrier,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllToAll { element } => write!(f, "all-to-all of {element}"),
            Self::AllReduce {
                element,
                len,
                reduction,
            } => write!(f, "all-reduce ({reduction}) of {len} {element}"),
            Self::AllGather { element, len } => write!(f, "all-gather of {len} {element}"),
            Self::ReduceScatter {
                element,
                len,
                reduction,
            } => {
                write!(f, "reduce-scatter ({reduction}) to {len} {element}")
            }
            Self::Broadcast { element, len, root } => {
                write!(f, "broadcast of {len} {element} from rank {root}")
            }
            Self::Barrier => f.write_str("barrier"),
        }
    }
}
