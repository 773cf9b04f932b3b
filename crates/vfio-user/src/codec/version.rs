//! VERSION: the capabilities, JSON in a C string, and what two sides agree on.

use std::fmt::Write as _;

use serde_json::Value;

use super::wire::Version;
use super::{MAX_DMA_MAPS, MAX_FDS, MAX_TRANSFER};

/// Major version spoken here.
const MAJOR: u16 = 0;
/// Highest minor version spoken here.
const MINOR: u16 = 0;
/// The most bytes of JSON that are looked at.
const MAX_JSON: usize = 4096;
/// The protocol's default page size, in bytes.
const PAGE: u64 = 4096;

/// What a peer can do ("Capabilities"); what it left out has the protocol's default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// File descriptors it takes with one message.
    pub max_msg_fds: usize,
    /// Bytes it moves with one message.
    pub max_data_xfer_size: u32,
    /// DMA ranges that may be mapped at once.
    pub max_dma_maps: u32,
    /// Page sizes of DMA ranges, or'ed together.
    pub pgsizes: u64,
    /// REGION_WRITE_MULTI works.
    pub write_multiple: bool,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self { max_msg_fds: 1, max_data_xfer_size: MAX_TRANSFER, max_dma_maps: 65535, pgsizes: PAGE, write_multiple: false }
    }
}

/// A version that cannot be agreed on: the connection ends.
#[derive(Debug, thiserror::Error)]
pub enum VersionError {
    /// The first message was another one.
    #[error("command {0} came before the version")]
    NotFirst(u16),
    /// Other major version, or a reply with a higher minor than asked for.
    #[error("the peer speaks version {major}.{minor}, we speak {MAJOR}.{MINOR}")]
    Version {
        /// The peer's major version.
        major: u16,
        /// The peer's minor version.
        minor: u16,
    },
    /// Version data without the NUL at its end, or absurdly long.
    #[error("{0} bytes of version data without the NUL at the end, or too many")]
    Unterminated(usize),
    /// Not JSON.
    #[error("the version data is not JSON")]
    Json(#[from] serde_json::Error),
    /// JSON of another shape.
    #[error("the version data's {0:?} is not what the protocol says")]
    Shape(&'static str),
    /// The reply is not even a version.
    #[error("a version reply of {0} bytes")]
    TooShort(usize),
}

/// The peer's capabilities and which of them it named.
struct Parsed {
    capabilities: Capabilities,
    pgsizes: bool,
    max_dma_maps: bool,
    max_msg_fds: bool,
    max_data_xfer_size: bool,
}

fn parse(data: &[u8]) -> Result<Parsed, VersionError> {
    let mut parsed = Parsed {
        capabilities: Capabilities::default(),
        pgsizes: false,
        max_dma_maps: false,
        max_msg_fds: false,
        max_data_xfer_size: false,
    };
    if data.is_empty() {
        return Ok(parsed);
    }
    let json = match data.split_last() {
        Some((0, json)) if json.len() <= MAX_JSON => json,
        _ => return Err(VersionError::Unterminated(data.len())),
    };
    let Value::Object(top) = serde_json::from_slice(json)? else {
        return Err(VersionError::Shape("version data"));
    };
    let list = match top.get("capabilities") {
        None => return Ok(parsed),
        Some(Value::Object(list)) => list,
        Some(_) => return Err(VersionError::Shape("capabilities")),
    };
    let number = |name: &'static str| match list.get(name) {
        None => Ok(None),
        Some(value) => value.as_u64().map(Some).ok_or(VersionError::Shape(name)),
    };
    let result = &mut parsed.capabilities;
    if let Some(fds) = number("max_msg_fds")? {
        result.max_msg_fds = usize::try_from(fds).unwrap_or(usize::MAX);
        parsed.max_msg_fds = true;
    }
    if let Some(bytes) = number("max_data_xfer_size")? {
        result.max_data_xfer_size = u32::try_from(bytes).unwrap_or(u32::MAX);
        parsed.max_data_xfer_size = true;
    }
    if let Some(maps) = number("max_dma_maps")? {
        result.max_dma_maps = u32::try_from(maps).unwrap_or(u32::MAX);
        parsed.max_dma_maps = true;
    }
    if let Some(sizes) = number("pgsizes")? {
        result.pgsizes = sizes;
        parsed.pgsizes = true;
    }
    match list.get("write_multiple") {
        None => {}
        Some(Value::Bool(on)) => result.write_multiple = *on,
        Some(_) => return Err(VersionError::Shape("write_multiple")),
    }
    Ok(parsed)
}

/// What a client proposes: everything this crate can do.
pub(crate) fn proposal() -> String {
    format!(
        "{{\"capabilities\":{{\"max_msg_fds\":{MAX_FDS},\"max_data_xfer_size\":{MAX_TRANSFER},\
         \"max_dma_maps\":65535,\"pgsizes\":{PAGE},\"write_multiple\":true}}}}\0"
    )
}

/// A server's side: checks what the client proposes and writes the JSON of the reply. `transfer`: the most bytes that one message may
/// move to us; `maps`: the most pieces of memory that the device takes.
///
/// The reply names only what the client named and is never longer than the request, because QEMU reads it into the
/// request's buffer: what does not fit is left out, the most useful first in.
pub(crate) fn negotiate(
    major: u16,
    minor: u16,
    data: &[u8],
    transfer: u32,
    maps: u32,
) -> Result<(Capabilities, String), VersionError> {
    if major != MAJOR {
        return Err(VersionError::Version { major, minor });
    }
    let mut parsed = parse(data)?;
    let mut json = String::new();
    if data.is_empty() {
        return Ok((parsed.capabilities, json));
    }
    json.push_str("{\"capabilities\":{");
    let mut separator = "";
    let mut add = |name: &str, value: &dyn std::fmt::Display| {
        let before = json.len();
        // Writing to a String cannot fail.
        let _ = write!(json, "{separator}\"{name}\":{value}");
        let fits = json.len() + "}}\0".len() <= data.len();
        if fits {
            separator = ",";
        } else {
            json.truncate(before);
        }
        fits
    };
    let client = &mut parsed.capabilities;
    if parsed.max_msg_fds {
        add("max_msg_fds", &MAX_FDS);
    }
    if parsed.max_data_xfer_size {
        add("max_data_xfer_size", &transfer);
    }
    if client.write_multiple {
        client.write_multiple = add("write_multiple", &true);
    }
    let pgsizes = client.pgsizes & !(PAGE - 1);
    if parsed.pgsizes && pgsizes != 0 {
        add("pgsizes", &pgsizes);
    }
    if parsed.max_dma_maps {
        add("max_dma_maps", &client.max_dma_maps.min(maps).min(MAX_DMA_MAPS));
    }
    json.push_str("}}\0");
    if json.len() > data.len() {
        "{}\0".clone_into(&mut json);
    }
    Ok((parsed.capabilities, json))
}

/// What a client proposes and a server answers: no minor version is lower than ours.
pub(crate) fn our_version() -> Version {
    Version { major: MAJOR, minor: MINOR }
}

/// A client's side: checks the server's reply.
pub(crate) fn parse_reply(major: u16, minor: u16, data: &[u8]) -> Result<Capabilities, VersionError> {
    if major != MAJOR || minor > MINOR {
        return Err(VersionError::Version { major, minor });
    }
    Ok(parse(data)?.capabilities)
}
