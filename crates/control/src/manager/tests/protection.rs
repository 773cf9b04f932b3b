//! Namespaces with protection information: a volume of the `metadata` service through a real device, by our own driver.

use std::os::unix::fs::FileExt;

use millrace_block::{BlockCount, Lba};
use millrace_driver::{
    Command, DmaBuffer, Metadata, Namespace, Protection, QueueOptions, QueuePair,
    spec::{AdminOpcode, NamespaceId, NvmOpcode, nvm::ProtectionInfo},
};
use millrace_frontends::nvme::Status;

use super::*;
use crate::model::CopyState;

/// Of 4096 bytes.
const BLOCKS: u64 = 2048;
const TAG: u16 = 0x4d52;

fn tagged(rig: &Rig, name: &str, settings: &str, block_size: u32) -> VolumeSpec {
    let stack = format!("meter(tenant=acme) | metadata({settings}, file:{})", rig.path(&format!("{name}.img")).display());
    let size = BLOCKS * 4096;
    let spec = serde_json::json!({ "name": name, "size": size, "stack": stack, "block_size": block_size });
    serde_json::from_value(spec).unwrap()
}

/// A guest of our own with one queue and some memory.
struct Disk {
    guest: Controller,
    queue: QueuePair,
    namespace: Namespace,
    buffer: DmaBuffer,
}

impl Disk {
    fn new(rig: &Rig, device: &str) -> Self {
        let mut guest = guest(rig, device);
        let queue = guest.create_queue_pair(&QueueOptions::default()).unwrap();
        let namespace = guest.namespace(NamespaceId(1)).unwrap();
        let buffer = guest.memory().alloc(1 << 20).unwrap();
        Self { guest, queue, namespace, buffer }
    }

    fn run(&mut self, command: &Command) -> Status {
        match self.queue.execute(command) {
            Ok(_) => Status::SUCCESS,
            Err(error) => error.status().expect("a status").code(),
        }
    }

    fn unit(&self) -> usize {
        self.namespace.block_size() as usize
    }

    fn is_extended(&self) -> bool {
        self.namespace.identify().flbas.metadata_extended()
    }

    fn kind(&self) -> u8 {
        self.namespace.identify().dps.pit()
    }

    /// Blocks from 10 on of bytes made of a seed, with protection information; and how to speak of them.
    fn blocks(&self, count: usize, seed: u8) -> (Vec<u8>, Vec<u8>, Protection) {
        let data: Vec<u8> = (0..count * self.unit()).map(|at| ((at * 7) >> 3) as u8 ^ seed).collect();
        let crc = |data: &[u8]| crc_fast::checksum(crc_fast::CrcAlgorithm::Crc16T10Dif, data) as u16;
        let reference = |at: usize| if self.kind() == 3 { 10 } else { 10 + at as u32 };
        let tuples = data.chunks(self.unit()).enumerate();
        // The most significant bytes come first.
        let tuple =
            |at, data: &[u8]| (u64::from(crc(data)) << 48 | u64::from(TAG) << 32 | u64::from(reference(at))).to_be_bytes();
        let tags = tuples.flat_map(|(at, data)| tuple(at, data)).collect();
        let info = ProtectionInfo::new().with_check_guard(true).with_check_application(true);
        let info = info.with_check_reference(self.kind() != 3);
        (data, tags, Protection { info, reference: 10, application: TAG, mask: 0xffff })
    }

    /// A command on blocks from 10 on, with this in its memory.
    fn command(&self, opcode: NvmOpcode, protection: &Protection, data: &[u8], tags: &[u8]) -> Command {
        let count = BlockCount((data.len() / self.unit()) as u64);
        let apart = self.buffer.slice(512 << 10, tags.len());
        let (len, metadata) = match (protection.info.pract(), self.is_extended()) {
            (true, _) => (data.len(), Metadata::None),
            (false, true) => (data.len() + tags.len(), Metadata::Extended),
            (false, false) => (data.len(), Metadata::Separate(apart)),
        };
        let blocks = data.chunks(self.unit()).zip(tags.chunks(8));
        if let Metadata::Extended = metadata {
            let all: Vec<u8> = blocks.flat_map(|(data, tag)| [data, tag].concat()).collect();
            self.buffer.write_at(0, &all);
        } else {
            self.buffer.write_at(0, data);
            self.buffer.write_at(512 << 10, tags);
        }
        self.namespace.protected(opcode, (Lba(10), count), self.buffer.slice(0, len), metadata, protection).unwrap()
    }

