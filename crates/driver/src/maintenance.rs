//! Maintenance of a controller: firmware, security protocols, sanitizing and self-tests (Base 5.1.5, 5.1.8, 5.1.9, 5.1.22 to 5.1.24).
//!
//! A command that the controller does not advertise is not made, nor one that asks for what no controller has.

use millrace_nvme_spec::{
    AdminOpcode, NamespaceId, Status,
    admin::{CommitAction, FirmwareCommitCdw10, SanitizeAction, SanitizeCdw10, SecurityCdw10, SelfTest, SelfTestCdw10},
    identify::IdentifyController,
};

use crate::{command::Command, controller::Controller, error::DriverError, namespace::CommandError};

const DOWNLOAD: &str = "Firmware Image Download";
const COMMIT: &str = "Firmware Commit";
const SECURITY: &str = "Security Send and Receive";
const SANITIZE: &str = "Sanitize";
const SELF_TEST: &str = "Device Self-test";

/// Bytes of a piece of an image, where the controller does not want more.
const PIECE: u64 = 4096;
/// The protocol that is NVM Express's own, of which alone there is an NVMe specific field.
const NVME_PROTOCOL: u8 = 0xea;

/// Which security protocol is spoken, and what of it (SPC-5, "SECURITY PROTOCOL IN command").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SecurityProtocol {
    /// The protocol (SECP). 0 gives information, and takes none.
    pub id: u8,
    /// What the protocol makes of it (SPSP0 and SPSP1).
    pub specific: u16,
    /// The same of protocol EAh (NSSF); 0 for all others.
    pub nvme_specific: u8,
}

/// How all of an NVM subsystem is to be made unreadable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sanitize {
    /// Erase, overwrite, or leave the state of one that has failed.
    pub action: SanitizeAction,
    /// Passes of an overwrite, 1 to 16; 0 for all others.
    pub passes: u8,
    /// What an overwrite writes.
    pub pattern: u32,
    /// It is inverted from pass to pass.
    pub inverts: bool,
    /// One that fails can be left without another one that succeeds.
    pub unrestricted: bool,
    /// Blocks stay allocated.
    pub no_deallocate: bool,
}

impl Controller {
    /// Firmware Image Download (Base 5.1.9) of a whole image, in pieces as the controller wants them (FWUG).
    /// [`commit_firmware`](Self::commit_firmware) puts it into a slot.
    ///
    /// # Errors
    /// [`DriverError::NotOffered`]; [`CommandError::BadField`] for an image that is empty or no whole dwords;
    /// [`CommandError::TooLarge`] when the controller wants larger pieces than a command moves; the controller's.
    pub fn download_firmware(&mut self, image: &[u8]) -> Result<(), DriverError> {
        let (identity, limit) = (self.known()?, self.max_transfer());
        let size = firmware_piece(identity, limit)?;
        if image.is_empty() {
            return bad(DOWNLOAD, "there is no image");
        }
        // All of them are made before the first is sent.
        let pieces = image.chunks(size).zip((0_u64..).step_by(size));
        let commands = pieces.map(|(piece, at)| firmware_download(identity, at, piece.len() as u64, limit));
        let commands = commands.collect::<Result<Vec<_>, _>>()?;
        for (command, piece) in commands.iter().zip(image.chunks(size)) {
            self.admin_write(command, piece)?;
        }
        Ok(())
    }

    /// Firmware Commit (Base 5.1.8): puts what was downloaded into a slot, or has a slot's image used. `Some`: done, and it is used after the
    /// reset that the status names.
    ///
    /// # Errors
    /// [`DriverError::NotOffered`]; [`CommandError::BadField`] for a slot that the controller has not or does not change, and for boot
    /// partitions; the controller's. One that takes longer than [`Options::timeout`](crate::Options::timeout) (MTFA) goes on after
    /// [`QueueError::Timeout`](crate::QueueError::Timeout).
    pub fn commit_firmware(&mut self, slot: u8, action: CommitAction) -> Result<Option<Status>, DriverError> {
        let command = firmware_commit(self.known()?, slot, action)?;
        let Err(error) = self.admin(&command) else { return Ok(None) };
        match error.status().map(Status::code) {
            Some(
                reset @ (Status::FIRMWARE_NEEDS_CONVENTIONAL_RESET
                | Status::FIRMWARE_NEEDS_SUBSYSTEM_RESET
                | Status::FIRMWARE_NEEDS_CONTROLLER_RESET),
            ) => Ok(Some(reset)),
            _ => Err(error.into()),
        }
    }

