use std::sync::{Arc, LazyLock};

use millrace_backends::NullVolume;
use millrace_block::{
    BlockSize, Volume,
    clock::{self, SimulatedTime},
    conformance::Random,
};
use millrace_engine::EngineError;
use millrace_services::{
    Node, Reason, SharedObjects,
    background::{Running, Spawner, Stop, Task},
    graph::{Graph, LeafError, LeafRequest, Leaves, Plan},
};

use super::*;

/// A meter that is there all the time.
static METER: LazyLock<Meter> = LazyLock::new(|| Arc::new(()));

type Meter = Arc<dyn Any + Send + Sync>;

fn metered(volume: &str, tenant: &str, reads: u64) -> Metered {
    metered_by(&METER, volume, tenant, reads)
}

fn metered_by(meter: &Meter, volume: &str, tenant: &str, reads: u64) -> Metered {
    let reading = Reading { tenant: tenant.to_owned(), reads, read_bytes: reads * 512, ..Reading::default() };
    Metered {
        volume: volume.parse().unwrap(),
        meter: Arc::downgrade(meter),
        device: Some("d".parse().unwrap()),
        reading,
        apart: Vec::new(),
        provisioned: 1 << 20,
        used: 4096,
    }
}

fn reads(account: &Account, by: UsageBy) -> Vec<(String, u64)> {
    let rows = account.sums(&UsageQuestion { by, ..UsageQuestion::default() }).unwrap();
    rows.into_iter().map(|row| (row.name, row.reads)).collect()
}

#[test]
fn what_is_counted_is_on_the_account_once() {
    let directory = tempfile::tempdir().unwrap();
    let account = Account::new(Some(directory.path()));
    assert!(account.is_due() && reads(&account, UsageBy::Volume).is_empty());
    account.write(&[metered("a", "x", 5), metered("b", "y", 1), metered("c", "x", 0)]);
    account.write(&[metered("a", "x", 7), metered("b", "y", 1), metered("c", "x", 0)]);
    assert!(!account.is_due());
    let by_volume = [("a".to_owned(), 7), ("b".to_owned(), 1), ("c".to_owned(), 0)];
    assert_eq!(reads(&account, UsageBy::Volume), by_volume);
    assert_eq!(reads(&account, UsageBy::Tenant), [("x".to_owned(), 7), ("y".to_owned(), 1)]);
    assert_eq!(reads(&account, UsageBy::Device), [("d".to_owned(), 8)]);
    // A daemon that starts anew counts from 0, and so does a volume that was made anew.
    let account = Account::new(Some(directory.path()));
    account.write(&[metered("a", "x", 3)]);
    let anew: Meter = Arc::new(());
    account.write(&[metered_by(&anew, "a", "x", 1)]);
    assert_eq!(reads(&account, UsageBy::Volume)[0], ("a".to_owned(), 11));
    let lines = std::fs::read_to_string(directory.path().join(FILE)).unwrap();
    let times: Vec<u64> = lines.lines().filter_map(|line| Some(decode(line)?.unwrap().time)).collect();
    let asked = |from, to| account.sums(&UsageQuestion { from, to, by: UsageBy::Device }).unwrap().len();
    assert_eq!((asked(Some(times[0] - 1), None), asked(Some(times[5]), None), asked(None, Some(times[0] - 1))), (1, 0, 0));
    // A line is in one of two periods that meet.
    let reads =
        |from, to| account.sums(&UsageQuestion { from, to, by: UsageBy::Device }).unwrap().pop().map_or(0, |row| row.reads);
    assert_eq!(reads(None, Some(times[0])) + reads(Some(times[0]), None), reads(None, None));
}

/// A device that shows the volume no more, and then again, is charged with what it did once.
#[test]
fn a_device_that_comes_again_is_charged_once() {
    let directory = tempfile::tempdir().unwrap();
    let account = Account::new(Some(directory.path()));
    let part = |reads| Reading { tenant: "x".to_owned(), reads, read_bytes: reads * 512, ..Reading::default() };
    let write = |all: u64, of_b: u64, shown: bool| {
        let name = shown.then(|| "e".parse().unwrap());
        account.write(&[Metered { apart: vec![(name, 7, part(of_b))], ..metered("a", "x", all) }]);
    };
    write(1000, 900, true);
    write(1100, 900, false);
    write(1200, 900, true);
    write(1250, 940, true);
    assert_eq!(reads(&account, UsageBy::Device), [("d".to_owned(), 310), ("e".to_owned(), 940)]);
    assert_eq!(reads(&account, UsageBy::Volume), [("a".to_owned(), 1250)]);
}

