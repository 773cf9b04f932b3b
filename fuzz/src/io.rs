//! I/O commands as a guest means them.

use millrace_nvme_spec::{
    command::{Fuse, NamespaceId, Sqe},
    nvm::{
        CopyCdw12, CopyFormat, CopyRange, DatasetManagementCdw10, DatasetManagementCdw11, DatasetRange, ReadWriteCdw12,
        WriteZeroesCdw12,
    },
    opcode::NvmOpcode,
    status::Status,
};
use zerocopy::{FromZeros, IntoBytes};

use crate::{
    choices::Choices,
    contents::{ANYTHING, Tag, UNREADABLE, pattern},
    guest::{Command, Guest, View, What},
};

/// What a disk that fails answers.
const FAULTS: [Status; 3] = [Status::UNRECOVERED_READ_ERROR, Status::WRITE_FAULT, Status::CAPACITY_EXCEEDED];

/// Where a command goes.
pub(crate) struct Target {
    pub(crate) sqid: u16,
    pub(crate) nsid: u32,
    pub(crate) view: View,
    pub(crate) lba: u64,
    pub(crate) count: u64,
    /// Bytes of a block.
    pub(crate) block: u64,
}

impl Target {
    pub(crate) fn bytes(&self) -> u64 {
        self.count * self.block
    }

    /// A command for these blocks.
    pub(crate) fn sqe(&self, opcode: NvmOpcode) -> Sqe {
        let mut sqe = Sqe::new_zeroed();
        sqe.opcode = opcode.0;
        sqe.nsid = NamespaceId(self.nsid);
        sqe.set_cdw10_11(self.lba);
        sqe.cdw12 = ReadWriteCdw12::new().with_nlb_z((self.count - 1) as u16).into_bits();
        sqe
    }
}

impl Guest {
    /// A queue with room for `room` commands, and blocks of an attached namespace.
    pub(crate) fn target(&mut self, choices: &mut Choices, room: u32) -> Option<Target> {
        let sqids: Vec<u16> = self.sqs.iter().filter(|(id, sq)| **id != 0 && sq.room() >= room).map(|(id, _)| *id).collect();
        let nsids: Vec<u32> = self.namespaces.iter().filter(|(_, view)| view.attached).map(|(id, _)| *id).collect();
        if sqids.is_empty() || nsids.is_empty() {
            return None;
        }
        let (sqid, nsid) = (*choices.pick(&sqids), *choices.pick(&nsids));
        let view = self.namespaces[&nsid].clone();
        let block = self.contents.block_size(view.disk) as u64;
        let blocks = self.contents.blocks(view.disk);
        let most = (self.config.max_transfer() / block).min(blocks).min(64);
        let count = if choices.one_in(2) { 1 + choices.below(most.min(8)) } else { 1 + choices.below(most) };
        let lba = if choices.one_in(6) { blocks - count } else { choices.below(blocks - count + 1) };
        Some(Target { sqid, nsid, view, lba, count, block })
    }

    /// Statuses that fit a command on this disk although nothing is wrong with the command.
    pub(crate) fn expect(&self, command: &mut Command, view: &View) {
        command.disks.push(view.disk);
        if self.disks[view.disk].faulty {
            command.faulty = true;
            command.statuses.extend(FAULTS);
        }
    }

    /// A command that changes data: refused where it is not allowed to.
    fn changing(&mut self, target: &Target, tags: &[Tag]) -> Command {
        let mut command = if target.view.read_only {
            Command::new(What::Other).must_fail(Status::NAMESPACE_WRITE_PROTECTED)
        } else {
            let now = self.now();
            Command::new(What::Change(self.contents.begin(now, target.view.disk, target.lba, tags)))
        };
        self.expect(&mut command, &target.view);
        command
    }

    /// Drops a command that could not be laid out.
    fn drop_command(&mut self, command: &Command) {
        if let What::Change(write) = command.what {
            let now = self.now();
            self.contents.end(write, now, false, 0);
        }
        self.memory.give_back(&command.pages);
    }

