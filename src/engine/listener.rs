//! The forward pass's end of a probe: shows buffers to a listener, if there is one, and takes replacements back.

use super::EngineError;
use super::step::{Forward, Work};
use crate::device::Device;
use crate::model::Place;
use crate::probe::{Data, Probe, Then, Visit};

/// Why a step ends before its end.
pub(super) enum Halt {
    /// The listener said so.
    Stopped,
    /// Something failed.
    Failed(EngineError),
}

impl<E: Into<EngineError>> From<E> for Halt {
    fn from(e: E) -> Self {
        Halt::Failed(e.into())
    }
}

/// A listener, if there is one.
pub(super) struct Listener<'a>(pub Option<&'a mut (dyn Probe + 'static)>);

impl Listener<'_> {
    pub(super) fn wants(&self, place: Place) -> bool {
        self.0.as_ref().is_some_and(|p| p.wants(place))
    }

    pub(super) fn show(&mut self, place: Place, rows: usize, shape: &[usize], values: Data<'_>) -> Result<bool, Halt> {
        let Some(probe) = &mut self.0 else { return Ok(false) };
        match probe.visit(Visit { place, rows, shape, values }) {
            Then::Continue => Ok(false),
            Then::Replaced => Ok(true),
            Then::Stop => Err(Halt::Stopped),
        }
    }

    /// Shows columns of a buffer and writes them back if they were replaced.
    pub(super) fn values<D: Device>(
        &mut self,
        forward: &mut Forward<D>,
        place: Place,
        rows: usize,
        of: impl Fn(&mut Work<D>) -> (&mut D::Buf, usize),
    ) -> Result<(), Halt> {
        if !self.wants(place) {
            return Ok(());
        }
        let shape = place.shape(&forward.config, forward.tp);
        let width: usize = shape.iter().product();
        let (buf, start) = of(&mut forward.work);
        let mut values = forward.device.read(buf, rows, start..start + width)?;
        if self.show(place, rows, &shape, Data::Values(&mut values))? {
            forward.device.write(buf, rows, start..start + width, &values)?;
        }
        Ok(())
    }

    /// Shows indices and writes them back if they were replaced.
    pub(super) fn indices<D: Device>(
        &mut self,
        forward: &mut Forward<D>,
        place: Place,
        rows: usize,
        of: impl Fn(&mut Work<D>) -> &mut D::Index,
    ) -> Result<(), Halt> {
        if !self.wants(place) {
            return Ok(());
        }
        let shape = place.shape(&forward.config, forward.tp);
        let index = of(&mut forward.work);
        let mut values = forward.device.read_index(index, rows)?;
        if self.show(place, rows, &shape, Data::Indices(&mut values))? {
            forward.device.write_index(index, rows, &values)?;
        }
        Ok(())
    }
}
