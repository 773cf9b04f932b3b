//! Whether there is room for what is to be stored.

use super::{Changes, Store, StoreError};
use crate::Name;

impl Store {
    /// Stores a volume's record once more, as it is: before others wait for the storing of another one.
    pub(crate) fn try_room(&self, name: &Name) -> Result<(), StoreError> {
        let mut slot = self.slot();
        let record = self.volume_in(&mut slot, name)?;
        self.apply_in(&mut slot, &Changes { put_volumes: record.iter().collect(), ..Changes::default() })
    }
}
