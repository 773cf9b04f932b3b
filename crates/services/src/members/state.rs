//! What the legs are to their service, and how that is written on them: docs/formats/mirror.md, docs/formats/parity.md.

use std::sync::atomic::{AtomicU64, Ordering};

/// The newest layout of the table's record.
pub(crate) const NEWEST: u32 = 3;
/// Legs at most.
pub(crate) const MOST_LEGS: usize = 8;
/// Bytes of the label at most.
const LABEL: usize = 64;
/// Where the list of members begins.
const MEMBERS: usize = 112;
/// Bytes of a member.
const MEMBER: usize = 32;
/// Where the form is, if there is one.
const FORM: usize = MEMBERS + MEMBER * MOST_LEGS;
/// Where it is said what the legs grow to, while they do.
const GROWING: usize = FORM + 16;
/// Where it is said that the legs are being erased, while they are.
const FORMATTING: usize = GROWING + 8;

/// What a leg is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LegState {
    /// It has everything: it is read and written.
    Good,
    /// It is being filled: it is written, and not read.
    Filling,
    /// It missed writes: it is neither read nor written.
    Failed,
}

/// Tells one thing from all others, ever. Bytes, because a number of this size would ask for more alignment than a task's scratch
/// gives.
pub(crate) type Id = [u8; 16];

/// A leg, as the service knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    /// Tells it from all other legs, ever.
    pub(crate) id: Id,
    pub(crate) state: LegState,
    /// The event at which it failed; 0: it did not.
    pub(crate) failed_at: u64,
}

impl Member {
    /// Older programs said this of a leg that refused a rebuild, whenever it had failed: none fails at the first event.
    pub(crate) const UNKNOWN_EVENT: u64 = 1;

    /// Whether the leg has all that was written before it failed, and nothing else, if it is member `own` of what it says, so that the bitmap
    /// tells all that it lacks.
    pub(crate) fn lacks_marked_only(&self, said: &Table, own: usize) -> bool {
        let is_good = said.members.get(own).is_some_and(|own| own.state == LegState::Good);
        // Nobody told it this event and left it good: it was used apart from the others, which have no marks of what it got there.
        let went_on = is_good && said.event >= self.failed_at;
        // A format takes all marks away.
        !said.formatting
            && !went_on
            && self.failed_at > Self::UNKNOWN_EVENT
            && said.event.saturating_add(1) >= self.failed_at
    }

    /// The same, being filled.
    pub(crate) fn filling(&self) -> Self {
        Self { state: LegState::Filling, failed_at: 0, ..*self }
    }
}

/// The members of a service, and what happened to them so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Table {
    /// Tells this set of legs from all others.
    pub(crate) set: Id,
    /// Changes of this table so far.
    pub(crate) event: u64,
    /// Bytes of data on each leg.
    pub(crate) bytes: u64,
    /// Power of two of the bytes of a region of the bitmap.
    pub(crate) region_shift: u32,
    /// The volume's name when the mirror was made: for messages.
    pub(crate) label: String,
    pub(crate) members: Vec<Member>,
    /// How the data lie on the legs ([`Rules`](super::Rules)).
    pub(crate) form: [u32; 4],
    /// Bytes of data that each leg is about to have: there is room for them, and nothing of them was used so far.
    pub(crate) growing: Option<u64>,
    /// The legs are being erased: each has what it had, or nothing, or some of it.
    pub(crate) formatting: bool,
}

/// What is on the legs, for whoever has the turn to change it.
#[derive(Debug)]
pub(crate) struct OnLegs {
    pub(crate) table: Table,
    /// The table as it was stored last, on one leg at least.
    last: Table,
    /// Legs in use that have what was before it. Until they have it nobody is told anything newer: two events behind, a leg would be
    /// filled again at the next opening, perhaps from legs that are too few without it.
    behind: u8,
    /// Stores of the table so far.
    pub(super) generation: u64,
    /// Stores of the bitmap so far.
    pub(super) page_generation: u64,
    /// This went out of force in an orderly way, and had been in force.
    pub(super) went_in_order: bool,
    /// It holds at the next mount: nothing was written since this was out of force ([`Members::come_back`](super::Members::come_back)).
    pub(super) still_holds: bool,
}

impl OnLegs {
    /// What was found is the table `last`, with its newest copy of that number, and legs that have an older one.
    pub(super) fn new(table: Table, last: Table, behind: u8, generation: u64, page_generation: u64) -> Self {
        Self { table, last, behind, generation, page_generation, went_in_order: false, still_holds: false }
    }

    /// What changes now is one event, however much it is, until it is stored. Its number.
    pub(super) fn next_event(&mut self) -> u64 {
        self.table.event = self.last.event + 1;
        self.table.event
    }

    /// Whether one of these legs refused the last event.
    pub(super) fn is_late(&self, on: u8) -> bool {
        self.behind & on != 0
    }

