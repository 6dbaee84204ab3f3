//! The program itself: its start as systemd sees it, its end, and a certificate from `verify` to `serve`.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value as Json, json};

use super::client::{CHAT, JSON, connect, get, post, request};
use crate::common::{Model, golden, lockstep, tiny};

/// A service that runs as a process; it is killed when the test lets it go.
struct Served {
    child: Child,
    port: u16,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn spawn(port: u16, args: &[&str], environment: &[(&str, &Path)]) -> Served {
    let mut command: Command = lockstep();
    command.args(["serve", "--port", &port.to_string()]).args(args).stderr(Stdio::piped()).stdout(Stdio::null());
    command.env_remove("NOTIFY_SOCKET").env_remove("RUST_LOG").envs(environment.iter().copied());
    Served { child: command.spawn().unwrap(), port }
}

impl Served {
    /// What it says on stderr, up to a line with `word`.
    fn until(&mut self, word: &str) -> String {
        let mut said = String::new();
        let lines = BufReader::new(self.child.stderr.take().unwrap()).lines();
        let mut lines = lines.map_while(Result::ok);
        for line in lines.by_ref() {
            said += &(line.clone() + "\n");
            if line.contains(word) {
                // Somebody has to read on, or it waits.
                std::thread::spawn(move || lines.for_each(drop));
                return said;
            }
        }
        panic!("no {word:?}: {said}");
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    fn ends(&mut self, within: Duration) -> ExitStatus {
        let until = Instant::now() + within;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < until, "it still runs");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn chat(most: usize) -> Json {
    json!({ "messages": [{ "role": "user", "content": "Genesis 1:1" }], "ignore_eos": true, "max_tokens": most, "stream": true })
}

#[test]
fn a_service_that_is_told_to_stop_lets_answers_end() {
    let mut served = spawn(free_port(), &["--unverified"], &[]);
    served.until("ready");
    let mut client = connect(served.port);
    client.write_all(request("POST", CHAT, &[JSON], &chat(200).to_string()).as_bytes()).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    served.signal(rustix::process::Signal::TERM);
    let reply = super::client::read(&client);
    assert_eq!(reply.frames().pop().unwrap()["choices"][0]["finish_reason"], "length", "{}", reply.body);
    assert_eq!(served.ends(Duration::from_secs(10)).code(), Some(0));
}

#[test]
fn a_second_signal_ends_at_once_and_a_killed_one_leaves_the_port() {
    let mut served = spawn(free_port(), &["--unverified"], &[]);
    served.until("ready");
    let mut client = connect(served.port);
    client.write_all(request("POST", CHAT, &[JSON], &chat(300).to_string()).as_bytes()).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    served.signal(rustix::process::Signal::TERM);
    std::thread::sleep(Duration::from_millis(50));
    served.signal(rustix::process::Signal::TERM);
    let status = served.ends(Duration::from_secs(2));
    assert!([Some(143), Some(0)].contains(&status.code()), "{status}");
    let mut killed = spawn(served.port, &["--unverified"], &[]);
    killed.until("ready");
    killed.signal(rustix::process::Signal::KILL);
    killed.ends(Duration::from_secs(5));
    let mut again = spawn(served.port, &["--unverified"], &[]);
    again.until("ready");
    let reply = post(again.port, CHAT, &json!({ "messages": [{ "role": "user", "content": "a" }], "max_tokens": 2 }));
    assert_eq!(reply.status, 200);
    // A second service of the port is refused, or ends the first where that is asked for.
    let mut second = spawn(again.port, &["--unverified"], &[]);
    assert_eq!(second.ends(Duration::from_secs(5)).code(), Some(78));
    let mut reaps = spawn(again.port, &["--unverified", "--reap"], &[]);
    reaps.until("ready");
    assert_eq!(again.ends(Duration::from_secs(5)).code(), Some(0), "it was told to stop");
}

#[test]
fn systemd_hears_of_the_start_only_behind_the_first_token() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut served = spawn(free_port(), &["--unverified"], &[("NOTIFY_SOCKET", &path)]);
    let hear = || {
        let mut bytes = [0; 4096];
        let n = socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..n]).into_owned()
    };
    let mut before = Vec::new();
    loop {
        let said = hear();
        if said.contains("READY=1") {
            break;
        }
        before.push(said);
    }
    assert!(before.iter().any(|s| s.contains("STATUS=") && s.contains("EXTEND_TIMEOUT_USEC=")), "{before:?}");
    assert_eq!(get(served.port, "/health").status, 200, "ready is ready");
    while !hear().contains("WATCHDOG=1") {}
    served.signal(rustix::process::Signal::TERM);
    while !hear().contains("STOPPING=1") {}
    assert_eq!(served.ends(Duration::from_secs(5)).code(), Some(0));
}