    /// Security Send (Base 5.1.24). Which namespaces count is the protocol's matter.
    ///
    /// # Errors
    /// [`DriverError::NotOffered`]; [`CommandError::BadField`] for a protocol that takes nothing; [`CommandError::BadField`] and
    /// [`CommandError::TooLarge`] for no data, or more than one command moves; the controller's.
    pub fn security_send(&mut self, nsid: NamespaceId, protocol: SecurityProtocol, data: &[u8]) -> Result<(), DriverError> {
        let (opcode, limit) = (AdminOpcode::SECURITY_SEND, self.max_transfer());
        let command = security(self.known()?, opcode, (nsid, protocol), (data.len(), limit))?;
        self.admin_write(&command, data).map(drop)
    }

    /// Security Receive (Base 5.1.23) of as many bytes, or fewer and zeroes.
    ///
    /// # Errors
    /// As [`security_send`](Self::security_send).
    pub fn security_receive(
        &mut self,
        nsid: NamespaceId,
        protocol: SecurityProtocol,
        len: usize,
    ) -> Result<Vec<u8>, DriverError> {
        let (opcode, limit) = (AdminOpcode::SECURITY_RECEIVE, self.max_transfer());
        let command = security(self.known()?, opcode, (nsid, protocol), (len, limit))?;
        self.admin_read(&command, len)
    }

    /// Sanitize (Base 5.1.22): begins it. All data of all namespaces of the NVM subsystem are lost, whoever has them, and nothing stops it
    /// once it has begun; how far it is the log page ([`LogId::SANITIZE`](crate::spec::log::LogId::SANITIZE)) says.
    ///
    /// # Errors
    /// [`DriverError::NotOffered`] for what is not in SANICAP; [`CommandError::BadField`]; the controller's.
    pub fn sanitize(&mut self, wanted: &Sanitize) -> Result<(), DriverError> {
        let command = sanitizing(self.known()?, wanted)?;
        Ok(self.admin(&command).map(drop)?)
    }

    /// Device Self-test (Base 5.1.5): begins one, or ends the one under way. It is of the controller, and of one namespace, of all
    /// ([`NamespaceId::BROADCAST`]) or of none ([`NamespaceId::NONE`]); what it finds the log page
    /// ([`LogId::SELF_TEST`](crate::spec::log::LogId::SELF_TEST)) says.
    ///
    /// # Errors
    /// [`DriverError::NotOffered`]; [`CommandError::BadField`]; the controller's, of which Device Self-test In Progress is one.
    pub fn self_test(&mut self, nsid: NamespaceId, test: SelfTest) -> Result<(), DriverError> {
        let command = testing(self.known()?, nsid, test)?;
        Ok(self.admin(&command).map(drop)?)
    }

    /// What is asked for what the controller offers.
    pub(crate) fn known(&self) -> Result<&IdentifyController, DriverError> {
        self.identity().ok_or(DriverError::NotOffered("maintenance before it was started"))
    }
}

pub(crate) fn bad<T>(command: &'static str, why: &'static str) -> Result<T, DriverError> {
    Err(CommandError::BadField { command, why }.into())
}

pub(crate) fn offered(offers: bool, what: &'static str) -> Result<(), DriverError> {
    if offers { Ok(()) } else { Err(DriverError::NotOffered(what)) }
}

