//! Get Log Page (Base 5.1.12), and what the log pages are made from.

use std::{mem::offset_of, time::Instant};

use millrace_block::BlockSize;
use millrace_memory::{Access, SegmentCursor};
use millrace_nvme_spec::{
    command::{Csi, NamespaceId, Sqe},
    identify::{NamespaceList, padded},
    log::{
        ActiveFirmware, CommandEffects, CommandEffectsLog, CriticalWarning, ErrorEntry, FirmwareSlotLog, GetLogPageCdw10,
        GetLogPageCdw11, GetLogPageCdw14, LogId, LogPageSupport, ReservationNotification, ReservationNotificationType,
        SmartLog, SupportedLogPages, log_page_bytes,
    },
    status::Status,
};
use zerocopy::{FromZeros, IntoBytes};

use super::{
    super::{
        controller::Controller,
        data,
        state::{self, ERROR_ENTRIES, RESERVATION_NOTICES},
    },
    Progress, done, effects, monotonic_millis,
};

/// The composite temperature in kelvins: a volume has none of its own.
const TEMPERATURE: u16 = 298;
/// Spare capacity: there is always all of it, and a warning is due below this percentage.
const SPARE_PERCENT: u8 = 100;
const SPARE_THRESHOLD_PERCENT: u8 = 10;

/// The log pages there are.
const PAGES: [LogId; 7] = [
    LogId::SUPPORTED,
    LogId::ERROR,
    LogId::SMART,
    LogId::FIRMWARE_SLOT,
    LogId::CHANGED_NAMESPACES,
    LogId::COMMAND_EFFECTS,
    LogId::RESERVATION,
];

/// Measures the time with commands in the I/O queues.
#[derive(Debug, Default)]
pub(super) struct BusyClock {
    looked: Option<Instant>,
    /// I/O commands started until then.
    commands: u64,
    /// Time not yet counted, below a microsecond.
    nanos: u64,
}

impl Controller {
    /// Get Log Page.
    pub(super) fn get_log_page(&mut self, sqe: &Sqe) -> Progress {
        let (cdw10, cdw11) = (GetLogPageCdw10::from_bits(sqe.cdw10), GetLogPageCdw11::from_bits(sqe.cdw11));
        let cdw14 = GetLogPageCdw14::from_bits(sqe.cdw14);
        let lid = cdw10.lid();
        if !PAGES.contains(&lid) {
            return Err(Status::INVALID_LOG_PAGE);
        }
        // Every page is the controller's, and none has an index of its own to its entries.
        if sqe.nsid.is_single() {
            self.check_valid(sqe.nsid)?;
            return Err(self.invalid(1, 0));
        }
        if cdw14.ot() {
            return Err(self.invalid(14, 23));
        }
        let mut page = self.log_page(lid);
        if lid == LogId::COMMAND_EFFECTS && cdw14.csi() != Csi::NVM {
            // Of a command set that there is not, every admin command and no I/O command is supported. The usual tool asks for
            // the zoned one first, and takes a refusal for the end.
            let io = offset_of!(CommandEffectsLog, io);
            page[io..io + size_of::<[CommandEffects; 256]>()].fill(0);
        }
        let offset = u64::from(sqe.cdw13) << 32 | u64::from(sqe.cdw12);
        let rest = usize::try_from(offset).ok().and_then(|offset| page.get(offset..)).ok_or_else(|| self.invalid(12, 0))?;
        if !offset.is_multiple_of(4) {
            return Err(self.invalid(12, 0));
        }
        self.send_log(sqe, rest, log_page_bytes(cdw10, cdw11))?;
        if !cdw10.rae() {
            // Before the completion: were it after, and this process ended in between, the guest would never hear of such events again.
            // The other way round it hears of them once too often.
            self.clear_events(lid);
            self.admin.log_read = Some(lid);
        }
        Ok(done(0))
    }

