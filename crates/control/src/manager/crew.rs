//! Work in threads of its own: each piece may hang, and keeps no other one waiting then.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, Instant},
};

use crate::Name;

/// Threads at once, but for those that have been at their work for [`LONG`].
const MOST: usize = 32;
/// Who takes longer may hang.
const LONG: Duration = Duration::from_millis(100);

type Work<R> = Box<dyn FnOnce() -> R + Send>;

/// See the module. What has not ended when this goes goes on, and nobody hears of its end.
pub(super) struct Crew<R> {
    waiting: VecDeque<(Name, Work<R>)>,
    at_work: BTreeMap<Name, Instant>,
    tell: Sender<(Name, R)>,
    told: Receiver<(Name, R)>,
}

impl<R: Send + 'static> Crew<R> {
    pub(super) fn new() -> Self {
        let (tell, told) = channel();
        Self { waiting: VecDeque::new(), at_work: BTreeMap::new(), tell, told }
    }

    /// Of one name there is one piece at a time.
    pub(super) fn add(&mut self, name: &Name, work: impl FnOnce() -> R + Send + 'static) {
        self.waiting.push_back((name.clone(), Box::new(work)));
    }

    /// The next to end; `None`: there is none any more, or none has ended in time.
    pub(super) fn next_done(&mut self, deadline: Instant) -> Option<(Name, R)> {
        loop {
            self.set_to_work();
            if self.at_work.is_empty() {
                return None;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.told.recv_timeout(left.min(LONG)) {
                Ok(done) => {
                    self.at_work.remove(&done.0);
                    return Some(done);
                }
                Err(_) if left.is_zero() => return None,
                Err(_) => {}
            }
        }
    }

    /// Whose work has not ended.
    pub(super) fn names(&self) -> impl Iterator<Item = &Name> {
        self.waiting.iter().map(|(name, _)| name).chain(self.at_work.keys())
    }

    fn set_to_work(&mut self) {
        let busy = self.at_work.values().filter(|since| since.elapsed() < LONG).count();
        for _ in busy..MOST {
            let Some((name, work)) = self.waiting.pop_front() else { return };
            let (tell, its) = (self.tell.clone(), name.clone());
            let run = move || {
                // Who waited may have waited for long enough.
                let _ = tell.send((its, work()));
            };
            match thread::Builder::new().name("millrace-crew".to_owned()).spawn(run) {
                Ok(_) => {
                    self.at_work.insert(name, Instant::now());
                }
                Err(error) => tracing::error!(%name, %error, "no thread for what is to be done with it"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_hangs_keeps_nobody_waiting() {
        let name = |at: usize| format!("n{at}").parse::<Name>().unwrap();
        let mut crew = Crew::new();
        let hung: Vec<_> = (0..3 * MOST)
            .map(|at| {
                let (release, hangs) = channel::<()>();
                crew.add(&name(at), move || hangs.recv().is_err());
                release
            })
            .collect();
        crew.add(&name(9999), || false);
        let far = Instant::now() + crate::manager::tests::PATIENCE;
        assert_eq!(crew.next_done(far), Some((name(9999), false)), "after those that hang");
        assert_eq!(crew.next_done(Instant::now()), None, "nobody waits longer than he wants");
        drop(hung);
        let ended = std::iter::from_fn(|| crew.next_done(far)).filter(|(_, released)| *released).count();
        assert_eq!((ended, crew.next_done(far)), (3 * MOST, None));
    }
}
