//! What a host finds when its controller fails, and that it goes on: fatal status, commands and aborts that do not end.

mod scripted;

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use millrace_block::Lba;
use millrace_driver::{
    Command, Controller, DmaBuffer, DriverError, Namespace, Options, QueueError, QueueOptions, QueuePair,
    spec::{CommandId, Cqe, NamespaceId, Status},
};

use self::scripted::{Script, Scripted};

/// A host of a scripted controller. What is waited for in vain is waited for shortly.
struct Host {
    script: Arc<Script>,
    controller: Controller,
    namespace: Namespace,
    queue: QueuePair,
    buffer: DmaBuffer,
}

impl Host {
    fn new() -> Self {
        let script = Arc::<Script>::default();
        let options = Options { timeout: Duration::from_millis(200), memory_size: 4 << 20, ..Options::default() };
        let mut controller = Controller::attach(Scripted::new(&script), &options).unwrap();
        controller.start().unwrap();
        let namespace = controller.namespace(NamespaceId(1)).unwrap();
        let queue = controller.create_queue_pair(&QueueOptions::default()).unwrap();
        let buffer = controller.memory().alloc(4096).unwrap();
        Self { script, controller, namespace, queue, buffer }
    }

    fn write(&self) -> Command {
        self.namespace.write(Lba(0), self.buffer.range()).unwrap()
    }

    /// Submits a write and tells the controller of it.
    fn begin(&mut self) -> CommandId {
        let command = self.write();
        let cid = self.queue.submit(&command).unwrap();
        self.queue.ring().unwrap();
        cid
    }

    fn run(&mut self) -> Result<Cqe, QueueError> {
        let command = self.write();
        self.queue.execute(&command)
    }

    /// Disables the controller, brings it up and makes a queue pair anew.
    fn recover(&mut self) -> Result<(), DriverError> {
        self.controller.disable()?;
        self.controller.start()?;
        self.queue = self.controller.create_queue_pair(&QueueOptions::default())?;
        Ok(())
    }
}

fn is_late<T>(result: &Result<T, QueueError>) -> bool {
    matches!(result, Err(QueueError::Timeout { .. }))
}

#[test]
fn a_fatal_error_is_seen_and_a_reset_ends_it() {
    let mut host = Host::new();
    host.run().unwrap();
    host.script.fatal.store(true, Ordering::Relaxed);
    assert!(host.controller.status().unwrap().cfs());
    let cid = host.begin();
    assert!(is_late(&host.queue.wait_for(cid)), "it does nothing any more");
    let error = host.controller.identify_controller().unwrap_err();
    assert!(error.is_timeout(), "{error}");
    host.recover().unwrap();
    assert!(!host.controller.status().unwrap().cfs());
    host.run().unwrap();
    assert_eq!((host.script.enabled.load(Ordering::Relaxed), host.script.done.load(Ordering::Relaxed)), (2, 2));
}

#[test]
fn a_controller_that_stays_fatal_says_so_each_time() {
    let mut host = Host::new();
    host.script.broken.store(true, Ordering::Relaxed);
    for _ in 0..3 {
        let error = host.recover().unwrap_err();
        assert!(matches!(error, DriverError::Fatal { .. }), "{error}");
        assert!(is_late(&host.run()), "a queue of before is dead, and no trap");
    }
    // Not every controller can be disabled, and not every function reset: either ends it.
    host.controller.reset().unwrap();
    host.script.broken.store(false, Ordering::Relaxed);
    host.recover().unwrap();
    host.run().unwrap();
    assert_eq!(host.script.enabled.load(Ordering::Relaxed), 5);
}

#[test]
fn a_command_that_is_late_is_aborted_and_repeated() {
    let mut host = Host::new();
    host.script.holds.store(1, Ordering::Relaxed);
    let cid = host.begin();
    assert!(is_late(&host.queue.wait_for(cid)));
    assert_eq!((host.script.held.load(Ordering::Relaxed), host.queue.in_flight()), (1, 1), "it is still in flight");
    assert!(host.controller.abort(host.queue.id(), cid).unwrap());
    assert_eq!(host.queue.wait_for(cid).unwrap().status().code(), Status::ABORT_REQUESTED);
    assert!(!host.controller.abort(host.queue.id(), cid).unwrap(), "it is over");
    host.run().unwrap();
    let counts = (host.script.aborted.load(Ordering::Relaxed), host.script.done.load(Ordering::Relaxed));
    assert_eq!((counts, host.queue.in_flight()), ((1, 1), 0));
}

#[test]
fn an_abort_that_is_not_answered_leaves_a_reset() {
    let mut host = Host::new();
    host.script.holds.store(1, Ordering::Relaxed);
    host.script.deaf.store(1, Ordering::Relaxed);
    let cid = host.begin();
    assert!(is_late(&host.queue.wait_for(cid)));
    let error = host.controller.abort(host.queue.id(), cid).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    let error = host.controller.abort(host.queue.id(), cid).unwrap_err();
    assert!(matches!(error, DriverError::AbortLimit { most: 1 }), "{error}");
    host.recover().unwrap();
    host.run().unwrap();
    // Those of before the reset count no more.
    assert!(!host.controller.abort(host.queue.id(), cid).unwrap());
}
