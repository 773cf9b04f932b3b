//! What volumes are made of: shown and changed.

use std::{collections::BTreeMap, error::Error};

use millrace_control::{CHANGED_MEANWHILE, HistoryEntry, Size, VolumeChange, VolumeView};
use millrace_services::{
    Health, Kind, Node, ServiceNode, Settings, Status,
    graph::{Tree, told_apart},
};
use serde_json::json;

use super::{Done, show};
use crate::{
    Misuse,
    cli::{Global, VolumeStack, stack},
    client::{Client, ClientError, segment},
    output::{self, Table},
};

/// A volume whose stack was changed.
type Changed = Result<VolumeView, Box<dyn Error>>;
/// What an edit makes of a stack.
type Edited = Result<Node, Box<dyn Error>>;

pub(super) fn changed(global: &Global, changed: Changed) -> Done {
    show(global, &changed?, |view| format!("volume {}: {}", view.name, view.stack))
}

fn path(name: &str) -> String {
    format!("/v1/volumes/{}", segment(name))
}

/// Puts another stack in the place of a volume's, whatever that is.
pub(super) fn change(client: &Client, VolumeStack { name, stack, reformat }: VolumeStack) -> Changed {
    Ok(client.patch(&path(&name), &VolumeChange { stack: Some(stack), reformat, ..VolumeChange::default() })?)
}

fn present(client: &Client, name: &str) -> Edited {
    let view: VolumeView = client.get(&path(name))?;
    Ok(view.stack)
}

/// Changes a volume's stack into what `make` makes of it. Where somebody else has changed it meanwhile, that is tried once more, with the stack as
/// it is by now, if `same` says that to edit the one is plainly to edit the other.
fn edit(
    client: &Client,
    name: &str,
    reformat: bool,
    make: impl Fn(&Node) -> Edited,
    same: impl Fn(&Node, &Node) -> bool,
) -> Changed {
    let try_from = |from: &Node| -> Changed {
        let (stack, from) = (Some(make(from)?), Some(from.clone()));
        let change = VolumeChange { stack, from, reformat, ..VolumeChange::default() };
        Ok(client.patch(&path(name), &change)?)
    };
    let read = present(client, name)?;
    let refused = match try_from(&read) {
        Err(error) if is_changed_meanwhile(&*error) => error,
        result => return result,
    };
    let now = present(client, name)?;
    if same(&read, &now) { try_from(&now) } else { Err(refused) }
}

fn is_changed_meanwhile(error: &(dyn Error + 'static)) -> bool {
    matches!(error.downcast_ref::<ClientError>(), Some(ClientError::Refused(problem)) if problem.code == CHANGED_MEANWHILE)
}

/// Puts a service on top.
pub(super) fn insert(client: &Client, name: &str, service: &str) -> Changed {
    let of = |why: String| Misuse(format!("volume {name}: {why}"));
    let make = |from: &Node| -> Edited { Ok(stack(&format!("{service} | {from}")).map_err(of)?) };
    // Who has put such a service in meanwhile may have meant the same.
    let same = |read: &Node, now: &Node| {
        let Ok(made) = make(read) else { return false };
        let all = words(&made);
        // What was there before is the last of it.
        let new = &all[..all.len().saturating_sub(words(read).len())];
        new.iter().all(|word| settings(read, word) == settings(now, word))
    };
    edit(client, name, false, make, same)
}

/// Takes a service out.
pub(super) fn remove(client: &Client, name: &str, service: &str) -> Changed {
    let make = |from: &Node| -> Edited {
        let made = without(from, service).or_else(|| without_at(from, &from.way_to(service)?));
        Ok(made.ok_or_else(|| stays(name, from, service))?)
    };
    // The one that was meant, not another of its kind, nor what has its place by now.
    let same = |read: &Node, now: &Node| {
        let there = settings(read, service);
        there.len() == 1 && there == settings(now, service)
    };
    edit(client, name, false, make, same)
}

/// The services of a stack, each before what it is over.
fn words(node: &Node) -> Vec<&str> {
    let Node::Service(service) = node else { return Vec::new() };
    let below = service.legs.iter().flat_map(words);
    std::iter::once(service.service.as_str()).chain(below).collect()
}

/// Why a service does not come out of a stack, and what to do.
fn stays(name: &str, from: &Node, service: &str) -> String {
    if settings(from, service).is_empty() && from.way_to(service).is_none() {
        return format!("volume {name}: {from} has no {service}; \"millrace volume show {name}\" shows what it has");
    }
    let advice = format!("move the data to the stack you want: \"millrace volume migrate {name} --to STACK\"");
    format!("volume {name}: no leg of {service} in {from} shows the data as they are; {advice}")
}

/// How the services of one kind are set.
fn settings<'a>(node: &'a Node, word: &str) -> Vec<&'a Settings> {
    let Node::Service(service) = node else { return Vec::new() };
    let own = (service.service == word).then_some(&service.settings);
    own.into_iter().chain(service.legs.iter().flat_map(|leg| settings(leg, word))).collect()
}

