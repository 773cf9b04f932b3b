//! All shards of a process.
#![forbid(unsafe_code)]

use std::{
    sync::mpsc::sync_channel,
    thread::{self, Builder, JoinHandle},
    time::{Duration, Instant},
};

use crate::{closer, config::ShardConfig, error::EngineError, mailbox::ShardHandle, reaper, shard::Shard, watch};

/// How long shards may take to end, and how often is looked: longer than they wait for requests in flight.
const PATIENCE: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(1);

/// The running shards. Dropping it stops them.
#[derive(Debug)]
pub struct Engine {
    shards: Vec<ShardHandle>,
    threads: Vec<JoinHandle<()>>,
}

impl Engine {
    /// Starts one thread per shard. If one cannot start, the others are stopped again.
    pub fn start(configs: Vec<ShardConfig>) -> Result<Self, EngineError> {
        reaper::be_ready();
        closer::be_ready();
        watch::be_ready();
        let mut engine = Self { shards: Vec::with_capacity(configs.len()), threads: Vec::with_capacity(configs.len()) };
        for config in configs {
            let shard = config.index;
            let (report, started) = sync_channel(1);
            // The shard is made by its own thread: it is bound to its core first, so its memory is near it.
            let run = move || match Shard::new(&config) {
                Ok(shard) => {
                    let _ = report.send(Ok(shard.handle().clone()));
                    drop(report);
                    shard.run();
                }
                Err(error) => {
                    let _ = report.send(Err(error));
                }
            };
            let thread = Builder::new()
                .name(format!("millrace-{shard}"))
                .spawn(run)
                .map_err(|source| EngineError::Setup { shard, what: "no thread", source })?;
            engine.threads.push(thread);
            engine.shards.push(started.recv().map_err(|_| EngineError::Panicked { shard })??);
        }
        Ok(engine)
    }

    /// The shards' addresses, in the order of their settings.
    pub fn shards(&self) -> &[ShardHandle] {
        &self.shards
    }

    /// Stops all shards and waits for them. The first that had panicked, or does not end, is reported.
    pub fn stop(mut self) -> Result<(), EngineError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), EngineError> {
        for shard in &self.shards {
            // One that has ended already needs no telling.
            let _ = shard.stop();
        }
        let deadline = Instant::now() + PATIENCE;
        let mut result = Ok(());
        for (at, thread) in self.threads.drain(..).enumerate() {
            let handle = self.shards.get(at);
            let shard = handle.map_or(at, ShardHandle::index);
            let is_silent = handle.is_some_and(ShardHandle::is_silent);
            while !thread.is_finished() && !is_silent && Instant::now() < deadline {
                thread::sleep(LOOK);
            }
            if !thread.is_finished() {
                // One that hangs goes with the process.
                result = result.and(Err(EngineError::Silent { shard }));
            } else if thread.join().is_err() {
                result = result.and(Err(EngineError::Panicked { shard }));
            }
        }
        result
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "while the shards were stopped");
        }
    }
}
