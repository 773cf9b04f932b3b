//! What the operator and the layer ask of it: coming into force, going, status.

use std::{
    sync::{Arc, MutexGuard, PoisonError, atomic::Ordering},
    time::Duration,
};

use millrace_block::{BlockError, BlockSize, TaskContext, Volume as _};
use millrace_cipher::{CipherError, Sealer, Secret, random};

use super::{
    header::Header,
    layout::OFFSET,
    page::{Place, TURNED, Uuid},
    save::Root,
    volume::{Authenticated, Force},
};
use crate::{
    background::{LocalFuture, Stop, Task, own_buffers},
    legs,
    record::Found,
    service::{Health, LegOrigin, Mount, Progress, Reason, Service, ServiceError, Status},
    settings::Settings,
};

/// The volume's key, and the one before.
type Keys = (Secret<64>, Option<Secret<64>>);

/// See [`Authenticated::choose`].
struct Chosen<'a> {
    header: Header,
    content: &'a [u8],
    kek: &'a Secret<32>,
    keys: Keys,
    is_newest: bool,
}

/// How long the background task sleeps before it looks again.
const NAP: Duration = Duration::from_millis(50);

/// What is known beside the path of requests.
#[derive(Debug, Default)]
pub(super) struct Control {
    /// `None` while the service is not in force. It is as it lies on the leg; the tree in memory is newer.
    pub(super) header: Option<Header>,
    /// Of the last copy that is durable.
    pub(super) generation: u64,
    /// One of the header's copies is of before, and is to be replaced: when a change to another key-encryption key is in force, not
    /// earlier.
    uneven: bool,
    /// What was wrong with a copy of the header, and was put right.
    damaged: Option<String>,
    /// Pages that were written and that the root on the leg does not lead to.
    pub(super) unrooted: Vec<Place>,
    /// How many flushes the leg had refused when the first of them was written.
    pub(super) unrooted_failed: u64,
    /// The epoch in whose log is what was in doubt in the one before.
    pub(super) carried: u64,
    /// A root that could not be stored, or was.
    pub(super) unfinished: Option<Root>,
    /// The header when it went out of force last.
    left: Option<Header>,
    /// Why the tree could not be saved.
    failure: Option<String>,
    /// Why re-keying does not go on.
    pub(super) rekey_failure: Option<String>,
}

pub(super) fn cipher_error(error: &CipherError) -> ServiceError {
    ServiceError::NotNow(error.to_string())
}

impl Authenticated {
    pub(super) fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does work that waits for the leg, on a thread that may wait.
    pub(super) fn block_on(
        &self,
        what: &'static str,
        work: impl for<'a> FnOnce(&'a Self, TaskContext<'a>) -> LocalFuture<'a, Result<(), BlockError>> + 'static,
    ) -> Result<(), ServiceError> {
        let volume = self.me.upgrade().ok_or_else(|| ServiceError::NotNow("it is being closed".to_owned()))?;
        let result = legs::block_on(move |cx| Box::pin(async move { work(&volume, cx).await }))?;
        result.map_err(|source| ServiceError::Leg { what, leg: self.leg.name().to_owned(), source })
    }

    fn wrong(&self, what: impl Into<String>) -> ServiceError {
        ServiceError::Content { leg: self.leg.name().to_owned(), what: what.into() }
    }

    fn wrong_key(&self) -> ServiceError {
        let source = &self.settled.key;
        self.wrong(format!(
            "the key from {source} does not open it: it was sealed with another key, or its header was tampered with"
        ))
    }

    /// Brings a key into force, with an empty tree in memory.
    fn enforce(&self, header: Option<&Header>, keys: Option<(Sealer, Option<Sealer>)>) -> Result<(), ServiceError> {
        let (epoch, uuid) = header.map_or((0, Uuid::default()), |header| (header.epoch, header.uuid));
        let turned = if header.is_some_and(|header| header.turned) { TURNED } else { 0 };
        let force = keys.map(|(sealer, old)| Force { sealer: Arc::new(sealer), turned, old: old.map(Arc::new), uuid });
        self.sealer.replace(force).map_err(|error| ServiceError::NotNow(error.to_string()))?.wait();
        self.table.forget_all();
        self.doubts().clear();
        self.given_up().clear();
        self.log.reset(epoch, 0);
        self.rooted.store(epoch, Ordering::SeqCst);
        if let Some(header) = header {
            for (at, record) in header.root.iter().enumerate() {
                self.table.root.set(at, *record);
            }
        }
        self.rekeying.start(header.and_then(Header::rekeyed).unwrap_or(0));
        self.erasing.store(header.is_some_and(|header| header.erasing), Ordering::Relaxed);
        Ok(())
    }

