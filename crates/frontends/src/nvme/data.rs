//! Data pointers: PRPs and SGLs become segments (Base 4.1.1, 4.3).
//!
//! ```text
//!   DPTR ─┬─ PRP1 (PRP2 = page | list ─► list ─► …) ─┐
//!         └─ SGL1 (block | segment ─► last segment) ─┴─► Sink: length known, bounded, neighbours merged ─► segments
//! ```
//!
//! Every list entry is copied out of guest memory once; what is checked is the copy. The work is bounded by the data's length
//! for PRPs and by [`MAX_DESCRIPTORS`] for SGLs, so that a list which leads back into itself only fails its own command.

use millrace_memory::{Access, GuestAddress, GuestMemory, Segment, SegmentCursor};
use millrace_nvme_spec::{
    command::{Psdt, Sqe},
    identify::{SglAlignment, SglSupport},
    prp::{PrpEntry, entries_in_list},
    sgl::{SglDescriptor, SglSubtype, SglType},
    status::Status,
};
use zerocopy::{FromBytes, IntoBytes};

use super::status::of_access_error;

/// Segments a command may have at most: what one vectored system call takes. A transfer of 2 MiB in single pages fits.
pub(crate) const MAX_SEGMENTS: usize = 1024;

/// SGL descriptors of a command at most, those that lead to other segments included.
const MAX_DESCRIPTORS: u32 = 2048;

/// What Identify Controller tells of SGLs: any alignment, no bit buckets, no keys, lengths equal to the data's; metadata by address
/// or by SGL.
pub(crate) const SGLS: SglSupport =
    SglSupport::new().with_support(SglAlignment::BYTE).with_metadata_contiguous(true).with_metadata_sgl(true);

/// List entries copied at once.
const CHUNK: usize = 64;

/// Resolves the command's data pointer for exactly `len` bytes into `segments` (cleared first; neighbours merged).
/// `access` is ours: `Write` for data that go to the guest.
///
/// On an error nothing was transferred; the status is final (Do Not Retry).
pub(crate) fn resolve(
    memory: &GuestMemory,
    page_size: u64,
    sqe: &Sqe,
    len: u64,
    access: Access,
    segments: &mut Vec<Segment>,
) -> Result<(), Status> {
    segments.clear();
    if len == 0 {
        return Ok(());
    }
    let mut data = Data { memory, access, left: len, segments };
    match sqe.flags.psdt() {
        Psdt::PRP => data.prps(sqe, page_size),
        // Where MPTR points is for those who want metadata.
        Psdt::SGL_MPTR_CONTIGUOUS | Psdt::SGL_MPTR_SGL => data.sgl(sqe.dptr.sgl1()),
        _ => Err(Status::INVALID_FIELD),
    }
    .map_err(Status::do_not_retry)
}

/// Resolves the command's metadata pointer for exactly `len` bytes into `segments`, as [`resolve`] does the data pointer.
pub(crate) fn resolve_metadata(
    memory: &GuestMemory,
    sqe: &Sqe,
    len: u64,
    access: Access,
    segments: &mut Vec<Segment>,
) -> Result<(), Status> {
    segments.clear();
    if len == 0 {
        return Ok(());
    }
    let mut data = Data { memory, access, left: len, segments };
    match sqe.flags.psdt() {
        Psdt::PRP if !sqe.mptr.is_multiple_of(4) => Err(Status::INVALID_FIELD),
        Psdt::PRP | Psdt::SGL_MPTR_CONTIGUOUS => data.add(sqe.mptr, len, Status::INVALID_FIELD),
        Psdt::SGL_MPTR_SGL => data.metadata_sgl(sqe.mptr),
        _ => Err(Status::INVALID_FIELD),
    }
    .map_err(Status::do_not_retry)
}

/// Copies the data of a resolved command out of guest memory: from its start, as many bytes as there are of both.
pub(crate) fn copy_in(segments: &[Segment], out: &mut [u8]) {
    let mut cursor = SegmentCursor::new(segments);
    let mut rest = out;
    while let Some(run) = cursor.next_run(rest.len()) {
        // A run is no longer than what was asked for.
        let (now, later) = std::mem::take(&mut rest).split_at_mut(run.len());
        run.read_at(0, now);
        rest = later;
    }
}

