//! The file: header, then tensors one after another. Values are made in parallel in a few large buffers, and one thread
//! writes those that are full, so that the slower of disk and processors sets the pace.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;

use rayon::prelude::*;

use super::values::{Fill, makes};
use super::vocabulary::LEAST_VOCAB;
use super::{Spec, SynthError, header};
use crate::gguf::write as gguf;
use crate::gguf::write::NewTensor;
use crate::partial::Partial;

const ALIGNMENT: u64 = 32;
/// Buffers in use at once, and the size from which one is handed on: 192 MB and a piece each.
const BUFFERS: usize = 3;
const BUFFER: usize = 64 << 20;

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Size of the file.
    pub bytes: u64,
    /// Number of tensors.
    pub tensors: usize,
}

/// Writes a model to `path`, at which nothing may be; until it is whole it is called `path.part`, which goes when
/// anything fails. `progress` is told bytes done and bytes in all.
///
/// Types: vectors, router and the indexer's weights projection F32; everything else Q4_K, with Q6_K in the head and in
/// the down projections of odd layers and Q5_0 in k_b, or `spec.ty` throughout.
///
/// # Errors
/// Numbers that make no model, an existing path, and what the file system refuses.
pub fn write(spec: &Spec, path: &Path, progress: &(dyn Fn(u64, u64) + Sync)) -> Result<Written, SynthError> {
    check(spec)?;
    let metadata = header::metadata(spec);
    let (table, fills): (Vec<NewTensor>, Vec<Fill>) = header::tensors(spec, &metadata)?.into_iter().unzip();
    let taken = || path.symlink_metadata().is_ok().then(|| SynthError::Exists { path: path.into() });
    taken().map_or(Ok(()), Err)?;
    let (part, mut file) = create(path)?;
    let io = |doing| move |source| SynthError::Io { path: part_name(path), doing, source };
    let mut head = Vec::new();
    gguf::header(&mut head, ALIGNMENT, &metadata, &table).map_err(io("lay out"))?;
    // The header refuses rows that are not whole blocks; what has no size has no room either.
    let padded = |t: &NewTensor| t.bytes()?.checked_next_multiple_of(ALIGNMENT);
    let all = table.iter().try_fold(head.len() as u64, |sum, t| sum.checked_add(padded(t)?)).unwrap_or(u64::MAX);
    room(part.path(), all)?; // before there is a list of its pieces
    let pieces: Vec<Piece> = table.iter().zip(&fills).flat_map(|(t, f)| Piece::of(t, f)).collect();
    file.write_all(&head).map_err(io("write"))?;
    let start = head.len() as u64;
    emit(&pieces, &mut file, &|done| progress(start + done, all)).map_err(io("write"))?;
    drop(file);
    taken().map_or(Ok(()), Err)?; // in the meantime somebody may have come first
    part.publish(path).map_err(io("rename"))?;
    Ok(Written { bytes: all, tensors: table.len() })
}

/// What the configuration's own checks do not say in the words of this command.
fn check(spec: &Spec) -> Result<(), SynthError> {
    let wrong = |what, expected: String, found: String| Err(SynthError::Spec { what, expected, found });
    let w = &spec.widths;
    if spec.layers == 0 {
        return wrong("layers", "at least 1".into(), "0".into());
    }
    if spec.dense_layers > spec.layers {
        return wrong("dense layers", format!("at most the {} layers", spec.layers), spec.dense_layers.to_string());
    }
    if w.experts_used == 0 || w.experts_used > w.experts {
        return wrong("experts per token", format!("1 to the {} experts", w.experts), w.experts_used.to_string());
    }
    if w.vocab < LEAST_VOCAB {
        let expected = format!("at least {LEAST_VOCAB} (bytes, merges, special tokens)");
        return wrong("vocabulary", expected, w.vocab.to_string());
    }
    match spec.ty {
        Some(ty) if !makes(ty) => {
            wrong("type", "a plain one, or one whose blocks have an f16 scale".into(), ty.name().into())
        }
        _ => Ok(()),
    }
}

/// Refuses what the disk has no room for; a file system that does not say lets the writing find out.
fn room(path: &Path, needed: u64) -> Result<(), SynthError> {
    let free = rustix::fs::statvfs(path).map_or(u64::MAX, |fs| fs.f_bavail.saturating_mul(fs.f_frsize));
    if free < needed {
        return Err(SynthError::Disk { path: path.into(), needed, free });
    }
    Ok(())
}

fn part_name(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

/// A new file; one that is there belongs to another run, or to one that was killed.
fn create(path: &Path) -> Result<(Partial, File), SynthError> {
    let part = part_name(path);
    Partial::create(part.clone(), |p| File::create_new(p)).map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => SynthError::Left { path: part },
        _ => SynthError::Io { path: part, doing: "create", source },
    })
}

/// Whole blocks of one tensor, and the padding behind the last of them.
struct Piece<'a> {
    fill: &'a Fill,
    number: u64,
    data: usize,
    padding: usize,
}

