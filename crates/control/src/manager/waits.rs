//! Volumes that do not answer: told in the log, once, and once more when they do again.
//!
//! ```text
//!   every few seconds ─► shards on which something waits ─► their devices: in flight, and none finished since the last looks? ─► log
//! ```
//!
//! A back end that hangs is no fault of the worker's: nothing is ended for it, commands stay in flight, and the guest's own timeout
//! decides. A volume of which single commands finish is slow, and not named here.

use std::{
    collections::BTreeMap,
    iter,
    sync::{PoisonError, mpsc::channel},
    time::{Duration, Instant},
};

use super::Manager;
use crate::{Name, devices::Work};

/// How often devices are asked.
const LOOK: Duration = Duration::from_secs(5);
/// A volume of which nothing finishes for so long does not answer.
const LONG: Duration = Duration::from_secs(15);

/// How long answers are waited for.
const PATIENCE: Duration = Duration::from_millis(500);

/// A namespace with commands in flight.
#[derive(Clone, Copy, Debug)]
struct Wait {
    finished: u64,
    since: Instant,
    told: bool,
}

/// What there is to say of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Nothing finishes, for so long.
    Hangs(Duration),
    /// It did not answer for so long, and does now.
    GoesOn(Duration),
}

/// Who waits, by device and namespace.
#[derive(Debug, Default)]
pub(super) struct Waits {
    looked: Option<Instant>,
    waiting: BTreeMap<(Name, u32), Wait>,
}

impl Waits {
    /// Whether it is time to look again.
    fn is_due(&mut self, now: Instant) -> bool {
        let due = self.looked.is_none_or(|looked| now.duration_since(looked) >= LOOK);
        if due {
            self.looked = Some(now);
        }
        due
    }

    /// Forgets the device's namespaces that it does not name any more: one may go while its volume hangs.
    fn forget_others(&mut self, device: &Name, named: &[Work]) {
        self.waiting.retain(|(of, nsid), _| of != device || named.iter().any(|work| work.nsid == *nsid));
    }

    /// Takes in what a device asks of a volume now.
    fn look(&mut self, now: Instant, device: &Name, work: Work) -> Option<Verdict> {
        let key = (device.clone(), work.nsid);
        let known = self.waiting.get_mut(&key);
        let stands = known.as_ref().is_some_and(|known| work.in_flight > 0 && known.finished == work.finished);
        match known {
            Some(known) if stands => {
                let waited = now.duration_since(known.since);
                let news = waited >= LONG && !known.told;
                known.told |= news;
                news.then_some(Verdict::Hangs(waited))
            }
            known => {
                let over = known.filter(|known| known.told).map(|known| Verdict::GoesOn(now.duration_since(known.since)));
                if work.in_flight == 0 {
                    self.waiting.remove(&key);
                } else {
                    self.waiting.insert(key, Wait { finished: work.finished, since: now, told: false });
                }
                over
            }
        }
    }

    /// Forgets who is not there any more.
    fn keep(&mut self, there: impl Fn(&Name) -> bool) {
        self.waiting.retain(|(device, _), _| there(device));
    }
}

impl Manager {
    /// Looks for volumes that do not answer; called once a second.
    pub(super) fn watch_volumes(&self) {
        let now = Instant::now();
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        let quiet = waits.waiting.is_empty() && self.shards.iter().all(|shard| shard.stats().tasks_waiting == 0);
        if quiet || !waits.is_due(now) {
            return;
        }
        for (device, all) in self.ask_for_work(now + PATIENCE) {
            waits.forget_others(&device, &all);
            for work in all {
                if let Some(verdict) = waits.look(now, &device, work) {
                    self.tell(verdict, &device, work);
                }
            }
        }
        let inner = self.peek();
        waits.keep(|device| inner.devices.contains_key(device));
    }

