//! Traces: taken from the daemon, and understood without it.

use std::{
    error::Error,
    fs::File,
    io::{self, BufWriter, Write},
    os::fd::AsFd,
    path::{Path, PathBuf},
};

use millrace_trace::{Report, Trace, export, format::Follower, guest, plot};
use rustix::{
    event::{PollFd, PollFlags, Timespec},
    io::Errno,
};
use serde_json::json;

use super::{Done, client, show};
use crate::{
    Misuse,
    cli::{AnalyzeArgs, Export, Global, TraceArgs},
    client::{Client, ClientError, segment},
    output,
};

/// Where a trace goes.
enum Out {
    Standard,
    File(PathBuf, Option<File>),
}

impl Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Standard => write_through(bytes),
            // It is made when there is something to write: a refused trace leaves none.
            Self::File(path, file @ None) => file.insert(File::create(path)?).write_all(bytes),
            Self::File(_, Some(file)) => file.write_all(bytes),
        }
    }

    /// A trace that broke off ends after its last whole block, with a word about that.
    fn close(&mut self, follower: &Follower, reason: &str) -> io::Result<()> {
        if let Self::File(_, Some(file)) = self {
            file.set_len(follower.whole())?;
            io::Seek::seek(file, io::SeekFrom::End(0))?;
            return file.write_all(&follower.last_word(reason));
        }
        Ok(())
    }
}

/// Writes to standard output, and not to its buffer: what would be left there is written at the program's end, whoever reads it or does not.
fn write_through(bytes: &[u8]) -> io::Result<()> {
    File::from(io::stdout().as_fd().try_clone_to_owned()?).write_all(bytes)
}

/// Waits a little until standard output takes more at once: whoever reads it may have stopped. What is wrong with it, writing tells.
fn has_room() -> bool {
    let stdout = io::stdout();
    let mut ends = [PollFd::new(&stdout, PollFlags::OUT)];
    let room = rustix::event::poll(&mut ends, Some(&Timespec { tv_sec: 0, tv_nsec: 50_000_000 }));
    // Ctrl-C interrupts it, which is no room.
    !matches!(room, Ok(0) | Err(Errno::INTR))
}

fn named(path: &Path) -> impl Fn(io::Error) -> String + '_ {
    move |error| format!("{}: {error}", path.display())
}

/// What the daemon has of this name.
fn target(client: &Client, args: &TraceArgs) -> Result<String, Box<dyn Error>> {
    let (device, volume) = (format!("/v1/devices/{}", segment(&args.name)), format!("/v1/volumes/{}", segment(&args.name)));
    if args.volume {
        return Ok(volume);
    }
    match client.get_text(&device) {
        Err(ClientError::Refused(problem)) if problem.code == "no-device" => {}
        other => return Ok(other.map(|_| device)?),
    }
    match client.get_text(&volume) {
        Err(ClientError::Refused(problem)) if problem.code == "no-volume" => {
            let advice = "\"millrace device list\" and \"millrace volume list\" show what there is";
            Err(format!("device {0} does not exist, and volume {0} does not exist either; {advice}", args.name).into())
        }
        other => Ok(other.map(|_| volume)?),
    }
}

pub(crate) fn trace(global: &Global, args: &TraceArgs) -> Done {
    let client = client(global)?;
    let path = format!("{}/trace", target(&client, args)?);
    let question = args.seconds.map_or_else(|| path.clone(), |seconds| format!("{path}?seconds={seconds}"));
    let file = args.out.clone().unwrap_or_else(|| PathBuf::from(format!("{}.trace", args.name)));
    let mut out = if file == Path::new("-") { Out::Standard } else { Out::File(file.clone(), None) };
    let mut follower = Follower::default();
    let room: Option<&dyn Fn() -> bool> = if matches!(out, Out::Standard) { Some(&has_room) } else { None };
    let ended = client.stream(&question, &path, room, &mut |bytes| {
        follower.push(bytes);
        out.write(bytes)
    });
    let whole = ended.map_err(|error| match error {
        ClientError::Output { source } => named(&file)(source),
        other => other.to_string(),
    })?;
    let Some(end) = follower.end() else {
        let reason = if whole { "the daemon ended it without a word" } else { "the daemon's worker went away" };
        out.close(&follower, reason).map_err(named(&file))?;
        return Err(format!("the trace ended early: {reason}; {} has what came until then", file.display()).into());
    };
    if end.early {
        let why = format!("the trace ended early: {}; {} has what came until then", end.reason, file.display());
        return Err(why.into());
    }
    if matches!(out, Out::Standard) {
        return Ok(());
    }
    show(global, &json!({ "file": file, "events": end.events, "dropped": end.dropped, "reason": end.reason }), |_| {
        let dropped = if end.dropped > 0 { format!(", {} found no room", end.dropped) } else { String::new() };
        let advice = format!("millrace analyze {}", file.display());
        format!("{}: {} events{dropped}; {}\n{advice} says what they mean", file.display(), end.events, end.reason)
    })
}

pub(crate) fn analyze(global: &Global, args: &AnalyzeArgs) -> Done {
    let file = File::open(&args.file).map_err(named(&args.file))?;
    let trace = Trace::read(file).map_err(|error| format!("{}: {error}", args.file.display()))?;
    let guests = args.guest.as_deref().map(|path| joined(&trace, path)).transpose()?;
    let report = Report::of(&trace, guests.as_ref());
    if let Some(path) = &args.plot {
        let picture = match path.extension().and_then(|extension| extension.to_str()) {
            Some("svg") => plot::svg(&trace, &report),
            Some("html" | "htm") => plot::html(&trace, &report),
            _ => {
                let what = format!("{}: a plot is a page (.html) or a picture (.svg)", path.display());
                return Err(Misuse(what).into());
            }
        };
        std::fs::write(path, picture).map_err(named(path))?;
    }
    if let Some((format, path)) = args.export.zip(args.out.as_deref()) {
        let mut out = BufWriter::new(File::create(path).map_err(named(path))?);
        let written = match format {
            Export::Perfetto => export::perfetto::write(&trace, &mut out),
            Export::Blktrace => export::blktrace::write(&trace, &mut out).map(drop),
        };
        written.and_then(|()| out.flush()).map_err(named(path))?;
    }
    if global.json { output::json(&report) } else { output::bytes(report.text().as_bytes()) }
}

fn joined(trace: &Trace, path: &Path) -> Result<guest::Joined, String> {
    // The names of programs may be in any letters.
    let bytes = std::fs::read(path).map_err(named(path))?;
    let text = String::from_utf8_lossy(&bytes);
    let requests = guest::parse(&text).map_err(|error| format!("{}: {error}", path.display()))?;
    guest::join(trace, &requests).map_err(|error| format!("{}: {error}", path.display()))
}
