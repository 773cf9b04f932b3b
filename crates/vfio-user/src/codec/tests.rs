use std::os::fd::AsFd;

use proptest::prelude::*;
use zerocopy::IntoBytes;

use super::*;
use crate::device::{DmaUnmap, IrqAction, IrqData, MmapArea, RegionFlags, RegionInfo};
use crate::migration::{LogRange, MigrationState};
use crate::received::Received;
use crate::toy::memfd;

/// Every command, with the bytes of its fixed request.
const COMMANDS: [(Command, usize); 18] = [
    (Command::Version, 4),
    (Command::DmaMap, 32),
    (Command::DmaUnmap, 24),
    (Command::DeviceGetInfo, 16),
    (Command::DeviceGetRegionInfo, 32),
    (Command::DeviceGetRegionIoFds, 16),
    (Command::DeviceGetIrqInfo, 16),
    (Command::DeviceSetIrqs, 20),
    (Command::RegionRead, 16),
    (Command::RegionWrite, 16),
    (Command::DmaRead, 16),
    (Command::DmaWrite, 16),
    (Command::DeviceReset, 0),
    (Command::DirtyPages, 0),
    (Command::RegionWriteMulti, 8),
    (Command::DeviceFeature, 8),
    (Command::MigDataRead, 8),
    (Command::MigDataWrite, 8),
];

fn fds(count: usize) -> Vec<Received> {
    (0..count).map(|_| Received::from(memfd(0))).collect()
}

fn refusal(command: Command, payload: &[u8], fd_count: usize) -> ProtocolError {
    Request::parse(command as u16, payload, fds(fd_count)).expect_err("the request is wrong")
}

#[test]
fn command_numbers_are_the_protocols() {
    for (number, (command, _)) in (1..).zip(COMMANDS) {
        assert_eq!(command as u16, number);
        assert_eq!(Command::from_wire(number), Some(command));
    }
    assert_eq!(Command::from_wire(0), None);
    assert_eq!(Command::from_wire(19), None);
}

#[test]
fn truncated_payloads_are_refused() {
    for (command, needed) in COMMANDS {
        for length in 0..needed {
            let error = refusal(command, &vec![0; length], 0);
            let expected = match command {
                Command::DmaRead | Command::DmaWrite => ProtocolError::Unsupported(command),
                _ => ProtocolError::TooShort { command, length, needed },
            };
            assert_eq!(error, expected);
        }
    }
}

#[test]
fn what_is_not_offered_is_refused_as_unsupported() {
    assert_eq!(refusal(Command::DirtyPages, &[0; 64], 0).errno(), Errno::OPNOTSUPP);
    let unknown = Request::parse(77, &[], Vec::new()).expect_err("unknown");
    assert_eq!(unknown.errno(), Errno::NOSYS);
}

/// A DEVICE_FEATURE.
fn feature(argsz: u32, flags: u32, data: &[u8]) -> Result<FeatureRequest, Errno> {
    let payload = [wire::Feature { argsz, flags }.as_bytes(), data].concat();
    match Request::parse(Command::DeviceFeature as u16, &payload, Vec::new()) {
        Ok(Request::Feature(request)) => Ok(request),
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(error.errno()),
    }
}

