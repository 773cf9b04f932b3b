//! How an operator names a back end.

use std::{convert::Infallible, fmt, path::PathBuf, str::FromStr, sync::Arc};

use millrace_block::{BlockSize, Volume, VolumeError};
use thiserror::Error;

use crate::{FileOptions, FileVolume, MemoryVolume, NullVolume, NvmePlace, NvmeVolume};

/// A back end as written on the command line and in the configuration: `memory`, `null`, `file:PATH` or
/// `nvme:ADDRESS[/NSID]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum BackendSpec {
    /// This process's memory.
    Memory,
    /// Nowhere.
    Null,
    /// A regular file or a block device.
    File(PathBuf),
    /// A namespace of a physical controller that is bound to vfio-pci.
    Nvme(NvmePlace),
}

/// Text that names no back end.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ParseSpecError {
    /// Neither of the known kinds.
    #[error("back end {0:?} is unknown; write memory, null, file:PATH or nvme:ADDRESS")]
    Unknown(String),
    /// `file:` alone.
    #[error("back end \"file:\" lacks a path; write file:PATH")]
    NoPath,
    /// `nvme:` with something else than an address.
    #[error("back end \"nvme:\": {0}")]
    NoPlace(String),
}

impl FromStr for BackendSpec {
    type Err = ParseSpecError;

    fn from_str(text: &str) -> Result<Self, ParseSpecError> {
        if let Some(place) = text.strip_prefix("nvme:") {
            return place.parse().map(Self::Nvme).map_err(ParseSpecError::NoPlace);
        }
        match (text, text.strip_prefix("file:")) {
            ("memory", _) => Ok(Self::Memory),
            ("null", _) => Ok(Self::Null),
            (_, Some("")) => Err(ParseSpecError::NoPath),
            (_, Some(path)) => path.parse().map(Self::File).map_err(|never: Infallible| match never {}),
            (_, None) => Err(ParseSpecError::Unknown(text.to_owned())),
        }
    }
}

impl fmt::Display for BackendSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory"),
            Self::Null => f.write_str("null"),
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Nvme(place) => write!(f, "nvme:{place}"),
        }
    }
}

/// Opens or creates the volume that `spec` names.
///
/// `size` is the volume's size in bytes. Only a file that exists, and a namespace, know their own; there, `None` means that
/// size.
///
/// # Errors
/// What the back end's own constructor says, and [`VolumeError::BadSize`] when a size is needed and none is given.
pub fn open(
    spec: &BackendSpec,
    name: &str,
    size: Option<u64>,
    block_size: BlockSize,
) -> Result<Arc<dyn Volume>, VolumeError> {
    let needed = || {
        let why = "this back end needs a size; in a stack, write (size=…) behind it";
        size.ok_or_else(|| VolumeError::BadSize { volume: name.to_owned(), size: 0, why })
    };
    Ok(match spec {
        BackendSpec::Memory => MemoryVolume::create(name, needed()?, block_size)?,
        BackendSpec::Null => NullVolume::create(name, needed()?, block_size)?,
        BackendSpec::File(path) => {
            FileVolume::open(name, &FileOptions { path: path.clone(), size, block_size, read_only: false })?
        }
        BackendSpec::Nvme(place) => NvmeVolume::open(name, place, size, block_size)?,
    })
}
