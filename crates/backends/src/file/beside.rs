//! What is done with the file beside the data path: where it has holes, and copies that the system makes.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use millrace_block::{BlockCount, Extent, Lba, PlainFile};
use rustix::{
    fs::{FsWord, SeekFrom},
    io::Errno,
};

use super::{FileVolume, open::Kind};

/// Local file systems that cannot share blocks between files: ext2 to ext4, F2FS, tmpfs.
const MOVING: [FsWord; 3] = [libc::EXT4_SUPER_MAGIC, libc::F2FS_SUPER_MAGIC, libc::TMPFS_MAGIC];

/// How much of a volume of so many bytes a file holds. FUSE, 9p and CIFS show what their server says, and that may be no blocks for a file full
/// of data: that there are none counts only if none are found either (`first_data`).
fn allocated(blocks: u64, first_data: impl FnOnce() -> rustix::io::Result<u64>, bytes: u64) -> u64 {
    if blocks == 0 && first_data() != Err(Errno::NXIO) { bytes } else { blocks.saturating_mul(512) }
}

/// Whether a file system of this kind may copy without moving the data: by sharing blocks, or at a server.
fn may_share(kind: FsWord) -> bool {
    !MOVING.contains(&kind)
}

impl FileVolume {
    pub(super) fn allocated(&self) -> u64 {
        let bytes = self.shape.bytes();
        match (self.kind, rustix::fs::fstat(&self.fd)) {
            (Kind::Regular, Ok(stat)) => {
                let first_data = || rustix::fs::seek(&self.fd, SeekFrom::Data(0));
                allocated(u64::try_from(stat.st_blocks).unwrap_or(0), first_data, bytes)
            }
            _ => bytes,
        }
    }

    pub(super) fn extent_at(&self, lba: Lba) -> Option<Extent> {
        let (block_size, blocks) = self.shape.get();
        if self.kind != Kind::Regular || lba.0 >= blocks.0 {
            return None;
        }
        let shift = block_size.shift();
        let at = lba.0 << shift;
        // The position that this moves is nobody's: all I/O says where.
        let data = match rustix::fs::seek(&self.fd, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(Errno::NXIO) => u64::MAX,
            Err(_) => return None,
        };
        let left = blocks.0 - lba.0;
        let unused = (data.saturating_sub(at) >> shift).min(left);
        if unused > 0 {
            return Some(Extent { blocks: BlockCount(unused), unused: true });
        }
        let hole = rustix::fs::seek(&self.fd, SeekFrom::Hole(data)).ok()?;
        let used = (hole.saturating_sub(at) >> shift).clamp(1, left);
        Some(Extent { blocks: BlockCount(used), unused: false })
    }
}

impl PlainFile for FileVolume {
    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn may_share(&self) -> bool {
        rustix::fs::fstatfs(&self.fd).is_ok_and(|system| may_share(system.f_type))
    }

    fn copy_from(&self, other: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<u64> {
        if self.read_only {
            return Err(Errno::ROFS.into());
        }
        let len = len.min(self.shape.bytes().saturating_sub(offset));
        let (mut from, mut to) = (offset, offset);
        let _putting = self.cached.begin();
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let copied = rustix::fs::copy_file_range(other, Some(&mut from), &self.fd, Some(&mut to), len)?;
        let copied = copied as u64;
        self.written(offset, copied);
        Ok(copied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_blocks_is_empty_only_where_no_data_are_found() {
        let bytes = 1 << 20;
        assert_eq!(allocated(0, || Ok(0), bytes), bytes);
        assert_eq!(allocated(0, || Ok(4096), bytes), bytes);
        assert_eq!(allocated(0, || Err(Errno::INVAL), bytes), bytes, "it cannot be told");
        assert_eq!(allocated(0, || Err(Errno::NXIO), bytes), 0);
        assert_eq!(allocated(8, || unreachable!("it need not be asked"), bytes), 4096);
    }

    #[test]
    fn the_system_is_asked_to_copy_where_it_need_not_move_the_data() {
        let sharing = [libc::BTRFS_SUPER_MAGIC, libc::XFS_SUPER_MAGIC, libc::NFS_SUPER_MAGIC];
        assert_eq!(sharing.map(may_share), [true; 3]);
        let moving = [libc::EXT4_SUPER_MAGIC, libc::F2FS_SUPER_MAGIC, libc::TMPFS_MAGIC];
        assert_eq!(moving.map(may_share), [false; 3]);
    }
}
