//! The device state region: everything about a controller that its guest can observe.
//!
//! It lies in a memfd, so that it can outlive the process that works on it (docs/roadmap.md, survival). One thread writes it;
//! the fields are cells, which cost nothing on x86 and arm64. Stores become visible to a successor in program order (it maps
//! the region only after the writer is gone), so the rule is on the compiler alone: where two stores must not trade places,
//! [`commit`] stands between them.
//!
//! Rule of order, for every command that was accepted: write the CQE into guest memory → advance the CQ's tail → clear what said
//! that the command was accepted. A batch of commands that finish at once is never accepted: write the CQEs, each with the SQ's
//! head after its own command → move the SQ's head behind the last → advance the CQ's tail behind the last (`io/batch.rs`; of one, `io/only.rs`). A
//! successor finds out how far that came from the guest's memory: entries with the phase tag of the next pass, from the CQ's tail
//! on, are posted, and the last one's SQHD is the SQ's head. One batch, of one SQ, is under way at a time.

use std::{
    fmt,
    sync::atomic::{AtomicBool, AtomicU32, Ordering, compiler_fence},
};

use millrace_keeper::Layout;
use zerocopy::FromBytes;

use super::Config;

/// Queue pairs including the admin queue's.
pub(crate) const QUEUES: usize = Config::MAX_QUEUES as usize + 1;
/// Asynchronous Event Requests a controller holds at most (AERL + 1).
pub(crate) const EVENT_REQUESTS: usize = 16;
/// MSI-X vectors the table has room for.
pub(crate) const VECTORS: usize = 512;
/// Namespace identifiers, 0 included.
pub(crate) const NAMESPACES: usize = Config::MAX_NAMESPACES as usize + 1;
/// Entries of the Error Information log (ELPE + 1).
pub(crate) const ERROR_ENTRIES: usize = 64;
/// Reservation notifications kept until they are read.
pub(crate) const RESERVATION_NOTICES: usize = 64;

/// First word of the region: "MILLRACE" in ASCII.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"MILLRACE");
/// Versions of this layout that are understood; any change of it is a new version. A worker works on a region of any of them as it is:
/// see [`DeviceState::convert`].
///
/// 2: the first one. 3 (the one to come, see [`use_next_layouts`]): [`SurvivalState::takeovers`].
pub(crate) fn layout() -> Layout {
    Layout { name: "device-state", oldest: 2, newest: if NEXT.load(Ordering::Relaxed) { 3 } else { 2 } }
}

static NEXT: AtomicBool = AtomicBool::new(false);

/// From now on this program understands the next version of the state region as well. For tests of upgrades between two layouts; to be
/// called before any device is made.
pub fn use_next_layouts() {
    NEXT.store(true, Ordering::Relaxed);
}

/// A word of a region that outlives the process. Tests are told of every store to one, before it is made.
#[derive(FromBytes)]
#[repr(transparent)]
pub(crate) struct Cell<T>(std::cell::Cell<T>);

impl<T: Copy> Cell<T> {
    #[inline]
    pub(crate) fn get(&self) -> T {
        self.0.get()
    }

    #[inline]
    pub(crate) fn set(&self, value: T) {
        #[cfg(test)]
        super::cut::before_store();
        self.0.set(value);
    }

    pub(crate) fn replace(&self, value: T) -> T {
        let before = self.get();
        self.set(value);
        before
    }
}

impl<T: Copy + fmt::Debug> fmt::Debug for Cell<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

/// Keeps the compiler from moving stores across: a successor process must see those before in place once it sees one after.
#[inline]
pub(crate) fn commit() {
    compiler_fence(Ordering::Release);
}