    /// What a read left in the memory.
    fn found(&self, count: usize) -> (Vec<u8>, Vec<u8>) {
        if !self.is_extended() {
            return (self.buffer.read_vec(0, count * self.unit()), self.buffer.read_vec(512 << 10, count * 8));
        }
        let all = self.buffer.read_vec(0, count * (self.unit() + 8));
        let blocks: Vec<_> = all.chunks(self.unit() + 8).map(|block| block.split_at(self.unit())).collect();
        let data = blocks.iter().flat_map(|(data, _)| data.to_vec()).collect();
        (data, blocks.iter().flat_map(|(_, tag)| tag.to_vec()).collect())
    }

    /// Writes and reads with the metadata, and without.
    fn exercise(&mut self) {
        for count in [1, 5, 80] {
            let (data, tags, protection) = self.blocks(count, 1);
            let write = self.command(NvmOpcode::WRITE, &protection, &data, &tags);
            assert_eq!(self.run(&write), Status::SUCCESS);
            let read = self.command(NvmOpcode::READ, &protection, &vec![0; data.len()], &vec![0; tags.len()]);
            assert_eq!(self.run(&read), Status::SUCCESS);
            assert!(self.found(count) == (data, tags));
            let (data, mut tags, _) = self.blocks(count, 2);
            tags[8 * (count - 1)] ^= 1;
            let write = self.command(NvmOpcode::WRITE, &protection, &data, &tags);
            assert_eq!(self.run(&write), Status::GUARD_CHECK_ERROR);
            // Left to the controller: what a driver does that knows nothing of them.
            self.buffer.write_at(0, &data);
            let plain = self.namespace.write(Lba(10), self.buffer.slice(0, data.len())).unwrap();
            assert_eq!(self.run(&plain), Status::SUCCESS);
            self.buffer.fill(0);
            let plain = self.namespace.read(Lba(10), self.buffer.slice(0, data.len())).unwrap();
            assert_eq!(self.run(&plain), Status::SUCCESS);
            assert!(self.buffer.read_vec(0, data.len()) == data);
        }
        let flush = self.namespace.flush();
        assert_eq!(self.run(&flush), Status::SUCCESS);
    }
}

#[test]
fn every_type_and_form_of_metadata_is_there_again_after_a_restart() {
    for block_size in [512, 4096] {
        for kind in 1..=3 {
            for transfer in ["separate", "extended"] {
                let mut rig = Rig::new();
                let settings = format!("protection={kind}, transfer={transfer}");
                rig.create_volume(&tagged(&rig, "p", &settings, block_size)).unwrap();
                rig.create_device(&device("d", "{}")).unwrap();
                rig.attach("d", &attach("p", None)).unwrap();
                let mut disk = Disk::new(&rig, "d");
                assert_eq!(
                    (disk.kind(), disk.is_extended(), disk.unit()),
                    (kind, transfer == "extended", block_size as usize)
                );
                disk.exercise();
                let (data, tags, protection) = disk.blocks(7, 9);
                let write = disk.command(NvmOpcode::WRITE, &protection, &data, &tags);
                assert_eq!(disk.run(&write), Status::SUCCESS);
                rig.stop();
                drop(disk);
                rig.start();
                let mut disk = Disk::new(&rig, "d");
                let read = |disk: &Disk| disk.command(NvmOpcode::READ, &protection, &vec![0; data.len()], &[0; 56]);
                let command = read(&disk);
                assert_eq!(disk.run(&command), Status::SUCCESS);
                assert!(disk.found(7) == (data.clone(), tags));
                // A bit flips below: after the header and the first group's pages.
                let file = fs::OpenOptions::new().read(true).write(true).open(rig.path("p.img")).unwrap();
                let at = (64 << 10) + 8192 + 12 * u64::from(block_size) + 99;
                let mut byte = [0];
                file.read_exact_at(&mut byte, at).unwrap();
                file.write_all_at(&[byte[0] ^ 4], at).unwrap();
                let command = read(&disk);
                assert_eq!(disk.run(&command), Status::GUARD_CHECK_ERROR);
                rig.stop();
            }
        }
    }
}

