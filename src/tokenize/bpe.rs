//! The tokenizer itself: literals of control tokens first, then the pre-tokenizer, then byte-level BPE.
//!
//! Control tokens are kept out of the BPE vocabulary. BPE takes a piece that is a token as it is (`ignore_merges`), so
//! a control token such as `/nothink` inside it would be reachable from ordinary text even where the caller asked
//! that no control token be parsed.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use regex::Regex;
use tokenizers::Model;
use tokenizers::models::bpe::{BPE, Vocab};

use super::alphabet;
use super::error::{TokenizeError, clip};
use super::pretok::PreTokenizer;
use super::spec::TokenizerSpec;
use super::stop::StopIds;
use super::stream::StreamDecoder;
use super::template::{ChatMessage, ChatTemplate};

/// What an id is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Made by BPE from text.
    Ordinary,
    /// A literal that is one token wherever it stands in a text, and is part of the content.
    UserDefined,
    /// A literal that steers the model; matched on request, never part of the content.
    Control,
    /// A place holder: never made from text, never part of the content.
    Unused,
}

/// The bytes and the use of every id; shared with the stream decoders.
#[derive(Debug)]
pub(super) struct Pieces {
    bytes: Vec<Box<[u8]>>,
    kinds: Vec<Kind>,
    /// Ids that stop generation; never part of the content, whatever their type.
    stops: Vec<u32>,
}

impl Pieces {
    /// Bytes of `id`, or `None` for an id outside the vocabulary.
    fn bytes(&self, id: u32) -> Option<&[u8]> {
        self.bytes.get(usize::try_from(id).ok()?).map(|b| &**b)
    }

    /// Whether `id` is kept out of the content: control and unused tokens, stop ids, ids without a token.
    fn is_special(&self, id: u32) -> bool {
        let kind = usize::try_from(id).ok().and_then(|i| self.kinds.get(i));
        !matches!(kind, Some(Kind::Ordinary | Kind::UserDefined)) || self.stops.contains(&id)
    }

    /// Bytes that `id` adds to the content: none for a special id.
    pub(super) fn content(&self, id: u32) -> &[u8] {
        if self.is_special(id) { &[] } else { self.bytes(id).unwrap_or_default() }
    }
}

/// A byte-level BPE tokenizer, built from what a model file states.
#[derive(Debug)]
pub struct Tokenizer {
    bpe: BPE,
    pre: PreTokenizer,
    pieces: Arc<Pieces>,
    /// Id of every control and user-defined literal.
    literals: HashMap<String, u32>,
    /// The characters with which they begin.
    first_of_literals: HashSet<char>,
    /// Matches the longest control or user-defined literal; `None` where there are none.
    all_literals: Option<Regex>,
    /// The same for user-defined literals only.
    user_literals: Option<Regex>,
    bos: Option<u32>,
    add_bos: bool,
    stop: StopIds,
    template: Result<ChatTemplate, TokenizeError>,
}

