//! The reference against numbers that it did not compute: float64 activations of whole models, checked against
//! transformers and llama.cpp, and rows expanded by ggml. Values were stored in f32, which costs at most 2^-24 of each;
//! an exact computation lies within that.

use std::collections::HashMap;

use crate::common::goldens::{self, Goldens, OF_NANO_LONG, OF_NANO_SHORT, OF_NANO52, OF_PICO};
use crate::common::running::open;
use crate::common::{GLM5_NANO, NANO52, PICO};
use lockstep::checkpoint::oracle::Raw;
use lockstep_reference::config::RopeStyle;
use lockstep_reference::dequant::block_format;
use lockstep_reference::{
    Arith, Eps, ModelWeights, Order, RefConfig, RefOptions, RefParam, RefRecipe, Replay, Weights, forward, ops, points,
};
use ndarray::{Array1, Array2, ArrayD, Axis, Ix2};
use safetensors::SafeTensors;

/// What storing a value in f32 may cost, relative; the relative L2 norm of many such errors is no larger.
const STORED: f64 = 1.0 / (1 << 24) as f64;
const SPARSE: RefOptions = RefOptions { dense: false, mtp: true, expanded: false, variant: None };

/// One run of a model: its emitted points, in f64.
struct Run<'a> {
    config: RefConfig,
    weights: ModelWeights<'a>,
    values: HashMap<String, ArrayD<f64>>,
}

fn run<'a>(raw: &'a Raw<'a>, ids: &[u32], config: RefConfig, a: Arith, options: RefOptions) -> Run<'a> {
    let weights = ModelWeights::new(raw, &config);
    let (mut names, mut values) = (Vec::new(), HashMap::new());
    let mut sink = |name: &str, value: ArrayD<f64>| {
        names.push(name.to_string());
        values.insert(name.to_string(), value);
    };
    forward(&config, &weights, ids, a, options, &mut sink).expect("runs");
    assert_eq!(names, points(&config, options));
    Run { config, weights, values }
}

impl Run<'_> {
    /// Our value of what the goldens call `name`.
    fn value(&self, name: &str) -> ArrayD<f64> {
        let (site, op, layer) = match name.split_once('.') {
            Some(("mtp", op)) => ("mtp.0.".to_string(), op, Some(self.config.layers)),
            Some(("blk", rest)) => {
                let (n, op) = rest.split_once('.').expect("blk.N.op");
                (format!("layers.{n}."), op, n.parse().ok())
            }
            _ => (String::new(), name, None),
        };
        let at = |op: &str| self.values.get(&format!("{site}{op}")).unwrap_or_else(|| panic!("no {site}{op}")).clone();
        let two = |op: &str| at(op).into_dimensionality::<Ix2>().expect("two axes");
        let ours = match op {
            "embed" | "enorm" | "hnorm" | "eh_proj" | "final_norm" | "logits" => op,
            "input_norm" => "attn.norm",
            "q_a" => "attn.q_a",
            "q_a_norm" => "attn.q_a_norm",
            "q" => "attn.q_raw",
            "q_pe_rope" => return at("attn.q").slice_axis(Axis(2), (self.config.nope..).into()).to_owned(),
            "kv_a" => "attn.kv_a",
            "kv_latent_norm" => "attn.kv_latent",
            "k_pe_rope" => "attn.k_rope",
            "q_nope_absorbed" => "attn.q_absorbed",
            "indexer_q_rope" => "attn.index_q",
            "indexer_k_rope" => "attn.index_k",
            "indexer_k_raw" => return self.index_k(layer, &two("attn.norm")).into_dyn(),
            "indexer_k_norm" => {
                let k = self.index_k(layer, &two("attn.norm"));
                let vector = |p| self.weights.vector(layer, p).expect("readable");
                let (w, b) = (vector(RefParam::IndexKNormW), vector(RefParam::IndexKNormB));
                return ops::layer_norm(Arith::Exact, &k, &w, &b, self.config.index_eps).into_dyn();
            }
            "indexer_weights_scaled" => "attn.index_weights",
            "indexer_scores" => "attn.index_scores",
            "topk_indices" => "attn.index_topk",
            "topk_margin" => return margins(&two("attn.index_scores"), self.config.top_k).into_dyn(),
            "attn_latent" => "attn.latent",
            "attn_out" => "attn.context",
            "o_proj" => "attn.out",
            "resid_attn" => "residual",
            "post_attn_norm" => "ffn.norm",
            "router_logits" => "ffn.router_logits",
            "router_choice_scores" => "ffn.choice_scores",
            "router_margin" => return margins(&two("ffn.choice_scores"), self.config.experts_used).into_dyn(),
            "router_topk_ids" => "ffn.expert_ids",
            "router_topk_weights" => "ffn.expert_weights",
            "routed_out" => "ffn.routed",
            "shared_out" => "ffn.shared",
            "mlp_out" => "ffn.out",
            "layer_out" => "output",
            "head_norm" => "final_norm",
            "logits_argmax" => return argmax(&two("logits")).into_dyn(),
            other => panic!("no point for golden {other}"),
        };
        at(ours)
    }

    fn index_k(&self, layer: Option<usize>, norm: &Array2<f64>) -> Array2<f64> {
        ops::linear(Arith::Exact, norm, &self.weights.matrix(layer, RefParam::IndexK).expect("readable"))
    }

    /// Compares with every golden value; gives the names of the reals whose relative L2 is beyond what storing them
    /// costs, and of the choices that are not the same sets row by row.
    fn compare(&self, goldens: &Goldens) -> Comparison {
        let mut result = Comparison { reals: 0, choices: 0, beyond: Vec::new() };
        let kept = |name: &str, rows: usize| {
            let value = self.value(name);
            if rows == value.shape()[0] { value } else { value.select(Axis(0), &goldens.rows_of(name)) }
        };
        for (name, golden) in &goldens.reals {
            result.reals += 1;
            let near = relative_l2(&kept(name, golden.shape()[0]), golden) <= STORED;
            if !near {
                result.beyond.push(name.clone());
            }
        }
        for (name, golden) in &goldens.indices {
            if ["input_ids", "rows", "mtp.rows"].contains(&name.as_str()) {
                continue;
            }
            result.choices += 1;
            if sets(&self.value(name)) != sets(&golden.mapv(f64::from)) {
                result.beyond.push(name.clone());
            }
        }
        result.beyond.sort();
        result
    }
}