/// What offsets in an image are multiples of (FWUG), in bytes.
fn firmware_granularity(identity: &IdentifyController) -> u64 {
    match identity.fwug {
        // It does not say.
        0 => PIECE,
        // Dwords.
        0xff => 4,
        pages => u64::from(pages) * 4096,
    }
}

/// Bytes of each piece of an image but the last.
fn firmware_piece(identity: &IdentifyController, limit: u64) -> Result<usize, DriverError> {
    offered(identity.oacs.firmware(), DOWNLOAD)?;
    let bytes = firmware_granularity(identity).max(PIECE);
    if bytes > limit {
        return Err(CommandError::TooLarge { bytes, limit }.into());
    }
    Ok(bytes as usize)
}

pub(crate) fn firmware_download(
    identity: &IdentifyController,
    offset: u64,
    len: u64,
    limit: u64,
) -> Result<Command, DriverError> {
    offered(identity.oacs.firmware(), DOWNLOAD)?;
    if len == 0 || !len.is_multiple_of(4) {
        return bad(DOWNLOAD, "a piece of an image is one or more whole dwords");
    }
    if !offset.is_multiple_of(firmware_granularity(identity)) {
        return bad(DOWNLOAD, "a piece begins where the controller's granularity has it");
    }
    if len > limit {
        return Err(CommandError::TooLarge { bytes: len, limit }.into());
    }
    let (Ok(dwords), Ok(offset)) = (u32::try_from(len / 4), u32::try_from(offset / 4)) else {
        return bad(DOWNLOAD, "an image has up to 16 GiB");
    };
    let mut command = Command::admin(AdminOpcode::FIRMWARE_IMAGE_DOWNLOAD);
    (command.sqe.cdw10, command.sqe.cdw11) = (dwords - 1, offset);
    Ok(command)
}

pub(crate) fn firmware_commit(
    identity: &IdentifyController,
    slot: u8,
    action: CommitAction,
) -> Result<Command, DriverError> {
    offered(identity.oacs.firmware(), COMMIT)?;
    let replaces = match action {
        CommitAction::REPLACE | CommitAction::REPLACE_AND_ACTIVATE => true,
        CommitAction::ACTIVATE | CommitAction::ACTIVATE_NOW => false,
        _ => return bad(COMMIT, "there is no such action on a slot"),
    };
    let has = identity.frmw;
    if slot == 0 || slot > has.slots() {
        return bad(COMMIT, "the controller has no such slot");
    }
    if replaces && slot == 1 && has.slot1_read_only() {
        return bad(COMMIT, "the controller's first slot is read only");
    }
    offered(action != CommitAction::ACTIVATE_NOW || has.without_reset(), "firmware that is activated without a reset")?;
    let mut command = Command::admin(AdminOpcode::FIRMWARE_COMMIT);
    command.sqe.cdw10 = FirmwareCommitCdw10::new().with_fs(slot).with_ca(action).into_bits();
    Ok(command)
}

pub(crate) fn security(
    identity: &IdentifyController,
    opcode: AdminOpcode,
    (nsid, protocol): (NamespaceId, SecurityProtocol),
    (len, limit): (usize, u64),
) -> Result<Command, DriverError> {
    offered(identity.oacs.security(), SECURITY)?;
    let SecurityProtocol { id, specific, nvme_specific } = protocol;
    if id == 0 && opcode == AdminOpcode::SECURITY_SEND {
        return bad(SECURITY, "protocol 0 takes no data");
    }
    if id != NVME_PROTOCOL && nvme_specific != 0 {
        return bad(SECURITY, "only protocol EAh has an NVMe specific field");
    }
    let bytes = len as u64;
    if bytes > limit {
        return Err(CommandError::TooLarge { bytes, limit }.into());
    }
    let Some(length) = u32::try_from(len).ok().filter(|length| *length > 0) else {
        return bad(SECURITY, "one byte and up to 4 GiB are moved");
    };
    let mut command = Command::admin(opcode);
    command.sqe.nsid = nsid;
    command.sqe.cdw10 = SecurityCdw10::new().with_nssf(nvme_specific).with_spsp(specific).with_secp(id).into_bits();
    command.sqe.cdw11 = length;
    Ok(command)
}

