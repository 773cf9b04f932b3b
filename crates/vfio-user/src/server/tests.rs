use std::cell::RefCell;
use std::io::{ErrorKind, PipeReader, Read, Write};

use proptest::prelude::*;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

mod kept;

use super::*;
use crate::codec::{HEADER_SIZE, MAX_FDS, MAX_MESSAGE};
use crate::device::{DmaUnmap, IrqAction};
use crate::toy::{BAR_SIZE, BROKEN, Call, Toy, inode, memfd};

/// A raw client, a connection and its device, in one thread.
struct Bench {
    client: UnixStream,
    connection: Connection,
    toy: Toy,
}

fn message(id: u16, command: u16, flags: u32, payload: &[u8]) -> Vec<u8> {
    let size = (HEADER_SIZE + payload.len()) as u32;
    let header = Header { id, command, size, flags, error: 0 };
    [header.as_bytes(), payload].concat()
}

fn request(id: u16, command: Command, payload: &[u8]) -> Vec<u8> {
    message(id, command as u16, 0, payload)
}

fn send_with_fds(client: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    let sent = sendmsg(client, &[std::io::IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
    assert_eq!(sent, bytes.len());
}

impl Bench {
    fn before_version() -> Self {
        let (client, server) = UnixStream::pair().unwrap();
        client.set_nonblocking(true).unwrap();
        Self { client, connection: Connection::new(server).unwrap(), toy: Toy::new() }
    }

    fn new() -> Self {
        let mut bench = Self::before_version();
        let proposal = b"\0\0\0\0{\"capabilities\":{\"max_msg_fds\":16,\"write_multiple\":true}}\0";
        bench.send(&request(0, Command::Version, proposal));
        bench.serve().unwrap();
        let (header, payload) = bench.reply();
        assert_eq!(header.reply_error(), None);
        assert_eq!(payload, proposal);
        bench
    }

    fn send(&mut self, bytes: &[u8]) {
        self.client.write_all(bytes).unwrap();
    }

    fn serve(&mut self) -> Result<Progress, ConnectionError> {
        self.connection.serve(&mut self.toy, 100)
    }

    /// One message from the server, which must be there.
    fn reply(&mut self) -> (Header, Vec<u8>) {
        let mut header = Header::default();
        self.client.read_exact(header.as_mut_bytes()).unwrap();
        let mut payload = vec![0; header.payload_size()];
        self.client.read_exact(&mut payload).unwrap();
        (header, payload)
    }

    fn silent(&mut self) -> bool {
        matches!(self.client.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
    }

    /// The answer to one request: its payload or its errno.
    fn ask(&mut self, command: Command, payload: &[u8]) -> Result<Vec<u8>, Errno> {
        self.send(&request(99, command, payload));
        self.serve().unwrap();
        let (header, payload) = self.reply();
        assert_eq!((header.id, header.command), (99, command as u16));
        assert!(self.silent(), "one reply to one request");
        header.reply_error().map_or(Ok(payload), Err)
    }

    fn fails(&mut self) -> ConnectionError {
        self.serve().expect_err("the connection ends")
    }
}

fn access(region: u32, offset: u64, count: u32) -> Vec<u8> {
    wire::RegionAccess { offset, region, count }.as_bytes().to_vec()
}

fn write(offset: u64, data: &[u8]) -> Vec<u8> {
    [&access(0, offset, data.len() as u32), data].concat()
}

fn map(address: u64) -> Vec<u8> {
    wire::DmaMap { argsz: 32, flags: 3, offset: 0, address, size: 0x1000 }.as_bytes().to_vec()
}

fn unmap(address: u64) -> Vec<u8> {
    wire::DmaUnmap { argsz: 24, flags: 0, address, size: 0x1000 }.as_bytes().to_vec()
}

/// A pipe whose reader learns when every copy of the writer is closed.
fn closed_detector() -> (PipeReader, std::io::PipeWriter) {
    std::io::pipe().unwrap()
}

fn all_closed(mut reader: PipeReader) -> bool {
    rustix::io::ioctl_fionbio(&reader, true).unwrap();
    matches!(reader.read(&mut [0]), Ok(0))
}

#[test]
fn nothing_comes_before_the_version() {
    let mut bench = Bench::before_version();
    bench.send(&request(3, Command::DeviceReset, &[]));
    assert!(matches!(bench.fails(), ConnectionError::Negotiation(VersionError::NotFirst(13))));
    assert_eq!(bench.reply().0.reply_error(), Some(Errno::INVAL));
    assert_eq!(bench.toy.calls, []);
}

#[test]
fn a_version_that_does_not_fit_ends_the_connection_with_an_answer() {
    for payload in [&b"\x01\0\0\0"[..], b"\0\0\0\0{garbage\0", b"\0\0\0\0{}"] {
        let mut bench = Bench::before_version();
        bench.send(&request(3, Command::Version, payload));
        assert!(matches!(bench.fails(), ConnectionError::Negotiation(_)));
        assert_eq!(bench.reply().0.reply_error(), Some(Errno::INVAL));
    }
    let mut bench = Bench::new();
    assert_eq!(bench.ask(Command::Version, b"\0\0\0\0"), Err(Errno::INVAL));
    assert_eq!(bench.connection.take_rejection(), Some(ProtocolError::VersionTwice));
    assert_eq!(bench.connection.take_rejection(), None);
}

#[test]
fn a_slow_writer_is_waited_for_byte_by_byte() {
    let mut bench = Bench::new();
    let bytes = request(5, Command::RegionWrite, &write(0x10, b"slow"));
    for byte in &bytes {
        assert!(bench.silent());
        bench.send(&[*byte]);
        assert_eq!(bench.serve().unwrap(), Progress::Idle);
    }
    assert_eq!(bench.reply().0.id, 5);
    assert_eq!(bench.toy.calls, [Call::Write(0, 0x10, b"slow".to_vec())]);
}

#[test]
fn every_truncation_is_told_from_a_clean_end() {
    let bytes = request(5, Command::RegionWrite, &write(0x10, b"half"));
    for length in 0..bytes.len() {
        let mut bench = Bench::new();
        bench.send(&bytes[..length]);
        assert_eq!(bench.serve().unwrap(), Progress::Idle);
        bench.client.shutdown(std::net::Shutdown::Both).unwrap();
        let error = bench.fails();
        assert_eq!(error.is_closed(), length == 0, "{error}");
        assert_eq!(bench.toy.calls, []);
    }
}

#[test]
fn bad_framing_ends_the_connection() {
    let good = Header { id: 1, command: 13, size: 16, flags: 0, error: 0 };
    for bad in [
        Header { size: 15, ..good },
        Header { size: 0, ..good },
        Header { size: MAX_MESSAGE as u32 + 1, ..good },
        Header { size: u32::MAX, ..good },
        Header { flags: 2, ..good },
    ] {
        let mut bench = Bench::new();
        bench.send(bad.as_bytes());
        assert!(matches!(bench.fails(), ConnectionError::Transport(TransportError::Frame(_))));
    }
    let mut bench = Bench::new();
    bench.send(&message(4, Command::DmaRead as u16, wire::TYPE_REPLY, &[]));
    assert!(matches!(bench.fails(), ConnectionError::UnexpectedReply { id: 4, .. }));
}

#[test]
fn a_claimed_size_costs_no_memory() {
    let mut bench = Bench::new();
    let header = Header { id: 1, command: 10, size: MAX_MESSAGE as u32, flags: 0, error: 0 };
    bench.send(header.as_bytes());
    assert_eq!(bench.serve().unwrap(), Progress::Idle);
    assert!(bench.connection.transport.input_capacity() <= 64 * 1024);
}

#[test]
fn descriptors_stay_with_their_message() {
    let mut bench = Bench::new();
    let files: Vec<_> = (0..6).map(|_| memfd(0x1000)).collect();
    // All of it lies in the socket before the server looks: messages with and without a file, small writes between.
    for (i, file) in (0u16..).zip(&files) {
        let address = u64::from(i) * 0x10000;
        bench.send(&request(i, Command::RegionWrite, &write(0x20, &[i as u8])));
        send_with_fds(&bench.client, &request(i, Command::DmaMap, &map(address)), &[file.as_fd()]);
        bench.send(&request(i, Command::DmaMap, &map(address + 0x8000)));
    }
    // One send with two messages: the file belongs to the first byte.
    let extra = memfd(0x1000);
    let two = [request(7, Command::DmaMap, &map(1 << 40)), request(8, Command::DmaMap, &map(1 << 41))].concat();
    send_with_fds(&bench.client, &two, &[extra.as_fd()]);
    bench.serve().unwrap();
    let got: Vec<_> = bench
        .toy
        .calls
        .iter()
        .filter_map(|call| match call {
            Call::Map(address, _, _, file) => Some((*address, *file)),
            _ => None,
        })
        .collect();
    let mut expected = Vec::new();
    for (i, file) in (0u64..).zip(&files) {
        expected.push((i * 0x10000, Some(inode(file))));
        expected.push((i * 0x10000 + 0x8000, None));
    }
    expected.push((1 << 40, Some(inode(&extra))));
    expected.push((1 << 41, None));
    assert_eq!(got, expected);
}

#[test]
fn a_file_may_come_with_any_byte_of_its_message() {
    let mut bench = Bench::new();
    let file = memfd(0x1000);
    let bytes = request(1, Command::DmaMap, &map(0x1000));
    for cut in [0, 5, 16, 20, bytes.len() - 1] {
        bench.toy.calls.clear();
        bench.send(&bytes[..cut]);
        bench.serve().unwrap();
        send_with_fds(&bench.client, &bytes[cut..], &[file.as_fd()]);
        bench.serve().unwrap();
        assert_eq!(bench.toy.calls, [Call::Map(0x1000, 0x1000, 0, Some(inode(&file)))]);
        assert_eq!(bench.reply().0.reply_error(), None);
    }
}

#[test]
fn too_many_descriptors_end_the_connection_and_are_closed() {
    for count in [MAX_FDS + 1, 40] {
        let mut bench = Bench::new();
        let (reader, writer) = closed_detector();
        send_with_fds(&bench.client, &request(1, Command::DmaMap, &map(0)), &vec![writer.as_fd(); count]);
        drop(writer);
        assert!(matches!(bench.fails(), ConnectionError::Transport(TransportError::TooManyFds)));
        drop(bench);
        assert!(all_closed(reader));
    }
    // The same number, a few with each part of a message.
    let mut bench = Bench::new();
    let (_reader, writer) = closed_detector();
    let bytes = request(1, Command::DmaMap, &map(0));
    send_with_fds(&bench.client, &bytes[..20], &[writer.as_fd(); 9]);
    send_with_fds(&bench.client, &bytes[20..], &[writer.as_fd(); 9]);
    assert!(matches!(bench.fails(), ConnectionError::Transport(TransportError::TooManyFds)));
}

#[test]
fn unwanted_and_missing_descriptors_are_refused_and_closed() {
    let irqs =
        wire::SetIrqs { argsz: 20, flags: wire::IRQ_DATA_EVENTFD | wire::IRQ_ACTION_TRIGGER, index: 2, start: 0, count: 3 };
    let reset = request(1, Command::DeviceReset, &[]);
    let irqs = request(1, Command::DeviceSetIrqs, irqs.as_bytes());
    for (bytes, count) in [(reset, 1), (irqs, 2)] {
        let mut bench = Bench::new();
        let (reader, writer) = closed_detector();
        send_with_fds(&bench.client, &bytes, &vec![writer.as_fd(); count]);
        drop(writer);
        bench.serve().unwrap();
        assert_eq!(bench.reply().0.reply_error(), Some(Errno::INVAL));
        assert!(all_closed(reader), "although the connection lives on");
        assert_eq!(bench.toy.calls, []);
    }
}

thread_local!(static CLOSED: RefCell<Vec<u64>> = const { RefCell::new(Vec::new()) });

/// What closes descriptors in the place of the connection's thread.
fn close_elsewhere(fd: OwnedFd) {
    CLOSED.with_borrow_mut(|closed| closed.push(inode(&fd)));
    drop(fd);
}

/// How many descriptors of a file were closed that way since the last call.
fn closed_elsewhere(file: &OwnedFd) -> usize {
    CLOSED.take().into_iter().filter(|closed| *closed == inode(file)).count()
}

#[test]
fn what_a_client_hands_in_is_closed_where_it_is_told_to() {
    let mut bench = Bench::new();
    bench.connection = bench.connection.closing_with(close_elsewhere);
    let file = memfd(0x1000);
    let irqs = |index, count| {
        let flags = wire::IRQ_DATA_EVENTFD | wire::IRQ_ACTION_TRIGGER;
        wire::SetIrqs { argsz: 20, flags, index, start: 0, count }.as_bytes().to_vec()
    };
    let cases = [
        // Refused for their form or their range, or by the device; or taken, and dropped there.
        (Command::DeviceReset, vec![], 1, Some(Errno::INVAL)),
        (Command::DmaMap, map(0x1000), 2, Some(Errno::INVAL)),
        (Command::DmaMap, vec![0; 3], 1, Some(Errno::INVAL)),
        (Command::DeviceSetIrqs, irqs(2, 3), 2, Some(Errno::INVAL)),
        (Command::DeviceSetIrqs, irqs(9, 1), 1, Some(Errno::INVAL)),
        (Command::DmaMap, map(0x1000), 1, None),
        (Command::DmaMap, map(0x1000), 1, Some(Errno::EXIST)),
        (Command::DmaUnmap, unmap(0x1000), 1, None),
    ];
    for (command, payload, count, errno) in cases {
        send_with_fds(&bench.client, &request(1, command, &payload), &vec![file.as_fd(); count]);
        bench.serve().unwrap();
        let (header, _) = bench.reply();
        assert_eq!((header.reply_error(), closed_elsewhere(&file)), (errno, count), "{command:?}");
    }
    // Far too many: the connection ends at the first such message.
    for _ in 0..2 {
        send_with_fds(&bench.client, &request(1, Command::DmaMap, &map(0)), &[file.as_fd(); 60]);
    }
    assert!(matches!(bench.fails(), ConnectionError::Transport(TransportError::TooManyFds)));
    let socket = inode(&bench.connection);
    drop(bench);
    let closed = CLOSED.take();
    assert_eq!(closed.iter().filter(|closed| **closed == inode(&file)).count(), 60);
    assert!(closed.contains(&socket), "with the other 60 in it");
}

#[test]
fn interrupts_beyond_the_device_are_refused() {
    let mut bench = Bench::new();
    let flags = wire::IRQ_DATA_NONE | wire::IRQ_ACTION_TRIGGER;
    let set = |index, start, count| wire::SetIrqs { argsz: 20, flags, index, start, count };
    for bad in [set(5, 0, 0), set(2, 40, 1), set(2, 0, 41), set(2, u32::MAX, 2), set(2, 1, u32::MAX), set(0, 0, 1)] {
        assert_eq!(bench.ask(Command::DeviceSetIrqs, bad.as_bytes()), Err(Errno::INVAL), "{bad:?}");
    }
    assert_eq!(bench.toy.calls, []);
    assert_eq!(bench.ask(Command::DeviceSetIrqs, set(2, 39, 1).as_bytes()), Ok(vec![]));
    assert_eq!(bench.ask(Command::DeviceSetIrqs, set(0, 0, 0).as_bytes()), Ok(vec![]));
    let all = Call::Irqs(0, 0, 0, IrqAction::Trigger, None);
    assert_eq!(bench.toy.calls, [Call::Irqs(2, 39, 1, IrqAction::Trigger, None), all]);
}

#[test]
fn accesses_outside_regions_are_refused() {
    let mut bench = Bench::new();
    let read = |bench: &mut Bench, region, offset, count| bench.ask(Command::RegionRead, &access(region, offset, count));
    assert_eq!(read(&mut bench, 9, 0, 1), Err(Errno::INVAL));
    assert_eq!(read(&mut bench, 1, 0, 1), Err(Errno::INVAL));
    assert_eq!(read(&mut bench, 0, BAR_SIZE - 3, 4), Err(Errno::INVAL));
    assert_eq!(read(&mut bench, 0, u64::MAX, 4), Err(Errno::INVAL));
    let reply = read(&mut bench, 0, BAR_SIZE - 4, 4).unwrap();
    assert_eq!(reply, [&access(0, BAR_SIZE - 4, 4)[..], &[0xfc, 0xfd, 0xfe, 0xff]].concat());
    assert_eq!(read(&mut bench, 0, BAR_SIZE, 0), Ok(access(0, BAR_SIZE, 0)));
    let rom = [&access(6, 0, 4)[..], b"data"].concat();
    assert_eq!(bench.ask(Command::RegionWrite, &rom), Err(Errno::PERM));
    assert_eq!(bench.ask(Command::RegionWrite, &write(BAR_SIZE - 1, b"ab")), Err(Errno::INVAL));
    assert_eq!(bench.toy.calls, []);
}

#[test]
fn the_devices_errors_reach_the_client() {
    let mut bench = Bench::new();
    assert_eq!(bench.ask(Command::RegionWrite, &write(BROKEN, b"x")), Err(Errno::IO));
    assert_eq!(bench.ask(Command::DmaMap, &map(0x1000)), Ok(vec![]));
    assert_eq!(bench.ask(Command::DmaMap, &map(0x1000)), Err(Errno::EXIST));
    assert_eq!(bench.ask(Command::DeviceFeature, &[0; 8]), Err(Errno::OPNOTSUPP));
    assert_eq!(bench.ask(Command::DirtyPages, &[0; 8]), Err(Errno::OPNOTSUPP));
    bench.send(&message(1, 200, 0, &[]));
    bench.serve().unwrap();
    assert_eq!(bench.reply().0.reply_error(), Some(Errno::NOSYS));
}

#[test]
fn posted_requests_are_done_and_not_answered() {
    let mut bench = Bench::new();
    let command = Command::RegionWrite as u16;
    bench.send(&message(1, command, wire::NO_REPLY, &write(0x40, b"posted")));
    bench.send(&message(2, command, wire::NO_REPLY, &write(BROKEN, b"error")));
    bench.send(&message(3, command, wire::NO_REPLY, &write(BAR_SIZE, b"range")));
    bench.serve().unwrap();
    assert!(bench.silent());
    assert_eq!(bench.toy.calls, [Call::Write(0, 0x40, b"posted".to_vec())]);
}

#[test]
fn write_multi_tells_how_far_it_came() {
    let mut bench = Bench::new();
    let single = |offset| wire::SingleWrite { offset, region: 0, count: 2, data: *b"ab------" };
    let multi = |offsets: &[u64]| {
        let mut payload = wire::WriteMulti { count: offsets.len() as u64 }.as_bytes().to_vec();
        for &offset in offsets {
            payload.extend(single(offset).as_bytes());
        }
        payload
    };
    let reply = bench.ask(Command::RegionWriteMulti, &multi(&[0x40, 0x50, BROKEN, 0x60])).unwrap();
    assert_eq!(reply, 2u64.to_ne_bytes());
    let done = |offset| Call::Write(0, offset, b"ab".to_vec());
    assert_eq!(bench.toy.calls, [done(0x40), done(0x50)]);
    assert_eq!(bench.ask(Command::RegionWriteMulti, &multi(&[BROKEN])), Err(Errno::IO));
    assert_eq!(bench.ask(Command::RegionWriteMulti, &multi(&[])).unwrap(), 0u64.to_ne_bytes());
}

#[test]
fn io_event_fds_are_none() {
    let mut bench = Bench::new();
    let ask = |index| wire::RegionIoFds { argsz: 4096, flags: 0, index, count: 0 };
    let reply = bench.ask(Command::DeviceGetRegionIoFds, ask(0).as_bytes()).unwrap();
    assert_eq!(reply, wire::RegionIoFds { argsz: 16, ..ask(0) }.as_bytes());
    assert_eq!(bench.ask(Command::DeviceGetRegionIoFds, ask(9).as_bytes()), Err(Errno::INVAL));
}

#[test]
fn a_deferred_request_holds_back_all_others() {
    let mut bench = Bench::new();
    bench.toy.slow = true;
    bench.send(&request(1, Command::DmaUnmap, &unmap(0x1000)));
    bench.send(&request(2, Command::DmaMap, &map(0x1000)));
    bench.send(&request(3, Command::DeviceReset, &[]));
    bench.send(&request(4, Command::DmaMap, &map(0x2000)));
    let range = DmaUnmap::Range { address: 0x1000, size: 0x1000 };
    for _ in 0..3 {
        assert_eq!(bench.serve().unwrap(), Progress::Deferred);
        assert!(bench.connection.is_deferred() && !bench.connection.wants_read() && bench.silent());
        assert_eq!(bench.toy.calls, [Call::Unmap(range)]);
    }
    bench.connection.finish_deferred(Ok(())).unwrap();
    assert_eq!(bench.reply(), (Header { id: 1, command: 3, size: 40, flags: 1, error: 0 }, unmap(0x1000)));
    assert_eq!(bench.serve().unwrap(), Progress::Deferred);
    assert_eq!(bench.reply().0.id, 2);
    assert_eq!(bench.toy.calls.last(), Some(&Call::Reset));
    assert!(bench.silent());
    bench.connection.finish_deferred(Err(Errno::BUSY)).unwrap();
    assert_eq!((bench.reply().0.reply_error(), bench.serve().unwrap()), (Some(Errno::BUSY), Progress::Idle));
    assert_eq!(bench.reply().0.id, 4);
}

#[test]
fn a_deferred_posted_request_is_not_answered_either() {
    let mut bench = Bench::new();
    bench.toy.slow = true;
    bench.send(&message(1, Command::DmaUnmap as u16, wire::NO_REPLY, &unmap(0x1000)));
    assert_eq!(bench.serve().unwrap(), Progress::Deferred);
    bench.connection.finish_deferred(Ok(())).unwrap();
    assert_eq!(bench.serve().unwrap(), Progress::Idle);
    assert!(bench.silent());
}

#[test]
#[should_panic(expected = "no request is deferred")]
fn finishing_nothing_is_a_mistake() {
    let _ = Bench::new().connection.finish_deferred(Ok(()));
}

#[test]
fn client_memory_is_read_and_written_by_messages() {
    let mut bench = Bench::new();
    let read = bench.connection.dma_read(0x7000, 4).unwrap();
    let written = bench.connection.dma_write(0x9000, b"abc").unwrap();
    let (first, payload) = bench.reply();
    assert_eq!((first.command, first.kind()), (11, Ok(Kind::Request)));
    assert_eq!(payload, wire::DmaAccess { address: 0x7000, count: 4 }.as_bytes());
    let (second, payload) = bench.reply();
    assert_eq!(payload, [wire::DmaAccess { address: 0x9000, count: 3 }.as_bytes(), b"abc"].concat());
    // Answered out of order: only the id counts.
    bench.send(&message(second.id, 12, wire::TYPE_REPLY, &[]));
    let answer = [wire::DmaAccess { address: 0x7000, count: 4 }.as_bytes(), b"wxyz"].concat();
    bench.send(&message(first.id, 11, wire::TYPE_REPLY, &answer));
    assert_eq!(bench.serve().unwrap(), Progress::Idle);
    let replies = [Call::DmaReply(written, Ok(vec![])), Call::DmaReply(read, Ok(b"wxyz".to_vec()))];
    assert_eq!(bench.toy.calls, replies);
    let refused = bench.connection.dma_read(0x7000, 4).unwrap();
    let (header, _) = bench.reply();
    bench.send(Header::error_to(&header, Errno::FAULT).as_bytes());
    bench.serve().unwrap();
    assert_eq!(bench.toy.calls.last(), Some(&Call::DmaReply(refused, Err(Errno::FAULT))));
}

#[test]
fn memory_answers_that_do_not_fit_end_the_connection() {
    let access = |address, count| wire::DmaAccess { address, count }.as_bytes().to_vec();
    let data = |head: Vec<u8>, data: &[u8]| [&head, data].concat();
    for (id, command, payload) in [
        (0, 11, vec![]),
        (0, 11, access(0x7000, 4)),
        (0, 11, data(access(0x7000, 4), b"abc")),
        (0, 11, data(access(0x7000, 4), b"abcde")),
        (0, 11, data(access(0x7000, 3), b"abc")),
        (0, 11, data(access(0x7001, 4), b"abcd")),
        (0, 12, data(access(0x7000, 4), b"abcd")),
        (1, 11, data(access(0x7000, 4), b"abcd")),
    ] {
        let mut bench = Bench::new();
        bench.connection.dma_read(0x7000, 4).unwrap();
        bench.send(&message(id, command, wire::TYPE_REPLY, &payload));
        assert!(matches!(bench.fails(), ConnectionError::UnexpectedReply { .. }));
        assert_eq!(bench.toy.calls, []);
    }
}

#[test]
fn requests_to_the_client_are_bounded() {
    let mut bench = Bench::before_version();
    assert!(matches!(bench.connection.dma_read(0, 1), Err(DmaError::NotReady)));
    let mut bench = Bench::new();
    assert!(matches!(bench.connection.dma_read(0, 0), Err(DmaError::Size { .. })));
    assert!(matches!(bench.connection.dma_read(0, MAX_TRANSFER + 1), Err(DmaError::Size { .. })));
    for _ in 0..MAX_OUTSTANDING {
        bench.connection.dma_read(0, 1).unwrap();
    }
    assert!(matches!(bench.connection.dma_read(0, 1), Err(DmaError::Busy)));
}

#[test]
fn memory_answers_are_found_behind_a_deferred_request() {
    let mut bench = Bench::new();
    bench.toy.slow = true;
    let id = bench.connection.dma_read(0x7000, 2).unwrap();
    let asked = bench.reply().0;
    bench.send(&request(1, Command::DmaUnmap, &unmap(0x1000)));
    bench.send(&request(2, Command::DmaMap, &map(0x1000)));
    bench.send(&request(3, Command::RegionWrite, &write(0x40, b"later")));
    let answer = [wire::DmaAccess { address: 0x7000, count: 2 }.as_bytes(), b"ok"].concat();
    bench.send(&message(asked.id, 11, wire::TYPE_REPLY, &answer));
    assert_eq!(bench.serve().unwrap(), Progress::Deferred);
    let range = DmaUnmap::Range { address: 0x1000, size: 0x1000 };
    assert_eq!(bench.toy.calls, [Call::Unmap(range), Call::DmaReply(id, Ok(b"ok".to_vec()))]);
    bench.connection.finish_deferred(Ok(())).unwrap();
    assert_eq!(bench.serve().unwrap(), Progress::Idle);
    assert_eq!([bench.reply().0.id, bench.reply().0.id, bench.reply().0.id], [1, 2, 3]);
}

#[test]
fn a_flood_behind_a_deferred_request_ends_the_connection() {
    let mut bench = Bench::new();
    bench.toy.slow = true;
    bench.connection.dma_read(0x7000, 2).unwrap();
    bench.send(&request(1, Command::DeviceReset, &[]));
    let nothing = request(2, Command::DeviceReset, &[]);
    let end = (0..MAX_BACKLOG + 10).find_map(|_| {
        bench.send(&nothing);
        bench.serve().err()
    });
    assert!(matches!(end, Some(ConnectionError::Flood { messages }) if messages == MAX_BACKLOG + 1));
}

#[test]
fn a_client_that_never_reads_is_not_read_from() {
    let mut bench = Bench::new();
    let ask = request(1, Command::RegionRead, &access(0, 0, 100_000));
    let mut asked = 0;
    // Until neither side moves any more.
    loop {
        let sent = bench.client.write(&ask);
        bench.serve().unwrap();
        assert!(bench.connection.transport.output_bytes() <= OUTPUT_HIGH + MAX_MESSAGE);
        match sent {
            Ok(count) => assert_eq!(count, ask.len(), "small messages are sent whole or not at all"),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                break;
            }
        }
        asked += 1;
    }
    assert!(bench.connection.wants_write() && !bench.connection.wants_read());
    // Then it reads after all: nothing was lost.
    let mut answered = 0;
    let mut bytes = Vec::new();
    while answered < asked {
        let mut chunk = vec![0; 65536];
        let count = bench.client.read(&mut chunk).unwrap();
        bytes.extend_from_slice(&chunk[..count]);
        bench.serve().unwrap();
        answered = bytes.len() / (HEADER_SIZE + 16 + 100_000);
    }
    assert_eq!(bytes.len(), asked * (HEADER_SIZE + 16 + 100_000));
    for reply in bytes.chunks(HEADER_SIZE + 16 + 100_000) {
        assert!(reply[32..] == bench.toy.bar[..100_000]);
    }
    assert!(!bench.connection.wants_write() && bench.connection.wants_read());
}

#[test]
fn a_client_that_never_reads_does_not_hoard_our_files() {
    let mut bench = Bench::new();
    let ask = wire::RegionInfo { argsz: 0x1000, ..Default::default() };
    let asked = request(1, Command::DeviceGetRegionInfo, ask.as_bytes());
    // Until the socket and our patience are full.
    while bench.client.write_all(&asked).is_ok() {
        if bench.serve().is_err() {
            // The system has a limit of its own on files under way.
            return;
        }
        assert!(bench.connection.transport.output_fds() <= OUTPUT_FDS);
        assert!(bench.connection.transport.output_bytes() < OUTPUT_HIGH, "files are the limit");
    }
    assert_eq!(bench.connection.transport.output_fds(), OUTPUT_FDS);
    assert!(!bench.connection.wants_read());
    for _ in 0..1000 {
        bench.reply();
        bench.connection.flush().unwrap();
        if bench.connection.transport.output_fds() == 0 {
            return;
        }
    }
    panic!("the replies go out once they are read");
}

#[test]
fn files_that_come_behind_a_deferred_request_are_bounded() {
    let mut bench = Bench::new();
    bench.toy.slow = true;
    // While an answer is awaited, requests are read past the deferred one.
    bench.connection.dma_read(0, 1).unwrap();
    bench.send(&request(1, Command::DmaUnmap, &unmap(0x1000)));
    let file = memfd(0x1000);
    for sent in 0.. {
        send_with_fds(&bench.client, &request(2, Command::DmaMap, &map(0)), &[file.as_fd(); MAX_FDS]);
        match bench.serve() {
            Ok(progress) => assert_eq!((progress, sent < 4), (Progress::Deferred, true)),
            Err(error) => {
                return assert!(matches!(error, ConnectionError::Flood { .. }) && sent == 4, "{error} after {sent}");
            }
        }
    }
}

#[test]
fn a_file_waits_for_the_socket_with_its_reply() {
    let mut bench = Bench::new();
    // Fill the socket with replies, then ask for the region with its file.
    let ask = request(1, Command::RegionRead, &access(0, 0, 100_000));
    while !bench.connection.wants_write() {
        bench.send(&ask);
        bench.serve().unwrap();
    }
    let info = wire::RegionInfo { argsz: 4096, index: 0, ..Default::default() };
    bench.send(&request(2, Command::DeviceGetRegionInfo, info.as_bytes()));
    bench.serve().unwrap();
    let mut transport = Transport::new(bench.client.try_clone().unwrap(), None).unwrap();
    let last = loop {
        match transport.receive().unwrap() {
            Some(frame) if frame.header.id == 2 => break frame,
            Some(frame) => assert!(frame.fds.is_empty()),
            None => _ = bench.serve().unwrap(),
        }
    };
    assert_eq!(last.fds.iter().map(|fd| inode(&**fd)).collect::<Vec<_>>(), [inode(&bench.toy.page)]);
}

#[test]
fn a_budget_bounds_the_work_of_one_call() {
    let mut bench = Bench::new();
    (0..5).for_each(|id| bench.send(&request(id, Command::DeviceReset, &[])));
    assert_eq!(bench.connection.serve(&mut bench.toy, 2).unwrap(), Progress::More);
    assert_eq!(bench.toy.calls.len(), 2);
    assert_eq!(bench.connection.serve(&mut bench.toy, 4).unwrap(), Progress::Idle);
    assert_eq!(bench.toy.calls.len(), 5);
}

/// Message with plausible sizes, ids and flags, or plain noise.
fn noise() -> impl Strategy<Value = Vec<u8>> {
    let plausible = (0u16..20, 0u32..0x40, prop::collection::vec(0u32..64, 0..40), 0usize..64, any::<bool>()).prop_map(
        |(command, flags, words, cut, cut_it)| {
            let flags = flags & !wire::TYPE_REPLY & !0xe;
            let mut bytes = message(1, command, flags, words.as_bytes());
            if cut_it {
                bytes.truncate(bytes.len().saturating_sub(cut));
            }
            bytes
        },
    );
    prop_oneof![8 => plausible, 1 => prop::collection::vec(any::<u8>(), 0..100)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Whatever comes, in whatever pieces: no panic, no waiting, and the device sees only what exists.
    #[test]
    fn a_hostile_client_is_survived(messages in prop::collection::vec(noise(), 1..20), piece in 1usize..400) {
        let mut bench = Bench::new();
        let file = memfd(0x1000);
        'all: for (i, bytes) in messages.iter().enumerate() {
            for part in bytes.chunks(piece) {
                match i % 3 {
                    0 => send_with_fds(&bench.client, part, &[file.as_fd()]),
                    _ => bench.send(part),
                }
                if bench.serve().is_err() {
                    break 'all;
                }
                if bench.connection.is_deferred() {
                    bench.connection.finish_deferred(Ok(())).unwrap();
                }
            }
            // The answers are not looked at, but taken.
            while bench.client.read(&mut [0; 4096]).is_ok_and(|count| count > 0) {}
        }
    }
}
