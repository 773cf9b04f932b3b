//! The ports of `hw/rtl/engine.sv`, as `sim/shim.cpp` has them; and the models that were built.

use std::ffi::c_void;

/// Inputs of a cycle. Same order and sizes as in the shim.
#[repr(C)]
#[derive(Clone, Default)]
pub(super) struct In {
    pub(super) reg_wdata: u64,
    pub(super) bar_data: u32,
    pub(super) reg_addr: u32,
    pub(super) hrr_data: [u32; 4],
    pub(super) sdr_addr: [u32; 16],
    pub(super) sdw_addr: [u32; 16],
    pub(super) sdw_data: [[u32; 4]; 16],
    pub(super) bar_offset: u16,
    pub(super) hrr_tag: u16,
    pub(super) sdb_ready: u16,
    pub(super) sdr_valid: u16,
    pub(super) sdd_ready: u16,
    pub(super) sdw_valid: u16,
    pub(super) sdr_beats: [u8; 16],
    pub(super) sdr_tag: [u8; 16],
    pub(super) rst: u8,
    pub(super) bar_valid: u8,
    pub(super) bar_function: u8,
    pub(super) reg_valid: u8,
    pub(super) reg_write: u8,
    pub(super) hrd_ready: u8,
    pub(super) hrr_valid: u8,
    pub(super) hrr_last: u8,
    pub(super) hrr_error: u8,
    pub(super) hwr_ready: u8,
}

/// Outputs of a cycle.
#[repr(C)]
#[derive(Clone, Default)]
pub(super) struct Out {
    pub(super) reg_rdata: u64,
    pub(super) hrd_addr: u64,
    pub(super) hwr_addr: u64,
    pub(super) hwr_data: [u32; 4],
    pub(super) sdd_data: [[u32; 4]; 16],
    pub(super) hrd_tag: u16,
    pub(super) sdb_valid: u16,
    pub(super) sdb_cq: u16,
    pub(super) sdr_ready: u16,
    pub(super) sdd_valid: u16,
    pub(super) sdd_last: u16,
    pub(super) sdw_ready: u16,
    pub(super) fault: u16,
    pub(super) sdb_value: [u16; 16],
    pub(super) sdb_core: [u8; 16],
    pub(super) sdd_tag: [u8; 16],
    pub(super) reg_ready: u8,
    pub(super) reg_rvalid: u8,
    pub(super) hrd_valid: u8,
    pub(super) hrd_beats: u8,
    pub(super) hwr_valid: u8,
    pub(super) hwr_kind: u8,
    pub(super) hwr_bytes: u8,
    pub(super) hwr_function: u8,
    pub(super) hwr_vector: u8,
    pub(super) busy: u8,
}

/// A configuration that was built.
pub(super) struct Built {
    pub(super) cores: u8,
    pub(super) ssds: u8,
    make: unsafe extern "C" fn() -> *mut c_void,
    drop: unsafe extern "C" fn(*mut c_void),
    cycle: unsafe extern "C" fn(*mut c_void, *const In, *mut Out),
}

include!(concat!(env!("OUT_DIR"), "/built.rs"));

/// A model.
pub(super) struct Model {
    built: &'static Built,
    sim: *mut c_void,
}

impl Model {
    pub(super) fn new(built: &'static Built) -> Self {
        // SAFETY: makes an object of its own; what it needs is linked with it.
        let sim = unsafe { (built.make)() };
        Self { built, sim }
    }

    /// One cycle of the clock.
    pub(super) fn cycle(&mut self, inputs: &In, outputs: &mut Out) {
        // SAFETY: `sim` was made by the same configuration and lives; both structures have the shim's layout.
        unsafe { (self.built.cycle)(self.sim, inputs, outputs) }
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: made by `make`, and dropped once.
        unsafe { (self.built.drop)(self.sim) }
    }
}
