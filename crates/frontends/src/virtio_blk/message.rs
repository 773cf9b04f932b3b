//! vhost-user messages as types: what a front end may send, checked, and our answers. No I/O happens here.
//!
//! Layouts and numbers are those of QEMU's `docs/interop/vhost-user.rst`. Everything is little-endian, like us.

use thiserror::Error;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

/// Descriptors one message may carry.
pub(crate) const MAX_FDS: usize = 8;
/// Regions one memory table may have.
pub(crate) const MAX_REGIONS: usize = 8;
/// Bytes of device configuration that one message may ask for.
pub(crate) const MAX_CONFIG: usize = 256;
/// Largest payload: none that we know is longer than a full memory table or the configuration.
pub(crate) const MAX_PAYLOAD: usize = 1024;

/// Names of protocol features.
pub(crate) mod protocol {
    pub(crate) const MQ: u64 = 1 << 0;
    pub(crate) const LOG_SHMFD: u64 = 1 << 1;
    pub(crate) const REPLY_ACK: u64 = 1 << 3;
    pub(crate) const BACKEND_REQ: u64 = 1 << 5;
    pub(crate) const CONFIG: u64 = 1 << 9;
    pub(crate) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub(crate) const RESET_DEVICE: u64 = 1 << 13;
    pub(crate) const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub(crate) const STATUS: u64 = 1 << 16;
    pub(crate) const DEVICE_STATE: u64 = 1 << 19;
    /// Everything we do.
    pub(crate) const ALL: u64 = MQ
        | LOG_SHMFD
        | REPLY_ACK
        | BACKEND_REQ
        | CONFIG
        | INFLIGHT_SHMFD
        | RESET_DEVICE
        | CONFIGURE_MEM_SLOTS
        | STATUS
        | DEVICE_STATE;
}

/// Request numbers.
pub(crate) mod code {
    pub(crate) const GET_FEATURES: u32 = 1;
    pub(crate) const SET_FEATURES: u32 = 2;
    pub(crate) const SET_OWNER: u32 = 3;
    pub(crate) const RESET_OWNER: u32 = 4;
    pub(crate) const SET_MEM_TABLE: u32 = 5;
    pub(crate) const SET_LOG_BASE: u32 = 6;
    pub(crate) const SET_LOG_FD: u32 = 7;
    pub(crate) const SET_VRING_NUM: u32 = 8;
    pub(crate) const SET_VRING_ADDR: u32 = 9;
    pub(crate) const SET_VRING_BASE: u32 = 10;
    pub(crate) const GET_VRING_BASE: u32 = 11;
    pub(crate) const SET_VRING_KICK: u32 = 12;
    pub(crate) const SET_VRING_CALL: u32 = 13;
    pub(crate) const SET_VRING_ERR: u32 = 14;
    pub(crate) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(crate) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(crate) const GET_QUEUE_NUM: u32 = 17;
    pub(crate) const SET_VRING_ENABLE: u32 = 18;
    pub(crate) const SET_BACKEND_REQ_FD: u32 = 21;
    pub(crate) const GET_CONFIG: u32 = 24;
    pub(crate) const SET_CONFIG: u32 = 25;
    pub(crate) const GET_INFLIGHT_FD: u32 = 31;
    pub(crate) const SET_INFLIGHT_FD: u32 = 32;
    pub(crate) const RESET_DEVICE: u32 = 34;
    pub(crate) const GET_MAX_MEM_SLOTS: u32 = 36;
    pub(crate) const ADD_MEM_REG: u32 = 37;
    pub(crate) const REM_MEM_REG: u32 = 38;
    pub(crate) const SET_STATUS: u32 = 39;
    pub(crate) const GET_STATUS: u32 = 40;
    pub(crate) const SET_DEVICE_STATE_FD: u32 = 42;
    pub(crate) const CHECK_DEVICE_STATE: u32 = 43;
    /// On the back end's own channel.
    pub(crate) const BACKEND_CONFIG_CHANGE: u32 = 2;
}

