//! [`lrmoe_fuzz::trace_megatron`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lrmoe_fuzz::trace_megatron(data));