    /// Stores a header in the place of both copies.
    pub(super) fn store_header(&self, header: &Header, sealer: &Sealer) -> Result<(), ServiceError> {
        let mut generation = self.control().generation;
        let stored = header.store(&self.leg, &self.flushes, &mut generation, sealer);
        self.note_store(generation, stored.is_ok());
        stored
    }

    /// A header was stored, up to this generation; or in the place of both copies.
    pub(super) fn note_store(&self, generation: u64, is_done: bool) {
        let mut control = self.control();
        control.generation = generation;
        control.uneven &= !is_done;
    }

    /// Stores a header with a new key and nothing in its tree, and brings it into force. `erasing`: the leg is yet to be erased.
    fn begin(&self, uuid: Uuid, block_size: BlockSize, epoch: u64, erasing: bool) -> Result<(), ServiceError> {
        let (header, sealer) = self.store_new(uuid, block_size, epoch, erasing)?;
        self.enforce(Some(&header), Some((sealer, None)))?;
        self.note_header(header);
        Ok(())
    }

    fn store_new(
        &self,
        uuid: Uuid,
        block_size: BlockSize,
        epoch: u64,
        erasing: bool,
    ) -> Result<(Header, Sealer), ServiceError> {
        let (mut header, key) = Header::create(&self.kek, uuid, block_size).map_err(|error| cipher_error(&error))?;
        (header.epoch, header.erasing) = (epoch, erasing);
        let sealer = Sealer::new(&key).map_err(|error| cipher_error(&error))?;
        self.store_header(&header, &sealer)?;
        Ok((header, sealer))
    }

    /// Prepares a leg that holds nothing, or nothing that is still wanted.
    fn prepare(&self, overwrite: bool) -> Result<(), ServiceError> {
        if !overwrite && !legs::is_zero(&legs::read(&self.leg, 0, OFFSET as usize)?) {
            return Err(self.wrong(
                "it has no header of this mode, and holds something else; erase it first (blkdiscard, or a new file) if that can go",
            ));
        }
        if let Some(anchor) = &self.anchor {
            anchor.expect_none()?;
        }
        let uuid = random().map_err(|error| cipher_error(&error))?;
        if self.leg.usage().allocated > 0 {
            // Blocks that were never written are zeroes: after a power cut nothing else says which these are.
            self.give_back()?;
        }
        let generation = self.control().generation;
        *self.control() = Control { generation, ..Control::default() };
        // What the leg had is gone by now.
        self.begin(uuid, self.block_size(), 0, false).map_err(|error| ServiceError::HalfWay(Box::new(error)))?;
        self.anchor.as_ref().map_or(Ok(()), |anchor| anchor.store(uuid, 0))
    }

    fn note_header(&self, header: Header) {
        let mut control = self.control();
        *control = Control { header: Some(header), generation: control.generation, ..Control::default() };
    }

    /// Puts a header with a new key, which nobody keeps, and nothing in its tree in the place of the one on the leg. It is of the same epoch: the
    /// one that comes behind it is newer.
    pub(super) fn store_new_key(&self, block_size: BlockSize) -> Result<(), ServiceError> {
        let before = self.control().header.as_ref().map(|header| (header.uuid, header.epoch));
        let (uuid, epoch) = before.ok_or_else(|| ServiceError::NotNow("it is not in force".to_owned()))?;
        self.store_new(uuid, block_size, epoch, true).map(drop)
    }

    /// Puts a new key and an empty tree in the place of those in force: what was there is gone. `erasing`: the leg still has it, under a key
    /// that is no more.
    pub(super) fn forget_key(&self, block_size: BlockSize, erasing: bool) -> Result<(), ServiceError> {
        let uuid = self.control().header.as_ref().map(|header| header.uuid);
        let uuid = uuid.ok_or_else(|| ServiceError::NotNow("it is not in force".to_owned()))?;
        // Epochs go on: what was there before must not look newer.
        let epoch = self.log.epoch().0 + 1;
        self.begin(uuid, block_size, epoch, erasing)?;
        if let Some(anchor) = &self.anchor
            && let Err(error) = anchor.store(uuid, epoch)
        {
            // What was there is gone already. The place is told with the next save, which begins with this root.
            let root = self.make_root(epoch, 0);
            let mut control = self.control();
            control.unfinished = Some(root);
            control.failure = Some(error.to_string());
            let (volume, place) = (&self.name, anchor.name());
            tracing::error!(volume, place, %error, "the volume was formatted, and the place for its root is not told yet");
        }
        Ok(())
    }