#[test]
fn features_are_checked() {
    use wire::{FEATURE_GET as GET, FEATURE_PROBE as PROBE, FEATURE_SET as SET};
    let report = |address, size, page_size| wire::LoggingReport { address, size, page_size };
    assert_eq!(feature(16, GET | 1, &[]), Ok(FeatureRequest::Migration));
    assert_eq!(feature(15, GET | 1, &[]), Err(Errno::INVAL), "no room for the answer");
    assert_eq!(feature(16, SET | 1, &[]), Err(Errno::OPNOTSUPP));
    assert_eq!(feature(16, 1, &[]), Err(Errno::INVAL), "nothing is asked");
    assert_eq!(feature(16, GET | 3, &[]), Err(Errno::OPNOTSUPP));
    assert_eq!(feature(8, PROBE | GET | SET | 2, &[]), Ok(FeatureRequest::Probe(Probe { flags: PROBE | GET | SET | 2 })));
    assert_eq!(feature(8, PROBE | SET | 8, &[]), Err(Errno::OPNOTSUPP));
    let state = |state: u32| feature(16, SET | 2, wire::DeviceState { state, data_fd: 7 }.as_bytes());
    assert_eq!(state(3), Ok(FeatureRequest::SetState(MigrationState::StopCopy)));
    for bad in [0, 5, 7, 8, u32::MAX] {
        assert_eq!(state(bad), Err(Errno::INVAL), "state {bad}");
    }
    assert_eq!(feature(16, SET | 2, &[3, 0, 0]), Err(Errno::INVAL));
    let start = |page_size, num_ranges, ranges: &[u64]| {
        let head = wire::LoggingControl { page_size, num_ranges, reserved: 0 };
        feature(64, SET | 6, &[head.as_bytes(), ranges.as_bytes()].concat())
    };
    assert_eq!(start(4096, 1, &[0, u64::MAX]), Ok(FeatureRequest::StartLogging { page_size: 4096 }));
    assert_eq!(start(4096, 2, &[0, 4096]), Err(Errno::INVAL), "a range is missing");
    assert_eq!(start(4096, u32::MAX, &[0, 4096]), Err(Errno::INVAL));
    assert_eq!(start(4096, 1, &[4096, u64::MAX]), Err(Errno::INVAL), "a range that wraps");
    for bad in [0, 1, 2048, 4095, 6144] {
        assert_eq!(start(bad, 0, &[]), Err(Errno::INVAL));
    }
    let range = LogRange { address: 0x4000, size: 0x41_000, page_size: 4096 };
    assert_eq!(range.bitmap_bytes(), 16);
    let ask = |argsz, what: wire::LoggingReport| feature(argsz, GET | 8, what.as_bytes());
    assert_eq!(ask(48, report(0x4000, 0x41_000, 4096)), Ok(FeatureRequest::Report(range)));
    assert_eq!(ask(47, report(0x4000, 0x41_000, 4096)), Err(Errno::INVAL), "no room for the bitmap");
    for bad in [
        report(0x4001, 4096, 4096),
        report(0x4000, 0, 4096),
        report(0x4000, 4096, 0),
        report(0x4000, 4096, 12288),
        report(1 << 20, u64::MAX - 4095, 4096),
        report(0, 1 << 40, 4096),
        report(0, u64::MAX, 4096),
    ] {
        assert_eq!(ask(u32::MAX, bad), Err(Errno::INVAL), "{bad:?}");
    }
}

#[test]
fn migration_data_have_their_length() {
    let parse = |command, argsz, size, data: &[u8]| {
        let payload = [wire::MigrationData { argsz, size }.as_bytes(), data].concat();
        Request::parse(command as u16, &payload, Vec::new()).map(|_| ()).map_err(|error| error.errno())
    };
    assert_eq!(parse(Command::MigDataRead, 108, 100, &[]), Ok(()));
    assert_eq!(parse(Command::MigDataRead, 107, 100, &[]), Err(Errno::INVAL));
    assert_eq!(parse(Command::MigDataRead, u32::MAX, MAX_TRANSFER + 1, &[]), Err(Errno::TOOBIG));
    assert_eq!(parse(Command::MigDataWrite, 12, 4, b"data"), Ok(()));
    assert_eq!(parse(Command::MigDataWrite, 12, 5, b"data"), Err(Errno::INVAL));
    assert_eq!(parse(Command::MigDataWrite, 13, 5, b"data"), Err(Errno::INVAL));
    assert_eq!(parse(Command::MigDataWrite, 11, 3, b"data"), Err(Errno::INVAL));
}

