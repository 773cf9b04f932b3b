//! Messages that a client should not send.

use std::{fs::File, os::fd::OwnedFd};

use millrace_vfio_user::{
    codec::{Command as Message, wire},
    pci,
};
use rustix::event::{EventfdFlags, eventfd};
use zerocopy::IntoBytes;

use crate::{
    choices::Choices,
    guest::{Guest, Wired, note},
    memory::{LARGE, NOWHERE, PAGE},
    wire::{Wire, message},
};

impl Guest {
    /// A request that is in order as a message, but cannot be granted.
    pub(crate) fn refused_request(&mut self, choices: &mut Choices) {
        if self.wire.is_none() {
            return;
        }
        let file = self.memory.files[0].try_clone().expect("a descriptor");
        let map = |address, size, offset| wire::DmaMap { argsz: 32, flags: 3, offset, address, size };
        let reply = match choices.below(12) {
            0 => self.call(Message::DmaMap, &[map(NOWHERE, choices.nasty64() | 1, 0).as_bytes()], &[&file]),
            1 => self.call(Message::DmaMap, &[map(u64::MAX - PAGE + 1, 2 * PAGE, 0).as_bytes()], &[&file]),
            2 => self.call(Message::DmaMap, &[map(NOWHERE + 8, PAGE, 0).as_bytes()], &[&file]),
            // Longer than its file.
            3 => self.call(Message::DmaMap, &[map(NOWHERE, PAGE << 20, 0).as_bytes()], &[&file]),
            // Over memory that is there.
            4 if self.memory.is_mapped(LARGE) => {
                self.call(Message::DmaMap, &[map(LARGE + PAGE, PAGE, 0).as_bytes()], &[&file])
            }
            // No range. What holds no region at all is granted.
            5 => {
                let (address, size) =
                    if choices.one_in(2) { (choices.nasty64(), 0) } else { (u64::MAX - PAGE + 1, 2 * PAGE) };
                let unmap = wire::DmaUnmap { argsz: 24, flags: 0, address, size };
                self.call(Message::DmaUnmap, &[unmap.as_bytes()], &[])
            }
            // A part of a region.
            6 if self.memory.is_mapped(LARGE) => {
                let unmap = wire::DmaUnmap { argsz: 24, flags: 0, address: LARGE, size: PAGE };
                self.call(Message::DmaUnmap, &[unmap.as_bytes()], &[])
            }
            7 => {
                let access = wire::RegionAccess { offset: choices.nasty64() | 1 << 40, region: pci::REGION_BAR0, count: 4 };
                self.call(Message::RegionRead, &[access.as_bytes()], &[])
            }
            8 => {
                let access = wire::RegionAccess { offset: 0, region: 9 + choices.nasty32() % 1000, count: 4 };
                self.call(Message::RegionWrite, &[access.as_bytes(), &[0; 4]], &[])
            }
            9 => {
                let set = wire::SetIrqs { argsz: 20, flags: 0x24, index: 2, start: choices.nasty32(), count: u32::MAX };
                self.call(Message::DeviceSetIrqs, &[set.as_bytes()], &[])
            }
            10 => {
                // Not an eventfd.
                let set = wire::SetIrqs { argsz: 20, flags: 0x24, index: 2, start: 0, count: 1 };
                self.call(Message::DeviceSetIrqs, &[set.as_bytes()], &[&file])
            }
            _ => self.call(Message::Version, &[&[0; 4], b"{\0"], &[]),
        };
        // Whoever is not closed upon is told what is wrong.
        if let Some(reply) = reply {
            assert!(reply.errno().is_some(), "a request was granted that cannot be: {:?}", reply.header);
        }
    }

    /// A message with random contents: an answer, or the end of the connection.
    pub(crate) fn garbage(&mut self, choices: &mut Choices) {
        let Some(wire) = self.wire.as_mut() else { return };
        let len = choices.below(100) as usize;
        let payload: Vec<u8> = (0..len).map(|_| if choices.one_in(2) { 0 } else { choices.byte() }).collect();
        let mut header = wire.header(Message::DeviceGetInfo, len, false);
        // Maps, unmaps and the rest that succeed by chance would need the oracle to follow.
        header.command = *choices.pick(&[0, 1, 4, 5, 6, 7, 9, 11, 12, 14, 16, 17, 18, 19, 0xffff]);
        let breaks = choices.below(6);
        match breaks {
            0 => header.size = choices.nasty32(),
            1 => header.flags = choices.nasty32() & !wire::NO_REPLY | 2,
            2 => header.size = choices.below(16) as u32,
            _ => {}
        }
        note!(self, "  sends {header:?} and {len} bytes");
        let bytes = message(&header, &[&payload]);
        if self.send(&bytes, &[]).is_none() {
            return;
        }
        if breaks < 3 && header.size as usize != bytes.len() || breaks == 1 {
            // What the server makes of it is open; the stream cannot be followed any further.
            self.turns(4);
            self.wire = None;
            self.lose("a broken message");
            return;
        }
        if let Some(reply) = self.receive("an answer to garbage") {
            assert_eq!(reply.header.id, header.id, "another request's reply");
        }
    }

