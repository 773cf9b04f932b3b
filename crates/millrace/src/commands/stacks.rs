//! What volumes are made of: shown and changed.

use std::{collections::BTreeMap, error::Error};

use millrace_control::{HistoryEntry, Size, VolumeChange, VolumeView};
use millrace_services::{Health, Kind, Node, Status, graph::Tree};
use serde_json::json;

use super::{Done, show};
use crate::{
    cli::{Global, stack},
    client::{Client, segment},
    output::{self, Table},
};

/// Puts another stack in the place of a volume's.
pub(super) fn change(global: &Global, client: &Client, name: &str, stack: Node, reformat: bool) -> Done {
    let change = VolumeChange { size: None, stack: Some(stack), reformat };
    let view: VolumeView = client.patch(&format!("/v1/volumes/{}", segment(name)), &change)?;
    show(global, &view, |view| format!("volume {}: {}", view.name, view.stack))
}

fn present(client: &Client, name: &str) -> Result<Node, Box<dyn Error>> {
    let view: VolumeView = client.get(&format!("/v1/volumes/{}", segment(name)))?;
    Ok(view.stack)
}

/// Puts a service on top.
pub(super) fn insert(global: &Global, client: &Client, name: &str, service: &str) -> Done {
    let text = format!("{service} | {}", present(client, name)?);
    change(global, client, name, stack(&text)?, false)
}

/// Takes a service out.
pub(super) fn remove(global: &Global, client: &Client, name: &str, service: &str) -> Done {
    let present = present(client, name)?;
    let Some(stack) = without(&present, service) else {
        let advice = "give the stack you want by \"volume change\"";
        return Err(
            format!("volume {name}: {present} has no {service} that shows one of its legs as it is; {advice}").into()
        );
    };
    change(global, client, name, stack, false)
}

/// The stack without the first service of this name that shows one of its legs as it is: its only one, or what is behind a cache.
fn without(node: &Node, service: &str) -> Option<Node> {
    let Node::Service(found) = node else { return None };
    match &found.legs[..] {
        [leg] | [_, leg] if found.service == service && (found.legs.len() == 1 || service == "cache") => {
            return Some(leg.clone());
        }
        _ => {}
    }
    let at = found.legs.iter().position(|leg| without(leg, service).is_some())?;
    let mut changed = found.clone();
    changed.legs[at] = without(&found.legs[at], service)?;
    Some(Node::Service(changed))
}

/// Puts a leaf in the place of another.
pub(super) fn replace(global: &Global, client: &Client, name: &str, (old, new): (&str, &str), reformat: bool) -> Done {
    let mut present = present(client, name)?;
    let (old, new) = (stack(old)?, stack(new)?);
    let Some(spec) = old.as_leaf().map(|leaf| leaf.spec.clone()) else {
        return Err(format!("{old} is no leaf").into());
    };
    if !put(&mut present, &spec, &new) {
        return Err(format!("volume {name}: {present} has no leaf {spec}").into());
    }
    change(global, client, name, present, reformat)
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
    let split = |text: &String| {
        let (name, value) = text.split_once('=').ok_or_else(|| format!("{text:?} is no argument; write name=value"))?;
        Ok((name.to_owned(), value.to_owned()))
    };
    texts.iter().map(split).collect()
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
    draw(root, "", "", &mut lines);
    lines.join("\n")
}

fn draw(node: &Tree, first: &str, rest: &str, lines: &mut Vec<String>) {
    let settings: Vec<_> = node.settings.iter().map(|(name, value)| format!(" {name}={value}")).collect();
    let size = if node.size == 0 { String::new() } else { format!("  {}", Size(node.size).approximate()) };
    let health = node.status.as_ref().map(|status| status.health).filter(|health| *health != Health::Good);
    let health = health.map(|health| format!("  {}", health.to_string().to_uppercase())).unwrap_or_default();
    lines.push(format!("{first}{}{}{size}{health}", node.node, settings.concat()));
    let below = if node.over.is_empty() { "   " } else { "│  " };
    lines.extend(node.status.iter().flat_map(said).map(|line| format!("{rest}{below} {line}")));
    for (at, leg) in node.over.iter().enumerate() {
        let (branch, trunk) = if at + 1 == node.over.len() { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        draw(leg, &format!("{rest}{branch}"), &format!("{rest}{trunk}"), lines);
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
    use super::*;

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
    fn services_come_out_of_stacks() {
        let stack: Node = "concat(stripe(chunk=4K, null), memory)".parse().unwrap();
        assert_eq!(without(&stack, "stripe").unwrap().to_string(), "concat(null, memory)");
        assert_eq!(without(&stack, "concat"), None);
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
