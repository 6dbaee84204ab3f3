//! Fields of a JSON object, each read once and named where it is wrong. `null` is the same as absent.

use std::collections::BTreeSet;

use serde_json::{Map, Value as Json};

use super::error::ApiError;

/// An object that is read field by field.
pub struct Fields<'a> {
    map: &'a Map<String, Json>,
    /// What stands before the names in errors.
    path: String,
    read: BTreeSet<&'static str>,
}

/// What a value is, in words.
pub fn kind(value: &Json) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "a boolean",
        Json::Number(_) => "a number",
        Json::String(_) => "a string",
        Json::Array(_) => "an array",
        Json::Object(_) => "an object",
    }
}

impl<'a> Fields<'a> {
    /// The fields of `value`.
    ///
    /// # Errors
    /// No object.
    pub fn of(value: &'a Json, path: &str) -> Result<Self, ApiError> {
        let wrong = || ApiError::field(path, format!("expected an object, found {}", kind(value)));
        let map = value.as_object().ok_or_else(wrong)?;
        let path = if path.is_empty() { String::new() } else { format!("{path}.") };
        Ok(Fields { map, path, read: BTreeSet::new() })
    }

    /// An error about a field.
    pub fn error(&self, name: &str, message: impl Into<String>) -> ApiError {
        ApiError::field(format!("{}{name}", self.path), message)
    }

    fn wrong(&self, name: &str, expected: &str, found: &Json) -> ApiError {
        let found = match found {
            Json::Number(n) => n.to_string(),
            other => kind(other).into(),
        };
        self.error(name, format!("expected {expected}, found {found}"))
    }

    /// A field of any kind.
    pub fn any(&mut self, name: &'static str) -> Option<&'a Json> {
        self.read.insert(name);
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// A string.
    ///
    /// # Errors
    /// Something else.
    pub fn string(&mut self, name: &'static str) -> Result<Option<&'a str>, ApiError> {
        let value = self.any(name);
        value.map(|v| v.as_str().ok_or_else(|| self.wrong(name, "a string", v))).transpose()
    }

    /// A boolean.
    ///
    /// # Errors
    /// Something else.
    pub fn flag(&mut self, name: &'static str) -> Result<Option<bool>, ApiError> {
        let value = self.any(name);
        value.map(|v| v.as_bool().ok_or_else(|| self.wrong(name, "true or false", v))).transpose()
    }

    /// An object.
    ///
    /// # Errors
    /// Something else.
    pub fn object(&mut self, name: &'static str) -> Result<Option<&'a Map<String, Json>>, ApiError> {
        let value = self.any(name);
        value.map(|v| v.as_object().ok_or_else(|| self.wrong(name, "an object", v))).transpose()
    }

    /// A number within limits.
    ///
    /// # Errors
    /// Something else, or a number outside.
    pub fn number(&mut self, name: &'static str, least: f64, most: f64) -> Result<Option<f64>, ApiError> {
        let value = self.any(name);
        let within = |v: &Json| v.as_f64().filter(|x| (least..=most).contains(x));
        let expected = format!("a number from {least} to {most}");
        value.map(|v| within(v).ok_or_else(|| self.wrong(name, &expected, v))).transpose()
    }

    /// A whole number within limits.
    ///
    /// # Errors
    /// Something else, or a number outside.
    pub fn integer(&mut self, name: &'static str, least: i64, most: i64) -> Result<Option<i64>, ApiError> {
        let value = self.any(name);
        let within = |v: &Json| integer(v).filter(|x| (least..=most).contains(x));
        let expected = match most {
            i64::MAX if least == i64::MIN => "a whole number".into(),
            i64::MAX => format!("a whole number of at least {least}"),
            _ => format!("a whole number from {least} to {most}"),
        };
        value.map(|v| within(v).ok_or_else(|| self.wrong(name, &expected, v))).transpose()
    }

    /// Refuses fields that would change the answer and are not known here.
    ///
    /// # Errors
    /// One that is present.
    pub fn refuse(&mut self, names: &[(&'static str, &str)]) -> Result<(), ApiError> {
        for (name, why) in names {
            if let Some(value) = self.any(name)
                && *value != Json::Bool(false)
                && value.as_array().is_none_or(|all| !all.is_empty())
            {
                return Err(self.error(name, *why));
            }
        }
        Ok(())
    }

    /// Names of fields that nobody has read.
    pub fn ignored(&self) -> Vec<String> {
        self.map.keys().filter(|name| !self.read.contains(name.as_str())).cloned().collect()
    }
}

/// A whole number, also written as `2.0`.
pub fn integer(value: &Json) -> Option<i64> {
    let whole = |x: f64| (x.fract() == 0.0 && x.abs() < 9e15).then_some(x as i64);
    value.as_i64().or_else(|| value.as_f64().filter(|_| !value.is_u64()).and_then(whole))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn null_is_absent_and_errors_name_the_field() {
        let value = json!({ "a": null, "b": 2.0, "c": "x", "d": 1, "e": [] });
        let mut fields = Fields::of(&value, "m[1]").unwrap();
        assert_eq!(fields.string("a"), Ok(None));
        assert_eq!(fields.integer("b", 0, 2), Ok(Some(2)));
        let wrong = fields.number("c", 0.0, 2.0).unwrap_err();
        assert_eq!(wrong.message, "m[1].c: expected a number from 0 to 2, found a string");
        assert_eq!(fields.integer("b", 0, 1).unwrap_err().param.as_deref(), Some("m[1].b"));
        assert_eq!(fields.ignored(), ["d", "e"]);
        assert_eq!(fields.refuse(&[("e", "no")]), Ok(()), "an empty list asks for nothing");
        assert!(fields.refuse(&[("d", "no")]).is_err());
        assert!(Fields::of(&json!([]), "x").is_err());
    }

    #[test]
    fn whole_numbers() {
        for (value, expected) in [
            (json!(-3), Some(-3)),
            (json!(2.0), Some(2)),
            (json!(2.5), None),
            (json!(u64::MAX), None),
            (json!(1e300), None),
            (json!("2"), None),
        ] {
            assert_eq!(integer(&value), expected, "{value}");
        }
    }
}
