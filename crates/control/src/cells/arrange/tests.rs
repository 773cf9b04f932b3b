//! Records are spread, spread otherwise, and never lost: a start may be cut off between any two of its steps.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tempfile::TempDir;
use uuid::Uuid;

use super::*;
use crate::{
    model::{DeviceKind, DeviceSpec, NvmeSpec, VolumeSpec},
    store::NamespaceRecord,
};

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn volume(text: &str, stack: &str) -> VolumeRecord {
    let spec = format!(r#"{{ "name": "{text}", "size": "1M", "stack": "{stack}" }}"#);
    let spec: VolumeSpec = serde_json::from_str(&spec).unwrap();
    let uuid = Uuid::new_v5(&Uuid::NAMESPACE_OID, text.as_bytes());
    VolumeRecord::new(spec, uuid)
}

fn device(text: &str, tenant: Option<&str>, volumes: &[&str]) -> DeviceRecord {
    let kind = DeviceKind::Nvme(NvmeSpec::default());
    let spec = DeviceSpec { name: name(text), kind, socket: None, shard: None, tenant: tenant.map(name) };
    let namespace = |(at, volume): (usize, &&str)| NamespaceRecord {
        nsid: at as u32 + 1,
        volume: name(volume),
        read_only: false,
        attached: true,
    };
    let uuid = Uuid::new_v5(&Uuid::NAMESPACE_URL, text.as_bytes());
    let namespaces = volumes.iter().enumerate().map(namespace).collect();
    DeviceRecord { spec, cntlid: 1, uuid, namespaces, session: None, disk_kind: None }
}

fn put(path: &Path, volumes: &[VolumeRecord], devices: &[DeviceRecord]) {
    make_private(path).unwrap();
    let changes =
        Changes { put_volumes: volumes.iter().collect(), put_devices: devices.iter().collect(), ..Changes::default() };
    Store::open(path).unwrap().apply(&changes).unwrap();
}

/// What is where, by the worker's name.
fn found(state: &Path) -> BTreeMap<String, (Vec<String>, Vec<String>)> {
    let mut places = vec![(MAIN.to_owned(), state.to_owned())];
    places.extend(stored(state).unwrap().into_iter().map(|cell| (cell.to_string(), folder(state, &cell))));
    let read = |path: &Path| {
        let (volumes, devices) = Store::open(path).unwrap().load().unwrap();
        let volumes = volumes.iter().map(|record| record.spec.name.to_string()).collect();
        (volumes, devices.iter().map(|record| record.spec.name.to_string()).collect())
    };
    places.into_iter().map(|(name, path)| (name, read(&path))).collect()
}

fn arranged(state: &Path, mode: IsolationMode) -> Result<BTreeSet<Name>, ArrangeError> {
    arrange(Store::open(state).unwrap(), state, mode, None).map(|(_, arranged)| arranged.cells)
}

fn place(volumes: &[&str], devices: &[&str]) -> (Vec<String>, Vec<String>) {
    let own = |texts: &[&str]| texts.iter().map(ToString::to_string).collect();
    (own(volumes), own(devices))
}

#[test]
fn devices_take_what_they_show_with_them_and_back() {
    let state = TempDir::new().unwrap();
    let state = state.path();
    let volumes = [
        volume("disk", "disk | memory"),
        volume("p", "share | volume:disk"),
        volume("q", "share | volume:disk"),
        volume("free", "memory"),
        volume("r", "memory"),
    ];
    put(state, &volumes, &[device("a", Some("x"), &["p"]), device("b", Some("x"), &["q"]), device("c", None, &["r"])]);
    let cells = arranged(state, IsolationMode::Tenant).unwrap();
    assert_eq!(cells.iter().map(Name::as_str).collect::<Vec<_>>(), ["x"]);
    let expected =
        [("main".to_owned(), place(&["free", "r"], &["c"])), ("x".to_owned(), place(&["disk", "p", "q"], &["a", "b"]))];
    assert_eq!(found(state), expected.into());
    // Within a worker, controllers have identifiers of their own.
    let (_, devices) = Store::open(&folder(state, &name("x"))).unwrap().load().unwrap();
    assert_ne!(devices[0].cntlid, devices[1].cntlid);
    let error = arranged(state, IsolationMode::Device).unwrap_err();
    assert!(matches!(error, ArrangeError::Apart { .. }) && error.to_string().contains("--isolation shared"), "{error}");
    arranged(state, IsolationMode::Shared).unwrap();
    let all = place(&["disk", "free", "p", "q", "r"], &["a", "b", "c"]);
    assert_eq!(found(state), [("main".to_owned(), all)].into());
    let (_, devices) = Store::open(state).unwrap().load().unwrap();
    assert_eq!(devices.iter().map(|record| record.cntlid).collect::<BTreeSet<_>>().len(), 3);
}

#[test]
fn volumes_bring_their_groups() {
    let state = TempDir::new().unwrap();
    put(
        state.path(),
        &[volume("v", "throttle(group=gold) | memory"), volume("w", "memory")],
        &[device("a", Some("x"), &["v"]), device("b", Some("y"), &["w"])],
    );
    let group = |text: &str| serde_json::from_str::<GroupSpec>(text).unwrap();
    let groups = [
        group(r#"{ "name": "all", "caps": { "iops": 9 } }"#),
        group(r#"{ "name": "gold", "within": "all" }"#),
        group(r#"{ "name": "other" }"#),
    ];
    Store::open(state.path())
        .unwrap()
        .apply(&Changes { put_groups: groups.iter().collect(), ..Changes::default() })
        .unwrap();
    arranged(state.path(), IsolationMode::Tenant).unwrap();
    let of = |cell: &str| Store::open(&folder(state.path(), &name(cell))).unwrap().load_groups().unwrap();
    assert_eq!((of("x"), of("y")), (groups[..2].to_vec(), Vec::new()));
}

/// A change of a group may have reached the daemon's own worker only.
#[test]
fn groups_are_everywhere_as_the_daemons_own_worker_has_them() {
    let state = TempDir::new().unwrap();
    let (own, x) = (state.path(), folder(state.path(), &name("x")));
    let group = |text: &str| serde_json::from_str::<GroupSpec>(text).unwrap();
    let fast = group(r#"{ "name": "gold", "caps": { "iops": 1000 } }"#);
    let slow = group(r#"{ "name": "gold", "within": "all", "caps": { "iops": 100 } }"#);
    let (all, lone) = (group(r#"{ "name": "all" }"#), group(r#"{ "name": "lone", "weight": 3 }"#));
    put(own, &[], &[]);
    put(&x, &[volume("v", "throttle(group=gold) | memory")], &[device("a", Some("x"), &["v"])]);
    for (path, groups) in [(own, vec![&all, &slow]), (x.as_path(), vec![&fast, &lone])] {
        Store::open(path).unwrap().apply(&Changes { put_groups: groups, ..Changes::default() }).unwrap();
    }
    arranged(own, IsolationMode::Tenant).unwrap();
    let expected = [all, slow, lone];
    for path in [own, &x] {
        assert_eq!(Store::open(path).unwrap().load_groups().unwrap(), expected, "{}", path.display());
    }
}

#[test]
fn a_cell_knows_its_part_of_the_file_and_no_more() {
    let state = TempDir::new().unwrap();
    let file = state.path().join("m.toml");
    let text = r#"
        [[volume]]
        name = "disk"
        size = "1M"
        backend = "file:disk.img"
        [[volume]]
        name = "p"
        size = "1M"
        stack = "throttle(iops=9) | volume:disk"
        [[volume]]
        name = "other"
        size = "1M"
        backend = "file:other.img"
        [[volume]]
        name = "shown"
        size = "1M"
        backend = "file:shown.img"
        [[volume]]
        name = "free"
        size = "1M"
        backend = "file:free.img"
        [[device]]
        name = "a"
        nvme = {}
        tenant = "x"
        attach = [{ volume = "p" }]
        [[device]]
        name = "b"
        nvme = {}
        tenant = "y"
        attach = [{ volume = "other" }]
    "#;
    std::fs::write(&file, text).unwrap();
    let declared = Declared::read(&file).unwrap();
    // One of its devices is not in the file.
    put(state.path(), &[], &[device("c", Some("x"), &["shown"])]);
    let store = Store::open(state.path()).unwrap();
    let (_, arranged) = part_of(store, &name("x"), IsolationMode::Tenant, Some(&declared)).unwrap();
    let part = arranged.part(&declared, Some(&name("x")));
    assert_eq!(part.volumes.iter().map(|volume| volume.value.name.as_str()).collect::<Vec<_>>(), ["disk", "p", "shown"]);
    assert_eq!(part.devices.iter().map(|device| device.value.spec().name).collect::<Vec<_>>(), [name("a")]);
    assert!(arranged.cells.is_empty(), "it starts none");
}

#[test]
fn what_has_one_uuid_in_two_workers_is_named_and_keeps_nobody_from_starting() {
    let state = TempDir::new().unwrap();
    let (own, x) = (state.path(), folder(state.path(), &name("x")));
    let v = volume("v", "memory");
    let w = VolumeRecord { uuid: v.uuid, ..volume("w", "memory") };
    put(own, std::slice::from_ref(&v), &[]);
    // One thing in two places has one as well.
    put(&x, &[v.clone(), w], &[device("a", Some("x"), &["w"])]);
    let states = [load(None, Store::open(own).unwrap()).unwrap(), load(Some(name("x")), Store::open(&x).unwrap()).unwrap()];
    assert_eq!(of_one_uuid(&states), [(v.uuid, "volume v (worker main)".to_owned(), "volume w (worker x)".to_owned())]);
    drop(states);
    arranged(own, IsolationMode::Tenant).unwrap();
    assert_eq!(found(own), [("main".to_owned(), place(&["v"], &[])), ("x".to_owned(), place(&["w"], &["a"]))].into());
}

/// The daemon was stopped while a volume went from one worker to another.
#[test]
fn of_two_records_the_one_that_was_received_goes() {
    let state = TempDir::new().unwrap();
    let (old, mut new) = (volume("v", "memory"), volume("v", "memory"));
    new.spec.size = Some(crate::Size(2 << 20));
    put(state.path(), std::slice::from_ref(&new), &[]);
    put(&folder(state.path(), &name("x")), std::slice::from_ref(&old), &[device("a", Some("x"), &["v"])]);
    let received = name("v");
    let note = |path: &Path| {
        let changes = Changes { put_received: vec![&received], ..Changes::default() };
        Store::open(path).unwrap().apply(&changes).unwrap();
    };
    note(&folder(state.path(), &name("x")));
    for _ in 0..2 {
        arranged(state.path(), IsolationMode::Tenant).unwrap();
        let store = Store::open(&folder(state.path(), &name("x"))).unwrap();
        let (volumes, _) = store.load().unwrap();
        assert_eq!(volumes, [new.clone()]);
        assert!(store.load_received().unwrap().is_empty());
        drop(store);
        // Alone it stays, received or not.
        note(&folder(state.path(), &name("x")));
    }
}

#[test]
fn what_cannot_be_is_said() {
    let state = TempDir::new().unwrap();
    let state = state.path();
    put(state, &[volume("v", "memory")], &[device("a", Some("x"), &["v"]), device("b", None, &["v"])]);
    let error = arranged(state, IsolationMode::Tenant).unwrap_err();
    assert!(error.to_string().contains("two workers"), "{error}");
    put(state, &[], &[device("main", None, &[]), device("b", None, &[])]);
    assert!(matches!(arranged(state, IsolationMode::Device), Err(ArrangeError::Apart { .. } | ArrangeError::Main { .. })));
    // Programs know volumes by their names: what an operator named gets no other.
    let other = VolumeRecord { uuid: Uuid::new_v4(), ..volume("v", "memory") };
    put(&folder(state, &name("y")), &[other], &[]);
    let error = arranged(state, IsolationMode::Shared).unwrap_err();
    assert!(matches!(error, ArrangeError::Twice { kind: "volume", .. }), "{error}");
    for said in ["take the folder cells/y out", "without --config", "delete the volume v"] {
        assert!(error.to_string().contains(said), "{error}");
    }
}

#[test]
fn what_states_have_is_known_before_their_workers_are_heard() {
    let state = TempDir::new().unwrap();
    let records = [volume("v", "memory"), volume("w", "memory")];
    put(state.path(), &records, &[device("a", Some("x"), &["v"])]);
    let (_, arranged) = arrange(Store::open(state.path()).unwrap(), state.path(), IsolationMode::Tenant, None).unwrap();
    let stored = &arranged.stored[&name("x")];
    let names = [(Kind::Volumes, "v".to_owned()), (Kind::Devices, "a".to_owned())];
    assert_eq!(stored.names, names.into());
    assert!(stored.uuids.contains(&records[0].uuid.to_string()));
}

/// The daemon was stopped while a volume went from one worker to another, and a third has another volume of its UUID.
#[test]
fn what_was_received_is_all_there_is_though_another_has_its_uuid() {
    let state = TempDir::new().unwrap();
    let (own, [x, y]) = (state.path(), ["x", "y"].map(|cell| folder(state.path(), &name(cell))));
    let a = volume("a", "memory");
    let b = VolumeRecord { uuid: a.uuid, ..volume("b", "memory") };
    put(own, &[], &[]);
    put(&x, std::slice::from_ref(&a), &[device("d", Some("x"), &[])]);
    put(&y, &[b], &[device("e", Some("y"), &["b"])]);
    let changes = Changes { put_received: vec![&a.spec.name], ..Changes::default() };
    Store::open(&x).unwrap().apply(&changes).unwrap();
    arranged(own, IsolationMode::Tenant).unwrap();
    let expected = [("main", place(&["a"], &[])), ("x", place(&[], &["d"])), ("y", place(&["b"], &["e"]))];
    assert_eq!(found(own), expected.map(|(cell, what)| (cell.to_owned(), what)).into());
}

#[test]
fn names_that_guests_did_not_choose_keep_nobody_from_starting() {
    let state = TempDir::new().unwrap();
    let state = state.path();
    let made = |by: &str| VolumeRecord { uuid: Uuid::new_v4(), created_by: Some(name(by)), ..volume("same-ns1", "memory") };
    let taken_over = VolumeRecord { created_by: None, owns_file: true, ..made("z") };
    let own = VolumeRecord { uuid: Uuid::new_v4(), ..volume("same-ns1", "memory") };
    put(state, std::slice::from_ref(&taken_over), &[]);
    let devices = ["x", "y", "z"].map(|at| device(at, Some(at), &["same-ns1"]));
    let records = [made("x"), made("y"), own];
    for (record, device) in records.iter().zip(&devices) {
        put(&folder(state, &device.spec.name), std::slice::from_ref(record), std::slice::from_ref(device));
    }
    for _ in 0..2 {
        arranged(state, IsolationMode::Tenant).unwrap();
        let mut names = BTreeSet::new();
        for (record, device) in records.iter().zip(&devices) {
            let (volumes, found) = Store::open(&folder(state, &device.spec.name)).unwrap().load().unwrap();
            assert_eq!(volumes.iter().map(|volume| volume.uuid).collect::<Vec<_>>(), [record.uuid]);
            assert_eq!(found[0].namespaces[0].volume, volumes[0].spec.name, "the device shows what it showed");
            names.insert(volumes[0].spec.name.to_string());
        }
        let (volumes, _) = Store::open(state).unwrap().load().unwrap();
        assert_eq!(volumes.iter().map(|volume| volume.uuid).collect::<Vec<_>>(), [taken_over.uuid]);
        names.insert(volumes[0].spec.name.to_string());
        assert!(names.len() == 4 && names.contains("same-ns1"), "{names:?}");
        let (volumes, _) = Store::open(&folder(state, &name("z"))).unwrap().load().unwrap();
        assert_eq!(volumes[0].spec.name, name("same-ns1"), "the operator's name stays");
    }
}

/// A guest's request was cut short, and the daemon is started with another isolation.
#[test]
fn a_file_that_is_to_be_settled_does_not_outlive_the_state_that_says_so() {
    let state = TempDir::new().unwrap();
    let (own, x) = (state.path(), folder(state.path(), &name("x")));
    let [gone, used] = ["gone.img", "used.img"].map(|file| own.join(file));
    for file in [&gone, &used] {
        std::fs::write(file, "a guest's").unwrap();
    }
    put(own, &[], &[]);
    put(&x, &[volume("v", &format!("file:{}", used.display()))], &[device("a", Some("x"), &["v"])]);
    let changes = Changes { put_files: vec![&gone, &used], ..Changes::default() };
    Store::open(&x).unwrap().apply(&changes).unwrap();
    arranged(own, IsolationMode::Shared).unwrap();
    assert!(!gone.exists() && used.exists(), "what has become another state's is a volume's still");
    assert_eq!(found(own), [("main".to_owned(), place(&["v"], &["a"]))].into());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever was where, twice or in the wrong place: all of it is there once, each device with what it shows.
    #[test]
    fn nothing_is_lost_whatever_was_where(
        tenants in prop::collection::vec(prop::option::of(0_usize..3), 1..6),
        copies in prop::collection::vec((0_usize..4, 0_usize..6), 0..10),
        by_tenant: bool,
    ) {
        let state = TempDir::new().unwrap();
        let state = state.path();
        let names = ["x", "y", "z"];
        let records: Vec<_> = tenants.iter().enumerate().map(|(at, tenant)| {
            let (v, d) = (format!("v{at}"), format!("d{at}"));
            (volume(&v, "memory"), device(&d, tenant.map(|tenant| names[tenant]), &[&v]))
        }).collect();
        let folders = [state.to_owned(), folder(state, &name("x")), folder(state, &name("y")), folder(state, &name("w"))];
        put(state, &[], &[]);
        for (at, (volume, device)) in records.iter().enumerate() {
            // At least once, somewhere.
            put(&folders[at % 4], std::slice::from_ref(volume), std::slice::from_ref(device));
        }
        for (place, what) in copies {
            if let Some((volume, device)) = records.get(what) {
                put(&folders[place], std::slice::from_ref(volume), std::slice::from_ref(device));
            }
        }
        let mode = if by_tenant { IsolationMode::Tenant } else { IsolationMode::Device };
        let cells = arranged(state, mode).unwrap();
        let found = found(state);
        prop_assert_eq!(found.keys().filter(|name| *name != MAIN).cloned().collect::<BTreeSet<_>>(),
            cells.iter().map(ToString::to_string).collect());
        for (volume, device) in &records {
            let wanted = mode.cell_of(&device.spec).map_or(MAIN.to_owned(), |cell| cell.to_string());
            for (place, (volumes, devices)) in &found {
                prop_assert_eq!(volumes.contains(&volume.spec.name.to_string()), *place == wanted);
                prop_assert_eq!(devices.contains(&device.spec.name.to_string()), *place == wanted);
            }
        }
    }
}
