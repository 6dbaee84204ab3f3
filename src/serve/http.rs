//! What becomes of a request: its route, who may ask, its body, and what is asked. Answers are waited for in `answers`.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::http::request::Parts;
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use serde_json::{Value as Json, json};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::answers::Jobs;
use super::api::ask::{Ask, seed_of};
use super::api::error::ApiError;
use super::api::fields::Fields;
use super::api::reply::{Head, Reply};
use super::api::{Model, chat, completions};
use super::driver::Order;
use super::keys::Keys;
use super::metrics::{Answered, Metrics};
use super::state::{Shared, State};
use super::turn::{Markers, TurnOptions};
use crate::engine::sampler::Sampling;
use crate::engine::scheduler::Request as Wanted;

/// A reply's body.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Limits of requests.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of a body.
    pub body: usize,
    /// Time for a body to come.
    pub body_time: Duration,
    /// Answers that wait beside those that run.
    pub queue: usize,
    /// A stream without a frame says so often that it lives.
    pub comment: Duration,
    /// Time for a client to take a frame.
    pub write_time: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let s = Duration::from_secs;
        Limits { body: 8 << 20, body_time: s(30), queue: 256, comment: s(10), write_time: s(60) }
    }
}

/// What is there once the model is loaded and checked.
pub(super) struct Loaded {
    pub model: Arc<Model>,
    defaults: Sampling,
    pub orders: Sender<Order>,
}

/// The service.
pub struct Service {
    /// Its state.
    pub shared: Arc<Shared>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    pub(super) limits: Limits,
    keys: Keys,
    /// The origin whose pages may ask, if any.
    cors: Option<HeaderValue>,
    loaded: OnceLock<Loaded>,
    numbers: AtomicU64,
    /// Texts that are encoded at once.
    encoding: Arc<Semaphore>,
    /// Names of fields that were ignored and are in the log.
    ignored: Mutex<BTreeSet<String>>,
}

/// The paths, what each may be asked with, and whether a key is needed.
const ROUTES: [(&str, &str, bool); 11] = [
    ("/health", "GET", false),
    ("/live", "GET", false),
    ("/metrics", "GET", false),
    ("/v1/models", "GET", true),
    ("/v1/models/", "GET", true),
    ("/v1/verification", "GET", true),
    ("/v1/chat/completions", "POST", true),
    ("/v1/completions", "POST", true),
    ("/tokenize", "POST", true),
    ("/detokenize", "POST", true),
    ("", "", false),
];

impl Service {
    /// A service that is loading.
    pub fn new(limits: Limits, keys: Keys, cors: Option<HeaderValue>) -> Self {
        Service {
            shared: Arc::default(),
            metrics: Arc::default(),
            limits,
            keys,
            cors,
            loaded: OnceLock::new(),
            numbers: AtomicU64::new(0),
            encoding: Arc::new(Semaphore::new(2)),
            ignored: Mutex::default(),
        }
    }

    /// Requests are taken from now on: for this model, in these defaults, by orders to its driver.
    pub fn ready(&self, model: Model, defaults: Sampling, orders: Sender<Order>) {
        let loaded = Loaded { model: Arc::new(model), defaults, orders };
        if self.loaded.set(loaded).is_ok() {
            self.shared.enter(State::Ready);
        }
    }

    /// Answers a request.
    pub async fn answer(self: Arc<Self>, request: Request<Incoming>) -> Response<Body> {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let id = format!("{:08x}-{number}", std::process::id());
        let (path, method) = (request.uri().path().to_string(), request.method().clone());
        let is = |(known, ..): &&(&str, &str, bool)| path == *known || known.ends_with('/') && path.starts_with(*known);
        let route = ROUTES.iter().find(is).unwrap_or(&ROUTES[ROUTES.len() - 1]);
        let began = Instant::now();
        let (head, body) = request.into_parts();
        let mut body = Some(body);
        let mut response = match self.clone().route(route, number, &head, &mut body).await {
            Ok(response) => response,
            Err(error) => {
                // Whoever still sends would find the connection closed in place of the error.
                if let Some(rest) = body.take() {
                    let _ = timeout(LINGER, whole_body(rest, self.limits.body)).await;
                }
                failed(&error)
            }
        };
        let status = response.status().as_u16();
        self.metrics.requests.get_or_create(&Answered { route: route.0, status }).inc();
        let ms = began.elapsed().as_millis() as u64;
        match route.2 {
            true => tracing::info!(id, %method, path = route.0, status, ms, "answered"),
            // What watches asks often.
            false => tracing::debug!(id, %method, path = route.0, status, ms, "answered"),
        }
        let headers = response.headers_mut();
        put(headers, "x-request-id", &id);
        if self.loaded.get().is_some_and(|loaded| !loaded.model.verified) {
            put(headers, "x-lockstep-verified", "no");
        }
        if let Some(origin) = &self.cors {
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
            put(headers, "access-control-allow-headers", "authorization, content-type, x-api-key");
            put(headers, "vary", "origin");
        }
        response
    }

