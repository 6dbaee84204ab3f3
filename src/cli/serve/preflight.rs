//! What can be known before a byte of weights is read: who has the port, whether the degree is legal, whether memory
//! suffices, and what an earlier service has left behind.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::checkpoint::Checkpoint;
use crate::cli::CliError;
use crate::engine::{Backend, Options};
use crate::report::table::bytes;
use crate::shard::TpPlan;
use crate::shard::budget::Budget;

/// What memory there is for a model.
#[derive(Clone, Copy, Debug, Default)]
pub struct Room {
    /// Whether two engines fit at a time.
    pub holds_two: bool,
}

/// Bytes of activations, recordings and libraries on a rank, roughly.
const BESIDE: u64 = 512 << 20;

/// Whether a model fits: weights by the plan, cache and logits by the options.
///
/// # Errors
/// A degree that is not legal, types that cannot be read, too little memory.
pub(super) fn memory(
    checkpoint: &Checkpoint,
    backend: &dyn Backend,
    tp: usize,
    options: &Options,
) -> Result<Room, CliError> {
    let c = checkpoint.config();
    let plan = TpPlan::new(c, tp)?;
    let weights = Budget::new(checkpoint, &plan)?.trunk_bytes();
    let cache = (c.layers * options.cache_tokens * (c.kv_lora + c.rope + c.index_dim) * 4) as u64;
    let logits = (options.chunk * c.padded_vocab(tp) / tp * 4) as u64;
    let most = weights.iter().copied().max().unwrap_or(0);
    let each = most + cache + logits;
    let lacks = |of: String, needed: u64, free: u64| {
        CliError::Refused(format!(
            "{of}: expected {} for {tp} ranks (weights {}, cache of {} tokens {}, logits {} each), found {} free; \
             --cache-tokens and --chunk take less, another --tp cuts the weights",
            bytes(needed),
            bytes(most),
            options.cache_tokens,
            bytes(cache),
            bytes(logits),
            bytes(free)
        ))
    };
    #[cfg(feature = "cuda")]
    if let Some(cuda) = backend.cuda() {
        let gpus = cuda.gpus(tp)?;
        let ranks = (tp / gpus.len().max(1)).max(1) as u64;
        let mut holds_two = true;
        for ordinal in gpus {
            let gpu = crate::device::cuda::gpu::Gpu::open(ordinal, cuda.cubins.clone());
            let (free, _) = gpu.and_then(|gpu| gpu.memory()).map_err(crate::engine::EngineError::from)?;
            let (needed, free) = (ranks * each + BESIDE, free as u64);
            if needed > free {
                return Err(lacks(format!("GPU {ordinal}"), needed, free));
            }
            holds_two &= 2 * needed + BESIDE <= free;
        }
        return Ok(Room { holds_two });
    }
    let _ = backend;
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = crate::device::cpu::host::kib(&text, "MemAvailable:").unwrap_or(u64::MAX);
    let free = free.min(group_limit().unwrap_or(u64::MAX));
    let needed = weights.iter().sum::<u64>() + tp as u64 * (cache + logits);
    match needed > free {
        true => Err(lacks("main memory".into(), needed, free)),
        false => Ok(Room { holds_two: 3 * needed + BESIDE <= free }),
    }
}

/// What the control group leaves, if it limits memory.
fn group_limit() -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse::<u64>().ok();
    Some(read("memory.max")?.saturating_sub(read("memory.current")?))
}

/// Who listens at a port, as far as /proc shows it.
pub(super) fn holder(address: SocketAddr) -> Option<String> {
    let port = format!(":{:04X}", address.port());
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| std::fs::read_to_string(path).unwrap_or_default());
    let mut listening = tables.iter().flat_map(|table| table.lines().skip(1)).filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        (fields.get(1)?.ends_with(&port) && fields.get(3) == Some(&"0A"))
            .then(|| fields.get(9).map(ToString::to_string))?
    });
    let socket = format!("socket:[{}]", listening.next()?);
    let numbered =
        |path: &PathBuf| path.file_name().is_some_and(|n| n.as_encoded_bytes().iter().all(u8::is_ascii_digit));
    let processes = std::fs::read_dir("/proc").ok()?.filter_map(|entry| Some(entry.ok()?.path())).filter(numbered);
    let holds = |process: &PathBuf| {
        let open = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        open.into_iter().any(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to.as_os_str() == socket.as_str()))
    };
    let process = processes.into_iter().find(holds)?;
    let line = std::fs::read(process.join("cmdline")).unwrap_or_default();
    let line = String::from_utf8_lossy(&line).replace('\0', " ");
    Some(format!("process {} ({})", process.file_name()?.to_string_lossy(), line.trim()))
}

