//! Whatever size a volume is made with, or gets, and whatever blocks, it is opened again with those and with its data; what cannot be is refused
//! at once.

use millrace_backends::FileOptions;

use super::*;
use crate::{legs, testing::open_file};

/// Bytes of a file that is there before its volume: no whole blocks of any size.
const LENGTH: u64 = (4 << 20) + 7 * 512 + 100;

/// Files in a directory. As in the daemon, those of a volume that is opened again must be as long as they are told.
struct Files {
    directory: tempfile::TempDir,
    must_be_there: bool,
}

impl Leaves for Files {
    fn open(&self, request: &LeafRequest<'_>) -> Result<Arc<dyn Volume>, LeafError> {
        let path = self.directory.path().join(request.leaf.file().expect("a file"));
        let has = std::fs::metadata(&path).map_or(0, |found| found.len());
        if let Some(size) = request.size.filter(|size| self.must_be_there && has < *size) {
            return Err(LeafError::Refused(format!("part is missing: it has {has} bytes of {size}")));
        }
        let options = FileOptions { path, size: request.size, block_size: request.block_size, read_only: false };
        Ok(open_file(&request.name, &options)?)
    }
}

/// A volume, and what the daemon's state has of it.
struct Stored {
    files: Files,
    stack: String,
    size: u64,
    block_size: BlockSize,
    /// It never had a size but that of its legs.
    own_size: bool,
    graph: Option<Graph>,
    /// How often it came back.
    times: u8,
}

impl Stored {
    /// A volume over files, `@` in the stack, which are there with [`LENGTH`] where no size is given.
    fn create(stack: &str, size: Option<u64>) -> Result<Self, GraphError> {
        // In memory where the system has such a place: there are many.
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let (mut numbered, mut parts) = (String::new(), stack.split('@'));
        numbered.push_str(parts.next().unwrap_or_default());
        for (number, part) in parts.enumerate() {
            numbered.extend(["file:", &number.to_string(), part]);
            if size.is_none() && !part.starts_with("(size") {
                std::fs::File::create(directory.path().join(number.to_string())).unwrap().set_len(LENGTH).unwrap();
            }
        }
        let files = Files { directory, must_be_there: false };
        let (block_size, own_size) = (BlockSize::B512, size.is_none());
        let mut volume =
            Self { files, stack: numbered, size: size.unwrap_or(0), block_size, own_size, graph: None, times: 0 };
        volume.open(Reason::Create)?;
        volume.files.must_be_there = true;
        volume.size = volume.root().geometry().bytes();
        assert!(size.is_none_or(|size| size == volume.size), "{stack} has {} bytes of {size:?}", volume.size);
        Ok(volume)
    }

    fn root(&self) -> &Arc<dyn Volume> {
        self.graph.as_ref().unwrap().volume()
    }

    fn open(&mut self, reason: Reason) -> Result<(), GraphError> {
        // What has the files goes first.
        self.graph = None;
        let node: Node = self.stack.parse().unwrap();
        let size = (!self.own_size).then_some(self.size);
        let plan = Plan { volume: "test", stack: &node, size, block_size: self.block_size };
        let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
        let mut graph = Graph::build(&plan, &self.files, &SharedObjects::default(), &spawner, None)?;
        graph.mount(reason)?;
        self.graph = Some(graph);
        Ok(())
    }

    /// As after a restart: it has what it had.
    fn comes_back(&mut self, how: &str) {
        // Both ends are written, with other data each time.
        self.times = self.times % 255 + 1;
        let block = self.block_size.bytes() as usize;
        let (end, data) = (self.size - block as u64, vec![self.times; block]);
        for at in [0, end] {
            legs::write(self.root(), at, data.clone()).unwrap_or_else(|error| panic!("{}, {how}: {error}", self.stack));
        }
        let opened = self.open(Reason::Open);
        let (stack, size) = (&self.stack, self.size);
        opened.unwrap_or_else(|error| panic!("{stack}, {how}, does not open again with {size} bytes: {error}"));
        assert_eq!(self.root().geometry().bytes(), size, "{stack}, {how}");
        for at in [0, end] {
            let read = legs::read(self.root(), at, block).unwrap_or_else(|error| panic!("{stack}, {how}: {error}"));
            assert!(read == data, "{stack}, {how}: other data at {at}");
        }
    }

    /// As the daemon resizes; whether it did.
    fn resize(&mut self, size: u64) -> Result<(), String> {
        let graph = self.graph.as_ref().unwrap();
        if self.own_size {
            graph.check_first_size(size, self.block_size).map_err(|error| error.to_string())?;
        }
        graph.volume().resize(BlockCount(size >> self.block_size.shift())).map_err(|error| error.to_string())?;
        (self.size, self.own_size) = (size, false);
        Ok(())
    }

    /// As the daemon formats; whether it did.
    fn format(&mut self, block_size: BlockSize) -> Result<(), String> {
        let graph = self.graph.as_ref().unwrap();
        let checked = graph.check_format(self.size, self.own_size, [self.block_size, block_size]);
        checked.map_err(|error| error.to_string())?;
        self.own_size &= self.block_size == block_size || !follows_blocks(graph.stack());
        graph.volume().format(block_size).map_err(|error| error.to_string())?;
        let size = graph.volume().geometry().bytes();
        self.own_size &= size == self.size;
        (self.size, self.block_size) = (size, block_size);
        Ok(())
    }

