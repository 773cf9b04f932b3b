//! What few controllers have: directives (Base 5.1.6, 5.1.7), Virtualization Management (Base 5.2.6), Lockdown (Base 5.1.15), Get LBA Status
//! (NVM 4.2.1), features that are saved, and a clock.
//!
//! As with [maintenance](crate::maintenance), what a controller does not advertise (OACS, ONCS) is not made.

use millrace_block::{BlockCount, Lba};
use millrace_nvme_spec::{
    AdminOpcode, ControllerId, NamespaceId,
    features::{FeatureId, FeatureSelect, GetFeaturesCdw10, SetFeaturesCdw10, Timestamp, TimestampAttributes},
    identify::IdentifyController,
    optional::{
        DirectiveCdw11, DirectiveOrder, DirectiveParameters, DirectiveQuery, DirectiveType, EnableDirectiveCdw12,
        LbaStatusAction, LbaStatusCdw13, LbaStatusDescriptor, LbaStatusList, LockdownCdw10, LockdownInterface,
        LockdownScope, ResourceType, StreamOrder, StreamParameters, VirtualizationAction, VirtualizationCdw10,
    },
};
use zerocopy::{FromBytes, IntoBytes};

use crate::{
    command::Command,
    controller::Controller,
    error::DriverError,
    maintenance::{bad, offered},
    namespace::{CommandError, Namespace},
};

const DIRECTIVES: &str = "Directive Send and Receive";
const VIRTUALIZATION: &str = "Virtualization Management";
const LOCKDOWN: &str = "Lockdown";
const LBA_STATUS: &str = "Get LBA Status";

/// What Virtualization Management does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Virtualization {
    /// A primary controller has so many flexible resources from its next reset on.
    Allocate(ResourceType, u16),
    /// A secondary controller that is offline has so many from now on.
    Assign(ResourceType, u16),
    /// A secondary controller can be used.
    Online,
    /// It cannot any more.
    Offline,
}

/// What a controller is to refuse from now on, or to take again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lockdown {
    /// What `what` is.
    pub scope: LockdownScope,
    /// An opcode, or the identifier of a feature.
    pub what: u8,
    /// It is refused; else it is taken again.
    pub prohibits: bool,
    /// From whom.
    pub interface: LockdownInterface,
}

/// Which blocks may not be readable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LbaStatus {
    /// They, as far as there was room for them.
    pub ranges: Vec<LbaStatusDescriptor>,
    /// Why there are no more (CMPC).
    pub condition: u8,
}

impl Controller {
    /// Directive Receive, Identify: which directives there are for a namespace, and which are enabled.
    ///
    /// # Errors
    /// [`DriverError::NotOffered`]; the controller's. So of all directives.
    pub fn directives(&mut self, nsid: NamespaceId) -> Result<Box<DirectiveParameters>, DriverError> {
        let len = size_of::<DirectiveParameters>();
        let command = query(self.known()?, nsid, (DirectiveType::IDENTIFY, DirectiveQuery::PARAMETERS), len)?;
        let bytes = self.admin_read(&command, len)?;
        Ok(Box::new(DirectiveParameters::read_from_bytes(&bytes).expect("as many bytes as the structure has")))
    }

    /// Directive Send, Identify: enables a directive for a namespace, or disables it.
    ///
    /// # Errors
    /// Also [`CommandError::BadField`] for Identify itself, which always is.
    pub fn enable_directive(&mut self, nsid: NamespaceId, kind: DirectiveType, enable: bool) -> Result<(), DriverError> {
        let command = enabling(self.known()?, nsid, kind, enable)?;
        Ok(self.admin(&command).map(drop)?)
    }

    /// Directive Receive, Streams: how many there may be, and how large writes to them should be.
    pub fn streams(&mut self, nsid: NamespaceId) -> Result<StreamParameters, DriverError> {
        let len = size_of::<StreamParameters>();
        let command = query(self.known()?, nsid, (DirectiveType::STREAMS, DirectiveQuery::PARAMETERS), len)?;
        let bytes = self.admin_read(&command, len)?;
        Ok(StreamParameters::read_from_bytes(&bytes).expect("as many bytes as the structure has"))
    }

    /// Directive Receive, Streams: those that are open.
    pub fn open_streams(&mut self, nsid: NamespaceId) -> Result<Vec<u16>, DriverError> {
        // Their number before them, in whole dwords.
        let len = (usize::from(self.streams(nsid)?.nso) + 1).next_multiple_of(2) * 2;
        let command = query(self.known()?, nsid, (DirectiveType::STREAMS, DirectiveQuery::STREAMS_STATUS), len)?;
        Ok(stream_identifiers(&self.admin_read(&command, len)?))
    }

