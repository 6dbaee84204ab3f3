//! The `lockstep` binary: parse, dispatch, exit code.

use std::io::{BufWriter, Write};
use std::process::ExitCode;

use clap::Parser;
use lockstep::cli::{self, CliError, Exit, args::Cli};

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(exit) => ExitCode::from(exit.code()),
        Err(error) => {
            let message = format!("lockstep: {error}\n"); // each error's message includes those beneath it
            let _ = std::io::stderr().write_all(message.as_bytes()); // nobody is left to tell
            ExitCode::from(Exit::Usage.code())
        }
    }
}

fn run(args: Cli) -> Result<Exit, CliError> {
    let mut out = BufWriter::new(std::io::stdout().lock());
    let exit = match cli::run(args, &mut out) {
        Err(e) if e.is_closed_pipe() => return Ok(Exit::Ok),
        other => other?,
    };
    match out.flush().map_err(CliError::from) {
        Err(e) if e.is_closed_pipe() => Ok(exit),
        other => other.map(|()| exit),
    }
}
