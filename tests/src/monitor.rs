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
}

impl Monitor {
    /// Connects, as soon as QEMU listens.
    ///
    /// # Panics
    /// When it does not.
    pub fn open(path: &Path) -> Self {
        let stream = eventually("QEMU's control socket", || UnixStream::connect(path).ok());
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let mut monitor = Self { stream: BufReader::new(stream) };
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
        let line = json!({ "execute": command, "arguments": arguments }).to_string();
        self.stream.get_mut().write_all(format!("{line}\n").as_bytes()).expect("QEMU listens");
        loop {
            // Events come in between.
            let answer = self.read();
            assert!(answer.get("error").is_none(), "{command}: {answer}");
            if let Some(value) = answer.get("return") {
                return value.clone();
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
