//! Ctrl-C, SIGTERM, and files that grow beyond their limit. A process that is told to stop removes what is not whole, says
//! what it had found so far, and ends with 128 and the signal's number. A second signal ends it at once.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::{flag, iterator::Signals, low_level};

use super::{console, failure};
use crate::partial;
use crate::report::json;

/// Says what was found so far; it is told by what the run was stopped and with what code it ends.
type Last = Box<dyn FnOnce(&mut dyn Write, &str, u8) -> io::Result<()> + Send>;

/// What is still to be said on stdout.
enum Open {
    /// Nothing was found yet.
    Nothing,
    /// What was found so far.
    Found(Last),
    /// All was said.
    Said,
}

static OPEN: Mutex<Open> = Mutex::new(Open::Nothing);
static STOPPING: AtomicBool = AtomicBool::new(false);

fn open() -> MutexGuard<'static, Open> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Begins to listen. With `json` a run that has found nothing yet says so on stdout.
///
/// # Errors
/// What the system says of signal handlers.
pub fn listen(json: bool) -> io::Result<()> {
    // With a handler a write beyond the limit is an error like any other.
    flag::register(SIGXFSZ, Arc::default())?;
    let again = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        flag::register_conditional_shutdown(signal, 128 + signal, again.clone())?;
        flag::register(signal, again.clone())?;
    }
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        if let Some(signal) = signals.forever().next() {
            stop(signal, json);
        }
    })?;
    Ok(())
}

fn stop(signal: i32, json: bool) {
    STOPPING.store(true, Ordering::SeqCst);
    partial::remove_all();
    let (name, code) = (low_level::signal_name(signal).unwrap_or("a signal"), 128 + signal);
    let why = format!("stopped by {name}");
    let mut out = io::stdout();
    let said = match std::mem::replace(&mut *open(), Open::Said) {
        Open::Found(last) => last(&mut out, &why, code as u8),
        Open::Nothing if json => json::write(&mut out, &failure(&why, code as u8)),
        Open::Nothing | Open::Said => Ok(()),
    };
    let _ = said.and_then(|()| out.flush()); // nobody is left to tell
    console::error(&why);
    low_level::exit(code);
}

/// Says on stdout what a run ends with; a signal waits for that.
pub(super) fn finally<T>(say: impl FnOnce() -> T) -> T {
    let mut open = open();
    *open = Open::Said;
    say()
}

/// What `last` says from now on, if the run is stopped.
pub(super) fn so_far(last: impl FnOnce(&mut dyn Write, &str, u8) -> io::Result<()> + Send + 'static) {
    let mut open = open();
    if !matches!(*open, Open::Said) {
        *open = Open::Found(Box::new(last));
    }
}

/// Waits for the end of the process if it is being stopped, so that no error that comes of it is told.
pub fn end_if_stopping() {
    while STOPPING.load(Ordering::SeqCst) {
        std::thread::park();
    }
}
