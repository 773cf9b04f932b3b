//! A connection whose server ends at any step: the next one goes on, and the client sees every request answered once.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
};

use rustix::net::{RecvFlags, recv};

use super::*;

/// What outlives the server in these tests: the socket, and what its `Keep` wrote down.
struct Memory {
    socket: UnixStream,
    handling: Cell<Option<(u16, u16)>>,
    /// Replies sent, and how many there were when the request began.
    replies: Cell<u64>,
    before: Cell<u64>,
    capabilities: RefCell<Option<Capabilities>>,
    /// Steps until the server ends.
    steps: Cell<Option<u32>>,
}

impl Memory {
    fn step(&self) {
        if let Some(left) = self.steps.get() {
            self.steps.set(left.checked_sub(1));
            assert!(left != 0, "the server ends here");
        }
    }
}

impl Keep for Memory {
    fn begin(&self, id: u16, command: u16) {
        self.step();
        self.before.set(self.replies.get());
        self.handling.set(Some((id, command)));
        self.step();
    }

    fn negotiated(&self, capabilities: &Capabilities) {
        self.step();
        self.capabilities.replace(Some(capabilities.clone()));
    }

    fn reply(&self, parts: &[&[u8]; 3], _: &[BorrowedFd<'_>]) -> Result<(), Errno> {
        self.step();
        (&self.socket).write_all(&parts.concat()).unwrap();
        self.replies.set(self.replies.get() + 1);
        self.step();
        Ok(())
    }

    fn done(&self) {
        self.step();
        self.handling.set(None);
        self.step();
    }
}

struct House {
    client: UnixStream,
    memory: Rc<Memory>,
    toy: Toy,
}

impl House {
    fn new() -> Self {
        let (client, socket) = UnixStream::pair().unwrap();
        client.set_nonblocking(true).unwrap();
        let memory = Memory {
            socket,
            handling: Cell::default(),
            replies: Cell::default(),
            before: Cell::default(),
            capabilities: RefCell::default(),
            steps: Cell::default(),
        };
        Self { client, memory: Rc::new(memory), toy: Toy::new() }
    }

    fn server(&self) -> Connection {
        let memory = &self.memory;
        let resumed = Resumed {
            capabilities: memory.capabilities.borrow().clone(),
            handling: memory.handling.get(),
            replied: memory.replies.get() > memory.before.get(),
        };
        let keep = Rc::clone(memory) as Rc<dyn Keep>;
        Connection::kept(memory.socket.try_clone().unwrap(), keep, resumed).unwrap()
    }

    /// Serves until there is nothing to do. Whether the server lived.
    fn serve(&mut self) -> bool {
        let mut server = self.server();
        let toy = &mut self.toy;
        catch_unwind(AssertUnwindSafe(|| {
            let mut progress = server.serve(toy, 100).unwrap();
            while progress == Progress::Deferred {
                server.finish_deferred(Ok(())).unwrap();
                progress = server.serve(toy, 100).unwrap();
            }
        }))
        .is_ok()
    }

