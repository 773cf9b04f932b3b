//! What the data path is to reach, and whether it does: the claims behind the word "fast", each a comparison of two measured
//! values or of one with a limit.

use std::fmt::Write as _;

use crate::{
    gate::State,
    record::{Record, Row},
    stats::Summary,
    table::number,
};

/// A measured value: a metric of a row.
#[derive(Clone, Copy, Debug)]
struct Cell {
    section: &'static str,
    test: &'static str,
    depth: u32,
    client: &'static str,
    subject: &'static str,
    metric: &'static str,
}

impl Cell {
    const fn by(self, subject: &'static str) -> Self {
        Self { subject, ..self }
    }

    const fn at(self, depth: u32) -> Self {
        Self { depth, ..self }
    }

    const fn test(self, test: &'static str) -> Self {
        Self { test, ..self }
    }

    fn summary(&self, records: &[Record], state: State) -> Option<Summary> {
        let record = records.iter().find(|record| record.section == self.section)?;
        let same = |row: &&Row| {
            row.state == state
                && row.depth == self.depth
                && row.client == self.client
                && row.subject == self.subject
                && (row.test == self.test || row.test.starts_with(self.test) && !record.has(self.test))
        };
        record.rows.iter().find(same)?.summary(self.metric)
    }
}

#[derive(Clone, Copy, Debug)]
enum Rule {
    /// The value is at least so many times the other one.
    Times(Cell, f64),
    /// The value is at most so many times the other one.
    Within(Cell, f64),
    /// The value is at most this.
    AtMost(f64),
    /// The value is at least this.
    AtLeast(f64),
    /// The value, in nanoseconds, is at most so many milliseconds.
    Lasts(f64),
    /// Of two rates: each of these operations takes at most so many nanoseconds more than one of the other. Where the samples do not tell,
    /// the verdict is open.
    Above(Cell, f64),
}

/// One thing to reach.
struct Goal {
    text: &'static str,
    cell: Cell,
    /// In this state, or in whichever there is.
    state: Option<State>,
    rule: Rule,
}

/// What became of a goal.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The goal in words.
    pub(crate) text: &'static str,
    /// Where the cores were.
    pub(crate) state: State,
    /// What was found: a multiple, or a value.
    pub(crate) found: String,
    /// What was wanted.
    pub(crate) wanted: String,
    /// Whether the one is as good as the other.
    pub(crate) verdict: Verdict,
}

/// A verdict takes this many samples on each side.
const ENOUGH: usize = 5;
/// Standard errors that a difference of two medians must be away from its limit, for a verdict.
const SURE: f64 = 2.0;

/// Whether a goal is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It is.
    Reached,
    /// It is not.
    Missed,
    /// The smaller side has only so many samples.
    Open(usize),
    /// It is closer to the limit than the samples tell.
    Unclear,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Reached => f.write_str("reached"),
            Self::Missed => f.write_str("not reached"),
            Self::Open(1) => f.write_str("open: 1 sample"),
            Self::Open(samples) => write!(f, "open: {samples} samples"),
            Self::Unclear => f.write_str("open: within the spread"),
        }
    }
}

const fn cell(section: &'static str, test: &'static str, depth: u32, client: &'static str, metric: &'static str) -> Cell {
    Cell { section, test, depth, client, subject: "ours", metric }
}

const fn goal(text: &'static str, cell: Cell, state: Option<State>, rule: Rule) -> Goal {
    Goal { text, cell, state, rule }
}

