use arbitrary::Arbitrary;
use lrmoe_metric::{Pairs, Solo, select_keys};
use ndarray::{Array2, ArrayView2};

#[derive(Arbitrary, Debug)]
struct Input {
    experts: u8,
    /// Expert (taken modulo experts + 1, the last meaning masked) and key of each pair; one pair a token.
    pairs: Vec<(u8, u32)>,
    quotas: Vec<u8>,
}

/// Selection on keys against a plain sort.
pub fn select(data: &[u8]) {
    let Some(input) = crate::input::of::<Input>(data) else {
        return;
    };
    let experts = usize::from(input.experts) + 1;
    let ids: Vec<i32> = input
        .pairs
        .iter()
        .map(|(id, _)| (usize::from(*id) % (experts + 1)) as i32)
        .collect();
    let ids: Vec<i32> = ids
        .into_iter()
        .map(|id| if id as usize == experts { -1 } else { id })
        .collect();
    let keys: Vec<u32> = input.pairs.iter().map(|(_, key)| *key).collect();
    let quotas: Vec<u32> = (0..experts)
        .map(|e| u32::from(*input.quotas.get(e).unwrap_or(&0)))
        .collect();
    let weights = Array2::ones((ids.len(), 1));
    let view = ArrayView2::from_shape((ids.len(), 1), &ids).expect("one id a token");
    let pairs = Pairs::new(view, weights.view(), experts, 0).expect("ids are in range");
    let chosen = select_keys(&pairs, &keys, &quotas, &mut Solo).expect("valid input");

    let mut expected = Vec::new();
    for (expert, quota) in quotas.iter().enumerate() {
        let mut own: Vec<u32> = (0..ids.len() as u32)
            .filter(|pair| ids[*pair as usize] == expert as i32)
            .collect();
        own.sort_by_key(|pair| (std::cmp::Reverse(keys[*pair as usize]), *pair));
        let quota = *quota as usize;
        assert_eq!(
            chosen.next[expert],
            own.get(quota).map_or(0, |pair| keys[*pair as usize]),
            "next key of expert {expert}"
        );
        expected.extend(own.into_iter().take(quota));
    }
    expected.sort_unstable();
    assert_eq!(chosen.pairs, expected);
}
