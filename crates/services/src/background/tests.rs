//! Whoever works beside requests lets its shard do something else, also where no leg makes it wait.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_backends::MemoryVolume;
use millrace_block::{BlockSize, Volume};

use super::{Pace, Stop};
use crate::{
    Reason, legs,
    settings::Settings,
    testing::{Bench, Session, graph},
};

const SEED: u64 = 0x7475_726e;
const MIB: u64 = 1 << 20;
/// Bytes that may be worked on in one turn.
const AT_ONCE: u64 = MIB / 2;

/// Has a service over legs in memory do a long piece of work; it must take many turns, none of which waits for anything.
fn takes_turns(stack: &str, service: &str, command: Option<&str>) {
    let stack = stack.replace("KEY", concat!(env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key"));
    let leg = |at| MemoryVolume::create(&format!("disk:{at}"), 12 * MIB, BlockSize::B4096).unwrap() as Arc<dyn Volume>;
    let (bench, kept) = (Bench::new(SEED), Arc::default());
    let legs: Vec<_> = (0..stack.matches("disk:").count()).map(leg).collect();
    let graph = graph(&stack, &legs, Some(8 * MIB), Reason::Create, &kept).unwrap();
    let mut session = Session::new(&bench, &kept, SEED);
    let volume = Arc::clone(graph.volume());
    let data: Vec<u8> = (0..8 * MIB).map(|at| (at / 511) as u8).collect();
    let written = legs::block_on(move |cx| Box::pin(async move { legs::write_bytes(cx, &*volume, 0, data).await }));
    written.unwrap().unwrap();
    let (_, service) = graph.services(service).remove(0);
    if let Some(command) = command {
        service.command(command, &Settings::default()).unwrap_or_else(|error| panic!("{stack}: {error}"));
    }
    let is_working = || !service.status().progress.is_empty();
    assert!(is_working(), "{stack}: {:?}", service.status());
    let mut turns = 0;
    while is_working() {
        session.settle(1);
        turns += 1;
        assert!(turns < 50_000_000, "{stack} does not come to an end: {:?}", service.status());
    }
    assert!(turns >= 8 * MIB / AT_ONCE, "{stack}: {turns} turns");
}

#[test]
fn long_work_over_memory_takes_turns_with_everything_else() {
    let work = [
        ("crypt(key=\"file:KEY\", disk:0)", "crypt", Some("rekey")),
        ("crypt(mode=authenticated, key=\"file:KEY\", disk:0)", "crypt", Some("rekey")),
        ("mirror(rate=1T, disk:0, disk:1)", "mirror", Some("scrub")),
        ("parity(rate=1T, disk:0, disk:1, disk:2)", "parity", Some("scrub")),
        ("integrity(rate=1T, disk:0)", "integrity", Some("scrub")),
        ("cache(mode=back, rate=1T, disk:0, disk:1)", "cache", Some("flush")),
        ("move(disk:0, disk:1)", "move", None),
    ];
    for (stack, service, command) in work {
        takes_turns(stack, service, command);
    }
}

/// Never faster than its rate, whoever asks for how much at once; told to stop, it does not go on waiting.
#[test]
fn a_pace_is_kept_and_given_up_at_the_end() {
    for piece in [16 << 10, 256 << 10] {
        let start = Instant::now();
        let paced = legs::block_on(move |cx| {
            Box::pin(async move {
                let (mut pace, stop) = (Pace::new(MIB), Stop::default());
                for _ in 0..MIB / 2 / piece {
                    pace.spend(cx, &stop, piece).await;
                }
            })
        });
        paced.unwrap();
        assert!(start.elapsed() >= Duration::from_millis(450), "{piece}: {:?}", start.elapsed());
    }
    let ended = legs::block_on(|cx| {
        Box::pin(async move {
            let (mut pace, stop) = (Pace::new(1), Stop::default());
            stop.set();
            // Else a hundred years.
            pace.spend(cx, &stop, 3 << 30).await;
        })
    });
    ended.unwrap();
}