    fn submit_with_data(
        &mut self,
        choices: &mut Choices,
        target: &Target,
        mut sqe: Sqe,
        mut command: Command,
        data: Option<&[u8]>,
    ) {
        let len = data.map_or(target.bytes(), |data| data.len() as u64);
        if !self.lay_out(choices, &mut sqe, &mut command, len) {
            return self.drop_command(&command);
        }
        if let Some(data) = data {
            self.memory.scatter(&command.segments, data);
        }
        self.push(target.sqid, sqe, command);
    }

    pub(crate) fn read(&mut self, choices: &mut Choices) {
        let Some(target) = self.target(choices, 1) else { return };
        let (disk, lba, count) = (target.view.disk, target.lba, target.count);
        let mut command = Command::new(What::Read { disk, lba, count });
        command.statuses.push(Status::UNRECOVERED_READ_ERROR);
        self.expect(&mut command, &target.view);
        self.submit_with_data(choices, &target, target.sqe(NvmOpcode::READ), command, None);
    }

    pub(crate) fn write(&mut self, choices: &mut Choices) {
        let Some(target) = self.target(choices, 1) else { return };
        let (tags, data) = self.new_data(&target);
        let command = self.changing(&target, &tags);
        let mut sqe = target.sqe(NvmOpcode::WRITE);
        sqe.cdw12 |= ReadWriteCdw12::new().with_fua(choices.one_in(8)).into_bits();
        self.submit_with_data(choices, &target, sqe, command, Some(&data));
    }

    /// Reads every block of a namespace.
    pub(crate) fn read_all(&mut self, choices: &mut Choices, nsid: u32) {
        let view = self.namespaces[&nsid].clone();
        let block = self.contents.block_size(view.disk) as u64;
        let blocks = self.contents.blocks(view.disk);
        let most = (self.config.max_transfer() / block).min(16);
        let sqid = *self.sqs.keys().next_back().expect("a queue");
        for lba in (0..blocks).step_by(most as usize) {
            let (disk, count) = (view.disk, most.min(blocks - lba));
            let target = Target { sqid, nsid, view: view.clone(), lba, count, block };
            let mut command = Command::new(What::Read { disk, lba, count });
            command.statuses.push(Status::UNRECOVERED_READ_ERROR);
            self.expect(&mut command, &view);
            self.submit_with_data(choices, &target, target.sqe(NvmOpcode::READ), command, None);
            if self.sqs[&sqid].room() == 0 || lba % (8 * most) == 0 {
                self.settle();
            }
        }
        self.settle();
    }

    fn new_data(&mut self, target: &Target) -> (Vec<Tag>, Vec<u8>) {
        let tags: Vec<Tag> = (0..target.count).map(|_| self.contents.new_tag()).collect();
        (tags.clone(), data_of(&tags, target.block))
    }

    /// What the blocks may hold, or something else.
    fn guessed(&mut self, choices: &mut Choices, target: &Target) -> Vec<Tag> {
        let wrong = choices.one_in(4).then(|| choices.below(target.count));
        (0..target.count)
            .map(|i| {
                let known = self.contents.possible(target.view.disk, target.lba + i);
                let known = known.into_iter().rev().find(|tag| ![ANYTHING, UNREADABLE].contains(tag));
                known.filter(|_| wrong != Some(i)).unwrap_or_else(|| self.contents.new_tag())
            })
            .collect()
    }

    fn comparing(&mut self, target: &Target, tags: Vec<Tag>) -> Command {
        let mut command = Command::new(What::Compare { disk: target.view.disk, lba: target.lba, tags });
        command.statuses.extend([Status::COMPARE_FAILURE, Status::UNRECOVERED_READ_ERROR]);
        self.expect(&mut command, &target.view);
        command
    }

    pub(crate) fn compare(&mut self, choices: &mut Choices) {
        let Some(target) = self.target(choices, 1) else { return };
        let tags = self.guessed(choices, &target);
        let data = data_of(&tags, target.block);
        let command = self.comparing(&target, tags);
        self.submit_with_data(choices, &target, target.sqe(NvmOpcode::COMPARE), command, Some(&data));
    }

