//! Every stage of a rank's part of an MoE layer in a backend's memory, against what cards of three kinds could do at best: the table of docs/gpu.md.
//!
//! `cargo bench -p lrmoe-kernels --features cuda --bench stages -- [--device none|cpu|cuda|cuda-emu] [--card N] [--products own|cublas] [--tokens N]
//! [--experts E] [--top-k K] [--width D] [--hidden F] [--retention R] [--calls N] [--rounds N]`
//!
//! A time is that of a call among as many as `--calls`, after which the device is waited for: the median of `--rounds` rounds. What a stage waits for by
//! itself is in it. Where this runs as a test, sizes are tiny and only the form of the table is looked at.

#[path = "../moe/arguments.rs"]
mod arguments;
mod floor;
#[path = "../moe/meters.rs"]
#[expect(dead_code, reason = "what the other bench needs of it")]
mod meters;
#[path = "../moe/routing.rs"]
mod routing;
mod subject;

use std::{error::Error, fmt::Write};

use lrmoe_kernels::{Activation, Cpu, FfnShape};

use arguments::Arguments;
use floor::{CARDS, STAGES, Sizes};
use subject::{Backend, measure};

type Failure = Box<dyn Error + Send + Sync>;

struct Settings {
    sizes: Sizes,
    calls: usize,
    rounds: usize,
}

impl Settings {
    /// Qwen3-30B-A3B's layer, unless the command line says otherwise.
    fn parse(given: &Arguments) -> Result<Self, Failure> {
        let number = |name, default| given.value::<usize>(name, default);
        let (tokens, top_k) = (number("tokens", "4096")?, number("top-k", "8")?);
        let retention: f64 = given.value("retention", "0.25")?;
        if !(0.0..=1.0).contains(&retention) {
            return Err(format!("retention {retention} is out of range, must be 0 to 1").into());
        }
        Ok(Self {
            sizes: Sizes {
                tokens,
                experts: number("experts", "128")?,
                top_k,
                kept: (retention * (tokens * top_k) as f64) as usize,
                shape: FfnShape {
                    width: number("width", "2048")?,
                    hidden: number("hidden", "768")?,
                    activation: Activation::SwiGlu,
                },
            },
            calls: number("calls", "10")?,
            rounds: number("rounds", "5")?,
        })
    }

    /// Measures on a device.
    fn table<B: Backend>(&self, device: &str, backend: &B) -> Result<String, Failure> {
        let seconds = measure(backend, &self.sizes, self.calls, self.rounds)?;
        let device = format!("measured on {device}");
        self.write(
            &device,
            seconds.map(|seconds| format!("{:.1}", seconds * 1e6)),
        )
    }

    fn write(&self, device: &str, measured: [String; STAGES]) -> Result<String, Failure> {
        let mut table = self.head(device);
        for ((name, work), measured) in self.sizes.stages().iter().zip(measured) {
            let operations = match work.flop {
                0.0 => String::new(),
                flop => format!("{:.0}", flop / 1e9),
            };
            write!(table, "| {name} | {:.1} | {operations} |", work.bytes / 1e6)?;
            for card in &CARDS {
                write!(table, " {:.1} |", work.floor(card) * 1e6)?;
            }
            writeln!(table, " {measured} |")?;
        }
        Ok(table)
    }

    fn head(&self, device: &str) -> String {
        let Sizes {
            tokens,
            experts,
            top_k,
            kept,
            shape,
        } = &self.sizes;
        let cards = CARDS.map(|card| format!(" {}, us |", card.name)).concat();
        format!(
            "{tokens} tokens, {top_k} of {experts} experts each, D {}, F {}, {kept} pairs kept, f32; {device}\n\n\
             | stage | MB | GFLOP |{cards} measured, us |\n|---|---|---|{}---|\n",
            shape.width,
            shape.hidden,
            "---|".repeat(CARDS.len())
        )
    }
}

/// The device that the command line names.
fn on_device(given: &Arguments, settings: &Settings) -> Result<String, Failure> {
    match given.text("device", "cpu") {
        "none" => settings.write("not measured", std::array::from_fn(|_| "no".into())),
        "cpu" => settings.table("the CPU", &Cpu),
        #[cfg(feature = "cuda")]
        "cuda" => {
            use lrmoe_kernels::{Cuda, cuda};

            let number: usize = given.value("card", "0")?;
            let card = Cuda::new(number)?;
            let name = cuda::cards()?.swap_remove(number).name;
            match given.text("products", "own") {
                "own" => settings.table(&name, &card),
                "cublas" => {
                    let card = card.with_products(cuda::Products::CuBlas)?;
                    settings.table(&format!("{name}, products of cuBLAS"), &card)
                }
                other => Err(format!("products {other}, expected own or cublas").into()),
            }
        }
        #[cfg(feature = "cuda-emu")]
        "cuda-emu" => settings.table("the emulator", &lrmoe_kernels::Cuda::emulated()),
        other => Err(format!("device {other} is unknown, or not in this build").into()),
    }
}

fn main() -> Result<(), Failure> {
    if !std::env::args().any(|argument| argument == "--bench") {
        return test();
    }
    let given = Arguments::parse()?;
    let table = on_device(&given, &Settings::parse(&given)?)?;
    print!("{table}");
    Ok(())
}

/// On all devices that need none: the floors of the sizes in docs/gpu.md, and a table of whole rows.
fn test() -> Result<(), Failure> {
    let settings = Settings::parse(&Arguments::default())?;
    let rounded = |seconds: f64| (seconds * 1e7).round() / 10.0;
    let [_, h100, _] = &CARDS;
    let floors = settings
        .sizes
        .stages()
        .map(|(_, work)| rounded(work.floor(h100)));
    let [_, _, _, gather, scatter_add, forward, backward] = floors;
    assert_eq!(
        [gather, scatter_add, forward, backward],
        [160.3, 100.2, 4615.5, 3077.0]
    );
    let tiny = Settings {
        sizes: Sizes {
            tokens: 6,
            experts: 3,
            top_k: 2,
            kept: 5,
            shape: FfnShape {
                width: 8,
                hidden: 4,
                activation: Activation::SwiGlu,
            },
        },
        calls: 2,
        rounds: 1,
    };
    let tables = [
        tiny.table("the CPU", &Cpu)?,
        #[cfg(feature = "cuda-emu")]
        tiny.table("the emulator", &lrmoe_kernels::Cuda::emulated())?,
    ];
    for table in tables {
        let rows: Vec<Vec<&str>> = table
            .lines()
            .skip(4)
            .map(|row| row.split('|').map(str::trim).collect())
            .collect();
        assert_eq!(rows.len(), STAGES, "{table}");
        for row in rows {
            let [_, name, .., measured, _] = &row[..] else {
                panic!("{table}")
            };
            assert!(!name.is_empty());
            assert!(measured.parse::<f64>()? > 0.0, "{table}");
        }
    }
    Ok(())
}
