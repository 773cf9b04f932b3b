//! Legs that come back, whatever happens meanwhile.

use std::{thread, time::Duration};

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{BlockCount, Lba};

use super::{failures::state, *};

#[test]
fn upkeep_beside_a_rebuild_takes_no_unfilled_leg_for_a_good_one() {
    for (form, back) in [(SMALL, 0), (SMALL, 2), (TWO, 1)] {
        let legs = form.faulty(1024);
        let volumes = volumes(&legs);
        let graph = form.open(&volumes, Reason::Create);
        let area = parity(&graph).members.rules.area_of(&*volumes[1]) / 512;
        let slow = (back + 1) % form.legs;
        let mut model = Vec::new();
        on_bench(&graph, |bench| {
            model = bench.write_random(0, 1024);
            command(&graph, "fail", back).unwrap();
            model[512 * 512..640 * 512].copy_from_slice(&bench.write_random(512, 128));
            let delay = Effect::Delay(Duration::from_millis(300));
            legs[slow].add(Rule { range: Some((Lba(0), BlockCount(area))), ..Rule::new(Kind::Write, When::Always, delay) });
            let data = bench.random.bytes(16 * 512);
            thread::scope(|scope| {
                let before = legs[slow].requests(Kind::Write);
                let (graph, leg) = (&graph, &legs[slow]);
                let all = (1 << form.legs) - 1;
                let rebuild = scope.spawn(move || {
                    while leg.requests(Kind::Write) == before {
                        thread::sleep(Duration::from_micros(20));
                    }
                    command(graph, "rebuild", back).unwrap();
                });
                scope.spawn(move || {
                    while parity(graph).members.masks().writable != all {
                        thread::sleep(Duration::from_micros(20));
                    }
                    assert!(!rebuild.is_finished(), "it waits for the write");
                    resync(graph);
                    assert_eq!(state(graph, back), "being filled");
                });
                assert_eq!(bench.write(0, &data), Ok(()));
            });
            model[..data.len()].copy_from_slice(&data);
        });
        legs[slow].clear();
        assert!(resync(&graph));
        assert_eq!(state(&graph, back), "good");
        parity_fits(&graph, &volumes);
        on_bench(&graph, |bench| bench.expect(0, &model));
    }
}
