//! The same programs' requests through every engine that there is: the same records, and the same on the disks and in the buffers.

use std::collections::BTreeMap;

use millrace_engine_model::{
    Engine, Shape, SoftEngine,
    map::{
        self, PageRow, QueueBase, QueueSizes,
        fastpath::{self, Go, Space},
    },
    testing::{BASE, Rig, SIZE},
};
use millrace_nvme_spec::status::Status;

/// The program's function, and the local function whose queue is the space's.
const FUNCTION: u8 = 9;
const LOCAL: u8 = 5;
/// Requests at a time, each with its own part of the buffer and of the blocks.
const AT_ONCE: u64 = 8;
const PART: u64 = 320 << 10;
const BLOCKS: u64 = 4096;
/// Where the records lie in the guest's memory.
const RING: u64 = SIZE - 4096;

#[derive(Clone, Copy, Debug)]
struct Request {
    go: Go,
    offset: u64,
    lba: u64,
    blocks: u64,
}

fn engines(test: impl Fn(&mut Rig) -> Vec<(u16, Status)>) -> Vec<(Rig, Vec<(u16, Status)>)> {
    let shape = Shape::new(1, 1).with_spaces(1);
    #[allow(unused_mut)]
    let mut engines: Vec<Box<dyn Engine>> = vec![Box::new(SoftEngine::new(shape))];
    #[cfg(feature = "sim")]
    engines.push(Box::new(millrace_engine_model::SimEngine::new(shape).expect("a configuration that was built")));
    let run = |engine| {
        let mut rig = Rig::new(engine, 1);
        open(&mut rig);
        let records = test(&mut rig);
        (rig, records)
    };
    engines.drain(..).map(run).collect()
}

/// Opens the space as docs/hardware.md says.
fn open(rig: &mut Rig) {
    let shape = rig.engine.shape();
    rig.configure(LOCAL, 1, BLOCKS, &[]);
    for page in 0..(SIZE / map::PAGE) as u32 {
        let row = PageRow::at(BASE + u64::from(page) * map::PAGE, true);
        rig.write(map::page(shape.pages, LOCAL, page), row.into_bits());
    }
    let window = PageRow::at(fastpath::WINDOW, false);
    rig.write(map::page(shape.pages, LOCAL, u32::from(shape.pages) - 1), window.into_bits());
    let queue = u32::from(LOCAL) * u32::from(shape.queue_pairs);
    let base = QueueBase::new().with_enabled(true).with_page(fastpath::WINDOW / 4096);
    let sizes = QueueSizes::new().with_sq(fastpath::ENTRIES).with_cq(fastpath::ENTRIES);
    rig.write(map::queue(queue, 1), sizes.into_bits());
    rig.write(map::queue(queue, 2), fastpath::WINDOW + fastpath::COMPLETION);
    rig.write(map::queue(queue, 0), base.into_bits());
    rig.write(fastpath::space(0, fastpath::BUFFER), AT_ONCE * PART / 4096);
    rig.write(fastpath::space(0, fastpath::RING), BASE + RING);
    let space = Space::new().with_enabled(true).with_function(FUNCTION).with_local(LOCAL);
    rig.write(fastpath::space(0, 0), space.into_bits());
    assert_eq!(rig.read(fastpath::space(0, 0)), space.into_bits());
}

fn send(rig: &mut Rig, request: &Request) {
    let upper = (request.lba >> 32 | request.blocks << 16) as u32;
    let words = [request.offset as u32, request.lba as u32, upper, request.go.into_bits()];
    for (at, word) in words.into_iter().enumerate() {
        rig.doorbell(FUNCTION, fastpath::PAGE + at as u16 * 4, word);
    }
}

/// The record at this place of all that were ever written: tag, status, requests refused before, cycles.
fn record(rig: &mut Rig, place: u64) -> Option<(u16, Status, u32, u32)> {
    let tags = u64::from(fastpath::TAGS);
    let bytes = rig.memory(0, RING + place % tags * fastpath::RECORD, 16);
    let word = |at: usize| u32::from_le_bytes(bytes[at * 4..at * 4 + 4].try_into().expect("4 bytes"));
    let phase = u32::from((place / tags).is_multiple_of(2));
    (word(3) >> 16 & 1 == phase).then(|| (word(3) as u16, Status::from_bits((word(3) >> 17) as u16), word(2), word(0)))
}

/// A random number that is the same everywhere: xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    /// A request for the part of this tag, and what it ends with.
    fn request(&mut self, tag: u64) -> (Request, Status) {
        let opcode = [1, 1, 1, 2, 2, 2, 8, 0][self.below(8) as usize];
        let part = BLOCKS / AT_ONCE;
        let limit = [8, 64, part][self.below(3) as usize];
        let blocks = 1 + self.below(limit);
        let lba = tag * part + self.below(part - blocks + 1);
        // The rig's disks move whole blocks within a page.
        let offset = tag * PART + self.below(PART / 512 - blocks + 1) * 512;
        let go = Go::new().with_opcode(opcode).with_tag(tag as u16).with_durable(self.below(2) == 1);
        let good = Request { go, offset, lba, blocks };
        let no_retry = |status: Status| status.do_not_retry();
        match self.below(16) {
            0 => (Request { go: go.with_opcode(0x0c), ..good }, no_retry(Status::INVALID_OPCODE)),
            1 => (Request { go: go.with_reserved(1), ..good }, no_retry(Status::INVALID_FIELD)),
            2 if opcode != 0 => (Request { blocks: 0, ..good }, no_retry(Status::INVALID_FIELD)),
            3 if opcode != 0 => (Request { lba: BLOCKS, ..good }, no_retry(Status::LBA_OUT_OF_RANGE)),
            4 if opcode == 1 || opcode == 2 => {
                (Request { offset: AT_ONCE * PART - 4, ..good }, no_retry(Status::DATA_TRANSFER_ERROR))
            }
            _ => (good, Status::SUCCESS),
        }
    }
}

