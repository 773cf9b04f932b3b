//! Controller registers (Base 3.1.4) and the way between disabled and ready (Base 3.5, 3.6, 3.7).
//!
//! ```text
//!              EN 0→1                        SHN
//!   Disabled ─────────► Ready ───────────────────► ShuttingDown (flush volumes, SHST = 2)
//!      ▲  └─ bad AQA …    │ └─ queue memory gone …     │
//!      │       │          ▼          │                 │
//!      │       └──────► Failed ◄─────┘                 │
//!      │                  │ EN 1→0, NSSR, FLR, vfio reset, disconnect
//!      └── Resetting ◄────┴────────────────────────────┘
//!          RDY falls when the last command in flight is done with guest memory
//! ```
//!
//! Each transition stores what was asked for first (CC), then what it changes, then what tells the guest (CSTS): a successor
//! that finds the two at odds starts the transition again, and every one may be started again.

use std::{
    cell::Cell,
    rc::Rc,
    time::{Duration, Instant},
};

use millrace_block::{BlockCount, BlockError, Lba, Operation, Request, Step};
use millrace_engine::{Launch, ShardContext, TaskSlot, reaper};
use millrace_engine_model::map::fastpath;
use millrace_nvme_spec::registers::{
    AdminQueueAttributes, Arbitration, Capabilities, CommandSetSelected, Configuration, ControllerStatus, NSSR_RESET,
    ShutdownNotification, ShutdownStatus, Version, offset,
};

use super::{controller::Controller, namespace::Attached, pci::offsets, state};
use crate::log_limit::LogLimit;

/// What VS and Identify Controller report. 1.4 is what stock drivers and firmware know best; what 2.x adds and we have is
/// discovered by its own bits.
pub(crate) const VERSION: Version = Version::V1_4;

/// CAP.TO in 500 ms: disabling waits for the commands in flight.
const TIMEOUT: u8 = 60;
/// How soon commands that nobody waits for are called off again: one may come to a throttle later than the others.
const CALL_OFF: Duration = Duration::from_millis(50);
/// CAP.MPSMAX: 64 KiB.
pub(crate) const MPS_MAX: u8 = 4;
/// The fields of CC that exist here; CRIME does not, for CAP.CRMS says so.
pub(crate) const CC_FIELDS: u32 = 0x00ff_fff1;
/// The fields of AQA.
const AQA_FIELDS: u32 = 0x0fff_0fff;
/// The bits of ASQ and ACQ that are an address: pages are 4 KiB or larger.
const ADDRESS_LOW: u32 = 0xffff_f000;

/// Where the controller stands. Derived from CC and CSTS in the state region, and from whether commands are in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// CC.EN is 0 and nothing is in flight.
    Disabled,
    /// Commands are taken.
    Ready,
    /// CC.EN went to 0, or a reset came: CSTS.RDY stays 1 until the commands in flight have finished with guest memory.
    Resetting,
    /// A shutdown was asked for: no commands are taken; CSTS.SHST says complete once volumes are flushed.
    ShuttingDown,
    /// CSTS.CFS is set: nothing but a reset helps.
    Failed,
}

/// How much a reset resets (Base 3.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Reset {
    /// CC.EN went to 0: the admin queue's registers stay.
    Controller,
    /// NSSR: every controller register.
    Subsystem,
    /// Function level reset, or the client's reset request: configuration space too.
    Function,
    /// The client is gone: as found after power-on.
    PowerOn,
}

/// What is under way between phases.
#[derive(Debug, Default)]
pub(crate) struct Lifecycle {
    shutdown: Option<Shutdown>,
    /// No commands are taken: somebody waits until those in flight are done (an unmap), or has yet to say what comes in its place.
    pub(crate) paused: bool,
    /// No commands are taken: another worker is about to go on.
    pub(crate) held: bool,
    /// It stands still, being migrated: nothing at all is done.
    pub(crate) stopped: bool,
    /// Until when memory may yet come in the place of memory that went.
    pub(crate) maps_until: Option<Instant>,
    /// Nobody waits any more for the commands in flight.
    pub(crate) called_off: bool,
    /// When they are called off again.
    pub(crate) call_off_again: Option<Instant>,
    /// A reset has ended in this process: of namespaces that were not there then, its host is another one.
    pub(crate) was_reset: bool,
    pub(crate) log: LogLimit,
}

