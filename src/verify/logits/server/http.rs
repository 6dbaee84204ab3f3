//! A small HTTP/1.1 client: one request a connection, plain, no proxy, no redirect. Whatever a server sends, it ends: by
//! what came, by a limit of bytes, or by the time that is given.

use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use serde_json::Value as Json;

use crate::report::{Progress, clean};

/// Bytes of a reply's head, and of a line of it.
const HEAD: usize = 64 << 10;
/// Characters of a body that are quoted.
const QUOTED: usize = 200;
/// How often a busy server is asked again.
const AGAIN: usize = 3;
/// While nothing comes, progress is told this often.
const TICK: Duration = Duration::from_millis(250);
/// Environment variables that may hold a key, in this order.
pub const KEYS: [&str; 2] = ["LOCKSTEP_API_KEY", "OPENAI_API_KEY"];

/// Why a server cannot be asked on.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum HttpError {
    #[error("--target {}: {why}", clean(url))]
    Address { url: String, why: &'static str },
    #[error("{variable}: a key has no spaces and no characters but those of ASCII")]
    Key { variable: &'static str },
    #[error("{url}: cannot connect: {why}")]
    Connect { url: String, why: String },
    #[error("{url}: no whole answer within {seconds} s; {bytes} bytes came")]
    Slow { url: String, seconds: u64, bytes: usize },
    #[error("{url}: broken answer: {why}")]
    Broken { url: String, why: String },
    #[error("{url}: the answer is larger than {limit} bytes")]
    Large { url: String, limit: usize },
    #[error("{url}: HTTP {status}: {body}{hint}")]
    Status { url: String, status: u16, body: String, hint: String },
}

/// Where a server is: `http://HOST[:PORT][/PATH]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    host: String,
    port: u16,
    /// What stands before every route; empty or with a slash before it.
    path: String,
}

impl Address {
    /// Reads an address. A `/v1` at its end is left out, since many give the root of the API.
    ///
    /// # Errors
    /// Anything else, https included.
    pub fn parse(text: &str) -> Result<Self, HttpError> {
        let bad = |why| HttpError::Address { url: text.into(), why };
        let (scheme, rest) = text.split_once("://").ok_or_else(|| bad("expected http://HOST:PORT"))?;
        if scheme.eq_ignore_ascii_case("https") {
            return Err(bad("only plain http is spoken here; forward a local port to it, as with ssh -L"));
        }
        if !scheme.eq_ignore_ascii_case("http") {
            return Err(bad("expected http://HOST:PORT"));
        }
        if text.contains(|c: char| !c.is_ascii_graphic()) {
            return Err(bad("expected no spaces and no characters but those of ASCII"));
        }
        if text.contains(['@', '?', '#']) {
            return Err(bad("expected a host, a port and a path alone; a key is read from the environment"));
        }
        let (authority, path) = rest.find('/').map_or((rest, ""), |at| rest.split_at(at));
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.contains(']') => (host, port.parse().ok().filter(|port| *port > 0)),
            _ => (authority, Some(80)),
        };
        let port = port.ok_or_else(|| bad("expected a port from 1 to 65535"))?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        if bare.unwrap_or(host).is_empty() || (bare.is_none() && host.contains(':')) {
            return Err(bad("expected a host; an IPv6 address stands in brackets"));
        }
        let path = path.trim_end_matches('/');
        let path = path.strip_suffix("/v1").unwrap_or(path).trim_end_matches('/');
        Ok(Address { host: host.into(), port, path: path.into() })
    }

    /// The host as resolvers take it.
    fn bare_host(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Address { host, port, path } = self;
        write!(f, "http://{host}:{port}{path}")
    }
}

/// How long and how much.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Time to connect.
    pub connect: Duration,
    /// Time for a request and its answer.
    pub answer: Duration,
    /// Bytes of an answer's body.
    pub body: usize,
    /// The longest wait that a busy server may ask for.
    pub wait: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Limits { connect: seconds(5), answer: seconds(120), body: 64 << 20, wait: seconds(60) }
    }
}

/// The key that the environment holds, if one.
///
/// # Errors
/// A key that no header can hold.
pub fn key() -> Result<Option<String>, HttpError> {
    for variable in KEYS {
        match std::env::var(variable) {
            Ok(key) if key.is_empty() => {}
            Ok(key) if key.chars().all(|c| c.is_ascii_graphic()) => return Ok(Some(key)),
            Ok(_) | Err(std::env::VarError::NotUnicode(_)) => return Err(HttpError::Key { variable }),
            Err(std::env::VarError::NotPresent) => {}
        }
    }
    Ok(None)
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Its status.
    pub status: u16,
    /// Names in lower case.
    headers: Vec<(String, String)>,
    /// Its body.
    pub body: Vec<u8>,
}

