//! The guest: its queues, what it has submitted, and what must come of it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    os::unix::fs::FileExt,
};

use millrace_frontends::nvme::{Config, DoorbellMode};
use millrace_nvme_spec::{
    command::{CommandId, Cqe, Sqe},
    status::Status,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::{
    contents::{Contents, Tag, WriteId},
    memory::{Memory, QUEUES},
    wire::Wire,
    world::{Disk, World},
};

/// Turns after which whatever is awaited will never come.
const PATIENCE: u32 = 50_000;
/// What pages hold that nobody may write.
pub(crate) const CANARY: u8 = 0xa5;

/// What a command does, and with what it is judged.
#[derive(Clone, Debug)]
pub(crate) enum What {
    /// Nothing that the oracle knows of.
    Other,
    Read {
        disk: usize,
        lba: u64,
        count: u64,
    },
    Verify {
        disk: usize,
        lba: u64,
        count: u64,
    },
    Compare {
        disk: usize,
        lba: u64,
        tags: Vec<Tag>,
    },
    Change(WriteId),
    CreateCq(u16, Cq),
    CreateSq(u16, Sq),
    DeleteCq(u16),
    DeleteSq(u16),
    Event,
    CreateNamespace,
    DeleteNamespace(u32),
    Attach(u32, bool),
    Format {
        disk: usize,
        write: WriteId,
    },
    Shadow,
    CopiesAcross,
}

/// A command that was submitted.
#[derive(Clone, Debug)]
pub(crate) struct Command {
    pub(crate) what: What,
    pub(crate) start: u64,
    /// It may succeed.
    pub(crate) may_succeed: bool,
    /// It may fail like this.
    pub(crate) statuses: Vec<Status>,
    /// It may fail in any way.
    pub(crate) any_status: bool,
    /// What it reads cannot be judged.
    pub(crate) unverified: bool,
    /// Its disk fails now and then.
    pub(crate) faulty: bool,
    /// The disks it works on.
    pub(crate) disks: Vec<usize>,
    /// Its data.
    pub(crate) segments: Vec<(u64, u32)>,
    /// Pages of its own: data and lists.
    pub(crate) pages: Vec<u64>,
}

impl Command {
    pub(crate) fn new(what: What) -> Self {
        Self {
            what,
            start: 0,
            may_succeed: true,
            statuses: Vec::new(),
            any_status: false,
            unverified: false,
            faulty: false,
            disks: Vec::new(),
            segments: Vec::new(),
            pages: Vec::new(),
        }
    }

    /// It must fail, in one of the ways that were named.
    pub(crate) fn must_fail(mut self, status: Status) -> Self {
        self.may_succeed = false;
        self.statuses.push(status);
        self
    }

    /// It may succeed or fail in any way.
    pub(crate) fn whatever(mut self) -> Self {
        (self.any_status, self.unverified) = (true, true);
        self
    }

    fn accepts(&self, status: Status) -> bool {
        if status.is_success() {
            return self.may_succeed;
        }
        self.any_status || self.statuses.iter().any(|known| known.code() == status.code())
    }
}

/// Commands of one identifier: two when the guest used it twice.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pending {
    pub(crate) commands: Vec<Command>,
    completions: Vec<Cqe>,
}

/// A submission queue.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sq {
    pub(crate) base: u64,
    pub(crate) entries: u32,
    pub(crate) cqid: u16,
    pub(crate) tail: u32,
    /// The tail that the device was told.
    pub(crate) rung: u32,
    /// The head that the device told.
    pub(crate) head: u32,
    pub(crate) next_cid: u16,
    pub(crate) pending: BTreeMap<u16, Pending>,
}

impl Sq {
    pub(crate) fn distance(&self, from: u32, to: u32) -> u32 {
        (to + self.entries - from) % self.entries
    }

    pub(crate) fn room(&self) -> u32 {
        self.entries - 1 - self.distance(self.head, self.tail)
    }
}

