//! What operators do: a table of commands with how often each comes. Each knows when it applies, and what it expects.

use millrace_tests::Daemon;
use rustix::process::Signal;

use crate::{
    program::{Order, expect_copy},
    refusals::refused,
    stack::{Expect, Shape, Stack, Top},
    world::{LEAST, MOST, Volume, World, forget_file},
};

/// A command of the table.
struct Command {
    /// How often it comes beside the others.
    weight: usize,
    /// Does it to the volume with this number; `false` where it does not apply, and nothing was done.
    run: fn(&mut World, usize) -> bool,
}

static COMMANDS: [Command; 21] = [
    Command { weight: 12, run: insert },
    Command { weight: 10, run: remove },
    Command { weight: 6, run: set_anew },
    Command { weight: 4, run: change_key },
    Command { weight: 8, run: fail },
    Command { weight: 14, run: rebuild },
    Command { weight: 7, run: replace },
    Command { weight: 7, run: scrub },
    Command { weight: 6, run: rekey },
    Command { weight: 3, run: flush_cache },
    Command { weight: 8, run: grow },
    Command { weight: 6, run: shrink },
    Command { weight: 8, run: migrate },
    Command { weight: 5, run: copy },
    Command { weight: 4, run: device },
    Command { weight: 2, run: group },
    Command { weight: 16, run: refused },
    Command { weight: 4, run: ask },
    Command { weight: 8, run: kill_worker },
    Command { weight: 2, run: upgrade },
    Command { weight: 3, run: end_daemon },
];

/// Does one command, and looks at what it was done to.
pub(crate) fn step(world: &mut World) {
    let all: usize = COMMANDS.iter().map(|command| command.weight).sum();
    loop {
        let mut left = world.random.below(all);
        let chosen = COMMANDS.iter().find(|command| {
            let is_it = left < command.weight;
            left = left.saturating_sub(command.weight);
            is_it
        });
        let at = world.random.below(world.volumes.len());
        if (chosen.expect("weights").run)(world, at) {
            world.expect_well();
            return world.compare(at);
        }
    }
}

/// Name and stack of a volume.
fn of(world: &World, at: usize) -> (String, Stack) {
    let Volume { name, stack, .. } = &world.volumes[at];
    (name.clone(), stack.clone())
}

/// A service that is not there yet, as it may be.
fn new_top(world: &mut World, at: usize) -> Option<Top> {
    let top = match world.random.below(4) {
        0 => Top::Throttle(3000 + 1000 * world.random.below(50)),
        1 => Top::Meter(world.random.below(5)),
        _ if world.volumes[at].is_memory => return None,
        mode => Top::Cache(["through", "back"][mode - 2], world.new_file()),
    };
    world.volumes[at].stack.place(top.service()).is_none().then_some(top)
}

/// A service over all that there is.
fn insert(world: &mut World, at: usize) -> bool {
    let Some(top) = new_top(world, at) else { return false };
    let (name, mut stack) = of(world, at);
    let name = name.as_str();
    let text = top.text();
    stack.tops.insert(0, top);
    world.alter(at, &["volume", "insert", name, &text], stack, Expect::Success);
    true
}

fn remove(world: &mut World, at: usize) -> bool {
    let (name, mut stack) = of(world, at);
    let name = name.as_str();
    if stack.tops.is_empty() {
        return false;
    }
    let place = world.random.below(stack.tops.len());
    let expect = stack.change_at(place);
    let top = stack.tops.remove(place);
    if world.alter(at, &["volume", "remove", name, top.service()], stack, expect)
        && let Top::Cache(_, fast) = top
    {
        forget_file(&fast);
    }
    true
}

/// Another setting of a service that comes and goes.
fn set_anew(world: &mut World, at: usize) -> bool {
    let (name, mut stack) = of(world, at);
    let name = name.as_str();
    if stack.tops.is_empty() {
        return false;
    }
    let place = world.random.below(stack.tops.len());
    let expect = stack.change_at(place);
    match &mut stack.tops[place] {
        Top::Throttle(iops) => *iops = 3000 + 1000 * world.random.below(50),
        Top::Meter(tenant) => *tenant += 1,
        Top::Cache(mode, _) => *mode = if *mode == "back" { "through" } else { "back" },
    }
    let text = stack.text();
    world.alter(at, &["volume", "change", name, "--stack", &text], stack, expect);
    true
}

