use millrace_nvme_spec::{
    NvmOpcode,
    admin::{CommitAction, NamespaceAttachmentSelect, NamespaceManagementSelect, SelfTest},
    identify::{AdminCommandSupport, FirmwareUpdates, IdentifyNamespace, NvmCommandSupport, ReservationCapabilities},
    reservation::ReservationType,
};
use zerocopy::FromZeros;

use super::*;
use crate::{
    admin::{formatting, shadowing},
    dma::{DmaBuffer, DmaMemory, DmaRange},
    format::Format,
    maintenance::{SecurityProtocol, firmware_commit, firmware_download, security, testing},
    manage::{attachment, managing},
};

const LIMIT: u64 = 4096;

/// A controller with these bits of OACS and ONCS.
fn identity(oacs: u16, oncs: u16) -> Box<IdentifyController> {
    let mut identity = Box::new(IdentifyController::new_zeroed());
    identity.oacs = AdminCommandSupport::from_bits(oacs);
    identity.oncs = NvmCommandSupport::from_bits(oncs);
    identity.frmw = FirmwareUpdates::new().with_slots(1);
    identity
}

fn namespace() -> Namespace {
    let mut identify = Box::new(IdentifyNamespace::new_zeroed());
    (identify.nsze, identify.lbaf[0].lbads) = (1000, 9);
    (identify.mssrl, identify.mcl) = (8, 8);
    identify.rescap = ReservationCapabilities::new().with_write_exclusive(true);
    Namespace::new(NamespaceId(7), identify, LIMIT).unwrap()
}

/// The one bit that is set of a field that the specification's types know.
fn name_of(bits: &str) -> Option<&str> {
    bits.split(['{', ',', '}']).map(str::trim).find_map(|field| field.strip_suffix(": true"))
}

/// What is made for a bit of OACS; `None`: nothing, but by `admin_raw`.
fn of_oacs(bit: &str, identity: &IdentifyController) -> Option<Vec<Result<Command, DriverError>>> {
    let nsid = NamespaceId(7);
    Some(match bit {
        "security" => [AdminOpcode::SECURITY_SEND, AdminOpcode::SECURITY_RECEIVE]
            .map(|opcode| {
                let protocol = SecurityProtocol { id: 1, ..SecurityProtocol::default() };
                security(identity, opcode, (nsid, protocol), (512, LIMIT))
            })
            .into(),
        "format" => vec![formatting(identity, &namespace(), Format::default())],
        "firmware" => {
            vec![firmware_download(identity, 0, 4096, LIMIT), firmware_commit(identity, 1, CommitAction::REPLACE)]
        }
        "namespace_management" => vec![
            managing(identity, NamespaceManagementSelect::DELETE, nsid),
            attachment(identity, NamespaceAttachmentSelect::ATTACH, nsid),
        ],
        "self_test" => vec![testing(identity, nsid, SelfTest::SHORT)],
        "directives" => vec![
            enabling(identity, nsid, DirectiveType::STREAMS, true),
            query(identity, nsid, (DirectiveType::IDENTIFY, DirectiveQuery::PARAMETERS), 4096),
        ],
        "virtualization" => vec![virtualization(identity, ControllerId(1), Virtualization::Online)],
        "doorbell_buffer" => vec![shadowing(identity, 4096, 8192)],
        "get_lba_status" => {
            let made = lba_status(identity, &namespace(), LbaStatusAction::SCAN, (Lba(0), 0), (1, LIMIT));
            vec![made.map(|(command, _)| command)]
        }
        "lockdown" => {
            let (scope, interface) = (LockdownScope::FEATURE, LockdownInterface::ADMIN);
            vec![locking(identity, Lockdown { scope, what: 1, prohibits: true, interface })]
        }
        // Messages of another specification, and what VFIO does for the machines that have a controller.
        "nvme_mi" | "live_migration" => return None,
        _ => panic!("nothing makes the commands of {bit}"),
    })
}

fn opcodes(made: Vec<Result<Command, DriverError>>) -> Vec<u8> {
    made.into_iter().map(|made| made.unwrap().sqe.opcode).collect()
}

