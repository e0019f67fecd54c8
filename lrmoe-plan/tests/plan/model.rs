//! Model sizes against published parameter counts.

use lrmoe_plan::{Error, ModelSpec};

#[test]
fn presets_by_name() {
    for (spec, name) in ModelSpec::presets().iter().zip(ModelSpec::PRESETS) {
        assert_eq!(spec.name, name);
        assert_eq!(&ModelSpec::preset(name).unwrap(), spec);
        assert!(spec.top_k <= spec.experts);
        assert_eq!(spec.shared_experts, usize::from(name == "glm-4.5-air"));
    }
    let error = ModelSpec::preset("gpt").unwrap_err();
    assert!(matches!(error, Error::UnknownName { what: "model", .. }));
    assert_eq!(
        error.to_string(),
        "unknown model `gpt`, expected one of qwen3-30b-a3b, glm-4.5-air, olmoe-1b-7b, mixtral-8x7b, tiny"
    );
}

#[test]
fn routed_experts_hold_most_parameters() {
    // Total parameters in billions as the names say, and the share that routed experts may have of it.
    let total = [30.5, 106.0, 6.9, 46.7];
    for (spec, total) in ModelSpec::presets().iter().zip(total) {
        let experts = spec.layers * spec.experts;
        let billions = experts as f64 * spec.expert(2).parameters() as f64 / 1e9;
        assert!(
            (0.9..1.0).contains(&(billions / total)),
            "{}: {billions}",
            spec.name
        );
    }
}

#[test]
fn expert_shapes() {
    let shape = ModelSpec::preset("qwen3-30b-a3b").unwrap().expert(2);
    assert_eq!(shape.parameters(), 3 * 2048 * 768);
    assert_eq!(shape.slot_bytes(), 2 * 2 * 3 * 2048 * 768);
}
