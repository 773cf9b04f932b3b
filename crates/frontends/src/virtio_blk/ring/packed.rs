//! The packed virtqueue (virtio 1.3, 2.8).
//!
//! A request is named by the state that its first descriptor was fetched into: the same index in our own table and in the record of
//! requests under way. States that are free form a list, and a request's states are linked by it too.

use std::{
    collections::VecDeque,
    num::NonZeroU16,
    sync::atomic::{Ordering, compiler_fence, fence},
};

use millrace_memory::{Segment, full_fence};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{
    super::{
        dirty::DirtyLog,
        inflight::{InflightError, PackedHeader, PackedRecord, PackedState, Record},
        memory::MemoryTable,
        message::VringAddr,
    },
    Buffers, Done, Part, Plain, RingError, Setup,
    ahead::{self, AHEAD, FEW, Form, Found, Guess},
    chain::flag,
    feature, passes,
};

/// A descriptor of a packed ring.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
struct Descriptor {
    addr: u64,
    len: u32,
    id: u16,
    flags: u16,
}

const SIZE: usize = size_of::<Descriptor>();
/// Offset of a descriptor's flags.
const FLAGS_AT: usize = 14;

/// Offsets and values of an event suppression area (virtio 1.3, 2.8.14).
mod event {
    pub(super) const OFF_WRAP: usize = 0;
    pub(super) const FLAGS: usize = 2;
    pub(super) const SIZE: usize = 4;
    pub(super) const ENABLE: u16 = 0;
    pub(super) const DISABLE: u16 = 1;
    pub(super) const DESC: u16 = 2;
}

/// A place in the ring, and the wrap counter there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position {
    index: u16,
    wrap: bool,
}

impl Position {
    /// As `SET_VRING_BASE` writes it.
    fn from_base(half: u16, size: u16) -> Result<Self, RingError> {
        let position = Self { index: half & 0x7fff, wrap: half & 0x8000 != 0 };
        let wrong = RingError::Index { index: position.index, size: size.into() };
        if position.index < size { Ok(position) } else { Err(wrong) }
    }

    fn to_base(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }

    /// `count` places on; `count` is at most `size`.
    fn advance(&mut self, count: u16, size: u16) {
        let next = u32::from(self.index) + u32::from(count);
        let wraps = next >= u32::from(size);
        self.index = if wraps { (next - u32::from(size)) as u16 } else { next as u16 };
        self.wrap ^= wraps;
    }

    /// As the record has it.
    fn pair(self) -> (u16, bool) {
        (self.index, self.wrap)
    }

    fn offset(self) -> usize {
        usize::from(self.index) * SIZE
    }

    /// Flags of a descriptor here that is available, or used.
    fn available(self) -> u16 {
        if self.wrap { flag::AVAIL } else { flag::USED }
    }

    fn used(self) -> u16 {
        if self.wrap { flag::AVAIL | flag::USED } else { 0 }
    }
}

/// A descriptor's state.
#[derive(Clone, Copy, Debug, Default)]
struct State {
    next: u16,
    /// Of a request's first: its last state, how many it has, its buffer's name.
    last: u16,
    num: u16,
    id: u16,
    busy: bool,
}

/// A request that an earlier process had taken, as the record has it.
#[derive(Debug)]
struct LeftOver {
    token: u16,
    descriptors: Vec<(u64, u32, u16)>,
}

/// A packed ring.
#[derive(Debug)]
pub(crate) struct PackedRing {
    size: u16,
    event_index: bool,
    indirect: bool,
    ring: Part,
    /// The guest's event suppression area.
    driver: Part,
    /// Ours.
    device: Part,
    logged: bool,
    next: Position,
    used: Position,
    /// How far the used position went since the guest was last interrupted, or might have been.
    since: u32,
    states: Vec<State>,
    free_head: u16,
    /// Descriptors that were fetched and not given back.
    fetched: u16,
    in_flight: u16,
    counter: u64,
    record: PackedRecord,
    left_over: VecDeque<LeftOver>,
    /// Where the last request lay, while there are few.
    guess: Option<Guess>,
}

