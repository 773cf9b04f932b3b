//! What a function shows, and the volumes that everything is written to as well.
//!
//! ```text
//!   namespace, sizes, write cache, replicas ──► show ──► what differs from the registers?
//!     blocks, replicas, switches of word 0 ──► those words alone, at once, what narrows first
//!     the namespace, its blocks' size, caps ──► word 0 becomes 0 at once; the new words when nothing is in flight
//! ```
//!
//! The engine looks at a function's configuration twice for each command: at the blocks' size when it sizes the data pointers, and later at
//! the rest, to decide. Had the size changed between the two, the disk would be given a list too short for the command, and follow what
//! other guests' commands left behind it. So the size that word 0 names never changes under commands in flight, not even to "none" and back.
//! And a function that is turned off forgets what it has used of its caps: what a guest can change by itself must not turn it off.

use std::{
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use millrace_block::Geometry;
use millrace_engine_model::map::{self, NamespaceWord};

use super::port::Port;
use crate::nvme::namespace::{Attached, Namespace};

/// How long a guest's doorbells wait for a replica that goes: its disk may be the one that does not answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// What the registers say of a namespace.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Programmed {
    words: [u64; 5],
    /// The disk that the namespace itself lies on.
    own: u8,
}

impl Programmed {
    fn disks(&self) -> u16 {
        NamespaceWord::from_bits(self.words[0]).disks()
    }

    /// Whether the engine may look at one of the two for the first time that it looks for a command, and at the other for the second.
    fn is_like(&self, other: &Self) -> bool {
        let fixed = |word: u64| {
            NamespaceWord::from_bits(word).with_enabled(false).with_read_only(false).with_durable(false).with_disks(0)
        };
        self.own == other.own && fixed(self.words[0]) == fixed(other.words[0]) && self.words[2..] == other.words[2..]
    }
}

/// A volume that is not shown, but written to as well.
struct Replica {
    /// Under its identifier for the operator; what is in flight on it are the controller's own flushes.
    attached: Rc<Attached>,
    disk: u8,
}

/// See the module.
#[derive(Default)]
pub(super) struct Shown {
    /// `None`: word 0 is 0.
    programmed: Option<Programmed>,
    /// Disks of what is shown when nothing is in flight any more; 0: nothing waits for that.
    awaited: u16,
    replicas: Vec<Replica>,
    /// Disks may have volumes that the function does not use any more.
    stale: bool,
    /// Namespaces that were detached, until nothing is in flight.
    leaving: Vec<Rc<Attached>>,
    /// The same, of replicas.
    replicas_leaving: Vec<Rc<Attached>>,
    /// Until when doorbells wait for them.
    patience: Option<Instant>,
    /// Commands are called off, until nothing is in flight: the engine is told of no disks.
    called_off: bool,
    /// Somebody waits until nothing is in flight, and goes on by itself then: the doorbells wait.
    settles: bool,
}

/// Why a volume is not where it should be.
pub(crate) struct Obstacle {
    pub(crate) namespace: Arc<Namespace>,
    pub(crate) why: &'static str,
}

impl Port {
    /// Has the function show a namespace, or none; whether every write is to be durable. True: its words are new, as a whole.
    ///
    /// # Errors
    /// What is in the way. A namespace that has no disk is not shown; a replica that does not fit is not written to.
    pub(crate) fn show(&mut self, attached: Option<&Attached>, durable: bool) -> Result<bool, Obstacle> {
        let Some(attached) = attached else {
            return Ok(self.program(None));
        };
        let namespace = &attached.namespace;
        let geometry = namespace.volume.geometry();
        let has_metadata = namespace.volume.metadata().shown().is_some();
        let disk = if has_metadata { None } else { self.card.borrow_mut().disk_for(namespace, self.function) };
        let Some(own) = disk else {
            self.program(None);
            let why = if has_metadata { "it has metadata" } else { "all disks of the card have other volumes" };
            return Err(Obstacle { namespace: Arc::clone(namespace), why });
        };
        let (mut disks, mut blocks, mut obstacle) = (1_u16 << own, geometry.blocks.0, None);
        for replica in &self.shown.replicas {
            let namespace = &replica.attached.namespace;
            let shape = namespace.volume.geometry();
            if shape.block_size == geometry.block_size {
                disks |= 1 << replica.disk;
                blocks = blocks.min(shape.blocks.0);
            } else {
                let why = "it is not written to: its blocks have another size than the first volume's";
                obstacle = Some(Obstacle { namespace: Arc::clone(namespace), why });
            }
        }
        let anew = self.program(Some(Programmed { words: self.words(attached, &geometry, blocks, disks, durable), own }));
        if self.shown.awaited == 0 {
            self.fit_space(geometry.block_size.shift() as u8);
        }
        obstacle.map_or(Ok(anew), Err)
    }

