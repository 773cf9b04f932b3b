//! Parity as a service: coming and going, status, and what the operator may ask.

use std::sync::{Arc, atomic::Ordering};

use super::{KIND, Parity};
use crate::{
    background::{CUT_SHORT, Task, scrub_ended},
    service::{Health, Mount, Progress, Service, ServiceError, Status, of_type},
    settings::Settings,
};

impl Service for Parity {
    fn mount(&self, mount: &Mount) -> Result<(), ServiceError> {
        if let Some(previous) = mount.previous::<Self>() {
            self.members.losses.take_over(&previous.members.losses);
        }
        // Where it was in force and comes back from a change: what is acknowledged without its tables is found by nobody.
        self.take_up(mount).inspect_err(|_| self.members.halt())
    }

    fn mount_again(&self, mount: &Mount, instead: Option<&Arc<dyn Service>>) -> Result<(), ServiceError> {
        self.members.come_back(instead.and_then(of_type::<Self>).as_ref().map(|instead| &*instead.members));
        self.mount(mount)
    }

    fn unmount(&self) -> Result<(), ServiceError> {
        self.members.went(self.put_away())
    }

    fn leave(&self) -> Result<(), ServiceError> {
        Err(ServiceError::NotNow(
            "no leg shows the volume's data: a volume with parity is copied, not taken apart".to_owned(),
        ))
    }

    fn has_untold(&self) -> bool {
        self.members.losses.is_untold()
    }

    fn leg_is_whole(&self, leg: usize) -> bool {
        let settled = self.members.intent().is_some_and(|intent| intent.stale() == 0);
        let masks = self.members.masks();
        // While parity does not fit everywhere, no leg that has data can be spared.
        masks.readable >> leg & 1 == 1 && (settled || masks.writable != masks.readable)
    }

    fn leg_is_used(&self, leg: usize) -> bool {
        self.members.is_used(leg)
    }

    fn status(&self) -> Status {
        let mut status = Status::good([]);
        let readable = self.members.masks().readable;
        status.facts.extend(self.members.leg_facts());
        if readable.count_ones() as usize != self.legs.len() {
            let lost = (readable.count_ones() as usize) < self.layout.data();
            status.health = if lost { Health::Failed } else { Health::Degraded };
        }
        if self.stopped.load(Ordering::Relaxed) {
            status.health = Health::Failed;
        }
        if status.health == Health::Good && self.counters.refused.load(Ordering::Relaxed) > 0 {
            status.health = Health::Degraded;
        }
        let mut fact = |name: &str, value: String| status.facts.push((name.to_owned(), value));
        if self.stopped.load(Ordering::Relaxed) {
            fact("stopped", "a leg refused a write and cannot be spared: open the volume again when it is well".to_owned());
        }
        if let Some(intent) = self.members.intent() {
            let each = 1_u64 << intent.shift();
            fact("marked regions", format!("{} of {}, {each} bytes on each leg", intent.marked(), intent.regions()));
        }
        for (name, count) in [
            ("read errors", &self.counters.read_errors),
            ("repaired", &self.counters.repaired),
            ("reads refused", &self.counters.refused),
            ("journal entries carried out again", &self.counters.replayed),
            ("legs dropped", &self.members.dropped),
        ] {
            let count = count.load(Ordering::Relaxed);
            if count > 0 {
                fact(name, count.to_string());
            }
        }
        let scrub = self.scrub().clone();
        if scrub.running || scrub.finished > 0 || scrub.cut_short {
            let (repaired, differing, unread) = (scrub.repaired, scrub.differing, scrub.unread);
            let part = if scrub.cut_short { CUT_SHORT } else { "" };
            fact("scrub", format!("{repaired} repaired, {differing} blocks do not fit, {unread} rows unreadable{part}"));
            if !scrub.listed.is_empty() {
                let list: Vec<_> = scrub.listed.iter().map(u64::to_string).collect();
                fact("blocks of the legs that do not fit", list.join(", "));
            }
        }
        if scrub.running {
            status.progress.push(Progress { what: "scrub".to_owned(), done: scrub.at, total: self.members.bytes() });
        }
        if let Some((done, total)) = self.members.resync_progress() {
            let masks = self.members.masks();
            let what = if masks.writable == masks.readable { "resync (regions)" } else { "rebuild (regions)" };
            status.progress.push(Progress { what: what.to_owned(), done, total });
        }
        status
    }

    fn command(&self, command: &str, arguments: &Settings) -> Result<String, ServiceError> {
        match command {
            "fail" => self.members.fail_leg(self.members.leg_argument(arguments)?),
            "rebuild" => {
                let leg = self.members.leg_argument(arguments)?;
                let journal = self.journal_of(leg);
                self.members.rebuild_leg(leg, |volume| self.journal.forget(leg, volume, journal))
            }
            "scrub" if self.scrub().running => Err(ServiceError::NotNow("it is being scrubbed already".to_owned())),
            "scrub" if self.members.masks().readable.count_ones() as usize <= self.layout.data() => {
                let why = "no more legs are good than the data need, and there is no parity to check: \"rebuild\" another one first";
                Err(ServiceError::NotNow(why.to_owned()))
            }
            "scrub" => {
                self.start_scrub();
                Ok("scrub begins; \"volume show\" tells how far it is".to_owned())
            }
            "stop" => {
                let mut scrub = self.scrub();
                let was = scrub.running.then_some(scrub.at);
                (scrub.running, scrub.cut_short) = (false, scrub.cut_short || was.is_some());
                Ok(scrub_ended(was, self.members.bytes()))
            }
            _ => Err(ServiceError::no_command(&KIND, command)),
        }
    }

    fn tasks(self: Arc<Self>) -> Vec<Task> {
        vec![Task::new("parity upkeep", move |cx, stop| Box::pin(self.upkeep(cx, stop)))]
    }
}
