//! Commands for who shares or makes namespaces, against the daemon's own controllers.

use std::{thread, time::Duration};

use millrace_block::{BlockCount, Lba};
use millrace_driver::{
    Command, CommandError, Controller, DmaBuffer, DriverError, NewNamespace, Options, QueueError, QueueOptions, QueuePair,
    Reservation, Sanitize, SecurityProtocol,
    spec::{
        NamespaceId, Status,
        admin::{CommitAction, SanitizeAction, SelfTest},
        reservation::ReservationType,
    },
};
use millrace_tests::Daemon;

/// A host at one device of the daemon.
struct Host {
    controller: Controller,
    queue: QueuePair,
    buffer: DmaBuffer,
}

impl Host {
    fn at(daemon: &Daemon, device: &str) -> Self {
        let options = Options { timeout: Duration::from_secs(30), ..Options::default() };
        let mut controller = Controller::connect(&daemon.socket(device), &options).expect("the device");
        controller.start().expect("its controller");
        let mut identifier = [0; 16];
        identifier[..device.len()].copy_from_slice(device.as_bytes());
        controller.set_host_identifier(identifier).expect("a host identifier");
        let queue = controller.create_queue_pair(&QueueOptions::default()).expect("a queue pair");
        let buffer = controller.memory().alloc(4096).expect("memory");
        Self { controller, queue, buffer }
    }

    fn run(&mut self, make: impl FnOnce(&DmaBuffer) -> Result<Command, CommandError>) -> Result<(), Status> {
        let command = make(&self.buffer).expect("a command that can be made");
        self.queue.execute(&command).map(drop).map_err(|error| refused(&error))
    }
}

fn refused(error: &QueueError) -> Status {
    error.status().unwrap_or_else(|| panic!("{error}")).code()
}

/// Two hosts agree who writes: one takes part, holds the namespace, is preempted, and takes part no more.
#[test]
fn two_hosts_reserve_a_namespace() {
    const KIND: ReservationType = ReservationType::EXCLUSIVE_ACCESS_REGISTRANTS_ONLY;
    let daemon = Daemon::start();
    daemon.run(&["volume", "create", "v", "--backend", "memory", "--size", "1M"]);
    for device in ["one", "two"] {
        daemon.run(&["device", "create", device, "--nvme"]);
        daemon.run(&["device", "attach", device, "v"]);
    }
    let [mut one, mut two] = ["one", "two"].map(|device| Host::at(&daemon, device));
    let ns = one.controller.namespace(NamespaceId(1)).expect("the namespace");
    let conflict = Err(Status::RESERVATION_CONFLICT);

    assert_eq!(one.run(|buffer| ns.acquire(KIND, 7, buffer)), conflict, "who is not registered");
    one.run(|buffer| ns.register(7, buffer)).unwrap();
    one.run(|buffer| ns.replace_key(7, 8, buffer)).unwrap();
    assert_eq!(one.run(|buffer| ns.acquire(KIND, 7, buffer)), conflict, "by the key before");
    one.run(|buffer| ns.acquire(KIND, 8, buffer)).unwrap();
    one.run(|buffer| ns.write(Lba(0), buffer.slice(0, 512))).unwrap();
    assert_eq!(two.run(|buffer| ns.read(Lba(0), buffer.slice(0, 512))), conflict);

    two.run(|buffer| ns.register(9, buffer)).unwrap();
    two.run(|buffer| ns.read(Lba(0), buffer.slice(0, 512))).unwrap();
    two.run(|buffer| ns.report_reservation(buffer)).unwrap();
    let report = Reservation::read(&two.buffer);
    let holders: Vec<(u64, bool)> = report.registrants.iter().map(|host| (host.rkey, host.rcsts.holds())).collect();
    assert_eq!((report.kind, report.persists, &holders[..]), (KIND, false, &[(8, true), (9, false)][..]));
    assert!(report.registrants.iter().map(|host| &host.hostid[..3]).eq([b"one", b"two"]));

    two.run(|buffer| ns.preempt(KIND, (9, 8), false, buffer)).unwrap();
    assert_eq!(one.run(|buffer| ns.write(Lba(0), buffer.slice(0, 512))), conflict, "it is registered no more");
    two.run(|buffer| ns.release(KIND, 9, buffer)).unwrap();
    one.run(|buffer| ns.write(Lba(0), buffer.slice(0, 512))).unwrap();
    two.run(|buffer| ns.unregister(9, buffer)).unwrap();
    two.run(|buffer| ns.register(9, buffer)).unwrap();
    two.run(|buffer| ns.clear_reservation(9, buffer)).unwrap();
    two.run(|buffer| ns.report_reservation(buffer)).unwrap();
    let report = Reservation::read(&two.buffer);
    assert_eq!((report.kind, report.registrants.len()), (ReservationType::NONE, 0));
    assert!(report.generation > 0);

    let bad = |made: Result<Command, CommandError>| matches!(made, Err(CommandError::BadReservation(_)));
    assert!(bad(ns.register(0, &one.buffer)) && bad(ns.acquire(ReservationType(7), 8, &one.buffer)));
    assert!(bad(ns.acquire(ReservationType::NONE, 8, &one.buffer)) && bad(ns.release(KIND, 0, &one.buffer)));
    drop((one, two));
    daemon.finish();
}

