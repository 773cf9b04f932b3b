//! Get Features and Set Features (Base 5.1.11, 5.1.25; NVM 4.1.3).

use std::time::{Duration, Instant};

use millrace_engine::{ShardContext, TaskSlot};
use millrace_nvme_spec::{
    command::{NamespaceId, Sqe},
    features::{
        ArbitrationFeature, AsyncEventFeature, ErrorRecoveryFeature, FeatureCapabilities, FeatureId, FeatureSelect,
        GetFeaturesCdw10, HostBehavior, HostIdentifierFeature, InterruptCoalescingFeature, InterruptVectorFeature,
        NumberOfQueuesFeature, PowerManagementFeature, ReservationMaskFeature, ReservationPersistenceFeature,
        SetFeaturesCdw10, TemperatureThresholdFeature, ThresholdType, Timestamp, TimestampAttributes, TimestampOrigin,
        WriteAtomicityFeature, WriteCacheFeature,
    },
    log::CriticalWarning,
    status::Status,
};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    super::{
        controller::{CommandToken, Controller, Outcome},
        io::limits,
        state::{Cell, NamespaceFeatureState},
    },
    Progress, done,
    identify::{RAB, WCTEMP},
    monotonic_millis,
};

/// What TMPSEL names: the composite temperature, or (Set Features only) every sensor there is.
const COMPOSITE: u8 = 0;
const ALL_SENSORS: u8 = 15;

/// The events that can be configured.
const EVENTS: AsyncEventFeature = AsyncEventFeature::new()
    .with_critical_warnings(CriticalWarning::new().with_temperature(true))
    .with_namespace_attribute(true);

/// Bits of Reservation Notification Mask that exist.
const RESERVATION_MASK: ReservationMaskFeature =
    ReservationMaskFeature::new().with_regpre(true).with_resrel(true).with_respre(true);

/// What a feature allows; `None` when there is no such feature.
fn capabilities(fid: FeatureId) -> Option<FeatureCapabilities> {
    let controller = FeatureCapabilities::new().with_changeable(true);
    let namespace = controller.with_namespace_specific(true);
    Some(match fid {
        FeatureId::ARBITRATION
        | FeatureId::POWER_MANAGEMENT
        | FeatureId::TEMPERATURE_THRESHOLD
        | FeatureId::VOLATILE_WRITE_CACHE
        | FeatureId::NUMBER_OF_QUEUES
        | FeatureId::INTERRUPT_COALESCING
        | FeatureId::INTERRUPT_VECTOR_CONFIGURATION
        | FeatureId::WRITE_ATOMICITY_NORMAL
        | FeatureId::ASYNC_EVENT_CONFIGURATION
        | FeatureId::TIMESTAMP
        | FeatureId::HOST_BEHAVIOR_SUPPORT
        | FeatureId::HOST_IDENTIFIER => controller,
        FeatureId::ERROR_RECOVERY | FeatureId::RESERVATION_NOTIFICATION_MASK => namespace,
        FeatureId::RESERVATION_PERSISTENCE => FeatureCapabilities::new().with_namespace_specific(true),
        _ => return None,
    })
}

/// How long who turns the write cache off on a card waits for commands that wait themselves: below what an admin command may take.
const PATIENCE: Duration = Duration::from_secs(2);

impl Controller {
    /// Feature values as after a reset.
    pub(super) fn reset_features(&mut self) {
        let last_z = self.config.queues - 1;
        let features = &self.state.features;
        features.arbitration.set(default_value(FeatureId::ARBITRATION));
        features.power_state.set(0);
        features.temperature_over.set(u32::from(WCTEMP));
        features.temperature_under.set(0);
        features.write_cache.set(default_value(FeatureId::VOLATILE_WRITE_CACHE));
        features.queues.set(NumberOfQueuesFeature::new().with_nsq_z(last_z).with_ncq_z(last_z).into_bits());
        features.interrupt_coalescing.set(0);
        features.write_atomicity.set(0);
        features.async_events.set(0);
        features.host_behavior.set(0);
        features.timestamp.set(0);
        features.timestamp_taken.set(monotonic_millis());
        features.timestamp_origin.set(0);
        features.coalescing_disabled.iter().for_each(|word| word.set(0));
        for namespace in &features.namespaces {
            namespace.time_limited_recovery.set(0);
            namespace.reservation_mask.set(0);
        }
        features.host_id_size.set(0);
        features.host_id.iter().for_each(|byte| byte.set(0));
        self.forget_rights();
    }

