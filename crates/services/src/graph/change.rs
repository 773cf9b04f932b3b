//! Exchanging a graph under a running volume.

use std::{cell::Cell, cmp::Reverse, sync::Arc, time::Duration};

use millrace_block::{ChangeError, Switch};
use thiserror::Error;

use super::{Built, Graph, GraphError, view};
use crate::{
    legs,
    service::{LegOrigin, Mount, Reason, Service, ServiceError},
    throttle,
};

/// Why a volume was not changed. The old graph is in force.
#[derive(Debug, Error)]
pub enum ChangeFailed {
    /// The new stack has another size.
    #[error("the volume has {old} bytes and the new stack {new}: {way}")]
    Size {
        /// Bytes now.
        old: u64,
        /// Bytes then.
        new: u64,
        /// What to do.
        way: &'static str,
    },
    /// The new stack shows other bytes.
    #[error(
        "the new stack would show other data than the volume has{why}; --reformat changes it all the same, and loses them"
    )]
    OtherData {
        /// More, if something can be done about it.
        why: String,
    },
    /// A request needs more scratch than the shards' tasks have.
    #[error(
        "a request would need {needed} bytes of its task's memory, and {room} are there: the stack is too deep or too wide"
    )]
    TooDeep {
        /// Bytes needed.
        needed: usize,
        /// Bytes there.
        room: usize,
    },
    /// A node refused.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// The switch refused.
    #[error(transparent)]
    Switch(ChangeError<GraphError>),
    /// What had to be stored was not.
    #[error("the change could not be stored: {0}")]
    Store(String),
}

/// How a service comes and goes whose legs do not show the volume's data as they are.
pub(super) const BY_MIGRATION: &str =
    "a service that keeps something on its legs comes and goes by a migration, \"millrace volume migrate NAME --to STACK\"";
/// How often legs are brought into order at most before it is said that they are not.
const LEAVES: usize = 4;

/// What to do about a volume that would have another size: where a service comes or goes that keeps something on its legs, no resize helps.
fn way(old: &Graph, new: &Graph) -> &'static str {
    let [gone, fresh] = [services_without(old, new), services_without(new, old)];
    let is_set_alike =
        |one: &Built, other: &Built| (one.node.word(), one.node.settings()) == (other.node.word(), other.node.settings());
    let is_alone = |node: &Arc<Built>, others: &[Arc<Built>]| {
        !view::erases_nothing(&node.node) && !others.iter().any(|other| is_set_alike(node, other))
    };
    if gone.iter().any(|node| is_alone(node, &fresh)) || fresh.iter().any(|node| is_alone(node, &gone)) {
        BY_MIGRATION
    } else {
        "resize it apart from the change"
    }
}

/// What goes and what comes.
struct Difference {
    gone: Vec<Arc<Built>>,
    new: Vec<Arc<Built>>,
    /// How each of `new` comes into force.
    mounts: Vec<Mount>,
    /// Those of `new` whose leaves nothing has that is there: they come into force before the pause, and nobody waits for what they clear.
    ahead: Vec<Arc<Built>>,
    /// The leaves that each of `new` begins to erase when it is mounted, of those where the old graph has something.
    erases: Vec<Vec<String>>,
    /// Some of that was done, and then the change failed.
    has_erased: Cell<bool>,
}

fn services_without(graph: &Graph, other: &Graph) -> Vec<Arc<Built>> {
    let others = other.nodes();
    let here = graph.nodes().into_iter().filter(|node| node.service.is_some());
    here.filter(|node| !has(&others, node)).collect()
}

/// Whether two nodes have a leaf in common.
fn related(one: &Built, other: &Built) -> bool {
    let leaves = other.node.leaves();
    one.node.leaves().iter().any(|leaf| leaves.iter().any(|other| other.spec == leaf.spec))
}

/// Whether a leg shows the same as the one before it: a migration begins there, goes on otherwise, or ends, or something was put over it
/// or taken off that shows what is below.
fn is_same(before: &Built, now: &Built) -> bool {
    let [old, new] = [before, now].map(|leg| leg.volume.geometry().bytes());
    old == new && view::meet(&view::of_built(before), &view::of_new(now))
}

