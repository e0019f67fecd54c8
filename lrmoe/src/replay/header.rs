//! What a replay's figures rest on, in words.

use super::report::Header;
use super::source::Multiples;
use super::{PolicyName, Settings, Source};

/// `tokens`: most tokens of a rank in any step.
pub(super) fn header(
    source: &Source,
    settings: &Settings,
    top_k: usize,
    by: Multiples,
    tokens: usize,
) -> Header {
    let (trace, shape) = (source.header(), &settings.model.shape);
    Header {
        traces: source
            .paths()
            .map(|path| path.display().to_string())
            .collect(),
        first_step: source.number(0),
        last_step: source.number(source.len() - 1),
        steps: source.len(),
        warmup: settings.warmup,
        scored_steps: source.scored(),
        layers: trace.layers,
        model_layers: settings.model_layers.unwrap_or(trace.layers),
        experts: trace.experts,
        top_k,
        ranks: trace.ranks * by.ranks,
        trace_ranks: trace.ranks,
        tokens_per_rank: tokens,
        token_copies: by.tokens,
        model: settings.model.name.clone(),
        width: shape.width,
        hidden: shape.hidden,
        gated: shape.gated,
        element_bytes: shape.bytes,
        cluster: settings.cluster.clone(),
        budget_bytes: settings.budget,
        chunk_rows: settings.chunk_rows,
        capacity_factor: settings.capacity_factor,
        history: settings.history,
        quota_policy: settings.quota_policy.to_string(),
        floor: settings.floor,
        select: settings.method.to_string(),
        notes: notes(source, settings, top_k, by),
        assumptions: assumptions(settings),
    }
}

/// What differs between trace, model and question.
fn notes(source: &Source, settings: &Settings, top_k: usize, by: Multiples) -> Vec<String> {
    let (trace, model) = (source.header(), &settings.model);
    let mut notes = Vec::new();
    if let Some([layers, experts, model_top_k]) = model.sizes {
        for (what, of_trace, of_model) in [
            ("experts", trace.experts, experts),
            ("experts per token", top_k, model_top_k),
        ] {
            if of_trace != of_model {
                notes.push(format!(
                    "the trace has {of_trace} {what}, {} has {of_model}: the trace's are used",
                    model.name
                ));
            }
        }
        if trace.layers != layers && settings.model_layers.is_none() {
            notes.push(format!(
                "the trace has {} MoE layers, {} has {layers}: all figures are for those of the trace; --model-layers scales them",
                trace.layers, model.name
            ));
        }
    }
    if let Some(layers) = settings
        .model_layers
        .filter(|&layers| layers != trace.layers)
    {
        notes.push(format!(
            "placement, replicas, stash, optimizer, bytes and time of the trace's {} layers are scaled to {layers}",
            trace.layers
        ));
    }
    if settings.warmup > 0 {
        notes.push(format!(
            "the first {} steps move the placements on and count in no figure",
            settings.warmup
        ));
    }
    if by.ranks > 1 {
        notes.push(format!(
            "every source rank of the trace stands for {} ranks (weak scaling): their loads are equal, which real ones are not",
            by.ranks
        ));
    }
    if by.tokens > 1 {
        notes.push(format!(
            "every token of the trace counts {} times: the noise of its smaller batches is kept, so loads are less even than those of larger batches would be",
            by.tokens
        ));
    }
    if model.shared_experts > 0 {
        notes.push(
            "shared experts are left out: every token passes them, whatever the policy".into(),
        );
    }
    match source.scored() {
        0 => notes.push("the trace has no scores: retained pairs are dealt to source ranks in proportion to what they have, and what contribution they keep is unknown".into()),
        scored if scored < source.len() => notes.push(format!(
            "scores are known in {scored} of {} steps: selection is real there, elsewhere retained pairs are dealt to source ranks in proportion",
            source.len()
        )),
        _ => {}
    }
    notes
}

/// What is counted, and how.
fn assumptions(settings: &Settings) -> Vec<String> {
    let has = |policy| {
        settings
            .contenders
            .iter()
            .any(|contender| contender.policy == policy)
    };
    let mut lines = vec![
        "Memory is that of the MoE layers on the rank that holds most; attention, embeddings, activations of the dense part and the framework are not in it. Peak is the worst step, mean the mean over steps of each step's worst rank.".to_owned(),
        "Placement and replicas are weights and gradients of every slot, used or not, of all layers at once. Token buffers serve one layer after another, so those of the layer that needs most count. The stash of all layers lies in memory at once. The optimizer's state (12 bytes a parameter, divided evenly over the ranks) is apart from the total.".to_owned(),
        format!(
            "Buffering `whole` holds all rows of a pass at once and keeps x, gate and up of every row for the backward pass (conventional training). `chunked-forward` computes the forward pass in chunks of {0} rows, keeps x once per token, and recomputes: what lrmoe train does. `chunked` runs the backward pass in chunks of {0} rows too. The first is the default of every policy but lrmoe, the second that of lrmoe.",
            settings.chunk_rows
        ),
        "A recomputing backward pass sends x again beside dy, three rows a pair where the others send two. Bytes are those that leave a rank, summed over all ranks.".to_owned(),
        format!(
            "Time is modelled on {}, of the MoE layers alone: GEMMs of the rank with most rows, all-to-alls of the rank that sends or receives most, gradients to the optimizer's shards, weights to the next placement; nothing overlaps. The balanced share compares with the same rows and bytes spread evenly over ranks and links.",
            settings.cluster.name
        ),
        "Load is rows run forward plus rows run backward, largest over mean of the ranks.".to_owned(),
        "Placements follow the loads of the step before. Planning time is measured on this machine, one thread, per layer: quotas and the next placement.".to_owned(),
    ];
    if has(PolicyName::Fixed) {
        lines.push("fixed: experts in contiguous blocks, the optimizer's state beside its expert, so that neither gradients nor weights travel.".into());
    }
    if has(PolicyName::FixedReplicas) {
        lines.push(format!("fixed-replicas: placed once by the mean loads of the first {} steps replayed, and so with foresight for these.", settings.history));
    }
    if has(PolicyName::Symi) {
        lines.push(format!("symi: the SYMI policy, re-derived from its paper, capacity factor {}; pairs beyond an expert's capacity run neither forward nor backward. Its buffers hold the pairs that are left, without padding to the capacity.", settings.capacity_factor));
    }
    if has(PolicyName::FlexMoe) {
        lines.push("flexmoe: replicas grow, shrink and migrate while that lowers the largest load, re-derived from its paper.".into());
    }
    if has(PolicyName::Lrmoe) {
        lines.push(format!("lrmoe@R: every pair runs forward, a share R backward (quotas {}, at least {} of an expert's pairs), fewer where a rank's budget of {:.1} GiB binds; budgets count the optimizer too. Other policies, and lrmoe+whole, whose stash no quota bounds, are marked where they exceed it.", settings.quota_policy, settings.floor, settings.budget as f64 / (1u64 << 30) as f64));
    }
    lines
}
