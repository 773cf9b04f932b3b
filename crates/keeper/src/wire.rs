//! Messages between keeper and worker: 64 bytes each, with a descriptor or, for a reply to a client, with the reply.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{BorrowedFd, OwnedFd},
};

use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, recvmsg, sendmsg,
    },
};

use crate::{Key, Kind};

/// Bytes of a message without a reply's own.
pub(crate) const SIZE: usize = 64;
/// Descriptors with one message: a vfio-user reply may carry some.
pub(crate) const MAX_FDS: usize = 16;

/// What a message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// To the keeper: hold this descriptor, instead of what the key named before.
    Put,
    /// To the keeper: let go of kinds `key.kind` to `number`, in every slot.
    Drop,
    /// To the keeper: this one slot.
    DropOne,
    /// To the keeper: guests are served.
    Ready,
    /// To the keeper: send what follows to the client `key` names.
    Reply,
    /// To the worker: this was held. `number`: replies forwarded to it.
    Held,
    /// To the worker: that was all. `number` and `more` are its predecessor's end.
    Begin,
    /// To the worker: stop in order.
    Stop,
}

const ALL: [What; 8] = [What::Put, What::Drop, What::DropOne, What::Ready, What::Reply, What::Held, What::Begin, What::Stop];

/// A message without its descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) what: What,
    pub(crate) key: Key,
    pub(crate) number: u64,
    pub(crate) more: u64,
}

impl Message {
    pub(crate) fn new(what: What, key: Key) -> Self {
        Self { what, key, number: 0, more: 0 }
    }

    /// One that is about nothing that is held.
    pub(crate) fn plain(what: What) -> Self {
        Self::new(what, Key::of_daemon(Kind(0)))
    }

    /// Of BEGIN: when its predecessor died.
    pub(crate) fn died_micros(&self) -> u64 {
        self.key.owner.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }

    /// Of BEGIN: notes when its predecessor died.
    pub(crate) fn set_died_micros(&mut self, micros: u64) {
        if let Some(bytes) = self.key.owner.first_chunk_mut() {
            *bytes = micros.to_le_bytes();
        }
    }

    fn to_bytes(self) -> [u8; SIZE] {
        let mut bytes = [0; SIZE];
        bytes[0..4].copy_from_slice(&(self.what as u32).to_le_bytes());
        bytes[4..8].copy_from_slice(&self.key.kind.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.key.slot.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.key.owner);
        bytes[32..40].copy_from_slice(&self.number.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.more.to_le_bytes());
        bytes
    }

    /// `None`: too short, or of a kind that is not known here.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let long = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let what = *ALL.get(word(0)? as usize)?;
        let owner = bytes.get(16..32)?.try_into().ok()?;
        let key = Key { owner, kind: Kind(word(4)?), slot: word(8)? };
        Some(Self { what, key, number: long(32)?, more: long(40)? })
    }
}

/// Sends a message; waits while the other side is behind.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    message: Message,
    data: &[&[u8]; 3],
    fds: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let header = message.to_bytes();
    let parts = [IoSlice::new(&header), IoSlice::new(data[0]), IoSlice::new(data[1]), IoSlice::new(data[2])];
    send_parts(socket, &parts, fds, SendFlags::NOSIGNAL).map(|_| ())
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
    loop {
        match sendmsg(socket, parts, &mut control, flags) {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
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
            Ok(received) => break received,
            // A reset is told once, before what the other side sent until then.
            Err(Errno::INTR | Errno::CONNRESET) => {}
            Err(errno) => return Err(errno),
        }
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    let whole = !received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    let (header, data) = buffer.get(..received.bytes).unwrap_or_default().split_at(SIZE.min(received.bytes));
    let message = if whole { Message::from_bytes(header) } else { None };
    Ok(Some(Received { message, data, fds }))
}
