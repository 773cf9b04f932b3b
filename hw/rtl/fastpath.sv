// FastPath between the engine's crossbar and the host (docs/hardware.md, FastPath): a space's queue and lists are in a window of host addresses,
// and what cores read and write there goes no further.
//
//      crossbar ── c_hrd ──┬────────────────► host          front ── f_db ──┐
//               ◄─ c_hrr ──│◄──┬───────────── host                          ├──► db ──► cores
//               ── c_hwr ──│──┐│    ┌──hwr──► host          fp_submit ──────┘
//                    window▼  ▼│    │
//                      fp_submit  fp_complete ◄─► fp_control ◄── bar_*, reg_*
//
// Answers of the host cannot wait, so ours take cycles without one; meanwhile nothing more is asked of the host, which so runs dry. Records
// go before what cores write, but never take the place of a write that is offered already. Doorbells of guests go before ours.
// Nothing is later by this module: what passes, passes combinationally.
`default_nettype none
module fastpath
    import millrace_pkg::*;
#(
    parameter int SPACES          = 1,
    parameter int CORES           = 1,
    parameter int PAGES           = 512,
    parameter logic [63:0] WINDOW = 64'h0000_FFFF_FFE0_0000,
    localparam int SPACE_W        = SPACES > 1 ? $clog2(SPACES) : 1,
    localparam int CORE_W         = CORES > 1 ? $clog2(CORES) : 1,
    localparam int AT_W           = $clog2(SPACES * 32)
) (
    input  wire                clk,
    input  wire                rst,
    input  wire                bar_valid,
    input  wire  [7:0]         bar_function,
    input  wire  [11:0]        bar_offset,
    input  wire  [31:0]        bar_data,
    output logic               bar_mine,     // combinational: the front does not see it
    input  wire                reg_valid,
    output logic               reg_ready,
    input  wire                reg_write,
    input  wire  [9:0]         reg_addr,
    input  wire  [63:0]        reg_wdata,
    output logic               reg_rvalid,
    output logic [63:0]        reg_rdata,
    input  wire  [CORES-1:0]   f_db_valid,
    input  wire  [QUEUE_W-1:0] f_db_queue,
    input  wire                f_db_cq,
    input  wire  [15:0]        f_db_value,
    output logic [CORES-1:0]   db_valid,
    output logic [QUEUE_W-1:0] db_queue,
    output logic               db_cq,
    output logic [15:0]        db_value,
    input  wire                c_hrd_valid,
    output logic               c_hrd_ready,
    input  wire  [63:0]        c_hrd_addr,
    input  wire  [4:0]         c_hrd_beats,
    input  wire  [11:0]        c_hrd_tag,
    output logic               c_hrr_valid,
    output logic [11:0]        c_hrr_tag,
    output logic [127:0]       c_hrr_data,
    output logic               c_hrr_last,
    output logic               c_hrr_error,
    output logic               hrd_valid,
    input  wire                hrd_ready,
    input  wire                hrr_valid,
    input  wire  [11:0]        hrr_tag,
    input  wire  [127:0]       hrr_data,
    input  wire                hrr_last,
    input  wire                hrr_error,
    input  wire                c_hwr_valid,
    output logic               c_hwr_ready,
    input  wire                c_hwr_kind,
    input  wire  [63:0]        c_hwr_addr,
    input  wire  [127:0]       c_hwr_data,
    input  wire  [4:0]         c_hwr_bytes,
    output logic               hwr_valid,
    input  wire                hwr_ready,
    output logic               hwr_kind,
    output logic [63:0]        hwr_addr,
    output logic [127:0]       hwr_data,
    output logic [4:0]         hwr_bytes,
    output logic               busy
);
    if (WINDOW[20:0] != '0 || WINDOW[63:48] != '0) begin : g_window
        $error("fastpath: WINDOW is a page of 2 MiB below 2^48");
    end

    // ---- Reads
    wire          ask = c_hrd_addr[63:21] == WINDOW[63:21];
    wire          ask_ready, ans_valid, ans_last;
    wire  [11:0]  ans_tag;
    wire  [127:0] ans_data;
    assign hrd_valid   = c_hrd_valid && !ask && ask_ready;
    assign c_hrd_ready = ask_ready && (ask || hrd_ready);
    assign c_hrr_valid = hrr_valid || ans_valid;
    assign c_hrr_tag   = hrr_valid ? hrr_tag : ans_tag;
    assign c_hrr_data  = hrr_valid ? hrr_data : ans_data;
    assign c_hrr_last  = hrr_valid ? hrr_last : ans_last;
    assign c_hrr_error = hrr_valid && hrr_error;

    // ---- Writes
    wire          take = !c_hwr_kind && c_hwr_addr[63:21] == WINDOW[63:21];
    wire          pass = c_hwr_valid && !take;
    wire          w_ready, rec_valid;
    wire  [63:0]  rec_addr;
    wire  [127:0] rec_data;
    logic         passes;                    // was offered, and not taken
    wire          record = rec_valid && !passes;
    always_ff @(posedge clk) passes <= pass && !record && !hwr_ready && !rst;
    assign c_hwr_ready = take ? w_ready : hwr_ready && !record;
    assign hwr_valid   = record || pass;
    assign hwr_kind    = !record && c_hwr_kind;
    assign hwr_addr    = record ? rec_addr : c_hwr_addr;
    assign hwr_data    = record ? rec_data : c_hwr_data;
    assign hwr_bytes   = record ? 5'd16 : c_hwr_bytes;

    // ---- Doorbells
    wire                bell_valid, bell_cq;
    wire  [SPACE_W-1:0] bell_space;
    wire  [4:0]         bell_value;
    wire  [CORE_W-1:0]  bell_core;
    wire  [LF_W-1:0]    bell_local;
    wire                guest = |f_db_valid;
    always_comb begin
        for (int c = 0; c < CORES; c++) db_valid[c] = f_db_valid[c] || (!guest && bell_valid && bell_core == CORE_W'(c));
        db_queue = guest ? f_db_queue : {bell_local, {(QUEUE_W - LF_W){1'b0}}};
        db_cq    = guest ? f_db_cq : bell_cq;
        db_value = guest ? f_db_value : 16'(bell_value);
    end

    // ---- The three, and the statistics
    wire                clear_want, clear_valid, submit_still, complete_still, statistics_still;
    wire  [AT_W-1:0]    clear_at, request_at, go_at, ended_at, stat_at, look_at, issue_at;
    wire  [SPACES-1:0]  pending, big;
    wire  [SPACE_W-1:0] head_space, ended_space, end_space, took_space;
    wire  [4:0]         head_tag, end_tag, look_tag, took_index;
    wire request_t      request;
    wire                pop, go_valid, ended_valid, stat_valid, stat_done, stat_ready;
    wire                end_valid, end_ready, issue_valid, issue_all, look_busy, look_done, took_valid;
    wire  [38:0]        ring_base;
    wire  [15:0]        ring_refused;
    wire  [63:0]        stat_data;
    wire status_t       end_status;
    wire  [11:0]        issue_count;
    wire  [31:0]        stat_cycles;
    wire                control_busy, submit_busy, complete_busy;

    fp_control #(.SPACES(SPACES), .CORES(CORES)) control (
        .clk, .rst, .bar_valid, .bar_function, .bar_offset, .bar_data, .bar_mine,
        .reg_valid, .reg_ready, .reg_write, .reg_addr, .reg_wdata, .reg_rvalid, .reg_rdata,
        .clear_want, .still(submit_still && complete_still && statistics_still), .clear_valid, .clear_at,
        .pending, .big, .head_space, .head_tag, .request_at, .request, .pop,
        .bell_space, .bell_core, .bell_local, .go_valid, .go_at, .ended_valid, .ended_at, .ended_space,
        .ring_space(ended_space), .ring_base, .ring_refused, .stat_valid, .stat_at, .stat_done, .stat_data, .busy(control_busy)
    );
    fp_submit #(.SPACES(SPACES), .PAGES(PAGES)) submit (
        .clk, .rst, .clear_want, .clear_valid, .clear_at, .still(submit_still),
        .pending, .big, .head_space, .head_tag, .request_at, .request, .pop,
        .end_valid, .end_ready, .end_space, .end_tag, .end_status, .issue_valid, .issue_at, .issue_all, .issue_count,
        .look_at, .look_busy, .look_tag, .look_done, .took_valid, .took_space, .took_index,
        .bell_valid, .bell_ready(!guest), .bell_space, .bell_cq, .bell_value,
        .ask_valid(c_hrd_valid && ask), .ask_ready, .ask_addr(c_hrd_addr[17:4]), .ask_beats(c_hrd_beats), .ask_tag(c_hrd_tag),
        .ans_valid, .ans_ready(!hrr_valid), .ans_tag, .ans_data, .ans_last, .busy(submit_busy)
    );
    fp_complete #(.SPACES(SPACES)) complete (
        .clk, .rst, .clear_want, .clear_valid, .clear_at, .still(complete_still),
        .w_valid(c_hwr_valid && take), .w_ready, .w_addr(c_hwr_addr[17:4]), .w_data(c_hwr_data[127:96]),
        .took_valid, .took_space, .took_index, .look_at, .look_busy, .look_tag, .look_done,
        .end_valid, .end_ready, .end_space, .end_tag, .end_status, .issue_valid, .issue_at, .issue_all, .issue_count,
        .go_valid, .go_at, .ended_valid, .ended_at, .ended_space, .ring_base, .ring_refused,
        .rec_valid, .rec_ready(record && hwr_ready), .rec_addr, .rec_data, .stat_ready, .stat_cycles, .busy(complete_busy)
    );
    fp_statistics #(.SPACES(SPACES)) statistics (
        .clk, .rst, .clear_valid, .clear_at, .still(statistics_still),
        .in_valid(ended_valid), .in_ready(stat_ready), .in_space(ended_space), .in_cycles(stat_cycles),
        .read_valid(stat_valid), .read_at(stat_at), .read_done(stat_done), .read_data(stat_data)
    );
    assign busy = control_busy || submit_busy || complete_busy || !statistics_still;

    wire unused = &{1'b0, c_hrd_addr};
endmodule
`default_nettype wire
