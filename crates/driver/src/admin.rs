//! Admin commands, and PCI settings.

use std::mem::offset_of;

use millrace_block::BlockCount;
use millrace_nvme_spec::{
    AdminOpcode, CommandId, Cqe, NamespaceId, QueueId, Sqe, Status,
    admin::{
        AbortCdw10, AbortResult, AsyncEvent, AsyncEventDw0, CreateCqCdw11, CreateQueueCdw10, CreateSqCdw11,
        DeleteQueueCdw10, IdentifyCdw10, SecureErase,
    },
    features::{
        AsyncEventFeature, FeatureId, GetFeaturesCdw10, HostIdentifierFeature, NumberOfQueuesFeature, SetFeaturesCdw10,
    },
    identify::{Cns, IdentifyController, IdentifyControllerNvm, IdentifyNamespace, NamespaceList},
    log::{GetLogPageCdw10, GetLogPageCdw11, LogId},
    pci::{self, CapabilityId, PciExpressCapability},
    to_zeros_based,
};
use millrace_vfio_user::ClientError;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    command::Command,
    controller::{Controller, Late},
    dma::{DmaBuffer, PAGE_SIZE},
    doorbell::Shadow,
    error::{DriverError, during},
    format::Format,
    namespace::Namespace,
    queue::{QueueError, QueuePair},
    transport::TransportError,
};

/// Region index of PCI configuration space.
pub(crate) const CONFIG: u32 = 7;

impl Controller {
    /// The admin queue, with its raw calls.
    ///
    /// # Panics
    /// When the controller is not enabled.
    pub fn admin_queue(&mut self) -> &mut QueuePair {
        &mut self.enabled_mut().admin
    }

    /// Runs an admin command.
    ///
    /// # Errors
    /// [`QueueError::Failed`] with the controller's status when it is not success.
    pub fn admin(&mut self, command: &Command) -> Result<Cqe, QueueError> {
        Ok(self.execute_admin(command, None)?.0)
    }

    /// Runs an admin command, whose data are in `buffer` if it has any. A command that is still in flight keeps it: the controller may
    /// read or write there yet.
    fn execute_admin(
        &mut self,
        command: &Command,
        buffer: Option<DmaBuffer>,
    ) -> Result<(Cqe, Option<DmaBuffer>), QueueError> {
        self.settle_late()?;
        let done = self.admin_queue().execute(command);
        let cid = match &done {
            Ok(_)
            | Err(QueueError::Failed { .. } | QueueError::Full { .. } | QueueError::Prp { .. } | QueueError::Sgl { .. }) => {
                return done.map(|cqe| (cqe, buffer));
            }
            Err(QueueError::Timeout { cid, .. }) => Some(*cid),
            Err(QueueError::BadCompletion { cqe, .. }) => Some(cqe.cid),
            Err(_) => None,
        };
        self.late.push(Late { cid, aborts: command.sqe.opcode == AdminOpcode::ABORT.0, _buffer: buffer });
        done.map(|cqe| (cqe, None))
    }

    /// Lets go of commands that were waited for in vain and have completed since: their identifiers are about to be used again.
    fn settle_late(&mut self) -> Result<(), QueueError> {
        let mut at = 0;
        while let Some(cid) = self.late.get(at).map(|late| late.cid) {
            match cid {
                Some(cid) if self.admin_queue().take(cid)? => drop(self.late.swap_remove(at)),
                _ => at += 1,
            }
        }
        Ok(())
    }

    /// Runs any admin command and gives the completion whatever its status is. Only the command identifier is ours.
    pub fn admin_raw(&mut self, sqe: Sqe) -> Result<Cqe, QueueError> {
        self.settle_late()?;
        self.admin_queue().execute_any(&Command::from(sqe))
    }

    /// Runs an admin command that gives `len` bytes of data.
    pub fn admin_read(&mut self, command: &Command, len: usize) -> Result<Vec<u8>, DriverError> {
        let buffer = self.memory.alloc(len)?;
        let (_, buffer) = self.execute_admin(&command.with_data(buffer.slice(0, len)), Some(buffer))?;
        Ok(buffer.expect("the command has ended").read_vec(0, len))
    }

    /// Runs an admin command that takes data.
    pub fn admin_write(&mut self, command: &Command, data: &[u8]) -> Result<Cqe, DriverError> {
        let buffer = self.memory.alloc(data.len())?;
        buffer.write_at(0, data);
        Ok(self.execute_admin(&command.with_data(buffer.slice(0, data.len())), Some(buffer))?.0)
    }

