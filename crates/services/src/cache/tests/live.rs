//! Put over a running volume, changed, and taken out again.

use std::time::Duration;

use millrace_block::Switch;

use super::*;
use crate::{
    Node, SharedObjects,
    background::Spawner,
    graph::{ChangeFailed, Plan as GraphPlan, Terms, change},
    testing::{Disks, Kept},
};

fn beside(old: &Graph, disks: &[Arc<dyn Volume>], stack: &str) -> Graph {
    let node: Node = stack.parse().unwrap();
    let plan = GraphPlan { volume: "test", stack: &node, size: None, block_size: BlockSize::B512 };
    let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
    Graph::build(&plan, &Disks(disks.to_vec()), &SharedObjects::default(), &spawner, Some(old)).unwrap()
}

/// A volume that is changed, with a guest on it.
struct Running {
    disks: Vec<Arc<dyn Volume>>,
    graph: Graph,
    switch: Arc<Switch>,
}

impl Running {
    fn new(stack: &str) -> Self {
        let mut disks = volumes(&faulty(50));
        disks.push(volumes(&faulty(80)).remove(0));
        let graph = graph(stack, &disks, None, Reason::Create, &Arc::default()).unwrap();
        let switch = Switch::new("test", Arc::clone(graph.volume()));
        Self { disks, graph, switch }
    }

    fn change(&mut self, stack: &str) -> Result<(), ChangeFailed> {
        self.change_to(stack, false)
    }

    fn change_to(&mut self, stack: &str, reformat: bool) -> Result<(), ChangeFailed> {
        self.change_storing(stack, reformat, &mut || Ok(()))
    }

    fn change_storing(
        &mut self,
        stack: &str,
        reformat: bool,
        store: &mut dyn FnMut() -> Result<(), String>,
    ) -> Result<(), ChangeFailed> {
        let mut new = beside(&self.graph, &self.disks, stack);
        // Its tasks are not run here, and so have ended.
        self.graph.tasks.clear();
        let terms = Terms { patience: Duration::from_secs(1), reformat, scratch: 1 << 20, below: &[], store, restore: None };
        change(&self.switch, &mut self.graph, &mut new, terms)?;
        self.graph = new;
        Ok(())
    }

