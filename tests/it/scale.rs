//! Whole tensors out of scale, which only their kin tell: the same parameter in other layers, and an expert's fellows.

use crate::common::Model;
use crate::common::binary::{lockstep, run};
use crate::common::folder::{Folder, folder};
use crate::common::subject::Silent;
use crate::stages::{data, edited, matches, nano, only, subject};
use lockstep::quant::{QuantType, dequantise};
use lockstep::report::{StageReport, Verdict};
use lockstep::verify::file;

fn judged(model: &Model) -> StageReport {
    file::run(&subject(edited(model), 1), &Silent).unwrap()
}

/// The tensor in f32, times a factor.
fn times(mut model: Model, name: &str, factor: f32) -> Model {
    let at = model.tensors.iter().position(|(t, _)| t.name == name).unwrap();
    let (tensor, bytes) = model.tensors.remove(at);
    let ne = tensor.ne.clone();
    let mut values = vec![0.0; ne.iter().product::<u64>() as usize];
    dequantise(tensor.ty.quant.unwrap(), &bytes, &mut values).unwrap();
    let mut model = model.add(name, &ne, QuantType::F32);
    *data(&mut model, name) = values.iter().flat_map(|v| (v * factor).to_le_bytes()).collect();
    model
}

#[test]
fn a_tensor_far_from_its_kin_is_named_with_the_factor() {
    let norm = ["blk.2.attn_norm.weight", "blk.3.attn_q_a_norm.weight", "blk.4.indexer.k_norm.weight"];
    for (name, factor) in norm.map(|name| (name, 1e6)).into_iter().chain([
        ("blk.2.attn_q_b.weight", 1e6),
        ("blk.3.ffn_up_shexp.weight", 3e4),
        ("blk.5.ffn_down_exps.weight", 1e5),
        ("blk.1.attn_output.weight", 1e5),
    ]) {
        let report = judged(&times(nano(), name, factor));
        only(&report, name, &["OUT_OF_SCALE", "times as large as the median of the", "root mean square"]);
        assert_eq!(report.verdict(), Verdict::Divergent);
        let said = &report.checks.iter().find(|c| c.name == name).unwrap().detail;
        let said_times = said.split("values are ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
        let ratio = said_times.parse::<f32>().unwrap() / factor;
        assert!((0.05..20.0).contains(&ratio), "{said}");
        // Its twin: as much as models differ.
        matches(&judged(&times(nano(), name, 30.0)), 150);
        matches(&judged(&times(nano(), name, 1.0 / 30.0)), 150);
    }
    let small = judged(&times(nano(), "blk.2.attn_q_b.weight", 1e-8));
    only(&small, "blk.2.attn_q_b.weight", &["OUT_OF_SCALE", "times as small as"]);
    assert_eq!(small.verdict(), Verdict::Drift);
}

#[test]
fn one_value_of_a_bias_out_of_scale_is_named() {
    let bias = "blk.2.exp_probs_b.bias";
    let with = |value: f32| {
        let mut model = nano();
        data(&mut model, bias)[12..16].copy_from_slice(&value.to_le_bytes());
        judged(&model)
    };
    let report = with(1e9);
    only(&report, bias, &["OUT_OF_SCALE"]);
    assert_eq!(report.verdict(), Verdict::Divergent);
    matches(&with(30.0), 150);
}

#[test]
fn an_expert_far_from_its_fellows_is_named() {
    let name = "model.layers.1.mlp.experts.2.gate_proj.weight";
    let times = |factor: f32| {
        let at = tempfile::tempdir().unwrap();
        let mut model: Folder = folder();
        let entry = model.tensors.get_mut(name).unwrap();
        let value = |b: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16) * factor;
        entry.bytes = entry.bytes.chunks(2).flat_map(|b| value(b).to_le_bytes()[2..].to_vec()).collect();
        model.write(at.path());
        run(lockstep().args(["verify", "-q", "file", "-m"]).arg(at.path()))
    };
    times(1e5).exits(1).says("OUT_OF_SCALE").says(name).says("DIVERGENT").says("others of ffn_gate_exps");
    times(30.0).exits(0).says("verdict: MATCH");
}
