//! Reservations: which of several hosts may write a namespace that they share (Base 8.1.22).

use millrace_nvme_spec::{
    NvmOpcode,
    reservation::{
        AcquireAction, AcquireCdw10, AcquireData, RegisterAction, RegisterCdw10, RegisterData, RegisteredControllerExtended,
        ReleaseAction, ReleaseCdw10, ReleaseData, ReportCdw11, ReservationStatusExtended, ReservationType,
    },
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::{
    command::Command,
    dma::DmaBuffer,
    namespace::{CommandError, Namespace},
};

/// How a namespace is reserved, as its controller has reported it.
#[derive(Clone, Debug)]
pub struct Reservation {
    /// In which way; `NONE`: it is not.
    pub kind: ReservationType,
    /// Counts registrations, clears and preempts.
    pub generation: u32,
    /// Whether it outlives a loss of power.
    pub persists: bool,
    /// Who is registered. Of more than the buffer had room for the first ones.
    pub registrants: Vec<RegisteredControllerExtended>,
}

/// The commands. Each puts what it says at the buffer's start; keys are a host's own, and not 0.
impl Namespace {
    /// Reservation Register (Base 7.6): this host takes part, by a key.
    ///
    /// # Errors
    /// [`CommandError::BadReservation`] without a key; [`CommandError::BufferLength`] for a buffer of less than 16 bytes.
    pub fn register(&self, key: u64, buffer: &DmaBuffer) -> Result<Command, CommandError> {
        self.registration(RegisterAction::REGISTER, RegisterData { crkey: 0, nrkey: keyed(key)? }, buffer)
    }

    /// Reservation Register: this host has another key from now on.
    ///
    /// # Errors
    /// As [`register`](Self::register).
    pub fn replace_key(&self, key: u64, next: u64, buffer: &DmaBuffer) -> Result<Command, CommandError> {
        self.registration(RegisterAction::REPLACE, RegisterData { crkey: keyed(key)?, nrkey: keyed(next)? }, buffer)
    }

    /// Reservation Register: this host takes part no more, and what it holds alone is released.
    ///
    /// # Errors
    /// As [`register`](Self::register).
    pub fn unregister(&self, key: u64, buffer: &DmaBuffer) -> Result<Command, CommandError> {
        self.registration(RegisterAction::UNREGISTER, RegisterData { crkey: keyed(key)?, nrkey: 0 }, buffer)
    }

    fn registration(&self, action: RegisterAction, data: RegisterData, buffer: &DmaBuffer) -> Result<Command, CommandError> {
        let cdw10 = RegisterCdw10::new().with_rrega(action).into_bits();
        self.reserving(NvmOpcode::RESERVATION_REGISTER, cdw10, &data, buffer)
    }

    /// Reservation Acquire (Base 7.5) of a registered host.
    ///
    /// # Errors
    /// As [`register`](Self::register); also for a kind of reservation that the namespace has not.
    pub fn acquire(&self, kind: ReservationType, key: u64, buffer: &DmaBuffer) -> Result<Command, CommandError> {
        self.acquisition(AcquireAction::ACQUIRE, kind, AcquireData { crkey: keyed(key)?, prkey: 0 }, buffer)
    }

    /// Reservation Acquire, Preempt: those of another key are registered no more, and what they hold is this host's. `abort` ends their
    /// commands as well.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub fn preempt(
        &self,
        kind: ReservationType,
        (key, other): (u64, u64),
        abort: bool,
        buffer: &DmaBuffer,
    ) -> Result<Command, CommandError> {
        let action = if abort { AcquireAction::PREEMPT_AND_ABORT } else { AcquireAction::PREEMPT };
        self.acquisition(action, kind, AcquireData { crkey: keyed(key)?, prkey: other }, buffer)
    }

    fn acquisition(
        &self,
        action: AcquireAction,
        kind: ReservationType,
        data: AcquireData,
        buffer: &DmaBuffer,
    ) -> Result<Command, CommandError> {
        let cdw10 = AcquireCdw10::new().with_racqa(action).with_rtype(self.offered(kind)?).into_bits();
        self.reserving(NvmOpcode::RESERVATION_ACQUIRE, cdw10, &data, buffer)
    }

    /// Reservation Release (Base 7.7) of what this host holds in this way.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub fn release(&self, kind: ReservationType, key: u64, buffer: &DmaBuffer) -> Result<Command, CommandError> {
        let cdw10 = ReleaseCdw10::new().with_rrela(ReleaseAction::RELEASE).with_rtype(self.offered(kind)?).into_bits();
        self.reserving(NvmOpcode::RESERVATION_RELEASE, cdw10, &ReleaseData { crkey: keyed(key)? }, buffer)
    }

    /// Reservation Release, Clear: nobody holds it or is registered any more.
    ///
    /// # Errors
    /// As [`register`](Self::register).
    pub fn clear_reservation(&self, key: u64, buffer: &DmaBuffer) -> Result<Command, CommandError> {
        let cdw10 = ReleaseCdw10::new().with_rrela(ReleaseAction::CLEAR).into_bits();
        self.reserving(NvmOpcode::RESERVATION_RELEASE, cdw10, &ReleaseData { crkey: keyed(key)? }, buffer)
    }

    /// Reservation Report (Base 7.8) into all of the buffer, for [`Reservation::read`]. It is the one with host identifiers of 128 bits: a
    /// controller that was not [told](crate::Controller::set_host_identifier) such a one refuses it.
    ///
    /// # Errors
    /// [`CommandError::BufferLength`] for a buffer of less than 64 bytes.
    pub fn report_reservation(&self, buffer: &DmaBuffer) -> Result<Command, CommandError> {
        let expected = size_of::<ReservationStatusExtended>();
        if buffer.len() < expected {
            return Err(CommandError::BufferLength { len: buffer.len() as u64, expected: expected as u64 });
        }
        let dwords = u32::try_from(buffer.len() / 4).unwrap_or(u32::MAX);
        let mut command = Command::nvm(NvmOpcode::RESERVATION_REPORT).with_data(buffer.slice(0, dwords as usize * 4));
        command.sqe.nsid = self.nsid();
        command.sqe.cdw10 = dwords - 1;
        command.sqe.cdw11 = ReportCdw11::new().with_eds(true).into_bits();
        Ok(command)
    }

    fn offered(&self, kind: ReservationType) -> Result<ReservationType, CommandError> {
        let has = self.identify().rescap;
        let offered = match kind {
            ReservationType::WRITE_EXCLUSIVE => has.write_exclusive(),
            ReservationType::EXCLUSIVE_ACCESS => has.exclusive_access(),
            ReservationType::WRITE_EXCLUSIVE_REGISTRANTS_ONLY => has.write_exclusive_registrants_only(),
            ReservationType::EXCLUSIVE_ACCESS_REGISTRANTS_ONLY => has.exclusive_access_registrants_only(),
            ReservationType::WRITE_EXCLUSIVE_ALL_REGISTRANTS => has.write_exclusive_all_registrants(),
            ReservationType::EXCLUSIVE_ACCESS_ALL_REGISTRANTS => has.exclusive_access_all_registrants(),
            _ => false,
        };
        offered.then_some(kind).ok_or(CommandError::BadReservation("the namespace has no reservation of this kind"))
    }

    fn reserving<T: IntoBytes + Immutable>(
        &self,
        opcode: NvmOpcode,
        cdw10: u32,
        data: &T,
        buffer: &DmaBuffer,
    ) -> Result<Command, CommandError> {
        let expected = size_of::<T>();
        if buffer.len() < expected {
            return Err(CommandError::BufferLength { len: buffer.len() as u64, expected: expected as u64 });
        }
        buffer.write_value(0, data);
        let mut command = Command::nvm(opcode).with_data(buffer.slice(0, expected));
        (command.sqe.nsid, command.sqe.cdw10) = (self.nsid(), cdw10);
        Ok(command)
    }
}

fn keyed(key: u64) -> Result<u64, CommandError> {
    if key == 0 { Err(CommandError::BadReservation("a key is not 0")) } else { Ok(key) }
}

impl Reservation {
    /// What a [report](Namespace::report_reservation) has put into the buffer. The number of registrants is the controller's word, and those that
    /// are not in the buffer are left out.
    pub fn read(buffer: &DmaBuffer) -> Self {
        let bytes = buffer.read_vec(0, buffer.len());
        let (header, rest) = ReservationStatusExtended::read_from_prefix(&bytes).expect("a report was made for the buffer");
        let status = header.status;
        let (entries, _) = rest.as_chunks::<{ size_of::<RegisteredControllerExtended>() }>();
        let registrants = entries.iter().take(usize::from(status.registrants.get()));
        let registrants = registrants.map(|bytes| zerocopy::transmute!(*bytes)).collect();
        Self { kind: status.rtype, generation: status.generation, persists: status.ptpls == 1, registrants }
    }
}