    /// A leg is in use again, and is told nothing new yet: the last event before anything newer.
    pub(super) fn is_to_be_told(&mut self, leg: usize) {
        self.behind |= 1 << leg;
    }

    /// For those of the legs that have to be told the last event first.
    pub(super) fn late(&mut self, on: u8) -> Option<Telling> {
        let id = |leg: usize| self.table.members.get(leg).map(|member| member.id);
        let own = |leg: usize| self.last.members.iter().position(|member| Some(member.id) == id(leg));
        let late: Vec<_> = legs_of(self.behind & on).filter_map(|leg| Some((leg, own(leg)?))).collect();
        (!late.is_empty()).then(|| self.tell(&late))
    }

    /// For these legs, what the table says now.
    pub(super) fn newest(&mut self, on: u8) -> Telling {
        if self.table != self.last && self.table.event == self.last.event {
            self.next_event();
        }
        self.last.clone_from(&self.table);
        self.behind |= on;
        self.tell(&legs_of(on).map(|leg| (leg, leg)).collect::<Vec<_>>())
    }

    /// Each leg with its number in the table that was stored last.
    fn tell(&mut self, legs: &[(usize, usize)]) -> Telling {
        // Two copies.
        self.generation += 2;
        let contents = legs.iter().map(|(leg, own)| (*leg, self.last.encode(*own))).collect();
        Telling { version: self.last.version(), generation: self.generation, contents }
    }

    /// Which of the legs that were told something refused it.
    pub(super) fn told(&mut self, telling: &Telling, refused: u8) {
        for (leg, _) in telling.contents.iter().filter(|(leg, _)| refused >> leg & 1 == 0) {
            self.behind &= !(1 << leg);
        }
    }
}

/// A table on its way to legs.
#[derive(Debug)]
pub(super) struct Telling {
    version: u32,
    /// The number of the second copy.
    generation: u64,
    /// Each leg with what it is told.
    contents: Vec<(usize, Vec<u8>)>,
}

impl Telling {
    /// The layout of what is told.
    pub(super) fn version(&self) -> u32 {
        self.version
    }

    /// The stores, by leg: each in both copies, so that a damaged one never brings an older state back.
    pub(super) fn stores(&self) -> impl Iterator<Item = (usize, [u64; 2], &[u8])> {
        self.contents.iter().map(|(leg, content)| (*leg, [self.generation - 1, self.generation], &content[..]))
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    array(bytes, at).map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    array(bytes, at).map(u64::from_le_bytes)
}

impl LegState {
    fn number(self) -> u32 {
        match self {
            Self::Good => 1,
            Self::Filling => 2,
            Self::Failed => 3,
        }
    }

    fn from_number(number: u32) -> Option<Self> {
        [Self::Good, Self::Filling, Self::Failed].into_iter().find(|state| state.number() == number)
    }
}

impl Table {
    /// The content of the record on the leg that is member `own`.
    pub(crate) fn encode(&self, own: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(MEMBERS + MEMBER * self.members.len());
        bytes.extend_from_slice(&self.set);
        bytes.extend_from_slice(&self.event.to_le_bytes());
        bytes.extend_from_slice(&self.bytes.to_le_bytes());
        bytes.extend_from_slice(&self.region_shift.to_le_bytes());
        bytes.extend_from_slice(&(self.members.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&(own as u32).to_le_bytes());
        let label = self.label.as_bytes();
        let label = label.get(..label.len().min(LABEL)).unwrap_or_default();
        bytes.extend_from_slice(&(label.len() as u32).to_le_bytes());
        bytes.extend_from_slice(label);
        bytes.resize(MEMBERS, 0);
        for member in &self.members {
            bytes.extend_from_slice(&member.id);
            bytes.extend_from_slice(&member.state.number().to_le_bytes());
            bytes.extend_from_slice(&[0; 4]);
            bytes.extend_from_slice(&member.failed_at.to_le_bytes());
        }
        if self.form != [0; 4] || self.version() > 1 {
            bytes.resize(FORM, 0);
            self.form.iter().for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()));
        }
        if self.version() > 1 {
            bytes.extend_from_slice(&self.growing.unwrap_or(0).to_le_bytes());
        }
        if self.formatting {
            bytes.extend_from_slice(&1_u32.to_le_bytes());
        }
        bytes
    }

    /// The layout of the record: programs that do not know what is under way must leave it alone.
    pub(crate) fn version(&self) -> u32 {
        match (self.formatting, self.growing) {
            (true, _) => NEWEST,
            (false, Some(_)) => 2,
            (false, None) => 1,
        }
    }

