//! Offsets and bits against the specifications' figures, and the few methods that compute something.

use core::mem::offset_of;
use std::string::ToString;
use std::vec::Vec;

use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::admin::*;
use crate::command::*;
use crate::features::*;
use crate::identify::*;
use crate::log::*;
use crate::nvm::*;
use crate::pci;
use crate::prp::{PrpEntry, entries_in_list};
use crate::registers::*;
use crate::reservation::*;
use crate::sgl::*;
use crate::status::*;
use crate::{from_zeros_based, to_zeros_based};

macro_rules! offsets {
    ($name:ty { $($field:ident = $offset:literal),+ $(,)? }) => {
        $(assert_eq!(offset_of!($name, $field), $offset, concat!(stringify!($name), ".", stringify!($field)));)+
    };
}

#[test]
fn entries_have_their_layout() {
    offsets!(Sqe { opcode = 0, flags = 1, cid = 2, nsid = 4, mptr = 16, dptr = 24, cdw10 = 40, cdw15 = 60 });
    offsets!(Cqe { dw0 = 0, dw1 = 4, sqhd = 8, sqid = 10, cid = 12, status = 14 });
    offsets!(SglDescriptor { address = 0, length = 8, identifier = 15 });
    offsets!(DatasetRange { context_attributes = 0, length = 4, slba = 8 });
    offsets!(CopyRange { snsid = 0, slba = 8, nlb_z = 16, sopt = 22, eilbrt = 24, elbat = 28, elbatm = 30 });
}

#[test]
fn identify_controller_has_its_layout() {
    offsets!(IdentifyController {
        vid = 0, ssvid = 2, sn = 4, mn = 24, fr = 64, rab = 72, ieee = 73, cmic = 76, mdts = 77, cntlid = 78, ver = 80,
        rtd3r = 84, rtd3e = 88, oaes = 92, ctratt = 96, rrls = 100, nssl = 104, plsi = 110, cntrltype = 111, fguid = 112,
        crdt = 128, crcap = 134, nvmsr = 253, mec = 255, oacs = 256, acl_z = 258, aerl_z = 259, frmw = 260, lpa = 261,
        elpe_z = 262, npss_z = 263, avscc = 264, apsta = 265, wctemp = 266, cctemp = 268, mtfa = 270, hmpre = 272,
        hmmin = 276, tnvmcap = 280, unvmcap = 296, rpmbs = 312, edstt = 316, fwug = 319, kas = 320, hctma = 322,
        sanicap = 328, hmminds = 332, hmmaxd = 336, nsetidmax = 338, endgidmax = 340, anatt = 342, anacap = 343,
        anagrpmax = 344, nanagrpid = 348, pels = 352, domainid = 356, megcap = 368, cqt = 386, sqes = 512, cqes = 513,
        maxcmd = 514, nn = 516, oncs = 520, fuses = 522, fna = 524, vwc = 525, awun_z = 526, awupf_z = 528,
        icsvscc = 530, nwpc = 531, acwu_z = 532, cdfs = 534, sgls = 536, mnan = 540, maxdna = 544, maxcna = 560,
        oaqd = 564, mcdqpc = 586, subnqn = 768, fabrics = 1792, psd = 2048, vendor = 3072,
    });
    offsets!(PowerState { mp = 0, flags = 3, enlat = 4, exlat = 8, rrt = 12, idlp = 16, ips = 18, actp = 20, apws = 22 });
    offsets!(IdentifyControllerNvm { vsl = 0, wzsl = 1, wusl = 2, dmrl = 3, dmrsl = 4, dmsl = 8, wzdsl = 17, ver = 20 });
}

