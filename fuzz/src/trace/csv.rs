use std::collections::BTreeMap;

use lrmoe::trace::{ConvertOptions, Format};
use ndarray::Array3;

use super::{Expected, MOST, MOST_COUNTS, Steps, check_converted, choice};

const NAMES: [&str; 5] = ["step", "layer", "rank", "expert", "count"];

/// CSV traces against a reader that splits lines at commas. The first byte is the number of experts asked for, `0` for none.
pub fn trace_csv(data: &[u8]) {
    let Some((experts, text)) = choice(data) else {
        return;
    };
    let options = ConvertOptions {
        experts: (experts > 0).then_some(experts.into()),
        ..ConvertOptions::default()
    };
    let expected = match std::str::from_utf8(text) {
        // Quotes and marks of byte order are left to the other reader.
        Ok(plain) if !plain.contains(['"', '\u{feff}']) => match parse(plain) {
            Some(records) => {
                let [layers, ranks, largest] = sizes(&records);
                let experts = options.experts.unwrap_or(largest);
                if layers * ranks * experts > MOST_COUNTS {
                    return;
                }
                steps(&records, [layers, ranks, experts])
            }
            None => Expected::Refused,
        },
        // As large a trace as a long number asks for is none of a reader's faults.
        _ if text
            .split(|byte| !byte.is_ascii_digit())
            .any(|digits| digits.len() > 2) =>
        {
            return;
        }
        _ => Expected::Unknown,
    };
    check_converted("in.csv", text, Format::Csv, &options, &expected);
}

/// Step, layer, rank, expert and count of every line; none if a line is wrong.
fn parse(text: &str) -> Option<Vec<[u64; 5]>> {
    let lines = text.split(['\n', '\r']).filter(|line| !line.is_empty());
    let mut lines = lines.map(|line| line.split(',').map(str::trim).collect::<Vec<_>>());
    let names = lines.next()?;
    let columns = NAMES.map(|name| names.iter().position(|found| *found == name));
    if columns[3].is_none() || columns[4].is_none() {
        return None;
    }
    let id = MOST as u64 - 1;
    let limits = [i32::MAX as u64, id, id, id, u32::MAX.into()];
    let mut records = Vec::new();
    for fields in lines {
        if fields.len() != names.len() {
            return None;
        }
        let mut record = [0; 5];
        for ((number, column), limit) in record.iter_mut().zip(columns).zip(limits) {
            if let Some(column) = column {
                *number = fields[column].parse().ok().filter(|n| *n <= limit)?;
            }
        }
        records.push(record);
    }
    Some(records)
}

fn sizes(records: &[[u64; 5]]) -> [usize; 3] {
    [1, 2, 3].map(|column| {
        let largest = records.iter().map(|record| record[column]).max();
        largest.map_or(0, |id| id as usize + 1)
    })
}

fn steps(records: &[[u64; 5]], dim: [usize; 3]) -> Expected {
    let mut cells = BTreeMap::new();
    let sorted = records.windows(2).all(|two| two[0][0] <= two[1][0]);
    for &[step, layer, rank, expert, count] in records {
        let at = [step, layer, rank, expert];
        if cells.insert(at, count).is_some() || expert as usize >= dim[2] {
            return Expected::Refused;
        }
    }
    let mut numbers: Vec<u64> = records.iter().map(|record| record[0]).collect();
    numbers.dedup();
    let (Some(&first), true) = (numbers.first(), sorted) else {
        return Expected::Refused;
    };
    let mut steps = Steps {
        first,
        ..Steps::default()
    };
    for number in numbers {
        let cell = |(layer, rank, expert): (usize, usize, usize)| {
            let at = [number, layer as u64, rank as u64, expert as u64];
            cells.get(&at).copied().unwrap_or(0) as u32
        };
        steps.counts.push(Array3::from_shape_fn(dim, cell));
    }
    steps.checked()
}