impl Reply {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    /// The body as JSON, or what it is instead.
    ///
    /// # Errors
    /// A status other than 200, and what is no JSON.
    pub fn json(&self) -> Result<Json, String> {
        if self.status != 200 {
            return Err(format!("HTTP {}: {}", self.status, self.excerpt()));
        }
        serde_json::from_slice(&self.body).map_err(|e| format!("no JSON ({e}): {}", self.excerpt()))
    }

    /// The first characters of the body, as they may be shown.
    pub fn excerpt(&self) -> String {
        let few = &self.body[..self.body.len().min(4 * QUOTED)];
        let text: String = String::from_utf8_lossy(few).chars().take(QUOTED).collect();
        match text.is_empty() {
            true => "an empty body".into(),
            false => clean(&text).into_owned(),
        }
    }
}

/// Asks one server.
pub struct Client<'a> {
    /// Where it is.
    pub address: &'a Address,
    /// What it is asked with.
    pub key: Option<&'a str>,
    /// How long and how much.
    pub limits: Limits,
    /// Where waiting is told.
    pub progress: &'a dyn Progress,
}

impl Client<'_> {
    /// GET.
    ///
    /// # Errors
    /// What ends the asking: see [`HttpError`]. Other statuses than those of success are answers.
    pub fn get(&self, route: &str) -> Result<Reply, HttpError> {
        self.ask("GET", route, None)
    }

    /// POST of JSON.
    ///
    /// # Errors
    /// As for [`Client::get`].
    pub fn post(&self, route: &str, body: &Json) -> Result<Reply, HttpError> {
        self.ask("POST", route, Some(&body.to_string()))
    }

    /// A busy server is asked again when it says so; who forbids, redirects or stays busy ends the asking.
    fn ask(&self, method: &str, route: &str, body: Option<&str>) -> Result<Reply, HttpError> {
        let url = format!("{}{route}", self.address);
        let mut asked = 0;
        loop {
            asked += 1;
            let reply = self.once(&url, method, route, body)?;
            let end = |hint: String| {
                Err(HttpError::Status { url: url.clone(), status: reply.status, body: reply.excerpt(), hint })
            };
            match reply.status {
                429 | 503 => {
                    let after =
                        reply.header("retry-after").and_then(|v| v.trim().parse().ok()).map(Duration::from_secs);
                    let Some(after) = after else { return end("; it does not say when to ask again".into()) };
                    if after > self.limits.wait {
                        return end(format!("; it asks to wait {} s", after.as_secs()));
                    }
                    if asked > AGAIN {
                        return end(format!("; asked {asked} times, as it told to"));
                    }
                    self.wait(reply.status, after);
                }
                300..=399 if reply.status != 304 => {
                    let to = clean(reply.header("location").unwrap_or("nowhere")).into_owned();
                    return end(format!("; it redirects to {to}, which is not followed"));
                }
                401 | 403 => {
                    return end(match self.key {
                        Some(_) => "; the key of the environment was sent".into(),
                        None => format!("; no key was sent, since neither {} nor {} is set", KEYS[0], KEYS[1]),
                    });
                }
                _ => return Ok(reply),
            }
        }
    }

    fn wait(&self, status: u16, after: Duration) {
        let (began, what) = (Instant::now(), format!("HTTP {status}: asking again in {} s", after.as_secs()));
        while let Some(left) = after.checked_sub(began.elapsed()).filter(|left| !left.is_zero()) {
            self.progress.at(&what, (after - left).as_secs() as usize, after.as_secs() as usize);
            std::thread::sleep(left.min(TICK));
        }
    }

    fn once(&self, url: &str, method: &str, route: &str, body: Option<&str>) -> Result<Reply, HttpError> {
        let mut stream = self.connect(url)?;
        let Address { host, port, path } = self.address;
        let mut head = format!("{method} {path}{route} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n");
        head += "Accept: application/json\r\nAccept-Encoding: identity\r\n";
        head += concat!("User-Agent: lockstep/", env!("CARGO_PKG_VERSION"), "\r\n");
        if let Some(key) = self.key {
            head += &format!("Authorization: Bearer {key}\r\n");
        }
        if let Some(body) = body {
            head += &format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
        }
        head += "\r\n";
        let began = Instant::now();
        let broken = |why: String| HttpError::Broken { url: url.into(), why };
        let set = stream.set_write_timeout(Some(self.limits.answer)).and(stream.set_read_timeout(Some(TICK)));
        set.map_err(|e| broken(e.to_string()))?;
        // Who refuses a request may answer and close before all of it came.
        let sent =
            stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.unwrap_or_default().as_bytes()));
        let mut incoming = Incoming { stream, url, client: self, began, held: Vec::new(), at: 0, came: 0 };
        match (incoming.reply(), sent) {
            (Err(_), Err(e)) => Err(broken(format!("the request could not be sent: {e}"))),
            (reply, _) => reply,
        }
    }

    fn connect(&self, url: &str) -> Result<TcpStream, HttpError> {
        let failed = |why: String| HttpError::Connect { url: url.into(), why };
        let all = (self.address.bare_host(), self.address.port).to_socket_addrs().map_err(|e| failed(e.to_string()))?;
        let (began, mut why) = (Instant::now(), "the name has no address".to_string());
        for one in all {
            let left = self.limits.connect.saturating_sub(began.elapsed());
            if left.is_zero() {
                break;
            }
            match TcpStream::connect_timeout(&one, left) {
                Ok(stream) => return Ok(stream),
                Err(e) => why = e.to_string(),
            }
        }
        Err(failed(why))
    }
}