/// The region's layout.
#[derive(Debug, FromBytes)]
#[repr(C)]
pub(crate) struct DeviceState {
    /// [`MAGIC`], stored last when the region is set up.
    pub(crate) magic: Cell<u64>,
    /// One of [`layout`]'s.
    pub(crate) version: Cell<u32>,
    /// Counts enables of the controller: completions of an earlier epoch are dropped.
    pub(crate) epoch: Cell<u32>,
    pub(crate) registers: RegisterState,
    pub(crate) features: FeatureState,
    pub(crate) events: EventState,
    pub(crate) logs: LogState,
    /// PCI configuration space.
    pub(crate) pci: [Cell<u8>; 256],
    /// Submission queues by identifier; 0 is the admin queue.
    pub(crate) sq: [SqState; QUEUES],
    /// Completion queues by identifier.
    pub(crate) cq: [CqState; QUEUES],
    /// The MSI-X table as the guest wrote it (address low, address high, data, control).
    pub(crate) msix: [[Cell<u32>; 4]; VECTORS],
    /// The settings it was made with: another device's state, or one made with others, is not gone on with.
    pub(crate) shape: [Cell<u32>; 8],
    /// Namespaces that are attached: bit n%64 of word n/64 for namespace n. The daemon stores the same a little later.
    pub(crate) attached: [Cell<u64>; NAMESPACES.div_ceil(64)],
    /// What the SMART log counts, as of the last turn with work: see `Counters`.
    pub(crate) counters: [Cell<u64>; 8],
    pub(crate) survival: SurvivalState,
}

/// What a worker that takes over must know beside the controller.
#[derive(Debug, FromBytes)]
#[repr(C)]
pub(crate) struct SurvivalState {
    /// 1 while the device is being worked on: who ends then may have ended by it.
    pub(crate) busy: Cell<u32>,
    /// Workers in a row that ended so.
    pub(crate) strikes: Cell<u32>,
    /// The kind of reset that has begun and not ended, plus 1; 0: none.
    pub(crate) resetting: Cell<u32>,
    /// Where it stands in a migration (`migration/`); 0: it runs.
    pub(crate) migration: Cell<u32>,
    /// Since version 3: how many workers have gone on with this region.
    pub(crate) takeovers: Cell<u32>,
    pub(crate) reserved: [Cell<u32>; 11],
}

impl DeviceState {
    /// Brings the region to another version that is understood, in place. The version is stored last, and what a version does not have
    /// is not looked at in a region of that version: so this may be cut short anywhere, and done again.
    pub(crate) fn convert(&self, to: u16) {
        if self.version.get() == u32::from(to) {
            return;
        }
        // Upwards the field gets its first value; downwards it becomes what it was, a reserved word.
        if (self.version.get() < 3) != (to < 3) {
            self.survival.takeovers.set(0);
        }
        commit();
        self.version.set(to.into());
    }

    /// Whether the region has a version that is understood here.
    pub(crate) fn is_understood(&self) -> bool {
        let layout = layout();
        (u32::from(layout.oldest)..=u32::from(layout.newest)).contains(&self.version.get())
    }

    /// A worker goes on with the region; how many have done so, where its version counts them.
    pub(crate) fn count_takeover(&self) -> Option<u32> {
        let takeovers = (self.version.get() >= 3).then_some(&self.survival.takeovers)?;
        takeovers.set(takeovers.get().saturating_add(1));
        Some(takeovers.get())
    }
}

/// Controller registers (Base 3.1.4) that can change.
#[derive(Debug, FromBytes)]
#[repr(C)]
pub(crate) struct RegisterState {
    /// Admin queue base addresses (ASQ, ACQ).
    pub(crate) asq: Cell<u64>,
    pub(crate) acq: Cell<u64>,
    /// Guest address of the shadow doorbells, and of the event indexes; 0 when not configured (Base 5.2.5).
    pub(crate) shadow_doorbells: Cell<u64>,
    pub(crate) event_indexes: Cell<u64>,
    /// Controller configuration (CC) as last accepted.
    pub(crate) cc: Cell<u32>,
    /// Controller status (CSTS).
    pub(crate) csts: Cell<u32>,
    /// Admin queue attributes (AQA).
    pub(crate) aqa: Cell<u32>,
    /// Interrupt mask of vectors 0 to 31 for pin-based interrupts (INTMS/INTMC).
    pub(crate) interrupt_mask: Cell<u32>,
    pub(crate) reserved: [Cell<u32>; 4],
}

