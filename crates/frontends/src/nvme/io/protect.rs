//! Protection information (NVM 5.3): what a command wants checked and inserted.

use crc_fast::{CrcAlgorithm, checksum};
use millrace_block::MetadataFormat;
use millrace_nvme_spec::{
    command::Sqe,
    nvm::{ProtectionCdw15, ProtectionInfo, ProtectionTuple, ReadWriteCdw12},
    status::Status,
};

/// The guard of a block's data.
pub(super) fn guard(data: &[u8]) -> u16 {
    checksum(CrcAlgorithm::Crc16T10Dif, data) as u16
}

/// What one command, or one side of a copy, does with metadata.
#[derive(Clone, Copy, Debug)]
pub(super) struct Protection {
    pub(super) format: MetadataFormat,
    info: ProtectionInfo,
    /// Reference tag of the first block (ILBRT, EILBRT).
    reference: u32,
    /// Application tag and its mask (LBAT, ELBAT; LBATM, ELBATM).
    application: ProtectionCdw15,
}

impl Protection {
    /// For blocks from `lba` on.
    ///
    /// # Errors
    /// Invalid Protection Information.
    pub(super) fn new(
        format: MetadataFormat,
        lba: u64,
        info: ProtectionInfo,
        reference: u32,
        application: ProtectionCdw15,
    ) -> Result<Self, Status> {
        // Without protection information, the fields say nothing.
        let info = if format.protection == 0 { ProtectionInfo::new() } else { info };
        let fits = match format.protection {
            1 => reference == lba as u32,
            3 => false,
            _ => true,
        };
        if info.check_reference() && !fits {
            return Err(Status::INVALID_PROTECTION_INFORMATION);
        }
        Ok(Self { format, info, reference, application })
    }

    /// Of a command with Command Dwords 12, 14 and 15 as Read has them.
    pub(super) fn of(format: MetadataFormat, sqe: &Sqe) -> Result<Self, Status> {
        let info = ReadWriteCdw12::from_bits(sqe.cdw12).prinfo();
        Self::new(format, sqe.cdw10_11(), info, sqe.cdw14, ProtectionCdw15::from_bits(sqe.cdw15))
    }

    /// Whether the controller inserts and strips the protection information (PRACT), which are all of the metadata: the host moves
    /// none then.
    pub(super) fn acts(&self) -> bool {
        self.info.pract()
    }

    /// Whether any check is asked for.
    pub(super) fn checks(&self) -> bool {
        self.info.check_guard() || self.info.check_application() || self.info.check_reference()
    }

    /// Whether the metadata are moved at the end of each block.
    pub(super) fn is_extended(&self) -> bool {
        self.format.extended && !self.acts()
    }

    /// The reference tag of the block with this number, counted from the command's first.
    fn reference(&self, number: u64) -> u32 {
        if self.format.protection == 3 { self.reference } else { self.reference.wrapping_add(number as u32) }
    }

    /// Checks a block as PRCHK says.
    pub(super) fn check(&self, tuple: ProtectionTuple, data: &[u8], number: u64) -> Result<(), Status> {
        let (application, reference) = (tuple.application.get(), tuple.reference.get());
        let escapes = application == ProtectionTuple::UNCHECKED_APPLICATION
            && (self.format.protection != 3 || reference == ProtectionTuple::UNCHECKED_REFERENCE);
        if escapes || !self.checks() {
            return Ok(());
        }
        if self.info.check_guard() && tuple.guard.get() != guard(data) {
            return Err(Status::GUARD_CHECK_ERROR);
        }
        if self.info.check_application() && (application ^ self.application.lbat()) & self.application.lbatm() != 0 {
            return Err(Status::APPLICATION_TAG_CHECK_ERROR);
        }
        if self.info.check_reference() && reference != self.reference(number) {
            return Err(Status::REFERENCE_TAG_CHECK_ERROR);
        }
        Ok(())
    }

    /// The protection information of a block to be written.
    pub(super) fn make(&self, data: &[u8], number: u64) -> ProtectionTuple {
        ProtectionTuple::new(guard(data), self.application.lbat(), self.reference(number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The usual check of this CRC, and the test cases of T10's block commands.
    #[test]
    fn the_guard_is_the_crc_of_t10() {
        let counting: Vec<u8> = (0..32).collect();
        assert_eq!(guard(b"123456789"), 0xd0db);
        assert_eq!([guard(&[0; 32]), guard(&[0xff; 32]), guard(&counting)], [0, 0xa293, 0x0224]);
        assert_eq!(guard(&[0; 4096]), 0);
        // Bit by bit, as the polynomial says.
        let block: Vec<u8> = (0..4096_u32).map(|at| ((at * 7) >> 3) as u8).collect();
        let slow = block.iter().fold(0_u16, |crc, byte| {
            (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| crc << 1 ^ if crc & 0x8000 == 0 { 0 } else { 0x8bb7 })
        });
        assert_eq!(guard(&block), slow);
    }

    fn protection(kind: u8, info: ProtectionInfo, lba: u64, reference: u32) -> Result<Protection, Status> {
        let format = MetadataFormat { protection: kind, ..MetadataFormat::default() };
        let application = ProtectionCdw15::new().with_lbat(0x1234).with_lbatm(0xff00);
        Protection::new(format, lba, info, reference, application)
    }

    #[test]
    fn each_type_has_its_reference_tags_and_its_escape() {
        let all = ProtectionInfo::new().with_check_guard(true).with_check_application(true).with_check_reference(true);
        let lba = 0x1_0000_0005;
        assert_eq!(protection(1, all, lba, 6).err(), Some(Status::INVALID_PROTECTION_INFORMATION));
        assert_eq!(protection(3, all, lba, 5).err(), Some(Status::INVALID_PROTECTION_INFORMATION));
        assert!(protection(1, all.with_check_reference(false), lba, 6).is_ok());
        let (data, good) = ([7; 512], guard(&[7; 512]));
        for (kind, info, reference) in [(1, all, 5), (2, all, u32::MAX), (3, all.with_check_reference(false), 77)] {
            let this = protection(kind, info, lba, reference).unwrap();
            let next = if kind == 3 { reference } else { reference.wrapping_add(1) };
            assert_eq!(this.make(&data, 1), ProtectionTuple::new(good, 0x1234, next));
            let check =
                |guard, application, reference| this.check(ProtectionTuple::new(guard, application, reference), &data, 1);
            assert_eq!(check(good, 0x1299, next), Ok(()), "the mask");
            assert_eq!(check(good ^ 1, 0x1234, next), Err(Status::GUARD_CHECK_ERROR));
            assert_eq!(check(good, 0x1334, next), Err(Status::APPLICATION_TAG_CHECK_ERROR));
            let wrong = if kind == 3 { Ok(()) } else { Err(Status::REFERENCE_TAG_CHECK_ERROR) };
            assert_eq!(check(good, 0x1234, next ^ 1), wrong);
            let escape = if kind == 3 { Err(Status::GUARD_CHECK_ERROR) } else { Ok(()) };
            assert_eq!(check(good ^ 1, 0xffff, next), escape);
            assert_eq!(check(good ^ 1, 0xffff, 0xffff_ffff), Ok(()));
        }
        let none = protection(0, all.with_pract(true), lba, 0).unwrap();
        assert!(!none.acts() && !none.checks());
    }
}