    /// What was never written is zeroes on the leg, durably.
    pub(super) fn end_erasure(&self) -> Result<(), ServiceError> {
        self.erasing.store(false, Ordering::Relaxed);
        let header = {
            let mut control = self.control();
            let Some(header) = &mut control.header else { return Ok(()) };
            header.erasing = false;
            header.clone()
        };
        let sealer = self.sealer.visit().as_ref().map(|force| Arc::clone(&force.sealer));
        let Some(sealer) = sealer else { return Ok(()) };
        self.store_header(&header, &sealer).inspect_err(|_| {
            // Which of the two the leg has is not known: the next save begins with this one.
            let root = self.make_root(header.epoch, self.rekeying.done());
            self.control().unfinished.get_or_insert(root);
        })
    }

    /// Completes an erasure that was cut off, if nothing was written since. Where it cannot be, blocks that were never written are known by
    /// their records as before.
    fn resume_erasure(&self, mount: &Mount) {
        let (is_wanted, was_in_force) = {
            let control = self.control();
            (control.header.as_ref().is_some_and(Header::is_to_be_erased), control.left.is_some())
        };
        // A change makes the guest wait, and so does the way back from one that failed.
        if !is_wanted || was_in_force || mount.reason == Reason::Change || self.geometry().read_only || self.has_unsaved() {
            return;
        }
        let (volume, leg) = (&self.name, self.leg.name());
        tracing::info!(volume, leg, "a format was cut short: what is left of it is erased");
        if let Err(error) = self.complete_erasure() {
            tracing::warn!(volume, leg, %error, "what was there before a format cannot be erased; it is nobody's all the same");
        }
    }

    /// A format failed, and which header the leg has now is not known: stores the one in force once more. Where that cannot be, no key
    /// is in force any more, so that nobody writes what nobody could read later. Another format helps.
    pub(super) fn keep_header(&self) {
        let (header, unfinished) = {
            let control = self.control();
            (control.header.clone(), control.unfinished.clone())
        };
        let sealer = self.sealer.visit().as_ref().map(|force| Arc::clone(&force.sealer));
        let (Some(mut header), Some(sealer)) = (header, sealer) else { return };
        // The operator's place may know that root already.
        header = unfinished.map_or(header.clone(), |root| root.of(&header));
        if header.block_size != self.leg.geometry().block_size || self.store_header(&header, &sealer).is_err() {
            self.close(header);
        }
    }

    /// The leg failed to take other blocks. One that refuses them has done nothing, or has begun where the header is.
    pub(super) fn keep_if_untouched(&self) {
        let (header, generation) = {
            let control = self.control();
            (control.header.clone(), control.generation)
        };
        let is_there = matches!(Header::load(&self.leg), Ok(Some((_, found))) if found.generation == generation);
        match header.filter(|_| !is_there) {
            Some(header) => self.close(header),
            None => self.keep_header(),
        }
    }

    /// No key is in force any more: the header is not as it was.
    fn close(&self, mut header: Header) {
        // The one that failed may be there, and the next one has another epoch.
        header.epoch = self.log.epoch().0 + 1;
        let closed = self.enforce(Some(&header), None);
        self.note_header(header);
        let (volume, leg) = (&self.name, self.leg.name());
        tracing::error!(volume, leg, ?closed, "a format failed, and its header is not as it was: format the volume again");
    }

