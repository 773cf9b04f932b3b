//! A core: its registers, and a command's way through it.

use std::collections::VecDeque;

use millrace_functions::{Config, State, Verdict, chain};
use millrace_nvme_spec::{
    command::{CommandId, Cqe, QueueId, Sqe},
    status::{Status, StatusField},
};
use zerocopy::{FromBytes, IntoBytes};

use super::{
    command::{self, LIST_ENTRIES, Memory},
    disk::DiskQueue,
    interrupts::Interrupts,
    queues::Queues,
};
use crate::{
    Around, Shape,
    map::{self, Coalescing, NamespaceWord, PageRow, Place, QueueBase, QueueSizes},
};

/// What a function is.
#[derive(Clone)]
struct Function {
    configuration: [u64; map::CONFIGURATION_WORDS as usize],
    state: State,
    interrupts: Interrupts,
}

impl Function {
    fn new(pairs: u8) -> Self {
        let configuration = [0; map::CONFIGURATION_WORDS as usize];
        Self { configuration, state: State::default(), interrupts: Interrupts::new(pairs) }
    }

    fn config(&self) -> Config {
        let [namespace, blocks, share, iops, bytes, cache, copy, copied, ..] = self.configuration;
        Config { namespace, blocks, share, iops, bytes, cache, copy, copied }
    }
}

/// A command in flight.
#[derive(Clone)]
struct Slot {
    queue: usize,
    sqe: Sqe,
    /// Disks that have not answered.
    legs: u32,
    /// What the first failing one said.
    status: u16,
    list: Option<usize>,
}

/// What one step did.
#[derive(Default)]
pub(super) struct Done {
    pub(super) commands: u64,
    pub(super) worked: bool,
}

/// See the module.
pub(super) struct Core {
    number: u8,
    shape: Shape,
    queues: Queues,
    functions: Vec<Function>,
    /// The functions' tables, one behind the other.
    rows: Vec<PageRow>,
    disks: Vec<DiskQueue>,
    lists: Vec<[u64; LIST_ENTRIES]>,
    free_lists: Vec<usize>,
    slots: Vec<Option<Slot>>,
    free_slots: VecDeque<u16>,
    /// Past the storage functions, in order: slot and verdict.
    passed: VecDeque<(u16, Verdict)>,
    /// To be asked again, and when (in cycles).
    held: VecDeque<(u16, u64)>,
    taken: u64,
    completed: u64,
}

impl Core {
    pub(super) fn new(number: u8, shape: &Shape) -> Self {
        let functions = usize::from(shape.local_functions);
        Self {
            number,
            shape: *shape,
            queues: Queues::new(shape.local_functions, shape.queue_pairs),
            functions: vec![Function::new(shape.queue_pairs); functions],
            rows: vec![PageRow::new(); functions * usize::from(shape.pages)],
            disks: (0..shape.ssds).map(|_| DiskQueue::new(shape.disk_entries())).collect(),
            lists: vec![[0; LIST_ENTRIES]; shape.lists.into()],
            free_lists: (0..shape.lists.into()).rev().collect(),
            slots: vec![None; shape.slots.into()],
            free_slots: (0..shape.slots.into()).collect(),
            passed: VecDeque::new(),
            held: VecDeque::new(),
            taken: 0,
            completed: 0,
        }
    }

    // ---- registers --------------------------------------------------------------------------------------------------

    pub(super) fn write(&mut self, word: u32, value: u64) {
        match word {
            0x0010..0x0020 => {
                if let Some(disk) = self.disks.get_mut((word - map::disk(0)) as usize) {
                    disk.reset(value & 1 != 0);
                }
            }
            0x1000..0x2000 => {
                let at = word - map::queue(0, 0);
                let (number, pairs) = ((at / 4) as usize, usize::from(self.shape.queue_pairs));
                let Some(queue) = self.queues.get_mut(number) else { return };
                match at % 4 {
                    0 => {
                        let base = QueueBase::from_bits(value);
                        queue.set_base(base);
                        if base.enabled() {
                            self.functions[number / pairs].interrupts.forget(number % pairs);
                        }
                    }
                    1 => queue.sizes = QueueSizes::from_bits(value),
                    2 => queue.cq_base = QueueBase::from_bits(value),
                    _ => {}
                }
            }
            0x2000..0x3000 => {
                let at = word - map::interrupts(0);
                let number = (at / 8) as usize;
                let Some(function) = self.functions.get_mut(number) else { return };
                match at % 8 {
                    0 => function.interrupts.set(Coalescing::from_bits(value)),
                    1 => self.queues.weights[number] = (value & 15) as u8,
                    _ => {}
                }
            }
            0x3000..0x4000 => {
                let at = (word - map::configuration(0, 0)) as usize;
                if let Some(function) = self.functions.get_mut(at / 16) {
                    function.configuration[at % 16] = value;
                }
                if at.is_multiple_of(16) && !NamespaceWord::from_bits(value).enabled() {
                    self.forget(at / 16);
                }
            }
            0x8000.. => {
                if let Some(row) = self.rows.get_mut((word - 0x8000) as usize) {
                    *row = PageRow::from_bits(value);
                }
            }
            _ => {}
        }
    }

