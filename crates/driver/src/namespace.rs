//! A namespace of the NVM command set, and the commands on it with their ranges checked.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use millrace_block::{BlockCount, Lba};
use millrace_nvme_spec::{
    NamespaceId, NvmOpcode,
    identify::IdentifyNamespace,
    nvm::{
        CopyCdw12, CopyFormat, CopyRange, DatasetManagementCdw10, DatasetManagementCdw11, DatasetRange, ProtectionCdw15,
        ProtectionInfo, ReadWriteCdw12, WriteZeroesCdw12,
    },
    to_zeros_based,
};
use thiserror::Error;
use zerocopy::{Immutable, IntoBytes};

use crate::{
    command::Command,
    dma::{DmaBuffer, DmaRange},
};

/// Bytes of protection information with a 16-bit guard (NVM 5.3.1.1).
pub(crate) const PROTECTION_SIZE: u16 = 8;

/// Why a command was not made. Commands that should be wrong are made from an entry of one's own.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum CommandError {
    /// No block, or more than a command can name.
    #[error("{0} are no number that a command can carry")]
    BadCount(BlockCount),
    /// Past the namespace's end.
    #[error("{count} at {lba} are not within the namespace's {size}")]
    OutOfRange {
        /// First block.
        lba: Lba,
        /// How many.
        count: BlockCount,
        /// Blocks there are.
        size: BlockCount,
    },
    /// More than the controller or the queue's PRP lists move at once.
    #[error("{bytes} bytes are more than one command may move, {limit}")]
    TooLarge {
        /// Bytes asked for.
        bytes: u64,
        /// Bytes possible.
        limit: u64,
    },
    /// The buffer's length is not the transfer's.
    #[error("a buffer of {len} bytes for {expected} bytes of blocks")]
    BufferLength {
        /// The buffer's.
        len: u64,
        /// The blocks'.
        expected: u64,
    },
    /// More than one Copy may move, or of one source.
    #[error("{count} are more than one Copy may move, {limit}")]
    CopyTooLong {
        /// Blocks of all sources, or of one.
        count: BlockCount,
        /// Blocks possible: MCL, or MSSRL. None: the controller has no Copy.
        limit: BlockCount,
    },
    /// A format that the namespace does not have.
    #[error("format {index}: {why}")]
    BadFormat {
        /// Which.
        index: u8,
        /// What is wrong.
        why: &'static str,
    },
    /// A key or a kind of reservation that cannot be.
    #[error("a reservation: {0}")]
    BadReservation(&'static str),
    /// A field of another command that cannot be so.
    #[error("{command}: {why}")]
    BadField {
        /// The command.
        command: &'static str,
        /// What is wrong.
        why: &'static str,
    },
    /// No range, or more than a command can name.
    #[error("{0} ranges are no number that a command can carry")]
    BadRangeCount(usize),
}

/// What a command says of protection information.
#[derive(Clone, Copy, Debug, Default)]
pub struct Protection {
    /// Action and checks (PRINFO).
    pub info: ProtectionInfo,
    /// (Expected) reference tag of the first block (ILBRT, EILBRT).
    pub reference: u32,
    /// (Expected) application tag (LBAT, ELBAT).
    pub application: u16,
    /// Its mask (LBATM, ELBATM).
    pub mask: u16,
}

/// Where a command's metadata are.
#[derive(Clone, Copy, Debug)]
pub enum Metadata {
    /// Nowhere: the controller inserts and strips them (PRACT).
    None,
    /// At the end of each block in the data.
    Extended,
    /// In a buffer of their own.
    Separate(DmaRange),
}

/// A namespace as it was identified. Clones learn of another size together.
///
/// On one with protection information that are all of its metadata, commands made here leave them to the controller (PRACT), which
/// checks guards whenever it reads; [`Self::protected`] makes the others.
#[derive(Clone, Debug)]
pub struct Namespace {
    nsid: NamespaceId,
    block_size: u32,
    /// In blocks.
    size: Arc<AtomicU64>,
    max_transfer: u64,
    identify: Box<IdentifyNamespace>,
}

/// Which of its formats a namespace has.
fn index(identify: &IdentifyNamespace) -> u8 {
    if identify.nlbaf_z > 15 { identify.flbas.index() } else { identify.flbas.index_low() }
}

impl Namespace {
    /// Reads the format out of the identify data; `None` when it names a format that cannot be, or one with metadata that the
    /// controller does not make by itself.
    pub(crate) fn new(nsid: NamespaceId, identify: Box<IdentifyNamespace>, max_transfer: u64) -> Option<Self> {
        let format = identify.lbaf.get(usize::from(index(&identify)))?;
        let is_plain = format.ms == 0 || (format.ms == PROTECTION_SIZE && identify.dps.pit() != 0);
        if !(9..=24).contains(&format.lbads) || !is_plain {
            return None;
        }
        let size = Arc::new(AtomicU64::new(identify.nsze));
        Some(Self { nsid, block_size: 1 << format.lbads, size, max_transfer, identify })
    }