/// Copies `data` to the guest memory of a resolved command: from its start, as many bytes as there are of both.
pub(crate) fn copy_out(segments: &[Segment], data: &[u8]) {
    let mut cursor = SegmentCursor::new(segments);
    let mut rest = data;
    while let Some(run) = cursor.next_run(rest.len()) {
        let (now, later) = rest.split_at(run.len());
        run.write_at(0, now);
        rest = later;
    }
}

/// A value at the start of a resolved command's data; zeroes where the data end before.
pub(crate) fn copy_value<T: FromBytes + IntoBytes>(segments: &[Segment]) -> T {
    let mut value = T::new_zeroed();
    copy_in(segments, value.as_mut_bytes());
    value
}

/// Data being resolved.
struct Data<'a> {
    memory: &'a GuestMemory,
    access: Access,
    /// Bytes that no segment covers yet.
    left: u64,
    segments: &'a mut Vec<Segment>,
}

impl Data<'_> {
    /// Adds `len` bytes at a guest address.
    #[inline]
    fn add(&mut self, addr: u64, len: u64, too_many: Status) -> Result<(), Status> {
        let mut done = 0;
        while done < len {
            let at = addr.checked_add(done).ok_or(Status::DATA_TRANSFER_ERROR)?;
            let segment = self.memory.translate_some(GuestAddress(at), len - done, self.access).map_err(of_access_error)?;
            done += segment.len() as u64;
            let count = self.segments.len();
            match self.segments.last_mut() {
                Some(last) if last.adjoins(&segment) => last.extend_over(&segment),
                _ if count >= MAX_SEGMENTS => return Err(too_many),
                _ => self.segments.push(segment),
            }
        }
        self.left -= len;
        Ok(())
    }

    /// Adds the data that one PRP entry stands for: what is left of its page, or of the data.
    #[inline]
    fn page(&mut self, entry: PrpEntry, page_size: u64) -> Result<(), Status> {
        let len = self.left.min(page_size - entry.offset(page_size));
        // A transfer within MDTS never has that many pages.
        self.add(entry.0, len, Status::INVALID_FIELD)
    }

    fn prps(&mut self, sqe: &Sqe, page_size: u64) -> Result<(), Status> {
        let (first, second) = (PrpEntry(sqe.dptr.prp1), PrpEntry(sqe.dptr.prp2));
        if !first.is_dword_aligned() {
            return Err(Status::PRP_OFFSET_INVALID);
        }
        self.page(first, page_size)?;
        match self.left {
            0 => Ok(()),
            left if left <= page_size && second.offset(page_size) != 0 => Err(Status::PRP_OFFSET_INVALID),
            left if left <= page_size => self.page(second, page_size),
            _ if !second.0.is_multiple_of(PrpEntry::SIZE as u64) => Err(Status::PRP_OFFSET_INVALID),
            _ => self.prp_lists(second, page_size),
        }
    }

    /// Follows the lists; only the first may start within a page. Every list after it has a page of entries, so that each
    /// takes us further and a list that leads to itself ends with the data.
    fn prp_lists(&mut self, first: PrpEntry, page_size: u64) -> Result<(), Status> {
        let mut list = first;
        loop {
            let room = entries_in_list(list.offset(page_size), page_size);
            let pages = self.left.div_ceil(page_size);
            let next = self.prp_list(list, pages.min(room), pages > room, page_size)?;
            match next {
                None => return Ok(()),
                Some(next) if next.offset(page_size) != 0 => return Err(Status::PRP_OFFSET_INVALID),
                Some(next) => list = next,
            }
        }
    }

    /// Adds the pages of one list of `count` entries; the last of them is returned when it `leads_on` to another list.
    fn prp_list(&mut self, list: PrpEntry, count: u64, leads_on: bool, page_size: u64) -> Result<Option<PrpEntry>, Status> {
        let mut copied = [PrpEntry::default(); CHUNK];
        let mut done = 0;
        while done < count {
            let take = (count - done).min(CHUNK as u64);
            let entries = &mut copied[..take as usize];
            // The list lies within a page, so that this does not wrap.
            let at = GuestAddress(list.0 + done * PrpEntry::SIZE as u64);
            self.memory.read(at, entries.as_mut_bytes()).map_err(of_access_error)?;
            done += take;
            let (next, pages) = match entries {
                [pages @ .., last] if leads_on && done == count => (Some(*last), &*pages),
                all => (None, &*all),
            };
            for entry in pages {
                if entry.offset(page_size) != 0 {
                    return Err(Status::PRP_OFFSET_INVALID);
                }
                self.page(*entry, page_size)?;
            }
            if next.is_some() {
                return Ok(next);
            }
        }
        Ok(None)
    }

    /// MPTR is the address of one descriptor.
    fn metadata_sgl(&mut self, mptr: u64) -> Result<(), Status> {
        if !mptr.is_multiple_of(8) {
            return Err(Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
        }
        let mut first = SglDescriptor::default();
        self.memory.read(GuestAddress(mptr), first.as_mut_bytes()).map_err(of_access_error)?;
        self.sgl(first).map_err(|status| match status.code() {
            Status::DATA_SGL_LENGTH_INVALID => Status::METADATA_SGL_LENGTH_INVALID,
            _ => status,
        })
    }

    fn sgl(&mut self, first: SglDescriptor) -> Result<(), Status> {
        match address_kind(first)? {
            SglType::DATA_BLOCK => self.block(first)?,
            SglType::SEGMENT => self.sgl_segments(first)?,
            SglType::LAST_SEGMENT => {
                self.sgl_segment(first, &mut 0)?;
            }
            _ => return Err(Status::SGL_DESCRIPTOR_TYPE_INVALID),
        }
        if self.left == 0 { Ok(()) } else { Err(Status::DATA_SGL_LENGTH_INVALID) }
    }

    /// Follows segments to the last.
    fn sgl_segments(&mut self, first: SglDescriptor) -> Result<(), Status> {
        let mut read = 0;
        let mut segment = first;
        while let Some(next) = self.sgl_segment(segment, &mut read)? {
            segment = next;
        }
        Ok(())
    }

    /// Adds the data of one segment; returns the descriptor of the next one, unless this is the last.
    fn sgl_segment(&mut self, segment: SglDescriptor, read: &mut u32) -> Result<Option<SglDescriptor>, Status> {
        let size = SglDescriptor::SIZE as u32;
        let is_last = segment.identifier.kind() == SglType::LAST_SEGMENT;
        // A segment is aligned to 8 bytes, and made of whole descriptors.
        if segment.length == 0 || !segment.length.is_multiple_of(size) || !segment.address.is_multiple_of(8) {
            return Err(Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
        }
        let count = segment.length / size;
        if count > MAX_DESCRIPTORS - *read {
            return Err(Status::INVALID_NUMBER_OF_SGL_DESCRIPTORS);
        }
        *read += count;
        let mut copied = [SglDescriptor::default(); CHUNK / 2];
        let mut done = 0;
        while done < count {
            let descriptors = &mut copied[..(count - done).min(CHUNK as u32 / 2) as usize];
            let at = segment.address.checked_add(u64::from(done * size)).ok_or(Status::DATA_TRANSFER_ERROR)?;
            self.memory.read(GuestAddress(at), descriptors.as_mut_bytes()).map_err(of_access_error)?;
            for &descriptor in &*descriptors {
                done += 1;
                match address_kind(descriptor)? {
                    SglType::DATA_BLOCK if done == count && !is_last => {
                        return Err(Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
                    }
                    SglType::DATA_BLOCK => self.block(descriptor)?,
                    SglType::SEGMENT | SglType::LAST_SEGMENT if is_last => {
                        return Err(Status::INVALID_SGL_SEGMENT_DESCRIPTOR);
                    }
                    SglType::SEGMENT | SglType::LAST_SEGMENT if done < count => {
                        return Err(Status::INVALID_NUMBER_OF_SGL_DESCRIPTORS);
                    }
                    SglType::SEGMENT | SglType::LAST_SEGMENT => return Ok(Some(descriptor)),
                    _ => return Err(Status::SGL_DESCRIPTOR_TYPE_INVALID),
                }
            }
        }
        Ok(None)
    }

    fn block(&mut self, block: SglDescriptor) -> Result<(), Status> {
        let len = u64::from(block.length);
        if len > self.left {
            return Err(Status::DATA_SGL_LENGTH_INVALID);
        }
        self.add(block.address, len, Status::INVALID_NUMBER_OF_SGL_DESCRIPTORS)
    }
}

/// The descriptor's type, when its sub type is one that we take.
fn address_kind(descriptor: SglDescriptor) -> Result<SglType, Status> {
    match descriptor.identifier.subtype() {
        SglSubtype::ADDRESS => Ok(descriptor.identifier.kind()),
        _ => Err(Status::SGL_DESCRIPTOR_TYPE_INVALID),
    }
}

#[cfg(test)]
mod tests;