#[test]
fn each_admin_command_that_a_controller_may_offer_is_made_where_it_does() {
    let mut seen = 0;
    for bit in 0..16 {
        let text = format!("{:?}", AdminCommandSupport::from_bits(1 << bit));
        let Some(name) = name_of(&text) else { continue };
        let Some(made) = of_oacs(name, &identity(1 << bit, 0)) else { continue };
        let expected = match name {
            "security" => vec![AdminOpcode::SECURITY_SEND, AdminOpcode::SECURITY_RECEIVE],
            "format" => vec![AdminOpcode::FORMAT_NVM],
            "firmware" => vec![AdminOpcode::FIRMWARE_IMAGE_DOWNLOAD, AdminOpcode::FIRMWARE_COMMIT],
            "namespace_management" => vec![AdminOpcode::NAMESPACE_MANAGEMENT, AdminOpcode::NAMESPACE_ATTACHMENT],
            "self_test" => vec![AdminOpcode::DEVICE_SELF_TEST],
            "directives" => vec![AdminOpcode::DIRECTIVE_SEND, AdminOpcode::DIRECTIVE_RECEIVE],
            "virtualization" => vec![AdminOpcode::VIRTUALIZATION_MANAGEMENT],
            "doorbell_buffer" => vec![AdminOpcode::DOORBELL_BUFFER_CONFIG],
            "get_lba_status" => vec![AdminOpcode::GET_LBA_STATUS],
            _ => vec![AdminOpcode::LOCKDOWN],
        };
        assert_eq!(opcodes(made), expected.iter().map(|opcode| opcode.0).collect::<Vec<_>>(), "{name}");
        for refused in of_oacs(name, &identity(!(1 << bit), 0)).unwrap() {
            let refused = refused.expect_err(name);
            assert!(matches!(refused, DriverError::NotOffered(_) | DriverError::NoShadowDoorbells), "{name}: {refused}");
        }
        seen += 1;
    }
    assert_eq!(seen, 10, "all that the types know");
}

/// What is made for a bit of ONCS; `None`: it says how another one's command may be, or is carried out.
fn of_oncs(bit: &str, identity: &IdentifyController, buffer: &DmaBuffer) -> Option<Vec<Result<Command, DriverError>>> {
    let (ns, one, count) = (namespace(), DmaRange { iova: 1 << 32, len: 512 }, BlockCount(1));
    let plain = |made: Result<Command, CommandError>| made.map_err(DriverError::from);
    Some(match bit {
        "compare" => vec![plain(ns.compare(Lba(0), one))],
        "write_uncorrectable" => vec![plain(ns.write_uncorrectable(Lba(0), count))],
        "dataset_management" => vec![plain(ns.deallocate(&[(Lba(0), count)], buffer))],
        "write_zeroes" => vec![plain(ns.write_zeroes(Lba(0), count, false))],
        "save_select" => vec![
            selecting(identity, FeatureId::ARBITRATION, FeatureSelect::SAVED, 0),
            saving(identity, FeatureId::ARBITRATION, 1),
        ],
        "reservations" => {
            let kind = ReservationType::WRITE_EXCLUSIVE;
            let all = [ns.register(7, buffer), ns.acquire(kind, 7, buffer), ns.release(kind, 7, buffer)];
            all.into_iter().chain([ns.report_reservation(buffer)]).map(plain).collect()
        }
        "timestamp" => [AdminOpcode::GET_FEATURES, AdminOpcode::SET_FEATURES].map(|opcode| timing(identity, opcode)).into(),
        "verify" => vec![plain(ns.verify(Lba(0), count))],
        "copy" => vec![plain(ns.copy(&[(Lba(0), count)], Lba(8), buffer))],
        // The last one: a Write Zeroes of all blocks, which is one's own to make.
        "copy_single_atomicity" | "all_fast_copy" | "max_write_zeroes_deallocate" | "namespace_zeroes" => return None,
        _ => panic!("nothing makes the commands of {bit}"),
    })
}

