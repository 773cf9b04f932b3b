//! A command from its entry to what a disk gets: decoding, and data pointers (Base 4.1.1) through a function's table.

use millrace_functions::{Command, opcode};
use millrace_nvme_spec::{
    command::{CommandFlags, Sqe},
    prp::{PrpEntry, entries_in_list},
    status::Status,
};
use zerocopy::IntoBytes;

use crate::{Around, map, map::PageRow};

/// Bytes of a memory page; the engine knows no other (CAP.MPSMAX is 0).
const PAGE_SIZE: u64 = 4096;
/// Entries of a translated list.
pub(super) const LIST_ENTRIES: usize = map::chip::LIST as usize / 8;

/// What is wrong with an entry before anything is looked up.
pub(super) fn check(sqe: &Sqe) -> Result<(), Status> {
    let known = [opcode::FLUSH, opcode::WRITE, opcode::READ, opcode::COMPARE, opcode::WRITE_ZEROES];
    if !known.contains(&sqe.opcode) {
        return Err(Status::INVALID_OPCODE.do_not_retry());
    }
    // Neither fused operations nor SGLs.
    if sqe.flags.with_reserved(0) != CommandFlags::new() {
        return Err(Status::INVALID_FIELD.do_not_retry());
    }
    Ok(())
}

/// Bit of CDW12: the whole namespace (Write Zeroes).
const NSZ: u32 = 1 << 23;
/// Bits of CDW12 that a disk is given: NLB, FUA, LR; of Write Zeroes DEAC too.
const NLB_FUA_LR: u32 = 0xc000_ffff;
const FUA: u32 = 1 << 30;
const DEAC: u32 = 1 << 25;

/// Blocks, 0's based.
fn nlb_z(sqe: &Sqe) -> u16 {
    sqe.cdw12 as u16
}

/// The command as the storage functions see it.
pub(super) fn for_functions(sqe: &Sqe, function: u8, queue: u8, now: u64) -> Command {
    Command {
        slba: sqe.cdw10_11(),
        nsid: sqe.nsid.0,
        now: (now / map::CYCLES_PER_UNIT) as u32,
        nlb_z: nlb_z(sqe),
        opcode: sqe.opcode,
        function,
        queue,
    }
}

/// Host pages of a command's data.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Data {
    pub(super) first: u64,
    /// Those after the first: one goes into PRP2 itself, more into a list.
    pub(super) rest: Vec<u64>,
}

/// A function's memory.
pub(super) struct Memory<'a> {
    pub(super) rows: &'a [PageRow],
    pub(super) around: &'a mut dyn Around,
}

