//! Errors as clients of this API read them.

use std::borrow::Cow;

use hyper::StatusCode;
use serde_json::{Value as Json, json};

/// A request that gets no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The HTTP status.
    pub status: StatusCode,
    /// What a program can tell it by.
    pub code: Cow<'static, str>,
    /// What went wrong and what was expected.
    pub message: String,
    /// The field that is to blame.
    pub param: Option<String>,
    /// Seconds after which the same request may do.
    pub retry_after: Option<u64>,
    /// What the path can do, where the method is wrong.
    pub allow: Option<&'static str>,
}

impl ApiError {
    /// An error by its status and code.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        ApiError { status, code: code.into(), message, param: None, retry_after: None, allow: None }
    }

    /// A field that is not as it has to be.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        let (param, code) = (param.into(), "invalid_value");
        let message = format!("{param}: {}", message.into());
        ApiError { param: Some(param), ..ApiError::new(StatusCode::BAD_REQUEST, code, message) }
    }

    /// A failure that is ours.
    pub fn internal(message: impl Into<String>) -> Self {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    }

    /// A service that cannot answer now.
    pub fn unavailable(code: &'static str, message: impl Into<String>, retry_after: u64) -> Self {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, code, message);
        ApiError { retry_after: Some(retry_after), ..error }
    }

    /// The kind of error, in the words that clients know.
    fn kind(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            429 => "rate_limit_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        }
    }

    /// The body, which is a frame of a stream, too.
    pub fn json(&self) -> Json {
        let ApiError { code, message, param, .. } = self;
        json!({ "error": { "message": message, "type": self.kind(), "param": param, "code": code } })
    }
}
