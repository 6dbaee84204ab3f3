//! From what was typed to a subject of verification: the model, the prompt, the rows, and progress on stderr.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use serde::Serialize;

use super::args::SubjectArgs;
use super::{CliError, attention, console, device, emit};
use crate::checkpoint::Checkpoint;
use crate::engine::{Attention, Engines};
use crate::faults::decorate::Decorations;
use crate::faults::{CATALOGUE, Injection, Target, inject};
use crate::probe::dump;
use crate::report::{Page, Record, Run};
use crate::synth::Random;
use crate::tokenize::Tokenizer;
use crate::verify::conventions::Convention;
use crate::verify::logits::server::{LOOSEST, Server};
use crate::verify::param_map::recipe_of;
use crate::verify::{Subject, VerifyError, producer, sense};

/// Psalm 23 and the first verses of Genesis, King James Version (public domain): real text, long enough for most top-k
/// when repeated.
const TEXT: &str = "The LORD is my shepherd; I shall not want. He maketh me to lie down in green pastures: he leadeth me \
beside the still waters. He restoreth my soul: he leadeth me in the paths of righteousness for his name's sake. Yea, \
though I walk through the valley of the shadow of death, I will fear no evil: for thou art with me; thy rod and thy staff \
they comfort me. In the beginning God created the heaven and the earth. And the earth was without form, and void; and \
darkness was upon the face of the deep. And the Spirit of God moved upon the face of the waters. And God said, Let there \
be light: and there was light. ";

/// Tokens beyond top-k, so that most judged rows of a short model are sparse.
const BEYOND_TOP_K: usize = 48;
const LEAST_TOKENS: usize = 64;

/// The degree as typed, or the default.
fn degree(args: &SubjectArgs) -> usize {
    args.tp.unwrap_or(if args.model.model.is_none() { 8 } else { 1 })
}

/// What queries attend to, as typed, or sparse as the model is.
fn attention_of(args: &SubjectArgs) -> Attention {
    args.attention.map_or(Attention::Dsa, attention)
}

/// Engines with the faults of `--inject`, or plain ones.
pub(super) fn engines(args: &SubjectArgs) -> Result<Box<dyn Engines>, CliError> {
    device::check_degree(&args.device, degree(args))?;
    if args.inject.is_empty() {
        return device::engines(&args.device, None);
    }
    let checkpoint = Checkpoint::open(args.model.model.as_deref())?;
    crate::shard::TpPlan::new(checkpoint.config(), degree(args))?; // a degree that cannot be has no sites
    let mut faults = Decorations::default();
    for typed in &args.inject {
        inject(&target(args, &checkpoint), &Injection::parse(typed)?, &mut faults)?;
    }
    device::engines(&args.device, Some(faults))
}

/// What faults are put into.
fn target<'a>(args: &SubjectArgs, checkpoint: &'a Checkpoint) -> Target<'a> {
    Target { checkpoint, tp: degree(args), attention: attention_of(args) }
}

/// What ran, and on what: a dump may say so, else it is as typed.
pub(super) fn run_of(args: &SubjectArgs, subject: &Subject) -> Run {
    Run {
        model: subject.checkpoint.name().into(),
        tp: subject.tp,
        device: match (&subject.server, &subject.target) {
            (Some(_), _) => "a server's".into(),
            (None, Some(_)) => "a dump's".into(),
            (None, None) => args.device.device.to_string(),
        },
        recipe: subject.recipe.name(),
        attention: subject.attention.name(),
        prompt: subject.prompt.clone(),
    }
}

/// A kind of fault, and where it can be put in.
#[derive(Serialize)]
struct Kind {
    kind: &'static str,
    about: &'static str,
    tp: usize,
    sites: Vec<String>,
}

#[derive(Serialize)]
struct Kinds(Vec<Kind>);

impl Record for Kinds {
    fn text(&self, page: &mut Page<'_>) -> std::io::Result<()> {
        for Kind { kind, about, tp, sites } in &self.0 {
            page.line(format!("{kind}: {about}; {} sites at tp {tp}", sites.len()))?;
            sites.iter().try_for_each(|site| page.line(format!("  {kind}@{site}")))?;
        }
        Ok(())
    }
}

/// True for `--inject list`: then every kind is printed, and where it can be injected.
pub(super) fn lists_faults(args: &SubjectArgs, out: &mut dyn Write) -> Result<bool, CliError> {
    if !args.inject.iter().any(|i| i == "list") {
        return Ok(false);
    }
    let checkpoint = Checkpoint::open(args.model.model.as_deref())?;
    crate::shard::TpPlan::new(checkpoint.config(), degree(args))?;
    let target = target(args, &checkpoint);
    let kinds = CATALOGUE.iter().map(|fault| {
        let sites = (fault.sites)(&target).iter().map(ToString::to_string).collect();
        Kind { kind: fault.kind, about: fault.about, tp: target.tp, sites }
    });
    emit(&Kinds(kinds.collect()), args.model.json, out)?;
    Ok(true)
}