    /// A log page was read, and the guest knows: what it told is told. Not before, or it would be lost if this process ended in
    /// between.
    pub(crate) fn after_log_page(&mut self) {
        if let Some(lid) = self.admin.log_read.take() {
            self.consume(lid);
        }
    }

    /// Sends `len` bytes: those of the page, then zeroes.
    fn send_log(&mut self, sqe: &Sqe, bytes: &[u8], len: u64) -> Result<(), Status> {
        if len > self.config.max_transfer() {
            return Err(self.invalid(10, 16));
        }
        let page_size = self.page_size();
        data::resolve(&self.memory, page_size, sqe, len, Access::Write, &mut self.segments)?;
        self.count_administered(len);
        let bytes = bytes.get(..len as usize).unwrap_or(bytes);
        data::copy_out(&self.segments, bytes);
        let mut cursor = SegmentCursor::new(&self.segments);
        cursor.skip(bytes.len());
        cursor.fill_rest(0);
        Ok(())
    }

    fn log_page(&self, lid: LogId) -> Vec<u8> {
        match lid {
            LogId::SUPPORTED => {
                let mut log = SupportedLogPages::new_zeroed();
                for lid in PAGES {
                    log.lids[usize::from(lid.0)] = LogPageSupport::new().with_lsupp(true);
                }
                log.as_bytes().to_vec()
            }
            LogId::ERROR => self.error_log(),
            LogId::SMART => self.smart_log().as_bytes().to_vec(),
            LogId::FIRMWARE_SLOT => {
                let mut log = FirmwareSlotLog::new_zeroed();
                log.afi = ActiveFirmware::new().with_active_slot(1);
                log.frs[0] = padded(env!("CARGO_PKG_VERSION"));
                log.as_bytes().to_vec()
            }
            LogId::CHANGED_NAMESPACES => NamespaceList::new(self.changed_namespaces()).as_bytes().to_vec(),
            LogId::COMMAND_EFFECTS => effects::log(&self.config).as_bytes().to_vec(),
            _ => self.reservation_log().as_bytes().to_vec(),
        }
    }

    /// What reading a page with Retain Asynchronous Event cleared does to the page.
    fn consume(&self, lid: LogId) {
        let logs = &self.state.logs;
        match lid {
            LogId::CHANGED_NAMESPACES => logs.changed_namespaces.iter().for_each(|word| word.set(0)),
            LogId::RESERVATION if logs.notices_read.get() < logs.notices_logged.get() => {
                logs.notices_read.set(self.oldest_notice() + 1);
            }
            _ => {}
        }
    }

    fn changed_namespaces(&self) -> impl Iterator<Item = NamespaceId> {
        let words = &self.state.logs.changed_namespaces;
        (1..=self.namespaces.largest())
            .filter(|&nsid| words.get(nsid as usize / 64).is_some_and(|word| word.get() >> (nsid % 64) & 1 != 0))
            .map(NamespaceId)
    }

    /// Newest first; unused entries are zero.
    fn error_log(&self) -> Vec<u8> {
        let logs = &self.state.logs;
        let count = logs.error_count.get();
        let mut log = Vec::with_capacity(ERROR_ENTRIES * size_of::<ErrorEntry>());
        for number in (0..count).rev().take(ERROR_ENTRIES) {
            for word in &logs.errors[(number % ERROR_ENTRIES as u64) as usize] {
                log.extend_from_slice(&word.get().to_le_bytes());
            }
        }
        log.resize(ERROR_ENTRIES * size_of::<ErrorEntry>(), 0);
        log
    }

    /// Critical warnings that are present now.
    pub(super) fn critical_warning(&self) -> CriticalWarning {
        let features = &self.state.features;
        let over = u32::from(TEMPERATURE) >= features.temperature_over.get();
        let under = u32::from(TEMPERATURE) <= features.temperature_under.get();
        CriticalWarning::new().with_temperature(over || under)
    }