    /// Identify (Base 5.1.13): any data structure of 4096 bytes.
    pub fn identify<T>(&mut self, cns: Cns, nsid: NamespaceId) -> Result<Box<T>, DriverError>
    where
        T: FromBytes + IntoBytes + Immutable + KnownLayout,
    {
        let mut command = Command::admin(AdminOpcode::IDENTIFY);
        command.sqe.nsid = nsid;
        command.sqe.cdw10 = IdentifyCdw10::new().with_cns(cns).into_bits();
        let bytes = self.admin_read(&command, size_of::<T>())?;
        Ok(Box::new(T::read_from_bytes(&bytes).expect("as many bytes as the structure has")))
    }

    /// Identify Controller (CNS 01h).
    pub fn identify_controller(&mut self) -> Result<Box<IdentifyController>, DriverError> {
        self.identify(Cns::CONTROLLER, NamespaceId::NONE)
    }

    /// Identify Controller of the NVM command set (CNS 06h; NVM 4.1.5.4): the limits of commands without data. Older controllers have none.
    fn identify_nvm(&mut self) -> Result<Box<IdentifyControllerNvm>, DriverError> {
        self.identify(Cns::CSI_CONTROLLER, NamespaceId::NONE)
    }

    /// The most bytes that one Write Zeroes may name: WZSL and WZDSL; `u64::MAX` where they are 0. Of a controller that does not say, what
    /// one command may move: some hold themselves to that.
    ///
    /// # Errors
    /// Those that end a controller; not that it has no answer.
    pub fn zeroes_limit(&mut self) -> Result<u64, DriverError> {
        let unit = 12 + u32::from(self.capabilities().mpsmin());
        match self.identify_nvm() {
            Ok(limits) => Ok(zeroes_limit(&limits, unit)),
            Err(DriverError::Queue(QueueError::Failed { .. })) => Ok(self.max_transfer()),
            Err(error) => Err(error),
        }
    }

    /// The active namespaces (CNS 02h), up to 1024.
    pub fn active_namespaces(&mut self) -> Result<Vec<NamespaceId>, DriverError> {
        Ok(self.identify::<NamespaceList>(Cns::ACTIVE_NAMESPACES, NamespaceId::NONE)?.iter().collect())
    }

    /// Identify Namespace (CNS 00h) of an active namespace.
    ///
    /// # Errors
    /// [`DriverError::BadNamespace`] for one that is not active or has a format unknown to the driver.
    pub fn namespace(&mut self, nsid: NamespaceId) -> Result<Namespace, DriverError> {
        let identify = self.identify::<IdentifyNamespace>(Cns::NAMESPACE, nsid)?;
        let size = BlockCount(identify.nsze);
        let namespace = Namespace::new(nsid, identify, self.max_transfer()).filter(|namespace| namespace.size().0 > 0);
        namespace.ok_or(DriverError::BadNamespace { nsid, size })
    }

    /// Get Features (Base 5.1.11) of a feature without data: its current value.
    pub fn get_feature(&mut self, fid: FeatureId, cdw11: u32) -> Result<u32, QueueError> {
        let mut command = Command::admin(AdminOpcode::GET_FEATURES);
        command.sqe.cdw10 = GetFeaturesCdw10::new().with_fid(fid).into_bits();
        command.sqe.cdw11 = cdw11;
        Ok(self.admin(&command)?.dw0)
    }

    /// Set Features (Base 5.1.25) of a feature without data; completion Dword 0.
    pub fn set_feature(&mut self, fid: FeatureId, cdw11: u32) -> Result<u32, QueueError> {
        let mut command = Command::admin(AdminOpcode::SET_FEATURES);
        command.sqe.cdw10 = SetFeaturesCdw10::new().with_fid(fid).into_bits();
        command.sqe.cdw11 = cdw11;
        Ok(self.admin(&command)?.dw0)
    }

    /// Set Features, Host Identifier (Base 5.1.25.1.28), of 128 bits: by it reservations know their host, at whichever controllers.
    ///
    /// # Errors
    /// The controller's, which may have its own, or takes none after the first one.
    pub fn set_host_identifier(&mut self, identifier: [u8; 16]) -> Result<(), DriverError> {
        let mut command = Command::admin(AdminOpcode::SET_FEATURES);
        command.sqe.cdw10 = SetFeaturesCdw10::new().with_fid(FeatureId::HOST_IDENTIFIER).into_bits();
        command.sqe.cdw11 = HostIdentifierFeature::new().with_exhid(true).into_bits();
        self.admin_write(&command, &identifier).map(drop)
    }

