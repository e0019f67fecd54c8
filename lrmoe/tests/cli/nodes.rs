//! Ranks in nodes, and the ways between them.

use lrmoe::train::{LinkRecord, StepRecord};

use super::{Folder, assert_success, losses};

/// No expert has a replica, so that most tokens go to both nodes.
const RANKS: [&str; 14] = [
    "--ranks",
    "8",
    "--ranks-per-node",
    "4",
    "--batch",
    "8",
    "--steps",
    "6",
    "--experts",
    "16",
    "--top-k",
    "4",
    "--slots",
    "2",
];

fn train(folder: &Folder, name: &str) -> Vec<StepRecord> {
    let way = ["--all-to-all", name, "--out", name];
    assert_success(&folder.train(&[&RANKS[..], &way].concat()));
    folder.records(name)
}

/// The arithmetic of rows and experts gives the bytes that are counted where they are sent.
#[test]
fn what_is_counted_is_what_is_reckoned() {
    let folder = Folder::new();
    for record in train(&folder, "direct") {
        let LinkRecord { own, intra, inter } = record.sent["all_to_all"];
        let reckoned = record.forward_bytes + record.backward_bytes + record.update_bytes;
        assert_eq!(intra.bytes + inter.bytes, reckoned);
        assert!(own.bytes > 0 && intra.bytes > 0 && inter.bytes > 0);
        // The dense gradients, among others.
        assert!(record.sent["all_reduce"].inter.bytes > 0);
    }
}

#[test]
fn every_way_gives_the_same_run() {
    let folder = Folder::new();
    let [direct, hierarchical, auto] = ["direct", "hierarchical", "auto"].map(|way| {
        let records = train(&folder, way);
        (losses(&records), records)
    });
    assert_eq!(direct.0, hierarchical.0);
    assert_eq!(direct.0, auto.0);
    let selections = |records: &[StepRecord]| -> Vec<String> {
        let layers = records.iter().flat_map(|record| &record.layers);
        layers.map(|layer| layer.selection.clone()).collect()
    };
    assert_eq!(selections(&direct.1), selections(&hierarchical.1));
    for (direct, hierarchical) in direct.1.iter().zip(&hierarchical.1) {
        let [direct, joined] = [direct, hierarchical].map(|record| record.sent["all_to_all"]);
        // The four messages of a rank to another node become one, and one of counts goes ahead.
        assert!(
            joined.inter.messages < direct.inter.messages,
            "{joined:?}, {direct:?}"
        );
        assert!(joined.inter.bytes > direct.inter.bytes);
        assert!(joined.intra.bytes > direct.intra.bytes);
    }
    // This small model sends little.
    let all_to_all = |records: &[StepRecord]| records.last().map(|r| r.sent["all_to_all"]);
    assert_eq!(all_to_all(&auto.1), all_to_all(&hierarchical.1));
}
