//! From events to requests: what belongs together, with its times.
//!
//! ```text
//!   Seen ─► waiting per queue ─► Fetched: a request ─► Entered, Left: its visits ─► Completed ─► Interrupted: all of the vector
//! ```
//!
//! What is missing (dropped, damaged, from before the beginning) leaves requests unfinished or unknown; it is counted, and nothing is
//! made up: what was under way on a ring that has a gap is not taken for anything that comes after it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    io::Read,
};

use millrace_block::trace::{Event, EventKind, EventOperation, Key};

use crate::format::{Begin, Block, Damage, DeviceName, End, FormatError, Names, NamespaceName, NodeName, Reader};

/// A request's stay at a node of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Visit {
    /// The node.
    pub node: u16,
    /// The visit, of the same request, within which it was.
    pub within: Option<usize>,
    /// What was asked for.
    pub operation: EventOperation,
    /// First block, in the node's.
    pub lba: u64,
    /// How many.
    pub count: u32,
    /// Bytes of a block.
    pub block: u32,
    /// From when.
    pub begin: u64,
    /// Until when; `None`: not while it was traced.
    pub end: Option<u64>,
    /// How it ended; 0 is success.
    pub status: u16,
}

/// A guest's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Device, queue and identifier.
    pub key: Key,
    /// The namespace.
    pub nsid: u16,
    /// What it asks for.
    pub operation: EventOperation,
    /// First block, in the device's.
    pub lba: u64,
    /// How many.
    pub count: u32,
    /// Requests of the device that were in flight when it was fetched, itself included.
    pub depth: u32,
    /// When its queue was seen to have it.
    pub seen: Option<u64>,
    /// When it was copied out of its queue.
    pub fetched: u64,
    /// When the guest could see that it had ended.
    pub completed: Option<u64>,
    /// When the guest was interrupted for it.
    pub interrupted: Option<u64>,
    /// How it ended; 0 is success.
    pub status: u16,
    /// What volumes did for it, in the order in which it began.
    pub visits: Vec<Visit>,
}

impl Request {
    /// From when it was known of.
    pub fn began(&self) -> u64 {
        self.seen.unwrap_or(self.fetched)
    }

    /// How long the guest waited, as far as the daemon knows: until it could see the end.
    pub fn latency(&self) -> Option<u64> {
        Some(self.completed?.saturating_sub(self.began()))
    }
}

/// A trace, understood.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// How it began, if that is there.
    pub begin: Option<Begin>,
    /// How it ended, if it did in an orderly way.
    pub end: Option<End>,
    /// Devices by their numbers, as they were in the end.
    pub devices: BTreeMap<u16, DeviceName>,
    /// What a device's namespaces were, each with the time from when it was that, in order.
    pub namespaces: BTreeMap<(u16, u16), Vec<(u64, NamespaceName)>>,
    /// Nodes by theirs.
    pub nodes: BTreeMap<u16, NodeName>,
    /// Requests that were completed, as they were fetched.
    pub requests: Vec<Request>,
    /// Requests that were not, while they were traced.
    pub unfinished: Vec<Request>,
    /// What volumes did for nobody that is traced: their own work, copies, others.
    pub background: Vec<Visit>,
    /// Ends of requests whose beginning is not there.
    pub unknown: u64,
    /// Interrupts.
    pub interrupts: u64,
    /// Events that are there.
    pub events: u64,
    /// Events that found no room in the daemon's rings.
    pub dropped: u64,
    /// What of the file is not there.
    pub damage: Damage,
}

