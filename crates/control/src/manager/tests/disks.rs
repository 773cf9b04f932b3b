//! The driver's and the back end's ways with disks that are slow or gone, on controllers of ours in the place of physical ones.

use std::os::fd::BorrowedFd;

use millrace_backends::{NvmeVolume, Patience};
use millrace_block::{
    BlockCount, BlockError, Lba, Operation, Volume,
    conformance::{Bench, Harness, Job, SyncHarness},
};
use millrace_driver::{
    Command, DmaRange, DriverError, Format, MappedArea, QueueOptions, Transport, TransportError, VfioUser,
    spec::{AdminOpcode, NamespaceId, QueueId, Status, admin::SecureErase},
};

use super::{stacks::spec, *};

/// A device with one volume on a stack.
fn disk(rig: &Rig, name: &str, bytes: &str, stack: &str) {
    rig.create_volume(&spec(name, Some(bytes), stack)).unwrap();
    rig.create_device(&device(name, "{}")).unwrap();
    rig.attach(name, &attach(name, None)).unwrap();
}

fn connect(rig: &Rig, name: &str) -> VfioUser {
    VfioUser::connect(&rig.path(&format!("{name}.sock")), Duration::from_secs(10)).unwrap()
}

/// The device as a physical one.
fn over(rig: &Rig, name: &str, patience: Patience) -> Arc<NvmeVolume> {
    NvmeVolume::over(name, &"ffff:ff:1f.7".parse().unwrap(), connect(rig, name), patience).unwrap()
}

fn run(volume: &Arc<NvmeVolume>, jobs: &[Job]) -> Vec<Result<(), BlockError>> {
    let volume: Arc<dyn Volume> = Arc::<NvmeVolume>::clone(volume);
    SyncHarness::new(7, false).run(&volume, jobs)
}

fn zeroes() -> Job {
    Job::new(Operation::WriteZeroes { fua: false, deallocate: false }, 0, 8)
}

/// So short that whatever is under way when the disk is looked at is to be aborted.
const NO_TIME: Duration = Duration::from_millis(1);

#[test]
fn an_abort_says_whether_it_found_its_command() {
    let rig = Rig::new();
    disk(&rig, "d", "64K", "throttle(iops=1) | memory");
    let mut guest = guest(&rig, "d");
    let namespace = guest.namespace(NamespaceId(1)).unwrap();
    let mut queue = guest.create_queue_pair(&QueueOptions::default()).unwrap();
    let buffer = guest.memory().alloc(4096).unwrap();
    let event = guest.admin_queue().submit(&Command::admin(AdminOpcode::ASYNC_EVENT_REQUEST)).unwrap();
    guest.admin_queue().ring().unwrap();
    assert!(guest.abort(QueueId::ADMIN, event).unwrap());
    assert_eq!(guest.poll_event().unwrap().unwrap().status().code(), Status::ABORT_REQUESTED);
    assert!(!guest.abort(QueueId::ADMIN, event).unwrap(), "it is gone");
    // What is held by a volume goes its way.
    let read = namespace.read(Lba(0), buffer.slice(0, 4096)).unwrap();
    let held = [(); 2].map(|()| queue.submit(&read).unwrap());
    queue.ring().unwrap();
    assert!(!guest.abort(queue.id(), held[1]).unwrap());
    for cid in held {
        assert!(queue.wait_for(cid).unwrap().status().is_success());
    }
}

#[test]
fn a_namespace_is_formatted_when_it_is_asked_for() {
    let rig = Rig::new();
    disk(&rig, "d", "64K", "memory");
    let mut guest = guest(&rig, "d");
    let namespace = guest.namespace(NamespaceId(1)).unwrap();
    let mut queue = guest.create_queue_pair(&QueueOptions::default()).unwrap();
    let buffer = guest.memory().alloc(4096).unwrap();
    buffer.fill(0xaa);
    queue.execute(&namespace.write(Lba(0), buffer.slice(0, 4096)).unwrap()).unwrap();
    assert_eq!(namespace.block_size(), 512);
    let formats = &namespace.identify().lbaf;
    let index = formats.iter().position(|format| (format.lbads, format.ms) == (12, 0)).unwrap() as u8;
    let key = Format { index, erase: SecureErase::CRYPTOGRAPHIC, ..Format::default() };
    let refused = guest.format(&namespace, &key).unwrap_err();
    assert!(matches!(refused, DriverError::NotOffered(_) | DriverError::Queue(_)), "{refused}");
    assert!(matches!(guest.format(&namespace, &Format { index: 63, ..key }), Err(DriverError::Command(_))));
    queue.execute(&namespace.read(Lba(0), buffer.slice(0, 4096)).unwrap()).unwrap();
    assert_eq!(buffer.read_vec(0, 4096), [0xaa; 4096], "nothing was formatted yet");
    let formatted = guest.format(&namespace, &Format { index, ..Format::default() }).unwrap();
    assert_eq!((formatted.block_size(), formatted.size()), (4096, BlockCount(16)));
    queue.execute(&formatted.read(Lba(0), buffer.slice(0, 4096)).unwrap()).unwrap();
    assert_eq!(buffer.read_vec(0, 4096), [0; 4096]);
}