    /// Puts a meter over it, as far as the state goes.
    fn insert(&mut self) -> Result<(), String> {
        let stack = format!("meter | {}", self.stack);
        // Some stand at the top of their volumes.
        let node: Node = stack.parse().map_err(|error| format!("{error}"))?;
        let plan = Plan { volume: "test", stack: &node, size: Some(self.size), block_size: self.block_size };
        let spawner: Arc<dyn Spawner> = Arc::<Kept>::default();
        let old = (self.graph.as_ref().unwrap(), self.own_size);
        let built = Graph::build_next(&plan, &self.files, &SharedObjects::default(), &spawner, old);
        let (next, own_size) = built.map_err(|error| error.to_string())?;
        assert_eq!(next.volume().geometry().bytes(), self.size, "{stack}");
        (self.stack, self.own_size) = (stack, own_size);
        Ok(())
    }
}

/// What is done to a volume before it is resized.
#[derive(Clone, Copy, PartialEq, Eq)]
enum First {
    Nothing,
    Change,
    Formats,
}

/// How often what was tried with a stack was accepted.
#[derive(Debug, Default)]
struct Accepted {
    made: usize,
    changed: usize,
    formatted: usize,
    resized: usize,
}

/// Every size and every size of blocks that is accepted one after the other, of a volume that was made with a size and of one that was not.
fn sizes_come_back(stack: &str) -> Accepted {
    let mut accepted = Accepted::default();
    for (size, first) in [
        (Some((1 << 20) + 3 * 512), First::Nothing),
        (None, First::Nothing),
        (None, First::Change),
        (Some(1 << 20), First::Formats),
        (None, First::Formats),
    ] {
        let Ok(mut volume) = Stored::create(stack, size) else { continue };
        accepted.made += 1;
        volume.comes_back("made");
        if first == First::Change && volume.insert().is_ok() {
            accepted.changed += 1;
            volume.comes_back("changed");
        }
        let formats = if first == First::Formats { &[BlockSize::B4096, BlockSize::B512][..] } else { &[] };
        for block_size in formats {
            let done = volume.format(*block_size);
            accepted.formatted += usize::from(done.is_ok());
            volume.comes_back(&format!("formatted to blocks of {} ({done:?})", block_size.bytes()));
        }
        let (blocks, shift) = (volume.size >> volume.block_size.shift(), volume.block_size.shift());
        for blocks in [blocks, blocks - 3, blocks / 2 + 1, blocks + 1027, blocks - 3] {
            let done = volume.resize(blocks << shift);
            accepted.resized += usize::from(done.is_ok());
            volume.comes_back(&format!("resized to {blocks} blocks ({done:?})"));
        }
    }
    accepted
}

/// Every form of every service, over files, over files of a stated size, over mirrors and over what keeps tables.
#[test]
fn what_is_accepted_opens_again() {
    // What is filled in for each leg.
    let legs = [
        "@",
        "@(size=4197888)",
        "mirror(region=64K, @, @)",
        "mirror(region=64K, @(size=4197888), @(size=4197888))",
        "integrity(@(size=4197888))",
    ];
    // A migration makes its own, over what there is.
    let forms = crate::all().iter().flat_map(|kind| kind.samples).copied().filter(|form| !form.starts_with("move"));
    let mut resized = std::collections::BTreeMap::<_, usize>::new();
    for form in forms.chain(["disk(extent=64K, ?)", "stripe(chunk=256K, ?, ?)"]) {
        for leg in legs {
            let stack = form.replace('?', leg);
            let accepted = sizes_come_back(&stack);
            *resized.entry(leg).or_default() += accepted.resized;
            // That nothing is lost where all is refused says nothing.
            let word = form.split(['(', ' ']).next().unwrap_or(form);
            if leg != "@" || word == "share" {
                continue;
            }
            assert!(accepted.made > 0, "{stack}: {accepted:?}");
            assert_eq!(accepted.formatted > 0, word != "disk", "{stack}: {accepted:?}");
            let resizes = !["cache", "parity"].contains(&word);
            assert_eq!(accepted.resized > 0, resizes, "{stack}: {accepted:?}");
            assert!(accepted.changed > 0 || word == "disk", "{stack}: {accepted:?}");
        }
    }
    assert!(resized.values().all(|resized| *resized > 0), "{resized:?}");
}

