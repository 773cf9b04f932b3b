//! Data pointers: PRPs and SGLs for a command's data, in every form that is allowed.

use millrace_nvme_spec::{
    command::{DataPointer, Psdt, Sqe},
    sgl::SglDescriptor,
};
use zerocopy::IntoBytes;

use crate::{
    choices::Choices,
    guest::{CANARY, Command, Guest},
    memory::PAGE,
};

/// Entries of a page of PRPs.
const ENTRIES: usize = PAGE as usize / 8;
/// Descriptors of a page.
const DESCRIPTORS: usize = PAGE as usize / SglDescriptor::SIZE;

impl Guest {
    /// Gives a command room for `len` bytes, filled with canaries, and points it there. False: there are not enough pages.
    pub(crate) fn lay_out(&mut self, choices: &mut Choices, sqe: &mut Sqe, command: &mut Command, len: u64) -> bool {
        let done = if choices.one_in(3) {
            self.lay_out_sgl(choices, sqe, command, len)
        } else {
            self.lay_out_prps(choices, sqe, command, len)
        };
        done.is_some()
    }

    fn pages(&mut self, choices: &mut Choices, command: &mut Command, count: usize) -> Option<Vec<u64>> {
        let pages = self.memory.take(choices, count)?;
        for &page in &pages {
            self.memory.fill(page, PAGE, CANARY);
        }
        command.pages.extend(&pages);
        Some(pages)
    }

    pub(crate) fn lay_out_prps(
        &mut self,
        choices: &mut Choices,
        sqe: &mut Sqe,
        command: &mut Command,
        len: u64,
    ) -> Option<()> {
        let offset = if choices.one_in(2) { 0 } else { choices.below(PAGE / 4) * 4 };
        let count = (offset + len).div_ceil(PAGE) as usize;
        let pages = self.pages(choices, command, count)?;
        let mut left = len;
        for (i, &page) in pages.iter().enumerate() {
            let skip = if i == 0 { offset } else { 0 };
            let now = left.min(PAGE - skip);
            command.segments.push((page + skip, now as u32));
            left -= now;
        }
        let second = match &pages[1..] {
            // Not used, and so anything.
            [] => choices.nasty64(),
            [only] => *only,
            more => self.prp_lists(choices, command, more)?,
        };
        sqe.dptr = DataPointer::prps(pages[0] + offset, second);
        sqe.flags = sqe.flags.with_psdt(Psdt::PRP);
        Some(())
    }

    /// Lists of PRPs: the first may begin within its page.
    fn prp_lists(&mut self, choices: &mut Choices, command: &mut Command, entries: &[u64]) -> Option<u64> {
        let skip = match choices.below(3) {
            0 => 0,
            1 => choices.below(ENTRIES as u64 - 1) as usize,
            // Only a few entries fit, so that the list goes on elsewhere.
            _ => ENTRIES - 2 - choices.below(3) as usize,
        };
        let first = self.pages(choices, command, 1)?[0] + skip as u64 * 8;
        let (mut at, mut room, mut rest) = (first, ENTRIES - skip, entries);
        while rest.len() > room {
            let (now, later) = rest.split_at(room - 1);
            let next = self.pages(choices, command, 1)?[0];
            self.memory.write(at, now.as_bytes());
            self.memory.write(at + (room as u64 - 1) * 8, next.as_bytes());
            (at, room, rest) = (next, ENTRIES, later);
        }
        self.memory.write(at, rest.as_bytes());
        Some(first)
    }

    fn lay_out_sgl(&mut self, choices: &mut Choices, sqe: &mut Sqe, command: &mut Command, len: u64) -> Option<()> {
        let mut blocks = Vec::new();
        let mut left = len;
        while left > 0 {
            let page = self.pages(choices, command, 1)?[0];
            let now = if choices.one_in(4) { 1 + choices.below(left.min(PAGE)) } else { left.min(PAGE) };
            let at = page + choices.below(PAGE - now + 1);
            command.segments.push((at, now as u32));
            blocks.push(SglDescriptor::data_block(at, now as u32));
            left -= now;
            // Empty blocks are allowed.
            if choices.one_in(16) {
                blocks.push(SglDescriptor::data_block(choices.nasty64(), 0));
            }
        }
        sqe.flags = sqe.flags.with_psdt(if choices.one_in(4) { Psdt::SGL_MPTR_SGL } else { Psdt::SGL_MPTR_CONTIGUOUS });
        let first = match blocks.as_slice() {
            [only] if !choices.one_in(3) => *only,
            all => self.sgl_segments(choices, command, all)?,
        };
        sqe.dptr = DataPointer::from(first);
        Some(())
    }

    /// Puts descriptors into segments; returns the descriptor of the first.
    fn sgl_segments(
        &mut self,
        choices: &mut Choices,
        command: &mut Command,
        blocks: &[SglDescriptor],
    ) -> Option<SglDescriptor> {
        let most = if choices.one_in(2) { DESCRIPTORS } else { 2 + choices.below(4) as usize };
        let page = self.pages(choices, command, 1)?[0];
        // Segments may begin at any 8 bytes.
        let at = if blocks.len() < 100 && most < 100 { page + choices.below(8) * 8 } else { page };
        if blocks.len() <= most {
            self.memory.write(at, blocks.as_bytes());
            return Some(SglDescriptor::last_segment(at, (blocks.len() * SglDescriptor::SIZE) as u32));
        }
        let (now, later) = blocks.split_at(most - 1);
        let next = self.sgl_segments(choices, command, later)?;
        self.memory.write(at, now.as_bytes());
        self.memory.write(at + now.as_bytes().len() as u64, next.as_bytes());
        Some(SglDescriptor::segment(at, (most * SglDescriptor::SIZE) as u32))
    }
}
