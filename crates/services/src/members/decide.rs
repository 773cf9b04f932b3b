//! Coming into force: what the legs hold, and what follows from it.

use std::{
    collections::BTreeSet,
    sync::{PoisonError, atomic::Ordering},
};

use millrace_block::{BlockCount, BlockSize, Volume};

use super::{
    Members, OnLegs, Rules,
    grow::Placed,
    intent::{BYTES, Intent, Page, least_shift, page_from},
    state::{Id, LegState, Member, Table, legs_of},
};
use crate::{
    legs::Leg,
    service::{LegOrigin, Mount, Reason, ServiceError},
};

/// The bitmap of who knows nothing.
const ALL: Page = [u64::MAX; BYTES / 8];

/// What a leg holds.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub(crate) name: String,
    pub(crate) origin: LegOrigin,
    /// The table there and the leg's own number in it; what is wrong if it cannot be read.
    pub(crate) record: Result<Option<(Table, usize)>, String>,
    /// Nothing was ever written there: it reads as zeroes.
    pub(crate) blank: bool,
    /// Its block size.
    pub(crate) block_size: BlockSize,
}

/// What follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    pub(crate) table: Table,
    /// The newest table that was found.
    pub(crate) last: Table,
    /// Legs in use that have an older one.
    pub(crate) behind: u8,
    /// All of the volume may differ between the legs.
    pub(crate) all_stale: bool,
    /// What the operator should know.
    pub(crate) notes: Vec<String>,
}

/// What is known of the service itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) bytes: u64,
    pub(crate) region_shift: u32,
    pub(crate) label: &'a str,
    pub(crate) reason: Reason,
    pub(crate) rules: Rules,
    pub(crate) shape: Shape,
}

/// What the service's blocks are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) block_size: BlockSize,
    /// The legs may say so many bytes more: the volume was formatted to larger blocks, its size was stored, and then the power went.
    pub(crate) more: u64,
}

impl Wanted<'_> {
    /// Whether it is what the legs say, but for what a format left out.
    fn is_rest_of(&self, table: &Table) -> bool {
        table.bytes.checked_sub(self.bytes).is_some_and(|more| (1..=self.shape.more).contains(&more))
    }
}

fn wrong(leg: &Found, what: impl Into<String>) -> ServiceError {
    ServiceError::Content { leg: leg.name.clone(), what: what.into() }
}

/// Decides what the legs are. `fresh` makes new identifiers.
pub(crate) fn decide(found: &[Found], wanted: Wanted<'_>, fresh: &mut dyn FnMut() -> Id) -> Result<Decision, ServiceError> {
    let service = wanted.rules.service;
    if wanted.reason == Reason::Create {
        check_blocks(found, wanted)?;
    }
    let of_set = |leg: &&Found| leg.origin == LegOrigin::Kept && matches!(leg.record, Ok(Some(_)));
    let whole = found.iter().position(|leg| leg.origin == LegOrigin::Data && !wanted.rules.placed);
    if whole.is_some() || !found.iter().any(|leg| of_set(&leg)) {
        return begin(found, wanted, whole, fresh);
    }
    let tables = || found.iter().filter(of_set).filter_map(|leg| Some((leg, leg.record.as_ref().ok()?.as_ref()?)));
    // Of two that say the same event, one that was to be taken in, and refused that, knows less, and so does one whose record could not be read
    // once: the others gave it another name.
    let is_good = |table: &Table, own: usize| table.members.get(own).is_some_and(|own| own.state == LegState::Good);
    let known_by = |table: &Table, own: usize| {
        let id = table.members.get(own).map(|own| own.id);
        tables().filter(|(_, (table, _))| table.members.iter().any(|member| Some(member.id) == id)).count()
    };
    let age = |(_, (table, own)): &(_, &(Table, usize))| (table.event, is_good(table, *own), known_by(table, *own));
    let Some((_, (newest, _))) = tables().max_by_key(age) else {
        return begin(found, wanted, whole, fresh);
    };
    for (leg, (table, own)) in tables() {
        if table.set != newest.set {
            return Err(wrong(
                leg,
                format!(
                    "it belongs to a {service} of volume {:?}, and other legs to one of {:?}",
                    table.label, newest.label
                ),
            ));
        }
        check_together(leg, table, *own, newest)?;
    }
    if newest.bytes != wanted.bytes && newest.growing != Some(wanted.bytes) && !wanted.is_rest_of(newest) {
        let what = format!("it is of a {service} of {} bytes, and this one has {}", newest.bytes, wanted.bytes);
        return Err(tables().next().map_or_else(|| ServiceError::Legs(what.clone()), |(leg, _)| wrong(leg, what.clone())));
    }
    if newest.region_shift < least_shift(wanted.bytes) {
        let what = format!("its table has regions of 2^{} bytes, too small for {}", newest.region_shift, wanted.bytes);
        return Err(tables().next().map_or_else(|| ServiceError::Legs(what.clone()), |(leg, _)| wrong(leg, what.clone())));
    }
    if wanted.rules.placed {
        check_places(found, newest, wanted.rules)?;
    }
    go_on(found, newest, wanted, fresh)
}

