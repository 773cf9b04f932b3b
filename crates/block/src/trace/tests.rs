//! The ring under two threads, the words of an event, and whose a visit is.

use std::{sync::atomic::AtomicBool, task::Waker};

use millrace_memory::BufferPool;

use super::*;
use crate::{
    BlockCount, BlockError, BlockSize, Geometry, IoOperation, Operation, Request, Scratch, ShardIo, Step, Switch,
    TaskContext, Usage, Volume, VolumeError, yield_now,
};

fn event(number: u64) -> Event {
    Event {
        time: number,
        lba: number.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        span: number as u32,
        parent: !(number as u32),
        count: (number >> 3) as u32,
        key: Key { device: number as u16, queue: (number >> 1) as u16, command: (number >> 2) as u16 },
        kind: EventKind::Left,
        operation: EventOperation(number as u8),
        status: (number >> 4) as u16,
        place: (number >> 5) as u16,
    }
}

fn drained(ring: &Ring) -> Vec<Event> {
    let mut events = Vec::new();
    while ring.drain(7, |words| events.push(Event::from_words(words).expect("a known kind"))) > 0 {}
    events
}

#[test]
fn an_event_is_its_words() {
    for number in [0, 1, 0xffff, 0xdead_beef_0123_4567, u64::MAX] {
        assert_eq!(Event::from_words(event(number).to_words()), Some(event(number)));
    }
    let mut words = event(1).to_words();
    words[4] |= 0xff << 16;
    assert_eq!(Event::from_words(words), None, "a kind that does not exist");
}

#[test]
fn what_finds_no_room_is_counted() {
    let ring = Ring::new(8);
    (0..20).for_each(|number| ring.push(&event(number)));
    assert_eq!(ring.dropped(), 12);
    assert_eq!(drained(&ring), (0..8).map(event).collect::<Vec<_>>(), "the first ones are kept");
    ring.push(&event(99));
    let lost = |time, count| Event { time, count, kind: EventKind::Lost, ..Event::default() };
    assert_eq!((drained(&ring), ring.dropped()), (vec![lost(99, 12), event(99)], 12), "where they are missing is told");
    ring.push(&event(100));
    assert_eq!(drained(&ring), [event(100)], "once");
    // Room for one is none after a gap.
    (0..9).for_each(|number| ring.push(&event(number)));
    ring.drain(1, |_| ());
    ring.push(&event(9));
    ring.drain(1, |_| ());
    ring.push(&event(10));
    let expected: Vec<_> = (2..8).map(event).chain([lost(10, 2), event(10)]).collect();
    assert_eq!((drained(&ring), ring.dropped()), (expected, 14));
}

#[test]
fn a_reader_gets_what_a_writer_wrote_in_order() {
    const ALL: u64 = 200_000;
    let (ring, done) = (Arc::new(Ring::new(64)), Arc::new(AtomicBool::new(false)));
    let writer = std::thread::spawn({
        let (ring, done) = (Arc::clone(&ring), Arc::clone(&done));
        move || {
            (0..ALL).for_each(|number| ring.push(&event(number)));
            done.store(true, std::sync::atomic::Ordering::Release);
        }
    });
    let (mut seen, mut last) = (0, None);
    loop {
        let was_done = done.load(std::sync::atomic::Ordering::Acquire);
        for event in drained(&ring).into_iter().filter(|event| event.kind != EventKind::Lost) {
            assert_eq!(event, self::event(event.time), "torn");
            assert!(last < Some(event.time), "out of order");
            (seen, last) = (seen + 1, Some(event.time));
        }
        if was_done {
            break;
        }
    }
    writer.join().expect("the writer");
    assert_eq!(seen + ring.dropped(), ALL);
    assert!(seen >= 64);
}

/// A volume that waits some polls, and asks the volume below twice.
struct Node {
    below: Option<Arc<dyn Volume>>,
    waits: u32,
}

impl Node {
    async fn run(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        for _ in 0..self.waits {
            yield_now().await;
        }
        let Some(below) = &self.below else { return Ok(()) };
        for half in 0..2 {
            let lba = Lba(request.lba.0 * 2 + half);
            below.submit(cx, Request { lba, count: BlockCount(1), ..request }).await?;
        }
        Ok(())
    }
}

impl Volume for Node {
    fn name(&self) -> &'static str {
        "node"
    }

    fn geometry(&self) -> Geometry {
        let (block_size, blocks) = (BlockSize::B512, BlockCount(1 << 20));
        Geometry { block_size, blocks, read_only: false, volatile_cache: false, deallocate: false }
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        if self.below.is_none() && self.waits == 0 {
            let fails = request.lba.0 >= 1000;
            return Step::Done(if fails { Err(BlockError::NoSpace) } else { Ok(()) });
        }
        Step::Wait(cx.scratch.place_future(self.run(cx, request)))
    }

    fn scratch_bytes(&self) -> usize {
        4096
    }

    fn resize(&self, _: BlockCount) -> Result<(), VolumeError> {
        Ok(())
    }

    fn format(&self, _: BlockSize) -> Result<(), VolumeError> {
        Ok(())
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}

struct NoIo;

// SAFETY: it starts nothing.
unsafe impl ShardIo for NoIo {
    unsafe fn poll_start(&self, _: &IoOperation<'_>, _: &mut Context<'_>) -> Poll<u32> {
        Poll::Pending
    }

    fn poll_completion(&self, _: u32, _: &mut Context<'_>) -> Poll<i32> {
        Poll::Pending
    }
}

