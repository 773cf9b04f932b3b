//! Which requests go wrong, and how.

use std::time::Duration;

use millrace_block::{BlockCount, BlockError, Lba, Operation, Request, conformance::Random};

/// Kinds of requests, without their details.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// [`Operation::Read`].
    Read,
    /// [`Operation::Write`].
    Write,
    /// [`Operation::Flush`].
    Flush,
    /// [`Operation::WriteZeroes`].
    WriteZeroes,
    /// [`Operation::Deallocate`].
    Deallocate,
    /// [`Operation::Compare`].
    Compare,
    /// [`Operation::Copy`].
    Copy,
}

impl Kind {
    /// How many there are.
    pub(super) const COUNT: usize = 7;

    /// The kind of an operation.
    pub fn of(operation: Operation) -> Self {
        match operation {
            Operation::Read => Self::Read,
            Operation::Write { .. } => Self::Write,
            Operation::Flush => Self::Flush,
            Operation::WriteZeroes { .. } => Self::WriteZeroes,
            Operation::Deallocate => Self::Deallocate,
            Operation::Compare => Self::Compare,
            Operation::Copy { .. } => Self::Copy,
        }
    }
}

/// Which of the requests that a rule is about it strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Every one.
    Always,
    /// One only: the n-th from now, counted from 1.
    Nth(u64),
    /// Every n-th.
    Every(u64),
    /// Each with a probability of one in n.
    OneIn(u64),
}

/// What happens to a request that a rule strikes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It fails, and nothing is done.
    Fail(BlockError),
    /// A flush fails, and what it was for may be lost as by a power cut; the next one succeeds. Other requests fail, and nothing is done.
    Forget(BlockError),
    /// It takes this much longer.
    Delay(Duration),
    /// A write reaches the medium for some of its blocks only, and fails. Other requests fail and do nothing.
    Tear,
    /// It succeeds, but nothing is done: a disk that lies.
    Lose,
    /// One bit of what a read delivers is wrong. Other requests are left alone.
    Corrupt,
}

/// One rule. Of several that strike one request, the first counts.
#[derive(Clone, Debug)]
pub struct Rule {
    /// Kinds of requests it is about; empty: all.
    pub kinds: Vec<Kind>,
    /// Blocks it is about: a request that touches one of them. `None`: any.
    pub range: Option<(Lba, BlockCount)>,
    /// Which of those it strikes.
    pub when: When,
    /// What it does.
    pub effect: Effect,
}

impl Rule {
    /// A rule for requests of one kind, wherever they are.
    pub fn new(kind: Kind, when: When, effect: Effect) -> Self {
        Self { kinds: vec![kind], range: None, when, effect }
    }

    fn is_about(&self, request: &Request<'_>) -> bool {
        let kind = self.kinds.is_empty() || self.kinds.contains(&Kind::of(request.operation));
        let place = self.range.is_none_or(|(lba, count)| {
            request.lba.0 < lba.0.saturating_add(count.0) && lba.0 < request.lba.0.saturating_add(request.count.0)
        });
        kind && place
    }
}

/// The rules in force, and what they have seen.
#[derive(Debug)]
pub(super) struct Rules {
    rules: Vec<(Rule, u64)>,
    pub(super) random: Random,
}

impl Rules {
    pub(super) fn new(seed: u64) -> Self {
        Self { rules: Vec::new(), random: Random::new(seed) }
    }

    pub(super) fn add(&mut self, rule: Rule) {
        self.rules.push((rule, 0));
    }

    pub(super) fn clear(&mut self) {
        self.rules.clear();
    }

    /// What happens to a request, if anything does.
    pub(super) fn judge(&mut self, request: &Request<'_>) -> Option<Effect> {
        let mut verdict = None;
        for (rule, seen) in self.rules.iter_mut().filter(|(rule, _)| rule.is_about(request)) {
            *seen += 1;
            let strikes = match rule.when {
                When::Always => true,
                When::Nth(n) => *seen == n,
                When::Every(n) => seen.is_multiple_of(n),
                When::OneIn(n) => self.random.below(n.max(1)) == 0,
            };
            verdict = verdict.or(strikes.then_some(rule.effect));
        }
        verdict
    }
}
