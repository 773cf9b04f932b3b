//! Whether requests of a worker that has ended are still under way in the kernel: they go on reading into its guests' memory and writing to its
//! volumes' files until they are done, whoever serves by then.
//!
//! ```text
//!   worker: shards' rings ══ writing end ── pipe ── reading end ══ keeper ──► the next worker: has it hung up?
//! ```
//!
//! The kernel lets go of what a ring holds ([`ShardConfig::witness`]) when the ring is gone and the last of its requests has ended. Nobody else
//! outlives the worker with the writing end, so the pipe hangs up just then. A file's own lock tells it of that file alone, and only where the next
//! worker opens the same file and nobody shares the lock.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use millrace_engine::{Engine, EngineError, ShardConfig};
use millrace_keeper::{Key, Kind, Link};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

fn key(slot: u32) -> Key {
    Key { slot, ..Key::of_daemon(Kind::WITNESS) }
}

/// The reading end of this worker's.
#[derive(Debug)]
pub(crate) struct Witness(Option<OwnedFd>);

impl Witness {
    /// Starts shards whose requests have one.
    pub(crate) fn start(shards: Vec<ShardConfig>) -> Result<(Engine, Self), EngineError> {
        let (reading, writing) = match io::pipe() {
            Ok((reading, writing)) => (Some(OwnedFd::from(reading)), Some(Arc::new(OwnedFd::from(writing)))),
            Err(error) => {
                tracing::error!(%error, "no pipe: should this worker end, the next one cannot tell when its requests have");
                (None, None)
            }
        };
        let with = |config: ShardConfig| ShardConfig { witness: writing.clone(), ..config };
        Ok((Engine::start(shards.into_iter().map(with).collect())?, Self(reading)))
    }

    /// Leaves it to the workers after this one, beside those of workers before it that they may still need.
    pub(crate) fn leave(self, keeper: &Link) {
        let Some(reading) = self.0 else { return };
        let free = (0..=u32::MAX).map(key).find(|key| !keeper.is_held(*key)).expect("there are fewer workers than numbers");
        if let Err(error) = keeper.put(free, reading.as_fd()) {
            tracing::error!(%error, "should this worker end, the next one cannot tell when its requests have");
        }
    }
}

/// Workers before this one, some of whose requests are still under way.
#[derive(Default)]
pub(crate) struct Earlier {
    keeper: Option<Arc<Link>>,
    left: Vec<(u32, OwnedFd)>,
}

impl Earlier {
    pub(crate) fn of(keeper: &Arc<Link>) -> Self {
        let Key { owner, kind, .. } = key(0);
        let left = keeper.take_all(owner, kind).into_iter().map(|(slot, held)| (slot, held.fd)).collect();
        let mut earlier = Self { keeper: Some(Arc::clone(keeper)), left };
        earlier.look();
        earlier
    }

    /// Finds out who has ended by now.
    pub(crate) fn look(&mut self) {
        let Some(keeper) = &self.keeper else { return };
        self.left.retain(|(slot, reading)| {
            let ended = has_hung_up(reading);
            if ended && let Err(error) = keeper.drop_one(key(*slot)) {
                tracing::error!(%error, "the keeper could not be told");
            }
            !ended
        });
    }

    /// Whether they all had ended at the last look.
    pub(crate) fn have_ended(&self) -> bool {
        self.left.is_empty()
    }
}

#[cfg(test)]
impl Earlier {
    /// One that does not end.
    pub(crate) fn unfinished() -> Self {
        Self { keeper: None, left: vec![(0, io::pipe().unwrap().0.into())] }
    }
}

fn has_hung_up(reading: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(reading, PollFlags::empty())];
    // Interrupted: the next look tells.
    poll(&mut fds, Some(&Timespec::default())).is_ok() && fds[0].revents().contains(PollFlags::HUP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_witness_hangs_up_when_the_shards_are_gone_and_not_before() {
        let (engine, witness) = Witness::start((0..2).map(|index| ShardConfig::new(index, None)).collect()).unwrap();
        let reading = witness.0.unwrap();
        engine.shards()[0].call_wait(|_| ()).unwrap();
        assert!(!has_hung_up(&reading));
        engine.stop().unwrap();
        // The kernel takes its time with a ring. A program that another test starts has all descriptors for a moment.
        crate::manager::tests::eventually("the pipe hangs up", || has_hung_up(&reading).then_some(()));
    }
}
