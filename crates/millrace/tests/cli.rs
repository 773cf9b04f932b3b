//! The program as people and scripts use it: the built binary, its exit codes and what it prints.

use std::{
    fs,
    io::{self, BufRead, BufReader, PipeReader, PipeWriter, Read, Write},
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fs::OFlags,
    process::{Pid, Signal, kill_process},
};
use serde_json::Value;
use tempfile::TempDir;

const MILLRACE: &str = env!("CARGO_BIN_EXE_millrace");

/// A place with its own directories, and perhaps a daemon.
struct Place {
    directory: TempDir,
    daemon: Option<Child>,
}

impl Place {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), daemon: None }
    }

    fn with_daemon() -> Self {
        let mut place = Self::new();
        place.start(&[]);
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(MILLRACE);
        command.args(arguments).current_dir(self.directory.path());
        for variable in ["MILLRACE_LOG", "MILLRACE_STATE_DIR", "NOTIFY_SOCKET"] {
            command.env_remove(variable);
        }
        command.env("MILLRACE_RUN_DIR", self.path("run"));
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// What a command that works prints.
    fn ok(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success() && err.is_empty(), "{arguments:?}: {}\n{out}\n{err}", output.status);
        out
    }

    fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[arguments, &["--json"]].concat())).unwrap()
    }

    /// What a command that fails complains of.
    fn fails(&self, code: i32, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", text(&output.stderr));
        assert_eq!(text(&output.stdout), "", "{arguments:?}");
        text(&output.stderr)
    }

    fn start(&mut self, more: &[&str]) {
        let mut arguments = vec!["serve", "--state-dir", "state"];
        arguments.extend(more);
        self.spawn(&arguments);
    }

    /// Starts something that says when it is ready; returns its first line.
    fn spawn(&mut self, arguments: &[&str]) -> String {
        assert!(self.daemon.is_none());
        let mut child = self.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        if line.is_empty() {
            let mut complaint = String::new();
            child.stderr.take().unwrap().read_to_string(&mut complaint).unwrap();
            panic!("{arguments:?} ended: {}\n{complaint}", child.wait().unwrap());
        }
        self.daemon = Some(child);
        line
    }

    fn stop(&mut self, signal: Signal) -> Output {
        let child = self.daemon.take().unwrap();
        kill_process(Pid::from_child(&child), signal).unwrap();
        child.wait_with_output().unwrap()
    }

    fn stop_well(&mut self) {
        let output = self.stop(Signal::TERM);
        assert!(output.status.success(), "{}\n{}", output.status, text(&output.stderr));
    }

    fn names(&self, kind: &str) -> Vec<String> {
        let list = self.json(&[kind, "list"]);
        list.as_array().unwrap().iter().map(|object| object["name"].as_str().unwrap().to_owned()).collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(mut child) = self.daemon.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn a_disk_from_nothing_and_away_again() {
    let place = Place::with_daemon();
    assert!(place.ok(&["volume", "create", "a", "--size", "1G", "--backend", "memory"]).contains("volume a: 1G on memory"));
    place.ok(&["volume", "create", "f", "--size", "64M", "--backend", "file:f.img", "--block-size", "4096"]);
    assert_eq!(fs::metadata(place.path("f.img")).unwrap().len(), 64 << 20);
    place.ok(&["volume", "create", "n", "--size", "1T", "--backend", "null"]);
    assert_eq!(place.names("volume"), ["a", "f", "n"]);
    let created = place.ok(&["device", "create", "d", "--nvme", "--queues", "4", "--serial", "TEST"]);
    let socket = place.path("run/d.sock");
    assert!(socket.exists() && created.contains(socket.to_str().unwrap()));
    assert!(created.contains("vfio-user-pci") && created.contains("--user-device socket="));
    place.ok(&["device", "attach", "d", "a"]);
    place.ok(&["device", "attach", "d", "f", "--nsid", "5", "--read-only"]);
    let device = place.json(&["device", "show", "d"]);
    assert_eq!((&device["serial"], &device["nvme"]["queues"]), (&"TEST".into(), &4.into()));
    assert_eq!((&device["namespaces"][1]["nsid"], &device["namespaces"][1]["read_only"]), (&5.into(), &true.into()));
    assert_eq!(place.json(&["volume", "show", "f"])["block_size"], 4096);
    for resize in [&["volume", "resize", "a", "2G"][..], &["volume", "resize", "a", "--size", "512M", "--shrink"]] {
        place.ok(resize);
    }
    assert_eq!(place.json(&["volume", "show", "a"])["size"], 512 << 20);
    let shown = place.ok(&["device", "show", "d"]);
    assert!(shown.contains("5     f       read-only"), "{shown}");
    assert!(place.ok(&["volume", "list"]).contains("512M"));
    assert!(place.ok(&["device", "list"]).contains("1:a 5:f"));
    place.ok(&["device", "detach", "d", "f"]);
    assert!(place.ok(&["volume", "delete", "f"]).contains("f.img stays"));
    place.ok(&["device", "delete", "d"]);
    assert!(!socket.exists());
    assert_eq!((place.names("volume"), place.names("device").len()), (vec!["a".to_owned(), "n".to_owned()], 0));
}

#[test]
fn volumes_share_a_disk() {
    let place = Place::with_daemon();
    let told = place.ok(&["disk", "create", "pool", "file:pool.img", "--size", "8M", "--extent", "64K", "--depth", "9"]);
    assert!(told.contains("disk pool: 8M") && told.contains("\"share | volume:pool\""), "{told}");
    place.ok(&["volume", "create", "a", "--size", "2M", "--stack", "share(weight=2) | volume:pool"]);
    let listed = place.ok(&["disk", "list"]);
    assert!(listed.contains("pool  8M    6M    1  ") && !listed.contains("weight"), "{listed}");
    let room = &place.json(&["disk", "show", "pool"])["tree"]["status"]["room"];
    assert_eq!((&room["free"], &room["total"]), (&(6 << 20).into(), &(8 << 20).into()));
    let shown = place.ok(&["disk", "show", "pool"]);
    assert!(shown.contains("volume a: 2 MiB") && shown.contains("in flight: 0 of 9"), "{shown}");
    assert_eq!(place.ok(&["disk", "resize", "pool", "16M"]).trim(), "disk pool: 16M");
    place.ok(&["volume", "resize", "a", "12M"]);
    assert!(place.fails(1, &["disk", "resize", "pool", "14M"]).contains("its last 2M would be lost; if that is meant"));
    place.ok(&["disk", "resize", "pool", "14M", "--shrink"]);
    assert!(place.fails(1, &["disk", "release", "pool", "a"]).contains("volume a is in use"));
    assert!(place.fails(1, &["disk", "delete", "pool"]).contains("part of volume a"));
    assert!(place.fails(1, &["disk", "create", "x", "null", "--extent", "3K"]).contains("extent: a power of two"));
    for (arguments, instead) in [
        (&["disk", "show", "a"][..], "\"millrace volume show a\""),
        (&["disk", "resize", "a", "2M"], "\"millrace volume resize a 2M\""),
        (&["disk", "resize", "a", "2M", "--shrink"], "\"millrace volume resize a 2M --shrink\""),
        (&["disk", "delete", "a"], "\"millrace volume delete a\""),
    ] {
        let told = place.fails(1, arguments);
        assert!(told.contains("a is no disk; for a volume it is ") && told.contains(instead), "{told}");
    }
    place.ok(&["volume", "delete", "a"]);
    let told = place.ok(&["disk", "delete", "pool"]);
    assert!(told.starts_with("disk pool deleted; ") && told.contains("pool.img stays"), "{told}");
    for arguments in [
        &["disk", "show", "none"][..],
        &["disk", "resize", "none", "2M"],
        &["disk", "release", "none", "a"],
        &["disk", "delete", "none"],
    ] {
        let told = place.fails(1, arguments);
        assert!(told.contains("disk none does not exist; \"millrace disk list\""), "{told}");
    }
}

#[test]
fn json_is_everywhere() {
    let place = Place::with_daemon();
    assert_eq!(place.json(&["volume", "create", "a", "--size", "1M", "--backend", "null"])["name"], "a");
    assert_eq!(place.json(&["volume", "resize", "a", "2M"])["size"], 2 << 20);
    assert_eq!(place.json(&["device", "create", "d", "--nvme"])["state"], "ready");
    assert_eq!(place.json(&["device", "attach", "d", "a"])["nsid"], 1);
    assert_eq!(place.json(&["status"])["devices"], 1);
    let metrics = place.json(&["metrics"]);
    assert_eq!((&metrics["volumes"][0]["name"], &metrics["devices"][0]["name"]), (&"a".into(), &"d".into()));
    assert_eq!((&metrics["copies"], &metrics["groups"]), (&Value::Array(Vec::new()), &Value::Array(Vec::new())));
    assert_eq!((&metrics["workers"][0]["name"], &metrics["workers"][0]["shards"]), (&"main".into(), &metrics["shards"]));
    assert_eq!(place.json(&["device", "detach", "d", "1"])["detached"], 1);
    assert_eq!(place.json(&["device", "delete", "d"])["deleted"], "d");
    assert_eq!(place.json(&["volume", "delete", "a"])["deleted"], "a");
}

#[test]
fn refusals_are_told_with_advice_and_change_nothing() {
    let place = Place::with_daemon();
    place.ok(&["volume", "create", "a", "--size", "1M", "--backend", "file:a.img"]);
    place.ok(&["device", "create", "d", "--nvme"]);
    place.ok(&["device", "attach", "d", "a"]);
    let before = (place.json(&["volume", "list"]), place.json(&["device", "list"]));
    for (arguments, complaint) in [
        (
            &["volume", "create", "a", "--size", "1M", "--backend", "null"][..],
            "volume a exists already; choose another name",
        ),
        (&["volume", "create", "b", "--size", "1M", "--backend", "file:./a.img"], "a.img is the file of volume a"),
        (&["volume", "create", "b", "--backend", "file:none.img"], "with a size (--size) the file is created"),
        (&["volume", "create", "b", "--backend", "file:none/b.img", "--size", "1M"], "none: make it first"),
        (
            &["volume", "create", "b", "--size", "1M", "--stack", "cache(mode=through, file:none.img) | file:slow.img"],
            "none.img(size=…)",
        ),
        (
            &["volume", "create", "b", "--size", "1M", "--stack", "cache(mode=through, file:none/b.img) | file:slow.img"],
            "none: make it first",
        ),
        (&["volume", "create", "b", "--backend", "memory"], "this back end needs a size: --size"),
        (
            &["volume", "create", "b", "--size", "10M", "--stack", "concat(memory(size=40M), memory)"],
            "the legs before it have 40M together, and the volume 10M",
        ),
        (&["volume", "create", "b", "--size", "1000", "--backend", "memory"], "not a multiple of the block size"),
        (&["volume", "delete", "a"], "detach it first: \"millrace device detach d 1\""),
        (&["volume", "delete", "none"], "volume none does not exist; \"millrace volume list\" shows"),
        (&["volume", "show", "../status"], "volume ../status does not exist"),
        (&["volume", "show", ""], "the name of the volume is empty; \"millrace volume list\" shows"),
        (&["volume", "delete", ""], "the name of the volume is empty"),
        (&["device", "show", ""], "the name of the device is empty; \"millrace device list\" shows"),
        (&["group", "delete", ""], "the name of the group is empty"),
        (&["trace", "none"], "device none does not exist, and volume none does not exist either; \"millrace device list\""),
        (&["volume", "resize", "a", "1"], "smaller than one block"),
        (
            &["volume", "resize", "a", "256K"],
            "volume a has 1M, and 256K is smaller: what lies in its last 768K would be lost; if that is meant, say so: --shrink",
        ),
        (&["device", "create", "d", "--nvme"], "device d exists already"),
        (&["device", "create", "api", "--nvme"], "the API's own"),
        (&["device", "create", "e", "--nvme", "--queues", "9999"], "9999 queues: 1 to 256 are possible"),
        (&["device", "create", "e", "--nvme", "--shard", "7"], "there is no shard 7"),
        (&["device", "attach", "d", "none"], "volume none does not exist"),
        (&["device", "attach", "none", "a"], "device none does not exist"),
        (&["device", "attach", "d", "a", "--nsid", "9"], "has volume a already, as namespace 1"),
        (&["device", "detach", "d", "2"], "device d has no namespace 2"),
        (&["device", "detach", "d", "other"], "device d does not show volume other; it shows "),
    ] {
        let told = place.fails(1, arguments);
        assert!(told.starts_with("millrace: ") && told.contains(complaint), "{arguments:?}: {told}");
    }
    assert!(place.fails(2, &["device", "detach", "d"]).contains("give its identifier, or its volume: 1:a"));
    let told = place.fails(2, &["volume", "insert", "a", "throttle(iops=0)"]);
    assert!(told.starts_with("millrace: volume a: stack, column "), "{told}");
    assert_eq!((place.json(&["volume", "list"]), place.json(&["device", "list"])), before);
    assert!(!place.path("none.img").exists() && !place.path("run/e.sock").exists() && !place.path("slow.img").exists());
}

#[test]
fn caps_are_lifted_by_who_says_so() {
    let place = Place::with_daemon();
    assert!(place.ok(&["group", "create", "w", "--weight", "2"]).contains("share(group=w)"));
    assert!(place.ok(&["group", "create", "g", "--iops", "5K", "--weight", "2"]).contains("throttle(group=g)"));
    let told = place.fails(2, &["group", "change", "g"]);
    assert!(told.contains("group g: what is to change?") && told.contains("--no-caps"), "{told}");
    assert_eq!(place.json(&["group", "show", "g"])["caps"]["iops"], 5000);
    place.ok(&["group", "change", "g", "--weight", "3"]);
    assert_eq!(place.json(&["group", "show", "g"])["caps"]["iops"], 5000);
    assert!(place.fails(2, &["group", "change", "g", "--no-caps", "--iops", "1K"]).contains("cannot be used with"));
    assert_eq!(place.ok(&["group", "change", "g", "--no-caps"]), "group g: -; weight 3\n");
}

#[test]
fn wrong_usage_has_its_own_exit_code() {
    let place = Place::new();
    fs::File::create(place.path("image")).unwrap().set_len(2 << 20).unwrap();
    for (arguments, complaint) in [
        (&["volume", "create", "a b", "--size", "1M", "--backend", "null"][..], "cannot be a name"),
        (&["volume", "create", "a", "--size", "1Q", "--backend", "null"], "is not a size"),
        (&["volume", "create", "a", "--size", "1GB", "--backend", "null"], "powers of 1000"),
        (&["volume", "create", "a", "--size", "1M", "--backend", "floppy"], "\"floppy\" is unknown"),
        (&["volume", "create", "a", "--size", "1M", "--backend", "null", "--block-size", "520"], "512 or 4096"),
        (&["volume", "create", "a", "--size", "1M"], "--backend"),
        (&["volume", "create", "a", "--stack", "none.toml"], "there is no such file; as a back end it is file:none.toml"),
        (
            &["volume", "create", "a", "--stack", "/none/a.img"],
            "there is no such file; as a back end it is file:/none/a.img",
        ),
        (&["volume", "create", "a", "--stack", "image"], "image is too long for a stack; as a back end it is file:image"),
        (&["volume", "create", "a", "--stack", "Memory"], "or a back end: memory, null, file:PATH"),
        (&["volume", "create", "a", "--stack", "throttle(IOPS=3) | memory"], "settings are in small letters: iops=3"),
        (&["volume", "resize", "a"], "required"),
        (&["volume", "resize", "a", "1G", "--size", "2G"], "cannot be used"),
        (&["device", "create", "d"], "--nvme"),
        (&["device", "create", "d", "--nvme", "--doorbells", "brass"], "shared, messages"),
        (&["serve", "--polling", "lazy"], "adaptive, interrupt, spin"),
        (&["frobnicate"], "unrecognized subcommand"),
        // What the parser of arguments cannot know.
        (&["app", "create", "12345"], "which volumes? --volume NAME"),
        (&["group", "change", "g"], "what is to change?"),
        (&["usage", "--from", "x"], "\"x\" is no time"),
        (&["usage", "--from", "2026-02-01", "--to", "2026-01-01"], "exchange the two"),
        (&["device", "create", "d", "--virtio-blk", "--mdts", "8K"], "the other options are an NVMe controller's"),
        (&["volume", "command", "v", "mirror", "resync", "word"], "write name=value"),
        (&["volume", "command", "v", "mirror", "fail", "leg=1", "leg=0"], "leg: it is said twice"),
        (&["bench"], "--device <ADDRESS"),
        (&["bench", "--socket", "a.sock", "--device", "0000:01:00.0"], "cannot be used with"),
        (&["bench", "--socket", "a.sock", "--socket", "b.sock"], "2 sockets: only --lean drives more than one"),
    ] {
        let told = place.fails(2, arguments);
        assert!(told.contains(complaint), "{arguments:?}: {told}");
    }
}

#[test]
fn without_a_daemon_the_advice_names_the_path() {
    let place = Place::new();
    let told = place.fails(1, &["status"]);
    assert!(told.contains(place.path("run/api.sock").to_str().unwrap()) && told.contains("millrace serve"), "{told}");
    let told = place.fails(1, &["volume", "list", "--run-dir", "/nowhere"]);
    assert!(told.contains("/nowhere/api.sock"), "{told}");
}

#[test]
fn everything_survives_a_restart_and_a_crash() {
    let mut place = Place::with_daemon();
    place.ok(&["volume", "create", "f", "--size", "1M", "--backend", "file:f.img"]);
    place.ok(&["device", "create", "d", "--nvme"]);
    place.ok(&["device", "attach", "d", "f", "--nsid", "3"]);
    let picture = |place: &Place| {
        let mut devices = place.json(&["device", "list"]);
        // Its process is another one each time.
        devices[0]["worker"].take();
        (place.json(&["volume", "list"]), devices)
    };
    let before = picture(&place);
    place.stop_well();
    assert!(!place.path("run/api.sock").exists() && !place.path("run/d.sock").exists());
    place.start(&[]);
    assert_eq!(picture(&place), before);
    place.stop(Signal::KILL);
    assert!(place.path("run/api.sock").exists(), "a crash leaves its sockets");
    place.start(&["--shards", "2", "--placement", "disk"]);
    assert_eq!(picture(&place), before);
    assert_eq!(place.json(&["status"])["shards"].as_array().unwrap().len(), 2);
    place.stop_well();
    fs::remove_file(place.path("f.img")).unwrap();
    place.start(&[]);
    let told = place.ok(&["status"]);
    assert!(told.contains("failed: volume f: cannot open ") && told.contains("to do: put right what it says"), "{told}");
    let told = place.ok(&["volume", "show", "f"]);
    assert!(told.contains("failed: cannot open ") && told.contains("\"millrace upgrade\""), "{told}");
    assert!(place.ok(&["volume", "list"]).contains("failed: "));
}

#[test]
fn interrupt_ends_it_as_well() {
    let mut place = Place::with_daemon();
    let output = place.stop(Signal::INT);
    assert!(output.status.success(), "{}", text(&output.stderr));
}

#[test]
fn two_daemons_do_not_share() {
    let place = Place::with_daemon();
    let told = place.fails(1, &["serve", "--state-dir", "other"]);
    assert!(told.contains("another daemon uses this run directory"), "{told}");
    let told = place.fails(1, &["serve", "--state-dir", "state", "--run-dir", "elsewhere"]);
    assert!(told.contains("another daemon has this state open"), "{told}");
    place.ok(&["status"]);
}

#[test]
fn the_api_is_its_owners_only() {
    let place = Place::with_daemon();
    let mode = |name: &str| fs::metadata(place.path(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("run/api.sock"), mode("run"), mode("state")), (0o600, 0o700, 0o700));
}

#[test]
fn a_configuration_file_is_applied_or_refused() {
    let mut place = Place::new();
    let good = "shards = \"2\"\n[[volume]]\nname = \"a\"\nsize = \"1M\"\nbackend = \"file:a.img\"\n\
                [[device]]\nname = \"d\"\nnvme = {}\nattach = [{ volume = \"a\" }]\n";
    fs::write(place.path("m.toml"), good).unwrap();
    place.start(&["--config", "m.toml"]);
    assert_eq!(place.json(&["device", "show", "d"])["namespaces"][0]["volume"], "a");
    assert_eq!(place.json(&["status"])["shards"].as_array().unwrap().len(), 2);
    place.stop_well();
    for (from, to, complaint) in [
        ("1M", "1Q", "m.toml:4:8: \"1Q\" is not a size"),
        ("size", "siez", "m.toml:4:1: unknown field `siez`"),
        ("1M", "2M", "m.toml:2: volume a exists already, and differs: size is 2M in the file and 1M in the state"),
        ("shards = \"2\"", "shards = \"x\"", "m.toml:1:10: shards: \"x\" is neither a core number"),
    ] {
        fs::write(place.path("m.toml"), good.replace(from, to)).unwrap();
        // Objects that differ may be the state's fault; text that says nothing is the file's.
        let code = if complaint.contains("differs") { 1 } else { 2 };
        let told = place.fails(code, &["serve", "--state-dir", "state", "--config", "m.toml"]);
        assert!(told.contains(complaint), "{told}");
    }
    assert!(place.fails(1, &["serve", "--state-dir", "state", "--config", "none.toml"]).contains("none.toml: No such file"));
    place.start(&[]);
    assert_eq!(place.json(&["volume", "show", "a"])["size"], 1 << 20);
}

#[test]
fn settings_that_make_no_sense_are_named() {
    let place = Place::new();
    assert!(place.fails(2, &["serve", "--state-dir", "s", "--shards", "x"]).contains("--shards: \"x\" is neither"));
    assert!(place.fails(2, &["serve", "--state-dir", "s", "--log", "a=b=c"]).contains("--log"));
    assert!(place.fails(2, &["serve", "--state-dir", "s", "--log", "wran"]).contains("\"wran\" is no level"));
    fs::write(place.path("file"), "").unwrap();
    assert!(place.fails(1, &["serve", "--state-dir", "file/state"]).contains("file/state"));
    fs::write(place.path("m.toml"), "[sandbox]\nmemory = \"1M\"\n").unwrap();
    for arguments in [
        &["serve", "--state-dir", "s", "--memory-limit", "255M"][..],
        &["serve", "--state-dir", "s", "--config", "m.toml"],
        &["nvme", "--socket", "d.sock", "--volume", "memory", "--size", "1M", "--memory-limit", "1M"],
    ] {
        let told = place.fails(2, arguments);
        assert!(
            told.contains("--memory-limit") && told.contains("are too little; 256M is the least"),
            "{arguments:?}: {told}"
        );
    }
    let told = place.fails(2, &["usage", "--from", "2026-02-01", "--to", "2026-01-01"]);
    assert!(told.contains("--from 2026-02-01 is later than --to 2026-01-01"), "{told}");
    let told = place.fails(1, &["man", "file"]);
    assert!(told.contains("file: ") && told.contains("give a directory"), "{told}");
}

/// What a run of random reads and writes that checks all data says of itself.
fn expect_verified(report: &Value) {
    let commands = |direction: &str| report[direction]["commands"].as_u64().unwrap_or(0);
    assert!(commands("read") > 0 && commands("write") > 0, "{report}");
    assert_eq!(commands("read") + commands("write"), commands("total"), "{report}");
    assert!(report["verify"]["checked_blocks"].as_u64().is_some_and(|blocks| blocks > 0), "{report}");
    let said = ["rw", "interrupted"].map(|key| report[key].clone());
    assert_eq!((said, &report["verify"]["final_pass"]), ([Value::from("randrw"), Value::from(false)], &Value::from(true)));
}

#[test]
fn one_disk_without_a_daemon() {
    let mut place = Place::new();
    let told = place.fails(1, &["nvme", "--socket", "d.sock", "--volume", "file:disk.img"]);
    assert!(told.contains("disk.img") && told.contains("--size"), "{told}");
    let line = place.spawn(&["nvme", "--socket", "d.sock", "--volume", "file:disk.img", "--size", "16M"]);
    assert!(line.contains("ready on") && line.contains(place.path("d.sock").to_str().unwrap()), "{line}");
    assert_eq!(fs::metadata(place.path("disk.img")).unwrap().len(), 16 << 20);
    let bench = ["bench", "--socket", "d.sock", "--rw", "randrw", "--time", "1", "--verify", "--json"];
    let report: Value = serde_json::from_str(&place.ok(&bench)).unwrap();
    expect_verified(&report);
    let told = place.fails(1, &["bench", "--socket", "d.sock", "--queues", "999", "--qd", "1", "--time", "1"]);
    assert!(told.contains("--queues 999: the controller gives 16"), "{told}");
    let output = place.stop(Signal::TERM);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!place.path("d.sock").exists());
    // The second time the file is there, and has its size.
    let line = place.spawn(&["nvme", "--socket", "d.sock", "--volume", "file:disk.img", "--json"]);
    let device: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(device["namespaces"][0]["nsid"], 1);
}