#[test]
fn identify_namespace_has_its_layout() {
    offsets!(IdentifyNamespace {
        nsze = 0, ncap = 8, nuse = 16, nsfeat = 24, nlbaf_z = 25, flbas = 26, mc = 27, dpc = 28, dps = 29, nmic = 30,
        rescap = 31, fpi = 32, dlfeat = 33, nawun_z = 34, nawupf_z = 36, nacwu_z = 38, nabsn_z = 40, nabo = 42,
        nabspf_z = 44, noiob = 46, nvmcap = 48, npwg_z = 64, npwa_z = 66, npdg_z = 68, npda_z = 70, nows_z = 72,
        mssrl = 74, mcl = 76, msrc_z = 80, anagrpid = 92, nsattr = 99, nvmsetid = 100, endgid = 102, nguid = 104,
        eui64 = 120, lbaf = 128, vendor = 384,
    });
    offsets!(IdentifyNamespaceNvm { lbstm = 0, pic = 8, elbaf = 12, npdgl = 268, nprg = 272, tlbaag = 292 });
    offsets!(IdentifyNamespaceIndependent {
        nsfeat = 0, nmic = 1, rescap = 2, fpi = 3, anagrpid = 4, nsattr = 8, nvmsetid = 10, endgid = 12, nstat = 14, rgrpid = 20,
    });
    offsets!(NamespaceManagementData {
        nsze = 0, ncap = 8, flbas = 26, dps = 29, nmic = 30, anagrpid = 92, nvmsetid = 100, endgid = 102, lbstm = 384,
        nphndls = 392, phndl = 512,
    });
}

#[test]
fn lists_have_their_layout() {
    offsets!(ControllerList { count = 0, ids = 2 });
    offsets!(PrimaryControllerCapabilities { crt = 4, vqfrt = 32, vqrfap = 40, vifrt = 64, vigran = 78 });
    offsets!(SecondaryControllerList { count = 0, entries = 32 });
    offsets!(SecondaryController { scid = 0, pcid = 2, scs = 4, vfn = 8, nvq = 10, nvi = 12 });
    offsets!(NamespaceGranularityList { attributes = 0, descriptors_z = 4, entries = 32 });
    offsets!(UuidEntry { header = 0, uuid = 16 });
    offsets!(UuidList { entries = 32 });
}

#[test]
fn log_pages_have_their_layout() {
    offsets!(ErrorEntry {
        ecnt = 0, sqid = 8, cid = 10, status = 12, pel = 14, lba = 16, nsid = 24, vsia = 28, trtype = 29, csi = 30,
        opc = 31, csinfo = 32, ttsi = 40, lpver = 63,
    });
    offsets!(SmartLog {
        critical_warning = 0, composite_temperature = 1, available_spare = 3, percentage_used = 5, data_units_read = 32,
        data_units_written = 48, host_reads = 64, host_writes = 80, controller_busy_minutes = 96, power_cycles = 112,
        power_on_hours = 128, unsafe_shutdowns = 144, media_errors = 160, error_log_entries = 176,
        warning_temperature_minutes = 192, temperature_sensors = 200, thermal_transitions = 216, thermal_seconds = 224,
    });
    offsets!(FirmwareSlotLog { afi = 0, frs = 8 });
    offsets!(CommandEffectsLog { admin = 0, io = 1024 });
    offsets!(ReservationNotification { lpc = 0, kind = 8, available = 9, nsid = 12 });
}

#[test]
fn reservation_structures_have_their_layout() {
    offsets!(ReservationStatus { generation = 0, rtype = 4, registrants = 5, ptpls = 9 });
    offsets!(RegisteredController { cntlid = 0, rcsts = 2, hostid = 8, rkey = 16 });
    offsets!(RegisteredControllerExtended { cntlid = 0, rcsts = 2, rkey = 8, hostid = 16 });
    offsets!(RegisterData { crkey = 0, nrkey = 8 });
}

#[test]
fn pci_structures_have_their_layout() {
    offsets!(pci::Header {
        command = 0x04, status = 0x06, revision_id = 0x08, base_class = 0x0b, header_type = 0x0e, bars = 0x10,
        subsystem_vendor_id = 0x2c, expansion_rom = 0x30, capabilities = 0x34, interrupt_line = 0x3c, interrupt_pin = 0x3d,
    });
    offsets!(pci::PciExpressCapability {
        device_capabilities = 4, device_control = 8, link_capabilities = 0x0c, link_status = 0x12,
        device_capabilities2 = 0x24, device_control2 = 0x28, link_capabilities2 = 0x2c, link_status2 = 0x32,
    });
    offsets!(pci::MsixCapability { control = 2, table = 4, pba = 8 });
    assert_eq!(pci::DeviceCapabilities::new().with_function_level_reset(true).into_bits(), 1 << 28);
    assert_eq!(pci::DeviceCapabilities::new().with_role_based_error_reporting(true).into_bits(), 1 << 15);
    assert_eq!(pci::DeviceControl::new().with_initiate_function_level_reset(true).into_bits(), 1 << 15);
    assert_eq!(pci::MsixControl::new().with_table_size_z(7).with_enable(true).into_bits(), 0x8007);
    assert_eq!(pci::Command::new().with_bus_master(true).with_interrupt_disable(true).into_bits(), 0x404);
    assert_eq!(pci::DeviceStatus::new().with_capabilities_list(true).into_bits(), 0x10);
    assert_eq!(pci::MsixLocation::at(4, 0x2000).map(|l| (l.into_bits(), l.offset())), Some((0x2004, 0x2000)));
    assert_eq!(pci::MsixLocation::at(0, 4), None);
    assert_eq!(pci::MsixLocation::at(6, 0), None);
}