/// A meter that was below another one and has counted the same requests.
#[test]
fn what_a_meter_counted_while_another_was_on_the_account_is_nobodys() {
    let directory = tempfile::tempdir().unwrap();
    let account = Account::new(Some(directory.path()));
    let (upper, lower): (Meter, Meter) = (Arc::new(()), Arc::new(()));
    let part = |reads| Reading { tenant: "y".to_owned(), reads, read_bytes: reads * 512, ..Reading::default() };
    let below = |all, of_e| {
        let apart = vec![(Some("e".parse().unwrap()), 7, part(of_e))];
        Metered { apart, ..metered_by(&lower, "a", "y", all) }
    };
    account.write(&[metered_by(&upper, "a", "x", 60)]);
    account.close(&[metered_by(&upper, "a", "x", 100)], true);
    let old = metered_by(&upper, "a", "x", 100);
    account.end(&old.meter, Some(&below(100, 40)));
    // It was read before that, by another thread.
    account.write(&[old]);
    account.write(&[below(103, 42)]);
    assert_eq!(reads(&account, UsageBy::Tenant), [("x".to_owned(), 100), ("y".to_owned(), 3)]);
    assert_eq!(reads(&account, UsageBy::Device), [("d".to_owned(), 101), ("e".to_owned(), 2)]);
}

/// It counts on below the one that was put over it, and a thread that has read it before comes late.
#[test]
fn what_was_read_of_a_meter_before_another_was_put_over_it_is_not_charged_again() {
    let directory = tempfile::tempdir().unwrap();
    let account = Account::new(Some(directory.path()));
    let (upper, lower): (Meter, Meter) = (Arc::new(()), Arc::new(()));
    account.write(&[metered_by(&lower, "a", "y", 60)]);
    let read = metered_by(&lower, "a", "y", 70);
    let last = metered_by(&lower, "a", "y", 100);
    let ended = last.meter.clone();
    account.close(&[last], true);
    account.end(&ended, None);
    account.close(&[metered_by(&upper, "a", "x", 3)], false);
    account.write(&[read]);
    let by_tenant = |x, y| [("x".to_owned(), x), ("y".to_owned(), y)];
    assert_eq!(reads(&account, UsageBy::Tenant), by_tenant(3, 100));
    // When it is the uppermost again it is on the account, from then on.
    account.close(&[metered_by(&upper, "a", "x", 5)], true);
    account.end(&Arc::downgrade(&upper), Some(&metered_by(&lower, "a", "y", 105)));
    account.write(&[metered_by(&lower, "a", "y", 106)]);
    assert_eq!(reads(&account, UsageBy::Tenant), by_tenant(5, 101));
}

/// A thread has read the meters, and another one writes what they count now before it does.
#[test]
fn what_was_read_before_another_line_is_not_charged_again() {
    let directory = tempfile::tempdir().unwrap();
    let account = Account::new(Some(directory.path()));
    let meter: Meter = Arc::new(());
    account.write(&[metered_by(&meter, "a", "x", 5)]);
    let read = metered_by(&meter, "a", "x", 7);
    account.close(&[metered_by(&meter, "a", "x", 9)], true);
    account.write(&[read]);
    assert_eq!(reads(&account, UsageBy::Volume), [("a".to_owned(), 9)]);
    let read = metered_by(&meter, "a", "x", 9);
    account.close(&[metered_by(&meter, "a", "x", 10)], true);
    drop(meter);
    account.write(&[]);
    account.write(&[read]);
    assert_eq!(reads(&account, UsageBy::Volume), [("a".to_owned(), 10)]);
}

#[test]
fn a_line_cut_short_costs_itself_only() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(FILE);
    Account::new(Some(directory.path())).write(&[metered("a", "x", 5), metered("b", "x", 2)]);
    let whole = std::fs::read(&path).unwrap();
    let first = whole.iter().position(|byte| *byte == b'\n').unwrap();
    for length in 0..whole.len() {
        std::fs::write(&path, &whole[..length]).unwrap();
        let account = Account::new(Some(directory.path()));
        let before = if length <= first { 0 } else { 5 };
        let complete = length >= first && before == 0 || length + 1 >= whole.len();
        let sum = |account: &Account| reads(account, UsageBy::Tenant).first().map_or(0, |(_, reads)| *reads);
        assert!(sum(&account) == before || complete, "{length} bytes");
        account.write(&[metered("c", "x", 100)]);
        let after = sum(&account);
        assert!(after == before + 100 || complete && (after == 105 || after == 107), "{length} bytes: {after}");
    }
    std::fs::write(&path, b"nonsense\n{}\t00000000\n\xff\xfe\n").unwrap();
    assert!(reads(&Account::new(Some(directory.path())), UsageBy::Volume).is_empty());
    assert!(Account::new(None).sums(&UsageQuestion::default()).unwrap().is_empty());
}

