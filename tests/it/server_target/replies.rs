//! A stub: what third-party numbers say in every form that servers have, and replies that are none.

use std::io::Write;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use lockstep::report::Verdict;
use lockstep::verify::Subject;
use lockstep::verify::logits::server::http::Limits;
use serde_json::{Value as Json, json};

use super::{Heard, quick, said, send, stub, subject, verify};
use crate::common::GLM5_NANO;
use crate::common::goldens::{Goldens, OF_NANO_SHORT};
use crate::common::running::{engine, logits_in_chunks, open};
use crate::common::subject::show;

/// How a stub tells what the goldens say.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    /// The prompt among four lists, ids as vLLM writes them.
    Echo,
    /// The same as texts, to be asked for five at most, and prompts as texts alone.
    EchoOfTexts,
    /// By id, for the prompt alone.
    PromptLogprobs,
    /// A list of entries for what was made.
    Content,
    /// Nothing but the text.
    Text,
}

/// The golden prompt, and every row's most likely tokens.
struct Golden {
    ids: Vec<u32>,
    rows: Vec<Vec<(u32, f64)>>,
}

fn golden() -> Golden {
    let goldens = Goldens::read(OF_NANO_SHORT);
    let ids = goldens.ids();
    let theirs = &goldens.reals["logits"];
    let vocab = *theirs.shape().last().unwrap();
    // The goldens hold some rows; our own engine's stand between them.
    let mut logits = logits_in_chunks(&mut engine(&open(GLM5_NANO), 1, 1), &ids, ids.len());
    for (row, own) in goldens.rows_of("logits").into_iter().zip(theirs.as_slice().unwrap().chunks_exact(vocab)) {
        logits[row * vocab..][..vocab].copy_from_slice(own);
    }
    let rows = logits.chunks_exact(vocab).map(|row| {
        let sum: f64 = row.iter().map(|v| f64::from(*v).exp()).sum();
        let mut all: Vec<(u32, f64)> = (0..).zip(row.iter().map(|v| f64::from(*v) - sum.ln())).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all
    });
    let rows: Vec<_> = rows.collect();
    Golden { ids, rows }
}

/// A server of the golden prompt: what it makes of a prompt of its first tokens is the next one.
fn replay(golden: &Golden, form: Form, heard: &Heard, stream: &mut TcpStream) {
    let checkpoint = open(GLM5_NANO);
    let tokenizer = lockstep::tokenize::Tokenizer::new(&checkpoint.tokenizer_spec().unwrap()).unwrap();
    let text = |id: u32| String::from_utf8_lossy(tokenizer.token_bytes(id).unwrap()).into_owned();
    let named = |id: u32| if form == Form::Echo { format!("token_id:{id}") } else { text(id) };
    if heard.route == "/v1/models" {
        return send(stream, 200, &json!({ "data": [{ "id": "golden" }] }).to_string());
    }
    if heard.route != "/v1/completions" {
        return send(stream, 404, "{}");
    }
    assert_eq!(heard.body["model"], "golden");
    let prompt: Vec<u32> = match &heard.body["prompt"] {
        Json::String(text) => tokenizer.prompt_ids(text).unwrap(),
        _ if form == Form::EchoOfTexts => return send(stream, 422, "{\"detail\": \"a string, please\"}"),
        ids => serde_json::from_value(ids.clone()).unwrap(),
    };
    assert!(golden.ids.starts_with(&prompt), "{prompt:?}");
    let at = |t: usize, top: usize, id: u32| {
        let row = &golden.rows[t];
        let own = row.iter().find(|(known, _)| *known == id).unwrap().1;
        let tops: Vec<(u32, f64)> = row.iter().take(top).copied().collect();
        (own, tops)
    };
    let wanted = ["logprobs", "prompt_logprobs"].iter().find_map(|name| heard.body[name].as_u64());
    let top = wanted.unwrap_or(0) as usize;
    if form == Form::EchoOfTexts && top > 5 {
        return send(stream, 400, "{\"error\": \"at most 5\"}");
    }
    let most = heard.body["max_tokens"].as_u64().unwrap() as usize;
    let behind: Vec<u32> = golden.ids[prompt.len()..].iter().take(most).copied().collect();
    let made: String = behind.iter().map(|id| text(*id)).collect();
    let mut choice = json!({ "index": 0, "text": made, "logprobs": null, "finish_reason": "length" });
    let lists = |range: std::ops::Range<usize>| {
        let one = |t: usize| (t > 0).then(|| at(t - 1, top, golden.ids[t]));
        let tops = |t: usize| one(t).map(|(_, tops)| tops.iter().map(|(id, ln)| (named(*id), json!(ln))).collect());
        json!({
            "tokens": range.clone().map(|t| named(golden.ids[t])).collect::<Vec<_>>(),
            "token_logprobs": range.clone().map(|t| one(t).map(|(own, _)| own)).collect::<Vec<_>>(),
            "top_logprobs": range.map(tops).collect::<Vec<Option<serde_json::Map<String, Json>>>>(),
        })
    };
    let end = prompt.len() + behind.len();
    match form {
        Form::Echo | Form::EchoOfTexts => {
            let first = if heard.body["echo"] == true { 0 } else { prompt.len() };
            choice["logprobs"] = lists(first..end);
        }
        Form::PromptLogprobs if heard.body["prompt_logprobs"].is_u64() => {
            let one = |t: usize| {
                let (own, mut tops) = at(t - 1, top, golden.ids[t]);
                tops.push((golden.ids[t], own));
                Json::Object(
                    tops.iter().map(|(id, ln)| (id.to_string(), json!({ "logprob": ln, "rank": 1 }))).collect(),
                )
            };
            choice["prompt_logprobs"] = (0..prompt.len()).map(|t| if t == 0 { Json::Null } else { one(t) }).collect();
        }
        Form::Content => {
            let entry = |(id, ln): (u32, f64)| json!({ "id": id, "token": text(id), "logprob": ln });
            let one = |t: usize| {
                let (own, tops) = at(t - 1, top, golden.ids[t]);
                let mut of = entry((golden.ids[t], own));
                of["top_logprobs"] = tops.into_iter().map(entry).collect();
                of
            };
            choice["logprobs"] = json!({ "content": (prompt.len()..end).map(one).collect::<Vec<_>>() });
        }
        _ => {}
    }
    let usage = json!({ "prompt_tokens": prompt.len(), "completion_tokens": behind.len() });
    send(stream, 200, &json!({ "choices": [choice], "usage": usage }).to_string());
}

