//! The stage `sense`: does this file make sense as a language model, and would one change make it much better? It needs
//! nothing to compare with. The file is the subject, not the engine: faults that were injected into engines are not in it.
//!
//! A model that was trained well has some texts by heart: there its loss is next to nothing, and damage shows. Which texts
//! it knows is found out (`texts`). Single changes, each the inverse of something that goes wrong with files
//! (`repair`), are tried on these by altering calls (`altered`); one that makes the loss plausible again is named
//! (`rule`, `search`).

mod altered;
pub mod repair;
mod rule;
mod scorer;
mod search;
mod sets;
mod texts;
mod tries;

use std::cmp::Ordering;
use std::time::Instant;

use serde_json::{Value as Json, json};

use self::repair::Repair;
use self::rule::{Band, Scale};
use self::scorer::{Deck, Room, Scorer, Text};
use self::search::{Depth, Named, SEARCHED, Search};
use self::sets::Set;
use super::{Subject, VerifyError};
use crate::checkpoint::Checkpoint;
use crate::gguf::Value;
use crate::model::published;
use crate::report::{Check, Cost, Progress, StageReport, Verdict};
use crate::synth::{Random, UNTRAINED};
use crate::tokenize::Tokenizer;

const STAGE: &str = "sense";

/// How the stage is run.
#[derive(Clone, Copy, Debug)]
pub struct SenseOptions {
    /// The weights are random on purpose.
    pub untrained: bool,
    /// More is tried than pays.
    pub thorough: bool,
    /// The edits that repairs stand for are told.
    pub plan: bool,
    /// Facts are compared with what publishers state.
    pub published: bool,
}

impl Default for SenseOptions {
    fn default() -> Self {
        SenseOptions { untrained: false, thorough: false, plan: false, published: true }
    }
}

/// Texts of each set by which it is found out whether the model knows the set.
const FIRST: usize = 4;

/// What was found out about a set.
struct Heard {
    set: Set,
    loss: f64,
    shuffled: f64,
    band: Band,
}

/// Runs the stage.
///
/// # Errors
/// Engines that cannot be made, steps that fail.
pub fn run(subject: &Subject, progress: &dyn Progress) -> Result<StageReport, VerifyError> {
    let began = Instant::now();
    let (checkpoint, options) = (&subject.checkpoint, subject.sense);
    if subject.target.is_some() {
        return Ok(StageReport::not_applicable(STAGE, "a dump is judged, not the file"));
    }
    let says_so = checkpoint.source().metadata().get(UNTRAINED).and_then(Value::as_bool) == Some(true);
    if options.untrained || says_so {
        let why = if says_so { "the file says so" } else { "--untrained" };
        return Ok(StageReport::not_applicable(STAGE, format!("its weights are random on purpose ({why})")));
    }
    let mut checks = if options.published { facts(checkpoint) } else { Vec::new() };
    let spec = checkpoint.tokenizer_spec();
    let made = spec.and_then(|spec| Ok((Tokenizer::new(&spec)?, spec)));
    let (tokenizer, spec) = match made {
        Ok(made) => made,
        Err(e) => {
            checks.push(Check::new("language model", Verdict::Unmeasured, format!("there is no tokenizer: {e}")));
            return Ok(StageReport::new(STAGE, "no text can be read without a tokenizer", checks));
        }
    };
    let sets = sets::sets(&tokenizer, checkpoint.config());
    if sets.is_empty() {
        let why = "the model's vocabulary and context have room for none of the built-in texts";
        checks.push(Check::new("language model", Verdict::Unmeasured, why));
        return Ok(StageReport::new(STAGE, why, checks));
    }
    let all: Vec<u32> = sets.iter().flat_map(|s| &s.texts).flat_map(|t| t.ids[t.from..].to_vec()).collect();
    let unigram = rule::unigram(&all, checkpoint.config().vocab);
    // Merges in another order cut texts into more ids.
    let merged = sets::with_merges_by_id(&spec).map(|tokenizer| sets::sets(&tokenizer, checkpoint.config()));
    let room = sets.iter().chain(merged.iter().flatten()).fold(Room::default(), |room, set| room.and(&set.texts));
    progress.at("sets of texts", 0, sets.len());
    let mut scorer = Scorer::new(subject, room)?;
    let (report, repairs) = judge(&mut scorer, (sets, merged, unigram), checks, subject, progress)?;
    let (tries, seconds) = (tries::of(checkpoint.config()), began.elapsed().as_secs_f64());
    Ok(StageReport { cost: Some(Cost { seconds, repairs, tries, ..scorer.cost }), ..report })
}

