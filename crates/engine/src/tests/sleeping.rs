//! Whole shards on their own threads: sleeping and waking.

use std::{
    cell::Cell,
    io::Write,
    ops::Deref,
    os::fd::AsFd,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Sender, channel},
    },
    time::{Duration, Instant},
};

use millrace_block::{ByteOffset, IoOperation};
use millrace_memory::BounceBuffer;

use super::{Gadget, config, shard, sleepy, waits};
use crate::{
    Engine, EngineError, Launch, Outcome, Polling, Readiness, Shard, ShardConfig, ShardContext, ShardHandle, reaper, remote,
};

/// The longest wait before a hang is called one.
const PATIENCE: Duration = Duration::from_secs(180);

/// Waits until it is so.
fn eventually(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !reached() {
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} in vain for: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A shard, and the number by which the system knows its thread.
struct Known {
    handle: ShardHandle,
    thread: i32,
}

impl Known {
    fn new(handle: &ShardHandle) -> Self {
        let thread = handle.call_wait(|_| rustix::thread::gettid().as_raw_pid()).unwrap();
        Self { handle: handle.clone(), thread }
    }

    /// Whether its thread is blocked: one that only waits for a processor is not.
    fn is_blocked(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{}/stat", self.thread)).unwrap();
        // The name may hold anything; the state comes after its closing bracket.
        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('S'))
    }
}

impl Deref for Known {
    type Target = ShardHandle;

    fn deref(&self) -> &ShardHandle {
        &self.handle
    }
}

fn engine_that_sleeps() -> (Engine, Known) {
    let engine = Engine::start(vec![sleepy()]).unwrap();
    let shard = Known::new(&engine.shards()[0]);
    (engine, shard)
}

