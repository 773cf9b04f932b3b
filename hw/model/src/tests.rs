use millrace_functions::Config;
use millrace_nvme_spec::{
    command::{Cqe, DataPointer, NamespaceId, Sqe},
    status::Status,
};
use zerocopy::{FromZeros, IntoBytes};

use crate::{
    Engine, Shape, SoftEngine,
    map::{self, Coalescing, Fault},
    testing::{BASE, QUEUES, Rig, SIZE},
};

/// Each engine that there is, with so many guests and disks.
fn each(functions: u8, ssds: u8, test: impl Fn(Rig)) {
    let shape = Shape::new(1, ssds);
    let mut engines: Vec<Box<dyn Engine>> = vec![Box::new(SoftEngine::new(shape))];
    #[cfg(feature = "sim")]
    engines.push(Box::new(crate::SimEngine::new(shape).expect("a configuration that was built")));
    engines.drain(..).for_each(|engine| test(Rig::new(engine, functions)));
}

fn sqe(opcode: u8, cid: u16, lba: u64, blocks: u32, prp1: u64, prp2: u64) -> Sqe {
    let mut sqe = Sqe::new_zeroed();
    (sqe.opcode, sqe.nsid, sqe.cid.0) = (opcode, NamespaceId(1), cid);
    sqe.dptr = DataPointer::prps(prp1, prp2);
    sqe.set_cdw10_11(lba);
    sqe.cdw12 = blocks - 1;
    sqe
}

/// One command on a queue of its own function: its status.
fn status_of(rig: &mut Rig, sqe: &Sqe) -> Status {
    rig.push(0, 1, sqe);
    rig.ring(0, 1);
    let answers = rig.answers(0, 1);
    assert_eq!(answers.len(), 1, "one command, one answer");
    assert_eq!(answers[0].cid, sqe.cid);
    answers[0].status()
}

#[test]
fn data_come_back_by_pages_and_lists_and_from_all_queues() {
    each(2, 1, |mut rig| {
        for function in 0..2 {
            (1..=4).for_each(|qid| rig.queue(function, qid, 64));
        }
        for (round, pages) in [1_u64, 2, 3, 17, 32].into_iter().enumerate() {
            for function in 0..2 {
                for qid in 1..=4_u16 {
                    let (from, to, list) = (0x20_0000, 0x28_0000, 0x30_0000);
                    let fill = (round as u8 + 1) * 16 + function * 4 + qid as u8;
                    let len = (pages * 4096) as usize;
                    rig.memory(function, from, len).fill(fill);
                    rig.memory(function, to, len).fill(0);
                    let second = |rig: &mut Rig, base: u64, list: u64| match pages {
                        1 => 0,
                        2 => base + 4096,
                        _ => {
                            let entries: Vec<u64> = (1..pages).map(|page| base + page * 4096).collect();
                            rig.memory(function, list, entries.len() * 8).copy_from_slice(entries.as_bytes());
                            list
                        }
                    };
                    let lba = u64::from(qid) * 256 + u64::from(function) * 2048;
                    let prp2 = second(&mut rig, from, list);
                    let write = sqe(1, 7, lba, pages as u32 * 8, from, prp2);
                    rig.push(function, qid, &write);
                    rig.ring(function, qid);
                    assert!(rig.answers(function, qid)[0].status().is_success());
                    let prp2 = second(&mut rig, to, list);
                    rig.push(function, qid, &sqe(2, 8, lba, pages as u32 * 8, to, prp2));
                    rig.ring(function, qid);
                    assert!(rig.answers(function, qid)[0].status().is_success());
                    assert!(rig.memory(function, to, len).iter().all(|byte| *byte == fill));
                }
            }
        }
        assert_eq!(rig.read(map::IN_FLIGHT), 0);
        assert_eq!(rig.read(map::TAKEN), 5 * 2 * 4 * 2);
        assert_eq!(rig.read(map::COMPLETED), rig.read(map::TAKEN));
        assert_eq!(rig.world.interrupts.len() as u64, rig.read(map::INTERRUPTS));
        assert_eq!(rig.world.lost, 0);
    });
}

