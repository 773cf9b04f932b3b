//! Stock Linux guests whose I/O queues are an engine's (docs/hardware.md): the software engine, or with the feature `sim` the hardware's
//! own text, simulated cycle by cycle. What is asked of both is the same.

use millrace_tests::{Boot, Daemon, seats, unless_heavy};

const ENGINE: &str = if cfg!(feature = "sim") { "fvm-sim" } else { "fvm-soft" };
/// Of each run of fio: the simulation takes its time.
const SIZE: &str = if cfg!(feature = "sim") { "1m" } else { "4m" };

fn engine(settings: &str) -> String {
    format!("--engine={ENGINE}:{settings}")
}

fn guest() -> Boot {
    Boot::scenario("engine").set("FIO_SIZE", unless_heavy(SIZE, "16m"))
}

#[test]
fn a_guest_on_an_engine() {
    let daemon = Daemon::start_with(&[&engine("latency=1000")]);
    let socket = daemon.disk("disk", &["--backend", "memory", "--size", "64M"], &[]);
    let before = daemon.usage();
    guest().processors(4).set("SIZE", 64 << 20).socket(&socket).run(&seats(1));
    daemon.expect_back_to(&before);
    daemon.finish();
}

/// A guest with several functions of one engine, each with a window of the engine's one disk.
#[test]
fn a_guest_with_several_functions() {
    const FUNCTIONS: u64 = 4;
    let daemon = Daemon::start_with(&[&engine("")]);
    daemon.run(&["volume", "create", "disk", "--backend", "memory", "--size", "64M"]);
    let mut boot = Boot::scenario("functions").set("FUNCTIONS", FUNCTIONS).set("FIO_SIZE", "1m");
    for number in 0..FUNCTIONS {
        let (name, window) = (format!("function{number}"), format!("share={}+8192", number * 8192));
        daemon.run(&["device", "create", &name, "--nvme", "--functions", &window]);
        daemon.run(&["device", "attach", &name, "disk"]);
        boot = boot.socket(&daemon.socket(&name));
    }
    boot.run(&seats(1));
    daemon.finish();
}

/// Two guests in windows of one volume, throttled, with everything written to a second volume as well.
#[test]
fn two_guests_share_a_throttled_and_replicated_disk() {
    let daemon = Daemon::start_with(&[&engine("ssds=2")]);
    let images = ["one", "two"].map(|volume| {
        let image = daemon.path(volume);
        let backend = format!("file:{}", image.display());
        daemon.run(&["volume", "create", volume, "--backend", &backend, "--size", "64M"]);
        image
    });
    let sockets = [("first", "share=0+65536"), ("second", "share=65536+32768")].map(|(name, window)| {
        let functions = format!("{window},iops=20000,bytes=100000000,replicate");
        daemon.run(&["device", "create", name, "--nvme", "--functions", &functions]);
        daemon.run(&["device", "attach", name, "one"]);
        daemon.run(&["device", "attach", name, "two"]);
        daemon.socket(name)
    });
    let seats = seats(2);
    let first = guest().set("SIZE", 32 << 20).socket(&sockets[0]).start(&seats);
    let second = guest().set("SIZE", 16 << 20).socket(&sockets[1]).start(&seats);
    first.finish();
    second.finish();
    drop(seats);
    let [one, two] = images.map(|image| std::fs::read(image).expect("a volume's file"));
    assert!(one == two, "the replicas differ");
    let wrote = |at: usize| one[at..at + (16 << 20)].iter().any(|byte| *byte != 0);
    assert!(wrote(0) && wrote(32 << 20), "each guest wrote to its window");
    assert!(one[48 << 20..].iter().all(|byte| *byte == 0), "and to nothing else");
    daemon.finish();
}
