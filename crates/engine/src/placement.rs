//! Which shard a device goes to.
#![forbid(unsafe_code)]

/// How devices are spread over shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// A core per machine: each device goes to the least loaded shard, whatever disk it uses.
    #[default]
    Device,
    /// A core per physical disk: devices of one disk share a shard.
    Disk,
}

/// Names a physical disk (or whatever the back end has one queue to); equal for all volumes on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DiskKey(pub u64);

/// What the choice needs to know of one shard.
#[derive(Clone, Debug, Default)]
pub struct ShardLoad {
    /// Devices on the shard.
    pub devices: usize,
    /// Share of recent time in which it did useful work, in thousandths.
    pub busy_permille: u32,
    /// Disks of the devices on the shard.
    pub disks: Vec<DiskKey>,
}

/// Picks the shard for one more device; `None` only when there are no shards.
///
/// Load is compared in steps of a tenth of a core, so that noise does not decide; among shards of one step the one with the
/// fewest devices wins, then the first.
pub fn place(policy: Placement, loads: &[ShardLoad], disk: Option<DiskKey>) -> Option<usize> {
    if let (Placement::Disk, Some(disk)) = (policy, disk)
        && let Some(shard) = loads.iter().position(|load| load.disks.contains(&disk))
    {
        return Some(shard);
    }
    let weigh = |load: &ShardLoad| (load.busy_permille / 100, load.devices);
    (0..loads.len()).min_by_key(|&shard| (weigh(&loads[shard]), shard))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(devices: usize, busy_permille: u32, disks: &[u64]) -> ShardLoad {
        ShardLoad { devices, busy_permille, disks: disks.iter().copied().map(DiskKey).collect() }
    }

    #[test]
    fn the_least_loaded_shard_gets_the_device() {
        assert_eq!(place(Placement::Device, &[], None), None);
        let loads = [load(2, 40, &[7]), load(1, 30, &[]), load(0, 500, &[])];
        assert_eq!(place(Placement::Device, &loads, Some(DiskKey(7))), Some(1));
        assert_eq!(place(Placement::Device, &[load(1, 910, &[]), load(5, 120, &[])], None), Some(1));
    }

    #[test]
    fn devices_of_one_disk_meet() {
        let loads = [load(0, 0, &[]), load(9, 900, &[3, 7])];
        assert_eq!(place(Placement::Disk, &loads, Some(DiskKey(7))), Some(1));
        assert_eq!(place(Placement::Disk, &loads, Some(DiskKey(8))), Some(0));
        assert_eq!(place(Placement::Disk, &loads, None), Some(0));
    }
}
