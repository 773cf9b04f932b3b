//! What a system call costs a thread of a worker's that is not on its list: before the sandbox is closed, and after, in one run.
//!
//! `pread` is made in another form by the handler, `faccessat` by the broker, `fstat` by the thread itself as before.

use std::{
    fs::File,
    hint::black_box,
    io,
    os::{fd::AsFd, unix::fs::FileExt},
    path::Path,
    process::Command,
    time::Instant,
};

use millrace_sandbox::{Policy, broker};
use rustix::fs::{Access, AtFlags, CWD, accessat, fstat};

const CALLS: u32 = 2000;
const SAMPLES: usize = 9;

/// Median and spread of a call, in microseconds.
fn time(mut call: impl FnMut()) -> [f64; 3] {
    let mut samples: Vec<f64> = (0..SAMPLES)
        .map(|_| {
            let began = Instant::now();
            (0..CALLS).for_each(|_| call());
            began.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS)
        })
        .collect();
    samples.sort_by(f64::total_cmp);
    [samples[0], samples[SAMPLES / 2], samples[SAMPLES - 1]]
}

fn measure(file: &File) -> [(&'static str, [f64; 3]); 3] {
    let mut byte = [0];
    [
        ("fstat", time(|| _ = black_box(fstat(file)))),
        ("pread", time(|| _ = black_box(file.read_at(&mut byte, 0)))),
        ("faccessat", time(|| _ = black_box(accessat(CWD, "/dev/null", Access::EXISTS, AtFlags::empty())))),
    ]
}

fn main() {
    if std::env::args().nth(1).as_deref() == Some("broker") {
        return broker(io::stdin().as_fd()).expect("making calls");
    }
    let mut own = Command::new("/proc/self/exe");
    own.arg("broker");
    let mut sandbox = Policy::default().enter(&[], own, None).expect("the first half");
    let file = File::open(Path::new("/proc/self/exe")).expect("a file");
    let free = measure(&file);
    sandbox.close(Vec::new()).expect("the second half");
    println!("microseconds a call: median (least to most) of {SAMPLES} samples of {CALLS}");
    for ((name, free), (_, closed)) in free.into_iter().zip(measure(&file)) {
        let show = |[least, median, most]: [f64; 3]| format!("{median:.2} ({least:.2} to {most:.2})");
        println!("{name:10} {:24} in the sandbox {}", show(free), show(closed));
    }
}
