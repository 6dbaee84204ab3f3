//! A running server in place of our own run: whatever speaks OpenAI's protocol, without hooks. It is asked for
//! log-probabilities of prompts, for what it goes on with, and for a chat turn; what it offers is found out by asking.
//!
//! What it says is judged from the outside in: are texts cut into the same ids; are the distributions the reference's
//! (see `judge`); is the most likely token the reference's; where does the greedy text part; is a conversation rendered
//! as the model's template says. Which of these fail tells a wrong template from a wrong model, and that from damage.

mod ask;
pub mod http;
mod judge;
mod reply;

use ask::{Answered, Asker, Continued, Prompt, Rendered};
use http::{Address, Client, HttpError, Limits};
use judge::{Distances, Seen, judge};
use lockstep_reference::{Half, RefRecipe};
use reply::{Tokens, Told};
use serde_json::{Map, json};

use super::{BUILT_IN, by_eps};
use crate::report::{Check, Progress, Reach, Verdict};
use crate::tokenize::{ChatMessage, Tokenizer};
use crate::verify::{Subject, VerifyError};

/// How a server may compute at the loosest, as far as recipes are stated here.
pub const LOOSEST: RefRecipe = RefRecipe::TorchHalf(Half::Bf16);

/// Tokens that it goes on with.
const MORE: usize = 32;

/// A server that is judged.
#[derive(Clone, Debug)]
pub struct Server {
    /// Where it is.
    pub address: Address,
    /// What it is asked with.
    pub key: Option<String>,
    /// How long and how much.
    pub limits: Limits,
}

impl Server {
    /// At an address, with the key that the environment holds.
    ///
    /// # Errors
    /// What is no address, and a key that cannot be sent.
    pub fn at(address: &str) -> Result<Self, HttpError> {
        Ok(Server { address: Address::parse(address)?, key: http::key()?, limits: Limits::default() })
    }
}

/// The stage of a server.
pub(super) fn run(
    subject: &Subject,
    server: &Server,
    progress: &dyn Progress,
    checks: &mut Vec<Check>,
    reach: &mut Reach,
) -> Result<String, VerifyError> {
    let tokenizer = match subject.checkpoint.tokenizer_spec().and_then(|spec| Tokenizer::new(&spec)) {
        Ok(tokenizer) => tokenizer,
        Err(e) => {
            let why = format!("without a tokenizer it cannot be read what a server says: {e}");
            checks.push(Check::new("server", Verdict::Unmeasured, why.clone()));
            return Ok(why);
        }
    };
    let tokens = Tokens::new(&tokenizer, subject.checkpoint.config().vocab);
    let client = Client { address: &server.address, key: server.key.as_deref(), limits: server.limits, progress };
    let mut asker = Asker::new(client, &tokens)?;
    let mut found = Found {
        progress,
        subject,
        tokenizer: &tokenizer,
        checks,
        rows: 0,
        group: Distances::default(),
        texts: 0,
        judged: 0,
    };
    found.of_prompts(&mut asker)?;
    found.together("plain texts");
    let plain = found.checks.len();
    let is_wrong = |checks: &[Check]| checks.iter().any(|c| c.verdict == Verdict::Divergent);
    let (wrong_plain, compared) = (is_wrong(found.checks), found.judged > 0);
    found.of_chat(&mut asker)?;
    found.together("chat turns");
    let wrong_chat = is_wrong(&found.checks[plain..]);
    let Found { texts, judged, rows, .. } = found;
    reach.positions = judged;
    for (name, lines, verdict) in [
        ("answers that are none", &asker.malformed, Verdict::Unmeasured),
        ("tokens of the prompt", &asker.misread, Verdict::Divergent),
    ] {
        if !lines.is_empty() {
            checks.push(Check::new(name, verdict, lines.join("; ")));
        }
    }
    if texts == 0 {
        let nothing = "nothing that can be judged came back";
        let tried = if asker.tried.is_empty() { String::new() } else { format!(": {}", asker.tried.join("; ")) };
        checks.push(Check::new("server", Verdict::Unmeasured, format!("{nothing}{tried}")));
        return Ok(format!("{}: {nothing}", server.address));
    }
    if rows > 0 {
        checks.push(Check::new("log-probabilities", Verdict::Match, format!("{rows} rows came")));
    } else {
        let why = format!("the server tells none, so that the greedy text alone is judged; {}", asker.tried.join("; "));
        checks.push(Check::new("log-probabilities", Verdict::NotApplicable, why));
    }
    if wrong_chat && !wrong_plain && compared {
        let why = "plain texts are continued as the model does, and chat turns are not: the server renders conversations \
                   by another chat template, or with other settings of it";
        checks.push(Check::new("chat template", Verdict::Divergent, why));
    }
    let model = asker.model.as_deref().unwrap_or("a model without a name");
    let by = if rows > 0 { format!("log-probabilities of {rows} rows") } else { "greedy text alone".into() };
    Ok(format!(
        "{model} at {}: {texts} texts by {by}; floor of {}, the loosest known here, since a server does not say how it \
         computes",
        server.address,
        subject.recipe.name()
    ))
}