/// A host makes a namespace, uses it and deletes it; what it may not have it is not given.
#[test]
fn a_host_makes_a_namespace() {
    let daemon = Daemon::start();
    daemon.run(&["device", "create", "d", "--nvme", "--ns-quota", "1M"]);
    let mut host = Host::at(&daemon, "d");
    let id = host.controller.identity().expect("it was started").cntlid;
    let nsid = host.controller.create_namespace(&NewNamespace { blocks: 128, ..NewNamespace::default() }).unwrap();
    assert!(matches!(host.controller.namespace(nsid), Err(DriverError::BadNamespace { .. })), "nobody has it yet");
    host.controller.attach_namespace(nsid, &[id]).unwrap();
    let ns = host.controller.namespace(nsid).unwrap();
    assert_eq!((ns.block_size(), ns.size()), (512, BlockCount(128)));
    host.run(|buffer| ns.write(Lba(127), buffer.slice(0, 512))).unwrap();
    host.run(|_| ns.verify(Lba(120), BlockCount(8))).unwrap();
    host.run(|_| ns.write_uncorrectable(Lba(121), BlockCount(2))).unwrap();
    assert_eq!(host.run(|_| ns.verify(Lba(120), BlockCount(8))), Err(Status::UNRECOVERED_READ_ERROR));
    assert_eq!(host.run(|buffer| ns.read(Lba(122), buffer.slice(0, 512))), Err(Status::UNRECOVERED_READ_ERROR));
    host.run(|buffer| ns.write(Lba(121), buffer.slice(0, 1024))).unwrap();
    host.run(|_| ns.verify(Lba(120), BlockCount(8))).unwrap();
    assert_eq!(host.controller.zeroes_limit().unwrap(), u64::MAX, "the controller says that there is none");

    let status = |result: Result<(), DriverError>| match result.unwrap_err() {
        DriverError::Queue(error) => refused(&error),
        other => panic!("{other}"),
    };
    assert_eq!(status(host.controller.attach_namespace(nsid, &[id])), Status::NAMESPACE_ALREADY_ATTACHED);
    host.controller.detach_namespace(nsid, &[id]).unwrap();
    assert_eq!(status(host.controller.detach_namespace(nsid, &[id])), Status::NAMESPACE_NOT_ATTACHED);
    let large = NewNamespace { blocks: 1 << 20, ..NewNamespace::default() };
    assert_eq!(status(host.controller.create_namespace(&large).map(drop)), Status::NAMESPACE_INSUFFICIENT_CAPACITY);
    host.controller.delete_namespace(nsid).unwrap();
    assert_eq!(host.controller.active_namespaces().unwrap(), []);

    // What no command is made for.
    let cannot =
        |result: Result<(), DriverError>| matches!(result, Err(DriverError::Command(_) | DriverError::NotOffered(_)));
    assert!(cannot(host.controller.create_namespace(&NewNamespace::default()).map(drop)), "without blocks");
    assert!(cannot(host.controller.create_namespace(&NewNamespace { format: 16, ..large }).map(drop)), "its format");
    assert!(cannot(host.controller.delete_namespace(NamespaceId::BROADCAST)), "all of them");
    assert!(cannot(host.controller.attach_namespace(nsid, &[])), "to nobody");
    drop(host);
    daemon.finish();
}

