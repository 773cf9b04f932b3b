//! Two shards beside one. It takes a core for each shard and one for each client.

use std::thread;

use crate::{
    client::{Lean, Load},
    error::Failure,
    gate::State,
    record::{Key, Record, Sample},
    subject::{Ours, Setup, Subject},
    suite::Suite,
};

/// Cores that it takes: two shards and two clients.
const CORES: usize = 4;

/// One client on one shard, then two clients on two shards at once.
pub(crate) fn run(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if cores < CORES {
        record.note(format!(
            "not measured: two shards and two clients take {CORES} cores, this machine has {cores}; docs/performance.md says why \
             shards do not touch each other's cache lines"
        ));
        return Ok(());
    }
    let setup = Setup::default().disk("d0", "null", "1G").disk("d1", "null", "1G");
    let ours = Ours::start_on(&suite.binary, &suite.folder("ours"), "2-3", "spin", &setup)?;
    for depth in [32, 128] {
        for _ in 0..crate::suite::ENOUGH {
            for shards in [1, 2] {
                let rates = thread::scope(|scope| {
                    let clients: Vec<_> = (0..shards)
                        .map(|index| {
                            let sockets = [ours.folder(&format!("d{index}"))];
                            scope.spawn(move || {
                                let load = Load::randread(depth);
                                Lean::default().run(&suite.binary, &sockets, &load, index, suite.seconds)
                            })
                        })
                        .collect();
                    let ends = clients.into_iter().map(|client| client.join().expect("the thread does not panic"));
                    ends.collect::<Result<Vec<Sample>, Failure>>()
                })?;
                let sum = rates.iter().map(|sample| sample["iops"]).sum();
                let key = Key {
                    test: format!("randread 4k on {shards} shards"),
                    depth,
                    client: "lean".into(),
                    subject: "ours".into(),
                };
                record.add(&key, State::Any, Sample::from([("iops".into(), sum)]));
            }
        }
    }
    Ok(())
}
