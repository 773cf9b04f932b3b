//! Places for requests of the API that change something: each has a thread, for ever where a file system does not answer. Whoever only asks, and
//! whoever helps against that, finds threads all the same; only sums of the account, which may be long, have places as well.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

/// Requests that change something, at a time; so many again of those that are right to take long.
pub(crate) const CHANGES: usize = 64;

/// Of these about one object: whoever asks again and again for what hangs takes no more.
pub(crate) const CHANGES_OF_ONE: usize = 2;

/// Sums of the account at a time.
pub(crate) const SUMS: usize = 2;

/// How long a request waits for its place.
const LIMIT: Duration = Duration::from_secs(2);

/// What a request changes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Object {
    kind: &'static str,
    name: String,
}

impl Object {
    pub(crate) fn new(kind: &'static str, name: &(impl fmt::Display + ?Sized)) -> Self {
        Self { kind, name: name.to_string() }
    }

    pub(crate) fn volume(name: &(impl fmt::Display + ?Sized)) -> Self {
        Self::new("volume", name)
    }

    /// What an upgrade changes.
    pub(crate) fn binary() -> Self {
        Self::new("the daemon's", "binary")
    }
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.name)
    }
}

/// Why there is no place.
#[derive(Debug)]
pub(crate) enum NoPlace {
    /// There are as many as may be.
    Any,
    /// There are as many as may be of this object.
    Of(Object),
    /// As many sums of the account are made as may be.
    Sums,
}

/// A place: somebody else's when it goes.
#[derive(Debug)]
pub(crate) struct ChangePlace {
    _of_one: Option<OwnedSemaphorePermit>,
    _of_all: Option<OwnedSemaphorePermit>,
}

#[derive(Debug)]
pub(crate) struct Places {
    all: Arc<Semaphore>,
    long: Arc<Semaphore>,
    sums: Arc<Semaphore>,
    objects: Mutex<BTreeMap<Object, Arc<Semaphore>>>,
}

impl Places {
    pub(super) fn new() -> Self {
        let all = || Arc::new(Semaphore::new(CHANGES));
        Self { all: all(), long: all(), sums: Arc::new(Semaphore::new(SUMS)), objects: Mutex::default() }
    }

    /// For a change of an object.
    pub(crate) async fn of(&self, object: Object) -> Result<ChangePlace, NoPlace> {
        let one = self.of_one(object).await?;
        Ok(ChangePlace { _of_one: Some(one), _of_all: Some(one_of(&self.all).await?) })
    }

    /// For one that is right to take long: it keeps no place from those that are not.
    pub(crate) async fn of_long(&self, object: Object) -> Result<ChangePlace, NoPlace> {
        let one = self.of_one(object).await?;
        Ok(ChangePlace { _of_one: Some(one), _of_all: Some(one_of(&self.long).await?) })
    }

    /// For a move: it is about several objects.
    pub(crate) async fn of_move(&self) -> Result<ChangePlace, NoPlace> {
        Ok(ChangePlace { _of_one: None, _of_all: Some(one_of(&self.all).await?) })
    }

    /// For a sum of the account: who gives up waiting does not end it.
    pub(crate) async fn of_sum(&self) -> Result<ChangePlace, NoPlace> {
        let sum = one_of(&self.sums).await.map_err(|_| NoPlace::Sums)?;
        Ok(ChangePlace { _of_one: None, _of_all: Some(sum) })
    }

    /// For what may help against requests that hang: only those about the same count.
    pub(crate) async fn of_remedy(&self, object: Object) -> Result<ChangePlace, NoPlace> {
        Ok(ChangePlace { _of_one: Some(self.of_one(object).await?), _of_all: None })
    }

    async fn of_one(&self, object: Object) -> Result<OwnedSemaphorePermit, NoPlace> {
        let places = {
            let mut objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
            // Who has a place, or waits for one, has them as well.
            objects.retain(|_, places| Arc::strong_count(places) > 1);
            let places = objects.entry(object.clone()).or_insert_with(|| Arc::new(Semaphore::new(CHANGES_OF_ONE)));
            Arc::clone(places)
        };
        one_of(&places).await.map_err(|_| NoPlace::Of(object))
    }
}

async fn one_of(places: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, NoPlace> {
    match timeout(LIMIT, Arc::clone(places).acquire_owned()).await {
        Ok(Ok(place)) => Ok(place),
        _ => Err(NoPlace::Any),
    }
}
