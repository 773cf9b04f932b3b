//! Looks at volumes' files, each by a thread of its own: a file system that does not answer keeps nobody waiting but those whose files it has.
//!
//! ```text
//!   volumes ─► due, by file system ─► where there is room, a thread each: the files, and those with keys ─► key commands ─► Found
//!                      ▲                                  └► a link leads to where none is ─┐
//!                      └────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! What volumes need to be opened is fetched on the way: keys, which come from files or from commands. Commands end by themselves, take no lane, and
//! run beside each other. Of a volume that somebody keeps they are fetched at first only: a try to open it may find it free a moment later, and
//! others wait for that. Afterwards nobody tries before it is free.
//!
//! A look that hangs has a lane of the broker, of which there are not many more (`docs/sandbox.md`). So looks are limited, and of those places, some are for file
//! systems that have answered already. Which one a file is on cannot be asked: that is what hangs. Its path tells; links are read one by one, and a
//! step into a file system without room is not made.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ffi::{OsStr, OsString},
    fs,
    os::unix::ffi::OsStringExt,
    path::{Component, Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use millrace_services::{FetchedKey, KeySource, Leaf, key_sources};
use rustix::{
    fs::{FlockOperation, Mode, OFlags, flock, open},
    io::Errno,
};

use super::crew::Crew;
use crate::{Name, store::VolumeRecord};

/// Looks at a time. With the copies that may be under way, they leave lanes for what else is asked.
const MOST: usize = 8;
/// Of them, those at file systems that have not answered: one each, two as long as they are few, for it may be the file that hangs.
const SILENT: usize = 6;
/// Those at one that has.
const FEW: usize = 4;
/// How often is looked whether looks have gone on to other file systems, so that there is room.
const AGAIN: Duration = Duration::from_millis(50);
/// And whether key commands have ended.
const OFTEN: Duration = Duration::from_millis(2);
/// Links that a path may lead through, as for the system.
const LINKS: usize = 40;

/// What a look at a file, or at a volume's files, has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Nobody keeps it, or it cannot be looked at: opening it says more.
    Free,
    Gone(PathBuf),
    /// Somebody has locked it.
    Kept(PathBuf),
}

/// Others are at this file system, and may hang there.
#[derive(Debug, PartialEq, Eq)]
struct Full(PathBuf);

/// The looks that are under way.
#[derive(Default)]
struct UnderWay {
    /// At which file system each is, by the place where that is mounted.
    at: BTreeMap<Name, PathBuf>,
    /// Where looks have ended.
    answered: BTreeSet<PathBuf>,
}

impl UnderWay {
    /// How many are at a file system, if there is room for one more.
    fn room_at(&self, system: &Path) -> Option<usize> {
        let here = self.at.values().filter(|at| at.as_path() == system).count();
        let silent = self.at.values().filter(|at| !self.answered.contains(at.as_path())).count();
        let most = if self.answered.contains(system) {
            FEW
        } else if silent < SILENT / 2 {
            2
        } else {
            usize::from(silent < SILENT)
        };
        (self.at.len() < MOST && here < most).then_some(here)
    }
}

#[derive(Clone, Default)]
struct Places(Arc<Mutex<UnderWay>>);

impl Places {
    fn lock(&self) -> MutexGuard<'_, UnderWay> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A look goes on to a file system. Where it may not, it ends.
    fn enter(&self, name: &Name, system: PathBuf) -> Result<(), Full> {
        let mut under_way = self.lock();
        let before = under_way.at.remove(name);
        if before.as_ref() != Some(&system) && under_way.room_at(&system).is_none() {
            return Err(Full(system));
        }
        under_way.at.insert(name.clone(), system);
        Ok(())
    }
}

/// What a look at a volume's files has come to: what was found, and the keys that are in files.
type Looked = Result<(Found, Vec<FetchedKey>), Full>;

/// See the module. What has not ended when this goes ends by itself, and nobody hears of it.
pub(super) struct Looks {
    crew: Crew<(VolumeRecord, Looked)>,
    /// Those whose files were looked at, and whose key commands run.
    commands: Crew<(Found, Vec<FetchedKey>)>,
    /// Of those whose looks have ended, until they are taken.
    keys: Vec<FetchedKey>,
    /// None were taken yet.
    is_first: bool,
    /// By the file system where the look begins; `None`: there are no files, and nothing hangs.
    due: BTreeMap<Option<PathBuf>, VecDeque<VolumeRecord>>,
    places: Places,
    mounts: Arc<[PathBuf]>,
}

impl Default for Looks {
    fn default() -> Self {
        Self {
            crew: Crew::new(),
            commands: Crew::new(),
            keys: Vec::new(),
            is_first: true,
            due: BTreeMap::new(),
            places: Places::default(),
            mounts: Arc::default(),
        }
    }
}

impl Looks {
    /// The keys of the volumes of which looks have ended since the last time.
    pub(super) fn take_keys(&mut self) -> Vec<FetchedKey> {
        self.is_first = false;
        std::mem::take(&mut self.keys)
    }

