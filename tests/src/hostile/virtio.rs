//! A virtio driver that means harm, and the monitor in front of it: split rings, no more of vhost-user than they need.

use std::{
    fs::File,
    io::Write,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::Path,
};

use millrace_driver::vhost_user::{VhostUser, code};
use rustix::{
    event::{EventfdFlags, eventfd},
    fs::{MemfdFlags, ftruncate, memfd_create},
};

use super::{Ended, Session, Trick};
use crate::PATIENCE;

/// Where the guest's memory begins, for the guest and for the monitor's process.
const GUEST: u64 = 1 << 20;
const USER: u64 = 1 << 40;
/// Its bytes.
const MEMORY: u64 = 4 << 20;
/// Entries of the queue.
const ENTRIES: u16 = 64;
/// Where the parts of the queue are, and something else.
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADER: u64 = 0x3000;
const DATA: u64 = 0x10_0000;
/// Requests that it has room for.
const CHAINS: u16 = ENTRIES / 3;
/// Flags of a descriptor.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// VIRTIO_F_VERSION_1 and VIRTIO_F_INDIRECT_DESC. Without the protocol's own features, a queue runs from its first kick on.
const FEATURES: u64 = 1 << 32 | 1 << 28;

/// One connection, from its beginning to a bad end.
pub(super) fn session(socket: &Path, this: &Session) -> Result<(), Ended> {
    let mut guest = Guest::connect(socket)?;
    let mut round = 0;
    while this.goes_on(round) {
        round += 1;
        match this.trick {
            Trick::Loops => guest.loops(round),
            Trick::Floods => guest.floods(round),
            Trick::Shrinking => guest.shrinking(round),
        }?;
        guest.kick()?;
        // Whether it answers or not: a queue that leads nowhere stays silent.
        let (before, mut looks) = (guest.used()?, 0);
        this.wait(|| {
            looks += 1;
            looks > 200 || guest.used().map_or(true, |now| now != before)
        });
        // The daemon has an end to it, or goes on.
        guest.wire.check()?;
    }
    Ok(())
}

struct Guest {
    wire: VhostUser,
    memory: File,
    kick: OwnedFd,
    next: u16,
}

impl Guest {
    fn connect(socket: &Path) -> Result<Self, Ended> {
        let mut wire = VhostUser::connect(socket, PATIENCE)?;
        let memory = File::from(memfd_create("guest", MemfdFlags::CLOEXEC)?);
        memory.set_len(MEMORY)?;
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let (kick, call) = (event()?, event()?);
        let offered = wire.ask(code::GET_FEATURES)?;
        wire.tell(code::SET_OWNER, &[], None)?;
        wire.tell(code::SET_FEATURES, &[FEATURES & offered], None)?;
        wire.share(GUEST, USER, MEMORY, memory.as_fd())?;
        wire.tell(code::SET_VRING_NUM, &[u64::from(ENTRIES) << 32], None)?;
        wire.tell(code::SET_VRING_BASE, &[0], None)?;
        wire.tell(code::SET_VRING_ADDR, &[0, USER, USER + USED, USER + AVAILABLE, 0], None)?;
        wire.tell(code::SET_VRING_CALL, &[0], Some(call.as_fd()))?;
        wire.tell(code::SET_VRING_KICK, &[0], Some(kick.as_fd()))?;
        wire.check()?;
        Ok(Self { wire, memory, kick, next: 0 })
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Ended> {
        Ok(self.memory.write_all_at(bytes, at)?)
    }

    fn descriptor(&self, index: u16, at: u64, len: u32, flags: u16, next: u16) -> Result<(), Ended> {
        let mut bytes = at.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.write(u64::from(index) * 16, &bytes)
    }

    /// What a request begins with.
    fn header(&self, kind: u32, sector: u64) -> Result<(), Ended> {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend(0_u32.to_le_bytes());
        bytes.extend(sector.to_le_bytes());
        self.write(HEADER, &bytes)
    }

    /// Makes so many heads available, and says that there are `more` still.
    fn publish(&mut self, heads: impl Iterator<Item = u16>, more: u16) -> Result<(), Ended> {
        for head in heads {
            self.write(AVAILABLE + 4 + u64::from(self.next % ENTRIES) * 2, &head.to_le_bytes())?;
            self.next = self.next.wrapping_add(1);
        }
        self.write(AVAILABLE + 2, &self.next.wrapping_add(more).to_le_bytes())
    }

    fn kick(&self) -> Result<(), Ended> {
        Ok(File::from(self.kick.try_clone()?).write_all(&1_u64.to_ne_bytes())?)
    }

    /// How far the device has come.
    fn used(&self) -> Result<u16, Ended> {
        let mut index = [0; 2];
        self.memory.read_exact_at(&mut index, USED + 2)?;
        Ok(u16::from_le_bytes(index))
    }

    /// A descriptor that is the next one of itself, two that are each other's, and an indirect table that is itself.
    fn loops(&mut self, round: usize) -> Result<(), Ended> {
        self.header(0, 0)?;
        match round % 3 {
            0 => self.descriptor(0, GUEST + HEADER, 16, NEXT, 0)?,
            1 => {
                self.descriptor(0, GUEST + HEADER, 16, NEXT, 1)?;
                self.descriptor(1, GUEST + DATA, 512, NEXT | WRITE, 0)?;
            }
            _ => self.descriptor(0, GUEST, 16, INDIRECT, 0)?,
        }
        self.publish(std::iter::repeat_n(0, usize::from(ENTRIES)), 0)
    }

    /// A queue of large reads and of what no request is; every eighth time, more of them than a queue has.
    fn floods(&mut self, round: usize) -> Result<(), Ended> {
        let kind = [0, 0x7777, 4, 8, 13][round % 5];
        self.header(kind, if round.is_multiple_of(3) { u64::MAX - 7 } else { 0 })?;
        for chain in 0..CHAINS {
            let first = chain * 3;
            self.descriptor(first, GUEST + HEADER, 16, NEXT, first + 1)?;
            self.descriptor(first + 1, GUEST + DATA, 1 << 20, NEXT | WRITE, first + 2)?;
            self.descriptor(first + 2, GUEST + HEADER + 16, 1, WRITE, 0)?;
        }
        for _ in 0..32 {
            self.kick()?;
        }
        // Only when all have come back, so that the queue lives.
        let heads = if self.next == self.used()? { CHAINS } else { 0 };
        self.publish((0..heads).map(|chain| chain * 3), if round.is_multiple_of(8) { 0x4000 } else { 0 })
    }

    /// Requests under which the memory goes, in the end that of the queue.
    fn shrinking(&mut self, round: usize) -> Result<(), Ended> {
        self.floods(1)?;
        self.kick()?;
        if round.is_multiple_of(3) {
            ftruncate(&self.memory, if round.is_multiple_of(2) { DATA } else { 0 })?;
        }
        Ok(())
    }
}