fn parts(memory: &MemoryTable, addr: &VringAddr, size: u16) -> Result<[Part; 3], RingError> {
    Ok([
        Part::find(memory, "descriptor ring", addr.desc, usize::from(size) * SIZE, 16)?,
        Part::find(memory, "driver's event area", addr.avail, event::SIZE, 4)?,
        Part::find(memory, "device's event area", addr.used, event::SIZE, 4)?,
    ])
}

impl PackedRing {
    pub(super) fn new(memory: &MemoryTable, setup: &Setup, size: NonZeroU16) -> Result<Self, RingError> {
        let size = size.get();
        let [ring, driver, device] = parts(memory, &setup.addr, size)?;
        let next = Position::from_base(setup.base as u16, size)?;
        let used = Position::from_base((setup.base >> 16) as u16, size)?;
        Ok(Self {
            size,
            event_index: setup.has(feature::EVENT_IDX),
            indirect: setup.has(feature::INDIRECT),
            ring,
            driver,
            device,
            logged: setup.addr.flags & VringAddr::LOG != 0,
            next,
            used,
            since: 0,
            states: free_list(size),
            free_head: 0,
            fetched: 0,
            in_flight: 0,
            counter: 0,
            record: PackedRecord::default(),
            left_over: VecDeque::new(),
            guess: None,
        })
    }

    pub(super) fn relocate(&mut self, memory: &MemoryTable, addr: &VringAddr) -> Result<(), RingError> {
        [self.ring, self.driver, self.device] = parts(memory, addr, self.size)?;
        self.guess = None;
        self.logged = addr.flags & VringAddr::LOG != 0;
        Ok(())
    }

    pub(super) fn recover(&mut self, record: Record) -> Result<(), RingError> {
        let (record, header) = PackedRecord::join(record, self.size, self.used.pair())?;
        self.states = free_list(record.room().unwrap_or(self.size));
        self.record = record;
        let Some(header) = header else { return Ok(()) };
        let header = self.settle(header)?;
        self.used = Position { index: header.used_idx, wrap: header.used_wrap != 0 };
        (self.since, self.free_head) = (0, header.free_head);
        self.take_up(header.free_head)?;
        // Everything between what was used and what is under way had been taken.
        self.next = self.used;
        self.next.advance(self.fetched, self.size);
        Ok(())
    }

    /// Completes the last batch if the guest can see it, or takes it back.
    fn settle(&self, header: PackedHeader) -> Result<PackedHeader, RingError> {
        let wrong = InflightError::Garbled("its used position is not in the ring");
        if header.used_idx >= self.size || header.old_used_idx >= self.size {
            return Err(wrong.into());
        }
        let old = Position { index: header.old_used_idx, wrap: header.old_used_wrap != 0 };
        let new = Position { index: header.used_idx, wrap: header.used_wrap != 0 };
        let flags = self.ring.segment.load_u16(old.offset() + FLAGS_AT);
        // Not "is it used": the guest may have taken the batch since, and offered that place again.
        let visible = old != new && flags & (flag::AVAIL | flag::USED) != old.available();
        let mut header = header;
        if !visible {
            // Parts of the batch may have been written behind its first, which alone makes them visible: they must not look used
            // when the guest comes to them.
            let mut at = old;
            for _ in 0..self.size {
                if at == new {
                    break;
                }
                self.ring.segment.store_u16(at.offset() + FLAGS_AT, at.available());
                at.advance(1, self.size);
            }
            header.free_head = header.old_free_head;
            (header.used_idx, header.used_wrap) = (header.old_used_idx, header.old_used_wrap);
        }
        self.record.settle(&header);
        Ok(header)
    }