/// Whether a leg shows what a leg of the service before did in its place, or is one of its legs.
fn is_kept(previous: &Built, node: &Built, leg: usize) -> bool {
    let (before, leg) = (previous.legs.get(leg), &node.legs[leg]);
    before.is_some_and(|before| is_same(before, leg)) || has(&previous.legs, leg)
}

/// Which of what goes each of what comes takes the place of: one of its kind over a leaf of its own. Of several the one with the most legs that
/// are kept, for what a service has left on its legs is of use over those only; then the one in the same place.
fn pairs(gone: &[Arc<Built>], fresh: &[Arc<Built>], is_apart: &dyn Fn(&Arc<Built>) -> bool) -> Vec<Option<Arc<Built>>> {
    let mut all = Vec::new();
    for (at, node) in fresh.iter().enumerate().filter(|(_, node)| !is_apart(node)) {
        let is_like = |before: &Built| before.node.word() == node.node.word() && related(before, node);
        for (from, before) in gone.iter().enumerate().filter(|(_, before)| is_like(before)) {
            let kept = (0..node.legs.len()).filter(|leg| is_kept(before, node, *leg)).count();
            let is_elsewhere = before.volume.name() != node.volume.name();
            all.push((Reverse(kept), is_elsewhere, at, from));
        }
    }
    all.sort_unstable();
    let (mut pairs, mut taken) = (vec![None; fresh.len()], vec![false; gone.len()]);
    for (_, _, at, from) in all {
        if pairs[at].is_none() && !taken[from] {
            (pairs[at], taken[from]) = (Some(Arc::clone(&gone[from])), true);
        }
    }
    pairs
}

/// The leaves below a node.
fn leaves_of(node: &Arc<Built>) -> Vec<Arc<Built>> {
    Built::nodes(node).into_iter().filter(|node| node.service.is_none()).collect()
}

fn has(nodes: &[Arc<Built>], node: &Arc<Built>) -> bool {
    nodes.iter().any(|other| Arc::ptr_eq(other, node))
}

/// The leaves of the old graph that a node erases, at least in part, when it is mounted so: not where it goes on over the legs of the one before,
/// which it does only if it arranges them alike, nor what it shows as the volume had it.
fn erased_by(
    node: &Built,
    mount: &Mount,
    previous: Option<&Built>,
    (old, shown): (&[Arc<Built>], &[String]),
) -> Vec<String> {
    if !mount.reformat || view::erases_nothing(&node.node) {
        return Vec::new();
    }
    let begins_anew = previous.is_some_and(|previous| view::own_layout(&previous.node) != view::own_layout(&node.node));
    let is_left = |at: usize, leg: &Built| view::is_shown(&node.node, at) && view::meet(&view::of_new(leg), shown);
    let legs = node.legs.iter().zip(&mount.legs).enumerate();
    let erased = legs.filter(|(at, (leg, origin))| (begins_anew || **origin != LegOrigin::Kept) && !is_left(*at, leg));
    let leaves = erased.flat_map(|(_, (leg, _))| leaves_of(leg)).filter(|leaf| has(old, leaf));
    leaves.map(|leaf| leaf.node.word().to_owned()).collect()
}

/// What is below the legs that migrations are about to fill: made for them, as for a new volume.
fn below_new_legs(fresh: &[Arc<Built>]) -> Vec<Arc<Built>> {
    let moves = fresh.iter().filter(|node| view::is_moving(&node.node));
    let legs = moves.filter_map(|node| node.legs.get(1)).flat_map(Built::nodes);
    legs.filter(|below| has(fresh, below)).collect()
}

/// Whether it is a migration whose new leg has everything.
fn has_moved(node: &Built) -> bool {
    view::is_moving(&node.node) && node.service.as_ref().is_some_and(|service| service.leg_is_whole(1))
}

