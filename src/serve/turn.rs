//! One answer: ids in, pieces out. It knows markers by their ids, holds back what is not whole yet (a character, the
//! beginning of a stop string), and tells reasoning from content. It is pure, and runs where tokens are made, so that an
//! answer is cut at the very token and what is counted does not depend on who reads how fast. Whoever streams sends the
//! pieces, whoever does not joins them.

use std::sync::Arc;

use crate::engine::chooser::Logprobs;
use crate::engine::scheduler::Finish;
use crate::tokenize::{StreamDecoder, Tokenizer};

/// Ids that steer an answer, looked up once. A model may lack any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Markers {
    /// Opens reasoning.
    pub think: Option<u32>,
    /// Closes it.
    pub end_think: Option<u32>,
    /// Behind it the assistant speaks.
    pub assistant: Option<u32>,
}

impl Markers {
    /// GLM's, as far as a tokenizer has them.
    pub fn of(tokenizer: &Tokenizer) -> Self {
        let id = |literal| tokenizer.literal_id(literal);
        Markers { think: id("<think>"), end_think: id("</think>"), assistant: id("<|assistant|>") }
    }

    /// True if an answer to this prompt begins inside reasoning: its last think marker behind the last assistant marker
    /// opens one. Which switches a request set says nothing, since a template need not know them.
    pub fn begins_inside(&self, prompt: &[u32]) -> bool {
        let is = |marker: Option<u32>, id: &u32| marker == Some(*id);
        let turn = prompt.iter().rposition(|id| is(self.assistant, id)).map_or(prompt, |at| &prompt[at..]);
        let last = turn.iter().rev().find(|id| is(self.think, id) || is(self.end_think, id));
        last.is_some_and(|id| is(self.think, id))
    }
}

/// What is to be made of the ids.
#[derive(Clone, Debug, Default)]
pub struct TurnOptions {
    /// Markers that mean something; none in a plain completion.
    pub markers: Markers,
    /// Whether the answer begins inside reasoning.
    pub inside: bool,
    /// Strings that end the content; none is empty.
    pub stops: Vec<String>,
    /// Whether the stop string is part of the content.
    pub keep_stop: bool,
}

/// A token of the content and how likely it was.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Its bytes, which need not be whole characters.
    pub bytes: Vec<u8>,
    /// ln of its probability.
    pub logprob: f64,
    /// The likeliest tokens at its place.
    pub top: Vec<(Vec<u8>, f64)>,
}

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// Text of the reasoning; never empty.
    Reasoning(String),
    /// Text of the content, with its tokens if these were wanted. The text can be empty where tokens come that end
    /// behind a cut.
    Content(String, Vec<TokenLogprob>),
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// At a stop id or a stop string.
    Stop,
    /// At its most tokens, or the end of the context.
    Length,
    /// Its own wishes left nothing to choose.
    Failed,
}

/// What an answer took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// Every id that was drawn, the stop id too.
    pub completion: usize,
    /// Those of them that were drawn inside reasoning.
    pub reasoning: usize,
}

/// A token of the content whose text is not out yet.
struct Held {
    token: TokenLogprob,
    /// Where its text begins and ends in the content, in bytes; the end is not known while a character is cut.
    from: usize,
    to: Option<usize>,
}

/// An answer on its way.
pub struct Turn {
    tokenizer: Arc<Tokenizer>,
    options: TurnOptions,
    inside: bool,
    /// False once a reasoning was opened, or content has begun: none is opened behind it.
    may_open: bool,
    stream: StreamDecoder,
    /// Content that is held back: it may begin a stop string.
    pending: String,
    /// Bytes of content that are out.
    out: usize,
    held: Vec<Held>,
    /// The whole reasoning, in case that nothing follows it.
    reasoning: String,
    spent: Spent,
    ended: Option<Ended>,
}

impl Turn {
    /// The beginning of an answer.
    pub fn new(tokenizer: Arc<Tokenizer>, options: TurnOptions) -> Self {
        let (stream, inside) = (tokenizer.stream(), options.inside);
        Turn {
            tokenizer,
            options,
            inside,
            may_open: !inside,
            stream,
            pending: String::new(),
            out: 0,
            held: Vec::new(),
            reasoning: String::new(),
            spent: Spent::default(),
            ended: None,
        }
    }

