//! Every dequantiser against rows quantised and expanded by ggml, quantised rows and rows of random bytes, and against the
//! reference, bit for bit.

use std::path::Path;

use lockstep::quant::{QuantType, dequantise};
use safetensors::{Dtype, SafeTensors};

#[test]
fn values_are_bit_equal_to_ggml() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("goldens/quant/quantvec.safetensors");
    let file = std::fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let mut compared = Vec::new();
    for ty in QuantType::all() {
        for kind in ["", ".random"] {
            let Ok(raw) = tensors.tensor(&format!("{ty}{kind}.raw")) else { continue };
            let golden = tensors.tensor(&format!("{ty}{kind}.deq")).unwrap();
            assert_eq!((raw.dtype(), golden.dtype()), (Dtype::U8, Dtype::F32));
            let golden: Vec<f32> = golden.data().as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
            let mut values = vec![0.0; golden.len()];
            dequantise(ty, raw.data(), &mut values).unwrap();
            for (i, (ours, theirs)) in values.iter().zip(&golden).enumerate() {
                let same = ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan());
                assert!(same, "{ty}{kind}, value {i}: {ours:e} where ggml has {theirs:e}");
            }
            compared.push(format!("{ty}{kind}"));
        }
    }
    // 19 block formats in both kinds, and quantised rows of F16 and BF16: a missing tensor must not pass.
    assert_eq!(compared.len(), 40, "{compared:?}");
}

/// The reference's decoders are written apart from the engine's and have tables of their own. Random blocks meet every
/// entry of the grids, which the golden rows do not.
#[test]
fn values_are_those_of_the_reference() {
    for ty in QuantType::all() {
        let info = ty.info();
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let bytes: Vec<u8> = (0..1000 * info.bytes)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 40) as u8
            })
            .collect();
        let expected = lockstep_reference::dequant::block_format(info.id).unwrap().decode(&bytes).unwrap();
        let mut values = vec![0.0; 1000 * info.block];
        dequantise(ty, &bytes, &mut values).unwrap();
        assert_eq!(values.len(), expected.len(), "{ty}");
        for (i, (ours, theirs)) in values.iter().zip(&expected).enumerate() {
            let same = ours.to_bits() == theirs.to_bits() || (ours.is_nan() && theirs.is_nan());
            assert!(same, "{ty}, value {i}: {ours:e} where the reference has {theirs:e}");
        }
    }
}
