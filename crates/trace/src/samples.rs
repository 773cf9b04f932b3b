//! Traces of known workloads, for the tests: made as a daemon makes them, event by event.

use millrace_block::trace::{Event, EventKind, EventOperation, Key};

use crate::{
    format::{Begin, DeviceName, EVENTS, End, Names, NamespaceName, NodeName, Writer},
    requests::Trace,
};

/// What a request is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) queue: u16,
    pub(crate) command: u16,
    pub(crate) operation: EventOperation,
    pub(crate) lba: u64,
    pub(crate) count: u32,
    /// When it is seen; the rest comes later by known times.
    pub(crate) at: u64,
}

/// Times of a request's stages, in nanoseconds.
pub(crate) const QUEUE: u64 = 100;
pub(crate) const CHECKS: u64 = 50;
pub(crate) const SERVICE: u64 = 30;
pub(crate) const BACKEND: u64 = 1000;
pub(crate) const ANSWER: u64 = 20;
pub(crate) const INTERRUPT: u64 = 200;
/// All but the interrupt.
pub(crate) const WHOLE: u64 = QUEUE + CHECKS + 2 * SERVICE + BACKEND + ANSWER;

pub(crate) fn names() -> Names {
    let namespace = NamespaceName { nsid: 1, volume: "data".to_owned(), block: 512, size: 64 << 20 };
    let device = DeviceName { id: 1, name: "vm1".to_owned(), kind: "nvme".to_owned(), namespaces: vec![namespace] };
    let node = |id, word: &str, above, leaf| NodeName {
        id,
        volume: "data".to_owned(),
        name: word.to_owned(),
        word: word.to_owned(),
        above,
        leaf,
        block: 512,
    };
    let nodes = vec![node(1, "throttle", 0, false), node(2, "memory", 1, true)];
    Names { devices: vec![device], nodes, ..Names::default() }
}

/// The events of requests that do not overlap in their queues' order.
pub(crate) fn events(jobs: &[Job]) -> Vec<Event> {
    let mut events = Vec::new();
    for (number, job) in jobs.iter().enumerate() {
        let Job { queue, command, operation, lba, count, at } = *job;
        let key = Key { device: 1, queue, command };
        let (outer, inner) = (number as u32 * 2 + 1, number as u32 * 2 + 2);
        let mut time = at;
        let mut event = |after: u64, kind: EventKind, span: u32, parent: u32, place: u16| {
            time += after;
            Event { time, lba, span, parent, count, key, kind, operation, status: 0, place }
        };
        let seen = event(0, EventKind::Seen, 0, 0, 0);
        events.push(Event { count: 1, key: Key { command: 0, ..key }, ..seen });
        events.push(event(QUEUE, EventKind::Fetched, 0, 0, 1));
        events.push(event(CHECKS, EventKind::Entered, outer, 0, 1));
        events.push(event(SERVICE, EventKind::Entered, inner, outer, 2));
        events.push(event(BACKEND, EventKind::Left, inner, outer, 2));
        events.push(event(SERVICE, EventKind::Left, outer, 0, 1));
        events.push(event(ANSWER, EventKind::Completed, 0, 0, queue));
        let interrupt = event(INTERRUPT, EventKind::Interrupted, 0, 0, queue);
        events.push(Event { key: Key { queue: 0, command: 0, ..key }, ..interrupt });
    }
    events.sort_by_key(|event| event.time);
    events
}

/// The blocks of a file.
pub(crate) fn blocks(events: &[Event], of: usize) -> Vec<Vec<u8>> {
    let mut writer = Writer::default();
    let begin = Begin { program: "test".to_owned(), target: "device vm1".to_owned(), ..Begin::default() };
    let mut blocks = vec![writer.begin(&begin), writer.names(&names())];
    blocks.extend(events.chunks(of.min(EVENTS)).map(|events| writer.events(0, 0, events.iter().map(Event::to_words))));
    let end = End { reason: "the time was over".to_owned(), events: events.len() as u64, ..End::default() };
    blocks.push(writer.end(&end));
    blocks
}

/// A trace of these requests.
pub(crate) fn trace(jobs: &[Job]) -> Trace {
    let file = blocks(&events(jobs), EVENTS).concat();
    Trace::read(&file[..]).expect("a trace")
}