/// A controller that is told of new commands by messages offers shadow doorbells; without them our client sends a message for each.
#[test]
fn our_client_tells_of_commands_in_each_way() {
    let mut place = Place::new();
    place.start(&[]);
    place.ok(&["volume", "create", "a", "--size", "16M", "--backend", "memory"]);
    for doorbells in ["shared", "messages"] {
        place.ok(&["device", "create", doorbells, "--nvme", "--doorbells", doorbells]);
        place.ok(&["device", "attach", doorbells, "a"]);
        let socket = place.path(&format!("run/{doorbells}.sock"));
        let bench = [
            "bench",
            "--socket",
            socket.to_str().unwrap(),
            "--rw",
            "randrw",
            "--qd",
            "8",
            "--time",
            "1",
            "--verify",
            "--json",
        ];
        let mut ways = vec![&[][..], &["--doorbell-messages"]];
        if doorbells == "messages" {
            ways.push(&["--shadow-doorbells"]);
        } else {
            let refused = place.fails(1, &[&bench[..], &["--shadow-doorbells"]].concat());
            assert!(refused.contains("does not offer shadow doorbells"), "{refused}");
        }
        for way in ways {
            let report: Value = serde_json::from_str(&place.ok(&[&bench[..], way].concat())).unwrap();
            assert!(report["verify"]["checked_blocks"].as_u64().is_some_and(|blocks| blocks > 0), "{way:?}: {report}");
        }
        place.ok(&["device", "delete", doorbells]);
    }
}

