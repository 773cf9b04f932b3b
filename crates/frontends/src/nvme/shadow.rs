//! Shadow doorbells (Doorbell Buffer Config, Base 5.2.5): when a guest that writes its doorbells to memory shall ring as well.
//!
//! A guest stores its new tail in the shadow page, then reads our event index, and rings (a message, an exit of its virtual
//! processor) only when its store went past that index. While we poll, the indexes are kept where no store passes them; before
//! we sleep, they are set to where the guest is.
//!
//! The race, from both sides:
//! * The guest: store the tail; full barrier; read the event index; ring if the tail went past it.
//! * We: store the event index; full barrier; read the tail; sleep only if nothing is new.
//!
//! Whichever barrier comes second, its side sees the other's store: the guest rings, or we do not sleep.

use std::sync::atomic::{Ordering, fence};

use millrace_memory::Segment;

use super::controller::Controller;

impl Controller {
    /// Asks the guest to ring at its next store to any shadow doorbell; to be followed by a look at all of them. `false` when
    /// the guest uses no shadow doorbells: then it always rings.
    pub(crate) fn arm_event_indexes(&mut self) -> bool {
        let armed = self.set_event_indexes(|doorbell| doorbell);
        // Our side of the race in the module's head: the indexes are stored before, the doorbells are read after.
        fence(Ordering::SeqCst);
        armed
    }

    /// Asks the guest not to ring: we look at the doorbells anyway. The index just behind a doorbell is the last that its stores
    /// come to, once a lap of the queue; a ring too many costs a message and nothing else.
    pub(crate) fn relax_event_indexes(&mut self) {
        self.set_event_indexes(|doorbell| doorbell.wrapping_sub(1) & 0xffff);
    }

    fn set_event_indexes(&mut self, index_for: impl Fn(u32) -> u32) -> bool {
        if self.state.registers.shadow_doorbells.get() == 0 {
            return false;
        }
        let Some((shadow, events)) = self.shadow_segments() else { return false };
        let store = |doorbell: usize| copy_index(&shadow, &events, doorbell * 4, &index_for);
        for qid in 1..=self.config.queues {
            if self.sq_exists(qid) {
                store(usize::from(qid) * 2);
            }
            if self.cq_exists(qid) {
                store(usize::from(qid) * 2 + 1);
            }
        }
        true
    }
}

fn copy_index(shadow: &Segment, events: &Segment, offset: usize, index_for: impl Fn(u32) -> u32) {
    events.store_u32(offset, index_for(shadow.load_u32(offset)));
}
