//! Commands, doorbells, registers and memory as no good guest has them.

use millrace_nvme_spec::{
    command::{DataPointer, Fuse, NamespaceId, Psdt},
    nvm::ReadWriteCdw12,
    opcode::NvmOpcode,
    registers::offset,
    sgl::{SglDescriptor, SglIdentifier, SglSubtype, SglType},
    status::Status,
};
use millrace_vfio_user::codec::{Command as Message, wire};
use zerocopy::IntoBytes;

use crate::{
    choices::Choices,
    guest::{CANARY, Command, Guest, What, note},
    io::Target,
    memory::{LARGE, NOWHERE, PAGE, READ_ONLY},
    queues::Reset,
};

impl Guest {
    fn refused(&self, target: &Target, status: Status) -> Command {
        let mut command = Command::new(What::Other).must_fail(status);
        self.expect(&mut command, &target.view);
        command
    }

    /// A command whose fields are wrong.
    pub(crate) fn bad_command(&mut self, choices: &mut Choices) {
        let Some(mut target) = self.target(choices, 1) else { return };
        let opcode = *choices.pick(&[NvmOpcode::READ, NvmOpcode::COMPARE, NvmOpcode::VERIFY]);
        let blocks = self.contents.blocks(target.view.disk);
        let mut sqe = target.sqe(opcode);
        let status = match choices.below(7) {
            0 => {
                target.lba = blocks - choices.below(target.count);
                Status::LBA_OUT_OF_RANGE
            }
            1 => {
                target.lba = choices.nasty64().max(blocks);
                Status::LBA_OUT_OF_RANGE
            }
            2 => {
                target.nsid = if choices.one_in(2) { 0 } else { self.config.namespaces + 1 + choices.below(1 << 30) as u32 };
                Status::INVALID_NAMESPACE_OR_FORMAT
            }
            3 => {
                let Some(free) = (1..=self.config.namespaces).find(|nsid| !self.namespaces.contains_key(nsid)) else {
                    return;
                };
                target.nsid = if choices.one_in(2) { NamespaceId::BROADCAST.0 } else { free };
                Status::INVALID_FIELD
            }
            4 => {
                sqe.opcode = *choices.pick(&[0x03, 0x06, 0x07, 0x0a, 0x10, 0x1d, 0x79, 0x7f, 0x80, 0xc1, 0xff]);
                Status::INVALID_OPCODE
            }
            5 if opcode != NvmOpcode::VERIFY => return self.too_large(choices, &target, opcode),
            _ => {
                sqe.flags = sqe.flags.with_fuse(Fuse(3));
                Status::INVALID_FIELD
            }
        };
        sqe.set_cdw10_11(target.lba);
        sqe.dptr = DataPointer::prps(NOWHERE, NOWHERE);
        let mut command = self.refused(&target, status);
        if sqe.nsid.0 != target.nsid {
            command.disks.clear();
            sqe.nsid = NamespaceId(target.nsid);
        }
        self.push(target.sqid, sqe, command);
    }

    /// More than MDTS.
    fn too_large(&mut self, choices: &mut Choices, target: &Target, opcode: NvmOpcode) {
        let count = self.config.max_transfer() / target.block + 1 + choices.below(64);
        let mut sqe = target.sqe(opcode);
        sqe.cdw12 = ReadWriteCdw12::new().with_nlb_z((count - 1) as u16).into_bits();
        let mut command = self.refused(target, Status::INVALID_FIELD);
        if target.lba + count > self.contents.blocks(target.view.disk) {
            command = self.refused(target, Status::LBA_OUT_OF_RANGE);
        }
        sqe.dptr = DataPointer::prps(NOWHERE, NOWHERE);
        self.push(target.sqid, sqe, command);
    }

