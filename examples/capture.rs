//! Runs a prompt once, looks at one probe point while it runs, and prints how large each token's row is there.
//!
//! `cargo run --example capture [PLACE [MODEL]]`, such as `layers.3.attn.out`.
#![allow(clippy::print_stdout)] // an example talks to a terminal

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use lockstep::checkpoint::Checkpoint;
use lockstep::engine::{Engine, Options};
use lockstep::model::Place;
use lockstep::tokenize::Tokenizer;
use lockstep::verify::subject::run_prompt;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/goldens/models/glm5-nano-Q4_K_M.gguf");

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let place: Place = args.next().unwrap_or_else(|| "layers.3.attn.out".into()).parse()?;
    let model = PathBuf::from(args.next().unwrap_or_else(|| GOLDEN.into()));

    let checkpoint = Arc::new(Checkpoint::open(Some(&model))?);
    let tokenizer = Tokenizer::new(&checkpoint.tokenizer_spec()?)?;
    let ids = tokenizer.prompt_ids("In the beginning God created the heaven and the earth.")?;

    let options = Options::for_one(checkpoint.config());
    let mut engine = Engine::cpu(checkpoint, 2, options)?;
    let (trace, _logits) = run_prompt(&mut engine, &ids, Arc::new(move |at| at == place))?;
    // What the two ranks hold, put together: parts joined, addends added, copies compared.
    let whole = trace.whole(place)?;
    println!("{place}: {} tokens of {:?} values, {}", whole.rows, whole.shape, place.point.layout().name());
    for (id, row) in ids.iter().zip(whole.as_f32().chunks_exact(whole.row_len())) {
        let squares: f64 = row.iter().map(|v| f64::from(*v).powi(2)).sum();
        let largest = row.iter().fold(0.0f32, |most, v| most.max(v.abs()));
        println!("token {id:5}: root mean square {:.4}, largest {largest:.4}", (squares / row.len() as f64).sqrt());
    }
    Ok(())
}
