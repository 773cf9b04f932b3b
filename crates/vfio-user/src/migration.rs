//! How a device moves to another server while its machine goes on: VFIO's migration protocol, version 2, on a socket.
//!
//! ```text
//!   Running ◄──► Stop ◄──► StopCopy   the source: its state is read
//!      ▲          ▲ ▲
//!      ▼          │ └────► Resuming   the target: the state is written, and taken on the way out
//!   PreCopy ──────┴─► StopCopy
//! ```

use rustix::io::Errno;

use crate::device::Outcome;

/// Where a device stands in its migration; numbers as on the wire. Device-to-device traffic is not offered, so that its states
/// are not here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum MigrationState {
    /// Something failed on the way; a reset helps.
    Error = 0,
    /// It stands still: no command is in flight, it touches no memory, and what it says of itself does not change.
    Stop = 1,
    /// It works.
    #[default]
    Running = 2,
    /// It stands still, and its state can be read.
    StopCopy = 3,
    /// It stands still, and a state can be written. What was written becomes the device's on the way to another state.
    Resuming = 4,
    /// It works, and reading has begun.
    PreCopy = 6,
}

impl MigrationState {
    /// The state with this number, if it is here.
    pub fn from_wire(value: u32) -> Option<Self> {
        [Self::Error, Self::Stop, Self::Running, Self::StopCopy, Self::Resuming, Self::PreCopy]
            .into_iter()
            .find(|state| *state as u32 == value)
    }

    /// The next state on the way to another one; `None`: there is no way.
    pub fn towards(self, to: Self) -> Option<Self> {
        match (self, to) {
            (Self::Error, _) | (_, Self::Error) | (Self::StopCopy, Self::PreCopy) => None,
            (Self::Running, Self::PreCopy) | (Self::PreCopy | Self::Stop, Self::StopCopy) | (Self::Stop, Self::Resuming) => {
                Some(to)
            }
            (Self::Running | Self::StopCopy | Self::Resuming, _) => Some(Self::Stop),
            (Self::Stop | Self::PreCopy, _) => Some(Self::Running),
        }
    }
}

/// A device that can be moved, and the log of the pages that it writes.
pub trait Migration {
    /// Where it stands.
    fn state(&self) -> MigrationState;

    /// Goes to a state, over all those between. It is `Later` while commands are in flight. After an error it stands where
    /// [`Self::state`] says.
    fn set_state(&mut self, state: MigrationState) -> Outcome;

    /// The next part of its saved state, at most `most` bytes; none at the end.
    fn read(&mut self, most: usize) -> Result<Vec<u8>, Errno>;

    /// Adds a part to the state that it is to take.
    fn write(&mut self, data: &[u8]) -> Result<(), Errno>;

    /// From now on it remembers which pages it writes. `page_size` is a hint, a power of two.
    fn start_logging(&mut self, page_size: u64) -> Result<(), Errno>;

    /// It remembers them no more.
    fn stop_logging(&mut self);

    /// Sets the bits of pages that it has written since the last report, or may be writing. `bitmap` is zeroed, and has the bits.
    fn report(&mut self, range: LogRange, bitmap: &mut [u8]) -> Result<(), Errno>;
}

/// What is asked of the log: whole pages, and no more of them than one message has bits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogRange {
    /// First device-visible address.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Bytes that a bit stands for: a power of two, at least 4096.
    pub page_size: u64,
}

impl LogRange {
    /// Bytes of its bitmap: whole words of 64 bits.
    pub fn bitmap_bytes(&self) -> u64 {
        self.size.div_ceil(self.page_size).div_ceil(64) * 8
    }
}