#[test]
fn capabilities_bits() {
    let cap =
        Capabilities::new().with_mqes_z(4095).with_cqr(true).with_to(40).with_dstrd(1).with_css_nvm(true).with_mpsmax(4);
    assert_eq!(cap.into_bits(), 0x0040_0021_2801_0fff);
    assert_eq!(Capabilities::new().with_nssrs(true).into_bits(), 1 << 36);
    assert_eq!(Capabilities::new().with_css_iocs(true).into_bits(), 1 << 43);
    assert_eq!(Capabilities::new().with_css_admin_only(true).into_bits(), 1 << 44);
    assert_eq!(Capabilities::new().with_mpsmin(1).into_bits(), 1 << 48);
    assert_eq!(Capabilities::new().with_cmbs(true).into_bits(), 1 << 57);
    assert_eq!(Capabilities::new().with_crwms(true).with_crims(true).into_bits(), 3 << 59);
}

#[test]
fn configuration_as_linux_writes_it() {
    let cc = Configuration::from_bits(0x0046_0001);
    assert!(cc.en());
    assert_eq!((cc.iosqes(), cc.iocqes()), (Sqe::SIZE_LOG2, Cqe::SIZE_LOG2));
    assert_eq!(
        (cc.css(), cc.ams(), cc.shn()),
        (CommandSetSelected::NVM, Arbitration::ROUND_ROBIN, ShutdownNotification::NONE)
    );
    assert_eq!(cc.page_size(), 4096);
    assert_eq!(Configuration::from_bits(0x0046_4001).shn(), ShutdownNotification::NORMAL);
    assert_eq!(Configuration::from_bits(0xe0).css(), CommandSetSelected(6));
    assert_eq!(Configuration::new().with_mps(15).page_size(), 128 << 20);
    assert_eq!(Configuration::new().with_crime(true).into_bits(), 1 << 24);
}

#[test]
fn status_registers_bits() {
    assert_eq!(ControllerStatus::new().with_rdy(true).with_shst(ShutdownStatus::COMPLETE).into_bits(), 0b1001);
    assert_eq!(ControllerStatus::new().with_cfs(true).with_nssro(true).into_bits(), 0b1_0010);
    assert_eq!(AdminQueueAttributes::from_bits(0x001f_003f).asqs_z(), 0x3f);
    assert_eq!(AdminQueueAttributes::from_bits(0x001f_003f).acqs_z(), 0x1f);
    assert_eq!(Version::V1_4.into_bits(), 0x0001_0400);
    assert_eq!(Version::V2_1.into_bits(), 0x0002_0100);
    assert_eq!(NSSR_RESET.to_be_bytes(), *b"NVMe");
}

#[test]
fn memory_buffer_registers_bits() {
    let location = BufferLocation::new().with_bir(2).with_cdpcils(true).with_ofst(0x12345);
    assert_eq!(location.into_bits(), 0x1234_5042);
    let size = BufferSize::new().with_sqs(true).with_lists(true).with_szu(2).with_sz(64);
    assert_eq!(size.into_bits(), 0x0004_0205);
    assert_eq!(size.unit(), Some(1 << 20));
    assert_eq!(BufferSize::new().with_szu(6).unit(), Some(64 << 30));
    assert_eq!(BufferSize::new().with_szu(7).unit(), None);
    assert_eq!(BufferControl::new().with_cre(true).with_cmse(true).with_cba(0xfe_dcba_9876).into_bits(), 0xf_edcb_a987_6003);
    assert_eq!(BufferStatus::from_bits(1), BufferStatus::new().with_cbai(true));
}

