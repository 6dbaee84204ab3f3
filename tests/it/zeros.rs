//! Zeros where a model has values, at every size, and the zeros that sound files hold; and what `bisect` makes of a file
//! that is damaged.

use crate::common::binary::{lockstep, run};
use crate::common::subject::Silent;
use crate::common::{Model, NANO52, PICO, golden};
use crate::stages::{data, edited, matches, nano, only, subject};
use lockstep::quant::QuantType;
use lockstep::report::{StageReport, Verdict};
use lockstep::verify::file;

fn judged(edit: impl FnOnce(&mut Model)) -> StageReport {
    let mut model = nano();
    edit(&mut model);
    file::run(&subject(edited(&model), 1), &Silent).unwrap()
}

/// Exactly one thing is wrong, and it is no warning.
fn damage(report: &StageReport, name: &str, says: &[&str]) {
    only(report, name, says);
    assert_eq!(report.verdict(), Verdict::Divergent);
}

#[test]
fn runs_of_zeros_are_named_with_their_bytes() {
    let o = "blk.3.attn_output.weight";
    let report = judged(|m| data(m, o).fill(0));
    damage(&report, o, &["ALL_ZERO", "bytes 0..", "of the tensor (from offset ", "edited.gguf", "never written"]);
    let q = "blk.2.attn_q_b.weight"; // 1024 rows of 144 bytes
    let report = judged(|m| data(m, q)[5_000..9_096].fill(0));
    damage(&report, q, &["ZERO_RUN: 4", "bytes 5", "row 34"]);
    let report = judged(|m| data(m, q)[140_000..].fill(0));
    damage(&report, q, &["ZERO_RUN", "..147456 of the tensor"]);
    let report = judged(|m| [1_000..3_000, 60_000..70_000].map(|r| data(m, q)[r].fill(0)).into_iter().collect());
    damage(&report, q, &["ZERO_RUN", "1 more such run"]);
    let stack = "blk.3.ffn_gate_exps.weight"; // 8 experts of 256 rows of 144 bytes
    let report = judged(|m| data(m, stack)[5 * 36_864..6 * 36_864].fill(0));
    damage(&report, stack, &["ALL_ZERO: matrix 5 of 8", "bytes 184320..221184"]);
    // Codes that are there, and scales that are not.
    let report = judged(|m| data(m, stack)[36_864..2 * 36_864].chunks_mut(144).for_each(|b| b[..4].fill(0)));
    damage(&report, stack, &["ALL_ZERO: matrix 1 of 8", "scale is zero"]);
    for norm in ["blk.4.attn_norm.weight", "output_norm.weight", "blk.0.indexer.k_norm.weight"] {
        damage(&judged(|m| data(m, norm).fill(0)), norm, &["ALL_ZERO"]);
    }
    let norm = "blk.1.ffn_norm.weight";
    damage(&judged(|m| data(m, norm)[512..640].fill(0)), norm, &["ZERO_RUN: 1", "bytes 512..64"]);
}

/// Zero in every row of `row` bytes: these bytes.
fn in_rows(data: &mut [u8], row: usize, zero: std::ops::Range<usize>) {
    data.chunks_mut(row).for_each(|row| row[zero.clone()].fill(0));
}

