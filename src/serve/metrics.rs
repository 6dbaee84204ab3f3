//! What is counted, for those who watch.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::driver::Counters;

/// In which state pages are.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Pages {
    /// free, owned, cached.
    pub state: &'static str,
}

/// Why a sequence was given up.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Reason {
    /// gone, stop.
    pub reason: &'static str,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Answered {
    /// The path.
    pub route: &'static str,
    /// The HTTP status.
    pub status: u16,
}

/// The counters, and the registry that writes them.
pub struct Metrics {
    registry: Registry,
    waiting: Gauge,
    running: Gauge,
    pages: Family<Pages, Gauge>,
    preempted: Counter<u64, AtomicU64>,
    shared: Counter<u64, AtomicU64>,
    host_steps: Counter<u64, AtomicU64>,
    /// Tokens of prompts that were asked for.
    pub prompt_tokens: Counter<u64, AtomicU64>,
    /// Tokens that were made.
    pub tokens: Counter<u64, AtomicU64>,
    /// Sequences that were given up.
    pub cancelled: Family<Reason, Counter>,
    /// Requests by route and status.
    pub requests: Family<Answered, Counter>,
    /// Seconds of a step.
    pub step: Histogram,
    /// Seconds from a request to its first token.
    pub first_token: Histogram,
    /// Seconds between two tokens of a sequence.
    pub between_tokens: Histogram,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// Seconds, from half a millisecond in factors of two.
fn seconds(buckets: u16) -> Histogram {
    Histogram::new(prometheus_client::metrics::histogram::exponential_buckets(0.0005, 2.0, buckets))
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Metrics {
            registry: Registry::with_prefix("lockstep"),
            waiting: Gauge::default(),
            running: Gauge::default(),
            pages: Family::default(),
            preempted: Counter::default(),
            shared: Counter::default(),
            host_steps: Counter::default(),
            prompt_tokens: Counter::default(),
            tokens: Counter::default(),
            cancelled: Family::default(),
            requests: Family::default(),
            step: seconds(16),
            first_token: seconds(20),
            between_tokens: seconds(16),
        };
        let mut registry = std::mem::take(&mut metrics.registry);
        registry.register("sequences_waiting", "Sequences that wait for room", metrics.waiting.clone());
        registry.register("sequences_running", "Sequences that run", metrics.running.clone());
        registry.register("pages", "Pages of the key-value cache by state", metrics.pages.clone());
        registry.register("preemptions", "Times that a sequence gave its pages back", metrics.preempted.clone());
        registry.register("cached_tokens", "Tokens of prompts that were in the cache", metrics.shared.clone());
        registry.register("host_steps", "Steps whose tokens the host chose", metrics.host_steps.clone());
        registry.register("prompt_tokens", "Tokens of prompts", metrics.prompt_tokens.clone());
        registry.register("generated_tokens", "Tokens that were made", metrics.tokens.clone());
        registry.register("cancelled", "Sequences that were given up, by reason", metrics.cancelled.clone());
        registry.register("requests", "Requests by route and status", metrics.requests.clone());
        registry.register("step_seconds", "Time of a step", metrics.step.clone());
        registry.register("first_token_seconds", "Time from request to first token", metrics.first_token.clone());
        registry.register("between_tokens_seconds", "Time between tokens", metrics.between_tokens.clone());
        Metrics { registry, ..metrics }
    }
}

impl Metrics {
    /// Takes note of what the scheduler counts.
    pub fn note(&self, counters: &Counters) {
        let Counters { counts, pages } = counters;
        self.waiting.set(counts.waiting as i64);
        self.running.set(counts.running as i64);
        for (state, n) in [("free", pages.free), ("owned", pages.owned), ("cached", pages.cached)] {
            self.pages.get_or_create(&Pages { state }).set(n as i64);
        }
        for (counter, all) in
            [(&self.preempted, counts.preempted), (&self.shared, counts.shared), (&self.host_steps, counts.host_steps)]
        {
            counter.inc_by(all.saturating_sub(counter.get()));
        }
    }

    /// As text, in the OpenMetrics format.
    ///
    /// # Errors
    /// None that a string can have.
    pub fn text(&self) -> Result<String, std::fmt::Error> {
        let mut text = String::new();
        encode(&mut text, &self.registry)?;
        Ok(text)
    }
}
