//! Volumes in files, beside fio's own io_uring engine on the same file, SPDK's aio back end and QEMU's storage daemon.

use std::{
    fs::File,
    io::Write as _,
    path::{Path, PathBuf},
};

use crate::{
    client::{Fio, Lean, Load},
    error::Failure,
    process::Daemon,
    record::{Key, Record},
    subject::{Setup, Subject, storage_daemon},
    suite::{Case, Suite},
};

/// A file system to measure on.
struct Place {
    /// What the table says.
    name: &'static str,
    /// What volumes and devices are called.
    device: &'static str,
    file: PathBuf,
}

/// Ours, the kernel's own speed as fio finds it, and the peers.
pub(crate) fn run(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let shared = tempfile::tempdir_in("/dev/shm").ok();
    let mut places = vec![Place { name: "on disk", device: "disk", file: suite.folder("disk.img") }];
    if let Some(shared) = &shared {
        places.insert(0, Place { name: "on tmpfs", device: "tmpfs", file: shared.path().join("tmpfs.img") });
    }
    let size: u64 = if suite.quick { 256 << 20 } else { 1 << 30 };
    for place in &places {
        fill(&place.file, size)?;
    }
    let setup = places.iter().fold(Setup::default(), |setup, place| {
        setup.disk(place.device, &format!("file:{}", place.file.display()), &size.to_string())
    });
    let ours = suite.start_ours("spin", &setup)?;
    let spdk = suite.start_spdk(|spdk| {
        places.iter().try_for_each(|place| {
            spdk.file(place.device, &place.file)?;
            spdk.device(place.device, place.device)
        })
    })?;
    let mut subjects: Vec<_> = [Some(ours), spdk].into_iter().flatten().collect();
    let devices: Vec<[String; 1]> = places.iter().map(|place| [place.device.to_owned()]).collect();
    let qemu = start_qemu(suite, &places)?;
    let depths: &[u32] = if suite.quick { &[1, 32] } else { &[1, 32, 128] };
    let mut cases = Vec::new();
    for (place, device) in places.iter().zip(&devices) {
        for rw in ["randread", "randwrite"] {
            for &depth in depths {
                let load = Load::new(rw, "4k", depth).on(place.name);
                cases.extend(suite.on_each(&subjects, "", &Lean::default(), &load, device));
                if let Some(fio) = &suite.fio {
                    let engine = vec!["--ioengine=io_uring".to_owned(), format!("--filename={}", place.file.display())];
                    cases.push(fio_case(suite, fio, "fio io_uring", engine, load.clone(), suite.target));
                }
                if let (Some(fio), Some(_)) = (&suite.fio, &qemu) {
                    let engine = vec!["--ioengine=nbd".to_owned(), format!("--uri={}", uri(suite, place))];
                    cases.push(fio_case(suite, fio, "qsd (NBD)", engine, load, suite.client));
                }
            }
        }
    }
    record.note("fio io_uring: fio on the target's core, --direct=1, defaults otherwise; qsd (NBD): qemu-storage-daemon on the target's core, fio's nbd engine on the client's".into());
    suite.measure(record, &mut subjects, &cases)
}

fn fio_case<'a>(suite: &'a Suite, fio: &'a Fio, name: &str, engine: Vec<String>, load: Load, core: usize) -> Case<'a> {
    let key = Key { test: load.name(), depth: load.depth, client: String::new(), subject: name.into() };
    let run = move |_: &mut [Box<dyn Subject>]| fio.run(&engine, &load, core, suite.seconds);
    Case { key, subject: None, run: Box::new(run) }
}

fn uri(suite: &Suite, place: &Place) -> String {
    format!("nbd+unix:///{}?socket={}", place.device, suite.folder("qsd.sock").display())
}

/// QEMU's storage daemon with the files as NBD exports. It sleeps unless it is asked, so that it need not stand still.
fn start_qemu(suite: &Suite, places: &[Place]) -> Result<Option<Daemon>, Failure> {
    let Some(in_root) = &suite.in_root else { return Ok(None) };
    let socket = suite.folder("qsd.sock");
    let mut command = storage_daemon(in_root, suite.target);
    command.arg("--nbd-server").arg(format!("addr.type=unix,addr.path={}", socket.display()));
    for Place { device, file, .. } in places {
        let file = file.display();
        command.arg("--blockdev");
        command.arg(format!("driver=file,node-name={device},filename={file},cache.direct=on,aio=io_uring,locking=off"));
        command.arg("--export").arg(format!("nbd,id=e-{device},node-name={device},name={device},writable=on"));
    }
    Daemon::start(&mut command, &suite.folder("qsd.log"), || socket.exists()).map(Some)
}

/// A file without holes.
pub(super) fn fill(path: &Path, size: u64) -> Result<(), Failure> {
    let failed = |source| Failure::Write { path: path.to_owned(), source };
    let mut file = File::create(path).map_err(failed)?;
    let mut piece = vec![0_u8; 1 << 20];
    let mut word = 1_u64;
    for chunk in piece.chunks_exact_mut(8) {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    for _ in 0..size >> 20 {
        file.write_all(&piece).map_err(failed)?;
    }
    file.sync_all().map_err(failed)
}
