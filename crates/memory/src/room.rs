//! How much of this process's addresses those have who share memory with it.
//!
//! A memory file is as long as its owner says and costs nothing while nobody touches it. Without limits one peer could map all the
//! addresses that the process has (128 TiB), and neither another guest's memory nor an allocation of our own would find any. Each
//! kind of peers has room of its own, and all rooms together leave 18 TiB, for volumes in memory and for the process itself:
//!
//! ```text
//!   guests 84 + 14 TiB   programs 6 + 2 TiB   bookkeeping 4 TiB
//! ```
//!
//! The last eighth of a room is for those who have little: who has much already does not keep others out. What a peer has had at once
//! stays its own until it leaves (what a mapping took that then failed, too), so that nobody is refused what it had a moment ago. What it
//! has beyond that, because what it has unmapped is still used or not yet gone, is in the room's spare part (the second number), of which
//! the last eighth is kept alike.

use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use crate::guest::MAX_REGIONS;

const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// Guests, by their devices. One has twice what large machines need (12 TiB, and as many regions as a device may have): what it unmaps
/// counts until nothing uses it any more. The mappings of all rooms together leave 2560 of the guarded ones, for volumes in memory.
pub(crate) static GUESTS: Room = Room {
    each: Amount { mappings: 2 * MAX_REGIONS, bytes: 24 * TIB },
    little: Amount { mappings: 1024, bytes: 2 * TIB },
    all: Amount { mappings: 19_456, bytes: 84 * TIB },
    spare: Amount { mappings: 5120, bytes: 14 * TIB },
    keeps: true,
    taken: Mutex::new(Taken::NONE),
};

/// Regions of a program's session. FastPath maps one.
pub(crate) const PROGRAM_REGIONS: usize = 64;

/// Programs, by their sessions: FastPath maps 1 TiB and a little at most.
pub(crate) static PROGRAMS: Room = Room {
    each: Amount { mappings: 2 * PROGRAM_REGIONS, bytes: 2 * TIB },
    little: Amount { mappings: 8, bytes: 64 * GIB },
    all: Amount { mappings: 3072, bytes: 6 * TIB },
    spare: Amount { mappings: 512, bytes: 2 * TIB },
    keeps: false,
    taken: Mutex::new(Taken::NONE),
};

/// What peers share beside guests' memory, each piece by itself: records of requests, and logs of changed pages, of which one for 52 bits of
/// addresses has 128 GiB, one for 47 bits 4 GiB, and one for a machine of 12 TiB 384 MiB.
pub(crate) static BOOKKEEPING: Room = Room {
    each: Amount { mappings: 1, bytes: 128 * GIB },
    little: Amount { mappings: 1, bytes: GIB },
    all: Amount { mappings: 2048, bytes: 4 * TIB },
    spare: Amount::NONE,
    keeps: false,
    taken: Mutex::new(Taken::NONE),
};

/// Mappings, and their bytes together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Amount {
    pub(crate) mappings: usize,
    pub(crate) bytes: u64,
}

impl Amount {
    const NONE: Self = Self { mappings: 0, bytes: 0 };

    fn one(bytes: u64) -> Self {
        Self { mappings: 1, bytes }
    }

    fn plus(self, other: Self) -> Self {
        let mappings = self.mappings.saturating_add(other.mappings);
        Self { mappings, bytes: self.bytes.saturating_add(other.bytes) }
    }

    fn minus(self, other: Self) -> Self {
        let mappings = self.mappings.saturating_sub(other.mappings);
        Self { mappings, bytes: self.bytes.saturating_sub(other.bytes) }
    }

    fn max(self, other: Self) -> Self {
        Self { mappings: self.mappings.max(other.mappings), bytes: self.bytes.max(other.bytes) }
    }

    fn is_within(self, limit: Self) -> bool {
        self.mappings <= limit.mappings && self.bytes <= limit.bytes
    }

    /// Whether one peer may come from `self` to `now`, where all have `all` then. Mappings and bytes each by themselves: a large
    /// machine that cuts its memory anew has no more bytes than before.
    fn may_become(self, now: Self, little: Self, all: Self, limit: Self) -> bool {
        let fits = |of: fn(Self) -> u64| {
            let limit = of(limit);
            let most = if of(now) > of(little) { limit / 8 * 7 } else { limit };
            of(now) <= of(self) || of(all) <= most
        };
        fits(|amount| amount.mappings as u64) && fits(|amount| amount.bytes)
    }
}

/// What one peer has.
#[derive(Clone, Copy, Debug)]
struct Own {
    /// Without what it has unmapped.
    live: Amount,
    held: Amount,
    /// The most that was live at once.
    most: Amount,
}

impl Own {
    const NONE: Self = Self { live: Amount::NONE, held: Amount::NONE, most: Amount::NONE };

    fn over(self) -> Amount {
        self.held.minus(self.most)
    }
}

