//! Commands from a guest's queue to a volume and back.

mod bad;
mod called_off;
mod copies;
mod long;
mod oracle;
mod pairs;
mod protection;
mod reserve;
mod together;

use std::{rc::Rc, sync::Arc, time::Duration};

use millrace_backends::{
    MemoryVolume,
    fault::{Effect, FaultVolume, Kind, Rule, When},
};
use millrace_block::{BlockError, BlockSize};
use millrace_nvme_spec::{
    command::{CommandFlags, Cqe, Fuse, Psdt, Sqe},
    features::FeatureId,
    nvm::ReadWriteCdw12,
    opcode::{AdminOpcode, NvmOpcode},
    sgl::SglDescriptor,
    status::Status,
};
use zerocopy::IntoBytes;

use super::super::{
    Config,
    fixture::{FakeGuest, MEMORY_BASE, MEMORY_SIZE, PAGE, sqe, test_config},
    namespace::{Allocated, Namespace},
};
use super::task::InFlight;

/// Bytes of the volumes here.
const SIZE: u64 = 8 << 20;

/// A guest with queue pair 1 and a memory volume as namespace 1.
fn guest(block_size: BlockSize) -> FakeGuest {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, SIZE, block_size);
    guest.make_queues(1, 64);
    guest
}

/// A guest whose namespace 1 can be spoilt.
fn faulty_guest() -> (FakeGuest, Arc<FaultVolume>) {
    let mut guest = FakeGuest::boot();
    let volume = MemoryVolume::create("inner", SIZE, BlockSize::B512).expect("a volume");
    let fault = FaultVolume::new(volume, 1);
    guest.add_volume(1, Arc::clone(&fault) as Arc<dyn millrace_block::Volume>);
    guest.make_queues(1, 64);
    (guest, fault)
}

/// A command on `blocks` blocks of namespace 1 from `slba` on.
fn command(opcode: NvmOpcode, slba: u64, blocks: u64) -> Sqe {
    let mut command = sqe(opcode.0, 1);
    command.set_cdw10_11(slba);
    command.cdw12 = ReadWriteCdw12::new().with_nlb_z((blocks - 1) as u16).into_bits();
    command
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 9) as u8) ^ seed).collect()
}

#[track_caller]
fn succeeds(cqe: Cqe) {
    assert!(cqe.status().is_success(), "{}", cqe.status());
}

/// The status is exactly this one, and final.
#[track_caller]
fn fails(cqe: Cqe, status: Status) {
    // More of it is in the Error Information log.
    assert_eq!(cqe.status(), status.do_not_retry().with_more(true));
}

fn write(guest: &mut FakeGuest, slba: u64, data: &[u8]) -> Cqe {
    guest.command_writing(1, command(NvmOpcode::WRITE, slba, data.len() as u64 / 512), data)
}

fn read(guest: &mut FakeGuest, slba: u64, len: usize) -> Vec<u8> {
    let (cqe, data) = guest.command_reading(1, command(NvmOpcode::READ, slba, len as u64 / 512), len);
    succeeds(cqe);
    data
}

fn in_flight(guest: &FakeGuest) -> u32 {
    guest.controller.namespaces.get(1).expect("attached").in_flight.get()
}

/// Host Identifier of the guest.
fn set_host(guest: &mut FakeGuest, number: u8) {
    let features = &guest.controller.state.features;
    features.host_id_size.set(8);
    features.host_id[0].set(number);
    guest.controller.forget_rights();
}

#[test]
fn what_was_written_is_read_whatever_its_size_and_place() {
    for block_size in [BlockSize::B512, BlockSize::B4096] {
        let mut guest = guest(block_size);
        let block = u64::from(block_size.bytes());
        for (slba, blocks) in [(0, 1), (3, 8), (100, 255), (SIZE / block - 1, 1), (256, (1 << 20) / block)] {
            let data = pattern((blocks * block) as usize, slba as u8);
            succeeds(guest.command_writing(1, command(NvmOpcode::WRITE, slba, blocks), &data));
            let (cqe, seen) = guest.command_reading(1, command(NvmOpcode::READ, slba, blocks), data.len());
            succeeds(cqe);
            assert!(seen == data, "{blocks} blocks of {block} from {slba}");
            succeeds(guest.command_writing(1, command(NvmOpcode::COMPARE, slba, blocks), &data));
        }
    }
}

