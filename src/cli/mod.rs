//! The commands: one file each. `args` says what was typed; the rest does it and returns an exit code.

pub mod args;
mod bench;
mod bisect;
#[cfg(feature = "serve")]
mod certificate;
pub mod console;
mod device;
mod doctor;
mod dump;
mod generate;
mod inspect;
pub mod interrupt;
#[cfg(feature = "cuda")]
mod kernels;
#[cfg(feature = "serve")]
pub mod serve;
mod stages;
mod subject;
mod synth;
mod verify;

use std::io::Write;

use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::engine::{Attention, EngineError, Options};
use crate::faults::InjectError;
use crate::probe::dump::DumpError;
use crate::report::{Look, Page, Record, Verdict, json};
use crate::shard::ShardError;
use crate::synth::SynthError;
use crate::tokenize::TokenizeError;
use crate::verify::VerifyError;
use args::{AttentionArg, Cli, Command, EngineArgs};

/// How a command ended, in the exit-code contract of the README.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// 0: all is well.
    Ok,
    /// 1: a fault was found.
    Fault,
    /// 2: usage or I/O error.
    Usage,
    /// 3: something could not be measured or did not run.
    Unmeasured,
    /// 78: a service that would be refused the next time, too (EX_CONFIG).
    Refused,
}

impl Exit {
    /// The process's exit code.
    pub fn code(self) -> u8 {
        match self {
            Exit::Ok => 0,
            Exit::Fault => 1,
            Exit::Usage => 2,
            Exit::Unmeasured => 3,
            Exit::Refused => 78,
        }
    }
}

impl From<Verdict> for Exit {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::Host | Verdict::Divergent | Verdict::Nondeterministic => Exit::Fault,
            Verdict::Unmeasured | Verdict::Inactive => Exit::Unmeasured,
            Verdict::NotApplicable | Verdict::Match | Verdict::Drift => Exit::Ok,
        }
    }
}

/// Why a command could not do its work: exit 2, or 3 where it is this build that lacks something.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CliError {
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error(transparent)]
    Shard(#[from] ShardError),
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("tokenizer: {0}")]
    Tokenize(#[from] TokenizeError),
    #[error(transparent)]
    Verify(#[from] VerifyError),
    #[error(transparent)]
    Inject(#[from] InjectError),
    #[error(transparent)]
    Dump(#[from] DumpError),
    #[error(transparent)]
    Synth(#[from] SynthError),
    #[error("{0}")]
    Usage(String),
    #[error("{0}")]
    Refused(String),
    #[error("cannot write the output: {0}")]
    Output(#[from] std::io::Error),
}

impl CliError {
    /// How the command ends.
    pub fn exit(&self) -> Exit {
        let is_lack = match self {
            CliError::Checkpoint(e) => e.is_lack(),
            CliError::Engine(e) => e.is_lack(),
            CliError::Tokenize(e) => e.is_lack(),
            CliError::Verify(e) => e.is_lack(),
            CliError::Refused(_) => return Exit::Refused,
            _ => false,
        };
        if is_lack { Exit::Unmeasured } else { Exit::Usage }
    }
}

/// Runs a command, results to `out`, progress and notes to stderr.
///
/// # Errors
/// Usage and I/O errors.
pub fn run(cli: Cli, out: &mut dyn Write) -> Result<Exit, CliError> {
    if cli.quiet {
        console::be_quiet();
    }
    match cli.command {
        Command::Inspect(args) => inspect::run(&args, out),
        Command::Verify(args) => verify::run(&args, out),
        Command::Bisect(args) => bisect::run(&args, out),
        Command::Generate(args) => generate::run(&args, out),
        #[cfg(feature = "serve")]
        Command::Serve(args) => serve::run(&args, out),
        Command::Dump(args) => dump::run(&args, out),
        Command::Bench(args) => bench::run(&args, out),
        Command::Doctor(args) => doctor::run(&args, out),
        Command::Synth(args) => synth::run(&args, out),
        #[cfg(feature = "cuda")]
        Command::Kernels(args) => kernels::run(&args, out),
    }
}

/// Says what a command found, to people or to machines.
fn emit(record: &impl Record, json: bool, out: &mut dyn Write) -> std::io::Result<()> {
    interrupt::finally(|| {
        match json {
            true => json::write(out, record)?,
            false => record.text(&mut Page::new(out, Look::of_stdout()))?,
        }
        out.flush()
    })
}

/// A failure as `--json` tells it.
fn failure(message: &str, exit: u8) -> serde_json::Value {
    serde_json::json!({ "error": { "message": message, "exit": exit } })
}

/// Says why a command could not do its work: on stderr, and on `out` too if that is for machines.
pub fn fail(message: &str, exit: Exit, json: bool, out: &mut dyn Write) {
    if json {
        // Nobody is left to tell.
        let _ = json::write(out, &failure(message, exit.code())).and_then(|()| out.flush());
    }
    console::error(message);
}

/// The engine's options for one sequence, as typed.
fn options(checkpoint: &Checkpoint, args: &EngineArgs) -> Result<Options, CliError> {
    let mut options = Options::for_one(checkpoint.config());
    options.attention = attention(args.attention);
    if let Some(chunk) = args.chunk {
        if chunk == 0 {
            return Err(CliError::Usage("--chunk: expected at least 1 token, found 0".into()));
        }
        options.chunk = chunk.min(options.cache_tokens);
    }
    Ok(options)
}

fn attention(arg: AttentionArg) -> Attention {
    match arg {
        AttentionArg::Dsa => Attention::Dsa,
        AttentionArg::Dense => Attention::Dense,
    }
}
