//! The binary records of the kernel's blktrace, for blkparse, btt, iowatcher, and fio's replay.
//!
//! A request is queued (`Q`) when it was seen, issued (`D`) when it was fetched, and completed (`C`). A disk has the major number 259 (the
//! kernel's for such disks), and each namespace of each device is a disk, with the next minor number from 1 on. All lie in one file, as if
//! one processor had written them: `NAME.blktrace.0`.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Write},
};

use millrace_block::trace::EventOperation;

use crate::requests::{Request, Trace};

/// The kernel's: a magic, and version 7 of the format.
const MAGIC: u32 = 0x6561_7400 | 7;
const MAJOR: u32 = 259;

const QUEUE: u32 = 1;
const ISSUE: u32 = 7;
const COMPLETE: u32 = 8;

/// Categories are the upper half of an action.
const READ: u32 = 1 << 16;
const WRITE: u32 = 1 << 17;
const FLUSH: u32 = 1 << 18;
const QUEUED: u32 = 1 << 20;
const ISSUED: u32 = 1 << 22;
const COMPLETED: u32 = 1 << 23;
/// By a file system or a program, as all of ours are to the guest's kernel.
const FS: u32 = 1 << 24;
const DISCARD: u32 = 1 << 29;
const FUA: u32 = 1 << 31;

/// What a request is, in the kernel's categories; `None`: the kernel has none for it.
fn category(operation: EventOperation) -> Option<u32> {
    let fua = if operation.fua() { FUA } else { 0 };
    Some(match operation.base() {
        EventOperation::READ | EventOperation::COMPARE => READ,
        EventOperation::WRITE | EventOperation::ZERO => WRITE | fua,
        EventOperation::FLUSH => WRITE | FLUSH,
        EventOperation::DEALLOCATE => WRITE | DISCARD,
        _ => return None,
    })
}

/// One of `struct blk_io_trace`.
struct Record {
    sequence: u32,
    time: u64,
    sector: u64,
    bytes: u32,
    action: u32,
    device: u32,
    error: u16,
}

impl Record {
    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let Self { sequence, time, sector, bytes, action, device, error } = *self;
        out.write_all(&MAGIC.to_le_bytes())?;
        out.write_all(&sequence.to_le_bytes())?;
        out.write_all(&time.to_le_bytes())?;
        out.write_all(&sector.to_le_bytes())?;
        // Process and processor: none, and the first.
        for word in [bytes, action, 0, device, 0] {
            out.write_all(&word.to_le_bytes())?;
        }
        out.write_all(&error.to_le_bytes())?;
        out.write_all(&[0; 2])
    }
}

/// Minor numbers of what requests went to, by device and namespace: blocks of two namespaces are not the same ones.
fn minors(trace: &Trace) -> BTreeMap<(u16, u16), u32> {
    let disks: BTreeSet<_> = trace.requests.iter().map(|request| (request.key.device, request.nsid)).collect();
    disks.into_iter().zip(1..).collect()
}

/// Writes a trace; how many of its requests. Copies and what the kernel has no name for are left out.
///
/// # Errors
/// What `out` says.
pub fn write(trace: &Trace, out: &mut impl Write) -> io::Result<usize> {
    let (first, minors) = (trace.span().0, minors(trace));
    let (mut events, mut count) = (Vec::new(), 0);
    for request in &trace.requests {
        let Some(category) = category(request.operation) else { continue };
        count += 1;
        let mut add = |time: u64, action: u32| events.push((time - first.min(time), action | category | FS, request));
        add(request.began(), QUEUE | QUEUED);
        add(request.fetched, ISSUE | ISSUED);
        if let Some(completed) = request.completed {
            add(completed, COMPLETE | COMPLETED);
        }
    }
    events.sort_by_key(|(time, action, _): &(u64, u32, &Request)| (*time, *action & 0xff));
    for (sequence, (time, action, request)) in (1..).zip(events) {
        let (offset, bytes) = trace.range(request);
        let error = if action & COMPLETED != 0 && request.status != 0 { 5 } else { 0 };
        let device = MAJOR << 20 | minors[&(request.key.device, request.nsid)] & 0xf_ffff;
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        Record { sequence, time, sector: offset / 512, bytes, action, device, error }.write(out)?;
    }
    Ok(count)
}