/// The head of every message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) request: u32,
    pub(crate) flags: u32,
    pub(crate) size: u32,
}

impl Header {
    pub(crate) const SIZE: usize = size_of::<Self>();
    const VERSION_MASK: u32 = 3;
    const VERSION: u32 = 1;
    const REPLY: u32 = 1 << 2;
    const NEED_REPLY: u32 = 1 << 3;

    /// A message of our own accord.
    pub(crate) fn request(request: u32) -> Self {
        Self { request, flags: Self::VERSION, size: 0 }
    }

    /// An answer to a message.
    pub(crate) fn reply(request: u32, size: usize) -> Self {
        Self { request, flags: Self::VERSION | Self::REPLY, size: size as u32 }
    }

    /// Whether the front end waits for word that the message was carried out.
    pub(crate) fn needs_reply(&self) -> bool {
        self.flags & Self::NEED_REPLY != 0
    }

    /// Bytes of payload that follow.
    pub(crate) fn payload_size(&self) -> Result<usize, BadMessage> {
        if self.flags & Self::VERSION_MASK != Self::VERSION || self.flags & Self::REPLY != 0 {
            return Err(BadMessage::Header(self.flags));
        }
        let size = self.size as usize;
        if size > MAX_PAYLOAD { Err(BadMessage::Size { request: self.request, size }) } else { Ok(size) }
    }
}

/// Why a message cannot be understood: the connection ends.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub(crate) enum BadMessage {
    #[error("a header with flags {0:#x}: version 1 and no reply is possible")]
    Header(u32),
    #[error("request {request} with a payload of {size} bytes")]
    Size { request: u32, size: usize },
    #[error("request {request} with {found} file descriptors")]
    Descriptors { request: u32, found: usize },
    #[error("request {0} is unknown, or was not negotiated")]
    Unknown(u32),
}

/// A region of the guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Region {
    /// First guest address.
    pub(crate) guest: u64,
    pub(crate) size: u64,
    /// First address in the front end's process.
    pub(crate) user: u64,
    /// Offset in the file.
    pub(crate) offset: u64,
}

/// A number that belongs to a queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct VringState {
    pub(crate) index: u32,
    pub(crate) num: u32,
}

/// Where a queue's parts are, in addresses of the front end's process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct VringAddr {
    pub(crate) index: u32,
    pub(crate) flags: u32,
    pub(crate) desc: u64,
    pub(crate) used: u64,
    pub(crate) avail: u64,
    pub(crate) log: u64,
}

impl VringAddr {
    /// Changes of the used ring are logged, at `log`.
    pub(crate) const LOG: u32 = 1;
}

/// A range of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct LogBase {
    pub(crate) size: u64,
    pub(crate) offset: u64,
}

/// The record of requests under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Inflight {
    pub(crate) size: u64,
    pub(crate) offset: u64,
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
    pub(crate) padding: u32,
}

/// Which way the device's state is to go, and when.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct StateTransfer {
    pub(crate) direction: u32,
    pub(crate) phase: u32,
}

impl StateTransfer {
    /// To the front end.
    pub(crate) const SAVE: u32 = 0;
    /// From the front end.
    pub(crate) const LOAD: u32 = 1;
    /// All queues are stopped: the only phase there is.
    pub(crate) const STOPPED: u32 = 0;
    /// The answer to one that is refused: an error, and no descriptor.
    pub(crate) const REFUSED: u64 = 1 | 1 << 8;
}

/// The head of a piece of device configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct ConfigHead {
    pub(crate) offset: u32,
    pub(crate) size: u32,
    pub(crate) flags: u32,
}

/// Which queue a descriptor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VringFd {
    pub(crate) index: u32,
    /// A descriptor comes along.
    pub(crate) with_fd: bool,
}

impl VringFd {
    const NO_FD: u64 = 1 << 8;
}

