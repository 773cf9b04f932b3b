//! The lean client of virtio disks (`millrace bench --lean --virtio`) does what it says: bytes arrive, and what is wrong is told.

use std::{
    fs,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use millrace_driver::{Pages, VirtioError, VirtioOptions, VirtioQueue};
use millrace_tests::{Daemon, PATIENCE};

const OPTIONS: VirtioOptions = VirtioOptions {
    depth: 100,
    bytes: 12288,
    write: true,
    packed: false,
    pages: Pages::Small,
    timeout: Duration::from_secs(10),
};

/// Begins all requests at places of their own, shifted by `round`, and waits for them.
fn go_round(queue: &mut VirtioQueue, round: usize) {
    let (depth, start) = (queue.depth(), Instant::now());
    for id in 0..depth {
        queue.begin(id as u16, ((id + round) % depth * 24) as u64);
    }
    queue.ring().unwrap();
    let mut taken = Vec::new();
    while queue.in_flight() > 0 {
        queue.take(depth / 3, &mut taken).unwrap();
        assert!(taken.is_empty() || taken.len() >= depth / 3 || queue.in_flight() == 0);
        assert!(start.elapsed() < PATIENCE, "{} are in flight", queue.in_flight());
    }
    queue.check().unwrap();
}

fn pattern(id: usize) -> Vec<u8> {
    (0..OPTIONS.bytes).map(|at| (id * 31 + at / 512 * 7 + at % 251) as u8).collect()
}

#[test]
fn bytes_arrive_where_they_belong() {
    for packed in [false, true] {
        bytes_arrive(&VirtioOptions { packed, ..OPTIONS });
    }
}

fn bytes_arrive(options: &VirtioOptions) {
    let daemon = Daemon::start();
    let image = daemon.path("d.img");
    let socket = daemon.virtio_disk("d", &["--backend", &format!("file:{}", image.display()), "--size", "2M"], &[]);
    let mut queue = VirtioQueue::connect(&socket, options).unwrap();
    assert_eq!((queue.capacity(), queue.depth()), (4096, 100));
    (0..100).for_each(|id| queue.data().write_at(id * OPTIONS.bytes, &pattern(id)));
    // The ring goes round more than once, and the last one counts.
    (0..7).for_each(|round| go_round(&mut queue, round));
    drop(queue);
    let written = fs::read(&image).unwrap();
    for place in 0..100 {
        let found = &written[place * OPTIONS.bytes..][..OPTIONS.bytes];
        assert!(found == pattern((place + 100 - 6) % 100), "place {place}");
    }
    let mut queue = VirtioQueue::connect(&socket, &VirtioOptions { write: false, ..*options }).unwrap();
    go_round(&mut queue, 50);
    for id in 0..100 {
        let found = queue.data().read_vec(id * OPTIONS.bytes, OPTIONS.bytes);
        assert!(found == pattern(((id + 50) % 100 + 100 - 6) % 100), "request {id}");
    }
    // Past the end.
    queue.begin(3, 4096 - 23);
    queue.ring().unwrap();
    let (start, mut taken) = (Instant::now(), Vec::new());
    let failed = loop {
        match queue.take(1, &mut taken) {
            Ok(()) => assert!(taken.is_empty() && start.elapsed() < PATIENCE),
            Err(error) => break error,
        }
    };
    assert!(matches!(failed, VirtioError::Failed { id: 3, status: 1 }), "{failed}");
    drop(queue);
    daemon.finish();
}

fn bench(socket: &Path, words: &[&str]) -> Result<String, String> {
    let mut command = Command::new(Daemon::binary());
    command.args(["bench", "--lean", "--virtio", "--json", "--time", "0.1", "--socket"]).arg(socket).args(words);
    let output = command.output().expect("running the client");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

#[test]
fn the_bench_drives_virtio_disks_and_says_what_it_cannot() {
    let daemon = Daemon::start();
    let socket = daemon.virtio_disk("d", &["--backend", "memory", "--size", "4M"], &[]);
    for (rw, depth) in [("randread", "1"), ("randwrite", "32"), ("read", "256"), ("write", "3")] {
        let said = bench(&socket, &["--rw", rw, "--qd", depth]).unwrap();
        let report: serde_json::Value = serde_json::from_str(&said).unwrap();
        assert_eq!((&report["model"], &report["rw"]), (&"virtio-blk".into(), &rw.into()));
        assert!(report["total"]["commands"].as_u64().is_some_and(|commands| commands > 0), "{said}");
    }
    for depth in ["1", "4", "64", "256"] {
        let said = bench(&socket, &["--packed", "--rw", "randread", "--qd", depth]).unwrap();
        let report: serde_json::Value = serde_json::from_str(&said).unwrap();
        assert!(report["total"]["commands"].as_u64().is_some_and(|commands| commands > 0), "{said}");
    }
    for (words, reason) in [
        (&["--qd", "257"][..], "257 requests at a time"),
        (&["--bs", "700"], "--bs 700"),
        (&["--bs", "8m"], "0 units"),
        (&["--interrupts"], "cannot be used with"),
        (&["--queues", "2"], "cannot be used with"),
    ] {
        let said = bench(&socket, words).unwrap_err();
        assert!(said.contains(reason), "{words:?}: {said}");
    }
    let said = bench(&daemon.path("nothing.sock"), &[]).unwrap_err();
    assert!(said.contains("nothing.sock") && said.contains("connecting"), "{said}");
    daemon.finish();
}