/// The start is told behind a token that went all the way: a model that makes no numbers is never ready, though nothing else
/// is wrong with it.
#[test]
fn a_first_token_that_fails_is_no_start() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    let mut model = Model::read(&golden("glm5-nano-Q4_K_M.gguf"));
    let (_, norm) = model.tensors.iter_mut().find(|(tensor, _)| tensor.name == "output_norm.weight").unwrap();
    norm.chunks_exact_mut(4).for_each(|value| value.copy_from_slice(&f32::NAN.to_le_bytes()));
    let file = model.write(folder.path(), "model.gguf");
    let args = ["--unverified", "-m", file.to_str().unwrap()];
    let mut served = spawn(free_port(), &args, &[("NOTIFY_SOCKET", &path)]);
    let said = served.until("no logit");
    assert_eq!(served.ends(Duration::from_secs(5)).code(), Some(78), "{said}");
    socket.set_nonblocking(true).unwrap();
    let mut bytes = [0; 4096];
    let heard: Vec<String> =
        std::iter::from_fn(|| socket.recv(&mut bytes).ok().map(|n| String::from_utf8_lossy(&bytes[..n]).into_owned()))
            .collect();
    assert!(heard.iter().any(|s| s.contains("STATUS=")), "{heard:?}");
    assert!(!heard.iter().any(|s| s.contains("READY=1")), "{heard:?}");
}

/// A certificate stands in for the checks until anything of it changes.
#[test]
fn a_certificate_holds_until_something_changes() {
    let folder = tempfile::tempdir().unwrap();
    let (model, certificate) = (folder.path().join("model.gguf"), folder.path().join("certificate.json"));
    std::fs::copy(golden("glm5-nano-Q4_K_M.gguf"), &model).unwrap();
    let (model_arg, certificate_arg) = (model.to_str().unwrap(), certificate.to_str().unwrap());
    let certify =
        |model: &str| lockstep().args(["verify", "-m", model, "--certificate", certificate_arg]).output().unwrap();
    // Zeros are no pass: no certificate.
    let made = certify(tiny().write(folder.path(), "zeros.gguf").to_str().unwrap());
    assert!(made.status.code() != Some(0) && !certificate.exists(), "{}", String::from_utf8_lossy(&made.stdout));
    let made = certify(model_arg);
    assert_eq!(made.status.code(), Some(0), "{}", String::from_utf8_lossy(&made.stdout));
    let whole = std::fs::read_to_string(&certificate).unwrap();
    let serve = |args: &[&str]| {
        let mut served =
            spawn(free_port(), &[&["-m", model_arg, "--certificate", certificate_arg][..], args].concat(), &[]);
        served.until("certificate")
    };
    let said = serve(&[]);
    assert!(said.contains("the certificate holds"), "{said}");
    assert!(serve(&["--tp", "2"]).contains("does not hold, so the checks are run: tp: expected 1, found 2"));
    assert!(serve(&["--attention", "dense"]).contains("attention: expected dsa, found dense"));
    // One byte in the middle of a tensor, the time as it was.
    let modified = model.metadata().unwrap().modified().unwrap();
    let mut bytes = std::fs::read(&model).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&model, &bytes).unwrap();
    assert!(serve(&[]).contains("was written to since"));
    std::fs::File::options().write(true).open(&model).unwrap().set_modified(modified).unwrap();
    assert!(serve(&[]).contains("the certificate holds"), "sizes and times alone do not show it");
    assert!(serve(&["--rehash"]).contains("sha256: expected"));
    bytes[middle] ^= 1;
    std::fs::write(&model, &bytes).unwrap();
    assert!(serve(&["--rehash"]).contains("the certificate holds"), "written anew with the same bytes");
    std::fs::write(&model, &bytes[..bytes.len() - 32]).unwrap_or_default();
    std::fs::write(&model, [&bytes[..], &[0; 32]].concat()).unwrap();
    assert!(serve(&[]).contains("size: expected"));
    std::fs::write(&model, &bytes).unwrap();
    // Every field of the setting, and the seal.
    let parsed: Json = serde_json::from_str(&whole).unwrap();
    let edit = |change: &dyn Fn(&mut Json)| {
        let mut edited = parsed.clone();
        change(&mut edited);
        std::fs::write(&certificate, edited.to_string()).unwrap();
        serve(&["--rehash"])
    };
    for field in ["version", "program", "device", "recipe"] {
        let said = edit(&|c| c["setting"][field] = json!("other"));
        assert!(said.contains("seal: the certificate was changed"), "{field}: {said}");
    }
    assert!(edit(&|c| c["format"] = json!(9)).contains("format: expected 1, found 9"));
    std::fs::write(&certificate, "{}").unwrap();
    assert!(serve(&[]).contains("the certificate does not hold"), "what is none holds nothing");
}
