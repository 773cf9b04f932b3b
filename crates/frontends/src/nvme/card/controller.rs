//! What a controller does as the control processor of its function.

use std::{rc::Rc, sync::Arc};

use millrace_engine::ShardContext;
use millrace_engine_model::map::{Coalescing, Fault};

use super::{
    port::{MDTS, Pair, Port, QUEUE_ENTRIES, VECTORS},
    show::Obstacle,
};
use crate::nvme::{
    Config, NamespaceQuota,
    controller::{Controller, Counters},
    namespace::{Attached, Namespace},
    registers::Phase,
};

/// I/O queue pairs of a function.
const QUEUES: u16 = 4;

impl Config {
    /// What a card can do of it.
    pub(crate) fn limited(self) -> Self {
        if self.card.is_none() {
            return self;
        }
        Self {
            queues: self.queues.min(QUEUES),
            queue_entries: self.queue_entries.min(QUEUE_ENTRIES),
            vectors: self.vectors.min(VECTORS),
            namespaces: 1,
            mdts: MDTS,
            quota: NamespaceQuota::default(),
            ..self
        }
    }
}

impl Controller {
    /// Takes a function of the card that its settings name.
    pub(crate) fn join_card(&mut self) -> Result<(), String> {
        if let Some(spec) = &self.config.card {
            self.port = Some(Box::new(Port::new(spec, &self.config.functions, self.config.queues)?));
            self.refresh_active();
        }
        Ok(())
    }

    /// The card's part of a turn. Returns the work done.
    #[cold]
    pub(crate) fn card_turn(&mut self, cx: &mut ShardContext<'_>) -> usize {
        self.reconcile();
        let mut work = 0;
        let takes = self.lifecycle.takes() && !self.lifecycle.stopped;
        if self.phase == Phase::Ready && takes {
            work += self.ring_card();
        }
        let Some(port) = &mut self.port else { return work };
        let (done, news) = port.turn(cx);
        work += done + usize::from(!news.is_empty());
        self.counters.add(&news);
        if news.lost && self.phase == Phase::Ready {
            self.fail("a completion queue's memory is not mapped");
        }
        for vector in (0..u64::BITS).filter(|vector| news.vectors >> vector & 1 != 0) {
            self.interrupts.pend(vector as u16, 1);
        }
        while let Some((qid, code)) = self.port.as_mut().and_then(|port| port.next_fault()) {
            work += 1;
            if self.phase != Phase::Ready {
                continue;
            }
            match code {
                Fault::SQ_READ => self.fail("a submission queue's memory is not mapped"),
                _ => self.invalid_doorbell(qid, 0),
            }
        }
        // Not when nothing has happened: reading the engine's registers takes cycles.
        if work > 0 && self.interrupts.uses_pin() {
            self.refresh_positions();
        }
        work
    }

    /// Passes doorbells on that were rung.
    fn ring_card(&mut self) -> usize {
        if self.port.as_ref().is_none_or(|port| port.holds_doorbells()) {
            return 0;
        }
        let mut rung = self.port.as_mut().map_or(0, |port| port.pass_words());
        for qid in 1..=self.config.queues {
            let index = usize::from(qid) * 2;
            let (tail, head) = (self.doorbell(index, qid), self.doorbell(index + 1, qid));
            // The entries before the tail are read after it: by the engine, in a call from here on.
            std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
            let Some(port) = self.port.as_mut().filter(|port| port.is_enabled(qid)) else { continue };
            // The head first: it makes room for what the tail brings.
            rung += usize::from(port.ring(index + 1, head)) + usize::from(port.ring(index, tail));
        }
        rung
    }

    /// Whether a doorbell was rung that the engine does not know, and is to know now.
    fn is_card_rung(&mut self) -> bool {
        if self.port.as_ref().is_none_or(|port| port.holds_doorbells()) {
            return false;
        }
        self.port.as_ref().is_some_and(|port| port.has_words())
            || (1..=self.config.queues).any(|qid| {
                let index = usize::from(qid) * 2;
                let (tail, head) = (self.doorbell(index, qid), self.doorbell(index + 1, qid));
                let port = self.port.as_ref().filter(|port| port.is_enabled(qid));
                port.is_some_and(|port| port.is_rung(index, tail) || port.is_rung(index + 1, head))
            })
    }