#[test]
fn zeros_in_many_short_runs_are_counted() {
    // Q5_K, 4 blocks of 256 values a row, of which two are zero.
    let o = "blk.2.attn_output.weight";
    let report = judged(|m| in_rows(data(m, o), 4 * 176, 2 * 176..4 * 176));
    damage(
        &report,
        o,
        &["ZERO_SHARE: 512 of 1024 (50.0 %) runs of 256 values", "in 256 rows, within columns 512..1024"],
    );
    // Q5_0, 3 blocks of 32 values a row: heads are matrices.
    let k_b = "blk.2.attn_k_b.weight";
    let report = judged(|m| in_rows(data(m, k_b), 3 * 22, 2 * 22..3 * 22));
    damage(&report, k_b, &["ZERO_SHARE: in matrix 0 of 8 (and 7 more) 256 of 768 (33.3 %)", "within columns 64..96"]);
    // Every second row, of a stack and of one expert.
    let stack = "blk.3.ffn_gate_exps.weight";
    let report = judged(|m| in_rows(data(m, stack), 2 * 144, 144..288));
    damage(
        &report,
        stack,
        &["ZERO_SHARE: in matrix 0 of 8 (and 7 more) 128 of 256 (50.0 %) rows", "first is row 1", "bytes 144..288"],
    );
    let report = judged(|m| in_rows(&mut data(m, stack)[5 * 36_864..6 * 36_864], 2 * 144, 0..144));
    damage(&report, stack, &["ZERO_SHARE: in matrix 5 of 8 (and 0 more) 128 of 256 (50.0 %) rows", "first is row 0"]);
    // Three rows of 256 values, 432 bytes.
    let q_a = "blk.4.attn_q_a.weight";
    let report = judged(|m| data(m, q_a)[10 * 144..13 * 144].fill(0));
    damage(&report, q_a, &["ZERO_RUN: 43", "zero bytes (768 values), bytes 1440..187", "row 10"]);
    // Single columns of f32, and single values of a norm.
    let router = "blk.3.ffn_gate_inp.weight";
    let report = judged(|m| in_rows(data(m, router), 2 * 1024, 1024..2048));
    damage(&report, router, &["ZERO_SHARE: 4 of 8 (50.0 %) rows"]);
    let norm = "blk.1.ffn_norm.weight";
    damage(&judged(|m| in_rows(data(m, norm), 16, 4..8)), norm, &["ZERO_SHARE: 64 of 256 (25.0 %) values", "value 1"]);
    // Twins: two blocks, and a row in sixty of a stack; one expert's row of the router; a value of a norm in ten.
    let few = |m: &mut Model| {
        data(m, o)[3 * 176..4 * 176].fill(0);
        data(m, o)[400 * 176..401 * 176].fill(0);
        data(m, q_a)[10 * 144..11 * 144].fill(0);
        in_rows(data(m, stack), 60 * 144, 144..288);
        data(m, router)[2048..3072].fill(0);
        in_rows(&mut data(m, norm)[..1000], 40, 4..8);
    };
    matches(&judged(few), 150);
}

#[test]
fn pieces_that_are_strewn_are_held_against_their_kin() {
    // Q5_K, 4 blocks a row: one in each of so many rows.
    let strew = |m: &mut Model, layer: usize, n: usize| {
        let o = format!("blk.{layer}.attn_output.weight");
        let size = 4 * lockstep::quant::QuantType::Q5_K.row_bytes(256);
        let of = |i: usize| (17 * i + 5) * size + i % 4 * (size / 4);
        (0..n).for_each(|i| data(m, &o)[of(i)..of(i) + size / 4].fill(0));
    };
    let report = judged(|m| strew(m, 2, 12));
    let says = "ZEROS_STREWN: 12 pieces are zero among values (1.172 %, the median of the other layers is 0.000 %)";
    damage(&report, "blk.2.attn_output.weight", &[says, "bytes 3520..3696 of the tensor"]);
    // Twins: fewer; and as many in most layers.
    matches(&judged(|m| strew(m, 2, 7)), 150);
    matches(&judged(|m| (0..4).for_each(|layer| strew(m, layer, 12))), 150);
}

