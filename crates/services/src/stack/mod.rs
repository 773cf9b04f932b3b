//! A volume's stack: services over services over back ends, as it is written.
//!
//! ```text
//!   throttle(iops=1000) | mirror(file:/a.img, file:/b.img)
//!   └ service, settings    └ service over two legs, which are leaves here
//! ```
//!
//! `a | b` means a over b: what stands right of the bar is the last leg of what stands left of it.

mod document;
mod parse;
mod sizes;
#[cfg(test)]
mod tests;

use std::{fmt, path::Path};

use thiserror::Error;

pub use parse::ParseError;

use crate::{
    registry,
    service::Kind,
    settings::{SettingError, Settings, Word},
};

/// Back ends that are a word, not a word with a colon.
const PLAIN_LEAVES: &[&str] = &["memory", "null"];
/// What can be set on a leaf.
const LEAF_SETTINGS: &[&str] = &["size"];
/// Levels a stack may have, those of volumes in it counted: each may take two of the buffers' levels, and front ends, a copy and back
/// ends need three more.
pub const MAX_DEPTH: usize = (millrace_memory::BufferPool::LEVELS - 3) / 2;
/// Nodes a stack may have.
const MAX_NODES: usize = 256;

/// A node, with everything below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Node {
    /// A back end, or another volume.
    Leaf(Leaf),
    /// A service over its legs.
    Service(ServiceNode),
}

/// Where blocks end up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// `memory`, `null`, `file:PATH`, `nvme:ADDRESS` or `volume:NAME`.
    pub spec: String,
    /// `size` and what else the back end understands.
    pub settings: Settings,
}

/// A service and what it is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceNode {
    /// Its name in the table of services.
    pub service: String,
    /// Its settings.
    pub settings: Settings,
    /// What it is over, in order.
    pub legs: Vec<Node>,
}

/// A node that cannot be as it is written.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{node}: {what}")]
pub struct NodeError {
    /// The node's name: its service, and for all but the first its place (`mirror`, `mirror.1`).
    pub node: String,
    /// Its setting that is wrong; `None`: it is the node itself.
    pub setting: Option<String>,
    /// What is wrong.
    pub what: String,
    /// The way to it: the number of a leg for each level.
    pub(crate) path: Vec<usize>,
}

/// Whether a word names a leaf.
pub(crate) fn is_leaf(word: &str) -> bool {
    word.contains(':') || PLAIN_LEAVES.contains(&word)
}

impl Leaf {
    /// A leaf without settings.
    pub fn new(spec: impl Into<String>) -> Self {
        Self { spec: spec.into(), settings: Settings::default() }
    }

    /// The path of a file, if it is one.
    pub fn file(&self) -> Option<&Path> {
        self.spec.strip_prefix("file:").map(Path::new)
    }

    /// The name of a volume, if it is one.
    pub fn volume(&self) -> Option<&str> {
        self.spec.strip_prefix("volume:")
    }

    /// Whether its blocks are in memory of the daemon's.
    pub fn is_memory(&self) -> bool {
        self.spec == "memory"
    }
}

impl Node {
    /// A leaf without settings.
    pub fn leaf(spec: impl Into<String>) -> Self {
        Self::Leaf(Leaf::new(spec))
    }

    /// Its settings.
    pub fn settings(&self) -> &Settings {
        match self {
            Self::Leaf(leaf) => &leaf.settings,
            Self::Service(node) => &node.settings,
        }
    }

    /// What it is over.
    pub fn legs(&self) -> &[Node] {
        match self {
            Self::Leaf(_) => &[],
            Self::Service(node) => &node.legs,
        }
    }

    /// The word it begins with.
    pub fn word(&self) -> &str {
        match self {
            Self::Leaf(leaf) => &leaf.spec,
            Self::Service(node) => &node.service,
        }
    }

    /// The back end, when the stack has no service at all.
    pub fn as_leaf(&self) -> Option<&Leaf> {
        match self {
            Self::Leaf(leaf) => Some(leaf),
            Self::Service(_) => None,
        }
    }

    /// The number of a leg for each level down to a place, as "volume show" and messages write one: "top", or "mirror.0.1".
    pub fn way_to(&self, place: &str) -> Option<Vec<usize>> {
        if place == crate::graph::TOP {
            return Some(Vec::new());
        }
        let legs = place.strip_prefix(self.word())?.strip_prefix('.')?;
        let way: Vec<usize> = legs.split('.').map(|leg| leg.parse().ok()).collect::<Option<_>>()?;
        way.iter().try_fold(self, |node, leg| node.legs().get(*leg))?;
        Some(way)
    }