struct Comparison {
    reals: usize,
    choices: usize,
    beyond: Vec<String>,
}

impl Comparison {
    /// How many goldens there were, all of them met.
    fn all_met(&self) -> (usize, usize) {
        assert!(self.beyond.is_empty(), "beyond 2^-24, or another choice: {:?}", self.beyond);
        (self.reals, self.choices)
    }
}

/// Infinite where shapes differ, where one side alone is not finite, or where infinities differ in sign.
fn relative_l2(value: &ArrayD<f64>, golden: &ArrayD<f32>) -> f64 {
    if value.shape().iter().product::<usize>() != golden.len() || value.shape()[0] != golden.shape()[0] {
        return f64::INFINITY;
    }
    let (mut error, mut size) = (0.0, 0.0);
    for (&v, &g) in value.iter().zip(golden) {
        let g = f64::from(g);
        if v.is_finite() && g.is_finite() {
            error += (v - g) * (v - g);
            size += g * g;
        } else if v != g {
            return f64::INFINITY;
        }
    }
    if error == 0.0 { 0.0 } else { (error / size).sqrt() }
}

/// Each row's values in ascending order.
fn sets(x: &ArrayD<f64>) -> Vec<Vec<f64>> {
    let row = |row: ndarray::ArrayViewD<'_, f64>| {
        let mut row: Vec<f64> = row.iter().copied().collect();
        row.sort_by(f64::total_cmp);
        row
    };
    x.outer_iter().map(row).collect()
}

/// Per row the gap between the k-th largest value and the next, infinite where the next is masked or absent.
fn margins(scores: &Array2<f64>, k: usize) -> Array1<f64> {
    let gap = |row: ndarray::ArrayView1<'_, f64>| {
        let mut row: Vec<f64> = row.iter().copied().filter(|v| v.is_finite()).collect();
        row.sort_by(|a, b| b.total_cmp(a));
        row.get(k).map_or(f64::INFINITY, |next| row[k - 1] - next)
    };
    scores.rows().into_iter().map(gap).collect()
}

fn argmax(logits: &Array2<f64>) -> Array1<f64> {
    logits.rows().into_iter().map(|row| ops::top_k(&row.to_vec(), 1)[0] as f64).collect()
}

fn against(model: &str, golden: &str) -> (usize, usize) {
    let (source, goldens) = (open(model), Goldens::read(golden));
    let raw = Raw(source.source());
    let config = RefConfig::from_raw(&raw, Eps::File).expect("config");
    run(&raw, &goldens.ids(), config, Arith::Exact, SPARSE).compare(&goldens).all_met()
}

#[test]
fn every_intermediate_of_glm5_nano() {
    let counts = against(GLM5_NANO, OF_NANO_SHORT);
    assert_eq!(counts, (198, 12), "a golden that is not compared must not pass");
}

#[test]
fn choices_and_outputs_past_top_k() {
    let counts = against(GLM5_NANO, OF_NANO_LONG);
    assert_eq!(counts, (28, 14));
}

#[test]
fn a_split_model_with_random_weights() {
    let counts = against(PICO, OF_PICO);
    assert_eq!(counts, (19, 6));
}

#[test]
fn shared_indexer_layers() {
    let counts = against(NANO52, OF_NANO52);
    assert_eq!(counts, (30, 10));
}

