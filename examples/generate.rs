//! Loads a model, asks it something, and prints the answer as it comes.
//!
//! `cargo run --example generate [MODEL [TEXT]]`; without a model the golden glm5-nano answers.
#![allow(clippy::print_stdout)] // an example talks to a terminal

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use lockstep::checkpoint::Checkpoint;
use lockstep::engine::generate::generate;
use lockstep::engine::sampler::Sampling;
use lockstep::engine::scheduler::Request;
use lockstep::engine::{Engine, Options};
use lockstep::report::clean_lines;
use lockstep::tokenize::{ChatMessage, Tokenizer};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/goldens/models/glm5-nano-Q4_K_M.gguf");

/// Ranks: threads of this process, each with its own shard.
const TP: usize = 2;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let model = PathBuf::from(args.next().unwrap_or_else(|| GOLDEN.into()));
    let text = args.next().unwrap_or_else(|| "Genesis 1:1".into());

    let checkpoint = Arc::new(Checkpoint::open(Some(&model))?);
    let tokenizer = Tokenizer::new(&checkpoint.tokenizer_spec()?)?;
    let prompt = tokenizer.chat_ids(&[ChatMessage::new("user", &text)], true, &serde_json::Map::new())?;
    let stop = tokenizer.stop_ids().ids.iter().map(|s| s.id).collect();

    let options = Options::for_one(checkpoint.config());
    let mut engine = Engine::cpu(checkpoint, TP, options)?;
    let request = Request::plain(prompt, 64, stop, Sampling::default());
    let mut stream = tokenizer.stream();
    let finish = generate(&mut engine, request, &mut |token| {
        if let Some(piece) = stream.push(token) {
            print!("{}", clean_lines(&piece));
        }
    })?;
    println!("{}\n{finish:?}", clean_lines(&stream.finish()));
    Ok(())
}
