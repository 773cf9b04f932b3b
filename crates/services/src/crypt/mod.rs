//! Crypt: what reaches the leg is enciphered (AES-256-XTS), each block under its number.
//!
//! ```text
//!   write ─► buffer of the shard's ◄─ encipher ─ guest's memory        header on the leg: the volume's key, sealed by a
//!              └─► leg                                                 key-encryption key that the operator keeps elsewhere
//!   read  ─► leg ─► guest's memory ─ decipher in place
//!   re-key: chunk by chunk: requests to it wait ─► journal ─► flush ─► re-encipher ─► leg          (`rekey.rs`)
//! ```
//!
//! Invariants:
//! * Plain data never reach the leg, and the guest's memory is never enciphered in its place.
//! * A block of zeroes on the leg reads as zeroes: it was never written, or given back. No enciphered block is all zeroes.
//! * At any instant each block has the old key or the new one, and after a crash it is known which.
//! * Keys are in locked memory (`millrace-cipher`), never in a log, a message, the state store, or a core dump.
//!
//! That is the mode xts; `authenticated` is another one, with a path and a format of its own.

mod authenticated;
mod control;
mod fetched;
mod header;
mod keys;
mod rekey;
#[cfg(test)]
mod tests;
mod volume;

use std::{sync::Arc, time::Duration};

use millrace_block::{BlockSize, Volume};
use millrace_cipher::KeySource;

pub use self::fetched::{FetchedKey, FetchedKeys, key_sources};
use self::volume::Crypt;
use crate::{
    service::{Build, Kind, Layout, Plan, Service, ServiceError, Word},
    settings::{SettingError, Settings},
};

/// Its line in the table.
pub(crate) static KIND: Kind = Kind {
    name: "crypt",
    help: "what is on the leg is enciphered (AES-256) under a key that only the operator has; crypt(mode=authenticated, key=KEY, PLACE) | \
           LEG keeps the root elsewhere as well",
    legs: 1..=2,
    settings: &[
        Word {
            name: "key",
            help: "the key-encryption key: file:/PATH, keyring:NAME or, in quotes, \"command:/PROGRAM ARGUMENTS\"",
        },
        Word {
            name: "discard",
            help: "blocks that the guest gives back are given back to the leg, which shows where they are [true]",
        },
        Word { name: "mode", help: "xts: hidden; authenticated: hidden, and every change of a block is found [xts]" },
        Word { name: "save-after", help: "mode authenticated: how long tags may be in the log alone [5s]" },
        Word {
            name: "accept",
            help: "mode authenticated: a leg that was put back on purpose, as the error names it; of use once",
        },
        Word { name: "rekey-rate", help: "bytes that re-keying works on each second; 0: as fast as it goes [0]" },
    ],
    commands: &[Word { name: "rekey", help: "makes a new key and re-enciphers everything while the volume is in use" }],
    shares_legs: false,
    is_disk: false,
    samples: SAMPLES,
    plan,
};

/// The tests' key is in the repository, so that it is in the tests' program only.
#[cfg(any(test, feature = "testing"))]
const SAMPLES: &[&str] = &[
    concat!("crypt(key=\"file:", env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key\", ?)"),
    concat!("crypt(discard=false, key=\"file:", env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key\", ?)"),
    concat!(
        "crypt(mode=authenticated, save-after=1ms, key=\"file:",
        env!("CARGO_MANIFEST_DIR"),
        "/src/crypt/tests/test.key\", ?)"
    ),
    concat!(
        "crypt(mode=authenticated, save-after=1ms, key=\"file:",
        env!("CARGO_MANIFEST_DIR"),
        "/src/crypt/tests/test.key\", ?, ?)"
    ),
];
#[cfg(not(any(test, feature = "testing")))]
const SAMPLES: &[&str] = &[];

