//! What a service is, beside a volume: what the layer asks of it and what the operator may.

use std::{any::Any, fmt, ops::RangeInclusive, sync::Arc};

use millrace_block::{BlockError, BlockSize, Volume, VolumeError};
use millrace_engine::EngineError;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{
    background::Task,
    legs::Leg,
    settings::{SettingError, Settings},
    shared::SharedObjects,
};

/// A line of the table of services.
#[derive(Debug)]
pub struct Kind {
    /// The word in an expression.
    pub name: &'static str,
    /// What it does, in one line.
    pub help: &'static str,
    /// How many legs it can have.
    pub legs: RangeInclusive<usize>,
    /// Its settings.
    pub settings: &'static [Word],
    /// Commands it understands while it runs (`millrace volume command`). The help of one that takes an argument begins with that: `leg=N: …`.
    pub commands: &'static [Word],
    /// Several volumes may have one volume (`volume:NAME`) for its leg.
    pub shares_legs: bool,
    /// It is made for services that share it ([`Self::shares_legs`]): it stands at the top of its own volume, which nothing else is
    /// over and no device has, or right below such a service.
    pub is_disk: bool,
    /// Expressions for the tests of random stacks, with a question mark for each leg: at least one per form of the service.
    pub samples: &'static [&'static str],
    /// Understands its settings.
    pub plan: fn(&Settings) -> Result<Box<dyn Plan>, SettingError>,
}

/// A name and what it means.
#[derive(Clone, Copy, Debug)]
pub struct Word {
    /// The name.
    pub name: &'static str,
    /// What it means, in one line.
    pub help: &'static str,
}

impl Word {
    /// The argument of a command, see [`Kind::commands`].
    fn argument(&self) -> Option<&'static str> {
        let (said, _) = self.help.split_once(": ")?;
        said.split_once('=').map(|(name, _)| name).filter(|name| !name.contains(' '))
    }
}

impl Kind {
    /// Fails when a command is given an argument that it does not take: the services look only at those that they know.
    ///
    /// # Errors
    /// The first such argument. Of a command that is none the service says so.
    pub fn check_arguments(&self, command: &str, arguments: &Settings) -> Result<(), ServiceError> {
        let Some(word) = self.commands.iter().find(|word| word.name == command) else { return Ok(()) };
        let takes = word.argument();
        let Some((name, _)) = arguments.iter().find(|(name, _)| Some(*name) != takes) else { return Ok(()) };
        let takes = takes.map_or_else(|| "it takes none".to_owned(), |takes| format!("it takes {takes}"));
        Err(ServiceError::Command(format!("{command} has no argument {name}; {takes}")))
    }
}

/// Which bytes a service shows, for changes under a running guest: those that would show other bytes are refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Layout {
    /// The blocks of these legs, as they are (throttle, mirror, cache: of the slow leg only).
    Same(Vec<usize>),
    /// The blocks of all legs, arranged in a way that this text describes: equal text over equal legs shows equal bytes.
    Own(String),
    /// The same of some legs only; what is on the others is no part of what it shows.
    OwnOf(String, Vec<usize>),
    /// The blocks of all legs, but so many legs can be others than before: what was on them is known from the rest.
    Spread {
        /// The arrangement.
        how: String,
        /// How many legs can be spared, those that are not whole counted.
        spare: usize,
    },
    /// The blocks of the first leg, as they are; while it is in force also those of the second, when that is whole. A change that leaves
    /// one of the two in its place, or puts it in the place of the first, leaves the legs of who is above as they were.
    Moving,
}

/// A service whose settings are understood, and which is not there yet.
pub trait Plan: fmt::Debug {
    /// See [`Layout`].
    fn layout(&self, legs: usize) -> Layout;

    /// The size in bytes that each leg is to have so that the volume has `size`. `stated` are the sizes that stand in the stack
    /// (`size=` at a leaf): a leg that has grown with the volume is told more. `None` leaves it to the leg (an existing file's own length).
    fn leg_sizes(&self, size: u64, stated: &[Option<u64>], block_size: BlockSize) -> Vec<Option<u64>>;

    /// The size that the last leg is told in the end, when the others are there and have so many bytes; `told` is what
    /// [`Self::leg_sizes`] says. Without a method of its own a service needs to know no other's.
    fn last_size(&self, size: u64, others: &[u64], told: Option<u64>, block_size: BlockSize) -> Option<u64> {
        let _ = (size, others, block_size);
        told
    }