#[test]
fn requests_end_the_same_on_all_engines() {
    for seed in [1_u64, 0x5eed, 0xfa57_9a74] {
        let runs = engines(|rig| {
            let mut random = Random(seed);
            let mut all = Vec::new();
            for at in 0..AT_ONCE * PART {
                rig.memory(0, at, 1)[0] = (at / 512) as u8;
            }
            for round in 0..25 {
                let (mut expected, mut place) = (BTreeMap::new(), all.len() as u64);
                for tag in 0..AT_ONCE {
                    let (request, status) = random.request(tag);
                    expected.insert(tag as u16, status);
                    send(rig, &request);
                }
                rig.settle();
                let mut found = BTreeMap::new();
                while let Some((tag, status, refused, _)) = record(rig, place) {
                    assert_eq!(refused, 0);
                    assert!(found.insert(tag, status).is_none(), "seed {seed}, round {round}: tag {tag} ends twice");
                    place += 1;
                }
                assert_eq!(found, expected, "seed {seed}, round {round}");
                all.extend(found);
            }
            all
        });
        let (mut first, records) = runs
            .into_iter()
            .reduce(|(mut first, records), (mut other, others)| {
                assert_eq!(records, others, "seed {seed}");
                assert!(first.disks[0].blocks == other.disks[0].blocks, "seed {seed}: the disks differ");
                let buffer = (AT_ONCE * PART) as usize;
                assert!(first.memory(0, 0, buffer) == other.memory(0, 0, buffer), "seed {seed}: the buffers differ");
                check_statistics(&mut other, &others);
                (first, records)
            })
            .expect("there is one at least");
        check_statistics(&mut first, &records);
        // Some were cut: a command of 128 KiB is never all of a request here but by chance.
        let largest = first.disks[0].commands.iter().filter(|sqe| sqe.cdw12 as u16 == 255).count();
        assert!(largest > 5 && !first.disks[0].blocks.is_empty(), "{largest} commands of 128 KiB");
        assert_eq!(first.world.lost, 0);
    }
}

fn check_statistics(rig: &mut Rig, records: &[(u16, Status)]) {
    let words: Vec<u64> = (0..32).map(|row| rig.read(fastpath::space(0, fastpath::STATISTICS + row))).collect();
    let [count, sum, least, most] = [words[0], words[1], words[2], words[3]];
    assert_eq!(count, records.len() as u64);
    assert_eq!(words[4..].iter().sum::<u64>(), count);
    assert!(least <= most && least * count <= sum && sum <= most * count, "{words:?}");
    assert_eq!(rig.read(fastpath::space(0, fastpath::STATUS)), 0);
}

#[test]
fn no_request_goes_round_the_end_of_all_block_numbers() {
    for opcode in [1, 2, 8] {
        let runs = engines(|rig| {
            // The first of its commands ends with the last number of 48 bits, the second begins behind it.
            let go = Go::new().with_opcode(opcode).with_tag(6);
            send(rig, &Request { go, offset: 0, lba: (1 << 48) - 256, blocks: 512 });
            rig.settle();
            record(rig, 0).map(|found| (found.0, found.1)).into_iter().collect()
        });
        for (rig, records) in runs {
            assert_eq!(records, [(6, Status::LBA_OUT_OF_RANGE.do_not_retry())], "opcode {opcode}");
            assert!(rig.disks[0].commands.is_empty(), "opcode {opcode}: a part of it reached the disk's begin");
        }
    }
}

#[test]
fn what_cannot_be_a_request_is_counted() {
    let read = |tag: u16| Request { go: Go::new().with_opcode(2).with_tag(tag), offset: 0, lba: 0, blocks: 1 };
    engines(|rig| {
        send(rig, &read(3));
        send(rig, &read(3)); // in use
        send(rig, &read(32));
        rig.doorbell(FUNCTION, fastpath::PAGE + 16, 0);
        let before = rig.read(map::REFUSED);
        rig.doorbell(FUNCTION, fastpath::PAGE - 4, 0);
        rig.doorbell(FUNCTION + 1, fastpath::PAGE, 0);
        rig.settle();
        assert_eq!(rig.read(map::REFUSED), before + 2, "whose page it is not, is the front's to refuse");
        assert_eq!(record(rig, 0).map(|found| (found.0, found.1, found.2)), Some((3, Status::SUCCESS, 3)));
        assert_eq!(record(rig, 1), None);
        assert_eq!(rig.read(fastpath::space(0, fastpath::STATUS)), 3 << 16);
        // A word is missing; then the space is closed, and opened anew.
        rig.doorbell(FUNCTION, fastpath::PAGE + 12, read(1).go.into_bits());
        rig.settle();
        assert_eq!(record(rig, 1).map(|found| found.1), Some(Status::INVALID_FIELD.do_not_retry()));
        rig.write(fastpath::space(0, 0), 0);
        send(rig, &read(4));
        rig.settle();
        assert_eq!(record(rig, 2), None);
        let queue = u32::from(LOCAL) * u32::from(rig.engine.shape().queue_pairs);
        rig.write(map::queue(queue, 0), 0);
        rig.memory(0, RING, 512).fill(0);
        open(rig);
        assert_eq!(rig.read(fastpath::space(0, fastpath::STATUS)), 0);
        send(rig, &read(4));
        rig.settle();
        assert_eq!(record(rig, 0).map(|found| (found.0, found.1, found.2)), Some((4, Status::SUCCESS, 0)));
        Vec::new()
    });
}
