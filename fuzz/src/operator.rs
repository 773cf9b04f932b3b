//! The operator changes things while the guest runs.

use std::sync::Arc;

use millrace_block::{BlockCount, BlockSize};
use millrace_nvme_spec::status::Status;

use crate::{
    choices::Choices,
    guest::{DiskView, Guest, View, note},
    world::Disk,
};

impl Guest {
    /// A new disk that is not attached yet.
    pub(crate) fn add_disk(&mut self, blocks: u64, block_size: BlockSize) -> usize {
        let name = format!("disk-{}", self.disks.len());
        let disk = Disk::create(&name, blocks, block_size, self.disks.len() as u64);
        self.contents.add_disk(block_size.bytes() as usize, blocks);
        self.disks.push(DiskView { name, disk, faulty: false });
        self.disks.len() - 1
    }

    pub(crate) fn attach_disk(&mut self, disk: usize, read_only: bool) {
        let namespace = Arc::clone(&self.disks[disk].disk.namespace);
        let nsid = self.world.device(|device| device.attach(None, namespace, read_only)).expect("a free identifier");
        note!(self, "  operator attaches disk {disk} as namespace {nsid}, read-only: {read_only}");
        self.namespaces.insert(nsid, View { disk, attached: true, by_guest: false, read_only });
    }

    /// Takes a namespace away, or attaches a disk that has none.
    pub(crate) fn attach_or_detach_by_operator(&mut self, choices: &mut Choices) {
        let nsids: Vec<u32> = self.namespaces.keys().copied().collect();
        let away: Vec<usize> =
            (0..self.disks.len()).filter(|&disk| self.namespaces.values().all(|view| view.disk != disk)).collect();
        if away.is_empty() || !nsids.is_empty() && choices.one_in(2) {
            if let Some(&nsid) = nsids.get(choices.below(nsids.len().max(1) as u64) as usize) {
                note!(self, "  operator detaches namespace {nsid}");
                self.namespace_leaves(nsid);
                self.world.device(|device| device.detach(nsid)).expect("it is there");
                self.namespaces.remove(&nsid);
            }
            return;
        }
        // Commands that still name the identifier must not find another disk there.
        self.settle();
        let disk = *choices.pick(&away);
        self.attach_disk(disk, choices.one_in(6));
    }

    pub(crate) fn resize(&mut self, choices: &mut Choices) {
        let nsids: Vec<u32> = self.namespaces.keys().copied().collect();
        if nsids.is_empty() {
            return;
        }
        let nsid = *choices.pick(&nsids);
        let disk = self.namespaces[&nsid].disk;
        let blocks = 8 + choices.below(600);
        note!(self, "  operator resizes disk {disk} from {} to {blocks} blocks", self.contents.blocks(disk));
        self.disks[disk].disk.namespace.resize(BlockCount(blocks)).expect("any size will do");
        let now = self.now();
        self.contents.resize(disk, blocks, now);
        self.each_pending(|command, _| {
            if command.disks.contains(&disk) {
                command.statuses.push(Status::LBA_OUT_OF_RANGE);
                // What was wrong with it may not be wrong any more, and then other things are.
                command.any_status |= !command.may_succeed;
                (command.unverified, command.may_succeed) = (true, true);
            }
        });
        self.world.device(|device| device.namespace_changed(nsid));
    }

    /// A disk becomes slow, fast, stuck, bad or well.
    pub(crate) fn change_disk(&mut self, choices: &mut Choices) {
        let index = choices.below(self.disks.len() as u64) as usize;
        let view = &mut self.disks[index];
        match choices.below(6) {
            0 => view.disk.set_lag(0),
            1 | 2 => view.disk.set_lag(1 + choices.below(20)),
            3 => view.disk.hold(true),
            4 => {
                view.disk.go_bad(1 + choices.below(8));
                view.faulty = true;
                self.each_pending(|command, _| {
                    if command.disks.contains(&index) {
                        command.any_status = true;
                    }
                });
            }
            _ => {
                // Commands under way may still be struck by what they have met.
                view.disk.get_well();
                view.faulty = false;
            }
        }
    }

    /// Every disk is well and fast again.
    pub(crate) fn heal(&mut self) {
        for view in &mut self.disks {
            view.disk.get_well();
            view.disk.set_lag(0);
            view.disk.hold(false);
            view.faulty = false;
        }
    }
}
