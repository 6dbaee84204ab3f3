//! The tokenizer against transformers and llama.cpp: every id of every golden string and conversation, on the real
//! model files and on the Hugging Face files they were converted from; and the checks on files that are wrong.

use std::path::PathBuf;

use lockstep::gguf::Gguf;
use lockstep::tokenize::{
    ChatMessage, Check, Finding, JsonTokenizer, OtherTemplate, StopSource, TokenizeError, Tokenizer, TokenizerSpec,
};
use serde_json::{Map, Value, json};

const NANO: &str = "models/glm5-nano-Q4_K_M.gguf";
const RANDOM: [&str; 2] = ["models/nano52-Q2_K.gguf", "models/pico-Q4_K_M-split-00001-of-00004.gguf"];

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("goldens").join(name)
}

fn text(name: &str) -> String {
    std::fs::read_to_string(golden(name)).unwrap()
}

fn parsed(name: &str) -> Value {
    serde_json::from_str(&text(name)).unwrap()
}

fn gguf_spec(name: &str) -> TokenizerSpec {
    TokenizerSpec::from_gguf(&Gguf::open(&golden(name)).unwrap()).unwrap()
}

fn hf_spec() -> TokenizerSpec {
    let config = text("tokenizer/tok/tokenizer_config.json");
    TokenizerSpec::from_hf(&text("tokenizer/tok/tokenizer.json"), Some(&config), None).unwrap()
}

fn tokenizer(spec: &TokenizerSpec) -> Tokenizer {
    Tokenizer::new(spec).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

fn messages(value: &Value) -> Vec<ChatMessage> {
    serde_json::from_value(value.clone()).unwrap()
}

/// Every golden string: ids both ways, and the same text through a stream.
fn assert_strings(tokenizer: &Tokenizer, vectors: &Value, field: &str) {
    for vector in vectors.as_array().unwrap() {
        let (text, expected) = (vector["text"].as_str().unwrap(), ids(&vector[field]));
        assert_eq!(tokenizer.encode(text, true).unwrap(), expected, "{text:?}");
        assert_eq!(tokenizer.decode(&expected, false), vector["decoded"].as_str().unwrap(), "{text:?}");
        let mut stream = tokenizer.stream();
        let mut sent: String = expected.iter().filter_map(|&id| stream.push(id)).collect();
        sent += &stream.finish();
        assert_eq!(sent, tokenizer.decode(&expected, true), "{text:?}");
    }
}

fn assert_chat(tokenizer: &Tokenizer, chat: &Value) {
    let turns = messages(&chat["messages"]);
    assert_eq!(tokenizer.render_chat(&turns, true, &Map::new()).unwrap(), chat["text"].as_str().unwrap());
    assert_eq!(tokenizer.chat_ids(&turns, true, &Map::new()).unwrap(), ids(&chat["ids"]));
}

fn check<'a>(checks: &'a [Check], name: &str) -> &'a Check {
    checks.iter().find(|c| c.name == name).unwrap_or_else(|| panic!("no check {name:?} in {checks:?}"))
}

#[test]
fn the_trained_model_has_every_golden_id() {
    let tokenizer = tokenizer(&gguf_spec(NANO));
    let vectors = parsed("tokenizer/glm5-nano_vectors.json");
    assert_eq!(vectors["strings"].as_array().unwrap().len(), 37);
    assert_strings(&tokenizer, &vectors["strings"], "ids");
    let chats = vectors["chat"].as_array().unwrap();
    assert_eq!(chats.len(), 2);
    for chat in chats {
        assert_chat(&tokenizer, chat);
    }
}

#[test]
fn the_other_vocabulary_has_every_golden_id_from_gguf_and_from_hugging_face_files() {
    let vectors = parsed("tokenizer/tokenizer_vectors.json");
    assert_eq!(vectors["vectors"].as_array().unwrap().len(), 28);
    for spec in [gguf_spec(RANDOM[0]), gguf_spec(RANDOM[1]), hf_spec()] {
        let tokenizer = tokenizer(&spec);
        assert_strings(&tokenizer, &vectors["vectors"], "hf");
        assert_chat(&tokenizer, &vectors["chat"]);
    }
}

