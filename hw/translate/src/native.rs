//! The functions themselves, called with their fields as a list of numbers, and arguments to try them with.

use millrace_functions::{
    Command, Config, State, Verdict,
    cache::{Decision, Ended, Row},
    copy::{Action, Event, Job, Route},
    hardware, opcode,
    replicate::{Answer, Join, Outcome},
};

/// Something that consists of numbers.
trait Words {
    /// Names of the numbers, below the name of the whole.
    fn names(prefix: &str, names: &mut Vec<String>);
    /// Sets all numbers.
    fn put(&mut self, words: &mut dyn Iterator<Item = u64>);
    /// Gets all numbers.
    fn get(&self, words: &mut Vec<u64>);
}

macro_rules! numbers {
    ($($ty:ty)*) => { $(
        impl Words for $ty {
            fn names(prefix: &str, names: &mut Vec<String>) {
                names.push(prefix.to_owned());
            }

            fn put(&mut self, words: &mut dyn Iterator<Item = u64>) {
                *self = words.next().expect("a number for each field") as Self;
            }

            fn get(&self, words: &mut Vec<u64>) {
                words.push(u64::from(*self));
            }
        }
    )* };
}

numbers!(u8 u16 u32 u64);

impl<T: Words + Default, const N: usize> Words for [T; N] {
    fn names(prefix: &str, names: &mut Vec<String>) {
        (0..N).for_each(|at| T::names(&format!("{prefix}_{at}"), names));
    }

    fn put(&mut self, words: &mut dyn Iterator<Item = u64>) {
        for part in self {
            part.put(words);
        }
    }

    fn get(&self, words: &mut Vec<u64>) {
        for part in self {
            part.get(words);
        }
    }
}

macro_rules! words {
    ($($ty:ty { $($field:ident),* $(,)? })*) => { $(
        impl Words for $ty {
            fn names(prefix: &str, names: &mut Vec<String>) {
                let below = |field: &str| if prefix.is_empty() { field.to_owned() } else { format!("{prefix}_{field}") };
                let whole = Self::default();
                $( name_field(&whole.$field, &below(stringify!($field)), names); )*
            }

            fn put(&mut self, words: &mut dyn Iterator<Item = u64>) {
                $( self.$field.put(words); )*
            }

            fn get(&self, words: &mut Vec<u64>) {
                $( self.$field.get(words); )*
            }
        }
    )* };
}

fn name_field<T: Words>(_: &T, name: &str, names: &mut Vec<String>) {
    T::names(name, names);
}

words! {
    Command { slba, nsid, now, nlb_z, opcode, function, queue }
    State { a, b }
    Config { namespace, blocks, share, iops, bytes, cache, copy, copied }
    Verdict { lba, until, status, disks, kind }
    Join { pending, failed, status, done }
    Answer { disk, status, reads }
    Outcome { status, disks, kind }
    hardware::ChainIn { command, state, config }
    hardware::ChainOut { verdict, state }
    hardware::JoinIn { join, answer, state, config }
    hardware::JoinOut { outcome, join }
    hardware::ShareIn { command, config }
    hardware::ShareOut { lba, within }
    hardware::ThrottleIn { command, state, config }
    hardware::ThrottleOut { iops, bytes, until, early }
    hardware::ReplicateIn { command, state, config }
    hardware::ReplicateOut { disks }
    Row { ways, writes }
    Decision { lba, line, nlb_z, way, kind }
    Ended { way, kind }
    hardware::CacheSubmitIn { command, row, config }
    hardware::CacheSubmitOut { decision, row }
    hardware::CacheCompleteIn { ended, row }
    hardware::CacheCompleteOut { row }
    Job { at, writes }
    Route { target, epoch, kind }
    Event { epoch, kind }
    Action { lba, nlb_z, kind }
    hardware::CopySubmitIn { command, job, config }
    hardware::CopySubmitOut { route, job }
    hardware::CopyStepIn { event, job, config }
    hardware::CopyStepOut { action, job }
}

fn call<I: Words + Default, O: Words + Default>(function: fn(&I, &mut O), words: &[u64]) -> Vec<u64> {
    let (mut input, mut output, mut results) = (I::default(), O::default(), Vec::new());
    input.put(&mut words.iter().copied());
    function(&input, &mut output);
    output.get(&mut results);
    results
}

fn named<T: Words>() -> Vec<String> {
    let mut names = Vec::new();
    T::names("", &mut names);
    names
}

