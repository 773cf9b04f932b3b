// The command side of a core: what becomes of an entry between its fetch and the disk, and what the disks answer.
//
//   sq_fetch ──f_*──► decode ──► translate ──► functions ──► prp_list ──► submit ──► doorbells ──sdb_*──► disks
//                       │own_*       │ PRPs        │ LBA        │ lists      │ring      │leg_*, end_*          │
//                       ▼            └─────────────┴────────────┘            │          ▼                      │
//                     slots                        ▼                         ▼        slots                    │
//                       ▲                     ssd_memory ◄──────────────── rings ◄──────────────────sdr_*──────┤
//                       └──done_*── ssd_completions ◄───────────────────────────────────────────────sdw_*──────┘
//
// An entry for the disks is put together in place: `ssd_memory` keeps 64 bytes for each slot, and every stage writes there what it finds
// out. So what travels is little more than a slot's number; commands overtake each other without anything being copied; and a command for
// several disks is one entry, named in several rings. A disk sees an ordinary submission queue: its reads go through its ring.
//
// Invariants: a command leaves by exactly one of `end_*` and `leg_*`; it names at most one translated list, which is free again with
// `free_*`; commands of one local function pass `functions` in the order of `f_*`.
// Cycles: 4 per command sustained, and what the storage functions take beyond that.
`default_nettype none

module commands
    import millrace_pkg::*;
#(
    parameter int          LF        = 16,
    parameter int          SSDS      = 1,
    parameter int          PAGES     = 512,
    parameter int          LISTS     = 16,
    parameter int          CORE      = 0,                          // chip address bits 17:14
    parameter logic [63:0] CHIP_BASE = 64'h0001_0000_0000_0000     // where disks find chip addresses: above all host addresses
) (
    input  wire logic                        clk,
    input  wire logic                        rst,
    input  wire logic [31:0]                 now,        // register 0003h

    // From sq_fetch: four beats an entry, in order.
    input  wire logic                        f_valid,
    output      logic                        f_ready,
    input  wire logic [1:0]                  f_beat,
    input  wire logic [SLOT_W-1:0]           f_slot,
    input  wire logic [QUEUE_W-1:0]          f_queue,
    input  wire logic [127:0]                f_data,

    // To slots, as slots.sv says.
    output      logic                        own_valid,
    output      logic [SLOT_W-1:0]           own_slot,
    output      owner_t                      own,
    output      logic                        leg_valid,
    output      logic [SLOT_W-1:0]           leg_slot,
    output      logic [4:0]                  leg_count,
    output      logic                        end_valid,
    input  wire logic                        end_ready,
    output      logic [SLOT_W-1:0]           end_slot,
    output      status_t                     end_status,
    output      logic                        done_valid,
    input  wire logic                        done_ready,
    output      logic [SLOT_W-1:0]           done_slot,
    output      status_t                     done_status,
    // From completion: the slot is free again (the same pulse that slots.sv gets).
    input  wire logic                        free_valid,
    input  wire logic [SLOT_W-1:0]           free_slot,

    // Host reads: tags 80h to 8Fh. Answers with other tags are others'.
    output      logic                        hrd_valid,
    input  wire logic                        hrd_ready,
    output      logic [63:0]                 hrd_addr,
    output      logic [4:0]                  hrd_beats,
    output      logic [7:0]                  hrd_tag,
    input  wire logic                        hrr_valid,
    input  wire logic [7:0]                  hrr_tag,
    input  wire logic [127:0]                hrr_data,
    input  wire logic                        hrr_last,
    input  wire logic                        hrr_error,

    // Disks.
    output      logic                        sdb_valid,
    input  wire logic                        sdb_ready,
    output      logic [3:0]                  sdb_ssd,
    output      logic                        sdb_cq,
    output      logic [15:0]                 sdb_value,
    input  wire logic                        sdr_valid,
    output      logic                        sdr_ready,
    input  wire logic [13:0]                 sdr_addr,
    input  wire logic [4:0]                  sdr_beats,
    input  wire logic [7:0]                  sdr_tag,
    output      logic                        sdd_valid,
    input  wire logic                        sdd_ready,
    output      logic [7:0]                  sdd_tag,
    output      logic [127:0]                sdd_data,
    output      logic                        sdd_last,
    input  wire logic                        sdw_valid,
    output      logic                        sdw_ready,
    input  wire logic [13:0]                 sdw_addr,
    input  wire logic [127:0]                sdw_data,

    // Register tables. They are written only; reads are for the core to answer, with zero.
    input  wire logic                        cfg_wr_en,   // 3000h + address: 16 words a local function; stays until it is ready
    output      logic                        cfg_wr_ready,
    input  wire logic [11:0]                 cfg_wr_addr,
    input  wire logic [63:0]                 cfg_wr_data,
    input  wire logic                        page_wr_en,  // 8000h + address: PAGES rows a local function; done at once
    input  wire logic [14:0]                 page_wr_addr,
    input  wire logic [63:0]                 page_wr_data,
    input  wire logic [SSDS-1:0]             ssd_write,   // 0010h + disk was written: its queue pair starts anew
    input  wire logic [SSDS-1:0]             ssd_enabled, // from the cycle after `ssd_write` on

    output      logic                        busy         // something is to be done beside the commands in slots
);
    // Ports for the core that is put together around it; what is inside comes module by module.
    wire unused = &{1'b0, clk, rst, now, f_valid, f_beat, f_slot, f_queue, f_data, end_ready, done_ready, free_valid, free_slot, hrd_ready,
        hrr_valid, hrr_tag, hrr_data, hrr_last, hrr_error, sdb_ready, sdr_valid, sdr_addr, sdr_beats, sdr_tag, sdd_ready, sdw_valid,
        sdw_addr, sdw_data, cfg_wr_en, cfg_wr_addr, cfg_wr_data, page_wr_en, page_wr_addr, page_wr_data, ssd_write, ssd_enabled,
        LF != 0, PAGES != 0, LISTS != 0, CORE != 0, CHIP_BASE != 0};
    always_comb begin
        {f_ready, own_valid, own_slot, own, leg_valid, leg_slot, leg_count, end_valid, end_slot, end_status} = '0;
        {done_valid, done_slot, done_status, hrd_valid, hrd_addr, hrd_beats, hrd_tag, sdb_valid, sdb_ssd, sdb_cq, sdb_value} = '0;
        {sdr_ready, sdd_valid, sdd_tag, sdd_data, sdd_last, sdw_ready, cfg_wr_ready, busy} = '0;
    end
endmodule

`default_nettype wire