    fn smart_log(&self) -> SmartLog {
        // A data unit is a thousand blocks of 512 bytes.
        let units = |bytes: u64| u128::from(bytes.div_ceil(1000 * u64::from(BlockSize::B512.bytes()))).into();
        let (logs, counters) = (&self.state.logs, &self.counters);
        let mut log = SmartLog::new_zeroed();
        log.critical_warning = self.critical_warning();
        log.composite_temperature = TEMPERATURE.into();
        log.available_spare = SPARE_PERCENT;
        log.available_spare_threshold = SPARE_THRESHOLD_PERCENT;
        log.data_units_read = units(counters.bytes_read);
        log.data_units_written = units(counters.bytes_written);
        log.host_reads = u128::from(counters.read_commands).into();
        log.host_writes = u128::from(counters.write_commands).into();
        log.controller_busy_minutes = u128::from(logs.busy_micros.get() / 60_000_000).into();
        log.power_cycles = u128::from(logs.power_cycles.get()).into();
        let on_millis = monotonic_millis().saturating_sub(logs.powered_on.get());
        log.power_on_hours = u128::from(on_millis / 3_600_000).into();
        log.unsafe_shutdowns = u128::from(logs.unsafe_shutdowns.get()).into();
        log.media_errors = u128::from(counters.media_errors).into();
        log.error_log_entries = u128::from(logs.error_count.get()).into();
        log
    }

    /// Counts the time since the last turn as busy when commands ran in it.
    pub(super) fn count_busy_time(&mut self, now: Instant) {
        let counters = &self.counters;
        let commands = counters.read_commands + counters.write_commands + counters.other_commands;
        let clock = &mut self.admin.busy;
        let (was, started) = (clock.looked.replace(now), commands != clock.commands);
        clock.commands = commands;
        if !started && self.has_rest() && !self.is_card_at_work() {
            return;
        }
        let Some(was) = was else { return };
        let clock = &mut self.admin.busy;
        clock.nanos += now.saturating_duration_since(was).as_nanos() as u64;
        let busy = &self.state.logs.busy_micros;
        busy.set(busy.get() + clock.nanos / 1000);
        clock.nanos %= 1000;
    }

    /// Power came, for the first time or again: the counters of the SMART log that count it.
    pub(crate) fn count_power_cycle(&mut self, was_shut_down: bool) {
        let logs = &self.state.logs;
        if logs.power_cycles.get() == 0 {
            logs.powered_on.set(monotonic_millis());
        } else if !was_shut_down {
            logs.unsafe_shutdowns.set(logs.unsafe_shutdowns.get() + 1);
        }
        logs.power_cycles.set(logs.power_cycles.get() + 1);
    }

    /// The number of the oldest notice that is unread and not overwritten.
    fn oldest_notice(&self) -> u64 {
        let logs = &self.state.logs;
        logs.notices_read.get().max(logs.notices_logged.get().saturating_sub(RESERVATION_NOTICES as u64))
    }

    pub(super) fn log_notice(&self, nsid: NamespaceId, kind: ReservationNotificationType) {
        let logs = &self.state.logs;
        let number = logs.notices_logged.get();
        logs.notices[(number % RESERVATION_NOTICES as u64) as usize].set(u64::from(kind.0) << 32 | u64::from(nsid.0));
        state::commit();
        logs.notices_logged.set(number + 1);
    }

    /// The oldest notice, or an empty page.
    fn reservation_log(&self) -> ReservationNotification {
        let logs = &self.state.logs;
        let mut page = ReservationNotification::new_zeroed();
        let (number, logged) = (self.oldest_notice(), logs.notices_logged.get());
        if number < logged {
            let notice = logs.notices[(number % RESERVATION_NOTICES as u64) as usize].get();
            page.lpc = number + 1;
            page.kind = ReservationNotificationType((notice >> 32) as u8);
            page.nsid = NamespaceId(notice as u32);
            page.available = (logged - number - 1).min(255) as u8;
        }
        page
    }
}
