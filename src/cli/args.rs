//! What was typed: the command line as clap reads it, without any I/O.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Verifies a GGUF mixture-of-experts model against a reference, layer by layer, on any number of ranks, and names the
/// fault it finds.
#[derive(Debug, Parser)]
#[command(name = "lockstep", version, after_help = EXIT_CODES)]
pub struct Cli {
    /// Neither progress nor notes on stderr; errors still
    #[arg(short, long, global = true)]
    pub quiet: bool,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 all is well; 1 a fault was found; 2 usage or I/O error; \
                          3 something could not be measured or did not run (never a pass); 78 serve: nothing to start again \
                          for; 130 Ctrl-C, 143 SIGTERM.";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// What is in the file, how it maps to parameters, what each rank will hold
    Inspect(InspectArgs),
    /// The checks: all of them, or the stages named
    Verify(VerifyArgs),
    /// The first bad layer, then operation, then region, then the kind of fault
    Bisect(BisectArgs),
    /// Text to the terminal: a chat turn, or a plain completion with --raw
    Generate(GenerateArgs),
    /// The model behind an HTTP API, once it is checked: chat and completions as OpenAI's clients speak them
    #[cfg(feature = "serve")]
    Serve(super::serve::args::ServeArgs),
    /// Activations at probe points, as a dump that other engines can read
    Dump(DumpArgs),
    /// Decode and prefill speed, and where a step's time goes
    Bench(BenchArgs),
    /// The host: driver, libraries, shared memory, GPUs, their memory and links
    Doctor(DoctorArgs),
    /// A seeded model of GLM-5's widths as a GGUF file, for tests and benches
    Synth(SynthArgs),
    /// The CUDA kernels: list them, compile them
    #[cfg(feature = "cuda")]
    Kernels(KernelsArgs),
}

impl Command {
    /// Whether a signal lets it finish what it does.
    pub fn drains(&self) -> bool {
        #[cfg(feature = "serve")]
        return matches!(self, Command::Serve(_));
        #[cfg(not(feature = "serve"))]
        false
    }

    /// Whether the result is for machines.
    pub fn json(&self) -> bool {
        match self {
            Command::Inspect(args) => args.model.json,
            Command::Verify(args) => args.subject.model.json,
            Command::Bisect(args) => args.subject.model.json,
            Command::Generate(args) => args.model.json,
            #[cfg(feature = "serve")]
            Command::Serve(_) => false,
            Command::Dump(args) => args.subject.model.json,
            Command::Bench(args) => args.model.json,
            Command::Doctor(args) => args.json,
            Command::Synth(args) => args.json,
            #[cfg(feature = "cuda")]
            Command::Kernels(args) => match args.action {
                KernelsAction::List { json } | KernelsAction::Build { json, .. } => json,
            },
        }
    }
}

/// Which model.
#[derive(Debug, Clone, Args)]
pub struct ModelArgs {
    /// A .gguf, any shard of a split set, a folder with one set, or a Hugging Face folder [default: built-in glm5-nano]
    #[arg(short, long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// Machine-readable output on stdout
    #[arg(long)]
    pub json: bool,
}

/// `inspect`.
#[derive(Debug, Clone, Args)]
pub struct InspectArgs {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Tensor-parallel ranks
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub tp: usize,
    /// Refuse a plan that cuts a block, instead of holding the covering blocks
    #[arg(long)]
    pub strict_blocks: bool,
    /// List every parameter instead of one line per kind
    #[arg(long)]
    pub all: bool,
}

/// What queries attend to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AttentionArg {
    /// The keys that the indexer chooses, as the model was trained
    Dsa,
    /// All keys: exact up to top-k tokens, beyond that another model
    Dense,
}