/// The comparison must be able to fail: each of these changes is one that an engine has shipped, or that references
/// disagree about.
#[test]
fn wrong_settings_are_seen() {
    let source = open(GLM5_NANO);
    let (raw, goldens) = (Raw(source.source()), Goldens::read(OF_NANO_SHORT));
    let with = |eps: Eps, change: fn(&mut RefConfig)| {
        let mut config = RefConfig::from_raw(&raw, eps).expect("config");
        change(&mut config);
        run(&raw, &goldens.ids(), config, Arith::Exact, SPARSE).compare(&goldens).beyond
    };
    let sees =
        |beyond: Vec<String>, first: &str| assert!(beyond.iter().any(|name| name == first), "{first}: {beyond:?}");
    sees(with(Eps::Hf, |_| ()), "blk.0.q_a_norm");
    sees(with(Eps::LlamaCpp, |_| ()), "blk.0.indexer_k_norm");
    sees(with(Eps::File, |c| c.rope_style = RopeStyle::HalfSplit), "blk.0.q_pe_rope");
    sees(with(Eps::File, |c| c.index_rope_style = RopeStyle::HalfSplit), "blk.0.indexer_k_rope");
    sees(with(Eps::File, |c| c.normalise_weights = false), "blk.1.router_topk_weights");
    sees(with(Eps::File, |c| c.routed_scale = 1.0), "blk.1.router_topk_weights");
    // An f32 run is not the truth: its rounding shows.
    let config = RefConfig::from_raw(&raw, Eps::File).expect("config");
    let rounded = run(&raw, &goldens.ids(), config, Arith::F32(RefRecipe::Strict, Order::Sequential), SPARSE);
    sees(rounded.compare(&goldens).beyond, "blk.5.layer_out");
}

#[test]
fn dense_attention_is_another_model_past_top_k() {
    let source = open(GLM5_NANO);
    let (raw, goldens) = (Raw(source.source()), Goldens::read(OF_NANO_LONG));
    let config = RefConfig::from_raw(&raw, Eps::File).expect("config");
    let top_k = config.top_k;
    let dense = run(
        &raw,
        &goldens.ids(),
        config,
        Arith::Exact,
        RefOptions { dense: true, mtp: false, expanded: false, variant: None },
    );
    let golden = &goldens.reals["blk.5.layer_out"];
    let value = &dense.values["layers.5.output"];
    let (mut within, mut beyond) = (0, 0);
    for (i, row) in goldens.rows_of("blk.5.layer_out").into_iter().enumerate() {
        let error = relative_l2(&value.select(Axis(0), &[row]), &golden.select(Axis(0), &[i]));
        if row < top_k {
            within += 1;
            assert!(error <= STORED, "row {row}, while every key is chosen: {error:e}");
        } else {
            beyond += 1;
            assert!(error > 1e-4, "row {row}, once some are not: {error:e}");
        }
    }
    assert_eq!((within, beyond), (2, 6));
}

/// Replaying each operation from values captured in f32 stays as near as its inputs are.
#[test]
fn replay_agrees_with_the_goldens() {
    let source = open(GLM5_NANO);
    let (raw, goldens) = (Raw(source.source()), Goldens::read(OF_NANO_SHORT));
    let config = RefConfig::from_raw(&raw, Eps::File).expect("config");
    let mut whole = run(&raw, &goldens.ids(), config, Arith::Exact, SPARSE);
    whole.values.insert("ids".into(), Array1::from_iter(goldens.ids().iter().map(|&id| f64::from(id))).into_dyn());
    let captured = |name: &str| whole.values.get(name).map(|v| v.mapv(|v| v as f32));
    let rows: Vec<usize> = (0..16).collect();
    let (config, weights, arith) = (&whole.config, &whole.weights, Arith::Exact);
    let replay = Replay { config, weights, arith, options: SPARSE, inputs: &captured, bridge: None };
    for point in points(&whole.config, SPARSE) {
        let again = replay.point(&point, &rows).expect("replays");
        let expected = whole.values[&point].select(Axis(0), &rows).mapv(|v| v as f32);
        // Inputs are off by 2^-24 each; no operation here amplifies that more than tenfold.
        assert!(relative_l2(&again, &expected) < 10.0 * STORED, "{point}: {:e}", relative_l2(&again, &expected));
    }
}

#[test]
fn blocks_decode_to_what_ggml_gives() {
    let file = std::fs::read(goldens::file("quant/quantvec.safetensors")).expect("golden file");
    let tensors = SafeTensors::deserialize(&file).expect("safetensors");
    let mut compared = Vec::new();
    for format in (0..64).filter_map(block_format) {
        for kind in ["", ".random"] {
            let name = format!("{}{kind}", format.name);
            let Ok(raw) = tensors.tensor(&format!("{name}.raw")) else { continue };
            let golden = tensors.tensor(&format!("{name}.deq")).expect("values beside the bytes");
            let golden = golden.data().as_chunks().0.iter().map(|&b| f32::from_le_bytes(b));
            let values = format.decode(raw.data()).expect("whole blocks");
            assert_eq!(values.len(), golden.len(), "{name}");
            for (i, (v, g)) in values.iter().zip(golden).enumerate() {
                assert!(
                    v.to_bits() == g.to_bits() || (v.is_nan() && g.is_nan()),
                    "{name}, value {i}: {v:e} is not {g:e}"
                );
            }
            compared.push(name);
        }
    }
    assert_eq!(compared.len(), 40, "nineteen block formats in both kinds, F16 and BF16 in one: {compared:?}");
}
