//! What `bench` measured: on any device, and what is added on the CPU and on GPUs.
//!
//! Fields are those of `docs/schemas/bench.json`, which says what each means and in which unit.
#![allow(missing_docs)]

use std::io;

use serde::Serialize;

use super::table::{Table, bytes, rate, short};
use super::{Page, Record, Run};

/// Several measurements of one thing.
#[derive(Clone, Debug, Serialize)]
pub struct Spread {
    pub tokens: usize,
    pub median: f64,
    pub least: f64,
    pub most: f64,
    pub all: Vec<f64>,
}

impl Spread {
    /// Of measurements of `tokens` tokens each; zeros where there are none.
    pub fn new(tokens: usize, all: Vec<f64>) -> Self {
        let mut sorted = all.clone();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median = match sorted.len() {
            0 => 0.0,
            n if n.is_multiple_of(2) => (sorted[middle - 1] + sorted[middle]) / 2.0,
            _ => sorted[middle],
        };
        let (least, most) = (sorted.first().copied().unwrap_or(0.0), sorted.last().copied().unwrap_or(0.0));
        Spread { tokens, median, least, most, all }
    }

    fn line(&self, name: &str) -> String {
        let Spread { tokens, median, least, most, all } = self;
        let n = all.len();
        format!("  {name:<8} {median:.0} tokens/s, median of {n} runs of {tokens} tokens ({least:.0} to {most:.0})")
    }
}

/// What is measured on every device.
#[derive(Clone, Debug, Serialize)]
pub struct Speed {
    #[serde(flatten)]
    /// What ran, and on what.
    pub run: Run,
    pub prefill_tokens_per_second: Spread,
    pub decode_tokens_per_second: Spread,
    pub weight_bytes_per_token: u64,
    pub weight_bytes_per_second: f64,
    pub batches: Vec<BatchSpeed>,
}

impl Speed {
    fn speeds(&self, page: &mut Page<'_>) -> io::Result<()> {
        page.line(self.prefill_tokens_per_second.line("prefill"))?;
        page.line(self.decode_tokens_per_second.line("decode"))
    }

    /// A table of several sequences at once, where they were asked for.
    fn batches(&self, page: &mut Page<'_>) -> io::Result<()> {
        if self.batches.is_empty() {
            return Ok(());
        }
        let mut t = Table::new(&[">sequences", ">tokens/s", ">tokens/s each"]);
        for BatchSpeed { sequences: n, tokens_per_second: s } in &self.batches {
            t.row([n.to_string(), format!("{s:.0}"), format!("{:.0}", s / *n as f64)]);
        }
        page.gap()?;
        page.table(&t)
    }
}

/// The time of one operation, averaged over ranks.
#[derive(Clone, Debug, Serialize)]
pub struct Share {
    pub op: &'static str,
    pub calls: f64,
    pub seconds: f64,
    pub share: f64,
}

/// Where the time of prefill or decode went.
#[derive(Clone, Debug, Serialize)]
pub struct Phase {
    pub seconds: f64,
    pub ops: Vec<Share>,
}

/// A read sweep over memory.
#[derive(Clone, Debug, Serialize)]
pub struct Sweep {
    pub bytes_per_second: f64,
    pub buffer_bytes: u64,
    pub largest_cache_bytes: u64,
    pub threads: usize,
    pub cached: bool,
    pub share: f64,
}

/// What memory was taken.
#[derive(Clone, Debug, Serialize)]
pub struct Memory {
    pub peak_bytes: Option<u64>,
    pub weights_per_rank: Vec<u64>,
    pub file_bytes: u64,
    /// What all parameters would take in f32.
    pub weights_as_f32_bytes: u64,
}

/// `bench` on the CPU.
#[derive(Clone, Debug, Serialize)]
pub struct CpuBench {
    #[serde(flatten)]
    pub speed: Speed,
    pub threads: usize,
    pub open_seconds: f64,
    pub load_seconds: f64,
    pub read_bandwidth: Option<Sweep>,
    pub memory: Memory,
    pub prefill: Phase,
    pub decode: Phase,
}

impl Record for CpuBench {
    fn text(&self, page: &mut Page<'_>) -> io::Result<()> {
        let (open, load) = (1e3 * self.open_seconds, 1e3 * self.load_seconds);
        page.line(format!("{}, {} threads", self.speed.run.line(), self.threads))?;
        page.line(format!("  load     open {open:.0} ms, weights to ranks {load:.0} ms"))?;
        self.speed.speeds(page)?;
        page.line(format!("  reads    {}", self.reads()))?;
        page.line(format!("  memory   {}", self.memory.line()))?;
        page.gap()?;
        page.table(&self.shares())?;
        self.speed.batches(page)
    }
}

