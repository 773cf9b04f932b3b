//! Programs at a volume that a guest uses through its own kernel.

use std::{thread::sleep, time::Duration};

use millrace::{FastPath, Options};
use millrace_tests::{Boot, Daemon, seats};

/// Where the guest has written what it verifies in the end (`KEPT` of the scenario), and how much: blocks of fio's, each with a header.
const KEPT: u64 = 64 << 20;
const KEPT_LEN: usize = 2 << 20;
const FIO_BLOCK: usize = 16 << 10;
/// `FIO_HDR_MAGIC`, as it lies in memory.
const FIO_MAGIC: [u8; 2] = 0xacca_u16.to_le_bytes();
/// Where only the program writes.
const OURS: u64 = 128 << 20;

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64 / 8).flat_map(|at| (at ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect()
}

/// While the guest writes and verifies its part of the volume, a program does the same with another one; what the guest wrote the program reads, and
/// what the program writes in its place the guest reads and verifies.
#[test]
fn a_program_and_a_guest_use_one_volume_at_the_same_time() {
    let daemon = Daemon::start();
    let socket = daemon.disk("disk", &["--backend", "memory", "--size", "256M"], &[]);
    let mut guest = Boot::scenario("load").set("KEPT", KEPT_LEN).socket(&socket).start(&seats(1));
    guest.wait_mark("loaded");
    let options = Options { run_dir: Some(daemon.run_dir()), ..Options::default() };
    let space = FastPath::open("disk", &options).unwrap();

    let mut kept = vec![0; KEPT_LEN];
    space.read(KEPT, &mut kept).unwrap();
    let whole = kept.chunks(FIO_BLOCK).all(|block| block.starts_with(&FIO_MAGIC));
    assert!(whole, "what the guest has written is there");
    space.write(KEPT, &vec![0; KEPT_LEN], false).unwrap();
    for round in 0..100_u64 {
        let bytes = pattern(round, 512 * (1 + (round as usize * 37) % 600));
        space.write(OURS + (round << 20) % (64 << 20), &bytes, false).unwrap();
        let mut back = vec![0; bytes.len()];
        space.read(OURS + (round << 20) % (64 << 20), &mut back).unwrap();
        assert!(back == bytes, "round {round}");
        sleep(Duration::from_millis(5));
    }
    guest.send("alive");
    guest.wait_mark("alive");
    space.write(KEPT, &kept, true).unwrap();
    guest.send("enough");
    guest.finish();
    drop(space);
    daemon.finish();
}
