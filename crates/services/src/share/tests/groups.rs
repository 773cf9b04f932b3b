//! How a saturated disk is divided between groups, counted on a disk that answers on command.

use millrace_block::{ShardSlot, conformance::Random};

use super::{
    turns::{OnCommand, assert_shares, pool, served},
    *,
};
use crate::throttle::{Caps, Group, Weight, groups_of};

/// A disk, and groups and volumes on it. All volumes read as deep as the test says.
struct Tenants {
    disk: Arc<OnCommand>,
    pool: Pool,
    groups: Vec<Arc<Group>>,
    volumes: Vec<Graph>,
}

impl Tenants {
    fn new(depth: u64) -> Self {
        let (disk, pool) = pool(depth);
        Self { disk, pool, groups: Vec::new(), volumes: Vec::new() }
    }

    fn group(&mut self, name: &str, weight: u32, within: Option<usize>) -> usize {
        let within = within.map(|at| &self.groups[at]);
        let group = Group::declare(&self.pool.shared, name, within, &Caps::default()).unwrap();
        group.set_weight(Weight::new(weight).unwrap());
        self.groups.push(group);
        self.groups.len() - 1
    }

    fn volume(&mut self, settings: &str) -> usize {
        let name = format!("v{}", self.volumes.len());
        let volume = self.pool.volume(&name, &format!("share({settings})"), Some(EXTENT), Reason::Create);
        self.volumes.push(volume.unwrap_or_else(|error| panic!("{error}")));
        self.volumes.len() - 1
    }

    /// What these volumes get when the disk does so many requests: (volume, requests at a time).
    fn serve(&self, loads: &[(usize, usize)], total: u64) -> Vec<u64> {
        let loads: Vec<_> = loads.iter().map(|(at, deep)| (&self.volumes[*at], *deep, 8)).collect();
        served(&self.disk, &loads, total)
    }

    fn fact(&self, at: usize, name: &str) -> String {
        let facts = self.volumes[at].tree().status.unwrap().facts;
        facts.into_iter().find(|(known, _)| known == name).expect("it is told").1
    }
}

#[test]
fn groups_divide_the_disk_however_many_volumes_they_have() {
    let _own = ShardSlot::claim();
    for depth in [1, 5] {
        let mut tenants = Tenants::new(depth);
        tenants.group("gold", 3, None);
        tenants.group("iron", 1, None);
        tenants.volume("group=gold");
        for _ in 0..4 {
            tenants.volume("group=iron");
        }
        tenants.volume("weight=2");
        let loads: Vec<_> = (0..6).map(|at| (at, 12 + 7 * at)).collect();
        let counts = tenants.serve(&loads, 12_000);
        assert_shares(&counts, &[12, 1, 1, 1, 1, 8]);
        assert_eq!(tenants.disk.most.load(std::sync::atomic::Ordering::Relaxed), depth, "the disk is full, and no fuller");
        assert_eq!(tenants.fact(0, "group"), "gold (weight 3)");
        assert_eq!(tenants.pool.fact("group iron").unwrap(), "weight 1, volumes in it: 4");
    }
}

#[test]
fn in_a_group_its_volumes_weights_count_and_nobody_elses() {
    let _own = ShardSlot::claim();
    let mut tenants = Tenants::new(4);
    tenants.group("gold", 2, None);
    tenants.group("iron", 1, None);
    for settings in ["group=gold, weight=1", "group=gold, weight=3", "group=iron, weight=500", "group=iron, weight=1000"] {
        tenants.volume(settings);
    }
    let counts = tenants.serve(&[(0, 16), (1, 16), (2, 16), (3, 16)], 12_000);
    assert_shares(&counts, &[3, 9, 2, 4]);
}

#[test]
fn what_a_group_does_not_use_goes_to_the_others_by_weight() {
    let _own = ShardSlot::claim();
    let mut tenants = Tenants::new(4);
    tenants.group("gold", 5, None);
    tenants.group("iron", 1, None);
    for settings in ["group=gold", "group=gold", "group=iron", "weight=2"] {
        tenants.volume(settings);
    }
    // All of gold is idle.
    assert_shares(&tenants.serve(&[(2, 16), (3, 16)], 6000), &[1, 2]);
    // One volume of gold is: the other one has all that is gold's. What gold did not use before is not made up for.
    assert_shares(&tenants.serve(&[(0, 16), (2, 16), (3, 16)], 8000), &[5, 1, 2]);
    // Alone a group of little weight has the whole disk.
    assert_shares(&tenants.serve(&[(2, 16)], 500), &[1]);
    assert_shares(&tenants.serve(&[(0, 16), (1, 16), (2, 16), (3, 16)], 16_000), &[5, 5, 2, 4]);
}

#[test]
fn who_comes_late_to_a_group_takes_no_turn_of_the_past() {
    let _own = ShardSlot::claim();
    let mut tenants = Tenants::new(2);
    tenants.group("gold", 1, None);
    tenants.group("iron", 1, None);
    for settings in ["group=gold", "group=gold", "group=iron"] {
        tenants.volume(settings);
    }
    tenants.serve(&[(0, 16), (2, 16)], 3000);
    assert_shares(&tenants.serve(&[(0, 16), (1, 16), (2, 16)], 4000), &[1, 1, 2]);
}

