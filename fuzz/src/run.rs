//! Runs sequences, and cuts those that fail down to what is needed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, Once},
};

use millrace_block::{BlockSize, conformance::Random};
use millrace_frontends::nvme::{Config, DoorbellMode, NamespaceQuota};

use crate::{
    choices::{Choices, OP_BYTES, Op},
    contents::Contents,
    guest::{Guest, note},
    memory::Memory,
    queues::{QUEUES, Reset},
    world::World,
};

/// A first record for the setup, and operations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// What the device and its disks are like.
    pub setup: Op,
    /// What the guest does.
    pub ops: Vec<Op>,
}

impl Sequence {
    /// `len` operations from a seed.
    pub fn from_seed(seed: u64, len: usize) -> Self {
        Self::from_bytes(&Random::new(seed).bytes((len + 1) * OP_BYTES))
    }

    /// Operations from bytes; what is left over at the end is ignored.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let (records, _) = bytes.as_chunks::<OP_BYTES>();
        let mut ops = records.iter().copied().map(Op);
        Self { setup: ops.next().unwrap_or(Op([0; OP_BYTES])), ops: ops.collect() }
    }
}

/// Operations of a sequence made from a seed.
pub const OPERATIONS: usize = 300;

/// What went wrong.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The panic's message and place.
    pub message: String,
    /// What was done, if it was written down.
    pub trace: Vec<String>,
}

