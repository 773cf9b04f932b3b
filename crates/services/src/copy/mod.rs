//! Direct copies: from one volume to another, without a guest.
//!
//! ```text
//!   step ─► what does the source know of the next blocks?
//!     unused ─► so on the target, too? ─ no ─► zeroes there
//!     used ───► plain files that may share blocks ─► the system does ─ cannot ──┐
//!               else ──► on a shard: lanes of pieces, read ─ zeroes? ─ write ◄──┘
//! ```
//!
//! Where both volumes show metadata with their blocks, each block goes with its own, through the lanes: neither holes nor the system's
//! copies say anything of metadata. Nobody looks at them: protection information that does not fit its block comes as it is, and whoever
//! reads the copy finds that out.
//!
//! Invariants:
//! * What [`Copier::step`] has passed is on the target as the source had it at some moment of the step, and after
//!   [`Copier::flush`] durably so.
//! * Steps may be repeated: a copy that goes on from where it last was durable leaves nothing out.
//! * Nothing that requests wait for is held, and no buffer of theirs.
//!
//! It takes no snapshot: what a guest writes while its volume is copied is on the target, or not. It keeps nothing; who uses it
//! remembers how far it came.

pub(crate) mod lanes;
#[cfg(test)]
mod tests;

use std::{io, sync::Arc};

use millrace_block::{
    BlockCount, BlockError, Extent, Lba, Metadata, MetadataFormat, Operation, PlainFile, Request, Switch, TaskContext,
    Volume,
};
use millrace_engine::EngineError;
use thiserror::Error;

use self::lanes::{Ends, Side};
use crate::{
    background::{LocalFuture, Spawner, on_shard, own_buffers},
    legs,
};

/// Shorter holes are copied like data.
const LEAST_HOLE: u64 = 64 << 10;
/// Steps end at multiples of it, but for the last: whole blocks of every volume.
const LARGEST_BLOCK: u64 = 4096;
/// Bytes of a hole that are erased on the target at once.
const ERASED_AT_ONCE: u64 = 1 << 30;

