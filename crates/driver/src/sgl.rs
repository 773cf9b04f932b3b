//! SGL descriptors for data in pieces of any length (Base 4.3.2).

use millrace_nvme_spec::{
    command::DataPointer,
    identify::{SglAlignment, SglSupport},
    sgl::SglDescriptor,
};
use thiserror::Error;

use crate::dma::DmaRange;

/// Why pieces cannot be described.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum SglError {
    /// The controller takes PRPs only, or the queue is the admin queue.
    #[error("the queue takes no SGLs")]
    NotSupported,
    /// A piece must have bytes, not wrap, and suit the controller's granularity.
    #[error(
        "a piece of {len} bytes at {iova:#x} is empty, wraps, or does not consist of whole units of {granularity} bytes"
    )]
    BadPiece {
        /// First address.
        iova: u64,
        /// Bytes.
        len: usize,
        /// What addresses and lengths are multiples of.
        granularity: usize,
    },
    /// More than the controller wants, or than there is room for.
    #[error("the data lie in more than {most} pieces")]
    TooMany {
        /// Pieces possible.
        most: usize,
    },
    /// The pieces are not the command's data.
    #[error("pieces of {len} bytes for a command that moves {expected}")]
    Length {
        /// Theirs.
        len: usize,
        /// The command's.
        expected: usize,
    },
}

/// What can be said by SGLs on a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SglLimits {
    /// What addresses and lengths are multiples of.
    pub granularity: usize,
    /// Pieces of one command at most; neighbours count as one.
    pub pieces: usize,
}

impl SglLimits {
    /// For a controller that reports `support`, with `list` bytes of room for each command's descriptors. `None`: it takes no SGLs.
    pub(crate) fn new(support: SglSupport, list: usize) -> Option<Self> {
        let granularity = match support.support() {
            SglAlignment::BYTE => 1,
            SglAlignment::DWORD => 4,
            _ => return None,
        };
        // The descriptor in the command, which leads to the list, counts as one.
        let wanted = match usize::from(support.threshold()) {
            0 => usize::MAX,
            threshold => threshold - 1,
        };
        Some(Self { granularity, pieces: (list / SglDescriptor::SIZE).min(wanted).max(1) })
    }

    fn block(self, DmaRange { iova, len }: DmaRange) -> Result<SglDescriptor, SglError> {
        let suits = len > 0 && iova.is_multiple_of(self.granularity as u64) && len.is_multiple_of(self.granularity);
        // Some controllers compute the address after the last byte.
        let length = u32::try_from(len).ok().filter(|length| suits && iova.checked_add(u64::from(*length)).is_some());
        let length = length.ok_or(SglError::BadPiece { iova, len, granularity: self.granularity })?;
        Ok(SglDescriptor::data_block(iova, length))
    }
}

/// Describes data of `expected` bytes in pieces, neighbours merged: one piece in the command itself, more through `write(index, descriptor)`
/// in one segment at `list`, which has room for `limits.pieces`.
pub(crate) fn describe(
    pieces: impl IntoIterator<Item = DmaRange>,
    expected: usize,
    limits: SglLimits,
    list: u64,
    mut write: impl FnMut(usize, SglDescriptor),
) -> Result<DataPointer, SglError> {
    // The newest descriptor is held back: it may grow.
    let (mut held, mut written, mut len) = (None::<SglDescriptor>, 0, 0_usize);
    for piece in pieces {
        let block = limits.block(piece)?;
        len = len.saturating_add(piece.len);
        let Some(last) = held.replace(block) else { continue };
        if let Some(both) = joined(last, block) {
            held = Some(both);
            continue;
        }
        // The one held back has its place too.
        if written + 1 >= limits.pieces {
            return Err(SglError::TooMany { most: limits.pieces });
        }
        write(written, last);
        written += 1;
    }
    let Some(last) = held.filter(|_| len == expected) else { return Err(SglError::Length { len, expected }) };
    if written == 0 {
        return Ok(last.into());
    }
    write(written, last);
    Ok(SglDescriptor::last_segment(list, ((written + 1) * SglDescriptor::SIZE) as u32).into())
}

