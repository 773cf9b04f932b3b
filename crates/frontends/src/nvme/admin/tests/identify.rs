//! Identify.

use std::sync::Arc;

use millrace_backends::MemoryVolume;
use millrace_block::BlockSize;
use millrace_nvme_spec::{
    command::{ControllerId, NamespaceId, Sqe},
    identify::{
        Cns, ControllerList, IdentifyController, IdentifyControllerNvm, IdentifyNamespace, IdentifyNamespaceIndependent,
        IdentifyNamespaceNvm, IoCommandSets, NamespaceIdType, NamespaceList, namespace_descriptors,
    },
    opcode::AdminOpcode,
    registers::offset,
    status::Status,
};

use super::{
    super::super::{
        Namespace,
        fixture::{FakeGuest, identity},
        namespace::Allocated,
    },
    admin, boot_with_all, expect_reading, reading,
};

fn identify(cns: Cns, nsid: u32) -> Sqe {
    let mut sqe = admin(AdminOpcode::IDENTIFY, nsid);
    sqe.cdw10 = u32::from(cns.0);
    sqe
}

#[test]
fn the_controller_says_what_it_is() {
    let mut guest = FakeGuest::boot();
    let id: IdentifyController = reading(&mut guest, identify(Cns::CONTROLLER, 0));
    assert_eq!(&id.sn, b"MR-test             ");
    assert_eq!(&id.mn[..12], b"Millrace NVM");
    assert!(id.subnqn.starts_with(b"nqn.2026-11.dev.millrace:test\0"));
    assert_eq!(id.ver.into_bits(), guest.read32(offset::VS));
    assert_eq!((id.sqes.into_bits(), id.cqes.into_bits()), (0x66, 0x44));
    assert_eq!((id.nn, id.mdts, id.cntlid), (64, 8, ControllerId(1)));
    assert!(id.oacs.format() && !id.oacs.namespace_management() && !id.oacs.doorbell_buffer());
    assert_eq!((id.tnvmcap.get(), id.unvmcap.get(), id.kas), (0, 0, 0));
    assert!(id.wctemp < id.cctemp && id.wctemp > 0);
    let mut guest = boot_with_all();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    let id: IdentifyController = reading(&mut guest, identify(Cns::CONTROLLER, 0));
    assert!(id.oacs.namespace_management() && id.oacs.doorbell_buffer());
    assert_eq!((id.tnvmcap.get(), id.unvmcap.get()), (17 << 20, 16 << 20));
}

#[test]
fn namespaces_say_what_they_are() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    guest.add_memory_volume(3, 1 << 20, BlockSize::B4096);
    let small: IdentifyNamespace = reading(&mut guest, identify(Cns::NAMESPACE, 1));
    let large: IdentifyNamespace = reading(&mut guest, identify(Cns::NAMESPACE, 3));
    assert_eq!((small.nsze, small.ncap, small.flbas.index()), (2048, 2048, 0));
    assert_eq!((large.nsze, large.ncap, large.flbas.index()), (256, 256, 1));
    assert_eq!((large.nlbaf_z, large.lbaf[0].lbads, large.lbaf[1].lbads), (1, 9, 12));
    assert!(small.nuse <= small.ncap);
    assert_eq!((small.nguid, small.nvmcap.get()), (identity(1).uuid, 1 << 20));
    assert_eq!((small.nmic.into_bits(), small.rescap.into_bits(), small.nsattr.into_bits()), (0, 0, 0));
    assert!(small.lbaf[2..].iter().all(|format| format.lbads == 0));
    let independent: IdentifyNamespaceIndependent = reading(&mut guest, identify(Cns::INDEPENDENT_NAMESPACE, 1));
    assert!(independent.nstat.ready());
    let nvm: IdentifyNamespaceNvm = reading(&mut guest, identify(Cns::CSI_NAMESPACE, 1));
    assert_eq!((nvm.pic, nvm.elbaf[0].into_bits()), (0, 0));
}