/// Why a copy does not go on.
#[derive(Debug, Error)]
pub enum CopyError {
    /// The volumes do not fit each other.
    #[error("{0}")]
    Shape(String),
    /// The source could not be read.
    #[error("volume {volume} cannot be read at byte {offset}: {source}")]
    Read {
        /// The source.
        volume: String,
        /// Where, or a little later.
        offset: u64,
        /// What happened.
        #[source]
        source: BlockError,
    },
    /// The target could not be written.
    #[error("volume {volume} cannot be written at byte {offset}: {source}")]
    Write {
        /// The target.
        volume: String,
        /// Where, or a little later.
        offset: u64,
        /// What happened.
        #[source]
        source: BlockError,
    },
    /// There are no buffers.
    #[error("no memory to copy with: {0}")]
    Memory(#[source] io::Error),
    /// There is no shard to work on.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// What was copied, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Data that were moved.
    pub moved: u64,
    /// Data that the system has copied by itself, or shares.
    pub offloaded: u64,
    /// What holds nothing, or zeroes.
    pub skipped: u64,
}

/// A copy from one volume to another, for a thread that may wait.
pub struct Copier {
    source: Arc<Switch>,
    target: Arc<Switch>,
    spawner: Arc<dyn Spawner>,
    /// Bytes to copy.
    bytes: u64,
    /// The system may be asked to copy: it could do so without moving data, and has not refused yet.
    offload: bool,
    copied: Copied,
    worked: u64,
}

/// Whether a volume can be copied to another; how many bytes that are.
///
/// # Errors
/// [`CopyError::Shape`]: the target is smaller or is read-only, the source is no whole number of its blocks, or has metadata that
/// the target would not have in the same way.
pub fn check(source: &dyn Volume, target: &dyn Volume) -> Result<u64, CopyError> {
    fit(source, target).map(|(bytes, _)| bytes)
}

/// [`check`], and whether blocks go with their metadata.
fn fit(source: &dyn Volume, target: &dyn Volume) -> Result<(u64, bool), CopyError> {
    let shown = source.metadata().shown();
    if let Some(format) = shown {
        check_metadata(source, target, format)?;
    }
    let (from, to) = (source.geometry(), target.geometry());
    let (source, target) = (source.name(), target.name());
    let wrong = |what| Err(CopyError::Shape(what));
    if to.read_only {
        return wrong(format!("volume {target} is read-only"));
    }
    let block = u64::from(to.block_size.bytes());
    if !from.bytes().is_multiple_of(block) {
        let from = from.bytes();
        return wrong(format!(
            "volume {source} has {from} bytes, and volume {target} blocks of {block}: it must be a multiple"
        ));
    }
    if from.bytes() > to.bytes() {
        let (from, to) = (from.bytes(), to.bytes());
        return wrong(format!("volume {target} has {to} bytes, and volume {source} {from}: make the target as large first"));
    }
    Ok((from.bytes(), shown.is_some()))
}

/// Whether the target shows metadata as the source does, with blocks of the same size.
fn check_metadata(source: &dyn Volume, target: &dyn Volume, format: MetadataFormat) -> Result<(), CopyError> {
    let (from, to) = (source.geometry().block_size.bytes(), target.geometry().block_size.bytes());
    let (name, other, own) = (source.name(), target.name(), settings(format));
    let lost = format!("volume {name} has metadata with its blocks, which would be lost");
    let why = match target.metadata() {
        Metadata::Never => format!("{lost}: volume {other} keeps none; use a target with {own}"),
        Metadata::Hidden => format!("{lost}: volume {other} shows none now; format it with them, or use one with {own}"),
        Metadata::Shown(theirs) if theirs != format => format!(
            "volume {name} has {own}, and volume {other} {}: make the target with the source's settings",
            settings(theirs)
        ),
        Metadata::Shown(_) if from != to => format!(
            "volume {name} has metadata with blocks of {from} bytes, and volume {other} with blocks of {to}: make \
             the target with the source's block size"
        ),
        Metadata::Shown(_) => return Ok(()),
    };
    Err(CopyError::Shape(why))
}

/// How metadata are shown, as the settings of the service that keeps them.
fn settings(format: MetadataFormat) -> String {
    let MetadataFormat { protection, extended, first } = format;
    let protection = if protection == 0 { "none".to_owned() } else { protection.to_string() };
    let transfer = if extended { "extended" } else { "separate" };
    let position = if first { "first" } else { "last" };
    format!("metadata(protection={protection}, transfer={transfer}, position={position})")
}

impl Copier {
    /// A copy of all of `source` to the beginning of `target`.
    ///
    /// # Errors
    /// As [`check`].
    pub fn new(source: Arc<Switch>, target: Arc<Switch>, spawner: Arc<dyn Spawner>) -> Result<Self, CopyError> {
        let bytes = check(&*source, &*target)?;
        let offload = target.root().as_file().is_some_and(PlainFile::may_share);
        Ok(Self { source, target, spawner, bytes, offload, copied: Copied::default(), worked: 0 })
    }

    /// How much there is to copy.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What the steps have done so far.
    pub fn copied(&self) -> Copied {
        self.copied
    }

    /// Bytes of the steps so far that were read, zeroes or not, or that the system has copied: what a rate is of. Holes cost nothing.
    pub fn worked(&self) -> u64 {
        self.worked
    }

    /// Copies about `most` bytes from byte `at` on, or a whole hole. Where it came to.
    ///
    /// # Errors
    /// What failed; nothing is known then of what lies behind `at`.
    pub fn step(&mut self, at: u64, most: u64) -> Result<u64, CopyError> {
        let shape = |source: u64| {
            let (volume, bytes) = (self.source.name(), self.bytes);
            CopyError::Shape(format!("volume {volume} has {source} bytes now, and had {bytes} when the copy began"))
        };
        // It may have been resized or formatted since.
        let (now, tagged) = fit(&*self.source, &*self.target)?;
        let block = u64::from(self.target.geometry().block_size.bytes());
        if now < self.bytes || !self.bytes.is_multiple_of(block) {
            return Err(shape(now));
        }
        // Where a step ended in the middle of a block of now, that is done again.
        let at = at / LARGEST_BLOCK * LARGEST_BLOCK;
        // Of metadata it says nothing.
        let known = if tagged { None } else { bytes_of(&*self.source, at) };
        let left = self.bytes - at;
        if let Some((len, true)) = known
            && len >= LEAST_HOLE.min(left)
        {
            let len = whole(len.min(ERASED_AT_ONCE), left);
            self.clear(at, len)?;
            self.copied.skipped += len;
            return Ok(at + len);
        }
        let len = known.filter(|(_, unused)| !unused).map_or(most, |(len, _)| len.min(most)).min(left);
        let len = whole(len, left);
        if !tagged && let Some(done) = self.offloaded(at, len) {
            self.copied.offloaded += done;
            self.worked += done;
            return Ok(at + done);
        }
        self.carry(at, len, tagged)?;
        Ok(at + len)
    }