impl Difference {
    fn between(old: &Graph, new: &Graph, reformat: bool) -> Self {
        let (gone, fresh) = (services_without(old, new), services_without(new, old));
        let old_nodes = old.nodes();
        let shown = view::of_built(&old.root);
        let fresh_legs = below_new_legs(&fresh);
        let is_apart = |node: &Arc<Built>| has(&fresh_legs, node);
        let pairs = pairs(&gone, &fresh, &is_apart);
        let mount = |(node, previous): (&Arc<Built>, Option<&Arc<Built>>)| {
            if is_apart(node) {
                return Mount {
                    reason: Reason::Create,
                    legs: vec![LegOrigin::Kept; node.legs.len()],
                    previous: None,
                    reformat,
                };
            }
            let legs = node.legs.iter().enumerate().map(|(at, leg)| {
                if previous.is_some_and(|previous| is_kept(previous, node, at)) {
                    LegOrigin::Kept
                } else if has(&old_nodes, leg) && view::meet(&view::of_built(leg), &shown) {
                    LegOrigin::Data
                } else {
                    LegOrigin::New
                }
            });
            let legs = legs.collect();
            let previous = previous.and_then(|previous| previous.service.clone());
            Mount { reason: Reason::Change, legs, previous, reformat }
        };
        let mounts: Vec<_> = fresh.iter().zip(pairs.iter().map(Option::as_ref)).map(mount).collect();
        let erased = |((node, mount), previous): ((&Arc<Built>, &Mount), Option<&Built>)| {
            erased_by(node, mount, previous, (&old_nodes[..], &shown[..]))
        };
        let erases = fresh.iter().zip(&mounts).zip(pairs.iter().map(Option::as_deref)).map(erased).collect();
        // A disk is known by its name, whatever its leaves are, and clears nothing.
        let is_ahead = |node: &&Arc<Built>| !node.node.is_disk() && !related(&old.root, node);
        let ahead = fresh.iter().filter(is_ahead).cloned().collect();
        Self { gone, new: fresh, mounts, ahead, erases, has_erased: Cell::new(false) }
    }

    /// Whether only services come and go that keep nothing on their legs.
    fn keeps_nothing(&self) -> bool {
        self.gone.iter().chain(&self.new).all(|node| view::keeps_nothing(&node.node))
    }

    /// Whether a service is taken out, and so brings its legs into order first. One of the same kind that takes over finds everything
    /// as it is.
    fn leaves(&self, node: &Built) -> bool {
        self.lost().any(|lost| std::ptr::eq(Arc::as_ptr(lost), node))
    }

    /// What is taken out brings its legs into order. Why one cannot matters if the new graph needs its legs, and not otherwise: nobody is to
    /// stay because a leg that goes as well holds nothing by itself.
    fn leave(&self, old: &Graph, new: &Graph) -> Result<(), ChangeFailed> {
        let mut refused = None;
        for node in self.lost() {
            if let Some(Err(source)) = node.service.as_ref().map(|service| service.leave()) {
                refused.get_or_insert(GraphError::Service { node: node.name.clone(), source });
            }
        }
        check_data(old, new, &|_| false).map_err(|missing| refused.map_or(missing, ChangeFailed::Graph))
    }

    /// The same while requests come. Writes that were in flight when something was brought into order may have undone it, and those that came
    /// later have not.
    fn leave_under_load(&self, old: &Graph, new: &Graph) -> Result<(), ChangeFailed> {
        (1..LEAVES).find_map(|_| self.leave(old, new).ok()).map_or_else(|| self.leave(old, new), Ok)
    }

    fn is_ahead(&self, node: &Arc<Built>) -> bool {
        has(&self.ahead, node)
    }

    /// Mounts what may come into force while requests go on, or none of it.
    fn mount_ahead(&self) -> Result<(), GraphError> {
        // Legs before what is over them.
        let mut done: Vec<&Arc<Built>> = Vec::new();
        for (node, mount) in self.new.iter().zip(&self.mounts).rev().filter(|(node, _)| self.is_ahead(node)) {
            if let Err(error) = node.mount(mount) {
                done.iter().rev().for_each(|node| give_up(node));
                return Err(error);
            }
            done.push(node);
        }
        Ok(())
    }