/// A completion queue.
#[derive(Clone, Debug)]
pub(crate) struct Cq {
    pub(crate) base: u64,
    pub(crate) entries: u32,
    pub(crate) head: u32,
    pub(crate) phase: bool,
    /// Its vector was signalled since it was last found empty.
    pub(crate) signalled: bool,
}

impl Cq {
    pub(crate) fn new(base: u64, entries: u32) -> Self {
        Self { base, entries, head: 0, phase: true, signalled: false }
    }
}

/// A vector's eventfd.
pub(crate) struct Wired {
    pub(crate) eventfd: File,
    /// The turn of the last change.
    pub(crate) since: u64,
}

/// A namespace as the guest may know it.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) disk: usize,
    pub(crate) attached: bool,
    pub(crate) by_guest: bool,
    pub(crate) read_only: bool,
}

pub(crate) struct DiskView {
    pub(crate) name: String,
    pub(crate) disk: Disk,
    pub(crate) faulty: bool,
}

pub(crate) struct Guest {
    pub(crate) world: World,
    pub(crate) config: Config,
    pub(crate) wire: Option<Wire>,
    /// The doorbell page's file, when it is shared.
    pub(crate) doorbells: Option<File>,
    pub(crate) memory: Memory,
    pub(crate) contents: Contents,
    pub(crate) disks: Vec<DiskView>,
    pub(crate) namespaces: BTreeMap<u32, View>,
    pub(crate) sqs: BTreeMap<u16, Sq>,
    pub(crate) cqs: BTreeMap<u16, Cq>,
    /// Counts what happens.
    pub(crate) clock: u64,
    /// Why the controller must be reset before anything can be expected of it again.
    pub(crate) lost: Option<&'static str>,
    pub(crate) shadow: bool,
    /// Vectors with an eventfd.
    pub(crate) wired: BTreeMap<u16, Wired>,
    /// Vectors that are masked.
    pub(crate) masked: BTreeSet<u16>,
    /// The host enabled copies across namespaces.
    pub(crate) copies_across: bool,
    /// Completions seen, for the report.
    pub(crate) completions: u64,
    pub(crate) last_admin: Option<Cqe>,
    pub(crate) trace: Option<Vec<String>>,
}

/// Notes what is done, when somebody will read it.
macro_rules! note {
    ($guest:expr, $($arg:tt)*) => {
        if let Some(trace) = &mut $guest.trace {
            trace.push(format!($($arg)*));
        }
    };
}
pub(crate) use note;

impl Guest {
    pub(crate) fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Whether commands can be submitted and judged.
    pub(crate) fn is_ready(&self) -> bool {
        self.lost.is_none() && self.sqs.contains_key(&0)
    }

    pub(crate) fn lose(&mut self, why: &'static str) {
        note!(self, "  from now on: {why}");
        self.lost.get_or_insert(why);
    }

    // ---- time -------------------------------------------------------------------------------------------------------

    /// Lets turns pass until there is what is waited for.
    pub(crate) fn wait<T>(&mut self, what: &str, mut ready: impl FnMut(&mut Self) -> Option<T>) -> T {
        for turn in 0..PATIENCE {
            if let Some(found) = ready(self) {
                return found;
            }
            self.world.turn();
            if turn == 64 {
                self.release();
            }
            if turn > 2000 {
                std::thread::sleep(std::time::Duration::from_micros(20));
            }
        }
        panic!("{what}: waited in vain for {PATIENCE} turns; {:?}", self.world.device(|device| device.status()));
    }

    pub(crate) fn turns(&mut self, count: u64) {
        (0..count).for_each(|_| {
            self.world.turn();
        });
    }

    /// Volumes that were told to hold requests let them go.
    pub(crate) fn release(&mut self) {
        self.disks.iter().for_each(|view| view.disk.hold(false));
    }

    /// Waits until every command that the device knows of has completed.
    pub(crate) fn settle(&mut self) {
        self.release();
        for sqid in self.sqs.keys().copied().collect::<Vec<_>>() {
            self.ring(sqid);
        }
        self.wait("all commands complete", |guest| {
            guest.poll_all();
            let done = guest.lost.is_some() || guest.sqs.values().all(|sq| sq.pending.values().all(waits_for_events));
            done.then_some(())
        });
    }

