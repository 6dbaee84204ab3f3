//! The port: connections, how many, and how long each may take.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use super::api::error::ApiError;
use super::http::Service;
use super::state::State;

/// Time for the head of a request to come whole.
const HEAD_TIME: Duration = Duration::from_secs(15);
/// Headers of a request, and bytes of its head.
const HEADERS: usize = 64;
const HEAD_BYTES: usize = 64 << 10;

/// Takes connections, at most so many at once, until the service has stopped.
pub async fn listen(listener: TcpListener, service: Arc<Service>, most: usize) {
    let room = Arc::new(Semaphore::new(most));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(e) => {
                // Out of descriptors: some will be free again.
                tracing::warn!("a connection could not be taken: {e}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Ok(place) = room.clone().try_acquire_owned() else {
            tokio::spawn(refuse(stream));
            continue;
        };
        let _ = stream.set_nodelay(true); // frames are small; without it they only come later
        let (service, mut state) = (service.clone(), service.shared.watch());
        tokio::spawn(async move {
            let _place = place;
            let answer = service_fn(move |request| {
                let service = service.clone();
                async move { Ok::<_, Infallible>(service.answer(request).await) }
            });
            let mut http = http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIME).max_headers(HEADERS).max_buf_size(HEAD_BYTES);
            // Whoever comes while the service stops is told so, once.
            let goes_on = |s: &State| matches!(s, State::Loading | State::Ready);
            let stopping = !goes_on(&state.borrow());
            http.keep_alive(!stopping);
            let mut connection = std::pin::pin!(http.serve_connection(TokioIo::new(stream), answer));
            // What a client did to its connection is its own affair.
            tokio::select! {
                _ = connection.as_mut() => return,
                _ = state.wait_for(|s| !goes_on(s)), if !stopping => {}
            }
            if !stopping {
                connection.as_mut().graceful_shutdown();
            }
            let _ = connection.await;
        });
    }
}

/// Tells one connection too many that it is.
async fn refuse(mut stream: TcpStream) {
    let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_connections", "there are too many connections");
    let body = error.json().to_string();
    let reply = format!(
        "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    // It may be gone by now.
    let _ = tokio::time::timeout(Duration::from_secs(1), stream.write_all(reply.as_bytes())).await;
}
