//! Facts about a tokenizer, for the tokenizer stage of `verify`. Each is exact: it holds or it does not, and its detail says
//! what was looked at, so that a reader can judge without trusting the verdict.

use std::collections::BTreeSet;

use regex::Regex;
use serde::Serialize;
use serde_json::Map;

use super::bpe::{Kind, Tokenizer};
use super::error::TokenizeError;
use super::hf::JsonTokenizer;
use super::spec::TokenizerSpec;
use super::stop::StopSource;
use super::template::ChatMessage;

/// Of so many ordinary tokens one may fail to be made by the merges, as tokens do that were put into a vocabulary by hand:
/// text that is that token as a whole still becomes it.
const FEW: usize = 100;

/// Texts on which tokenizers have been seen to disagree: scripts, digits, contractions, white space, line ends, joined
/// emoji, composed and decomposed characters, literals of control tokens, code.
pub const PROBE: [&str; 49] = [
    "",
    "a",
    " ",
    "  ",
    "   x",
    "x   ",
    "\n",
    "\n\n",
    " \n ",
    "\r\n",
    "a\r\n\r\n  b\n\n\n c",
    "\t\tif a:\n\t\t\treturn 1",
    "\u{a0}a\u{2003}\u{2003}b\u{3000}c",
    "Hello, world!",
    "foo  bar   baz    ",
    "It's what they'd've said, I'll say we're I'm don't",
    "IT'S WHAT THEY'D'VE SAID, I'LL SAY WE'RE I'M DON'T",
    "'S 'T 'Re 'vE 'x '",
    // With letters after it a contraction is cut off; a rule for lower case only leaves the word whole.
    "'True 'Self 'The 'Made 'Return O'Donnell 'Set 'Module 'LLama 'Version",
    "1",
    "12 123 1234 12345 1234567890",
    "x=3.14159e-10;y[12]=0xdeadBEEF",
    "１２３４ ٣٤٥٦ ४५६ Ⅷ ½ ²",
    "你好，世界！这是一个测试。",
    "繁體中文測試 2024年1月15日",
    "こんにちは、カタカナ",
    "안녕하세요 세계",
    "Привет, мир! Ёлка",
    "Ελληνικά και ΑΛΦΑ",
    "مرحبا بالعالم ﷽",
    "שלום עולם",
    "नमस्ते दुनिया क्षि",
    "สวัสดีชาวโลก",
    "naïve café Zażółć gęślą jaźń",
    "e\u{301} a\u{300}\u{323} \u{1e69} s\u{323}\u{307}",
    "ǅ İstanbul ß ẞ ﬁ ſ",
    "🙂🚀",
    "👩\u{200d}👩\u{200d}👧 👩🏽\u{200d}🚀 🏳\u{fe0f}\u{200d}🌈 🇩🇪",
    "\u{200b}\u{feff}zero\u{ad}width",
    "\u{0}\u{1}\u{7f}\u{85}",
    "...!!!???---___***",
    "a_b-c.d/e\\f|g&h~i`j^k",
    "fn main() { println!(\"{}\", x[0]); }  // done\n",
    "{\"a\": [1, 2.5, null], \"b\": \"\\u00e9\"}",
    "https://example.org/a?b=c&d=%20#e",
    "[gMASK]<sop><|system|><|user|>hi<|assistant|><think></think><|observation|><|endoftext|>",
    "<|user|> spelled <|us er|> <| user |> <|userx|>",
    "/nothink <tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>",
    "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
];

/// How a fact turned out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    /// There is nothing that it could be asked of, for the reason given.
    NotApplicable,
    /// It holds.
    Holds,
    /// It does not, and there are sound files of which that is true.
    Doubtful,
    /// This build lacks what it takes to tell.
    Unmeasured,
    /// It does not.
    Fails,
}

/// One fact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was checked.
    pub name: &'static str,
    /// How it turned out.
    pub finding: Finding,
    /// The evidence.
    pub detail: String,
}

