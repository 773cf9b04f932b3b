//! Compare and Write as one: fused operations (Base 3.4.2).

use millrace_block::Lba;
use millrace_nvme_spec::{CommandId, Cqe, QueueId, Status, command::Fuse, identify::IdentifyController};

use super::{QueueError, QueuePair};
use crate::{
    command::Command,
    controller::Controller,
    dma::DmaRange,
    error::DriverError,
    namespace::{CommandError, Namespace},
};

/// A Compare and the Write that is carried out if it finds what it expects, with nothing between the two.
#[derive(Clone, Copy, Debug)]
pub struct Fused {
    pub(super) compare: Command,
    pub(super) write: Command,
}

impl Controller {
    /// Compare and Write (FUSES) of as many blocks as both buffers hold: `new` is written where `expected` is found.
    ///
    /// # Errors
    /// [`DriverError::NotOffered`]; those of [`Namespace::compare`] and [`Namespace::write`]; [`CommandError::BufferLength`] for buffers of
    /// different lengths; [`CommandError::TooLarge`] for more than the controller does as one (ACWU, NACWU).
    pub fn compare_and_write(
        &self,
        namespace: &Namespace,
        lba: Lba,
        expected: DmaRange,
        new: DmaRange,
    ) -> Result<Fused, DriverError> {
        let identity = self.identity().ok_or(DriverError::NotOffered("fused commands before it was started"))?;
        fuse(identity, namespace, lba, (expected, new))
    }
}

fn fuse(
    identity: &IdentifyController,
    namespace: &Namespace,
    lba: Lba,
    (expected, new): (DmaRange, DmaRange),
) -> Result<Fused, DriverError> {
    if !identity.fuses.compare_and_write() {
        return Err(DriverError::NotOffered("fused Compare and Write"));
    }
    let (mut compare, mut write) = (namespace.compare(lba, expected)?, namespace.write(lba, new)?);
    let bytes = new.len as u64;
    if expected.len != new.len {
        return Err(CommandError::BufferLength { len: bytes, expected: expected.len as u64 }.into());
    }
    let own = namespace.identify();
    // 0 is the controller's.
    let blocks_z = if own.nsfeat.atomics() && own.nacwu_z != 0 { own.nacwu_z } else { identity.acwu_z };
    let limit = (u64::from(blocks_z) + 1) * u64::from(namespace.block_size());
    if bytes > limit {
        return Err(CommandError::TooLarge { bytes, limit }.into());
    }
    compare.sqe.flags = compare.sqe.flags.with_fuse(Fuse::FIRST);
    write.sqe.flags = write.sqe.flags.with_fuse(Fuse::SECOND);
    Ok(Fused { compare, write })
}

impl QueuePair {
    /// Places both commands, one after the other, without ringing; the next [`ring`](Self::ring) tells of both by one write of the doorbell,
    /// as a controller wants it. Each ends by a completion of its own, the Compare's identifier is the first. Neither is placed when one
    /// cannot be.
    ///
    /// # Errors
    /// As of [`submit`](Self::submit).
    pub fn submit_fused(&mut self, fused: &Fused) -> Result<[CommandId; 2], QueueError> {
        let first = self.prepare(&fused.compare)?;
        let second = match self.prepare(&fused.write) {
            Ok(second) => second,
            Err(error) => {
                self.cids.release(first.cid);
                return Err(error);
            }
        };
        self.sq.push(first);
        self.sq.push(second);
        Ok([first.cid, second.cid])
    }

    /// Submits both commands, rings, and waits for both; whether the blocks were as expected, and so are written now.
    ///
    /// # Errors
    /// [`QueueError::Failed`] with the completion of the one that has failed, where the other was only aborted for that.
    pub fn execute_fused(&mut self, fused: &Fused) -> Result<bool, QueueError> {
        let [compare, write] = self.submit_fused(fused)?;
        self.ring()?;
        // The second is waited for whatever becomes of the first: its data are the controller's until it ends.
        let (compare, write) = (self.wait_for(compare), self.wait_for(write));
        judge(self.id, fused, compare?, write?)
    }
}

/// What both completions mean together.
fn judge(qid: QueueId, fused: &Fused, compare: Cqe, write: Cqe) -> Result<bool, QueueError> {
    let (first, second) = (compare.status(), write.status());
    if first.is_success() && second.is_success() {
        return Ok(true);
    }
    if first.code() == Status::COMPARE_FAILURE && !second.is_success() {
        return Ok(false);
    }
    let only_aborted = first.code() == Status::ABORTED_FAILED_FUSED && !second.is_success();
    let (command, cqe) = if first.is_success() || only_aborted { (&fused.write, write) } else { (&fused.compare, compare) };
    Err(QueueError::Failed { qid, opcode: command.sqe.opcode, cqe, status: cqe.status() })
}

#[cfg(test)]
mod tests {
    use millrace_nvme_spec::{
        NamespaceId, NvmOpcode,
        identify::{FusedSupport, IdentifyNamespace},
    };
    use zerocopy::FromZeros;

    use super::*;

    fn data(len: usize) -> DmaRange {
        DmaRange { iova: 1 << 32, len }
    }

    #[test]
    fn a_pair_is_of_one_range_and_no_larger_than_the_controller_does_as_one() {
        let mut identity = Box::new(IdentifyController::new_zeroed());
        let mut identify = Box::new(IdentifyNamespace::new_zeroed());
        (identify.nsze, identify.lbaf[0].lbads) = (1000, 9);
        let plain = Namespace::new(NamespaceId(7), identify.clone(), 64 << 10).unwrap();
        let pair = |identity: &IdentifyController, ns: &Namespace, lba, old, new| {
            fuse(identity, ns, Lba(lba), (data(old), data(new)))
        };
        assert!(matches!(pair(&identity, &plain, 0, 512, 512), Err(DriverError::NotOffered(_))));
        identity.fuses = FusedSupport::new().with_compare_and_write(true);
        identity.acwu_z = 3;
        let Fused { compare, write } = pair(&identity, &plain, 5, 2048, 2048).unwrap();
        assert_eq!((compare.sqe.nvm_opcode(), compare.sqe.flags.fuse()), (NvmOpcode::COMPARE, Fuse::FIRST));
        assert_eq!((write.sqe.nvm_opcode(), write.sqe.flags.fuse()), (NvmOpcode::WRITE, Fuse::SECOND));
        for half in [compare, write] {
            assert_eq!((half.sqe.nsid, half.sqe.cdw10_11(), half.sqe.cdw12), (NamespaceId(7), 5, 3));
        }
        let command = |result: Result<Fused, DriverError>| match result.unwrap_err() {
            DriverError::Command(error) => error,
            other => panic!("{other}"),
        };
        let large = CommandError::TooLarge { bytes: 2560, limit: 2048 };
        assert_eq!(command(pair(&identity, &plain, 5, 2560, 2560)), large);
        let uneven = CommandError::BufferLength { len: 1024, expected: 512 };
        assert_eq!(command(pair(&identity, &plain, 5, 512, 1024)), uneven);
        assert!(matches!(command(pair(&identity, &plain, 1000, 512, 512)), CommandError::OutOfRange { .. }));
        // The namespace's own limit, where it has one.
        identify.nsfeat = identify.nsfeat.with_atomics(true);
        identify.nacwu_z = 4;
        let own = Namespace::new(NamespaceId(7), identify, 64 << 10).unwrap();
        assert!(pair(&identity, &own, 5, 2560, 2560).is_ok());
    }
}