    /// Unmounts what goes and mounts what comes, or leaves everything as it was. What is mounted ahead stays so.
    fn carry_out(&self, old: &Graph, new: &Graph, reformat: bool) -> Result<(), GraphError> {
        let (moved, used) = (self.moved(), self.used_legs());
        for node in &self.gone {
            node.unmount();
        }
        let lost = || if reformat { None } else { lost_at_the_end(&used, old, new) };
        let refused = || self.new.iter().zip(&self.mounts).find_map(|(node, mount)| may_mount(node, mount).err());
        if let Some(error) = failed_at_the_end(&moved, new).or_else(lost).or_else(refused) {
            return Err(self.way_back(error, &[], None));
        }
        // Legs before what is over them.
        let mut done: Vec<&Arc<Built>> = Vec::new();
        for (node, mount) in self.new.iter().zip(&self.mounts).rev().filter(|(node, _)| !self.is_ahead(node)) {
            if let Err(error) = node.mount(mount) {
                done.reverse();
                // Refused by a leg, or without a thread for more, it may have begun; of all else it says so.
                let begins = |source: &ServiceError| {
                    matches!(source, ServiceError::Leg { .. } | ServiceError::Engine(_) | ServiceError::HalfWay(_))
                };
                let has_begun = matches!(&error, GraphError::Service { source, .. } if begins(source));
                return Err(self.way_back(error, &done, has_begun.then_some(node)));
            }
            done.push(node);
        }
        Ok(())
    }

    /// Migrations that are over.
    fn moved(&self) -> Vec<Arc<Built>> {
        self.gone.iter().filter(|node| has_moved(node)).map(Arc::clone).collect()
    }

    /// Legs of what goes that are in use.
    fn used_legs(&self) -> Vec<(&Built, usize)> {
        let all = self.gone.iter().flat_map(|node| (0..node.legs.len()).map(move |leg| (&**node, leg)));
        all.filter(|(node, leg)| node.uses(*leg)).collect()
    }

    /// Takes back what came, each before its legs, and mounts again what was about to go, because of an error: returns that, and what the way
    /// back met with. One of those that come may have been stopped `half_way`.
    fn way_back(&self, change: GraphError, came: &[&Arc<Built>], half_way: Option<&Arc<Built>>) -> GraphError {
        for node in came {
            self.take_back(node);
        }
        let mut failed = None;
        for node in self.gone.iter().rev() {
            let legs = vec![LegOrigin::Kept; node.legs.len()];
            let mount = Mount { reason: Reason::Open, legs, previous: None, reformat: false };
            if let Err(error) = mount_again(node, &mount, self.instead_of(node)) {
                tracing::error!(%error, "a change failed, and so did the way back: the service does not work");
                failed.get_or_insert(error);
            }
        }
        let erased = self.erased(|node| came.iter().copied().chain(half_way).any(|came| Arc::ptr_eq(came, node)));
        match failed.or(erased) {
            None => change,
            Some(back) => GraphError::WayBack { change: Box::new(change), back: Box::new(back) },
        }
    }

    /// The loss, if those that came and were taken back have begun to erase what the old graph had.
    fn erased(&self, came: impl Fn(&Arc<Built>) -> bool) -> Option<GraphError> {
        let pairs = self.new.iter().zip(&self.erases).filter(|(new, _)| came(new));
        let mut leaves: Vec<_> = pairs.flat_map(|(_, leaves)| leaves).map(String::as_str).collect();
        leaves.sort_unstable();
        leaves.dedup();
        if leaves.is_empty() {
            return None;
        }
        self.has_erased.set(true);
        let node = leaves.join(", ");
        let what = "what the volume had there may be gone, at least in part: the new stack may have begun to erase it";
        tracing::error!(legs = node, "a change failed, and {what}");
        Some(GraphError::Service { node, source: ServiceError::NotNow(what.to_owned()) })
    }

