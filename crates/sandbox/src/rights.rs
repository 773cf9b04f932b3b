//! Who the process is, and what it may beyond other processes of that user. One thread, before there are others.

use std::{
    ffi::{CStr, CString},
    fs,
    hint::black_box,
    io,
    mem::zeroed,
    os::unix::fs::{DirBuilderExt, chown},
    path::Path,
    ptr::null_mut,
    thread::{self, JoinHandle},
};

use rustix::{
    process::{
        DumpableBehavior, Gid, Resource, Rlimit, Signal, Uid, getegid, geteuid, getgroups, getrlimit, set_dumpable_behavior,
        set_parent_process_death_signal, setrlimit,
    },
    thread::{
        CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, remove_capability_from_bounding_set,
        set_capabilities, set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
    },
};
use serde::{Deserialize, Serialize};

/// Open files beyond which nobody has a use for more: what all guests together may hand over, several times.
const MOST_FILES: u64 = 1 << 20;
/// The least private memory that a limit leaves: below it nothing starts.
pub(crate) const LEAST_MEMORY: u64 = 256 << 20;
/// Limits of this much memory and less are nobody's by default.
const LEAST_DEFAULT: u64 = 4 << 30;

/// A user of the machine.
pub(crate) struct User {
    name: String,
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
}

impl User {
    /// The user of this name or number, as the machine's tables know it.
    pub(crate) fn find(text: &str) -> io::Result<Self> {
        let name = CString::new(text)?;
        let mut buffer = vec![0; 64 << 10];
        // SAFETY: an all-zero entry is a valid value.
        let (mut entry, mut found): (libc::passwd, *mut libc::passwd) = (unsafe { zeroed() }, null_mut());
        let (place, room) = (buffer.as_mut_ptr(), buffer.len());
        // SAFETY: the entry and its texts are written to the places given, whose lengths are told.
        let errno = unsafe {
            match text.parse() {
                Ok(uid) => libc::getpwuid_r(uid, &raw mut entry, place, room, &raw mut found),
                Err(_) => libc::getpwnam_r(name.as_ptr(), &raw mut entry, place, room, &raw mut found),
            }
        };
        if errno != 0 {
            return Err(io::Error::from_raw_os_error(errno));
        }
        if found.is_null() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "there is no such user"));
        }
        let mut groups = vec![0; 1024];
        let mut count = libc::c_int::try_from(groups.len()).unwrap_or(libc::c_int::MAX);
        // SAFETY: the name was found and ends in a zero; the system writes at most `count` groups.
        let (name, done) = unsafe {
            let name = CStr::from_ptr(entry.pw_name);
            (name, libc::getgrouplist(name.as_ptr(), entry.pw_gid, groups.as_mut_ptr(), &raw mut count))
        };
        if done < 0 {
            return Err(io::Error::other(format!("{} has more groups than {}", name.to_string_lossy(), groups.len())));
        }
        groups.truncate(usize::try_from(count).unwrap_or(0));
        let (name, groups) = (name.to_string_lossy().into_owned(), groups.into_iter().map(Gid::from_raw).collect());
        Ok(Self { name, uid: Uid::from_raw(entry.pw_uid), gid: Gid::from_raw(entry.pw_gid), groups })
    }

    /// This process's: its name, or its number where the tables have none.
    pub(crate) fn own_name() -> String {
        let own = geteuid().as_raw().to_string();
        Self::find(&own).map_or(own, |user| user.name)
    }

    /// The user is in this group as well, once the process is that user.
    pub(crate) fn join(&mut self, group: &Group) {
        self.groups.push(group.as_gid());
    }

    pub(crate) fn uid(&self) -> u32 {
        self.uid.as_raw()
    }

    /// Makes a directory of this user's, if there is none.
    pub(crate) fn make_dir(&self, path: &Path) -> io::Result<()> {
        if path.try_exists()? {
            return Ok(());
        }
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        chown(path, Some(self.uid.as_raw()), Some(self.gid.as_raw()))
    }

    /// Whether the process is this user.
    pub(crate) fn is_present(&self) -> bool {
        geteuid() == self.uid
    }

    /// The process is this user from now on, and not root.
    pub(crate) fn become_it(&self) -> io::Result<()> {
        if self.uid.is_root() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "that is root"));
        }
        set_thread_groups(&self.groups)?;
        set_thread_res_gid(self.gid, self.gid, self.gid)?;
        Ok(set_thread_res_uid(self.uid, self.uid, self.uid)?)
    }
}

