//! Sizes as people write them.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use thiserror::Error;

#[cfg(test)]
mod tests;

/// Units by their letter, largest first, with the power of two.
const UNITS: [(char, u32); 6] = [('E', 60), ('P', 50), ('T', 40), ('G', 30), ('M', 20), ('K', 10)];

/// A number of bytes. Written as a number of bytes (`4096`), or with a unit of powers of 1024: `64K`, `512MiB`, `1G`, `1.5T`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Size(pub u64);

/// Text that is no size.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum SizeError {
    /// No number, or an unknown unit.
    #[error("{0:?} is not a size; write bytes (4096) or a unit of powers of 1024 (64K, 512MiB, 1G, 1.5T)")]
    Syntax(String),
    /// A unit of powers of 1000, by its name.
    #[error("{0:?} has a unit that means powers of 1000 to some; write {1} (or {1}iB), which is powers of 1024")]
    Decimal(String, char),
    /// Half bytes.
    #[error("{0:?} is not a whole number of bytes")]
    Fraction(String),
    /// 2^64 bytes or more.
    #[error("{0:?} is 16 EiB or more; a size has less")]
    TooLarge(String),
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let syntax = || SizeError::Syntax(text.to_owned());
        let text = text.trim();
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(end);
        let shift = unit_shift(text, unit.trim_start())?;
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        let digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole) || !digits(fraction) {
            return Err(syntax());
        }
        let too_large = || SizeError::TooLarge(text.to_owned());
        let whole: u64 = whole.parse().map_err(|_| too_large())?;
        let whole = whole.checked_mul(1 << shift).ok_or_else(too_large)?;
        whole.checked_add(fraction_bytes(text, fraction, shift)?).map(Self).ok_or_else(too_large)
    }
}

fn unit_shift(text: &str, unit: &str) -> Result<u32, SizeError> {
    let syntax = || SizeError::Syntax(text.to_owned());
    let mut rest = unit.chars();
    let Some(letter) = rest.next() else { return Ok(0) };
    let letter = letter.to_ascii_uppercase();
    let rest = rest.as_str();
    if letter == 'B' && rest.is_empty() {
        return Ok(0);
    }
    let &(_, shift) = UNITS.iter().find(|(name, _)| *name == letter).ok_or_else(syntax)?;
    match rest {
        "" | "iB" | "ib" | "i" => Ok(shift),
        "B" | "b" => Err(SizeError::Decimal(text.to_owned(), letter)),
        _ => Err(syntax()),
    }
}

/// Bytes in the decimals of a number of units.
fn fraction_bytes(text: &str, decimals: &str, shift: u32) -> Result<u64, SizeError> {
    let decimals = decimals.trim_end_matches('0');
    if decimals.is_empty() {
        return Ok(0);
    }
    let not_whole = || SizeError::Fraction(text.to_owned());
    let denominator = u32::try_from(decimals.len()).ok().and_then(|n| 10_u128.checked_pow(n)).ok_or_else(not_whole)?;
    let numerator: u128 = decimals.parse().map_err(|_| not_whole())?;
    let scaled = numerator.checked_mul(1 << shift).ok_or_else(not_whole)?;
    if !scaled.is_multiple_of(denominator) {
        return Err(not_whole());
    }
    // Less than one unit, so it fits.
    u64::try_from(scaled / denominator).map_err(|_| not_whole())
}

impl fmt::Display for Size {
    /// Exactly: in the largest unit that divides it. What is printed parses to the same size.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS.iter().find(|(_, shift)| self.0 != 0 && self.0.trailing_zeros() >= *shift);
        match unit {
            Some((letter, shift)) => write!(f, "{}{letter}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

impl Size {
    /// For people: at most one decimal, rounded down.
    pub fn approximate(self) -> String {
        match UNITS.iter().find(|(_, shift)| self.0 >> shift != 0) {
            Some((letter, shift)) => {
                let tenths = (u128::from(self.0) * 10) >> shift;
                match tenths % 10 {
                    0 => format!("{}{letter}", tenths / 10),
                    tenth => format!("{}.{tenth}{letter}", tenths / 10),
                }
            }
            None => self.0.to_string(),
        }
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size: a number of bytes, or text such as \"512M\" or \"1G\"")
            }

            fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<Size, E> {
                Ok(Size(bytes))
            }

            fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Size, E> {
                u64::try_from(bytes).map(Size).map_err(|_| E::custom(format_args!("a size cannot be negative: {bytes}")))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Size, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}