    /// Its identifier.
    pub fn nsid(&self) -> NamespaceId {
        self.nsid
    }

    /// Bytes of a block: a power of two.
    #[inline]
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// How many whole blocks so many bytes are.
    #[inline]
    pub fn blocks(&self, bytes: u64) -> u64 {
        bytes >> self.block_size.trailing_zeros()
    }

    /// Whether so many bytes are whole blocks.
    #[inline]
    pub fn is_whole(&self, bytes: u64) -> bool {
        bytes & (u64::from(self.block_size) - 1) == 0
    }

    /// Number of blocks.
    #[inline]
    pub fn size(&self) -> BlockCount {
        // Relaxed: what else depends on it is the controller's, which checks ranges itself.
        BlockCount(self.size.load(Ordering::Relaxed))
    }

    /// Takes over the size of the same namespace as it was identified later; false: its blocks are not the same any more, so that no
    /// command is made from now on: it would move more bytes, or fewer, than it has memory for, or those of another namespace, which has come in
    /// the place of this one.
    pub fn follow(&self, later: &Self) -> bool {
        let same = later.shape() == self.shape() && !self.is_another(later);
        self.size.store(if same { later.size().0 } else { 0 }, Ordering::Relaxed);
        same
    }

    /// What decides how many bytes a command moves.
    fn shape(&self) -> (NamespaceId, u32, u16, u8) {
        let identify = &self.identify;
        let metadata = identify.lbaf.get(usize::from(index(identify))).map_or(0, |format| format.ms);
        (self.nsid, self.block_size, metadata, identify.dps.pit())
    }

    /// Whether it has another globally unique identifier, of those that are known of both. A namespace keeps them as long as it is there.
    fn is_another(&self, later: &Self) -> bool {
        let is_known = |id: &[u8]| id.iter().any(|byte| *byte != 0);
        let differs = |before: &[u8], now: &[u8]| before != now && is_known(before) && is_known(now);
        let (before, now) = (&self.identify, &later.identify);
        differs(&before.nguid, &now.nguid) || differs(&before.eui64, &now.eui64)
    }

    /// It has a format that is not known: no command is made from now on, as when [`follow`](Self::follow) finds other blocks.
    pub fn forsake(&self) {
        self.size.store(0, Ordering::Relaxed);
    }

    /// The most bytes that one command may move: the controller's limit, or the driver's if that is less.
    #[inline]
    pub fn max_transfer(&self) -> u64 {
        self.max_transfer
    }

    /// The same for who makes commands of more than one may move: a [`Space`](crate::Space)'s front cuts its requests itself.
    #[must_use]
    pub fn with_max_transfer(self, max_transfer: u64) -> Self {
        Self { max_transfer, ..self }
    }

    /// All of Identify Namespace.
    pub fn identify(&self) -> &IdentifyNamespace {
        &self.identify
    }

    /// The number of blocks as a command carries it, 0's based, if the range is within the namespace.
    #[inline]
    fn check(&self, lba: Lba, count: BlockCount) -> Result<u16, CommandError> {
        let blocks = u32::try_from(count.0).ok().and_then(to_zeros_based);
        let nlb_z = blocks.ok_or(CommandError::BadCount(count))?;
        let size = self.size();
        match lba.checked_add(count) {
            Some(end) if end.0 <= size.0 => Ok(nlb_z),
            _ => Err(CommandError::OutOfRange { lba, count, size }),
        }
    }

    #[inline]
    fn ranged(&self, opcode: NvmOpcode, lba: Lba, count: BlockCount) -> Result<Command, CommandError> {
        let nlb_z = self.check(lba, count)?;
        let mut command = Command::nvm(opcode);
        command.sqe.nsid = self.nsid;
        command.sqe.set_cdw10_11(lba.0);
        command.sqe.cdw12 = ReadWriteCdw12::new().with_nlb_z(nlb_z).with_prinfo(self.left_to_controller(opcode)).into_bits();
        command.sqe.cdw14 = self.reference(lba);
        Ok(command)
    }

    /// Whether blocks have protection information.
    #[inline]
    fn is_protected(&self) -> bool {
        self.identify.dps.pit() != 0
    }

    /// What the controller is to do with protection information that nobody here wants to see.
    #[inline]
    fn left_to_controller(&self, opcode: NvmOpcode) -> ProtectionInfo {
        let (reads, acts) = match opcode {
            NvmOpcode::READ | NvmOpcode::COMPARE => (true, true),
            NvmOpcode::VERIFY => (true, false),
            NvmOpcode::WRITE | NvmOpcode::WRITE_ZEROES | NvmOpcode::COPY => (false, true),
            _ => (false, false),
        };
        let protected = self.is_protected();
        ProtectionInfo::new().with_pract(acts && protected).with_check_guard(reads && protected)
    }

