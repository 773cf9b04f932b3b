use super::*;

const GOOD: &str = r#"
shards = "2"
polling = "spin"
placement = "disk"

[[volume]]
name = "root"
size = "1G"
backend = "file:images/root.img"
block_size = 4096

[[volume]]
name = "scratch"
size = 1048576
backend = "memory"

[[device]]
name = "vm0"
socket = "vm0/cntrl"
nvme = { queues = 4, serial = "VM0" }
attach = [{ volume = "root" }, { volume = "scratch", nsid = 7, read_only = true }]

[[device]]
name = "vm1"
[device.nvme]
doorbells = "messages"
"#;

fn parse(text: &str) -> Result<Declared, ConfigError> {
    Declared::parse(text, Path::new("m.toml"), Path::new("/etc/millrace"))
}

fn error(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

fn stored(text: &str) -> (Vec<VolumeRecord>, Vec<DeviceRecord>) {
    let declared = parse(text).unwrap();
    let record = |spec: &VolumeSpec| VolumeRecord::new(spec.clone(), uuid::Uuid::from_u128(1));
    let volumes = declared.volumes.iter().map(|volume| record(&volume.value));
    let devices = declared.devices.iter().map(|device| DeviceRecord {
        spec: device.value.spec(),
        cntlid: 1,
        uuid: uuid::Uuid::from_u128(2),
        namespaces: (1..)
            .zip(&device.value.attach)
            .map(|(nsid, attach)| crate::store::NamespaceRecord {
                nsid: attach.nsid.unwrap_or(nsid),
                volume: attach.volume.clone(),
                read_only: attach.read_only,
                attached: true,
            })
            .collect(),
        session: None,
        disk_kind: None,
    });
    (volumes.collect(), devices.collect())
}

#[test]
fn a_whole_file() {
    let declared = parse(GOOD).unwrap();
    assert_eq!(declared.shards.as_deref(), Some("2"));
    assert_eq!((declared.polling, declared.placement), (Some(PollingMode::Spin), Some(PlacementMode::Disk)));
    let lines: Vec<_> = declared.volumes.iter().map(|volume| (volume.line, volume.value.name.to_string())).collect();
    assert_eq!(lines, [(6, "root".to_owned()), (12, "scratch".to_owned())]);
    assert_eq!(declared.volumes[0].value.stack.to_string(), "file:/etc/millrace/images/root.img");
    let device = &declared.devices[0].value;
    assert_eq!(device.socket.as_deref(), Some(Path::new("/etc/millrace/vm0/cntrl")));
    assert_eq!((device.kind.nvme().unwrap().queues, device.attach[1].nsid, device.attach[1].read_only), (4, Some(7), true));
    assert_eq!(declared.devices[1].line, 23);
}

#[test]
fn the_example_is_right() {
    let declared = parse(include_str!("../../../../docs/millrace.example.toml")).unwrap();
    declared.compare(&[], &[], &[]).unwrap();
    assert!(!declared.volumes.is_empty() && !declared.devices.is_empty());
    for device in &declared.devices {
        device.value.spec().validate(1).unwrap();
    }
}

#[test]
fn what_is_installed_declares_settings_only() {
    let installed = include_str!("../../../../packaging/millrace.toml");
    let declared = parse(installed).unwrap();
    assert!(declared.volumes.is_empty() && declared.devices.is_empty() && declared.groups.is_empty());
    assert_eq!(declared.sandbox.allow, [Path::new("/var/lib/millrace")]);
    // What is a comment there can be taken out of it.
    let uncommented = |line: &'static str| match line.strip_prefix("# ") {
        Some(setting) if setting.contains(" = ") || setting.starts_with('[') => setting,
        _ => line,
    };
    let whole: Vec<_> = installed.lines().map(uncommented).collect();
    let whole = parse(&whole.join("\n")).unwrap();
    assert!(whole.shards.is_some() && whole.isolation.is_some() && whole.operators.len() == 1);
    assert!(whole.socket_group.is_some());
}

#[test]
fn an_empty_file_declares_nothing() {
    let declared = parse("").unwrap();
    assert!(declared.volumes.is_empty() && declared.devices.is_empty() && declared.shards.is_none());
}