/// Waits until the shard sleeps without an end of its own: blocked, and still blocked a while later with no turn made since. What it had
/// done by then it has told. Its turns.
fn asleep(shard: &Known) -> u64 {
    let (deadline, mut before) = (Instant::now() + PATIENCE, None);
    loop {
        let now = shard.is_blocked().then(|| shard.stats().turns);
        if let Some(turns) = now.filter(|_| now == before) {
            return turns;
        }
        assert!(Instant::now() < deadline, "the shard never sleeps for long");
        before = now;
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn an_idle_shard_blocks_and_a_message_wakes_it() {
    let (engine, shard) = engine_that_sleeps();
    let turns = asleep(&shard);
    assert_eq!(shard.call_wait(|_| 42).unwrap(), 42);
    assert!(asleep(&shard) > turns);
    let stats = shard.stats();
    assert!(stats.busy < stats.idle, "sleep is not work: {stats:?}");
    engine.stop().unwrap();
    assert!(matches!(shard.call_wait(|_| ()), Err(EngineError::NoAnswer { shard: 0 })));
    assert!(shard.call(|_| ()).is_err());
}

/// Sends messages at a steady pace; returns how often the shard slept after the last one, before it slept for good.
fn sleeps_after_a_steady_pace(shard: &Known) -> u64 {
    for _ in 0..32 {
        shard.call_wait(|_| ()).unwrap();
        std::thread::sleep(Duration::from_millis(2));
    }
    asleep(shard);
    let before = shard.stats().sleeps;
    shard.call_wait(|_| ()).unwrap();
    asleep(shard);
    shard.stats().sleeps - before
}

#[test]
fn a_shard_wakes_up_for_work_that_it_foresees_and_for_none_that_it_does_not() {
    let engine = Engine::start(vec![config()]).unwrap();
    // What else runs here disturbs the pace, so that nothing can be foreseen in some rounds.
    let shard = Known::new(&engine.shards()[0]);
    let woke = (0..200).any(|_| sleeps_after_a_steady_pace(&shard) >= 2);
    assert!(woke, "it slept until the next message came");
    engine.stop().unwrap();
    let (engine, shard) = engine_that_sleeps();
    assert_eq!(sleeps_after_a_steady_pace(&shard), 1);
    engine.stop().unwrap();
}

#[test]
fn messages_are_never_lost_between_looking_and_sleeping() {
    let (engine, shard) = engine_that_sleeps();
    let senders: Vec<_> = (0..2)
        .map(|_| {
            let shard = shard.clone();
            // Each call finds the shard at another point of its way to sleep.
            std::thread::spawn(move || (0..3000).map(|i| shard.call_wait(move |_| i).unwrap()).sum::<i32>())
        })
        .collect();
    for sender in senders {
        assert_eq!(sender.join().unwrap(), 2999 * 3000 / 2);
    }
    // More at once than are handled per look.
    let (done, count) = channel();
    for _ in 0..1000 {
        let done = done.clone();
        shard.call(move |_| done.send(()).unwrap()).unwrap();
    }
    drop(done);
    assert_eq!(count.iter().count(), 1000);
    engine.stop().unwrap();
}

#[test]
fn a_call_that_panics_costs_only_itself() {
    let (engine, shard) = engine_that_sleeps();
    let answer: Result<(), _> = shard.call_wait(|_| panic!("a bug in a call"));
    assert!(matches!(answer, Err(EngineError::NoAnswer { shard: 0 })));
    let own = shard.call_wait(|shard| shard.handle().clone().call_wait(|_| ()));
    assert!(matches!(own, Ok(Err(EngineError::OwnShard { shard: 0 }))));
    engine.stop().unwrap();
}

/// Has a shard hang until what is returned is dropped.
fn hang(shard: &ShardHandle) -> Sender<()> {
    let (release, hung) = channel();
    shard
        .call(move |_| {
            let _ = hung.recv();
        })
        .unwrap();
    release
}

#[test]
fn a_call_that_is_given_up_never_runs_and_the_shard_is_not_waited_for_until_it_is_back() {
    let (engine, shard) = engine_that_sleeps();
    let release = hang(&shard);
    let ran = Arc::new(AtomicU64::new(0));
    let theirs = Arc::clone(&ran);
    let missed = shard.call_within(Duration::ZERO, move |_| theirs.fetch_add(1, Ordering::Relaxed));
    assert!(matches!(missed, Err(EngineError::Silent { shard: 0 })) && shard.is_silent());
    assert_eq!(Arc::strong_count(&ran), 1, "what it held is let go of at once");
    // However long one would have waited.
    assert!(matches!(shard.call_within(PATIENCE, |_| ()), Err(EngineError::Silent { shard: 0 })));
    drop(release);
    shard.call_wait(|_| ()).unwrap();
    assert!(!shard.is_silent());
    assert_eq!((shard.call_within(PATIENCE, |_| 42).unwrap(), ran.load(Ordering::Relaxed)), (42, 0));
    let own = shard.call_wait(|shard| shard.handle().clone().call_within(PATIENCE, |_| ()));
    assert!(matches!(own, Ok(Err(EngineError::OwnShard { shard: 0 }))));
    engine.stop().unwrap();
    assert!(matches!(shard.call_within(PATIENCE, |_| ()), Err(EngineError::NoAnswer { shard: 0 })));
}

#[test]
fn a_shard_that_hangs_does_not_keep_who_stops_it() {
    let (engine, shard) = engine_that_sleeps();
    let release = hang(&shard);
    assert!(shard.call_within(Duration::ZERO, |_| ()).is_err());
    assert!(matches!(engine.stop(), Err(EngineError::Silent { shard: 0 })));
    drop(release);
}

/// Starts a task that reads from a pipe into a bounce buffer; reports what came.
fn read_pipe(shard: &mut Shard, pipe: std::os::fd::OwnedFd, report: Sender<Vec<u8>>) {
    let cx = shard.context();
    let outcome: Outcome<'_, ()> = cx.reserve().unwrap().run(|tcx| {
        Launch::Wait(tcx.scratch.place_future(async move {
            let buffer: BounceBuffer = tcx.buffers.take().await;
            let fd = pipe.as_fd();
            let segments = [buffer.segment(100)];
            let count = tcx.io(IoOperation::Read { fd, offset: ByteOffset(u64::MAX), segments: &segments }).await;
            let mut bytes = vec![0; usize::try_from(count).unwrap()];
            segments[0].read_at(0, &mut bytes);
            report.send(bytes).unwrap();
        }))
    });
    waits(outcome);
}

#[test]
fn a_completion_wakes_a_blocked_shard() {
    let (engine, shard) = engine_that_sleeps();
    for _ in 0..20 {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let (report, result) = channel();
        shard.call(move |shard| read_pipe(shard, reader, report)).unwrap();
        asleep(&shard);
        std::fs::File::from(writer).write_all(b"done").unwrap();
        assert_eq!(result.recv().unwrap(), b"done");
    }
    engine.stop().unwrap();
}

