//! JSON for Perfetto and Chrome's viewer: a process for each device, a row for each queue, the stages of each request within it.

use std::io::{self, Write};

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

impl Row<'_> {
    fn event(&self, phase: &str, name: &str, time: u64, arguments: Value) -> Value {
        let (device, queue) = (self.request.key.device, self.request.key.queue);
        let mut event = json!({
            "ph": phase, "cat": "request", "id": format!("0x{:x}", self.id), "name": name,
            "pid": device, "tid": queue, "ts": micros(time, self.first),
        });
        if !arguments.is_null() {
            event["args"] = arguments;
        }
        event
    }

    fn stretch(
        &self,
        events: &mut Vec<(u64, u8, Value)>,
        name: &str,
        (begin, end): (u64, u64),
        level: u8,
        arguments: Value,
    ) {
        // Of events at one time, those that end come first, inner before outer; then those that begin, outer before inner.
        events.push((begin, 128 + level, self.event("b", name, begin, arguments)));
        events.push((end.max(begin), 127 - level, self.event("e", name, end.max(begin), Value::Null)));
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
        let end = request.completed.unwrap_or(request.fetched);
        self.stretch(&mut events, name, (request.began(), end), 0, arguments);
        if let Some(seen) = request.seen {
            self.stretch(&mut events, "queue", (seen, request.fetched), 1, Value::Null);
        }
        let mut levels: Vec<u8> = Vec::new();
        for visit in &request.visits {
            let level = visit.within.and_then(|above| levels.get(above)).map_or(1, |above| above.saturating_add(1).min(100));
            levels.push(level);
            let arguments = json!({ "lba": visit.lba, "blocks": visit.count, "status": visit.status });
            let until = visit.end.unwrap_or(end);
            self.stretch(&mut events, &node_name(trace, visit.node), (visit.begin, until), level, arguments);
        }
        if let Some(interrupted) = request.interrupted {
            events.push((interrupted, 255, self.event("n", "interrupt", interrupted, Value::Null)));
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