    async fn route(
        self: Arc<Self>,
        (path, allowed, locked): &(&'static str, &'static str, bool),
        number: u64,
        head: &Parts,
        body: &mut Option<Incoming>,
    ) -> Result<Response<Body>, ApiError> {
        let method = &head.method;
        if path.is_empty() {
            let message = format!("there is nothing at {}", head.uri.path());
            return Err(ApiError::new(StatusCode::NOT_FOUND, "not_found", message));
        }
        if method == Method::OPTIONS && self.cors.is_some() {
            return Ok(Response::new(Body::default()));
        }
        if method.as_str() != *allowed && !(method == Method::HEAD && *allowed == "GET") {
            let message = format!("{path}: expected {allowed}, found {method}");
            let error = ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message);
            return Err(ApiError { allow: Some(allowed), ..error });
        }
        let key = self.keys.admits(&head.headers);
        let Some(key) = key.or_else(|| (!locked).then(String::new)) else {
            let message = "expected a valid key as `Authorization: Bearer KEY` or `x-api-key: KEY`";
            return Err(ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message));
        };
        match *path {
            "/health" => Ok(self.health()),
            "/live" => Ok(whole(StatusCode::OK, &json!({ "status": "alive" }))),
            "/metrics" => {
                let text = self.metrics.text().map_err(|e| ApiError::internal(e.to_string()))?;
                Ok(of_type("application/openmetrics-text; version=1.0.0; charset=utf-8", text))
            }
            "/v1/models" => Ok(whole(StatusCode::OK, &self.models())),
            "/v1/models/" => self.model(head.uri.path().trim_start_matches("/v1/models/")),
            "/v1/verification" => Ok(whole(StatusCode::OK, &self.running()?.model.verification)),
            _ => {
                self.running()?;
                let body = self.body(&head.headers, body).await?;
                self.post(path, number, key, body).await
            }
        }
    }

    /// The loaded model, while requests are taken.
    pub(super) fn running(&self) -> Result<&Loaded, ApiError> {
        let (code, message, after) = match self.shared.state() {
            State::Loading => ("loading", "the model is loading".into(), 5),
            State::Draining | State::Ended => ("draining", "the service is about to stop".into(), 5),
            State::Failed(why) => ("engine_failed", why, 30),
            State::Ready => match self.loaded.get() {
                Some(loaded) => return Ok(loaded),
                None => ("loading", "the model is loading".into(), 5),
            },
        };
        Err(ApiError::unavailable(code, message, after))
    }

    fn health(&self) -> Response<Body> {
        let (state, why) = match self.shared.state() {
            State::Loading => ("loading", None),
            State::Ready => ("ok", None),
            State::Draining | State::Ended => ("draining", None),
            State::Failed(why) => ("failed", Some(why)),
        };
        let status = if state == "ok" { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        let verified = self.loaded.get().map(|loaded| loaded.model.verified);
        let (steps, asked) = (self.shared.steps(), self.shared.asked());
        let body = json!({ "status": state, "reason": why, "verified": verified, "steps": steps, "requests": asked });
        whole(status, &body)
    }

    /// The list of models: empty while none can be asked.
    fn models(&self) -> Json {
        let models = self.running().map(|loaded| card(&loaded.model)).unwrap_or_default();
        json!({ "object": "list", "data": models })
    }

    fn model(&self, name: &str) -> Result<Response<Body>, ApiError> {
        let model = &self.running()?.model;
        let found = card(model).into_iter().find(|card| card["id"] == name);
        found.map(|card| whole(StatusCode::OK, &card)).ok_or_else(|| unknown_model(model, name))
    }

    /// A whole body of JSON.
    async fn body(&self, headers: &HeaderMap, body: &mut Option<Incoming>) -> Result<Vec<u8>, ApiError> {
        let kind = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
        if !kind.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json") {
            let message = format!("content-type: expected application/json, found {kind:?}");
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message));
        }
        let most = self.limits.body;
        let Some(body) = body.take() else { return Ok(Vec::new()) };
        match timeout(self.limits.body_time, whole_body(body, most)).await {
            Ok(Ok(Some(body))) => Ok(body),
            Ok(Ok(None)) => {
                let message = format!("the body: expected at most {most} bytes, found more");
                Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message))
            }
            Ok(Err(e)) => {
                Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_body", format!("the body did not come whole: {e}")))
            }
            Err(_) => {
                let message = format!("the body did not come within {} s", self.limits.body_time.as_secs());
                Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message))
            }
        }
    }

    /// Reads what is asked, away from the threads that move bytes.
    async fn post(
        self: Arc<Self>,
        path: &'static str,
        number: u64,
        key: String,
        body: Vec<u8>,
    ) -> Result<Response<Body>, ApiError> {
        let turn = self.encoding.clone().acquire_owned().await.map_err(|e| ApiError::internal(e.to_string()))?;
        let service = self.clone();
        // The turn goes with the work: a client who goes while it is done must not let another begin beside it.
        let read = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            service.read(path, number, &key, &body)
        });
        let asked = read.await.map_err(|e| ApiError::internal(e.to_string()))??;
        let (mut response, ignored) = match asked {
            Asked::Said(json, ignored) => (whole(StatusCode::OK, &json), ignored),
            Asked::Answers(jobs, reply, stream, ignored) => (self.clone().submit(jobs, reply, stream).await?, ignored),
        };
        if !ignored.is_empty() {
            self.note_ignored(&ignored);
            let mut names = ignored.iter().take(NAMES).map(|name| short(name)).collect::<Vec<_>>().join(", ");
            if ignored.len() > NAMES {
                names += &format!(" and {} more", ignored.len() - NAMES);
            }
            put(response.headers_mut(), "x-lockstep-ignored", &names);
        }
        Ok(response)
    }

    fn note_ignored(&self, names: &[String]) {
        let mut known = self.ignored.lock().unwrap_or_else(PoisonError::into_inner);
        for name in names.iter().take(NAMES).map(|name| short(name)) {
            // Names come from outside: so many are enough.
            if known.len() < 256 && known.insert(name.clone()) {
                tracing::warn!(field = name, "a field that is not known here is ignored");
            }
        }
    }

    fn read(&self, path: &str, number: u64, key: &str, body: &[u8]) -> Result<Asked, ApiError> {
        let loaded = self.running()?;
        let (model, defaults) = (&loaded.model, &loaded.defaults);
        let value: Json = serde_json::from_slice(body)
            .map_err(|e| ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", format!("the body is no JSON: {e}")))?;
        if !value.is_object() {
            let message = "the body: expected a JSON object";
            return Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", message));
        }
        let mut fields = Fields::of(&value, "")?;
        if let Some(name) = fields.string("model")?
            && !model.names.iter().any(|known| known == name)
        {
            return Err(unknown_model(model, name));
        }
        match path {
            "/v1/chat/completions" => {
                let chat::ChatAsk { ask, prompt } = chat::read(&mut fields, model, defaults)?;
                let head = head(&ask, "chatcmpl", number, model);
                let inside = model.markers.begins_inside(&prompt);
                let (n, tokens, stream) = (ask.n, prompt.len(), ask.stream);
                let most = ask.room(tokens, model.context, "messages")?;
                let logprobs = ask.wishes.logprobs.is_some();
                let options = TurnOptions { markers: model.markers, inside, ..options(&ask) };
                let jobs =
                    vec![(wanted(&ask, prompt, most, key), (0..n).map(|i| seed_of(ask.seed, i)).collect(), options)];
                let reply = chat::ChatReply::new(head, (n, tokens), logprobs, model.also_reasoning);
                Ok(Asked::Answers(Jobs { number, all: jobs }, Box::new(reply), stream, fields.ignored()))
            }
            "/v1/completions" => {
                let asked = completions::read(&mut fields, model, defaults)?;
                let (ask, n) = (&asked.ask, asked.ask.n);
                let mut jobs = Vec::new();
                for (group, prompt) in asked.prompts.iter().enumerate() {
                    let most = ask.room(prompt.ids.len(), model.context, "prompt")?;
                    let seeds = (group * n..(group + 1) * n).map(|i| seed_of(ask.seed, i)).collect();
                    let markers = Markers::default();
                    let options = TurnOptions { markers, ..options(ask) };
                    jobs.push((wanted(ask, prompt.ids.clone(), most, key), seeds, options));
                }
                let head = head(ask, "cmpl", number, model);
                let reply = completions::CompletionReply::new(head, model.tokenizer.clone(), &asked);
                let jobs = Jobs { number, all: jobs };
                Ok(Asked::Answers(jobs, Box::new(reply), ask.stream, fields.ignored()))
            }
            "/tokenize" => {
                let ids = if fields.any("messages").is_some() {
                    vec![chat::prompt(&mut fields, model)?]
                } else {
                    let prompts = completions::prompts(&mut fields, model)?;
                    prompts.into_iter().map(|p| p.ids).collect()
                };
                let [ids] = &ids[..] else { return Err(fields.error("prompt", "expected one text")) };
                let said = json!({ "tokens": ids, "count": ids.len(), "max_model_len": model.context });
                Ok(Asked::Said(said, fields.ignored()))
            }
            _ => {
                let ids =
                    fields.any("tokens").ok_or_else(|| fields.error("tokens", "expected an array of token ids"))?;
                let text = completions::text_of(ids, model, "tokens")?;
                Ok(Asked::Said(json!({ "prompt": text }), fields.ignored()))
            }
        }
    }
}

