//! Operations with a mistake in them, where every weight and setting is right: rope at other positions or not at all, a
//! softmax over another width, the indexer's input or relu, the bias where it does not belong, shared experts left out or
//! added twice, factors that got lost or came twice.

use lockstep_reference::{RefOptions, Variant};

use crate::diagnose::hypothesis::{Alter, Hypothesis, OpContext};
use crate::model::Point;

/// Every mistake that the operation can have.
pub(super) fn hypotheses<'a>(op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
    let (c, mut all) = (op.judge.config, Vec::new());
    let mut add = |kind: &'static str, variant: Variant, what: String, overturn: &str| {
        let alter = Alter::Options(RefOptions { variant: Some(variant), ..op.judge.options });
        all.push(Hypothesis { site: op.place.to_string(), ..op.hypothesis(kind, what, overturn, alter) });
    };
    let has = |points: &[Point]| points.iter().any(|point| op.has(*point));
    if has(&[Point::Q, Point::KRope, Point::IndexQ, Point::IndexK]) {
        for off in [1, -1] {
            let what = format!("vectors are turned by positions that are {off:+} off");
            add("ROPE_POSITION", Variant::Position(off), what, "print the positions that rope gets");
        }
        add(
            "ROPE_MISSING",
            Variant::Unrotated,
            "vectors are not turned at all".into(),
            "compare a vector before and behind rope",
        );
        let what = "halves are turned against each other, and stored as if neighbours had been";
        add("ROPE_STYLE", Variant::HalvesPaired, what.into(), "turn one vector by hand");
    }
    if attends(op) {
        let width = |n: usize| (n as f64).powf(-0.5);
        let scales = [
            ("the unrotated width", width(c.nope)),
            ("the rotated width", width(c.rope)),
            ("the latent's width", width(c.kv_rank)),
            ("the cached row's width", width(c.kv_rank + c.rope)),
            ("the value's width", width(c.value)),
            ("no width", 1.0),
        ];
        for (of, scale) in scales.into_iter().filter(|(_, scale)| *scale != width(c.nope + c.rope)) {
            let what = format!("scores are scaled with {scale:.6}, of {of}");
            add("SOFTMAX_SCALE", Variant::SoftmaxScale(scale), what, "print the scale that attention gets");
        }
    }
    if op.has(Point::IndexQ) {
        let what = "the indexer reads the query latent before its norm".to_string();
        add("INDEXER_INPUT", Variant::IndexBeforeNorm, what, "give the indexer the normed latent by hand");
    }
    if op.has(Point::IndexScores) {
        let what = "the indexer's scores keep products below zero: no relu".to_string();
        add("INDEXER_RELU", Variant::IndexWithoutRelu, what, "compute one score by hand");
    }
    if op.has(Point::ExpertWeights) {
        let what = "the experts' weights are made from the scores with the bias that only chooses".to_string();
        add("BIAS_IN_WEIGHTS", Variant::BiasInWeights, what, "gather the weights from the unbiased scores by hand");
    }
    if op.has(Point::Routed) && c.routed_scale != 0.0 {
        for (how, factor) in
            [("lost", 1.0 / c.routed_scale), ("applied twice", c.routed_scale), ("doubled", 2.0), ("halved", 0.5)]
        {
            if factor != 1.0 {
                let what = format!("the routed scale of {} is {how} in the sum of experts", c.routed_scale);
                add("ROUTED_SCALE", Variant::Routed(factor), what, "divide the sum by the scale and compare");
            }
        }
    }
    if op.has(Point::FfnOut) && op.place.layer().is_some_and(|layer| op.model.is_moe(layer)) {
        for (times, how) in [(0, "left out"), (2, "added twice")] {
            let what = format!("the shared expert is {how}");
            add("SHARED_EXPERT", Variant::Shared(times), what, "add it by hand");
        }
    }
    if has(&[Point::Residual, Point::Output])
        && let Some(factor) = op.addend_factor()
    {
        let what = format!("what is added to the residual stream is multiplied with {factor}");
        add("RESIDUAL_FACTOR", Variant::Addend(factor), what, "add it by hand");
    }
    all
}

/// True for what attention gives.
pub(super) fn attends(op: &OpContext<'_>) -> bool {
    op.has(Point::Latent) || (op.judge.options.expanded && op.has(Point::Context))
}
