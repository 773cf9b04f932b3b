//! Format NVM (Base 5.1.10, NVM 4.1.2).

use std::rc::Rc;

use millrace_block::MetadataFormat;
use millrace_nvme_spec::{
    admin::{FormatCdw10, SecureErase},
    command::Sqe,
    log::ParameterErrorLocation,
    status::Status,
};

use super::{
    super::{
        controller::{CommandToken, Controller, Outcome},
        namespace::NewFormat,
        reservation::Rights,
    },
    Progress,
    identify::{FORMATS, formats},
    jobs::Work,
};

impl Controller {
    /// Format NVM: commands in flight on the namespace finish first, later ones are refused until it is done. Every format
    /// erases the data, so a User Data Erase is no more than that, and a Cryptographic Erase is one where the volume forgets a key.
    pub(super) fn format_nvm(&mut self, token: CommandToken, sqe: &Sqe) -> Progress {
        let cdw10 = FormatCdw10::from_bits(sqe.cdw10);
        let attached = Rc::clone(self.active(sqe.nsid)?);
        let index = usize::from(cdw10.lbaf());
        if index >= formats(&attached.namespace) {
            return Err(Status::INVALID_FORMAT);
        }
        let protection = cdw10.pi();
        let shown = MetadataFormat { protection, extended: cdw10.mset(), first: cdw10.pil() };
        let metadata = (index >= FORMATS.len()).then_some(shown);
        // Protection information need metadata.
        if protection > 3 || (protection != 0 && metadata.is_none()) {
            return Err(self.refuse(ParameterErrorLocation::dword(10, 5), Status::INVALID_FORMAT));
        }
        let format = NewFormat { block_size: FORMATS[index % FORMATS.len()], metadata };
        let erases = match cdw10.ses() {
            SecureErase::NONE | SecureErase::USER_DATA => true,
            SecureErase::CRYPTOGRAPHIC => attached.namespace.volume.erases_by_key(),
            _ => false,
        };
        if !erases {
            return Err(self.invalid(10, 9));
        }
        if self.admin.jobs.concern(attached.nsid) {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        attached.check_writable(&attached.geometry.get())?;
        self.check_rights(&attached, Rights::WRITE)?;
        attached.formatting.set(true);
        // Those as well that went another way before.
        let drain = self.namespaces.ways(&attached).collect();
        self.admin.jobs.push(token, Work::Format { attached, format }, drain);
        Ok(Outcome::Held)
    }
}