/// Fails when a leg has other blocks than the volume.
fn check_blocks(found: &[Found], wanted: Wanted<'_>) -> Result<(), ServiceError> {
    let volume = wanted.shape.block_size;
    found.iter().find(|leg| leg.block_size != volume).map_or(Ok(()), |leg| {
        let (has, volume) = (leg.block_size.bytes(), volume.bytes());
        Err(wrong(leg, format!("it has blocks of {has} bytes and the volume of {volume}: they must be alike")))
    })
}

/// Fails when the leg and the newest table's legs were each used without the other.
fn check_together(leg: &Found, table: &Table, own: usize, newest: &Table) -> Result<(), ServiceError> {
    let own = table.members.get(own);
    let is = |state| own.is_some_and(|member| member.state == state);
    // Its record could not be read once, and the others went on with another name for it.
    let is_unknown = newest.members.iter().all(|member| own.is_none_or(|own| own.id != member.id));
    let failed = newest.members.iter().find(|member| own.is_some_and(|own| own.id == member.id));
    let failed = failed.filter(|member| member.state == LegState::Failed);
    let at_unknown = failed.is_some_and(|member| member.failed_at == Member::UNKNOWN_EVENT);
    // One that is not good by itself, as after a rebuild that it refused, cannot have gone on.
    let went_on = is(LegState::Good)
        && if is_unknown {
            !knows_one_of(table, newest)
        } else if at_unknown {
            table.event >= newest.event || !knows_one_of(table, newest)
        } else {
            failed.is_some_and(|member| table.event >= member.failed_at)
        };
    let was_to_be_filled = at_unknown && is(LegState::Filling);
    let differs = table.event == newest.event && table.members != newest.members && !was_to_be_filled && !is_unknown;
    if went_on || differs {
        return Err(wrong(
            leg,
            "it and another leg were used apart from each other, and both have changed: leave out the one that you do not \
             trust, and then add it as a new one",
        ));
    }
    Ok(())
}

/// Whether one of those that are good is not failed by what this table says. A leg that goes on by itself first says that the others failed.
fn knows_one_of(table: &Table, newest: &Table) -> bool {
    let is_in_use = |id| table.members.iter().any(|member| member.id == id && member.state != LegState::Failed);
    newest.members.iter().any(|good| good.state == LegState::Good && is_in_use(good.id))
}