/// What comes of an answer.
struct Incoming<'a> {
    stream: TcpStream,
    url: &'a str,
    client: &'a Client<'a>,
    began: Instant,
    /// Bytes that came, of which `at` are used.
    held: Vec<u8>,
    at: usize,
    came: usize,
}

impl Incoming<'_> {
    fn broken<T>(&self, why: impl Into<String>) -> Result<T, HttpError> {
        Err(HttpError::Broken { url: self.url.into(), why: why.into() })
    }

    /// Waits for more; false at the end.
    fn more(&mut self) -> Result<bool, HttpError> {
        let mut part = [0; 16 << 10];
        loop {
            let (spent, whole) = (self.began.elapsed(), self.client.limits.answer);
            if spent >= whole {
                let (url, bytes) = (self.url.into(), self.came);
                return Err(HttpError::Slow { url, seconds: whole.as_secs(), bytes });
            }
            match self.stream.read(&mut part) {
                Ok(0) => return Ok(false),
                Ok(n) => {
                    self.held.drain(..std::mem::take(&mut self.at));
                    self.held.extend_from_slice(&part[..n]);
                    self.came += n;
                    return Ok(true);
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    let seconds = |time: Duration| time.as_secs() as usize;
                    self.client.progress.at("seconds waited for the server", seconds(spent), seconds(whole).max(1));
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return self.broken(format!("{e} behind {} bytes", self.came)),
            }
        }
    }

    /// A line without its end.
    fn line(&mut self) -> Result<String, HttpError> {
        loop {
            let rest = &self.held[self.at..];
            if let Some(end) = rest.iter().position(|b| *b == b'\n') {
                let line = String::from_utf8_lossy(&rest[..end]).trim_end_matches('\r').to_string();
                self.at += end + 1;
                return Ok(line);
            }
            if rest.len() > HEAD {
                return self.broken("a line of the head without an end");
            }
            if !self.more()? {
                return self.broken(format!("the connection was closed within the head, behind {} bytes", self.came));
            }
        }
    }

    /// Headers up to the empty line.
    fn headers(&mut self) -> Result<Vec<(String, String)>, HttpError> {
        let (mut all, mut bytes) = (Vec::new(), 0);
        loop {
            let line = self.line()?;
            bytes += line.len();
            match line.split_once(':') {
                _ if line.is_empty() => return Ok(all),
                _ if bytes > HEAD => return self.broken("a head without an end"),
                Some((name, value)) => all.push((name.trim().to_ascii_lowercase(), value.trim().to_string())),
                None => return self.broken(format!("a header without a colon: {}", quoted(&line))),
            }
        }
    }

    fn reply(&mut self) -> Result<Reply, HttpError> {
        loop {
            let line = self.line()?;
            let mut words = line.split(' ');
            let version = words.next().unwrap_or_default();
            let status = words.next().and_then(|word| word.parse::<u16>().ok()).filter(|s| (100..600).contains(s));
            let (true, Some(status)) = (version.starts_with("HTTP/1."), status) else {
                return self.broken(format!("expected an HTTP/1.1 status, found {}", quoted(&line)));
            };
            let headers = self.headers()?;
            // An interim answer is followed by another one; time ends a server that sends nothing else.
            if status >= 200 {
                let mut reply = Reply { status, headers, body: Vec::new() };
                reply.body = self.body(&reply)?;
                return Ok(reply);
            }
        }
    }

    fn body(&mut self, reply: &Reply) -> Result<Vec<u8>, HttpError> {
        let mut body = Vec::new();
        if matches!(reply.status, 204 | 304) {
            return Ok(body);
        }
        if let Some(coding) = reply.header("transfer-encoding") {
            match coding.eq_ignore_ascii_case("chunked") {
                true => self.chunks(&mut body)?,
                false => return self.broken(format!("transfer encoding {} is not known here", quoted(coding))),
            }
            return Ok(body);
        }
        let mut lengths = reply.headers.iter().filter(|(name, _)| name == "content-length").map(|(_, value)| value);
        match lengths.next() {
            Some(length) if lengths.any(|other| other != length) => self.broken("two lengths that differ")?,
            Some(length) => match length.parse() {
                Ok(length) => self.exactly(length, &mut body)?,
                Err(_) => self.broken(format!("expected a length in bytes, found {}", quoted(length)))?,
            },
            None => {
                self.room(&body, 0)?;
                loop {
                    self.take(usize::MAX, &mut body)?;
                    if !self.more()? {
                        break;
                    }
                }
            }
        }
        Ok(body)
    }

    /// Refuses a body that becomes larger than it may.
    fn room(&self, body: &[u8], more: usize) -> Result<(), HttpError> {
        let limit = self.client.limits.body;
        match body.len().checked_add(more).is_some_and(|all| all <= limit) {
            true => Ok(()),
            false => Err(HttpError::Large { url: self.url.into(), limit }),
        }
    }

    /// Moves at most `most` of the bytes that came to the body, and tells how many.
    fn take(&mut self, most: usize, body: &mut Vec<u8>) -> Result<usize, HttpError> {
        let n = most.min(self.held.len() - self.at);
        self.room(body, n)?;
        body.extend_from_slice(&self.held[self.at..self.at + n]);
        self.at += n;
        Ok(n)
    }

    fn exactly(&mut self, length: usize, body: &mut Vec<u8>) -> Result<(), HttpError> {
        self.room(body, length)?;
        let mut left = length;
        loop {
            left -= self.take(left, body)?;
            if left == 0 {
                return Ok(());
            }
            if !self.more()? {
                return self.broken(format!("the connection was closed behind {} of {length} bytes", length - left));
            }
        }
    }

    fn chunks(&mut self, body: &mut Vec<u8>) -> Result<(), HttpError> {
        loop {
            let line = self.line()?;
            let size = line.split(';').next().unwrap_or_default().trim();
            let Ok(size) = usize::from_str_radix(size, 16) else {
                return self.broken(format!("expected the size of a chunk, found {}", quoted(&line)));
            };
            if size == 0 {
                return self.headers().map(drop);
            }
            self.exactly(size, body)?;
            if !self.line()?.is_empty() {
                return self.broken("a chunk that is longer than its size");
            }
        }
    }
}

/// A short piece of what came, as it may be shown.
fn quoted(text: &str) -> String {
    let few: String = text.chars().take(40).collect();
    format!("{:?}", clean(&few))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let read = |text: &str| Address::parse(text).map(|a| a.to_string()).map_err(|e| e.to_string());
        for (text, found) in [
            ("http://h:8000", "http://h:8000"),
            ("HTTP://h", "http://h:80"),
            ("http://h:1/v1/", "http://h:1"),
            ("http://h:1/llm/v1", "http://h:1/llm"),
            ("http://[::1]:9/", "http://[::1]:9"),
            ("http://[::1]", "http://[::1]:80"),
        ] {
            assert_eq!(read(text).as_deref(), Ok(found), "{text}");
        }
        for bad in [
            "http://",
            "http://:80",
            "http://h:0",
            "http://h:x",
            "http://h:99999",
            "http://u:p@h:1",
            "http://h:1/?a",
            "http://::1:80",
            "http://a b",
            "http://h\r\nx: y",
            "ftp://h",
            "h:80",
        ] {
            assert!(read(bad).is_err(), "{bad}");
        }
        assert!(read("https://h").is_err_and(|e| e.contains("only plain http")));
    }
}
