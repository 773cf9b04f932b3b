//! Values of a namespace that outlive the worker.
//!
//! Each has a region of memory, which the keeper holds, made when there is first something to remember. A value is written as a
//! whole, to the one of two places that is not in force; then the number of changes says which is. So whoever takes over finds the
//! old value or the new one, wherever the worker ended.

use std::{
    fmt,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

use millrace_keeper::{Key, Kind, Layout, Link};
use millrace_memory::Shared;
use zerocopy::FromBytes;

use super::state::{Cell, commit};

/// Version of the layouts.
pub(crate) const LAYOUT: Layout = Layout { name: "namespace", oldest: 1, newest: 1 };

/// The region.
#[derive(FromBytes)]
#[repr(C)]
struct Region<S> {
    version: Cell<u64>,
    /// Changes so far; the value in force is in place `changes % 2`.
    changes: Cell<u64>,
    reserved: [Cell<u64>; 6],
    places: [S; 2],
}

/// Hands a region's file to the keeper.
type Put = Box<dyn Fn(BorrowedFd<'_>) + Send>;

/// See the module. Nothing lasts without a keeper.
pub(crate) struct Lasting<S> {
    put: Option<Put>,
    region: Option<Shared<Region<S>>>,
}

impl<S> fmt::Debug for Lasting<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lasting").field("region", &self.region.is_some()).finish_non_exhaustive()
    }
}

impl<S> Default for Lasting<S> {
    fn default() -> Self {
        Self { put: None, region: None }
    }
}

impl<S: FromBytes> Lasting<S> {
    /// With the keeper, for a volume; finds what the worker before this one left.
    pub(crate) fn with(link: &Arc<Link>, volume: [u8; 16], kind: Kind) -> Self {
        let key = Key::of(volume, kind);
        let region = link.take(key).and_then(|held| found(held.fd));
        let link = Arc::clone(link);
        let put = move |file: BorrowedFd<'_>| {
            if let Err(error) = link.put(key, file) {
                // Without its keeper this process ends soon.
                tracing::error!(%error, "the keeper could not be told");
            }
        };
        Self { put: Some(Box::new(put)), region }
    }

    /// The value in force, if there ever was one.
    pub(crate) fn last(&self) -> Option<&S> {
        let region = self.region.as_ref()?;
        let changes = region.changes.get();
        (changes > 0).then(|| &region.places[place(changes)])
    }

    /// Writes the next value; it is in force when this returns.
    pub(crate) fn replace(&mut self, write: impl FnOnce(&S)) {
        if self.region.is_none()
            && let Some(put) = &self.put
        {
            match fresh() {
                Ok(region) => {
                    put(region.as_fd());
                    self.region = Some(region);
                }
                Err(error) => tracing::error!(%error, "no memory for what of a namespace should outlive this process"),
            }
        }
        let Some(region) = &self.region else { return };
        let next = region.changes.get().wrapping_add(1);
        write(&region.places[place(next)]);
        commit();
        region.changes.set(next);
        commit();
    }
}

fn place(changes: u64) -> usize {
    usize::from(changes % 2 == 1)
}

fn fresh<S: FromBytes>() -> std::io::Result<Shared<Region<S>>> {
    let region = Shared::<Region<S>>::new("millrace-namespace")?;
    region.version.set(LAYOUT.newest.into());
    Ok(region)
}

fn found<S: FromBytes>(file: OwnedFd) -> Option<Shared<Region<S>>> {
    let region = Shared::<Region<S>>::from_file(file).ok().filter(|region| region.version.get() == u64::from(LAYOUT.newest));
    if region.is_none() {
        tracing::error!("what a namespace's last worker left is of another version: its reservations or marks are lost");
    }
    region
}

#[cfg(test)]
impl<S: FromBytes> Lasting<S> {
    /// With a region, and nobody who keeps it.
    pub(crate) fn alone() -> Self {
        Self { put: None, region: Some(fresh().expect("shared memory")) }
    }

    /// Over a copy of what another one's file held.
    pub(crate) fn over(file: OwnedFd) -> Self {
        Self { put: None, region: Some(found(file).expect("a region")) }
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.region.as_ref().expect("a region").as_fd()
    }

    pub(crate) fn file_len(&self) -> usize {
        self.region.as_ref().expect("a region").file_len() as usize
    }
}
