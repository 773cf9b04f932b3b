//! Guests that leave badly, lie or are nobody: each costs its own device only, and nothing is kept. Our own user-level driver
//! stands in for the guest, since it breaks off at any instant; beside it another device carries a verified load throughout.

use std::{
    fs::File,
    io::{IoSlice, Read, Write},
    os::fd::AsFd,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use millrace_block::Lba;
use millrace_driver::{
    Command, Controller, DmaBuffer, DmaMemory, DriverError, Namespace, Options, Pages, QueueOptions, QueuePair,
    spec::{NamespaceId, QueueId, Status, registers::Doorbell},
};
use millrace_tests::{Daemon, GuestMemory, Load, PATIENCE, Usage, Work, eventually, unless_heavy, within};
use millrace_vfio_user::Client;
use rustix::{
    fs::ftruncate,
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};

/// Small: what is tested is the end of commands, not the disk below.
const BYTES: usize = 16 << 10;
const DEPTH: usize = 64;

/// Private memory that worker and keeper may have more of after all rounds than after the first tenth of them: what a hundred
/// guests would leave behind is more.
const GROWTH: u64 = 1 << 20;

/// A daemon with a victim of the test and a witness that must not notice.
struct House {
    daemon: Daemon,
    memory: GuestMemory,
    victim: PathBuf,
    witness: Load,
    /// With the witness connected and the victim's device at rest.
    before: Usage,
}

impl House {
    fn new(memory: GuestMemory, victim: &[&str]) -> Self {
        let daemon = Daemon::start();
        let image = format!("file:{}", daemon.path("victim.img").display());
        let victim = daemon.disk("victim", &["--backend", &image, "--size", "256M"], victim);
        let socket = daemon.disk("witness", &["--backend", "memory", "--size", "64M"], &[]);
        let mut witness = Load::start(&socket, &Work::default());
        witness.wait_until_busy();
        // What is allocated once, with the first guest, is allocated now.
        let rest = daemon.usage();
        let mut house = Self { daemon, memory, victim, witness, before: rest };
        let guest = house.guest();
        let huge = house.daemon.usage().huge;
        assert_eq!(huge > rest.huge, house.memory.pages() == Pages::Huge, "{huge} bytes of huge pages");
        drop(guest);
        house.daemon.expect_back_to(&rest);
        // What ends a connection is gone for a moment, and there again.
        house.before = house.daemon.usage_at_rest();
        house
    }

    /// A guest, as soon as the device takes one.
    fn guest(&self) -> Guest {
        Guest::start(self.open())
    }

    /// Connects as soon as the device takes a new guest: it does once it has noticed that the one before is gone.
    fn open(&self) -> Controller {
        let pages = self.memory.pages();
        let options = Options { timeout: PATIENCE, memory_size: 16 << 20, pages, ..Options::default() };
        let mut last = None;
        within(PATIENCE, || Controller::open(&self.victim, &options).map_err(|error| last = Some(error)).ok())
            .unwrap_or_else(|| panic!("the device takes no new guest: {}", chain(&last.expect("an error"))))
    }

    /// Memory beside a guest's own.
    fn extra(&self) -> DmaMemory {
        DmaMemory::of_pages(self.memory.pages(), 1 << 40, 8 << 20).expect("memory")
    }

    /// Does something to guests again and again, with what the round before left. After the first tenth the daemon has all that it needs,
    /// and takes no more.
    fn rounds<G>(&self, mut guest: G, mut round: impl FnMut(usize, G) -> G) -> G {
        let (rounds, warm_up) = (unless_heavy(100, 1000), unless_heavy(10, 100));
        let (mut warm, start) = (None, Instant::now());
        for number in 0..rounds {
            if number == warm_up {
                warm = Some(self.daemon.usage_at_rest());
            }
            guest = round(number, guest);
        }
        println!("  {rounds} rounds in {:.1} s", start.elapsed().as_secs_f64());
        self.daemon.expect_within(&warm.expect("more rounds than those to warm up"), GROWTH);
        guest
    }

    /// Everything is back, and the witness saw nothing.
    fn finish(mut self) {
        drop(self.guest());
        self.daemon.expect_back_to(&self.before);
        self.witness.expect_running();
        let commands = self.witness.finish();
        println!("  the witness: {commands} commands, every byte right");
        self.daemon.finish();
    }
}

/// A driver with a queue and a buffer per command.
struct Guest {
    // Dropped before the controller, as their memory is its.
    queue: QueuePair,
    buffers: Vec<DmaBuffer>,
    namespace: Namespace,
    controller: Controller,
}

impl Guest {
    fn start(mut controller: Controller) -> Self {
        controller.start().unwrap_or_else(|error| panic!("bring-up: {}", chain(&error)));
        Self::with_queue(controller)
    }

    fn with_queue(mut controller: Controller) -> Self {
        let namespace = controller.namespace(NamespaceId(1)).unwrap_or_else(|error| panic!("{}", chain(&error)));
        let queue =
            controller.create_queue_pair(&QueueOptions::default()).unwrap_or_else(|error| panic!("{}", chain(&error)));
        let buffers = (0..DEPTH).map(|_| controller.memory().alloc(BYTES).expect("memory")).collect();
        Self { queue, buffers, namespace, controller }
    }

    /// Rings for a full queue of writes and reads, and waits for none.
    fn flood(&mut self) {
        for (at, buffer) in self.buffers.iter().enumerate() {
            let command = self.command(at, buffer.slice(0, BYTES));
            self.queue.submit(&command).expect("room");
        }
        self.queue.ring().expect("ringing");
    }

    fn command(&self, at: usize, data: millrace_driver::DmaRange) -> Command {
        let lba = Lba((at * BYTES / self.namespace.block_size() as usize) as u64);
        let command = if at.is_multiple_of(3) { self.namespace.read(lba, data) } else { self.namespace.write(lba, data) };
        command.expect("in range")
    }

    /// Writes and reads something of this round's own.
    fn works(&mut self, round: usize) {
        let data: Vec<u8> = (0..BYTES).map(|at| (at * 7 + round * 31) as u8).collect();
        let (out, back) = (&self.buffers[0], &self.buffers[1]);
        out.write_at(0, &data);
        back.fill(0);
        let lba = Lba(64 << 10);
        let write = self.namespace.write(lba, out.slice(0, BYTES)).expect("in range");
        let read = self.namespace.read(lba, back.slice(0, BYTES)).expect("in range");
        self.queue.execute(&write).expect("a write");
        self.queue.execute(&self.namespace.flush()).expect("a flush");
        self.queue.execute(&read).expect("a read");
        assert!(back.read_vec(0, BYTES) == data, "round {round}: what was read is not what was written");
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        source = inner.source();
    }
    text
}

/// Each of these a hundred times, with either kind of memory.
macro_rules! with_each_memory {
    ($($name:ident)*) => {
        mod small_pages {
            $(#[test]
            fn $name() {
                super::$name(millrace_tests::GuestMemory::small());
            })*
        }
        mod huge_pages {
            $(#[test]
            fn $name() {
                super::$name(millrace_tests::GuestMemory::huge());
            })*
        }
    };
}

with_each_memory! {
    processes_killed_at_any_instant
    guests_gone_in_the_middle_of_io
    functions_reset_in_the_middle_of_io
    controllers_disabled_in_the_middle_of_io
    queues_deleted_in_the_middle_of_io
    devices_deleted_in_the_middle_of_io
    namespaces_detached_in_the_middle_of_io
    guests_that_panic_in_the_middle_of_io
    memory_unmapped_under_commands_and_mapped_again
    memory_truncated_under_commands
    queues_truncated_under_the_controller
}

/// What becomes of QEMU's process: killed while it connects, brings the controller up, or works.
fn processes_killed_at_any_instant(memory: GuestMemory) {
    let pages = ["--pages", memory.word()];
    let by_message = ["--pages", memory.word(), "--doorbell-messages", "--queues", "4"];
    let house = House::new(memory, &[]);
    house.rounds((), |round, ()| {
        // The commands of the one before have finished: this one's patience is for its own.
        drop(house.open());
        // The device has seen it go: it takes one guest at a time.
        eventually("nobody is connected", || {
            (house.daemon.json(&["device", "show", "victim"])["connected"] == false).then_some(())
        });
        let more = if round % 2 == 0 { &pages[..] } else { &by_message };
        let mut load = Load::start(&house.victim, &Work { bs: "16k", depth: 8, more, ..Work::default() });
        // Certainly at work every fifth time, which shows that the others may be.
        if round % 5 == 0 {
            load.wait_until_busy();
        } else {
            sleep(Duration::from_micros(round as u64 * 7919 % 60_000));
        }
        load.kill();
    });
    house.finish();
}

fn guests_gone_in_the_middle_of_io(memory: GuestMemory) {
    let house = House::new(memory, &[]);
    house.rounds((), |round, ()| {
        let mut guest = house.guest();
        guest.works(round);
        guest.flood();
    });
    house.finish();
}

/// By the monitor's message, and by the function's own register.
fn functions_reset_in_the_middle_of_io(memory: GuestMemory) {
    let house = House::new(memory, &[]);
    let mut guest = house.rounds(house.guest(), |round, mut guest| {
        guest.works(round);
        guest.flood();
        let Guest { mut controller, .. } = guest;
        let reset = if round % 2 == 0 { controller.reset() } else { controller.function_level_reset() };
        reset.unwrap_or_else(|error| panic!("a function level reset: {}", chain(&error)));
        Guest::start(controller)
    });
    guest.works(0);
    drop(guest);
    house.finish();
}

fn controllers_disabled_in_the_middle_of_io(memory: GuestMemory) {
    let house = House::new(memory, &["--doorbells", "messages"]);
    let mut guest = house.rounds(house.guest(), |round, mut guest| {
        guest.works(round);
        guest.flood();
        let Guest { mut controller, .. } = guest;
        controller.disable().unwrap_or_else(|error| panic!("disable: {}", chain(&error)));
        Guest::start(controller)
    });
    guest.works(0);
    drop(guest);
    house.finish();
}

fn queues_deleted_in_the_middle_of_io(memory: GuestMemory) {
    let house = House::new(memory, &[]);
    let mut guest = house.rounds(house.guest(), |round, mut guest| {
        guest.works(round);
        guest.flood();
        let Guest { mut controller, queue, buffers, .. } = guest;
        controller.delete_queue_pair(queue).unwrap_or_else(|error| panic!("delete: {}", chain(&error)));
        // The controller is done with the commands now: their memory may be used again.
        drop(buffers);
        Guest::with_queue(controller)
    });
    guest.works(0);
    drop(guest);
    house.finish();
}

/// Unplugged by the operator: the guest finds its connection closed, and the device that is made anew works.
fn devices_deleted_in_the_middle_of_io(memory: GuestMemory) {
    let house = House::new(memory, &[]);
    house.rounds((), |round, ()| {
        let mut guest = house.guest();
        guest.works(round);
        guest.flood();
        house.daemon.run(&["device", "delete", "victim"]);
        eventually("the guest loses its device", || guest.controller.status().is_err().then_some(()));
        house.daemon.run(&["device", "create", "victim", "--nvme", "--volume", "victim"]);
    });
    house.finish();
}

/// The same for a namespace: every command ends, those that came too late with an error.
fn namespaces_detached_in_the_middle_of_io(memory: GuestMemory) {
    let house = House::new(memory, &[]);
    let guest = house.rounds(house.guest(), |round, mut guest| {
        guest.works(round);
        guest.flood();
        house.daemon.run(&["device", "detach", "victim", "1"]);
        for _ in &guest.buffers {
            eventually("every command completes", || guest.queue.next_completion().expect("a completion"));
        }
        guest.flood();
        for _ in &guest.buffers {
            let cqe = eventually("every command completes", || guest.queue.next_completion().expect("a completion"));
            assert_eq!(cqe.status().code(), Status::INVALID_FIELD, "round {round}");
        }
        guest.queue.ring().expect("ringing");
        house.daemon.run(&["device", "attach", "victim", "victim", "--nsid", "1"]);
        guest
    });
    drop(guest);
    house.finish();
}

/// What a panicking guest's QEMU does: processors stop with commands in flight and completions untaken; then the function
/// is reset, or memory goes first, or the connection just ends.
fn guests_that_panic_in_the_middle_of_io(memory: GuestMemory) {
    let house = House::new(memory, &[]);
    house.rounds((), |round, ()| {
        let mut guest = house.guest();
        guest.works(round);
        guest.flood();
        let memory = guest.controller.memory().range();
        match round % 4 {
            0 => {}
            1 => guest.controller.reset().expect("a reset"),
            2 => guest.controller.transport().dma_unmap(memory).expect("memory away under its commands"),
            _ => {
                guest.controller.transport().dma_unmap(memory).expect("memory away under its commands");
                guest.controller.reset().expect("a reset");
            }
        }
    });
    house.finish();
}

/// Memory is taken away while commands use it, and comes back; the queues themselves stay.
fn memory_unmapped_under_commands_and_mapped_again(memory: GuestMemory) {
    let house = House::new(memory, &[]);
    let extra = house.extra();
    let mut late = 0;
    let guest = house.rounds(house.guest(), |round, mut guest| {
        guest.controller.transport().dma_map(extra.range(), extra.fd(), 0).expect("a map");
        let buffers: Vec<DmaBuffer> = (0..DEPTH).map(|_| extra.alloc(BYTES).expect("memory")).collect();
        for (at, buffer) in buffers.iter().enumerate() {
            let command = guest.command(at, buffer.slice(0, BYTES));
            guest.queue.submit(&command).expect("room");
        }
        guest.queue.ring().expect("ringing");
        guest.controller.transport().dma_unmap(extra.range()).expect("an unmap");
        for _ in &buffers {
            let cqe = eventually("every command completes", || guest.queue.next_completion().expect("a completion"));
            late += usize::from(!cqe.status().is_success());
        }
        guest.queue.ring().expect("ringing");
        guest.works(round);
        guest
    });
    println!("  {late} commands came too late for their memory");
    drop(guest);
    house.finish();
}

/// A guest's file of memory is truncated after it was mapped: the daemon's next access is a bus error, which costs the
/// device and nothing else.
fn memory_truncated_under_commands(memory: GuestMemory) {
    let house = House::new(memory, &[]);
    house.rounds((), |round, ()| {
        let mut guest = house.guest();
        guest.works(round);
        let extra = house.extra();
        guest.controller.transport().dma_map(extra.range(), extra.fd(), 0).expect("a map");
        let buffers: Vec<DmaBuffer> = (0..DEPTH).map(|_| extra.alloc(BYTES).expect("memory")).collect();
        // Even rounds before the commands are seen, odd ones while they run.
        if round % 2 == 0 {
            ftruncate(extra.fd(), 0).expect("truncating");
        }
        for (at, buffer) in buffers.iter().enumerate() {
            let command = guest.command(at, buffer.slice(0, BYTES));
            guest.queue.submit(&command).expect("room");
        }
        guest.queue.ring().expect("ringing");
        if round % 2 == 1 {
            ftruncate(extra.fd(), 0).expect("truncating");
        }
        let mut done = 0;
        eventually("the commands end, or the device fails", || {
            while let Some(_cqe) = guest.queue.next_completion().expect("a completion") {
                done += 1;
            }
            (done == DEPTH || has_failed(&guest.controller)).then_some(())
        });
    });
    house.finish();
}

/// As above, with the memory that holds the queues themselves. This side may not touch it either from then on.
fn queues_truncated_under_the_controller(memory: GuestMemory) {
    let house = House::new(memory, &[]);
    house.rounds((), |round, ()| {
        let mut guest = house.guest();
        guest.works(round);
        guest.flood();
        ftruncate(guest.controller.memory().fd(), 0).expect("truncating");
        let bell = Doorbell::SqTail(guest.queue.id());
        let mut tail = 0;
        eventually("the device fails", || {
            // Every doorbell makes the controller look at the queue that is not there any more.
            tail = (tail + 1) % guest.queue.entries();
            let rung = guest.controller.write_doorbell(bell, tail);
            let rung = rung.and_then(|()| guest.controller.write_doorbell(Doorbell::SqTail(QueueId::ADMIN), tail % 32));
            (rung.is_err() || has_failed(&guest.controller)).then_some(())
        });
    });
    house.finish();
}

/// A fatal error, or a connection that the daemon has closed.
fn has_failed(controller: &Controller) -> bool {
    match controller.status() {
        Ok(csts) => csts.cfs(),
        Err(DriverError::Transport { .. }) => true,
        Err(error) => panic!("{}", chain(&error)),
    }
}

#[test]
fn a_thousand_connects() {
    let house = House::new(GuestMemory::small(), &[]);
    for round in 0..1000 {
        match round % 4 {
            // Gone before a word was said.
            0 => drop(connect(&house.victim)),
            // Gone in the middle of the first word.
            1 => connect(&house.victim).write_all(&[1, 0, 1]).unwrap_or_default(),
            // Negotiated, looked around, gone.
            2 => {
                let client = within(PATIENCE, || Client::connect(&house.victim, PATIENCE).ok());
                let mut client = client.expect("the device takes a new client");
                client.device_info().expect("an answer");
            }
            // With memory and registers.
            _ => drop(house.open()),
        }
    }
    house.finish();
}

/// Connections that wait while another is served are taken when it ends, or refused; the device survives both.
#[test]
fn many_connections_at_once() {
    let house = House::new(GuestMemory::small(), &[]);
    for _ in 0..unless_heavy(5, 50) {
        let mut guest = house.guest();
        let waiting: Vec<UnixStream> = (0..64).filter_map(|_| UnixStream::connect(&house.victim).ok()).collect();
        guest.works(1);
        drop(waiting);
        guest.works(2);
    }
    house.finish();
}

fn connect(socket: &Path) -> UnixStream {
    let stream = within(PATIENCE, || UnixStream::connect(socket).ok()).expect("connecting");
    stream.set_write_timeout(Some(Duration::from_millis(500))).expect("a timeout");
    stream.set_read_timeout(Some(Duration::from_millis(500))).expect("a timeout");
    stream
}

/// A message as it lies on the wire.
fn message(id: u16, command: u16, size: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(id.to_le_bytes());
    bytes.extend(command.to_le_bytes());
    bytes.extend(size.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes.extend(0u32.to_le_bytes());
    bytes.extend(body);
    bytes
}

/// A small generator: the same garbage every time.
fn garbage(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

const VERSION: u16 = 1;
const DMA_MAP: u16 = 2;

fn greeting() -> Vec<u8> {
    let body = b"\0\0\0\0{\"capabilities\":{\"max_msg_fds\":8}}\0";
    message(1, VERSION, 16 + body.len() as u32, 0, body)
}

/// Sends, and reads whatever comes; a peer that has closed is fine.
fn say(stream: &mut UnixStream, bytes: &[u8]) {
    let _ = stream.write_all(bytes);
    let _ = stream.read(&mut [0; 4096]);
}

#[test]
fn garbage_on_the_socket() {
    let house = House::new(GuestMemory::small(), &[]);
    let lies: Vec<(&str, Vec<u8>)> = vec![
        ("a message shorter than its header", message(1, VERSION, 8, 0, &[])),
        ("a message of size 0", message(1, VERSION, 0, 0, &[])),
        ("a message of 4 GiB", message(1, VERSION, u32::MAX, 0, &[0; 64])),
        ("no version", message(1, VERSION, 16, 0, &[])),
        ("a version of text that is no JSON", message(1, VERSION, 26, 0, b"\0\0\0\0{{{{{\0")),
        ("a version from the future", message(1, VERSION, 20, 0, &[255, 255, 0, 0])),
        ("something before the version", message(1, DMA_MAP, 48, 0, &[0; 32])),
        ("a reply that nobody asked for", message(9, VERSION, 16, 1, &[])),
        ("an unknown command", message(1, 999, 16, 0, &[])),
    ];
    for (what, bytes) in &lies {
        println!("  {what}");
        say(&mut connect(&house.victim), bytes);
        let mut stream = connect(&house.victim);
        say(&mut stream, &greeting());
        say(&mut stream, bytes);
    }
    for seed in 0..unless_heavy(200, 5000) {
        let mut stream = connect(&house.victim);
        if seed % 2 == 0 {
            say(&mut stream, &greeting());
        }
        let _ = stream.write_all(&garbage(seed, 4 + seed as usize * 5 % 3000));
        drop(stream);
        if seed % 50 == 0 {
            drop(house.guest());
        }
    }
    println!("  {} times bytes without a meaning", unless_heavy(200, 5000));
    house.finish();
}

/// More descriptors than a message may have, fewer than it needs, and descriptors where none belong: none of them is kept.
#[test]
fn wrong_numbers_of_descriptors() {
    let house = House::new(GuestMemory::small(), &[]);
    let null = File::open("/dev/null").expect("/dev/null");
    let fds = vec![null.as_fd(); 250];
    for round in 0..unless_heavy(100, 1000) {
        let mut stream = connect(&house.victim);
        say(&mut stream, &greeting());
        let (what, count) = match round % 4 {
            0 => (message(2, DMA_MAP, 48, 0, &map_body()), 0),
            1 => (message(2, DMA_MAP, 48, 0, &map_body()), 3),
            2 => (message(2, VERSION, 16, 0, &[]), 250),
            _ => (message(2, 4, 32, 0, &[16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), 200),
        };
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(250))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if count > 0 {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds[..count])), "room for {count} descriptors");
        }
        let _ = sendmsg(&stream, &[IoSlice::new(&what)], &mut ancillary, SendFlags::NOSIGNAL);
        let _ = stream.read(&mut [0; 4096]);
    }
    house.finish();
}

/// DMA_MAP's fixed part: readable and writable, one page at 1 TiB.
fn map_body() -> Vec<u8> {
    let mut body = Vec::new();
    body.extend(32u32.to_le_bytes());
    body.extend(3u32.to_le_bytes());
    body.extend([0u64, 1 << 40, 4096].map(u64::to_le_bytes).concat());
    body
}

/// A client that never finishes its message holds its device, and lets it go when it ends.
#[test]
fn slow_writers() {
    let house = House::new(GuestMemory::small(), &[]);
    for round in 0..unless_heavy(5, 50) {
        let mut stream = connect(&house.victim);
        for byte in greeting().iter().take(10 + round * 3) {
            stream.write_all(&[*byte]).expect("the daemon reads");
            std::thread::sleep(Duration::from_millis(2));
        }
        drop(stream);
    }
    // The last one stays while the witness works on.
    let mut stream = connect(&house.victim);
    stream.write_all(&greeting()[..20]).expect("the daemon reads");
    std::thread::sleep(Duration::from_millis(300));
    drop(stream);
    house.finish();
}
