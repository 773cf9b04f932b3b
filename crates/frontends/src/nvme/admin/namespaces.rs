//! Namespace Management and Namespace Attachment (Base 5.1.21, 5.1.20; NVM 4.1.6).

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_block::BlockSize;
use millrace_nvme_spec::{
    admin::{
        NamespaceAttachmentCdw10, NamespaceAttachmentSelect, NamespaceManagementCdw10, NamespaceManagementCdw11,
        NamespaceManagementData, NamespaceManagementSelect,
    },
    command::{ControllerId, Csi, NamespaceId, Sqe},
    identify::{ControllerList, FormattedLbaSize},
    status::Status,
};

use super::{
    super::{
        controller::{CommandToken, Controller, Outcome},
        status::Completion,
    },
    Progress, done,
    identify::FORMATS,
    jobs::Work,
};

/// Attachments and detachments that may come at once: every namespace of a large controller.
const BURST: u32 = 1024;
/// After that, one in so long: less often than the daemon can store them.
const INTERVAL: Duration = Duration::from_millis(50);

/// How many attachments and detachments the daemon is told of: it stores each, which takes longer than the command, so that a
/// guest that did nothing else would fill its queue.
#[derive(Debug, Default)]
pub(super) struct AttachmentBudget {
    /// When all that was told is paid for, at an interval each.
    paid: Option<Instant>,
}

impl AttachmentBudget {
    /// Whether another one may be told now.
    pub(super) fn admit(&mut self, now: Instant) -> bool {
        let paid = self.paid.map_or(now, |paid| paid.max(now));
        let admitted = paid.duration_since(now) <= INTERVAL * (BURST - 1);
        if admitted {
            self.paid = Some(paid + INTERVAL);
        }
        admitted
    }
}

/// For a namespace that a job works on, or a guest that asks too often: later it can be had.
fn busy() -> Outcome {
    Outcome::Done(Completion { dw0: 0, status: Status::NAMESPACE_NOT_READY })
}

impl Controller {
    /// Bytes that the guest may still create.
    pub(super) fn quota_left(&self) -> u64 {
        let by_guest = self.namespaces.allocated().filter(|(_, allocated)| allocated.by_guest);
        let used = by_guest.map(|(_, allocated)| allocated.namespace.volume.geometry().bytes());
        let used = used.fold(self.admin.jobs.bytes_in_creation(), u64::saturating_add);
        self.config.quota.bytes.saturating_sub(used)
    }

    /// Namespace Management.
    pub(super) fn namespace_management(&mut self, token: CommandToken, sqe: &Sqe) -> Progress {
        match NamespaceManagementCdw10::from_bits(sqe.cdw10).sel() {
            NamespaceManagementSelect::CREATE => self.create_namespace(token, sqe),
            NamespaceManagementSelect::DELETE => self.delete_namespace(token, sqe.nsid),
            _ => Err(self.invalid(10, 0)),
        }
    }

    fn create_namespace(&mut self, token: CommandToken, sqe: &Sqe) -> Progress {
        if sqe.nsid != NamespaceId::NONE {
            return Err(self.invalid(1, 0));
        }
        if NamespaceManagementCdw11::from_bits(sqe.cdw11).csi() != Csi::NVM {
            return Err(Status::IO_COMMAND_SET_NOT_SUPPORTED);
        }
        let data: NamespaceManagementData = self.fetch(sqe)?;
        let (block_size, bytes) = check_creation(&data)?;
        let made = self.records.numbered(token.record).unwrap_or(0) as u32;
        if self.repeats && self.namespaces.allocation(made).is_some_and(|allocated| allocated.by_guest) {
            // It was made, and the worker that made it had no time to say so. The quota counts it already.
            return Ok(done(made));
        }
        if bytes.is_none_or(|bytes| bytes > self.quota_left()) {
            return Err(Status::NAMESPACE_INSUFFICIENT_CAPACITY);
        }
        let nsid = self.namespaces.reserve().ok_or(Status::NAMESPACE_ID_UNAVAILABLE)?;
        self.records.number(token.record, nsid.into());
        self.admin.jobs.push(token, Work::Create { nsid, bytes: bytes.unwrap_or(0), block_size }, Vec::new());
        Ok(Outcome::Held)
    }