/// Feature values that Set Features changed (Base 5.1.25); all survive until controller reset as the specification says.
#[derive(Debug, FromBytes)]
#[repr(C)]
pub(crate) struct FeatureState {
    pub(crate) arbitration: Cell<u32>,
    pub(crate) power_state: Cell<u32>,
    pub(crate) temperature_over: Cell<u32>,
    pub(crate) temperature_under: Cell<u32>,
    pub(crate) write_cache: Cell<u32>,
    /// Number of queues as granted (NCQA << 16 | NSQA, 0's based).
    pub(crate) queues: Cell<u32>,
    pub(crate) interrupt_coalescing: Cell<u32>,
    pub(crate) write_atomicity: Cell<u32>,
    pub(crate) async_events: Cell<u32>,
    /// Host Behavior Support: ACRE, LBAFEE (a byte each), then CDFE.
    pub(crate) host_behavior: Cell<u32>,
    /// Timestamp as set (milliseconds), and our monotonic clock then (milliseconds).
    pub(crate) timestamp: Cell<u64>,
    pub(crate) timestamp_taken: Cell<u64>,
    /// 1 when the host set the timestamp.
    pub(crate) timestamp_origin: Cell<u32>,
    pub(crate) host_id_size: Cell<u32>,
    pub(crate) host_id: [Cell<u8>; 16],
    pub(crate) reserved: [Cell<u32>; 10],
    /// Features of single namespaces, by identifier.
    pub(crate) namespaces: [NamespaceFeatureState; NAMESPACES],
    /// Interrupt Vector Configuration: bit n%64 of word n/64 is set when coalescing is disabled for vector n.
    pub(crate) coalescing_disabled: [Cell<u64>; VECTORS / 64],
}

/// Asynchronous events (Base 5.1.2).
#[derive(Debug, FromBytes)]
#[repr(C)]
pub(crate) struct EventState {
    /// Command identifiers of the requests outstanding: the first `outstanding` entries.
    pub(crate) requests: [Cell<u16>; EVENT_REQUESTS],
    pub(crate) outstanding: Cell<u32>,
    /// Bit per event type that is masked until its log page is read.
    pub(crate) masked: Cell<u32>,
    /// Events waiting for a request: per event type the completion's dword 0 with bit 31 set, or 0.
    pub(crate) pending: [Cell<u32>; 8],
    pub(crate) reserved: [Cell<u32>; 8],
}

/// Feature values that belong to one namespace.
#[derive(Debug, FromBytes)]
#[repr(C)]
pub(crate) struct NamespaceFeatureState {
    /// Error Recovery's TLER.
    pub(crate) time_limited_recovery: Cell<u16>,
    /// Reservation Notification Mask.
    pub(crate) reservation_mask: Cell<u16>,
}

/// What log pages tell (Base 5.1.12) beside the counters.
#[derive(Debug, FromBytes)]
#[repr(C)]
pub(crate) struct LogState {
    /// Errors ever logged; entry `n` (counted from 0) lies at `n % ERROR_ENTRIES`, and is stored before the count.
    pub(crate) error_count: Cell<u64>,
    /// Error Information entries.
    pub(crate) errors: [[Cell<u64>; 8]; ERROR_ENTRIES],
    /// Monotonic clock (milliseconds) when the controller was made, and its time with commands in the I/O queues
    /// (microseconds).
    pub(crate) powered_on: Cell<u64>,
    pub(crate) busy_micros: Cell<u64>,
    pub(crate) power_cycles: Cell<u64>,
    pub(crate) unsafe_shutdowns: Cell<u64>,
    /// Changed Attached Namespaces: bit n%64 of word n/64 for namespace n.
    pub(crate) changed_namespaces: [Cell<u64>; NAMESPACES.div_ceil(64)],
    /// Reservation notifications ever logged, and ever read; `n` (counted from 0) lies at `n % RESERVATION_NOTICES` as its
    /// type << 32 | namespace identifier.
    pub(crate) notices_logged: Cell<u64>,
    pub(crate) notices_read: Cell<u64>,
    pub(crate) notices: [Cell<u64>; RESERVATION_NOTICES],
}

