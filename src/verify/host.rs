//! Stage `host`: do the GPUs that ranks run on copy and add correctly? Where one does not, nothing else is judged.

use super::{Subject, VerifyError};
use crate::device::cuda::cubin::Cubins;
use crate::report::{Check, StageReport, Verdict};

/// Runs the stage: `check` looks at the GPUs of these numbers.
///
/// # Errors
/// Fewer GPUs than the ranks need.
pub fn run(
    subject: &Subject,
    check: impl FnOnce(Vec<usize>, Cubins) -> Vec<Check>,
) -> Result<StageReport, VerifyError> {
    let Some(backend) = subject.engines.backend().cuda() else {
        return Ok(StageReport::not_applicable("host", "no GPU takes part: the ranks are CPU threads"));
    };
    let gpus = backend.gpus(subject.tp)?;
    let checks = check(gpus.clone(), backend.cubins.clone());
    let bad = checks.iter().filter(|c| c.verdict == Verdict::Host).count();
    let found = if bad == 0 { "no copy and no sum was wrong".into() } else { format!("{bad} checks failed") };
    Ok(StageReport::new("host", format!("GPUs {gpus:?}: {found}"), checks))
}
