//! Groups: what volumes have together, and groups within groups. A group has caps, which throttles ask (`throttle(group=…)`), and a
//! weight, by which a saturated disk is divided (`share(group=…)`).

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use super::{
    Caps,
    level::{LEVELS, Level},
};
use crate::{service::ServiceError, settings::SettingError, shared::SharedObjects, stack::Node};

/// Groups that may be within each other.
const DEEPEST: usize = LEVELS - 1;

/// A part of a saturated disk, beside others' parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight(u32);

impl Weight {
    /// A weight.
    ///
    /// # Errors
    /// When there is none like this.
    pub fn new(weight: u32) -> Result<Self, SettingError> {
        if (1..=1000).contains(&weight) {
            Ok(Self(weight))
        } else {
            Err(SettingError::new("weight", "1 to 1000 is possible"))
        }
    }

    pub(crate) fn get(self) -> u32 {
        self.0
    }
}

impl Default for Weight {
    fn default() -> Self {
        Self(1)
    }
}

impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A group that is declared. It is there as long as somebody keeps it; whoever declares it does not give it up while it is used
/// ([`groups_of`]).
pub struct Group {
    name: String,
    within: Option<Arc<Self>>,
    /// Its own level, and those of the groups that it is in.
    levels: Vec<Arc<Level>>,
    /// A [`Weight`].
    weight: AtomicU32,
}

fn key(name: &str) -> String {
    format!("throttle/group/{name}")
}

impl Group {
    /// Declares a group, which may be within another one. Its weight is 1.
    ///
    /// # Errors
    /// When there are too many groups within each other.
    pub fn declare(
        shared: &SharedObjects,
        name: &str,
        within: Option<&Arc<Self>>,
        caps: &Caps,
    ) -> Result<Arc<Self>, SettingError> {
        let above = within.map_or(&[][..], |within| &within.levels);
        if above.len() >= DEEPEST {
            return Err(SettingError::new("within", format!("{DEEPEST} groups within each other are possible, not more")));
        }
        let levels = std::iter::once(Arc::default()).chain(above.iter().cloned()).collect();
        let make = || Self { name: name.to_owned(), within: within.cloned(), levels, weight: AtomicU32::new(1) };
        let group = shared.get(&key(name), make);
        group.set(caps);
        Ok(group)
    }

    /// A group that no stack can name, for [`limited`](super::limited).
    pub fn alone(name: &str, caps: &Caps) -> Arc<Self> {
        let levels = vec![Arc::default()];
        let group = Arc::new(Self { name: name.to_owned(), within: None, levels, weight: AtomicU32::new(1) });
        group.set(caps);
        group
    }

    /// The group that a setting names.
    pub(crate) fn find(shared: &SharedObjects, name: &str) -> Result<Arc<Self>, ServiceError> {
        let missing = || {
            let why = format!(
                "there is no group {name}; \"millrace group create {name}\" makes one; with isolation it is at worker main, \
                 and volumes of other workers find those that the configuration file declares (docs/isolation.md)"
            );
            ServiceError::Setting(SettingError::new("group", why))
        };
        shared.find(&key(name)).ok_or_else(missing)
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The group that it is in.
    pub(crate) fn within(&self) -> Option<&Arc<Self>> {
        self.within.as_ref()
    }

    /// Its own level, and those of the groups that it is in.
    pub(super) fn levels(&self) -> &[Arc<Level>] {
        &self.levels
    }

    /// Gives it other caps, at once and under any load. What it holds or owes stays the same.
    pub fn set(&self, caps: &Caps) {
        self.levels[0].set(&caps.rates, &[]);
    }

    pub(crate) fn weight(&self) -> Weight {
        Weight(self.weight.load(Ordering::Relaxed))
    }

    /// Gives it another weight, on all disks, at once and under any load.
    pub fn set_weight(&self, weight: Weight) {
        self.weight.store(weight.0, Ordering::Relaxed);
    }

    /// Requests that it was the first to hold back, from the volume upward.
    pub fn held_back(&self) -> u64 {
        self.levels[0].held_back()
    }
}

/// The groups that a stack names.
pub fn groups_of(stack: &Node) -> Vec<&str> {
    let knows_groups = stack.word() == super::KIND.name || stack.word() == crate::share::KIND.name;
    let here = knows_groups.then(|| stack.settings().text("group")).flatten();
    here.into_iter().chain(stack.legs().iter().flat_map(groups_of)).collect()
}