#[test]
fn every_way_between_migration_states_ends() {
    use MigrationState::{PreCopy, Resuming, Running, Stop, StopCopy};
    let way = |from: MigrationState, to| {
        let mut way = vec![from];
        while *way.last().unwrap() != to {
            way.push(way.last().unwrap().towards(to)?);
            assert!(way.len() < 6, "{way:?}");
        }
        Some(way)
    };
    for from in [Running, Stop, StopCopy, Resuming, PreCopy] {
        for to in [Running, Stop, StopCopy, Resuming, PreCopy] {
            assert_eq!(way(from, to).is_some(), (from, to) != (StopCopy, PreCopy), "{from:?} to {to:?}");
        }
        assert_eq!(way(MigrationState::Error, from), None);
        assert_eq!(way(from, MigrationState::Error), None);
    }
    assert_eq!(way(Running, StopCopy), Some(vec![Running, Stop, StopCopy]));
    assert_eq!(way(PreCopy, StopCopy), Some(vec![PreCopy, StopCopy]));
    assert_eq!(way(PreCopy, Stop), Some(vec![PreCopy, Running, Stop]));
    assert_eq!(way(Running, Resuming), Some(vec![Running, Stop, Resuming]));
    assert_eq!(way(Resuming, Running), Some(vec![Resuming, Stop, Running]));
}

#[test]
fn descriptors_where_none_belong_are_refused() {
    let info = wire::DeviceInfo { argsz: 16, ..Default::default() };
    let command = Command::DeviceGetInfo;
    assert_eq!(refusal(command, info.as_bytes(), 2), ProtocolError::FdCount { command, count: 2, expected: 0 });
    assert!(Request::parse(command as u16, info.as_bytes(), Vec::new()).is_ok());
}

fn map() -> wire::DmaMap {
    wire::DmaMap { argsz: 32, flags: 3, offset: 0x1000, address: 0x8000, size: 0x4000 }
}

#[test]
fn dma_map_takes_one_file_or_none() {
    let payload = map();
    let request = Request::parse(2, payload.as_bytes(), fds(1)).unwrap();
    let Request::DmaMap(parsed) = request else { panic!("{request:?}") };
    assert!(parsed.fd.is_some() && parsed.readable && parsed.writable);
    assert_eq!((parsed.address, parsed.size, parsed.offset), (0x8000, 0x4000, 0x1000));
    let read_only = wire::DmaMap { flags: 1, ..map() };
    let request = Request::parse(2, read_only.as_bytes(), fds(0)).unwrap();
    assert!(matches!(request, Request::DmaMap(map) if map.fd.is_none() && map.readable && !map.writable));
    assert!(matches!(refusal(Command::DmaMap, map().as_bytes(), 2), ProtocolError::FdCount { count: 2, .. }));
    let mapped = wire::DmaMap { flags: 3 | wire::DMA_MMAP, ..map() };
    assert!(matches!(refusal(Command::DmaMap, mapped.as_bytes(), 0), ProtocolError::FdCount { expected: 1, .. }));
}

#[test]
fn dma_ranges_that_wrap_are_refused() {
    for bad in [
        wire::DmaMap { size: 0, ..map() },
        wire::DmaMap { address: u64::MAX - 0x3ffe, ..map() },
        wire::DmaMap { address: u64::MAX, size: 2, ..map() },
        wire::DmaMap { offset: u64::MAX, ..map() },
        wire::DmaMap { offset: i64::MAX as u64 - 0x3fff, ..map() },
        wire::DmaMap { size: u64::MAX, ..map() },
    ] {
        assert!(matches!(refusal(Command::DmaMap, bad.as_bytes(), 1), ProtocolError::DmaRange { .. }), "{bad:?}");
    }
    let at_the_end = wire::DmaMap { address: u64::MAX - 0x3fff, ..map() };
    assert!(Request::parse(2, at_the_end.as_bytes(), fds(1)).is_ok());
    let flags = wire::DmaMap { flags: 0x10, ..map() };
    assert_eq!(refusal(Command::DmaMap, flags.as_bytes(), 1).errno(), Errno::OPNOTSUPP);
    let argsz = wire::DmaMap { argsz: 31, ..map() };
    assert!(matches!(refusal(Command::DmaMap, argsz.as_bytes(), 1), ProtocolError::ArgumentSize { .. }));
}

