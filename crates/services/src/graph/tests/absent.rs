//! Stored stacks of which a leg is not there any more.

use super::*;

/// More than the legs that are there have: they say the size.
const ANY: u64 = 1 << 40;

/// Disks by number, some of which are gone, of a stored volume.
struct Stored<'a> {
    disks: &'a [Arc<dyn Volume>],
    gone: &'a [&'a str],
    size: u64,
    out: Vec<String>,
}

impl Leaves for Stored<'_> {
    fn open(&self, request: &LeafRequest<'_>) -> Result<Arc<dyn Volume>, LeafError> {
        if self.gone.contains(&&*request.leaf.spec) {
            return Err(LeafError::Refused(format!("no such file: {}", request.leaf.spec)));
        }
        Disks(self.disks.to_vec()).open(request)
    }

    fn stored(&self) -> Option<crate::graph::Stored<'_>> {
        Some(crate::graph::Stored { size: self.size, out_of_use: &self.out })
    }
}

fn open(stack: &str, disks: &[Arc<dyn Volume>], gone: &[&str]) -> Result<Graph, String> {
    open_known(stack, disks, gone, (ANY, Vec::new()))
}

/// The same of a volume whose size and whose legs out of use are known.
fn open_known(
    stack: &str,
    disks: &[Arc<dyn Volume>],
    gone: &[&str],
    (size, out): (u64, Vec<String>),
) -> Result<Graph, String> {
    let node: Node = stack.parse().unwrap();
    let plan = Plan { volume: "test", stack: &node, size: None, block_size: BlockSize::B512 };
    let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
    let built = Graph::build(&plan, &Stored { disks, gone, size, out }, &SharedObjects::default(), &spawner, None);
    let mut graph = built.map_err(|error| error.to_string())?;
    graph.mount(Reason::Open).map_err(|error| error.to_string())?;
    Ok(graph)
}

