//! The split virtqueue (virtio 1.3, 2.7).

use std::{
    collections::VecDeque,
    num::NonZeroU16,
    sync::atomic::{Ordering, compiler_fence, fence},
};

use millrace_memory::{Segment, full_fence};

use super::{
    super::{
        dirty::DirtyLog,
        inflight::{Record, SplitRecord},
        memory::MemoryTable,
        message::VringAddr,
    },
    Buffers, Done, Part, Plain, RingError, Setup,
    ahead::{self, AHEAD, FEW, Form, Found, Guess},
    chain::{Descriptor, flag},
    feature, passes,
};

/// Offsets within the available and the used ring.
const FLAGS: usize = 0;
const INDEX: usize = 2;
const ENTRIES: usize = 4;
const USED_ENTRY: usize = 8;
/// Bytes of a cache line.
const LINE: usize = 64;
/// In the available ring's flags: the guest wants no interrupts. In the used ring's: we want no kicks.
const QUIET: u16 = 1;

/// A split ring.
#[derive(Debug)]
pub(crate) struct SplitRing {
    size: u16,
    event_index: bool,
    indirect: bool,
    desc: Part,
    avail: Part,
    used: Part,
    /// Where changes of the used ring are logged, if they are.
    used_log: Option<u64>,
    /// Next entry of the available ring to take.
    next: u16,
    /// The guest's index as last seen.
    seen: u16,
    /// Our index of the used ring.
    used_index: u16,
    /// Its value when the guest was last interrupted, or might have been.
    signalled: u16,
    /// Heads that were taken and not given back.
    busy: Vec<bool>,
    in_flight: u16,
    record: SplitRecord,
    /// Heads that an earlier process had taken, in its order.
    left_over: VecDeque<u16>,
    guess: Option<(Head, Guess)>,
}

/// A head that was taken, and its descriptor.
#[derive(Clone, Copy, Debug)]
struct Head {
    number: u16,
    descriptor: Segment,
}

fn parts(memory: &MemoryTable, addr: &VringAddr, size: u16) -> Result<[Part; 3], RingError> {
    let size = usize::from(size);
    Ok([
        Part::find(memory, "descriptor table", addr.desc, size * Descriptor::SIZE, 16)?,
        Part::find(memory, "available ring", addr.avail, ENTRIES + size * 2 + 2, 2)?,
        Part::find(memory, "used ring", addr.used, ENTRIES + size * USED_ENTRY + 2, 4)?,
    ])
}

fn used_log(addr: &VringAddr) -> Option<u64> {
    (addr.flags & VringAddr::LOG != 0).then_some(addr.log)
}

impl SplitRing {
    pub(super) fn new(memory: &MemoryTable, setup: &Setup, size: NonZeroU16) -> Result<Self, RingError> {
        let size = size.get();
        let [desc, avail, used] = parts(memory, &setup.addr, size)?;
        let used_index = used.segment.load_u16(INDEX);
        Ok(Self {
            size,
            event_index: setup.has(feature::EVENT_IDX),
            indirect: setup.has(feature::INDIRECT),
            desc,
            avail,
            used,
            used_log: used_log(&setup.addr),
            next: setup.base as u16,
            seen: setup.base as u16,
            used_index,
            signalled: used_index,
            busy: vec![false; usize::from(size)],
            in_flight: 0,
            record: SplitRecord::default(),
            left_over: VecDeque::new(),
            guess: None,
        })
    }

    pub(super) fn relocate(&mut self, memory: &MemoryTable, addr: &VringAddr) -> Result<(), RingError> {
        [self.desc, self.avail, self.used] = parts(memory, addr, self.size)?;
        self.guess = None;
        self.used_log = used_log(addr);
        Ok(())
    }

    /// The record's own rules (virtio-independent) are in `inflight.rs`; this joins them with the ring.
    pub(super) fn recover(&mut self, record: Record) -> Result<(), RingError> {
        let mut record = SplitRecord::join(record, self.size, self.used_index)?;
        let heads = record.take_left_over();
        for &head in &heads {
            if let Some(busy) = self.busy.get_mut(usize::from(head)) {
                *busy = true;
            }
        }
        if record.is_shared() {
            // Everything between what was used and what is under way had been taken.
            self.in_flight = heads.len() as u16;
            self.next = self.used_index.wrapping_add(self.in_flight);
            self.seen = self.next;
        }
        self.left_over = heads.into();
        self.record = record;
        Ok(())
    }