fn sanitizing(identity: &IdentifyController, wanted: &Sanitize) -> Result<Command, DriverError> {
    let Sanitize { action, passes, pattern, inverts, unrestricted, no_deallocate } = *wanted;
    let has = identity.sanicap;
    let offers = match action {
        SanitizeAction::EXIT_FAILURE => has.crypto_erase() || has.block_erase() || has.overwrite(),
        SanitizeAction::BLOCK_ERASE => has.block_erase(),
        SanitizeAction::OVERWRITE => has.overwrite(),
        SanitizeAction::CRYPTO_ERASE => has.crypto_erase(),
        _ => return bad(SANITIZE, "there is no such action"),
    };
    offered(offers, "a Sanitize of this kind")?;
    offered(!no_deallocate || !has.no_deallocate_inhibited(), "a Sanitize that leaves blocks allocated")?;
    let overwrites = action == SanitizeAction::OVERWRITE;
    if overwrites && !(1..=16).contains(&passes) {
        return bad(SANITIZE, "an overwrite has 1 to 16 passes");
    }
    if !overwrites && (passes, pattern, inverts) != (0, 0, false) {
        return bad(SANITIZE, "only an overwrite has passes and a pattern");
    }
    let mut command = Command::admin(AdminOpcode::SANITIZE);
    // 0 is 16.
    let cdw10 = SanitizeCdw10::new().with_sanact(action).with_owpass(passes & 0xf).with_oipbp(inverts);
    command.sqe.cdw10 = cdw10.with_ause(unrestricted).with_ndas(no_deallocate).into_bits();
    command.sqe.cdw11 = pattern;
    Ok(command)
}

pub(crate) fn testing(identity: &IdentifyController, nsid: NamespaceId, test: SelfTest) -> Result<Command, DriverError> {
    offered(identity.oacs.self_test(), SELF_TEST)?;
    if ![SelfTest::SHORT, SelfTest::EXTENDED, SelfTest::ABORT].contains(&test) {
        return bad(SELF_TEST, "there is no such test");
    }
    let mut command = Command::admin(AdminOpcode::DEVICE_SELF_TEST);
    command.sqe.nsid = nsid;
    command.sqe.cdw10 = SelfTestCdw10::new().with_stc(test).into_bits();
    Ok(command)
}

#[cfg(test)]
mod tests {
    use millrace_nvme_spec::identify::{AdminCommandSupport, FirmwareUpdates, SanitizeCapabilities};
    use zerocopy::FromZeros;

    use super::*;

    const LIMIT: u64 = 64 << 10;

    /// A controller that has all of it, or nothing.
    fn identity(has: bool) -> Box<IdentifyController> {
        let mut identity = Box::new(IdentifyController::new_zeroed());
        identity.oacs = AdminCommandSupport::new().with_security(has).with_firmware(has).with_self_test(has);
        identity.frmw = FirmwareUpdates::new().with_slots(3).with_slot1_read_only(true);
        let kinds = SanitizeCapabilities::new().with_crypto_erase(has).with_block_erase(has);
        identity.sanicap = kinds.with_overwrite(has).with_no_deallocate_inhibited(true);
        identity
    }

    /// Opcode, namespace and Command Dwords 10 and 11.
    fn said(made: Result<Command, DriverError>) -> (u8, u32, u32, u32) {
        let sqe = made.unwrap().sqe;
        (sqe.opcode, sqe.nsid.0, sqe.cdw10, sqe.cdw11)
    }

    fn is_bad(made: &Result<Command, DriverError>) -> bool {
        matches!(made, Err(DriverError::Command(CommandError::BadField { .. })))
    }

    fn is_not_offered(made: &Result<Command, DriverError>) -> bool {
        matches!(made, Err(DriverError::NotOffered(_)))
    }