/// What to say where the legs were written with other settings than those that are given: as they stood in the stack.
fn other_settings(then: [u32; 4], rules: Rules) -> String {
    let all = rules.form_settings.iter().zip(then).zip(rules.form);
    let other: Vec<_> = all.filter(|((_, then), now)| then != now).map(|((name, then), _)| (*name, then)).collect();
    if other.iter().any(|(name, _)| name.is_empty()) {
        return format!("the data lie on the legs in a way that this program does not know ({then:?}, see docs/formats)");
    }
    let setting = |(name, then): (&str, u32)| {
        let (shift, unit) = match then.trailing_zeros() {
            20..=31 => (20, "M"),
            10..=19 => (10, "K"),
            _ => (0, ""),
        };
        format!("{name}={}{unit}", then >> shift)
    };
    let other: Vec<_> = other.into_iter().map(setting).collect();
    format!("the legs were written with other settings: {}; write these in the stack", other.join(", "))
}

/// Fails when legs are not where they belong, or the data lie in another way on them.
fn check_places(found: &[Found], newest: &Table, rules: Rules) -> Result<(), ServiceError> {
    let (had, has) = (newest.members.len(), found.len());
    if had != has {
        return Err(ServiceError::Legs(format!("its legs are {had}, and {has} are given: give all, in their order")));
    }
    if newest.form != rules.form {
        return Err(ServiceError::Legs(other_settings(newest.form, rules)));
    }
    for (at, leg) in found.iter().enumerate() {
        let Ok(Some((table, own))) = &leg.record else { continue };
        let id = table.members.get(*own).map(|member| member.id);
        let belongs = newest.members.iter().position(|member| Some(member.id) == id);
        if let Some(place) = belongs.filter(|place| table.set == newest.set && *place != at) {
            return Err(wrong(
                leg,
                format!("it is leg {place} and stands in the place of leg {at}: give the legs in their order"),
            ));
        }
    }
    Ok(())
}

/// A set of legs that did not exist.
fn begin(
    found: &[Found],
    wanted: Wanted<'_>,
    whole: Option<usize>,
    fresh: &mut dyn FnMut() -> Id,
) -> Result<Decision, ServiceError> {
    check_blocks(found, wanted)?;
    for leg in found {
        match &leg.record {
            Ok(Some((table, _))) if table.label != wanted.label => {
                return Err(wrong(leg, format!("it is a leg of a {} of volume {:?}", wanted.rules.service, table.label)));
            }
            Err(what) if leg.origin != LegOrigin::New => return Err(wrong(leg, what.clone())),
            _ if wanted.reason == Reason::Open => {
                let what = format!("it holds no {}, and nor do the others: is it the right one?", wanted.rules.service);
                return Err(wrong(leg, what));
            }
            _ => {}
        }
    }
    let equal = whole.is_none() && found.iter().all(|leg| leg.blank);
    let good = whole.unwrap_or(0);
    let good = |at| equal || at == good || wanted.rules.placed;
    let state = |at| if good(at) { LegState::Good } else { LegState::Filling };
    let members: Vec<_> = (0..found.len()).map(|at| Member { id: fresh(), state: state(at), failed_at: 0 }).collect();
    let filling = members.iter().any(|member| member.state == LegState::Filling);
    let all_stale = filling || (wanted.rules.placed && !equal);
    let Wanted { bytes, region_shift, label, .. } = wanted;
    let table = Table {
        set: fresh(),
        event: 0,
        bytes,
        region_shift,
        label: label.to_owned(),
        members,
        form: wanted.rules.form,
        growing: None,
        formatting: false,
    };
    Ok(Decision { last: table.clone(), table, behind: 0, all_stale, notes: Vec::new() })
}

