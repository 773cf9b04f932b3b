//! Mistakes, each by its status.

use millrace_nvme_spec::command::{CommandId, DataPointer, NamespaceId};

use super::*;

#[test]
fn namespaces_that_are_not_there() {
    let mut guest = guest(BlockSize::B512);
    let nn = guest.controller.namespaces.largest();
    for opcode in [NvmOpcode::READ, NvmOpcode::WRITE, NvmOpcode::COMPARE, NvmOpcode::VERIFY, NvmOpcode::COPY] {
        for (nsid, status) in [
            (0, Status::INVALID_NAMESPACE_OR_FORMAT),
            (nn + 1, Status::INVALID_NAMESPACE_OR_FORMAT),
            (u32::MAX - 1, Status::INVALID_NAMESPACE_OR_FORMAT),
            (2, Status::INVALID_FIELD),
            (nn, Status::INVALID_FIELD),
            (u32::MAX, Status::INVALID_FIELD),
        ] {
            let mut sqe = command(opcode, 0, 1);
            sqe.nsid = NamespaceId(nsid);
            fails(guest.command(1, sqe), status);
        }
    }
    fails(guest.command(1, sqe(NvmOpcode::FLUSH.0, 0)), Status::INVALID_NAMESPACE_OR_FORMAT);
}

#[test]
fn ranges_that_overflow_or_pass_the_end() {
    let mut guest = guest(BlockSize::B512);
    let end = SIZE / 512;
    let opcodes = [
        NvmOpcode::READ,
        NvmOpcode::WRITE,
        NvmOpcode::COMPARE,
        NvmOpcode::WRITE_ZEROES,
        NvmOpcode::VERIFY,
        NvmOpcode::WRITE_UNCORRECTABLE,
    ];
    for opcode in opcodes {
        for (slba, blocks) in
            [(end, 1), (end - 1, 2), (u64::MAX, 1), (u64::MAX, 65536), (u64::MAX - 65535, 65536), (0, 65536)]
        {
            fails(guest.command(1, command(opcode, slba, blocks)), Status::LBA_OUT_OF_RANGE);
        }
    }
}

#[test]
fn transfers_beyond_mdts() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, SIZE, BlockSize::B512);
    guest.make_queues(1, 64);
    let blocks = guest.controller.config.max_transfer() / 512;
    for opcode in [NvmOpcode::READ, NvmOpcode::WRITE, NvmOpcode::COMPARE] {
        fails(guest.command(1, command(opcode, 0, blocks + 1)), Status::INVALID_FIELD);
    }
    let data = vec![1; (blocks * 512) as usize];
    succeeds(write(&mut guest, 0, &data));
}

#[test]
fn reserved_opcodes_and_fields() {
    let mut guest = guest(BlockSize::B512);
    for opcode in [0x03, 0x06, 0x0a, 0x12, 0x18, 0x1d, 0x21, 0x79, 0x7d, 0x80, 0xff] {
        fails(guest.command(1, sqe(opcode, 1)), Status::INVALID_OPCODE);
        // Even where nothing else is right.
        fails(guest.command(1, sqe(opcode, 0)), Status::INVALID_OPCODE);
    }
    let mut sqe = command(NvmOpcode::READ, 0, 1);
    sqe.flags = CommandFlags::new().with_psdt(Psdt(3));
    fails(guest.command(1, sqe), Status::INVALID_FIELD);
    sqe.flags = CommandFlags::new().with_fuse(Fuse(3));
    fails(guest.command(1, sqe), Status::INVALID_FIELD);
    // Protection information means nothing without metadata.
    let mut sqe = command(NvmOpcode::READ, 0, 1);
    sqe.cdw12 |= 0xf << 26;
    let (cqe, _) = guest.command_reading(1, sqe, 512);
    succeeds(cqe);
}

/// Though its descriptor is one data block of the right length.
#[test]
fn a_reserved_kind_of_data_pointer_is_refused_alone_and_among_others() {
    let mut guest = guest(BlockSize::B512);
    let mut good = command(NvmOpcode::READ, 0, 1);
    good.flags = CommandFlags::new().with_psdt(Psdt::SGL_MPTR_CONTIGUOUS);
    good.dptr = SglDescriptor::data_block(guest.alloc_pages(1), 512).into();
    let mut bad = good;
    bad.flags = CommandFlags::new().with_psdt(Psdt(3));
    fails(guest.command(1, bad), Status::INVALID_FIELD);
    let cids = [good, good, bad, good].map(|sqe| guest.push(1, sqe));
    guest.ring(1);
    for (at, cid) in cids.into_iter().enumerate() {
        let cqe = guest.wait_for(1, cid);
        if at == 2 { fails(cqe, Status::INVALID_FIELD) } else { succeeds(cqe) }
    }
}

