//! Moving stored bytes: repacking and its inverse, the check of loading, expansion to f32, rows of the embedding. All of
//! it is exact: bytes come back as they were, values are those of the CPU bit for bit, for any bytes that a file may hold.

use lockstep_kernels::geometry::{self, UNIT_COLS, UNIT_ROWS};

use super::case::{Case, check};
use super::lab::{Lab, POISON, View, bytes_of, given};
use super::random::Random;
use super::weights::Stored;
use crate::device::cuda::format::Format;
use crate::device::cuda::gpu::{Arg, GpuError};
use crate::device::cuda::memory::PLANE_ROOM;
use crate::quant::{QuantType, dequantise};
use crate::report::Check;

/// Every kernel of pack.cu, and `embed`, for a type.
pub fn run(lab: &Lab<'_>, ty: QuantType, out: &mut Vec<Check>) {
    // An odd number of blocks, so that planes need padding; any bytes at all, NaN scales among them.
    let blocks = 1031;
    let bytes = Random::of(&format!("bytes {ty}")).bytes(blocks * ty.info().bytes);
    for kernel in ["repack", "unpack", "repack_check", "dequantise"] {
        out.push(check(format!("{kernel}<{ty}> {blocks} blocks"), |case| round_trip(lab, ty, kernel, &bytes, case)));
    }
    let cols = if ty.block() == 1 { 37 } else { ty.block() };
    out.push(check(format!("embed<{ty}> 19 x {cols}"), |case| embed(lab, Format::planes(ty), [19, cols], case)));
}

/// The kernels that bring weights to tiles and back, and `embed`, for a type that has them.
pub fn tiles(lab: &Lab<'_>, ty: QuantType, out: &mut Vec<Check>) {
    let (tiles, units) = (6, 3);
    let bytes = Random::of(&format!("tiles {ty}")).bytes(tiles * UNIT_ROWS * ty.row_bytes(units * UNIT_COLS));
    for kernel in ["tile_pack", "tile_unpack", "tile_check"] {
        let name = format!("{kernel}<{ty}> {tiles} x {units} units");
        out.push(check(name, |case| tiled_round_trip(lab, ty, kernel, &bytes, (tiles, units), case)));
    }
    let cols = 2 * UNIT_COLS;
    out.push(check(format!("embed<{ty} tiles> 32 x {cols}"), |case| embed(lab, Format::tiles(ty), [32, cols], case)));
}

/// Any bytes at all go to tiles and come back as they were, in two pieces as a ring sends them; wrong ones are counted.
fn tiled_round_trip(
    lab: &Lab<'_>,
    ty: QuantType,
    kernel: &str,
    bytes: &[u8],
    (tiles, units): (usize, usize),
    case: &mut Case,
) -> Result<(), GpuError> {
    let (file, area, tile) = (lab.bytes(bytes)?, lab.poisoned(bytes.len() / 4)?, bytes.len() / tiles);
    let pieces = [(0usize, tiles / 3), (tiles / 3, tiles - tiles / 3)];
    let launch =
        |kernel, launch, args: &[Box<dyn Arg>]| lab.launch("tiles", Some(Format::tiles(ty)), kernel, launch, args);
    let pack = || {
        for (first, n) in pieces {
            let args =
                given![file.at(0) + (first * tile) as u64, area, (first * units) as i64, (n * units) as i64, units];
            launch("tile_pack", geometry::tile_pack(n * units), &args)?;
        }
        Ok(())
    };
    let seen = lab.thrice(&[&area], &pack)?;
    if kernel == "tile_pack" {
        let whole = lab.poisoned(bytes.len() / 4)?;
        let args = given![file, whole, 0i64, (tiles * units) as i64, units];
        let once = lab.thrice(&[&whole], &|| launch("tile_pack", geometry::tile_pack(tiles * units), &args))?;
        let once = once.take(case, "tiles at once", 0, &whole, &whole.words());
        let pieces = seen.take(case, "tiles", 0, &area, &area.words());
        case.equal("in two pieces and at once", &pieces, &once);
        return Ok(());
    }
    if kernel == "tile_unpack" {
        let back = lab.poisoned(bytes.len() / 4)?;
        let seen = lab.thrice(&[&back], &|| {
            for (first, n) in pieces {
                let to = back.at(0) + (first * tile) as u64;
                let args = given![area, to, (first * units) as i64, (n * tile) as i64, units];
                launch("tile_unpack", geometry::each(n * tile), &args)?;
            }
            Ok(())
        })?;
        let found = bytes_of(&seen.take(case, "file", 0, &back, &back.words()));
        case.equal("bytes", &found, bytes);
        return Ok(());
    }
    for wrong in [0usize, 3] {
        let mut other = bytes.to_vec();
        (0..wrong).for_each(|i| other[i * (bytes.len() - 1) / 2] ^= 0x10);
        let (other, found) = (lab.bytes(&other)?, lab.ints(&[5])?);
        let args = given![other, area, 0i64, bytes.len() as i64, units, found];
        let seen = lab.thrice(&[&found], &|| launch("tile_check", geometry::each(bytes.len()), &args))?;
        let count = seen.take(case, "count", 0, &found, &[0]);
        case.equal("wrong bytes", &count, &[5 + wrong as u32]);
    }
    Ok(())
}

