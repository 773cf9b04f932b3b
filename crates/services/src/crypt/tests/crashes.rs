//! Power cuts at every write boundary.

use std::sync::Arc;

use millrace_block::{
    BlockSize, Operation,
    conformance::{self, Random},
};

use super::{
    super::header::{Header, JOURNAL, JournalPage, crc},
    OFFSET, SEED, leg_blocks, stack,
};
use crate::{
    Reason,
    graph::Graph,
    legs,
    settings::Settings,
    testing::{Bench, CrashTest, NO_CUT, Oracle, Rig, Session, Tearing, crash_test, every_cut, every_seed, graph},
};

/// Blocks of the volumes that are re-keyed: two chunks and a bit.
const BLOCKS: u64 = 260;
const POINTS: usize = 4000;

#[test]
fn flushed_data_survive_power_cuts() {
    for (block_size, points) in [(BlockSize::B512, 5000), (BlockSize::B4096, 1000)] {
        let stack = stack("");
        let blocks = leg_blocks(64, block_size);
        crash_test(&CrashTest {
            block_size,
            points,
            blocks,
            settle: 20,
            steps: 20,
            seed: SEED,
            ..CrashTest::new(&stack, 1)
        });
    }
}

/// Nothing tells which parts of a block were never written: they are deciphered with the rest.
#[test]
fn flushed_data_survive_power_cuts_of_a_disk_that_tears_blocks() {
    crash_test(&CrashTest {
        blocks: leg_blocks(64, BlockSize::B4096),
        tearing: Tearing::Noisy,
        steps: 20,
        points: 500,
        seed: SEED,
        settle: 20,
        ..CrashTest::new(&stack(""), 1)
    });
}

pub(in crate::crypt) fn is_rekeying(graph: &Graph) -> bool {
    graph.services("crypt").iter().any(|(_, service)| !service.status().progress.is_empty())
}

pub(in crate::crypt) fn begin(graph: &Graph) -> Result<String, String> {
    let services = graph.services("crypt");
    let (_, service) = services.first().expect("there is a crypt");
    service.command("rekey", &Settings::default()).map_err(|error| error.to_string())
}

/// Re-keyings that are cut short.
pub(in crate::crypt) struct Rekeyed {
    pub(in crate::crypt) stack: String,
    /// Of 512 bytes, or of 4096 where the disk tears them.
    pub(in crate::crypt) leg_blocks: u64,
    pub(in crate::crypt) blocks: u64,
    pub(in crate::crypt) tearing: Tearing,
    pub(in crate::crypt) points: usize,
    pub(in crate::crypt) seed: u64,
    /// What is true of a volume after a crash.
    pub(in crate::crypt) verify: fn(&Graph),
}

struct Case<'a> {
    test: &'a Rekeyed,
    rig: Rig,
    oracle: Oracle,
}

impl Case<'_> {
    fn open(&self, reason: Reason) -> Result<Graph, String> {
        graph(&self.test.stack, &self.rig.volumes(), None, reason, &self.rig.kept).map_err(|error| error.to_string())
    }

    /// Works while keys change, until the power goes or everything has the new key.
    fn work(&mut self, volume: &Graph, session: &mut Session<'_>) {
        for step in 0..1000 {
            let good = self.oracle.step(session, volume.volume());
            if self.rig.power.is_gone() || (step > 4 && !is_rekeying(volume)) {
                return;
            }
            assert!(good, "a request failed without reason");
            session.settle(60);
        }
        panic!("re-keying does not end");
    }

    /// The power comes back; it may go again while what was begun is completed.
    fn restart(&self, again: Option<u64>) -> Graph {
        self.rig.restart();
        if let Some(again) = again {
            self.rig.power.cut_at(again);
            if let Ok(mut volume) = self.open(Reason::Open) {
                volume.tasks.clear();
            }
            self.rig.restart();
        }
        self.open(Reason::Open).unwrap_or_else(|error| panic!("after the crash: {error}"))
    }
}

