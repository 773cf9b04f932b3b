//! The operator's place for the root: a leg that was put back as a whole is found, and no crash between leg and place locks anybody out.

use std::{sync::Arc, time::Duration};

use millrace_backends::{
    MemoryVolume,
    fault::{Effect, FaultVolume, Kind, Rule, When},
};
use millrace_block::{BlockError, BlockSize, Operation, Switch, Volume};

use super::{
    super::anchor::PLACE, ILL, SEED, close, disk, fall_ill, kill, leg_blocks, nothing_is_called_changed, on_bench, put_raw,
    raw, rooted, stack, trouble::save, write_ill,
};
use crate::{
    Health, Node, Reason, SharedObjects,
    background::Spawner,
    graph::{ChangeFailed, Graph, Plan, Terms, change},
    legs,
    testing::{CrashTest, Disks, Kept, crash_test, graph},
};

const BLOCKS: u64 = 400;
const SIZE: BlockSize = BlockSize::B512;

fn place() -> Arc<dyn Volume> {
    MemoryVolume::create("place", PLACE.len, SIZE).unwrap()
}

fn open_with(settings: &str, leg: &Arc<dyn Volume>, place: &Arc<dyn Volume>, reason: Reason) -> Result<Graph, String> {
    let disks = [Arc::clone(leg), Arc::clone(place)];
    graph(&rooted(settings), &disks, None, reason, &Arc::default()).map_err(|error| error.to_string())
}

fn open(leg: &Arc<dyn Volume>, place: &Arc<dyn Volume>) -> Result<Graph, String> {
    open_with("", leg, place, Reason::Open)
}

fn whole(volume: &Arc<dyn Volume>) -> Vec<u8> {
    legs::read(volume, 0, volume.geometry().bytes() as usize).unwrap()
}

/// What the medium once was.
fn put_back(volume: &Arc<dyn Volume>, image: &[u8]) {
    legs::write(volume, 0, image.to_vec()).unwrap();
}

fn write(graph: &Graph) -> Vec<u8> {
    let mut data = Vec::new();
    on_bench(graph, |bench| data = bench.write_random(0, BLOCKS));
    data
}

/// A leg and a place, what the leg once was, and the data of then and of now.
type Written = (Arc<dyn Volume>, Arc<dyn Volume>, Vec<u8>, [Vec<u8>; 2]);

/// A leg that was written, closed, and written once more.
fn twice_written() -> Written {
    let (leg, place) = (disk(BLOCKS, SIZE), place());
    let volume = open_with("", &leg, &place, Reason::Create).unwrap();
    let before = write(&volume);
    close(volume);
    let image = whole(&leg);
    let volume = open(&leg, &place).unwrap();
    let now = write(&volume);
    close(volume);
    (leg, place, image, [before, now])
}

/// What the error tells to say.
fn token(error: &str) -> String {
    let rest = error.split("accept=").nth(1).unwrap_or_else(|| panic!("{error}"));
    rest.split(' ').next().unwrap().to_owned()
}

#[test]
fn a_leg_that_is_put_back_is_found_and_taken_only_when_told() {
    let (leg, place, image, [before, now]) = twice_written();
    let last = whole(&leg);
    put_back(&leg, &image);
    let known = whole(&place);
    for reason in [Reason::Open, Reason::Create, Reason::Change] {
        let error = open_with("", &leg, &place, reason).err().unwrap();
        assert!(
            error.contains("all of it was put back to what it was at save") && error.contains("place knows of save"),
            "{error}"
        );
        for (wrong, why) in
            [("1-00000000-2", "is for another leg or another time"), ("yes", "is malformed: it is SAVE-CODE")]
        {
            let refused = open_with(&format!("accept={wrong}, "), &leg, &place, reason).err().unwrap();
            assert!(refused.starts_with(&error) && refused.contains(&format!("{wrong}, {why}")), "{refused}");
        }
    }
    assert!(whole(&leg) == image && whole(&place) == known, "nothing was changed");
    // The right one is as good as ever.
    put_back(&leg, &last);
    let volume = open(&leg, &place).unwrap();
    on_bench(&volume, |bench| bench.expect(0, &now));
    close(volume);
    // The operator wants the old one.
    put_back(&leg, &image);
    let accept = format!("accept={}, ", token(&open(&leg, &place).err().unwrap()));
    let volume = open_with(&accept, &leg, &place, Reason::Open).unwrap();
    on_bench(&volume, |bench| bench.expect(0, &before));
    let newest = write(&volume);
    close(volume);
    let volume = open(&leg, &place).unwrap();
    on_bench(&volume, |bench| bench.expect(0, &newest));
    nothing_is_called_changed(&volume);
    close(volume);
    // What was said once is not said for ever, and neither of the two comes in again.
    for old in [&image, &last] {
        put_back(&leg, old);
        assert!(open_with(&accept, &leg, &place, Reason::Open).err().unwrap().contains("all of it was put back"));
    }
}

