use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use rustix::event::EventfdFlags;

use super::*;
use crate::codec::HEADER_SIZE;
use crate::device::pci;
use crate::migration::{LogRange, MigrationState};
use crate::server::{Connection, Progress};
use crate::toy::{BAR_SIZE, BROKEN, Call, DOORBELLS, Toy, VECTORS, inode, memfd};

const TIMEOUT: Duration = Duration::from_secs(20);

/// What a test's server does besides serving.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mood {
    Plain,
    /// Finishes deferred requests only after a round trip of DMA messages.
    ReadsMemoryFirst,
    /// Its device can be migrated.
    Moves,
}

/// A real server on its own thread. Returns the device when the client is gone.
fn serve(stream: UnixStream, mood: Mood) -> JoinHandle<Toy> {
    std::thread::spawn(move || {
        let mut connection = Connection::new(stream).unwrap();
        let mut toy = Toy::new();
        toy.slow = mood == Mood::ReadsMemoryFirst;
        toy.moves = (mood == Mood::Moves).then_some(MigrationState::Running);
        let mut asked = false;
        loop {
            match connection.serve(&mut toy, 8) {
                Err(error) if error.is_closed() => return toy,
                Err(error) => panic!("{error}"),
                Ok(Progress::More) => continue,
                Ok(Progress::Deferred) if !asked => {
                    connection.dma_write(0x100, b"from the device").unwrap();
                    connection.dma_read(0x102, 6).unwrap();
                    connection.dma_read(0xdead_0000, 1).unwrap();
                    asked = true;
                }
                Ok(Progress::Deferred)
                    if toy.calls.iter().filter(|call| matches!(call, Call::DmaReply(..))).count() == 3 =>
                {
                    connection.finish_deferred(Ok(())).unwrap();
                    continue;
                }
                Ok(_) => {}
            }
            let mut events = PollFlags::empty();
            if connection.wants_read() {
                events |= PollFlags::IN;
            }
            if connection.wants_write() {
                events |= PollFlags::OUT;
            }
            rustix::event::poll(&mut [PollFd::new(&connection, events)], None).unwrap();
        }
    })
}

fn pair(mood: Mood) -> (Client, JoinHandle<Toy>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = serve(theirs, mood);
    (Client::from_stream(ours, TIMEOUT).unwrap(), server)
}

/// What the device saw, once the client is gone.
fn calls(client: Client, server: JoinHandle<Toy>) -> Vec<Call> {
    drop(client);
    server.join().unwrap().calls
}

#[test]
fn a_client_learns_what_the_device_is() {
    let (mut client, server) = pair(Mood::Plain);
    assert_eq!(client.capabilities().max_msg_fds, MAX_FDS);
    assert!(client.capabilities().write_multiple);
    assert_eq!(client.device_info().unwrap(), DeviceInfo { reset: true, regions: 9, irqs: 5 });
    let bar = client.region_info(pci::REGION_BAR0).unwrap();
    assert_eq!((bar.flags, bar.size, bar.offset), (RegionFlags::READ_WRITE, BAR_SIZE, 0));
    assert_eq!(bar.areas, DOORBELLS);
    let none = client.region_info(pci::REGION_VGA).unwrap();
    assert_eq!((none.flags, none.size, none.fd.is_none()), (RegionFlags::NONE, 0, true));
    assert_eq!(client.irq_info(pci::IRQ_MSIX).unwrap().count, VECTORS);
    assert_eq!(client.region_info(9).expect_err("no such region").refused(), Some(Errno::INVAL));
    assert_eq!(client.irq_info(5).expect_err("no such type").refused(), Some(Errno::INVAL));
    drop(client);
    let toy = server.join().unwrap();
    assert_eq!(inode(&bar.fd.unwrap()), inode(&toy.page));
}

