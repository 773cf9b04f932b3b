//! A controller moves to another daemon, and its machine goes on: docs/migration.md.

use std::{
    collections::BTreeMap,
    os::fd::BorrowedFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard},
    time::Instant,
};

use millrace_block::Lba;
use millrace_driver::{
    Controller, DmaBuffer, DmaRange, MappedArea, Namespace, Options, QueueOptions, QueuePair, Transport, TransportError,
    VfioUser,
};
use millrace_tests::{Daemon, PATIENCE, eventually, unless_heavy};
use millrace_vfio_user::{Client, Errno, LogRange, MigrationState};
use serde_json::Value;

const DEPTH: usize = 16;
/// Blocks that the load uses, of 4 KiB.
const BLOCKS: u64 = 512;
const BLOCK: usize = 4096;

/// The way to a controller that may be another's tomorrow. Its doorbells go by message, so that nothing of the old one is mapped.
#[derive(Clone)]
struct Movable(Arc<Mutex<VfioUser>>);

impl Movable {
    fn connect(socket: &Path) -> Self {
        Self(Arc::new(Mutex::new(VfioUser::connect(socket, PATIENCE).expect("a connection"))))
    }

    fn get(&self) -> MutexGuard<'_, VfioUser> {
        self.0.lock().expect("a whole transport")
    }

    fn with<R>(&self, call: impl FnOnce(&mut Client) -> R) -> R {
        call(self.get().client())
    }
}

impl Transport for Movable {
    fn region_read(&mut self, region: u32, offset: u64, buf: &mut [u8]) -> Result<(), TransportError> {
        self.get().region_read(region, offset, buf)
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), TransportError> {
        self.get().region_write(region, offset, data)
    }

    fn region_write_posted(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), TransportError> {
        self.get().region_write_posted(region, offset, data)
    }

    fn map_region(&mut self, region: u32) -> Result<Vec<MappedArea>, TransportError> {
        self.get().map_region(region)
    }

    fn dma_map(&mut self, range: DmaRange, fd: BorrowedFd<'_>, offset: u64) -> Result<(), TransportError> {
        self.get().dma_map(range, fd, offset)
    }

    fn dma_unmap(&mut self, range: DmaRange) -> Result<(), TransportError> {
        self.get().dma_unmap(range)
    }

    fn vectors(&mut self) -> Result<u32, TransportError> {
        self.get().vectors()
    }

    fn set_vectors(&mut self, fds: &[BorrowedFd<'_>]) -> Result<(), TransportError> {
        self.get().set_vectors(fds)
    }

    fn disable_vectors(&mut self) -> Result<(), TransportError> {
        self.get().disable_vectors()
    }

    fn reset(&mut self) -> Result<(), TransportError> {
        self.get().reset()
    }

    fn check(&mut self) -> Result<(), TransportError> {
        self.get().check()
    }
}

/// A command under way: its buffer, and what it reads or writes.
#[derive(Clone, Copy)]
struct Flight {
    slot: usize,
    lba: u64,
    /// The version written, or to be read.
    version: u64,
    reads: bool,
}

/// A machine that checks every byte, over a connection that can be exchanged.
struct Machine {
    way: Movable,
    controller: Controller,
    namespace: Namespace,
    queue: QueuePair,
    /// A buffer for each command in flight.
    buffers: DmaBuffer,
    free: Vec<usize>,
    flights: BTreeMap<u16, Flight>,
    versions: Vec<u64>,
    random: u64,
    completed: u64,
}

/// What a block holds: its number and version over and over. Version 0 was never written.
fn pattern(lba: u64, version: u64) -> Vec<u8> {
    let words = if version == 0 { [0, 0] } else { [lba, version] };
    words.iter().flat_map(|word| word.to_le_bytes()).cycle().take(BLOCK).collect()
}

impl Machine {
    fn start(socket: &Path) -> Self {
        let way = Movable::connect(socket);
        let options = Options { mapped_doorbells: false, memory_size: 16 << 20, timeout: PATIENCE, ..Options::default() };
        let mut controller = Controller::attach(way.clone(), &options).expect("a controller");
        controller.start().expect("it comes up");
        let queue = controller.create_queue_pair(&QueueOptions { entries: 24, ..QueueOptions::default() }).expect("a queue");
        let nsid = controller.active_namespaces().expect("namespaces")[0];
        let namespace = controller.namespace(nsid).expect("a namespace");
        controller.request_event().expect("an event request");
        let buffers = controller.memory().alloc(DEPTH * BLOCK).expect("memory");
        Self {
            way,
            namespace,
            queue,
            buffers,
            controller,
            free: (0..DEPTH).collect(),
            flights: BTreeMap::new(),
            versions: vec![0; BLOCKS as usize],
            random: 0x9e37_79b9_7f4a_7c15,
            completed: 0,
        }
    }