    /// Whether a turn finds something to do on the card; doorbells are something for who takes commands.
    pub(crate) fn has_card_work(&mut self, takes: bool) -> bool {
        self.has_settled()
            || self.port.as_ref().is_some_and(|port| port.has_work())
            || takes && self.port.is_some() && self.is_card_rung()
    }

    /// Has the engine know what guest and operator decided since.
    pub(crate) fn reconcile(&mut self) {
        let (coalescing, durable) = (self.coalescing(), !self.write_cache_enabled());
        let Some(port) = &mut self.port else { return };
        port.go_on_after_call();
        port.set_interrupts(coalescing);
        let attached = self.namespaces.attached().next().map(Rc::as_ref);
        match port.show(attached, durable) {
            Ok(anew) => {
                if let Some(attached) = attached.filter(|_| anew) {
                    tell_caps(&self.config, &attached.namespace);
                }
            }
            Err(Obstacle { namespace, why }) => {
                if let Some(suppressed) = self.lifecycle.log.admit() {
                    let (device, volume) = (&self.config.name, namespace.volume.name());
                    tracing::warn!(device, volume, suppressed, why, "a volume is not on the card");
                }
            }
        }
        port.leave_disks();
    }

    /// Whether a volume of this identifier is one that is not shown, but written to as well.
    pub(crate) fn is_for_replica(&self, nsid: u32) -> bool {
        self.port.is_some() && self.config.functions.replicate && nsid > self.namespaces.largest()
    }

    /// All that the guest writes to: what it sees, and the replicas.
    pub(crate) fn written_to(&self) -> impl Iterator<Item = &Rc<Attached>> {
        self.namespaces.attached().chain(self.port.iter().flat_map(|port| port.replicas()))
    }

    /// Whether the replicas that are there have all that the guest would see of a volume.
    ///
    /// # Errors
    /// Which of them has not, and why.
    pub(crate) fn check_first(&self, namespace: &Namespace) -> Result<(), String> {
        let first = namespace.volume.geometry();
        match self.port.as_ref().and_then(|port| port.unfit_replica(&first)) {
            Some((replica, why)) => {
                let (first, replica) = (namespace.volume.name(), replica.volume.name());
                Err(format!("volume {replica} cannot be a replica of volume {first}: {why}"))
            }
            None => Ok(()),
        }
    }

    /// The namespace that the guest sees, and how many blocks it has there.
    fn seen(&self) -> Option<(u32, u64)> {
        let first = self.namespaces.attached().next()?;
        Some((first.nsid, self.shown_geometry(first.namespace.volume.geometry()).blocks.0))
    }

    /// A replica came or went: the guest is told by an event if it sees another number of blocks than before.
    fn tell_size(&mut self, before: Option<(u32, u64)>) {
        let seen = self.seen();
        if let Some((nsid, _)) = seen.filter(|_| seen != before) {
            self.namespace_changed(nsid);
        }
    }

    /// A volume that may be a replica has another size or shape: the guest, which may see another number of blocks, is told by an event.
    pub(crate) fn replica_changed(&mut self, nsid: u32) {
        let is_replica = self.port.as_ref().is_some_and(|port| port.replicas().any(|replica| replica.nsid == nsid));
        if let Some((first, _)) = self.seen().filter(|_| is_replica) {
            self.namespace_changed(first);
        }
    }

    /// Has everything written to a volume as well.
    ///
    /// # Errors
    /// Which volume it is and why it cannot be. The guest goes on as before then.
    pub(crate) fn join_replica(&mut self, nsid: u32, namespace: &Arc<Namespace>) -> Result<(), String> {
        // What the guest sees has its disk first.
        self.reconcile();
        let before = self.seen();
        let first = self.namespaces.attached().next().map(|attached| &*attached.namespace);
        let Some(port) = &mut self.port else { return Err("there is no card".to_owned()) };
        port.add_replica(nsid, namespace, first)
            .map_err(|why| format!("volume {} cannot be a replica: {why}", namespace.volume.name()))?;
        self.reconcile();
        self.tell_size(before);
        Ok(())
    }

