//! `lockstep dump`: runs a prompt and writes what the ranks held at the probe points.

use std::io::Write;
use std::sync::Arc;

use regex::Regex;
use serde::Serialize;

use super::args::DumpArgs;
use super::console::Bar;
use super::subject::{engines, lists_faults, subject};
use super::{CliError, Exit, emit};
use crate::model::{Config, Place, Point};
use crate::probe::capture::Filter;
use crate::probe::dump::{self, Meta};
use crate::report::{Page, Record};
use crate::verify::subject::{points_of, run_prompt};

pub(super) fn run(args: &DumpArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    if lists_faults(&args.subject, out)? {
        return Ok(Exit::Ok);
    }
    for (flag, given) in [("--baseline", &args.subject.baseline), ("--target", &args.subject.target)] {
        if let Some(path) = given {
            let found = path.display();
            return Err(CliError::Usage(format!("{flag} {found}: dump runs one model; expected no other side")));
        }
    }
    let wanted = args.filter.as_deref().map(|f| Regex::new(f).map_err(|e| CliError::Usage(format!("--filter: {e}"))));
    let wanted = wanted.transpose()?;
    let mut subject = subject(&args.subject, engines(&args.subject)?)?;
    if let Some(ids) = &args.ids {
        subject.ids = parse_ids(ids, subject.checkpoint.config())?;
        subject.prompt = "the ids of --ids".into();
    }
    if args.out.symlink_metadata().is_ok() {
        return Err(dump::DumpError::Exists { path: args.out.clone() }.into()); // before the run, not behind it
    }
    let layers = points_of(subject.layers.clone());
    let (chosen, c) = (subject.layers.clone().unwrap_or_default(), subject.checkpoint.config().clone());
    // What the chosen layers and the head read from others goes along, so that the dump can be judged by itself.
    let read = move |place: Place| match (place.point, place.layer()) {
        (Point::Output, Some(l)) => l + 1 == c.layers || chosen.contains(&(l + 1)),
        (Point::IndexTopk, Some(l)) => chosen.iter().any(|s| (0..=*s).rev().find(|f| c.is_full(*f)) == Some(l)),
        _ => false,
    };
    let filter: Filter = Arc::new(move |place| {
        (layers(place) || read(place)) && wanted.as_ref().is_none_or(|w| w.is_match(&place.to_string()))
    });
    let bar = Bar::new("dump: ");
    let (trace, _) = run_prompt(&mut *subject.engine()?, &subject.ids, filter)?;
    drop(bar);
    let places = trace.places();
    if places.is_empty() {
        return Err(CliError::Usage("--filter: expected to match a probe point, found none".into()));
    }
    let (c, device) = (subject.checkpoint.config(), args.subject.device.device.to_string());
    let meta = Meta {
        model: subject.checkpoint.name().into(),
        digest: subject.checkpoint.digest(),
        recipe: subject.recipe.name().into(),
        device: Some(device.clone()),
        rms_eps: Some(c.rms_eps),
        latent_eps: Some(c.latent_eps),
        index_eps: Some(c.index_eps),
    };
    dump::write(&args.out, &trace, &meta)?;
    let record = Dumped {
        out: args.out.display().to_string(),
        points: places.iter().map(Place::to_string).collect(),
        tp: trace.tp,
        tokens: trace.ids.len(),
        prompt: subject.prompt,
        attention: trace.attention.name(),
        digest: meta.digest,
        device,
        recipe: meta.recipe,
    };
    emit(&record, args.subject.model.json, out)?;
    Ok(Exit::Ok)
}

/// What was written.
#[derive(Serialize)]
struct Dumped {
    out: String,
    points: Vec<String>,
    tp: usize,
    tokens: usize,
    prompt: String,
    attention: &'static str,
    digest: String,
    device: String,
    recipe: String,
}

impl Record for Dumped {
    fn text(&self, page: &mut Page<'_>) -> std::io::Result<()> {
        let Dumped { out, points, tp, tokens, prompt, attention, device, recipe, .. } = self;
        let how = format!("{device}, recipe {recipe}, {attention}; {prompt}");
        page.line(format!("{out}: {} points of {tokens} tokens on {tp} ranks ({how})", points.len()))
    }
}

/// `1,2,3` as ids of the vocabulary, within the context.
fn parse_ids(text: &str, c: &Config) -> Result<Vec<u32>, CliError> {
    let id = |part: &str| {
        let id = part.trim().parse::<u32>().ok().filter(|id| (*id as usize) < c.vocab);
        let expected = format!("--ids: expected numbers below {}, found {part:?}", c.vocab);
        id.ok_or(CliError::Usage(expected))
    };
    let ids = text.split(',').map(id).collect::<Result<Vec<u32>, _>>()?;
    if ids.len() > c.context {
        return Err(CliError::Usage(format!("--ids: expected at most {} ids, found {}", c.context, ids.len())));
    }
    Ok(ids)
}
