//! Guests that mean harm: what a neighbour has to bear. They are played by clients of our own, each on a thread.
//!
//! ```text
//!   Hostile::nvme(socket, tricks) ──► thread: connect ─ a trick, again and again ─ gone, or the device failed ─ connect ─ the next trick …
//!   Hostile::virtio(socket, tricks)   the same over vhost-user
//!        │ rounds(trick), ends(trick)
//!        └─ finish()
//! ```
//!
//! # Invariants
//!
//! - Nothing that the device does is a failure here: whatever ends a session, there is a next one.
//! - This side never touches memory that it has truncated.
//!
//! # What it does not do
//!
//! Check answers: that is what the tests of bad input are for (docs/testing.md). Who uses it looks at the neighbour.

mod nvme;
mod virtio;

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// A kind of harm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trick {
    /// Lists and chains of descriptors that lead to themselves.
    Loops,
    /// Full queues of what no command is, and of the largest; doorbells that make no sense; messages without end.
    Floods,
    /// Memory that is unmapped or truncated under commands and under the queues themselves.
    Shrinking,
}

impl Trick {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Loops, Self::Floods, Self::Shrinking];

    /// In a word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Loops => "loops",
            Self::Floods => "floods",
            Self::Shrinking => "shrinking memory",
        }
    }
}

/// How often each trick was done, and how often the device would have no more of it.
#[derive(Debug, Default)]
struct Counts {
    rounds: [AtomicU64; 3],
    ends: [AtomicU64; 3],
    /// How the last session of each came to its end.
    last: [Mutex<String>; 3],
}

/// What a session knows of its guest.
struct Session {
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    trick: Trick,
}

impl Session {
    /// Rounds of a trick before the guest goes and comes again.
    const ROUNDS: usize = 50;
    /// The longest that a round waits for what does not come: a queue that leads nowhere is told by nobody.
    const WAIT: Duration = Duration::from_secs(1);

    /// Whether there is another round, which counts from here on.
    fn goes_on(&self, round: usize) -> bool {
        let goes_on = round < Self::ROUNDS && !self.stop.load(Ordering::Relaxed);
        self.counts.rounds[self.trick as usize].fetch_add(u64::from(goes_on), Ordering::Relaxed);
        goes_on
    }

    /// Waits until something is done, or for long enough; whether it is.
    fn wait(&self, mut done: impl FnMut() -> bool) -> bool {
        let start = Instant::now();
        while !done() {
            if self.stop.load(Ordering::Relaxed) || start.elapsed() > Self::WAIT {
                return false;
            }
            thread::sleep(Duration::from_micros(20));
        }
        true
    }
}

/// Why a session ended: whatever it was.
type Ended = Box<dyn std::error::Error>;

/// A guest that does harm until it is told to end.
#[derive(Debug)]
pub struct Hostile {
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    thread: Option<JoinHandle<()>>,
}

impl Hostile {
    /// At the controller behind a vfio-user socket, which has a namespace 1.
    pub fn nvme(socket: &Path, tricks: &'static [Trick]) -> Self {
        Self::start(socket, tricks, false, nvme::session)
    }

    /// As [`nvme`](Self::nvme), with what processor time nobody else wants: what it takes from others is the device's doing.
    pub fn nvme_in_the_background(socket: &Path, tricks: &'static [Trick]) -> Self {
        Self::start(socket, tricks, true, nvme::session)
    }

    /// At the virtio disk behind a vhost-user socket.
    pub fn virtio(socket: &Path, tricks: &'static [Trick]) -> Self {
        Self::start(socket, tricks, false, virtio::session)
    }

    fn start(
        socket: &Path,
        tricks: &'static [Trick],
        in_the_background: bool,
        session: fn(&Path, &Session) -> Result<(), Ended>,
    ) -> Self {
        let (stop, counts) = (Arc::<AtomicBool>::default(), Arc::<Counts>::default());
        let (socket, its_stop, its_counts): (PathBuf, _, _) = (socket.to_owned(), Arc::clone(&stop), Arc::clone(&counts));
        let thread = thread::spawn(move || {
            if in_the_background {
                // Of this thread alone. Refused, it is as loud as everybody.
                let _ = rustix::process::nice(19);
            }
            for trick in tricks.iter().cycle() {
                if its_stop.load(Ordering::Relaxed) {
                    break;
                }
                let this = Session { stop: Arc::clone(&its_stop), counts: Arc::clone(&its_counts), trick: *trick };
                if let Err(error) = session(&socket, &this) {
                    its_counts.ends[*trick as usize].fetch_add(1, Ordering::Relaxed);
                    *lock(&its_counts.last[*trick as usize]) = error.to_string();
                    // The device may still be busy with the guest before.
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
        Self { stop, counts, thread: Some(thread) }
    }

    /// How often a trick was done.
    pub fn rounds(&self, trick: Trick) -> u64 {
        self.counts.rounds[trick as usize].load(Ordering::Relaxed)
    }

    /// How often a session with a trick ended before its time: the device had failed, ended the connection, or was not there.
    pub fn ends(&self, trick: Trick) -> u64 {
        self.counts.ends[trick as usize].load(Ordering::Relaxed)
    }

    /// How the last of these sessions came to its end.
    pub fn last_end(&self, trick: Trick) -> String {
        lock(&self.counts.last[trick as usize]).clone()
    }

    /// Ends it.
    ///
    /// # Panics
    /// When the guest itself has.
    pub fn finish(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().expect("a thread").join().expect("the hostile guest does not panic");
    }
}

fn lock(text: &Mutex<String>) -> MutexGuard<'_, String> {
    text.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