impl Rekeyed {
    fn case(&self, seed: u64) -> Case<'_> {
        let (rig, block) = if self.tearing == Tearing::Never {
            (Rig::new(seed, 1, self.leg_blocks, BlockSize::B512), 512)
        } else {
            (Rig::torn(seed, 1, self.leg_blocks), 4096)
        };
        let oracle = Oracle::new(seed, self.blocks, block).torn(self.tearing);
        Case { test: self, rig, oracle }
    }

    /// One workload with a re-keying in it, cut at a boundary. Returns how many boundaries it had.
    fn run(&self, seed: u64, cut: u64) -> u64 {
        let mut case = self.case(seed);
        let bench = Bench::new(seed);
        let mut volume = case.open(Reason::Create).unwrap();
        // Tasks that hold something do not go on while it begins.
        let mut session = Session::new(&bench, &Arc::default(), !seed);
        assert!((0..3).all(|_| case.oracle.step(&mut session, volume.volume())));
        let start = case.rig.power.boundaries();
        case.rig.power.cut_at(cut);
        let begun = begin(&volume);
        assert!(begun.is_ok() || case.rig.power.is_gone(), "{begun:?}");
        let mut session = Session::new(&bench, &case.rig.kept, !seed);
        case.work(&volume, &mut session);
        let boundaries = case.rig.power.boundaries() - start;
        // The process dies with what it has in memory.
        drop(session);
        volume.tasks.clear();
        drop(volume);
        let again = (cut != NO_CUT && cut.is_multiple_of(3)).then(|| Random::new(seed ^ boundaries).below(6));
        let mut volume = case.restart(again);
        let bench = Bench::new(!seed);
        let mut session = Session::new(&bench, &Arc::default(), seed);
        case.oracle.check(&mut session, volume.volume());
        if !is_rekeying(&volume) && begin(&volume).is_ok() {
            assert!(is_rekeying(&volume));
        }
        let mut session = Session::new(&bench, &case.rig.kept, seed);
        case.work(&volume, &mut session);
        assert!(!is_rekeying(&volume));
        case.oracle.check(&mut session, volume.volume());
        (self.verify)(&volume);
        // This time it ends in an orderly way: tasks are told, and get their turns.
        volume.tasks.iter().for_each(|(_, tasks)| tasks.tell());
        session.settle(usize::MAX);
        drop(session);
        volume.unmount();
        let volume = case.open(Reason::Open).unwrap();
        let mut session = Session::new(&bench, &Arc::default(), seed);
        case.oracle.check(&mut session, volume.volume());
        (self.verify)(&volume);
        boundaries
    }

    /// The process dies while keys change, what the disk has not made durable being in its cache yet; and the power goes while the next one
    /// opens the volume, or soon after.
    fn dies(&self, seed: u64) {
        let (mut case, mut random, bench) = (self.case(seed), Random::new(seed), Bench::new(seed));
        let mut volume = case.open(Reason::Create).unwrap();
        let mut session = Session::new(&bench, &Arc::default(), !seed);
        assert!((0..3).all(|_| case.oracle.step(&mut session, volume.volume())));
        begin(&volume).unwrap();
        let mut session = Session::new(&bench, &case.rig.kept, !seed);
        for _ in 0..=random.below(3) {
            session.settle(random.below(60) as usize);
            assert!(case.oracle.step(&mut session, volume.volume()), "a request failed without reason");
        }
        drop(session);
        volume.tasks.clear();
        drop(volume);
        case.rig.kept.forget();
        case.rig.power.cut_at(random.below(12));
        if let Ok(mut volume) = case.open(Reason::Open) {
            let mut session = Session::new(&bench, &Arc::default(), !seed);
            let good = case.oracle.step(&mut session, volume.volume());
            assert!(good || case.rig.power.is_gone(), "a request failed without reason");
            drop(session);
            volume.tasks.clear();
        }
        let volume = case.restart(None);
        let mut session = Session::new(&bench, &Arc::default(), seed);
        case.oracle.check(&mut session, volume.volume());
        let mut session = Session::new(&bench, &case.rig.kept, seed);
        case.work(&volume, &mut session);
        case.oracle.check(&mut session, volume.volume());
        (self.verify)(&volume);
    }

    pub(in crate::crypt) fn test(&self) {
        every_cut("power cuts while keys change", self.seed, self.points, |seed, cut| self.run(seed, cut));
    }
}

