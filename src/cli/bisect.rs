//! `lockstep bisect`: the first bad layer, operation and region, and the kind of fault with its evidence.

use std::io::Write;

use serde_json::{Value as Json, json};

use super::args::BisectArgs;
use super::subject::{Bar, device_name, engines, lists_faults, subject};
use super::{CliError, Exit, write_json};
use crate::diagnose::bisect::{self, Bisection, Blame, Culprit};
use crate::report::table::{facts, ranges};
use crate::verify::Subject;

/// Prompts up to this length are judged at every token before bisect says that nothing is wrong.
const WIDEN_UP_TO: usize = 512;

/// Other diverging operations that the table shows.
const OTHERS_SHOWN: usize = 8;

pub(super) fn run(args: &BisectArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    if lists_faults(&args.subject, out)? {
        return Ok(Exit::Ok);
    }
    if let Some(path) = &args.subject.baseline {
        let problem = format!("--baseline {}: bisect judges by the reference; verify compares models", path.display());
        return Err(CliError::Usage(problem));
    }
    let mut subject = subject(&args.subject, engines(&args.subject)?)?;
    let found = {
        let bar = Bar::new();
        let found = bisect::run(&subject, &bar)?;
        // Nothing at the sampled rows: a fault of few tokens may lie between them.
        let all = subject.ids.len();
        if found.culprit.is_none() && found.parts_at.is_none() && subject.rows.len() < all && all <= WIDEN_UP_TO {
            subject.rows = (0..all).collect();
            bisect::run(&subject, &bar)?
        } else {
            found
        }
    };
    let device = device_name(&args.subject, &subject);
    if args.subject.model.json {
        write_json(out, &document(&subject, &device, &found))?;
    } else {
        print(&subject, &device, &found, args.subject.rows, out)?;
    }
    Ok(found.verdict.into())
}

fn kind(culprit: &Culprit) -> &str {
    culprit.explanation.as_ref().map_or("UNKNOWN", |e| e.kind)
}

fn print(subject: &Subject, device: &str, found: &Bisection, asked: usize, out: &mut dyn Write) -> std::io::Result<()> {
    let rows = match subject.rows.len() {
        all if all > asked => format!("{asked} rows, then at all {all}"),
        rows => format!("{rows} rows"),
    };
    writeln!(
        out,
        "{}: tp {}, {device}, recipe {}, attention {}, {}; {} operations judged at {rows}\n",
        subject.checkpoint.name(),
        subject.tp,
        subject.recipe.name(),
        subject.attention.name(),
        subject.prompt,
        found.judged
    )?;
    if let Some(place) = &found.parts_at {
        return writeln!(out, "verdict: NONDETERMINISTIC, no other verdict. The same input parts first at {place}.");
    }
    let Some(culprit) = &found.culprit else {
        let sparse = found.sparse.as_deref().unwrap_or_default();
        let (verdict, unmeasured) = (found.verdict.name(), found.unmeasured);
        writeln!(out, "No operation diverges; {unmeasured} could not be judged. Sparse attention: {sparse}.")?;
        return writeln!(out, "\nverdict: {verdict}");
    };
    let f = &culprit.finding;
    let mut rows = facts();
    let layer = f.place.layer().map_or("none (outside the layers)".into(), |l| l.to_string());
    let mut add = |name: &str, value: &str| {
        rows.add_row([name, value]);
    };
    add("kind", kind(culprit));
    add("first bad layer", &layer);
    add("operation", &f.place.to_string());
    add("ranks", &rank_list(&f.ranks, subject.tp));
    add("region", &culprit.region);
    add("rows", &token_list(&f.tokens));
    add("evidence", &f.detail);
    match &culprit.explanation {
        Some(e) => {
            add("site", &e.site);
            add("explanation", &e.statement);
            add("fault of", e.of.text());
            match e.by_bytes {
                true => {
                    add("fit", "sums overflow, so values cannot decide; the device holds exactly the predicted bytes")
                }
                false => add("fit", &format!("residual rho {:.2} of {:.2} under this hypothesis", e.rho.0, e.rho.1)),
            }
            add("overturned by", &e.overturn);
        }
        None => add("explanation", "none of the catalogue fits; see what was ruled out"),
    }
    for also in &culprit.also {
        add("fits as well", also);
    }
    let ruled: Vec<String> =
        culprit.ruled_out.iter().map(|r| format!("{} ({} tried, best rho {:.1e})", r.kind, r.tried, r.rho)).collect();
    add("ruled out", &if ruled.is_empty() { "nothing".into() } else { ruled.join("; ") });
    writeln!(out, "{rows}")?;
    if found.others.is_empty() {
        let left = found.unmeasured;
        let but = if left == 0 { String::new() } else { format!(", but for {left} that could not be judged") };
        writeln!(out, "\nEvery other operation is right, given its own inputs{but}.")?;
    } else {
        let shown: Vec<String> = found.others.iter().take(OTHERS_SHOWN).map(|o| o.place.to_string()).collect();
        let more = found.others.len().saturating_sub(OTHERS_SHOWN);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        writeln!(out, "\nWrong in their own right as well: {}{more}.", shown.join(", "))?;
    }
    writeln!(out, "\nverdict: {} {}", found.verdict.name(), kind(culprit))
}

fn rank_list(ranks: &[usize], tp: usize) -> String {
    if ranks.len() == tp || ranks.is_empty() { format!("all {tp}") } else { format!("{} of {tp}", ranges(ranks)) }
}

fn token_list(tokens: &[usize]) -> String {
    let mut sorted = tokens.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    if sorted.is_empty() {
        "none alone; the whole output decides".into()
    } else {
        format!("tokens {}", ranges(&sorted))
    }
}

/// JSON has no infinities.
fn number(x: f64) -> Json {
    if x.is_finite() { json!(x) } else { json!(x.to_string()) }
}

fn document(subject: &Subject, device: &str, found: &Bisection) -> Json {
    let culprit = found.culprit.as_ref().map(|c| {
        json!({
            "kind": kind(c),
            "layer": c.finding.place.layer(),
            "operation": c.finding.place.point.name(),
            "ranks": c.finding.ranks,
            "tokens": c.finding.tokens,
            "region": c.region,
            "evidence": c.finding.detail,
            "explanation": c.explanation.as_ref().map(|e| json!({
                "site": e.site, "statement": e.statement, "ranks": e.ranks,
                "rho": number(e.rho.0), "limit": e.rho.1,
                "of_data": e.of == Blame::Data, "by_bytes": e.by_bytes, "overturned_by": e.overturn,
            })),
            "fits_as_well": c.also,
            "ruled_out": c.ruled_out.iter()
                .map(|r| json!({"kind": r.kind, "tried": r.tried, "best_rho": r.rho.to_string()})).collect::<Vec<_>>(),
        })
    });
    json!({
        "model": subject.checkpoint.name(),
        "tp": subject.tp,
        "device": device,
        "recipe": subject.recipe.name(),
        "verdict": found.verdict.name(),
        "judged": found.judged,
        "unmeasured": found.unmeasured,
        "sparse_attention": found.sparse,
        "culprit": culprit,
        "parts_at": found.parts_at,
        "others": found.others.iter().map(|o| o.place.to_string()).collect::<Vec<_>>(),
    })
}
