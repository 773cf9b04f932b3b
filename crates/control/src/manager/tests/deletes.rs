//! Volumes that are deleted: what may hang holds up nobody else.

use millrace_backends::MemoryVolume;
use millrace_block::{
    BlockCount, BlockSize, Geometry, Request, Step, TaskContext, Usage, Volume as BlockVolume, VolumeError,
};

use super::*;
use crate::manager::volumes::namespace;

/// A volume that tells when it is closed whether what exists was locked meanwhile.
struct Witness {
    inner: Arc<dyn BlockVolume>,
    manager: Weak<Manager>,
    was_locked: Sender<bool>,
}

impl Drop for Witness {
    fn drop(&mut self) {
        let manager = self.manager.upgrade().unwrap();
        // Others lock it for a moment.
        let is_free = (0..1000).any(|_| {
            manager.inner.try_lock().is_ok() || {
                thread::sleep(Duration::from_millis(1));
                false
            }
        });
        self.was_locked.send(!is_free).unwrap();
    }
}

impl BlockVolume for Witness {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit<'a>(&'a self, cx: TaskContext<'a>, request: Request<'a>) -> Step<'a> {
        self.inner.submit(cx, request)
    }

    fn scratch_bytes(&self) -> usize {
        self.inner.scratch_bytes()
    }

    fn resize(&self, blocks: BlockCount) -> Result<(), VolumeError> {
        self.inner.resize(blocks)
    }

    fn format(&self, block_size: BlockSize) -> Result<(), VolumeError> {
        self.inner.format(block_size)
    }

    fn usage(&self) -> Usage {
        self.inner.usage()
    }
}

/// A file that hangs takes its time to be closed.
#[test]
fn a_volume_is_closed_when_what_exists_is_not_locked() {
    let rig = Rig::new();
    rig.create_volume(&volume("v", "1M", "memory")).unwrap();
    let (was_locked, told) = channel();
    let inner = MemoryVolume::create("witness", 1 << 20, BlockSize::B512).unwrap();
    let witness = Arc::new(Witness { inner, manager: Arc::downgrade(rig.manager.as_ref().unwrap()), was_locked });
    {
        let mut inner = rig.peek();
        let volume = inner.volumes.get_mut("v").unwrap();
        volume.live = Ok(namespace(witness, &volume.record, None));
    }
    rig.delete_volume("v").unwrap();
    assert_eq!(told.recv_timeout(PATIENCE), Ok(false));
}