    /// Reads lists and requests from the record: every state must be in one of them, once.
    fn take_up(&mut self, free_head: u16) -> Result<(), RingError> {
        let room = self.states.len();
        let mut known = vec![false; room];
        let mut visit = |index: u16| {
            let seen = known.get_mut(usize::from(index)).map(|seen| std::mem::replace(seen, true));
            if seen == Some(false) { Ok(()) } else { Err(RingError::from(InflightError::Garbled("its lists cross"))) }
        };
        let mut at = free_head;
        while usize::from(at) < room {
            visit(at)?;
            let Some(PackedState { next, .. }) = self.record.state(at) else { break };
            self.record.given_back(at);
            self.states[usize::from(at)] = State { next, ..State::default() };
            at = next;
        }
        let heads = (0..room as u16).filter_map(|index| Some((index, self.record.state(index)?)));
        let mut heads: Vec<(u16, PackedState)> = heads.filter(|(_, state)| state.inflight == 1).collect();
        heads.sort_by_key(|(_, state)| state.counter);
        for (token, head) in heads {
            if head.num == 0 || head.num > self.size - self.fetched {
                return Err(InflightError::Garbled("a request has more descriptors than the ring").into());
            }
            let mut descriptors = Vec::with_capacity(usize::from(head.num));
            let (mut at, mut last, mut id) = (token, token, head.id);
            for _ in 0..head.num {
                visit(at)?;
                let Some(state) = self.record.state(at) else { break };
                descriptors.push((state.addr, state.len, state.flags));
                self.states[usize::from(at)].next = state.next;
                (last, at, id) = (at, state.next, state.id);
            }
            let first = &mut self.states[usize::from(token)];
            *first = State { last, num: head.num, id, busy: true, ..*first };
            self.fetched += head.num;
            self.in_flight += 1;
            self.counter = head.counter.wrapping_add(1);
            self.left_over.push_back(LeftOver { token, descriptors });
        }
        if known.contains(&false) {
            // There would be none for a request that the ring has room for.
            return Err(InflightError::Garbled("states are missing").into());
        }
        Ok(())
    }

    #[inline]
    pub(super) fn take(&mut self, memory: &MemoryTable, buffers: &mut Buffers) -> Result<Option<u16>, RingError> {
        if let Some(LeftOver { token, descriptors }) = self.left_over.pop_front() {
            buffers.clear();
            for (addr, len, flags) in descriptors {
                self.add(memory, buffers, addr, len, flags)?;
            }
            return Ok(Some(token));
        }
        if !self.is_available() {
            return Ok(None);
        }
        // Acquire, on our side of the race for new descriptors: the first one's flags were read before this, all else is read
        // after. The guest's side writes all else, then the first one's flags.
        fence(Ordering::Acquire);
        self.fetch(memory, buffers).map(Some)
    }

    #[inline]
    fn is_available(&self) -> bool {
        // A full ring shows descriptors of the last round, which look as if they were used or available again.
        self.fetched < self.size && self.is_available_at(self.next)
    }

    /// Whether a place that is not under way has a descriptor of this round.
    #[inline]
    fn is_available_at(&self, place: Position) -> bool {
        let flags = self.ring.segment.load_u16(place.offset() + FLAGS_AT);
        flags & (flag::AVAIL | flag::USED) == place.available()
    }

    #[inline]
    pub(super) fn has_more(&self) -> bool {
        self.is_available() || self.has_left_over()
    }

