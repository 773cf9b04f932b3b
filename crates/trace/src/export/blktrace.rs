//! The binary records of the kernel's blktrace, for blkparse, btt, iowatcher, and fio's replay.
//!
//! A request is queued (`Q`) when it was seen, issued (`D`) when it was fetched, and completed (`C`). A disk has the major number 259 (the
//! kernel's for such disks), and each namespace of each device is a disk, with the next minor number from 1 on. All lie in one file, as if
//! one processor had written them: `NAME.blktrace.0`. Before them are the notes that the kernel makes as well: the time of day at the
//! beginning, and who asks. That is a program there, and the device here.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Write},
};

use millrace_block::trace::EventOperation;

use crate::requests::{Request, Trace, Visit};

/// The kernel's: a magic, and version 7 of the format.
const MAGIC: u32 = 0x6561_7400 | 7;
const MAJOR: u32 = 259;
/// A record has the bytes as a number of 32 bits; this is of whole blocks of any disk.
const MOST: u64 = (1 << 32) - 4096;

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
/// No request: it tells of something.
const NOTE: u32 = 1 << 26;
const DISCARD: u32 = 1 << 29;
const FUA: u32 = 1 << 31;

/// Notes: a process has this name; the time of day.
const NAMED: u32 = NOTE;
const BEGAN: u32 = NOTE | 1;

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

/// One of `struct blk_io_trace`, and what follows it.
#[derive(Default)]
struct Record<'a> {
    sequence: u32,
    time: u64,
    sector: u64,
    bytes: u32,
    action: u32,
    process: u32,
    device: u32,
    error: u16,
    data: &'a [u8],
}

impl Record<'_> {
    fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let Self { sequence, time, sector, bytes, action, process, device, error, data } = *self;
        out.write_all(&MAGIC.to_le_bytes())?;
        out.write_all(&sequence.to_le_bytes())?;
        out.write_all(&time.to_le_bytes())?;
        out.write_all(&sector.to_le_bytes())?;
        // The last one is the processor: the first.
        for word in [bytes, action, process, device, 0] {
            out.write_all(&word.to_le_bytes())?;
        }
        out.write_all(&error.to_le_bytes())?;
        out.write_all(&(data.len() as u16).to_le_bytes())?;
        out.write_all(data)
    }
}

/// Minor numbers of what requests went to, by device and namespace: blocks of two namespaces are not the same ones.
fn minors(trace: &Trace) -> BTreeMap<(u16, u16), u32> {
    let disks: BTreeSet<_> = trace.requests.iter().map(|request| (request.key.device, request.nsid)).collect();
    disks.into_iter().zip(1..).collect()
}

/// A disk's number.
fn number(minor: u32) -> u32 {
    MAJOR << 20 | minor & 0xf_ffff
}

/// Where a request goes, in bytes: offset and length. Nothing where it should have a length and has none: fio gives up at such a record.
fn ranges(trace: &Trace, request: &Request) -> Vec<(u64, u64)> {
    let own = trace.range(request);
    if own.1 > 0 || request.operation.base() == EventOperation::FLUSH {
        return vec![own];
    }
    // Its ranges are in a list, and the volume was asked for one after the other. What one of its parts is asked for later, when the volume has
    // answered, is within nothing, either.
    let volume = request.visits.first().map(|visit| visit.node);
    let is_asked = |visit: &&Visit| visit.within.is_none() && Some(visit.node) == volume && visit.count > 0;
    let asked = request.visits.iter().filter(is_asked);
    let range = |visit: &Visit| {
        let block = u64::from(visit.block);
        (visit.lba.saturating_mul(block), u64::from(visit.count) * block)
    };
    asked.map(range).collect()
}

/// The time of day at the first request, and for each device its name, by its number in the trace; how many records that were.
fn write_notes(trace: &Trace, minors: &BTreeMap<(u16, u16), u32>, out: &mut impl Write) -> io::Result<u32> {
    let mut sequence = 0;
    let mut note = |minor: u32, process: u32, action: u32, data: &[u8]| {
        sequence += 1;
        Record { sequence, action, process, device: number(minor), data, ..Record::default() }.write(out)
    };
    if let Some((begin, minor)) = trace.begin.as_ref().zip(minors.values().next()) {
        let time = begin.unix.saturating_add(trace.span().0.saturating_sub(begin.clock));
        let seconds = u32::try_from(time / 1_000_000_000).unwrap_or(u32::MAX);
        let rest = (time % 1_000_000_000) as u32;
        note(*minor, 0, BEGAN, &[seconds.to_le_bytes(), rest.to_le_bytes()].concat())?;
    }
    for device in trace.devices.values() {
        let Some((_, minor)) = minors.range((device.id, 0)..=(device.id, u16::MAX)).next() else { continue };
        // As much as there is room for before the zero at its end.
        let length = (0..16).rfind(|at| device.name.is_char_boundary(*at)).unwrap_or(0);
        let mut name = [0; 16];
        name[..length].copy_from_slice(&device.name.as_bytes()[..length]);
        note(*minor, u32::from(device.id), NAMED, &name)?;
    }
    Ok(sequence)
}

/// Writes a trace; how many of its requests. Copies, what the kernel has no name for, and what should have blocks and has none are left
/// out.
///
/// # Errors
/// What `out` says.
pub fn write(trace: &Trace, out: &mut impl Write) -> io::Result<usize> {
    let (first, minors) = (trace.span().0, minors(trace));
    let (mut events, mut count) = (Vec::new(), 0);
    for request in &trace.requests {
        let Some(category) = category(request.operation) else { continue };
        let ranges = ranges(trace, request);
        count += usize::from(!ranges.is_empty());
        for range in ranges {
            let mut add =
                |time: u64, action: u32| events.push((time - first.min(time), action | category | FS, range, request));
            add(request.began(), QUEUE | QUEUED);
            add(request.fetched, ISSUE | ISSUED);
            if let Some(completed) = request.completed {
                add(completed, COMPLETE | COMPLETED);
            }
        }
    }
    events.sort_by_key(|(time, action, ..): &(u64, u32, (u64, u64), &Request)| (*time, *action & 0xff));
    let notes = write_notes(trace, &minors, out)?;
    for (sequence, (time, action, (offset, bytes), request)) in (notes + 1..).zip(events) {
        let error = if action & COMPLETED != 0 && request.status != 0 { 5 } else { 0 };
        let Request { key, nsid, .. } = request;
        let (process, device) = (u32::from(key.device), number(minors[&(key.device, *nsid)]));
        let (sector, bytes) = (offset / 512, bytes.min(MOST) as u32);
        Record { sequence, time, sector, bytes, action, process, device, error, data: &[] }.write(out)?;
    }
    Ok(count)
}