/// A submission queue. `entries` is 0 when it does not exist, and is stored last when it is made.
#[derive(Debug, FromBytes)]
#[repr(C)]
pub(crate) struct SqState {
    /// Guest address of entry 0.
    pub(crate) base: Cell<u64>,
    pub(crate) entries: Cell<u32>,
    /// Next entry to take. Everything before it is accepted.
    pub(crate) head: Cell<u32>,
    /// Commands accepted but not yet completed.
    pub(crate) in_flight: Cell<u32>,
    /// The completion queue's identifier.
    pub(crate) cq: Cell<u16>,
    pub(crate) priority: Cell<u8>,
    /// Set while Delete I/O Submission Queue waits for the commands in flight.
    pub(crate) deleting: Cell<u8>,
    pub(crate) reserved: [Cell<u64>; 5],
}

/// A completion queue. `entries` is 0 when it does not exist, and is stored last when it is made.
#[derive(Debug, FromBytes)]
#[repr(C)]
pub(crate) struct CqState {
    /// Guest address of entry 0.
    pub(crate) base: Cell<u64>,
    pub(crate) entries: Cell<u32>,
    /// Next entry to write, and in bit 31 the phase tag it will carry: one store moves both.
    pub(crate) position: Cell<u32>,
    /// The guest's head as last read from its doorbell.
    pub(crate) head: Cell<u32>,
    /// Entries promised to commands in flight.
    pub(crate) promised: Cell<u32>,
    pub(crate) vector: Cell<u16>,
    /// 1 when completions interrupt (IEN).
    pub(crate) interrupts: Cell<u16>,
    /// Submission queues that complete into it.
    pub(crate) users: Cell<u32>,
    pub(crate) reserved: [Cell<u64>; 4],
}

const _: () = assert!(size_of::<SqState>() == 64 && size_of::<CqState>() == 64, "one cache line each");

impl CqState {
    const PHASE: u32 = 1 << 31;

    /// Index of the next entry to write.
    pub(crate) fn tail(&self) -> u32 {
        self.position.get() & !Self::PHASE
    }

    /// Phase tag of the next entry to write: set on the first pass.
    pub(crate) fn phase(&self) -> bool {
        self.position.get() & Self::PHASE != 0
    }

    /// Starts the first pass.
    pub(crate) fn rewind(&self) {
        self.position.set(Self::PHASE);
    }

    /// Moves to any entry, and the phase tag it will carry.
    pub(crate) fn move_to(&self, tail: u32, phase: bool) {
        self.position.set(if phase { tail | Self::PHASE } else { tail });
    }

    /// Moves on by one entry.
    pub(crate) fn advance(&self) {
        let next = self.tail() + 1;
        let phase = self.position.get() & Self::PHASE;
        self.position.set(if next == self.entries.get() { phase ^ Self::PHASE } else { next | phase });
    }
}

/// The doorbell page (BAR0 + 1000h): memory that the guest writes and we read. Stride 4: SQ y's tail at 2y, CQ y's head at
/// 2y + 1 (PCIe transport 3.1.2).
///
/// A client maps part of a region at the same offset in the region's file, so the page has an unused one before it.
#[derive(Debug, FromBytes)]
#[repr(C)]
pub(crate) struct DoorbellPage {
    pub(crate) unused: [AtomicU32; 1024],
    pub(crate) words: [AtomicU32; 1024],
}
