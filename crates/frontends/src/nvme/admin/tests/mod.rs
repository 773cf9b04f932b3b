//! Admin commands through a fake guest.

mod events;
mod features;
mod identify;
mod logs;
mod namespaces;
mod queues;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use millrace_backends::MemoryVolume;
use millrace_block::{Asker, BlockSize, Request, Step, TaskContext, Volume, yield_now};
use millrace_nvme_spec::{
    command::{Cqe, DataPointer, Fuse, Psdt, Sqe},
    opcode::{AdminOpcode, NvmOpcode},
    status::Status,
};
use zerocopy::FromBytes;

use super::{
    super::{
        Config, DoorbellMode, NamespaceQuota,
        fixture::{FakeGuest, sqe, test_config},
    },
    effects,
};

/// An admin command.
fn admin(opcode: AdminOpcode, nsid: u32) -> Sqe {
    sqe(opcode.0, nsid)
}

fn code(cqe: &Cqe) -> Status {
    cqe.status().code()
}

/// Submits an admin command and checks how it ends.
#[track_caller]
fn expect(guest: &mut FakeGuest, sqe: Sqe, status: Status) -> u32 {
    let cqe = guest.admin(sqe);
    assert_eq!(code(&cqe), status.code(), "opcode {:#x} cdw10 {:#x} cdw11 {:#x}", sqe.opcode, sqe.cdw10, sqe.cdw11);
    cqe.dw0
}

/// Submits an admin command that returns a structure.
#[track_caller]
fn reading<T: FromBytes>(guest: &mut FakeGuest, sqe: Sqe) -> T {
    let (cqe, bytes) = guest.command_reading(0, sqe, size_of::<T>());
    assert_eq!(code(&cqe), Status::SUCCESS, "opcode {:#x} cdw10 {:#x}", sqe.opcode, sqe.cdw10);
    T::read_from_bytes(&bytes).unwrap_or_else(|_| panic!("as many bytes as were asked for"))
}

/// Submits an admin command that returns 4 KiB, and checks how it ends.
#[track_caller]
fn expect_reading(guest: &mut FakeGuest, sqe: Sqe, status: Status) -> Vec<u8> {
    let (cqe, bytes) = guest.command_reading(0, sqe, 4096);
    assert_eq!(code(&cqe), status.code(), "opcode {:#x} cdw10 {:#x} nsid {:#x}", sqe.opcode, sqe.cdw10, sqe.nsid.0);
    bytes
}

/// A copy with a change.
fn with<T: Clone>(value: &T, change: impl FnOnce(&mut T)) -> T {
    let mut value = value.clone();
    change(&mut value);
    value
}

/// A controller that supports everything, enabled.
fn boot_with_all() -> FakeGuest {
    let quota = NamespaceQuota { bytes: 16 << 20 };
    let mut guest = FakeGuest::new(Config { doorbells: DoorbellMode::Messages, quota, ..test_config() });
    guest.enable();
    guest
}

/// A volume whose requests wait until it is opened.
struct Gated {
    inner: Arc<MemoryVolume>,
    open: AtomicBool,
    called_off: AtomicBool,
}

impl Gated {
    fn create(bytes: u64) -> Arc<Self> {
        let inner = MemoryVolume::create("gated", bytes, BlockSize::B512).expect("a volume");
        Arc::new(Self { inner, open: AtomicBool::new(false), called_off: AtomicBool::new(false) })
    }

    fn open(&self) {
        self.open.store(true, Ordering::Release);
    }
}

impl Volume for Gated {
    millrace_block::passes_on!(inner);

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        Step::Wait(cx.scratch.place_future(async move {
            while !self.open.load(Ordering::Acquire) {
                yield_now().await;
            }
            self.inner.submit(cx, request).await
        }))
    }

    fn call_off(&self, _: Asker) {
        self.called_off.store(true, Ordering::Release);
    }

    fn scratch_bytes(&self) -> usize {
        self.inner.scratch_bytes() + 1024
    }
}

/// A read of one block into a fresh page.
fn read_block(guest: &mut FakeGuest, nsid: u32) -> Sqe {
    let mut read = sqe(NvmOpcode::READ.0, nsid);
    read.dptr = DataPointer::prps(guest.alloc_pages(1), 0);
    read
}

#[test]
fn admin_opcodes_are_those_of_the_table() {
    for everything in [false, true] {
        let mut guest = if everything { boot_with_all() } else { FakeGuest::boot() };
        for opcode in (0..=u8::MAX).map(AdminOpcode).filter(|&opcode| opcode != AdminOpcode::ASYNC_EVENT_REQUEST) {
            let cqe = guest.admin(admin(opcode, 0));
            let supported = effects::admin(&guest.controller.config, opcode).is_some();
            assert_eq!(code(&cqe) != Status::INVALID_OPCODE, supported, "{opcode}");
        }
    }
}

#[test]
fn io_opcodes_are_those_of_the_table() {
    let mut guest = FakeGuest::boot();
    guest.add_memory_volume(1, 1 << 20, BlockSize::B512);
    guest.make_queues(1, 64);
    for opcode in (0..=u8::MAX).map(NvmOpcode) {
        let cqe = guest.command(1, sqe(opcode.0, 1));
        assert_eq!(code(&cqe) != Status::INVALID_OPCODE, effects::io(opcode).is_some(), "{opcode}");
    }
}

#[test]
fn sgls_and_fused_commands_do_not_exist_in_the_admin_queue() {
    let mut guest = FakeGuest::boot();
    for psdt in [Psdt::SGL_MPTR_CONTIGUOUS, Psdt::SGL_MPTR_SGL, Psdt(3)] {
        let mut sqe = admin(AdminOpcode::IDENTIFY, 0);
        sqe.cdw10 = 1;
        sqe.flags = sqe.flags.with_psdt(psdt);
        expect_reading(&mut guest, sqe, Status::INVALID_FIELD);
    }
    for fuse in [Fuse::FIRST, Fuse::SECOND, Fuse(3)] {
        let mut sqe = admin(AdminOpcode::ABORT, 0);
        sqe.flags = sqe.flags.with_fuse(fuse);
        expect(&mut guest, sqe, Status::INVALID_FIELD);
    }
}

#[test]
fn data_pointers_of_admin_commands_are_checked() {
    let mut guest = FakeGuest::boot();
    let page = guest.alloc_pages(2);
    let mut sqe = admin(AdminOpcode::IDENTIFY, 0);
    sqe.cdw10 = 1;
    // Nowhere; over the end of the address space; misaligned; its second page nowhere.
    for (prps, status) in [
        ((0x1000, 0), Status::DATA_TRANSFER_ERROR),
        ((u64::MAX - 0xfff, 0), Status::DATA_TRANSFER_ERROR),
        ((page + 1, page + 4096), Status::PRP_OFFSET_INVALID),
        ((page + 4, 0x1000), Status::DATA_TRANSFER_ERROR),
    ] {
        sqe.dptr = DataPointer::prps(prps.0, prps.1);
        expect(&mut guest, sqe, status);
    }
    // A structure that begins within a page.
    sqe.dptr = DataPointer::prps(page + 1024, page + 4096);
    expect(&mut guest, sqe, Status::SUCCESS);
    assert_eq!(guest.read(page + 1024 + 77, 1), [8], "MDTS");
}