#[test]
fn compare_finds_one_wrong_byte() {
    let mut guest = guest(BlockSize::B512);
    let mut data = pattern(8192, 1);
    succeeds(write(&mut guest, 10, &data));
    data[8191] ^= 1;
    fails(guest.command_writing(1, command(NvmOpcode::COMPARE, 10, 16), &data), Status::COMPARE_FAILURE);
}

#[test]
fn scatter_gather_lists_move_data_too() {
    let mut guest = guest(BlockSize::B512);
    let data = pattern(2048, 7);
    let (buffer, list) = (guest.alloc_pages(2), guest.alloc_pages(1));
    guest.write(buffer + 3, &data[..1000]);
    guest.write(buffer + 5001, &data[1000..]);
    let blocks = [SglDescriptor::data_block(buffer + 3, 1000), SglDescriptor::data_block(buffer + 5001, 1048)];
    guest.write(list, blocks.as_bytes());
    let mut sqe = command(NvmOpcode::WRITE, 5, 4);
    sqe.flags = CommandFlags::new().with_psdt(Psdt::SGL_MPTR_CONTIGUOUS);
    sqe.dptr = SglDescriptor::last_segment(list, 32).into();
    succeeds(guest.command(1, sqe));
    assert_eq!(read(&mut guest, 5, 2048), data);
}

#[test]
fn flush_reaches_one_namespace_or_all() {
    let (mut guest, fault) = faulty_guest();
    guest.add_memory_volume(2, SIZE, BlockSize::B512);
    fault.hold_writes();
    let data = pattern(64 * 512, 3);
    for nsid in [1, u32::MAX] {
        succeeds(write(&mut guest, 9, &data));
        let flushes = fault.requests(Kind::Flush);
        succeeds(guest.command(1, sqe(NvmOpcode::FLUSH.0, nsid)));
        assert_eq!(fault.requests(Kind::Flush), flushes + 1);
        assert_eq!(fault.power_loss(), 0, "what was flushed stays");
    }
    fault.add(Rule::new(Kind::Flush, When::Always, Effect::Fail(BlockError::WriteFault { errno: 5 })));
    fails(guest.command(1, sqe(NvmOpcode::FLUSH.0, u32::MAX)), Status::WRITE_FAULT);
    fails(guest.command(1, sqe(NvmOpcode::FLUSH.0, 1)), Status::WRITE_FAULT);
    succeeds(guest.command(1, sqe(NvmOpcode::FLUSH.0, 2)));
}

#[test]
fn forced_unit_access_survives_a_power_loss_and_a_disabled_cache_forces_it() {
    let (mut guest, fault) = faulty_guest();
    fault.hold_writes();
    // Many blocks: a power loss spares one of them by chance, but not all.
    let data = pattern(64 * 512, 3);
    let mut forced = command(NvmOpcode::WRITE, 4, 64);
    forced.cdw12 |= ReadWriteCdw12::new().with_fua(true).into_bits();
    succeeds(guest.command_writing(1, forced, &data));
    assert_eq!(fault.power_loss(), 0);
    guest.controller.state.features.write_cache.set(0);
    succeeds(write(&mut guest, 68, &data));
    assert_eq!(fault.power_loss(), 0);
    assert_eq!(read(&mut guest, 4, 128 * 512), [data.clone(), data].concat());
    guest.controller.state.features.write_cache.set(1);
    succeeds(write(&mut guest, 68, &vec![9; 64 * 512]));
    assert_ne!(fault.power_loss(), 0, "a cached write may be lost");
}