    /// See [`super::Ring::look_ahead`]; `ahead` is empty. Only what is plain is of one descriptor for sure: what comes after another
    /// request cannot be told before that is taken. Requests go by the states that they will be fetched into.
    #[inline]
    pub(super) fn look_ahead(&mut self, memory: &MemoryTable, ahead: &mut Vec<(u16, Option<Plain>)>, most: usize) {
        if !self.indirect || self.has_left_over() {
            return;
        }
        let most = (self.size - self.fetched).min(most.min(AHEAD) as u16);
        let (mut count, mut place) = (0, self.next);
        while count < most && self.is_available_at(place) {
            count += 1;
            place.advance(1, self.size);
        }
        if count == 0 {
            return;
        }
        // Acquire, as in `take`: all flags were read before this, what they stand for is read after.
        fence(Ordering::Acquire);
        if let Some(guess) = self.guess.as_ref().filter(|_| count <= FEW) {
            guess.fetch();
        }
        let mut tables = [None; AHEAD];
        let (mut place, mut token) = (self.next, self.free_head);
        for table in tables.iter_mut().take(count.into()) {
            *table = self.found(memory, place).map(|found| found.table);
            place.advance(1, self.size);
        }
        for table in tables.iter().map_while(Option::as_ref) {
            let Some(plain) = Plain::of(memory, table.read_words(0), Form::InOrder) else { break };
            ahead.push((token, Some(plain)));
            token = self.states[usize::from(token)].next;
        }
    }

    /// See [`super::Ring::has_one`].
    #[inline]
    pub(super) fn has_one(&self) -> bool {
        let mut after = self.next;
        after.advance(1, self.size);
        let has_two = self.size - self.fetched > 1 && self.is_available_at(after);
        !has_two && !self.has_left_over()
    }

    /// See [`super::Ring::only`].
    #[expect(clippy::inline_always, reason = "what it finds stays in registers")]
    #[inline(always)]
    pub(super) fn only(&mut self, memory: &MemoryTable) -> Option<(u16, Plain)> {
        if !self.indirect {
            return None;
        }
        // Acquire, as in `take`: its flags were read before this, what they stand for is read after.
        fence(Ordering::Acquire);
        if let Some(guess) = &self.guess {
            guess.fetch();
            if let Some(plain) = guess.again(memory, &self.descriptor(self.next)?, Form::InOrder) {
                return Some((self.free_head, plain));
            }
        }
        let found = self.found(memory, self.next)?;
        let words = found.table.read_words(0);
        let plain = Plain::of(memory, words, Form::InOrder)?;
        self.guess = Some(Guess::after(memory, &found, words, &plain));
        Some((self.free_head, plain))
    }

    /// The descriptor at a place.
    #[inline]
    fn descriptor(&self, place: Position) -> Option<Segment> {
        self.ring.segment.part(place.offset(), size_of::<Descriptor>())
    }

    /// What it leads to, if that may be a plain request's table.
    #[inline]
    fn found(&self, memory: &MemoryTable, place: Position) -> Option<Found> {
        ahead::table(memory, &self.descriptor(place)?, Form::InOrder)
    }

    /// Chains are counted by their last descriptors; one that goes on and on is one.
    pub(super) fn pending(&self) -> u32 {
        let (mut count, mut is_open, mut place) = (0, false, self.next);
        for _ in self.fetched..self.size {
            // Only a chain's first descriptor says whether all of it is available.
            if !is_open && !self.is_available_at(place) {
                break;
            }
            is_open = self.ring.segment.load_u16(place.offset() + FLAGS_AT) & flag::NEXT != 0;
            count += u32::from(!is_open);
            place.advance(1, self.size);
        }
        count + u32::from(is_open)
    }

    /// Takes the request at the next position, which was looked at and has one descriptor.
    #[inline]
    pub(super) fn accept(&mut self, token: u16) -> Result<(), RingError> {
        // One before it had another number of descriptors when it was taken than when it was looked at.
        if token != self.free_head || self.fetched >= self.size {
            return Err(RingError::Changed);
        }
        // For the record, and its name: where its data are was copied before.
        let Descriptor { addr, len, id, flags } = self.ring.segment.read_value(self.next.offset());
        self.record.fetched(token, addr, len, flags, id);
        let mut after = self.next;
        after.advance(1, self.size);
        let free = self.states[usize::from(token)].next;
        self.started((token, token), 1, id, (after, free));
        Ok(())
    }