#[test]
fn a_re_keying_survives_power_cuts() {
    let leg_blocks = leg_blocks(BLOCKS, BlockSize::B512);
    let (tearing, verify) = (Tearing::Never, |_: &Graph| {});
    Rekeyed { stack: stack(""), leg_blocks, blocks: BLOCKS, tearing, points: POINTS, seed: SEED, verify }.test();
}

#[test]
fn a_re_keying_of_blocks_that_the_disk_tears_survives_power_cuts() {
    // Two chunks and a bit.
    let (blocks, leg_blocks) = (32, leg_blocks(32, BlockSize::B4096));
    let (tearing, verify) = (Tearing::Noisy, |_: &Graph| {});
    Rekeyed { stack: stack(""), leg_blocks, blocks, tearing, points: 600, seed: SEED, verify }.test();
}

#[test]
fn a_process_that_dies_while_keys_change_may_be_followed_by_a_power_cut() {
    let leg_blocks = leg_blocks(BLOCKS, BlockSize::B512);
    let (tearing, verify) = (Tearing::Never, |_: &Graph| {});
    let test = Rekeyed { stack: stack(""), leg_blocks, blocks: BLOCKS, tearing, points: POINTS, seed: SEED, verify };
    every_seed("the process dies while keys change, then the power goes", SEED, 800, |seed| test.dies(seed));
}

/// A slot of the journal that was not flushed may be there after a power cut all the same, as a whole, and the blocks that it tells of not.
#[test]
fn what_a_journal_says_is_durable_before_it_can_be() {
    for (seed, cut) in (SEED..SEED + 8).flat_map(|seed| (0..5).map(move |cut| (seed, cut))) {
        let rig = Rig::new(seed, 1, leg_blocks(60, BlockSize::B512), BlockSize::B512);
        let (bench, disk) = (Bench::new(seed), rig.volumes().remove(0));
        let mut volume = graph(&stack(""), &rig.volumes(), None, Reason::Create, &rig.kept).unwrap();
        let mut session = Session::new(&bench, &Arc::default(), seed);
        let mut guest = conformance::Bench::new(&mut session, Arc::clone(volume.volume()), seed);
        let before = guest.write_random(0, 60);
        guest.plain(Operation::Flush, 0, 0).unwrap();
        begin(&volume).unwrap();
        let after = guest.write_random(0, 60);
        drop(guest);
        let home = legs::read(&disk, OFFSET, 60 * 512).unwrap();
        let id = Header::load(&disk).unwrap().unwrap().0.rekeying.unwrap().id;
        let page = JournalPage { id, start: 0, len: home.len() as u32, data_crc: crc(&home) };
        rig.power.cut_at(cut);
        let mut session = Session::new(&bench, &rig.kept, seed);
        while !rig.power.is_gone() {
            session.settle(1);
        }
        drop(session);
        volume.tasks.clear();
        drop(volume);
        rig.restart();
        let slot = [&page.encode()[..], &home].concat();
        let is_begun = rig.disks[0].durable()[JOURNAL as usize..][..slot.len()].iter().any(|byte| *byte != 0);
        if is_begun {
            rig.disks[0].spoil(JOURNAL as usize, &slot);
        }
        let volume = graph(&stack(""), &rig.volumes(), None, Reason::Open, &rig.kept).unwrap();
        let mut session = Session::new(&bench, &Arc::default(), seed);
        let found = conformance::Bench::new(&mut session, Arc::clone(volume.volume()), seed).read(0, 60);
        let blocks = found.chunks(512).zip(before.chunks(512).zip(after.chunks(512)));
        for (lba, (found, (before, after))) in blocks.enumerate() {
            assert!(found == before || found == after, "seed {seed:#x}, cut {cut}: block {lba} is noise");
        }
    }
}