#[test]
fn doorbells_are_where_the_stride_puts_them() {
    let layout = DoorbellLayout::new(0).expect("0 is a stride");
    assert_eq!(layout.offset(Doorbell::SqTail(QueueId(0))), 0x1000);
    assert_eq!(layout.offset(Doorbell::CqHead(QueueId(0))), 0x1004);
    assert_eq!(layout.offset(Doorbell::SqTail(QueueId(3))), 0x1018);
    assert_eq!(layout.index_offset(Doorbell::CqHead(QueueId(3))), 0x1c);
    assert_eq!(layout.bytes(QueueId(511)), 4096);
    assert_eq!(DoorbellLayout::new(16), None);
}

#[test]
fn doorbells_decode_to_what_was_encoded() {
    for dstrd in 0..16 {
        let layout = DoorbellLayout::new(dstrd).expect("four bits");
        for queue in [0, 1, 2, 127, 128, 65_534, 65_535].map(QueueId) {
            for doorbell in [Doorbell::SqTail(queue), Doorbell::CqHead(queue)] {
                assert_eq!(layout.decode(layout.offset(doorbell)), Some(doorbell));
                assert_eq!(layout.decode(layout.offset(doorbell) + 1), None);
                assert_eq!(layout.decode(layout.offset(doorbell) + layout.stride() - 1), None);
            }
        }
        let beyond = layout.offset(Doorbell::CqHead(QueueId(u16::MAX))) + layout.stride();
        assert_eq!(layout.decode(beyond), None);
        assert_eq!(layout.decode(0xffc), None);
        assert_eq!(layout.decode(u64::MAX), None);
    }
}

#[test]
fn a_command_decodes_field_by_field() {
    let mut bytes = [0u8; 64];
    bytes[..8].copy_from_slice(&[0x02, 0x42, 0x34, 0x12, 7, 0, 0, 0]);
    bytes[40..48].copy_from_slice(&0x1_2345_6789_u64.to_le_bytes());
    bytes[48..52].copy_from_slice(&0x4400_0007_u32.to_le_bytes());
    let sqe = Sqe::read_from_bytes(&bytes).expect("64 bytes");
    assert_eq!(sqe.nvm_opcode(), crate::NvmOpcode::READ);
    assert_eq!((sqe.flags.fuse(), sqe.flags.psdt()), (Fuse::SECOND, Psdt::SGL_MPTR_CONTIGUOUS));
    assert_eq!((sqe.cid, sqe.nsid), (CommandId(0x1234), NamespaceId(7)));
    assert_eq!(sqe.cdw10_11(), 0x1_2345_6789);
    let cdw12 = ReadWriteCdw12::from_bits(sqe.cdw12);
    assert_eq!((cdw12.nlb_z(), cdw12.fua(), cdw12.lr()), (7, true, false));
    assert_eq!(cdw12.prinfo(), ProtectionInfo::new().with_check_reference(true));
    let mut other = Sqe::default();
    other.set_cdw10_11(sqe.cdw10_11());
    assert_eq!((other.cdw10, other.cdw11), (0x2345_6789, 1));
}

#[test]
fn io_dwords_bits() {
    assert_eq!(ReadWriteCdw12::new().with_lr(true).with_stc(true).into_bits(), 0x8100_0000);
    assert_eq!(WriteZeroesCdw12::new().with_deac(true).with_nsz(true).into_bits(), 0x0280_0000);
    assert_eq!(DatasetManagementCdw11::new().with_ad(true).into_bits(), 4);
    let copy = CopyCdw12::new().with_nr_z(1).with_format(CopyFormat::NSID_SLBA_32).with_dtype(1).with_fua(true);
    assert_eq!(copy.into_bits(), 0x4010_0201);
    assert_eq!(CopySourceOptions::new().with_fco(true).into_bits(), 0x8000);
    assert_eq!(
        RegisterCdw10::new().with_rrega(RegisterAction::REPLACE).with_cptpl(ChangePersistence::SET).into_bits(),
        0xc000_0002
    );
    assert_eq!(AcquireCdw10::new().with_rtype(ReservationType(6)).with_racqa(AcquireAction::PREEMPT).into_bits(), 0x601);
    assert_eq!(ReleaseCdw10::new().with_rtype(ReservationType(1)).with_iekey(true).into_bits(), 0x108);
}

