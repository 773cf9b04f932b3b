//! Messages between keeper and worker: 64 bytes each, with a descriptor or, for a reply to a client, with the reply.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{BorrowedFd, OwnedFd},
};

use rustix::{
    io::{Errno, retry_on_intr},
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, recvmsg, sendmsg,
    },
};

use crate::{Key, Kind};

/// Bytes of a message without a reply's own.
pub(crate) const SIZE: usize = 64;
/// Version of these messages; a worker understands the one before as well. Of [`What::WARM`], which a worker sends before it knows its
/// keeper's, the form never changes.
pub(crate) const PROTOCOL: u32 = 1;
/// Descriptors with one message: a vfio-user reply may carry some.
pub(crate) const MAX_FDS: usize = 16;

/// What a message says. Numbers, because the other side may be of another version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct What(u32);

impl What {
    /// To the keeper: hold this descriptor, instead of what the key named before.
    pub(crate) const PUT: Self = Self(0);
    /// To the keeper: let go of kinds `key.kind` to `number`, in every slot.
    pub(crate) const DROP: Self = Self(1);
    /// To the keeper: this one slot.
    pub(crate) const DROP_ONE: Self = Self(2);
    /// To the keeper: guests are served.
    pub(crate) const READY: Self = Self(3);
    /// To the keeper: send what follows to the client `key` names.
    pub(crate) const REPLY: Self = Self(4);
    /// To the worker: this was held. `number`: replies forwarded to it.
    pub(crate) const HELD: Self = Self(5);
    /// To the worker: that was all. `number` and `more` are its predecessor's end.
    pub(crate) const BEGIN: Self = Self(6);
    /// To the worker: stop in order.
    pub(crate) const STOP: Self = Self(7);
    /// To the keeper: all that can be done before BEGIN is done. What follows says which layouts the worker understands.
    pub(crate) const WARM: Self = Self(8);
    /// To the keeper: the binary whose path follows is to take this one's place; `owner` names the attempt, `number` is for how many
    /// milliseconds it is on trial.
    pub(crate) const UPGRADE: Self = Self(9);
    /// To the worker: the next one is warm, and understands the layouts that follow. Take no more work, and end.
    pub(crate) const LET_GO: Self = Self(10);
    /// To the keeper: no.
    pub(crate) const REFUSE: Self = Self(11);
    /// To the worker: how the attempt `owner` ended. `slot`: an [`Upgraded`](crate::Upgraded)'s result, `number` its detail.
    pub(crate) const UPGRADED: Self = Self(12);
    /// To the worker: it is on trial no longer, nobody goes back to the one before.
    pub(crate) const SETTLED: Self = Self(13);
    /// To the keeper: the trial is over, whatever time it had left.
    pub(crate) const SETTLE: Self = Self(14);
    /// To the keeper: the cell whose name follows is to run.
    pub(crate) const START_CELL: Self = Self(15);
    /// To the keeper: that one is not to run any more.
    pub(crate) const STOP_CELL: Self = Self(16);
    /// To the worker: what it had put under this key is not held, for want of room.
    pub(crate) const NOT_HELD: Self = Self(17);
}

/// A message without its descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) what: What,
    /// The version of its sender's protocol.
    pub(crate) protocol: u32,
    pub(crate) key: Key,
    pub(crate) number: u64,
    pub(crate) more: u64,
}

impl Message {
    pub(crate) fn new(what: What, key: Key) -> Self {
        Self { what, protocol: PROTOCOL, key, number: 0, more: 0 }
    }

    /// One that is about nothing that is held.
    pub(crate) fn plain(what: What) -> Self {
        Self::new(what, Key::of_daemon(Kind(0)))
    }

    fn to_bytes(self) -> [u8; SIZE] {
        let mut bytes = [0; SIZE];
        bytes[0..4].copy_from_slice(&self.what.0.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.key.kind.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.key.slot.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.protocol.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.key.owner);
        bytes[32..40].copy_from_slice(&self.number.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.more.to_le_bytes());
        bytes
    }

    /// `None`: too short.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let long = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let owner = bytes.get(16..32)?.try_into().ok()?;
        let key = Key { owner, kind: Kind(word(4)?), slot: word(8)? };
        Some(Self { what: What(word(0)?), protocol: word(12)?, key, number: long(32)?, more: long(40)? })
    }
}

/// Sends a message; waits while the other side is behind, unless it is told not to.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    message: Message,
    data: &[&[u8]; 3],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<(), Errno> {
    let header = message.to_bytes();
    let parts = [IoSlice::new(&header), IoSlice::new(data[0]), IoSlice::new(data[1]), IoSlice::new(data[2])];
    send_parts(socket, &parts, fds, flags).map(|_| ())
}

/// Sends bytes as they are. Returns how many were taken.
pub(crate) fn send_parts(
    socket: BorrowedFd<'_>,
    parts: &[IoSlice<'_>],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL);
    }
    retry_on_intr(|| sendmsg(socket, parts, &mut control, flags | SendFlags::NOSIGNAL))
}

/// What came: the message, what follows it, its descriptors.
pub(crate) struct Received<'a> {
    pub(crate) message: Option<Message>,
    pub(crate) data: &'a [u8],
    pub(crate) fds: Vec<OwnedFd>,
}

/// The next message; `None` when the other side is gone.
pub(crate) fn receive<'a>(
    socket: BorrowedFd<'_>,
    buffer: &'a mut [u8],
    flags: RecvFlags,
) -> Result<Option<Received<'a>>, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags | RecvFlags::CMSG_CLOEXEC) {
            // A reset is told once, before what the other side sent until then.
            Err(Errno::INTR | Errno::CONNRESET) => {}
            received => break received?,
        }
    };
    let rights = |message| if let RecvAncillaryMessage::ScmRights(rights) = message { Some(rights) } else { None };
    let fds = control.drain().filter_map(rights).flatten().collect();
    let whole = !received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    let (header, data) = buffer.get(..received.bytes).unwrap_or_default().split_at(SIZE.min(received.bytes));
    let message = if whole { Message::from_bytes(header) } else { None };
    Ok((received.bytes > 0).then_some(Received { message, data, fds }))
}
