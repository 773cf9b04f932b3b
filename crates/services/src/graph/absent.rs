//! What a stored stack has in the place of a leg that is not there: a dead disk must not take those down that are there to outlive it.

use std::io;

use millrace_block::{BlockCount, BlockError, BlockSize, Geometry, Request, Step, TaskContext, Usage, Volume, VolumeError};

use super::LeafError;
use crate::{migrate::stacks::migration, stack::Node};

/// The size of one that nobody knows the size of: no limit for the others.
const ANY: u64 = 1 << 50;

/// ENFILE and EMFILE.
const TOO_MANY_FILES: [i32; 2] = [23, 24];

/// A leg that is not there. Every request fails, as on a disk that was pulled; the service above takes it out of use.
pub(super) struct Absent {
    name: String,
    geometry: Geometry,
}

impl Absent {
    /// `size` is what the leg is told to have, in bytes.
    pub(super) fn new(name: String, size: Option<u64>, block_size: BlockSize) -> Self {
        let blocks = BlockCount(size.unwrap_or(ANY) >> block_size.shift());
        let geometry = Geometry { block_size, blocks, read_only: false, volatile_cache: true, deallocate: true };
        Self { name, geometry }
    }

    fn refused<T>(&self, what: &str) -> Result<T, VolumeError> {
        let why = format!("it was not there when the volume was opened, and cannot be {what}");
        Err(VolumeError::Refused { volume: self.name.clone(), why })
    }
}

impl Volume for Absent {
    fn name(&self) -> &str {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit<'a>(&'a self, _: TaskContext<'a>, _: Request<'a>) -> Step<'a> {
        Step::Done(Err(BlockError::NotReady))
    }

    fn scratch_bytes(&self) -> usize {
        0
    }

    fn resize(&self, _: BlockCount) -> Result<(), VolumeError> {
        self.refused("resized")
    }

    fn format(&self, _: BlockSize) -> Result<(), VolumeError> {
        self.refused("formatted")
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

/// Whether a leg that cannot be opened for this reason may be gone for good: not one that somebody else has, nor one for which this process
/// lacks something.
pub(super) fn is_loss(error: &LeafError) -> bool {
    use io::ErrorKind::{OutOfMemory, PermissionDenied, ResourceBusy};
    match error {
        LeafError::Volume(VolumeError::InUse { .. }) => false,
        LeafError::Volume(VolumeError::Io { source, .. }) => {
            let too_many = source.raw_os_error().is_some_and(|errno| TOO_MANY_FILES.contains(&errno));
            !too_many && !matches!(source.kind(), PermissionDenied | OutOfMemory | ResourceBusy)
        }
        LeafError::Volume(_) | LeafError::Refused(_) => true,
    }
}

/// Whether it may be done without: leaves that look alike are told apart by their order, and one that is not opened would change it; and
/// of a migration the old leg may have everything.
pub(super) fn can_be_missing(leg: &Node) -> bool {
    !leg.leaves().into_iter().any(super::is_one_of_many) && migration(leg).is_none()
}