#[test]
fn a_timer_wakes_a_blocked_shard() {
    let (engine, shard) = engine_that_sleeps();
    let (report, result) = channel();
    let start = Instant::now();
    shard
        .call(move |shard| {
            let outcome: Outcome<'_, ()> = shard.context().reserve().unwrap().run(|tcx| {
                Launch::Wait(tcx.scratch.place_future(async move {
                    tcx.io(IoOperation::Sleep(Duration::from_millis(50))).await;
                    report.send(Instant::now()).unwrap();
                }))
            });
            waits(outcome);
        })
        .unwrap();
    assert!(result.recv().unwrap() - start >= Duration::from_millis(50));
    // The shard slept through it instead of spinning.
    assert!(shard.stats().turns < 1000);
    engine.stop().unwrap();
}

#[test]
fn an_answer_wakes_a_blocked_shard() {
    let (engine, shard) = engine_that_sleeps();
    let (report, result) = channel();
    let sender = shard
        .call_wait(move |shard| {
            let cx = shard.context();
            let (sender, answer) = remote::<u32>(&cx);
            let outcome: Outcome<'_, ()> = cx.reserve().unwrap().run(|tcx| {
                Launch::Wait(tcx.scratch.place_future(async move {
                    report.send(answer.await).unwrap();
                }))
            });
            waits(outcome);
            sender
        })
        .unwrap();
    asleep(&shard);
    sender.send(7);
    assert_eq!(result.recv().unwrap(), Some(7));
    engine.stop().unwrap();
}

#[test]
fn a_descriptor_wakes_a_blocked_shard() {
    let (engine, shard) = engine_that_sleeps();
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let (report, result) = channel();
    let key = shard
        .call_wait(move |shard| {
            shard.add_device_with(|cx| {
                cx.register(ours.as_fd(), 3)?;
                let event = Box::new(move |cx: &mut crate::ShardContext<'_>, token| {
                    cx.unregister(token).unwrap();
                    report.send(token).unwrap();
                });
                std::io::Result::Ok(Box::new(Gadget { event, ..Gadget::default() }))
            })
        })
        .unwrap()
        .unwrap();
    asleep(&shard);
    drop(theirs);
    assert_eq!(result.recv().unwrap(), 3);
    asleep(&shard);
    let armed = shard.call_wait(move |shard| shard.with_device(key, |gadget: &mut Gadget, _| gadget.armed.get()));
    assert_eq!(armed.unwrap(), Some(0), "each arm is followed by a disarm");
    engine.stop().unwrap();
}

fn add(shard: &ShardHandle, arm: impl FnMut() -> Readiness + Send + 'static) {
    let mut arm = arm;
    let add = move |shard: &mut Shard| {
        shard.add_device(Box::new(Gadget { arm: Box::new(move |_| arm()), ..Gadget::default() }));
    };
    shard.call_wait(add).unwrap();
}

#[test]
fn one_napping_device_keeps_the_shard_looking() {
    let (engine, shard) = engine_that_sleeps();
    add(&shard, || Readiness::Block);
    asleep(&shard);
    add(&shard, || Readiness::Nap);
    let before = shard.stats();
    eventually("a hundred naps", || shard.stats().sleeps >= before.sleeps + 100);
    engine.stop().unwrap();
}

/// A guest that came once in ten milliseconds may come at any time: nothing but a look tells.
#[test]
fn a_device_that_only_a_look_serves_is_looked_at_while_nothing_is_foreseen_for_long() {
    const PACE: Duration = Duration::from_millis(10);
    let engine = Engine::start(vec![config()]).unwrap();
    let counts = Arc::new([const { AtomicU64::new(0) }; 2]);
    let seen = || counts.each_ref().map(|count| count.load(Ordering::Relaxed));
    let (in_poll, in_arm) = (Arc::clone(&counts), Arc::clone(&counts));
    let add = move |shard: &mut Shard| {
        let mut due = Instant::now();
        let poll = move |_: &mut crate::ShardContext<'_>| {
            let now = Instant::now();
            if now < due {
                return 0;
            }
            due = now + PACE;
            in_poll[0].fetch_add(1, Ordering::Relaxed);
            1
        };
        let arm = move |_: &mut crate::ShardContext<'_>| {
            in_arm[1].fetch_add(1, Ordering::Relaxed);
            Readiness::Nap
        };
        shard.add_device(Box::new(Gadget { poll: Box::new(poll), arm: Box::new(arm), ..Gadget::default() }));
    };
    engine.shards()[0].call_wait(add).unwrap();
    // Until the pace is known.
    eventually("sixty pauses", || seen()[0] >= 60);
    // Others may keep the shard from its processor, in some rounds.
    let mut rounds = Vec::new();
    let is_looked_at = (0..20).any(|_| {
        let before = seen();
        eventually("forty pauses", || seen()[0] >= before[0] + 40);
        let [pauses, looks] = [0, 1].map(|at| seen()[at] - before[at]);
        rounds.push((pauses, looks));
        looks > pauses * 4
    });
    assert!(is_looked_at, "pauses, and looks in them: {rounds:?}");
    engine.stop().unwrap();
}

