use std::sync::atomic::{AtomicUsize, Ordering};

use ndarray::array;

use super::*;
use crate::replay::tests::tiny_config;
use crate::source::Meta;

/// F32 tensors by hand; counts how often it is read.
struct Hand {
    format: Format,
    tensors: HashMap<String, (Vec<usize>, Vec<f32>)>,
    reads: AtomicUsize,
}

impl Hand {
    fn new(format: Format) -> Self {
        Hand { format, tensors: HashMap::new(), reads: AtomicUsize::new(0) }
    }

    fn with(mut self, name: &str, ne: &[usize], value: impl Fn(usize) -> f32) -> Self {
        let values = (0..ne.iter().product()).map(value).collect();
        self.tensors.insert(name.into(), (ne.to_vec(), values));
        self
    }
}

impl RawModel for Hand {
    fn format(&self) -> Format {
        self.format
    }
    fn meta(&self, _: &str) -> Option<Meta> {
        None
    }
    fn tensor(&self, name: &str) -> Option<RawTensor<'_>> {
        let (ne, values) = self.tensors.get(name)?;
        self.reads.fetch_add(1, Ordering::Relaxed);
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Some(RawTensor { type_id: 0, ne: ne.clone(), bytes })
    }
}

fn small() -> RefConfig {
    RefConfig { heads: 2, nope: 1, value: 2, kv_rank: 2, ..tiny_config() }
}

#[test]
fn a_whole_kv_b_is_split_and_its_keys_transposed() {
    // Rows per head: one key row, two value rows, of two latent columns each.
    let hand = Hand::new(Format::Hf).with("model.layers.1.self_attn.kv_b_proj.weight", &[2, 6], |i| i as f32);
    let w = ModelWeights::new(&hand, &small());
    assert_eq!(*w.heads(Some(1), RefParam::KB).expect("split"), array![[[0.0], [1.0]], [[6.0], [7.0]]]);
    assert_eq!(
        *w.heads(Some(1), RefParam::VB).expect("split"),
        array![[[2.0, 3.0], [4.0, 5.0]], [[8.0, 9.0], [10.0, 11.0]]]
    );
}

