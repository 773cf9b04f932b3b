//! A space: a controller of our own, its one queue pair, its buffer, and the requests in progress there. Used by one thread at a time.

use std::{
    collections::VecDeque,
    ops::Range,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, Mutex, TryLockError},
    time::{Duration, Instant},
};

use millrace_block::{BlockCount, Lba};
use millrace_driver::{
    Command, Controller, DmaBuffer, DmaMemory, DmaRange, Namespace, PAGE_SIZE, VfioUser,
    spec::{Cqe, NamespaceId},
};
use rustix::io::Errno;

use crate::{
    door,
    error::Error,
    memory::Piece,
    requests::{Completion, Operation, Place, Request, Table, Teller},
    shared::Bell,
    statistics::Statistics,
    way::{ENGINE_DEPTH, ENGINE_MEMORY, Way},
};

/// The volume, as its controller knows it.
pub(crate) const VOLUME: NamespaceId = NamespaceId(1);
/// Bytes that go by way of a bounce run at a time.
const BOUNCE: usize = 128 << 10;
/// A buffer of up to so many bytes is touched by us first, as bounce runs are: its pages are the program's memory by the system's account, and
/// no thread of the daemon's waits for them. Of a larger one pages come as they are used.
const TOUCHED: usize = 64 << 20;
/// The most bytes of one command.
const TRANSFER: usize = 1 << 20;
/// The most blocks that Write Zeroes and Deallocate name at a time.
const UNNAMED: u64 = (1 << 16) - 1;
/// Where memory begins for the device: where an engine's tables reach.
const IOVA: u64 = 2 << 20;
/// Looks in vain after which the connection is looked at.
const LOOKS: u32 = 1 << 14;
/// The same by the clock, where a program sleeps between them.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// How a space is to be.
#[derive(Clone, Debug)]
pub struct Options {
    /// The daemon's run directory; `None`: [`default_run_dir`](crate::default_run_dir).
    pub run_dir: Option<PathBuf>,
    /// Bytes of the buffer that direct requests use.
    pub buffer: usize,
    /// Requests, and commands, that may be in progress: 1 to 1023.
    pub depth: u16,
    /// Nothing will be written.
    pub read_only: bool,
    /// Completions signal an event fd, so that one can wait without polling.
    pub events: bool,
    /// Requests' times are measured.
    pub statistics: bool,
    /// Requests go to the front of the daemon's engine, without a queue: at most 32 in progress, no events, no deallocation.
    pub engine: bool,
    /// The longest wait for the daemon, and for a request that is waited for.
    pub timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            run_dir: None,
            buffer: 1 << 20,
            depth: 128,
            read_only: false,
            events: false,
            statistics: false,
            engine: false,
            timeout: Duration::from_secs(30),
        }
    }
}

/// What is to be done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Submission<'a> {
    pub(crate) operation: Operation,
    /// First byte on the volume.
    pub(crate) offset: u64,
    /// Bytes, of what has no memory.
    pub(crate) len: u64,
    /// The memory, in order.
    pub(crate) pieces: &'a [Piece],
    pub(crate) direct: bool,
    pub(crate) durable: bool,
    pub(crate) teller: Teller,
}

/// A command in flight.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    place: Place,
    /// Where its bytes are in the request.
    at: usize,
    len: usize,
    bounce: Option<u16>,
}

/// Bounce runs, made when they are first needed.
struct Bounces {
    runs: Vec<DmaBuffer>,
    free: Vec<u16>,
}

/// The volume as it is used. A front makes as many commands of a request as it takes.
fn used(namespace: Namespace, way: &Way) -> Namespace {
    match way {
        Way::Queue(_) => namespace,
        Way::Engine(_) => namespace.with_max_transfer(TRANSFER as u64),
    }
}

