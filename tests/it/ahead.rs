//! Devices that choose tokens themselves and run a step ahead of the host: the texts must be those of devices that do not,
//! whoever ends, comes or goes meanwhile.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::common::GLM5_NANO;
use crate::common::odd::{Fault, odd};
use crate::common::running::open;
use lockstep::checkpoint::Checkpoint;
use lockstep::engine::Engines;
use lockstep::engine::sampler::Sampling;
use lockstep::engine::scheduler::{Finish, Request, Scheduler};
use lockstep::engine::{Engine, Options};

/// What happens behind which step.
#[derive(Clone, Copy)]
enum Then {
    Add(usize),
    Cancel(usize),
}

/// A prompt of its own for each number, and how many tokens are to follow.
fn request(number: usize, most: usize, stop: &[u32]) -> Request {
    let prompt = (0..3 + 5 * number as u32).map(|i| 100 + 37 * i + number as u32).collect();
    Request::plain(prompt, most, stop.to_vec(), Sampling::default())
}

/// What came of requests, and for how many rows a device chose.
struct Run {
    texts: Texts,
    chosen: usize,
}

type Texts = BTreeMap<u64, (Vec<u32>, Option<Finish>)>;

/// Runs `first` requests, and what comes `then`, on devices that run ahead or do not.
fn run(checkpoint: &Arc<Checkpoint>, fault: Fault, requests: &[Request], first: usize, then: &[(usize, Then)]) -> Run {
    let options = Options { sequences: 3, ..Options::for_one(checkpoint.config()) };
    let engines = odd(fault);
    let mut engine: Engine = engines.engine(checkpoint, 1, options).unwrap();
    assert_eq!(engine.runs_ahead(3), fault == Fault::RunsAhead);
    let free = engine.pool().free();
    let mut scheduler = Scheduler::default();
    let mut texts = Texts::new();
    for request in &requests[..first] {
        scheduler.add(&engine, request.clone()).unwrap();
    }
    for step in 0.. {
        for (_, then) in then.iter().filter(|(at, _)| *at == step) {
            match then {
                Then::Add(i) => drop(scheduler.add(&engine, requests[*i].clone()).unwrap()),
                Then::Cancel(i) => scheduler.cancel(&mut engine, *i as u64),
            }
        }
        if !scheduler.is_busy() {
            break;
        }
        for event in scheduler.step(&mut engine).unwrap() {
            let text = texts.entry(event.sequence).or_default();
            assert_eq!(text.1, None, "a token behind the end of {}", event.sequence);
            text.0.push(event.token);
            text.1 = event.finish;
        }
    }
    assert_eq!(engine.pool().free(), free, "pages were lost");
    drop(engine);
    Run { texts, chosen: engines.chosen.load(Ordering::Relaxed) }
}

/// Texts on both kinds of devices are equal; a cancelled one may be as far as its device was. With them comes for how many
/// rows a device chose.
fn assert_same(requests: &[Request], first: usize, then: &[(usize, Then)], cancelled: &[u64]) -> Run {
    let checkpoint = open(GLM5_NANO);
    let Run { texts: plain, chosen: none } = run(&checkpoint, Fault::None, requests, first, then);
    let Run { texts: ahead, chosen } = run(&checkpoint, Fault::RunsAhead, requests, first, then);
    assert_eq!(none, 0);
    assert_eq!(plain.keys().collect::<Vec<_>>(), ahead.keys().collect::<Vec<_>>());
    for (number, (text, finish)) in &plain {
        let (other, end) = &ahead[number];
        let most = if cancelled.contains(number) { text.len().min(other.len()) } else { text.len() };
        assert_eq!(text[..most], other[..most.min(other.len())], "sequence {number}");
        assert!(cancelled.contains(number) || (finish, text.len()) == (end, other.len()), "sequence {number}");
    }
    Run { texts: plain, chosen }
}

#[test]
fn sequences_of_other_lengths_end_one_after_the_other() {
    let requests: Vec<Request> = [(0, 1), (1, 7), (2, 30)].map(|(i, most)| request(i, most, &[])).to_vec();
    let Run { texts, chosen } = assert_same(&requests, 3, &[], &[]);
    assert!(chosen > 0);
    assert_eq!(texts.values().map(|t| t.0.len()).collect::<Vec<_>>(), [1, 7, 30]);
}

#[test]
fn a_stop_id_ends_one_sequence_and_the_others_go_on() {
    let free: Vec<Request> = (0..3).map(|i| request(i, 24, &[])).collect();
    let texts = assert_same(&free, 3, &[], &[]).texts;
    // Each sequence in turn is stopped by a token that it is known to reach.
    for i in 0..3 {
        let stop = [texts[&(i as u64)].0[10]];
        let requests: Vec<Request> = (0..3).map(|j| request(j, 24, if i == j { &stop[..] } else { &[] })).collect();
        let stopped = assert_same(&requests, 3, &[], &[]).texts;
        assert_eq!(stopped[&(i as u64)].1, Some(Finish::Stop));
        assert!(stopped[&(i as u64)].0.len() <= 11);
    }
}

#[test]
fn who_comes_later_is_read_in_and_changes_nobodys_text() {
    let requests: Vec<Request> = (0..5).map(|i| request(i, 20, &[])).collect();
    assert_same(&requests, 1, &[(4, Then::Add(1)), (9, Then::Add(2)), (10, Then::Add(3)), (11, Then::Add(4))], &[]);
}

#[test]
fn who_goes_takes_no_token_of_the_others_along() {
    let requests: Vec<Request> = (0..4).map(|i| request(i, 20, &[])).collect();
    for at in [2, 3, 7] {
        assert_same(&requests, 3, &[(at, Then::Cancel(1)), (at + 3, Then::Add(3))], &[1]);
    }
}

#[test]
fn what_is_drawn_is_the_same_and_a_filter_keeps_the_device_waiting() {
    let drawn = |seed: u64| Sampling { temperature: 0.8, seed, ..Sampling::default() };
    let with = |sampling: Sampling, i: usize| Request { sampling, ..request(i, 20, &[]) };
    let requests = [with(drawn(1), 0), with(drawn(2), 1), request(2, 20, &[])];
    let Run { texts, chosen } = assert_same(&requests, 3, &[], &[]);
    // All but the first token of each, which the prompt's step gives.
    assert!(chosen >= 3 * 19, "{chosen} rows");
    let others = assert_same(&[with(drawn(3), 0), with(drawn(2), 1)], 2, &[], &[]).texts;
    assert_ne!(texts[&0], others[&0], "the seed does nothing");
    assert_eq!(texts[&1], others[&1], "a neighbour's seed changes a text");
    let filtered = with(Sampling { top_p: 0.8, ..drawn(4) }, 1);
    assert_eq!(assert_same(&[with(drawn(1), 0), filtered], 2, &[], &[]).chosen, 0, "a filter needs all logits");
}

#[test]
fn a_sequence_runs_to_the_end_of_its_context() {
    let checkpoint = open(GLM5_NANO);
    let context = checkpoint.config().context.min(4096);
    let prompt = (0..context as u32 - 6).map(|i| 50 + i % 3000).collect();
    let request = Request::plain(prompt, usize::MAX, Vec::new(), Sampling::default());
    let texts = assert_same(&[request], 1, &[], &[]).texts;
    assert_eq!((texts[&0].0.len(), texts[&0].1), (6, Some(Finish::Length)));
}
