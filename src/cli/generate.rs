//! `lockstep generate`: a chat turn or a completion, streamed to the terminal.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use serde_json::json;

use super::args::GenerateArgs;
use super::{CliError, Exit, device, options, write_json};
use crate::checkpoint::Checkpoint;
use crate::engine::generate::generate;
use crate::engine::sampler::Sampling;
use crate::engine::scheduler::{Finish, Request};
use crate::tokenize::{ChatMessage, Tokenizer};

pub(super) fn run(args: &GenerateArgs, out: &mut dyn Write) -> Result<Exit, CliError> {
    check(args)?;
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
    let mut engine = engines.engine(&checkpoint, args.tp, options(&checkpoint, &args.engine)?)?;
    let stops = tokenizer.stop_ids();
    if let Some(warning) = &stops.warning {
        writeln!(std::io::stderr(), "lockstep: {warning}")?;
    }
    let sampling = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        seed: args.seed,
    };
    let stop = stops.ids.iter().map(|s| s.id).collect();
    let request = Request { prompt, most: args.max_tokens, stop, sampling };
    let mut stream = tokenizer.stream();
    let (mut text, mut ids) = (String::new(), Vec::new());
    let (mut written, mut first) = (Ok(()), None);
    let start = Instant::now();
    let finish = generate(&mut engine, request, &mut |token| {
        first.get_or_insert_with(|| start.elapsed());
        ids.push(token);
        if let Some(piece) = stream.push(token) {
            if !args.model.json && written.is_ok() {
                written = out.write_all(piece.as_bytes()).and_then(|()| out.flush());
            }
            text.push_str(&piece);
        }
    })?;
    written?;
    let rest = stream.finish();
    text.push_str(&rest);
    let elapsed = start.elapsed();
    let reason = match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
    };
    let prefill = first.unwrap_or(elapsed);
    let decode = (ids.len() as f64 - 1.0).max(0.0) / (elapsed - prefill).as_secs_f64().max(1e-9);
    if args.model.json {
        let document = json!({
            "model": checkpoint.name(), "text": text, "ids": ids, "finish": reason, "prompt_tokens": prompt_tokens,
            "attention": engine.options().attention.name(), "tp": engine.tp(), "seed": args.seed,
            "device": args.device.device.to_string(), "recipe": engines.backend().recipe().name(),
            "prefill_seconds": prefill.as_secs_f64(), "decode_tokens_per_second": decode,
        });
        write_json(out, &document)?;
    } else {
        writeln!(out, "{rest}")?;
        out.flush()?; // the note goes to the other stream, and comes behind the text
        writeln!(
            std::io::stderr(),
            "[{}: {prompt_tokens} prompt tokens in {:.0} ms; {} tokens at {decode:.0} tokens/s; finish: {reason}; \
             attention: {}; tp {}, {}, recipe {}]",
            checkpoint.name(),
            prefill.as_secs_f64() * 1e3,
            ids.len(),
            engine.options().attention.name(),
            engine.tp(),
            args.device.device,
            engines.backend().recipe().name()
        )?;
    }
    Ok(Exit::Ok)
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