/// Another key-encryption key.
fn change_key(world: &mut World, at: usize) -> bool {
    let (name, mut stack) = of(world, at);
    let name = name.as_str();
    if !stack.shape.is_enciphered() {
        return false;
    }
    let (first, second) = (world.key(0), world.key(1));
    stack.key = if stack.key == first { second } else { first };
    let (text, expect) = (stack.text(), stack.change_at(stack.tops.len()));
    world.alter(at, &["volume", "change", name, "--stack", &text], stack, expect);
    true
}

fn leg_command(name: &str, service: &str, command: &str, leg: usize) -> [String; 6] {
    let leg = format!("leg={leg}");
    ["volume", "command", name, service, command, leg.as_str()].map(str::to_owned)
}

/// Legs go out of use, as many as can be spared. Parity that a dead worker has left is made to fit first.
fn fail(world: &mut World, at: usize) -> bool {
    let (name, stack) = of(world, at);
    let name = name.as_str();
    let Some((service, most)) = stack.shape.redundancy().filter(|_| stack.failed.is_empty()) else { return false };
    world.settle(at);
    let first = world.random.below(stack.shape.legs());
    let lost = 1 + world.random.below(most);
    for leg in (0..lost).map(|next| (first + next) % stack.shape.legs()) {
        let command = leg_command(name, service, "fail", leg);
        world.must_soon(&command.each_ref().map(String::as_str));
        world.volumes[at].stack.failed.push(leg);
    }
    if lost == most {
        let other = leg_command(name, service, "fail", (first + lost) % stack.shape.legs());
        world.must_not(&other.each_ref().map(String::as_str));
    }
    assert_eq!(world.look(name)["health"], "degraded", "volume {name} without legs");
    true
}

/// Legs that are out of use come back.
fn rebuild(world: &mut World, at: usize) -> bool {
    let (name, stack) = of(world, at);
    let name = name.as_str();
    let Some((service, _)) = stack.shape.redundancy().filter(|_| !stack.failed.is_empty()) else { return false };
    for leg in stack.failed {
        let command = leg_command(name, service, "rebuild", leg);
        world.must_soon(&command.each_ref().map(String::as_str));
    }
    world.volumes[at].stack.failed.clear();
    if world.random.one_in(2) {
        world.settle(at);
    }
    true
}

/// Another file takes a leg's place, of one that was lost most often.
fn replace(world: &mut World, at: usize) -> bool {
    let (name, mut stack) = of(world, at);
    let name = name.as_str();
    let can_be = matches!(stack.shape, Shape::Mirror | Shape::Parity | Shape::Parity2) && stack.failed.len() < 2;
    if !can_be || stack.has_cache() || world.volumes[at].is_memory {
        return false;
    }
    if stack.failed.is_empty() {
        world.settle(at);
    }
    let any = world.random.below(stack.legs.len());
    let leg = stack.failed.pop().unwrap_or(any);
    let new = world.new_file();
    let old = std::mem::replace(&mut stack.legs[leg], new.clone());
    let before = world.shown(name);
    world.must_soon(&["volume", "replace", name, &old, &new]);
    world.volumes[at].stack = stack;
    world.expect_stack(at, &before);
    forget_file(&old);
    if world.random.one_in(2) {
        world.settle(at);
    }
    true
}

/// Under which name a service tells what its scrub has found, and how that begins where nothing is wrong.
fn clean(service: &str) -> (&'static str, &'static str) {
    match service {
        "mirror" => ("scrub", "0 blocks repaired, 0 differ"),
        "parity" => ("scrub", "0 repaired, 0 blocks do not fit, 0 rows unreadable"),
        "integrity" => ("last scrub", "0 of "),
        _ => panic!("{service} has no scrub"),
    }
}

/// What a service says under a name, wherever it is in the tree.
fn fact(tree: &serde_json::Value, service: &str, name: &str) -> Option<String> {
    let of_legs = || tree["over"].as_array()?.iter().find_map(|leg| fact(leg, service, name));
    if tree["node"] != service {
        return of_legs();
    }
    let found = tree["status"]["facts"].as_array()?.iter().find(|fact| fact[0] == name)?;
    found[1].as_str().map(str::to_owned)
}