    /// What devices ask of their volumes: of those that answer in time. What exists is not locked meanwhile.
    fn ask_for_work(&self, until: Instant) -> Vec<(Name, Vec<Work>)> {
        let (answers, answered) = channel();
        for device in self.peek().devices.values() {
            // One whose shard is gone asks for nothing.
            let _ = device.live.as_ref().map(|live| live.ask_work(answers.clone()));
        }
        drop(answers);
        iter::from_fn(|| answered.recv_timeout(until.saturating_duration_since(Instant::now())).ok()).collect()
    }

    fn tell(&self, verdict: Verdict, device: &Name, Work { nsid, in_flight, .. }: Work) {
        let inner = self.peek();
        let namespaces = inner.devices.get(device).map(|device| &device.record.namespaces);
        let namespace = namespaces.and_then(|all| all.iter().find(|namespace| namespace.nsid == nsid));
        let volume = namespace.map_or("?", |namespace| namespace.volume.as_str());
        match verdict {
            Verdict::Hangs(waited) => tracing::warn!(
                %device,
                nsid,
                volume,
                commands = in_flight,
                seconds = waited.as_secs(),
                "the volume does not answer: none of its commands has finished. The guest waits, and its own timeout decides; look at the \
                 disk, file system or network below the volume (\"volume show\" names it)"
            ),
            Verdict::GoesOn(waited) => {
                tracing::warn!(%device, nsid, volume, seconds = waited.as_secs(), "the volume answers again");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_that_hangs_is_told_once_and_once_more_when_it_answers() {
        let (mut waits, start, device) = (Waits::default(), Instant::now(), "vm1".parse::<Name>().unwrap());
        let mut at = |seconds: u64, in_flight, finished| {
            waits.look(start + Duration::from_secs(seconds), &device, Work { nsid: 1, in_flight, finished })
        };
        assert_eq!(at(0, 3, 10), None);
        assert_eq!(at(10, 4, 10), None, "not long enough");
        assert_eq!(at(20, 4, 10), Some(Verdict::Hangs(Duration::from_secs(20))));
        assert_eq!(at(25, 4, 10), None, "it was told");
        assert_eq!(at(30, 4, 11), Some(Verdict::GoesOn(Duration::from_secs(30))));
        assert_eq!(at(40, 4, 12), None);
        assert_eq!(at(50, 4, 13), None, "slow, and no more");
        assert_eq!(at(66, 4, 13), Some(Verdict::Hangs(Duration::from_secs(16))), "again");
        assert_eq!(at(70, 0, 17), Some(Verdict::GoesOn(Duration::from_secs(20))));
        assert!(waits.waiting.is_empty());
    }

    #[test]
    fn a_namespace_that_goes_while_its_volume_hangs_is_forgotten() {
        let (mut waits, now) = (Waits::default(), Instant::now());
        let [one, other] = ["a", "b"].map(|name| name.parse::<Name>().unwrap());
        let work = |nsid| Work { nsid, in_flight: 1, finished: 0 };
        for (device, nsid) in [(&one, 1), (&one, 2), (&other, 1)] {
            waits.look(now, device, work(nsid));
        }
        waits.forget_others(&one, &[work(2)]);
        assert_eq!(waits.waiting.keys().cloned().collect::<Vec<_>>(), [(one.clone(), 2), (other.clone(), 1)]);
        waits.forget_others(&one, &[]);
        assert_eq!(waits.waiting.keys().cloned().collect::<Vec<_>>(), [(other, 1)]);
    }

    #[test]
    fn who_is_gone_is_forgotten_and_idle_volumes_are_not_known() {
        let (mut waits, now) = (Waits::default(), Instant::now());
        let names = ["a", "b"].map(|name| name.parse::<Name>().unwrap());
        for (name, in_flight) in names.iter().zip([2, 0]) {
            assert_eq!(waits.look(now, name, Work { nsid: 1, in_flight, finished: 0 }), None);
        }
        assert_eq!(waits.waiting.len(), 1);
        waits.keep(|name| *name == names[1]);
        assert!(waits.waiting.is_empty());
        assert!(waits.is_due(now) && !waits.is_due(now + LOOK / 2) && waits.is_due(now + LOOK));
    }
}
