//! What one peer maps is no other's loss.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
};

use rustix::fs::MemfdFlags;

use crate::{
    GuestAddress, GuestMemory, MAX_REGIONS, MapError, PeerBytes, Protection,
    guard::GuardedMapping,
    room::{Account, Amount, BOOKKEEPING, GUESTS, NoRoom, PROGRAM_REGIONS, PROGRAMS, Room},
};

const ALL: Protection = Protection { read: true, write: true };
const TIB: u64 = 1 << 40;
const PAGE: u64 = 4096;

/// A file of any length, without a page.
fn sparse(len: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, len).unwrap();
    file
}

fn pages(mappings: usize) -> Amount {
    Amount { mappings, bytes: mappings as u64 * PAGE }
}

/// Room for 8 pages of one peer, and 16 of all; who has more than 2 does not come into the last 2. 8 more are there for what is being
/// unmapped, but the last of them.
fn small(keeps: bool) -> &'static Room {
    Box::leak(Box::new(Room::new(pages(8), pages(2), pages(16), pages(8), keeps)))
}

/// Maps so many pages from an address on, one by one.
fn map(memory: &mut GuestMemory, at: u64, count: u64, file: &OwnedFd) -> Result<(), MapError> {
    (0..count).try_for_each(|page| memory.map(GuestAddress(at + page * PAGE), PAGE, ALL, Some((file.as_fd(), 0))))
}

/// The peer leaves; what it had is still mapped.
fn leave(mut memory: GuestMemory) -> Vec<Arc<GuardedMapping>> {
    memory.unmap_all();
    // SAFETY: no segment was made.
    unsafe { memory.reclaim() }
}

/// Maps single pages until it is refused; how many.
fn fill(memory: &mut GuestMemory, file: &OwnedFd) -> (u64, MapError) {
    let mut mapped = 0;
    loop {
        match memory.map(GuestAddress(mapped * PAGE), PAGE, ALL, Some((file.as_fd(), 0))) {
            Ok(()) => mapped += 1,
            Err(error) => return (mapped, error),
        }
    }
}

#[test]
fn a_file_as_long_as_all_addresses_is_refused_by_number() {
    let file = sparse(1 << 47);
    for (mut memory, most) in [(GuestMemory::new(), 24 * TIB), (GuestMemory::for_program(), 2 * TIB)] {
        for size in [1 << 46, most + PAGE] {
            let result = memory.map(GuestAddress(0), size, ALL, Some((file.as_fd(), 0)));
            assert!(matches!(result, Err(MapError::TooLarge { most: said, .. }) if said == most), "{size:#x}: {result:?}");
        }
        // Without a file it takes no addresses of ours.
        memory.map(GuestAddress(0), 1 << 46, ALL, None).unwrap();
        memory.map(GuestAddress(1 << 46), 64 << 20, ALL, Some((file.as_fd(), 0))).unwrap();
    }
    let log = PeerBytes::map(&file, 0, TIB);
    assert!(matches!(log, Err(MapError::TooLarge { .. })), "{log:?}");
}

#[test]
fn what_one_peer_maps_ends_at_its_own_limit_and_leaves_room_for_others() {
    let (file, room) = (sparse(PAGE), small(true));
    let mut peers: Vec<_> = (0..3).map(|_| GuestMemory::within(room, MAX_REGIONS)).collect();
    let (mapped, error) = fill(&mut peers[0], &file);
    assert!(mapped == 8 && matches!(error, MapError::TooLarge { mappings: 8, .. }), "{mapped}: {error:?}");
    // The last eighth is for those who have little.
    let (mapped, error) = fill(&mut peers[1], &file);
    assert!(mapped == 6 && matches!(error, MapError::Full { .. }), "{mapped}: {error:?}");
    let (mapped, error) = fill(&mut peers[2], &file);
    assert!(mapped == 2 && matches!(error, MapError::Full { .. }), "{mapped}: {error:?}");
    // What it has unmapped is kept for it until it leaves.
    peers[0].unmap_all();
    // SAFETY: no segment was made.
    drop(unsafe { peers[0].reclaim() });
    assert!(map(&mut peers[1], 1 << 30, 1, &file).is_err());
    drop(leave(peers.remove(0)));
    map(&mut peers[0], 1 << 30, 1, &file).unwrap();
    for peer in peers {
        drop(leave(peer));
    }
    assert_eq!(fill(&mut GuestMemory::within(room, MAX_REGIONS), &file).0, 8, "all of it was given back");
}

/// A machine whose firmware switches a piece of its memory, or that starts anew, asks for no more than it had.
#[test]
fn who_is_in_is_not_refused_what_it_had() {
    let (file, room) = (sparse(PAGE), small(true));
    let mut peers: Vec<_> = [6, 2, 2, 2, 2, 2]
        .map(|count| {
            let mut peer = GuestMemory::within(room, MAX_REGIONS);
            map(&mut peer, 0, count, &file).unwrap();
            peer
        })
        .into();
    let large = &mut peers[0];
    large.unmap(GuestAddress(0), PAGE).unwrap();
    // SAFETY: no segment was made.
    drop(unsafe { large.reclaim() });
    map(large, 0, 1, &file).unwrap();
    // What it has unmapped is still there, as it is until something has unmapped it for good.
    for _ in 0..2 {
        large.unmap(GuestAddress(0), PAGE).unwrap();
        map(large, 0, 1, &file).unwrap();
    }
    let more = map(large, 1 << 30, 1, &file);
    assert!(matches!(more, Err(MapError::TooLarge { .. })), "{more:?}");
    // SAFETY: as above.
    drop(unsafe { large.reclaim() });
    let more = map(large, 1 << 30, 1, &file);
    assert!(matches!(more, Err(MapError::Full { .. })), "{more:?}");
    for peer in peers {
        drop(leave(peer));
    }
}