/// The sets of texts; the same with merges by ids, where these are others; and what a unigram model loses on them.
type Sets = (Vec<Set>, Option<Vec<Set>>, f64);

/// Finds out what the model knows, and searches where that is lost. Returns how many repairs were tried, too.
fn judge(
    scorer: &mut Scorer,
    (sets, merged, unigram): Sets,
    mut checks: Vec<Check>,
    subject: &Subject,
    progress: &dyn Progress,
) -> Result<(StageReport, usize), VerifyError> {
    let (checkpoint, options) = (&subject.checkpoint, subject.sense);
    let mut heard = hear(scorer, sets, unigram, progress)?;
    checks.extend(heard.iter().map(|h| h.check(unigram)));
    checks.extend(asking(&heard));
    // The set that the model knows best comes first.
    heard.sort_by(|a, b| {
        let by_heart = (a.band, b.band) == (Band::Plausible, Band::Plausible);
        a.band.cmp(&b.band).then(if by_heart { a.loss.total_cmp(&b.loss) } else { Ordering::Equal })
    });
    let best = heard.first().map_or(Band::None, |h| h.band);
    let (mut tried, mut first, mut last) = (0, None, None);
    for (i, h) in heard.iter().enumerate() {
        // Another set decides only where the first does not: where that is not known by heart.
        let counts = h.band != Band::None || best == Band::None;
        if !options.thorough && (i > 0 && (best == Band::Plausible || !counts) || i >= SEARCHED) {
            break;
        }
        let scale = Scale { tokens: h.set.texts.iter().map(Text::scored).collect(), unigram };
        let depth = Depth { deep: i == 0 || options.thorough || best != Band::None, thorough: options.thorough };
        let other = merged.iter().flatten().find(|set| set.name == h.set.name).map(|set| &set.texts[..]);
        let mut search = Search::new(scorer, (&h.set.texts, other), scale, depth, progress)?;
        let base = search.base.clone();
        let found = search.run()?;
        tried += search.tried;
        if let Some(named) = found {
            let summary = named_summary(&named, &base, search.scale(), &h.set, tried);
            checks.extend(named_checks(&named, &base, search.scale(), &h.set, checkpoint, options.plan));
            return Ok((StageReport::new(STAGE, summary, checks), tried));
        }
        if depth.deep && last.is_none() {
            last = search.place()?.map(|(repair, nats)| placed(&repair, &base, &nats, search.scale(), &h.set));
        }
        first.get_or_insert_with(|| (search.scale().clone(), base, h));
    }
    let Some((scale, base, h)) = first else {
        return Ok((StageReport::unmeasured(STAGE, "no set of texts was run"), tried));
    };
    checks.extend(last);
    checks.push(conclusion(&scale, &base, h, tried));
    let summary = format!("{:.3} nats a token on {}; {tried} repairs tried", scale.loss(&base), h.set.name);
    Ok((StageReport::new(STAGE, summary, checks), tried))
}

/// The loss of the first texts of every set, and of the same with the answers' tokens shuffled.
fn hear(scorer: &mut Scorer, sets: Vec<Set>, unigram: f64, progress: &dyn Progress) -> Result<Vec<Heard>, VerifyError> {
    let mut heard = Vec::new();
    let count = sets.len();
    for (i, set) in sets.into_iter().enumerate() {
        progress.at("sets of texts", i, count);
        let texts: Vec<Text> = set.texts.iter().take(FIRST).cloned().collect();
        let tokens = texts.iter().map(Text::scored).collect();
        let scale = Scale { tokens, unigram };
        let mixed = texts.iter().map(shuffled).collect();
        let loss = scale.loss(&scorer.nats(&Deck { texts }, &[])?);
        let shuffled = scale.loss(&scorer.nats(&Deck { texts: mixed }, &[])?);
        heard.push(Heard { set, loss, shuffled, band: rule::band(loss, shuffled, unigram) });
    }
    Ok(heard)
}

