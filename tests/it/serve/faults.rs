//! What goes wrong around an answer: clients that go, engines that fail or hang, too many who ask, an end.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use lockstep::serve::http::Limits;
use lockstep::serve::state::State;
use serde_json::{Value as Json, json};

use super::client::{CHAT, JSON, ask, connect, get, post, request};
use super::script::{Play, Running, Setup, start};

fn chat(stream: bool) -> Json {
    json!({ "messages": [{ "role": "user", "content": "hello" }], "stream": stream, "max_tokens": 200 })
}

fn slow() -> Play {
    Play { answer: vec![70, 71], step: Duration::from_millis(5), ..Play::default() }
}

/// Sends a request and reads nothing.
fn send(running: &Running, body: &Json) -> std::net::TcpStream {
    let mut stream = connect(running.port);
    stream.write_all(request("POST", CHAT, &[JSON], &body.to_string()).as_bytes()).unwrap();
    stream
}

/// A client goes while its request is where `play` holds it: its sequence goes with it.
fn goes(play: Play, stream: bool, until: impl Fn(&super::script::Seen) -> bool) {
    for half in [false, true] {
        let running = start(&Setup::default(), play.clone());
        let client = send(&running, &chat(stream));
        running.wait("the request runs", &until);
        match half {
            true => client.shutdown(Shutdown::Write).unwrap(),
            false => drop(client),
        }
        running.wait("the sequence went", |seen| seen.live == 0 && seen.cancelled.len() == 1);
        let waited = Instant::now() + Duration::from_secs(2);
        while running.service.shared.asked() > 0 {
            assert!(Instant::now() < waited, "its place is free");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[test]
fn who_goes_is_forgotten_in_prefill() {
    let play = Play { prefill: 100_000, ..slow() };
    goes(play.clone(), true, |seen| seen.live == 1);
    goes(play, false, |seen| seen.live == 1);
}

#[test]
fn who_goes_is_forgotten_while_tokens_come() {
    let play = || Play { step: Duration::from_millis(20), ..slow() };
    goes(play(), true, |seen| seen.steps > 3);
    goes(play(), false, |seen| seen.steps > 3);
}

#[test]
fn who_goes_is_forgotten_in_the_queue() {
    let running = start(&Setup::default(), Play { at_once: 1, prefill: 100_000, ..slow() });
    let _first = send(&running, &chat(true));
    running.wait("the first runs", |seen| seen.live == 1);
    let second = send(&running, &chat(true));
    running.wait("the second waits", |seen| seen.live == 2);
    drop(second);
    running.wait("the second went", |seen| seen.live == 1 && seen.cancelled == [2]);
}

#[test]
fn a_long_prompt_is_heard_of() {
    let limits = Limits { comment: Duration::from_millis(50), ..Limits::default() };
    let play = Play { prefill: 100_000, step: Duration::from_millis(100), ..Play::default() };
    let running = start(&Setup { limits, ..Setup::default() }, play);
    let began = Instant::now();
    let mut client = send(&running, &chat(true));
    let mut seen = String::new();
    let mut bytes = [0; 4096];
    while seen.matches(": waiting\n").count() < 3 {
        let n = client.read(&mut bytes).unwrap();
        assert!(n > 0, "{seen}");
        if seen.is_empty() {
            assert!(began.elapsed() < Duration::from_secs(1), "headers come at once");
        }
        seen += &String::from_utf8_lossy(&bytes[..n]);
    }
    assert!(seen.starts_with("HTTP/1.1 200 OK"), "{seen}");
}

/// The same by the clock: a prompt that takes two minutes.
#[test]
#[ignore = "takes two minutes; a_long_prompt_is_heard_of is the same, faster"]
fn a_prompt_of_two_minutes_is_heard_of_by_the_clock() {
    let play = Play { prefill: 120, step: Duration::from_secs(1), answer: vec![70, 71], ..Play::default() };
    let running = start(&Setup::default(), play);
    let began = Instant::now();
    let client = send(&running, &json!({ "messages": chat(true)["messages"], "stream": true, "max_tokens": 2 }));
    let mut lines = BufReader::new(&client).lines().map(Result::unwrap);
    // Sizes of chunks and empty lines stand between lines that say something.
    let mut hear = |word: &str| {
        let line = lines.by_ref().find(|l| [word, ": ", "data: "].iter().any(|w| l.starts_with(w))).unwrap();
        println!("{:8.3} s {line}", began.elapsed().as_secs_f64());
        (began.elapsed().as_secs_f64(), line)
    };
    let head = hear("HTTP/1.1 200 OK");
    assert!(head.0 < 1.0 && head.1.starts_with("HTTP/1.1 200"), "{head:?}");
    let role = hear("data: ");
    assert!(role.0 < 1.0 && role.1.contains("assistant"), "{role:?}");
    for comment in 1..=12 {
        let (at, line) = hear(": ");
        assert!(line == ": waiting" && (at - role.0 - 10.0 * f64::from(comment)).abs() < 0.5, "{at}: {line}");
    }
    let (at, first) = hear("data: ");
    assert!(at > 120.0 && first.contains("\"content\":"), "{at}: {first}");
    while hear("data: ").1 != "data: [DONE]" {}
}

/// All who wait hear that nothing comes any more, and why; then the service is not well.
fn ends(play: Play, setup: &Setup, code: &str, why: &str) {
    let running = start(setup, play);
    let clients: Vec<_> = [true, false].map(|stream| send(&running, &chat(stream))).into();
    if let Some(stall) = setup.stall {
        running.wait("both run", |seen| seen.live == 2 || seen.steps > 0);
        std::thread::sleep(stall);
        // What the watchdog of the program does.
        assert!(running.service.shared.in_step() >= stall / 2);
        running.service.shared.enter(State::Failed("no step has ended for 1 s".into()));
    }
    let replies: Vec<_> = clients.iter().map(super::client::read).collect();
    let last = replies[0].frames().pop().unwrap();
    assert_eq!(last["error"]["code"], code, "{}", replies[0].body);
    assert_eq!(replies[1].code(), (503, code.into()));
    assert!(replies.iter().all(|r| r.body.contains(why)), "{}", replies[0].body);
    assert!(replies[1].header("retry-after").is_some());
    let health = get(running.port, "/health");
    assert_eq!((health.status, &health.json()["status"]), (503, &json!("failed")));
    assert_eq!(get(running.port, "/v1/models").json()["data"], json!([]));
    assert_eq!(post(running.port, CHAT, &chat(false)).code(), (503, "engine_failed".into()));
}

#[test]
fn a_step_that_fails_ends_the_service() {
    let why = "sequence 3: no logit behind token 5 is a number";
    ends(Play { fails_at: Some(3), prefill: 1, ..slow() }, &Setup::default(), "engine_failed", why);
}

#[test]
fn a_panic_ends_the_service() {
    ends(Play { panics_at: Some(3), prefill: 1, ..slow() }, &Setup::default(), "engine_failed", "panicked");
}

#[test]
fn a_step_that_hangs_ends_the_service() {
    let setup = Setup { stall: Some(Duration::from_millis(200)), ..Setup::default() };
    ends(Play { hangs_at: Some(1), ..slow() }, &setup, "engine_failed", "no step has ended");
}

#[test]
fn a_full_queue_is_said() {
    let limits = Limits { queue: 1, ..Limits::default() };
    let setup = Setup { limits, sequences: 1, ..Setup::default() };
    let running = start(&setup, Play { prefill: 100_000, ..slow() });
    let _two: Vec<_> = (0..2).map(|_| send(&running, &chat(true))).collect();
    running.wait("both are taken", |seen| seen.requests.len() == 2);
    let third = post(running.port, CHAT, &chat(false));
    assert_eq!(third.code(), (429, "queue_full".into()));
    assert!(third.header("retry-after").unwrap().parse::<u64>().unwrap() >= 1);
    let many = json!({ "prompt": ["a", "b", "c"] });
    assert_eq!(post(running.port, "/v1/completions", &many).status, 400, "they never fit");
}

#[test]
fn a_service_that_stops_lets_running_answers_end() {
    let running = start(&Setup::default(), Play { prefill: 20, ..slow() });
    let client = send(&running, &chat(true));
    let cut =
        send(&running, &json!({ "messages": [{ "role": "user", "content": "a" }], "stream": true, "max_tokens": 300 }));
    running.wait("both run", |seen| seen.live == 2);
    running.service.shared.enter(State::Draining);
    assert_eq!(post(running.port, CHAT, &chat(false)).code(), (503, "draining".into()));
    let reply = super::client::read(&client);
    assert_eq!(reply.frames().pop().unwrap()["choices"][0]["finish_reason"], "length");
    running.service.shared.enter(State::Ended);
    let reply = super::client::read(&cut);
    assert_eq!(reply.frames().pop().unwrap()["error"]["code"], "draining", "{}", reply.body);
    assert_eq!(get(running.port, "/health").json()["status"], "draining");
}

#[test]
fn an_answer_that_leaves_itself_no_token_ends_alone() {
    use lockstep::engine::EngineError;
    use lockstep::engine::scheduler::{Event, Finish, Request};
    use lockstep::serve::driver::{Counters, Generator, Stepped};
    struct NoToken(Vec<u64>);
    impl Generator for NoToken {
        fn add(&mut self, _: Request) -> Result<u64, EngineError> {
            self.0.push(1);
            Ok(1)
        }
        fn cancel(&mut self, _: u64) {}
        fn step(&mut self) -> Result<Stepped, EngineError> {
            let failed = |sequence| Event { sequence, token: 0, logprobs: None, finish: Some(Finish::Failed) };
            Ok(Stepped { prompts: Vec::new(), events: self.0.drain(..).map(failed).collect() })
        }
        fn counters(&mut self) -> Counters {
            Counters::default()
        }
    }
    let running = super::script::over(&Setup::default(), NoToken(Vec::new()));
    assert_eq!(post(running.port, CHAT, &chat(false)).code(), (400, "no_token_allowed".into()));
    assert_eq!(ask(running.port, "GET", "/health", &[], "").status, 200);
}