#[test]
fn the_volumes_errors_have_their_statuses() {
    let cases = [
        (BlockError::ReadFault { errno: 5 }, Status::UNRECOVERED_READ_ERROR),
        (BlockError::WriteFault { errno: 5 }, Status::WRITE_FAULT),
        (BlockError::NoSpace, Status::CAPACITY_EXCEEDED),
        (BlockError::Memory, Status::DATA_TRANSFER_ERROR),
        (BlockError::OutOfRange, Status::LBA_OUT_OF_RANGE),
    ];
    let (mut guest, fault) = faulty_guest();
    for (error, status) in cases {
        fault.add(Rule::new(Kind::Write, When::Nth(1), Effect::Fail(error)));
        fails(write(&mut guest, 0, &[1; 512]), status);
        fault.clear();
    }
    assert_eq!(guest.controller.counters.media_errors, 2);
    fault.add(Rule::new(Kind::Read, When::Nth(1), Effect::Fail(BlockError::NotReady)));
    let (cqe, _) = guest.command_reading(1, command(NvmOpcode::READ, 0, 1), 512);
    assert_eq!(cqe.status(), Status::NAMESPACE_NOT_READY.with_more(true), "the guest may try again");
    assert_eq!(in_flight(&guest), 0);
}

#[test]
fn commands_that_wait_are_counted_until_they_end() {
    let (mut guest, fault) = faulty_guest();
    fault.add(Rule::new(Kind::Write, When::Always, Effect::Delay(Duration::from_millis(5))));
    let buffer = guest.alloc_pages(1);
    let cids: Vec<u16> = (0..4)
        .map(|i| {
            let mut sqe = command(NvmOpcode::WRITE, i * 8, 8);
            sqe.dptr = guest.prps(buffer, 4096);
            guest.submit(1, sqe)
        })
        .collect();
    guest.step_until("all to be taken", |guest| in_flight(guest) == 4);
    for cid in cids {
        succeeds(guest.wait_for(1, cid));
    }
    assert_eq!((in_flight(&guest), guest.controller.in_flight), (0, 0));
}

/// Otherwise a busy guest's would never end.
#[test]
fn turning_the_write_cache_off_waits_for_what_is_in_flight_then_and_for_nothing_later() {
    let mut guest = guest(BlockSize::B512);
    let attached = Rc::clone(guest.controller.namespaces.get(1).expect("attached"));
    for _ in 0..2 {
        let before = InFlight::new(&attached);
        let mut off = sqe(AdminOpcode::SET_FEATURES.0, 0);
        (off.cdw10, off.cdw11) = (FeatureId::VOLATILE_WRITE_CACHE.0.into(), 0);
        let off = guest.submit(0, off);
        guest.step_until("it to be taken", |guest| in_flight(guest) == 2);
        let later = InFlight::new(&attached);
        for _ in 0..100 {
            guest.step();
        }
        assert!(guest.poll(0).is_none(), "a command is in flight");
        drop(before);
        succeeds(guest.wait_for(0, off));
        drop(later);
        guest.controller.state.features.write_cache.set(1);
    }
    assert_eq!(in_flight(&guest), 0);
}

#[test]
fn counters_count() {
    let mut guest = guest(BlockSize::B512);
    succeeds(write(&mut guest, 0, &[1; 4096]));
    read(&mut guest, 0, 1024);
    succeeds(guest.command(1, sqe(NvmOpcode::FLUSH.0, 1)));
    let counters = guest.controller.counters;
    assert_eq!((counters.write_commands, counters.bytes_written), (1, 4096));
    assert_eq!((counters.read_commands, counters.bytes_read, counters.other_commands), (1, 1024, 1));
}