    /// The service that takes the place of one that goes, where no other than that and those above it can have written to the legs of the one:
    /// all its legs stay as they are, and are legs of the other if of anybody.
    fn instead_of(&self, gone: &Arc<Built>) -> Option<&Arc<dyn Service>> {
        let mut pairs = self.new.iter().zip(&self.mounts);
        let (new, mount) = pairs.find(|(_, mount)| is_service(mount.previous.as_ref(), gone))?;
        let (below, own, others) = (Built::nodes(new), leaves_of(gone), leaves_of(new));
        let is_beside = |node: &Arc<Built>| {
            let is_below = !Arc::ptr_eq(node, new) && has(&below, node) && !self.is_ahead(node);
            is_below || leaves_of(node).iter().any(|leaf| has(&own, leaf) && !has(&others, leaf))
        };
        let is_over_one_that_goes = Built::nodes(gone)[1..].iter().any(|node| has(&self.gone, node));
        let is_sure = !mount.reformat && !is_over_one_that_goes && !self.new.iter().any(is_beside);
        new.service.as_ref().filter(|_| is_sure)
    }

    fn undo(&self, error: GraphError) -> GraphError {
        let came: Vec<_> = self.new.iter().filter(|node| !self.is_ahead(node)).collect();
        self.way_back(error, &came, None)
    }

    /// Unmounts what came; what is not there in another form goes for good.
    fn take_back(&self, node: &Arc<Built>) {
        let mount = self.new.iter().zip(&self.mounts).find(|(new, _)| Arc::ptr_eq(new, node));
        if mount.is_some_and(|(_, mount)| mount.previous.is_none()) { give_up(node) } else { node.unmount() }
    }

    /// Whether one that goes knows of a loss that nobody in its place has taken over: the guest is told by the switch.
    fn ends_untold(&self) -> bool {
        let is_told_by = |node: &Built| {
            let mut pairs = self.new.iter().zip(&self.mounts);
            pairs.any(|(new, mount)| is_service(mount.previous.as_ref(), node) && new.has_untold())
        };
        self.gone.iter().any(|node| node.has_untold() && !is_told_by(node))
    }

    /// The same of one that came and was taken back: it may have lost something when it was unmounted.
    fn undone_untold(&self) -> bool {
        let knows = |mount: &Mount| mount.previous.as_ref().is_some_and(|previous| previous.has_untold());
        self.new.iter().zip(&self.mounts).any(|(new, mount)| new.has_untold() && !knows(mount))
    }

    /// What went and is there in no other form.
    fn lost(&self) -> impl Iterator<Item = &Arc<Built>> {
        let replaced = |node: &Built| self.mounts.iter().any(|mount| is_service(mount.previous.as_ref(), node));
        self.gone.iter().filter(move |node| !replaced(node))
    }
}

/// How a change is made.
pub struct Terms<'a> {
    /// How long requests in flight are waited for.
    pub patience: Duration,
    /// The volume's data may be lost.
    pub reformat: bool,
    /// Scratch bytes that a request may take.
    pub scratch: usize,
    /// The services of the volumes that `old` is made of: while requests wait, these let go what they hold back as its own do.
    pub below: &'a [Arc<dyn Service>],
    /// Stores the change: while no request goes on and the new graph is mounted, or before, see `restore`.
    pub store: &'a mut dyn FnMut() -> Result<(), String>,
    /// Stores what was before, after a change that was stored and then failed. With it, a change is stored before requests wait where it
    /// does not matter which of the two graphs is found after a crash.
    pub restore: Option<&'a mut dyn FnMut()>,
}

