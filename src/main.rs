//! The `lockstep` binary: parse, dispatch, exit code.

use std::io::{self, BufWriter, ErrorKind, Write};
use std::process::ExitCode;

use clap::Parser;
use lockstep::cli::{self, CliError, Exit, args::Cli};

fn main() -> ExitCode {
    // NVLink multicast stays off unless someone asks for it: it can put shared GPUs out of service.
    if std::env::var_os("NCCL_NVLS_ENABLE").is_none() {
        // SAFETY: no other thread runs yet.
        unsafe { std::env::set_var("NCCL_NVLS_ENABLE", "0") };
    }
    #[cfg(feature = "cuda")]
    lockstep::device::cuda::libraries::end_where_functions_are_missing();
    match run(Cli::parse()) {
        Ok(exit) => ExitCode::from(exit.code()),
        Err(error) => {
            let message = format!("lockstep: {error}\n"); // each error's message includes those beneath it
            let _ = io::stderr().write_all(message.as_bytes()); // nobody is left to tell
            ExitCode::from(Exit::Usage.code())
        }
    }
}

fn run(args: Cli) -> Result<Exit, CliError> {
    let mut out = BufWriter::new(Pipe { inner: io::stdout().lock(), closed: false });
    let exit = cli::run(args, &mut out)?;
    out.flush()?;
    Ok(exit)
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
