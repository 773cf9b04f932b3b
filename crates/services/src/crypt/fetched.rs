//! Keys that are fetched before what needs them is opened: a source may take its time, and who opens volumes keeps others waiting.
//!
//! ```text
//!   stack ─► its sources ─► fetched, beside each other ─► FetchedKeys ─► build takes a copy
//! ```
//!
//! They are wiped when whoever has had them fetched forgets them.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use millrace_cipher::{KeySource, Secret};

use super::{KIND, control::key_error};
use crate::{service::ServiceError, shared::SharedObjects, stack::Node};

/// Its name among shared objects.
const OBJECT: &str = "crypt/fetched";

/// By their sources: keys, or why there is none.
type Keys = BTreeMap<String, Result<Secret<32>, ServiceError>>;

/// What a source gave: its key, or why there is none.
#[derive(Debug)]
pub struct FetchedKey {
    source: String,
    key: Result<Secret<32>, ServiceError>,
}

impl FetchedKey {
    /// Asks a source, for as long as it takes.
    pub fn fetch(source: &KeySource) -> Self {
        Self { source: source.to_string(), key: source.load().map_err(|error| key_error(&error)) }
    }

    /// Why there is no key.
    pub fn failure(&self) -> Option<String> {
        self.key.as_ref().err().map(ToString::to_string)
    }
}

/// Keys by their sources. What is built while somebody has this asks no source that is here.
#[derive(Debug, Default)]
pub struct FetchedKeys(Mutex<Keys>);

impl FetchedKeys {
    /// Those of everything that is built with these objects.
    pub fn of(shared: &SharedObjects) -> Arc<Self> {
        shared.get(OBJECT, Self::default)
    }

    /// Adds keys, in the place of older ones of their sources.
    pub fn add(&self, keys: Vec<FetchedKey>) {
        self.lock().extend(keys.into_iter().map(|fetched| (fetched.source, fetched.key)));
    }

    /// Forgets all of them: from now on sources are asked.
    pub fn forget(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> MutexGuard<'_, Keys> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self, source: &KeySource) -> Option<Result<Secret<32>, ServiceError>> {
        let keys = self.lock();
        Some(match keys.get(&source.to_string())? {
            Ok(key) => key.again().map_err(|error| ServiceError::NotNow(error.to_string())),
            Err(error) => Err(ServiceError::NotNow(error.to_string())),
        })
    }
}

/// The key of a source: as it was fetched before, or as it is fetched now.
pub(super) fn key_of(shared: &SharedObjects, source: &KeySource) -> Result<Secret<32>, ServiceError> {
    let fetched = shared.find::<FetchedKeys>(OBJECT).and_then(|keys| keys.get(source));
    fetched.unwrap_or_else(|| source.load().map_err(|error| key_error(&error)))
}

/// The sources of all keys that a stack needs. What names none is not among them: building the stack says so.
pub fn key_sources(stack: &Node) -> Vec<KeySource> {
    let own = (stack.word() == KIND.name).then(|| stack.settings().text("key")).flatten();
    let own = own.and_then(|key| key.parse().ok());
    own.into_iter().chain(stack.legs().iter().flat_map(key_sources)).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_key_is_taken_as_it_was_fetched_until_it_is_forgotten() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        fs::write(&path, [7; 32]).unwrap();
        let stack: Node = format!("mirror(crypt(key=\"file:{}\") | memory, memory)", path.display()).parse().unwrap();
        let sources = key_sources(&stack);
        let [source] = &sources[..] else { panic!("one service has a key") };
        let shared = SharedObjects::default();
        let keys = FetchedKeys::of(&shared);
        keys.add(vec![FetchedKey::fetch(source)]);
        fs::remove_file(&path).unwrap();
        // More than once: a volume may be tried in several ways.
        assert!(key_of(&shared, source).is_ok() && key_of(&shared, source).is_ok());
        let failed = FetchedKey::fetch(source);
        assert!(failed.failure().unwrap().contains("No such file"));
        keys.add(vec![failed]);
        fs::write(&path, [7; 32]).unwrap();
        let refused = key_of(&shared, source).unwrap_err().to_string();
        assert!(refused.contains(&source.to_string()), "{refused}");
        keys.forget();
        assert!(key_of(&shared, source).is_ok(), "the source is asked");
        fs::remove_file(&path).unwrap();
        assert!(key_of(&shared, source).is_err());
    }
}