#[test]
fn the_disk_sees_slots_host_addresses_and_its_own_blocks() {
    each(2, 1, |mut rig| {
        rig.configure(1, 1, 100, &[(0, Config::SHARE), (2, 5000)]);
        rig.queue(1, 2, 4);
        rig.push(1, 2, &sqe(2, 0xabcd, 99, 1, 0x20_1000, 0));
        rig.ring(1, 2);
        let answers = rig.answers(1, 2);
        assert_eq!((answers[0].cid.0, answers[0].sqid.0, answers[0].sqhd), (0xabcd, 2, 1));
        let seen = rig.disks[0].commands[0];
        assert!(seen.cid.0 < 64, "a slot");
        assert_eq!(seen.dptr.prp1, BASE + SIZE + 0x20_1000);
        assert_eq!(seen.cdw10_11(), 5099);
        assert_eq!(rig.world.interrupts, [(1, 2)]);
    });
}

#[test]
fn bad_commands_cost_their_sender_a_status_and_reach_no_disk() {
    each(1, 1, |mut rig| {
        rig.queue(0, 1, 8);
        let page = 0x20_0000;
        let with = |mut sqe: Sqe, change: &dyn Fn(&mut Sqe)| {
            change(&mut sqe);
            sqe
        };
        let read = |lba, blocks, prp1, prp2| sqe(2, 1, lba, blocks, prp1, prp2);
        // A list whose second entry lies within a page, and one that leads out of memory.
        rig.memory(0, 0x30_0000, 16).copy_from_slice([page, page + 8].as_bytes());
        rig.memory(0, 0x30_1000, 16).copy_from_slice([page, SIZE].as_bytes());
        let cases = [
            (with(read(0, 1, page, 0), &|sqe| sqe.opcode = 0x7f), Status::INVALID_OPCODE),
            (with(read(0, 1, page, 0), &|sqe| sqe.flags = 1.into()), Status::INVALID_FIELD),
            (with(read(0, 1, page, 0), &|sqe| sqe.flags = 0x40.into()), Status::INVALID_FIELD),
            (with(read(0, 1, page, 0), &|sqe| sqe.nsid = NamespaceId(2)), Status::INVALID_NAMESPACE_OR_FORMAT),
            (with(read(0, 1, page, 0), &|sqe| sqe.nsid = NamespaceId(0)), Status::INVALID_NAMESPACE_OR_FORMAT),
            (with(read(0, 1, page, 0), &|sqe| sqe.nsid = NamespaceId::BROADCAST), Status::INVALID_NAMESPACE_OR_FORMAT),
            (read(4096, 1, page, 0), Status::LBA_OUT_OF_RANGE),
            (read(4095, 2, page, 0), Status::LBA_OUT_OF_RANGE),
            (read(u64::MAX, 2, page, 0), Status::LBA_OUT_OF_RANGE),
            (read(0, 257, page, 0x30_0000), Status::INVALID_FIELD),
            (read(0, 1, page + 2, 0), Status::PRP_OFFSET_INVALID),
            (read(0, 16, page, page + 4), Status::PRP_OFFSET_INVALID),
            (read(0, 24, page, 0x30_0004), Status::PRP_OFFSET_INVALID),
            (read(0, 24, page, 0x30_0000), Status::PRP_OFFSET_INVALID),
            (read(0, 24, page, 0x30_1000), Status::DATA_TRANSFER_ERROR),
            (read(0, 24, page, SIZE), Status::DATA_TRANSFER_ERROR),
            (read(0, 1, SIZE, 0), Status::DATA_TRANSFER_ERROR),
            (read(0, 1, u64::MAX - 3, 0), Status::DATA_TRANSFER_ERROR),
            (read(0, 16, page, SIZE), Status::DATA_TRANSFER_ERROR),
        ];
        for (case, (sqe, expected)) in cases.iter().enumerate() {
            assert_eq!(status_of(&mut rig, sqe).code(), *expected, "case {case}: {sqe:?}");
        }
        assert!(rig.disks[0].commands.is_empty());
        assert!(status_of(&mut rig, &with(sqe(0, 1, 0, 1, 0, 0), &|sqe| sqe.nsid = NamespaceId::BROADCAST)).is_success());
        assert!(status_of(&mut rig, &read(4095, 1, page, 0)).is_success(), "it still works");
    });
}

