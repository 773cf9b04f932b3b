// The whole engine: the front, CORES cores and the crossbar between them, the host and the disks (docs/hardware.md).
//
//      bar_* ──► front ──db──► core 0 .. CORES-1 ──sdb/sdr/sdw──► crossbar ──► disk 0 .. SSDS-1
//      reg_* ──► front and cores        │
//                                       └──hrd/hwr──► crossbar ──► front (local function -> function) ──► host
//
// Ports are packed vectors, so that Verilator's C++ and Yosys take them as they are: `[SSDS-1:0][n-1:0]` is disk 0 in the lowest n bits.
// All of the contract's rules hold at these ports: `valid` never waits for `ready`, what is offered stays; hrr_* and bar_* are always taken.
//
// Register addresses (64-bit words): bits 19:16 choose the core, 15:0 are the core's map. The front has F7000h to F7FFFh:
//      F7000h + function   63 enabled, 11:8 core, 7:0 local function: whose doorbells go where. A function must be the only one of its
//                          place (core, local function); before it is moved its queues are to be disabled and idle.
//      F7800h              doorbells refused: offset outside the queues, function unknown or not enabled (31:0, counts, wraps)
//      F7801h              15:0 CORES, 31:16 FUNCTIONS, 47:32 SSDS
`default_nettype none
module engine #(
    parameter int FUNCTIONS = 16,
    parameter int CORES     = 1,
    parameter int SSDS      = 1,
    parameter int LF        = 16,
    parameter int QP        = 4,
    parameter int SLOTS     = 64,
    parameter int PAGES     = 512,
    parameter int LISTS     = 16
) (
    input  wire                      clk,
    input  wire                      rst,
    // A guest's 4-byte write to its doorbell page (BAR0 + 1000h, stride 4): always taken, one a cycle.
    input  wire                      bar_valid,
    input  wire  [7:0]               bar_function,
    input  wire  [11:0]              bar_offset,
    input  wire  [31:0]              bar_data,
    // Registers: one access at a time; a write is answered by reg_rvalid as well.
    input  wire                      reg_valid,
    output logic                     reg_ready,
    input  wire                      reg_write,
    input  wire  [19:0]              reg_addr,
    input  wire  [63:0]              reg_wdata,
    output logic                     reg_rvalid,
    output logic [63:0]              reg_rdata,
    // Reads of host memory; the tag's upper four bits are the core.
    output logic                     hrd_valid,
    input  wire                      hrd_ready,
    output logic [63:0]              hrd_addr,
    output logic [4:0]               hrd_beats,
    output logic [11:0]              hrd_tag,
    input  wire                      hrr_valid,
    input  wire  [11:0]              hrr_tag,
    input  wire  [127:0]             hrr_data,
    input  wire                      hrr_last,
    input  wire                      hrr_error,
    // Writes to host memory (hwr_kind 0) and interrupts (1): then hwr_function and hwr_vector say whose.
    output logic                     hwr_valid,
    input  wire                      hwr_ready,
    output logic                     hwr_kind,
    output logic [63:0]              hwr_addr,
    output logic [127:0]             hwr_data,
    output logic [4:0]               hwr_bytes,
    output logic [7:0]               hwr_function,
    output logic [7:0]               hwr_vector,
    // To each disk: doorbells of its queue pair `sdb_core + 1`.
    output logic [SSDS-1:0]          sdb_valid,
    input  wire  [SSDS-1:0]          sdb_ready,
    output logic [SSDS-1:0][3:0]     sdb_core,
    output logic [SSDS-1:0]          sdb_cq,
    output logic [SSDS-1:0][15:0]    sdb_value,
    // From each disk: reads and writes of chip addresses (bits 17:14 the core).
    input  wire  [SSDS-1:0]          sdr_valid,
    output logic [SSDS-1:0]          sdr_ready,
    input  wire  [SSDS-1:0][17:0]    sdr_addr,
    input  wire  [SSDS-1:0][4:0]     sdr_beats,
    input  wire  [SSDS-1:0][7:0]     sdr_tag,
    output logic [SSDS-1:0]          sdd_valid,
    input  wire  [SSDS-1:0]          sdd_ready,
    output logic [SSDS-1:0][7:0]     sdd_tag,
    output logic [SSDS-1:0][127:0]   sdd_data,
    output logic [SSDS-1:0]          sdd_last,
    input  wire  [SSDS-1:0]          sdw_valid,
    output logic [SSDS-1:0]          sdw_ready,
    input  wire  [SSDS-1:0][17:0]    sdw_addr,
    input  wire  [SSDS-1:0][127:0]   sdw_data,
    // A core has a fault for the control processor (its register 0002h).
    output logic [CORES-1:0]         fault,
    // Something is pending inside: while this is low and nothing is offered from outside, the clock may stop.
    output logic                     busy
);
    // Not joined yet: nothing is offered, nothing is taken.
    always_comb begin
        {reg_ready, reg_rvalid, hrd_valid, hwr_valid, hwr_kind, busy} = '0;
        {reg_rdata, hrd_addr, hrd_beats, hrd_tag, hwr_addr, hwr_data, hwr_bytes, hwr_function, hwr_vector} = '0;
        {sdb_valid, sdb_core, sdb_cq, sdb_value, sdr_ready, sdd_valid, sdd_tag, sdd_data, sdd_last, sdw_ready, fault} = '0;
    end
endmodule
`default_nettype wire
