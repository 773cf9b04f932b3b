//! The table's lines, in groups.

mod caps;
mod copy;
mod devices;
mod fastpath;
mod file;
mod latency;
mod memory;
mod neighbour;
mod null;
mod pauses;
mod qos;
mod services;
mod shards;
mod trace;
mod virtio;

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

const fn section(name: &'static str, title: &'static str, run: fn(&Suite, &mut Record) -> Result<(), Failure>) -> Section {
    Section { name, title, run }
}

/// All sections, in the order in which they are shown.
pub(crate) const ALL: &[Section] = &[
    section("null", "a volume that does nothing: what the path itself costs", null::run),
    section("perf", "the same, driven by SPDK's own client", null::perf),
    section("memory", "volumes in memory", memory::run),
    section("file", "volumes in files", file::run),
    section("services", "services beside the bare volume", services::run),
    section("copy", "volumes copied whole, beside what copies files", copy::run),
    section("fastpath", "programs without a machine, beside the kernel's path", fastpath::run),
    section("virtio", "virtio disks that do nothing", virtio::run),
    section("devices", "64 busy devices on one core", devices::busy),
    section("idle", "1,000 idle devices, and one busy beside them", devices::idle),
    section("footprint", "memory that is held, in all and for each device", devices::footprint),
    section("shards", "two shards beside one", shards::run),
    section("tail", "latency: depth 1, and half load", latency::tail),
    section("polling", "adaptive polling beside polling all the time and sleeping at once", latency::polling),
    section("interrupts", "interrupts per command, by depth", latency::interrupts),
    section("wake", "the first command after a pause", latency::wake),
    section("neighbour", "a device alone, and beside one whose guest means harm", neighbour::run),
    section("spare", "the same, each on a core of its own", neighbour::on_its_own_core),
    section("trace", "a volume that does nothing, recorded and not", trace::run),
    section("qos", "shares of a saturated disk, and caps, over ten seconds", qos::run),
    section("pauses", "guests wait: workers killed, binaries replaced, stacks changed", pauses::run),
];
