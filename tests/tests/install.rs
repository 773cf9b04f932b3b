//! What `make install` puts where, and what the service manager thinks of its unit.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use millrace_tests::{Daemon, repository, skip};
use tempfile::TempDir;

/// Asks the front door, with these variables and no others of ours.
fn make(target: &str, variables: &[(&str, &Path)]) -> String {
    let mut command = Command::new("make");
    command.arg("--no-print-directory").arg("-C").arg(repository()).arg(target);
    // Of the `make` that runs the tests.
    for variable in ["MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PREFIX", "SYSCONFDIR", "DESTDIR"] {
        command.env_remove(variable);
    }
    for (name, value) in variables {
        command.arg(format!("{name}={}", value.display()));
    }
    said_by(&command.output().expect("make"))
}

fn said_by(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|said| String::from_utf8_lossy(said).into_owned());
    assert!(output.status.success(), "{}\n{out}\n{err}", output.status);
    out
}

/// Every file below a folder, by its path there.
fn files(folder: &Path) -> BTreeSet<String> {
    let (mut found, mut left) = (BTreeSet::new(), vec![folder.to_path_buf()]);
    while let Some(next) = left.pop() {
        for entry in fs::read_dir(next).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                left.push(path);
            } else {
                found.insert(path.strip_prefix(folder).expect("below it").display().to_string());
            }
        }
    }
    found
}

/// Where links of the pages in a folder lead, and nothing is there.
fn dead_links(folder: &Path) -> Vec<String> {
    let mut dead = Vec::new();
    for page in &files(folder) {
        let path = folder.join(page);
        if path.extension().is_none_or(|extension| extension != "md") {
            continue;
        }
        let mut fenced = false;
        for line in fs::read_to_string(&path).expect("a page").lines() {
            fenced ^= line.trim_start().starts_with("```");
            let links = line.split("](").skip(1).filter(|_| !fenced);
            let targets = links.map(|link| link.split([')', '#']).next().unwrap_or_default());
            let is_dead = |target: &&str| {
                let leaves = target.is_empty() || target.contains("://") || target.starts_with("mailto:");
                !leaves && !path.with_file_name(target).exists()
            };
            dead.extend(targets.filter(is_dead).map(|target| format!("{page}: {target}")));
        }
    }
    dead
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).permissions().mode() & 0o777
}

#[test]
fn it_is_installed_and_taken_away_again() {
    let (stage, binary) = (TempDir::new().expect("a folder"), Daemon::binary());
    let variables: [(&str, &Path); 2] = [("DESTDIR", stage.path()), ("MILLRACE_BINARY", binary.as_path())];
    make("install", &variables);
    let place = |path: &str| stage.path().join(path);
    assert!(fs::read(place("usr/local/bin/millrace")).expect("the program") == fs::read(&binary).expect("the program"));
    for (path, text) in [
        ("usr/local/share/man/man1/millrace.1", ".TH"),
        ("usr/local/share/man/man1/millrace-volume-create.1", "block"),
        ("usr/local/share/bash-completion/completions/millrace", "_millrace"),
        ("usr/local/share/zsh/site-functions/_millrace", "#compdef millrace"),
        ("usr/local/share/fish/vendor_completions.d/millrace.fish", "millrace"),
        ("usr/local/share/doc/millrace/docs/millrace.example.toml", "[[volume]]"),
        ("usr/local/share/doc/millrace/LICENSE-MIT", "Permission is hereby granted"),
        ("usr/local/share/doc/millrace/README.md", "# Millrace"),
        ("usr/local/share/doc/millrace/docs/sandbox.md", "--allow"),
        ("usr/local/share/doc/millrace/docs/services/crypt.md", "key-encryption key"),
        (
            "usr/local/lib/systemd/system/millrace.service",
            "ExecStart=/usr/local/bin/millrace serve --config /etc/millrace.toml",
        ),
        ("etc/millrace.toml", "[sandbox]"),
    ] {
        assert_eq!(mode(&place(path)), 0o644, "{path}");
        let there = fs::read_to_string(place(path)).expect("text");
        assert!(there.contains(text), "{path} has no {text:?}");
    }
    assert_eq!(mode(&place("usr/local/bin/millrace")), 0o755);
    assert_eq!(dead_links(&place("usr/local/share/doc/millrace")), Vec::<String>::new());

    // A newer version goes over an older one: what the operator has written stays, and what is no more goes.
    fs::write(place("etc/millrace.toml"), "shards = \"2\"\n").expect("the configuration");
    fs::write(place("usr/local/share/man/man1/millrace-gone.1"), "").expect("a page");
    let others = "usr/local/share/man/man1/mill.1";
    fs::write(place(others), "").expect("another program's page");
    make("install", &variables);
    assert_eq!(fs::read_to_string(place("etc/millrace.toml")).expect("the configuration"), "shards = \"2\"\n");
    assert!(!place("usr/local/share/man/man1/millrace-gone.1").exists());

    let said = make("uninstall", &variables);
    assert!(said.contains("etc/millrace.toml stays"), "{said}");
    assert_eq!(files(stage.path()), BTreeSet::from(["etc/millrace.toml", others].map(str::to_owned)));
}

#[test]
fn without_a_program_nothing_is_installed() {
    let stage = TempDir::new().expect("a folder");
    let mut install = Command::new(repository().join("scripts/install"));
    install.env("DESTDIR", stage.path()).env("MILLRACE_BINARY", stage.path().join("none")).env_remove("PREFIX");
    let output = install.output().expect("scripts/install");
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stderr).contains("make build"), "{output:?}");
    assert_eq!(files(stage.path()), BTreeSet::new());
}

#[test]
fn the_service_manager_understands_the_unit() {
    let (place, binary) = (TempDir::new().expect("a folder"), Daemon::binary());
    let (prefix, etc) = (place.path().join("prefix"), place.path().join("etc"));
    make("install", &[("PREFIX", prefix.as_path()), ("SYSCONFDIR", etc.as_path()), ("MILLRACE_BINARY", binary.as_path())]);
    let unit = prefix.join("lib/systemd/system/millrace.service");
    let text = fs::read_to_string(&unit).expect("the unit");
    let program =
        format!("{} serve --config {}", prefix.join("bin/millrace").display(), etc.join("millrace.toml").display());
    assert!(text.contains(&format!("ExecStart={program} ")), "{text}");
    assert!(!text.lines().any(|line| line.starts_with("Exec") && line.contains("/usr/local/")), "{text}");

    let path = std::env::var_os("PATH").unwrap_or_default();
    let programs: Vec<PathBuf> = std::env::split_paths(&path).map(|folder| folder.join("systemd-analyze")).collect();
    if !programs.iter().any(|program| program.is_file()) {
        return skip("what systemd thinks of the unit: there is no systemd-analyze");
    }
    let verify = |unit: &Path| {
        // It looks for manual pages where the system has them.
        let output =
            Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(unit).output().expect("systemd-analyze");
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    // Units of the host's own may be wrong; what is said of this one has its name.
    let (understood, said) = verify(&unit);
    assert!(understood && !said.contains("millrace.service"), "{said}");
    fs::write(&unit, text.replace("KillMode=", "KillMood=")).expect("another unit");
    assert!(verify(&unit).1.contains("KillMood"), "what is wrong is told");
}
