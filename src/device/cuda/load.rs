//! Parameters to the GPU and back: the file's bytes go through the ring, are repacked there, and compared there with what
//! unpacking gives back.

use lockstep_kernels::geometry;

use super::format::Format;
use super::gpu::{Arg, Gpu, GpuError};
use super::memory::{PLANE_ROOM, Ring, SLOT};
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
        let failed = |e: GpuError| self.error(e);
        let format = Format::of(ty, rows, covered, &self.gpu.arch);
        let bytes: usize = spec.stack.iter().map(Piece::len).sum();
        let (memory, address) = self.arena.borrow_mut().take(bytes + PLANE_ROOM).map_err(failed)?;
        let part = Part {
            format,
            stack: spec.stack.len(),
            rows,
            covered,
            cols: spec.cols,
            first: spec.first,
            address,
            _memory: memory,
        };
        let packing = Packing::of(&part);
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
        let wrong = self.wrong.address();
        let mut take = |staged: u64, from: usize, n: usize| packing.store(&self.gpu, staged, from, n, wrong);
        let mut ring = self.ring.borrow_mut();
        let ring = match &mut *ring {
            Some(ring) => ring,
            none => none.insert(Ring::new(&self.gpu).map_err(failed)?),
        };
        ring.send(bytes, packing.step(), &fill, &mut take).map_err(failed)?;
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
        let (packing, step) = (Packing::of(part), Packing::of(part).step());
        let staged = super::Memory::new(&self.gpu, step.min(bytes)).map_err(|e| self.error(e))?;
        for (i, piece) in out.chunks_mut(step).enumerate() {
            packing.fetch(&self.gpu, staged.address(), i * step, piece.len()).map_err(|e| self.error(e))?;
            staged.download(0, piece, &|| "reading a weight back".into()).map_err(|e| self.error(e))?;
        }
        let own = part.first + part.cols.start..part.first + part.cols.end;
        Ok((out, Columns { own, stored: part.first..part.first + part.covered }))
    }
}

/// How the bytes of a part get to their places and back, piece by piece.
struct Packing {
    format: Format,
    /// Where the part lies.
    address: u64,
    /// Blocks of the whole stack.
    blocks: i64,
    /// Units of a row, and bytes of its 16 rows in the file; of tiles.
    units: i32,
    rows: usize,
}

impl Packing {
    fn of(part: &Part) -> Self {
        Packing {
            format: part.format,
            address: part.address,
            blocks: part.blocks() as i64,
            units: (part.covered / geometry::UNIT_COLS) as i32,
            rows: geometry::UNIT_ROWS * part.format.ty.row_bytes(part.covered),
        }
    }

    /// Bytes of a piece: any, or whole tiles.
    fn step(&self) -> usize {
        if self.format.tiled { (SLOT / self.rows).max(1) * self.rows } else { SLOT }
    }

    /// The first unit of a piece that starts at byte `from` of the file.
    fn unit(&self, from: usize) -> i64 {
        (from / self.rows) as i64 * i64::from(self.units)
    }

    /// Brings `n` staged bytes to their places, and counts those that do not come back from there.
    fn store(&self, gpu: &Gpu, staged: u64, from: usize, n: usize, wrong: u64) -> Result<(), GpuError> {
        let (format, address, count, check) = (Some(self.format), self.address, n as i64, geometry::each(n));
        if !self.format.tiled {
            let (from, blocks) = (from as i64, self.blocks);
            gpu.launch("pack", format, "repack", check, &[&staged, &address, &from, &count, &blocks])?;
            let args: [&dyn Arg; 6] = [&staged, &address, &from, &count, &blocks, &wrong];
            return gpu.launch("pack", format, "repack_check", check, &args);
        }
        let (first, units) = (self.unit(from), n / self.rows * self.units as usize);
        let all = units as i64;
        let launch = geometry::tile_pack(units);
        gpu.launch("tiles", format, "tile_pack", launch, &[&staged, &address, &first, &all, &self.units])?;
        let args: [&dyn Arg; 6] = [&staged, &address, &first, &count, &self.units, &wrong];
        gpu.launch("tiles", format, "tile_check", check, &args)
    }

    /// Brings `n` bytes back, as the file has them from byte `from` on.
    fn fetch(&self, gpu: &Gpu, staged: u64, from: usize, n: usize) -> Result<(), GpuError> {
        let (format, address, count, launch) = (Some(self.format), self.address, n as i64, geometry::each(n));
        if self.format.tiled {
            let first = self.unit(from);
            let args: [&dyn Arg; 5] = [&address, &staged, &first, &count, &self.units];
            return gpu.launch("tiles", format, "tile_unpack", launch, &args);
        }
        let (from, blocks) = (from as i64, self.blocks);
        gpu.launch("pack", format, "unpack", launch, &[&address, &staged, &from, &count, &blocks])
    }
}