#[test]
fn regions_are_read_and_written() {
    let (mut client, server) = pair(Mood::Plain);
    client.region_write(0, 0x10, b"answered").unwrap();
    client.region_write_posted(0, 0x20, b"posted").unwrap();
    let mut small = [0; 8];
    client.region_read(0, 0x20, &mut small).unwrap();
    assert_eq!(&small, b"posted\x26\x27");
    let writes =
        [SmallWrite { region: 0, offset: 0x30, data: b"12345678" }, SmallWrite { region: 0, offset: 0x40, data: b"9" }];
    assert_eq!(client.region_write_multi(&writes).unwrap(), 2);
    // As large as messages get, both ways.
    let large: Vec<u8> = (0..MAX_TRANSFER).map(|byte| (byte / 7) as u8).collect();
    client.region_write(0, 0x1000, &large).unwrap();
    let mut back = vec![0; large.len()];
    client.region_read(0, 0x1000, &mut back).unwrap();
    assert!(back == large);
    let too_large = vec![0; large.len() + 1];
    assert!(matches!(client.region_write(0, 0, &too_large), Err(ClientError::TooLarge { .. })));
    let error = client.region_write(0, BROKEN, b"x").expect_err("the device refuses");
    assert_eq!(error.refused(), Some(Errno::IO));
    assert_eq!(client.region_read(0, BAR_SIZE, &mut small).expect_err("outside").refused(), Some(Errno::INVAL));
    assert_eq!(calls(client, server).len(), 5);
}

#[test]
fn event_fds_arrive_in_chunks() {
    let (mut client, server) = pair(Mood::Plain);
    let eventfds: Vec<_> = (0..VECTORS).map(|_| rustix::event::eventfd(0, EventfdFlags::NONBLOCK).unwrap()).collect();
    let fds: Vec<_> = eventfds.iter().map(AsFd::as_fd).collect();
    client.set_irq_eventfds(pci::IRQ_MSIX, 0, &fds).unwrap();
    client.irq_action(pci::IRQ_MSIX, 3, 2, IrqAction::Mask).unwrap();
    client.irq_action(pci::IRQ_MSIX, 0, 0, IrqAction::Trigger).unwrap();
    drop(client);
    let toy = server.join().unwrap();
    let set = |start, count| Call::Irqs(pci::IRQ_MSIX, start, count, IrqAction::Trigger, Some(count as usize));
    let mask = Call::Irqs(pci::IRQ_MSIX, 3, 2, IrqAction::Mask, None);
    let disable = Call::Irqs(pci::IRQ_MSIX, 0, 0, IrqAction::Trigger, None);
    assert_eq!(toy.calls, [set(0, 16), set(16, 16), set(32, 8), mask, disable]);
    // Each vector rings its own.
    for (vector, (theirs, ours)) in toy.eventfds.iter().zip(&eventfds).enumerate() {
        let count = vector as u64 + 1;
        rustix::io::write(theirs.as_ref().unwrap(), &count.to_ne_bytes()).unwrap();
        let mut rung = [0; 8];
        rustix::io::read(ours, &mut rung).unwrap();
        assert_eq!(u64::from_ne_bytes(rung), count);
    }
}

#[test]
fn memory_is_mapped_and_unmapped() {
    let (mut client, server) = pair(Mood::Plain);
    let file = memfd(0x10_0000);
    let map = Mapping { address: 0x4000_0000, size: 0x8000, offset: 0x1000, readable: true, writable: true };
    client.dma_map(&map, Some(file.as_fd())).unwrap();
    assert_eq!(client.dma_map(&map, Some(file.as_fd())).expect_err("twice").refused(), Some(Errno::EXIST));
    client.dma_map(&Mapping { address: 0, ..map }, None).unwrap();
    let range = DmaUnmap::Range { address: map.address, size: map.size };
    client.dma_unmap(range).unwrap();
    client.dma_unmap(DmaUnmap::All).unwrap();
    client.reset().unwrap();
    let expected = [
        Call::Map(0x4000_0000, 0x8000, 0x1000, Some(inode(&file))),
        Call::Map(0, 0x8000, 0x1000, None),
        Call::Unmap(range),
        Call::Unmap(DmaUnmap::All),
        Call::Reset,
    ];
    assert_eq!(calls(client, server), expected);
}

/// The first bytes of an address space.
struct Shared(Arc<Mutex<Vec<u8>>>);

impl ClientMemory for Shared {
    fn read(&mut self, address: u64, buf: &mut [u8]) -> Result<(), Errno> {
        let memory = self.0.lock().unwrap();
        let start = address as usize;
        buf.copy_from_slice(memory.get(start..start + buf.len()).ok_or(Errno::FAULT)?);
        Ok(())
    }