#[test]
fn the_chat_turn_of_the_activation_goldens_is_what_the_template_renders() {
    let tokenizer = tokenizer(&gguf_spec(NANO));
    // The manifest has margins of "Infinity", which Python writes and JSON does not know.
    let manifest = text("glm5-nano/manifest.json").replace(": Infinity", ": null");
    let manifest: Value = serde_json::from_str(&manifest).unwrap();
    let short = ids(&manifest["short"]["ids"]);
    let user = ChatMessage::new("user", "Genesis 1:1");
    let answer = ChatMessage::new("assistant", "In the beginning God created the heaven and the earth.");
    let none = Map::new();
    assert_eq!(tokenizer.chat_ids(std::slice::from_ref(&user), true, &none).unwrap(), short[..10]);
    assert_eq!(tokenizer.chat_ids(&[user, answer], false, &none).unwrap(), short[..22]);
    // The turn ends with <|user|>, which is a stop id and no part of the content.
    assert!(tokenizer.stop_ids().contains(short[22]));
    assert_eq!(tokenizer.decode(&short[10..], true), "In the beginning God created the heaven and the earth.");
}

#[test]
fn stop_ids_are_the_union_of_all_that_is_stated() {
    let stops = |spec: &TokenizerSpec| -> Vec<u32> { tokenizer(spec).stop_ids().ids.iter().map(|s| s.id).collect() };
    let spec = gguf_spec(NANO);
    assert_eq!(stops(&spec), [4072, 4079, 4081]);
    let first = tokenizer(&spec).stop_ids().ids[0].clone();
    assert_eq!((first.literal.as_str(), first.sources), ("<|endoftext|>", vec![StopSource::Eos, StopSource::Literal]));
    // A converter that kept eos only, with and without the generation config's list.
    let eos_only = TokenizerSpec { eot: None, eom: None, ..spec.clone() };
    assert_eq!(stops(&eos_only), [4072]);
    assert!(tokenizer(&eos_only).stop_ids().warning.is_some());
    let with_list = TokenizerSpec { extra_eos: vec![4072, 4079, 4081], ..eos_only };
    assert_eq!(stops(&with_list), [4072, 4079, 4081]);
    assert_eq!(tokenizer(&with_list).stop_ids().warning, None);
    // Nothing stated and no such literal: a warning, and a check that fails.
    let mut nothing = TokenizerSpec { eos: None, eot: None, eom: None, ..spec };
    nothing.tokens[4072] = "<|over|>".into();
    assert!(stops(&nothing).is_empty());
    assert!(!check(&nothing.checks(None, None), "stop ids").holds());
}

#[test]
fn good_files_pass_every_check_and_agree_with_tokenizer_json() {
    let nano = gguf_spec(NANO).checks(Some(4096), None);
    assert!(nano.iter().all(|c| c.holds()), "{nano:#?}");
    let json = JsonTokenizer::new(&text("tokenizer/tok/tokenizer.json")).unwrap();
    for spec in [gguf_spec(RANDOM[0]), hf_spec()] {
        let checks = spec.checks(Some(2048), Some(&json));
        let none = spec.bos.is_none().then_some("bos"); // named by none of these files
        assert!(checks.iter().all(|c| c.holds() || Some(c.name) == none), "{checks:#?}");
        assert_eq!(checks.len(), 12);
    }
    let detail = check(&nano, "bos").detail.clone();
    assert_eq!(detail, "template adds 1, tokenizer adds 0 -> 1 at the start; fed: 1");
}

#[test]
fn two_givers_of_a_bos_give_one() {
    let spec = TokenizerSpec { add_bos: Some(true), ..gguf_spec(NANO) };
    let turn = [ChatMessage::new("user", "Genesis 1:1")];
    let ids = tokenizer(&spec).chat_ids(&turn, true, &Map::new()).unwrap();
    assert_eq!(ids.iter().filter(|id| **id == 4074).count(), 1);
    let checks = spec.checks(None, None);
    let bos = check(&checks, "bos");
    // Fed once here; engines that add both feed it twice.
    let says = "BOS_TWICE: template adds 1, tokenizer adds 1 -> 2 at the start; fed: 1";
    assert!(bos.finding == Finding::Doubtful && bos.detail.contains(says), "{bos:?}");
    // One that nothing adds: named with the key, its value and what was expected.
    let spec = TokenizerSpec { bos: Some(300), ..gguf_spec(NANO) };
    let found = check(&spec.checks(None, None), "bos").clone();
    let says = [&format!("bos_token_id is 300 {:?}", spec.tokens[300]), "begins with it 0 times", "expected once"];
    assert!(!found.holds() && says.iter().all(|s| found.detail.contains(*s)), "{found:?}");
    // A template that lost its BOS, or has it twice.
    let strip = |by: &str| {
        let mut spec = gguf_spec(NANO);
        spec.chat_template = spec.chat_template.map(|t| t.replacen("[gMASK]", by, 1));
        check(&spec.checks(None, None), "bos").holds()
    };
    assert!(!strip("") && !strip("[gMASK][gMASK]") && strip("[gMASK]"));
}