#[test]
fn admin_dwords_bits() {
    assert_eq!(CreateQueueCdw10::new().with_qid(QueueId(1)).with_qsize_z(1023).into_bits(), 0x03ff_0001);
    assert_eq!(CreateCqCdw11::new().with_pc(true).with_ien(true).with_iv(5).into_bits(), 0x0005_0003);
    assert_eq!(
        CreateSqCdw11::new().with_pc(true).with_qprio(QueuePriority::MEDIUM).with_cqid(QueueId(9)).into_bits(),
        0x0009_0005
    );
    assert_eq!(AbortCdw10::new().with_sqid(QueueId(1)).with_cid(CommandId(2)).into_bits(), 0x0002_0001);
    assert_eq!(
        IdentifyCdw10::new().with_cns(Cns::NAMESPACE_CONTROLLERS).with_cntid(ControllerId(3)).into_bits(),
        0x0003_0012
    );
    assert_eq!(IdentifyCdw11::new().with_csi(Csi::ZONED).with_cnssid(1).into_bits(), 0x0200_0001);
    assert_eq!(AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED.dw0().into_bits(), 0x0004_0002);
    assert_eq!(AsyncEvent::from(AsyncEventDw0::from_bits(0x0080_0006)), AsyncEvent::RESERVATION_LOG_PAGE_AVAILABLE);
    let format = FormatCdw10::from_bits(0x1e15);
    assert_eq!(
        (format.lbaf(), format.mset(), format.pi(), format.pil(), format.ses()),
        (0x15, true, 0, false, SecureErase(7))
    );
    assert_eq!(GetFeaturesCdw10::from_bits(0x307).sel(), FeatureSelect::SUPPORTED_CAPABILITIES);
    assert_eq!(
        SetFeaturesCdw10::from_bits(0x8000_0006),
        SetFeaturesCdw10::new().with_fid(FeatureId::VOLATILE_WRITE_CACHE).with_sv(true)
    );
    assert_eq!(InterruptVectorFeature::new().with_iv(3).with_cd(true).into_bits(), 0x0001_0003);
    assert_eq!(TemperatureThresholdFeature::new().with_thsel(ThresholdType::UNDER).with_tmpsel(2).into_bits(), 0x0012_0000);
    assert_eq!(AsyncEventFeature::new().with_namespace_attribute(true).with_discovery_log(true).into_bits(), 0x8000_0100);
    assert_eq!(ReservationMaskFeature::new().with_regpre(true).with_respre(true).into_bits(), 0b1010);
}

#[test]
fn log_dwords_bits() {
    let cdw10 = GetLogPageCdw10::from_bits(0xffff_8002);
    assert_eq!((cdw10.lid(), cdw10.rae(), cdw10.numdl_z()), (LogId::SMART, true, 0xffff));
    assert_eq!(log_page_bytes(GetLogPageCdw10::new(), GetLogPageCdw11::new()), 4);
    assert_eq!(log_page_bytes(cdw10, GetLogPageCdw11::from_bits(0xffff)), 1 << 34);
    assert_eq!(GetLogPageCdw14::new().with_ot(true).with_csi(Csi::ZONED).into_bits(), 0x0280_0000);
    let effects = CommandEffects::new().with_csupp(true).with_lbcc(true).with_cse(SubmissionRestriction::NAMESPACE);
    assert_eq!(effects.into_bits(), 0x0001_0003);
    assert_eq!(CommandEffects::new().with_scope(CommandScope::new().with_namespace(true)).into_bits(), 1 << 20);
}

#[test]
fn identify_bits() {
    assert_eq!(AdminCommandSupport::new().with_namespace_management(true).with_doorbell_buffer(true).into_bits(), 0x108);
    assert_eq!(NvmCommandSupport::new().with_reservations(true).with_copy(true).into_bits(), 0x120);
    assert_eq!(AsyncEventsSupported::new().with_namespace_attribute(true).into_bits(), 0x100);
    assert_eq!(AsyncEventsSupported::new().with_discovery_log(true).into_bits(), 1 << 31);
    assert_eq!(ControllerAttributes::new().with_extended_lba_formats(true).with_fdps(true).into_bits(), 0x8_8000);
    assert_eq!(SglSupport::new().with_support(SglAlignment::BYTE).with_bit_bucket(true).into_bits(), 0x1_0001);
    assert_eq!(VolatileWriteCache::new().with_present(true).with_flush(FlushBehavior::BROADCAST).into_bits(), 7);
    assert_eq!(EntrySize::new().with_required(6).with_maximum(6).into_bits(), 0x66);
    assert_eq!(DeallocateFeatures::new().with_read(DeallocatedRead::ZEROES).with_write_zeroes(true).into_bits(), 9);
    assert_eq!(FormatProgress::new().with_supported(true).into_bits(), 0x80);
    for index in 0..64 {
        assert_eq!(FormattedLbaSize::new().with_index(index).index(), index);
    }
    assert_eq!(FormattedLbaSize::new().with_index(0x35).into_bits(), 0x65);
}

