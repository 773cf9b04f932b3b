//! What a process holds, as `/proc` tells.

use std::{fs, path::Path};

/// What a process holds that may be its guests'.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Open file descriptors.
    pub fds: usize,
    /// Mappings of memory that somebody shared: memfds.
    pub shared_mappings: usize,
    /// Threads, without those that come and go by themselves.
    pub threads: usize,
    /// Resident private memory in bytes.
    pub private: u64,
    /// Of it, the keeper's.
    pub keeper: u64,
    /// Huge pages in use, in bytes; they do not count as resident.
    pub huge: u64,
}

impl Usage {
    /// Of a process that is alive.
    pub(crate) fn of(pid: u32) -> Option<Self> {
        let dir = format!("/proc/{pid}");
        let status = fs::read_to_string(format!("{dir}/status")).ok()?;
        let number = |name: &str| -> Option<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse().ok()
        };
        let maps = fs::read_to_string(format!("{dir}/maps")).ok()?;
        let rollup = fs::read_to_string(format!("{dir}/smaps_rollup")).ok()?;
        let huge = rollup.lines().filter(|line| line.contains("_Hugetlb:"));
        let huge = huge.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum::<u64>();
        Some(Self {
            fds: fs::read_dir(format!("{dir}/fd")).ok()?.flatten().filter(|fd| !is_lasting(&fd.path())).count(),
            shared_mappings: maps.lines().filter(|line| line.contains("/memfd:") && !line.contains(VOLUMES)).count(),
            threads: fs::read_dir(format!("{dir}/task")).ok()?.flatten().filter(|task| !is_casual(&task.path())).count(),
            private: number("RssAnon:")? * 1024,
            keeper: 0,
            huge: huge * 1024,
        })
    }

    /// Whether nothing is held beyond what was `before`; private memory may be up to `slack` bytes more, for allocators keep
    /// what they got.
    pub(crate) fn is_back_to(&self, before: &Self, slack: u64) -> bool {
        self.fds <= before.fds
            && self.shared_mappings <= before.shared_mappings
            && self.threads <= before.threads
            && self.private <= before.private + slack
            && self.keeper <= before.keeper + slack
            && self.huge <= before.huge
    }
}

/// Threads of the kernel's for io_uring, of the runtime's for blocking calls (idle ones end after a while), and those that
/// unmap memory and have the system copy within files (they start when they are first needed).
const CASUAL: [&str; 4] = ["iou-", "tokio-", "millrace-reaper", "millrace-copier"];

/// What a volume remembers of its guests — reservations, marks — from when there was first something to remember: two files at most.
const VOLUMES: &str = "/memfd:millrace-namespace";

/// What takes the place of memory that guests take away: one file, from when there was first a guest.
const SPARE: &str = "/memfd:millrace-spare";

fn is_lasting(fd: &Path) -> bool {
    fs::read_link(fd).is_ok_and(|file| [VOLUMES, SPARE].iter().any(|lasting| file.to_string_lossy().starts_with(lasting)))
}

fn is_casual(task: &Path) -> bool {
    fs::read_to_string(task.join("comm")).is_ok_and(|name| CASUAL.iter().any(|casual| name.starts_with(casual)))
}