/// Crashes in all, and those that one file goes through.
const CRASHES: u64 = 10_000;
const OF_ONE_FILE: u64 = 20;
/// What a disk writes as a whole.
const SECTOR: usize = 512;
const METERED: [&str; 3] = ["a", "b", "c"];

/// The reads of each volume that are on the account. Of no line is there a part.
fn on_account(account: &Account) -> [u64; 3] {
    let rows = account.sums(&UsageQuestion::default()).unwrap();
    let is_whole = |row: &UsageRow| METERED.contains(&row.name.as_str()) && row.read_bytes == row.reads * 512;
    assert!(rows.iter().all(is_whole), "{rows:?}");
    METERED.map(|volume| rows.iter().find(|row| row.name == volume).map_or(0, |row| row.reads))
}

/// What is left of a file of which so many bytes were durable: the rest ends anywhere, and of its sectors some are as they were before, and
/// some are of something else.
fn cut(random: &mut Random, mut bytes: Vec<u8>, durable: usize) -> Vec<u8> {
    if random.below(2) == 0 {
        let left = random.below((bytes.len() - durable) as u64 + 1);
        bytes.truncate(durable + left as usize);
    }
    let mut at = durable;
    while at < bytes.len() {
        let end = (at / SECTOR * SECTOR + SECTOR).min(bytes.len());
        match random.below(6) {
            0 => bytes[at..end].fill(0),
            1 => bytes[at..end].copy_from_slice(&random.bytes(end - at)),
            _ => {}
        }
        at = end;
    }
    bytes
}

/// One file, and one daemon after the other that dies with the power.
fn crashes(random: &mut Random) {
    // What a cut leaves is made here: being durable need not take the time of a disk.
    let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let path = directory.path().join(FILE);
    let mut account = Account::new(Some(directory.path()));
    let mut before = on_account(&account);
    for _ in 0..OF_ONE_FILE {
        let meter: Meter = Arc::new(());
        let mut durable = std::fs::metadata(&path).map_or(0, |file| file.len());
        let (mut counted, mut least, mut most) = ([0; 3], before, before);
        let rounds = 1 + random.below(4);
        for round in 1..=rounds {
            for count in &mut counted {
                *count += random.below(4);
            }
            let shown = METERED.iter().zip(counted).map(|(volume, reads)| shown_twice(&meter, volume, reads));
            let metered: Vec<_> = shown.collect();
            let way = random.below(3);
            if way == 0 {
                account.write(&metered);
            } else {
                account.close(&metered, way == 1);
            }
            most = std::array::from_fn(|at| before[at] + counted[at]);
            // The power may go before the last one is durable.
            if way < 2 && (round < rounds || random.below(2) == 0) {
                (least, durable) = (most, std::fs::metadata(&path).unwrap().len());
            }
        }
        assert_eq!(on_account(&account), most);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, cut(random, bytes, durable as usize)).unwrap();
        account = Account::new(Some(directory.path()));
        before = on_account(&account);
        let is_right = (0..METERED.len()).all(|at| (least[at]..=most[at]).contains(&before[at]));
        assert!(is_right, "{before:?} is on the account: {least:?} was durable, and {most:?} was done");
    }
}

/// As [`metered_by`]; half of it another device has asked for, so that it takes two lines.
fn shown_twice(meter: &Meter, volume: &str, reads: u64) -> Metered {
    let one = metered_by(meter, volume, "x", reads);
    let part = Reading { reads: reads / 2, read_bytes: reads / 2 * 512, ..one.reading.clone() };
    Metered { apart: vec![(Some("e".parse().unwrap()), 7, part)], ..one }
}

/// The power goes again and again, at any byte of what is not durable yet: what was is counted, once, and nothing that was not done.
#[test]
fn no_crash_loses_what_was_durable_or_counts_anything_twice() {
    for seed in 0..CRASHES / OF_ONE_FILE {
        eprintln!("the account: seed {seed:#x}");
        crashes(&mut Random::new(seed));
    }
}

