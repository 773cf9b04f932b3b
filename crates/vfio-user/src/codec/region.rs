//! The reply to DEVICE_GET_REGION_INFO: a structure and a chain of capabilities.

use zerocopy::{FromBytes, IntoBytes};

use super::wire;
use crate::device::{MmapArea, RegionFlags, RegionInfo};

const FIXED: usize = size_of::<wire::RegionInfo>();

/// Writes the reply's payload into `out`; `argsz` is the room the client has. True if the region's file goes with it:
/// it does when the reply is complete, so a client that asks twice gets it once, the second time.
pub(crate) fn encode_region(index: u32, region: &RegionInfo<'_>, argsz: u32, out: &mut Vec<u8>) -> bool {
    let sparse = region.fd.is_some() && !region.areas.is_empty();
    let cap_size = if sparse {
        size_of::<wire::CapabilityHeader>()
            + size_of::<wire::SparseMmap>()
            + size_of::<wire::SparseArea>() * region.areas.len()
    } else {
        0
    };
    let complete = argsz as usize >= FIXED + cap_size;
    let mut flags = region.flags.bits();
    if region.fd.is_some() {
        flags |= wire::REGION_MMAP;
    }
    // Without its capabilities the flag must stay clear: QEMU checks cap_offset whenever it is set.
    let with_caps = sparse && complete;
    if with_caps {
        flags |= wire::REGION_CAPS;
    }
    out.clear();
    let fixed = wire::RegionInfo {
        argsz: (FIXED + cap_size) as u32,
        flags,
        index,
        cap_offset: if with_caps { FIXED as u32 } else { 0 },
        size: region.size,
        offset: region.offset,
    };
    out.extend_from_slice(fixed.as_bytes());
    if with_caps {
        let head = wire::CapabilityHeader { id: wire::CAP_SPARSE_MMAP, version: 1, next: 0 };
        out.extend_from_slice(head.as_bytes());
        let sparse = wire::SparseMmap { nr_areas: region.areas.len() as u32, reserved: 0 };
        out.extend_from_slice(sparse.as_bytes());
        for area in region.areas {
            out.extend_from_slice(wire::SparseArea { offset: area.offset, size: area.size }.as_bytes());
        }
    }
    complete && region.fd.is_some()
}

/// A region info reply that makes no sense.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionReplyError {
    /// Shorter than the fixed part.
    #[error("region info of {0} bytes")]
    TooShort(usize),
    /// The chain of capabilities leaves the reply, or does not advance.
    #[error("a region capability at {offset} of {length} bytes")]
    Capability {
        /// Where it claims to be.
        offset: usize,
        /// Bytes of the reply.
        length: usize,
    },
    /// A mappable area outside the region.
    #[error("mappable area {offset:#x} + {size:#x} leaves the region of {region:#x} bytes")]
    Area {
        /// Start.
        offset: u64,
        /// Bytes.
        size: u64,
        /// The region's bytes.
        region: u64,
    },
}

/// Reads a server's reply: the fixed part and the mappable areas (none when the whole region is).
pub fn parse_region(payload: &[u8]) -> Result<(wire::RegionInfo, Vec<MmapArea>), RegionReplyError> {
    let (fixed, _) = wire::RegionInfo::read_from_prefix(payload).map_err(|_| RegionReplyError::TooShort(payload.len()))?;
    let mut areas = Vec::new();
    let mut at = if fixed.flags & wire::REGION_CAPS == 0 { 0 } else { fixed.cap_offset as usize };
    let mut last = FIXED - 1;
    while at != 0 {
        let bad = RegionReplyError::Capability { offset: at, length: payload.len() };
        // Each must lie behind the one before: no chain can go on forever.
        if at <= last {
            return Err(bad);
        }
        last = at;
        let Some((head, rest)) = payload.get(at..).and_then(|bytes| wire::CapabilityHeader::read_from_prefix(bytes).ok())
        else {
            return Err(bad);
        };
        if head.id == wire::CAP_SPARSE_MMAP {
            areas = parse_areas(rest, fixed.size)?.ok_or(bad)?;
        }
        at = head.next as usize;
    }
    Ok((fixed, areas))
}

/// `None` if the announced areas do not fit into `bytes`.
fn parse_areas(bytes: &[u8], region: u64) -> Result<Option<Vec<MmapArea>>, RegionReplyError> {
    let Ok((head, mut rest)) = wire::SparseMmap::read_from_prefix(bytes) else {
        return Ok(None);
    };
    let mut areas = Vec::new();
    for _ in 0..head.nr_areas {
        let Ok((wire::SparseArea { offset, size }, next)) = wire::SparseArea::read_from_prefix(rest) else {
            return Ok(None);
        };
        if offset.checked_add(size).is_none_or(|end| end > region) {
            return Err(RegionReplyError::Area { offset, size, region });
        }
        areas.push(MmapArea { offset, size });
        rest = next;
    }
    Ok(Some(areas))
}

impl RegionFlags {
    /// From a reply; the bits that say how the reply is built are left out.
    pub(crate) fn from_wire(flags: u32) -> Self {
        Self::from_bits(flags & Self::READ_WRITE.bits())
    }
}