    fn write(&mut self, address: u64, data: &[u8]) -> Result<(), Errno> {
        let mut memory = self.0.lock().unwrap();
        let start = address as usize;
        memory.get_mut(start..start + data.len()).ok_or(Errno::FAULT)?.copy_from_slice(data);
        Ok(())
    }
}

#[test]
fn the_servers_requests_are_answered_while_a_reply_is_awaited() {
    let (mut client, server) = pair(Mood::ReadsMemoryFirst);
    let memory = Arc::new(Mutex::new(vec![0; 0x1000]));
    client.set_memory(Box::new(Shared(Arc::clone(&memory))));
    client.reset().unwrap();
    assert_eq!(&memory.lock().unwrap()[0x100..0x10f], b"from the device");
    let replies: Vec<_> = calls(client, server)
        .into_iter()
        .filter_map(|call| match call {
            Call::DmaReply(_, result) => Some(result),
            _ => None,
        })
        .collect();
    assert_eq!(replies, [Ok(vec![]), Ok(b"om the".to_vec()), Err(Errno::FAULT)]);
}

#[test]
fn without_memory_the_server_is_refused() {
    let (mut client, server) = pair(Mood::ReadsMemoryFirst);
    client.reset().unwrap();
    let refused = calls(client, server).iter().filter(|call| matches!(call, Call::DmaReply(_, Err(Errno::FAULT)))).count();
    assert_eq!(refused, 3);
}

#[test]
fn the_servers_requests_are_answered_between_calls() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let server = std::thread::spawn(move || {
        answer_version(&mut theirs);
        let ask = wire::DmaAccess { address: 1, count: 3 };
        let header = Header::request(7, Command::DmaRead, 16, false);
        theirs.write_all(&[header.as_bytes(), ask.as_bytes()].concat()).unwrap();
        // A message only servers get.
        theirs.write_all(Header::request(8, Command::DeviceReset, 0, false).as_bytes()).unwrap();
        let mut answer = [0; HEADER_SIZE + 16 + 3 + HEADER_SIZE];
        theirs.read_exact(&mut answer).unwrap();
        (answer, theirs)
    });
    let mut client = Client::from_stream(ours, TIMEOUT).unwrap();
    client.set_memory(Box::new(Shared(Arc::new(Mutex::new(b"abcdef".to_vec())))));
    assert!(client.serve_memory(TIMEOUT).unwrap());
    while !server.is_finished() {
        client.serve_memory(Duration::from_millis(1)).unwrap();
    }
    let (answer, theirs) = server.join().unwrap();
    assert_eq!(&answer[HEADER_SIZE + 16..HEADER_SIZE + 19], b"bcd");
    let (refused, _) = Header::read_from_prefix(&answer[HEADER_SIZE + 19..]).unwrap();
    assert_eq!((refused.id, refused.reply_error()), (8, Some(Errno::OPNOTSUPP)));
    assert!(!client.serve_memory(Duration::ZERO).unwrap());
    drop(theirs);
    assert!(matches!(client.serve_memory(TIMEOUT), Err(ClientError::Transport(TransportError::Closed))));
}

/// Reads a message of known size and answers it as a server would, with `payload`.
fn answer(stream: &mut UnixStream, size: usize, flags: u32, payload: &[u8]) {
    let mut message = vec![0; size];
    stream.read_exact(&mut message).unwrap();
    let (request, _) = Header::read_from_prefix(&message).unwrap();
    assert_eq!(request.size as usize, size);
    let reply = Header { flags, ..Header::reply_to(&request, payload.len()) };
    stream.write_all(&[reply.as_bytes(), payload].concat()).unwrap();
}

fn answer_version(stream: &mut UnixStream) {
    answer(stream, HEADER_SIZE + 4 + codec::proposal().len(), wire::TYPE_REPLY, &[0, 0, 0, 0]);
}