/// The member of the newest table that a leg is, and what the leg says. `seen` are the legs before it.
fn member_of<'a>(
    leg: &'a Found,
    newest: &'a Table,
    wanted: Wanted<'_>,
    seen: &mut BTreeSet<Id>,
) -> Result<Option<(&'a Member, &'a Table)>, ServiceError> {
    let Ok(Some((table, own))) = &leg.record else { return Ok(None) };
    if table.set != newest.set {
        if table.label != wanted.label {
            let what = format!("it is a leg of a {} of volume {:?}", wanted.rules.service, table.label);
            return Err(wrong(leg, what));
        }
        return Ok(None);
    }
    let id = table.members.get(*own).map_or([0; 16], |member| member.id);
    if !seen.insert(id) {
        return Err(wrong(leg, "it is a copy of another leg, or the same one twice"));
    }
    Ok(newest.members.iter().find(|member| member.id == id).map(|member| (member, table)))
}

/// Why a leg that was there is not known.
fn why_unknown(leg: &Found, wanted: Wanted<'_>) -> String {
    match leg.record {
        Ok(None) => format!("it holds no {}: it was replaced, and is filled", wanted.rules.service),
        _ => "the others do not know it, as after a change that failed: it is filled".to_owned(),
    }
}

/// A set of legs that was there.
fn go_on(
    found: &[Found],
    newest: &Table,
    wanted: Wanted<'_>,
    fresh: &mut dyn FnMut() -> Id,
) -> Result<Decision, ServiceError> {
    let (mut members, mut behind, mut all_stale, mut notes) = (Vec::new(), 0, false, Vec::new());
    let mut seen = BTreeSet::new();
    let own_id = |leg: &Found| leg.record.as_ref().ok()?.as_ref().and_then(|(table, own)| Some(table.members.get(*own)?.id));
    let is_there = |id: Id| found.iter().any(|leg| own_id(leg) == Some(id));
    for (at, leg) in found.iter().enumerate() {
        let known = member_of(leg, newest, wanted, &mut seen)?;
        let mut note = |what: String| notes.push(format!("leg {at} ({}): {what}", leg.name));
        let added_again = wanted.reason == Reason::Change && leg.origin == LegOrigin::New;
        let failed = |id| Member { id, state: LegState::Failed, failed_at: newest.event + 1 };
        let mut fill_all = || {
            all_stale = true;
            Member { id: fresh(), state: LegState::Filling, failed_at: 0 }
        };
        let member = match (&leg.record, known) {
            _ if leg.block_size != wanted.shape.block_size && !newest.formatting => {
                let (has, volume) = (leg.block_size.bytes(), wanted.shape.block_size.bytes());
                note(format!(
                    "it has blocks of {has} bytes and the volume of {volume}, which was formatted without it; it is out of use until \
                     \"rebuild\" formats and fills it, or \"volume replace\" puts another one in its place"
                ));
                let is_known = known.filter(|(member, _)| member.state == LegState::Failed);
                is_known
                    .map_or_else(|| failed(known.map_or_else(&mut *fresh, |(member, _)| member.id)), |(member, _)| *member)
            }
            (Err(what), _) => {
                note(format!("{what}; it is out of use"));
                // One that was out of use already, and stands where it stood, is the same one.
                let was = newest.members.get(at).filter(|member| member.state == LegState::Failed && !is_there(member.id));
                let was = was.filter(|_| wanted.reason == Reason::Open);
                was.copied().unwrap_or_else(|| failed(fresh()))
            }
            (Ok(None), _) | (_, None) => {
                if leg.origin == LegOrigin::Kept && !newest.formatting {
                    note(why_unknown(leg, wanted));
                }
                fill_all()
            }
            // A copy of one that was there, as a migration leaves it that did not end, or a while ago. Of one that was being filled the marks may
            // be gone of what only the original got.
            (_, Some((member, _))) if added_again && member.state != LegState::Failed && !newest.formatting => fill_all(),
            (Ok(Some((_, own))), Some((member, table))) if member.state == LegState::Failed => match added_again {
                false => *member,
                true if member.lacks_marked_only(table, *own) => member.filling(),
                true => fill_all(),
            },
            // One behind: the power went while the table was being stored. Before a format is done it makes no difference.
            (_, Some((member, table))) if table.event + 1 >= newest.event || newest.formatting => *member,
            (_, Some((_, table))) => {
                note(format!("it is {} events behind and is filled again", newest.event - table.event));
                fill_all()
            }
        };
        let is_late = known.is_some_and(|(known, table)| known.id == member.id && table.event < newest.event);
        behind |= u8::from(is_late && member.state != LegState::Failed) << at;
        let is_erased = newest.formatting && member.state != LegState::Failed;
        members.push(if is_erased { Member { state: LegState::Good, ..member } } else { member });
    }
    are_enough(&members, wanted.rules.least, &notes)?;
    let bytes = if wanted.is_rest_of(newest) { wanted.bytes } else { newest.bytes };
    // Who asks for the size before gives the growth up.
    let table = Table { bytes, members, growing: newest.growing.filter(|to| *to == wanted.bytes), ..newest.clone() };
    Ok(Decision { table, last: newest.clone(), behind, all_stale, notes })
}

