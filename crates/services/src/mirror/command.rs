//! The mirror as a service: coming and going, status, and what the operator may ask.

use std::sync::{Arc, atomic::Ordering};

use super::{
    KIND, Mirror,
    meta::table_region,
    state::{LegState, Table},
};
use crate::{
    background::{LocalFuture, Task},
    legs::block_on,
    service::{Health, Mount, Progress, Service, ServiceError, Status},
    settings::{SettingError, Settings},
};

impl Mirror {
    fn leg_argument(&self, arguments: &Settings) -> Result<usize, ServiceError> {
        let why = || SettingError::new("leg", format!("write leg=N; there are 0 to {}", self.legs.len() - 1));
        let leg: usize = arguments.parsed("leg", "the number of a leg")?.ok_or_else(why)?;
        if leg < self.legs.len() { Ok(leg) } else { Err(why().into()) }
    }

    /// Does something that waits, on the calling thread.
    fn wait_for<T: 'static>(
        &self,
        work: impl for<'a> FnOnce(Arc<Self>, millrace_block::TaskContext<'a>) -> LocalFuture<'a, T>,
    ) -> Result<T, ServiceError> {
        let gone = || ServiceError::NotNow("the mirror is going".to_owned());
        let me = self.me.upgrade().ok_or_else(gone)?;
        Ok(block_on(move |cx| work(me, cx))?)
    }

    fn fail_leg(&self, leg: usize) -> Result<String, ServiceError> {
        let masks = self.masks();
        if masks.writable >> leg & 1 == 0 {
            return Err(ServiceError::NotNow(format!("leg {leg} is out of use already")));
        }
        if masks.readable & !(1 << leg) == 0 {
            return Err(ServiceError::NotNow(format!("leg {leg} is the last one that has all data: it stays")));
        }
        let dropped = self.wait_for(move |me, cx| Box::pin(async move { me.drop_legs(cx, 1 << leg, None).await }))?;
        dropped.map_err(|source| ServiceError::Leg {
            what: "record the failure of",
            leg: self.leg_name(leg).to_owned(),
            source,
        })?;
        Ok(format!("leg {leg} is out of use"))
    }

    fn rebuild_leg(&self, leg: usize) -> Result<String, ServiceError> {
        if self.masks().writable >> leg & 1 == 1 {
            return Err(ServiceError::NotNow(format!("leg {leg} is in use")));
        }
        let member = self.on_legs().as_ref().and_then(|on_legs| on_legs.table.members.get(leg).copied());
        let member = member.ok_or_else(|| ServiceError::NotNow("the mirror is not in force".to_owned()))?;
        let volume = &self.legs[leg];
        let known = table_region(&**volume).load(volume).ok().flatten().and_then(|record| Table::decode(&record.content));
        // It has all that was written before it failed.
        let in_part = known.is_some_and(|(table, own)| {
            table.members.get(own).is_some_and(|own| own.id == member.id) && table.event + 1 >= member.failed_at
        });
        let done = self.wait_for(move |me, cx| Box::pin(async move { me.readmit(cx, leg, !in_part).await }))?;
        done.map_err(|source| ServiceError::Leg { what: "take into use", leg: volume.name().to_owned(), source })?;
        let what = if in_part { "with what it missed" } else { "with everything" };
        Ok(format!("leg {leg} is being filled {what}"))
    }
}

impl Service for Mirror {
    fn mount(&self, mount: &Mount) -> Result<(), ServiceError> {
        self.take_up(mount)
    }

    fn unmount(&self) -> Result<(), ServiceError> {
        self.put_away()
    }

    fn leave(&self) -> Result<(), ServiceError> {
        // The data lie on every good leg as the guest sees them.
        Ok(())
    }

    fn leg_is_whole(&self, leg: usize) -> bool {
        let settled = self.intent().is_some_and(|intent| intent.stale() == 0);
        let first = self.masks().readable.trailing_zeros() as usize;
        self.masks().readable >> leg & 1 == 1 && (settled || leg == first)
    }

    fn status(&self) -> Status {
        let mut status = Status::good([]);
        let masks = self.masks();
        let states: Vec<LegState> =
            self.on_legs().iter().flat_map(|on_legs| on_legs.table.members.iter().map(|member| member.state)).collect();
        for (at, state) in states.iter().enumerate() {
            let state = match state {
                LegState::Good => "good",
                LegState::Filling => "being filled",
                LegState::Failed => "failed",
            };
            status.facts.push((format!("leg {at}"), state.to_owned()));
        }
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
            ("legs dropped", &self.counters.dropped),
        ] {
            let count = count.load(Ordering::Relaxed);
            if count > 0 {
                fact(name, count.to_string());
            }
        }
        let scrub = self.scrub().clone();
        if scrub.running || scrub.finished > 0 {
            fact("scrub", format!("{} blocks repaired, {} differ", scrub.repaired, scrub.differing));
            if !scrub.listed.is_empty() {
                let list: Vec<_> = scrub.listed.iter().map(u64::to_string).collect();
                fact("differing blocks", list.join(", "));
            }
        }
        if scrub.running {
            status.progress.push(Progress { what: "scrub".to_owned(), done: scrub.at, total: self.bytes });
        }
        if let Some((done, total)) = self.resync_progress() {
            status.progress.push(Progress { what: "resync (regions)".to_owned(), done, total });
        }
        status
    }

    fn command(&self, command: &str, arguments: &Settings) -> Result<String, ServiceError> {
        match command {
            "fail" => self.fail_leg(self.leg_argument(arguments)?),
            "rebuild" => self.rebuild_leg(self.leg_argument(arguments)?),
            "scrub" => {
                self.start_scrub();
                Ok("scrub begins; \"volume show\" tells how far it is".to_owned())
            }
            "stop" => {
                self.scrub().running = false;
                Ok("no scrub is running".to_owned())
            }
            _ => Err(ServiceError::no_command(&KIND, command)),
        }
    }

    fn tasks(self: Arc<Self>) -> Vec<Task> {
        vec![Task::new("mirror upkeep", move |cx, stop| Box::pin(self.upkeep(cx, stop)))]
    }
}