    /// Takes the next id. After the end nothing is taken any more.
    pub fn push(&mut self, id: u32, logprobs: Option<&Logprobs>, finish: Option<Finish>) -> Vec<Piece> {
        let mut pieces = Vec::new();
        if self.ended.is_some() {
            return pieces;
        }
        if finish == Some(Finish::Failed) {
            self.end(Ended::Failed, &mut pieces);
            return pieces;
        }
        self.spent.completion += 1;
        self.spent.reasoning += usize::from(self.inside);
        if finish == Some(Finish::Stop) {
            self.end(Ended::Stop, &mut pieces);
            return pieces;
        }
        let Markers { think, end_think, .. } = self.options.markers;
        if think == Some(id) {
            if !self.inside && self.may_open {
                (self.inside, self.may_open) = (true, false);
            }
        } else if end_think == Some(id) {
            if self.inside {
                self.flush_reasoning(&mut pieces);
                self.inside = false;
            }
        } else if self.inside {
            if let Some(text) = self.stream.push(id) {
                self.reason(text, &mut pieces);
            }
        } else {
            self.content(id, logprobs, &mut pieces);
        }
        if finish == Some(Finish::Length) && self.ended.is_none() {
            self.end(Ended::Length, &mut pieces);
        }
        pieces
    }

    /// Why it ended, if it did: the sequence is not wanted any more then.
    pub fn ended(&self) -> Option<Ended> {
        self.ended
    }

    /// What it took so far.
    pub fn spent(&self) -> Spent {
        self.spent
    }

    fn reason(&mut self, text: String, pieces: &mut Vec<Piece>) {
        self.reasoning.push_str(&text);
        pieces.push(Piece::Reasoning(text));
    }

    /// Ends the text so far: what follows begins with whole characters.
    fn cut_stream(&mut self) -> String {
        std::mem::replace(&mut self.stream, self.tokenizer.stream()).finish()
    }

    fn flush_reasoning(&mut self, pieces: &mut Vec<Piece>) {
        let rest = self.cut_stream();
        if !rest.is_empty() {
            self.reason(rest, pieces);
        }
    }

    /// Takes an id of the content.
    fn content(&mut self, id: u32, logprobs: Option<&Logprobs>, pieces: &mut Vec<Piece>) {
        let from = self.out + self.pending.len();
        let text = self.stream.push(id);
        let bytes = |id: u32| self.tokenizer.token_bytes(id).unwrap_or_default().to_vec();
        if let Some(found) = logprobs.filter(|_| !self.tokenizer.is_special(id)) {
            let top = found.top.iter().map(|(id, ln)| (bytes(*id), *ln)).collect();
            let token = TokenLogprob { bytes: bytes(id), logprob: found.chosen, top };
            self.held.push(Held { token, from, to: None });
        }
        let Some(text) = text else { return };
        self.may_open = false;
        self.pending.push_str(&text);
        self.reach(self.out + self.pending.len());
        let found = self.options.stops.iter().filter_map(|stop| Some((self.pending.find(stop)?, stop.len()))).min();
        if let Some((at, len)) = found {
            let cut = if self.options.keep_stop { at + len } else { at };
            self.pending.truncate(cut);
            self.held.retain(|held| held.from < self.out + cut);
            self.held.iter_mut().for_each(|held| held.to = None);
            self.ended = Some(Ended::Stop);
            self.send(cut, true, pieces);
            return;
        }
        let free = self.pending.len() - begun(&self.pending, &self.options.stops);
        self.send(free, false, pieces);
    }

    /// Tells tokens whose end is not known that the content reaches so far.
    fn reach(&mut self, to: usize) {
        self.held.iter_mut().for_each(|held| held.to = held.to.or(Some(to)));
    }

    /// Sends so many bytes of what is pending, with the tokens that end there; with all of them at the end.
    fn send(&mut self, bytes: usize, all: bool, pieces: &mut Vec<Piece>) {
        let text: String = self.pending.drain(..bytes).collect();
        self.out += text.len();
        let out = self.out;
        let whole = self.held.iter().take_while(|held| all || held.to.is_some_and(|to| to <= out)).count();
        let tokens: Vec<TokenLogprob> = self.held.drain(..whole).map(|held| held.token).collect();
        if !text.is_empty() || !tokens.is_empty() {
            pieces.push(Piece::Content(text, tokens));
        }
    }

    fn end(&mut self, ended: Ended, pieces: &mut Vec<Piece>) {
        self.ended = Some(ended);
        if self.inside {
            self.flush_reasoning(pieces);
            // The model skipped the marker and ended: its answer would be lost.
            if ended == Ended::Stop && !self.reasoning.is_empty() {
                pieces.push(Piece::Content(self.reasoning.clone(), Vec::new()));
            }
            return;
        }
        let rest = self.cut_stream();
        self.pending.push_str(&rest);
        self.send(self.pending.len(), true, pieces);
    }
}