/// What was found: evidence that a fact holds, or how and why it does not.
pub(super) type Fact = Result<String, Problem>;

/// How a fact fails, and the evidence.
pub(super) struct Problem(pub(super) Finding, pub(super) String);

impl From<String> for Problem {
    fn from(detail: String) -> Self {
        Problem(Finding::Fails, detail)
    }
}

impl From<TokenizeError> for Problem {
    fn from(error: TokenizeError) -> Self {
        let finding = match &error {
            TokenizeError::TemplateAbsent => Finding::NotApplicable,
            error if error.is_lack() => Finding::Unmeasured,
            _ => Finding::Fails,
        };
        Problem(finding, error.to_string())
    }
}

fn fact(holds: bool, detail: String) -> Fact {
    if holds { Ok(detail) } else { Err(detail.into()) }
}

impl Check {
    /// Whether it holds.
    pub fn holds(&self) -> bool {
        self.finding == Finding::Holds
    }

    fn of((name, fact): (&'static str, Fact)) -> Self {
        match fact {
            Ok(detail) => Check { name, finding: Finding::Holds, detail },
            Err(Problem(finding, detail)) => Check { name, finding, detail },
        }
    }
}

impl TokenizerSpec {
    /// All facts about this description: [`Tokenizer::checks`] where a tokenizer can be built, otherwise the one fact
    /// that it cannot, and why. `vocab_rows` are the rows of the embedding.
    pub fn checks(&self, vocab_rows: Option<usize>, other: Option<&JsonTokenizer>) -> Vec<Check> {
        match Tokenizer::new(self) {
            Ok(tokenizer) => tokenizer.checks(self, vocab_rows, other),
            Err(error) => vec![Check::of(("built", Err(error.into())))],
        }
    }
}

impl Tokenizer {
    /// All facts about this tokenizer, which was built from `spec`. `vocab_rows` are the rows of the embedding, `other`
    /// is the tokenizer.json to compare with.
    pub fn checks(&self, spec: &TokenizerSpec, vocab_rows: Option<usize>, other: Option<&JsonTokenizer>) -> Vec<Check> {
        let prompt = self.probe_prompt();
        let mut facts = vec![
            ("built", Ok(built(spec))),
            ("vocabulary", self.vocabulary(vocab_rows)),
            ("chat template", template(&prompt, spec)),
            ("template text", renders(&prompt).and_then(|()| self.template_text())),
            ("template literals", self.template_literals(spec, prompt.as_deref().unwrap_or_default())),
            ("generation prompt", renders(&prompt).and_then(|()| self.generation_prompt())),
            ("stop ids", self.stops_are_control(spec)),
            ("bos", self.bos(spec, prompt.as_deref().ok())),
            ("merges", self.merges(spec)),
            ("round trip", self.round_trip()),
        ];
        if let Some(other) = other {
            facts.push(("tokens equal tokenizer.json's", same_tokens(spec, other)));
            facts.push(("ids equal tokenizer.json's", self.same_ids(other)));
        }
        facts.into_iter().map(Check::of).collect()
    }

    /// A conversation as the template renders it.
    fn probe_prompt(&self) -> Result<String, TokenizeError> {
        let turns = [("user", "Who?"), ("assistant", "I."), ("user", "Why?")];
        let turns: Vec<ChatMessage> = turns.into_iter().map(|(role, text)| ChatMessage::new(role, text)).collect();
        self.render_chat(&turns, true, &Map::new())
    }

