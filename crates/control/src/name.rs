//! Names of volumes and devices.

use std::{borrow::Borrow, fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use thiserror::Error;

#[cfg(test)]
mod tests;

/// Longest name in characters.
const MAX: usize = 64;

/// The operator's name for a volume or device: 1 to 64 of the characters `A-Z a-z 0-9 . _ -`, the first a letter or digit, so
/// that it can be part of a path, a URL and a metric's label as it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

/// Text that is no name.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0:?} cannot be a name; use 1 to 64 of the characters A-Z a-z 0-9 . _ - and begin with a letter or digit")]
pub struct NameError(String);

impl Name {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Name {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        let fits = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
        let begins = text.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
        if begins && text.len() <= MAX && text.bytes().all(fits) { Ok(Self(text)) } else { Err(NameError(text)) }
    }
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        text.to_owned().try_into()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> Self {
        name.0
    }
}

impl Borrow<str> for Name {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}