    /// A read whose PRPs are wrong.
    pub(crate) fn bad_prps(&mut self, choices: &mut Choices) {
        let Some(target) = self.target(choices, 1) else { return };
        let Some(pages) = self.memory.take(choices, 4) else { return };
        for &page in &pages {
            self.memory.fill(page, PAGE, CANARY);
        }
        let pages_needed = target.bytes().div_ceil(PAGE);
        let nowhere = *choices.pick(&[NOWHERE, !(PAGE - 1), 1 << 63, READ_ONLY]);
        let (first, second, status) = match choices.below(6) {
            0 => (pages[0] + 1 + choices.below(3), pages[1], Status::PRP_OFFSET_INVALID),
            1 => (nowhere, pages[1], Status::DATA_TRANSFER_ERROR),
            2 if pages_needed == 2 => (pages[0], pages[1] + 8, Status::PRP_OFFSET_INVALID),
            2 if pages_needed > 2 => (pages[0], pages[1] + 4, Status::PRP_OFFSET_INVALID),
            3 if pages_needed >= 2 && nowhere != READ_ONLY => (pages[0], nowhere, Status::DATA_TRANSFER_ERROR),
            // Entries with offsets: canaries are.
            4 if pages_needed > 2 => (pages[0], pages[1], Status::PRP_OFFSET_INVALID),
            5 if pages_needed > 2 => {
                // A list of itself, and its continuation is itself where the list ends.
                let entries = vec![pages[1]; 512];
                self.memory.write(pages[1], entries.as_bytes());
                let start = if choices.one_in(2) { 0 } else { 510 * 8 };
                (pages[0], pages[1] + start, Status::SUCCESS)
            }
            _ => return self.memory.give_back(&pages),
        };
        let mut command = self.refused(&target, status);
        if status.is_success() {
            command.may_succeed = true;
        }
        // Marked blocks may be noticed as well.
        command.statuses.push(Status::UNRECOVERED_READ_ERROR);
        command.pages = pages;
        let mut sqe = target.sqe(NvmOpcode::READ);
        sqe.dptr = DataPointer::prps(first, second);
        self.push(target.sqid, sqe, command);
    }

    /// A read whose SGL is wrong.
    pub(crate) fn bad_sgl(&mut self, choices: &mut Choices) {
        let Some(target) = self.target(choices, 1) else { return };
        let Some(pages) = self.memory.take(choices, 2) else { return };
        let (page, len) = (pages[0], target.bytes() as u32);
        let typed = |kind, subtype| SglDescriptor {
            identifier: SglIdentifier::new().with_kind(kind).with_subtype(subtype),
            ..SglDescriptor::data_block(page, len)
        };
        let (descriptor, status) = match choices.below(11) {
            0 => (typed(SglType(5 + choices.below(11) as u8), SglSubtype::ADDRESS), Status::SGL_DESCRIPTOR_TYPE_INVALID),
            1 => (typed(SglType::DATA_BLOCK, SglSubtype(1 + choices.below(15) as u8)), Status::SGL_DESCRIPTOR_TYPE_INVALID),
            2 => (SglDescriptor::bit_bucket(len), Status::SGL_DESCRIPTOR_TYPE_INVALID),
            3 => (
                SglDescriptor::data_block(page, len.wrapping_add(1 + choices.below(100) as u32)),
                Status::DATA_SGL_LENGTH_INVALID,
            ),
            4 => (SglDescriptor::data_block(page, 0), Status::DATA_SGL_LENGTH_INVALID),
            5 => (SglDescriptor::data_block(NOWHERE, len), Status::DATA_TRANSFER_ERROR),
            6 => (SglDescriptor::data_block(u64::MAX - 3, len), Status::DATA_TRANSFER_ERROR),
            7 => (SglDescriptor::segment(page, 16 * choices.below(2) as u32 + 8), Status::INVALID_SGL_SEGMENT_DESCRIPTOR),
            8 => (SglDescriptor::last_segment(page, 0), Status::INVALID_SGL_SEGMENT_DESCRIPTOR),
            9 => {
                // A segment that leads to itself.
                let itself = SglDescriptor::segment(page, 16);
                self.memory.write(page, itself.as_bytes());
                (itself, Status::INVALID_NUMBER_OF_SGL_DESCRIPTORS)
            }
            _ => {
                // A last segment that is not.
                let more = SglDescriptor::last_segment(pages[1], 16);
                self.memory.write(page, more.as_bytes());
                (SglDescriptor::last_segment(page, 16), Status::INVALID_SGL_SEGMENT_DESCRIPTOR)
            }
        };
        let mut command = self.refused(&target, status);
        command.pages = pages;
        let mut sqe = target.sqe(NvmOpcode::READ);
        sqe.flags = sqe.flags.with_psdt(Psdt::SGL_MPTR_CONTIGUOUS);
        sqe.dptr = DataPointer::from(descriptor);
        self.push(target.sqid, sqe, command);
    }

