//! Reservation commands (Base 7.5 to 7.8, 8.1.22).

use bitfield_struct::bitfield;
use zerocopy::little_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::command::ControllerId;

wire_values! {
    /// Reservation Type (RTYPE; Base 7.5).
    ReservationType(u8) {
        NONE = 0, "No reservation";
        WRITE_EXCLUSIVE = 1, "Write Exclusive Reservation";
        EXCLUSIVE_ACCESS = 2, "Exclusive Access Reservation";
        WRITE_EXCLUSIVE_REGISTRANTS_ONLY = 3, "Write Exclusive - Registrants Only Reservation";
        EXCLUSIVE_ACCESS_REGISTRANTS_ONLY = 4, "Exclusive Access - Registrants Only Reservation";
        WRITE_EXCLUSIVE_ALL_REGISTRANTS = 5, "Write Exclusive - All Registrants Reservation";
        EXCLUSIVE_ACCESS_ALL_REGISTRANTS = 6, "Exclusive Access - All Registrants Reservation";
    }
}

impl ReservationType {
    /// Whether registrants other than the holder are let in as well.
    #[must_use]
    pub const fn admits_registrants(self) -> bool {
        matches!(self.0, 3..=6)
    }

    /// Whether every registrant holds the reservation.
    #[must_use]
    pub const fn is_all_registrants(self) -> bool {
        matches!(self.0, 5 | 6)
    }

    /// Whether those shut out may still read.
    #[must_use]
    pub const fn is_write_exclusive(self) -> bool {
        matches!(self.0, 1 | 3 | 5)
    }
}

/// Reservation Register, Command Dword 10 (Base 7.6).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct RegisterCdw10 {
    /// Reservation Register Action (RREGA).
    #[bits(3)]
    pub rrega: RegisterAction,
    /// Ignore Existing Key (IEKEY).
    pub iekey: bool,
    /// Dispersed Namespace Reservation Support (DISNSRS).
    pub disnsrs: bool,
    #[bits(25)]
    __: u32,
    /// Change Persist Through Power Loss State (CPTPL).
    #[bits(2)]
    pub cptpl: ChangePersistence,
}

wire_values! {
    /// Reservation Register Action (RREGA; Base 7.6).
    RegisterAction(u8) {
        REGISTER = 0, "Register Reservation Key";
        UNREGISTER = 1, "Unregister Reservation Key";
        REPLACE = 2, "Replace Reservation Key";
    }
}

wire_values! {
    /// Change Persist Through Power Loss State (CPTPL; Base 7.6).
    ChangePersistence(u8) {
        NO_CHANGE = 0, "No change to PTPL state";
        CLEAR = 2, "Set PTPL state to 0; reservations and registrants are released and cleared on power on";
        SET = 3, "Set PTPL state to 1; reservations and registrants persist across a power loss";
    }
}

/// Reservation Register data (Base 7.6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct RegisterData {
    /// Current Reservation Key (CRKEY).
    pub crkey: u64,
    /// New Reservation Key (NRKEY).
    pub nrkey: u64,
}

/// Reservation Acquire, Command Dword 10 (Base 7.5).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct AcquireCdw10 {
    /// Reservation Acquire Action (RACQA).
    #[bits(3)]
    pub racqa: AcquireAction,
    /// Ignore Existing Key (IEKEY); controllers of 1.3 and later refuse it.
    pub iekey: bool,
    /// Dispersed Namespace Reservation Support (DISNSRS).
    pub disnsrs: bool,
    #[bits(3)]
    __: u8,
    /// Reservation Type (RTYPE).
    #[bits(8)]
    pub rtype: ReservationType,
    __: u16,
}

wire_values! {
    /// Reservation Acquire Action (RACQA; Base 7.5).
    AcquireAction(u8) {
        ACQUIRE = 0, "Acquire";
        PREEMPT = 1, "Preempt";
        PREEMPT_AND_ABORT = 2, "Preempt and Abort";
    }
}

