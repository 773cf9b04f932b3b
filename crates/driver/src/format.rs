//! Format NVM: what a namespace can be formatted to, and the command.

use millrace_nvme_spec::{
    AdminOpcode,
    admin::{FormatCdw10, SecureErase},
};

use crate::{
    command::Command,
    namespace::{CommandError, Namespace, PROTECTION_SIZE},
};

/// What a namespace is to be formatted to. All its data are lost, whatever else is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Format {
    /// The block's size and metadata: an index into Identify Namespace's formats (LBAF0 to LBAF63).
    pub index: u8,
    /// How thoroughly the old data go.
    pub erase: SecureErase,
    /// Type of protection information; 0: none.
    pub protection: u8,
    /// They are the first bytes of the metadata.
    pub first: bool,
    /// Metadata are at the end of each block in the data.
    pub extended: bool,
}

impl Namespace {
    /// Format NVM (Base 5.1.10) of this namespace: an admin command, [`Controller::format`](crate::Controller::format) runs it.
    ///
    /// # Errors
    /// [`CommandError::BadFormat`] for what the namespace has not.
    pub fn format(&self, format: &Format) -> Result<Command, CommandError> {
        let Format { index, erase, protection, first, extended } = *format;
        let identify = self.identify();
        let bad = |why| Err(CommandError::BadFormat { index, why });
        let last = usize::from(identify.nlbaf_z) + usize::from(identify.nulbaf);
        let blocks = identify.lbaf.get(usize::from(index)).filter(|blocks| usize::from(index) <= last && blocks.lbads >= 9);
        let Some(blocks) = blocks else { return bad("the namespace has no such format") };
        let types = [true, identify.dpc.type1(), identify.dpc.type2(), identify.dpc.type3()];
        if types.get(usize::from(protection)) != Some(&true) {
            return bad("the namespace has no protection information of that type");
        }
        if protection != 0 && blocks.ms < PROTECTION_SIZE {
            return bad("its metadata have no room for protection information");
        }
        if ![SecureErase::NONE, SecureErase::USER_DATA, SecureErase::CRYPTOGRAPHIC].contains(&erase) {
            return bad("there is no such erase");
        }
        let mut command = Command::admin(AdminOpcode::FORMAT_NVM);
        command.sqe.nsid = self.nsid();
        let cdw10 = FormatCdw10::new().with_lbaf_low(index & 0xf).with_lbaf_high(index >> 4).with_ses(erase);
        command.sqe.cdw10 = cdw10.with_mset(extended).with_pi(protection).with_pil(first).into_bits();
        Ok(command)
    }
}

#[cfg(test)]
mod tests {
    use millrace_nvme_spec::{
        NamespaceId,
        identify::{IdentifyNamespace, LbaFormat, ProtectionCapabilities},
    };
    use zerocopy::FromZeros;

    use super::*;

    #[test]
    fn a_format_is_said_as_the_namespace_has_it_or_refused() {
        let mut identify = Box::new(IdentifyNamespace::new_zeroed());
        (identify.nsze, identify.nlbaf_z) = (1000, 18);
        identify.dpc = ProtectionCapabilities::new().with_type1(true);
        identify.lbaf[0].lbads = 9;
        identify.lbaf[18] = LbaFormat { ms: 8, lbads: 12, ..LbaFormat::default() };
        identify.lbaf[19].lbads = 12;
        let ns = Namespace::new(NamespaceId(7), identify, 4096).unwrap();
        let wanted = Format { index: 18, erase: SecureErase::USER_DATA, protection: 1, first: true, extended: true };
        let command = ns.format(&wanted).unwrap();
        assert_eq!((command.sqe.opcode, command.sqe.nsid, command.data.is_none()), (0x80, NamespaceId(7), true));
        // UDFIL, MSET, PI, PIL, SES, UDFIU.
        assert_eq!(command.sqe.cdw10, 2 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 12);
        assert_eq!(ns.format(&Format::default()).unwrap().sqe.cdw10, 0);
        for wrong in [
            Format { index: 1, ..Format::default() },
            Format { index: 19, ..Format::default() },
            Format { index: 64, ..Format::default() },
            Format { protection: 1, ..Format::default() },
            Format { protection: 2, ..wanted },
            Format { protection: 4, ..wanted },
            Format { erase: SecureErase(3), ..wanted },
        ] {
            assert!(matches!(ns.format(&wrong), Err(CommandError::BadFormat { .. })), "{wrong:?}");
        }
    }
}
