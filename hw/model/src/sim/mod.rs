//! The engine of `hw/rtl`, simulated cycle by cycle: Verilator's model behind the trait.
//!
//! ```text
//!   SimEngine ── In: a cycle's inputs ──► sim/shim.cpp ──► Verilator's C++ of engine.sv
//!       ▲  └──── reads of host memory, answered after LATENCY cycles
//!       └─────── Out: what was transferred ──► Around
//! ```
//!
//! Everything that the engine offers is taken at once; its reads of host memory are answered in order, a beat a cycle. The model is
//! of fixed size: the configurations that there are were chosen when it was built (`MILLRACE_SIM`).

mod ports;

use std::collections::VecDeque;

use self::ports::{In, Model, Out};
use crate::{Around, Engine, Shape};

/// Cycles from a read of host memory to its first beat: what a read over PCI Express takes.
const LATENCY: u64 = 100;
/// Cycles for which nothing must be pending before the clock stops: what was taken in a cycle shows as pending a little later.
const REST: u32 = 8;
/// An access that takes longer will never end.
const PATIENCE: u32 = 1_000_000;

/// A beat of an answer.
struct Beat {
    due: u64,
    tag: u16,
    data: [u8; 16],
    last: bool,
    error: bool,
}

/// See the module.
pub struct SimEngine {
    shape: Shape,
    model: Model,
    inputs: In,
    outputs: Out,
    beats: VecDeque<Beat>,
    now: u64,
    /// Cycles for which nothing was pending.
    rest: u32,
}

impl SimEngine {
    /// An engine after reset.
    ///
    /// # Errors
    /// There is no model with so many cores and disks; the text says which there are.
    pub fn new(shape: Shape) -> Result<Self, String> {
        let built = ports::BUILT.iter().find(|built| (built.cores, built.ssds) == (shape.cores, shape.ssds));
        let built = built.ok_or_else(|| {
            let all: Vec<String> = ports::BUILT.iter().map(|built| format!("{}x{}", built.cores, built.ssds)).collect();
            format!(
                "there is no model of {}x{} (cores x disks), but of {}; build with MILLRACE_SIM={}x{} for another",
                shape.cores,
                shape.ssds,
                all.join(", "),
                shape.cores,
                shape.ssds
            )
        })?;
        if shape.spaces > ports::SPACES {
            return Err(format!("there are models with {} spaces of FastPath, not with {}", ports::SPACES, shape.spaces));
        }
        let all = u16::MAX;
        let inputs = In { hrd_ready: 1, hwr_ready: 1, sdb_ready: all, sdd_ready: all, ..In::default() };
        let (model, outputs) = (Model::new(built), Out::default());
        let mut engine = Self { shape, model, inputs, outputs, beats: VecDeque::new(), now: 0, rest: 0 };
        engine.reset();
        Ok(engine)
    }

    fn reset(&mut self) {
        self.inputs.rst = 1;
        (0..16).for_each(|_| self.cycle(&mut Nowhere));
        self.inputs.rst = 0;
        // Free slots and other tables are filled.
        (0..1024).for_each(|_| self.cycle(&mut Nowhere));
        self.now = 0;
    }

    /// One cycle with the inputs as they are, and all that comes of it.
    fn cycle(&mut self, around: &mut dyn Around) {
        let beat = self.beats.front().is_some_and(|beat| beat.due <= self.now).then(|| self.beats.pop_front()).flatten();
        self.inputs.hrr_valid = u8::from(beat.is_some());
        if let Some(beat) = beat {
            self.inputs.hrr_tag = beat.tag;
            self.inputs.hrr_data = words(&beat.data);
            (self.inputs.hrr_last, self.inputs.hrr_error) = (beat.last.into(), beat.error.into());
        }
        self.model.cycle(&self.inputs, &mut self.outputs);
        self.now += 1;
        self.take_host(around);
        for disk in (0..self.shape.ssds).filter(|disk| self.outputs.sdb_valid >> disk & 1 != 0) {
            let at = usize::from(disk);
            let completion = self.outputs.sdb_cq >> disk & 1 != 0;
            around.disk_doorbell(disk, self.outputs.sdb_core[at], completion, self.outputs.sdb_value[at]);
        }
        let pending = self.outputs.busy != 0 || !self.beats.is_empty();
        self.rest = if pending { 0 } else { self.rest.saturating_add(1) };
    }

    fn take_host(&mut self, around: &mut dyn Around) {
        let outputs = &self.outputs;
        if outputs.hrd_valid != 0 {
            let mut data = [0; 256];
            let beats = usize::from(outputs.hrd_beats).clamp(1, 16);
            let error = around.read_host(outputs.hrd_addr, &mut data[..beats * 16]).is_err();
            let due = self.now + LATENCY;
            let of = |at: usize| Beat {
                due,
                tag: outputs.hrd_tag,
                data: std::array::from_fn(|byte| data[at * 16 + byte]),
                last: at + 1 == beats,
                error,
            };
            self.beats.extend((0..beats).map(of));
        }
        if outputs.hwr_valid != 0 && outputs.hwr_kind == 0 {
            around.write_host(outputs.hwr_addr, &bytes(&outputs.hwr_data)[..usize::from(outputs.hwr_bytes).min(16)]);
        } else if outputs.hwr_valid != 0 {
            around.interrupt(outputs.hwr_function, outputs.hwr_vector);
        }
    }