fn scrub(world: &mut World, at: usize) -> bool {
    let (name, stack) = of(world, at);
    let name = name.as_str();
    let (service, spare) = match stack.shape {
        Shape::Integrity => ("integrity", 1),
        shape => match shape.redundancy() {
            Some(found) => found,
            None => return false,
        },
    };
    let command = ["volume", "command", name, service, "scrub"];
    if !stack.failed.is_empty() {
        // With nothing to compare it is refused; with one parity chunk of two it checks by that.
        let expect = if stack.failed.len() == spare { Expect::Refusal } else { Expect::Either };
        world.expect(&command, expect);
        return true;
    }
    world.settle(at);
    world.must(&command);
    if world.random.one_in(4) {
        world.struck(&["volume", "command", name, service, "stop"]);
        return true;
    }
    let view = world.settle(at);
    let (what, begins) = clean(service);
    let said = fact(&view["tree"], service, what);
    let said = said.unwrap_or_else(|| panic!("volume {name} does not tell of its {what}: {view:#}"));
    assert!(said.starts_with(begins), "volume {name}: its scrub says: {said}");
    true
}

/// Another volume key.
fn rekey(world: &mut World, at: usize) -> bool {
    let (name, stack) = of(world, at);
    let name = name.as_str();
    if !stack.shape.is_enciphered() || !stack.failed.is_empty() {
        return false;
    }
    world.settle(at);
    let command = ["volume", "command", name, "crypt", "rekey"];
    if world.random.one_in(3) {
        world.struck(&command);
    } else {
        world.must(&command);
    }
    true
}

fn flush_cache(world: &mut World, at: usize) -> bool {
    let (name, stack) = of(world, at);
    let name = name.as_str();
    if !stack.has_cache() {
        return false;
    }
    world.expect(&["volume", "command", name, "cache", "flush"], Expect::Either);
    true
}

fn blocks(world: &World, at: usize) -> usize {
    (world.volumes[at].mib << 20) / world.volumes[at].block_size
}

/// The volume has the one size or the other now, as the daemon shows it, and its program is told.
fn take_size(world: &mut World, at: usize, (old, new): (usize, usize), succeeded: bool) {
    let name = world.volumes[at].name.clone();
    let name = name.as_str();
    let size = world.look(name)["size"].as_u64().expect("a size") as usize;
    assert!(size == new << 20 || (size == old << 20 && !succeeded), "volume {name} has {size} bytes, and not {new} MiB");
    world.volumes[at].mib = size >> 20;
    world.volumes[at].program.tell(Order::Resize(blocks(world, at)));
}

fn grow(world: &mut World, at: usize) -> bool {
    let (name, stack) = of(world, at);
    let name = name.as_str();
    let old = world.volumes[at].mib;
    if old == MOST {
        return false;
    }
    if stack.failed.is_empty() {
        world.settle(at);
    }
    let (size, expect) = (format!("{}M", old + 1), stack.grows());
    let command: [&str; 4] = ["volume", "resize", name, &size];
    let strikes = expect != Expect::Refusal && world.random.one_in(5);
    let succeeded = if strikes { world.struck(&command) } else { world.expect(&command, expect) };
    take_size(world, at, (old, old + 1), succeeded);
    true
}

/// Nobody uses the end meanwhile.
fn shrink(world: &mut World, at: usize) -> bool {
    let (name, stack) = of(world, at);
    let name = name.as_str();
    let old = world.volumes[at].mib;
    if old == LEAST {
        return false;
    }
    if stack.failed.is_empty() {
        world.settle(at);
    }
    let size = format!("{}M", old - 1);
    // It must be said that this is meant.
    world.must_not(&["volume", "resize", name, &size]);
    world.volumes[at].program.tell(Order::Rest);
    let succeeded = world.expect(&["volume", "resize", name, &size, "--shrink"], stack.shrinks());
    take_size(world, at, (old, old - 1), succeeded);
    world.volumes[at].program.tell(Order::Go);
    true
}

/// A leg goes to another file: at once, with the worker dying on the way, or not after all.
fn migrate(world: &mut World, at: usize) -> bool {
    let (name, stack) = of(world, at);
    let name = name.as_str();
    let can_go = matches!(
        stack.shape,
        Shape::Plain | Shape::Stripe | Shape::Mirror | Shape::Integrity | Shape::Xts | Shape::Authenticated
    );
    if !can_go || stack.has_cache() || !stack.failed.is_empty() || world.volumes[at].is_memory {
        return false;
    }
    world.settle(at);
    let leg = world.random.below(stack.legs.len());
    let (old, new) = (stack.legs[leg].clone(), world.new_file());
    let begins: [&str; 7] = ["volume", "migrate", name, "--to", &new, "--leg", &old];
    let way = world.random.below(3);
    if way == 0 {
        world.must(&[&begins[..], &["--wait"]].concat());
    } else {
        world.must(&[&begins[..], &["--rate", "512K"]].concat());
        if world.random.one_in(2) {
            kill_worker(world, at);
        }
        // It may be over already.
        let ends: &[&str] = if way == 1 { &["--rate", "0", "--wait"] } else { &["--cancel"] };
        world.expect(&[&["volume", "migrate", name][..], ends].concat(), Expect::Either);
    }
    let view = world.settle(at);
    let shown = view["stack"].as_str().expect("a stack");
    let is_there = shown.contains(&new);
    assert!(is_there != shown.contains(&old) && !shown.contains("move("), "volume {name}, from {old} to {new}: {shown}");
    assert!(is_there || way == 2, "volume {name} is not at {new}: {shown}");
    forget_file(if is_there { &old } else { &new });
    if is_there {
        world.volumes[at].stack.legs[leg] = new;
    }
    true
}

