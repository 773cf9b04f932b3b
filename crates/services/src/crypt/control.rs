//! What the operator and the layer ask of it: coming into force, going, status, commands.

use std::{
    sync::{Arc, MutexGuard, PoisonError, atomic::Ordering},
    time::{Duration, Instant},
};

use millrace_block::{BlockCount, BlockError, BlockSize, IoOperation, TaskContext, Volume, VolumeError, yield_now};
use millrace_cipher::{CipherError, KeyError, Secret, Xts, random};

use super::{
    KIND,
    header::{Header, OFFSET},
    keys::{Failed, Keys, Next},
    rekey,
    volume::Crypt,
};
use crate::{
    background::{Stop, Task, own_buffers},
    legs,
    record::Found,
    service::{Health, Mount, Progress, Reason, Service, ServiceError, Status},
    settings::Settings,
};

/// How long the task that re-keys sleeps while there is nothing to do.
const IDLE: Duration = Duration::from_millis(100);
/// How long a format waits for a chunk's re-keying.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is known of the header. It is short and used beside the path of requests only.
#[derive(Debug, Default)]
pub(super) struct Control {
    /// `None` while the service is not in force.
    pub(super) header: Option<Header>,
    /// Of the last copy that is durable.
    generation: u64,
    /// What was wrong with a copy of the header, and was put right.
    damaged: Option<String>,
    /// Why re-keying does not go on.
    pub(super) failure: Option<String>,
    /// A header that ends the re-keying may be on the leg.
    pub(super) ending: bool,
    /// One of the header's copies is of before, and is to be replaced: when a change to another key-encryption key is in force, not
    /// earlier.
    uneven: bool,
}

/// Whoever has it may change header and keys.
pub(super) struct Claim<'a>(&'a Crypt);

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // Release: pairs with the acquire of who claims it next.
        self.0.busy.store(false, Ordering::Release);
    }
}

fn busy() -> ServiceError {
    ServiceError::NotNow("its keys are being worked on: try again".to_owned())
}

pub(super) fn key_error(error: &KeyError) -> ServiceError {
    ServiceError::NotNow(error.to_string())
}

fn cipher_error(error: &CipherError) -> ServiceError {
    ServiceError::NotNow(error.to_string())
}

fn make(key: Secret<64>) -> Result<Arc<Xts>, ServiceError> {
    Xts::new(key).map(Arc::new).map_err(|error| cipher_error(&error))
}

