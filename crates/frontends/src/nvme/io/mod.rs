//! The NVM command set (NVM Command Set specification 3).
//!
//! ```text
//!   do_only ────── one plain read or write by itself: only.rs
//!   run_batch ──── plain reads and writes, all that are next in the queue: batch.rs
//!   io_command ─┬─ fused? ─────────► fused.rs     both commands of a pair
//!               ├─ Read, Write, … ─► transfer.rs  check ─► data.rs ─► Volume::submit ─┬─ done: completion by value
//!               │             with metadata: tagged.rs, protect.rs
//!               ├─ long commands ──► long.rs, copy.rs   in pieces, others in between   └─ waits: task, then the Sink
//!               └─ Reservation … ──► reserve.rs ─► ../reservation.rs
//! ```
//!
//! Every command is checked in the same order: opcode, namespace, range, size, write protection, reservation, data pointer.
//! Commands that change data pass the namespace's [`gate`].

mod batch;
mod copy;
mod fused;
mod gate;
pub(crate) mod limits;
mod long;
mod only;
mod protect;
mod reserve;
mod running;
mod tagged;
mod task;
mod transfer;
mod uncorrectable;

use std::{
    rc::Rc,
    sync::atomic::{AtomicU64, Ordering},
};

use millrace_block::{BlockCount, Geometry, Lba, Operation};
use millrace_engine::{ShardContext, TaskSlot};
use millrace_memory::Access;
use millrace_nvme_spec::{
    command::{Fuse, NamespaceId, Sqe},
    nvm::ReadWriteCdw12,
    opcode::NvmOpcode,
    registers::Configuration,
    status::Status,
};

#[cfg(test)]
pub(crate) use self::uncorrectable::RangeState;
pub(crate) use self::{gate::WriteGate, task::TASK_BYTES, uncorrectable::UncorrectableRanges};
use super::{
    Config,
    controller::{CommandToken, Controller, Outcome},
    data,
    errors::parameter,
    namespace::Attached,
    reservation::{HostKey, Rights},
    state::Cell,
    status::Completion,
};

/// What the I/O commands remember beside the state region.
pub(crate) struct IoState {
    /// Identifiers of the commands that wait in tasks.
    pub(crate) running: running::Running,
    /// First commands of fused pairs whose second has not been taken yet.
    fused: fused::Held,
    /// Tells this controller's host from others' while the host has no identifier.
    unique: u64,
}

impl IoState {
    pub(crate) fn new(config: &Config) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            running: running::Running::new(config.queues),
            fused: fused::Held::default(),
            unique: NEXT.fetch_add(1, Ordering::Relaxed),
        }
    }
}

impl IoState {
    /// Tells this controller's host from others' by a number that is known beforehand.
    pub(crate) fn set_unique(&mut self, unique: u64) {
        self.unique = unique;
    }
}

/// The blocks a command names, checked against the volume's present shape.
#[derive(Clone, Copy, Debug)]
struct Blocks {
    lba: Lba,
    count: BlockCount,
    /// Their size in bytes.
    bytes: u64,
    /// The shape they were checked against.
    geometry: Geometry,
}

impl Blocks {
    fn new(geometry: &Geometry, lba: Lba, count: BlockCount) -> Result<Self, Status> {
        let (_, bytes) = geometry.byte_range(lba, count).ok_or(Status::LBA_OUT_OF_RANGE)?;
        Ok(Self { lba, count, bytes, geometry: *geometry })
    }

    /// SLBA and NLB of a command.
    #[inline]
    fn of(geometry: &Geometry, sqe: &Sqe) -> Result<Self, Status> {
        let nlb_z = ReadWriteCdw12::from_bits(sqe.cdw12).nlb_z();
        Self::new(geometry, Lba(sqe.cdw10_11()), BlockCount(u64::from(nlb_z) + 1))
    }

    fn range(&self) -> gate::Range {
        gate::range(self.lba, self.count)
    }
}

impl Controller {
    /// Starts an I/O command. `slot` is the task it may wait in.
    pub(crate) fn io_command(
        &mut self,
        _cx: &mut ShardContext<'_>,
        slot: TaskSlot<'_>,
        token: CommandToken,
        sqe: &Sqe,
    ) -> Outcome {
        if self.io.running.contains(token.sqid, token.cid) {
            self.abort_lone(token.sqid);
            return Outcome::Done(Completion::error(Status::CID_CONFLICT));
        }
        if sqe.flags.fuse() != Fuse::NORMAL || self.io.fused.any() {
            return self.fused_command(slot, token, sqe);
        }
        self.single_command(slot, token, sqe)
    }

