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
    for part in ["threads", "kernels", "memory", "wgpu", "missing"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    if !cfg!(feature = "wgpu") {
        assert!(said.contains("--features wgpu"), "{said}");
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
    let missing = report["missing"].as_array().expect("a list");
    assert_eq!(missing.is_empty(), !adapters.is_empty());
    for part in missing {
        assert!(
            part["command"]
                .as_str()
                .is_some_and(|command| !command.is_empty())
        );
    }
}