    /// Makes what was copied durable.
    ///
    /// # Errors
    /// The target failed.
    pub fn flush(&self) -> Result<(), CopyError> {
        self.on_target(0, |cx, target| Box::pin(async move { legs::flush(cx, &*target).await }))
    }

    /// Makes a range of the target read as zeroes.
    fn clear(&self, at: u64, len: u64) -> Result<(), CopyError> {
        if bytes_of(&*self.target, at).is_some_and(|(known, unused)| unused && known >= len) {
            return Ok(());
        }
        self.on_target(at, move |cx, target| {
            Box::pin(async move {
                let shift = target.geometry().block_size.shift();
                let operation = Operation::WriteZeroes { fua: false, deallocate: true };
                let (lba, count) = (Lba(at >> shift), BlockCount(len >> shift));
                let request = Request { operation, lba, count, segments: &[] };
                target.submit(cx, request).await
            })
        })
    }

    /// Does something with the target on a shard.
    fn on_target(
        &self,
        offset: u64,
        work: impl for<'a> FnOnce(TaskContext<'a>, Arc<Switch>) -> LocalFuture<'a, Result<(), BlockError>> + Send + 'static,
    ) -> Result<(), CopyError> {
        let target = Arc::clone(&self.target);
        let result = on_shard(&*self.spawner, move |cx| work(cx, target))?;
        result.map_err(|source| CopyError::Write { volume: self.target.name().to_owned(), offset, source })
    }

    /// Has the system copy, where both volumes are plain files and it can.
    fn offloaded(&mut self, at: u64, len: u64) -> Option<u64> {
        if !self.offload {
            return None;
        }
        let (source, target) = (self.source.root(), self.target.root());
        let (from, to) = (source.as_file()?, target.as_file()?);
        let copied = match to.copy_from(from.fd(), at, len) {
            Ok(copied) if copied < len => copied / LARGEST_BLOCK * LARGEST_BLOCK,
            Ok(copied) => copied,
            Err(error) => {
                let (source, target) = (self.source.name(), self.target.name());
                tracing::debug!(source, target, %error, "the system does not copy from one to the other");
                0
            }
        };
        self.offload = copied > 0;
        // What was inside is not up to date any more where it was exchanged meanwhile.
        let still = Arc::ptr_eq(&source, &self.source.root()) && Arc::ptr_eq(&target, &self.target.root());
        (copied > 0 && still).then_some(copied)
    }

    /// Reads and writes.
    fn carry(&mut self, at: u64, len: u64, tagged: bool) -> Result<(), CopyError> {
        let (source, target) = (Arc::clone(&self.source), Arc::clone(&self.target));
        let moved = on_shard(&*self.spawner, move |cx| {
            Box::pin(async move {
                let buffers = own_buffers().map_err(CopyError::Memory)?;
                let ends = Ends { source: &*source, target: &*target, compare: false, tagged };
                lanes::copy(cx.with_buffers(&buffers), ends, at..at + len).await.map_err(|failure| {
                    let (offset, error) = (failure.offset, failure.error);
                    match failure.side {
                        Side::Source => CopyError::Read { volume: source.name().to_owned(), offset, source: error },
                        Side::Target => CopyError::Write { volume: target.name().to_owned(), offset, source: error },
                    }
                })
            })
        })??;
        self.copied.moved += moved.written;
        self.copied.skipped += moved.zeroes;
        self.worked += len;
        Ok(())
    }
}

/// So many bytes, of so many that are left, to the end of a block.
fn whole(len: u64, left: u64) -> u64 {
    if len < left { (len / LARGEST_BLOCK * LARGEST_BLOCK).max(LARGEST_BLOCK).min(left) } else { left }
}

/// What a volume knows of the bytes from `at` on: how many, and whether they are unused.
fn bytes_of(volume: &dyn Volume, at: u64) -> Option<(u64, bool)> {
    let shift = volume.geometry().block_size.shift();
    let Extent { blocks, unused } = volume.extent(Lba(at >> shift))?;
    Some((blocks.0 << shift, unused))
}
