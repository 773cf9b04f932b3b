//! Power cuts in the middle of a format.

use std::sync::Arc;

use millrace_block::BlockSize;

use super::{Rig, graph_of_blocks};
use crate::{
    Reason,
    graph::{Graph, GraphError},
    legs,
    settings::Settings,
};

/// A service with legs that may fail, and a format of it.
pub struct FormatCut<'a> {
    /// An expression over `disk:0`, `disk:1` and so on.
    pub stack: &'a str,
    /// How many disks there are.
    pub disks: usize,
    /// Bytes of each.
    pub disk_bytes: u64,
    /// Bytes of the volume.
    pub size: u64,
    /// A leg that was taken out of use before, and misses what was written last.
    pub failed: Option<usize>,
    /// The block size before, and the one that it is formatted to.
    pub blocks: (BlockSize, BlockSize),
    /// The disks know their own block size, as volumes do. Else they are opened with the one they should have, as files are.
    pub keep_blocks: bool,
    /// Does upkeep's work, as often as it takes.
    pub resync: &'a dyn Fn(&Graph) -> bool,
    /// Looks at the volume when all legs are good.
    pub verify: &'a dyn Fn(&Graph, &Rig),
}

/// The older data and the newer ones.
const OLD: u8 = 0x11;
const NEW: u8 = 0x22;

/// Bytes of a request.
const AT_ONCE: u64 = 4096;

fn fill(graph: &Graph, content: u8) {
    let volume = Arc::clone(graph.volume());
    let filled = legs::block_on(move |cx| {
        Box::pin(async move {
            let bytes = volume.geometry().bytes();
            for at in (0..bytes).step_by(AT_ONCE as usize) {
                let data = vec![content; AT_ONCE.min(bytes - at) as usize];
                legs::write_bytes(cx, &*volume, at, data).await?;
            }
            legs::flush(cx, &*volume).await
        })
    });
    assert_eq!(filled.expect("a ring"), Ok(()));
}

/// What the whole volume holds: the same in every block, whichever legs are read.
fn content(graph: &Graph) -> u8 {
    let mut found = None;
    let bytes = graph.volume().geometry().bytes();
    for at in (0..bytes).step_by(AT_ONCE as usize).flat_map(|at| [at; 3]) {
        let data = legs::read(graph.volume(), at, AT_ONCE.min(bytes - at) as usize).expect("it can be read");
        let first = *found.get_or_insert(data[0]);
        assert!(data == vec![first; data.len()], "from byte {at} on there is {:x}, and first {first:x}", data[0]);
    }
    found.expect("there are blocks")
}

fn command(graph: &Graph, command: &str, leg: usize) {
    let mut arguments = Settings::default();
    assert!(arguments.add("leg", &leg.to_string()));
    graph.root.service.as_ref().expect("a service").command(command, &arguments).unwrap_or_else(|error| panic!("{error}"));
}

fn state(graph: &Graph, leg: usize) -> String {
    let facts = graph.tree().status.expect("a service has a status").facts;
    facts.into_iter().find(|(name, _)| *name == format!("leg {leg}")).expect("each leg has a state").1
}

impl FormatCut<'_> {
    fn open(&self, rig: &Rig, reason: Reason, block_size: BlockSize) -> Result<Graph, GraphError> {
        let size = self.size >> block_size.shift() << block_size.shift();
        graph_of_blocks(block_size, self.stack, &rig.volumes(), Some(size), reason, &rig.kept)
    }

    /// Comes back with the new block size. Disks that know their own may all have the old one: then it was not begun.
    fn come_back(&self, rig: &Rig) -> Graph {
        let (before, after) = self.blocks;
        if !self.keep_blocks {
            rig.disks.iter().for_each(|disk| disk.open_with(after));
        }
        match self.open(rig, Reason::Open, after) {
            Ok(graph) => graph,
            Err(error) => {
                let known = |disk: &Arc<millrace_block::conformance::CrashDisk>| {
                    millrace_block::Volume::geometry(&**disk).block_size == before
                };
                assert!(self.keep_blocks && before != after && rig.disks.iter().all(known), "it does not open: {error}");
                let graph = self.open(rig, Reason::Open, before).unwrap_or_else(|error| panic!("as it was: {error}"));
                assert_eq!(content(&graph), NEW);
                graph
            }
        }
    }

    /// One run, the power cut at this boundary of the format; the boundaries that it has.
    fn run(&self, seed: u64, cut: u64) -> u64 {
        let rig = Rig::new(seed, self.disks, self.disk_bytes >> self.blocks.0.shift(), self.blocks.0);
        let mut graph = self.open(&rig, Reason::Create, self.blocks.0).unwrap_or_else(|error| panic!("{error}"));
        assert!((self.resync)(&graph));
        fill(&graph, OLD);
        if let Some(leg) = self.failed {
            command(&graph, "fail", leg);
        }
        fill(&graph, NEW);
        let start = rig.power.boundaries();
        rig.power.cut_at(cut);
        let formatted = graph.volume().format(self.blocks.1);
        let boundaries = rig.power.boundaries() - start;
        let is_gone = rig.power.is_gone();
        assert!(formatted.is_ok() || is_gone, "{formatted:?}");
        graph.tasks.clear();
        drop(graph);
        rig.restart();
        for _ in 0..2 {
            let graph = self.come_back(&rig);
            let has = content(&graph);
            assert!(has == 0 || has == NEW && formatted.is_err(), "it holds {has:x} after {formatted:?}");
            let lost = self.failed.filter(|leg| state(&graph, *leg) == "failed");
            assert_eq!(lost, self.failed, "what is on it is too old");
            assert!((self.resync)(&graph));
            assert_eq!(content(&graph), has);
            rig.kept.forget();
        }
        let graph = self.come_back(&rig);
        let has = content(&graph);
        if let Some(leg) = self.failed {
            command(&graph, "rebuild", leg);
        }
        assert!((self.resync)(&graph));
        assert_eq!(content(&graph), has);
        (0..self.disks).for_each(|leg| assert_eq!(state(&graph, leg), "good"));
        (self.verify)(&graph, &rig);
        boundaries
    }

    /// Cuts the power at every boundary of the format.
    ///
    /// # Panics
    /// With the seed and the boundary, when the volume does not hold everything or nothing afterwards.
    pub fn test(&self, seeds: std::ops::Range<u64>) {
        for seed in seeds {
            let whole = self.run(seed, u64::MAX / 2);
            assert!(whole > 0, "a format writes");
            for cut in 0..whole {
                let case = std::panic::AssertUnwindSafe(|| self.run(seed, cut));
                if let Err(panic) = std::panic::catch_unwind(case) {
                    eprintln!("format of {} to {:?}: failed at seed {seed}, boundary {cut}", self.stack, self.blocks.1);
                    std::panic::resume_unwind(panic);
                }
            }
        }
    }
}
