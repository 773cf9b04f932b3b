//! The table's lines, one module each.

mod null;

use crate::{error::Failure, record::Record, suite::Suite};

/// A section: what it measures, in a line, and how.
pub(crate) struct Section {
    /// Its name on the command line and of its record.
    pub(crate) name: &'static str,
    /// What it shows.
    pub(crate) title: &'static str,
    /// Takes its samples.
    pub(crate) run: fn(&Suite, &mut Record) -> Result<(), Failure>,
}

/// All sections, in the order in which they are shown.
pub(crate) const ALL: &[Section] = &[
    Section { name: "null", title: "a volume that does nothing: what the path itself costs", run: null::run },
    Section { name: "perf", title: "the same, driven by SPDK's own client", run: null::perf },
];