#[test]
fn mistakes_are_found_at_their_line_and_column() {
    for (text, expected) in [
        ("shards = \"2\"\nvolumes = 1\n", "m.toml:2:1: unknown field `volumes`"),
        ("[[volume]]\nname = \"a\"\nsiez = \"1G\"\nbackend = \"memory\"\n", "m.toml:3:1: unknown field `siez`"),
        ("[[volume]]\nname = \"a\"\nsize = \"1Q\"\nbackend = \"memory\"\n", "m.toml:3:8: \"1Q\" is not a size"),
        ("[[volume]]\nname = \"a\"\nsize = -1\nbackend = \"memory\"\n", "m.toml:3:8: a size cannot be negative"),
        ("[[volume]]\nname = \"a b\"\nbackend = \"memory\"\n", "m.toml:2:8: \"a b\" cannot be a name"),
        ("[[volume]]\nname = \"a\"\nbackend = \"disk\"\n", "m.toml:3:11: back end \"disk\" is unknown"),
        ("[[volume]]\nname = \"a\"\nsize = 1\n", "m.toml:1:1: missing field `stack` (or `backend`)"),
        ("[[device]]\nname = \"a\"\nnvme = { queeus = 1 }\n", "m.toml:3:10: unknown field `queeus`"),
        (
            "[[device]]\nname = \"a\"\nnvme = {}\nattach = [{ volume = \"x\", nsdi = 1 }]\n",
            "m.toml:4:27: unknown field `nsdi`",
        ),
        ("[[device]]\nname = \"a\"\n", "m.toml:1:1: a device is either nvme or virtio_blk"),
        ("[[device]]\nname = \"a\"\nnvme = {}\nvirtio_blk = {}\n", "m.toml:1:1: a device is either nvme or virtio_blk"),
        ("[[device]]\nname = \"a\"\nvirtio_blk = { vectors = 1 }\n", "m.toml:3:16: unknown field `vectors`"),
        ("shards = \"3-1\"\n", "m.toml:1:10: shards: \"3-1\" is neither"),
        ("polling = \"lazy\"\n", "m.toml:1:11: unknown variant `lazy`"),
        ("\n\nname\n", "m.toml:3:5: "),
        ("[[volume]]\nname = \"a\"\nname = \"b\"\n", "m.toml:3:1: duplicate key"),
    ] {
        let error = error(text);
        assert!(error.starts_with(expected), "{error}\ninstead of\n{expected}");
    }
}

#[test]
fn names_are_given_once() {
    let volume = "[[volume]]\nname = \"a\"\nsize = 4096\nbackend = \"memory\"\n";
    assert_eq!(error(&volume.repeat(2)), "m.toml:5: volume a is declared already, on line 1");
    let group = |weight: u32| format!("[[group]]\nname = \"a\"\nweight = {weight}\n");
    assert_eq!(error(&(group(2) + &group(3))), "m.toml:4: group a is declared already, on line 1");
    let device = "[[device]]\nname = \"a\"\nnvme = {}\n";
    assert_eq!(error(&format!("{volume}{}", device.repeat(2))), "m.toml:8: device a is declared already, on line 5");
}

#[test]
fn a_device_shows_a_volume_once() {
    let volume = "[[volume]]\nname = \"ab\"\nsize = 4096\nbackend = \"memory\"\n";
    let device =
        "[[device]]\nname = \"d\"\nnvme = {}\nattach = [{ volume = \"ab\", nsid = 1 }, { volume = \"ab\", nsid = 2 }]\n";
    let told = error(&format!("{volume}{device}"));
    assert!(told.starts_with("m.toml:5: device d: volume ab is attached twice"), "{told}");
}

#[test]
fn groups_are_not_within_each_other() {
    let group = |name: &str, within: &str| format!("[[group]]\nname = \"{name}\"\nwithin = \"{within}\"\n");
    let told = error(&(group("g", "h") + &group("h", "g")));
    assert!(told.starts_with("m.toml:1: group g: groups are within each other: g, h; "), "{told}");
    let told = error(&(group("x", "g") + &group("g", "g")));
    assert!(told.starts_with("m.toml:4: group g: groups are within each other: g; "), "{told}");
    // What the file does not declare may be stored.
    parse(&(group("a", "b") + &group("b", "stored"))).unwrap();
}

