//! What a write of one chunk to a volume with parity in memory moves, and nothing else: the same bytes between the same kinds of places.
//!
//! ```text
//!   the data's place ────┐               ┌───► the parity's place
//!   the parity's place ──┴─► a buffer ───┘
//!   what is written ─────────────────────────► the data's place
//! ```
//!
//! Four times a chunk is copied. There is no sum, no lock, no request and no answer.

use std::{hint::black_box, thread, time::Instant};

use crate::gate::pin;

const CHUNK: usize = 4096;
/// Two of data and one of parity.
const LEGS: usize = 3;
/// Writes between two looks at the clock.
const AT_ONCE: u64 = 1000;

struct Copies {
    legs: [Vec<u8>; LEGS],
    /// What the data were, and the parity.
    buffer: Vec<u8>,
    /// What is written lies here.
    client: Vec<u8>,
    number: usize,
    seed: u64,
}

impl Copies {
    /// Of legs that have so many bytes each, with all their memory there.
    fn new(leg: usize, client: usize) -> Self {
        let legs = [1, 2, 3].map(|byte| vec![byte; leg]);
        Self { legs, buffer: vec![4; 2 * CHUNK], client: vec![5; client], number: 0, seed: 1 }
    }

    /// One write, at a random row.
    fn write(&mut self) {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let row = (self.seed >> 33) as usize % (self.legs[0].len() / CHUNK);
        let [data, parity] = [0, 1].map(|part| (row + part) % LEGS);
        let at = row * CHUNK..(row + 1) * CHUNK;
        let from = self.number % (self.client.len() / CHUNK) * CHUNK;
        let (before, sum) = self.buffer.split_at_mut(CHUNK);
        before.copy_from_slice(&self.legs[data][at.clone()]);
        sum.copy_from_slice(&self.legs[parity][at.clone()]);
        self.legs[data][at.clone()].copy_from_slice(&self.client[from..from + CHUNK]);
        self.legs[parity][at].copy_from_slice(sum);
        self.number += 1;
    }
}

/// Such writes a second by a thread on a core, over legs of so many bytes and from as much of a client's memory.
pub(crate) fn rate(core: usize, seconds: f64, leg: usize, client: usize) -> f64 {
    let work = move || {
        pin(core);
        let mut copies = Copies::new(leg, client);
        let (start, mut writes) = (Instant::now(), 0);
        loop {
            for _ in 0..AT_ONCE {
                copies.write();
            }
            black_box(&mut copies);
            writes += AT_ONCE;
            let elapsed = start.elapsed().as_secs_f64();
            if elapsed >= seconds {
                return writes as f64 / elapsed;
            }
        }
    };
    thread::spawn(work).join().expect("copying does not panic")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_changes_its_place_and_looks_at_its_parity() {
        let mut copies = Copies::new(CHUNK, 2 * CHUNK);
        copies.write();
        assert_eq!(copies.legs, [5_u8, 2, 3].map(|byte| vec![byte; CHUNK]));
        assert_eq!(copies.buffer, [1_u8, 2].map(|byte| vec![byte; CHUNK]).concat());
        assert!(rate(0, 0.0, CHUNK, CHUNK) > 0.0);
    }
}
