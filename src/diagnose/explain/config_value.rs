//! CONFIG_VALUE: the operation is right, but computed with another setting than the file states.

use lockstep_reference::config::RopeStyle;
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

/// Values of eps that models and formats have, and powers of ten between.
const EPS: [f64; 12] = [0.0, 1e-12, 1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
/// Rope bases of other models.
const BASES: [f64; 9] = [1e4, 1e5, 1.5e5, 2.5e5, 5e5, 1e6, 5e6, 8e6, 1e7];

/// Other values of settings that have a part in the operation, by name.
fn others(op: &OpContext<'_>) -> Vec<(String, RefConfig)> {
    let (c, mut all) = (op.judge.config, Vec::new());
    let mut add = |name: String, change: &dyn Fn(&mut RefConfig)| {
        let mut altered = c.clone();
        change(&mut altered);
        all.extend((altered != *c).then_some((name, altered)));
    };
    let has = |points: &[Point]| points.iter().any(|point| op.has(*point));
    for eps in EPS {
        if has(&[Point::AttnNorm, Point::FfnNorm, Point::FinalNorm]) {
            add(format!("rms_eps={eps:e}"), &|c| c.eps = eps);
        }
        if has(&[Point::QANorm, Point::KvLatent]) {
            add(format!("latent_eps={eps:e}"), &|c| c.latent_eps = eps);
        }
        if has(&[Point::IndexK]) {
            add(format!("index_eps={eps:e}"), &|c| c.index_eps = eps);
        }
    }
    let style = |style| match style {
        RopeStyle::Interleaved => RopeStyle::HalfSplit,
        RopeStyle::HalfSplit => RopeStyle::Interleaved,
    };
    let word = |style| if style == RopeStyle::Interleaved { "interleaved" } else { "half-split" };
    if has(&[Point::Q, Point::KRope]) {
        add(format!("rope_style={}", word(style(c.rope_style))), &|c| c.rope_style = style(c.rope_style));
    }
    if has(&[Point::IndexQ, Point::IndexK]) {
        let name = format!("indexer_rope_style={}", word(style(c.index_rope_style)));
        add(name, &|c| c.index_rope_style = style(c.index_rope_style));
    }
    if has(&[Point::Q, Point::KRope, Point::IndexQ, Point::IndexK]) {
        BASES.into_iter().for_each(|base| add(format!("rope_base={base}"), &|c| c.rope_theta = base));
    }
    if has(&[Point::ExpertWeights]) {
        for scale in [c.routed_scale * 2.0, c.routed_scale / 2.0, c.routed_scale * c.routed_scale, 1.0] {
            add(format!("expert_scale={scale}"), &|c| c.routed_scale = scale);
        }
    }
    if let Some(k) = op.most_chosen() {
        match op.place.point {
            Point::IndexTopk => add(format!("top_k={k}"), &|c| c.top_k = k),
            _ => add(format!("experts_used={k}"), &|c| c.experts_used = k),
        }
    }
    all
}

/// Every setting that has a part in the operation, at each of its usual values.
pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    let makes = |setting: Setting| op.over.iter().chain([&op.place]).any(|place| makes(setting, place.point));
    let settings = SETTINGS.into_iter().filter(|s| makes(*s) && s.differs(op.model));
    let mut all: Vec<(String, RefConfig)> = settings.map(|s| (s.to_string(), with(s, op.judge.config))).collect();
    for (name, config) in others(op) {
        if !all.iter().any(|(_, known)| *known == config) {
            all.push((name, config));
        }
    }
    let one = |(setting, config): (String, RefConfig)| {
        let statement = format!("the operation runs with {setting}, which is not what the file states");
        let overturn = "print the engine's setting; if it is the file's, the setting was not at fault";
        let alter = Alter::Config(Box::new(config));
        Hypothesis { site: setting, ..op.hypothesis(FAULT.kind, statement, overturn, alter) }
    };
    all.into_iter().map(one).collect()
}