#[test]
fn a_file_has_one_writer() {
    let volume = |name: &str, rest: &str| format!("[[volume]]\nname = \"{name}\"\nbackend = \"file:x.img\"\n{rest}\n");
    let both = volume("a", "") + &volume("b", "read_only = true");
    assert_eq!(error(&both), "m.toml:5: volume b: /etc/millrace/x.img is the file of volume a");
    parse(&(volume("a", "read_only = true") + &volume("b", "read_only = true"))).unwrap();
}

#[test]
fn what_a_back_end_lacks_is_said_with_its_line() {
    assert_eq!(
        error("\n[[volume]]\nname = \"a\"\nbackend = \"memory\"\n"),
        "m.toml:2: volume a: this back end needs a size: --size, or size in the configuration file"
    );
}

#[test]
fn what_cannot_be_read_is_named() {
    let error = Declared::read(Path::new("/nowhere/m.toml")).unwrap_err();
    assert!(matches!(&error, ConfigError::Read { .. }) && error.to_string().starts_with("/nowhere/m.toml: "), "{error}");
}

#[test]
fn what_is_there_must_be_what_is_declared() {
    let (volumes, devices) = stored(GOOD);
    parse(GOOD).unwrap().compare(&[], &volumes, &devices).unwrap();
    for (from, to, expected) in [
        (
            "size = \"1G\"",
            "size = \"2G\"",
            "m.toml:6: volume root exists already, and differs: size is 2G in the file and 1G",
        ),
        ("block_size = 4096", "block_size = 512", "m.toml:6: volume root exists already, and differs: block_size is 512"),
        ("images/root", "images/other", "m.toml:6: volume root exists already, and differs: stack is file:/etc/"),
        ("queues = 4", "queues = 5", "m.toml:17: device vm0 exists already, and differs: it is nvme {\"queues\":5"),
        ("vm0/cntrl", "vm1/cntrl", "m.toml:17: device vm0 exists already, and differs: socket is "),
        ("nsid = 7", "nsid = 8", "m.toml:17: device vm0 exists already, and differs: volume scratch is namespace 8"),
        ("read_only = true", "read_only = false", "m.toml:17: device vm0 exists already, and differs: read_only of"),
    ] {
        let changed = GOOD.replace(from, to);
        assert_ne!(changed, GOOD);
        let error = parse(&changed).unwrap().compare(&[], &volumes, &devices).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}\ninstead of\n{expected}");
    }
}

#[test]
fn what_guests_and_the_api_do_is_no_difference() {
    let (mut volumes, mut devices) = stored(GOOD);
    volumes[0].formatted = Some(crate::LogicalBlock(millrace_block::BlockSize::B512));
    devices[0].namespaces[0].attached = false;
    devices[0].namespaces[0].nsid = 3;
    let mut more = volumes[0].clone();
    more.spec.name = "by-api".parse().unwrap();
    volumes.push(more);
    parse(GOOD).unwrap().compare(&[], &volumes, &devices).unwrap();
    devices[0].namespaces.clear();
    parse(GOOD).unwrap().compare(&[], &volumes, &devices).unwrap();
}

#[test]
fn a_device_shows_what_exists() {
    let text = "[[device]]\nname = \"a\"\nnvme = {}\nattach = [{ volume = \"gone\" }]\n";
    let error = parse(text).unwrap().compare(&[], &[], &[]).unwrap_err().to_string();
    assert_eq!(error, "m.toml:1: device a: volume gone is neither declared here nor known to the daemon");
    let known = stored("[[volume]]\nname = \"gone\"\nsize = 512\nbackend = \"memory\"\n").0;
    parse(text).unwrap().compare(&[], &known, &[]).unwrap();
}