    /// Volumes whose key commands have not ended.
    pub(super) fn keyless(&self) -> impl Iterator<Item = &Name> {
        self.commands.names()
    }

    /// Has these volumes looked at, and no others any more but those that are being looked at. `mounts`: [`mount_points`].
    pub(super) fn ask(&mut self, volumes: Vec<VolumeRecord>, mounts: Vec<PathBuf>) {
        self.forget_ended();
        self.mounts = mounts.into();
        self.ask_anew();
        let busy: BTreeSet<Name> = self.crew.names().chain(self.commands.names()).cloned().collect();
        let new = volumes.into_iter().map(|record| (record.spec.name.clone(), record));
        let mut new: BTreeMap<_, _> = new.filter(|(name, _)| !busy.contains(name)).collect();
        // Who waits already goes before the others. Where links lead now is found out again.
        let due = std::mem::take(&mut self.due).into_values().flatten();
        let waiting: Vec<_> = due.filter_map(|record| new.remove(&record.spec.name)).collect();
        for record in waiting.into_iter().chain(new.into_values()) {
            let first = files_of(&record).next();
            let system = first.map(|path| system_of(&path, &self.mounts));
            self.due.entry(system).or_default().push_back(record);
        }
    }

    /// The next volume of which the look has ended; `None`: there is none any more, or none has in time. `begin`: looks that are due begin.
    pub(super) fn next_done(&mut self, until: Instant, begin: bool) -> Option<(Name, Found)> {
        loop {
            if begin {
                self.begin();
            }
            if let Some((name, (found, keys))) = self.commands.next_done(Instant::now()) {
                self.keys.extend(keys);
                return Some((name, found));
            }
            let (look_at_files, run_commands) = (self.crew.names().next().is_some(), self.commands.names().next().is_some());
            let soon = until.min(Instant::now() + if run_commands { OFTEN } else { AGAIN });
            let Some((name, (record, looked))) = self.crew.next_done(soon) else {
                if Instant::now() >= until || !(look_at_files || run_commands) {
                    return None;
                }
                if !look_at_files {
                    thread::sleep(soon.saturating_duration_since(Instant::now()));
                }
                continue;
            };
            let place = self.places.lock().at.remove(&name);
            match looked {
                Ok((found, keys)) => {
                    self.places.lock().answered.extend(place);
                    let commands = if self.is_first || may_be_opened(&found) { commands_of(&record) } else { Vec::new() };
                    if commands.is_empty() {
                        self.keys.extend(keys);
                        return Some((name, found));
                    }
                    let run =
                        move || (found, keys.into_iter().chain(commands.iter().map(FetchedKey::fetch)).collect::<Vec<_>>());
                    self.commands.add(&name, run);
                }
                Err(Full(system)) => self.due.entry(Some(system)).or_default().push_back(record),
            }
        }
    }

    /// Volumes of whose files nothing is known.
    pub(super) fn unanswered(&self) -> impl Iterator<Item = &Name> {
        let at_work = self.crew.names().chain(self.commands.names());
        at_work.chain(self.due.values().flatten().map(|record| &record.spec.name))
    }

    /// Those that got no thread have ended, too.
    fn forget_ended(&self) {
        let at_work: BTreeSet<_> = self.crew.names().collect();
        self.places.lock().at.retain(|name, _| at_work.contains(name));
    }

    /// A file system that has answered may have ceased to, where looks are under way.
    fn ask_anew(&self) {
        let mut under_way = self.places.lock();
        let UnderWay { at, answered } = &mut *under_way;
        answered.retain(|system| !at.values().any(|at| at == system));
    }

    fn begin(&mut self) {
        self.forget_ended();
        loop {
            let under_way = self.places.lock();
            let room = |system: &Option<PathBuf>| system.as_ref().map_or(Some(0), |system| under_way.room_at(system));
            // Where nobody is goes first: more may hang than there is room for.
            let rooms = self.due.keys().filter_map(|system| Some((room(system)?, system)));
            let next = rooms.min_by_key(|(others, _)| *others).map(|(_, system)| system.clone());
            drop(under_way);
            let Some(system) = next else { return };
            let Some(record) = self.due.get_mut(&system).and_then(VecDeque::pop_front) else {
                self.due.remove(&system);
                continue;
            };
            let name = record.spec.name.clone();
            self.places.lock().at.extend(system.map(|system| (name.clone(), system)));
            let (mounts, places, is_first) = (Arc::clone(&self.mounts), self.places.clone(), self.is_first);
            let steps = Steps { name: name.clone(), mounts, places, is_first };
            self.crew.add(&name, move || {
                let looked = steps.look_at_all(&record);
                (record, looked)
            });
        }
    }
}

/// How a look goes its way.
struct Steps {
    name: Name,
    mounts: Arc<[PathBuf]>,
    places: Places,
    /// Whatever is found, others wait for a try to open the volume.
    is_first: bool,
}