impl Memory<'_> {
    /// The host address of a guest's.
    fn translate(&self, address: u64, write: bool) -> Result<u64, Status> {
        let row = usize::try_from(address / map::PAGE).ok().and_then(|page| self.rows.get(page));
        let row = row.filter(|row| row.present() && (!write || row.writable()));
        row.map(|row| row.address() + address % map::PAGE).ok_or(Status::DATA_TRANSFER_ERROR.do_not_retry())
    }

    fn read_entry(&mut self, address: u64) -> Result<PrpEntry, Status> {
        let mut entry = [0; 8];
        let address = self.translate(address, false)?;
        self.around.read_host(address, &mut entry).map_err(|_| Status::DATA_TRANSFER_ERROR.do_not_retry())?;
        Ok(PrpEntry(u64::from_le_bytes(entry)))
    }

    /// What is wrong with a command as far as it can be told without its lists. The storage functions' refusals come first.
    pub(super) fn check(&self, sqe: &Sqe, block_log2: u32) -> Result<(), Status> {
        if sqe.opcode == opcode::WRITE_ZEROES && sqe.cdw12 & NSZ != 0 {
            return Err(Status::INVALID_FIELD.do_not_retry());
        }
        self.pages(sqe, block_log2).map(|_| ())
    }

    /// The first page's host address, the second's if there are two, and how many pages are in a list.
    fn pages(&self, sqe: &Sqe, block_log2: u32) -> Result<(u64, Option<u64>, u64), Status> {
        if !moves_data(sqe) {
            return Ok((0, None, 0));
        }
        let (write, len) = (sqe.opcode == opcode::READ, (u64::from(nlb_z(sqe)) + 1) << block_log2);
        let offset = Status::PRP_OFFSET_INVALID.do_not_retry();
        let (first, second) = (PrpEntry(sqe.dptr.prp1), PrpEntry(sqe.dptr.prp2));
        if !first.is_dword_aligned() {
            return Err(offset);
        }
        let page = self.translate(first.0, write)?;
        let left = len.saturating_sub(PAGE_SIZE - first.offset(PAGE_SIZE));
        match left.div_ceil(PAGE_SIZE) {
            0 => Ok((page, None, 0)),
            1 if second.offset(PAGE_SIZE) != 0 => Err(offset),
            1 => Ok((page, Some(self.translate(second.0, write)?), 0)),
            _ if !second.0.is_multiple_of(PrpEntry::SIZE as u64) => Err(offset),
            pages => Ok((page, None, pages)),
        }
    }

    /// The host pages of a command's data.
    pub(super) fn data(&mut self, sqe: &Sqe, block_log2: u32) -> Result<Data, Status> {
        let (first, second, pages) = self.pages(sqe, block_log2)?;
        let mut rest: Vec<u64> = second.into_iter().collect();
        if pages > 0 {
            self.lists(PrpEntry(sqe.dptr.prp2), pages, sqe.opcode == opcode::READ, &mut rest)?;
        }
        Ok(Data { first, rest })
    }

    /// Follows the lists. Every list after the first has a page of entries, so that each takes us further.
    fn lists(&mut self, first: PrpEntry, pages: u64, write: bool, out: &mut Vec<u64>) -> Result<(), Status> {
        let offset = Status::PRP_OFFSET_INVALID.do_not_retry();
        let (mut list, mut left) = (first, pages);
        while left > 0 {
            let room = entries_in_list(list.offset(PAGE_SIZE), PAGE_SIZE);
            let here = if left > room { room - 1 } else { left };
            for at in 0..here {
                let entry = self.read_entry(list.0 + at * 8)?;
                if entry.offset(PAGE_SIZE) != 0 {
                    return Err(offset);
                }
                out.push(self.translate(entry.0, write)?);
            }
            left -= here;
            if left > 0 {
                list = self.read_entry(list.0 + here * 8)?;
                if list.offset(PAGE_SIZE) != 0 {
                    return Err(offset);
                }
            }
        }
        Ok(())
    }
}

fn moves_data(sqe: &Sqe) -> bool {
    matches!(sqe.opcode, opcode::READ | opcode::WRITE | opcode::COMPARE)
}

/// The entry that a disk gets.
pub(super) fn for_disk(sqe: &Sqe, slot: u16, lba: u64, prp: (u64, u64), durable: bool) -> [u8; 64] {
    let cdw12 = match sqe.opcode {
        opcode::FLUSH => 0,
        opcode::WRITE_ZEROES => sqe.cdw12 & (NLB_FUA_LR | DEAC),
        _ => sqe.cdw12 & NLB_FUA_LR,
    };
    let writes = matches!(sqe.opcode, opcode::WRITE | opcode::WRITE_ZEROES);
    let fua = if durable && writes { FUA } else { 0 };
    let mut entry = Sqe { opcode: sqe.opcode, cdw12: cdw12 | fua, ..Sqe::default() };
    entry.cid.0 = slot;
    entry.nsid.0 = 1;
    (entry.dptr.prp1, entry.dptr.prp2) = prp;
    entry.set_cdw10_11(lba);
    let mut bytes = [0; 64];
    bytes.copy_from_slice(entry.as_bytes());
    bytes
}
