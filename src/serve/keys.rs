//! Who is let in.

use hyper::HeaderMap;
use hyper::header::{self, HeaderName};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// Keys that let in; none let everybody in.
#[derive(Clone, Default)]
pub struct Keys(Vec<[u8; 32]>);

impl Keys {
    /// One key a line; empty lines and those that begin with `#` count for nothing.
    pub fn of(text: &str) -> Self {
        let keys = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        Keys(keys.map(|key| Sha256::digest(key).into()).collect())
    }

    /// True if everybody is let in.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The name of the key that a request has. All are compared, each in the same time.
    pub(super) fn admits(&self, headers: &HeaderMap) -> Option<String> {
        if self.is_empty() {
            return Some(String::new());
        }
        let text = |name: HeaderName| headers.get(name).and_then(|v| v.to_str().ok());
        let bearer = text(header::AUTHORIZATION).and_then(|v| v.split_once(' '));
        let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, key)| key.trim());
        let given: [u8; 32] = Sha256::digest(bearer.or(text(HeaderName::from_static("x-api-key")))?).into();
        let mut found = None;
        for (i, key) in self.0.iter().enumerate() {
            if bool::from(key.ct_eq(&given)) {
                found = Some(format!("{i}"));
            }
        }
        found
    }
}
