//! Volumes that are deleted: what may hang holds up nobody else.

use super::{twisted::Twist, *};

/// Tells when it is closed whether what exists was locked meanwhile.
struct Witness {
    manager: Weak<Manager>,
    was_locked: Sender<bool>,
}

impl Twist for Witness {}

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

/// A file that hangs takes its time to be closed.
#[test]
fn a_volume_is_closed_when_what_exists_is_not_locked() {
    let rig = Rig::new();
    rig.create_volume(&volume("v", "1M", "memory")).unwrap();
    let (was_locked, told) = channel();
    rig.twist("v", Witness { manager: Arc::downgrade(rig.manager.as_ref().unwrap()), was_locked });
    rig.delete_volume("v").unwrap();
    assert_eq!(told.recv_timeout(PATIENCE), Ok(false));
}