    fn replies(&mut self) -> Vec<(u16, Option<Errno>, Vec<u8>)> {
        let mut found = Vec::new();
        let mut header = Header::default();
        while self.client.read_exact(header.as_mut_bytes()).is_ok() {
            let mut payload = vec![0; header.payload_size()];
            self.client.read_exact(&mut payload).unwrap();
            found.push((header.id, header.reply_error(), payload));
        }
        found
    }
}

/// Everything a client asks, in one burst.
fn script() -> Vec<u8> {
    const NO_REPLY: u32 = 0x10;
    [
        request(1, Command::Version, b"\0\0\0\0{\"capabilities\":{\"max_msg_fds\":16}}\0"),
        request(2, Command::RegionWrite, &write(16, &[1, 2, 3, 4])),
        message(3, Command::RegionWrite as u16, NO_REPLY, &write(20, &[5, 6, 7, 8])),
        message(4, Command::RegionWrite as u16, NO_REPLY, &write(20, &[9, 9, 9, 9])),
        request(5, Command::RegionRead, &access(0, 16, 8)),
        request(6, Command::DeviceReset, &[]),
        request(7, Command::RegionRead, &access(0, 1 << 40, 8)),
        request(8, Command::DeviceGetIrqInfo, &[16, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]),
    ]
    .concat()
}

#[test]
fn every_request_is_answered_once_wherever_the_server_ends() {
    for slow in [false, true] {
        let mut whole = House::new();
        whole.toy.slow = slow;
        whole.client.write_all(&script()).unwrap();
        assert!(whole.serve());
        let expected = whole.replies();
        assert_eq!(expected.len(), 6);
        let mut cuts = 0;
        for first in 0.. {
            let mut lived = true;
            // A second server that ends as well, a little later.
            for second in 0..8 {
                let mut house = House::new();
                house.toy.slow = slow;
                house.client.write_all(&script()).unwrap();
                house.memory.steps.set(Some(first));
                lived = house.serve();
                house.memory.steps.set(Some(second));
                if !lived && !house.serve() {
                    house.memory.steps.set(None);
                    assert!(house.serve());
                }
                assert_eq!(house.replies(), expected, "cut at {first}, then after {second} more");
                assert_eq!(house.toy.bar[16..24], [1, 2, 3, 4, 9, 9, 9, 9]);
                cuts += 1;
            }
            if lived {
                break;
            }
        }
        assert!(cuts > 8 * 30, "{cuts} cuts");
    }
}

#[test]
fn descriptors_come_again_with_the_request() {
    let mut house = House::new();
    house.client.write_all(&request(1, Command::Version, b"\0\0\0\0")).unwrap();
    assert!(house.serve());
    let file = memfd(0x1000);
    send_with_fds(&house.client, &request(2, Command::DmaMap, &map(0x1000)), &[file.as_fd()]);
    // It ends when the request has had its effect, and before the reply.
    house.memory.steps.set(Some(2));
    assert!(!house.serve());
    house.memory.steps.set(None);
    house.toy.calls.clear();
    assert!(house.server().serve(&mut house.toy, 1).is_ok());
    assert_eq!(house.toy.calls, [Call::Map(0x1000, 0x1000, 0, Some(inode(&file)))]);
    assert_eq!(house.replies().len(), 2);
}

#[test]
fn descriptors_that_come_again_are_closed_elsewhere_unless_the_device_has_them() {
    let mut house = House::new();
    house.client.write_all(&request(1, Command::Version, b"\0\0\0\0")).unwrap();
    assert!(house.serve());
    let mut server = house.server().closing_with(close_elsewhere);
    let file = memfd(0x1000);
    // Refused: both times.
    send_with_fds(&house.client, &request(2, Command::DeviceReset, &[]), &[file.as_fd()]);
    assert_eq!(server.serve(&mut house.toy, 100).unwrap(), Progress::Idle);
    assert_eq!(closed_elsewhere(&file), 2);
    // The toy drops what it has mapped; a device's mapping keeps the file.
    send_with_fds(&house.client, &request(3, Command::DmaMap, &map(0x1000)), &[file.as_fd()]);
    assert_eq!(server.serve(&mut house.toy, 100).unwrap(), Progress::Idle);
    assert_eq!(closed_elsewhere(&file), 1);
    let errnos: Vec<_> = house.replies().into_iter().map(|(id, errno, _)| (id, errno)).collect();
    assert_eq!(errnos, [(1, None), (2, Some(Errno::INVAL)), (3, None)]);
}

#[test]
fn descriptors_are_the_message_s_that_they_came_with() {
    let mut house = House::new();
    house.client.write_all(&request(1, Command::Version, b"\0\0\0\0")).unwrap();
    let files = [memfd(0x1000), memfd(0x1000)];
    for (id, file) in (2..).step_by(2).zip(&files) {
        house.client.write_all(&request(id, Command::RegionWrite, &write(16, &[1, 2, 3, 4]))).unwrap();
        let at = u64::from(id) << 12;
        send_with_fds(&house.client, &request(id + 1, Command::DmaMap, &map(at)), &[file.as_fd()]);
    }
    assert!(house.serve());
    assert!(house.replies().iter().all(|(_, errno, _)| errno.is_none()));
    let files = files.each_ref().map(inode);
    let map = |at: u64, file: u64| Call::Map(at << 12, 0x1000, 0, Some(file));
    let write = Call::Write(0, 16, vec![1, 2, 3, 4]);
    assert_eq!(house.toy.calls, [write.clone(), map(2, files[0]), write, map(4, files[1])]);
}

#[test]
fn a_part_of_a_message_is_left_alone_and_a_huge_one_refused() {
    let mut house = House::new();
    let bytes = request(1, Command::Version, b"\0\0\0\0{}\0");
    for (at, byte) in bytes.iter().enumerate() {
        let mut server = house.server();
        assert_eq!(server.serve(&mut house.toy, 1).unwrap(), Progress::Idle);
        assert_eq!(server.has_part(), at > 0);
        house.client.write_all(&[*byte]).unwrap();
    }
    assert!(house.serve());
    assert_eq!(house.replies().len(), 1);
    house.client.write_all(&request(2, Command::RegionWrite, &vec![0; 100_000])).unwrap();
    let refused = house.server().serve(&mut house.toy, 1);
    assert!(matches!(refused, Err(ConnectionError::Transport(TransportError::TooLong { .. }))), "{refused:?}");
}

#[test]
fn a_client_is_told_how_long_its_messages_may_be() {
    let mut house = House::new();
    let version = b"\0\0\0\0{\"capabilities\":{\"max_data_xfer_size\":1048576}}\0";
    house.client.write_all(&request(1, Command::Version, version)).unwrap();
    assert!(house.serve());
    let replies = house.replies();
    assert_eq!(&replies[0].2[4..], b"{\"capabilities\":{\"max_data_xfer_size\":61440}}\0");
    // With the head of any request it is not too long.
    house.client.write_all(&request(2, Command::RegionWrite, &vec![0; 61_440 + 32])).unwrap();
    assert!(house.serve());
    assert_eq!(house.replies().len(), 1);
}

/// So many writes with one request, which is longer than what is looked at first.
fn many_writes(id: u16, count: u64) -> Vec<u8> {
    let one = |at| wire::SingleWrite { offset: 0x40 + at, region: 0, count: 1, data: [at as u8; 8] };
    let mut payload = wire::WriteMulti { count }.as_bytes().to_vec();
    (0..count).for_each(|at| payload.extend_from_slice(one(at).as_bytes()));
    request(id, Command::RegionWriteMulti, &payload)
}

const GREETING: &[u8] = b"\0\0\0\0{\"capabilities\":{\"max_msg_fds\":16,\"write_multiple\":true}}\0";

#[test]
fn a_long_request_is_answered_once_wherever_the_server_ends() {
    let written: Vec<u8> = (0..30).collect();
    for first in 0.. {
        let mut house = House::new();
        house.client.write_all(&[request(1, Command::Version, GREETING), many_writes(2, 30)].concat()).unwrap();
        house.memory.steps.set(Some(first));
        let lived = house.serve();
        house.memory.steps.set(None);
        assert!(house.serve(), "nothing strange is in the socket");
        let replies = house.replies();
        assert_eq!(replies.len(), 2, "cut at {first}");
        assert_eq!((replies[1].0, replies[1].1, &replies[1].2[..]), (2, None, &30_u64.to_ne_bytes()[..]));
        assert_eq!(house.toy.bar[0x40..0x40 + 30], written);
        if lived {
            break;
        }
    }
}

/// Whoever looks into the socket at any moment finds a request's beginning, or nothing: a server may be killed at that moment.
#[test]
fn a_long_request_goes_as_a_whole() {
    let mut house = House::new();
    house.client.write_all(&request(1, Command::Version, GREETING)).unwrap();
    assert!(house.serve());
    let (asked, seen, over) = (many_writes(2, 30), AtomicU32::new(0), AtomicBool::new(false));
    let (socket, head) = (house.memory.socket.try_clone().unwrap(), &asked[..HEADER_SIZE]);
    thread::scope(|threads| {
        let looks = threads.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let mut room = [0; HEADER_SIZE];
                if recv(&socket, &mut room[..], RecvFlags::PEEK | RecvFlags::DONTWAIT).is_ok_and(|(_, count)| count > 0) {
                    assert_eq!(room, head, "a request's beginning");
                    seen.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        let mut server = house.server();
        while !looks.is_finished() && seen.load(Ordering::Relaxed) < 5000 {
            house.client.write_all(&asked).unwrap();
            assert_eq!(server.serve(&mut house.toy, 1).unwrap(), Progress::More);
            let mut reply = [0; HEADER_SIZE + 8];
            house.client.read_exact(&mut reply).unwrap();
            house.toy.calls.clear();
        }
        over.store(true, Ordering::Relaxed);
        looks.join().unwrap();
    });
}
