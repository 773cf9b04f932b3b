//! The account: what metered volumes did, second by second, in a file that is only appended to (docs/formats/usage.md).
//!
//! ```text
//!   meters in volumes' stacks ── every 5 s, by the host thread ──► STATE_DIR/usage.log ──► sums by volume, tenant or device
//! ```
//!
//! A crash loses what was counted since the last line: a few seconds of requests, and up to a minute of an idle volume's size. What goes in
//! order — a volume, a meter, the worker — has a last line before. A line that was cut short by a crash is skipped; one that is whole and
//! of another program's is refused, for without it sums would be too small.

use std::{
    any::Any,
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError, Weak},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use crc_fast::{CrcAlgorithm, checksum};
use millrace_services::meter::{self, Reading};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Name, cells};

#[cfg(test)]
mod tests;

/// How often is written what was counted.
const EVERY: Duration = Duration::from_secs(5);
/// How often a volume that does nothing has a line: its capacity is on the account as well.
const IDLE: Duration = Duration::from_secs(60);
/// The shortest time that a line is about.
const SHORTEST: Duration = Duration::from_secs(1);
/// The file's name in the state directory.
const FILE: &str = "usage.log";
/// Bytes at the file's end in which its last whole line is looked for: some hundred lines.
const TAIL: u64 = 64 << 10;
/// Bytes of a file that are read through for where a time begins; further apart than that, times are looked for by halves.
const NEAR: u64 = 64 << 10;
/// Seconds by which the clock may be behind the account before that is told.
const BEHIND: u64 = 60;
/// What lines are like that are written. Of the first version, without a number, are lines without throttled time.
const VERSION: u32 = 2;

/// What a volume did in some time: one line of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Line {
    #[serde(default = "first_version")]
    version: u32,
    /// The end of the time, in seconds since 1970.
    time: u64,
    /// Its length in seconds.
    seconds: u64,
    volume: Name,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    device: Option<Name>,
    /// What was counted in it, and the tenant.
    #[serde(flatten)]
    counted: Reading,
    /// The volume's size in bytes.
    provisioned: u64,
    /// Bytes that its medium held for it.
    used: u64,
}

fn first_version() -> u32 {
    1
}

/// What a meter counts with, while it does.
pub(crate) type Counters = Weak<dyn Any + Send + Sync>;

/// What a meter says now.
pub(crate) struct Metered {
    pub(crate) volume: Name,
    /// What it counts with: another one of the same volume counts anew.
    pub(crate) meter: Counters,
    /// Whose is what is nobody's else: the volume's size, and requests of no device.
    pub(crate) device: Option<Name>,
    pub(crate) reading: Reading,
    /// What each device has done of it, by the number that it counts under; without a name those that do not show the volume now.
    pub(crate) apart: Vec<(Option<Name>, u32, Reading)>,
    pub(crate) provisioned: u64,
    pub(crate) used: u64,
}

impl Metered {
    /// What is known of it once it is written up to then.
    fn known(&self, when: Instant) -> Known {
        let apart = self.apart.iter().map(|(_, number, reading)| (*number, reading.clone())).collect();
        Known { meter: self.meter.clone(), reading: self.reading.clone(), apart, when }
    }
}

/// What is summed up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum UsageBy {
    /// Each volume.
    #[default]
    Volume,
    /// Each tenant.
    Tenant,
    /// Each device that showed the volume.
    Device,
}

/// Which part of the account is asked for.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct UsageQuestion {
    /// What was written after this second since 1970.
    pub from: Option<u64>,
    /// What was written up to this one. What is written between the question and a time that is still to come is in no period that begins
    /// then, either.
    pub to: Option<u64>,
    /// What is summed up.
    pub by: UsageBy,
}

/// Of a number that may be larger than 64 bits hold.
fn large() -> utoipa::openapi::schema::Object {
    utoipa::openapi::ObjectBuilder::new()
        .schema_type(utoipa::openapi::schema::Type::Integer)
        .minimum(Some(0))
        .description(Some("A whole number, which may be larger than 64 bits hold"))
        .build()
}

