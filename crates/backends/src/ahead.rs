//! Of several requests to a volume whose data lie in memory, what the later ones read is brought near.

use millrace_block::{Operation, Request, Volume};

/// How far ahead of the one that is copied.
const AHEAD: usize = 2;

/// The request at a place is about to be done. Whether it is any use to ask again.
#[inline]
pub(crate) fn prefetch_ahead(volume: &impl Volume, requests: &[Request<'_>], at: usize) -> bool {
    let next = requests.get(at + AHEAD).filter(|next| next.operation == Operation::Read);
    next.is_none_or(|next| volume.prefetch(next.lba, next.count))
}
