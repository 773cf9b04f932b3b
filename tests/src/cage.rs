//! A control group whose processes have little memory, so that the kernel's memory killer takes them.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use crate::wait::eventually;

/// See the module. Removed when dropped; by then its processes must have ended.
#[derive(Debug)]
pub struct Cage {
    path: PathBuf,
    /// The files' names differ between the two versions of control groups.
    limit: &'static str,
    events: &'static str,
}

impl Cage {
    /// One of `bytes` bytes, or why this system gives us none.
    pub fn new(bytes: u64) -> Result<Self, String> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("millrace-test-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let groups = fs::read_to_string("/proc/self/cgroup").map_err(|error| format!("/proc/self/cgroup: {error}"))?;
        let mounts = fs::read_to_string("/proc/self/mounts").map_err(|error| format!("/proc/self/mounts: {error}"))?;
        let mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let mut why = "no memory control groups are mounted".to_owned();
        for mount in mounts {
            let [_, place, kind, options, ..] = mount[..] else { continue };
            let (parent, limit, events) = match kind {
                // Groups with processes have no groups below them that limit memory, but for the root.
                "cgroup2" => (PathBuf::from(place), "memory.max", "memory.events"),
                "cgroup" if options.split(',').any(|option| option == "memory") => {
                    let own = groups.lines().find_map(|line| line.split_once(":memory:/")).map_or("", |(_, own)| own);
                    (Path::new(place).join(own), "memory.limit_in_bytes", "memory.oom_control")
                }
                _ => continue,
            };
            let path = parent.join(&name);
            match fs::create_dir(&path) {
                Ok(()) => {}
                Err(error) => {
                    why = format!("{}: {error}", path.display());
                    continue;
                }
            }
            let cage = Self { path, limit, events };
            match fs::write(cage.path.join(cage.limit), bytes.to_string()) {
                Ok(()) => return Ok(cage),
                Err(error) => why = format!("{}: {error}", cage.path.join(cage.limit).display()),
            }
        }
        Err(why)
    }

    /// Puts a process into it. What it has already does not count.
    ///
    /// # Panics
    /// When the system refuses.
    pub fn put(&self, process: u32) {
        fs::write(self.path.join("cgroup.procs"), process.to_string()).expect("moving a process into a control group");
    }

    /// How often the kernel has killed here for want of memory.
    ///
    /// # Panics
    /// When it does not tell.
    pub fn kills(&self) -> u64 {
        let events = fs::read_to_string(self.path.join(self.events)).expect("the control group's events");
        let kills = events.lines().find_map(|line| line.strip_prefix("oom_kill "));
        kills.and_then(|kills| kills.trim().parse().ok()).expect("a number of kills")
    }
}

impl Drop for Cage {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = fs::remove_dir(&self.path);
        } else {
            eventually("an empty control group", || fs::remove_dir(&self.path).ok());
        }
    }
}