/// What a front end asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<Region>),
    SetLogBase(LogBase),
    SetLogFd,
    SetVringNum(VringState),
    SetVringAddr(VringAddr),
    SetVringBase(VringState),
    GetVringBase(u32),
    SetVringKick(VringFd),
    SetVringCall(VringFd),
    SetVringErr(VringFd),
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable(VringState),
    SetBackendReqFd,
    GetConfig(ConfigHead),
    SetConfig(ConfigHead, Vec<u8>),
    GetInflightFd(Inflight),
    SetInflightFd(Inflight),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(Region),
    RemMemReg(Region),
    SetStatus(u64),
    GetStatus,
    SetDeviceStateFd(StateTransfer),
    CheckDeviceState,
}

/// A payload of exactly one value.
fn value<T: FromBytes>(header: &Header, payload: &[u8]) -> Result<T, BadMessage> {
    T::read_from_bytes(payload).map_err(|_| BadMessage::Size { request: header.request, size: payload.len() })
}

fn empty(header: &Header, payload: &[u8], message: Message) -> Result<Message, BadMessage> {
    // Some front ends send a word that means nothing.
    if payload.len() <= 8 { Ok(message) } else { Err(BadMessage::Size { request: header.request, size: payload.len() }) }
}

fn vring_fd(header: &Header, payload: &[u8]) -> Result<VringFd, BadMessage> {
    let word: u64 = value(header, payload)?;
    Ok(VringFd { index: (word & 0xff) as u32, with_fd: word & VringFd::NO_FD == 0 })
}

fn mem_table(header: &Header, payload: &[u8]) -> Result<Message, BadMessage> {
    let wrong = BadMessage::Size { request: header.request, size: payload.len() };
    let (count, rest) = u32::read_from_prefix(payload).map_err(|_| wrong)?;
    let (_padding, mut rest) = u32::read_from_prefix(rest).map_err(|_| wrong)?;
    if count as usize > MAX_REGIONS {
        return Err(wrong);
    }
    let mut regions = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let (region, more) = Region::read_from_prefix(rest).map_err(|_| wrong)?;
        regions.push(region);
        rest = more;
    }
    // QEMU's message has a fixed size, whatever the count.
    Ok(Message::SetMemTable(regions))
}

fn single_region(header: &Header, payload: &[u8]) -> Result<Region, BadMessage> {
    let wrong = BadMessage::Size { request: header.request, size: payload.len() };
    let (_padding, rest) = u64::read_from_prefix(payload).map_err(|_| wrong)?;
    Ok(Region::read_from_prefix(rest).map_err(|_| wrong)?.0)
}

fn config(header: &Header, payload: &[u8]) -> Result<(ConfigHead, Vec<u8>), BadMessage> {
    let wrong = BadMessage::Size { request: header.request, size: payload.len() };
    let (head, bytes) = ConfigHead::read_from_prefix(payload).map_err(|_| wrong)?;
    if head.size as usize > MAX_CONFIG || bytes.len() < head.size as usize {
        return Err(wrong);
    }
    Ok((head, bytes.to_vec()))
}

fn inflight(header: &Header, payload: &[u8]) -> Result<Inflight, BadMessage> {
    // Without the padding at its end, for those who pack it.
    let mut whole = Inflight::new_zeroed();
    let least = size_of::<Inflight>() - 4;
    if !(least..=size_of::<Inflight>()).contains(&payload.len()) {
        return Err(BadMessage::Size { request: header.request, size: payload.len() });
    }
    whole.as_mut_bytes()[..payload.len()].copy_from_slice(payload);
    Ok(whole)
}

impl Message {
    /// Understands a whole message; `fds` is the number of descriptors that came with it.
    pub(crate) fn parse(header: &Header, payload: &[u8], fds: usize) -> Result<Self, BadMessage> {
        let message = Self::parse_payload(header, payload)?;
        if message.descriptors().contains(&fds) {
            Ok(message)
        } else {
            Err(BadMessage::Descriptors { request: header.request, found: fds })
        }
    }