    pub(super) fn read(&mut self, word: u32, now: u64) -> u64 {
        let shape = &self.shape;
        match word {
            map::IDENTITY => {
                let (functions, pairs) = (u64::from(shape.local_functions), u64::from(shape.queue_pairs));
                let (slots, ssds) = (u64::from(shape.slots), u64::from(shape.ssds));
                1 | functions << 16 | pairs << 24 | slots << 32 | ssds << 40 | u64::from(shape.pages) << 48
            }
            map::IN_FLIGHT => (self.slots.len() - self.free_slots.len()) as u64,
            map::FAULT => self.queues.take_fault().into_bits(),
            map::TIME => u64::from((now / map::CYCLES_PER_UNIT) as u32),
            map::TAKEN => self.taken,
            map::COMPLETED => self.completed,
            map::INTERRUPTS => self.functions.iter().map(|function| function.interrupts.sent).sum(),
            0x0010..0x0020 => {
                let disk = self.disks.get((word - map::disk(0)) as usize);
                u64::from(disk.is_some_and(DiskQueue::is_enabled))
            }
            0x1000..0x2000 => {
                let at = word - map::queue(0, 0);
                let queue = self.queues.get((at / 4) as usize).filter(|_| at % 4 == 3);
                queue.map_or(0, |queue| queue.status().into_bits())
            }
            // The other tables are written only.
            _ => 0,
        }
    }

    pub(super) fn doorbell(&mut self, queue: u16, completion: bool, value: u16) {
        self.queues.ring(queue, completion, value);
    }

    pub(super) fn has_fault(&self) -> bool {
        self.queues.has_fault()
    }

    // ---- the chip's memory ------------------------------------------------------------------------------------------

    pub(super) fn read_chip(&self, disk: u8, at: u32, out: &mut [u8]) {
        let bytes = usize::from(self.shape.disk_entries()) * 64;
        match at {
            map::chip::SUBMISSION..map::chip::LISTS => {
                let at = at as usize;
                // Each disk has its own part; one that reads another's is wrong, and gets what it asked for.
                let (owner, at) = (at / bytes, at % bytes);
                debug_assert_eq!(owner, usize::from(disk), "a disk reads its own queue");
                if let Some(queue) = self.disks.get(owner) {
                    queue.read(at, out);
                }
            }
            map::chip::LISTS..map::chip::COMPLETION => {
                let at = at - map::chip::LISTS;
                let Some(list) = self.lists.get((at / map::chip::LIST) as usize) else { return };
                let from = (at % map::chip::LIST) as usize;
                for (byte, value) in out.iter_mut().zip(list.as_bytes().iter().skip(from)) {
                    *byte = *value;
                }
            }
            _ => {}
        }
    }

    pub(super) fn write_chip(&mut self, at: u32, data: &[u8; 16]) {
        let Some(at) = at.checked_sub(map::chip::COMPLETION) else { return };
        let (index, entries) = (at as usize / 16, usize::from(self.shape.disk_entries()));
        if let Some(queue) = self.disks.get_mut(index / entries) {
            queue.write(index % entries, data);
        }
    }

    // ---- commands ---------------------------------------------------------------------------------------------------

    /// Does everything that can be done at this time, a round of it.
    pub(super) fn step(&mut self, now: u64, places: &[Place], around: &mut dyn Around) -> Done {
        let mut done = Done::default();
        done.worked |= self.reap(now, around);
        done.worked |= self.retry(now, around);
        done.worked |= self.submit(now, around);
        while let Some(slot) = self.free_slots.front().copied() {
            let Some(queue) = self.queues.next() else { break };
            self.free_slots.pop_front();
            self.fetch(slot, queue, now, around);
            done.commands += 1;
            done.worked = true;
            self.submit(now, around);
        }
        for (disk, queue) in (0..).zip(&mut self.disks) {
            if let Some(tail) = queue.take_ring() {
                around.disk_doorbell(disk, self.number, false, tail);
                done.worked = true;
            }
        }
        let pairs = usize::from(self.shape.queue_pairs);
        for (local, function) in (0_u8..).zip(&mut self.functions) {
            let of_core = |place: &Place| place.enabled() && (place.core(), place.local()) == (self.number, local);
            let vectors = |pair: usize| self.queues.vector(usize::from(local) * pairs + pair);
            while let Some(vector) = function.interrupts.take(now, vectors) {
                if let Some(number) = places.iter().position(of_core) {
                    around.interrupt(number as u8, vector);
                }
                done.worked = true;
            }
        }
        done
    }