/// Puts `new`, which was built beside `old`, in its place. Returns the length of the pause, and the graph that is not in force any
/// more has no tasks.
///
/// # Errors
/// Why it is not; then `old` goes on.
pub fn change(switch: &Switch, old: &mut Graph, new: &mut Graph, terms: Terms<'_>) -> Result<Duration, ChangeFailed> {
    let reformat = terms.reformat;
    let (before, after) = (old.volume().geometry(), new.volume().geometry());
    if (before.bytes(), before.block_size) != (after.bytes(), after.block_size) {
        return Err(ChangeFailed::Size { old: before.bytes(), new: after.bytes(), way: way(old, new) });
    }
    let needed = new.volume().scratch_bytes();
    if needed > terms.scratch {
        return Err(ChangeFailed::TooDeep { needed, room: terms.scratch });
    }
    let difference = Difference::between(old, new, reformat);
    if !reformat {
        check_data(old, new, &|node| difference.leaves(node))?;
    }
    // Before legs are brought into order, which requests that come in the meantime would undo.
    difference.mount_ahead()?;
    let ahead = difference.ahead.clone();
    let result = make(switch, old, new, difference, terms);
    if result.is_err() {
        // Here, and not in the pause: a disk that takes room back may be clearing another volume's.
        for node in &ahead {
            give_up(node);
        }
    }
    result
}

/// The rest of a [`change`], once that is in force which nobody need wait for.
fn make(
    switch: &Switch,
    old: &mut Graph,
    new: &mut Graph,
    difference: Difference,
    mut terms: Terms<'_>,
) -> Result<Duration, ChangeFailed> {
    let reformat = terms.reformat;
    if !reformat {
        difference.leave_under_load(old, new)?;
    }
    // With `reformat` it was not asked above.
    let is_same = || !reformat || check_data(old, new, &|_| false).is_ok();
    let Some(restore) = terms.restore.take().filter(|_| difference.keeps_nothing() && is_same()) else {
        return exchange(switch, old, new, difference, terms);
    };
    // Both graphs show the same and find nothing else: a crash may leave either, and requests need not wait for the state's disk.
    (terms.store)().map_err(ChangeFailed::Store)?;
    let Terms { patience, scratch, below, .. } = terms;
    let stored = Terms { patience, reformat, scratch, below, store: &mut || Ok(()), restore: None };
    let result = exchange(switch, old, new, difference, stored);
    if result.is_err() {
        restore();
    }
    result
}

fn exchange(
    switch: &Switch,
    old: &mut Graph,
    new: &mut Graph,
    mut difference: Difference,
    terms: Terms<'_>,
) -> Result<Duration, ChangeFailed> {
    let Terms { patience, reformat, below, store, .. } = terms;
    let stopped = old.stop(&difference.gone);
    if let Err(error) = stopped {
        let nodes = old.nodes();
        old.start(&nodes);
        return Err(error.into());
    }
    let moved = difference.moved();
    let unhindered = !below.iter().any(holds_back);
    for node in difference.gone.iter().filter(|node| unhindered && !node.legs.iter().any(is_held_back)) {
        node.service.iter().for_each(|service| service.settle());
    }
    if let Some(error) = failed_at_the_end(&moved, new) {
        let nodes = old.nodes();
        old.start(&nodes);
        return Err(error.into());
    }
    // This thread's ring is made before anybody waits.
    let _ = legs::block_on(|_| Box::pin(async {}));
    let hurried: Vec<_> = old.all_services().into_iter().chain(below.iter().cloned()).collect();
    hurry(&hurried, true);
    let result = switch.change(new.volume(), patience, || {
        if !reformat {
            // What was in flight has ended. A leg may have failed since; from here on none does, and what each holds is decided.
            difference.leave(old, new).map_err(|error| match error {
                ChangeFailed::Graph(error) => error,
                error => {
                    GraphError::Service { node: "the change".to_owned(), source: ServiceError::NotNow(error.to_string()) }
                }
            })?;
        }
        difference = Difference::between(old, new, reformat);
        difference.carry_out(old, new, reformat)?;
        let stored = store().map_err(|error| {
            difference.undo(GraphError::Service { node: "the change".to_owned(), source: ServiceError::NotNow(error) })
        });
        if stored.is_ok() && difference.ends_untold() {
            switch.note_loss();
        }
        stored
    });
    // Those that stay, or that took over what the old ones had.
    hurry(&hurried, false);
    match result {
        Ok(pause) => {
            difference.lost().for_each(|node| node.discard(true));
            new.tasks.append(&mut old.tasks);
            let nodes = new.nodes();
            new.start(&nodes);
            Ok(pause)
        }
        Err(error) => {
            if difference.undone_untold() || difference.has_erased.get() {
                switch.note_loss();
            }
            let nodes = old.nodes();
            old.start(&nodes);
            Err(ChangeFailed::Switch(error))
        }
    }
}

