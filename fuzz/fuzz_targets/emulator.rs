//! [`lrmoe_fuzz::emulator`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lrmoe_fuzz::emulator(data));