/// A pipe that takes nothing more: whoever writes to it waits.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = io::pipe().unwrap();
    let flags = rustix::fs::fcntl_getfl(&writer).unwrap();
    rustix::fs::fcntl_setfl(&writer, flags | OFlags::NONBLOCK).unwrap();
    while writer.write(&[b'\n'; 4096]).is_ok() {}
    while writer.write(b"\n").is_ok() {}
    rustix::fs::fcntl_setfl(&writer, flags).unwrap();
    (reader, writer)
}

#[test]
fn a_log_that_nobody_reads_stops_nothing() {
    let mut place = Place::new();
    let (mut reader, writer) = full_pipe();
    let mut command = place.command(&["serve", "--state-dir", "state", "--log", "trace"]);
    let mut child = command.stdout(Stdio::piped()).stderr(writer.try_clone().unwrap()).spawn().unwrap();
    drop((command, writer));
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("ready on"), "{line}");
    place.daemon = Some(child);
    place.ok(&["volume", "create", "a", "--size", "1M", "--backend", "memory"]);
    place.ok(&["device", "create", "d", "--nvme"]);
    place.ok(&["device", "attach", "d", "a"]);
    let socket = place.path("run/d.sock");
    let bench = ["bench", "--socket", socket.to_str().unwrap(), "--rw", "randrw", "--time", "1", "--verify", "--json"];
    let report: Value = serde_json::from_str(&place.ok(&bench)).unwrap();
    expect_verified(&report);
    // Its end waits for the log, but not for ever.
    let output = place.stop(Signal::TERM);
    assert!(output.status.success(), "{}", output.status);
    let mut log = String::new();
    reader.read_to_string(&mut log).unwrap();
    assert!(log.trim().is_empty(), "the pipe was full: {log}");
}