impl<'a> Piece<'a> {
    fn of(tensor: &NewTensor, fill: &'a Fill) -> impl Iterator<Item = Piece<'a>> {
        let bytes = tensor.bytes().unwrap_or(0); // the header refuses rows that are not whole blocks
        let most = fill.piece_bytes() as u64;
        let padding = (bytes.next_multiple_of(ALIGNMENT) - bytes) as usize;
        (0..bytes.div_ceil(most)).map(move |number| {
            let left = bytes - number * most;
            Piece { fill, number, data: left.min(most) as usize, padding: if left <= most { padding } else { 0 } }
        })
    }

    fn len(&self) -> usize {
        self.data + self.padding
    }

    fn write(&self, out: &mut [u8]) {
        let (data, padding) = out.split_at_mut(self.data);
        self.fill.fill(self.number, data);
        padding.fill(0);
    }
}

/// Makes and writes all pieces in order. `progress` is told the bytes written.
fn emit(pieces: &[Piece<'_>], out: &mut (impl Write + Send), progress: &(dyn Fn(u64) + Sync)) -> io::Result<()> {
    thread::scope(|scope| {
        let (empty, free) = mpsc::channel();
        let (full, ready) = mpsc::channel::<Vec<u8>>();
        for _ in 0..BUFFERS {
            let _ = empty.send(Vec::new()); // its other end is in this function
        }
        let writer = scope.spawn(move || {
            let mut done = 0;
            for buffer in ready {
                out.write_all(&buffer)?;
                done += buffer.len() as u64;
                progress(done);
                let _ = empty.send(buffer); // nobody takes the last ones
            }
            out.flush()
        });
        let mut rest = pieces;
        while !rest.is_empty() {
            // A writer that failed has dropped its end, and the loop ends with the buffers that are left.
            let Ok(mut buffer) = free.recv() else { break };
            let taken = fill(rest, &mut buffer);
            rest = &rest[taken..];
            if full.send(buffer).is_err() {
                break;
            }
        }
        drop(full);
        writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Fills `buffer` with the first pieces, in parallel, and returns how many those are.
fn fill(pieces: &[Piece<'_>], buffer: &mut Vec<u8>) -> usize {
    let (mut bytes, mut taken) = (0, 0);
    while bytes < BUFFER && taken < pieces.len() {
        bytes += pieces[taken].len();
        taken += 1;
    }
    let pieces = &pieces[..taken];
    buffer.resize(bytes, 0);
    let mut rest = buffer.as_mut_slice();
    let mut places = Vec::with_capacity(taken);
    for piece in pieces {
        let (place, behind) = rest.split_at_mut(piece.len());
        places.push((piece, place));
        rest = behind;
    }
    places.into_par_iter().for_each(|(piece, place)| piece.write(place));
    taken
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::QuantType;
    use crate::synth::values::Units;

    /// Takes some bytes and then no more, as a full disk does.
    struct Full(usize);

    impl Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = bytes.len().min(self.0);
            self.0 -= taken;
            if taken == 0 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(taken) }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Several buffers, a last piece that is not whole, and padding.
    fn tensor() -> (NewTensor, Fill) {
        let tensor = NewTensor { name: "t".into(), ne: vec![256, 1_500_001], ty: QuantType::Q4_K.info() };
        (tensor, Fill::new(&mut Units::default(), 0, "t", QuantType::Q4_K, (0.0, 1.0)).expect("a fill"))
    }

    #[test]
    fn a_full_disk_is_told() {
        let (tensor, fill) = tensor();
        let pieces: Vec<Piece> = Piece::of(&tensor, &fill).collect();
        for room in [0, 1000, 100 << 20] {
            let error = emit(&pieces, &mut Full(room), &|_| {}).expect_err("no room");
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        }
    }

    #[test]
    fn pieces_come_in_order_with_zeros_behind_them() {
        let (tensor, fill) = tensor();
        let pieces: Vec<Piece> = Piece::of(&tensor, &fill).collect();
        let mut out = Vec::new();
        emit(&pieces, &mut out, &|_| {}).expect("memory");
        let bytes = 144 * 1_500_001;
        assert_eq!(out.len(), bytes + 16);
        assert!(out.len() > BUFFERS * BUFFER && out[bytes..].iter().all(|b| *b == 0));
        let mut at = 0;
        for (number, piece) in pieces.iter().enumerate() {
            let mut alone = vec![0; piece.data];
            fill.fill(number as u64, &mut alone);
            assert!(out[at..at + piece.data] == alone, "piece {number}");
            at += piece.data;
        }
    }

    #[test]
    fn a_part_of_another_run_is_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("m.gguf");
        let (part, _) = create(&path).expect("a file");
        assert!(matches!(create(&path), Err(SynthError::Left { .. })), "another run's");
        assert!(part_name(&path).exists());
        drop(part);
        assert!(!part_name(&path).exists());
    }
}