/// What a request asks for.
enum Asked {
    /// Nothing of the model: a reply, and names of ignored fields.
    Said(Json, Vec<String>),
    /// Answers, how they are told, whether piece by piece, and names of ignored fields.
    Answers(Jobs, Box<dyn Reply>, bool, Vec<String>),
}

/// What the scheduler is asked for.
fn wanted(ask: &Ask, prompt: Vec<u32>, most: usize, key: &str) -> Wanted {
    let Ask { sampling, wishes, stop, .. } = ask;
    let (sampling, wishes, stop, root) = (*sampling, wishes.clone(), stop.clone(), Some(ask.root(key)));
    Wanted { prompt, most, stop, sampling, wishes, root }
}

fn options(ask: &Ask) -> TurnOptions {
    TurnOptions { stops: ask.stops.clone(), keep_stop: ask.keep_stop, ..TurnOptions::default() }
}

fn head(ask: &Ask, kind: &str, number: u64, model: &Model) -> Head {
    Head {
        id: format!("{kind}-{:x}-{:x}-{number}", model.created, std::process::id()),
        created: chrono::Utc::now().timestamp(),
        model: model.names.first().cloned().unwrap_or_default(),
        fingerprint: model.fingerprint.clone(),
        seed: ask.seed,
        stream: ask.stream,
        include_usage: ask.include_usage,
    }
}

