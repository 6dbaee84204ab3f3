//! `lockstep generate`: a chat turn or a completion, streamed to the terminal.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;

use super::args::GenerateArgs;
use super::console::Bar;
use super::{CliError, Exit, console, device, emit, options};
use crate::checkpoint::Checkpoint;
use crate::engine::generate::generate;
use crate::engine::sampler::Sampling;
use crate::engine::scheduler::{Finish, Request};
use crate::report::{Page, Record, clean_lines};
use crate::tokenize::{ChatMessage, Tokenizer};

pub(super) fn run(args: &GenerateArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    check(args)?;
    device::check_degree(&args.device, args.tp)?;
    let engines = device::engines(&args.device, None)?;
    let checkpoint = Arc::new(Checkpoint::open(args.model.model.as_deref())?);
    let spec = checkpoint.tokenizer_spec()?;
    let tokenizer = Tokenizer::new(&spec)?;
    let prompt = if args.raw {
        tokenizer.prompt_ids(&args.prompt)?
    } else {
        let system = args.system.iter().map(|text| ChatMessage::new("system", text));
        let messages: Vec<ChatMessage> = system.chain([ChatMessage::new("user", &args.prompt)]).collect();
        tokenizer.chat_ids(&messages, true, &serde_json::Map::new())?
    };
    let prompt_tokens = prompt.len();
    let bar = Bar::new("");
    let mut engine = engines.engine(&checkpoint, args.tp, options(&checkpoint, &args.engine)?)?;
    drop(bar);
    let stops = tokenizer.stop_ids();
    if let Some(warning) = &stops.warning {
        console::note(warning);
    }
    let sampling = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        seed: args.seed,
    };
    let stop = stops.ids.iter().map(|s| s.id).collect();
    let request = Request::plain(prompt, args.max_tokens, stop, sampling);
    let mut stream = tokenizer.stream();
    let (mut text, mut ids) = (String::new(), Vec::new());
    let (mut written, mut first) = (Ok(()), None);
    let start = Instant::now();
    let finish = generate(&mut engine, request, &mut |token| {
        first.get_or_insert_with(|| start.elapsed());
        ids.push(token);
        if let Some(piece) = stream.push(token) {
            if !args.model.json && written.is_ok() {
                written = out.write_all(clean_lines(&piece).as_bytes()).and_then(|()| out.flush());
            }
            text.push_str(&piece);
        }
    })?;
    written?;
    let rest = stream.finish();
    text.push_str(&rest);
    let elapsed = start.elapsed();
    let prefill = first.unwrap_or(elapsed);
    let decode = (ids.len() as f64 - 1.0).max(0.0) / (elapsed - prefill).as_secs_f64().max(1e-9);
    let record = Generated {
        model: checkpoint.name().into(),
        text,
        ids,
        finish: match finish {
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Failed => "failed",
        },
        prompt_tokens,
        attention: engine.options().attention.name(),
        tp: engine.tp(),
        seed: args.seed,
        device: args.device.device.to_string(),
        recipe: engines.backend().recipe().name(),
        prefill_seconds: prefill.as_secs_f64(),
        decode_tokens_per_second: decode,
    };
    if args.model.json {
        emit(&record, true, out)?;
    } else {
        writeln!(out, "{}", clean_lines(&rest))?;
        out.flush()?; // the note goes to the other stream, and comes behind the text
        console::note(&record.summary());
    }
    Ok(Exit::Ok)
}

/// What was generated, and how.
#[derive(Serialize)]
struct Generated {
    model: String,
    text: String,
    ids: Vec<u32>,
    finish: &'static str,
    prompt_tokens: usize,
    attention: &'static str,
    tp: usize,
    seed: u64,
    device: String,
    recipe: &'static str,
    prefill_seconds: f64,
    decode_tokens_per_second: f64,
}

impl Generated {
    fn summary(&self) -> String {
        let Generated { model, prompt_tokens, finish, attention, tp, device, recipe, .. } = self;
        let (ms, tokens, speed) = (1e3 * self.prefill_seconds, self.ids.len(), self.decode_tokens_per_second);
        format!(
            "{model}: {prompt_tokens} prompt tokens in {ms:.0} ms; {tokens} tokens at {speed:.0} tokens/s; finish: \
             {finish}; attention: {attention}; tp {tp}, {device}, recipe {recipe}"
        )
    }
}

impl Record for Generated {
    fn text(&self, page: &mut Page<'_>) -> std::io::Result<()> {
        page.line(&self.text)
    }
}

/// Refuses sampling values that mean nothing.
fn check(args: &GenerateArgs) -> Result<(), CliError> {
    let within = |x: f32, least: f32, most: f32| x.is_finite() && (least..=most).contains(&x);
    // Keys of a choice are f32: colder, their spacing would swallow the noise.
    let warm = |t: f32| t == 0.0 || within(t, 1e-4, 1e4);
    for (flag, found, good, expected) in [
        ("--temperature", args.temperature, warm(args.temperature), "0, or 0.0001 to 10000"),
        ("--top-p", args.top_p, within(args.top_p, f32::MIN_POSITIVE, 1.0), "above 0, at most 1"),
        ("--min-p", args.min_p, within(args.min_p, 0.0, 1.0), "0 to 1"),
        ("--max-tokens", args.max_tokens as f32, args.max_tokens > 0, "at least 1"),
    ] {
        if !good {
            return Err(CliError::Usage(format!("{flag}: expected {expected}, found {found}")));
        }
    }
    Ok(())
}
