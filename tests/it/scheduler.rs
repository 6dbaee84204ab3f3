//! The scheduler under load: sequences that come, go, share what is cached and give way to older ones write what they
//! write alone, and no page is lost.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;

use crate::common::odd::{Fault, odd};
use crate::common::running::{engine, greedy, open, run_all};
use crate::common::{GLM5_NANO, PICO};
use lockstep::checkpoint::Checkpoint;
use lockstep::engine::chooser::Wishes;
use lockstep::engine::kv::PAGE;
use lockstep::engine::prefix::Root;
use lockstep::engine::sampler::Sampling;
use lockstep::engine::scheduler::{Counts, Finish, PromptRead, Request, Scheduler};
use lockstep::engine::{Engine, EngineError, Engines, Options};

/// An engine whose cache has room for `pages` pages of tokens.
fn tight(checkpoint: &Arc<Checkpoint>, fault: Fault, sequences: usize, pages: usize) -> Engine {
    let options = Options { sequences, chunk: 16, cache_tokens: pages * PAGE, ..Options::for_one(checkpoint.config()) };
    odd(fault).engine(checkpoint, 1, options).unwrap()
}

/// Whole pages in common with others of the same `kind`, then its own.
fn request(kind: u32, number: u32, own: u32, most: usize) -> Request {
    let common = (0..2 * PAGE as u32 + 3).map(|i| 90 + 7 * i + kind);
    let prompt = common.chain((0..own).map(|i| 300 + 11 * i + number)).collect();
    Request { root: Some(Root::default()), ..Request::plain(prompt, most, vec![], Sampling::default()) }
}

type Texts = BTreeMap<u64, Vec<u32>>;

/// Runs everything to its end: texts, prompts as they were read, and counts.
fn run(engine: &mut Engine, requests: &[Request]) -> (Texts, Vec<PromptRead>, Counts) {
    let mut scheduler = Scheduler::default();
    let (mut texts, mut read) = (Texts::new(), Vec::new());
    for r in requests {
        scheduler.add(engine, r.clone()).unwrap();
    }
    while scheduler.is_busy() {
        for event in scheduler.step(engine).unwrap() {
            texts.entry(event.sequence).or_default().push(event.token);
        }
        read.extend(scheduler.prompts_read());
        let pages = engine.pool().counts();
        assert_eq!(pages.free + pages.owned + pages.cached, engine.pool().free() + pages.owned);
    }
    assert_eq!(engine.pool().counts().owned, 0, "pages were lost");
    (texts, read, scheduler.counts())
}

/// Each alone, in an engine with room, sharing nothing.
fn alone(checkpoint: &Arc<Checkpoint>, requests: &[Request]) -> Texts {
    let mut engine = engine(checkpoint, 1, 1);
    let plain = |r: &Request| Request { root: None, ..r.clone() };
    let text = |r: &Request| run_all(&mut engine, vec![plain(r)]).remove(0).0;
    (0..).zip(requests.iter().map(text)).collect()
}

#[test]
fn who_gives_way_and_comes_back_writes_the_same_text() {
    let checkpoint = open(PICO);
    let requests: Vec<Request> = (0..4).map(|i| request(i, i, 5 * i, 40)).collect();
    let expected = alone(&checkpoint, &requests);
    for fault in [Fault::None, Fault::RunsAhead] {
        let (texts, _, counts) = run(&mut tight(&checkpoint, fault, 4, 8), &requests);
        assert_eq!(texts, expected);
        assert!(counts.preempted > 0, "{counts:?}");
    }
    let (texts, _, counts) = run(&mut tight(&checkpoint, Fault::None, 4, 40), &requests);
    assert_eq!((texts, counts.preempted), (expected, 0), "the twin with room");
}

#[test]
fn a_shared_beginning_gives_the_same_text() {
    let checkpoint = open(PICO);
    let requests: Vec<Request> = (0..3).map(|i| request(0, i, 4 + i, 12)).collect();
    let expected = alone(&checkpoint, &requests);
    let mut engine = tight(&checkpoint, Fault::None, 1, 12);
    let (texts, read, counts) = run(&mut engine, &requests);
    assert_eq!(texts, expected);
    assert_eq!(read.iter().map(|r| r.shared).collect::<Vec<_>>(), [0, 2 * PAGE, 2 * PAGE]);
    assert_eq!(counts.shared, 4 * PAGE as u64);
    // Nobody finds the text of another root.
    let others = Request { root: Some(Root::new("another")), ..requests[0].clone() };
    let (texts, read, _) = run(&mut engine, &[others]);
    assert_eq!((&texts[&0], read[0].shared), (&expected[&0], 0));
}

#[test]
fn two_that_come_together_share_nothing_that_is_not_there_yet() {
    let checkpoint = open(PICO);
    let requests = [request(0, 0, 4, 8), request(0, 0, 4, 8)];
    let (texts, read, _) = run(&mut tight(&checkpoint, Fault::None, 2, 12), &requests);
    assert_eq!(texts, alone(&checkpoint, &requests));
    assert!(read.iter().all(|r| r.shared == 0), "{read:?}");
}

