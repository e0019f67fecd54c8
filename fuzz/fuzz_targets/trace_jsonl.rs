//! [`lrmoe_fuzz::trace_jsonl`] under libFuzzer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| lrmoe_fuzz::trace_jsonl(data));