/// What follows for legs that come back to the one which had this table, when nothing but tables was written there meanwhile. `None`: the legs
/// say something that it cannot know, and [`decide`] it.
fn come_back(own: &Table, found: &[Found]) -> Option<Decision> {
    let is_in_use = |id| own.members.iter().any(|member| member.id == id && member.state != LegState::Failed);
    let lacks_one =
        |said: &Table| said.members.iter().any(|member| member.state == LegState::Failed && is_in_use(member.id));
    if own.members.len() != found.len() {
        return None;
    }
    let (mut newest, mut behind) = (own.event, 0);
    for (at, (member, leg)) in own.members.iter().zip(found).enumerate() {
        let record = leg.record.as_ref().ok().and_then(Option::as_ref);
        let said = record.filter(|(table, _)| table.set == own.set);
        newest = newest.max(said.map_or(0, |(table, _)| table.event));
        if member.state == LegState::Failed {
            continue;
        }
        let (table, place) = said?;
        let is_it = table.members.get(*place).is_some_and(|said| said.id == member.id);
        if !is_it || lacks_one(table) {
            return None;
        }
        behind |= 1 << at;
    }
    // Newer than what was said meanwhile. Those in use get this event before the next: two events behind, as those are that the other knew
    // nothing of, a leg would be filled if the power went.
    let table = Table { event: newest.checked_add(1)?, ..own.clone() };
    Some(Decision { last: table.clone(), table, behind, all_stale: false, notes: Vec::new() })
}

/// Whether as many members as are needed are good.
fn are_enough(members: &[Member], least: usize, notes: &[String]) -> Result<(), ServiceError> {
    let good = members.iter().filter(|member| member.state == LegState::Good).count();
    let what = match least {
        least if good >= least => return Ok(()),
        1 => "no leg has all data".to_owned(),
        least => format!("{good} legs are good, and {least} are needed"),
    };
    Err(ServiceError::Legs(format!("{what}: {}", notes.join("; "))))
}

fn fresh_id() -> Id {
    *uuid::Uuid::new_v4().as_bytes()
}

impl Members {
    /// Lengthens legs that have the data only.
    fn make_room(&self, mount: &Mount) -> Result<(), ServiceError> {
        let needed = self.rules.leg_bytes(self.bytes());
        for leg in &self.legs {
            let geometry = leg.geometry();
            if geometry.bytes() >= needed {
                continue;
            }
            if mount.reason == Reason::Open {
                return Err(ServiceError::Legs(format!(
                    "leg {} has {} bytes; {needed} are needed",
                    leg.name(),
                    geometry.bytes()
                )));
            }
            leg.resize(BlockCount(needed >> geometry.block_size.shift()))?;
        }
        Ok(())
    }

