//! [`lrmoe_fuzz::command_line`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lrmoe_fuzz::command_line(data));