impl Trace {
    /// Reads a file.
    ///
    /// # Errors
    /// When it is no trace; damage is none, and is told by [`Trace::damage`].
    pub fn read(source: impl Read) -> Result<Self, FormatError> {
        let mut reader = Reader::open(source)?;
        let (mut assembly, mut gone) = (Assembly::default(), (0, 0));
        while let Some(block) = reader.next_block()? {
            let damage = reader.damage();
            if gone != (damage.blocks, damage.bytes) {
                gone = (damage.blocks, damage.bytes);
                // Of which rings it had events nobody knows.
                assembly.lost(|_| true);
            }
            match block {
                Block::Begin(begin) => assembly.trace.begin = Some(Begin { target: plain(&begin.target), ..begin }),
                Block::Names(names) => assembly.add_names(names),
                Block::End(end) => assembly.trace.end = Some(End { reason: plain(&end.reason), ..end }),
                Block::Events { ring, dropped, events } => {
                    assembly.dropped.insert(ring, dropped);
                    for event in &events {
                        assembly.add(ring, event);
                    }
                }
            }
        }
        Ok(assembly.finish(reader.damage()))
    }

    /// The namespace that a request is for, as it was then.
    pub fn namespace(&self, request: &Request) -> Option<&NamespaceName> {
        let known = self.namespaces.get(&(request.key.device, request.nsid))?;
        let after = known.partition_point(|(since, _)| *since <= request.fetched);
        known.get(after.saturating_sub(1)).map(|(_, namespace)| namespace)
    }

    /// The volumes that a device showed, now or then.
    pub fn volumes(&self, device: u16) -> Vec<&str> {
        let mut known = HashSet::new();
        let namespaces = self.namespaces.range((device, 0)..=(device, u16::MAX)).flat_map(|(_, namespaces)| namespaces);
        namespaces.map(|(_, namespace)| namespace.volume.as_str()).filter(|volume| known.insert(*volume)).collect()
    }

    /// Bytes of the blocks in which a request is counted.
    pub fn block(&self, request: &Request) -> u64 {
        self.namespace(request).map_or(512, |namespace| u64::from(namespace.block))
    }

    /// A request's range in bytes: where it begins, and its length.
    pub fn range(&self, request: &Request) -> (u64, u64) {
        let block = self.block(request);
        // More is nonsense, which is not to spoil sums.
        (request.lba.saturating_mul(block), (u64::from(request.count) * block).min(1 << 40))
    }

    /// The first and the last moment of which something is known.
    pub fn span(&self) -> (u64, u64) {
        let first = self.requests.iter().map(Request::began).min().unwrap_or(0);
        let last = self.requests.iter().filter_map(|request| request.completed).max().unwrap_or(first);
        (first, last.max(first))
    }
}

/// Where an open visit is: of a request that is not finished, or of the background.
type Place = (Option<Key>, usize);

/// When the requests that wait in a queue were seen: runs of one moment, so that an event adds one entry, however many it tells of.
#[derive(Default)]
struct Waiting {
    /// Each with how many.
    runs: VecDeque<(u64, u32)>,
    /// Of all runs.
    count: u32,
}

impl Waiting {
    /// There are so many now.
    fn seen(&mut self, count: u32, time: u64) {
        // Those that were taken since without a record are of others.
        let mut gone = self.count.saturating_sub(count);
        while gone > 0
            && let Some((_, run)) = self.runs.front_mut()
        {
            let part = gone.min(*run);
            (*run, gone, self.count) = (*run - part, gone - part, self.count - part);
            if *run == 0 {
                self.runs.pop_front();
            }
        }
        // More than a queue can have is nonsense.
        let new = count.min(1 << 16).saturating_sub(self.count);
        if new > 0 {
            self.runs.push_back((time, new));
            self.count += new;
        }
    }

    /// One is fetched: when it was seen.
    fn take(&mut self) -> Option<u64> {
        let (time, run) = self.runs.front_mut()?;
        let seen = *time;
        (*run, self.count) = (*run - 1, self.count - 1);
        if *run == 0 {
            self.runs.pop_front();
        }
        Some(seen)
    }
}