/// What the ranks run on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceArg {
    /// Threads of this process.
    Cpu,
    /// NVIDIA GPUs by number, rank by rank; none listed: as many as needed, from 0.
    Cuda(Vec<usize>),
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, list) = text.split_once(':').map_or((text, None), |(kind, list)| (kind, Some(list)));
        let numbers = |list: &str| list.split(',').map(|n| n.parse().ok()).collect::<Option<Vec<usize>>>();
        match (kind, list.map(numbers)) {
            ("cpu", None) => Ok(DeviceArg::Cpu),
            ("cuda", None) => Ok(DeviceArg::Cuda(Vec::new())),
            ("cuda", Some(Some(gpus))) => Ok(DeviceArg::Cuda(gpus)),
            _ => Err("expected cpu, cuda or cuda:0,1".into()),
        }
    }
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceArg::Cpu => f.write_str("cpu"),
            DeviceArg::Cuda(gpus) if gpus.is_empty() => f.write_str("cuda"),
            DeviceArg::Cuda(gpus) => {
                let list: Vec<String> = gpus.iter().map(usize::to_string).collect();
                write!(f, "cuda:{}", list.join(","))
            }
        }
    }
}

/// How activations meet stored weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RecipeArg {
    /// f32 throughout
    Strict,
    /// Activations are rounded to bf16 where they are multiplied with weights
    Fast,
}

/// What runs the model.
#[derive(Debug, Clone, Args)]
pub struct DeviceArgs {
    /// What the ranks run on: cpu, cuda or cuda:0,1 (GPU numbers, rank by rank)
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: DeviceArg,
    /// How activations meet stored weights
    #[arg(long, value_enum, default_value = "strict")]
    pub recipe: RecipeArg,
    /// Read the CUDA sources from this folder, laid out as kernels/cu, instead of the built-in ones
    #[cfg(feature = "cuda")]
    #[arg(long, value_name = "DIR")]
    pub kernels_dir: Option<PathBuf>,
}

/// `doctor`.
#[derive(Debug, Clone, Args)]
pub struct DoctorArgs {
    /// What to check: cpu, cuda or cuda:0,1 [default: all GPUs that there are]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<DeviceArg>,
    /// Smaller sizes
    #[arg(long)]
    pub quick: bool,
    /// Machine-readable output on stdout
    #[arg(long)]
    pub json: bool,
    /// Read the CUDA sources from this folder, laid out as kernels/cu, instead of the built-in ones
    #[cfg(feature = "cuda")]
    #[arg(long, value_name = "DIR")]
    pub kernels_dir: Option<PathBuf>,
}

/// `kernels`.
#[cfg(feature = "cuda")]
#[derive(Debug, Clone, Args)]
pub struct KernelsArgs {
    /// What to do.
    #[command(subcommand)]
    pub action: KernelsAction,
}

/// What to do with kernels.
#[cfg(feature = "cuda")]
#[derive(Debug, Clone, Subcommand)]
pub enum KernelsAction {
    /// The kernels, by module
    List {
        /// Machine-readable output on stdout
        #[arg(long)]
        json: bool,
    },
    /// Compile every module into the cache; needs NVRTC, but no GPU
    Build {
        /// Architectures, such as sm_90a; may repeat [default: all that the kernels are written for]
        #[arg(long, value_name = "ARCH")]
        arch: Vec<String>,
        /// Read the sources from this folder, laid out as kernels/cu, instead of the built-in ones
        #[arg(long, value_name = "DIR")]
        kernels_dir: Option<PathBuf>,
        /// The cache to fill [default: the user's own]
        #[arg(long, value_name = "DIR")]
        cache: Option<PathBuf>,
        /// Only modules whose names match, such as Q4_K
        #[arg(long, value_name = "REGEX")]
        filter: Option<String>,
        /// Machine-readable output on stdout
        #[arg(long)]
        json: bool,
    },
}

/// How the engine runs.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// What queries attend to
    #[arg(long, value_enum, default_value = "dsa")]
    pub attention: AttentionArg,
    /// Longest prefill step in tokens
    #[arg(long, value_name = "TOKENS")]
    pub chunk: Option<usize>,
}

/// `generate`.
#[derive(Debug, Clone, Args)]
pub struct GenerateArgs {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// The user's turn, or the text to continue with --raw
    pub prompt: String,
    /// Continue the text as it is, without the chat template
    #[arg(long)]
    pub raw: bool,
    /// A system message before the user's turn
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub system: Option<String>,
    /// Tensor-parallel ranks
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub tp: usize,
    /// The device.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Most tokens to generate
    #[arg(short = 'n', long, default_value_t = 256, value_name = "N")]
    pub max_tokens: usize,
    /// From 0.0001 to 10000; 0 is greedy
    #[arg(long, default_value_t = 0.0, value_name = "T", allow_negative_numbers = true)]
    pub temperature: f32,
    /// Keep the K most likely tokens; 0 keeps all
    #[arg(long, default_value_t = 0, value_name = "K", requires = "temperature")]
    pub top_k: usize,
    /// Keep the most likely tokens until their probabilities reach P
    #[arg(long, default_value_t = 1.0, value_name = "P", allow_negative_numbers = true, requires = "temperature")]
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely one
    #[arg(long, default_value_t = 0.0, value_name = "P", allow_negative_numbers = true, requires = "temperature")]
    pub min_p: f32,
    /// Seed of the noise that the temperature weighs: the same seed draws the same text on every device
    #[arg(long, default_value_t = 0, value_name = "SEED", requires = "temperature")]
    pub seed: u64,
}

