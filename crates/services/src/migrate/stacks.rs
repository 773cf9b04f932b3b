//! Stacks with a migration in them: how one is put in, found and taken out.

use super::SERVICE;
use crate::{
    graph::is_one_of_many,
    registry,
    settings::Settings,
    stack::{Leaf, Node, ServiceNode},
};

/// A migration in a stack.
#[derive(Clone, Copy, Debug)]
pub struct Migration<'a> {
    /// What has the data.
    pub from: &'a Node,
    /// What is to have them.
    pub to: &'a Node,
    /// Bytes per second at most.
    pub rate: Option<u64>,
}

/// Which leg stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stays {
    /// The one that had the data before.
    Old,
    /// The one that they went to.
    New,
}

/// The migration in a stack; the first one, if there are several.
pub fn migration(stack: &Node) -> Option<Migration<'_>> {
    match stack {
        Node::Service(node) if node.service == SERVICE => {
            let [from, to] = &node.legs[..] else { return None };
            Some(Migration { from, to, rate: node.settings.size("rate").ok().flatten() })
        }
        _ => stack.legs().iter().find_map(migration),
    }
}

/// The stack without migrations: one of the legs is in the place of each.
#[must_use]
pub fn without(stack: &Node, stays: Stays) -> Node {
    match stack {
        Node::Service(node) if node.service == SERVICE && node.legs.len() == 2 => {
            without(&node.legs[usize::from(stays == Stays::New)], stays)
        }
        Node::Service(node) => {
            let legs = node.legs.iter().map(|leg| without(leg, stays)).collect();
            Node::Service(ServiceNode { legs, ..node.clone() })
        }
        Node::Leaf(_) => stack.clone(),
    }
}

/// The same migration at another rate.
#[must_use]
pub fn with_rate(stack: &Node, rate: Option<u64>) -> Node {
    let Node::Service(node) = stack else { return stack.clone() };
    let mut changed = node.clone();
    if node.service == SERVICE {
        changed.settings = settings(node.settings.iter().filter(|(name, _)| *name != "rate"), rate);
    } else {
        changed.legs = node.legs.iter().map(|leg| with_rate(leg, rate)).collect();
    }
    Node::Service(changed)
}

fn settings<'a>(others: impl Iterator<Item = (&'a str, &'a str)>, rate: Option<u64>) -> Settings {
    let mut settings = Settings::default();
    if let Some(rate) = rate {
        settings.add("rate", &rate.to_string());
    }
    for (name, value) in others {
        settings.add(name, value);
    }
    settings
}

/// A way through a stack: the number of a leg for each level.
type Way = Vec<usize>;

/// All nodes with the ways to them, each before its legs.
fn nodes<'a>(node: &'a Node, way: &[usize], into: &mut Vec<(Way, &'a Node)>) {
    into.push((way.to_vec(), node));
    for (at, leg) in node.legs().iter().enumerate() {
        nodes(leg, &[way, &[at]].concat(), into);
    }
}

fn shares(node: &Node) -> bool {
    registry::find(node.word()).is_some_and(|kind| kind.shares_legs)
}

/// What is meant where no leg is named: what lies below all that is over one leg, a share of a disk being one thing.
fn usual(stack: &Node) -> Result<Way, String> {
    let (mut node, mut way) = (stack, Vec::new());
    loop {
        match node.legs() {
            [only] if !shares(node) => {
                node = only;
                way.push(0);
            }
            [] | [_] => return Ok(way),
            legs => {
                let legs: Vec<_> = legs.iter().map(|leg| format!("{:?}", leg.to_string())).collect();
                let (word, legs) = (node.word(), legs.join(" or "));
                return Err(format!(
                    "{word} is over several legs: say which is to go (--leg), {legs}, or all of it, {word}"
                ));
            }
        }
    }
}

/// The node that is named: by its expression, by the word that it begins with, or by its place.
fn named(stack: &Node, leg: &str) -> Result<Way, String> {
    let mut all = Vec::new();
    nodes(stack, &[], &mut all);
    let (mut exact, mut alike): (Vec<_>, Vec<_>) = (Vec::new(), Vec::new());
    for (way, node) in all {
        if node.to_string() == leg {
            exact.push(way);
        } else if node.word() == leg {
            alike.push(way);
        }
    }
    let mut found = if exact.is_empty() { alike } else { exact };
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => stack.way_to(leg).ok_or_else(|| {
            format!("its stack, {stack}, has no {leg}; a part is named by what stands there, or by its place (mirror.1)")
        }),
        many => Err(format!("its stack, {stack}, has {leg} in {many} places: write more of the one that is to go")),
    }
}

fn node_at<'a>(stack: &'a Node, way: &[usize]) -> &'a Node {
    way.iter().fold(stack, |node, leg| &node.legs()[*leg])
}

fn put(node: &Node, way: &[usize], new: Node) -> Node {
    match (node, way) {
        (Node::Service(service), [leg, way @ ..]) => {
            let mut changed = service.clone();
            changed.legs[*leg] = put(&service.legs[*leg], way, new);
            Node::Service(changed)
        }
        _ => new,
    }
}