#[test]
fn the_log_is_written_before_the_daemon_ends() {
    let mut place = Place::with_daemon();
    place.ok(&["volume", "create", "a", "--size", "1M", "--backend", "memory"]);
    let log = text(&place.stop(Signal::TERM).stderr);
    assert!(log.contains("volume"), "{log}");
}

#[test]
fn a_log_in_json_is_one_object_a_line() {
    let mut place = Place::new();
    place.start(&["--log-format", "json", "--log", "info"]);
    place.ok(&["volume", "create", "vol-7", "--size", "1M", "--backend", "memory"]);
    place.ok(&["device", "create", "dev-7", "--nvme"]);
    place.fails(1, &["volume", "delete", "none"]);
    let log = text(&place.stop(Signal::TERM).stderr);
    let parse = |line: &str| -> Value { serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")) };
    let lines: Vec<Value> = log.lines().map(parse).collect();
    for line in &lines {
        let said = ["timestamp", "level", "target"].map(|key| line[key].is_string());
        assert!(said == [true; 3] && line["fields"]["message"].is_string(), "{line}");
    }
    for (kind, name) in [("volume", "vol-7"), ("device", "dev-7")] {
        assert!(lines.iter().any(|line| line["fields"][kind] == name), "no line about {kind} {name}: {log}");
    }
}

#[test]
fn volumes_that_the_file_names_for_users_and_are_not_there_are_told() {
    let mut place = Place::new();
    let volume = "[[volume]]\nname = \"there\"\nsize = \"1M\"\nbackend = \"memory\"\n";
    fs::write(place.path("m.toml"), format!("{volume}[[app]]\nuid = 4711\nvolumes = [\"there\", \"nope\"]\n")).unwrap();
    place.start(&["--config", "m.toml"]);
    let log = text(&place.stop(Signal::TERM).stderr);
    let told: Vec<_> = log.lines().filter(|line| line.contains("names a volume that does not exist")).collect();
    assert!(matches!(told[..], [line] if line.contains("nope") && line.contains("4711")), "{log}");
}

#[test]
fn a_guest_knows_a_disk_again() {
    let mut place = Place::new();
    let mut identities = Vec::new();
    for _ in 0..2 {
        let arguments = ["nvme", "--socket", "d.sock", "--volume", "file:disk.img", "--size", "1M", "--json"];
        let device: Value = serde_json::from_str(&place.spawn(&arguments)).unwrap();
        identities.push((device["serial"].clone(), device["subnqn"].clone()));
        place.stop_well();
    }
    assert_eq!(identities[0], identities[1]);
}

#[test]
fn readiness_is_told_to_systemd() {
    let mut place = Place::new();
    let socket = std::os::unix::net::UnixDatagram::bind(place.path("notify")).unwrap();
    let mut command = place.command(&["serve", "--state-dir", "state"]);
    let child = command.env("NOTIFY_SOCKET", place.path("notify")).stdout(Stdio::piped()).stderr(Stdio::piped());
    place.daemon = Some(child.spawn().unwrap());
    let mut message = [0; 64];
    let length = socket.recv(&mut message).unwrap();
    assert_eq!(&message[..length], b"READY=1");
}

#[test]
fn open_files_are_not_limited_more_than_need_be() {
    let mut place = Place::new();
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -S -n 256; exec \"$0\" serve --state-dir state --run-dir run", MILLRACE]);
    command.current_dir(place.directory.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut String::new()).unwrap();
    let limits = fs::read_to_string(format!("/proc/{}/limits", child.id())).unwrap();
    place.daemon = Some(child);
    let limit: Vec<_> = limits.lines().find(|line| line.starts_with("Max open files")).unwrap().split_whitespace().collect();
    assert_eq!(limit[3], limit[4], "soft and hard limit");
    assert_ne!(limit[3], "256");
}