    /// The template opens the assistant's turn where it is asked to, or else the model goes on with the user's.
    fn generation_prompt(&self) -> Fact {
        let turn = [ChatMessage::new("user", "Why?")];
        let render = |open| self.render_chat(&turn, open, &Map::new());
        let open = render(true)?;
        let closed = match render(false) {
            Ok(closed) => closed,
            Err(error) if error.is_lack() => return Err(error.into()),
            Err(error) => {
                let detail = format!(
                    "GENERATION_PROMPT: the template refuses a turn without add_generation_prompt, so nothing tells what \
                     opens the assistant's: {error}"
                );
                return Err(Problem(Finding::Doubtful, detail));
            }
        };
        if open == closed {
            let detail = format!(
                "GENERATION_PROMPT: the template renders {open:?} with add_generation_prompt and without, so nothing opens \
                 the assistant's turn; expected a prompt that ends with its marker"
            );
            return Err(Problem(Finding::Doubtful, detail));
        }
        let same = open.bytes().zip(closed.bytes()).take_while(|(a, b)| a == b).count();
        Ok(format!("adds {:?}", String::from_utf8_lossy(&open.as_bytes()[same..])))
    }

    /// What ends a turn must be no part of what a turn can say.
    fn stops_are_control(&self, spec: &TokenizerSpec) -> Fact {
        let stops = self.stop_ids();
        fact(!stops.ids.is_empty(), stops.to_string())?;
        let mut bad = Vec::new();
        for stop in &stops.ids {
            let kind = match self.kind(stop.id) {
                Some(Kind::Ordinary) => "an ordinary token",
                Some(Kind::Unused) => "an unused token",
                Some(Kind::Control | Kind::UserDefined) | None => continue,
            };
            let ty = usize::try_from(stop.id).ok().and_then(|i| spec.types.get(i)).copied().unwrap_or_default();
            let keys: Vec<&str> = stop.sources.iter().map(StopSource::key).collect();
            bad.push(format!("{} is {} {:?}, {kind} (type {ty})", keys.join(" and "), stop.id, stop.literal));
        }
        let detail =
            format!("STOP_TYPE: {}; what ends a turn must be a control or user-defined token: {stops}", bad.join("; "));
        if bad.is_empty() { Ok(stops.to_string()) } else { Err(detail.into()) }
    }

    /// Every ordinary token is what the merges make of its own characters: in a trained vocabulary each was made by one.
    fn merges(&self, spec: &TokenizerSpec) -> Fact {
        let made: BTreeSet<String> = spec.merges.iter().map(|m| m.replacen(' ', "", 1)).collect();
        let (mut ordinary, mut unreachable, mut bad) = (0usize, 0usize, Vec::new());
        let merged = self.by_merges_alone();
        for (id, token) in (0u32..).zip(&spec.tokens).filter(|(id, _)| self.kind(*id) == Some(Kind::Ordinary)) {
            ordinary += 1;
            let ids = merged(token)?;
            if ids != [id] {
                unreachable += usize::from(!made.contains(token));
                bad.push((id, token, ids));
            }
        }
        let Some((id, token, ids)) = bad.first() else {
            return Ok(format!("{ordinary} ordinary tokens, each what its own text is merged to"));
        };
        let lost = match unreachable {
            0 => String::new(),
            n => format!("; {n} can never be reached, since no merge makes them"),
        };
        let detail = format!(
            "MERGES: {} of {ordinary} ordinary tokens are not what their own text encodes to by the merges{lost}. The first \
             is id {id} {token:?}, which becomes {ids:?}. The {} merges are not this vocabulary's, in another order, or \
             incomplete: convert the model again",
            bad.len(),
            spec.merges.len()
        );
        let finding = if bad.len() * FEW > ordinary { Finding::Fails } else { Finding::Doubtful };
        Err(Problem(finding, detail))
    }

    fn vocabulary(&self, vocab_rows: Option<usize>) -> Fact {
        let tokens = self.len();
        let Some(rows) = vocab_rows else { return Ok(format!("{tokens} tokens; rows of the embedding not known")) };
        let detail = format!("{tokens} tokens, {rows} rows in the embedding");
        match rows.checked_sub(tokens) {
            Some(padding @ 1..) => Ok(format!("{detail}: {padding} padding rows")),
            exact => fact(exact.is_some(), detail),
        }
    }

