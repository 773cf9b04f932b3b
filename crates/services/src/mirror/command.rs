//! The mirror as a service: coming and going, status, and what the operator may ask.

use std::sync::{Arc, atomic::Ordering};

use millrace_block::BlockSize;

use super::{KIND, Mirror};
use crate::{
    background::{CUT_SHORT, Task, scrub_ended},
    members::decide::Shape,
    service::{Health, Mount, Progress, Service, ServiceError, Status, of_type},
    settings::Settings,
};

impl Service for Mirror {
    fn mount(&self, mount: &Mount) -> Result<(), ServiceError> {
        if let Some(previous) = mount.previous::<Self>() {
            self.members.losses.take_over(&previous.members.losses);
        }
        let block_size = self.shape().block_size;
        let more = if block_size == BlockSize::B4096 { 4095 } else { 0 };
        // Where it was in force and comes back from a change: what is acknowledged without its tables is found by nobody.
        self.members.take_up(mount, Shape { block_size, more }).inspect_err(|_| self.members.halt())?;
        self.look_again(block_size);
        Ok(())
    }

    fn mount_again(&self, mount: &Mount, instead: Option<&Arc<dyn Service>>) -> Result<(), ServiceError> {
        self.members.come_back(instead.and_then(of_type::<Self>).as_ref().map(|instead| &*instead.members));
        self.mount(mount)
    }

    fn unmount(&self) -> Result<(), ServiceError> {
        self.members.went(self.members.put_away())
    }

    fn leave(&self) -> Result<(), ServiceError> {
        // The data lie on every good leg as the guest sees them.
        Ok(())
    }

    fn has_untold(&self) -> bool {
        self.members.losses.is_untold()
    }

    fn leg_is_whole(&self, leg: usize) -> bool {
        let settled = self.intent().is_some_and(|intent| intent.stale() == 0);
        let first = self.masks().readable.trailing_zeros() as usize;
        self.masks().readable >> leg & 1 == 1 && (settled || leg == first)
    }

    fn leg_is_used(&self, leg: usize) -> bool {
        self.members.is_used(leg)
    }

    fn status(&self) -> Status {
        let mut status = Status::good([]);
        let masks = self.masks();
        status.facts.extend(self.members.leg_facts());
        if masks.readable.count_ones() as usize != self.legs.len() {
            status.health = if masks.readable == 0 { Health::Failed } else { Health::Degraded };
        }
        let mut fact = |name: &str, value: String| status.facts.push((name.to_owned(), value));
        if let Some(intent) = self.intent() {
            fact(
                "marked regions",
                format!("{} of {}, {} bytes each", intent.marked(), intent.regions(), 1_u64 << intent.shift()),
            );
        }
        for (name, count) in [
            ("read errors", &self.counters.read_errors),
            ("repaired", &self.counters.repaired),
            ("legs dropped", &self.members.dropped),
        ] {
            let count = count.load(Ordering::Relaxed);
            if count > 0 {
                fact(name, count.to_string());
            }
        }
        let scrub = self.scrub().clone();
        if scrub.running || scrub.finished > 0 || scrub.cut_short {
            let part = if scrub.cut_short { CUT_SHORT } else { "" };
            fact("scrub", format!("{} blocks repaired, {} differ{part}", scrub.repaired, scrub.differing));
            if !scrub.listed.is_empty() {
                let list: Vec<_> = scrub.listed.iter().map(u64::to_string).collect();
                fact("differing blocks", list.join(", "));
            }
        }
        if scrub.running {
            status.progress.push(Progress { what: "scrub".to_owned(), done: scrub.at, total: self.members.bytes() });
        }
        if let Some((done, total)) = self.members.resync_progress() {
            status.progress.push(Progress { what: "resync (regions)".to_owned(), done, total });
        }
        status
    }

    fn command(&self, command: &str, arguments: &Settings) -> Result<String, ServiceError> {
        match command {
            "fail" => self.members.fail_leg(self.members.leg_argument(arguments)?),
            "rebuild" => self.members.rebuild_leg(self.members.leg_argument(arguments)?, |_| Ok(())),
            "scrub" if self.scrub().running => Err(ServiceError::NotNow("it is being scrubbed already".to_owned())),
            "scrub" if self.masks().readable.count_ones() < 2 => {
                let why = "only one leg is good, and there is nothing to compare it with: \"rebuild\" another one first";
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
        vec![Task::new("mirror upkeep", move |cx, stop| Box::pin(self.upkeep(cx, stop)))]
    }
}