/// The commonest ones are possible, both ways: over files of a stated size and over such of their own.
#[test]
fn what_needs_more_beside_smaller_blocks_is_formatted_and_comes_back() {
    let key = format!("key=\"file:{}/src/crypt/tests/test.key\"", env!("CARGO_MANIFEST_DIR"));
    for stack in [
        "integrity(@)".to_owned(),
        "metadata(@)".to_owned(),
        format!("crypt({key}, mode=authenticated, @)"),
        format!("crypt({key}, @)"),
        "mirror(region=64K, integrity(@), integrity(@))".to_owned(),
        "throttle(iops=1000000) | integrity(@)".to_owned(),
    ] {
        for size in [Some(1 << 20), None] {
            let mut volume = Stored::create(&stack, size).unwrap_or_else(|error| panic!("{stack}: {error}"));
            for block_size in [BlockSize::B4096, BlockSize::B512, BlockSize::B4096] {
                let done = volume.format(block_size);
                done.unwrap_or_else(|error| panic!("{stack} of {size:?} to {}: {error}", block_size.bytes()));
                volume.comes_back(&format!("formatted to blocks of {}", block_size.bytes()));
            }
            volume.resize(volume.size + (1 << 20)).unwrap_or_else(|error| panic!("{stack} of {size:?}: {error}"));
            volume.comes_back("grown");
        }
    }
}

/// Nothing is erased where the volume would not open again.
#[test]
fn a_format_after_which_a_leg_would_be_told_another_size_is_refused() {
    for (stack, size, why) in [
        ("integrity(mirror(region=64K, @, @))", Some(1 << 20), "or not open again: make another volume"),
        ("metadata(mirror(region=64K, @, @))", None, "or not open again: make another volume"),
        ("mirror(region=64K, @, @)", Some((1 << 20) + 3 * 512), "or not open again: make another volume"),
        ("concat(integrity(@(size=1M)), @(size=3M))", None, "nothing would tell it how much it has"),
        ("concat(integrity(@(size=1M)), @(size=3M))", Some(2 << 20), "nothing would tell it how much it has"),
    ] {
        let mut volume = Stored::create(stack, size).unwrap_or_else(|error| panic!("{stack}: {error}"));
        legs::write(volume.root(), 4096, vec![7; 4096]).unwrap();
        let refused = volume.format(BlockSize::B4096).unwrap_err();
        assert!(refused.contains(why), "{stack}: {refused}");
        assert!(legs::read(volume.root(), 4096, 4096).unwrap() == [7; 4096], "{stack}");
        volume.comes_back("refused");
    }
}

/// What services keep at the ends of legs is not lost where the size of the legs does not follow from the volume's.
#[test]
fn a_change_leaves_legs_of_a_volume_without_a_size_as_they_are() {
    let mut volume = Stored::create("stripe(chunk=1M, mirror(region=64K, @, @), mirror(region=64K, @, @))", None).unwrap();
    assert_eq!(volume.size, 6 << 20, "a part of each mirror fills no chunk");
    volume.comes_back("made");
    volume.insert().unwrap();
    assert!(volume.own_size);
    volume.comes_back("changed");
    let refused = volume.resize(6 << 20).unwrap_err();
    assert!(refused.contains("or not open again: make the volume larger"), "{refused}");
    volume.comes_back("refused");
    volume.resize(8 << 20).unwrap();
    volume.comes_back("grown");
    volume.insert().unwrap();
    assert!(!volume.own_size);
    volume.comes_back("changed again");
}

#[test]
fn a_disk_over_a_mirror_is_not_made_smaller() {
    let mut volume = Stored::create("disk(extent=64K) | mirror(region=64K, @, @)", Some(2 << 20)).unwrap();
    let refused = volume.resize(1 << 20).unwrap_err();
    assert!(refused.contains("has 2162688 bytes and would have to have 1114112, or not open again"), "{refused}");
    volume.comes_back("refused");
    volume.resize(3 << 20).unwrap();
    volume.comes_back("grown");
}

#[test]
fn a_mirror_behind_another_one_grows_to_any_size() {
    let mut volume = Stored::create("concat(mirror(region=64K, @, @), mirror(region=64K, @, @))", None).unwrap();
    volume.comes_back("made");
    for more in [513, 1026, 4099] {
        volume.resize(volume.size + more * 512).unwrap();
        volume.comes_back("grown");
    }
}

#[test]
fn a_leg_of_a_stated_size_keeps_it_and_shows_nothing_again() {
    let key = format!("key=\"file:{}/src/crypt/tests/test.key\"", env!("CARGO_MANIFEST_DIR"));
    for stack in [
        format!("crypt({key}, @(size=2000384))"),
        format!("crypt({key}, mode=authenticated, @(size=40000512))"),
        "integrity(@(size=2000384))".to_owned(),
        "metadata(@(size=2000384))".to_owned(),
    ] {
        let mut volume = Stored::create(&stack, None).unwrap_or_else(|error| panic!("{stack}: {error}"));
        let (whole, small) = (volume.size, 100 << 9);
        legs::write(volume.root(), whole - 4096, vec![7; 4096]).unwrap();
        volume.resize(small).unwrap();
        volume.comes_back("smaller");
        volume.resize(whole).unwrap();
        let read = legs::read(volume.root(), whole - 4096, 4096).unwrap();
        assert!(read == [0; 4096], "{stack}: what it had before it was made smaller is there again");
        volume.comes_back("as large again");
        volume.resize(whole + (64 << 10)).unwrap();
        volume.comes_back("larger");
    }
}