/// Text that a file has, as it can be printed: it may be anybody's, and what terminals obey is not for it to say.
fn plain(text: &str) -> String {
    text.chars().map(|letter| if letter.is_control() { char::REPLACEMENT_CHARACTER } else { letter }).collect()
}

#[derive(Default)]
struct Assembly {
    trace: Trace,
    open: HashMap<Key, Request>,
    /// Requests that the trace is not about, until they are completed.
    others: HashSet<Key>,
    /// Whose events are in which ring.
    rings: HashMap<u16, u32>,
    /// Per queue: when the requests that are yet to be fetched were seen.
    waiting: HashMap<(u16, u16), Waiting>,
    /// Per device and vector: requests that are completed and not interrupted for.
    quiet: HashMap<(u16, u16), Vec<usize>>,
    in_flight: HashMap<u16, u32>,
    spans: HashMap<(u32, u32), Place>,
    dropped: HashMap<u32, u64>,
    /// Per device and namespace: what it was from when on; nothing, while there was none.
    shown: BTreeMap<(u16, u16), Shown>,
    /// The time of the latest event.
    latest: u64,
}

/// What a namespace was, and since when.
type Shown = Vec<(u64, Option<NamespaceName>)>;

impl Assembly {
    fn add_names(&mut self, mut names: Names) {
        for device in &mut names.devices {
            device.name = plain(&device.name);
            device.namespaces.iter_mut().for_each(|namespace| namespace.volume = plain(&namespace.volume));
        }
        for node in &mut names.nodes {
            for text in [&mut node.volume, &mut node.name, &mut node.word] {
                *text = plain(text);
            }
        }
        // Who does not say from when they are so has named them when there was need.
        let since = names.clock.unwrap_or(self.latest);
        names.devices.into_iter().for_each(|device| self.add_device(since, device));
        self.trace.nodes.extend(names.nodes.into_iter().map(|node| (node.id, node)));
    }

    /// From then on these are a device's namespaces.
    fn add_device(&mut self, since: u64, device: DeviceName) {
        let here: BTreeSet<u16> = device.namespaces.iter().map(|namespace| namespace.nsid as u16).collect();
        let before = self.trace.devices.get(&device.id).map(|before| &before.namespaces[..]).unwrap_or_default();
        let gone = before.iter().map(|namespace| namespace.nsid as u16).filter(|nsid| !here.contains(nsid));
        for nsid in gone {
            self.shown.entry((device.id, nsid)).or_default().push((since, None));
        }
        for namespace in &device.namespaces {
            let shown = self.shown.entry((device.id, namespace.nsid as u16)).or_default();
            shown.push((since, Some(namespace.clone())));
        }
        self.trace.devices.insert(device.id, device);
    }

    /// What namespaces were, without gaps: a request that was fetched in one is for what came after it, which was shown before it was named.
    fn settle_namespaces(&mut self) {
        for (key, mut shown) in std::mem::take(&mut self.shown) {
            shown.sort_by_key(|(since, _)| *since);
            let mut known: Vec<(u64, NamespaceName)> = Vec::new();
            let mut gap = None;
            for (since, namespace) in shown {
                let Some(namespace) = namespace else {
                    gap.get_or_insert(since);
                    continue;
                };
                let since = gap.take().unwrap_or(since);
                if known.last().is_none_or(|(_, last)| *last != namespace) {
                    known.push((since, namespace));
                }
            }
            self.trace.namespaces.insert(key, known);
        }
    }