    /// Whether a stored volume's leg may have other blocks than the volume: the service goes without it, because it was out of use when
    /// the others were formatted.
    fn goes_without_others(&self) -> bool {
        false
    }

    /// Whether it does with any size of its legs, of which it is made, and keeps nothing there.
    fn is_plain(&self) -> bool {
        false
    }

    /// Whether it opens with no other size than it had, for what is on its legs says so; growing is another matter.
    fn keeps_size(&self) -> bool {
        false
    }

    /// Whether what it needs of its leg for a size depends on the size of blocks.
    fn needs_by_blocks(&self) -> bool {
        false
    }

    /// Whether it leaves nothing on its legs and finds nothing there: what shows the same with it and without it does so whichever of the
    /// two was stored last.
    fn keeps_nothing(&self) -> bool {
        false
    }

    /// Makes the service. It may look at its legs' shapes and must not touch what they hold: that is for [`Service::mount`].
    fn build(&self, build: Build<'_>) -> Result<Arc<dyn Service>, ServiceError>;
}

/// What a service is made of.
pub struct Build<'a> {
    /// Its name in messages: the volume's, and its own place in the stack.
    pub name: String,
    /// The volume's name.
    pub volume: &'a str,
    /// Its legs.
    pub legs: Vec<Leg>,
    /// The sizes that stand in the stack at its legs, as [`Plan::leg_sizes`] has them.
    pub stated: &'a [Option<u64>],
    /// What is known of its legs' sizes beside that; of a leg that is missing here, nothing.
    pub sizing: &'a [Sizing],
    /// The size in bytes that it must have; `None`: all that its legs allow.
    pub size: Option<u64>,
    /// The volume's block size.
    pub block_size: BlockSize,
    /// What services of several volumes share.
    pub shared: &'a SharedObjects,
}

/// Whether a leg opens with a smaller size than it had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keeps {
    /// It does, and shows less.
    #[default]
    Nothing,
    /// It does not ([`Plan::keeps_size`]).
    Size,
    /// Something that it is made of does not.
    SizeOfParts,
}

/// What a leg is, as far as its definition tells: what sizes it may have, and whether it keeps what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizing {
    /// Whether it opens with a smaller size than it had.
    pub keeps: Keeps,
    /// Leaves below it state sizes. A service that is told none is opened with those, whatever it has grown to.
    pub is_stated_below: bool,
    /// It is made of leaves by services that do with any size of theirs: those are told what they have grown to.
    pub is_plain: bool,
    /// All below it is in memory of the daemon's: once that was stopped, it holds nothing.
    pub is_in_memory: bool,
}

impl Build<'_> {
    /// What is known of a leg's sizes.
    pub fn sizing_of(&self, leg: usize) -> Sizing {
        self.sizing.get(leg).copied().unwrap_or_default()
    }

    /// The size that stands at a leg in the stack, 0 if none does.
    pub fn stated_of(&self, leg: usize) -> u64 {
        self.stated.get(leg).copied().flatten().unwrap_or(0)
    }

    /// The legs that do not open with a smaller size than they had, each with the size that stands at it in the stack, 0 if none does.
    pub fn keeping(&self) -> Box<[(usize, Keeps, u64)]> {
        let legs = (0..self.legs.len()).map(|leg| (leg, self.sizing_of(leg).keeps, self.stated_of(leg)));
        legs.filter(|(_, keeps, _)| *keeps != Keeps::Nothing).collect()
    }

    /// Its only leg.
    ///
    /// # Panics
    /// When there are others: the table says how many there can be.
    pub fn only_leg(&self) -> Leg {
        assert_eq!(self.legs.len(), 1, "the table of services allows one leg");
        Arc::clone(&self.legs[0])
    }
}

/// Why a service comes into force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The volume is new: legs that hold nothing of the service's may be prepared for it.
    Create,
    /// The volume was there: the service must find what it left on its legs.
    Open,
    /// A running volume is changed.
    Change,
}

/// What a leg holds when its service comes into force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LegOrigin {
    /// It was this service's leg before, or may have been (reason Create or Open: look).
    Kept,
    /// All of the volume's data, as the guest sees them: it was the volume, or a part that showed them.
    Data,
    /// Nothing of the volume's.
    New,
}