    // ---- submission -------------------------------------------------------------------------------------------------

    /// Puts a command into a queue without ringing. The queue must have room. Returns its identifier.
    pub(crate) fn push(&mut self, sqid: u16, mut sqe: Sqe, mut command: Command) -> u16 {
        let sq = self.sqs.get_mut(&sqid).expect("the queue is there");
        while sq.pending.contains_key(&sq.next_cid) {
            sq.next_cid = sq.next_cid.wrapping_add(1);
        }
        let cid = sq.next_cid;
        sq.next_cid = cid.wrapping_add(1);
        sqe.cid = CommandId(cid);
        command.start = self.now();
        self.push_as_is(sqid, &sqe, command);
        cid
    }

    pub(crate) fn push_as_is(&mut self, sqid: u16, sqe: &Sqe, command: Command) {
        note!(
            self,
            "  sq {sqid} cid {} opcode {:02x} nsid {:x} flags {:02x} prp {:x} {:x} cdw10.. {:x} {:x} {:x} {:x}: {:?}, {}{:?}",
            sqe.cid.0,
            sqe.opcode,
            sqe.nsid.0,
            sqe.as_bytes()[1],
            sqe.dptr.prp1,
            sqe.dptr.prp2,
            sqe.cdw10,
            sqe.cdw11,
            sqe.cdw12,
            sqe.cdw13,
            command.what,
            if command.any_status {
                "whatever "
            } else if command.may_succeed {
                "ok "
            } else {
                "must fail "
            },
            command.statuses,
        );
        let sq = self.sqs.get_mut(&sqid).expect("the queue is there");
        assert!(sq.room() > 0, "the guest looks before it submits");
        let at = sq.base + u64::from(sq.tail) * Sqe::SIZE as u64;
        sq.tail = (sq.tail + 1) % sq.entries;
        sq.pending.entry(sqe.cid.0).or_default().commands.push(command);
        self.memory.write(at, sqe.as_bytes());
    }

    /// Tells the device the queue's tail.
    pub(crate) fn ring(&mut self, sqid: u16) {
        let Some(sq) = self.sqs.get_mut(&sqid) else { return };
        if sq.rung != sq.tail {
            sq.rung = sq.tail;
            let tail = sq.tail;
            self.doorbell(u64::from(sqid) * 2, tail);
        }
    }

    /// Writes a doorbell the way that the guest does it now.
    pub(crate) fn doorbell(&mut self, index: u64, value: u32) {
        if self.shadow && index >= 2 {
            self.memory.write(SHADOW + index * 4, value.as_bytes());
            // The device is looked at on every turn, so that it needs no bell; a bell does no harm.
            if !value.is_multiple_of(3) {
                return;
            }
        }
        self.raw_doorbell(index, value);
    }

    /// Writes a doorbell of the function.
    pub(crate) fn raw_doorbell(&mut self, index: u64, value: u32) {
        match &self.doorbells {
            Some(page) => page.write_all_at(value.as_bytes(), 0x1000 + index * 4).expect("the doorbell page"),
            None => self.write_bar0(0x1000 + index * 4, value.as_bytes()),
        }
    }

    pub(crate) fn shares_doorbells(&self) -> bool {
        self.config.doorbells == DoorbellMode::Shared
    }

    // ---- completion -------------------------------------------------------------------------------------------------

    pub(crate) fn poll_all(&mut self) {
        for cqid in self.cqs.keys().copied().collect::<Vec<_>>() {
            self.poll(cqid, u32::MAX);
        }
    }