    /// The copy of the header that counts, and what opens it: the newest copy under our key-encryption key, or under that of the service
    /// before. The other one has the same keys under ours, if somebody began to exchange it and that did not come into force; that the
    /// newest one is of the same key and time is known by its code.
    fn choose<'a>(
        &'a self,
        previous: Option<&'a Self>,
        newest: &Header,
        found: &'a Found,
    ) -> Result<Chosen<'a>, ServiceError> {
        let open = |header: &Header, kek: &Secret<32>| -> Result<Keys, CipherError> {
            Ok((header.open(kek)?, header.open_old(kek)?))
        };
        let before = |kek: &'a Secret<32>| {
            let content = found.before()?;
            let header = Header::decode(content).ok().filter(|header| header.is_alike(newest))?;
            let keys = open(&header, kek).ok()?;
            let is_ours = newest.is_whole(&Sealer::new(&keys.0).ok()?, &found.content);
            is_ours.then_some(Chosen { header, content, kek, keys, is_newest: false })
        };
        // Within a change: what the service before was in force with counts, not a newest copy that it does not open.
        if let Some(previous) = previous
            && matches!(open(newest, &previous.kek), Err(CipherError::Authentication))
            && let Some(chosen) = before(&previous.kek)
        {
            return Ok(chosen);
        }
        for kek in [Some(&self.kek), previous.map(|previous| &previous.kek)].into_iter().flatten() {
            match open(newest, kek) {
                Ok(keys) => {
                    let header = newest.clone();
                    return Ok(Chosen { header, content: &found.content, kek, keys, is_newest: true });
                }
                Err(CipherError::Authentication) => {}
                Err(error) => return Err(cipher_error(&error)),
            }
        }
        before(&self.kek).ok_or_else(|| self.wrong_key())
    }

    /// What lies there when the stack of a volume in use is changed is what the volume left there, or newer; on the way back from such a
    /// change, too.
    fn check_left(&self, mount: &Mount, header: &Header) -> Result<(), ServiceError> {
        let previous = mount.previous::<Self>().and_then(|previous| previous.control().left.clone());
        let own = self.control().left.clone();
        let is_kept = mount.legs.get(usize::from(self.anchor.is_some())) == Some(&LegOrigin::Kept);
        for left in previous.into_iter().chain(own) {
            if left.uuid != header.uuid {
                if is_kept {
                    return Err(
                        self.wrong("it has another volume than the one that is in use: bring back the leg as it was")
                    );
                }
                continue;
            }
            let (then, now) = (header.epoch, left.epoch);
            if then < now || (then == now && header.root != left.root) {
                return Err(self.wrong(format!(
                    "it was put back, while the volume was in use, to what it was at save {then}, and the volume knows of save {now}: do not \
                     trust it; bring back the leg as it was, or, if you put it back yourself (a backup), delete the volume, which leaves its \
                     files as they are, and create it again"
                )));
            }
        }
        Ok(())
    }

    /// Opens what the leg holds.
    fn open_header(&self, mount: &Mount, newest: &Header, found: &Found) -> Result<(), ServiceError> {
        let (has, wanted) = (newest.block_size.bytes(), self.block_size().bytes());
        if has != wanted {
            return Err(self.wrong(format!("it has blocks of {has} bytes, and the volume of {wanted}")));
        }
        let previous = mount.previous::<Self>();
        let Chosen { header, content, kek, keys, is_newest } = self.choose(previous.as_deref(), newest, found)?;
        let sealer = Sealer::new(&keys.0).map_err(|error| cipher_error(&error))?;
        let old = keys.1.as_ref().map(Sealer::new).transpose().map_err(|error| cipher_error(&error))?;
        if !header.is_whole(&sealer, content) {
            return Err(
                self.wrong("its header was changed by somebody who does not have the key: put back a good copy of the leg")
            );
        }
        self.check_left(mount, &header)?;
        let accepted = self.check_root(mount, &header, content)?;
        let damaged = found.wrong_copy();
        if let Some(damaged) = &damaged {
            tracing::warn!(volume = self.name, leg = self.leg.name(), "{damaged}; the other copy is used");
        }
        // A newest copy that does not count is overwritten first.
        let generation = found.generation - u64::from(!is_newest);
        let left = self.control().left.take();
        *self.control() = Control { generation, damaged, left, ..Control::default() };
        let read_only = self.geometry().read_only;
        // What was found may be what a process that died had written: it is durable before the other copy is overwritten.
        let flushed = if read_only {
            Ok(())
        } else {
            self.block_on("flush", |volume, cx| Box::pin(volume.flushes.flush_alone(cx, &*volume.leg)))
        };
        if let Err(error) = &flushed {
            tracing::warn!(volume = self.name, %error, "what was written last may be lost");
        }
        if !found.is_even()
            && !read_only
            && let Err(error) = flushed.and_then(|()| self.store_header(&header, &sealer))
        {
            tracing::warn!(volume = self.name, %error, "a copy of its header cannot be replaced; it is tried again");
            self.control().uneven = true;
        }
        self.enforce(Some(&header), Some((sealer, old)))?;
        let uuid = header.uuid;
        self.control().header = Some(header);
        self.block_on("recover", |volume, cx| Box::pin(volume.recover(cx)))?;
        self.confirm_root(uuid, accepted)?;
        self.resume_erasure(mount);
        // Last of all: a save replaces both copies.
        if std::ptr::eq(kek, &raw const self.kek) { Ok(()) } else { self.reseal(&keys) }
    }

    /// The key-encryption key was replaced while the volume was in force: seals the keys under the new one, in one copy of the header.
    /// Until the change is in force it may be taken back, and the other copy stays as it is.
    fn reseal(&self, keys: &Keys) -> Result<(), ServiceError> {
        let (header, mut generation) = {
            let control = self.control();
            (control.header.clone(), control.generation)
        };
        let sealer = self.sealer.visit().as_ref().map(|force| Arc::clone(&force.sealer));
        let not_now = || ServiceError::NotNow("it is not in force".to_owned());
        let (mut header, sealer) = header.zip(sealer).ok_or_else(not_now)?;
        header.reseal(&self.kek, &keys.0, keys.1.as_ref()).map_err(|error| cipher_error(&error))?;
        header.store_once(&self.leg, &self.flushes, &mut generation, &sealer)?;
        let mut control = self.control();
        (control.header, control.generation, control.uneven) = (Some(header), generation, true);
        let key = &self.settled.key;
        tracing::info!(volume = self.name, %key, "its key is sealed under another key-encryption key now");
        Ok(())
    }

    /// Whether anything is not in the tree on the leg.
    fn has_unsaved(&self) -> bool {
        self.log.epoch().1 > 0 || self.table.is_dirty() || !self.doubts().is_empty() || self.control().unfinished.is_some()
    }

    /// Saves what is not in the tree on the leg.
    fn save_all(&self) -> Result<(), ServiceError> {
        // A change to another key-encryption key that is not in force can be taken back as long as nothing is saved, and the log has all.
        let stays = self.control().uneven;
        if stays || self.geometry().read_only || !self.has_unsaved() {
            return Ok(());
        }
        self.block_on("save tags to", |volume, cx| {
            Box::pin(async move {
                let epoch = volume.log.epoch().0;
                volume.save(cx, epoch).await
            })
        })
    }

    /// The background task.
    async fn run(&self, cx: TaskContext<'_>, stop: Stop) {
        // While it saves, writers wait for it, and they may have all of the shard's buffers.
        let own = match own_buffers() {
            Ok(own) => own,
            Err(error) => {
                tracing::error!(volume = self.name, %error, "no memory to save tags with");
                return;
            }
        };
        let mut cx = cx;
        cx.buffers = &own;
        let mut rest = self.settled.save_after;
        while !stop.is_set() {
            // A save replaces the copy of the header that is of before: an exchanged key-encryption key opens nothing any more.
            let is_uneven = self.control().uneven;
            if is_uneven || rest.is_zero() || self.log.is_half_full() {
                rest = self.settled.save_after;
                let (epoch, pages) = self.log.epoch();
                let is_unfinished = self.control().unfinished.is_some();
                if is_uneven || is_unfinished || pages > 0 {
                    let result = self.save(cx, epoch).await.err().map(|error| error.to_string());
                    let before = std::mem::replace(&mut self.control().failure, result.clone());
                    if let Some(error) = result.filter(|error| before.as_ref() != Some(error)) {
                        let (volume, leg) = (&self.name, self.leg.name());
                        tracing::error!(volume, leg, error, "tags cannot be saved; it is tried again");
                    }
                }
            }
            let nap = rest.min(NAP);
            stop.sleep(cx, nap).await;
            rest = rest.saturating_sub(nap);
        }
    }
}

