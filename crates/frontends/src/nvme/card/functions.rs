//! What an operator has the storage functions do for a device, and its written form:
//!
//! ```text
//!   share=FIRST+BLOCKS,iops=N,bytes=N,replicate
//! ```

use std::{fmt, str::FromStr};

use thiserror::Error;

/// What the storage functions do for a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StorageFunctions {
    /// The guest sees so many blocks of its volume, from the first of these two on.
    pub window: Option<(u64, u64)>,
    /// Commands in a second.
    pub iops: Option<u64>,
    /// Bytes in a second.
    pub bytes: Option<u64>,
    /// Everything the guest writes goes to all volumes of the device; it sees the first one.
    pub replicate: bool,
}

/// Why a written form is none.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error(
    "{0:?} is no storage function: share=FIRST+BLOCKS (in blocks), iops=N, bytes=N (both in a second, not 0) and replicate are"
)]
pub struct ParseFunctionsError(String);

impl StorageFunctions {
    /// First block and number of blocks that the guest sees of a volume.
    pub(crate) fn window(&self, volume: u64) -> (u64, u64) {
        let (first, blocks) = self.window.unwrap_or((0, volume));
        (first, blocks.min(volume.saturating_sub(first)))
    }
}

impl FromStr for StorageFunctions {
    type Err = ParseFunctionsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut functions = Self::default();
        for word in text.split(',').filter(|word| !word.is_empty()) {
            let wrong = || ParseFunctionsError(word.to_owned());
            let number = |text: &str| text.parse::<u64>().map_err(|_| wrong());
            let count = |text: &str| number(text).and_then(|count| if count > 0 { Ok(count) } else { Err(wrong()) });
            match word.split_once('=') {
                Some(("share", window)) => {
                    let (first, blocks) = window.split_once('+').ok_or_else(wrong)?;
                    functions.window = Some((number(first)?, count(blocks)?));
                }
                Some(("iops", text)) => functions.iops = Some(count(text)?),
                Some(("bytes", text)) => functions.bytes = Some(count(text)?),
                None if word == "replicate" => functions.replicate = true,
                _ => return Err(wrong()),
            }
        }
        Ok(functions)
    }
}

impl fmt::Display for StorageFunctions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = [
            self.window.map(|(first, blocks)| format!("share={first}+{blocks}")),
            self.iops.map(|iops| format!("iops={iops}")),
            self.bytes.map(|bytes| format!("bytes={bytes}")),
            self.replicate.then(|| "replicate".to_owned()),
        ];
        f.write_str(&words.into_iter().flatten().collect::<Vec<_>>().join(","))
    }
}
