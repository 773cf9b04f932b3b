//! virtio disks, as a front end sees them that has just connected.

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
};

use millrace_driver::vhost_user::code;

use super::{stacks::spec, *};
use crate::{
    LogicalBlock,
    model::MigrationSpec,
    store::{Changes, DiskKind},
};

/// VIRTIO_BLK_F_RO and VIRTIO_BLK_F_DISCARD.
const RO: u64 = 1 << 5;
const DISCARD: u64 = 1 << 13;
/// VHOST_USER_PROTOCOL_F_CONFIG.
const CONFIG: u64 = 1 << 9;

fn disk(rig: &Rig) {
    rig.create_device(&serde_json::from_str(r#"{"name":"d","virtio_blk":{}}"#).unwrap()).unwrap();
}

/// Tells the disk something.
fn tell(stream: &mut UnixStream, request: u32, payload: &[u8]) {
    let header = [request, 1, payload.len() as u32].map(u32::to_le_bytes).concat();
    stream.write_all(&[&header, payload].concat()).unwrap();
}

/// Asks it something; what it answers.
fn ask(stream: &mut UnixStream, request: u32, payload: &[u8]) -> Vec<u8> {
    tell(stream, request, payload);
    let mut header = [0; 12];
    stream.read_exact(&mut header).unwrap();
    let mut answer = vec![0; usize::from(header[8])];
    stream.read_exact(&mut answer).unwrap();
    answer
}

/// A front end that has just connected.
fn connect(rig: &Rig) -> UnixStream {
    let stream = UnixStream::connect(rig.path("d.sock")).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// The features that the disk offers.
fn offered(stream: &mut UnixStream) -> u64 {
    u64::from_le_bytes(ask(stream, code::GET_FEATURES, &[]).try_into().unwrap())
}

/// What a guest learns of the disk once: the features of its kind, and the block size. And its size.
fn seen(rig: &Rig) -> ((u64, u32), u64) {
    let mut stream = connect(rig);
    let features = offered(&mut stream) & (RO | DISCARD);
    tell(&mut stream, code::SET_PROTOCOL_FEATURES, &CONFIG.to_le_bytes());
    let mut payload = [0; 72];
    payload[4] = 60;
    let space = ask(&mut stream, code::GET_CONFIG, &payload).split_off(12);
    let block_size = u32::from_le_bytes(space[20..24].try_into().unwrap());
    ((features, block_size), u64::from_le_bytes(space[..8].try_into().unwrap()))
}

/// Until the disk has seen that its last front end is gone.
fn alone(rig: &Rig) {
    eventually("the front end's end", || (!rig.device("d").unwrap().connected).then_some(()));
}

fn stored(rig: &Rig) -> Option<DiskKind> {
    rig.store.load().unwrap().1[0].disk_kind
}

#[test]
fn a_disk_is_of_the_same_kind_without_its_volume_and_after_a_restart() {
    let mut rig = Rig::new();
    let large = VolumeSpec { block_size: LogicalBlock(BlockSize::B4096), ..spec("large", Some("1M"), "memory") };
    rig.create_volume(&large).unwrap();
    rig.create_volume(&spec("null", Some("1M"), "null")).unwrap();
    disk(&rig);
    assert_eq!((seen(&rig), stored(&rig)), (((DISCARD, 512), 0), None), "it never was anything");
    for (volume, read_only, kind) in
        [("large", true, (RO, 4096)), ("null", false, (0, 512)), ("large", false, (DISCARD, 4096))]
    {
        alone(&rig);
        rig.attach("d", &AttachSpec { read_only, ..attach(volume, None) }).unwrap();
        assert_eq!(seen(&rig), (kind, 2048));
        rig.restart();
        rig.detach("d", 1).unwrap();
        assert_eq!(seen(&rig), (kind, 0));
        for _ in 0..2 {
            rig.restart();
            assert_eq!(seen(&rig), (kind, 0), "{volume}");
        }
    }
}

/// Its guest may have been told of discard: it gets the volume back, and its front end is let in again.
#[test]
fn a_volume_that_went_where_nothing_is_given_back_is_the_disk_it_was() {
    let rig = Rig::new();
    rig.create_volume(&spec("v", Some("1M"), "memory")).unwrap();
    disk(&rig);
    rig.attach("d", &attach("v", None)).unwrap();
    let mut stream = connect(&rig);
    let told = offered(&mut stream);
    assert_eq!(told & DISCARD, DISCARD);
    rig.migrate_volume("v", &MigrationSpec { to: "null".parse().unwrap(), leg: None, rate: None }).unwrap();
    eventually("the end of a migration", || rig.volume("v").unwrap().migration.is_none().then_some(()));
    rig.detach("d", 1).unwrap();
    rig.attach("d", &attach("v", None)).unwrap();
    drop(stream);
    alone(&rig);
    let mut stream = connect(&rig);
    assert_eq!(offered(&mut stream), told & !DISCARD);
    tell(&mut stream, code::SET_FEATURES, &told.to_le_bytes());
    assert_eq!(offered(&mut stream), told & !DISCARD, "the connection goes on");
}

/// It is known from the volume's first moment on: later it may be gone.
#[test]
fn a_volume_that_cannot_be_opened_any_more_leaves_its_kind() {
    let mut rig = Rig::new();
    rig.create_volume(&VolumeSpec { block_size: LogicalBlock(BlockSize::B4096), ..rig.file_volume("f", "1M") }).unwrap();
    disk(&rig);
    rig.attach("d", &AttachSpec { read_only: true, ..attach("f", None) }).unwrap();
    rig.stop();
    fs::rename(rig.path("f.img"), rig.path("aside")).unwrap();
    rig.start();
    rig.detach("d", 1).unwrap();
    assert_eq!(seen(&rig), ((RO, 4096), 0), "its guest need not wait any more");
    rig.restart();
    assert_eq!(seen(&rig), ((RO, 4096), 0));
}

/// A record from before kinds were kept: the volume tells, while it is there.
#[test]
fn a_record_without_a_kind_is_read_and_gets_one() {
    let mut rig = Rig::new();
    rig.create_volume(&spec("null", Some("1M"), "null")).unwrap();
    disk(&rig);
    rig.attach("d", &attach("null", None)).unwrap();
    let mut record = rig.store.load().unwrap().1.remove(0);
    assert!(record.disk_kind.take().is_some());
    assert!(!serde_json::to_string(&record).unwrap().contains("disk_kind"), "it is as it was stored then");
    rig.store.apply(&Changes { put_devices: vec![&record], ..Changes::default() }).unwrap();
    rig.restart();
    assert_eq!((seen(&rig), stored(&rig)), (((0, 512), 2048), None));
    rig.detach("d", 1).unwrap();
    rig.restart();
    assert_eq!(seen(&rig), ((0, 512), 0));
    // A record of one that has none, and never had one that was noted.
    record.namespaces.clear();
    rig.store.apply(&Changes { put_devices: vec![&record], ..Changes::default() }).unwrap();
    rig.restart();
    assert_eq!(seen(&rig), ((DISCARD, 512), 0));
}

/// Its guest waits for ever: somebody has to be told.
#[test]
fn a_disk_with_a_fault_of_ours_is_shown_as_failed() {
    let rig = Rig::new();
    disk(&rig);
    assert_eq!((rig.device("d").unwrap().state, rig.status().failed.len()), (State::Ready, 0));
    let failed = rig.peek().device("d").unwrap().live.as_ref().unwrap().fail_disk();
    assert!(matches!(failed, Err(ControlError::Fenced { .. })));
    let view = rig.device("d").unwrap();
    assert_eq!((view.state, view.reason.as_deref()), (State::Failed, Some(crate::devices::FENCED)));
    assert_eq!(rig.status().failed, [format!("device d: {}", crate::devices::FENCED)]);
    // What it is told to do.
    rig.delete_device("d").unwrap();
    disk(&rig);
    assert_eq!((rig.device("d").unwrap().state, rig.status().failed.len()), (State::Ready, 0));
    connect(&rig);
}
