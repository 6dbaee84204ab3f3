use std::collections::HashMap;

use super::*;
use crate::source::RawTensor;

/// Metadata by hand, no tensors but a head.
struct Hand {
    format: Format,
    meta: HashMap<String, Meta>,
}

impl RawModel for Hand {
    fn format(&self) -> Format {
        self.format
    }
    fn meta(&self, key: &str) -> Option<Meta> {
        self.meta.get(key).cloned()
    }
    fn tensor(&self, name: &str) -> Option<RawTensor<'_>> {
        (name == "output.weight").then(|| RawTensor { type_id: 0, ne: vec![1], bytes: vec![0; 4].into() })
    }
}

fn gguf() -> Hand {
    let mut meta = HashMap::from([("general.architecture".into(), Meta::Str("glm-dsa".into()))]);
    let counts = [
        ("block_count", 9),
        ("nextn_predict_layers", 1),
        ("context_length", 202752),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("attention.head_count", 4),
        ("attention.key_length", 40),
        ("attention.value_length", 32),
        ("attention.key_length_mla", 24),
        ("attention.value_length_mla", 16),
        ("attention.q_lora_rank", 48),
        ("attention.kv_lora_rank", 32),
        ("rope.dimension_count", 8),
        ("leading_dense_block_count", 1),
        ("expert_count", 8),
        ("expert_used_count", 2),
        ("expert_shared_count", 1),
        ("expert_feed_forward_length", 32),
        ("attention.indexer.head_count", 2),
        ("attention.indexer.key_length", 16),
        ("attention.indexer.top_k", 4),
        ("vocab_size", 100),
    ];
    for (key, value) in counts {
        meta.insert(format!("glm-dsa.{key}"), Meta::U64(value));
    }
    for (key, value) in
        [("rope.freq_base", 1e6), ("attention.layer_norm_rms_epsilon", 1e-5), ("expert_weights_scale", 2.5)]
    {
        meta.insert(format!("glm-dsa.{key}"), Meta::F64(value));
    }
    Hand { format: Format::Gguf, meta }
}

fn set(hand: &mut Hand, key: &str, value: Meta) {
    hand.meta.insert(format!("glm-dsa.{key}"), value);
}

#[test]
fn reads_sizes_and_defaults() {
    let c = RefConfig::from_raw(&gguf(), Eps::File).expect("valid");
    assert_eq!((c.layers, c.mtp_layers, c.nope, c.rope, c.value), (8, 1, 16, 8, 16));
    assert_eq!((c.gating, c.groups, c.groups_used, c.normalise_weights), (Gating::Sigmoid, 1, 1, false));
    assert_eq!((c.latent_eps, c.index_eps), (1e-5, 1e-6));
    assert!(c.index_full.iter().all(|&full| full) && !c.tied_head);
}

#[test]
fn eps_follows_the_policy() {
    let hf = RefConfig::from_raw(&gguf(), Eps::Hf).expect("valid");
    assert_eq!((hf.eps, hf.latent_eps, hf.index_eps), (1e-5, 1e-6, 1e-6));
    let lcpp = RefConfig::from_raw(&gguf(), Eps::LlamaCpp).expect("valid");
    assert_eq!((lcpp.latent_eps, lcpp.index_eps), (1e-5, 0.0));
}

#[test]
fn long_context_without_types_means_shared_layers() {
    let mut hand = gguf();
    set(&mut hand, "context_length", Meta::U64(1 << 20));
    let c = RefConfig::from_raw(&hand, Eps::File).expect("valid");
    assert_eq!(c.index_full, [true, true, true, false, false, false, true, false]);
    assert_eq!((c.index_source(5), c.index_source(6)), (2, 6));
}

#[test]
fn types_are_read_as_bools_or_integers() {
    let mut hand = gguf();
    let list = |n: usize| Meta::Array((0..n).map(|i| Meta::I64(i64::from(i % 2 == 0))).collect());
    set(&mut hand, "attention.indexer.types", list(9));
    let full = |hand: &Hand| RefConfig::from_raw(hand, Eps::File).map(|c| c.index_full);
    let every_other = Ok(vec![true, false, true, false, true, false, true, false]);
    assert_eq!(full(&hand), every_other);
    // As in C, all but 0 are true.
    let bytes = |of: fn(i64) -> Meta| Meta::Array((0..9).map(|i| of(if i % 2 == 0 { 255 - i } else { 0 })).collect());
    for types in [bytes(Meta::I64), bytes(|i| Meta::I64(-i)), bytes(|i| Meta::U64(i.unsigned_abs()))] {
        set(&mut hand, "attention.indexer.types", types);
        assert_eq!(full(&hand), every_other);
    }
    set(&mut hand, "attention.indexer.types", bytes(|_| Meta::F64(1.0)));
    assert!(full(&hand).is_err());
    set(&mut hand, "attention.indexer.types", list(7));
    assert!(RefConfig::from_raw(&hand, Eps::File).is_err());
}