#[test]
fn what_is_being_unmapped_leaves_others_their_room() {
    let (file, room) = (sparse(PAGE), small(true));
    let mut peers: Vec<_> = (0..3).map(|_| GuestMemory::within(room, MAX_REGIONS)).collect();
    for peer in &mut peers {
        map(peer, 0, 4, &file).unwrap();
        peer.unmap_all();
    }
    map(&mut peers[0], 0, 4, &file).unwrap();
    // 3 more, of the 7 that are for those who have much.
    assert_eq!(fill(&mut peers[1], &file).0, 3);
    let mut little = GuestMemory::within(room, MAX_REGIONS);
    map(&mut little, 0, 2, &file).unwrap();
    little.unmap(GuestAddress(0), PAGE).unwrap();
    map(&mut little, 0, 1, &file).unwrap();
}

#[test]
fn who_leaves_and_comes_again_finds_room() {
    let (file, room) = (sparse(PAGE), small(true));
    let [mut gone, mut other, mut again] = [(); 3].map(|()| GuestMemory::within(room, MAX_REGIONS));
    map(&mut gone, 0, 6, &file).unwrap();
    map(&mut other, 0, 8, &file).unwrap();
    let mut still_there = leave(gone);
    map(&mut again, 0, 6, &file).unwrap();
    // What is beyond the spare part is taken from the room: of 20, 12.
    still_there.extend(leave(other).into_iter().chain(leave(again)));
    let (mapped, error) = fill(&mut GuestMemory::within(room, MAX_REGIONS), &file);
    assert!(mapped == 2 && matches!(error, MapError::Full { .. }), "{mapped}: {error:?}");
    drop(still_there);
}

#[test]
fn a_region_that_cannot_be_mapped_takes_no_room() {
    let (file, room) = (sparse(PAGE), small(true));
    let mut memory = GuestMemory::within(room, MAX_REGIONS);
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    let read_only = rustix::fs::open(path, rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty()).unwrap();
    for _ in 0..20 {
        let result = memory.map(GuestAddress(0), PAGE, ALL, Some((read_only.as_fd(), 0)));
        assert!(matches!(result, Err(MapError::Kernel { .. })), "{result:?}");
    }
    assert_eq!(fill(&mut memory, &file).0, 8);
}

#[test]
fn what_the_last_worker_had_mapped_is_mapped_again() {
    let file = sparse(PAGE);
    // A guest's whatever it is; a program's where the room for all of them has it.
    for (keeps, most) in [(true, 20), (false, 16)] {
        let mut memory = GuestMemory::within(small(keeps), 4);
        let again = (0..20)
            .take_while(|page| memory.map_again(GuestAddress(page * PAGE), PAGE, ALL, Some((file.as_fd(), 0))).is_ok());
        assert_eq!(again.count(), most);
        let more = memory.map(GuestAddress(1 << 30), PAGE, ALL, Some((file.as_fd(), 0)));
        assert!(matches!(more, Err(MapError::TooMany(4))), "{more:?}");
    }
}

#[test]
fn programs_take_no_guests_room() {
    let mut memory = GuestMemory::for_program();
    for page in 0..PROGRAM_REGIONS as u64 {
        memory.map(GuestAddress(page * PAGE), PAGE, ALL, None).unwrap();
    }
    let more = memory.map(GuestAddress(1 << 30), PAGE, ALL, None);
    assert!(matches!(more, Err(MapError::TooMany(PROGRAM_REGIONS))), "{more:?}");
    // All rooms together: 18 TiB of 128 are left, and some of the 32,768 guarded mappings.
    let rooms = [&GUESTS, &PROGRAMS, &BOOKKEEPING];
    assert!(rooms.iter().map(|room| room.all.bytes + room.spare.bytes).sum::<u64>() <= 110 * TIB);
    assert!(rooms.iter().map(|room| room.all.mappings + room.spare.mappings).sum::<usize>() <= 30 << 10);
    for room in rooms {
        assert!(room.each.bytes <= room.all.bytes / 2 && room.little.bytes <= room.all.bytes / 16);
        assert!(room.each.mappings <= room.all.mappings / 2 && room.little.mappings <= room.all.mappings / 16);
    }
}

#[test]
fn sums_do_not_wrap() {
    let account = Account::new(small(true));
    assert_eq!(account.take(u64::MAX, false).unwrap_err(), NoRoom::Own(pages(8)));
    let first = account.take(PAGE, false).unwrap();
    assert!(account.take(u64::MAX, false).is_err());
    drop(first);
    assert_eq!(fill(&mut GuestMemory::within(small(true), MAX_REGIONS), &sparse(PAGE)).0, 8);
}
