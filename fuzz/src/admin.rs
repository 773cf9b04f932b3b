//! Admin commands, meant well and not.

use millrace_nvme_spec::{
    admin::{
        AbortCdw10, IdentifyCdw10, NamespaceAttachmentCdw10, NamespaceAttachmentSelect, NamespaceManagementCdw10,
        NamespaceManagementData, NamespaceManagementSelect,
    },
    command::{CommandId, ControllerId, DataPointer, NamespaceId, QueueId},
    features::{FeatureId, HostBehavior},
    identify::{Cns, ControllerList, FormattedLbaSize, IdentifyNamespace, NamespaceList},
    log::LogId,
    opcode::AdminOpcode,
    status::Status,
};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::{
    choices::Choices,
    guest::{ADMIN_DATA, Command, EVENT_INDEXES, Guest, SHADOW, What, cq_base, note, sq_base},
    memory::{NOWHERE, PAGE},
    queues::{Reset, admin_sqe, create_cq, create_sq, delete},
};

impl Guest {
    /// Identify, and what it says of the namespaces.
    pub(crate) fn identify(&mut self, choices: &mut Choices) {
        let nsids: Vec<u32> = self.namespaces.iter().filter(|(_, view)| view.attached).map(|(id, _)| *id).collect();
        let list = nsids.is_empty() || choices.one_in(2);
        let (cns, nsid) = if list { (Cns::ACTIVE_NAMESPACES, 0) } else { (Cns::NAMESPACE, *choices.pick(&nsids)) };
        let mut sqe = admin_sqe(AdminOpcode::IDENTIFY, nsid);
        sqe.cdw10 = IdentifyCdw10::new().with_cns(cns).into_bits();
        sqe.dptr = DataPointer::prps(ADMIN_DATA, 0);
        if self.admin(sqe, Command::new(What::Other)).is_none() {
            return;
        }
        let mut page = vec![0; PAGE as usize];
        self.memory.read(ADMIN_DATA, &mut page);
        if list {
            let found: Vec<u32> = NamespaceList::read_from_bytes(&page).expect("a page").iter().map(|nsid| nsid.0).collect();
            assert_eq!(found, nsids, "the list of active namespaces");
        } else {
            let identify = IdentifyNamespace::read_from_bytes(&page).expect("a page");
            let disk = self.namespaces[&nsid].disk;
            let format = identify.lbaf[usize::from(identify.flbas.index())];
            let found = (identify.nsze, 1_usize << format.lbads);
            assert_eq!(found, (self.contents.blocks(disk), self.contents.block_size(disk)), "namespace {nsid}");
        }
    }

    /// Any admin command with any fields, apart from those that would change what the oracle knows.
    pub(crate) fn any_admin(&mut self, choices: &mut Choices) {
        const OPCODES: [AdminOpcode; 6] = [
            AdminOpcode::IDENTIFY,
            AdminOpcode::GET_LOG_PAGE,
            AdminOpcode::GET_FEATURES,
            AdminOpcode::SET_FEATURES,
            AdminOpcode::ABORT,
            AdminOpcode::IDENTIFY,
        ];
        let Some(pages) = self.memory.take(choices, 2) else { return };
        let mut command = Command::new(What::Other).whatever();
        let known = !choices.one_in(6);
        let opcode = if known {
            *choices.pick(&OPCODES)
        } else {
            command = Command::new(What::Other).must_fail(Status::INVALID_OPCODE);
            AdminOpcode(*choices.pick(&[0x03, 0x07, 0x0b, 0x0e, 0x1f, 0x20, 0x7d, 0x7e, 0xc0, 0xff]))
        };
        command.pages.clone_from(&pages);
        let mut sqe = admin_sqe(opcode, if choices.one_in(3) { choices.nasty32() } else { choices.below(9) as u32 });
        let at = |choices: &mut Choices, page: u64| match choices.below(6) {
            0 => NOWHERE + choices.below(3 * PAGE),
            1 => page + choices.below(PAGE),
            _ => page,
        };
        sqe.dptr = DataPointer::prps(at(choices, pages[0]), at(choices, pages[1]));
        sqe.cdw10 = if choices.one_in(3) { choices.nasty32() } else { choices.byte().into() };
        if opcode == AdminOpcode::GET_LOG_PAGE && !choices.one_in(4) {
            let lid = *choices.pick(&[LogId::ERROR, LogId::SMART, LogId::CHANGED_NAMESPACES, LogId::COMMAND_EFFECTS]);
            sqe.cdw10 = u32::from(lid.0) | (choices.below(0x400) as u32) << 16;
        }
        // What these change would have to be followed.
        let followed = [FeatureId::NUMBER_OF_QUEUES, FeatureId::INTERRUPT_COALESCING, FeatureId::HOST_BEHAVIOR_SUPPORT];
        if opcode == AdminOpcode::SET_FEATURES && followed.contains(&FeatureId(sqe.cdw10 as u8)) {
            sqe.cdw10 ^= 0x80;
        }
        [sqe.cdw11, sqe.cdw12, sqe.cdw13, sqe.cdw14, sqe.cdw15] =
            std::array::from_fn(|_| if choices.one_in(2) { 0 } else { choices.nasty32() });
        if known && choices.one_in(20) {
            // Neither exists here.
            sqe.flags = millrace_nvme_spec::command::CommandFlags::from_bits(1 << choices.below(8));
        }
        self.submit_admin(sqe, command);
    }

