//! Crypt through the suites, through power cuts, and what it promises beyond them.

mod bad;
pub(in crate::crypt) mod crashes;
mod device;
mod exchange;
mod formats;
mod promise;
mod room;

use std::{path::Path, sync::Arc};

use millrace_backends::{MemoryVolume, fault::FaultVolume};
use millrace_block::{
    BlockSize, Volume,
    conformance::{self, Subject, SyncHarness, Wanted},
    trace::Tap,
};

use super::{KIND, header::OFFSET};
use crate::{Build, LegOrigin, Mount, Reason, Service, SharedObjects, graph::Graph, settings::Settings, testing::subject};

const SEED: u64 = 0x6372_7970;

/// A stack over `disk:0` with a key of the tests'.
fn stack(settings: &str) -> String {
    format!("crypt({settings}key=\"file:{}/src/crypt/tests/test.key\", disk:0)", env!("CARGO_MANIFEST_DIR"))
}

fn memory(wanted: Wanted, _: usize) -> Arc<dyn Volume> {
    MemoryVolume::create("disk", wanted.blocks << wanted.block_size.shift(), wanted.block_size).unwrap()
}

/// A leg with room for the header.
fn leg_blocks(blocks: u64, block_size: BlockSize) -> u64 {
    blocks + (OFFSET >> block_size.shift())
}

fn disk(blocks: u64, block_size: BlockSize) -> Arc<dyn Volume> {
    memory(Wanted { block_size, blocks: leg_blocks(blocks, block_size), read_only: false }, 0)
}

fn open(stack: &str, disk: &Arc<dyn Volume>, reason: Reason) -> Result<Graph, String> {
    crate::testing::graph(stack, std::slice::from_ref(disk), None, reason, &Arc::default())
        .map_err(|error| error.to_string())
}

/// A crypt of this key and mode in the place of `previous`, over the same leg.
pub(in crate::crypt) fn take_over(
    disk: &Arc<dyn Volume>,
    key: &Path,
    mode: Option<&str>,
    previous: &Arc<dyn Service>,
) -> Result<Arc<dyn Service>, String> {
    let mut settings = Settings::default();
    settings.add("key", &format!("file:{}", key.display()));
    if let Some(mode) = mode {
        settings.add("mode", mode);
    }
    let (name, legs, shared) = ("crypt".to_owned(), vec![Tap::new(Arc::clone(disk))], SharedObjects::default());
    let block_size = BlockSize::B512;
    let build = Build { name, volume: "test", legs, stated: &[], sizing: &[], size: None, block_size, shared: &shared };
    let service = (KIND.plan)(&settings).unwrap().build(build).map_err(|error| error.to_string())?;
    let mount =
        Mount { reason: Reason::Change, legs: vec![LegOrigin::Kept], previous: Some(Arc::clone(previous)), reformat: false };
    previous.unmount().unwrap();
    service.mount(&mount).map_err(|error| error.to_string())?;
    Ok(service)
}

#[test]
fn it_conforms() {
    for settings in ["", "discard=false, "] {
        let stack = stack(settings);
        let mut make = subject(&stack, 1, leg_blocks, memory);
        conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
    }
}

#[test]
fn it_conforms_over_a_leg_that_waits_and_holds_writes() {
    let waiting = |wanted, leg| -> Arc<dyn Volume> {
        let volume = FaultVolume::new(memory(wanted, leg), SEED);
        volume.hold_writes();
        volume
    };
    let stack = stack("");
    let mut make = subject(&stack, 1, leg_blocks, waiting);
    conformance::run(&mut SyncHarness::new(SEED, false), &mut Subject::new(SEED, &mut make));
}
