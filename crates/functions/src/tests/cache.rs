use std::vec::Vec;

use proptest::prelude::*;

use super::{config, read};
use crate::{
    Command,
    cache::{self, Decision, Ended, Row},
    opcode,
};

const LINES: usize = 8;
const WRITE: Command = Command { slba: 0, nsid: 1, now: 0, nlb_z: 0, opcode: opcode::WRITE, function: 0, queue: 0 };

/// Something on its way.
#[derive(Clone, Copy, Debug)]
enum Flight {
    /// A read of a line from a way; the oldest version that it may give.
    Fast {
        line: usize,
        way: u8,
        least: u32,
    },
    Write {
        line: usize,
        version: u32,
    },
    /// The version that was read from the slow disk is on its way to the fast one.
    Fill {
        line: usize,
        way: u8,
        version: u32,
    },
}

/// Two disks, and a row between them: lines of one set, each with the number of its last write.
#[derive(Default)]
struct Disks {
    row: Row,
    slow: [u32; LINES],
    fast: [(usize, u32); 4],
    /// Writes that have ended, by line.
    ended: [u32; LINES],
    flights: Vec<Flight>,
    next: u32,
}

impl Disks {
    fn command(line: usize, write: bool) -> Command {
        let slba = (line as u64) << (cache::LINE_BITS + cache::SET_BITS);
        if write { Command { slba, ..WRITE } } else { Command { slba, ..read(0) } }
    }

    fn submit(&mut self, line: usize, write: bool) {
        let (decision, row) = cache::submit(&Self::command(line, write), &self.row, &config(0, 1));
        self.row = row;
        let way = decision.way;
        match decision.kind {
            Decision::FAST => self.flights.push(Flight::Fast { line, way, least: self.ended[line] }),
            Decision::FILL => self.flights.push(Flight::Fill { line, way, version: self.slow[line] }),
            Decision::SLOW if write => {
                self.next += 1;
                self.flights.push(Flight::Write { line, version: self.next });
            }
            Decision::SLOW => {}
            _ => assert!(write, "reads are never held"),
        }
    }

    fn end(&mut self, at: usize) {
        let ended = match self.flights.swap_remove(at) {
            Flight::Fast { line, way, least } => {
                let (found, version) = self.fast[usize::from(way)];
                assert_eq!(found, line, "another line's blocks");
                assert!(version >= least, "version {version} of line {line}, after {least} had been written");
                Ended { way, kind: Ended::READ }
            }
            Flight::Write { line, version } => {
                self.slow[line] = version;
                self.ended[line] = version;
                Ended { way: 0, kind: Ended::WRITE }
            }
            Flight::Fill { line, way, version } => {
                self.fast[usize::from(way)] = (line, version);
                Ended { way, kind: if version % 5 == 4 { Ended::NOT_FILLED } else { Ended::FILLED } }
            }
        };
        self.row = cache::complete(&ended, &self.row);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// What is read from the fast disk is what the slow one would have given, whatever else is on its way.
    #[test]
    fn the_fast_disk_tells_no_lies(steps in proptest::collection::vec((0..LINES, 0..10u8, any::<prop::sample::Index>()), 1..120)) {
        let mut disks = Disks::default();
        for (line, what, which) in steps {
            match what {
                0 => disks.submit(line, true),
                1..6 => disks.submit(line, false),
                _ if disks.flights.is_empty() => {}
                _ => disks.end(which.index(disks.flights.len())),
            }
        }
        while !disks.flights.is_empty() {
            disks.end(0);
        }
        prop_assert_eq!(disks.row.writes, 0);
        prop_assert!(disks.row.ways.iter().all(|way| way & ((15 << 44) | (1 << 62)) == 0), "nothing is counted twice");
    }
}

/// Reads a line to the end; whether it was there.
fn reads(row: &mut Row, line: usize) -> bool {
    let (decision, after) = cache::submit(&Disks::command(line, false), row, &config(0, 1));
    *row = after;
    let kind = match decision.kind {
        Decision::FAST => Ended::READ,
        Decision::FILL => Ended::FILLED,
        _ => return false,
    };
    *row = cache::complete(&Ended { way: decision.way, kind }, row);
    decision.kind == Decision::FAST
}

#[test]
fn the_line_that_was_not_used_for_longest_goes() {
    let mut row = Row::default();
    for line in 0..4 {
        assert!(!reads(&mut row, line));
    }
    for line in [0, 2, 3] {
        assert!(reads(&mut row, line));
    }
    assert!(!reads(&mut row, 5), "the fifth line");
    for line in [0, 2, 3, 5] {
        assert!(reads(&mut row, line), "line {line}");
    }
    assert!(!reads(&mut row, 1), "it went");
}

#[test]
fn places_are_apart_and_a_command_is_answered_to_the_end_of_its_line() {
    let config = crate::Config { cache: 1 << 20, ..config(0, 1) };
    let mut places = Vec::new();
    for slba in [5u64, 8 + 5, (1 << 13) + 5] {
        let command = Command { slba, nlb_z: 20, ..read(0) };
        let (decision, row) = cache::submit(&command, &Row::default(), &config);
        assert_eq!((decision.kind, decision.nlb_z, decision.lba), (Decision::FILL, 2, slba));
        let row = cache::complete(&Ended { way: decision.way, kind: Ended::FILLED }, &row);
        let hit = cache::submit(&command, &row, &config).0;
        assert_eq!((hit.kind, hit.lba), (Decision::FAST, decision.line + 5));
        places.push(decision.line);
    }
    assert_eq!(places, [1 << 20, (1 << 20) + 32, 1 << 20], "rows have places of their own, and lines of a row share them");
    assert_eq!(cache::key(8 + 5), 1);
}