/// Puts a request through a volume on behalf of `under`, polling it when nobody's name is on the thread.
fn request(volume: &dyn Volume, under: impl FnOnce() -> Option<Under>, lba: u64) -> Result<(), BlockError> {
    let scratch = Scratch::new(volume.scratch_bytes());
    let buffers = BufferPool::new(1).expect("buffers");
    let cx = TaskContext::new(&scratch, &buffers, &NoIo);
    let request = Request { operation: Operation::Read, lba: Lba(lba), count: BlockCount(1), segments: &[] };
    let guard = under();
    let started = carry(volume.submit(cx, request));
    drop(guard);
    let mut started = Box::pin(started);
    for _ in 0..100 {
        if let Poll::Ready(result) = started.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return result;
        }
    }
    panic!("the request does not end");
}

/// A switch over a node that waits, over a tap of one that does not.
fn stack(waits: u32) -> (Arc<Switch>, Arc<Tap>) {
    let leaf = Tap::new(Arc::new(Node { below: None, waits: 0 }));
    let top = Node { below: Some(Arc::<Tap>::clone(&leaf)), waits };
    (Switch::new("volume", Arc::new(top)), leaf)
}

#[test]
fn visits_are_their_requests_and_lie_within_each_other() {
    let (switch, leaf) = stack(3);
    let ring = Arc::new(Ring::new(64));
    install(Some(Arc::clone(&ring)));
    let site = Site::new(7, None);
    assert_eq!(request(&*switch, || site.under(1, 2, 3), 5), Ok(()));
    assert_eq!(drained(&ring), [], "nothing is traced");

    switch.trace(10);
    leaf.set(11);
    assert_eq!(request(&*switch, || site.under(1, 2, 3), 5), Ok(()));
    assert_eq!(request(&*switch, || None, 700), Err(BlockError::NoSpace), "nobody's request");
    switch.trace(0);
    leaf.set(0);
    assert_eq!(request(&*switch, || site.under(1, 2, 4), 5), Ok(()));
    install(None);

    let key = Key { device: 7, queue: 2, command: 3 };
    let events = drained(&ring);
    let (first, second) = events.split_at(6);
    assert!(first.iter().all(|event| event.key == key) && second.iter().all(|event| event.key == Key::NOBODY));
    let shape =
        |events: &[Event]| events.iter().map(|event| (event.kind, event.place, event.lba, event.status)).collect::<Vec<_>>();
    let expected = [
        (EventKind::Entered, 10, 5, 0),
        (EventKind::Entered, 11, 10, 0),
        (EventKind::Left, 11, 10, 0),
        (EventKind::Entered, 11, 11, 0),
        (EventKind::Left, 11, 11, 0),
    ];
    assert_eq!(shape(first), [&expected[..], &[(EventKind::Left, 10, 5, 0)]].concat());
    assert_eq!(
        shape(second),
        [
            (EventKind::Entered, 10, 700, 0),
            (EventKind::Entered, 11, 1400, 0),
            (EventKind::Left, 11, 1400, 5),
            (EventKind::Left, 10, 700, 5)
        ]
    );
    let root = first[0].span;
    assert!(root != 0 && first[0].parent == 0 && first[5].span == root);
    assert!(first[1..5].iter().all(|event| event.parent == root && event.span != root));
    assert_ne!(first[1].span, first[3].span);
    assert!(events.is_sorted_by_key(|event| event.time));
}

#[test]
fn a_site_records_what_it_is_told_to() {
    let ring = Arc::new(Ring::new(64));
    install(Some(Arc::clone(&ring)));
    let fetched = |nsid| move || Fetched { nsid, operation: EventOperation::WRITE, lba: Lba(9), count: 8 };
    for site in [Site::default(), Site::new(1, Some(2))] {
        site.seen(4, 3);
        site.fetched(4, 1, fetched(1));
        site.fetched(4, 2, fetched(2));
        assert_eq!(site.under(2, 4, 2).is_some(), site.is_on());
        assert!(site.under(1, 4, 1).is_none(), "another namespace");
        site.completed(4, 2, 0, Some(6));
        site.interrupted(6);
        site.reset();
    }
    install(None);
    Site::new(1, None).seen(1, 1);
    let events = drained(&ring);
    let kinds: Vec<_> = events.iter().map(|event| (event.kind, event.key.command, event.place)).collect();
    let expected = [
        (EventKind::Seen, 0, 0),
        (EventKind::Passed, 1, 1),
        (EventKind::Fetched, 2, 2),
        (EventKind::Completed, 2, 6),
        (EventKind::Interrupted, 0, 6),
        (EventKind::Reset, 0, 0),
    ];
    assert_eq!(kinds, expected);
}

#[test]
fn a_change_of_the_inside_goes_on_being_traced() {
    let (switch, _) = stack(0);
    switch.trace(10);
    let (ring, new): (_, Arc<dyn Volume>) = (Arc::new(Ring::new(64)), Arc::new(Node { below: None, waits: 2 }));
    let change = || switch.change(&new, std::time::Duration::from_secs(1), || Ok::<_, ()>(())).expect("a change");
    let places = || {
        install(Some(Arc::clone(&ring)));
        assert_eq!(request(&*switch, || None, 5), Ok(()));
        install(None);
        drained(&ring).iter().map(|event| event.place).collect::<Vec<_>>()
    };
    change();
    assert_eq!(places(), [10, 10], "as before");
    switch.trace_next(20);
    assert_eq!(places(), [10, 10], "nothing has changed yet");
    change();
    assert_eq!(places(), [20, 20]);
    switch.trace_next(30);
    switch.trace(0);
    change();
    assert_eq!(places(), [], "off is off");
}