    /// Looks what the legs hold. One of a newer program's is refused, and not done without: that program may have gone on by it alone.
    fn look(&self, mount: &Mount) -> Result<(Vec<Found>, Vec<Option<u64>>), ServiceError> {
        let mut damages = vec![None; self.legs.len()];
        let mut one = |(at, leg): (usize, &Leg)| {
            let origin = mount.legs.get(at).copied().unwrap_or(LegOrigin::New);
            let found = self.find(leg).map(|Placed { area, record }| {
                // A new one is told everything at its end.
                let area = if origin == LegOrigin::Kept { area } else { self.rules.area_of(&**leg) };
                self.areas[at].store(area, Ordering::Relaxed);
                record
            });
            let (record, generation) = match found {
                Ok(None) => (Ok(None), None),
                Ok(Some(record)) => {
                    if let Some(damaged) = &record.damaged {
                        tracing::warn!(name = self.name, leg = leg.name(), damaged, "the other copy is used");
                        damages[at] = Some(damaged.clone());
                    }
                    let table = Table::decode(&record.content).map(Some);
                    (table.ok_or_else(|| "its table makes no sense".to_owned()), Some(record.generation))
                }
                Err(error @ ServiceError::Newer { .. }) if origin == LegOrigin::Kept => return Err(error),
                Err(ServiceError::Content { what, .. }) => (Err(what), None),
                Err(error) => (Err(error.to_string()), None),
            };
            let block_size = leg.geometry().block_size;
            let found = Found { name: leg.name().to_owned(), origin, record, blank: leg.usage().allocated == 0, block_size };
            Ok((found, generation))
        };
        let found: Result<Vec<_>, _> = self.legs.iter().enumerate().map(&mut one).collect();
        let found = found?.into_iter().unzip();
        *self.damaged.lock().unwrap_or_else(PoisonError::into_inner) = damages;
        Ok(found)
    }

    /// The union of the bitmaps of these legs, the newest store's number, and whether one is undamaged: else all is taken for set.
    fn load_pages(&self, which: u8) -> (Page, u64, bool) {
        let (mut union, mut newest, mut sure) = ([0; BYTES / 8], 0, false);
        for leg in legs_of(which) {
            let Ok(Some(record)) = self.page_region(leg).load(&self.legs[leg]) else { continue };
            newest = newest.max(record.generation);
            // A damaged copy may be a newer one that was never finished, and may be one that rotted.
            sure |= record.damaged.is_none();
            let page = page_from(&record.content);
            union.iter_mut().zip(page).for_each(|(union, word)| *union |= word);
        }
        (if sure { union } else { ALL }, newest, sure)
    }

    /// Where legs in use may not be alike, by what those say that are being filled and know of no later store than `newest`, that of the legs which
    /// have everything: beyond that, marks are for the sake of legs that are out. Everywhere, if nobody is being filled, or one says nothing
    /// sure.
    fn within(&self, found: &[Found], table: &Table, last: &Table, newest: u64) -> Page {
        let is_as_before = |leg: usize| {
            let id = table.members.get(leg).map(|member| member.id);
            let said = found.get(leg).and_then(|found| found.record.as_ref().ok()?.as_ref());
            let is_it =
                |(said, own): &(Table, usize)| said.set == table.set && said.members.get(*own).map(|member| member.id) == id;
            let was_filled = |member: &Member| Some(member.id) == id && member.state == LegState::Filling;
            said.is_some_and(is_it) && last.members.iter().any(was_filled)
        };
        let filling = table.masks().filling();
        let mut union = if filling == 0 { ALL } else { [0; BYTES / 8] };
        for leg in legs_of(filling) {
            let record = self.page_region(leg).load(&self.legs[leg]).ok().flatten();
            // One with an older store was out of use when the others had theirs.
            let record =
                record.filter(|record| is_as_before(leg) && record.damaged.is_none() && record.generation >= newest);
            let page = record.map_or(ALL, |record| page_from(&record.content));
            union.iter_mut().zip(page).for_each(|(union, word)| *union |= word);
        }
        union
    }