/// A sum.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UsageRow {
    /// The volume, tenant or device; empty for what belongs to none.
    pub name: String,
    /// Seconds that were metered, over all its volumes.
    pub seconds: u64,
    /// Reads and compares.
    pub reads: u64,
    /// Writes and copies.
    pub writes: u64,
    /// Flushes and erasures.
    pub others: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Microseconds that throttles held requests back, over all requests.
    #[serde(default)]
    pub throttled_us: u64,
    /// Bytes of its volumes' sizes, times seconds.
    #[schema(schema_with = large)]
    pub provisioned_byte_seconds: u128,
    /// Bytes that its volumes' media held, times seconds.
    #[schema(schema_with = large)]
    pub used_byte_seconds: u128,
}

#[derive(Default)]
struct State {
    file: Option<File>,
    last: BTreeMap<Name, Known>,
    /// Meters that are on the account no more, though they may count on below another one.
    ended: Vec<Counters>,
    next: Option<Instant>,
    /// The latest time that lines have, or at which they were asked for; `None`: the file has not been looked at.
    latest: Option<u64>,
    /// The latest time at which they were asked for; whoever did has all lines up to it.
    asked: u64,
    /// The clock is known to be behind that.
    is_behind: bool,
}

/// What was written last of a meter.
struct Known {
    meter: Counters,
    reading: Reading,
    /// Of each device, by its number.
    apart: BTreeMap<u32, Reading>,
    /// The end of the time that was written.
    when: Instant,
}

impl State {
    /// The time that lines have now, unless they were asked for in it. Where the clock has gone back it stands still: bills of the time before
    /// may be out, and what came to their periods later would be on none.
    fn time(&mut self, path: &Path) -> io::Result<u64> {
        let clock = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let latest = if let Some(latest) = self.latest { latest } else { last_time(path)? };
        let is_behind = latest > clock.saturating_add(BEHIND);
        if is_behind && !self.is_behind {
            let (path, seconds) = (path.display(), latest - clock);
            tracing::warn!(%path, seconds, "the clock is behind the account: lines have its latest time until the clock is there");
        }
        self.is_behind = is_behind;
        let time = latest.max(clock);
        self.latest = Some(time);
        Ok(time)
    }
}

/// The account of a daemon.
pub(crate) struct Account {
    /// `None`: without a state directory, nothing is kept.
    path: Option<PathBuf>,
    state: Mutex<State>,
}

fn encode(line: &Line) -> String {
    let json = serde_json::to_string(line).expect("a line has text for keys and nothing that JSON lacks");
    format!("{json}\t{:08x}\n", checksum(CrcAlgorithm::Crc32Iscsi, json.as_bytes()))
}

/// `None`: it was cut short. Otherwise it is a line, or why it is none that this program reads.
fn decode(text: &str) -> Option<Result<Line, String>> {
    let (json, sum) = text.trim_end_matches('\n').rsplit_once('\t')?;
    let sum = u64::from(u32::from_str_radix(sum, 16).ok()?);
    (checksum(CrcAlgorithm::Crc32Iscsi, json.as_bytes()) == sum).then(|| read(json))
}

fn decode_bytes(bytes: &[u8]) -> Option<Result<Line, String>> {
    decode(std::str::from_utf8(bytes).ok()?)
}

fn read(json: &str) -> Result<Line, String> {
    #[derive(Deserialize)]
    struct Head {
        #[serde(default = "first_version")]
        version: u32,
    }
    let line = serde_json::from_str::<Line>(json);
    let version = match &line {
        Ok(line) => line.version,
        Err(_) => serde_json::from_str(json).map_or(1, |head: Head| head.version),
    };
    if !(1..=VERSION).contains(&version) {
        return Err(format!(
            "is of version {version}, and this program reads up to {VERSION}: ask the program that wrote it"
        ));
    }
    line.map_err(|error| format!("is none of an account ({error}): take it out of the file to have the rest"))
}

/// The latest time of the lines at the end of a file; 0 where there are none.
fn last_time(path: &Path) -> io::Result<u64> {
    let mut file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        file => file?,
    };
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail)?;
    let lines = tail.split(|byte| *byte == b'\n').filter_map(|line| decode_bytes(line)?.ok());
    Ok(lines.map(|line| line.time).max().unwrap_or(0))
}

/// Where the first line of a meter begins: when that came, but not before the end of what is written of the one that it follows.
fn beginning(meter: &Counters, earlier: Option<&Known>, now: Instant) -> Instant {
    let came = meter::age(meter).and_then(|age| now.checked_sub(age)).unwrap_or(now);
    earlier.map_or(came, |earlier| earlier.when.max(came))
}

