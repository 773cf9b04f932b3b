use millrace_block::BlockError;
use millrace_services::{ServiceError, graph::LeafError};
use rustix::io::Errno;

use super::*;
use crate::api::Problem;

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn io(errno: Errno) -> VolumeError {
    VolumeError::Io { volume: "v".to_owned(), action: "resize", path: "/srv/v.img".into(), source: errno.into() }
}

fn volume(errno: Errno) -> ControlError {
    ControlError::Volume(io(errno))
}

fn graph(source: GraphError) -> ControlError {
    ControlError::Graph { name: name("v"), source }
}

fn leaf(errno: Errno) -> GraphError {
    GraphError::Leaf { node: "v/file".to_owned(), source: LeafError::Volume(io(errno)) }
}

fn service(source: ServiceError) -> ControlError {
    graph(GraphError::Service { node: "v".to_owned(), source })
}

fn socket(errno: Errno) -> ControlError {
    let source = ListenerError::Io { path: "/run/d.sock".into(), operation: "bind", source: errno.into() };
    ControlError::Socket { device: name("d"), source }
}

fn change(source: ChangeFailed) -> ControlError {
    ControlError::Change { name: name("v"), source }
}

fn store(errno: Errno) -> ControlError {
    let source = Box::new(redb::Error::Io(errno.into()));
    ControlError::Store(StoreError::Database { path: "/var/lib/millrace/state".into(), source })
}

fn upgrade(class: Class) -> ControlError {
    ControlError::Upgrade { class, why: "volume v is being resized".to_owned() }
}

/// What cannot be right stays wrong; what does not fit now, and what the system below did, may be asked for again.
#[test]
fn the_class_says_whose_failure_it_is() {
    let leg = |source| service(ServiceError::Leg { what: "write", leg: "v/file".to_owned(), source });
    let refused = VolumeError::Refused { volume: "v".to_owned(), why: "its disk is full".to_owned() };
    for (error, class) in [
        (ControlError::invalid("volume", &name("v"), "it is a disk"), Class::Invalid),
        (ControlError::untimely("volume", &name("v"), "it is not being migrated"), Class::Conflict),
        (ControlError::NoLeaf { name: name("v"), leaf: "none".to_owned() }, Class::Missing),
        (volume(Errno::NOENT), Class::Invalid),
        (volume(Errno::ACCESS), Class::Invalid),
        (volume(Errno::ISDIR), Class::Invalid),
        (volume(Errno::FBIG), Class::Invalid),
        (volume(Errno::NOSPC), Class::NoRoom),
        (volume(Errno::DQUOT), Class::NoRoom),
        (volume(Errno::NOMEM), Class::Failed),
        (volume(Errno::IO), Class::Failed),
        (volume(Errno::MFILE), Class::Failed),
        (ControlError::Volume(refused), Class::Conflict),
        (ControlError::Volume(VolumeError::InUse { volume: "v".to_owned(), path: "/srv/v.img".into() }), Class::Conflict),
        (graph(leaf(Errno::IO)), Class::Failed),
        (graph(leaf(Errno::NOENT)), Class::Invalid),
        (
            graph(GraphError::WayBack { change: Box::new(leaf(Errno::NOENT)), back: Box::new(leaf(Errno::IO)) }),
            Class::Failed,
        ),
        (service(ServiceError::Legs("the legs differ".to_owned())), Class::Invalid),
        (service(ServiceError::NotNow("it is being scrubbed".to_owned())), Class::Conflict),
        (service(ServiceError::Volume(io(Errno::NOSPC))), Class::NoRoom),
        (leg(BlockError::NoSpace), Class::NoRoom),
        (leg(BlockError::WriteFault { errno: 5 }), Class::Failed),
        (change(ChangeFailed::Store("No space left on device".to_owned())), Class::Failed),
        (change(ChangeFailed::Size { old: 1, new: 2, way: "" }), Class::Conflict),
        (change(ChangeFailed::Graph(leaf(Errno::IO))), Class::Failed),
        (change(ChangeFailed::TooDeep { needed: 2, room: 1 }), Class::Invalid),
        (ControlError::Copy { copy: name("c"), source: CopyError::Shape("smaller".to_owned()) }, Class::Invalid),
        (ControlError::Copy { copy: name("c"), source: CopyError::Memory(Errno::NOMEM.into()) }, Class::Failed),
        (socket(Errno::NAMETOOLONG), Class::Invalid),
        (socket(Errno::ACCESS), Class::Invalid),
        (socket(Errno::NOSPC), Class::NoRoom),
        (socket(Errno::MFILE), Class::Failed),
        (store(Errno::NOSPC), Class::NoRoom),
        (store(Errno::ROFS), Class::Failed),
        (upgrade(Class::Conflict), Class::Conflict),
        (upgrade(Class::Failed), Class::Failed),
    ] {
        assert_eq!(error.class(), class, "{error}");
    }
}