impl Steps {
    /// Looks at a volume's files: the worst that is found. Fetches the keys that are in files.
    fn look_at_all(&self, record: &VolumeRecord) -> Looked {
        let mut worst = Found::Free;
        for path in record.spec.stack.leaves().into_iter().filter_map(Leaf::file) {
            self.walk(path)?;
            match look(path, record.spec.read_only) {
                // Of one that is kept, a try to open the volume would wait.
                kept @ Found::Kept(_) if !matches!(worst, Found::Kept(_)) => worst = kept,
                gone @ Found::Gone(_) if worst == Found::Free => worst = gone,
                _ => {}
            }
        }
        let mut keys = Vec::new();
        let sources = if self.is_first || may_be_opened(&worst) { key_sources(&record.spec.stack) } else { Vec::new() };
        for source in sources {
            match &source {
                KeySource::Command(_) => continue,
                KeySource::File(path) => self.walk(path)?,
                KeySource::Keyring(_) => {}
            }
            keys.push(FetchedKey::fetch(&source));
        }
        Ok((worst, keys))
    }

    /// Goes where a path leads. What is not there is nowhere.
    fn walk(&self, path: &Path) -> Result<(), Full> {
        let (mut at, mut left, mut links) = (PathBuf::new(), steps_of(path), 0);
        self.enter(path)?;
        while let Some(step) = left.pop() {
            go(&mut at, &step);
            let Ok(target) = fs::read_link(&at) else { continue };
            links += 1;
            if links > LINKS {
                return Ok(());
            }
            at.pop();
            left.extend(steps_of(&target));
            let mut whole = at.clone();
            left.iter().rev().for_each(|step| go(&mut whole, step));
            self.enter(&whole)?;
        }
        Ok(())
    }

    fn enter(&self, path: &Path) -> Result<(), Full> {
        self.places.enter(&self.name, system_of(path, &self.mounts))
    }
}

/// Whether what was found keeps nobody from trying to open the volume.
fn may_be_opened(found: &Found) -> bool {
    !matches!(found, Found::Kept(_))
}

/// The key commands of a volume.
fn commands_of(record: &VolumeRecord) -> Vec<KeySource> {
    let sources = key_sources(&record.spec.stack).into_iter();
    sources.filter(|source| matches!(source, KeySource::Command(_))).collect()
}

/// The files of a volume, those with keys at last.
fn files_of(record: &VolumeRecord) -> impl Iterator<Item = PathBuf> {
    let stack = &record.spec.stack;
    let files = stack.leaves().into_iter().filter_map(Leaf::file).map(Path::to_owned);
    let keys = key_sources(stack).into_iter().filter_map(|source| match source {
        KeySource::File(path) => Some(path),
        KeySource::Keyring(_) | KeySource::Command(_) => None,
    });
    files.chain(keys)
}

/// A path's steps, the first one last.
fn steps_of(path: &Path) -> Vec<OsString> {
    let steps = path.components().rev().filter(|step| *step != Component::CurDir);
    steps.map(|step| step.as_os_str().to_owned()).collect()
}

/// Makes a step. One that is the root begins anew.
fn go(at: &mut PathBuf, step: &OsStr) {
    if *step == *".." {
        at.pop();
    } else {
        at.push(step);
    }
}

/// Looks at a file.
fn look(path: &Path, read_only: bool) -> Found {
    #[cfg(test)]
    super::tests::before_look(path);
    let lock = if read_only { FlockOperation::NonBlockingLockShared } else { FlockOperation::NonBlockingLockExclusive };
    // NONBLOCK: it may be a FIFO by now.
    let file = open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty());
    match file.and_then(|file| flock(&file, lock)) {
        Err(Errno::NOENT) => Found::Gone(path.to_owned()),
        Err(Errno::WOULDBLOCK) => Found::Kept(path.to_owned()),
        Ok(()) | Err(_) => Found::Free,
    }
}

/// Where file systems are mounted. Where the system does not tell, folders are taken for them.
pub(super) fn mount_points() -> Vec<PathBuf> {
    let text = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let place = |line: &[u8]| Some(PathBuf::from(OsString::from_vec(plain(line.split(|byte| *byte == b' ').nth(4)?))));
    text.split(|byte| *byte == b'\n').filter_map(place).collect()
}

/// A field of that list, in which blanks and the like are numbers.
fn plain(field: &[u8]) -> Vec<u8> {
    let (mut plain, mut left) = (Vec::with_capacity(field.len()), field);
    while let Some((first, rest)) = left.split_first() {
        let digits = rest.get(..3).filter(|_| *first == b'\\');
        let number = digits.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        plain.push(number.unwrap_or(*first));
        left = if number.is_some() { &rest[3..] } else { rest };
    }
    plain
}

/// The file system that a place is on, links aside. A device is one by itself.
fn system_of(path: &Path, mounts: &[PathBuf]) -> PathBuf {
    let above = mounts.iter().filter(|mount| path.starts_with(mount));
    let nearest = above.max_by_key(|mount| mount.components().count());
    let system = nearest.map_or_else(|| path.parent().unwrap_or(path), PathBuf::as_path);
    if system == Path::new("/dev") { path.to_owned() } else { system.to_owned() }
}

#[cfg(test)]
pub(super) mod tests;
