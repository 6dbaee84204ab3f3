//! The catalogue of faults, its doing half: where each kind can be, and how it gets in. Faults enter from outside the
//! engine: through decorated sources (bytes, types, configuration), plans (order, range) and what stands around devices.
//! How a fault looks, and is named, is `diagnose`'s.

pub mod around;
pub mod config_value;
pub mod decorate;
pub mod dtype_reinterpret;
pub mod kv_b_layout;
pub mod name_map;
pub mod operations;
pub mod shard_order;
pub mod shard_placement;

use std::collections::BTreeSet;

use crate::checkpoint::{Binding, Checkpoint, View};
use crate::device::program::{RULES, Want};
use crate::device::{Call, Limits, ProgramId, Recipe};
use crate::engine::Attention;
use crate::engine::arch::Model;
use crate::model::{Config, Param, Place, params};
use crate::shard::{Group, TpPlan};
use config_value::Setting;
use decorate::Decorations;

/// What faults are put into.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    /// The model.
    pub checkpoint: &'a Checkpoint,
    /// Ranks.
    pub tp: usize,
    /// What queries attend to.
    pub attention: Attention,
}

impl Target<'_> {
    fn config(&self) -> &Config {
        self.checkpoint.config()
    }

    /// The calls of a rank's forward pass as it is written, and as it is fused; none at a degree that cannot be.
    fn calls(&self) -> [Vec<Call>; 2] {
        let Ok(plan) = TpPlan::new(self.config(), self.tp) else { return Default::default() };
        let limits = Limits { tokens: 1, sequences: 1, logits: 1, pages: 1, page: 1 };
        let model = Model::new(self.config(), &plan, 0, self.attention, Recipe::Strict, limits);
        let written = model.program(ProgramId { head: true, ahead: true, expanded: true });
        let fused = written.fuse(RULES, &|_| Want::Nothing);
        [written.calls, fused.calls]
    }

    /// The first tensor that a parameter is made from.
    fn tensor(&self, site: Site) -> Option<(String, View<'_>)> {
        let Site::Param(param) = site else { return None };
        let name = self.checkpoint.binding(param)?.names().first()?;
        Some((name.clone(), self.checkpoint.source().tensor(name)?))
    }

    /// The parameters of the trunk that are one whole tensor each.
    fn whole(&self) -> impl Iterator<Item = Site> {
        let whole = |site: &Site| matches!(site, Site::Param(p) if matches!(self.checkpoint.binding(*p), Some(Binding::Whole(_))));
        trunk(self.config()).filter(whole)
    }

    /// The places of calls that a test accepts, each once, in the order of the pass: those that every program has.
    fn places(&self, wanted: impl Fn(&Call) -> bool) -> Vec<Site> {
        let [written, fused] =
            self.calls().map(|calls| -> BTreeSet<Place> { calls.iter().filter(|c| wanted(c)).map(|c| c.at).collect() });
        written.intersection(&fused).copied().map(Site::Place).collect()
    }
}

/// Where a fault can be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Site {
    /// A parameter.
    Param(Param),
    /// A fused group of a layer.
    Group(Group, usize),
    /// The calls at a place.
    Place(Place),
    /// A value of the configuration.
    Setting(Setting),
}

impl std::fmt::Display for Site {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Site::Param(param) => param.fmt(f),
            Site::Group(group, layer) => write!(f, "blk.{layer}.{}", group.name()),
            Site::Place(place) => place.fmt(f),
            Site::Setting(setting) => setting.fmt(f),
        }
    }
}

