//! `lrmoe doctor`.

use super::{Folder, assert_success, text};

#[test]
fn doctor_reports_what_there_is_and_what_is_missing() {
    let folder = Folder::new();
    let output = folder
        .program(&["doctor"])
        .output()
        .expect("the program starts");
    assert_success(&output);
    let said = text(&output.stdout);
    for part in ["threads", "kernels", "memory", "wgpu", "cuda", "missing"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    for (feature, built) in [
        ("wgpu", cfg!(feature = "wgpu")),
        ("cuda", cfg!(feature = "cuda")),
    ] {
        let command = format!("cargo build --release -p lrmoe --features {feature}");
        assert_eq!(said.contains(&command), !built, "{said}");
    }
}

#[test]
fn doctor_reports_as_json_too() {
    let folder = Folder::new();
    let output = folder
        .program(&["doctor", "--json"])
        .output()
        .expect("the program starts");
    assert_success(&output);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let cpu = &report["cpu"];
    assert!(cpu["threads"].as_u64() > Some(0));
    assert!(cpu["f32_instructions"].is_string());
    assert_eq!(report["wgpu"]["built"], cfg!(feature = "wgpu"));
    let adapters = report["wgpu"]["adapters"].as_array().expect("a list");
    for adapter in adapters {
        assert!(
            adapter["max_storage_binding_bytes"].as_u64() > Some(0),
            "{adapter}"
        );
    }
    let cuda = &report["cuda"];
    assert_eq!(cuda["built"], cfg!(feature = "cuda"));
    let cards = cuda["cards"].as_array().expect("a list");
    for (number, card) in cards.iter().enumerate() {
        assert_eq!(card["number"].as_u64(), Some(number as u64));
        assert!(card["memory_bytes"].as_u64() > Some(0), "{card}");
    }
    let missing = report["missing"].as_array().expect("a list");
    let complete = !adapters.is_empty() && !cards.is_empty() && !cuda["nvrtc"].is_null();
    assert_eq!(missing.is_empty(), complete);
    if cfg!(feature = "cuda") {
        let names = |part: &str| {
            let of = |missing: &serde_json::Value| missing["what"].as_str().unwrap().contains(part);
            missing.iter().any(of)
        };
        assert_eq!(names("NVIDIA driver"), cuda["driver_cuda"].is_null());
        assert_eq!(names("NVRTC"), cuda["nvrtc"].is_null());
        assert_eq!(
            cuda["problem"].is_null(),
            !cards.is_empty() && !cuda["nvrtc"].is_null()
        );
    }
    for part in missing {
        assert!(
            part["command"]
                .as_str()
                .is_some_and(|command| !command.is_empty())
        );
    }
}
