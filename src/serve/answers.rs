//! From jobs to replies: their places, what the driver says of them, whole or frame by frame, and how each wait ends: with
//! the answers, the client, or the service.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use hyper::body::{Bytes, Frame};
use hyper::{Response, StatusCode};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant as Tick, MissedTickBehavior, interval_at, timeout};

use super::api::error::ApiError;
use super::api::frame::event;
use super::api::reply::Reply;
use super::driver::{Job, Order, Said};
use super::http::{Body, Service, put, whole};
use super::state::{Shared, State};
use super::turn::TurnOptions;
use crate::engine::scheduler::Request as Wanted;

/// A request's number, and for each of its prompts what is wanted.
pub(super) struct Jobs {
    pub number: u64,
    pub all: Vec<(Wanted, Vec<u64>, TurnOptions)>,
}

/// A request that has places. When it goes, for whatever reason, its sequences go.
struct Ticket {
    number: u64,
    places: usize,
    since: Instant,
    shared: Arc<Shared>,
    orders: Sender<Order>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.shared.give_places(self.places, self.since.elapsed());
        // Nobody obeys once the driver is gone.
        let _ = self.orders.send(Order::Cancel(self.number));
    }
}

impl Service {
    /// Gives the jobs to the driver, and replies.
    pub(super) async fn submit(
        self: Arc<Self>,
        jobs: Jobs,
        mut reply: Box<dyn Reply>,
        stream: bool,
    ) -> Result<Response<Body>, ApiError> {
        let loaded = self.running()?;
        let places: usize = jobs.all.iter().map(|(_, seeds, _)| seeds.len()).sum();
        let most = loaded.model.sequences + self.limits.queue;
        if places > most {
            let message = format!("expected at most {most} answers to one request, found {places}");
            return Err(ApiError::field("prompt", message));
        }
        if !self.shared.take_places(places, most) {
            let after = self.shared.retry_after(loaded.model.sequences);
            let message = format!("{most} answers are asked for already; try again in {after} s");
            let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message);
            return Err(ApiError { retry_after: Some(after), ..error });
        }
        let (number, orders) = (jobs.number, loaded.orders.clone());
        let ticket = Ticket { number, places, since: Instant::now(), shared: self.shared.clone(), orders };
        let (said, hear) = mpsc::unbounded_channel();
        let mut first = 0;
        for (request, seeds, turn) in jobs.all {
            let n = seeds.len();
            let job = Job { number, request, seeds, first, turn, said: said.clone() };
            first += n;
            // A driver that is gone has said why.
            let _ = ticket.orders.send(Order::Add(Box::new(job)));
        }
        drop(said);
        if stream {
            let (give, frames) = mpsc::channel(64);
            tokio::spawn(self.stream(reply, ticket, hear, give));
            return Ok(event_stream(Frames(frames)));
        }
        let _ticket = ticket;
        self.collect(&mut *reply, hear).await?;
        Ok(whole(StatusCode::OK, &reply.whole()))
    }

    /// Hears all answers.
    async fn collect(&self, reply: &mut dyn Reply, mut hear: mpsc::UnboundedReceiver<Said>) -> Result<(), ApiError> {
        let mut state = self.shared.watch();
        while !reply.is_done() {
            tokio::select! {
                biased;
                said = hear.recv() => match said {
                    Some(said) => reply.take(said, &mut Vec::new())?,
                    None => return Err(self.over().await),
                },
                over = over(&mut state) => return Err(over),
            }
        }
        Ok(())
    }

    /// Why nothing more is said: the driver tells its end before it goes, or a moment later.
    async fn over(&self) -> ApiError {
        let mut state = self.shared.watch();
        let told = timeout(Duration::from_secs(1), over(&mut state)).await;
        told.unwrap_or_else(|_| ApiError::internal("the answer was given up"))
    }

    /// Sends the frames of a stream, all that there are at once. It ends with the client, the answers, or the service.
    async fn stream(
        self: Arc<Self>,
        mut reply: Box<dyn Reply>,
        ticket: Ticket,
        mut hear: mpsc::UnboundedReceiver<Said>,
        give: mpsc::Sender<Bytes>,
    ) {
        let _ticket = ticket;
        let mut state = self.shared.watch();
        let (every, patience) = (self.limits.comment, self.limits.write_time);
        let mut clock = interval_at(Tick::now() + every, every);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // What lasts as long as the stream is begun once, not again for every token.
        let (mut gone, mut over) = (pin!(give.closed()), pin!(over(&mut state)));
        let (mut said, mut out, mut last) = (Vec::new(), Vec::new(), false);
        reply.opening(&mut out);
        loop {
            if !last && reply.is_done() {
                reply.closing(&mut out);
                out.extend_from_slice(DONE);
                last = true;
            }
            if !out.is_empty() {
                clock.reset();
                let frames = Bytes::from(std::mem::take(&mut out));
                if !matches!(timeout(patience, give.send(frames)).await, Ok(Ok(()))) {
                    return;
                }
            }
            if last {
                return;
            }
            // Who has gone while tokens come is found out when they are sent.
            let error = tokio::select! {
                biased;
                n = hear.recv_many(&mut said, AT_ONCE) => match n {
                    0 => Some(self.over().await),
                    _ => said.drain(..).try_for_each(|said| reply.take(said, &mut out)).err(),
                },
                () = &mut gone => return,
                error = &mut over => Some(error),
                _ = clock.tick() => {
                    // Whoever waits for room must know that somebody is there.
                    out.extend_from_slice(b": waiting\n\n");
                    None
                }
            };
            if let Some(error) = error {
                event(&mut out, &error.json());
                out.extend_from_slice(DONE);
                last = true;
            }
        }
    }
}

/// Most of what the driver says that goes out in one piece.
const AT_ONCE: usize = 64;

/// The last line of a stream.
const DONE: &[u8] = b"data: [DONE]\n\n";

/// Waits until no answer will come any more, and says why.
async fn over(state: &mut watch::Receiver<State>) -> ApiError {
    let ended = state.wait_for(|s| matches!(s, State::Ended | State::Failed(_))).await.map(|s| s.clone());
    match ended {
        Ok(State::Failed(why)) => ApiError::unavailable("engine_failed", why, 30),
        _ => ApiError::unavailable("draining", "the service stopped before the answer was whole", 5),
    }
}

fn event_stream(frames: Frames) -> Response<Body> {
    let mut response = Response::new(frames.boxed_unsync());
    let headers = response.headers_mut();
    put(headers, "content-type", "text/event-stream");
    put(headers, "cache-control", "no-cache");
    put(headers, "x-accel-buffering", "no");
    response
}

/// A body of frames as they come.
struct Frames(mpsc::Receiver<Bytes>);

impl hyper::body::Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }
}
