//! The `lockstep` binary: parse, dispatch, exit code.

use std::borrow::Cow;
use std::io::{self, BufWriter, ErrorKind, Write};
use std::process::ExitCode;

use clap::Parser;
use lockstep::cli::{self, CliError, Exit, args::Cli, interrupt};
use lockstep::report::clean;

fn main() -> ExitCode {
    // NVLink multicast stays off unless someone asks for it: it can put shared GPUs out of service.
    if std::env::var_os("NCCL_NVLS_ENABLE").is_none() {
        // SAFETY: no other thread runs yet.
        unsafe { std::env::set_var("NCCL_NVLS_ENABLE", "0") };
    }
    #[cfg(feature = "cuda")]
    lockstep::device::cuda::libraries::end_where_functions_are_missing();
    let json = std::env::args_os().any(|arg| arg == "--json");
    let ended = match Cli::try_parse() {
        Ok(args) => run(args),
        // Clap shows what was typed as it is, which may steer a terminal.
        Err(wrong) if wrong.exit_code() != 0 && (json || !is_plain()) => Err(CliError::Usage(wrong.to_string())),
        Err(said) => said.exit(),
    };
    let exit = ended.unwrap_or_else(|error| {
        interrupt::end_if_stopping();
        // Each error's message includes those beneath it.
        cli::fail(&error.to_string(), error.exit(), json, &mut stdout());
        error.exit()
    });
    ExitCode::from(exit.code())
}

fn run(args: Cli) -> Result<Exit, CliError> {
    // A service has its own way to stop.
    if !args.command.drains() {
        interrupt::listen(args.command.json())?;
    }
    let mut out = stdout();
    let exit = cli::run(args, &mut out)?;
    out.flush()?;
    Ok(exit)
}

/// Whether nothing on the command line steers a terminal.
fn is_plain() -> bool {
    std::env::args_os().all(|arg| matches!(clean(&arg.to_string_lossy()), Cow::Borrowed(_)))
}

/// Standard output, unlocked: a run that is stopped says its last words from another thread.
fn stdout() -> impl Write {
    BufWriter::new(Pipe { inner: io::stdout(), closed: false })
}

/// Stdout whose reader may go away, as `head` does: the rest is dropped, and the exit code still tells the verdict.
struct Pipe<W> {
    inner: W,
    closed: bool,
}

impl<W: Write> Write for Pipe<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.inner.write(bytes) {
            _ if self.closed => Ok(bytes.len()),
            Err(e) if e.kind() == ErrorKind::BrokenPipe => {
                self.closed = true;
                Ok(bytes.len())
            }
            other => other,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.inner.flush() {
            Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
            other => other,
        }
    }
}