#[test]
fn a_copy_on_a_disk_is_its_controllers() {
    let rig = Rig::new();
    // More blocks than one command copies.
    disk(&rig, "d", "128M", "memory");
    let blocks = (48 << 20) / 512;
    let places = [(0, 0x11), (blocks / 2, 0x22), (blocks - 8, 0x33)];
    {
        let mut guest = guest(&rig, "d");
        let namespace = guest.namespace(NamespaceId(1)).unwrap();
        let mut queue = guest.create_queue_pair(&QueueOptions::default()).unwrap();
        let buffer = guest.memory().alloc(4096).unwrap();
        for (at, byte) in places {
            buffer.fill(byte);
            queue.execute(&namespace.write(Lba(at), buffer.slice(0, 4096)).unwrap()).unwrap();
        }
    }
    let volume = over(&rig, "d", Patience::default());
    let copy = Job::new(Operation::Copy { source: Lba(0) }, blocks + 8, blocks);
    assert_eq!(run(&volume, &[copy]), [Ok(())]);
    let (direct, buffers) = volume.moved();
    assert!(direct == 0 && buffers < 4096, "no data come here, but lists of ranges: {buffers} bytes");
    drop(volume);
    let mut guest = guest(&rig, "d");
    let namespace = guest.namespace(NamespaceId(1)).unwrap();
    let mut queue = guest.create_queue_pair(&QueueOptions::default()).unwrap();
    let buffer = guest.memory().alloc(4096).unwrap();
    for (at, byte) in places {
        let read = namespace.read(Lba(blocks + 8 + at), buffer.slice(0, 4096)).unwrap();
        queue.execute(&read).unwrap();
        assert!(buffer.read_vec(0, 4096) == [byte; 4096], "{at}");
    }
}

#[test]
fn a_request_of_many_pieces_is_one_command() {
    let rig = Rig::new();
    disk(&rig, "d", "1M", "memory");
    let volume = over(&rig, "d", Patience::default());
    let counted = || {
        let counters = rig.device("d").unwrap().counters;
        (counters.read_commands, counters.write_commands)
    };
    let mut harness = SyncHarness::new(7, false);
    let mut bench = Bench::new(&mut harness, Arc::<NvmeVolume>::clone(&volume) as Arc<dyn Volume>, 7);
    let (before, pieces) = (counted(), 0..16);
    let segments: Vec<_> = pieces.clone().map(|piece| bench.memory.segment(piece * 8192, 4096)).collect();
    segments.iter().zip(1..).for_each(|(segment, byte)| segment.write_at(0, &[byte; 4096]));
    assert_eq!(bench.moving(Operation::Write { fua: false }, 8, &segments), Ok(()));
    for segment in &segments {
        segment.write_at(0, &[0; 4096]);
    }
    assert_eq!(bench.moving(Operation::Read, 8, &segments), Ok(()));
    for (piece, byte) in pieces.zip(1..) {
        assert_eq!(bench.memory.bytes(piece * 8192, 4096), [byte; 4096]);
    }
    assert_eq!(counted(), (before.0 + 1, before.1 + 1));
}

#[test]
fn a_slow_disk_is_asked_to_abort_first_and_reset_when_that_does_not_help() {
    let rig = Rig::new();
    disk(&rig, "d", "1M", "throttle(iops=2) | memory");
    // Held for half a second each, and never aborted.
    let patient = over(&rig, "d", Patience { command: NO_TIME, answer: Duration::from_secs(60) });
    for _ in 0..3 {
        assert_eq!(run(&patient, &[zeroes()]), [Ok(())]);
    }
    assert!(patient.aborts() > 0, "it was asked");
    assert_eq!(patient.resets(), 0, "they end by themselves");
    drop(patient);
    rig.try_change("d", "throttle(iops=1) | memory", false).unwrap();
    let hasty = over(&rig, "d", Patience { command: NO_TIME, answer: Duration::from_millis(1500) });
    thread::scope(|scope| {
        let load = scope.spawn(|| run(&hasty, &[(); 6].map(|()| zeroes())));
        eventually("a reset", || (hasty.resets() > 0).then_some(()));
        rig.try_change("d", "throttle(iops=1M) | memory", false).unwrap();
        assert_eq!(load.join().unwrap(), [Ok(()); 6], "what was in flight is begun again");
    });
    assert!(hasty.aborts() > 0);
}

