//! Identify (Base 5.1.13; NVM 4.1.5).

use std::{iter, sync::atomic::Ordering};

use millrace_block::{BlockCount, BlockSize, Geometry, METADATA_SIZE, Metadata};
use millrace_nvme_spec::{
    admin::{IdentifyCdw10, IdentifyCdw11},
    command::{ControllerId, Csi, NamespaceId, Sqe},
    identify::{
        AdminCommandSupport, AsyncEventsSupported, Cns, CommonNamespaceFeatures, ControllerAttributes, ControllerList,
        ControllerType, DeallocateFeatures, DeallocatedRead, EntrySize, FirmwareUpdates, FlushBehavior, FormatAttributes,
        FormattedLbaSize, FusedSupport, IDENTIFY_SIZE, IdentifyController, IdentifyControllerNvm, IdentifyNamespace,
        IdentifyNamespaceIndependent, IdentifyNamespaceNvm, IoCommandSets, LbaFormat, LogPageAttributes,
        MetadataCapabilities, NamespaceAttributes, NamespaceDescriptor, NamespaceFeatures, NamespaceIdType, NamespaceList,
        NamespaceSharing, NamespaceStatus, NvmCommandSupport, ProtectionCapabilities, ProtectionSettings,
        RelativePerformance, ReservationCapabilities, SglSupport, VolatileWriteCache, null_terminated, padded,
    },
    opcode::AdminOpcode,
    status::Status,
};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    super::{controller::Controller, data, io::limits, namespace::Namespace, pci, registers, state::ERROR_ENTRIES},
    Progress, done, effects,
    events::AERL_Z,
};

/// Recommended Arbitration Burst (RAB), also the default: 32 commands.
pub(super) const RAB: u8 = 5;
/// The temperature at which a warning is due, in kelvins (WCTEMP).
pub(super) const WCTEMP: u16 = 343;
/// The critical temperature in kelvins (CCTEMP).
const CCTEMP: u16 = 353;
/// Time for a shutdown in microseconds (RTD3E): volumes are flushed.
const SHUTDOWN_MICROS: u32 = 10_000_000;
/// Concurrent Abort commands (ACL): each is done at once.
const ACL_Z: u8 = 3;
/// The controller's power in 10 mW: one state.
const POWER: u16 = 2500;

/// LBA formats by index. As many follow, of the same block sizes and with metadata, where the volume keeps some.
pub(super) const FORMATS: [BlockSize; 2] = [BlockSize::B512, BlockSize::B4096];

/// LBA formats that a namespace can have.
pub(super) fn formats(namespace: &Namespace) -> usize {
    if namespace.volume.metadata() == Metadata::Never { FORMATS.len() } else { 2 * FORMATS.len() }
}

/// What shared namespaces can do with reservations.
const RESCAP: ReservationCapabilities = ReservationCapabilities::new()
    .with_write_exclusive(true)
    .with_exclusive_access(true)
    .with_write_exclusive_registrants_only(true)
    .with_exclusive_access_registrants_only(true)
    .with_write_exclusive_all_registrants(true)
    .with_exclusive_access_all_registrants(true)
    .with_ignore_existing_key_1_3(true);

/// A namespace as Identify describes it.
struct Shown<'a> {
    namespace: &'a Namespace,
    geometry: Geometry,
    read_only: bool,
    /// Reservations are for controllers without a card.
    reserves: bool,
}