    /// Every marker in the template's source and in a rendered prompt is one id of a control or user-defined token.
    fn template_literals(&self, spec: &TokenizerSpec, prompt: &str) -> Fact {
        let source = spec.chat_template.as_deref().ok_or(TokenizeError::TemplateAbsent)?;
        // The second and third kinds are often plain text or Jinja, too.
        let marker = Regex::new(r"<\|[^<>|\s{}']+\|>|</?[A-Za-z_]+>|\[[A-Za-z_]+\]").map_err(|e| e.to_string())?;
        let markers: BTreeSet<&str> =
            [source, prompt].into_iter().flat_map(|text| marker.find_iter(text)).map(|m| m.as_str()).collect();
        let found = |literal: &&str| source.contains(*literal) || prompt.contains(*literal);
        let registered: BTreeSet<&str> = self.literals().filter(found).collect();
        let is_one =
            |l: &str| self.encode(l, true).is_ok_and(|ids| ids.len() == 1 && self.literal_id(l) == Some(ids[0]));
        let mut bad: Vec<String> = registered.iter().filter(|l| !is_one(l)).map(|l| format!("{l} is cut")).collect();
        for marker in markers.difference(&registered) {
            let pieces = self.encode(marker, true).map_or(0, |ids| ids.len());
            match spec.tokens.iter().position(|t| t == marker) {
                // A token that no merge makes is no ordinary one, whatever its type says.
                Some(id) if !spec.merges.iter().any(|m| is_merge_of(m, marker)) => {
                    let kind = spec.types.get(id).copied().unwrap_or_default();
                    bad.push(format!("{marker} is token {id} but of type {kind}, so it becomes {pieces} ids"));
                }
                None if marker.starts_with("<|") => bad.push(format!("{marker} is no token and becomes {pieces} ids")),
                _ => {}
            }
        }
        match bad.as_slice() {
            [] => Ok(format!("{} in the template, one id each", registered.len())),
            bad => Err(bad.join("; ").into()),
        }
    }

    /// A chat prompt begins with exactly one BOS, or with none where the file says so.
    fn bos(&self, spec: &TokenizerSpec, prompt: Option<&str>) -> Fact {
        let none = |why: &str| Err(Problem(Finding::NotApplicable, why.into()));
        let Some(bos) = spec.bos else { return none("the file names none, none is added") };
        if prompt.is_none() && self.tokenizer_bos().is_none() {
            return none("no chat prompt to look at, and the tokenizer adds none");
        }
        let leading = |ids: Result<Vec<u32>, TokenizeError>| match ids {
            Ok(ids) => Ok(ids.iter().take_while(|id| **id == bos).count()),
            Err(error) => Err(Problem::from(error)),
        };
        let text = prompt.unwrap_or_default();
        let (by_template, served) = (leading(self.encode(text, true))?, leading(self.prompt_ids(text))?);
        let by_tokenizer = usize::from(self.tokenizer_bos().is_some());
        let both = by_template + by_tokenizer;
        let ok = served == 1 || (served == 0 && spec.add_bos == Some(false));
        let detail =
            format!("template adds {by_template}, tokenizer adds {by_tokenizer} -> {both} at the start; fed: {served}");
        if ok && both > 1 {
            let advice = "engines that add both feed the model a prompt that begins as none did in training";
            let detail = format!("BOS_TWICE: {detail}; {advice}. Leave out add_bos_token, or the template's own");
            return Err(Problem(Finding::Doubtful, detail));
        }
        if !ok {
            let token = spec.tokens.get(bos as usize).map_or_else(String::new, |t| format!(" {t:?}"));
            let detail = format!(
                "BOS: bos_token_id is {bos}{token}, and a prompt begins with it {served} times ({detail}): expected once, \
                 or add_bos_token = false"
            );
            return Err(detail.into());
        }
        Ok(detail)
    }