#[test]
fn what_must_not_be_written_is_not() {
    each(1, 1, |mut rig| {
        rig.queue(0, 1, 8);
        rig.configure(0, 1, 4096, &[(0, Config::READ_ONLY)]);
        let read_only = Status::from_bits(millrace_functions::status::READ_ONLY);
        for opcode in [1, 8] {
            assert_eq!(status_of(&mut rig, &sqe(opcode, 1, 0, 1, 0x20_0000, 0)), read_only);
        }
        // A page that the guest's owner does not let us write: data from the disk have no way there, data to it do.
        rig.configure(0, 1, 4096, &[]);
        rig.write(map::page(512, 0, 1), map::PageRow::at(BASE + map::PAGE, false).into_bits());
        assert_eq!(status_of(&mut rig, &sqe(2, 1, 0, 1, 0x20_0000, 0)).code(), Status::DATA_TRANSFER_ERROR);
        assert!(status_of(&mut rig, &sqe(1, 1, 0, 1, 0x20_0000, 0)).is_success());
    });
}

#[test]
fn refused_doorbells_stop_their_queue_and_are_told_once() {
    each(1, 1, |mut rig| {
        for (qid, offset, value, code) in
            [(1, 8, 8, Fault::SQ_TAIL), (2, 16, 0x1_0000, Fault::SQ_TAIL), (3, 28, 1, Fault::CQ_HEAD)]
        {
            rig.queue(0, qid, 8);
            rig.doorbell(0, offset, value);
            rig.settle();
            assert_eq!(rig.engine.faults(), 1);
            let fault = Fault::from_bits(rig.read(map::FAULT));
            assert_eq!((fault.valid(), fault.queue(), fault.code()), (true, qid - 1, code));
            assert!(!Fault::from_bits(rig.read(map::FAULT)).valid());
            assert!(rig.status(0, qid).stopped());
            rig.push(0, qid, &sqe(0, 1, 0, 1, 0, 0));
            rig.ring(0, qid);
            assert!(rig.answers(0, qid).is_empty(), "a stopped queue takes nothing");
            rig.queue(0, qid, 8);
            rig.push(0, qid, &sqe(0, 1, 0, 1, 0, 0));
            rig.ring(0, qid);
            assert_eq!(rig.answers(0, qid).len(), 1, "enabling begins anew");
        }
        for (function, offset) in [(0, 0), (0, 4), (0, 40), (0, 10), (1, 8), (200, 8)] {
            rig.doorbell(function, offset, 1);
        }
        assert_eq!(rig.read(map::REFUSED), 6);
    });
}

#[test]
fn a_queue_that_cannot_be_read_stops() {
    each(1, 1, |mut rig| {
        rig.queue(0, 1, 8);
        rig.write(map::queue(0, 0), map::QueueBase::new().with_enabled(true).with_page(1).into_bits());
        rig.push(0, 1, &sqe(0, 1, 0, 1, 0, 0));
        rig.ring(0, 1);
        rig.settle();
        let fault = Fault::from_bits(rig.read(map::FAULT));
        assert_eq!((fault.valid(), fault.queue(), fault.code()), (true, 0, Fault::SQ_READ));
        assert_eq!((rig.status(0, 1).in_flight(), rig.read(map::IN_FLIGHT)), (0, 0));
    });
}

#[test]
fn no_completion_is_posted_over_one_that_was_not_read() {
    each(1, 1, |mut rig| {
        rig.queue(0, 1, 4);
        // As many as the queue holds; the fourth's completion has no place before the guest has read one.
        for round in 0..50_u16 {
            for cid in 0..3 {
                rig.push(0, 1, &sqe(0, round * 3 + cid, 0, 1, 0, 0));
            }
            rig.ring(0, 1);
            rig.settle();
            assert_eq!(rig.status(0, 1).in_flight(), 0);
            let cids: Vec<u16> = rig.answers(0, 1).iter().map(|cqe| cqe.cid.0).collect();
            assert_eq!(cids, [round * 3, round * 3 + 1, round * 3 + 2]);
        }
        for cid in 0..3 {
            rig.push(0, 1, &sqe(0, cid, 0, 1, 0, 0));
        }
        rig.ring(0, 1);
        rig.settle();
        let full = rig.status(0, 1);
        (3..6).for_each(|cid| rig.push(0, 1, &sqe(0, cid, 0, 1, 0, 0)));
        rig.ring(0, 1);
        rig.settle();
        assert_eq!((rig.status(0, 1).cq_tail(), rig.status(0, 1).sq_head()), (full.cq_tail(), full.sq_head()));
        assert_eq!(rig.answers(0, 1).len(), 6);
    });
}