    fn parse_payload(header: &Header, payload: &[u8]) -> Result<Self, BadMessage> {
        Ok(match header.request {
            code::GET_FEATURES => empty(header, payload, Self::GetFeatures)?,
            code::SET_FEATURES => Self::SetFeatures(value(header, payload)?),
            code::SET_OWNER => empty(header, payload, Self::SetOwner)?,
            code::RESET_OWNER => empty(header, payload, Self::ResetOwner)?,
            code::SET_MEM_TABLE => mem_table(header, payload)?,
            code::SET_LOG_BASE => Self::SetLogBase(value(header, payload)?),
            code::SET_LOG_FD => empty(header, payload, Self::SetLogFd)?,
            code::SET_VRING_NUM => Self::SetVringNum(value(header, payload)?),
            code::SET_VRING_ADDR => Self::SetVringAddr(value(header, payload)?),
            code::SET_VRING_BASE => Self::SetVringBase(value(header, payload)?),
            code::GET_VRING_BASE => Self::GetVringBase(value::<VringState>(header, payload)?.index),
            code::SET_VRING_KICK => Self::SetVringKick(vring_fd(header, payload)?),
            code::SET_VRING_CALL => Self::SetVringCall(vring_fd(header, payload)?),
            code::SET_VRING_ERR => Self::SetVringErr(vring_fd(header, payload)?),
            code::GET_PROTOCOL_FEATURES => empty(header, payload, Self::GetProtocolFeatures)?,
            code::SET_PROTOCOL_FEATURES => Self::SetProtocolFeatures(value(header, payload)?),
            code::GET_QUEUE_NUM => empty(header, payload, Self::GetQueueNum)?,
            code::SET_VRING_ENABLE => Self::SetVringEnable(value(header, payload)?),
            code::SET_BACKEND_REQ_FD => empty(header, payload, Self::SetBackendReqFd)?,
            code::GET_CONFIG => Self::GetConfig(config(header, payload)?.0),
            code::SET_CONFIG => {
                let (head, bytes) = config(header, payload)?;
                Self::SetConfig(head, bytes)
            }
            code::GET_INFLIGHT_FD => Self::GetInflightFd(inflight(header, payload)?),
            code::SET_INFLIGHT_FD => Self::SetInflightFd(inflight(header, payload)?),
            code::RESET_DEVICE => empty(header, payload, Self::ResetDevice)?,
            code::GET_MAX_MEM_SLOTS => empty(header, payload, Self::GetMaxMemSlots)?,
            code::ADD_MEM_REG => Self::AddMemReg(single_region(header, payload)?),
            code::REM_MEM_REG => Self::RemMemReg(single_region(header, payload)?),
            code::SET_STATUS => Self::SetStatus(value(header, payload)?),
            code::GET_STATUS => empty(header, payload, Self::GetStatus)?,
            code::SET_DEVICE_STATE_FD => Self::SetDeviceStateFd(value(header, payload)?),
            code::CHECK_DEVICE_STATE => empty(header, payload, Self::CheckDeviceState)?,
            unknown => return Err(BadMessage::Unknown(unknown)),
        })
    }

    /// How many descriptors may come with it.
    fn descriptors(&self) -> std::ops::RangeInclusive<usize> {
        match self {
            Self::SetMemTable(regions) => regions.len()..=regions.len(),
            Self::SetVringKick(fd) | Self::SetVringCall(fd) | Self::SetVringErr(fd) => {
                usize::from(fd.with_fd)..=usize::from(fd.with_fd)
            }
            Self::SetLogBase(_)
            | Self::SetLogFd
            | Self::SetBackendReqFd
            | Self::SetInflightFd(_)
            | Self::AddMemReg(_)
            | Self::SetDeviceStateFd(_) => 1..=1,
            // Some front ends send the region's descriptor once more.
            Self::RemMemReg(_) => 0..=1,
            _ => 0..=0,
        }
    }