#[test]
fn shared_and_protected_namespaces_say_so() {
    let mut guest = FakeGuest::boot();
    let volume = MemoryVolume::create("shared", 1 << 20, BlockSize::B512).expect("a volume");
    let namespace = Namespace::new(volume, identity(1), true);
    let allocated = Allocated { namespace: Arc::clone(&namespace), read_only: true, by_guest: false };
    guest.controller.namespaces.allocate(1, allocated).expect("a free identifier");
    guest.controller.namespaces.attach(1).expect("an attachment");
    let id: IdentifyNamespace = reading(&mut guest, identify(Cns::NAMESPACE, 1));
    assert!(id.nmic.shared() && id.nsattr.write_protected());
    // Everything but persistence through power loss.
    assert_eq!(id.rescap.into_bits(), 0xfe);
    let independent: IdentifyNamespaceIndependent = reading(&mut guest, identify(Cns::INDEPENDENT_NAMESPACE, 1));
    assert_eq!((independent.nmic, independent.rescap, independent.nsattr), (id.nmic, id.rescap, id.nsattr));
    let controller: IdentifyController = reading(&mut guest, identify(Cns::CONTROLLER, 0));
    assert!(!controller.cmic.multiple_controllers(), "or Linux puts a multipath device in front");
}

#[test]
fn identifiers_that_name_nothing() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    let structures = [
        Cns::NAMESPACE,
        Cns::CSI_NAMESPACE,
        Cns::INDEPENDENT_NAMESPACE,
        Cns::ALLOCATED_NAMESPACE,
        Cns::CSI_ALLOCATED_NAMESPACE,
    ];
    for cns in structures {
        let inactive = expect_reading(&mut guest, identify(cns, 2), Status::SUCCESS);
        assert!(inactive.iter().all(|byte| *byte == 0), "{cns}");
        for nsid in [0, 65, u32::MAX - 1] {
            expect_reading(&mut guest, identify(cns, nsid), Status::INVALID_NAMESPACE_OR_FORMAT);
        }
    }
    expect_reading(&mut guest, identify(Cns::NAMESPACE, u32::MAX), Status::INVALID_NAMESPACE_OR_FORMAT);
    expect_reading(&mut guest, identify(Cns::INDEPENDENT_NAMESPACE, u32::MAX), Status::INVALID_FIELD);
    expect_reading(&mut guest, identify(Cns::NAMESPACE_DESCRIPTORS, 2), Status::INVALID_FIELD);
    expect_reading(&mut guest, identify(Cns::NAMESPACE_DESCRIPTORS, 0), Status::INVALID_NAMESPACE_OR_FORMAT);
    // Who may create namespaces learns what they have in common.
    let mut guest = boot_with_all();
    let common: IdentifyNamespace = reading(&mut guest, identify(Cns::NAMESPACE, u32::MAX));
    assert_eq!((common.nsze, common.nlbaf_z, common.lbaf[1].lbads), (0, 1, 12));
}

#[test]
fn lists_go_on_after_an_identifier() {
    let mut guest = FakeGuest::boot();
    for nsid in [2, 5, 64] {
        guest.add_memory_volume(nsid, 1 << 20, BlockSize::B512);
    }
    guest.controller.namespaces.detach(5);
    let all: [(Cns, &[u32]); 4] = [
        (Cns::ACTIVE_NAMESPACES, &[2, 64]),
        (Cns::CSI_ACTIVE_NAMESPACES, &[2, 64]),
        (Cns::ALLOCATED_NAMESPACES, &[2, 5, 64]),
        (Cns::CSI_ALLOCATED_NAMESPACES, &[2, 5, 64]),
    ];
    for (cns, all) in all {
        for after in [0, 2, 3, 5, 63, 64, 1000, u32::MAX - 2] {
            let list: NamespaceList = reading(&mut guest, identify(cns, after));
            let wanted: Vec<u32> = all.iter().copied().filter(|&nsid| nsid > after).collect();
            assert_eq!(list.iter().map(|nsid| nsid.0).collect::<Vec<_>>(), wanted, "{cns} after {after}");
        }
        for nsid in [u32::MAX - 1, u32::MAX] {
            expect_reading(&mut guest, identify(cns, nsid), Status::INVALID_NAMESPACE_OR_FORMAT);
        }
    }
    let allocated: IdentifyNamespace = reading(&mut guest, identify(Cns::ALLOCATED_NAMESPACE, 5));
    assert_eq!(allocated.nsze, 2048);
}

