//! Tests of everything here over real mappings.

mod bounce;
mod file;
mod guard;
mod guest;
mod room;
mod segment;
mod store;

use std::os::fd::OwnedFd;

use rustix::fs::MemfdFlags;

use crate::{Mapping, Segment};

/// A memory file with this content.
fn memory_file(content: &[u8]) -> OwnedFd {
    let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
    let mut done = 0;
    rustix::fs::ftruncate(&file, content.len() as u64).unwrap();
    while done < content.len() {
        done += rustix::io::pwrite(&file, &content[done..], done as u64).unwrap();
    }
    file
}

/// Memory of the test's own. The mapping must be kept as long as its segments are used.
pub(crate) fn own_memory(len: usize) -> (Mapping, Segment) {
    let mapping = Mapping::anonymous(len).unwrap();
    // SAFETY: the mapping is writable, and every test keeps it to its end.
    let segment = unsafe { mapping.segment(0, len) }.unwrap();
    (mapping, segment)
}

/// The segment's bytes.
pub(crate) fn content(segment: &Segment) -> Vec<u8> {
    let mut bytes = vec![0; segment.len()];
    segment.read_at(0, &mut bytes);
    bytes
}