#[test]
fn time_without_the_volume_is_nobodys() {
    let directory = tempfile::tempdir().unwrap();
    let account = Account::new(Some(directory.path()));
    let passes = |time: Duration| {
        for known in account.state.lock().unwrap().last.values_mut() {
            known.when -= time;
        }
    };
    let sums = || account.sums(&UsageQuestion::default()).unwrap().pop().map(|row| (row.seconds, row.reads)).unwrap();
    let meter: Meter = Arc::new(());
    account.write(&[metered_by(&meter, "a", "x", 5)]);
    passes(Duration::from_secs(100));
    // It misses a round.
    account.write(&[]);
    account.write(&[metered_by(&meter, "a", "x", 6)]);
    assert_eq!(sums(), (100, 6));
    // It is deleted; hours later there is one of the same name, which has done more already.
    drop(meter);
    passes(Duration::from_secs(36_000));
    let meter: Meter = Arc::new(());
    account.write(&[metered_by(&meter, "a", "y", 50)]);
    assert_eq!(sums(), (100, 56));
    passes(Duration::from_secs(10));
    account.write(&[metered_by(&meter, "a", "y", 51)]);
    assert_eq!(sums(), (110, 57));
}

#[test]
fn what_goes_has_a_last_line() {
    let directory = tempfile::tempdir().unwrap();
    let account = Account::new(Some(directory.path()));
    let seconds = || account.sums(&UsageQuestion::default()).unwrap().pop().unwrap().seconds;
    account.write(&[metered("a", "x", 5)]);
    for known in account.state.lock().unwrap().last.values_mut() {
        known.when -= Duration::from_secs(30);
    }
    account.write(&[metered("a", "x", 5)]);
    assert_eq!(seconds(), 0, "it is idle");
    for durable in [true, false] {
        account.close(&[metered("a", "x", 5)], durable);
        assert_eq!(seconds(), 30);
    }
}

/// A line with its sum, as a program writes it.
fn summed(json: &str) -> String {
    format!("{json}\t{:08x}\n", checksum(CrcAlgorithm::Crc32Iscsi, json.as_bytes()))
}

#[test]
fn throttled_time_is_on_the_account_and_lines_from_before_it_are_read() {
    let directory = tempfile::tempdir().unwrap();
    // As it was written before lines had a version.
    let first = r#"{"time":7,"seconds":5,"volume":"a","device":"d","tenant":"x","reads":3,"writes":2,"others":1,"read_bytes":1536,"written_bytes":1024,"provisioned":512,"used":64}"#;
    std::fs::write(directory.path().join(FILE), summed(first)).unwrap();
    let account = Account::new(Some(directory.path()));
    let row = || account.sums(&UsageQuestion::default()).unwrap().pop().unwrap();
    let (provisioned_byte_seconds, used_byte_seconds) = (2560, 320);
    let (reads, writes, others, read_bytes, written_bytes) = (3, 2, 1, 1536, 1024);
    let expected = UsageRow {
        name: "a".to_owned(),
        seconds: 5,
        reads,
        writes,
        others,
        read_bytes,
        written_bytes,
        throttled_us: 0,
        provisioned_byte_seconds,
        used_byte_seconds,
    };
    assert_eq!(row(), expected);
    let held = |throttled_us| {
        let mut metered = metered("a", "x", 5);
        metered.reading.throttled_us = throttled_us;
        metered
    };
    // A volume whose requests only wait is not idle.
    account.write(&[held(1_500_000)]);
    account.write(&[held(1_500_007)]);
    assert_eq!((row().reads, row().throttled_us), (8, 1_500_007));
    let text = std::fs::read_to_string(directory.path().join(FILE)).unwrap();
    let lines: Vec<_> = text.lines().filter_map(decode).map(Result::unwrap).collect();
    let found: Vec<_> = lines.iter().map(|line| (line.version, line.counted.throttled_us)).collect();
    assert_eq!(found, [(1, 0), (2, 1_500_000), (2, 7)]);
    assert!(lines[1..].iter().all(|line| decode(&encode(line)) == Some(Ok(line.clone()))));
}

