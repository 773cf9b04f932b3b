//! Doorbells: a store into a shared page, a message, or a store that is usually enough (shadow doorbells).

use std::sync::atomic::{Ordering, fence};

use millrace_nvme_spec::registers::{Doorbell, DoorbellLayout};

use crate::{
    dma::DmaBuffer,
    shared::SharedU32,
    transport::{MappedArea, SharedTransport, TransportError},
};

/// BAR0's region index.
pub(crate) const BAR0: u32 = 0;

/// The shadow doorbell buffer and the event index buffer (Base 5.2.5).
#[derive(Debug)]
pub(crate) struct Shadow {
    pub(crate) doorbells: DmaBuffer,
    pub(crate) events: DmaBuffer,
}

/// All doorbells of a controller.
pub(crate) struct Doorbells {
    layout: DoorbellLayout,
    transport: SharedTransport,
    areas: Vec<MappedArea>,
    pub(crate) shadow: Option<Shadow>,
}

impl Doorbells {
    pub(crate) fn new(layout: DoorbellLayout, transport: SharedTransport, areas: Vec<MappedArea>) -> Self {
        Self { layout, transport, areas, shadow: None }
    }

    /// What is mapped of BAR0.
    pub(crate) fn areas(&self) -> &[MappedArea] {
        &self.areas
    }

    /// The means to ring one doorbell. Shadowed when buffers are configured, but never for the admin queue, whose
    /// doorbells have no shadow in practice: hosts write them always.
    pub(crate) fn bell(&self, doorbell: Doorbell) -> Bell {
        let offset = self.layout.offset(doorbell);
        let mapped = self.areas.iter().find_map(|area| {
            let within = usize::try_from(offset.checked_sub(area.offset)?).ok()?;
            SharedU32::new(&area.mapping, within)
        });
        let target = match mapped {
            Some(word) => Target::Mapped(word),
            None => Target::Message { transport: self.transport.clone(), offset },
        };
        let (Doorbell::SqTail(queue) | Doorbell::CqHead(queue)) = doorbell;
        let shadow = self.shadow.as_ref().filter(|_| !queue.is_admin()).and_then(|shadow| {
            let index = usize::try_from(self.layout.index_offset(doorbell)).ok()?;
            Some(ShadowBell { value: shadow.doorbells.word(index)?, event: shadow.events.word(index)? })
        });
        Bell { target, shadow }
    }
}

enum Target {
    Mapped(SharedU32),
    Message { transport: SharedTransport, offset: u64 },
}

struct ShadowBell {
    value: SharedU32,
    event: SharedU32,
}

/// One doorbell.
pub(crate) struct Bell {
    target: Target,
    shadow: Option<ShadowBell>,
}

impl Bell {
    /// Tells the controller of the step from `old` to `new`, through the shadow buffer alone where that is enough.
    #[inline]
    pub(crate) fn ring(&self, old: u16, new: u16) -> Result<(), TransportError> {
        if let Some(shadow) = &self.shadow {
            shadow.value.store(u32::from(new));
            // Between our store of the doorbell and our load of the event index: the controller stores the event index
            // and then loads the doorbell once more, with a full fence between. Without both fences each side could
            // miss the other's store, and a command would lie unseen.
            fence(Ordering::SeqCst);
            if !event_due(shadow.event.load() as u16, old, new) {
                return Ok(());
            }
        }
        self.write(u32::from(new))
    }

    /// Writes the doorbell register, whatever the shadow says.
    #[inline]
    pub(crate) fn write(&self, value: u32) -> Result<(), TransportError> {
        match &self.target {
            Target::Mapped(word) => {
                // Release: the controller that sees the tail sees the entries, and one that sees the head knows that
                // we have read what it may now overwrite.
                word.store(value);
                Ok(())
            }
            Target::Message { transport, offset } => {
                transport.get().region_write_posted(BAR0, *offset, &value.to_le_bytes())
            }
        }
    }
}

/// Whether the step from `old` to `new` passes the index that the controller wants to hear of, modulo 2^16.
fn event_due(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

#[cfg(test)]
mod tests {
    use super::event_due;

    #[test]
    fn rings_only_when_the_event_index_is_passed() {
        assert!(event_due(0, 0, 1), "the controller waits for the first entry");
        assert!(!event_due(0, 1, 2), "already told of it");
        assert!(event_due(5, 3, 6));
        assert!(!event_due(6, 3, 6));
        assert!(!event_due(2, 3, 6));
        assert!(event_due(0xffff, 0xffff, 0));
    }
}
