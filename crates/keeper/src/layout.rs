//! Which versions of what one worker leaves to the next a build understands. The keeper passes this on, and does not look at it.

use thiserror::Error;

/// A structure that outlives workers, and the versions of it that this build reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// What it is: at most 20 bytes of ASCII.
    pub name: &'static str,
    /// The oldest version.
    pub oldest: u16,
    /// The newest version.
    pub newest: u16,
}

/// The layouts that another build understands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layouts(Vec<(String, u16, u16)>);

/// A build that cannot go on with what this one leaves.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Incompatible {
    /// It reads other versions.
    #[error("it understands versions {oldest} to {newest} of {name}, and this one {}", versions(.ours))]
    Version {
        /// The structure.
        name: &'static str,
        /// What this build understands.
        ours: Layout,
        /// The oldest that it understands.
        oldest: u16,
        /// The newest that it understands.
        newest: u16,
    },
    /// It does not know it at all.
    #[error("it does not know {name}")]
    Unknown {
        /// The structure.
        name: &'static str,
    },
}

fn versions(layout: &Layout) -> String {
    format!("{} to {}", layout.oldest, layout.newest)
}

/// Bytes of one layout: its name, filled up with zeroes, the oldest and the newest version.
const ENTRY: usize = 24;
const NAME: usize = 20;

impl Layout {
    /// How a worker says it.
    ///
    /// # Panics
    /// When a name is too long.
    pub fn encode(layouts: &[Self]) -> Vec<u8> {
        let entry = |layout: &Self| {
            let mut bytes = [0; ENTRY];
            bytes[..layout.name.len()].copy_from_slice(layout.name.as_bytes());
            assert!(layout.name.len() <= NAME, "the name of layout {} is too long", layout.name);
            bytes[NAME..NAME + 2].copy_from_slice(&layout.oldest.to_le_bytes());
            bytes[NAME + 2..].copy_from_slice(&layout.newest.to_le_bytes());
            bytes
        };
        layouts.iter().flat_map(entry).collect()
    }
}

impl Layouts {
    /// What another worker said. What cannot be understood is left out, and so not known to it.
    pub fn decode(bytes: &[u8]) -> Self {
        let entry = |entry: &[u8]| {
            let (name, versions) = entry.split_at_checked(NAME)?;
            let name = std::str::from_utf8(name).ok()?.trim_end_matches('\0').to_owned();
            let [a, b, c, d] = versions.try_into().ok()?;
            Some((name, u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d])))
        };
        Self(bytes.chunks_exact(ENTRY).filter_map(entry).collect())
    }

    fn range(&self, name: &str) -> Option<(u16, u16)> {
        self.0.iter().find(|(known, ..)| known == name).map(|(_, oldest, newest)| (*oldest, *newest))
    }

    /// The newest version of a structure that both understand.
    pub fn common(&self, ours: &Layout) -> Result<u16, Incompatible> {
        let (oldest, newest) = self.range(ours.name).ok_or(Incompatible::Unknown { name: ours.name })?;
        let common = newest.min(ours.newest);
        if common < oldest.max(ours.oldest) {
            return Err(Incompatible::Version { name: ours.name, ours: *ours, oldest, newest });
        }
        Ok(common)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: Layout = Layout { name: "device-state", oldest: 2, newest: 3 };

    fn said(oldest: u16, newest: u16) -> Layouts {
        Layouts::decode(&Layout::encode(&[
            Layout { name: "other", oldest: 9, newest: 9 },
            Layout { oldest, newest, ..OURS },
        ]))
    }

    #[test]
    fn the_newest_common_version_is_found() {
        assert_eq!(said(2, 2).common(&OURS), Ok(2));
        assert_eq!(said(2, 3).common(&OURS), Ok(3));
        assert_eq!(said(3, 4).common(&OURS), Ok(3));
        assert_eq!(said(1, 9).common(&OURS), Ok(3));
    }

    #[test]
    fn what_has_no_common_version_is_refused() {
        let refused = said(4, 5).common(&OURS).unwrap_err();
        assert_eq!(refused.to_string(), "it understands versions 4 to 5 of device-state, and this one 2 to 3");
        assert!(said(1, 1).common(&OURS).is_err());
        assert!(said(3, 2).common(&Layout { oldest: 3, newest: 3, ..OURS }).is_err(), "an empty range");
        assert_eq!(Layouts::decode(&[7; 30]).common(&OURS), Err(Incompatible::Unknown { name: "device-state" }));
    }
}