/// More of a leg that was put back is in doubt than the log can carry over, and it is accepted.
#[test]
fn a_leg_that_is_accepted_may_have_any_number_of_doubts() {
    let (faulty, place) = (FaultVolume::new(disk(3000, SIZE), SEED), place());
    let leg: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
    let volume = open_with("", &leg, &place, Reason::Create).unwrap();
    let mut data = Vec::new();
    on_bench(&volume, |bench| data = bench.write_random(0, 3000));
    close(volume);
    let volume = open(&leg, &place).unwrap();
    fall_ill(&faulty, 8);
    on_bench(&volume, write_ill);
    kill(volume);
    faulty.clear();
    let image = whole(&leg);
    for _ in 0..2 {
        let volume = open(&leg, &place).unwrap();
        write(&volume);
        close(volume);
    }
    put_back(&leg, &image);
    fall_ill(&faulty, 8);
    let accept = format!("accept={}, ", token(&open(&leg, &place).err().unwrap()));
    let volume = open_with(&accept, &leg, &place, Reason::Open).unwrap();
    on_bench(&volume, |bench| {
        bench.expect(ILL, &data[ILL as usize * 512..]);
        bench.write(2999, &[5; 512]).unwrap();
        data[2999 * 512..].fill(5);
        faulty.clear();
        bench.expect(0, &data);
    });
    nothing_is_called_changed(&volume);
    close(volume);
}

#[test]
fn a_format_whose_place_cannot_be_told_has_taken_place() {
    let (leg, faulty) = (disk(BLOCKS, SIZE), FaultVolume::new(place(), SEED));
    let place: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&faulty);
    let volume = open_with("", &leg, &place, Reason::Create).unwrap();
    write(&volume);
    faulty.add(Rule::new(Kind::Write, When::Always, Effect::Fail(BlockError::WriteFault { errno: 5 })));
    volume.volume().format(SIZE).unwrap();
    assert_eq!(volume.services("crypt")[0].1.status().health, Health::Degraded, "the place is not told");
    on_bench(&volume, |bench| bench.expect_zeroes(0, BLOCKS));
    assert!(raw(&leg, 5).iter().all(|byte| *byte == 0), "the leg has its blocks back");
    faulty.clear();
    let data = write(&volume);
    close(volume);
    let volume = open(&leg, &place).unwrap();
    on_bench(&volume, |bench| bench.expect(0, &data));
    nothing_is_called_changed(&volume);
    close(volume);
}

#[test]
fn a_leg_that_is_put_back_after_a_crash_is_found_too() {
    let (leg, place, image, _) = twice_written();
    let volume = open(&leg, &place).unwrap();
    write(&volume);
    kill(volume);
    let crashed = whole(&leg);
    put_back(&leg, &image);
    assert!(open(&leg, &place).err().unwrap().contains("all of it was put back"));
    // The one that crashed is opened, and is the last one from then on.
    put_back(&leg, &crashed);
    close(open(&leg, &place).unwrap());
    put_back(&leg, &image);
    assert!(open(&leg, &place).err().unwrap().contains("all of it was put back"));
}

#[test]
fn what_was_erased_does_not_come_back() {
    let (leg, place, _, _) = twice_written();
    let image = whole(&leg);
    let volume = open(&leg, &place).unwrap();
    volume.volume().format(SIZE).unwrap();
    kill(volume);
    let erased = whole(&leg);
    put_back(&leg, &image);
    assert!(open(&leg, &place).err().unwrap().contains("all of it was put back"));
    put_back(&leg, &erased);
    let volume = open(&leg, &place).unwrap();
    on_bench(&volume, |bench| bench.expect_zeroes(0, BLOCKS));
    close(volume);
}