    /// When something is due that waits for time alone: of each function, the first that is held.
    pub(super) fn next_due(&self) -> Option<u64> {
        let mut seen = 0_u32;
        let held = self.held.iter().filter_map(|(slot, due)| {
            let bit = 1 << self.function_of(self.slot(*slot).queue);
            let first = seen & bit == 0;
            seen |= bit;
            first.then_some(*due)
        });
        let pairs = usize::from(self.shape.queue_pairs);
        let interrupts =
            self.functions.iter().enumerate().filter_map(|(number, function)| {
                function.interrupts.next_due(|pair| self.queues.vector(number * pairs + pair))
            });
        interrupts.chain(held).min()
    }

    fn fetch(&mut self, slot: u16, queue: usize, now: u64, around: &mut dyn Around) {
        let address = self.queues.take(queue);
        let mut bytes = [0; 64];
        if around.read_host(address, &mut bytes).is_err() {
            self.free_slots.push_back(slot);
            if let Some(queue) = self.queues.get_mut(queue) {
                queue.in_flight -= 1;
            }
            return self.queues.stop(queue);
        }
        let Ok(sqe) = Sqe::read_from_bytes(&bytes) else { unreachable!("as many bytes as an entry has") };
        self.taken += 1;
        self.slots[usize::from(slot)] = Some(Slot { queue, sqe, legs: 0, status: 0, list: None });
        match command::check(&sqe) {
            Ok(()) => self.ask_new(slot, now, around),
            Err(status) => self.complete(slot, status.into_bits(), now, around),
        }
    }

    fn function_of(&self, queue: usize) -> usize {
        queue / usize::from(self.shape.queue_pairs)
    }

    fn slot(&self, slot: u16) -> &Slot {
        self.slots[usize::from(slot)].as_ref().expect("a slot that is asked about is taken")
    }

    /// A function is turned off: what it used is forgotten, and who is held is asked at once.
    fn forget(&mut self, number: usize) {
        let Some(function) = self.functions.get_mut(number) else { return };
        function.state = State::default();
        for at in 0..self.held.len() {
            if self.function_of(self.slot(self.held[at].0).queue) == number {
                self.held[at].1 = 0;
            }
        }
    }

    /// Whether a command of a function is held.
    fn holds(&self, number: usize) -> bool {
        self.held.iter().any(|(slot, _)| self.function_of(self.slot(*slot).queue) == number)
    }

    /// Asks the storage functions, unless one of its function before it is held.
    fn ask_new(&mut self, slot: u16, now: u64, around: &mut dyn Around) {
        let number = self.function_of(self.slot(slot).queue);
        if self.holds(number) && self.late(slot, around).is_ok() {
            self.held.push_back((slot, 0));
        } else {
            self.ask(slot, now, around);
        }
    }

    /// What is wrong with a command, which is told only if the storage functions do not refuse it.
    fn late(&mut self, slot: u16, around: &mut dyn Around) -> Result<(), Status> {
        let Slot { queue, sqe, .. } = self.slot(slot).clone();
        let number = self.function_of(queue);
        let (rows, word) = (self.rows_of(number), self.word_of(number));
        Memory { rows, around }.check(&sqe, word.block_log2().into())
    }

    fn rows_of(&self, number: usize) -> &[PageRow] {
        let pages = usize::from(self.shape.pages);
        &self.rows[number * pages..][..pages]
    }

    fn word_of(&self, number: usize) -> NamespaceWord {
        NamespaceWord::from_bits(self.functions[number].configuration[0])
    }

    /// Asks the storage functions. Whether it is held.
    fn ask(&mut self, slot: u16, now: u64, around: &mut dyn Around) -> bool {
        let late = self.late(slot, around);
        let Slot { queue, sqe, .. } = self.slot(slot).clone();
        let number = self.function_of(queue);
        let pair = queue % usize::from(self.shape.queue_pairs);
        let command = command::for_functions(&sqe, number as u8, pair as u8, now);
        let function = &mut self.functions[number];
        let (verdict, state) = chain::submit(&command, &function.state, &function.config());
        match (verdict.kind, late) {
            (Verdict::REJECT, _) => self.complete(slot, verdict.status, now, around),
            // It has used nothing.
            (_, Err(status)) => self.complete(slot, status.into_bits(), now, around),
            (Verdict::HOLD, _) => {
                let wait = u64::from(verdict.until.wrapping_sub(command.now));
                let due = (now / map::CYCLES_PER_UNIT + wait) * map::CYCLES_PER_UNIT;
                self.held.push_back((slot, due));
                return true;
            }
            _ => {
                function.state = state;
                self.passed.push_back((slot, verdict));
            }
        }
        false
    }