fn holds_back(service: &Arc<dyn Service>) -> bool {
    throttle::held_back(service).is_some()
}

/// Whether a throttle is there or below: what is written through it takes as long as it says.
fn is_held_back(node: &Arc<Built>) -> bool {
    node.service.as_ref().is_some_and(holds_back) || node.legs.iter().any(is_held_back)
}

/// Services let go what they hold back, or may hold back again.
pub fn hurry(services: &[Arc<dyn Service>], on: bool) {
    for service in services {
        service.hurry(on);
    }
}

fn may_mount(node: &Built, mount: &Mount) -> Result<(), GraphError> {
    let Some(service) = &node.service else { return Ok(()) };
    service.may_mount(mount).map_err(|source| GraphError::Service { node: node.name.clone(), source })
}

fn mount_again(node: &Built, mount: &Mount, instead: Option<&Arc<dyn Service>>) -> Result<(), GraphError> {
    let Some(service) = &node.service else { return Ok(()) };
    service.mount_again(mount, instead).map_err(|source| GraphError::Service { node: node.name.clone(), source })
}

/// Unmounts what came into force for a change that is not made, and gives up what it has of what others share.
fn give_up(node: &Built) {
    node.unmount();
    node.discard(false);
}

/// What is above a migration writes its last through it: where that ended one that was over, its new leg is not for what comes.
fn failed_at_the_end(moved: &[Arc<Built>], new: &Graph) -> Option<GraphError> {
    let nodes = new.nodes();
    let node = moved.iter().find(|node| !has_moved(node) && has(&nodes, &node.legs[1]))?;
    let source = ServiceError::NotNow("the new leg failed when the last was written".to_owned());
    Some(GraphError::Service { node: node.name.clone(), source })
}

/// What goes flushes and writes its last to its legs, and whoever is above it does so through it. Where a leg that stays failed then, those that
/// go may be the only ones that have everything. `used` are the legs that were in use before.
fn lost_at_the_end(used: &[(&Built, usize)], old: &Graph, new: &Graph) -> Option<GraphError> {
    if check_data(old, new, &|_| false).is_ok() {
        return None;
    }
    let failed = used.iter().find(|(node, leg)| !node.uses(*leg));
    let (node, why) = match failed {
        Some((node, leg)) => (
            node.legs[*leg].name.clone(),
            "it failed when the last was written, and only what is to go has all data now: the volume goes on as it was. Replace this one, or bring \
             it in order first",
        ),
        None => (
            "the change".to_owned(),
            "a leg failed when the last was written, and only what is to go has all data now: the volume goes on as it was. \"millrace volume show\" \
             says how its legs are",
        ),
    };
    Some(GraphError::Service { node, source: ServiceError::NotNow(why.to_owned()) })
}

fn is_service(previous: Option<&Arc<dyn Service>>, node: &Built) -> bool {
    previous.zip(node.service.as_ref()).is_some_and(|(one, other)| Arc::ptr_eq(one, other))
}

/// Whether the new graph shows what the old one does; services that `leaves` names are yet to bring their legs into order.
fn check_data(old: &Graph, new: &Graph, leaves: &dyn Fn(&Built) -> bool) -> Result<(), ChangeFailed> {
    if view::meet(&view::of_built_after(&old.root, leaves), &view::of_new(&new.root)) {
        return Ok(());
    }
    let why = if view::compatible(&old.root.node, &new.root.node) {
        ": the legs that stay do not hold all of them now (\"millrace volume show\" says which do)"
    } else {
        ""
    };
    Err(ChangeFailed::OtherData { why: why.to_owned() })
}
