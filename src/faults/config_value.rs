//! CONFIG_VALUE: the engine runs with another value of a setting than the file states: an eps, the rope base, the router's
//! gating, norm or scale.

use super::{Fault, Site};
use crate::model::{Config, Gating};

/// The kind.
pub const FAULT: Fault = Fault {
    kind: "CONFIG_VALUE",
    about: "the engine runs with another setting than the file states",
    sites: |target| SETTINGS.into_iter().filter(|s| s.differs(target.config())).map(Site::Setting).collect(),
    inject: |_, site, rank, into| {
        if let Site::Setting(setting) = site {
            into.settings.push((rank, setting));
        }
    },
};

/// A setting with a value that engines have had in place of the file's.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)] // the settings' names are their documentation
pub enum Setting {
    RmsEps(f32),
    RopeBase(f64),
    Gating(Gating),
    ExpertNorm(bool),
    ExpertScale(f32),
}

/// Defaults of formats and of other families, which take the place of a value that was not read.
pub const SETTINGS: [Setting; 11] = [
    Setting::RmsEps(1e-6),
    Setting::RmsEps(1e-5),
    Setting::RmsEps(1e-12),
    Setting::RopeBase(1e4),
    Setting::RopeBase(5e5),
    Setting::RopeBase(1e6),
    Setting::Gating(Gating::Softmax),
    Setting::Gating(Gating::Sigmoid),
    Setting::ExpertNorm(false),
    Setting::ExpertNorm(true),
    Setting::ExpertScale(1.0),
];

impl std::fmt::Display for Setting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Setting::RmsEps(eps) => write!(f, "rms_eps={eps:e}"),
            Setting::RopeBase(base) => write!(f, "rope_base={base}"),
            Setting::Gating(gating) => write!(f, "gating={}", gating.name()),
            Setting::ExpertNorm(norm) => write!(f, "expert_norm={norm}"),
            Setting::ExpertScale(scale) => write!(f, "expert_scale={scale}"),
        }
    }
}

impl Setting {
    /// True where the model runs otherwise with it.
    pub fn differs(self, c: &Config) -> bool {
        let mut altered = c.clone();
        self.set(&mut altered);
        let used = matches!(self, Setting::RmsEps(_) | Setting::RopeBase(_)) || c.dense_layers < c.layers;
        used && altered != *c
    }

    /// Puts the value in its place.
    pub fn set(self, c: &mut Config) {
        match self {
            Setting::RmsEps(eps) => c.rms_eps = eps,
            Setting::RopeBase(base) => c.rope_base = base,
            Setting::Gating(gating) => c.gating = gating,
            Setting::ExpertNorm(norm) => c.expert_norm = norm,
            Setting::ExpertScale(scale) => c.expert_scale = scale,
        }
    }
}