    /// Directive Receive, Streams: so many are this namespace's alone; how many it got.
    ///
    /// # Errors
    /// Also [`CommandError::BadField`] for none.
    pub fn allocate_streams(&mut self, nsid: NamespaceId, count: u16) -> Result<u16, DriverError> {
        let command = allocating(self.known()?, nsid, count)?;
        Ok(self.admin(&command)?.dw0 as u16)
    }

    /// Directive Send, Streams: a stream is open no more.
    ///
    /// # Errors
    /// Also [`CommandError::BadField`] for 0, which is none.
    pub fn release_stream(&mut self, nsid: NamespaceId, stream: u16) -> Result<(), DriverError> {
        let command = releasing(self.known()?, nsid, Some(stream))?;
        Ok(self.admin(&command).map(drop)?)
    }

    /// Directive Send, Streams: those that were allocated are the NVM subsystem's again.
    pub fn release_streams(&mut self, nsid: NamespaceId) -> Result<(), DriverError> {
        let command = releasing(self.known()?, nsid, None)?;
        Ok(self.admin(&command).map(drop)?)
    }

    /// Virtualization Management of a primary or secondary controller; how many resources it has changed.
    ///
    /// # Errors
    /// [`DriverError::NotOffered`]; [`CommandError::BadField`]; the controller's.
    pub fn virtualize(&mut self, controller: ControllerId, wanted: Virtualization) -> Result<u16, DriverError> {
        let command = virtualization(self.known()?, controller, wanted)?;
        Ok(self.admin(&command)?.dw0 as u16)
    }

    /// Lockdown: what is prohibited stays so until the controller's power goes, or it is allowed again.
    ///
    /// # Errors
    /// [`DriverError::NotOffered`]; [`CommandError::BadField`]; the controller's.
    pub fn lockdown(&mut self, wanted: &Lockdown) -> Result<(), DriverError> {
        let command = locking(self.known()?, *wanted)?;
        Ok(self.admin(&command).map(drop)?)
    }

    /// Get LBA Status: up to so many ranges of blocks that may not be readable, among `blocks` from `lba` on; 0: all behind it.
    ///
    /// # Errors
    /// [`DriverError::NotOffered`]; [`CommandError::OutOfRange`]; [`CommandError::BadField`]; [`CommandError::TooLarge`] for more ranges than
    /// one command returns; the controller's.
    pub fn lba_status(
        &mut self,
        namespace: &Namespace,
        action: LbaStatusAction,
        (lba, blocks): (Lba, u16),
        ranges: usize,
    ) -> Result<LbaStatus, DriverError> {
        let limit = self.max_transfer();
        let (command, len) = lba_status(self.known()?, namespace, action, (lba, blocks), (ranges, limit))?;
        Ok(LbaStatus::read(&self.admin_read(&command, len)?))
    }

    /// Get Features of a feature without data: its value now, by default, or as it is saved, or what can be done with it (SEL).
    ///
    /// # Errors
    /// [`DriverError::NotOffered`] for all but the value now (ONCS); the controller's.
    pub fn select_feature(&mut self, fid: FeatureId, select: FeatureSelect, cdw11: u32) -> Result<u32, DriverError> {
        let command = selecting(self.known()?, fid, select, cdw11)?;
        Ok(self.admin(&command)?.dw0)
    }

    /// Set Features of a feature without data, to be kept when the controller is reset or its power goes (SV); completion Dword 0.
    ///
    /// # Errors
    /// [`DriverError::NotOffered`] (ONCS); the controller's.
    pub fn save_feature(&mut self, fid: FeatureId, cdw11: u32) -> Result<u32, DriverError> {
        let command = saving(self.known()?, fid, cdw11)?;
        Ok(self.admin(&command)?.dw0)
    }

    /// The controller's clock (Get Features, Timestamp).
    ///
    /// # Errors
    /// [`DriverError::NotOffered`] (ONCS); the controller's.
    pub fn timestamp(&mut self) -> Result<Timestamp, DriverError> {
        let command = timing(self.known()?, AdminOpcode::GET_FEATURES)?;
        let bytes = self.admin_read(&command, size_of::<Timestamp>())?;
        Ok(Timestamp::read_from_bytes(&bytes).expect("as many bytes as the structure has"))
    }

    /// Sets it, in milliseconds since 1970 (Set Features, Timestamp).
    ///
    /// # Errors
    /// As [`timestamp`](Self::timestamp).
    pub fn set_timestamp(&mut self, millis: u64) -> Result<(), DriverError> {
        let command = timing(self.known()?, AdminOpcode::SET_FEATURES)?;
        let now = Timestamp::new(millis, TimestampAttributes::new());
        self.admin_write(&command, now.as_bytes()).map(drop)
    }
}

