//! How other threads reach a shard.
//!
//! No wake-up is lost: a sender first queues its message, then writes the eventfd; the shard first reads the eventfd, then takes
//! messages until there are none. A message that the shard did not see was queued after its last look, so its eventfd write comes
//! after the shard's read, and ends the next (level-triggered) sleep.
#![forbid(unsafe_code)]

use std::{
    fmt, io,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel},
    },
    time::Duration,
};

use rustix::{
    event::{EventfdFlags, eventfd},
    io::Errno,
};

use crate::{
    error::EngineError,
    shard::Shard,
    stats::{ShardStats, StatsSnapshot},
    wake::thread_number,
};

/// In how many pieces a shard is waited for. A pause of the whole process uses up one of them, however long it is: it does not make a shard silent
/// that had no time to answer either.
const LOOKS: u32 = 10;

pub(crate) enum Message {
    Call(Box<dyn FnOnce(&mut Shard) + Send>),
    /// The answer a task waits for has come.
    Answer(u32),
    Stop,
}

struct Inner {
    index: usize,
    /// The shard's own thread.
    thread: u64,
    sender: Sender<Message>,
    bell: OwnedFd,
    stats: Arc<ShardStats>,
    /// Calls that were given up and that the shard has not come to since.
    given_up: Arc<AtomicUsize>,
}

/// A shard's address: for any thread, as many copies as wanted.
#[derive(Clone)]
pub struct ShardHandle(Arc<Inner>);

impl fmt::Debug for ShardHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ShardHandle").field(&self.0.index).finish()
    }
}

impl ShardHandle {
    /// A mailbox of the calling thread's.
    pub(crate) fn new(index: usize, stats: Arc<ShardStats>) -> io::Result<(Self, Receiver<Message>)> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (sender, receiver) = channel();
        let inner = Inner { index, thread: thread_number(), sender, bell, stats, given_up: Arc::default() };
        Ok((Self(Arc::new(inner)), receiver))
    }

    /// The shard's number.
    pub fn index(&self) -> usize {
        self.0.index
    }

    /// What the shard has done so far; at most about a millisecond old.
    pub fn stats(&self) -> StatsSnapshot {
        self.0.stats.snapshot()
    }

    /// Runs `f` on the shard, some time soon. `f` must be short: the shard does nothing else meanwhile.
    pub fn call(&self, f: impl FnOnce(&mut Shard) + Send + 'static) -> Result<(), EngineError> {
        self.send(Message::Call(Box::new(f)))
    }

    /// Runs `f` on the shard and waits for its answer.
    pub fn call_wait<R: Send + 'static>(&self, f: impl FnOnce(&mut Shard) -> R + Send + 'static) -> Result<R, EngineError> {
        if self.0.thread == thread_number() {
            return Err(EngineError::OwnShard { shard: self.0.index });
        }
        let (reply, answer) = sync_channel(1);
        self.call(move |shard| {
            // The caller waits, so the channel is there; it has room for the one answer.
            let _ = reply.send(f(shard));
        })?;
        answer.recv().map_err(|_| EngineError::NoAnswer { shard: self.0.index })
    }

    /// As [`Self::call_wait`], for so long at most: `f` has run then, or never will. A shard that has not come to a call that was given up
    /// [is silent](Self::is_silent), and not waited for again.
    pub fn call_within<R: Send + 'static>(
        &self,
        limit: Duration,
        f: impl FnOnce(&mut Shard) -> R + Send + 'static,
    ) -> Result<R, EngineError> {
        let shard = self.0.index;
        if self.0.thread == thread_number() {
            return Err(EngineError::OwnShard { shard });
        }
        if self.is_silent() {
            return Err(EngineError::Silent { shard });
        }
        let (reply, answer) = sync_channel(1);
        // Whoever takes it decides whether it runs.
        let place = Arc::new(Mutex::new(Some(f)));
        let (theirs, given_up) = (Arc::clone(&place), Arc::clone(&self.0.given_up));
        self.call(move |shard| match take(&theirs) {
            Some(f) => {
                // The caller waits, or has waited and does not know it yet.
                let _ = reply.send(f(shard));
            }
            None => {
                given_up.fetch_sub(1, Ordering::Relaxed);
            }
        })?;
        for _ in 0..LOOKS {
            match answer.recv_timeout(limit / LOOKS) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Disconnected) => return Err(EngineError::NoAnswer { shard }),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
        // Counted before the shard can find it gone.
        self.0.given_up.fetch_add(1, Ordering::Relaxed);
        if take(&place).is_some() {
            return Err(EngineError::Silent { shard });
        }
        self.0.given_up.fetch_sub(1, Ordering::Relaxed);
        // It has begun, and is short.
        answer.recv().map_err(|_| EngineError::NoAnswer { shard })
    }

    /// Whether somebody has waited for the shard in vain, and it has not come to its mailbox since.
    pub fn is_silent(&self) -> bool {
        self.0.given_up.load(Ordering::Relaxed) > 0
    }

    /// Asks the shard to stop.
    pub fn stop(&self) -> Result<(), EngineError> {
        self.send(Message::Stop)
    }

    pub(crate) fn send(&self, message: Message) -> Result<(), EngineError> {
        let shard = self.0.index;
        self.0.sender.send(message).map_err(|_| EngineError::NoAnswer { shard })?;
        self.ring();
        Ok(())
    }

    pub(crate) fn ring(&self) {
        match rustix::io::write(&self.0.bell, &1u64.to_ne_bytes()) {
            // AGAIN: the counter is full, so the bell rings already.
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(error) => tracing::error!(shard = self.0.index, %error, "the mailbox's bell cannot be rung"),
        }
    }

    pub(crate) fn bell(&self) -> &OwnedFd {
        &self.0.bell
    }

    /// Silences the bell; to be followed by taking all messages.
    pub(crate) fn silence(&self) {
        let mut count = [0; 8];
        match rustix::io::read(&self.0.bell, &mut count) {
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => tracing::error!(shard = self.0.index, %error, "the mailbox's bell cannot be read"),
        }
    }
}

fn take<T>(place: &Mutex<Option<T>>) -> Option<T> {
    place.lock().unwrap_or_else(PoisonError::into_inner).take()
}
