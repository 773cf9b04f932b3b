//! Files on tmpfs as memory (a memfd is one).

use std::{
    fs::File,
    os::{
        fd::AsFd,
        unix::fs::{FileExt, MetadataExt},
    },
    sync::Arc,
};

use super::{content as bytes, memory_file, own_memory};
use crate::FileMap;

const EXTENT: u64 = 2 << 20;

fn map(file: &File) -> Arc<FileMap> {
    let bytes = file.metadata().unwrap().len();
    FileMap::new(file.as_fd(), bytes, true).unwrap().expect("a memfd lies in memory")
}

#[test]
fn what_the_file_holds_is_copied_and_holes_are_left_alone() {
    // Data, a hole, data with a hole of one page, a piece of an extent.
    let file = File::from(memory_file(&[]));
    file.set_len(3 * EXTENT + 4096).unwrap();
    file.write_all_at(&vec![1; EXTENT as usize], 0).unwrap();
    file.write_all_at(&vec![3; EXTENT as usize - 4096], 2 * EXTENT).unwrap();
    let map = map(&file);
    let (_mapping, memory) = own_memory(16384);
    let blocks = file.metadata().unwrap().blocks();
    assert!(map.read(4096, &[memory]));
    assert_eq!(bytes(&memory), vec![1; 16384]);
    for offset in [EXTENT - 4096, EXTENT, 2 * EXTENT, 3 * EXTENT - 16384, 3 * EXTENT, 9 * EXTENT, u64::MAX - 5] {
        assert!(!map.read(offset, &[memory]) && !map.write(offset, &[memory]), "{offset:#x}");
    }
    assert_eq!(file.metadata().unwrap().blocks(), blocks, "no hole was filled");
    memory.fill(9);
    let parts = [memory.part(0, 100).unwrap(), memory.part(5000, 3996).unwrap()];
    assert!(map.write(8192, &parts));
    let mut written = [0; 4098];
    file.read_exact_at(&mut written, 8191).unwrap();
    assert!(written[0] == 1 && written[4097] == 1 && written[1..4097].iter().all(|byte| *byte == 9));
    let spread = [memory.part(10, 4000).unwrap(), memory.part(6000, 98).unwrap()];
    assert!(map.read(8191, &spread));
    assert_eq!([bytes(&spread[0]), bytes(&spread[1])].concat(), written);
}

#[test]
fn extents_come_and_go() {
    let file = File::from(memory_file(&[]));
    file.set_len(2 * EXTENT).unwrap();
    let map = map(&file);
    let (_mapping, memory) = own_memory(4096);
    assert!(!map.read(0, &[memory]));
    // The last page of an extent is what tells that it may be whole now.
    for page in 0..EXTENT / 4096 {
        file.write_all_at(&[7; 4096], page * 4096).unwrap();
        map.written(page * 4096, 4096);
    }
    assert!(map.read(0, &[memory]) && map.read(EXTENT - 4096, &[memory]) && !map.read(EXTENT, &[memory]));
    map.forget(EXTENT - 1, 1);
    assert!(!map.read(0, &[memory]));
    // Now and then any write leads to a look.
    (0..100).for_each(|_| map.written(0, 4096));
    assert!(map.read(0, &[memory]));
    map.forget(0, u64::MAX);
    assert!(!map.read(0, &[memory]));
}

#[test]
fn a_write_leads_to_a_look_at_its_own_extents() {
    let file = File::from(memory_file(&[]));
    file.set_len(5 * EXTENT).unwrap();
    let map = map(&file);
    let (_mapping, memory) = own_memory(4096);
    // A hole in the third, and all of the file behind it.
    file.write_all_at(&vec![7; 2 * EXTENT as usize], 0).unwrap();
    file.write_all_at(&vec![7; EXTENT as usize - 4096], 2 * EXTENT + 4096).unwrap();
    file.write_all_at(&vec![7; 2 * EXTENT as usize], 3 * EXTENT).unwrap();
    let blocks = file.metadata().unwrap().blocks();
    let held = || [0, 1, 2, 3, 4].map(|extent| map.read(extent * EXTENT, &[memory]));
    assert_eq!(held(), [false; 5]);
    map.written(EXTENT, 2 * EXTENT);
    assert_eq!(held(), [false, true, false, false, false]);
    map.written(3 * EXTENT, 2 * EXTENT);
    assert_eq!(held(), [false, true, false, true, true]);
    // As where data are taken out, and written again, over and over.
    map.forget(3 * EXTENT, 4096);
    assert_eq!(held(), [false, true, false, false, true]);
    map.written(4 * EXTENT - 4096, 4096);
    assert_eq!(held(), [false, true, false, true, true]);
    assert_eq!(file.metadata().unwrap().blocks(), blocks, "no hole was filled");
}

#[test]
fn a_truncated_file_is_not_copied_any_more() {
    let file = File::from(memory_file(&vec![5; EXTENT as usize]));
    let map = map(&file);
    let (_mapping, memory) = own_memory(4096);
    assert!(map.read(0, &[memory]));
    file.set_len(4096).unwrap();
    assert!(!map.read(8192, &[memory]), "what was copied after the file was cut does not count");
    assert!(!map.read(0, &[memory]) && !map.write(0, &[memory]));
}

#[test]
fn files_elsewhere_are_not_mapped() {
    let file = File::open(std::env::current_exe().unwrap()).unwrap();
    let on_disk = rustix::fs::fstatfs(&file).unwrap().f_type != libc::TMPFS_MAGIC;
    assert_eq!(FileMap::new(file.as_fd(), 4096, false).unwrap().is_none(), on_disk);
}
