//! A guest's copies within a file.
//!
//! ```text
//!   copy ─► whole pages, where the file system may share blocks ─► queue ─► a thread that may wait: copy_file_range
//!       └─► what is left ─► piece by piece through a buffer; zeroes are given back
//! ```
//!
//! The copy is under way until the thread is done with it, and so is the request; the file is open until then, too. The threads are everybody's,
//! and a file system may keep them for as long as it likes: what none of them has begun after a while is taken back, and goes through the
//! buffer.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use millrace_block::{BlockCount, BlockError, Lba, Operation, Request, TaskContext};
use millrace_memory::{BUFFER_SIZE, PAGE_SIZE, Segment};
use rustix::io::Errno;

use super::{FileVolume, transfer::Direction};
use crate::naps::Naps;

/// Copies that may be under way at once.
const THREADS: usize = 4;
/// Copies that may wait for a thread. More go through buffers.
const ROOM: usize = 256;
/// How long a copy waits for a thread.
const PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 60_000 } else { 100 });
/// Less is copied sooner than a thread hears of it, and would cut the file in small extents.
const LEAST: u64 = if cfg!(test) { PAGE_SIZE } else { BUFFER_SIZE as u64 };
/// Failures that the next copy would meet, too.
const LASTING: [Errno; 6] = [Errno::OPNOTSUPP, Errno::NOSYS, Errno::XDEV, Errno::INVAL, Errno::PERM, Errno::TXTBSY];

static QUEUE: OnceLock<Option<SyncSender<Arc<Job>>>> = OnceLock::new();

/// A file in which the system copies by itself, one range at a time.
#[derive(Debug)]
pub(super) struct Sharing {
    file: Arc<OwnedFd>,
    queue: &'static SyncSender<Arc<Job>>,
    job: Arc<Job>,
    /// The system has refused it, and would again.
    refused: AtomicBool,
    /// Bytes that it has copied.
    #[cfg(test)]
    copied: std::sync::atomic::AtomicU64,
}

/// What a request and a thread know of a copy.
#[derive(Debug, Default)]
struct Job(Mutex<State>);

#[derive(Debug, Default)]
enum State {
    #[default]
    Idle,
    Queued(Work),
    Running,
    Done(Copied),
}

#[derive(Debug)]
struct Work {
    file: Arc<OwnedFd>,
    from: u64,
    to: u64,
    len: u64,
}

/// How much was copied, from the first byte on, and whether that is all that this file system will ever do.
#[derive(Clone, Copy, Debug)]
struct Copied {
    bytes: u64,
    refused: bool,
}

impl Work {
    fn carry_out(&self) -> Copied {
        let mut bytes = 0;
        while bytes < self.len {
            let (mut from, mut to) = (self.from + bytes, self.to + bytes);
            let left = usize::try_from(self.len - bytes).unwrap_or(usize::MAX);
            match rustix::fs::copy_file_range(&self.file, Some(&mut from), &self.file, Some(&mut to), left) {
                // The file ends there.
                Ok(0) => break,
                Ok(copied) => bytes += copied as u64,
                Err(Errno::INTR) => {}
                Err(errno) => {
                    tracing::debug!(%errno, "the system does not copy within a file");
                    return Copied { bytes, refused: LASTING.contains(&errno) };
                }
            }
        }
        Copied { bytes, refused: false }
    }
}

impl Job {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has it queued, unless there is another copy.
    fn put(&self, work: impl FnOnce() -> Work) -> bool {
        let mut state = self.state();
        let free = matches!(*state, State::Idle);
        if free {
            *state = State::Queued(work());
        }
        free
    }

    /// Takes it back, if no thread has begun.
    fn take_back(&self) -> bool {
        let mut state = self.state();
        let queued = matches!(*state, State::Queued(_));
        if queued {
            *state = State::Idle;
        }
        queued
    }

    /// What has become of it, once.
    fn result(&self) -> Option<Copied> {
        let mut state = self.state();
        let State::Done(copied) = *state else { return None };
        *state = State::Idle;
        Some(copied)
    }

    /// A thread takes it; `None`: it was taken back.
    fn begin(&self) -> Option<Work> {
        let mut state = self.state();
        match std::mem::replace(&mut *state, State::Running) {
            State::Queued(work) => Some(work),
            other => {
                *state = other;
                None
            }
        }
    }