    #[inline]
    pub(super) fn take(&mut self, memory: &MemoryTable, buffers: &mut Buffers) -> Result<Option<u16>, RingError> {
        if let Some(head) = self.left_over.pop_front() {
            self.walk(memory, buffers, head)?;
            return Ok(Some(head));
        }
        if self.next == self.seen && !self.look()? {
            return Ok(None);
        }
        let head = self.head(self.next);
        self.check(head)?;
        self.walk(memory, buffers, head)?;
        self.accept(head)?;
        Ok(Some(head))
    }

    #[expect(clippy::inline_always, reason = "what it finds stays in registers")]
    #[inline(always)]
    pub(super) fn has_more(&mut self) -> Result<bool, RingError> {
        Ok(!self.is_drained() || self.look()?)
    }

    #[inline]
    pub(super) fn is_drained(&self) -> bool {
        self.next == self.seen && !self.has_left_over()
    }

    /// See [`super::Ring::look_ahead`]; `ahead` is empty.
    #[inline]
    pub(super) fn look_ahead(
        &mut self,
        memory: &MemoryTable,
        ahead: &mut Vec<(u16, Option<Plain>)>,
        most: usize,
    ) -> Result<(), RingError> {
        if most == 0 || !self.indirect || self.has_left_over() || (self.next == self.seen && !self.look()?) {
            return Ok(());
        }
        let count = self.seen.wrapping_sub(self.next).min(most.min(AHEAD) as u16);
        if count <= FEW {
            self.fetch_guessed();
        }
        if count == 1 {
            let head = self.head(self.next);
            ahead.push((head, self.plain(memory, head)));
            return Ok(());
        }
        let mut tables = [None; AHEAD];
        for (at, table) in (0..count).zip(&mut tables) {
            let head = self.head(self.next.wrapping_add(at));
            ahead.push((head, None));
            *table = self.found(memory, head).map(|(_, found)| found.table);
        }
        for ((_, plain), table) in ahead.iter_mut().zip(&tables) {
            *plain = table.as_ref().and_then(|table| Plain::of(memory, table.read_words(0), Form::Linked));
        }
        Ok(())
    }

    /// See [`super::Ring::has_one`].
    #[inline]
    pub(super) fn has_one(&self) -> bool {
        self.seen.wrapping_sub(self.next) == 1 && !self.has_left_over()
    }

    /// See [`super::Ring::only`].
    #[expect(clippy::inline_always, reason = "what it finds stays in registers")]
    #[inline(always)]
    pub(super) fn only(&mut self, memory: &MemoryTable) -> Option<(u16, Plain)> {
        if !self.indirect {
            return None;
        }
        self.fetch_guessed();
        // It comes beside the request's own lines.
        self.fetch_index();
        let head = self.head(self.next);
        // What is wrong with one that may not be taken is said when that is tried.
        self.check(head).ok()?;
        Some((head, self.plain(memory, head)?))
    }

    /// What a head leads to, if that is plain: where it lies is the next guess.
    #[expect(clippy::inline_always, reason = "what it finds stays in registers")]
    #[inline(always)]
    fn plain(&mut self, memory: &MemoryTable, head: u16) -> Option<Plain> {
        if let Some((last, guess)) = self.guess.as_ref().filter(|(last, _)| last.number == head)
            && let Some(plain) = guess.again(memory, &last.descriptor, Form::Linked)
        {
            return Some(plain);
        }
        let (descriptor, found) = self.found(memory, head)?;
        let words = found.table.read_words(0);
        let plain = Plain::of(memory, words, Form::Linked)?;
        self.guess = Some((Head { number: head, descriptor }, Guess::after(memory, &found, words, &plain)));
        Some(plain)
    }

    /// A head's descriptor, and what it leads to, if that may be a plain request's table.
    #[expect(clippy::inline_always, reason = "as above")]
    #[inline(always)]
    fn found(&self, memory: &MemoryTable, head: u16) -> Option<(Segment, Found)> {
        let descriptor = self.desc.segment.part(usize::from(head) * Descriptor::SIZE, Descriptor::SIZE)?;
        Some((descriptor, ahead::table(memory, &descriptor, Form::Linked)?))
    }

