//! Workers that a keeper should not be left with. What is wrong with one is the name it was copied to.

use std::{
    os::{fd::AsFd, unix::process::CommandExt},
    process::{abort, exit},
    thread::sleep,
    time::Duration,
};

use millrace_keeper::{Layout, Link};

/// What the daemon asks for, in any version: the names are those of `millrace layouts`.
const EVERY_VERSION: [Layout; 6] = [
    every("device-state"),
    every("commands-in-flight"),
    every("client"),
    every("namespace"),
    every("state.redb"),
    every("keeper-protocol"),
];

const fn every(name: &'static str) -> Layout {
    Layout { name, oldest: 0, newest: u16::MAX }
}

fn main() {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL)).expect("a signal");
    let path = std::fs::read_link("/proc/self/exe").expect("the path of this program");
    let wrong = path.file_name().and_then(|name| name.to_str()).expect("a name").to_owned();
    let socket = || std::io::stdin().as_fd().try_clone_to_owned().expect("standard input");
    let begin = |layouts: &[Layout]| Link::begin(socket(), layouts).expect("the keeper");
    match wrong.as_str() {
        // A cell's worker is as it should be: the binary that lies beside this one.
        "fails-as-first" | "crashes-soon-as-first" if is_cell() => {
            let error = std::process::Command::new(path.with_file_name("whole")).args(std::env::args_os().skip(1)).exec();
            panic!("the whole binary: {error}");
        }
        "hangs" => wait(),
        "strange" => {
            let mut layouts = EVERY_VERSION;
            layouts[0].oldest = u16::MAX;
            begin(&layouts);
            exit(1);
        }
        "ignorant" => {
            begin(&EVERY_VERSION[..1]);
            exit(1);
        }
        "ends-at-its-turn" | "fails-as-first" => {
            begin(&EVERY_VERSION);
            exit(3);
        }
        "hangs-at-its-turn" => {
            let _link = begin(&EVERY_VERSION);
            wait();
        }
        "crashes-soon" | "crashes-soon-as-first" => {
            let link = begin(&EVERY_VERSION);
            link.ready().expect("the keeper");
            sleep(Duration::from_millis(300));
            abort();
        }
        name => panic!("{name} is no name of a fault"),
    }
}

fn is_cell() -> bool {
    std::env::args().any(|word| word.starts_with("--cell="))
}

fn wait() -> ! {
    loop {
        sleep(Duration::from_secs(3600));
    }
}
