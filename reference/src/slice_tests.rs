use super::*;
use crate::names::ALL;
use crate::replay::tests::tiny_config;
use crate::weights::shape;

fn split(tp: usize, rank: usize) -> Split {
    Split { tp, rank, experts: ExpertSplit::Tensor }
}

/// A tensor of the given type whose bytes count up, one value per byte position.
fn tensor(type_id: u32, ne: &[usize]) -> RawTensor<'static> {
    let format = block_format(type_id).expect("known type");
    let bytes = ne.iter().product::<usize>() / format.values * format.bytes;
    RawTensor { type_id, ne: ne.to_vec(), bytes: (0..bytes).map(|i| (i % 251) as u8).collect() }
}

#[test]
fn every_sharded_parameter_is_partitioned() {
    let c = tiny_config();
    for param in ALL {
        let mut next = 0;
        for rank in 0..2 {
            let range = match placement(&c, param, split(2, rank)).expect("divides") {
                Placement::Replicated => continue,
                Placement::Rows(r) | Placement::Cols(r) | Placement::Heads(r) | Placement::Experts(r) => r,
                Placement::Vocab { rows, padded } => {
                    assert_eq!((padded.len(), padded.start), (64, 64 * rank));
                    rows
                }
            };
            assert_eq!(range.start, next, "{param:?}");
            next = range.end;
        }
        let axes = shape(&c, param);
        let columns = matches!(param, RefParam::O | RefParam::Down | RefParam::DownShared | RefParam::DownExps);
        let whole = if columns { axes[1] } else { axes[0] };
        let replicated = placement(&c, param, split(2, 0)).expect("divides") == Placement::Replicated;
        assert!(replicated || next == whole, "{param:?} covers {next} of {whole}");
    }
}

#[test]
fn rows_are_cut_in_every_expert() {
    let c = tiny_config(); // 4 experts, moe_ffn 8, hidden 16
    let t = tensor(0, &[16, 8, 4]);
    let cut = cut(&c, RefParam::UpExps, &t, split(2, 1)).expect("fits");
    assert_eq!(cut.placement, Placement::Rows(4..8));
    let row = 16 * 4;
    let expected: Vec<u8> = (0..4).flat_map(|e| t.bytes[(e * 8 + 4) * row..(e + 1) * 8 * row].to_vec()).collect();
    assert_eq!((cut.covering_blocks, cut.bytes), (None, expected));
}

#[test]
fn columns_take_the_covering_blocks() {
    let c = RefConfig { ffn: 96, ..tiny_config() };
    let t = tensor(8, &[96, 2]); // Q8_0: three blocks of 34 bytes a row; a rank owns one and a half
    let first = cut(&c, RefParam::Down, &t, split(2, 0)).expect("fits");
    let second = cut(&c, RefParam::Down, &t, split(2, 1)).expect("fits");
    assert_eq!((first.placement, first.covering_blocks), (Placement::Cols(0..48), Some(0..2)));
    assert_eq!((second.placement, second.covering_blocks), (Placement::Cols(48..96), Some(1..3)));
    assert_eq!(first.bytes, [&t.bytes[0..68], &t.bytes[102..170]].concat());
    assert_eq!(second.bytes, [&t.bytes[34..102], &t.bytes[136..204]].concat());
}

#[test]
fn vocabulary_padding_is_not_in_the_file() {
    let c = RefConfig { vocab: 100, ..tiny_config() };
    let t = tensor(0, &[16, 100]);
    let cut = cut(&c, RefParam::Head, &t, split(2, 1)).expect("fits");
    assert_eq!(cut.placement, Placement::Vocab { rows: 64..100, padded: 64..128 });
    assert_eq!(cut.bytes, t.bytes[64 * 64..]);
    let beyond = placement(&RefConfig { vocab: 65, ..c }, RefParam::Head, split(4, 3)).expect("padded to 256");
    assert_eq!(beyond, Placement::Vocab { rows: 65..65, padded: 192..256 });
}

#[test]
fn whole_experts_and_heads() {
    let c = tiny_config();
    let t = tensor(0, &[8, 16, 4]);
    let ep = Split { tp: 4, rank: 3, experts: ExpertSplit::Expert };
    let part = cut(&c, RefParam::DownExps, &t, ep).expect("fits");
    assert_eq!((part.placement, part.bytes.as_slice()), (Placement::Experts(3..4), &t.bytes[3 * 8 * 16 * 4..]));
    assert!(cut(&c, RefParam::DownExps, &tensor(0, &[8, 16]), ep).is_err(), "one tensor per expert has no expert axis");
    let k_b = tensor(0, &[c.nope, c.kv_rank, c.heads]);
    let half = k_b.bytes.len() / 2;
    assert_eq!(cut(&c, RefParam::KB, &k_b, split(2, 1)).expect("fits").bytes, k_b.bytes[half..]);
}

#[test]
fn illegal_degrees_and_damaged_tensors_are_refused() {
    let c = tiny_config();
    assert!(matches!(placement(&c, RefParam::QB, split(3, 0)), Err(RefError::Split { tp: 3, .. })));
    assert!(placement(&c, RefParam::QB, split(2, 2)).is_err());
    assert!(placement(&c, RefParam::QB, split(0, 0)).is_err());
    let mut t = tensor(0, &[16, 8, 4]);
    t.bytes.to_mut().pop();
    assert!(cut(&c, RefParam::UpExps, &t, split(2, 0)).is_err());
    assert!(cut(&c, RefParam::UpExps, &tensor(0, &[16, 4, 4]), split(2, 1)).is_err(), "too few rows");
}

#[test]
fn value_rows_of_a_whole_kv_b_keep_their_bytes() {
    let c = tiny_config();
    let (head, row) = (c.nope + c.value, 4 * c.kv_rank);
    let t = tensor(0, &[c.kv_rank, c.heads * head]);
    let each = c.heads / 2;
    for rank in 0..2 {
        let cut = cut_values(&c, &t, split(2, rank)).expect("fits");
        assert_eq!(cut.placement, Placement::Heads(rank * each..(rank + 1) * each));
        let first = (rank * each * head + c.nope) * row;
        assert_eq!(cut.bytes.len(), each * c.value * row);
        assert_eq!(cut.bytes[..c.value * row], t.bytes[first..first + c.value * row]);
    }
    let cut = cut_values(&c, &tensor(0, &[c.kv_rank, c.heads * head + 1]), split(1, 0));
    assert!(matches!(cut, Err(RefError::Tensor { .. })), "a row too many");
}