    /// The reference tag of a block: by its number, which type 1 wants.
    #[inline]
    fn reference(&self, lba: Lba) -> u32 {
        if self.is_protected() { lba.0 as u32 } else { 0 }
    }

    #[inline]
    fn transfer(&self, opcode: NvmOpcode, lba: Lba, data: DmaRange) -> Result<Command, CommandError> {
        let len = data.len as u64;
        let count = BlockCount(self.blocks(len));
        let command = self.ranged(opcode, lba, count)?;
        if !self.is_whole(len) {
            return Err(CommandError::BufferLength { len, expected: count.0 * u64::from(self.block_size) });
        }
        if len > self.max_transfer {
            return Err(CommandError::TooLarge { bytes: len, limit: self.max_transfer });
        }
        Ok(command.with_data(data))
    }

    /// Read (NVM 3.3.4) of as many blocks as `data` holds.
    #[inline]
    pub fn read(&self, lba: Lba, data: DmaRange) -> Result<Command, CommandError> {
        self.transfer(NvmOpcode::READ, lba, data)
    }

    /// Write (NVM 3.3.6) of the blocks in `data`.
    #[inline]
    pub fn write(&self, lba: Lba, data: DmaRange) -> Result<Command, CommandError> {
        self.transfer(NvmOpcode::WRITE, lba, data)
    }

    /// Write with Force Unit Access: durable when it completes.
    pub fn write_fua(&self, lba: Lba, data: DmaRange) -> Result<Command, CommandError> {
        let mut command = self.write(lba, data)?;
        command.sqe.cdw12 = ReadWriteCdw12::from_bits(command.sqe.cdw12).with_fua(true).into_bits();
        Ok(command)
    }

    /// Compare (NVM 3.3.1) of the blocks with `data`.
    pub fn compare(&self, lba: Lba, data: DmaRange) -> Result<Command, CommandError> {
        self.transfer(NvmOpcode::COMPARE, lba, data)
    }

    /// Read, Write or Compare of `count` blocks with their protection information, or without (PRACT).
    pub fn protected(
        &self,
        opcode: NvmOpcode,
        (lba, count): (Lba, BlockCount),
        data: DmaRange,
        metadata: Metadata,
        protection: &Protection,
    ) -> Result<Command, CommandError> {
        let mut command = self.ranged(opcode, lba, count)?;
        let each = if matches!(metadata, Metadata::Extended) { u64::from(PROTECTION_SIZE) } else { 0 };
        let expected = count.0 * (u64::from(self.block_size) + each);
        if data.len as u64 != expected {
            return Err(CommandError::BufferLength { len: data.len as u64, expected });
        }
        if let Metadata::Separate(metadata) = metadata {
            let expected = count.0 * u64::from(PROTECTION_SIZE);
            if metadata.len as u64 != expected {
                return Err(CommandError::BufferLength { len: metadata.len as u64, expected });
            }
            command.sqe.mptr = metadata.iova;
        }
        let Protection { info, reference, application, mask } = *protection;
        command.sqe.cdw12 = ReadWriteCdw12::from_bits(command.sqe.cdw12).with_prinfo(info).into_bits();
        command.sqe.cdw14 = reference;
        command.sqe.cdw15 = ProtectionCdw15::new().with_lbat(application).with_lbatm(mask).into_bits();
        Ok(command.with_data(data))
    }

    /// Flush (Base 7.2).
    pub fn flush(&self) -> Command {
        let mut command = Command::nvm(NvmOpcode::FLUSH);
        command.sqe.nsid = self.nsid;
        command
    }

    /// Write Zeroes (NVM 3.3.8); `deallocate` lets the controller free the blocks too.
    pub fn write_zeroes(&self, lba: Lba, count: BlockCount, deallocate: bool) -> Result<Command, CommandError> {
        let mut command = self.ranged(NvmOpcode::WRITE_ZEROES, lba, count)?;
        command.sqe.cdw12 = WriteZeroesCdw12::from_bits(command.sqe.cdw12).with_deac(deallocate).into_bits();
        Ok(command)
    }

    /// As [`write_zeroes`](Self::write_zeroes), with Force Unit Access: durable when it completes.
    pub fn write_zeroes_fua(&self, lba: Lba, count: BlockCount, deallocate: bool) -> Result<Command, CommandError> {
        let mut command = self.write_zeroes(lba, count, deallocate)?;
        command.sqe.cdw12 = WriteZeroesCdw12::from_bits(command.sqe.cdw12).with_fua(true).into_bits();
        Ok(command)
    }

