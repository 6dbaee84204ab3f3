//! Do virtual ranks of one GPU add exactly? Through the collective that engines use, with one thread per rank.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::probe::{Outcome, Tally, fill_integers};
use super::watch::Watch;
use crate::comm::Collective;
use crate::comm::shared_gpu::SharedGpu;
use crate::device::Device;
use crate::device::cuda::CudaDevice;
use crate::device::cuda::gpu::{Gpu, GpuError};
use crate::device::cuda::group::Group;
use crate::device::recipe::Recipe;
use crate::model::Place;

const RANKS: [usize; 2] = [2, 8];
/// GLM-5's width.
const WIDTH: usize = 6144;
const ROWS: [usize; 3] = [1, 8, 171];
const MEETING: Duration = Duration::from_secs(30);
const SITE: &str = "sum over virtual ranks";

/// Sums over 2 and 8 ranks.
pub(super) fn sums(gpu: &Arc<Gpu>, watch: &Watch) -> Result<Outcome, GpuError> {
    let mut wrong = None;
    for ranks in RANKS {
        for rows in ROWS {
            watch.at(format!("a sum of {} values over {ranks} virtual ranks of GPU {}", rows * WIDTH, gpu.ordinal));
            wrong = wrong.or(sum(gpu, ranks, rows)?);
        }
    }
    let counts = ROWS.map(|r| r * WIDTH);
    let evidence = format!("exact and bit-equal over {RANKS:?} ranks, {counts:?} values");
    Ok(Outcome { wrong, evidence, data: json!({ "ranks": RANKS, "values": counts }) })
}

fn sum(gpu: &Arc<Gpu>, ranks: usize, rows: usize) -> Result<Option<String>, GpuError> {
    let group = Group::new(gpu.clone(), ranks, MEETING);
    let comm = SharedGpu(group.clone());
    let failed = |e: String| GpuError::Driver { what: SITE.into(), error: e };
    let one = |rank: usize| -> Result<(Option<String>, Vec<f32>), GpuError> {
        let device = CudaDevice::new(rank, group.clone(), Recipe::Strict, None)?;
        let mut buf = device.buf(rows, WIDTH).map_err(|e| failed(e.to_string()))?;
        let (address, _) = device.place(&buf);
        fill_integers(gpu, address, rows * WIDTH, rank)?;
        comm.all_reduce(rank, Place::EMBED, &device, &mut buf, rows, WIDTH).map_err(|e| failed(e.to_string()))?;
        let differ = Tally::new(gpu)?.integers(SITE, address, rows * WIDTH, (ranks, 1))?;
        let name = |d| format!("{} values over {ranks} virtual ranks, rank {rank}: {d}", rows * WIDTH);
        let values = device.read(&buf, rows, 0..WIDTH).map_err(|e| failed(e.to_string()))?;
        Ok((differ.map(name), values))
    };
    let one = |rank: usize| {
        one(rank).inspect_err(|e| Collective::<CudaDevice>::abort(&comm, &e.to_string())) // the others need not wait
    };
    let results = std::thread::scope(|scope| {
        let started: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || one(rank))).collect();
        let join = |t: std::thread::ScopedJoinHandle<'_, _>| {
            t.join().unwrap_or_else(|_| Err(failed("a rank panicked".into())))
        };
        started.into_iter().map(join).collect::<Result<Vec<_>, GpuError>>()
    })?;
    let wrong = results.iter().find_map(|r| r.0.clone());
    Ok(wrong.or_else(|| super::nccl::apart(results.iter().map(|r| r.1.as_slice()))))
}
