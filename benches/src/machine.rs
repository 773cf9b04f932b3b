//! The machine: its name, its clock, its huge pages.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    sync::OnceLock,
};

use rustix::process::{Resource, getrlimit, setrlimit};

/// Cycles of the time stamp counter in a nanosecond, as the kernel calibrated it.
pub(crate) fn cycles_per_ns() -> f64 {
    static CYCLES: OnceLock<f64> = OnceLock::new();
    *CYCLES.get_or_init(|| {
        let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        // On x86, BogoMIPS are twice the counter's MHz.
        value(&text, "bogomips").and_then(|text| text.parse::<f64>().ok()).map_or(1.0, |mips| mips / 2000.0)
    })
}

fn value<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let line = text.lines().find(|line| line.to_ascii_lowercase().starts_with(name))?;
    line.split_once(':').map(|(_, value)| value.trim())
}

/// The machine in words.
pub(crate) fn describe() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = value(&text, "model name").unwrap_or("unknown processor");
    let family =
        format!("family {} model {}", value(&text, "cpu family").unwrap_or("?"), value(&text, "model\t").unwrap_or("?"));
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let hypervisor = if text.contains(" hypervisor") { ", virtual" } else { "" };
    let ghz = cycles_per_ns();
    format!("{model} ({family}{hypervisor}), {cores} cores, TSC {ghz:.2} GHz, Linux {}", kernel.trim())
}

/// The date and time in UTC.
pub(crate) fn now() -> String {
    let date = Command::new("date").args(["-u", "+%Y-%m-%d %H:%M"]).output();
    date.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
}

/// A program's fingerprint: size and time of its last change.
pub(crate) fn fingerprint(path: &Path) -> String {
    let Ok(metadata) = fs::metadata(path) else { return "missing".into() };
    let changed = metadata.modified().ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
    format!("{} bytes of {}", metadata.len(), changed.map_or(0, |time| time.as_secs()))
}

/// Lets this process have as many open files as it may: a client of a device has several.
pub(crate) fn raise_open_files() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Where it is refused, connecting fails and says why.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// Huge pages of 2 MiB, and a file system for them, that the system keeps for us until this is dropped.
#[derive(Debug)]
pub(crate) struct HugePages {
    before: String,
    mounted: Option<PathBuf>,
}

impl HugePages {
    const PATH: &str = "/proc/sys/vm/nr_hugepages";

    /// Has at least `megabytes`, mounted at `folder` if nowhere else; `None` when the system does not give them.
    pub(crate) fn reserve(megabytes: usize, folder: &Path) -> Option<Self> {
        let before = fs::read_to_string(Self::PATH).ok()?.trim().to_owned();
        let (had, wanted) = (before.parse::<usize>().ok()?, megabytes / 2);
        let mut guard = Self { before, mounted: None };
        if had < wanted {
            fs::write(Self::PATH, wanted.to_string()).ok()?;
        }
        let got: usize = fs::read_to_string(Self::PATH).ok()?.trim().parse().ok()?;
        let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
        if !mounts.lines().any(|line| line.split_whitespace().nth(2) == Some("hugetlbfs")) {
            fs::create_dir_all(folder).ok()?;
            let mut mount = Command::new("mount");
            mount.args(["-t", "hugetlbfs", "-o", "pagesize=2M", "none"]).arg(folder);
            mount.status().ok().filter(ExitStatus::success)?;
            guard.mounted = Some(folder.to_owned());
        }
        (got >= wanted).then_some(guard)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // Who cannot do this has not changed it.
        if let Some(folder) = &self.mounted {
            let _ = Command::new("umount").arg(folder).status();
        }
        let _ = fs::write(Self::PATH, &self.before);
    }
}
