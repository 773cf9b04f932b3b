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
    service::{Health, Mount, Progress, Reason, Service, ServiceError, Status},
    settings::Settings,
};

/// The volume's key, and the one before.
type Keys = (Secret<64>, Option<Secret<64>>);

/// How long the background task sleeps before it looks again.
const NAP: Duration = Duration::from_millis(50);

/// What is known beside the path of requests.
#[derive(Debug, Default)]
pub(super) struct Control {
    /// `None` while the service is not in force. Its root is that of the mount; the tree in memory is newer.
    pub(super) header: Option<Header>,
    pub(super) generation: u64,
    /// What was wrong with a copy of the header, and was put right.
    damaged: Option<String>,
    /// Pages that were written and that the root on the leg does not lead to.
    pub(super) unrooted: Vec<Place>,
    /// The epoch in whose log is what was in doubt in the one before.
    pub(super) carried: u64,
    /// A root that could not be stored, or was.
    pub(super) unfinished: Option<Root>,
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
        self.table.forget_all();
        self.doubts().clear();
        let (epoch, uuid) = header.map_or((0, Uuid::default()), |header| (header.epoch, header.uuid));
        self.log.reset(epoch, 0);
        self.rooted.store(epoch, Ordering::SeqCst);
        if let Some(header) = header {
            for (at, record) in header.root.iter().enumerate() {
                self.table.root.set(at, *record);
            }
        }
        self.rekeying.start(header.and_then(Header::rekeyed).unwrap_or(0));
        let turned = if header.is_some_and(|header| header.turned) { TURNED } else { 0 };
        let force = keys.map(|(sealer, old)| Force { sealer: Arc::new(sealer), turned, old: old.map(Arc::new), uuid });
        self.sealer.replace(force).map_err(|error| ServiceError::NotNow(error.to_string()))?.wait();
        Ok(())
    }

    /// Stores a header with a new key and nothing in its tree, and brings it into force.
    fn begin(&self, uuid: Uuid, block_size: BlockSize, generation: u64, epoch: u64) -> Result<(), ServiceError> {
        let (mut header, key) = Header::create(&self.kek, uuid, block_size).map_err(|error| cipher_error(&error))?;
        header.epoch = epoch;
        let sealer = Sealer::new(&key).map_err(|error| cipher_error(&error))?;
        let generation = header.store(&self.leg, generation, &sealer)?;
        self.enforce(Some(&header), Some((sealer, None)))?;
        *self.control() = Control { header: Some(header), generation, ..Control::default() };
        self.anchor.as_ref().map_or(Ok(()), |anchor| anchor.store(uuid, epoch))
    }

    /// Prepares a leg that holds nothing, or nothing that is still wanted.
    fn prepare(&self, overwrite: bool) -> Result<(), ServiceError> {
        if !overwrite && legs::read(&self.leg, 0, OFFSET as usize)?.iter().any(|byte| *byte != 0) {
            return Err(self.wrong(
                "it has no header of this mode, and holds something else; erase it first (blkdiscard, or a new file) if that can go",
            ));
        }
        if let Some(anchor) = &self.anchor {
            anchor.expect_none()?;
        }
        let uuid = random().map_err(|error| cipher_error(&error))?;
        self.begin(uuid, self.block_size(), 0, 0)
    }

    /// Puts a new key and an empty tree in the place of those in force: what was there is gone.
    pub(super) fn forget_key(&self, block_size: BlockSize) -> Result<(), ServiceError> {
        let known = {
            let control = self.control();
            control.header.as_ref().map(|header| (header.uuid, control.generation))
        };
        let (uuid, generation) = known.ok_or_else(|| ServiceError::NotNow("it is not in force".to_owned()))?;
        // One that could not be stored may have used two more. Epochs go on: what was there before must not look newer.
        self.begin(uuid, block_size, generation + 2, self.log.epoch().0 + 1)
    }

    /// The volume's key, and the one before; sealed anew if they are still sealed under the key of the service before.
    fn open_keys(&self, mount: &Mount, header: &mut Header) -> Result<(Keys, bool), ServiceError> {
        let open = |header: &Header, kek| Ok((header.open(kek)?, header.open_old(kek)?));
        match open(header, &self.kek) {
            Ok(keys) => return Ok((keys, false)),
            Err(CipherError::Authentication) => {}
            Err(error) => return Err(cipher_error(&error)),
        }
        let previous = mount.previous::<Self>().ok_or_else(|| self.wrong_key())?;
        let (key, old) = open(header, &previous.kek).map_err(|_| self.wrong_key())?;
        header.reseal(&self.kek, &key, old.as_ref()).map_err(|error| cipher_error(&error))?;
        Ok(((key, old), true))
    }

    /// Opens what the leg holds.
    fn open_header(&self, mount: &Mount, mut header: Header, found: Found) -> Result<(), ServiceError> {
        let (has, wanted) = (header.block_size.bytes(), self.block_size().bytes());
        if has != wanted {
            return Err(self.wrong(format!("it has blocks of {has} bytes, and the volume of {wanted}")));
        }
        let before = header.clone();
        let ((key, old), resealed) = self.open_keys(mount, &mut header)?;
        let sealer = Sealer::new(&key).map_err(|error| cipher_error(&error))?;
        let old = old.map(|old| Sealer::new(&old)).transpose().map_err(|error| cipher_error(&error))?;
        if !before.is_whole(&sealer, &found.content) {
            return Err(
                self.wrong("its header was changed by somebody who does not have the key: put back a good copy of the leg")
            );
        }
        let accepted = self.check_root(mount, &before, &found.content)?;
        let uuid = header.uuid;
        let mut control = Control { generation: found.generation, damaged: found.damaged, ..Control::default() };
        if let Some(damaged) = &control.damaged {
            tracing::warn!(volume = self.name, leg = self.leg.name(), "{damaged}; the other copy is used");
        }
        if resealed {
            let key = &self.settled.key;
            tracing::info!(volume = self.name, %key, "its key is sealed under another key-encryption key now");
        }
        if resealed || (control.damaged.is_some() && !self.geometry().read_only) {
            control.generation = header.store(&self.leg, control.generation, &sealer)?;
        }
        self.enforce(Some(&header), Some((sealer, old)))?;
        control.header = Some(header);
        *self.control() = control;
        self.block_on("recover", |volume, cx| Box::pin(volume.recover(cx)))?;
        self.confirm_root(uuid, accepted)
    }

    /// Whether anything is not in the tree on the leg.
    fn has_unsaved(&self) -> bool {
        self.log.epoch().1 > 0 || self.table.is_dirty() || !self.doubts().is_empty() || self.control().unfinished.is_some()
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
            if rest.is_zero() || self.log.is_half_full() {
                rest = self.settled.save_after;
                let (epoch, pages) = self.log.epoch();
                if pages > 0 {
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
        if let Some((header, found)) = Header::load(&self.leg)? {
            return self.open_header(mount, header, found);
        }
        let is_other = !matches!(super::super::header::REGION.load(&self.leg), Ok(None));
        match mount.reason {
            _ if is_other && mount.reason != Reason::Change => {
                Err(self.wrong("it holds a volume of the mode xts: leave out mode=authenticated, or erase it first"))
            }
            Reason::Create => self.prepare(false),
            Reason::Change if mount.previous.is_none() => self.prepare(true),
            _ => Err(self.wrong(
                "it has no crypt header of this mode: it is not what the volume was made on, or was erased (if a format was cut \
                 short, create the volume again)",
            )),
        }
    }

    fn unmount(&self) -> Result<(), ServiceError> {
        let saved = if self.geometry().read_only || !self.has_unsaved() {
            Ok(())
        } else {
            self.block_on("save tags to", |volume, cx| {
                Box::pin(async move {
                    let epoch = volume.log.epoch().0;
                    volume.save(cx, epoch).await
                })
            })
        };
        self.control().header = None;
        self.enforce(None, None)?;
        saved
    }

    fn leave(&self) -> Result<(), ServiceError> {
        // Its leg never shows the data: the layer knows by the layout.
        Ok(())
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
        status
    }

    fn command(&self, command: &str, arguments: &Settings) -> Result<String, ServiceError> {
        match command {
            "rekey" if arguments.is_empty() => self.begin_rekeying(),
            "rekey" => Err(ServiceError::Command("rekey has no arguments".to_owned())),
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
