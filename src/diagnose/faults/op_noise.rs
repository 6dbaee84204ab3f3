//! OP_NOISE: an operation whose results are off in a way that no kind of the catalogue explains. It exists so that the
//! tool can be seen to say UNKNOWN instead of a wrong name.

use super::Fault;
use super::decorate::{Decorations, OpFault};
use crate::checkpoint::Checkpoint;
use crate::diagnose::hypothesis::{Hypothesis, OpContext};
use crate::model::{Place, Point};

/// See the module.
pub struct OpNoise;

/// Relative size of the damage: far above any floor, far below what shows in text at once.
const AMOUNT: f32 = 0.01;

impl Fault for OpNoise {
    fn kind(&self) -> &'static str {
        "OP_NOISE"
    }

    fn about(&self) -> &'static str {
        "results of an operation off by 1 %, alternating in sign; explained by nothing, so bisect must say UNKNOWN"
    }

    fn sites(&self, checkpoint: &Checkpoint, _: usize) -> Vec<String> {
        let c = checkpoint.config();
        let mut all = Vec::new();
        for layer in 0..c.layers {
            let mut points = vec![Point::AttnNorm, Point::QANorm, Point::QAbsorbed, Point::Latent, Point::Context];
            points.extend([Point::FfnNorm, Point::Hidden]);
            if c.is_moe(layer) {
                points.push(Point::ExpertWeights);
            }
            all.extend(points.into_iter().map(|p| Place::trunk(layer, p).to_string()));
        }
        all
    }

    fn inject(&self, _: &Checkpoint, site: &str, rank: Option<usize>, into: &mut Decorations) {
        if let Ok(place) = site.parse() {
            into.ops.push((rank, place, OpFault::Noise(AMOUNT)));
        }
    }

    fn hypotheses<'a>(&self, _: &'a OpContext<'a>) -> Vec<Hypothesis<'a>> {
        Vec::new()
    }
}
