//! The epoll set a shard sleeps on: its mailbox, its ring, its devices' descriptors.
#![forbid(unsafe_code)]

use std::{io, os::fd::AsFd, os::fd::OwnedFd, time::Duration};

use rustix::{
    event::{Timespec, epoll},
    io::Errno,
};

use crate::device::DeviceKey;

/// What woke the shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Mailbox,
    /// The ring's bell: completions are found by the next turn.
    Ring,
    Device(DeviceKey, u32),
}

const MAILBOX: u64 = u64::MAX;
const RING: u64 = u64::MAX - 1;

/// Events taken by one call.
const BATCH: usize = 64;

pub(crate) struct Poller {
    epoll: OwnedFd,
}

/// The events of one wait.
pub(crate) struct Events {
    events: Vec<epoll::Event>,
}

impl Events {
    pub(crate) fn new() -> Self {
        Self { events: Vec::with_capacity(BATCH) }
    }

    pub(crate) fn clear(&mut self) {
        self.events.clear();
    }

    pub(crate) fn len(&self) -> usize {
        self.events.len()
    }

    pub(crate) fn get(&self, at: usize) -> Option<Source> {
        let data = self.events.get(at)?.data.u64();
        Some(match data {
            MAILBOX => Source::Mailbox,
            RING => Source::Ring,
            _ => {
                let key = DeviceKey { index: (data >> 48) as u16, generation: (data >> 32) as u16 };
                Source::Device(key, data as u32)
            }
        })
    }
}

impl Poller {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)? })
    }

    pub(crate) fn add_mailbox(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(MAILBOX), epoll::EventFlags::IN)?)
    }

    pub(crate) fn add_ring(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(RING), epoll::EventFlags::IN)?)
    }

    pub(crate) fn add(&self, fd: impl AsFd, key: DeviceKey, token: u32) -> io::Result<()> {
        let data = u64::from(key.index) << 48 | u64::from(key.generation) << 32 | u64::from(token);
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(data), flags)?)
    }

    pub(crate) fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, fd)?)
    }

    /// Waits until a source is ready or the time is over; `None` waits for a source only. Everything is level-triggered: a
    /// source that became ready before the call ends it at once, so nothing is lost between the last look and the sleep.
    pub(crate) fn wait(&self, events: &mut Events, timeout: Option<Duration>) -> io::Result<()> {
        events.events.clear();
        let timeout = timeout.map(|t| Timespec {
            tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(t.subsec_nanos()),
        });
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events.events), timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
