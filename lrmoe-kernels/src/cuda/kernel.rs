//! The kernels and their sources.

/// Threads of a block, of all kernels.
pub(super) const THREADS: usize = 256;
/// Threads of a warp.
pub(super) const LANES: usize = 32;

/// An entry point of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kernel {
    SquaredNorms,
    SquaredNormsBf16,
    ScanFactors,
    SquaredScores,
    MethodKeys,
    ScoreKeys,
    CountKeys,
    CountTies,
    Descend,
    StartTies,
    CountKept,
    PlaceBlocks,
    WriteKept,
    SelectionWeights,
    Gather,
    Put,
    ScatterAdd,
    ScatterAddBf16,
    Combine,
    CombineBf16,
    Narrow,
    Activate,
    ActivateBf16,
    Differentiate,
    DifferentiateBf16,
    ScaleRows,
    ScaleRowsBf16,
    /// Rows times the transposed matrices of their instance.
    Project,
    ProjectBf16,
    /// Rows times the matrices of their instance.
    ProjectBack,
    ProjectBackBf16,
    WeightGradients,
    WeightGradientsBf16,
}

impl Kernel {
    /// The source and the entry point in it.
    pub(super) fn entry(self) -> (Source, &'static str) {
        match self {
            Self::SquaredNorms => (Source::Norm, "squared_norms"),
            Self::SquaredNormsBf16 => (Source::Norm, "squared_norms_bf16"),
            Self::ScanFactors => (Source::Score, "scan_factors"),
            Self::SquaredScores => (Source::Score, "squared_scores"),
            Self::MethodKeys => (Source::Keys, "method_keys"),
            Self::ScoreKeys => (Source::Keys, "score_keys"),
            Self::CountKeys => (Source::Select, "count_keys"),
            Self::CountTies => (Source::Select, "count_ties"),
            Self::Descend => (Source::Select, "descend"),
            Self::StartTies => (Source::Select, "start_ties"),
            Self::CountKept => (Source::Select, "count_kept"),
            Self::PlaceBlocks => (Source::Select, "place_blocks"),
            Self::WriteKept => (Source::Select, "write_kept"),
            Self::SelectionWeights => (Source::Weights, "selection_weights"),
            Self::Gather => (Source::Compact, "gather"),
            Self::Put => (Source::Compact, "put"),
            Self::ScatterAdd => (Source::Compact, "scatter_add"),
            Self::ScatterAddBf16 => (Source::Compact, "scatter_add_bf16"),
            Self::Combine => (Source::Compact, "combine"),
            Self::CombineBf16 => (Source::Compact, "combine_bf16"),
            Self::Narrow => (Source::Compact, "narrow"),
            Self::Activate => (Source::Activation, "activate"),
            Self::ActivateBf16 => (Source::Activation, "activate_bf16"),
            Self::Differentiate => (Source::Activation, "differentiate"),
            Self::DifferentiateBf16 => (Source::Activation, "differentiate_bf16"),
            Self::ScaleRows => (Source::Activation, "scale_rows"),
            Self::ScaleRowsBf16 => (Source::Activation, "scale_rows_bf16"),
            Self::Project => (Source::Product, "project"),
            Self::ProjectBf16 => (Source::Tensor, "project_bf16"),
            Self::ProjectBack => (Source::Product, "project_back"),
            Self::ProjectBackBf16 => (Source::Tensor, "project_back_bf16"),
            Self::WeightGradients => (Source::Product, "weight_gradients"),
            Self::WeightGradientsBf16 => (Source::Tensor, "weight_gradients_bf16"),
        }
    }
}

/// A text that is compiled in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Source {
    Norm,
    Score,
    Keys,
    Select,
    Weights,
    Compact,
    Activation,
    Product,
    Tensor,
}

#[cfg(feature = "cuda")]
impl Source {
    pub(super) const ALL: [Self; 9] = [
        Self::Norm,
        Self::Score,
        Self::Keys,
        Self::Select,
        Self::Weights,
        Self::Compact,
        Self::Activation,
        Self::Product,
        Self::Tensor,
    ];

    /// What errors call it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Norm => "norm",
            Self::Score => "score",
            Self::Keys => "keys",
            Self::Select => "select",
            Self::Weights => "weights",
            Self::Compact => "compact",
            Self::Activation => "activation",
            Self::Product => "product",
            Self::Tensor => "tensor",
        }
    }

    pub(super) fn text(self) -> &'static str {
        macro_rules! text {
            ($file:literal) => {
                concat!(
                    include_str!("common.cuh"),
                    include_str!("exact.cuh"),
                    include_str!("mma.cuh"),
                    include_str!($file)
                )
            };
        }
        match self {
            Self::Norm => text!("norm.cu"),
            Self::Score => text!("score.cu"),
            Self::Keys => text!("keys.cu"),
            Self::Select => text!("select.cu"),
            Self::Weights => text!("weights.cu"),
            Self::Compact => text!("compact.cu"),
            Self::Activation => text!("ffn/activation.cu"),
            Self::Product => text!("ffn/product.cu"),
            Self::Tensor => text!("ffn/tensor.cu"),
        }
    }
}
