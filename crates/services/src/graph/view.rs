//! Which bytes a stack shows, as far as definitions tell.

use std::sync::Arc;

use crate::{
    registry,
    service::{self, Keeps, Layout, Sizing},
    stack::{Leaf, Node},
};

use super::{Built, is_one_of_many};

/// Texts that each stand for the bytes shown; two stacks that have one in common show the same.
type View = Vec<String>;

/// Alternatives that are looked at for one node.
const MOST: usize = 64;

pub(super) fn plan(node: &Node) -> Option<Box<dyn service::Plan>> {
    let Node::Service(service) = node else { return None };
    (registry::find(&service.service)?.plan)(&service.settings).ok()
}

fn layout(node: &Node) -> Option<Layout> {
    plan(node).map(|plan| plan.layout(node.legs().len()))
}

/// See [`service::Plan::keeps_nothing`].
pub(super) fn keeps_nothing(node: &Node) -> bool {
    plan(node).is_some_and(|plan| plan.keeps_nothing())
}

/// Whether a service leaves what is on its legs as it is when it comes into force, whatever that is.
pub(super) fn erases_nothing(node: &Node) -> bool {
    plan(node).is_some_and(|plan| plan.keeps_nothing() || plan.is_plain())
}

/// Whether a leg's blocks are shown as they are.
pub(super) fn is_shown(node: &Node, leg: usize) -> bool {
    match layout(node) {
        Some(Layout::Same(which)) => which.contains(&leg),
        Some(Layout::Moving) => leg == 0,
        _ => false,
    }
}

/// Whether how much fits on what a stack is made of depends on the size of blocks.
pub fn follows_blocks(node: &Node) -> bool {
    plan(node).is_some_and(|plan| plan.needs_by_blocks()) || node.legs().iter().any(follows_blocks)
}

/// How a service arranges what is on its legs, where it does so in a way of its own.
pub(super) fn own_layout(node: &Node) -> Option<String> {
    match layout(node)? {
        Layout::Own(how) | Layout::OwnOf(how, _) => Some(how),
        _ => None,
    }
}

/// What sizes a leg may have, and whether it is in memory.
pub(super) fn sizing(leg: &Node) -> Sizing {
    let is_stated = leg.leaves().iter().any(|leaf| matches!(leaf.settings.size("size"), Ok(Some(_))));
    Sizing {
        keeps: keeps(leg),
        is_stated_below: leg.as_leaf().is_none() && is_stated,
        is_plain: is_plain(leg),
        is_in_memory: leg.leaves().into_iter().all(Leaf::is_memory),
    }
}

fn is_plain(node: &Node) -> bool {
    match node {
        Node::Leaf(_) => true,
        Node::Service(service) => plan(node).is_some_and(|plan| plan.is_plain()) && service.legs.iter().all(is_plain),
    }
}

fn keeps(node: &Node) -> Keeps {
    if plan(node).is_some_and(|plan| plan.keeps_size()) {
        return Keeps::Size;
    }
    match node.legs() {
        [only] => keeps(only),
        legs if legs.iter().any(|leg| keeps(leg) != Keeps::Nothing) => Keeps::SizeOfParts,
        _ => Keeps::Nothing,
    }
}

fn arranged(how: &str, legs: &[View]) -> View {
    let mut all = vec![String::new()];
    for leg in legs {
        all = all.iter().flat_map(|before| leg.iter().map(move |leg| format!("{before}[{leg}]"))).take(MOST).collect();
    }
    all.into_iter().map(|legs| format!("{how}{legs}")).collect()
}

fn combine(node: &Node, legs: &[View], whole: &dyn Fn(usize) -> bool) -> View {
    let of_whole = |which: &mut dyn Iterator<Item = usize>| -> View {
        which.filter(|leg| whole(*leg)).filter_map(|leg| legs.get(leg)).flatten().cloned().collect()
    };
    match layout(node) {
        None => vec![node.word().to_owned()],
        Some(Layout::Own(how)) => arranged(&how, legs),
        Some(Layout::OwnOf(how, which)) => {
            let legs: Vec<View> = which.iter().filter_map(|leg| legs.get(*leg).cloned()).collect();
            arranged(&how, &legs)
        }
        Some(Layout::Spread { how, spare }) => {
            // All legs as they are, for its own sake; and without as many as can be spared, for who puts others in their places.
            let mut view = arranged(&how, legs);
            let lost = (0..legs.len()).filter(|leg| !whole(*leg)).fold(0_u64, |set, leg| set | 1 << leg);
            for without in 0..1_u64 << legs.len().min(16) {
                if without.count_ones() as usize == spare && lost & !without == 0 {
                    let spared = |(at, leg): (usize, &View)| match without >> at & 1 {
                        0 => leg.clone(),
                        _ => vec!["*".to_owned()],
                    };
                    let legs: Vec<View> = legs.iter().enumerate().map(spared).collect();
                    view.extend(arranged(&how, &legs));
                }
            }
            view
        }
        Some(Layout::Moving) => of_whole(&mut (0..legs.len())),
        Some(Layout::Same(which)) => {
            let mut view = of_whole(&mut which.into_iter());
            view.truncate(MOST);
            // The service over legs that show these bytes, for its own sake: a mirror none of whose legs is whole is still itself, and so is
            // a cache whose slow leg is behind.
            view.extend(arranged(node.word(), legs));
            view
        }
    }
}

/// What a definition shows once it is in force.
pub(super) fn of_node(node: &Node) -> View {
    let legs: Vec<_> = node.legs().iter().map(of_node).collect();
    combine(node, &legs, &|leg| leg == 0 || !is_moving(node))
}

/// Whether the node's first leg is on its way to the second.
pub(super) fn is_moving(node: &Node) -> bool {
    matches!(layout(node), Some(Layout::Moving))
}

/// What a graph that was built shows once it is in force.
pub(super) fn of_new(built: &Built) -> View {
    of_built_after(built, &|_| true)
}

/// What a running graph shows; legs that are not whole do not count.
pub(super) fn of_built(built: &Built) -> View {
    of_built_after(built, &|_| false)
}

/// What a running graph shows once these services have brought their legs into order.
pub(super) fn of_built_after(built: &Built, leaves: &dyn Fn(&Built) -> bool) -> View {
    // Of leaves that look alike, each is itself only.
    if built.node.as_leaf().is_some_and(is_one_of_many) {
        return vec![format!("{}@{:p}", built.node.word(), Arc::as_ptr(&built.volume))];
    }
    let legs: Vec<_> = built.legs.iter().map(|leg| of_built_after(leg, leaves)).collect();
    // The second leg of a move is not made whole by anything but its walk.
    let brought = |leg| leaves(built) && (leg == 0 || !is_moving(&built.node));
    let is_whole = |leg| built.service.as_ref().is_none_or(|service| brought(leg) || service.leg_is_whole(leg));
    combine(&built.node, &legs, &is_whole)
}

/// Whether a stack in the place of another shows the same bytes, as far as definitions tell.
pub fn compatible(old: &Node, new: &Node) -> bool {
    meet(&of_node(old), &of_node(new))
}

pub(super) fn meet(one: &[String], other: &[String]) -> bool {
    one.iter().any(|text| other.contains(text))
}
