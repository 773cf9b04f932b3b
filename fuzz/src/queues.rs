//! From a socket to a controller with queues, and back by every kind of reset.

use std::fs::File;

use millrace_nvme_spec::{
    admin::{CreateCqCdw11, CreateQueueCdw10, CreateSqCdw11, DeleteQueueCdw10},
    command::{Cqe, DataPointer, NamespaceId, QueueId, Sqe},
    opcode::AdminOpcode,
    registers::{NSSR_RESET, offset},
    status::Status,
};
use millrace_vfio_user::{
    codec::{Command as Message, wire},
    pci,
};
use zerocopy::{FromZeros, IntoBytes};

use crate::{
    choices::Choices,
    guest::{ADMIN_CQ, ADMIN_SQ, Command, Cq, DiskView, Guest, Sq, View, What, cq_base, note, sq_base},
    wire::{Reply, Wire, message},
};

/// I/O queue pairs that the guest uses.
pub(crate) const QUEUES: u16 = 4;
const ADMIN_ENTRIES: u32 = 32;
/// High byte of Device Control in configuration space; its top bit is Initiate Function Level Reset.
const DEVICE_CONTROL_HIGH: u64 = 0x69;

/// The ways to start anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reset {
    Disable,
    Subsystem,
    Function,
    Message,
    Reconnect,
}

impl Reset {
    pub(crate) const ALL: [Self; 5] = [Self::Disable, Self::Subsystem, Self::Function, Self::Message, Self::Reconnect];
}

impl Guest {
    // ---- messages ---------------------------------------------------------------------------------------------------

    /// Sends a request and waits for its reply; `None`: the server has hung up.
    pub(crate) fn call(&mut self, command: Message, parts: &[&[u8]], fds: &[&File]) -> Option<Reply> {
        let wire = self.wire.as_mut()?;
        let header = wire.header(command, parts.iter().map(|part| part.len()).sum(), false);
        let bytes = message(&header, parts);
        self.send(&bytes, fds)?;
        self.receive("a reply").inspect(|reply| {
            assert_eq!((reply.header.id, reply.header.command), (header.id, header.command), "another request's reply");
        })
    }

    /// Sends bytes, whatever they mean.
    pub(crate) fn send(&mut self, bytes: &[u8], fds: &[&File]) -> Option<()> {
        let mut fds: Vec<_> = fds.iter().map(std::os::fd::AsFd::as_fd).collect();
        let mut sent = 0;
        self.wait("the server takes a message", |guest| {
            let wire = guest.wire.as_ref()?;
            match wire.send(&bytes[sent..], &fds) {
                Ok(now) => {
                    sent += now;
                    if now > 0 {
                        fds.clear();
                    }
                    (sent == bytes.len()).then_some(Some(()))
                }
                Err(_) => Some(None),
            }
        })
        .or_else(|| self.hung_up())
    }

    /// Waits for the next message of the server.
    pub(crate) fn receive(&mut self, what: &str) -> Option<Reply> {
        self.wait(what, |guest| match guest.wire.as_mut().map(Wire::receive) {
            Some(Ok(None)) => None,
            Some(Ok(Some(reply))) => Some(Some(reply)),
            Some(Err(_)) | None => Some(None),
        })
        .or_else(|| self.hung_up())
    }

    fn hung_up<T>(&mut self) -> Option<T> {
        self.wire = None;
        self.lose("the server has hung up");
        None
    }

    /// A request that must succeed.
    pub(crate) fn demand(&mut self, command: Message, parts: &[&[u8]], fds: &[&File]) -> Reply {
        let reply = self.call(command, parts, fds).unwrap_or_else(|| panic!("the server hung up on {command:?}"));
        assert_eq!(reply.errno(), None, "{command:?} was refused");
        reply
    }

    pub(crate) fn write_region(&mut self, region: u32, offset: u64, data: &[u8]) {
        let access = wire::RegionAccess { offset, region, count: data.len() as u32 };
        self.demand(Message::RegionWrite, &[access.as_bytes(), data], &[]);
    }