#[test]
fn separate_k_b_is_taken_as_it_is() {
    let hand = Hand::new(Format::Gguf).with("blk.1.attn_k_b.weight", &[1, 2, 2], |i| i as f32);
    let w = ModelWeights::new(&hand, &small());
    assert_eq!(*w.heads(Some(1), RefParam::KB).expect("read"), array![[[0.0], [1.0]], [[2.0], [3.0]]]);
    match w.heads(Some(1), RefParam::VB) {
        Err(RefError::Tensor { name, .. }) => assert_eq!(name, "blk.1.attn_v_b.weight"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn experts_are_read_from_a_stack_or_one_by_one() {
    let c = tiny_config();
    let size = c.hidden * c.moe_ffn;
    let stack =
        Hand::new(Format::Gguf).with("blk.1.ffn_up_exps.weight", &[c.hidden, c.moe_ffn, c.experts], |i| i as f32);
    let single =
        Hand::new(Format::Hf)
            .with("model.layers.1.mlp.experts.2.up_proj.weight", &[c.hidden, c.moe_ffn], |i| (i + 2 * size) as f32);
    let (stack, single) = (ModelWeights::new(&stack, &c), ModelWeights::new(&single, &c));
    let from_stack = stack.expert(Some(1), RefParam::UpExps, 2).expect("read");
    assert_eq!(from_stack, single.expert(Some(1), RefParam::UpExps, 2).expect("read"));
    assert_eq!(from_stack[[0, 0]], (2 * size) as f32);
    assert!(stack.expert(Some(1), RefParam::UpExps, c.experts).is_err());
}

#[test]
fn values_are_kept_until_another_layer_is_asked_for() {
    let c = tiny_config();
    let norm = |i: usize| i as f32;
    let hand = Hand::new(Format::Gguf).with("blk.0.attn_norm.weight", &[c.hidden], norm).with(
        "blk.1.attn_norm.weight",
        &[c.hidden],
        norm,
    );
    let w = ModelWeights::new(&hand, &c);
    // Each read of a weight looks once for the tensor and once for a separate scale, which is absent and not counted.
    for (layer, reads) in [(0, 1), (0, 1), (1, 2), (0, 3)] {
        w.vector(Some(layer), RefParam::AttnNorm).expect("read");
        assert_eq!(hand.reads.load(Ordering::Relaxed), reads);
    }
}

#[test]
fn a_tied_head_is_the_embedding() {
    let c = RefConfig { tied_head: true, vocab: 3, hidden: 2, ..tiny_config() };
    let hand = Hand::new(Format::Gguf).with("token_embd.weight", &[2, 3], |i| i as f32);
    let w = ModelWeights::new(&hand, &c);
    assert_eq!(*w.matrix(None, RefParam::Head).expect("tied"), array![[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]);
    assert_eq!(w.embedding_row(2).expect("exists"), array![4.0, 5.0]);
    assert_eq!(w.embedding_row(3), Err(RefError::Token { id: 3, vocab: 3 }));
    let untied = RefConfig { tied_head: false, ..c };
    assert!(ModelWeights::new(&hand, &untied).matrix(None, RefParam::Head).is_err());
}

/// A name in which `.weight` stands twice has a scale of its own, too.
#[test]
fn a_scale_apart_is_refused_whatever_the_name() {
    let c = tiny_config();
    let name = "model.layers.0.self_attn.indexer.weights_proj";
    let hand = Hand::new(Format::Hf).with(&format!("{name}.weight"), &[c.hidden, c.index_heads], |_| 0.5);
    assert!(ModelWeights::new(&hand, &c).matrix(Some(0), RefParam::IndexProj).is_ok());
    let hand = hand.with(&format!("{name}.scale"), &[1], |_| 2.0);
    let refused = ModelWeights::new(&hand, &c).matrix(Some(0), RefParam::IndexProj);
    assert!(
        matches!(&refused, Err(RefError::Tensor { name: at, .. }) if *at == format!("{name}.scale")),
        "{refused:?}"
    );
}

#[test]
fn wrong_shapes_and_forms_are_named() {
    let c = tiny_config();
    let hand = Hand::new(Format::Gguf)
        .with("blk.0.attn_q_a.weight", &[c.q_rank, c.hidden], |_| 0.0)
        .with("blk.0.attn_norm.weight", &[c.hidden, 1], |_| 0.0)
        .with("blk.0.ffn_up.weight", &[c.hidden, c.ffn], |_| 0.0)
        .with("blk.0.ffn_up.scale", &[1], |_| 2.0);
    let w = ModelWeights::new(&hand, &c);
    let named = |e: RefError| match e {
        RefError::Tensor { name, .. } => name,
        other => panic!("{other:?}"),
    };
    assert_ne!(c.q_rank, c.hidden);
    assert_eq!(named(w.matrix(Some(0), RefParam::QA).expect_err("transposed")), "blk.0.attn_q_a.weight");
    assert_eq!(named(w.matrix(Some(0), RefParam::Gate).expect_err("absent")), "blk.0.ffn_gate.weight");
    assert_eq!(named(w.matrix(Some(0), RefParam::Up).expect_err("a scale apart")), "blk.0.ffn_up.scale");
    assert!(w.vector(Some(0), RefParam::AttnNorm).is_ok(), "a trailing axis of one is no axis");
    assert_eq!(w.vector(Some(0), RefParam::QA), Err(RefError::Form { param: RefParam::QA, asked: "vector" }));
    assert_eq!(
        w.matrix(Some(0), RefParam::KB).map(|_| ()),
        Err(RefError::Form { param: RefParam::KB, asked: "matrix" })
    );
}
