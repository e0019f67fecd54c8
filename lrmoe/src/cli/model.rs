//! Options that say which model a tool is asked about.

use clap::Args;
use lrmoe_plan::{ExpertShape, ModelSpec};

use crate::config::Dtype;
use crate::error::Error;
use crate::replay::{Model, ReplayError};

pub(super) const GIB: f64 = (1u64 << 30) as f64;

/// Sizes of a model, by name or one by one.
#[derive(Args, Debug)]
pub(crate) struct ModelArguments {
    /// Model whose sizes count: qwen3-30b-a3b, glm-4.5-air, olmoe-1b-7b, mixtral-8x7b or tiny
    #[arg(long, value_name = "NAME", required_unless_present_all = ["width", "hidden"])]
    preset: Option<String>,
    /// Model width D [default: the preset's]
    #[arg(long, value_name = "N")]
    width: Option<usize>,
    /// Hidden width F of an expert [default: the preset's]
    #[arg(long, value_name = "N")]
    hidden: Option<usize>,
    /// Experts per token, where the trace does not say [default: the preset's]
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
    /// Type of weights, gradients and rows
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    dtype: Dtype,
}

impl ModelArguments {
    /// The preset with what is given beside it.
    pub(super) fn model(&self) -> Result<Model, Error> {
        let spec = self.preset.as_deref().map(ModelSpec::preset).transpose()?;
        let size = |given: Option<usize>, of: fn(&ModelSpec) -> usize| {
            given.or(spec.as_ref().map(of)).unwrap_or_default()
        };
        let name = spec
            .as_ref()
            .map_or("given by size".to_owned(), |spec| spec.name.clone());
        let changed = spec.is_some() && (self.width.is_some() || self.hidden.is_some());
        Ok(Model {
            name: if changed {
                format!("{name}, changed")
            } else {
                name
            },
            shape: ExpertShape {
                width: size(self.width, |spec| spec.width),
                hidden: size(self.hidden, |spec| spec.hidden),
                gated: spec.as_ref().is_none_or(|spec| spec.gated),
                bytes: self.dtype.bytes(),
            },
            sizes: spec
                .as_ref()
                .map(|spec| [spec.layers, spec.experts, spec.top_k]),
            top_k: self.top_k.or(spec.as_ref().map(|spec| spec.top_k)),
            shared_experts: spec.map_or(0, |spec| spec.shared_experts),
        })
    }
}

/// Bytes of a budget in GiB.
pub(super) fn budget(gib: f64) -> Result<u64, Error> {
    let most = 1024.0 * 1024.0;
    if gib > 0.0 && gib <= most {
        return Ok((gib * GIB) as u64);
    }
    let error = ReplayError::OutOfRange {
        name: "budget-gib",
        value: gib.to_string(),
        range: format!("above 0 and at most {most}"),
    };
    Err(error.into())
}