impl LbaStatus {
    /// What a controller has returned. How many ranges that is is its word, and those that are not there are left out.
    fn read(bytes: &[u8]) -> Self {
        let (list, rest) = LbaStatusList::read_from_prefix(bytes).expect("the command was made for it");
        let (entries, _) = rest.as_chunks::<{ size_of::<LbaStatusDescriptor>() }>();
        let ranges = entries.iter().take(list.nlsd as usize).map(|bytes| zerocopy::transmute!(*bytes)).collect();
        Self { ranges, condition: list.cmpc }
    }
}

/// A Directive Send or Receive; of one that moves data the bytes, whole dwords.
fn directive(
    identity: &IdentifyController,
    opcode: AdminOpcode,
    nsid: NamespaceId,
    cdw11: DirectiveCdw11,
    bytes: usize,
) -> Result<Command, DriverError> {
    offered(identity.oacs.directives(), DIRECTIVES)?;
    let mut command = Command::admin(opcode);
    command.sqe.nsid = nsid;
    command.sqe.cdw10 = (bytes / 4).saturating_sub(1) as u32;
    command.sqe.cdw11 = cdw11.into_bits();
    Ok(command)
}

fn query(
    identity: &IdentifyController,
    nsid: NamespaceId,
    (kind, what): (DirectiveType, DirectiveQuery),
    bytes: usize,
) -> Result<Command, DriverError> {
    let cdw11 = DirectiveCdw11::new().with_dtype(kind).with_doper(what.0);
    directive(identity, AdminOpcode::DIRECTIVE_RECEIVE, nsid, cdw11, bytes)
}

fn enabling(
    identity: &IdentifyController,
    nsid: NamespaceId,
    kind: DirectiveType,
    enable: bool,
) -> Result<Command, DriverError> {
    let cdw11 = DirectiveCdw11::new().with_dtype(DirectiveType::IDENTIFY).with_doper(DirectiveOrder::ENABLE.0);
    let mut command = directive(identity, AdminOpcode::DIRECTIVE_SEND, nsid, cdw11, 0)?;
    if kind == DirectiveType::IDENTIFY {
        return bad(DIRECTIVES, "the Identify directive is always enabled");
    }
    command.sqe.cdw12 = EnableDirectiveCdw12::new().with_endir(enable).with_dtype(kind).into_bits();
    Ok(command)
}

fn allocating(identity: &IdentifyController, nsid: NamespaceId, count: u16) -> Result<Command, DriverError> {
    let mut command = query(identity, nsid, (DirectiveType::STREAMS, DirectiveQuery::STREAMS_ALLOCATE), 0)?;
    if count == 0 {
        return bad(DIRECTIVES, "no stream is allocated");
    }
    command.sqe.cdw12 = count.into();
    Ok(command)
}

/// One stream's identifier, or all that was allocated.
fn releasing(identity: &IdentifyController, nsid: NamespaceId, stream: Option<u16>) -> Result<Command, DriverError> {
    let order = if stream.is_some() { StreamOrder::RELEASE_IDENTIFIER } else { StreamOrder::RELEASE_RESOURCES };
    let cdw11 = DirectiveCdw11::new().with_dtype(DirectiveType::STREAMS).with_doper(order.0);
    let cdw11 = cdw11.with_dspec(stream.unwrap_or(0));
    let command = directive(identity, AdminOpcode::DIRECTIVE_SEND, nsid, cdw11, 0)?;
    if stream == Some(0) {
        return bad(DIRECTIVES, "a stream's identifier is not 0");
    }
    Ok(command)
}

/// Of what Get Status of the Streams directive has returned: their number, which is the controller's word, and they.
fn stream_identifiers(bytes: &[u8]) -> Vec<u16> {
    let mut words = bytes.as_chunks::<2>().0.iter().map(|word| u16::from_le_bytes(*word));
    let count = words.next().unwrap_or(0);
    words.take(count.into()).collect()
}