/// Most ignored fields that are named, and characters of each name.
const NAMES: usize = 32;
const NAME: usize = 64;

/// A name from outside, for a header and the log.
fn short(name: &str) -> String {
    name.chars().take(NAME).collect::<String>().escape_default().to_string()
}

/// Time in which the rest of a body is read that nobody wants.
const LINGER: Duration = Duration::from_secs(2);

/// So many times the limit is read of a body that is too large, so that whoever sends it hears why it is refused.
const PATIENCE: usize = 8;

/// A body of at most so many bytes; nothing if there are more.
async fn whole_body(mut body: Incoming, most: usize) -> Result<Option<Vec<u8>>, hyper::Error> {
    let (mut bytes, mut found) = (Vec::new(), 0);
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        found += data.len();
        if found > PATIENCE * most {
            break;
        }
        match found > most {
            true => bytes = Vec::new(),
            false => bytes.extend_from_slice(&data),
        }
    }
    Ok((found <= most).then_some(bytes))
}

/// What is told of a model, under each of its names.
fn card(model: &Model) -> Vec<Json> {
    let one = |name: &String| {
        json!({
            "id": name, "object": "model", "created": model.created, "owned_by": "lockstep",
            "max_model_len": model.context,
        })
    };
    model.names.iter().map(one).collect()
}

fn unknown_model(model: &Model, name: &str) -> ApiError {
    let message = format!("model: expected {}, found {name:?}", model.names.join(" or "));
    let error = ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message);
    ApiError { param: Some("model".into()), ..error }
}

pub(super) fn put(headers: &mut HeaderMap, name: &'static str, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        headers.insert(name, value);
    }
}

fn of_type(kind: &'static str, text: String) -> Response<Body> {
    let mut response = Response::new(Full::new(Bytes::from(text)).boxed_unsync());
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

pub(super) fn whole(status: StatusCode, body: &Json) -> Response<Body> {
    let mut response = of_type("application/json", body.to_string());
    *response.status_mut() = status;
    response
}

fn failed(error: &ApiError) -> Response<Body> {
    let mut response = whole(error.status, &error.json());
    let headers = response.headers_mut();
    if let Some(seconds) = error.retry_after {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if let Some(allow) = error.allow {
        put(headers, "allow", allow);
    }
    if error.status == StatusCode::UNAUTHORIZED {
        put(headers, "www-authenticate", "Bearer");
    }
    response
}
