//! Caps of some of those who ask a volume: what leads them there takes of their group, and for all others the volume is as it is.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32},
};

use millrace_block::{PerShard, Volume, trace::Tap};

use super::{ASKED, Caps, Chain, Group, Lane, Level, Throttle};

/// A way to a volume on which requests take of a group's caps, before all that the volume has of its own. Its metadata, shape and data are the
/// volume's. Each way has queues of its own; those of one group go in the order in which they came, as volumes of a group do.
pub fn limited(volume: &Arc<dyn Volume>, group: &Group) -> Arc<dyn Volume> {
    Arc::new(way(volume, group))
}

pub(super) fn way(volume: &Arc<dyn Volume>, group: &Group) -> Throttle {
    let above: Box<[Arc<Level>]> = group.levels().into();
    let chain = Chain { own: Level::default(), above, hurry: AtomicBool::new(false) };
    Throttle {
        leg: Tap::new(Arc::clone(volume)),
        shift: AtomicU32::new(ASKED),
        lanes: Box::new([Lane { chain, queues: PerShard::default() }]),
        apart: Arc::default(),
        name: volume.name().to_owned(),
        caps: Caps::default(),
        group: None,
        waits: PerShard::default(),
        // Of the volume's own throttles, and this is none.
        of_volume: Arc::default(),
    }
}
