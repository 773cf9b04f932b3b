//! The requests of a volume on a physical controller, as commands.

use std::{future::poll_fn, time::Duration};

use millrace_block::{BlockCount, BlockError, IoOperation, Lba, Operation, Request, TaskContext};
use millrace_driver::{Command, CommandError, DmaRange, QueueError, spec::Status};
use millrace_memory::SegmentCursor;

use super::{
    NvmeVolume,
    lane::{BOUNCE, Begun, Bounce, Data, Lane, Outcome, Ticket, Turn},
};
use crate::naps::Naps;

/// The sleep of a task that looks at a queue in which nothing completes.
const NAP: Duration = Duration::from_micros(50);
/// How often is looked whether a controller is up again.
const WAIT: Duration = Duration::from_millis(5);
/// Times that a command is begun again after a reset, or because the controller asks for it.
const TRIES: u32 = 10;
/// Blocks that one Write Zeroes can name.
const MOST_ZEROES: u64 = 1 << 16;

/// Why a command did not succeed.
enum Failure {
    /// The controller said so.
    Status(Status),
    /// It is gone.
    Gone,
    /// The namespace has other blocks now.
    Changed,
    /// It never got far enough.
    Lost,
    Refused(QueueError),
}

/// A command in flight. Its memory is the device's: a task that is torn down meanwhile would leave it there.
struct InFlight(Ticket);

impl Drop for InFlight {
    fn drop(&mut self) {
        // A panic could be caught by a device's fence while the controller still owns the memory.
        eprintln!("millrace: {:?} of a physical controller was dropped in flight", self.0);
        std::process::abort();
    }
}

/// Waits for a buffer of the lane's.
async fn buffer<'l>(cx: TaskContext<'_>, lane: &'l Lane) -> Bounce<'l> {
    let (mut standing, mut naps) = (lane.for_buffer(), Naps::default());
    loop {
        if let Some(bounce) = lane.buffer(&mut standing).await {
            return bounce;
        }
        naps.nap(cx).await;
    }
}

/// Blocks that are made zeroes at once, by a command which may name so many bytes, or else by writing them.
fn most_zeroes(by_command: Option<u64>, max_transfer: usize, block: u64) -> u64 {
    let bytes = by_command.unwrap_or(BOUNCE.min(max_transfer) as u64);
    (bytes / block).clamp(1, MOST_ZEROES)
}

impl NvmeVolume {
    /// Blocks of the namespace in a block of the volume, as a power of two.
    fn scale(&self) -> u32 {
        self.shape.get().0.shift() - self.namespace.block_size().trailing_zeros()
    }

    /// A read, write or compare.
    pub(super) async fn transfer(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let scale = self.scale();
        // No overflow: `check` found the range within the volume, which is within the namespace.
        let (mut lba, mut blocks) = (request.lba.0 << scale, request.count.0 << scale);
        let block = self.namespace.block_size() as usize;
        let shift = block.trailing_zeros();
        let lane = self.disk.lane();
        let mut place = SegmentCursor::new(request.segments);
        while blocks > 0 {
            let left = usize::try_from(blocks << shift).unwrap_or(usize::MAX);
            let direct = lane.direct(&self.disk.table, &place, left.min(self.disk.max_transfer), block);
            // A little that goes directly is not worth a command of its own beside a buffer that takes more.
            let moved = if direct.len == left.min(self.disk.max_transfer) || direct.len >= BOUNCE {
                self.piece(cx, lane, request.operation, Lba(lba), Data::Direct(place.clone(), direct)).await?;
                place.skip(direct.len);
                direct.len
            } else {
                let len = left.min(BOUNCE).min(self.disk.max_transfer);
                let bounce = buffer(cx, lane).await;
                if request.operation != Operation::Read {
                    bounce.buffer().fill_from(&mut place.clone(), len);
                }
                self.piece(cx, lane, request.operation, Lba(lba), Data::Bounce(&bounce, len)).await?;
                if request.operation == Operation::Read {
                    bounce.buffer().drain_to(&mut place, len);
                } else {
                    place.skip(len);
                }
                len
            };
            lba += (moved >> shift) as u64;
            blocks -= (moved >> shift) as u64;
        }
        Ok(())
    }

