//! Which stacks over memory work in the one pass that moves the data, and which must not.

use std::sync::atomic::AtomicU64;

use millrace_memory::{Access, Reach};

use super::*;

/// How the blocks of leaves were come by.
#[derive(Default)]
struct Seen {
    /// Reads and writes that were submitted.
    submitted: AtomicU64,
    /// Writes that were made in place.
    reached: AtomicU64,
}

impl Seen {
    /// What was seen since the last look.
    fn take(&self) -> (u64, u64) {
        (self.submitted.swap(0, Ordering::Relaxed), self.reached.swap(0, Ordering::Relaxed))
    }
}

/// Memory that notes how it is come by.
struct Watched {
    volume: Arc<dyn Volume>,
    seen: Arc<Seen>,
}

impl Watched {
    fn disks(blocks: &[u64], seen: &Arc<Seen>) -> Vec<Arc<dyn Volume>> {
        let disk = |blocks: &u64| MemoryVolume::create("disk", blocks * 512, BlockSize::B512).unwrap();
        blocks.iter().map(|blocks| Arc::new(Self { volume: disk(blocks), seen: Arc::clone(seen) }) as _).collect()
    }
}

impl Volume for Watched {
    fn name(&self) -> &str {
        self.volume.name()
    }

    fn geometry(&self) -> Geometry {
        self.volume.geometry()
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        self.seen.submitted.fetch_add(u64::from(request.operation.has_data()), Ordering::Relaxed);
        self.volume.submit(cx, request)
    }

    fn reach(&self, lba: Lba, count: BlockCount, access: Access) -> Option<Reach<'_>> {
        self.volume.reach(lba, count, access)
    }

    fn reached(&self, lba: Lba, count: BlockCount) {
        self.seen.reached.fetch_add(1, Ordering::Relaxed);
        self.volume.reached(lba, count);
    }

    fn scratch_bytes(&self) -> usize {
        self.volume.scratch_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.volume.resize(blocks)
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.volume.format(block_size)
    }

    fn usage(&self) -> Usage {
        self.volume.usage()
    }
}

fn crypt(over: &str) -> String {
    format!("crypt(key=file:{}/src/crypt/tests/test.key, {over})", env!("CARGO_MANIFEST_DIR"))
}

fn made(stack: &str, disks: &[Arc<dyn Volume>]) -> Graph {
    mounted(stack, disks, None, Reason::Create, &Arc::default()).unwrap_or_else(|error| panic!("{stack}: {error}"))
}

/// Over legs that end in the middle of it, every block in turn, then every two.
#[test]
fn what_lies_in_one_piece_of_memory_is_worked_on_in_one_pass() {
    let (concat, stripe) = ("concat(disk:0, disk:1)", "stripe(chunk=4K, disk:2, disk:3)");
    // The stack, memory that each write goes to, and whether reads are in one pass as well.
    let stacks = [
        (crypt(concat), 1, true),
        (crypt(stripe), 1, true),
        (format!("integrity({concat})"), 1, true),
        (format!("mirror({concat}, {stripe})"), 2, false),
    ];
    for (stack, places, reads) in stacks {
        let seen: Arc<Seen> = Arc::default();
        let graph = made(&stack, &Watched::disks(&[1900, 2196, 2048, 2048], &seen));
        let mut harness = SyncHarness::new(SEED, false);
        let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
        let blocks = bench.blocks();
        // From here on nothing is written for the first time.
        let mut model = bench.write_random(0, blocks);
        for lba in 0..blocks {
            seen.take();
            let data = bench.write_random(lba, 1);
            assert_eq!(seen.take(), (0, places), "{stack}: a write of block {lba}");
            bench.expect(lba, &data);
            assert_eq!(seen.take().0 == 0, reads, "{stack}: a read of block {lba}");
            model[lba as usize * 512..][..512].copy_from_slice(&data);
        }
        let mut split = 0;
        for lba in 0..blocks - 1 {
            let data = bench.write_random(lba, 2);
            split += u64::from(seen.take().0 > 0);
            bench.expect(lba, &data);
            seen.take();
            model[lba as usize * 512..][..1024].copy_from_slice(&data);
        }
        assert!((1..blocks / 4).contains(&split), "{stack}: {split} of {blocks} writes are in several pieces");
        bench.expect(0, &model);
    }
}

#[test]
fn who_counts_requests_or_may_lead_elsewhere_is_not_passed_by() {
    let seen: Arc<Seen> = Arc::default();
    for below in ["disk:0", "throttle(iops=1M, disk:0)", "meter(tenant=test, disk:0)", "share(disk(extent=64K, disk:0))"] {
        let mut disks = Watched::disks(&[4096], &seen);
        if below == "disk:0" {
            // A volume that another one is made of.
            disks[0] = Switch::new("below", Arc::clone(&disks[0]));
        }
        let graph = made(&crypt(below), &disks);
        let mut harness = SyncHarness::new(SEED, false);
        let mut bench = Bench::new(&mut harness, Arc::clone(graph.volume()), SEED);
        for lba in [0, 1, 100] {
            seen.take();
            let data = bench.write_random(lba, 2);
            assert_eq!(seen.take(), (1, 0), "{below}: a write");
            bench.expect(lba, &data);
            assert_eq!(seen.take(), (1, 0), "{below}: a read");
        }
    }
}