    /// Asks again for those whose time has come. Commands of a function keep their order.
    fn retry(&mut self, now: u64, around: &mut dyn Around) -> bool {
        let (mut worked, mut blocked) = (false, 0_u32);
        for _ in 0..self.held.len() {
            let Some((slot, due)) = self.held.pop_front() else { break };
            let bit = 1 << self.function_of(self.slot(slot).queue);
            if blocked & bit != 0 || due > now {
                self.held.push_back((slot, due));
                blocked |= bit;
            } else {
                worked = true;
                if self.ask(slot, now, around) {
                    blocked |= bit;
                }
            }
        }
        worked
    }

    /// Gives disks what passed the functions, in order, as far as they have room.
    fn submit(&mut self, now: u64, around: &mut dyn Around) -> bool {
        let mut worked = false;
        while let Some((slot, verdict)) = self.passed.front().copied() {
            let enabled = |disk: &usize| verdict.disks >> disk & 1 != 0 && self.disks[*disk].is_enabled();
            let legs: Vec<usize> = (0..self.disks.len()).filter(enabled).collect();
            if self.free_lists.is_empty() || legs.iter().any(|disk| !self.disks[*disk].has_room()) {
                break;
            }
            self.passed.pop_front();
            worked = true;
            if let Err(status) = self.translate(slot, verdict.lba, &legs, around) {
                self.complete(slot, status.into_bits(), now, around);
            }
        }
        worked
    }

    fn translate(&mut self, slot: u16, lba: u64, legs: &[usize], around: &mut dyn Around) -> Result<(), Status> {
        let Slot { queue, sqe, .. } = self.slot(slot).clone();
        let number = self.function_of(queue);
        let (rows, word) = (self.rows_of(number), self.word_of(number));
        let data = Memory { rows, around }.data(&sqe, word.block_log2().into())?;
        if legs.is_empty() {
            return Err(Status::INTERNAL_ERROR);
        }
        let mut list = None;
        let second = match data.rest.as_slice() {
            [] => 0,
            [page] => *page,
            pages => {
                let at = self.free_lists.pop().expect("looked for before");
                self.lists[at][..pages.len()].copy_from_slice(pages);
                list = Some(at);
                u64::from(u32::from(self.number) * map::chip::WINDOW + map::chip::LISTS + at as u32 * map::chip::LIST)
            }
        };
        let entry = command::for_disk(&sqe, slot, lba, (data.first, second), word.durable());
        for disk in legs {
            self.disks[*disk].submit(entry);
        }
        let known = self.slots[usize::from(slot)].as_mut().expect("it is taken");
        (known.legs, known.list) = (legs.len() as u32, list);
        Ok(())
    }

    /// Takes what disks have completed.
    fn reap(&mut self, now: u64, around: &mut dyn Around) -> bool {
        let mut worked = false;
        for disk in 0..self.disks.len() {
            let mut head = None;
            while let Some((ended, next)) = self.disks[disk].poll() {
                head = Some(next);
                // A disk that names a command which is not its own is not believed.
                let known = self.slots.get_mut(usize::from(ended.slot)).and_then(Option::as_mut);
                let Some(known) = known.filter(|slot| slot.legs > 0) else { continue };
                known.legs -= 1;
                if known.status == 0 {
                    known.status = ended.status;
                }
                if known.legs == 0 {
                    let status = known.status;
                    self.complete(ended.slot, status, now, around);
                }
            }
            if let Some(head) = head {
                around.disk_doorbell(disk as u8, self.number, true, head);
                worked = true;
            }
        }
        worked
    }

    /// Posts a command's entry, and frees its slot.
    fn complete(&mut self, slot: u16, status: u16, now: u64, around: &mut dyn Around) {
        let ended = self.slots[usize::from(slot)].take().expect("a command ends once");
        self.free_slots.push_back(slot);
        self.free_lists.extend(ended.list);
        let number = self.function_of(ended.queue);
        let pair = ended.queue % usize::from(self.shape.queue_pairs);
        let qid = (pair + 1) as u16;
        let queue = self.queues.get_mut(ended.queue).expect("a command's queue exists");
        let sqhd = queue.sq_head.into();
        let (index, phase) = queue.advance();
        let entry = Cqe {
            dw0: 0,
            dw1: 0,
            sqhd,
            sqid: QueueId(qid),
            cid: CommandId(ended.sqe.cid.0),
            status: StatusField::new(Status::from_bits(status), phase),
        };
        around.write_host((queue.cq_base.page() << 12) + u64::from(index) * Cqe::SIZE as u64, entry.as_bytes());
        self.completed += 1;
        if queue.sizes.interrupts() {
            self.functions[number].interrupts.pend(pair, now);
        }
    }
}
