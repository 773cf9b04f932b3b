//! Services: each beside the bare volume that it is put over, and beside what SPDK has of the kind.

use crate::{
    client::{Lean, Load},
    copies,
    error::Failure,
    record::{Key, Record, Sample},
    subject::{Setup, Spdk, Subject},
    suite::{Case, Suite},
};

const DEPTH: u32 = 32;
/// Bytes of the volumes that do nothing, and of those in memory.
const NULL: (&str, u64) = ("1G", 1 << 30);
const MEMORY: (&str, u64) = ("64M", 64 << 20);

type Loads = &'static [(&'static str, &'static str)];
type Make = fn(&Spdk, &str) -> Result<(), Failure>;

const READS: Loads = &[("randread", "4k")];
const WRITES: Loads = &[("randwrite", "4k")];
const BOTH: Loads = &[("randread", "4k"), ("randwrite", "4k")];
/// Of two data chunks of 4 KiB: a full stripe, and half of one.
const STRIPES: Loads = &[("randread", "4k"), ("randwrite", "8k"), ("randwrite", "4k")];

/// A volume, and its like in SPDK.
struct Row {
    device: &'static str,
    /// What it is, in the name of its lines.
    place: &'static str,
    stack: &'static str,
    size: (&'static str, u64),
    /// Bytes of a block; 0: of 512, as everywhere else.
    block_size: u32,
    loads: Loads,
    /// The loads that SPDK's like can do; it gets a name.
    spdk: Option<(Loads, Make)>,
}

impl Row {
    /// Its like's bdev: that of a share is a thin volume.
    fn bdev(&self) -> String {
        if self.stack.starts_with("share") { Spdk::thin_name(self.device) } else { self.device.to_owned() }
    }
}

/// `KEY` stands for the key's file.
const ROWS: &[Row] = &[
    Row {
        device: "n-bare",
        place: "null",
        stack: "null",
        size: NULL,
        block_size: 0,
        loads: READS,
        spdk: Some((READS, |spdk, name| spdk.null(name, NULL.1))),
    },
    Row {
        device: "n-concat",
        place: "null, concat",
        stack: "concat(null(size=512M), null(size=512M))",
        size: NULL,
        block_size: 0,
        loads: READS,
        spdk: Some((READS, |spdk, name| {
            spdk.null("n-inner", NULL.1)?;
            spdk.passthru(name, "n-inner")
        })),
    },
    Row {
        device: "n-stripe",
        place: "null, stripe",
        stack: "stripe(null, null)",
        size: NULL,
        block_size: 0,
        loads: READS,
        spdk: Some((READS, |spdk, name| {
            spdk.null("n-half", NULL.1 / 2)?;
            spdk.null("n-other", NULL.1 / 2)?;
            spdk.raid(name, "raid0", 64, &["n-half", "n-other"])
        })),
    },
    Row {
        device: "n-throttle",
        place: "null, throttle",
        stack: "throttle(iops=100M) | null",
        size: NULL,
        block_size: 0,
        loads: READS,
        spdk: Some((READS, |spdk, name| {
            spdk.null(name, NULL.1)?;
            spdk.limit(name, 100_000_000)
        })),
    },
    Row {
        device: "n-meter",
        place: "null, meter",
        stack: "meter(tenant=bench) | null",
        size: NULL,
        block_size: 0,
        loads: READS,
        spdk: None,
    },
    Row {
        device: "m-bare",
        place: "memory",
        stack: "memory",
        size: MEMORY,
        block_size: 0,
        loads: BOTH,
        spdk: Some((BOTH, |spdk, name| spdk.memory(name, MEMORY.1))),
    },
    Row {
        device: "m-share",
        place: "memory, share",
        stack: "share | volume:pool",
        size: MEMORY,
        block_size: 0,
        loads: BOTH,
        spdk: Some((BOTH, |spdk, name| {
            // The store has its own blocks there as well.
            spdk.memory("m-pool", MEMORY.1 + (16 << 20))?;
            spdk.thin(name, "m-pool", MEMORY.1)
        })),
    },
    Row {
        device: "m-mirror",
        place: "memory, mirror",
        stack: "mirror(memory, memory)",
        size: MEMORY,
        block_size: 0,
        loads: WRITES,
        spdk: Some((WRITES, |spdk, name| {
            spdk.memory("m-one", MEMORY.1)?;
            spdk.memory("m-two", MEMORY.1)?;
            spdk.raid(name, "raid1", 0, &["m-one", "m-two"])
        })),
    },
    Row {
        device: "m-crypt",
        place: "memory, crypt",
        stack: "crypt(key=file:KEY) | memory",
        size: MEMORY,
        block_size: 0,
        loads: BOTH,
        spdk: Some((BOTH, |spdk, name| {
            spdk.memory("m-plain", MEMORY.1)?;
            spdk.crypto(name, "m-plain")
        })),
    },
    // A cipher's unit is a block: the same bytes are an eighth of the units.
    Row {
        device: "b-bare",
        place: "memory of 4 KiB blocks",
        stack: "memory",
        size: MEMORY,
        block_size: 4096,
        loads: BOTH,
        spdk: Some((BOTH, |spdk, name| spdk.memory_in_blocks(name, MEMORY.1, 4096))),
    },
    Row {
        device: "b-crypt",
        place: "memory of 4 KiB blocks, crypt",
        stack: "crypt(key=file:KEY) | memory",
        size: MEMORY,
        block_size: 4096,
        loads: BOTH,
        spdk: Some((BOTH, |spdk, name| {
            spdk.memory_in_blocks("b-plain", MEMORY.1, 4096)?;
            spdk.crypto(name, "b-plain")
        })),
    },
    Row {
        device: "m-integrity",
        place: "memory, integrity",
        stack: "integrity | memory",
        size: MEMORY,
        block_size: 0,
        loads: BOTH,
        spdk: None,
    },
    Row {
        device: "m-parity",
        place: "memory, parity",
        stack: "parity(chunk=4K, memory, memory, memory)",
        size: MEMORY,
        block_size: 0,
        loads: STRIPES,
        // Its RAID 5 writes full stripes only.
        spdk: Some((&[("randread", "4k"), ("randwrite", "8k")], |spdk, name| {
            let legs = ["m-d", "m-e", "m-p"];
            legs.iter().try_for_each(|leg| spdk.memory(leg, MEMORY.1 / 2))?;
            spdk.raid(name, "raid5f", 4, &legs)
        })),
    },
    Row {
        device: "m-safe",
        place: "memory, parity, safe reads",
        stack: "parity(safe=true, chunk=4K, memory, memory, memory)",
        size: MEMORY,
        block_size: 0,
        loads: READS,
        spdk: None,
    },
    Row {
        device: "m-parity-two",
        place: "memory, parity of two",
        stack: "parity(redundancy=2, chunk=4K, memory, memory, memory, memory)",
        size: MEMORY,
        block_size: 0,
        loads: STRIPES,
        spdk: None,
    },
    Row {
        device: "m-sealed",
        place: "memory, authenticated",
        stack: "crypt(mode=authenticated, key=file:KEY) | memory",
        size: MEMORY,
        block_size: 0,
        loads: BOTH,
        spdk: None,
    },
    Row {
        device: "m-metadata",
        place: "memory, metadata",
        stack: "metadata | memory",
        size: MEMORY,
        block_size: 0,
        loads: BOTH,
        spdk: None,
    },
    Row {
        device: "m-cache",
        place: "memory, cache",
        stack: "cache(mode=back, memory(size=96M)) | memory",
        size: MEMORY,
        block_size: 0,
        loads: BOTH,
        spdk: None,
    },
];

/// Each alone, one load after the other.
pub(crate) fn run(suite: &Suite, record: &mut Record) -> Result<(), Failure> {
    let key = suite.key()?;
    let pool = Setup::default().volume("pool", "disk | memory", "192M");
    let setup = ROWS.iter().fold(pool, |setup, row| {
        let stack = row.stack.replace("KEY", &key.display().to_string());
        setup.disk_in_blocks(row.device, &stack, row.size.0, row.block_size)
    });
    let ours = suite.start_ours("spin", &setup)?;
    let mut absent = Vec::new();
    let spdk = suite.start_spdk(|spdk| {
        for row in ROWS {
            let Some((_, make)) = row.spdk else { continue };
            // A tree is built with some of its modules, or all.
            match make(spdk, row.device) {
                Ok(()) => spdk.device(row.device, &row.bdev())?,
                Err(error) => absent.push((row.device, error.to_string())),
            }
        }
        Ok(())
    })?;
    for (device, error) in &absent {
        record.note(format!("SPDK's tree has nothing for {device}: {error}"));
    }
    let mut subjects: Vec<_> = [Some(ours), spdk].into_iter().flatten().collect();
    let devices: Vec<[String; 1]> = ROWS.iter().map(|row| [row.device.to_owned()]).collect();
    let mut cases = Vec::new();
    for (row, device) in ROWS.iter().zip(&devices) {
        let peer = row.spdk.filter(|_| absent.iter().all(|(name, _)| *name != row.device));
        for (index, subject) in subjects.iter_mut().enumerate() {
            let loads = if index == 0 { row.loads } else { peer.map_or(&[][..], |(loads, _)| loads) };
            if row.size == MEMORY && !loads.is_empty() {
                subject.daemon().resume();
                suite.write_all(&**subject, row.device)?;
            }
            for &(rw, bs) in loads {
                let load = Load::new(rw, bs, DEPTH).on(row.place);
                cases.push(suite.lean(index, subject.name(), "lean", Lean::default(), load, device));
            }
            subject.daemon().pause();
        }
    }
    cases.push(copied(suite));
    record.note("copies: the bytes that a write of 4 KiB to parity moves, four times 4 KiB, on the target's core".into());
    suite.measure(record, &mut subjects, &cases)
}

/// The same bytes as small writes to parity, nothing but copies.
fn copied(suite: &Suite) -> Case<'_> {
    let load = Load::new("randwrite", "4k", DEPTH).on("memory, parity");
    let key = Key { test: load.name(), depth: DEPTH, client: "lean".into(), subject: "copies".into() };
    let run = move |_: &mut [Box<dyn Subject>]| {
        // Two legs have the data; and a client has as many pieces as it has requests.
        let rate = copies::rate(suite.target, suite.seconds, MEMORY.1 as usize / 2, DEPTH as usize * 4096);
        Ok::<_, Failure>(Sample::from([("iops".to_owned(), rate)]))
    };
    Case { key, subject: None, run: Box::new(run) }
}
