//! [`lrmoe_fuzz::cluster_toml`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lrmoe_fuzz::cluster_toml(data));