/// What the machine's tables know of a group's name.
fn number_of(group: &CStr) -> io::Result<Option<u32>> {
    // A group's entry has the names of all who are in it.
    let mut buffer = vec![0; 1 << 20];
    // SAFETY: an all-zero entry is a valid value.
    let (mut entry, mut found): (libc::group, *mut libc::group) = (unsafe { zeroed() }, null_mut());
    let (place, room) = (buffer.as_mut_ptr(), buffer.len());
    // SAFETY: the entry and its texts are written to the places given, whose lengths are told.
    let errno = unsafe { libc::getgrnam_r(group.as_ptr(), &raw mut entry, place, room, &raw mut found) };
    match errno {
        0 if found.is_null() => Ok(None),
        libc::ENOENT | libc::ESRCH => Ok(None),
        0 => Ok(Some(entry.gr_gid)),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// A group of the machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    name: String,
    gid: u32,
}

impl Group {
    /// The group of this name, as the machine's tables know it; or of this number, which needs to be in no table.
    ///
    /// # Errors
    /// There is none, or the tables cannot be read.
    pub fn find(text: &str) -> io::Result<Self> {
        let missing = || io::Error::new(io::ErrorKind::NotFound, "there is no such group");
        match text.parse() {
            // To the system, the last number is no group.
            Ok(u32::MAX) => return Err(missing()),
            Ok(gid) => return Ok(Self { name: text.to_owned(), gid }),
            Err(_) => {}
        }
        let gid = number_of(&CString::new(text)?)?.ok_or_else(missing)?;
        Ok(Self { name: text.to_owned(), gid })
    }

    /// What it was asked for by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its number.
    pub fn gid(&self) -> u32 {
        self.gid
    }

    fn as_gid(&self) -> Gid {
        Gid::from_raw(self.gid)
    }

    /// Whether the process is in it, and so may give it files.
    pub(crate) fn is_ours(&self) -> bool {
        getegid() == self.as_gid() || getgroups().is_ok_and(|groups| groups.contains(&self.as_gid()))
    }

    /// The process is in it from now on.
    pub(crate) fn join(&self) -> io::Result<()> {
        if self.is_ours() {
            return Ok(());
        }
        let mut groups = getgroups()?;
        groups.push(self.as_gid());
        Ok(set_thread_groups(&groups)?)
    }
}

pub(crate) fn is_root() -> bool {
    geteuid().is_root()
}

/// No capability can be had any more by running a program.
pub(crate) fn drop_bounds() -> io::Result<()> {
    if capabilities(None)?.effective.contains(CapabilitySet::SETPCAP) {
        for capability in CapabilitySet::all().iter() {
            match remove_capability_from_bounding_set(capability) {
                // Older systems have fewer.
                Ok(()) | Err(rustix::io::Errno::INVAL) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
    Ok(())
}

/// No capability is left, and none comes back.
pub(crate) fn drop_all() -> io::Result<()> {
    set_no_new_privs(true)?;
    clear_ambient_capability_set()?;
    let none = CapabilitySet::empty();
    Ok(set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?)
}

/// Whatever else is open here was left open by who started us: the programs that are started from here do not get it.
pub(crate) fn hand_nothing_down() -> io::Result<()> {
    let (first, last) = (3, libc::c_uint::MAX);
    // SAFETY: nothing is closed, descriptors are only marked; nothing of ours is touched in memory.
    let result = unsafe { libc::close_range(first, last, libc::CLOSE_RANGE_CLOEXEC.cast_signed()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Nobody but root may look into the process, and its end leaves no picture of its memory.
pub(crate) fn keep_to_itself() -> io::Result<()> {
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })?;
    Ok(set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// The process ends with the one that started it, whatever that one has given away of itself.
pub(crate) fn end_with_parent() -> io::Result<()> {
    Ok(set_parent_process_death_signal(Some(Signal::KILL))?)
}

/// Has the libraries find out what they find out once, by calls that nobody needs later.
pub(crate) fn look_around() {
    let _ = (rustix::param::page_size(), rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime));
    // glibc opens the system's setting for overcommitment when a heap shrinks for the first time. The first thread has none, and
    // what is large lies in mappings of its own.
    let pieces = || drop(black_box([(); 64].map(|()| Vec::<u8>::with_capacity(64 << 10))));
    let _ = thread::Builder::new().spawn(pieces).map(JoinHandle::join);
}

/// As many open files as are asked for, or as may be had; not more later.
pub(crate) fn limit_files(wanted: Option<u64>) -> io::Result<()> {
    let most = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    let files = Some(wanted.unwrap_or(MOST_FILES).min(most));
    Ok(setrlimit(Resource::Nofile, Rlimit { current: files, maximum: files })?)
}

/// As much private memory as is asked for, or as the machine has.
pub(crate) fn limit_memory(wanted: Option<u64>) -> io::Result<()> {
    let bytes = wanted.unwrap_or_else(|| machine_memory().max(LEAST_DEFAULT));
    let most = getrlimit(Resource::Data).maximum.unwrap_or(u64::MAX);
    // Less is refused, but by keepers of earlier versions.
    let bytes = Some(bytes.max(LEAST_MEMORY).min(most));
    Ok(setrlimit(Resource::Data, Rlimit { current: bytes, maximum: bytes })?)
}

/// Keys are locked in memory: as much may be locked as the process may have, if it can be had.
pub(crate) fn raise_locked() -> io::Result<()> {
    let limit = getrlimit(Resource::Memlock);
    let wanted = Rlimit { current: None, maximum: None };
    if capabilities(None)?.effective.contains(CapabilitySet::SYS_RESOURCE) {
        return Ok(setrlimit(Resource::Memlock, wanted)?);
    }
    Ok(setrlimit(Resource::Memlock, Rlimit { current: limit.maximum, maximum: limit.maximum })?)
}

fn machine_memory() -> u64 {
    // SAFETY: the call takes and returns numbers.
    let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
    u64::try_from(pages).unwrap_or(0).saturating_mul(rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_by_name_and_numbers_are_taken() {
        let found = Group::find("root").unwrap();
        assert_eq!((found.name(), found.gid()), ("root", 0));
        assert_eq!(Group::find("4242").unwrap().gid(), 4242);
        for none in ["no-such-group", "4294967295", "4294967296", "-1", ""] {
            assert_eq!(Group::find(none).unwrap_err().kind(), io::ErrorKind::NotFound, "{none}");
        }
        let own = Group::find(&getegid().as_raw().to_string()).unwrap();
        assert!(own.is_ours());
        own.join().unwrap();
    }
}