#[test]
fn control_tokens_without_their_type_are_named() {
    let mut spec = gguf_spec(NANO);
    spec.types[4079] = 4;
    assert!(check(&spec.checks(None, None), "template literals").holds(), "a user-defined token is one id, too");
    // As a normal token <|user|> is cut into pieces.
    spec.types[4079] = 1;
    let checks = spec.checks(None, None);
    let literals = check(&checks, "template literals");
    assert!(!literals.holds() && literals.detail.contains("<|user|> is token 4079 but of type 1"), "{literals:?}");
    // A template made for another vocabulary.
    let mut spec = gguf_spec(NANO);
    spec.chat_template = spec.chat_template.map(|t| t.replace("<|user|>", "<|im_start|>"));
    let checks = spec.checks(None, None);
    let literals = check(&checks, "template literals");
    assert!(!literals.holds() && literals.detail.contains("<|im_start|> is no token"), "{literals:?}");
}

#[test]
fn a_template_that_does_not_parse_fails_its_check_and_leaves_completion() {
    let spec = TokenizerSpec { chat_template: Some("a\n{% if %}".into()), ..gguf_spec(NANO) };
    let checks = spec.checks(None, None);
    let template = check(&checks, "chat template");
    assert!(!template.holds() && template.detail.contains("line 2"), "{template:?}");
    assert!(tokenizer(&spec).encode("a", true).is_ok());
}

#[test]
fn what_is_said_must_be_in_the_prompt_once() {
    let with = |edit: &dyn Fn(String) -> String| {
        let mut spec = gguf_spec(NANO);
        spec.chat_template = spec.chat_template.map(edit);
        check(&spec.checks(None, None), "template text").clone()
    };
    let user = "<|user|>{{ m.content }}";
    let says = |found: Check, finding, says: &str| {
        assert!(found.finding == finding && found.detail.contains(says), "{says}: {found:?}");
    };
    says(with(&|t| t.replace(user, "<|user|>")), Finding::Fails, "the user's \"Elderberry\" is not in it");
    let twice = "<|user|>{{ m.content }}{{ m.content }}";
    says(with(&|t| t.replace(user, twice)), Finding::Fails, "the user's \"Elderberry\" is in it 2 times");
    let first = "<|user|>{% if loop.first %}{{ m.content }}{% endif %}";
    says(with(&|t| t.replace(user, first)), Finding::Fails, "the user's \"Buckwheat\" is not in it");
    for (role, word, was) in [
        ("system", "Alfalfa", "<|system|>{{ m.content }}"),
        ("assistant", "Chicory", "</think>{{ m.content }}"),
        ("tool answer", "Ginger", "<|observation|>{{ m.content }}"),
    ] {
        let found = with(&|t| t.replace(was, was.strip_suffix("{{ m.content }}").unwrap()));
        says(found, Finding::Doubtful, &format!("the {role}'s {word:?} is not in it"));
    }
    // Twins: the template as it is, which knows no calls; one that refuses a system's turn; one without tools; none.
    let clean = with(&|t| t);
    says(clean, Finding::Holds, "the words of assistant, system, user are in the prompt once; tool calls not known");
    let refuses = with(&|t| t.replace("<|system|>{{ m.content }}", "{{ raise_exception('no system') }}"));
    says(refuses, Finding::Holds, "the words of assistant, user are");
    says(with(&|t| t.replace("'tool'", "'nobody'")), Finding::Holds, "tool answers not known");
    let none = TokenizerSpec { chat_template: None, ..gguf_spec(NANO) };
    says(check(&none.checks(None, None), "template text").clone(), Finding::NotApplicable, "no chat template");
}