#[test]
fn a_queue_that_is_disabled_ends_what_it_has_begun() {
    each(1, 1, |mut rig| {
        rig.queue(0, 1, 64);
        (0..40).for_each(|cid| rig.push(0, 1, &sqe(2, cid, 0, 1, 0x20_0000, 0)));
        rig.ring(0, 1);
        rig.engine.run(20_000, &mut rig.world);
        assert_eq!(rig.status(0, 1).in_flight(), 40, "they wait for the disk");
        rig.write(map::queue(0, 0), 0);
        rig.settle();
        assert_eq!(rig.status(0, 1).in_flight(), 0);
        assert_eq!(rig.answers(0, 1).len(), 40);
    });
}

#[test]
fn functions_take_turns_by_their_weights() {
    each(3, 1, |mut rig| {
        for function in 0..3 {
            rig.queue(function, 1, 64);
            rig.write(map::weight(function), if function == 2 { 4 } else { 1 });
            (0..24).for_each(|cid| rig.push(function, 1, &sqe(2, cid, 0, 1, 0x20_0000, 0)));
        }
        (0..3).for_each(|function| rig.ring(function, 1));
        rig.settle();
        let order: Vec<u64> = rig.disks[0].commands.iter().map(|sqe| (sqe.dptr.prp1 - BASE) / SIZE).collect();
        assert_eq!(order.len(), 72);
        let first: Vec<usize> = (0..3).map(|function| order[..30].iter().filter(|of| **of == function).count()).collect();
        // Two functions of weight 1 and one of weight 4; what is fetched ahead blurs it.
        assert!(first[2] >= 15 && first[0] >= 3 && first[1] >= 3, "{first:?}");
    });
}

#[test]
fn replicated_writes_go_to_all_disks_and_the_first_failure_counts() {
    each(1, 2, |mut rig| {
        rig.configure(0, 0b11, 4096, &[(0, Config::REPLICATE)]);
        rig.queue(0, 1, 8);
        rig.memory(0, 0x20_0000, 512).fill(9);
        assert!(status_of(&mut rig, &sqe(1, 1, 3, 1, 0x20_0000, 0)).is_success());
        assert_eq!(rig.disks.iter().map(|disk| disk.commands.len()).collect::<Vec<_>>(), [1, 1]);
        assert_eq!(rig.disks[0].blocks, rig.disks[1].blocks);
        for _ in 0..4 {
            assert!(status_of(&mut rig, &sqe(2, 1, 3, 1, 0x20_0000, 0)).is_success());
        }
        assert_eq!(rig.disks.iter().map(|disk| disk.commands.len()).collect::<Vec<_>>(), [3, 3], "reads in turn");
        rig.disks[1].failures.push_back(Status::WRITE_FAULT.into_bits());
        assert_eq!(status_of(&mut rig, &sqe(1, 1, 3, 1, 0x20_0000, 0)), Status::WRITE_FAULT);
    });
}

#[test]
fn caps_hold_commands_until_their_time() {
    each(1, 1, |mut rig| {
        // One command in 100 units, none ahead.
        rig.configure(0, 1, 4096, &[(0, Config::THROTTLE), (3, 100 << millrace_functions::throttle::FRACTION)]);
        rig.queue(0, 1, 64);
        (0..20).for_each(|cid| rig.push(0, 1, &sqe(2, cid, 0, 1, 0x20_0000, 0)));
        let before = rig.engine.now();
        rig.ring(0, 1);
        assert_eq!(rig.answers(0, 1).len(), 20);
        let units = (rig.engine.now() - before) / map::CYCLES_PER_UNIT;
        assert!((19 * 100..=21 * 102).contains(&units), "20 commands took {units} units");
    });
}