#[test]
fn zero_groups_are_no_groups() {
    for (make, all, used) in [
        (gguf as fn() -> Hand, "glm-dsa.expert_group_count", "glm-dsa.expert_group_used_count"),
        (hf, "n_group", "topk_group"),
    ] {
        let read = |groups: u64, groups_used: u64| {
            let mut hand = make();
            hand.meta.insert(all.into(), Meta::U64(groups));
            hand.meta.insert(used.into(), Meta::U64(groups_used));
            RefConfig::from_raw(&hand, Eps::File).map(|c| (c.groups, c.groups_used))
        };
        for none in [(0, 0), (1, 0), (0, 1), (1, 1)] {
            assert_eq!(read(none.0, none.1), Ok((1, 1)), "{all} {none:?}");
        }
        assert_eq!(read(4, 2), Ok((4, 2)));
        assert!(matches!(read(4, 0), Err(RefError::Key { key, .. }) if key == used));
    }
}

/// The classes that read these files have defaults of their own, which are not the same ones.
#[test]
fn a_number_without_an_agreed_default_must_be_there() {
    let named = |hand: &Hand| match RefConfig::from_raw(hand, Eps::File) {
        Err(RefError::Key { key, .. }) => key,
        other => panic!("{other:?}"),
    };
    let (mut a, mut b, mut c) = (gguf(), hf(), hf());
    a.meta.remove("glm-dsa.expert_weights_scale");
    assert_eq!(named(&a), "glm-dsa.expert_weights_scale");
    b.meta.remove("routed_scaling_factor");
    assert_eq!(named(&b), "routed_scaling_factor");
    c.meta.insert("index_topk_freq".into(), Meta::U64(4));
    assert_eq!(named(&c), "index_skip_topk_offset");
    c.meta.insert("index_skip_topk_offset".into(), Meta::U64(3));
    let full = [true, true, true, false, false, false, true, false];
    assert_eq!(RefConfig::from_raw(&c, Eps::File).map(|c| c.index_full), Ok(full.to_vec()));
}

#[test]
fn per_layer_lists_must_agree() {
    let mut hand = gguf();
    let mut widths = vec![Meta::U64(0); 1];
    widths.extend(vec![Meta::U64(48); 8]);
    set(&mut hand, "expert_feed_forward_length", Meta::Array(widths.clone()));
    assert_eq!(RefConfig::from_raw(&hand, Eps::File).expect("valid").moe_ffn, 48);
    widths[4] = Meta::U64(32);
    set(&mut hand, "expert_feed_forward_length", Meta::Array(widths));
    assert!(RefConfig::from_raw(&hand, Eps::File).is_err());
}

#[test]
fn lists_that_say_the_same_for_all_layers_are_counts() {
    let all = |n: u64| Meta::Array(vec![Meta::U64(n); 9]);
    let mut hand = gguf();
    set(&mut hand, "attention.head_count", all(4));
    set(&mut hand, "attention.key_length", all(40));
    assert_eq!(RefConfig::from_raw(&hand, Eps::File), RefConfig::from_raw(&gguf(), Eps::File));
    let mut widths = vec![Meta::U64(0); 9];
    widths[0] = Meta::U64(96);
    set(&mut hand, "feed_forward_length", Meta::Array(widths.clone()));
    assert_eq!(RefConfig::from_raw(&hand, Eps::File).expect("layer 0 alone is dense").ffn, 96);
    // Without dense layers all entries count.
    set(&mut hand, "leading_dense_block_count", Meta::U64(0));
    assert!(RefConfig::from_raw(&hand, Eps::File).is_err());
    set(&mut hand, "feed_forward_length", all(96));
    assert_eq!(RefConfig::from_raw(&hand, Eps::File).expect("valid").ffn, 96);
    for list in [vec![], vec![Meta::U64(4), Meta::U64(5)]] {
        set(&mut hand, "attention.head_count", Meta::Array(list));
        assert!(RefConfig::from_raw(&hand, Eps::File).is_err());
    }
}