    /// One half of a pair, without the other.
    pub(crate) fn lonely_half(&mut self, choices: &mut Choices) {
        let Some(target) = self.target(choices, 1) else { return };
        let mut command = self.refused(&target, Status::ABORTED_MISSING_FUSED);
        // Two lonely halves may meet.
        command.statuses.extend([Status::ABORTED_FAILED_FUSED, Status::INVALID_FIELD]);
        let mut sqe = target.sqe(NvmOpcode::FLUSH);
        sqe.flags = sqe.flags.with_fuse(if choices.one_in(2) { Fuse::FIRST } else { Fuse::SECOND });
        self.push(target.sqid, sqe, command);
    }

    /// A command with the identifier of another one that is under way.
    pub(crate) fn same_identifier(&mut self, choices: &mut Choices) {
        let Some(target) = self.target(choices, 1) else { return };
        let once = self.sqs[&target.sqid].pending.iter().filter(|(_, pending)| pending.commands.len() == 1);
        let cids: Vec<u16> = once.map(|(cid, _)| *cid).collect();
        if cids.is_empty() {
            return;
        }
        let mut command = Command::new(What::Other);
        command.statuses.push(Status::CID_CONFLICT);
        self.expect(&mut command, &target.view);
        let mut sqe = target.sqe(NvmOpcode::FLUSH);
        (sqe.cdw10, sqe.cdw11, sqe.cdw12) = (0, 0, 0);
        sqe.cid.0 = *choices.pick(&cids);
        command.start = self.now();
        self.push_as_is(target.sqid, &sqe, command);
    }

    // ---- doorbells --------------------------------------------------------------------------------------------------

    /// A doorbell of a queue that is not there, or a value beyond its queue.
    pub(crate) fn bad_doorbell(&mut self, choices: &mut Choices) {
        if self.wire.is_none() {
            return;
        }
        let sqids: Vec<u16> = self.sqs.keys().copied().collect();
        if choices.one_in(2) || sqids.is_empty() {
            let index = choices.below(1024);
            let (qid, completion) = ((index / 2) as u16, index % 2 == 1);
            let there = if completion { self.cqs.contains_key(&qid) } else { self.sqs.contains_key(&qid) };
            if !there {
                self.raw_doorbell(index, choices.nasty32());
            }
            return;
        }
        let sqid = *choices.pick(&sqids);
        let (entries, rung) = (self.sqs[&sqid].entries, self.sqs[&sqid].rung);
        self.doorbell(u64::from(sqid) * 2, choices.nasty32().max(entries));
        let turns = choices.below(4);
        self.turns(turns);
        self.doorbell(u64::from(sqid) * 2, rung);
        if self.shadow && sqid != 0 {
            self.raw_doorbell(u64::from(sqid) * 2, rung);
        }
    }

    // ---- registers --------------------------------------------------------------------------------------------------

    /// Reads and writes that change nothing.
    pub(crate) fn harmless_registers(&mut self, choices: &mut Choices) {
        if self.wire.is_none() {
            return;
        }
        let at = choices.below(0x1000 - 8);
        let len = 1 + choices.below(8) as u32;
        self.read_region(0, at, len);
        let region = *choices.pick(&[4, 7]);
        let at = choices.below(200);
        self.read_region(region, at, len.min(4));
        let value = choices.nasty32();
        let at = *choices.pick(&[offset::INTMS, offset::INTMC, offset::CSTS, offset::CAP, offset::VS, 0x50, 0xff0]);
        self.write_bar0(at, value.as_bytes());
        // Odd widths and places.
        let at = choices.below(0x30);
        if !(offset::CC..offset::CC + 4).contains(&at) && !(offset::NSSR..offset::NSSR + 4).contains(&at) {
            let bytes = choices.number().to_le_bytes();
            let len = *choices.pick(&[1, 2, 3, 5, 7]);
            self.write_bar0(at, &bytes[..len]);
        }
    }