/// What a guest changes by itself (its write cache) is a write of word 0: that must not give it another burst.
#[test]
fn caps_are_forgotten_when_their_function_is_turned_off_and_not_before() {
    each(1, 1, |mut rig| {
        let cap = [(0, Config::THROTTLE), (3, 100 << millrace_functions::throttle::FRACTION)];
        rig.configure(0, 1, 4096, &cap);
        rig.queue(0, 1, 64);
        (0..20).for_each(|cid| rig.push(0, 1, &sqe(2, cid, 0, 1, 0x20_0000, 0)));
        let before = rig.engine.now();
        rig.ring(0, 1);
        for _ in 0..5 {
            // Between two that may go.
            rig.engine.run(350 * map::CYCLES_PER_UNIT, &mut rig.world);
            rig.configure(0, 1, 4096, &cap);
        }
        assert!(rig.answers(0, 1).iter().all(|cqe| cqe.status().is_success()));
        let units = (rig.engine.now() - before) / map::CYCLES_PER_UNIT;
        assert!((19 * 100..=21 * 102).contains(&units), "20 commands took {units} units");
        // Those that are held when it is turned off do not wait for their time.
        (20..30).for_each(|cid| rig.push(0, 1, &sqe(2, cid, 0, 1, 0x20_0000, 0)));
        rig.ring(0, 1);
        rig.engine.run(50 * map::CYCLES_PER_UNIT, &mut rig.world);
        rig.write(map::configuration(0, 0), 0);
        let before = rig.engine.now();
        let answers = rig.answers(0, 1);
        let refused = answers.iter().filter(|cqe| cqe.status().code() == Status::INVALID_NAMESPACE_OR_FORMAT).count();
        assert!(answers.len() == 10 && refused >= 8, "{refused} of {}", answers.len());
        assert!((rig.engine.now() - before) / map::CYCLES_PER_UNIT < 100, "they waited all the same");
    });
}

/// So a control processor calls commands off. It is no way to another burst.
#[test]
fn commands_of_a_function_without_a_disk_end_and_its_caps_stay() {
    each(1, 1, |mut rig| {
        // One command in 100 units, five ahead.
        let [time, burst]: [u64; 2] = [100, 500].map(|units| units << millrace_functions::throttle::FRACTION);
        let cap = [(0, Config::THROTTLE), (3, burst << 32 | time)];
        rig.configure(0, 1, 4096, &cap);
        rig.queue(0, 1, 64);
        (0..20).for_each(|cid| rig.push(0, 1, &sqe(2, cid, 0, 1, 0x20_0000, 0)));
        rig.ring(0, 1);
        rig.engine.run(50 * map::CYCLES_PER_UNIT, &mut rig.world);
        let before = rig.engine.now();
        rig.configure(0, 0, 4096, &cap);
        let answers = rig.answers(0, 1);
        let (gone, off): (Vec<_>, Vec<_>) = answers.iter().map(Cqe::status).partition(|status| status.is_success());
        assert_eq!((gone.len(), off.len()), (6, 14), "those that were not held went");
        assert!(off.iter().all(|status| *status == Status::INTERNAL_ERROR), "and the others may be tried again");
        let units = (rig.engine.now() - before) / map::CYCLES_PER_UNIT;
        assert!(units < 200, "the first that was held ends when its time comes, and the others with it: {units} units");
        rig.configure(0, 1, 4096, &cap);
        (20..26).for_each(|cid| rig.push(0, 1, &sqe(2, cid, 0, 1, 0x20_0000, 0)));
        rig.ring(0, 1);
        let answers = rig.answers(0, 1);
        assert!(answers.len() == 6 && answers.iter().all(|cqe| cqe.status().is_success()));
        let units = (rig.engine.now() - before) / map::CYCLES_PER_UNIT;
        assert!(units >= 400, "six commands in {units} units");
    });
}

/// Entries that are posted without a disk: each is one for the interrupts.
fn post(rig: &mut Rig, qid: u16, cid: u16) {
    rig.push(0, qid, &sqe(0x7f, cid, 0, 1, 0, 0));
    rig.ring(0, qid);
    rig.engine.run(5000, &mut rig.world);
    assert_eq!(rig.status(0, qid).in_flight(), 0, "it was posted");
}

