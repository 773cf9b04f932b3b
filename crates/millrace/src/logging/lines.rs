//! Lines on their way to standard error, written by a thread of its own: whoever logs never waits for whoever reads.
//!
//! ```text
//!   any thread ── Lines ─► channel of CAPACITY lines ─► thread "log" ─► standard error
//!                    └─ full: the line is dropped and counted; the thread says how many when it writes again,
//!                       and how many the flood guard withheld when their second is over
//! ```

use std::{
    io::{self, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use tracing_subscriber::fmt::MakeWriter;

use super::{Loss, flood::Flood};

/// Lines that wait for a slow reader.
const CAPACITY: usize = 512;

/// How long the end of the program waits for a reader that does not read.
const PATIENCE: Duration = Duration::from_secs(1);

enum Message {
    Line(Vec<u8>),
    /// There is something to tell later.
    Wake,
    /// Everything before this is written: say so.
    Flush(SyncSender<()>),
}

/// Where lines go; each write is one line.
#[derive(Clone)]
pub(super) struct Lines {
    channel: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
}

impl Lines {
    /// Starts the thread that writes to `out`. `lost` words the line for so many that are missing.
    pub(super) fn start(
        out: impl Write + Send + 'static,
        flood: Flood,
        lost: impl Fn(Loss, u64) -> String + Send + 'static,
    ) -> io::Result<Self> {
        let (channel, messages) = sync_channel(CAPACITY);
        let dropped = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&dropped);
        thread::Builder::new().name("log".to_owned()).spawn(move || write(&messages, out, &counter, &flood, &lost))?;
        Ok(Self { channel, dropped })
    }

    /// Has the thread see what the flood guard has to tell. One with a full channel sees it by itself.
    pub(super) fn wake(&self) {
        let _ = self.channel.try_send(Message::Wake);
    }

    /// Waits until what was logged is written, but not long: nobody may be reading.
    pub(super) fn flush(&self) {
        let (done, wait) = sync_channel(1);
        // A full channel has been full of lines that nobody read.
        if self.channel.try_send(Message::Flush(done)).is_ok() {
            let _ = wait.recv_timeout(PATIENCE);
        }
    }
}

fn write(
    messages: &Receiver<Message>,
    mut out: impl Write,
    dropped: &AtomicU64,
    flood: &Flood,
    lost: &impl Fn(Loss, u64) -> String,
) {
    loop {
        let received = match flood.due() {
            None => messages.recv().map_err(RecvTimeoutError::from),
            Some(due) => messages.recv_timeout(due.saturating_duration_since(Instant::now())),
        };
        let (line, done) = match received {
            Ok(Message::Line(line)) => (line, None),
            Ok(Message::Flush(done)) => (Vec::new(), Some(done)),
            Ok(Message::Wake) | Err(RecvTimeoutError::Timeout) => (Vec::new(), None),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        // An error of standard error has nowhere to go: the next line tries again.
        let _ = out.write_all(&line);
        // The end of the program does not wait for that of the second.
        let now = done.is_none().then(Instant::now);
        for (loss, count) in [(Loss::Withheld, flood.take(now)), (Loss::Dropped, dropped.swap(0, Ordering::Relaxed))] {
            if count > 0 {
                let _ = out.write_all(lost(loss, count).as_bytes());
            }
        }
        if let Some(done) = done {
            let _ = done.try_send(());
        }
    }
}

impl Write for &Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.channel.try_send(Message::Line(line.to_vec())).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> &'a Self {
        self
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader},
        iter,
    };

    use super::*;

    fn lost(_: Loss, count: u64) -> String {
        format!("{count} lost\n")
    }

    #[test]
    fn a_reader_that_does_not_read_costs_lines_and_nothing_else() {
        let (reader, writer) = io::pipe().unwrap();
        let lines = Lines::start(writer, Flood::default(), lost).unwrap();
        let line = [&[b'x'; 1023][..], b"\n"].concat();
        // More than pipe and channel hold together.
        for _ in 0..4 * CAPACITY {
            (&lines).write_all(&line).unwrap();
        }
        let pending = lines.dropped.load(Ordering::Relaxed);
        assert!(pending > 0);
        lines.flush();
        drop(lines);
        // Whoever reads at last finds every line, or that it was lost.
        let (mut whole, mut gone) = (0, 0);
        for text in BufReader::new(reader).lines().map_while(Result::ok) {
            match text.strip_suffix(" lost") {
                Some(count) => gone += count.parse::<usize>().unwrap(),
                None => whole += usize::from(text.len() == 1023 && text.bytes().all(|byte| byte == b'x')),
            }
        }
        assert_eq!(whole + gone, 4 * CAPACITY);
        assert!(gone as u64 >= pending);
    }

    #[test]
    fn what_was_logged_is_written_when_the_program_ends() {
        let (reader, writer) = io::pipe().unwrap();
        let lines = Lines::start(writer, Flood::default(), lost).unwrap();
        for number in 0..100 {
            writeln!(&lines, "{number}").unwrap();
        }
        lines.flush();
        let mut reader = BufReader::new(reader);
        let mut line = || {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            line
        };
        let written: Vec<_> = iter::repeat_with(&mut line).take(100).collect();
        assert_eq!(written, (0..100).map(|number| format!("{number}\n")).collect::<Vec<_>>());
    }
}