/// How a service comes into force.
pub struct Mount {
    /// Why.
    pub reason: Reason,
    /// What each leg holds.
    pub legs: Vec<LegOrigin>,
    /// The service whose place it takes, of the same kind, with other settings or legs. It was unmounted just before.
    pub previous: Option<Arc<dyn Service>>,
    /// The operator has said that the volume's data may go, and so what legs hold.
    pub reformat: bool,
}

/// A service by its own type.
pub(crate) fn of_type<S: Service>(service: &Arc<dyn Service>) -> Option<Arc<S>> {
    let service: Arc<dyn Any + Send + Sync> = Arc::<dyn Service>::clone(service);
    service.downcast().ok()
}

impl Mount {
    /// The service before, by its own type.
    pub fn previous<S: Service>(&self) -> Option<Arc<S>> {
        of_type(self.previous.as_ref()?)
    }

    /// Whether a running volume gets a leg here that holds nothing of it: nothing of this kind was over it, or what was had another leg in its
    /// place and the operator has said that the data may go (without that, what the two legs share is not erased under the one before).
    pub(crate) fn is_new_leg(&self, leg: usize) -> bool {
        let is_other = self.reformat && self.legs.get(leg) == Some(&LegOrigin::New);
        self.reason == Reason::Change && (self.previous.is_none() || is_other)
    }
}

/// A service in a volume's path.
///
/// Besides the data path (`Volume`, on any shard) its methods are called by threads that may wait, never by a shard.
pub trait Service: Volume + Any {
    /// Comes into force. No request is in flight; the guest may be waiting (the pause should stay below 10 ms), but not in a change where
    /// nothing of the running volume is over the same leaves: then it may take its time. It may read and write its legs
    /// ([`legs`](crate::legs)). On error it must have changed nothing that the service before it needs.
    fn mount(&self, mount: &Mount) -> Result<(), ServiceError>;

    /// Whether its next mount has to complete an erasure that was cut off, which takes as long as its leg does. Asked before it is mounted, with what
    /// it is over in force. Without a method of its own a service has no such erasure.
    fn has_erasure(&self) -> bool {
        false
    }

    /// Whether it may come into force so, as far as is known without its legs. Asked when all that go are unmounted, and before any that come are
    /// mounted: those may erase what one that goes needs. Without a method of its own a service says all of that in [`mount`](Self::mount).
    fn may_mount(&self, mount: &Mount) -> Result<(), ServiceError> {
        let _ = mount;
        Ok(())
    }

    /// [`mount`](Self::mount) after a change that failed: no request came since it was unmounted. `instead` has taken its place and was taken
    /// back, or was to take it, and nobody else had its legs; `None`: somebody may have had them. Without a method of its own a service finds
    /// on its legs all that it needs.
    fn mount_again(&self, mount: &Mount, instead: Option<&Arc<dyn Service>>) -> Result<(), ServiceError> {
        let _ = instead;
        self.mount(mount)
    }

    /// Is about to go out of force, with requests still coming and its background tasks ended: does now what would take long then. What fails
    /// is tried once more by [`unmount`](Self::unmount).
    fn settle(&self) {}

    /// Goes out of force, with no request in flight and its background tasks ended: leaves on its legs what the next mount needs.
    /// It may be mounted again.
    fn unmount(&self) -> Result<(), ServiceError>;

    /// Is about to be taken out of a running volume, with requests still coming: brings its legs into a state in which they show
    /// the volume's data by themselves, or says why that cannot be. Requests in flight may undo some of it: it is called again when none is.
    fn leave(&self) -> Result<(), ServiceError>;

    /// While this is on, no request should wait in the service because the service wants it to (a throttle): a change waits for all
    /// that are in flight. Without a method of its own a service keeps nobody waiting.
    fn hurry(&self, on: bool) {
        let _ = on;
    }

    /// Is gone for good, after it was unmounted, and gives up what it has of what others share: its volume was deleted, or changed to
    /// one without it. Or, when not `stored`, its volume or the change never came to be: then only what its mount made goes.
    /// Without a method of its own a service has nothing of the kind.
    fn discard(&self, stored: bool) {
        let _ = stored;
    }

