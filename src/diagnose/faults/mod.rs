//! The catalogue of faults. A kind knows its valid sites, how to inject itself through the decorators, and which
//! hypotheses explain it at an operation that diverges.

pub mod decorate;
mod dsa_inactive;
mod dtype_reinterpret;
mod kv_b_layout;
mod name_map;
mod op_noise;
mod reduce_missed;
mod shard_order;
mod shard_placement;

use super::hypothesis::{Hypothesis, OpContext};
use crate::checkpoint::Checkpoint;
use crate::model::{Config, Param, params};
use crate::shard::Group;
use decorate::Decorations;

/// A kind of fault.
pub trait Fault: Sync {
    /// Its name in reports and on the command line.
    fn kind(&self) -> &'static str;
    /// What it is, in one line.
    fn about(&self) -> &'static str;
    /// The sites where it can be injected into this model at this degree.
    fn sites(&self, checkpoint: &Checkpoint, tp: usize) -> Vec<String>;
    /// Adds the fault at a valid site to the decorations, on one rank or all.
    fn inject(&self, checkpoint: &Checkpoint, site: &str, rank: Option<usize>, into: &mut Decorations);
    /// Explanations of this kind for an operation that diverges.
    fn hypotheses<'a>(&self, op: &'a OpContext<'a>) -> Vec<Hypothesis<'a>>;
}

/// Every kind.
pub static CATALOGUE: [&dyn Fault; 8] = [
    &shard_order::ShardOrder,
    &kv_b_layout::KvBLayout,
    &name_map::NameMap,
    &dtype_reinterpret::DtypeReinterpret,
    &dsa_inactive::DsaInactive,
    &shard_placement::ShardPlacement,
    &reduce_missed::ReduceMissed,
    &op_noise::OpNoise,
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
pub fn inject(
    checkpoint: &Checkpoint,
    tp: usize,
    injection: &Injection,
    into: &mut Decorations,
) -> Result<(), InjectError> {
    let bad = |problem: String| InjectError { typed: format!("{}@{}", injection.kind, injection.site), problem };
    let kinds = || CATALOGUE.iter().map(|f| f.kind()).collect::<Vec<_>>().join(", ");
    let fault = CATALOGUE
        .iter()
        .find(|f| f.kind() == injection.kind)
        .ok_or_else(|| bad(format!("unknown kind; expected one of {}", kinds())))?;
    if injection.rank.is_some_and(|r| r >= tp) {
        return Err(bad(format!("expected a rank below {tp}, found {}", injection.rank.unwrap_or(0))));
    }
    let sites = fault.sites(checkpoint, tp);
    if !sites.contains(&injection.site) {
        let shown: Vec<&str> = sites.iter().take(6).map(String::as_str).collect();
        return Err(bad(format!(
            "{} cannot be there; {} valid sites at tp {tp}, such as {} (`--inject list` prints all)",
            injection.kind,
            sites.len(),
            if shown.is_empty() { "none".into() } else { shown.join(", ") }
        )));
    }
    fault.inject(checkpoint, &injection.site, injection.rank, into);
    Ok(())
}

/// Trunk parameters whose name is `site`.
fn param_of(config: &Config, site: &str) -> Option<Param> {
    params::of_trunk(config).into_iter().find(|p| p.to_string() == site)
}

/// The name of a fused group of a layer as a site.
fn group_site(group: Group, layer: usize) -> String {
    format!("blk.{layer}.{}", group.name())
}

/// The fused group whose name is `site`.
fn group_of(config: &Config, site: &str) -> Option<(Group, usize)> {
    let all = (0..config.layers).flat_map(|l| Group::of_layer(config, l).into_iter().map(move |g| (g, l)));
    all.into_iter().find(|(g, l)| group_site(*g, *l) == site)
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
