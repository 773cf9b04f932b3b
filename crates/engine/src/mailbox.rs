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
        Arc,
        mpsc::{Receiver, Sender, channel, sync_channel},
    },
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
        Ok((Self(Arc::new(Inner { index, thread: thread_number(), sender, bell, stats })), receiver))
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
