//! What the process tells of itself, from `/proc/self`. A process in its sandbox reaches no path, and another one that looks there for it sees its own
//! numbers: so both places are opened before.

use std::{
    fs::File,
    io,
    mem::MaybeUninit,
    os::unix::fs::FileExt,
    sync::{Mutex, OnceLock, PoisonError},
};

use rustix::fs::{RawDir, SeekFrom, seek};

struct Places {
    stat: File,
    /// One reader at a time: its position is the descriptor's.
    fds: Mutex<File>,
}

fn places() -> Option<&'static Places> {
    static PLACES: OnceLock<Option<Places>> = OnceLock::new();
    let open = || Some(Places { stat: File::open("/proc/self/stat").ok()?, fds: File::open("/proc/self/fd").ok()?.into() });
    PLACES.get_or_init(open).as_ref()
}

/// To be called while paths can be reached.
pub(crate) fn look_at_itself() {
    places();
}

/// Processor time in seconds and resident memory in bytes (proc_pid_stat(5)).
#[expect(clippy::cast_precision_loss, reason = "ticks of centuries are exact")]
pub(crate) fn usage() -> Option<(f64, u64)> {
    let mut line = [0; 1024];
    let len = places()?.stat.read_at(&mut line, 0).ok()?;
    // The second field is the program's name in parentheses, which may hold anything.
    let after = line[..len].rsplit(|byte| *byte == b')').next()?;
    let mut fields = str::from_utf8(after).ok()?.split_whitespace();
    let user: u64 = fields.nth(11)?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    let pages: u64 = fields.nth(8)?.parse().ok()?;
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    Some(((user + system) as f64 / ticks, pages * rustix::param::page_size() as u64))
}

/// Descriptors that are open.
pub(crate) fn open_fds() -> Option<usize> {
    let fds = places()?.fds.lock().unwrap_or_else(PoisonError::into_inner);
    let count = || -> io::Result<usize> {
        seek(&*fds, SeekFrom::Start(0))?;
        let (mut room, mut count) = ([const { MaybeUninit::uninit() }; 4096], 0);
        let mut entries = RawDir::new(&*fds, &mut room);
        while let Some(entry) = entries.next() {
            count += usize::from(!entry?.file_name().to_bytes().starts_with(b"."));
        }
        Ok(count)
    };
    count().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_is_what_there_is() {
        let before = open_fds().unwrap();
        let more: Vec<_> = (0..200).map(|_| File::open("/dev/null").unwrap()).collect();
        // Other tests open and close, too, but not that many.
        assert!(open_fds().unwrap() > before + 100);
        drop(more);
        let (seconds, resident) = usage().unwrap();
        assert!(seconds >= 0.0 && resident > 1 << 20);
    }
}