#[test]
fn metrics_are_text() {
    let place = Place::with_daemon();
    let metrics = place.ok(&["metrics"]);
    assert!(metrics.contains("# TYPE millrace_shard_busy_seconds counter") && metrics.ends_with("# EOF\n"));
}

#[test]
fn completions_and_manual_pages() {
    let place = Place::new();
    for shell in ["bash", "zsh", "fish"] {
        assert!(place.ok(&["completions", shell]).contains("millrace"), "{shell}");
    }
    place.ok(&["man", "pages"]);
    for page in ["millrace.1", "millrace-serve.1", "millrace-volume-create.1", "millrace-nvme.1", "millrace-bench.1"] {
        assert!(fs::read_to_string(place.path("pages").join(page)).unwrap().contains(".TH"), "{page}");
    }
    assert!(place.ok(&["--version"]).starts_with("millrace "));
    assert!(place.ok(&["--help"]).contains("serve"));
    let page = fs::read_to_string(place.path("pages/millrace.1")).unwrap();
    assert!(page.contains("/etc/millrace.toml") && page.contains("Exit status"), "{page}");
}

#[test]
fn a_volume_is_copied_to_another() {
    let mut place = Place::with_daemon();
    let data: Vec<u8> = (0..1_u32 << 20).map(|at| (at / 512 % 251) as u8).collect();
    fs::write(place.path("a.img"), &data).unwrap();
    for name in ["a", "b"] {
        place.ok(&["volume", "create", name, "--size", "1M", "--backend", &format!("file:{name}.img")]);
    }
    assert_eq!(place.ok(&["copy", "a", "b", "--wait"]), "copy copy1: a to b, 100 % of 1M, done\n");
    assert!(fs::read(place.path("b.img")).unwrap() == data);
    fs::write(place.path("b.img"), vec![0; 1 << 20]).unwrap();

    assert!(place.ok(&["copy", "a", "b", "--name", "job", "--rate", "4K"]).starts_with("copy job: a to b, "));
    assert!(place.fails(1, &["volume", "delete", "b"]).contains("volume b is being copied, by job"));
    assert!(place.ok(&["copy", "pause", "job"]).ends_with(", paused\n"));
    place.stop_well();
    place.start(&[]);
    assert_eq!(place.json(&["copy", "show", "job"])["state"], "paused");
    assert!(place.ok(&["copy", "list"]).contains("4K/s"));
    place.ok(&["copy", "resume", "job", "--rate", "0"]);
    while place.json(&["copy", "show", "job"])["state"] == "running" {}
    assert!(place.ok(&["copy", "show", "job"]).contains("state:         done"));
    assert!(fs::read(place.path("b.img")).unwrap() == data);
    assert!(place.ok(&["copy", "cancel", "job"]).contains("copy job is forgotten"));
    assert_eq!(place.names("copy"), ["copy1"]);

    assert!(place.fails(1, &["copy", "a", "a"]).contains("choose another target"));
    assert!(place.fails(1, &["copy", "show", "job"]).contains("millrace copy list"));
    assert!(place.fails(2, &["copy", "a"]).contains("<TARGET>"));
    assert!(place.fails(2, &["copy", "a", "b", "--rate", "fast"]).contains("is not a size"));
}

