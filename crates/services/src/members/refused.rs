//! Legs that refused a flush, from the moment that is seen until it is taken care of.
//!
//! A leg may drop what it could not make durable, and its next flush succeeds all the same: it says so to one of those who ask, and the others
//! look here. One that has to stay leaves when the guest is sure to be told; one that goes, when the others say durably that it failed.

use std::sync::atomic::{AtomicU64, Ordering};

/// Above the legs: how often one refused.
const ONCE: u64 = 1 << 8;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Refused(AtomicU64);

impl Refused {
    /// A leg refused a flush.
    pub(crate) fn note(&self, leg: usize) {
        let _ = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| Some((word | 1 << leg).wrapping_add(ONCE)));
    }

    /// The legs that nobody has taken care of yet. Acquire: who finds one gone finds what was done about it.
    #[inline]
    pub(crate) fn legs(&self) -> u8 {
        self.state() as u8
    }

    /// Changes whenever a leg refuses: for who looks before something and after it.
    pub(super) fn state(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    /// Takes care of those of these legs that refused, and then forgets them; once more when one refuses meanwhile.
    pub(crate) fn settle(&self, legs: u8, mut care: impl FnMut(u8)) {
        loop {
            let word = self.state();
            let found = word as u8 & legs;
            if found == 0 {
                return;
            }
            care(found);
            let without = word & !u64::from(found);
            if self.0.compare_exchange(word, without, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                return;
            }
        }
    }

    /// It does not matter any more what these legs refused.
    pub(crate) fn forget(&self, legs: u8) {
        self.0.fetch_and(!u64::from(legs), Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leg_that_refuses_while_it_is_taken_care_of_is_taken_care_of_again() {
        let refused = Refused::default();
        let before = refused.state();
        refused.note(1);
        refused.note(7);
        assert!(refused.legs() == 0b1000_0010 && refused.state() != before);
        let mut care = Vec::new();
        refused.settle(0b10, |legs| {
            if care.is_empty() {
                refused.note(1);
            }
            care.push(legs);
        });
        assert_eq!((care, refused.legs()), (vec![0b10, 0b10], 0b1000_0000));
        refused.settle(0b10, |_| unreachable!("it was taken care of"));
        refused.forget(u8::MAX);
        assert!(refused.legs() == 0 && refused.state() != before, "somebody who looked before knows");
    }
}
