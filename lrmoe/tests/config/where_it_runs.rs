//! Devices, cards and ways between nodes.

use lrmoe::config::{Cards, Device};

use crate::{parse, resolve, resolve_file};

#[test]
fn devices_are_known_and_built_or_refused() {
    assert_eq!(resolve("").unwrap().device, Device::Cpu);
    assert_eq!(resolve("--device cpu").unwrap().device, Device::Cpu);
    for unknown in ["tpu", "cuda:", "cuda:x", "cuda:3-1", "cuda:0-", "cuda:-1"] {
        let error = parse(&format!("--device {unknown}")).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("must be cpu, wgpu, cuda"), "{error}");
    }
    let cases = [
        ("wgpu", "wgpu", cfg!(feature = "wgpu"), Device::Wgpu),
        ("cuda", "cuda", cfg!(feature = "cuda"), Device::Cuda(None)),
        (
            "cuda:3",
            "cuda",
            cfg!(feature = "cuda"),
            Device::Cuda(Some(Cards::one(3))),
        ),
    ];
    for (name, feature, built, device) in cases {
        assert_eq!(device.to_string(), name);
        for resolved in [
            resolve(&format!("--device {name}")),
            resolve_file(&format!("text = ['a']\ndevice = '{name}'"), ""),
        ] {
            if built {
                assert_eq!(resolved.unwrap().device, device);
                let error = resolve(&format!("--device {name} --score full-grad"));
                let error = error.unwrap_err().to_string();
                assert!(error.contains(&format!("cpu alone, not {name}")), "{error}");
            } else {
                let error = resolved.unwrap_err().to_string();
                assert!(error.contains(&format!("--features {feature}")), "{error}");
            }
        }
    }
}

#[test]
#[cfg(feature = "wgpu")]
fn compensation_is_refused_where_it_is_not_computed() {
    let refused = "--device wgpu --compensation moments";
    for line in [refused, &format!("{refused} --compare symi,lrmoe")] {
        let error = resolve(line).unwrap_err().to_string();
        assert!(
            error.starts_with("compensation moments is computed with device cpu alone, not wgpu"),
            "{error}"
        );
    }
    let other = "--device wgpu --compensation moments --policy symi";
    assert!(resolve(other).is_ok(), "it has no effect there");
}

#[test]
fn ways_between_nodes_are_known_or_refused() {
    let error = parse("--all-to-all crooked").unwrap_err().to_string();
    assert!(
        error.contains("must be direct, hierarchical or auto"),
        "{error}"
    );
}

#[test]
fn cards_are_those_named_or_that_of_the_process() {
    let device = |name: &str| name.parse::<Device>().unwrap();
    let several = device("cuda:2-4");
    assert_eq!(several.to_string(), "cuda:2-4");
    let Device::Cuda(Some(cards)) = several else {
        panic!("{several}")
    };
    assert_eq!(cards.numbers().collect::<Vec<_>>(), [2, 3, 4]);
    assert_eq!(device("cuda").of_process(5), device("cuda:5"));
    for named in ["cpu", "wgpu", "cuda:1", "cuda:2-4"] {
        assert_eq!(device(named).of_process(5), device(named));
    }
}
