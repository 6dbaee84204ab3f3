//! Stage `host`: do the GPUs that ranks run on copy and add correctly? The checks are those of `lockstep doctor`, in
//! small sizes; where one fails, nothing else is judged.

use super::{Progress, StageReport, Subject, VerifyError};

/// Runs the stage.
///
/// # Errors
/// Fewer GPUs than the ranks need.
#[cfg(feature = "cuda")]
pub fn run(subject: &Subject, progress: &dyn Progress) -> Result<StageReport, VerifyError> {
    use crate::doctor::{gpus, host};

    let Some(backend) = subject.engines.cuda() else { return Ok(without()) };
    let gpus = backend.gpus(subject.tp).map_err(|e| VerifyError::Choice(e.to_string()))?;
    let request = gpus::Request { gpus: gpus.clone(), cubins: backend.cubins.clone(), quick: true };
    let mut checks: Vec<_> = host::findings().into_iter().map(|f| f.check).collect();
    checks.extend(gpus::run(&request, progress).into_iter().map(|f| f.check));
    let bad = checks.iter().filter(|c| c.verdict == super::Verdict::Host).count();
    let found = if bad == 0 { "no copy and no sum was wrong".into() } else { format!("{bad} checks failed") };
    Ok(StageReport::new("host", format!("GPUs {gpus:?}: {found}"), checks))
}

/// Runs the stage.
///
/// # Errors
/// None.
#[cfg(not(feature = "cuda"))]
pub fn run(_: &Subject, _: &dyn Progress) -> Result<StageReport, VerifyError> {
    Ok(without())
}

fn without() -> StageReport {
    StageReport::not_applicable("host", "no GPU takes part: the ranks are CPU threads")
}
