//! Peers that take shared memory away. What must kill the process does so in a process of its own.

use std::{
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::ExitStatusExt,
    },
    process::{Command, ExitStatus},
};

use super::memory_file;
use crate::{
    Access, GuestAddress, GuestMemory, Mapping, Protection,
    guard::{Region, Watcher, watch, with_region},
};

const ALL: Protection = Protection { read: true, write: true };
const PAGES: u64 = 4;
const SIZE: u64 = PAGES * 4096;

fn guest(fill: u8) -> (GuestMemory, OwnedFd) {
    let file = memory_file(&[fill; SIZE as usize]);
    let mut memory = GuestMemory::new();
    memory.map(GuestAddress(0), SIZE, ALL, Some((file.as_fd(), 0))).unwrap();
    (memory, file)
}

/// Notes the regions that go. (Those of other tests are among them.)
#[derive(Default)]
struct Notes(std::sync::Mutex<Vec<(usize, usize)>>);

impl Watcher for Notes {
    fn going(&self, region: &Region) {
        assert!(with_region(region.start(), |_| ()).is_none(), "it is found no more");
        self.0.lock().unwrap().push((region.start(), region.len()));
    }
}

#[test]
fn a_region_is_found_until_it_goes_and_who_watches_is_told() {
    let (mut memory, _file) = guest(3);
    // After it was mapped: another test's may have been at its place before.
    let notes = std::sync::Arc::<Notes>::default();
    let seen: std::sync::Arc<dyn Watcher> = std::sync::Arc::<Notes>::clone(&notes);
    watch(std::sync::Arc::downgrade(&seen));
    let last = memory.translate(GuestAddress(SIZE - 1), 1, Access::Read).unwrap().as_ptr() as usize;
    let region = with_region(last, |region| (region.start(), region.len())).expect("a guest's memory");
    assert_eq!(region, (last + 1 - SIZE as usize, SIZE as usize));
    let own = Box::new(0_u8);
    assert!(with_region(&raw const *own as usize, |_| ()).is_none(), "our own memory is no region");
    memory.unmap_all();
    assert!(with_region(last, |_| ()).is_some(), "requests may still use it");
    assert!(!notes.0.lock().unwrap().contains(&region));
    // SAFETY: nothing uses it.
    drop(unsafe { memory.reclaim() });
    assert!(notes.0.lock().unwrap().contains(&region));
}

#[test]
fn memory_that_must_not_be_pinned_is_no_region() {
    let file = memory_file(&[5; SIZE as usize]);
    let mut memory = GuestMemory::new().unpinned();
    memory.map(GuestAddress(0), SIZE, ALL, Some((file.as_fd(), 0))).unwrap();
    let first = memory.translate(GuestAddress(0), 1, Access::Read).unwrap().as_ptr() as usize;
    assert!(with_region(first, |_| ()).is_none());
    let mut byte = [0];
    memory.read(GuestAddress(SIZE - 1), &mut byte).unwrap();
    assert_eq!(byte, [5], "it is reached as any other");
    memory.unmap_all();
    // SAFETY: nothing uses it.
    drop(unsafe { memory.reclaim() });
}

#[test]
fn a_truncated_file_costs_its_device_only() {
    let (victim, file) = guest(1);
    let (bystander, _kept) = guest(2);
    let page = victim.translate(GuestAddress(4096), 4096, Access::Write).unwrap();
    rustix::fs::ftruncate(&file, 4096).unwrap();
    assert!(!victim.is_poisoned(), "nobody has touched it yet");
    assert_eq!(victim.read_value::<u8>(GuestAddress(SIZE - 1)), Ok(0));
    assert!(victim.is_poisoned());
    // All of the mapping is memory again, for segments made before as well.
    page.fill(9);
    assert_eq!(victim.read_value::<u8>(GuestAddress(4096)), Ok(9));
    assert_eq!(victim.read_value::<u8>(GuestAddress(0)), Ok(0), "even what the file still has is replaced");
    assert_eq!(bystander.read_value::<u8>(GuestAddress(SIZE - 1)), Ok(2));
    assert!(!bystander.is_poisoned());
}

/// Where memory is not overcommitted, anonymous memory for a whole guest may not be there, and a file's pages come one by one.
#[test]
fn memory_that_was_taken_is_replaced_by_a_files() {
    let (mut victim, file) = guest(1);
    let start = victim.translate(GuestAddress(0), 4096, Access::Read).unwrap().as_ptr() as usize;
    rustix::fs::ftruncate(&file, 0).unwrap();
    assert_eq!(victim.read_value::<u8>(GuestAddress(0)), Ok(0));
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let number = |text: &str| usize::from_str_radix(text, 16).unwrap();
    let holds = |line: &&str| {
        let (from, to) = line.split_once(' ').and_then(|(range, _)| range.split_once('-')).unwrap();
        (number(from)..number(to)).contains(&start)
    };
    let line = maps.lines().find(holds).expect("it is mapped");
    assert!(line.contains("millrace-spare"), "{line}");
    victim.write_value(GuestAddress(0), &[7_u8; 4096]).unwrap();
    victim.unmap_all();
    // SAFETY: no segment is in use.
    drop(unsafe { victim.reclaim() });
    // The next one is at the same addresses, unless another test is: its place is the same, and empty.
    let (next, file) = guest(2);
    rustix::fs::ftruncate(&file, 0).unwrap();
    assert_eq!(next.read_value::<[u8; 4096]>(GuestAddress(0)), Ok([0; 4096]));
}

