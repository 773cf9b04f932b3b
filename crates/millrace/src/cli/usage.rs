//! The account on the command line.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use millrace_control::UsageBy;

#[derive(Debug, Args)]
pub(crate) struct UsageArgs {
    /// From here on: seconds since 1970, 2026-11-21 or 2026-11-21T10:00:00Z
    #[arg(long, value_name = "TIME")]
    pub(crate) from: Option<String>,
    /// Up to here; for a bill a time that has passed
    #[arg(long, value_name = "TIME")]
    pub(crate) to: Option<String>,
    /// What is summed up
    #[arg(long, value_enum, default_value_t = UsageByArg::Volume)]
    pub(crate) by: UsageByArg,
    /// Print comma-separated values
    #[arg(long, conflicts_with = "json")]
    pub(crate) csv: bool,
    /// A price list (TOML), for a bill
    #[arg(long, value_name = "FILE")]
    pub(crate) prices: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum UsageByArg {
    /// Each volume
    Volume,
    /// Each tenant (a setting of the meter)
    Tenant,
    /// Each device
    Device,
}

impl From<UsageByArg> for UsageBy {
    fn from(by: UsageByArg) -> Self {
        match by {
            UsageByArg::Volume => Self::Volume,
            UsageByArg::Tenant => Self::Tenant,
            UsageByArg::Device => Self::Device,
        }
    }
}
