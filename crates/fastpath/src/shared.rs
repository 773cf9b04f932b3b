//! A space as programs have it: for any number of threads, with waiting.

use std::{
    mem::{ManuallyDrop, MaybeUninit},
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::event::{Timespec, epoll};

use crate::{
    error::Error,
    home::Home,
    memory::Piece,
    requests::{Completion, Direct, Operation, Place, Teller},
    space::{Options, Space, Submission, VOLUME},
    statistics::Statistics,
};

/// Looks in vain before a waiting thread sleeps. It does not yield before: see `clippy.toml`.
const SPINS: u32 = 2000;
/// How long it sleeps then, where there is no event fd.
const NAP: Duration = Duration::from_micros(50);
/// The longest sleep on the event fd: another thread may have taken what we wait for.
const DOZE: Duration = Duration::from_millis(10);

/// A volume of a running daemon, with a controller and a buffer of our own. Threads may share it; the fastest is one for each thread.
///
/// Requests that are in progress when it is dropped may or may not be carried out.
pub struct FastPath {
    space: ManuallyDrop<Mutex<Space>>,
    events: Option<OwnedFd>,
    connection: OwnedFd,
    timeout: Duration,
    block_size: u32,
    /// Address and length of the buffer.
    buffer: (usize, usize),
    home: Home,
}

impl Drop for FastPath {
    /// Whatever was forked meanwhile has the connection, too, and must not keep the space.
    fn drop(&mut self) {
        let is_here = self.home.is_here();
        if is_here {
            // It is closed already where the daemon has gone.
            let _ = rustix::net::shutdown(&self.connection, rustix::net::Shutdown::Both);
        }
        // What a thread that is not in the forked process was in the middle of is left as it is.
        if is_here || self.is_left_alone() {
            // SAFETY: here alone it is dropped, and nobody uses it afterwards.
            unsafe { ManuallyDrop::drop(&mut self.space) }
        }
    }
}

impl FastPath {
    /// Asks the daemon for the volume, and for a controller that shows it to us.
    pub fn open(volume: &str, options: &Options) -> Result<Self, Error> {
        let (space, connection) = Space::open(volume, options)?;
        let events = space.way().interrupt().map(|fd| fd.try_clone_to_owned()).transpose();
        let events = events.map_err(millrace_driver::DriverError::EventFd)?;
        let buffer = (space.buffer().as_ptr() as usize, space.buffer().len());
        let (timeout, block_size) = (options.timeout, space.block_size());
        let home = Home::new().map_err(|error| Error::Home(error.into()))?;
        Ok(Self { space: ManuallyDrop::new(Mutex::new(space)), events, connection, timeout, block_size, buffer, home })
    }

    /// Whether no thread has the space, or asks its controller: those are the ones that hold locks which the space's end takes. In a forked
    /// process: whether none did.
    fn is_left_alone(&self) -> bool {
        match self.space.try_lock() {
            Ok(space) => !space.is_asked_for(),
            Err(TryLockError::Poisoned(space)) => !space.get_ref().is_asked_for(),
            Err(TryLockError::WouldBlock) => false,
        }
    }

    /// A panic elsewhere leaves a space whole enough: what it owes is shared memory, and answers that are checked.
    ///
    /// # Errors
    /// [`Error::Gone`] in a forked process, at once: the lock may be that of a thread which is not there, and is never given back.
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, Space>, Error> {
        if !self.home.is_here() {
            return Err(Error::Gone);
        }
        Ok(self.space.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The volume's block size in bytes: requests are whole blocks at whole blocks.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// The volume's size in bytes, when it was opened or last [refreshed](Self::refresh): requests may go so far. 0 in a process that was
    /// forked from the one that opened it.
    pub fn size(&self) -> u64 {
        self.lock().map_or(0, |space| space.size())
    }

    /// Asks the daemon for the volume's size, which may change; the size. Of a volume that has grown, what is new may be used from now on.
    /// Other threads' requests do not wait for the answer.
    pub fn refresh(&self) -> Result<u64, Error> {
        let asked = self.lock()?.controller()?;
        // Until the answer is taken up: the one that came last counts.
        let mut controller = asked.lock().unwrap_or_else(PoisonError::into_inner);
        let namespace = controller.namespace(VOLUME).map_err(Error::Look)?;
        let mut space = self.lock()?;
        space.take_up(namespace);
        Ok(space.size())
    }

    /// Bytes of the buffer for direct requests.
    pub fn buffer_len(&self) -> usize {
        self.buffer.1
    }

    /// Address of the buffer. The daemon writes there when it is told to.
    pub(crate) fn buffer_address(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.buffer.0)
    }

    /// Copies bytes into the buffer.
    ///
    /// # Panics
    /// When they do not fit there, and in a process that was forked from the one that opened it.
    pub fn fill(&self, at: usize, bytes: &[u8]) {
        self.lock().expect("the space is this process's own").buffer().write_at(at, bytes);
    }

    /// Copies bytes out of the buffer.
    ///
    /// # Panics
    /// When they are not within it, and in a process that was forked from the one that opened it.
    pub fn take(&self, at: usize, bytes: &mut [u8]) {
        self.lock().expect("the space is this process's own").buffer().read_at(at, bytes);
    }

    /// Reads from `offset` on, and waits for it.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let piece = Piece { start: bytes.as_mut_ptr(), len: bytes.len() };
        // SAFETY: `bytes` is ours until `run` returns, and then the request has ended or has let go of it.
        unsafe { self.run(Operation::Read, offset, 0, &[piece], false) }
    }

    /// Writes from `offset` on, and waits for it; durable when `durable`.
    pub fn write(&self, offset: u64, bytes: &[u8], durable: bool) -> Result<(), Error> {
        let piece = Piece { start: bytes.as_ptr().cast_mut(), len: bytes.len() };
        // SAFETY: `bytes` is ours until `run` returns, and is only read; then the request has ended or has let go of it.
        unsafe { self.run(Operation::Write, offset, 0, &[piece], durable) }
    }

    /// Makes all that was written durable, and waits for it.
    pub fn flush(&self) -> Result<(), Error> {
        // SAFETY: no memory.
        unsafe { self.run(Operation::Flush, 0, 0, &[], false) }
    }

    /// Tells the volume that blocks' contents are not needed any more, and waits for it.
    pub fn deallocate(&self, offset: u64, len: u64) -> Result<(), Error> {
        // SAFETY: no memory.
        unsafe { self.run(Operation::Deallocate, offset, len, &[], false) }
    }

    /// Has blocks read as zeroes, and waits for it.
    pub fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), Error> {
        // SAFETY: no memory.
        unsafe { self.run(Operation::WriteZeroes, offset, len, &[], false) }
    }

    /// Begins to read into a part of the buffer. Its end is a [`Completion`] with this tag.
    ///
    /// # Errors
    /// [`Error::Full`] when as many requests are in progress, or as many completions not taken, as the space holds.
    pub fn begin_read(&self, tag: u64, offset: u64, part: Range<usize>) -> Result<(), Error> {
        self.begin(Operation::Read, tag, offset, part, false)
    }

    /// Begins to write a part of the buffer, durably if so; errors as for [`begin_read`](Self::begin_read).
    pub fn begin_write(&self, tag: u64, offset: u64, part: Range<usize>, durable: bool) -> Result<(), Error> {
        self.begin(Operation::Write, tag, offset, part, durable)
    }

    /// Begins a flush; errors as for [`begin_read`](Self::begin_read).
    pub fn begin_flush(&self, tag: u64) -> Result<(), Error> {
        self.begin(Operation::Flush, tag, 0, 0..0, false)
    }

    /// Begins several requests, in order, with one lock and one doorbell for all of them. How many: those from the first on that were
    /// accepted, each as a whole. Of the others nothing was done.
    ///
    /// # Errors
    /// When the first is not accepted, as for [`begin_read`](Self::begin_read): then none is.
    pub fn begin_many(&self, requests: &[Direct]) -> Result<usize, Error> {
        let mut space = self.lock()?;
        accept_each(&mut space, requests, |space, request| self.accept(space, request))
    }

    fn begin(&self, operation: Operation, tag: u64, offset: u64, part: Range<usize>, durable: bool) -> Result<(), Error> {
        self.begin_many(&[Direct { operation, tag, offset, part, durable }]).map(drop)
    }

    fn accept(&self, space: &mut Space, request: &Direct) -> Result<(), Error> {
        let Direct { operation, tag, offset, ref part, durable } = *request;
        let start = std::ptr::without_provenance_mut(self.buffer.0.wrapping_add(part.start));
        let pieces = [Piece { start, len: part.len() }];
        let (len, teller) = (part.len() as u64, Teller::Tagged(tag));
        let submission = Submission { operation, offset, len, pieces: &pieces, direct: true, durable, teller };
        // SAFETY: a direct request's memory is the space's own buffer, or it is refused.
        unsafe { space.accept(&submission) }.map(drop)
    }

    /// Goes on with what is in progress, without waiting, and takes tagged completions; how many. In a process that was forked from the one
    /// that opened it nothing is in progress.
    pub fn poll(&self, completions: &mut [Completion]) -> usize {
        self.poll_each(completions.len(), into(completions))
    }

    /// As [`poll`](Self::poll), for up to `most` completions.
    pub(crate) fn poll_each(&self, most: usize, each: impl FnMut(Completion)) -> usize {
        self.lock().map_or(0, |mut space| take(&mut space, most, each))
    }

    /// As [`poll`](Self::poll), but waits until there is at least one, nothing is in progress, or `timeout` has passed.
    pub fn wait(&self, completions: &mut [Completion], timeout: Duration) -> usize {
        self.wait_each(completions.len(), timeout, into(completions))
    }

    /// As [`wait`](Self::wait), for up to `most` completions.
    pub(crate) fn wait_each(&self, most: usize, timeout: Duration, mut each: impl FnMut(Completion)) -> usize {
        let mut pause = Pause::new(self, timeout);
        loop {
            let Ok(mut space) = self.lock() else { return 0 };
            let taken = take(&mut space, most, &mut each);
            // Under the lock of the look: what has ended since would be a completion that this says is not there.
            if taken > 0 || most == 0 || space.in_progress() == 0 || pause.is_over() {
                return taken;
            }
            drop(space);
            self.pause(&mut pause);
        }
    }

    /// Readable when something has finished since it was last read: an event fd, if the space was opened with events. Read it, then
    /// [`poll`](Self::poll) until nothing comes. It may be readable when nothing has. That the daemon has ended it tells only after a look
    /// at the space: see [`connection`](Self::connection).
    pub fn events(&self) -> Option<BorrowedFd<'_>> {
        self.events.as_ref().map(AsFd::as_fd)
    }

    /// Hangs up (`POLLHUP`, `POLLRDHUP`) when the daemon has ended, or has ended the space: to be watched, and nothing else, by those who
    /// wait for [`events`](Self::events) alone. [`poll`](Self::poll) then ends what is in progress with `ENODEV`.
    pub fn connection(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }

    /// What requests took so far, if the space measures, and is this process's own.
    pub fn statistics(&self) -> Option<Statistics> {
        self.lock().ok()?.statistics().map(|statistics| statistics.clone())
    }

    /// The same, and begins to count anew: each request is told of once.
    pub fn take_statistics(&self) -> Option<Statistics> {
        self.lock().ok()?.statistics().map(|statistics| {
            let taken = statistics.clone();
            statistics.clear();
            taken
        })
    }

    /// Counted requests in progress, or what went wrong with one of them since this was last asked. Goes on with what is in progress.
    pub(crate) fn counted(&self) -> Result<usize, i32> {
        // Of a forked process's nothing is in progress.
        let Ok(mut space) = self.lock() else { return Ok(0) };
        space.poll();
        space.counted()
    }

    /// Begins a request and waits for its end.
    ///
    /// # Safety
    /// The pieces are as [`Space::submit`] wants them until this returns.
    unsafe fn run(&self, operation: Operation, offset: u64, len: u64, pieces: &[Piece], durable: bool) -> Result<(), Error> {
        let submission = Submission { operation, offset, len, pieces, direct: false, durable, teller: Teller::Waited };
        // SAFETY: the caller's promise; `finish` returns when the request has ended or has let go of the memory.
        let completion = unsafe { self.submit_and_wait(&submission, None) }?;
        match completion.errno {
            0 => Ok(()),
            errno => Err(Error::Failed { errno }),
        }
    }

    /// As [`Space::submit`]; with a position, there instead of at the submission's offset. It moves on behind what is accepted, and only then:
    /// so threads leave nothing out.
    ///
    /// # Safety
    /// The pieces are as [`Space::submit`] wants them.
    pub(crate) unsafe fn submit(&self, submission: &Submission<'_>, position: Option<&AtomicU64>) -> Result<Place, Error> {
        let mut space = self.lock()?;
        let offset = position.map_or(submission.offset, |position| position.load(Ordering::Relaxed));
        // SAFETY: the caller's promise.
        let place = unsafe { space.submit(&Submission { offset, ..*submission }) }?;
        if let Some(position) = position {
            // Under the lock, as all that move it. It lies within the volume, or the request had been refused.
            position.store(offset + submission.pieces.iter().map(|piece| piece.len as u64).sum::<u64>(), Ordering::Relaxed);
        }
        Ok(place)
    }

    /// As `run`, for any submission whose teller is [`Teller::Waited`]. Waits for room as well, for no longer in all than the space's timeout.
    ///
    /// # Safety
    /// The pieces are as [`Space::submit`] wants them until this returns.
    pub(crate) unsafe fn submit_and_wait(
        &self,
        submission: &Submission<'_>,
        position: Option<&AtomicU64>,
    ) -> Result<Completion, Error> {
        let mut pause = Pause::new(self, self.timeout);
        let place = loop {
            // SAFETY: the caller's promise.
            match unsafe { self.submit(submission, position) } {
                Ok(place) => break place,
                Err(Error::Full) if pause.is_over() => return Err(Error::NoRoom),
                Err(Error::Full) => {
                    self.lock()?.poll();
                    self.pause(&mut pause);
                }
                Err(error) => return Err(error),
            }
        };
        // It spins again, for it may end soon; its time goes on.
        pause.rounds = 0;
        self.finish(place, pause)
    }

    fn finish(&self, place: Place, mut pause: Pause<'_>) -> Result<Completion, Error> {
        loop {
            let mut space = self.lock()?;
            space.poll();
            if let Some(completion) = space.result(place) {
                return Ok(completion);
            }
            if pause.is_over() {
                space.abandon(place);
                return Err(Error::TimedOut);
            }
            drop(space);
            self.pause(&mut pause);
        }
    }

    /// A bell for this thread: that of one who has slept before, or a new one. Where there are no more descriptors, it naps.
    fn bell(&self) -> Option<Bell> {
        let events = self.events.as_ref()?;
        let kept = self.lock().ok()?.bell.take();
        kept.or_else(|| Bell::new(events).ok())
    }

    /// Waits a little, the longer it has waited the more.
    fn pause(&self, pause: &mut Pause<'_>) {
        pause.rounds = pause.rounds.saturating_add(1);
        if pause.rounds < SPINS {
            return std::hint::spin_loop();
        }
        if pause.rounds == SPINS && pause.bell.is_none() {
            pause.bell = self.bell();
        }
        let doze = pause.left().min(DOZE);
        let has_rung = if let Some(bell) = &pause.bell {
            bell.wait(doze)
        } else {
            std::thread::sleep(NAP);
            false
        };
        if !has_rung {
            pause.look();
        }
    }
}

