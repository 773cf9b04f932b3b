//! A controller in the test's own process, whose faults are switched on: it keeps its registers in memory, finds its queues in what it was
//! told of memory, and answers them when their doorbells are written.

use std::{
    collections::BTreeMap,
    fs::File,
    os::{fd::BorrowedFd, unix::fs::FileExt},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use millrace_driver::{
    DmaRange, MappedArea, Transport, TransportError,
    spec::{
        AdminOpcode, Status, StatusField,
        identify::Cns,
        registers::{
            AdminQueueAttributes, Capabilities, Configuration, ControllerStatus, ShutdownNotification, ShutdownStatus,
            offset,
        },
    },
};

/// What the test and the controller tell each other.
#[derive(Default)]
pub(crate) struct Script {
    /// It reports a fatal error and does nothing more, until it is disabled or reset.
    pub(crate) fatal: AtomicBool,
    /// Whenever it is enabled, it reports a fatal error and does not become ready.
    pub(crate) broken: AtomicBool,
    /// I/O commands to come that do not end by themselves.
    pub(crate) holds: AtomicUsize,
    /// Abort commands to come that are not answered.
    pub(crate) deaf: AtomicUsize,
    /// I/O commands that did not end by themselves so far.
    pub(crate) held: AtomicUsize,
    /// Those that an Abort has ended.
    pub(crate) aborted: AtomicUsize,
    /// I/O commands that were carried out.
    pub(crate) done: AtomicUsize,
    /// Times that it was enabled.
    pub(crate) enabled: AtomicUsize,
}

/// Blocks of its only namespace, of 512 bytes.
const BLOCKS: u64 = 2048;

/// A submission queue and the completion queue with its number, of as many entries.
struct Queue {
    submissions: u64,
    completions: u64,
    entries: u16,
    head: u16,
    tail: u16,
    phase: bool,
    /// Commands that do not end by themselves.
    held: Vec<u16>,
}

impl Queue {
    fn new(submissions: u64, completions: u64, entries: u16) -> Self {
        Self { submissions, completions, entries, head: 0, tail: 0, phase: true, held: Vec::new() }
    }
}

/// What counts of a command.
struct Entry {
    opcode: u8,
    cid: u16,
    prp1: u64,
    cdw10: u32,
}

pub(crate) struct Scripted {
    script: Arc<Script>,
    /// What it was told of memory, and where that starts.
    memory: Option<(File, u64)>,
    cc: Configuration,
    aqa: AdminQueueAttributes,
    asq: u64,
    acq: u64,
    queues: BTreeMap<u16, Queue>,
}

/// Takes one of what is left, if anything is.
fn take(left: &AtomicUsize) -> bool {
    let now = left.load(Ordering::Relaxed);
    left.store(now.saturating_sub(1), Ordering::Relaxed);
    now > 0
}

fn count(counter: &AtomicUsize) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Scripted {
    pub(crate) fn new(script: &Arc<Script>) -> Self {
        Self {
            script: Arc::clone(script),
            memory: None,
            cc: Configuration::new(),
            aqa: AdminQueueAttributes::new(),
            asq: 0,
            acq: 0,
            queues: BTreeMap::new(),
        }
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        let (memory, start) = self.memory.as_ref().expect("memory that it was told of");
        memory.write_all_at(bytes, address - start).expect("an address within it");
    }

    fn entry(&self, address: u64) -> Entry {
        let (memory, start) = self.memory.as_ref().expect("memory that it was told of");
        let mut bytes = [0; 64];
        memory.read_exact_at(&mut bytes, address - start).expect("an address within it");
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        Entry {
            opcode: bytes[0],
            cid: u16::from_le_bytes([bytes[2], bytes[3]]),
            prp1: u64::from(word(24)) | u64::from(word(28)) << 32,
            cdw10: word(40),
        }
    }

    fn status(&self) -> ControllerStatus {
        let broken = self.cc.en() && self.script.broken.load(Ordering::Relaxed);
        let fatal = broken || self.script.fatal.load(Ordering::Relaxed);
        let shut = self.cc.shn() != ShutdownNotification::NONE;
        let shst = if shut { ShutdownStatus::COMPLETE } else { ShutdownStatus::NORMAL };
        ControllerStatus::new().with_rdy(self.cc.en() && !broken).with_cfs(fatal).with_shst(shst)
    }

    fn configure(&mut self, cc: Configuration) {
        if cc.en() && !self.cc.en() {
            count(&self.script.enabled);
            self.queues.insert(0, Queue::new(self.asq, self.acq, self.aqa.asqs_z() + 1));
        }
        if !cc.en() {
            self.stop();
        }
        self.cc = cc;
    }

    fn stop(&mut self) {
        self.cc = Configuration::new();
        self.queues.clear();
        self.script.fatal.store(false, Ordering::Relaxed);
    }

    /// Takes the commands of a queue before its new tail.
    fn take_commands(&mut self, qid: u16, tail: u16) {
        while !self.status().cfs() {
            let Some(queue) = self.queues.get_mut(&qid).filter(|queue| queue.head != tail) else { return };
            let address = queue.submissions + u64::from(queue.head) * 64;
            queue.head = (queue.head + 1) % queue.entries;
            let entry = self.entry(address);
            if qid == 0 {
                self.run_admin(&entry);
            } else if take(&self.script.holds) {
                count(&self.script.held);
                self.queues.get_mut(&qid).expect("it was just there").held.push(entry.cid);
            } else {
                count(&self.script.done);
                self.complete(qid, entry.cid, Status::SUCCESS, 0);
            }
        }
    }

    fn run_admin(&mut self, entry: &Entry) {
        let (low, high) = (entry.cdw10 as u16, (entry.cdw10 >> 16) as u16);
        let (mut status, mut dw0) = (Status::SUCCESS, 0);
        match AdminOpcode(entry.opcode) {
            AdminOpcode::IDENTIFY => self.write(entry.prp1, &identify(Cns(low as u8))),
            // One I/O queue pair, whatever was asked for.
            AdminOpcode::SET_FEATURES => {}
            AdminOpcode::CREATE_IO_CQ => _ = self.queues.insert(low, Queue::new(0, entry.prp1, high + 1)),
            AdminOpcode::CREATE_IO_SQ => self.queues.get_mut(&low).expect("its completion queue").submissions = entry.prp1,
            AdminOpcode::ABORT if take(&self.script.deaf) => return,
            AdminOpcode::ABORT => dw0 = u32::from(!self.abort(low, high)),
            _ => status = Status::INVALID_OPCODE,
        }
        self.complete(0, entry.cid, status, dw0);
    }

    /// Ends a command that does not end by itself; false: there is none.
    fn abort(&mut self, qid: u16, cid: u16) -> bool {
        let Some(queue) = self.queues.get_mut(&qid) else { return false };
        let Some(at) = queue.held.iter().position(|held| *held == cid) else { return false };
        queue.held.swap_remove(at);
        count(&self.script.aborted);
        self.complete(qid, cid, Status::ABORT_REQUESTED, 0);
        true
    }

    fn complete(&mut self, qid: u16, cid: u16, status: Status, dw0: u32) {
        let queue = self.queues.get_mut(&qid).expect("a queue that there is");
        let address = queue.completions + u64::from(queue.tail) * 16;
        let mut cqe = [0; 16];
        cqe[..4].copy_from_slice(&dw0.to_le_bytes());
        cqe[8..10].copy_from_slice(&queue.head.to_le_bytes());
        cqe[10..12].copy_from_slice(&qid.to_le_bytes());
        cqe[12..14].copy_from_slice(&cid.to_le_bytes());
        cqe[14..].copy_from_slice(&StatusField::new(status, queue.phase).0.to_le_bytes());
        queue.tail = (queue.tail + 1) % queue.entries;
        queue.phase ^= queue.tail == 0;
        // The byte with the Phase Tag comes last: the driver may look at any moment.
        self.write(address, &cqe[..14]);
        self.write(address + 15, &cqe[15..]);
        self.write(address + 14, &cqe[14..15]);
    }
}

/// Zeroes, but for what a controller with one namespace says.
fn identify(cns: Cns) -> [u8; 4096] {
    let mut data = [0; 4096];
    match cns {
        // NN.
        Cns::CONTROLLER => data[516] = 1,
        // NSZE, and LBADS of the first format.
        Cns::NAMESPACE => {
            data[..8].copy_from_slice(&BLOCKS.to_le_bytes());
            data[130] = 9;
        }
        _ => {}
    }
    data
}

impl Transport for Scripted {
    fn region_read(&mut self, region: u32, at: u64, buf: &mut [u8]) -> Result<(), TransportError> {
        let value: u64 = match at {
            _ if region != 0 => 0,
            offset::CAP => Capabilities::new().with_mqes_z(127).with_to(20).with_css_nvm(true).into_bits(),
            offset::CC => self.cc.into_bits().into(),
            offset::CSTS => self.status().into_bits().into(),
            _ => 0,
        };
        buf.copy_from_slice(&value.to_le_bytes()[..buf.len()]);
        Ok(())
    }

    fn region_write(&mut self, region: u32, at: u64, data: &[u8]) -> Result<(), TransportError> {
        let mut bytes = [0; 8];
        bytes[..data.len()].copy_from_slice(data);
        let value = u64::from_le_bytes(bytes);
        match at {
            _ if region != 0 => {}
            offset::CC => self.configure(Configuration::from_bits(value as u32)),
            offset::AQA => self.aqa = AdminQueueAttributes::from_bits(value as u32),
            offset::ASQ => self.asq = value,
            offset::ACQ => self.acq = value,
            _ => {}
        }
        Ok(())
    }

    fn region_write_posted(&mut self, _: u32, at: u64, data: &[u8]) -> Result<(), TransportError> {
        // Every other doorbell is a completion queue's head. These are never full.
        let (place, tail) = (at - offset::DOORBELLS, u16::from_le_bytes([data[0], data[1]]));
        if place.is_multiple_of(8) {
            self.take_commands((place / 8) as u16, tail);
        }
        Ok(())
    }

    fn map_region(&mut self, _: u32) -> Result<Vec<MappedArea>, TransportError> {
        Ok(Vec::new())
    }

    fn dma_map(&mut self, range: DmaRange, fd: BorrowedFd<'_>, _: u64) -> Result<(), TransportError> {
        self.memory = Some((fd.try_clone_to_owned().expect("a descriptor more").into(), range.iova));
        Ok(())
    }

    fn dma_unmap(&mut self, _: DmaRange) -> Result<(), TransportError> {
        Ok(())
    }

    fn vectors(&mut self) -> Result<u32, TransportError> {
        Ok(0)
    }

    fn set_vectors(&mut self, _: &[BorrowedFd<'_>]) -> Result<(), TransportError> {
        Ok(())
    }

    fn disable_vectors(&mut self) -> Result<(), TransportError> {
        Ok(())
    }

    fn reset(&mut self) -> Result<(), TransportError> {
        self.stop();
        Ok(())
    }

    fn check(&mut self) -> Result<(), TransportError> {
        Ok(())
    }
}