#[test]
fn each_command_of_a_namespace_that_a_controller_may_offer_is_made() {
    let buffer = DmaMemory::new(0x10_0000, 4096).unwrap().alloc(4096).unwrap();
    let mut seen = 0;
    for bit in 0..16 {
        let text = format!("{:?}", NvmCommandSupport::from_bits(1 << bit));
        let Some(name) = name_of(&text) else { continue };
        let Some(made) = of_oncs(name, &identity(0, 1 << bit), &buffer) else { continue };
        let expected = match name {
            "compare" => vec![NvmOpcode::COMPARE.0],
            "write_uncorrectable" => vec![NvmOpcode::WRITE_UNCORRECTABLE.0],
            "dataset_management" => vec![NvmOpcode::DATASET_MANAGEMENT.0],
            "write_zeroes" => vec![NvmOpcode::WRITE_ZEROES.0],
            "reservations" => vec![
                NvmOpcode::RESERVATION_REGISTER.0,
                NvmOpcode::RESERVATION_ACQUIRE.0,
                NvmOpcode::RESERVATION_RELEASE.0,
                NvmOpcode::RESERVATION_REPORT.0,
            ],
            "verify" => vec![NvmOpcode::VERIFY.0],
            "copy" => vec![NvmOpcode::COPY.0],
            // Admin commands, which the controller must offer.
            _ => vec![AdminOpcode::GET_FEATURES.0, AdminOpcode::SET_FEATURES.0],
        };
        assert_eq!(opcodes(made), expected, "{name}");
        if matches!(name, "save_select" | "timestamp") {
            for refused in of_oncs(name, &identity(0, !(1 << bit)), &buffer).unwrap() {
                assert!(matches!(refused, Err(DriverError::NotOffered(_))), "{name}");
            }
        }
        seen += 1;
    }
    assert_eq!(seen, 9, "all that the types know");
}

/// Opcode, namespace and Command Dwords 10 to 13.
fn said(made: Result<Command, DriverError>) -> (u8, u32, [u32; 4]) {
    let sqe = made.unwrap().sqe;
    (sqe.opcode, sqe.nsid.0, [sqe.cdw10, sqe.cdw11, sqe.cdw12, sqe.cdw13])
}

fn is_bad<T>(made: &Result<T, DriverError>) -> bool {
    matches!(made, Err(DriverError::Command(CommandError::BadField { .. })))
}

#[test]
fn directives_are_asked_and_told() {
    let (all, nsid) = (identity(u16::MAX, 0), NamespaceId(7));
    let parameters = |kind, len| said(query(&all, nsid, (kind, DirectiveQuery::PARAMETERS), len));
    assert_eq!(parameters(DirectiveType::IDENTIFY, 4096), (0x1a, 7, [1023, 1, 0, 0]));
    assert_eq!(parameters(DirectiveType::STREAMS, 32), (0x1a, 7, [7, 1 | 1 << 8, 0, 0]));
    assert_eq!(said(enabling(&all, nsid, DirectiveType::STREAMS, true)), (0x19, 7, [0, 1, 1 | 1 << 8, 0]));
    assert_eq!(said(enabling(&all, nsid, DirectiveType::STREAMS, false)), (0x19, 7, [0, 1, 1 << 8, 0]));
    assert!(is_bad(&enabling(&all, nsid, DirectiveType::IDENTIFY, false)));
    assert_eq!(said(allocating(&all, nsid, 5)), (0x1a, 7, [0, 3 | 1 << 8, 5, 0]));
    assert!(is_bad(&allocating(&all, nsid, 0)));
    assert_eq!(said(releasing(&all, nsid, Some(3))), (0x19, 7, [0, 1 | 1 << 8 | 3 << 16, 0, 0]));
    assert_eq!(said(releasing(&all, nsid, None)), (0x19, 7, [0, 2 | 1 << 8, 0, 0]));
    assert!(is_bad(&releasing(&all, nsid, Some(0))));
    // No more than are there, whatever is said of their number.
    assert_eq!(stream_identifiers(&[2, 0, 5, 0, 6, 0, 7, 0]), [5, 6]);
    assert_eq!(stream_identifiers(&[0xff, 0xff, 5, 0]), [5]);
    assert!(stream_identifiers(&[0, 0, 5, 0]).is_empty());
}