/// Takes requests on until one is refused, and begins those before; how many. The first one's error, if it is that one.
pub(crate) fn accept_each<T>(
    space: &mut Space,
    requests: &[T],
    mut accept: impl FnMut(&mut Space, &T) -> Result<(), Error>,
) -> Result<usize, Error> {
    let mut accepted = 0;
    for request in requests {
        match accept(space, request) {
            Ok(()) => accepted += 1,
            Err(error) if accepted == 0 => return Err(error),
            Err(_) => break,
        }
    }
    space.pump();
    Ok(accepted)
}

/// Goes on with what is in progress, and takes tagged completions; how many.
fn take(space: &mut Space, most: usize, mut each: impl FnMut(Completion)) -> usize {
    // Who wants nothing wants that it goes on.
    if most == 0 || !space.has_enough(most) {
        space.poll();
    }
    let mut taken = 0;
    while taken < most {
        let Some(completion) = space.completion() else { break };
        each(completion);
        taken += 1;
    }
    taken
}

/// Puts completions there, one after the other.
fn into(completions: &mut [Completion]) -> impl FnMut(Completion) {
    let mut room = completions.iter_mut();
    move |completion| *room.next().expect("no more are taken than there is room for") = completion
}

/// What a waiting thread sleeps on, for itself alone: it rings at each write to the event fd, and reads nothing there. So what the event fd
/// tells of others' requests stays for those who sleep for it, the program's own loop among them.
pub(crate) struct Bell(OwnedFd);

