//! What a volume's requests see of a controller that fails: nothing while it can be brought up again, errors when it is given up.

#[path = "../../driver/tests/scripted/mod.rs"]
mod scripted;

use std::{
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{Receiver, channel},
    },
    thread,
    time::{Duration, Instant},
};

use millrace_backends::{NvmeVolume, Patience};
use millrace_block::{
    BlockError, Operation, Volume,
    conformance::{Harness, Job, SyncHarness},
};

use self::scripted::{Script, Scripted};

/// How long anything may take, however busy the machine is.
const LIMIT: Duration = Duration::from_secs(60);
/// What never passes here.
const FOR_EVER: Duration = Duration::from_secs(3600);

/// A volume on a scripted controller.
struct Bench {
    script: Arc<Script>,
    volume: Arc<NvmeVolume>,
}

type Results = Vec<Result<(), BlockError>>;

impl Bench {
    fn new(command: Duration, answer: Duration) -> Self {
        let script = Arc::<Script>::default();
        let (place, patience) = ("ffff:ff:1f.7".parse().unwrap(), Patience { command, answer });
        let volume = NvmeVolume::over("d", &place, Scripted::new(&script), patience).unwrap();
        Self { script, volume }
    }

    /// So many writes at once, on a thread of their own: one that hangs is no end of the test.
    fn write(&self, count: usize) -> Receiver<Results> {
        let (sender, receiver) = channel();
        let volume: Arc<dyn Volume> = Arc::<NvmeVolume>::clone(&self.volume);
        thread::spawn(move || {
            let jobs = vec![Job::new(Operation::WriteZeroes { fua: false, deallocate: false }, 0, 8); count];
            let _ = sender.send(SyncHarness::new(7, false).run(&volume, &jobs));
        });
        receiver
    }

    /// Waits until so many commands do not end by themselves.
    fn held(&self, count: usize) {
        let start = Instant::now();
        while self.script.held.load(Ordering::Relaxed) < count {
            assert!(start.elapsed() < LIMIT, "the commands do not come");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn done(&self) -> usize {
        self.script.done.load(Ordering::Relaxed)
    }
}

fn results(receiver: &Receiver<Results>) -> Results {
    receiver.recv_timeout(LIMIT).expect("requests end")
}

#[test]
fn a_controller_with_a_fatal_error_is_reset_and_requests_go_on() {
    let bench = Bench::new(FOR_EVER, FOR_EVER);
    bench.script.holds.store(2, Ordering::Relaxed);
    let writes = bench.write(3);
    bench.held(2);
    bench.script.fatal.store(true, Ordering::Relaxed);
    assert_eq!(results(&writes), [Ok(()); 3], "what was in flight is begun again");
    assert_eq!((bench.volume.resets(), bench.volume.aborts()), (1, 0));
    assert_eq!(bench.script.enabled.load(Ordering::Relaxed), 2);
    assert_eq!(results(&bench.write(1)), [Ok(())]);
    assert!(bench.done() >= 4);
}

#[test]
fn a_controller_that_three_resets_do_not_help_is_given_up_and_requests_fail() {
    let bench = Bench::new(FOR_EVER, FOR_EVER);
    assert_eq!(results(&bench.write(1)), [Ok(())]);
    bench.script.holds.store(2, Ordering::Relaxed);
    let writes = bench.write(2);
    bench.held(2);
    bench.script.broken.store(true, Ordering::Relaxed);
    let gone = Err(BlockError::WriteFault { errno: libc::ENODEV });
    assert_eq!(results(&writes), [gone, gone]);
    assert_eq!(bench.script.enabled.load(Ordering::Relaxed), 1 + 3, "once, and three times in vain");
    // It is not tried again, whatever becomes of the controller.
    bench.script.broken.store(false, Ordering::Relaxed);
    assert_eq!(results(&bench.write(1)), [gone]);
    assert_eq!((bench.script.enabled.load(Ordering::Relaxed), bench.done()), (4, 1));
}

#[test]
fn a_command_that_takes_too_long_is_aborted_and_begun_again() {
    let bench = Bench::new(Duration::from_millis(50), FOR_EVER);
    bench.script.holds.store(1, Ordering::Relaxed);
    assert_eq!(results(&bench.write(1)), [Ok(())]);
    assert_eq!((bench.script.held.load(Ordering::Relaxed), bench.script.aborted.load(Ordering::Relaxed)), (1, 1));
    assert_eq!((bench.done(), bench.volume.resets()), (1, 0));
    assert!(bench.volume.aborts() > 0);
}

#[test]
fn a_request_whose_commands_are_always_aborted_fails_in_the_end() {
    let bench = Bench::new(Duration::from_millis(1), FOR_EVER);
    bench.script.holds.store(usize::MAX, Ordering::Relaxed);
    assert_eq!(results(&bench.write(1)), [Err(BlockError::WriteFault { errno: libc::EIO })]);
    assert!(bench.script.aborted.load(Ordering::Relaxed) > 1, "it was begun again before");
    assert_eq!(bench.volume.resets(), 0);
    // The controller is none the worse for it.
    bench.script.holds.store(0, Ordering::Relaxed);
    assert_eq!(results(&bench.write(1)), [Ok(())]);
}

#[test]
fn a_controller_that_does_not_answer_an_abort_is_reset() {
    let bench = Bench::new(Duration::from_millis(50), Duration::from_millis(500));
    bench.script.holds.store(1, Ordering::Relaxed);
    bench.script.deaf.store(1, Ordering::Relaxed);
    assert_eq!(results(&bench.write(1)), [Ok(())]);
    assert_eq!(bench.script.aborted.load(Ordering::Relaxed), 0);
    assert!(bench.volume.resets() > 0 && bench.script.enabled.load(Ordering::Relaxed) > 1);
}