/// Builds the subject.
pub(super) fn subject(args: &SubjectArgs, engines: Box<dyn Engines>) -> Result<Subject, CliError> {
    let checkpoint = Arc::new(Checkpoint::open(args.model.model.as_deref())?);
    let tp = degree(args);
    crate::shard::TpPlan::new(checkpoint.config(), tp)?; // refuse before anything is loaded
    let c = checkpoint.config();
    let layers = args.layers.as_deref().map(|l| parse_layers(l, c.layers)).transpose()?;
    let convention = args.convention.as_deref().map(convention).transpose()?;
    let server = url(args).map(Server::at).transpose().map_err(VerifyError::from)?;
    beside_target(args, server.is_some())?;
    let target = args.target.as_deref().filter(|_| server.is_none()).map(dump::read).transpose()?;
    for note in target.iter().flat_map(|t| &t.notes) {
        console::note(note);
    }
    if let Some(t) = &target {
        same_model(&checkpoint, t)?;
    }
    let stated = target.as_ref().map(|t| t.trace.attention);
    if let (Some(stated), Some(typed)) = (stated, args.attention.map(attention).filter(|typed| Some(*typed) != stated))
    {
        let problem =
            format!("--attention {}: the dump states {}; leave it out, or dump with it", typed.name(), stated.name());
        return Err(CliError::Usage(problem));
    }
    let (recipe, guessed) = match &target {
        None if server.is_some() => (LOOSEST, false),
        None => (recipe_of(engines.backend().recipe()), false),
        Some(dump) => {
            let (recipe, note) = producer::recipe_of(&dump.meta.recipe, &dump.trace);
            note.iter().for_each(|note| console::note(note));
            (recipe, !producer::knows(&dump.meta.recipe))
        }
    };
    let target = target.map(|t| t.trace);
    let vocab = checkpoint.config().vocab;
    if let Some(id) = target.iter().flat_map(|t| &t.ids).find(|id| **id as usize >= vocab) {
        let problem = format!("--target: expected token ids below {vocab}, found {id}: a dump of another model");
        return Err(CliError::Usage(problem));
    }
    let (ids, prompt) = match &target {
        Some(t) => (t.ids.clone(), format!("{} tokens of a dump by {}", t.ids.len(), t.producer)),
        None => prompt(&checkpoint, args.prompt.as_deref(), args.seed)?,
    };
    let rows = sample_rows(ids.len(), args.rows, args.seed);
    let baseline = args.baseline.as_deref().map(|p| Checkpoint::open(Some(p)).map(Arc::new)).transpose()?;
    Ok(Subject {
        checkpoint,
        baseline,
        engines,
        recipe,
        guessed,
        tp: if server.is_some() { 1 } else { target.as_ref().map_or(tp, |t| t.tp) },
        attention: attention_of(args),
        ids,
        prompt,
        own_prompt: args.prompt.is_some(),
        asks: Vec::new(),
        rows,
        layers,
        target,
        convention,
        server,
        seed: args.seed,
        sense: sense::SenseOptions::default(),
    })
}

/// The convention of a name.
fn convention(name: &str) -> Result<Convention, CliError> {
    Convention::named(name).ok_or_else(|| {
        let names = Convention::ALL.map(Convention::name).join(", ");
        CliError::Usage(format!("--convention {name}: expected one of {names}"))
    })
}

/// The address of a server, if that is what `--target` names.
fn url(args: &SubjectArgs) -> Option<&str> {
    args.target.as_deref().and_then(Path::to_str).filter(|target| target.contains("://"))
}

/// What cannot stand beside a target: a dump says its own prompt; a server shows one model, and no layers.
fn beside_target(args: &SubjectArgs, is_server: bool) -> Result<(), CliError> {
    let refused = match is_server {
        true => [
            ("--baseline", args.baseline.is_some()),
            ("--layers", args.layers.is_some()),
            ("--convention", args.convention.is_some()),
        ]
        .to_vec(),
        false => vec![("--prompt", args.target.is_some() && args.prompt.is_some())],
    };
    let what = if is_server { "a server, which shows only what comes out" } else { "a dump, which holds its own" };
    match refused.iter().find(|(_, given)| *given) {
        Some((flag, _)) => Err(CliError::Usage(format!("{flag} cannot be used with --target of {what}"))),
        None => Ok(()),
    }
}

