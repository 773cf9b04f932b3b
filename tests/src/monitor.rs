//! QEMU's control socket (QMP).

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::Path,
};

use serde_json::{Value, json};

use crate::wait::{PATIENCE, eventually};

/// A connection to one machine.
#[derive(Debug)]
pub struct Monitor {
    stream: BufReader<UnixStream>,
    /// Names of the events that came meanwhile.
    events: Vec<String>,
}

impl Monitor {
    /// Connects, as soon as QEMU listens.
    ///
    /// # Panics
    /// When it does not.
    pub fn open(path: &Path) -> Self {
        let stream = eventually("QEMU's control socket", || UnixStream::connect(path).ok());
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let mut monitor = Self { stream: BufReader::new(stream), events: Vec::new() };
        monitor.read();
        monitor.execute("qmp_capabilities", &json!({}));
        monitor
    }

    fn read(&mut self) -> Value {
        let mut line = String::new();
        self.stream.read_line(&mut line).expect("an answer of QEMU's");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error} in: {line}"))
    }

    /// Runs a command; what it returns.
    ///
    /// # Panics
    /// When QEMU refuses it.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Value {
        self.try_execute(command, arguments).unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    /// Runs a command; what it returns, or QEMU's refusal.
    pub fn try_execute(&mut self, command: &str, arguments: &Value) -> Result<Value, Value> {
        let line = json!({ "execute": command, "arguments": arguments }).to_string();
        self.stream.get_mut().write_all(format!("{line}\n").as_bytes()).expect("QEMU listens");
        loop {
            // Events come in between.
            let answer = self.read();
            if let Some(event) = answer["event"].as_str() {
                self.events.push(event.to_owned());
            } else {
                return answer.get("return").cloned().ok_or(answer);
            }
        }
    }

    /// Waits for an event of this name that no earlier call has waited for.
    pub fn wait_event(&mut self, name: &str) {
        loop {
            if let Some(at) = self.events.iter().position(|event| event == name) {
                self.events.remove(at);
                return;
            }
            if let Some(event) = self.read()["event"].as_str() {
                self.events.push(event.to_owned());
            }
        }
    }

    /// Moves the machine to the QEMU that waits for it at a socket, while it runs.
    ///
    /// # Panics
    /// When the migration fails.
    pub fn migrate(&mut self, to: &Path) {
        // An emulated machine under load writes memory faster than it would be copied within the usual limits.
        self.execute("migrate-set-parameters", &json!({ "max-bandwidth": 0, "downtime-limit": 20_000 }));
        self.execute("migrate", &json!({ "uri": format!("unix:{}", to.display()) }));
        eventually("the end of the migration", || {
            let state = self.execute("query-migrate", &json!({}));
            let status = state["status"].as_str().unwrap_or_default();
            assert!(!matches!(status, "failed" | "cancelled"), "{state}");
            (status == "completed").then(|| println!("  migrated: {}", state["ram"]))
        });
    }
}