#[test]
fn a_line_that_another_program_wrote_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (path, account) = (directory.path().join(FILE), Account::new(Some(directory.path())));
    account.write(&[metered("a", "x", 5)]);
    let own = std::fs::read_to_string(&path).unwrap();
    let newer = own.split_once('\t').unwrap().0.replace("\"version\":2", "\"version\":3");
    for (json, why) in [
        (newer.as_str(), "line 2 is of version 3, and this program reads up to 2"),
        (r#"{"version":4,"day":1}"#, "line 2 is of version 4, and this program reads up to 2"),
        (r#"{"version":0}"#, "line 2 is of version 0"),
        (r#"{"version":2,"time":1}"#, "line 2 is none of an account (missing field"),
        ("nonsense", "line 2 is none of an account"),
    ] {
        std::fs::write(&path, format!("{own}{}", summed(json))).unwrap();
        let error = account.sums(&UsageQuestion::default()).unwrap_err().to_string();
        assert!(error.contains(why) && error.starts_with(path.to_str().unwrap()), "{error}");
        // What would be refused was cut short: it is none.
        std::fs::write(&path, format!("{own}{}", summed(json).replace('\t', "\t1"))).unwrap();
        assert_eq!(reads(&account, UsageBy::Volume), [("a".to_owned(), 5)]);
    }
}

/// A file, and how much of it was read.
struct Counting<'a> {
    file: io::Cursor<&'a [u8]>,
    read: usize,
}

impl Read for Counting<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.file.read(buffer)?;
        self.read += length;
        Ok(length)
    }
}

impl Seek for Counting<'_> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

/// An account of years: of it, only what is asked for is read.
#[test]
fn a_short_period_of_a_long_account_is_found_without_the_rest() {
    const LINES: u64 = 20_000;
    let time = |number: u64| 1000 + number / 3;
    let is_whole = |number: &u64| !number.is_multiple_of(7);
    let mut text = Vec::new();
    for number in 0..LINES {
        let counted = Reading { tenant: "x".to_owned(), reads: 1, ..Reading::default() };
        let (volume, time) = ("a".parse().unwrap(), time(number));
        let line = Line { version: VERSION, time, seconds: 1, volume, device: None, counted, provisioned: 0, used: 0 };
        let line = encode(&line);
        // Crashes have cut some short.
        let length = if is_whole(&number) { line.len() - 1 } else { line.len() / 2 };
        text.extend_from_slice(&line.as_bytes()[..length]);
        text.push(b'\n');
    }
    let sum = |text: &[u8], from, to| {
        let (mut rows, mut file) = (BTreeMap::new(), Counting { file: io::Cursor::new(text), read: 0 });
        let question = UsageQuestion { from: Some(from), to: Some(to), by: UsageBy::Volume };
        add_file(&mut rows, Path::new("usage.log"), &mut file, &question)?;
        Ok::<_, io::Error>((rows.pop_first().map_or(0, |(_, row)| row.reads), file.read))
    };
    let last = time(LINES - 1);
    let starts = [0, 999, 1000, 1001, 1007, last / 2, last / 2 + 1, last - 20, last - 1, last, last + 5];
    for (from, to) in starts.into_iter().flat_map(|from| [(from, from + 20), (from, u64::MAX)]) {
        let is_asked_for = |number: &u64| is_whole(number) && from < time(*number) && time(*number) <= to;
        let (reads, read) = sum(&text, from, to).unwrap();
        assert_eq!(reads, (0..LINES).filter(is_asked_for).count() as u64, "{from} to {to}");
        assert!(read < text.len() / 8 || to - from > 20 && from + 20 < last, "{from} to {to}: {read} bytes");
    }
    // Its number is that in the file.
    text.extend_from_slice(summed("nonsense").as_bytes());
    let error = sum(&text, last - 5, last).unwrap_err().to_string();
    assert!(error.starts_with(&format!("usage.log: line {} is none of an account", LINES + 1)), "{error}");
}

/// The clock goes back while the daemon runs, or between two: what is written then is in no period that a bill may be out for.
#[test]
fn no_line_is_earlier_than_one_before_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(FILE);
    let times = || -> Vec<u64> {
        let text = std::fs::read_to_string(&path).unwrap();
        text.lines().filter_map(|line| Some(decode(line)?.unwrap().time)).collect()
    };
    let account = Account::new(Some(directory.path()));
    account.write(&[metered("a", "x", 5)]);
    let ahead = times()[0] + 1_000_000;
    account.state.lock().unwrap().latest = Some(ahead);
    account.write(&[metered("a", "x", 7)]);
    assert_eq!(times()[1..], [ahead]);
    let all = reads(&account, UsageBy::Volume);
    let billed = UsageQuestion { to: Some(ahead - 1), ..UsageQuestion::default() };
    assert_eq!(account.sums(&billed).unwrap()[0].reads, 5);
    // The next daemon finds it in the file, before what a crash has cut short.
    let whole = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, format!("{whole}{}", &whole[..whole.len() / 3])).unwrap();
    let account = Account::new(Some(directory.path()));
    assert_eq!(reads(&account, UsageBy::Volume), all);
    account.write(&[metered("a", "x", 3)]);
    // It was asked for in that second, which is over for who did.
    assert_eq!(times()[2..], [ahead + 1]);
    assert_eq!(account.sums(&billed).unwrap()[0].reads, 5);
}

