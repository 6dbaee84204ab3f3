//! Every way in which tokenizer data can be refused: one variant per cause, with what was expected and what was found.

use thiserror::Error;

/// Why a tokenizer could not be built, or a text not be encoded or rendered.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum TokenizeError {
    /// `tokenizer.ggml.model` names a tokenizer family that is not byte-level BPE.
    #[error("tokenizer model {found:?} is not supported: expected \"gpt2\" (byte-level BPE)")]
    UnsupportedModel {
        /// The name in the file.
        found: String,
    },
    /// A part of a tokenizer that other programs have and this build does not.
    #[error("{what} {found:?} is known, and this build does not have it; the file may well be right")]
    Lacking {
        /// Which part, by its key.
        what: &'static str,
        /// What the file states, shortened.
        found: String,
    },
    /// `tokenizer.ggml.pre` is absent; guessing a rule would give silently wrong ids.
    #[error("the file names no pre-tokenizer (tokenizer.ggml.pre): expected one of {known}")]
    PreTokenizerAbsent {
        /// The names that are accepted.
        known: String,
    },
    /// `tokenizer.ggml.pre` names a rule that is not implemented.
    #[error("unknown pre-tokenizer {found:?}: the nearest known one is {nearest:?} (known: {known})")]
    PreTokenizerUnknown {
        /// The name in the file, shortened.
        found: String,
        /// The accepted name at the smallest edit distance.
        nearest: String,
        /// The names that are accepted.
        known: String,
    },
    /// A metadata key is absent or of another type than its meaning has.
    #[error("{key}: expected {expected}, found {found}")]
    Metadata {
        /// The key.
        key: String,
        /// The type that the key has.
        expected: String,
        /// The type found, or "nothing".
        found: String,
    },
    /// Two arrays that describe the same tokens differ in length.
    #[error("{name} has {found} entries, but there are {expected} tokens")]
    Length {
        /// Name of the array.
        name: &'static str,
        /// Number of tokens.
        expected: usize,
        /// Number of entries found.
        found: usize,
    },
    /// The token list is empty or too long for 32-bit ids.
    #[error("{found} tokens: expected 1 to {max}")]
    TokenCount {
        /// Number of tokens found.
        found: usize,
        /// Largest number accepted.
        max: usize,
    },
    /// The same literal stands at two ids.
    #[error("token {literal:?} stands at id {first} and again at id {second}")]
    DuplicateToken {
        /// The literal, shortened.
        literal: String,
        /// The lower id.
        first: u32,
        /// The higher id.
        second: u32,
    },
    /// A token's literal is empty.
    #[error("token {id} is empty")]
    EmptyToken {
        /// Its id.
        id: u32,
    },
    /// A token type outside the ones that byte-level BPE uses.
    #[error("token {id} {literal:?} has type {found}: expected 0 to 5 (6, byte, has no place in byte-level BPE)")]
    TokenType {
        /// Its id.
        id: u32,
        /// Its literal, shortened.
        literal: String,
        /// The type found.
        found: i32,
    },
    /// An ordinary token is not written in the byte-level alphabet.
    #[error("ordinary token {id} {literal:?} holds {found:?}, which is not in the byte-level alphabet")]
    NotByteLevel {
        /// Its id.
        id: u32,
        /// Its literal, shortened.
        literal: String,
        /// The first character outside the alphabet.
        found: char,
    },
    /// Bytes that text can hold have no token of their own, so encoding would lose them.
    #[error("{count} bytes have no token of their own, the first is 0x{first:02x}: text would be lost")]
    MissingBytes {
        /// How many bytes are missing.
        count: usize,
        /// The lowest missing byte.
        first: u8,
    },
    /// A merge is not two parts with one space between.
    #[error("merge {index} {merge:?}: expected two parts with one space between")]
    MergeForm {
        /// Its rank.
        index: usize,
        /// The merge, shortened.
        merge: String,
    },
    /// A merge names or makes a token that is not an ordinary token of the vocabulary.
    #[error("merge {index} {merge:?}: {missing:?} is not an ordinary token of the vocabulary")]
    MergeUnknown {
        /// Its rank.
        index: usize,
        /// The merge, shortened.
        merge: String,
        /// The part or the result that is missing, shortened.
        missing: String,
    },
    /// The same merge stands at two ranks.
    #[error("merge {second} {merge:?} repeats merge {first}")]
    MergeDuplicate {
        /// The lower rank.
        first: usize,
        /// The higher rank.
        second: usize,
        /// The merge, shortened.
        merge: String,
    },
    /// A stated id is outside the vocabulary.
    #[error("{key} is {id}, but the ids are 0 to {last}")]
    IdOutOfRange {
        /// Which id.
        key: &'static str,
        /// The id found.
        id: u64,
        /// The largest legal id.
        last: u64,
    },
    /// The tokenizer is to add a BOS that the file does not name.
    #[error("the file asks for a BOS (add_bos_token) and names none")]
    BosUnknown,
    /// A JSON file does not have the form that a tokenizer needs.
    #[error("{file}: {field}: expected {expected}, found {found}")]
    Json {
        /// Which file.
        file: &'static str,
        /// Which field, or what was being read.
        field: String,
        /// What was expected.
        expected: String,
        /// What was found, shortened.
        found: String,
    },
    /// A JSON file is cut or damaged.
    #[error("{file}: expected JSON, found damage: {found}")]
    Damaged {
        /// Which file.
        file: &'static str,
        /// What the parser says.
        found: String,
    },
    /// The file has no chat template.
    #[error("the model has no chat template, so no chat turn can be made; a prompt can be given as it is with --raw")]
    TemplateAbsent,
    /// The chat template cannot be parsed or rendered.
    #[error("chat template{}: {message}", line.map(|l| format!(", line {l}")).unwrap_or_default())]
    Template {
        /// Line of the template, from 1, where it is known.
        line: Option<usize>,
        /// What went wrong.
        message: String,
    },
    /// The chat template has a statement that transformers knows and this build does not.
    #[error(
        "chat template{}: the statement {statement:?} is known, and this build cannot run it; the template may well be \
         right, and a prompt can be given as it is with --raw", line.map(|l| format!(", line {l}")).unwrap_or_default()
    )]
    Statement {
        /// Line of the template, from 1, where it is known.
        line: Option<usize>,
        /// The statement's first word.
        statement: &'static str,
    },
    /// The underlying library refused data that had passed every check here.
    #[error("{what}: {message}")]
    Library {
        /// What was being done.
        what: &'static str,
        /// The library's message.
        message: String,
    },
}

impl TokenizeError {
    /// What to say of a `tokenizer.ggml.model` that other programs have and this build does not.
    pub fn of_model(name: &str) -> Option<Self> {
        let known = super::lacks::MODELS.contains(&name);
        known.then(|| TokenizeError::Lacking { what: "tokenizer.ggml.model", found: name.into() })
    }

    /// Whether a file is damaged, so that nothing can be said of what it states.
    pub fn is_damage(&self) -> bool {
        matches!(self, TokenizeError::Damaged { .. })
    }

    /// Whether it is the tool that lacks something: then nothing is said against the model.
    pub fn is_lack(&self) -> bool {
        matches!(self, TokenizeError::Statement { .. } | TokenizeError::Lacking { .. })
    }
}

/// `text` cut to 60 characters, so that a hostile file cannot flood a message.
pub(super) fn clip(text: &str) -> String {
    const LONGEST: usize = 60;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