impl Service for Authenticated {
    fn mount(&self, mount: &Mount) -> Result<(), ServiceError> {
        if let Some(previous) = mount.previous::<Self>() {
            self.flushes.take_over(&previous.flushes);
        }
        // The root's place comes before the leg.
        let is_new = mount.is_new_leg(usize::from(self.anchor.is_some()));
        if let Some((header, found)) = Header::load(&self.leg)? {
            if is_new && mount.reformat {
                // What the old header says counts no more.
                self.control().generation = found.generation;
                return self.prepare(true);
            }
            return self.open_header(mount, &header, &found);
        }
        let is_other = !matches!(super::super::header::REGION.load(&self.leg), Ok(None));
        match mount.reason {
            _ if is_other && mount.reason != Reason::Change => {
                Err(self.wrong("it holds a volume of the mode xts: leave out mode=authenticated, or erase it first"))
            }
            Reason::Create => self.prepare(false),
            _ if is_new => self.prepare(true),
            _ => Err(self.wrong(
                "it has no crypt header of this mode: it is not what the volume was made on, or was erased (if a format was cut \
                 short, create the volume again)",
            )),
        }
    }

    fn has_erasure(&self) -> bool {
        matches!(Header::load(&self.leg), Ok(Some((header, _))) if header.is_to_be_erased())
    }