    /// Get Log Page (Base 5.1.12): `len` bytes, a multiple of 4, from a byte offset.
    pub fn get_log_page(&mut self, lid: LogId, nsid: NamespaceId, offset: u64, len: usize) -> Result<Vec<u8>, DriverError> {
        assert!(len > 0 && len.is_multiple_of(4), "a log page of {len} bytes");
        let dwords_z = (len / 4 - 1) as u32;
        let mut command = Command::admin(AdminOpcode::GET_LOG_PAGE);
        command.sqe.nsid = nsid;
        command.sqe.cdw10 = GetLogPageCdw10::new().with_lid(lid).with_numdl_z(dwords_z as u16).into_bits();
        command.sqe.cdw11 = GetLogPageCdw11::new().with_numdu_z((dwords_z >> 16) as u16).into_bits();
        command.sqe.cdw12 = offset as u32;
        command.sqe.cdw13 = (offset >> 32) as u32;
        self.admin_read(&command, len)
    }

    /// Abort (Base 5.1.1) of a command in flight, the admin queue's own or another's; false: it was not aborted before this command has
    /// completed, and ends by itself, or was over already.
    ///
    /// # Errors
    /// [`DriverError::AbortLimit`] while as many that were waited for in vain are still in flight as the controller takes at once (ACL).
    pub fn abort(&mut self, sqid: QueueId, cid: CommandId) -> Result<bool, DriverError> {
        self.settle_late()?;
        let most = usize::from(self.identity().map_or(0, |identity| identity.acl_z)) + 1;
        if self.late.iter().filter(|late| late.aborts && late.cid.is_some()).count() >= most {
            return Err(DriverError::AbortLimit { most });
        }
        let mut command = Command::admin(AdminOpcode::ABORT);
        command.sqe.cdw10 = AbortCdw10::new().with_sqid(sqid).with_cid(cid).into_bits();
        Ok(!AbortResult::from_bits(self.admin(&command)?.dw0).not_aborted())
    }

    /// Format NVM (Base 5.1.10): all data of the namespace are lost. The namespace as it is then.
    ///
    /// # Errors
    /// [`DriverError::NotOffered`], also where the controller would format or erase other namespaces along with it. A controller that takes
    /// longer than [`Options::timeout`](crate::Options::timeout) goes on formatting after [`QueueError::Timeout`].
    pub fn format(&mut self, namespace: &Namespace, format: &Format) -> Result<Namespace, DriverError> {
        let identity = self.identity().ok_or(DriverError::NotOffered("formatting before it was started"))?;
        let command = formatting(identity, namespace, *format)?;
        self.admin(&command)?;
        self.namespace(namespace.nsid())
    }

    /// Places an Asynchronous Event Request (Base 5.1.2). Its completion comes through [`poll_event`](Self::poll_event).
    pub fn request_event(&mut self) -> Result<(), QueueError> {
        self.settle_late()?;
        let admin = self.admin_queue();
        admin.submit(&Command::admin(AdminOpcode::ASYNC_EVENT_REQUEST))?;
        admin.ring()
    }

    /// An asynchronous event, if one has come.
    pub fn poll_event(&mut self) -> Result<Option<Cqe>, QueueError> {
        loop {
            let admin = self.admin_queue();
            let event = admin.next_possible()?;
            admin.ring()?;
            let Some(at) = event.and_then(|cqe| self.late.iter().position(|late| late.cid == Some(cqe.cid))) else {
                return Ok(event);
            };
            // No event: a command that was waited for in vain.
            self.late.swap_remove(at);
        }
    }

    /// Has the controller tell of namespaces that change, if it can: [`namespaces_changed`](Self::namespaces_changed).
    pub fn watch_namespaces(&mut self) -> Result<(), DriverError> {
        if !self.identity().is_some_and(|identity| identity.oaes.namespace_attribute()) {
            return Ok(());
        }
        let notices = AsyncEventFeature::new().with_namespace_attribute(true);
        self.set_feature(FeatureId::ASYNC_EVENT_CONFIGURATION, notices.into_bits())?;
        Ok(self.request_event()?)
    }

    /// Whether it has told of some since the last call. One look, where it has told of nothing.
    pub fn namespaces_changed(&mut self) -> Result<bool, DriverError> {
        let Some(cqe) = self.poll_event()? else { return Ok(false) };
        let status = cqe.status();
        if !status.is_success() {
            return Err(
                QueueError::Failed { qid: QueueId::ADMIN, opcode: AdminOpcode::ASYNC_EVENT_REQUEST.0, cqe, status }.into()
            );
        }
        let event = AsyncEvent::from(AsyncEventDw0::from_bits(cqe.dw0));
        // It is silent about events of this type until their page is read. Whatever comes of that, this one is known, and the next is asked for.
        let read = self.get_log_page(event.lid, NamespaceId::BROADCAST, 0, PAGE_SIZE);
        self.request_event()?;
        if event == AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED {
            return Ok(true);
        }
        read.map(|_| false)
    }