/// Two entries make an interrupt, and time nearly never.
fn coalesce_pairs(rig: &mut Rig) {
    let coalescing = Coalescing::new().with_on(true).with_threshold_z(1).with_time(200);
    rig.write(map::interrupts(0), coalescing.into_bits());
}

#[test]
fn entries_are_counted_by_queue_also_where_queues_share_a_vector() {
    each(1, 1, |mut rig| {
        rig.queue(0, 1, 64);
        rig.queue(0, 2, 64);
        // Once more, with the first one's vector.
        let sizes = map::QueueSizes::new().with_sq(64).with_cq(64).with_interrupts(true).with_vector(1);
        let base = map::QueueBase::new().with_enabled(true).with_page((BASE + QUEUES) / 4096 + 4);
        rig.write(map::queue(1, 0), 0);
        rig.write(map::queue(1, 1), sizes.into_bits());
        rig.write(map::queue(1, 0), base.into_bits());
        coalesce_pairs(&mut rig);
        post(&mut rig, 1, 0);
        post(&mut rig, 2, 0);
        assert!(rig.world.interrupts.is_empty(), "neither has two");
        post(&mut rig, 1, 1);
        assert_eq!(rig.world.interrupts, [(0, 1)]);
        post(&mut rig, 2, 1);
        assert_eq!(rig.world.interrupts, [(0, 1), (0, 1)]);
    });
}

#[test]
fn a_new_queue_has_not_the_count_of_the_one_before() {
    each(1, 1, |mut rig| {
        coalesce_pairs(&mut rig);
        for _ in 0..2 {
            rig.queue(0, 1, 64);
            post(&mut rig, 1, 0);
            assert!(rig.world.interrupts.is_empty(), "it has one entry");
            rig.write(map::queue(0, 0), 0);
        }
    });
}

#[test]
fn interrupts_wait_for_company_for_time_and_for_their_mask() {
    each(1, 1, |mut rig| {
        rig.queue(0, 1, 64);
        let coalescing = Coalescing::new().with_on(true).with_threshold_z(3).with_time(2);
        rig.write(map::interrupts(0), coalescing.into_bits());
        (0..8).for_each(|cid| rig.push(0, 1, &sqe(0, cid, 0, 1, 0, 0)));
        rig.ring(0, 1);
        rig.settle();
        assert!((1..=2).contains(&rig.world.interrupts.len()), "eight entries in groups of four or more");
        let before = (rig.world.interrupts.len(), rig.engine.now());
        rig.answers(0, 1);
        rig.push(0, 1, &sqe(0, 8, 0, 1, 0, 0));
        rig.ring(0, 1);
        rig.settle();
        assert_eq!(rig.world.interrupts.len(), before.0 + 1);
        // The hardware looks at the time in whole units: up to one of them is over already.
        assert!(rig.engine.now() - before.1 >= 256 * 64, "one alone waits for the time");
        rig.write(map::interrupts(0), Coalescing::new().with_mask(0b10).into_bits());
        rig.push(0, 1, &sqe(0, 9, 0, 1, 0, 0));
        rig.ring(0, 1);
        rig.settle();
        assert_eq!(rig.world.interrupts.len(), before.0 + 1, "masked");
        rig.write(map::interrupts(0), 0);
        rig.settle();
        assert_eq!(rig.world.interrupts.len(), before.0 + 2, "and comes when unmasked");
    });
}

#[test]
fn what_disks_say_is_not_believed() {
    each(1, 1, |mut rig| {
        rig.queue(0, 1, 8);
        // Completions of slots that do not exist.
        for (at, cid) in [(0_u32, 64_u16), (1, 0xffff)] {
            let mut entry = [0; 16];
            entry[12..14].copy_from_slice(&cid.to_le_bytes());
            entry[14] = 1;
            rig.engine.write_chip(0, map::chip::COMPLETION + at * 16, &entry, &mut rig.world);
        }
        rig.engine.run(1000, &mut rig.world);
        assert_eq!(rig.read(map::IN_FLIGHT), 0);
        assert_eq!(rig.memory(0, QUEUES + 8192 + 4096, 16), [0; 16], "no guest hears of them");
    });
}