/// A dump says which model it was made from; another one's is refused, other settings are noted.
fn same_model(checkpoint: &Checkpoint, dump: &dump::Dump) -> Result<(), CliError> {
    let (own, found) = (checkpoint.digest(), &dump.meta.digest);
    let scheme = |digest: &str| digest.split(':').next().map(str::to_owned);
    if scheme(&own) == scheme(found) && own != *found {
        let model = &dump.meta.model;
        let problem =
            format!("--target: the dump was made from another model ({model}): expected {own}, found {found}");
        return Err(CliError::Usage(problem));
    }
    let c = checkpoint.config();
    let stated = [
        ("rms_eps", dump.meta.rms_eps, c.rms_eps),
        ("latent_eps", dump.meta.latent_eps, c.latent_eps),
        ("index_eps", dump.meta.index_eps, c.index_eps),
    ];
    for (name, found, own) in stated {
        if let Some(found) = found.filter(|f| *f != own) {
            console::note(&format!("the dump states {name} {found}, the model has {own}"));
        }
    }
    Ok(())
}

/// Token ids longer than top-k where the context allows it, and a line on where they came from.
pub(super) fn prompt(checkpoint: &Checkpoint, typed: Option<&str>, seed: u64) -> Result<(Vec<u32>, String), CliError> {
    let c = checkpoint.config();
    let wanted = (c.top_k + BEYOND_TOP_K).max(LEAST_TOKENS).min(c.context.saturating_sub(1)).max(1);
    let tokenizer = checkpoint.tokenizer_spec().and_then(|spec| Tokenizer::new(&spec));
    if let Some(text) = typed {
        let ids = tokenizer?.prompt_ids(text)?;
        if ids.is_empty() || ids.len() >= c.context {
            let found = ids.len();
            return Err(CliError::Usage(format!("--prompt: expected 1 to {} tokens, found {found}", c.context - 1)));
        }
        return Ok((ids, "the text of --prompt".into()));
    }
    if let Ok(tokenizer) = tokenizer {
        let mut text = TEXT.to_string();
        let mut ids = tokenizer.encode(&text, false)?;
        while !ids.is_empty() && ids.len() < wanted {
            text.push_str(TEXT);
            ids = tokenizer.encode(&text, false)?;
        }
        ids.truncate(wanted);
        if ids.len() == wanted && ids.iter().all(|id| (*id as usize) < c.vocab) {
            return Ok((ids, format!("{wanted} tokens of built-in text")));
        }
    }
    let mut random = Random(seed);
    let ids = (0..wanted).map(|_| (random.next() % c.vocab as u64) as u32).collect();
    Ok((ids, format!("{wanted} random ids of seed {seed} (the model has no usable tokenizer)")))
}

/// `n` distinct rows of `0..tokens`, ascending, the last always among them.
pub(super) fn sample_rows(tokens: usize, n: usize, seed: u64) -> Vec<usize> {
    let mut random = Random(seed ^ 0x5eed);
    let mut rows = vec![tokens - 1];
    while rows.len() < n.clamp(1, tokens) {
        let row = (random.next() % tokens as u64) as usize;
        if !rows.contains(&row) {
            rows.push(row);
        }
    }
    rows.sort_unstable();
    rows
}

/// `0,3-5` as a sorted list.
fn parse_layers(text: &str, layers: usize) -> Result<Vec<usize>, CliError> {
    let bad =
        || CliError::Usage(format!("--layers {text}: expected numbers and ranges of 0 to {}, as 0,3-5", layers - 1));
    let mut all = Vec::new();
    for part in text.split(',') {
        let (a, b) = part.split_once('-').unwrap_or((part, part));
        let (a, b): (usize, usize) = (a.trim().parse().map_err(|_| bad())?, b.trim().parse().map_err(|_| bad())?);
        if a > b || b >= layers {
            return Err(bad());
        }
        all.extend(a..=b);
    }
    all.sort_unstable();
    all.dedup();
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layer_lists() {
        assert_eq!(parse_layers("0,3-5,4", 6).expect("good"), [0, 3, 4, 5]);
        for bad in ["", "6", "5-3", "x", "1-"] {
            assert!(parse_layers(bad, 6).is_err(), "{bad}");
        }
    }

    #[test]
    fn sampled_rows_are_distinct_and_hold_the_last() {
        let rows = sample_rows(112, 16, 3);
        assert_eq!((rows.len(), rows[15]), (16, 111));
        assert!(rows.windows(2).all(|w| w[0] < w[1]));
        assert_eq!(sample_rows(3, 16, 0), [0, 1, 2]);
    }
}