/// The daemon reads a cell's account itself, and tells it before: from then on its lines have a later time.
#[test]
fn who_is_told_that_the_account_is_read_does_not_go_back_behind_that() {
    let directory = tempfile::tempdir().unwrap();
    let account = Account::new(Some(directory.path()));
    let latest = || account.state.lock().unwrap().latest;
    assert_eq!(latest(), None);
    let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    account.expect().unwrap();
    assert!(latest() >= Some(before));
    let told = before + 1_000_000;
    account.state.lock().unwrap().latest = Some(told);
    account.expect().unwrap();
    account.write(&[metered("a", "x", 5)]);
    let sums = |to| account.sums(&UsageQuestion { to: Some(to), ..UsageQuestion::default() }).unwrap().len();
    assert_eq!((sums(told - 1), sums(told), sums(told + 1)), (0, 0, 1));
    Account::new(None).expect().unwrap();
}

/// A bill up to this second is out, and the second is not over: what is written in it is on the next one.
#[test]
fn what_is_written_in_the_second_of_a_bill_is_on_the_next_one() {
    let directory = tempfile::tempdir().unwrap();
    let account = Account::new(Some(directory.path()));
    account.write(&[metered("a", "x", 2)]);
    // So that the clock does not go on.
    let second = account.state.lock().unwrap().latest.unwrap() + 1_000_000;
    account.state.lock().unwrap().latest = Some(second);
    let sum = |from, to| {
        let rows = account.sums(&UsageQuestion { from, to, ..UsageQuestion::default() }).unwrap();
        rows.iter().map(|row| row.reads).sum::<u64>()
    };
    let bill = || sum(None, Some(second));
    assert_eq!(bill(), 2);
    account.write(&[metered("a", "x", 7)]);
    assert_eq!((bill(), sum(Some(second), None)), (2, 5));
    // Questions alone do not make time pass.
    let latest = account.state.lock().unwrap().latest;
    assert_eq!((bill(), bill(), account.state.lock().unwrap().latest), (2, 2, latest));
    assert_eq!(latest, Some(second + 1));
}

/// A leaf that is null, and nothing in the background.
struct Null;

impl Leaves for Null {
    fn open(&self, _: &LeafRequest<'_>) -> Result<Arc<dyn Volume>, LeafError> {
        let null: Arc<dyn Volume> = NullVolume::create("null", 1 << 20, BlockSize::B512).unwrap();
        Ok(null)
    }
}

impl Spawner for Null {
    fn spawn(&self, _: Task, _: Stop, _: Running) -> Result<(), EngineError> {
        Ok(())
    }
}

/// A volume's size counts from the moment when its meter came, and not twice where another one was on the account until then.
#[test]
fn the_first_line_has_the_time_since_its_meter_came() {
    let directory = tempfile::tempdir().unwrap();
    let (account, time) = (Account::new(Some(directory.path())), SimulatedTime::new());
    let (node, shared): (Node, _) = ("meter(tenant=x) | null".parse().unwrap(), SharedObjects::default());
    let plan = Plan { volume: "a", stack: &node, size: Some(1 << 20), block_size: BlockSize::B512 };
    let spawner: Arc<dyn Spawner> = Arc::new(Null);
    let mut graph = Graph::build(&plan, &Null, &shared, &spawner, None).unwrap();
    graph.mount(Reason::Create).unwrap();
    let (_, service) = graph.services("meter").remove(0);
    time.advance_to(clock::now() + 1_000_000_000_000);
    let of = |volume: &str| Metered { meter: meter::read(&service).unwrap().counted, ..metered(volume, "x", 0) };
    account.write(&[of("a")]);
    let row = |at: usize| account.sums(&UsageQuestion::default()).unwrap().swap_remove(at);
    assert_eq!((row(0).seconds, row(0).provisioned_byte_seconds), (1000, 1000 << 20));
    account.write(&[metered("b", "x", 1)]);
    account.write(&[of("b")]);
    assert!(row(1).seconds < 1000, "{:?}", row(1));
}
