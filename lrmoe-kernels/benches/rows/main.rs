//! Rows of one MoE layer from place to place, and their norms. Prints one JSON line for each work.
//!
//! `cargo bench -p lrmoe-kernels --bench rows -- [--dtype f32|bf16] [--tokens N] [--zipf S] [--reps N] [--threads N] [--experts E] [--top-k K]
//! [--width D]`
//!
//! | work | reads | writes |
//! |---|---|---|
//! | permute | tokens, once for each of their pairs | rows by expert; the preparation of the index is timed with it |
//! | compact half | tokens of half of the pairs | rows by expert |
//! | compact half of rows | half of the rows by expert | the same |
//! | combine | rows by expert with weights | tokens |
//! | scatter add | the same | tokens, f32, to which it adds |
//! | group, ungroup | rows by (source, expert) of 8 sources; rows by expert | each other |
//! | squared norms | rows by expert | norms |
//! | floor: ... | what the machine allows: stores of as many bytes as the rows have, reads, and copies of half of them in one piece |
//!
//! `gb_s` counts the bytes of distinct elements read and written, a token's once. The canary is the rate of fused multiply-adds on all threads
//! before and after: it shows when two threads shared one core.

#[path = "../moe/arguments.rs"]
mod arguments;
mod floor;
#[path = "../moe/meters.rs"]
#[expect(dead_code, reason = "what the other bench needs of it")]
mod meters;
#[path = "../moe/routing.rs"]
#[expect(dead_code, reason = "what the other bench needs of it")]
mod routing;

use std::error::Error;

use lrmoe_kernels::{
    CompactRows, Cpu, Element, FfnElement, HostBuffer, Memory, SelectPairs, half::bf16,
    lrmoe_compact::Grouping, ndarray::Array2,
};
use rayon::prelude::*;

use arguments::Arguments;
use meters::{canary, median, timed};
use routing::{Random, route};

const SOURCES: usize = 8;

#[derive(Debug)]
struct Settings {
    dtype: String,
    tokens: usize,
    zipf: f64,
    reps: usize,
    threads: usize,
    experts: usize,
    top_k: usize,
    width: usize,
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let given = Arguments::parse()?;
    let number = |name, default| given.value::<usize>(name, default);
    let settings = Settings {
        dtype: given.text("dtype", "bf16").to_owned(),
        tokens: number("tokens", "16384")?,
        zipf: given.value("zipf", "0")?,
        reps: number("reps", "7")?,
        threads: number("threads", "2")?,
        experts: number("experts", "128")?,
        top_k: number("top-k", "8")?,
        width: number("width", "2048")?,
    };
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(settings.threads)
        .build()?;
    pool.install(|| match settings.dtype.as_str() {
        "f32" => measure::<f32>(&settings, |x| x),
        "bf16" => measure(&settings, bf16::from_f32),
        other => Err(format!("dtype {other}, expected f32 or bf16").into()),
    })
}

fn filled<T: Element>(
    len: usize,
    value: impl Fn(usize) -> T + Sync,
) -> Result<HostBuffer<T>, lrmoe_kernels::Error> {
    let mut values = HostBuffer::default();
    Cpu.resize(&mut values, len)?;
    let part = 1 << 16;
    values
        .par_chunks_mut(part)
        .enumerate()
        .for_each(|(task, values)| {
            for (place, to) in values.iter_mut().enumerate() {
                *to = value(task * part + place);
            }
        });
    Ok(values)
}

struct Report<'a> {
    settings: &'a Settings,
}

impl Report<'_> {
    /// Times the work and prints a line; `bytes` are what it reads and writes.
    fn time<E: Into<Box<dyn Error + Send + Sync>>>(
        &self,
        work: &str,
        bytes: usize,
        mut run: impl FnMut() -> Result<(), E>,
    ) -> Result<(), Box<dyn Error + Send + Sync>> {
        let before = canary();
        let mut seconds = vec![];
        for rep in 0..self.settings.reps + 2 {
            let (result, times) = timed(&mut run);
            result.map_err(Into::into)?;
            // The first ones touch memory for the first time.
            if rep >= 2 {
                seconds.push(times.wall);
            }
        }
        let best = seconds.iter().copied().fold(f64::INFINITY, f64::min);
        let seconds = median(seconds);
        let settings = self.settings;
        println!(
            "{{\"ours\": \"lrmoe\", \"work\": \"{work}\", \"dtype\": \"{}\", \"tokens\": {}, \"rows\": {}, \"width\": {}, \"zipf\": {}, \
             \"threads\": {}, \"seconds\": {seconds:.6}, \"best_s\": {best:.6}, \"gb_s\": {:.1}, \"canary_gflops\": {:?}}}",
            settings.dtype,
            settings.tokens,
            settings.tokens * settings.top_k,
            settings.width,
            settings.zipf,
            settings.threads,
            bytes as f64 / seconds / 1e9,
            [before, canary()],
        );
        Ok(())
    }
}