/// A service that runs, so that what is left behind can be told from another process of the same number.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Running {
    pid: u32,
    /// When it started, in clock ticks since the machine did.
    started: u64,
    /// Which start of the machine that was.
    boot: String,
}

impl Running {
    fn of(pid: u32) -> Option<Self> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name may hold anything; what follows the last parenthesis is numbers.
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
        if fields.first() == Some(&"Z") {
            return None; // it has ended, and only its parent does not know yet
        }
        let started = fields.get(19)?.parse().ok()?;
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?.trim().into();
        Some(Running { pid, started, boot })
    }
}

/// The note that a service of a port leaves while it runs.
pub(super) struct RunFile(PathBuf);

impl RunFile {
    /// Looks at what an earlier service has left; ends it if `reap` says so.
    ///
    /// # Errors
    /// A service that still runs, and one that does not end.
    pub(super) fn check(port: u16, reap: bool) -> Result<Self, CliError> {
        let folder = std::env::var_os("XDG_RUNTIME_DIR")
            .filter(|v| !v.is_empty())
            .map_or_else(std::env::temp_dir, PathBuf::from);
        let path = folder.join(format!("lockstep-serve-{port}.json"));
        let left = std::fs::read(&path).ok().and_then(|text| serde_json::from_slice::<Running>(&text).ok());
        let lives = |left: &Running| Running::of(left.pid).as_ref() == Some(left);
        if let Some(left) = left.filter(lives) {
            if !reap {
                return Err(CliError::Refused(format!(
                    "a service of port {port} still runs: process {} (by {}); --reap ends it",
                    left.pid,
                    path.display()
                )));
            }
            end(&left)?;
        }
        Ok(RunFile(path))
    }

    /// Says that this process serves.
    pub(super) fn write(&self) {
        let text = Running::of(std::process::id()).and_then(|own| serde_json::to_vec(&own).ok());
        // Without it the next start only knows less.
        let _ = text.map(|text| std::fs::write(&self.0, text));
    }

    /// Takes the note away.
    pub(super) fn remove(&self) {
        let _ = std::fs::remove_file(&self.0);
    }

    /// Where it is.
    #[cfg(test)]
    pub(super) fn path(&self) -> &std::path::Path {
        &self.0
    }
}

fn end(left: &Running) -> Result<(), CliError> {
    let kill =
        |signal| rustix::process::Pid::from_raw(left.pid as i32).map(|pid| rustix::process::kill_process(pid, signal));
    let gone = |time: Duration| {
        let until = Instant::now() + time;
        while Running::of(left.pid).as_ref() == Some(left) {
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        true
    };
    kill(rustix::process::Signal::TERM);
    if gone(Duration::from_secs(2)) {
        return Ok(());
    }
    kill(rustix::process::Signal::KILL);
    match gone(Duration::from_secs(5)) {
        true => Ok(()),
        false => Err(CliError::Refused(format!("process {} does not end", left.pid))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_listens_is_found() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let found = holder(listener.local_addr().unwrap()).unwrap();
        assert!(found.starts_with(&format!("process {} (", std::process::id())), "{found}");
        let free = listener.local_addr().unwrap();
        drop(listener);
        assert_eq!(holder(free), None);
    }

    #[test]
    fn only_the_very_process_is_taken_for_one_left_behind() {
        let own = Running::of(std::process::id()).unwrap();
        assert_eq!(Running::of(own.pid), Some(Running { ..own }));
        let file = RunFile::check(1, false).unwrap();
        std::fs::write(file.path(), br#"{"pid":1,"started":1,"boot":"x"}"#).unwrap();
        assert!(RunFile::check(1, true).is_ok(), "another process with that number is left alone");
        file.write();
        assert!(RunFile::check(1, false).is_err(), "this one serves");
        file.remove();
        assert!(RunFile::check(1, false).is_ok());
    }
}
