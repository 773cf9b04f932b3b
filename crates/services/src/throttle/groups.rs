//! Groups: caps that volumes have together, and groups within groups.

use std::sync::Arc;

use super::{
    Caps,
    level::{LEVELS, Level},
};
use crate::{settings::SettingError, shared::SharedObjects, stack::Node};

/// A group that is declared. It is there as long as somebody keeps it; whoever declares it does not give it up while it is used
/// ([`groups_of`]).
pub struct Group {
    /// Its own level, and those of the groups that it is in.
    levels: Vec<Arc<Level>>,
}

fn key(name: &str) -> String {
    format!("throttle/group/{name}")
}

impl Group {
    /// Declares a group, which may be within another one.
    ///
    /// # Errors
    /// When there are too many groups within each other.
    pub fn declare(
        shared: &SharedObjects,
        name: &str,
        within: Option<&Group>,
        caps: &Caps,
    ) -> Result<Arc<Self>, SettingError> {
        let above = within.map_or(&[][..], |within| &within.levels);
        if above.len() + 2 > LEVELS {
            let most = LEVELS - 1;
            return Err(SettingError::new("within", format!("{most} groups within each other are possible, not more")));
        }
        let levels = std::iter::once(Arc::default()).chain(above.iter().cloned()).collect();
        let group = shared.get(&key(name), || Self { levels });
        group.set(caps);
        Ok(group)
    }

    /// The group of this name.
    pub(super) fn find(shared: &SharedObjects, name: &str) -> Option<Arc<Self>> {
        shared.find(&key(name))
    }

    /// Its own level, and those of the groups that it is in.
    pub(super) fn levels(&self) -> &[Arc<Level>] {
        &self.levels
    }

    /// Gives it other caps, at once and under any load. What it holds or owes stays the same.
    pub fn set(&self, caps: &Caps) {
        self.levels[0].set(&caps.rates, None);
    }

    /// Requests that it was the first to hold back, from the volume upward.
    pub fn held_back(&self) -> u64 {
        self.levels[0].held_back()
    }
}

/// The groups that a stack's throttles name.
pub fn groups_of(stack: &Node) -> Vec<&str> {
    let here = (stack.word() == super::KIND.name).then(|| stack.settings().text("group")).flatten();
    here.into_iter().chain(stack.legs().iter().flat_map(groups_of)).collect()
}
