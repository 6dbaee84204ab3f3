//! Template values written as Python writes them. Chat templates are made for transformers, that is for Jinja2 on
//! Python: `tojson` there is `json.dumps`, and `{{ x }}` is `str(x)`. A prompt that says `true` where the model was
//! trained on `True`, or escapes `<` in a tool description, has other ids.

use std::fmt::Write;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Nesting at which a value is refused; serde_json reads no deeper either.
const DEEPEST: usize = 128;

/// A float as Python's `repr`: shortest digits that read back the same, an exponent below 1e-4 and from 1e16.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>() {
        Ok(e) if !(-4..16).contains(&e) => {
            format!("{digits}e{}{:02}", if e < 0 { '-' } else { '+' }, e.unsigned_abs())
        }
        _ if value == value.trunc() => format!("{value:.1}"),
        _ => format!("{value}"),
    }
}

/// A number as Python writes it.
fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(f) if !value.is_integer() => float(f),
        _ => value.to_string(),
    }
}

/// How `json.dumps` is asked to write.
struct JsonStyle {
    ensure_ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)` as transformers defines it.
/// Errors: values that JSON cannot hold, unknown arguments.
pub(super) fn tojson(
    value: Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    args: Kwargs,
) -> Result<Value, Error> {
    let named = |name: &str| args.get::<Option<Value>>(name);
    let ensure_ascii = ensure_ascii.or(named("ensure_ascii")?).is_some_and(|v| v.is_true());
    let indent = match indent.or(named("indent")?).filter(|v| !v.is_none()) {
        None => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_owned),
        Some(count) => {
            let count = usize::try_from(count.clone()).ok().filter(|&n| n <= DEEPEST);
            Some(" ".repeat(count.ok_or_else(|| invalid("tojson: indent is not a small whole number"))?))
        }
    };
    let separators = named("separators")?.filter(|v| !v.is_none());
    let sort_keys = named("sort_keys")?.is_some_and(|v| v.is_true());
    args.assert_all_used()?;
    let (item_separator, key_separator) = match separators {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(pair) => {
            let pair: Vec<Value> = pair.try_iter()?.collect();
            match pair.as_slice() {
                [item, key] => (item.to_string(), key.to_string()),
                _ => return Err(invalid("tojson: separators is not a pair")),
            }
        }
    };
    let style = JsonStyle { ensure_ascii, indent, item_separator, key_separator, sort_keys };
    let mut out = String::new();
    json(&value, &style, 0, &mut out)?;
    Ok(Value::from(out))
}

fn json(value: &Value, style: &JsonStyle, depth: usize, out: &mut String) -> Result<(), Error> {
    if depth > DEEPEST {
        return Err(invalid("tojson: nested too deeply"));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&json_number(value)),
        ValueKind::String => json_string(value.as_str().unwrap_or_default(), style.ensure_ascii, out),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                separate(i, style, depth + 1, out);
                json(item, style, depth + 1, out)?;
            }
            close(']', items.is_empty(), style, depth, out);
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sort_keys {
                keys.sort();
            }
            out.push('{');
            for (i, key) in keys.iter().enumerate() {
                separate(i, style, depth + 1, out);
                json_key(key, style, out)?;
                out.push_str(&style.key_separator);
                json(&value.get_item(key)?, style, depth + 1, out)?;
            }
            close('}', keys.is_empty(), style, depth, out);
        }
        other => return Err(invalid(format!("tojson: a value of kind {other} is not JSON"))),
    }
    Ok(())
}

/// JSON as Python writes it has words for what is not finite.
fn json_number(value: &Value) -> String {
    match number(value).as_str() {
        "nan" => "NaN".into(),
        "inf" => "Infinity".into(),
        "-inf" => "-Infinity".into(),
        finite => finite.into(),
    }
}

/// Keys are always strings in JSON: numbers, booleans and None are written as such.
fn json_key(key: &Value, style: &JsonStyle, out: &mut String) -> Result<(), Error> {
    let text = match key.kind() {
        ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_owned(),
        ValueKind::Number => json_number(key),
        other => return Err(invalid(format!("tojson: a key of kind {other} is not JSON"))),
    };
    json_string(&text, style.ensure_ascii, out);
    Ok(())
}

fn separate(index: usize, style: &JsonStyle, depth: usize, out: &mut String) {
    if index > 0 {
        out.push_str(&style.item_separator);
    }
    new_line(style, depth, out);
}

fn close(bracket: char, empty: bool, style: &JsonStyle, depth: usize, out: &mut String) {
    if !empty {
        new_line(style, depth, out);
    }
    out.push(bracket);
}

fn new_line(style: &JsonStyle, depth: usize, out: &mut String) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        out.extend(std::iter::repeat_n(indent.as_str(), depth));
    }
}

fn json_string(text: &str, ensure_ascii: bool, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || (ensure_ascii && c > '~') => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a String cannot fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// `str(value)`: what `{{ value }}` prints. Undefined prints nothing, as Jinja2 has it.
pub(super) fn py_str(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::String => out.push_str(value.as_str().unwrap_or_default()),
        _ => repr(value, 0, &mut out)?,
    }
    Ok(out)
}

fn repr(value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    if depth > DEEPEST {
        return Err(invalid("a printed value is nested too deeply"));
    }
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => repr_string(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq => {
            let items: Vec<Value> = value.try_iter()?.collect();
            let tuple = value.is_tuple();
            out.push(if tuple { '(' } else { '[' });
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(item, depth + 1, out)?;
            }
            out.push_str(match (tuple, items.len()) {
                (true, 1) => ",)",
                (true, _) => ")",
                _ => "]",
            });
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(&key, depth + 1, out)?;
                out.push_str(": ");
                repr(&value.get_item(&key)?, depth + 1, out)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// A string as Python's `repr`: single quotes unless it holds only those, control characters escaped.
fn repr_string(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if c < ' ' || ('\u{7f}'..='\u{a0}').contains(&c) || c == '\u{ad}' => {
                // Writing to a String cannot fail.
                let _ = write!(out, "\\x{:02x}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::Environment;

    /// Expressions in Jinja, printed by our formatter.
    fn print(expression: &str) -> Result<String, Error> {
        let mut environment = Environment::new();
        environment.add_filter("tojson", tojson);
        environment.set_formatter(|out, _, value| Ok(out.write_str(&py_str(value)?)?));
        environment.render_str(&format!("{{{{ {expression} }}}}"), ())
    }

    fn printed(expression: &str) -> String {
        print(expression).unwrap()
    }

    const MIXED: &str = r#"{"b": 1, "a": [true, none, 1.0, -0.0, 1e16, 1e15, 123456.789, 1e-5, 0.0001, 1.5e300, -7], "e": [], "o": {}}"#;

    #[test]
    fn tojson_is_json_dumps() {
        // Expected: Python's json.dumps(value, ensure_ascii=False, ...) of the same value.
        assert_eq!(
            printed(&format!("{MIXED} | tojson")),
            r#"{"b": 1, "a": [true, null, 1.0, -0.0, 1e+16, 1000000000000000.0, 123456.789, 1e-05, 0.0001, 1.5e+300, -7], "e": [], "o": {}}"#
        );
        assert_eq!(
            printed(r#"{"b": 1, "a": [true, {"k": []}]} | tojson(indent=2)"#),
            "{\n  \"b\": 1,\n  \"a\": [\n    true,\n    {\n      \"k\": []\n    }\n  ]\n}"
        );
        assert_eq!(
            printed(r#"{"b": 1, "a": [true, false]} | tojson(sort_keys=true, separators=(",", ":"))"#),
            r#"{"a":[true,false],"b":1}"#
        );
        assert_eq!(printed("[1] | tojson(indent=0)"), "[\n1\n]");
        assert_eq!(printed(r#"[1] | tojson(indent="\t")"#), "[\n\t1\n]");
        assert_eq!(printed("{1: 2, none: 4, 1.5: 5, true: 6} | tojson"), r#"{"1": 6, "null": 4, "1.5": 5}"#);
        assert_eq!(printed("18446744073709551615 | tojson"), "18446744073709551615");
    }

    #[test]
    fn tojson_escapes_what_python_escapes_and_no_html() {
        let text = "<a href='x'>&\"\\\n\t\r\u{8}\u{c}\u{1}\u{7f} é 你 🙂</a>";
        let dumped = |ensure_ascii: bool| {
            let mut out = String::new();
            json_string(text, ensure_ascii, &mut out);
            out
        };
        assert_eq!(dumped(false), "\"<a href='x'>&\\\"\\\\\\n\\t\\r\\b\\f\\u0001\u{7f} é 你 🙂</a>\"");
        assert_eq!(dumped(true), r#""<a href='x'>&\"\\\n\t\r\b\f\u0001\u007f \u00e9 \u4f60 \ud83d\ude42</a>""#);
        assert_eq!(printed("'é<' | tojson(ensure_ascii=true)"), r#""\u00e9<""#);
        assert_eq!(printed("'é<' | tojson(ensure_ascii=false)"), "\"é<\"");
        assert_eq!(printed("'é<' | tojson(true)"), r#""\u00e9<""#);
    }

    #[test]
    fn tojson_refuses_what_python_refuses() {
        assert!(print("missing | tojson").is_err());
        assert!(print("1 | tojson(indent=1000000000)").is_err());
        assert!(print("1 | tojson(unknown=1)").is_err());
    }

    #[test]
    fn values_print_as_in_python() {
        // Expected: Jinja2 3.1.6.
        assert_eq!(
            printed(r#"[none, true, [1.0, 'a', "b'c"], {'k': [true]}, (1,), (1, 2), 3 / 2, 4 / 2, 7 // 2, 1e-7]"#),
            r#"[None, True, [1.0, 'a', "b'c"], {'k': [True]}, (1,), (1, 2), 1.5, 2.0, 3, 1e-07]"#
        );
        assert_eq!(printed("none") + &printed("false") + &printed("missing") + &printed("'x<'"), "NoneFalsex<");
        assert_eq!(printed(r#"["a\n\\", "'\""]"#), r#"['a\n\\', '\'"']"#);
    }
}