    /// A request of `num` descriptors is under way, from its first state to its last.
    #[inline]
    fn started(&mut self, (token, last): (u16, u16), num: u16, id: u16, (next, free): (Position, u16)) {
        let first = &mut self.states[usize::from(token)];
        *first = State { last, num, id, busy: true, ..*first };
        self.record.taken(token, last, num, self.counter, free);
        self.counter = self.counter.wrapping_add(1);
        (self.next, self.free_head) = (next, free);
        self.fetched += num;
        self.in_flight += 1;
    }

    /// Takes the chain at the next position, which is available.
    fn fetch(&mut self, memory: &MemoryTable, buffers: &mut Buffers) -> Result<u16, RingError> {
        buffers.clear();
        let token = self.free_head;
        let (mut at, mut num) = (self.next, 0_u16);
        let mut free = token;
        let (id, last) = loop {
            if num >= self.size - self.fetched {
                return Err(RingError::Endless);
            }
            let Descriptor { addr, len, id, flags } = self.ring.segment.read_value(at.offset());
            self.add(memory, buffers, addr, len, flags)?;
            // There is a free state for each descriptor that was not fetched.
            let last = free;
            self.record.fetched(last, addr, len, flags, id);
            free = self.states[usize::from(last)].next;
            num += 1;
            at.advance(1, self.size);
            if flags & flag::NEXT == 0 {
                break (id, last);
            }
        };
        self.started((token, last), num, id, (at, free));
        Ok(token)
    }

    fn add(&self, memory: &MemoryTable, buffers: &mut Buffers, addr: u64, len: u32, flags: u16) -> Result<(), RingError> {
        if flags & flag::INDIRECT == 0 {
            return buffers.add(memory, addr, len, flags);
        }
        // Never together with NEXT (virtio 1.3, 2.8.7).
        if !self.indirect || flags & flag::NEXT != 0 {
            return Err(RingError::Indirect);
        }
        buffers.add_indirect(memory, addr, len, false)
    }

    #[inline]
    pub(super) fn give_back(&mut self, batch: &[Done], log: Option<&DirtyLog>) {
        if batch.is_empty() {
            return;
        }
        let (first, mut end) = (self.used, self.used);
        for done in batch {
            end.advance(self.states[usize::from(done.token)].num, self.size);
        }
        // Before anything of the batch is in the ring: who comes after us takes it out of there, or the guest would come to it behind the first.
        self.record.moving(end.pair(), first.pair());
        let mut first_flags = 0;
        for (at, done) in batch.iter().enumerate() {
            let State { last, num, id, .. } = self.free(done.token);
            let flags = self.used.used() | if done.len > 0 { flag::WRITE } else { 0 };
            let offset = self.used.offset();
            let word = u64::from(done.len) | u64::from(id) << 32;
            // Length and name; the flags are stored by themselves.
            self.ring.segment.write_at(offset + 8, &word.to_le_bytes()[..6]);
            if at == 0 {
                first_flags = flags;
            } else {
                self.ring.segment.store_u16(offset + FLAGS_AT, flags);
            }
            self.log_ring(log, offset);
            self.record.freeing(done.token, last, self.states[usize::from(last)].next);
            self.used.advance(num, self.size);
            self.since += u32::from(num);
            self.fetched -= num;
        }
        // Release, on our side of the race for used descriptors: data, the record, and the whole batch but this word, are written before it. The
        // guest's side reads the flags of the first, then the rest; it comes to no other one of the batch before.
        fence(Ordering::Release);
        self.ring.segment.store_u16(first.offset() + FLAGS_AT, first_flags);
        self.log_ring(log, first.offset());
        // A successor must not see the record say less than the ring.
        compiler_fence(Ordering::Release);
        for done in batch {
            self.record.given_back(done.token);
        }
        self.record.batch_ends(self.free_head, self.used.pair());
        self.in_flight -= batch.len() as u16;
    }