#[test]
fn a_guest_chooses_its_metadata_by_format_and_the_choice_is_remembered() {
    let mut rig = Rig::new();
    rig.create_volume(&tagged(&rig, "p", "protection=none", 512)).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("p", None)).unwrap();
    // 4096 bytes, metadata at the end of each block, type 2.
    let mut format = Command::admin(AdminOpcode::FORMAT_NVM);
    format.sqe.nsid = NamespaceId(1);
    format.sqe.cdw10 = 3 | 1 << 4 | 2 << 5;
    let mut controller = guest(&rig, "d");
    controller.admin(&format).unwrap();
    drop(controller);
    rig.restart();
    for _ in 0..2 {
        let mut disk = Disk::new(&rig, "d");
        assert_eq!((disk.kind(), disk.is_extended(), disk.unit()), (2, true, 4096));
        disk.exercise();
        drop(disk);
        rig.restart();
    }
    rig.create_volume(
        &serde_json::from_value(serde_json::json!({ "name": "t", "size": "2M", "block_size": 4096, "backend": "memory" }))
            .unwrap(),
    )
    .unwrap();
    let copy = serde_json::from_value(serde_json::json!({ "source": "p", "target": "t" })).unwrap();
    let error = rig.create_copy(&copy).unwrap_err().to_string();
    assert!(error.contains("has metadata with its blocks, which would be lost"), "{error}");
    let shown = serde_json::to_string(&rig.volume("p").unwrap()).unwrap();
    assert!(shown.contains("protection information of type 2"), "{shown}");
    // Without metadata it is a disk like any other.
    format.sqe.cdw10 = 1;
    let mut controller = guest(&rig, "d");
    controller.admin(&format).unwrap();
    let identify = controller.namespace(NamespaceId(1)).unwrap();
    assert_eq!((identify.identify().flbas.index(), identify.identify().dps.pit()), (1, 0));
}

#[test]
fn a_copy_of_a_volume_has_its_protection_information() {
    for kind in 1..=3 {
        let rig = Rig::new();
        for (volume, device_name) in [("p", "d"), ("q", "e")] {
            rig.create_volume(&tagged(&rig, volume, &format!("protection={kind}"), 512)).unwrap();
            rig.create_device(&device(device_name, "{}")).unwrap();
        }
        rig.attach("d", &attach("p", None)).unwrap();
        let mut disk = Disk::new(&rig, "d");
        let (data, tags, protection) = disk.blocks(200, 9);
        let write = disk.command(NvmOpcode::WRITE, &protection, &data, &tags);
        assert_eq!(disk.run(&write), Status::SUCCESS);
        let copy = serde_json::from_value(serde_json::json!({ "name": "c", "source": "p", "target": "q" })).unwrap();
        rig.create_copy(&copy).unwrap();
        let ended = || Some(rig.copy("c").unwrap()).filter(|view| view.state != CopyState::Running);
        let view = eventually("the end of a copy", ended);
        assert_eq!(view.state, CopyState::Done, "{view:?}");
        rig.attach("e", &attach("q", None)).unwrap();
        let mut disk = Disk::new(&rig, "e");
        let read = disk.command(NvmOpcode::READ, &protection, &vec![0; data.len()], &vec![0; tags.len()]);
        assert_eq!(disk.run(&read), Status::SUCCESS);
        assert!(disk.found(200) == (data, tags), "type {kind}");
    }
}

#[test]
fn a_mirror_of_volumes_with_metadata_shows_none() {
    let rig = Rig::new();
    let leg = |name: &str| format!("metadata(file:{})", rig.path(name).display());
    let stack = format!("mirror({}, {})", leg("a.img"), leg("b.img"));
    let spec = serde_json::json!({ "name": "m", "size": "1M", "stack": stack });
    rig.create_volume(&serde_json::from_value(spec).unwrap()).unwrap();
    rig.create_device(&device("d", "{}")).unwrap();
    rig.attach("d", &attach("m", None)).unwrap();
    let mut disk = Disk::new(&rig, "d");
    let identify = disk.namespace.identify();
    assert_eq!((identify.nlbaf_z, identify.mc.into_bits(), identify.dpc.into_bits()), (1, 0, 0));
    disk.buffer.write_at(0, &[7; 4096]);
    let write = disk.namespace.write(Lba(0), disk.buffer.slice(0, 4096)).unwrap();
    assert_eq!(disk.run(&write), Status::SUCCESS);
    assert!(disk.guest.namespace(NamespaceId(1)).is_ok());
}