/// The same numbers, third-party ones among them, in every form that servers have.
#[test]
fn every_form_is_read() {
    for (form, word) in [
        (Form::Echo, "log-probabilities of"),
        (Form::EchoOfTexts, "log-probabilities of"),
        (Form::PromptLogprobs, "log-probabilities of"),
        (Form::Content, "log-probabilities of"),
        (Form::Text, "greedy text alone"),
    ] {
        let golden = golden();
        let prompt = golden.ids[..10].to_vec();
        let server = stub(move |heard, stream| replay(&golden, form, heard, stream));
        let limits = Limits { answer: Duration::from_secs(30), ..quick() };
        let of = Subject { ids: prompt, ..subject(GLM5_NANO, server.port, limits) };
        let report = verify(&of).unwrap();
        assert_eq!(report.verdict(), Verdict::Match, "{}", show(&report));
        assert!(report.summary.contains(word), "{}", report.summary);
        let asked = server.heard.lock().unwrap().join("\n");
        assert!(!asked.contains("Psalm") && asked.contains("/v1/completions"), "nothing else is sent: {asked}");
    }
}

/// Ids that differ are told, with the text and both lists.
#[test]
fn another_tokenizer_is_told() {
    let server = stub(|heard, stream| match &heard.route[..] {
        "/v1/models" => send(stream, 200, "{\"data\": [{\"id\": \"x\"}]}"),
        "/tokenize" => send(stream, 200, "{\"tokens\": [5, 6, 7]}"),
        _ => send(stream, 500, "no"),
    });
    let report = verify(&subject(GLM5_NANO, server.port, quick())).unwrap();
    let said = said(&report);
    assert!(said.contains("DIVERGENT tokens, fixed ids") && said.contains("In the beginning"), "{said}");
    assert!(said.contains("found [5, 6, 7]") && said.contains("HTTP 500: no"), "{said}");
}

/// A busy server is asked again as often as is said, and no more.
#[test]
fn a_busy_server_is_asked_again() {
    let golden = golden();
    let prompt = golden.ids[..10].to_vec();
    let tries = std::sync::atomic::AtomicUsize::new(0);
    let server = stub(move |heard, stream| {
        if tries.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < 2 {
            let _ = stream.write_all(b"HTTP/1.1 503 x\r\nretry-after: 0\r\ncontent-length: 0\r\n\r\n");
            return;
        }
        replay(&golden, Form::Echo, heard, stream);
    });
    let of = Subject { ids: prompt, ..subject(GLM5_NANO, server.port, quick()) };
    assert_eq!(verify(&of).unwrap().verdict(), Verdict::Match);
    let storm =
        stub(|_, stream| drop(stream.write_all(b"HTTP/1.1 429 x\r\nretry-after: 0\r\ncontent-length: 4\r\n\r\nbusy")));
    let why = verify(&subject(GLM5_NANO, storm.port, quick())).unwrap_err().to_string();
    assert!(why.contains("429: busy") && why.contains("asked 4 times"), "{why}");
    assert_eq!(storm.count.load(std::sync::atomic::Ordering::Relaxed), 4);
}