#[test]
fn a_prompt_alone_is_read_with_its_probabilities() {
    let checkpoint = open(PICO);
    let mut engine = engine(&checkpoint, 1, 1);
    let prompt: Vec<u32> = (0..40).map(|i| 100 + 3 * i).collect();
    let wishes = Wishes { prompt_logprobs: Some(2), ..Wishes::default() };
    let only = Request { wishes, ..Request::plain(prompt.clone(), 0, vec![], Sampling::default()) };
    let (texts, read, _) = run(&mut engine, &[only]);
    assert!(texts.is_empty() && read[0].ended && read[0].logprobs.len() == 39);
    // In chunks, and after giving way, the same.
    let wishes = Wishes { prompt_logprobs: Some(2), ..Wishes::default() };
    let chunked = Request { wishes, ..Request::plain(prompt, 3, vec![], Sampling::default()) };
    let (texts, again, _) = run(&mut tight(&checkpoint, Fault::None, 1, 4), &[chunked]);
    assert_eq!((texts[&0].len(), again[0].ended), (3, false));
    assert_eq!(again[0].logprobs, read[0].logprobs);
    assert!(read[0].logprobs.iter().all(|l| l.chosen <= l.top[0].1 && l.top.len() == 2 && l.chosen < 0.0));
}

#[test]
fn a_token_is_reported_with_its_own_probability() {
    let checkpoint = open(GLM5_NANO);
    let mut engine = engine(&checkpoint, 1, 2);
    let wishes = Wishes { logprobs: Some(1), ..Wishes::default() };
    let plain = greedy(&[100, 200, 300], 6, &[]);
    let told = Request { wishes, ..plain.clone() };
    let mut scheduler = Scheduler::default();
    scheduler.add(&engine, plain).unwrap();
    scheduler.add(&engine, told).unwrap();
    let mut texts: [Vec<u32>; 2] = Default::default();
    while scheduler.is_busy() {
        for event in scheduler.step(&mut engine).unwrap() {
            texts[event.sequence as usize].push(event.token);
            assert_eq!(event.logprobs.is_some(), event.sequence == 1);
            if let Some(found) = event.logprobs {
                assert_eq!((found.top[0].0, found.top[0].1), (event.token, found.chosen), "greedy takes the likeliest");
            }
        }
    }
    assert_eq!(texts[0], texts[1]);
}

#[test]
fn what_can_never_be_is_refused_at_once_or_ends_alone() {
    let checkpoint = open(PICO);
    let mut engine = tight(&checkpoint, Fault::None, 2, 4);
    let mut scheduler = Scheduler::default();
    let long = Request::plain(vec![5; 4 * PAGE], 1, vec![], Sampling::default());
    assert!(matches!(scheduler.add(&engine, long), Err(EngineError::Limit { what: "prompt tokens", .. })));
    let vocab = checkpoint.config().vocab as u32;
    let nothing = Wishes { bias: (0..vocab).map(|id| (id, -100.0)).collect(), ..Wishes::default() };
    let none = Request { wishes: nothing, ..Request::plain(vec![5], 4, vec![], Sampling::default()) };
    scheduler.add(&engine, none).unwrap();
    let other = scheduler.add(&engine, Request::plain(vec![5], 4, vec![], Sampling::default())).unwrap();
    let mut ends = BTreeMap::new();
    while scheduler.is_busy() {
        for event in scheduler.step(&mut engine).unwrap() {
            ends.extend(event.finish.map(|finish| (event.sequence, finish)));
        }
    }
    assert_eq!(ends, BTreeMap::from([(0, Finish::Failed), (other, Finish::Length)]));
}

#[derive(Clone, Debug)]
enum Do {
    Add(u32, u32, usize),
    Cancel(u64),
    Step(usize),
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]
    /// Whatever comes and goes: every page is free, cached or owned, whole texts are those of each alone, cancelled ones
    /// begin like them, and all pages come back.
    #[test]
    fn any_order_of_events_keeps_pages_and_texts(
        ahead in any::<bool>(),
        todo in proptest::collection::vec(prop_oneof![
            4 => (0u32..2, 0u32..9, 1usize..40).prop_map(|(kind, own, most)| Do::Add(kind, own, most)),
            1 => (0u64..12).prop_map(Do::Cancel),
            4 => (1usize..12).prop_map(Do::Step),
        ], 1..24),
    ) {
        let checkpoint = open(PICO);
        let fault = if ahead { Fault::RunsAhead } else { Fault::None };
        let mut engine = tight(&checkpoint, fault, 3, 7);
        let all = engine.pool().counts().free;
        let mut scheduler = Scheduler::default();
        let (mut requests, mut texts, mut gone) = (Vec::new(), Texts::new(), Vec::new());
        let rest = [Do::Step(2000)];
        for what in todo.iter().chain(&rest) {
            match what {
                Do::Add(kind, own, most) => {
                    requests.push(request(*kind, requests.len() as u32, *own, *most));
                    scheduler.add(&engine, requests[requests.len() - 1].clone()).unwrap();
                }
                Do::Cancel(number) => {
                    scheduler.cancel(&mut engine, *number);
                    gone.push(*number);
                }
                Do::Step(n) => for _ in 0..*n {
                    if !scheduler.is_busy() {
                        break;
                    }
                    for event in scheduler.step(&mut engine).unwrap() {
                        texts.entry(event.sequence).or_default().push(event.token);
                    }
                    let pages = engine.pool().counts();
                    prop_assert_eq!(pages.free + pages.owned + pages.cached, all);
                },
            }
        }
        prop_assert!(!scheduler.is_busy());
        prop_assert_eq!(engine.pool().counts().owned, 0);
        for (number, text) in alone(&checkpoint, &requests) {
            let found = texts.remove(&number).unwrap_or_default();
            let whole = !gone.contains(&number);
            prop_assert!(found.len() <= text.len() && (!whole || found.len() == text.len()), "sequence {}", number);
            prop_assert_eq!(&found[..], &text[..found.len()], "sequence {}", number);
        }
    }
}