/// What was counted since.
fn since(now: &Reading, last: &Reading) -> Reading {
    Reading {
        tenant: now.tenant.clone(),
        reads: now.reads.saturating_sub(last.reads),
        writes: now.writes.saturating_sub(last.writes),
        others: now.others.saturating_sub(last.others),
        read_bytes: now.read_bytes.saturating_sub(last.read_bytes),
        written_bytes: now.written_bytes.saturating_sub(last.written_bytes),
        throttled_us: now.throttled_us.saturating_sub(last.throttled_us),
    }
}

/// Whether a meter has counted on since a reading that was taken before another one.
fn is_before(one: &Reading, other: &Reading) -> bool {
    one.reads < other.reads || one.writes < other.writes || one.others < other.others
}

/// What is left of a reading without a part of it.
fn without(all: &Reading, part: &Reading) -> Reading {
    Reading {
        tenant: all.tenant.clone(),
        reads: all.reads.saturating_sub(part.reads),
        writes: all.writes.saturating_sub(part.writes),
        others: all.others.saturating_sub(part.others),
        read_bytes: all.read_bytes.saturating_sub(part.read_bytes),
        written_bytes: all.written_bytes.saturating_sub(part.written_bytes),
        throttled_us: all.throttled_us,
    }
}

fn is_nothing(counted: &Reading) -> bool {
    *counted == Reading { tenant: counted.tenant.clone(), ..Reading::default() }
}

/// What devices other than the one that has the volume's line have done since.
fn of_others(one: &Metered, known: Option<&Known>) -> Vec<(Name, Reading)> {
    let others = one.apart.iter().filter(|(name, ..)| *name != one.device);
    let counted = others.filter_map(|(name, number, now)| {
        let last = known.and_then(|known| known.apart.get(number)).cloned().unwrap_or_default();
        Some((name.clone()?, since(now, &last)))
    });
    counted.filter(|(_, counted)| !is_nothing(counted)).collect()
}

impl Account {
    pub(crate) fn new(state_dir: Option<&Path>) -> Self {
        Self { path: state_dir.map(|directory| directory.join(FILE)), state: Mutex::default() }
    }

    /// Whether it is time to write.
    pub(crate) fn is_due(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.path.is_some() && state.next.is_none_or(|next| Instant::now() >= next)
    }

    /// Writes what meters have counted since the last time.
    pub(crate) fn write(&self, metered: &[Metered]) {
        self.put(metered, IDLE, true);
        self.state.lock().unwrap_or_else(PoisonError::into_inner).next = Some(Instant::now() + EVERY);
    }

    /// Writes what some have counted to the last, for they go. What is not made durable outlives the process, not the system.
    pub(crate) fn close(&self, metered: &[Metered], durable: bool) {
        self.put(metered, SHORTEST, durable);
    }

    /// A meter is on the account no more: of it, nothing that was read before is written. `counted`: the one that follows it, where that has
    /// counted beside it; what it has counted by then is on nobody's.
    pub(crate) fn end(&self, ended: &Counters, counted: Option<&Metered>) {
        if self.path.is_none() {
            return;
        }
        let state = &mut *self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.ended.retain(|it| it.strong_count() > 0 && counted.is_none_or(|one| !it.ptr_eq(&one.meter)));
        state.ended.push(ended.clone());
        if let Some(one) = counted {
            state.last.insert(one.volume.clone(), one.known(Instant::now()));
        }
    }

    /// Somebody is about to sum up the account: what is written from now on has a later time.
    pub(crate) fn expect(&self) -> io::Result<()> {
        if let Some(path) = &self.path {
            let state = &mut *self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.asked = state.time(path)?;
        }
        Ok(())
    }