#[test]
fn status_and_phase_share_the_last_word() {
    let word = StatusField::new(Status::LBA_OUT_OF_RANGE.do_not_retry(), true);
    assert_eq!(word.0, 0x8101);
    assert!(word.phase());
    assert_eq!(word.status().code(), Status::LBA_OUT_OF_RANGE);
    assert_ne!(word.status(), Status::LBA_OUT_OF_RANGE);
    assert_eq!(StatusField::new(Status::COMPARE_FAILURE, false).0, 0x285 << 1);
    assert_eq!(StatusField::new(Status::INVALID_QUEUE_SIZE.with_more(true), false).0, (0x2000 | 0x102) << 1);
    assert_eq!(Status::SUCCESS.with_crd(3).into_bits(), 3 << 11);
    assert!(Status::SUCCESS.with_more(true).is_success());
    assert!(!Status::COMPLETION_QUEUE_INVALID.is_success());
    for bits in 0..=u16::MAX {
        assert_eq!(StatusField::new(StatusField(bits).status(), bits & 1 != 0).0, bits);
    }
}

#[test]
fn status_speaks_the_specifications_words() {
    assert_eq!(Status::INVALID_FIELD.do_not_retry().to_string(), "Invalid Field in Command");
    assert_eq!(Status::of(StatusCodeType::COMMAND_SPECIFIC, 0x17).to_string(), "Command Specific Status 0x17");
    assert_eq!(std::format!("{:?}", Status::WRITE_FAULT.do_not_retry()), "Status(2/80 Write Fault, DNR)");
    let kind = match Status::ACCESS_DENIED.do_not_retry().code() {
        Status::ACCESS_DENIED => 1,
        _ => 2,
    };
    assert_eq!(kind, 1);
}

#[test]
fn values_speak_the_specifications_words() {
    assert_eq!(crate::AdminOpcode::FORMAT_NVM.to_string(), "Format NVM");
    assert_eq!(crate::AdminOpcode(0x03).to_string(), "0x03");
    assert_eq!(crate::AdminOpcode(0x03).name(), None);
    assert_eq!(std::format!("{:?}", LogId::ANA), "LogId(0x0c Asymmetric Namespace Access)");
    assert_eq!(std::format!("{:?} {}", QueueId(5), QueueId(5)), "QueueId(5) 5");
}

#[test]
fn opcodes_state_their_direction() {
    use crate::{AdminOpcode, NvmOpcode};
    assert_eq!(AdminOpcode::IDENTIFY.data_transfer().name(), Some("Controller to host transfers"));
    assert_eq!(NvmOpcode::WRITE.data_transfer().0, 1);
    assert_eq!(NvmOpcode::COPY.data_transfer().0, 1);
    assert_eq!(NvmOpcode::WRITE_ZEROES.data_transfer().0, 0);
    assert_eq!(NvmOpcode::RESERVATION_REPORT.data_transfer().0, 2);
}

#[test]
fn a_data_pointer_is_two_prps_or_one_sgl() {
    let sgl = SglDescriptor::data_block(0x1122_3344_5566_7788, 0x2000);
    let pointer = DataPointer::from(sgl);
    assert_eq!(pointer, DataPointer::prps(0x1122_3344_5566_7788, 0x2000));
    assert_eq!(pointer.sgl1(), sgl);
    let last = SglDescriptor::last_segment(0x1000, 32);
    assert_eq!(DataPointer::from(last).prp2, 0x3000_0000_0000_0020);
    assert_eq!(DataPointer::prps(0, 0xa5 << 56).sgl1().identifier.subtype(), SglSubtype(5));
    assert_eq!(DataPointer::prps(0, 0xa5 << 56).sgl1().identifier.kind(), SglType(10));
}

#[test]
fn prp_entries_split_into_page_and_offset() {
    let entry = PrpEntry(0x1234_5ff8);
    assert_eq!((entry.page(4096), entry.offset(4096), entry.is_dword_aligned()), (0x1234_5000, 0xff8, true));
    assert!(!PrpEntry(2).is_dword_aligned());
    assert_eq!(entries_in_list(0, 4096), 512);
    assert_eq!(entries_in_list(4088, 4096), 1);
    assert_eq!(entries_in_list(4092, 4096), 0);
    assert_eq!(entries_in_list(8192, 4096), 0);
}

