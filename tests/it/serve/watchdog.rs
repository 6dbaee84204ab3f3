//! systemd's watchdog: it hears of a service that waits or works, and of one that hangs no more. Whom to tell is in the
//! environment, which all tests of a process share: so the services here run in processes of their own, which are this
//! program again, with the name of one test.

use std::io::Write;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use lockstep::cli::serve::watchdog::watch;
use serde_json::json;

use super::client::{CHAT, JSON, connect, request};
use super::script::{Play, Setup, start};

/// The step in which a script hangs that does.
const HANGS: usize = 40;
/// A service that is not heard of for so long would be ended.
const PATIENCE: Duration = Duration::from_secs(2);
/// The parts of its life.
const PARTS: [&str; 3] = ["STATUS=waits", "STATUS=works", "STATUS=hangs or goes on"];
const END: &str = "STATUS=end";

/// A service that waits, then works, and then hangs if that is wanted. It tells when.
fn life(hangs_at: Option<usize>) {
    // Run by itself, without anybody to tell, it is no test.
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let systemd = UnixDatagram::unbound().unwrap();
    let tell = |part: &str| assert!(systemd.send_to(part.as_bytes(), &path).is_ok());
    let play = Play { prefill: 100_000, step: Duration::from_millis(30), hangs_at, ..Play::default() };
    let running = start(&Setup::default(), play);
    // Only systemd is to find out.
    watch(running.service.shared.clone(), Some(Duration::from_secs(3600))).unwrap();
    tell(PARTS[0]);
    std::thread::sleep(PATIENCE);
    let body = json!({ "messages": [{ "role": "user", "content": "hello" }], "stream": true }).to_string();
    let mut client = connect(running.port);
    client.write_all(request("POST", CHAT, &[JSON], &body).as_bytes()).unwrap();
    running.wait("it works", |seen| seen.steps > 0);
    tell(PARTS[1]);
    running.wait("it hangs or goes on", |seen| seen.steps >= HANGS);
    // The last step that ended may be told of once more.
    std::thread::sleep(Duration::from_millis(600));
    tell(PARTS[2]);
    std::thread::sleep(PATIENCE + Duration::from_millis(500));
    tell(END);
    // What hangs is waited for by nobody.
    std::process::exit(0);
}

#[test]
#[ignore = "the process of `systemd_hears_no_more_of_a_service_that_hangs`"]
fn one_that_hangs() {
    life(Some(HANGS));
}

#[test]
#[ignore = "the process of `systemd_hears_of_a_service_that_waits_or_works`"]
fn one_that_goes_on() {
    life(None);
}

/// How often, and with what longest silence, systemd hears of a service in each part of its life.
fn heard(test: &str) -> Vec<(usize, Duration)> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", &format!("serve::watchdog::{test}")])
        .env("NOTIFY_SOCKET", &path)
        .env("WATCHDOG_USEC", PATIENCE.as_micros().to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let (mut parts, mut last) = (Vec::new(), Instant::now());
    loop {
        let mut bytes = [0; 4096];
        let n = socket.recv(&mut bytes).unwrap();
        let said = String::from_utf8_lossy(&bytes[..n]).into_owned();
        let watchdog = said.lines().any(|line| line == "WATCHDOG=1");
        if let Some((times, silence)) = parts.last_mut() {
            *times += usize::from(watchdog);
            *silence = last.elapsed().max(*silence);
        }
        last = Instant::now();
        if said == END {
            break;
        }
        if !watchdog {
            assert_eq!(Some(&said.as_str()), PARTS.get(parts.len()), "{parts:?}");
            parts.push((0, Duration::ZERO));
        }
    }
    assert!(child.wait().unwrap().success());
    parts
}

fn assert_alive(part: &(usize, Duration)) {
    assert!(part.0 >= 2 && part.1 < PATIENCE, "{part:?}");
}

#[test]
fn systemd_hears_no_more_of_a_service_that_hangs() {
    let parts = heard("one_that_hangs");
    parts[..2].iter().for_each(assert_alive);
    assert!(parts[2].0 == 0 && parts[2].1 > PATIENCE, "{parts:?}");
}

#[test]
fn systemd_hears_of_a_service_that_waits_or_works() {
    let parts = heard("one_that_goes_on");
    parts.iter().for_each(assert_alive);
}