impl CpuBench {
    fn reads(&self) -> String {
        let Speed { weight_bytes_per_token: token, weight_bytes_per_second: speed, .. } = &self.speed;
        let reads = format!("{} of weights per decoded token: {}", bytes(*token), rate(*speed));
        let Some(b) = &self.read_bandwidth else {
            return format!("{reads}; no memory was left to measure the bandwidth");
        };
        let (share, sweep) = (100.0 * b.share, rate(b.bytes_per_second));
        let mut text = format!("{reads}, {share:.0} % of the {sweep} of a read sweep over {}", bytes(b.buffer_bytes));
        if b.cached {
            text.push_str(&format!(" (too small to rule out the cache of {})", bytes(b.largest_cache_bytes)));
        }
        if self.memory.weights_per_rank.iter().sum::<u64>() <= b.largest_cache_bytes {
            text.push_str("; the weights fit into a cache, so memory is no limit here");
        }
        text
    }

    /// One line per operation, by its time in decode.
    fn shares(&self) -> Table {
        let tokens = |s: &Spread| s.tokens as f64;
        let steps = tokens(&self.speed.decode_tokens_per_second);
        let prompt = tokens(&self.speed.prefill_tokens_per_second);
        let mut t = Table::new(&["operation", ">decode", ">us/token", ">calls/token", ">prefill", ">us/token"]);
        for d in &self.decode.ops {
            let p = self.prefill.ops.iter().find(|p| p.op == d.op);
            t.row([
                d.op.to_string(),
                format!("{:.1} %", 100.0 * d.share),
                short(1e6 * d.seconds / steps),
                format!("{:.0}", d.calls / steps),
                p.map_or(String::new(), |p| format!("{:.1} %", 100.0 * p.share)),
                p.map_or(String::new(), |p| short(1e6 * p.seconds / prompt)),
            ]);
        }
        t
    }
}

impl Memory {
    fn line(&self) -> String {
        let Memory { peak_bytes, weights_per_rank: ranks, file_bytes, weights_as_f32_bytes } = self;
        format!(
            "peak {} resident, with {} of weights by the plan (ranks: {}, at most {} on one) and the mapped file's {}; \
             expanded to f32 the weights would take {}",
            peak_bytes.map_or("unknown".into(), bytes),
            bytes(ranks.iter().sum()),
            ranks.len(),
            bytes(ranks.iter().max().copied().unwrap_or(0)),
            bytes(*file_bytes),
            bytes(*weights_as_f32_bytes)
        )
    }
}

/// How weights came to the GPUs.
#[derive(Clone, Debug, Serialize)]
pub struct Load {
    pub file_bytes: u64,
    pub seconds: f64,
    pub bytes_per_second: f64,
    pub plain_reader_bytes_per_second: f64,
    pub share: f64,
    pub host_anonymous_bytes: Option<u64>,
    pub host_pinned_bytes: usize,
}

/// What the first GPU's memory does, measured in the same process.
#[derive(Clone, Debug, Serialize)]
pub struct GpuBandwidth {
    pub copy_bytes_per_second: f64,
    pub read_bytes_per_second: f64,
    pub share_of_copy: f64,
    pub share_of_read: f64,
}

/// One operation of a decode step on one GPU, mean over GPUs, beyond what empty launches take.
#[derive(Clone, Debug, Serialize)]
pub struct OpCost {
    pub op: &'static str,
    pub launches: u64,
    pub seconds: f64,
    pub bytes: u64,
}

/// What an empty launch takes, in seconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Empty {
    pub timed: f64,
    pub recorded: f64,
}

/// Where a decode step's time goes.
#[derive(Clone, Debug, Serialize)]
pub struct Step {
    pub seconds: f64,
    pub kernel_seconds: f64,
    pub all_reduce_seconds: f64,
    pub first_rank_alone_seconds: Option<f64>,
    pub launches: u64,
    pub recorded_nodes: usize,
    pub replays: u64,
    pub empty_launch_seconds: Empty,
    pub unexplained_seconds: f64,
    pub ops: Vec<OpCost>,
}