impl Bell {
    fn new(events: &OwnedFd) -> rustix::io::Result<Self> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        // By edges: it rings anew though nobody has read what rang before. What is there now rings at once.
        epoll::add(&set, events, epoll::EventData::new_u64(0), epoll::EventFlags::IN | epoll::EventFlags::ET)?;
        Ok(Self(set))
    }

    /// Waits for so long at the most; whether it rang. Not for what another thread has read meanwhile, which looks, too.
    fn wait(&self, time: Duration) -> bool {
        let (mut room, time) = ([MaybeUninit::<epoll::Event>::uninit()], Timespec::try_from(time).ok());
        epoll::wait(&self.0, &mut room, time.as_ref()).is_ok_and(|(rung, _)| !rung.is_empty())
    }
}

/// How long somebody has waited.
struct Pause<'a> {
    path: &'a FastPath,
    timeout: Duration,
    rounds: u32,
    since: Option<Instant>,
    bell: Option<Bell>,
}

impl Drop for Pause<'_> {
    /// One bell is kept: a thread that waits again and again makes none each time. More are not, for the daemon's signal goes to all.
    fn drop(&mut self) {
        if let Some(bell) = self.bell.take()
            && let Ok(mut space) = self.path.lock()
        {
            space.bell.get_or_insert(bell);
        }
    }
}

