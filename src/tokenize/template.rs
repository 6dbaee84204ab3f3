//! Chat templates: Jinja in the file's metadata, rendered the way transformers renders them, because that is how the
//! model's prompts were made. Block white space is trimmed, `tojson` and printed values follow Python, special tokens
//! are variables, `raise_exception` and `strftime_now` exist. Templates come from files, so rendering is bounded.

use chrono::format::StrftimeItems;
use chrono::{DateTime, Utc};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{Environment, Error, ErrorKind};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};

use super::error::TokenizeError;
use super::pyvalue;
use super::spec::TokenizerSpec;

/// Instructions that one rendering may take: thousands of messages need under a million.
const FUEL: u64 = 50_000_000;
const NAME: &str = "chat_template";

/// One message of a conversation, with every field that the template may look at.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// "system", "user", "assistant", "tool", or what else the template knows.
    pub role: String,
    /// A string, a list of parts, or null.
    #[serde(default)]
    pub content: Json,
    /// All other fields (`tool_calls`, `reasoning_content`, ...), as they are.
    #[serde(flatten)]
    pub other: Map<String, Json>,
}

impl ChatMessage {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: Json::String(content.into()), other: Map::new() }
    }
}

/// A compiled template with the names of the model's special tokens.
#[derive(Debug)]
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    /// `bos_token` and so on, as literals.
    specials: Vec<(&'static str, Value)>,
}

impl ChatTemplate {
    /// Compiles the template of `spec`. Errors: absent, or a syntax error with its line.
    pub(super) fn new(spec: &TokenizerSpec) -> Result<Self, TokenizeError> {
        let source = spec.chat_template.clone().ok_or(TokenizeError::TemplateAbsent)?;
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| template_error(&e))?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, _, value| Ok(out.write_str(&pyvalue::py_str(value)?)?));
        environment.add_filter("tojson", pyvalue::tojson);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", |format: String| {
            strftime(&format, Utc::now()).ok_or_else(|| {
                Error::new(ErrorKind::InvalidOperation, format!("strftime_now: unknown field in {format}"))
            })
        });
        environment.add_template_owned(NAME, source).map_err(|e| lacking(&e).unwrap_or_else(|| template_error(&e)))?;
        let literal = |id: Option<u32>| spec.tokens.get(usize::try_from(id?).ok()?);
        let named =
            [("bos_token", spec.bos), ("eos_token", spec.eos), ("unk_token", spec.unk), ("pad_token", spec.pad)];
        let specials = named.into_iter().filter_map(|(name, id)| Some((name, Value::from(literal(id)?.as_str()))));
        Ok(Self { environment, specials: specials.collect() })
    }

    /// The prompt. Errors: what the template raises, with its line.
    pub(super) fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        extra: &Map<String, Json>,
    ) -> Result<String, TokenizeError> {
        let messages: Vec<Value> = messages.iter().map(message_value).collect();
        let specials = self.specials.iter().map(|(name, value)| (*name, value.clone()));
        let extra = extra.iter().map(|(name, value)| (name.as_str(), template_value(value)));
        let own = [("messages", Value::from(messages)), ("add_generation_prompt", Value::from(add_generation_prompt))];
        let context = Value::from_pairs(specials.chain(extra).chain(own));
        let template = self.environment.get_template(NAME).map_err(|e| template_error(&e))?;
        template.render(context).map_err(|e| template_error(&e))
    }
}

/// `format` as Python's strftime fills it, in UTC. `None` for a field that does not exist: printing it would panic.
fn strftime(format: &str, at: DateTime<Utc>) -> Option<String> {
    let items = StrftimeItems::new(format).parse().ok()?;
    Some(at.format_with_items(items.iter()).to_string())
}

fn message_value(message: &ChatMessage) -> Value {
    let own = [("role", Value::from(message.role.as_str())), ("content", template_value(&message.content))];
    let other = message.other.iter().map(|(name, value)| (name.as_str(), template_value(value)));
    Value::from_pairs(own.into_iter().chain(other))
}

/// JSON as a template value, keys in their order.
fn template_value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(*b),
        Json::String(s) => Value::from(s.as_str()),
        Json::Array(items) => Value::from(items.iter().map(template_value).collect::<Vec<_>>()),
        Json::Object(map) => Value::from_pairs(map.iter().map(|(key, value)| (key.as_str(), template_value(value)))),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => Value::from(i),
            (_, Some(u)) => Value::from(u),
            _ => Value::from(n.as_f64().unwrap_or(f64::NAN)),
        },
    }
}

/// Statements that transformers runs and that are not built in here: `generation` marks the assistant's words for training,
/// the others are Jinja's own.
const LACKING: [&str; 6] = ["generation", "print", "include", "import", "from", "extends"];

/// A syntax error that only says what this build lacks.
fn lacking(error: &Error) -> Option<TokenizeError> {
    let word = error.detail()?.strip_prefix("unknown statement ")?;
    let statement = LACKING.into_iter().find(|known| *known == word)?;
    Some(TokenizeError::Statement { line: error.line(), statement })
}