fn plan(settings: &Settings) -> Result<Box<dyn Plan>, SettingError> {
    let key = settings.required("key")?;
    let key: KeySource =
        key.parse().map_err(|error: millrace_cipher::KeyError| SettingError::new("key", error.to_string()))?;
    let discard = settings.parsed("discard", "true or false")?.unwrap_or(true);
    let rekey_rate = settings.size("rekey-rate")?.unwrap_or(0);
    let mode = match settings.text("mode") {
        None | Some("xts") => Mode::Xts,
        Some("authenticated") => Mode::Authenticated,
        Some(other) => return Err(SettingError::new("mode", format!("{other:?} is none; there are xts and authenticated"))),
    };
    let save_after = settings.duration("save-after")?.unwrap_or(Duration::from_secs(5));
    if !(Duration::from_millis(1)..=Duration::from_secs(600)).contains(&save_after) {
        return Err(SettingError::new("save-after", "from 1ms to 10m is possible"));
    }
    if settings.text("save-after").is_some() && mode != Mode::Authenticated {
        return Err(SettingError::new("save-after", "is of no use in this mode"));
    }
    let accept = settings.text("accept").map(str::to_owned);
    if accept.is_some() && mode != Mode::Authenticated {
        return Err(SettingError::new("accept", "is of no use in this mode"));
    }
    Ok(Box::new(CryptPlan { key, discard, rekey_rate, mode, save_after, accept }))
}

/// What is made of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Xts,
    Authenticated,
}

#[derive(Debug)]
struct CryptPlan {
    key: KeySource,
    discard: bool,
    /// Bytes a second; 0: no limit.
    rekey_rate: u64,
    mode: Mode,
    /// In the authenticated mode, how long tags may be in the log alone.
    save_after: Duration,
    /// A leg that was put back on purpose.
    accept: Option<String>,
}

impl Plan for CryptPlan {
    fn layout(&self, legs: usize) -> Layout {
        // Whoever has the key sees the same bytes, whatever seals it, and wherever the root is kept beside the leg.
        let how = match self.mode {
            Mode::Xts => "crypt",
            Mode::Authenticated => "crypt authenticated",
        };
        Layout::OwnOf(how.to_owned(), vec![legs.saturating_sub(1)])
    }

    fn leg_sizes(&self, size: u64, stated: &[Option<u64>], block_size: BlockSize) -> Vec<Option<u64>> {
        let needed = match self.mode {
            Mode::Xts => Some(size.saturating_add(header::OFFSET)),
            Mode::Authenticated => authenticated::leg_bytes(size, block_size),
        };
        let data = stated.len().saturating_sub(1);
        let told = |leg| if leg == data { needed } else { Some(authenticated::PLACE_BYTES) };
        stated.iter().enumerate().map(|(leg, stated)| (*stated).max(told(leg))).collect()
    }

    fn needs_by_blocks(&self) -> bool {
        self.mode == Mode::Authenticated
    }

    fn build(&self, build: Build<'_>) -> Result<Arc<dyn Service>, ServiceError> {
        if self.mode == Mode::Authenticated {
            // Fetched before any pause: a command may take its time.
            let kek = fetched::key_of(build.shared, &self.key)?;
            let settled = authenticated::Settled {
                key: self.key.clone(),
                discard: self.discard,
                save_after: self.save_after,
                rekey_rate: self.rekey_rate,
                accept: self.accept.clone(),
                stated: build.stated_of(build.legs.len().saturating_sub(1)),
            };
            return authenticated::build(build, settled, kek);
        }
        if build.legs.len() > 1 {
            let why = "in the mode xts it is over one leg; a place for the root is of use with mode=authenticated";
            return Err(ServiceError::Legs(why.to_owned()));
        }
        let leg = build.only_leg();
        let has = leg.geometry().bytes();
        let room = has.saturating_sub(header::OFFSET);
        let size = build.size.unwrap_or(room);
        if size > room || room == 0 {
            let (head, wanted) = (header::OFFSET, build.size.unwrap_or(1));
            return Err(ServiceError::Legs(format!(
                "its leg has {has} bytes; it needs {head} for its header beside the {wanted} that are asked for"
            )));
        }
        // Fetched before any pause: a command may take its time.
        let key = fetched::key_of(build.shared, &self.key)?;
        let sizing = (build.stated_of(0), build.sizing_of(0).keeps);
        Ok(Arc::new(Crypt::new(build.name, (leg, sizing), size, self, key)))
    }
}
