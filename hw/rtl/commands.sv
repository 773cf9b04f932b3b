// The command side of a core: what becomes of an entry between its fetch and the disk, and what the disks answer.
//
//                               page_table
//                                ▲      ▲
//   sq_fetch ──f_*──► decode ──► translate ──► functions ──► prp_list ──► submit ──► ssd_doorbells ──sdb_*──► disks
//                       │own_*      │ PRPs        │ LBA        │ lists      │ │leg_*, end_*                      │
//                       ▼           └─────────────┼────────────┘            │ ▼                                  │
//                     slots                       ▼                         │ slots                              │
//                       ▲                    ssd_memory ◄───────rings───────┘ ◄──────────────────────sdr_*──────┤
//                       └───done_*─── ssd_completions ◄──────────────────────────────────────────────sdw_*──────┘
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
    parameter logic [63:0] CHIP_BASE = 64'h0   // added to chip addresses of lists, where disks find them there
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
    localparam int PAGE_W = $clog2(PAGES);
    localparam int N_W    = $clog2(64 / SSDS);

    // ---- The pipeline
    command_t d;
    passed_t  t, f, l;
    logic     d_valid, d_ready, t_valid, t_ready, fo_valid, fo_ready, l_valid, l_ready;

    decode decode (
        .clk, .rst, .f_valid, .f_ready, .f_beat, .f_slot, .f_queue, .f_data, .own_valid, .own_slot, .own, .d_valid, .d_ready, .d
    );

    logic                a_valid, a_high, b_valid, b_ready, b_high, present, writable;
    logic [LF_W-1:0]     a_lf, b_lf;
    logic [PAGE_W-1:0]   a_page, b_page;
    logic [26:0]         frame;
    page_table #(.LF(LF), .PAGES(PAGES)) page_table (
        .clk, .wr_en(page_wr_en), .wr_addr(page_wr_addr), .wr_data(page_wr_data), .a_valid, .a_lf, .a_page, .a_high,
        .b_valid, .b_ready, .b_lf, .b_page, .b_high, .present, .writable, .frame
    );

    logic              low_en, high_en, info_en, job_to_guest, job_high;
    logic [SLOT_W+1:0] low_addr, high_addr;
    logic [63:0]       low_data, high_data, info_slba;
    logic [SLOT_W-1:0] info_slot;
    logic [31:0]       info_nsid;
    logic [15:0]       info_nlb_z;
    logic [7:0]        info_opcode;
    logic [5:0]        job_entries;
    logic [PAGE_W+17:0] job_list;
    wire               cfg_write = cfg_wr_en && cfg_wr_ready;
    translate #(.LF(LF), .PAGES(PAGES)) translate (
        .clk, .rst, .cfg_wr_en(cfg_write), .cfg_wr_addr, .cfg_wr_data, .d_valid, .d_ready, .d,
        .look_valid(a_valid), .look_lf(a_lf), .look_page(a_page), .look_high(a_high), .look_present(present),
        .look_writable(writable), .look_frame(frame), .low_en, .low_addr, .low_data, .high_en, .high_addr, .high_data,
        .info_en, .info_slot, .info_slba, .info_nsid, .info_nlb_z, .info_opcode,
        .job_entries, .job_to_guest, .job_high, .job_list, .p_valid(t_valid), .p_ready(t_ready), .p(t)
    );

    logic              word_valid, word_ready;
    logic [SLOT_W+1:0] word_addr;
    logic [63:0]       word_data;
    functions #(.LF(LF), .SSDS(SSDS)) functions (
        .clk, .rst, .now, .cfg_wr_en, .cfg_wr_ready, .cfg_wr_addr, .cfg_wr_data,
        .info_en, .info_slot, .info_slba, .info_nsid, .info_nlb_z, .info_opcode, .p_valid(t_valid), .p_ready(t_ready), .p(t),
        .o_valid(fo_valid), .o_ready(fo_ready), .o(f), .f_valid(word_valid), .f_ready(word_ready), .f_addr(word_addr), .f_data(word_data)
    );

    logic        list_valid, list_ready, list_high;
    logic [8:0]  list_addr;
    logic [63:0] list_data;
    prp_list #(.PAGES(PAGES), .LISTS(LISTS), .SSDS(SSDS), .CORE(CORE), .CHIP_BASE(CHIP_BASE)) prp_list (
        .clk, .rst, .job_en(info_en), .job_slot(info_slot), .job_entries, .job_to_guest, .job_high, .job_list,
        .p_valid(fo_valid), .p_ready(fo_ready), .p(f), .o_valid(l_valid), .o_ready(l_ready), .o(l),
        .look_valid(b_valid), .look_ready(b_ready), .look_lf(b_lf), .look_page(b_page), .look_high(b_high),
        .look_present(present), .look_writable(writable), .look_frame(frame),
        .l_valid(list_valid), .l_ready(list_ready), .l_high(list_high), .l_addr(list_addr), .l_data(list_data),
        .hrd_valid, .hrd_ready, .hrd_addr, .hrd_beats, .hrd_tag, .hrr_valid, .hrr_tag, .hrr_data, .hrr_last, .hrr_error,
        .free_valid, .free_slot
    );

    // ---- The disks' queues
    logic                     ring_en, clearing, doorbells_busy, memory_busy;
    logic [5:0]               ring_index;
    logic [SLOT_W-1:0]        ring_slot;
    logic [SSDS-1:0]          head_valid, tail_moved, cq_due, cq_told;
    logic [N_W-1:0]           head;
    logic [SSDS-1:0][N_W-1:0] tail, cq_head;
    submit #(.SSDS(SSDS)) submit (
        .clk, .rst, .p_valid(l_valid), .p_ready(l_ready), .p(l), .leg_valid, .leg_slot, .leg_count,
        .end_valid, .end_ready, .end_slot, .end_status, .ring_en, .ring_index, .ring_slot,
        .ssd_write, .ssd_enabled, .wait_all(clearing), .head_valid, .head, .tail_moved, .tail
    );
    ssd_memory ssd_memory (
        .clk, .rst, .t_low_en(low_en), .t_low_addr(low_addr), .t_low_data(low_data),
        .t_high_en(high_en), .t_high_addr(high_addr), .t_high_data(high_data),
        .f_valid(word_valid), .f_ready(word_ready), .f_addr(word_addr), .f_data(word_data),
        .l_valid(list_valid), .l_ready(list_ready), .l_high(list_high), .l_addr(list_addr), .l_data(list_data),
        .ring_en, .ring_index, .ring_slot, .sdr_valid, .sdr_ready, .sdr_addr, .sdr_beats, .sdr_tag,
        .sdd_valid, .sdd_ready, .sdd_tag, .sdd_data, .sdd_last, .busy(memory_busy)
    );
    ssd_completions #(.SSDS(SSDS)) ssd_completions (
        .clk, .rst, .sdw_valid, .sdw_ready, .sdw_addr, .sdw_data, .ssd_write, .ssd_enabled, .clearing,
        .done_valid, .done_ready, .done_slot, .done_status, .head_valid, .head, .cq_due, .cq_told, .cq_head
    );
    ssd_doorbells #(.SSDS(SSDS)) ssd_doorbells (
        .clk, .rst, .ssd_write, .tail_moved, .tail, .cq_due, .cq_told, .cq_head,
        .sdb_valid, .sdb_ready, .sdb_ssd, .sdb_cq, .sdb_value, .busy(doorbells_busy)
    );
    assign busy = doorbells_busy || memory_busy || clearing || sdw_valid;
endmodule

`default_nettype wire
