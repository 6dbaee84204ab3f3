//! What systemd is told, and the unit that it runs.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use sd_notify::{NotifyState, notify};

use super::args::ServeArgs;
use crate::report::Progress;

/// How often is told how far long work is.
const EVERY: Duration = Duration::from_secs(5);
/// So long the start may take from each time that something moved, in microseconds.
const EXTEND: &str = "EXTEND_TIMEOUT_USEC=60000000";

/// Tells systemd and the log how far the start is.
pub struct Told(Mutex<(String, Instant)>);

impl Default for Told {
    fn default() -> Self {
        Told::new()
    }
}

impl Told {
    /// Of a start that begins now.
    pub fn new() -> Self {
        Told(Mutex::new((String::new(), Instant::now())))
    }

    /// What is done from now on.
    pub(super) fn stage(&self, name: &str) {
        let text = format!("checking: {name}");
        let _ = notify(&[NotifyState::Status(&text), NotifyState::Custom(EXTEND)]);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (text, Instant::now());
    }
}

impl Progress for Told {
    fn at(&self, what: &str, done: usize, all: usize) {
        let mut now = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if now.1.elapsed() >= EVERY {
            now.1 = Instant::now();
            tracing::info!("{}: {what} {done} of {all}", now.0);
            let text = format!("{}: {what} {done} of {all}", now.0);
            let _ = notify(&[NotifyState::Status(&text), NotifyState::Custom(EXTEND)]);
        }
    }
}

/// Requests are taken.
pub(super) fn ready() {
    let _ = notify(&[NotifyState::Ready, NotifyState::Status("serving")]);
}

/// The service stops.
pub(super) fn stopping() {
    let _ = notify(&[NotifyState::Stopping, NotifyState::Status("draining")]);
}

/// It lives.
pub(super) fn alive() {
    let _ = notify(&[NotifyState::Watchdog]);
}

/// A word of a unit's command line.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.into();
    }
    // Percent and dollar mean something to systemd.
    let escaped = word.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%").replace('$', "$$");
    format!("\"{escaped}\"")
}

/// Flags whose values are files.
const FILES: [&str; 6] = ["-m", "--model", "--certificate", "--api-key-file", "--chat-template", "--kernels-dir"];

/// What was typed, as a service finds it that starts elsewhere.
fn absolute(typed: &[String]) -> Vec<String> {
    let path = |path: &str| std::path::absolute(path).map_or(path.into(), |p| p.display().to_string());
    let mut is_file = false;
    let word = |word: &String| {
        let text = match word.split_once('=') {
            _ if is_file => path(word),
            Some((flag, value)) if FILES.contains(&flag) => format!("{flag}={}", path(value)),
            _ => word.clone(),
        };
        is_file = FILES.contains(&word.as_str());
        text
    };
    // A unit ends no other service by itself.
    typed.iter().filter(|word| *word != "--reap").map(word).collect()
}

/// A unit that serves with the flags of this run.
pub(super) fn unit(args: &ServeArgs, program: &str, typed: &[String]) -> String {
    let typed = absolute(typed);
    let words: Vec<String> = [program]
        .into_iter()
        .map(quoted)
        .chain(typed.iter().filter(|w| *w != "--print-unit").map(|w| quoted(w)))
        .collect();
    let (stop, what) =
        (args.drain + 15, args.model.as_ref().map_or("the built-in model".into(), |p| p.display().to_string()));
    // Only some may listen there.
    let port = if args.port < 1024 { "AmbientCapabilities=CAP_NET_BIND_SERVICE\n" } else { "" };
    let (what, watchdog) = (what.replace('%', "%%"), 2 * args.stall.unwrap_or(60).max(15));
    format!(
        "[Unit]
Description=lockstep serves {what}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
ExecStart={}
Restart=on-failure
RestartSec=5
RestartPreventExitStatus=2 78
TimeoutStartSec=120
TimeoutStopSec={stop}
WatchdogSec={watchdog}
KillMode=mixed
KillSignal=SIGTERM
LimitNOFILE=65536
{port}LimitMEMLOCK=infinity
DynamicUser=yes
CacheDirectory=lockstep
Environment=XDG_CACHE_HOME=%C/lockstep
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectControlGroups=yes
ProtectKernelTunables=yes
ProtectKernelLogs=yes
ProtectClock=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
SystemCallArchitectures=native
DeviceAllow=char-nvidia* rw
DeviceAllow=char-nvidia-uvm rw

[Install]
WantedBy=multi-user.target
",
        words.join(" ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_from_elsewhere() {
        let typed = ["serve", "-m", "a.gguf", "--certificate=/b", "--reap", "--port", "1"].map(String::from);
        let found = absolute(&typed);
        assert!(found[2].starts_with('/') && found[2].ends_with("/a.gguf"), "{found:?}");
        assert_eq!(found[3..], ["--certificate=/b", "--port", "1"]);
    }

    #[test]
    fn words_of_a_unit_mean_what_they_say() {
        assert_eq!(quoted("--port=8000"), "--port=8000");
        assert_eq!(quoted("/a b/100%$x\"y\\"), "\"/a b/100%%$$x\\\"y\\\\\"");
        assert_eq!(quoted(""), "\"\"");
    }
}