fn measure<T: FfnElement>(
    settings: &Settings,
    narrow: fn(f32) -> T,
) -> Result<(), Box<dyn Error + Send + Sync>> {
    let &Settings {
        tokens,
        experts,
        top_k,
        width,
        ..
    } = settings;
    let report = Report { settings };
    let mut random = Random(1);
    let routing = route([tokens, experts, top_k], settings.zipf, &mut random);
    let count = routing.tokens.len();
    let token_of: Vec<_> = routing.tokens.iter().map(|&token| token as u32).collect();
    let mut pairs = vec![0; count];
    for (pair, &row) in routing.rows.iter().enumerate() {
        pairs[row] = pair as u32;
    }
    let kept: Vec<_> = (0..count as u32).filter(|_| random.unit() < 0.5).collect();
    let tokens_of_kept: Vec<_> = kept.iter().map(|&row| token_of[row as usize]).collect();

    let value = |i: usize| narrow((i % 251) as f32 / 64.0 - 2.0);
    let x = filled(tokens * width, value)?;
    let mut rows = HostBuffer::default();
    let mut half = HostBuffer::default();
    let row_bytes = width * size_of::<T>();
    report.time("permute", (tokens + count) * row_bytes, || {
        let index = Cpu.row_index(&token_of, tokens)?;
        Cpu.gather(&x, width, &index, &mut rows)
    })?;
    report.time("row index", 4 * count, || {
        std::hint::black_box(Cpu.row_index(&token_of, tokens)?);
        Ok::<_, lrmoe_kernels::Error>(())
    })?;
    report.time("pair rows", 4 * count, || {
        std::hint::black_box(Cpu.pair_rows(&pairs, tokens, top_k)?);
        Ok::<_, lrmoe_kernels::Error>(())
    })?;
    report.time("compact half", (tokens + kept.len()) * row_bytes, || {
        let index = Cpu.row_index(&tokens_of_kept, tokens)?;
        Cpu.gather(&x, width, &index, &mut half)
    })?;
    report.time("compact half of rows", 2 * kept.len() * row_bytes, || {
        let index = Cpu.row_index(&kept, count)?;
        Cpu.gather(&rows, width, &index, &mut half)
    })?;

    let weights = filled(count, |_| 1.0 / top_k as f32)?;
    let mut y = HostBuffer::default();
    report.time("combine", (tokens + count) * row_bytes, || {
        let pairs = Cpu.pair_rows(&pairs, tokens, top_k)?;
        Cpu.combine(&rows, width, &pairs, Some(&weights), &mut y)
    })?;
    let mut sums = filled(tokens * width, |_| 0.0_f32)?;
    report.time(
        "scatter add",
        count * row_bytes + 8 * tokens * width,
        || {
            let pairs = Cpu.pair_rows(&pairs, tokens, top_k)?;
            Cpu.scatter_add(&rows, width, &pairs, Some(&weights), &mut sums)
        },
    )?;

    let of_expert = |expert: usize| (routing.offsets[expert + 1] - routing.offsets[expert]) as u32;
    let counts = Array2::from_shape_fn((SOURCES, experts), |(source, expert)| {
        let (all, sources) = (of_expert(expert), SOURCES as u32);
        all / sources + u32::from((source as u32) < all % sources)
    });
    let grouping = Grouping::new(counts.view(), 1)?;
    let mut received = HostBuffer::default();
    report.time("ungroup", 2 * count * row_bytes, || {
        let grouping = Cpu.grouping(&grouping)?;
        Cpu.ungroup(&grouping, &rows, width, &mut received)
    })?;
    report.time("group", 2 * count * row_bytes, || {
        let grouping = Cpu.grouping(&grouping)?;
        Cpu.group(&grouping, &received, width, &mut rows)
    })?;
    let mut norms = HostBuffer::default();
    report.time("squared norms", count * row_bytes, || {
        Cpu.squared_norms(&rows, [count, width], &mut norms)
    })?;

    floor::measure(&report, &mut rows, &mut received)
}