    /// Volumes that do nothing have a line when so much time has passed.
    fn put(&self, metered: &[Metered], idle_line: Duration, durable: bool) {
        let Some(path) = &self.path else { return };
        let state = &mut *self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let time = match state.time(path) {
            // In the second of a question as well, and it is on the next bill.
            Ok(time) => time.max(state.asked.saturating_add(1)),
            Err(error) => return tell_unwritten(path, &error),
        };
        let mut text = String::new();
        let mut written = Vec::new();
        // Not all meters are here each time. One that is gone will not come back: if its volume does, by the same name,
        // out of another worker or with a meter again, the time between is nobody's. What has just gone may still be followed.
        state.last.retain(|_, known| known.meter.strong_count() > 0 || now.duration_since(known.when) < IDLE);
        for one in metered {
            let earlier = state.last.get(&one.volume);
            let known = earlier.filter(|known| known.meter.ptr_eq(&one.meter));
            // Between the reading of its meter and this, another thread has written what it counts, and perhaps its last line.
            let is_old = known.is_some_and(|known| is_before(&one.reading, &known.reading));
            if is_old || one.meter.strong_count() == 0 || state.ended.iter().any(|it| it.ptr_eq(&one.meter)) {
                continue;
            }
            let counted = since(&one.reading, known.map_or(&Reading::default(), |known| &known.reading));
            let idle = is_nothing(&counted);
            let start = known.map_or_else(|| beginning(&one.meter, earlier, now), |known| known.when);
            let past = now.duration_since(start);
            if idle && known.is_some() && past < idle_line {
                continue;
            }
            let others = of_others(one, known);
            let counted = others.iter().fold(counted, |counted, (_, part)| without(&counted, part));
            let Metered { volume, device, provisioned, used, .. } = one;
            let (volume, device, seconds) = (volume.clone(), device.clone(), past.as_secs());
            // Parts of a second count with the next line.
            let when = start + Duration::from_secs(seconds);
            let (provisioned, used) = (*provisioned, *used);
            let line = Line { version: VERSION, time, seconds, volume: volume.clone(), device, counted, provisioned, used };
            text.push_str(&encode(&line));
            for (device, counted) in others {
                // The time and the volume's size are in its first line.
                let (device, counted) = (Some(device), counted);
                text.push_str(&encode(&Line { seconds: 0, device, counted, provisioned: 0, used: 0, ..line.clone() }));
            }
            written.push((volume, one.known(when)));
        }
        if text.is_empty() {
            return;
        }
        if let Err(error) = append(&mut state.file, path, &text, durable) {
            state.file = None;
            return tell_unwritten(path, &error);
        }
        state.latest = Some(time);
        state.last.extend(written);
    }

    /// As if so much time had passed since the last lines; none is written from now on but those that are asked for.
    #[cfg(test)]
    pub(crate) fn pass(&self, time: Duration) {
        let mut state = self.state.lock().unwrap();
        for known in state.last.values_mut() {
            known.when -= time;
        }
        state.next = Some(Instant::now() + Duration::from_secs(36_000));
    }

    /// Sums up a part of the account.
    pub(crate) fn sums(&self, question: &UsageQuestion) -> io::Result<Vec<UsageRow>> {
        self.expect()?;
        let mut rows: BTreeMap<String, UsageRow> = BTreeMap::new();
        for path in self.path.iter().chain(&cells_accounts(self.path.as_deref())?) {
            match File::open(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                file => add_file(&mut rows, path, file?, question)?,
            }
        }
        Ok(rows.into_values().collect())
    }
}

/// What was counted stays in the meters, and is tried again.
fn tell_unwritten(path: &Path, error: &io::Error) {
    tracing::error!(path = %path.display(), %error, "the account could not be written");
}

/// The accounts of the cells of a daemon with this account, those that are no more as well.
fn cells_accounts(own: Option<&Path>) -> io::Result<Vec<PathBuf>> {
    let Some(cells) = own.and_then(Path::parent).map(|directory| directory.join(cells::DIR)) else { return Ok(Vec::new()) };
    match fs::read_dir(cells) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        entries => entries?.map(|entry| Ok(entry?.path().join(FILE))).collect(),
    }
}

