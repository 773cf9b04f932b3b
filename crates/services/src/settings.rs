//! What is set on a node of a stack: words with values, as the operator wrote them.

use std::{fmt, str::FromStr, time::Duration};

use thiserror::Error;

/// Settings in the order in which they were written; no name twice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings(Vec<(String, String)>);

/// A setting that cannot be as it is.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{name}: {why}")]
pub struct SettingError {
    /// Its name.
    pub name: String,
    /// What is wrong with it, and what is possible.
    pub why: String,
}

impl SettingError {
    /// What is wrong with a setting.
    pub fn new(name: &str, why: impl Into<String>) -> Self {
        Self { name: name.to_owned(), why: why.into() }
    }
}

impl Settings {
    /// Adds a setting; false when there is one of this name already.
    pub fn add(&mut self, name: &str, value: &str) -> bool {
        let is_new = self.text(name).is_none();
        if is_new {
            self.0.push((name.to_owned(), value.to_owned()));
        }
        is_new
    }

    /// All settings.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Replaces every value by what `change` makes of it.
    pub(crate) fn map_values(&mut self, change: &dyn Fn(&str) -> Option<String>) {
        for (_, value) in &mut self.0 {
            if let Some(changed) = change(value) {
                *value = changed;
            }
        }
    }

    /// A setting's text.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// A setting that must be there.
    pub fn required(&self, name: &str) -> Result<&str, SettingError> {
        self.text(name).ok_or_else(|| SettingError::new(name, format!("is needed; write {name}=…")))
    }

    /// A setting that can be parsed.
    pub fn parsed<T: FromStr>(&self, name: &str, what: &str) -> Result<Option<T>, SettingError> {
        let parse = |text: &str| text.parse().map_err(|_| SettingError::new(name, format!("{text:?} is not {what}")));
        self.text(name).map(parse).transpose()
    }

    /// Bytes: a number, with K, M, G or T for powers of 1024.
    pub fn size(&self, name: &str) -> Result<Option<u64>, SettingError> {
        self.scaled(name, 1024, "a size such as 64K or 10G")
    }

    /// A number, with K, M, G or T for powers of 1000.
    pub fn count(&self, name: &str) -> Result<Option<u64>, SettingError> {
        self.scaled(name, 1000, "a number such as 1000 or 50K")
    }

    fn scaled(&self, name: &str, unit: u64, what: &str) -> Result<Option<u64>, SettingError> {
        let Some(text) = self.text(name) else { return Ok(None) };
        scaled(text, unit).map(Some).ok_or_else(|| SettingError::new(name, format!("{text:?} is not {what}")))
    }

    /// A time: a number with `us`, `ms`, `s` or `m`.
    pub fn duration(&self, name: &str) -> Result<Option<Duration>, SettingError> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let number = digits.parse::<u64>().ok();
        let time = number.and_then(|number| match &text[digits.len()..] {
            "us" => Some(Duration::from_micros(number)),
            "ms" => Some(Duration::from_millis(number)),
            "s" => Some(Duration::from_secs(number)),
            "m" => number.checked_mul(60).map(Duration::from_secs),
            _ => None,
        });
        time.map(Some).ok_or_else(|| SettingError::new(name, format!("{text:?} is not a time such as 500ms, 2s or 10m")))
    }

    /// `true` or `false`; false when it is not there.
    pub fn flag(&self, name: &str) -> Result<bool, SettingError> {
        Ok(self.parsed(name, "true or false")?.unwrap_or(false))
    }
}

/// A number with a unit that is a power of `unit`.
fn scaled(text: &str, unit: u64) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let power = match &text[digits.len()..] {
        "" | "B" => 0,
        "K" | "k" | "KiB" => 1,
        "M" | "MiB" => 2,
        "G" | "GiB" => 3,
        "T" | "TiB" => 4,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit.checked_pow(power)?)
}

/// Text that reads back as one word: in quotes where it must be.
pub(crate) struct Word<'a>(pub(crate) &'a str);

/// Whether a character can stand in a word without quotes.
pub(crate) fn is_plain(c: char) -> bool {
    !c.is_whitespace() && !c.is_control() && !matches!(c, '(' | ')' | ',' | '|' | '"' | '\\')
}

impl fmt::Display for Word<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.0.is_empty() && self.0.chars().all(is_plain) {
            return f.write_str(self.0);
        }
        f.write_str("\"")?;
        for c in self.0.chars() {
            if matches!(c, '"' | '\\') {
                f.write_str("\\")?;
            }
            write!(f, "{c}")?;
        }
        f.write_str("\"")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(text: &[(&str, &str)]) -> Settings {
        let mut settings = Settings::default();
        assert!(text.iter().all(|(name, value)| settings.add(name, value)));
        settings
    }

    #[test]
    fn values_have_units_and_errors_say_what_is_possible() {
        let some = settings(&[("size", "64K"), ("rate", "50K"), ("wait", "20ms"), ("on", "true"), ("bad", "7 apples")]);
        assert_eq!((some.size("size"), some.count("rate")), (Ok(Some(65536)), Ok(Some(50_000))));
        assert_eq!((some.duration("wait"), some.flag("on")), (Ok(Some(Duration::from_millis(20))), Ok(true)));
        assert_eq!((some.size("none"), some.flag("none")), (Ok(None), Ok(false)));
        assert_eq!(some.size("bad").unwrap_err().to_string(), "bad: \"7 apples\" is not a size such as 64K or 10G");
        assert!(some.duration("rate").is_err() && some.flag("size").is_err());
        assert_eq!(some.required("key").unwrap_err().to_string(), "key: is needed; write key=…");
        for overflow in ["18446744073709551616", "99999999999T", "-1", "K", ""] {
            assert!(settings(&[("size", overflow)]).size("size").is_err(), "{overflow}");
        }
    }
}