/// What a template would have to be asked is not asked where there is none, and where it does not answer.
#[test]
fn without_a_prompt_nothing_is_said_of_it() {
    let found =
        |template: Option<String>| TokenizerSpec { chat_template: template, ..gguf_spec(NANO) }.checks(None, None);
    let source = gguf_spec(NANO).chat_template.unwrap();
    let none = found(None);
    for name in ["chat template", "template text", "template literals", "generation prompt", "bos"] {
        assert_eq!(check(&none, name).finding, Finding::NotApplicable, "{name}");
        assert_eq!(check(&found(Some(source.clone())), name).finding, Finding::Holds, "{name}");
    }
    // One that never renders is told once.
    let never = found(Some(format!("{{{{ raise_exception('never') }}}}{source}")));
    for (name, finding) in [
        ("chat template", Finding::Fails),
        ("template text", Finding::NotApplicable),
        ("generation prompt", Finding::NotApplicable),
    ] {
        assert_eq!(check(&never, name).finding, finding, "{name}");
    }
    // One that refuses some conversations is not taken for one that was asked.
    let refuses =
        |when: &str| found(Some(format!("{{% if {when} %}}{{{{ raise_exception('not so') }}}}{{% endif %}}{source}")));
    let closed = refuses("not add_generation_prompt");
    let open = check(&closed, "generation prompt");
    let says = "the template refuses a turn without add_generation_prompt";
    assert!(
        open.finding == Finding::Doubtful && open.detail.contains(says) && open.detail.contains("not so"),
        "{open:?}"
    );
    let single = refuses("messages | length == 1");
    for name in ["template text", "generation prompt"] {
        let refused = check(&single, name);
        assert!(refused.finding == Finding::Fails && refused.detail.contains("not so"), "{refused:?}");
    }
    assert!(refuses("messages | length == 99").iter().all(Check::holds));
}

#[test]
fn other_templates_are_said_and_rivals_are_doubtful() {
    let config = |list: Value| json!({"chat_template": list, "eos_token": null}).to_string();
    let own = hf_spec().chat_template.unwrap();
    let list = json!([{"name": "default", "template": own}, {"name": "tool_use", "template": "x"}]);
    let tokenizer = text("tokenizer/tok/tokenizer.json");
    let spec = TokenizerSpec::from_hf(&tokenizer, Some(&config(list)), None).unwrap();
    assert_eq!(
        (spec.chat_template.as_deref(), &spec.other_templates[..]),
        (Some(&own[..]), &[OtherTemplate::named("tool_use")][..])
    );
    let named = check(&spec.checks(None, None), "chat template").clone();
    assert!(named.holds() && named.detail.ends_with("not used here: tool_use"), "{named:?}");
    let rival = OtherTemplate { name: "tokenizer_config.json".into(), is_rival: true };
    let two = TokenizerSpec { other_templates: vec![rival], ..gguf_spec(NANO) };
    let found = check(&two.checks(None, None), "chat template").clone();
    assert!(
        found.finding == Finding::Doubtful && found.detail.contains("tokenizer_config.json has another chat_template"),
        "{found:?}"
    );
}

#[test]
fn a_statement_that_this_build_lacks_is_no_fault_of_the_template() {
    let with = |word: &str| {
        let mut spec = gguf_spec(NANO);
        let marked = format!("</think>{{% {word} %}}{{{{ m.content }}}}{{% end{word} %}}");
        spec.chat_template = spec.chat_template.map(|t| t.replace("</think>{{ m.content }}", &marked));
        check(&spec.checks(None, None), "chat template").clone()
    };
    let known = with("generation");
    assert!(known.finding == Finding::Unmeasured && known.detail.contains("\"generation\" is known"), "{known:?}");
    let unknown = with("narration");
    assert!(unknown.finding == Finding::Fails && unknown.detail.contains("narration"), "{unknown:?}");
}

