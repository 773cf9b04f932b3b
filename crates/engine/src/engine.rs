//! All shards of a process.
#![forbid(unsafe_code)]

use std::{
    sync::mpsc::sync_channel,
    thread::{Builder, JoinHandle},
};

use crate::{closer, config::ShardConfig, error::EngineError, mailbox::ShardHandle, reaper, shard::Shard, watch};

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

    /// Stops all shards and waits for them. The first that had panicked is reported.
    pub fn stop(mut self) -> Result<(), EngineError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), EngineError> {
        for shard in &self.shards {
            // One that has ended already needs no telling.
            let _ = shard.stop();
        }
        let mut result = Ok(());
        for (at, thread) in self.threads.drain(..).enumerate() {
            if thread.join().is_err() {
                let shard = self.shards.get(at).map_or(at, ShardHandle::index);
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
