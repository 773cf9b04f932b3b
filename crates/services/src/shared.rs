//! Objects that services of several volumes have together: the table of a shared disk, the buckets of a group.

use std::{
    any::Any,
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

type Objects = BTreeMap<String, Weak<dyn Any + Send + Sync>>;

/// Objects by name. Each lives as long as somebody holds it.
#[derive(Debug, Default)]
pub struct SharedObjects(Mutex<Objects>);

impl SharedObjects {
    /// The object of this name, if there is one of this type.
    pub fn find<T: Any + Send + Sync>(&self, name: &str) -> Option<Arc<T>> {
        let objects = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        objects.get(name).and_then(Weak::upgrade)?.downcast().ok()
    }

    /// The object of this name, made if there is none. Names begin with the kind of service ("throttle/gold").
    ///
    /// # Panics
    /// When there is one of another type: names belong to one kind of service.
    pub fn get<T: Any + Send + Sync>(&self, name: &str, make: impl FnOnce() -> T) -> Arc<T> {
        let mut objects = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        objects.retain(|_, object| object.strong_count() > 0);
        if let Some(object) = objects.get(name).and_then(Weak::upgrade) {
            return object.downcast().expect("an object's name belongs to one kind of service");
        }
        let object = Arc::new(make());
        let weak: Weak<dyn Any + Send + Sync> = Arc::<T>::downgrade(&object);
        objects.insert(name.to_owned(), weak);
        object
    }
}