/// `bench`.
#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Tensor-parallel ranks
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub tp: usize,
    /// The device.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// The engine.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Prompt tokens of the prefill measurement, and the context that decode starts from
    #[arg(long, default_value_t = 128, value_name = "N")]
    pub prompt: usize,
    /// Decode steps per repetition
    #[arg(long, default_value_t = 128, value_name = "N")]
    pub steps: usize,
    /// Repetitions; medians and spread are over these
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub repeat: usize,
    /// Sequences that decode at once, as 1,8,32: a table of speeds
    #[arg(long, value_delimiter = ',', default_value = "1", value_name = "LIST")]
    pub batch: Vec<usize>,
}

/// `synth`.
#[derive(Debug, Clone, Args)]
pub struct SynthArgs {
    /// The .gguf file to make; it must not exist. Four layers of GLM-5 take 18.5 GiB, two 7.4 GiB
    #[arg(long, value_name = "PATH")]
    pub out: PathBuf,
    /// Layers
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..1024))]
    pub layers: u32,
    /// Layers from the start whose feed-forward is dense
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub dense_layers: u32,
    /// Keys each query attends to [default: 2048, small 32]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_535))]
    pub index_top_k: Option<u32>,
    /// Routed experts; of fewer than 16, half are used per token [default: 256, small 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..16_384))]
    pub experts: Option<u32>,
    /// Tokens of the vocabulary, from 324 [default: 154880, small 1024]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(324..=1_000_000))]
    pub vocab: Option<u32>,
    /// Narrow layers of 3 MB (dense) and 9 MB (MoE) instead of GLM-5's, for tests: 33 MiB in all
    #[arg(long)]
    pub small: bool,
    /// One type for every quantised matrix, such as Q8_0 [default: Q4_K with some Q6_K and Q5_0, as files have them]
    #[arg(long, value_name = "TYPE")]
    pub r#type: Option<String>,
    /// Seed of all values
    #[arg(long, default_value_t = 0, value_name = "SEED")]
    pub seed: u64,
    /// Machine-readable output on stdout
    #[arg(long)]
    pub json: bool,
}

/// The stages of `verify`, in order of certainty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StageArg {
    /// Do GPUs copy and reduce data correctly?
    Host,
    /// Is the file whole and consistent, does every tensor have a home?
    File,
    /// Do template, special tokens, stop ids and pre-tokenizer agree?
    Tokenizer,
    /// Does each rank hold the right bytes?
    Weights,
    /// Is every kernel right on this model's shapes and types?
    Kernels,
    /// Is every operation of every layer right?
    Activations,
    /// TP 1 = TP N, prefill = decode, chunked = whole, batch 1 = N, ...
    Invariants,
    /// KL to the reference over real prompts, greedy text
    Logits,
    /// Does the file make sense as a language model; would one change make it much better?
    Sense,
}

