//! Do virtual ranks of one GPU add exactly? Through the collective that engines use, with one thread per rank.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::probe::{self, Outcome, Tally, fill_integers};
use super::watch::Watch;
use crate::comm::Collective;
use crate::device::cuda::CudaDevice;
use crate::device::cuda::gpu::{Gpu, GpuError};
use crate::device::cuda::group::Group;
use crate::device::cuda::virtual_ranks::VirtualRanks;
use crate::device::{BufId, BufRows, BufSpec, Call, Device, DeviceError, Limits, Op, Rows, StepShape, Stores, View};
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
    let comm = Arc::new(VirtualRanks(group.clone()));
    let said = |e: DeviceError| GpuError::Driver { what: SITE.into(), error: e.to_string() };
    let x = View::cols(BufId(0), 0, WIDTH);
    let buf = BufSpec { rows: BufRows::Step(Rows::Tokens), width: WIDTH, fill: None };
    let stores = Stores { bufs: vec![buf], ..Stores::default() };
    let limits = Limits { tokens: rows, sequences: 1, logits: 0, pages: 1, page: 1 };
    let call = Call { at: Place::EMBED, op: Op::AllReduce { x }, rows: Rows::Tokens };
    let shape = StepShape { tokens: rows, context: 0, logits: 0, recorded: false, ahead: false };
    let one = |rank: usize| -> Result<(Option<String>, Vec<f32>), GpuError> {
        let mut device = CudaDevice::new(rank, group.clone(), comm.clone(), None)?;
        device.alloc(&stores, limits).map_err(said)?;
        let address = device.rows(x).at;
        fill_integers(gpu, address, rows * WIDTH, rank)?;
        device.run(&call, shape).map_err(said)?;
        let differ = Tally::new(gpu)?.integers(SITE, address, rows * WIDTH, (ranks, 1))?;
        let name = |d| format!("{} values over {ranks} virtual ranks, rank {rank}: {d}", rows * WIDTH);
        let values = device.read(x, rows).map_err(said)?;
        Ok((differ.map(name), values))
    };
    let one = |rank: usize| {
        one(rank).inspect_err(|e| comm.abort(&e.to_string())) // the others need not wait
    };
    let results = probe::ranks(ranks, SITE, &one).into_iter().collect::<Result<Vec<_>, GpuError>>()?;
    let wrong = results.iter().find_map(|r| r.0.clone());
    Ok(wrong.or_else(|| super::nccl::apart(results.iter().map(|r| r.1.as_slice()))))
}
