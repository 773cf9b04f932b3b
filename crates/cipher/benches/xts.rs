//! What AES-256-XTS takes for 4 KiB from and to the first-level cache: pieces by themselves, pieces that are told of each other, and long
//! ones. The least and the median of each, in nanoseconds. `cargo bench -p millrace-cipher --bench xts`

#![allow(clippy::cast_precision_loss, reason = "three digits are shown")]

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use millrace_cipher::{Run, Secret, Xts};
use millrace_memory::{Mapping, Reach, Segment, Target};

const PIECE: usize = 4096;
/// Bytes of a long piece.
const LONG: usize = 32 * PIECE;
/// Pieces in a run.
const PIECES: u64 = 32;

/// Least and median nanoseconds per 4 KiB.
fn measure(xts: &Xts, len: usize, mut piece: impl FnMut(&mut Run<'_>, Option<u64>)) -> (f64, f64) {
    const ROUNDS: u32 = 64;
    let mut samples = Vec::new();
    let end = Instant::now() + Duration::from_millis(400);
    while Instant::now() < end {
        let start = Instant::now();
        for _ in 0..ROUNDS {
            let mut run = xts.run();
            (1..=PIECES).for_each(|at| piece(&mut run, (at < PIECES).then_some(0)));
        }
        let pieces = f64::from(ROUNDS) * PIECES as f64 * (len / PIECE) as f64;
        samples.push(start.elapsed().as_nanos() as f64 / pieces);
    }
    samples.sort_by(f64::total_cmp);
    (samples[0], samples[samples.len() / 2])
}

fn print(xts: &Xts, what: &str, unit: usize, [from, to]: [Segment; 2], tells: bool) {
    let len = from.len();
    let enciphered = measure(xts, len, |run, next| {
        let to = Reach { segment: to.into(), target: Target::Near };
        run.encrypt(0, unit, black_box(from).into(), to, next.filter(|_| tells));
    });
    let deciphered = measure(xts, len, |run, next| {
        run.decrypt(0, unit, black_box(from).into(), to.into(), next.filter(|_| tells));
    });
    let [enciphered, deciphered] = [enciphered, deciphered].map(|(least, median)| format!("{least:6.1} ({median:6.1}) ns"));
    println!("{what:12} units of {unit:4}   enciphered {enciphered}   deciphered {deciphered}");
}

fn main() {
    // `cargo test` runs benches, too, with this word: nothing to measure then.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let xts = Xts::new(Secret::generate().expect("a key")).expect("a cipher");
    let memory = [0, 1].map(|_| Mapping::anonymous(LONG).expect("memory"));
    // SAFETY: the memory is there to the end.
    let all = memory.each_ref().map(|memory| unsafe { memory.segment(0, LONG) }.expect("all of it"));
    for segment in &all {
        segment.fill(3);
    }
    let piece = all.map(|segment| segment.part(0, PIECE).expect("a part"));
    for unit in [512, 4096] {
        print(&xts, "alone", unit, piece, false);
        print(&xts, "in a run", unit, piece, true);
        print(&xts, "long pieces", unit, all, false);
    }
}
