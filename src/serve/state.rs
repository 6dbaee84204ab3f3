//! What becomes of the service: read by every task, written by whoever finds out.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// Where the service stands. It only goes forward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The port is bound; the model is loaded and checked.
    Loading,
    /// Requests are taken.
    Ready,
    /// What runs may end, nothing new is taken.
    Draining,
    /// The time for that is over.
    Ended,
    /// No token will come any more, and why.
    Failed(String),
}

/// A step is in flight that began so many milliseconds after the pulse; 0 if none is.
const NONE: u64 = 0;

/// The state, and the pulse of the thread that makes tokens.
#[derive(Debug)]
pub struct Shared {
    state: watch::Sender<State>,
    born: Instant,
    steps: AtomicU64,
    began: AtomicU64,
    slowest: AtomicU64,
    busy: AtomicBool,
    asked: AtomicUsize,
    seconds: AtomicU64,
}

impl Default for Shared {
    fn default() -> Self {
        Shared {
            state: watch::Sender::new(State::Loading),
            born: Instant::now(),
            steps: AtomicU64::new(0),
            began: AtomicU64::new(NONE),
            slowest: AtomicU64::new(0),
            busy: AtomicBool::new(false),
            asked: AtomicUsize::new(0),
            seconds: AtomicU64::new(1000),
        }
    }
}

impl Shared {
    /// Where the service stands.
    pub fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// Whoever waits for a change.
    pub fn watch(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    /// Goes forward. A service that has failed or ended stays so.
    pub fn enter(&self, state: State) {
        self.state.send_if_modified(|now| {
            let rank = |s: &State| match s {
                State::Loading => 0,
                State::Ready => 1,
                State::Draining => 2,
                State::Ended | State::Failed(_) => 3,
            };
            let forward = rank(&state) > rank(now);
            if forward {
                *now = state;
            }
            forward
        });
    }

    fn now(&self) -> u64 {
        self.born.elapsed().as_millis() as u64 + 1
    }

    /// A step begins.
    pub fn begin_step(&self) {
        self.began.store(self.now(), Ordering::Relaxed);
    }

    /// It has ended, whatever came of it.
    pub fn end_step(&self) {
        let took = self.now().saturating_sub(self.began.swap(NONE, Ordering::Relaxed));
        self.slowest.fetch_max(took, Ordering::Relaxed);
        self.steps.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether there is work.
    pub fn set_busy(&self, busy: bool) {
        self.busy.store(busy, Ordering::Relaxed);
    }

    /// Whether there is work.
    pub fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed)
    }

    /// Steps that have ended.
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// How long the step in flight takes already.
    pub fn in_step(&self) -> Duration {
        let began = self.began.load(Ordering::Relaxed);
        Duration::from_millis(if began == NONE { 0 } else { self.now().saturating_sub(began) })
    }

    /// The slowest step that has ended.
    pub fn slowest(&self) -> Duration {
        Duration::from_millis(self.slowest.load(Ordering::Relaxed))
    }

    /// Takes `n` places among at most `most` answers that are asked for; false if there are not so many left.
    pub fn take_places(&self, n: usize, most: usize) -> bool {
        let more = |asked: usize| (asked + n <= most).then_some(asked + n);
        self.asked.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Gives them back, with how long they were held.
    pub fn give_places(&self, n: usize, held: Duration) {
        self.asked.fetch_sub(n, Ordering::Relaxed);
        // An average of the last few; two that end at once may lose one of them.
        let average = (7 * self.seconds.load(Ordering::Relaxed) + held.as_millis() as u64) / 8;
        self.seconds.store(average, Ordering::Relaxed);
    }

    /// Answers that are asked for and not given.
    pub fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }

    /// Whole seconds until a place is likely to be free, where `at_once` answers run at once.
    pub fn retry_after(&self, at_once: usize) -> u64 {
        let one = self.seconds.load(Ordering::Relaxed) as f64 / 1000.0;
        (one / at_once.max(1) as f64).ceil().clamp(1.0, 60.0) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_only_goes_forward() {
        let shared = Shared::default();
        shared.enter(State::Ready);
        shared.enter(State::Failed("a rank is gone".into()));
        shared.enter(State::Ready);
        shared.enter(State::Ended);
        assert_eq!(shared.state(), State::Failed("a rank is gone".into()));
    }

    #[test]
    fn places_are_taken_whole_and_given_back() {
        let shared = Shared::default();
        assert!(shared.take_places(3, 4) && !shared.take_places(2, 4) && shared.take_places(1, 4));
        shared.give_places(3, Duration::from_secs(2));
        assert_eq!((shared.asked(), shared.retry_after(1)), (1, 2));
        shared.give_places(1, Duration::from_secs(900));
        assert_eq!((shared.retry_after(1), shared.retry_after(100)), (60, 2));
    }

    #[test]
    fn a_pulse_tells_a_step_in_flight() {
        let shared = Shared::default();
        assert_eq!(shared.in_step(), Duration::ZERO);
        shared.begin_step();
        std::thread::sleep(Duration::from_millis(5));
        assert!(shared.in_step() >= Duration::from_millis(4));
        shared.end_step();
        assert_eq!((shared.in_step(), shared.steps()), (Duration::ZERO, 1));
        assert!(shared.slowest() >= Duration::from_millis(4));
    }
}