    /// A thread's part.
    fn run(&self) {
        let Some(work) = self.begin() else { return };
        let copied = work.carry_out();
        // The file first: who hears of the end may be about to close it.
        drop(work);
        *self.state() = State::Done(copied);
    }
}

impl Sharing {
    /// `None`: there are no threads for it.
    pub(super) fn of(file: &Arc<OwnedFd>) -> Option<Self> {
        let queue = QUEUE.get_or_init(start).as_ref()?;
        Some(Self {
            file: Arc::clone(file),
            queue,
            job: Arc::default(),
            refused: AtomicBool::new(false),
            #[cfg(test)]
            copied: std::sync::atomic::AtomicU64::new(0),
        })
    }

    /// Has the system copy whole pages; how many bytes it did, from the first on.
    async fn copy(&self, cx: TaskContext<'_>, from: u64, to: u64, len: u64) -> u64 {
        let fits = len >= LEAST && (from | to | len).is_multiple_of(PAGE_SIZE);
        // Who would have to wait for another copy is as soon done by a buffer.
        let mine = || self.job.put(|| Work { file: Arc::clone(&self.file), from, to, len });
        if self.refused.load(Ordering::Relaxed) || !fits || !mine() {
            return 0;
        }
        // What was taken back leaves its place in the queue behind: a thread may have begun all the same.
        if self.queue.try_send(Arc::clone(&self.job)).is_err() && self.job.take_back() {
            return 0;
        }
        let (began, mut naps) = (Instant::now(), Naps::default());
        let copied = loop {
            naps.nap(cx).await;
            if let Some(copied) = self.job.result() {
                break copied;
            }
            if began.elapsed() > PATIENCE && self.job.take_back() {
                return 0;
            }
        };
        if copied.refused {
            self.refused.store(true, Ordering::Relaxed);
        }
        #[cfg(test)]
        self.copied.fetch_add(copied.bytes, Ordering::Relaxed);
        copied.bytes / PAGE_SIZE * PAGE_SIZE
    }
}

fn start() -> Option<SyncSender<Arc<Job>>> {
    let (sender, receiver) = sync_channel(ROOM);
    let queue = Arc::new(Mutex::new(receiver));
    let mut started = 0;
    for _ in 0..THREADS {
        let queue = Arc::clone(&queue);
        match thread::Builder::new().name("millrace-copier".into()).spawn(move || run_all(&queue)) {
            Ok(_) => started += 1,
            Err(error) => tracing::warn!(%error, started, "fewer threads than wanted have the system copy within files"),
        }
    }
    (started > 0).then_some(sender)
}

fn run_all(queue: &Mutex<Receiver<Arc<Job>>>) {
    loop {
        // Whoever waits for the next one holds the lock, the others wait for that; it is free while a range is copied.
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = next else { return };
        job.run();
    }
}

impl FileVolume {
    /// A copy within the file.
    pub(super) async fn copy(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let Operation::Copy { source } = request.operation else { return Err(BlockError::Unsupported) };
        let shift = self.shape.get().0.shift();
        // No overflow: `check` found both ranges within the volume.
        let (from, (to, len)) = (source.0 << shift, self.offset_of(&request));
        let mut done = match &self.sharing {
            Some(sharing) => {
                // Where blocks cannot be shared, the system copies by way of the page cache.
                let _putting = self.cached.begin();
                sharing.copy(cx, from, to, len).await
            }
            None => 0,
        };
        if done == len {
            return Ok(());
        }
        let buffer = cx.buffers.take().await;
        while done < len {
            let piece = [buffer.segment((len - done).min(BUFFER_SIZE as u64) as usize)];
            let bytes = piece[0].len() as u64;
            self.move_piece(cx, Direction::Read, from + done, &piece).await?;
            if piece[0].is_zero() && self.can_punch.load(Ordering::Relaxed) {
                let operation = Operation::WriteZeroes { fua: false, deallocate: true };
                let (lba, count) = (Lba((to + done) >> shift), BlockCount(bytes >> shift));
                // It may need a buffer as well.
                self.erase(cx.deeper(), Request { operation, lba, count, segments: &[] }).await?;
            } else {
                self.move_piece(cx, Direction::Write { fua: false }, to + done, &piece).await?;
            }
            done += bytes;
        }
        Ok(())
    }