fn virtualization(
    identity: &IdentifyController,
    controller: ControllerId,
    wanted: Virtualization,
) -> Result<Command, DriverError> {
    offered(identity.oacs.virtualization(), VIRTUALIZATION)?;
    let (action, resource, count) = match wanted {
        Virtualization::Allocate(resource, count) => (VirtualizationAction::PRIMARY_FLEXIBLE, resource, count),
        Virtualization::Assign(resource, count) => (VirtualizationAction::SECONDARY_ASSIGN, resource, count),
        Virtualization::Online => (VirtualizationAction::SECONDARY_ONLINE, ResourceType::QUEUES, 0),
        Virtualization::Offline => (VirtualizationAction::SECONDARY_OFFLINE, ResourceType::QUEUES, 0),
    };
    if ![ResourceType::QUEUES, ResourceType::INTERRUPTS].contains(&resource) {
        return bad(VIRTUALIZATION, "there are no such resources");
    }
    let mut command = Command::admin(AdminOpcode::VIRTUALIZATION_MANAGEMENT);
    command.sqe.cdw10 = VirtualizationCdw10::new().with_act(action).with_rt(resource).with_cntlid(controller).into_bits();
    command.sqe.cdw11 = count.into();
    Ok(command)
}

fn locking(identity: &IdentifyController, wanted: Lockdown) -> Result<Command, DriverError> {
    offered(identity.oacs.lockdown(), LOCKDOWN)?;
    let Lockdown { scope, what, prohibits, interface } = wanted;
    let scopes = [LockdownScope::ADMIN_OPCODE, LockdownScope::FEATURE, LockdownScope::MI_OPCODE, LockdownScope::PCIE_OPCODE];
    if !scopes.contains(&scope) {
        return bad(LOCKDOWN, "there is no such scope");
    }
    if ![LockdownInterface::ADMIN, LockdownInterface::BOTH, LockdownInterface::OUT_OF_BAND].contains(&interface) {
        return bad(LOCKDOWN, "there is no such interface");
    }
    let mut command = Command::admin(AdminOpcode::LOCKDOWN);
    let cdw10 = LockdownCdw10::new().with_scp(scope).with_prhbt(prohibits).with_ifc(interface);
    command.sqe.cdw10 = cdw10.with_ofi(what).into_bits();
    Ok(command)
}

/// The command, and the bytes that it returns.
fn lba_status(
    identity: &IdentifyController,
    namespace: &Namespace,
    action: LbaStatusAction,
    (lba, blocks): (Lba, u16),
    (ranges, limit): (usize, u64),
) -> Result<(Command, usize), DriverError> {
    offered(identity.oacs.get_lba_status(), LBA_STATUS)?;
    if ![LbaStatusAction::SCAN, LbaStatusAction::TRACKED].contains(&action) {
        return bad(LBA_STATUS, "there is no such action");
    }
    let (size, count) = (namespace.size(), BlockCount(u64::from(blocks).max(1)));
    if lba.checked_add(count).is_none_or(|end| end.0 > size.0) {
        return Err(CommandError::OutOfRange { lba, count, size }.into());
    }
    let len = ranges.saturating_mul(size_of::<LbaStatusDescriptor>()).saturating_add(size_of::<LbaStatusList>());
    if len as u64 > limit {
        return Err(CommandError::TooLarge { bytes: len as u64, limit }.into());
    }
    let mut command = Command::admin(AdminOpcode::GET_LBA_STATUS);
    command.sqe.nsid = namespace.nsid();
    command.sqe.set_cdw10_11(lba.0);
    command.sqe.cdw12 = (len / 4 - 1) as u32;
    command.sqe.cdw13 = LbaStatusCdw13::new().with_rl(blocks).with_atype(action).into_bits();
    Ok((command, len))
}

fn selecting(
    identity: &IdentifyController,
    fid: FeatureId,
    select: FeatureSelect,
    cdw11: u32,
) -> Result<Command, DriverError> {
    offered(select == FeatureSelect::CURRENT || identity.oncs.save_select(), "values of features but those now")?;
    let mut command = Command::admin(AdminOpcode::GET_FEATURES);
    command.sqe.cdw10 = GetFeaturesCdw10::new().with_fid(fid).with_sel(select).into_bits();
    command.sqe.cdw11 = cdw11;
    Ok(command)
}

fn saving(identity: &IdentifyController, fid: FeatureId, cdw11: u32) -> Result<Command, DriverError> {
    offered(identity.oncs.save_select(), "features that are saved")?;
    let mut command = Command::admin(AdminOpcode::SET_FEATURES);
    command.sqe.cdw10 = SetFeaturesCdw10::new().with_fid(fid).with_sv(true).into_bits();
    command.sqe.cdw11 = cdw11;
    Ok(command)
}

/// Get or Set Features.
fn timing(identity: &IdentifyController, opcode: AdminOpcode) -> Result<Command, DriverError> {
    offered(identity.oncs.timestamp(), "a clock (Timestamp)")?;
    let mut command = Command::admin(opcode);
    // The same bits of both.
    command.sqe.cdw10 = GetFeaturesCdw10::new().with_fid(FeatureId::TIMESTAMP).into_bits();
    Ok(command)
}

#[cfg(test)]
mod tests;
