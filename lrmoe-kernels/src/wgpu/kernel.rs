//! The shaders and their pipelines.

use ::wgpu::{
    BindGroupLayout, ComputePipeline, ComputePipelineDescriptor, Device,
    PipelineCompilationOptions, ShaderModuleDescriptor, ShaderSource,
};

use super::device::{Lost, scoped};
use crate::Error;

/// An entry point of a shader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    SquaredNorms,
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
    /// f32 to bf16.
    Narrow,
    /// Rows times the transposed weights of their instance.
    Project,
    /// Rows times the weights of their instance.
    ProjectBack,
    WeightGradients,
    Activate,
    Differentiate,
    ScaleRows,
}

/// A source and the name errors give it.
struct Source {
    name: &'static str,
    text: &'static str,
}

const NORM: Source = Source {
    name: "norm",
    text: concat!(include_str!("exact.wgsl"), include_str!("norm.wgsl")),
};
const SCORE: Source = Source {
    name: "score",
    text: concat!(include_str!("exact.wgsl"), include_str!("score.wgsl")),
};
const KEYS: Source = Source {
    name: "keys",
    text: concat!(include_str!("exact.wgsl"), include_str!("keys.wgsl")),
};
const SELECT: Source = Source {
    name: "select",
    text: include_str!("select.wgsl"),
};
const WEIGHTS: Source = Source {
    name: "weights",
    text: concat!(include_str!("exact.wgsl"), include_str!("weights.wgsl")),
};
const COMPACT: Source = Source {
    name: "compact",
    text: include_str!("compact.wgsl"),
};
const PRODUCT: Source = Source {
    name: "product",
    text: include_str!("ffn/product.wgsl"),
};
const ACTIVATION: Source = Source {
    name: "activation",
    text: include_str!("ffn/activation.wgsl"),
};

const SOURCES: [Source; 8] = [
    NORM, SCORE, KEYS, SELECT, WEIGHTS, COMPACT, PRODUCT, ACTIVATION,
];

type Constants = &'static [(&'static str, f64)];

impl Kernel {
    const ALL: [Self; 23] = [
        Self::SquaredNorms,
        Self::ScanFactors,
        Self::SquaredScores,
        Self::MethodKeys,
        Self::ScoreKeys,
        Self::CountKeys,
        Self::CountTies,
        Self::Descend,
        Self::StartTies,
        Self::CountKept,
        Self::PlaceBlocks,
        Self::WriteKept,
        Self::SelectionWeights,
        Self::Gather,
        Self::Put,
        Self::ScatterAdd,
        Self::Narrow,
        Self::Project,
        Self::ProjectBack,
        Self::WeightGradients,
        Self::Activate,
        Self::Differentiate,
        Self::ScaleRows,
    ];

    /// The source's name, the entry point, and what is constant in it.
    fn entry(self) -> (&'static str, &'static str, Constants) {
        match self {
            Self::SquaredNorms => ("norm", "squared_norms", &[]),
            Self::ScanFactors => ("score", "scan_factors", &[]),
            Self::SquaredScores => ("score", "squared_scores", &[]),
            Self::MethodKeys => ("keys", "method_keys", &[]),
            Self::ScoreKeys => ("keys", "score_keys", &[]),
            Self::CountKeys => ("select", "count_keys", &[]),
            Self::CountTies => ("select", "count_ties", &[]),
            Self::Descend => ("select", "descend", &[]),
            Self::StartTies => ("select", "start_ties", &[]),
            Self::CountKept => ("select", "count_kept", &[]),
            Self::PlaceBlocks => ("select", "place_blocks", &[]),
            Self::WriteKept => ("select", "write_kept", &[]),
            Self::SelectionWeights => ("weights", "selection_weights", &[]),
            Self::Gather => ("compact", "gather", &[]),
            Self::Put => ("compact", "put", &[]),
            Self::ScatterAdd => ("compact", "scatter_add", &[]),
            Self::Narrow => ("compact", "narrow", &[]),
            Self::Project => ("product", "rows_by_weights", &[]),
            Self::ProjectBack => ("product", "rows_by_weights", &[("B_ALONG_K", 0.0)]),
            Self::WeightGradients => (
                "product",
                "weight_gradients",
                &[("A_ALONG_K", 0.0), ("B_ALONG_K", 0.0)],
            ),
            Self::Activate => ("activation", "activate", &[]),
            Self::Differentiate => ("activation", "differentiate", &[]),
            Self::ScaleRows => ("activation", "scale_rows", &[]),
        }
    }
}