/// Reservation Acquire data (Base 7.5).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct AcquireData {
    /// Current Reservation Key (CRKEY).
    pub crkey: u64,
    /// Preempt Reservation Key (PRKEY).
    pub prkey: u64,
}

/// Reservation Release, Command Dword 10 (Base 7.7).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ReleaseCdw10 {
    /// Reservation Release Action (RRELA).
    #[bits(3)]
    pub rrela: ReleaseAction,
    /// Ignore Existing Key (IEKEY); controllers of 1.3 and later refuse it.
    pub iekey: bool,
    /// Dispersed Namespace Reservation Support (DISNSRS).
    pub disnsrs: bool,
    #[bits(3)]
    __: u8,
    /// Reservation Type (RTYPE).
    #[bits(8)]
    pub rtype: ReservationType,
    __: u16,
}

wire_values! {
    /// Reservation Release Action (RRELA; Base 7.7).
    ReleaseAction(u8) {
        RELEASE = 0, "Release";
        CLEAR = 1, "Clear";
    }
}

/// Reservation Release data (Base 7.7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct ReleaseData {
    /// Current Reservation Key (CRKEY).
    pub crkey: u64,
}

/// Reservation Report, Command Dword 10 (Base 7.8).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(transparent)]
pub struct ReportCdw10 {
    /// Number of Dwords (NUMD) to transfer, 0's based.
    pub numd_z: u32,
}

/// Reservation Report, Command Dword 11 (Base 7.8).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct ReportCdw11 {
    /// Extended Data Structure (EDS): 128-bit host identifiers.
    pub eds: bool,
    /// Dispersed Namespace Reservation Support (DISNSRS).
    pub disnsrs: bool,
    #[bits(30)]
    __: u32,
}

/// Reservation Status, header (Base 7.8). [`RegisteredController`]s follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct ReservationStatus {
    /// Generation (GEN): incremented by every successful register, clear and preempt.
    pub generation: u32,
    /// Reservation Type (RTYPE); zero if there is no reservation.
    pub rtype: ReservationType,
    /// Number of Registrants (REGSTRNT), at an odd offset.
    pub registrants: U16,
    _rsvd7: [u8; 2],
    /// Persist Through Power Loss State (PTPLS): 1 if it persists.
    pub ptpls: u8,
    _rsvd10: [u8; 14],
}

/// Reservation Status (Extended), header (Base 7.8). [`RegisteredControllerExtended`]s follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct ReservationStatusExtended {
    /// The fields it has in common with the short form.
    pub status: ReservationStatus,
    _rsvd24: [u8; 40],
}

/// Registrant, 64-bit host identifier (Base 7.8).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct RegisteredController {
    /// Controller ID (CNTLID); FFFFh if the controller is gone or elsewhere.
    pub cntlid: ControllerId,
    /// Reservation Status (RCSTS).
    pub rcsts: RegistrantStatus,
    _rsvd3: [u8; 5],
    /// Host Identifier (HOSTID).
    pub hostid: u64,
    /// Reservation Key (RKEY).
    pub rkey: u64,
}

/// Registrant, 128-bit host identifier (Base 7.8).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct RegisteredControllerExtended {
    /// Controller ID (CNTLID); FFFFh if the controller is gone or elsewhere.
    pub cntlid: ControllerId,
    /// Reservation Status (RCSTS).
    pub rcsts: RegistrantStatus,
    _rsvd3: [u8; 5],
    /// Reservation Key (RKEY).
    pub rkey: u64,
    /// Host Identifier (HOSTID).
    pub hostid: [u8; 16],
    _rsvd32: [u8; 32],
}

/// Reservation Status (RCSTS) of a registrant (Base 7.8).
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
pub struct RegistrantStatus {
    /// Holds Reservation (HLDR).
    pub holds: bool,
    #[bits(7)]
    __: u8,
}

assert_size!(
    RegisterData: 16, AcquireData: 16, ReleaseData: 8, ReportCdw10: 4, ReservationStatus: 24,
    ReservationStatusExtended: 64, RegisteredController: 24, RegisteredControllerExtended: 64,
);