impl Tokenizer {
    /// Builds a tokenizer. Errors: every inconsistency of `spec` that [`TokenizeError`] names. A chat template that
    /// does not parse is no error here, but of [`Self::render_chat`]: plain completion does not need it.
    pub fn new(spec: &TokenizerSpec) -> Result<Self, TokenizeError> {
        if spec.model != "gpt2" {
            let unknown = || TokenizeError::UnsupportedModel { found: clip(&spec.model) };
            return Err(TokenizeError::of_model(&spec.model).unwrap_or_else(unknown));
        }
        let pre = PreTokenizer::new(spec.pre.as_deref())?;
        let kinds = kinds(spec)?;
        let bytes = token_bytes(spec, &kinds)?;
        check_ids(spec)?;

        let mut vocab = Vocab::default();
        let mut literals = HashMap::new();
        let mut user_defined = Vec::new();
        for ((id, token), kind) in (0u32..).zip(&spec.tokens).zip(&kinds) {
            match kind {
                Kind::Ordinary => drop(vocab.insert(token.clone(), id)),
                Kind::Control => drop(literals.insert(token.clone(), id)),
                Kind::UserDefined => {
                    literals.insert(token.clone(), id);
                    user_defined.push(token.as_str());
                }
                Kind::Unused => {}
            }
        }
        // C0, C1 and F5 to FF never occur in UTF-8.
        let missing: Vec<u8> = (0..=0xf4u8)
            .filter(|b| !matches!(b, 0xc0 | 0xc1))
            .filter(|&b| !vocab.contains_key(alphabet::char_of(b).encode_utf8(&mut [0; 4]) as &str))
            .collect();
        if let Some(&first) = missing.first() {
            return Err(TokenizeError::MissingBytes { count: missing.len(), first });
        }
        let merges = merges(spec, &vocab)?;
        let all_literals = longest_of(literals.keys().map(String::as_str).collect())?;
        let user_literals = longest_of(user_defined)?;
        let bpe = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(true).build();
        let bpe = bpe.map_err(|e| TokenizeError::Library { what: "building BPE", message: e.to_string() })?;

        let first_of_literals = literals.keys().filter_map(|literal| literal.chars().next()).collect();
        let stop = StopIds::collect(spec);
        let stops = stop.ids.iter().map(|s| s.id).collect();
        Ok(Self {
            bpe,
            pre,
            pieces: Arc::new(Pieces { bytes, kinds, stops }),
            literals,
            first_of_literals,
            all_literals,
            user_literals,
            bos: spec.bos,
            add_bos: spec.add_bos.unwrap_or(false),
            stop,
            template: ChatTemplate::new(spec),
        })
    }

    /// Number of ids.
    pub fn len(&self) -> usize {
        self.pieces.bytes.len()
    }

    /// Never true: a tokenizer without tokens is refused.
    pub fn is_empty(&self) -> bool {
        self.pieces.bytes.is_empty()
    }

    /// Ids of `text`, without a BOS. With `parse_special` the literals of control tokens become their ids, without it
    /// they are text like any other; user-defined literals are tokens either way.
    pub fn encode(&self, text: &str, parse_special: bool) -> Result<Vec<u32>, TokenizeError> {
        let mut ids = Vec::new();
        let mut at = 0;
        let literals = if parse_special { &self.all_literals } else { &self.user_literals };
        if let Some(literals) = literals {
            for found in literals.find_iter(text) {
                self.encode_plain(&text[at..found.start()], &mut ids)?;
                ids.extend(self.literals.get(found.as_str()));
                at = found.end();
            }
        }
        self.encode_plain(&text[at..], &mut ids)?;
        Ok(ids)
    }

    /// Appends the ids of a text that holds no literal.
    fn encode_plain(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), TokenizeError> {
        for piece in self.pre.split(text) {
            let tokens = self.bpe.tokenize(&alphabet::to_alphabet(&text[piece]));
            let tokens = tokens.map_err(|e| TokenizeError::Library { what: "encoding", message: e.to_string() })?;
            ids.extend(tokens.into_iter().map(|t| t.id));
        }
        Ok(())
    }

    /// Ids to feed for a whole prompt: [`Self::encode`] with control literals parsed, and one BOS first where the file
    /// asks for it (`add_bos_token`) and the text does not begin with it already.
    pub fn prompt_ids(&self, text: &str) -> Result<Vec<u32>, TokenizeError> {
        let mut ids = self.encode(text, true)?;
        self.put_bos(&mut ids);
        Ok(ids)
    }

    /// The same for a text without literals: what looks like one is text.
    pub fn plain_ids(&self, text: &str) -> Result<Vec<u32>, TokenizeError> {
        let mut ids = Vec::new();
        self.encode_plain(text, &mut ids)?;
        self.put_bos(&mut ids);
        Ok(ids)
    }

    fn put_bos(&self, ids: &mut Vec<u32>) {
        if let Some(bos) = self.tokenizer_bos()
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
    }

