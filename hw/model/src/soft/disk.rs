//! A core's queue pair on one disk, in the chip's own memory.

/// See the module.
#[derive(Debug)]
pub(super) struct DiskQueue {
    enabled: bool,
    submissions: Vec<[u8; 64]>,
    completions: Vec<[u8; 16]>,
    tail: u16,
    /// As the disk said it last.
    head: u16,
    cq_head: u16,
    phase: bool,
    /// Entries were written that the disk was not told of.
    rings: bool,
}

/// More, of a status: it speaks of the disk's own log, which no guest reads.
const MORE: u16 = 1 << 13;

/// What the disk says of a command.
pub(super) struct Ended {
    pub(super) slot: u16,
    /// Bits 15:1 of the entry's last word.
    pub(super) status: u16,
}

impl DiskQueue {
    pub(super) fn new(entries: u16) -> Self {
        let (submissions, completions) = (vec![[0; 64]; entries.into()], vec![[0; 16]; entries.into()]);
        Self { enabled: false, submissions, completions, tail: 0, head: 0, cq_head: 0, phase: true, rings: false }
    }

    /// The register is written: heads, tails and phase begin anew.
    pub(super) fn reset(&mut self, enabled: bool) {
        let entries = self.submissions.len() as u16;
        *self = Self { enabled, ..Self::new(entries) };
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.enabled
    }

    fn after(&self, index: u16) -> u16 {
        if usize::from(index) + 1 >= self.submissions.len() { 0 } else { index + 1 }
    }

    pub(super) fn has_room(&self) -> bool {
        self.enabled && self.after(self.tail) != self.head
    }

    pub(super) fn submit(&mut self, entry: [u8; 64]) {
        self.submissions[usize::from(self.tail)] = entry;
        self.tail = self.after(self.tail);
        self.rings = true;
    }

    /// The tail, if the disk was not told of it.
    pub(super) fn take_ring(&mut self) -> Option<u16> {
        std::mem::take(&mut self.rings).then_some(self.tail)
    }

    /// The next completion, and the head then.
    pub(super) fn poll(&mut self) -> Option<(Ended, u16)> {
        let entry = self.completions[usize::from(self.cq_head)];
        let word = |at: usize| u16::from_le_bytes([entry[at], entry[at + 1]]);
        let status = word(14);
        if !self.enabled || (status & 1 != 0) != self.phase {
            return None;
        }
        self.head = word(8);
        self.cq_head = self.after(self.cq_head);
        self.phase ^= self.cq_head == 0;
        Some((Ended { slot: word(12), status: status >> 1 & !MORE }, self.cq_head))
    }

    /// Bytes of the submission queue.
    pub(super) fn read(&self, at: usize, out: &mut [u8]) {
        for (offset, byte) in (at..).zip(out) {
            *byte = self.submissions.get(offset / 64).map_or(0, |entry| entry[offset % 64]);
        }
    }

    pub(super) fn write(&mut self, index: usize, data: &[u8; 16]) {
        if let Some(entry) = self.completions.get_mut(index) {
            *entry = *data;
        }
    }
}