/// Two data blocks as one, where the second begins at the end of the first.
fn joined(first: SglDescriptor, second: SglDescriptor) -> Option<SglDescriptor> {
    let adjoins = first.address + u64::from(first.length) == second.address;
    let length = first.length.checked_add(second.length).filter(|_| adjoins)?;
    Some(SglDescriptor::data_block(first.address, length))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIST: u64 = 0x9_0000_0000;
    const BYTES: SglLimits = SglLimits { granularity: 1, pieces: 4 };

    fn piece(iova: u64, len: usize) -> DmaRange {
        DmaRange { iova, len }
    }

    /// The descriptors, the one in the command first.
    fn describe_all(pieces: &[DmaRange], expected: usize, limits: SglLimits) -> Result<Vec<SglDescriptor>, SglError> {
        let mut list = Vec::new();
        let pointer = describe(pieces.iter().copied(), expected, limits, LIST, |index, descriptor| {
            assert_eq!(index, list.len(), "in their order, each once");
            list.push(descriptor);
        })?;
        list.insert(0, pointer.sgl1());
        Ok(list)
    }

    #[test]
    fn one_piece_needs_no_list_and_neighbours_are_one() {
        let all = describe_all(&[piece(0x1001, 7), piece(0x1008, 500), piece(0x11fc, 5)], 512, BYTES).unwrap();
        assert_eq!(all, [SglDescriptor::data_block(0x1001, 512)]);
    }

    #[test]
    fn several_pieces_are_one_last_segment() {
        let all = describe_all(&[piece(0x1001, 11), piece(0x9000, 500), piece(0x3, 1)], 512, BYTES).unwrap();
        let blocks = [(0x1001, 11), (0x9000, 500), (0x3, 1)].map(|(at, len)| SglDescriptor::data_block(at, len));
        assert_eq!(all[0], SglDescriptor::last_segment(LIST, 48));
        assert_eq!(all[1..], blocks);
    }

    #[test]
    fn what_cannot_be_said_is_refused() {
        let apart: Vec<DmaRange> = (0..5).map(|i| piece(i * 4096, 128)).collect();
        assert!(describe_all(&apart[..4], 512, BYTES).is_ok());
        assert_eq!(describe_all(&apart, 640, BYTES), Err(SglError::TooMany { most: 4 }));
        let dwords = SglLimits { granularity: 4, pieces: 4 };
        for (limits, iova, len) in [(BYTES, 0, 0), (dwords, 2, 4), (dwords, 4, 6), (BYTES, u64::MAX, 1), (BYTES, 0, 1 << 32)]
        {
            let error = SglError::BadPiece { iova, len, granularity: limits.granularity };
            assert_eq!(describe_all(&[piece(iova, len)], len, limits), Err(error));
        }
        for (pieces, expected) in [(&[piece(0, 512)][..], 1024), (&[piece(0, 512), piece(4096, 513)], 1024), (&[], 512)] {
            let len = pieces.iter().map(|piece| piece.len).sum();
            assert_eq!(describe_all(pieces, expected, BYTES), Err(SglError::Length { len, expected }));
        }
    }

    #[test]
    fn limits_are_the_controllers_and_the_rooms() {
        let byte = SglSupport::new().with_support(SglAlignment::BYTE);
        assert_eq!(SglLimits::new(SglSupport::new(), 4096), None);
        assert_eq!(SglLimits::new(byte, 4096), Some(SglLimits { granularity: 1, pieces: 256 }));
        assert_eq!(SglLimits::new(byte.with_threshold(17), 4096), Some(SglLimits { granularity: 1, pieces: 16 }));
        for (threshold, list) in [(0, 0), (1, 4096), (2, 4096)] {
            let dword = SglSupport::new().with_support(SglAlignment::DWORD).with_threshold(threshold);
            assert_eq!(SglLimits::new(dword, list), Some(SglLimits { granularity: 4, pieces: 1 }));
        }
    }

    proptest! {
        #[test]
        fn descriptors_name_the_bytes_of_the_pieces(pieces in proptest::collection::vec((0_u64..1 << 40, 1_usize..1 << 20, any::<bool>()), 1..40)) {
            let mut at = Vec::<DmaRange>::new();
            for (iova, len, joins) in pieces {
                let after = at.last().filter(|_| joins).map(|last| last.iova + last.len as u64);
                at.push(piece(after.unwrap_or(iova), len));
            }
            let expected = at.iter().map(|piece| piece.len).sum();
            let all = describe_all(&at, expected, SglLimits { granularity: 1, pieces: 256 }).unwrap();
            let blocks = if all.len() == 1 { &all[..] } else { &all[1..] };
            // Both as runs of addresses, neighbours merged.
            let merged = |runs: &mut dyn Iterator<Item = (u64, u64)>| {
                let mut merged = Vec::<(u64, u64)>::new();
                for (start, len) in runs {
                    match merged.last_mut() {
                        Some(last) if last.0 + last.1 == start => last.1 += len,
                        _ => merged.push((start, len)),
                    }
                }
                merged
            };
            let given = merged(&mut at.iter().map(|piece| (piece.iova, piece.len as u64)));
            let named: Vec<_> = blocks.iter().map(|block| (block.address, u64::from(block.length))).collect();
            prop_assert_eq!(&named, &given);
            prop_assert_eq!(all[0].length as usize, if blocks.len() == 1 { expected } else { blocks.len() * 16 });
        }
    }
}
