//! Data in pieces: what a guest of our own driver sends as an SGL is what the controller takes for the command's data.

mod house;

use millrace_backends::MemoryVolume;
use millrace_block::{BlockSize, Lba};
use millrace_driver::{Command, DmaBuffer, DmaRange, QueueError, QueuePair, SglError};
use millrace_frontends::nvme::DoorbellMode;
use millrace_nvme_spec::sgl::SglDescriptor;

use self::house::{CARDS, House};

const SEED: u64 = 20_261_123;
const MOST: usize = 64 << 10;

/// Numbers that look random: the same for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % limit
    }
}

/// Pieces of `len` bytes together, each in a part of the buffer of its own, in any order and at any byte.
fn some(random: &mut Random, buffer: &DmaBuffer, len: usize, most: usize) -> Vec<(usize, usize)> {
    let count = 1 + random.below(most.min(len));
    let part = buffer.len() / count;
    let mut places: Vec<usize> = (0..count).collect();
    for at in (1..count).rev() {
        places.swap(at, random.below(at + 1));
    }
    let mut left = len;
    let mut pieces = Vec::new();
    for (i, place) in places.into_iter().enumerate() {
        let others = count - i - 1;
        // Enough is left for the others to have a byte each, and to be no longer than their parts.
        let least = left.saturating_sub(others * (part - 1)).max(1);
        let now = least + random.below((left - others).min(part - 1) - least + 1);
        pieces.push((place * part + random.below(part - now), now));
        left -= now;
    }
    assert_eq!(left, 0);
    pieces
}

fn ranges<'a>(buffer: &'a DmaBuffer, pieces: &'a [(usize, usize)]) -> impl Iterator<Item = DmaRange> + 'a {
    pieces.iter().map(|(at, len)| buffer.slice(*at, *len))
}

fn run(queue: &mut QueuePair, command: &Command, pieces: impl Iterator<Item = DmaRange>) {
    let cid = queue.submit_sgl(command, pieces).expect("pieces that can be said");
    queue.ring().expect("ringing");
    let cqe = queue.wait_for(cid).expect("a completion");
    assert!(cqe.status().is_success(), "{}", cqe.status());
}

#[test]
fn pieces_of_any_lengths_anywhere_are_the_commands_data() {
    let house =
        House::with(DoorbellMode::Shared, None, MemoryVolume::create("disk", 4 << 20, BlockSize::B512).expect("a volume"));
    let (controller, disk, mut queue) = house.guest();
    let limits = queue.sgl().expect("our controller takes SGLs");
    assert_eq!(limits.granularity, 1);
    let memory = || controller.memory().alloc(4 * MOST).expect("memory");
    let (scattered, plain) = (memory(), memory());
    let mut random = Random(SEED);
    for round in 0..400 {
        let len = 512 * (1 + random.below(MOST / 512));
        let pieces = some(&mut random, &scattered, len, limits.pieces);
        let lba = Lba(random.below(1024) as u64);
        let data: Vec<u8> = (0..len).map(|_| random.below(256) as u8).collect();
        // In by pieces and out in one, then the other way round.
        let mut from = &data[..];
        for (at, len) in &pieces {
            let (now, later) = from.split_at(*len);
            scattered.write_at(*at, now);
            from = later;
        }
        let write = disk.write(lba, DmaRange { iova: 0, len }).expect("a write");
        run(&mut queue, &write, ranges(&scattered, &pieces));
        plain.fill(0xee);
        queue.execute(&disk.read(lba, plain.slice(0, len)).expect("a read")).expect("it reads");
        assert!(plain.read_vec(0, len) == data, "round {round}, seed {SEED}: {} pieces: other data", pieces.len());
        scattered.fill(0xee);
        let read = disk.read(lba, DmaRange { iova: 0, len }).expect("a read");
        run(&mut queue, &read, ranges(&scattered, &pieces));
        let mut expected = vec![0xee; scattered.len()];
        let mut from = &data[..];
        for (at, len) in &pieces {
            let (now, later) = from.split_at(*len);
            expected[*at..*at + *len].copy_from_slice(now);
            from = later;
        }
        let all = scattered.read_vec(0, scattered.len());
        assert!(all == expected, "round {round}, seed {SEED}: {} pieces: other data, or bytes beside them", pieces.len());
    }
}

#[test]
fn lists_of_commands_in_flight_are_their_own() {
    let house =
        House::with(DoorbellMode::Shared, None, MemoryVolume::create("disk", 4 << 20, BlockSize::B512).expect("a volume"));
    let (controller, disk, mut queue) = house.guest();
    let buffer = controller.memory().alloc(1 << 20).expect("memory");
    let count = queue.capacity();
    // Each command has two pieces with a hole between them.
    let place = |cid: usize| cid * 8192;
    let pieces = |cid: usize| [buffer.slice(place(cid), 100), buffer.slice(place(cid) + 200, 412)];
    for opcode_is_write in [true, false] {
        for cid in 0..count {
            let (lba, none) = (Lba(cid as u64), DmaRange { iova: 0, len: 512 });
            if opcode_is_write {
                buffer.write_at(place(cid), &[cid as u8 + 1; 612]);
            } else {
                buffer.write_at(place(cid), &[0; 612]);
            }
            let command = if opcode_is_write { disk.write(lba, none) } else { disk.read(lba, none) };
            queue.submit_sgl(&command.expect("a command"), pieces(cid)).expect("room");
        }
        queue.ring().expect("ringing");
        for _ in 0..count {
            let cqe = queue.wait_raw(house::PATIENCE).expect("the controller is there").expect("a completion");
            assert!(cqe.status().is_success(), "{}", cqe.status());
        }
    }
    for cid in 0..count {
        let byte = cid as u8 + 1;
        let expected: Vec<u8> = (0..612).map(|at| if (100..200).contains(&at) { 0 } else { byte }).collect();
        assert_eq!(buffer.read_vec(place(cid), 612), expected, "command {cid}");
    }
}

#[test]
fn more_pieces_than_there_is_room_for_and_a_controller_without_sgls_are_refused() {
    let volume = || MemoryVolume::create("disk", 4 << 20, BlockSize::B512).expect("a volume");
    let house = House::with(DoorbellMode::Shared, None, volume());
    let (controller, disk, mut queue) = house.guest();
    let limits = queue.sgl().expect("our controller takes SGLs");
    assert_eq!(limits.pieces, 4096 / SglDescriptor::SIZE);
    let buffer = controller.memory().alloc(1 << 20).expect("memory");
    let len = 2 * (limits.pieces + 1) - 2;
    let read = disk.read(Lba(0), DmaRange { iova: 0, len: 512 }).expect("a read");
    assert_eq!(len, 512);
    let fit = (0..limits.pieces).map(|i| buffer.slice(i * 4, 2));
    run(&mut queue, &read, fit.clone());
    let refused = queue.submit_sgl(&read, fit.chain([buffer.slice(8192, 2)])).unwrap_err();
    assert!(matches!(refused, QueueError::Sgl { source: SglError::TooMany { most: 256 }, .. }), "{refused}");
    // An engine's queues take PRPs.
    let house = House::with(DoorbellMode::Shared, CARDS[1], volume());
    let (_controller, _, mut queue) = house.guest();
    assert_eq!(queue.sgl(), None);
    let refused = queue.submit_sgl(&read, [buffer.slice(0, 512)]).unwrap_err();
    assert!(matches!(refused, QueueError::Sgl { source: SglError::NotSupported, .. }), "{refused}");
}