    /// Has all lines fetched that the next request has if it lies where the last one did.
    #[expect(clippy::inline_always, reason = "as above")]
    #[inline(always)]
    fn fetch_guessed(&self) {
        if let Some((Head { descriptor, .. }, guess)) = &self.guess {
            descriptor.prefetch(0, 1);
            guess.fetch();
            self.fetch_used();
        }
    }

    /// Has the line of the used index fetched, to be written. A guest that spins looks there all the time, and takes it back: so it is asked for at
    /// once, which is all for a guest that looks rarely or from far away, and again right before it is written. In between it would go both ways
    /// for nothing.
    #[inline]
    pub(super) fn fetch_index(&self) {
        self.used.segment.prefetch_to_write();
    }

    /// Has the line of the next used entry fetched: the index after it waits for it.
    #[inline]
    fn fetch_used(&self) {
        let at = ENTRIES + usize::from(self.used_index & (self.size - 1)) * USED_ENTRY;
        // Not the first line: see `fetch_index`.
        if let Some(part) = self.used.segment.part(at, USED_ENTRY).filter(|_| at >= LINE) {
            part.prefetch_to_write();
        }
    }

    /// An entry of the available ring.
    #[inline]
    fn head(&self, index: u16) -> u16 {
        self.avail.segment.load_u16(ENTRIES + usize::from(index & (self.size - 1)) * 2)
    }

    /// Whether a head may be taken.
    #[inline]
    fn check(&self, head: u16) -> Result<(), RingError> {
        match self.busy.get(usize::from(head)) {
            None => Err(RingError::Index { index: head, size: self.size.into() }),
            Some(true) => Err(RingError::Twice(head)),
            Some(false) => Ok(()),
        }
    }

    /// Takes the next head.
    #[expect(clippy::inline_always, reason = "as above")]
    #[inline(always)]
    pub(super) fn accept(&mut self, head: u16) -> Result<(), RingError> {
        self.check(head)?;
        self.busy[usize::from(head)] = true;
        self.in_flight += 1;
        self.record.taken(head);
        self.next = self.next.wrapping_add(1);
        Ok(())
    }

    pub(super) fn pending(&mut self) -> Result<u32, RingError> {
        if self.next == self.seen {
            self.look()?;
        }
        Ok(self.seen.wrapping_sub(self.next).into())
    }

    /// Reads the guest's index: whether there is something to take.
    #[expect(clippy::inline_always, reason = "as above")]
    #[inline(always)]
    fn look(&mut self) -> Result<bool, RingError> {
        let seen = self.avail.segment.load_u16(INDEX);
        let pending = seen.wrapping_sub(self.next);
        if pending == 0 {
            return Ok(false);
        }
        if pending > self.size {
            return Err(RingError::TooManyAvailable { pending, size: self.size });
        }
        // Acquire, on our side of the race for new descriptors: the index was read before this, entries and descriptors are read
        // after. The guest's side writes them, then the index.
        fence(Ordering::Acquire);
        self.seen = seen;
        Ok(true)
    }

    #[inline]
    fn walk(&self, memory: &MemoryTable, buffers: &mut Buffers, head: u16) -> Result<(), RingError> {
        buffers.clear();
        let mut index = head;
        for _ in 0..self.size {
            if index >= self.size {
                return Err(RingError::Index { index, size: self.size.into() });
            }
            let descriptor: Descriptor = self.desc.segment.read_value(usize::from(index) * Descriptor::SIZE);
            let Descriptor { addr, len, flags, next } = descriptor;
            if flags & flag::INDIRECT != 0 {
                // Alone, or at a chain's end (virtio 1.3, 2.7.5.3.1).
                if !self.indirect || flags & flag::NEXT != 0 {
                    return Err(RingError::Indirect);
                }
                return buffers.add_indirect(memory, addr, len, true);
            }
            buffers.add(memory, addr, len, flags)?;
            if flags & flag::NEXT == 0 {
                return Ok(());
            }
            index = next;
        }
        Err(RingError::Endless)
    }

