//! The dense part of the language model against a plain f64 one, and what it refuses.

mod double;
mod oracle;

use std::sync::{Arc, Mutex};

use candle_core::{Device, Tensor};
use double::{Fault, Faulty, PeerGone, linear_layers};
use lrmoe::model::{
    DenseParameters, LanguageModel, ModelConfig, ModelError, SharedLayer, expert_init,
};
use oracle::Oracle;

fn tiny() -> ModelConfig {
    ModelConfig {
        width: 8,
        heads: 2,
        layers: 2,
        context: 7,
        experts: 5,
        top_k: 2,
        hidden: 6,
    }
}

/// Bytes of a small alphabet, so that the embedding rows that matter are few.
fn text(sequences: usize, length: usize, salt: usize) -> Vec<Vec<u8>> {
    let byte = |s: usize, t: usize| (97 + (s * 31 + t * t * 7 + salt * 13) % 11) as u8;
    (0..sequences)
        .map(|s| (0..length).map(|t| byte(s, t)).collect())
        .collect()
}

fn to_tensor(rows: &[Vec<u8>]) -> Tensor {
    let length = rows.first().map_or(0, Vec::len);
    Tensor::from_vec(rows.concat(), (rows.len(), length), &Device::Cpu).unwrap()
}

fn scalar(tensor: &Tensor) -> f64 {
    f64::from(tensor.to_scalar::<f32>().unwrap())
}

/// Parameters away from the symmetric start: scales differ from 1 and the head is not small.
fn parameters(config: &ModelConfig) -> DenseParameters {
    let parameters = DenseParameters::new(config, 5).unwrap();
    let mut flat = parameters.flatten().unwrap();
    for (i, value) in flat.iter_mut().enumerate() {
        *value += 0.2 * ((i * 37 % 101) as f32 / 101.0 - 0.5);
    }
    parameters.load(&flat).unwrap();
    parameters
}

fn model(config: &ModelConfig, parameters: &DenseParameters) -> LanguageModel {
    LanguageModel::new(config, parameters, linear_layers(config)).unwrap()
}

