//! What volumes did, and what it costs.

use std::{
    error::Error,
    fmt,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use millrace_control::{Size, UsageBy, UsageRow};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

use super::{Done, client};
use crate::{
    Misuse,
    cli::{Global, UsageArgs},
    output::{self, Table},
};

/// What prices are of: a million requests, a GiB, and a GiB for 30 days.
const MILLION: u128 = 1_000_000;
const GIB: u128 = 1 << 30;
const GIB_MONTH: u128 = GIB * 30 * 86_400;
/// A number that each of them divides: of it all parts of a bill are whole shares.
const SHARES: u128 = GIB_MONTH * 125;
/// Nano-units of the currency in the least amount that a bill has.
const NANOS: u128 = 100_000;
/// The least seconds since 1970 that are taken for such: what is less is rather a date without its dashes.
const LEAST_TIME: u64 = 1_000_000_000;
/// The last second of the year 9999.
const LAST_TIME: u64 = 253_402_300_799;

/// A price in nano-units of the currency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Price(u64);

impl Price {
    /// `None`: it is none, or has more digits than a floating-point number keeps.
    fn read(text: &str) -> Option<Self> {
        let (whole, parts) = text.split_once('.').unwrap_or((text, ""));
        let digits = whole.trim_start_matches('0').len() + parts.len();
        if digits > 15 || parts.len() > 9 {
            return None;
        }
        number(&format!("{whole}{parts:0<9}")).map(Self)
    }
}

impl<'de> Deserialize<'de> for Price {
    /// TOML has "nan" and "inf" for numbers.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let price = f64::deserialize(deserializer)?;
        // The shortest decimals that are this number are those that were written.
        Self::read(&price.to_string()).ok_or_else(|| {
            D::Error::custom(format!(
                "{price} is no price: it must be from 0 to below 18000000000, of 15 digits at most, 9 of them after the point"
            ))
        })
    }
}

/// An amount of money: ten-thousandths of the currency's unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Money(u128);

impl fmt::Display for Money {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:04}", self.0 / 10_000, self.0 % 10_000)
    }
}

impl Money {
    /// The same without zeroes at its end, but for cents.
    fn short(self) -> String {
        let text = self.to_string();
        text.strip_suffix("00").unwrap_or(&text).to_owned()
    }
}

impl Serialize for Money {
    #[expect(
        clippy::cast_precision_loss,
        reason = "its 15 digits are exact: the number is written with the decimals that it has here"
    )]
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(self.0 as f64 / 10_000.0)
    }
}

/// What things cost.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Prices {
    /// The currency's name.
    currency: String,
    million_reads: Price,
    million_writes: Price,
    gib_read: Price,
    gib_written: Price,
    /// A GiB of volume size for 30 days.
    gib_month_provisioned: Price,
    /// A GiB on the medium for 30 days.
    gib_month_used: Price,
}

impl Prices {
    fn read(path: &Path) -> Result<Self, Box<dyn Error>> {
        let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(toml::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?)
    }

    /// All parts are exact; their sum is rounded, once, and half of the least amount up.
    fn of(&self, row: &UsageRow) -> Money {
        let parts = [
            (self.million_reads, u128::from(row.reads), MILLION),
            (self.million_writes, u128::from(row.writes), MILLION),
            (self.gib_read, u128::from(row.read_bytes), GIB),
            (self.gib_written, u128::from(row.written_bytes), GIB),
            (self.gib_month_provisioned, row.provisioned_byte_seconds, GIB_MONTH),
            (self.gib_month_used, row.used_byte_seconds, GIB_MONTH),
        ];
        // Whole nano-units, and shares of one. No remainder is larger than what divides, so that these fit.
        let (mut whole, mut shares) = (0_u128, 0_u128);
        for (Price(price), amount, of) in parts {
            let price = u128::from(price);
            whole = whole.saturating_add((amount / of).saturating_mul(price));
            shares += (amount % of) * price * (SHARES / of);
        }
        let whole = whole.saturating_add(shares / SHARES);
        let rest = (whole % NANOS) * SHARES + shares % SHARES;
        Money(whole / NANOS + u128::from(2 * rest >= NANOS * SHARES))
    }
}

/// A row with its bill. Written as it is, for sums of bytes and seconds may be larger than a JSON value in memory holds.
#[derive(Serialize)]
struct Billed<'a> {
    usage: &'a UsageRow,
    bill: Money,
    currency: &'a str,
}