#[test]
fn what_ends_a_turn_must_be_a_control_token() {
    type Key = fn(&mut TokenizerSpec) -> &mut Option<u32>;
    let keys: [(&str, Key); 3] =
        [("eos_token_id", |s| &mut s.eos), ("eot_token_id", |s| &mut s.eot), ("eom_token_id", |s| &mut s.eom)];
    for (key, id) in keys {
        let mut spec = gguf_spec(NANO);
        *id(&mut spec) = Some(7);
        let stops = check(&spec.checks(None, None), "stop ids").clone();
        let says = format!("{key} is 7 \"(\", an ordinary token");
        assert!(stops.finding == Finding::Fails && stops.detail.contains(&says), "{stops:?}");
        *id(&mut spec) = Some(4080);
        assert!(check(&spec.checks(None, None), "stop ids").holds());
        spec.types[4080] = 4;
        assert!(check(&spec.checks(None, None), "stop ids").holds(), "a user-defined token");
    }
    let spec = TokenizerSpec { extra_eos: vec![7], ..gguf_spec(NANO) };
    assert!(check(&spec.checks(None, None), "stop ids").detail.contains("generation_config.json is 7"));
}

#[test]
fn ordinary_tokens_are_what_the_merges_make_of_their_text() {
    let found = |change: fn(&mut Vec<String>)| {
        let mut spec = gguf_spec(NANO);
        change(&mut spec.merges);
        check(&spec.checks(None, None), "merges").clone()
    };
    assert!(found(|_| {}).detail.contains("4072 ordinary tokens"));
    let fails = |found: Check, says: &str| {
        assert!(found.finding == Finding::Fails && found.detail.contains(says), "{found:?}");
    };
    fails(found(|merges| merges.reverse()), "of 4072 ordinary tokens are not what");
    fails(found(Vec::clear), "3816 can never be reached");
    fails(found(|merges| merges.truncate(3000)), "can never be reached");
    // A few that no merge makes are put in by hand, and still a token where a text is nothing else.
    let few = found(|merges| merges.truncate(merges.len() - 5));
    assert!(few.finding == Finding::Doubtful && few.detail.contains("5 can never be reached"), "{few:?}");
}

#[test]
fn a_renamed_token_is_told_as_both_sides_have_it() {
    let source = text("tokenizer/tok/tokenizer.json");
    let other = JsonTokenizer::new(&source).unwrap();
    let mut spec = gguf_spec(RANDOM[0]);
    let name = "tokens equal tokenizer.json's";
    assert!(check(&spec.checks(None, Some(&other)), name).holds());
    let id = spec.types.iter().rposition(|ty| *ty == 3).unwrap();
    let right = std::mem::replace(&mut spec.tokens[id], "<|renamed|>".into());
    let found = check(&spec.checks(None, Some(&other)), name).clone();
    let says = format!("id {id}: \"<|renamed|>\" here, {right:?} in tokenizer.json");
    assert!(!found.holds() && found.detail == says, "{found:?}");
}

#[test]
fn a_wrong_rule_is_found_by_the_probe_and_unknown_ones_are_refused() {
    let source = text("tokenizer/tok/tokenizer.json");
    // Digits one by one, contractions in lower case only, no look-ahead for white space.
    for (right, wrong) in [("{1,3}", ""), ("(?i:'s", "(?:'s"), (r"\\s+(?!\\S)|", "")] {
        let other = source.replacen(right, wrong, 1);
        assert_ne!(other, source, "{right}");
        let checks = gguf_spec(RANDOM[0]).checks(None, Some(&JsonTokenizer::new(&other).unwrap()));
        let same = check(&checks, "ids equal tokenizer.json's");
        assert!(!same.holds() && same.detail.contains("first difference at"), "{right}: {same:?}");
        // As the model's own rule it is one that this build lacks.
        let refused = Tokenizer::new(&TokenizerSpec::from_hf(&other, None, None).unwrap());
        assert!(matches!(refused, Err(TokenizeError::Lacking { .. })), "{right}");
    }
    let built = TokenizerSpec { pre: Some("glm-4".into()), ..gguf_spec(NANO) }.checks(None, None);
    assert!(!built[0].holds() && built[0].detail.contains("the nearest known one is \"glm4\""), "{built:?}");
    let built = TokenizerSpec { pre: None, ..gguf_spec(NANO) }.checks(None, None);
    assert!(!built[0].holds() && built[0].detail.contains("names no pre-tokenizer"), "{built:?}");
}