#[test]
fn controllers_are_given_resources_and_locked_down() {
    let all = identity(u16::MAX, 0);
    let managed = |wanted| said(virtualization(&all, ControllerId(0x12), wanted));
    assert_eq!(managed(Virtualization::Allocate(ResourceType::QUEUES, 4)), (0x1c, 0, [0x0012_0001, 4, 0, 0]));
    assert_eq!(managed(Virtualization::Assign(ResourceType::INTERRUPTS, 3)), (0x1c, 0, [0x0012_0108, 3, 0, 0]));
    assert_eq!(managed(Virtualization::Online), (0x1c, 0, [0x0012_0009, 0, 0, 0]));
    assert_eq!(managed(Virtualization::Offline), (0x1c, 0, [0x0012_0007, 0, 0, 0]));
    assert!(is_bad(&virtualization(&all, ControllerId(1), Virtualization::Assign(ResourceType(2), 1))));
    let format = Lockdown {
        scope: LockdownScope::ADMIN_OPCODE,
        what: AdminOpcode::FORMAT_NVM.0,
        prohibits: true,
        interface: LockdownInterface::BOTH,
    };
    assert_eq!(said(locking(&all, format)), (0x24, 0, [1 << 4 | 1 << 5 | 0x80 << 8, 0, 0, 0]));
    let feature = Lockdown { scope: LockdownScope::FEATURE, what: 6, prohibits: false, ..format };
    assert_eq!(said(locking(&all, feature)), (0x24, 0, [2 | 1 << 5 | 6 << 8, 0, 0, 0]));
    assert!(is_bad(&locking(&all, Lockdown { scope: LockdownScope(1), ..format })));
    assert!(is_bad(&locking(&all, Lockdown { interface: LockdownInterface(3), ..format })));
}

#[test]
fn the_status_of_blocks_is_of_those_that_there_are() {
    let (all, ns) = (identity(u16::MAX, 0), namespace());
    let asked = |action, range, ranges| lba_status(&all, &ns, action, range, (ranges, LIMIT));
    let (command, len) = asked(LbaStatusAction::SCAN, (Lba(5), 20), 3).unwrap();
    assert_eq!((said(Ok(command)), len), ((0x86, 7, [5, 0, 13, 0x14 | 0x10 << 24]), 56));
    let (command, _) = asked(LbaStatusAction::TRACKED, (Lba(999), 0), 255).unwrap();
    assert_eq!(said(Ok(command)), (0x86, 7, [999, 0, 1021, 0x11 << 24]));
    assert!(is_bad(&asked(LbaStatusAction(0x12), (Lba(0), 1), 1)));
    for range in [(Lba(1000), 0), (Lba(999), 2), (Lba(u64::MAX), 1)] {
        let outside = asked(LbaStatusAction::SCAN, range, 1);
        assert!(matches!(outside, Err(DriverError::Command(CommandError::OutOfRange { .. }))), "{range:?}");
    }
    for ranges in [256, usize::MAX] {
        let large = asked(LbaStatusAction::SCAN, (Lba(0), 0), ranges);
        assert!(matches!(large, Err(DriverError::Command(CommandError::TooLarge { .. }))), "{ranges}");
    }
    // One range, though the controller speaks of many.
    let mut bytes = vec![0; 24];
    (bytes[0], bytes[4], bytes[8], bytes[16], bytes[21]) = (9, 2, 77, 3, 1);
    let found = LbaStatus::read(&bytes);
    assert_eq!((found.ranges.len(), found.condition), (1, 2));
    assert_eq!((found.ranges[0].dslba, found.ranges[0].nlb, found.ranges[0].status), (77, 3, 1));
}

#[test]
fn features_are_saved_and_chosen_where_that_can_be() {
    let (all, none) = (identity(0, u16::MAX), identity(0, 0));
    let fid = FeatureId::VOLATILE_WRITE_CACHE;
    assert_eq!(said(saving(&all, fid, 1)), (0x09, 0, [6 | 1 << 31, 1, 0, 0]));
    assert_eq!(said(selecting(&all, fid, FeatureSelect::SAVED, 0)), (0x0a, 0, [6 | 2 << 8, 0, 0, 0]));
    assert_eq!(said(selecting(&none, fid, FeatureSelect::CURRENT, 0)), (0x0a, 0, [6, 0, 0, 0]), "every controller has that");
    assert_eq!(said(timing(&all, AdminOpcode::SET_FEATURES)), (0x09, 0, [14, 0, 0, 0]));
}