    /// Registers are written at random; whatever follows, a reset mends it.
    pub(crate) fn register_chaos(&mut self, choices: &mut Choices) {
        if self.wire.is_none() {
            return;
        }
        self.lose("registers were written at random");
        for _ in 0..=choices.below(6) {
            let at = *choices.pick(&[
                offset::CC,
                offset::CC,
                offset::CC,
                offset::AQA,
                offset::ASQ,
                offset::ACQ,
                offset::NSSR,
                offset::INTMS,
                offset::CSTS,
            ]);
            let value = match choices.below(5) {
                0 => choices.nasty32(),
                1 => 4 << 20 | 6 << 16 | 1,
                2 => 4 << 20 | 6 << 16 | 1 | 1 << 14,
                3 => 0,
                _ => 1 | choices.number() as u32,
            };
            note!(self, "  writes register {at:x} = {value:x}");
            if choices.one_in(4) && at.is_multiple_of(8) {
                self.write_bar0(at, choices.nasty64().as_bytes());
            } else {
                self.write_bar0(at, value.as_bytes());
            }
            let turns = choices.below(6);
            self.turns(turns);
        }
    }

    /// Shuts the controller down, as a guest does before it goes.
    pub(crate) fn shut_down(&mut self, choices: &mut Choices) {
        if self.wire.is_none() || !self.is_ready() {
            return;
        }
        self.lose("the controller is shut down");
        let cc = self.read32(offset::CC) & !(3 << 14);
        self.write_bar0(offset::CC, (cc | (1 + choices.below(2) as u32) << 14).as_bytes());
        self.wait("the shutdown is complete", |guest| (guest.read32(offset::CSTS) >> 2 & 3 == 2).then_some(()));
    }

    // ---- memory -----------------------------------------------------------------------------------------------------

    /// Takes memory away while commands use it, or gives it back.
    pub(crate) fn unmap(&mut self, choices: &mut Choices) {
        if self.wire.is_none() {
            return;
        }
        let index = 1 + choices.below(self.memory.regions.len() as u64 - 1) as usize;
        let region = self.memory.regions[index].clone();
        if !region.mapped {
            return self.map(index);
        }
        self.each_pending(|command, _| {
            if command.pages.iter().any(|&page| region.holds(page)) {
                command.statuses.push(Status::DATA_TRANSFER_ERROR);
            }
        });
        note!(self, "  unmaps {:x} and {:x} bytes", region.at, region.size);
        let unmap = wire::DmaUnmap { argsz: 24, flags: 0, address: region.at, size: region.size };
        self.demand(Message::DmaUnmap, &[unmap.as_bytes()], &[]);
        self.memory.regions[index].mapped = false;
        if choices.one_in(2) {
            self.map(index);
        }
    }

    /// Takes the memory of the queues away.
    pub(crate) fn unmap_queues(&mut self, choices: &mut Choices) {
        if self.wire.is_none() {
            return;
        }
        self.lose("the queues' memory is gone");
        let all = choices.one_in(3);
        let (address, size) = if all { (0, 0) } else { (self.memory.regions[0].at, self.memory.regions[0].size) };
        let flags = if all { wire::UNMAP_ALL } else { 0 };
        if !all && !self.memory.regions[0].mapped {
            return;
        }
        self.demand(Message::DmaUnmap, &[wire::DmaUnmap { argsz: 24, flags, address, size }.as_bytes()], &[]);
        for (index, region) in self.memory.regions.iter_mut().enumerate() {
            region.mapped &= !all && index != 0;
        }
        let turns = choices.below(20);
        self.turns(turns);
    }

    /// Truncates a file that the device has mapped, under commands that use it.
    pub(crate) fn truncate(&mut self, choices: &mut Choices) {
        if self.wire.is_none() {
            return;
        }
        self.lose("the guest's memory was truncated");
        self.each_pending(|command, contents| {
            if command.pages.iter().any(|&page| page >= LARGE)
                && let What::Change(write) = command.what
            {
                contents.spoil(write);
            }
        });
        let len = choices.below(300) * PAGE;
        note!(self, "  truncates memory to {len:x} bytes");
        self.memory.files[2].set_len(len).expect("a file can be truncated");
        let turns = choices.below(30);
        self.turns(turns);
        self.wire = None;
        self.turns(2);
        self.memory.files[2].set_len(2 << 20).expect("room for the guest");
    }

    /// Any reset at any moment.
    pub(crate) fn any_reset(&mut self, choices: &mut Choices) {
        let how = *choices.pick(&Reset::ALL);
        self.recover(how);
    }
}
