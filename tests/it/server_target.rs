//! A running server as the target of `verify logits`: a sound one matches; a wrong template, a wrong model and a damaged
//! layer are told apart; whatever else a server sends ends in words, and is no pass.

mod recipes;
mod replies;
#[cfg(feature = "serve")]
mod served;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lockstep::report::StageReport;
use lockstep::verify::logits::server::Server;
use lockstep::verify::logits::server::http::{Address, Limits};
use lockstep::verify::{Subject, VerifyError, logits};
use serde_json::Value as Json;

use crate::common::running::open;
use crate::common::subject::{Silent, over};
use crate::common::{golden, lockstep as lockstep_binary};

/// A request as a stub hears it.
pub struct Heard {
    pub route: String,
    pub head: String,
    pub body: Json,
}

type Answer = dyn Fn(&Heard, &mut TcpStream) + Send + Sync;

/// A server that answers as it is told; the thread ends with the test's process.
pub struct Stub {
    pub port: u16,
    pub heard: Arc<Mutex<Vec<String>>>,
    pub count: Arc<AtomicUsize>,
}

pub fn stub(answer: impl Fn(&Heard, &mut TcpStream) + Send + Sync + 'static) -> Stub {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (heard, count): (Arc<Mutex<Vec<String>>>, Arc<AtomicUsize>) = Default::default();
    let (answer, list, all): (Arc<Answer>, _, _) = (Arc::new(answer), heard.clone(), count.clone());
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let (answer, list, all) = (answer.clone(), list.clone(), all.clone());
            std::thread::spawn(move || {
                let Some(heard) = hear(&stream) else { return };
                list.lock().unwrap().push(format!("{} {}", heard.route, heard.body));
                all.fetch_add(1, Ordering::Relaxed);
                let mut stream = stream;
                answer(&heard, &mut stream);
            });
        }
    });
    Stub { port, heard, count }
}

fn hear(stream: &TcpStream) -> Option<Heard> {
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        (reader.read_line(&mut head).ok()? > 0).then_some(())?;
    }
    let length = head.lines().find_map(|l| l.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body).ok()?;
    let route = head.split(' ').nth(1)?.to_string();
    Some(Heard { route, head, body: serde_json::from_slice(&body).unwrap_or_default() })
}

/// An ordinary reply.
pub fn send(stream: &mut TcpStream, status: u16, body: &str) {
    let head =
        format!("HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
    let _ = stream.write_all((head + body).as_bytes());
}

/// Times short enough for tests.
pub fn quick() -> Limits {
    Limits {
        connect: Duration::from_secs(2),
        answer: Duration::from_secs(2),
        body: 1 << 20,
        wait: Duration::from_secs(2),
    }
}

/// What is judged at a port: by the reference of a model, over its own short prompt.
pub fn subject(model: &str, port: u16, limits: Limits) -> Subject {
    let address = Address::parse(&format!("http://127.0.0.1:{port}")).unwrap();
    let checkpoint = open(model);
    let tokenizer = lockstep::tokenize::Tokenizer::new(&checkpoint.tokenizer_spec().unwrap()).unwrap();
    let ids = tokenizer.prompt_ids("In the beginning God created the heaven and the").unwrap();
    let of = over(checkpoint, 1, ids, vec![0]);
    let recipe = lockstep::verify::logits::server::LOOSEST;
    Subject { server: Some(Server { address, key: None, limits }), recipe, own_prompt: true, ..of }
}

pub fn verify(subject: &Subject) -> Result<StageReport, VerifyError> {
    logits::run(subject, &Silent)
}

/// Every check that is no pass, as a line each.
pub fn said(report: &StageReport) -> String {
    report.checks.iter().map(|c| format!("{} {}: {}\n", c.verdict.name(), c.name, c.detail)).collect()
}

#[test]
fn addresses_and_flags_are_refused_in_words() {
    let run = |args: &[&str]| {
        let model = golden("glm5-nano-Q4_K_M.gguf");
        let out = lockstep_binary().args(["verify", "logits", "-m"]).arg(model).args(args).output().unwrap();
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    for (args, word) in [
        (&["--target", "https://localhost:1"][..], "only plain http"),
        (&["--target", "http://localhost:x"], "expected a port"),
        (&["--target", "ftp://localhost"], "expected http://HOST:PORT"),
        (&["--target", "http://key@localhost"], "a key is read from the environment"),
        (&["--target", "http://127.0.0.1:9", "--layers", "1"], "--layers"),
        (&["--target", "http://127.0.0.1:9", "--tp", "2"], "--tp"),
        (&["--target", "tests", "--prompt", "a"], "--prompt"),
    ] {
        let (code, said) = run(args);
        assert!(code == Some(2) && said.contains(word), "{args:?}: {code:?} {said}");
    }
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (code, said) = run(&["--target", &format!("http://127.0.0.1:{free}")]);
    assert!(code == Some(2) && said.contains("cannot connect"), "{code:?} {said}");
    let model = golden("glm5-nano-Q4_K_M.gguf");
    let bisect =
        lockstep_binary().args(["bisect", "--target", "http://127.0.0.1:9", "-m"]).arg(model).output().unwrap();
    assert!(bisect.status.code() == Some(2) && String::from_utf8_lossy(&bisect.stderr).contains("no operation"));
}

/// The key goes out as Bearer, never to the output; other stages do not apply.
#[test]
fn a_key_is_sent_and_never_shown() {
    let stub = stub(|heard, stream| {
        let right = heard.head.contains("Authorization: Bearer s3cret\r\n");
        send(stream, if right { 404 } else { 401 }, "{\"a\": \"\u{1b}[2J\"}");
    });
    let url = format!("http://127.0.0.1:{}/v1", stub.port);
    let run = |key: &str, stages: &[&str]| {
        let mut command = lockstep_binary();
        command.arg("verify").args(stages).args(["--prompt", "a", "--target", &url, "-m"]);
        command.arg(golden("glm5-nano-Q4_K_M.gguf")).env_remove("LOCKSTEP_API_KEY").env("OPENAI_API_KEY", key);
        let out = command.output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
        assert!(!said.contains("s3cret") && !said.contains('\u{1b}'), "{said}");
        (out.status.code(), said)
    };
    let (code, said) = run("s3cret", &["logits"]);
    assert!(code == Some(3) && said.contains("HTTP 404") && said.contains("UNMEASURED"), "{code:?}: {said}");
    let (code, said) = run("other", &["logits"]);
    assert!(code == Some(2) && said.contains("401") && said.contains("\\u{1b}"), "{code:?}: {said}");
    let (code, said) = run("s3cret", &["weights"]);
    assert!(code == Some(3) && said.contains("N/A"), "{code:?}: {said}");
    assert_eq!(run("a\nb", &["logits"]).0, Some(2), "no header of its own");
}