pub(crate) struct Space {
    way: Way,
    /// With a lock of its own, see [`Self::controller`].
    controller: Arc<Mutex<Controller>>,
    memory: DmaMemory,
    namespace: Namespace,
    buffer: DmaBuffer,
    bounces: Bounces,
    table: Table,
    /// By command identifier.
    in_flight: Vec<Option<InFlight>>,
    /// Requests that are not all commands yet, in order.
    waiting: VecDeque<Place>,
    completions: VecDeque<Completion>,
    /// The first failure of a counted request since it was asked for.
    counted_errno: i32,
    counted: usize,
    statistics: Option<Statistics>,
    vain: u32,
    /// When the connection was looked at, of a space with events.
    looked: Option<Instant>,
    /// What a thread has slept on, for the next one that does.
    pub(crate) bell: Option<Bell>,
    gone: bool,
}

impl Space {
    /// The space, and its connection once more, to be watched: it ends when the daemon does.
    pub(crate) fn open(volume: &str, options: &Options) -> Result<(Self, OwnedFd), Error> {
        if !(1..=1023).contains(&options.depth) {
            return Err(Error::Options("the depth is 1 to 1023"));
        }
        if options.engine && options.events {
            return Err(Error::Options("an engine's space has no events"));
        }
        let buffer = options.buffer.max(1).checked_next_multiple_of(PAGE_SIZE).filter(|size| *size <= 1 << 40);
        let buffer = buffer.ok_or(Error::Options("the buffer is larger than 1 TiB"))?;
        let run_dir = options.run_dir.clone().unwrap_or_else(door::default_run_dir);
        let stream = door::ask(&run_dir, volume, options.read_only, options.timeout)?;
        let connection = stream.try_clone().map_err(Error::Descriptor)?.into();
        let transport = VfioUser::from_stream(stream, options.timeout).map_err(|source| {
            millrace_driver::DriverError::Transport { what: "greeting the volume's controller", source }
        })?;
        let depth = if options.engine { options.depth.min(ENGINE_DEPTH) } else { options.depth };
        let places = usize::from(depth);
        // The queues with their lists, admin, and a bounce run for every command; pages that are not used cost nothing.
        let own = (4 << 20) + places * (BOUNCE + 2 * PAGE_SIZE);
        if options.engine && buffer + own + IOVA as usize > ENGINE_MEMORY {
            return Err(Error::Options("the buffer is larger than an engine can reach: at most 1000 MiB"));
        }
        let driver = millrace_driver::Options {
            timeout: options.timeout,
            memory_size: buffer + own,
            iova: IOVA,
            io_queues: 1,
            max_transfer: TRANSFER,
            ..millrace_driver::Options::default()
        };
        let mut controller = Controller::attach(transport, &driver)?;
        controller.start()?;
        let way = Way::open(&mut controller, options)?;
        let namespace = used(controller.namespace(VOLUME)?, &way);
        let memory = controller.memory().clone();
        let buffer = memory.alloc(buffer)?;
        if buffer.len() <= TOUCHED {
            buffer.fill(0);
        }
        let space = Self {
            way,
            controller: Arc::new(Mutex::new(controller)),
            memory,
            namespace,
            buffer,
            bounces: Bounces { runs: Vec::with_capacity(places), free: Vec::with_capacity(places) },
            table: Table::new(depth),
            in_flight: vec![None; places],
            waiting: VecDeque::with_capacity(places),
            completions: VecDeque::with_capacity(places),
            counted_errno: 0,
            counted: 0,
            statistics: options.statistics.then(Statistics::default),
            vain: 0,
            looked: options.events.then(Instant::now),
            bell: None,
            gone: false,
        };
        Ok((space, connection))
    }

    pub(crate) fn buffer(&self) -> &DmaBuffer {
        &self.buffer
    }

    pub(crate) fn way(&self) -> &Way {
        &self.way
    }

    pub(crate) fn block_size(&self) -> u32 {
        self.namespace.block_size()
    }