    fn add(&mut self, ring: u32, event: &Event) {
        self.trace.events += 1;
        self.latest = self.latest.max(event.time);
        if self.trace.begin.as_ref().is_some_and(|begin| event.time < begin.clock) {
            // Not all places that record were on yet.
            return;
        }
        if matches!(event.kind, EventKind::Seen | EventKind::Fetched | EventKind::Passed) {
            self.rings.insert(event.key.device, ring);
        }
        match event.kind {
            EventKind::Passed => self.passed(event.key),
            EventKind::Lost => self.lost(|of| of == ring),
            EventKind::Reset => self.reset(event.key.device),
            EventKind::Seen => {
                self.waiting.entry((event.key.device, event.key.queue)).or_default().seen(event.count, event.time);
            }
            EventKind::Fetched => self.fetched(event),
            EventKind::Entered => self.entered(ring, event),
            EventKind::Left => self.left(ring, event),
            EventKind::Completed => self.completed(event),
            EventKind::Interrupted => {
                self.trace.interrupts += 1;
                for at in self.quiet.remove(&(event.key.device, event.place)).unwrap_or_default() {
                    self.trace.requests[at].interrupted = Some(event.time);
                }
            }
        }
    }

    /// A request is fetched: when it was seen.
    fn take(&mut self, key: Key) -> Option<u64> {
        self.others.remove(&key);
        if let Some(lost) = self.open.remove(&key) {
            // Its end is not there.
            self.abandon(lost);
        }
        self.waiting.get_mut(&(key.device, key.queue)).and_then(Waiting::take)
    }

    fn passed(&mut self, key: Key) {
        self.take(key);
        self.others.insert(key);
    }

    /// Rings have a gap: what was waiting or open may have been fetched, or have ended, in it.
    fn lost(&mut self, which: impl Fn(u32) -> bool) {
        self.spans.retain(|(of, _), _| !which(*of));
        let devices: HashSet<u16> = self.rings.iter().filter(|(_, ring)| which(**ring)).map(|(device, _)| *device).collect();
        self.let_go(|device| devices.contains(&device));
    }

    /// A device begins anew: what was waiting or open there has no end.
    fn reset(&mut self, device: u16) {
        self.spans.retain(|_, (key, _)| key.is_none_or(|key| key.device != device));
        self.let_go(|of| of == device);
    }

    fn let_go(&mut self, here: impl Fn(u16) -> bool) {
        self.waiting.retain(|(device, _), _| !here(*device));
        self.quiet.retain(|(device, _), _| !here(*device));
        self.others.retain(|key| !here(key.device));
        let open: Vec<_> = self.open.extract_if(|key, _| here(key.device)).collect();
        for (_, request) in open {
            self.abandon(request);
        }
    }

    fn fetched(&mut self, event: &Event) {
        let Event { time, lba, count, key, operation, place, .. } = *event;
        let seen = self.take(key);
        let depth = self.in_flight.entry(key.device).or_default();
        *depth += 1;
        let request = Request {
            key,
            nsid: place,
            operation,
            lba,
            count,
            depth: *depth,
            seen,
            fetched: time,
            completed: None,
            interrupted: None,
            status: 0,
            visits: Vec::new(),
        };
        self.open.insert(key, request);
    }

    fn abandon(&mut self, request: Request) {
        if let Some(depth) = self.in_flight.get_mut(&request.key.device) {
            *depth = depth.saturating_sub(1);
        }
        self.trace.unfinished.push(request);
    }

    fn entered(&mut self, ring: u32, event: &Event) {
        let Event { time, lba, span, parent, count, key, operation, place, .. } = *event;
        // What goes on for a request whose beginning is not there cannot be said to be anybody's.
        if key != Key::NOBODY && !self.open.contains_key(&key) {
            return;
        }
        let key = Some(key).filter(|key| *key != Key::NOBODY);
        let above = self.spans.get(&(ring, parent)).filter(|(whose, _)| *whose == key && parent != 0);
        let within = above.map(|(_, at)| *at);
        let visit = Visit { node: place, within, operation, lba, count, block: 512, begin: time, end: None, status: 0 };
        let visits = match key.and_then(|key| self.open.get_mut(&key)) {
            Some(request) => &mut request.visits,
            None => &mut self.trace.background,
        };
        self.spans.insert((ring, span), (key, visits.len()));
        visits.push(visit);
    }