/// What a meter has counted is on the account two lines later, stays there when the daemon is killed, and is there once.
#[test]
fn what_was_counted_before_a_crash_is_on_the_account_once() {
    let mut place = Place::with_daemon();
    place.ok(&["volume", "create", "v", "--size", "1M", "--stack", "meter(tenant=acme) | memory"]);
    place.ok(&["device", "create", "d", "--nvme"]);
    place.ok(&["device", "attach", "d", "v"]);
    let account = |place: &Place| place.json(&["usage", "--by", "tenant"])[0]["reads"].as_u64().unwrap_or(0);
    let counted = |place: &Place| -> u64 {
        let volume = place.json(&["volume", "show", "v"]);
        let fact = volume["tree"]["status"]["facts"][0][1].as_str().unwrap().to_owned();
        fact.split(' ').next().unwrap().parse().unwrap()
    };
    let bench = |place: &Place, seconds: &str| place.command(&["bench", "--socket", "run/d.sock", "--time", seconds]);
    let reaches = |place: &Place, number: &dyn Fn(&Place) -> u64, least: u64| {
        let patience = Instant::now() + Duration::from_secs(60);
        while number(place) < least {
            assert!(Instant::now() < patience, "{} for a minute, and not {least}", number(place));
            thread::sleep(Duration::from_millis(50));
        }
    };
    assert!(bench(&place, "0.1").output().unwrap().status.success());
    let first = counted(&place);
    assert!(first > 0);
    reaches(&place, &account, first);
    assert_eq!(account(&place), first);

    let mut busy = bench(&place, "600").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    reaches(&place, &counted, first + 1);
    let before = counted(&place);
    // The first line may be of a reading before this one, the second is not.
    for _ in 0..2 {
        reaches(&place, &account, account(&place) + 1);
    }
    place.stop(Signal::KILL);
    busy.kill().unwrap();
    busy.wait().unwrap();
    place.start(&[]);
    let kept = account(&place);
    assert!(kept >= before, "{kept}, and the meter had counted {before} two lines before");
    assert!(bench(&place, "0.1").output().unwrap().status.success());
    let last = counted(&place);
    reaches(&place, &account, kept + last);
    assert_eq!(account(&place), kept + last);
}

