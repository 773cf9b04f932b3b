//! The house rules that no compiler checks: lengths, SAFETY comments, who may import whom, links in the docs.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use millrace_tests::repository;

const FILE_LINES: usize = 800;
const FUNCTION_LINES: usize = 70;

/// Rooms in order: a room's manifest may only name rooms listed for it. Tests (dev-dependencies) may reach further.
const IMPORTS: &[(&str, &[&str])] = &[
    ("nvme-spec", &[]),
    ("functions", &[]),
    ("keeper", &[]),
    ("sandbox", &[]),
    ("memory", &[]),
    ("block", &["memory"]),
    ("engine", &["block", "memory"]),
    ("vfio-user", &[]),
    ("frontends", &["nvme-spec", "functions", "engine-model", "memory", "block", "engine", "vfio-user", "keeper"]),
    ("backends", &["memory", "block", "driver"]),
    ("cipher", &["memory", "block"]),
    ("services", &["memory", "block", "engine", "cipher"]),
    ("trace", &["block"]),
    ("driver", &["nvme-spec", "memory", "block", "vfio-user"]),
    ("fastpath", &["block", "driver"]),
    ("control", &["block", "engine", "services", "backends", "frontends", "vfio-user", "keeper", "sandbox", "trace"]),
    (
        "millrace",
        &[
            "block",
            "engine",
            "services",
            "backends",
            "frontends",
            "driver",
            "control",
            "vfio-user",
            "nvme-spec",
            "engine-model",
            "memory",
            "keeper",
            "sandbox",
            "trace",
        ],
    ),
];

/// Rooms that must not contain `unsafe` at all.
const SAFE_ROOMS: &[&str] = &["nvme-spec", "functions", "vfio-user", "services", "control", "trace", "millrace"];

/// Longer than the rule allows: path, or path and function, to its length. A ratchet: an entry that is longer than it needs to be,
/// or needless, fails too, so lengths only fall.
const LONGER: &[(&str, usize)] = &[];

struct Source {
    /// Relative to the repository.
    path: String,
    text: String,
}

fn files(dir: &Path, keep: &dyn Fn(&Path) -> bool, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries {
        let path = entry.expect("a readable folder").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            if name != "target" && !name.starts_with('.') {
                files(&path, keep, found);
            }
        } else if keep(&path) {
            found.push(path);
        }
    }
}

fn sources(extension: &str) -> Vec<Source> {
    let root = repository();
    let mut found = Vec::new();
    files(&root, &|path| path.extension().is_some_and(|e| e == extension), &mut found);
    found.sort();
    let relative = |path: &PathBuf| path.strip_prefix(&root).expect("below the root").to_string_lossy().into_owned();
    found.iter().map(|path| Source { path: relative(path), text: fs::read_to_string(path).expect("a text file") }).collect()
}

fn is_test(path: &str) -> bool {
    path.split('/').any(|part| matches!(part, "tests" | "tests.rs" | "benches" | "fixture.rs" | "conformance"))
        || path.ends_with("_tests.rs")
        || path.ends_with("conformance.rs")
}

/// Lines before an inline test module.
fn code_lines(text: &str) -> usize {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    code.lines().count()
}

/// Functions by name with their length: rustfmt puts the closing brace under the first word.
fn functions(text: &str) -> Vec<(String, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let indent = line.len() - line.trim_start().len();
        let mut words = line.split_whitespace().skip_while(|word| {
            matches!(*word, "pub" | "const" | "async" | "unsafe" | "extern")
                || word.starts_with("pub(")
                || word.starts_with('"')
        });
        if words.next() != Some("fn") || line.trim_end().ends_with([';', '}']) {
            continue;
        }
        let name: String =
            words.next().unwrap_or_default().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        let closing = format!("{}}}", " ".repeat(indent));
        if let Some(length) = lines[at..].iter().position(|line| *line == closing) {
            found.push((name, length + 1));
        }
    }
    found
}