#[test]
fn dma_unmap_is_one_range_or_all() {
    let one = wire::DmaUnmap { argsz: 24, flags: 0, address: 0x1000, size: 0x2000 };
    let all = wire::DmaUnmap { argsz: 24, flags: wire::UNMAP_ALL, address: 0, size: 0 };
    let parse = |unmap: wire::DmaUnmap| match Request::parse(3, unmap.as_bytes(), Vec::new()) {
        Ok(Request::DmaUnmap(unmap)) => Ok(unmap),
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(error.errno()),
    };
    assert_eq!(parse(one), Ok(DmaUnmap::Range { address: 0x1000, size: 0x2000 }));
    assert_eq!(parse(all), Ok(DmaUnmap::All));
    assert!(Request::parse(3, one.as_bytes(), fds(1)).is_ok(), "SPDK's client sends the file that it unmaps");
    assert_eq!(parse(wire::DmaUnmap { size: 1, ..all }), Err(Errno::INVAL));
    assert_eq!(parse(wire::DmaUnmap { size: 0, ..one }), Err(Errno::INVAL));
    assert_eq!(parse(wire::DmaUnmap { size: u64::MAX, ..one }), Err(Errno::INVAL));
    assert_eq!(parse(wire::DmaUnmap { flags: wire::UNMAP_DIRTY_BITMAP, ..one }), Err(Errno::OPNOTSUPP));
    assert_eq!(parse(wire::DmaUnmap { flags: 3, ..one }), Err(Errno::INVAL));
}

fn irqs(flags: u32, start: u32, count: u32) -> wire::SetIrqs {
    wire::SetIrqs { argsz: 20, flags, index: 2, start, count }
}

#[test]
fn set_irqs_wants_as_many_descriptors_as_interrupts_or_none() {
    let set = irqs(wire::IRQ_DATA_EVENTFD | wire::IRQ_ACTION_TRIGGER, 4, 3);
    let parse = |count| match Request::parse(8, set.as_bytes(), fds(count)) {
        Ok(Request::SetIrqs(set)) => Ok(set.data),
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(error),
    };
    assert!(matches!(parse(3), Ok(IrqData::Eventfds(fds)) if fds.len() == 3));
    assert!(matches!(parse(0), Ok(IrqData::Deassign)));
    for count in [1, 2, 4] {
        assert!(matches!(parse(count), Err(ProtocolError::FdCount { expected: 3, .. })));
    }
    let none = irqs(wire::IRQ_DATA_NONE | wire::IRQ_ACTION_MASK, 0, 1);
    assert!(matches!(refusal(Command::DeviceSetIrqs, none.as_bytes(), 1), ProtocolError::FdCount { expected: 0, .. }));
}

#[test]
fn set_irqs_takes_one_action_and_one_kind_of_data() {
    for flags in 0..64 {
        let one_data = (flags & 7u32).is_power_of_two();
        let one_action = (flags & 0x38).is_power_of_two();
        let mut payload = irqs(flags, 1, 2).as_bytes().to_vec();
        payload.extend([1, 0]);
        let result = Request::parse(8, &payload, Vec::new());
        assert_eq!(result.is_ok(), one_data && one_action, "flags {flags:#x}");
    }
    let bools = irqs(wire::IRQ_DATA_BOOL | wire::IRQ_ACTION_UNMASK, 1, 2);
    let mut payload = bools.as_bytes().to_vec();
    payload.push(1);
    assert!(matches!(refusal(Command::DeviceSetIrqs, &payload, 0), ProtocolError::DataLength { .. }));
    payload.push(0);
    let Ok(Request::SetIrqs(set)) = Request::parse(8, &payload, Vec::new()) else { panic!("two booleans") };
    assert!(set.action == IrqAction::Unmask && matches!(set.data, IrqData::Bool([1, 0])));
}