    /// One command of a transfer.
    async fn piece(
        &self,
        cx: TaskContext<'_>,
        lane: &Lane,
        operation: Operation,
        lba: Lba,
        data: Data<'_>,
    ) -> Result<(), BlockError> {
        let len = match &data {
            Data::Direct(_, reach) => reach.len,
            Data::Bounce(_, len) => *len,
            Data::None => 0,
        };
        // The lane says where the data are; here only the length counts.
        let range = DmaRange { iova: 0, len };
        let command = match operation {
            Operation::Write { fua: true } => self.namespace.write_fua(lba, range),
            Operation::Write { fua: false } => self.namespace.write(lba, range),
            Operation::Compare => self.namespace.compare(lba, range),
            _ => self.namespace.read(lba, range),
        };
        let command = self.made(operation, command)?;
        self.carry_out(cx, lane, operation, &command, data).await
    }

    /// A flush.
    pub(super) async fn flush(&self, cx: TaskContext<'_>, _: Request<'_>) -> Result<(), BlockError> {
        self.carry_out(cx, self.disk.lane(), Operation::Flush, &self.namespace.flush(), Data::None).await
    }

    /// Makes a range read as zeroes.
    pub(super) async fn erase(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let scale = self.scale();
        let (mut lba, mut blocks) = (request.lba.0 << scale, request.count.0 << scale);
        let (fua, give_back) = match request.operation {
            Operation::WriteZeroes { fua, deallocate } => (fua, deallocate),
            _ => (false, true),
        };
        let lane = self.disk.lane();
        let block = u64::from(self.namespace.block_size());
        let by_command = self.abilities.write_zeroes.then_some(self.disk.zeroes_limit);
        let most = most_zeroes(by_command, self.disk.max_transfer, block);
        while blocks > 0 {
            let count = blocks.min(most);
            if self.abilities.write_zeroes {
                let give_back = give_back && self.abilities.gives_back;
                let command = self.namespace.write_zeroes(Lba(lba), BlockCount(count), give_back);
                let command = self.made(request.operation, command)?;
                self.carry_out(cx, lane, request.operation, &command, Data::None).await?;
            } else {
                let bounce = buffer(cx, lane).await;
                bounce.buffer().fill(0);
                let data = Data::Bounce(&bounce, (count * block) as usize);
                self.piece(cx, lane, Operation::Write { fua: false }, Lba(lba), data).await?;
            }
            lba += count;
            blocks -= count;
        }
        // Write Zeroes with FUA is left to a flush: it costs one command, whatever the range.
        if fua && self.abilities.flush { self.flush(cx, request).await } else { Ok(()) }
    }

    /// Copies a range on to another one.
    pub(super) async fn copy(&self, cx: TaskContext<'_>, request: Request<'_>) -> Result<(), BlockError> {
        let Operation::Copy { source } = request.operation else { return Err(BlockError::Unsupported) };
        let scale = self.scale();
        let (mut from, mut to, mut blocks) = (source.0 << scale, request.lba.0 << scale, request.count.0 << scale);
        let most = self.namespace.most_copied().0;
        let lane = self.disk.lane();
        // For the list of ranges.
        let bounce = buffer(cx, lane).await;
        while blocks > 0 {
            let count = blocks.min(most);
            let command = self.namespace.copy(&[(Lba(from), BlockCount(count))], Lba(to), bounce.buffer());
            let command = self.made(request.operation, command)?;
            let list = command.data.map_or(0, |data| data.len);
            self.carry_out(cx, lane, request.operation, &command, Data::Bounce(&bounce, list)).await?;
            (from, to, blocks) = (from + count, to + count, blocks - count);
        }
        Ok(())
    }

