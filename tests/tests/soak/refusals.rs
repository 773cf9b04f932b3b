//! Commands that cannot be: each is refused, and changes nothing.

use crate::{
    stack::{Shape, Stack},
    world::World,
};

/// Gives one of them.
pub(crate) fn refused(world: &mut World, at: usize) -> bool {
    let (name, stack) = (world.volumes[at].name.clone(), world.volumes[at].stack.clone());
    let mut others = world.volumes.iter().filter(|other| other.name != name && !other.is_memory);
    let other = others.next().expect("several are in files");
    let other = (other.name.clone(), other.stack.legs[0].clone());
    let commands = commands(&name, &stack, &other, &world.key(0));
    let chosen = &commands[world.random.below(commands.len())];
    let chosen: Vec<&str> = chosen.iter().map(String::as_str).collect();
    let before = seen(world, &name);
    world.must_not(&chosen);
    assert_eq!(seen(world, &name), before, "millrace {} was refused, and changed something", chosen.join(" "));
    true
}

/// What a command that was refused must not change.
fn seen(world: &World, name: &str) -> (String, u64, Vec<String>) {
    let view = world.look(name);
    let listed = world.daemon.try_run(&["volume", "list", "--json"]).expect("a list");
    let listed: serde_json::Value = serde_json::from_str(&listed).expect("a list in JSON");
    let names = listed.as_array().expect("a list").iter().map(|volume| volume["name"].to_string()).collect();
    (world.shown(name), view["size"].as_u64().expect("a size"), names)
}

/// Those that are refused for this volume. `other` is another one, with the first leg that it has, a file.
fn commands(name: &str, stack: &Stack, other: &(String, String), key: &str) -> Vec<Vec<String>> {
    let (other, others) = (other.0.as_str(), other.1.as_str());
    let cipher = format!("crypt(key=file:{key})");
    let new = ["volume", "create", "new", "--size", "1M"];
    let insert = ["volume", "insert", name];
    let mut all: Vec<Vec<&str>> = vec![
        vec!["volume", "create", name, "--size", "1M", "--backend", "null"],
        [&new[..], &["--backend", others]].concat(),
        [&new[..], &["--stack", "stripe(chunk=3K, null, null)"]].concat(),
        [&new[..], &["--stack", "volume:none"]].concat(),
        [&new[..], &["--block-size", "1024", "--backend", "null"]].concat(),
        vec!["volume", "delete", name],
        vec!["volume", "delete", "none"],
        vec!["volume", "show", "none"],
        vec!["volume", "resize", name, "1"],
        vec!["volume", "resize", name, "256K"],
        [&insert[..], &["throttle(iops=0)"]].concat(),
        [&insert[..], &["throttle"]].concat(),
        [&insert[..], &["throttle(group=none)"]].concat(),
        [&insert[..], &["cache(mode=sideways, null(size=8M))"]].concat(),
        [&insert[..], &["mirror"]].concat(),
        [&insert[..], &["integrity"]].concat(),
        [&insert[..], &[cipher.as_str()]].concat(),
        [&insert[..], &["share"]].concat(),
        [&insert[..], &["nonsense("]].concat(),
        vec!["volume", "remove", name, "metadata"],
        vec!["volume", "change", name, "--stack", "stripe(chunk=64K, null, null)"],
        vec!["volume", "replace", name, "file:/none/a", "file:/none/b"],
        vec!["volume", "command", name, "metadata", "scrub"],
        vec!["volume", "migrate", name, "--cancel"],
        vec!["volume", "migrate", name, "--rate", "1M"],
        vec!["copy", name, name],
        vec!["copy", name, "none"],
        vec!["copy", name, other],
        vec!["device", "create", "new", "--nvme", "--volume", "none"],
        vec!["device", "delete", "none"],
        vec!["device", "attach", "none", name],
        vec!["group", "delete", "none"],
        vec!["disk", "delete", "pool"],
        vec!["disk", "resize", "pool", "1M"],
        vec!["disk", "delete", name],
    ];
    if let Some(service) = stack.shape.stays() {
        all.push(vec!["volume", "remove", name, service]);
        all.push(vec!["volume", "command", name, service, "nonsense"]);
    }
    if let Some((service, _)) = stack.shape.redundancy() {
        all.push(vec!["volume", "command", name, service, "fail", "leg=9"]);
        all.push(vec!["volume", "command", name, service, "fail"]);
        all.push(vec!["volume", "command", name, service, "rebuild", "leg=x"]);
    }
    if let Some(leg) = stack.legs.first().filter(|_| stack.shape != Shape::Concat).map(String::as_str) {
        all.push(vec!["volume", "migrate", name, "--to", others, "--leg", leg]);
        if leg.starts_with("file:") {
            all.push(vec!["volume", "replace", name, leg, others]);
        }
    }
    all.into_iter().map(|words| words.into_iter().map(str::to_owned).collect()).collect()
}