/// From what a program has read to what its tenant pays for it.
#[test]
fn a_bill_is_what_was_done_times_its_price() {
    let place = Place::with_daemon();
    place.ok(&["volume", "create", "v", "--size", "1M", "--stack", "meter(tenant=acme) | memory"]);
    place.ok(&["device", "create", "d", "--nvme"]);
    place.ok(&["device", "attach", "d", "v"]);
    let socket = place.path("run/d.sock");
    let bench = ["bench", "--socket", socket.to_str().unwrap(), "--time", "0.1", "--json"];
    let report: Value = serde_json::from_str(&place.ok(&bench)).unwrap();
    let volume = place.json(&["volume", "show", "v"]);
    let fact = volume["tree"]["status"]["facts"][0][1].as_str().unwrap();
    let done: u64 = fact.split(' ').next().unwrap().parse().unwrap();
    assert!(report["read"]["commands"].as_u64().is_some_and(|commands| commands > 0 && commands <= done), "{report}");
    // A unit is its price: a million of them cost a million.
    fs::write(place.path("prices.toml"), "currency = \"EUR\"\nmillion_reads = 1e6\n").unwrap();
    let bill = ["usage", "--from", "2000-01-01", "--by", "tenant", "--prices", "prices.toml"];
    let billed = |place: &Place| place.json(&bill)[0]["usage"]["reads"].as_u64().unwrap_or(0);
    let patience = Instant::now() + Duration::from_secs(60);
    while billed(&place) < done {
        assert!(Instant::now() < patience, "{} for a minute, and not {done}", billed(&place));
        thread::sleep(Duration::from_millis(50));
    }
    let rows = place.json(&bill);
    let price = f64::from(u32::try_from(done).unwrap());
    let is_bill = |amount: f64| (amount - price).abs() < 0.01;
    assert_eq!((&rows[0]["usage"]["name"], &rows[0]["currency"]), (&"acme".into(), &"EUR".into()));
    assert!(rows[0]["bill"].as_f64().is_some_and(is_bill), "{rows}");
    assert_eq!((&rows[0]["usage"]["reads"], &rows[0]["usage"]["read_bytes"]), (&done.into(), &(done * 4096).into()));

    let csv = place.ok(&[&bill[..], &["--csv"]].concat());
    let lines: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    let [head, row] = &lines[..] else { panic!("{csv}") };
    assert_eq!((head.len(), head[0], head[2], head.last()), (row.len(), "tenant", "reads", Some(&"bill")), "{csv}");
    assert_eq!((row[0], row[2]), ("acme", done.to_string().as_str()), "{csv}");
    assert!(row.last().unwrap().parse::<f64>().is_ok_and(is_bill), "{csv}");
    assert!(place.ok(&bill).contains("BILL EUR"));

    // Up to a time that is still to come it is no bill to put others after.
    let early = place.run(&[&bill[..], &["--to", "9999-12-31T23:59:59Z", "--csv"]].concat());
    let told = text(&early.stderr);
    assert!(early.status.success() && told.contains("--to 9999-12-31T23:59:59Z is still to come"), "{told}");
    assert!(text(&early.stdout).starts_with("tenant,") && text(&early.stdout).contains("\nacme,"), "{early:?}");

    // By volume, and of a time when there was nothing.
    assert_eq!(place.json(&["usage", "--by", "volume"])[0]["name"], "v");
    let before = place.json(&["usage", "--from", "2000-01-01", "--to", "2000-01-02", "--by", "tenant"]);
    assert!(before.as_array().unwrap().iter().all(|row| row["reads"] == 0), "{before}");
    assert!(place.fails(2, &["usage", "--csv", "--json"]).contains("cannot be used with"));
}