    pub(crate) fn read_region(&mut self, region: u32, offset: u64, len: u32) -> Vec<u8> {
        let access = wire::RegionAccess { offset, region, count: len };
        let reply = self.demand(Message::RegionRead, &[access.as_bytes()], &[]);
        assert_eq!(reply.payload.len(), 16 + len as usize, "a read of {len} bytes");
        reply.payload[16..].to_vec()
    }

    pub(crate) fn write_bar0(&mut self, offset: u64, data: &[u8]) {
        self.write_region(pci::REGION_BAR0, offset, data);
    }

    pub(crate) fn read32(&mut self, offset: u64) -> u32 {
        let bytes = self.read_region(pci::REGION_BAR0, offset, 4);
        u32::from_le_bytes(bytes.try_into().expect("4 bytes"))
    }

    // ---- up ---------------------------------------------------------------------------------------------------------

    /// Connects and maps the guest's memory.
    pub(crate) fn connect(&mut self) {
        note!(self, "  connects");
        self.wired.clear();
        self.masked.clear();
        self.wire = Some(Wire::connect(&self.world.socket));
        let capabilities = b"{\"capabilities\":{\"max_msg_fds\":8,\"max_data_xfer_size\":1048576}}\0";
        let version = wire::Version { major: 0, minor: 1 };
        self.demand(Message::Version, &[version.as_bytes(), capabilities], &[]);
        let info = wire::RegionInfo { argsz: 4096, index: pci::REGION_BAR0, ..wire::RegionInfo::default() };
        let reply = self.demand(Message::DeviceGetRegionInfo, &[info.as_bytes()], &[]);
        self.doorbells = reply.fds.into_iter().next().map(File::from);
        assert_eq!(self.doorbells.is_some(), self.shares_doorbells(), "doorbells are shared as configured");
        self.memory.regions.iter_mut().for_each(|region| region.mapped = false);
        (0..self.memory.regions.len()).for_each(|region| self.map(region));
    }

    /// Makes a region of memory known to the device, if it is not.
    pub(crate) fn map(&mut self, index: usize) {
        let region = self.memory.regions[index].clone();
        if region.mapped {
            return;
        }
        let file = self.memory.files[region.file].try_clone().expect("a descriptor");
        let flags = wire::DMA_READ | if region.writable { wire::DMA_WRITE } else { 0 };
        let (offset, address, size) = (region.offset, region.at, region.size);
        let map = wire::DmaMap { argsz: 32, flags, offset, address, size };
        self.demand(Message::DmaMap, &[map.as_bytes()], &[&file]);
        self.memory.regions[index].mapped = true;
    }

    /// Enables the controller and makes a queue pair.
    pub(crate) fn enable(&mut self) {
        self.memory.fill(ADMIN_CQ, 4096, 0);
        let entries = ADMIN_ENTRIES;
        self.write_bar0(offset::AQA, ((entries - 1) << 16 | (entries - 1)).as_bytes());
        self.write_bar0(offset::ASQ, ADMIN_SQ.as_bytes());
        self.write_bar0(offset::ACQ, ADMIN_CQ.as_bytes());
        self.write_bar0(offset::CC, (4_u32 << 20 | 6 << 16 | 1).as_bytes());
        self.wait("the controller is ready", |guest| {
            let csts = guest.read32(offset::CSTS);
            assert_eq!(csts & 2, 0, "the controller failed when it was enabled as it should be");
            (csts & 1 != 0).then_some(())
        });
        self.sqs.insert(0, Sq { base: ADMIN_SQ, entries, ..Sq::default() });
        self.cqs.insert(0, Cq::new(ADMIN_CQ, entries));
        self.lost = None;
    }

    // ---- down -------------------------------------------------------------------------------------------------------