#[test]
fn a_cold_device_is_asked_before_it_is_polled() {
    let (asked, polled, answer) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
    let mut shard = super::shard();
    let gadget = {
        let (asked, polled, answers, works) =
            (Rc::clone(&asked), Rc::clone(&polled), Rc::clone(&answer), Rc::clone(&answer));
        Gadget {
            arm: Box::new(|_| Readiness::Nap),
            may_have_work: Box::new(move || {
                asked.set(asked.get() + 1);
                answers.get()
            }),
            poll: Box::new(move |_| {
                polled.set(polled.get() + 1);
                usize::from(works.get())
            }),
            ..Gadget::default()
        }
    };
    shard.add_device(Box::new(gadget));
    // Until it is cold.
    while asked.get() == 0 {
        shard.poll();
    }
    let before = polled.get();
    while asked.get() < 1501 {
        shard.poll();
    }
    assert_eq!(polled.get() - before, 100, "one look of 16 is a whole turn");
    answer.set(true);
    let before = asked.get();
    while asked.get() == before {
        shard.poll();
    }
    let (asked_before, polled_before) = (asked.get(), polled.get());
    (0..100).for_each(|_| _ = shard.poll());
    assert_eq!(asked.get(), asked_before, "it had work, and is looked at on every pass");
    assert_eq!(polled.get(), polled_before + 100);
}

#[test]
fn a_busy_device_keeps_the_shard_awake() {
    let (engine, shard) = engine_that_sleeps();
    add(&shard, || Readiness::Busy);
    let sleeps = shard.call_wait(|shard| shard.core_for_tests().counters.sleeps.get()).unwrap();
    let before = shard.stats().turns;
    eventually("many turns", || shard.stats().turns >= before + 10_000);
    assert_eq!(shard.call_wait(|shard| shard.core_for_tests().counters.sleeps.get()).unwrap(), sleeps);
    engine.stop().unwrap();
}

/// A guest that waits for a slow disk has work that cannot be begun: its device is busy, and does nothing.
#[test]
fn a_busy_device_that_does_nothing_does_not_keep_the_shard_from_hearing() {
    let mut shard = Shard::new(&sleepy()).unwrap();
    shard.add_device(Box::new(Gadget { arm: Box::new(|_| Readiness::Busy), ..Gadget::default() }));
    let heard = Arc::new(AtomicU64::new(0));
    for call in 1..=50 {
        let counter = Arc::clone(&heard);
        shard.handle().call(move |_| _ = counter.fetch_add(1, Ordering::Relaxed)).unwrap();
        // As the loop of a shard does that has found nothing: some passes, and a rest.
        let turns = (0..2000).find(|_| {
            (0..16).for_each(|_| _ = shard.poll());
            shard.rest_for_tests();
            heard.load(Ordering::Relaxed) == call
        });
        assert!(turns.is_some(), "call {call} is not heard while the device is busy");
    }
}

/// Nothing else wakes the shard: a shard that sleeps on makes this test hang.
#[test]
fn operations_that_the_kernel_refuses_are_offered_again() {
    let (engine, shard) = engine_that_sleeps();
    let (report, result) = channel();
    let start = move |shard: &mut Shard| {
        // More than the passes of one message take before the shard sleeps.
        shard.core_for_tests().ring.refuse(50);
        let file = tempfile::tempfile().unwrap();
        let outcome: Outcome<'_, ()> = shard.context().reserve().unwrap().run(|tcx| {
            Launch::Wait(tcx.scratch.place_future(async move {
                report.send(tcx.io(IoOperation::DataSync { fd: file.as_fd() }).await).unwrap();
            }))
        });
        waits(outcome);
    };
    shard.call_wait(start).unwrap();
    assert_eq!(result.recv().unwrap(), 0);
    assert_eq!(shard.call_wait(|shard| shard.core_for_tests().ring.refusals()).unwrap(), 0);
    engine.stop().unwrap();
}