#[test]
fn each_class_has_its_status() {
    for (error, status, code) in [
        (ControlError::invalid("volume", &name("v"), "it is a disk"), 422, "invalid"),
        (ControlError::untimely("volume", &name("v"), "it is not being migrated"), 409, "not-now"),
        (ControlError::NoLeaf { name: name("v"), leaf: "none".to_owned() }, 404, "no-volume"),
        (volume(Errno::IO), 500, "volume"),
        (volume(Errno::NOSPC), 507, "volume"),
        (ControlError::Stopping, 503, "stopping"),
    ] {
        let problem = Problem::from(&error);
        assert_eq!((problem.status, problem.code.as_str()), (status, code), "{error}");
    }
}

/// The object, the cause, and what to do.
#[test]
fn what_the_system_said_comes_with_what_to_do() {
    for (error, object, cause, remedy) in [
        (volume(Errno::NOSPC), "volume v: ", "No space left on device", "make room on that file system"),
        (volume(Errno::NOMEM), "volume v: ", "Cannot allocate memory", "--memory-limit"),
        (volume(Errno::FBIG), "volume v: ", "File too large", "choose a smaller size"),
        (volume(Errno::IO), "volume v: ", "Input/output error", "dmesg"),
        (volume(Errno::MFILE), "volume v: ", "Too many open files", "--file-limit"),
        (graph(leaf(Errno::NOSPC)), "volume v: ", "No space left on device", "make room on that file system"),
        (socket(Errno::NAMETOOLONG), "device d: its socket: /run/d.sock", "File name too long", "a shorter --socket"),
        (socket(Errno::NOENT), "device d: its socket: /run/d.sock", "No such file", "make its directory first"),
        (socket(Errno::ACCESS), "device d: its socket: /run/d.sock", "Permission denied", "serve --allow PATH"),
        (socket(Errno::MFILE), "device d: its socket: /run/d.sock", "Too many open files", "--file-limit"),
    ] {
        let Problem { detail, advice, .. } = Problem::from(&error);
        assert!(detail.starts_with(object) && detail.contains(cause), "{detail}");
        assert!(advice.as_ref().is_some_and(|advice| advice.contains(remedy)), "{detail}: {advice:?}");
    }
    assert_eq!(volume(Errno::PIPE).advice(), None);
    for (what, remedy) in [
        ("resizing", Some("volume remove v cache")),
        ("resizing while it is being migrated", Some("volume migrate v --cancel")),
        ("formatting", None),
    ] {
        let advice = ControlError::Volume(VolumeError::Unsupported { volume: "v/cache".to_owned(), what }).advice();
        assert_eq!(advice.is_some(), remedy.is_some(), "{what}");
        assert!(advice.is_none_or(|advice| advice.contains(remedy.unwrap_or_default())), "{what}");
    }
}

/// Where the reason says what to do, nothing else is proposed.
#[test]
fn a_volume_whose_memory_is_gone_has_one_way_on() {
    let failed = |reason: &str| ControlError::VolumeFailed { name: name("v"), reason: reason.to_owned() };
    let emptied = failed(&format!("it holds no mirror; {EMPTIED}: \"millrace volume delete v\", and make it anew"));
    assert_eq!(emptied.advice(), None);
    let gone = failed("cannot open /v.img: No such file").advice();
    assert!(gone.is_some_and(|advice| advice.contains("put that right")));
}

#[test]
fn what_stands_in_the_way_comes_with_what_to_do() {
    let lost = |errno: Errno| ControlError::SessionLost { device: name("d"), source: errno.into() };
    let account = |errno: Errno| ControlError::Account { source: errno.into() };
    for (error, remedy) in [
        (ControlError::Commanded { name: name("v") }, "try again"),
        (ControlError::ReadOnly { name: name("v") }, "without --read-only"),
        (ControlError::NsidRange { device: name("d"), nsid: 9, largest: 4 }, "another --nsid"),
        (ControlError::AttachedAlready { device: name("d"), volume: name("v"), nsid: 3 }, "\"millrace device detach d 3\""),
        // Of a controller, its name alone would not say which volume.
        (ControlError::OtherKind { volume: name("v"), other: name("d") }, "\"millrace device detach d v\""),
        (ControlError::NoUpgrade, "\"millrace upgrade\""),
        (ControlError::Stopping, "try again"),
        (lost(Errno::CONNREFUSED), "open the volume once more"),
        (lost(Errno::MFILE), "--file-limit"),
        (account(Errno::ACCESS), "docs/formats/usage.md"),
        (account(Errno::IO), "dmesg"),
    ] {
        assert!(error.advice().is_some_and(|advice| advice.contains(remedy)), "{error}: {:?}", error.advice());
    }
}