/// Kinds of operations and how often they come, of 256.
type Kind = (u64, &'static str, fn(&mut Guest, &mut Choices));

#[rustfmt::skip]
const KINDS: [Kind; 41] = [
    (28, "read", Guest::read),
    (28, "write", Guest::write),
    (10, "compare", Guest::compare),
    (10, "compare and write", Guest::compare_and_write),
    (6, "verify", Guest::verify),
    (6, "flush", Guest::flush),
    (8, "write zeroes", Guest::write_zeroes),
    (4, "write uncorrectable", Guest::write_uncorrectable),
    (7, "deallocate", Guest::deallocate),
    (8, "copy", Guest::copy),
    (28, "ring", |guest, _| guest.ring_all()),
    (22, "turns", |guest, choices| { let turns = choices.below(24); guest.turns(turns); }),
    (16, "poll", |guest, choices| guest.poll_one(choices)),
    (3, "settle", |guest, _| guest.settle()),
    (6, "create queues", |guest, choices| { let qid = 1 + choices.below(u64::from(QUEUES)) as u16; guest.create_pair(choices, qid); }),
    (2, "delete submission queue", |guest, choices| guest.delete_one(choices, true)),
    (2, "delete completion queue", |guest, choices| guest.delete_one(choices, false)),
    (3, "identify", Guest::identify),
    (1, "identify missing", Guest::identify_missing),
    (3, "any admin command", Guest::any_admin),
    (2, "bad queue", Guest::bad_queue),
    (2, "event request", |guest, _| guest.event_request()),
    (2, "abort", Guest::abort),
    (3, "copies across", |guest, _| guest.enable_copies_across()),
    (1, "shadow doorbells", |guest, _| guest.shadow_doorbells()),
    (2, "manage namespaces", Guest::manage_namespaces),
    (1, "format", Guest::format),
    (2, "operator: attach or detach", Guest::attach_or_detach_by_operator),
    (2, "operator: resize", Guest::resize),
    (5, "operator: change a disk", Guest::change_disk),
    (7, "bad command", Guest::bad_command),
    (5, "bad prps", Guest::bad_prps),
    (5, "bad sgl", Guest::bad_sgl),
    (1, "lonely half", Guest::lonely_half),
    (2, "same identifier", Guest::same_identifier),
    (3, "bad doorbell", Guest::bad_doorbell),
    (2, "registers", Guest::harmless_registers),
    (2, "interrupts", Guest::set_irqs),
    (2, "refused request", Guest::refused_request),
    (2, "unmap or map", Guest::unmap),
    (2, "worse", Guest::worse),
];

impl Guest {
    fn ring_all(&mut self) {
        self.sqs.keys().copied().collect::<Vec<_>>().into_iter().for_each(|sqid| self.ring(sqid));
    }

    fn poll_one(&mut self, choices: &mut Choices) {
        let cqids: Vec<u16> = self.cqs.keys().copied().collect();
        if !cqids.is_empty() {
            let (cqid, most) = (*choices.pick(&cqids), 1 + choices.below(40) as u32);
            self.poll(cqid, most);
        }
    }

    fn delete_one(&mut self, choices: &mut Choices, submission: bool) {
        let ids: Vec<u16> = if submission { self.sqs.keys().copied().collect() } else { self.cqs.keys().copied().collect() };
        let ids: Vec<u16> = ids.into_iter().filter(|&id| id != 0).collect();
        match ids.as_slice() {
            [] => {}
            ids if submission => self.delete_sq(*choices.pick(ids)),
            ids => self.delete_cq(*choices.pick(ids)),
        }
    }

    /// What ends with a reset, most of the time.
    fn worse(&mut self, choices: &mut Choices) {
        match choices.below(12) {
            0 | 1 => self.any_reset(choices),
            2 | 3 => self.register_chaos(choices),
            4 => self.shut_down(choices),
            5 => self.unmap_queues(choices),
            6 => self.truncate(choices),
            7 => self.garbage(choices),
            8 => self.half_message(choices),
            9 => self.flood(choices),
            10 => self.second_client(),
            _ => self.recover(Reset::Reconnect),
        }
    }

    fn new(setup: Op) -> Self {
        let mut choices = Choices::new(setup);
        let config = Config {
            queues: 8,
            vectors: 9,
            namespaces: 16,
            queue_entries: 256,
            mdts: 1 + choices.below(5) as u8,
            doorbells: if choices.one_in(2) { DoorbellMode::Messages } else { DoorbellMode::Shared },
            quota: NamespaceQuota { bytes: if choices.one_in(2) { 1 << 20 } else { 0 } },
            ..Config::new("fuzz")
        };
        let tasks = *choices.pick(&[64, 64, 8, 1]);
        let mut guest = Self {
            world: World::new(config.clone(), tasks),
            config,
            wire: None,
            doorbells: None,
            memory: Memory::new(),
            contents: Contents::default(),
            disks: Vec::new(),
            namespaces: BTreeMap::new(),
            sqs: BTreeMap::new(),
            cqs: BTreeMap::new(),
            clock: 0,
            lost: None,
            shadow: false,
            wired: BTreeMap::new(),
            masked: BTreeSet::new(),
            copies_across: false,
            completions: 0,
            last_admin: None,
            trace: None,
        };
        for _ in 0..2 + choices.below(2) {
            let block_size = if choices.one_in(2) { BlockSize::B512 } else { BlockSize::B4096 };
            let disk = guest.add_disk(16 + choices.below(500), block_size);
            guest.attach_disk(disk, false);
            guest.disks[disk].disk.set_lag(choices.below(3) * 4);
        }
        guest
    }

    fn perform(&mut self, op: Op) {
        let mut choices = Choices::new(op);
        let mut at = u64::from(choices.byte());
        for (weight, name, perform) in KINDS {
            if at < weight {
                note!(self, "{name}");
                if !self.is_ready() {
                    self.recover(*choices.pick(&Reset::ALL));
                }
                return perform(self, &mut choices);
            }
            at -= weight;
        }
    }

    /// Reads every block of every disk.
    fn finish(&mut self) {
        note!(self, "the end: every block is read");
        self.heal();
        if self.is_ready() {
            self.settle();
        }
        self.recover(Reset::Disable);
        let away: Vec<usize> =
            (0..self.disks.len()).filter(|&disk| self.namespaces.values().all(|view| view.disk != disk)).collect();
        // Namespaces that the guest deleted are gone for good.
        for disk in away {
            self.attach_disk(disk, true);
        }
        let mut choices = Choices::new(Op([7; OP_BYTES]));
        while self.sqs.len() < 2 {
            self.create_pair(&mut choices, 1);
        }
        for nsid in self.namespaces.keys().copied().collect::<Vec<_>>() {
            if self.namespaces[&nsid].attached {
                self.read_all(&mut choices, nsid);
            }
        }
        self.settle();
    }
}

/// Runs a sequence.
///
/// # Errors
/// What was wrong; with a trace if that was asked for.
pub fn run(sequence: &Sequence, trace: bool) -> Result<u64, Failure> {
    quiet_panics();
    let kept: Mutex<Vec<String>> = Mutex::default();
    let result = catch_unwind(AssertUnwindSafe(|| {
        let mut guest = Guest::new(sequence.setup);
        guest.trace = trace.then(Vec::new);
        let done = catch_unwind(AssertUnwindSafe(|| {
            guest.connect();
            guest.enable();
            for op in &sequence.ops {
                guest.perform(*op);
            }
            guest.finish();
        }));
        *kept.lock().expect("no panic") = guest.trace.take().unwrap_or_default();
        match done {
            Ok(()) => guest.completions,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }));
    result.map_err(|_| Failure {
        message: LAST.lock().expect("no panic").take().unwrap_or_else(|| "a panic without a message".to_owned()),
        trace: std::mem::take(&mut *kept.lock().expect("no panic")),
    })
}

/// Runs a sequence and checks that nothing is left of it.
///
/// # Errors
/// What was wrong with the run, or is left over.
pub fn check(sequence: &Sequence) -> Result<u64, Failure> {
    let before = left_over();
    let completions = run(sequence, false)?;
    // Slow unmapping is done by another thread.
    for _ in 0..10_000 {
        if left_over() == before {
            return Ok(completions);
        }
        std::thread::sleep(std::time::Duration::from_micros(20));
    }
    let message = format!("descriptors and mapped files: {before:?} before, {:?} after", left_over());
    Err(Failure { message, trace: Vec::new() })
}

/// Open descriptors, and mappings of shared memory.
fn left_over() -> (usize, usize) {
    // But for what takes the place of memory that guests take away: it comes with the first of them, and stays.
    let is_spare = |file: &std::path::Path| file.to_string_lossy().starts_with("/memfd:millrace-spare");
    let descriptors = std::fs::read_dir("/proc/self/fd").expect("this is Linux").flatten();
    let descriptors = descriptors.filter(|fd| !std::fs::read_link(fd.path()).is_ok_and(|file| is_spare(&file))).count();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("this is Linux");
    (descriptors, maps.lines().filter(|line| line.contains("/memfd:")).count())
}

/// The smallest sequence that still fails, as far as cutting finds one, and its failure.
pub fn minimise(sequence: &Sequence) -> (Sequence, Option<Failure>) {
    let fails = |ops: &[Op]| run(&Sequence { setup: sequence.setup, ops: ops.to_vec() }, false).is_err();
    let mut ops = sequence.ops.clone();
    // The shortest prefix: whatever fails went wrong before its last operation ended.
    let (mut low, mut high) = (0, ops.len());
    while low < high {
        let middle = usize::midpoint(low, high);
        if fails(&ops[..middle]) { high = middle } else { low = middle + 1 }
    }
    ops.truncate(high);
    let mut chunk = ops.len().div_ceil(2);
    while chunk > 0 {
        let mut at = 0;
        while at < ops.len() {
            let mut shorter = ops.clone();
            shorter.drain(at..(at + chunk).min(ops.len()));
            if fails(&shorter) { ops = shorter } else { at += chunk }
        }
        chunk = if chunk == 1 { 0 } else { chunk.div_ceil(2) };
    }
    let smallest = Sequence { setup: sequence.setup, ops };
    let failure = run(&smallest, true).err();
    (smallest, failure)
}

/// Runs the sequence of a seed and checks that nothing is left of it. Returns the commands that completed.
///
/// # Errors
/// What was wrong.
pub fn try_seed(seed: u64) -> Result<u64, Failure> {
    check(&Sequence::from_seed(seed, OPERATIONS))
}

/// Cuts a failing seed's sequence down and says everything about it.
pub fn report(seed: u64, failure: &Failure) -> String {
    let (smallest, again) = minimise(&Sequence::from_seed(seed, OPERATIONS));
    let mut text = format!("seed {seed} fails: {}\n", failure.message);
    match again {
        Some(again) => {
            let _ = writeln!(
                text,
                "cut down to {} operations: {}\nsetup {:?}",
                smallest.ops.len(),
                again.message,
                smallest.setup
            );
            again.trace.iter().for_each(|line| text.extend([line.as_str(), "\n"]));
            let _ = writeln!(text, "operations: {:?}", smallest.ops);
        }
        None => text.push_str("it did not fail again while it was being cut down\n"),
    }
    let _ = write!(text, "to repeat it: MILLRACE_FUZZ_SEED={seed} cargo test --release -p millrace-fuzz --test fuzz");
    text
}

static LAST: Mutex<Option<String>> = Mutex::new(None);

/// Panics are expected here: their messages are kept instead of printed.
fn quiet_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::panic::set_hook(Box::new(|info| {
            let message = format!("{info}");
            if let Ok(mut last) = LAST.lock() {
                // The first one says what was wrong; others follow from it.
                last.get_or_insert(message);
            }
        }));
    });
}