#[test]
fn a_format_of_a_guest_is_no_difference() {
    let text = "[[volume]]\nname = \"v\"\nsize = 66048\nbackend = \"memory\"\n";
    let (mut volumes, devices) = stored(text);
    let compare =
        |volumes: &[VolumeRecord]| parse(text).unwrap().compare(&[], volumes, &devices).map_err(|error| error.to_string());
    volumes[0].formatted = Some(crate::LogicalBlock(millrace_block::BlockSize::B4096));
    volumes[0].spec.size = Some(Size(65536));
    assert_eq!(compare(&volumes), Ok(()));
    // Formatted back, it keeps the size.
    volumes[0].formatted = None;
    assert_eq!(compare(&volumes), Ok(()));
    volumes[0].spec.size = Some(Size(65024));
    assert!(compare(&volumes).unwrap_err().contains("size is 66048 in the file and 65024 in the state"));
}

#[test]
fn settings_are_handed_on_as_they_are() {
    let text = "shards = \"0,2\"\npolling = \"spin\"\nplacement = \"disk\"\nisolation = \"tenant\"\nworker_shards = \"2\"\n\
                socket_group = \"kvm\"\n[[app]]\nuid = 7\nvolumes = [\"*\"]\ncaps.iops = 5\n[[operator]]\nuid = 8\n[[operator]]\ngid = 9\n\
                [sandbox]\nallow = [\"/srv\"]\nmemory = \"1G\"\n";
    let settings = parse(text).unwrap().settings();
    let handed: FileSettings = serde_json::from_str(&serde_json::to_string(&settings).unwrap()).unwrap();
    assert_eq!(handed, settings);
    assert!(settings.differences(&handed).is_empty());
    let empty = parse("").unwrap().settings();
    assert_eq!(settings.socket_group(), Some("kvm"));
    let all = ["shards", "polling", "placement", "isolation", "worker_shards", "socket_group", "app", "operator", "sandbox"];
    assert_eq!(settings.differences(&empty), all);
    // What the settings of a daemon of an earlier version do not have is no difference.
    assert_eq!(empty.differences(&FileSettings::default()), [""; 0]);
    assert_eq!(settings.differences(&FileSettings::default()), all[..8]);
}

/// What workers give up they were told when the daemon began: a path that is allowed since then is not, and that is said.
#[test]
fn another_sandbox_in_the_file_is_a_difference() {
    let held = parse("[sandbox]\nallow = [\"/srv/a\"]\n").unwrap().settings();
    let handed: FileSettings = serde_json::from_str(&serde_json::to_string(&held).unwrap()).unwrap();
    for now in ["[sandbox]\nallow = [\"/srv/a\", \"/srv/b\"]\n", "[sandbox]\nallow = [\"/srv/a\"]\nfiles = 4096\n", ""] {
        assert_eq!(handed.differences(&parse(now).unwrap().settings()), ["sandbox"], "{now}");
    }
    assert_eq!(
        handed.differences(&parse("polling = \"spin\"\n[sandbox]\nallow = [\"/srv/a\"]\n").unwrap().settings()),
        ["polling"]
    );
}

#[test]
fn a_user_of_volumes_is_declared_once_and_sensibly() {
    let app = |keys: &str| format!("[[app]]\nuid = 7\n{keys}\n");
    let twice = format!("{}{}", app("volumes = [\"a\"]"), app("volumes = [\"*\"]\nread_only = true"));
    assert_eq!(error(&twice), "m.toml:4: user 7 is declared already, on line 1");
    for (keys, why) in [
        ("volumes = []", "m.toml:1: user 7: volumes: name one at least, or \"*\" for all; who shall have none is deleted"),
        ("volumes = [\"a\", \"*\"]", "\"*\" is all of them"),
        ("volumes = [\"a\", \"b\", \"a\"]", "a is named twice"),
        ("volumes = [\"a b\"]", "\"a b\" is no volume's name"),
        ("volumes = [\"a\"]\nsessions = 0", "sessions: 1 to 65535 are possible, not 0"),
        ("volumes = [\"a\"]\nsessions = 65536", "sessions: 1 to 65535 are possible, not 65536"),
        ("volumes = [\"a\"]\ncaps = { iops = 0 }", "m.toml:1: user 7: iops: 1 at least is possible"),
    ] {
        let error = error(&app(keys));
        assert!(error.contains(why), "{error}");
    }
}