    fn left(&mut self, ring: u32, event: &Event) {
        let Some((key, at)) = self.spans.remove(&(ring, event.span)) else { return };
        let visits = match key {
            None => Some(&mut self.trace.background),
            Some(key) => self.open.get_mut(&key).map(|request| &mut request.visits),
        };
        if let Some(visit) = visits.and_then(|visits| visits.get_mut(at)).filter(|visit| visit.node == event.place) {
            (visit.end, visit.status) = (Some(event.time), event.status);
        }
    }

    fn completed(&mut self, event: &Event) {
        if self.others.remove(&event.key) {
            return;
        }
        let Some(mut request) = self.open.remove(&event.key) else {
            self.trace.unknown += 1;
            return;
        };
        (request.completed, request.status) = (Some(event.time), event.status);
        if let Some(depth) = self.in_flight.get_mut(&event.key.device) {
            *depth = depth.saturating_sub(1);
        }
        if event.place != u16::MAX {
            self.quiet.entry((event.key.device, event.place)).or_default().push(self.trace.requests.len());
        }
        self.trace.requests.push(request);
    }

    /// Nodes get new numbers whenever their volume is changed or formatted while it is traced: here each has its first one, and its blocks.
    fn unite_nodes(&mut self) {
        let mut first: HashMap<(&str, &str, &str), u16> = HashMap::new();
        let named = |node: &NodeName| (node.id, node.block, (node.volume.clone(), node.name.clone(), node.word.clone()));
        let names: Vec<_> = self.trace.nodes.values().map(named).collect();
        let same: HashMap<u16, (u16, u32)> = names
            .iter()
            .map(|(id, block, (volume, name, word))| (*id, (*first.entry((volume, name, word)).or_insert(*id), *block)))
            .collect();
        let requests = self.trace.requests.iter_mut().chain(&mut self.trace.unfinished);
        let visits = requests.flat_map(|request| &mut request.visits).chain(&mut self.trace.background);
        for visit in visits {
            if let Some((node, block)) = same.get(&visit.node) {
                (visit.node, visit.block) = (*node, *block);
            }
        }
    }