    /// Whether writes may stay in a volatile cache; if not, each must be durable when it completes.
    #[inline]
    pub(crate) fn write_cache_enabled(&self) -> bool {
        WriteCacheFeature::from_bits(self.state.features.write_cache.get()).wce()
    }

    /// Commands to take from one queue before the next has its turn (Arbitration Burst).
    #[inline]
    pub(crate) fn arbitration_burst(&self) -> u32 {
        let ab = ArbitrationFeature::from_bits(self.state.features.arbitration.get()).ab();
        if ab == 7 { u32::MAX } else { 1 << ab }
    }

    /// Get Features (Base 5.1.11).
    pub(super) fn get_features(&mut self, sqe: &Sqe) -> Progress {
        let cdw10 = GetFeaturesCdw10::from_bits(sqe.cdw10);
        let allowed = capabilities(cdw10.fid()).ok_or_else(|| self.invalid(10, 0))?;
        match cdw10.sel() {
            FeatureSelect::SUPPORTED_CAPABILITIES => Ok(done(allowed.into_bits())),
            FeatureSelect::CURRENT => {
                self.check_get_namespace(cdw10.fid(), allowed, sqe.nsid)?;
                self.current_value(cdw10.fid(), sqe).map(done)
            }
            // Nothing is saveable: what is saved is the default (Base 4.4).
            FeatureSelect::DEFAULT | FeatureSelect::SAVED => {
                self.check_get_namespace(cdw10.fid(), allowed, sqe.nsid)?;
                self.initial_value(cdw10.fid(), sqe).map(done)
            }
            _ => Err(self.invalid(10, 8)),
        }
    }

