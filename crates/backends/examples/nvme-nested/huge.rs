//! Memory in huge pages of 2 MiB: the driver's own, and guests'.

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use millrace_backends::NvmePlace;
use millrace_block::{BlockSize, Lba};
use millrace_driver::{Controller, Options, Pages, QueueOptions, VfioPci, spec::NamespaceId};
use rustix::fs::MemfdFlags;

use super::{Guest, MIB, Random, SEED, ShardHarness, open, straight};

/// Pages of 2 MiB that the system keeps, and those of them that nobody has.
const KEPT: &str = "/proc/sys/vm/nr_hugepages";
const FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
/// Bytes of one.
const PAGE: u64 = 2 * MIB;
/// Bytes of the driver's memory, and of a guest's.
const MEMORY: u64 = 16 * MIB;
const PATIENCE: Duration = Duration::from_secs(30);

fn number(path: &str) -> u64 {
    let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    text.trim().parse::<u64>().unwrap_or_else(|error| panic!("{path}: {error}: {text}"))
}

fn keep(pages: u64) {
    fs::write(KEPT, pages.to_string()).unwrap_or_else(|error| panic!("{KEPT}: {error}"));
    assert_eq!(number(KEPT), pages, "the system keeps as many pages of 2 MiB as it is told");
}

/// Waits until so many are free again.
fn wait_free(pages: u64) {
    let patience = Instant::now() + PATIENCE;
    while number(FREE) != pages {
        assert!(Instant::now() < patience, "{} pages of 2 MiB are free, not {pages}", number(FREE));
        thread::sleep(Duration::from_millis(10));
    }
}

/// Both kinds of memory. The device may reach all of it at any time, so that all of it is there, and in such pages.
pub(super) fn huge(place: &NvmePlace) {
    let before = number(KEPT);
    keep(before + MEMORY / PAGE);
    let free = number(FREE);
    own(place, free);
    wait_free(free);
    guests(place, free);
    keep(before);
}

/// The driver's: its queues, their lists, and data around the place where two pages meet.
fn own(place: &NvmePlace, free: u64) {
    let function = VfioPci::open(place.address).unwrap_or_else(|error| panic!("{error}"));
    let options = Options { pages: Pages::Huge, memory_size: MEMORY as usize, ..Options::default() };
    let mut controller = Controller::attach(function, &options).expect("memory in huge pages");
    assert_eq!(free - number(FREE), MEMORY / PAGE, "the driver's memory");
    controller.start().expect("it comes up");
    let namespace = controller.namespace(NamespaceId(place.nsid)).expect("the namespace");
    let mut queue = controller.create_queue_pair(&QueueOptions::default()).expect("a queue");
    let buffer = controller.memory().alloc(3 * PAGE as usize).expect("memory");
    let seam = (2 * PAGE - buffer.iova() % PAGE) as usize;
    for len in [4096, 64 << 10, controller.max_transfer() as usize] {
        let at = seam - len / 2;
        let data: Vec<u8> = (0..len).map(|i| (i / 5 + i + len) as u8).collect();
        buffer.write_at(at, &data);
        let write = namespace.write(Lba(8), buffer.slice(at, len)).expect("a write");
        queue.execute(&write).unwrap_or_else(|error| panic!("{len} bytes: {error}"));
        buffer.fill(0xee);
        let read = namespace.read(Lba(8), buffer.slice(at, len)).expect("a read");
        queue.execute(&read).unwrap_or_else(|error| panic!("{len} bytes: {error}"));
        assert!(buffer.read_vec(at, len) == data, "{len} bytes: other data");
        let beside = [at - 1, at + len].map(|at| buffer.read_vec(at, 1)[0]);
        assert_eq!(beside, [0xee; 2], "{len} bytes: nothing was written beside them");
    }
    println!("huge: {} bytes at once across two pages of the driver's", controller.max_transfer());
    controller.shutdown().expect("it shuts down");
}

/// Guests': nothing bounces, and the pages are free again when their guest is gone.
fn guests(place: &NvmePlace, free: u64) {
    let volume = open(place, None, BlockSize::B512);
    let (mut harness, mut random) = (ShardHarness::new(), Random(SEED));
    for life in 0..2 {
        let guest = Guest::of(MEMORY, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB);
        straight(&volume, &mut harness, &guest, &mut random, 1024 * life);
        assert_eq!(free - number(FREE), MEMORY / PAGE, "the guest's memory");
        guest.give_up();
        wait_free(free);
    }
}