    /// One access of the control processor.
    fn access(&mut self, write: bool, address: u32, value: u64, around: &mut dyn Around) -> u64 {
        (self.inputs.reg_valid, self.inputs.reg_write) = (1, write.into());
        (self.inputs.reg_addr, self.inputs.reg_wdata) = (address, value);
        for _ in 0..PATIENCE {
            self.cycle(around);
            if self.outputs.reg_ready != 0 {
                self.inputs.reg_valid = 0;
            }
            if self.outputs.reg_rvalid != 0 && self.inputs.reg_valid == 0 {
                self.rest = 0;
                return self.outputs.reg_rdata;
            }
        }
        panic!("the engine never answers an access to its register {address:#x}");
    }
}

impl Engine for SimEngine {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn write(&mut self, address: u32, value: u64, around: &mut dyn Around) {
        self.access(true, address, value, around);
    }

    fn read(&mut self, address: u32, around: &mut dyn Around) -> u64 {
        self.access(false, address, 0, around)
    }

    fn doorbell(&mut self, function: u8, offset: u16, value: u32, around: &mut dyn Around) {
        (self.inputs.bar_valid, self.inputs.bar_function) = (1, function);
        (self.inputs.bar_offset, self.inputs.bar_data) = (offset, value);
        self.cycle(around);
        self.inputs.bar_valid = 0;
        self.rest = 0;
    }

    fn read_chip(&mut self, disk: u8, address: u32, out: &mut [u8], around: &mut dyn Around) {
        let (at, bit, beats) = (usize::from(disk), 1 << disk, out.len() / 16);
        self.inputs.sdr_valid = bit;
        (self.inputs.sdr_addr[at], self.inputs.sdr_beats[at]) = (address, beats as u8);
        let mut chunks = out.chunks_exact_mut(16);
        for _ in 0..PATIENCE {
            self.cycle(around);
            if self.outputs.sdr_ready & bit != 0 {
                self.inputs.sdr_valid = 0;
            }
            if self.outputs.sdd_valid & bit != 0 {
                if let Some(chunk) = chunks.next() {
                    chunk.copy_from_slice(&bytes(&self.outputs.sdd_data[at]));
                }
                if self.outputs.sdd_last & bit != 0 {
                    assert!(
                        chunks.next().is_none(),
                        "the engine answers a read of the chip with as many beats as were asked for"
                    );
                    self.rest = 0;
                    return;
                }
            }
        }
        panic!("the engine never answers a read of its memory at {address:#x}");
    }

    fn write_chip(&mut self, disk: u8, address: u32, data: &[u8; 16], around: &mut dyn Around) {
        let (at, bit) = (usize::from(disk), 1 << disk);
        self.inputs.sdw_valid = bit;
        (self.inputs.sdw_addr[at], self.inputs.sdw_data[at]) = (address, words(data));
        for _ in 0..PATIENCE {
            self.cycle(around);
            if self.outputs.sdw_ready & bit != 0 {
                self.inputs.sdw_valid = 0;
                self.rest = 0;
                return;
            }
        }
        panic!("the engine never takes a write of its memory at {address:#x}");
    }

    fn run(&mut self, cycles: u64, around: &mut dyn Around) {
        let end = self.now.saturating_add(cycles);
        while self.now < end && self.is_busy() {
            self.cycle(around);
        }
    }

    fn pass(&mut self, cycles: u64, around: &mut dyn Around) {
        (0..cycles).for_each(|_| self.cycle(around));
    }

    fn is_busy(&self) -> bool {
        self.rest < REST
    }

    fn faults(&self) -> u16 {
        self.outputs.fault
    }

    fn now(&self) -> u64 {
        self.now
    }
}

/// What is around an engine that is being reset: nothing.
struct Nowhere;

impl Around for Nowhere {
    fn read_host(&mut self, _: u64, _: &mut [u8]) -> Result<(), crate::HostError> {
        Err(crate::HostError)
    }

    fn write_host(&mut self, _: u64, _: &[u8]) {}

    fn interrupt(&mut self, _: u8, _: u8) {}

    fn disk_doorbell(&mut self, _: u8, _: u8, _: bool, _: u16) {}
}

fn words(bytes: &[u8; 16]) -> [u32; 4] {
    std::array::from_fn(|word| u32::from_le_bytes(std::array::from_fn(|byte| bytes[word * 4 + byte])))
}

fn bytes(words: &[u32; 4]) -> [u8; 16] {
    std::array::from_fn(|at| words[at / 4].to_le_bytes()[at % 4])
}