    fn guest(&self, test: impl FnOnce(&mut Bench<'_>)) {
        let volume: Arc<dyn Volume> = Arc::<Switch>::clone(&self.switch);
        test(&mut Bench::new(&mut SyncHarness::new(SEED, false), volume, SEED));
    }
}

#[test]
fn it_is_put_over_data_and_taken_away_again() {
    for mode in ["through", "back"] {
        let mut running = Running::new("disk:1");
        let mut data = Vec::new();
        running.guest(|bench| data = bench.write_random(0, 2048));
        let with = format!("cache(mode={mode}, line=4K, disk:0) | disk:1");
        for round in 0..3 {
            running.change(&with).unwrap();
            running.guest(|bench| {
                bench.expect(0, &data);
                let new = bench.write_random(100 * round, 90);
                data[100 * round as usize * 512..][..new.len()].copy_from_slice(&new);
                bench.expect(0, &data);
            });
            running.change("disk:1").unwrap();
            running.guest(|bench| {
                bench.expect(0, &data);
                // Without the cache: what it remembers is worth nothing any more.
                let new = bench.write_random(0, 300);
                data[..new.len()].copy_from_slice(&new);
            });
            let (superblock, _) = Superblock::load(&running.disks[0]).unwrap().unwrap();
            assert!(!superblock.may_be_dirty);
        }
    }
}

/// The fast leg is dead, and nothing is only there: the volume is changed all the same, and goes on without its cache, or else as it was.
#[test]
fn a_dead_fast_leg_keeps_no_volume_from_being_changed() {
    use millrace_backends::fault::{Effect, Kind, Rule, When};
    for mode in ["through", "back"] {
        let legs = faulty(50);
        let disks = volumes(&legs);
        let graph = graph(&stack(&format!("mode={mode}, line=4K")), &disks, None, Reason::Create, &Arc::default()).unwrap();
        let switch = Switch::new("test", Arc::clone(graph.volume()));
        let mut running = Running { disks, graph, switch };
        let mut data = Vec::new();
        running.guest(|bench| data = bench.write_random(0, 100));
        cache(&running.graph).drain_now().unwrap();
        legs[0].add(Rule { kinds: vec![], ..Rule::new(Kind::Write, When::Always, Effect::Fail(BlockError::NotReady)) });
        running.guest(|bench| {
            bench.expect(0, &data);
            let new = bench.write_random(10, 50);
            data[10 * 512..60 * 512].copy_from_slice(&new);
            bench.plain(Operation::Flush, 0, 0).unwrap();
        });
        let other = format!("cache(mode={mode}, line=4K, rate=1M, disk:0) | disk:1");
        // It fails in its middle: the way back.
        running.change_storing(&other, false, &mut || Err("the disk is full".to_owned())).unwrap_err();
        running.guest(|bench| bench.expect(0, &data));
        if mode == "through" {
            // After a power cut nobody would look for dirty lines there.
            running.change("cache(mode=back, line=4K, disk:0) | disk:1").unwrap_err();
            running.guest(|bench| bench.expect(0, &data));
        }
        running.change(&other).unwrap();
        running.guest(|bench| {
            bench.expect(0, &data);
            let new = bench.write_random(20, 70);
            data[20 * 512..90 * 512].copy_from_slice(&new);
            bench.plain(Operation::Flush, 0, 0).unwrap();
        });
        assert_eq!(fact(&running.graph, "fast leg").as_deref(), Some("failed; the volume goes on without it"));
        legs[0].clear();
        cache(&running.graph).command("resume", &Settings::default()).unwrap();
        running.guest(|bench| {
            bench.expect(0, &data);
            let new = bench.write_random(30, 20);
            data[30 * 512..50 * 512].copy_from_slice(&new);
            bench.plain(Operation::Flush, 0, 0).unwrap();
        });
        running.change("disk:1").unwrap();
        running.guest(|bench| bench.expect(0, &data));
    }
}

/// A volume with a cache, whose legs can fail, with some data.
fn running(mode: &str) -> (Vec<Arc<FaultVolume>>, Running, Vec<u8>) {
    let legs = faulty(50);
    let disks = volumes(&legs);
    let graph = graph(&stack(&format!("mode={mode}, line=4K")), &disks, None, Reason::Create, &Arc::default()).unwrap();
    let switch = Switch::new("test", Arc::clone(graph.volume()));
    let running = Running { disks, graph, switch };
    let mut data = Vec::new();
    running.guest(|bench| data = bench.write_random(0, 100));
    (legs, running, data)
}

/// Everything is there, and is written and flushed as before.
fn goes_on(running: &Running, data: &mut [u8]) {
    running.guest(|bench| {
        bench.expect(0, data);
        let new = bench.write_random(20, 30);
        data[20 * 512..50 * 512].copy_from_slice(&new);
        bench.plain(Operation::Flush, 0, 0).unwrap();
        bench.expect(0, data);
    });
}

/// Nothing but a change writes it.
#[test]
fn a_superblock_that_cannot_be_written_costs_the_cache_and_not_the_volume() {
    use millrace_backends::fault::{Effect, Kind, Rule, When};
    use millrace_block::{BlockCount, Lba};
    for mode in ["through", "back"] {
        // One copy, or both.
        for blocks in [16, 32] {
            let (legs, mut running, mut data) = running(mode);
            let range = Some((Lba(0), BlockCount(blocks)));
            let fault = Effect::Fail(BlockError::WriteFault { errno: 5 });
            legs[0].add(Rule { range, ..Rule::new(Kind::Write, When::Always, fault) });
            let other = stack(&format!("mode={mode}, line=4K, rate=1M"));
            let refused = running.change(&other).unwrap_err().to_string();
            assert!(refused.contains("could not be stored"), "{refused}");
            goes_on(&running, &mut data);
            if mode == "back" {
                // The leg is known to fail, and lines are only there.
                running.change(&other).unwrap_err();
                goes_on(&running, &mut data);
                cache(&running.graph).drain_now().unwrap();
            }
            running.change(&other).unwrap();
            goes_on(&running, &mut data);
            assert_eq!(fact(&running.graph, "fast leg").as_deref(), Some("failed; the volume goes on without it"));
            legs[0].clear();
            cache(&running.graph).command("resume", &Settings::default()).unwrap();
            goes_on(&running, &mut data);
            running.change("disk:1").unwrap();
            running.guest(|bench| bench.expect(0, &data));
        }
    }
}

/// A copy of it may say that all of the table counts, and the volume goes on, past the cache.
#[test]
fn a_superblock_that_fails_at_the_last_moment_brings_no_old_blocks_back() {
    use millrace_backends::fault::{Effect, Kind, Rule, When};
    use millrace_block::{BlockCount, Lba};
    for mode in ["through", "back"] {
        // It was stored twice to see whether it can be.
        for nth in [3, 4] {
            let (legs, mut running, mut data) = running(mode);
            let range = Some((Lba(0), BlockCount(32)));
            let fault = Effect::Fail(BlockError::WriteFault { errno: 5 });
            legs[0].add(Rule { range, ..Rule::new(Kind::Write, When::Nth(nth), fault) });
            let refused = running.change(&stack(&format!("mode={mode}, line=4K, rate=1M"))).unwrap_err().to_string();
            assert!(refused.contains("could not be stored"), "{refused}");
            goes_on(&running, &mut data);
            // Nothing is unmounted.
            let disks = std::mem::take(&mut running.disks);
            drop(running);
            let graph = open(&format!("mode={mode}, line=4K"), &disks, Reason::Open);
            on_bench(&graph, |bench| bench.expect(0, &data));
        }
    }
}

/// The change fails, and so does the way back.
#[test]
fn a_cache_that_could_not_come_back_says_so_and_is_resumed() {
    use crate::service::Health;
    use millrace_backends::fault::{Effect, Kind, Rule, When};
    use millrace_block::{BlockCount, Lba};
    // It cannot be closed, or was, and then cannot be opened.
    for (mode, first) in [("through", 3), ("back", 3), ("through", 5), ("back", 5)] {
        let (legs, mut running, mut data) = running(mode);
        let range = Some((Lba(0), BlockCount(32)));
        let fault = Effect::Fail(BlockError::WriteFault { errno: 5 });
        for nth in first..30 {
            legs[0].add(Rule { range, ..Rule::new(Kind::Write, When::Nth(nth), fault) });
        }
        running.change(&stack(&format!("mode={mode}, line=4K, rate=1M"))).unwrap_err();
        running.guest(|bench| assert_eq!(bench.write(0, &[9; 512]), Err(BlockError::NotReady)));
        assert_eq!(running.graph.tree().status.unwrap().health, Health::Failed);
        let why = fact(&running.graph, "fast leg").unwrap();
        assert!(why.contains("requests are refused: bring it back, and resume"), "{why}");
        cache(&running.graph).command("resume", &Settings::default()).unwrap_err();
        legs[0].clear();
        cache(&running.graph).command("resume", &Settings::default()).unwrap();
        assert_eq!(running.graph.tree().status.unwrap().health, Health::Good);
        goes_on(&running, &mut data);
    }
}

/// It failed, and what its table calls dirty was overwritten beside it.
#[test]
fn a_failed_fast_leg_is_told_that_its_cache_is_gone_as_soon_as_it_listens() {
    use millrace_backends::fault::{Effect, Kind, Rule, When};
    use millrace_block::{BlockCount, Lba};
    let (legs, mut running, mut data) = running("back");
    // All but its superblock.
    let range = Some((Lba(32), BlockCount(u64::MAX)));
    let fault = Effect::Fail(BlockError::WriteFault { errno: 5 });
    legs[0].add(Rule { range, ..Rule::new(Kind::Write, When::Always, fault) });
    running.guest(|bench| data = bench.write_random(0, 100));
    assert_eq!(fact(&running.graph, "dirty lines").as_deref(), Some("0"));
    running.change("disk:1").unwrap();
    let (superblock, _) = Superblock::load(&running.disks[0]).unwrap().unwrap();
    assert_eq!((superblock.state, superblock.may_be_dirty), (disk::State::Left, false));
    legs[0].clear();
    running.change(&stack("mode=back, line=4K")).unwrap();
    goes_on(&running, &mut data);
}

/// It failed once, and the stack that comes has its leg for something else.
#[test]
fn a_failed_fast_leg_that_is_in_use_as_something_else_is_told_nothing() {
    use millrace_backends::fault::{Effect, Kind, Rule, When};
    let crypt = concat!("crypt(key=\"file:", env!("CARGO_MANIFEST_DIR"), "/src/crypt/tests/test.key\", disk:0)");
    // So large that it holds the volume beside the header.
    let fast = FaultVolume::new(memory("fast", (1 << 20) + (256 << 10), BlockSize::B512), SEED);
    let legs = [fast, faulty(50).remove(SLOW)];
    let disks = volumes(&legs);
    let before = graph(&stack("mode=back, line=4K"), &disks, None, Reason::Create, &Arc::default()).unwrap();
    let switch = Switch::new("test", Arc::clone(before.volume()));
    let mut running = Running { disks, graph: before, switch };
    let mut data = Vec::new();
    running.guest(|bench| data = bench.write_random(0, 100));
    cache(&running.graph).drain_now().unwrap();
    legs[FAST].add(Rule::new(Kind::Read, When::Nth(1), Effect::Fail(BlockError::ReadFault { errno: 5 })));
    running.guest(|bench| bench.expect(0, &data));
    assert!(cache(&running.graph).is_broken());
    running.change_to(crypt, true).unwrap();
    running.guest(|bench| data = bench.write_random(0, 100));
    let disks = std::mem::take(&mut running.disks);
    drop(running);
    let after = graph(crypt, &disks, None, Reason::Open, &Arc::default()).unwrap();
    on_bench(&after, |bench| bench.expect(0, &data));
}

#[test]
fn it_does_not_go_while_something_is_only_on_its_fast_leg() {
    let legs = faulty(50);
    let disks = volumes(&legs);
    let with = stack("mode=back, line=4K");
    let graph = graph(&with, &disks, None, Reason::Create, &Arc::default()).unwrap();
    let switch = Switch::new("test", Arc::clone(graph.volume()));
    let mut running = Running { disks, graph, switch };
    let mut data = Vec::new();
    running.guest(|bench| data = bench.write_random(0, 100));
    {
        use millrace_backends::fault::{Effect, Kind, Rule, When};
        legs[1].add(Rule::new(Kind::Write, When::Always, Effect::Fail(BlockError::NoSpace)));
    }
    let refused = running.change("disk:1").unwrap_err().to_string();
    assert!(refused.contains("13 lines are only on the fast leg"), "{refused}");
    running.guest(|bench| {
        bench.expect(0, &data);
        // It writes back as before.
        drop(bench.write_random(200, 8));
    });
    legs[1].clear();
    running.change("disk:1").unwrap();
    running.guest(|bench| bench.expect(0, &data));
}

/// The slow leg forgot what had passed the cache by, in a flush of the cache's own, and the cache goes before the guest flushes.
#[test]
fn what_a_cache_has_not_told_is_told_when_it_is_gone() {
    use millrace_backends::fault::{Effect, Kind, Rule, When};
    let fault = BlockError::WriteFault { errno: 5 };
    for mode in ["through", "back"] {
        for next in ["disk:1".to_owned(), stack(&format!("mode={mode}, line=4K, rate=1M"))] {
            let legs = faulty(50);
            legs[1].hold_writes();
            let disks = volumes(&legs);
            let graph =
                graph(&stack(&format!("mode={mode}, line=4K")), &disks, None, Reason::Create, &Arc::default()).unwrap();
            let switch = Switch::new("test", Arc::clone(graph.volume()));
            let mut running = Running { disks, graph, switch };
            running.guest(|bench| drop(bench.write_random(1000, 600)));
            legs[1].add(Rule::new(Kind::Flush, When::Nth(1), Effect::Forget(fault)));
            let me = cache(&running.graph);
            let ours = legs::block_on(move |cx| Box::pin(async move { me.commit(cx).await })).unwrap();
            assert_eq!(ours, Err(fault), "{mode}");
            // A change that fails leaves it where it is.
            running.change_storing(&next, false, &mut || Err("the disk is full".to_owned())).unwrap_err();
            assert!(running.graph.has_untold() && !running.switch.is_untold());
            running.change(&next).unwrap();
            running.guest(|bench| {
                let told = bench.plain(Operation::Flush, 0, 0);
                assert_eq!(told, Err(BlockError::WriteFault { errno: 0 }), "{mode}: {next}");
                assert_eq!(bench.plain(Operation::Flush, 0, 0), Ok(()), "{mode}: {next}");
            });
        }
    }
}

#[test]
fn a_change_waits_until_what_is_in_memory_can_be_stored() {
    use millrace_backends::fault::{Effect, Kind, Rule, When};
    let legs = faulty(50);
    let disks = volumes(&legs);
    let graph = graph(&stack("mode=back, ack=fast, line=4K"), &disks, None, Reason::Create, &Arc::default()).unwrap();
    let switch = Switch::new("test", Arc::clone(graph.volume()));
    let mut running = Running { disks, graph, switch };
    let mut data = Vec::new();
    running.guest(|bench| data = bench.write_random(0, 100));
    legs[1].add(Rule::new(Kind::Flush, When::Nth(1), Effect::Fail(BlockError::WriteFault { errno: 5 })));
    let other = stack("mode=back, ack=fast, line=4K, rate=1M");
    let refused = running.change(&other).unwrap_err().to_string();
    assert!(refused.contains("could not be stored"), "{refused}");
    running.guest(|bench| {
        bench.expect(0, &data);
        let new = bench.write_random(20, 30);
        data[20 * 512..50 * 512].copy_from_slice(&new);
    });
    running.change(&other).unwrap();
    running.guest(|bench| bench.expect(0, &data));
}

#[test]
fn its_settings_and_its_fast_leg_are_changed() {
    let mut running = Running::new("cache(mode=back, line=4K, disk:0) | disk:1");
    running.disks[2] = memory("other", 1 << 20, BlockSize::B512);
    let mut data = Vec::new();
    running.guest(|bench| data = bench.write_random(0, 200));
    // Dirty lines are taken along.
    running.change("cache(mode=back, line=4K, rate=1M, disk:0) | disk:1").unwrap();
    running.guest(|bench| bench.expect(0, &data));
    assert_eq!(fact(&running.graph, "dirty lines").as_deref(), Some("25"));
    for (stack, why) in [
        ("cache(mode=back, line=8K, disk:0) | disk:1", "flush it before the change"),
        ("cache(mode=back, line=4K, disk:2) | disk:1", "the legs that stay do not hold all of them now"),
        ("cache(mode=back, line=4K, disk:0) | disk:2", "show other data"),
    ] {
        let refused = running.change(stack).unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
        running.guest(|bench| bench.expect(0, &data));
    }
    running.change("cache(mode=through, line=4K, disk:0) | disk:1").unwrap();
    running.guest(|bench| {
        bench.expect(0, &data);
        let new = bench.write_random(50, 20);
        data[50 * 512..70 * 512].copy_from_slice(&new);
        bench.plain(Operation::Flush, 0, 0).unwrap();
    });
    cache(&running.graph).drain_now().unwrap();
    running.change("cache(mode=through, line=4K, disk:2) | disk:1").unwrap();
    running.guest(|bench| bench.expect(0, &data));
    running.change("cache(mode=back, line=8K, disk:2) | disk:1").unwrap();
    running.guest(|bench| bench.expect(0, &data));
}

/// The slow leg is behind, and whatever stands in a mirror's or parity's place below still shows what it showed.
#[test]
fn legs_below_it_are_replaced_while_lines_are_dirty() {
    for (before, now, other) in [
        ("mirror(disk:1, disk:2)", "mirror(disk:1, disk:3)", "mirror(disk:3, disk:4)"),
        ("mirror(disk:1, disk:2)", "mirror(disk:1)", "mirror(disk:4)"),
        (
            "parity(chunk=4K, disk:1, disk:2, disk:3)",
            "parity(chunk=4K, disk:1, disk:2, disk:4)",
            "parity(chunk=4K, disk:1, disk:3, disk:4)",
        ),
    ] {
        let mut disks = vec![memory("fast", fast_bytes(50, 4096) >> 9 << 9, BlockSize::B512)];
        disks.extend((0..4).map(|_| memory("leg", 4 << 20, BlockSize::B512)));
        let with = |slow: &str| format!("cache(mode=back, line=4K, disk:0) | {slow}");
        let graph = graph(&with(before), &disks, None, Reason::Create, &Arc::default()).unwrap();
        let switch = Switch::new("test", Arc::clone(graph.volume()));
        let mut running = Running { disks, graph, switch };
        let mut data = Vec::new();
        running.guest(|bench| data = bench.write_random(0, 200));
        let dirty = fact(&running.graph, "dirty lines");
        assert_eq!(dirty.as_deref(), Some("25"));
        let refused = running.change(&with(other)).unwrap_err();
        assert!(matches!(refused, ChangeFailed::OtherData { .. }), "{refused}");
        running.change(&with(now)).unwrap();
        assert_eq!(fact(&running.graph, "dirty lines"), dirty, "{now}");
        running.guest(|bench| bench.expect(0, &data));
        running.change(now).unwrap();
        running.guest(|bench| bench.expect(0, &data));
    }
}

/// Lines were written back and not flushed. The leg of the mirror below that is to stay forgets them when the cache makes them durable, and calls
/// them clean: only the one that is to go has them.
#[test]
fn a_leg_below_it_that_forgets_what_was_written_back_is_not_gone_on_with_alone() {
    use millrace_backends::fault::{Effect, Kind, Rule, When};
    let mut legs = vec![faulty(50).remove(FAST)];
    for number in 1..4 {
        legs.push(FaultVolume::new(memory("leg", 4 << 20, BlockSize::B512), SEED + number));
        legs[number as usize].hold_writes();
    }
    let disks = volumes(&legs);
    let with = |slow: &str| format!("cache(mode=back, line=4K, disk:0) | {slow}");
    let graph = graph(&with("mirror(disk:1, disk:2)"), &disks, None, Reason::Create, &Arc::default()).unwrap();
    let switch = Switch::new("test", Arc::clone(graph.volume()));
    let mut running = Running { disks, graph, switch };
    let mut data = Vec::new();
    running.guest(|bench| {
        data = bench.write_random(0, 200);
        bench.plain(Operation::Flush, 0, 0).unwrap();
    });
    let me = cache(&running.graph);
    legs::block_on(move |cx| {
        Box::pin(async move {
            let core = me.core().unwrap();
            for slot in 0..core.table.len() {
                me.clean_line(cx, core, slot).await.unwrap();
            }
        })
    })
    .unwrap();
    assert_eq!(fact(&running.graph, "dirty lines").as_deref(), Some("0"));
    legs[1].add(Rule::new(Kind::Flush, When::Nth(1), Effect::Forget(BlockError::WriteFault { errno: 5 })));
    let refused = running.change(&with("mirror(disk:1, disk:3)")).unwrap_err().to_string();
    assert!(refused.contains("(disk:1): it failed when the last was written"), "{refused}");
    running.guest(|bench| bench.expect(0, &data));
    running.change(&with("mirror(disk:2, disk:3)")).unwrap();
    running.guest(|bench| bench.expect(0, &data));
    running.change("mirror(disk:2, disk:3)").unwrap();
    running.guest(|bench| bench.expect(0, &data));
}

/// However long that takes.
#[test]
fn writes_go_through_while_everything_is_written_back() {
    use crate::cache::upkeep::LEAVE_PERIODS;
    use millrace_backends::fault::Kind;
    let gate = Gate::before(memory("slow", 1 << 20, BlockSize::B512), Operation::is_write);
    let slow = FaultVolume::new(Arc::<Gate>::clone(&gate), SEED);
    let legs = [faulty(50).remove(FAST), Arc::clone(&slow)];
    let graph = open("mode=back, line=4K", &volumes(&legs), Reason::Create);
    on_bench(&graph, |bench| drop(bench.write_random(0, 40)));
    let cache = cache(&graph);
    let left = cache.all_is_written_back().unwrap_err().to_string();
    assert!(left.starts_with("5 lines are only on the fast leg (fast)"), "{left}");
    gate.open.store(false, Ordering::Relaxed);
    let (before, beside) = (slow.requests(Kind::Write), Arc::clone(&cache));
    let leave = std::thread::spawn(move || beside.leave());
    until("a line is written back", || slow.requests(Kind::Write) > before);
    let looks = (0..3 * LEAVE_PERIODS).fold(0, |looks, _| cache.look_at_leaving(looks));
    assert!(!cache.writes_back(), "lines would become dirty as fast as they are written back");
    gate.open.store(true, Ordering::Relaxed);
    leave.join().unwrap().unwrap();
    assert!(cache.leg_is_whole(SLOW) && !cache.writes_back());
    // The change was called off, and nobody says so.
    assert_eq!((0..=LEAVE_PERIODS).fold(looks, |looks, _| cache.look_at_leaving(looks)), LEAVE_PERIODS + 1);
    assert!(cache.writes_back());
}

/// The power fails while a cache is put in: its leg says that it may hold data, and the volume knows of no cache.
#[test]
fn a_fast_leg_that_was_left_is_taken_again_when_that_is_meant() {
    let mut running = Running::new("disk:1");
    let mut data = Vec::new();
    running.guest(|bench| data = bench.write_random(0, 200));
    let with = "cache(mode=back, line=4K, disk:0) | disk:1";
    running.change(with).unwrap();
    let disks = std::mem::take(&mut running.disks);
    drop(running);
    let graph = graph("disk:1", &disks, None, Reason::Open, &Arc::default()).unwrap();
    let switch = Switch::new("test", Arc::clone(graph.volume()));
    let mut running = Running { disks, graph, switch };
    let refused = running.change(with).unwrap_err().to_string();
    assert!(refused.contains("--reformat begins an empty one"), "{refused}");
    running.change_to(with, true).unwrap();
    running.guest(|bench| bench.expect(0, &data));
}
