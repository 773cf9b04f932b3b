//! A program on a volume: a thread with a FastPath space that reads, writes, flushes and gives back at random, with several in
//! flight, and knows of each block what it may hold.

use std::{
    io,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel},
    },
    thread::{self, JoinHandle, sleep},
    time::{Duration, Instant},
};

use millrace::{Completion, Direct, FastPath, Operation, Options};
use millrace_tests::PATIENCE;
use rustix::io::Errno;

use crate::{
    oracle::{Oracle, ZEROES},
    random::Random,
};

/// Requests in flight at most.
const DEPTH: usize = 8;
/// Bytes of a request at most.
const LONGEST: usize = 256 << 10;
/// Between looks at what has ended, while nothing has.
const LOOK: Duration = Duration::from_millis(20);

/// Whether the daemon has gone, or has ended the space: it is to be opened again.
fn is_gone(errno: i32) -> bool {
    errno == Errno::NODEV.raw_os_error()
}

/// How a program opens a volume of the daemon with this run directory.
fn options(run_dir: &Path) -> Options {
    let run_dir = Some(run_dir.to_owned());
    Options { run_dir, buffer: DEPTH * LONGEST, depth: 32, events: true, timeout: PATIENCE, ..Options::default() }
}

/// Whether another volume holds what the oracle knows of this one.
pub(crate) fn expect_copy(run_dir: &Path, volume: &str, oracle: &mut Oracle) {
    let space = FastPath::open(volume, &options(run_dir)).unwrap_or_else(|error| panic!("{error}"));
    let mut bytes = vec![0; LONGEST];
    let (end, step) = (oracle.blocks(), LONGEST / oracle.block_size());
    for first in (0..end).step_by(step) {
        let bytes = &mut bytes[..step.min(end - first) * oracle.block_size()];
        space.read((first * oracle.block_size()) as u64, bytes).unwrap_or_else(|error| panic!("volume {volume}: {error}"));
        oracle.check(first, bytes).unwrap_or_else(|why| panic!("copy {volume}: {why}"));
    }
}

/// What the operator has a program do.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Order {
    /// Have nothing in flight, until it is told to go on.
    Rest,
    /// Go on.
    Go,
    /// Compare the whole volume with what it may hold.
    Compare,
    /// The volume has so many blocks now.
    Resize(usize),
}

/// A program. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Program {
    name: String,
    oracle: Arc<Mutex<Oracle>>,
    orders: Option<Sender<(Order, Sender<()>)>>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<u64>>,
}

impl Program {
    /// Starts one on a volume whose contents the oracle knows.
    pub(crate) fn start(run_dir: &Path, name: &str, oracle: Oracle, seed: u64) -> Self {
        let (orders, received) = channel();
        let block_size = oracle.block_size();
        let (oracle, ends) = (Arc::new(Mutex::new(oracle)), Arc::new(AtomicBool::new(false)));
        let worker = Worker {
            name: name.to_owned(),
            block_size,
            options: options(run_dir),
            oracle: Arc::clone(&oracle),
            ends: Arc::clone(&ends),
            random: Random::new(seed),
            space: None,
            slots: [None; DEPTH],
            heard: Instant::now(),
            done: 0,
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || worker.run(&received)).expect("a thread");
        Self { name: name.to_owned(), oracle, orders: Some(orders), ends, thread: Some(thread) }
    }

    /// Tells it what to do, and waits until that is done.
    pub(crate) fn tell(&self, order: Order) {
        let (done, is_done) = channel();
        // Where it has ended already, nobody answers.
        let _ = self.orders.as_ref().expect("it was not ended").send((order, done));
        match is_done.recv_timeout(PATIENCE * 2) {
            Ok(()) => {}
            Err(RecvTimeoutError::Disconnected) => {
                panic!("the program on volume {} has failed: it says why above", self.name)
            }
            Err(RecvTimeoutError::Timeout) => panic!("the program on volume {} does not {order:?}", self.name),
        }
    }

    /// Fails when it has failed.
    pub(crate) fn expect_well(&self) {
        let has_ended = self.thread.as_ref().is_some_and(JoinHandle::is_finished);
        assert!(!has_ended, "the program on volume {} has failed: it says why above", self.name);
    }

    pub(crate) fn oracle(&self) -> MutexGuard<'_, Oracle> {
        self.oracle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends it; how many requests ended well.
    pub(crate) fn finish(mut self) -> u64 {
        self.ends.store(true, Ordering::Relaxed);
        self.orders = None;
        let thread = self.thread.take().expect("it was not ended");
        thread.join().unwrap_or_else(|_| panic!("the program on volume {} has failed: it says why above", self.name))
    }
}