/// The stack in which a leg is being migrated to `to`; `leg` is as the operator wrote it.
///
/// # Errors
/// Why that cannot be, for the operator.
pub fn begin(stack: &Node, leg: Option<&str>, to: &Node, rate: Option<u64>) -> Result<Node, String> {
    let way = leg.map_or_else(|| usual(stack), |leg| named(stack, leg))?;
    let from = node_at(stack, &way);
    if let Some((_, above)) = way.split_last()
        && shares(node_at(stack, above))
    {
        let (disk, share) = (from.word(), node_at(stack, above).word());
        return Err(format!(
            "{disk} is a disk that volumes share: migrate the part of it, --leg {share}, or the disk itself"
        ));
    }
    if from.is_disk() || to.is_disk() {
        return Err("a disk is migrated by what is below it".to_owned());
    }
    if without_sizes(from) == without_sizes(to) {
        return Err(format!("{from} is where it is already"));
    }
    if migration(to).is_some() {
        return Err(format!("{to} has a migration in it"));
    }
    let in_memory = |node: &Node| node.leaves().into_iter().any(is_one_of_many);
    if in_memory(to) && in_memory(stack) {
        return Err("one place in memory cannot be told from another: migrate to a file, or from one".to_owned());
    }
    let mut to = to.clone();
    if let (Node::Leaf(Leaf { settings: had, .. }), Node::Leaf(Leaf { settings: has, .. })) = (from, &mut to)
        && let Some(size) = had.text("size")
    {
        // Without effect if another one is stated.
        has.add("size", size);
    }
    let legs = vec![from.clone(), to];
    let node = ServiceNode { service: SERVICE.to_owned(), settings: settings(std::iter::empty(), rate), legs };
    Ok(put(stack, &way, Node::Service(node)))
}

/// What has the data, as it is written where nothing is said of migrations and of sizes.
pub(crate) fn place(node: &Node) -> Node {
    without_sizes(&without(node, Stays::Old))
}

/// A leaf is the same whatever size is stated.
fn without_sizes(node: &Node) -> Node {
    match node {
        Node::Leaf(leaf) => Node::leaf(leaf.spec.clone()),
        Node::Service(service) => {
            let legs = service.legs.iter().map(without_sizes).collect();
            Node::Service(ServiceNode { legs, ..service.clone() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(text: &str) -> Node {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn what_is_meant_is_found_and_comes_back() {
        for (stack, leg, to, expected) in [
            ("file:/a", None, "file:/b", "move(file:/a, file:/b)"),
            ("throttle(iops=9) | file:/a", None, "file:/b", "throttle(iops=9) | move(file:/a, file:/b)"),
            ("disk | file:/a", None, "file:/b", "disk | move(file:/a, file:/b)"),
            ("meter | share | volume:p", None, "share | volume:q", "meter | move(share | volume:p, share | volume:q)"),
            (
                "meter | share(weight=2) | volume:p",
                Some("share"),
                "file:/b",
                "meter | move(share(weight=2) | volume:p, file:/b)",
            ),
            ("mirror(file:/a, file:/b)", Some("file:/b"), "file:/c", "mirror(file:/a, move(file:/b, file:/c))"),
            ("mirror(file:/a, file:/b)", Some("mirror"), "file:/c", "move(mirror(file:/a, file:/b), file:/c)"),
            (
                "stripe(file:/a(size=9M), null)",
                Some("file:/a"),
                "file:/c",
                "stripe(move(file:/a(size=9M), file:/c(size=9M)), null)",
            ),
            (
                "concat(stripe(null), stripe(memory))",
                Some("stripe | memory"),
                "file:/c",
                "concat(stripe | null, move(stripe | memory, file:/c))",
            ),
            ("stripe(null, null)", Some("stripe.1"), "file:/c", "stripe(null, move(null, file:/c))"),
            ("mirror(file:/a, file:/b)", Some("top"), "file:/c", "move(mirror(file:/a, file:/b), file:/c)"),
        ] {
            let moving = begin(&node(stack), leg, &node(to), None).unwrap();
            assert_eq!(moving.to_string(), node(expected).to_string());
            assert_eq!(moving.to_string().parse::<Node>().unwrap(), moving);
            assert_eq!(without(&moving, Stays::Old), node(stack));
            let at = migration(&moving).unwrap();
            assert_eq!((at.rate, at.to.word()), (None, node(to).word()));
            let new = without(&moving, Stays::New);
            assert!(migration(&new).is_none() && new.to_string().contains(node(to).word()), "{new}");
            let slow = with_rate(&moving, Some(4096));
            assert_eq!(migration(&slow).unwrap().rate, Some(4096));
            assert_eq!(with_rate(&slow, None), moving);
        }
    }

    #[test]
    fn what_cannot_be_is_told() {
        for (stack, leg, to, why) in [
            (
                "mirror(file:/a, file:/b)",
                None,
                "file:/c",
                "mirror is over several legs: say which is to go (--leg), \"file:/a\" or",
            ),
            ("file:/a", Some("file:/x"), "file:/c", "has no file:/x"),
            ("mirror(null, file:/b)", Some("mirror.2"), "file:/c", "has no mirror.2; a part is named by"),
            ("mirror(null, file:/b)", Some("1"), "file:/c", "or by its place (mirror.1)"),
            ("stripe(null, null)", Some("null"), "file:/c", "has null in 2 places"),
            (
                "share | volume:p",
                Some("volume:p"),
                "file:/c",
                "volume:p is a disk that volumes share: migrate the part of it, --leg share",
            ),
            ("disk | file:/a", Some("disk"), "file:/c", "a disk is migrated by what is below it"),
            ("file:/a", None, "file:/a(size=1M)", "file:/a is where it is already"),
            ("file:/a", None, "move(file:/b, file:/c)", "has a migration in it"),
            ("memory", None, "memory", "is where it is already"),
            ("memory", None, "stripe | memory", "one place in memory cannot be told from another"),
        ] {
            let error = begin(&node(stack), leg, &node(to), None).unwrap_err();
            assert!(error.contains(why), "{stack}, {leg:?}, {to}: {error}");
        }
    }
}