    /// Asks for I/O queue pairs (Base 5.1.25.1.5); how many were given.
    pub(crate) fn request_queues(&mut self, wanted: u16) -> Result<u16, DriverError> {
        let wanted_z = wanted.min(u16::MAX - 1) - 1;
        let request = NumberOfQueuesFeature::new().with_nsq_z(wanted_z).with_ncq_z(wanted_z);
        let dw0 = self.set_feature(FeatureId::NUMBER_OF_QUEUES, request.into_bits())?;
        let given = NumberOfQueuesFeature::from_bits(dw0);
        Ok(given.nsq_z().min(given.ncq_z()).min(wanted_z) + 1)
    }

    pub(crate) fn create_queues(&mut self, queue: &QueuePair, vector: Option<u16>) -> Result<(), QueueError> {
        let qsize_z = to_zeros_based(queue.entries()).expect("queue sizes fit");
        let cdw10 = CreateQueueCdw10::new().with_qid(queue.id()).with_qsize_z(qsize_z).into_bits();
        let mut create = Command::admin(AdminOpcode::CREATE_IO_CQ);
        create.sqe.dptr.prp1 = queue.cq_range().iova;
        create.sqe.cdw10 = cdw10;
        let cdw11 = CreateCqCdw11::new().with_pc(true).with_ien(vector.is_some()).with_iv(vector.unwrap_or(0));
        create.sqe.cdw11 = cdw11.into_bits();
        self.admin(&create)?;
        let mut create = Command::admin(AdminOpcode::CREATE_IO_SQ);
        create.sqe.dptr.prp1 = queue.sq_range().iova;
        create.sqe.cdw10 = cdw10;
        create.sqe.cdw11 = CreateSqCdw11::new().with_pc(true).with_cqid(queue.id()).into_bits();
        let created = self.admin(&create);
        if created.is_err() {
            // Best effort: what is reported is why the submission queue could not be made.
            let _ = self.delete_queue(AdminOpcode::DELETE_IO_CQ, queue.id());
        }
        created.map(drop)
    }

    pub(crate) fn delete_queues(&mut self, id: QueueId) -> Result<(), QueueError> {
        self.delete_queue(AdminOpcode::DELETE_IO_SQ, id)?;
        self.delete_queue(AdminOpcode::DELETE_IO_CQ, id)
    }

    fn delete_queue(&mut self, opcode: AdminOpcode, id: QueueId) -> Result<(), QueueError> {
        let mut delete = Command::admin(opcode);
        delete.sqe.cdw10 = DeleteQueueCdw10::new().with_qid(id).into_bits();
        self.admin(&delete).map(drop)
    }

    /// Doorbell Buffer Config (Base 5.2.5), for the queue pairs created from now on.
    pub(crate) fn configure_shadow_doorbells(&mut self) -> Result<(), DriverError> {
        let shadow = Shadow { doorbells: self.memory.alloc(PAGE_SIZE)?, events: self.memory.alloc(PAGE_SIZE)? };
        let identity = self.identity().ok_or(DriverError::NoShadowDoorbells)?;
        let command = shadowing(identity, shadow.doorbells.iova(), shadow.events.iova())?;
        self.admin(&command)?;
        self.doorbells.shadow = Some(shadow);
        Ok(())
    }

    /// Sets Memory Space and Bus Master in the PCI Command register.
    pub(crate) fn enable_bus_master(&self) -> Result<(), DriverError> {
        let mut transport = self.transport.get();
        let mut bytes = [0; 2];
        let at = pci::offset::COMMAND as u64;
        transport.region_read(CONFIG, at, &mut bytes).map_err(during("reading the PCI Command register"))?;
        let command = pci::Command::from_bits(u16::from_le_bytes(bytes)).with_memory_space(true).with_bus_master(true);
        let bytes = command.into_bits().to_le_bytes();
        transport.region_write(CONFIG, at, &bytes).map_err(during("writing the PCI Command register"))
    }