    /// Half a message, and then nothing.
    pub(crate) fn half_message(&mut self, choices: &mut Choices) {
        let Some(wire) = self.wire.as_mut() else { return };
        let header = wire.header(Message::RegionWrite, 24, false);
        let bytes = message(&header, &[&[0; 24]]);
        let part = choices.below(bytes.len() as u64) as usize;
        note!(self, "  sends {part} bytes of a message and hangs up");
        self.send(&bytes[..part], &[]);
        let turns = choices.below(4);
        self.turns(turns);
        self.wire = None;
        self.lose("the client has hung up");
    }

    /// Many messages at once that want no reply.
    pub(crate) fn flood(&mut self, choices: &mut Choices) {
        let Some(wire) = self.wire.as_mut() else { return };
        let access = wire::RegionAccess { offset: 0xc, region: pci::REGION_BAR0, count: 4 };
        let mut bytes = Vec::new();
        for _ in 0..choices.below(200) {
            let header = wire.header(Message::RegionWrite, 20, true);
            bytes.extend(message(&header, &[access.as_bytes(), &[0xff; 4]]));
        }
        self.send(&bytes, &[]);
    }

    /// Another client comes while this one is connected: it is turned away.
    pub(crate) fn second_client(&mut self) {
        if self.wire.is_none() {
            return;
        }
        // The device may not have seen this client yet.
        self.turns(2);
        let mut other = Wire::connect(&self.world.socket);
        self.wait("the second client is turned away", |_| other.receive().is_err().then_some(()));
    }

    fn look_for_signals(&mut self) {
        for vector in 0..self.config.vectors {
            self.look_for_signal(vector);
        }
    }

    /// Interrupts are wired, unwired, masked, unmasked and triggered.
    pub(crate) fn set_irqs(&mut self, choices: &mut Choices) {
        if self.wire.is_none() {
            return;
        }
        let vectors = u64::from(self.config.vectors);
        let count = 1 + choices.below(vectors.min(8)) as u32;
        let start = choices.below(vectors - u64::from(count) + 1) as u32;
        let new = || -> File { OwnedFd::into(eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd")) };
        let mut eventfds: Vec<File> = Vec::new();
        let (data, action) = match choices.below(8) {
            0..=3 => {
                eventfds.extend((0..count).map(|_| new()));
                (wire::IRQ_DATA_EVENTFD, wire::IRQ_ACTION_TRIGGER)
            }
            4 => (wire::IRQ_DATA_NONE, wire::IRQ_ACTION_TRIGGER),
            5 => {
                let none = wire::SetIrqs {
                    argsz: 20,
                    flags: wire::IRQ_DATA_NONE | wire::IRQ_ACTION_TRIGGER,
                    index: 2,
                    start: 0,
                    count: 0,
                };
                self.demand(Message::DeviceSetIrqs, &[none.as_bytes()], &[]);
                self.look_for_signals();
                return self.wired.clear();
            }
            6 => (wire::IRQ_DATA_NONE, wire::IRQ_ACTION_MASK),
            _ => (wire::IRQ_DATA_NONE, wire::IRQ_ACTION_UNMASK),
        };
        let set = wire::SetIrqs { argsz: 20, flags: data | action, index: 2, start, count };
        let fds: Vec<_> = eventfds.iter().collect();
        self.demand(Message::DeviceSetIrqs, &[set.as_bytes()], &fds);
        // What the old wiring has signalled until now counts.
        self.look_for_signals();
        note!(self, "  vectors {start} and {count}: data {data:x}, action {action:x}");
        let since = self.world.turns;
        let vectors = start as u16..(start + count) as u16;
        for (vector, eventfd) in vectors.clone().zip(eventfds) {
            self.wired.insert(vector, Wired { eventfd, since });
        }
        for vector in vectors.filter(|_| action != wire::IRQ_ACTION_TRIGGER) {
            // Masks belong to vectors, with or without an eventfd.
            if action == wire::IRQ_ACTION_MASK {
                self.masked.insert(vector)
            } else {
                self.masked.remove(&vector)
            };
            if let Some(wired) = self.wired.get_mut(&vector) {
                wired.since = since;
            }
        }
    }
}
