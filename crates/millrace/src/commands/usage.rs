//! What volumes did, and what it costs.

use std::{error::Error, path::Path};

use millrace_control::{Size, UsageBy, UsageRow};
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};

use super::{Done, client};
use crate::{
    cli::{Global, UsageArgs},
    output::{self, Table},
};

/// Bytes of a GiB, and seconds of a month of 30 days.
const GIB: f64 = 1024.0 * 1024.0 * 1024.0;
const MONTH: f64 = 30.0 * 86_400.0;

/// What things cost, in the currency's unit.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Prices {
    /// Its name.
    currency: String,
    #[serde(deserialize_with = "price")]
    million_reads: f64,
    #[serde(deserialize_with = "price")]
    million_writes: f64,
    #[serde(deserialize_with = "price")]
    gib_read: f64,
    #[serde(deserialize_with = "price")]
    gib_written: f64,
    /// A GiB of volume size for 30 days.
    #[serde(deserialize_with = "price")]
    gib_month_provisioned: f64,
    /// A GiB on the medium for 30 days.
    #[serde(deserialize_with = "price")]
    gib_month_used: f64,
}

/// TOML has "nan" and "inf" for numbers.
fn price<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    let price = f64::deserialize(deserializer)?;
    if price.is_finite() && price >= 0.0 {
        return Ok(price);
    }
    Err(D::Error::custom(format!("{price} is no price: it must be 0 or more")))
}

impl Prices {
    fn read(path: &Path) -> Result<Self, Box<dyn Error>> {
        let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(toml::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?)
    }

    #[expect(clippy::cast_precision_loss)] // a bill has cents
    fn of(&self, row: &UsageRow) -> f64 {
        row.reads as f64 / 1e6 * self.million_reads
            + row.writes as f64 / 1e6 * self.million_writes
            + row.read_bytes as f64 / GIB * self.gib_read
            + row.written_bytes as f64 / GIB * self.gib_written
            + row.provisioned_byte_seconds as f64 / GIB / MONTH * self.gib_month_provisioned
            + row.used_byte_seconds as f64 / GIB / MONTH * self.gib_month_used
    }
}

/// A row with its bill. Written as it is, for sums of bytes and seconds may be larger than a JSON value in memory holds.
#[derive(Serialize)]
struct Billed<'a> {
    usage: &'a UsageRow,
    bill: f64,
    currency: &'a str,
}

impl<'a> Billed<'a> {
    fn of(row: &'a UsageRow, prices: &'a Prices) -> Self {
        Self { usage: row, bill: prices.of(row), currency: &prices.currency }
    }
}

/// A time: seconds since 1970, a date, or a date with a time of day (UTC).
fn time(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no time; write seconds since 1970, 2026-11-21 or 2026-11-21T10:00:00Z");
    if let Ok(seconds) = text.parse() {
        return Ok(seconds);
    }
    let (date, clock) = text.trim_end_matches('Z').split_once('T').unwrap_or((text, "00:00:00"));
    let numbers = |text: &str, by: char| -> Option<[u64; 3]> {
        let numbers: Vec<u64> = text.split(by).map(|part| part.parse().ok()).collect::<Option<_>>()?;
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
    let (from, to) = (from?, to?);
    if from.zip(to).is_some_and(|(from, to)| from > to) {
        let [from, to] = [&args.from, &args.to].map(|text| text.as_deref().unwrap_or_default());
        return Err(format!("--from {from} is later than --to {to}; exchange the two").into());
    }
    for (name, value) in [("from", from), ("to", to)] {
        if let Some(value) = value {
            path = format!("{path}&{name}={value}");
        }
    }
    let prices = args.prices.as_deref().map(Prices::read).transpose()?;
    let rows: Vec<UsageRow> = client(global)?.get(&path)?;
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
        let bill = prices.map(|prices| format!(",{:.4}", prices.of(row))).unwrap_or_default();
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
            prices.map(|prices| format!("{:.2}", prices.of(row))).unwrap_or_default(),
        ]);
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        assert_eq!(time("951827696"), Ok(951_827_696));
        assert_eq!(time("2000-02-29T12:34:56Z"), Ok(951_827_696));
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
        ] {
            assert!(time(wrong).is_err(), "{wrong}");
        }
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
        assert!((prices.of(&row) - (1.0 + 1.0 + 6.0)).abs() < 1e-9, "{}", prices.of(&row));
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
