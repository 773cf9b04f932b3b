//! The register map (docs/hardware.md, "Registers"): addresses in 64-bit words, and the layout of the words.
//!
//! ```text
//!   19     16 15                    0
//!   ┌────────┬───────────────────────┐
//!   │  core  │ word within the core  │     F7xxxh: the front
//!   └────────┴───────────────────────┘
//! ```

use bitfield_struct::bitfield;

/// What a core is.
pub const IDENTITY: u32 = 0x0000;
/// Commands in flight.
pub const IN_FLIGHT: u32 = 0x0001;
/// The oldest fault; reading takes it.
pub const FAULT: u32 = 0x0002;
/// Time in units of 64 cycles.
pub const TIME: u32 = 0x0003;
/// Commands taken.
pub const TAKEN: u32 = 0x0004;
/// Completions posted.
pub const COMPLETED: u32 = 0x0005;
/// Interrupts sent.
pub const INTERRUPTS: u32 = 0x0006;
/// Cycles in a unit of [`TIME`].
pub const CYCLES_PER_UNIT: u64 = 64;
/// Doorbells that the front refused.
pub const REFUSED: u32 = 0xf7800;
/// What the front was built with.
pub const FRONT_IDENTITY: u32 = 0xf7801;
/// Words of a function's storage functions' configuration.
pub const CONFIGURATION_WORDS: u32 = 16;
/// Bytes of a page of the translation tables.
pub const PAGE: u64 = 2 << 20;

/// A word of a core.
pub const fn core(core: u8, word: u32) -> u32 {
    (core as u32) << 16 | word
}

/// A disk's queue pair.
pub const fn disk(ssd: u8) -> u32 {
    0x0010 + ssd as u32
}

/// Word `word` (0 to 3) of a queue.
pub const fn queue(queue: u32, word: u32) -> u32 {
    0x1000 + 4 * queue + word
}

/// A local function's interrupt coalescing and mask.
pub const fn interrupts(function: u8) -> u32 {
    0x2000 + 8 * function as u32
}

/// A local function's weight.
pub const fn weight(function: u8) -> u32 {
    0x2001 + 8 * function as u32
}

/// A word of a local function's storage functions' configuration.
pub const fn configuration(function: u8, word: u32) -> u32 {
    0x3000 + 16 * function as u32 + word
}

/// A row of a local function's translation table.
pub const fn page(pages: u16, function: u8, page: u32) -> u32 {
    0x8000 + pages as u32 * function as u32 + page
}

/// Where a function's doorbells go.
pub const fn place(function: u8) -> u32 {
    0xf7000 + function as u32
}

/// The word at [`place`].
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Place {
    /// The local function.
    pub local: u8,
    /// The core.
    #[bits(4)]
    pub core: u8,
    #[bits(51)]
    __: u64,
    /// Doorbells go there.
    pub enabled: bool,
}

/// The word at [`FAULT`].
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Fault {
    /// Its queue's index.
    pub queue: u16,
    /// What happened.
    pub code: u16,
    #[bits(31)]
    __: u64,
    /// There is one.
    pub valid: bool,
}

impl Fault {
    /// A tail that is not within its queue.
    pub const SQ_TAIL: u16 = 1;
    /// A head that is not within its queue, or passes the tail.
    pub const CQ_HEAD: u16 = 2;
    /// A submission queue that cannot be read.
    pub const SQ_READ: u16 = 3;
}

/// Word 0 of a queue.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct QueueBase {
    /// Commands are fetched.
    pub enabled: bool,
    #[bits(11)]
    __: u16,
    /// The host page that the submission queue lies in.
    #[bits(52)]
    pub page: u64,
}

/// Word 1 of a queue.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct QueueSizes {
    /// Entries of the submission queue, 2 to 64.
    #[bits(7)]
    pub sq: u8,
    #[bits(1)]
    __: u8,
    /// Entries of the completion queue, 2 to 64.
    #[bits(7)]
    pub cq: u8,
    #[bits(1)]
    __: u8,
    /// Completions interrupt.
    pub interrupts: bool,
    #[bits(7)]
    __: u8,
    /// By this vector.
    pub vector: u8,
    __: u32,
}

/// Word 3 of a queue.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct QueueStatus {
    /// Next entry of the submission queue to take.
    #[bits(6)]
    pub sq_head: u8,
    #[bits(2)]
    __: u8,
    /// As the doorbell was last.
    #[bits(6)]
    pub sq_tail: u8,
    #[bits(2)]
    __: u8,
    /// Next entry of the completion queue to write.
    #[bits(6)]
    pub cq_tail: u8,
    #[bits(2)]
    __: u8,
    /// As the doorbell was last.
    #[bits(6)]
    pub cq_head: u8,
    #[bits(2)]
    __: u8,
    /// The phase tag of the next entry.
    pub phase: bool,
    /// Commands taken and not completed.
    #[bits(7)]
    pub in_flight: u8,
    /// A fault stopped it.
    pub stopped: bool,
    #[bits(23)]
    __: u32,
}

