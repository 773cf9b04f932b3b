//! The same commands to a controller by itself and to one on an engine: good ones, and with everything wrong that can be. Both answer
//! alike, but for what docs/hardware.md says.

use zerocopy::IntoBytes;

use super::*;

/// Numbers from a seed (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

/// Blocks of the disks.
const BLOCKS: u64 = 4096;
/// Pages for a command's data, and one for its list.
const PAGES: u64 = 34;

/// A command: pages from `data` on, a list at `list`.
fn some_command(random: &mut Random, data: u64, list: u64) -> (Sqe, Vec<u64>) {
    let opcode = random.one_of(&[NvmOpcode::FLUSH, NvmOpcode::WRITE, NvmOpcode::WRITE, NvmOpcode::READ, NvmOpcode::READ]);
    let opcode = random.one_of(&[opcode, opcode, opcode, NvmOpcode::COMPARE, NvmOpcode::WRITE_ZEROES]);
    let most = random.one_of(&[16, 256]);
    let blocks = 1 + random.below(most);
    let mut sqe = command(opcode, random.below(BLOCKS - 256), blocks as u32);
    sqe.cdw12 |= random.one_of(&[0, 0, 1 << 30, 1 << 31]);
    let offset = random.one_of(&[0, 0, 4, 2048, 4092]);
    let mut list_entries: Vec<u64> = (1..PAGES - 1).map(|page| data + page * PAGE).collect();
    let pages = (offset + blocks * 512).div_ceil(PAGE);
    let second = if pages == 2 { data + PAGE } else { list };
    sqe.dptr = DataPointer::prps(data + offset, second);
    let nowhere = MEMORY_BASE + MEMORY_SIZE;
    match random.below(40) {
        0 => sqe.nsid = NamespaceId(random.one_of(&[0, 2, 77, 0xffff_fffe])),
        1 => sqe.set_cdw10_11(random.one_of(&[BLOCKS, BLOCKS - 1, BLOCKS - blocks, BLOCKS - blocks + 1, u64::MAX])),
        2 => sqe.cdw12 |= 0xffff,
        3 if opcode != NvmOpcode::FLUSH && opcode != NvmOpcode::WRITE_ZEROES => {
            sqe.flags = random.one_of(&[3, 0xc0_u8]).into();
        } // the others exist without an engine
        4 => sqe.dptr.prp1 += 1 + random.below(3),
        5 => sqe.dptr.prp1 = random.one_of(&[0, MEMORY_BASE - PAGE, nowhere, 1 << 41, u64::MAX - 4095]),
        6 => sqe.dptr.prp2 += random.one_of(&[4, 8, 512]),
        7 => sqe.dptr.prp2 = random.one_of(&[0, nowhere, 1 << 41, u64::MAX - 7]),
        8 => list_entries[random.below(pages.min(30)) as usize] += random.one_of(&[4, 8, 2048]),
        9 => list_entries[random.below(pages.min(30)) as usize] = random.one_of(&[0, nowhere, 1 << 41]),
        10 => sqe.opcode = random.one_of(&[0x03, 0x06, 0x0a, 0x12, 0x18, 0x1d, 0x21, 0x79, 0x7d, 0x80, 0xff]),
        // What means nothing here.
        11 => (sqe.cdw2, sqe.cdw3, sqe.mptr) = (random.next() as u32, random.next() as u32, random.next()),
        12 => (sqe.cdw13, sqe.cdw14, sqe.cdw15) = (random.next() as u32, random.next() as u32, random.next() as u32),
        13 => sqe.cdw12 |= random.one_of(&[1 << 16, 1 << 24, 0xf << 26]),
        _ => {}
    }
    (sqe, list_entries)
}

fn guests() -> [FakeGuest; 2] {
    let usual = crate::nvme::fixture::test_config();
    let limits = crate::nvme::Config { card: Some(test_card(1)), ..usual }.limited();
    let mut plain = FakeGuest::new(crate::nvme::Config { card: None, ..limits });
    plain.enable();
    [plain, guest()].map(|mut guest| {
        guest.add_volume(1, MemoryVolume::create("disk", BLOCKS * 512, BlockSize::B512).expect("a volume"));
        guest.create_queues(1, 64);
        guest
    })
}

#[test]
fn whatever_is_asked() {
    let seed = 11;
    println!("seed {seed}");
    let (mut random, mut guests) = (Random(seed), guests());
    let places = guests.each_mut().map(|guest| (guest.alloc_pages(PAGES), guest.alloc_pages(1)));
    assert_eq!(places[0], places[1], "both guests' memory is laid out alike");
    let (data, list) = places[0];
    let (mut good, mut bad, mut other) = (0, 0, Vec::new());
    for number in 0..4000_u32 {
        let (sqe, entries) = some_command(&mut random, data, list);
        let fill = pattern(number as u8, (PAGES * PAGE) as usize);
        let answers = guests.each_mut().map(|guest| {
            guest.write(list, entries.as_bytes());
            if number % 3 == 0 {
                guest.write(data, &fill);
            }
            let status = guest.command(1, sqe).status();
            assert!(guest.controller.port.is_none() || !status.more(), "the log of errors does not know of the engine's");
            (status.code(), status.dnr(), guest.read(data, (PAGES * PAGE) as usize))
        });
        let [(status, retry, found), (of_engine, retry_of_engine, found_by_engine)] = answers;
        // Of a transfer that failed half way some data may have arrived.
        let same = found == found_by_engine;
        if (status, retry) != (of_engine, retry_of_engine) || !same && status.is_success() {
            other.push(format!("command {number}: {status:?} {of_engine:?}, same data: {same}, {sqe:?}"));
        }
        *(if status.is_success() { &mut good } else { &mut bad }) += 1;
        if !same {
            for guest in &guests {
                guest.write(data, &fill);
            }
        }
    }
    assert!(other.is_empty(), "seed {seed}: the engine answered otherwise\n{}", other.join("\n"));
    assert!(good > 2000 && bad > 400, "{good} good, {bad} bad");
    let all = |guest: &mut FakeGuest| (0..BLOCKS / 256).map(|at| read(guest, 1, at * 256, 256 * 512).1).collect::<Vec<_>>();
    let [one, other] = guests.each_mut().map(all);
    assert!(one == other, "seed {seed}: the disks differ");
}