    #[test]
    fn what_a_controller_does_not_advertise_is_not_made() {
        let none = identity(false);
        assert!(is_not_offered(&firmware_download(&none, 0, 4, LIMIT)));
        assert!(matches!(firmware_piece(&none, LIMIT), Err(DriverError::NotOffered(_))));
        assert!(is_not_offered(&firmware_commit(&none, 2, CommitAction::REPLACE)));
        for opcode in [AdminOpcode::SECURITY_SEND, AdminOpcode::SECURITY_RECEIVE] {
            let protocol = SecurityProtocol { id: 1, ..SecurityProtocol::default() };
            assert!(is_not_offered(&security(&none, opcode, (NamespaceId::NONE, protocol), (512, LIMIT))));
        }
        for action in [1, 2, 3, 4].map(SanitizeAction) {
            assert!(is_not_offered(&sanitizing(&none, &Sanitize { action, ..Sanitize::default() })), "{action}");
        }
        assert!(is_not_offered(&testing(&none, NamespaceId::NONE, SelfTest::SHORT)));
    }

    #[test]
    fn an_image_is_cut_as_the_controller_wants_it() {
        let mut all = identity(true);
        for (fwug, piece) in [(0, 4096), (0xff, 4096), (1, 4096), (4, 16384)] {
            all.fwug = fwug;
            assert_eq!(firmware_piece(&all, LIMIT).unwrap(), piece, "{fwug}");
        }
        assert_eq!(said(firmware_download(&all, 32768, 16384, LIMIT)), (0x11, 0, 4095, 8192));
        assert_eq!(said(firmware_download(&all, 16384, 4, LIMIT)), (0x11, 0, 0, 4096), "the last may be short");
        for (offset, len) in [(4096, 4096), (2, 4), (0, 0), (0, 6), (1 << 34, 4)] {
            assert!(is_bad(&firmware_download(&all, offset, len, LIMIT)), "{len} bytes at {offset}");
        }
        let too_large =
            |made: Result<Command, DriverError>| matches!(made, Err(DriverError::Command(CommandError::TooLarge { .. })));
        assert!(too_large(firmware_download(&all, 0, LIMIT + 4, LIMIT)));
        all.fwug = 17;
        assert!(matches!(firmware_piece(&all, LIMIT), Err(DriverError::Command(CommandError::TooLarge { .. }))));
        all.fwug = 0xff;
        assert_eq!(said(firmware_download(&all, 4, 8, LIMIT)), (0x11, 0, 1, 1), "by dwords");
    }

    #[test]
    fn a_commit_names_a_slot_that_there_is() {
        let mut all = identity(true);
        assert_eq!(said(firmware_commit(&all, 2, CommitAction::REPLACE)), (0x10, 0, 2, 0));
        assert_eq!(said(firmware_commit(&all, 3, CommitAction::REPLACE_AND_ACTIVATE)), (0x10, 0, 3 | 1 << 3, 0));
        assert_eq!(said(firmware_commit(&all, 1, CommitAction::ACTIVATE)), (0x10, 0, 1 | 2 << 3, 0));
        for (slot, action) in [(0, 0), (4, 0), (8, 0), (1, 0), (1, 1), (2, 4), (2, 6), (2, 7), (2, 8)] {
            assert!(is_bad(&firmware_commit(&all, slot, CommitAction(action))), "{action} on slot {slot}");
        }
        assert!(is_not_offered(&firmware_commit(&all, 2, CommitAction::ACTIVATE_NOW)));
        all.frmw = all.frmw.with_without_reset(true);
        assert_eq!(said(firmware_commit(&all, 2, CommitAction::ACTIVATE_NOW)), (0x10, 0, 2 | 3 << 3, 0));
    }