    /// Queue commands that must be refused, and how.
    pub(crate) fn bad_queue(&mut self, choices: &mut Choices) {
        let free = (1..=self.config.queues).find(|qid| !self.sqs.contains_key(qid) && !self.cqs.contains_key(qid));
        let taken = self.cqs.keys().copied().find(|&cqid| cqid != 0);
        let Some(qid) = free else { return };
        let (cq, sq) = (|entries| create_cq(qid, cq_base(1), entries, 0), |cqid| create_sq(qid, cqid, sq_base(1), 16));
        let most = self.config.queue_entries;
        let (mut sqe, status) = match choices.below(14) {
            0 => (cq(1), Status::INVALID_QUEUE_SIZE),
            1 => (cq(most + 1 + choices.below(100) as u32), Status::INVALID_QUEUE_SIZE),
            2 => (create_cq(0, cq_base(1), 16, 0), Status::INVALID_QUEUE_IDENTIFIER),
            3 => (create_cq(self.config.queues + 1, cq_base(1), 16, 0), Status::INVALID_QUEUE_IDENTIFIER),
            4 => (create_cq(0xffff, cq_base(1), 16, 0), Status::INVALID_QUEUE_IDENTIFIER),
            5 => (create_cq(qid, cq_base(1) + 4 + choices.below(4000), 16, 0), Status::PRP_OFFSET_INVALID),
            6 => (create_cq(qid, cq_base(1), 16, self.config.vectors), Status::INVALID_INTERRUPT_VECTOR),
            7 => (sq(qid), Status::COMPLETION_QUEUE_INVALID),
            8 => (sq(0), Status::INVALID_QUEUE_IDENTIFIER),
            9 => (sq(0xfff0), Status::INVALID_QUEUE_IDENTIFIER),
            10 => (delete(AdminOpcode::DELETE_IO_SQ, qid), Status::INVALID_QUEUE_IDENTIFIER),
            11 => (delete(AdminOpcode::DELETE_IO_CQ, 0), Status::INVALID_QUEUE_IDENTIFIER),
            12 => match taken {
                Some(taken) => (create_cq(taken, cq_base(1), 16, 0), Status::INVALID_QUEUE_IDENTIFIER),
                None => return,
            },
            _ => (cq(16), Status::INVALID_FIELD),
        };
        if status == Status::INVALID_FIELD {
            // Not physically contiguous.
            sqe.cdw11 &= !1;
        }
        self.submit_admin(sqe, Command::new(What::Other).must_fail(status));
    }

    pub(crate) fn event_request(&mut self) {
        let mut command = Command::new(What::Event);
        command.statuses.extend([Status::ASYNC_EVENT_REQUEST_LIMIT_EXCEEDED, Status::ABORT_REQUESTED]);
        self.submit_admin(admin_sqe(AdminOpcode::ASYNC_EVENT_REQUEST, 0), command);
    }

    pub(crate) fn abort(&mut self, choices: &mut Choices) {
        let sqid = choices.below(6) as u16;
        let cids: Vec<u16> = self.sqs.get(&sqid).into_iter().flat_map(|sq| sq.pending.keys().copied()).collect();
        let cid = if cids.is_empty() || choices.one_in(4) { choices.number() as u16 } else { *choices.pick(&cids) };
        let mut sqe = admin_sqe(AdminOpcode::ABORT, 0);
        sqe.cdw10 = AbortCdw10::new().with_sqid(QueueId(sqid)).with_cid(CommandId(cid)).into_bits();
        let mut command = Command::new(What::Other);
        command.statuses.push(Status::ABORT_COMMAND_LIMIT_EXCEEDED);
        self.submit_admin(sqe, command);
    }