const NEAR: Option<State> = Some(State::Near);
const FAR: Option<State> = Some(State::Far);
const NULL: Cell = cell("null", "randread 4k", 128, "lean", "iops");
const STILL: Cell = cell("null", "randread 4k", 128, "still", "iops");
const PERF: Cell = cell("perf", "randread 4k", 128, "perf", "iops");
const CYCLES: Cell = cell("null", "randread 4k", 32, "lean", "cycles");
const READ: Cell = cell("memory", "randread 4k 64 MB", 128, "lean", "iops");
const FILE: Cell = cell("file", "randread 4k on tmpfs", 1, "", "iops");
const MANY: Cell = cell("devices", "randread 4k on 64 devices", 32, "lean", "iops");
const VIRTIO: Cell = cell("virtio", "randread 4k", 1, "lean", "iops");
const PROGRAM: Cell = cell("fastpath", "randread 4k on tmpfs", 32, "", "iops");
const WAITED: Cell = Cell { metric: "p50", ..PROGRAM.at(1) };
/// Of all its processes: pages of the program that they share count once.
const HELD: Cell = cell("footprint", "without devices", 0, "held", "pss");
const TAIL: Cell = cell("tail", "randread 4k null", 1, "lean", "p99.9");
const POLL: Cell = Cell { subject: "adaptive", ..cell("polling", "randread 4k null, 5 K/s", 32, "lean", "p50") };
const CORE: Cell = Cell { metric: "core", ..POLL };
const OFTEN: &str = "randread 4k null, 20 K/s";
const STAYS: Cell = Cell { client: "still", ..VIRTIO };
const WOKEN: &str = "randread 4k virtio, null, 5 K/s";
const IN_TURN: &str = "randread 4k file on disk, one after the other";
const DISK: &str = "randwrite 4k file on disk, 5 K/s";
const HOP: Cell = cell("services", "randread 4k null", 32, "lean", "iops");
const OVER: Cell = cell("services", "randread 4k memory", 32, "lean", "iops");
const WRITTEN: Cell = OVER.test("randwrite 4k memory");
const SMALL: Cell = OVER.test("randwrite 4k memory, parity");
const INTERRUPTS: Cell = cell("interrupts", "randread 4k", 32, "asleep", "interrupts");
const SPARE: Cell = Cell { subject: "alone", ..cell("spare", "randread 4k on its own core", 1, "asleep", "p99") };

/// What is off what is due to a share, in percent.
const DUE: Cell = cell("qos", "share, weight 1", 16, "lean", "off");
/// What gets beyond a cap at any time, in buckets.
const ABOVE: Cell = cell("qos", "cap of 1000 a second, with rests", 32, "driver", "above");
/// How long one request after the other takes beside a busy volume, with a latency target.
const PROMPT: Cell = cell("qos", "one after the other, beside 64 in flight", 1, "asleep", "p99");
/// A change under writes; of a file at rest, because what its file system takes while a guest writes is not the change's.
const PAUSE: Cell = Cell { subject: "changed", ..cell("pauses", "randwrite 4k memory", 32, "lean", "pause") };
const SHORT: Rule = Rule::Lasts(10.0);

/// At most so many percent off what is due.
const fn due(text: &'static str, cell: Cell, percent: f64) -> Goal {
    goal(text, cell, None, Rule::AtMost(percent))
}

/// At most one bucket beyond the cap.
const fn capped(text: &'static str, test: &'static str) -> Goal {
    goal(text, ABOVE.test(test), None, Rule::AtMost(1.0))
}

/// A change of this place's stack while nobody asks for anything.
const fn brief(text: &'static str, test: &'static str) -> Goal {
    goal(text, PAUSE.test(test).by("changed at rest"), None, SHORT)
}

/// FastPath's rate beside that of one of fio's own engines.
const fn faster(text: &'static str, depth: u32, engine: &'static str) -> Goal {
    goal(text, PROGRAM.at(depth), None, Rule::Times(PROGRAM.at(depth).by(engine), 5.0))
}

/// And its latency.
const fn sooner(text: &'static str, depth: u32, engine: &'static str) -> Goal {
    goal(text, WAITED.at(depth), None, Rule::Within(WAITED.at(depth).by(engine), 0.29))
}

/// At most a tenth above what it is alone.
const fn unmoved(text: &'static str, depth: u32, subject: &'static str) -> Goal {
    goal(text, SPARE.at(depth).by(subject), None, Rule::Within(SPARE.at(depth), 1.1))
}

/// SPDK's value of the same thing.
const fn spdk(cell: Cell, times: f64) -> Rule {
    Rule::Times(cell.by("spdk"), times)
}

const fn qsd(cell: Cell, times: f64) -> Rule {
    Rule::Times(cell.by("qsd"), times)
}

const fn fio(cell: Cell) -> Rule {
    Rule::Times(cell.by("fio io_uring"), 0.95)
}