#[test]
fn a_place_that_knows_nothing_or_another_volume_is_refused() {
    let (leg, first, _, [_, now]) = twice_written();
    let image = whole(&leg);
    // Lost, and made anew.
    let fresh = place();
    let error = open(&leg, &fresh).err().unwrap();
    assert_eq!(open_with("", &leg, &fresh, Reason::Create).err().unwrap(), error);
    assert!(error.contains("place has no root of it, so that nobody can tell whether it was put back"), "{error}");
    assert!(whole(&fresh).iter().all(|byte| *byte == 0) && whole(&leg) == image, "nothing was changed");
    close(open_with(&format!("accept={}, ", token(&error)), &leg, &fresh, Reason::Open).unwrap());
    close(open(&leg, &fresh).unwrap());
    // One damaged copy is read from the other.
    let mut bytes = whole(&fresh);
    bytes[40] ^= 1;
    put_back(&fresh, &bytes);
    let volume = open(&leg, &fresh).unwrap();
    on_bench(&volume, |bench| bench.expect(0, &now));
    close(volume);
    // Another volume's.
    let (other, foreign, ..) = twice_written();
    let error = open(&leg, &foreign).err().unwrap();
    assert!(error.contains("leg place: it has the root of another volume"), "{error}");
    let error = open_with("", &disk(BLOCKS, SIZE), &foreign, Reason::Create).err().unwrap();
    assert!(error.contains("leg place: it has the root of a volume: give that of the new one"), "{error}");
    close(open(&other, &foreign).unwrap());
    // Something else altogether.
    put_back(&first, &[7; 8192]);
    for reason in [Reason::Open, Reason::Create] {
        let error = open_with("", &leg, &first, reason).err().unwrap();
        assert!(error.contains("leg place: it holds something else than a root"), "{error}");
    }
}

#[test]
fn places_that_cannot_be_are_refused_by_name() {
    let leg = disk(BLOCKS, SIZE);
    let small: Arc<dyn Volume> = MemoryVolume::create("small", PLACE.len - 512, SIZE).unwrap();
    let error = open_with("", &leg, &small, Reason::Create).err().unwrap();
    assert!(error.contains("the place for the root (small) has 7680 bytes, and 8192 are needed"), "{error}");
    let error = open_with("", &leg, &leg, Reason::Create).err().unwrap();
    assert!(error.contains("the root must be elsewhere than what it is of"), "{error}");
    let disks = [Arc::clone(&leg), place()];
    let refused =
        |stack: &str| graph(stack, &disks, None, Reason::Create, &Arc::default()).map(|_| ()).unwrap_err().to_string();
    let xts = rooted("").replace("mode=authenticated, ", "");
    assert!(refused(&xts).contains("in the mode xts it is over one leg"));
    assert!(refused(&stack("accept=1-2-3, ")).contains("accept: is of use where the root has a place"));
    let error = "crypt(accept=1, key=file:/k, null)".parse::<Node>().unwrap_err().to_string();
    assert!(error.contains("accept: is of no use in this mode"), "{error}");
}

/// While the place cannot be written, nothing is called saved; nobody is locked out.
#[test]
fn a_place_that_fails_loses_nothing() {
    let (leg, place) = (disk(BLOCKS, SIZE), FaultVolume::new(place(), SEED));
    let as_volume: Arc<dyn Volume> = Arc::<FaultVolume>::clone(&place);
    let volume = open_with("", &leg, &as_volume, Reason::Create).unwrap();
    let data = write(&volume);
    place.add(Rule::new(Kind::Write, When::Always, Effect::Fail(BlockError::NoSpace)));
    // Enough for several saves, none of which can be.
    let failed = std::cell::Cell::new(false);
    on_bench(&volume, |bench| {
        for _ in 0..80 {
            let segment = bench.memory.segment(0, 100 * bench.block());
            failed.set(failed.get() || bench.moving(Operation::Write { fua: false }, 0, &[segment]).is_err());
        }
    });
    assert!(failed.get(), "the log is full, and nothing could be saved");
    on_bench(&volume, |bench| bench.expect(100, &data[100 * 512..]));
    close(volume);
    place.clear();
    let volume = open(&leg, &as_volume).unwrap();
    on_bench(&volume, |bench| bench.expect(100, &data[100 * 512..]));
    nothing_is_called_changed(&volume);
    assert_eq!(volume.services("crypt")[0].1.status().health, Health::Good);
    close(volume);
}

/// A volume in use.
struct Used {
    disks: [Arc<dyn Volume>; 3],
    graph: Graph,
    switch: Arc<Switch>,
}

impl Used {
    fn change(&mut self, stack: &str) -> Result<(), ChangeFailed> {
        let node: Node = stack.parse().unwrap();
        let plan = Plan { volume: "test", stack: &node, size: Some(BLOCKS << SIZE.shift()), block_size: SIZE };
        let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
        let (leaves, shared) = (Disks(self.disks.to_vec()), SharedObjects::default());
        let mut new = Graph::build(&plan, &leaves, &shared, &spawner, Some(&self.graph)).unwrap();
        // Its tasks are not run here, and so have ended.
        self.graph.tasks.clear();
        let mut store = || Ok(());
        let terms = Terms {
            patience: Duration::from_secs(1),
            reformat: false,
            scratch: 1 << 20,
            below: &[],
            store: &mut store,
            restore: None,
        };
        change(&self.switch, &mut self.graph, &mut new, terms)?;
        self.graph = new;
        Ok(())
    }
}