/// A connection that tells the controller by messages, but for one message about new commands, which is lost with an error.
struct Forgetful {
    connection: VfioUser,
    forgets: Arc<AtomicBool>,
}

impl Transport for Forgetful {
    fn region_read(&mut self, region: u32, offset: u64, buf: &mut [u8]) -> Result<(), TransportError> {
        self.connection.region_read(region, offset, buf)
    }

    fn region_write(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), TransportError> {
        self.connection.region_write(region, offset, data)
    }

    fn region_write_posted(&mut self, region: u32, offset: u64, data: &[u8]) -> Result<(), TransportError> {
        // A tail doorbell of a queue that is not the admin queue (PCIe transport 3.1.2).
        let is_tail = offset > 0x1000 && offset.is_multiple_of(8);
        if is_tail && self.forgets.swap(false, Ordering::Relaxed) {
            let source = std::io::ErrorKind::BrokenPipe.into();
            return Err(TransportError::Map { region, offset, size: 4, source });
        }
        self.connection.region_write_posted(region, offset, data)
    }

    fn map_region(&mut self, _: u32) -> Result<Vec<MappedArea>, TransportError> {
        Ok(Vec::new())
    }

    fn dma_map(&mut self, range: DmaRange, fd: BorrowedFd<'_>, offset: u64) -> Result<(), TransportError> {
        self.connection.dma_map(range, fd, offset)
    }

    fn dma_unmap(&mut self, range: DmaRange) -> Result<(), TransportError> {
        self.connection.dma_unmap(range)
    }

    fn vectors(&mut self) -> Result<u32, TransportError> {
        self.connection.vectors()
    }

    fn set_vectors(&mut self, fds: &[BorrowedFd<'_>]) -> Result<(), TransportError> {
        self.connection.set_vectors(fds)
    }

    fn disable_vectors(&mut self) -> Result<(), TransportError> {
        self.connection.disable_vectors()
    }

    fn reset(&mut self) -> Result<(), TransportError> {
        self.connection.reset()
    }

    fn check(&mut self) -> Result<(), TransportError> {
        self.connection.check()
    }
}

/// The controller may hear of it with the next one: until then its buffer is nobody else's.
#[test]
fn a_command_that_the_controller_is_not_told_of_is_in_flight() {
    let rig = Rig::new();
    disk(&rig, "d", "1M", "memory");
    let forgets = Arc::new(AtomicBool::new(false));
    let transport = Forgetful { connection: connect(&rig, "d"), forgets: Arc::clone(&forgets) };
    let place = "ffff:ff:1f.7".parse().unwrap();
    let volume = NvmeVolume::over("d", &place, transport, Patience::default()).unwrap();
    let whole: Arc<dyn Volume> = Arc::<NvmeVolume>::clone(&volume);
    let mut harness = SyncHarness::new(7, false);
    let mut bench = Bench::new(&mut harness, whole, 7);
    assert_eq!(bench.write(0, &[0xaa; 32 * 512]), Ok(()));
    forgets.store(true, Ordering::Relaxed);
    let erase = |lba| Job::new(Operation::WriteZeroes { fua: false, deallocate: false }, lba, 8);
    assert_eq!(run(&volume, &[erase(8), erase(16)]), [Ok(()); 2]);
    assert!(!forgets.load(Ordering::Relaxed), "one was forgotten");
    assert_eq!(bench.read(0, 32), [[0xaa; 8 * 512], [0; 8 * 512], [0; 8 * 512], [0xaa; 8 * 512]].concat());
}

#[test]
fn a_disk_that_goes_fails_its_requests_and_others_go_on() {
    let (mut rig, other) = (Rig::new(), Rig::new());
    disk(&rig, "d", "1M", "memory");
    disk(&other, "e", "1M", "memory");
    let patience = Patience { answer: Duration::from_secs(5), ..Patience::default() };
    let (volume, stays) = (over(&rig, "d", patience), over(&other, "e", patience));
    assert_eq!((run(&volume, &[zeroes()]), run(&stays, &[zeroes()])), (vec![Ok(())], vec![Ok(())]));
    rig.stop();
    // In flight, or begun, when that is noticed.
    let gone = Err(BlockError::WriteFault { errno: 19 });
    assert_eq!(run(&volume, &[zeroes(), zeroes()]), [gone, gone]);
    assert_eq!(run(&stays, &[zeroes()]), [Ok(())]);
    // It is back: another volume has it.
    rig.start();
    if rig.devices().is_empty() {
        disk(&rig, "d", "1M", "memory");
    }
    assert_eq!(run(&over(&rig, "d", patience), &[zeroes()]), [Ok(())]);
    assert_eq!(run(&volume, &[zeroes()]), [gone], "and this one has not");
}