    /// Compare and Write, one behind the other.
    pub(crate) fn compare_and_write(&mut self, choices: &mut Choices) {
        let Some(target) = self.target(choices, 2) else { return };
        let expected = self.guessed(choices, &target);
        let (tags, data) = self.new_data(&target);
        let mut first = self.comparing(&target, expected.clone());
        let mut second = self.changing(&target, &tags);
        if let What::Change(write) = second.what {
            self.contents.follows_compare(write, &expected);
        }
        first.statuses.extend([Status::ABORTED_FAILED_FUSED]);
        first.may_succeed = !target.view.read_only;
        second.statuses.extend([Status::ABORTED_FAILED_FUSED]);
        let cq = self.sqs[&target.sqid].cqid;
        if self.cqs.get(&cq).is_none_or(|cq| cq.entries < 3) {
            // Their completion queue has no room for both.
            (first.may_succeed, second.may_succeed) = (false, false);
            first.statuses = vec![Status::ABORTED_MISSING_FUSED];
            second.statuses = vec![Status::ABORTED_MISSING_FUSED];
        }
        let (mut compare, mut write) = (target.sqe(NvmOpcode::COMPARE), target.sqe(NvmOpcode::WRITE));
        compare.flags = compare.flags.with_fuse(Fuse::FIRST);
        write.flags = write.flags.with_fuse(Fuse::SECOND);
        if !self.lay_out(choices, &mut compare, &mut first, target.bytes())
            || !self.lay_out(choices, &mut write, &mut second, target.bytes())
        {
            self.drop_command(&first);
            return self.drop_command(&second);
        }
        self.memory.scatter(&first.segments, &data_of(&expected, target.block));
        self.memory.scatter(&second.segments, &data);
        self.push(target.sqid, compare, first);
        self.push(target.sqid, write, second);
    }

    pub(crate) fn verify(&mut self, choices: &mut Choices) {
        let Some(target) = self.target(choices, 1) else { return };
        let mut command = Command::new(What::Verify { disk: target.view.disk, lba: target.lba, count: target.count });
        command.statuses.push(Status::UNRECOVERED_READ_ERROR);
        self.expect(&mut command, &target.view);
        self.push(target.sqid, target.sqe(NvmOpcode::VERIFY), command);
    }

    pub(crate) fn flush(&mut self, choices: &mut Choices) {
        let Some(target) = self.target(choices, 1) else { return };
        let mut command = Command::new(What::Other);
        self.expect(&mut command, &target.view);
        let mut sqe = target.sqe(NvmOpcode::FLUSH);
        if choices.one_in(5) {
            sqe.nsid = NamespaceId::BROADCAST;
            // Whatever is attached when it is taken.
            command.disks = (0..64).collect();
            if self.disks.iter().any(|view| view.faulty) {
                command.statuses.extend(FAULTS);
            }
        }
        (sqe.cdw10, sqe.cdw11, sqe.cdw12) = (0, 0, 0);
        self.push(target.sqid, sqe, command);
    }

    pub(crate) fn write_zeroes(&mut self, choices: &mut Choices) {
        let Some(mut target) = self.target(choices, 1) else { return };
        self.lengthen(choices, &mut target);
        let command = self.changing(&target, &vec![0; target.count as usize]);
        let mut sqe = target.sqe(NvmOpcode::WRITE_ZEROES);
        let fields = WriteZeroesCdw12::from_bits(sqe.cdw12);
        sqe.cdw12 = fields.with_deac(choices.one_in(2)).with_fua(choices.one_in(4)).into_bits();
        self.push(target.sqid, sqe, command);
    }

    /// Commands without data may be longer than MDTS.
    fn lengthen(&mut self, choices: &mut Choices, target: &mut Target) {
        if choices.one_in(4) {
            target.count = 1 + choices.below((self.contents.blocks(target.view.disk) - target.lba).min(0x1_0000));
        }
    }

    pub(crate) fn write_uncorrectable(&mut self, choices: &mut Choices) {
        let Some(target) = self.target(choices, 1) else { return };
        let command = self.changing(&target, &vec![UNREADABLE; target.count as usize]);
        self.push(target.sqid, target.sqe(NvmOpcode::WRITE_UNCORRECTABLE), command);
    }

