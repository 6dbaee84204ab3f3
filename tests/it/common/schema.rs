//! Checks JSON against the part of JSON Schema 2020-12 that the project's own schemas use; any other keyword in a schema
//! is an error, so nothing in it goes unchecked.

#![allow(clippy::unwrap_used)] // a test ends at the first surprise

use serde_json::Value;

/// Every violation of `schema` by `value`, each with its place.
pub fn violations(schema: &Value, value: &Value) -> Vec<String> {
    let mut found = Vec::new();
    check(schema, schema, value, "$", &mut found);
    found
}

fn is_type(value: &Value, name: &str) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "number" => value.is_number(),
        "integer" => value.is_i64() || value.is_u64(),
        other => panic!("type {other} in the schema"),
    }
}

fn check(root: &Value, schema: &Value, value: &Value, at: &str, found: &mut Vec<String>) {
    let schema = schema.as_object().expect("a schema is an object");
    let mut fail = |what: String| found.push(format!("{at}: {what}"));
    for (keyword, rule) in schema {
        match keyword.as_str() {
            "$schema" | "title" | "description" | "$defs" | "properties" | "items" | "$ref" => {}
            "type" => {
                let names = rule.as_array().map_or_else(|| vec![rule], |all| all.iter().collect());
                if !names.iter().any(|n| is_type(value, n.as_str().unwrap())) {
                    fail(format!("expected {rule}, found {value}"));
                }
            }
            "enum" if !rule.as_array().unwrap().contains(value) => {
                fail(format!("expected one of {rule}, found {value}"))
            }
            "minimum" if value.as_f64().is_some_and(|v| v < rule.as_f64().unwrap()) => {
                fail(format!("expected at least {rule}, found {value}"));
            }
            "required" if value.is_object() => {
                let missing = rule.as_array().unwrap().iter().filter(|k| value.get(k.as_str().unwrap()).is_none());
                missing.for_each(|k| fail(format!("no key {k}")));
            }
            "additionalProperties" => {
                assert_eq!(rule, &Value::Bool(false), "additionalProperties in the schema");
                let keys = value.as_object().into_iter().flat_map(|o| o.keys());
                keys.filter(|k| schema["properties"].get(k).is_none()).for_each(|k| fail(format!("unknown key {k}")));
            }
            "enum" | "minimum" | "required" => {}
            other => panic!("keyword {other} in the schema"),
        }
    }
    if let Some(pointer) = schema.get("$ref").and_then(Value::as_str) {
        let target = root.pointer(pointer.trim_start_matches('#')).expect("a reference into the schema");
        check(root, target, value, at, found);
    }
    if let (Some(properties), Some(object)) = (schema.get("properties"), value.as_object()) {
        for (key, value) in object {
            if let Some(rule) = properties.get(key) {
                check(root, rule, value, &format!("{at}.{key}"), found);
            }
        }
    }
    if let (Some(rule), Some(items)) = (schema.get("items"), value.as_array()) {
        for (i, item) in items.iter().enumerate() {
            check(root, rule, item, &format!("{at}[{i}]"), found);
        }
    }
}