#[test]
fn namespaces_have_unique_names() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    let list = expect_reading(&mut guest, identify(Cns::NAMESPACE_DESCRIPTORS, 1), Status::SUCCESS);
    let uuid = identity(1).uuid;
    let wanted: [(NamespaceIdType, &[u8]); 3] =
        [(NamespaceIdType::NGUID, &uuid), (NamespaceIdType::UUID, &uuid), (NamespaceIdType::CSI, &[0])];
    assert_eq!(namespace_descriptors(&list).collect::<Vec<_>>(), wanted);
}

#[test]
fn controllers_are_listed() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    guest.add_memory_volume(2, 1 << 20, BlockSize::B512);
    guest.controller.namespaces.detach(2);
    for (cns, nsid, from, count) in [
        (Cns::SUBSYSTEM_CONTROLLERS, 0, 0, 1),
        (Cns::SUBSYSTEM_CONTROLLERS, 0, 1, 1),
        (Cns::SUBSYSTEM_CONTROLLERS, 0, 2, 0),
        (Cns::NAMESPACE_CONTROLLERS, 1, 0, 1),
        (Cns::NAMESPACE_CONTROLLERS, 1, 2, 0),
        (Cns::NAMESPACE_CONTROLLERS, 2, 0, 0),
    ] {
        let mut sqe = identify(cns, nsid);
        sqe.cdw10 |= from << 16;
        let list: ControllerList = reading(&mut guest, sqe);
        assert_eq!((list.count, list.ids[0].0), (count, count), "{cns} of {nsid} from {from}");
    }
    expect_reading(&mut guest, identify(Cns::NAMESPACE_CONTROLLERS, 3), Status::INVALID_FIELD);
}

#[test]
fn command_sets() {
    let mut guest = FakeGuest::boot();
    for (cntid, status) in [(0xffff, Status::SUCCESS), (1, Status::SUCCESS), (2, Status::INVALID_FIELD)] {
        let mut sqe = identify(Cns::IO_COMMAND_SETS, 0);
        sqe.cdw10 |= cntid << 16;
        expect_reading(&mut guest, sqe, status);
    }
    let mut ours = identify(Cns::IO_COMMAND_SETS, 0);
    ours.cdw10 |= 1 << 16;
    let sets: IoCommandSets = reading(&mut guest, ours);
    assert_eq!(sets.combinations[..2], [1, 0]);
    let nvm: IdentifyControllerNvm = reading(&mut guest, identify(Cns::CSI_CONTROLLER, 0));
    assert_eq!(nvm.wzsl, 0);
    for cns in [Cns::CSI_NAMESPACE, Cns::CSI_CONTROLLER, Cns::CSI_ACTIVE_NAMESPACES] {
        let mut zoned = identify(cns, 1);
        zoned.cdw11 = 2 << 24;
        expect_reading(&mut guest, zoned, Status::INVALID_FIELD);
    }
}

#[test]
fn other_structures_do_not_exist() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    let known = [0u8, 1, 2, 3, 5, 6, 7, 8, 0x10, 0x11, 0x12, 0x13, 0x1a, 0x1b, 0x1c, 0x1f];
    for cns in 0..=u8::MAX {
        let mut sqe = identify(Cns(cns), 1);
        sqe.cdw10 |= 1 << 16;
        let status = if known.contains(&cns) { Status::SUCCESS } else { Status::INVALID_FIELD };
        sqe.nsid = NamespaceId(1);
        expect_reading(&mut guest, sqe, status);
    }
}