    /// A request's states go to the head of the free list.
    fn free(&mut self, token: u16) -> State {
        let state = self.states[usize::from(token)];
        assert!(state.busy, "a request is given back once");
        self.states[usize::from(token)].busy = false;
        self.states[usize::from(state.last)].next = self.free_head;
        self.free_head = token;
        state
    }

    fn log_ring(&self, log: Option<&DirtyLog>, offset: usize) {
        if let Some(log) = log.filter(|_| self.logged) {
            log.mark(self.ring.guest.0.saturating_add(offset as u64), SIZE as u64);
        }
    }

    pub(super) fn mark(&self, log: &DirtyLog) {
        if self.logged {
            log.mark(self.ring.guest.0, (usize::from(self.size) * SIZE) as u64);
        }
        self.log_device(Some(log));
    }

    #[inline]
    pub(super) fn wants_call(&mut self) -> bool {
        if self.since == 0 {
            return false;
        }
        // What lies further back than the ring is long was passed at least once.
        let since = std::mem::take(&mut self.since).min(self.size.into()) as u16;
        // Our side of the race between our used descriptors and the guest's wish: they were stored before this, its wish is read
        // after. The guest's side stores its wish, then (a full fence too) looks for used descriptors before it sleeps.
        full_fence();
        match self.driver.segment.load_u16(event::FLAGS) {
            event::ENABLE => true,
            event::DESC if self.event_index => {
                let wish = self.driver.segment.load_u16(event::OFF_WRAP);
                let (mut at, wrap) = (wish & 0x7fff, wish & 0x8000 != 0);
                if wrap != self.used.wrap {
                    at = at.wrapping_sub(self.size);
                }
                // Counted so that the ring's end is no break.
                passes(at, self.used.index, self.used.index.wrapping_sub(since))
            }
            _ => false,
        }
    }

    pub(super) fn arm(&mut self, log: Option<&DirtyLog>) -> bool {
        let flags = if self.event_index { event::DESC } else { event::ENABLE };
        if self.event_index {
            self.device.segment.store_u16(event::OFF_WRAP, self.next.to_base());
            // Release: who reads the new flags also reads the new position.
            fence(Ordering::Release);
        }
        self.device.segment.store_u16(event::FLAGS, flags);
        self.log_device(log);
        // Our side of the race between the guest's new descriptors and our wish for a kick: the wish was stored before this, the
        // flags are read after. The guest's side stores its descriptors, then (a full fence too) reads our wish.
        fence(Ordering::SeqCst);
        self.is_available()
    }

    pub(super) fn disarm(&mut self, log: Option<&DirtyLog>) {
        self.device.segment.store_u16(event::FLAGS, event::DISABLE);
        self.log_device(log);
    }

    fn log_device(&self, log: Option<&DirtyLog>) {
        if let Some(log) = log.filter(|_| self.logged) {
            log.mark(self.device.guest.0, event::SIZE as u64);
        }
    }

    pub(super) fn base(&self) -> u32 {
        u32::from(self.next.to_base()) | u32::from(self.used.to_base()) << 16
    }

    /// By the last descriptor, whose flags would say of a round: available in one, or used with a status.
    pub(super) fn is_fresh(&self) -> bool {
        self.ring.segment.load_u16(usize::from(self.size - 1) * SIZE + FLAGS_AT) == 0
    }

    pub(super) fn in_flight(&self) -> u16 {
        self.in_flight
    }

    pub(super) fn is_on_record(&self) -> bool {
        self.record.room().is_some()
    }

    pub(super) fn has_left_over(&self) -> bool {
        !self.left_over.is_empty()
    }
}

/// `count` free states; the list's end is the number after the last.
fn free_list(count: u16) -> Vec<State> {
    (1..=count).map(|next| State { next, ..State::default() }).collect()
}
