//! One sequence from prompt to end, token by token.

use super::scheduler::{Finish, Request, Scheduler};
use super::{Engine, EngineError};

/// Generates one sequence, calling `on_token` with every token that is not the stop id. Returns why it ended.
///
/// # Errors
/// Failures of the engine, and a prompt without room.
pub fn generate(engine: &mut Engine, request: Request, on_token: &mut dyn FnMut(u32)) -> Result<Finish, EngineError> {
    let mut scheduler = Scheduler::default();
    scheduler.add(engine, request)?;
    while scheduler.is_busy() {
        for event in scheduler.step(engine)? {
            if event.finish != Some(Finish::Stop) {
                on_token(event.token);
            }
            if let Some(finish) = event.finish {
                return Ok(finish);
            }
        }
    }
    Ok(Finish::Length)
}
