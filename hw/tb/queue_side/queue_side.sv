// The queue side of a core put together as core.sv does it, with the command side and the registers left to the test.
`default_nettype none

module queue_side
    import millrace_pkg::*;
#(
    parameter int AHEAD = 0
) (
    input  wire logic               clk,
    input  wire logic               rst,
    input  wire logic [7:0]         tick,

    input  wire logic               db_valid,
    input  wire logic [QUEUE_W-1:0] db_queue,
    input  wire logic               db_cq,
    input  wire logic [15:0]        db_value,
    output      logic               fault_valid,
    output      logic [QUEUE_W-1:0] fault_queue,
    output      logic [1:0]         fault_code,

    input  wire logic               qc_wr_valid,
    output      logic               qc_wr_ready,
    input  wire logic [QUEUE_W+1:0] qc_wr_addr,
    input  wire logic [63:0]        qc_wr_data,
    input  wire logic               qc_rd_valid,
    output      logic               qc_rd_ready,
    input  wire logic [QUEUE_W-1:0] qc_rd_queue,
    output      logic [63:0]        qc_rd_data,
    input  wire logic               fc_wr_en,
    input  wire logic [LF_W+2:0]    fc_wr_addr,
    input  wire logic [63:0]        fc_wr_data,

    output      logic               hrd_valid,
    input  wire logic               hrd_ready,
    output      logic [63:0]        hrd_addr,
    output      logic [4:0]         hrd_beats,
    output      logic [7:0]         hrd_tag,
    input  wire logic               hrr_valid,
    input  wire logic [7:0]         hrr_tag,
    input  wire logic [127:0]       hrr_data,
    input  wire logic               hrr_last,
    input  wire logic               hrr_error,

    output      logic               f_valid,
    input  wire logic               f_ready,
    output      logic [1:0]         f_beat,
    output      logic [SLOT_W-1:0]  f_slot,
    output      logic [QUEUE_W-1:0] f_queue,
    output      logic [127:0]       f_data,
    input  wire logic               own_valid,
    input  wire logic [SLOT_W-1:0]  own_slot,
    input  wire owner_t             own,
    input  wire logic               leg_valid,
    input  wire logic [SLOT_W-1:0]  leg_slot,
    input  wire logic [4:0]         leg_count,
    input  wire logic               end_valid,
    output      logic               end_ready,
    input  wire logic [SLOT_W-1:0]  end_slot,
    input  wire status_t            end_status,
    input  wire logic               done_valid,
    output      logic               done_ready,
    input  wire logic [SLOT_W-1:0]  done_slot,
    input  wire status_t            done_status,

    output      logic               hwr_valid,
    input  wire logic               hwr_ready,
    output      logic               hwr_kind,
    output      logic [63:0]        hwr_addr,
    output      logic [127:0]       hwr_data,
    output      logic [4:0]         hwr_bytes,
    output      logic [SLOT_W:0]    slots_free,
    output      logic               busy
);
    wire               ready_d, ready_c, ready_i;
    wire [2:0]         room, pick_count, bad_count;
    wire               pick_valid, pick_ready, pick_wrap, bad_valid, bad_ready;
    wire [QUEUE_W-1:0] pick_queue, bad_queue, took_queue, posted_queue, irq_queue;
    wire [5:0]         pick_index, took_head, posted_tail;
    wire               slot_valid, slot_take, took_valid, posted_valid, posted_phase;
    wire [SLOT_W-1:0]  slot, cpl_slot, free_slot;
    wire [6:0]         staged;
    wire               cpl_valid, cpl_ready, cqe_valid, cqe_ready, free_valid, irq_valid, irq_ready, msi_valid, msi_ready;
    wire owner_t       cpl_owner;
    wire status_t      cpl_status;
    wire [63:0]        cqe_addr;
    wire [127:0]       cqe_data;
    wire [LF_W-1:0]    msi_function;
    wire [7:0]         msi_vector;
    wire               busy_d, busy_c, busy_i;

    wire   qc_wr_en = qc_wr_valid && qc_wr_ready;
    assign qc_wr_ready = ready_d && ready_c && ready_i;
    assign busy = busy_d || busy_c || busy_i || staged != '0 || !slots_free[SLOT_W] || hwr_valid;

    doorbells doorbells (.*, .qc_wr_ready(ready_d), .busy(busy_d));
    sq_fetch #(.AHEAD(AHEAD)) sq_fetch (.*);
    slots slots (.*);
    completion completion (.*, .qc_wr_ready(ready_c), .busy(busy_c));
    interrupts interrupts (.*, .qc_wr_ready(ready_i), .busy(busy_i));
    host_writes host_writes (.*);
endmodule
`default_nettype wire