#[test]
fn tenants_divide_what_they_have_between_their_groups() {
    let _own = ShardSlot::claim();
    let mut tenants = Tenants::new(3);
    let acme = tenants.group("acme", 2, None);
    tenants.group("gold", 1, Some(acme));
    tenants.group("silver", 3, Some(acme));
    for settings in ["group=gold", "group=silver", "group=silver", "group=acme, weight=4", "weight=2"] {
        tenants.volume(settings);
    }
    let loads: Vec<_> = (0..5).map(|at| (at, 16)).collect();
    // Half of the disk is acme's: an eighth of that gold's, three eighths silver's, half its own volume's.
    assert_shares(&tenants.serve(&loads, 16_000), &[2, 3, 3, 8, 16]);
    assert_eq!(tenants.fact(0, "group"), "gold (weight 1) in acme (weight 2)");
    assert_eq!(tenants.pool.fact("group acme").unwrap(), "weight 2, volumes in it: 4");
}

#[test]
fn another_weight_counts_from_the_next_turn_on() {
    let _own = ShardSlot::claim();
    let mut tenants = Tenants::new(4);
    let gold = tenants.group("gold", 1, None);
    tenants.group("iron", 1, None);
    for settings in ["group=gold", "group=iron", "group=iron"] {
        tenants.volume(settings);
    }
    let loads = [(0, 16), (1, 16), (2, 16)];
    assert_shares(&tenants.serve(&loads, 4000), &[2, 1, 1]);
    tenants.groups[gold].set_weight(Weight::new(8).unwrap());
    assert_shares(&tenants.serve(&loads, 9000), &[16, 1, 1]);
    assert_eq!(tenants.fact(0, "group"), "gold (weight 8)");
    // A volume goes from one group to the other.
    tenants.volumes.pop().unwrap().unmount();
    let moved = tenants.pool.volume("v2", "share(group=gold)", None, Reason::Open).unwrap_or_else(|error| panic!("{error}"));
    tenants.volumes.push(moved);
    assert_shares(&tenants.serve(&loads, 9000), &[4, 1, 4]);
}

/// Each volume gets the product of what its groups and it get of what is around them, whatever the tree.
#[test]
fn random_trees_of_groups_divide_the_disk_as_their_weights_say() {
    let _own = ShardSlot::claim();
    for seed in 0..30 {
        let mut random = Random::new(seed);
        let mut tenants = Tenants::new(1 + random.below(6));
        // Where each group and volume stands: the group around it, and its weight.
        let mut groups: Vec<(Option<usize>, u64, u32)> = Vec::new();
        for at in 0..random.below(6) as usize {
            let around = (at > 0 && random.below(3) > 0).then(|| random.below(at as u64) as usize);
            let around = around.filter(|at| groups[*at].2 < 4);
            let weight = 1 + random.below(6);
            groups.push((around, weight, around.map_or(1, |at| groups[at].2 + 1)));
            tenants.group(&format!("g{at}"), weight as u32, around);
        }
        let mut volumes: Vec<(Option<usize>, u64)> = Vec::new();
        // Each group has a volume, and some more are anywhere.
        for at in 0..groups.len() + 2 {
            let any = random.below(groups.len() as u64 + 1) as usize;
            let around = Some(if at < groups.len() { at } else { any }).filter(|at| *at < groups.len());
            let weight = 1 + random.below(6);
            volumes.push((around, weight));
            let group = around.map(|at| format!(", group=g{at}")).unwrap_or_default();
            tenants.volume(&format!("weight={weight}{group}"));
        }
        let sum = |around: Option<usize>| {
            let inside = groups.iter().filter(|group| group.0 == around).map(|group| group.1);
            inside.chain(volumes.iter().filter(|volume| volume.0 == around).map(|volume| volume.1)).sum::<u64>()
        };
        // So many of so many.
        let part = |(around, weight): (Option<usize>, u64)| {
            let (mut part, mut of, mut around) = (weight, sum(around), around);
            while let Some((outer, weight, _)) = around.map(|at| groups[at]) {
                (part, of, around) = (part * weight, of * sum(outer), outer);
            }
            (part, of)
        };
        let loads: Vec<_> = (0..volumes.len()).map(|at| (at, 8 + random.below(24) as usize)).collect();
        let total = 12_000;
        let counts = tenants.serve(&loads, total);
        for (count, volume) in counts.iter().zip(&volumes) {
            let (part, of) = part(*volume);
            // Within 2 %, and four requests.
            let off = (count * of).abs_diff(part * total);
            assert!(
                off * 100 <= part * total * 2 + 400 * of,
                "seed {seed}: {count}, not {part} of {of}: {groups:?} {volumes:?}"
            );
        }
    }
}

#[test]
fn the_least_weight_is_served_beside_the_largest() {
    let _own = ShardSlot::claim();
    let mut tenants = Tenants::new(2);
    tenants.group("gold", 1000, None);
    tenants.group("iron", 1, None);
    for settings in ["group=gold, weight=1000", "group=gold", "group=iron"] {
        tenants.volume(settings);
    }
    let counts = tenants.serve(&[(0, 40), (1, 4), (2, 4)], 10_010);
    assert!((9..=11).contains(&counts[1]) && (9..=12).contains(&counts[2]), "{counts:?}");
}

#[test]
fn a_group_that_is_not_there_is_told() {
    let tenants = Tenants::new(2);
    let refused = |stack: &str| {
        let volume = tenants.pool.volume("v", stack, Some(EXTENT), Reason::Create);
        volume.map(|_| ()).unwrap_err().to_string()
    };
    assert!(
        refused("share(group=gold)").contains("group: there is no group gold; \"millrace group create gold\" makes one")
    );
    for weight in [0, 1001] {
        assert_eq!(Weight::new(weight).unwrap_err().to_string(), "weight: 1 to 1000 is possible");
    }
    assert_eq!(tenants.pool.fact("volume v"), None, "nothing is left of it");
    let stack: Node = "throttle(group=a) | share(group=b) | volume:pool".parse().unwrap();
    assert_eq!(groups_of(&stack), ["a", "b"]);
}