#[test]
fn set_irqs_of_nothing_means_disable_and_nothing_else() {
    let ok = |flags, start| Request::parse(8, irqs(flags, start, 0).as_bytes(), Vec::new()).is_ok();
    assert!(ok(wire::IRQ_DATA_NONE | wire::IRQ_ACTION_TRIGGER, 0));
    assert!(!ok(wire::IRQ_DATA_NONE | wire::IRQ_ACTION_TRIGGER, 1));
    assert!(!ok(wire::IRQ_DATA_NONE | wire::IRQ_ACTION_MASK, 0));
    assert!(!ok(wire::IRQ_DATA_EVENTFD | wire::IRQ_ACTION_TRIGGER, 0));
    assert!(!ok(wire::IRQ_DATA_BOOL | wire::IRQ_ACTION_TRIGGER, 0));
}

#[test]
fn region_accesses_must_match_their_data() {
    let access = |count| wire::RegionAccess { offset: 8, region: 1, count };
    let mut payload = access(4).as_bytes().to_vec();
    payload.extend([1, 2, 3]);
    assert!(matches!(refusal(Command::RegionWrite, &payload, 0), ProtocolError::DataLength { count: 4, length: 3, .. }));
    payload.push(4);
    let request = Request::parse(10, &payload, Vec::new()).unwrap();
    assert!(matches!(request, Request::RegionWrite { region: 1, offset: 8, data: [1, 2, 3, 4] }));
    payload.push(5);
    assert!(matches!(refusal(Command::RegionWrite, &payload, 0), ProtocolError::DataLength { length: 5, .. }));
    let error = refusal(Command::RegionRead, access(MAX_TRANSFER + 1).as_bytes(), 0);
    assert_eq!(error.errno(), Errno::TOOBIG);
}

#[test]
fn write_multi_must_hold_what_it_announces() {
    let entry = wire::SingleWrite { offset: 4, region: 0, count: 8, data: *b"abcdefgh" };
    let payload = |count: u64, entries: &[wire::SingleWrite]| {
        let mut payload = wire::WriteMulti { count }.as_bytes().to_vec();
        for entry in entries {
            payload.extend(entry.as_bytes());
        }
        payload
    };
    let two = payload(2, &[entry, entry]);
    let Ok(Request::RegionWriteMulti(writes)) = Request::parse(15, &two, Vec::new()) else { panic!("two writes") };
    assert_eq!(writes.collect::<Vec<_>>(), [entry, entry]);
    for (count, entries) in [(3, vec![entry; 2]), (1, vec![entry; 2]), (u64::MAX, vec![entry]), (u64::MAX / 24 + 1, vec![])]
    {
        let error = refusal(Command::RegionWriteMulti, &payload(count, &entries), 0);
        assert!(matches!(error, ProtocolError::DataLength { .. }));
    }
    let most = vec![entry; MAX_WRITES + 1];
    let error = refusal(Command::RegionWriteMulti, &payload(most.len() as u64, &most), 0);
    assert!(matches!(error, ProtocolError::TooLarge { count: 257, .. }));
    assert!(Request::parse(15, &payload(MAX_WRITES as u64, &most[1..]), Vec::new()).is_ok());
    let long = wire::SingleWrite { count: 9, ..entry };
    assert!(matches!(refusal(Command::RegionWriteMulti, &payload(1, &[long]), 0), ProtocolError::TooLarge { .. }));
}

#[test]
fn headers_are_checked() {
    let good = Header::request(7, Command::RegionRead, 16, true);
    assert_eq!((good.kind(), good.payload_size(), good.no_reply()), (Ok(Kind::Request), 16, true));
    for size in [0, 15, MAX_MESSAGE as u32 + 1, u32::MAX] {
        assert!(matches!(Header { size, ..good }.kind(), Err(FrameError::Size { .. })));
    }
    assert!(matches!(Header { flags: 2, ..good }.kind(), Err(FrameError::Kind { kind: 2, .. })));
    let error = Header::error_to(&good, Errno::EXIST);
    assert_eq!((error.kind(), error.reply_error(), error.size), (Ok(Kind::Reply), Some(Errno::EXIST), 16));
    assert_eq!((error.id, error.command), (good.id, good.command));
    assert_eq!(Header::reply_to(&good, 8).reply_error(), None);
    for number in [0, 4096, u32::MAX] {
        assert_eq!(Header { error: number, ..error }.reply_error(), Some(Errno::IO));
    }
}

