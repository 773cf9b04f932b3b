use std::{vec, vec::Vec};

use proptest::prelude::*;

use super::{config, read};
use crate::{
    Command, Config,
    copy::{self, Action, Event, Job, Route, phase},
    opcode,
};

const BLOCKS: usize = 100;

/// A guest's write on its way: to which disks it still has to come.
#[derive(Clone, Debug)]
struct Write {
    first: usize,
    count: usize,
    version: u32,
    epoch: u8,
    source: bool,
    target: bool,
}

struct Disks {
    config: Config,
    job: Job,
    source: Vec<u32>,
    target: Vec<u32>,
    window: Vec<u32>,
    action: Action,
    writes: Vec<Write>,
    next: u32,
}

impl Disks {
    fn new() -> Self {
        let config = Config { copied: BLOCKS as u64, copy: 7000, ..config(0, 1) };
        let (source, target) = (vec![0; BLOCKS], vec![u32::MAX; BLOCKS]);
        let (job, action) = (Job::default(), Action::default());
        Self { config, job, source, target, window: Vec::new(), action, writes: Vec::new(), next: 0 }
    }

    fn event(&mut self, kind: u8, epoch: u8) {
        let (action, job) = copy::step(&Event { epoch, kind }, &self.job, &self.config);
        self.job = job;
        if action.kind != Action::WAIT {
            self.action = action;
        }
    }

    /// Carries out a part of what the copy does.
    fn copy(&mut self) {
        let Action { lba, nlb_z, kind } = self.action;
        let count = usize::from(nlb_z) + 1;
        match kind {
            Action::READ => {
                let first = lba as usize;
                self.window = self.source[first..first + count].to_vec();
            }
            Action::WRITE => {
                let first = lba as usize - 7000;
                self.target[first..first + count].copy_from_slice(&self.window);
            }
            _ => return self.event(Event::TURN, 0),
        }
        self.action = Action::default();
        self.event(Event::MOVED, 0);
    }

    fn write(&mut self, first: usize, count: usize) {
        let count = count.min(BLOCKS - first);
        // Writes that overlap have no order between two disks: a guest that has both under way gets either.
        if self.writes.iter().any(|other| first < other.first + other.count && other.first < first + count) {
            return;
        }
        let command = Command { slba: first as u64, nlb_z: count as u16 - 1, opcode: opcode::WRITE, ..read(0) };
        let (route, job) = copy::submit(&command, &self.job, &self.config);
        if route.kind == Route::HOLD {
            assert_eq!(job, self.job);
            return;
        }
        self.job = job;
        self.next += 1;
        let target = route.kind == Route::BOTH;
        assert!(!target || route.target == 7000 + first as u64);
        self.writes.push(Write { first, count, version: self.next, epoch: route.epoch, source: true, target });
    }

    /// A disk has a write, or a write ends.
    fn go_on(&mut self, at: usize, source_first: bool) {
        let Write { first, count, version, epoch, source, target } = self.writes[at].clone();
        if source && (source_first || !target) {
            self.source[first..first + count].fill(version);
            self.writes[at].source = false;
        } else if target {
            self.target[first..first + count].fill(version);
            self.writes[at].target = false;
        } else {
            self.writes.swap_remove(at);
            self.event(Event::WRITTEN, epoch);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Whatever a guest writes meanwhile, and however it is interleaved, the disks are the same in the end, and stay so.
    #[test]
    fn the_target_becomes_the_source(
        steps in proptest::collection::vec((0..8u8, 0..BLOCKS, 1..40usize, any::<prop::sample::Index>(), any::<bool>()), 0..200),
    ) {
        let mut disks = Disks::new();
        for (what, first, count, which, source_first) in steps {
            match what {
                0..3 => disks.copy(),
                3..5 => disks.write(first, count),
                _ if disks.writes.is_empty() => {}
                _ => disks.go_on(which.index(disks.writes.len()), source_first),
            }
        }
        for _ in 0..100 {
            disks.copy();
            while !disks.writes.is_empty() {
                disks.go_on(0, true);
            }
        }
        prop_assert_eq!((disks.job.phase(), disks.job.writes), (phase::DONE, 0));
        prop_assert_eq!(&disks.source, &disks.target);
        disks.write(3, 5);
        (0..3).for_each(|_| disks.go_on(0, false));
        prop_assert_eq!(&disks.source, &disks.target);
    }
}

#[test]
fn a_failed_copy_leaves_the_guest_alone() {
    let mut disks = Disks::new();
    disks.copy();
    disks.copy();
    assert_eq!(disks.job.phase(), phase::READ);
    disks.event(Event::FAILED, 0);
    assert_eq!((disks.job.phase(), disks.action.kind), (phase::FAILED, Action::END));
    disks.write(0, 10);
    assert!(!disks.writes[0].target);
    disks.event(Event::TURN, 0);
    assert_eq!(disks.job.phase(), phase::FAILED);
}

#[test]
fn reads_go_on_and_flushes_reach_both_disks() {
    let mut disks = Disks::new();
    disks.copy();
    let (flush, window) = (Command { opcode: opcode::FLUSH, ..read(0) }, read(3));
    assert_eq!(copy::submit(&flush, &disks.job, &disks.config).0.kind, Route::BOTH);
    assert_eq!(
        copy::submit(&window, &disks.job, &disks.config),
        (copy::submit(&window, &disks.job, &disks.config).0, disks.job)
    );
    assert_eq!(copy::submit(&window, &disks.job, &disks.config).0.kind, Route::SOURCE);
    let write = Command { opcode: opcode::WRITE, ..window };
    assert_eq!(copy::submit(&write, &disks.job, &disks.config).0.kind, Route::HOLD);
}