fn template_error(error: &Error) -> TokenizeError {
    let message = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    TokenizeError::Template { line: error.line(), message }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render_with(source: &str, messages: &[ChatMessage], extra: Json) -> Result<String, TokenizeError> {
        let tokens = vec!["<s>".to_owned(), "</s>".to_owned()];
        let spec = TokenizerSpec {
            chat_template: Some(source.into()),
            tokens,
            bos: Some(0),
            eos: Some(1),
            ..TokenizerSpec::default()
        };
        ChatTemplate::new(&spec)?.render(messages, true, extra.as_object().unwrap())
    }

    fn render(source: &str) -> Result<String, TokenizeError> {
        render_with(source, &[ChatMessage::new("user", " a\n"), ChatMessage::new("assistant", "b")], json!({}))
    }

    #[test]
    fn white_space_is_trimmed_around_blocks() {
        // Expected here and below: Jinja2 3.1.6 with transformers' settings.
        let blocks = "{% for m in messages %}\n  {% if m.role == 'user' %}\n<|user|>\n    {{ m.content }}\n  {% else %}\n<|x|>{{ m['content'] | trim }}\n  {% endif %}\n{% endfor %}\n\n{% if add_generation_prompt %}\n<|assistant|>\n{% endif %}\n";
        assert_eq!(render(blocks).unwrap(), "<|user|>\n     a\n\n<|x|>b\n\n<|assistant|>\n");
        let dashes = "{%- for m in messages -%}\n  [{{ m.content }}]\n  {#- note -#}\n{%- endfor %}\n";
        assert_eq!(render(dashes).unwrap(), "[ a\n][b]");
    }

    #[test]
    fn python_methods_namespaces_and_loop_controls() {
        let methods = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}{{ messages[::-1][0].role }}{{ messages[-1].content.strip().upper() }}{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ 'a,b'.split(',')[-1] }}{{ messages[0].get('z', 'd') }}{{ 'x'.startswith('x') }}";
        assert_eq!(render(methods).unwrap(), "2assistantBrole=user;content= a\n;bdTrue");
        let controls = "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}";
        assert_eq!(render(controls).unwrap(), "02");
    }

    #[test]
    fn special_tokens_extra_variables_and_message_fields() {
        let message: ChatMessage = serde_json::from_value(json!({
            "role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {"z": 1, "a": "<"}}}]
        }))
        .unwrap();
        let source = "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ tools | tojson }}{{ messages[0].tool_calls[0].function.arguments | tojson }}{{ messages[0].content is none }}{{ messages | length }}";
        let extra = json!({"tools": [{"z": 1, "a": 2}], "messages": "not this"});
        assert_eq!(
            render_with(source, &[message], extra).unwrap(),
            "<s></s>False[{\"z\": 1, \"a\": 2}]{\"z\": 1, \"a\": \"<\"}True1"
        );
    }

    #[test]
    fn errors_name_the_line() {
        let raised = render("x\n{% if true %}\n{{ raise_exception('no such role') }}\n{% endif %}").unwrap_err();
        assert!(
            matches!(&raised, TokenizeError::Template { line: Some(3), message } if message.contains("no such role")),
            "{raised}"
        );
        let syntax = render("x\n{% for %}").unwrap_err();
        assert!(matches!(syntax, TokenizeError::Template { line: Some(2), .. }), "{syntax}");
        assert_eq!(render_with("", &[], json!({})).unwrap(), "");
    }

    #[test]
    fn endless_templates_are_stopped() {
        let endless = "{% for i in range(90000) %}{% for j in range(90000) %}{% for k in range(90000) %}{% endfor %}{% endfor %}{% endfor %}";
        assert!(render(endless).is_err());
        assert!(render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}").is_err());
    }

    #[test]
    fn dates() {
        let date = render("{{ strftime_now('%Y-%m-%d') }}").unwrap();
        assert!(date.len() == 10 && date.as_str() >= "2024", "{date}");
        assert!(render("{{ strftime_now('%Q') }}").is_err());
    }

    #[test]
    fn known_dates() {
        let all = "%Y-%m-%d %H:%M:%S %A %a %B %b %j %y %I %p %-d%%";
        // Expected: Python's datetime.fromtimestamp(t, timezone.utc).strftime(all).
        for (seconds, expected) in [
            (-1, "1969-12-31 23:59:59 Wednesday Wed December Dec 365 69 11 PM 31%"),
            (0, "1970-01-01 00:00:00 Thursday Thu January Jan 001 70 12 AM 1%"),
            (951_827_696, "2000-02-29 12:34:56 Tuesday Tue February Feb 060 00 12 PM 29%"),
            (4_102_444_799, "2099-12-31 23:59:59 Thursday Thu December Dec 365 99 11 PM 31%"),
        ] {
            assert_eq!(strftime(all, DateTime::from_timestamp(seconds, 0).unwrap()).as_deref(), Some(expected));
        }
        for unknown in ["%Q", "%", "%Y %"] {
            assert_eq!(strftime(unknown, Utc::now()), None);
        }
    }
}