impl Crypt {
    pub(super) fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims header and keys, if nobody has.
    pub(super) fn try_claim(&self) -> Option<Claim<'_>> {
        (!self.busy.swap(true, Ordering::Acquire)).then(|| Claim(self))
    }

    /// Claims header and keys; waits for a chunk's re-keying. Not to be called on a shard.
    fn claim(&self) -> Result<Claim<'_>, ServiceError> {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.try_claim() {
                Some(claim) => return Ok(claim),
                None if Instant::now() > end => return Err(busy()),
                None => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    }

    /// Claims header and keys while the volume gets another size; refused when what it grew by would have no key that lasts.
    pub(super) fn claim_for_size(&self, blocks: BlockCount) -> Result<Claim<'_>, VolumeError> {
        let refused = |error: ServiceError| VolumeError::Refused { volume: self.name.clone(), why: error.to_string() };
        let claim = self.claim().map_err(refused)?;
        if self.control().ending && blocks > self.geometry().blocks {
            return Err(refused(ServiceError::NotNow("its re-keying could not be ended yet: see its status".to_owned())));
        }
        Ok(claim)
    }

    fn wrong(&self, what: impl Into<String>) -> ServiceError {
        ServiceError::Content { leg: self.leg.name().to_owned(), what: what.into() }
    }

    /// The message for a key that does not fit.
    fn wrong_key(&self) -> ServiceError {
        self.wrong(format!(
            "the key from {} does not open it: it was sealed with another key, or its header was tampered with",
            self.source
        ))
    }

    fn open(&self, opened: Result<Secret<64>, CipherError>) -> Result<Arc<Xts>, ServiceError> {
        match opened {
            Ok(key) => make(key),
            Err(CipherError::Authentication) => Err(self.wrong_key()),
            Err(error) => Err(cipher_error(&error)),
        }
    }

    /// Brings keys into force and waits until no request uses those before.
    fn put(&self, keys: Option<Keys>) -> Result<(), ServiceError> {
        self.keys.replace(keys).map_err(|error| ServiceError::NotNow(error.to_string()))?.wait();
        Ok(())
    }

    fn unit(&self) -> usize {
        self.geometry().block_size.bytes() as usize
    }

    /// Prepares a leg that holds nothing.
    fn prepare(&self, overwrite: bool) -> Result<(), ServiceError> {
        if !overwrite && !legs::is_zero(&legs::read(&self.leg, 0, OFFSET as usize)?) {
            return Err(self.wrong(
                "it has no crypt header, and holds something else; erase it first (blkdiscard, or a new file) if that can go",
            ));
        }
        let uuid = random().map_err(|error| cipher_error(&error))?;
        let (header, key) =
            Header::create(&self.kek, uuid, self.geometry().block_size).map_err(|error| cipher_error(&error))?;
        let cipher = make(key)?;
        let generation = self.control().generation;
        *self.control() = Control { generation, ..Control::default() };
        self.store_header(&header)?;
        self.note_header(header);
        // What the leg had is gone by now.
        let put = self.put(Some(Keys { current: cipher, next: None, unit: self.unit() }));
        put.map_err(|error| ServiceError::HalfWay(Box::new(error)))
    }

    /// Stores a header in the place of both copies.
    fn store_header(&self, header: &Header) -> Result<(), ServiceError> {
        let mut generation = self.control().generation;
        let stored = header.store(&self.leg, &self.flushes, &mut generation);
        self.note_store(generation, stored.is_ok());
        stored
    }

    /// [`Self::store_header`] within a task.
    pub(super) async fn store_header_in(&self, cx: TaskContext<'_>, header: &Header) -> Result<(), BlockError> {
        let mut generation = self.control().generation;
        let stored = header.store_in(cx, &*self.leg, &self.flushes, &mut generation).await;
        self.note_store(generation, stored.is_ok());
        stored
    }

    fn note_store(&self, generation: u64, is_done: bool) {
        let mut control = self.control();
        control.generation = generation;
        control.uneven &= !is_done;
    }

    /// This header is on the leg, and in force.
    pub(super) fn note_header(&self, header: Header) {
        let mut control = self.control();
        *control = Control { header: Some(header), generation: control.generation, ..Control::default() };
    }

    /// The copy of the header that counts, and the key-encryption key that opens it: the newest copy under ours, or under that of the
    /// service before. The other one has the same keys under ours, if somebody began to exchange it and that did not come into force.
    fn choose<'a>(
        &'a self,
        previous: Option<&'a Self>,
        newest: Header,
        found: &Found,
    ) -> Result<(Header, &'a Secret<32>), ServiceError> {
        let other = found.before().and_then(|content| Header::decode(content).ok());
        let other = other.filter(|other| other.is_alike(&newest));
        // Within a change: what the service before was in force with counts, not a newest copy that it does not open.
        if let Some(previous) = previous
            && matches!(newest.open_current(&previous.kek), Err(CipherError::Authentication))
            && let Some(other) = other.clone().filter(|other| other.open_current(&previous.kek).is_ok())
        {
            return Ok((other, &previous.kek));
        }
        for kek in [Some(&self.kek), previous.map(|previous| &previous.kek)].into_iter().flatten() {
            match newest.open_current(kek) {
                Ok(_) => return Ok((newest, kek)),
                Err(CipherError::Authentication) => {}
                Err(error) => return Err(cipher_error(&error)),
            }
        }
        let other = other.filter(|other| other.open_current(&self.kek).is_ok());
        Ok((other.ok_or_else(|| self.wrong_key())?, &self.kek))
    }

    /// What a process that died had written may not be durable yet. Where the leg refuses that, the guest is told at its first flush; what
    /// opens the volume flushes, too, and would be told in its place.
    fn make_durable(&self) -> Result<(), ServiceError> {
        for flushed in legs::flush_all(std::iter::once(&self.leg))? {
            if let Err(error) = flushed {
                tracing::warn!(volume = self.name, %error, "what was written last may be lost");
                self.flushes.note_refused();
            }
        }
        self.home_failed.store(self.flushes.failed(), Ordering::Relaxed);
        Ok(())
    }

    /// Opens what the leg holds.
    fn open_header(&self, previous: Option<&Self>, newest: &Header, found: &Found) -> Result<(), ServiceError> {
        let (has, wanted) = (newest.block_size, self.geometry().block_size);
        if has != wanted {
            let (has, wanted) = (has.bytes(), wanted.bytes());
            return Err(self.wrong(format!("it has blocks of {has} bytes, and the volume of {wanted}")));
        }
        let (header, kek) = self.choose(previous, newest.clone(), found)?;
        let current = self.open(header.open_current(kek))?;
        let next = match &header.rekeying {
            None => None,
            Some(rekeying) => {
                let cipher = self.open(header.open_next(kek, rekeying))?;
                let next = rekey::recover((&self.leg, &self.flushes), &rekeying.id, header.block_size, (&current, &cipher))?;
                if next.failed != Failed::No {
                    let (first, end) = (next.done, next.end);
                    tracing::warn!(
                        volume = self.name,
                        leg = self.leg.name(),
                        first,
                        end,
                        "these blocks were being re-keyed, and the leg fails there: they cannot be read until it works, or can be written"
                    );
                }
                Some(next)
            }
        };
        // A newest copy that does not count is overwritten first.
        let generation = found.generation - u64::from(header != *newest);
        let is_even = found.is_even();
        let damaged = found.wrong_copy();
        if let Some(damaged) = &damaged {
            tracing::warn!(volume = self.name, leg = self.leg.name(), "{damaged}; the other copy is used");
        }
        *self.control() = Control { generation, damaged, ..Control::default() };
        if !is_even
            && !self.geometry().read_only
            && let Err(error) = self.store_header(&header)
        {
            tracing::warn!(volume = self.name, %error, "a copy of its header cannot be replaced; it is tried again");
            self.control().uneven = true;
        }
        self.control().header = Some(header.clone());
        if !std::ptr::eq(kek, &raw const self.kek) {
            self.reseal(kek, &header)?;
        }
        self.put(Some(Keys { current, next, unit: self.unit() }))
    }

    /// The key-encryption key was replaced while the volume was in force: seals the keys under the new one, in one copy of the header.
    /// Until the change is in force it may be taken back, and the other copy stays as it is.
    fn reseal(&self, before: &Secret<32>, header: &Header) -> Result<(), ServiceError> {
        let sealed = header.open_current(before).and_then(|current| {
            let next = header.rekeying.as_ref().map(|rekeying| header.open_next(before, rekeying)).transpose()?;
            header.reseal(&self.kek, &current, next.as_ref())
        });
        let sealed = sealed.map_err(|error| cipher_error(&error))?;
        let mut generation = self.control().generation;
        sealed.store_once(&self.leg, &self.flushes, &mut generation)?;
        let mut control = self.control();
        (control.header, control.generation, control.uneven) = (Some(sealed), generation, true);
        tracing::info!(volume = self.name, key = %self.source, "its keys are sealed under another key-encryption key now");
        Ok(())
    }

    /// Replaces the copy of the header that is of before: an exchanged key-encryption key opens nothing any more.
    async fn even_out(&self, cx: TaskContext<'_>) -> Result<(), BlockError> {
        if !self.control().uneven {
            return Ok(());
        }
        let Some(_claim) = self.try_claim() else { return Ok(()) };
        let header = self.control().header.clone();
        let Some(header) = header else { return Ok(()) };
        self.store_header_in(cx, &header).await?;
        self.control().failure = None;
        Ok(())
    }

    /// Erases all data: first of all by forgetting the key.
    pub(super) fn erase_all(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        let geometry = self.geometry();
        if geometry.read_only {
            return Err(VolumeError::Unsupported { volume: self.name.clone(), what: "formatting while read-only" });
        }
        let bytes = geometry.bytes();
        if bytes >> block_size.shift() == 0 {
            let why = "the volume is smaller than a block";
            return Err(VolumeError::BadBlockSize { volume: self.name.clone(), block_size: block_size.bytes(), why });
        }
        let _claim = self.claim().map_err(|error| self.format_error(&error))?;
        let failed = |error: ServiceError| self.format_error(&error);
        let forget = |block_size| self.forget_key(block_size).inspect_err(|_| self.keep_header()).map_err(failed);
        if block_size == geometry.block_size {
            forget(block_size)?;
            return self.give_back(geometry.blocks).map_err(failed);
        }
        // The leg loses the key at once, and memory when the leg has taken the other blocks: it may refuse them.
        self.store_new_key(geometry.block_size).inspect_err(|_| self.keep_header()).map_err(failed)?;
        // It forgets everything, the header too.
        self.leg.format(block_size).inspect_err(|_| self.keep_if_untouched())?;
        self.look_again();
        self.blocks.store(bytes >> block_size.shift(), Ordering::Relaxed);
        forget(block_size)
    }

    fn format_error(&self, error: &ServiceError) -> VolumeError {
        let source = std::io::Error::other(error.to_string());
        VolumeError::Io { volume: self.name.clone(), action: "format", path: self.leg.name().into(), source }
    }

    /// Puts a header with a new key, which is not in force, in the place of the one on the leg.
    fn store_new_key(&self, block_size: BlockSize) -> Result<(Header, Arc<Xts>), ServiceError> {
        let uuid = self.control().header.as_ref().map(|header| header.uuid);
        let uuid = uuid.ok_or_else(|| ServiceError::NotNow("it is not in force".to_owned()))?;
        let (header, key) = Header::create(&self.kek, uuid, block_size).map_err(|error| cipher_error(&error))?;
        let cipher = make(key)?;
        self.store_header(&header)?;
        Ok((header, cipher))
    }

    /// Puts a new key in the place of the one in force: what was enciphered with that is gone.
    fn forget_key(&self, block_size: BlockSize) -> Result<(), ServiceError> {
        let (header, cipher) = self.store_new_key(block_size)?;
        self.put(Some(Keys { current: cipher, next: None, unit: block_size.bytes() as usize }))?;
        self.note_header(header);
        Ok(())
    }

    /// A format failed, and which header the leg has now is not known: stores the one in force once more. Where that cannot be, no key
    /// is in force any more, so that nobody writes what nobody could read later. Another format helps.
    fn keep_header(&self) {
        let header = self.control().header.clone();
        let has = self.leg.geometry().block_size;
        let Some(header) = header.filter(|_| self.keys.visit().is_some()) else { return };
        if header.block_size != has || self.store_header(&header).is_err() {
            self.close();
        }
    }

    /// The leg failed to take other blocks. One that refuses them has done nothing, or has begun where the header is.
    fn keep_if_untouched(&self) {
        let generation = self.control().generation;
        let is_there = matches!(Header::load(&self.leg), Ok(Some((_, found))) if found.generation == generation);
        if is_there { self.keep_header() } else { self.close() }
    }

    /// No key is in force any more: the header is not as it was.
    fn close(&self) {
        let closed = self.put(None);
        tracing::error!(
            volume = self.name,
            leg = self.leg.name(),
            ?closed,
            "a format failed, and its header is not as it was: format the volume again"
        );
    }

    /// Before the volume grows from so many blocks: what its leg has of the new ones, up to a block of the leg's, from before the volume was made
    /// shorter, reads as zeroes.
    pub(super) fn erase_reused(&self, before: BlockCount, end: BlockCount) -> Result<(), VolumeError> {
        let end = BlockCount(end.0.saturating_sub(OFFSET >> self.geometry().block_size.shift()));
        if end <= before {
            return Ok(());
        }
        self.erase_blocks(before, end)
            .map_err(|error| VolumeError::Refused { volume: self.name.clone(), why: error.to_string() })
    }

    /// Makes all blocks read as zeroes.
    fn give_back(&self, blocks: BlockCount) -> Result<(), ServiceError> {
        self.erase_blocks(BlockCount(0), blocks)
    }

    /// Makes blocks read as zeroes, from one on to another one.
    fn erase_blocks(&self, from: BlockCount, end: BlockCount) -> Result<(), ServiceError> {
        let shift = self.geometry().block_size.shift();
        self.flushes.erase(&self.leg, OFFSET + (from.0 << shift), (end.0 - from.0) << shift)
    }

    /// Begins a re-keying.
    fn begin_rekeying(&self) -> Result<String, ServiceError> {
        let _claim = self.try_claim().ok_or_else(busy)?;
        let header = self.control().header.clone();
        let header = header.ok_or_else(|| ServiceError::NotNow("it is not in force".to_owned()))?;
        if header.rekeying.is_some() {
            return Err(ServiceError::NotNow("it is being re-keyed already".to_owned()));
        }
        let current = self.keys.visit().as_ref().map(|keys| Arc::clone(&keys.current));
        let current = current.ok_or_else(|| ServiceError::NotNow("it is not in force".to_owned()))?;
        let (header, key) = header.begin_rekeying(&self.kek).map_err(|error| cipher_error(&error))?;
        let next = Some(Next::at(make(key)?, 0, 0));
        self.store_header(&header)?;
        self.note_header(header);
        self.put(Some(Keys { current, next, unit: self.unit() }))?;
        tracing::info!(volume = self.name, "re-keying has begun");
        Ok("re-keying has begun; volume show tells how far it is".to_owned())
    }

    async fn run(&self, cx: TaskContext<'_>, stop: Stop) {
        // Requests wait for it, and they may have all of the shard's buffers.
        let own = match own_buffers() {
            Ok(own) => own,
            Err(error) => {
                tracing::error!(volume = self.name, %error, "no memory to work on its keys with");
                return;
            }
        };
        let cx = cx.with_buffers(&own);
        while !stop.is_set() {
            let worked = match self.even_out(cx).await {
                Ok(()) => self.rekey_chunk(cx, &stop).await,
                Err(error) => Err(error.into()),
            };
            match worked {
                // A leg in memory makes nobody wait.
                Ok(true) => yield_now().await,
                Ok(false) => {
                    cx.io(IoOperation::Sleep(IDLE)).await;
                }
                Err(error) => {
                    let text = error.to_string();
                    let before = self.control().failure.replace(text.clone());
                    if before.is_none_or(|before| before != text) {
                        tracing::error!(volume = self.name, leg = self.leg.name(), %error, "work on its keys does not go on; it is tried again");
                    }
                    stop.sleep(cx, Duration::from_secs(1)).await;
                }
            }
        }
    }
}