#[test]
fn data_pointers_to_nowhere() {
    let mut guest = guest(BlockSize::B512);
    for (prp1, prp2, blocks, status) in [
        (0, 0, 1, Status::DATA_TRANSFER_ERROR),
        (MEMORY_BASE + MEMORY_SIZE, 0, 1, Status::DATA_TRANSFER_ERROR),
        (MEMORY_BASE + MEMORY_SIZE - PAGE, MEMORY_BASE + MEMORY_SIZE, 16, Status::DATA_TRANSFER_ERROR),
        (MEMORY_BASE, 0, 32, Status::DATA_TRANSFER_ERROR),
        (MEMORY_BASE + 1, 0, 1, Status::PRP_OFFSET_INVALID),
        (MEMORY_BASE, MEMORY_BASE + 512, 16, Status::PRP_OFFSET_INVALID),
        (MEMORY_BASE, MEMORY_BASE + 4, 32, Status::PRP_OFFSET_INVALID),
    ] {
        for opcode in [NvmOpcode::READ, NvmOpcode::WRITE] {
            let mut sqe = command(opcode, 0, blocks);
            sqe.dptr = DataPointer::prps(prp1, prp2);
            fails(guest.command(1, sqe), status);
        }
    }
}

#[test]
fn namespaces_that_may_not_be_written() {
    let mut guest = FakeGuest::boot();
    let volume = MemoryVolume::create("volume", SIZE, BlockSize::B512).expect("a volume");
    let namespace = Namespace::new(volume, super::super::super::fixture::identity(1), false);
    let allocated = Allocated { namespace, read_only: true, by_guest: false };
    guest.controller.namespaces.allocate(1, allocated).expect("free");
    guest.controller.namespaces.attach(1).expect("attached");
    guest.make_queues(1, 64);
    let mut deallocate = sqe(NvmOpcode::DATASET_MANAGEMENT.0, 1);
    deallocate.cdw11 = 4;
    for sqe in [
        command(NvmOpcode::WRITE, 0, 1),
        command(NvmOpcode::WRITE_ZEROES, 0, 1),
        command(NvmOpcode::WRITE_UNCORRECTABLE, 0, 1),
        command(NvmOpcode::COPY, 0, 1),
        deallocate,
    ] {
        fails(guest.command(1, sqe), Status::NAMESPACE_WRITE_PROTECTED);
    }
    read(&mut guest, 0, 512);
    succeeds(guest.command(1, sqe(NvmOpcode::FLUSH.0, 1)));
}

#[test]
fn an_identifier_in_flight_is_not_taken_again() {
    let (mut guest, fault) = faulty_guest();
    fault.add(Rule::new(Kind::Read, When::Nth(1), Effect::Delay(Duration::from_millis(20))));
    let buffer = guest.alloc_pages(1);
    let mut sqe = command(NvmOpcode::READ, 0, 8);
    sqe.dptr = guest.prps(buffer, 4096);
    sqe.cid = CommandId(500);
    guest.push_as_is(1, &sqe);
    guest.push_as_is(1, &sqe);
    guest.ring(1);
    // The second is answered, the first goes on.
    fails(guest.wait(1), Status::CID_CONFLICT);
    guest.push_as_is(1, &sqe);
    guest.ring(1);
    fails(guest.wait(1), Status::CID_CONFLICT);
    succeeds(guest.wait(1));
    guest.push_as_is(1, &sqe);
    guest.ring(1);
    succeeds(guest.wait(1));
}

#[test]
fn a_shrunk_volume_refuses_what_it_lost() {
    let mut guest = guest(BlockSize::B512);
    let volume = Arc::clone(&guest.controller.namespaces.get(1).expect("attached").namespace);
    succeeds(write(&mut guest, 4096, &[1; 512]));
    volume.volume.resize(millrace_block::BlockCount(4096)).expect("resized");
    fails(write(&mut guest, 4096, &[1; 512]), Status::LBA_OUT_OF_RANGE);
    succeeds(write(&mut guest, 4095, &[1; 512]));
}