/// The word at [`interrupts`].
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct Coalescing {
    /// Completions, 0's based.
    pub threshold_z: u8,
    /// Time in units of 16,384 cycles.
    pub time: u8,
    /// Interrupts wait for the threshold or the time.
    pub on: bool,
    #[bits(15)]
    __: u16,
    /// Vectors that are masked.
    pub mask: u32,
}

/// Word 0 of a function's configuration.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct NamespaceWord {
    /// The namespace's identifier.
    pub nsid: u32,
    /// log2 of its block size: 9 or 12.
    pub block_log2: u8,
    /// There is one.
    pub enabled: bool,
    /// It cannot be written.
    pub read_only: bool,
    /// Which storage functions are on: share, throttle, replicate, cache (`millrace_functions::Config`).
    #[bits(4)]
    pub functions: u8,
    /// Every write is to be durable: the guest's write cache is off.
    pub durable: bool,
    #[bits(1)]
    __: u8,
    /// Disks it lies on.
    pub disks: u16,
}

/// A row of a translation table.
#[bitfield(u64)]
#[derive(PartialEq, Eq)]
pub struct PageRow {
    /// There is memory.
    pub present: bool,
    /// It may be written.
    pub writable: bool,
    #[bits(19)]
    __: u32,
    /// The host page of 2 MiB.
    #[bits(27)]
    pub page: u32,
    #[bits(16)]
    __: u16,
}

impl PageRow {
    /// A row for a page at this host address.
    pub fn at(address: u64, writable: bool) -> Self {
        Self::new().with_present(true).with_writable(writable).with_page((address / PAGE) as u32)
    }

    /// The host address.
    pub fn address(self) -> u64 {
        u64::from(self.page()) * PAGE
    }
}

/// Addresses by which disks reach a core's memory: bits 13:0 of a chip address; bits 17:14 are the core.
pub mod chip {
    /// The submission queues.
    pub const SUBMISSION: u32 = 0x0000;
    /// The translated PRP lists.
    pub const LISTS: u32 = 0x1000;
    /// Bytes of one of them.
    pub const LIST: u32 = 256;
    /// The completion queues.
    pub const COMPLETION: u32 = 0x2000;
    /// Bytes of a core's window.
    pub const WINDOW: u32 = 0x4000;
}

/// FastPath: programs' pages, the spaces' registers, and what lies on the chip (docs/hardware.md, "FastPath").
pub mod fastpath {
    use bitfield_struct::bitfield;

    /// Where a program's words begin in its function's page: buffer offset, LBA, upper LBA and blocks, go.
    pub const PAGE: u16 = 0x800;
    /// Requests of a space that may be outstanding, and records in its ring.
    pub const TAGS: u8 = 32;
    /// Bytes of a record.
    pub const RECORD: u64 = 16;
    /// Host address of the window.
    pub const WINDOW: u64 = 0xffff_ffe0_0000;
    /// Bytes of it that are a space's.
    pub const SPACE: u64 = 0x4000;
    /// Where the completion queue lies in these; the submission queue lies at their start.
    pub const COMPLETION: u64 = 0x1000;
    /// Where the lists lie in these.
    pub const LISTS: u64 = 0x2000;
    /// Entries of a space's queues.
    pub const ENTRIES: u8 = 32;
    /// A space's buffer: pages of 4 KiB; bit 32: blocks of 4096 bytes.
    pub const BUFFER: u32 = 1;
    /// Where its ring of records lies.
    pub const RING: u32 = 2;
    /// Requests outstanding (5:0) and refused (31:16).
    pub const STATUS: u32 = 3;
    /// The first word of the statistics: count, sum, least, greatest, then a histogram by powers of two.
    pub const STATISTICS: u32 = 0x20;

    /// A word of a space.
    pub const fn space(space: u8, word: u32) -> u32 {
        0xf7c00 + 0x40 * space as u32 + word
    }

    /// Word 0 of a space.
    #[bitfield(u64)]
    #[derive(PartialEq, Eq)]
    pub struct Space {
        /// The local function whose first queue is the space's.
        pub local: u8,
        /// Its core.
        #[bits(4)]
        pub core: u8,
        #[bits(4)]
        __: u8,
        /// The function whose page it is.
        pub function: u8,
        #[bits(39)]
        __: u64,
        /// Requests are accepted.
        pub enabled: bool,
    }

    /// A program's fourth word.
    #[bitfield(u32)]
    #[derive(PartialEq, Eq)]
    pub struct Go {
        /// What is to be done, as in NVMe.
        pub opcode: u8,
        /// It is to be durable when it ends.
        pub durable: bool,
        #[bits(7)]
        pub reserved: u8,
        /// The request's tag.
        pub tag: u16,
    }
}
