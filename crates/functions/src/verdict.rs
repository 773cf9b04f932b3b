//! What becomes of a command.

/// See [`Verdict::kind`]; the fields that a kind does not use are 0.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Pass, fan out: first block on the disks.
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

    /// The command goes to these disks; there is one at least.
    #[inline]
    pub fn go(lba: u64, disks: u16) -> Self {
        let several = disks & disks.wrapping_sub(1) != 0;
        Self { lba, disks, kind: if several { Self::FAN_OUT } else { Self::PASS }, ..Self::default() }
    }

    /// Ask again then.
    #[inline]
    pub fn hold(until: u32) -> Self {
        Self { until, kind: Self::HOLD, ..Self::default() }
    }

    /// It ends.
    #[inline]
    pub fn reject(status: u16) -> Self {
        Self { status, kind: Self::REJECT, ..Self::default() }
    }
}
