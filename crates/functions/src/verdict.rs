//! What becomes of a command.

/// See [`Verdict::kind`]; the fields that a kind does not use mean nothing.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Pass, fan out: first block on the disks; of a flush it means nothing.
    pub lba: u64,
    /// Hold: when to ask again, in units of 64 cycles. It wraps.
    pub until: u32,
    /// Reject: NVMe status, as in bits 15:1 of a completion entry.
    pub status: u16,
    /// Pass: the disk, a bit. Fan out: the disks.
    pub disks: u16,
    /// [`Self::PASS`], [`Self::FAN_OUT`], [`Self::HOLD`] or [`Self::REJECT`].
    pub kind: u8,
}

impl Verdict {
    /// The command goes to one disk.
    pub const PASS: u8 = 0;
    /// It goes to several disks, and ends when all have answered.
    pub const FAN_OUT: u8 = 1;
    /// It is to be asked again, later.
    pub const HOLD: u8 = 2;
    /// It ends now, with a status.
    pub const REJECT: u8 = 3;

    /// The command goes on.
    #[inline]
    pub fn goes(&self) -> bool {
        self.kind <= Self::FAN_OUT
    }
}