/// A copy to a new volume, while the program is at rest: it has the same blocks.
fn copy(world: &mut World, at: usize) -> bool {
    let name = world.volumes[at].name.clone();
    let name = name.as_str();
    let (mib, block_size) = (world.volumes[at].mib, world.volumes[at].block_size);
    let (target, file) = (format!("copy{}", world.number()), world.new_file());
    let shape = [Shape::Plain, Shape::Xts, Shape::Integrity, Shape::Authenticated][world.random.below(4)];
    let stack = Stack { tops: Vec::new(), shape, legs: vec![file.clone()], key: world.key(0), failed: Vec::new() };
    world.create(&target, &stack, mib, block_size);
    world.volumes[at].program.tell(Order::Rest);
    world.must(&["copy", name, &target, "--name", &target, "--wait"]);
    let run_dir = world.daemon.run_dir();
    let mut oracle = world.volumes[at].program.oracle().clone();
    expect_copy(&run_dir, &target, &mut oracle);
    world.volumes[at].program.tell(Order::Go);
    world.must(&["copy", "cancel", &target]);
    // The space that was compared by is given up a moment after its program has gone.
    world.must_soon(&["volume", "delete", &target]);
    forget_file(&file);
    true
}

/// A machine's device beside the program's, without a machine.
fn device(world: &mut World, at: usize) -> bool {
    let name = world.volumes[at].name.clone();
    let name = name.as_str();
    let device = format!("d{}", world.number());
    world.must(&["device", "create", &device, "--nvme", "--volume", name]);
    world.must_not(&["device", "create", &device, "--nvme"]);
    world.must_not(&["device", "attach", &device, name, "--nsid", "9"]);
    world.must_not(&["volume", "delete", name]);
    if world.random.one_in(3) {
        kill_worker(world, at);
    }
    world.must(&["device", "show", &device]);
    world.must(&["device", "detach", &device, name]);
    world.must(&["device", "delete", &device]);
    true
}

fn group(world: &mut World, _: usize) -> bool {
    let group = format!("g{}", world.number());
    world.must(&["group", "create", &group, "--iops", "50K", "--weight", "2"]);
    world.must(&["group", "change", &group, "--iops", "20K"]);
    world.must(&["group", "change", &group, "--no-caps"]);
    world.must(&["group", "delete", &group]);
    world.must_not(&["group", "show", &group]);
    true
}

/// Questions change nothing.
fn ask(world: &mut World, at: usize) -> bool {
    let name = world.volumes[at].name.clone();
    let name = name.as_str();
    for question in [
        &["status"][..],
        &["volume", "list"],
        &["volume", "show", name],
        &["volume", "show", name, "--history"],
        &["device", "list", "--json"],
        &["disk", "show", "pool"],
        &["copy", "list"],
        &["app", "list"],
        &["usage", "--by", "tenant"],
    ] {
        world.must(question);
    }
    let metrics = world.must(&["metrics"]);
    assert!(metrics.contains("millrace_") && metrics.trim_end().ends_with("# EOF"), "{metrics}");
    true
}

fn kill_worker(world: &mut World, _: usize) -> bool {
    world.note("the worker is killed");
    world.daemon.kill_worker(Signal::KILL);
    true
}

/// To the same binary. It is refused while the kernel has not ended what a worker before this one asked of disks, and given up where the
/// next worker takes too long to come up, as on a busy machine.
fn upgrade(world: &mut World, _: usize) -> bool {
    world.soon("millrace upgrade", |daemon| daemon.upgrade(&Daemon::binary(), 0));
    true
}

/// By a kill, or in order.
fn end_daemon(world: &mut World, _: usize) -> bool {
    if world.random.one_in(3) {
        world.note("the daemon is stopped and started again");
        world.daemon_ends(Daemon::restart);
    } else {
        world.note("the daemon is killed and started again");
        world.daemon_ends(Daemon::crash_and_restart);
    }
    true
}
