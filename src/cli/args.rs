//! What was typed: the command line as clap reads it, without any I/O.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Verifies a GGUF mixture-of-experts model against a reference, layer by layer, on any number of ranks, and names the
/// fault it finds.
#[derive(Debug, Parser)]
#[command(name = "lockstep", version, after_help = EXIT_CODES)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 all is well; 1 a fault was found; 2 usage or I/O error; \
                          3 something could not be measured or did not run (never a pass).";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// What is in the file, how it maps to parameters, what each rank will hold
    Inspect(InspectArgs),
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