#[test]
fn a_place_comes_goes_and_is_changed_while_the_volume_is_in_use() {
    let disks = [disk(BLOCKS, SIZE), place(), place()];
    let graph = graph(&stack(""), &disks, Some(BLOCKS << SIZE.shift()), Reason::Create, &Arc::default()).unwrap();
    let switch = Switch::new("test", Arc::clone(graph.volume()));
    let data = write(&graph);
    let mut used = Used { disks, graph, switch };
    let image = whole(&used.disks[0]);
    let elsewhere = rooted("").replace("disk:1", "disk:2");
    for stack in [rooted(""), elsewhere.clone(), stack(""), rooted("")] {
        used.change(&stack).unwrap_or_else(|error| panic!("{stack}: {error}"));
        on_bench(&used.graph, |bench| {
            bench.expect(0, &data);
            bench.write_random(390, 1);
            let again = data[390 * 512..][..512].to_vec();
            let segment = bench.memory.segment(0, 512);
            segment.write_at(0, &again);
            bench.moving(Operation::Write { fua: false }, 390, &[segment]).unwrap();
        });
    }
    let Used { disks: [leg, place, other], graph, switch } = used;
    drop(switch);
    close(graph);
    put_back(&leg, &image);
    assert!(open(&leg, &place).err().unwrap().contains("all of it was put back"));
    let found = open(&leg, &other).err().unwrap();
    assert!(found.contains("all of it was put back"), "{found}");
}

/// Without a place for the root: while the volume is in use, the volume itself knows.
#[test]
fn a_leg_that_is_put_back_while_the_volume_is_in_use_is_not_taken_by_a_change() {
    let disks = [disk(BLOCKS, SIZE), place(), place()];
    let graph = graph(&stack(""), &disks, Some(BLOCKS << SIZE.shift()), Reason::Create, &Arc::default()).unwrap();
    let switch = Switch::new("test", Arc::clone(graph.volume()));
    let mut used = Used { disks, graph, switch };
    let before = write(&used.graph);
    save(&used.graph).unwrap();
    let image = whole(&used.disks[0]);
    // What lies there as it should be is taken.
    used.change(&stack("save-after=8s, ")).unwrap();
    write(&used.graph);
    save(&used.graph).unwrap();
    let now = whole(&used.disks[0]);
    put_back(&used.disks[0], &image);
    let error = used.change(&stack("save-after=9s, ")).unwrap_err().to_string();
    assert!(error.contains("it was put back, while the volume was in use, to what it was at save"), "{error}");
    on_bench(&used.graph, |bench| {
        assert_eq!(super::read(bench, 0), Err(BlockError::NotReady), "neither is it on the way back");
    });
    // Another volume of this key.
    let (other, ..) = twice_written();
    put_back(&used.disks[0], &whole(&other));
    let error = used.change(&stack("save-after=9s, ")).unwrap_err().to_string();
    assert!(error.contains("it has another volume than the one that is in use"), "{error}");
    put_back(&used.disks[0], &now);
    used.change(&stack("save-after=9s, ")).unwrap();
    let Used { disks: [leg, ..], graph, switch } = used;
    drop(switch);
    close(graph);
    // When it is closed nobody knows.
    put_back(&leg, &image);
    let volume = crate::testing::graph(&stack(""), &[leg], None, Reason::Open, &Arc::default()).unwrap();
    on_bench(&volume, |bench| bench.expect(0, &before));
    close(volume);
}

#[test]
fn a_changed_block_is_found_as_without_a_place() {
    let (leg, place, _, _) = twice_written();
    let mut block = raw(&leg, 7);
    block[3] ^= 1;
    put_raw(&leg, 7, &block);
    let volume = open(&leg, &place).unwrap();
    on_bench(&volume, |bench| assert_eq!(super::read(bench, 7), super::CHANGED));
    close(volume);
}

#[test]
fn power_cuts_between_leg_and_place_lock_nobody_out() {
    let at_most_one_behind = |volume: &Graph| {
        nothing_is_called_changed(volume);
        let facts = volume.services("crypt")[0].1.status().facts;
        assert!(facts.iter().any(|(name, value)| name == "root also at" && !value.ends_with("none")), "{facts:?}");
    };
    let stack = rooted("save-after=1ms, ");
    for (block_size, points) in [(BlockSize::B512, 3200), (BlockSize::B4096, 800)] {
        crash_test(&CrashTest {
            block_size,
            points,
            blocks: leg_blocks(200, block_size),
            settle: 200,
            steps: 25,
            seed: SEED,
            verify: &|volume, _| at_most_one_behind(volume),
            ..CrashTest::new(&stack, 2)
        });
    }
}