impl Lifecycle {
    /// Whether commands are taken while the controller is ready.
    #[inline]
    pub(crate) fn takes(&self) -> bool {
        !self.paused && !self.held && self.maps_until.is_none()
    }
}

/// A shutdown's flushes.
#[derive(Debug)]
struct Shutdown {
    /// The lowest identifier that is still to be flushed. `None`: all flushes have begun.
    next: Option<u32>,
    flushes: Rc<Flushes>,
}

#[derive(Debug, Default)]
struct Flushes {
    /// Those that have not finished.
    outstanding: Cell<u32>,
    /// Why one failed, and of which namespace.
    failed: Cell<Option<(u32, BlockError)>>,
}

impl Controller {
    /// Power-on values of registers, features and configuration space.
    pub(crate) fn power_on(&mut self) {
        self.reset(Reset::PowerOn);
    }

    /// CC.
    pub(crate) fn cc(&self) -> Configuration {
        Configuration::from_bits(self.state.registers.cc.get())
    }

    /// CSTS.
    pub(crate) fn csts(&self) -> ControllerStatus {
        ControllerStatus::from_bits(self.state.registers.csts.get())
    }

    fn set_csts(&self, csts: ControllerStatus) {
        state::commit();
        self.state.registers.csts.set(csts.into_bits());
    }

    /// CAP.
    pub(crate) fn capabilities(&self) -> Capabilities {
        Capabilities::new()
            .with_mqes_z((self.config.queue_entries.clamp(2, 65_536) - 1) as u16)
            .with_cqr(true)
            .with_to(TIMEOUT)
            .with_nssrs(true)
            .with_css_nvm(true)
            .with_css_iocs(true)
            .with_mpsmax(if self.config.card.is_some() { 0 } else { MPS_MAX })
    }

    /// Reads a register of BAR0 below the doorbells. Any width and alignment reads the bytes that are there; what is not
    /// defined reads as zero.
    pub(crate) fn register_read(&self, offset: u64, out: &mut [u8]) {
        for (at, byte) in offsets(offset).zip(out) {
            *byte = self.register(at & !3).to_le_bytes()[(at & 3) as usize];
        }
    }

    fn register(&self, at: u64) -> u32 {
        const CAP_HIGH: u64 = offset::CAP + 4;
        const ASQ_HIGH: u64 = offset::ASQ + 4;
        const ACQ_HIGH: u64 = offset::ACQ + 4;
        let registers = &self.state.registers;
        match at {
            offset::CAP => self.capabilities().into_bits() as u32,
            CAP_HIGH => (self.capabilities().into_bits() >> 32) as u32,
            offset::VS => VERSION.into_bits(),
            offset::INTMS | offset::INTMC => registers.interrupt_mask.get(),
            offset::CC => registers.cc.get(),
            offset::CSTS => registers.csts.get(),
            offset::AQA => registers.aqa.get(),
            offset::ASQ => registers.asq.get() as u32,
            ASQ_HIGH => (registers.asq.get() >> 32) as u32,
            offset::ACQ => registers.acq.get() as u32,
            ACQ_HIGH => (registers.acq.get() >> 32) as u32,
            _ => 0,
        }
    }

    /// Writes a register of BAR0 below the doorbells; widths and offsets that the specification does not allow are ignored.
    pub(crate) fn register_write(&mut self, offset: u64, data: &[u8]) {
        let allowed = matches!(data.len(), 4 | 8) && offset.is_multiple_of(data.len() as u64);
        for (at, dword) in (offset..).step_by(4).zip(data.as_chunks::<4>().0) {
            if allowed {
                self.write_dword(at, u32::from_le_bytes(*dword));
            }
        }
    }