#[test]
fn silence_ends_in_a_timeout_and_the_connection_is_given_up() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    assert!(matches!(
        Client::from_stream(ours.try_clone().unwrap(), Duration::from_millis(20)),
        Err(ClientError::Timeout { command: Command::Version, .. })
    ));
    let server = std::thread::spawn(move || {
        let mut skipped = vec![0; HEADER_SIZE + 4 + codec::proposal().len()];
        theirs.read_exact(&mut skipped).unwrap();
        answer_version(&mut theirs);
        theirs
    });
    let mut client = Client::from_stream(ours, TIMEOUT).unwrap();
    let _theirs = server.join().unwrap();
    client.timeout = Duration::from_millis(20);
    assert!(matches!(client.reset(), Err(ClientError::Timeout { command: Command::DeviceReset, .. })));
    assert!(matches!(client.reset(), Err(ClientError::GivenUp)));
    // A server that reads nothing: even a posted write ends.
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let server = std::thread::spawn(move || {
        answer_version(&mut theirs);
        theirs
    });
    let mut client = Client::from_stream(ours, TIMEOUT).unwrap();
    let _theirs = server.join().unwrap();
    client.timeout = Duration::from_millis(20);
    let data = vec![0; MAX_TRANSFER as usize];
    assert!(matches!(client.region_write_posted(0, 0, &data), Err(ClientError::Timeout { .. })));
}

/// What the client makes of one reply to a region read.
fn read_with_reply(flags: u32, payload: &'static [u8]) -> Result<(), ClientError> {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let server = std::thread::spawn(move || {
        answer_version(&mut theirs);
        answer(&mut theirs, HEADER_SIZE + 16, flags, payload);
        theirs
    });
    let mut client = Client::from_stream(ours, TIMEOUT).unwrap();
    let result = client.region_read(0, 0, &mut [0; 4]);
    drop(server.join().unwrap());
    result
}

#[test]
fn replies_that_make_no_sense_are_errors() {
    const GOOD: &[u8] = b"\0\0\0\0\0\0\0\0\0\0\0\0\x04\0\0\0data";
    read_with_reply(wire::TYPE_REPLY, GOOD).unwrap();
    for bad in [&GOOD[..19], &GOOD[..3], b"\0\0\0\0\0\0\0\0\0\0\0\0\x05\0\0\0data", b""] {
        assert!(matches!(read_with_reply(wire::TYPE_REPLY, bad), Err(ClientError::BadReply { .. })));
    }
    let refused = read_with_reply(wire::TYPE_REPLY | wire::ERROR, b"");
    assert_eq!(refused.expect_err("an error without a number").refused(), Some(Errno::IO));
    assert!(matches!(read_with_reply(2, b""), Err(ClientError::Transport(TransportError::Frame(_)))));
}

#[test]
fn servers_that_lie_about_their_version_are_left() {
    for payload in [&b"\x01\0\0\0"[..], b"\0\0\x07\0", b"\0\0\0\0{", b"\0\0"] {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let server = std::thread::spawn(move || {
            answer(&mut theirs, HEADER_SIZE + 4 + codec::proposal().len(), wire::TYPE_REPLY, payload);
            theirs
        });
        let result = Client::from_stream(ours, TIMEOUT).err();
        assert!(matches!(result, Some(ClientError::Negotiation(_))), "{result:?}");
        drop(server.join().unwrap());
    }
}

#[test]
fn a_server_that_goes_away_is_an_error() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    assert!(Client::from_stream(ours, TIMEOUT).is_err());
    let missing = Client::connect(Path::new("/nonexistent/socket"), TIMEOUT).err().unwrap();
    assert!(missing.to_string().contains("/nonexistent/socket"));
}

