//! A disk whose queue in the kernel is full, beside a volume in memory and one on another disk on the same shard. docs/survival.md

use std::fs::File;

use millrace_tests::{Boot, Daemon, Programs, seats};
use tempfile::TempDir;

/// Requests a second that the disk does.
const RATE: u64 = 100;

#[test]
fn a_full_disk_holds_nobody_else_up() {
    let folder = TempDir::with_prefix("millrace-saturated-").expect("a temporary folder");
    let programs = Programs::make(folder.path().join("programs.img"), &[Daemon::binary()], &[]);
    let mut boot = Boot::scenario("saturated").memory(1024);
    for (name, limit) in [("slow", format!(",throttling.iops-total={RATE}")), ("other", String::new())] {
        let image = folder.path().join(name);
        File::create(&image).and_then(|file| file.set_len(32 << 20)).expect("a sparse file");
        let drive = format!("id={name},file={},if=none,format=raw{limit}", image.display());
        boot = boot.qemu(&["-drive", &drive, "-device", &format!("nvme,serial={name},drive={name}")]);
    }
    let said = programs.on(boot).run(&seats(1));
    let line = said.iter().find(|line| line.contains("beside ")).unwrap_or_else(|| panic!("{}", said.join("\n")));
    let numbers: Vec<u64> = line.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect();
    let [slow, fast, other, held_up] = numbers[..] else { panic!("{line}") };
    // A shard that waits for the disk does some two commands beside a hundred of the disk's; an emulated machine that others keep from
    // its processor still does many more.
    assert!(slow > 0 && fast * 10 > slow, "{line}");
    // While requests go by way of the kernel's threads, too: behind those that wait there it would be less than a twentieth.
    assert!(other * 4 > slow, "{line}");
    // It has waited until it knew, and looks again now and then.
    assert!((1..=20).contains(&held_up), "{line}");
}
