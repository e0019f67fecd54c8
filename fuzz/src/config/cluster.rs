use lrmoe_plan::ClusterSpec;
use toml::{Table, Value};

use super::text;

/// Descriptions of clusters: accepted if their fields are all there, alone and in range, and written again they read the same.
pub fn cluster_toml(data: &[u8]) {
    let Some(text) = text(data) else {
        return;
    };
    let valid = text.parse().is_ok_and(|table: Table| is_cluster(&table));
    match ClusterSpec::from_toml(text) {
        Ok(spec) => {
            assert!(valid, "not refused: {spec:?}");
            let written = toml::to_string(&spec).expect("numbers and a name");
            let again = ClusterSpec::from_toml(&written).expect("what has just been written");
            assert_eq!(again, spec);
        }
        Err(error) => {
            assert!(!valid, "{error}");
            assert!(!error.to_string().trim_end().ends_with(':'), "{error}");
        }
    }
}

fn number(value: &Value) -> Option<f64> {
    value.as_float().or(value.as_integer().map(|n| n as f64))
}

fn positive(value: &Value) -> bool {
    number(value).is_some_and(|n| n > 0.0 && n.is_finite())
}

fn from_0(value: &Value) -> bool {
    number(value).is_some_and(|n| n >= 0.0 && n.is_finite())
}

fn is_cluster(table: &Table) -> bool {
    let whole = |least: i64| move |value: &Value| value.as_integer().is_some_and(|n| n >= least);
    let (one, none) = (whole(1), whole(0));
    let link = |value: &Value| {
        let fields: [(&str, &dyn Fn(&Value) -> bool); 2] = [
            ("latency_seconds", &from_0),
            ("bytes_per_second", &positive),
        ];
        value.as_table().is_some_and(|link| are(link, &fields))
    };
    are(
        table,
        &[
            ("name", &Value::is_str),
            ("ranks_per_node", &one),
            ("flops", &positive),
            ("launch_seconds", &from_0),
            ("memory_bytes", &none),
            ("intra", &link),
            ("inter", &link),
        ],
    )
}

/// The table has these fields, each as it must be, and no others.
fn are(table: &Table, fields: &[(&str, &dyn Fn(&Value) -> bool)]) -> bool {
    let is = |(name, check): &(&str, &dyn Fn(&Value) -> bool)| table.get(*name).is_some_and(check);
    table.len() == fields.len() && fields.iter().all(is)
}