/// What QEMU sends.
const QEMU: &[u8] = b"{\"capabilities\": {\"migration\": {\"max_bitmap_size\": 268435456, \"pgsize\": 4096}, \
    \"max_msg_fds\": 16, \"max_data_xfer_size\": 1048576, \"max_dma_maps\": 65535, \"pgsizes\": 4096, \
    \"write_multiple\": true}}\0";

#[test]
fn the_version_reply_is_a_subset_and_no_longer() {
    let (client, json) = negotiate(0, 0, QEMU, MAX_TRANSFER, MAX_DMA_MAPS).unwrap();
    assert!(json.len() <= QEMU.len() && json.ends_with('\0'));
    assert_eq!((client.max_msg_fds, client.write_multiple, client.pgsizes), (16, true, 4096));
    assert_eq!(
        json,
        "{\"capabilities\":{\"max_msg_fds\":16,\"max_data_xfer_size\":1048576,\"write_multiple\":true,\
         \"pgsizes\":4096,\"max_dma_maps\":4096}}\0"
    );
    for (takes, said) in [(64, ",\"max_dma_maps\":64}"), (u32::MAX, ",\"max_dma_maps\":4096}")] {
        let (_, json) = negotiate(0, 0, QEMU, MAX_TRANSFER, takes).unwrap();
        assert!(json.contains(said), "a device that takes {takes}: {json}");
    }
    let (client, json) = negotiate(0, 5, b"", MAX_TRANSFER, MAX_DMA_MAPS).unwrap();
    assert_eq!((client, json.as_str()), (Capabilities::default(), ""));
    assert_eq!(our_version().minor, 0);
    let (_, json) = negotiate(0, 0, b"{\"capabilities\":{\"max_msg_fds\":1}}\0", MAX_TRANSFER, MAX_DMA_MAPS).unwrap();
    assert_eq!(json, "{\"capabilities\":{}}\0", "one byte too long with it");
    let (_, json) = negotiate(0, 0, b"{\"capabilities\":{\"max_msg_fds\":88}}\0", MAX_TRANSFER, MAX_DMA_MAPS).unwrap();
    assert_eq!(json, "{\"capabilities\":{\"max_msg_fds\":16}}\0");
    let (_, json) = negotiate(0, 0, b"{}\0", MAX_TRANSFER, MAX_DMA_MAPS).unwrap();
    assert_eq!(json, "{}\0");
}

#[test]
fn bad_version_data_is_refused() {
    for bad in [
        &b"{}"[..],
        b"\0",
        b"{\0",
        b"[]\0",
        b"7\0",
        b"{\"capabilities\":3}\0",
        b"{\"capabilities\":{\"max_msg_fds\":-1}}\0",
        b"{\"capabilities\":{\"max_msg_fds\":\"8\"}}\0",
        b"{\"capabilities\":{\"max_data_xfer_size\":1.5}}\0",
        b"{\"capabilities\":{\"write_multiple\":1}}\0",
        b"\xff\xfe\0",
    ] {
        assert!(negotiate(0, 0, bad, MAX_TRANSFER, MAX_DMA_MAPS).is_err(), "{:?}", String::from_utf8_lossy(bad));
    }
    let mut deep = vec![b'['; 4000];
    deep.push(0);
    assert!(negotiate(0, 0, &deep, MAX_TRANSFER, MAX_DMA_MAPS).is_err());
    let mut long = vec![b' '; 5000];
    long.push(0);
    assert!(matches!(negotiate(0, 0, &long, MAX_TRANSFER, MAX_DMA_MAPS), Err(VersionError::Unterminated(5001))));
    assert!(matches!(negotiate(1, 0, b"", MAX_TRANSFER, MAX_DMA_MAPS), Err(VersionError::Version { major: 1, .. })));
    assert!(matches!(parse_reply(0, 1, b""), Err(VersionError::Version { minor: 1, .. })));
    let ours = parse_reply(0, 0, proposal().as_bytes()).unwrap();
    assert!(ours.write_multiple && ours.max_msg_fds == MAX_FDS);
}