#[rustfmt::skip]
const GOALS: &[Goal] = &[
    goal("null, depth 128, SPDK's client: 1.5 times SPDK", PERF, NEAR, spdk(PERF, 1.5)),
    goal("null, depth 128, SPDK's client: 2 times SPDK", PERF, FAR, spdk(PERF, 2.0)),
    goal("null, depth 32, SPDK's client: 1.7 times SPDK", PERF.at(32), NEAR, spdk(PERF.at(32), 1.7)),
    goal("null, depth 32, SPDK's client: 1.6 times SPDK", PERF.at(32), FAR, spdk(PERF.at(32), 1.6)),
    goal("null, depth 128, lean client: 3.5 times SPDK", NULL, NEAR, spdk(NULL, 3.5)),
    goal("null, depth 128, lean client: 2.5 times SPDK", NULL, FAR, spdk(NULL, 2.5)),
    goal("null, depth 128, lean client: 40 M", NULL, NEAR, Rule::AtLeast(40e6)),
    goal("null, depth 128, entries that stay: 3.5 times SPDK", STILL, NEAR, spdk(STILL, 3.5)),
    goal("null, depth 128, entries that stay: 2.5 times SPDK", STILL, FAR, spdk(STILL, 2.5)),
    goal("null, depth 32: at most 60 cycles per I/O", CYCLES, NEAR, Rule::AtMost(60.0)),
    goal("null, depth 128: at most 60 cycles per I/O", CYCLES.at(128), NEAR, Rule::AtMost(60.0)),
    goal("null, depth 1: at most 160 ns a round trip", NULL.at(1), NEAR, Rule::AtLeast(1e9 / 160.0)),
    goal("null, depth 1: 1.3 times SPDK", NULL.at(1), FAR, spdk(NULL.at(1), 1.3)),
    goal("null, depth 1: a round trip within three ping-pongs", Cell { metric: "pings", ..NULL.at(1) }, None, Rule::AtMost(3.0)),
    goal("memory, 64 MB, random read, depth 128: 2.2 times SPDK", READ, None, spdk(READ, 2.2)),
    goal("memory, 64 MB, random write, depth 128: 2.4 times SPDK", READ.test("randwrite 4k 64 MB"), None, spdk(READ.test("randwrite 4k 64 MB"), 2.4)),
    goal("memory, 8 MB, random read, depth 128: 2.7 times SPDK", READ.test("randread 4k 8 MB"), None, spdk(READ.test("randread 4k 8 MB"), 2.7)),
    goal("memory, 8 MB, random write, depth 128: 2.7 times SPDK", READ.test("randwrite 4k 8 MB"), None, spdk(READ.test("randwrite 4k 8 MB"), 2.7)),
    goal("memory, 128 KiB reads, depth 32: 1.15 times SPDK", READ.test("randread 128k").at(32), None, spdk(READ.test("randread 128k").at(32), 1.15)),
    goal("memory, 128 KiB writes, depth 32: 1.35 times SPDK", READ.test("randwrite 128k").at(32), None, spdk(READ.test("randwrite 128k").at(32), 1.35)),
    goal("memory, 128 KiB reads, depth 255: no less than 0.9 of depth 32", READ.test("randread 128k").at(255), None, Rule::Times(READ.test("randread 128k").at(32), 0.9)),
    goal("memory, 128 KiB writes, depth 255: no less than 0.9 of depth 32", READ.test("randwrite 128k").at(255), None, Rule::Times(READ.test("randwrite 128k").at(32), 0.9)),
    goal("file on tmpfs, random read, depth 1: 0.95 of fio", FILE, None, fio(FILE)),
    goal("file on tmpfs, random read, depth 32: 0.95 of fio", FILE.at(32), None, fio(FILE.at(32))),
    goal("file on tmpfs, random read, depth 128: 0.95 of fio", FILE.at(128), None, fio(FILE.at(128))),
    goal("file on tmpfs, random read, depth 128: 3 times SPDK's aio", FILE.at(128), None, spdk(FILE.at(128), 3.0)),
    goal("file on disk, random read, depth 1: 0.95 of fio", FILE.test("randread 4k on disk"), None, fio(FILE.test("randread 4k on disk"))),
    goal("file on disk, random read, depth 32: 0.95 of fio", FILE.test("randread 4k on disk").at(32), None, fio(FILE.test("randread 4k on disk").at(32))),
    goal("file on disk, random read, depth 128: 0.95 of fio", FILE.test("randread 4k on disk").at(128), None, fio(FILE.test("randread 4k on disk").at(128))),
    goal("virtio, depth 1: 1.5 times SPDK", VIRTIO, NEAR, spdk(VIRTIO, 1.5)),
    goal("virtio, depth 32: 1.5 times SPDK", VIRTIO.at(32), NEAR, spdk(VIRTIO.at(32), 1.5)),
    goal("virtio, depth 128: 1.5 times SPDK", VIRTIO.at(128), NEAR, spdk(VIRTIO.at(128), 1.5)),
    goal("virtio, depth 1: 2 times SPDK", VIRTIO, FAR, spdk(VIRTIO, 2.0)),
    goal("virtio, depth 32: 2 times SPDK", VIRTIO.at(32), FAR, spdk(VIRTIO.at(32), 2.0)),
    goal("virtio, depth 128: 2 times SPDK", VIRTIO.at(128), FAR, spdk(VIRTIO.at(128), 2.0)),
    goal("virtio, depth 32: 6 times QEMU's storage daemon", VIRTIO.at(32), None, qsd(VIRTIO.at(32), 6.0)),
    goal("virtio, depth 32, headers that stay: 1.5 times SPDK", STAYS.at(32), NEAR, spdk(STAYS.at(32), 1.5)),
    goal("virtio, depth 32, headers that stay: 2 times SPDK", STAYS.at(32), FAR, spdk(STAYS.at(32), 2.0)),
    goal("virtio, depth 128, headers that stay: 1.5 times SPDK", STAYS.at(128), NEAR, spdk(STAYS.at(128), 1.5)),
    goal("virtio, depth 128, headers that stay: 2 times SPDK", STAYS.at(128), FAR, spdk(STAYS.at(128), 2.0)),
    goal("virtio, depth 32, headers that stay: 6 times QEMU's storage daemon", STAYS.at(32), None, qsd(STAYS.at(32), 6.0)),
    faster("FastPath, tmpfs, reads at depth 1: 5 times io_uring", 1, "fio io_uring"),
    faster("FastPath, tmpfs, reads at depth 4: 5 times io_uring", 4, "fio io_uring"),
    faster("FastPath, tmpfs, reads at depth 16: 5 times io_uring", 16, "fio io_uring"),
    faster("FastPath, tmpfs, reads at depth 32: 5 times io_uring", 32, "fio io_uring"),
    faster("FastPath, tmpfs, reads at depth 64: 5 times io_uring", 64, "fio io_uring"),
    faster("FastPath, tmpfs, reads at depth 128: 5 times io_uring", 128, "fio io_uring"),
    faster("FastPath, tmpfs, reads at depth 1: 5 times psync", 1, "fio psync"),
    faster("FastPath, tmpfs, reads at depth 32: 5 times libaio", 32, "fio libaio"),
    faster("FastPath, tmpfs, reads at depth 128: 5 times libaio", 128, "fio libaio"),
    sooner("FastPath, tmpfs, reads at depth 1: 71 % less latency than io_uring", 1, "fio io_uring"),
    sooner("FastPath, tmpfs, reads at depth 4: 71 % less latency than io_uring", 4, "fio io_uring"),
    sooner("FastPath, tmpfs, reads at depth 16: 71 % less latency than io_uring", 16, "fio io_uring"),
    sooner("FastPath, tmpfs, reads at depth 32: 71 % less latency than io_uring", 32, "fio io_uring"),
    sooner("FastPath, tmpfs, reads at depth 64: 71 % less latency than io_uring", 64, "fio io_uring"),
    sooner("FastPath, tmpfs, reads at depth 128: 71 % less latency than io_uring", 128, "fio io_uring"),
    sooner("FastPath, tmpfs, reads at depth 1: 71 % less latency than psync", 1, "fio psync"),
    sooner("FastPath, tmpfs, reads at depth 32: 71 % less latency than libaio", 32, "fio libaio"),
    sooner("FastPath, tmpfs, reads at depth 128: 71 % less latency than libaio", 128, "fio libaio"),
    goal("64 busy devices: 0.85 of one device", MANY, None, Rule::Times(MANY.test("randread 4k on 1 device"), 0.85)),
    goal("64 busy devices: 3 times SPDK", MANY, None, spdk(MANY, 3.0)),
    goal("64 busy devices: within 5 % of each other", Cell { metric: "spread", ..MANY }, None, Rule::AtMost(0.05)),
    goal("1,000 idle devices, shared doorbells: under 5 % of a core", cell("idle", "1000 idle devices, doorbells shared", 0, "idle", "cpu"), None, Rule::AtMost(0.05)),
    goal("1,000 idle devices, doorbells as messages: under 5 % of a core", cell("idle", "1000 idle devices, doorbells messages", 0, "idle", "cpu"), None, Rule::AtMost(0.05)),
    goal("depth 32 beside 999 idle devices: 0.95 of alone", cell("idle", "randread 4k", 32, "lean", "iops").by("beside 999 idle"), None, Rule::Times(cell("idle", "randread 4k", 32, "lean", "iops").by("alone"), 0.95)),
    goal("depth 128 beside 999 idle devices: 0.95 of alone", cell("idle", "randread 4k", 128, "lean", "iops").by("beside 999 idle"), None, Rule::Times(cell("idle", "randread 4k", 128, "lean", "iops").by("alone"), 0.95)),
    goal("memory held without devices: 32 MB", HELD, None, Rule::AtMost(32e6)),
    goal(
        "memory held for each connected device: 64 KB",
        Cell { metric: "rss", ..HELD.test("each connected device") },
        None,
        Rule::AtMost(64e3),
    ),
    goal("two shards: 1.9 times one", cell("shards", "randread 4k on 2 shards", 128, "lean", "iops"), None, Rule::Times(cell("shards", "randread 4k on 1 shards", 128, "lean", "iops"), 1.9)),
    goal("p99.9 at depth 1: no worse than SPDK's", TAIL, None, Rule::Within(TAIL.by("spdk"), 1.0)),
    goal("p99.9 at half load: no worse than SPDK's", TAIL.test("randread 4k null, half load").at(128), None, Rule::Within(TAIL.test("randread 4k null, half load").at(128).by("spdk"), 1.0)),
    goal("adaptive polling, null at 5 K/s: median within 10 % of polling", POLL, None, Rule::Within(POLL.by("spin"), 1.1)),
    goal("adaptive polling, null at 5 K/s: a third of the core", CORE, None, Rule::AtMost(0.333)),
    goal("adaptive polling, null at 20 K/s: median within 10 % of polling", POLL.test(OFTEN), None, Rule::Within(POLL.test(OFTEN).by("spin"), 1.1)),
    goal("adaptive polling, null at 20 K/s: half of the core", CORE.test(OFTEN), None, Rule::AtMost(0.5)),
    goal("adaptive polling, virtio at 5 K/s: median within 10 % of polling", POLL.test(WOKEN), None, Rule::Within(POLL.test(WOKEN).by("spin"), 1.1)),
    goal("adaptive polling, virtio at 5 K/s: a third of the core", CORE.test(WOKEN), None, Rule::AtMost(0.333)),
    goal("adaptive polling, file at 5 K/s: median within 10 % of polling", POLL.test(DISK), None, Rule::Within(POLL.test(DISK).by("spin"), 1.1)),
    goal("adaptive polling, file at 5 K/s: a third of the core", CORE.test(DISK), None, Rule::AtMost(0.333)),
    goal("adaptive polling, file, one after the other: median within 10 %", POLL.test(IN_TURN).at(1), None, Rule::Within(POLL.test(IN_TURN).at(1).by("spin"), 1.1)),
    goal("adaptive polling, file, one after the other: half of the core", CORE.test(IN_TURN).at(1), None, Rule::AtMost(0.5)),
    goal("concat over null: at most 8 ns a hop", HOP.test("randread 4k null, concat"), None, Rule::Above(HOP, 8.0)),
    goal("stripe over null: at most 8 ns a hop", HOP.test("randread 4k null, stripe"), None, Rule::Above(HOP, 8.0)),
    goal("throttle over null: at most 3 ns", HOP.test("randread 4k null, throttle"), None, Rule::Above(HOP, 3.0)),
    goal("meter over null: at most 3 ns", HOP.test("randread 4k null, meter"), None, Rule::Above(HOP, 3.0)),
    goal("share over memory, reads: at most 8 ns a hop", OVER.test("randread 4k memory, share"), None, Rule::Above(OVER, 8.0)),
    goal("share over memory, writes: at most 8 ns a hop", WRITTEN.test("randwrite 4k memory, share"), None, Rule::Above(WRITTEN, 8.0)),
    goal("share over memory, reads: no slower than SPDK's thin volume", OVER.test("randread 4k memory, share"), None, spdk(OVER.test("randread 4k memory, share"), 1.0)),
    goal("share over memory, writes: no slower than SPDK's thin volume", WRITTEN.test("randwrite 4k memory, share"), None, spdk(WRITTEN.test("randwrite 4k memory, share"), 1.0)),
    goal("mirror of two, writes: 2.5 times SPDK", WRITTEN.test("randwrite 4k memory, mirror"), None, spdk(WRITTEN.test("randwrite 4k memory, mirror"), 2.5)),
    goal("crypt, reads: 175 ns above the bare volume", OVER.test("randread 4k memory, crypt"), None, Rule::Above(OVER, 175.0)),
    goal("crypt, writes: 175 ns above the bare volume", WRITTEN.test("randwrite 4k memory, crypt"), None, Rule::Above(WRITTEN, 175.0)),
    goal("crypt, reads: 2 times SPDK", OVER.test("randread 4k memory, crypt"), None, spdk(OVER.test("randread 4k memory, crypt"), 2.0)),
    goal("crypt, writes: 2 times SPDK", WRITTEN.test("randwrite 4k memory, crypt"), None, spdk(WRITTEN.test("randwrite 4k memory, crypt"), 2.0)),
    goal("crypt of 4 KiB blocks, reads: 175 ns above the bare volume", OVER.test("randread 4k memory of 4 KiB blocks, crypt"), None, Rule::Above(OVER.test("randread 4k memory of 4 KiB blocks"), 175.0)),
    goal("crypt of 4 KiB blocks, writes: 175 ns above the bare volume", WRITTEN.test("randwrite 4k memory of 4 KiB blocks, crypt"), None, Rule::Above(WRITTEN.test("randwrite 4k memory of 4 KiB blocks"), 175.0)),
    goal("crypt of 4 KiB blocks, reads: 2 times SPDK", OVER.test("randread 4k memory of 4 KiB blocks, crypt"), None, spdk(OVER.test("randread 4k memory of 4 KiB blocks, crypt"), 2.0)),
    goal("crypt of 4 KiB blocks, writes: 2 times SPDK", WRITTEN.test("randwrite 4k memory of 4 KiB blocks, crypt"), None, spdk(WRITTEN.test("randwrite 4k memory of 4 KiB blocks, crypt"), 2.0)),
    goal("parity, full stripes of 8 KiB: 2.5 times SPDK", OVER.test("randwrite 8k memory, parity"), None, spdk(OVER.test("randwrite 8k memory, parity"), 2.5)),
    goal("parity, writes of 4 KiB: half the rate of their copies alone", SMALL, None, Rule::Times(SMALL.by("copies"), 0.5)),
    goal("interrupts per I/O, depth 32: at most half of depth 1's", INTERRUPTS, None, Rule::Within(INTERRUPTS.at(1), 0.5)),
    goal("interrupts per I/O, depth 128: at most depth 32's", INTERRUPTS.at(128), None, Rule::Within(INTERRUPTS, 1.0)),
    unmoved("p99 beside loops on another core, depth 1: moves by < 10 %", 1, "beside loops"),
    unmoved("p99 beside loops on another core, depth 32: moves by < 10 %", 32, "beside loops"),
    unmoved("p99 beside floods on another core, depth 1: moves by < 10 %", 1, "beside floods"),
    unmoved("p99 beside floods on another core, depth 32: moves by < 10 %", 32, "beside floods"),
    unmoved("p99 beside shrinking memory on another core, depth 1: moves by < 10 %", 1, "beside shrinking memory"),
    unmoved("p99 beside shrinking memory on another core, depth 32: moves by < 10 %", 32, "beside shrinking memory"),
    due("share of weight 1, 16 in flight: within 2 % of what is due", DUE, 2.0),
    due("share of weight 1, 64 in flight: within 2 % of what is due", DUE.at(64), 2.0),
    due("share of weight 2, 32 in flight: within 2 % of what is due", DUE.test("share, weight 2").at(32), 2.0),
    goal("guarantee of 1,200 a second beside ten times its weight: 99 % over 10 s", Cell { metric: "iops", ..DUE.test("guarantee of 1200 a second").at(64) }, None, Rule::AtLeast(1188.0)),
    goal("latency target of 2 ms beside a busy volume: half of p99 without", PROMPT, None, Rule::Within(PROMPT.by("no target"), 0.5)),
    due("cap of 1,000 a second: within 1 % over 10 s", DUE.test("cap of 1000 a second").at(32), 1.0),
    due("cap of 20,000 a second: within 1 % over 10 s", DUE.test("cap of 20000 a second").at(32), 1.0),
    due("cap of 100,000 a second: within 1 % over 10 s", DUE.test("cap of 100000 a second").at(32), 1.0),
    capped("cap of 1,000 a second: one bucket above it at any time", "cap of 1000 a second, with rests"),
    capped("cap of 20,000 a second: one bucket above it at any time", "cap of 20000 a second, with rests"),
    capped("cap of 100,000 a second: one bucket above it at any time", "cap of 100000 a second, with rests"),
    goal("pause, a throttle over memory, under writes: 10 ms", PAUSE, None, SHORT),
    goal("pause, the same beside 63 devices: 10 ms", PAUSE.test("randwrite 4k memory, 64 devices"), None, SHORT),
    brief("pause, a throttle over a file at rest: 10 ms", "randwrite 4k file"),
    brief("pause, a throttle over authenticated crypt at rest: 10 ms", "randwrite 4k file, authenticated"),
    brief("pause, a cache put in, files at rest: 10 ms", "randwrite 4k file, a cache put in"),
    brief("pause, a leg of parity replaced, files at rest: 10 ms", "randwrite 4k file, a leg of parity replaced"),
    brief("pause, a leg of a mirror replaced, files at rest: 10 ms", "randwrite 4k file, a leg of a mirror replaced"),
    brief("pause, a leg of a mirror put in, files at rest: 10 ms", "randwrite 4k file, a leg of a mirror put in"),
    goal("pause, a volume that moves, files at rest: 10 ms", PAUSE.test("randwrite 4k file, moved to another file").by("moved at rest"), None, SHORT),
];