    fn write_dword(&mut self, at: u64, value: u32) {
        const ASQ_HIGH: u64 = offset::ASQ + 4;
        const ACQ_HIGH: u64 = offset::ACQ + 4;
        let registers = &self.state.registers;
        match at {
            offset::INTMS => registers.interrupt_mask.set(registers.interrupt_mask.get() | value),
            offset::INTMC => registers.interrupt_mask.set(registers.interrupt_mask.get() & !value),
            offset::CC => self.write_cc(value),
            offset::CSTS => {
                let csts = self.csts();
                self.set_csts(csts.with_nssro(csts.nssro() && !ControllerStatus::from_bits(value).nssro()));
            }
            offset::NSSR if value == NSSR_RESET => {
                self.lose_saved();
                self.reset(Reset::Subsystem);
                self.set_csts(self.csts().with_nssro(true));
            }
            offset::AQA => registers.aqa.set(value & AQA_FIELDS),
            offset::ASQ => set_low(&registers.asq, value & ADDRESS_LOW),
            ASQ_HIGH => set_high(&registers.asq, value),
            offset::ACQ => set_low(&registers.acq, value & ADDRESS_LOW),
            ACQ_HIGH => set_high(&registers.acq, value),
            _ => {}
        }
    }

    fn write_cc(&mut self, value: u32) {
        let old = self.cc();
        let mut new = Configuration::from_bits(value & CC_FIELDS);
        if old.en() && new.en() {
            // These belong to the time before the enable (Base 3.1.4.5).
            new = new.with_css(old.css()).with_mps(old.mps()).with_ams(old.ams());
        }
        if old.en() && !new.en() {
            self.lose_saved();
        }
        self.state.registers.cc.set(new.into_bits());
        state::commit();
        if old.en() && !new.en() {
            self.reset(Reset::Controller);
        } else if !old.en() && new.en() && self.phase == Phase::Disabled {
            self.enable();
        }
        let asks = matches!(new.shn(), ShutdownNotification::NORMAL | ShutdownNotification::ABRUPT);
        if asks && new.shn() != old.shn() {
            self.begin_shutdown();
        }
    }

    /// A doorbell write that came as a message.
    pub(crate) fn doorbell_write(&mut self, index: usize, value: u32) {
        let Some(qid) = u16::try_from(index / 2).ok() else { return };
        if let Some(port) = self.port.as_mut().filter(|port| port.has_space() && self.phase == Phase::Ready)
            && (usize::from(fastpath::PAGE) / 4..self.doorbells.words.len()).contains(&index)
        {
            return port.take_word(index as u16 * 4, value);
        }
        let exists = if index.is_multiple_of(2) { self.sq_exists(qid) } else { self.cq_exists(qid) };
        match self.doorbells.words.get(index).filter(|_| exists) {
            // Relaxed: it is this thread that looks at it.
            Some(word) => word.store(value, std::sync::atomic::Ordering::Relaxed),
            None if self.phase == Phase::Ready => self.invalid_doorbell(qid, value),
            None => {}
        }
    }