    fn next_random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    fn submit_one(&mut self) {
        let Some(slot) = self.free.pop() else { return };
        let lba = self.next_random(BLOCKS);
        if self.flights.values().any(|flight| flight.lba == lba) {
            self.free.push(slot);
            return;
        }
        let reads = self.next_random(2) == 0;
        let data = self.buffers.slice(slot * BLOCK, BLOCK);
        let known = &mut self.versions[lba as usize];
        *known += u64::from(!reads);
        let version = *known;
        let first = Lba(lba * (BLOCK as u64 / u64::from(self.namespace.block_size())));
        let command = if reads {
            self.buffers.write_at(slot * BLOCK, &[0xee; BLOCK]);
            self.namespace.read(first, data)
        } else {
            self.buffers.write_at(slot * BLOCK, &pattern(lba, version));
            self.namespace.write(first, data)
        };
        let cid = self.queue.submit(&command.expect("a command")).expect("room");
        let before = self.flights.insert(cid.0, Flight { slot, lba, version, reads });
        assert!(before.is_none(), "an identifier twice");
    }

    fn reap(&mut self) {
        while let Some(cqe) = self.queue.next_completion().expect("a completion of a command in flight") {
            assert!(cqe.status().is_success(), "{}", cqe.status());
            let flight = self.flights.remove(&cqe.cid.0).expect("it completes once");
            if flight.reads {
                let data = self.buffers.read_vec(flight.slot * BLOCK, BLOCK);
                let right = data == pattern(flight.lba, flight.version);
                assert!(right, "block {} is not of version {}", flight.lba, flight.version);
            }
            self.free.push(flight.slot);
            self.completed += 1;
        }
    }

    /// Works until `count` more commands have completed; others are in flight then.
    fn work(&mut self, count: u64) {
        let (until, limit) = (self.completed + count, Instant::now() + PATIENCE);
        while self.completed < until {
            (0..DEPTH).for_each(|_| self.submit_one());
            self.queue.ring().expect("the doorbells");
            self.reap();
            assert!(Instant::now() < limit, "no progress: {} of {until}", self.completed);
        }
        (0..DEPTH).for_each(|_| self.submit_one());
        self.queue.ring().expect("the doorbells");
    }

    /// Waits for what is in flight.
    fn rest(&mut self) {
        let limit = Instant::now() + PATIENCE;
        while !self.flights.is_empty() {
            self.reap();
            assert!(Instant::now() < limit, "{} commands do not complete", self.flights.len());
        }
        self.queue.ring().expect("the doorbells");
    }

    /// All that was ever written is there.
    fn verify(&mut self) {
        self.rest();
        for lba in 0..BLOCKS {
            let first = Lba(lba * (BLOCK as u64 / u64::from(self.namespace.block_size())));
            let read = self.namespace.read(first, self.buffers.slice(0, BLOCK)).expect("a command");
            self.queue.execute(&read).expect("it is read");
            assert!(self.buffers.read_vec(0, BLOCK) == pattern(lba, self.versions[lba as usize]), "block {lba}");
        }
        let features = self.controller.identify_controller().expect("admin commands work");
        assert!(features.nn > 0);
    }

    fn memory(&self) -> DmaRange {
        self.controller.memory().range()
    }

    /// Connects to another controller, and shares its memory with it.
    fn connect_to(&mut self, socket: &Path, before_mapping: impl FnOnce(&mut Client)) {
        let mut way = VfioUser::connect(socket, PATIENCE).expect("a connection");
        before_mapping(way.client());
        way.dma_map(self.memory(), self.controller.memory().fd(), 0).expect("memory is shared");
        *self.way.get() = way;
    }