    /// Takes up to `most` completions and gives their places back.
    pub(crate) fn poll(&mut self, cqid: u16, most: u32) {
        let mut taken = 0;
        let wired = self.look_for_signal(cqid);
        while taken < most && self.lost.is_none() {
            let Some(cq) = self.cqs.get_mut(&cqid) else { return };
            let mut bytes = [0; Cqe::SIZE];
            self.memory.read(cq.base + u64::from(cq.head) * Cqe::SIZE as u64, &mut bytes);
            let cqe = Cqe::read_from_bytes(&bytes).expect("as many bytes as it has");
            if cqe.phase() != cq.phase {
                cq.signalled = false;
                break;
            }
            assert!(cq.signalled || !wired, "completion queue {cqid} has completions, but its vector was not signalled");
            cq.head += 1;
            if cq.head == cq.entries {
                (cq.head, cq.phase) = (0, !cq.phase);
            }
            taken += 1;
            self.completed(cqid, cqe);
        }
        if taken > 0
            && let Some(cq) = self.cqs.get(&cqid)
        {
            let head = cq.head;
            self.doorbell(u64::from(cqid) * 2 + 1, head);
        }
    }

    /// Takes the count of the queue's vector. Returns whether it would have been signalled for completions that are there.
    pub(crate) fn look_for_signal(&mut self, cqid: u16) -> bool {
        let (Some(wired), Some(cq)) = (self.wired.get(&cqid), self.cqs.get_mut(&cqid)) else { return false };
        let mut count = [0; 8];
        cq.signalled |= rustix::io::read(&wired.eventfd, &mut count).is_ok();
        !self.masked.contains(&cqid) && wired.since < self.world.turns
    }

    fn completed(&mut self, cqid: u16, cqe: Cqe) {
        self.completions += 1;
        note!(self, "  cq {cqid}: sq {} cid {} head {} {} dw0 {:x}", cqe.sqid.0, cqe.cid.0, cqe.sqhd, cqe.status(), cqe.dw0);
        let sq =
            self.sqs.get_mut(&cqe.sqid.0).unwrap_or_else(|| panic!("a completion for a queue that is not there: {cqe:?}"));
        assert_eq!(sq.cqid, cqid, "a completion in another queue's place: {cqe:?}");
        let head = u32::from(cqe.sqhd);
        assert!(head < sq.entries && cqe.dw1 == 0, "a malformed completion: {cqe:?}");
        let (moved, most) = (sq.distance(sq.head, head), sq.distance(sq.head, sq.rung));
        assert!(moved <= most, "the queue's head went from {} to {head}, beyond the tail {}: {cqe:?}", sq.head, sq.rung);
        sq.head = head;
        let cid = cqe.cid.0;
        let pending = sq.pending.get_mut(&cid).unwrap_or_else(|| panic!("a completion of nothing: {cqe:?}"));
        pending.completions.push(cqe);
        if pending.completions.len() < pending.commands.len() {
            return;
        }
        let Pending { commands, completions } = sq.pending.remove(&cid).expect("found above");
        match (<[Command; 1]>::try_from(commands), completions.as_slice()) {
            (Ok([command]), [cqe]) => self.judge(&command, *cqe),
            (Err(two), completions) => self.judge_two(two, completions),
            _ => unreachable!("as many completions as commands"),
        }
    }

    /// Two commands of one identifier; the second is a flush.
    fn judge_two(&mut self, commands: Vec<Command>, completions: &[Cqe]) {
        let conflict = |cqe: &&Cqe| cqe.status().code() == Status::CID_CONFLICT;
        let refused = completions.iter().position(|cqe| conflict(&cqe));
        let mut commands = commands.into_iter();
        let (first, second) = (commands.next().expect("two"), commands.next().expect("two"));
        assert!(commands.next().is_none(), "an identifier is used twice, not more often");
        let (one, other) = if refused == Some(0) { (1, 0) } else { (0, 1) };
        if refused.is_some() || first.accepts(completions[0].status()) && second.accepts(completions[1].status()) {
            self.judge(&first, completions[one]);
            self.judge(&second, completions[other]);
        } else {
            self.judge(&first, completions[other]);
            self.judge(&second, completions[one]);
        }
    }