    /// Levels, itself counted.
    pub fn depth(&self) -> usize {
        1 + self.legs().iter().map(Node::depth).max().unwrap_or(0)
    }

    /// All leaves, from left to right.
    pub fn leaves(&self) -> Vec<&Leaf> {
        match self {
            Self::Leaf(leaf) => vec![leaf],
            Self::Service(node) => node.legs.iter().flat_map(Node::leaves).collect(),
        }
    }

    /// Files that settings name (`key=file:PATH`): they are read. Those of leaves are not among them.
    pub fn setting_files(&self) -> Vec<&Path> {
        let own = self.settings().iter().filter_map(|(_, value)| value.strip_prefix("file:").map(Path::new));
        own.chain(self.legs().iter().flat_map(Node::setting_files)).collect()
    }

    /// Whether it is something that volumes have parts of.
    pub fn is_disk(&self) -> bool {
        matches!(self, Self::Service(node) if registry::find(&node.service).is_some_and(|kind| kind.is_disk))
    }

    /// Makes relative paths absolute, of leaves and in settings (`key=file:PATH`): they start from `base`.
    #[must_use]
    pub fn resolved(mut self, base: &Path) -> Self {
        let resolve = |value: &str| {
            let path = value.strip_prefix("file:").filter(|path| !path.is_empty())?;
            let path: std::path::PathBuf = base.join(path).components().collect();
            Some(format!("file:{}", path.to_str()?))
        };
        self.map_words(&resolve);
        self
    }

    fn map_words(&mut self, change: &dyn Fn(&str) -> Option<String>) {
        match self {
            Self::Leaf(leaf) => {
                if let Some(spec) = change(&leaf.spec) {
                    leaf.spec = spec;
                }
            }
            Self::Service(node) => {
                node.settings.map_values(change);
                node.legs.iter_mut().for_each(|leg| leg.map_words(change));
            }
        }
    }

    /// Checks everything that can be told without touching anything: services, settings, numbers of legs, depth.
    ///
    /// # Errors
    /// The first node that is wrong.
    pub fn check(&self) -> Result<(), NodeError> {
        let mut nodes = 0;
        self.check_below(&mut Vec::new(), "", &mut nodes)
    }

    fn check_below(&self, path: &mut Vec<usize>, above: &str, nodes: &mut usize) -> Result<(), NodeError> {
        let name = node_name(above, self.word(), path.last().copied());
        let wrong = |what: String| NodeError { node: name.clone(), setting: None, what, path: path.clone() };
        let setting = |SettingError { name: setting, why }: SettingError| NodeError {
            node: name.clone(),
            what: format!("{setting}: {why}"),
            setting: Some(setting),
            path: path.clone(),
        };
        *nodes += 1;
        if path.len() >= MAX_DEPTH || *nodes > MAX_NODES {
            return Err(wrong(format!("a stack has at most {MAX_DEPTH} levels and {MAX_NODES} nodes")));
        }
        let node = match self {
            Self::Leaf(leaf) => return check_leaf(leaf).map_err(setting),
            Self::Service(node) => node,
        };
        let Some(kind) = registry::find(&node.service) else { return Err(wrong(no_service(&node.service))) };
        let known: Vec<_> = kind.settings.iter().map(|setting| setting.name).collect();
        if let Some((unknown, _)) = node.settings.iter().find(|(name, _)| !known.contains(name)) {
            return Err(setting(SettingError::new(unknown, no_setting(&known))));
        }
        // Before the settings are understood: one that is missing there may be what such a leg was meant to be.
        if let Some((at, word)) = stray(&node.legs) {
            let path = [&path[..], &[at]].concat();
            return Err(match mistaken(&known, word) {
                Some(what) => NodeError { node: name.clone(), setting: None, what, path },
                None => NodeError { node: node_name(&name, word, Some(at)), setting: None, what: no_service(word), path },
            });
        }
        (kind.plan)(&node.settings).map_err(setting)?;
        let (least, most) = (*kind.legs.start(), *kind.legs.end());
        if !kind.legs.contains(&node.legs.len()) {
            let wanted = if least == most { format!("{least}") } else { format!("{least} to {most}") };
            return Err(wrong(format!("it is over {} legs; {wanted} are possible", node.legs.len())));
        }
        if let Some(what) = misplaced(kind, &node.legs) {
            return Err(wrong(what));
        }
        for (at, leg) in node.legs.iter().enumerate() {
            path.push(at);
            leg.check_below(path, &name, nodes)?;
            path.pop();
        }
        Ok(())
    }
}