#[test]
fn columns_of_plain_values_are_counted() {
    let zero_in = |ty: QuantType, every: usize, of: &'static str| {
        let mut model = nano();
        let (rows, columns) = (1024, 256);
        model.tensors.retain(|(t, _)| t.name != of);
        model = model.add(of, &[columns as u64, rows as u64], ty);
        let width = ty.row_bytes(1);
        let one = if width == 4 { vec![0, 0, 0x80, 0x3c] } else { vec![0x80, 0x3c] };
        let bytes = data(&mut model, of);
        for (i, value) in bytes.chunks_mut(width).enumerate() {
            let sign = (i * i / 7 % 2) as u8 * 0x80;
            value.copy_from_slice(&one);
            value[width - 1] |= sign;
            if i % columns % every == 3 {
                value.fill(0);
                value[width - 1] = sign; // of either sign
            }
        }
        file::run(&subject(edited(&model), 1), &Silent).unwrap()
    };
    let q_b = "blk.2.attn_q_b.weight";
    for ty in [QuantType::BF16, QuantType::F32] {
        damage(
            &zero_in(ty, 4, q_b),
            q_b,
            &["ZERO_SHARE: 64 of 256 (25.0 %) columns are zero in every row", "column 3"],
        );
        // One column, as behind a unit that died.
        matches(&zero_in(ty, 256, q_b), 150);
    }
}

#[test]
fn one_value_of_a_norm_out_of_all_proportion_is_damage() {
    let norm = "blk.1.ffn_norm.weight";
    let huge = |value: f32| judged(|m| data(m, norm)[400..404].copy_from_slice(&value.to_le_bytes()));
    damage(&huge(3e7), norm, &["OUTLIER_BLOCK", "value 100"]);
    matches(&huge(30.0), 150);
    // A bias may be next to nothing but for one.
    let bias = "blk.2.exp_probs_b.bias";
    let few = |m: &mut Model| {
        data(m, bias).chunks_mut(4).for_each(|v| v.copy_from_slice(&1e-9f32.to_le_bytes()));
        data(m, bias)[..4].copy_from_slice(&0.5f32.to_le_bytes());
    };
    matches(&judged(few), 150);
}

#[test]
fn zeros_of_sound_files_pass() {
    for bias in ["blk.2.exp_probs_b.bias", "blk.2.indexer.k_norm.bias"] {
        matches(&judged(|m| data(m, bias).fill(0)), 150);
    }
    // One unit that died; rows of tokens that are place holders.
    matches(&judged(|m| data(m, "blk.2.attn_q_b.weight")[300 * 144..301 * 144].fill(0)), 150);
    let row = |m: &mut Model, name: &str| data(m, name).len() / 4096;
    matches(
        &judged(|m| {
            let row = row(m, "token_embd.weight");
            data(m, "token_embd.weight")[4093 * row..].fill(0);
            let types = m.metadata.iter_mut().find(|(k, _)| k == "tokenizer.ggml.token_type").unwrap();
            if let lockstep::gguf::Value::Array(lockstep::gguf::value::Array::I32(types)) = &mut types.1 {
                types[4093..].fill(5);
            }
        }),
        150,
    );
    for model in [NANO52, PICO] {
        let model = edited(&Model::read(&golden(model)));
        matches(&file::run(&subject(model, 1), &Silent).unwrap(), 60);
    }
}

#[test]
fn bisect_lays_no_damage_of_the_file_on_an_operation() {
    let folder = tempfile::tempdir().unwrap();
    let mut model = nano();
    let stack = "blk.3.ffn_up_exps.weight";
    data(&mut model, stack)[144 * (256 * 5 + 7)..][..2].copy_from_slice(&[0x00, 0x7e]); // NaN in expert 5
    let path = model.write(folder.path(), "nan.gguf");
    let bisect = || {
        let mut command = lockstep();
        command.args(["bisect", "-q", "-m"]).arg(&path);
        command
    };
    let found = run(&mut bisect()).exits(1);
    found.says(stack).says("NAN_IN_FILE").says("matrix 5, row 7").says("DIVERGENT in the file");
    found.silent_on("ffn.routed");
    let found: serde_json::Value = serde_json::from_str(&run(bisect().arg("--json")).exits(1).stdout).unwrap();
    assert_eq!((&found["file"][0]["check"], &found["culprit"]), (&stack.into(), &serde_json::Value::Null));
    // Its twin is `bisect::without_a_fault_nothing_is_reported`, and this one's own file.
    nano().write(folder.path(), "nan.gguf");
    run(&mut bisect()).exits(0).says("No operation diverges");
}
