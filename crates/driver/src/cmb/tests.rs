//! A controller of registers alone, whose memory is a page or more of ours.

use std::{collections::BTreeMap, os::fd::BorrowedFd};

use millrace_nvme_spec::{Sqe, registers::Capabilities};

use super::*;
use crate::{controller::Options, transport::Transport, transport::TransportError};

const SQS: BufferSize = BufferSize::new().with_sqs(true);
/// Where BAR 2 is.
const BUS: u64 = 0x38_0000_0000;

/// See the module.
#[derive(Clone)]
struct Registers {
    capabilities: Capabilities,
    version: Version,
    location: BufferLocation,
    size: BufferSize,
    /// BAR 2 and BAR 3.
    bar: [u32; 2],
    refuses: bool,
    is_taken: bool,
    area: Option<MappedArea>,
    written: Arc<Mutex<BTreeMap<u64, u32>>>,
}

impl Registers {
    /// As version 1.4 has it: four pages at the third page of BAR 2.
    fn new() -> Self {
        Self {
            capabilities: Capabilities::new().with_cmbs(true).with_css_nvm(true),
            version: Version::V1_4,
            location: BufferLocation::new().with_bir(2).with_ofst(2),
            size: SQS.with_sz(4),
            bar: [0b1100, (BUS >> 32) as u32],
            refuses: false,
            is_taken: false,
            area: Some(area(0, 16)),
            written: Arc::default(),
        }
    }

    /// As versions before 1.4 have it.
    fn old() -> Self {
        Self { capabilities: Capabilities::new().with_css_nvm(true), version: Version::V1_2, ..Self::new() }
    }

    fn written(&self, at: u64) -> Option<u32> {
        self.written.lock().unwrap().get(&at).copied()
    }

    fn control(&self) -> BufferControl {
        let [low, high] = [0, 4].map(|half| u64::from(self.written(offset::CMBMSC + half).unwrap_or(0)));
        BufferControl::from_bits(high << 32 | low)
    }
}

fn area(first_page: u64, pages: usize) -> MappedArea {
    let mapping = Arc::new(Mapping::anonymous(pages * PAGE_SIZE).unwrap());
    MappedArea { offset: first_page * PAGE_SIZE as u64, mapping }
}

