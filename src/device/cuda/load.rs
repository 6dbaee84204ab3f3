//! Parameters to the GPU and back: the file's bytes go through the ring, are repacked there, and compared there with what
//! unpacking gives back.

use lockstep_kernels::geometry;

use super::memory::{PLANE_ROOM, Ring};
use super::weight::Part;
use super::{CudaDevice, Done};
use crate::device::{Columns, DeviceError, PartSpec, Piece, WeightId};

impl CudaDevice {
    /// Brings one part of a parameter to the GPU and compares it there with what came.
    pub(super) fn upload(&self, spec: PartSpec<'_>) -> Result<Part, DeviceError> {
        let Some(first) = spec.stack.first() else {
            return Err(self.error("a parameter without matrices"));
        };
        let (ty, rows, covered) = (first.ty, first.rows, first.cols);
        if spec.stack.iter().any(|m| (m.ty, m.rows, m.cols) != (ty, rows, covered)) {
            return Err(self.error("the matrices of a stack differ in type or shape"));
        }
        let failed = |e: super::GpuError| self.error(e);
        let bytes: usize = spec.stack.iter().map(Piece::len).sum();
        let (memory, address) = self.arena.borrow_mut().take(bytes + PLANE_ROOM).map_err(failed)?;
        let part = Part {
            ty,
            stack: spec.stack.len(),
            rows,
            covered,
            cols: spec.cols,
            first: spec.first,
            address,
            _memory: memory,
        };
        let blocks = part.blocks() as i64;
        let each = spec.stack[0].len().max(1);
        let fill = |from: usize, out: &mut [u8]| {
            let mut done = 0;
            while done < out.len() {
                let (index, at) = ((from + done) / each, (from + done) % each);
                let n = (each - at).min(out.len() - done);
                spec.stack[index].copy(at, &mut out[done..done + n]);
                done += n;
            }
        };
        let mut take = |staged: u64, from: usize, n: usize| {
            let (from, count, launch) = (from as i64, n as i64, geometry::each(n));
            self.gpu.launch("pack", Some(ty), "repack", launch, &[&staged, &address, &from, &count, &blocks])?;
            let wrong = self.wrong.address();
            let args: [&dyn super::Arg; 6] = [&staged, &address, &from, &count, &blocks, &wrong];
            self.gpu.launch("pack", Some(ty), "repack_check", launch, &args)
        };
        let mut ring = self.ring.borrow_mut();
        let ring = match &mut *ring {
            Some(ring) => ring,
            none => none.insert(Ring::new(&self.gpu).map_err(failed)?),
        };
        ring.send(bytes, &fill, &mut take).map_err(failed)?;
        Ok(part)
    }

    /// Ends loading: every byte must have come back as it was stored.
    pub(super) fn loaded(&self) -> Done {
        if self.ring.borrow_mut().take().is_none() {
            return Ok(());
        }
        let mut wrong = [0u32];
        self.wrong.download(0, &mut wrong, &|| "loading".into()).map_err(|e| self.error(e))?;
        match wrong[0] {
            0 => Ok(()),
            n => Err(self.error(format!("{n} bytes came back from the GPU other than they were stored"))),
        }
    }

    /// The bytes of a part in the file's layout, and its columns.
    pub(super) fn unload(&self, weight: WeightId, part: usize) -> Result<(Vec<u8>, Columns), DeviceError> {
        let held = self.weights.get(weight.0).and_then(|w| w.parts.get(part));
        let part = held.ok_or_else(|| self.error(format!("no part {part} of parameter {}", weight.0)))?;
        let bytes = part.stack * part.matrix_bytes();
        let mut out = vec![0u8; bytes];
        let (blocks, step) = (part.blocks() as i64, super::memory::SLOT);
        let staged = super::Memory::new(&self.gpu, step.min(bytes)).map_err(|e| self.error(e))?;
        for (i, piece) in out.chunks_mut(step).enumerate() {
            let (from, n, address) = ((i * step) as i64, piece.len() as i64, staged.address());
            let args: [&dyn super::Arg; 5] = [&part.address, &address, &from, &n, &blocks];
            self.launch("pack", Some(part.ty), "unpack", geometry::each(piece.len()), 0, &args)?;
            staged.download(0, piece, &|| "reading a weight back".into()).map_err(|e| self.error(e))?;
        }
        let own = part.first + part.cols.start..part.first + part.cols.end;
        Ok((out, Columns { own, stored: part.first..part.first + part.covered }))
    }
}