/// What is looked at, by verify, bisect and dump.
#[derive(Debug, Clone, Args)]
pub struct SubjectArgs {
    /// The model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Tensor-parallel ranks [default: 8 for the built-in model, else 1]
    #[arg(long, value_name = "N")]
    pub tp: Option<usize>,
    /// The device.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// What queries attend to [default: dsa]; of a dump that states another: exit 2
    #[arg(long, value_enum)]
    pub attention: Option<AttentionArg>,
    /// A model that is trusted as the other side (stages file, tokenizer, weights and logits)
    #[arg(long, value_name = "PATH")]
    pub baseline: Option<PathBuf>,
    /// What is judged instead of our own run: a dump, or (verify) a running server, http://HOST:PORT, that speaks OpenAI's
    /// protocol. A key in LOCKSTEP_API_KEY or OPENAI_API_KEY is sent to it, over plain http; https is not spoken
    #[arg(long, value_name = "DIR|URL", conflicts_with_all = ["tp", "inject", "device", "recipe"])]
    pub target: Option<PathBuf>,
    /// How the dump of --target was captured, where the engine is not to blame for it: rope-halves, heads-first, layer-off,
    /// rows-off, tokens-reordered, residual-apart, norm-applied, in-place, rank-part or sequences. Found without it, too
    #[arg(long, value_name = "NAME", requires = "target")]
    pub convention: Option<String>,
    /// Text to run instead of the built-in one
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Layers to look at: 0,3-5
    #[arg(long, value_name = "LIST")]
    pub layers: Option<String>,
    /// Query rows at which operations are judged; the last is always one of them
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = at_least_one)]
    pub rows: usize,
    /// Seed of sampled rows
    #[arg(long, default_value_t = 0, value_name = "SEED")]
    pub seed: u64,
    /// Break something on purpose: KIND@SITE[:rank=R]; may repeat; `list` prints the valid ones
    #[arg(long, value_name = "FAULT")]
    pub inject: Vec<String>,
}

pub(super) fn at_least_one(text: &str) -> Result<usize, String> {
    let n: usize = text.parse().map_err(|e| format!("{e}"))?;
    (n > 0).then_some(n).ok_or("expected at least 1".into())
}

/// `bisect`.
#[derive(Debug, Clone, Args)]
pub struct BisectArgs {
    /// What is looked at.
    #[command(flatten)]
    pub subject: SubjectArgs,
}

/// `verify`.
#[derive(Debug, Clone, Args)]
pub struct VerifyArgs {
    /// Stages to run [default: all]
    #[arg(value_enum)]
    pub stages: Vec<StageArg>,
    /// What is looked at.
    #[command(flatten)]
    pub subject: SubjectArgs,
    /// Chat turns with known answers, a JSON list of {ask, answer}: the stage logits compares the texts with the CPU's
    #[arg(long, value_name = "FILE", conflicts_with = "target")]
    pub asks: Option<PathBuf>,
    /// The weights are random on purpose: the stage sense does not apply
    #[arg(long)]
    pub untrained: bool,
    /// The stage sense tries every repair on every set of texts, also where none is known
    #[arg(long)]
    pub thorough: bool,
    /// The stage sense says how the file would be edited; the file is never changed
    #[arg(long)]
    pub repair_plan: bool,
    /// The stage sense does not compare the metadata with what publishers state
    #[arg(long)]
    pub no_published_facts: bool,
    /// Write down that this very model passed, in this build on these devices, for `serve --certificate`
    #[cfg(feature = "serve")]
    #[arg(long, value_name = "FILE")]
    pub certificate: Option<PathBuf>,
    /// Let DRIFT fail
    #[arg(long)]
    pub strict: bool,
    /// Show every check, not only those that did not match
    #[arg(long)]
    pub all: bool,
}

/// `dump`.
#[derive(Debug, Clone, Args)]
pub struct DumpArgs {
    /// What is run.
    #[command(flatten)]
    pub subject: SubjectArgs,
    /// The folder to make; it must not exist
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Token ids to run instead of text: 1,2,3
    #[arg(long, value_name = "LIST", conflicts_with = "prompt")]
    pub ids: Option<String>,
    /// Only points whose full names match, such as `attn\.q_a$`
    #[arg(long, value_name = "REGEX")]
    pub filter: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        let read = |text: &str| text.parse::<DeviceArg>().ok();
        for (text, device) in [
            ("cpu", DeviceArg::Cpu),
            ("cuda", DeviceArg::Cuda(vec![])),
            ("cuda:3", DeviceArg::Cuda(vec![3])),
            ("cuda:1,0", DeviceArg::Cuda(vec![1, 0])),
        ] {
            assert_eq!(device.to_string(), text);
            assert_eq!(read(text), Some(device));
        }
        for bad in
            ["", "gpu", "cpu:0", "cuda:", "cuda:0,", "cuda:x", "cuda:-1", "cuda:0 1", "cuda:99999999999999999999"]
        {
            assert_eq!(read(bad), None, "{bad}");
        }
    }
}
