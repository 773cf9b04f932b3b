//! A disk whose queue in the kernel is full, beside a volume in memory on the same shard. docs/survival.md

use std::fs::File;

use millrace_tests::{Boot, Daemon, Programs, seats};
use tempfile::TempDir;

/// Requests a second that the disk does.
const RATE: u64 = 100;

#[test]
fn a_full_disk_holds_nobody_else_up() {
    let folder = TempDir::with_prefix("millrace-saturated-").expect("a temporary folder");
    let image = folder.path().join("disk.img");
    File::create(&image).and_then(|file| file.set_len(32 << 20)).expect("a sparse file");
    let programs = Programs::make(folder.path().join("programs.img"), &[Daemon::binary()], &[]);
    let disk = format!("id=disk,file={},if=none,format=raw,throttling.iops-total={RATE}", image.display());
    let boot = Boot::scenario("saturated").memory(1024).qemu(&["-drive", &disk, "-device", "nvme,serial=slow,drive=disk"]);
    let said = programs.on(boot).run(&seats(1));
    let line = said.iter().find(|line| line.contains("beside ")).unwrap_or_else(|| panic!("{}", said.join("\n")));
    let numbers: Vec<u64> = line.split(|c: char| !c.is_ascii_digit()).filter_map(|word| word.parse().ok()).collect();
    let [slow, fast, held_up] = numbers[..] else { panic!("{line}") };
    // A shard that waits for the disk does some two commands beside a hundred of the disk's; an emulated machine that others keep from
    // its processor still does many more.
    assert!(slow > 0 && fast * 10 > slow, "{line}");
    // It has waited until it knew, and looks again now and then.
    assert!((1..=20).contains(&held_up), "{line}");
}