    /// Resets the controller and enables it again.
    pub(crate) fn recover(&mut self, how: Reset) {
        note!(self, "  reset: {how:?}");
        self.release();
        match how {
            _ if self.wire.is_none() => self.reconnect(),
            Reset::Disable => {
                let cc = self.read32(offset::CC);
                self.write_bar0(offset::CC, (cc & !1).as_bytes());
            }
            Reset::Subsystem => self.write_bar0(offset::NSSR, NSSR_RESET.as_bytes()),
            Reset::Function => self.write_region(pci::REGION_CONFIG, DEVICE_CONTROL_HIGH, &[0x80]),
            Reset::Message => {
                self.demand(Message::DeviceReset, &[], &[]);
                assert_eq!(self.read32(offset::CSTS) & 1, 0, "the device was reset, but is ready");
            }
            Reset::Reconnect => self.reconnect(),
        }
        self.wait("the controller is disabled", |guest| (guest.read32(offset::CSTS) & 1 == 0).then_some(()));
        self.write_bar0(offset::CSTS, (1_u32 << 4).as_bytes());
        self.forget_commands();
        (0..self.memory.regions.len()).for_each(|region| self.map(region));
        self.enable();
        // What the daemon was asked for before the reset may still go on.
        self.calm_down();
    }

    fn reconnect(&mut self) {
        self.wire = None;
        self.doorbells = None;
        self.connect();
    }

    /// Waits until the daemon has nothing to do for the device any more, and learns what became of the namespaces.
    pub(crate) fn calm_down(&mut self) {
        self.release();
        let mut idle = 0;
        self.wait("the device is idle", |guest| {
            idle = if guest.world.turn() == 0 { idle + 1 } else { 0 };
            (idle > 40).then_some(())
        });
        self.learn_disks();
        let now = self.now();
        for (index, view) in self.disks.iter().enumerate() {
            let geometry = view.disk.geometry();
            let block = geometry.block_size.bytes() as usize;
            if block != self.contents.block_size(index) {
                self.contents.reset_disk(index, block, geometry.blocks.0, now);
            }
        }
        let status = self.world.device(|device| device.status());
        self.namespaces = status
            .namespaces
            .into_iter()
            .map(|known| {
                let disk = self.disks.iter().position(|view| view.name == known.volume).expect("a disk of ours");
                let (attached, by_guest, read_only) = (known.attached, known.by_guest, known.read_only);
                (known.nsid, View { disk, attached, by_guest, read_only })
            })
            .collect();
    }

    /// Disks that were created for the guest.
    pub(crate) fn learn_disks(&mut self) {
        for (name, disk) in self.world.daemon.take_created() {
            let geometry = disk.geometry();
            self.contents.add_disk(geometry.block_size.bytes() as usize, geometry.blocks.0);
            self.disks.push(DiskView { name, disk, faulty: false });
        }
    }

    pub(crate) fn namespace_created(&mut self, nsid: u32) {
        self.learn_disks();
        let status = self.world.device(|device| device.status());
        let known = status.namespaces.iter().find(|known| known.nsid == nsid).expect("it was created");
        let disk = self.disks.iter().position(|view| view.name == known.volume).expect("a disk of ours");
        self.namespaces.insert(nsid, View { disk, attached: false, by_guest: true, read_only: false });
    }

    // ---- admin queue ------------------------------------------------------------------------------------------------

    /// Submits an admin command and waits for its completion; `None`: the controller was lost.
    pub(crate) fn admin(&mut self, sqe: Sqe, command: Command) -> Option<Cqe> {
        let cid = self.submit_admin(sqe, command)?;
        self.wait("an admin command completes", |guest| {
            guest.poll(0, u32::MAX);
            let there = guest.sqs.get(&0).is_some_and(|sq| sq.pending.contains_key(&cid));
            (!there || guest.lost.is_some()).then_some(())
        });
        if self.lost.is_some() { None } else { self.last_admin }
    }

    pub(crate) fn submit_admin(&mut self, sqe: Sqe, command: Command) -> Option<u16> {
        if !self.is_ready() || self.sqs[&0].room() == 0 {
            self.memory.give_back(&command.pages);
            if let What::Change(write) | What::Format { write, .. } = command.what {
                let now = self.now();
                self.contents.end(write, now, false, 0);
            }
            return None;
        }
        let cid = self.push(0, sqe, command);
        self.ring(0);
        Some(cid)
    }