    /// A table and which of its members the leg is; `None` when it cannot be one.
    pub(crate) fn decode(bytes: &[u8]) -> Option<(Self, usize)> {
        let (count, own) = (u32_at(bytes, 36)? as usize, u32_at(bytes, 40)? as usize);
        let label = bytes.get(48..48_usize.checked_add(u32_at(bytes, 44)? as usize)?)?;
        if !(1..=MOST_LEGS).contains(&count) || own >= count || label.len() > LABEL {
            return None;
        }
        let member = |number: usize| {
            let at = MEMBERS + number * MEMBER;
            let state = LegState::from_number(u32_at(bytes, at + 16)?)?;
            Some(Member { id: array(bytes, at)?, state, failed_at: u64_at(bytes, at + 24)? })
        };
        // A list that ends before it has none.
        let form = std::array::from_fn(|number| u32_at(bytes, FORM + number * 4).unwrap_or(0));
        let table = Self {
            set: array(bytes, 0)?,
            event: u64_at(bytes, 16)?,
            bytes: u64_at(bytes, 24)?,
            region_shift: u32_at(bytes, 32).filter(|shift| *shift < 64)?,
            label: String::from_utf8_lossy(label).into_owned(),
            members: (0..count).map(member).collect::<Option<_>>()?,
            form,
            growing: u64_at(bytes, GROWING).filter(|bytes| *bytes > 0),
            formatting: u32_at(bytes, FORMATTING) == Some(1),
        };
        Some((table, own))
    }

    fn set_of(&self, is: impl Fn(&Member) -> bool) -> u8 {
        self.members.iter().enumerate().fold(0, |set, (at, member)| set | u8::from(is(member)) << at)
    }

    /// What follows for requests, with this table durable on its legs.
    pub(crate) fn masks(&self) -> Masks {
        Masks {
            readable: self.set_of(|member| member.state == LegState::Good),
            writable: self.set_of(|member| member.state != LegState::Failed),
            recorded: self.set_of(|member| member.state == LegState::Failed),
        }
    }
}

/// Sets of legs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Masks {
    /// They are read.
    pub(crate) readable: u8,
    /// They are written.
    pub(crate) writable: u8,
    /// They failed, and that is durable on the others.
    pub(crate) recorded: u8,
}

impl Masks {
    /// Legs that are being filled.
    pub(crate) fn filling(self) -> u8 {
        self.writable & !self.readable
    }
}

/// Sets of legs that every request looks at, in one word.
#[derive(Debug, Default)]
pub(crate) struct SharedMasks(AtomicU64);

impl SharedMasks {
    /// Acquire: pairs with [`Self::set`].
    #[inline]
    pub(crate) fn get(&self) -> Masks {
        let [readable, writable, recorded, ..] = self.0.load(Ordering::Acquire).to_le_bytes();
        Masks { readable, writable, recorded }
    }

    /// For whoever has the turn to change the table.
    pub(crate) fn set(&self, masks: Masks) {
        let word = u64::from_le_bytes([masks.readable, masks.writable, masks.recorded, 0, 0, 0, 0, 0]);
        self.0.store(word, Ordering::Release);
    }
}

/// The legs of a set.
pub(crate) fn legs_of(set: u8) -> impl Iterator<Item = usize> {
    (0..MOST_LEGS).filter(move |leg| set >> leg & 1 == 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table() -> impl Strategy<Value = Table> {
        let member = (any::<Id>(), 0..3_usize, any::<u64>()).prop_map(|(id, state, failed_at)| {
            let state = [LegState::Good, LegState::Filling, LegState::Failed][state];
            Member { id, state, failed_at }
        });
        let members = proptest::collection::vec(member, 1..=MOST_LEGS);
        let under_way = (proptest::option::of(1..u64::MAX), any::<bool>());
        (any::<Id>(), any::<u64>(), any::<u64>(), 0..64_u32, "[a-z]{0,64}", members, any::<[u8; 4]>(), under_way).prop_map(
            |(set, event, bytes, region_shift, label, members, form, (growing, formatting))| {
                let form = form.map(|number| u32::from(number >> 6));
                Table { set, event, bytes, region_shift, label, members, form, growing, formatting }
            },
        )
    }

    proptest! {
        #[test]
        fn tables_read_back(table in table(), own in 0..MOST_LEGS) {
            let own = own % table.members.len();
            prop_assert_eq!(Table::decode(&table.encode(own)), Some((table, own)));
        }

        #[test]
        fn any_bytes_are_a_table_or_not(bytes in proptest::collection::vec(any::<u8>(), 0..500)) {
            if let Some((table, own)) = Table::decode(&bytes) {
                prop_assert!(own < table.members.len());
            }
        }

        #[test]
        fn a_cut_table_is_none(table in table(), cut in 0..400_usize) {
            let bytes = table.encode(0);
            if cut < MEMBERS + MEMBER * table.members.len() {
                prop_assert_eq!(Table::decode(&bytes[..cut]), None);
            }
        }
    }
}