impl Service for Crypt {
    fn mount(&self, mount: &Mount) -> Result<(), ServiceError> {
        if let Some(previous) = mount.previous::<Self>() {
            self.flushes.take_over(&previous.flushes);
        }
        self.home_failed.store(self.flushes.failed(), Ordering::Relaxed);
        let loaded = Header::load(&self.leg)?;
        let Some((header, found)) = loaded else {
            let is_other = !matches!(super::authenticated::REGION.load(&self.leg), Ok(None));
            return match mount.reason {
                _ if is_other && mount.reason != Reason::Change => {
                    Err(self.wrong("it holds a volume of another mode: say mode=authenticated, or erase it first"))
                }
                Reason::Create => self.prepare(false),
                Reason::Change if mount.is_new_leg(0) || mount.previous::<Self>().is_none() => self.prepare(true),
                _ => Err(self.wrong(
                    "it has no crypt header: it is not what the volume was made on, or was erased (if a format was cut short, \
                     create the volume again)",
                )),
            };
        };
        if mount.is_new_leg(0) && mount.reformat {
            // What the old header says counts no more.
            self.control().generation = found.generation;
            return self.prepare(true);
        }
        if mount.reason == Reason::Open && !self.geometry().read_only {
            self.make_durable()?;
        }
        self.open_header(mount.previous::<Self>().as_deref(), &header, &found)
    }

