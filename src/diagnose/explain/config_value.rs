//! CONFIG_VALUE: the operation is right, but computed with another setting than the file states.

use lockstep_reference::{RefConfig, config};

use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext};
use crate::faults::config_value::{FAULT, SETTINGS, Setting};
use crate::model::{Gating, Point};

/// Whether a setting has a part in what makes a point.
fn makes(setting: Setting, point: Point) -> bool {
    match setting {
        Setting::RmsEps(_) => matches!(point, Point::AttnNorm | Point::FfnNorm | Point::FinalNorm),
        Setting::RopeBase(_) => matches!(point, Point::Q | Point::KRope | Point::IndexQ | Point::IndexK),
        Setting::Gating(_) => matches!(point, Point::ChoiceScores | Point::ExpertWeights),
        Setting::ExpertNorm(_) | Setting::ExpertScale(_) => point == Point::ExpertWeights,
    }
}

/// The reference's configuration with that value.
fn with(setting: Setting, c: &RefConfig) -> RefConfig {
    let mut c = c.clone();
    match setting {
        Setting::RmsEps(eps) => c.eps = f64::from(eps),
        Setting::RopeBase(base) => c.rope_theta = base,
        Setting::Gating(Gating::Softmax) => c.gating = config::Gating::Softmax,
        Setting::Gating(Gating::Sigmoid) => c.gating = config::Gating::Sigmoid,
        Setting::ExpertNorm(norm) => c.normalise_weights = norm,
        Setting::ExpertScale(scale) => c.routed_scale = f64::from(scale),
    }
    c
}

/// Every setting that has a part in the operation, at each of its usual values.
pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    let settings = SETTINGS.into_iter().filter(|s| makes(*s, op.place.point) && s.differs(op.model));
    let one = |setting: Setting| {
        let statement = format!("the operation runs with {setting}, which is not what the file states");
        let overturn = "print the engine's setting; if it is the file's, the setting was not at fault";
        let alter = Alter::Config(Box::new(with(setting, op.judge.config)));
        Hypothesis { site: setting.to_string(), ..op.hypothesis(FAULT.kind, statement, overturn, alter) }
    };
    settings.map(one).collect()
}
