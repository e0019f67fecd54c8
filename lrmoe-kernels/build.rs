//! Compiles the emulator of CUDA kernels, where tests ask for it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "cuda-emu")]
    compile_emulator();
}

#[cfg(feature = "cuda-emu")]
fn compile_emulator() {
    println!("cargo:rerun-if-changed=src/cuda");
    let mut build = cc::Build::new();
    // With the program's own, as in fuzzing: `RUSTFLAGS=-Zsanitizer=address`.
    let sanitizers = std::env::var("CARGO_CFG_SANITIZE").unwrap_or_default();
    if sanitizers
        .split(',')
        .any(|sanitizer| sanitizer == "address")
    {
        build.flag("-fsanitize=address");
    }
    build
        .cpp(true)
        .std("c++17")
        .file("src/cuda/emu/emulator.cpp")
        // As on a card: sums and products are rounded one by one, words are read as what they are not, and stacks are switched by longjmp.
        .flag_if_supported("-ffp-contract=off")
        .flag_if_supported("-fno-strict-aliasing")
        .flag_if_supported("-U_FORTIFY_SOURCE")
        // An access of 16 bytes that is not aligned traps, as it does on a card.
        .flag_if_supported("-fsanitize=alignment")
        .flag_if_supported("-fsanitize-undefined-trap-on-error")
        // Unrolling, which is for cards.
        .flag_if_supported("-Wno-unknown-pragmas")
        .opt_level(2)
        .compile("lrmoe_emu");
}
