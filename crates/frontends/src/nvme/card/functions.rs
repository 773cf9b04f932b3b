//! What an operator has the storage functions do for a device, and its written form:
//!
//! ```text
//!   share=FIRST+BLOCKS,iops=N,bytes=N,replicate
//! ```

use std::{fmt, str::FromStr};

use millrace_engine_model::map;
use millrace_functions::{Config, throttle::FRACTION};
use thiserror::Error;

use super::CLOCK;

/// Units of the engine's time in a second.
const UNITS: u64 = CLOCK / map::CYCLES_PER_UNIT;
/// The same, as caps count time.
const SECOND: u64 = UNITS << FRACTION;
/// Bits of the time that a command takes of its cap, and that a block takes of its.
const COMMAND_BITS: u32 = 32;
const BLOCK_BITS: u32 = 24;

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

    /// Whether an engine can do all of it, with some size of blocks: no cap is too small to be counted. `Err` names the least.
    pub fn check(&self) -> Result<(), String> {
        self.check_caps(512)
    }

    /// The same, with blocks of so many bytes.
    pub(super) fn check_caps(&self, block: u64) -> Result<(), String> {
        let caps =
            [("iops", self.iops, (SECOND >> COMMAND_BITS) + 1), ("bytes", self.bytes, ((SECOND * block) >> BLOCK_BITS) + 1)];
        match caps.into_iter().find(|(_, asked, least)| asked.is_some_and(|asked| asked < *least)) {
            Some((name, asked, least)) => {
                let asked = asked.unwrap_or_default();
                Err(format!(
                    "{name}={asked} is less than an engine counts: {name}={least} is the least with blocks of {block} bytes"
                ))
            }
            None => Ok(()),
        }
    }

    /// Words 3 and 4 of the function's configuration, with blocks of so many bytes.
    pub(super) fn caps(&self, block: u64) -> [u64; 2] {
        // A tenth of a second may be ahead.
        let cap = |time: u64, bits: u32| (UNITS / 10) << FRACTION << 32 | time.min((1 << bits) - 1);
        let iops = self.iops.map_or(0, |iops| cap(SECOND / iops, COMMAND_BITS));
        let bytes = self.bytes.map_or(0, |bytes| cap(SECOND * block / bytes, BLOCK_BITS));
        [iops, bytes]
    }

    /// Bits of word 0: what is on.
    pub(super) fn switches(&self) -> u64 {
        let bit = |on: bool, bit: u64| if on { bit } else { 0 };
        bit(self.window.is_some(), Config::SHARE)
            | bit(self.replicate, Config::REPLICATE)
            | bit(self.iops.is_some() || self.bytes.is_some(), Config::THROTTLE)
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