    /// The host enables copies across namespaces.
    pub(crate) fn enable_copies_across(&mut self) {
        let mut behavior = HostBehavior::new_zeroed();
        behavior.cdfe = 1 << 2;
        self.memory.write(ADMIN_DATA, behavior.as_bytes());
        let mut sqe = admin_sqe(AdminOpcode::SET_FEATURES, 0);
        sqe.cdw10 = FeatureId::HOST_BEHAVIOR_SUPPORT.0.into();
        sqe.dptr = DataPointer::prps(ADMIN_DATA, 0);
        self.admin(sqe, Command::new(What::CopiesAcross));
    }

    /// Shadow doorbells, where there are any.
    pub(crate) fn shadow_doorbells(&mut self) {
        let mut sqe = admin_sqe(AdminOpcode::DOORBELL_BUFFER_CONFIG, 0);
        sqe.dptr = DataPointer::prps(SHADOW, EVENT_INDEXES);
        if self.shares_doorbells() {
            self.submit_admin(sqe, Command::new(What::Other).must_fail(Status::INVALID_OPCODE));
        } else if !self.shadow {
            // Nothing may be rung while the doorbells change their place.
            self.settle();
            self.admin(sqe, Command::new(What::Shadow));
        }
    }

    // ---- namespaces -------------------------------------------------------------------------------------------------

    /// Whether no command under way names the namespace, so that another disk may have its place.
    fn is_unused(&mut self, nsid: u32) -> bool {
        let Some(view) = self.namespaces.get(&nsid) else { return true };
        let (disk, mut used) = (view.disk, false);
        self.each_pending(|command, _| used |= command.disks.contains(&disk));
        !used
    }

    /// Creates, attaches, detaches or deletes a namespace.
    pub(crate) fn manage_namespaces(&mut self, choices: &mut Choices) {
        let ours: Vec<u32> = self.namespaces.keys().copied().collect();
        let nsid = if ours.is_empty() { 1 } else { *choices.pick(&ours) };
        match choices.below(4) {
            0 | 1 if self.disks.len() < 8 => self.create_namespace(choices),
            2 => self.delete_namespace(nsid),
            _ => self.attach_or_detach(nsid),
        }
    }

    fn create_namespace(&mut self, choices: &mut Choices) {
        let blocks = 8 + choices.below(64) * 8;
        let mut data = NamespaceManagementData::new_zeroed();
        (data.nsze, data.ncap) = (blocks, blocks);
        data.flbas = FormattedLbaSize::new().with_index(choices.below(2) as u8);
        self.memory.write(ADMIN_DATA, data.as_bytes());
        let mut sqe = admin_sqe(AdminOpcode::NAMESPACE_MANAGEMENT, 0);
        sqe.dptr = DataPointer::prps(ADMIN_DATA, 0);
        sqe.cdw10 = NamespaceManagementCdw10::new().with_sel(NamespaceManagementSelect::CREATE).into_bits();
        let mut command = Command::new(What::CreateNamespace);
        command.statuses.extend([Status::NAMESPACE_INSUFFICIENT_CAPACITY, Status::NAMESPACE_ID_UNAVAILABLE]);
        if self.config.quota.bytes == 0 {
            command = Command::new(What::Other).must_fail(Status::INVALID_OPCODE);
        }
        let submitted = self.submit_admin(sqe, command);
        if submitted.is_some() && choices.one_in(5) {
            return self.recover(*choices.pick(&Reset::ALL));
        }
        self.settle();
    }

    fn delete_namespace(&mut self, nsid: u32) {
        let mut sqe = admin_sqe(AdminOpcode::NAMESPACE_MANAGEMENT, nsid);
        sqe.cdw10 = NamespaceManagementCdw10::new().with_sel(NamespaceManagementSelect::DELETE).into_bits();
        let command = if self.config.quota.bytes == 0 {
            Command::new(What::Other).must_fail(Status::INVALID_OPCODE)
        } else if self.namespaces.get(&nsid).is_some_and(|view| view.by_guest) {
            self.namespace_leaves(nsid);
            Command::new(What::DeleteNamespace(nsid))
        } else {
            Command::new(What::Other).whatever_error()
        };
        self.admin(sqe, command);
        if self.lost.is_none() {
            self.settle();
        }
    }