    /// Verify (NVM 3.3.5).
    pub fn verify(&self, lba: Lba, count: BlockCount) -> Result<Command, CommandError> {
        self.ranged(NvmOpcode::VERIFY, lba, count)
    }

    /// Write Uncorrectable (NVM 3.3.7).
    pub fn write_uncorrectable(&self, lba: Lba, count: BlockCount) -> Result<Command, CommandError> {
        self.ranged(NvmOpcode::WRITE_UNCORRECTABLE, lba, count)
    }

    /// Dataset Management, deallocate (NVM 3.3.3), of up to 256 ranges, which are put at the buffer's start.
    pub fn deallocate(&self, ranges: &[(Lba, BlockCount)], buffer: &DmaBuffer) -> Result<Command, CommandError> {
        let (nr_z, data) = list(ranges, u8::MAX, buffer, |lba, count| {
            let length = u32::try_from(count.0).ok().filter(|length| *length > 0);
            let length = length.ok_or(CommandError::BadCount(count))?;
            if lba.checked_add(count).is_none_or(|end| end.0 > self.size().0) {
                return Err(CommandError::OutOfRange { lba, count, size: self.size() });
            }
            Ok(DatasetRange { context_attributes: 0, length, slba: lba.0 })
        })?;
        let mut command = Command::nvm(NvmOpcode::DATASET_MANAGEMENT).with_data(data);
        command.sqe.nsid = self.nsid;
        command.sqe.cdw10 = DatasetManagementCdw10::new().with_nr_z(nr_z).into_bits();
        command.sqe.cdw11 = DatasetManagementCdw11::new().with_ad(true).into_bits();
        Ok(command)
    }

    /// The most blocks of one range that one Copy may move; 0: the controller has no Copy.
    pub fn most_copied(&self) -> BlockCount {
        BlockCount(u64::from(self.identify.mssrl).min(u64::from(self.identify.mcl)))
    }

    /// Copy within the namespace (NVM 3.3.2, format 0h) of as many ranges as it takes, up to 256, which are put at the buffer's start, one
    /// after the other to `to`. Source and target are apart.
    pub fn copy(&self, ranges: &[(Lba, BlockCount)], to: Lba, buffer: &DmaBuffer) -> Result<Command, CommandError> {
        let too_long = |count: u64, limit: u64| {
            let error = CommandError::CopyTooLong { count: BlockCount(count), limit: BlockCount(limit) };
            if count > limit { Err(error) } else { Ok(()) }
        };
        let mut total = 0;
        let (nr_z, data) = list(ranges, self.identify.msrc_z, buffer, |lba, count| {
            let range = CopyRange::new(NamespaceId::NONE, lba.0, self.check(lba, count)?);
            too_long(count.0, self.identify.mssrl.into())?;
            total += count.0;
            Ok(range)
        })?;
        too_long(total, self.identify.mcl.into())?;
        let total = BlockCount(total);
        if to.checked_add(total).is_none_or(|end| end.0 > self.size().0) {
            return Err(CommandError::OutOfRange { lba: to, count: total, size: self.size() });
        }
        let mut command = Command::nvm(NvmOpcode::COPY).with_data(data);
        command.sqe.nsid = self.nsid;
        command.sqe.set_cdw10_11(to.0);
        let (read, write) = (self.left_to_controller(NvmOpcode::READ), self.left_to_controller(NvmOpcode::COPY));
        let cdw12 = CopyCdw12::new().with_nr_z(nr_z).with_format(CopyFormat::SLBA_32);
        command.sqe.cdw12 = cdw12.with_prinfor(read).with_prinfow(write).into_bits();
        command.sqe.cdw14 = self.reference(to);
        Ok(command)
    }
}

/// Puts ranges at a buffer's start, as `make` checks and says each: their number, 0's based, and where they lie.
fn list<T: IntoBytes + Immutable>(
    ranges: &[(Lba, BlockCount)],
    most_z: u8,
    buffer: &DmaBuffer,
    mut make: impl FnMut(Lba, BlockCount) -> Result<T, CommandError>,
) -> Result<(u8, DmaRange), CommandError> {
    let number = u32::try_from(ranges.len()).ok().and_then(to_zeros_based);
    let number = number.and_then(|number| u8::try_from(number).ok()).filter(|number| *number <= most_z);
    let number = number.ok_or(CommandError::BadRangeCount(ranges.len()))?;
    let bytes = ranges.len() * size_of::<T>();
    if bytes > buffer.len() {
        return Err(CommandError::BufferLength { len: buffer.len() as u64, expected: bytes as u64 });
    }
    for (at, &(lba, count)) in ranges.iter().enumerate() {
        buffer.write_value(at * size_of::<T>(), &make(lba, count)?);
    }
    Ok((number, buffer.slice(0, bytes)))
}

#[cfg(test)]
mod tests;