impl<'a> Billed<'a> {
    fn of(row: &'a UsageRow, prices: &'a Prices) -> Self {
        Self { usage: row, bill: prices.of(row), currency: &prices.currency }
    }
}

/// A number of digits and nothing else.
fn number(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

/// A time: seconds since 1970, a date, or a date with a time of day (UTC).
fn time(text: &str) -> Result<u64, String> {
    let wrong = || {
        format!("{text:?} is no time; write 2026-11-21, 2026-11-21T10:00:00Z or seconds since 1970, from {LEAST_TIME} on")
    };
    if let Some(seconds) = number(text) {
        // All that there is begins at 0.
        let good = seconds == 0 || (LEAST_TIME..=LAST_TIME).contains(&seconds);
        return good.then_some(seconds).ok_or_else(wrong);
    }
    let (date, clock) = match text.split_once('T') {
        Some((date, clock)) => (date, clock.strip_suffix('Z').unwrap_or(clock)),
        None => (text, "00:00:00"),
    };
    let numbers = |text: &str, by: char| -> Option<[u64; 3]> {
        let numbers: Vec<u64> = text.split(by).map(number).collect::<Option<_>>()?;
        numbers.try_into().ok()
    };
    let ([year, month, day], [hour, minute, second]) = numbers(date, '-').zip(numbers(clock, ':')).ok_or_else(wrong)?;
    let good = (1970..=9999).contains(&year) && (1..=12).contains(&month) && (1..=days_of(year, month)).contains(&day);
    if !good || hour > 23 || minute > 59 || second > 59 {
        return Err(wrong());
    }
    // Days since 1970, by years that begin in March.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    Ok((days - 719_468) * 86_400 + hour * 3600 + minute * 60 + second)
}

fn days_of(year: u64, month: u64) -> u64 {
    let is_leap = year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    match month {
        2 if is_leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

/// Shows a part of the account.
pub(crate) fn usage(global: &Global, args: &UsageArgs) -> Done {
    let by = match UsageBy::from(args.by) {
        UsageBy::Volume => "volume",
        UsageBy::Tenant => "tenant",
        UsageBy::Device => "device",
    };
    let mut path = format!("/v1/usage?by={by}");
    let [from, to] = [&args.from, &args.to].map(|text| text.as_deref().map(time).transpose());
    let (from, to) = (from.map_err(Misuse)?, to.map_err(Misuse)?);
    if from.zip(to).is_some_and(|(from, to)| from > to) {
        let [from, to] = [&args.from, &args.to].map(|text| text.as_deref().unwrap_or_default());
        return Err(Misuse(format!("--from {from} is later than --to {to}; exchange the two")).into());
    }
    for (name, value) in [("from", from), ("to", to)] {
        if let Some(value) = value {
            path = format!("{path}&{name}={value}");
        }
    }
    let prices = args.prices.as_deref().map(Prices::read).transpose()?;
    // Before the question: what is written in its second is no longer in the answer.
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let rows: Vec<UsageRow> = client(global)?.get(&path)?;
    if let Some(text) = args.to.as_deref().filter(|_| to > Some(now)) {
        // Not among what programs read.
        eprintln!(
            "millrace: --to {text} is still to come: what is written between now and then is neither in these sums nor in those \
             with --from {text}; for a bill ask again after that time"
        );
    }
    if global.json {
        return match &prices {
            Some(prices) => output::json(&rows.iter().map(|row| Billed::of(row, prices)).collect::<Vec<_>>()),
            None => output::json(&rows),
        };
    }
    output::line(&if args.csv { csv(by, &rows, prices.as_ref()) } else { table(by, &rows, prices.as_ref()) })
}

fn csv(by: &str, rows: &[UsageRow], prices: Option<&Prices>) -> String {
    let mut lines = vec![format!(
        "{by},seconds,reads,writes,others,read_bytes,written_bytes,provisioned_byte_seconds,used_byte_seconds,throttled_us{}",
        if prices.is_some() { ",bill" } else { "" }
    )];
    for row in rows {
        let name = if row.name.contains([',', '"', '\n']) {
            format!("\"{}\"", row.name.replace('"', "\"\""))
        } else {
            row.name.clone()
        };
        let UsageRow { seconds, reads, writes, others, read_bytes, written_bytes, throttled_us, .. } = row;
        let (provisioned, used) = (row.provisioned_byte_seconds, row.used_byte_seconds);
        let bill = prices.map(|prices| format!(",{}", prices.of(row))).unwrap_or_default();
        lines.push(format!(
            "{name},{seconds},{reads},{writes},{others},{read_bytes},{written_bytes},{provisioned},{used},{throttled_us}{bill}"
        ));
    }
    lines.join("\n")
}

/// Time as seconds and tenths, cut off.
fn seconds_of(microseconds: u64) -> String {
    let tenths = microseconds / 100_000;
    format!("{}.{} s", tenths / 10, tenths % 10)
}

fn table(by: &str, rows: &[UsageRow], prices: Option<&Prices>) -> String {
    let by = by.to_uppercase();
    let bill = prices.map(|prices| format!("BILL {}", prices.currency).trim_end().to_owned()).unwrap_or_default();
    let mut table = Table::new(&[&by, "READS", "READ", "WRITES", "WRITTEN", "OTHERS", "SIZE", "THROTTLED", &bill]);
    for row in rows {
        let seconds = u128::from(row.seconds.max(1));
        let size = u64::try_from(row.provisioned_byte_seconds / seconds).unwrap_or(u64::MAX);
        table.row([
            if row.name.is_empty() { "-".to_owned() } else { row.name.clone() },
            row.reads.to_string(),
            Size(row.read_bytes).approximate(),
            row.writes.to_string(),
            Size(row.written_bytes).approximate(),
            row.others.to_string(),
            Size(size).approximate(),
            seconds_of(row.throttled_us),
            prices.map(|prices| prices.of(row).short()).unwrap_or_default(),
        ]);
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        assert_eq!(time("1795255200"), Ok(1_795_255_200));
        assert_eq!(time("2026-11-21T10:00:00Z"), Ok(1_795_255_200));
        assert_eq!(time("2000-02-29T12:34:56"), Ok(951_827_696));
        assert_eq!(time("9999-12-31T23:59:59Z"), Ok(LAST_TIME));
        assert_eq!((time("0"), time("1000000000"), time("253402300799")), (Ok(0), Ok(LEAST_TIME), Ok(LAST_TIME)));
        assert_eq!(time("1970-01-01"), Ok(0));
        for wrong in [
            "yesterday",
            "2026-13-01",
            "2026-11-21T25:00:00Z",
            "2026-11",
            "-1",
            "",
            "2026-02-31",
            "2026-02-29",
            "2100-02-29",
            "2026-04-31",
            "2026-01-00",
            "20261101",
            "951827696",
            "253402300800",
            "20261101000000",
            "+5",
            "+1795255200",
            "2026-11-+5",
            "2026-11-21Z",
            "2026-11-21ZZZ",
            "2026-11-21T10:00:00ZZ",
            "2026-11-21T10:00:+5Z",
        ] {
            let why = time(wrong).expect_err(wrong);
            assert!(why.contains("write 2026-11-21, 2026-11-21T10:00:00Z or seconds since 1970"), "{why}");
        }
    }

    #[test]
    fn prices_are_what_is_written() {
        let read = |text: &str| toml::from_str::<Prices>(&format!("gib_read = {text}")).map(|prices| prices.gib_read.0);
        for (text, nanos) in [
            ("0", 0),
            ("0.0", 0),
            ("0.1", 100_000_000),
            ("0.000000001", 1),
            ("1e6", 1_000_000_000_000_000),
            ("123456.789012345", 123_456_789_012_345),
            ("1_000", 1_000_000_000_000),
        ] {
            assert_eq!(read(text).unwrap(), nanos, "{text}");
        }
        for wrong in ["1e-10", "1e15", "1234567.123456789", "-1", "-0.0", "\"5\""] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
        assert_eq!([MILLION, GIB, GIB_MONTH].map(|of| SHARES % of), [0; 3]);
    }

    /// Whatever way it is shown, it is one amount: what rows add up to is what they say.
    #[test]
    fn a_bill_is_rounded_once() {
        let prices: Prices = toml::from_str("million_reads = 0.0001\ngib_read = 0.005\ngib_month_used = 0.1").unwrap();
        let of = |reads: u64, read_bytes: u64, used_byte_seconds: u128| {
            let row = UsageRow { reads, read_bytes, used_byte_seconds, ..UsageRow::default() };
            let text = csv("tenant", std::slice::from_ref(&row), Some(&prices));
            let table = table("tenant", std::slice::from_ref(&row), Some(&prices));
            let last = |text: &str, by: char| text.rsplit(by).next().unwrap().to_owned();
            let json = serde_json::to_value(Billed::of(&row, &prices).bill).unwrap();
            (prices.of(&row).0, last(&text, ','), last(&table, ' '), json)
        };
        let shown = |units: u128, csv: &str, table: &str, json: f64| {
            (units, csv.to_owned(), table.to_owned(), serde_json::Value::from(json))
        };
        assert_eq!(of(499_999, 0, 0), shown(0, "0.0000", "0.00", 0.0));
        assert_eq!(of(500_000, 0, 0), shown(1, "0.0001", "0.0001", 0.0001));
        assert_eq!(of(0, 1 << 30, 0), shown(50, "0.0050", "0.0050", 0.005));
        assert_eq!(of(0, 3 << 30, 0), shown(150, "0.0150", "0.0150", 0.015));
        // Parts that are less than the least amount, each by itself, are not lost.
        assert_eq!([of(300_000, 0, 0).0, of(0, (1 << 30) / 128, 0).0, of(300_000, (1 << 30) / 128, 0).0], [0, 0, 1]);
        assert_eq!(of(300_000, 1 << 30, GIB_MONTH / 10).0, 150);
        // A sum that a floating-point number does not keep.
        assert_eq!(of(0, 0, GIB_MONTH * 123_456_789_012_345_678).1, "12345678901234567.8000");
        prices.of(&UsageRow { reads: u64::MAX, used_byte_seconds: u128::MAX, ..UsageRow::default() });
    }

    #[test]
    fn a_bill_is_what_the_prices_say() {
        let prices = "currency = \"EUR\"\nmillion_reads = 2\ngib_written = 0.5\ngib_month_provisioned = 3";
        let prices: Prices = toml::from_str(prices).unwrap();
        let row = UsageRow {
            name: "a, \"b\"".to_owned(),
            seconds: 86_400 * 15,
            reads: 500_000,
            written_bytes: 2 << 30,
            throttled_us: 61_950_000,
            provisioned_byte_seconds: (4 << 30) * 86_400 * 15,
            ..UsageRow::default()
        };
        assert_eq!(prices.of(&row), Money(80_000), "1 + 1 + 6");
        let rows = [row];
        let text = csv("tenant", &rows, Some(&prices));
        assert!(text.ends_with(&format!(
            "used_byte_seconds,throttled_us,bill\n\"a, \"\"b\"\"\",1296000,500000,0,0,0,2147483648,{},0,61950000,8.0000",
            (4_u64 << 30) * 1_296_000
        )));
        let text = table("tenant", &rows, Some(&prices));
        let columns: Vec<_> = text.lines().map(|line| line.split("  ").filter(|cell| !cell.is_empty())).collect();
        let last: Vec<_> = columns.into_iter().map(|cells| cells.skip(7).map(str::trim).collect::<Vec<_>>()).collect();
        assert_eq!(last, [["THROTTLED", "BILL EUR"], ["61.9 s", "8.00"]], "{text}");
        let json = serde_json::to_string(&[Billed::of(&rows[0], &prices)]).unwrap();
        assert!(json.contains("\"throttled_us\":61950000"), "{json}");
        assert!(toml::from_str::<Prices>("milion_reads = 1").is_err());
        for wrong in ["nan", "inf", "-0.1"] {
            let error = toml::from_str::<Prices>(&format!("gib_read = {wrong}")).unwrap_err().to_string();
            assert!(error.contains("is no price"), "{error}");
        }
        assert_eq!(time("2028-02-29"), time("2028-03-01").map(|next| next - 86_400));
    }

    #[test]
    fn rows_of_a_daemon_that_does_not_know_throttled_time_are_read() {
        let mut value = serde_json::to_value(UsageRow { reads: 5, throttled_us: 7, ..UsageRow::default() }).unwrap();
        value.as_object_mut().unwrap().remove("throttled_us").unwrap();
        let row: UsageRow = serde_json::from_value(value).unwrap();
        assert_eq!((row.reads, row.throttled_us), (5, 0));
    }

    #[test]
    fn sums_beyond_64_bits_are_shown() {
        // 8 TiB for 30 days.
        let row = UsageRow { provisioned_byte_seconds: (8 << 40) * 86_400 * 30, ..UsageRow::default() };
        let prices = Prices::default();
        let text = serde_json::to_string_pretty(&[Billed::of(&row, &prices)]).unwrap();
        assert!(text.contains("22799473113563136000"), "{text}");
        assert_eq!(serde_json::from_str::<UsageRow>(&serde_json::to_string(&row).unwrap()).unwrap(), row);
    }
}