/// As `gguf`, in the keys of a `config.json`.
fn hf() -> Hand {
    let counts = [
        ("num_hidden_layers", 8),
        ("num_nextn_predict_layers", 1),
        ("first_k_dense_replace", 1),
        ("hidden_size", 64),
        ("intermediate_size", 96),
        ("moe_intermediate_size", 32),
        ("num_attention_heads", 4),
        ("q_lora_rank", 48),
        ("kv_lora_rank", 32),
        ("qk_nope_head_dim", 16),
        ("qk_rope_head_dim", 8),
        ("v_head_dim", 16),
        ("n_routed_experts", 8),
        ("num_experts_per_tok", 2),
        ("n_shared_experts", 1),
        ("index_n_heads", 2),
        ("index_head_dim", 16),
        ("index_topk", 4),
        ("vocab_size", 100),
    ];
    let mut meta = HashMap::from([("model_type".into(), Meta::Str("glm_moe_dsa".into()))]);
    meta.extend(counts.map(|(key, value)| (key.into(), Meta::U64(value))));
    for (key, value) in [("rope_parameters.rope_theta", 1e6), ("rms_norm_eps", 1e-5), ("routed_scaling_factor", 2.5)] {
        meta.insert(key.into(), Meta::F64(value));
    }
    Hand { format: Format::Hf, meta }
}

#[test]
fn theta_has_one_place_or_one_value() {
    let theta = |hand: &Hand| RefConfig::from_raw(hand, Eps::File).map(|c| c.rope_theta);
    let mut hand = hf();
    assert_eq!(theta(&hand), Ok(1e6));
    hand.meta.insert("rope_theta".into(), Meta::U64(1_000_000));
    assert_eq!(theta(&hand), Ok(1e6));
    hand.meta.insert("rope_theta".into(), Meta::F64(8e6));
    assert_eq!(theta(&hand), Err(RefError::key("rope_theta", "1000000, as in rope_parameters", "8000000")));
    hand.meta.remove("rope_parameters.rope_theta");
    assert_eq!(theta(&hand), Ok(8e6));
}

#[test]
fn hf_keys_of_another_model_are_refused() {
    for (key, value) in [
        ("rope_parameters.rope_type", Meta::Str("yarn".into())),
        ("rope_parameters.type", Meta::Str("yarn".into())),
        ("rope_scaling.type", Meta::Str("linear".into())),
        ("rope_scaling.factor", Meta::F64(4.0)),
        ("topk_method", Meta::Str("greedy".into())),
        ("moe_layer_freq", Meta::U64(2)),
        ("index_topk_pattern", Meta::Str("FSSS".into())),
    ] {
        let mut hand = hf();
        hand.meta.insert(key.into(), value);
        match RefConfig::from_raw(&hand, Eps::File) {
            Err(RefError::Key { key: named, .. }) => assert_eq!(named, key),
            other => panic!("{key}: {other:?}"),
        }
    }
}

#[test]
fn errors_name_the_key() {
    for (key, value) in [
        ("attention.key_length", Meta::U64(41)),
        ("expert_gating_func", Meta::U64(3)),
        ("block_count", Meta::U64(u64::MAX)),
        ("embedding_length", Meta::U64(0)),
        ("nextn_predict_layers", Meta::U64(9)),
        ("rope.freq_base", Meta::F64(f64::NAN)),
        ("rope.scaling.type", Meta::Str("yarn".into())),
        ("rope.scaling.factor", Meta::F64(4.0)),
        ("rope.scale_linear", Meta::F64(2.0)),
    ] {
        let mut hand = gguf();
        set(&mut hand, key, value);
        match RefConfig::from_raw(&hand, Eps::File) {
            Err(RefError::Key { key: named, .. }) => assert_eq!(named, format!("glm-dsa.{key}")),
            other => panic!("{key}: {other:?}"),
        }
    }
    let mut hand = gguf();
    hand.meta.remove("glm-dsa.attention.indexer.top_k");
    assert!(RefConfig::from_raw(&hand, Eps::File).is_err());
}

#[test]
fn other_architectures_are_refused() {
    let mut hand = gguf();
    hand.meta.insert("general.architecture".into(), Meta::Str("deepseek2".into()));
    let error = RefConfig::from_raw(&hand, Eps::File).expect_err("deepseek2 is not covered");
    assert_eq!(error, RefError::key("general.architecture", "\"glm-dsa\"", "\"deepseek2\""));
}