    /// Commands under way on the namespace may find it gone.
    pub(crate) fn namespace_leaves(&mut self, nsid: u32) {
        let Some(disk) = self.namespaces.get(&nsid).map(|view| view.disk) else { return };
        self.each_pending(|command, _| {
            if command.disks.contains(&disk) {
                command.statuses.extend([Status::INVALID_FIELD, Status::INVALID_NAMESPACE_OR_FORMAT]);
            }
        });
    }

    fn attach_or_detach(&mut self, nsid: u32) {
        let Some(view) = self.namespaces.get(&nsid).cloned() else { return };
        let attach = !view.attached;
        if attach && !self.is_unused(nsid) {
            return;
        }
        let mut list = ControllerList::new_zeroed();
        list.count = 1;
        list.ids[0] = ControllerId(self.config.cntlid);
        self.memory.write(ADMIN_DATA, list.as_bytes());
        let mut sqe = admin_sqe(AdminOpcode::NAMESPACE_ATTACHMENT, nsid);
        sqe.dptr = DataPointer::prps(ADMIN_DATA, 0);
        let select = if attach { NamespaceAttachmentSelect::ATTACH } else { NamespaceAttachmentSelect::DETACH };
        sqe.cdw10 = NamespaceAttachmentCdw10::new().with_sel(select).into_bits();
        let command = if self.config.quota.bytes == 0 {
            Command::new(What::Other).must_fail(Status::INVALID_OPCODE)
        } else {
            if !attach {
                self.namespace_leaves(nsid);
            }
            Command::new(What::Attach(nsid, attach))
        };
        self.admin(sqe, command);
        if self.lost.is_none() {
            self.settle();
        }
    }

    /// Format NVM, with or without another block size; sometimes the controller is reset under it.
    pub(crate) fn format(&mut self, choices: &mut Choices) {
        let nsids: Vec<u32> =
            self.namespaces.iter().filter(|(_, v)| v.attached && !v.read_only).map(|(id, _)| *id).collect();
        if nsids.is_empty() {
            return;
        }
        let nsid = *choices.pick(&nsids);
        let disk = self.namespaces[&nsid].disk;
        let index = choices.below(2) as u32;
        let same = self.contents.block_size(disk) == if index == 0 { 512 } else { 4096 };
        if !same || choices.one_in(2) {
            self.settle();
            if self.lost.is_some() {
                return;
            }
        }
        self.each_pending(|command, _| {
            if command.disks.contains(&disk) {
                command.statuses.push(Status::FORMAT_IN_PROGRESS);
            }
        });
        note!(self, "  format of disk {disk}, {}", if same { "same block size" } else { "another block size" });
        let now = self.now();
        let zeroes = vec![0; self.contents.blocks(disk) as usize];
        let write = self.contents.begin(now, disk, 0, &zeroes);
        let mut sqe = admin_sqe(AdminOpcode::FORMAT_NVM, nsid);
        sqe.cdw10 = index;
        let submitted = self.submit_admin(sqe, Command::new(What::Format { disk, write }));
        if submitted.is_some() && choices.one_in(5) {
            let turns = choices.below(6);
            self.turns(turns);
            return self.recover(*choices.pick(&Reset::ALL));
        }
        self.settle();
    }

    /// Commands for namespaces that are not there, by way of Identify.
    pub(crate) fn identify_missing(&mut self, choices: &mut Choices) {
        let nsid = choices.nasty32();
        let mut sqe = admin_sqe(AdminOpcode::IDENTIFY, nsid);
        sqe.cdw10 = IdentifyCdw10::new().with_cns(Cns::NAMESPACE).into_bits();
        // Not where later commands have their data.
        sqe.dptr = DataPointer::prps(ADMIN_DATA + PAGE, 0);
        let command = if nsid == 0 || NamespaceId(nsid) != NamespaceId::BROADCAST && nsid > self.config.namespaces {
            Command::new(What::Other).must_fail(Status::INVALID_NAMESPACE_OR_FORMAT)
        } else {
            Command::new(What::Other).whatever()
        };
        self.submit_admin(sqe, command);
    }
}

impl Command {
    /// It must fail, in any way.
    pub(crate) fn whatever_error(mut self) -> Self {
        (self.any_status, self.may_succeed) = (true, false);
        self
    }
}