impl<'a> Pause<'a> {
    fn new(path: &'a FastPath, timeout: Duration) -> Self {
        Self { path, timeout, rounds: 0, since: None, bell: None }
    }

    /// Whether it has been as long as it may be. Short waits do not ask the clock.
    fn is_over(&mut self) -> bool {
        if self.rounds < SPINS && !self.timeout.is_zero() {
            return false;
        }
        self.left().is_zero()
    }

    /// What is left of its time, which begins when this is first asked.
    fn left(&mut self) -> Duration {
        self.timeout.saturating_sub(self.since.get_or_insert_with(Instant::now).elapsed())
    }

    /// Asks now and then whether the daemon is still there.
    fn look(&self) {
        if self.rounds.is_multiple_of(100)
            && let Ok(mut space) = self.path.lock()
        {
            space.look_after();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use millrace_tests::Daemon;

    use super::*;

    #[test]
    fn of_the_bells_of_those_who_slept_one_is_kept_for_the_next() {
        let daemon = Daemon::start();
        daemon.run(&["volume", "create", "slow", "--size", "1M", "--stack", "throttle(iops=4) | memory"]);
        let options = Options { run_dir: Some(daemon.run_dir()), events: true, ..Options::default() };
        let path = FastPath::open("slow", &options).unwrap();
        let is_kept = || path.lock().unwrap().bell.is_some();
        assert!(!is_kept());
        // Four a second: some of them sleep.
        let read = || path.read(0, &mut [0; 512]).unwrap();
        assert!((0..20).any(|_| {
            read();
            is_kept()
        }));
        let sleeps_on_it = || {
            std::thread::scope(|scope| {
                let reads = scope.spawn(read);
                while is_kept() {
                    if reads.is_finished() {
                        return false;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                true
            })
        };
        assert!((0..20).any(|_| sleeps_on_it()), "each makes another one");
        assert!(is_kept());
        drop(path);
        daemon.finish();
    }

    #[test]
    fn a_forked_process_leaves_alone_what_a_thread_was_in_the_middle_of() {
        let daemon = Daemon::start();
        daemon.run(&["volume", "create", "m", "--size", "1M", "--backend", "memory"]);
        let options = Options { run_dir: Some(daemon.run_dir()), ..Options::default() };
        for asks in [true, false] {
            let path = FastPath::open("m", &options).unwrap();
            let controller = path.lock().unwrap().controller().unwrap();
            let asked = asks.then(|| controller.lock().unwrap());
            path.home.leave();
            drop(path);
            drop(asked);
            assert_eq!(Arc::strong_count(&controller), if asks { 2 } else { 1 }, "the space is there yet: {asks}");
        }
    }
}
