// One pipeline: what lies between a function's doorbell and its interrupt (docs/hardware.md, The life of a command).
//
//      db_* ─► doorbells ─pick─► sq_fetch ─f─► commands (decode ... submit) ─► sdb_*
//                  ▲               │  ▲            │     ▲                └──── sdr_*, sdd_*, sdw_*
//                  │ posted   took │  │ slot       │     │ free
//                  └── completion ◄┘  └── slots ◄──┴─────┘
//                          │  └── irq ─► interrupts
//                          ▼                 ▼
//                       host_writes ─────────────────► hwr_*          regs: reg_* to all of them
//
// Host reads: sq_fetch has tags 00h to 3Fh, commands 80h to 8Fh; they ask in turn. Answers go to both, who know their own.
// `busy` is low only when nothing would change without something from outside: no command in flight, no doorbell unserved that could be
// served, no interrupt to be sent now or later. While it is low the clock may stop; the time (0003h) stops with it.
`default_nettype none
module core
    import millrace_pkg::*;
#(
    parameter int LF    = 16,
    parameter int QP    = 4,
    parameter int SLOTS = 64,
    parameter int SSDS  = 1,
    parameter int PAGES = 512,
    parameter int LISTS = 16,
    parameter int CORE  = 0,
    parameter logic [63:0] CHIP_BASE = 64'h0
) (
    input  wire                clk,
    input  wire                rst,
    input  wire                db_valid,
    input  wire  [QUEUE_W-1:0] db_queue,
    input  wire                db_cq,
    input  wire  [15:0]        db_value,
    input  wire                reg_valid,
    output logic               reg_ready,
    input  wire                reg_write,
    input  wire  [15:0]        reg_addr,
    input  wire  [63:0]        reg_wdata,
    output logic               reg_rvalid,
    output logic [63:0]        reg_rdata,
    output logic               hrd_valid,
    input  wire                hrd_ready,
    output logic [63:0]        hrd_addr,
    output logic [4:0]         hrd_beats,
    output logic [7:0]         hrd_tag,
    input  wire                hrr_valid,
    input  wire  [7:0]         hrr_tag,
    input  wire  [127:0]       hrr_data,
    input  wire                hrr_last,
    input  wire                hrr_error,
    output logic               hwr_valid,
    input  wire                hwr_ready,
    output logic               hwr_kind,
    output logic [63:0]        hwr_addr,
    output logic [127:0]       hwr_data,
    output logic [4:0]         hwr_bytes,
    output logic               sdb_valid,
    input  wire                sdb_ready,
    output logic [3:0]         sdb_ssd,
    output logic               sdb_cq,
    output logic [15:0]        sdb_value,
    input  wire                sdr_valid,
    output logic               sdr_ready,
    input  wire  [13:0]        sdr_addr,
    input  wire  [4:0]         sdr_beats,
    input  wire  [7:0]         sdr_tag,
    output logic               sdd_valid,
    input  wire                sdd_ready,
    output logic [7:0]         sdd_tag,
    output logic [127:0]       sdd_data,
    output logic               sdd_last,
    input  wire                sdw_valid,
    output logic               sdw_ready,
    input  wire  [13:0]        sdw_addr,
    input  wire  [127:0]       sdw_data,
    output logic               fault,
    output logic               busy
);
    if (LF * QP != 1 << QUEUE_W || SLOTS != 1 << SLOT_W || LF != 1 << LF_W) begin : g_sizes
        $error("core: LF, QP and SLOTS are those of millrace_pkg");
    end

    // ---- Registers
    wire               qc_wr_valid, qc_wr_en, qc_rd_valid, qc_rd_ready;
    wire [QUEUE_W+1:0] qc_wr_addr;
    wire [63:0]        qc_rd_data, wr_data;
    wire               bells_wr_ready, completion_wr_ready, interrupts_wr_ready;
    wire               fc_wr_en, cfg_wr_en, cfg_wr_ready, page_wr_en;
    wire [LF_W+2:0]    fc_wr_addr;
    wire [11:0]        cfg_wr_addr;
    wire [14:0]        page_wr_addr;
    wire [SSDS-1:0]    ssd_write, ssd_enabled;
    wire [31:0]        now;
    wire               fault_valid;
    wire [QUEUE_W-1:0] fault_queue;
    wire [1:0]         fault_code;
    wire               took_valid, posted_valid, msi_valid, msi_ready;
    wire [SLOT_W:0]    slots_free, staged;
    wire [7:0]         in_flight = 8'(SLOTS) - 8'(slots_free);

    regs #(.LF(LF), .QP(QP), .SLOTS(SLOTS), .SSDS(SSDS), .PAGES(PAGES)) regs (
        .clk, .rst, .reg_valid, .reg_ready, .reg_write, .reg_addr, .reg_wdata, .reg_rvalid, .reg_rdata,
        .qc_wr_valid, .qc_wr_ready(bells_wr_ready && completion_wr_ready && interrupts_wr_ready), .qc_wr_en, .qc_wr_addr,
        .qc_rd_valid, .qc_rd_ready, .qc_rd_data, .fc_wr_en, .fc_wr_addr, .cfg_wr_en, .cfg_wr_ready, .cfg_wr_addr, .page_wr_en, .page_wr_addr,
        .wr_data, .ssd_write, .ssd_enabled, .in_flight, .taken(took_valid), .posted(posted_valid), .interrupted(msi_valid && msi_ready),
        .fault_valid, .fault_queue, .fault_code, .fault, .now
    );

    // ---- From doorbell to entry
    wire [2:0]         room;
    wire               pick_valid, pick_ready, pick_wrap;
    wire [QUEUE_W-1:0] pick_queue;
    wire [5:0]         pick_index;
    wire [2:0]         pick_count;
    wire               bad_valid, bad_ready;
    wire [QUEUE_W-1:0] bad_queue;
    wire [2:0]         bad_count;
    wire [QUEUE_W-1:0] posted_queue;
    wire [5:0]         posted_tail;
    wire               posted_phase;
    wire               bells_busy;

    doorbells doorbells (
        .clk, .rst, .db_valid, .db_queue, .db_cq, .db_value, .fault_valid, .fault_queue, .fault_code,
        .qc_wr_valid, .qc_wr_ready(bells_wr_ready), .qc_wr_en, .qc_wr_addr, .qc_wr_data(wr_data),
        .qc_rd_valid, .qc_rd_ready, .qc_rd_queue(qc_wr_addr[QUEUE_W+1:2]), .qc_rd_data, .fc_wr_en, .fc_wr_addr, .fc_wr_data(wr_data),
        .room, .pick_valid, .pick_ready, .pick_queue, .pick_index, .pick_count, .pick_wrap, .bad_valid, .bad_ready, .bad_queue, .bad_count,
        .posted_valid, .posted_queue, .posted_tail, .posted_phase, .busy(bells_busy)
    );

    wire [1:0]         ask_valid, ask_ready;
    wire [1:0][63:0]   ask_addr;
    wire [1:0][4:0]    ask_beats;
    wire [1:0][7:0]    ask_tag;
    wire               ask_from;
    wire               slot_valid, slot_take;
    wire [SLOT_W-1:0]  slot;
    wire               f_valid, f_ready;
    wire [1:0]         f_beat;
    wire [SLOT_W-1:0]  f_slot;
    wire [QUEUE_W-1:0] f_queue;
    wire [127:0]       f_data;
    wire [QUEUE_W-1:0] took_queue;
    wire [5:0]         took_head;

    sq_fetch sq_fetch (
        .clk, .rst, .qc_wr_en, .qc_wr_addr, .qc_wr_data(wr_data),
        .room, .pick_valid, .pick_ready, .pick_queue, .pick_index, .pick_count, .pick_wrap, .bad_valid, .bad_ready, .bad_queue, .bad_count,
        .hrd_valid(ask_valid[0]), .hrd_ready(ask_ready[0]), .hrd_addr(ask_addr[0]), .hrd_beats(ask_beats[0]), .hrd_tag(ask_tag[0]),
        .hrr_valid, .hrr_tag, .hrr_data, .hrr_last, .hrr_error,
        .slot_valid, .slot, .slot_take, .slots_free, .f_valid, .f_ready, .f_beat, .f_slot, .f_queue, .f_data,
        .took_valid, .took_queue, .took_head, .staged
    );

    merge #(.N(2), .WIDTH(64 + 5 + 8)) asks (
        .clk, .rst, .in_valid(ask_valid), .in_ready(ask_ready),
        .in_data({ask_addr[1], ask_beats[1], ask_tag[1], ask_addr[0], ask_beats[0], ask_tag[0]}),
        .out_valid(hrd_valid), .out_ready(hrd_ready), .out_data({hrd_addr, hrd_beats, hrd_tag}), .out_from(ask_from)
    );

    // ---- From entry to disk and back
    wire               own_valid, leg_valid, end_valid, end_ready, done_valid, done_ready, free_valid;
    wire [SLOT_W-1:0]  own_slot, leg_slot, end_slot, done_slot, free_slot;
    wire owner_t       own;
    wire [4:0]         leg_count;
    wire status_t      end_status, done_status;
    wire               commands_busy;

    commands #(.LF(LF), .SSDS(SSDS), .PAGES(PAGES), .LISTS(LISTS), .CORE(CORE), .CHIP_BASE(CHIP_BASE)) commands (
        .clk, .rst, .now, .f_valid, .f_ready, .f_beat, .f_slot, .f_queue, .f_data,
        .own_valid, .own_slot, .own, .leg_valid, .leg_slot, .leg_count, .end_valid, .end_ready, .end_slot, .end_status,
        .done_valid, .done_ready, .done_slot, .done_status, .free_valid, .free_slot,
        .hrd_valid(ask_valid[1]), .hrd_ready(ask_ready[1]), .hrd_addr(ask_addr[1]), .hrd_beats(ask_beats[1]), .hrd_tag(ask_tag[1]),
        .hrr_valid, .hrr_tag, .hrr_data, .hrr_last, .hrr_error,
        .sdb_valid, .sdb_ready, .sdb_ssd, .sdb_cq, .sdb_value, .sdr_valid, .sdr_ready, .sdr_addr, .sdr_beats, .sdr_tag,
        .sdd_valid, .sdd_ready, .sdd_tag, .sdd_data, .sdd_last, .sdw_valid, .sdw_ready, .sdw_addr, .sdw_data,
        .cfg_wr_en, .cfg_wr_ready, .cfg_wr_addr, .cfg_wr_data(wr_data), .page_wr_en, .page_wr_addr, .page_wr_data(wr_data),
        .ssd_write, .ssd_enabled, .busy(commands_busy)
    );

    // ---- From its end to the guest
    wire               cpl_valid, cpl_ready;
    wire [SLOT_W-1:0]  cpl_slot;
    wire owner_t       cpl_owner;
    wire status_t      cpl_status;

    slots #(.SSDS(SSDS)) slots (
        .clk, .rst, .slot_valid, .slot, .slot_take, .slots_free, .own_valid, .own_slot, .own, .leg_valid, .leg_slot, .leg_count,
        .end_valid, .end_ready, .end_slot, .end_status, .done_valid, .done_ready, .done_slot, .done_status,
        .cpl_valid, .cpl_ready, .cpl_slot, .cpl_owner, .cpl_status, .free_valid, .free_slot
    );

    wire               cqe_valid, cqe_ready, irq_valid, irq_ready;
    wire [63:0]        cqe_addr;
    wire [127:0]       cqe_data;
    wire [QUEUE_W-1:0] irq_queue;
    wire               completion_busy, interrupts_busy;

    completion completion (
        .clk, .rst, .qc_wr_valid, .qc_wr_ready(completion_wr_ready), .qc_wr_en, .qc_wr_addr, .qc_wr_data(wr_data),
        .took_valid, .took_queue, .took_head, .cpl_valid, .cpl_ready, .cpl_slot, .cpl_owner, .cpl_status,
        .cqe_valid, .cqe_ready, .cqe_addr, .cqe_data, .posted_valid, .posted_queue, .posted_tail, .posted_phase,
        .free_valid, .free_slot, .irq_valid, .irq_ready, .irq_queue, .busy(completion_busy)
    );

    wire [LF_W-1:0] msi_function;
    wire [7:0]      msi_vector;
    interrupts interrupts (
        .clk, .rst, .tick(now[15:8]), .qc_wr_valid, .qc_wr_ready(interrupts_wr_ready), .qc_wr_en, .qc_wr_addr, .qc_wr_data(wr_data),
        .fc_wr_en, .fc_wr_addr, .fc_wr_data(wr_data), .irq_valid, .irq_ready, .irq_queue,
        .msi_valid, .msi_ready, .msi_function, .msi_vector, .busy(interrupts_busy)
    );

    host_writes host_writes (
        .clk, .rst, .cqe_valid, .cqe_ready, .cqe_addr, .cqe_data, .msi_valid, .msi_ready, .msi_function, .msi_vector,
        .hwr_valid, .hwr_ready, .hwr_kind, .hwr_addr, .hwr_data, .hwr_bytes
    );

    assign busy = bells_busy || commands_busy || completion_busy || interrupts_busy || db_valid || reg_valid || reg_rvalid || hrd_valid || hwr_valid
                  || staged != '0 || in_flight != '0;

    wire unused = &{1'b0, ask_from};
endmodule
`default_nettype wire