    /// The pages of memory that the device says it wrote.
    fn written(&self) -> Vec<u64> {
        let DmaRange { iova, len } = self.memory();
        let range = LogRange { address: iova, size: len as u64, page_size: 4096 };
        let bitmap = self.way.with(|client| client.written_pages(range)).expect("a report");
        (0..len as u64 / 4096).filter(|page| bitmap[(page / 8) as usize] & 1 << (page % 8) != 0).collect()
    }
}

/// Reads a device's state, which stops it.
fn save(client: &mut Client) -> Vec<u8> {
    client.set_migration_state(MigrationState::StopCopy).expect("it stops");
    let mut state = Vec::new();
    loop {
        let part = client.migration_read(32 << 10).expect("its state");
        if part.is_empty() {
            return state;
        }
        state.extend(part);
    }
}

fn restore(client: &mut Client, state: &[u8]) -> Result<(), millrace_vfio_user::ClientError> {
    client.set_migration_state(MigrationState::Resuming).expect("it takes a state");
    for part in state.chunks(10_000) {
        client.migration_write(part)?;
    }
    client.set_migration_state(MigrationState::Running)
}

/// What a device and its volume must be elsewhere, to be the same.
struct Identity {
    file: PathBuf,
    volume: String,
    device: String,
}

fn text(value: &Value) -> String {
    value.as_str().expect("text").to_owned()
}

/// Makes the first daemon's disk.
fn first(daemon: &Daemon, options: &[&str]) -> Identity {
    let file = daemon.path("disk.img");
    daemon.disk("disk", &["--backend", &format!("file:{}", file.display()), "--size", "16M"], options);
    let subnqn = text(&daemon.json(&["device", "show", "disk"])["subnqn"]);
    let device = subnqn.rsplit(':').next().expect("a UUID").to_owned();
    Identity { file, volume: text(&daemon.json(&["volume", "show", "disk"])["uuid"]), device }
}

/// Gives a daemon's disk up: its file is free.
fn give_up(daemon: &Daemon) {
    daemon.run(&["device", "delete", "disk"]);
    daemon.run(&["volume", "delete", "disk"]);
}

/// Makes the same disk with another daemon; its socket.
fn same(daemon: &Daemon, identity: &Identity, options: &[&str]) -> PathBuf {
    let backend = format!("file:{}", identity.file.display());
    let device = [&["--uuid", &identity.device][..], options].concat();
    daemon.disk("disk", &["--backend", &backend, "--uuid", &identity.volume], &device)
}

#[test]
fn a_machine_under_load_moves_between_daemons_by_the_protocol() {
    let daemons = [Daemon::start(), Daemon::start()];
    let identity = first(&daemons[0], &["--migration"]);
    let mut machine = Machine::start(&daemons[0].socket("disk"));
    let flags = machine.way.with(Client::migration_flags).expect("it can be migrated");
    assert_eq!(flags & 1, 1, "stop and copy");
    for round in 0..unless_heavy(4, 40) {
        let (here, there) = (&daemons[round % 2], &daemons[(round + 1) % 2]);
        machine.way.with(|client| client.start_logging(4096, &[])).expect("a log");
        machine.work(500);
        let written = machine.written();
        let pages = machine.memory().len as u64 / 4096;
        let page_of = |address: u64| (address - machine.memory().iova) / 4096;
        for slot in 0..DEPTH {
            let page = page_of(machine.buffers.slice(slot * BLOCK, BLOCK).iova);
            assert!(written.contains(&page), "500 commands read into every buffer");
        }
        assert!(written.contains(&page_of(machine.queue.cq_range().iova)));
        assert!((written.len() as u64) < pages / 10, "{} of {pages} pages are not that many", written.len());
        machine.work(100);
        let state = machine.way.with(save);
        println!(
            "  round {round}: {} commands, {} in flight, a state of {} bytes",
            machine.completed,
            machine.flights.len(),
            state.len()
        );
        assert!(!machine.written().is_empty());
        assert!(machine.written().is_empty(), "a device that stands still writes nothing");
        give_up(here);
        let socket = same(there, &identity, &["--migration"]);
        let mut at = 0;
        machine.connect_to(&socket, |_| at = state.len() / 2);
        // Half a state, and one with a wrong bit, are refused, and do not stand in the way of the right one.
        let mut flipped = state.clone();
        flipped[at] ^= 4;
        for bad in [&state[..at], &flipped[..]] {
            let refused = machine.way.with(|client| restore(client, bad)).expect_err("a bad state");
            assert_eq!(refused.refused(), Some(Errno::INVAL));
        }
        machine.way.with(|client| restore(client, &state)).expect("the state is taken");
        assert_eq!(machine.way.with(Client::migration_state).expect("a state"), MigrationState::Running);
        machine.work(500);
        machine.verify();
    }
    drop(machine);
    daemons.into_iter().for_each(Daemon::finish);
}

/// A worker that dies while its device stands still leaves it so, and the state can be read after that as before.
#[test]
fn a_worker_may_die_while_its_device_is_moved() {
    let daemon = Daemon::start();
    first(&daemon, &["--migration"]);
    let mut machine = Machine::start(&daemon.socket("disk"));
    machine.way.with(|client| client.start_logging(4096, &[])).expect("a log");
    machine.work(300);
    let state = machine.way.with(save);
    daemon.kill_worker(rustix::process::Signal::KILL);
    assert_eq!(machine.way.with(Client::migration_state).expect("a state"), MigrationState::Stop);
    let pages = machine.memory().len / 4096;
    assert_eq!(machine.written().len(), pages, "what the dead one had logged is lost: everything may have been written");
    assert_eq!(machine.way.with(save).len(), state.len());
    machine.way.with(|client| client.set_migration_state(MigrationState::Resuming)).expect("it takes a state");
    machine.way.with(|client| client.migration_write(&state[..100])).expect("a part");
    daemon.kill_worker(rustix::process::Signal::KILL);
    assert_eq!(machine.way.with(Client::migration_state).expect("a state"), MigrationState::Error);
    let refused = machine.way.with(|client| client.set_migration_state(MigrationState::Running));
    assert_eq!(refused.expect_err("half a state is none").refused(), Some(Errno::INVAL));
    machine.way.with(Client::reset).expect("a reset helps");
    assert_eq!(machine.way.with(Client::migration_state).expect("a state"), MigrationState::Running);
    drop(machine);
    daemon.finish();
}

#[test]
fn an_operator_saves_and_restores_a_paused_machines_device() {
    let daemons = [Daemon::start(), Daemon::start()];
    let identity = first(&daemons[0], &[]);
    let mut machine = Machine::start(&daemons[0].socket("disk"));
    let refused = machine.way.with(Client::migration_flags).expect_err("it was not made for that");
    assert_eq!(refused.refused(), Some(Errno::OPNOTSUPP));
    machine.work(500);
    // The machine is paused, and what it rang for is done.
    let file = daemons[0].path("disk.state");
    let file = file.to_str().expect("a path");
    daemons[0].run(&["device", "save", "disk", file]);
    give_up(&daemons[0]);
    let socket = same(&daemons[1], &identity, &[]);
    let refused = daemons[1].try_run(&["device", "restore", "disk", "/dev/null"]).expect_err("no state");
    assert!(refused.contains("no saved state"), "{refused}");
    daemons[1].run(&["device", "restore", "disk", file]);
    // A worker that dies meanwhile keeps it.
    daemons[1].kill_worker(rustix::process::Signal::KILL);
    // Machine monitors reset a device that they connect to.
    machine.connect_to(&socket, |client| client.reset().expect("a reset"));
    let refused = daemons[1].try_run(&["device", "restore", "disk", file]).expect_err("a guest is there");
    assert!(refused.contains("before its machine connects"), "{refused}");
    machine.work(500);
    machine.verify();
    // Nobody there: nothing to save.
    drop(machine);
    let refused = eventually("the guest is gone", || {
        daemons[1].try_run(&["device", "save", "disk", file]).err().filter(|error| error.contains("no guest"))
    });
    println!("  {refused}");
    daemons.into_iter().for_each(Daemon::finish);
}
