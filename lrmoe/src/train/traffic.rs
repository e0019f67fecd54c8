//! What all ranks sent in a step, by collective and class of link.

use std::collections::BTreeMap;

use lrmoe_comm::{Collective, LinkTraffic, Sent, Traffic};
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// What went over one class of links.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SentRecord {
    /// Bytes.
    pub bytes: u64,
    /// Messages that are not empty.
    pub messages: u64,
}

/// What was sent, by how far it went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkRecord {
    /// Within a rank's memory.
    pub own: SentRecord,
    /// To other ranks of the node.
    pub intra: SentRecord,
    /// To other nodes.
    pub inter: SentRecord,
}

impl LinkRecord {
    fn add(&mut self, numbers: &[u64]) {
        let classes = [&mut self.own, &mut self.intra, &mut self.inter];
        for (class, sent) in classes.into_iter().zip(numbers.chunks(2)) {
            class.bytes += sent[0];
            class.messages += sent[1];
        }
    }
}

/// Adds up what all ranks sent, by the name of the collective; every rank gets the same.
pub(super) fn gather_traffic<C: Collective>(
    comm: &mut C,
    traffic: &Traffic,
) -> Result<BTreeMap<String, LinkRecord>, Error> {
    let kinds = [
        ("all_to_all", traffic.all_to_all),
        ("all_reduce", traffic.all_reduce),
        ("all_gather", traffic.all_gather),
        ("reduce_scatter", traffic.reduce_scatter),
        ("broadcast", traffic.broadcast),
    ];
    let numbers = |LinkTraffic { own, intra, inter }: LinkTraffic| {
        [own, intra, inter].map(|Sent { bytes, messages }| [bytes, messages])
    };
    let halves = |number: u64| [number as u32, (number >> 32) as u32];
    let mine: Vec<u32> = kinds
        .iter()
        .flat_map(|(_, links)| numbers(*links).into_iter().flatten().flat_map(halves))
        .collect();
    let mut all = vec![0; mine.len() * comm.ranks()];
    comm.all_gather(&mine, &mut all)?;
    let words = all.as_chunks::<2>().0.iter();
    let all: Vec<u64> = words
        .map(|half| u64::from(half[0]) | u64::from(half[1]) << 32)
        .collect();
    let mut sums: BTreeMap<String, LinkRecord> = BTreeMap::new();
    // Six numbers of each kind from each rank.
    for (index, numbers) in all.chunks(6).enumerate() {
        let (name, _) = kinds[index % kinds.len()];
        sums.entry(name.to_owned()).or_default().add(numbers);
    }
    sums.retain(|_, links| *links != LinkRecord::default());
    Ok(sums)
}