/// Drives our server with a client written by others.
#[test]
fn another_client_works_with_our_server() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = crate::Listener::bind(&path).unwrap();
    let client = std::thread::spawn(move || vfio_user::Client::new(&path).unwrap());
    let stream = loop {
        if let Some(stream) = listener.accept().unwrap() {
            break stream;
        }
        rustix::event::poll(&mut [PollFd::new(&listener, PollFlags::IN)], None).unwrap();
    };
    let server = serve(stream, Mood::Plain);
    let mut client = client.join().unwrap();
    let region = client.region(0).unwrap();
    assert_eq!(region.size, BAR_SIZE);
    let areas: Vec<_> = region.sparse_areas.iter().map(|area| (area.offset, area.size)).collect();
    assert_eq!(areas, DOORBELLS.map(|area| (area.offset, area.size)));
    let page = inode(region.file_offset.as_ref().unwrap().file());
    assert_eq!(client.get_irq_info(pci::IRQ_MSIX).unwrap().count, VECTORS);
    client.region_write(0, 0x10, b"other").unwrap();
    let mut back = [0; 5];
    client.region_read(0, 0x10, &mut back).unwrap();
    assert_eq!(&back, b"other");
    let file = memfd(0x4000);
    client.dma_map(0x1000, 0x8000_0000, 0x2000, std::os::fd::AsRawFd::as_raw_fd(&file)).unwrap();
    client.dma_unmap(0x8000_0000, 0x2000).unwrap();
    let eventfd = rustix::event::eventfd(0, EventfdFlags::empty()).unwrap();
    client.set_irqs(pci::IRQ_MSIX, 0x24, 5, 1, &[std::os::fd::AsRawFd::as_raw_fd(&eventfd)]).unwrap();
    client.reset().unwrap();
    drop(client);
    let toy = server.join().unwrap();
    assert_eq!(page, inode(&toy.page));
    let expected = [
        Call::Write(0, 0x10, b"other".to_vec()),
        Call::Map(0x8000_0000, 0x2000, 0x1000, Some(inode(&file))),
        Call::Unmap(DmaUnmap::Range { address: 0x8000_0000, size: 0x2000 }),
        Call::Irqs(pci::IRQ_MSIX, 5, 1, IrqAction::Trigger, Some(1)),
        Call::Reset,
    ];
    assert_eq!(toy.calls, expected);
}

#[test]
fn a_device_is_migrated() {
    let (mut client, server) = pair(Mood::Moves);
    assert_eq!(client.migration_flags().unwrap(), wire::MIGRATION_STOP_COPY | wire::MIGRATION_PRE_COPY);
    assert_eq!(client.migration_state().unwrap(), MigrationState::Running);
    client.set_migration_state(MigrationState::StopCopy).unwrap();
    assert_eq!(client.migration_state().unwrap(), MigrationState::StopCopy);
    let first = client.migration_read(64).unwrap();
    assert_eq!(first, (0..64).collect::<Vec<u8>>());
    assert_eq!(client.migration_read(1 << 20).unwrap().len(), 100, "as many as there are now");
    client.set_migration_state(MigrationState::Resuming).unwrap();
    client.migration_write(b"a state").unwrap();
    client.migration_write(b"").unwrap();
    let error = client.set_migration_state(MigrationState::Error).expect_err("no client asks for that");
    assert_eq!(error.refused(), Some(Errno::INVAL));
    client.probe_feature(wire::FEATURE_LOGGING_START | wire::FEATURE_SET).unwrap();
    let error = client.probe_feature(9).expect_err("an unknown feature");
    assert_eq!(error.refused(), Some(Errno::OPNOTSUPP));
    client.start_logging(4096, &[(0, 1 << 30), (1 << 32, 1 << 20)]).unwrap();
    assert_eq!(client.start_logging(8192, &[]).expect_err("another page").refused(), Some(Errno::INVAL));
    let range = LogRange { address: 1 << 32, size: 1 << 20, page_size: 4096 };
    assert_eq!(client.written_pages(range).unwrap(), [0xa5; 32]);
    let error = client.written_pages(LogRange { address: 0, ..range }).expect_err("the device refuses");
    assert_eq!(error.refused(), Some(Errno::NOENT));
    client.stop_logging().unwrap();
    drop(client);
    assert_eq!(server.join().unwrap().moved, b"a state");
}

#[test]
fn a_device_without_migration_says_so() {
    let (mut client, _server) = pair(Mood::Plain);
    let unsupported = Some(Errno::OPNOTSUPP);
    assert_eq!(client.migration_flags().expect_err("none").refused(), unsupported);
    assert_eq!(client.set_migration_state(MigrationState::Stop).expect_err("none").refused(), unsupported);
    assert_eq!(client.migration_read(8).expect_err("none").refused(), unsupported);
    assert_eq!(client.migration_write(b"").expect_err("none").refused(), unsupported);
    assert_eq!(client.start_logging(4096, &[]).expect_err("none").refused(), unsupported);
    assert_eq!(client.stop_logging().expect_err("none").refused(), unsupported);
    assert_eq!(client.device_info().unwrap().regions, 9, "it goes on");
}