    /// A text in which a mark stands behind the first character of every literal but those of `kept`, so that none is
    /// found in it, nor one that its end begins. For texts that must not steer the model: see [`Self::marked_ids`].
    pub fn break_literals(&self, text: &str, mark: char, kept: &[&str]) -> String {
        let mut broken = String::with_capacity(text.len());
        for (at, c) in text.char_indices() {
            broken.push(c);
            let rest = &text[at..];
            let begins = |literal: &str| rest.starts_with(literal) || literal.starts_with(rest);
            if self.first_of_literals.contains(&c) && self.literals().any(|l| begins(l) && !kept.contains(&l)) {
                broken.push(mark);
            }
        }
        broken
    }

    /// Ids to feed for a prompt with texts that [`Self::break_literals`] has marked: as [`Self::prompt_ids`], but what a
    /// mark has broken is encoded as text, be it the literal of a user-defined token, and the marks are left out.
    pub fn marked_ids(&self, prompt: &str, mark: char) -> Result<Vec<u32>, TokenizeError> {
        let mut ids = Vec::new();
        let mut at = 0;
        let plain = |text: &str, ids: &mut Vec<u32>| self.encode_plain(&text.replace(mark, ""), ids);
        // A literal of one character is not broken by what stands behind it.
        let is_whole = |end: usize| !prompt[end..].starts_with(mark);
        let found = self.all_literals.iter().flat_map(|literals| literals.find_iter(prompt));
        for found in found.filter(|found| is_whole(found.end())) {
            plain(&prompt[at..found.start()], &mut ids)?;
            ids.extend(self.literals.get(found.as_str()));
            at = found.end();
        }
        plain(&prompt[at..], &mut ids)?;
        self.put_bos(&mut ids);
        Ok(ids)
    }

    /// The BOS that the tokenizer itself is to put first, if any.
    pub(super) fn tokenizer_bos(&self) -> Option<u32> {
        self.bos.filter(|_| self.add_bos)
    }

    /// Text of `ids`; with `skip_special` without the ids of [`Self::is_special`]. Bytes that are not UTF-8 become
    /// U+FFFD; an id outside the vocabulary (a padding row) has no text.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::new();
        for &id in ids {
            bytes.extend_from_slice(if skip_special {
                self.pieces.content(id)
            } else {
                self.pieces.bytes(id).unwrap_or_default()
            });
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// A decoder for one stream of ids.
    pub fn stream(&self) -> StreamDecoder {
        StreamDecoder::new(Arc::clone(&self.pieces))
    }

    /// Raw bytes of an ordinary token, the literal of any other; `None` for an id outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.pieces.bytes(id)
    }

    /// Bytes of the longest token.
    pub fn longest(&self) -> usize {
        self.pieces.bytes.iter().map(|bytes| bytes.len()).max().unwrap_or(0)
    }

    /// Id of a control or user-defined literal.
    pub fn literal_id(&self, literal: &str) -> Option<u32> {
        self.literals.get(literal).copied()
    }

    /// All control and user-defined literals, in no particular order.
    pub(super) fn literals(&self) -> impl Iterator<Item = &str> {
        self.literals.keys().map(String::as_str)
    }