/// Two hosts could agree by it: one block is written where another is found, in one command of two.
#[test]
fn a_host_compares_and_writes_at_once() {
    let daemon = Daemon::start();
    daemon.run(&["volume", "create", "v", "--backend", "memory", "--size", "1M"]);
    daemon.run(&["device", "create", "d", "--nvme"]);
    daemon.run(&["device", "attach", "d", "v"]);
    let Host { mut controller, mut queue, buffer } = Host::at(&daemon, "d");
    let ns = controller.namespace(NamespaceId(1)).unwrap();
    let (expected, new) = (buffer.slice(0, 512), buffer.slice(512, 512));
    buffer.write_at(512, &[7; 512]);
    let swap = controller.compare_and_write(&ns, Lba(5), expected, new).unwrap();
    assert!(queue.execute_fused(&swap).unwrap(), "zeroes were there");
    assert!(!queue.execute_fused(&swap).unwrap(), "and are no more");
    // More than one round of the queue, so that a pair lies at its end and its start.
    buffer.write_at(0, &[7; 512]);
    queue.execute(&ns.flush()).unwrap();
    for _ in 0..queue.entries() {
        assert!(queue.execute_fused(&swap).unwrap());
    }
    queue.execute(&ns.read(Lba(5), buffer.slice(1024, 512)).unwrap()).unwrap();
    assert_eq!(buffer.read_vec(1024, 512), [7; 512]);
    let refused = controller.compare_and_write(&ns, Lba(ns.size().0), expected, new).unwrap_err();
    assert!(matches!(refused, DriverError::Command(CommandError::OutOfRange { .. })), "{refused}");

    // What the controller has not is not sent.
    let not_offered = |result: Result<(), DriverError>| matches!(result, Err(DriverError::NotOffered(_)));
    assert!(not_offered(controller.download_firmware(&[0; 4096])));
    assert!(not_offered(controller.commit_firmware(1, CommitAction::ACTIVATE).map(drop)));
    let protocol = SecurityProtocol { id: 1, ..SecurityProtocol::default() };
    assert!(not_offered(controller.security_send(NamespaceId::NONE, protocol, &[0; 512])));
    assert!(not_offered(controller.security_receive(NamespaceId::NONE, protocol, 512).map(drop)));
    let erase = Sanitize { action: SanitizeAction::BLOCK_ERASE, ..Sanitize::default() };
    assert!(not_offered(controller.sanitize(&erase)));
    assert!(not_offered(controller.self_test(NamespaceId::NONE, SelfTest::SHORT)));
    drop((controller, queue, buffer));
    daemon.finish();
}

/// Far more than a second's worth of commands wait behind a cap when their queue is deleted, their controller disabled, and their host gone:
/// none of this waits for them.
#[test]
fn a_host_leaves_commands_that_are_held_back() {
    let daemon = Daemon::start();
    daemon.run(&["volume", "create", "v", "--size", "1M", "--stack", "throttle(iops=1, burst=1s) | memory"]);
    daemon.run(&["device", "create", "d", "--nvme"]);
    daemon.run(&["device", "attach", "d", "v"]);
    let flood = |queue: &mut QueuePair, host: &mut Controller, buffer: &DmaBuffer| {
        let ns = host.namespace(NamespaceId(1)).unwrap();
        for at in 0..100 {
            queue.submit(&ns.read(Lba(at), buffer.slice(0, 512)).unwrap()).unwrap();
        }
        queue.ring().unwrap();
        // They have arrived when the first of them is done.
        while queue.next_completion().unwrap().is_none() {
            thread::sleep(Duration::from_millis(1));
        }
    };
    let Host { mut controller, mut queue, buffer } = Host::at(&daemon, "d");
    flood(&mut queue, &mut controller, &buffer);
    controller.delete_queue_pair(queue).expect("within the timeout");

    let mut queue = controller.create_queue_pair(&QueueOptions::default()).unwrap();
    flood(&mut queue, &mut controller, &buffer);
    controller.disable().expect("within CAP.TO");
    drop(queue);

    controller.start().unwrap();
    let mut queue = controller.create_queue_pair(&QueueOptions::default()).unwrap();
    flood(&mut queue, &mut controller, &buffer);
    drop((controller, queue, buffer));

    let mut host = Host::at(&daemon, "d");
    let ns = host.controller.namespace(NamespaceId(1)).unwrap();
    host.run(|buffer| ns.read(Lba(0), buffer.slice(0, 512))).unwrap();
    drop(host);
    daemon.finish();
}