impl Controller {
    /// Identify.
    pub(super) fn identify(&mut self, sqe: &Sqe) -> Progress {
        let cdw10 = IdentifyCdw10::from_bits(sqe.cdw10);
        let csi = IdentifyCdw11::from_bits(sqe.cdw11).csi();
        let nsid = sqe.nsid;
        let is_csi_specific = matches!(
            cdw10.cns(),
            Cns::CSI_NAMESPACE
                | Cns::CSI_CONTROLLER
                | Cns::CSI_ACTIVE_NAMESPACES
                | Cns::CSI_ALLOCATED_NAMESPACES
                | Cns::CSI_ALLOCATED_NAMESPACE
        );
        if is_csi_specific && csi != Csi::NVM {
            return Err(self.invalid(11, 24));
        }
        match cdw10.cns() {
            Cns::NAMESPACE => self.identify_namespace(sqe)?,
            Cns::CONTROLLER => {
                let controller = self.controller_data();
                self.send(sqe, controller.as_bytes())?;
            }
            Cns::ACTIVE_NAMESPACES | Cns::CSI_ACTIVE_NAMESPACES => {
                let ids = self.namespaces.attached().map(|attached| attached.nsid);
                let list = listed_after(nsid, ids)?;
                self.send(sqe, list.as_bytes())?;
            }
            Cns::NAMESPACE_DESCRIPTORS => {
                let descriptors = descriptors(&self.active(nsid)?.namespace);
                self.send(sqe, &descriptors)?;
            }
            Cns::CSI_NAMESPACE => self.identify_attached(sqe, |_| IdentifyNamespaceNvm::new_zeroed())?,
            Cns::CSI_CONTROLLER => self.send(sqe, controller_nvm_data().as_bytes())?,
            Cns::INDEPENDENT_NAMESPACE => self.identify_attached(sqe, independent_data)?,
            Cns::ALLOCATED_NAMESPACES | Cns::CSI_ALLOCATED_NAMESPACES => {
                let list = listed_after(nsid, self.namespaces.allocated().map(|(nsid, _)| nsid))?;
                self.send(sqe, list.as_bytes())?;
            }
            Cns::ALLOCATED_NAMESPACE => self.identify_allocated(sqe, namespace_data)?,
            Cns::CSI_ALLOCATED_NAMESPACE => self.identify_allocated(sqe, |_| IdentifyNamespaceNvm::new_zeroed())?,
            Cns::INDEPENDENT_ALLOCATED_NAMESPACE => self.identify_allocated(sqe, independent_data)?,
            Cns::NAMESPACE_CONTROLLERS => {
                let attached = self.active_or_allocated(nsid)?;
                self.identify_controllers(sqe, attached)?;
            }
            Cns::SUBSYSTEM_CONTROLLERS => self.identify_controllers(sqe, true)?,
            Cns::IO_COMMAND_SETS => self.identify_command_sets(sqe)?,
            _ => return Err(self.invalid(10, 0)),
        }
        Ok(done(0))
    }

    /// CNS 00h.
    fn identify_namespace(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let manages = effects::admin(&self.config, AdminOpcode::NAMESPACE_MANAGEMENT).is_some();
        if sqe.nsid == NamespaceId::BROADCAST {
            let common = if manages { common_data() } else { return Err(Status::INVALID_NAMESPACE_OR_FORMAT) };
            return self.send(sqe, common.as_bytes());
        }
        self.identify_attached(sqe, namespace_data)
    }

