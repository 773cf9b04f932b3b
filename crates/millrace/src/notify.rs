//! Tells systemd that we are ready, when it asked for that (sd_notify(3)).

use std::{
    env, io,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
};

pub(crate) fn ready() {
    if let Err(error) = tell("READY=1") {
        tracing::warn!(%error, "systemd could not be told that the daemon is ready");
    }
}

fn tell(message: &str) -> io::Result<()> {
    let Some(socket) = env::var_os("NOTIFY_SOCKET") else { return Ok(()) };
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(&socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(message.as_bytes(), &address).map(|_| ())
}