fn round_trip(lab: &Lab<'_>, ty: QuantType, kernel: &str, bytes: &[u8], case: &mut Case) -> Result<(), GpuError> {
    let blocks = (bytes.len() / ty.info().bytes) as i64;
    let file = lab.bytes(bytes)?;
    let planes = lab.poisoned((bytes.len() + PLANE_ROOM).div_ceil(4))?;
    // In two pieces that part inside a block, as a ring of any size would.
    let cut = bytes.len() / 3 + 1;
    let pieces = [(0usize, cut), (cut, bytes.len() - cut)];
    let launch = |kernel, count, args: &[Box<dyn Arg>]| {
        lab.launch("pack", Some(Format::planes(ty)), kernel, geometry::each(count), args)
    };
    let repack = || {
        for (first, n) in pieces {
            let args = given![file.at(0) + first as u64, planes, first as i64, n as i64, blocks];
            launch("repack", n, &args)?;
        }
        Ok(())
    };
    match kernel {
        "repack" => {
            let seen = lab.thrice(&[&planes], &repack)?;
            // Where each byte goes is the device's affair, but it goes somewhere, and nothing lands behind the planes.
            let words: Vec<usize> = (0..planes.image().len()).filter(|w| seen.words(0)[*w] != POISON).collect();
            seen.take(case, "planes", 0, &planes, &words);
            let count = |bytes: &[u8]| {
                bytes.iter().fold([0usize; 256], |mut n, b| {
                    n[usize::from(*b)] += 1;
                    n
                })
            };
            let (mut held, stored) = (count(&bytes_of(seen.words(0))), count(bytes));
            // What is left of the poison between planes.
            let spare = 4 * planes.image().len() - bytes.len();
            held.iter_mut().zip(stored).for_each(|(h, s)| *h = h.wrapping_sub(s));
            let fill = POISON.to_le_bytes();
            let left = (0..=255u8).filter(|b| !fill.contains(b)).all(|b| held[usize::from(b)] == 0);
            let total: usize = fill.iter().map(|b| held[usize::from(*b)]).fold(0, usize::wrapping_add);
            case.holds(left && total == spare, || "the planes do not hold each byte of the file once".into());
        }
        "unpack" => {
            repack()?;
            let back = lab.poisoned(bytes.len().div_ceil(4))?;
            let seen = lab.thrice(&[&back], &|| {
                for (first, n) in pieces {
                    let args = given![planes, back.at(0) + first as u64, first as i64, n as i64, blocks];
                    launch("unpack", n, &args)?;
                }
                Ok(())
            })?;
            let found = bytes_of(&seen.take(case, "file", 0, &back, &back.words()));
            case.equal("bytes", &found[..bytes.len()], bytes);
        }
        "repack_check" => {
            repack()?;
            // None wrong; then three, which must be seen.
            for wrong in [0usize, 3] {
                let mut other = bytes.to_vec();
                (0..wrong).for_each(|i| other[i * (bytes.len() - 1) / 2] ^= 0x10);
                let (other, found) = (lab.bytes(&other)?, lab.ints(&[5])?);
                let args = given![other, planes, 0i64, bytes.len() as i64, blocks, found];
                let seen = lab.thrice(&[&found], &|| launch("repack_check", bytes.len(), &args))?;
                let count = seen.take(case, "count", 0, &found, &[0]);
                case.equal("wrong bytes", &count, &[5 + wrong as u32]);
            }
        }
        _ => {
            repack()?;
            let values = 1031 * ty.block();
            // As one row per block, as one long row, and from a row on that is not the first.
            let cols = ty.block();
            for (cols, first) in [(cols, 0usize), (values, 0), (cols, values / cols / 2)] {
                let rows = values / cols - first;
                let mut expected = vec![0.0f32; rows * cols];
                let skipped = first * ty.row_bytes(cols);
                if let Err(e) = dequantise(ty, &bytes[skipped..], &mut expected) {
                    case.problem(e.to_string());
                }
                let out = lab.poisoned(rows * cols)?;
                let args = given![planes, blocks, cols, first as i64, rows, out];
                let what = format!("{rows} rows of {cols} from row {first}");
                let go = || launch("dequantise", rows * cols / 16 + 1, &args);
                let found = lab.values(case, &what, &out, &go)?;
                case.same(&what, &found, &expected);
            }
        }
    }
    Ok(())
}

/// Ids of this rank's rows, of others, and of nobody's.
fn embed(lab: &Lab<'_>, format: Format, [rows, cols]: [usize; 2], case: &mut Case) -> Result<(), GpuError> {
    let (first, end) = (1000i32, 1000 + rows as i32);
    let w = Stored::random(lab, &format!("embed {format}"), format, [1, rows, cols])?;
    let ids = [first, end - 1, end, first - 1, -1, 0, i32::MAX, i32::MIN, first + 7, first + 7];
    let all: Vec<usize> = (0..rows).collect();
    let values = w.values(0, &all);
    let expected: Vec<f32> = ids
        .iter()
        .flat_map(|id| match usize::try_from(i64::from(*id) - i64::from(first)) {
            Ok(row) if *id >= 0 && row < rows => values.row(row).to_vec(),
            _ => vec![0.0; cols],
        })
        .collect();
    let (id_area, y) = (lab.ints(&ids)?, lab.room(View::plain(ids.len(), cols, cols + 3))?);
    let (launch, args) = (geometry::per_row(ids.len(), 128), given![w.matrix(), first, id_area, y.rows()]);
    let found = lab.values(case, "rows", &y, &|| lab.launch("matmul", Some(format), "embed", launch, &args))?;
    case.same("rows", &found, &expected);
    Ok(())
}