/// What is below all services that are over one leg.
fn bare(mut node: &Node) -> &Node {
    while let [leg] = node.legs() {
        node = leg;
    }
    node
}

/// The stack without the first service of this name that shows one of its legs as it is: its only one, or what is behind a cache.
fn without(node: &Node, service: &str) -> Option<Node> {
    let Node::Service(found) = node else { return None };
    if found.service == service
        && let Some(leg) = shown(found)
    {
        return Some(leg.clone());
    }
    let at = found.legs.iter().position(|leg| without(leg, service).is_some())?;
    let mut changed = found.clone();
    changed.legs[at] = without(&found.legs[at], service)?;
    Some(Node::Service(changed))
}

/// The same without the service at the end of a way.
fn without_at(node: &Node, way: &[usize]) -> Option<Node> {
    let Node::Service(found) = node else { return None };
    let Some((at, way)) = way.split_first() else { return shown(found).cloned() };
    let mut changed = found.clone();
    changed.legs[*at] = without_at(&found.legs[*at], way)?;
    Some(Node::Service(changed))
}

/// The leg that a service shows as it is.
fn shown(service: &ServiceNode) -> Option<&Node> {
    match &service.legs[..] {
        [leg] => Some(leg),
        [_, leg] if service.service == "cache" => Some(leg),
        _ => None,
    }
}

/// Puts a leaf in the place of another.
pub(super) fn replace(client: &Client, name: &str, (old, new): (&str, &str), reformat: bool) -> Changed {
    let (old, new) = (stack(old).map_err(Misuse)?, stack(new).map_err(Misuse)?);
    let Some(leaf) = old.as_leaf() else { return Err(Misuse(format!("{old} is no leaf")).into()) };
    let make = |from: &Node| -> Edited {
        let mut made = from.clone();
        if put(&mut made, &leaf.spec, &new) {
            Ok(made)
        } else {
            Err(format!("volume {name}: {from} has no leaf {}", leaf.spec).into())
        }
    };
    // What a leaf means is said by what it is a leg of.
    edit(client, name, reformat, make, |read, now| bare(read) == bare(now))
}

fn put(node: &mut Node, spec: &str, new: &Node) -> bool {
    match node {
        Node::Leaf(leaf) if leaf.spec == spec => {
            *node = new.clone();
            true
        }
        Node::Leaf(_) => false,
        Node::Service(service) => service.legs.iter_mut().any(|leg| put(leg, spec, new)),
    }
}

/// `name=value` as given on the command line.
pub(super) fn arguments(texts: &[String]) -> Result<BTreeMap<String, String>, String> {
    let mut arguments = BTreeMap::new();
    for text in texts {
        let (name, value) = text.split_once('=').ok_or_else(|| format!("{text:?} is no argument; write name=value"))?;
        if arguments.insert(name.to_owned(), value.to_owned()).is_some() {
            return Err(format!("{name}: it is said twice; say it once"));
        }
    }
    Ok(arguments)
}

/// Lists the services.
pub(super) fn services(global: &Global) -> Done {
    let kinds = millrace_services::all();
    if global.json {
        let word = |word: &millrace_services::Word| json!({ "name": word.name, "help": word.help });
        let entry = |kind: &&Kind| {
            let (settings, commands): (Vec<_>, Vec<_>) =
                (kind.settings.iter().map(word).collect(), kind.commands.iter().map(word).collect());
            let (least, most) = (kind.legs.start(), kind.legs.end());
            json!({ "name": kind.name, "help": kind.help, "legs": [least, most], "settings": settings, "commands": commands })
        };
        return output::json(&kinds.iter().map(entry).collect::<Vec<_>>());
    }
    let mut lines = Vec::new();
    for kind in kinds {
        lines.push(format!("{:<10} {}", kind.name, kind.help));
        lines.extend(kind.settings.iter().map(|word| format!("    {:<14} {}", format!("{}=", word.name), word.help)));
        lines.extend(kind.commands.iter().map(|word| format!("    {:<14} {}", format!("! {}", word.name), word.help)));
    }
    output::line(&lines.join("\n"))
}

/// A table of a volume's stacks.
pub(super) fn history(entries: &[HistoryEntry]) -> String {
    let mut table = Table::new(&["TIME", "PAUSE", "STACK", "WHY"]);
    for entry in entries {
        let pause = entry.pause_us.map_or("-".to_owned(), |micros| format!("{micros} us"));
        table.row([time(entry.time), pause, entry.stack.to_string(), entry.note.clone().unwrap_or_default()]);
    }
    table.render()
}