    fn settle(&self) {
        if let Err(error) = self.save_all() {
            tracing::warn!(volume = self.name, %error, "tags could not be saved yet; it is tried once more");
        }
    }

    fn unmount(&self) -> Result<(), ServiceError> {
        let saved = self.save_all();
        let is_in_force = self.sealer.visit().is_some();
        let mut control = self.control();
        if let Some(header) = control.header.take().filter(|_| is_in_force) {
            // Nothing older is taken when it comes back.
            control.left = Some(header);
        }
        drop(control);
        // What is in memory is forgotten when it comes into force again, or goes: both take time with its size.
        self.sealer.replace(None).map_err(|error| ServiceError::NotNow(error.to_string()))?.wait();
        saved
    }

    fn leave(&self) -> Result<(), ServiceError> {
        // Its leg never shows the data: the layer knows by the layout.
        Ok(())
    }

    fn has_untold(&self) -> bool {
        self.flushes.is_untold()
    }

    fn leg_is_whole(&self, _: usize) -> bool {
        false
    }

    fn status(&self) -> Status {
        let mismatches = self.mismatches.load(Ordering::Relaxed);
        let pages = self.pages_lost.load(Ordering::Relaxed);
        let control = self.control();
        let cipher = if self.settled.discard { "AES-256-GCM-SIV" } else { "AES-256-GCM-SIV, zeroes hidden" };
        let mut status = Status::good([
            ("cipher", cipher.to_owned()),
            ("key", self.settled.key.to_string()),
            ("reads that found a block changed", mismatches.to_string()),
            ("pages of tags that were changed", pages.to_string()),
        ]);
        if let Some(header) = &control.header {
            status.facts.push(("uuid".to_owned(), format!("{:032x}", u128::from_be_bytes(header.uuid))));
        }
        if let Some(anchor) = &self.anchor {
            let epoch = anchor.known().map_or_else(|| "none".to_owned(), |known| known.epoch.to_string());
            status.facts.push(("root also at".to_owned(), format!("{}, save {epoch}", anchor.name())));
        }
        if let Some(damaged) = &control.damaged {
            status.facts.push(("header repaired".to_owned(), damaged.clone()));
        }
        if let Some(failure) = &control.failure {
            status.facts.push(("tags cannot be saved".to_owned(), failure.clone()));
        }
        let doubts = self.doubts().len();
        if doubts > 0 {
            status.facts.push(("blocks whose writes failed, and that were not read since".to_owned(), doubts.to_string()));
        }
        if control.header.as_ref().is_some_and(|header| header.erasing) {
            let what = "what was there before it cannot be read, and is not erased everywhere: format the volume again";
            status.facts.push(("last format".to_owned(), what.to_owned()));
        }
        if let Some(failure) = &control.rekey_failure {
            status.facts.push(("re-keying".to_owned(), failure.clone()));
        }
        if self.is_rekeying() {
            let total = self.geometry().blocks.0;
            let done = self.rekeying.done().min(total);
            status.progress.push(Progress { what: "re-keying".to_owned(), done, total });
        }
        if mismatches > 0 || pages > 0 || control.failure.is_some() || control.rekey_failure.is_some() {
            status.health = Health::Degraded;
        }
        if self.sealer.visit().is_none() {
            let what = match &control.header {
                Some(_) => "a format failed half way: format the volume again",
                None => "it did not come into force: change the volume, or open it again",
            };
            status.facts.push(("no key".to_owned(), what.to_owned()));
            status.health = Health::Failed;
        }
        status
    }

    fn command(&self, command: &str, _: &Settings) -> Result<String, ServiceError> {
        match command {
            "rekey" => self.begin_rekeying(),
            _ => Err(ServiceError::no_command(&super::super::KIND, command)),
        }
    }

    fn tasks(self: Arc<Self>) -> Vec<Task> {
        let volume = Arc::clone(&self);
        vec![
            Task::new("tags", move |cx, stop| Box::pin(async move { self.run(cx, stop).await })),
            Task::new("re-keying", move |cx, stop| Box::pin(async move { volume.run_rekeying(cx, stop).await })),
        ]
    }
}