    fn judge(&mut self, command: &Command, cqe: Cqe) {
        let status = cqe.status();
        assert!(
            command.accepts(status),
            "{cqe:?} ended with {status}, which does not fit {:?} (may succeed: {}, statuses: {:?})",
            command.what,
            command.may_succeed,
            command.statuses
        );
        if cqe.sqid.is_admin() {
            self.last_admin = Some(cqe);
        }
        let now = self.now();
        self.judge_effect(command, cqe, now);
        self.memory.give_back(&command.pages);
    }

    fn judge_effect(&mut self, command: &Command, cqe: Cqe, now: u64) {
        let (succeeded, start) = (cqe.status().is_success(), command.start);
        let unreadable = cqe.status().code() == Status::UNRECOVERED_READ_ERROR;
        let faulty = command.any_status || command.faulty;
        match &command.what {
            What::Read { disk, lba, count } | What::Verify { disk, lba, count } if !command.unverified => {
                if unreadable {
                    let marked = self.contents.may_be_unreadable(*disk, *lba, *count, start);
                    assert!(marked || faulty, "{cqe:?}: block {lba} and {count} of disk {disk} can be read");
                } else if succeeded {
                    let marked = self.contents.is_unreadable(*disk, *lba, *count, start);
                    assert!(!marked, "{cqe:?}: blocks from {lba} on of disk {disk} were marked uncorrectable");
                }
                if succeeded && matches!(command.what, What::Read { .. }) {
                    let data = self.memory.gather(&command.segments);
                    let found = self.contents.found(*disk, *lba, &data, start, now);
                    found.unwrap_or_else(|wrong| panic!("{cqe:?}: {wrong}"));
                    self.check_surroundings(command);
                }
            }
            What::Compare { disk, lba, tags } if !command.unverified => {
                let equal = |(lba, tag): (u64, &Tag)| self.contents.may_have_been(*disk, lba, *tag, start);
                if succeeded {
                    assert!((*lba..).zip(tags).all(equal), "{cqe:?} found equal what differs: disk {disk} from {lba} on");
                } else if cqe.status().code() == Status::COMPARE_FAILURE {
                    let surely = |(lba, tag): (u64, &Tag)| self.contents.surely_is(*disk, lba, *tag, start);
                    assert!(
                        !(*lba..).zip(tags).all(surely),
                        "{cqe:?} found different what is equal: disk {disk} from {lba} on"
                    );
                }
            }
            What::Change(write) => self.contents.end(*write, now, succeeded, oldest_of(&self.sqs, now)),
            What::Format { disk, write } => {
                self.contents.end(*write, now, succeeded, oldest_of(&self.sqs, now));
                let geometry = self.disks[*disk].disk.geometry();
                let block = geometry.block_size.bytes() as usize;
                if succeeded && block != self.contents.block_size(*disk) {
                    self.contents.reset_disk(*disk, block, geometry.blocks.0, now);
                }
            }
            _ if succeeded => self.succeeded(&command.what, cqe),
            _ => {}
        }
    }

    /// A read writes its data's place only.
    fn check_surroundings(&self, command: &Command) {
        let lists = command.pages.len();
        for &page in &command.pages {
            let mut bytes = vec![0; 4096];
            self.memory.read(page, &mut bytes);
            let mut covered = false;
            for &(at, len) in &command.segments {
                let (from, to) = (at.max(page), (at + u64::from(len)).min(page + 4096));
                if from < to {
                    bytes[(from - page) as usize..(to - page) as usize].fill(CANARY);
                    covered = true;
                }
            }
            // Pages without data hold lists.
            let whole = !covered || bytes.iter().all(|byte| *byte == CANARY);
            assert!(whole, "a read wrote beyond its data, in page {page:#x} of {lists}");
        }
    }

