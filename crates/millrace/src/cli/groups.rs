//! Groups on the command line.

use clap::{Args, Subcommand};
use millrace_control::{GroupCaps, GroupChange, GroupSpec, Name, Size};

#[derive(Debug, Subcommand)]
pub(crate) enum GroupCommand {
    /// Make a group. Volumes name it in their stacks: throttle(group=NAME), share(group=NAME)
    Create(GroupCreate),
    /// List all groups
    List,
    /// Show a group, with the volumes and groups that are in it
    Show {
        /// The group
        name: String,
    },
    /// Give a group other caps in the place of all that it has, none (--no-caps), or another weight, at once and under any load
    Change(GroupSet),
    /// Delete a group that nothing is in
    Delete {
        /// The group
        name: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct GroupCreate {
    /// Its name: A-Z a-z 0-9 . _ -, at most 64
    name: Name,
    /// A group that it is in: what is in this one counts there as well
    #[arg(long, value_name = "GROUP")]
    within: Option<Name>,
    #[command(flatten)]
    caps: CapsArgs,
    /// Its part of a saturated disk beside the others' weights, 1 to 1000
    #[arg(long, value_name = "N", default_value_t = 1)]
    weight: u32,
}

impl GroupCreate {
    pub(crate) fn spec(self) -> GroupSpec {
        GroupSpec { name: self.name, within: self.within, caps: self.caps.caps(), weight: self.weight }
    }
}

/// The options of [`CapsArgs`].
pub(super) const CAPS: [&str; 7] =
    ["iops", "read_iops", "write_iops", "bandwidth", "read_bandwidth", "write_bandwidth", "burst"];

#[derive(Debug, Args)]
pub(crate) struct GroupSet {
    /// The group
    pub(crate) name: String,
    #[command(flatten)]
    caps: CapsArgs,
    /// Lift all caps
    #[arg(long, conflicts_with_all = CAPS)]
    no_caps: bool,
    /// Its part of a saturated disk beside the others' weights, 1 to 1000. By itself it leaves the caps as they are
    #[arg(long, value_name = "N")]
    weight: Option<u32>,
}

impl GroupSet {
    /// What changes. Nobody loses caps by leaving out what was to be changed.
    pub(crate) fn change(self) -> Result<GroupChange, String> {
        let (caps, weight) = (self.caps.caps(), self.weight);
        let caps = (self.no_caps || caps != GroupCaps::default()).then_some(caps);
        if caps.is_none() && weight.is_none() {
            let name = self.name;
            return Err(format!(
                "group {name}: what is to change? caps (--iops N, ...), --weight N, or --no-caps to lift all"
            ));
        }
        Ok(GroupChange { caps, weight })
    }
}

/// Caps; what is left out is not capped.
#[derive(Debug, Args)]
pub(crate) struct CapsArgs {
    /// Operations per second: a number, with K, M or G for powers of 1000
    #[arg(long, value_parser = count, value_name = "N")]
    iops: Option<u64>,
    /// Reads per second
    #[arg(long, value_parser = count, value_name = "N")]
    read_iops: Option<u64>,
    /// Writes per second
    #[arg(long, value_parser = count, value_name = "N")]
    write_iops: Option<u64>,
    /// Bytes per second
    #[arg(long, value_name = "SIZE")]
    bandwidth: Option<Size>,
    /// Bytes read per second
    #[arg(long, value_name = "SIZE")]
    read_bandwidth: Option<Size>,
    /// Bytes written per second
    #[arg(long, value_name = "SIZE")]
    write_bandwidth: Option<Size>,
    /// What may be saved up while idle, as time at the full rate [default: 10ms]
    #[arg(long, value_name = "TIME")]
    burst: Option<String>,
}

impl CapsArgs {
    pub(crate) fn caps(self) -> GroupCaps {
        let Self { iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth, burst } = self;
        GroupCaps { iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth, burst }
    }
}

/// A number as a stack's settings have it.
fn count(text: &str) -> Result<u64, String> {
    let mut settings = millrace_services::Settings::default();
    settings.add("it", text);
    let count = settings.count("it").map_err(|error| error.why)?;
    count.ok_or_else(|| "a number is needed".to_owned())
}