    /// A command whose range is wrong is a bug of ours, for `check` has seen the request, unless the namespace is smaller than it was: then it is
    /// the disk's fault, which others may have whole.
    fn made(&self, operation: Operation, command: Result<Command, CommandError>) -> Result<Command, BlockError> {
        command.map_err(|error| {
            if matches!(error, CommandError::OutOfRange { .. }) {
                if let Some(withheld) = self.log_limit.admit() {
                    tracing::error!(volume = self.name, withheld, "the volume's namespace has become too small: {error}");
                }
                return fault(operation, libc::EIO);
            }
            tracing::error!(volume = self.name, %error, "a command cannot be made");
            fault(operation, libc::EIO)
        })
    }

    /// Runs a command until it has succeeded, or failed for good.
    async fn carry_out(
        &self,
        cx: TaskContext<'_>,
        lane: &Lane,
        operation: Operation,
        command: &Command,
        data: Data<'_>,
    ) -> Result<(), BlockError> {
        let mut tries = 0;
        let failure = loop {
            let failure = match self.run(cx, lane, command, &data).await {
                Ok(()) => return Ok(()),
                Err(failure) => failure,
            };
            tries += 1;
            let again = match &failure {
                Failure::Lost => true,
                Failure::Status(status) => may_be_repeated(*status),
                Failure::Gone | Failure::Changed | Failure::Refused(_) => false,
            };
            if !again || tries == TRIES {
                break failure;
            }
            // What the controller asks for may take it seconds: the longer, the more often it has asked.
            let longer = if matches!(failure, Failure::Status(_)) { tries - 1 } else { 0 };
            cx.io(IoOperation::Sleep(WAIT * (1 << longer))).await;
        };
        Err(self.explain(operation, command, &failure))
    }

    /// Begins a command and waits for its end.
    async fn run(&self, cx: TaskContext<'_>, lane: &Lane, command: &Command, data: &Data<'_>) -> Result<(), Failure> {
        let (mut standing, mut naps) = (lane.for_place(), Naps::default());
        let ticket = loop {
            match lane.begin(&mut standing, &|| self.namespace.size().0 != 0, command, data).await {
                Begun::Flight(ticket) => break ticket,
                Begun::Full => naps.nap(cx).await,
                Begun::Refused(error) => return Err(Failure::Refused(error)),
                Begun::Changed => return Err(Failure::Changed),
                Begun::Down if self.disk.is_gone() => return Err(Failure::Gone),
                // It is being reset.
                Begun::Down => _ = cx.io(IoOperation::Sleep(WAIT)).await,
            }
        };
        let in_flight = InFlight(ticket);
        let outcome = loop {
            match poll_fn(|task| lane.poll_end(ticket, task)).await {
                Turn::Done(outcome) => break outcome,
                Turn::Nap => _ = cx.io(IoOperation::Sleep(NAP)).await,
                Turn::Sleep => {
                    if let Some(why) = lane.sleep(cx, ticket).await {
                        let address = self.disk.address();
                        tracing::warn!(%address, "a queue is polled from now on, without interrupts: {why}");
                    }
                }
            }
        };
        std::mem::forget(in_flight);
        match outcome {
            Outcome::Status(status) if status.is_success() => Ok(()),
            Outcome::Status(status) => Err(Failure::Status(status)),
            Outcome::Lost => Err(Failure::Lost),
        }
    }

    /// What a failure is for those above, and a line in the log.
    #[cold]
    fn explain(&self, operation: Operation, command: &Command, failure: &Failure) -> BlockError {
        let error = match failure {
            Failure::Status(status) => match refusal(operation, *status) {
                BlockError::Miscompare => return BlockError::Miscompare,
                error => error,
            },
            Failure::Gone => fault(operation, libc::ENODEV),
            Failure::Lost | Failure::Changed | Failure::Refused(_) => fault(operation, libc::EIO),
        };
        if let Some(withheld) = self.log_limit.admit() {
            let why = match failure {
                Failure::Status(status) => status.to_string(),
                Failure::Gone => "the controller is gone".to_owned(),
                Failure::Changed => "the namespace has other blocks, or none: its volume has to be opened anew".to_owned(),
                Failure::Lost => "the controller was reset too often meanwhile".to_owned(),
                Failure::Refused(error) => super::chain(error),
            };
            let (volume, address) = (&self.name, self.disk.address());
            tracing::warn!(volume, %address, opcode = command.sqe.opcode, withheld, "a command has failed: {why}; {error}");
        }
        error
    }
}