    /// A structure about an attached namespace; zeroes where the identifier is not active.
    fn identify_attached<T: IntoBytes + zerocopy::Immutable>(
        &mut self,
        sqe: &Sqe,
        describe: impl Fn(&Shown<'_>) -> T,
    ) -> Result<(), Status> {
        self.check_valid(sqe.nsid)?;
        let data = self.namespaces.get(sqe.nsid.0).map(|attached| {
            let geometry = self.shown_geometry(attached.geometry.get());
            let reserves = self.config.card.is_none();
            describe(&Shown { namespace: &attached.namespace, geometry, read_only: attached.read_only, reserves })
        });
        self.send_or_zeroes(sqe, data)
    }

    /// A structure about a namespace that exists; zeroes where none does.
    fn identify_allocated<T: IntoBytes + zerocopy::Immutable>(
        &mut self,
        sqe: &Sqe,
        describe: impl Fn(&Shown<'_>) -> T,
    ) -> Result<(), Status> {
        self.check_valid(sqe.nsid)?;
        let data = self.namespaces.allocation(sqe.nsid.0).map(|allocated| {
            let geometry = self.shown_geometry(allocated.namespace.volume.geometry());
            let reserves = self.config.card.is_none();
            describe(&Shown { namespace: &allocated.namespace, geometry, read_only: allocated.read_only, reserves })
        });
        self.send_or_zeroes(sqe, data)
    }

    /// What the guest sees of a volume: as much as its replicas have too, or a window of that.
    pub(crate) fn shown_geometry(&self, geometry: Geometry) -> Geometry {
        let common = self.port.as_ref().map_or(geometry.blocks.0, |port| port.common_blocks(&geometry));
        let (_, blocks) = self.config.functions.window(common);
        Geometry { blocks: BlockCount(blocks), ..geometry }
    }

    fn send_or_zeroes<T: IntoBytes + zerocopy::Immutable>(&mut self, sqe: &Sqe, data: Option<T>) -> Result<(), Status> {
        match data {
            Some(data) => self.send(sqe, data.as_bytes()),
            None => self.send(sqe, &[0; IDENTIFY_SIZE]),
        }
    }

    /// Whether a namespace that exists is attached.
    fn active_or_allocated(&self, nsid: NamespaceId) -> Result<bool, Status> {
        self.check_valid(nsid)?;
        self.namespaces.allocation(nsid.0).ok_or_else(|| self.invalid(1, 0))?;
        Ok(self.namespaces.get(nsid.0).is_some())
    }

    /// CNS 12h and 13h: controllers from CNTID on. There is one.
    fn identify_controllers(&mut self, sqe: &Sqe, listed: bool) -> Result<(), Status> {
        let (from, ours) = (IdentifyCdw10::from_bits(sqe.cdw10).cntid(), ControllerId(self.config.cntlid));
        let list = ControllerList::new(iter::once(ours).filter(|_| listed && ours >= from));
        self.send(sqe, list.as_bytes())
    }

    /// CNS 1Ch: one combination, the NVM command set alone.
    fn identify_command_sets(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let cntid = IdentifyCdw10::from_bits(sqe.cdw10).cntid();
        if cntid.0 != u16::MAX && cntid.0 != self.config.cntlid {
            return Err(self.invalid(10, 16));
        }
        let mut sets = IoCommandSets::new_zeroed();
        sets.combinations[0] = 1 << Csi::NVM.0;
        self.send(sqe, sets.as_bytes())
    }

    /// CNS 01h.
    fn controller_data(&self) -> IdentifyController {
        let config = &self.config;
        let mut id = IdentifyController::new_zeroed();
        id.vid = pci::VENDOR_ID;
        id.ssvid = pci::SUBSYSTEM_VENDOR_ID;
        id.sn = padded(&config.serial);
        id.mn = padded(&config.model);
        id.fr = padded(env!("CARGO_PKG_VERSION"));
        id.rab = RAB;
        // CMIC stays 0: a guest's subsystem has one controller, whoever else shows the same volume. (Linux would put a
        // multipath device in front of every namespace.)
        id.mdts = config.mdts;
        id.cntlid = ControllerId(config.cntlid);
        id.ver = registers::VERSION;
        id.rtd3e = SHUTDOWN_MICROS;
        id.oaes = AsyncEventsSupported::new().with_namespace_attribute(true);
        id.ctratt = ControllerAttributes::new().with_host_id_128(true);
        id.cntrltype = ControllerType::IO;
        self.fill_admin_part(&mut id);
        fill_io_part(&mut id);
        if config.card.is_some() {
            limit_io_part(&mut id);
        }
        // Only namespaces with a key of their own can do it; others refuse.
        let by_key = self.namespaces.allocated().any(|(_, allocated)| allocated.namespace.volume.erases_by_key());
        id.fna = id.fna.with_cryptographic_erase(by_key);
        id.nn = config.namespaces;
        id.mnan = config.namespaces;
        id.subnqn = null_terminated(&config.subnqn).unwrap_or([0; 256]);
        id.psd[0].mp = POWER;
        id
    }

    fn fill_admin_part(&self, id: &mut IdentifyController) {
        let supports = |opcode| effects::admin(&self.config, opcode).is_some();
        let manages = supports(AdminOpcode::NAMESPACE_MANAGEMENT);
        id.oacs = AdminCommandSupport::new()
            .with_format(supports(AdminOpcode::FORMAT_NVM))
            .with_namespace_management(manages)
            .with_doorbell_buffer(supports(AdminOpcode::DOORBELL_BUFFER_CONFIG));
        id.acl_z = ACL_Z;
        id.aerl_z = AERL_Z;
        id.frmw = FirmwareUpdates::new().with_slot1_read_only(true).with_slots(1);
        id.lpa = LogPageAttributes::new().with_command_effects(true).with_extended_data(true);
        id.elpe_z = ERROR_ENTRIES as u8 - 1;
        id.wctemp = WCTEMP;
        id.cctemp = CCTEMP;
        if manages {
            let total = self.namespaces.allocated().map(|(_, n)| u128::from(n.namespace.volume.geometry().bytes()));
            let left = u128::from(self.quota_left());
            id.tnvmcap = (total.sum::<u128>() + left).into();
            id.unvmcap = left.into();
        }
    }
}

fn fill_io_part(id: &mut IdentifyController) {
    id.sqes = EntrySize::new().with_required(Sqe::SIZE_LOG2).with_maximum(Sqe::SIZE_LOG2);
    id.cqes = EntrySize::new().with_required(4).with_maximum(4);
    id.oncs = NvmCommandSupport::new()
        .with_compare(true)
        .with_write_uncorrectable(true)
        .with_dataset_management(true)
        .with_write_zeroes(true)
        .with_save_select(true)
        .with_reservations(true)
        .with_timestamp(true)
        .with_verify(true)
        .with_copy(true);
    id.fuses = FusedSupport::new().with_compare_and_write(true);
    id.fna = FormatAttributes::new().with_no_broadcast(true);
    // Namespaces come and go, and most have one: those without say so in their own structure (CNS 08h).
    id.vwc = VolatileWriteCache::new().with_present(true).with_flush(FlushBehavior::BROADCAST);
    id.awun_z = limits::AWUN_Z;
    id.awupf_z = limits::AWUPF_Z;
    id.acwu_z = limits::ACWU_Z;
    id.cdfs = limits::CDFS;
    id.sgls = data::SGLS;
}

/// What a card's engine can do of it.
fn limit_io_part(id: &mut IdentifyController) {
    id.oncs =
        NvmCommandSupport::new().with_compare(true).with_write_zeroes(true).with_save_select(true).with_timestamp(true);
    (id.fuses, id.cdfs) = (FusedSupport::new(), 0);
    id.sgls = SglSupport::new();
}

/// CNS 06h.
fn controller_nvm_data() -> IdentifyControllerNvm {
    let mut id = IdentifyControllerNvm::new_zeroed();
    id.vsl = limits::VSL;
    id.wzsl = limits::WZSL;
    id.wusl = limits::WUSL;
    id.dmrl = limits::DMRL;
    id.dmrsl = limits::DMRSL;
    id.dmsl = limits::DMSL;
    id.wzdsl = limits::WZDSL;
    id
}

/// A list of the identifiers greater than the command's (CNS 02h, 07h, 10h, 1Ah).
fn listed_after(nsid: NamespaceId, ids: impl Iterator<Item = u32>) -> Result<NamespaceList, Status> {
    if nsid.0 >= NamespaceId::MAX.0 {
        return Err(Status::INVALID_NAMESPACE_OR_FORMAT);
    }
    Ok(NamespaceList::new(ids.filter(|&id| id > nsid.0).map(NamespaceId)))
}

/// CNS 03h.
fn descriptors(namespace: &Namespace) -> [u8; IDENTIFY_SIZE] {
    let identity = &namespace.identity;
    let has_eui64 = identity.eui64 != [0; 8];
    let eui64 = has_eui64.then_some((NamespaceIdType::EUI64, &identity.eui64[..]));
    let others = [
        (NamespaceIdType::NGUID, &identity.uuid[..]),
        (NamespaceIdType::UUID, &identity.uuid[..]),
        (NamespaceIdType::CSI, &[Csi::NVM.0][..]),
    ];
    let mut list = Vec::with_capacity(IDENTIFY_SIZE);
    for (kind, id) in eui64.into_iter().chain(others) {
        list.extend_from_slice(NamespaceDescriptor::new(kind).as_bytes());
        list.extend_from_slice(id);
    }
    let mut bytes = [0; IDENTIFY_SIZE];
    bytes[..list.len()].copy_from_slice(&list);
    bytes
}

/// What all namespaces have in common (CNS 00h, NSID FFFFFFFFh).
fn common_data() -> IdentifyNamespace {
    let mut id = IdentifyNamespace::new_zeroed();
    id.nsfeat = NamespaceFeatures::new().with_uid_never_reused(true);
    id.nlbaf_z = FORMATS.len() as u8 - 1;
    for (format, size) in id.lbaf.iter_mut().zip(FORMATS) {
        *format = LbaFormat { lbads: size.shift() as u8, ..LbaFormat::default() };
    }
    id.mssrl = limits::MSSRL;
    id.mcl = limits::MCL;
    id.msrc_z = limits::MSRC_Z;
    id
}

/// CNS 00h and 11h.
fn namespace_data(shown: &Shown<'_>) -> IdentifyNamespace {
    let Shown { namespace, geometry, read_only, .. } = shown;
    let shift = geometry.block_size.shift();
    let mut id = common_data();
    id.nsze = geometry.blocks.0;
    id.ncap = geometry.blocks.0;
    id.nuse = namespace.allocated.load(Ordering::Relaxed).div_ceil(1 << shift).min(geometry.blocks.0);
    let index = FORMATS.iter().position(|size| *size == geometry.block_size).expect("every block size has a format");
    id.flbas = FormattedLbaSize::new().with_index(index as u8);
    fill_metadata(&mut id, namespace);
    id.nmic = sharing(namespace);
    id.rescap = reservations(shown);
    if geometry.deallocate {
        // Zeroes that are written have metadata, which deallocated blocks have not.
        let write_zeroes = namespace.volume.metadata().shown().is_none();
        id.dlfeat = DeallocateFeatures::new().with_read(DeallocatedRead::ZEROES).with_write_zeroes(write_zeroes);
    }
    // Whole pages of the medium are best, whatever the block size.
    let page_z = (4096 >> shift) - 1;
    id.nsfeat = id.nsfeat.with_optperf(1);
    (id.npwg_z, id.npwa_z, id.npdg_z, id.npda_z, id.nows_z) = (page_z, page_z, page_z, page_z, page_z);
    id.nvmcap = u128::from(geometry.bytes()).into();
    id.nsattr = attributes(shown.geometry.read_only || *read_only);
    id.nguid = namespace.identity.uuid;
    id.eui64 = namespace.identity.eui64;
    id
}

/// What a namespace can do with metadata, and does.
fn fill_metadata(id: &mut IdentifyNamespace, namespace: &Namespace) {
    let metadata = namespace.volume.metadata();
    if metadata == Metadata::Never {
        return;
    }
    id.nlbaf_z = formats(namespace) as u8 - 1;
    for (format, size) in id.lbaf[FORMATS.len()..].iter_mut().zip(FORMATS) {
        *format = LbaFormat { ms: METADATA_SIZE as u16, lbads: size.shift() as u8, rp: RelativePerformance::DEGRADED };
    }
    id.mc = MetadataCapabilities::new().with_extended(true).with_separate(true);
    let types = ProtectionCapabilities::new().with_type1(true).with_type2(true).with_type3(true);
    id.dpc = types.with_first(true).with_last(true);
    if let Some(shown) = metadata.shown() {
        let index = id.flbas.index() + FORMATS.len() as u8;
        id.flbas = id.flbas.with_index(index).with_metadata_extended(shown.extended);
        id.dps = ProtectionSettings::new().with_pit(shown.protection).with_first(shown.first && shown.protection != 0);
    }
}

/// CNS 08h and 1Fh.
fn independent_data(shown: &Shown<'_>) -> IdentifyNamespaceIndependent {
    let mut id = IdentifyNamespaceIndependent::new_zeroed();
    // Not that there is no volatile write cache, whatever the volume has now: one can be put in while the guest runs.
    id.nsfeat = CommonNamespaceFeatures::new().with_uid_never_reused(true);
    id.nmic = sharing(shown.namespace);
    id.rescap = reservations(shown);
    id.nsattr = attributes(shown.geometry.read_only || shown.read_only);
    id.nstat = NamespaceStatus::new().with_ready(true);
    id
}

fn sharing(namespace: &Namespace) -> NamespaceSharing {
    NamespaceSharing::new().with_shared(namespace.is_shared())
}

fn reservations(shown: &Shown<'_>) -> ReservationCapabilities {
    if shown.reserves && shown.namespace.is_shared() { RESCAP } else { ReservationCapabilities::new() }
}

fn attributes(write_protected: bool) -> NamespaceAttributes {
    NamespaceAttributes::new().with_write_protected(write_protected)
}