/// A kind of fault.
pub struct Fault {
    /// Its name in reports and on the command line.
    pub kind: &'static str,
    /// What it is, in one line.
    pub about: &'static str,
    /// The sites where it can be.
    pub sites: fn(&Target<'_>) -> Vec<Site>,
    /// Adds the fault at one of its sites to the decorations, on one rank or all.
    pub inject: fn(&Target<'_>, Site, Option<usize>, &mut Decorations),
}

/// Every kind.
pub const CATALOGUE: [Fault; 9] = [
    shard_order::FAULT,
    kv_b_layout::FAULT,
    name_map::FAULT,
    dtype_reinterpret::FAULT,
    operations::DSA_INACTIVE,
    config_value::FAULT,
    shard_placement::FAULT,
    operations::REDUCE_MISSED,
    operations::OP_NOISE,
];

/// A fault as typed: `KIND@SITE[:rank=R]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Injection {
    /// The kind.
    pub kind: String,
    /// The site.
    pub site: String,
    /// One rank, or all.
    pub rank: Option<usize>,
}

/// An injection that cannot be.
#[derive(Debug, thiserror::Error)]
#[error("--inject {typed}: {problem}")]
pub struct InjectError {
    typed: String,
    problem: String,
}

impl Injection {
    /// Reads `KIND@SITE[:rank=R]`.
    ///
    /// # Errors
    /// Another form.
    pub fn parse(typed: &str) -> Result<Self, InjectError> {
        let bad = |problem: &str| InjectError { typed: typed.into(), problem: problem.into() };
        let (kind, rest) =
            typed.split_once('@').ok_or_else(|| bad("expected KIND@SITE[:rank=R]; `--inject list` prints them"))?;
        let (site, rank) = match rest.split_once(':') {
            None => (rest, None),
            Some((site, rank)) => {
                let rank = rank.strip_prefix("rank=").and_then(|r| r.parse().ok());
                (site, Some(rank.ok_or_else(|| bad("expected :rank=NUMBER behind the site"))?))
            }
        };
        Ok(Injection { kind: kind.into(), site: site.into(), rank })
    }
}

/// Adds an injection to the decorations.
///
/// # Errors
/// An unknown kind, a site where the kind cannot be, a rank that does not exist.
pub fn inject(target: &Target<'_>, injection: &Injection, into: &mut Decorations) -> Result<(), InjectError> {
    let (tp, Injection { kind, site, rank }) = (target.tp, injection);
    let bad = |problem: String| InjectError { typed: format!("{kind}@{site}"), problem };
    let kinds = || CATALOGUE.map(|f| f.kind).join(", ");
    let fault = CATALOGUE.into_iter().find(|f| f.kind == kind);
    let fault = fault.ok_or_else(|| bad(format!("unknown kind; expected one of {}", kinds())))?;
    if let Some(rank) = rank.filter(|r| *r >= tp) {
        return Err(bad(format!("expected a rank below {tp}, found {rank}")));
    }
    let sites = (fault.sites)(target);
    let Some(found) = sites.iter().find(|s| s.to_string() == *site) else {
        let shown: Vec<String> = sites.iter().take(6).map(Site::to_string).collect();
        return Err(bad(format!(
            "{kind} cannot be there; {} valid sites at tp {tp}, such as {} (`--inject list` prints all)",
            sites.len(),
            if shown.is_empty() { "none".into() } else { shown.join(", ") }
        )));
    };
    (fault.inject)(target, *found, *rank, into);
    Ok(())
}

/// The trunk's parameters.
fn trunk(c: &Config) -> impl Iterator<Item = Site> {
    params::of_trunk(c).into_iter().map(Site::Param)
}

/// The fused groups of all layers that a test accepts.
fn groups(c: &Config, wanted: impl Fn(Group, usize) -> bool) -> impl Iterator<Item = Site> {
    let all = (0..c.layers).flat_map(|l| Group::of_layer(c, l).into_iter().map(move |g| (g, l)));
    all.filter(move |(g, l)| wanted(*g, *l)).map(|(g, l)| Site::Group(g, l))
}

#[cfg(test)]
mod tests {
    use super::Injection;

    #[test]
    fn injections_are_read() {
        let i = Injection::parse("NAME_MAP@blk.3.attn_q_b:rank=2").expect("good");
        assert_eq!((i.kind.as_str(), i.site.as_str(), i.rank), ("NAME_MAP", "blk.3.attn_q_b", Some(2)));
        assert_eq!(Injection::parse("A@b").expect("good").rank, None);
        for bad in ["A", "A@b:2", "A@b:rank=x"] {
            assert!(Injection::parse(bad).is_err(), "{bad}");
        }
    }
}
