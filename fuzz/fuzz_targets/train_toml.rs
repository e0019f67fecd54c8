//! [`lrmoe_fuzz::train_toml`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lrmoe_fuzz::train_toml(data));