    fn finish(mut self, damage: Damage) -> Trace {
        let mut left: Vec<_> = self.open.drain().map(|(_, request)| request).collect();
        self.trace.unfinished.append(&mut left);
        if let Some(last) = self.trace.end.as_ref().and_then(|end| end.clock) {
            // What came later found some places that record off already.
            self.trace.requests.retain(|request| request.fetched <= last);
            self.trace.unfinished.retain(|request| request.fetched <= last);
            self.trace.background.retain(|visit| visit.begin <= last);
        }
        self.unite_nodes();
        self.settle_namespaces();
        self.trace.unfinished.sort_by_key(|request| request.fetched);
        self.trace.requests.sort_by_key(|request| request.fetched);
        self.trace.dropped = self.dropped.values().fold(0, |sum, dropped| sum.saturating_add(*dropped));
        self.trace.damage = damage;
        self.trace
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Writer;

    fn seen(queue: u16, count: u32, time: u64) -> Event {
        let key = Key { device: 1, queue, command: 0 };
        Event { time, count, key, kind: EventKind::Seen, ..Event::default() }
    }

    #[test]
    fn an_event_takes_no_more_room_than_itself_whatever_it_says() {
        let mut assembly = Assembly::default();
        for number in 0..1000_u16 {
            assembly.add(0, &seen(number, u32::MAX, 1));
            assembly.add(0, &seen(7, u32::from(number % 2) * 9, 1));
        }
        let entries: usize = assembly.waiting.values().map(|waiting| waiting.runs.len()).sum();
        assert!(entries <= 1000, "{entries} entries of 2000 events");
    }

    #[test]
    fn those_that_wait_were_seen_when_they_came() {
        let mut waiting = Waiting::default();
        waiting.seen(3, 10);
        waiting.seen(5, 20);
        assert_eq!(waiting.take(), Some(10));
        // Two were taken without a record.
        waiting.seen(2, 30);
        waiting.seen(4, 40);
        let mut times = std::iter::from_fn(|| waiting.take());
        assert_eq!([(); 5].map(|()| times.next()), [Some(20), Some(20), Some(40), Some(40), None]);
        waiting.seen(u32::MAX, 50);
        assert_eq!((waiting.count, waiting.runs.len()), (1 << 16, 1));
        waiting.seen(0, 60);
        assert_eq!((waiting.count, waiting.take()), (0, None));
    }

    fn command(kind: EventKind, command: u16, time: u64) -> Event {
        Event { time, kind, key: Key { device: 1, queue: 1, command }, place: u16::MAX, ..Event::default() }
    }

    fn assembled(events: &[Event]) -> Trace {
        let mut assembly = Assembly::default();
        for event in events {
            assembly.add(0, event);
        }
        assembly.finish(Damage::default())
    }

    #[test]
    fn a_request_of_another_namespace_leaves_no_trace_in_those_after_it() {
        let trace = assembled(&[
            seen(1, 1, 1),
            command(EventKind::Passed, 7, 2),
            command(EventKind::Completed, 7, 3),
            seen(1, 1, 1000),
            command(EventKind::Fetched, 7, 1001),
            command(EventKind::Completed, 7, 1010),
            // An identifier goes from one namespace to the other, and the end of the first one is not there.
            command(EventKind::Passed, 8, 1020),
            command(EventKind::Fetched, 8, 1030),
            command(EventKind::Completed, 8, 1040),
        ]);
        let times: Vec<_> = trace.requests.iter().map(|request| (request.seen, request.latency())).collect();
        assert_eq!(times, [(Some(1000), Some(10)), (None, Some(10))]);
        assert_eq!((trace.unknown, trace.unfinished.len()), (0, 0));
    }

    #[test]
    fn what_comes_after_a_gap_is_not_taken_for_what_was_before_it() {
        let events = [
            seen(1, 2, 1),
            command(EventKind::Fetched, 7, 2),
            command(EventKind::Lost, 0, 1000),
            // Of another one with the same identifier.
            command(EventKind::Completed, 7, 1000),
            seen(1, 1, 1001),
            command(EventKind::Fetched, 7, 1002),
            command(EventKind::Completed, 7, 1011),
        ];
        let trace = assembled(&events);
        let times: Vec<_> = trace.requests.iter().map(|request| (request.seen, request.latency())).collect();
        assert_eq!(times, [(Some(1001), Some(10))]);
        assert_eq!((trace.unknown, trace.unfinished.len()), (1, 1));
        let mut assembly = Assembly::default();
        for event in &events {
            assembly.add(u32::from(event.kind == EventKind::Lost), event);
        }
        let trace = assembly.finish(Damage::default());
        assert_eq!((trace.requests.len(), trace.unknown), (2, 0), "a gap of another ring is none of this one");
    }

    /// Device 1, whose namespace 1 is this volume from then on; or it has none.
    fn showing(clock: u64, volume: Option<(&str, u32)>) -> Names {
        let named =
            |(volume, block): (&str, u32)| NamespaceName { nsid: 1, volume: volume.to_owned(), block, size: 1 << 20 };
        let namespaces = volume.map(named).into_iter().collect();
        let device = DeviceName { id: 1, name: "vm1".to_owned(), kind: "nvme".to_owned(), namespaces };
        Names { clock: Some(clock), devices: vec![device], ..Names::default() }
    }

    #[test]
    fn a_request_is_for_what_its_namespace_was_then() {
        let mut assembly = Assembly::default();
        assembly.add_names(showing(1, Some(("v", 512))));
        // They are in the file before events that are older.
        assembly.add_names(showing(100, None));
        for (at, time) in [10, 99, 150, 250].into_iter().enumerate() {
            if time == 250 {
                assembly.add_names(showing(200, Some(("w", 4096))));
            }
            let fetched = command(EventKind::Fetched, at as u16, time);
            assembly.add(0, &Event { place: 1, lba: 1, count: 8, ..fetched });
            assembly.add(0, &command(EventKind::Completed, at as u16, time + 1));
        }
        assembly.add_names(showing(300, None));
        let trace = assembly.finish(Damage::default());
        let volume = |request: &Request| trace.namespace(request).map(|namespace| namespace.volume.as_str());
        let found: Vec<_> = trace.requests.iter().map(|request| (volume(request), trace.range(request))).collect();
        // The third one found the volume that was named only later.
        let (first, second) = ((Some("v"), (512, 4096)), (Some("w"), (4096, 32768)));
        assert_eq!(found, [first, first, second, second]);
        assert_eq!(trace.volumes(1), ["v", "w"]);
    }

    /// As whoever wrote no times had them: what stands before an event in the file.
    #[test]
    fn names_without_a_time_are_for_what_comes_after_them() {
        let mut assembly = Assembly::default();
        for (at, block) in [512, 4096].into_iter().enumerate() {
            assembly.add_names(Names { clock: None, ..showing(0, Some(("v", block))) });
            let time = at as u64 * 10 + 10;
            assembly.add(0, &Event { place: 1, count: 8, ..command(EventKind::Fetched, 1, time) });
            assembly.add(0, &command(EventKind::Completed, 1, time + 1));
        }
        let trace = assembly.finish(Damage::default());
        let bytes: Vec<_> = trace.requests.iter().map(|request| trace.range(request).1).collect();
        assert_eq!(bytes, [4096, 32768]);
    }

    #[test]
    fn a_visit_is_counted_in_the_blocks_that_its_node_had_then() {
        let mut assembly = Assembly::default();
        for (id, block) in [(1, 512), (2, 4096)] {
            let (volume, name, word) = ("v".to_owned(), "memory".to_owned(), "memory".to_owned());
            let node = NodeName { id, volume, name, word, above: 0, leaf: true, block };
            assembly.add_names(Names { nodes: vec![node], ..Names::default() });
            let entered = Event { span: id.into(), place: id, kind: EventKind::Entered, ..Event::default() };
            assembly.add(0, &entered);
        }
        let trace = assembly.finish(Damage::default());
        let visits: Vec<_> = trace.background.iter().map(|visit| (visit.node, visit.block)).collect();
        assert_eq!(visits, [(1, 512), (1, 4096)]);
    }

    #[test]
    fn what_a_reset_drops_is_in_flight_no_more() {
        let mut events: Vec<_> = (1..=8).map(|number| command(EventKind::Fetched, number, number.into())).collect();
        events.extend([
            command(EventKind::Reset, 0, 20),
            command(EventKind::Fetched, 100, 30),
            command(EventKind::Completed, 100, 40),
        ]);
        let trace = assembled(&events);
        assert_eq!((trace.requests.len(), trace.requests[0].depth, trace.unfinished.len()), (1, 1, 8));
        // Another device's goes on.
        events[8].key.device = 2;
        let trace = assembled(&events);
        assert_eq!((trace.requests[0].depth, trace.unfinished.len()), (9, 8));
    }

    #[test]
    fn numbers_of_nonsense_do_not_overflow() {
        let mut writer = Writer::default();
        let file = [
            writer.begin(&Begin::default()),
            writer.events(0, u64::MAX, []),
            writer.events(1, u64::MAX, []),
            writer.numbered(u64::MAX - 1).events(2, 1, []),
            writer.numbered(1).events(2, 1, []),
            writer.numbered(u64::MAX - 1).events(2, 1, []),
        ];
        let trace = Trace::read(&file.concat()[..]).expect("a trace");
        assert_eq!((trace.dropped, trace.damage.blocks), (u64::MAX, u64::MAX));
    }
}