    fn check_get_namespace(&self, fid: FeatureId, allowed: FeatureCapabilities, nsid: NamespaceId) -> Result<(), Status> {
        if !allowed.namespace_specific() {
            // It is the controller's, whichever namespace is named: only Set Features is refused then (Base 4.4).
            return if nsid.is_single() { self.check_valid(nsid) } else { Ok(()) };
        }
        let about_reservations =
            matches!(fid, FeatureId::RESERVATION_NOTIFICATION_MASK | FeatureId::RESERVATION_PERSISTENCE);
        if nsid == NamespaceId::BROADCAST && !about_reservations {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT);
        }
        self.active(nsid).map(|_| ())
    }

    /// A feature of the controller is to be set, and the namespace a command names.
    fn check_controller_scope(&self, nsid: NamespaceId) -> Result<(), Status> {
        if !nsid.is_single() {
            return Ok(());
        }
        self.check_valid(nsid)?;
        Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC)
    }

    fn current_value(&mut self, fid: FeatureId, sqe: &Sqe) -> Result<u32, Status> {
        let features = &self.state.features;
        let namespace = features.namespaces.get(sqe.nsid.0 as usize);
        Ok(match fid {
            FeatureId::ARBITRATION => features.arbitration.get(),
            FeatureId::POWER_MANAGEMENT => features.power_state.get(),
            FeatureId::TEMPERATURE_THRESHOLD => threshold(sqe, |kind| match kind {
                ThresholdType::OVER => features.temperature_over.get(),
                _ => features.temperature_under.get(),
            })?,
            FeatureId::ERROR_RECOVERY => namespace.map_or(0, |n| u32::from(n.time_limited_recovery.get())),
            FeatureId::VOLATILE_WRITE_CACHE => features.write_cache.get(),
            FeatureId::NUMBER_OF_QUEUES => features.queues.get(),
            FeatureId::INTERRUPT_COALESCING => features.interrupt_coalescing.get(),
            FeatureId::INTERRUPT_VECTOR_CONFIGURATION => {
                let vector = self.vector(sqe)?;
                let (word, bit) = (vector / 64, vector % 64);
                let disabled = features.coalescing_disabled.get(usize::from(word)).is_some_and(|w| w.get() >> bit & 1 != 0);
                InterruptVectorFeature::new().with_iv(vector).with_cd(disabled).into_bits()
            }
            FeatureId::WRITE_ATOMICITY_NORMAL => features.write_atomicity.get(),
            FeatureId::ASYNC_EVENT_CONFIGURATION => features.async_events.get(),
            FeatureId::RESERVATION_NOTIFICATION_MASK => namespace.map_or(0, |n| u32::from(n.reservation_mask.get())),
            FeatureId::TIMESTAMP => {
                let timestamp = self.timestamp();
                self.send(sqe, timestamp.as_bytes())?;
                0
            }
            FeatureId::HOST_BEHAVIOR_SUPPORT => {
                let behavior = self.host_behavior();
                self.send(sqe, behavior.as_bytes())?;
                0
            }
            FeatureId::HOST_IDENTIFIER => {
                let id = features.host_id.each_ref().map(Cell::get);
                self.send_host_identifier(sqe, &id)?;
                0
            }
            _ => 0,
        })
    }

    /// The value after a reset.
    fn initial_value(&mut self, fid: FeatureId, sqe: &Sqe) -> Result<u32, Status> {
        match fid {
            FeatureId::TEMPERATURE_THRESHOLD => {
                threshold(sqe, |kind| if kind == ThresholdType::OVER { u32::from(WCTEMP) } else { 0 })
            }
            FeatureId::NUMBER_OF_QUEUES => {
                let last_z = self.config.queues - 1;
                Ok(NumberOfQueuesFeature::new().with_nsq_z(last_z).with_ncq_z(last_z).into_bits())
            }
            FeatureId::INTERRUPT_VECTOR_CONFIGURATION => self.vector(sqe).map(u32::from),
            FeatureId::TIMESTAMP => self.send(sqe, Timestamp::default().as_bytes()).map(|()| 0),
            FeatureId::HOST_BEHAVIOR_SUPPORT => self.send(sqe, HostBehavior::new_zeroed().as_bytes()).map(|()| 0),
            FeatureId::HOST_IDENTIFIER => self.send_host_identifier(sqe, &[0; 16]).map(|()| 0),
            _ => Ok(default_value(fid)),
        }
    }

    /// The interrupt vector that CDW11 names.
    fn vector(&self, sqe: &Sqe) -> Result<u16, Status> {
        let vector = InterruptVectorFeature::from_bits(sqe.cdw11).iv();
        if vector < self.config.vectors { Ok(vector) } else { Err(self.invalid(11, 0)) }
    }

    fn timestamp(&self) -> Timestamp {
        let features = &self.state.features;
        let passed = monotonic_millis().saturating_sub(features.timestamp_taken.get());
        let origin =
            if features.timestamp_origin.get() == 0 { TimestampOrigin::RESET } else { TimestampOrigin::SET_FEATURES };
        // 48 bits count on from 0.
        let millis = features.timestamp.get().wrapping_add(passed) & ((1 << 48) - 1);
        Timestamp::new(millis, TimestampAttributes::new().with_origin(origin))
    }

    fn host_behavior(&self) -> HostBehavior {
        let [acre, lbafee, cdfe_low, cdfe_high] = self.state.features.host_behavior.get().to_le_bytes();
        let mut behavior = HostBehavior::new_zeroed();
        behavior.acre = acre;
        behavior.lbafee = lbafee;
        behavior.cdfe = u16::from_le_bytes([cdfe_low, cdfe_high]);
        behavior
    }

    fn send_host_identifier(&mut self, sqe: &Sqe, id: &[u8; 16]) -> Result<(), Status> {
        let extended = HostIdentifierFeature::from_bits(sqe.cdw11).exhid();
        self.send(sqe, if extended { id } else { &id[..8] })
    }

    /// Set Features (Base 5.1.25).
    pub(super) fn set_features(&mut self, slot: TaskSlot<'_>, token: CommandToken, sqe: &Sqe) -> Progress {
        let cdw10 = SetFeaturesCdw10::from_bits(sqe.cdw10);
        let fid = cdw10.fid();
        let allowed = capabilities(fid).ok_or_else(|| self.invalid(10, 0))?;
        if cdw10.sv() {
            return Err(Status::FEATURE_NOT_SAVEABLE);
        }
        if !allowed.namespace_specific() {
            self.check_controller_scope(sqe.nsid)?;
        } else if sqe.nsid != NamespaceId::BROADCAST {
            self.active(sqe.nsid)?;
        }
        if fid == FeatureId::RESERVATION_PERSISTENCE && ReservationPersistenceFeature::from_bits(sqe.cdw11).ptpl() {
            // RESCAP says that reservations do not persist.
            return Err(self.invalid(11, 0));
        }
        if !allowed.changeable() {
            return Err(Status::FEATURE_NOT_CHANGEABLE);
        }
        let warnings = self.reported_warnings();
        let cached = self.write_cache_enabled();
        let turns_off = fid == FeatureId::VOLATILE_WRITE_CACHE && !WriteCacheFeature::from_bits(sqe.cdw11).wce();
        let flushes = turns_off && (cached || self.repeats);
        // What was written before has to become durable, and the volume takes no flush now. Nor is it known to be erased: the format may fail.
        if flushes && self.namespaces.attached().any(|attached| attached.formatting.get()) {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        let dw0 = self.set_value(fid, sqe)?;
        self.warnings_changed(warnings);
        if flushes {
            // Its host flushes no more. What is written from now on is durable when it completes; what was written before has to become so,
            // and what is being written.
            if self.port.is_some() {
                return Ok(self.begin_settling(token));
            }
            return Ok(self.write_caches_back(slot, token, true));
        }
        Ok(done(dw0))
    }

    /// On a card the engine is told first, so that what it takes from now on is durable; the flush comes when all that it took before has ended.
    fn begin_settling(&mut self, token: CommandToken) -> Outcome {
        self.reconcile();
        if let Some(port) = &mut self.port {
            port.settle(true);
        }
        self.admin.settling.push((token, Instant::now() + PATIENCE));
        Outcome::Held
    }

    /// Has who waits for the card go on to the flush. Returns work done.
    pub(super) fn finish_settling(&mut self, cx: &mut ShardContext<'_>) -> usize {
        if self.admin.settling.is_empty() {
            return 0;
        }
        if !self.is_card_quiet() {
            let is_late = self.admin.settling.iter().any(|(_, due)| cx.now() >= *due);
            if let Some(port) = self.port.as_mut().filter(|_| is_late) {
                port.call_off();
            }
            return 0;
        }
        let mut work = 0;
        while let Some(&(token, _)) = self.admin.settling.first() {
            // There will be a task another time; the doorbells wait as long.
            let Some(slot) = cx.reserve() else { return work };
            self.admin.settling.remove(0);
            if let Outcome::Done(completion) = self.write_caches_back(slot, token, true) {
                self.complete(token, completion);
            }
            work += 1;
        }
        self.forget_settling();
        work
    }

    /// Nobody waits for the card any more.
    pub(super) fn forget_settling(&mut self) {
        self.admin.settling.clear();
        if let Some(port) = &mut self.port {
            port.settle(false);
        }
    }

    fn set_value(&mut self, fid: FeatureId, sqe: &Sqe) -> Result<u32, Status> {
        let features = &self.state.features;
        let value = sqe.cdw11;
        match fid {
            FeatureId::ARBITRATION => features.arbitration.set(value & 0xffff_ff07),
            FeatureId::POWER_MANAGEMENT => {
                let feature = PowerManagementFeature::from_bits(value);
                if feature.ps() != 0 {
                    return Err(self.invalid(11, 0));
                }
                features.power_state.set(PowerManagementFeature::new().with_wh(feature.wh()).into_bits());
            }
            FeatureId::TEMPERATURE_THRESHOLD => self.set_threshold(value)?,
            FeatureId::ERROR_RECOVERY => {
                let feature = ErrorRecoveryFeature::from_bits(value);
                if feature.dulbe() {
                    return Err(self.invalid(11, 16));
                }
                self.each_namespace(sqe.nsid, |namespace| namespace.time_limited_recovery.set(feature.tler()));
            }
            FeatureId::VOLATILE_WRITE_CACHE => {
                let wce = WriteCacheFeature::from_bits(value).wce();
                features.write_cache.set(WriteCacheFeature::new().with_wce(wce).into_bits());
            }
            FeatureId::NUMBER_OF_QUEUES => return self.set_queues(value),
            FeatureId::INTERRUPT_COALESCING => {
                let feature = InterruptCoalescingFeature::from_bits(value);
                let kept = InterruptCoalescingFeature::new().with_thr_z(feature.thr_z()).with_time(feature.time());
                features.interrupt_coalescing.set(kept.into_bits());
            }
            FeatureId::INTERRUPT_VECTOR_CONFIGURATION => {
                let (vector, disabled) = (self.vector(sqe)?, InterruptVectorFeature::from_bits(value).cd());
                if let Some(word) = features.coalescing_disabled.get(usize::from(vector / 64)) {
                    let bit = 1 << (vector % 64);
                    word.set(if disabled { word.get() | bit } else { word.get() & !bit });
                }
            }
            FeatureId::WRITE_ATOMICITY_NORMAL => {
                let dn = WriteAtomicityFeature::from_bits(value).dn();
                features.write_atomicity.set(WriteAtomicityFeature::new().with_dn(dn).into_bits());
            }
            FeatureId::ASYNC_EVENT_CONFIGURATION => features.async_events.set(value & EVENTS.into_bits()),
            FeatureId::TIMESTAMP => self.set_timestamp(sqe)?,
            FeatureId::HOST_BEHAVIOR_SUPPORT => self.set_host_behavior(sqe)?,
            FeatureId::HOST_IDENTIFIER => self.set_host_identifier(sqe)?,
            FeatureId::RESERVATION_NOTIFICATION_MASK => {
                let mask = (value & RESERVATION_MASK.into_bits()) as u16;
                self.each_namespace(sqe.nsid, |namespace| namespace.reservation_mask.set(mask));
            }
            _ => return Err(Status::FEATURE_NOT_CHANGEABLE),
        }
        Ok(0)
    }

    /// Does something to the features of one attached namespace, or of all (broadcast).
    fn each_namespace(&self, nsid: NamespaceId, change: impl Fn(&NamespaceFeatureState)) {
        for attached in self.namespaces.attached() {
            if (nsid == NamespaceId::BROADCAST || attached.nsid == nsid.0)
                && let Some(namespace) = self.state.features.namespaces.get(attached.nsid as usize)
            {
                change(namespace);
            }
        }
    }

    fn set_threshold(&self, value: u32) -> Result<(), Status> {
        let feature = TemperatureThresholdFeature::from_bits(value);
        if feature.tmpsel() != COMPOSITE && feature.tmpsel() != ALL_SENSORS {
            return Err(self.invalid(11, 16));
        }
        let kelvins = u32::from(feature.tmpth());
        let features = &self.state.features;
        match feature.thsel() {
            ThresholdType::OVER => features.temperature_over.set(kelvins),
            ThresholdType::UNDER => features.temperature_under.set(kelvins),
            _ => return Err(self.invalid(11, 20)),
        }
        Ok(())
    }

    fn set_queues(&self, value: u32) -> Result<u32, Status> {
        let asked = NumberOfQueuesFeature::from_bits(value);
        if asked.nsq_z() == u16::MAX {
            return Err(self.invalid(11, 0));
        }
        if asked.ncq_z() == u16::MAX {
            return Err(self.invalid(11, 16));
        }
        if (1..=self.config.queues).any(|qid| self.sq_exists(qid) || self.cq_exists(qid)) {
            return Err(Status::COMMAND_SEQUENCE_ERROR);
        }
        let last_z = self.config.queues - 1;
        let granted =
            NumberOfQueuesFeature::new().with_nsq_z(asked.nsq_z().min(last_z)).with_ncq_z(asked.ncq_z().min(last_z));
        self.state.features.queues.set(granted.into_bits());
        Ok(granted.into_bits())
    }

    fn set_timestamp(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let timestamp: Timestamp = self.fetch(sqe)?;
        let features = &self.state.features;
        features.timestamp.set(timestamp.millis());
        features.timestamp_taken.set(monotonic_millis());
        features.timestamp_origin.set(1);
        Ok(())
    }

    fn set_host_behavior(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let behavior: HostBehavior = self.fetch(sqe)?;
        // Extended LBA formats, extended telemetry and dispersed namespaces do not exist here.
        let unknown = behavior.acre > 1 || behavior.lbafee > 1 || behavior.cdfe & !limits::CDFE != 0;
        if unknown || behavior.etdas != 0 || behavior.hdisns != 0 {
            return Err(Status::INVALID_FIELD);
        }
        let [low, high] = behavior.cdfe.to_le_bytes();
        self.state.features.host_behavior.set(u32::from_le_bytes([behavior.acre, behavior.lbafee, low, high]));
        Ok(())
    }

    fn set_host_identifier(&mut self, sqe: &Sqe) -> Result<(), Status> {
        let extended = HostIdentifierFeature::from_bits(sqe.cdw11).exhid();
        let mut id = [0; 16];
        if extended {
            id = self.fetch(sqe)?;
        } else {
            let short: [u8; 8] = self.fetch(sqe)?;
            id[..8].copy_from_slice(&short);
        }
        let features = &self.state.features;
        for (cell, byte) in features.host_id.iter().zip(id) {
            cell.set(byte);
        }
        features.host_id_size.set(if extended { 16 } else { 8 });
        self.forget_rights();
        Ok(())
    }
}

/// Values after a reset of the features that are nothing but a number.
fn default_value(fid: FeatureId) -> u32 {
    match fid {
        FeatureId::ARBITRATION => ArbitrationFeature::new().with_ab(RAB).into_bits(),
        FeatureId::VOLATILE_WRITE_CACHE => WriteCacheFeature::new().with_wce(true).into_bits(),
        _ => 0,
    }
}

/// A threshold of the composite temperature, the only one that can be read.
fn threshold(sqe: &Sqe, value: impl Fn(ThresholdType) -> u32) -> Result<u32, Status> {
    let asked = TemperatureThresholdFeature::from_bits(sqe.cdw11);
    match asked.thsel() {
        _ if asked.tmpsel() != COMPOSITE => Err(Status::INVALID_FIELD),
        kind @ (ThresholdType::OVER | ThresholdType::UNDER) => Ok(value(kind)),
        _ => Err(Status::INVALID_FIELD),
    }
}
