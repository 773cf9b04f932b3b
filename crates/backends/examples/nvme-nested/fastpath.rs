//! A volume on the controller, which a program without a machine has of a daemon: what it writes from its buffer, or by the library's copies,
//! is read back both ways.

use std::time::Duration;

use millrace::{Completion, Error, FastPath, Options};

use super::{MIB, Random, SEED};

const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of the volume that are used, and of the buffer.
const RANGE: u64 = 16 * MIB;
const BUFFER: u64 = 4 * MIB;
const ROUNDS: u64 = 8;

fn well<T>(result: Result<T, Error>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

/// Waits for the end of a request on the buffer.
fn end(space: &FastPath, begun: Result<(), Error>, len: u64) {
    well(begun);
    let mut done = [Completion::default()];
    assert_eq!(space.wait(&mut done, PATIENCE), 1, "a request of {len} bytes never ends");
    assert_eq!((done[0].errno, done[0].bytes), (0, len));
}

pub(super) fn fastpath(volume: &str) {
    let options =
        Options { run_dir: Some("/run/millrace".into()), buffer: BUFFER as usize, timeout: PATIENCE, ..Options::default() };
    let space = well(FastPath::open(volume, &options));
    let (block, mut random) = (u64::from(space.block_size()), Random(SEED));
    well(space.write_zeroes(0, RANGE));
    let mut model = vec![0; RANGE as usize];
    for round in 0..ROUNDS {
        // One block, and up to several commands of the program's and more of the controller's.
        for len in [block, 4096, 12_288, 64 << 10, (128 << 10) + block, MIB, 2 * MIB] {
            let offset = random.below((RANGE - len) / block) * block;
            let place = random.below((BUFFER - len) / 4) as usize * 4;
            let salt = random.below(1 << 16);
            let data: Vec<u8> = (0..len).map(|at| (at / 7 + at % 251 + salt) as u8).collect();
            let part = place..place + data.len();
            if round % 2 == 0 {
                space.fill(place, &data);
                end(&space, space.begin_write(round, offset, part.clone(), false), len);
            } else {
                well(space.write(offset, &data, round % 4 == 1));
            }
            model[offset as usize..][..data.len()].copy_from_slice(&data);
            let mut found = vec![0xee; data.len()];
            space.fill(place, &found);
            end(&space, space.begin_read(round, offset, part), len);
            space.take(place, &mut found);
            assert!(found == data, "round {round}: other data in the {len} bytes at {offset}, read to {place}");
            found.fill(0xee);
            well(space.read(offset, &mut found));
            assert!(found == data, "round {round}: other data in the {len} bytes at {offset}, copied");
        }
    }
    well(space.flush());
    let mut found = vec![0xee; model.len()];
    well(space.read(0, &mut found));
    assert!(found == model, "other data than were written");
    println!("fastpath: {ROUNDS} rounds");
}
