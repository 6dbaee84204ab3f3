//! Standard error: notes, and how far long work is.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::report::table::bytes;
use crate::report::{Progress, clean};

/// Set once, from `-q`.
static QUIET: AtomicBool = AtomicBool::new(false);

/// Where stderr is no terminal, a line comes this often.
const EVERY: Duration = Duration::from_secs(5);

/// No speed is told before this.
const SETTLED: Duration = Duration::from_secs(1);

/// Neither notes nor progress from here on.
pub(super) fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Says what went wrong, whatever `-q` says. A compiler's many lines are marked as one message's, so that no text from a
/// file can look like a line of its own.
pub fn error(text: &str) {
    for (i, line) in text.trim_end().lines().enumerate() {
        let before = if i == 0 { "lockstep:" } else { "    |" };
        let _ = writeln!(std::io::stderr(), "{before} {}", clean(line)); // nobody is left to tell
    }
}

/// A line that is good to know.
pub(super) fn note(text: &str) {
    if !QUIET.load(Ordering::Relaxed) {
        error(&format!("note: {text}"));
    }
}

/// What is shown of the work in hand: one line that changes on a terminal, else a line every few seconds.
struct Shown {
    /// What stands before every line: `stage 3 of 8, file: `.
    before: String,
    /// The line of a terminal.
    line: Option<ProgressBar>,
    what: String,
    began: Instant,
    said: Instant,
}

/// There is one standard error, so one line: whoever works speaks to it. `None` while nobody does.
static SHOWN: Mutex<Option<Shown>> = Mutex::new(None);

fn shown() -> MutexGuard<'static, Option<Shown>> {
    SHOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Shows progress until it goes.
pub(super) struct Bar(());

impl Bar {
    /// With `before` in front of every line.
    pub(super) fn new(before: impl Into<String>) -> Self {
        let (before, now) = (before.into(), Instant::now());
        let terminal = std::io::stderr().is_terminal();
        if !QUIET.load(Ordering::Relaxed) {
            let line = terminal.then(|| {
                let bar = ProgressBar::new_spinner();
                if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg}") {
                    bar.set_style(style);
                }
                bar.set_message(clean(before.trim_end_matches([':', ' '])).into_owned());
                bar.enable_steady_tick(Duration::from_millis(120));
                bar
            });
            *shown() = Some(Shown { before, line, what: String::new(), began: now, said: now });
        }
        Bar(())
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        if let Some(line) = shown().take().and_then(|s| s.line) {
            line.finish_and_clear();
        }
    }
}

impl Progress for Bar {
    fn at(&self, what: &str, done: usize, all: usize) {
        Teller.at(what, done, all);
    }

    fn uneven(&self, what: &str, parts: (usize, usize), share: f64) {
        Teller.uneven(what, parts, share);
    }

    fn bytes(&self, what: &str, done: u64, all: u64) {
        Teller.bytes(what, done, all);
    }
}

/// Tells the bar that is shown, if one is.
pub(super) struct Teller;

impl Progress for Teller {
    fn at(&self, what: &str, done: usize, all: usize) {
        tell(what, (done as u64, all as u64), None, |n| n.to_string());
    }

    fn uneven(&self, what: &str, (done, all): (usize, usize), share: f64) {
        tell(what, (done as u64, all as u64), Some(share), |n| n.to_string());
    }

    fn bytes(&self, what: &str, done: u64, all: u64) {
        tell(what, (done, all), None, bytes);
    }
}

fn tell(what: &str, (done, all): (u64, u64), share: Option<f64>, show: impl Fn(u64) -> String) {
    let mut shown = shown();
    let Some(now) = shown.as_mut() else { return };
    if now.what != what {
        (now.what, now.began) = (what.into(), Instant::now());
    }
    if now.line.is_none() && now.said.elapsed() < EVERY {
        return;
    }
    // Threads speak out of order, and some begin a part that others have ended.
    let text = format!("{}{what}{}", now.before, far((done.min(all), all), share, now.began.elapsed(), show));
    match &now.line {
        Some(line) => line.set_message(clean(&text).into_owned()),
        None => {
            now.said = Instant::now();
            error(&text);
        }
    }
}

/// ` 3 of 8, 1.5/s, 3 s left`. Where parts are not alike, `share` of the work is done.
fn far((done, all): (u64, u64), share: Option<f64>, time: Duration, show: impl Fn(u64) -> String) -> String {
    if all == 0 {
        return String::new();
    }
    let mut text = format!(" {} of {}", show(done), show(all));
    if time >= SETTLED && done > 0 {
        let rate = done as f64 / time.as_secs_f64();
        let speed = if rate < 10.0 && show(1) == "1" { format!("{rate:.1}") } else { show(rate as u64) };
        let share = share.filter(|share| *share > 0.0).unwrap_or(done as f64 / all as f64).min(1.0);
        text.push_str(&format!(", {speed}/s, {:.0} s left", time.as_secs_f64() * (1.0 - share) / share));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_say_how_far_how_fast_and_how_long() {
        let (count, s) = (|n: u64| n.to_string(), Duration::from_secs);
        assert_eq!(far((0, 0), None, s(9), count), "");
        assert_eq!(far((0, 8), None, s(9), count), " 0 of 8");
        assert_eq!(far((3, 8), None, s(2), count), " 3 of 8, 1.5/s, 3 s left");
        assert_eq!(far((3, 8), Some(0.5), s(2), count), " 3 of 8, 1.5/s, 2 s left");
        assert_eq!(far((3 << 30, 4 << 30), None, s(1), bytes), " 3.00 GiB of 4.00 GiB, 3.00 GiB/s, 0 s left");
    }
}