/// Adds what a file has of the period. Times in it do not go back: what is before that is not read, nor what is after it.
fn add_file(
    rows: &mut BTreeMap<String, UsageRow>,
    path: &Path,
    file: impl Read + Seek,
    question: &UsageQuestion,
) -> io::Result<()> {
    let (mut reader, mut bytes) = (BufReader::new(file), Vec::new());
    let mut at = question.from.map_or(Ok(0), |from| seek_time(&mut reader, from))?;
    loop {
        bytes.clear();
        let length = reader.read_until(b'\n', &mut bytes)?;
        if length == 0 {
            return Ok(());
        }
        let start = at;
        at += length as u64;
        let line = match decode_bytes(&bytes) {
            None => continue,
            Some(Ok(line)) => line,
            Some(Err(why)) => {
                let number = number_of(&mut reader, start)?;
                let why = format!("{}: line {number} {why}", path.display());
                return Err(io::Error::new(io::ErrorKind::InvalidData, why));
            }
        };
        // Its time is the end of what it is about: of two periods that meet, it is in the earlier one.
        if question.from.is_some_and(|from| line.time <= from) {
            continue;
        }
        if question.to.is_some_and(|to| line.time > to) {
            return Ok(());
        }
        let name = match question.by {
            UsageBy::Volume => line.volume.to_string(),
            UsageBy::Tenant => line.counted.tenant.clone(),
            UsageBy::Device => line.device.as_ref().map(Name::to_string).unwrap_or_default(),
        };
        rows.entry(name.clone()).or_insert_with(|| UsageRow { name, ..UsageRow::default() }).add(&line);
    }
}

/// Goes to a line with nothing before it that is later than a time, near to the first one that is.
fn seek_time(reader: &mut (impl BufRead + Seek), time: u64) -> io::Result<u64> {
    let (mut early, mut late) = (0, reader.seek(SeekFrom::End(0))?);
    while late - early > NEAR {
        let middle = early + (late - early) / 2;
        match line_after(reader, middle, late)? {
            Some((at, found)) if found <= time => early = at,
            _ => late = middle,
        }
    }
    reader.seek(SeekFrom::Start(early))
}

/// The first whole line that begins after a place and before another one: where, and its time.
fn line_after(reader: &mut (impl BufRead + Seek), place: u64, end: u64) -> io::Result<Option<(u64, u64)>> {
    reader.seek(SeekFrom::Start(place))?;
    // Most likely in the midst of one.
    let mut bytes = Vec::new();
    let mut at = place + reader.read_until(b'\n', &mut bytes)? as u64;
    while at < end {
        bytes.clear();
        let length = reader.read_until(b'\n', &mut bytes)? as u64;
        match decode_bytes(&bytes) {
            Some(Ok(line)) => return Ok(Some((at, line.time))),
            _ if length == 0 => return Ok(None),
            _ => at += length,
        }
    }
    Ok(None)
}

/// The number of the line that begins at a place.
fn number_of(reader: &mut (impl BufRead + Seek), place: u64) -> io::Result<usize> {
    reader.seek(SeekFrom::Start(0))?;
    let (mut before, mut number) = (reader.take(place), 1);
    loop {
        let bytes = before.fill_buf()?;
        let length = bytes.len();
        if length == 0 {
            return Ok(number);
        }
        number += bytes.split(|byte| *byte == b'\n').count() - 1;
        before.consume(length);
    }
}

impl UsageRow {
    fn add(&mut self, line: &Line) {
        let Reading { reads, writes, others, read_bytes, written_bytes, throttled_us, .. } = line.counted;
        let sums = [
            (&mut self.seconds, line.seconds),
            (&mut self.reads, reads),
            (&mut self.writes, writes),
            (&mut self.others, others),
            (&mut self.read_bytes, read_bytes),
            (&mut self.written_bytes, written_bytes),
            (&mut self.throttled_us, throttled_us),
        ];
        for (sum, more) in sums {
            *sum = sum.saturating_add(more);
        }
        self.provisioned_byte_seconds += u128::from(line.provisioned) * u128::from(line.seconds);
        self.used_byte_seconds += u128::from(line.used) * u128::from(line.seconds);
    }
}

fn append(slot: &mut Option<File>, path: &Path, text: &str, durable: bool) -> io::Result<()> {
    let file = if let Some(file) = slot {
        file
    } else {
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        // A line that a crash has cut short must not spoil the next one.
        if file.metadata()?.len() > 0 {
            file.write_all(b"\n")?;
        } else if let Some(directory) = path.parent() {
            // Without its name what is in it would be lost with the power.
            File::open(directory)?.sync_all()?;
        }
        slot.insert(file)
    };
    let before = file.metadata()?.len();
    let written = file.write_all(text.as_bytes()).and_then(|()| if durable { file.sync_data() } else { Ok(()) });
    if written.is_err() {
        // It will be tried again: whole lines of it that are there already would count twice.
        let _ = file.set_len(before);
    }
    written
}
