//! Namespace management: namespaces are made, shown to controllers, taken from them and deleted (Base 5.1.20, 5.1.21).

use millrace_nvme_spec::{
    AdminOpcode, ControllerId, NamespaceId,
    admin::{
        NamespaceAttachmentCdw10, NamespaceAttachmentSelect, NamespaceManagementCdw10, NamespaceManagementData,
        NamespaceManagementSelect,
    },
    identify::{ControllerList, FormattedLbaSize, IdentifyController, NamespaceSharing, ProtectionSettings},
};
use zerocopy::{FromZeros, IntoBytes};

use crate::{command::Command, controller::Controller, error::DriverError, namespace::CommandError};

/// What a namespace is to be like when it is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NewNamespace {
    /// Its blocks. All of them are allocated.
    pub blocks: u64,
    /// Their format: an index as in [`Format`](crate::Format), up to 15.
    pub format: u8,
    /// Several controllers may have it at once.
    pub shared: bool,
}

impl Controller {
    /// Namespace Management, Create. No controller has it before it is [attached](Self::attach_namespace).
    ///
    /// # Errors
    /// [`DriverError::NotOffered`]; [`CommandError::BadFormat`] and [`CommandError::BadCount`] for what no command can ask for; the
    /// controller's own, of which Namespace Insufficient Capacity is one.
    pub fn create_namespace(&mut self, wanted: &NewNamespace) -> Result<NamespaceId, DriverError> {
        let NewNamespace { blocks, format, shared } = *wanted;
        if format > 15 {
            return Err(CommandError::BadFormat { index: format, why: "a namespace is made in one of the first 16" }.into());
        }
        if blocks == 0 {
            return Err(CommandError::BadCount(millrace_block::BlockCount(0)).into());
        }
        let mut data = NamespaceManagementData::new_zeroed();
        (data.nsze, data.ncap) = (blocks, blocks);
        data.flbas = FormattedLbaSize::new().with_index_low(format);
        data.dps = ProtectionSettings::new();
        data.nmic = NamespaceSharing::new().with_shared(shared);
        let command = managing(self.managed()?, NamespaceManagementSelect::CREATE, NamespaceId::NONE)?;
        Ok(NamespaceId(self.admin_write(&command, data.as_bytes())?.dw0))
    }

    /// Namespace Management, Delete: its data are lost, and all controllers that have it lose it.
    ///
    /// # Errors
    /// [`DriverError::NotOffered`], also for [`NamespaceId::BROADCAST`], which would be every one; the controller's.
    pub fn delete_namespace(&mut self, nsid: NamespaceId) -> Result<(), DriverError> {
        let command = managing(self.managed()?, NamespaceManagementSelect::DELETE, nsid)?;
        Ok(self.admin(&command).map(drop)?)
    }

    /// Namespace Attachment, Attach: these controllers have it from now on, all of them or none.
    ///
    /// # Errors
    /// [`DriverError::NotOffered`]; [`CommandError::BadRangeCount`] for no controller or more than a list holds; the controller's.
    pub fn attach_namespace(&mut self, nsid: NamespaceId, controllers: &[ControllerId]) -> Result<(), DriverError> {
        self.attaching(NamespaceAttachmentSelect::ATTACH, nsid, controllers)
    }

    /// Namespace Attachment, Detach: these controllers do not have it any more.
    ///
    /// # Errors
    /// As [`attach_namespace`](Self::attach_namespace).
    pub fn detach_namespace(&mut self, nsid: NamespaceId, controllers: &[ControllerId]) -> Result<(), DriverError> {
        self.attaching(NamespaceAttachmentSelect::DETACH, nsid, controllers)
    }

    fn attaching(
        &mut self,
        select: NamespaceAttachmentSelect,
        nsid: NamespaceId,
        controllers: &[ControllerId],
    ) -> Result<(), DriverError> {
        let command = attachment(self.managed()?, select, nsid)?;
        if controllers.is_empty() || controllers.len() > ControllerList::CAPACITY {
            return Err(CommandError::BadRangeCount(controllers.len()).into());
        }
        let mut ascending = controllers.to_vec();
        ascending.sort_unstable_by_key(|id| id.0);
        self.admin_write(&command, ControllerList::new(ascending).as_bytes()).map(drop)
    }

    fn managed(&self) -> Result<&IdentifyController, DriverError> {
        self.identity().ok_or(DriverError::NotOffered("managing namespaces before it was started"))
    }
}

/// Namespace Management of one namespace.
pub(crate) fn managing(
    identity: &IdentifyController,
    select: NamespaceManagementSelect,
    nsid: NamespaceId,
) -> Result<Command, DriverError> {
    can_manage(identity, nsid)?;
    let mut command = Command::admin(AdminOpcode::NAMESPACE_MANAGEMENT);
    command.sqe.nsid = nsid;
    command.sqe.cdw10 = NamespaceManagementCdw10::new().with_sel(select).into_bits();
    Ok(command)
}

/// Namespace Attachment, without its list of controllers.
pub(crate) fn attachment(
    identity: &IdentifyController,
    select: NamespaceAttachmentSelect,
    nsid: NamespaceId,
) -> Result<Command, DriverError> {
    can_manage(identity, nsid)?;
    let mut command = Command::admin(AdminOpcode::NAMESPACE_ATTACHMENT);
    command.sqe.nsid = nsid;
    command.sqe.cdw10 = NamespaceAttachmentCdw10::new().with_sel(select).into_bits();
    Ok(command)
}

fn can_manage(identity: &IdentifyController, nsid: NamespaceId) -> Result<(), DriverError> {
    if !identity.oacs.namespace_management() {
        return Err(DriverError::NotOffered("Namespace Management"));
    }
    if nsid == NamespaceId::BROADCAST {
        return Err(DriverError::NotOffered("managing all namespaces at once"));
    }
    Ok(())
}
