//! Memory that its owner lends: nobody has it longer than the owner is borrowed.

use std::marker::PhantomData;

use zerocopy::{FromBytes, IntoBytes};

use crate::{Segment, Target};

/// A [`Segment`] of somebody's who is borrowed meanwhile. Nothing here hands out the segment itself, which would know nothing of the owner.
#[derive(Clone, Copy, Debug)]
pub struct Lent<'a> {
    segment: Segment,
    owner: PhantomData<&'a ()>,
}

/// Memory that holds what somebody asked for.
#[derive(Clone, Copy, Debug)]
pub struct Reach<'a> {
    /// Where it is.
    pub segment: Lent<'a>,
    /// How it is best written.
    pub target: Target,
}

impl From<Segment> for Lent<'_> {
    /// Memory that is nobody's in particular: whoever made the segment has promised that it stays ([`Segment::new`]).
    #[inline]
    fn from(segment: Segment) -> Self {
        Self { segment, owner: PhantomData }
    }
}

impl Lent<'_> {
    /// The segment, for this crate's own work with it.
    #[inline]
    pub(crate) fn bare(&self) -> Segment {
        self.segment
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.segment.len()
    }

    /// True for no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.segment.is_empty()
    }

    /// As [`Segment::as_ptr`]; good for as long as the owner is borrowed.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.segment.as_ptr()
    }

    /// As [`Segment::part`].
    #[inline]
    pub fn part(&self, offset: usize, len: usize) -> Option<Self> {
        Some(Self { segment: self.segment.part(offset, len)?, ..*self })
    }

    /// As [`Segment::read_at`].
    #[inline]
    pub fn read_at(&self, offset: usize, out: &mut [u8]) {
        self.segment.read_at(offset, out);
    }

    /// As [`Segment::read_value`].
    #[inline]
    pub fn read_value<T: FromBytes + IntoBytes>(&self, offset: usize) -> T {
        self.segment.read_value(offset)
    }

    /// As [`Segment::write_at`].
    #[inline]
    pub fn write_at(&self, offset: usize, data: &[u8]) {
        self.segment.write_at(offset, data);
    }

    /// As [`Segment::fill`].
    #[inline]
    pub fn fill(&self, byte: u8) {
        self.segment.fill(byte);
    }

    /// As [`Segment::prefetch`].
    #[inline]
    pub fn prefetch(&self, offset: usize, len: usize) {
        self.segment.prefetch(offset, len);
    }

    /// As [`Segment::equals`].
    pub fn equals(&self, other: &Lent<'_>) -> bool {
        self.segment.equals(&other.segment)
    }
}