/// Bytes at the end of a text that begin a stop string.
fn begun(text: &str, stops: &[String]) -> usize {
    let longest = |stop: &String| {
        let most = stop.len().saturating_sub(1).min(text.len());
        (1..=most).rev().find(|n| text.as_bytes().ends_with(&stop.as_bytes()[..*n])).unwrap_or(0)
    };
    stops.iter().map(longest).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::tokenize::{TokenizerSpec, char_of};

    const THINK: u32 = 256;
    const END_THINK: u32 = 257;
    const USER: u32 = 258;
    const ASSISTANT: u32 = 259;
    /// The first two bytes of an emoji, and the last two.
    const SMI: u32 = 260;
    const LE: u32 = 261;

    /// Ids 0 to 255 are the bytes; markers are control tokens, or user-defined.
    fn tokenizer(markers: i32) -> Arc<Tokenizer> {
        let mut tokens: Vec<String> = (0..=255).map(|b| char_of(b).to_string()).collect();
        tokens.extend(["<think>", "</think>", "<|user|>", "<|assistant|>"].map(String::from));
        tokens.extend([&[0xf0, 0x9f][..], &[0x99, 0x82]].map(|bytes| bytes.iter().map(|b| char_of(*b)).collect()));
        let mut types = vec![1; tokens.len()];
        types[256..260].fill(markers);
        let pre = Some("glm4".into());
        let spec = TokenizerSpec { model: "gpt2".into(), pre, tokens, types, eos: Some(USER), ..Default::default() };
        Arc::new(Tokenizer::new(&spec).unwrap())
    }

    fn turn(inside: bool, stops: &[&str]) -> Turn {
        let tokenizer = tokenizer(3);
        let markers = Markers::of(&tokenizer);
        let stops = stops.iter().map(ToString::to_string).collect();
        Turn::new(tokenizer, TurnOptions { markers, inside, stops, keep_stop: false })
    }

    fn ids(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    #[derive(Debug, Default, PartialEq)]
    struct Whole {
        reasoning: String,
        content: String,
        tokens: Vec<Vec<u8>>,
        ended: Option<Ended>,
    }

    fn fold(turn: &mut Turn, ids: &[u32], last: Finish) -> Whole {
        let mut whole = Whole::default();
        for (i, id) in ids.iter().enumerate() {
            let finish = (i + 1 == ids.len()).then_some(last);
            let told = Logprobs { chosen: -0.5, top: vec![(*id, -0.5)] };
            for piece in turn.push(*id, Some(&told), finish) {
                match piece {
                    Piece::Reasoning(text) => {
                        assert!(!text.is_empty());
                        whole.reasoning += &text;
                    }
                    Piece::Content(text, tokens) => {
                        assert!(!text.is_empty() || !tokens.is_empty());
                        whole.content += &text;
                        whole.tokens.extend(tokens.into_iter().map(|t| t.bytes));
                    }
                }
            }
        }
        whole.ended = turn.ended();
        whole
    }

    fn run(inside: bool, stops: &[&str], parts: &[&[u32]], last: Finish) -> Whole {
        fold(&mut turn(inside, stops), &parts.concat(), last)
    }

    #[test]
    fn markers_part_reasoning_from_content_by_id() {
        for kind in [3, 4] {
            let tokenizer = tokenizer(kind);
            let markers = Markers::of(&tokenizer);
            let options = TurnOptions { markers, inside: true, ..TurnOptions::default() };
            let all = [&ids("why"), &[END_THINK][..], &ids("</think> so"), &[USER]].concat();
            let whole = fold(&mut Turn::new(tokenizer, options), &all, Finish::Stop);
            assert_eq!(
                (whole.reasoning.as_str(), whole.content.as_str()),
                ("why", "</think> so"),
                "the words are text"
            );
        }
        let opened =
            run(false, &[], &[&[THINK], &ids("a"), &[END_THINK], &ids("b"), &[THINK], &ids("c")], Finish::Length);
        assert_eq!((opened.reasoning.as_str(), opened.content.as_str()), ("a", "bc"), "opened once, before text");
        assert_eq!(opened.ended, Some(Ended::Length));
    }

    #[test]
    fn where_an_answer_begins_is_read_from_the_prompt() {
        let markers = Markers::of(&tokenizer(3));
        let inside = |prompt: &[u32]| markers.begins_inside(prompt);
        assert!(inside(&[USER, 97, ASSISTANT, THINK]) && !inside(&[USER, 97, ASSISTANT, THINK, END_THINK]));
        assert!(!inside(&[ASSISTANT, THINK, USER, ASSISTANT]), "an earlier turn's marker is none of this one's");
        assert!(!inside(&[97]) && inside(&[THINK]));
    }

    #[test]
    fn an_answer_that_stays_inside_reasoning_is_not_lost() {
        let whole = run(true, &["lost"], &[&ids("not lost"), &[USER]], Finish::Stop);
        assert_eq!((whole.reasoning.as_str(), whole.content.as_str()), ("not lost", "not lost"));
        let cut = run(true, &[], &[&ids("not d")], Finish::Length);
        assert_eq!((cut.content.as_str(), cut.ended), ("", Some(Ended::Length)), "a cut one has no answer");
    }

    #[test]
    fn stop_strings_act_on_content_only_and_are_cut_at_the_token() {
        let whole = run(true, &["END", "."], &[&ids("a.END"), &[END_THINK], &ids("bEN cEND d")], Finish::Length);
        assert_eq!((whole.reasoning.as_str(), whole.content.as_str()), ("a.END", "bEN c"));
        assert_eq!(whole.ended, Some(Ended::Stop));
        let mut turn = turn(false, &["END"]);
        turn.options.keep_stop = true;
        assert_eq!(fold(&mut turn, &ids("aENDb"), Finish::Length).content, "aEND");
        assert_eq!(turn.spent(), Spent { completion: 4, reasoning: 0 }, "nothing is taken behind the end");
        let held = run(false, &["END"], &[&ids("aEN")], Finish::Length);
        assert_eq!(held.content, "aEN", "what was held back comes at the end");
    }

    #[test]
    fn each_token_of_the_content_is_told_once_with_its_bytes() {
        let whole = run(false, &[], &[&ids("a"), &[SMI, LE], &ids("b"), &[USER]], Finish::Stop);
        assert_eq!(whole.content, "a🙂b");
        assert_eq!(whole.tokens, [&b"a"[..], &[0xf0, 0x9f], &[0x99, 0x82], b"b"]);
        let cut = run(false, &["bc"], &[&ids("abcd")], Finish::Length);
        assert_eq!((cut.content.as_str(), cut.tokens), ("a", vec![b"a".to_vec()]));
        let half = run(false, &[], &[&ids("a"), &[SMI]], Finish::Length);
        assert_eq!((half.content.as_str(), half.tokens.len()), ("a\u{fffd}", 2));
        assert_eq!(run(true, &[], &[&ids("ab"), &[USER]], Finish::Stop).tokens.len(), 0, "none of reasoning");
    }

    #[test]
    fn what_fails_ends_without_its_token() {
        let whole = run(false, &[], &[&ids("ab"), &[0]], Finish::Failed);
        assert_eq!((whole.content.as_str(), whole.ended), ("ab", Some(Ended::Failed)));
    }

    proptest! {
        /// The pieces joined are the whole text, cut where a stop string is whole for the first time.
        #[test]
        fn pieces_joined_are_the_whole(
            all in proptest::collection::vec(prop_oneof![97u32..100, 97u32..100, SMI..=LE, Just(END_THINK)], 1..40),
            inside in any::<bool>(),
            stops in proptest::collection::vec("[abc]{1,3}", 0..3),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let mut turn = turn(inside, &stops);
            let decode = |ids: &[u32]| turn.tokenizer.decode(ids, true);
            let close = all.iter().position(|id| *id == END_THINK).filter(|_| inside);
            let split = close.unwrap_or(if inside { all.len() } else { 0 });
            let (reasoning, content) = (decode(&all[..split]), decode(&all[split..]));
            let ends = |stop: &&str| content.find(stop).map(|at| (at + stop.len(), at));
            let cut = stops.iter().filter_map(ends).min().map(|(end, _)| {
                // All that are whole there; the one that begins first cuts.
                stops.iter().filter_map(ends).filter(|(e, _)| *e == end).map(|(_, at)| at).min().unwrap_or(end)
            });
            let whole = fold(&mut turn, &all, Finish::Length);
            prop_assert_eq!(&whole.reasoning, &reasoning);
            prop_assert_eq!(&whole.content, &content[..cut.unwrap_or(content.len())]);
            prop_assert_eq!(whole.ended, Some(if cut.is_some() { Ended::Stop } else { Ended::Length }));
        }
    }
}