    /// Whether it knows of a loss of acknowledged writes that the guest is yet to be told of, at its next flush. Where it goes and nobody takes
    /// that over, the layer tells. Without a method of its own a service flushes only when the guest does, which is told by that.
    fn has_untold(&self) -> bool {
        false
    }

    /// Which of the legs named by [`Layout::Same`] hold all of the volume's data right now (a leg that failed or is being
    /// filled does not); of [`Layout::Spread`], which hold all that they should.
    fn leg_is_whole(&self, leg: usize) -> bool;

    /// Whether a leg is read and written as those that have everything are.
    fn leg_is_used(&self, _leg: usize) -> bool {
        true
    }

    /// How it is doing.
    fn status(&self) -> Status;

    /// Does what the operator says: one of the [`Kind`]'s commands. The answer is text for the operator.
    fn command(&self, command: &str, arguments: &Settings) -> Result<String, ServiceError>;

    /// Work beside requests, started when it is in force and ended before it is unmounted.
    fn tasks(self: Arc<Self>) -> Vec<Task>;
}

/// How a service is doing, for `volume show`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// How well.
    pub health: Health,
    /// What it has to say, in its own words: name and value.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub facts: Vec<(String, String)>,
    /// Work under way.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub progress: Vec<Progress>,
    /// What there is to give to volumes; of a disk alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub room: Option<Room>,
}

/// Room of a disk, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Room {
    /// What no volume has.
    pub free: u64,
    /// What there is in all.
    pub total: u64,
}

/// How well a service is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    /// As it should be.
    #[default]
    Good,
    /// It works, with less than it promises (a mirror without one leg).
    Degraded,
    /// It does not work.
    Failed,
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Good => "good",
            Self::Degraded => "degraded",
            Self::Failed => "failed",
        })
    }
}

/// Work of a service that takes a while.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// What it is: "resync of leg 1".
    pub what: String,
    /// How much is done.
    pub done: u64,
    /// Of how much, in the same unit.
    pub total: u64,
}

impl Status {
    /// A service that is well and has these facts to tell.
    pub fn good(facts: impl IntoIterator<Item = (&'static str, String)>) -> Self {
        let facts = facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Self { health: Health::Good, facts, progress: Vec::new(), room: None }
    }
}

/// Why a service cannot be, or cannot do something: told to the operator, with the node's name before it.
#[derive(Debug, Error)]
pub enum ServiceError {
    /// A setting does not fit.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// The legs do not fit: each other, the size, or the service.
    #[error("{0}")]
    Legs(String),
    /// A leg refused.
    #[error(transparent)]
    Volume(#[from] VolumeError),
    /// A leg could not be read or written.
    #[error("cannot {what} leg {leg}: {source}")]
    Leg {
        /// What was tried, as a verb.
        what: &'static str,
        /// The leg's name.
        leg: String,
        /// What happened.
        #[source]
        source: BlockError,
    },
    /// What a leg holds is not what it should be: foreign, damaged, or missing.
    #[error("leg {leg}: {what}")]
    Content {
        /// The leg's name.
        leg: String,
        /// What is wrong and what to do.
        what: String,
    },
    /// What a leg holds was written by a newer program.
    #[error("leg {leg}: its record is of layout {has}, and this program knows {known} at most: use a newer millrace")]
    Newer {
        /// The leg's name.
        leg: String,
        /// The layout there.
        has: u32,
        /// The newest one that is understood.
        known: u32,
    },
    /// It cannot be done now.
    #[error("{0}")]
    NotNow(String),
    /// There is no such command, or it has no such argument.
    #[error("{0}")]
    Command(String),
    /// No thread to do it on.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Why it refused by itself, after it had begun to erase what its legs held.
    #[error(transparent)]
    HalfWay(Box<ServiceError>),
    /// A file beside the volume (a key) could not be used.
    #[error("cannot {what} {path}: {source}")]
    File {
        /// What was tried, as a verb.
        what: &'static str,
        /// The file.
        path: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
}

impl ServiceError {
    /// The answer of a service that does not know a command.
    pub fn no_command(kind: &Kind, command: &str) -> Self {
        let known: Vec<_> = kind.commands.iter().map(|command| command.name).collect();
        let known = if known.is_empty() { "it has none".to_owned() } else { format!("there are {}", known.join(", ")) };
        Self::Command(format!("{command:?} is no command of {}; {known}", kind.name))
    }
}
