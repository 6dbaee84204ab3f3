//! Parameters to the GPU and back: the file's bytes go through the ring, are repacked there, and compared there with what
//! unpacking gives back.

use lockstep_kernels::geometry;

use super::memory::Ring;
use super::weight::{CudaWeight, Part};
use super::{CudaDevice, LOADING};
use crate::device::{Columns, DeviceError, PartSpec, Piece};

/// Room for the planes of any type: each starts at a multiple of 16 bytes, and no format has more than eight fields.
const PLANE_ROOM: usize = 8 * 16;

impl CudaDevice {
    pub(super) fn load(&self, spec: PartSpec<'_>) -> Result<Part, DeviceError> {
        let Some(first) = spec.stack.first() else {
            return Err(self.error(LOADING, "a parameter without matrices"));
        };
        let (ty, rows, covered) = (first.ty, first.rows, first.cols);
        if spec.stack.iter().any(|m| (m.ty, m.rows, m.cols) != (ty, rows, covered)) {
            return Err(self.error(LOADING, "the matrices of a stack differ in type or shape"));
        }
        let failed = |e: super::GpuError| self.error(LOADING, e);
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
    pub(super) fn loaded(&self) -> Result<(), DeviceError> {
        if self.ring.borrow_mut().take().is_none() {
            return Ok(());
        }
        let mut wrong = [0u32];
        self.wrong.download(0, &mut wrong, &|| "loading".into()).map_err(|e| self.error(LOADING, e))?;
        match wrong[0] {
            0 => Ok(()),
            n => Err(self.error(LOADING, format!("{n} bytes came back from the GPU other than they were stored"))),
        }
    }

    pub(super) fn unload(&self, weight: &CudaWeight, part: usize) -> Result<Vec<u8>, DeviceError> {
        let part = weight.parts.get(part).ok_or_else(|| self.error(LOADING, format!("no part {part}")))?;
        let bytes = part.stack * part.matrix_bytes();
        let mut out = vec![0u8; bytes];
        let (blocks, step) = (part.blocks() as i64, super::memory::SLOT);
        let staged = super::Memory::new(&self.gpu, step.min(bytes)).map_err(|e| self.error(LOADING, e))?;
        for (i, piece) in out.chunks_mut(step).enumerate() {
            let (from, n, address) = ((i * step) as i64, piece.len() as i64, staged.address());
            let args: [&dyn super::Arg; 5] = [&part.address, &address, &from, &n, &blocks];
            self.launch(LOADING, "pack", Some(part.ty), "unpack", geometry::each(piece.len()), 0, &args)?;
            staged.download(0, piece, &|| "reading a weight back".into()).map_err(|e| self.error(LOADING, e))?;
        }
        Ok(out)
    }

    pub(super) fn columns(&self, weight: &CudaWeight, part: usize) -> Result<Columns, DeviceError> {
        let part = weight.parts.get(part).ok_or_else(|| self.error(LOADING, format!("no part {part}")))?;
        let own = part.first + part.cols.start..part.first + part.cols.end;
        Ok(Columns { own, stored: part.first..part.first + part.covered })
    }
}