fn on_bench<R>(graph: &Graph, work: impl FnOnce(&mut Bench<'_>) -> R) -> R {
    work(&mut Bench::new(&mut SyncHarness::new(SEED, false), Arc::clone(graph.volume()), SEED))
}

/// What the service at the root says of a leg.
fn state_of(graph: &Graph, leg: &str) -> String {
    let facts = graph.tree().status.expect("a service has a status").facts;
    facts.into_iter().find(|(name, _)| name == leg).map(|(_, value)| value).unwrap_or_default()
}

#[test]
fn what_outlives_a_leg_opens_without_it_and_takes_it_in_again() {
    for (stack, legs) in [
        ("mirror(disk:0, disk:1)", 2),
        ("throttle(iops=1000000) | mirror(integrity | disk:0, integrity | disk:1)", 2),
        ("parity(chunk=4K, journal=128K, disk:0, disk:1, disk:2)", 3),
    ] {
        let disks = memory(legs, 4096);
        let graph = mounted(stack, &disks, None, Reason::Create, &Arc::default()).unwrap();
        let mut data = on_bench(&graph, |bench| bench.write_random(0, 1024));
        drop(graph);
        let mut graph = open(stack, &disks, &["disk:1"]).unwrap_or_else(|error| panic!("{stack}: {error}"));
        data = on_bench(&graph, |bench| {
            bench.expect(0, &data);
            bench.write_random(0, 1024)
        });
        assert_eq!((graph.leaves_in_use().len(), graph.out_of_use().len()), (legs - 1, 1), "{stack}");
        let tree = format!("{:?}", graph.tree());
        assert!(tree.contains("no such file: disk:1") && tree.contains("volume replace"), "{tree}");
        // A change of what is above keeps it, though it cannot be opened.
        let above = format!("meter(tenant=a) | {stack}");
        let node: Node = above.parse().unwrap();
        let plan = Plan { volume: "test", stack: &node, size: None, block_size: BlockSize::B512 };
        let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
        let leaves = Stored { disks: &disks, gone: &["disk:1"], size: ANY, out: Vec::new() };
        let mut new = Graph::build(&plan, &leaves, &SharedObjects::default(), &spawner, Some(&graph)).unwrap();
        let switch = Switch::new("test", Arc::clone(graph.volume()));
        change(&switch, &mut graph, &mut new, terms(&mut || Ok(()), false)).unwrap();
        on_bench(&new, |bench| bench.expect(0, &data));
        drop((graph, new, switch));
        let graph = open(stack, &disks, &[]).unwrap();
        on_bench(&graph, |bench| bench.expect(0, &data));
        if !stack.starts_with("throttle") {
            assert_eq!((&*state_of(&graph, "leg 0"), &*state_of(&graph, "leg 1")), ("good", "being filled"), "{stack}");
        }
    }
}

#[test]
fn a_leg_that_was_out_of_use_stays_so_when_it_is_back() {
    let (stack, disks) = ("mirror(disk:0, disk:1)", memory(2, 4096));
    let graph = mounted(stack, &disks, None, Reason::Create, &Arc::default()).unwrap();
    let mut leg = crate::Settings::default();
    assert!(leg.add("leg", "1"));
    graph.services("mirror")[0].1.command("fail", &leg).unwrap();
    drop(graph);
    for gone in [&["disk:1"][..], &[]] {
        let graph = open(stack, &disks, gone).unwrap();
        assert_eq!((&*state_of(&graph, "leg 0"), &*state_of(&graph, "leg 1")), ("good", "failed"), "{gone:?}");
    }
}

#[test]
fn what_needs_the_leg_does_not_open_and_says_why() {
    for (stack, gone) in [
        ("concat(disk:0, disk:1)", &["disk:1"][..]),
        ("mirror(disk:0, disk:1)", &["disk:0", "disk:1"]),
        ("concat(mirror(disk:0, disk:1), disk:2)", &["disk:2"]),
        ("crypt(disk:0)", &["disk:0"]),
    ] {
        let stack = stack.replace("crypt(", &format!("crypt(key=file:{}, ", "/nowhere"));
        let error = open(&stack, &memory(3, 4096), gone).err().unwrap_or_else(|| panic!("{stack}"));
        assert!(error.contains(&format!("no such file: {}", gone[0])), "{stack}: {error}");
    }
    // Of what is being made nothing is missing: that is a mistake.
    let error = mounted("mirror(disk:0, disk:7)", &memory(2, 4096), None, Reason::Create, &Arc::default());
    assert_eq!(error.err().unwrap().to_string(), "mirror.1 (disk:7): there is no disk:7");
    let disks = memory(3, 4096);
    let stack = "parity(chunk=4K, journal=128K, disk:0, disk:1, disk:2)";
    drop(mounted(stack, &disks, None, Reason::Create, &Arc::default()).unwrap());
    let error = open(stack, &disks, &["disk:0", "disk:1"]).err().unwrap();
    assert!(error.contains("no such file: disk:0"), "{error}");
}

/// Two legs that are gone at different times: the second one is the only one that knows what was written without the first.
#[test]
fn a_leg_that_was_out_of_use_is_not_gone_on_with_alone() {
    for (stack, legs, first, others) in [
        ("mirror(disk:0, disk:1)", 2, &["disk:0"][..], &["disk:1"][..]),
        ("mirror(integrity | disk:0, integrity | disk:1)", 2, &["disk:0"], &["disk:1"]),
        (
            "parity(chunk=4K, journal=128K, redundancy=2, disk:0, disk:1, disk:2, disk:3)",
            4,
            &["disk:0"],
            &["disk:2", "disk:3"],
        ),
    ] {
        let disks = memory(legs, 4096);
        drop(mounted(stack, &disks, None, Reason::Create, &Arc::default()).unwrap());
        let graph = open(stack, &disks, first).unwrap();
        on_bench(&graph, |bench| bench.write_random(0, 64));
        let out = graph.out_of_use();
        assert_eq!(out.len(), 1, "{out:?}");
        drop(graph);
        let error = open_known(stack, &disks, others, (ANY, out.clone())).err().unwrap_or_else(|| panic!("{stack}"));
        assert!(error.contains(&format!("no such file: {}", others[0])), "{stack}: {error}");
        let graph = open_known(stack, &disks, &[], (ANY, out)).unwrap();
        assert_eq!(graph.out_of_use().len(), 1, "it is being filled");
    }
}

/// It was noted in the words of the stack that was, which may have had a migration in it, or no sizes.
#[test]
fn a_leg_that_was_out_of_use_is_known_however_it_is_written_now() {
    let disks = memory(3, 4096);
    drop(mounted("mirror(disk:0, disk:1)", &disks, None, Reason::Create, &Arc::default()).unwrap());
    for (stack, out) in [
        ("mirror(disk:0, disk:1)", "move(disk:1, disk:2)"),
        ("mirror(disk:0, disk:1)", "move(rate=4K, disk:1, disk:2)"),
        ("mirror(disk:0, move(disk:1, disk:2))", "disk:1"),
        ("mirror(disk:0, disk:1(size=2M))", "disk:1"),
    ] {
        let opened = open_known(stack, &disks, &["disk:0"], (ANY, vec![out.to_owned()]));
        let error = opened.err().unwrap_or_else(|| panic!("{stack} opens with the leg that was out of use as {out}"));
        assert!(error.contains("no such file: disk:0"), "{stack}: {error}");
    }
    // Where it goes to is none of it.
    let out = vec!["move(disk:2, disk:1)".to_owned()];
    drop(open_known("mirror(disk:0, disk:1)", &disks, &["disk:0"], (ANY, out)).unwrap());
}

#[test]
fn what_is_told_no_size_opens_without_its_smallest_leg() {
    let disks = [memory(1, 4096).remove(0), memory(1, 2176).remove(0)];
    let stack = "mirror(disk:0, disk:1)";
    let made = mounted(stack, &disks, None, Reason::Create, &Arc::default()).unwrap();
    let size = made.volume().geometry().bytes();
    drop(made);
    let graph = open_known(stack, &disks, &["disk:1"], (size, Vec::new())).unwrap();
    assert_eq!(graph.volume().geometry().bytes(), size);
}

#[test]
fn a_migration_is_not_done_without() {
    let disks = memory(3, 4096);
    let error = open("mirror(move(disk:0, disk:1), disk:2)", &disks, &["disk:1"]).err().unwrap();
    assert!(error.contains("no such file: disk:1"), "{error}");
}