    /// As [`Self::join_replica`], when it goes. Its volume is in use until [`Port::is_replica_leaving`] says otherwise.
    pub(crate) fn remove_replica(&mut self, nsid: u32) -> bool {
        let before = self.seen();
        let removed = self.port.as_mut().is_some_and(|port| port.remove_replica(nsid));
        if removed {
            self.reconcile();
            self.tell_size(before);
        }
        removed
    }

    /// A namespace was detached: nobody lets go of its volume while the engine has commands for it.
    pub(crate) fn detach_from_card(&mut self, attached: &Rc<Attached>) {
        if let Some(port) = &mut self.port {
            port.leave(attached);
            self.reconcile();
        }
    }

    /// How the engine is to coalesce. It knows no vectors that are exempt: where the guest asks for some, nothing is coalesced.
    fn coalescing(&self) -> Coalescing {
        let features = &self.state.features;
        let value = features.interrupt_coalescing.get();
        let (threshold_z, time) = (value as u8, (value >> 8) as u8);
        let exempt = features.coalescing_disabled.iter().any(|word| word.get() != 0);
        let on = threshold_z != 0 && time != 0 && !exempt;
        let mask = self.interrupts.masked_vectors();
        Coalescing::new().with_threshold_z(threshold_z).with_time(time).with_on(on).with_mask(mask)
    }

    /// The positions of completion queues as the engine has them, for who looks at them: the legacy pin.
    fn refresh_positions(&mut self) {
        for qid in 1..=self.config.queues {
            if let Some(status) = self.port.as_ref().filter(|port| port.is_enabled(qid)).map(|port| port.status(qid)) {
                self.cq(qid).move_to(status.cq_tail().into(), status.phase());
            }
        }
    }

    /// A queue pair was made.
    pub(crate) fn begin_on_card(&mut self, qid: u16) {
        let (sq, cq) = (self.sq(qid), self.cq(qid));
        let pair = Pair {
            sq: (sq.base.get(), sq.entries.get()),
            cq: (cq.base.get(), cq.entries.get()),
            vector: (cq.interrupts.get() != 0).then(|| cq.vector.get()),
        };
        if let Some(port) = &mut self.port {
            port.create(qid, &pair);
        }
    }

    /// Queues are gone: so is a space in the place of one.
    pub(crate) fn leave_space(&mut self) {
        if let Some(port) = &mut self.port {
            port.forget_space();
        }
    }

    /// Takes no more commands of any queue.
    pub(crate) fn stop_card(&mut self) {
        if let Some(port) = &mut self.port {
            port.stop_all();
        }
    }

    /// Whether nothing of this controller is in flight on a card.
    pub(crate) fn is_card_quiet(&self) -> bool {
        self.port.as_ref().is_none_or(|port| port.is_quiet())
    }

    /// Whether its card is at work, for whichever function. Found out without its registers: a read in every turn would never let the
    /// clock park.
    pub(crate) fn is_card_at_work(&self) -> bool {
        self.port.as_ref().is_some_and(|port| port.is_card_at_work())
    }

    /// Commands of a queue in flight, wherever.
    pub(crate) fn is_sq_idle(&self, sqid: u16) -> bool {
        self.sq(sqid).in_flight.get() == 0 && self.port.as_ref().is_none_or(|port| port.is_idle(sqid))
    }

    /// Goes on after another worker, with whom its engine died: what the guest had there is lost, and it must reset the controller.
    pub(crate) fn lost_card(&mut self) {
        if self.port.is_some() && self.phase == Phase::Ready && (1..=self.config.queues).any(|qid| self.sq_exists(qid)) {
            self.fail("the process that its engine was in has ended");
        }
    }
}

/// What a device is capped at may be less than the engine counts for blocks of this size.
fn tell_caps(config: &Config, namespace: &Namespace) {
    let block = namespace.volume.geometry().block_size.bytes();
    if let Err(why) = config.functions.check_caps(block.into()) {
        let (device, volume) = (&config.name, namespace.volume.name());
        tracing::warn!(device, volume, why, "a device is capped at more than was asked for");
    }
}

impl Counters {
    fn add(&mut self, news: &super::host::News) {
        let (reads, writes) = (news.reads, news.writes);
        self.read_commands += reads.0;
        self.write_commands += writes.0;
        self.bytes_read += reads.1;
        self.bytes_written += writes.1;
        self.errors += news.errors;
    }
}