    /// Every probe text comes back from its ids.
    fn round_trip(&self) -> Fact {
        for text in PROBE {
            let ids = self.encode(text, true).map_err(|error| format!("{text:?}: {error}"))?;
            let back = self.decode(&ids, false);
            fact(back == text, format!("{text:?} comes back as {back:?}"))?;
        }
        Ok(format!("{} texts", PROBE.len()))
    }

    /// Every probe text has the same ids on both sides.
    fn same_ids(&self, other: &JsonTokenizer) -> Fact {
        for text in PROBE {
            let problem = |error: TokenizeError| Problem::from(format!("{text:?}: {error}"));
            let (ours, theirs) = (self.encode(text, true).map_err(problem)?, other.encode(text).map_err(problem)?);
            fact(ours == theirs, format!("first difference at {text:?}: {ours:?} here, {theirs:?} by tokenizer.json"))?;
        }
        Ok(format!("{} texts", PROBE.len()))
    }
}

fn same_tokens(spec: &TokenizerSpec, other: &JsonTokenizer) -> Fact {
    // Converters fill ids without a token with unused ones, so those may be absent on the other side.
    let unused = |id: usize| spec.types.get(id) == Some(&5);
    for ((at, id), token) in (0usize..).zip(0u32..).zip(&spec.tokens) {
        match other.token(id) {
            Some(theirs) if theirs == *token => {}
            None if unused(at) => {}
            theirs => {
                let theirs = theirs.map_or("no token".into(), |theirs| format!("{theirs:?}"));
                return Err(format!("id {id}: {token:?} here, {theirs} in tokenizer.json").into());
            }
        }
    }
    let (here, there) = (spec.tokens.len(), other.len());
    fact(there <= here, format!("{here} here, {there} in tokenizer.json"))
}

/// What building the tokenizer has established.
fn built(spec: &TokenizerSpec) -> String {
    let count = |wanted: &[i32]| spec.types.iter().filter(|t| wanted.contains(t)).count();
    format!(
        "{}, pre-tokenizer {}, {} control and {} user-defined tokens, {} merges all resolved",
        spec.model,
        spec.pre.as_deref().unwrap_or_default(),
        count(&[2, 3]),
        count(&[4]),
        spec.merges.len()
    )
}

/// What is asked of a prompt needs one; that there is none is told once, by the check of the template itself.
fn renders(prompt: &Result<String, TokenizeError>) -> Result<(), Problem> {
    match prompt {
        Ok(_) => Ok(()),
        Err(error @ TokenizeError::TemplateAbsent) => Err(error.clone().into()),
        Err(_) => Err(Problem(Finding::NotApplicable, "the chat template does not render".into())),
    }
}

/// The chat template renders; and what others there are.
fn template(prompt: &Result<String, TokenizeError>, spec: &TokenizerSpec) -> Fact {
    let detail = match prompt {
        Ok(prompt) => format!("renders: {prompt:?}"),
        Err(error) => return Err(error.clone().into()),
    };
    let names = |rival: bool| -> Vec<&str> {
        spec.other_templates.iter().filter(|t| t.is_rival == rival).map(|t| t.name.as_str()).collect()
    };
    if !names(true).is_empty() {
        let detail = format!(
            "TEMPLATES: {} has another chat_template than the file of its own that is taken, as transformers takes it; \
             engines that look there first ask the model otherwise. Leave one of them out",
            names(true).join(" and ")
        );
        return Err(Problem(Finding::Doubtful, detail));
    }
    match names(false).as_slice() {
        [] => Ok(detail),
        named => Ok(format!("{detail}; beside it, and not used here: {}", named.join(", "))),
    }
}

/// Whether `merge` ("left right") makes `token`.
fn is_merge_of(merge: &str, token: &str) -> bool {
    merge.split_once(' ').is_some_and(|(left, right)| token.strip_prefix(left) == Some(right))
}