/// A completion whose `logprobs` is this, of a prompt of ten tokens that is one longer with what was made.
fn completion(logprobs: &Json) -> String {
    json!({ "choices": [{ "text": " a", "logprobs": logprobs, "finish_reason": "length" }] }).to_string()
}

/// Lists of `n` tokens, each of which has this log-probability and these tops.
fn lists(n: usize, ln: &Json, top: &Json) -> Json {
    let all = |of: &Json| vec![of.clone(); n];
    json!({ "tokens": all(&json!("token_id:7")), "token_logprobs": all(ln), "top_logprobs": all(top) })
}

/// What a stub sends.
type Sends = Box<dyn Fn(&mut TcpStream) + Send + Sync>;
/// A name, what is sent, and what is said of it.
type Case = (&'static str, Sends, &'static str);

/// Every reply here is none. Each ends in time, in words, and is no pass; none panics.
#[test]
fn whatever_a_server_sends_is_no_pass() {
    fn raw(text: impl Into<Vec<u8>>) -> Sends {
        let bytes = text.into();
        Box::new(move |stream| drop(stream.write_all(&bytes)))
    }
    fn body(text: impl Into<String>) -> Sends {
        let text = text.into();
        Box::new(move |stream| send(stream, 200, &text))
    }
    let head = "HTTP/1.1 200 OK\r\n";
    let many = |line: &str| raw(head.to_string() + &line.repeat(20_000));
    let cases: Vec<Case> = vec![
        ("truncated JSON", body("{\"choices\": [{\"text\": \"a"), "no JSON"),
        ("an empty body", body(""), "an empty body"),
        ("a page", body("<html>\u{1b}[2J502</html>"), "no JSON"),
        ("a list", body("[1, 2]"), "no choice"),
        ("null", body("null"), "no choice"),
        ("no choices", body("{}"), "no choice"),
        ("empty choices", body("{\"choices\": []}"), "no choice"),
        ("choices of null", body("{\"choices\": [null]}"), "no choice"),
        ("a choice without a text", body("{\"choices\": [{\"index\": 0}]}"), "without a text"),
        ("a text that is none", body("{\"choices\": [{\"text\": 7}]}"), "without a text"),
        (
            "NaN",
            body("{\"choices\": [{\"text\": \"\", \"logprobs\": {\"tokens\": [\"a\"], \"token_logprobs\": [NaN]}}]}"),
            "no JSON",
        ),
        ("logprobs of a number", body(completion(&json!(7))), "no logprobs.tokens"),
        ("missing lists", body(completion(&json!({ "tokens": ["a"] }))), "no logprobs.token_logprobs"),
        (
            "lists of other lengths",
            body(completion(&json!({ "tokens": ["a", "b"], "token_logprobs": [-1] }))),
            "2 tokens, 1",
        ),
        ("more tokens than asked for", body(completion(&lists(40, &json!(-1), &Json::Null))), "tokens"),
        ("positive ones", body(completion(&lists(10, &json!(3.5), &Json::Null))), "expected a log-probability"),
        ("words for numbers", body(completion(&lists(10, &json!("x"), &Json::Null))), "expected a log-probability"),
        ("more than all", body(completion(&lists(10, &json!(-0.1), &json!({ "token_id:8": -0.1 })))), "add up to"),
        (
            "an id out of range",
            body(completion(&json!({ "tokens": ["token_id:99999999"], "token_logprobs": [-1] }))),
            "expected an id",
        ),
        (
            "a negative id",
            body(completion(&json!({ "tokens": ["token_id:-1"], "token_logprobs": [-1] }))),
            "expected an id",
        ),
        ("content of a text", body(completion(&json!({ "content": "x" }))), "expected a list"),
        ("content without numbers", body(completion(&json!({ "content": [{ "token": "a" }] }))), "without a log-prob"),
        (
            "bytes that are none",
            body(completion(&json!({ "content": [{ "token": "a", "bytes": [300], "logprob": -1 }] }))),
            "bytes that are none",
        ),
        ("nesting", body("[".repeat(100_000)), "no JSON"),
        (
            "prompt_logprobs of another length",
            body(json!({ "choices": [{ "text": "", "prompt_logprobs": [null] }] }).to_string()),
            "expected 10 of them",
        ),
        ("invalid UTF-8", raw(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{\"a\":\"\xff\"}".to_vec()), "no JSON"),
        ("a length too small", raw(format!("{head}content-length: 5\r\n\r\n{{\"choices\": []}}")), "no JSON"),
        ("HTTP/1.0 until it closes", raw("HTTP/1.0 200 OK\r\n\r\n{}"), "no choice"),
        (
            "chunks",
            raw(format!("{head}transfer-encoding: chunked\r\n\r\n2;x=y\r\n{{}}\r\n0\r\na: b\r\n\r\n")),
            "no choice",
        ),
        ("no content", raw("HTTP/1.1 204 x\r\n\r\n"), "HTTP 204"),
        ("HTTP 500", raw("HTTP/1.1 500 x\r\ncontent-length: 4\r\n\r\noops"), "HTTP 500: oops"),
    ];
    for (name, answer, word) in cases {
        let server = stub(move |_, stream| answer(stream));
        let report = verify(&subject(GLM5_NANO, server.port, quick())).unwrap_or_else(|e| panic!("{name}: {e}"));
        let said = said(&report);
        assert_eq!(report.verdict(), Verdict::Unmeasured, "{name}: {said}");
        assert!(said.contains(word), "{name}: {said}");
    }
    // What is no answer of HTTP at all ends the run with an error.
    let cases: Vec<Case> = vec![
        ("nothing", raw(""), "closed within the head"),
        ("no HTTP", raw("SSH-2.0-x\r\n\r\n"), "expected an HTTP/1.1 status"),
        ("a status that is none", raw("HTTP/1.1 7 x\r\n\r\n"), "expected an HTTP/1.1 status"),
        ("an early end", raw(format!("{head}content-length: 90\r\n\r\n{{")), "closed behind 1 of 90 bytes"),
        ("a length that is none", raw(format!("{head}content-length: -1\r\n\r\n")), "expected a length"),
        ("two lengths", raw(format!("{head}content-length: 1\r\ncontent-length: 2\r\n\r\n{{}}")), "two lengths"),
        (
            "chunks without an end",
            raw(format!("{head}transfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n")),
            "closed within",
        ),
        ("a chunk that is none", raw(format!("{head}transfer-encoding: chunked\r\n\r\nzz\r\n")), "size of a chunk"),
        (
            "a chunk too long",
            raw(format!("{head}transfer-encoding: chunked\r\n\r\n1\r\n{{}}\r\n0\r\n\r\n")),
            "longer than its size",
        ),
        ("a huge chunk", raw(format!("{head}transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n")), "larger than"),
        ("a huge body", raw(format!("{head}content-length: 99999999999\r\n\r\n")), "larger than"),
        ("a huge body without a length", raw(format!("{head}\r\n{}", " ".repeat(2 << 20))), "larger than"),
        ("compressed", raw(format!("{head}transfer-encoding: gzip\r\n\r\nx")), "not known here"),
        ("headers without an end", many("a: b\r\n"), "a head without an end"),
        ("a line without an end", many("aaaaaaaa"), "without an end"),
        ("a header without a colon", raw(format!("{head}x\r\n\r\n")), "without a colon"),
        (
            "a redirect",
            raw("HTTP/1.1 302 x\r\nlocation: http://elsewhere/\r\ncontent-length: 0\r\n\r\n"),
            "not followed",
        ),
        ("forbidden", raw("HTTP/1.1 401 x\r\ncontent-length: 2\r\n\r\nno"), "LOCKSTEP_API_KEY"),
        ("busy for long", raw("HTTP/1.1 429 x\r\nretry-after: 999\r\ncontent-length: 0\r\n\r\n"), "asks to wait 999 s"),
        ("busy without an end", raw("HTTP/1.1 503 x\r\ncontent-length: 0\r\n\r\n"), "does not say when"),
        ("silence", Box::new(|_| std::thread::sleep(Duration::from_secs(20))), "no whole answer within 2 s"),
        ("interim answers", raw("HTTP/1.1 100 x\r\n\r\n".repeat(1000)), "closed within"),
        (
            "drops",
            Box::new(|stream| {
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
                while stream.write_all(b" ").is_ok() {
                    std::thread::sleep(Duration::from_millis(50));
                }
            }),
            "no whole answer within 2 s",
        ),
    ];
    for (name, answer, word) in cases {
        let server = stub(move |_, stream| answer(stream));
        let began = Instant::now();
        let why = verify(&subject(GLM5_NANO, server.port, quick())).map(|r| show(&r)).expect_err(name).to_string();
        assert!(why.contains(word) && why.contains("http://127.0.0.1"), "{name}: {why}");
        assert!(began.elapsed() < Duration::from_secs(9), "{name}: {:?}", began.elapsed());
    }
}