#[test]
fn another_vocabulary_and_another_embedding_are_found() {
    let spec = gguf_spec(RANDOM[0]);
    let mut swapped: Value = parsed("tokenizer/tok/tokenizer.json");
    let vocab = swapped["model"]["vocab"].as_object_mut().unwrap();
    let (a, b) = (vocab["a"].clone(), vocab["b"].clone());
    vocab.insert("a".into(), b);
    vocab.insert("b".into(), a);
    let checks = spec.checks(Some(2047), Some(&JsonTokenizer::new(&swapped.to_string()).unwrap()));
    assert!(!check(&checks, "tokens equal tokenizer.json's").holds());
    assert!(!check(&checks, "ids equal tokenizer.json's").holds());
    assert!(!check(&checks, "vocabulary").holds());
    assert!(check(&spec.checks(Some(2112), None), "vocabulary").detail.contains("64 padding rows"));
}

#[test]
fn hugging_face_files_give_the_same_description_as_gguf() {
    let (hf, gguf) = (hf_spec(), gguf_spec(RANDOM[0]));
    assert_eq!((&hf.tokens, &hf.types, &hf.merges), (&gguf.tokens, &gguf.types, &gguf.merges));
    assert_eq!((hf.eos, hf.pad, &hf.chat_template), (gguf.eos, gguf.pad, &gguf.chat_template));
    let source = text("tokenizer/tok/tokenizer.json");
    let config = json!({"eos_token": {"content": "<|user|>"}, "add_bos_token": false}).to_string();
    let generation = json!({"eos_token_id": [2031, 2038, 2040]}).to_string();
    let spec = TokenizerSpec::from_hf(&source, Some(&config), Some(&generation)).unwrap();
    assert_eq!((spec.eos, spec.add_bos, spec.extra_eos), (Some(2038), Some(false), vec![2031, 2038, 2040]));
}

#[test]
fn broken_hugging_face_files_are_refused_without_panic() {
    let source = parsed("tokenizer/tok/tokenizer.json");
    let changed = |change: &dyn Fn(&mut Value)| {
        let mut file = source.clone();
        change(&mut file);
        TokenizerSpec::from_hf(&file.to_string(), None, None)
    };
    let far = changed(&|f| f["model"]["vocab"]["a"] = json!(4_000_000_000u32));
    assert!(matches!(far, Err(TokenizeError::IdOutOfRange { id: 4_000_000_000, .. })), "{far:?}");
    let twice = changed(&|f| f["model"]["vocab"]["a"] = json!(65));
    assert!(matches!(twice, Err(TokenizeError::Json { .. })), "{twice:?}");
    for (field, value) in [("model", json!({"type": "Unigram", "vocab": []})), ("normalizer", json!({"type": "NFC"}))] {
        assert!(matches!(changed(&|f| f[field] = value.clone()), Err(TokenizeError::Lacking { .. })), "{field}");
    }
    for (field, value) in [("model", json!({"type": "Frob", "vocab": []})), ("normalizer", json!({"type": "Frob"}))] {
        assert!(matches!(changed(&|f| f[field] = value.clone()), Err(TokenizeError::Json { .. })), "{field}");
    }
    for (text, is_damage) in [("", true), ("[]", false), ("{\"model\":", true), ("{}", false)] {
        let refused = TokenizerSpec::from_hf(text, None, None);
        assert!(refused.as_ref().is_err_and(|e| e.is_damage() == is_damage), "{text}: {refused:?}");
        assert!(JsonTokenizer::new(text).is_err());
    }
    // A merge whose result is longer than any token would run over the library's buffer.
    let mut file = source.clone();
    let long = file["model"]["vocab"].as_object().unwrap().keys().max_by_key(|k| k.len()).unwrap().clone();
    file["model"]["merges"].as_array_mut().unwrap().push(json!([long, long]));
    assert!(matches!(JsonTokenizer::new(&file.to_string()), Err(TokenizeError::MergeUnknown { .. })));
    let config = json!({"eos_token": "<|nowhere|>"}).to_string();
    let nowhere = TokenizerSpec::from_hf(&source.to_string(), Some(&config), None);
    assert!(matches!(nowhere, Err(TokenizeError::Json { .. })), "{nowhere:?}");
}