/// The error of a request that the controller did not carry out.
pub(super) fn fault(operation: Operation, errno: i32) -> BlockError {
    if operation.is_write() || operation == Operation::Flush {
        BlockError::WriteFault { errno }
    } else {
        BlockError::ReadFault { errno }
    }
}

/// What a status is for those above.
fn refusal(operation: Operation, status: Status) -> BlockError {
    match status.code() {
        Status::COMPARE_FAILURE => BlockError::Miscompare,
        Status::NAMESPACE_WRITE_PROTECTED | Status::WRITE_TO_READ_ONLY_RANGE | Status::ACCESS_DENIED
            if operation.is_write() =>
        {
            BlockError::ReadOnly
        }
        // A locked disk answers so to reads as well, which are no attempts to write.
        Status::NAMESPACE_WRITE_PROTECTED | Status::ACCESS_DENIED => fault(operation, libc::EACCES),
        Status::CAPACITY_EXCEEDED => BlockError::NoSpace,
        Status::UNRECOVERED_READ_ERROR => BlockError::ReadFault { errno: libc::EIO },
        _ => fault(operation, libc::EIO),
    }
}

/// Whether the controller may do it another time.
fn may_be_repeated(status: Status) -> bool {
    let passing = [
        Status::ABORT_REQUESTED,
        Status::ABORTED_SQ_DELETION,
        Status::ABORTED_PREEMPT_AND_ABORT,
        Status::NAMESPACE_NOT_READY,
        Status::INTERNAL_ERROR,
        Status::COMMAND_INTERRUPTED,
        Status::TRANSIENT_TRANSPORT_ERROR,
        Status::FORMAT_IN_PROGRESS,
    ];
    !status.dnr() && passing.contains(&status.code())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_disk_refuses_is_told_as_what_was_tried() {
        let write = Operation::Write { fua: false };
        let protected = [Status::NAMESPACE_WRITE_PROTECTED, Status::WRITE_TO_READ_ONLY_RANGE, Status::ACCESS_DENIED];
        for status in protected {
            for operation in [write, Operation::Deallocate, Operation::WriteZeroes { fua: false, deallocate: true }] {
                assert_eq!(refusal(operation, status.do_not_retry()), BlockError::ReadOnly, "{operation:?} {status}");
            }
        }
        let locked = Status::ACCESS_DENIED.do_not_retry();
        assert_eq!(refusal(Operation::Read, locked), BlockError::ReadFault { errno: libc::EACCES });
        assert_eq!(refusal(Operation::Flush, locked), BlockError::WriteFault { errno: libc::EACCES });
        assert_eq!(refusal(Operation::Compare, Status::COMPARE_FAILURE), BlockError::Miscompare);
        assert_eq!(refusal(write, Status::CAPACITY_EXCEEDED), BlockError::NoSpace);
    }

    #[test]
    fn zeroes_are_written_in_pieces_that_the_controller_takes() {
        let of = |max_transfer| most_zeroes(None, max_transfer, 512);
        assert_eq!([8 << 10, 64 << 10, 1 << 20].map(of), [16, 128, 128]);
        assert_eq!(most_zeroes(None, 4096, 4096), 1);
        let by_command = |limit| most_zeroes(Some(limit), 4096, 4096);
        assert_eq!([1 << 20, u64::MAX, 512].map(by_command), [256, MOST_ZEROES, 1]);
    }
}