#[test]
fn forward_agrees_with_plain_loops() {
    for (heads, top_k, length) in [(2, 2, 7), (1, 5, 4), (4, 1, 1), (4, 3, 7)] {
        let config = ModelConfig {
            heads,
            top_k,
            ..tiny()
        };
        let parameters = parameters(&config);
        let (inputs, targets) = (text(3, length, 0), text(3, length, 1));
        let expected = Oracle::new(&config, &parameters, 0.3).run(&inputs, &targets);
        let model = model(&config, &parameters);
        let (inputs, targets) = (to_tensor(&inputs), to_tensor(&targets));
        for training in [false, true] {
            let logits = model.forward(&inputs, training).unwrap();
            for (row, expected) in logits
                .to_vec2::<f32>()
                .unwrap()
                .iter()
                .zip(&expected.logits)
            {
                for (value, expected) in row.iter().zip(expected) {
                    // f32 rounding over sums of at most 15 terms of size 1.
                    assert!((f64::from(*value) - expected).abs() < 1e-5);
                }
            }
            let losses = model.loss(&inputs, &targets, 0.3, training).unwrap();
            assert!((scalar(&losses.cross_entropy) - expected.cross_entropy).abs() < 1e-5);
            assert!((scalar(&losses.total) - expected.total).abs() < 1e-5);
        }
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    let config = tiny();
    let parameters = parameters(&config);
    let (inputs, targets) = (text(3, 7, 0), text(3, 7, 1));
    // A large balance weight, so that its gradient is seen.
    let mut oracle = Oracle::new(&config, &parameters, 0.5);
    let choices = oracle.run(&inputs, &targets).choices;
    let losses = model(&config, &parameters)
        .loss(&to_tensor(&inputs), &to_tensor(&targets), 0.5, true)
        .unwrap();
    let store = losses.total.backward().unwrap();
    let gradients = parameters.gradients(&store).unwrap();
    assert_eq!(gradients.len(), parameters.len());

    let mut rest = gradients.as_slice();
    for index in 0..oracle.parameters.len() {
        let count = oracle.parameters[index].1.len();
        let (mine, after) = rest.split_at(count);
        rest = after;
        // Rows of the embedding and the head are alike; the bytes 80 to 119 cover used and unused.
        let checked = if count == 256 * 8 {
            80 * 8..120 * 8
        } else {
            0..count
        };
        let mut plain = Vec::new();
        for i in checked.clone() {
            let mut at = |shift: f64| {
                oracle.parameters[index].1[i] += shift;
                let outcome = oracle.run(&inputs, &targets);
                oracle.parameters[index].1[i] -= shift;
                assert_eq!(
                    outcome.choices, choices,
                    "a step of the check changes the routing"
                );
                outcome.total
            };
            let step = 1e-5;
            plain.push((at(step) - at(-step)) / (2.0 * step));
        }
        let largest = plain.iter().fold(0.0, |a: f64, b| a.max(b.abs()));
        assert!(
            largest > 1e-5,
            "{} has no gradient",
            oracle.parameters[index].0
        );
        for (i, (mine, plain)) in mine[checked].iter().zip(&plain).enumerate() {
            // f32 rounding of the whole backward pass.
            assert!(
                (f64::from(*mine) - plain).abs() < 2e-5 * largest + 1e-8,
                "{}[{i}]: {mine}, must be {plain}",
                oracle.parameters[index].0
            );
        }
    }
}

#[test]
fn a_sequence_does_not_see_the_others() {
    // Inner products of more than 512 terms are cut in blocks.
    for (width, heads, sequences) in [(48, 3, 7), (528, 2, 3)] {
        let config = ModelConfig {
            width,
            heads,
            context: 65,
            ..tiny()
        };
        let parameters = parameters(&config);
        let model = model(&config, &parameters);
        let sequences = text(sequences, config.context, 0);
        let bits = |sequences: &[Vec<u8>]| -> Vec<u32> {
            let logits = model.forward(&to_tensor(sequences), false).unwrap();
            let logits: Vec<f32> = logits.flatten_all().unwrap().to_vec1().unwrap();
            logits.iter().map(|value| value.to_bits()).collect()
        };
        let together = bits(&sequences);
        for (alone, together) in sequences.iter().zip(together.chunks(config.context * 256)) {
            assert!(
                bits(std::slice::from_ref(alone)) == together,
                "width {width}"
            );
        }
    }
}

#[test]
fn a_byte_does_not_see_later_ones() {
    let config = tiny();
    let parameters = parameters(&config);
    let model = model(&config, &parameters);
    let mut sequence = text(1, 7, 0);
    let before = model.forward(&to_tensor(&sequence), false).unwrap();
    sequence[0][4] ^= 1;
    let after = model.forward(&to_tensor(&sequence), false).unwrap();
    let rows = |t: &Tensor| t.to_vec2::<f32>().unwrap();
    assert_eq!(rows(&before)[..4], rows(&after)[..4]);
    assert_ne!(rows(&before)[4], rows(&after)[4]);
}

#[test]
fn a_rank_without_sequences_takes_part() {
    let config = tiny();
    let parameters = parameters(&config);
    let model = model(&config, &parameters);
    let nothing = Tensor::from_vec(Vec::<u8>::new(), (0, 7), &Device::Cpu).unwrap();
    for training in [false, true] {
        let losses = model.loss(&nothing, &nothing, 0.1, training).unwrap();
        assert_eq!(scalar(&losses.total), 0.0);
    }
    let losses = model.loss(&nothing, &nothing, 0.1, true).unwrap();
    let store = losses.total.backward().unwrap();
    let gradients = parameters.gradients(&store).unwrap();
    assert!(gradients.iter().all(|&g| g == 0.0));
}

#[test]
fn layer_errors_keep_their_type() {
    let config = tiny();
    let parameters = parameters(&config);
    let batch = to_tensor(&text(2, 7, 0));
    let run = |fault| {
        let mut layers = linear_layers(&config);
        let loads = vec![1; config.experts];
        layers[1] = Arc::new(Mutex::new(Faulty { fault, loads })) as SharedLayer;
        let model = LanguageModel::new(&config, &parameters, layers)?;
        let total = model.loss(&batch, &batch, 0.1, true)?.total;
        total.backward()?;
        Ok::<(), ModelError>(())
    };
    for fault in [Fault::Forward, Fault::Backward] {
        let error = run(fault).unwrap_err();
        assert_eq!(error.to_string(), "layer 1: rank 3 is gone");
        let ModelError::Layer { layer: 1, source } = error else {
            panic!("{fault:?}: {error:?}");
        };
        assert_eq!(source.downcast_ref::<PeerGone>().unwrap().rank, 3);
    }
    assert_eq!(
        run(Fault::Shape).unwrap_err().to_string(),
        "layer 1 returned y of shape [1, 1], must be [14, 8]"
    );
}

#[test]
fn a_layer_that_panicked_is_refused() {
    let config = ModelConfig {
        layers: 1,
        ..tiny()
    };
    let parameters = parameters(&config);
    let layer: SharedLayer = Arc::new(Mutex::new(Faulty {
        fault: Fault::Panic,
        loads: vec![0; config.experts],
    }));
    let model = LanguageModel::new(&config, &parameters, vec![Arc::clone(&layer)]).unwrap();
    let batch = to_tensor(&text(1, 7, 0));
    std::thread::scope(|scope| {
        assert!(scope.spawn(|| model.forward(&batch, false)).join().is_err());
    });
    assert!(matches!(
        model.forward(&batch, false),
        Err(ModelError::LayerPoisoned { layer: 0 })
    ));
}

#[test]
fn diverged_parameters_name_the_token() {
    let config = tiny();
    let parameters = parameters(&config);
    let mut flat = parameters.flatten().unwrap();
    // The second sequence alone has the byte whose embedding is broken.
    let sequences = [vec![b'a'; 7], vec![b'b'; 7]];
    flat[usize::from(b'b') * config.width] = f32::NAN;
    parameters.load(&flat).unwrap();
    let error = model(&config, &parameters)
        .forward(&to_tensor(&sequences), true)
        .unwrap_err();
    assert!(
        matches!(error, ModelError::NanProbability { layer: 0, token: 7 }),
        "{error}"
    );
}

#[test]
fn parameters_depend_on_seed_and_name_alone() {
    let two = DenseParameters::new(&tiny(), 1).unwrap();
    let one = DenseParameters::new(
        &ModelConfig {
            layers: 1,
            ..tiny()
        },
        1,
    )
    .unwrap();
    let other = DenseParameters::new(&tiny(), 2).unwrap();
    let token = |p: &DenseParameters| p.flatten().unwrap()[..256 * 8].to_vec();
    assert_eq!(token(&two), token(&one));
    assert_ne!(token(&two), token(&other));
    let names: Vec<_> = two.names().collect();
    assert_eq!(names.len(), 13);
    assert_eq!((names[0], names[12]), ("token.weight", "head.weight"));
    let count: usize = two.shapes().map(|s| s.iter().product::<usize>()).sum();
    assert_eq!(count, two.len());
    assert_eq!(two.flatten().unwrap().len(), count);

    assert_eq!(expert_init(&tiny(), 1, 3, 9), expert_init(&tiny(), 1, 3, 9));
    assert_ne!(expert_init(&tiny(), 1, 3, 9), expert_init(&tiny(), 1, 2, 9));
    assert_ne!(expert_init(&tiny(), 1, 3, 9), expert_init(&tiny(), 0, 3, 9));
}

#[test]
fn initial_scales_are_those_of_the_reference() {
    let config = ModelConfig {
        width: 64,
        hidden: 32,
        ..tiny()
    };
    let deviation = |values: &[f32]| {
        let squares: f64 = values.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
        (squares / values.len() as f64).sqrt()
    };
    let parameters = DenseParameters::new(&config, 3).unwrap();
    let flat = parameters.flatten().unwrap();
    let mut rest = flat.as_slice();
    for (name, shape) in parameters.names().zip(parameters.shapes()) {
        let (values, after) = rest.split_at(shape.iter().product());
        rest = after;
        let expected = match name {
            "token.weight" => 1.0,
            "head.weight" => 0.02,
            _ if name.ends_with("scale") => 1.0,
            _ if name.ends_with("out.weight") => 0.125 / 2.0,
            _ => 0.125,
        };
        // 320 numbers have a deviation that is 4 % off at one standard error.
        assert!((deviation(values) / expected - 1.0).abs() < 0.15, "{name}");
    }
    let expert = expert_init(&config, 0, 0, 3);
    for (values, expected) in [
        (&expert.gate, 0.125),
        (&expert.up, 0.125),
        (&expert.down, 32_f64.powf(-0.5) / 2.0),
    ] {
        assert_eq!(values.len(), 64 * 32);
        assert!((deviation(values) / expected - 1.0).abs() < 0.1);
    }
}

#[test]
fn the_model_follows_its_parameters() {
    let config = tiny();
    let parameters = parameters(&config);
    let model = model(&config, &parameters);
    let batch = to_tensor(&text(1, 7, 0));
    let zeros = vec![0.0; parameters.len()];
    parameters.load(&zeros).unwrap();
    assert_eq!(parameters.flatten().unwrap(), zeros);
    let loss = model.loss(&batch, &batch, 0.0, false).unwrap();
    assert!((scalar(&loss.cross_entropy) - 256_f64.ln()).abs() < 1e-6);
    assert_eq!(
        parameters.load(&[0.0]).unwrap_err().to_string(),
        format!(
            "1 parameter values were given, the model has {}",
            zeros.len()
        )
    );
}

#[test]
fn sizes_that_make_no_model_are_refused() {
    type Change = fn(&mut ModelConfig);
    let refused: [(Change, &str); 6] = [
        (
            |c| c.width = 0,
            "width 0 is out of range, must be between 1 and 65536",
        ),
        (
            |c| c.layers = 0,
            "layers 0 is out of range, must be between 1 and 1024",
        ),
        (
            |c| c.top_k = 0,
            "top-k 0 is out of range, must be between 1 and 65536",
        ),
        (|c| c.top_k = 6, "top-k 6 exceeds the number of experts, 5"),
        (
            |c| c.heads = 3,
            "3 heads do not divide width 8 into heads of an even size",
        ),
        (
            |c| c.heads = 8,
            "8 heads do not divide width 8 into heads of an even size",
        ),
    ];
    for (change, message) in refused {
        let mut config = tiny();
        change(&mut config);
        assert_eq!(config.validate().unwrap_err().to_string(), message);
        assert!(DenseParameters::new(&config, 1).is_err());
    }
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let config = tiny();
    let parameters = parameters(&config);
    let error = LanguageModel::new(&config, &parameters, Vec::new()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "0 MoE layers were given to a model of 2 layers"
    );
    let wider = ModelConfig {
        width: 16,
        ..tiny()
    };
    let error = LanguageModel::new(&wider, &parameters, linear_layers(&wider)).unwrap_err();
    assert!(matches!(error, ModelError::Parameter { .. }), "{error}");

    let model = model(&config, &parameters);
    let long = to_tensor(&text(1, 8, 0));
    let short = to_tensor(&text(1, 6, 0));
    assert!(matches!(
        model.forward(&long, false),
        Err(ModelError::Shape { name: "inputs", .. })
    ));
    let error = model.loss(&short, &long, 0.0, false).unwrap_err();
    assert!(matches!(
        error,
        ModelError::Shape {
            name: "targets",
            ..
        }
    ));
    let large = Tensor::full(300_u32, (1, 6), &Device::Cpu).unwrap();
    let error = model.loss(&short, &large, 0.0, false).unwrap_err();
    assert!(matches!(error, ModelError::Target { value: 300 }));
    assert!(model.forward(&large, false).is_err());
}
