//! Scrub: checks all parity, and repairs what can be decided.

use millrace_block::{TaskContext, clock};
use millrace_memory::BufferPool;

use super::Parity;
use crate::{
    background::{Pace, Stop},
    members::{SCRUB_TURN, intent::Intent},
};

/// Rows that are listed.
const LISTED: usize = 16;

/// A scrub, and what it found.
#[derive(Clone, Debug, Default)]
pub(super) struct Scrub {
    pub(super) running: bool,
    /// Bytes of each leg done.
    pub(super) at: u64,
    /// Parts and blocks that were wrong on some leg and are right now.
    pub(super) repaired: u64,
    /// Blocks of each leg where parity and data do not fit, and nothing tells which is wrong.
    pub(super) differing: u64,
    /// The first of them, as blocks of a leg.
    pub(super) listed: Vec<u64>,
    /// Rows that could not be read.
    pub(super) unread: u64,
    /// Scrubs that came to their end.
    pub(super) finished: u64,
    /// It was ended before it was done.
    pub(super) cut_short: bool,
    /// It has just made way for what may differ: the next turn is its own, or writes that fail again and again would stop it.
    made_way: bool,
}

impl Parity {
    /// Carries on with a scrub if one was asked for: until parity may not fit somewhere, every other
    /// time, and for a while at most. Whether that was over.
    pub(super) async fn scrub_if_asked(&self, cx: TaskContext<'_>, stop: &Stop, pool: &BufferPool) -> bool {
        let (mut pace, began) = (Pace::new(self.plan.rate), clock::now());
        let suspicions = || self.members.intent().map(Intent::suspicions);
        let (before, makes_way) = (suspicions(), !std::mem::take(&mut self.scrub().made_way));
        while !stop.is_set() {
            let Some(at) = self.scrub_place() else { return false };
            let Some(rows) = self.rows_in(at, self.members.bytes()).next() else { return false };
            let (done, looked) = self.look_at(cx, stop, pool, rows).await;
            let shift = self.shape().block_size.shift();
            {
                let mut scrub = self.scrub();
                // Unless it was begun anew meanwhile.
                if scrub.at != at {
                    continue;
                }
                scrub.at += done;
                match looked {
                    Ok(looked) => {
                        scrub.repaired += looked.repaired;
                        scrub.differing += looked.unknown;
                        if let Some(first) = looked.first.filter(|_| scrub.listed.len() < LISTED) {
                            let block = (rows.stripe * self.layout.chunk + first) >> shift;
                            scrub.listed.push(block);
                            tracing::error!(
                                name = self.name,
                                block,
                                "parity and data do not fit at this block of the legs, and nothing tells which is wrong: \
                                 compare with a backup, \"fail\" each leg that is wrong, and then \"rebuild\" it"
                            );
                        }
                    }
                    Err(error) => {
                        scrub.unread += 1;
                        tracing::error!(name = self.name, stripe = rows.stripe, %error, "a scrub could not read rows");
                    }
                }
            }
            pace.spend(cx, stop, done).await;
            // Not because something is stale: what cannot be brought in order would let no scrub end.
            if makes_way && suspicions() != before {
                self.scrub().made_way = true;
                return false;
            }
            if clock::now().saturating_sub(began) >= SCRUB_TURN {
                return true;
            }
        }
        false
    }

    /// Where the scrub goes on, if there is one that does not end here.
    fn scrub_place(&self) -> Option<u64> {
        let mut scrub = self.scrub();
        if !scrub.running {
            return None;
        }
        if self.members.masks().readable.count_ones() as usize <= self.layout.data() {
            (scrub.running, scrub.cut_short) = (false, true);
            tracing::warn!(
                name = self.name,
                at = scrub.at,
                "a scrub ends before it is done: no more legs are good than the data need, and there is no parity to check"
            );
            return None;
        }
        if scrub.at >= self.members.bytes() {
            (scrub.running, scrub.finished) = (false, scrub.finished + 1);
            let Scrub { repaired, differing, unread, .. } = &*scrub;
            tracing::info!(name = self.name, repaired, differing, unread, "scrub finished");
            return None;
        }
        Some(scrub.at)
    }

    /// Starts a scrub from the beginning.
    pub(super) fn start_scrub(&self) {
        let mut scrub = self.scrub();
        let finished = scrub.finished;
        *scrub = Scrub { running: true, finished, ..Scrub::default() };
    }
}