    fn unmount(&self) -> Result<(), ServiceError> {
        self.control().header = None;
        self.put(None)
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
        let control = self.control();
        let cipher = if self.discard { "AES-256-XTS" } else { "AES-256-XTS, zeroes hidden" };
        let mut status = Status::good([("cipher", cipher.to_owned()), ("key", self.source.to_string())]);
        if let Some(header) = &control.header {
            status.facts.push(("uuid".to_owned(), format!("{:032x}", u128::from_be_bytes(header.uuid))));
        }
        if let Some(damaged) = &control.damaged {
            status.facts.push(("header repaired".to_owned(), damaged.clone()));
        }
        if let Some(failure) = &control.failure {
            let what = if control.uneven { "the header's other copy" } else { "re-keying" };
            status.facts.push((what.to_owned(), failure.clone()));
            status.health = Health::Degraded;
        }
        if self.keys.visit().is_none() {
            let what = match &control.header {
                Some(_) => "a format failed half way: format the volume again",
                None => "it did not come into force: change the volume, or open it again",
            };
            status.facts.push(("no key".to_owned(), what.to_owned()));
            status.health = Health::Failed;
        }
        if let Some(next) = self.keys.visit().as_ref().and_then(|keys| keys.next.as_ref()) {
            let total = self.blocks.load(Ordering::Relaxed);
            status.progress.push(Progress { what: "re-keying".to_owned(), done: next.done.min(total), total });
        }
        status
    }

    fn command(&self, command: &str, _: &Settings) -> Result<String, ServiceError> {
        match command {
            "rekey" => self.begin_rekeying(),
            _ => Err(ServiceError::no_command(&KIND, command)),
        }
    }

    fn tasks(self: Arc<Self>) -> Vec<Task> {
        vec![Task::new("re-keying", move |cx, stop| Box::pin(async move { self.run(cx, stop).await }))]
    }
}