/// The name of a node in messages: that of the service above it and the number of the leg, and what it is.
pub(crate) fn node_name(above: &str, word: &str, leg: Option<usize>) -> String {
    match leg {
        Some(leg) if !above.is_empty() => {
            let above = above.split(' ').next().unwrap_or_default();
            format!("{above}.{leg} ({word})")
        }
        _ => word.to_owned(),
    }
}

/// The first leg that is neither a service nor a back end.
fn stray(legs: &[Node]) -> Option<(usize, &str)> {
    let is_stray = |leg: &Node| match leg {
        Node::Service(node) => registry::find(&node.service).is_none(),
        // A setting whose value has a colon.
        Node::Leaf(leaf) => leaf.spec.split(':').next().is_some_and(|kind| kind.contains('=')),
    };
    let at = legs.iter().position(is_stray)?;
    Some((at, legs[at].word()))
}

/// What is wrong with a word that is no service.
fn no_service(word: &str) -> String {
    if word.contains(['/', '.']) {
        return format!("there is no such service; a file or block device is written file:{}", Word(word));
    }
    let known: Vec<_> = registry::all().iter().map(|kind| kind.name).collect();
    let known = known.join(", ");
    format!("there is no such service; there are {known}; or a back end: memory, null, file:PATH, nvme:ADDRESS, volume:NAME")
}

fn no_setting(known: &[&str]) -> String {
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    format!("there is no such setting; there are {known}")
}

/// What is wrong with a word that stands where a leg does and was meant to be a setting, one of these or another.
fn mistaken(known: &[&str], word: &str) -> Option<String> {
    let (name, value) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
    let small = name.to_ascii_lowercase();
    match (known.contains(&small.as_str()), value) {
        (true, Some(value)) => Some(format!("{name}: settings are in small letters: {small}={}", Word(value))),
        (true, None) => Some(format!("{name}: this setting needs a value: {small}=…")),
        (false, Some(_)) => Some(format!("{name}: {}", no_setting(known))),
        (false, None) => None,
    }
}

/// What is wrong with a disk, or the want of one, below a service of this kind.
fn misplaced(kind: &Kind, legs: &[Node]) -> Option<String> {
    let volume = |leg: &Node| leg.as_leaf().is_some_and(|leaf| leaf.volume().is_some());
    if kind.shares_legs && !legs.iter().all(|leg| leg.is_disk() || volume(leg)) {
        return Some(format!("it is over a disk only: {} | volume:DISK", kind.name));
    }
    let misplaced = !kind.shares_legs && legs.iter().any(Node::is_disk);
    misplaced.then(|| "a disk is below it, which stands at the top of its own volume, or right below a share".to_owned())
}

fn check_leaf(leaf: &Leaf) -> Result<(), SettingError> {
    let kind = leaf.spec.split(':').next().unwrap_or_default();
    if kind.is_empty() || !kind.chars().all(|c| c.is_ascii_lowercase()) || !is_leaf(&leaf.spec) {
        return Err(SettingError::new("leaf", "write memory, null, file:PATH, nvme:ADDRESS or volume:NAME"));
    }
    if let Some((unknown, _)) = leaf.settings.iter().find(|(name, _)| !LEAF_SETTINGS.contains(name)) {
        return Err(SettingError::new(unknown, "a leaf has the setting size only"));
    }
    leaf.settings.size("size").map(|_| ())
}

fn list(f: &mut fmt::Formatter<'_>, settings: &Settings, legs: &[Node]) -> fmt::Result {
    if settings.is_empty() && legs.is_empty() {
        return Ok(());
    }
    let mut between = "(";
    for (name, value) in settings.iter() {
        write!(f, "{between}{name}={}", Word(value))?;
        between = ", ";
    }
    for leg in legs {
        write!(f, "{between}{leg}")?;
        between = ", ";
    }
    f.write_str(")")
}

impl fmt::Display for Leaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.spec.split_once(':') {
            Some((kind, rest)) => write!(f, "{kind}:{}", Word(rest))?,
            None => f.write_str(&self.spec)?,
        }
        list(f, &self.settings, &[])
    }
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Leaf(leaf) => leaf.fmt(f),
            Self::Service(node) => {
                f.write_str(&node.service)?;
                match &node.legs[..] {
                    [only] => {
                        list(f, &node.settings, &[])?;
                        write!(f, " | {only}")
                    }
                    legs => list(f, &node.settings, legs),
                }
            }
        }
    }
}