#[test]
fn a_device_that_asked_for_an_instant_is_polled_then() {
    let (engine, shard) = engine_that_sleeps();
    let (report, result) = channel();
    let at = Instant::now() + Duration::from_millis(60);
    add(&shard, move || {
        if Instant::now() < at {
            return Readiness::Until(at);
        }
        report.send(()).ok();
        Readiness::Block
    });
    result.recv().unwrap();
    // The shard slept until then instead of spinning.
    assert!(shard.stats().turns < 1000);
    engine.stop().unwrap();
}

#[test]
fn a_panic_while_arming_fences_and_the_shard_goes_on() {
    let (engine, shard) = engine_that_sleeps();
    add(&shard, || panic!("a bug while arming"));
    asleep(&shard);
    let fenced = shard.call_wait(|shard| {
        let key = shard.devices().next().unwrap();
        shard.is_fenced(key)
    });
    assert_eq!(fenced.unwrap(), Some(true));
    engine.stop().unwrap();
}

#[test]
fn spinning_shards_do_not_sleep_and_still_hear() {
    let config = ShardConfig { polling: Polling::Spin, ..config() };
    let engine = Engine::start(vec![config, ShardConfig { index: 1, ..sleepy() }]).unwrap();
    let shards = engine.shards();
    assert_eq!(shards.iter().map(|shard| shard.call_wait(|s| s.handle().index()).unwrap()).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(shards[0].stats().sleeps, 0);
    shards[0].call_wait(|shard| shard.set_polling_for_tests(sleepy().polling)).unwrap();
    asleep(&Known::new(&shards[0]));
    engine.stop().unwrap();
}

#[test]
fn a_shard_that_cannot_start_says_why() {
    let config = ShardConfig { core: Some(1000), ..config() };
    let error = Engine::start(vec![sleepy(), config]).unwrap_err();
    assert!(matches!(error, EngineError::Pin { core: 1000, .. }), "{error}");
    let config = ShardConfig { core: Some(0), ..sleepy() };
    let engine = Engine::start(vec![config]).unwrap();
    let set = engine.shards()[0].call_wait(|_| rustix::thread::sched_getaffinity(None).unwrap()).unwrap();
    assert_eq!((set.count(), set.is_set(0)), (1, true));
}

#[test]
fn slow_drops_happen_elsewhere() {
    struct Corpse(Sender<std::thread::ThreadId>);
    impl Drop for Corpse {
        fn drop(&mut self) {
            self.0.send(std::thread::current().id()).unwrap();
        }
    }
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("a bug while dropping");
        }
    }
    let (report, thread) = channel();
    reaper::drop_later(Box::new(Bomb));
    reaper::drop_later(Box::new(Corpse(report)));
    assert_ne!(thread.recv().unwrap(), std::thread::current().id());
}

#[test]
fn load_is_visible() {
    let (engine, shard) = engine_that_sleeps();
    let add = |shard: &mut Shard| {
        let poll = Box::new(|cx: &mut crate::ShardContext<'_>| {
            cx.count_commands(2);
            1
        });
        shard.add_device(Box::new(Gadget { poll, ..Gadget::default() }))
    };
    let before = shard.stats();
    let key = shard.call_wait(add).unwrap();
    eventually("some work", || shard.stats().busy >= Duration::from_millis(5));
    let after = shard.stats();
    assert!(after.commands >= 2 && after.turns > before.turns && after.devices == 1);
    assert!(after.busy_permille_since(&before) > 0);
    shard.call_wait(move |shard| shard.remove_device(key).is_some()).unwrap();
    asleep(&shard);
    assert_eq!(shard.stats().devices, 0);
    engine.stop().unwrap();
}

#[test]
fn a_pause_that_is_met_awake_is_as_long_as_it_was() {
    let mut shard = shard();
    let takes = Duration::from_micros(50);
    let poll = move |_: &mut ShardContext<'_>| {
        let end = Instant::now() + takes;
        while Instant::now() < end {}
        1
    };
    shard.add_device(Box::new(Gadget { poll: Box::new(poll), ..Gadget::default() }));
    let pause = Duration::from_millis(100);
    let learnt = (0..16).map(|_| shard.work_after_for_tests(pause)).last().flatten();
    assert!(learnt.is_some_and(|learnt| learnt >= pause + takes), "{learnt:?}");
}