    /// Why the controller cannot be enabled as it is set up.
    fn check_enable(&self) -> Result<AdminQueueAttributes, &'static str> {
        let cc = self.cc();
        let registers = &self.state.registers;
        if self.is_out_of_service() {
            return Err(super::keep::OUT_OF_SERVICE);
        }
        let aqa = AdminQueueAttributes::from_bits(registers.aqa.get());
        if !matches!(cc.css(), CommandSetSelected::NVM | CommandSetSelected::ALL) {
            return Err("enabled with a command set (CC.CSS) that is not there");
        }
        if cc.mps() > self.capabilities().mpsmax() {
            return Err("enabled with a page size (CC.MPS) larger than CAP.MPSMAX");
        }
        if cc.ams() != Arbitration::ROUND_ROBIN {
            return Err("enabled with an arbitration mechanism (CC.AMS) that is not there");
        }
        if aqa.asqs_z() == 0 || aqa.acqs_z() == 0 {
            return Err("enabled with an admin queue of fewer than two entries");
        }
        let aligned = |base: u64| base.is_multiple_of(cc.page_size());
        if !aligned(registers.asq.get()) || !aligned(registers.acq.get()) {
            return Err("enabled with an admin queue that is not page aligned");
        }
        Ok(aqa)
    }

    fn enable(&mut self) {
        self.lifecycle.shutdown = None;
        let aqa = match self.check_enable() {
            Ok(aqa) => aqa,
            Err(reason) => return self.set_failed(reason),
        };
        let (asq, acq) = (self.state.registers.asq.get(), self.state.registers.acq.get());
        self.create_cq(0, acq, u32::from(aqa.acqs_z()) + 1, Some(0));
        self.create_sq(0, asq, u32::from(aqa.asqs_z()) + 1, 0, 0);
        self.set_csts(self.csts().with_rdy(true).with_shst(ShutdownStatus::NORMAL));
        self.phase = Phase::Ready;
    }

    /// Resets the controller. It is done when the phase is [`Phase::Disabled`] (or beyond, when the guest enables it
    /// meanwhile): at once when nothing is in flight.
    pub(crate) fn reset(&mut self, kind: Reset) {
        self.state.survival.resetting.set(kind as u32 + 1);
        state::commit();
        let registers = &self.state.registers;
        if kind != Reset::Controller {
            registers.aqa.set(0);
            registers.asq.set(0);
            registers.acq.set(0);
            state::commit();
            registers.cc.set(0);
            state::commit();
        }
        if matches!(kind, Reset::Function | Reset::PowerOn) {
            self.reset_config_space();
        }
        if kind == Reset::PowerOn {
            let was_off = !self.csts().rdy() || self.csts().shst() == ShutdownStatus::COMPLETE;
            self.count_power_cycle(was_off);
            self.set_csts(self.csts().with_nssro(false));
        }
        self.phase = Phase::Resetting;
        self.stop_card();
        // From here on, completions of commands in flight post nothing.
        self.state.epoch.set(self.state.epoch.get().wrapping_add(1));
        // And those that go piece by piece stop at the next one.
        self.sink.begin_epoch(self.state.epoch.get());
        self.trace.reset();
        self.records.clear();
        self.forget_again();
        let held = self.admin_reset() + self.io_reset();
        self.in_flight = self.in_flight.checked_sub(held).expect("what is held is in flight");
        self.state.registers.interrupt_mask.set(0);
        self.state.registers.shadow_doorbells.set(0);
        self.state.registers.event_indexes.set(0);
        self.lifecycle.shutdown = None;
        self.interrupts.reset();
        self.lifecycle.called_off = !self.is_quiet();
        if !self.lifecycle.called_off {
            self.finish_reset();
        }
    }

    /// Commands that nobody waits for any more, and that only wait for their turn (a throttle's), end at once; those that come to wait for
    /// it later, a little later.
    #[inline]
    pub(crate) fn call_off(&mut self, cx: &ShardContext<'_>) {
        if self.lifecycle.called_off || self.lifecycle.call_off_again.is_some() {
            self.call_off_slowly(cx);
        }
    }

    #[cold]
    fn call_off_slowly(&mut self, cx: &ShardContext<'_>) {
        let called_off = std::mem::take(&mut self.lifecycle.called_off);
        // Where the controller has failed or shuts down, deletions end with its reset.
        let lasts = self.phase == Phase::Resetting || self.phase == Phase::Ready && self.sink.deletes_all();
        let again = self.lifecycle.call_off_again.filter(|_| lasts);
        if !called_off && again.is_none_or(|at| cx.now() < at) {
            self.lifecycle.call_off_again = again;
            return;
        }
        self.lifecycle.call_off_again = lasts.then(|| cx.now() + CALL_OFF);
        if let Some(port) = &mut self.port {
            port.call_off();
        }
        // A write that one replica has and another one has not is worse than one that takes its time.
        if self.port.as_ref().is_none_or(|port| !port.writes_to_several()) {
            self.namespaces.call_off(cx.asker());
        }
    }

    /// Whoever waits for the commands in flight must not wait for long: those that only wait for their turn end at once, those that go
    /// piece by piece at the next one. Their guest is to try them again.
    pub(crate) fn hurry(&mut self, cx: &ShardContext<'_>) {
        self.sink.hurry(true);
        self.lifecycle.called_off = true;
        self.call_off(cx);
    }

    /// Goes on from the state that the worker before this one left, in which no command of its is in flight any more.
    pub(crate) fn resume(&mut self) {
        self.sink.begin_epoch(self.state.epoch.get());
        self.recover();
        self.go_on();
    }

    /// Goes on from the state as it is, in whatever phase that says.
    pub(crate) fn go_on(&mut self) {
        let begun = [Reset::Controller, Reset::Subsystem, Reset::Function, Reset::PowerOn];
        self.refresh_active();
        self.phase = if self.csts().rdy() { Phase::Ready } else { Phase::Disabled };
        if let Some(kind) = begun.into_iter().find(|kind| *kind as u32 + 1 == self.state.survival.resetting.get()) {
            self.reset(kind);
        } else if self.csts().cfs() {
            self.phase = Phase::Failed;
        } else if self.csts().rdy() && !self.cc().en() {
            self.reset(Reset::Controller);
        } else if !self.csts().rdy() && self.cc().en() {
            self.enable();
        }
        // A shutdown that had begun begins again: its flushes are not known to have ended.
        let asks = matches!(self.cc().shn(), ShutdownNotification::NORMAL | ShutdownNotification::ABRUPT);
        if self.csts().shst() == ShutdownStatus::OCCURRING || asks && self.csts().rdy() && self.cc().en() {
            if self.csts().shst() == ShutdownStatus::OCCURRING {
                self.set_csts(self.csts().with_shst(ShutdownStatus::NORMAL));
            }
            self.begin_shutdown();
        }
        if self.csts().shst() == ShutdownStatus::COMPLETE && self.phase == Phase::Ready {
            self.phase = Phase::ShuttingDown;
        }
        let control = self.state.pci[super::pci::MSIX_CONTROL_HIGH].get();
        self.interrupts.set_function_mask(control & 0xc0 == 0xc0);
        self.counters.restore(&self.state.counters);
        // These were counted before, here or by the daemon that a saved state is from.
        self.counted = self.counters.commands();
        if !matches!(self.phase, Phase::Ready | Phase::ShuttingDown) {
            self.records.clear();
            self.forget_again();
        }
    }

    fn finish_reset(&mut self) {
        // Not before: as long as its host's writes are under way, whom its reservation shut out stays so.
        self.end_all_nameless();
        self.lifecycle.was_reset = true;
        self.remove_all_queues();
        let shst = match self.lifecycle.shutdown {
            Some(_) => ShutdownStatus::OCCURRING,
            None => ShutdownStatus::NORMAL,
        };
        self.set_csts(ControllerStatus::new().with_nssro(self.csts().nssro()).with_shst(shst));
        self.phase = Phase::Disabled;
        state::commit();
        self.state.survival.resetting.set(0);
        // A guest that did not wait for RDY to fall.
        if self.cc().en() {
            self.enable();
        }
    }

    /// Whether no command is in flight that anybody could wait for: then nothing of ours touches guest memory.
    pub(crate) fn is_quiet(&self) -> bool {
        self.has_rest() && self.is_card_quiet()
    }

    /// The same, of what is not a card's.
    pub(crate) fn has_rest(&self) -> bool {
        self.in_flight == self.admin_parked() + self.io_parked() + self.standing()
    }

    /// Nothing is in flight any more: whatever waits for that goes on.
    pub(crate) fn drained(&mut self) {
        if self.phase == Phase::Resetting {
            self.finish_reset();
        }
        if self.memory.has_retired() {
            // SAFETY: the regions were unmapped before now, and every command is quiet: those that have begun have finished,
            // and neither parked ones nor those that are yet to be carried out again hold a segment. Their tasks are the only
            // holders of segments beside the queue caches, which are dropped here.
            let regions = unsafe {
                self.caches.forget_translations();
                self.memory.reclaim()
            };
            // Unmapping a large guest takes milliseconds.
            reaper::drop_later(Box::new(regions));
        }
    }

    /// Whether volumes are being flushed for a shutdown.
    pub(crate) fn is_shutting_down(&self) -> bool {
        self.lifecycle.shutdown.is_some()
    }

    fn begin_shutdown(&mut self) {
        if self.csts().shst() != ShutdownStatus::NORMAL {
            return;
        }
        self.set_csts(self.csts().with_shst(ShutdownStatus::OCCURRING));
        if self.phase == Phase::Ready {
            self.phase = Phase::ShuttingDown;
        }
        self.lifecycle.shutdown = Some(Shutdown { next: Some(1), flushes: Rc::default() });
    }

    /// Goes on with a shutdown that waits. Returns work done.
    #[inline]
    pub(crate) fn advance_phase(&mut self, cx: &mut ShardContext<'_>) -> usize {
        if self.lifecycle.shutdown.is_none() { 0 } else { self.advance_shutdown(cx) }
    }

    #[cold]
    fn advance_shutdown(&mut self, cx: &mut ShardContext<'_>) -> usize {
        let Some(mut shutdown) = self.lifecycle.shutdown.take() else { return 0 };
        let started = if self.is_quiet() { self.flush_volumes(cx, &mut shutdown) } else { 0 };
        if shutdown.next.is_some() || shutdown.flushes.outstanding.get() > 0 {
            self.lifecycle.shutdown = Some(shutdown);
            return started;
        }
        if let Some((nsid, error)) = shutdown.flushes.failed.get()
            && let Some(suppressed) = self.lifecycle.log.admit()
        {
            // The specification has no way to tell the guest, which has no use for it any more.
            tracing::warn!(device = self.config.name, nsid, suppressed, %error, "a flush at shutdown failed");
        }
        self.set_csts(self.csts().with_shst(ShutdownStatus::COMPLETE));
        started + 1
    }

    fn flush_volumes(&self, cx: &mut ShardContext<'_>, shutdown: &mut Shutdown) -> usize {
        let mut started = 0;
        while let Some(from) = shutdown.next {
            let next = self.next_to_flush(from);
            if let Some(attached) = next {
                let Some(slot) = cx.reserve() else { break };
                flush(slot, Rc::clone(attached), Rc::clone(&shutdown.flushes));
                started += 1;
            }
            shutdown.next = next.and_then(|attached| attached.nsid.checked_add(1));
        }
        started
    }

    /// What has the lowest identifier from this one on: namespaces, then replicas, whose identifiers are larger. Not what is being formatted:
    /// that takes no requests, and has nothing that is to be kept.
    fn next_to_flush(&self, from: u32) -> Option<&Rc<Attached>> {
        let mut all = (from..=self.namespaces.largest()).filter_map(|nsid| self.namespaces.get(nsid));
        let shown = all.find(|attached| !self.erases(attached));
        let replicas = self.port.iter().flat_map(|port| port.replicas()).filter(|replica| replica.nsid >= from);
        shown.or_else(|| replicas.min_by_key(|replica| replica.nsid))
    }

    /// Sets CSTS.CFS: the guest must reset the controller. Logged once per reset with the reason, and at a limited rate.
    pub(crate) fn fail(&mut self, reason: &'static str) {
        if matches!(self.phase, Phase::Ready | Phase::ShuttingDown) {
            self.set_failed(reason);
        }
    }

    fn set_failed(&mut self, reason: &'static str) {
        self.set_csts(self.csts().with_cfs(true));
        self.phase = Phase::Failed;
        self.stop_card();
        if let Some(suppressed) = self.lifecycle.log.admit() {
            tracing::warn!(
                device = self.config.name,
                reason,
                suppressed,
                "controller fatal status: the guest must reset it"
            );
        }
    }
}

