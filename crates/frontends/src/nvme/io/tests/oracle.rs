//! Many commands at once against a copy of the disk: whatever order they end in, the blocks are right.

use millrace_nvme_spec::{
    command::NamespaceId,
    nvm::{CopyRange, DatasetRange},
};
use proptest::prelude::*;

use super::*;

const BLOCKS: u64 = 4096;

#[derive(Clone, Debug)]
enum Act {
    Write { slba: u64, blocks: u64, seed: u8, offset: u64 },
    Zero { slba: u64, blocks: u64 },
    Trim { slba: u64, blocks: u64 },
    Copy { from: u64, to: u64, blocks: u64 },
    Read { slba: u64, blocks: u64, offset: u64 },
    Compare { slba: u64, blocks: u64 },
    Flush,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let range = || (0..BLOCKS - 300, 1_u64..300);
    // Offsets of a dword, as PRP1 may have.
    let offset = || (0_u64..1024).prop_map(|dword| dword * 4);
    let act = prop_oneof![
        4 => (range(), any::<u8>(), offset()).prop_map(|((slba, blocks), seed, offset)| Act::Write { slba, blocks, seed, offset }),
        4 => (range(), offset()).prop_map(|((slba, blocks), offset)| Act::Read { slba, blocks, offset }),
        1 => range().prop_map(|(slba, blocks)| Act::Zero { slba, blocks }),
        1 => range().prop_map(|(slba, blocks)| Act::Trim { slba, blocks }),
        1 => (range(), 0..BLOCKS - 300).prop_map(|((from, blocks), to)| Act::Copy { from, to, blocks }),
        1 => range().prop_map(|(slba, blocks)| Act::Compare { slba, blocks }),
        1 => Just(Act::Flush),
    ];
    proptest::collection::vec(act, 1..40)
}

struct Disk {
    guest: FakeGuest,
    model: Vec<u8>,
    buffer: u64,
}

impl Disk {
    fn at(&mut self, slba: u64, blocks: u64) -> &mut [u8] {
        &mut self.model[(slba * 512) as usize..((slba + blocks) * 512) as usize]
    }

    fn with_buffer(&mut self, opcode: NvmOpcode, slba: u64, blocks: u64, offset: u64) -> (Sqe, u64, usize) {
        let (addr, len) = (self.buffer + offset, blocks * 512);
        let mut sqe = command(opcode, slba, blocks);
        sqe.dptr = self.guest.prps(addr, len);
        (sqe, addr, len as usize)
    }

    fn act(&mut self, act: &Act) {
        match *act {
            Act::Write { slba, blocks, seed, offset } => {
                let (sqe, addr, len) = self.with_buffer(NvmOpcode::WRITE, slba, blocks, offset);
                let data = pattern(len, seed);
                self.guest.write(addr, &data);
                succeeds(self.guest.command(1, sqe));
                self.at(slba, blocks).copy_from_slice(&data);
            }
            Act::Read { slba, blocks, offset } => {
                let (sqe, addr, len) = self.with_buffer(NvmOpcode::READ, slba, blocks, offset);
                succeeds(self.guest.command(1, sqe));
                let seen = self.guest.read(addr, len);
                assert!(seen == self.at(slba, blocks), "{act:?}");
            }
            Act::Compare { slba, blocks } => {
                let (sqe, addr, _) = self.with_buffer(NvmOpcode::COMPARE, slba, blocks, 0);
                let mut data = self.at(slba, blocks).to_vec();
                self.guest.write(addr, &data);
                succeeds(self.guest.command(1, sqe));
                let middle = data.len() / 2;
                data[middle] ^= 0x80;
                self.guest.write(addr, &data);
                fails(self.guest.command(1, sqe), Status::COMPARE_FAILURE);
            }
            Act::Zero { slba, blocks } => {
                succeeds(self.guest.command(1, command(NvmOpcode::WRITE_ZEROES, slba, blocks)));
                self.at(slba, blocks).fill(0);
            }
            Act::Trim { slba, blocks } => {
                let range = DatasetRange { context_attributes: 0, length: blocks as u32, slba };
                let mut sqe = sqe(NvmOpcode::DATASET_MANAGEMENT.0, 1);
                sqe.cdw11 = 4;
                succeeds(self.guest.command_writing(1, sqe, range.as_bytes()));
                self.at(slba, blocks).fill(0);
            }
            Act::Copy { from, to, blocks } => {
                let range = CopyRange::new(NamespaceId::NONE, from, (blocks - 1) as u16);
                let mut sqe = sqe(NvmOpcode::COPY.0, 1);
                sqe.set_cdw10_11(to);
                let cqe = self.guest.command_writing(1, sqe, range.as_bytes());
                if from < to + blocks && to < from + blocks {
                    return fails(cqe, Status::OVERLAPPING_IO_RANGE);
                }
                succeeds(cqe);
                let data = self.at(from, blocks).to_vec();
                self.at(to, blocks).copy_from_slice(&data);
            }
            Act::Flush => succeeds(self.guest.command(1, sqe(NvmOpcode::FLUSH.0, 1))),
        }
    }
}

fn run(mut guest: FakeGuest, acts: &[Act]) {
    let buffer = guest.alloc_pages(64);
    let mut disk = Disk { guest, model: vec![0; (BLOCKS * 512) as usize], buffer };
    for act in acts {
        disk.act(act);
    }
    for slba in (0..BLOCKS).step_by(256) {
        disk.act(&Act::Read { slba, blocks: 256, offset: 0 });
    }
    assert_eq!((in_flight(&disk.guest), disk.guest.controller.in_flight), (0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn a_disk_in_memory_is_the_model(acts in acts()) {
        run(guest(BlockSize::B512), &acts);
    }

    #[test]
    fn a_disk_that_answers_late_is_the_model(acts in acts()) {
        let (guest, fault) = faulty_guest();
        fault.hold_writes();
        run(guest, &acts);
    }
}
