//! A disk whose sectors are larger than its blocks.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use millrace_block::{BlockError, Operation, Request, Step, TaskContext, Volume};

/// Blocks of the sector that goes bad.
pub(crate) const SECTOR: std::ops::Range<u64> = 8..16;

/// While the sector is bad it cannot be read, nor written in part, for which it would be read; it is good when all of it has been written.
pub(crate) struct BadSector(Arc<dyn Volume>, AtomicBool);

impl BadSector {
    pub(crate) fn on(volume: Arc<dyn Volume>) -> Arc<Self> {
        Arc::new(Self(volume, AtomicBool::new(false)))
    }

    pub(crate) fn goes_bad(&self) {
        self.1.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_bad(&self) -> bool {
        self.1.load(Ordering::Relaxed)
    }
}

impl Volume for BadSector {
    millrace_block::passes_on!(0);

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        let (first, end) = (request.lba.0, request.lba.0 + request.count.0);
        let is_there = self.is_bad() && first < SECTOR.end && SECTOR.start < end;
        match request.operation {
            Operation::Read if is_there => return Step::Done(Err(BlockError::ReadFault { errno: 5 })),
            Operation::Write { .. } if is_there && (SECTOR.start < first || end < SECTOR.end) => {
                return Step::Done(Err(BlockError::WriteFault { errno: 5 }));
            }
            Operation::Write { .. } if is_there => self.1.store(false, Ordering::Relaxed),
            _ => {}
        }
        self.0.submit(cx, request)
    }

    fn scratch_bytes(&self) -> usize {
        self.0.scratch_bytes()
    }
}