/// What the records say about the goals: those about which they say anything.
pub(crate) fn outcomes(records: &[Record]) -> Vec<Outcome> {
    let states = [State::Near, State::Far, State::Any];
    let each = GOALS.iter().flat_map(|goal| states.map(|state| (goal, state)));
    each.filter(|(goal, state)| goal.state.is_none_or(|wanted| wanted == *state))
        .filter_map(|(goal, state)| goal.outcome(records, state))
        .collect()
}

impl Goal {
    fn outcome(&self, records: &[Record], state: State) -> Option<Outcome> {
        let ours = self.cell.summary(records, state)?;
        let (value, mut samples) = (ours.median, ours.samples);
        let mut beside = |other: Cell| {
            let other = other.summary(records, state)?;
            samples = samples.min(other.samples);
            Some(other)
        };
        let (found, wanted, reached) = match self.rule {
            Rule::Times(other, least) => {
                let ratio = value / beside(other)?.median;
                (format!("×{ratio:.2}"), format!("≥ ×{least}"), Some(ratio >= least))
            }
            Rule::Within(other, most) => {
                let ratio = value / beside(other)?.median;
                (format!("×{ratio:.2}"), format!("≤ ×{most}"), Some(ratio <= most))
            }
            Rule::AtMost(most) => (number(value), format!("≤ {}", number(most)), Some(value <= most)),
            Rule::AtLeast(least) => (number(value), format!("≥ {}", number(least)), Some(value >= least)),
            Rule::Lasts(most) => (format!("{:.1} ms", value / 1e6), format!("≤ {most} ms"), Some(value <= most * 1e6)),
            Rule::Above(other, most) => {
                let other = beside(other)?;
                let (more, spread) = more_ns(&ours, &other);
                let reached = ((more - most).abs() >= spread).then_some(more <= most);
                (format!("{more:+.1} ± {spread:.1} ns"), format!("≤ {most:+} ns"), reached)
            }
        };
        let verdict = match reached {
            _ if samples < ENOUGH => Verdict::Open(samples),
            Some(true) => Verdict::Reached,
            Some(false) => Verdict::Missed,
            None => Verdict::Unclear,
        };
        Some(Outcome { text: self.text, state, found, wanted, verdict })
    }
}

