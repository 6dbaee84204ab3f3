//! Who watches the thread that makes tokens.

use std::sync::Arc;
use std::time::Duration;

use super::systemd;
use crate::serve::state::{Shared, State};

/// A step may take so long whatever others took.
const STALL: Duration = Duration::from_secs(60);
/// And so many times the slowest.
const SLOWEST: u32 = 20;
/// How often the pulse is felt.
const EVERY: Duration = Duration::from_millis(250);

/// Watches the pulse: a step that takes longer than `stall` is the end of the service. systemd hears of it only while steps
/// end, or nobody waits for one.
///
/// # Errors
/// What the system says of threads.
pub fn watch(shared: Arc<Shared>, stall: Option<Duration>) -> std::io::Result<()> {
    let mut seen = 0;
    let watch = move || loop {
        std::thread::sleep(EVERY);
        let (steps, idle) = (shared.steps(), !shared.is_busy());
        if steps != seen || idle {
            seen = steps;
            systemd::alive();
        }
        let most = stall.unwrap_or_else(|| STALL.max(SLOWEST * shared.slowest()));
        let now = shared.in_step();
        if now > most {
            let why = format!("no step has ended for {} s", now.as_secs());
            return shared.enter(State::Failed(why));
        }
    };
    std::thread::Builder::new().name("watchdog".into()).spawn(watch)?;
    Ok(())
}