/// GPU memory.
#[derive(Clone, Debug, Serialize)]
pub struct GpuMemory {
    pub weights_per_rank_by_plan: Vec<u64>,
    pub used_per_gpu: Vec<u64>,
}

/// Decode of several sequences at once.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct BatchSpeed {
    pub sequences: usize,
    pub tokens_per_second: f64,
}

/// `bench` on GPUs.
#[derive(Clone, Debug, Serialize)]
pub struct GpuBench {
    #[serde(flatten)]
    pub speed: Speed,
    pub gpus: Vec<String>,
    pub load: Load,
    pub bandwidth: GpuBandwidth,
    pub step: Step,
    pub memory: GpuMemory,
}

impl Record for GpuBench {
    fn text(&self, page: &mut Page<'_>) -> io::Result<()> {
        let (load, b, step) = (&self.load, &self.bandwidth, &self.step);
        page.line(self.speed.run.line())?;
        page.line(format!("  gpus     {}", self.gpus.join(", ")))?;
        page.line(match load.file_bytes {
            0 => format!("  load     {:.2} s, from no file: the model is built in", load.seconds),
            size => format!(
                "  load     {} in {:.2} s: {}, {:.0} % of a plain sequential read of the same file ({})",
                bytes(size),
                load.seconds,
                rate(load.bytes_per_second),
                100.0 * load.share,
                rate(load.plain_reader_bytes_per_second)
            ),
        })?;
        let (anonymous, pinned) = (load.host_anonymous_bytes, bytes(load.host_pinned_bytes as u64));
        let anonymous = anonymous.map_or("unknown".into(), bytes);
        page.line(format!("  host     {anonymous} anonymous memory, {pinned} pinned while loading"))?;
        self.speed.speeds(page)?;
        page.line(format!(
            "  reads    {} of weights per token: {}, {:.0} % of a copy ({}), {:.0} % of a read sweep ({})",
            bytes(self.speed.weight_bytes_per_token),
            rate(self.speed.weight_bytes_per_second),
            100.0 * b.share_of_copy,
            rate(b.copy_bytes_per_second),
            100.0 * b.share_of_read,
            rate(b.read_bytes_per_second)
        ))?;
        let us = |seconds: f64| short(1e6 * seconds);
        page.line(format!(
            "  step     {} us = {} in kernels + {} in {} launches (as if empty) + {} elsewhere",
            us(step.seconds),
            us(step.kernel_seconds),
            us(step.launches as f64 * step.empty_launch_seconds.recorded),
            step.launches,
            us(step.unexplained_seconds)
        ))?;
        page.line(format!("  graph    {} nodes, replayed {} times", step.recorded_nodes, step.replays))?;
        if let Some(alone) = step.first_rank_alone_seconds {
            let (met, alone) = (us(step.all_reduce_seconds), us(alone));
            let text =
                format!("{met} us of the kernels' time in all-reduces; the first rank's step alone takes {alone}");
            page.line(format!("  ranks    {text} us"))?;
        }
        let most = |v: &[u64]| bytes(v.iter().max().copied().unwrap_or(0));
        let (plan, used) = (most(&self.memory.weights_per_rank_by_plan), most(&self.memory.used_per_gpu));
        page.line(format!("  memory   {plan} of weights on a rank by the plan, {used} taken from a GPU in all"))?;
        page.gap()?;
        page.table(&step.table())?;
        self.speed.batches(page)
    }
}

impl Step {
    fn table(&self) -> Table {
        let mut t = Table::new(&["operation", ">us/step", ">share", ">launches", ">bytes", ">GB/s"]);
        for c in &self.ops {
            let read = |text: String| if c.bytes > 0 { text } else { String::new() };
            t.row([
                c.op.to_string(),
                short(1e6 * c.seconds),
                format!("{:.1} %", 100.0 * c.seconds / self.kernel_seconds.max(1e-12)),
                c.launches.to_string(),
                read(bytes(c.bytes)),
                read(format!("{:.0}", c.bytes as f64 / c.seconds.max(1e-12) / 1e9)),
            ]);
        }
        t
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_lies_between_the_extremes() {
        let three = |all: Vec<f64>| {
            let s = Spread::new(1, all);
            (s.median, s.least, s.most)
        };
        assert_eq!(three(vec![3.0, 1.0, 2.0]), (2.0, 1.0, 3.0));
        assert_eq!(three(vec![4.0, 1.0]), (2.5, 1.0, 4.0));
        assert_eq!(three(Vec::new()), (0.0, 0.0, 0.0));
    }
}