#[test]
fn zeros_based_numbers_convert_both_ways() {
    assert_eq!((from_zeros_based(0), from_zeros_based(u16::MAX)), (1, 0x1_0000));
    assert_eq!((to_zeros_based(0), to_zeros_based(1), to_zeros_based(0x1_0000)), (None, Some(0), Some(0xffff)));
    assert_eq!(to_zeros_based(0x1_0001), None);
}

#[test]
fn text_fields_are_padded_or_terminated() {
    assert_eq!(padded::<6>("ab"), *b"ab    ");
    assert_eq!(padded::<4>("abcdef"), *b"abcd");
    assert_eq!(padded::<4>("a\né"), *b"a???");
    assert_eq!(null_terminated::<4>("abc"), Some(*b"abc\0"));
    assert_eq!(null_terminated::<4>("abcd"), None);
}

#[test]
fn lists_hold_what_fits_and_no_more() {
    let list = NamespaceList::new((1..=1025).map(NamespaceId));
    assert_eq!(list.iter().count(), 1024);
    let short = NamespaceList::new([NamespaceId(3), NamespaceId(9)]);
    assert_eq!(short.iter().collect::<Vec<_>>(), [NamespaceId(3), NamespaceId(9)]);
    let mut controllers = ControllerList::new((0..5000).map(ControllerId));
    assert_eq!(controllers.listed().map(<[_]>::len), Some(2047));
    controllers.count = 2048;
    assert_eq!(controllers.listed(), None);
}

#[test]
fn namespace_descriptors_stop_where_the_list_does() {
    let mut list = Vec::new();
    list.extend_from_slice(NamespaceDescriptor::new(NamespaceIdType::UUID).as_bytes());
    list.extend_from_slice(&[7; 16]);
    list.extend_from_slice(NamespaceDescriptor::new(NamespaceIdType::CSI).as_bytes());
    list.push(0);
    let expected: [(_, &[u8]); 2] = [(NamespaceIdType::UUID, &[7; 16]), (NamespaceIdType::CSI, &[0])];
    assert_eq!(namespace_descriptors(&list).collect::<Vec<_>>(), expected);
    assert_eq!(namespace_descriptors(&list[..24]).collect::<Vec<_>>(), expected[..1]);
    assert_eq!(namespace_descriptors(&list[..22]).count(), 1);
    list.extend_from_slice(&[0; 4]);
    list.extend_from_slice(NamespaceDescriptor::new(NamespaceIdType::EUI64).as_bytes());
    list.extend_from_slice(&[1; 8]);
    assert_eq!(namespace_descriptors(&list).count(), 2);
}

#[test]
fn a_timestamp_keeps_48_bits() {
    let attributes = TimestampAttributes::new().with_origin(TimestampOrigin::SET_FEATURES);
    let stamp = Timestamp::new(0xffff_1234_5678_9abc, attributes);
    assert_eq!(stamp.millis(), 0x1234_5678_9abc);
    assert_eq!(stamp.as_bytes(), [0xbc, 0x9a, 0x78, 0x56, 0x34, 0x12, 0x02, 0]);
}

#[test]
fn reservation_types_say_whom_they_admit() {
    let admitted: Vec<_> = (0..8).map(|n| ReservationType(n).admits_registrants()).collect();
    assert_eq!(admitted, [false, false, false, true, true, true, true, false]);
    let readable: Vec<_> = (0..8).map(|n| ReservationType(n).is_write_exclusive()).collect();
    assert_eq!(readable, [false, true, false, true, false, true, false, false]);
    assert!(ReservationType::EXCLUSIVE_ACCESS_ALL_REGISTRANTS.is_all_registrants());
    assert!(!ReservationType::EXCLUSIVE_ACCESS_REGISTRANTS_ONLY.is_all_registrants());
}

#[test]
fn odd_offsets_are_written_little_endian() {
    let mut status = ReservationStatus::new_zeroed();
    status.registrants.set(0x1234);
    assert_eq!(status.as_bytes()[5..7], [0x34, 0x12]);
    let mut smart = SmartLog::new_zeroed();
    smart.composite_temperature.set(300);
    smart.host_reads.set(1 << 64);
    assert_eq!(smart.as_bytes()[1..3], [44, 1]);
    assert_eq!(smart.as_bytes()[72], 1);
}