/// Rows of several texts together, and what they look like.
fn together(name: &str, all: &Distances) -> Check {
    let mut check = all.check(&format!("KL, {name}"));
    let (found, unrelated, (same, of, chance)) = (all.mean(), all.mean_unrelated(), all.same);
    let figures = format!(
        "rows that have nothing to do with each other: {unrelated:.2e}; the same most likely token in {same} of {of} rows, \
         {chance} by chance"
    );
    check.detail += &format!("; {figures}");
    if check.verdict == Verdict::Divergent {
        // Four standard deviations, as for slices.
        let by_chance = same as f64 <= chance as f64 + 4.0 * (chance as f64).sqrt().max(1.0);
        let looks = match (found >= unrelated / 2.0, by_chance) {
            (true, true) => "ANOTHER MODEL, or one that is broken throughout",
            (true, false) => "another model of its kind, or one of which a large part is damaged",
            (false, _) => "the same model, with a part of it damaged or computed otherwise: a dump names it",
        };
        check.detail = format!("it looks like {looks}; {}", check.detail);
    }
    check.with(json!({ "mean_kl": found, "mean_kl_unrelated": unrelated, "same": same, "rows": of, "chance": chance }))
}

/// What is found, as it comes.
struct Found<'a> {
    progress: &'a dyn Progress,
    subject: &'a Subject,
    tokenizer: &'a Tokenizer,
    checks: &'a mut Vec<Check>,
    /// Rows of log-probabilities that came.
    rows: usize,
    /// Those of texts that are judged together.
    group: Distances,
    /// Texts that something came back for.
    texts: usize,
    /// Positions of the longest of them.
    judged: usize,
}