    /// The volume's size in bytes as it was last asked for.
    pub(crate) fn size(&self) -> u64 {
        self.namespace.size().0.saturating_mul(u64::from(self.namespace.block_size()))
    }

    /// Whether somebody is in the middle of asking about the volume.
    pub(crate) fn is_asked_for(&self) -> bool {
        matches!(self.controller.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// Who is asked about the volume. The space need not be locked until the answer comes: requests go on meanwhile.
    pub(crate) fn controller(&self) -> Result<Arc<Mutex<Controller>>, Error> {
        if self.gone { Err(Error::Gone) } else { Ok(Arc::clone(&self.controller)) }
    }

    /// What the volume is from now on, as its controller has answered.
    pub(crate) fn take_up(&mut self, namespace: Namespace) {
        self.namespace = used(namespace, &self.way);
    }

    pub(crate) fn in_progress(&self) -> usize {
        self.table.in_progress()
    }

    pub(crate) fn statistics(&mut self) -> Option<&mut Statistics> {
        self.statistics.as_mut()
    }

    /// Where in the space's buffer memory of the program is, if it is there as a whole.
    fn within(&self, piece: Piece) -> Option<Range<usize>> {
        let at = (piece.start as usize).checked_sub(self.buffer.as_ptr() as usize)?;
        let end = at.checked_add(piece.len)?;
        (end <= self.buffer.len()).then_some(at..end)
    }

    /// Whether the request can be, and its length.
    fn check(&self, wanted: &Submission<'_>) -> Result<u64, Error> {
        if self.gone {
            return Err(Error::Gone);
        }
        let mut len = wanted.len;
        if matches!(wanted.operation, Operation::Read | Operation::Write) {
            len = 0;
            for piece in wanted.pieces {
                if wanted.direct
                    && !(self.namespace.is_whole(piece.len as u64)
                        && (piece.start as usize).is_multiple_of(4)
                        && (piece.len == 0 || self.within(*piece).is_some()))
                {
                    return Err(Error::NotDirect);
                }
                let Some(sum) = u64::checked_add(len, piece.len as u64) else {
                    return Err(Error::Invalid("the pieces' lengths overflow"));
                };
                len = sum;
            }
        }
        match wanted.operation {
            Operation::Flush => return Ok(0),
            Operation::Deallocate if wanted.durable => {
                return Err(Error::Invalid(
                    "what is not needed any more cannot be durable: FP_DURABLE is for writes and zeroes",
                ));
            }
            _ => {}
        }
        let (offset, size) = (wanted.offset, self.size());
        if len == 0 || !self.namespace.is_whole(len | offset) {
            return Err(Error::Blocks { offset, len, block_size: self.block_size() });
        }
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(Error::PastEnd { offset, len, size });
        }
        Ok(len)
    }

    /// Begins a request.
    ///
    /// # Safety
    /// As of [`accept`](Self::accept).
    pub(crate) unsafe fn submit(&mut self, wanted: &Submission<'_>) -> Result<Place, Error> {
        // SAFETY: the caller's promise.
        let place = unsafe { self.accept(wanted) }?;
        self.pump();
        Ok(place)
    }

    /// Takes a request on, as the last of those that wait: [`pump`](Self::pump) begins them all, and is to be called before the lock is given
    /// back.
    ///
    /// # Safety
    /// Until the request has ended, the pieces are memory that nobody writes (of a write) or looks at (of a read), unless they are the
    /// space's own buffer.
    pub(crate) unsafe fn accept(&mut self, wanted: &Submission<'_>) -> Result<Place, Error> {
        let len = self.check(wanted)?;
        // Tagged completions wait for the program, and must have room. Who waits for a request's end leaves none, and would wait in vain for
        // the program, which may be himself, to take others'.
        let leaves_none = wanted.teller == Teller::Waited;
        if !leaves_none && self.completions.len() + self.table.in_progress() >= self.in_flight.len() {
            return Err(Error::Full);
        }
        // An error that is not made need not be dropped either.
        let Some(place) = self.table.take() else { return Err(Error::Full) };
        let started = self.statistics.is_some().then(Instant::now);
        let request = self.table.get(place);
        request.pieces.set(wanted.pieces);
        *request = Request {
            operation: wanted.operation,
            offset: wanted.offset,
            len,
            direct: wanted.direct,
            durable: wanted.durable,
            teller: wanted.teller,
            pieces: std::mem::take(&mut request.pieces),
            issued: 0,
            flushed: false,
            commands: 0,
            errno: 0,
            started,
            ended: false,
        };
        if wanted.teller == Teller::Counted {
            self.counted += 1;
        }
        self.waiting.push_back(place);
        Ok(place)
    }

    /// Makes commands of requests while there is room, in order, and rings.
    pub(crate) fn pump(&mut self) {
        // An engine has as many places as it has, however few the space was opened for; identifiers of `n` commands are below `n`.
        let room = self.way.capacity().min(self.in_flight.len());
        while let Some(&place) = self.waiting.front() {
            while !self.table.look(place).is_issued() && self.way.in_flight() < room && !self.gone {
                if let Err(error) = self.issue(place) {
                    self.table.get(place).errno = error.errno();
                }
            }
            if !self.table.look(place).is_issued() && !self.gone {
                break;
            }
            self.waiting.pop_front();
            self.end_if_over(place);
        }
        if let Err(error) = self.way.ring() {
            drop(error);
            self.lose();
        }
    }

    /// Makes the next command of a request.
    fn issue(&mut self, place: Place) -> Result<(), Error> {
        let request = self.table.look(place);
        let left = request.len - request.issued;
        let at = request.issued as usize;
        let lba = Lba(self.namespace.blocks(request.offset + request.issued));
        let (operation, durable) = (request.operation, request.durable);
        let (command, len, bounce) = match operation {
            Operation::Flush => (self.namespace.flush(), 0, None),
            Operation::WriteZeroes => {
                let count = BlockCount(self.namespace.blocks(left).min(UNNAMED));
                let command = if durable {
                    self.namespace.write_zeroes_fua(lba, count, false)?
                } else {
                    self.namespace.write_zeroes(lba, count, false)?
                };
                (command, self.bytes(count), None)
            }
            Operation::Deallocate => {
                let count = BlockCount(self.namespace.blocks(left).min(UNNAMED));
                let bounce = self.bounce()?;
                let list = &self.bounces.runs[usize::from(bounce)];
                match self.namespace.deallocate(&[(lba, count)], list) {
                    Ok(command) => (command, self.bytes(count), Some(bounce)),
                    Err(error) => {
                        self.bounces.free.push(bounce);
                        return Err(error.into());
                    }
                }
            }
            Operation::Read | Operation::Write => {
                let (data, bounce) = self.data(place, at, left)?;
                match self.transfer(operation, durable, lba, data) {
                    Ok(command) => (command, data.len, bounce),
                    Err(error) => {
                        self.bounces.free.extend(bounce);
                        return Err(error);
                    }
                }
            }
        };
        let cid = match self.way.submit(&command) {
            Ok(cid) => cid,
            Err(error) => {
                self.bounces.free.extend(bounce);
                return Err(error.into());
            }
        };
        self.in_flight[usize::from(cid.0)] = Some(InFlight { place, at, len, bounce });
        let request = self.table.get(place);
        request.issued += len as u64;
        request.flushed = operation == Operation::Flush;
        request.commands += 1;
        Ok(())
    }

    fn bytes(&self, count: BlockCount) -> usize {
        count.0 as usize * self.namespace.block_size() as usize
    }

    fn transfer(&self, operation: Operation, durable: bool, lba: Lba, data: DmaRange) -> Result<Command, Error> {
        Ok(match (operation, durable) {
            (Operation::Read, _) => self.namespace.read(lba, data)?,
            (_, false) => self.namespace.write(lba, data)?,
            (_, true) => self.namespace.write_fua(lba, data)?,
        })
    }

    /// The memory of a request's next command: of the space's buffer, or a bounce run, filled for a write.
    fn data(&mut self, place: Place, at: usize, left: u64) -> Result<(DmaRange, Option<u16>), Error> {
        let most = usize::try_from(self.namespace.max_transfer()).unwrap_or(usize::MAX);
        let left = usize::try_from(left).unwrap_or(usize::MAX);
        if self.table.look(place).direct {
            let Some(run) = self.table.look(place).pieces.run(at) else { return Err(Error::NotDirect) };
            let Some(range) = self.within(run) else { return Err(Error::NotDirect) };
            return Ok((self.buffer.slice(range.start, range.len().min(most).min(left)), None));
        }
        let bounce = self.bounce()?;
        let (request, run) = (self.table.look(place), &self.bounces.runs[usize::from(bounce)]);
        let len = left.min(most).min(BOUNCE);
        if request.operation == Operation::Write {
            // SAFETY: whoever submitted it promised that the memory stays until the request has ended.
            unsafe { request.pieces.gather(at, len, run) };
        }
        Ok((run.slice(0, len), Some(bounce)))
    }

    /// A free bounce run.
    fn bounce(&mut self) -> Result<u16, Error> {
        if let Some(free) = self.bounces.free.pop() {
            return Ok(free);
        }
        let run = self.memory.alloc(BOUNCE)?;
        run.fill(0);
        self.bounces.runs.push(run);
        Ok((self.bounces.runs.len() - 1) as u16)
    }

    /// Takes what has finished, and goes on with what waits. How many requests ended.
    pub(crate) fn poll(&mut self) -> usize {
        let before = self.table.in_progress();
        if before == 0 {
            return 0;
        }
        let mut found = false;
        while !self.gone {
            match self.way.next_completion() {
                Ok(Some(cqe)) => {
                    found = true;
                    self.settle(&cqe);
                }
                Ok(None) => break,
                Err(_) => self.lose(),
            }
        }
        if found {
            self.vain = 0;
            self.pump();
        } else {
            self.vain += 1;
            if self.vain >= LOOKS || self.looked.is_some_and(|looked| looked.elapsed() >= LOOK_AGAIN) {
                self.look_after();
            }
        }
        before.saturating_sub(self.table.in_progress())
    }

    /// Looks whether the daemon is still there: shared memory alone does not tell.
    pub(crate) fn look_after(&mut self) {
        self.vain = 0;
        self.looked = self.looked.map(|_| Instant::now());
        // An engine ends with the worker that it was in, and the controller says so to who asks. Of one that has failed the daemon ends the
        // connection, a moment later: nobody need ask for a queue's sake.
        let has_failed = |space: &Self| match space.way {
            Way::Queue(_) => false,
            // Who has it locked asks it something, and hears the same.
            Way::Engine(_) => space.controller.try_lock().is_ok_and(|it| it.status().is_ok_and(|status| status.cfs())),
        };
        if !self.gone && (self.way.check().is_err() || has_failed(self)) {
            self.lose();
        }
    }

    fn settle(&mut self, cqe: &Cqe) {
        let Some(done) = self.in_flight.get_mut(usize::from(cqe.cid.0)).and_then(Option::take) else {
            return self.lose();
        };
        let status = cqe.status();
        let request = self.table.get(done.place);
        request.commands -= 1;
        if !status.is_success() {
            if request.errno == 0 {
                request.errno = Error::Status { status }.errno();
            }
        } else if let (Operation::Read, Some(bounce)) = (request.operation, done.bounce) {
            // SAFETY: whoever submitted it promised that the memory stays until the request has ended.
            unsafe { request.pieces.scatter(done.at, done.len, &self.bounces.runs[usize::from(bounce)]) };
        }
        self.bounces.free.extend(done.bounce);
        // One that still waits for room ends when its turn comes.
        if self.waiting.front() != Some(&done.place) {
            self.end_if_over(done.place);
        }
    }

    /// Ends a request whose commands have all ended.
    fn end_if_over(&mut self, place: Place) {
        let gone = self.gone;
        let request = self.table.get(place);
        if request.ended || request.commands > 0 {
            return;
        }
        if gone && request.errno == 0 && !request.is_issued() {
            request.errno = Errno::NODEV.raw_os_error();
        }
        if !request.is_issued() {
            return;
        }
        request.ended = true;
        let nanos = request.started.map_or(0, |start| u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        let (errno, teller, operation) = (request.errno, request.teller, request.operation);
        let bytes = if errno == 0 { request.len } else { 0 };
        if let Some(statistics) = &mut self.statistics {
            match errno {
                0 => statistics.of(operation).note(bytes, nanos),
                _ => statistics.of(operation).errors += 1,
            }
        }
        match teller {
            Teller::Tagged(tag) => self.completions.push_back(Completion { tag, errno, bytes, nanos }),
            Teller::Counted => {
                self.counted -= 1;
                if self.counted_errno == 0 {
                    self.counted_errno = errno;
                }
            }
            Teller::Abandoned => self.counted -= 1,
            Teller::Waited => return,
        }
        self.table.give_back(place);
    }

    /// The daemon is gone, or has ended the session, or speaks nonsense: everything in progress fails.
    fn lose(&mut self) {
        if std::mem::replace(&mut self.gone, true) {
            return;
        }
        for at in 0..self.in_flight.len() {
            let Some(lost) = self.in_flight[at].take() else { continue };
            let request = self.table.get(lost.place);
            request.commands -= 1;
            if request.errno == 0 {
                request.errno = Errno::NODEV.raw_os_error();
            }
            // Its bounce run is not given back: a daemon that is not quite gone may still write there.
            if !self.waiting.contains(&lost.place) {
                self.end_if_over(lost.place);
            }
        }
        while let Some(place) = self.waiting.pop_front() {
            self.end_if_over(place);
        }
        if let Some(events) = self.way.interrupt() {
            // Whoever waits there is told as of any end. It is full: then it is readable already.
            let _ = rustix::io::write(events, &1_u64.to_ne_bytes());
        }
    }

    /// A waited request's result, once it has ended; its place is free then.
    pub(crate) fn result(&mut self, place: Place) -> Option<Completion> {
        let request = self.table.get(place);
        if !request.ended {
            return None;
        }
        let (errno, bytes) = (request.errno, if request.errno == 0 { request.len } else { 0 });
        self.table.give_back(place);
        Some(Completion { tag: 0, errno, bytes, nanos: 0 })
    }

    /// Nobody waits for the request any more, and who did was told so: no more commands are made of it, and it ends by itself. Memory of the
    /// program's own is not touched from now on; the space's buffer is, by commands of a direct request that are in flight, until it is
    /// no longer counted.
    pub(crate) fn abandon(&mut self, place: Place) {
        self.counted += 1;
        let request = self.table.get(place);
        request.teller = Teller::Abandoned;
        request.pieces.set(&[]);
        request.errno = Errno::TIMEDOUT.raw_os_error();
    }

    /// Whether a look at the queue is needless for who wants so many completions: they are here, and no request waits for the room of one
    /// that has ended meanwhile.
    pub(crate) fn has_enough(&self, wanted: usize) -> bool {
        self.completions.len() >= wanted && self.waiting.is_empty()
    }

    /// The next tagged request that has ended.
    pub(crate) fn completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    /// Counted requests in progress, or what went wrong with one of them since this was last asked.
    pub(crate) fn counted(&mut self) -> Result<usize, i32> {
        match std::mem::take(&mut self.counted_errno) {
            0 => Ok(self.counted),
            errno => Err(errno),
        }
    }
}