/// A function that is also a circuit.
pub struct Native {
    /// Its name.
    pub name: &'static str,
    /// Carries it out.
    pub run: fn(&[u64]) -> Vec<u64>,
    /// Names of the fields that it takes.
    pub inputs: fn() -> Vec<String>,
    /// Names of the fields that it gives.
    pub outputs: fn() -> Vec<String>,
    /// Makes arguments likely.
    shape: fn(&mut Random, &mut Arguments<'_>),
}

macro_rules! native {
    ($($name:ident: $input:ident to $output:ident, $shape:ident;)*) => {
        /// All functions.
        pub const NATIVE: &[Native] = &[$(
            Native {
                name: stringify!($name),
                run: |words| call(hardware::$name, words),
                inputs: named::<hardware::$input>,
                outputs: named::<hardware::$output>,
                shape: $shape,
            },
        )*];
    };
}

native! {
    chain: ChainIn to ChainOut, shape_chain;
    join: JoinIn to JoinOut, shape_join;
    share: ShareIn to ShareOut, shape_namespace;
    throttle: ThrottleIn to ThrottleOut, shape_chain;
    replicate: ReplicateIn to ReplicateOut, shape_namespace;
    cache_submit: CacheSubmitIn to CacheSubmitOut, shape_cache_submit;
    cache_complete: CacheCompleteIn to CacheCompleteOut, shape_cache_complete;
    copy_submit: CopySubmitIn to CopySubmitOut, shape_copy_submit;
    copy_step: CopyStepIn to CopyStepOut, shape_copy_step;
}

/// Numbers that look random (splitmix64), from a seed.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next one.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// One below a limit.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.number() % limit.max(1)
    }

    /// True once in so many.
    pub fn once_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    /// One of up to 64 bits, often at an edge.
    pub(crate) fn edge(&mut self) -> u64 {
        let near = self.below(5).wrapping_sub(2);
        match self.below(8) {
            0 => near,
            1 => u64::MAX.wrapping_add(near),
            2 | 3 => (1u64 << self.below(64)).wrapping_add(near),
            4 => self.number() >> self.below(64),
            _ => self.number(),
        }
    }
}

/// Arguments with their names.
struct Arguments<'a> {
    names: &'a [String],
    values: &'a mut [u64],
}

impl Arguments<'_> {
    fn of(&mut self, name: &str) -> &mut u64 {
        let at = self.names.iter().position(|known| known == name);
        &mut self.values[at.unwrap_or_else(|| panic!("no argument {name}"))]
    }
}

impl Native {
    /// Arguments, with edges and likely ones among them; each fits its field when cut to its width.
    pub fn arguments(&self, random: &mut Random) -> Vec<u64> {
        let names = (self.inputs)();
        let mut values: Vec<u64> = names.iter().map(|_| random.edge()).collect();
        if random.once_in(4) {
            let (from, to) = (random.below(names.len() as u64) as usize, random.below(names.len() as u64) as usize);
            values[to] = values[from];
        }
        if !random.once_in(8) {
            (self.shape)(random, &mut Arguments { names: &names, values: &mut values });
        }
        values
    }
}

const OPCODES: &[u8] = &[opcode::FLUSH, opcode::WRITE, opcode::READ, opcode::COMPARE, opcode::WRITE_ZEROES];

/// A namespace that is there, and is the one meant.
fn shape_namespace(random: &mut Random, arguments: &mut Arguments<'_>) {
    let nsid = *arguments.of("command_nsid") & 0xffff_ffff;
    if !random.once_in(16) {
        let namespace = arguments.of("config_namespace");
        let lbads = if random.once_in(2) { 9 } else { 12 };
        *namespace = (*namespace & !0xff_ffff_ffff) | Config::ENABLED | (lbads << 32) | nsid;
    }
    if !random.once_in(8) {
        let opcode = OPCODES[random.below(OPCODES.len() as u64) as usize];
        *arguments.of("command_opcode") = opcode.into();
    }
    if random.once_in(2) {
        *arguments.of("command_nlb_z") &= [0xff, 0x1f, 0x7][random.below(3) as usize];
    }
    if !random.once_in(8) {
        let (blocks, nlb_z) = (1 << (17 + random.below(31)), *arguments.of("command_nlb_z") & 0xffff);
        *arguments.of("config_blocks") = blocks;
        let slba = random.below(blocks);
        *arguments.of("command_slba") = if random.once_in(4) { blocks.wrapping_sub(nlb_z + random.below(3)) } else { slba };
    }
}