    pub(crate) fn deallocate(&mut self, choices: &mut Choices) {
        let Some(target) = self.target(choices, 1) else { return };
        // One range at a time is one write to the oracle; more ranges repeat it, or are empty.
        let count = 1 + choices.below(3);
        let attributes = choices.byte();
        let ranges: Vec<DatasetRange> = (0..count)
            .map(|i| DatasetRange {
                context_attributes: u32::from(attributes),
                length: if i > 0 && attributes.is_multiple_of(2) { 0 } else { target.count as u32 },
                slba: target.lba,
            })
            .collect();
        let deallocates = !choices.one_in(5);
        let command = if deallocates {
            self.changing(&target, &vec![0; target.count as usize])
        } else {
            let mut command = Command::new(What::Other);
            self.expect(&mut command, &target.view);
            command
        };
        let mut sqe = target.sqe(NvmOpcode::DATASET_MANAGEMENT);
        sqe.cdw10 = DatasetManagementCdw10::new().with_nr_z(count as u8 - 1).into_bits();
        sqe.cdw11 = DatasetManagementCdw11::new().with_ad(deallocates).into_bits();
        sqe.cdw12 = 0;
        self.submit_with_data(choices, &target, sqe, command, Some(ranges.as_bytes()));
    }

    /// Namespaces and disks that can be copied to the target.
    fn copy_sources(&self, target: &Target) -> Vec<(u32, usize)> {
        let block = self.contents.block_size(target.view.disk);
        let fits = |view: &View| view.attached && self.contents.block_size(view.disk) == block;
        self.namespaces.iter().filter(|(_, view)| fits(view)).map(|(nsid, view)| (*nsid, view.disk)).collect()
    }

    pub(crate) fn copy(&mut self, choices: &mut Choices) {
        let Some(target) = self.target(choices, 1) else { return };
        let disk = target.view.disk;
        let mut left = target.count;
        let (mut sources, mut ranges) = (Vec::new(), Vec::new());
        let across = self.copies_across && choices.one_in(2);
        let namespaces = self.copy_sources(&target);
        while left > 0 {
            let (nsid, disk) = if across { *choices.pick(&namespaces) } else { (0, disk) };
            let count = (1 + choices.below(left)).min(self.contents.blocks(disk));
            let lba = choices.below(self.contents.blocks(disk) - count + 1);
            sources.push((disk, lba, count));
            ranges.push(CopyRange::new(NamespaceId(nsid), lba, (count - 1) as u16));
            left -= count;
        }
        let (first, end) = (target.lba, target.lba + target.count);
        let overlaps = sources.iter().any(|&(from, lba, count)| from == disk && lba < end && first < lba + count);
        let mut command = match (target.view.read_only, overlaps) {
            (true, _) => Command::new(What::Other).must_fail(Status::NAMESPACE_WRITE_PROTECTED),
            (false, true) => Command::new(What::Other).must_fail(Status::OVERLAPPING_IO_RANGE),
            (false, false) => {
                let now = self.now();
                Command::new(What::Change(self.contents.begin_copy(now, disk, target.lba, &sources)))
            }
        };
        if ranges.len() > 128 {
            self.drop_command(&command);
            return;
        }
        command.statuses.push(Status::UNRECOVERED_READ_ERROR);
        self.expect(&mut command, &target.view);
        for (_, source) in namespaces.iter().filter(|_| across) {
            let view = View { disk: *source, ..target.view.clone() };
            self.expect(&mut command, &view);
        }
        let mut sqe = target.sqe(NvmOpcode::COPY);
        let format = if across { CopyFormat::NSID_SLBA_32 } else { CopyFormat::SLBA_32 };
        let fields = CopyCdw12::new().with_nr_z((ranges.len() - 1) as u8).with_format(format);
        sqe.cdw12 = fields.with_fua(choices.one_in(4)).into_bits();
        self.submit_with_data(choices, &target, sqe, command, Some(ranges.as_bytes()));
    }
}

fn data_of(tags: &[Tag], block: u64) -> Vec<u8> {
    let mut data = Vec::with_capacity(tags.len() * block as usize);
    for &tag in tags {
        pattern(tag, block as usize, &mut data);
    }
    data
}