    /// Resets the PCI function by its own register (Initiate Function Level Reset). All queue pairs are dead then, and the configuration
    /// is as after power-on; [`start`](Self::start) brings it up again.
    ///
    /// # Errors
    /// [`DriverError::NoFunctionReset`] when the function does not offer it.
    pub fn function_level_reset(&mut self) -> Result<(), DriverError> {
        let at = self.find_capability(CapabilityId::PCI_EXPRESS)?.ok_or(DriverError::NoFunctionReset)?;
        let mut bytes = [0; size_of::<PciExpressCapability>()];
        self.transport.get().region_read(CONFIG, at, &mut bytes).map_err(during("reading PCI capabilities"))?;
        let express = PciExpressCapability::read_from_bytes(&bytes).expect("as many bytes");
        if !express.device_capabilities.function_level_reset() {
            return Err(DriverError::NoFunctionReset);
        }
        self.enabled = None;
        self.doorbells.shadow = None;
        let control = express.device_control.with_initiate_function_level_reset(true).into_bits().to_le_bytes();
        let at = at + offset_of!(PciExpressCapability, device_control) as u64;
        self.transport.get().region_write(CONFIG, at, &control).map_err(during("resetting the function"))
    }

    /// Where a capability is in configuration space.
    pub(crate) fn find_capability(&self, id: CapabilityId) -> Result<Option<u64>, DriverError> {
        let mut transport = self.transport.get();
        let mut read = |at: u64| {
            let mut bytes = [0; 2];
            transport.region_read(CONFIG, at, &mut bytes).map_err(during("reading PCI capabilities"))?;
            Ok::<_, DriverError>(bytes)
        };
        let mut at = u64::from(read(pci::offset::CAPABILITIES as u64)?[0] & !3);
        // The list is the device's word: no more capabilities than fit into the space.
        for _ in 0..pci::CONFIG_SIZE / 4 {
            if at == 0 {
                return Ok(None);
            }
            let [found, next] = read(at)?;
            if found == id.0 {
                return Ok(Some(at));
            }
            at = u64::from(next & !3);
        }
        Err(DriverError::CapabilityLoop)
    }
}

impl DriverError {
    /// Whether it only was not there in time: the controller, its answer to a message, or the end of a command.
    pub fn is_timeout(&self) -> bool {
        match self {
            Self::NotReady { .. } | Self::Queue(QueueError::Timeout { .. }) => true,
            Self::Connect { source, .. } | Self::Transport { source, .. } => {
                matches!(source, TransportError::VfioUser(ClientError::Timeout { .. }))
            }
            _ => false,
        }
    }

    /// The status, when it was the controller that refused.
    pub fn status(&self) -> Option<Status> {
        match self {
            Self::Queue(error) => error.status(),
            _ => None,
        }
    }
}

/// Format NVM, where the controller formats and erases this namespace alone.
pub(crate) fn formatting(
    identity: &IdentifyController,
    namespace: &Namespace,
    format: Format,
) -> Result<Command, DriverError> {
    let command = namespace.format(&format)?;
    let (fna, erases) = (identity.fna, format.erase != SecureErase::NONE);
    if !identity.oacs.format() {
        return Err(DriverError::NotOffered("Format NVM"));
    }
    if format.erase == SecureErase::CRYPTOGRAPHIC && !fna.cryptographic_erase() {
        return Err(DriverError::NotOffered("a cryptographic erase"));
    }
    if identity.nn > 1 && (fna.format_all() || fna.erase_all() && erases) {
        return Err(DriverError::NotOffered("formatting one namespace without the others"));
    }
    Ok(command)
}

/// Doorbell Buffer Config, of two pages.
pub(crate) fn shadowing(identity: &IdentifyController, doorbells: u64, events: u64) -> Result<Command, DriverError> {
    if !identity.oacs.doorbell_buffer() {
        return Err(DriverError::NoShadowDoorbells);
    }
    let mut command = Command::admin(AdminOpcode::DOORBELL_BUFFER_CONFIG);
    command.sqe.dptr.prp1 = doorbells;
    command.sqe.dptr.prp2 = events;
    Ok(command)
}

/// What limits Write Zeroes, in units of so many bits.
fn zeroes_limit(limits: &IdentifyControllerNvm, unit: u32) -> u64 {
    let bytes = |exponent: u8| 1_u64.checked_shl(unit + u32::from(exponent)).filter(|_| exponent > 0);
    let both = [limits.wzsl, limits.wzdsl];
    both.into_iter().filter_map(bytes).min().unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros as _;

    use super::*;

    #[test]
    fn zeroes_are_limited_by_what_the_controller_says() {
        let limit = |wzsl, wzdsl| {
            let mut limits = IdentifyControllerNvm::new_zeroed();
            (limits.wzsl, limits.wzdsl) = (wzsl, wzdsl);
            zeroes_limit(&limits, 12)
        };
        assert_eq!(
            [limit(0, 0), limit(3, 0), limit(3, 1), limit(0, 4), limit(0, 255)],
            [u64::MAX, 32 << 10, 8 << 10, 64 << 10, u64::MAX]
        );
    }
}
