//! [`lrmoe_fuzz::checkpoint`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lrmoe_fuzz::checkpoint(data));