#[test]
fn files_and_functions_stay_short() {
    let mut allowed: BTreeMap<&str, usize> = LONGER.iter().copied().collect();
    let mut complaints = Vec::new();
    let mut check = |key: String, length: usize, limit: usize| match allowed.remove(key.as_str()) {
        Some(ratchet) if length != ratchet && length > limit => {
            complaints
                .push(format!("{key}: {length} lines, the ratchet says {ratchet}; it may only fall, and then be lowered"));
        }
        Some(_) if length <= limit => complaints.push(format!("{key}: {length} lines, no exception needed any more")),
        None if length > limit => complaints.push(format!("{key}: {length} lines, the rule says at most {limit}")),
        _ => {}
    };
    for source in sources("rs").iter().filter(|source| !is_test(&source.path)) {
        check(source.path.clone(), code_lines(&source.text), FILE_LINES);
        let code = source.text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        for (name, length) in functions(code) {
            if length > FUNCTION_LINES {
                check(format!("{}:{name}", source.path), length, FUNCTION_LINES);
            }
        }
    }
    complaints.extend(allowed.keys().map(|key| format!("{key}: excepted, but not there or short enough")));
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

#[test]
fn every_unsafe_says_why_it_is_sound() {
    let mut complaints = Vec::new();
    for source in sources("rs").iter().filter(|source| source.path != "tests/tests/tidy.rs") {
        let lines: Vec<&str> = source.text.lines().collect();
        let room = source.path.strip_prefix("crates/").and_then(|path| path.split('/').next()).unwrap_or_default();
        for (at, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            let is_unsafe = ["unsafe {", "unsafe impl"].iter().any(|form| code.contains(form));
            if !is_unsafe {
                continue;
            }
            if SAFE_ROOMS.contains(&room) {
                complaints.push(format!("{}:{}: no unsafe in this room", source.path, at + 1));
            }
            let above = &lines[at.saturating_sub(18)..at];
            if !above.iter().any(|line| line.contains("SAFETY:")) {
                complaints.push(format!("{}:{}: unsafe without a SAFETY comment", source.path, at + 1));
            }
        }
    }
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

#[test]
fn rooms_import_only_what_lies_below() {
    let crates = repository().join("crates");
    let mut complaints = Vec::new();
    let mut seen = 0;
    for entry in fs::read_dir(&crates).expect("crates/") {
        let room = entry.expect("a readable folder").file_name().to_string_lossy().into_owned();
        let Some((_, allowed)) = IMPORTS.iter().find(|(name, _)| *name == room) else {
            complaints.push(format!("crates/{room}: not in the table of rooms"));
            continue;
        };
        seen += 1;
        let manifest = fs::read_to_string(crates.join(&room).join("Cargo.toml")).expect("a manifest");
        let dependencies = manifest.split("[dependencies]").nth(1).unwrap_or_default();
        let dependencies = dependencies.split("\n[").next().unwrap_or_default();
        for line in dependencies.lines() {
            let Some(name) = line.strip_prefix("millrace-") else { continue };
            let name: String = name.chars().take_while(|c| c.is_alphanumeric() || *c == '-').collect();
            if !allowed.contains(&name.as_str()) {
                complaints.push(format!("crates/{room}: must not depend on {name}"));
            }
        }
    }
    assert_eq!(seen, IMPORTS.len(), "every room of the table exists");
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

/// Whether a comment that becomes docs has an example, which rustdoc would run.
fn has_example(text: &str) -> bool {
    let mut fenced = false;
    text.lines()
        .map(str::trim_start)
        .filter_map(|line| line.strip_prefix("///").or_else(|| line.strip_prefix("//!")))
        .filter_map(|line| line.trim_start().strip_prefix("```"))
        .any(|kind| {
            fenced = !fenced;
            fenced && kind.trim() != "text"
        })
}

/// To look for examples reads a library once more, so that those without any say so; an example elsewhere would not be run.
#[test]
fn examples_in_the_docs_are_run() {
    let rust = sources("rs");
    let mut complaints = Vec::new();
    let mut run = 0;
    for manifest in sources("toml") {
        let Some(package) = manifest.path.strip_suffix("Cargo.toml") else { continue };
        let library = format!("{package}src/");
        if !repository().join(&library).join("lib.rs").exists() {
            continue;
        }
        let has_examples = rust.iter().any(|source| source.path.starts_with(&library) && has_example(&source.text));
        let looked_for = !manifest.text.lines().any(|line| line == "doctest = false");
        run += usize::from(has_examples && looked_for);
        if has_examples && !looked_for {
            complaints.push(format!("{}: examples in the docs, and doctest = false", manifest.path));
        } else if looked_for && !has_examples {
            complaints.push(format!("{}: no examples in the docs; [lib] must have doctest = false", manifest.path));
        }
    }
    assert!(run > 0, "the docs have examples");
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

/// Public items without their bodies, but for those of enums.
fn public_items(code: &str) -> Vec<String> {
    let lines: Vec<&str> = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let begins = (0..lines.len()).filter(|at| lines[*at].trim_start().starts_with("pub "));
    let item = |at: usize| {
        let first = lines[at].trim_start();
        let closing = format!("{}}}", " ".repeat(lines[at].len() - first.len()));
        let is_last = |line: &&str| {
            if first.starts_with("pub use ") {
                line.ends_with(';')
            } else if first.starts_with("pub enum ") {
                **line == closing
            } else {
                // Of a field nothing follows; of a function, what it takes and gives.
                first.ends_with(',') || line.ends_with(';') || line.contains('{')
            }
        };
        let len = lines[at..].iter().position(is_last).map_or(1, |last| last + 1);
        lines[at..at + len].join(" ")
    };
    begins.map(item).collect()
}

/// Who has a back end has a volume, and no way around it: what reaches a disk's queues stays inside.
#[test]
fn physical_disks_are_shown_as_volumes_only() {
    const INSIDE: [&str; 4] = ["QueuePair", "LeanQueue", "Command", "Controller"];
    let mut complaints = Vec::new();
    let mut seen = 0;
    let is_code = |source: &Source| source.path.starts_with("crates/backends/src/") && !is_test(&source.path);
    for source in sources("rs").into_iter().filter(is_code) {
        let code = source.text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        for item in public_items(code) {
            seen += 1;
            let mut words = item.split(|c: char| !c.is_alphanumeric() && c != '_');
            if words.any(|word| INSIDE.contains(&word)) {
                complaints.push(format!("{}: {}", source.path, item.trim()));
            }
        }
    }
    assert!(seen > 20, "the back ends have public items");
    assert!(complaints.is_empty(), "public, and not a volume's:\n{}", complaints.join("\n"));
}

/// The process that must not die is read as a whole by whoever wants to trust it.
#[test]
fn the_keeper_stays_small() {
    let mut lines = 0;
    for name in ["process", "score", "upgrade", "cells", "wire"] {
        let text = std::fs::read_to_string(repository().join(format!("crates/keeper/src/{name}.rs"))).expect("the keeper");
        // What is imported is said again where it is used.
        let code = text.split_once("};\n\n").map_or(text.as_str(), |(_, code)| code);
        let is_code = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
        lines += code.lines().filter(is_code).count();
    }
    assert!((200..640).contains(&lines), "the keeper has {lines} lines of code");
}

#[test]
fn nothing_is_left_to_do_in_comments() {
    let marks = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("to", "do!("), concat!("unimple", "mented!(")];
    let mut complaints = Vec::new();
    for source in sources("rs") {
        for (at, line) in source.text.lines().enumerate() {
            if marks.iter().any(|mark| line.contains(mark)) {
                complaints.push(format!("{}:{}: {}", source.path, at + 1, line.trim()));
            }
        }
    }
    assert!(complaints.is_empty(), "put it on docs/roadmap.md with an owner:\n{}", complaints.join("\n"));
}

#[test]
fn no_merge_is_half_done() {
    let marks = [concat!("<<<<", "<<< "), concat!(">>>>", ">>> ")];
    for source in ["rs", "md", "toml", "sh"].into_iter().flat_map(sources) {
        let marked = source.text.lines().position(|line| marks.iter().any(|mark| line.starts_with(mark)));
        assert_eq!(marked, None, "{} has the marks of a conflict", source.path);
    }
}

#[test]
fn links_in_the_docs_lead_somewhere() {
    let root = repository();
    let mut complaints = Vec::new();
    let mut links = 0;
    for source in sources("md") {
        let folder = root.join(&source.path).parent().expect("a folder").to_path_buf();
        let mut fenced = false;
        for (at, line) in source.text.lines().enumerate() {
            fenced ^= line.trim_start().starts_with("```");
            if fenced {
                continue;
            }
            for piece in line.split("](").skip(1) {
                let target = piece.split(')').next().unwrap_or_default().split('#').next().unwrap_or_default();
                if target.is_empty() || target.contains("://") || target.starts_with("mailto:") {
                    continue;
                }
                links += 1;
                if !folder.join(target).exists() {
                    complaints.push(format!("{}:{}: {target} is not there", source.path, at + 1));
                }
            }
            // Paths named in backquotes: docs, scripts and sources move, and their mentions must follow.
            for name in line.split('`').skip(1).step_by(2) {
                let is_path = ["crates/", "docs/", "scripts/", "tests/"].iter().any(|start| name.starts_with(start));
                let plain = name.chars().all(|c| c.is_alphanumeric() || "/._-".contains(c));
                if is_path && plain {
                    links += 1;
                    if !root.join(name).exists() {
                        complaints.push(format!("{}:{}: `{name}` is not there", source.path, at + 1));
                    }
                }
            }
        }
    }
    assert!(links > 0, "the docs have links");
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}
