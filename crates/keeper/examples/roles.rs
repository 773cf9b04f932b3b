//! For this crate's tests: a keeper, its workers and its cells, by what the environment says.

use std::{
    error::Error,
    ffi::OsStr,
    fs,
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::{Command, exit},
    thread,
};

use millrace_keeper::{Keeper, Key, Kind, Link, Outcome, Word};
use rustix::process::{Resource, Rlimit, Signal, getppid, kill_process, setrlimit};

/// What this process is.
const ROLE: &str = "MILLRACE_TEST_ROLE";

fn this(role: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.env(ROLE, role);
    command
}

fn place() -> PathBuf {
    PathBuf::from(std::env::var_os("MILLRACE_TEST_PLACE").expect("the test says where"))
}

fn mark(name: &str) {
    fs::write(place().join(name), "").expect("a mark");
}

fn main() {
    let done = match std::env::var(ROLE).as_deref() {
        Ok("cell") => {
            mark("cell");
            Ok(())
        }
        Ok("worker") => work(),
        _ => keep(),
    };
    if let Err(error) = done {
        eprintln!("{error}");
        exit(99);
    }
}

fn keep() -> Result<(), Box<dyn Error>> {
    if let Ok(files) = std::env::var("MILLRACE_TEST_FILES") {
        let most = Some(files.parse()?);
        setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most })?;
    }
    let may_have_cells = std::env::var("MILLRACE_TEST_CELLS").is_ok();
    let command = |_: &Path, cell: Option<&OsStr>| this(if cell.is_some() { "cell" } else { "worker" });
    match Keeper::new(command, || (), vec![place().canonicalize()?], may_have_cells)?.run()? {
        Outcome::Stopped => Ok(()),
        Outcome::Failed(code) => exit(code.unwrap_or(98)),
    }
}

fn work() -> Result<(), Box<dyn Error>> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    rustix::stdio::dup2_stdin(fs::File::open("/dev/null")?)?;
    let link = Link::begin(socket, &[Link::LAYOUT])?;
    match std::env::var("MILLRACE_TEST_PLAY")?.as_str() {
        "cells" => ask_for_cells(&link),
        "let-go" => let_go_and_be_stopped(&link),
        "full" => fill(&link),
        "programs" => name_programs(&link),
        play => {
            assert_eq!(play, "flood");
            flood(link)
        }
    }
}

/// Waits for a word, passing over others.
fn wait_for(link: &Link, wanted: impl Fn(&Word) -> bool) -> Result<(), Box<dyn Error>> {
    while !wanted(&link.listen()?) {}
    Ok(())
}

/// The first one asks for a cell and dies; the second one tells once the keeper has had its turn.
fn ask_for_cells(link: &Link) -> Result<(), Box<dyn Error>> {
    link.ready()?;
    if link.predecessor().is_none() {
        link.start_cell("one")?;
        exit(1);
    }
    for _ in 0..2 {
        link.upgrade([1; 16], Path::new("/nonexistent"), 0)?;
        wait_for(link, |word| matches!(word, Word::Upgraded(_)))?;
    }
    mark("had-its-turn");
    wait_for(link, |word| *word == Word::Stop)
}

/// The first one lets go, is stopped then, and ends as one that has let go: the second one has everything to put in order.
fn let_go_and_be_stopped(link: &Link) -> Result<(), Box<dyn Error>> {
    link.ready()?;
    if link.predecessor().is_none() {
        link.upgrade([1; 16], &std::env::current_exe()?, 1000)?;
        wait_for(link, |word| matches!(word, Word::LetGo(_)))?;
        kill_process(getppid().ok_or("no parent")?, Signal::TERM)?;
        return wait_for(link, |word| *word == Word::Stop);
    }
    mark("second");
    wait_for(link, |word| *word == Word::Stop)?;
    mark("second-in-order");
    Ok(())
}

/// A client fills what room there is, and is told; what is a volume's is held all the same.
fn fill(link: &Link) -> Result<(), Box<dyn Error>> {
    link.ready()?;
    let blocks = Key::of([2; 16], Kind::BLOCKS);
    if link.predecessor().is_none() {
        for slot in 0..400 {
            link.put(Key { owner: [1; 16], kind: Kind::MEMORY, slot }, std::io::stdout().as_fd())?;
        }
        wait_for(link, |word| matches!(word, Word::NotHeld(key) if key.kind == Kind::MEMORY))?;
        link.put(blocks, std::io::stdout().as_fd())?;
        exit(1);
    }
    mark(if link.is_held(blocks) { "held" } else { "lost" });
    wait_for(link, |word| *word == Word::Stop)
}

/// Names programs that cannot take over, and writes down what becomes of each.
fn name_programs(link: &Link) -> Result<(), Box<dyn Error>> {
    link.ready()?;
    let here = place().canonicalize()?;
    let (linked, missing) = (here.join("linked"), here.join("missing"));
    std::os::unix::fs::symlink(std::env::current_exe()?, &linked)?;
    let mut said = Vec::new();
    let (below, above) = (here.join("below/program"), here.join(".."));
    for path in [Path::new("/nonexistent/program"), &below, &here, &above, &linked, &missing] {
        link.upgrade([1; 16], path, 0)?;
        let upgraded = loop {
            if let Word::Upgraded(upgraded) = link.listen()? {
                break upgraded;
            }
        };
        said.push(format!("{:?}", upgraded.result));
    }
    fs::write(here.join("said"), said.join("\n"))?;
    mark("named");
    wait_for(link, |word| *word == Word::Stop)
}

/// Says things without an end, until it is told to stop.
fn flood(link: Link) -> Result<(), Box<dyn Error>> {
    link.ready()?;
    let link: &'static Link = Box::leak(Box::new(link));
    // What takes the keeper longer than the worker, so that it never finds nothing to hear.
    let put = |slot| link.put(Key { owner: [1; 16], kind: Kind(7), slot }, std::io::stdout().as_fd());
    (0..5000).try_for_each(put)?;
    for _ in 0..3 {
        thread::spawn(move || {
            let mut slot = 0;
            while put(slot).is_ok() {
                slot = (slot + 1) % 6000;
            }
        });
    }
    mark("flooding");
    wait_for(link, |word| *word == Word::Stop)
}