#[test]
fn every_kind_of_touch_survives() {
    for touch in [
        |m: &GuestMemory| m.write_value(GuestAddress(8192), &7_u32).unwrap(),
        |m: &GuestMemory| m.translate(GuestAddress(0), SIZE, Access::Write).unwrap().fill(1),
        |m: &GuestMemory| m.read(GuestAddress(1), &mut [0; SIZE as usize - 1]).unwrap(),
        |m: &GuestMemory| m.write(GuestAddress(1), &[3; SIZE as usize - 1]).unwrap(),
        |m: &GuestMemory| {
            let segment = m.translate(GuestAddress(0), SIZE, Access::Read).unwrap();
            assert!(segment.equals(&segment));
        },
    ] {
        let (memory, file) = guest(5);
        rustix::fs::ftruncate(&file, 0).unwrap();
        touch(&memory);
        assert!(memory.is_poisoned());
    }
}

#[test]
fn devices_fail_side_by_side() {
    std::thread::scope(|scope| {
        for fill in 1..5 {
            scope.spawn(move || {
                for _ in 0..200 {
                    let (mut victim, file) = guest(fill);
                    let (mut bystander, _kept) = guest(fill);
                    rustix::fs::ftruncate(&file, 0).unwrap();
                    assert_eq!(victim.read_value::<u8>(GuestAddress(4096)), Ok(0));
                    assert!(victim.is_poisoned());
                    assert_eq!(bystander.read_value::<u8>(GuestAddress(4096)), Ok(fill));
                    assert!(!bystander.is_poisoned());
                    for memory in [&mut victim, &mut bystander] {
                        memory.unmap_all();
                        // SAFETY: no segment was kept.
                        drop(unsafe { memory.reclaim() });
                    }
                }
            });
        }
    });
}

#[test]
fn guarded_mappings_may_come_and_go_for_ever() {
    let file = memory_file(&[0; 4096]);
    let mut memory = GuestMemory::new();
    for _ in 0..140_000 {
        memory.map(GuestAddress(0), 4096, ALL, Some((file.as_fd(), 0))).unwrap();
        memory.unmap(GuestAddress(0), 4096).unwrap();
        // SAFETY: no segment was made.
        drop(unsafe { memory.reclaim() });
    }
}

const CHILD: &str = "MILLRACE_TEST_SIGBUS";

/// Runs `sigbus_child` in a process of its own.
fn child(mode: &str) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "tests::guard::sigbus_child", "--nocapture"]).env(CHILD, mode);
    command.output().unwrap().status
}

#[test]
fn other_bus_errors_still_kill() {
    assert_eq!(child("die").signal(), Some(libc::SIGBUS));
}

#[test]
fn other_bus_errors_go_to_whoever_handled_them_before() {
    assert_eq!(child("forward").code(), Some(42));
}

/// Once the system has no memory left, not even for a page, a touch would fault for ever.
#[test]
fn memory_that_cannot_be_replaced_kills() {
    assert_eq!(child("starve").signal(), Some(libc::SIGBUS));
}

/// Leaves the memory that takes the place of others' without a page.
fn starve() {
    let is_spare = |path: &std::path::PathBuf| {
        std::fs::read_link(path).is_ok_and(|file| file.to_string_lossy().starts_with("/memfd:millrace-spare"))
    };
    let mut files = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let spare = files.find(is_spare).expect("it is made with the first guarded mapping");
    std::fs::OpenOptions::new().write(true).open(spare).unwrap().set_len(0).unwrap();
}

extern "C" fn exit_42(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: _exit may be called in a signal handler.
    unsafe { libc::_exit(42) }
}

/// Not a test by itself: a process for the three above.
#[test]
fn sigbus_child() {
    let Ok(mode) = std::env::var(CHILD) else { return };
    if mode == "forward" {
        // SAFETY: an all-zero sigaction is valid, and the handler only exits.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = exit_42 as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()), 0);
        }
    }
    let (guarded, guarded_file) = guest(1);
    rustix::fs::ftruncate(&guarded_file, 0).unwrap();
    if mode == "starve" {
        starve();
    }
    assert_eq!(guarded.read_value::<u8>(GuestAddress(0)), Ok(0));
    let file = memory_file(&[1; 4096]);
    let unguarded = Mapping::shared(file.as_fd(), 0, 4096, true).unwrap();
    rustix::fs::ftruncate(&file, 0).unwrap();
    // SAFETY: the mapping is alive; that its memory is gone is what is tested.
    let segment = unsafe { unguarded.segment(0, 1) }.unwrap();
    std::hint::black_box(segment.read_value::<u8>(0));
    unreachable!("the touch was survived");
}
