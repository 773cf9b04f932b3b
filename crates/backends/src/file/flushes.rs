//! Flushes of a file: one at a time, for all who want one, on shards and beside them.
//!
//! The system tells of what it has lost once, to whichever of two flushes on two shards asks first. The other one would be answered before
//! it is known here that the first has failed.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    task::Poll,
    thread,
    time::{Duration, Instant},
};

use millrace_block::{IoOperation, TaskContext, yield_now};
use rustix::io::Errno;

/// How often a shard looks whether the flush before it has ended, before it sleeps between looks.
const TURNS: u32 = 8;
/// How long it sleeps then, at first; twice as long each time, up to 32 times: many who wait for a slow disk must not cost a core.
const LOOK_AGAIN: Duration = Duration::from_micros(50);
const DOUBLINGS: u32 = 5;
/// How long one beside the data path waits for its turn: as long as the system takes to call a task hung.
const PATIENCE: Duration = if cfg!(test) { Duration::from_millis(50) } else { Duration::from_secs(120) };

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    busy: AtomicBool,
    /// Counts those who want one.
    wanted: AtomicU64,
    /// Up to whom it was done.
    done: AtomicU64,
}

/// Whoever has it flushes, for so many; dropping it lets the next one.
pub(super) struct Turn<'a> {
    flushes: &'a Flushes,
    all: u64,
}

impl Flushes {
    /// Waits until it is this one's turn; `None`: a flush that began since has been done.
    pub(super) async fn wait(&self, cx: TaskContext<'_>) -> Option<Turn<'_>> {
        let mine = self.come();
        let mut turns = 0_u32;
        loop {
            if let Poll::Ready(turn) = self.look(mine) {
                return turn;
            }
            if turns < TURNS {
                yield_now().await;
            } else {
                cx.io(IoOperation::Sleep(pause(turns - TURNS))).await;
            }
            turns = turns.saturating_add(1);
        }
    }

    /// The same for a thread that may sleep.
    ///
    /// # Errors
    /// `EBUSY`: the flush under way does not end.
    pub(super) fn wait_beside(&self) -> rustix::io::Result<Option<Turn<'_>>> {
        let mine = self.come();
        let (began, mut turns) = (Instant::now(), 0_u32);
        loop {
            if let Poll::Ready(turn) = self.look(mine) {
                return Ok(turn);
            }
            if began.elapsed() > PATIENCE {
                return Err(Errno::BUSY);
            }
            thread::sleep(pause(turns));
            turns = turns.saturating_add(1);
        }
    }

    /// Somebody wants a flush; its number.
    fn come(&self) -> u64 {
        // SeqCst: whoever flushes loads `wanted` after it has the turn, and flushes for everybody who had come by then.
        self.wanted.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Whether it is the turn of who came with this number, or (`None`) a flush that began since has been done.
    fn look(&self, mine: u64) -> Poll<Option<Turn<'_>>> {
        if self.done.load(Ordering::SeqCst) >= mine {
            return Poll::Ready(None);
        }
        // Acquire: pairs with the release of whose turn it was before, who has said by then what was lost.
        if self.busy.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return Poll::Pending;
        }
        Poll::Ready(Some(Turn { flushes: self, all: self.wanted.load(Ordering::SeqCst) }))
    }
}

/// How long one sleeps that has slept so many times.
fn pause(naps: u32) -> Duration {
    LOOK_AGAIN * (1 << naps.min(DOUBLINGS))
}

impl Turn<'_> {
    /// The flush has succeeded.
    pub(super) fn done(&self) {
        self.flushes.done.fetch_max(self.all, Ordering::SeqCst);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.flushes.busy.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use millrace_block::{
        BlockCount, BlockSize, Operation, Volume as _, VolumeError,
        conformance::{Bench, SyncHarness},
    };

    use crate::{FileOptions, FileVolume};

    /// The system would tell it of what the flush under way is about to be told.
    #[test]
    fn what_syncs_beside_the_data_path_waits_for_its_turn() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.img");
        let options = FileOptions { path, size: Some(1 << 20), block_size: BlockSize::B512, read_only: false };
        let volume = FileVolume::open("disk", &options).unwrap();
        let turn = volume.flushes.wait_beside().unwrap().expect("nobody has flushed");
        let result = volume.resize(BlockCount(1024));
        assert!(
            matches!(&result, Err(VolumeError::Io { source, .. }) if source.raw_os_error() == Some(libc::EBUSY)),
            "{result:?}"
        );
        drop(turn);
        volume.resize(BlockCount(2048)).unwrap();
        let mut harness = SyncHarness::new(20_263, false);
        assert_eq!(Bench::new(&mut harness, volume.clone(), 1).plain(Operation::Flush, 0, 0), Ok(()), "it is given back");
        drop(volume.flushes.wait_beside().unwrap().expect("who comes later has a turn of its own"));
    }
}