/// However much a guest asks for at once, nobody else on the shard waits long for its turn.
#[test]
fn a_turn_moves_so_much_and_no_more() {
    const MIB: u64 = 1 << 20;
    let cases = [
        (NvmOpcode::READ, 2, false),
        (NvmOpcode::WRITE, 2, false),
        // What goes the long way: by its kind, or because of its namespace.
        (NvmOpcode::COMPARE, 2, false),
        (NvmOpcode::READ, 2, true),
        (NvmOpcode::WRITE_ZEROES, 1, false),
    ];
    for (opcode, mib, marked) in cases {
        let mut guest = FakeGuest::new(Config { mdts: Config::MAX_MDTS, ..test_config() });
        guest.enable();
        guest.add_memory_volume(1, SIZE, BlockSize::B512);
        if marked {
            guest.make_queues(3, 4);
            succeeds(guest.command(3, command(NvmOpcode::WRITE_UNCORRECTABLE, SIZE / 512 - 1, 1)));
        }
        let buffer = guest.alloc_pages(mib * MIB / PAGE);
        let data = guest.prps(buffer, mib * MIB);
        for queue in 1..=2 {
            guest.make_queues(queue, 64);
            for _ in 0..63 {
                let mut sqe = command(opcode, 0, mib * MIB / 512);
                if opcode != NvmOpcode::WRITE_ZEROES {
                    sqe.dptr = data;
                }
                guest.push(queue, sqe);
            }
            guest.ring(queue);
        }
        let mut ended = [0; 2];
        let mut turns = 0;
        while ended.iter().sum::<u64>() < 2 * 63 {
            let asked = guest.submit(0, sqe(AdminOpcode::GET_LOG_PAGE.0, 0));
            guest.controller.turn(&mut guest.shard.context());
            turns += 1;
            assert!(guest.poll(0).is_some_and(|cqe| cqe.cid.0 == asked), "administration has every turn");
            let before: u64 = ended.iter().sum();
            for (queue, ended) in (1..).zip(&mut ended) {
                while let Some(cqe) = guest.poll(queue) {
                    succeeds(cqe);
                    *ended += 1;
                }
            }
            let moved = (ended.iter().sum::<u64>() - before) * mib;
            assert!((1..=16).contains(&moved), "{opcode:?} moved {moved} MiB in a turn");
            assert!(turns < 4 || ended.iter().all(|ended| *ended > 0), "each queue has its turn: {ended:?}");
        }
    }
}

/// The same of what moves nothing of a volume.
#[test]
fn a_turn_ends_with_log_pages_and_refusals_too() {
    const MOST: u64 = 2 << 20;
    // All there is of a queue, in one turn.
    fn turn(guest: &mut FakeGuest, queues: std::ops::RangeInclusive<u16>) -> usize {
        for queue in queues.clone() {
            guest.ring(queue);
        }
        guest.controller.turn(&mut guest.shard.context());
        queues.map(|queue| std::iter::from_fn(|| guest.poll(queue)).count()).sum()
    }
    let mut guest = FakeGuest::new(Config { mdts: Config::MAX_MDTS, queues: 16, vectors: 17, ..test_config() });
    guest.enable();
    guest.add_memory_volume(1, SIZE, BlockSize::B512);
    for queue in 1..=16 {
        guest.make_queues(queue, 64);
    }
    let buffer = guest.alloc_pages(MOST / PAGE);
    // Of the errors, by their number of dwords.
    let mut log = sqe(AdminOpcode::GET_LOG_PAGE.0, 0);
    (log.dptr, log.cdw10, log.cdw11) = (guest.prps(buffer, MOST), 0xffff << 16 | 1, 7);
    for _ in 0..16 {
        guest.push(0, log);
    }
    let logs = turn(&mut guest, 0..=0);
    assert_eq!(logs, 1, "log pages in a turn");
    guest.settle();
    for queue in 1..=16 {
        while guest.poll(queue).is_some() {}
        for _ in 0..32 {
            guest.push(queue, command(NvmOpcode::READ, SIZE / 512, 1));
        }
    }
    let refusals = turn(&mut guest, 1..=16);
    assert!((1..=256).contains(&refusals), "{refusals} refusals in a turn");
}