    /// Deletes a namespace that this guest created, or all of them if there are no others.
    fn delete_namespace(&mut self, token: CommandToken, nsid: NamespaceId) -> Progress {
        let nsids: Vec<u32> = if nsid == NamespaceId::BROADCAST {
            self.namespaces.allocated().map(|(nsid, _)| nsid).collect()
        } else {
            self.check_valid(nsid)?;
            if self.repeats && self.namespaces.allocation(nsid.0).is_none() {
                return Ok(done(0));
            }
            self.namespaces.allocation(nsid.0).ok_or_else(|| self.invalid(1, 0))?;
            vec![nsid.0]
        };
        if nsids.iter().any(|&nsid| self.admin.jobs.concern(nsid)) {
            return Ok(busy());
        }
        // The operator's namespaces are not the guest's to delete.
        if nsids.iter().any(|&nsid| self.namespaces.allocation(nsid).is_some_and(|allocated| !allocated.by_guest)) {
            return Err(Status::OPERATION_DENIED);
        }
        let detached: Vec<_> = nsids.iter().filter_map(|&nsid| self.namespaces.detach(nsid)).collect();
        let drain = detached.iter().flat_map(|attached| self.namespaces.ways(attached)).collect();
        self.admin.jobs.push(token, Work::Delete { nsids }, drain);
        Ok(Outcome::Held)
    }

    /// Namespace Attachment.
    pub(super) fn namespace_attachment(&mut self, token: CommandToken, sqe: &Sqe) -> Progress {
        let select = NamespaceAttachmentCdw10::from_bits(sqe.cdw10).sel();
        if select != NamespaceAttachmentSelect::ATTACH && select != NamespaceAttachmentSelect::DETACH {
            return Err(self.invalid(10, 0));
        }
        self.check_valid(sqe.nsid)?;
        let nsid = sqe.nsid.0;
        self.namespaces.allocation(nsid).ok_or_else(|| self.invalid(1, 0))?;
        let list: ControllerList = self.fetch(sqe)?;
        // This controller is the only one that the guest knows.
        if list.listed() != Some(&[ControllerId(self.config.cntlid)]) {
            return Err(Status::CONTROLLER_LIST_INVALID);
        }
        if self.admin.jobs.concern(nsid) {
            return Ok(busy());
        }
        let changes = self.namespaces.get(nsid).is_some() != (select == NamespaceAttachmentSelect::ATTACH);
        if self.repeats && !changes {
            return Ok(done(0));
        }
        if changes && !self.admin.attachments.admit(Instant::now()) {
            return Ok(busy());
        }
        let host = Arc::clone(&self.host);
        if select == NamespaceAttachmentSelect::ATTACH {
            self.namespaces.attach(nsid)?;
            self.note_attached(nsid, true);
            host.attachment_changed(&self.config.name, nsid, true);
            return Ok(done(0));
        }
        let attached = self.namespaces.detach(nsid).ok_or(Status::NAMESPACE_NOT_ATTACHED)?;
        self.note_attached(nsid, false);
        host.attachment_changed(&self.config.name, nsid, false);
        let drain = self.namespaces.ways(&attached).collect();
        self.admin.jobs.push(token, Work::Detach { nsid }, drain);
        Ok(Outcome::Held)
    }
}

/// What a new namespace shall be: block size and bytes; no bytes if the number is beyond measure.
fn check_creation(data: &NamespaceManagementData) -> Result<(BlockSize, Option<u64>), Status> {
    let known = FormattedLbaSize::new().with_index(data.flbas.index());
    let block_size = FORMATS.get(usize::from(data.flbas.index())).copied().filter(|_| data.flbas == known);
    let block_size = block_size.ok_or(Status::INVALID_FORMAT)?;
    if data.nsze == 0 || data.ncap == 0 || data.ncap > data.nsze {
        return Err(Status::INVALID_FIELD);
    }
    if data.ncap < data.nsze {
        return Err(Status::THIN_PROVISIONING_NOT_SUPPORTED);
    }
    if data.anagrpid != 0 {
        return Err(Status::ANA_GROUP_ID_INVALID);
    }
    // Neither protection information, sharing, sets nor endurance groups, nor placement.
    let others = [u32::from(data.dps.into_bits()), u32::from(data.nmic.into_bits()), u32::from(data.nphndls)];
    if others != [0; 3] || data.nvmsetid != 0 || data.endgid != 0 {
        return Err(Status::INVALID_FIELD);
    }
    Ok((block_size, data.nsze.checked_mul(u64::from(block_size.bytes()))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attachments_come_in_a_burst_and_then_one_per_interval() {
        let (mut budget, start) = (AttachmentBudget::default(), Instant::now());
        assert!((0..BURST).all(|_| budget.admit(start)));
        assert!(!budget.admit(start));
        assert!(!budget.admit(start + INTERVAL / 2));
        assert!(budget.admit(start + INTERVAL));
        assert!(!budget.admit(start + INTERVAL));
        let later = start + INTERVAL * 2 * BURST;
        assert!((0..BURST).all(|_| budget.admit(later)));
        assert!(!budget.admit(later));
    }
}