    #[expect(clippy::inline_always, reason = "of a batch of one, and without a log, little is left")]
    #[inline(always)]
    pub(super) fn give_back(&mut self, batch: &[Done], log: Option<&DirtyLog>) {
        if batch.is_empty() {
            return;
        }
        let mut index = self.used_index;
        for done in batch {
            let offset = ENTRIES + usize::from(index & (self.size - 1)) * USED_ENTRY;
            let word = u64::from(done.token) | u64::from(done.len) << 32;
            self.used.segment.write_value(offset, &word);
            self.log(log, offset, USED_ENTRY);
            self.record.giving_back(done.token);
            index = index.wrapping_add(1);
        }
        // Release, on our side of the race for used entries: entries and data are written before the index. The guest's side reads
        // the index, then the entries. The record's list of this batch is also complete before the index says that it is used.
        fence(Ordering::Release);
        self.used.segment.store_u16(INDEX, index);
        self.log(log, INDEX, 2);
        // A successor must not see the record say less than the index.
        compiler_fence(Ordering::Release);
        for done in batch {
            self.record.given_back(done.token);
            if let Some(busy) = self.busy.get_mut(usize::from(done.token)) {
                assert!(std::mem::replace(busy, false), "a head is given back once");
            }
        }
        self.record.batch_ends(index);
        self.used_index = index;
        // There are as many as were taken.
        self.in_flight -= batch.len() as u16;
    }

    fn log(&self, log: Option<&DirtyLog>, offset: usize, len: usize) {
        if let Some((log, base)) = log.zip(self.used_log) {
            log.mark(base.saturating_add(offset as u64), len as u64);
        }
    }

    pub(super) fn mark(&self, log: &DirtyLog) {
        self.log(Some(log), 0, ENTRIES + usize::from(self.size) * USED_ENTRY + 2);
    }

    #[inline]
    pub(super) fn wants_call(&mut self) -> bool {
        let (new, old) = (self.used_index, self.signalled);
        if new == old {
            return false;
        }
        self.signalled = new;
        // Our side of the race between our new index and the guest's wish: our index was stored before this, its wish is read after.
        // The guest's side stores its wish, then (a full fence too) reads our index once more before it sleeps.
        full_fence();
        if self.event_index {
            let event = self.avail.segment.load_u16(ENTRIES + usize::from(self.size) * 2);
            passes(event, new, old)
        } else {
            self.avail.segment.load_u16(FLAGS) & QUIET == 0
        }
    }

    pub(super) fn arm(&mut self, log: Option<&DirtyLog>) -> bool {
        if self.event_index {
            self.set_event(self.next, log);
        } else {
            self.set_quiet(0, log);
        }
        // Our side of the race between the guest's new index and our wish for a kick: the wish was stored before this, the index is
        // read after. The guest's side stores its index, then (a full fence too) reads our wish.
        fence(Ordering::SeqCst);
        self.next != self.avail.segment.load_u16(INDEX)
    }

    pub(super) fn disarm(&mut self, log: Option<&DirtyLog>) {
        if self.event_index {
            // The guest has passed it. A wish that is left over would cost it a kick for a request that we see anyway.
            self.set_event(self.next.wrapping_sub(1), log);
        } else {
            self.set_quiet(QUIET, log);
        }
    }

    /// The guest kicks when its index passes this one.
    fn set_event(&self, index: u16, log: Option<&DirtyLog>) {
        let offset = ENTRIES + usize::from(self.size) * USED_ENTRY;
        self.used.segment.store_u16(offset, index);
        self.log(log, offset, 2);
    }

    fn set_quiet(&self, flags: u16, log: Option<&DirtyLog>) {
        self.used.segment.store_u16(FLAGS, flags);
        self.log(log, FLAGS, 2);
    }

    pub(super) fn base(&self) -> u32 {
        self.next.into()
    }

    /// By the last used entry, whose length would say of a status.
    pub(super) fn is_fresh(&self) -> bool {
        let last = ENTRIES + usize::from(self.size - 1) * USED_ENTRY;
        self.used.segment.read_value::<u64>(last) == 0
    }

    pub(super) fn in_flight(&self) -> u16 {
        self.in_flight
    }

    pub(super) fn is_on_record(&self) -> bool {
        self.record.is_shared()
    }

    pub(super) fn has_left_over(&self) -> bool {
        !self.left_over.is_empty()
    }
}