/// What all of them have.
#[derive(Clone, Copy, Debug)]
struct Taken {
    most: Amount,
    over: Amount,
}

impl Taken {
    const NONE: Self = Self { most: Amount::NONE, over: Amount::NONE };

    /// The same when one of them has something else.
    fn with(self, before: Own, now: Own) -> Self {
        Self { most: self.most.minus(before.most).plus(now.most), over: self.over.minus(before.over()).plus(now.over()) }
    }
}

/// What one kind of peers may have mapped.
#[derive(Debug)]
pub(crate) struct Room {
    /// One of them, with what it has unmapped and is still there.
    pub(crate) each: Amount,
    /// One of them, in the last eighth.
    pub(crate) little: Amount,
    /// All of them together: of each what it has had at once.
    pub(crate) all: Amount,
    /// All of them together beyond that.
    pub(crate) spare: Amount,
    /// What the last worker had mapped for one of them is mapped again, however much it is: an older one may have had other limits.
    pub(crate) keeps: bool,
    taken: Mutex<Taken>,
}

/// Why there is no room for a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// One peer may not have so much.
    Own(Amount),
    /// All of them have so much that this one gets no more.
    All,
}

impl Room {
    #[cfg(test)]
    pub(crate) const fn new(each: Amount, little: Amount, all: Amount, spare: Amount, keeps: bool) -> Self {
        Self { each, little, all, spare, keeps, taken: Mutex::new(Taken::NONE) }
    }

    /// Whether a peer may come from `before` to `now`, and all of them have `all` then. `again`: the last worker had it mapped, so that
    /// its own limits held.
    fn check(&self, before: Own, now: Own, all: Taken, again: bool) -> Result<(), NoRoom> {
        if again && self.keeps {
            return Ok(());
        }
        if !again && !now.held.is_within(self.each) {
            return Err(NoRoom::Own(self.each));
        }
        // With what those who have left hold beyond the spare part: it goes by itself.
        let most = all.most.plus(all.over.minus(self.spare));
        let (little, little_over) = if again { (self.all, self.spare) } else { (self.little, self.little) };
        let fits = before.most.may_become(now.most, little, most, self.all)
            && before.over().may_become(now.over(), little_over, all.over, self.spare);
        if fits { Ok(()) } else { Err(NoRoom::All) }
    }
}

fn lock<T>(amount: &Mutex<T>) -> MutexGuard<'_, T> {
    amount.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What one peer has of a room.
#[derive(Debug)]
pub(crate) struct Account {
    room: &'static Room,
    /// Changed with the room's lock held.
    own: Mutex<Own>,
}

impl Account {
    pub(crate) fn new(room: &'static Room) -> Arc<Self> {
        Arc::new(Self { room, own: Mutex::new(Own::NONE) })
    }

    /// Takes room for a mapping of so many bytes, before it is made; `again`: it is one that the last worker had.
    pub(crate) fn take(self: &Arc<Self>, bytes: u64, again: bool) -> Result<Share, NoRoom> {
        let one = Amount::one(bytes);
        self.change(|before, all| {
            let live = before.live.plus(one);
            let now = Own { live, held: before.held.plus(one), most: before.most.max(live) };
            self.room.check(before, now, all.with(before, now), again).map(|()| now)
        })?;
        Ok(Share { account: Arc::clone(self), bytes, is_retired: AtomicBool::new(false) })
    }

    /// The peer has left: of what it had stays what is still mapped.
    pub(crate) fn leave(&self) {
        self.set(|own| Own { most: own.live, ..own });
    }

    fn set(&self, now: impl FnOnce(Own) -> Own) {
        let _: Result<(), NoRoom> = self.change(|before, _| Ok(now(before)));
    }

    fn change(&self, now: impl FnOnce(Own, Taken) -> Result<Own, NoRoom>) -> Result<(), NoRoom> {
        let (mut all, mut own) = (lock(&self.room.taken), lock(&self.own));
        let (before, now) = (*own, now(*own, *all)?);
        (*all, *own) = (all.with(before, now), now);
        Ok(())
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.set(|_| Own::NONE);
    }
}

/// The room of one mapping, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    account: Arc<Account>,
    bytes: u64,
    /// Changed with the account's lock held.
    is_retired: AtomicBool,
}

impl Share {
    /// The mapping's owner has unmapped it, though it is still there. Nothing, where `account` is not the owner's.
    pub(crate) fn retire(&self, account: &Arc<Account>) {
        if !Arc::ptr_eq(&self.account, account) {
            return;
        }
        self.account.set(|own| Own { live: self.live_without(own), ..own });
    }

    /// What is live without this, which is so from now on.
    fn live_without(&self, own: Own) -> Amount {
        let was_live = !self.is_retired.swap(true, Ordering::Relaxed);
        if was_live { own.live.minus(Amount::one(self.bytes)) } else { own.live }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.account.set(|own| Own { live: self.live_without(own), held: own.held.minus(Amount::one(self.bytes)), ..own });
    }
}