#[test]
fn region_capabilities_are_bounded_by_the_reply() {
    let fd = memfd(0x4000);
    let areas = [MmapArea { offset: 0x1000, size: 0x1000 }, MmapArea { offset: 0x3000, size: 0x1000 }];
    let region = RegionInfo { flags: RegionFlags::READ_WRITE, size: 0x4000, offset: 0, areas: &areas, fd: Some(fd.as_fd()) };
    let mut reply = Vec::new();
    assert!(!encode_region(3, &region, 32, &mut reply), "no file with the short reply");
    let (short, none) = parse_region(&reply).unwrap();
    assert_eq!((short.argsz, short.flags, short.cap_offset, none.len()), (80, 7, 0, 0));
    assert!(encode_region(3, &region, 80, &mut reply));
    let (full, parsed) = parse_region(&reply).unwrap();
    assert_eq!((full.argsz, full.flags, full.index, parsed.as_slice()), (80, 15, 3, &areas[..]));
    for length in 0..reply.len() {
        assert!(parse_region(&reply[..length]).is_err());
    }
    let with = |at: usize, value: u32| {
        let mut bytes = reply.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        parse_region(&bytes)
    };
    for at in [1, 31, 81, u32::MAX] {
        assert!(matches!(with(12, at), Err(RegionReplyError::Capability { .. })), "cap_offset {at}");
    }
    assert!(matches!(with(36, 32), Err(RegionReplyError::Capability { offset: 32, .. })), "a chain into itself");
    assert!(matches!(with(40, 3), Err(RegionReplyError::Capability { .. })), "more areas than there are");
    assert!(matches!(with(56, 0x4000), Err(RegionReplyError::Area { .. })));
}

proptest! {
    #[test]
    fn random_requests_never_panic(
        command in 0u16..20,
        payload in prop::collection::vec(any::<u8>(), 0..200),
        fd_count in 0usize..4,
    ) {
        let _ = Request::parse(command, &payload, fds(fd_count));
    }

    /// Small numbers get further than random bytes.
    #[test]
    fn plausible_requests_never_panic(command in 0u16..20, words in prop::collection::vec(0u32..40, 0..30)) {
        let _ = Request::parse(command, words.as_bytes(), Vec::new());
        let _ = parse_region(words.as_bytes());
    }

    #[test]
    fn random_version_data_never_makes_a_longer_reply(minor: u16, mut data in "[\\{\\}\":, a-z_0-9]{0,80}") {
        data.push('\0');
        if let Ok((_, reply)) = negotiate(0, minor, data.as_bytes(), MAX_TRANSFER, MAX_DMA_MAPS) {
            prop_assert!(reply.len() <= data.len());
        }
    }

    #[test]
    fn region_descriptions_round_trip(
        index: u32, flags in 0u32..4, size in 0u64..1 << 40, offset: u64,
        cuts in prop::collection::vec((0u64..1 << 40, 0u64..1 << 40), 0..20),
    ) {
        let areas: Vec<_> = cuts
            .iter()
            .filter(|(offset, length)| offset + length <= size)
            .map(|&(offset, size)| MmapArea { offset, size })
            .collect();
        let fd = memfd(0);
        let region =
            RegionInfo { flags: RegionFlags::from_bits(flags), size, offset, areas: &areas, fd: Some(fd.as_fd()) };
        let mut reply = Vec::new();
        prop_assert!(encode_region(index, &region, 4096, &mut reply));
        let (fixed, parsed) = parse_region(&reply).unwrap();
        prop_assert_eq!((fixed.index, fixed.size, fixed.offset), (index, size, offset));
        prop_assert_eq!(fixed.argsz as usize, reply.len());
        prop_assert_eq!(RegionFlags::from_wire(fixed.flags), region.flags);
        prop_assert_eq!(parsed, areas);
    }
}