    fn words(&self, attached: &Attached, geometry: &Geometry, blocks: u64, disks: u16, durable: bool) -> [u64; 5] {
        let (first, blocks) = self.functions.window(blocks);
        let word = NamespaceWord::new()
            .with_nsid(attached.nsid)
            .with_block_log2(geometry.block_size.shift() as u8)
            .with_enabled(!attached.formatting.get())
            .with_read_only(attached.read_only || geometry.read_only)
            .with_durable(durable)
            .with_disks(disks);
        let [iops, bytes] = self.functions.caps(geometry.block_size.bytes().into());
        [word.into_bits() | self.functions.switches(), blocks, first, iops, bytes]
    }

    /// Has the registers say this, as far as commands in flight allow. True: all words are new.
    fn program(&mut self, wanted: Option<Programmed>) -> bool {
        let disks = wanted.map_or(0, |wanted| wanted.disks());
        let known = self.shown.programmed;
        // What waited is asked for in every turn: it waits again, or not any more.
        let used = std::mem::take(&mut self.shown.awaited) | known.map_or(0, |known| known.disks());
        self.shown.stale |= used & !disks != 0;
        match (known, wanted) {
            (known, wanted) if known == wanted => false,
            (Some(known), Some(wanted)) if known.is_like(&wanted) => {
                self.rewrite(&known, &wanted);
                false
            }
            (known, wanted) => {
                if known.is_some() {
                    self.shown.programmed = None;
                    self.write_word(0, 0);
                }
                let Some(wanted) = wanted else { return false };
                if !self.is_quiet() {
                    self.shown.awaited = disks;
                    return false;
                }
                // The first word last: nothing is shown before.
                (1..wanted.words.len()).for_each(|word| self.write_word(word, wanted.words[word]));
                self.write_word(0, wanted.words[0]);
                self.shown.programmed = Some(wanted);
                true
            }
        }
    }

    /// Writes the words that differ, while the engine goes on. A replica that comes may be smaller than what was shown, one that goes smaller
    /// than what is shown then: at no time are there more blocks than all disks have.
    fn rewrite(&mut self, known: &Programmed, wanted: &Programmed) {
        let order = if wanted.words[1] < known.words[1] { [1, 0] } else { [0, 1] };
        for word in order.into_iter().filter(|word| known.words[*word] != wanted.words[*word]) {
            self.write_word(word, wanted.words[word]);
        }
        self.shown.programmed = Some(*wanted);
    }

    fn write_word(&self, word: usize, value: u64) {
        let hidden = word == 0 && self.shown.called_off;
        let value = if hidden { NamespaceWord::from_bits(value).with_disks(0).into_bits() } else { value };
        self.write(map::configuration(self.place.local(), word as u32), value);
    }

    /// Shows nothing any more, and has no use for a disk.
    pub(super) fn show_nothing(&mut self) {
        self.program(None);
        self.shown.replicas.clear();
        self.shown.stale = true;
    }

    // ---- calling off ------------------------------------------------------------------------------------------------

    /// Has commands that wait in the engine, or are yet to be taken, end with Internal Error, to be tried again: for want of a disk, which the
    /// engine finds before it holds a command for its cap. What the caps have counted stays, or whoever resets would have another burst. The
    /// first that is held ends when its time comes, one command's time at most, and the others with it.
    pub(crate) fn call_off(&mut self) {
        if !self.shown.called_off && !self.is_quiet() {
            self.shown.called_off = true;
            self.write_first();
        }
    }

    /// Nothing is in flight any more: the disks are there again.
    pub(crate) fn go_on_after_call(&mut self) {
        if self.shown.called_off && self.is_quiet() {
            self.shown.called_off = false;
            self.write_first();
        }
    }

    /// Writes word 0 again; where nothing is shown, all commands end anyway.
    fn write_first(&self) {
        if let Some(known) = &self.shown.programmed {
            self.write_word(0, known.words[0]);
        }
    }

    /// Whether a write goes to several disks: legs of one command cannot be called off together, and its volumes would differ then.
    pub(crate) fn writes_to_several(&self) -> bool {
        !self.shown.replicas.is_empty() || !self.shown.replicas_leaving.is_empty()
    }

    /// From now on doorbells wait, or do not any more.
    pub(crate) fn settle(&mut self, on: bool) {
        self.shown.settles = on;
    }

    // ---- what goes --------------------------------------------------------------------------------------------------

    /// A namespace was detached: it is in use until nothing is in flight.
    pub(crate) fn leave(&mut self, attached: &Rc<Attached>) {
        attached.in_flight.set(attached.in_flight.get() + 1);
        self.shown.leaving.push(Rc::clone(attached));
    }

    /// Whether something is to be done once nothing is in flight.
    pub(super) fn waits_for_quiet(&self) -> bool {
        let Shown { awaited, stale, leaving, replicas_leaving, called_off, .. } = &self.shown;
        *awaited != 0 || *stale || *called_off || !leaving.is_empty() || !replicas_leaving.is_empty()
    }