    fn succeeded(&mut self, what: &What, cqe: Cqe) {
        match what {
            What::CreateCq(cqid, cq) => {
                self.cqs.insert(*cqid, cq.clone());
            }
            What::CreateSq(sqid, sq) => {
                self.sqs.insert(*sqid, sq.clone());
            }
            What::DeleteCq(cqid) => {
                self.cqs.remove(cqid);
            }
            What::DeleteSq(sqid) => self.queue_deleted(*sqid),
            What::CreateNamespace => self.namespace_created(cqe.dw0),
            What::DeleteNamespace(nsid) => {
                self.namespaces.remove(nsid);
            }
            What::Attach(nsid, attached) => {
                self.namespaces.get_mut(nsid).expect("it exists").attached = *attached;
            }
            What::Shadow => self.shadow = true,
            What::CopiesAcross => self.copies_across = true,
            _ => {}
        }
    }

    /// The commands that the device did not take before the queue went will never complete.
    fn queue_deleted(&mut self, sqid: u16) {
        // Completions that came before the deletion's are in their queue.
        let cqid = self.sqs[&sqid].cqid;
        if cqid != 0 {
            self.poll(cqid, u32::MAX);
        }
        let sq = self.sqs.remove(&sqid).expect("it was there");
        let now = self.now();
        for command in sq.pending.into_values().flat_map(|pending| pending.commands) {
            if let What::Change(write) = command.what {
                self.contents.end(write, now, false, oldest_of(&self.sqs, now));
            }
            self.memory.give_back(&command.pages);
        }
    }

    /// Every command is gone by a reset that has ended: their pages are free, and nobody may write them any more.
    pub(crate) fn forget_commands(&mut self) {
        let now = self.now();
        self.contents.cut_off(now);
        let sqs = std::mem::take(&mut self.sqs);
        self.cqs.clear();
        self.shadow = false;
        self.copies_across = false;
        let commands = sqs.into_values().flat_map(|sq| sq.pending.into_values().flat_map(|pending| pending.commands));
        let pages: Vec<u64> = commands.flat_map(|command| command.pages).collect();
        for &page in &pages {
            self.memory.fill(page, 4096, CANARY);
        }
        self.turns(12);
        for &page in &pages {
            let mut bytes = [0; 4096];
            self.memory.read(page, &mut bytes);
            assert!(bytes.iter().all(|byte| *byte == CANARY), "page {page:#x} was written after a reset");
        }
        self.memory.give_back(&pages);
    }

    /// Every command under way that fits.
    pub(crate) fn each_pending(&mut self, mut f: impl FnMut(&mut Command, &mut Contents)) {
        let Self { sqs, contents, .. } = self;
        let pending = sqs.values_mut().flat_map(|sq| sq.pending.values_mut());
        pending.flat_map(|pending| pending.commands.iter_mut()).for_each(|command| f(command, contents));
    }
}

/// When the oldest command under way began.
fn oldest_of(sqs: &BTreeMap<u16, Sq>, now: u64) -> u64 {
    let commands = sqs.values().flat_map(|sq| sq.pending.values().flat_map(|pending| &pending.commands));
    commands.filter(|command| !matches!(command.what, What::Event)).map(|command| command.start).min().unwrap_or(now)
}

fn waits_for_events(pending: &Pending) -> bool {
    pending.commands.iter().all(|command| matches!(command.what, What::Event))
}

/// Where the admin queues, the I/O queues and the shadow doorbells lie.
pub(crate) const ADMIN_SQ: u64 = QUEUES;
pub(crate) const ADMIN_CQ: u64 = QUEUES + 0x1000;
pub(crate) const SHADOW: u64 = QUEUES + 0x2000;
pub(crate) const EVENT_INDEXES: u64 = QUEUES + 0x3000;
/// A page for admin commands' data.
pub(crate) const ADMIN_DATA: u64 = QUEUES + 0x4000;

/// Where an I/O queue's entries lie; SQs have 2 pages, CQs have 1.
pub(crate) fn sq_base(qid: u16) -> u64 {
    QUEUES + 0x1_0000 + u64::from(qid) * 0x4000
}

pub(crate) fn cq_base(qid: u16) -> u64 {
    sq_base(qid) + 0x2000
}
