//! The move as a service: coming and going, status.

use std::sync::{Arc, atomic::Ordering};

use super::{KIND, Move, NEW, OLD, Phase, Progress, check_sizes, holes::Holes};
use crate::{
    background::Task,
    service::{self, Health, LegOrigin, Mount, Reason, Service, ServiceError, Status},
    settings::Settings,
};
use millrace_block::Volume;

impl Move {
    /// Learns what the legs do not hold, or what it knew before another pace was set.
    fn look_for_holes(&self, same: Option<&Self>) {
        if let Some(holes) = self.holes.get() {
            // Mounted again: it was not there to see what was written meanwhile.
            return holes.forget();
        }
        let known = same.and_then(|previous| previous.holes.get()).filter(|holes| holes.fit(self.plan.piece));
        let look = || Holes::of(&*self.old, &*self.new, self.bytes(), self.plan.piece).map(Arc::new);
        if let Some(holes) = known.cloned().or_else(look) {
            let _ = self.holes.set(holes);
        }
    }
}

impl Service for Move {
    fn mount(&self, mount: &Mount) -> Result<(), ServiceError> {
        if mount.reason == Reason::Change {
            check_sizes(&*self.old, &*self.new)?;
            if self.old.metadata().shown().is_some() {
                let why = "shows metadata with its blocks, which would be lost: migrate what is below it (--leg)";
                return Err(ServiceError::Legs(format!("{} {why}", self.old.name())));
            }
        }
        let previous = mount.previous::<Self>();
        let same = previous.filter(|previous| {
            Arc::ptr_eq(&previous.old, &self.old) && Arc::ptr_eq(&previous.new, &self.new) && previous.failure().is_none()
        });
        self.look_for_holes(same.as_deref());
        let (mark, compare) = match &same {
            Some(previous) => {
                for (own, other) in [
                    (&self.counters.written, &previous.counters.written),
                    (&self.counters.zeroes, &previous.counters.zeroes),
                    (&self.counters.holes, &previous.counters.holes),
                ] {
                    own.store(other.load(Ordering::Relaxed), Ordering::Relaxed);
                }
                (previous.mark(), previous.compare.load(Ordering::Relaxed))
            }
            // What is new has nothing worth a look. Otherwise a walk before this one may have come far.
            None => (0, mount.reason != Reason::Change || mount.legs.get(NEW) != Some(&LegOrigin::New)),
        };
        self.compare.store(compare, Ordering::Relaxed);
        self.mark.store(mark.min(self.bytes()), Ordering::SeqCst);
        self.enter(Phase::Copying);
        Ok(())
    }

    fn unmount(&self) -> Result<(), ServiceError> {
        Ok(())
    }

    fn leave(&self) -> Result<(), ServiceError> {
        // OLD has everything as it is, and NEW when it is whole: the layer asks.
        Ok(())
    }

    fn leg_is_whole(&self, leg: usize) -> bool {
        leg == OLD || self.is_whole()
    }

    fn status(&self) -> Status {
        let progress = self.progress();
        let state = match &progress {
            Progress::Copying(..) => "copying".to_owned(),
            Progress::Whole => "the new leg has everything".to_owned(),
            Progress::Failed(why) => format!("ended: {why}"),
        };
        let counters = [&self.counters.written, &self.counters.zeroes, &self.counters.holes];
        let [written, zeroes, holes] = counters.map(|counter| counter.load(Ordering::Relaxed).to_string());
        let mut status = Status::good([
            ("migration", state),
            ("bytes written", written),
            ("bytes given back", zeroes),
            ("bytes of holes skipped", holes),
        ]);
        match progress {
            Progress::Failed(_) => status.health = Health::Degraded,
            Progress::Copying(done, total) => {
                status.progress.push(service::Progress { what: "migration".to_owned(), done, total });
            }
            Progress::Whole => {}
        }
        status
    }

    fn command(&self, command: &str, _: &Settings) -> Result<String, ServiceError> {
        Err(ServiceError::no_command(&KIND, command))
    }

    fn tasks(self: Arc<Self>) -> Vec<Task> {
        vec![Task::new("migration", move |cx, stop| Box::pin(self.walk(cx, stop)))]
    }
}