/// Buckets that are full about now.
fn shape_buckets(random: &mut Random, arguments: &mut Arguments<'_>) {
    let now = (*arguments.of("command_now") & 0xffff_ffff) << 12;
    for word in ["state_a", "state_b"] {
        if !random.once_in(8) {
            let near = random.number() >> (64 - random.below(36).max(1));
            let full = if random.once_in(3) { now.wrapping_sub(near) } else { now.wrapping_add(near) };
            let word = arguments.of(word);
            *word = (*word & !((1 << 48) - 1)) | (full & ((1 << 44) - 1));
        }
    }
}

fn shape_chain(random: &mut Random, arguments: &mut Arguments<'_>) {
    shape_namespace(random, arguments);
    shape_buckets(random, arguments);
}

fn shape_join(random: &mut Random, arguments: &mut Arguments<'_>) {
    let disk = 1 << random.below(16);
    *arguments.of("answer_disk") = disk;
    match random.below(3) {
        0 => *arguments.of("join_pending") = disk,
        1 => *arguments.of("join_pending") |= disk,
        _ => {}
    }
    if random.once_in(2) {
        *arguments.of("answer_status") = 0;
    }
    if random.once_in(2) {
        *arguments.of("join_failed") = 0;
        *arguments.of("join_done") = 0;
    }
    if random.once_in(2) {
        *arguments.of("config_namespace") |= Config::REPLICATE;
        *arguments.of("answer_reads") |= 1;
    }
}

/// Rows that have lines, one of which is likely the one meant.
fn shape_row(random: &mut Random, arguments: &mut Arguments<'_>) {
    for way in 0..4 {
        let flags = [0, 1 << 63, 1 << 63, 1 << 62][random.below(4) as usize];
        let (readers, age) = ([0, 0, 1, 15][random.below(4) as usize], random.below(4));
        let slba = if random.once_in(3) { arguments.names.iter().position(|name| name == "command_slba") } else { None };
        let tag = slba.map_or_else(|| random.number(), |at| arguments.values[at] >> 13) & ((1 << 35) - 1);
        *arguments.of(&format!("row_ways_{way}")) = flags | (age << 50) | (readers << 44) | tag;
    }
    if random.once_in(2) {
        *arguments.of("row_writes") = 0;
    }
}

fn shape_cache_submit(random: &mut Random, arguments: &mut Arguments<'_>) {
    let opcode = OPCODES[random.below(OPCODES.len() as u64) as usize];
    *arguments.of("command_opcode") = opcode.into();
    if random.once_in(2) {
        *arguments.of("command_nlb_z") &= 15;
    }
    shape_row(random, arguments);
}

fn shape_cache_complete(random: &mut Random, arguments: &mut Arguments<'_>) {
    *arguments.of("ended_kind") &= 3;
    *arguments.of("ended_way") &= 3;
    shape_row(random, arguments);
}

/// A copy somewhere, whose counts are often at their ends.
fn shape_job(random: &mut Random, arguments: &mut Arguments<'_>) {
    let (phase, first) = (random.below(6), arguments.of("job_at").wrapping_shr(random.below(48) as u32) & ((1 << 47) - 1));
    *arguments.of("job_at") = (random.below(2) << 51) | (phase << 48) | first;
    *arguments.of("job_writes") &= [0xffff_ffff, 0xffff, 0xffff_0000, 0][random.below(4) as usize];
}

fn shape_copy_submit(random: &mut Random, arguments: &mut Arguments<'_>) {
    let opcode = OPCODES[random.below(OPCODES.len() as u64) as usize];
    *arguments.of("command_opcode") = opcode.into();
    *arguments.of("command_nlb_z") &= [0xffff, 0xff, 0x7][random.below(3) as usize];
    shape_job(random, arguments);
    if random.once_in(2) {
        let first = *arguments.of("job_at") & ((1 << 48) - 1);
        *arguments.of("command_slba") = first.wrapping_add(random.below(100)).wrapping_sub(50);
    }
}

fn shape_copy_step(random: &mut Random, arguments: &mut Arguments<'_>) {
    *arguments.of("event_kind") &= 3;
    *arguments.of("event_epoch") &= 1;
    shape_job(random, arguments);
    if random.once_in(2) {
        let first = *arguments.of("job_at") & ((1 << 48) - 1);
        *arguments.of("config_copied") = first.wrapping_add(random.below(80)).wrapping_sub(8);
    }
}