impl Drop for Program {
    /// Its thread sees that nobody tells it anything any more.
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
    }
}

/// A request in flight.
#[derive(Clone, Copy, Debug)]
struct Request {
    operation: Operation,
    first: usize,
    count: usize,
    /// The write's number.
    write: u64,
}

impl Request {
    /// Whether the two must not be in flight together, for nobody could say what the blocks hold then.
    fn excludes(&self, other: &Self) -> bool {
        let has_blocks = |request: &Self| request.operation != Operation::Flush;
        let only_read = self.operation == Operation::Read && other.operation == Operation::Read;
        let overlap = self.first < other.first + other.count && other.first < self.first + self.count;
        has_blocks(self) && has_blocks(other) && overlap && !only_read
    }
}

struct Worker {
    name: String,
    block_size: usize,
    options: Options,
    oracle: Arc<Mutex<Oracle>>,
    /// Nobody is interested any more.
    ends: Arc<AtomicBool>,
    random: Random,
    space: Option<FastPath>,
    /// What is in flight, each with a part of the buffer of its own.
    slots: [Option<Request>; DEPTH],
    /// When something ended last.
    heard: Instant,
    done: u64,
}

impl Worker {
    fn run(mut self, orders: &Receiver<(Order, Sender<()>)>) -> u64 {
        loop {
            match orders.try_recv() {
                Ok((Order::Rest, done)) => {
                    self.drain();
                    let _ = done.send(());
                    self.rest(orders);
                }
                Ok((order, done)) => self.obey(order, &done),
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => {
                    self.drain();
                    return self.done;
                }
            }
            self.begin();
            self.settle(LOOK);
            // The other programs and the daemon want the processors, too.
            sleep(Duration::from_micros(self.random.below(4000) as u64));
        }
    }

    /// Does nothing but what it is told, until it is to go on.
    fn rest(&mut self, orders: &Receiver<(Order, Sender<()>)>) {
        while let Ok((order, done)) = orders.recv() {
            self.obey(order, &done);
            if matches!(order, Order::Go) {
                return;
            }
        }
    }

    fn obey(&mut self, order: Order, done: &Sender<()>) {
        self.drain();
        match order {
            Order::Rest | Order::Go => {}
            Order::Compare => self.compare(),
            Order::Resize(blocks) => self.resize(blocks),
        }
        let _ = done.send(());
    }

    /// Not twice in one statement: the lock is held to its end.
    fn oracle(&self) -> MutexGuard<'_, Oracle> {
        self.oracle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn blocks(&self) -> usize {
        self.oracle().blocks()
    }

    /// The space, opened again where the daemon has gone meanwhile; nothing if nobody is interested.
    fn space(&mut self) -> Option<&FastPath> {
        let start = Instant::now();
        while self.space.is_none() && !self.ends.load(Ordering::Relaxed) {
            match FastPath::open(&self.name, &self.options) {
                Ok(space) => {
                    let expected = self.bytes(self.blocks());
                    assert_eq!(space.size(), expected, "volume {}: its size", self.name);
                    self.heard = Instant::now();
                    self.space = Some(space);
                }
                Err(error) if start.elapsed() > PATIENCE => panic!("volume {} does not come back: {error}", self.name),
                Err(_) => sleep(LOOK),
            }
        }
        self.space.as_ref()
    }

    /// So many blocks in bytes.
    fn bytes(&self, blocks: usize) -> u64 {
        (blocks * self.block_size) as u64
    }

    /// The daemon has gone: of what was in flight nobody knows whether it was done.
    fn lose(&mut self) {
        self.space = None;
        self.slots = [None; DEPTH];
    }

    /// Begins requests in slots that are free.
    fn begin(&mut self) {
        for slot in 0..DEPTH {
            if self.slots[slot].is_none() && !self.random.one_in(3) && self.space().is_some() {
                let request = self.choose();
                if !self.slots.iter().flatten().any(|other| request.excludes(other)) {
                    self.submit(slot, request);
                }
            }
        }
    }

    fn choose(&mut self) -> Request {
        let (blocks, block_size) = (self.blocks(), self.block_size);
        let longest = match self.random.below(8) {
            0 => LONGEST,
            1 | 2 => 64 << 10,
            _ => 8 << 10,
        };
        let count = 1 + self.random.below((longest / block_size).min(blocks));
        let first = match self.random.below(8) {
            0 => 0,
            1 => blocks - count,
            _ => self.random.below(blocks - count + 1),
        };
        let operation = match self.random.below(20) {
            0..7 => Operation::Read,
            7..15 => Operation::Write,
            15 | 16 => Operation::WriteZeroes,
            17 => Operation::Deallocate,
            _ => Operation::Flush,
        };
        Request { operation, first, count, write: ZEROES }
    }

