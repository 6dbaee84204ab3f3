//! What was typed behind `serve`.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::cli::args::{AttentionArg, DeviceArgs, at_least_one};

/// How the log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogArg {
    /// Lines for people
    Text,
    /// Lines for machines
    Json,
}

/// `serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// A .gguf, any shard of a split set, a folder with one set, or a Hugging Face folder [default: built-in glm5-nano]
    #[arg(short, long, value_name = "PATH")]
    pub model: Option<PathBuf>,
    /// What runs it.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// Tensor-parallel ranks
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub tp: usize,
    /// What queries attend to
    #[arg(long, value_enum, default_value = "dsa")]
    pub attention: AttentionArg,
    /// The address to listen at
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    pub host: IpAddr,
    /// The port to listen at
    #[arg(long, default_value_t = 8000, value_name = "PORT")]
    pub port: u16,
    /// A name by which clients ask for the model; may repeat [default: the file's name]
    #[arg(long, value_name = "NAME")]
    pub served_name: Vec<String>,
    /// Sequences that run at once
    #[arg(long, default_value_t = 16, value_name = "N", value_parser = at_least_one)]
    pub sequences: usize,
    /// Tokens that the cache has room for, over all sequences [default: whole contexts of all, at most 65536]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one)]
    pub cache_tokens: Option<usize>,
    /// Longest prefill step in tokens: so long decoding waits for a prompt
    #[arg(long, default_value_t = 512, value_name = "TOKENS", value_parser = at_least_one)]
    pub chunk: usize,
    /// Answers that may wait beside those that run; more are refused with 429
    #[arg(long, default_value_t = 256, value_name = "N")]
    pub queue: usize,
    /// Connections at once
    #[arg(long, default_value_t = 1024, value_name = "N", value_parser = at_least_one)]
    pub connections: usize,
    /// Bytes of a request's body
    #[arg(long, default_value_t = 8 << 20, value_name = "BYTES")]
    pub body: usize,
    /// A file with one key a line; without it everybody is let in
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// The origin whose pages may ask, such as `https://chat.example`
    #[arg(long, value_name = "ORIGIN")]
    pub cors: Option<String>,
    /// The temperature of requests that state none
    #[arg(long, default_value_t = 1.0, value_name = "T")]
    pub temperature: f32,
    /// The top_p of requests that state none
    #[arg(long, default_value_t = 1.0, value_name = "P")]
    pub top_p: f32,
    /// Tell reasoning under the name `reasoning`, too
    #[arg(long)]
    pub also_reasoning: bool,
    /// Use this chat template instead of the file's
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// Serve what was not checked, and say so everywhere
    #[arg(long, conflicts_with = "certificate")]
    pub unverified: bool,
    /// The weights are random on purpose: the stage sense does not apply
    #[arg(long)]
    pub untrained: bool,
    /// A certificate of `verify --certificate`: where it holds, the checks are not run again
    #[arg(long, value_name = "FILE")]
    pub certificate: Option<PathBuf>,
    /// Read all bytes of the model again to compare them with the certificate
    #[arg(long, requires = "certificate")]
    pub rehash: bool,
    /// Seconds that running answers have after SIGTERM
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    pub drain: u64,
    /// Seconds after which a step counts as hung [default: the larger of 60 and 20 of the slowest]
    #[arg(long, value_name = "SECONDS")]
    pub stall: Option<u64>,
    /// How the log on stderr is written; RUST_LOG chooses what
    #[arg(long, value_enum, default_value = "text", value_name = "FORM")]
    pub log: LogArg,
    /// Print a systemd unit that serves with these flags, and end
    #[arg(long)]
    pub print_unit: bool,
    /// End a service of the same port that was left behind
    #[arg(long)]
    pub reap: bool,
}