    /// Whether the guest's doorbells wait for that: a guest that always has something in flight would put it off for ever.
    pub(crate) fn holds_doorbells(&self) -> bool {
        if self.shown.called_off || self.shown.settles {
            return true;
        }
        let is_patient = || self.shown.patience.is_some_and(|end| Instant::now() < end);
        self.waits_for_quiet() && (self.shown.programmed.is_none() || is_patient())
    }

    /// Lets go of volumes that the function no longer uses, once nothing is in flight.
    pub(crate) fn leave_disks(&mut self) {
        if !self.waits_for_quiet() || !self.is_quiet() {
            return;
        }
        let shown = &mut self.shown;
        let in_use = shown.awaited | shown.programmed.map_or(0, |programmed| programmed.disks());
        let in_use = shown.replicas.iter().fold(in_use, |disks, replica| disks | 1 << replica.disk);
        for (number, disk) in self.card.borrow_mut().disks.iter_mut().enumerate() {
            if in_use >> number & 1 == 0 {
                disk.leave(self.function);
            }
        }
        shown.stale = false;
        shown.leaving.drain(..).for_each(|attached| attached.in_flight.set(attached.in_flight.get() - 1));
        shown.replicas_leaving.retain(|replica| replica.in_flight.get() > 0);
        shown.patience = None;
    }

    // ---- replicas ---------------------------------------------------------------------------------------------------

    /// The volumes that are written to as well.
    pub(crate) fn replicas(&self) -> impl Iterator<Item = &Rc<Attached>> {
        self.shown.replicas.iter().map(|replica| &replica.attached)
    }

    /// Blocks that a first volume of this shape has, and all replicas that are written to with it.
    pub(crate) fn common_blocks(&self, first: &Geometry) -> u64 {
        let shapes = self.replicas().map(|replica| replica.namespace.volume.geometry());
        let written = shapes.filter(|shape| shape.block_size == first.block_size);
        written.map(|shape| shape.blocks.0).fold(first.blocks.0, u64::min)
    }

    /// A replica that has not all that the guest would see of a first volume of this shape, and why it does not fit.
    pub(crate) fn unfit_replica(&self, first: &Geometry) -> Option<(&Namespace, &'static str)> {
        let (start, blocks) = self.functions.window(first.blocks.0);
        // A window may begin beyond the volume.
        let end = (start + blocks).min(first.blocks.0);
        self.replicas().find_map(|replica| {
            let shape = replica.namespace.volume.geometry();
            if shape.block_size != first.block_size {
                Some((&*replica.namespace, "its blocks have another size"))
            } else if shape.blocks.0 < end {
                Some((&*replica.namespace, "it is smaller than what the guest would see"))
            } else {
                None
            }
        })
    }

    /// Has everything written to a volume as well, from when the namespace is shown next. `first` is that namespace, if it is there.
    ///
    /// # Errors
    /// Why it cannot be. Nothing has changed then.
    pub(crate) fn add_replica(
        &mut self,
        nsid: u32,
        namespace: &Arc<Namespace>,
        first: Option<&Namespace>,
    ) -> Result<(), &'static str> {
        let geometry = namespace.volume.geometry();
        let first = first.map(|first| first.volume.geometry());
        if self.replicas().any(|replica| replica.nsid == nsid) {
            return Err("another one has its identifier");
        }
        if self.is_replica_leaving(nsid) {
            return Err("the one that had its identifier has commands in flight");
        }
        if geometry.read_only {
            return Err("it cannot be written");
        }
        if namespace.volume.metadata().shown().is_some() {
            return Err("it has metadata");
        }
        if first.is_some_and(|first| first.block_size != geometry.block_size) {
            return Err("its blocks have another size than the first volume's");
        }
        let disk = self.card.borrow_mut().disk_for(namespace, self.function);
        let disk = disk.ok_or("all disks of the card have other volumes")?;
        self.shown.replicas.push(Replica { attached: Rc::new(Attached::new(nsid, namespace, false)), disk });
        Ok(())
    }

    /// Has a volume written to no more, from when the namespace is shown next. Whether there was one.
    pub(crate) fn remove_replica(&mut self, nsid: u32) -> bool {
        let Some(at) = self.replicas().position(|replica| replica.nsid == nsid) else { return false };
        let replica = self.shown.replicas.remove(at);
        self.shown.replicas_leaving.push(replica.attached);
        self.shown.patience = Some(Instant::now() + PATIENCE);
        true
    }

    /// Whether commands may be in flight on a replica that was taken away under this identifier.
    pub(crate) fn is_replica_leaving(&self, nsid: u32) -> bool {
        self.shown.replicas_leaving.iter().any(|replica| replica.nsid == nsid)
    }
}
