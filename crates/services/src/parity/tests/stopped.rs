//! What the journal alone has is not lost, whatever is missing at the next opening.

use millrace_backends::fault::{Effect, Kind, Rule, When};
use millrace_block::{BlockCount, Lba, Operation};

use super::{failures::WRITE_FAULT, *};
use crate::{
    SharedObjects,
    background::Spawner,
    graph::{LeafError, LeafRequest, Leaves, Stored},
    testing::{Disks, Kept},
};

/// Disks of a stored volume, of which one is gone.
struct OneGone<'a> {
    disks: &'a [Arc<dyn Volume>],
    gone: &'a str,
    size: u64,
    out: &'a [String],
}

impl Leaves for OneGone<'_> {
    fn open(&self, request: &LeafRequest<'_>) -> Result<Arc<dyn Volume>, LeafError> {
        if request.leaf.spec == self.gone {
            return Err(LeafError::Refused(format!("no such file: {}", self.gone)));
        }
        Disks(self.disks.to_vec()).open(request)
    }

    fn stored(&self) -> Option<Stored<'_>> {
        Some(Stored { size: self.size, out_of_use: self.out })
    }
}

/// Those that are left know everything. Which legs were out of use is looked at after it was stopped as well.
#[test]
fn a_volume_that_stopped_opens_without_the_leg_that_is_gone() {
    let legs = SMALL.faulty(1024);
    let volumes = volumes(&legs);
    let graph = SMALL.open(&volumes, Reason::Create);
    let layout = parity(&graph).layout;
    let (missing, refusing) = (layout.leg(0, 1), layout.leg(0, 2));
    let gone = format!("disk:{missing}");
    let mut model = Vec::new();
    on_bench(&graph, |bench| {
        model = bench.write_random(0, 1024);
        command(&graph, "fail", missing).unwrap();
        let range = Some((Lba(0), BlockCount(8)));
        legs[refusing].add(Rule { range, ..Rule::new(Kind::Write, When::Always, Effect::Fail(WRITE_FAULT)) });
        let data = bench.random.bytes(512);
        assert_eq!(bench.write(0, &data), Err(WRITE_FAULT));
        model[..512].copy_from_slice(&data);
    });
    assert!(fact(&graph, "stopped").is_some());
    let (size, out) = (graph.volume().geometry().bytes(), graph.out_of_use());
    assert_eq!(out, [gone.as_str()]);
    graph.root.service.as_ref().unwrap().unmount().unwrap();
    assert_eq!(graph.out_of_use(), [gone.as_str()]);
    drop(graph);
    legs[refusing].clear();
    let node: crate::Node = SMALL.stack().parse().unwrap();
    let plan = crate::graph::Plan { volume: "test", stack: &node, size: None, block_size: BlockSize::B512 };
    let leaves = OneGone { disks: &volumes, gone: &gone, size, out: &out };
    let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
    let mut graph =
        Graph::build(&plan, &leaves, &SharedObjects::default(), &spawner, None).unwrap_or_else(|error| panic!("{error}"));
    graph.mount(Reason::Open).unwrap();
    on_bench(&graph, |bench| bench.expect(0, &model));
}

#[test]
fn an_orderly_close_does_not_void_what_a_leg_lost_that_had_to_stay() {
    let legs = SMALL.faulty(1024);
    let volumes = volumes(&legs);
    let graph = SMALL.open(&volumes, Reason::Create);
    let layout = parity(&graph).layout;
    let (missing, forgets) = (layout.leg(0, 1), layout.leg(0, 2));
    let mut model = Vec::new();
    on_bench(&graph, |bench| {
        model = bench.write_random(0, 1024);
        bench.plain(Operation::Flush, 0, 0).unwrap();
        legs[forgets].hold_writes();
        // One chunk of two: the leg has the parity.
        model[..8 * 512].copy_from_slice(&bench.write_random(0, 8));
    });
    legs[forgets].add(Rule::new(Kind::Flush, When::Nth(1), Effect::Forget(WRITE_FAULT)));
    assert!(command(&graph, "fail", missing).is_err(), "it goes, and the other one has to stay");
    assert!(graph.root.service.as_ref().unwrap().unmount().is_err());
    drop(graph);
    legs[forgets].clear();
    let graph = SMALL.open(&volumes, Reason::Open);
    assert!(fact(&graph, "journal entries carried out again").is_some(), "{:?}", facts(&graph));
    on_bench(&graph, |bench| bench.expect(0, &model));
}