    /// Whether `id` is kept out of the content: control and unused tokens, stop ids, ids outside the vocabulary.
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.is_special(id)
    }

    /// What `id` is good for; `None` for an id outside the vocabulary.
    pub(super) fn kind(&self, id: u32) -> Option<Kind> {
        self.pieces.kinds.get(usize::try_from(id).ok()?).copied()
    }

    /// What the merges make of a text in the byte-level alphabet, whether it is a token as a whole or not.
    pub(super) fn by_merges_alone(&self) -> impl Fn(&str) -> Result<Vec<u32>, TokenizeError> {
        let mut bpe = self.bpe.clone();
        bpe.ignore_merges = false;
        move |text| {
            let tokens = bpe.tokenize(text);
            let tokens = tokens.map_err(|e| TokenizeError::Library { what: "encoding", message: e.to_string() })?;
            Ok(tokens.into_iter().map(|t| t.id).collect())
        }
    }

    /// The ids that end a turn: the union of everything the file states.
    pub fn stop_ids(&self) -> &StopIds {
        &self.stop
    }

    /// The prompt of a conversation. `extra` holds further template variables (`tools`, `enable_thinking`, ...).
    /// Errors: no template, or what the template says is wrong, with its line.
    pub fn render_chat(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        extra: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<String, TokenizeError> {
        self.template.as_ref().map_err(Clone::clone)?.render(messages, add_generation_prompt, extra)
    }

    /// Ids to feed for a conversation: [`Self::render_chat`], then [`Self::prompt_ids`], so exactly one BOS stands
    /// first even where template and tokenizer both would add it.
    pub fn chat_ids(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        extra: &serde_json::Map<String, serde_json::Value>,
    ) -> Result<Vec<u32>, TokenizeError> {
        self.prompt_ids(&self.render_chat(messages, add_generation_prompt, extra)?)
    }
}

/// The use of every id. Errors: wrong array length, a type that does not exist here.
fn kinds(spec: &TokenizerSpec) -> Result<Vec<Kind>, TokenizeError> {
    let (tokens, max) = (spec.tokens.len(), i32::MAX as usize);
    if !(1..=max).contains(&tokens) {
        return Err(TokenizeError::TokenCount { found: tokens, max });
    }
    if spec.types.len() != tokens {
        return Err(TokenizeError::Length {
            name: "tokenizer.ggml.token_type",
            expected: tokens,
            found: spec.types.len(),
        });
    }
    let kind = |((id, token), &found): ((u32, &String), &i32)| match found {
        // 0 is ggml's "undefined", which it treats as normal.
        0 | 1 => Ok(Kind::Ordinary),
        2 | 3 => Ok(Kind::Control),
        4 => Ok(Kind::UserDefined),
        5 => Ok(Kind::Unused),
        _ => Err(TokenizeError::TokenType { id, literal: clip(token), found }),
    };
    (0u32..).zip(&spec.tokens).zip(&spec.types).map(kind).collect()
}

/// The bytes of every id. Errors: empty and repeated literals, ordinary tokens outside the byte-level alphabet.
fn token_bytes(spec: &TokenizerSpec, kinds: &[Kind]) -> Result<Vec<Box<[u8]>>, TokenizeError> {
    let mut seen: HashMap<&str, u32> = HashMap::new();
    let mut all = Vec::new();
    for ((id, token), kind) in (0u32..).zip(&spec.tokens).zip(kinds) {
        if token.is_empty() {
            return Err(TokenizeError::EmptyToken { id });
        }
        if let Some(first) = seen.insert(token, id) {
            return Err(TokenizeError::DuplicateToken { literal: clip(token), first, second: id });
        }
        all.push(match kind {
            Kind::Ordinary => alphabet::to_bytes(token).map_err(|found| TokenizeError::NotByteLevel {
                id,
                literal: clip(token),
                found,
            })?,
            _ => token.as_bytes().into(),
        });
    }
    Ok(all)
}

/// Errors: a stated id outside the vocabulary; a BOS to be added that is not stated.
fn check_ids(spec: &TokenizerSpec) -> Result<(), TokenizeError> {
    let stated = [
        ("bos_token_id", spec.bos),
        ("eos_token_id", spec.eos),
        ("eot_token_id", spec.eot),
        ("eom_token_id", spec.eom),
        ("unknown_token_id", spec.unk),
        ("padding_token_id", spec.pad),
    ];
    let stated = stated.into_iter().filter_map(|(key, id)| Some((key, id?)));
    let extra = spec.extra_eos.iter().map(|&id| ("eos_token_id of the generation config", id));
    let tokens = spec.tokens.len() as u64;
    for (key, id) in stated.chain(extra) {
        if u64::from(id) >= tokens {
            return Err(TokenizeError::IdOutOfRange { key, id: id.into(), last: tokens.saturating_sub(1) });
        }
    }
    if spec.add_bos == Some(true) && spec.bos.is_none() {
        return Err(TokenizeError::BosUnknown);
    }
    Ok(())
}