    /// The protocol feature without which a front end may not send it.
    pub(crate) fn feature(&self) -> u64 {
        match self {
            Self::SetBackendReqFd => protocol::BACKEND_REQ,
            Self::GetConfig(_) | Self::SetConfig(..) => protocol::CONFIG,
            Self::SetLogBase(_) => protocol::LOG_SHMFD,
            Self::GetInflightFd(_) | Self::SetInflightFd(_) => protocol::INFLIGHT_SHMFD,
            Self::ResetDevice => protocol::RESET_DEVICE,
            Self::GetMaxMemSlots | Self::AddMemReg(_) | Self::RemMemReg(_) => protocol::CONFIGURE_MEM_SLOTS,
            Self::SetStatus(_) | Self::GetStatus => protocol::STATUS,
            Self::SetDeviceStateFd(_) | Self::CheckDeviceState => protocol::DEVICE_STATE,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(request: u32, size: usize) -> Header {
        Header { request, flags: 1, size: size as u32 }
    }

    #[test]
    fn headers_of_other_versions_replies_and_giants_are_refused() {
        assert_eq!(Header { request: 1, flags: 1, size: 8 }.payload_size(), Ok(8));
        assert_eq!(Header { request: 1, flags: 2, size: 8 }.payload_size(), Err(BadMessage::Header(2)));
        assert_eq!(Header { request: 1, flags: 5, size: 8 }.payload_size(), Err(BadMessage::Header(5)));
        let size = MAX_PAYLOAD + 1;
        assert_eq!(header(1, size).payload_size(), Err(BadMessage::Size { request: 1, size }));
    }

    #[test]
    fn a_memory_table_wants_a_descriptor_for_each_region() {
        let region = Region { guest: 0, size: 4096, user: 0x7000, offset: 0 };
        let payload = [2_u32.as_bytes(), 0_u32.as_bytes(), region.as_bytes(), region.as_bytes()].concat();
        let header = header(code::SET_MEM_TABLE, payload.len());
        assert_eq!(Message::parse(&header, &payload, 2), Ok(Message::SetMemTable(vec![region; 2])));
        assert!(Message::parse(&header, &payload, 1).is_err(), "a descriptor is missing");
        assert!(Message::parse(&header, &payload[..payload.len() - 1], 2).is_err(), "cut short");
        let many = [9_u32.as_bytes(), 0_u32.as_bytes(), &[0; 9 * 32]].concat();
        assert!(Message::parse(&header, &many, 8).is_err(), "more regions than a message may have");
    }

    #[test]
    fn payloads_of_the_wrong_size_and_unknown_requests_are_refused() {
        for request in 0..64 {
            for size in [0, 1, 7, 8, 9, 11, 12, 40, 300, MAX_PAYLOAD] {
                // Whatever it says, it neither panics nor takes what it does not have.
                let _ = Message::parse(&header(request, size), &vec![0xff; size], 0);
            }
        }
        assert_eq!(Message::parse(&header(99, 0), &[], 0), Err(BadMessage::Unknown(99)));
        assert!(Message::parse(&header(code::SET_FEATURES, 4), &[0; 4], 0).is_err());
    }

    #[test]
    fn what_comes_with_one_descriptor_comes_with_no_other_number() {
        for (request, size) in [
            (code::SET_LOG_BASE, 16),
            (code::SET_LOG_FD, 0),
            (code::SET_BACKEND_REQ_FD, 0),
            (code::SET_INFLIGHT_FD, 24),
            (code::ADD_MEM_REG, 40),
            (code::SET_DEVICE_STATE_FD, 8),
        ] {
            let parse = |fds| Message::parse(&header(request, size), &vec![0; size], fds);
            assert!(parse(1).is_ok(), "{request}: {:?}", parse(1));
            for found in [0, 2] {
                assert_eq!(parse(found), Err(BadMessage::Descriptors { request, found }));
            }
        }
    }

    #[test]
    fn a_kick_without_a_descriptor_says_so() {
        let header = header(code::SET_VRING_KICK, 8);
        let payload = 0x103_u64.to_le_bytes();
        assert_eq!(Message::parse(&header, &payload, 0), Ok(Message::SetVringKick(VringFd { index: 3, with_fd: false })));
        assert!(Message::parse(&header, &payload, 1).is_err());
        assert!(Message::parse(&header, &3_u64.to_le_bytes(), 0).is_err());
    }
}