impl Found<'_> {
    fn of_prompts(&mut self, asker: &mut Asker<'_>) -> Result<(), VerifyError> {
        let prompts = self.prompts();
        self.of_tokens(&prompts, asker)?;
        let count = prompts.len();
        for (i, prompt) in prompts.iter().enumerate() {
            self.progress.at("prompts asked and compared", i, count);
            let told = asker.of_prompt(prompt)?;
            let most = MORE.min(self.subject.checkpoint.config().context.saturating_sub(prompt.ids.len() + 1));
            let continued = if most == 0 { None } else { asker.go_on(prompt, most)? };
            if told.is_none() && continued.is_none() {
                if self.texts > 0 {
                    let why = "nothing came back of this prompt, as did of others";
                    self.checks.push(Check::new(format!("KL, {}", prompt.name), Verdict::Unmeasured, why));
                }
                continue;
            }
            // Both were asked in one form, so that the ids are the same.
            let ids = told.as_ref().map(|(ids, _)| ids).or(continued.as_ref().map(|(ids, _)| ids)).cloned();
            let (told, continued) = (told.map(|(_, told)| told), continued.map(|(_, continued)| continued));
            let seen = seen(prompt.name.clone(), ids.unwrap_or_default(), told, continued.unwrap_or_default());
            self.judge(&seen)?;
        }
        Ok(())
    }

    /// Closes a group of texts.
    fn together(&mut self, name: &str) {
        let group = std::mem::take(&mut self.group);
        if !group.found.is_empty() {
            self.checks.push(together(name, &group));
        }
        self.rows += group.found.len();
    }

    /// The subject's prompt and, unless that is the user's, those of every run.
    fn prompts(&self) -> Vec<Prompt> {
        let Subject { ids, prompt, own_prompt, .. } = self.subject;
        let mut all = vec![(prompt.clone(), ids.clone())];
        if !own_prompt {
            let ids = |text| self.tokenizer.prompt_ids(text).ok().filter(|ids| !ids.is_empty());
            all.extend(BUILT_IN.iter().filter_map(|(name, text)| Some(((*name).to_string(), ids(text)?))));
        }
        let texts = all.into_iter().map(|(name, ids)| {
            let text = self.tokenizer.decode(&ids, false);
            let own = self.tokenizer.prompt_ids(&text).ok().filter(|own| !own.is_empty() && !text.contains('\u{fffd}'));
            Prompt { name, text: own.map(|own| (text, own)), ids }
        });
        texts.collect()
    }

    /// Whether the server cuts texts into the same ids.
    fn of_tokens(&mut self, prompts: &[Prompt], asker: &mut Asker<'_>) -> Result<(), VerifyError> {
        let mut alike = 0;
        for Prompt { name, text, .. } in prompts {
            let Some((text, own)) = text else { continue };
            let Some(found) = asker.ids_of(text)? else { continue };
            match found == *own {
                true => alike += 1,
                false => {
                    let check = format!("tokens, {name}");
                    self.checks.push(Check::new(check, Verdict::Divergent, other_ids(Some(text), own, &found)));
                }
            }
        }
        let (verdict, detail) = match alike {
            0 => (Verdict::NotApplicable, "the server does not tell what it cuts texts into".into()),
            n => (Verdict::Match, format!("{n} texts are cut into the same ids")),
        };
        if alike > 0 || !self.checks.iter().any(|c| c.name.starts_with("tokens, ")) {
            self.checks.push(Check::new("tokens", verdict, detail));
        }
        Ok(())
    }

    fn of_chat(&mut self, asker: &mut Asker<'_>) -> Result<(), VerifyError> {
        for (name, messages) in self.conversations() {
            let own = match self.tokenizer.chat_ids(&messages, true, &Map::new()) {
                Ok(own) => own,
                Err(e) => {
                    self.checks.push(Check::new(
                        name,
                        Verdict::NotApplicable,
                        format!("the model's own template: {e}"),
                    ));
                    continue;
                }
            };
            let most = MORE.min(self.subject.checkpoint.config().context.saturating_sub(own.len() + 1));
            if most == 0 {
                continue;
            }
            match asker.chat(&messages, most)? {
                Answered::Unknown(why) => {
                    self.checks.push(Check::new(
                        name,
                        Verdict::NotApplicable,
                        format!("the server does not chat: {why}"),
                    ));
                    return Ok(());
                }
                Answered::Nothing(why) => self.checks.push(Check::new(name, Verdict::Unmeasured, why)),
                Answered::Said { count, continued } => {
                    let rendered = asker.rendered(&messages)?;
                    self.rendering(&name, &own, count, rendered);
                    self.judge(&seen(name, own, None, continued))?;
                }
            }
        }
        Ok(())
    }

    /// Chat turns: the user's, or a plain one and one with a past.
    fn conversations(&self) -> Vec<(String, Vec<ChatMessage>)> {
        let user = |text: &str| ChatMessage::new("user", text);
        if !self.subject.asks.is_empty() {
            let one = |ask: &crate::verify::asks::Ask| (format!("chat, {}", ask.ask), vec![user(&ask.ask)]);
            return self.subject.asks.iter().map(one).collect();
        }
        let system = ChatMessage::new("system", "Answer briefly.");
        let past =
            vec![system, user("Genesis 1:1"), ChatMessage::new("assistant", "In the beginning."), user("John 1:1")];
        vec![("chat, a turn".into(), vec![user("Genesis 1:1")]), ("chat, with a past".into(), past)]
    }

    /// Whether a conversation is rendered as the model's template says.
    fn rendering(&mut self, name: &str, own: &[u32], count: Option<u64>, rendered: Option<Rendered>) {
        let name = format!("{name}, rendered");
        let found = match rendered {
            Some(Rendered::Ids(ids)) => Some(ids),
            Some(Rendered::Text(text)) => self.tokenizer.prompt_ids(&text).ok(),
            None => None,
        };
        self.checks.push(match (found, count) {
            (Some(found), _) if found != own => {
                let text = self.tokenizer.decode(&found, false);
                let detail = format!("expected {:?}, found {text:?}; ", self.tokenizer.decode(own, false));
                Check::new(name, Verdict::Divergent, detail + &other_ids(None, own, &found))
            }
            (_, Some(count)) if count != own.len() as u64 => {
                let detail = format!("the model's template makes {} tokens, the server counts {count}", own.len());
                Check::new(name, Verdict::Divergent, detail)
            }
            (Some(_), _) => Check::new(name, Verdict::Match, format!("the same {} ids", own.len())),
            (None, Some(_)) => Check::new(name, Verdict::Match, format!("as many tokens, {}", own.len())),
            (None, None) => Check::new(name, Verdict::NotApplicable, "the server does not tell"),
        });
    }

    fn judge(&mut self, seen: &Seen) -> Result<(), VerifyError> {
        let mut distances = None;
        let mut found = by_eps(self.subject, &mut |eps| {
            let (checks, own) = judge(self.subject, seen, self.tokenizer, eps, self.progress)?;
            distances.get_or_insert(own);
            Ok(checks)
        })?;
        // Of all eps the model's own comes first, and stands for it.
        self.group.join(&distances.unwrap_or_default());
        if !found.is_empty() {
            self.texts += 1;
            self.judged = self.judged.max(seen.prompt.len() + seen.generated.len());
        }
        self.checks.append(&mut found);
        Ok(())
    }
}

/// Rows by position, from what was told of the prompt's tokens and of those behind it.
fn seen(name: String, prompt: Vec<u32>, told: Option<Told>, continued: Continued) -> Seen {
    let Continued { ids, rows: behind, ended, from_text } = continued;
    let mut rows: Vec<_> = told.into_iter().flatten().skip(1).map(|(_, row)| row).collect();
    rows.resize(prompt.len() - 1, None);
    rows.extend(behind);
    Seen { name, prompt, rows, generated: ids, ended, from_text }
}

/// Where two lists of ids part.
fn other_ids(text: Option<&str>, own: &[u32], found: &[u32]) -> String {
    let at = own.iter().zip(found).take_while(|(a, b)| a == b).count();
    let some = |ids: &[u32]| format!("{:?}", ids.iter().skip(at).take(8).collect::<Vec<_>>());
    let of = text.map_or(String::new(), |text| format!(" of {:?}", text.chars().take(60).collect::<String>()));
    format!(
        "ids{of} part at token {at}: expected {}, found {}; {} and {} in all",
        some(own),
        some(found),
        own.len(),
        found.len()
    )
}