/// The merges as pairs. Errors: not two parts, parts or results outside the ordinary vocabulary, repetitions.
fn merges(spec: &TokenizerSpec, vocab: &Vocab) -> Result<Vec<(String, String)>, TokenizeError> {
    let mut seen: HashMap<&str, usize> = HashMap::new();
    let mut pairs = Vec::new();
    let mut joined = String::new();
    for (index, merge) in spec.merges.iter().enumerate() {
        let parts = merge.split_once(' ').filter(|(l, r)| !l.is_empty() && !r.is_empty() && !r.contains(' '));
        let Some((left, right)) = parts else {
            return Err(TokenizeError::MergeForm { index, merge: clip(merge) });
        };
        joined.clear();
        joined.extend([left, right]);
        if let Some(missing) = [left, right, &joined].into_iter().find(|part| !vocab.contains_key(*part)) {
            return Err(TokenizeError::MergeUnknown { index, merge: clip(merge), missing: clip(missing) });
        }
        if let Some(first) = seen.insert(merge, index) {
            return Err(TokenizeError::MergeDuplicate { first, second: index, merge: clip(merge) });
        }
        pairs.push((left.to_owned(), right.to_owned()));
    }
    Ok(pairs)
}

/// A pattern that matches the longest of `literals` at a position, or `None` where there are none.
fn longest_of(mut literals: Vec<&str>) -> Result<Option<Regex>, TokenizeError> {
    if literals.is_empty() {
        return Ok(None);
    }
    // The first alternative that matches wins, so the longest must come first; the rest is for a stable order.
    literals.sort_by_key(|l| (std::cmp::Reverse(l.len()), *l));
    let pattern = literals.iter().map(|l| regex::escape(l)).collect::<Vec<_>>().join("|");
    let regex = Regex::new(&pattern);
    regex.map(Some).map_err(|e| TokenizeError::Library { what: "matching control literals", message: e.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All bytes, then `th`, ` th`, a control token that looks like a word, a nested pair of literals, a user-defined one.
    fn spec() -> TokenizerSpec {
        let mut tokens: Vec<String> = (0..=255).map(|b| alphabet::char_of(b).to_string()).collect();
        tokens.extend(["th", "Ġth", "/stop", "<|a|>", "<|a|>b", "<think>", "[PAD262]"].map(str::to_owned));
        let mut types = vec![1; 258];
        types.extend([3, 3, 3, 4, 5]);
        TokenizerSpec {
            model: "gpt2".into(),
            pre: Some("glm4".into()),
            tokens,
            types,
            merges: vec!["t h".into(), "Ġ th".into()],
            bos: Some(259),
            ..TokenizerSpec::default()
        }
    }

    fn refused(change: impl FnOnce(&mut TokenizerSpec)) -> TokenizeError {
        let mut spec = spec();
        change(&mut spec);
        Tokenizer::new(&spec).unwrap_err()
    }

    #[test]
    fn literals_are_one_id_only_where_they_are_asked_for() {
        let tokenizer = Tokenizer::new(&spec()).unwrap();
        assert_eq!(tokenizer.encode("/stop", true).unwrap(), [258]);
        // As text: one id a byte, although the whole piece is the literal of a control token.
        assert_eq!(tokenizer.encode("/stop", false).unwrap(), b"/stop".map(u32::from));
        // The longest literal wins; user-defined ones are tokens either way; place holders never are.
        assert_eq!(tokenizer.encode("<|a|>b<|a|>c", true).unwrap(), [260, 259, 99]);
        assert_eq!(tokenizer.encode("x<think> th", false).unwrap(), [120, 261, 257]);
        assert_eq!(tokenizer.encode("[PAD262]", true).unwrap(), b"[PAD262]".map(u32::from));
        assert_eq!(tokenizer.decode(&[260, 261, 262, 257, 9999], false), "<|a|>b<think>[PAD262] th");
        assert_eq!(tokenizer.decode(&[260, 261, 262, 257, 9999], true), "<think> th");
        assert_eq!(tokenizer.token_bytes(257), Some(b" th".as_slice()));
        assert_eq!(tokenizer.token_bytes(263), None);
    }

    #[test]
    fn exactly_one_bos() {
        let tokenizer = Tokenizer::new(&TokenizerSpec { add_bos: Some(true), ..spec() }).unwrap();
        assert_eq!(tokenizer.prompt_ids("a").unwrap(), [259, 97]);
        assert_eq!(tokenizer.prompt_ids("<|a|>a").unwrap(), [259, 97]);
        assert_eq!(Tokenizer::new(&spec()).unwrap().prompt_ids("a").unwrap(), [97]);
    }

    #[test]
    fn a_stop_id_is_no_content_whatever_its_type() {
        let tokenizer = Tokenizer::new(&TokenizerSpec { eos: Some(261), ..spec() }).unwrap();
        assert!(tokenizer.is_special(261) && !Tokenizer::new(&spec()).unwrap().is_special(261));
        assert_eq!(tokenizer.decode(&[97, 261], true), "a");
    }

    #[test]
    fn hostile_descriptions_are_refused_by_name() {
        use TokenizeError as E;
        assert!(matches!(refused(|s| s.model = "llama".into()), E::Lacking { .. }));
        assert!(matches!(refused(|s| s.model = "lama".into()), E::UnsupportedModel { .. }));
        assert!(matches!(refused(|s| s.pre = None), E::PreTokenizerAbsent { .. }));
        assert!(matches!(refused(|s| s.pre = Some("x".repeat(1 << 20))), E::PreTokenizerUnknown { .. }));
        assert!(matches!(refused(|s| s.tokens.clear()), E::TokenCount { found: 0, .. }));
        assert!(matches!(refused(|s| s.types.truncate(262)), E::Length { expected: 263, found: 262, .. }));
        assert!(matches!(refused(|s| s.types[3] = 6), E::TokenType { id: 3, found: 6, .. }));
        assert!(matches!(refused(|s| s.types[3] = -1), E::TokenType { id: 3, found: -1, .. }));
        assert!(matches!(refused(|s| s.tokens[258].clear()), E::EmptyToken { id: 258 }));
        assert!(matches!(refused(|s| s.tokens[258] = "th".into()), E::DuplicateToken { first: 256, second: 258, .. }));
        assert!(matches!(refused(|s| s.tokens[257] = " th".into()), E::NotByteLevel { id: 257, found: ' ', .. }));
        assert!(matches!(refused(|s| s.tokens[65] = "AA".into()), E::MissingBytes { count: 1, first: 65 }));
        for form in ["th", "t h e", " th", "t ", ""] {
            assert!(matches!(refused(|s| s.merges[0] = form.into()), E::MergeForm { index: 0, .. }), "{form:?}");
        }
        for (merge, part) in [("你 h", "你"), ("t e", "te"), ("< |a|>", "|a|>")] {
            let error = refused(|s| s.merges[1] = merge.into());
            assert!(matches!(&error, E::MergeUnknown { index: 1, missing, .. } if missing == part), "{error}");
        }
        assert!(matches!(refused(|s| s.merges[1] = "t h".into()), E::MergeDuplicate { first: 0, second: 1, .. }));
        let far = refused(|s| s.extra_eos = vec![263]);
        assert!(matches!(far, E::IdOutOfRange { id: 263, last: 262, .. }), "{far}");
        assert!(matches!(refused(|s| s.pad = Some(u32::MAX)), E::IdOutOfRange { key: "padding_token_id", .. }));
        assert!(matches!(refused(|s| (s.bos, s.add_bos) = (None, Some(true))), E::BosUnknown));
    }
}