    #[test]
    fn a_security_protocol_is_said_with_its_bytes() {
        let all = identity(true);
        let (send, receive) = (AdminOpcode::SECURITY_SEND, AdminOpcode::SECURITY_RECEIVE);
        let tcg = SecurityProtocol { id: 1, specific: 0x1234, nvme_specific: 0 };
        let whole = (NamespaceId(7), tcg);
        assert_eq!(said(security(&all, send, whole, (512, LIMIT))), (0x81, 7, 0x0112_3400, 512));
        assert_eq!(said(security(&all, receive, whole, (3, LIMIT))), (0x82, 7, 0x0112_3400, 3));
        let rpmb = SecurityProtocol { id: 0xea, specific: 1, nvme_specific: 2 };
        assert_eq!(said(security(&all, send, (NamespaceId::NONE, rpmb), (256, LIMIT))), (0x81, 0, 0xea00_0102, 256));
        let list = (NamespaceId::NONE, SecurityProtocol::default());
        assert_eq!(said(security(&all, receive, list, (512, LIMIT))), (0x82, 0, 0, 512));
        assert!(is_bad(&security(&all, send, list, (512, LIMIT))));
        assert!(is_bad(&security(&all, send, (NamespaceId::NONE, SecurityProtocol { id: 1, ..rpmb }), (512, LIMIT))));
        assert!(is_bad(&security(&all, receive, whole, (0, LIMIT))));
        let large = security(&all, receive, whole, (LIMIT as usize + 1, LIMIT));
        assert!(matches!(large, Err(DriverError::Command(CommandError::TooLarge { .. }))));
    }

    #[test]
    fn a_sanitize_is_one_that_the_controller_has() {
        let mut all = identity(true);
        let overwrite =
            Sanitize { action: SanitizeAction::OVERWRITE, passes: 16, pattern: 0xdead_beef, ..Sanitize::default() };
        assert_eq!(said(sanitizing(&all, &overwrite)), (0x84, 0, 3, 0xdead_beef));
        let thrice = Sanitize { passes: 3, inverts: true, unrestricted: true, ..overwrite };
        assert_eq!(said(sanitizing(&all, &thrice)), (0x84, 0, 3 | 1 << 3 | 3 << 4 | 1 << 8, 0xdead_beef));
        let erase = Sanitize { action: SanitizeAction::BLOCK_ERASE, ..Sanitize::default() };
        assert_eq!(said(sanitizing(&all, &erase)), (0x84, 0, 2, 0));
        let leave = Sanitize { action: SanitizeAction::EXIT_FAILURE, ..erase };
        assert_eq!(said(sanitizing(&all, &leave)), (0x84, 0, 1, 0));
        for wrong in [
            Sanitize { passes: 0, ..overwrite },
            Sanitize { passes: 17, ..overwrite },
            Sanitize { passes: 1, ..erase },
            Sanitize { pattern: 1, ..erase },
            Sanitize { inverts: true, ..leave },
            Sanitize { action: SanitizeAction::EXIT_VERIFICATION, ..erase },
            Sanitize::default(),
        ] {
            assert!(is_bad(&sanitizing(&all, &wrong)), "{wrong:?}");
        }
        let stays = Sanitize { no_deallocate: true, ..erase };
        assert!(is_not_offered(&sanitizing(&all, &stays)));
        all.sanicap = SanitizeCapabilities::new().with_block_erase(true);
        assert_eq!(said(sanitizing(&all, &stays)), (0x84, 0, 2 | 1 << 9, 0));
        assert!(is_not_offered(&sanitizing(&all, &overwrite)), "another kind");
    }

    #[test]
    fn a_self_test_is_of_whom_it_names() {
        let all = identity(true);
        assert_eq!(said(testing(&all, NamespaceId::BROADCAST, SelfTest::EXTENDED)), (0x14, u32::MAX, 2, 0));
        assert_eq!(said(testing(&all, NamespaceId::NONE, SelfTest::ABORT)), (0x14, 0, 15, 0));
        for code in [0, 3, 14, 16] {
            assert!(is_bad(&testing(&all, NamespaceId(1), SelfTest(code))), "{code}");
        }
    }
}