impl Transport for Registers {
    fn region_read(&mut self, region: u32, at: u64, buf: &mut [u8]) -> Result<(), TransportError> {
        let told = !self.capabilities.cmbs() || self.control().cre();
        let value = match (region, at) {
            (CONFIG, 0x18) => self.bar[0].into(),
            (CONFIG, 0x1c) => self.bar[1].into(),
            (0, offset::CAP) => self.capabilities.into_bits(),
            (0, offset::VS) => self.version.into_bits().into(),
            (0, offset::CMBLOC) if told => self.location.into_bits().into(),
            (0, offset::CMBSZ) if told => self.size.into_bits().into(),
            (0, offset::CMBSTS) => u64::from(self.refuses && self.control().cmse()),
            _ => 0,
        };
        buf.copy_from_slice(&value.to_le_bytes()[..buf.len()]);
        Ok(())
    }
    fn region_write(&mut self, _: u32, at: u64, data: &[u8]) -> Result<(), TransportError> {
        self.written.lock().unwrap().insert(at, u32::from_le_bytes(data.try_into().unwrap()));
        Ok(())
    }
    fn region_write_posted(&mut self, region: u32, at: u64, data: &[u8]) -> Result<(), TransportError> {
        self.region_write(region, at, data)
    }
    fn map_region(&mut self, region: u32) -> Result<Vec<MappedArea>, TransportError> {
        Ok(self.area.iter().filter(|_| region == 2).cloned().collect())
    }
    fn dma_map(&mut self, _: DmaRange, _: BorrowedFd<'_>, _: u64) -> Result<(), TransportError> {
        Ok(())
    }
    fn dma_unmap(&mut self, _: DmaRange) -> Result<(), TransportError> {
        Ok(())
    }
    fn keep_free(&mut self, range: DmaRange) -> bool {
        assert_eq!(range.iova % PAGE_SIZE as u64, 0);
        !self.is_taken
    }
    fn vectors(&mut self) -> Result<u32, TransportError> {
        Ok(0)
    }
    fn set_vectors(&mut self, _: &[BorrowedFd<'_>]) -> Result<(), TransportError> {
        Ok(())
    }
    fn disable_vectors(&mut self) -> Result<(), TransportError> {
        Ok(())
    }
    fn reset(&mut self) -> Result<(), TransportError> {
        Ok(())
    }
    fn check(&mut self) -> Result<(), TransportError> {
        Ok(())
    }
}

fn found_with(registers: &Registers, options: &Options) -> Option<ControllerMemory> {
    let mut controller = Controller::attach(registers.clone(), options).unwrap();
    controller.find_controller_memory().unwrap();
    controller.cmb.take()
}

fn found(registers: &Registers) -> Option<ControllerMemory> {
    found_with(registers, &Options::default())
}

/// Its pages, and where they start.
fn extent(memory: &ControllerMemory) -> (usize, u64) {
    let pages: Vec<ControllerPages> = std::iter::from_fn(|| memory.alloc(1)).collect();
    (pages.len(), pages[0].range().iova)
}

#[test]
fn both_schemes_lead_to_the_part_of_the_bar() {
    let new = Registers::new();
    assert_eq!(extent(&found(&new).unwrap()), (4, BUS + 0x2000));
    let control = new.control();
    assert!(control.cre() && control.cmse());
    assert_eq!(control.cba() << 12, BUS + 0x2000);
    let old = Registers::old();
    assert_eq!(extent(&found(&old).unwrap()), (4, BUS + 0x2000));
    assert_eq!(old.written(offset::CMBMSC), None, "there is no such register");
    // A bar of 32 bits, whose upper neighbour is another.
    let low = Registers { bar: [0xfe00_0008, 7], ..Registers::new() };
    assert_eq!(extent(&found(&low).unwrap()), (4, 0xfe00_2000));
}

#[test]
fn only_what_is_mapped_is_used() {
    let short = Registers { area: Some(area(1, 3)), ..Registers::new() };
    assert_eq!(extent(&found(&short).unwrap()), (2, BUS + 0x2000), "a bridge may show less than there is");
    for mapped in [None, Some(area(3, 4)), Some(area(0, 2))] {
        assert!(found(&Registers { area: mapped, ..Registers::new() }).is_none());
    }
}

#[test]
fn what_is_not_as_it_must_be_is_left_alone() {
    let new = Registers::new;
    let plain = Capabilities::new().with_css_nvm(true);
    for (why, registers) in [
        ("a new one without", Registers { capabilities: plain, ..new() }),
        ("too old", Registers { version: Version::new().with_major(1).with_minor(1), ..Registers::old() }),
        ("not for queues", Registers { size: BufferSize::new().with_rds(true).with_sz(4), ..new() }),
        ("no size", Registers { size: SQS, ..new() }),
        ("units", Registers { size: SQS.with_sz(4).with_szu(7), ..new() }),
        (
            "all ones",
            Registers { size: BufferSize::from_bits(u32::MAX), location: BufferLocation::from_bits(u32::MAX), ..new() },
        ),
        ("no such bar", Registers { location: BufferLocation::new().with_bir(6), ..new() }),
        ("bar of ports", Registers { bar: [0xfe01, 0], ..new() }),
        ("bar unset", Registers { bar: [0b1100, 0], ..new() }),
        ("end of addresses", Registers { bar: [0xffff_c00c, u32::MAX], ..new() }),
        ("our own memory", Registers { bar: [0xffff_c00c, 0], ..new() }),
        ("another's memory", Registers { is_taken: true, ..new() }),
        ("the controller refuses", Registers { refuses: true, ..new() }),
    ] {
        assert!(found(&registers).is_none(), "{why}");
    }
    assert!(found_with(&new(), &Options { controller_memory: false, ..Options::default() }).is_none());
}

#[test]
fn pages_are_given_out_once_and_come_back() {
    let memory = found(&Registers::new()).unwrap();
    let first = memory.alloc(1).unwrap();
    let second = memory.alloc(2 * PAGE_SIZE + 1).unwrap();
    assert_eq!((second.range().iova, second.range().len), (BUS + 0x3000, 3 * PAGE_SIZE));
    assert!(memory.alloc(1).is_none());
    assert!(second.ring::<Sqe>(192).is_some() && second.ring::<Sqe>(193).is_none());
    drop(first);
    assert_eq!(memory.alloc(1).unwrap().range().iova, BUS + 0x2000);
}

#[test]
fn starting_again_finds_the_same_memory() {
    let registers = Registers::new();
    let mut controller = Controller::attach(registers.clone(), &Options::default()).unwrap();
    controller.find_controller_memory().unwrap();
    let kept = controller.cmb.as_ref().unwrap().alloc(1).unwrap();
    registers.written.lock().unwrap().clear();
    controller.find_controller_memory().unwrap();
    assert!(registers.control().cmse(), "a reset may have switched it off");
    let next = controller.cmb.as_ref().unwrap().alloc(1).unwrap();
    assert_ne!(next.range(), kept.range(), "a queue of before keeps its pages while it is there");
    controller.forgo_controller_memory();
    controller.find_controller_memory().unwrap();
    assert!(controller.cmb.is_none());
}