fn set_low(cell: &state::Cell<u64>, value: u32) {
    cell.set(cell.get() >> 32 << 32 | u64::from(value));
}

fn set_high(cell: &state::Cell<u64>, value: u32) {
    cell.set(u64::from(value) << 32 | cell.get() & u64::from(u32::MAX));
}

/// Flushes one namespace's volume before the power goes.
fn flush(slot: TaskSlot<'_>, attached: Rc<Attached>, flushes: Rc<Flushes>) {
    let request = Request { operation: Operation::Flush, lba: Lba(0), count: BlockCount(0), segments: &[] };
    attached.in_flight.set(attached.in_flight.get() + 1);
    flushes.outstanding.set(flushes.outstanding.get() + 1);
    let finish = move |attached: &Attached, result: Result<(), BlockError>| {
        attached.in_flight.set(attached.in_flight.get() - 1);
        flushes.outstanding.set(flushes.outstanding.get() - 1);
        if let Err(error) = result {
            flushes.failed.set(Some((attached.nsid, error)));
        }
    };
    // The slot comes back by itself.
    let _ = slot.run(move |tcx| {
        let attached = tcx.scratch.keep(attached);
        match attached.namespace.volume.submit(tcx, request) {
            Step::Done(result) => {
                finish(attached, result);
                Launch::Done(())
            }
            waits @ Step::Wait(_) => Launch::Wait(tcx.scratch.place_future(async move {
                let result = waits.await;
                finish(attached, result);
            })),
        }
    });
}

#[cfg(test)]
mod tests;