/// Whether what is known in a line is known when it is asked for: else turns are not as the model learned them.
fn asking(heard: &[Heard]) -> Option<Check> {
    let pairs = heard.iter().flat_map(|asked| heard.iter().map(move |line| (asked, line)));
    let mut pairs = pairs.filter(|(asked, line)| asked.set.asked && !line.set.asked && asked.set.kind == line.set.kind);
    let (asked, line) = pairs.find(|(asked, line)| rule::lost_when_asked(line.loss, asked.loss))?;
    let detail = format!(
        "{} cost {:.3} nats a token in a line and {:.2} where they are asked for: the chat template makes other turns than \
         the model learned, or it never learned any. Overturned by the publisher's own template",
        line.set.kind, line.loss, asked.loss
    );
    let data = json!({ "kind": line.set.kind, "in_a_line": line.loss, "asked": asked.loss });
    Some(Check::new("chat turns", Verdict::Drift, detail).with(data))
}

/// A text with the tokens of its answer in another order.
fn shuffled(text: &Text) -> Text {
    let mut random = Random(text.ids.len() as u64);
    let mut text = text.clone();
    let answer = &mut text.ids[text.from..];
    for i in (1..answer.len()).rev() {
        answer.swap(i, (random.next() % (i as u64 + 1)) as usize);
    }
    text
}

impl Heard {
    fn check(&self, unigram: f64) -> Check {
        let Heard { set, loss, shuffled, band } = self;
        let (verdict, word) = match band {
            Band::Plausible => (Verdict::Match, "known"),
            Band::Doubtful => (Verdict::NotApplicable, "half known"),
            Band::None => (Verdict::NotApplicable, "not known"),
        };
        let detail = format!(
            "{word}: {loss:.3} nats a token on {FIRST} texts, {shuffled:.1} with their tokens shuffled, {unigram:.1} by \
             counting tokens"
        );
        let data = json!({ "loss": loss, "shuffled": shuffled, "unigram": unigram });
        Check::new(format!("texts: {}", set.name), verdict, detail).with(data)
    }
}

/// Nats per token of each text.
fn each(scale: &Scale, nats: &[f64]) -> Vec<f64> {
    nats.iter().zip(&scale.tokens).map(|(nats, tokens)| nats / *tokens as f64).collect()
}

/// What is to be said where no repair stands out.
fn conclusion(scale: &Scale, base: &[f64], h: &Heard, tried: usize) -> Check {
    let (name, set, loss, unigram) = ("language model", &h.set.name, scale.loss(base), scale.unigram);
    let data = json!({
        "set": set, "loss": loss, "shuffled": h.shuffled, "unigram": unigram, "tried": tried, "each": each(scale, base),
    });
    let searched = match tried {
        0 => format!("no repair could gain {} nats", rule::LEAST_GAIN),
        n => format!("none of {n} repairs stands out"),
    };
    let check = match rule::band(loss, h.shuffled, unigram) {
        Band::Plausible => Check::new(
            name,
            Verdict::Match,
            format!("{loss:.3} nats a token on {set}, as of text known by heart; {searched}"),
        ),
        Band::Doubtful => {
            let detail = format!(
                "{loss:.2} nats a token on {set}: better than counting tokens ({unigram:.1}), worse than knowing the text; \
                 {searched}. A model of other texts, or damage"
            );
            Check::new(name, Verdict::Drift, detail)
        }
        Band::None => {
            let detail = format!(
                "nothing says that this file is right: random weights, texts that it never saw, or damage throughout. \
                 {loss:.2} nats a token on {set}, {:.2} with tokens shuffled, {unigram:.2} by counting them; {searched}. \
                 --baseline compares with another checkpoint; --untrained says that the weights are random on purpose",
                h.shuffled
            );
            Check::new(name, Verdict::Unmeasured, detail)
        }
    };
    check.with(data)
}

