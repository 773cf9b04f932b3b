//! The client's memory as the server reaches it by messages.

use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

use crate::codec::{Command, Header, MAX_TRANSFER, wire};
use crate::transport::{Frame, Transport, TransportError};

/// Memory that was mapped without a file. The addresses are the server's word: check them.
pub trait ClientMemory: Send {
    /// Fills `buf` from `address` on.
    fn read(&mut self, address: u64, buf: &mut [u8]) -> Result<(), Errno>;

    /// Puts `data` at `address`.
    fn write(&mut self, address: u64, data: &[u8]) -> Result<(), Errno>;
}

/// Handles a request of the server.
pub(super) fn answer(
    transport: &mut Transport,
    memory: Option<&mut (dyn ClientMemory + '_)>,
    frame: Frame,
) -> Result<(), TransportError> {
    let Frame { header, payload, fds: _ } = frame;
    let result = access(&header, &payload, memory);
    transport.recycle(payload);
    if header.no_reply() {
        return Ok(());
    }
    match result {
        Ok((access, data)) => {
            let reply = Header::reply_to(&header, size_of_val(&access) + data.len());
            transport.send(&reply, [access.as_bytes(), &data], &[])
        }
        Err(errno) => transport.send(&Header::error_to(&header, errno), [&[], &[]], &[]),
    }
}

/// The fixed part of the reply, and what follows it.
fn access(
    header: &Header,
    payload: &[u8],
    memory: Option<&mut (dyn ClientMemory + '_)>,
) -> Result<(wire::DmaAccess, Vec<u8>), Errno> {
    let command = Command::from_wire(header.command).ok_or(Errno::NOSYS)?;
    if !matches!(command, Command::DmaRead | Command::DmaWrite) {
        return Err(Errno::OPNOTSUPP);
    }
    let (access, data) = wire::DmaAccess::read_from_prefix(payload).map_err(|_| Errno::INVAL)?;
    if access.count > u64::from(MAX_TRANSFER) {
        return Err(Errno::TOOBIG);
    }
    let memory = memory.ok_or(Errno::FAULT)?;
    if command == Command::DmaRead {
        let mut buf = vec![0; access.count as usize];
        memory.read(access.address, &mut buf)?;
        return Ok((access, buf));
    }
    if data.len() as u64 != access.count {
        return Err(Errno::INVAL);
    }
    memory.write(access.address, data)?;
    Ok((access, Vec::new()))
}
