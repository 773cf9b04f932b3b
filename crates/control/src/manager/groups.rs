//! Groups: caps and a weight that volumes have together. Volumes name them in their stacks (`throttle(group=gold)`, `share(group=gold)`).

use std::sync::Arc;

use millrace_services::throttle;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Inner, Manager};
use crate::{
    Name,
    error::ControlError,
    model::{GroupCaps, GroupChange, GroupSpec},
    store::Changes,
};

/// A group: what is stored of it, and the thing itself.
pub(super) struct Group {
    pub(super) spec: GroupSpec,
    live: Arc<throttle::Group>,
}

/// A group as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GroupView {
    /// Its name.
    #[schema(value_type = String)]
    pub name: Name,
    /// The group that it is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub within: Option<Name>,
    /// Its caps.
    pub caps: GroupCaps,
    /// Its part of a saturated disk beside the others' weights.
    pub weight: u32,
    /// Volumes whose stacks name it.
    #[schema(value_type = Vec<String>)]
    pub volumes: Vec<Name>,
    /// Groups that are in it.
    #[schema(value_type = Vec<String>)]
    pub groups: Vec<Name>,
    /// Requests that it held back since the daemon started, of those that no narrower cap did.
    pub held_back: u64,
}

/// What a volume's throttles have held back, together.
pub(crate) struct ThrottleView {
    pub(crate) volume: Name,
    pub(crate) requests: u64,
    pub(crate) nanoseconds: u64,
}

impl Manager {
    /// What throttles have held back, of all volumes that have one.
    pub(crate) fn throttles(&self) -> Vec<ThrottleView> {
        let inner = self.peek();
        let of_volume = |(name, volume): (&Name, &super::Volume)| {
            let services = volume.graph.as_ref()?.graph.services("throttle");
            let held = services.iter().filter_map(|(_, service)| throttle::held_back(service));
            let (requests, nanoseconds) = held.reduce(|sum, one| (sum.0 + one.0, sum.1 + one.1))?;
            Some(ThrottleView { volume: name.clone(), requests, nanoseconds })
        };
        inner.volumes.iter().filter_map(of_volume).collect()
    }

    /// All groups.
    pub fn groups(&self) -> Vec<GroupView> {
        let inner = self.peek();
        inner.groups.values().map(|group| inner.group_view(group)).collect()
    }

    /// A group.
    pub fn group(&self, name: &str) -> Result<GroupView, ControlError> {
        let inner = self.peek();
        Ok(inner.group_view(inner.find_group(name)?))
    }

    /// Creates a group.
    pub fn create_group(&self, spec: &GroupSpec) -> Result<GroupView, ControlError> {
        let mut inner = self.lock()?;
        let group = inner.make_group(spec)?;
        self.store.apply(&Changes { put_groups: vec![spec], ..Changes::default() })?;
        tracing::info!(group = %spec.name, "group created");
        inner.groups.insert(spec.name.clone(), group);
        Ok(inner.group_view(inner.find_group(spec.name.as_str())?))
    }

    /// Gives a group other caps, in the place of all that it has, or another weight, under any load.
    pub fn change_group(&self, name: &str, change: &GroupChange) -> Result<GroupView, ControlError> {
        let mut inner = self.lock()?;
        let mut spec = inner.find_group(name)?.spec.clone();
        let GroupChange { caps, weight } = change.clone();
        if caps.is_none() && weight.is_none() {
            return Err(ControlError::invalid(
                "group",
                &spec.name,
                "say which caps or which weight it shall have".to_owned(),
            ));
        }
        spec.caps = caps.unwrap_or(spec.caps);
        spec.weight = weight.unwrap_or(spec.weight);
        let (caps, weight) = spec.read()?;
        self.store.apply(&Changes { put_groups: vec![&spec], ..Changes::default() })?;
        tracing::info!(group = name, "group changed");
        if let Some(group) = inner.groups.get_mut(name) {
            group.spec = spec;
            group.live.set(&caps);
            group.live.set_weight(weight);
        }
        Ok(inner.group_view(inner.find_group(name)?))
    }

    /// A group, if nothing here is in the way of its end but what is in it.
    pub(crate) fn group_to_delete(&self, name: &str) -> Result<GroupView, ControlError> {
        let inner = self.lock()?;
        let view = inner.group_view(inner.find_group(name)?);
        inner.check_nothing_changes()?;
        Ok(view)
    }

    /// Deletes a group that nothing is in.
    pub fn delete_group(&self, name: &str) -> Result<(), ControlError> {
        let mut inner = self.lock()?;
        let view = inner.group_view(inner.find_group(name)?);
        if !view.volumes.is_empty() || !view.groups.is_empty() {
            let GroupView { name, volumes, groups, .. } = view;
            return Err(ControlError::GroupInUse { name, volumes, groups });
        }
        inner.check_nothing_changes()?;
        self.store.apply(&Changes { remove_groups: vec![&view.name], ..Changes::default() })?;
        tracing::info!(group = name, "group deleted");
        inner.groups.remove(name);
        Ok(())
    }
}

impl Inner {
    fn find_group(&self, name: &str) -> Result<&Group, ControlError> {
        self.groups.get(name).ok_or_else(|| ControlError::NoGroup { name: name.to_owned() })
    }

    /// Whether no volume is getting another stack: that may name any group.
    fn check_nothing_changes(&self) -> Result<(), ControlError> {
        match self.changing.keys().next() {
            Some(volume) => Err(ControlError::Changing { name: volume.clone() }),
            None => Ok(()),
        }
    }

    /// Makes a group, without telling anyone.
    pub(super) fn make_group(&self, spec: &GroupSpec) -> Result<Group, ControlError> {
        let name = &spec.name;
        if self.groups.contains_key(name) {
            return Err(ControlError::GroupExists { name: name.clone() });
        }
        let within = spec.within.as_ref().map(|within| self.find_group(within.as_str())).transpose()?;
        let (caps, weight) = spec.read()?;
        let live = throttle::Group::declare(&self.means.shared, name.as_str(), within.map(|group| &group.live), &caps);
        let live = live.map_err(|error| ControlError::invalid("group", name, error.to_string()))?;
        live.set_weight(weight);
        Ok(Group { spec: spec.clone(), live })
    }

    /// Brings back stored groups, each after the one that it is in.
    pub(super) fn restore_groups(&mut self, mut left: Vec<GroupSpec>) {
        while !left.is_empty() {
            let waits = |spec: &GroupSpec| left.iter().any(|other| Some(&other.name) == spec.within.as_ref());
            // None that can go first: a circle, which no change makes. They fail one by one.
            let spec = left.remove(left.iter().position(|spec| !waits(spec)).unwrap_or(0));
            match self.make_group(&spec) {
                Ok(group) => drop(self.groups.insert(spec.name, group)),
                Err(error) => tracing::error!(group = %spec.name, %error, "the group could not be restored"),
            }
        }
    }

    fn group_view(&self, group: &Group) -> GroupView {
        let GroupSpec { name, within, caps, weight } = group.spec.clone();
        let names = |stack| throttle::groups_of(stack).into_iter().any(|group| group == name.as_str());
        let specs = self.volumes.values().map(|volume| &volume.record.spec);
        let volumes = specs.filter(|spec| names(&spec.stack)).map(|spec| spec.name.clone()).collect();
        let inside = self.groups.values().filter(|other| other.spec.within.as_ref() == Some(&name));
        let groups = inside.map(|other| other.spec.name.clone()).collect();
        GroupView { volumes, groups, held_back: group.live.held_back(), name, within, caps, weight }
    }
}