    /// Has gone out of force, and how.
    pub(crate) fn went(&self, how: Result<(), ServiceError>) -> Result<(), ServiceError> {
        if let Some(on_legs) = &mut *self.on_legs() {
            on_legs.went_in_order = how.is_ok() && self.masks().readable != 0;
        }
        how
    }

    /// Is about to come into force again, after a change that failed. What the legs say by now is what the one said that took its place for a
    /// while: a leg which that one did without is unknown there, and as good as before if nothing was written.
    pub(crate) fn come_back(&self, instead: Option<&Self>) {
        let is_untouched = instead.is_some_and(|instead| instead.intent().is_none_or(Intent::is_untouched));
        if let Some(on_legs) = &mut *self.on_legs() {
            on_legs.still_holds = is_untouched && on_legs.went_in_order;
        }
    }

    /// What was known when this was in force last, with its bitmap, if it still holds.
    fn known_before(&self, found: &[Found]) -> Option<(Decision, Page)> {
        let mut on_legs = self.on_legs();
        let on_legs = on_legs.as_mut()?;
        let table = &on_legs.table;
        let is_sure = std::mem::take(&mut on_legs.still_holds)
            && table.bytes == self.bytes()
            && table.growing.is_none()
            && !table.formatting
            // What these have lost is found by their marks, if at all.
            && (self.refused() | self.unflushed.legs()) == 0
            && !self.admitting.load(Ordering::Acquire);
        let page = self.intent()?.page();
        is_sure.then(|| come_back(table, found)).flatten().map(|decision| (decision, page))
    }

    /// Comes into force.
    pub(crate) fn take_up(&self, mount: &Mount, shape: Shape) -> Result<(), ServiceError> {
        self.make_room(mount)?;
        let (found, generations) = self.look(mount)?;
        let wanted = Wanted {
            bytes: self.bytes(),
            region_shift: self.region_shift,
            label: &self.label,
            reason: mount.reason,
            rules: self.rules,
            shape,
        };
        let (known_before, page_before) = self.known_before(&found).unzip();
        let decided = known_before.map_or_else(|| decide(&found, wanted, &mut fresh_id), Ok)?;
        let Decision { table, last, behind, all_stale, notes } = decided;
        for note in notes {
            tracing::warn!(name = self.name, "{note}");
        }
        let masks = table.masks();
        let known = found.iter().any(|leg| matches!(&leg.record, Ok(Some((found, _))) if found.set == table.set));
        let (page, page_generation, is_sure) =
            if known { self.load_pages(masks.readable) } else { ([0; BYTES / 8], 0, false) };
        let is_as_found = is_sure && !all_stale && page_before.is_none();
        let within = if is_as_found { self.within(&found, &table, &last, page_generation) } else { ALL };
        let page = if all_stale { ALL } else { page_before.unwrap_or(page) };
        let others = self.load_pages(masks.writable).1;
        let intent = self.intent.get_or_init(|| Intent::new(self.bytes(), table.region_shift));
        if intent.shift() != table.region_shift {
            return Err(ServiceError::NotNow(
                "what is on its legs was made anew meanwhile: open the volume again".to_owned(),
            ));
        }
        intent.cover(self.bytes());
        intent.start_within(&page, &within);
        self.note_growth(&table);
        let formatting = table.formatting;
        let generation = generations.into_iter().flatten().max().unwrap_or(0);
        *self.on_legs() = Some(OnLegs::new(table, last, behind, generation, page_generation.max(others)));
        // What was refused before is on the legs, or was lost and counted.
        self.refused.forget(u8::MAX);
        self.store_all(mount.reason == Reason::Open)?;
        if formatting {
            self.format_again(shape.block_size)?;
        }
        if masks.writable.count_ones() > 1 {
            intent.suspect_marked();
        }
        self.resync_total.store(intent.stale(), Ordering::Relaxed);
        Ok(())
    }
}