    /// Starts a command that is not one of a pair.
    fn single_command(&mut self, slot: TaskSlot<'_>, token: CommandToken, sqe: &Sqe) -> Outcome {
        let outcome = match sqe.nvm_opcode() {
            NvmOpcode::READ => self.transfer(slot, token, sqe, Operation::Read),
            NvmOpcode::WRITE => {
                let fua = self.durable(ReadWriteCdw12::from_bits(sqe.cdw12).fua());
                self.transfer(slot, token, sqe, Operation::Write { fua })
            }
            NvmOpcode::FLUSH => self.flush(slot, token, sqe),
            NvmOpcode::COMPARE => self.transfer(slot, token, sqe, Operation::Compare),
            NvmOpcode::WRITE_ZEROES => self.write_zeroes(slot, token, sqe),
            NvmOpcode::DATASET_MANAGEMENT => self.dataset_management(slot, token, sqe),
            NvmOpcode::VERIFY => self.verify(slot, token, sqe),
            NvmOpcode::COPY => self.copy(slot, token, sqe),
            NvmOpcode::WRITE_UNCORRECTABLE => self.write_uncorrectable(slot, token, sqe),
            NvmOpcode::RESERVATION_REGISTER => self.reservation_register(slot, token, sqe),
            NvmOpcode::RESERVATION_ACQUIRE => self.reservation_acquire(slot, token, sqe),
            NvmOpcode::RESERVATION_RELEASE => self.reservation_release(slot, token, sqe),
            NvmOpcode::RESERVATION_REPORT => self.reservation_report(slot, token, sqe),
            _ => Err(Status::INVALID_OPCODE),
        };
        outcome.unwrap_or_else(|status| Outcome::Done(Completion::error(status)))
    }

    /// Whether a write must be durable when it completes: the command asks for it, or the host turned the write cache off.
    #[inline]
    fn durable(&self, fua: bool) -> bool {
        fua || !self.write_cache_enabled()
    }

    /// Bytes of the host's memory pages (CC.MPS).
    pub(crate) fn page_size(&self) -> u64 {
        Configuration::from_bits(self.state.registers.cc.get()).page_size()
    }

    /// Whether a transfer is within MDTS.
    fn check_size(&self, bytes: u64) -> Result<(), Status> {
        if bytes > self.config.max_transfer() { Err(self.refuse(parameter::NLB, Status::INVALID_FIELD)) } else { Ok(()) }
    }

    /// Whether the namespace's reservation lets this controller do it.
    #[inline]
    pub(crate) fn check_rights(&self, attached: &Attached, needed: Rights) -> Result<(), Status> {
        let version = attached.namespace.reservation_version();
        let (known, rights) = attached.rights.get();
        let rights = if known == version { Rights(rights) } else { self.refresh_rights(attached, version) };
        if rights.contain(needed) { Ok(()) } else { Err(Status::RESERVATION_CONFLICT) }
    }

    #[cold]
    fn refresh_rights(&self, attached: &Attached, version: u64) -> Rights {
        // A change that comes between the version and the rights leaves an old version with new rights: they are asked for
        // once more.
        let rights = attached.namespace.rights_of(&self.host_key());
        attached.rights.set((version, rights.0));
        rights
    }

    /// Who the host of this controller is, as reservations see it.
    pub(crate) fn host_key(&self) -> HostKey {
        let features = &self.state.features;
        let id = features.host_id.each_ref().map(Cell::get);
        HostKey::new(id, features.host_id_size.get() == 16, self.io.unique)
    }

    /// The host's identifier changed: what it may do has to be asked for again.
    pub(crate) fn forget_rights(&self) {
        for attached in self.namespaces.attached() {
            attached.rights.set((0, 0));
        }
    }

    /// Copy descriptor formats that the host enabled (Host Behavior Support, CDFE).
    fn copy_formats_enabled(&self) -> u16 {
        (self.state.features.host_behavior.get() >> 16) as u16
    }

    /// Resolves the data pointer into `self.segments`.
    fn resolve(&mut self, sqe: &Sqe, bytes: u64, access: Access) -> Result<(), Status> {
        data::resolve(&self.memory, self.page_size(), sqe, bytes, access, &mut self.segments).inspect_err(|status| {
            // Every other error of a data pointer has a status of its own.
            if status.code() == Status::INVALID_FIELD {
                let _ = self.refuse(parameter::PSDT, *status);
            }
        })
    }

    /// The attached namespace of an I/O command.
    fn namespace(&self, nsid: NamespaceId) -> Result<&Rc<Attached>, Status> {
        self.namespaces.require(nsid.0).map_err(|status| self.refuse(parameter::NSID, status))
    }
}

#[cfg(test)]
mod tests;