    /// Moves a piece that is aligned, at once where the file is memory and holds it.
    async fn move_piece(
        &self,
        cx: TaskContext<'_>,
        direction: Direction,
        offset: u64,
        piece: &[Segment],
    ) -> Result<(), BlockError> {
        let moved = self.map.as_ref().is_some_and(|map| match direction {
            Direction::Read => map.read(offset, piece),
            Direction::Write { .. } => map.write(offset, piece),
        });
        if moved { Ok(()) } else { self.move_all(cx, direction, offset, piece).await }
    }
}

#[cfg(test)]
mod tests {
    use std::io::pipe;

    use millrace_block::{
        BlockSize,
        conformance::{Bench, SyncHarness},
    };

    use super::*;
    use crate::FileOptions;

    const SEED: u64 = 20_262;

    /// A volume that has the system copy within its file, or within another one, whatever the file system is.
    fn volume(directory: &tempfile::TempDir, file: Option<OwnedFd>) -> Arc<FileVolume> {
        let path = directory.path().join("a.img");
        let options = FileOptions { path, size: Some(1 << 20), block_size: BlockSize::B512, read_only: false };
        let mut volume = FileVolume::open("disk", &options).unwrap();
        let inner = Arc::get_mut(&mut volume).unwrap();
        let file = file.map_or_else(|| Arc::clone(&inner.fd), Arc::new);
        inner.sharing = Sharing::of(&file);
        volume
    }

    /// Copies 40 blocks, which are five pages; how many bytes of them the system has copied.
    fn copied(volume: &Arc<FileVolume>, source: u64, target: u64) -> u64 {
        let sharing = volume.sharing.as_ref().expect("threads for it");
        let before = sharing.copied.load(Ordering::Relaxed);
        let mut harness = SyncHarness::new(SEED, false);
        let mut bench = Bench::new(&mut harness, volume.clone(), SEED);
        let data = bench.write_random(source, 40);
        bench.plain(Operation::Copy { source: Lba(source) }, target, 40).unwrap();
        bench.expect(target, &data);
        bench.expect(source, &data);
        assert!(matches!(*sharing.job.state(), State::Idle), "the next one may come");
        sharing.copied.load(Ordering::Relaxed) - before
    }

    #[test]
    fn the_system_copies_whole_pages_by_itself() {
        let directory = tempfile::tempdir().unwrap();
        let volume = volume(&directory, None);
        for (source, target, expected) in [(8, 1024, 20_480), (9, 1200, 0), (16, 1301, 0), (64, 512, 20_480)] {
            assert_eq!(copied(&volume, source, target), expected, "from {source} to {target}");
        }
    }

    #[test]
    fn what_the_system_refuses_goes_through_a_buffer() {
        let directory = tempfile::tempdir().unwrap();
        let (reader, _writer) = pipe().unwrap();
        let volume = volume(&directory, Some(reader.into()));
        assert_eq!(copied(&volume, 8, 1024), 0);
        assert!(volume.sharing.as_ref().unwrap().refused.load(Ordering::Relaxed), "it is not asked again");
        assert_eq!(copied(&volume, 16, 512), 0);
    }

    #[test]
    fn what_was_taken_back_is_not_copied_and_leaves_room_for_the_next() {
        let file = Arc::new(OwnedFd::from(tempfile::tempfile().unwrap()));
        let work = || Work { file: Arc::clone(&file), from: 0, to: 4096, len: 4096 };
        let job = Job::default();
        assert!(job.put(work) && !job.put(work) && job.take_back() && !job.take_back());
        assert_eq!(Arc::strong_count(&file), 1, "a file is not kept open for what will not be done");
        job.run();
        assert!(job.result().is_none());
        assert!(job.put(work) && job.begin().is_some());
        assert!(!job.take_back() && !job.put(work) && job.begin().is_none(), "a thread has it");
        *job.state() = State::Done(Copied { bytes: 4096, refused: false });
        assert!(!job.put(work), "nobody has heard of its end yet");
        assert_eq!(job.result().map(|copied| copied.bytes), Some(4096));
        assert!(job.put(work));
    }
}