/// A time in seconds since 1970, as UTC.
fn time(seconds: u64) -> String {
    // Days to a date by the proleptic Gregorian calendar, in eras of 400 years that begin in March.
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

/// A stack as a tree, each service with what it has to say.
pub(super) fn tree(root: &Tree) -> String {
    let mut lines = Vec::new();
    draw(root, (root, &root.node), ("", ""), &mut lines);
    lines.join("\n")
}

/// Draws a node with its place, which is told where others are of its kind.
fn draw(root: &Tree, (node, place): (&Tree, &str), (first, rest): (&str, &str), lines: &mut Vec<String>) {
    let settings: Vec<_> = node.settings.iter().map(|(name, value)| format!(" {name}={value}")).collect();
    let size = if node.size == 0 { String::new() } else { format!("  {}", Size(node.size).approximate()) };
    let health = node.status.as_ref().map(|status| status.health).filter(|health| *health != Health::Good);
    let health = health.map(|health| format!("  {}", health.to_string().to_uppercase())).unwrap_or_default();
    let is_one_of_many = !node.over.is_empty() && root.count(&node.node) > 1;
    let which = if is_one_of_many { format!("  ({})", told_apart(place)) } else { String::new() };
    lines.push(format!("{first}{}{}{size}{health}{which}", node.node, settings.concat()));
    let below = if node.over.is_empty() { "   " } else { "│  " };
    lines.extend(node.status.iter().flat_map(said).map(|line| format!("{rest}{below} {line}")));
    for (at, leg) in node.over.iter().enumerate() {
        let (branch, trunk) = if at + 1 == node.over.len() { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        let (place, first) = (format!("{place}.{at}"), format!("{rest}{branch}"));
        draw(root, (leg, &place), (&first, &format!("{rest}{trunk}")), lines);
    }
}

/// What a service says.
fn said(status: &Status) -> Vec<String> {
    let facts = status.facts.iter().map(|(name, value)| format!("{name}: {value}"));
    let progress = status.progress.iter().map(|progress| {
        let percent = progress.done.saturating_mul(100).checked_div(progress.total).unwrap_or(100);
        format!("{}: {percent} % ({} of {})", progress.what, progress.done, progress.total)
    });
    facts.chain(progress).collect()
}

#[cfg(test)]
mod tests {
    use millrace_control::State;
    use serde_json::{Value, from_value};

    use super::*;
    use crate::commands::tests::{daemon, volume};

    type Edit = dyn Fn(&Client) -> Changed;

    /// An edit of volume v that meets somebody else's: what was asked for, and what came of it.
    fn edited(read: &str, now: &str, made: Option<&str>, edit: &Edit) -> (Vec<VolumeChange>, Changed) {
        let refusal = json!({ "code": CHANGED_MEANWHILE, "status": 409, "detail": "it was changed" }).to_string();
        let shown = |stack: &str| (200, volume(stack, None, State::Ready));
        let mut answers = vec![shown(read), (409, refusal), shown(now)];
        answers.extend(made.map(shown));
        let folder = tempfile::tempdir().unwrap();
        let daemon = daemon(folder.path(), answers);
        let result = edit(&Client::new(folder.path()).unwrap());
        let asked = daemon.join().unwrap().into_iter().filter(|body| *body != Value::Null);
        (asked.map(|body| from_value(body).unwrap()).collect(), result)
    }

    #[test]
    fn an_edit_that_met_another_is_made_again_where_it_is_plainly_the_same() {
        let insert = |client: &Client| insert(client, "v", "throttle(iops=9) | meter");
        let remove = |client: &Client| remove(client, "v", "throttle");
        let replace = |client: &Client| replace(client, "v", ("file:/b", "file:/c"), true);
        let legs = "mirror(file:/a, file:/b)";
        let cases: [(&Edit, &str, &str, Option<&str>); 11] = [
            (&insert, "file:/a", "stripe | file:/b", Some("throttle(iops=9) | meter | stripe | file:/b")),
            (&insert, "file:/a", "meter(tenant=acme) | file:/a", None),
            (&insert, "throttle(iops=5) | file:/a", "throttle(iops=6) | file:/a", None),
            (&remove, "throttle(iops=5) | file:/a", "meter | throttle(iops=5) | file:/b", Some("meter | file:/b")),
            (&remove, "throttle(iops=5) | file:/a", "throttle(iops=6) | file:/a", None),
            (&remove, "throttle(iops=5) | throttle(iops=5) | file:/a", "throttle(iops=5) | file:/a", None),
            (&remove, "throttle(iops=5) | file:/a", "file:/a", None),
            (&replace, legs, "meter | mirror(file:/a, file:/b)", Some("meter | mirror(file:/a, file:/c)")),
            (&replace, legs, "stripe(file:/a, file:/b)", None),
            (&replace, legs, "file:/b", None),
            (&replace, "file:/b", "move(file:/b, file:/d)", None),
        ];
        for (edit, read, now, made) in cases {
            let (asked, result) = edited(read, now, made, edit);
            let from: Vec<_> = asked.iter().map(|change| change.from.clone().unwrap().to_string()).collect();
            let expected: Vec<_> = [Some(read), made.map(|_| now)].into_iter().flatten().collect();
            assert_eq!(from, expected, "{read}; {now}");
            match made {
                Some(made) => {
                    assert!(result.is_ok(), "{read}; {now}: {result:?}");
                    assert_eq!(asked[1].stack, made.parse().ok(), "{read}; {now}");
                }
                None => assert_eq!(result.unwrap_err().to_string(), "it was changed", "{read}; {now}"),
            }
        }
    }

    #[test]
    fn times_are_utc() {
        assert_eq!(time(0), "1970-01-01 00:00:00Z");
        assert_eq!(time(951_827_696), "2000-02-29 12:34:56Z");
        assert_eq!(time(4_107_542_399), "2100-02-28 23:59:59Z");
    }

    #[test]
    fn trees_are_drawn() {
        let leaf = |name: &str| Tree { size: 1 << 30, ..Tree::of(&Node::leaf(name)) };
        let status = Status { health: Health::Degraded, ..Status::good([("chunk", "4096".to_owned())]) };
        let stack: Node = "concat(stripe(chunk=4K, file:/a, file:/b), null)".parse().unwrap();
        let mut root = Tree::of(&stack);
        root.over[0].status = Some(status);
        root.over[0].over = vec![leaf("file:/a"), leaf("file:/b")];
        let expected = "\
concat
├─ stripe chunk=4K  DEGRADED
│  │   chunk: 4096
│  ├─ file:/a  1.0 GiB
│  └─ file:/b  1.0 GiB
└─ null";
        assert_eq!(tree(&root).replace("1G", "1.0 GiB"), expected.replace("1G", "1.0 GiB"));
    }

    #[test]
    fn services_of_one_kind_are_drawn_with_their_places() {
        let stack: Node = "meter | stripe(mirror(null, null), mirror(null, null))".parse().unwrap();
        let drawn = tree(&Tree::of(&stack));
        let services: Vec<_> = drawn.lines().filter(|line| !line.ends_with("null")).collect();
        assert_eq!(services, ["meter", "└─ stripe", "   ├─ mirror  (meter.0.0)", "   └─ mirror  (meter.0.1)"]);
        let drawn = tree(&Tree::of(&"mirror(mirror(null, null), null)".parse().unwrap()));
        let services: Vec<_> = drawn.lines().filter(|line| !line.ends_with("null")).collect();
        assert_eq!(services, ["mirror  (top)", "├─ mirror  (mirror.0)"]);
    }

    #[test]
    fn services_come_out_of_stacks() {
        let stack: Node = "concat(stripe(chunk=4K, null), memory)".parse().unwrap();
        assert_eq!(without(&stack, "stripe").unwrap().to_string(), "concat(null, memory)");
        assert_eq!(without(&stack, "concat"), None);
        assert!(stays("v", &stack, "concat").contains("volume migrate v --to"));
        assert!(stays("v", &stack, "mirror").contains("has no mirror"));
        let twice: Node = "throttle(iops=5) | throttle(iops=2) | file:/a".parse().unwrap();
        for (place, left) in [("top", "throttle(iops=2) | file:/a"), ("throttle.0", "throttle(iops=5) | file:/a")] {
            assert_eq!(without_at(&twice, &twice.way_to(place).unwrap()).unwrap().to_string(), left);
        }
        assert_eq!(without_at(&twice, &twice.way_to("throttle.0.0").unwrap()), None, "a leaf");
        for none in ["throttle.1", "throttle.", "throttle", "meter.0", "0"] {
            assert_eq!(twice.way_to(none), None, "{none}");
        }
        let cached: Node = "meter | cache(mode=back, file:/fast) | file:/slow".parse().unwrap();
        assert_eq!(without(&cached, "cache").unwrap().to_string(), "meter | file:/slow");
        let mut stack = stack;
        assert!(
            put(&mut stack, "memory", &"concat(null, null)".parse().unwrap())
                && !put(&mut stack, "memory", &Node::leaf("null"))
        );
        assert_eq!(stack.to_string(), "concat(stripe(chunk=4K) | null, concat(null, null))");
    }
}