    fn submit(&mut self, slot: usize, mut request: Request) {
        let Request { operation, first, count, .. } = request;
        let len = self.bytes(count) as usize;
        let begin = slot * LONGEST;
        let mut part = begin..begin + len;
        let mut written = Vec::new();
        match operation {
            Operation::Write => {
                written = vec![0; len];
                request.write = self.oracle().begin_write(first, &mut written);
            }
            Operation::WriteZeroes | Operation::Deallocate => self.oracle().begin_zeroes(first, count),
            Operation::Flush => part = begin..begin,
            Operation::Read => {}
        }
        let durable = matches!(operation, Operation::Write | Operation::WriteZeroes) && self.random.one_in(4);
        let offset = self.bytes(first);
        let direct = Direct { operation, tag: slot as u64, offset, part, durable };
        let Some(space) = self.space() else { return };
        if !written.is_empty() {
            space.fill(begin, &written);
        }
        match space.begin_many(&[direct]) {
            Ok(_) => {
                if self.slots.iter().all(Option::is_none) {
                    self.heard = Instant::now();
                }
                self.slots[slot] = Some(request);
            }
            Err(error) if is_gone(error.errno()) => self.lose(),
            Err(error) => panic!("volume {}: {request:?} cannot be begun: {error}", self.name),
        }
    }

    /// Takes what has ended, and waits for some of it so long at most.
    fn settle(&mut self, wait: Duration) {
        let mut completions = [Completion::default(); DEPTH];
        let taken = self.space.as_ref().map_or(0, |space| space.wait(&mut completions, wait));
        for completion in &completions[..taken] {
            self.heard = Instant::now();
            if is_gone(completion.errno) {
                return self.lose();
            }
            self.finish(completion);
        }
        let waits: Vec<_> = self.slots.iter().flatten().collect();
        let is_hung = !waits.is_empty() && self.heard.elapsed() > PATIENCE;
        assert!(!is_hung, "volume {}: nothing has ended for {PATIENCE:?} of {waits:?}", self.name);
    }

    fn finish(&mut self, completion: &Completion) {
        let slot = completion.tag as usize;
        let ended = self.slots.get_mut(slot).and_then(Option::take);
        let Some(request) = ended else { panic!("volume {}: {completion:?} is of no request in flight", self.name) };
        let why = io::Error::from_raw_os_error(completion.errno);
        assert!(completion.errno == 0, "volume {}: {request:?} failed: {why}", self.name);
        self.done += 1;
        let Request { operation, first, count, write } = request;
        match operation {
            Operation::Read => {
                let mut bytes = vec![0; self.bytes(count) as usize];
                self.space.as_ref().expect("a completion is of a space").take(slot * LONGEST, &mut bytes);
                let checked = self.oracle().check(first, &bytes);
                checked.unwrap_or_else(|why| panic!("{why}"));
            }
            Operation::Write | Operation::WriteZeroes => self.oracle().ended(first, count, write),
            // Blocks that were given back may hold what they held.
            Operation::Deallocate | Operation::Flush => {}
        }
    }

    /// Waits until nothing is in flight.
    fn drain(&mut self) {
        while self.slots.iter().any(Option::is_some) {
            self.settle(LOOK);
        }
    }

    /// Reads the whole volume.
    fn compare(&mut self) {
        let (end, block_size) = (self.blocks(), self.block_size);
        let step = LONGEST / block_size;
        let mut bytes = vec![0; LONGEST];
        let mut first = 0;
        while first < end {
            let count = step.min(end - first);
            let (offset, bytes) = (self.bytes(first), &mut bytes[..count * block_size]);
            let Some(space) = self.space() else { return };
            match space.read(offset, bytes) {
                Ok(()) => {
                    let checked = self.oracle().check(first, bytes);
                    checked.unwrap_or_else(|why| panic!("compared: {why}"));
                    first += count;
                }
                Err(error) if is_gone(error.errno()) => self.lose(),
                Err(error) => panic!("volume {}: reading {count} blocks from {first} on: {error}", self.name),
            }
        }
    }

    fn resize(&mut self, blocks: usize) {
        self.oracle().resize(blocks);
        let expected = self.bytes(blocks);
        let Some(space) = self.space() else { return };
        match space.refresh() {
            Ok(size) => assert_eq!(size, expected, "volume {}: its new size", self.name),
            Err(error) if is_gone(error.errno()) => self.lose(),
            Err(error) => panic!("volume {}: asking for its size: {error}", self.name),
        }
    }
}