/// A compiled entry point.
#[derive(Debug)]
pub(super) struct Pipeline {
    pub(super) raw: ComputePipeline,
    pub(super) layout: BindGroupLayout,
}

/// All entry points, in the order of [`Kernel::ALL`].
#[derive(Debug)]
pub(super) struct Pipelines(Vec<Pipeline>);

impl Pipelines {
    pub(super) fn new(device: &Device, lost: &Lost) -> Result<Self, Error> {
        let mut pipelines = Vec::with_capacity(Kernel::ALL.len());
        for source in &SOURCES {
            let entries = Kernel::ALL.iter().map(|kernel| kernel.entry());
            let entries: Vec<_> = entries
                .filter(|(name, ..)| *name == source.name)
                .map(|(_, entry, constants)| (entry, constants))
                .collect();
            pipelines.extend(compile(device, lost, source.name, source.text, &entries)?);
        }
        Ok(Self(pipelines))
    }

    pub(super) fn of(&self, kernel: Kernel) -> &Pipeline {
        &self.0[kernel as usize]
    }
}

/// Compiles the entry points of a source.
fn compile(
    device: &Device,
    lost: &Lost,
    name: &'static str,
    text: &'static str,
    entries: &[(&'static str, Constants)],
) -> Result<Vec<Pipeline>, Error> {
    let compiled = scoped(device, lost, "compiling shaders", text.len() as u64, || {
        let module = device.create_shader_module(ShaderModuleDescriptor {
            label: Some(name),
            source: ShaderSource::Wgsl(text.into()),
        });
        let pipeline = |&(entry, constants)| {
            let raw = device.create_compute_pipeline(&ComputePipelineDescriptor {
                label: Some(entry),
                layout: None,
                module: &module,
                entry_point: Some(entry),
                compilation_options: PipelineCompilationOptions {
                    constants,
                    // All of it is written before it is read.
                    zero_initialize_workgroup_memory: false,
                },
                cache: None,
            });
            let layout = raw.get_bind_group_layout(0);
            Pipeline { raw, layout }
        };
        Ok(entries.iter().map(pipeline).collect())
    });
    compiled.map_err(|error| match error {
        Error::Refused { reason, .. } => Error::Shader {
            shader: name,
            reason,
        },
        other => other,
    })
}

#[cfg(test)]
mod tests {
    use naga::{
        front::wgsl,
        valid::{Capabilities, ValidationFlags, Validator},
    };

    use super::*;

    /// Without any capability beyond WebGPU's core: no subgroups, no 64-bit integers, no f16.
    #[test]
    fn sources_are_valid() {
        for source in &SOURCES {
            let module = wgsl::parse_str(source.text)
                .unwrap_or_else(|e| panic!("{}: {}", source.name, e.emit_to_string(source.text)));
            Validator::new(ValidationFlags::all(), Capabilities::empty())
                .validate(&module)
                .unwrap_or_else(|e| panic!("{}: {}", source.name, e.emit_to_string(source.text)));
            for entry in &module.entry_points {
                let size: u32 = entry.workgroup_size.iter().product();
                assert_eq!(size, 256, "{} of {}", entry.name, source.name);
                let has = |kernel: &Kernel| kernel.entry().1 == entry.name;
                assert!(
                    Kernel::ALL.iter().any(has),
                    "{} has no launcher",
                    entry.name
                );
            }
        }
    }

    #[test]
    fn kernels_are_compiled_in_their_order() {
        let compiled = SOURCES.iter().flat_map(|source| {
            let of_source = |kernel: &Kernel| kernel.entry().0 == source.name;
            Kernel::ALL.into_iter().filter(of_source)
        });
        assert!(compiled.eq(Kernel::ALL));
        for (number, kernel) in Kernel::ALL.into_iter().enumerate() {
            assert_eq!(kernel as usize, number);
        }
    }
}