/// How many nanoseconds an operation takes more than another one, of their rates, and how far off that may well be.
fn more_ns(rate: &Summary, other: &Summary) -> (f64, f64) {
    let time = |rate: &Summary| 1e9 / rate.median;
    // Small errors: a time is off by the same part as its rate.
    let error = |rate: &Summary| time(rate) * rate.error() / rate.median;
    (time(rate) - time(other), SURE * error(rate).hypot(error(other)))
}

/// The outcomes as a table.
pub(crate) fn text(records: &[Record]) -> String {
    let mut out = String::from("\nwhat is to be reached\n");
    for Outcome { text, state, found, wanted, verdict } in outcomes(records) {
        let _ = writeln!(out, "{text:<66} {state:<5} {found:>16}  {wanted:<10} {verdict}");
    }
    out
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{
        record::{Key, Sample},
        sections,
    };

    #[test]
    fn goals_are_of_sections_that_there_are_and_each_is_there_once() {
        for goal in GOALS {
            let section = goal.cell.section;
            assert!(sections::ALL.iter().any(|known| known.name == section), "{}: no section {section}", goal.text);
            let same = GOALS.iter().filter(|other| other.text == goal.text && other.state == goal.state).count();
            assert_eq!(same, 1, "{}", goal.text);
        }
    }

    #[test]
    fn goals_are_judged_by_medians_within_one_state() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = Record::open(dir.path(), "null", "m", &BTreeMap::new(), true);
        let mut add = |subject: &str, state, iops: f64, samples| {
            let key = Key { test: "randread 4k".into(), depth: 128, client: "lean".into(), subject: subject.into() };
            for _ in 0..samples {
                record.add(&key, state, Sample::from([("iops".to_owned(), iops)]));
            }
        };
        add("ours", State::Near, 35e6, 5);
        add("spdk", State::Near, 10e6, 5);
        add("ours", State::Far, 30e6, 7);
        add("spdk", State::Far, 10e6, 4);
        let outcomes = outcomes(&[record]);
        let said: Vec<_> = outcomes.iter().map(|o| (o.state, o.found.as_str(), o.verdict)).collect();
        let expected = [
            (State::Near, "×3.50", Verdict::Reached),
            (State::Far, "×3.00", Verdict::Open(4)),
            (State::Near, "35.0M", Verdict::Missed),
        ];
        assert_eq!(said, expected);
    }

    #[test]
    fn a_hop_is_what_it_takes_above_the_bare_volume() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = Record::open(dir.path(), "services", "m", &BTreeMap::new(), true);
        // The bare volume's name begins the others', and comes later here.
        for (test, iops) in
            [("randread 4k null, meter", 20e6), ("randread 4k null, stripe", 16e6), ("randread 4k null", 20e6)]
        {
            let key = Key { test: test.into(), depth: 32, client: "lean".into(), subject: "ours".into() };
            for _ in 0..5 {
                record.add(&key, State::Near, Sample::from([("iops".to_owned(), iops)]));
            }
        }
        let said: Vec<_> = outcomes(&[record]).into_iter().map(|o| (o.found, o.wanted, o.verdict)).collect();
        let line = |found: &str, wanted: &str, verdict| (found.to_owned(), wanted.to_owned(), verdict);
        let expected =
            [line("+12.5 ± 0.0 ns", "≤ +8 ns", Verdict::Missed), line("+0.0 ± 0.0 ns", "≤ +3 ns", Verdict::Reached)];
        assert_eq!(said, expected);
    }

    #[test]
    fn a_hop_is_judged_where_the_samples_tell() {
        // Of a bare volume at 50 ns, and one that takes 60 with samples so far from each other.
        let of = |percent: f64| {
            let dir = tempfile::tempdir().unwrap();
            let mut record = Record::open(dir.path(), "services", "m", &BTreeMap::new(), true);
            for (test, ns) in [("randread 4k null", 50.0), ("randread 4k null, concat", 60.0)] {
                let key = Key { test: test.into(), depth: 32, client: "lean".into(), subject: "ours".into() };
                for step in [-2.0, -1.0, 0.0, 1.0, 2.0] {
                    let iops = 1e9 / ns * (1.0 + step * percent / 100.0);
                    record.add(&key, State::Near, Sample::from([("iops".to_owned(), iops)]));
                }
            }
            let Outcome { found, verdict, .. } = outcomes(&[record]).remove(0);
            (found, verdict)
        };
        assert_eq!(of(1.0), ("+10.0 ± 1.3 ns".to_owned(), Verdict::Missed));
        assert_eq!(of(3.0), ("+10.0 ± 3.9 ns".to_owned(), Verdict::Unclear));
        assert_eq!(Verdict::Unclear.to_string(), "open: within the spread");
    }

    #[test]
    fn shares_caps_and_pauses_are_judged_by_themselves() {
        let dir = tempfile::tempdir().unwrap();
        let open = |section| Record::open(dir.path(), section, "m", &BTreeMap::new(), true);
        let key = |test: &str, depth, client: &str, subject: &str| Key {
            test: test.into(),
            depth,
            client: client.into(),
            subject: subject.into(),
        };
        let (mut qos, mut pauses) = (open("qos"), open("pauses"));
        for _ in 0..5 {
            let mut add = |key: Key, metric: &str, value| {
                qos.add(&key, State::Any, Sample::from([(metric.to_owned(), value)]));
            };
            add(key("share, weight 1", 64, "lean", "ours"), "off", 2.5);
            add(key("cap of 20000 a second", 32, "lean", "ours"), "off", 0.5);
            add(key("cap of 20000 a second, with rests", 32, "driver", "ours"), "above", 0.75);
            for (subject, pause) in [("changed", 80e6), ("changed at rest", 4.26e6)] {
                let key = key("randwrite 4k file", 32, "lean", subject);
                pauses.add(&key, State::Any, Sample::from([("pause".to_owned(), pause)]));
            }
            let moved = key("randwrite 4k file, moved to another file", 32, "lean", "moved at rest");
            pauses.add(&moved, State::Any, Sample::from([("pause".to_owned(), 12e6)]));
        }
        let said: Vec<_> = outcomes(&[qos, pauses]).into_iter().map(|o| (o.found, o.wanted, o.verdict)).collect();
        let line = |found: &str, wanted: &str, verdict| (found.to_owned(), wanted.to_owned(), verdict);
        let expected = [
            line("2.50", "≤ 2.00", Verdict::Missed),
            line("0.50", "≤ 1.00", Verdict::Reached),
            line("0.75", "≤ 1.00", Verdict::Reached),
            line("4.3 ms", "≤ 10 ms", Verdict::Reached),
            line("12.0 ms", "≤ 10 ms", Verdict::Missed),
        ];
        assert_eq!(said, expected);
    }
}
