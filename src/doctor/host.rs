//! What every machine has: shared memory and main memory.

use serde_json::json;

use crate::device::cpu::host::kib;
use crate::report::table::bytes;
use crate::report::{Check, Verdict};

/// Shared memory with less room than this fails ranks of several GPUs that talk through the host; containers often have 64 MiB.
const LEAST_SHARED: u64 = 64 << 20;

/// Shared memory and main memory.
pub fn findings() -> Vec<Check> {
    vec![shared_memory(), main_memory()]
}

fn shared_memory() -> Check {
    const NAME: &str = "shared memory";
    match rustix::fs::statvfs("/dev/shm") {
        Err(e) => Check::new(NAME, Verdict::NotApplicable, format!("/dev/shm cannot be looked at: {e}")),
        Ok(fs) => {
            let (size, free) = (fs.f_blocks.saturating_mul(fs.f_frsize), fs.f_bavail.saturating_mul(fs.f_frsize));
            let detail = format!("/dev/shm: {} free of {}", bytes(free), bytes(size));
            let (verdict, detail) = match free < LEAST_SHARED {
                false => (Verdict::Match, detail),
                true => {
                    let advice =
                        "NCCL may fail where GPUs cannot reach each other directly; in a container use --shm-size=1g";
                    (Verdict::Drift, format!("{detail}: {advice}"))
                }
            };
            Check::new(NAME, verdict, detail).with(json!({ "bytes": size, "free_bytes": free }))
        }
    }
}

fn main_memory() -> Check {
    const NAME: &str = "main memory";
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    match (kib(&text, "MemAvailable:"), kib(&text, "MemTotal:")) {
        (Some(free), Some(total)) => {
            let detail = format!("{} available of {}", bytes(free), bytes(total));
            Check::new(NAME, Verdict::Match, detail).with(json!({ "bytes": total, "available_bytes": free }))
        }
        _ => Check::new(NAME, Verdict::NotApplicable, "/proc/meminfo does not say how much memory is available"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_bytes() {
        let text = "MemTotal:       16000 kB\nMemAvailable:    1 kB\nOdd: x kB\nNone: 5\n";
        assert_eq!(kib(text, "MemTotal:"), Some(16_384_000));
        assert_eq!(kib(text, "MemAvailable:"), Some(1024));
        for name in ["Odd:", "None:", "Absent:"] {
            assert_eq!(kib(text, name), None);
        }
    }
}
