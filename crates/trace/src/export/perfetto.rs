//! JSON for Perfetto and Chrome's viewer: a process for each device, a row for each queue, the stages of each request within it.

use std::{
    collections::HashMap,
    io::{self, Write},
};

use serde_json::{Value, json};

use crate::{
    report::node_name,
    requests::{Request, Trace},
};

/// Microseconds since the first request, as the format has them.
fn micros(time: u64, first: u64) -> Value {
    json!(time.saturating_sub(first) as f64 / 1000.0)
}

struct Row<'a> {
    trace: &'a Trace,
    request: &'a Request,
    id: usize,
    first: u64,
}

/// Where a stretch is drawn: from when to when, and in which row.
#[derive(Clone, Copy, Default)]
struct Place {
    begin: u64,
    end: u64,
    /// What ends before what it began within has a lane in common with it; legs that overlap, or go on after that, have one each.
    lane: usize,
    /// How deep it is within others.
    level: u8,
}

impl Row<'_> {
    fn event(&self, phase: &str, name: &str, time: u64, lane: usize, arguments: Value) -> Value {
        let (device, queue) = (self.request.key.device, self.request.key.queue);
        let id = if lane == 0 { format!("0x{:x}", self.id) } else { format!("0x{:x}.{lane}", self.id) };
        let mut event = json!({
            "ph": phase, "cat": "request", "id": id, "name": name,
            "pid": device, "tid": queue, "ts": micros(time, self.first),
        });
        if !arguments.is_null() {
            event["args"] = arguments;
        }
        event
    }

    fn stretch(&self, events: &mut Vec<(u64, u8, Value)>, name: &str, place: Place, arguments: Value) {
        let Place { begin, end, lane, level } = place;
        // It would be ended before it began, and what is begun and not ended has all that follows within it.
        if level > 0 && end <= begin {
            return;
        }
        // Of events at one time, those that end come first, inner before outer; then those that begin, outer before inner. A request of
        // no length is there nevertheless, with nothing in it.
        let last = if end > begin { 127 - level } else { 254 };
        events.push((begin, 128 + level, self.event("b", name, begin, lane, arguments)));
        events.push((end, last, self.event("e", name, end, lane, Value::Null)));
    }

    fn events(&self) -> Vec<(u64, u8, Value)> {
        let (trace, request) = (self.trace, self.request);
        let (offset, bytes) = trace.range(request);
        let volume = trace.namespace(request).map_or("", |namespace| &namespace.volume);
        let name = request.operation.name();
        let arguments = json!({
            "volume": volume, "offset": offset, "bytes": bytes, "command": request.key.command, "depth": request.depth,
            "fua": request.operation.fua(), "status": request.status,
        });
        let mut events = Vec::new();
        let begin = request.began();
        let whole = Place { begin, end: request.completed.unwrap_or(request.fetched).max(begin), ..Place::default() };
        self.stretch(&mut events, name, whole, arguments);
        let fetched = request.fetched.min(whole.end);
        if request.seen.is_some() {
            self.stretch(&mut events, "queue", Place { end: fetched, level: 1, ..whole }, Value::Null);
        }
        let inside = Place { begin: fetched, ..whole };
        let mut places: Vec<Place> = Vec::new();
        // Until when a visit's lane is taken by one of those within it.
        let mut taken: HashMap<Option<usize>, u64> = HashMap::new();
        for (at, visit) in request.visits.iter().enumerate() {
            let above = visit.within.and_then(|above| places.get(above)).copied().unwrap_or(inside);
            let begin = visit.begin;
            // One that was given up has no end; what it was done for went on, or had its own.
            let end = visit.end.unwrap_or(above.end).max(begin);
            let taken = taken.entry(visit.within).or_default();
            let fits = above.begin.max(*taken) <= begin && end <= above.end;
            let lane = if fits { above.lane } else { at + 1 };
            if fits {
                *taken = end;
            }
            let place = Place { begin, end, lane, level: above.level.saturating_add(1).min(100) };
            places.push(place);
            let arguments = json!({ "lba": visit.lba, "blocks": visit.count, "status": visit.status });
            self.stretch(&mut events, &node_name(trace, visit.node), place, arguments);
        }
        if let Some(interrupted) = request.interrupted {
            events.push((interrupted, 255, self.event("n", "interrupt", interrupted, 0, Value::Null)));
        }
        events
    }
}

/// Writes a trace.
///
/// # Errors
/// What `out` says.
pub fn write(trace: &Trace, out: &mut impl Write) -> io::Result<()> {
    let first = trace.span().0;
    write!(out, "{{\"displayTimeUnit\":\"ns\",\"traceEvents\":[")?;
    let mut comma = "\n";
    for device in trace.devices.values() {
        let named = json!({ "ph": "M", "name": "process_name", "pid": device.id, "args": { "name": device.name } });
        write!(out, "{comma}{named}")?;
        comma = ",\n";
    }
    let mut queues: Vec<_> = trace.requests.iter().map(|request| (request.key.device, request.key.queue)).collect();
    queues.sort_unstable();
    queues.dedup();
    for (device, queue) in queues {
        let name = format!("queue {queue}");
        let named = json!({ "ph": "M", "name": "thread_name", "pid": device, "tid": queue, "args": { "name": name } });
        write!(out, "{comma}{named}")?;
        comma = ",\n";
    }
    for (id, request) in trace.requests.iter().enumerate() {
        let mut events = Row { trace, request, id, first }.events();
        events.sort_by_key(|(time, order, _)| (*time, *order));
        for (_, _, event) in events {
            write!(out, "{comma}{event}")?;
            comma = ",\n";
        }
    }
    writeln!(out, "\n]}}")
}