    /// Creates the queues of this identifier, with a size of its own.
    pub(crate) fn create_pair(&mut self, choices: &mut Choices, qid: u16) {
        if !self.cqs.contains_key(&qid) {
            let entries = if choices.one_in(3) { 2 + choices.below(4) } else { 2 + choices.below(200) };
            self.create_cq(qid, entries as u32);
        }
        // Queues may share a completion queue.
        let cqids: Vec<u16> = self.cqs.keys().copied().filter(|&cqid| cqid != 0).collect();
        if !self.sqs.contains_key(&qid) && !cqids.is_empty() {
            let cqid = if choices.one_in(4) { *choices.pick(&cqids) } else { qid };
            if self.cqs.contains_key(&cqid) {
                self.create_sq(qid, cqid, 2 + choices.below(100) as u32);
            }
        }
    }

    fn create_cq(&mut self, cqid: u16, entries: u32) {
        let base = cq_base(cqid);
        self.memory.fill(base, 4096, 0);
        let what = What::CreateCq(cqid, Cq::new(base, entries));
        let sqe = create_cq(cqid, base, entries, cqid);
        self.admin(sqe, Command::new(what));
    }

    fn create_sq(&mut self, sqid: u16, cqid: u16, entries: u32) {
        let base = sq_base(sqid);
        let what = What::CreateSq(sqid, Sq { base, entries, cqid, ..Sq::default() });
        self.admin(create_sq(sqid, cqid, base, entries), Command::new(what));
    }

    /// Deletes a submission queue, with whatever is in it.
    pub(crate) fn delete_sq(&mut self, sqid: u16) {
        self.each_pending(|command, _| {
            if !matches!(command.what, What::Event) {
                command.statuses.push(Status::ABORTED_SQ_DELETION);
            }
        });
        self.admin(delete(AdminOpcode::DELETE_IO_SQ, sqid), Command::new(What::DeleteSq(sqid)));
    }

    /// Deletes a completion queue, which fails while it is used.
    pub(crate) fn delete_cq(&mut self, cqid: u16) {
        let used = self.sqs.values().any(|sq| sq.cqid == cqid);
        let command = if used {
            Command::new(What::Other).must_fail(Status::INVALID_QUEUE_DELETION)
        } else {
            Command::new(What::DeleteCq(cqid))
        };
        self.admin(delete(AdminOpcode::DELETE_IO_CQ, cqid), command);
    }
}

pub(crate) fn admin_sqe(opcode: AdminOpcode, nsid: u32) -> Sqe {
    let mut sqe = Sqe::new_zeroed();
    sqe.opcode = opcode.0;
    sqe.nsid = NamespaceId(nsid);
    sqe
}

pub(crate) fn create_cq(cqid: u16, base: u64, entries: u32, vector: u16) -> Sqe {
    let mut sqe = admin_sqe(AdminOpcode::CREATE_IO_CQ, 0);
    sqe.dptr = DataPointer::prps(base, 0);
    sqe.cdw10 = CreateQueueCdw10::new().with_qid(QueueId(cqid)).with_qsize_z(entries.wrapping_sub(1) as u16).into_bits();
    sqe.cdw11 = CreateCqCdw11::new().with_pc(true).with_ien(true).with_iv(vector).into_bits();
    sqe
}

pub(crate) fn create_sq(sqid: u16, cqid: u16, base: u64, entries: u32) -> Sqe {
    let mut sqe = admin_sqe(AdminOpcode::CREATE_IO_SQ, 0);
    sqe.dptr = DataPointer::prps(base, 0);
    sqe.cdw10 = CreateQueueCdw10::new().with_qid(QueueId(sqid)).with_qsize_z(entries.wrapping_sub(1) as u16).into_bits();
    sqe.cdw11 = CreateSqCdw11::new().with_pc(true).with_cqid(QueueId(cqid)).into_bits();
    sqe
}

pub(crate) fn delete(opcode: AdminOpcode, qid: u16) -> Sqe {
    let mut sqe = admin_sqe(opcode, 0);
    sqe.cdw10 = DeleteQueueCdw10::new().with_qid(QueueId(qid)).into_bits();
    sqe
}