/// One line on what was named.
fn named_summary(named: &Named, base: &[f64], scale: &Scale, set: &Set, tried: usize) -> String {
    format!(
        "{} {}: {:.2} nats a token, {:.3} with {}; {tried} repairs tried",
        scale.tokens.len(),
        set.name,
        scale.loss(base),
        scale.loss(&named.nats),
        if named.steps.len() > 1 { "the repairs" } else { "the repair" },
    )
}

/// A check for each repair that is named.
fn named_checks(
    named: &Named,
    base: &[f64],
    scale: &Scale,
    set: &Set,
    checkpoint: &Checkpoint,
    plan: bool,
) -> Vec<Check> {
    let (texts, tokens) = (scale.tokens.len(), scale.tokens.iter().sum::<usize>());
    let count = named.steps.len();
    let one = |step: &search::Step| {
        let (repair, after) = (&step.repair, scale.loss(&named.nats));
        let (before, (agree, all)) = (scale.loss(&step.before), scale.agree(&step.before, &named.nats));
        let alike: Vec<String> = step.alike.iter().map(Repair::name).collect();
        let mut detail = format!(
            "with {} the loss falls from {before:.2} to {after:.3} nats a token on {texts} {} ({agree} of {all} that change agree)",
            repair.name(),
            set.name
        );
        if count > 1 {
            detail += &format!(", given the {} other", count - 1);
        }
        if !alike.is_empty() {
            detail += &format!("; the loss cannot tell it from: {}", alike.join("; "));
        }
        detail += ". Overturned by other known text that gets worse with it, or by a baseline that has the file's own";
        let edit = plan.then(|| repair.plan(checkpoint));
        if let Some(edit) = &edit {
            detail += &format!(". Plan: {edit}");
        }
        let data = json!({
            "family": repair.family(), "repair": repair.name(), "layer": repair.layer, "set": set.name, "texts": texts,
            "tokens": tokens, "agree": agree, "unrepaired": scale.loss(base), "before": before, "after": after,
            "alike": alike, "plan": edit, "each": each(scale, &named.nats),
        });
        Check::new(format!("repair: {}", repair.family()), Verdict::Divergent, detail).with(data)
    };
    named.steps.iter().map(one).collect()
}

/// The check of a place without a repair.
fn placed(repair: &Repair, base: &[f64], nats: &[f64], scale: &Scale, set: &Set) -> Check {
    let (before, after) = (scale.loss(base), scale.loss(nats));
    let (without, set) = (repair.name(), &set.name);
    let found = match nats == base {
        true => {
            format!("{without}, every text of {set} costs the very same ({before:.2} nats a token): it does nothing")
        }
        false => {
            format!("{without}, the loss falls from {before:.2} to {after:.2} nats a token on {set}: it does harm")
        }
    };
    let detail = format!(
        "{found}, where a sound layer is missed; what is wrong with it is not known. Overturned by a baseline in which the \
         layer is the same"
    );
    let data = json!({
        "layer": repair.layer, "skipped": without, "set": set, "before": before, "after": after,
        "agree": scale.agree(base, nats).0,
    });
    Check::new("place", Verdict::Divergent, detail).with(data)
}

/// The file's facts beside those that its publisher states.
fn facts(checkpoint: &Checkpoint) -> Vec<Check> {
    let name = "published facts";
    let Some((published, differing)) = published::recognise(checkpoint.config()) else {
        let why = "no published facts of a model of these widths: the numbers of its metadata are taken on trust";
        return vec![Check::new(name, Verdict::NotApplicable, why)];
    };
    let (models, source) = (published.models, published.source);
    if differing.is_empty() {
        let detail = format!("all are those of {models} ({source})");
        return vec![Check::new(name, Verdict::Match, detail)];
    }
    let one = |d: &published::Differing| {
        let verdict = if d.computes { Verdict::Divergent } else { Verdict::Drift };
        let detail = format!(
            "expected {}, as {models} has it ({source}); found {}. Overturned by a publisher who changed it",
            d.published, d.found
        );
        let data: Json = json!({ "fact": d.fact, "published": d.published, "found": d.found, "models": models });
        Check::new(format!("{name}: {}", d.fact), verdict, detail).with(data)
    };
    differing.iter().map(one).collect()
}
